"""The catalog: costs, states of slots, and what has to go. No disk."""

import random
from itertools import chain

import pytest

from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_catalog import (
    TICKS_ARE_TIMES_FROM,
    Catalog,
    Entry,
    Evict,
    Grow,
    Place,
    Retire,
    SizeClass,
    Slab,
    Stuck,
    index_bytes_for,
    slab_charge,
    small_files_bytes_for,
)
from kvstore.tiers.fs_check import Check
from kvstore.tiers.fs_format import slot_bytes_for

SMALL = slot_bytes_for(4096)
LARGE = slot_bytes_for(256 << 10)


def make(cap_bytes: int = 8 << 20, slab_bytes: int | None = None) -> Catalog:
    return Catalog(cap_bytes, slab_bytes=slab_bytes)


def grow(catalog: Catalog, slot_bytes: int, slot_count: int | None = None) -> Slab:
    count = slot_count or catalog.slots_that_fit(slot_bytes)
    return catalog.add_slab(catalog.free_slab_number(), -1, 1, slot_bytes, count, fresh=True)


def fill(catalog: Catalog, size_class: SizeClass, first: int, count: int) -> list[Entry]:
    entries = []
    for number in range(first, first + count):
        place = catalog.take_free(size_class)
        assert place is not None
        entries.append(catalog.hold(chunk_id(number), place, number, size_class.slot_bytes - 4096, proven=True))
    return entries


def problems(catalog: Catalog) -> list[str]:
    return list(chain.from_iterable(Check(catalog).slices()))


def in_order(catalog: Catalog) -> None:
    assert problems(catalog) == []


def test_slabs_fill_the_cap_and_never_exceed_it_with_the_index_and_the_small_files_counted() -> None:
    for cap_bytes in (1 << 20, 3_000_001, 32 << 20, 1 << 30, 1 << 40):
        for slot_bytes in (SMALL, LARGE, slot_bytes_for(2 << 20)):
            catalog = make(cap_bytes)
            while catalog.slots_that_fit(slot_bytes):
                grow(catalog, slot_bytes)
            assert catalog.charged_bytes <= cap_bytes
            assert catalog.charged_bytes + slab_charge(slot_bytes, 1) + index_bytes_for(1) > cap_bytes
            in_order(catalog)


def test_every_byte_charged_is_for_something() -> None:
    catalog = make()
    slab = grow(catalog, SMALL, 10)
    expected = small_files_bytes_for(8 << 20) + index_bytes_for(10) + slab_charge(SMALL, 10)
    assert catalog.charged_bytes == expected
    assert catalog.overhead_bytes == expected - 10 * SMALL
    catalog.remove_slab(slab)
    assert catalog.charged_bytes == expected - slab_charge(SMALL, 10)  # the index file does not shrink
    assert catalog.cost_of(SMALL, 10) == slab_charge(SMALL, 10)


def test_a_forgotten_chunk_keeps_none_alive_that_was_forgotten_after_it() -> None:
    catalog = make()
    slab = grow(catalog, SMALL, 3)
    entries = fill(catalog, slab.size_class, 0, 3)
    for entry in entries[:2]:
        catalog.free(catalog.forget(entry))
    kept, later, held = entries
    assert later not in (kept.older, kept.newer, kept.older_of_tenant, kept.newer_of_tenant)
    assert list(catalog.evictable(slab.size_class)) == [held]
    in_order(catalog)


def test_a_cap_too_small_for_one_slot_is_stuck() -> None:
    catalog = make(600 << 10)
    assert catalog.room_for(catalog.class_of(LARGE), may_grow=True) == Stuck()


def test_the_victim_is_the_least_recently_used_without_a_reader() -> None:
    catalog = make(slab_bytes=4 * SMALL)
    slab = grow(catalog, SMALL)
    size_class = slab.size_class
    entries = fill(catalog, size_class, 0, 4)
    catalog.foreign_bytes = 1 << 30  # no growth
    catalog.touch(entries[0])
    entries[1].readers = 1
    assert catalog.room_for(size_class, may_grow=True) == Evict(entries[2])
    assert list(catalog.evictable(size_class)) == [entries[2], entries[3], entries[0]]


def test_room_is_grown_before_anything_is_evicted() -> None:
    catalog = make(slab_bytes=4 * SMALL)
    slab = grow(catalog, SMALL)
    fill(catalog, slab.size_class, 0, 4)
    assert catalog.room_for(slab.size_class, may_grow=True) == Grow(4)
    assert isinstance(catalog.room_for(slab.size_class, may_grow=False), Evict)


def full_of_two_classes() -> tuple[Catalog, Slab, list[Entry], Slab, list[Entry]]:
    """A slab of each class, the small one's chunks older, and no room for a third."""
    catalog = make()
    small = grow(catalog, SMALL, slot_count=64)
    large = grow(catalog, LARGE, slot_count=2)
    old = fill(catalog, small.size_class, 0, 64)
    young = fill(catalog, large.size_class, 100, 2)
    catalog.foreign_bytes = catalog.cap_bytes - catalog.charged_bytes
    return catalog, small, old, large, young


def test_a_class_takes_the_slab_whose_newest_chunk_is_older_than_its_own_oldest() -> None:
    catalog, small, old, large, _young = full_of_two_classes()
    assert catalog.room_for(large.size_class, may_grow=True) == Retire(small)
    catalog.touch(old[0])
    assert isinstance(catalog.room_for(large.size_class, may_grow=True), Evict)
    in_order(catalog)


def test_a_slab_with_io_is_not_given_up() -> None:
    catalog, small, _, large, _young = full_of_two_classes()
    small.reading = 1
    assert isinstance(catalog.room_for(large.size_class, may_grow=True), Evict)
    small.reading = 0
    assert catalog.room_for(large.size_class, may_grow=True) == Retire(small)


def test_a_new_class_takes_a_slab_when_there_is_no_room_for_its_first() -> None:
    catalog, small, _, _, _ = full_of_two_classes()
    assert catalog.room_for(catalog.class_of(slot_bytes_for(64 << 10)), may_grow=True) == Retire(small)


def test_a_removed_slab_takes_its_chunks_and_free_slots_with_it() -> None:
    catalog = make(slab_bytes=4 * SMALL)
    first, second = grow(catalog, SMALL), grow(catalog, SMALL)
    entries = fill(catalog, first.size_class, 0, 6)
    place = catalog.forget(entries[0])
    catalog.free(place, frozenset({entries[0].chunk}))
    lost = catalog.remove_slab(first)
    assert [entry.chunk for entry in lost] == [chunk_id(number) for number in (1, 2, 3)]
    assert list(catalog.entries) == [chunk_id(4), chunk_id(5)]
    assert list(catalog.idle_ghosts()) == []
    assert catalog.take_free(second.size_class) == Place(second, 2)
    in_order(catalog)


def test_slots_are_reused_first_in_first_out() -> None:
    catalog = make(slab_bytes=4 * SMALL)
    slab = grow(catalog, SMALL)
    entries = fill(catalog, slab.size_class, 0, 4)
    for entry in (entries[2], entries[0]):
        catalog.free(catalog.forget(entry))
    assert [catalog.take_free(slab.size_class) for _ in range(3)] == [Place(slab, 2), Place(slab, 0), None]


def test_ghosts_are_known_until_the_slot_is_held_again() -> None:
    catalog = make(slab_bytes=4 * SMALL)
    slab = grow(catalog, SMALL)
    (entry,) = fill(catalog, slab.size_class, 0, 1)
    catalog.free(catalog.forget(entry), frozenset({entry.chunk}))
    ((place, headers),) = catalog.idle_ghosts()
    assert headers == {entry.chunk}
    catalog.take(place)
    assert list(catalog.idle_ghosts()) == []
    assert not slab.free
    assert not slab.size_class.with_free
    catalog.free(place)
    assert list(catalog.idle_ghosts()) == []
    in_order(catalog)


def test_usage_is_by_namespace_and_tenant() -> None:
    catalog = make(slab_bytes=8 * SMALL)
    slab = grow(catalog, SMALL)
    for number in range(6):
        place = catalog.take_free(slab.size_class)
        assert place is not None
        catalog.hold(chunk_id(number, tenant=number % 2), place, number, 4096, proven=True)
    assert {owner[1][-1]: usage.nbytes for owner, usage in catalog.usage.items()} == {0: 3 * SMALL, 1: 3 * SMALL}
    for chunk in [chunk for chunk in catalog.entries if chunk.tenant[-1] == 1]:
        catalog.free(catalog.forget(catalog.entries[chunk]))
    assert [owner[1][-1] for owner in catalog.usage] == [0]


def test_whether_a_namespace_or_a_tenant_has_chunks_follows_what_comes_and_goes() -> None:
    catalog = make(slab_bytes=8 * SMALL)
    slab = grow(catalog, SMALL)
    assert not catalog.holds(None, None)
    chunks = [chunk_id(number, tenant=number % 2)._replace(namespace=bytes([number // 2] * 16)) for number in range(4)]
    for number, chunk in enumerate(chunks):
        place = catalog.take_free(slab.size_class)
        assert place is not None
        catalog.hold(chunk, place, number, 4096, proven=True)
    scopes = {
        (namespace, tenant)
        for chunk in chunks
        for namespace in (None, chunk.namespace)
        for tenant in (None, chunk.tenant)
    }
    while catalog.entries:
        for namespace, tenant in scopes:
            meant = [c for c in catalog.entries if namespace in (None, c.namespace) and tenant in (None, c.tenant)]
            assert catalog.holds(namespace, tenant) == bool(meant)
        catalog.free(catalog.forget(next(iter(catalog.entries.values()))))
    assert not any(catalog.holds(*scope) for scope in scopes)
    catalog.set_quota(chunks[0].tenant, 1)
    assert not catalog.holds(None, chunks[0].tenant)


@pytest.mark.parametrize("seed", range(20))
def test_accounts_stay_true_through_any_sequence(seed: int) -> None:
    rnd = random.Random(seed)
    catalog = make(4 << 20, slab_bytes=128 << 10)
    sizes = [SMALL, slot_bytes_for(30_000), slot_bytes_for(100_000)]
    taken: list[Place] = []
    model: dict[object, int] = {}
    for number in range(1500):
        size_class = catalog.class_of(rnd.choice(sizes))
        action = rnd.random()
        if action < 0.5:
            place = catalog.take_free(size_class)
            if place is not None:
                taken.append(place)
        elif action < 0.75 and taken:
            place = taken.pop(rnd.randrange(len(taken)))
            payload_bytes = place.slab.slot_bytes - 4096 - rnd.randrange(4096)
            chunk = chunk_id(number)
            catalog.hold(chunk, place, number, payload_bytes, proven=True)
            model[chunk] = place.slab.slot_bytes
        elif action < 0.85 and taken:
            place = taken.pop()
            (catalog.quarantine if rnd.random() < 0.1 else catalog.free)(place)
        elif action < 0.9 and model:
            catalog.touch(catalog.entries[rnd.choice(list(catalog.entries))])
        else:
            match catalog.room_for(size_class, may_grow=rnd.random() < 0.8):
                case Grow(slot_count):
                    grow(catalog, size_class.slot_bytes, slot_count)
                case Evict(entry):
                    held = [each for each in catalog.entries.values() if each.place.slab.size_class is size_class]
                    assert entry is min(held, key=lambda each: each.tick)
                    del model[entry.chunk]
                    taken.append(catalog.forget(entry))
                case Retire(slab):
                    for entry in catalog.remove_slab(slab):
                        del model[entry.chunk]
                case Stuck():
                    pass
        assert catalog.used_bytes == sum(model.values())
        assert catalog.entries.keys() == model.keys()
        assert catalog.charged_bytes <= catalog.cap_bytes
        in_order(catalog)


def test_ticks_are_times_and_rise_with_every_use_also_when_the_clock_does_not() -> None:
    now = [TICKS_ARE_TIMES_FROM + 10_000_000]
    catalog = Catalog(1 << 30, clock_us=lambda: now[0])
    slab = catalog.add_slab(0, -1, 1, 8192, 4, fresh=True)
    entries = []
    for number in range(2):
        place = catalog.take_free(slab.size_class)
        assert place is not None
        entries.append(catalog.hold(chunk_id(number), place, number, 4096, proven=True))
    assert entries[0].tick < entries[1].tick
    now[0] += 5_000_000
    assert [round(catalog.idle_s(entry), 3) for entry in entries] == [5.0, 5.0]
    now[0] -= 60_000_000  # set back
    catalog.touch(entries[0])
    assert entries[0].tick > entries[1].tick
    assert catalog.idle_s(entries[0]) == 0.0
    place = catalog.take_free(slab.size_class)
    assert place is not None
    rebuilt = catalog.hold(chunk_id(3), place, 9, 4096, proven=False, tick=9)
    now[0] = TICKS_ARE_TIMES_FROM + 17_000_000
    assert catalog.idle_s(rebuilt) == 7.0  # since the catalog was made
