"""Removals that last: out of reach at once, forgotten a slice at a time, then zeroed on disk, then reported.

Concurrency: the event loop's, but for the zeroing, which the worker does. Any number of removals sweep through the
catalog at a time, between other turns of the loop; meanwhile `find` is what says whether a chunk is there, and forgets
one that a sweep has not reached yet. What was written after a removal began (its sequence says so) stays. A removal of
what was not used lately takes each chunk only when its sweep gets there: one that is used before, or being read then,
stays. One removal at a time is then made to last, in the order in which they came.

    forgotten, and no read or write of it runs -> commit, so that the index has none of it -> ghosts taken -> commit, so
    that what slabs given up meanwhile held has gone from disk -> headers zeroed and synced, or the whole slab's epoch
    raised -> slots free -> reported

Ghosts are slots that hold nothing and still bear a header of what is removed: an eviction leaves it there, a failed
write or the failed zeroing of a damaged chunk may have.
When the daemon dies, an unreported removal may have happened in part.
"""

import heapq
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvstore.tiers.base import ChunkId, Removed, Scope
from kvstore.tiers.fs_catalog import Catalog, Entry, Place, Slab
from kvstore.tiers.fs_directory import FsDirectory, Step
from kvstore.tiers.fs_format import SlabHeader
from kvstore.tiers.fs_journal import Journal
from kvstore.tiers.fs_worker import Failure, Worker, said

log = logging.getLogger(__name__)

SLOTS_ZEROED_ONE_BY_ONE_MAX = 8  # more, and all that a slab holds: its epoch is raised instead
STEPS_PER_SLICE = 1_000  # a third of a microsecond or so each
STEPS_OF_A_FORGET = 20
STEPS_OF_A_FREE = 5
STEPS_OF_A_CHOICE = 3
SLOTS_PER_STEP = 10  # looked at, where none of them holds a chunk


class Write(Protocol):
    """One that runs, as far as a removal is concerned."""

    ghosts: frozenset[ChunkId]  # whose headers lay in the slot before
    doomed_by: "Removal | None"  # which covers its chunk
    watched_by: "Removal | None"  # which covers one of them


class Loop(Protocol):
    def call_soon(self, call: Callable[..., None], /, *arguments: object) -> object: ...


@dataclass(eq=False, slots=True)
class Removal:
    """`unused_since_us` and `bytes_wanted`: only what was last used then at the latest, and of that only the least
    recently used until so much is free; None: whenever, and all."""

    scope: Scope
    done: Callable[[Removed], None]
    before: int  # writes of a higher sequence began after it
    unused_since_us: int | None = None
    bytes_wanted: int | None = None
    forgotten: set[ChunkId] = field(default_factory=set)  # unless it is of everything in the scope
    slots: dict[Slab, dict[int, frozenset[ChunkId]]] = field(default_factory=dict)  # to be zeroed, with whose headers
    quarantined: set[Place] = field(default_factory=set)  # of those slots
    waits_for: int = 1  # reads and writes that must return first, and the sweep
    is_swept: bool = False
    has_ghosts: bool = False  # they have been added
    chunks: int = 0
    nbytes: int = 0

    @property
    def is_of_everything(self) -> bool:
        return self.unused_since_us is None and self.bytes_wanted is None

    def covers(self, entry: Entry) -> bool:
        return not entry.forgotten and entry.sequence <= self.before and self.scope.covers(entry.chunk)

    def covers_header(self, chunk: ChunkId) -> bool:
        """Whether a header of it on disk, of whatever time, would bring back what was removed."""
        return self.scope.covers(chunk) if self.is_of_everything else chunk in self.forgotten

    def add(self, place: Place, headers: frozenset[ChunkId]) -> None:
        self.slots.setdefault(place.slab, {})[place.slot] = headers


class _Oldest:
    """Of what it is shown the least recently used, until they have the bytes wanted; None: all."""

    def __init__(self, bytes_wanted: int | None) -> None:
        self._bytes_wanted = bytes_wanted
        self._newest_first: list[tuple[int, int, Entry]] = []  # a heap; the number in the middle is never equal
        self.nbytes = 0

    def show(self, entry: Entry) -> None:
        heap = self._newest_first
        shown = (-entry.tick, id(entry), entry)
        self.nbytes += entry.slot_bytes
        if self._bytes_wanted is None:
            heap.append(shown)
            return
        heapq.heappush(heap, shown)
        while self.nbytes - heap[0][2].slot_bytes >= self._bytes_wanted:
            self.nbytes -= heapq.heappop(heap)[2].slot_bytes

    def __len__(self) -> int:
        return len(self._newest_first)

    def __iter__(self) -> Iterator[Entry]:
        """In no order; without those that were used since."""
        return (entry for tick, _, entry in self._newest_first if entry.tick == -tick)


class Removals:
    """`running`: the writes that run now. `on_last_reader`: what to call when nobody reads a forgotten chunk any more.
    `on_failure` is told why a removal may not last, `on_end` that one has ended, and there are free slots."""

    def __init__(
        self,
        catalog: Catalog,
        journal: Journal,
        directory: FsDirectory,
        worker: Worker,
        loop: Loop,
        step: Step,
        *,
        running: Callable[[], Collection[Write]],
        on_failure: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._journal = journal
        self._directory = directory
        self._worker = worker
        self._loop = loop
        self._step = step
        self._running = running
        self.on_last_reader: dict[Entry, Callable[[], None]] = {}
        self._on_failure = on_failure
        self._on_end = on_end
        self._waiting: list[Removal] = []  # the first one is made to last, once it is swept
        self._sweeping: list[Removal] = []  # of everything in a scope
        self._taking_ghosts: Removal | None = None

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def find(self, chunk: ChunkId) -> Entry | None:
        """The chunk, if it is held and no removal covers it."""
        entry = self._catalog.entries.get(chunk)
        if entry is None:
            return None
        removal = self._first_that_covers(entry)
        if removal is None:
            return entry
        self._forget(removal, entry)
        return None

    def _first_that_covers(self, entry: Entry) -> Removal | None:
        """What it covers is its own to forget, for no later removal may have zeroed it when this one is reported."""
        return next((removal for removal in self._sweeping if removal.covers(entry)), None)

    def begin(self, scope: Scope, done: Callable[[Removed], None]) -> Removal:
        """The caller sees to the writes that run: each that it dooms adds one to `waits_for`."""
        removal = Removal(scope, done, self._journal.sequence)
        self._waiting.append(removal)
        self._sweeping.append(removal)
        self._loop.call_soon(self._sweep, removal, self._candidates(removal))
        return removal

    def begin_of_oldest(
        self, scope: Scope, done: Callable[[Removed], None], *, unused_s: float | None, bytes_wanted: int | None
    ) -> None:
        """Writes that run are neither unused nor old."""
        removal = self._of_oldest(scope, done, unused_s, bytes_wanted)
        self._waiting.append(removal)
        if bytes_wanted is None:
            self._loop.call_soon(self._sweep, removal, self._candidates(removal))
        else:
            self._choose(removal, lambda oldest: self._sweep(removal, iter(oldest)))

    def count(
        self, scope: Scope, done: Callable[[Removed], None], *, unused_s: float | None, bytes_wanted: int | None
    ) -> None:
        """What such a removal would take, of what is there when the count gets to it."""
        self._choose(
            self._of_oldest(scope, done, unused_s, bytes_wanted),
            lambda oldest: done(Removed(len(oldest), oldest.nbytes)),
        )

    def hand_over(self, removal: Removal, place: Place, headers: frozenset[ChunkId]) -> None:
        """What the removal waited for has returned, and leaves it the slot."""
        removal.add(place, headers)
        self.one_less(removal)

    def one_less(self, removal: Removal) -> None:
        removal.waits_for -= 1
        self._make_it_last(removal)

    # Sweep

    def _of_oldest(
        self, scope: Scope, done: Callable[[Removed], None], unused_s: float | None, bytes_wanted: int | None
    ) -> Removal:
        since_us = None if unused_s is None else self._catalog.unused_since_us(unused_s)
        return Removal(scope, done, self._journal.sequence, since_us, bytes_wanted)

    def _candidates(self, removal: Removal) -> Iterator[Entry | None]:
        """Each costs a step; None is one that found nothing."""
        if removal.scope.chunks is not None:
            yield from map(self._catalog.entries.get, removal.scope.chunks)
            return
        for entries in self._catalog.walk(SLOTS_PER_STEP):
            yield None
            yield from entries

    def _is_due(self, removal: Removal, entry: Entry) -> bool:
        if not removal.covers(entry):
            return False
        if removal.is_of_everything:
            return True
        since_us = removal.unused_since_us
        return not entry.readers and (since_us is None or self._catalog.used_us(entry) <= since_us)

    def _choose(self, removal: Removal, then: Callable[[_Oldest], None]) -> None:
        """A slice at a time; `then` in a later turn."""
        oldest = _Oldest(removal.bytes_wanted)
        candidates = self._candidates(removal)

        def go_on() -> None:
            steps = 0
            for entry in candidates:
                if entry is not None and self._is_due(removal, entry):
                    oldest.show(entry)
                    steps += STEPS_OF_A_CHOICE
                steps += 1
                if steps >= STEPS_PER_SLICE:
                    self._loop.call_soon(go_on)
                    return
            then(oldest)

        self._loop.call_soon(go_on)

    def _sweep(self, removal: Removal, candidates: Iterator[Entry | None]) -> None:
        steps = 0
        for entry in candidates:
            if entry is not None and self._is_due(removal, entry):
                self._forget(self._first_that_covers(entry) or removal, entry)
                steps += STEPS_OF_A_FORGET
            steps += 1
            if steps >= STEPS_PER_SLICE:
                self._loop.call_soon(self._sweep, removal, candidates)
                return
        removal.is_swept = True
        if removal.is_of_everything:
            self._sweeping.remove(removal)
        if self._waiting[0] is removal:
            self._take_ghosts_after_commit()
        self.one_less(removal)

    def _forget(self, removal: Removal, entry: Entry) -> None:
        removal.chunks += 1
        removal.nbytes += entry.slot_bytes
        if not removal.is_of_everything:
            removal.forgotten.add(entry.chunk)
        place = self._catalog.forget(entry)
        self._journal.forget(entry)
        headers = frozenset({entry.chunk})
        if entry.readers:
            removal.waits_for += 1
            self.on_last_reader[entry] = partial(self.hand_over, removal, place, headers)
        else:
            removal.add(place, headers)

    # On disk

    def _take_ghosts_after_commit(self) -> None:
        # What was evicted before is free by the time this commit is done, with its ghosts.
        self._journal.after_commit(partial(self._begin_with_ghosts, self._waiting[0]))

    def _begin_with_ghosts(self, removal: Removal) -> None:
        self._taking_ghosts = removal
        for write in self._running():
            self.watch(write)
        self._take_ghosts(removal, self._catalog.idle_ghosts())

    def watch(self, write: Write) -> None:
        """It runs. Should it fail, the removal that takes ghosts just now gets the slot, if it covers one there."""
        removal = self._taking_ghosts
        if removal is None or write.doomed_by is removal:
            return  # it waits for that one already, and gets its slot however it ends
        if any(removal.covers_header(chunk) for chunk in write.ghosts):
            write.watched_by = removal
            removal.waits_for += 1

    def _take_ghosts(self, removal: Removal, ghosts: Iterator[tuple[Place, frozenset[ChunkId]]]) -> None:
        steps = 0
        for place, headers in ghosts:
            if any(removal.covers_header(chunk) for chunk in headers):
                if place.slot in place.slab.quarantined:
                    removal.quarantined.add(place)
                self._catalog.take(place)
                removal.add(place, headers)
                steps += STEPS_OF_A_FREE
            steps += STEPS_OF_A_CHOICE
            if steps >= STEPS_PER_SLICE:
                self._loop.call_soon(self._take_ghosts, removal, ghosts)
                return
        self._taking_ghosts = None
        removal.has_ghosts = True
        self._make_it_last(removal)

    def _make_it_last(self, removal: Removal) -> None:
        if removal.waits_for or not removal.has_ghosts:
            return
        forget: list[tuple[int, SlabHeader]] = []
        zero: list[tuple[Slab, Collection[int]]] = []
        for slab, covered in removal.slots.items():
            whole = not slab.held and not slab.reading and slab.taken == len(covered)
            if whole and len(covered) > SLOTS_ZEROED_ONE_BY_ONE_MAX:
                slab.ghosts.clear()
                forget.append((slab.fd, slab.next_epoch(self._directory.directory_id)))
            else:
                zero.append((slab, covered))

        def work() -> None:
            self._step("removing")
            self._directory.settle()
            for fd, header in forget:
                self._directory.forget_slab(fd, header)
            for slab, slots in zero:
                self._directory.zero_slots(slab.fd, slots, slab.slot_bytes)
            self._step("removed")

        # Behind the slabs that were given up meanwhile, with ghosts that are in no catalog any more.
        self._journal.after_commit(partial(self._worker.run, work, partial(self._zeroed, removal)))

    def _zeroed(self, removal: Removal, result: Failure | None) -> None:
        failed = None if result is None else said(result)
        if failed is not None:
            log.error("%s: a removal may not last: %s", self._directory.path, failed)
            self._on_failure(f"removing: {failed}")
        slots = (
            (Place(slab, slot), headers) for slab, covered in removal.slots.items() for slot, headers in covered.items()
        )
        self._free(removal, slots, failed)

    def _free(self, removal: Removal, slots: Iterator[tuple[Place, frozenset[ChunkId]]], failed: str | None) -> None:
        steps = 0
        for place, headers in slots:
            give_back = self._catalog.quarantine if place in removal.quarantined else self._catalog.free
            give_back(place, headers if failed else frozenset())
            steps += STEPS_OF_A_FREE
            if steps >= STEPS_PER_SLICE:
                self._loop.call_soon(self._free, removal, slots, failed)
                return
        self._loop.call_soon(removal.done, Removed(removal.chunks, removal.nbytes, failed))
        assert self._waiting[0] is removal
        del self._waiting[0]
        if self._waiting and self._waiting[0].is_swept:
            self._take_ghosts_after_commit()
        self._on_end()
