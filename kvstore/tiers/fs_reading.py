"""Reads from the fs tier: what comes back is the chunk that was asked for, or it is forgotten.

Concurrency: the event loop's.
"""

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore._native import IoDone
from kvstore.tiers.base import ChunkId, Memory, ReadDone, ReadOutcome, Released
from kvstore.tiers.fs_catalog import Entry
from kvstore.tiers.fs_format import BLOCK_BYTES, Damaged, SlotHeader, slot_offset
from kvstore.tiers.fs_health import Health
from kvstore.tiers.fs_removal import Removals
from kvstore.tiers.fs_serving import Serving, check_aligned
from kvstore.tiers.fs_worker import Failure

log = logging.getLogger(__name__)

READ_FAILURES_MAX = 3  # in a row: then it is the disk, not a chunk


@dataclass(eq=False, slots=True)
class _Read:
    entry: Entry
    memory: Memory
    done: ReadDone
    released: Released
    is_use: bool  # a scrub is none: it neither touches nor counts
    told: bool = False


class Reads:
    """`on_room`: there are free slots. `closing`: no more are taken."""

    def __init__(self, serving: Serving, removals: Removals, on_room: Callable[[], None]) -> None:
        self._catalog = serving.catalog
        self._journal = serving.journal
        self._directory = serving.directory
        self._worker = serving.worker
        self._pool = serving.pool
        self._loop = serving.loop
        self._clock = serving.clock
        self._options = serving.options
        self._counters = serving.counters
        self._request_numbers = serving.request_numbers
        self._removals = removals
        self._on_room = on_room
        self.running: dict[int, _Read] = {}  # by the pool's number
        self.closing = False
        self.health = Health(READ_FAILURES_MAX)

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        check_aligned(memory)
        entry = self._removals.find(chunk)
        refusal: ReadOutcome | None = None
        if entry is None or self.closing:
            refusal = ReadOutcome.ABSENT
        elif entry.payload_bytes != memory.nbytes:
            raise ValueError(f"a chunk of {entry.payload_bytes} bytes, but memory for {memory.nbytes}")
        elif len(self.running) >= self._options.queue_max:
            refusal = ReadOutcome.BUSY
        elif not self.health.may_try(self._clock()):
            refusal = ReadOutcome.SICK
        if refusal is not None:
            self._loop.call_soon(done, refusal)
            self._loop.call_soon(released)
            return
        assert entry is not None
        self._start(_Read(entry, memory, done, released, is_use=True))

    def ended(self, done: IoDone) -> None:
        read = self.running[done.request]
        if done.late:
            self._late(read)
        else:
            del self.running[done.request]
            self._returned(read, done)

    def _start(self, read: _Read) -> None:
        slab, slot = read.entry.place
        number = next(self._request_numbers)
        self.running[number] = read
        self._pool.read(
            number,
            slab.fd,
            slot_offset(slot, slab.slot_bytes),
            read.memory.address,
            slab.slot_bytes - BLOCK_BYTES,
            with_head=True,
            deadline_ms=self._options.io_deadline_ms,
        )
        slab.reading += 1
        read.entry.readers += 1

    def _returned(self, read: _Read, done: IoDone) -> None:
        entry = read.entry
        entry.place.slab.reading -= 1
        entry.readers -= 1
        outcome = self._judge(read, done) if done.error == 0 else self._went_wrong(read, done.error)
        self._tell(read, outcome)
        self._loop.call_soon(read.released)
        if entry.readers == 0 and (last := self._removals.on_last_reader.pop(entry, None)) is not None:
            last()

    def _judge(self, read: _Read, done: IoDone) -> ReadOutcome:
        entry = read.entry
        self.health.succeeded()
        if self._removals.find(entry.chunk) is not entry:
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
        self._discard(entry, damaged=entry.proven)
        return ReadOutcome.DAMAGED

    def _went_wrong(self, read: _Read, error: int) -> ReadOutcome:
        entry = read.entry
        if read.told or error == errno.ETIMEDOUT:
            self._failed(f"reading took longer than {self._options.io_deadline_ms} ms", at_once=True)
            self._counters.late += not read.told
            return ReadOutcome.LATE
        if error == errno.ECANCELED:
            return ReadOutcome.ABSENT
        self._counters.io_errors += 1
        if error != errno.ENODATA:
            self._failed(f"reading: {os.strerror(error)}", at_once=False)
        if self._removals.find(entry.chunk) is not entry:
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
        self._discard(entry, damaged=True)
        return ReadOutcome.DAMAGED

    def _failed(self, reason: str, *, at_once: bool) -> None:
        self.health.failed(self._clock(), reason, at_once=at_once)

    def _late(self, read: _Read) -> None:
        self._counters.late += 1
        self._failed(f"reading took longer than {self._options.io_deadline_ms} ms", at_once=True)
        self._tell(read, ReadOutcome.LATE)

    def _tell(self, read: _Read, outcome: ReadOutcome) -> None:
        if not read.told:
            read.told = True
            self._loop.call_soon(read.done, outcome)

    def problems(self) -> Iterator[str]:
        readers = Counter(read.entry for read in self.running.values())
        reading = Counter(read.entry.place.slab for read in self.running.values())
        if any(entry.readers != count for entry, count in readers.items()):
            yield f"of {len(readers)} chunks that are being read some count their readers wrongly"
        if any(slab.reading != reading[slab] for slab in self._catalog.slabs.values()):
            yield f"{len(self.running)} reads run, and a slab counts its own wrongly"

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """Used just now, in this order."""
        for chunk in chunks:
            if (entry := self._catalog.entries.get(chunk)) is not None:
                self._touch(entry)

    def _touch(self, entry: Entry) -> None:
        self._catalog.touch(entry)
        self._journal.touch(entry)

    def _discard(self, entry: Entry, *, damaged: bool) -> None:
        """Forgets a chunk whose bytes are not right; who still reads it finds it forgotten. Its slot is not used again
        in this run, unless it was no damage, the header could be zeroed, and nobody reads there then."""
        place = self._catalog.forget(entry)
        self._journal.forget(entry)
        slab, slot = place

        def committed() -> None:
            # With its ghost from the start: a removal that comes meanwhile must know of the header.
            self._catalog.quarantine(place, frozenset({entry.chunk}))
            self._worker.run(lambda: self._directory.zero_slots(slab.fd, [slot], slab.slot_bytes), zeroed)

        def zeroed(result: Failure | None) -> None:
            if result is None:
                slab.ghosts.pop(slot, None)
                if not damaged and not entry.readers and slot in slab.quarantined:
                    self._catalog.take(place)
                    self._catalog.free(place)
            self._on_room()

        self._journal.after_commit(committed)

    def read_to_check(self, entry: Entry, memory: Memory, done: ReadDone, released: Released) -> bool:
        if len(self.running) >= self._options.queue_max:
            return False
        refusal: ReadOutcome | None = None
        if entry.forgotten or self.closing:
            refusal = ReadOutcome.ABSENT
        elif not self.health.may_try(self._clock()):
            refusal = ReadOutcome.SICK
        if refusal is not None:
            self._loop.call_soon(done, refusal)
            self._loop.call_soon(released)
        else:
            self._start(_Read(entry, memory, done, released, is_use=False))
        return True


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
