"""When a failing disk is tried again, and how fast a scrub goes: both with a clock made by hand."""

import asyncio

from kvstore.tiers.fs_health import RETRY_S_MAX, RETRY_S_MIN, Health
from kvstore.tiers.fs_scrub import paced


def test_a_single_failure_is_forgiven_where_more_are_needed() -> None:
    health = Health(3)
    health.failed(0.0, "once")
    health.failed(0.0, "twice")
    assert health.reason is None
    health.succeeded()
    health.failed(0.0, "again")
    health.failed(0.0, "again")
    assert health.reason is None
    health.failed(0.0, "thrice")
    assert health.reason == "thrice"


def test_sick_lets_one_trial_through_at_a_time() -> None:
    health = Health(1)
    health.failed(10.0, "disk")
    assert not health.may_try(10.0 + RETRY_S_MIN / 2)
    assert health.may_try(10.0 + RETRY_S_MIN)
    assert not health.may_try(10.0 + RETRY_S_MIN)
    health.succeeded()
    assert health.may_try(10.0 + RETRY_S_MIN)
    assert health.reason is None


def test_trials_grow_rarer_but_never_stop() -> None:
    health, now = Health(1), 0.0
    health.failed(now, "disk")
    waits = []
    for _ in range(10):
        began = now
        while not health.may_try(now):
            now += 0.25
        waits.append(now - began)
        health.failed(now, "disk")
    assert waits == sorted(waits)
    assert waits[0] == RETRY_S_MIN
    assert waits[-1] == RETRY_S_MAX


def test_a_scrub_keeps_to_its_rate_and_does_not_catch_up() -> None:
    now = 0.0
    seen: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def run() -> None:
        nonlocal now
        pace = paced(range(6), lambda _: 100, bytes_per_s=1000, clock=lambda: now, sleep=sleep)
        async for item in pace:
            seen.append(round(now, 3))
            now += 5.0 if item == 2 else 0.0  # held up once

    asyncio.run(run())
    assert seen == [0.0, 0.1, 0.2, 5.3, 5.4, 5.5]


def test_without_a_rate_a_scrub_never_sleeps() -> None:
    async def sleep(_seconds: float) -> None:
        raise AssertionError("slept")

    async def run() -> list[int]:
        pace = paced(range(5), lambda _: 1 << 30, bytes_per_s=None, clock=lambda: 0.0, sleep=sleep)
        return [item async for item in pace]

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]
