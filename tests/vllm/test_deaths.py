"""Two engines on one daemon, and that daemon killed, stopped, replaced and far too small: every request still gets the
tokens of an engine without a store, and the engines find the store again by themselves."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from connector.testing import Completion, Engine, random_prompt
from kvstore.testing import Daemon
from tests.crash import engine_kills
from tests.crash.engine_kills import EngineKills, right_answers
from tests.vllm.node import Node, wait_until
from tests.vllm.support import (
    ARGUMENTS,
    BLOCK_TOKENS,
    CPU_BYTES,
    FULL_CHUNKS,
    OFFERS_MAX,
    PROMPT_TOKENS,
    loaded_chunks,
    serving_engine,
)

STOPPED_S = 10.0
SMALL_CPU_BYTES = "8MiB"  # some 40 chunks
WORKING_SET = 12  # prompts, of 8 chunks each


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("r") / "k", CPU_BYTES)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def engines(model: Path, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    with (
        serving_engine(model, node.store, tmp_path_factory.mktemp("first")) as first,
        serving_engine(model, node.store, tmp_path_factory.mktemp("second")) as second,
    ):
        yield first, second


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """An engine answers one question at a time, so one thread per engine is enough."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def expected(oracle: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16) -> list[list[int]]:
    return [oracle.generate(prompt, max_tokens=max_tokens).tokens for prompt in prompts]


def test_each_of_two_engines_is_served_what_the_other_computed(
    engines: tuple[Engine, Engine], node: Node, oracle: Engine
) -> None:
    for seed, (computes, reads) in enumerate([engines, engines[::-1]], 100):
        prompt = random_prompt(seed, PROMPT_TOKENS)
        computed = node.store.generate_and_commit(computes, prompt)
        hits, loaded = node.store.hits(), loaded_chunks(reads)
        assert tokens([computed, reads.generate(prompt)]) == 2 * expected(oracle, [prompt])
        node.store.wait_for_hits(hits + FULL_CHUNKS)
        assert loaded_chunks(reads) - loaded == FULL_CHUNKS


def test_a_chunk_that_both_compute_is_stored_once(
    engines: tuple[Engine, Engine], node: Node, oracle: Engine, background: ThreadPoolExecutor
) -> None:
    prompt = random_prompt(110, PROMPT_TOKENS)
    stores, chunks = node.store.stores(), node.daemon.tier()["chunks"]

    def compute() -> list[Completion]:
        return [one.result() for one in [background.submit(engine.generate, prompt) for engine in engines]]

    computed = node.store.until_committed(engines[0], FULL_CHUNKS, compute)
    assert tokens(computed) == 2 * expected(oracle, [prompt])
    node.wait_for_quiet()  # the slots of the slower engine come back
    assert node.store.stores() == stores + FULL_CHUNKS
    assert node.daemon.tier()["chunks"] == chunks + FULL_CHUNKS
    node.daemon.assert_sound()


def test_requests_end_rightly_while_the_daemon_is_stopped(
    engines: tuple[Engine, Engine], node: Node, oracle: Engine, background: ThreadPoolExecutor
) -> None:
    known, new = random_prompt(120, PROMPT_TOKENS), [random_prompt(121 + i, PROMPT_TOKENS) for i in range(3)]
    right = expected(oracle, [known, *new])
    node.store.generate_and_commit(engines[0], known)
    engines[0].reset_prefix_cache()
    os.kill(node.daemon.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        both = [background.submit(engine.generate_many, [known, *new]) for engine in engines]
        answers = [one.result() for one in both]
        threading.Event().wait(max(0.0, stopped_s + STOPPED_S - time.monotonic()))
        assert _is_stopped(node.daemon)
    finally:
        os.kill(node.daemon.pid, signal.SIGCONT)
    assert [tokens(answer) for answer in answers] == [right, right]

    # It hears of everything in the end, and serves as before.
    node.wait_for_quiet()
    node.daemon.assert_sound()
    _stores_and_loads(engines, node, oracle, seed=130)


def _is_stopped(daemon: Daemon) -> bool:
    return Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_requests_survive_the_daemons_death_and_its_successor_is_found(
    engines: tuple[Engine, Engine], node: Node, oracle: Engine, background: ThreadPoolExecutor
) -> None:
    known, new = random_prompt(140, PROMPT_TOKENS), [random_prompt(141 + i, PROMPT_TOKENS) for i in range(3)]
    right = expected(oracle, [known, *new], max_tokens=32)
    node.store.generate_and_commit(engines[0], known)
    engines[0].reset_prefix_cache()
    hits, stores = node.store.hits(), node.store.stores()
    both = [_generate(background, engine, [known, *new], max_tokens=32) for engine in engines]
    wait_until(lambda: node.store.hits() > hits or node.store.stores() > stores, "the requests run")
    node.kill()
    assert [tokens(one.result()) for one in both] == [right, right]

    node.start(CPU_BYTES)
    node.wait_for_engines(2)
    assert node.daemon.tier()["chunks"] == 0
    _stores_and_loads(engines, node, oracle, seed=150)


def _generate(
    background: ThreadPoolExecutor, engine: Engine, prompts: list[list[int]], *, max_tokens: int
) -> Future[list[Completion]]:
    return background.submit(engine.generate_many, prompts, max_tokens=max_tokens)


def _stores_and_loads(engines: tuple[Engine, Engine], node: Node, oracle: Engine, *, seed: int) -> None:
    """Of each engine: its first request recomputes and stores, its next equal one hits."""
    for number, engine in enumerate(engines):
        prompt = random_prompt(seed + number, PROMPT_TOKENS)
        right = oracle.generate(prompt).tokens
        hits = node.store.hits()
        assert node.store.generate_and_commit(engine, prompt).tokens == right
        assert node.store.hits() == hits
        engine.reset_prefix_cache()
        assert engine.generate(prompt).tokens == right
        node.store.wait_for_hits(hits + FULL_CHUNKS)


def test_a_tier_far_smaller_than_the_working_set_costs_no_token(
    engines: tuple[Engine, Engine], node: Node, oracle: Engine, background: ThreadPoolExecutor
) -> None:
    node.kill()
    node.start(SMALL_CPU_BYTES)
    node.wait_for_engines(2)
    prompts = [random_prompt(160 + i, PROMPT_TOKENS) for i in range(WORKING_SET)]
    right = dict(enumerate(expected(oracle, prompts)))
    order = list(range(WORKING_SET))
    for _ in range(3):
        for engine in engines:
            engine.reset_prefix_cache()
        rounds = [
            background.submit(lambda engine=engine: [engine.generate(prompts[i]) for i in order]) for engine in engines
        ]
        for answers in rounds:
            assert dict(zip(order, tokens(answers.result()), strict=True)) == right
        order.reverse()  # or the least recently used would always be the next one asked for
    tier = node.daemon.tier()
    assert tier["evictions"] > 0
    assert tier["hits"] > 0
    node.wait_for_quiet()
    node.daemon.assert_sound()


def test_killed_processes_of_real_engines_cost_no_token_and_leave_nothing_behind(
    engines: tuple[Engine, Engine], node: Node, oracle: Engine
) -> None:
    """A share of `python -m tests.crash.engine_kills`, which is the whole of it."""
    node.kill()
    node.start(engine_kills.CPU_BYTES)
    node.wait_for_engines(2)
    running = EngineKills(node, engines, right_answers(oracle), seed=170)
    for victim in ("daemon", "worker"):
        running.kill_once(victim)


def test_a_preempted_request_is_reloaded_and_gets_the_right_tokens(
    model: Path, node: Node, oracle: Engine, tmp_path: Path
) -> None:
    """Two prompts that fit the engine's 21 blocks only as long as they are short. Where the machine holds the daemon
    up, slots come too late for what is then preempted: other prompts are tried, each with the right tokens."""
    node.kill()
    node.start(CPU_BYTES)
    hits = node.store.hits()
    engine = serving_engine(model, node.store, tmp_path)
    engine.arguments = {
        **ARGUMENTS, "disable_log_stats": False, "enable_prefix_caching": False, "num_gpu_blocks_override": 21,
        "max_model_len": 20 * BLOCK_TOKENS,
    }  # fmt: skip
    with engine:
        for attempt in range(1, OFFERS_MAX + 1):
            prompts = [random_prompt(180 + 10 * attempt + i, 1_100) for i in range(2)]
            answers = engine.generate_many(prompts, max_tokens=200)
            assert tokens(answers) == expected(oracle, prompts, max_tokens=200)
            assert engine.metrics()["vllm:num_preemptions_total"] >= attempt
            if loaded_chunks(engine) >= 1:
                break
        assert loaded_chunks(engine) >= 1

        # Eight at once, of which two fit: loads hold blocks while others wait for some, and every one goes on.
        prompts = [random_prompt(160 + i, 1_100) for i in range(8)]
        right = expected(oracle, prompts, max_tokens=1)
        assert tokens(engine.generate_many(prompts, max_tokens=1)) == right
        node.wait_for_quiet()
        loaded = loaded_chunks(engine)
        assert tokens(engine.generate_many(prompts, max_tokens=1)) == right
        assert loaded_chunks(engine) > loaded
    assert node.store.hits() > hits
    node.wait_for_quiet()
