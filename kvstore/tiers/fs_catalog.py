"""What lies where in the fs tier, what it costs, and what has to go. Pure: no I/O; time is asked of an argument.

One thread at a time owns a catalog: the tier's worker while it fills it at start, then the event loop. It is the truth
while the daemon lives; LMDB keeps a copy for the next start.

Every slot of a slab is in exactly one state:

    free -> taken -> held -> taken -> free      taken: being written, or evicted and not yet forgotten by the index,
                       \\-> taken -> quarantined           or free or quarantined and being zeroed

Every walk over all chunks goes a slice at a time (`walk`), for the event loop must turn in between.

Invariants, checked by `fs_check`:
* free + taken + held + quarantined == slot count, in every slab.
* A chunk is held at most once, and lies in the slots' class that its length asks for.
* A slot with a reader is never taken: it is neither evicted nor rewritten.
* `charged_bytes` exceeds the cap only while the tier shrinks: after a start with a smaller cap, or when files of others
  have grown.
* A slot that is not held may still bear a valid header only of the chunks that `ghosts` names for it.

Memory: about 480 bytes for each chunk held, beside its key.
"""

import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvstore.tiers.base import ChunkId
from kvstore.tiers.fs_format import BLOCK_BYTES, SLOTS_PER_SLAB_MAX, SlabHeader, slab_file_bytes

TICKS_ARE_TIMES_FROM = 1_500_000_000_000_000  # a time in 2017; what a rebuild takes from headers is less by far
SLABS_PER_TIER = 64  # of the usual size; so many that taking one from a class hurts little, so few that they are cheap
SLAB_BYTES_MAX = 8 << 30
SMALL_FILES_BYTES_MIN = 256 << 10
SMALL_FILES_BYTES_MAX = 8 << 20
SMALL_FILES_UNITS_MIN = 16
SLOTS_PER_SLICE = 500  # of a walk: a twentieth of a millisecond, to which comes what is done with each chunk

INDEX_PAGE_BYTES = min(mmap.PAGESIZE, 32 << 10)  # LMDB's, of a new file

_INDEX_BASE_BYTES = 256 << 10
_INDEX_BASE_PAGES = 16  # at least
_INDEX_BYTES_PER_SLOT = 384  # a record of at most 160 bytes, pages two thirds full, and the pages above them
_INDEX_SPARE_BYTES_PER_SLOT = 768  # copies that a commit makes before the last one's pages are free: two more trees,
_INDEX_SPARE_PAGES_MAX = 1_536  # or what two commits of the largest batch can touch, if that is less


# `unit_bytes`: what the filesystem gives a file at a time, see `FsDirectory`.


def index_bytes_for(slot_count: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """Largest size of the index file for so many slots."""
    base = max(_INDEX_BASE_BYTES, _INDEX_BASE_PAGES * INDEX_PAGE_BYTES)
    spare = min(_INDEX_SPARE_BYTES_PER_SLOT * slot_count, _INDEX_SPARE_PAGES_MAX * INDEX_PAGE_BYTES)
    return _round_up(base + _INDEX_BYTES_PER_SLOT * slot_count + spare, unit_bytes)


def slab_charge(slot_bytes: int, slot_count: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """What a slab file may take on disk: its bytes, and the blocks in which a filesystem notes where they lie.

    Two extents a slot (written, not yet written) and 340 of them to a block is the worst that ext4 makes of it.
    """
    return _round_up(slab_file_bytes(slot_bytes, slot_count), unit_bytes) + unit_bytes * (2 + slot_count // 128)


def small_files_bytes_for(cap_bytes: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """Set aside for the lock, the key, quotas, namespace documents, their temporary copies and the directories."""
    least = max(SMALL_FILES_BYTES_MIN, SMALL_FILES_UNITS_MIN * unit_bytes)
    return max(least, min(SMALL_FILES_BYTES_MAX, cap_bytes // 64))


def _round_up(nbytes: int, unit_bytes: int) -> int:
    return -(-nbytes // unit_bytes) * unit_bytes


@dataclass(eq=False, slots=True, repr=False)
class Link:
    """A place in two orders of use: `older` and `newer` of a class's chunks, the others of a tenant's. Both are rings
    that an end closes, a link without a chunk. Unlike an ordered dict they cost four references a chunk, and one can
    look at a chunk's neighbours without going there from an end."""

    older: "Link" = field(init=False, repr=False)
    newer: "Link" = field(init=False, repr=False)
    older_of_tenant: "Link" = field(init=False, repr=False)
    newer_of_tenant: "Link" = field(init=False, repr=False)


def _end() -> Link:
    end = Link()
    end.older = end.newer = end.older_of_tenant = end.newer_of_tenant = end
    return end


@dataclass(eq=False, slots=True, repr=False)
class SizeClass:
    """All slabs whose slots have one size. `end`: of the order of their chunks."""

    slot_bytes: int
    slabs: list["Slab"] = field(default_factory=list)
    end: Link = field(default_factory=_end)
    with_free: dict["Slab", None] = field(default_factory=dict)  # slabs that have free slots, used ones
    fresh: deque["Slab"] = field(default_factory=deque)  # with slots that were never used; those go first


@dataclass(eq=False, slots=True, repr=False)
class Slab:
    """`free`: first in, first out."""

    number: int
    fd: int
    epoch: int
    size_class: SizeClass
    slot_count: int
    charge_bytes: int
    held: dict[int, "Entry"] = field(default_factory=dict)
    free: OrderedDict[int, None] = field(default_factory=OrderedDict)
    quarantined: set[int] = field(default_factory=set)
    ghosts: dict[int, frozenset[ChunkId]] = field(default_factory=dict)
    taken: int = 0
    reading: int = 0  # slots read from, once for each reader
    newest: int = 0  # the highest tick of a chunk that lies or lay here
    fresh_from: int = 0  # slots from here on are free and were never used
    withdrawn: bool = False  # it will be removed: none of its slots is handed out any more

    @property
    def slot_bytes(self) -> int:
        return self.size_class.slot_bytes

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
class Entry(Link):
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
class Tenant:
    """`end`: of the order of its chunks; kept for every tenant, so that a first quota has nothing to look for."""

    quota_bytes: int | None = None
    used_bytes: int = 0
    end: Link = field(default_factory=_end)


Watcher = Callable[[Entry, bool], None]  # held (True) or forgotten


class Catalog:
    def __init__(
        self,
        cap_bytes: int,
        *,
        slab_bytes: int | None = None,
        unit_bytes: int = BLOCK_BYTES,
        foreign_bytes: int = 0,
        clock_us: Callable[[], int] = lambda: 0,
    ) -> None:
        """`clock_us`: the wall clock. Ticks follow it, but always rise with a use; so they are times too."""
        self.cap_bytes = cap_bytes
        self.unit_bytes = unit_bytes
        self._clock_us = clock_us
        self._made_us = clock_us()
        self.foreign_bytes = foreign_bytes
        self.slab_bytes = slab_bytes or min(SLAB_BYTES_MAX, max(BLOCK_BYTES, cap_bytes // SLABS_PER_TIER))
        self.classes: dict[int, SizeClass] = {}
        self.slabs: dict[int, Slab] = {}
        self.entries: dict[ChunkId, Entry] = {}
        self.on_change: Callable[[ChunkId, bool], None] | None = None  # held (True) or forgotten
        self.usage: dict[tuple[bytes, bytes], Usage] = {}  # by namespace and tenant
        self._tenants_of: dict[bytes, int] = {}  # by namespace: how many have chunks there
        self.watchers: list[Watcher] = []  # walks that are told of what comes and goes meanwhile
        self.tenants: dict[bytes, Tenant] = {}  # that have chunks or a quota
        self.tenant_count = 0  # of those that have chunks
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
            small_files_bytes_for(self.cap_bytes, self.unit_bytes)
            + self.index_bytes_for(self.index_slot_count)
            + self.foreign_bytes
            + self.reserved_bytes
            + self._slabs_bytes
        )

    @property
    def overhead_bytes(self) -> int:
        """All that is charged but the slots."""
        return self.charged_bytes - self._slots_bytes

    @property
    def quarantined_count(self) -> int:
        return sum(len(slab.quarantined) for slab in self.slabs.values())

    @property
    def slot_count(self) -> int:
        return self._slot_count

    def index_slots_with(self, slot_count: int) -> int:
        """For how many slots the index must have room when so many more are made beside those already under way."""
        return max(self.index_slot_count, self._slot_count + self.pending_slot_count + slot_count)

    def index_bytes_for(self, slot_count: int) -> int:
        return index_bytes_for(slot_count, self.unit_bytes)

    def cost_of(self, slot_bytes: int, slot_count: int) -> int:
        """What a further slab would add, the index's growth included."""
        before, after = self.index_slots_with(0), self.index_slots_with(slot_count)
        index_growth = self.index_bytes_for(after) - self.index_bytes_for(before)
        return slab_charge(slot_bytes, slot_count, self.unit_bytes) + index_growth

    def slots_that_fit(self, slot_bytes: int) -> int:
        """Slots of a further slab of the usual size, or of what room is left."""
        room = self.cap_bytes - self.charged_bytes
        count = min(max(1, self.slab_bytes // slot_bytes), SLOTS_PER_SLAB_MAX, max(0, room) // slot_bytes)
        while count > 0 and (excess := self.cost_of(slot_bytes, count) - room) > 0:
            count -= max(1, excess // (slot_bytes + BLOCK_BYTES))
        return max(0, count)

    def has_room(self, slot_bytes: int, *, may_grow: bool = True) -> bool:
        """Whether a further chunk in such a slot displaces none. `may_grow`: a further slab can be had."""
        size_class = self.classes.get(slot_bytes)
        is_free = size_class is not None and bool(size_class.fresh or size_class.with_free)
        return is_free or (may_grow and self.slots_that_fit(slot_bytes) > 0)

    # Slabs

    def class_of(self, slot_bytes: int) -> SizeClass:
        return self.classes.setdefault(slot_bytes, SizeClass(slot_bytes))

    def add_slab(self, number: int, fd: int, epoch: int, slot_bytes: int, slot_count: int, *, fresh: bool) -> Slab:
        """`fresh`: its slots are free. Else they are taken, and the caller holds or frees each."""
        assert number not in self.slabs, f"slab {number} twice"
        charge_bytes = slab_charge(slot_bytes, slot_count, self.unit_bytes)
        slab = Slab(number, fd, epoch, self.class_of(slot_bytes), slot_count, charge_bytes)
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

    def withdraw(self, slab: Slab) -> None:
        """Before `remove_slab`, so that what it holds can be forgotten, and freed, a part at a time."""
        assert slab.idle, f"slab {slab.number} has {slab.taken} slots taken and {slab.reading} readers"
        slab.withdrawn = True
        slab.size_class.with_free.pop(slab, None)
        if slab in slab.size_class.fresh:
            slab.size_class.fresh.remove(slab)

    def remove_slab(self, slab: Slab) -> list[Entry]:
        """Drops the slab with all that it holds, and returns that. Its cost is the caller's to reserve."""
        assert slab.idle, f"slab {slab.number} has {slab.taken} slots taken and {slab.reading} readers"
        lost = list(slab.held.values())
        for entry in lost:
            self.forget(entry)
        slab.taken = 0
        size_class = slab.size_class
        size_class.with_free.pop(slab, None)
        slab.free.clear()
        slab.quarantined.clear()
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
        elif size_class.with_free:
            slab = next(iter(size_class.with_free))
            place = Place(slab, next(iter(slab.free)))
            self._no_longer_free(place)
        else:
            return None
        slab.taken += 1
        return place

    def take(self, place: Place) -> None:
        """Takes a slot out of the free or the quarantined, so that nothing becomes of it while its header is zeroed."""
        if place.slot in place.slab.quarantined:
            place.slab.quarantined.remove(place.slot)
        else:
            self._no_longer_free(place)
        place.slab.taken += 1

    def _no_longer_free(self, place: Place) -> None:
        slab, slot = place
        del slab.free[slot]
        if not slab.free:
            slab.size_class.with_free.pop(slab, None)

    def free(self, place: Place, ghosts: frozenset[ChunkId] = frozenset()) -> None:
        """`ghosts`: the chunks whose headers may still lie there."""
        slab, slot = place
        assert slot not in slab.held, f"slot {slot} of slab {slab.number} is held"
        slab.taken -= 1
        if ghosts:
            slab.ghosts[slot] = ghosts
        else:
            slab.ghosts.pop(slot, None)
        slab.free[slot] = None
        if not slab.withdrawn:
            slab.size_class.with_free[slab] = None

    def quarantine(self, place: Place, ghosts: frozenset[ChunkId] = frozenset()) -> None:
        """As `free`, but the slot is not used again in this run."""
        slab, slot = place
        slab.taken -= 1
        if ghosts:
            slab.ghosts[slot] = ghosts
        else:
            slab.ghosts.pop(slot, None)
        slab.quarantined.add(slot)

    def idle_ghosts(self) -> Iterator[tuple[Place, frozenset[ChunkId]]]:
        """Free and quarantined slots that may bear a header, with whose. The catalog may change meanwhile: what comes
        is left out."""
        for slab in list(self.slabs.values()):
            for slot in list(slab.ghosts):
                headers = slab.ghosts.get(slot)
                if headers is not None and (slot in slab.free or slot in slab.quarantined):
                    yield Place(slab, slot), headers

    # Chunks

    def hold(
        self, chunk: ChunkId, place: Place, sequence: int, payload_bytes: int, *, proven: bool, tick: int | None = None
    ) -> Entry:
        """The taken slot holds the chunk from now on. `tick`: as of an earlier run; `put_in_order` must follow."""
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
        self.entries[chunk] = entry
        tenant = self._tenant(chunk.tenant)
        _link(entry, slab.size_class.end, tenant.end)
        self.tenant_count += tenant.used_bytes == 0
        tenant.used_bytes += slab.slot_bytes
        if self.on_change is not None:
            self.on_change(chunk, True)
        self.used_bytes += slab.slot_bytes
        usage = self.usage.get(chunk[:2])
        if usage is None:
            usage = self.usage[chunk[:2]] = Usage()
            self._tenants_of[chunk.namespace] = self._tenants_of.get(chunk.namespace, 0) + 1
        usage.chunks += 1
        usage.nbytes += slab.slot_bytes
        for watcher in self.watchers:
            watcher(entry, True)
        return entry

    def forget(self, entry: Entry) -> Place:
        """The chunk is out of reach; its slot is `taken` until the caller frees or quarantines it."""
        assert not entry.forgotten, f"{entry.chunk} forgotten twice"
        entry.forgotten = True
        slab = entry.place.slab
        del self.entries[entry.chunk]
        if self.on_change is not None:
            self.on_change(entry.chunk, False)
        tenant = self.tenants[entry.chunk.tenant]
        _unlink(entry)
        # To the ends, or whoever still has this one would keep every one alive that went after it.
        entry.older = entry.newer = slab.size_class.end
        entry.older_of_tenant = entry.newer_of_tenant = tenant.end
        tenant.used_bytes -= slab.slot_bytes
        self.tenant_count -= tenant.used_bytes == 0
        self._drop_idle_tenant(entry.chunk.tenant)
        del slab.held[entry.place.slot]
        slab.taken += 1
        self.used_bytes -= slab.slot_bytes
        usage = self.usage[entry.chunk[:2]]
        usage.chunks -= 1
        usage.nbytes -= slab.slot_bytes
        if usage.chunks == 0:
            del self.usage[entry.chunk[:2]]
            self._tenants_of[entry.chunk.namespace] -= 1
            if self._tenants_of[entry.chunk.namespace] == 0:
                del self._tenants_of[entry.chunk.namespace]
        for watcher in self.watchers:
            watcher(entry, False)
        return entry.place

    def holds(self, namespace: bytes | None, tenant: bytes | None) -> bool:
        """Whether any chunk is of this namespace and tenant (None: any)."""
        if namespace is None and tenant is None:
            return bool(self.entries)
        if namespace is None:
            known = self.tenants.get(tenant) if tenant is not None else None
            return known is not None and known.used_bytes > 0
        return namespace in self._tenants_of if tenant is None else (namespace, tenant) in self.usage

    def put_in_order(self) -> None:
        """By their ticks, after chunks came in another order."""
        for size_class in self.classes.values():
            size_class.end = _end()
        for tenant in self.tenants.values():
            tenant.end = _end()
        entries = list(self.entries.values())
        ticks = np.fromiter((entry.tick for entry in entries), np.uint64, len(entries))
        for number in np.argsort(ticks, kind="stable"):  # a list's own sort would hold the interpreter for all of it
            entry = entries[number]
            _link(entry, entry.place.slab.size_class.end, self.tenants[entry.chunk.tenant].end)

    def touch(self, entry: Entry) -> None:
        entry.tick = self._next_tick()
        entry.place.slab.newest = entry.tick
        _unlink(entry)
        _link(entry, entry.place.slab.size_class.end, self.tenants[entry.chunk.tenant].end)

    def _next_tick(self) -> int:
        self.tick = max(self.tick + 1, self._clock_us())
        return self.tick

    def idle_s(self, entry: Entry) -> float:
        """Since its last use. Where a rebuild has lost that: since then."""
        return max(0, self._clock_us() - self.used_us(entry)) / 1e6

    def used_us(self, entry: Entry) -> int:
        """When it was last used, in microseconds of the wall clock. Where a rebuild has lost that: when it was made."""
        return entry.tick if entry.tick >= TICKS_ARE_TIMES_FROM else self._made_us

    def unused_since_us(self, unused_s: float) -> int:
        """What has not been used for so long was last used then at the latest."""
        return self._clock_us() - int(unused_s * 1e6)

    def walk(self, slots: int = SLOTS_PER_SLICE) -> Iterator[list[Entry]]:
        """Every chunk, a slice at a time: those in so many slots more. The catalog may change between slices. What is
        held from the first to the last is seen once; what comes or goes meanwhile is seen or not, and a chunk that is
        written anew perhaps twice."""
        for slab in list(self.slabs.values()):
            held = slab.held
            for first in range(0, slab.fresh_from, slots):
                yield [held[slot] for slot in range(first, min(first + slots, slab.fresh_from)) if slot in held]

    # Quotas

    def _tenant(self, tenant: bytes) -> Tenant:
        known = self.tenants.get(tenant)
        if known is None:
            known = self.tenants[tenant] = Tenant()
        return known

    def _drop_idle_tenant(self, tenant: bytes) -> None:
        known = self.tenants[tenant]
        if known.end.newer_of_tenant is known.end and known.quota_bytes is None:
            del self.tenants[tenant]

    def set_quota(self, tenant: bytes, nbytes: int | None) -> int:
        """None: no limit. What the tenant's chunks take, where there is one."""
        self._tenant(tenant).quota_bytes = nbytes
        used_bytes = self.tenants[tenant].used_bytes
        self._drop_idle_tenant(tenant)
        return used_bytes if nbytes is not None else 0

    def quota_of(self, tenant: bytes) -> int | None:
        known = self.tenants.get(tenant)
        return known.quota_bytes if known is not None else None

    def beyond_quota(self, tenant: bytes, nbytes: int) -> bool:
        """Whether so much more would be. Never without a quota."""
        known = self.tenants.get(tenant)
        return known is not None and known.quota_bytes is not None and known.used_bytes + nbytes > known.quota_bytes

    def oldest_of(self, tenant: bytes) -> Entry | None:
        """Of a tenant with a quota: what goes first, if anything may."""
        known = self.tenants.get(tenant)
        link = known.end.newer_of_tenant if known is not None else None
        while isinstance(link, Entry) and link.readers:
            link = link.newer_of_tenant
        return link if isinstance(link, Entry) else None

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
        slabs = (slab for slab in self.slabs.values() if slab.size_class is not other_than)
        return min((slab for slab in slabs if slab.idle and not slab.withdrawn), key=_age, default=None)

    def slab_to_shrink_by(self) -> Slab | None:
        """While more is charged than the cap allows: the slab to give up next."""
        return self.coldest_slab(None) if self.charged_bytes > self.cap_bytes else None

    def evictable(self, size_class: SizeClass) -> Iterator[Entry]:
        """Oldest first. The catalog must not change meanwhile."""
        link = size_class.end.newer
        while isinstance(link, Entry):
            if link.readers == 0:
                yield link
            link = link.newer


def _link(entry: Entry, end: Link, end_of_tenant: Link) -> None:
    """As the newest."""
    last = end.older
    last.newer = end.older = entry
    entry.older, entry.newer = last, end
    last = end_of_tenant.older_of_tenant
    last.newer_of_tenant = end_of_tenant.older_of_tenant = entry
    entry.older_of_tenant, entry.newer_of_tenant = last, end_of_tenant


def _unlink(entry: Entry) -> None:
    older, newer = entry.older, entry.newer
    older.newer, newer.older = newer, older
    older, newer = entry.older_of_tenant, entry.newer_of_tenant
    older.newer_of_tenant, newer.older_of_tenant = newer, older


def _age(slab: Slab) -> int:
    return slab.newest if slab.held else 0
