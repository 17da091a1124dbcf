"""What does deciding cost the scheduler, and the connector an engine whose prompts never repeat?

Decisions: for a prompt of 8,192 chunks, of which 8,000 are in memory and 192 on disk, one load decision (limit 20 us)
and one store decision (limit 200 us); beside them what counting the uses of its keys takes, which is done once a
request, and what one observed step does. Throughput: two real engines with the same unique prompts, one with the
connector and one without, asked in turn; the limit is the one without. Two engines that are alike may differ by more
than the connector costs, so both are started anew a few times. Where other work takes the cores now and then the clock
on the wall tells little, so the seconds that cores worked for each engine, and for the daemon, stand beside it; and
those of the connector's calls in the engine's threads, which do not depend on how alike the two engines are.
They need a CPU build of vLLM and ten minutes: without `--engines` only the decisions are measured.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from benchmarks.report import Result, main, spread
from kvstore.admission import Admission, Hit, Mode, Priors, leading
from kvstore.costmodel import RecomputeModel, TransferModel
from kvstore.decisions import Room
from kvstore.testing import running_daemon

CHUNKS, IN_MEMORY, CHUNK_TOKENS, CHUNK_BYTES = 8192, 8000, 128, 16 << 20
MISS, CPU, FS, PENDING = 0, 1, 2, 3
LOAD_US_MAX, STORE_US_MAX, COUNT_US_MAX, STEP_US_MAX = 20.0, 200.0, 2000.0, 500.0
LOADS, STORES = 5_000, 300

STARTS, WARM_UP_PAIRS, PAIRS = 4, 3, 6  # of two engines, and for each start
PAUSE_S = 1.2  # a worker of vLLM's polls for a second after its last step, on the core that the other one needs
# With a connector vLLM leaves one more core to others, and where there are not as many, all to the engine.
ALIKE = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
PROMPTS, CHUNKS_PER_PROMPT, BLOCK_TOKENS = 16, 8, 128
PROMPT_TOKENS = CHUNKS_PER_PROMPT * BLOCK_TOKENS + 70


def measure() -> list[Result]:
    return [*_decisions(), *(_throughput() if "--engines" in sys.argv else [])]


def _decisions() -> list[Result]:
    link = TransferModel(44e9, 1e-2)
    model = RecomputeModel(1e-3, 2e-5, 4e-10)
    priors = Priors(recompute=model, load=link, store=link, disk=link, recompute_known=True)
    admission = Admission(Mode.MODEL, priors, tokens_per_chunk=CHUNK_TOKENS)
    for seconds in (0.1, 0.2, 0.4) * 4:
        nbytes_chunks = int(seconds * 100)
        admission.copied(store=False, chunks=nbytes_chunks, chunk_bytes=CHUNK_BYTES, seconds=seconds)
        admission.read(chunks=nbytes_chunks, chunk_bytes=CHUNK_BYTES, seconds=seconds)
    codes = bytes([CPU] * IN_MEMORY + [FS] * (CHUNKS - IN_MEMORY))

    def load() -> None:
        memory, end = leading(codes, MISS, FS, PENDING), leading(codes, MISS)
        on_disk = codes.count(FS, memory, end)
        hit = Hit(
            CHUNKS * CHUNK_TOKENS, 0, memory * CHUNK_TOKENS, end * CHUNK_TOKENS, memory, end, on_disk, CHUNK_BYTES
        )
        admission.load("request", hit, 1.0)

    chain = [number.to_bytes(32, "big") for number in range(CHUNKS)]
    nowhere = np.zeros(CHUNKS, bool)
    uses = admission.count_uses(chain)
    return [
        _timed("load decision", load, LOADS, LOAD_US_MAX),
        _timed(
            "store decision, for memory and for the disk",
            lambda: admission.decide_store(uses, nowhere, CHUNK_BYTES, tier_full=True, disk=Room.FULL, on_disk=nowhere),
            STORES,
            STORE_US_MAX,
        ),
        _timed("counting the uses of a prompt's keys", lambda: admission.count_uses(chain), STORES, COUNT_US_MAX),
        _timed("one step observed", lambda: _step(admission), STORES, STEP_US_MAX),
    ]


def _step(admission: Admission) -> None:
    admission.queue.step_began(
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=0)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], num_output_tokens=[]),
            num_scheduled_tokens={"r": 2048},
            preempted_req_ids=None,
        )
    )
    admission.step_ended()


def _timed(name: str, act: Callable[[], object], rounds: int, limit_us: float) -> Result:
    times_us = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        act()
        times_us.append((time.perf_counter_ns() - start) / 1000)
    return Result.of(name, times_us, "us", [limit_us])


class _Cost(NamedTuple):
    """Of some prompts, in seconds: on the wall, and that cores worked."""

    wall: float
    calls: float  # the connector's, of the engine
    worker: float
    engine: float  # all its processes
    daemon: float


def _throughput() -> list[Result]:
    pairs = [pair for start in range(STARTS) for pair in _pairs(start)]
    with_it, without = ([each[is_on] for each in pairs] for is_on in (True, False))
    tokens = 2 * PROMPTS * PROMPT_TOKENS

    def result(name: str, unit: str, measured: Callable[[_Cost], float]) -> Result:
        values, limits = list(map(measured, with_it)), list(map(measured, without))
        ratios = spread([value / limit for value, limit in zip(values, limits, strict=True)])
        return replace(Result.of_pairs(f"{name}; spread of the pairs' ratios", values, unit, limits), spread=ratios)

    daemon_s, engine_s = [each.daemon for each in with_it], [each.engine for each in without]
    return [
        result("unique prompts", "tokens/s", lambda each: tokens / each.wall),
        result("core seconds of the worker", "s", lambda each: each.worker),
        result("core seconds of the engine", "s", lambda each: each.engine),
        Result.of_pairs(
            "core seconds of the connector's calls, beside those of the worker",
            [each.calls for each in with_it],
            "s",
            [each.worker for each in with_it],
        ),
        Result.of_pairs("core seconds of the daemon, beside those of the engine without", daemon_s, "s", engine_s),
    ]


def _pairs(start: int) -> list[dict[bool, _Cost]]:
    """Of two engines, by whether it has the connector."""
    from benchmarks.timed_connector import FOLDER_VARIABLE, TimedConnector, in_calls_s
    from connector.testing import Engine, random_prompt, small_model, transfer_config

    root = Path(__file__).resolve().parents[1]
    model = small_model(root / "build" / "models")
    arguments = {"block_size": BLOCK_TOKENS, "max_model_len": 4_096}
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        calls = folder / "calls"
        calls.mkdir()
        environment = {**ALIKE, FOLDER_VARIABLE: str(calls), "PYTHONPATH": str(root)}
        daemon = running.enter_context(running_daemon(cpu_bytes="1GiB", verify=False))
        transfer = {
            **transfer_config(daemon.endpoint, blocks_per_chunk=1),
            "kv_connector": TimedConnector.__name__,
            "kv_connector_module_path": TimedConnector.__module__,
        }
        engines = {}
        for is_on in (True, False) if start % 2 else (False, True):
            engine = Engine(
                model,
                folder / f"{is_on}.log",
                transfer=transfer if is_on else None,
                arguments=arguments,
                environment=environment,
            )
            engines[is_on] = running.enter_context(engine)

        def worked(is_on: bool) -> _Cost:
            by_name = _core_s(engines[is_on].process.pid)
            workers_s = sum(seconds for name, seconds in by_name if name.startswith("VLLM::Worker"))
            engine_s, daemon_s = sum(seconds for _, seconds in by_name), _core_s(daemon.pid)[0][1]
            return _Cost(time.perf_counter(), in_calls_s(calls), workers_s, engine_s, daemon_s)

        def turn(is_on: bool, seed: int, *, pause_s: float) -> _Cost:
            prompts = [random_prompt(seed * PROMPTS + i, PROMPT_TOKENS) for i in range(PROMPTS)]
            time.sleep(pause_s)
            before = worked(is_on)
            engines[is_on].generate_many(prompts, max_tokens=1)
            return _Cost(*(after - earlier for after, earlier in zip(worked(is_on), before, strict=True)))

        def pair(number: int, *, pause_s: float = PAUSE_S) -> dict[bool, _Cost]:
            first, other = (True, False) if number % 2 else (False, True)
            costs: dict[bool, list[_Cost]] = {True: [], False: []}
            for is_on in (first, other, other, first):  # so that what changes steadily changes both alike
                costs[is_on].append(turn(is_on, 2 * number + len(costs[is_on]), pause_s=pause_s))
            return {is_on: _Cost(*map(sum, zip(*each, strict=True))) for is_on, each in costs.items()}

        for number in range(WARM_UP_PAIRS):  # enough prompts that it knows that none comes back
            pair(number, pause_s=0.0)
        stored = daemon.tier()["chunks"]
        measured = []
        for number in range(PAIRS):
            measured.append(costs := pair(WARM_UP_PAIRS + number))
            ratio, share = costs[False].wall / costs[True].wall, costs[True].calls / costs[True].worker
            where = f"engines {start + 1} of {STARTS}, pair {number + 1} of {PAIRS}"
            print(f"admission: {where}: {ratio:.3f} of the throughput, calls {share:.2%}", file=sys.stderr, flush=True)
        stored, offered = daemon.tier()["chunks"] - stored, 2 * PAIRS * PROMPTS * CHUNKS_PER_PROMPT
        assert stored <= offered // 100, f"{stored} of {offered} chunks that never come back stored"
        return measured


def _core_s(pid: int) -> list[tuple[str, float]]:
    """Of a process and all that it has started: the name, and the seconds that cores have worked for it."""
    process = Path(f"/proc/{pid}")
    user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    found = [((process / "comm").read_text(), (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"))]
    for children in (process / "task").glob("*/children"):
        found += [each for child in children.read_text().split() for each in _core_s(int(child))]
    return found


if __name__ == "__main__":
    main("admission", __doc__.splitlines()[0], measure, "--engines")
