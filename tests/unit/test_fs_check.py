"""The check of a catalog: each fault is found, and none where chunks come and go between its slices. No disk."""

import random
from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from kvstore.tiers import fs_check
from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_catalog import Catalog, Entry, Usage, _link, _unlink
from kvstore.tiers.fs_check import Check
from tests.unit.test_fs_catalog import LARGE, SMALL, fill, grow, in_order, make, problems


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_check, "SLOTS_PER_SLICE", 4)
    monkeypatch.setattr(fs_check, "OWNERS_PER_SLICE", 2)


def stored(chunks: int) -> tuple[Catalog, list[Entry]]:
    """In slabs of ten slots, by three tenants."""
    catalog = make()
    size_class = catalog.class_of(SMALL)
    entries = []
    for number in range(chunks):
        entries.append(store(catalog, number))
    assert len(size_class.slabs) == -(-chunks // 10)
    in_order(catalog)
    return catalog, entries


def store(catalog: Catalog, number: int) -> Entry:
    size_class = catalog.class_of(SMALL)
    place = catalog.take_free(size_class)
    if place is None:
        grow(catalog, SMALL, slot_count=10)
        place = catalog.take_free(size_class)
    assert place is not None
    return catalog.hold(chunk_id(number, tenant=number % 3), place, number, 4096, proven=True)


def evict(catalog: Catalog, entry: Entry) -> None:
    catalog.free(catalog.forget(entry), frozenset({entry.chunk}))


def usage_of(catalog: Catalog, entry: Entry) -> Usage:
    return catalog.usage[entry.chunk[:2]]


def make_oldest_newest(catalog: Catalog, entry: Entry) -> None:
    """Without a tick that says so."""
    _unlink(entry)
    _link(entry, entry.place.slab.size_class.end, catalog.tenants[entry.chunk.tenant].end)


def swap_tenants(catalog: Catalog, _: Entry) -> None:
    """The sums of all stay what they were."""
    one, other = list(catalog.tenants.values())[:2]
    one.used_bytes += SMALL
    other.used_bytes -= SMALL


def swap_owners(catalog: Catalog, _: Entry) -> None:
    one, other = list(catalog.usage.values())[:2]
    one.chunks += 1
    other.chunks -= 1


def keep_in_order(catalog: Catalog, entry: Entry) -> None:
    """Forgotten, but still a neighbour of others."""
    catalog.free(catalog.forget(entry))
    _link(entry, entry.place.slab.size_class.end, catalog.tenants[entry.chunk.tenant].end)


FAULTS: list[tuple[Callable[[Catalog, Entry], object], str]] = [
    (lambda catalog, entry: catalog.entries.pop(entry.chunk), "not to be found"),
    (lambda _, entry: entry.place.slab.held.pop(entry.place.slot), "chunks to be found, but"),
    (lambda _, entry: entry.place.slab.held.pop(entry.place.slot), "held + 0 quarantined is"),
    (make_oldest_newest, "in the order of their use, among those of its size"),
    (make_oldest_newest, "in the order of their use, among those of its tenant"),
    (lambda _, entry: setattr(entry.newer, "older", entry.older), "where the chunks of its size say it is"),
    (
        lambda _, entry: setattr(entry.newer_of_tenant, "older_of_tenant", entry.older_of_tenant),
        "where the chunks of its tenant say it is",
    ),
    (keep_in_order, "among others than those of its size"),
    (keep_in_order, "among others than those of its tenant"),
    (lambda catalog, entry: catalog.tenants.pop(entry.chunk.tenant), "a tenant that is not known"),
    (lambda catalog, _: setattr(catalog, "used_bytes", 0), "accounted for"),
    (lambda catalog, entry: setattr(usage_of(catalog, entry), "nbytes", 1), "in a namespace"),
    (swap_owners, "in a namespace"),
    (swap_tenants, "a tenant's chunks take"),
    (lambda _, entry: setattr(entry, "payload_bytes", 8192), "bytes in a slot of"),
    (lambda _, entry: setattr(entry, "readers", 1), "more readers"),
    (lambda _, entry: entry.place.slab.quarantined.add(entry.place.slot), "in two states"),
    (lambda _, entry: entry.place.slab.free.setdefault(entry.place.slot), "in two states"),
    (lambda _, entry: entry.place.slab.free.setdefault(entry.place.slot), "its class knows otherwise"),
    (lambda catalog, _: setattr(catalog, "foreign_bytes", catalog.cap_bytes), "the cap is"),
]


@pytest.mark.parametrize(("spoil", "sentence"), FAULTS)
@pytest.mark.parametrize("which", [0, 11, 17])
def test_each_fault_is_found(spoil: Callable[[Catalog, Entry], object], sentence: str, which: int) -> None:
    catalog, entries = stored(25)
    spoil(catalog, entries[which])
    assert any(sentence in problem for problem in problems(catalog))


@pytest.mark.parametrize(("spoil", "sentence"), FAULTS)
def test_each_fault_is_found_while_chunks_come_and_go(spoil: Callable[[Catalog, Entry], object], sentence: str) -> None:
    catalog, entries = stored(25)
    numbers = iter(range(1_000, 2_000))
    spoil(catalog, entries[11])
    found: list[str] = []
    for number, slice_ in zip(numbers, Check(catalog).slices(), strict=False):
        found += slice_
        evict(catalog, store(catalog, number))
    assert any(sentence in problem for problem in found)


@pytest.mark.parametrize("seed", range(30))
def test_no_fault_is_made_of_what_comes_and_goes_between_slices(seed: int) -> None:
    rnd = random.Random(seed)
    catalog, _ = stored(30)
    fill(catalog, grow(catalog, LARGE, slot_count=3).size_class, 5_000, 3)
    numbers = iter(range(1_000, 10_000))

    def something_happens() -> None:
        match rnd.randrange(6):
            case 0 | 1:
                store(catalog, next(numbers))
            case 2 if catalog.entries:
                evict(catalog, rnd.choice(list(catalog.entries.values())))
            case 3 if catalog.entries:
                catalog.touch(rnd.choice(list(catalog.entries.values())))
            case 4 if catalog.slabs and rnd.random() < 0.2:
                catalog.remove_slab(rnd.choice(list(catalog.slabs.values())))
            case 5 if catalog.entries:
                catalog.quarantine(catalog.forget(rnd.choice(list(catalog.entries.values()))))

    checks = [Check(catalog).slices() for _ in range(2)]  # two at a time, out of step
    next(checks[0])
    for _ in range(40):
        for check in checks:
            assert next(check, []) == []
            for _ in range(rnd.randrange(12)):
                something_happens()
    for check in checks:
        assert list(chain.from_iterable(check)) == []
    assert catalog.watchers == []
    in_order(catalog)


def test_a_check_has_a_slice_for_so_many_slots_and_so_many_owners() -> None:
    catalog, _ = stored(30)
    # Three slabs of ten slots, four at a time; the totals; three owners and three tenants, two at a time.
    assert sum(1 for _ in Check(catalog).slices()) == 3 * 3 + 1 + 2 + 2


def test_a_check_that_is_not_ended_leaves_nothing_behind() -> None:
    catalog, _ = stored(30)
    slices: Iterator[list[str]] = Check(catalog).slices()
    next(slices)
    assert len(catalog.watchers) == 1
    del slices
    assert catalog.watchers == []


def test_a_walk_sees_what_stays_once_and_a_bounded_number_of_slots_at_a_time() -> None:
    catalog, entries = stored(30)
    seen: list[Entry] = []
    for number, held in enumerate(catalog.walk(4), start=1_000):
        assert len(held) <= 4
        seen += held
        evict(catalog, entries.pop(0))
        store(catalog, number)
        if number == 1_002:
            catalog.remove_slab(entries[-1].place.slab)
    stayed = [entry for entry in entries if not entry.forgotten]
    assert len(stayed) == 30 - 9 - 10  # one evicted after each slice, and a slab of ten removed
    assert all(seen.count(entry) == 1 for entry in stayed)
