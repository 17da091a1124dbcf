"""The tiers' conformance suite over every tier there is."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from kvstore._native import class_bytes
from kvstore.tiers.base import ChunkId
from kvstore.tiers.conformance import CHECKS, Bench, Memories, MemoryTier, check_damaged
from tests.conformance.cpu_adapter import CpuAdapter
from tests.fs_support import CHUNK_BYTES, fs_bench

MakeBench = Callable[[Path], contextlib.AbstractAsyncContextManager[Bench]]


@contextlib.asynccontextmanager
async def fake(_path: Path) -> AsyncIterator[Bench]:
    tier = MemoryTier(30 * CHUNK_BYTES)

    async def damage(chunk: ChunkId) -> None:
        tier.damaged.add(chunk)

    yield Bench(tier, Memories(16, CHUNK_BYTES), capacity_chunks=31, damage=damage)
    assert list(tier.problems()) == []


@contextlib.asynccontextmanager
async def cpu(_path: Path) -> AsyncIterator[Bench]:
    with CpuAdapter(30 * class_bytes(CHUNK_BYTES)) as tier:
        yield Bench(tier, Memories(16, CHUNK_BYTES), capacity_chunks=31, removes_chunks=False)
        assert list(tier.problems()) == []


@contextlib.asynccontextmanager
async def fs_on_disk(path: Path) -> AsyncIterator[Bench]:
    async with fs_bench(path / "fs") as bench:
        yield bench


@contextlib.asynccontextmanager
async def fs_buffered(path: Path) -> AsyncIterator[Bench]:
    async with fs_bench(path / "fs", probe=lambda _fd: False) as bench:
        yield bench


@contextlib.asynccontextmanager
async def fs_on_tmpfs(_path: Path) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        async with fs_bench(Path(path) / "fs") as bench:
            yield bench


TIERS: dict[str, MakeBench] = {
    "fake": fake,
    "cpu": cpu,
    "fs": fs_on_disk,
    "fs-buffered": fs_buffered,
    "fs-tmpfs": fs_on_tmpfs,
}


# The cpu tier takes no checksums: what lies in memory is not read by anybody but its owner.
PAIRS = [(name, check) for check in CHECKS for name in TIERS if (name, check) != ("cpu", check_damaged)]


@pytest.mark.parametrize(("name", "check"), PAIRS, ids=[f"{check.__name__}-{name}" for name, check in PAIRS])
def test_tier_contract(check: Callable[[Bench], object], name: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with TIERS[name](tmp_path) as bench:
            await check(bench)  # type: ignore[misc]

    # The daemon's loop; asyncio's own is what the tier's other tests use.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
