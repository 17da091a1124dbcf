"""Writes to the fs tier: from the request to a slot that holds its chunk, and what is evicted or removed to make room.

Concurrency: the event loop's. The order in which things happen, and what a death in between leaves, is in fs.py.
"""

import errno
import itertools
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from kvstore._native import IoDone
from kvstore.tiers.base import ChunkId, Memory, Released, Scope, WriteDone, WriteOutcome
from kvstore.tiers.fs_catalog import Entry, Evict, Grow, Place, Retire, SizeClass, Slab, Stuck, slab_charge
from kvstore.tiers.fs_format import (
    BLOCK_BYTES,
    HEADER_CHECKSUM_AT,
    SLOT_PAYLOAD_CHECKSUM_AT,
    SlabHeader,
    SlotHeader,
    slot_bytes_for,
    slot_offset,
)
from kvstore.tiers.fs_health import Health
from kvstore.tiers.fs_index import IndexUnusable
from kvstore.tiers.fs_removal import Removal, Removals
from kvstore.tiers.fs_serving import Serving, check_aligned
from kvstore.tiers.fs_worker import Failure, said

log = logging.getLogger(__name__)

GROWTH_RETRY_S = 1.0  # after a slab could not be made, evicting is preferred for so long
RETIRED_PER_SLICE = 100  # chunks of a slab that goes, five microseconds each
RETIRE_AGAIN_S = 0.02  # while some of them are being read, or zeroed
QUOTA_EVICTIONS_MAX = 64  # in one call: a tenant far beyond a new quota comes down to it with its next writes


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
class _Queue:
    """Writes of one slot size that have no slot yet."""

    slot_bytes: int
    waiting: deque[_Write] = field(default_factory=deque)
    coming: int = 0  # slots that were evicted for them and wait for the commit
    preparing: bool = False  # a slab is being made, or one of another size removed
    growth_error: str | None = None  # of the last slab that could not be made, since the last one that could
    gave_up_a_slab: bool = False  # for the retry after such an error


class Writes:
    """`removals`: may be given after the construction, before the first write. `closing`: no more are taken.
    `directory_lost`: why not now, or None."""

    removals: Removals

    def __init__(self, serving: Serving) -> None:
        self._catalog = serving.catalog
        self._journal = serving.journal
        self._directory = serving.directory
        self._worker = serving.worker
        self._pool = serving.pool
        self._loop = serving.loop
        self._clock = serving.clock
        self._step = serving.step
        self._options = serving.options
        self._counters = serving.counters
        self._on_evicted = serving.on_evicted
        self._request_numbers = serving.request_numbers
        self.running: dict[int, _Write] = {}  # by the pool's number
        self.count = 0  # waiting or running, the doomed included
        self.closing = False
        self.directory_lost: str | None = None
        self._by_chunk: dict[ChunkId, _Write] = {}  # waiting or running, not doomed
        self._queues: dict[int, _Queue] = {}
        self.health = Health(1)
        self._no_growth_until_s = 0.0
        self._growth_failed: tuple[float, str] | None = None  # when and why, if no slab could be made since

    @property
    def not_growing(self) -> str | None:
        """Why less than the cap is taken though more was wanted; None: more could be had, or was not asked for."""
        if self._growth_failed is None:
            return None
        at_s, why = self._growth_failed
        catalog = self._catalog
        return (
            f"{catalog.charged_bytes} of {catalog.cap_bytes} bytes are taken, and there was no room for more "
            f"{self._clock() - at_s:.0f} s ago ({why}); free space on the disk, or give a smaller --fs-bytes"
        )

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        check_aligned(memory)
        slot_bytes = slot_bytes_for(memory.nbytes)
        deadline_s = self._clock() + self._options.io_deadline_ms / 1000
        write = _Write(chunk, memory, slot_bytes, done, released, deadline_s)
        outcome = self._refusal(chunk)
        if outcome is None and not self._make_room_in_quota(chunk.tenant, slot_bytes):
            outcome = WriteOutcome.FULL
        self.count += 1
        if outcome is not None:
            self._end(write, outcome)
            return
        self._by_chunk[chunk] = write
        queue = self._queues.setdefault(slot_bytes, _Queue(slot_bytes))
        queue.waiting.append(write)
        self._pump(queue)

    def ended(self, done: IoDone) -> None:
        write = self.running[done.request]
        if done.late:
            self._late(write)
        else:
            del self.running[done.request]
            self._returned(write, done.error)

    def give_up_late(self) -> None:
        """Those that have had no slot until their deadline. One that was on its way comes with the next commit, or the
        next slab: then it is the disk that does not answer."""
        now_s = self._clock()
        for queue in self._queues.values():
            late = 0
            while queue.waiting and queue.waiting[0].deadline_s < now_s:
                late += 1
                self._end(queue.waiting.popleft(), WriteOutcome.LATE)
            self._counters.late += late
            if late and (queue.coming or queue.preparing):
                self.failed(f"making room for a chunk took longer than {self._options.io_deadline_ms} ms")

    def close(self) -> None:
        """What waits is given up."""
        self.closing = True
        for queue in self._queues.values():
            while queue.waiting:
                self._end(queue.waiting.popleft(), WriteOutcome.ABORTED)

    def doom(self, scope: Scope, removal: Removal) -> None:
        """What waits is given up; what runs ends for nothing, and the removal waits for it."""
        for write in [write for write in self._by_chunk.values() if scope.covers(write.chunk)]:
            if write.place is None:
                self._queues[write.slot_bytes].waiting.remove(write)
                self._end(write, WriteOutcome.ABORTED)
            else:
                # From here on another write of the same chunk is a new one.
                del self._by_chunk[write.chunk]
        for running in self.running.values():
            # Those that were given up as late are among them: their bytes may land yet.
            if running.doomed_by is None and scope.covers(running.chunk):
                running.doomed_by = removal
                removal.waits_for += 1

    def problems(self) -> Iterator[str]:
        for queue in self._queues.values():
            if queue.waiting and not (queue.coming or queue.preparing):
                yield f"{len(queue.waiting)} writes of {queue.slot_bytes} bytes wait for nothing"
        if len(self.running) + sum(len(queue.waiting) for queue in self._queues.values()) != self.count:
            yield f"{self.count} writes are counted, {len(self.running)} run"

    def _refusal(self, chunk: ChunkId) -> WriteOutcome | None:
        if self.closing:
            return WriteOutcome.ABORTED
        if self.removals.find(chunk) is not None or chunk in self._by_chunk:
            return WriteOutcome.PRESENT
        if self.directory_lost is not None:
            return WriteOutcome.SICK
        if self.count >= self._options.queue_max:
            return WriteOutcome.FULL
        if not self.health.may_try(self._clock()):
            return WriteOutcome.SICK
        return None

    def _make_room_in_quota(self, tenant: bytes, slot_bytes: int) -> bool:
        catalog = self._catalog
        quota_bytes = catalog.quota_of(tenant)
        if quota_bytes is None:
            return True
        wanted = slot_bytes + sum(write.slot_bytes for chunk, write in self._by_chunk.items() if chunk.tenant == tenant)
        if wanted > quota_bytes:
            return False
        self.evict_beyond_quota(tenant, wanted)
        return not catalog.beyond_quota(tenant, wanted)

    def evict_beyond_quota(self, tenant: bytes, more_bytes: int = 0) -> int:
        """Evicts the tenant's own until it may take so much more, but no more than QUOTA_EVICTIONS_MAX; how many."""
        catalog, evicted = self._catalog, 0
        while evicted < QUOTA_EVICTIONS_MAX and catalog.beyond_quota(tenant, more_bytes):
            oldest = catalog.oldest_of(tenant)
            if oldest is None:
                break
            self.evict(oldest, None)
            evicted += 1
        return evicted

    def _pump(self, queue: _Queue) -> None:
        """Gives slots to waiting writes, and sees to it that enough more are coming."""
        catalog = self._catalog
        while queue.waiting and (place := self._take_for_first(queue)) is not None:
            self._start(queue.waiting.popleft(), place)
        while len(queue.waiting) > queue.coming and not queue.preparing:
            may_grow = self._clock() >= self._no_growth_until_s
            match catalog.room_for(self._class_of(queue), may_grow=may_grow):
                case Grow(slot_count):
                    self._grow(queue, slot_count)
                case Retire(slab):
                    queue.preparing = True
                    self.retire(slab, partial(self._prepared, queue))
                case Evict(entry):
                    self.evict(entry, queue)
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

    def pump_all(self) -> None:
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
        self.retire(slab, partial(self._prepared, queue))
        return True

    def _drop_waiting(self, queue: _Queue) -> None:
        outcome = WriteOutcome.FULL
        if queue.growth_error is not None:
            outcome = WriteOutcome.SICK
            self.failed(queue.growth_error)
        queue.growth_error = None
        queue.gave_up_a_slab = False
        while queue.waiting:
            self._end(queue.waiting.popleft(), outcome)

    def _start(self, write: _Write, place: Place) -> None:
        slab, slot = place
        write.place = place
        write.sequence = self._journal.next_sequence()
        write.ghosts = slab.ghosts.get(slot, frozenset())
        self.removals.watch(write)
        header = SlotHeader(
            slab.number, slot, slab.epoch, write.sequence, slab.slot_bytes, write.chunk, write.memory.nbytes
        )
        number = next(self._request_numbers)
        self.running[number] = write
        left_ms = max(1, int((write.deadline_s - self._clock()) * 1000))
        self._pool.write(
            number,
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

    def _returned(self, write: _Write, error: int) -> None:
        self._step("write returned")
        assert write.place is not None
        place, write.place = write.place, None
        headers = write.ghosts | {write.chunk} if error else frozenset({write.chunk})
        if write.doomed_by is not None:
            # The removal that is under way zeroes the slot; a later one then finds it zeroed.
            first = write.watched_by or write.doomed_by
            if write.doomed_by is not first:
                self.removals.one_less(write.doomed_by)
            self.removals.hand_over(first, place, headers)
            self._end(write, WriteOutcome.ABORTED)
            return
        if write.watched_by is not None:
            removal, write.watched_by = write.watched_by, None
            if error:
                self.removals.hand_over(removal, place, headers)
                self._went_wrong(write, place, error)
                return
            self.removals.one_less(removal)
        if error:
            self._catalog.free(place, headers)
            self._went_wrong(write, place, error)
        elif write.told:
            self._catalog.free(place, headers)  # nobody waits for it, and it was said not to be stored
            self._end(write, WriteOutcome.LATE)
        else:
            entry = self._catalog.hold(write.chunk, place, write.sequence, write.memory.nbytes, proven=True)
            self._journal.put(entry)
            self.health.succeeded()
            self._counters.written_bytes += write.memory.nbytes
            self._end(write, WriteOutcome.STORED)
        self._pump(self._queues[write.slot_bytes])

    def _went_wrong(self, write: _Write, place: Place, error: int) -> None:
        queue = self._queues[write.slot_bytes]
        if write.told or error == errno.ETIMEDOUT:
            self.failed(f"writing took longer than {self._options.io_deadline_ms} ms")
            self._counters.late += not write.told
            self._end(write, WriteOutcome.LATE)
        elif error == errno.ECANCELED or self.closing:
            self._end(write, WriteOutcome.ABORTED)
        elif write.failed_at is None:
            self._counters.io_errors += 1
            write.failed_at = place
            queue.waiting.appendleft(write)
            victim = next(self._catalog.evictable(self._class_of(queue)), None)
            if victim is not None:
                self.evict(victim, queue)
        else:
            self._counters.io_errors += 1
            self.failed(f"writing: {os.strerror(error)}")
            self._end(write, WriteOutcome.SICK)
        self._pump(queue)

    def failed(self, reason: str) -> None:
        if self.health.reason is None:
            log.warning("%s: stores are refused for now: %s", self._directory.path, reason)
        self.health.failed(self._clock(), reason)

    def _late(self, write: _Write) -> None:
        self._counters.late += 1
        self.failed(f"writing took longer than {self._options.io_deadline_ms} ms")
        self._tell(write, WriteOutcome.LATE)

    def _tell(self, write: _Write, outcome: WriteOutcome) -> None:
        if write.told:
            return
        write.told = True
        if outcome not in (WriteOutcome.STORED, WriteOutcome.PRESENT):
            self._counters.dropped += 1
        if self._by_chunk.get(write.chunk) is write:
            del self._by_chunk[write.chunk]
        self._loop.call_soon(write.done, outcome)

    def _end(self, write: _Write, outcome: WriteOutcome) -> None:
        self._tell(write, outcome)
        self.count -= 1
        self._loop.call_soon(write.released)

    # Making room

    def evict(self, entry: Entry, queue: _Queue | None) -> None:
        """`queue`: whose writes wait for the slot; None: whose it is will be seen."""
        self._step("evicting")
        place = self._catalog.forget(entry)
        self._journal.forget(entry)
        self._evicted(entry.chunk)
        if queue is not None:
            queue.coming += 1

        def committed() -> None:
            self._catalog.free(place, place.slab.ghosts.get(place.slot, frozenset()) | {entry.chunk})
            if queue is not None:
                queue.coming -= 1
                self._pump(queue)
            else:
                self.pump_all()

        self._journal.after_commit(committed)

    def _evicted(self, chunk: ChunkId) -> None:
        self._counters.evictions += 1
        self._on_evicted(chunk)

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
            return self._directory.create_slab(header, slab_charge(slot_bytes, slot_count, catalog.unit_bytes))

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
                self._growth_failed = None
            else:
                log.warning("%s: a slab of %d bytes: %s", self._directory.path, header.file_bytes, said(result))
                queue.growth_error = f"making room: {said(result)}"
                self._no_growth_until_s = self._clock() + GROWTH_RETRY_S
                self._growth_failed = self._clock(), said(result)
                if isinstance(result, IndexUnusable):
                    self._journal.failed(result)
            self._prepared(queue)

        self._worker.run(grow, grown)

    def retire(self, slab: Slab, then: Callable[[], None]) -> None:
        """Removes an idle slab with all that it holds."""
        self._catalog.withdraw(slab)
        self._empty(slab, iter(list(slab.held.values())), then)

    def _empty(self, slab: Slab, entries: Iterator[Entry], then: Callable[[], None]) -> None:
        """A slice at a time. The slots need not wait for the commit, for nothing is written there any more."""
        if self.closing:
            return
        some = list(itertools.islice(entries, RETIRED_PER_SLICE))
        for entry in some:
            if entry.forgotten or entry.readers:
                continue
            self._catalog.free(self._catalog.forget(entry), frozenset({entry.chunk}))
            self._journal.forget(entry)
            self._evicted(entry.chunk)
        if len(some) == RETIRED_PER_SLICE:
            self._loop.call_soon(self._empty, slab, entries, then)
        elif slab.held or not slab.idle:
            self._loop.call_later(RETIRE_AGAIN_S, lambda: self._empty(slab, iter(list(slab.held.values())), then))
        else:
            self._remove(slab, then)

    def _remove(self, slab: Slab, then: Callable[[], None]) -> None:
        catalog = self._catalog
        catalog.remove_slab(slab)
        catalog.reserved_bytes += slab.charge_bytes
        catalog.barred_numbers.add(slab.number)
        header = slab.next_epoch(self._directory.directory_id)

        def removed(result: Failure | None) -> None:
            if result is None:
                catalog.reserved_bytes -= slab.charge_bytes
                catalog.barred_numbers.discard(slab.number)
            else:
                # Its bytes stay charged and its number stays taken, until the next start.
                log.error("%s: slab %d cannot be removed: %s", self._directory.path, slab.number, said(result))
                self.failed(f"removing a slab: {said(result)}")
            then()

        remove = partial(self._directory.remove_slab, slab.fd, header)
        self._journal.after_commit(lambda: self._worker.run(remove, removed))
