"""What lies where in the fs tier, what it costs, and what has to go. Pure: no I/O; time is asked of an argument.

One thread at a time owns a catalog: the tier's worker while it fills it at start, then the event loop. It is the truth
while the daemon lives; LMDB keeps a copy for the next start.

Every slot of a slab is in exactly one state:

    free -> taken -> held -> taken -> free      taken: being written, or evicted and not yet forgotten by the index
                       \\-> taken -> quarantined

Invariants, checked by `problems`:
* free + taken + held + quarantined == slot count, in every slab.
* A chunk is held at most once, and lies in the slots' class that its length asks for.
* A slot with a reader is never taken: it is neither evicted nor rewritten.
* `charged_bytes` exceeds the cap only while the tier shrinks: after a start with a smaller cap, or when files of others
  have grown.
* A slot that is not held may still bear a valid header only of the chunks that `ghosts` names for it.

Memory: about 500 bytes for each chunk held.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvstore.tiers.base import ChunkId
from kvstore.tiers.fs_format import BLOCK_BYTES, SLOTS_PER_SLAB_MAX, SlabHeader, slab_file_bytes, slot_bytes_for

TICKS_ARE_TIMES_FROM = 1_500_000_000_000_000  # a time in 2017; what a rebuild takes from headers is less by far
SLABS_PER_TIER = 64  # of the usual size; so many that taking one from a class hurts little, so few that they are cheap
SLAB_BYTES_MAX = 8 << 30
SMALL_FILES_BYTES_MIN = 256 << 10
SMALL_FILES_BYTES_MAX = 8 << 20

_INDEX_BASE_BYTES = 256 << 10
_INDEX_BYTES_PER_SLOT = 384  # a record of at most 160 bytes, pages two thirds full, and the pages above them
_INDEX_SPARE_BYTES_PER_SLOT = 768  # copies that a commit makes before the last one's pages are free: two more trees,
_INDEX_SPARE_BYTES_MAX = 6 << 20  # or what two commits of the largest batch can touch, if that is less


def index_bytes_for(slot_count: int) -> int:
    """Largest size of the index file for so many slots."""
    spare = min(_INDEX_SPARE_BYTES_PER_SLOT * slot_count, _INDEX_SPARE_BYTES_MAX)
    return _round_up(_INDEX_BASE_BYTES + _INDEX_BYTES_PER_SLOT * slot_count + spare)


def slab_charge(slot_bytes: int, slot_count: int) -> int:
    """What a slab file may take on disk: its bytes, and the blocks in which a filesystem notes where they lie.

    Two extents a slot (written, not yet written) and 340 of them to a block is the worst that ext4 makes of it.
    """
    return slab_file_bytes(slot_bytes, slot_count) + BLOCK_BYTES * (2 + slot_count // 128)


def small_files_bytes_for(cap_bytes: int) -> int:
    """Set aside for the lock, the key, quotas, namespace documents, their temporary copies and the directories."""
    return max(SMALL_FILES_BYTES_MIN, min(SMALL_FILES_BYTES_MAX, cap_bytes // 64))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(eq=False, slots=True, repr=False)
class SizeClass:
    """All slabs whose slots have one size. `lru`: oldest first. `free`: first in, first out."""

    slot_bytes: int
    slabs: list["Slab"] = field(default_factory=list)
    lru: OrderedDict[ChunkId, "Entry"] = field(default_factory=OrderedDict)
    free: deque["Place"] = field(default_factory=deque)
    fresh: deque["Slab"] = field(default_factory=deque)  # with slots that were never used; those go first


@dataclass(eq=False, slots=True, repr=False)
class Slab:
    number: int
    fd: int
    epoch: int
    size_class: SizeClass
    slot_count: int
    held: dict[int, "Entry"] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    ghosts: dict[int, frozenset[ChunkId]] = field(default_factory=dict)
    taken: int = 0
    reading: int = 0  # slots read from, once for each reader
    newest: int = 0  # the highest tick of a chunk that lies or lay here
    fresh_from: int = 0  # slots from here on are free and were never used

    @property
    def slot_bytes(self) -> int:
        return self.size_class.slot_bytes

    @property
    def charge_bytes(self) -> int:
        return slab_charge(self.slot_bytes, self.slot_count)

    @property
    def idle(self) -> bool:
        return self.taken == 0 and self.reading == 0

    def next_epoch(self, directory_id: bytes) -> SlabHeader:
        """Raises it, for a header that says so: no slot written before counts once that is on disk."""
        self.epoch += 1
        return SlabHeader(self.number, self.epoch, self.slot_bytes, self.slot_count, directory_id)


class Place(NamedTuple):
    slab: Slab
    slot: int


@dataclass(eq=False, slots=True)
class Entry:
    """A chunk that is held. `proven`: its bytes were seen whole, when written or read; a rebuild proves none."""

    chunk: ChunkId
    place: Place
    sequence: int
    payload_bytes: int
    tick: int
    proven: bool
    readers: int = 0
    forgotten: bool = False

    @property
    def slot_bytes(self) -> int:
        return self.place.slab.slot_bytes


@dataclass(frozen=True, slots=True)
class Grow:
    slot_count: int


@dataclass(frozen=True, slots=True)
class Evict:
    entry: Entry


@dataclass(frozen=True, slots=True)
class Retire:
    slab: Slab


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nothing can be done now: the cap is too small for one such slot, or everything is in use."""


Room = Grow | Evict | Retire | Stuck


@dataclass(slots=True)
class Usage:
    chunks: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _Tenant:
    """`lru`: its chunks, oldest first; kept for every tenant, so that a first quota has nothing to look for."""

    quota_bytes: int | None = None
    used_bytes: int = 0
    lru: OrderedDict[ChunkId, Entry] = field(default_factory=OrderedDict)


class Catalog:
    def __init__(
        self,
        cap_bytes: int,
        *,
        slab_bytes: int | None = None,
        foreign_bytes: int = 0,
        clock_us: Callable[[], int] = lambda: 0,
    ) -> None:
        """`clock_us`: the wall clock. Ticks follow it, but always rise with a use; so they are times too."""
        self.cap_bytes = cap_bytes
        self._clock_us = clock_us
        self._made_us = clock_us()
        self.foreign_bytes = foreign_bytes
        self.slab_bytes = slab_bytes or min(SLAB_BYTES_MAX, max(BLOCK_BYTES, cap_bytes // SLABS_PER_TIER))
        self.classes: dict[int, SizeClass] = {}
        self.slabs: dict[int, Slab] = {}
        self.entries: dict[ChunkId, Entry] = {}
        self.on_change: Callable[[ChunkId, bool], None] | None = None  # held (True) or forgotten
        self.usage: dict[tuple[bytes, bytes], Usage] = {}  # by namespace and tenant
        self._tenants: dict[bytes, _Tenant] = {}  # that have chunks or a quota
        self.tick = 0
        self.reserved_bytes = 0  # of slabs being made or removed
        self.barred_numbers: set[int] = set()  # of slabs being made, or whose file could not be removed
        self.pending_slot_count = 0  # of slabs being made
        self.index_slot_count = 0  # for which the index file is sized; it never shrinks while it is open
        self.used_bytes = 0
        self._slabs_bytes = 0
        self._slots_bytes = 0
        self._slot_count = 0

    # Costs

    @property
    def charged_bytes(self) -> int:
        return (
            small_files_bytes_for(self.cap_bytes)
            + index_bytes_for(self.index_slot_count)
            + self.foreign_bytes
            + self.reserved_bytes
            + self._slabs_bytes
        )

    @property
    def overhead_bytes(self) -> int:
        """All that is charged but the slots."""
        return self.charged_bytes - self._slots_bytes

    @property
    def slot_count(self) -> int:
        return self._slot_count

    def index_slots_with(self, slot_count: int) -> int:
        """For how many slots the index must have room when so many more are made beside those already under way."""
        return max(self.index_slot_count, self._slot_count + self.pending_slot_count + slot_count)

    def cost_of(self, slot_bytes: int, slot_count: int) -> int:
        """What a further slab would add, the index's growth included."""
        index_growth = index_bytes_for(self.index_slots_with(slot_count)) - index_bytes_for(self.index_slots_with(0))
        return slab_charge(slot_bytes, slot_count) + index_growth

    def slots_that_fit(self, slot_bytes: int) -> int:
        """Slots of a further slab of the usual size, or of what room is left."""
        room = self.cap_bytes - self.charged_bytes
        count = min(max(1, self.slab_bytes // slot_bytes), SLOTS_PER_SLAB_MAX, max(0, room) // slot_bytes)
        while count > 0 and (excess := self.cost_of(slot_bytes, count) - room) > 0:
            count -= max(1, excess // (slot_bytes + BLOCK_BYTES))
        return max(0, count)

    # Slabs

    def class_of(self, slot_bytes: int) -> SizeClass:
        return self.classes.setdefault(slot_bytes, SizeClass(slot_bytes))

    def add_slab(self, number: int, fd: int, epoch: int, slot_bytes: int, slot_count: int, *, fresh: bool) -> Slab:
        """`fresh`: its slots are free. Else they are taken, and the caller holds or frees each."""
        assert number not in self.slabs, f"slab {number} twice"
        slab = Slab(number, fd, epoch, self.class_of(slot_bytes), slot_count)
        if fresh:
            slab.size_class.fresh.append(slab)
        else:
            slab.taken = slab.fresh_from = slot_count
        self.slabs[number] = slab
        slab.size_class.slabs.append(slab)
        self._slabs_bytes += slab.charge_bytes
        self._slots_bytes += slot_bytes * slot_count
        self._slot_count += slot_count
        self.index_slot_count = max(self.index_slot_count, self._slot_count)
        return slab

    def remove_slab(self, slab: Slab) -> list[Entry]:
        """Drops the slab with all that it holds, and returns that. Its cost is the caller's to reserve."""
        assert slab.idle, f"slab {slab.number} has {slab.taken} slots taken and {slab.reading} readers"
        lost = list(slab.held.values())
        for entry in lost:
            self.forget(entry)
        slab.taken = 0
        size_class = slab.size_class
        size_class.free = deque(place for place in size_class.free if place.slab is not slab)
        if slab in size_class.fresh:
            size_class.fresh.remove(slab)
        size_class.slabs.remove(slab)
        del self.slabs[slab.number]
        self._slabs_bytes -= slab.charge_bytes
        self._slots_bytes -= slab.slot_bytes * slab.slot_count
        self._slot_count -= slab.slot_count
        if not size_class.slabs:
            del self.classes[size_class.slot_bytes]
        return lost

    def free_slab_number(self) -> int:
        number = 0
        while number in self.slabs or number in self.barred_numbers:
            number += 1
        return number

    # Slots

    def take_free(self, size_class: SizeClass) -> Place | None:
        if size_class.fresh:
            slab = size_class.fresh[0]
            place = Place(slab, slab.fresh_from)
            slab.fresh_from += 1
            if slab.fresh_from == slab.slot_count:
                size_class.fresh.popleft()
        elif size_class.free:
            place = size_class.free.popleft()
        else:
            return None
        place.slab.taken += 1
        return place

    def take(self, places: Iterable[Place]) -> None:
        """Takes these free slots out of use, so that nobody writes to them while their headers are zeroed."""
        wanted = set(places)
        for size_class in {place.slab.size_class for place in wanted}:
            size_class.free = deque(place for place in size_class.free if place not in wanted)
        for place in wanted:
            place.slab.taken += 1

    def free(self, place: Place, ghosts: frozenset[ChunkId] = frozenset()) -> None:
        """`ghosts`: the chunks whose headers may still lie there."""
        assert place.slot not in place.slab.held, f"slot {place.slot} of slab {place.slab.number} is held"
        place.slab.taken -= 1
        if ghosts:
            place.slab.ghosts[place.slot] = ghosts
        else:
            place.slab.ghosts.pop(place.slot, None)
        place.slab.size_class.free.append(place)

    def quarantine(self, place: Place) -> None:
        place.slab.taken -= 1
        place.slab.ghosts.pop(place.slot, None)
        place.slab.quarantined.add(place.slot)

    def free_ghosts(self) -> Iterator[tuple[Place, frozenset[ChunkId]]]:
        """Free slots that may bear a header, with whose."""
        for size_class in self.classes.values():
            for place in size_class.free:
                headers = place.slab.ghosts.get(place.slot)
                if headers is not None:
                    yield place, headers

    # Chunks

    def hold(
        self, chunk: ChunkId, place: Place, sequence: int, payload_bytes: int, *, proven: bool, tick: int | None = None
    ) -> Entry:
        """The taken slot holds the chunk from now on. `tick`: as of an earlier run; chunks then come oldest first."""
        assert chunk not in self.entries, f"{chunk} held twice"
        if tick is None:
            tick = self._next_tick()
        else:
            self.tick = max(self.tick, tick)
        entry = Entry(chunk, place, sequence, payload_bytes, tick, proven)
        slab = place.slab
        slab.taken -= 1
        slab.held[place.slot] = entry
        slab.ghosts.pop(place.slot, None)
        slab.newest = max(slab.newest, tick)
        slab.size_class.lru[chunk] = entry
        self.entries[chunk] = entry
        tenant = self._tenant(chunk.tenant)
        tenant.lru[chunk] = entry
        tenant.used_bytes += slab.slot_bytes
        if self.on_change is not None:
            self.on_change(chunk, True)
        self.used_bytes += slab.slot_bytes
        usage = self.usage.setdefault(chunk[:2], Usage())
        usage.chunks += 1
        usage.nbytes += slab.slot_bytes
        return entry

    def forget(self, entry: Entry) -> Place:
        """The chunk is out of reach; its slot is `taken` until the caller frees or quarantines it."""
        assert not entry.forgotten, f"{entry.chunk} forgotten twice"
        entry.forgotten = True
        slab = entry.place.slab
        del self.entries[entry.chunk]
        if self.on_change is not None:
            self.on_change(entry.chunk, False)
        del slab.size_class.lru[entry.chunk]
        tenant = self._tenants[entry.chunk.tenant]
        del tenant.lru[entry.chunk]
        tenant.used_bytes -= slab.slot_bytes
        self._drop_idle_tenant(entry.chunk.tenant)
        del slab.held[entry.place.slot]
        slab.taken += 1
        self.used_bytes -= slab.slot_bytes
        usage = self.usage[entry.chunk[:2]]
        usage.chunks -= 1
        usage.nbytes -= slab.slot_bytes
        if usage.chunks == 0:
            del self.usage[entry.chunk[:2]]
        return entry.place

    def touch(self, entry: Entry) -> None:
        entry.tick = self._next_tick()
        entry.place.slab.newest = entry.tick
        entry.place.slab.size_class.lru.move_to_end(entry.chunk)
        self._tenants[entry.chunk.tenant].lru.move_to_end(entry.chunk)

    def _next_tick(self) -> int:
        self.tick = max(self.tick + 1, self._clock_us())
        return self.tick

    def idle_s(self, entry: Entry) -> float:
        """Since its last use. Where a rebuild has lost that: since then."""
        used_us = entry.tick if entry.tick >= TICKS_ARE_TIMES_FROM else self._made_us
        return max(0, self._clock_us() - used_us) / 1e6

    # Quotas

    def _tenant(self, tenant: bytes) -> _Tenant:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        return known

    def _drop_idle_tenant(self, tenant: bytes) -> None:
        if not self._tenants[tenant].lru and self._tenants[tenant].quota_bytes is None:
            del self._tenants[tenant]

    def set_quota(self, tenant: bytes, nbytes: int | None) -> int:
        """None: no limit. What the tenant's chunks take, where there is one."""
        self._tenant(tenant).quota_bytes = nbytes
        used_bytes = self._tenants[tenant].used_bytes
        self._drop_idle_tenant(tenant)
        return used_bytes if nbytes is not None else 0

    def quota_of(self, tenant: bytes) -> int | None:
        known = self._tenants.get(tenant)
        return known.quota_bytes if known is not None else None

    def beyond_quota(self, tenant: bytes, nbytes: int) -> bool:
        """Whether so much more would be, of a tenant with a quota."""
        known = self._tenants[tenant]
        assert known.quota_bytes is not None, f"tenant {tenant.hex()} has no quota"
        return known.used_bytes + nbytes > known.quota_bytes

    def oldest_of(self, tenant: bytes) -> Entry | None:
        """Of a tenant with a quota: what goes first, if anything may."""
        return next(self.oldest_first_of(tenant), None)

    # What has to go

    def room_for(self, size_class: SizeClass, *, may_grow: bool) -> Room:
        """How to come by a further slot: the least harmful way that is open."""
        if may_grow and (slot_count := self.slots_that_fit(size_class.slot_bytes)) > 0:
            return Grow(slot_count)
        own = next(self.evictable(size_class), None)
        other = self.coldest_slab(other_than=size_class) if may_grow and self._could_fit(size_class) else None
        if other is not None and (own is None or _age(other) < own.tick):
            return Retire(other)
        return Evict(own) if own is not None else Stuck()

    def _could_fit(self, size_class: SizeClass) -> bool:
        """Whether one slot would fit if every other class gave up its slabs."""
        others = sum(slab.charge_bytes for slab in self.slabs.values() if slab.size_class is not size_class)
        room = self.cap_bytes - self.charged_bytes + others
        return self.cost_of(size_class.slot_bytes, 1) <= room

    def coldest_slab(self, other_than: SizeClass | None) -> Slab | None:
        idle = (slab for slab in self.slabs.values() if slab.size_class is not other_than and slab.idle)
        return min(idle, key=_age, default=None)

    def slab_to_shrink_by(self) -> Slab | None:
        """While more is charged than the cap allows: the slab to give up next."""
        return self.coldest_slab(None) if self.charged_bytes > self.cap_bytes else None

    def evictable(self, size_class: SizeClass) -> Iterator[Entry]:
        return (entry for entry in size_class.lru.values() if entry.readers == 0)

    def oldest_first(self) -> Iterator[Entry]:
        """Every chunk without a reader, over all classes. The catalog must not change meanwhile."""
        return heapq.merge(*(self.evictable(each) for each in self.classes.values()), key=lambda entry: entry.tick)

    def oldest_first_of(self, tenant: bytes) -> Iterator[Entry]:
        """As `oldest_first`, a tenant's."""
        known = self._tenants.get(tenant)
        return (entry for entry in (known.lru.values() if known is not None else ()) if entry.readers == 0)

    # Check

    def problems(self) -> Iterator[str]:
        yield from self._problems_of_slots()
        yield from self._problems_of_chunks()
        for tenant in self._tenants.values():
            if any(before.tick > after.tick for before, after in pairwise(tenant.lru.values())):
                yield f"{len(tenant.lru)} chunks of a tenant are not in the order of their use"
        if self.charged_bytes > self.cap_bytes:
            yield f"{self.charged_bytes} bytes are charged, the cap is {self.cap_bytes}"

    def _problems_of_slots(self) -> Iterator[str]:
        free: dict[Slab, set[int]] = {slab: set() for slab in self.slabs.values()}
        for size_class in self.classes.values():
            for place in size_class.free:
                if place.slab not in free:
                    yield f"a free slot of slab {place.slab.number}, which is gone"
                elif place.slot in free[place.slab]:
                    yield f"slab {place.slab.number}, slot {place.slot}: free twice"
                else:
                    free[place.slab].add(place.slot)
        for slab, slots in free.items():
            fresh = slab.slot_count - slab.fresh_from
            total = fresh + len(slots) + slab.taken + len(slab.held) + len(slab.quarantined)
            if total != slab.slot_count:
                yield (
                    f"slab {slab.number}: {fresh + len(slots)} free + {slab.taken} taken + {len(slab.held)} held + "
                    f"{len(slab.quarantined)} quarantined is {total}, not {slab.slot_count}"
                )
            if slots & slab.held.keys() or slots & slab.quarantined or slab.held.keys() & slab.quarantined:
                yield f"slab {slab.number}: a slot in two states"
            if sum(entry.readers for entry in slab.held.values()) > slab.reading:
                yield f"slab {slab.number}: its chunks have more readers than the slab"

    def _problems_of_chunks(self) -> Iterator[str]:
        """One look at each, for the event loop waits meanwhile: 1.5 us a chunk with all the rest."""
        owned: Counter[bytes] = Counter()  # bytes by tenant
        for size_class in self.classes.values():
            slot_bytes, before = size_class.slot_bytes, 0
            for chunk, entry in size_class.lru.items():
                if entry.tick < before:
                    yield f"chunks in slots of {slot_bytes} bytes are not in the order of their use"
                before = entry.tick
                if slot_bytes_for(entry.payload_bytes) != slot_bytes:
                    yield f"{entry.payload_bytes} bytes in a slot of {slot_bytes}"
                if self.entries.get(chunk) is not entry or entry.place.slab.held.get(entry.place.slot) is not entry:
                    yield f"a chunk in slots of {slot_bytes} bytes that is not held"
                tenant = self._tenants.get(chunk.tenant)
                if tenant is None or tenant.lru.get(chunk) is not entry:
                    yield "a chunk that is not its tenant's"
                owned[chunk.tenant] += slot_bytes
        for tenant_id, tenant in self._tenants.items():
            if tenant.used_bytes != owned[tenant_id]:
                yield f"a tenant's chunks take {owned[tenant_id]} bytes, {tenant.used_bytes} accounted for"
        counts = {
            sum(len(slab.held) for slab in self.slabs.values()),
            sum(len(size_class.lru) for size_class in self.classes.values()),
            sum(len(tenant.lru) for tenant in self._tenants.values()),
            sum(usage.chunks for usage in self.usage.values()),
        }
        if counts != {len(self.entries)}:
            yield f"{len(self.entries)} chunks to be found, but {sorted(counts)} in slots, in order, and by owner"
        if {owned.total(), sum(usage.nbytes for usage in self.usage.values())} != {self.used_bytes}:
            yield f"{owned.total()} bytes held, {self.used_bytes} accounted for"


def _age(slab: Slab) -> int:
    return slab.newest if slab.held else 0
