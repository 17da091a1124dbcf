"""What the native index must do, said again as plainly as possible: lists, dicts, and a search through everything.

The oracle of `test_index_model.py`. It predicts every answer exactly, slot numbers and victims included. It shares no
code with the core; sizes are small, so nothing here needs to be fast.
"""

from collections import defaultdict
from dataclasses import dataclass

from kvstore import _native

PAGE = 4096
RESTING = 8  # a free list no longer than this is used up only when there is no new slab

Ref = tuple[int, int]  # slot, generation
Commit = tuple[int, int, bytes, bytes, bytes]  # slot, generation, tenant, key, parent
Name = tuple[bytes, bytes, bytes]  # namespace, tenant, key


@dataclass
class Chunk:
    name: Name
    ref: Ref
    class_bytes: int
    tick: int
    parent_named: Name | None
    record: int
    used_ms: int
    parent: Name | None = None  # resident
    orphan: bool = False  # its parent was evicted before it


@dataclass
class Slab:
    class_bytes: int
    first: int
    units: int
    capacity: int
    carved: int = 0


class IndexModel:
    def __init__(self, arena_bytes: int, unit_bytes: int, prefaulted: int) -> None:
        self.arena_bytes = arena_bytes
        self.unit_bytes = unit_bytes
        self.prefaulted = prefaulted
        self.unit_count = -(-arena_bytes // unit_bytes)
        self.slots_per_unit = unit_bytes // PAGE
        self.slabs: dict[int, Slab] = {}  # by first unit
        self.free: dict[int, list[int]] = defaultdict(list)  # by class, oldest first
        self.open: dict[int, list[int]] = defaultdict(list)  # by class: slabs with slots never handed out
        self.generations: dict[int, int] = defaultdict(int)
        self.grants: dict[int, int] = {}  # slot -> group
        self.granted_at: dict[int, int] = {}  # slot -> how many removals had begun
        self.removals: list[tuple[bytes | None, bytes | None]] = []  # of everything of (namespace, tenant)
        self.records = 0  # numbers given to chunks so far
        self.free_records: list[int] = []
        self.removed = 0
        self.chunks: dict[Name, Chunk] = {}
        self.leases: dict[tuple[int, int], tuple[int, int]] = {}  # (group, slot) -> generation, deadline
        self.tick = 0
        self.evictions = 0

    # Where slots are.

    def run_bytes(self, first: int, units: int) -> int:
        return min(self.arena_bytes, (first + units) * self.unit_bytes) - first * self.unit_bytes

    def run_units(self, class_bytes: int) -> int:
        """The shortest run that loses at most 1/16 of the chunks that fit the arena's bytes, else the best one."""
        best = self.arena_bytes // class_bytes
        totals = {
            run: sum(
                self.run_bytes(first, min(run, self.unit_count - first)) // class_bytes
                for first in range(0, self.unit_count, run)
            )
            for run in range(1, min(self.unit_count, max(1, class_bytes // PAGE)) + 1)
        }
        good = [run for run, total in totals.items() if total >= best - best // 16 and total > 0]
        return min(good) if good else min(totals, key=lambda run: (-totals[run], run))

    def fits(self, first: int, units: int, class_bytes: int) -> bool:
        return self.run_bytes(first, units) >= class_bytes and first * self.unit_bytes + class_bytes <= self.prefaulted

    def slab_of_unit(self, unit: int) -> Slab | None:
        return next((slab for slab in self.slabs.values() if slab.first <= unit < slab.first + slab.units), None)

    def slab_of(self, slot: int) -> Slab:
        return self.slabs[slot // self.slots_per_unit]

    def carve(self, class_bytes: int) -> int | None:
        for first in self.open[class_bytes]:
            slab = self.slabs[first]
            if first * self.unit_bytes + (slab.carved + 1) * class_bytes <= self.prefaulted:
                slab.carved += 1
                if slab.carved == slab.capacity:
                    self.open[class_bytes].remove(first)
                return first * self.slots_per_unit + slab.carved - 1
        return None

    def add_slab(self, class_bytes: int) -> None:
        wanted = self.run_units(class_bytes)
        runs: list[tuple[int, int]] = []  # (first, units) of free runs, cut at the wanted length
        unit = 0
        while unit < self.unit_count:
            units = 0
            while units < wanted and unit + units < self.unit_count and self.slab_of_unit(unit + units) is None:
                units += 1
            if units and self.fits(unit, units, class_bytes):
                runs.append((unit, units))
            unit += max(units, 1)
        if runs:
            first, units = max(runs, key=lambda run: (run[1], -run[0]))
            capacity = self.run_bytes(first, units) // class_bytes
            self.slabs[first] = Slab(class_bytes, first, units, capacity)
            self.open[class_bytes].append(first)

    def take(self, class_bytes: int) -> int | None:
        slot = self.carve(class_bytes)
        if slot is None and len(self.free[class_bytes]) <= RESTING:
            self.add_slab(class_bytes)
            slot = self.carve(class_bytes)
        if slot is None and self.free[class_bytes]:
            slot = self.free[class_bytes].pop(0)
        return slot

    def give_back(self, slot: int) -> None:
        self.free[self.slab_of(slot).class_bytes].append(slot)

    # Eviction.

    def children(self, name: Name) -> list[Chunk]:
        return [chunk for chunk in self.chunks.values() if chunk.parent == name]

    def is_leased(self, chunk: Chunk) -> bool:
        return any(slot == chunk.ref[0] for _, slot in self.leases)

    def victim(self, class_bytes: int) -> Chunk | None:
        evictable = [
            chunk
            for chunk in self.chunks.values()
            if chunk.class_bytes == class_bytes and not self.children(chunk.name) and not self.is_leased(chunk)
        ]
        return min(evictable, key=lambda chunk: (not chunk.orphan, chunk.tick), default=None)

    def chunks_in(self, slab: Slab) -> list[Chunk]:
        return [chunk for chunk in self.chunks.values() if self.slab_of(chunk.ref[0]) is slab]

    def window(self, class_bytes: int) -> tuple[int, list[Slab]] | None:
        """(newest tick, slabs that would go) of the units that another class needs least."""
        for units in range(self.run_units(class_bytes), 0, -1):
            found: list[tuple[int, int, list[Slab]]] = []
            for first in range(self.unit_count - units + 1):
                slabs = [
                    slab
                    for slab in self.slabs.values()
                    if slab.first < first + units and first < slab.first + slab.units
                ]
                slabs.sort(key=lambda slab: slab.first)
                busy = any(
                    slab.class_bytes == class_bytes
                    or any(self.slab_of(slot) is slab for slot in self.grants)
                    or any(self.slab_of(slot) is slab for _, slot in self.leases)
                    for slab in slabs
                )
                if self.fits(first, units, class_bytes) and not busy:
                    newest = max((chunk.tick for slab in slabs for chunk in self.chunks_in(slab)), default=0)
                    found.append((newest, first, slabs))
            if found:
                newest, _, slabs = min(found, key=lambda one: one[:2])
                return newest, slabs
        return None

    def evict(self, chunk: Chunk) -> None:
        self.drop(chunk)
        self.evictions += 1

    def drop(self, chunk: Chunk) -> None:
        for child in self.children(chunk.name):
            child.parent = None
            child.orphan = True
        del self.chunks[chunk.name]
        self.give_back(chunk.ref[0])
        self.free_records.append(chunk.record)

    def move(self, slab: Slab) -> None:
        for slot in range(slab.first * self.slots_per_unit, slab.first * self.slots_per_unit + slab.carved):
            for chunk in [chunk for chunk in self.chunks.values() if chunk.ref[0] == slot]:
                self.evict(chunk)
            self.generations[slot] += 1
        self.free[slab.class_bytes] = [slot for slot in self.free[slab.class_bytes] if self.slab_of(slot) is not slab]
        if slab.first in self.open[slab.class_bytes]:
            self.open[slab.class_bytes].remove(slab.first)
        del self.slabs[slab.first]

    # The index's calls.

    def grant(self, group: int, chunk_bytes: int, count: int) -> list[Ref]:
        class_bytes = -(-chunk_bytes // PAGE) * PAGE
        granted: list[Ref] = []
        moved = False
        while len(granted) < count:
            slot = self.take(class_bytes)
            if slot is not None:
                self.generations[slot] += 1
                self.grants[slot] = group
                self.granted_at[slot] = len(self.removals)
                granted.append((slot, self.generations[slot]))
                continue
            victim = self.victim(class_bytes)
            window = None if moved else self.window(class_bytes)
            if victim and (window is None or (0 if victim.orphan else victim.tick) < window[0]):
                self.evict(victim)
            elif window:
                for slab in window[1]:
                    self.move(slab)
                moved = True
            else:
                break
        return granted

    def holds(self, group: int, ref: Ref) -> bool:
        return self.grants.get(ref[0]) == group and self.generations[ref[0]] == ref[1]

    def chunk_at(self, ref: Ref) -> Chunk | None:
        return next((chunk for chunk in self.chunks.values() if chunk.ref == ref), None)

    def commit(self, group: int, namespace: bytes, commit: Commit, now_ms: int) -> int:
        slot, generation, tenant, key, parent = commit
        ref = (slot, generation)
        name = (namespace, tenant, key)
        if not self.holds(group, ref):
            there = self.chunk_at(ref)
            return _native.STORED if there and there.name == name else _native.NOT_GRANTED
        del self.grants[ref[0]]
        since = self.removals[self.granted_at[ref[0]] :]
        if any(its in (None, namespace) and whose in (None, tenant) for its, whose in since):
            self.give_back(ref[0])
            return _native.NOT_GRANTED
        if name in self.chunks:
            self.give_back(ref[0])
            return _native.PRESENT
        self.tick += 1
        parent_name = (namespace, tenant, parent) if parent else None
        record = self.free_records.pop() if self.free_records else self.records
        self.records = max(self.records, record + 1)
        chunk = Chunk(name, ref, self.slab_of(ref[0]).class_bytes, self.tick, parent_name, record, now_ms)
        if parent_name in self.chunks:
            chunk.parent = parent_name
        self.chunks[name] = chunk
        return _native.STORED

    def abort(self, group: int, refs: list[Ref]) -> int:
        aborted = 0
        for ref in refs:
            if self.holds(group, ref):
                del self.grants[ref[0]]
                self.give_back(ref[0])
                aborted += 1
        return aborted

    def pinned_bytes(self) -> int:
        return sum(chunk.class_bytes for chunk in self.chunks.values() if self.is_leased(chunk))

    def lease(self, group: int, refs: list[Ref], deadline: int) -> list[bool]:
        answers = []
        for ref in refs:
            chunk = self.chunk_at(ref)
            fits = chunk is not None and (
                self.is_leased(chunk) or self.pinned_bytes() + chunk.class_bytes <= self.arena_bytes // 2
            )
            if fits:
                self.leases[group, ref[0]] = (ref[1], deadline)
            answers.append(fits)
        return answers

    def release(self, group: int, refs: list[Ref]) -> list[bool]:
        answers = []
        for slot, generation in refs:
            held = self.leases.get((group, slot), (None, 0))[0] == generation
            if held:
                del self.leases[group, slot]
            answers.append(held)
        return answers

    def expire_leases(self, now: int) -> int:
        ended = [at for at, (_, deadline) in self.leases.items() if deadline <= now]
        for at in ended:
            del self.leases[at]
        return len(ended)

    def end_leases(self, group: int) -> None:
        self.leases = {at: lease for at, lease in self.leases.items() if at[0] != group}

    def descends_from(self, name: Name | None, ancestor: Name) -> bool:
        while name is not None:
            if name == ancestor:
                return True
            name = self.chunks[name].parent
        return False

    def remove(
        self,
        namespace: bytes | None,
        tenant: bytes | None,
        used_before_ms: int | None,
        nbytes: int | None,
        dry_run: bool,
    ) -> tuple[int, int, int]:
        """(chunks, bytes, leased ones skipped)."""
        if used_before_ms is None and nbytes is None and not dry_run:
            self.removals.append((namespace, tenant))
        meant = [
            chunk
            for chunk in sorted(self.chunks.values(), key=lambda chunk: chunk.record)
            if namespace in (None, chunk.name[0])
            and tenant in (None, chunk.name[1])
            and (used_before_ms is None or chunk.used_ms < used_before_ms)
        ]
        going, skipped = [chunk for chunk in meant if not self.is_leased(chunk)], 0
        if nbytes is None:
            skipped = len(meant) - len(going)
        else:
            going = []
            for chunk in sorted(meant, key=lambda chunk: (not chunk.orphan, chunk.tick)):
                if sum(one.class_bytes for one in going) >= nbytes:
                    break
                if self.is_leased(chunk):
                    skipped += 1
                else:
                    going.insert(0, chunk)  # they go newest first
        if not dry_run:
            for chunk in going:
                self.drop(chunk)
            self.removed += len(going)
        return len(going), sum(chunk.class_bytes for chunk in going), skipped

    def usage(self) -> list[tuple[bytes, bytes, int, int]]:
        scopes = sorted({name[:2] for name in self.chunks})
        sizes = {scope: [c.class_bytes for name, c in self.chunks.items() if name[:2] == scope] for scope in scopes}
        return [(*scope, len(sizes[scope]), sum(sizes[scope])) for scope in scopes]

    def touch(self, namespace: bytes, tenant: bytes, keys: list[bytes], now_ms: int) -> None:
        child: Chunk | None = None
        for key in reversed(keys):
            chunk = self.chunks.get((namespace, tenant, key))
            if chunk:
                self.tick += 1
                chunk.tick = self.tick
                chunk.used_ms = now_ms
                named = child is not None and child.parent is None and child.parent_named == chunk.name
                if child and named and not self.descends_from(chunk.name, child.name):
                    child.parent = chunk.name
                    child.orphan = False
            child = chunk

    def stats(self) -> dict[str, int]:
        return {
            "used_bytes": sum(chunk.class_bytes for chunk in self.chunks.values()),
            "granted_bytes": sum(self.slab_of(slot).class_bytes for slot in self.grants),
            "pinned_bytes": self.pinned_bytes(),
            "chunks": len(self.chunks),
            "grants": len(self.grants),
            "leases": len(self.leases),
            "evictions": self.evictions,
            "removals": self.removed,
            "entries": len(self.chunks),
            "tenants": len({tenant for _, tenant, _ in self.chunks}),
        }
