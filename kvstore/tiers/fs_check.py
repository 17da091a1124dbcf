"""Whether a catalog is in order: every invariant that does not hold, found a slice at a time. Pure.

Chunks may come and go between the slices, and no fault is made of that. What concerns one slot or one chunk is looked
at in one turn. Sums are taken over what was passed, and the catalog tells of every chunk that comes or goes: in a slot
that was passed it is added or taken off at once, so that at the end the sums are of what is held then. A chunk that
comes after its slot was passed, or in a slab made meanwhile, is counted but not looked at; the next check does that.
"""

from collections.abc import Iterator

from kvstore.tiers.fs_catalog import Catalog, Entry, Link, Place, Slab, Usage
from kvstore.tiers.fs_format import slot_bytes_for

SLOTS_PER_SLICE = 100  # four microseconds each
OWNERS_PER_SLICE = 1_000


class Check:
    """One pass. `slices` once, and to its end or closed: until then the catalog tells it of what comes and goes."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._ahead: set[Slab] = set()  # not begun yet
        self._current: Slab | None = None
        self._passed_slots = 0  # of the current one
        # Of what was passed:
        self._total = Usage()
        self._by_owner: dict[tuple[bytes, bytes], Usage] = {}  # namespace and tenant
        self._by_tenant: dict[bytes, int] = {}  # bytes

    def slices(self) -> Iterator[list[str]]:
        """For each slice what was found in it."""
        catalog = self._catalog
        self._ahead.update(catalog.slabs.values())
        catalog.watchers.append(self._came_or_went)
        try:
            for slab in sorted(self._ahead, key=lambda slab: slab.number):
                self._ahead.remove(slab)
                self._current, self._passed_slots = slab, 0
                while catalog.slabs.get(slab.number) is slab:  # else what it held has gone
                    first, self._passed_slots = self._passed_slots, self._passed_slots + SLOTS_PER_SLICE
                    yield [*self._problems_of_slots(slab, first), *_problems_of_counts(slab)]
                    if self._passed_slots >= slab.fresh_from:
                        break
            self._current = None
            yield list(self._problems_of_totals())
            # Both sides of each comparison follow every change, so one may be made after the other.
            owners = list(self._by_owner.keys() | catalog.usage.keys())
            for first in range(0, len(owners), OWNERS_PER_SLICE):
                yield list(self._problems_of_owners(owners[first : first + OWNERS_PER_SLICE]))
            tenants = list(self._by_tenant.keys() | catalog.tenants.keys())
            for first in range(0, len(tenants), OWNERS_PER_SLICE):
                yield list(self._problems_of_tenants(tenants[first : first + OWNERS_PER_SLICE]))
        finally:
            catalog.watchers.remove(self._came_or_went)

    def _came_or_went(self, entry: Entry, held: bool) -> None:
        slab, slot = entry.place
        if slab in self._ahead or (slab is self._current and slot >= self._passed_slots):
            return
        self._count(entry, 1 if held else -1)

    def _count(self, entry: Entry, chunks: int) -> None:
        chunk, nbytes = entry.chunk, chunks * entry.slot_bytes
        for usage in (self._total, self._by_owner.setdefault(chunk[:2], Usage())):
            usage.chunks += chunks
            usage.nbytes += nbytes
        self._by_tenant[chunk.tenant] = self._by_tenant.get(chunk.tenant, 0) + nbytes

    # Of one slab

    def _problems_of_slots(self, slab: Slab, first: int) -> Iterator[str]:
        for slot in range(first, min(self._passed_slots, slab.slot_count)):
            entry = slab.held.get(slot)
            if (entry is not None) + (slot in slab.free) + (slot in slab.quarantined) + (slot >= slab.fresh_from) > 1:
                yield f"slab {slab.number}: slot {slot} is in two states"
            if entry is not None:
                self._count(entry, 1)
                yield from self._problems_of_chunk(entry, Place(slab, slot))

    def _problems_of_chunk(self, entry: Entry, place: Place) -> Iterator[str]:
        catalog, slab = self._catalog, place.slab
        where = f"the chunk in slot {place.slot} of slab {slab.number}"
        if catalog.entries.get(entry.chunk) is not entry or entry.place != place or entry.forgotten:
            yield f"{where} is held there, but not to be found"
        if slot_bytes_for(entry.payload_bytes) != slab.slot_bytes:
            yield f"{where} has {entry.payload_bytes} bytes in a slot of {slab.slot_bytes}"
        if entry.readers > slab.reading:
            yield f"{where} has more readers than its slab"
        tenant = catalog.tenants.get(entry.chunk.tenant)
        if tenant is None:
            yield f"{where} is of a tenant that is not known"
            return
        older, newer = entry.older, entry.newer
        if older.newer is not entry or newer.older is not entry:
            yield f"{where} is not where the chunks of its size say it is"
        if not all(self._belongs(link, slab.size_class.end) for link in (older, newer)):
            yield f"{where} is among others than those of its size"
        if not _are_in_order(older, entry, newer):
            yield f"{where} is not in the order of their use, among those of its size"
        older, newer = entry.older_of_tenant, entry.newer_of_tenant
        if older.newer_of_tenant is not entry or newer.older_of_tenant is not entry:
            yield f"{where} is not where the chunks of its tenant say it is"
        if not all(self._belongs(link, tenant.end) for link in (older, newer)):
            yield f"{where} is among others than those of its tenant"
        if not _are_in_order(older, entry, newer):
            yield f"{where} is not in the order of their use, among those of its tenant"

    def _belongs(self, link: Link, end: Link) -> bool:
        """Whether it is that end, or a chunk that is held."""
        return link is end or (isinstance(link, Entry) and self._catalog.entries.get(link.chunk) is link)

    # Of all

    def _problems_of_totals(self) -> Iterator[str]:
        catalog, total = self._catalog, self._total
        if total.chunks != len(catalog.entries):
            yield f"{len(catalog.entries)} chunks to be found, but {total.chunks} in slots"
        if total.nbytes != catalog.used_bytes:
            yield f"{total.nbytes} bytes held, {catalog.used_bytes} accounted for"
        if catalog.charged_bytes > catalog.cap_bytes:
            yield f"{catalog.charged_bytes} bytes are charged, the cap is {catalog.cap_bytes}"

    def _problems_of_owners(self, owners: list[tuple[bytes, bytes]]) -> Iterator[str]:
        nothing = Usage()
        for owner in owners:
            counted, says = self._by_owner.get(owner, nothing), self._catalog.usage.get(owner, nothing)
            if counted != says:
                yield (
                    f"a tenant has {counted.chunks} chunks of {counted.nbytes} bytes in a namespace, "
                    f"{says.chunks} of {says.nbytes} accounted for"
                )

    def _problems_of_tenants(self, tenants: list[bytes]) -> Iterator[str]:
        for tenant in tenants:
            counted, known = self._by_tenant.get(tenant, 0), self._catalog.tenants.get(tenant)
            says = known.used_bytes if known is not None else 0
            if counted != says:
                yield f"a tenant's chunks take {counted} bytes, {says} accounted for"


def _problems_of_counts(slab: Slab) -> Iterator[str]:
    fresh = slab.slot_count - slab.fresh_from
    total = fresh + len(slab.free) + slab.taken + len(slab.held) + len(slab.quarantined)
    if total != slab.slot_count:
        yield (
            f"slab {slab.number}: {fresh + len(slab.free)} free + {slab.taken} taken + {len(slab.held)} held + "
            f"{len(slab.quarantined)} quarantined is {total}, not {slab.slot_count}"
        )
    if (bool(slab.free) and not slab.withdrawn) != (slab in slab.size_class.with_free):
        yield f"slab {slab.number}: {len(slab.free)} slots are free, its class knows otherwise"


def _are_in_order(older: Link, entry: Entry, newer: Link) -> bool:
    return (not isinstance(older, Entry) or older.tick <= entry.tick) and (
        not isinstance(newer, Entry) or entry.tick <= newer.tick
    )
