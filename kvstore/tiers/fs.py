"""The filesystem tier: chunks in preallocated slab files, checked at every read, warm after a restart.

Who does what
    event loop      owns everything here, in Reads and Writes, the catalog and the journal: decides, submits, calls
                    back. Never blocks.
    I/O threads     (native IoPool) move whole slots between a slab file and memory, and take checksums.
    worker thread   (Worker, one, in order) recovery at start, then LMDB commits, slab files, zeroing, small files.
    child process   reads the LMDB file once before the daemon does.
The only things two threads share are the pool's and the worker's queues. A catalog belongs to the worker until recovery
is done and to the loop from then on; LMDB belongs to the worker always.

What orders them
    write       slot taken -> header and payload written -> held, STORED -> index record with the next commit
    evict       out of the catalog -> commit without the record -> slot free.        So a record in the index always
                points at a slot that nobody has written to since, and a kill makes no index lie.
    remove      running writes doomed, out of reach -> out of the catalog -> commit -> headers zeroed and synced ->
                reported (fs_removal). Zeroed are also idle slots that still bear a header of what is removed (`ghosts`:
                an eviction leaves it there, a failed write may have), and what a running write was going to overwrite,
                should it fail.
    retire      no slot of the slab is handed out -> all its chunks out of the catalog, a slice at a time -> commit ->
                another epoch in its header, synced -> unlinked
    stop        I/O has returned -> last commit -> ghosts zeroed -> LMDB synced -> STATE says clean
A slot with I/O is neither freed, evicted nor rewritten until that I/O has returned: a write's slot is `taken`, a read's
chunk has a reader. Past its deadline a request is answered LATE; slot and memory stay busy until the call is back.

What if something dies
    the daemon      Nothing in the index is lost or wrong; stores since the last commit are forgotten by the next start.
    the machine     Without a clean stop every header is read; a torn slot is found at its first read, and is no
                    corruption.
    the disk        A failed write is tried once more in another slot, then dropped, and the tier is sick: stores are
                    refused but for a trial now and then. Failed reads cost their chunk, three in a row make reads sick.
    LMDB            The file is dropped and written anew from the catalog (Journal), as it is after a rebuild.

Bounds: `queue_max` writes and as many reads are waiting or running, more are refused; a request waits `io_deadline_ms`.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from kvstore._native import IoPool
from kvstore.tiers.base import (
    ChunkId,
    Memory,
    ReadDone,
    ReadOutcome,
    Released,
    Removed,
    Scope,
    WriteDone,
    WriteOutcome,
)
from kvstore.tiers.fs_catalog import Catalog, Slab, small_files_bytes_for
from kvstore.tiers.fs_check import Check
from kvstore.tiers.fs_directory import FsDirectory, Step, no_step
from kvstore.tiers.fs_format import slot_bytes_for
from kvstore.tiers.fs_journal import Journal
from kvstore.tiers.fs_paths import STATE
from kvstore.tiers.fs_reading import Reads
from kvstore.tiers.fs_recovery import Cancelled, Recovered, Recovery
from kvstore.tiers.fs_removal import Removals
from kvstore.tiers.fs_scrub import Scrub, Sleep
from kvstore.tiers.fs_serving import Counters, FsOptions, FsStats, Serving
from kvstore.tiers.fs_worker import Failure, Worker, said
from kvstore.tiers.fs_writing import Writes

log = logging.getLogger(__name__)

T = TypeVar("T")

CHUNKS_PER_SLICE = 250  # slots of a list of all chunks; a lister makes a row of each chunk
TICK_S = 1.0
TICKS_BETWEEN_FOREIGN = 30  # adding up other people's files costs a stat each


class Held(NamedTuple):
    chunk: ChunkId
    slot_bytes: int
    idle_s: float  # since its last use


@dataclass(frozen=True, slots=True)
class _Look:
    """What the worker found when it looked at the directory."""

    lost: str | None
    unlinked_fds: list[int]
    has_index: bool
    foreign_bytes: int | None


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
        # Empty, until recovery brings the real one.
        self._catalog = Catalog(options.fs_bytes, unit_bytes=directory.unit_bytes)
        self._ready = asyncio.Event()
        self._closing = False
        self._counters = Counters()
        self._progress = (0, 0)
        self._cancelled = threading.Event()
        self._when_ready: list[Callable[[], None]] = []
        # Told of every chunk that is held or forgotten from the start on; must not call the tier.
        self.on_change: Callable[[ChunkId, bool], None] | None = None
        self.on_evicted: Callable[[ChunkId], None] = lambda _chunk: None  # of a change, that it was for room

        self._pool = IoPool(options.n_read_threads, options.n_write_threads)
        for address, nbytes in regions:
            self._pool.add_region(address, nbytes)
        self._quotas: dict[bytes, int] = {}  # by tenant
        self._recovery_error: str | None = None
        self._ticks = 0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._shrinking = False
        self._looking = False  # the worker looks at the directory for the tick
        self._quiet: asyncio.Future[None] | None = None
        self._scrub = Scrub(
            read=lambda *read: self._reads.read_to_check(*read),  # noqa: PLW0108 - there are none before recovery
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
            error = f"{self._directory.path} could not be read: {said(result)}"
            if error != self._recovery_error:
                log.error("%s; trying again every %g s", error, TICK_S)
            self._recovery_error = error
            return
        self._recovery_error = None
        self._catalog = result.catalog
        self._catalog.on_change = self.on_change
        used = {tenant: self._catalog.set_quota(tenant, nbytes) for tenant, nbytes in self._quotas.items()}
        self._journal = Journal(result, self._directory, self._worker, self._options.commit_interval_s, self._step)
        self._opening = result.opening
        serving = Serving(
            catalog=self._catalog,
            journal=self._journal,
            directory=self._directory,
            worker=self._worker,
            pool=self._pool,
            loop=self._loop,
            clock=self._clock,
            step=self._step,
            options=self._options,
            counters=self._counters,
            request_numbers=itertools.count(),
            on_evicted=self.on_evicted,
        )
        self._writes = Writes(serving)
        self._removals = self._writes.removals = Removals(
            self._catalog,
            self._journal,
            self._directory,
            self._worker,
            self._loop,
            self._step,
            running=self._writes.running.values,
            on_failure=self._writes.failed,
            on_end=self._removal_ended,
        )
        self._reads = Reads(serving, self._removals, self._writes.pump_all)
        self._reads.closing = self._writes.closing = self._closing
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
        self._keep_to_quotas([tenant for tenant, nbytes in used.items() if nbytes > self._quotas[tenant]])
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
        if self._ready.is_set():
            self._reads.closing = True
            self._writes.close()
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
        for place, _ in self._catalog.idle_ghosts():
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
        if self._worker.outstanding:
            return
        if not self._ready.is_set() or (
            not self._reads.running and not self._writes.running and self._journal.is_quiet and self._removals.is_idle
        ):
            self._quiet.set_result(None)

    # Questions

    def contains(self, chunk: ChunkId) -> bool:
        return self._ready.is_set() and self._removals.find(chunk) is not None

    def chunks(self) -> Iterator[list[Held]]:
        """Every chunk, in no order, a slice at a time; the tier may be called between slices (see `Catalog.walk`). A
        chunk that a removal has yet to get to is among them."""
        catalog = self._catalog
        for entries in catalog.walk(CHUNKS_PER_SLICE):
            yield [Held(entry.chunk, entry.slot_bytes, catalog.idle_s(entry)) for entry in entries]

    def usage(self) -> Iterator[tuple[bytes, bytes, int, int]]:
        """Namespace and tenant, their chunks and bytes of slots. The tier may be called meanwhile: whoever has gone by
        his turn is left out."""
        known = self._catalog.usage
        for owner in list(known):
            if (usage := known.get(owner)) is not None:
                yield *owner, usage.chunks, usage.nbytes

    def holds(self, namespace: bytes | None, tenant: bytes | None) -> bool:
        """See `Catalog.holds`."""
        return self._catalog.holds(namespace, tenant)

    @property
    def sick(self) -> str | None:
        if not self._ready.is_set():
            return self._recovery_error
        return self._writes.directory_lost or self._writes.health.reason or self._reads.health.reason

    def has_room(self, nbytes: int) -> bool:
        """Whether a chunk of so many bytes that is written next displaces none."""
        may_grow = not self._ready.is_set() or self._writes.not_growing is None
        return self._catalog.has_room(slot_bytes_for(nbytes), may_grow=may_grow)

    def stats(self) -> FsStats:
        catalog, counters, ready = self._catalog, self._counters, self._ready.is_set()
        return FsStats(
            capacity_bytes=catalog.cap_bytes,
            used_bytes=catalog.used_bytes,
            overhead_bytes=catalog.overhead_bytes,
            chunks=len(catalog.entries),
            evictions=counters.evictions,
            corruptions=counters.corruptions,
            dropped=counters.dropped,
            sick=self.sick,
            not_growing=self._writes.not_growing if ready else None,
            warming=None if ready else self._progress,
            direct=self._directory.direct,
            torn=counters.torn,
            quarantined=catalog.quarantined_count,
            io_errors=counters.io_errors,
            late=counters.late,
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            writes_queued=self._writes.count if ready else 0,
            reads_queued=len(self._reads.running) if ready else 0,
            scrubbed_chunks=self._scrub.chunks,
            tenants=catalog.tenant_count,
            unindexed=self._journal.unindexed if ready else 0,
        )

    def problems(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.check())

    def check(self) -> Iterator[list[str]]:
        """`problems` in slices, for each what was found in it; the tier may be called in between (see `Check`)."""
        if self._ready.is_set():
            yield [*self._reads.problems(), *self._writes.problems()]
            yield from Check(self._catalog).slices()

    # Chunks

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        if self._ready.is_set():
            self._writes.write(chunk, memory, done, released)
            return
        self._counters.dropped += 1
        self._loop.call_soon(done, WriteOutcome.ABORTED if self._closing else WriteOutcome.SICK)
        self._loop.call_soon(released)

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        if self._ready.is_set():
            self._reads.read(chunk, memory, done, released)
            return
        self._loop.call_soon(done, ReadOutcome.ABSENT)
        self._loop.call_soon(released)

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """Used just now, in this order."""
        if self._ready.is_set():
            self._reads.touch(chunks)

    def remove(
        self,
        scope: Scope,
        done: Callable[[Removed], None],
        *,
        unused_s: float | None = None,
        bytes_wanted: int | None = None,
        dry_run: bool = False,
    ) -> None:
        """See `Tier.remove`. `unused_s`: only what was not used for so long when this is called, nor is until its turn
        comes; `bytes_wanted`: of that only the least recently used, until so much is free, or less where some of it was
        used or had gone by its turn. `dry_run`: counts, and removes nothing. Until the tier is warm all of it waits."""
        if not self._ready.is_set() and not self._closing:
            again = partial(self.remove, scope, done, unused_s=unused_s, bytes_wanted=bytes_wanted, dry_run=dry_run)
            self._when_ready.append(again)
        elif self._closing:
            self._loop.call_soon(done, Removed(0, 0, "the tier is closing"))
        elif dry_run:
            self._removals.count(scope, done, unused_s=unused_s, bytes_wanted=bytes_wanted)
        elif unused_s is not None or bytes_wanted is not None:
            self._removals.begin_of_oldest(scope, done, unused_s=unused_s, bytes_wanted=bytes_wanted)
        else:
            self._writes.doom(scope, self._removals.begin(scope, done))

    def _removal_ended(self) -> None:
        self._writes.pump_all()
        self._look_quiet()

    def _collect(self) -> None:
        for done in self._pool.poll():
            (self._reads if done.request in self._reads.running else self._writes).ended(done)
        self._look_quiet()

    def set_quota(self, tenant: bytes, nbytes: int | None) -> int:
        """What the tenant's slots may take here; None: no limit. Returns what they take now (0 without a limit).

        A write beyond it evicts the tenant's own least recently used chunks, or is refused as FULL. What is there
        already stays: the caller removes it. While the tier warms nobody knows what is there, and it does that itself
        as soon as it is warm.
        """
        if nbytes is None:
            self._quotas.pop(tenant, None)
        else:
            self._quotas[tenant] = nbytes
        return self._catalog.set_quota(tenant, nbytes)

    def _keep_to_quotas(self, tenants: list[bytes]) -> None:
        """A bounded number of evictions a commit, for all that wait for one are ended in one turn. What is being read
        then is left to the tenant's next write."""
        while tenants and not self._closing:
            if self._writes.evict_beyond_quota(tenants[-1]):
                self._journal.after_commit(partial(self._keep_to_quotas, tenants))
                return
            tenants.pop()

    # Now and then

    def _tick(self) -> None:
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        if not self._ready.is_set():
            if self._recovery_error is not None and self._worker.outstanding == 0:
                self._recover()
            return
        self._writes.give_up_late()
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
        if lost != self._writes.directory_lost:
            log.warning("%s", f"stores are refused for now: {lost}" if lost else f"{self._directory.path} is back")
        self._writes.directory_lost = lost
        if self._closing or not isinstance(look, _Look):
            return
        if not look.has_index:
            self._journal.file_is_gone()
        if look.foreign_bytes is not None:
            self._catalog.foreign_bytes = look.foreign_bytes
        for slab in list(self._catalog.slabs.values()):
            # Its bytes are still taken, and nothing there would survive.
            if slab.fd in look.unlinked_fds and slab.idle and not slab.withdrawn:
                log.warning("%s: the file of slab %d was removed", self._directory.path, slab.number)
                self._writes.retire(slab, self._writes.pump_all)
        self._shrink()

    def _shrink(self) -> None:
        """When others have taken some of the space: one slab at a time, for its bytes are charged until it is gone."""
        if not self._shrinking and (coldest := self._catalog.slab_to_shrink_by()) is not None:
            self._shrinking = True
            self._writes.retire(coldest, self._shrunk)

    def _shrunk(self) -> None:
        self._shrinking = False
        self._shrink()
        self._writes.pump_all()

    # Scrub

    def scrub(self, bytes_per_s: float | None = None, sleep: Sleep = asyncio.sleep) -> AsyncIterator[str | None]:
        """Reads every chunk once, for each says None or in a sentence what is wrong; see `Scrub.run`."""
        return self._scrub.run(self._catalog, bytes_per_s=bytes_per_s, sleep=sleep)

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
        return small_files_bytes_for(self._options.fs_bytes, self._directory.unit_bytes)

    async def _ask(self, job: Callable[[], T]) -> T:
        answer: asyncio.Future[T | Failure] = self._loop.create_future()
        self._worker.run(job, lambda result: None if answer.done() else answer.set_result(result))
        result = await answer
        if isinstance(result, Exception):
            raise result
        return result
