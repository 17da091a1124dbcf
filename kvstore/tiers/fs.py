"""The filesystem tier: chunks in preallocated slab files, checked at every read, warm after a restart.

Who does what
    event loop      owns everything here, in the catalog and the journal: decides, submits, calls back. Never blocks.
    I/O threads     (native IoPool) move whole slots between a slab file and memory, and take checksums.
    worker thread   (Worker, one, in order) recovery at start, then LMDB commits, slab files, zeroing, small files.
    child process   reads the LMDB file once before the daemon does.
The only things two threads share are the pool's and the worker's queues. A catalog belongs to the worker until recovery
is done and to the loop from then on; LMDB belongs to the worker always.

What orders them
    write       slot taken -> header and payload in one write -> held, STORED -> index record with the next commit
    evict       out of the catalog -> commit without the record -> slot free.        So a record in the index always
                points at a slot that nobody has written to since, and a kill makes no index lie.
    remove      running writes doomed, out of reach -> out of the catalog -> commit -> headers zeroed and synced ->
                reported (fs_removal). Zeroed are also free slots that still bear a header of what is removed (`ghosts`:
                an eviction leaves it there, a failed write may have), and what a running write was going to overwrite,
                should it fail.
    retire      all chunks of a slab out of the catalog -> commit -> another epoch in its header, synced -> unlinked
    stop        I/O has returned -> last commit -> ghosts zeroed -> LMDB synced -> STATE says clean
A slot with I/O is neither freed, evicted nor rewritten until that I/O has returned: a write's slot is `taken`, a read's
chunk has a reader. Past its deadline a request is answered LATE; slot and memory stay busy until the call is back.

What if something dies
    the daemon      Nothing in the index is lost or wrong; stores since the last commit are forgotten by the next start.
    the machine     Without a clean stop every header is read; a torn slot is found at its first read, and is no
                    corruption.
    the disk        A failed write is tried once more in another slot, then dropped, and the tier is sick: stores are
                    refused but for a trial now and then. Failed reads cost their chunk, three in a row make reads sick.
    LMDB            The file is dropped and written anew from the catalog (Journal).

Bounds: `queue_max` writes and as many reads are waiting or running, more are refused; a request waits `io_deadline_ms`.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, assert_never

from kvstore._native import IoDone, IoPool
from kvstore.tiers.base import (
    ChunkId,
    Memory,
    ReadDone,
    ReadOutcome,
    Released,
    Removed,
    Scope,
    TierStats,
    WriteDone,
    WriteOutcome,
)
from kvstore.tiers.fs_catalog import (
    Catalog,
    Entry,
    Evict,
    Grow,
    Place,
    Retire,
    SizeClass,
    Slab,
    Stuck,
    slab_charge,
    small_files_bytes_for,
)
from kvstore.tiers.fs_directory import FsDirectory, Step, no_step
from kvstore.tiers.fs_format import (
    BLOCK_BYTES,
    HEADER_CHECKSUM_AT,
    SLOT_PAYLOAD_CHECKSUM_AT,
    Damaged,
    SlabHeader,
    SlotHeader,
    slot_bytes_for,
    slot_offset,
)
from kvstore.tiers.fs_health import Health
from kvstore.tiers.fs_index import IndexUnusable
from kvstore.tiers.fs_journal import Journal
from kvstore.tiers.fs_paths import STATE
from kvstore.tiers.fs_recovery import Cancelled, Recovered, Recovery
from kvstore.tiers.fs_removal import Removal, Removals
from kvstore.tiers.fs_scrub import Scrub, Sleep
from kvstore.tiers.fs_worker import Failure, Worker, said

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 1.0
TICKS_BETWEEN_FOREIGN = 30  # adding up other people's files costs a stat each
GROWTH_RETRY_S = 1.0  # after a slab could not be made, evicting is preferred for so long
READ_FAILURES_MAX = 3  # in a row: then it is the disk, not a chunk


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
    unindexed: int  # chunks on disk that the next start would not know of after a kill now


@dataclass(slots=True)
class _Counters:
    evictions: int = 0
    corruptions: int = 0
    torn: int = 0
    dropped: int = 0
    quarantined: int = 0
    io_errors: int = 0
    late: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Look:
    """What the worker found when it looked at the directory."""

    lost: str | None
    unlinked_fds: list[int]
    has_index: bool
    foreign_bytes: int | None


@dataclass(eq=False, slots=True)
class _Write:
    chunk: ChunkId
    memory: Memory
    slot_bytes: int
    done: WriteDone
    released: Released
    deadline_s: float
    failed_at: Place | None = None  # the slot of the first attempt, when this is the second
    told: bool = False
    # Once it runs:
    place: Place | None = None
    sequence: int = 0
    ghosts: frozenset[ChunkId] = frozenset()  # whose headers lay in the slot before
    doomed_by: Removal | None = None
    watched_by: Removal | None = None  # which covers a ghost in the slot


@dataclass(eq=False, slots=True)
class _Read:
    entry: Entry
    memory: Memory
    done: ReadDone
    released: Released
    is_use: bool  # a scrub is none: it neither touches nor counts
    told: bool = False


@dataclass(eq=False, slots=True)
class _Queue:
    """Writes of one slot size that have no slot yet."""

    slot_bytes: int
    waiting: deque[_Write] = field(default_factory=deque)
    coming: int = 0  # slots that were evicted for them and wait for the commit
    preparing: bool = False  # a slab is being made, or one of another size removed
    growth_error: str | None = None  # of the last slab that could not be made, since the last one that could
    gave_up_a_slab: bool = False  # for the retry after such an error


class FsTier:
    """See the module's docstring; a `Tier`. Call everything from the loop on which `start` was called.

    `regions`: (address, bytes) of the memory that chunks are written from and read into.
    """

    name = "fs"

    def __init__(
        self,
        directory: FsDirectory,
        options: FsOptions,
        *,
        regions: Sequence[tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
        step: Step = no_step,
        wall_clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self._directory = directory
        self._wall_clock_us = wall_clock_us
        self._options = options
        self._clock = clock
        self._step = step
        self._catalog = Catalog(options.fs_bytes)  # empty, until recovery brings the real one
        self._ready = asyncio.Event()
        self._closing = False
        self._counters = _Counters()
        self._progress = (0, 0)
        self._cancelled = threading.Event()
        self._when_ready: list[Callable[[], None]] = []
        # Told of every chunk that is held or forgotten from the start on; must not call the tier.
        self.on_change: Callable[[ChunkId, bool], None] | None = None

        self._pool = IoPool(options.n_read_threads, options.n_write_threads)
        for address, nbytes in regions:
            self._pool.add_region(address, nbytes)
        self._next_request = 0
        self._running: dict[int, _Read | _Write] = {}
        self._reads = 0
        self._writes: dict[ChunkId, _Write] = {}  # waiting or running, not doomed
        self._writes_total = 0  # the doomed included
        self._queues: dict[int, _Queue] = {}
        self._on_last_reader: dict[Entry, Callable[[], None]] = {}  # of forgotten chunks

        self._read_health = Health(READ_FAILURES_MAX)
        self._write_health = Health(1)
        self._quotas: dict[bytes, int] = {}  # by tenant
        self._directory_lost: str | None = None
        self._recovery_error: str | None = None
        self._no_growth_until_s = 0.0
        self._ticks = 0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._shrinking = False
        self._looking = False  # the worker looks at the directory for the tick
        self._quiet: asyncio.Future[None] | None = None
        self._scrub = Scrub(
            read=self._read_to_check,
            add_region=self._pool.add_region,
            clock=clock,
            io_deadline_s=options.io_deadline_ms / 1000,
        )
        self._scrub_task: asyncio.Task[None] | None = None

    # Life

    def start(self) -> None:
        """Begins recovery; until `ready` the tier holds nothing and refuses stores."""
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(self._loop, "kvstore-fs-worker", self._look_quiet)
        self._loop.add_reader(self._pool.event_fd, self._collect)
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)
        self._recover()

    def _recover(self) -> None:
        recovery = Recovery(
            self._directory,
            self._options.fs_bytes,
            self._options.slab_bytes,
            self._set_progress,
            self._cancelled,
            self._step,
            self._wall_clock_us,
        )
        self._worker.run(recovery.run, self._recovered)

    def _set_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)  # from the worker; one assignment, so a reader sees both or neither

    def _recovered(self, result: Recovered | Failure) -> None:
        if isinstance(result, Cancelled):
            return
        if not isinstance(result, Recovered):
            self._recovery_error = f"{self._directory.path} could not be read: {said(result)}"
            log.error("%s; trying again", self._recovery_error)
            return
        self._recovery_error = None
        self._catalog = result.catalog
        self._catalog.on_change = self.on_change
        for tenant, nbytes in self._quotas.items():
            self._catalog.set_quota(tenant, nbytes)
        self._journal = Journal(result, self._directory, self._worker, self._options.commit_interval_s, self._step)
        self._opening = result.opening
        self._removals = Removals(
            self._catalog,
            self._journal,
            self._directory,
            self._worker,
            self._loop,
            self._step,
            running=self._running_writes,
            on_last_reader=self._on_last_reader,
            next_epoch=self._next_epoch,
            on_failure=self._write_failed,
            on_end=self._removal_ended,
        )
        self._ready.set()
        log.info(
            "%s: %d chunks in %d slabs, %s",
            self._directory.path,
            len(self._catalog.entries),
            len(self._catalog.slabs),
            "from their headers" if result.rebuilt else "from the index",
        )
        waiting, self._when_ready = self._when_ready, []
        for call in waiting:
            call()
        if self._options.scrub_bytes_per_s is not None:
            self._scrub_task = self._loop.create_task(
                self._scrub.run_for_ever(self._catalog, self._options.scrub_bytes_per_s)
            )

    async def ready(self) -> None:
        await self._ready.wait()

    async def close(self, timeout_s: float = 10.0) -> bool:
        """Waits for what runs, makes the stop a clean one, gives the lock up. False when something did not return: the
        lock and the descriptors then stay with the process."""
        ends_s = self._clock() + timeout_s
        self._closing = True
        self._cancelled.set()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if self._scrub_task is not None:
            self._scrub_task.cancel()
        for queue in self._queues.values():
            while queue.waiting:
                self._end_write(queue.waiting.popleft(), WriteOutcome.ABORTED)
        self._quiet = self._loop.create_future()
        self._look_quiet()
        clean = await self._within(self._quiet, ends_s)
        if clean and self._ready.is_set():
            stopped = self._loop.create_future()
            self._worker.run(self._stop_job(), stopped.set_result)
            clean = await self._within(stopped, ends_s)
        self._loop.remove_reader(self._pool.event_fd)
        left_s = max(0.0, ends_s - self._clock())
        ended = await asyncio.to_thread(self._pool.close, left_s)
        ended = await asyncio.to_thread(self._worker.close, max(0.0, ends_s - self._clock())) and ended
        self._collect()
        if ended:
            for slab in self._catalog.slabs.values():
                os.close(slab.fd)
            self._directory.close()
        return clean and ended

    async def _within(self, future: asyncio.Future[T], ends_s: float) -> bool:
        done, _ = await asyncio.wait([future], timeout=max(0.0, ends_s - self._clock()))
        return bool(done)

    def _stop_job(self) -> Callable[[], None]:
        stop_index = self._journal.prepare_stop()
        ghosts: dict[Slab, list[int]] = {}
        for place, _ in self._catalog.free_ghosts():
            ghosts.setdefault(place.slab, []).append(place.slot)

        def stop() -> None:
            try:
                self._directory.settle()
                for slab, slots in ghosts.items():
                    self._directory.zero_slots(slab.fd, slots, slab.slot_bytes)
                for slab in self._catalog.slabs.values():
                    os.fdatasync(slab.fd)
                trusted = stop_index()
                self._step("index synced")
                if trusted and self._directory.opening() == self._opening:
                    self._directory.write_small(STATE, replace(self._opening, clean=True).encode())
            except OSError as error:
                # The next start reads the headers, or finds the index as of the last commit.
                log.warning("%s: no clean stop: %s", self._directory.path, said(error))

        return stop

    def _look_quiet(self) -> None:
        """While closing: whether everything that was begun has ended."""
        if self._quiet is None or self._quiet.done():
            return
        busy = self._running or self._worker.outstanding
        if not busy and (not self._ready.is_set() or (self._journal.is_quiet and self._removals.is_idle)):
            self._quiet.set_result(None)

    # Questions

    def contains(self, chunk: ChunkId) -> bool:
        return self._find(chunk) is not None

    def _find(self, chunk: ChunkId) -> Entry | None:
        return self._removals.find(chunk) if self._ready.is_set() else None

    def chunks(self) -> Iterator[tuple[ChunkId, int]]:
        """Every chunk and its slot's bytes, oldest first. No call of the tier may come between."""
        return ((entry.chunk, entry.slot_bytes) for entry in self._catalog.oldest_first())

    def ages(self) -> Iterator[tuple[ChunkId, int, float]]:
        """As `chunks`, with the seconds since the last use."""
        catalog = self._catalog
        return ((entry.chunk, entry.slot_bytes, catalog.idle_s(entry)) for entry in catalog.oldest_first())

    def usage(self) -> dict[tuple[bytes, bytes], tuple[int, int]]:
        """Chunks and bytes of slots by namespace and tenant."""
        return {owner: (usage.chunks, usage.nbytes) for owner, usage in self._catalog.usage.items()}

    @property
    def sick(self) -> str | None:
        return self._recovery_error or self._directory_lost or self._write_health.reason or self._read_health.reason

    def stats(self) -> FsStats:
        catalog, counters = self._catalog, self._counters
        return FsStats(
            capacity_bytes=catalog.cap_bytes,
            used_bytes=catalog.used_bytes,
            overhead_bytes=catalog.overhead_bytes,
            chunks=len(catalog.entries),
            evictions=counters.evictions,
            corruptions=counters.corruptions,
            dropped=counters.dropped,
            sick=self.sick,
            warming=None if self._ready.is_set() else self._progress,
            direct=self._directory.direct,
            torn=counters.torn,
            quarantined=counters.quarantined,
            io_errors=counters.io_errors,
            late=counters.late,
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            writes_queued=self._writes_total,
            reads_queued=self._reads,
            scrubbed_chunks=self._scrub.chunks,
            unindexed=self._journal.unindexed if self._ready.is_set() else 0,
        )

    def problems(self) -> Iterator[str]:
        if not self._ready.is_set():
            return
        yield from self._catalog.problems()
        for queue in self._queues.values():
            if queue.waiting and not (queue.coming or queue.preparing):
                yield f"{len(queue.waiting)} writes of {queue.slot_bytes} bytes wait for nothing"
        running = sum(isinstance(each, _Write) for each in self._running.values())
        if running + sum(len(queue.waiting) for queue in self._queues.values()) != self._writes_total:
            yield f"{self._writes_total} writes are counted, {running} run"

    # Writing

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        _check_aligned(memory)
        slot_bytes = slot_bytes_for(memory.nbytes)
        deadline_s = self._clock() + self._options.io_deadline_ms / 1000
        write = _Write(chunk, memory, slot_bytes, done, released, deadline_s)
        outcome = self._refusal(chunk)
        if outcome is None and not self._make_room_in_quota(chunk.tenant, slot_bytes):
            outcome = WriteOutcome.FULL
        self._writes_total += 1
        if outcome is not None:
            self._end_write(write, outcome)
            return
        self._writes[chunk] = write
        queue = self._queues.setdefault(slot_bytes, _Queue(slot_bytes))
        queue.waiting.append(write)
        self._pump(queue)

    def _refusal(self, chunk: ChunkId) -> WriteOutcome | None:
        if self._closing:
            return WriteOutcome.ABORTED
        if self.contains(chunk) or chunk in self._writes:
            return WriteOutcome.PRESENT
        if not self._ready.is_set() or self._directory_lost is not None:
            return WriteOutcome.SICK
        if self._writes_total >= self._options.queue_max:
            return WriteOutcome.FULL
        if not self._write_health.may_try(self._clock()):
            return WriteOutcome.SICK
        return None

    def set_quota(self, tenant: bytes, nbytes: int | None) -> int:
        """What the tenant's slots may take here; None: no limit. Returns what they take now (0 without a limit).

        A write beyond it evicts the tenant's own least recently used chunks, or is refused as FULL. What is there
        already stays: the caller removes it.
        """
        if nbytes is None:
            self._quotas.pop(tenant, None)
        else:
            self._quotas[tenant] = nbytes
        return self._catalog.set_quota(tenant, nbytes)

    def _make_room_in_quota(self, tenant: bytes, slot_bytes: int) -> bool:
        catalog = self._catalog
        if not catalog.is_limited(tenant):
            return True
        wanted = slot_bytes + sum(write.slot_bytes for chunk, write in self._writes.items() if chunk.tenant == tenant)
        if wanted > self._quotas[tenant]:
            return False
        while catalog.beyond_quota(tenant, wanted):
            oldest = catalog.oldest_of(tenant)
            if oldest is None:
                return False
            self._evict(oldest, None)
        return True

    def _pump(self, queue: _Queue) -> None:
        """Gives slots to waiting writes, and sees to it that enough more are coming."""
        catalog = self._catalog
        while queue.waiting and (place := self._take_for_first(queue)) is not None:
            self._start_write(queue.waiting.popleft(), place)
        while len(queue.waiting) > queue.coming and not queue.preparing:
            may_grow = self._clock() >= self._no_growth_until_s
            match catalog.room_for(self._class_of(queue), may_grow=may_grow):
                case Grow(slot_count):
                    self._grow(queue, slot_count)
                case Retire(slab):
                    queue.preparing = True
                    self._retire(slab, partial(self._prepared, queue))
                case Evict(entry):
                    self._evict(entry, queue)
                case Stuck():
                    if queue.growth_error is not None and not queue.gave_up_a_slab and self._give_up_a_slab(queue):
                        continue
                    if queue.coming == 0:
                        self._drop_waiting(queue)
                    return
                case never:
                    assert_never(never)

    def _take_for_first(self, queue: _Queue) -> Place | None:
        """A free slot for the write at the head; one where it failed before only if no other is coming."""
        size_class = self._class_of(queue)
        place = self._catalog.take_free(size_class)
        if place is None or place != queue.waiting[0].failed_at:
            return place
        other = self._catalog.take_free(size_class)
        if other is None and not queue.coming:
            return place
        self._catalog.free(place, place.slab.ghosts.get(place.slot, frozenset()))
        return other

    def _class_of(self, queue: _Queue) -> SizeClass:
        return self._catalog.class_of(queue.slot_bytes)

    def _prepared(self, queue: _Queue) -> None:
        queue.preparing = False
        self._pump(queue)

    def _pump_all(self) -> None:
        for queue in self._queues.values():
            self._pump(queue)

    def _give_up_a_slab(self, queue: _Queue) -> bool:
        """After a slab could not be made and there is nothing of this size to evict: one of another size may go."""
        slab = self._catalog.coldest_slab(other_than=self._class_of(queue))
        if slab is None:
            return False
        queue.gave_up_a_slab = True
        queue.preparing = True
        self._no_growth_until_s = 0.0
        self._retire(slab, partial(self._prepared, queue))
        return True

    def _drop_waiting(self, queue: _Queue) -> None:
        outcome = WriteOutcome.FULL
        if queue.growth_error is not None:
            outcome = WriteOutcome.SICK
            self._write_failed(queue.growth_error)
        queue.growth_error = None
        queue.gave_up_a_slab = False
        while queue.waiting:
            self._end_write(queue.waiting.popleft(), outcome)

    def _start_write(self, write: _Write, place: Place) -> None:
        slab, slot = place
        write.place = place
        write.sequence = self._journal.next_sequence()
        write.ghosts = slab.ghosts.get(slot, frozenset())
        header = SlotHeader(
            slab.number, slot, slab.epoch, write.sequence, slab.slot_bytes, write.chunk, write.memory.nbytes
        )
        left_ms = max(1, int((write.deadline_s - self._clock()) * 1000))
        self._pool.write(
            self._register(write),
            slab.fd,
            slot_offset(slot, slab.slot_bytes),
            write.memory.address,
            slab.slot_bytes - BLOCK_BYTES,
            head=header.encode(),
            payload_checksum_at=SLOT_PAYLOAD_CHECKSUM_AT,
            head_checksum_at=HEADER_CHECKSUM_AT,
            deadline_ms=left_ms,
        )
        self._step("write submitted")

    def _register(self, request: _Read | _Write) -> int:
        self._next_request += 1
        self._running[self._next_request] = request
        return self._next_request

    def _write_returned(self, write: _Write, error: int) -> None:
        self._step("write returned")
        assert write.place is not None
        place, write.place = write.place, None
        headers = write.ghosts | {write.chunk} if error else frozenset({write.chunk})
        if write.doomed_by is not None:
            # The removal that is under way zeroes the slot; a later one then finds it zeroed.
            first = write.watched_by or write.doomed_by
            if write.doomed_by is not first:
                self._removals.one_less(write.doomed_by)
            self._removals.hand_over(first, place, headers)
            self._end_write(write, WriteOutcome.ABORTED)
            return
        if write.watched_by is not None:
            removal, write.watched_by = write.watched_by, None
            if error:
                self._removals.hand_over(removal, place, headers)
                self._write_went_wrong(write, place, error)
                return
            self._removals.one_less(removal)
        if error:
            self._catalog.free(place, headers)
            self._write_went_wrong(write, place, error)
        elif write.told:
            self._catalog.free(place, headers)  # nobody waits for it, and it was said not to be stored
            self._end_write(write, WriteOutcome.LATE)
        else:
            entry = self._catalog.hold(write.chunk, place, write.sequence, write.memory.nbytes, proven=True)
            self._journal.put(entry)
            self._write_health.succeeded()
            self._counters.written_bytes += write.memory.nbytes
            self._end_write(write, WriteOutcome.STORED)
        self._pump(self._queues[write.slot_bytes])

    def _write_went_wrong(self, write: _Write, place: Place, error: int) -> None:
        queue = self._queues[write.slot_bytes]
        if write.told or error == errno.ETIMEDOUT:
            self._write_failed(f"writing took longer than {self._options.io_deadline_ms} ms")
            self._counters.late += not write.told
            self._end_write(write, WriteOutcome.LATE)
        elif error == errno.ECANCELED or self._closing:
            self._end_write(write, WriteOutcome.ABORTED)
        elif write.failed_at is None:
            self._counters.io_errors += 1
            write.failed_at = place
            queue.waiting.appendleft(write)
            victim = next(self._catalog.evictable(self._class_of(queue)), None)
            if victim is not None:
                self._evict(victim, queue)
        else:
            self._counters.io_errors += 1
            self._write_failed(f"writing: {os.strerror(error)}")
            self._end_write(write, WriteOutcome.SICK)
        self._pump(queue)

    def _write_failed(self, reason: str) -> None:
        if self._write_health.reason is None:
            log.warning("%s: stores are refused for now: %s", self._directory.path, reason)
        self._write_health.failed(self._clock(), reason)

    def _write_late(self, write: _Write) -> None:
        self._counters.late += 1
        self._write_failed(f"writing took longer than {self._options.io_deadline_ms} ms")
        self._tell_write(write, WriteOutcome.LATE)

    def _tell_write(self, write: _Write, outcome: WriteOutcome) -> None:
        if write.told:
            return
        write.told = True
        if outcome not in (WriteOutcome.STORED, WriteOutcome.PRESENT):
            self._counters.dropped += 1
        if self._writes.get(write.chunk) is write:
            del self._writes[write.chunk]
        self._loop.call_soon(write.done, outcome)

    def _end_write(self, write: _Write, outcome: WriteOutcome) -> None:
        self._tell_write(write, outcome)
        self._writes_total -= 1
        self._loop.call_soon(write.released)

    # Reading

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        _check_aligned(memory)
        entry = self._find(chunk)
        refusal: ReadOutcome | None = None
        if entry is None or self._closing:
            refusal = ReadOutcome.ABSENT
        elif entry.payload_bytes != memory.nbytes:
            raise ValueError(f"a chunk of {entry.payload_bytes} bytes, but memory for {memory.nbytes}")
        elif self._reads >= self._options.queue_max:
            refusal = ReadOutcome.BUSY
        elif not self._read_health.may_try(self._clock()):
            refusal = ReadOutcome.SICK
        if refusal is not None:
            self._loop.call_soon(done, refusal)
            self._loop.call_soon(released)
            return
        assert entry is not None
        self._start_read(_Read(entry, memory, done, released, is_use=True))

    def _start_read(self, read: _Read) -> None:
        slab, slot = read.entry.place
        self._pool.read(
            self._register(read),
            slab.fd,
            slot_offset(slot, slab.slot_bytes),
            read.memory.address,
            slab.slot_bytes - BLOCK_BYTES,
            with_head=True,
            deadline_ms=self._options.io_deadline_ms,
        )
        self._reads += 1
        slab.reading += 1
        read.entry.readers += 1

    def _read_returned(self, read: _Read, done: IoDone) -> None:
        entry = read.entry
        self._reads -= 1
        entry.place.slab.reading -= 1
        entry.readers -= 1
        outcome = self._judge(read, done) if done.error == 0 else self._read_went_wrong(read, done.error)
        self._tell_read(read, outcome)
        self._loop.call_soon(read.released)
        if entry.readers == 0 and (last := self._on_last_reader.pop(entry, None)) is not None:
            last()

    def _judge(self, read: _Read, done: IoDone) -> ReadOutcome:
        entry = read.entry
        self._read_health.succeeded()
        if entry.forgotten:
            return ReadOutcome.ABSENT
        why = _why_not(entry, done)
        if why is None:
            if not entry.proven:
                entry.proven = True
                self._journal.touch(entry)
            if read.is_use:
                self._counters.read_bytes += entry.payload_bytes
                self._touch(entry)
            return ReadOutcome.READ
        place = entry.place
        where = f"slab {place.slab.number}, slot {place.slot}"
        if entry.proven:
            self._counters.corruptions += 1
            log.error("%s: %s is damaged: %s; its chunk is forgotten", self._directory.path, where, why)
        else:
            self._counters.torn += 1
            log.warning("%s: %s was not written to its end; its chunk is forgotten", self._directory.path, where)
        self._discard(entry, quarantine=entry.proven)
        return ReadOutcome.DAMAGED

    def _read_went_wrong(self, read: _Read, error: int) -> ReadOutcome:
        entry = read.entry
        if read.told or error == errno.ETIMEDOUT:
            self._read_failed(f"reading took longer than {self._options.io_deadline_ms} ms", at_once=True)
            self._counters.late += not read.told
            return ReadOutcome.LATE
        if error == errno.ECANCELED:
            return ReadOutcome.ABSENT
        self._counters.io_errors += 1
        if error != errno.ENODATA:
            self._read_failed(f"reading: {os.strerror(error)}", at_once=False)
        if entry.forgotten:
            return ReadOutcome.ABSENT
        if error == errno.ENODATA:
            self._counters.corruptions += 1
        log.error(
            "%s: slab %d, slot %d cannot be read: %s; its chunk is forgotten",
            self._directory.path,
            entry.place.slab.number,
            entry.place.slot,
            "the file is cut short" if error == errno.ENODATA else os.strerror(error),
        )
        self._discard(entry, quarantine=True)
        return ReadOutcome.DAMAGED

    def _read_failed(self, reason: str, *, at_once: bool) -> None:
        self._read_health.failed(self._clock(), reason, at_once=at_once)

    def _read_late(self, read: _Read) -> None:
        self._counters.late += 1
        self._read_failed(f"reading took longer than {self._options.io_deadline_ms} ms", at_once=True)
        self._tell_read(read, ReadOutcome.LATE)

    def _tell_read(self, read: _Read, outcome: ReadOutcome) -> None:
        if not read.told:
            read.told = True
            self._loop.call_soon(read.done, outcome)

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """Used just now, in this order."""
        for chunk in chunks:
            if (entry := self._catalog.entries.get(chunk)) is not None:
                self._touch(entry)

    def _touch(self, entry: Entry) -> None:
        self._catalog.touch(entry)
        self._journal.touch(entry)

    def _collect(self) -> None:
        for done in self._pool.poll():
            request = self._running[done.request]
            if not done.late:
                del self._running[done.request]
            match request:
                case _Write():
                    if done.late:
                        self._write_late(request)
                    else:
                        self._write_returned(request, done.error)
                case _Read():
                    if done.late:
                        self._read_late(request)
                    else:
                        self._read_returned(request, done)
                case never:
                    assert_never(never)
        self._look_quiet()

    # Making room

    def _evict(self, entry: Entry, queue: _Queue | None) -> None:
        """`queue`: whose writes wait for the slot; None: whose it is will be seen."""
        self._step("evicting")
        place = self._catalog.forget(entry)
        self._journal.forget(entry)
        self._counters.evictions += 1
        if queue is not None:
            queue.coming += 1

        def committed() -> None:
            self._catalog.free(place, place.slab.ghosts.get(place.slot, frozenset()) | {entry.chunk})
            if queue is not None:
                queue.coming -= 1
                self._pump(queue)
            else:
                self._pump_all()

        self._journal.after_commit(committed)

    def _grow(self, queue: _Queue, slot_count: int) -> None:
        catalog = self._catalog
        number = catalog.free_slab_number()
        slot_bytes = queue.slot_bytes
        cost = catalog.cost_of(slot_bytes, slot_count)
        index_slots = catalog.index_slots_with(slot_count)
        header = SlabHeader(number, secrets.randbits(63), slot_bytes, slot_count, self._directory.directory_id)
        catalog.barred_numbers.add(number)
        catalog.reserved_bytes += cost
        catalog.pending_slot_count += slot_count
        queue.preparing = True

        def grow() -> int:
            self._journal.grow_in_worker(index_slots)
            return self._directory.create_slab(header, slab_charge(slot_bytes, slot_count))

        def grown(result: int | Failure) -> None:
            catalog.reserved_bytes -= cost
            catalog.pending_slot_count -= slot_count
            catalog.barred_numbers.discard(number)
            # Also when the slab failed: the index may have grown before.
            catalog.index_slot_count = max(catalog.index_slot_count, index_slots)
            if isinstance(result, int):
                catalog.add_slab(number, result, header.epoch, slot_bytes, slot_count, fresh=True)
                queue.growth_error = None
                queue.gave_up_a_slab = False
                self._no_growth_until_s = 0.0
            else:
                log.warning("%s: a slab of %d bytes: %s", self._directory.path, header.file_bytes, said(result))
                queue.growth_error = f"making room: {said(result)}"
                self._no_growth_until_s = self._clock() + GROWTH_RETRY_S
                if isinstance(result, IndexUnusable):
                    self._journal.failed(result)
            self._prepared(queue)

        self._worker.run(grow, grown)

    def _retire(self, slab: Slab, then: Callable[[], None]) -> None:
        """Removes an idle slab with all that it holds."""
        catalog = self._catalog
        for entry in catalog.remove_slab(slab):
            self._journal.forget(entry)
            self._counters.evictions += 1
        catalog.reserved_bytes += slab.charge_bytes
        catalog.barred_numbers.add(slab.number)
        header = self._next_epoch(slab)

        def removed(result: Failure | None) -> None:
            if result is None:
                catalog.reserved_bytes -= slab.charge_bytes
                catalog.barred_numbers.discard(slab.number)
            else:
                # Its bytes stay charged and its number stays taken, until the next start.
                log.error("%s: slab %d cannot be removed: %s", self._directory.path, slab.number, said(result))
                self._write_failed(f"removing a slab: {said(result)}")
            then()

        remove = partial(self._directory.remove_slab, slab.fd, header)
        self._journal.after_commit(lambda: self._worker.run(remove, removed))

    def _next_epoch(self, slab: Slab) -> SlabHeader:
        slab.epoch += 1
        return SlabHeader(slab.number, slab.epoch, slab.slot_bytes, slab.slot_count, self._directory.directory_id)

    # Forgetting

    def remove(self, scope: Scope, done: Callable[[Removed], None]) -> None:
        if self._closing:
            self._loop.call_soon(done, Removed(0, 0, "the tier is closing"))
            return
        if not self._ready.is_set():
            self._when_ready.append(lambda: self.remove(scope, done))
            return
        removal = self._removals.begin(scope, done)
        for write in [write for write in self._writes.values() if scope.covers(write.chunk)]:
            if write.place is None:
                self._queues[write.slot_bytes].waiting.remove(write)
                self._end_write(write, WriteOutcome.ABORTED)
            else:
                # From here on another write of the same chunk is a new one.
                del self._writes[write.chunk]
        for running in self._running_writes():
            # Those that were given up as late are among them: their bytes may land yet.
            if running.doomed_by is None and scope.covers(running.chunk):
                running.doomed_by = removal
                removal.waits_for += 1

    def _removal_ended(self) -> None:
        self._pump_all()
        self._look_quiet()

    def _running_writes(self) -> list[_Write]:
        return [request for request in self._running.values() if isinstance(request, _Write)]

    def _discard(self, entry: Entry, *, quarantine: bool) -> None:
        """Forgets a chunk whose bytes are not right. A quarantined slot is not used again in this run."""
        place = self._catalog.forget(entry)
        self._journal.forget(entry)

        def zeroed(result: Failure | None) -> None:
            if quarantine:
                self._counters.quarantined += 1
                self._catalog.quarantine(place)
            else:
                self._catalog.free(place, frozenset({entry.chunk}) if result is not None else frozenset())
            self._pump_all()

        def zero() -> None:
            self._directory.zero_slots(place.slab.fd, [place.slot], place.slab.slot_bytes)

        def after_readers() -> None:
            self._journal.after_commit(lambda: self._worker.run(zero, zeroed))

        if entry.readers:
            self._on_last_reader[entry] = after_readers
        else:
            after_readers()

    # Now and then

    def _tick(self) -> None:
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        now_s = self._clock()
        if not self._ready.is_set():
            if self._recovery_error is not None and self._worker.outstanding == 0:
                self._recover()
            return
        for queue in self._queues.values():
            while queue.waiting and queue.waiting[0].deadline_s < now_s:
                self._counters.late += 1
                self._end_write(queue.waiting.popleft(), WriteOutcome.LATE)
        self._journal.tick()
        if not self._looking:
            self._look_at_directory()

    def _look_at_directory(self) -> None:
        self._looking = True
        fds = {number: slab.fd for number, slab in self._catalog.slabs.items()}
        add_up = self._ticks % TICKS_BETWEEN_FOREIGN == 0

        def look() -> _Look:
            directory = self._directory
            if directory.lost() is not None:
                # Still nowhere to be found: `lost` says so, and there is another look.
                with contextlib.suppress(OSError):
                    directory.take_back(self._opening, fds)
            lost = directory.lost()
            if lost is None:
                directory.keep_tenant_key()
            return _Look(
                lost,
                [fd for fd in fds.values() if not directory.is_linked(fd)],
                has_index=directory.index_bytes() is not None,
                foreign_bytes=directory.foreign_bytes() if add_up else None,
            )

        self._worker.run(look, self._looked)

    def _looked(self, look: _Look | Failure) -> None:
        self._looking = False
        lost = look.lost if isinstance(look, _Look) else f"{self._directory.path}: {said(look)}"
        if lost != self._directory_lost:
            log.warning("%s", f"stores are refused for now: {lost}" if lost else f"{self._directory.path} is back")
        self._directory_lost = lost
        if self._closing or not isinstance(look, _Look):
            return
        if not look.has_index:
            self._journal.file_is_gone()
        if look.foreign_bytes is not None:
            self._catalog.foreign_bytes = look.foreign_bytes
        for slab in list(self._catalog.slabs.values()):
            # Its bytes are still taken, and nothing there would survive.
            if slab.fd in look.unlinked_fds and slab.idle:
                log.warning("%s: the file of slab %d was removed", self._directory.path, slab.number)
                self._retire(slab, self._pump_all)
        self._shrink()

    def _shrink(self) -> None:
        """When others have taken some of the space: one slab at a time, for its bytes are charged until it is gone."""
        if not self._shrinking and (coldest := self._catalog.slab_to_shrink_by()) is not None:
            self._shrinking = True
            self._retire(coldest, self._shrunk)

    def _shrunk(self) -> None:
        self._shrinking = False
        self._shrink()
        self._pump_all()

    # Scrub

    def scrub(self, bytes_per_s: float | None = None, sleep: Sleep = asyncio.sleep) -> AsyncIterator[str | None]:
        """Reads every chunk once, for each says None or in a sentence what is wrong; see `Scrub.run`."""
        return self._scrub.run(self._catalog, bytes_per_s=bytes_per_s, sleep=sleep)

    def _read_to_check(self, entry: Entry, memory: Memory, done: ReadDone, released: Released) -> bool:
        if self._reads >= self._options.queue_max:
            return False
        refusal: ReadOutcome | None = None
        if entry.forgotten or self._closing:
            refusal = ReadOutcome.ABSENT
        elif not self._read_health.may_try(self._clock()):
            refusal = ReadOutcome.SICK
        if refusal is not None:
            self._loop.call_soon(done, refusal)
            self._loop.call_soon(released)
        else:
            self._start_read(_Read(entry, memory, done, released, is_use=False))
        return True

    # What lies beside the chunks

    async def namespaces(self) -> dict[bytes, str]:
        """Canonical documents by namespace id."""
        return await self._ask(self._directory.namespaces)

    async def keep_namespace(self, document: str) -> None:
        """LimitExceeded when there is no room for more documents; OSError."""
        await self._ask(partial(self._directory.keep_namespace, document, self._small_files_bytes_max))

    async def drop_namespace(self, namespace_id: bytes) -> None:
        await self._ask(partial(self._directory.drop_namespace, namespace_id))

    async def last_uses(self) -> dict[bytes, float]:
        """When each namespace that has a document was last used, in seconds of the wall clock."""
        return await self._ask(self._directory.last_uses)

    async def note_use(self, namespace_id: bytes) -> None:
        """It is used just now. A namespace without a document is left out."""
        await self._ask(partial(self._directory.note_use, namespace_id))

    async def quotas(self) -> dict[str, dict[str, int]]:
        """Bytes by tenant id (hex) and tier."""
        return await self._ask(self._directory.quotas)

    async def keep_quotas(self, quotas: dict[str, dict[str, int]]) -> None:
        await self._ask(partial(self._directory.keep_quotas, quotas, self._small_files_bytes_max))

    async def keep_learned(self, learned: dict[str, dict[str, str]]) -> None:
        """By kind of engine and name. LimitExceeded when there is no room for it; OSError."""
        await self._ask(partial(self._directory.keep_learned, learned, self._small_files_bytes_max))

    @property
    def _small_files_bytes_max(self) -> int:
        return small_files_bytes_for(self._options.fs_bytes)

    async def _ask(self, job: Callable[[], T]) -> T:
        answer: asyncio.Future[T | Failure] = self._loop.create_future()
        self._worker.run(job, lambda result: None if answer.done() else answer.set_result(result))
        result = await answer
        if isinstance(result, Exception):
            raise result
        return result


def _why_not(entry: Entry, done: IoDone) -> str | None:
    """Why what was read is not the chunk, or None when it is."""
    slab, slot = entry.place
    expected = SlotHeader(
        slab.number,
        slot,
        slab.epoch,
        entry.sequence,
        slab.slot_bytes,
        entry.chunk,
        entry.payload_bytes,
        done.checksum,
    )
    # A header has one form, so nothing needs to be taken apart unless something is wrong.
    if done.head == expected.encode():
        return None
    try:
        header = SlotHeader.decode(done.head)
    except Damaged as error:
        return f"its header: {error}"
    if header._replace(payload_checksum=done.checksum) != expected:
        return "its header is that of another chunk, slot or time"
    return "its payload does not have the checksum in its header"


def _check_aligned(memory: Memory) -> None:
    if memory.address % BLOCK_BYTES or memory.nbytes <= 0:
        raise ValueError(f"{memory.nbytes} bytes at {memory.address:#x}: at least 1, at a multiple of {BLOCK_BYTES}")
