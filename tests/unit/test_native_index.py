"""The index: grants, commits, aborts, leases and the deaths of groups; and what readers of the table see of them."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore import _native
from kvstore._native import CPU, FS, MISS, PENDING, STORED
from tests.unit.native_store import INDEX_KEY, INSTANCE, KIB, NAMESPACE, TENANT, NativeStore, key_of, native_store

CHUNK = 64 * KIB
OTHER_TENANT = b"tenant-b--------"
OTHER_NAMESPACE = b"namespace-b-----"


def test_a_committed_chunk_is_found_by_readers_and_by_the_index() -> None:
    with native_store() as store:
        slot, generation = store.put(7)
        keys = [key_of(6), key_of(7)]
        codes, slots, generations = store.table().lookup(NAMESPACE, TENANT, keys)
        assert codes == bytes([_native.MISS, _native.CPU])
        assert (slots.dtype, generations.dtype) == (np.uint32, np.uint64)
        assert (slots[1], generations[1]) == (slot, generation)
        assert store.index.lookup(NAMESPACE, TENANT, keys) == codes
        assert store.index.stats()["used_bytes"] == CHUNK


def test_a_granted_slot_is_invisible_until_its_commit() -> None:
    with native_store() as store:
        table = store.table()
        [(slot, generation)] = store.index.grant(1, CHUNK, 1)
        assert table.lookup(NAMESPACE, TENANT, [key_of(1)])[0] == bytes([_native.MISS])
        assert store.index.stats()["granted_bytes"] == CHUNK
        assert store.index.commit(1, NAMESPACE, [(slot, generation, TENANT, key_of(1), b"")]) == [_native.STORED]
        assert table.lookup(NAMESPACE, TENANT, [key_of(1)])[0] == bytes([_native.CPU])
        assert store.index.stats()["granted_bytes"] == 0


def test_a_commit_is_waited_for_in_the_slot_and_generation_that_were_granted() -> None:
    with native_store() as store, ThreadPoolExecutor(1) as waiter:
        table = store.table()
        [(slot, generation)] = store.index.grant(1, 64 * KIB, 1)
        here = (NAMESPACE, TENANT, key_of(1), slot, generation)
        assert not table.wait_shown(*here, 0.0)
        waiting = waiter.submit(table.wait_shown, *here, 60.0)
        assert store.index.commit(1, NAMESPACE, [(slot, generation, TENANT, key_of(1), b"")]) == [_native.STORED]
        assert waiting.result()
        for other in (
            (NAMESPACE, TENANT, key_of(2), slot, generation),
            (NAMESPACE, OTHER_TENANT, key_of(1), slot, generation),
            (NAMESPACE, TENANT, key_of(1), slot + 1, generation),
            (NAMESPACE, TENANT, key_of(1), slot, generation + 1),
        ):
            assert not table.wait_shown(*other, 0.0001)
        table.close()
        assert not table.wait_shown(*here, 60.0)


def test_neither_tenants_nor_namespaces_nor_other_keys_of_the_index_see_each_others_chunks() -> None:
    with native_store() as store:
        store.put(1)
        table = store.table()
        assert table.lookup(NAMESPACE, OTHER_TENANT, [key_of(1)])[0] == bytes([_native.MISS])
        assert table.lookup(OTHER_NAMESPACE, TENANT, [key_of(1)])[0] == bytes([_native.MISS])
        assert table.lookup(NAMESPACE, TENANT, [key_of(1)[:31]])[0] == bytes([_native.MISS])
        assert store.index.lookup(NAMESPACE, OTHER_TENANT, [key_of(1)]) == bytes([_native.MISS])
        assert store.index.lookup(OTHER_NAMESPACE, TENANT, [key_of(1)]) == bytes([_native.MISS])
        stranger = store.table(index_key=bytes(16))
        assert stranger.lookup(NAMESPACE, TENANT, [key_of(1)])[0] == bytes([_native.MISS])


def test_the_first_of_two_commits_of_one_key_wins() -> None:
    with native_store() as store:
        first, second = store.index.grant(1, CHUNK, 2)
        assert store.index.commit(
            1, NAMESPACE, [(*first, TENANT, key_of(1), b""), (*second, TENANT, key_of(1), b"")]
        ) == [_native.STORED, _native.PRESENT]
        _, slots, _ = store.table().lookup(NAMESPACE, TENANT, [key_of(1)])
        assert slots[0] == first[0]
        assert store.index.stats()["grants"] == 0


def test_a_repeated_commit_is_answered_as_before() -> None:
    with native_store() as store:
        slot, generation = store.put(1)
        commit = (slot, generation, TENANT, key_of(1), b"")
        assert store.index.commit(1, NAMESPACE, [commit, commit]) == [_native.STORED, _native.STORED]
        assert store.index.stats()["chunks"] == 1
        # The same place with another key is not a repetition.
        other = (slot, generation, TENANT, key_of(2), b"")
        assert store.index.commit(1, NAMESPACE, [other]) == [_native.NOT_GRANTED]


def test_only_the_group_and_generation_of_the_grant_can_commit_or_abort() -> None:
    with native_store() as store:
        [(slot, generation)] = store.index.grant(1, CHUNK, 1)
        for group, ref in [
            (2, (slot, generation)),
            (1, (slot, generation + 1)),
            (1, (slot + 1, 1)),
            (1, (2**32 - 1, 1)),
        ]:
            assert store.index.commit(group, NAMESPACE, [(*ref, TENANT, key_of(1), b"")]) == [_native.NOT_GRANTED]
            assert store.index.abort(group, [ref]) == 0
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(1)]) == bytes([_native.MISS])
        assert store.index.abort(1, [(slot, generation), (slot, generation)]) == 1
        assert store.index.commit(1, NAMESPACE, [(slot, generation, TENANT, key_of(1), b"")]) == [_native.NOT_GRANTED]


def test_a_generation_rises_with_every_grant_and_never_else() -> None:
    with native_store(CHUNK) as store:
        table = store.table()
        [(slot, first)] = store.index.grant(1, CHUNK, 1)
        assert store.index.abort(1, [(slot, first)]) == 1
        slots, generations = np.array([slot], np.uint32), np.array([first], np.uint64)
        assert table.current(slots, generations) == b"\x01"
        assert store.index.grant(1, CHUNK, 1) == [(slot, first + 1)]
        assert table.current(slots, generations) == b"\x00"
        assert table.current(slots, generations + 1) == b"\x01"


def test_a_slot_beyond_the_table_is_never_current() -> None:
    with native_store() as store:
        slots = np.array([0, 2**32 - 1], np.uint32)
        assert store.table().current(slots, np.zeros(2, np.uint64)) == b"\x01\x00"
        with pytest.raises(ValueError, match="slots and generations differ in length: 2 and 1"):
            store.table().current(slots, np.zeros(1, np.uint64))


@pytest.mark.parametrize("chunk_count", range(1, 40))
@pytest.mark.parametrize("chunk_bytes", [4 * KIB, 12 * KIB, 64 * KIB, 100 * 1000])
def test_an_arena_of_whole_chunks_holds_nearly_all_of_them(chunk_count: int, chunk_bytes: int) -> None:
    class_bytes = _native.class_bytes(chunk_bytes)
    with native_store(chunk_count * class_bytes) as store:
        granted = store.index.grant(1, chunk_bytes, chunk_count + 1)
        assert chunk_count - chunk_count // 16 <= len(granted) <= chunk_count
        ranges = sorted(store.offset(slot, chunk_bytes) for slot, _ in granted)
        assert all(after - before >= class_bytes for before, after in itertools.pairwise(ranges))
        assert ranges[-1] + class_bytes <= store.arena_bytes
        assert store.index.stats()["granted_bytes"] == len(granted) * class_bytes


def test_classes_take_slabs_of_their_own() -> None:
    sizes = [4 * KIB, 20 * KIB, 64 * KIB, 300 * KIB]
    with native_store(16 * 300 * KIB) as store:
        ranges = []
        for size in sizes:
            for slot, _ in store.index.grant(1, size, 3):
                ranges.append((store.offset(slot, size), size))
        ranges.sort()
        assert len(ranges) == 12
        for (begin, size), (following, _) in itertools.pairwise(ranges):
            assert begin + size <= following


def test_a_full_tier_grants_fewer() -> None:
    with native_store(4 * CHUNK) as store:
        assert len(store.index.grant(1, CHUNK, 3)) == 3
        assert len(store.index.grant(2, CHUNK, 3)) == 1
        assert store.index.grant(2, CHUNK, 3) == []


def test_only_prefaulted_bytes_are_granted() -> None:
    with native_store(4 * CHUNK, prefaulted=CHUNK - 1) as store:
        assert store.index.grant(1, CHUNK, 4) == []
        store.index.set_prefaulted(2 * CHUNK)
        assert len(store.index.grant(1, CHUNK, 4)) == 2
        store.index.set_prefaulted(4 * CHUNK)
        assert len(store.index.grant(1, CHUNK, 4)) == 2
        with pytest.raises(ValueError, match="pre-faulted 5 bytes: outside of 262144"):
            store.index.set_prefaulted(5)


def test_freed_slots_are_reused_last_in_first_freed_order() -> None:
    with native_store(4 * CHUNK) as store:
        first, second = store.index.grant(1, CHUNK, 2)
        store.index.abort(1, [second, first])
        slots = [slot for slot, _ in store.index.grant(1, CHUNK, 4)]
        assert slots[2:] == [second[0], first[0]]
        assert set(slots[:2]).isdisjoint(slots[2:])


def test_a_chunk_larger_than_the_arena_is_refused() -> None:
    with native_store(4 * CHUNK) as store, pytest.raises(ValueError, match="does not fit the arena of 262144 bytes"):
        store.index.grant(1, 4 * CHUNK + 1, 1)


def test_a_size_class_too_many_is_refused() -> None:
    with native_store(512 * CHUNK) as store:
        for pages in range(1, 33):
            store.index.grant(1, pages * 4 * KIB, 1)
        with pytest.raises(ValueError, match="size class number 33"):
            store.index.grant(1, 33 * 4 * KIB, 0)
        assert len(store.index.grant(1, 4 * KIB, 1)) == 1


def test_a_size_class_of_which_nothing_is_held_makes_way_for_a_new_one() -> None:
    with native_store(512 * CHUNK) as store:
        table = store.table()
        first = store.index.grant(1, 4 * KIB, 2)
        rest = [store.index.grant(1, pages * 4 * KIB, 1)[0] for pages in range(2, 33)]
        commits = [(*ref, TENANT, key_of(number), b"") for number, ref in enumerate(rest)]
        assert store.index.commit(1, NAMESPACE, commits) == [_native.STORED] * 31
        assert store.index.classes_in_use() == [pages * 4 * KIB for pages in range(1, 33)]
        store.index.abort(1, first)
        slots, generations = zip(*first, strict=True)
        assert bytes(table.current(np.array(slots, np.uint32), np.array(generations, np.uint64))) == b"\1\1"
        # Its bytes may be parts of the new class's slots, so whoever still reads its slots must find out.
        assert len(store.index.grant(1, 33 * 4 * KIB, 1)) == 1
        assert bytes(table.current(np.array(slots, np.uint32), np.array(generations, np.uint64))) == b"\0\0"
        assert store.index.classes_in_use() == [pages * 4 * KIB for pages in range(2, 34)]
        with pytest.raises(ValueError, match="size class number 33"):
            store.index.grant(1, 4 * KIB, 1)
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in range(31)]) == bytes([CPU] * 31)


def test_a_table_that_is_full_before_the_arena_drops_old_chunks() -> None:
    with native_store(400 * 4 * KIB, entries=1) as store:
        for number in range(400):
            [(slot, generation)] = store.index.grant(1, 4 * KIB, 1)
            [code] = store.index.commit(1, NAMESPACE, [(slot, generation, TENANT, key_of(number), b"")])
            assert code == _native.STORED
            assert store.table().lookup(NAMESPACE, TENANT, [key_of(number)])[0][0] == _native.CPU
        stats = store.index.stats()
        assert stats["entries_max"] == 96  # a page of buckets
        assert 48 < stats["entries"] <= 84
        assert stats["evictions"] == 400 - stats["entries"]
        assert stats["grants"] == 0
        found = store.table().lookup(NAMESPACE, TENANT, [key_of(number) for number in range(400)])[0]
        assert found.count(_native.CPU) == stats["entries"]
        assert found[-40:].count(_native.CPU) > 30  # the young stay
        assert store.index.problems() == []


def test_a_table_full_of_leased_chunks_and_grants_grants_no_more() -> None:
    with native_store(400 * 4 * KIB, entries=1) as store:
        first = store.index.grant(1, 4 * KIB, 40)
        for number, ref in enumerate(first):
            assert store.index.commit(1, NAMESPACE, [(*ref, TENANT, key_of(number), b"")]) == [_native.STORED]
        assert all(store.index.lease(1, first, 1000))
        assert len(store.index.grant(1, 4 * KIB, 200)) == 24  # two thirds of 96 places
        assert store.index.grant(2, 4 * KIB, 1) == []
        store.index.release(1, first[:2])
        assert len(store.index.grant(2, 4 * KIB, 8)) == 2


def keys_that_begin_in_one_bucket(store: NativeStore, count: int) -> list[int]:
    """Numbers of keys that the table looks for in the same bucket and the seven after it: 24 places."""
    buckets = store.index.stats()["entries_max"] // 3

    def home(number: int) -> int:
        digest = _native.digest(INDEX_KEY, NAMESPACE, TENANT, key_of(number))
        return int.from_bytes(digest[:8], "little") * buckets >> 64

    return list(itertools.islice((number for number in itertools.count() if home(number) == 5), count))


def test_where_the_table_has_no_place_within_reach_a_leaf_makes_room_but_no_chunk_that_has_children() -> None:
    with native_store(400 * 4 * KIB, entries=1) as store:
        *crowd, late, later = keys_that_begin_in_one_bucket(store, 26)
        refs = [store.put(crowd[0], 4 * KIB)]
        refs += [store.put(number, 4 * KIB, parent=key_of(before)) for before, number in itertools.pairwise(crowd)]
        assert store.index.lease(1, refs[-1:], 1000) == [True]  # the one leaf
        [ref] = store.index.grant(1, 4 * KIB, 1)
        commit = (*ref, TENANT, key_of(late), b"")
        assert store.index.commit(1, NAMESPACE, [commit]) == [_native.TIER_FULL]
        assert store.index.stats()["grants"] == 0
        store.index.release(1, refs[-1:])
        store.put(later, 4 * KIB)
        found = store.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in (*crowd, late, later)])
        assert found == bytes([*[CPU] * 23, MISS, MISS, CPU])


def test_a_full_table_spares_leased_chunks_and_the_parent_of_the_new_one() -> None:
    with native_store(400 * 4 * KIB, entries=1) as store:
        refs = []
        for number in range(60):
            [ref] = store.index.grant(1, 4 * KIB, 1)
            store.index.commit(1, NAMESPACE, [(*ref, TENANT, key_of(number), b"")])
            refs.append(ref)
        assert all(store.index.lease(1, refs[:40], 1000))
        for number in range(60, 400):  # each the child of chunk 40, which is now the oldest that nobody leases
            [ref] = store.index.grant(1, 4 * KIB, 1)
            store.index.commit(1, NAMESPACE, [(*ref, TENANT, key_of(number), key_of(40))])
        found = store.table().lookup(NAMESPACE, TENANT, [key_of(number) for number in range(60)])[0]
        assert found.count(_native.CPU) == 41
        assert set(found[:41]) == {_native.CPU}
        assert store.index.problems() == []


def test_a_table_that_fills_up_before_the_tier_makes_room_like_a_full_tier() -> None:
    with native_store(400 * 4 * KIB, entries=1) as store:
        refused = set()
        for number in range(400):
            [ref] = store.index.grant(1, 4 * KIB, 1)
            if store.index.commit(1, NAMESPACE, [(*ref, TENANT, key_of(number), b"")]) != [_native.STORED]:
                refused.add(number)  # its places in the table are taken, by chance
        assert len(refused) < 20
        stats = store.index.stats()
        assert (stats["entries_max"], stats["chunks"]) == (96, 64)
        newest = sorted(set(range(400)) - refused)[-64:]
        found = store.table().lookup(NAMESPACE, TENANT, [key_of(number) for number in newest])[0]
        assert found == bytes([_native.CPU] * 64)


def test_a_crowded_table_finds_every_entry() -> None:
    count = 3000
    with native_store(count * 4 * KIB, entries=count * 3 // 4) as store:  # two thirds of its places
        refs = store.index.grant(1, 4 * KIB, count)
        assert len(refs) == count
        commits = [(*ref, TENANT, key_of(number), b"") for number, ref in enumerate(refs)]
        codes = store.index.commit(1, NAMESPACE, commits)
        assert set(codes) == {_native.STORED}
        found, slots, generations = store.table().lookup(NAMESPACE, TENANT, [key_of(number) for number in range(count)])
        resident = [number for number, code in enumerate(found) if code == _native.CPU]
        assert len(resident) == store.index.stats()["entries"] > 0.98 * count
        assert [(int(slots[n]), int(generations[n])) for n in resident] == [refs[n] for n in resident]


def test_ten_thousand_unknown_keys_are_answered() -> None:
    with native_store() as store:
        keys = [key_of(number) for number in range(10_000)]
        assert store.table().lookup(NAMESPACE, TENANT, keys)[0] == bytes(10_000)
        assert store.index.lookup(NAMESPACE, TENANT, keys) == bytes(10_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.table().lookup(NAMESPACE, TENANT, [bytes(15)]), "a key of 15 bytes: 16 to 64"),
        (lambda s: s.table().lookup(NAMESPACE, TENANT, [bytes(65)]), "a key of 65 bytes: 16 to 64"),
        (lambda s: s.table().lookup(b"n", TENANT, []), "a namespace of 1 bytes: 16"),
        (lambda s: s.table().lookup(NAMESPACE, b"", []), "a tenant of 0 bytes: 16"),
        (lambda s: s.index.lookup(NAMESPACE, TENANT, [b""]), "a key of 0 bytes"),
        (lambda s: s.index.touch(NAMESPACE, TENANT, [b"x"]), "a key of 1 bytes"),
        (lambda s: s.index.commit(1, NAMESPACE, [(0, 1, TENANT, b"k", b"")]), "a key of 1 bytes"),
        (lambda s: s.index.commit(1, NAMESPACE, [(0, 1, TENANT, bytes(16), b"p")]), "a key of 1 bytes"),
        (lambda s: s.index.commit(1, NAMESPACE, [(0, 1, b"t", bytes(16), b"")]), "a tenant of 1 bytes"),
        (lambda s: s.index.commit(1, b"n", []), "a namespace of 1 bytes"),
        (lambda s: s.index.grant(1, 0, 1), "a chunk of 0 bytes"),
    ],
)
def test_bad_input_is_refused_with_its_values(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with native_store() as store, pytest.raises(ValueError, match=message):
        call(store)


def test_a_key_that_is_no_bytes_is_a_type_error() -> None:
    with native_store() as store:
        with pytest.raises(TypeError):
            store.table().lookup(NAMESPACE, TENANT, ["key"])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            store.index.abort(1, [(-1, 1)])


def test_a_bad_commit_in_a_batch_changes_nothing() -> None:
    with native_store() as store:
        good, bad = store.index.grant(1, CHUNK, 2)
        with pytest.raises(ValueError, match="a key of 3 bytes"):
            store.index.commit(1, NAMESPACE, [(*good, TENANT, key_of(1), b""), (*bad, TENANT, b"bad", b"")])
        assert store.index.stats()["grants"] == 2
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(1)]) == bytes([_native.MISS])


def test_a_lease_needs_the_chunk_in_that_generation() -> None:
    with native_store() as store:
        ref = store.put(1)
        [granted] = store.index.grant(1, CHUNK, 1)
        assert store.index.lease(1, [ref, (ref[0], ref[1] + 1), granted, (9999, 1)], 100) == [True, False, False, False]
        stats = store.index.stats()
        assert (stats["leases"], stats["pinned_bytes"]) == (1, CHUNK)


def test_leases_of_two_groups_pin_once_and_end_separately() -> None:
    with native_store() as store:
        ref = store.put(1)
        assert store.index.lease(1, [ref, ref], 100) == [True, True]
        assert store.index.lease(2, [ref], 100) == [True]
        stats = store.index.stats()
        assert (stats["leases"], stats["pinned_bytes"]) == (2, CHUNK)
        assert store.index.release(1, [ref, ref]) == [True, False]
        assert store.index.stats()["pinned_bytes"] == CHUNK
        store.index.end_leases(2)
        assert store.index.stats()["pinned_bytes"] == 0
        assert store.index.release(2, [ref]) == [False]


def test_a_lease_ends_at_its_deadline_unless_it_was_renewed() -> None:
    with native_store() as store:
        first, second = store.put(1), store.put(2)
        store.index.lease(1, [first, second], 100)
        assert store.index.expire_leases(99) == 0
        store.index.lease(1, [second], 200)
        assert store.index.expire_leases(100) == 1
        assert store.index.release(1, [first, second]) == [False, True]
        assert store.index.expire_leases(1000) == 0


def test_very_many_leases_end_a_part_at_a_time_those_that_ended_first_before_others() -> None:
    with native_store() as store:
        refs = [store.put(number) for number in range(6)]
        for i, ref in enumerate(refs):
            store.index.lease(1 + i % 2, [ref], 100 - i)
        store.index.lease(1, [refs[4]], 300)  # renewed
        assert store.index.expire_leases(99, limit=2) == 2
        assert store.index.release(1, refs) == [True, False, True, False, True, False]
        assert store.index.release(2, refs) == [False, True, False, False, False, False]
        store.index.lease(1, refs[:5], 100)
        assert not store.index.end_leases(1, limit=3)
        assert store.index.stats()["leases"] == 2
        assert store.index.end_leases(1, limit=3)
        assert store.index.end_leases(1, limit=3)
        assert store.index.stats()["pinned_bytes"] == 0


def test_at_most_half_of_the_arena_is_leased() -> None:
    with native_store(4 * CHUNK) as store:
        refs = [store.put(number) for number in range(4)]
        assert store.index.lease(1, refs, 100) == [True, True, False, False]
        assert store.index.lease(2, refs, 100) == [True, True, False, False]
        store.index.end_leases(1)
        assert store.index.lease(1, refs[2:], 100) == [False, False]
        store.index.end_leases(2)
        assert store.index.lease(1, refs[2:], 100) == [True, True]


def test_a_group_that_ended_holds_nothing_and_its_chunks_stay() -> None:
    with native_store(4 * CHUNK) as store:
        ref = store.put(1)
        granted = store.index.grant(1, CHUNK, 2)
        store.index.lease(1, [ref], 100)
        for _ in range(2):
            store.index.end_leases(1)
            store.index.abort(1, granted)
        stats = store.index.stats()
        assert (stats["grants"], stats["leases"], stats["granted_bytes"], stats["pinned_bytes"]) == (0, 0, 0, 0)
        assert store.index.commit(1, NAMESPACE, [(*granted[0], TENANT, key_of(2), b"")]) == [_native.NOT_GRANTED]
        assert len(store.index.grant(2, CHUNK, 3)) == 3
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(1)]) == bytes([_native.CPU])


def test_verify_fills_grants_with_poison_and_counts_commits_that_left_some() -> None:
    chunk = 8 * KIB
    with native_store(verify=True) as store:
        written, forgotten = store.index.grant(1, chunk, 2)
        offset = store.offset(written[0], chunk)
        with store.arena.view() as view:
            assert bytes(view[offset : offset + chunk]) == bytes([_native.POISON]) * chunk
            for slot, nbytes in ((written[0], chunk), (forgotten[0], chunk - 64)):
                begin = store.offset(slot, chunk)
                view[begin : begin + nbytes] = bytes(nbytes)
        store.index.commit(1, NAMESPACE, [(*written, TENANT, key_of(1), b"")])
        assert store.index.stats()["poison_commits"] == 0
        store.index.commit(1, NAMESPACE, [(*forgotten, TENANT, key_of(2), b"")])
        assert store.index.stats()["poison_commits"] == 1


def test_without_verify_grants_are_not_touched() -> None:
    with native_store() as store:
        [(slot, _)] = store.index.grant(1, CHUNK, 1)
        assert os.pread(store.arena_fd, CHUNK, store.offset(slot, CHUNK)) == bytes(CHUNK)


def test_a_touch_of_unknown_keys_is_ignored() -> None:
    with native_store() as store:
        store.put(1)
        store.index.touch(NAMESPACE, TENANT, [key_of(1), key_of(99)])
        store.index.touch(OTHER_NAMESPACE, TENANT, [key_of(1)])


def test_tenants_are_counted_while_they_have_chunks() -> None:
    with native_store() as store:
        store.put(1)
        refs = store.index.grant(1, CHUNK, 2)
        commits = [(*refs[0], OTHER_TENANT, key_of(1), b""), (*refs[1], OTHER_TENANT, key_of(2), key_of(1))]
        assert store.index.commit(1, NAMESPACE, commits) == [_native.STORED, _native.STORED]
        assert store.index.stats()["tenants"] == 2


def test_a_second_index_on_the_same_table_is_refused() -> None:
    with native_store() as store:
        store.put(1)
        with pytest.raises(ValueError, match="holds a table already"):
            _native.Index(
                table_fd=store.table_fd,
                table_bytes=os.fstat(store.table_fd).st_size,
                arena=store.arena,
                unit_bytes=store.unit_bytes,
                index_key=INDEX_KEY,
                instance_id=INSTANCE,
            )
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(1)]) == bytes([_native.CPU])


def test_a_table_too_small_for_the_arena_is_refused() -> None:
    table_fd = _native.create_memfd("table", 8192)
    arena_fd = _native.create_memfd("arena", 1 << 20)
    arena = _native.Arena(arena_fd, 1 << 20)
    with pytest.raises(ValueError, match="a table of 8192 bytes for an arena of 1048576"):
        _native.Index(
            table_fd=table_fd,
            table_bytes=8192,
            arena=arena,
            unit_bytes=16384,
            index_key=INDEX_KEY,
            instance_id=INSTANCE,
        )
    arena.close()
    os.close(table_fd)
    os.close(arena_fd)


def _resident(store: NativeStore, count: int) -> list[int]:
    codes = store.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in range(count)])
    return [number for number, code in enumerate(codes) if code == _native.CPU]


def test_the_least_recently_used_chunk_makes_room() -> None:
    with native_store(4 * CHUNK) as store:
        for number in range(4):
            store.put(number)
        store.index.touch(NAMESPACE, TENANT, [key_of(0)])
        store.put(4)
        assert _resident(store, 5) == [0, 2, 3, 4]
        stats = store.index.stats()
        assert (stats["evictions"], stats["used_bytes"]) == (1, 4 * CHUNK)


def test_a_chunk_with_resident_children_stays_until_they_have_gone() -> None:
    with native_store(4 * CHUNK) as store:
        for number in range(4):
            store.put(number, parent=key_of(number - 1) if number else b"")
        for number in (10, 11):
            store.put(number)
        assert _resident(store, 4) == [0, 1]  # the tail went first, although the head is the oldest


def test_touching_a_chain_makes_its_head_the_youngest() -> None:
    with native_store(4 * CHUNK) as store:
        for number in range(4):
            store.put(number)  # no parents: only the touch says what is young
        store.index.touch(NAMESPACE, TENANT, [key_of(number) for number in range(4)])
        for number in (10, 11, 12):
            store.put(number)
        assert _resident(store, 4) == [0]


def test_a_leased_chunk_is_not_evicted_and_goes_when_the_lease_has_ended() -> None:
    with native_store(2 * CHUNK) as store:
        leased = store.put(0)
        store.put(1)
        assert store.index.lease(1, [leased], 100) == [True]
        store.put(2)
        assert _resident(store, 3) == [0, 2]
        assert store.index.expire_leases(100) == 1
        store.put(3)
        assert _resident(store, 4) == [2, 3]


def test_nothing_is_granted_when_everything_is_leased_or_granted() -> None:
    with native_store(2 * CHUNK) as store:
        assert store.index.lease(1, [store.put(0)], 100) == [True]
        assert len(store.index.grant(1, CHUNK, 5)) == 1
        assert store.index.grant(2, CHUNK, 1) == []
        assert store.index.stats()["evictions"] == 0


def test_of_evicted_and_resident_slots_only_the_one_granted_again_changes_its_generation() -> None:
    with native_store(4 * CHUNK) as store:
        refs = [store.put(number) for number in range(4)]
        table = store.table()
        slots = np.array([slot for slot, _ in refs], np.uint32)
        generations = np.array([generation for _, generation in refs], np.uint64)
        [(slot, generation)] = store.index.grant(1, CHUNK, 1)
        assert (slot, generation) == (refs[0][0], refs[0][1] + 1)
        assert table.current(slots, generations) == b"\x00\x01\x01\x01"


def test_another_class_gets_the_slab_whose_newest_chunk_is_oldest_and_all_its_old_slots_change() -> None:
    small = 8 * KIB
    with native_store(64 * 16 * KIB) as store:  # 64 units of 16 KiB, two small slots each
        refs = [store.put(number, small) for number in range(128)]
        store.index.touch(NAMESPACE, TENANT, [key_of(0), key_of(5)])  # the slabs of 0 and 1, of 4 and 5
        assert len(store.index.grant(2, 16 * KIB, 1)) == 1
        gone = sorted(set(range(128)) - set(_resident(store, 128)))
        assert gone == [2, 3]
        table = store.table()
        slots = np.array([slot for slot, _ in refs], np.uint32)
        generations = np.array([generation for _, generation in refs], np.uint64)
        current = table.current(slots, generations)
        assert [number for number in range(128) if not current[number]] == gone
        assert store.index.stats()["evictions"] == 2


def test_a_class_prefers_its_own_chunk_when_that_is_older_than_any_other_slab() -> None:
    with native_store(64 * 16 * KIB) as store:
        store.put(0, 16 * KIB)
        for number in range(1, 127):
            store.put(number, 8 * KIB)
        store.put(200, 16 * KIB)
        assert _resident(store, 127) == list(range(1, 127))


def test_a_slab_with_a_lease_or_a_grant_does_not_change_class() -> None:
    with native_store(32 * 4 * KIB) as store:  # 32 units, of which the large class needs 16 in a row
        refs = [store.put(number, 4 * KIB) for number in range(16)]
        [granted] = store.index.grant(1, 4 * KIB, 1)
        refs += [store.put(number, 4 * KIB) for number in range(17, 32)]
        assert store.index.lease(1, [refs[15]], 100) == [True]
        assert store.index.grant(2, 64 * KIB, 1) == []  # each row of 16 has the one or the other in it
        store.index.abort(1, [granted])
        assert len(store.index.grant(2, 64 * KIB, 1)) == 1
        assert _resident(store, 32) == list(range(16))


def test_a_chunk_whose_parent_was_taken_goes_first_unless_the_parent_comes_back() -> None:
    big, small = 16 * KIB, 8 * KIB

    def filled(store: NativeStore) -> None:
        store.put(0, big)  # a slab of its own: the oldest
        store.put(1, small, parent=key_of(0))
        for number in range(2, 127):
            store.put(number, small)
        assert len(store.index.grant(9, 4 * KIB, 1)) == 1  # a third class takes the oldest slab, and with it key 0
        assert 0 not in _resident(store, 127)
        store.index.touch(NAMESPACE, TENANT, [key_of(1)])  # young, but out of reach of a prefix

    with native_store(64 * 16 * KIB) as store:
        filled(store)
        store.put(300, small)
        assert 1 not in _resident(store, 127)
    with native_store(64 * 16 * KIB) as store:
        filled(store)
        store.put(0, 4 * KIB)
        store.index.touch(NAMESPACE, TENANT, [key_of(0), key_of(1)])
        store.put(300, small)
        assert {0, 1} <= set(_resident(store, 127))


def test_chunks_that_name_each_other_as_parents_can_still_be_evicted() -> None:
    with native_store(2 * CHUNK) as store:
        store.put(0, parent=key_of(1))
        store.put(1, parent=key_of(0))
        store.index.touch(NAMESPACE, TENANT, [key_of(1), key_of(0)])
        store.index.touch(NAMESPACE, TENANT, [key_of(0), key_of(0)])
        store.put(2)
        store.put(3)
        assert _resident(store, 4) == [2, 3]


def test_tenants_without_chunks_are_forgotten() -> None:
    with native_store(CHUNK) as store:
        store.put(0)
        [ref] = store.index.grant(1, CHUNK, 1)
        assert store.index.stats()["tenants"] == 0
        assert store.index.commit(1, NAMESPACE, [(*ref, OTHER_TENANT, key_of(1), b"")]) == [_native.STORED]
        assert store.index.stats()["tenants"] == 1


def codes(store: NativeStore, *numbers: int) -> list[int]:
    """What readers see, which must be what the index says."""
    keys = [key_of(number) for number in numbers]
    found, _, _ = store.table().lookup(NAMESPACE, TENANT, keys)
    assert found == store.index.lookup(NAMESPACE, TENANT, keys)
    return list(found)


def test_a_slot_that_the_daemon_reads_is_neither_evicted_nor_moved_until_it_has_been_read() -> None:
    with native_store(arena_bytes=16 * CHUNK) as store:
        refs = [store.put(number) for number in range(16)]
        assert [store.index.begin_io(*ref) for ref in refs] == [True] * 16  # more than the half that may be leased
        assert store.index.begin_io(*refs[3])
        assert not store.index.begin_io(refs[0][0], refs[0][1] + 1)
        assert store.index.grant(2, CHUNK, 1) == []
        assert store.index.grant(2, 2 * CHUNK, 1) == []  # another class, which would take a whole slab
        assert store.index.lease(1, refs[:2], 100) == [True, True]
        store.index.end_io(*refs[3])
        assert store.index.grant(2, CHUNK, 1) == []  # it is read twice
        store.index.end_io(*refs[3])
        store.index.end_io(*refs[0])  # still leased
        assert store.index.problems() == []
        [(slot, _)] = store.index.grant(2, CHUNK, 2)
        assert slot == refs[3][0]
        assert store.index.stats()["io_bytes"] == 14 * CHUNK
        store.index.end_leases(1)
        [(slot, _)] = store.index.grant(2, CHUNK, 2)
        assert slot == refs[0][0]


def test_what_a_lower_tier_holds_is_shown_where_the_cpu_tier_has_nothing() -> None:
    with native_store(arena_bytes=2 * CHUNK) as store:
        show = store.index.set_lower
        assert codes(store, 1) == [MISS]
        show(NAMESPACE, TENANT, key_of(1), FS)
        show(NAMESPACE, TENANT, key_of(1), FS)
        assert codes(store, 1, 2) == [FS, MISS]
        show(NAMESPACE, TENANT, key_of(1), PENDING)
        assert codes(store, 1) == [PENDING]
        store.put(1)
        show(NAMESPACE, TENANT, key_of(1), PENDING)
        assert codes(store, 1) == [CPU]
        store.put(2)
        store.put(3)  # evicts 1, which the lower tier has, too
        store.put(4)  # evicts 2, which it has not
        assert codes(store, 1, 2, 3, 4) == [FS, MISS, CPU, CPU]
        show(NAMESPACE, TENANT, key_of(3), FS)
        show(NAMESPACE, TENANT, key_of(4), FS)
        show(NAMESPACE, TENANT, key_of(4), MISS)  # evicted below first
        store.put(5)
        store.put(6)
        assert codes(store, 3, 4) == [FS, MISS]
        show(NAMESPACE, TENANT, key_of(1), MISS)
        show(NAMESPACE, TENANT, key_of(9), MISS)
        assert codes(store, 1, 3) == [MISS, FS]
        with pytest.raises(ValueError, match="MISS, FS or PENDING"):
            show(NAMESPACE, TENANT, key_of(1), CPU)


def test_what_lower_tiers_hold_leaves_room_in_the_table_and_gives_way_to_chunks() -> None:
    with native_store(arena_bytes=64 * CHUNK, entries=64) as store:
        for number in range(1000, 3000):
            store.index.set_lower(NAMESPACE, TENANT, key_of(number), FS)
        stats = store.index.stats()
        assert stats["entries"] <= stats["entries_max"] * 3 // 4
        for number in range(64):
            store.put(number)
        assert store.index.stats()["chunks"] == 64


# -- removal -----------------------------------------------------------------------------------------------------------


def remove(store: NativeStore, **what: object) -> _native.Removal:
    removal = store.index.begin_removal(**what)  # type: ignore[arg-type]
    while not store.index.remove(removal, 1000):
        pass
    return removal


def test_a_removed_chunk_is_found_no_more_and_a_load_of_it_under_way_still_succeeds() -> None:
    with native_store() as store:
        slot, generation = store.put(1)
        assert remove(store, tenant=TENANT).nbytes == CHUNK
        table = store.table()
        assert table.lookup(NAMESPACE, TENANT, [key_of(1)])[0] == bytes([_native.MISS])
        slots, generations = np.array([slot], np.uint32), np.array([generation], np.uint64)
        assert table.current(slots, generations) == b"\x01"
        stats = store.index.stats()
        assert (stats["removals"], stats["evictions"], stats["used_bytes"], stats["scopes"]) == (1, 0, 0, 0)


def test_one_call_does_no_more_than_its_steps_however_many_children_a_chunk_has() -> None:
    with native_store(64 * CHUNK) as store:
        store.put(0)
        for number in range(1, 51):
            store.put(number, parent=key_of(0))
        removal = store.index.begin_removal()
        calls = 0
        while not store.index.remove(removal, 10):
            calls += 1
            assert store.index.problems() == []
        assert calls >= 10  # 51 chunks, and 50 times a child that loses its parent
        assert removal.chunks == 51


def test_between_two_calls_chunks_are_leased_used_and_stored() -> None:
    with native_store(64 * CHUNK) as store:
        refs = [store.put(number) for number in range(6)]
        removal = store.index.begin_removal(used_before_ms=100)
        assert not store.index.remove(removal, 2)
        store.index.lease(1, [refs[3]], 1000)
        store.index.touch(NAMESPACE, TENANT, [key_of(4)], 100)
        store.put(7)
        while not store.index.remove(removal, 2):
            assert store.index.problems() == []
        assert (removal.chunks, removal.skipped_pinned) == (4, 1)
        found = store.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in (3, 4, 5)])
        assert found == bytes([_native.CPU, _native.CPU, _native.MISS])
        store.index.end_leases(1)


def test_chosen_chunks_that_are_leased_or_evicted_before_their_turn_are_left_alone() -> None:
    with native_store(10 * CHUNK) as store:
        refs = [store.put(number) for number in range(10)]
        removal = store.index.begin_removal(nbytes=4 * CHUNK)
        assert not store.index.remove(removal, 11)  # all looked at, one gone: the newest of the four
        assert removal.chunks == 1
        store.index.lease(1, [refs[1]], 1000)
        store.index.grant(2, CHUNK, 2)  # the slot that is free, and chunk 0's
        assert store.index.remove(removal, 1000)
        assert (removal.chunks, removal.skipped_pinned) == (2, 1)
        codes = store.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in range(10)])
        assert codes == bytes([_native.MISS, _native.CPU, *[_native.MISS] * 2, *[_native.CPU] * 6])
        store.index.end_leases(1)


def test_a_write_begun_before_a_removal_of_its_kind_ends_as_an_abort() -> None:
    with native_store(64 * CHUNK) as store:
        before = store.index.grant(1, CHUNK, 5)
        remove(store, tenant=OTHER_TENANT)
        remove(store, namespace=OTHER_NAMESPACE, tenant=TENANT)
        after = store.index.grant(1, CHUNK, 2)
        cases = [
            (before[0], NAMESPACE, TENANT, _native.STORED),
            (before[1], NAMESPACE, OTHER_TENANT, _native.NOT_GRANTED),
            (before[2], OTHER_NAMESPACE, TENANT, _native.NOT_GRANTED),
            (before[3], OTHER_NAMESPACE, OTHER_TENANT, _native.NOT_GRANTED),
            (after[0], NAMESPACE, OTHER_TENANT, _native.STORED),
            (after[1], OTHER_NAMESPACE, TENANT, _native.STORED),
        ]
        for ref, namespace, tenant, code in cases:
            assert store.index.commit(1, namespace, [(*ref, tenant, key_of(1), b"")]) == [code]
        assert store.index.stats()["grants"] == 1
        remove(store)
        assert store.index.commit(1, NAMESPACE, [(*before[4], TENANT, key_of(1), b"")]) == [_native.NOT_GRANTED]
        assert store.index.stats()["grants"] == 0


def test_removals_are_remembered_or_taken_for_ones_of_everything() -> None:
    with native_store(64 * CHUNK) as store:
        [before] = store.index.grant(1, CHUNK, 1)
        for number in range(100):
            remove(store, tenant=number.to_bytes(16, "big"))
        [after] = store.index.grant(1, CHUNK, 1)
        commits = [(*ref, bytes(16), key_of(1), b"") for ref in (before, after)]
        assert store.index.commit(1, NAMESPACE, commits) == [_native.NOT_GRANTED, _native.STORED]


def test_a_removal_of_no_bytes_is_refused() -> None:
    with native_store() as store, pytest.raises(ValueError, match="a removal of 0 bytes"):
        store.index.begin_removal(nbytes=0)


# What a lower tier has yet to be given


def keys_of(rows: list[tuple[bytes, bytes, bytes, int, int]]) -> list[int]:
    return [int.from_bytes(key, "big") for _, _, key, _, _ in rows]


def put_chain(store: NativeStore, numbers: range) -> None:
    for number in numbers:
        parent = key_of(number - 1) if number > numbers.start else b""
        store.put(number, parent=parent)
    store.index.touch(NAMESPACE, TENANT, [key_of(number) for number in numbers])


def test_next_to_go_are_those_that_eviction_takes_in_its_order() -> None:
    with native_store() as store:
        put_chain(store, range(10, 14))
        put_chain(store, range(20, 24))
        put_chain(store, range(30, 38))
        next_to_go = store.index.next_to_go(12 * CHUNK, steps=100, limit=100)
        assert keys_of(next_to_go) == [13, 12, 11, 10, 23, 22, 21, 20, 37, 36, 35, 34]
        assert keys_of(store.index.next_to_go(2 * CHUNK, steps=100, limit=100)) == [13, 12]
        assert keys_of(store.index.next_to_go(12 * CHUNK, steps=100, limit=1)) == [13]
        assert keys_of(store.index.next_to_go(12 * CHUNK, steps=5, limit=100)) == [13, 12, 11, 10, 23]
        for expected in next_to_go:
            assert store.index.begin_io(*expected[3:])
            store.index.end_io(*expected[3:])
            store.index.grant(2, CHUNK, 1)
            assert not store.index.begin_io(*expected[3:]), f"{expected[2]!r} was not the next one"


def test_what_a_lower_tier_has_or_is_being_given_is_not_unwritten() -> None:
    with native_store() as store:
        refs = {number: store.put(number) for number in range(16)}
        store.index.set_lower(NAMESPACE, TENANT, key_of(3), FS)
        assert store.index.begin_io(*refs[5])
        rest = [number for number in range(16) if number not in (3, 5)]
        assert keys_of(store.index.next_to_go(16 * CHUNK, steps=100, limit=100)) == rest
        assert keys_of(store.index.unwritten(0, steps=100, limit=100)[0]) == rest
        assert store.index.next_to_go(1, steps=1, limit=1) == [(NAMESPACE, TENANT, key_of(0), *refs[0])]
        store.index.end_io(*refs[5])
        store.index.set_lower(NAMESPACE, TENANT, key_of(3), MISS)
        assert keys_of(store.index.unwritten(0, steps=100, limit=100)[0]) == list(range(16))
        store.index.set_lower(NAMESPACE, TENANT, key_of(0), FS)
        store.index.grant(2, CHUNK, 3)
        stats = store.index.stats()
        assert (stats["evictions"], stats["unwritten_evictions"]) == (3, 2)


def test_unwritten_chunks_are_looked_for_in_steps_and_by_age() -> None:
    with native_store() as store:
        for number in range(6):
            [at] = store.index.grant(1, CHUNK, 1)
            store.index.commit(1, NAMESPACE, [(*at, TENANT, key_of(number), b"")], 1_000 * number)
        rows, at = store.index.unwritten(0, used_before_ms=3_500, steps=3, limit=100)
        assert (keys_of(rows), at) == ([0, 1, 2], 3)
        rows, at = store.index.unwritten(3, used_before_ms=3_500, steps=3, limit=100)
        assert (keys_of(rows), at) == ([3], None)
        assert store.index.unwritten(0, steps=100, limit=2)[1] == 2


def test_a_touch_is_a_use_unless_the_same_request_touches_again() -> None:
    with native_store() as store:
        [at] = store.index.grant(1, CHUNK, 1)
        store.index.commit(1, NAMESPACE, [(*at, TENANT, key_of(1), b"")], 10_000)

        def uses() -> int:
            return max(
                n for n in range(10) if n == 0 or store.index.used_often(NAMESPACE, TENANT, [key_of(0), key_of(1)], n)
            )

        assert uses() == 1
        for again, expected in ((2, 1), (0, 2), (2, 2), (1, 3), (0, 4)):
            store.index.touch(NAMESPACE, TENANT, [key_of(0), key_of(1)], 10_000, again=again)
            assert uses() == expected, again
        assert store.index.used_often(NAMESPACE, OTHER_TENANT, [key_of(1)], 1) == []
        store.index.set_lower(NAMESPACE, TENANT, key_of(1), FS)
        assert uses() == 0


# Quotas


def commit_of(store: NativeStore, tenant: bytes, number: int, parent: bytes = b"", group: int = 1) -> int:
    [at] = store.index.grant(group, CHUNK, 1)
    [code] = store.index.commit(group, NAMESPACE, [(*at, tenant, key_of(number), parent)])
    return code


def test_over_its_quota_a_tenants_own_oldest_chunks_go_and_nobody_elses() -> None:
    with native_store() as store:
        for number in range(4):
            assert commit_of(store, OTHER_TENANT, number) == _native.STORED
        store.index.set_quota(TENANT, 3 * CHUNK)
        for number in range(10):
            assert commit_of(store, TENANT, number) == _native.STORED
            assert store.index.problems() == []
        keys = [key_of(number) for number in range(10)]
        assert store.index.lookup(NAMESPACE, TENANT, keys) == bytes([MISS] * 7 + [CPU] * 3)
        assert store.index.lookup(NAMESPACE, OTHER_TENANT, keys[:4]) == bytes([CPU] * 4)


def test_a_quota_counts_what_was_there_before_and_ends_when_it_is_unset() -> None:
    with native_store() as store:
        put_chain(store, range(6))
        store.index.set_quota(TENANT, 6 * CHUNK)
        assert [store.index.order_for_quotas(steps=3) for _ in range(3)] == [False, True, True]
        assert store.index.problems() == []
        assert commit_of(store, TENANT, 10) == _native.STORED
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(4), key_of(5)]) == bytes([CPU, MISS])
        store.index.set_quota(TENANT, None)
        assert commit_of(store, TENANT, 11) == _native.STORED
        assert store.index.stats()["chunks"] == 7


def test_quotas_are_checked_where_some_tenants_have_none_and_one_has_two_namespaces() -> None:
    with native_store() as store:
        third = b"3" * 16
        for number, (namespace, tenant) in enumerate(
            [(NAMESPACE, TENANT), (b"n" * 16, TENANT), (NAMESPACE, OTHER_TENANT), (NAMESPACE, third)] * 2
        ):
            [(slot, generation)] = store.index.grant(1, CHUNK, 1)
            commit = (slot, generation, tenant, key_of(number), b"")
            assert store.index.commit(1, namespace, [commit]) == [_native.STORED]
        assert store.index.set_quota(TENANT, 9 * CHUNK) == 4 * CHUNK
        assert store.index.set_quota(third, 9 * CHUNK) == 2 * CHUNK
        store.index.set_quota(b"nobody's chunks.", CHUNK)
        done = False
        while not done:
            assert store.index.problems() == []
            done = store.index.order_for_quotas(steps=3)
        assert store.index.problems() == []


def test_a_parents_children_are_counted_by_the_sums() -> None:
    with native_store() as store:
        store.put(0)
        for number in range(1, 9):
            store.put(number, parent=key_of(0))
        oldest = (4, 8, 1)  # one in the middle of its siblings, and either end
        for number in (*oldest, 2, 3, 5, 6, 7, 0):
            store.index.touch(NAMESPACE, TENANT, [key_of(number)])
        for number in oldest:
            removal = store.index.begin_removal(nbytes=CHUNK)
            assert store.index.remove(removal, 1_000)
            assert store.index.lookup(NAMESPACE, TENANT, [key_of(number)]) == bytes([MISS])
            assert store.index.problems() == []
        for start in range(9):
            assert store.index.problems_of_chunks(start, steps=1)[0] == []


def test_what_comes_and_goes_while_a_first_quota_is_prepared_is_in_its_order_too() -> None:
    with native_store() as store:
        put_chain(store, range(6))
        store.index.set_quota(TENANT, 6 * CHUNK)
        assert not store.index.order_for_quotas(steps=3)
        removal = store.index.begin_removal(namespace=NAMESPACE, tenant=TENANT, nbytes=1)
        assert store.index.remove(removal, 1_000)  # the tail, which was not looked at
        assert commit_of(store, TENANT, 10) == _native.STORED
        store.index.touch(NAMESPACE, TENANT, [key_of(number) for number in range(5)])
        assert store.index.problems() == []
        assert store.index.order_for_quotas(steps=100)
        assert store.index.problems() == []
        assert commit_of(store, TENANT, 11) == _native.STORED
        assert store.index.lookup(NAMESPACE, TENANT, [key_of(4), key_of(10), key_of(11)]) == bytes([CPU, MISS, CPU])


def test_a_removal_by_single_steps_gets_on_where_chunks_have_children() -> None:
    with native_store() as store:
        put_chain(store, range(6))
        removal = store.index.begin_removal(namespace=NAMESPACE, tenant=TENANT)
        for _ in range(100):
            if store.index.remove(removal, 1):
                break
            assert store.index.problems() == []
        assert removal.chunks == 6


def test_the_index_is_checked_a_slice_at_a_time() -> None:
    with native_store() as store:
        put_chain(store, range(6))
        assert store.index.problems_of_chunks(0, steps=4) == ([], 4)
        assert store.index.problems_of_chunks(4, steps=4) == ([], None)
        assert store.index.problems_of_sums() == []


def test_a_commit_is_refused_where_its_tenant_has_nothing_that_may_go() -> None:
    with native_store() as store:
        store.index.set_quota(TENANT, 2 * CHUNK)
        refs = [store.put(1), store.put(2, parent=key_of(1))]
        # Its own chain leads to it: evicting the parent would make it useless.
        assert commit_of(store, TENANT, 3, parent=key_of(2)) == _native.QUOTA
        assert store.index.lease(7, refs, 1_000) == [True, True]
        assert commit_of(store, TENANT, 4) == _native.QUOTA
        assert store.index.stats()["granted_bytes"] == 0
        assert store.index.release(7, refs) == [True, True]
        assert commit_of(store, TENANT, 4) == _native.STORED
        store.index.set_quota(TENANT, 0)
        assert commit_of(store, TENANT, 5) == _native.QUOTA
        assert store.index.stats()["chunks"] == 2  # what is there is the caller's to remove


@pytest.mark.parametrize("part", [{"nbytes": 4 * CHUNK}, {"used_before_ms": 1 << 40}])
def test_what_is_being_written_to_disk_stays_at_a_removal_that_its_write_would_outlast(part: dict[str, int]) -> None:
    with native_store(arena_bytes=4 * CHUNK) as store:
        refs = [store.put(number) for number in range(4)]
        assert store.index.begin_io(*refs[1])
        store.index.lease(1, [refs[2]], 1000)
        removal = store.index.begin_removal(**part)
        while not store.index.remove(removal, 1):
            pass
        assert (removal.chunks, removal.skipped_pinned) == (2, 2)
        assert codes(store, 0, 1, 2, 3) == [MISS, CPU, CPU, MISS]
        store.index.end_io(*refs[1])
        store.index.end_leases(1)


def test_what_the_daemon_reads_is_removed_at_once_and_its_slot_is_free_when_it_has_been_read() -> None:
    with native_store(arena_bytes=4 * CHUNK) as store:
        refs = [store.put(number, parent=key_of(number - 1) if number else b"") for number in range(4)]
        for ref in (refs[0], refs[1], refs[1], refs[2]):
            assert store.index.begin_io(*ref)
        store.index.lease(1, [refs[2]], 1000)
        removal = store.index.begin_removal()
        while not store.index.remove(removal, 1):
            assert store.index.problems() == []
        assert (removal.chunks, removal.nbytes, removal.skipped_pinned) == (3, 3 * CHUNK, 1)
        assert codes(store, 0, 1, 2, 3) == [MISS, MISS, CPU, MISS]
        assert store.index.problems() == []
        assert store.index.lease(1, refs[:2], 1000) == [False, False]
        assert not store.index.begin_io(*refs[0])
        assert [slot for slot, _ in store.index.grant(2, CHUNK, 4)] == [refs[3][0]]
        assert store.index.grant(2, 2 * CHUNK, 1) == []  # another class, which would take a whole slab
        store.index.end_io(*refs[1])
        assert store.index.grant(2, CHUNK, 1) == []  # it is read twice
        store.index.end_io(*refs[1])
        assert [slot for slot, _ in store.index.grant(2, CHUNK, 4)] == [refs[1][0]]
        store.index.end_io(*refs[0])
        store.index.end_io(*refs[2])
        assert store.index.stats()["io_bytes"] == 0
        assert store.index.problems() == []
        store.index.end_leases(1)


def evictions_of(store: NativeStore, number: int) -> list[tuple[int, int, int, int, bytes, tuple[bytes, bytes] | None]]:
    return store.index.evictions_of(key_of(number), namespace=NAMESPACE, tenant=TENANT, limit=10)


def test_each_eviction_says_for_whom_it_made_room_and_what_has_the_slot() -> None:
    with native_store() as store:
        index = store.index
        for number in range(16):
            store.put(number)
        assert evictions_of(store, 0) == []
        index.make_room_for(7, 5_000)
        [at] = index.grant(2, CHUNK, 1)
        assert evictions_of(store, 0) == [(1, 5_000, 0, 7, NAMESPACE, None)]
        assert index.commit(2, NAMESPACE, [(*at, TENANT, key_of(100), b"")]) == [STORED]
        newcomer = (NAMESPACE, key_of(100))
        assert evictions_of(store, 0) == [(1, 5_000, 0, 7, NAMESPACE, newcomer)]
        index.evicted_below(NAMESPACE, TENANT, key_of(0), 6_000)
        assert evictions_of(store, 0) == [(2, 6_000, 4, 0, NAMESPACE, None), (1, 5_000, 0, 7, NAMESPACE, newcomer)]
        assert index.evictions_told == 2
        assert index.stats()["evictions"] == 1
        index.make_room_for(8, 7_000)
        for number in range(200, 216):  # the newcomer goes as well
            store.put(number)
        assert evictions_of(store, 0)[1] == (1, 5_000, 0, 7, NAMESPACE, None)
        alike = index.evictions_of(key_of(1)[:8], limit=100)  # all of these keys begin with zeros
        assert [number for number, *_ in alike] == list(range(18, 0, -1))
        assert index.evictions_of(key_of(1)[:8], limit=3) == alike[:3]
        assert [number for number, *_ in index.evictions_of(key_of(0), limit=10)] == [2, 1]
        assert index.evictions_of(key_of(99), limit=10) == []
        with pytest.raises(ValueError, match="8 bytes"):
            index.evictions_of(b"short", limit=1)


def test_an_eviction_says_what_was_needed_slots_of_another_size_an_entry_or_a_quota() -> None:
    with native_store() as store:
        for number in range(16):
            store.put(number)
        store.index.grant(2, 4 * CHUNK, 1)
        assert {cause for number in range(16) for _, _, cause, *_ in evictions_of(store, number)} == {1}
    with native_store(100 * CHUNK, entries=8) as store:
        for number in range(store.index.stats()["chunks_max"] + 1):
            store.put(number)
        assert [cause for _, _, cause, *_ in evictions_of(store, 0)] == [2]
    with native_store() as store:
        store.index.set_quota(TENANT, 2 * CHUNK)
        for number in range(3):
            store.put(number)
        assert [cause for _, _, cause, *_ in evictions_of(store, 0)] == [3]


def test_the_oldest_evictions_are_forgotten() -> None:
    with native_store() as store:
        for number in range(_native.EVICTIONS_KEPT + 2):
            store.index.evicted_below(NAMESPACE, TENANT, key_of(number), number)
        assert [evictions_of(store, number) != [] for number in (0, 1, 2, 3)] == [False, False, True, True]
        assert evictions_of(store, 2)[0][0] == 3


def test_usage_says_how_many_chunks_a_lower_tier_has_too() -> None:
    with native_store() as store:
        refs = {number: store.put(number) for number in range(16)}
        for number in (1, 2, 3, 50):
            store.index.set_lower(NAMESPACE, TENANT, key_of(number), FS)
        store.index.set_lower(NAMESPACE, TENANT, key_of(2), FS)
        store.index.set_lower(NAMESPACE, TENANT, key_of(3), MISS)
        assert store.index.usage(limit=1) == [(NAMESPACE, TENANT, 16, 16 * CHUNK, 2)]
        granted = store.index.grant(1, CHUNK, 2)
        assert granted == [(slot, generation + 1) for slot, generation in (refs[0], refs[1])]
        assert store.index.usage(limit=1) == [(NAMESPACE, TENANT, 14, 14 * CHUNK, 1)]
        store.index.abort(1, granted)
        store.put(1)  # comes back while the lower tier still has it
        assert store.index.usage(limit=1) == [(NAMESPACE, TENANT, 15, 15 * CHUNK, 2)]


def test_a_touch_looks_at_a_bounded_number_of_ancestors() -> None:
    """Children that came before their parent are its children again when a chain is touched. Where that would take too
    long they stay without one: the parent may then go before them, and nothing else changes."""
    children, depth = 400, 200
    with native_store((children + depth) * 4 * KIB, entries=2_000) as store:
        head = [key_of(number) for number in range(depth)]
        tails = [key_of(1_000 + number) for number in range(children)]
        chunks = [(tail, head[-1]) for tail in tails] + list(zip(head, [b"", *head], strict=False))
        refs = store.index.grant(1, 4 * KIB, len(chunks))
        assert len(refs) == len(chunks)
        commits = [(*ref, TENANT, key, parent) for ref, (key, parent) in zip(refs, chunks, strict=True)]
        assert store.index.commit(1, NAMESPACE, commits) == [_native.STORED] * len(chunks)
        store.index.touch(NAMESPACE, TENANT, [key for tail in tails for key in (head[-1], tail)])
        assert 65_536 // depth < children
        for tail in reversed(tails):  # those that were reached last are the youngest
            store.index.touch(NAMESPACE, TENANT, [tail])
        store.index.grant(1, 4 * KIB, 450)
        found = store.index.lookup(NAMESPACE, TENANT, [head[-1], tails[0]])
        assert list(found) == [MISS, CPU]
