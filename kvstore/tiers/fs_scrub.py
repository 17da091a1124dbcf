"""Reads what a tier holds once, at a pace, and says what is wrong with it. Knows no files: the tier reads.

Concurrency: the event loop's. Any number of passes may go on at a time; they share one buffer and so one read, because
two reads into the same memory would spoil each other's checksums. The buffer is free again when the read has returned,
whatever has become of the pass that asked for it, so a disk that hangs ends passes (after the read's deadline) and
holds one buffer. A chunk that was found bad has been forgotten by the tier before anybody else reads it.
"""

import asyncio
import ctypes
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from kvstore.tiers.base import Memory, ReadDone, ReadOutcome, Released
from kvstore.tiers.fs_catalog import Catalog, Entry, Place
from kvstore.tiers.fs_format import BLOCK_BYTES

T = TypeVar("T")

BUSY_PAUSE_S = 0.05  # while as many reads wait as may: requests go first
SLOTS_PER_TURN = 1_000  # looked at between two turns of the loop where none of them holds a chunk
PASS_PAUSE_S = 600.0  # between the end of a pass in the background and the next one

Sleep = Callable[[float], Awaitable[None]]
ReadEntry = Callable[[Entry, Memory, ReadDone, Released], bool]  # False: too many reads wait; nothing was begun


class Scrub:
    """`read`: begins to read a chunk that the catalog holds, checks it, and forgets it if it is bad."""

    def __init__(
        self,
        *,
        read: ReadEntry,
        add_region: Callable[[int, int], None],
        clock: Callable[[], float],
        io_deadline_s: float,
    ) -> None:
        self._read = read
        self._add_region = add_region
        self._clock = clock
        self._io_deadline_s = io_deadline_s
        self._buffers: list[mmap.mmap] = []  # the last one is in use; those before it were too small
        self._buffer_is_free = asyncio.Event()
        self._buffer_is_free.set()
        self.chunks = 0  # read so far

    async def run(
        self, catalog: Catalog, *, bytes_per_s: float | None, sleep: Sleep = asyncio.sleep
    ) -> AsyncIterator[str | None]:
        """One pass over what is held when its turn comes: a sentence for a chunk that is bad, None for one that is not.

        What a kill left half written is dropped as well, but is no problem. A disk that hangs ends the pass.
        """
        places = paced(_held_places(catalog), _bytes_at, bytes_per_s=bytes_per_s, clock=self._clock, sleep=sleep)
        async for place in places:
            entry = _entry_at(place)
            if entry is None:
                await asyncio.sleep(0)
                continue
            was_proven = entry.proven
            where = f"slab {place.slab.number}, slot {place.slot}"
            match await self._read_one(entry, sleep):
                case ReadOutcome.DAMAGED if was_proven:
                    yield f"{where}: not the bytes that were written; its chunk is forgotten"
                case ReadOutcome.LATE:
                    yield f"{where}: could not be read in {self._io_deadline_s:g} s; the rest was not looked at"
                    return
                case ReadOutcome.SICK:
                    yield f"{where}: could not be read"
                case _:
                    yield None

    async def run_for_ever(self, catalog: Catalog, bytes_per_s: float) -> None:
        while True:
            async for _ in self.run(catalog, bytes_per_s=bytes_per_s):
                pass
            await asyncio.sleep(PASS_PAUSE_S)

    async def _read_one(self, entry: Entry, sleep: Sleep) -> ReadOutcome:
        try:
            async with asyncio.timeout(self._io_deadline_s):
                while not self._buffer_is_free.is_set():
                    await self._buffer_is_free.wait()
        except TimeoutError:
            return ReadOutcome.LATE  # somebody else's read hangs
        self._buffer_is_free.clear()
        outcome: asyncio.Future[ReadOutcome] = asyncio.get_running_loop().create_future()
        memory = Memory(self._address_for(entry.slot_bytes - BLOCK_BYTES), entry.payload_bytes)
        try:
            while not self._read(entry, memory, _unless_done(outcome), self._buffer_is_free.set):
                await sleep(BUSY_PAUSE_S)
                if entry.forgotten:
                    self._buffer_is_free.set()
                    return ReadOutcome.ABSENT
        except asyncio.CancelledError:
            self._buffer_is_free.set()  # nothing was begun
            raise
        result = await outcome
        self.chunks += 1
        return result

    def _address_for(self, nbytes: int) -> int:
        if not self._buffers or len(self._buffers[-1]) < nbytes:
            self._buffers.append(mmap.mmap(-1, nbytes))
            self._add_region(_address_of(self._buffers[-1]), nbytes)
        return _address_of(self._buffers[-1])


def _address_of(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _unless_done(future: "asyncio.Future[ReadOutcome]") -> ReadDone:
    """The pass may have been cancelled meanwhile."""
    return lambda outcome: None if future.done() else future.set_result(outcome)


def _held_places(catalog: Catalog) -> Iterator[Place]:
    """Also some that hold nothing, so that a long row of these does not hold up the loop."""
    for number in sorted(catalog.slabs):
        slab = catalog.slabs.get(number)
        if slab is None:
            continue  # removed meanwhile
        for slot in range(slab.slot_count):
            if slot in slab.held or slot % SLOTS_PER_TURN == 0:
                yield Place(slab, slot)


def _entry_at(place: Place) -> Entry | None:
    return place.slab.held.get(place.slot)


def _bytes_at(place: Place) -> int:
    return place.slab.slot_bytes if _entry_at(place) is not None else 0


async def paced(
    items: Iterable[T],
    nbytes_of: Callable[[T], int],
    *,
    bytes_per_s: float | None,
    clock: Callable[[], float],
    sleep: Sleep,
) -> AsyncIterator[T]:
    """Yields the items so that their bytes never run ahead of the rate. Time lost is not made up for: a scrub that was
    held up does not come back as a burst. None: no limit."""
    next_s = clock()
    for item in items:
        wait_s = next_s - clock()
        if wait_s > 0:
            await sleep(wait_s)
        nbytes = nbytes_of(item)  # a chunk found bad is no longer there afterwards
        yield item
        if bytes_per_s is not None:
            next_s = max(next_s, clock()) + nbytes / bytes_per_s
