"""What does deciding cost the scheduler, and the connector an engine whose prompts never repeat?

Decisions: for a prompt of 8,192 chunks, of which 8,000 are in memory and 192 on disk, one load decision (limit 20 us)
and one store decision (limit 200 us); beside them what counting the uses of its keys takes, which is done once a
request, and what one observed step does. Throughput: two real engines with the same unique prompts, one with the
connector and one without, asked in turn; the limit is the one without. They need a CPU build of vLLM and some minutes:
without `--engines` only the decisions are measured.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.report import Result, main, spread
from kvstore.admission import Admission, Hit, Mode, Priors, leading
from kvstore.costmodel import RecomputeModel, TransferModel
from kvstore.decisions import Room

CHUNKS, IN_MEMORY, CHUNK_TOKENS, CHUNK_BYTES = 8192, 8000, 128, 16 << 20
MISS, CPU, FS, PENDING = 0, 1, 2, 3
LOAD_US_MAX, STORE_US_MAX, COUNT_US_MAX, STEP_US_MAX = 20.0, 200.0, 2000.0, 500.0
LOADS, STORES = 5_000, 300

PAIRS, WARM_UP_ROUNDS = 16, 6
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


def _throughput() -> list[Result]:
    from connector.testing import Engine, random_prompt, small_model, transfer_config
    from kvstore.testing import running_daemon

    model = small_model(Path(__file__).resolve().parents[1] / "build" / "models")
    arguments = {"block_size": BLOCK_TOKENS, "max_model_len": 4_096}
    with tempfile.TemporaryDirectory() as folder, running_daemon(cpu_bytes="1GiB", verify=False) as daemon:
        config = transfer_config(daemon.endpoint, blocks_per_chunk=1)
        with (
            Engine(model, Path(folder) / "on.log", transfer=config, arguments=arguments, environment=ALIKE) as on,
            Engine(model, Path(folder) / "off.log", arguments=arguments, environment=ALIKE) as off,
        ):

            def tokens_per_s(engine: Engine, seed: int) -> float:
                prompts = [random_prompt(seed * PROMPTS + i, PROMPT_TOKENS) for i in range(PROMPTS)]
                start = time.perf_counter()
                engine.generate_many(prompts, max_tokens=1)
                return PROMPTS * PROMPT_TOKENS / (time.perf_counter() - start)

            def pair(number: int) -> dict[bool, float]:
                order = (on, off) if number % 2 else (off, on)
                return {engine is on: tokens_per_s(engine, number) for engine in order}

            for number in range(WARM_UP_ROUNDS):  # enough prompts that it knows that none comes back
                pair(number)
            stored = daemon.stats()["stores"]
            rates = [pair(WARM_UP_ROUNDS + number) for number in range(PAIRS)]
            stored = daemon.stats()["stores"] - stored
            assert stored <= PAIRS * PROMPTS * CHUNKS_PER_PROMPT // 100, f"{stored} chunks that never come back stored"
    with_it, without = ([each[is_on] for each in rates] for is_on in (True, False))
    ratios = [one / other for one, other in zip(with_it, without, strict=True)]
    value, limit = statistics.median(with_it), statistics.median(without)
    return [
        Result("unique prompts with the connector", value, "tokens/s", limit, value / limit, spread(with_it)),
        Result.of("of a pair: with against without", ratios, "", [1.0]),
    ]


if __name__ == "__main__":
    main("admission", __doc__.splitlines()[0], measure, "--engines")
