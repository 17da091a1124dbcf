"""A share of `python -m tests.crash.kills`, which is the whole of it."""

import pytest

from tests.crash.kills import VICTIMS, kill_many

KILLS = 20
SEED = 20


@pytest.mark.timeout(600)
def test_processes_killed_under_load_cost_no_wrong_byte_and_leave_nothing_behind() -> None:
    assert kill_many(KILLS, SEED) == dict.fromkeys(VICTIMS, KILLS // len(VICTIMS))
