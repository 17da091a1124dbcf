"""What the parts of the fs tier share: its options, its counts, and what reads and writes work with."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore._native import IoPool
from kvstore.tiers.base import ChunkId, Memory, TierStats
from kvstore.tiers.fs_catalog import Catalog
from kvstore.tiers.fs_directory import FsDirectory, Step
from kvstore.tiers.fs_format import BLOCK_BYTES
from kvstore.tiers.fs_journal import Journal
from kvstore.tiers.fs_worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class FsOptions:
    """`fs_bytes`: `du` of the directory never exceeds it. `slab_bytes`: None for a 64th of that."""

    fs_bytes: int
    n_read_threads: int = 16
    n_write_threads: int = 8
    queue_max: int = 256
    io_deadline_ms: int = 5_000
    commit_interval_s: float = 0.1
    slab_bytes: int | None = None
    scrub_bytes_per_s: float | None = None  # None: no scrub in the background


@dataclass(frozen=True, slots=True)
class FsStats(TierStats):
    """`warming`: (slots looked at, of how many) until the tier is ready, then None. `sick`: why, or None."""

    sick: str | None
    not_growing: str | None  # why it takes less than its capacity and evicts instead, as of the last attempt
    warming: tuple[int, int] | None
    direct: bool
    torn: int  # found half written after a kill or a power cut, and dropped
    quarantined: int  # slots not used again in this run
    io_errors: int
    late: int
    read_bytes: int
    written_bytes: int
    writes_queued: int
    reads_queued: int
    scrubbed_chunks: int
    tenants: int  # with a chunk
    unindexed: int  # chunks on disk that the next start would not know of after a kill now


@dataclass(slots=True)
class Counters:
    evictions: int = 0
    corruptions: int = 0
    torn: int = 0
    dropped: int = 0
    io_errors: int = 0
    late: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """From the end of recovery on. `request_numbers`: of the pool's requests, reads and writes alike."""

    catalog: Catalog
    journal: Journal
    directory: FsDirectory
    worker: Worker
    pool: IoPool
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float]
    step: Step
    options: FsOptions
    counters: Counters
    request_numbers: Iterator[int]
    on_evicted: Callable[[ChunkId], None]


def check_aligned(memory: Memory) -> None:
    if memory.address % BLOCK_BYTES or memory.nbytes <= 0:
        raise ValueError(f"{memory.nbytes} bytes at {memory.address:#x}: at least 1, at a multiple of {BLOCK_BYTES}")
