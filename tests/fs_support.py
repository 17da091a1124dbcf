"""A filesystem tier in a directory of its own, for tests."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kvstore.tiers.base import ChunkId
from kvstore.tiers.conformance import Bench, Memories
from kvstore.tiers.fs import FsTier
from kvstore.tiers.fs_catalog import Entry
from kvstore.tiers.fs_directory import FsDirectory, no_step, probe_direct_io
from kvstore.tiers.fs_format import BLOCK_BYTES, slot_offset
from kvstore.tiers.fs_serving import FsOptions

CHUNK_BYTES = 20_000  # not a multiple of anything
CAP_BYTES = 3 << 20
WAIT_S = 20.0


def options(cap_bytes: int = CAP_BYTES, **changes: object) -> FsOptions:
    values: dict[str, object] = {
        "fs_bytes": cap_bytes,
        "n_read_threads": 4,
        "n_write_threads": 2,
        "commit_interval_s": 0.005,
    } | changes
    return FsOptions(**values)  # type: ignore[arg-type]


def du(path: Path) -> int:
    """What `du` says, in bytes. It complains about files that vanish while it looks."""
    output = subprocess.run(
        ["du", "-s", "--block-size=1", str(path)], capture_output=True, check=False, text=True
    ).stdout
    return int(output.split()[0])


class FsBench(Bench):
    tier: FsTier

    def entry(self, chunk: ChunkId) -> Entry:
        return self.tier._catalog.entries[chunk]

    def held(self) -> list[ChunkId]:
        """Every chunk, least recently used first."""
        return [entry.chunk for entry in sorted(self.tier._catalog.entries.values(), key=lambda entry: entry.tick)]

    def offset(self, chunk: ChunkId) -> tuple[int, int]:
        """Descriptor and offset of the chunk's header."""
        slab, slot = self.entry(chunk).place
        return slab.fd, slot_offset(slot, slab.slot_bytes)

    def flip(self, chunk: ChunkId, at: int, bit: int = 0) -> None:
        """Flips a bit of the chunk's slot on disk; `at` counts from the header."""
        fd, offset = self.offset(chunk)
        within = (offset + at) % BLOCK_BYTES
        block = bytearray(FsDirectory.read_block(fd, offset + at - within))
        block[within] ^= 1 << bit
        FsDirectory.write_block(fd, offset + at - within, bytes(block))


@contextlib.asynccontextmanager
async def fs_bench(
    path: Path,
    opts: FsOptions | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    places: int = 16,
    step: Callable[[str], None] = no_step,
    probe: Callable[[int], bool] = probe_direct_io,
    close_clean: bool = True,
    wait_ready: bool = True,
    clock: Callable[[], float] | None = None,
    wall_clock_us: Callable[[], int] | None = None,
) -> AsyncIterator[FsBench]:
    """A tier that is ready; at the end it is closed, and was in order at every look."""
    directory = FsDirectory.open(path, probe=probe, step=step)
    memories = Memories(places, chunk_bytes)
    clocks = {"clock": clock, "wall_clock_us": wall_clock_us}
    more = {name: given for name, given in clocks.items() if given is not None}
    tier = FsTier(directory, opts or options(), regions=[memories.region], step=step, **more)  # type: ignore[arg-type]
    tier.start()
    slots = (opts or options()).fs_bytes // (chunk_bytes + BLOCK_BYTES) + 1
    bench = FsBench(tier, memories, capacity_chunks=slots)

    async def damage(chunk: ChunkId) -> None:
        bench.flip(chunk, BLOCK_BYTES + chunk_bytes // 2)

    bench.damage = damage
    try:
        if wait_ready:
            await asyncio.wait_for(tier.ready(), WAIT_S)
        yield bench
        assert list(tier.problems()) == []
        assert du(path) <= (opts or options()).fs_bytes
    finally:
        clean = await tier.close(timeout_s=WAIT_S)
    if close_clean:
        assert clean, "no clean stop"


async def problems_found(bench: FsBench) -> list[str]:
    """By one pass of the scrub over everything."""
    return [problem async for problem in bench.tier.scrub() if problem is not None]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits, within a bound, for something that the tier brings about by itself."""
    ends = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < ends, f"waited {WAIT_S} s for: {what}"
        await asyncio.sleep(0.005)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
