"""A share of `python -m tests.crash.kills` and `python -m tests.crash.fs_kills`, which are the whole of it."""

import random

import pytest

from tests.crash import fs_kills
from tests.crash.kills import VICTIMS, kill_many

KILLS = 20
SEED = 20
FS_KILLS = 50


@pytest.mark.timeout(600)
def test_processes_killed_under_load_cost_no_wrong_byte_and_leave_nothing_behind() -> None:
    assert kill_many(KILLS, SEED) == dict.fromkeys(VICTIMS, KILLS // len(VICTIMS))


@pytest.mark.timeout(1800)
def test_daemons_killed_at_moments_that_are_new_each_time_lose_nothing_on_disk() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"again with: python -m tests.crash.fs_kills --kills {FS_KILLS} --seed {seed}")  # shown when it fails
    assert fs_kills.kill_many(FS_KILLS, seed).total() == FS_KILLS
