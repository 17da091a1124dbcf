"""Kill the daemon, an engine's EngineCore (the scheduler half) or one of its workers while real engines are at work.

`python -m tests.crash.engine_kills --kills 6 --seed N` (without a seed it chooses one; it prints it either way). Two
engines share one daemon, whose tier is smaller than what they are asked, so that they store, evict and load all the
time. What must hold, beside what `tests.crash.kills` shows with stubs:

* Every answer has the tokens of an engine without a store, before, during and after each kill; only the requests of an
  engine that lost a process end without an answer.
* Whoever was not killed goes on. When the engines pause, not one granted or leased byte is left, `kvstore check` finds
  nothing, and what the tier holds gives the right tokens when it is loaded.
* An engine or daemon that starts again is served, without anybody else restarting.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector.testing import REQUEST_S_MAX, Engine, EngineDied, random_prompt, small_model
from tests.vllm.node import Node, wait_until
from tests.vllm.support import ARGUMENTS, MODEL, MODELS, PROMPT_TOKENS, serving_engine

VICTIMS = ("daemon", "scheduler", "worker")
ENGINES = 2
CPU_BYTES = "16MiB"  # some 80 chunks
PROMPTS = [random_prompt(1_000 + i, PROMPT_TOKENS) for i in range(14)]  # of 8 chunks each
TOGETHER_MAX = 3  # prompts asked at once
FORGETS = 0.7  # how often an engine empties its own cache, so that it must load
MOMENT_S = 3.0  # a kill comes at any moment of so long a time
ANSWERS = 4  # of each engine, before a kill and after it


def right_answers(oracle: Engine) -> list[list[int]]:
    """The tokens that belong to each of PROMPTS."""
    return [oracle.generate(prompt).tokens for prompt in PROMPTS]


@dataclass(eq=False)
class Load:
    """One engine, asked again and again by a thread of its own. That thread alone writes `answered`."""

    engine: Engine
    answered: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=Future)
    killed: bool = False

    def run(self, right: Sequence[list[int]], rnd: random.Random) -> None:
        while not self.stopping.is_set():
            if rnd.random() < FORGETS:
                self.engine.reset_prefix_cache()
            asked = rnd.sample(range(len(PROMPTS)), rnd.randint(1, TOGETHER_MAX))
            answers = self.engine.generate_many([PROMPTS[i] for i in asked])
            for i, answer in zip(asked, answers, strict=True):
                assert answer.tokens == right[i], f"wrong tokens for prompt {i}: {answer.tokens}, not {right[i]}"
            self.answered += len(asked)


class EngineKills:
    """The engines that serve on `node`; nobody is at work between calls."""

    def __init__(self, node: Node, engines: Sequence[Engine], right: Sequence[list[int]], seed: int) -> None:
        self._node = node
        self._engines = engines
        self._right = right
        self._rnd = random.Random(seed)

    def kill_once(self, victim: str) -> None:
        with self._under_load() as loads:
            self._wait_for_answers(loads)
            time.sleep(self._rnd.uniform(0, MOMENT_S))  # what this is about: the moment is a random one
            if victim == "daemon":
                self._kill_daemon(loads)
            else:
                self._kill_process(victim, self._rnd.choice(loads), loads)
        self._require_nothing_left()
        for load in sorted(loads, key=lambda load: load.killed):  # those first that never stopped
            if load.killed:
                load.engine.kill()
                load.engine.start()
                self._node.wait_for_engines(len(self._engines))
            self._require_right_tokens_from_store(load.engine)
        self._require_nothing_left()

    def _kill_daemon(self, loads: list[Load]) -> None:
        self._node.kill()
        self._wait_for_answers(loads)
        self._node.start(CPU_BYTES)
        self._node.wait_for_engines(len(self._engines))
        wait_until(lambda: self._node.store.hits() > 0, "the engines are served by the new daemon")
        self._wait_for_answers(loads)

    def _kill_process(self, role: str, hit: Load, loads: list[Load]) -> None:
        pids = self._pids(hit.engine)
        hit.killed = True
        os.kill(pids[role], signal.SIGKILL)
        self._wait_for_answers([load for load in loads if load is not hit])
        wait_until(
            lambda: not any(session["pid"] in pids.values() for session in self._sessions()),
            f"what is left of the engine ends after its {role}",
        )
        # vLLM's offline front end waits for ever for the answer of an EngineCore that was killed.
        os.killpg(hit.engine.process.pid, signal.SIGKILL)
        try:
            hit.ended.result(REQUEST_S_MAX)
        except EngineDied:
            return
        raise AssertionError(f"an engine answers without its {role}")

    def _pids(self, engine: Engine) -> dict[str, int]:
        """Of the processes of this engine that are attached, by their role."""
        return {
            session["role"]: session["pid"]
            for session in self._sessions()
            if session["role"] != "admin" and os.getpgid(session["pid"]) == engine.process.pid
        }

    def _sessions(self) -> list[dict[str, Any]]:
        sessions = self._node.daemon.stats()["sessions"]
        assert isinstance(sessions, list)
        return sessions

    # ---- load

    @contextmanager
    def _under_load(self) -> Iterator[list[Load]]:
        loads = [Load(engine) for engine in self._engines]
        with ThreadPoolExecutor(len(loads)) as threads:
            for load in loads:
                load.ended = threads.submit(load.run, self._right, random.Random(self._rnd.random()))
            try:
                yield loads
            finally:
                for load in loads:
                    load.stopping.set()
        for load in loads:
            if not load.killed:
                load.ended.result()

    def _wait_for_answers(self, loads: Sequence[Load]) -> None:
        wanted = [load.answered + ANSWERS for load in loads]

        def answered() -> bool:
            for load in loads:
                if load.ended.done():
                    load.ended.result()  # raises what ended it
            return all(load.answered >= count for load, count in zip(loads, wanted, strict=True))

        wait_until(answered, "every engine that lives answers", limit_s=REQUEST_S_MAX)

    # ---- what must hold

    def _require_nothing_left(self) -> None:
        self._node.wait_for_quiet()
        self._node.check()

    def _require_right_tokens_from_store(self, engine: Engine) -> None:
        """Of every prompt, as much of it as is there; and of the last one something must be."""
        for prompt, right in zip(PROMPTS, self._right, strict=True):
            self._require_right(engine, prompt, right)
        hits = self._node.store.hits()

        def served() -> bool:
            self._require_right(engine, PROMPTS[-1], self._right[-1])
            return self._node.store.hits() > hits

        wait_until(served, "the engine loads what was stored last")

    def _require_right(self, engine: Engine, prompt: list[int], right: list[int]) -> None:
        engine.reset_prefix_cache()
        answer = engine.generate(prompt).tokens
        assert answer == right, f"wrong tokens: {answer}, not {right}"


def kill_many(kills: int, seed: int, folder: Path, say: Callable[[str], None]) -> Counter[str]:
    """How often each kind was killed. AssertionError when anything went wrong."""
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(kills)]
    random.Random(seed).shuffle(victims)
    model = small_model(MODELS, **MODEL)
    with Engine(model, folder / "oracle.log", arguments=ARGUMENTS) as oracle:
        right = right_answers(oracle)
    node = Node(folder / "run", CPU_BYTES)
    try:
        with ExitStack() as stack:
            engines = []
            for number in range(ENGINES):
                (folder / f"{number}").mkdir()
                engines.append(stack.enter_context(serving_engine(model, node.store, folder / f"{number}")))
            node.wait_for_engines(ENGINES)
            running = EngineKills(node, engines, right, seed)
            for number, victim in enumerate(victims, 1):
                running.kill_once(victim)
                say(f"{number} of {kills}: {victim}")
        node.wait_for_quiet()
        node.stop()
    finally:
        node.kill()
    return Counter(victims)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.engine_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvstore-"))  # short: it holds sockets
    try:
        done = kill_many(options.kills, seed, folder, lambda text: print(text, flush=True))
    except (AssertionError, EngineDied) as violation:
        print(f"{violation}\nagain with: python -m tests.crash.engine_kills --kills {options.kills} --seed {seed}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kinds = ", ".join(f"{count} {victim}s" for victim, count in sorted(done.items()))
    print(f"{sum(done.values())} kills ({kinds}) in {time.monotonic() - started_s:.0f} s: no wrong token, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
