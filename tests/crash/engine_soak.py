"""Two vLLM servers on one daemon are asked at random, while the daemon is killed, hangs, or is told to forget.

`python -m tests.crash.engine_soak --seconds 600 --seed N` (without a seed it chooses one; it prints it either way). The
prompts share beginnings of any length, some go on from an answer as the next turn of a chat does, and come with several
salts; clients hang up in the middle of answers and before them. One server keeps no prefix cache, the other has so few
blocks that it preempts, and computes prompts in pieces; the memory of the daemon holds a part of the prompts, its disk
damage. What must hold, beside what `tests.crash.engine_kills` shows of killed engines:

* Every token of every answer, also of those that were left, is what an engine without a store says.
* When the clients pause, not one granted or leased byte is left, and `kvstore check` finds nothing.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from connector import metrics
from connector.testing import Engine, EngineDied, random_prompt, small_model
from tests.vllm.node import Node
from tests.vllm.server import Server
from tests.vllm.support import ARGUMENTS, MODEL, MODELS

BLOCK_TOKENS = 32
CPU_BYTES = "8MiB"  # some 160 chunks
FS_BYTES = "32MiB"
QUESTIONS = 30
PROMPT_TOKENS_MAX = 1_500
NEW_TOKENS_MAX = 400  # of a prompt that goes on from another
ANSWER_TOKENS = 24
SALTS = (None, None, "alice", "bob")
LEAVES = 0.3  # how often a client hangs up before it has the whole answer
CLIENTS = 8  # of each server
FLAGS = ("--block-size", f"{BLOCK_TOKENS}", "--max-model-len", "2048")
FLAGS_OF_EACH = (
    ("--no-enable-prefix-caching",),
    ("--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "256"),  # 4,096 tokens for eight requests
)
PAUSE_S = 4.0  # the longest between two troubles
ROUND_REQUESTS = 150  # until the clients pause
HANG_S = 2.0
EVICTS = (("--tier", "cpu"), ("--tier", "fs"), ("--bytes", "2MiB"), ("--older-than", "1s"), ("--tenant", "bob"))


@dataclass(frozen=True, slots=True)
class Question:
    prompt: list[int]
    right: list[int]


def questions(oracle: Engine, seed: int, count: int) -> list[Question]:
    """Most begin like another, or go on from its answer."""
    rnd = random.Random(seed)
    found: list[Question] = []
    while len(found) < count:
        prompt = []
        if found and rnd.random() < 0.8:
            other = rnd.choice(found)
            whole = other.prompt + other.right
            prompt = whole[: rnd.choice((len(whole), rnd.randint(1, len(whole)), BLOCK_TOKENS * rnd.randint(1, 20)))]
        prompt = prompt + random_prompt(rnd.getrandbits(32), rnd.randint(1, NEW_TOKENS_MAX))
        if len(prompt) <= PROMPT_TOKENS_MAX:
            found.append(Question(prompt, oracle.generate(prompt, max_tokens=ANSWER_TOKENS).tokens))
    return found


class Clients:
    """Threads that ask servers again and again, so many times in all, unless something was wrong."""

    def __init__(self, asked: Sequence[Question], requests: int, rnd: random.Random) -> None:
        self._asked = asked
        self._lock = threading.Lock()  # guards what follows
        self._requests = requests
        self._rnd = rnd
        self.done: Counter[str] = Counter()

    def run(self, server: Server) -> None:
        try:
            while self._ask(server):
                pass
        except BaseException:
            with self._lock:
                self._requests = 0
            raise

    def _ask(self, server: Server) -> bool:
        with self._lock:
            if self._requests == 0:
                return False
            self._requests -= 1
            question = self._rnd.choice(self._asked)
            salt = self._rnd.choice(SALTS)
            max_tokens = self._rnd.randint(1, ANSWER_TOKENS)
            leave_after = self._rnd.randrange(max_tokens) if self._rnd.random() < LEAVES else None
        got = server.complete(question.prompt, max_tokens=max_tokens, salt=salt, leave_after=leave_after)
        right = question.right[:max_tokens] if leave_after is None else question.right[: len(got)]
        assert got == right, (
            f"wrong tokens {got}, not {right}; prompt {self._asked.index(question)} of {len(question.prompt)} tokens, "
            f"salt {salt}, left after {leave_after}"
        )
        with self._lock:
            self.done["answered" if leave_after is None else "left"] += 1
            self.done["tokens"] += len(got)
        return True


class Troubles:
    """What befalls the daemon of `node` and the servers while they are at work."""

    def __init__(self, node: Node, fs: Path, servers: Sequence[Server], rnd: random.Random) -> None:
        self._node, self._fs, self._servers, self._rnd = node, fs, servers, rnd
        self._kinds: Mapping[str, tuple[int, Callable[[], None]]] = {  # how often, beside the others
            "kill": (4, self._kill),
            "stop": (4, self._stop),
            "hang": (4, self._hang),
            "evict": (8, self._evict),
            "clear": (2, self._clear),
            "quota": (4, self._quota),
            "check": (4, self._check),
            "damage": (4, self._damage),
            "preemption": (8, self._preempt),
            "reset": (1, self._reset),
        }

    def one(self) -> str:
        """Its name, once it has happened."""
        weights = [weight for weight, _ in self._kinds.values()]
        [kind] = self._rnd.choices(list(self._kinds), weights)
        self._kinds[kind][1]()
        return kind

    def _kill(self) -> None:
        self._node.kill()
        self._start_again()

    def _stop(self) -> None:
        self._node.stop()
        self._start_again()

    def _start_again(self) -> None:
        time.sleep(self._rnd.choice((0.0, self._rnd.uniform(0, PAUSE_S))))
        self._node.start(CPU_BYTES)

    def _hang(self) -> None:
        os.kill(self._node.daemon.pid, signal.SIGSTOP)
        time.sleep(self._rnd.uniform(0, HANG_S))
        os.kill(self._node.daemon.pid, signal.SIGCONT)

    def _evict(self) -> None:
        self._ask("evict", *self._rnd.choice(EVICTS))

    def _clear(self) -> None:
        self._ask("clear", "--yes")

    def _quota(self) -> None:
        which = self._rnd.choice((("unset",), ("set", "1MiB"), ("set", "0")))
        self._ask("quota", *which, "--tenant", "alice")

    def _check(self) -> None:
        self._ask("check")

    def _ask(self, *command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *command, "--endpoint", self._node.daemon.endpoint],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        absent = done.returncode == 1 and "has no chunk" in done.stderr
        assert done.returncode == 0 or absent, f"{command}: {done.returncode} {done.stdout}{done.stderr}"

    def _preempt(self) -> None:
        self._rnd.choice(self._servers).reset_prefix_cache(external=False)

    def _reset(self) -> None:
        self._rnd.choice(self._servers).reset_prefix_cache(external=True)

    def _damage(self) -> None:
        """Other bytes in a few places of every slab."""
        for slab in sorted(self._fs.glob("slab-*")):
            with open(slab, "r+b") as file:
                for _ in range(8):
                    file.seek(self._rnd.randrange(max(1, slab.stat().st_size)))
                    file.write(self._rnd.randbytes(16))


def soak(
    servers: Sequence[Server],
    asked: Sequence[Question],
    requests: int,
    rnd: random.Random,
    trouble: Callable[[], str],
) -> Counter[str]:
    """How many requests were answered and left, tokens compared, and troubles by the names that `trouble` returns.
    AssertionError at the first wrong token."""
    clients = Clients(asked, requests, random.Random(rnd.random()))
    troubles: Counter[str] = Counter()
    with ThreadPoolExecutor(CLIENTS * len(servers)) as threads:
        runs = [threads.submit(clients.run, server) for server in servers for _ in range(CLIENTS)]
        while wait(runs, rnd.uniform(0, PAUSE_S)).not_done:
            troubles[trouble()] += 1
    for run in runs:
        run.result()
    return clients.done + troubles


def soak_with_troubles(seconds: float, seed: int, folder: Path, say: Callable[[str], None]) -> Counter[str]:
    rnd = random.Random(seed)
    model = small_model(MODELS, **MODEL)
    with Engine(model, folder / "oracle.log", arguments={**ARGUMENTS, "block_size": BLOCK_TOKENS}) as oracle:
        asked = questions(oracle, seed, QUESTIONS)
    fs = folder / "fs"
    node = Node(folder / "run", CPU_BYTES, ("--fs-dir", str(fs), "--fs-bytes", FS_BYTES))
    done: Counter[str] = Counter()
    try:
        with ExitStack() as stack:
            servers = []
            for number, flags in enumerate(FLAGS_OF_EACH):
                (folder / f"{number}").mkdir()
                server = Server(model, folder / f"{number}", node.store.transfer_config(), (*FLAGS, *flags))
                servers.append(stack.enter_context(server))
            for server in servers:
                server.wait_until_healthy()
            node.wait_for_engines(len(servers))
            troubles = Troubles(node, fs, servers, rnd)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                done += soak(servers, asked, ROUND_REQUESTS, rnd, troubles.one)
                node.wait_for_engines(len(servers))
                node.wait_for_quiet()
                node.check()
                say(", ".join(f"{count} {what}" for what, count in done.items()))
            series: Counter[str] = sum((Counter(server.series()) for server in servers), Counter())
            for what in (metrics.LOADED_CHUNKS, metrics.STORED_CHUNKS, metrics.FAILED_LOADS):
                done[what] = int(series[f"{what}_total"])
            assert done[metrics.LOADED_CHUNKS] > 0, "nothing was loaded, so nothing was tested"
        node.wait_for_quiet()
        node.stop()
    finally:
        node.kill()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.engine_soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-"))  # short: it holds sockets
    try:
        done = soak_with_troubles(options.seconds, seed, folder, lambda text: print(text, flush=True))
    except (AssertionError, EngineDied) as violation:
        print(f"{violation}\nthe servers' logs are in {folder}")
        print(f"again with: python -m tests.crash.engine_soak --seconds {options.seconds:g} --seed {seed}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{count} {what}" for what, count in done.items()) + ": no wrong token, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
