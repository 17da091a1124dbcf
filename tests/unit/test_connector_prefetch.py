"""Chunks that are only on disk, under vLLM's real scheduler: waited for as the policy says, and never for ever."""

import os

import pytest

pytest.importorskip("vllm")
os.environ.setdefault("PYTHONHASHSEED", "0")

from connector import metrics
from connector.config import PREFETCH_TIMEOUT_MS, WAIT_COMPLETE_MS, ConnectorConfig
from tests.unit.connector_engine import PretendEngine

PROMPT = list(range(41))  # 5 chunks
STEPS = 20
CPU_ONLY, STORAGE_ONLY = [{"medium": "CPU"}], [{"medium": "STORAGE"}]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine_of(**extra: object) -> tuple[PretendEngine, Clock]:
    engine = PretendEngine(extra=extra)
    clock = Clock()
    engine.use(clock=clock)
    return engine, clock


def cold(engine: PretendEngine) -> list[int]:
    """Served once; the daemon was restarted since, and the engine's own cache is empty."""
    tokens = list(engine.serve("cold", PROMPT).output_token_ids)
    assert engine.scheduler.reset_prefix_cache()
    engine.daemon.demote_all()
    engine.daemon.misses = 0
    return tokens


def steps(engine: PretendEngine, count: int = STEPS) -> None:
    for _ in range(count):
        engine.copier.run()
        engine.step()


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("extra", [{}, {"prefetch_policy": "wait_complete"}])
def test_a_request_waits_until_its_chunks_have_come_and_loads_them(extra):
    engine, _ = engine_of(**extra)
    expected = cold(engine)
    request = engine.add("warm", PROMPT)
    steps(engine)
    assert (request.num_computed_tokens, len(engine.daemon.pending)) == (0, 5)
    engine.daemon.land()
    engine.run()
    assert list(request.output_token_ids) == expected
    assert (engine.daemon.fs_hits, engine.daemon.hits, engine.daemon.misses) == (5, 0, 0)
    assert engine.metric(metrics.LOADED_CHUNKS) == 5


def test_after_the_timeout_what_has_not_come_is_recomputed():
    engine, clock = engine_of(prefetch_timeout_ms=500)
    expected = cold(engine)
    request = engine.add("warm", PROMPT)
    clock.now_s += 0.49
    steps(engine)
    assert request.num_computed_tokens == 0
    clock.now_s += 0.02 + 0.49
    engine.run()
    assert list(request.output_token_ids) == expected
    assert (engine.daemon.fs_hits, engine.daemon.hits) == (0, 0)


def test_a_disk_that_hangs_is_not_waited_for_for_ever():
    engine, clock = engine_of(prefetch_policy="wait_complete")
    expected = cold(engine)
    request = engine.add("warm", PROMPT)
    steps(engine)
    clock.now_s += PREFETCH_TIMEOUT_MS / 1000 + 1
    steps(engine)
    assert request.num_computed_tokens == 0
    clock.now_s += WAIT_COMPLETE_MS / 1000
    engine.run()
    assert list(request.output_token_ids) == expected


def test_best_effort_asks_and_does_not_wait():
    engine, _ = engine_of(prefetch_policy="best_effort")
    expected = cold(engine)
    request = engine.serve("warm", PROMPT)
    assert list(request.output_token_ids) == expected
    assert (engine.daemon.fs_hits, len(engine.daemon.pending)) == (0, 5)
    engine.daemon.land()
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("again", PROMPT)
    assert (engine.daemon.hits, engine.daemon.fs_hits) == (5, 0)


def test_what_did_not_fit_is_asked_for_again_while_something_comes():
    engine, _ = engine_of()
    expected = cold(engine)
    engine.daemon.promotions_max = 2
    request = engine.add("warm", PROMPT)
    for _ in range(3):
        steps(engine, 3)
        engine.daemon.land()
    engine.run()
    assert list(request.output_token_ids) == expected
    assert engine.daemon.fs_hits == 5


def test_a_daemon_that_begins_nothing_is_not_waited_for():
    engine, _ = engine_of()
    cold(engine)
    engine.daemon.promotions_max = 0
    engine.serve("warm", PROMPT)
    assert (engine.daemon.fs_hits, engine.link.current.steps.promotes) == (0, 1)


def test_a_daemon_that_stands_still_is_not_asked():
    engine, _ = engine_of()
    cold(engine)
    engine.daemon.heartbeat_age_ms = 1001.0
    engine.serve("warm", PROMPT)
    assert (engine.daemon.fs_hits, engine.link.current.steps.promotes) == (0, 0)


def test_a_daemon_that_is_held_up_for_a_moment_is_waited_for():
    engine, _ = engine_of()
    cold(engine)
    engine.daemon.heartbeat_age_ms = 400.0
    engine.add("warm", PROMPT)
    steps(engine, 2)
    engine.daemon.heartbeat_age_ms = 1.0
    engine.daemon.land()
    engine.run()
    assert engine.daemon.fs_hits == 5


def test_two_requests_for_the_same_chunks_both_load_them():
    engine, _ = engine_of()
    expected = cold(engine)
    requests = [engine.add(name, PROMPT) for name in ("one", "two")]
    steps(engine)
    engine.daemon.land()
    engine.run()
    assert [list(request.output_token_ids) for request in requests] == [expected, expected]


def test_only_the_prefix_before_a_hole_is_read():
    engine, _ = engine_of()
    cold(engine)
    third = list(engine.daemon.on_disk)[2]
    del engine.daemon.on_disk[third]
    engine.add("warm", PROMPT)
    steps(engine, 1)
    assert len(engine.daemon.pending) == 2
    engine.daemon.land()
    engine.run()
    assert engine.daemon.fs_hits == 2


@pytest.mark.parametrize(("tiers", "fs_hits", "hits"), [(CPU_ONLY, 0, 0), (STORAGE_ONLY, 5, 0), ([], 0, 0)])
def test_a_request_can_leave_a_tier_out(tiers, fs_hits, hits):
    engine, _ = engine_of()
    expected = cold(engine)
    request = engine.add("warm", PROMPT, sampling={"extra_args": {"kv_transfer_params": {"kv_load_tiers": tiers}}})
    steps(engine, 2)
    engine.daemon.land()
    engine.run()
    assert list(request.output_token_ids) == expected
    assert (engine.daemon.fs_hits, engine.daemon.hits) == (fs_hits, hits)


def test_a_request_without_the_cpu_tier_loads_nothing_from_there():
    engine, _ = engine_of()
    engine.serve("cold", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("warm", PROMPT, sampling={"extra_args": {"kv_transfer_params": {"kv_load_tiers": STORAGE_ONLY}}})
    assert (engine.daemon.fs_hits, engine.daemon.hits) == (0, 0)


def test_the_policy_is_a_bound_in_time():
    def wait_ms(**extra: object) -> int:
        return ConnectorConfig.parse({"endpoint": "unix:///x", **extra}).prefetch_wait_ms

    assert wait_ms() == PREFETCH_TIMEOUT_MS
    assert wait_ms(prefetch_policy="timeout", prefetch_timeout_ms=7) == 7
    assert wait_ms(prefetch_policy="best_effort") == 0
    assert wait_ms(prefetch_policy="wait_complete") == WAIT_COMPLETE_MS
    with pytest.raises(ValueError, match="prefetch_policy='never' must be one of timeout, best_effort"):
        wait_ms(prefetch_policy="never")
    with pytest.raises(ValueError, match="prefetch_timeout_ms=0 must be a whole number"):
        wait_ms(prefetch_timeout_ms=0)
    with pytest.raises(ValueError, match="is of no use with prefetch_policy='best_effort'"):
        wait_ms(prefetch_policy="best_effort", prefetch_timeout_ms=7)
