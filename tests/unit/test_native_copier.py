"""The copier: every byte once, nothing outside its regions, and slots that changed are reported."""

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import _native
from tests.hanging_memory import HangingMemory
from tests.unit.native_store import KIB, native_store

WAIT_S = 60.0


def _array(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.fixture(params=[1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[_native.Copier]:
    copier = _native.Copier(request.param)
    yield copier
    copier.close()


class Buffers:
    def __init__(self, copier: _native.Copier, nbytes: int) -> None:
        self.source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        self.target = np.zeros(nbytes, np.uint8)
        for buffer in (self.source, self.target):
            copier.add_region(buffer.ctypes.data, nbytes)

    def fragments(self, ranges: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offset in source, offset in target, size) to the three arrays."""
        table = np.array(ranges, np.uint64).reshape(-1, 3)
        return (
            table[:, 0] + np.uint64(self.source.ctypes.data),
            table[:, 1] + np.uint64(self.target.ctypes.data),
            table[:, 2].copy(),
        )


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 511, 512, 513, 3135, 4097, 70_001, 256 * KIB, 3_000_001])
@pytest.mark.parametrize(("from_offset", "to_offset"), [(0, 0), (1, 0), (0, 1), (7, 33)])
def test_a_fragment_of_any_size_and_alignment_arrives_and_nothing_else_changes(
    copier: _native.Copier, nbytes: int, from_offset: int, to_offset: int
) -> None:
    buffers = Buffers(copier, nbytes + 128)
    copier.submit(1, *buffers.fragments([(from_offset, to_offset, nbytes)]))
    assert copier.wait([1], WAIT_S)
    expected = np.zeros_like(buffers.target)
    expected[to_offset : to_offset + nbytes] = buffers.source[from_offset : from_offset + nbytes]
    assert np.array_equal(buffers.target, expected)
    [finished] = copier.finished()
    assert (finished.job, finished.failed, finished.nbytes) == (1, [], nbytes)
    assert finished.seconds >= 0
    assert copier.finished() == []


def test_many_fragments_of_one_job_are_all_copied(copier: _native.Copier) -> None:
    count, nbytes = 2000, 3000
    buffers = Buffers(copier, count * nbytes)
    order = np.random.default_rng(2).permutation(count)
    ranges = [(int(i) * nbytes, int(j) * nbytes, nbytes) for i, j in enumerate(order)]
    copier.submit(5, *buffers.fragments(ranges))
    assert copier.wait([5], WAIT_S)
    moved = buffers.target.reshape(count, nbytes)[order]
    assert np.array_equal(moved, buffers.source.reshape(count, nbytes))


def test_jobs_from_many_threads_all_end(copier: _native.Copier) -> None:
    per_thread, nbytes = 50, 10_000
    buffers = Buffers(copier, 4 * per_thread * nbytes)

    def submit(thread: int) -> None:
        for i in range(per_thread):
            number = thread * per_thread + i
            copier.submit(number, *buffers.fragments([(number * nbytes, number * nbytes, nbytes)]))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert copier.wait(range(4 * per_thread), WAIT_S)
    assert sorted(finished.job for finished in copier.finished()) == list(range(4 * per_thread))
    assert np.array_equal(buffers.source, buffers.target)


def test_a_job_without_fragments_ends(copier: _native.Copier) -> None:
    copier.submit(1, _array(), _array(), _array())
    assert copier.wait([1], WAIT_S)
    assert [(finished.job, finished.nbytes) for finished in copier.finished()] == [(1, 0)]


@pytest.mark.parametrize(
    ("source_shift", "target_shift", "size", "which"),
    [(-1, 0, 10, "source"), (0, -1, 10, "destination"), (991, 0, 10, "source"), (0, 991, 10, "destination"),
     (0, 0, 1001, "source"), (0, 0, 2**64 - 1, "source"), (5, 5, 2**63, "source")],
)  # fmt: skip
def test_a_fragment_outside_the_regions_is_refused_and_nothing_is_copied(
    copier: _native.Copier, source_shift: int, target_shift: int, size: int, which: str
) -> None:
    buffers = Buffers(copier, 1000)
    source, target = buffers.source.ctypes.data, buffers.target.ctypes.data
    with pytest.raises(ValueError, match=f"job 1, fragment 1: the {which}, {size} bytes"):
        copier.submit(1, _array(source, source + source_shift), _array(target, target + target_shift), _array(10, size))
    assert copier.wait([1], 0)
    assert copier.finished() == []
    assert not buffers.target.any()


def test_a_fragment_may_not_span_two_regions(copier: _native.Copier) -> None:
    buffer = np.zeros(4096, np.uint8)
    copier.add_region(buffer.ctypes.data, 1024)
    copier.add_region(buffer.ctypes.data + 1024, 1024)
    with pytest.raises(ValueError, match="not inside a region"):
        copier.submit(1, _array(buffer.ctypes.data + 1000), _array(buffer.ctypes.data), _array(100))


def test_lists_of_different_lengths_are_refused(copier: _native.Copier) -> None:
    with pytest.raises(ValueError, match="sources and sizes differ in length: 1 and 2"):
        copier.submit(1, _array(1), _array(1), _array(1, 2))
    with pytest.raises(ValueError, match="belong together"):
        copier.submit(1, _array(), _array(), _array(), slots=np.zeros(1, np.uint32))


def test_addresses_of_another_type_are_refused(copier: _native.Copier) -> None:
    signed = np.zeros(1, np.int64)
    with pytest.raises(TypeError):
        copier.submit(1, signed, signed, signed)


def test_a_removed_region_can_not_be_copied_to(copier: _native.Copier) -> None:
    buffers = Buffers(copier, 1000)
    copier.submit(1, *buffers.fragments([(0, 0, 1000)]))
    copier.remove_region(buffers.target.ctypes.data)  # waits for job 1, or fails it whole
    assert copier.wait([1], 0)
    with pytest.raises(ValueError, match="the destination, 1000 bytes"):
        copier.submit(2, *buffers.fragments([(0, 0, 1000)]))
    with pytest.raises(ValueError, match="no region begins at"):
        copier.remove_region(buffers.target.ctypes.data)


def test_fragments_may_have_one_size(copier: _native.Copier) -> None:
    buffers = Buffers(copier, 4 * KIB)
    sources, targets, _ = buffers.fragments([(0, 1000, 0), (2000, 3000, 0)])
    copier.submit(1, sources, targets, 100)
    assert copier.wait([1], WAIT_S)
    expected = np.zeros(4 * KIB, np.uint8)
    expected[1000:1100], expected[3000:3100] = buffers.source[:100], buffers.source[2000:2100]
    assert np.array_equal(buffers.target, expected)
    with pytest.raises(ValueError, match="sources and destinations differ in length"):
        copier.submit(2, sources, targets[:1], 100)


def test_regions_of_one_size_are_added_and_removed_together_or_not_at_all(copier: _native.Copier) -> None:
    views = [memoryview(bytearray(100)) for _ in range(3)]
    addresses = _native.Buffers(views, 100, writable=True).addresses([0, 1, 2])
    assert addresses.tolist() == [np.frombuffer(view, np.uint8).ctypes.data for view in views]
    with pytest.raises(ValueError, match="a region of 100 bytes at 0"):
        copier.add_regions(np.append(addresses, np.uint64(0)), 100)
    with pytest.raises(ValueError, match="not inside a region"):
        copier.submit(1, addresses[:1], addresses[1:2], _array(100))
    copier.add_regions(addresses, 100)
    views[0][:] = bytes(range(100))
    copier.submit(1, addresses[:1], addresses[1:2], _array(100))
    assert copier.wait([1], WAIT_S)
    assert views[1] == views[0]
    copier.remove_regions(addresses)
    with pytest.raises(ValueError, match="not inside a region"):
        copier.submit(2, addresses[:1], addresses[1:2], _array(100))


def test_buffers_stay_in_place_and_are_of_one_size_contiguous_and_writable_where_they_must_be() -> None:
    room, array, constant = bytearray(100), np.zeros(100, np.uint8), bytes(100)
    held = _native.Buffers([room, array, constant], 100, writable=False)
    assert held.addresses([1, 1]).tolist() == [array.ctypes.data] * 2
    with pytest.raises(IndexError):
        held.addresses([3])
    with pytest.raises(BufferError):
        room.append(0)  # would move it
    del held
    room.append(0)
    for objects, writable, error in (
        ([constant, bytes(99)], False, ValueError),
        ([array, constant], True, BufferError),
        ([np.zeros((100, 2), np.uint8)[:, 0]], False, ValueError),
        ([3], False, TypeError),
    ):
        with pytest.raises(error):
            _native.Buffers(objects, 100, writable=writable)  # type: ignore[arg-type]
    array.resize(200, refcheck=False)


def test_a_region_added_twice_stays_until_it_is_removed_twice(copier: _native.Copier) -> None:
    buffers = Buffers(copier, 1000)
    copier.add_region(buffers.target.ctypes.data, 1000)
    copier.remove_region(buffers.target.ctypes.data)
    copier.submit(1, *buffers.fragments([(0, 0, 1000)]))
    assert copier.wait([1], WAIT_S)
    assert np.array_equal(buffers.source, buffers.target)


def test_removing_a_region_fails_queued_jobs_whole_and_waits_for_running_ones() -> None:
    copier = _native.Copier(1)
    nbytes = 64 << 20
    large = Buffers(copier, nbytes)
    small = Buffers(copier, 1000)
    copier.submit(1, *large.fragments([(0, 0, nbytes)]))
    for job in range(2, 200):
        copier.submit(job, *small.fragments([(0, 0, 500), (500, 500, 500)]))
    copier.remove_region(small.target.ctypes.data)
    assert copier.wait(range(2, 200), 0)
    ended = {finished.job: finished for finished in copier.finished()}
    assert copier.wait([1], WAIT_S)
    assert ended.keys() >= set(range(2, 200))
    for job in range(2, 200):
        assert (ended[job].failed, ended[job].nbytes) in [([], 1000), ([0, 1], 0)]
    assert [0, 1] in [finished.failed for finished in ended.values()]
    copier.close()


def test_slots_whose_generation_changed_are_reported_after_the_copy(copier: _native.Copier) -> None:
    with native_store(4 * 64 * KIB) as store:
        table = store.table()
        refs = [store.put(number) for number in range(3)]
        [again] = store.index.grant(1, 64 * KIB, 1)
        slots = np.array([ref[0] for ref in [*refs, again]], np.uint32)
        generations = np.array([ref[1] for ref in [*refs, again]], np.uint64)
        store.index.abort(1, [again])
        store.index.grant(1, 64 * KIB, 1)
        target = np.zeros(4 * 64 * KIB, np.uint8)
        copier.add_region(store.arena.address, store.arena_bytes)
        copier.add_region(target.ctypes.data, target.nbytes)
        copier.submit(
            1,
            _array(store.arena.address),
            _array(target.ctypes.data),
            _array(target.nbytes),
            table=table,
            slots=slots,
            generations=generations,
        )
        table.close()  # the job keeps the map that it needs
        assert copier.wait([1], WAIT_S)
        [finished] = copier.finished()
        assert (finished.failed, finished.nbytes) == ([3], target.nbytes)
        copier.remove_region(store.arena.address)


def test_a_job_number_in_use_is_refused() -> None:
    copier = _native.Copier(1)
    buffers = Buffers(copier, 64 << 20)
    copier.submit(1, *buffers.fragments([(0, 0, 64 << 20)]))
    with pytest.raises(ValueError, match="job 1 is still queued or running"):
        copier.submit(1, *buffers.fragments([(0, 0, 1)]))
    assert copier.wait([1], WAIT_S)
    copier.submit(1, *buffers.fragments([(0, 0, 1)]))
    assert copier.wait([1], WAIT_S)
    copier.close()


def test_waiting_with_no_time_says_whether_jobs_are_done() -> None:
    copier = _native.Copier(1)
    buffers = Buffers(copier, 64 << 20)
    copier.submit(1, *buffers.fragments([(0, 0, 64 << 20)]))
    assert not copier.wait([1], 0)
    assert copier.wait([77], 0)
    assert copier.wait([1, 77], WAIT_S)
    copier.close()


def test_closing_ends_every_job_and_then_refuses_work() -> None:
    copier = _native.Copier(2)
    buffers = Buffers(copier, 64 << 20)
    for job in range(20):
        copier.submit(job, *buffers.fragments([(0, 0, 64 << 20)]))
    copier.close()
    copier.close()
    assert copier.wait(range(20), 0)
    ended = copier.finished()
    assert sorted(finished.job for finished in ended) == list(range(20))
    assert any(finished.failed == [0] and finished.nbytes == 0 for finished in ended)
    with pytest.raises(RuntimeError, match="the copier is closed"):
        copier.submit(99, *buffers.fragments([(0, 0, 1)]))


def test_of_two_who_close_neither_goes_on_while_a_part_is_copied() -> None:
    """Whoever returns may unmap the memory, and a job that is said to have ended is one that writes no more."""
    copier = _native.Copier(1)
    target = np.zeros(4096, np.uint8)
    copier.add_region(target.ctypes.data, target.nbytes)
    with HangingMemory(4096) as hanging:
        copier.add_region(hanging.address, hanging.nbytes)
        copier.submit(1, _array(hanging.address), _array(target.ctypes.data), _array(target.nbytes))
        copier.submit(2, _array(), _array(), _array())
        hanging.wait_until_hung(WAIT_S)  # a job that nobody has begun is given up at once
        closing = [threading.Thread(target=copier.close) for _ in range(2)]
        for thread in closing:
            thread.start()
        assert not copier.wait([1], 0.3)
    for thread in closing:
        thread.join(WAIT_S)
    assert copier.wait([1, 2], 0)


@pytest.mark.parametrize("threads", [0, 65])
def test_a_copier_without_threads_or_with_too_many_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"a copier of {threads} threads"):
        _native.Copier(threads)


def test_a_forked_child_can_neither_use_the_copier_nor_hang_on_it() -> None:
    copier = _native.Copier(2)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            copier.submit(1, _array(), _array(), _array())
        except RuntimeError as error:
            status = 0 if "forked" in str(error) else 2
        copier.close()
        del copier
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    copier.close()
