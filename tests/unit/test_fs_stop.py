"""How long a stop of the daemon waits for its disk."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import server


@pytest.mark.parametrize(
    ("drained", "sick", "waits_s"),
    [
        (True, None, server.FS_CLOSE_S),
        (False, None, server.FS_CLOSE_S),  # slow, but it answers
        (True, "a slab could not be made", server.FS_CLOSE_S),
        (False, "writing took longer than 5000 ms", server.FS_CLOSE_SICK_S),
    ],
)
def test_a_stop_does_not_wait_twice_for_a_disk_that_hangs(drained: bool, sick: str | None, waits_s: float) -> None:
    waited_s: list[float] = []

    async def close(timeout_s: float) -> bool:
        waited_s.append(timeout_s)
        return sick is None

    async def drain(timeout_s: float) -> bool:
        assert timeout_s == server.DRAIN_S
        return drained

    async def keep_learned(_: object) -> None: ...

    fs: Any = SimpleNamespace(sick=sick, close=close, keep_learned=keep_learned)
    movement: Any = SimpleNamespace(fs=fs, drain=drain)
    config: Any = SimpleNamespace(fs_dir="/a/disk")
    asyncio.run(server._close_fs(movement, config, {}))
    assert waited_s == [waits_s]
