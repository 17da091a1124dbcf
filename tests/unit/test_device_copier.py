"""The copier for CUDA on a fake device: bytes, pinning, limits, failures. Its order is in test_device_order.py."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore._native import Arena, DeviceCopier, create_memfd
from tests.unit.fake_cuda import ILLEGAL_ADDRESS, FakeDevice
from tests.unit.native_store import KIB, NativeStore, native_store

WAIT_S = 60.0
CHUNK = 64 * KIB
PIECE = 256 * KIB  # of the arena, pinned apart
ARENA = 4 * PIECE
PART = 8 << 20  # PART_BYTES of native/cuda/copier.h


class Rig:
    """A copier on a fake device, device memory and an arena; nothing moves unless a test says so."""

    def __init__(self, store: NativeStore, *, version: int = 13000, pin: bool = True, **settings: object) -> None:
        self.device = FakeDevice(version=version)
        self.memory = self.device.add_memory(np.zeros(ARENA, np.uint8))
        self.store = store
        self.arena = np.frombuffer(store.arena.view(), np.uint8)
        given = {"library": self.device.library, "background": False, "pin_piece_bytes": PIECE, "kernels": b"any"}
        self.copier = DeviceCopier(0, **{**given, **settings})
        self.copier.add_memory(self.memory.ctypes.data, self.memory.nbytes)
        self.copier.map_arena(store.arena, store.table(), pin=pin)

    def pin(self) -> None:
        while self.copier.pin_next(self.store.arena.address) == "piece":
            pass

    def submit(self, job: int, ranges: list[tuple[int, int, int]], *, is_load: bool, **more: object) -> None:
        """`ranges`: offset in device memory, offset in the arena, bytes."""
        table = np.array(ranges, np.uint64).reshape(-1, 3)
        device = table[:, 0] + np.uint64(self.memory.ctypes.data)
        arena = table[:, 1] + np.uint64(self.store.arena.address)
        ends = (arena, device) if is_load else (device, arena)
        self.copier.submit(
            job,
            *ends,
            table[:, 2].copy(),
            is_load=is_load,
            compute_stream=0,
            **{"blocks": np.empty(0, np.int64), **more},
        )

    def finish(self, *jobs: int) -> list[tuple[int, list[int], int]]:
        assert self.copier.wait(jobs, WAIT_S)
        return sorted((ended.job, ended.failed, ended.nbytes) for ended in self.copier.finished())

    def close(self) -> None:
        self.copier.close()
        del self.copier, self.arena


@pytest.fixture
def store() -> Iterator[NativeStore]:
    with native_store(ARENA) as store:
        yield store


@pytest.fixture
def rig(store: NativeStore) -> Iterator[Rig]:
    rig = Rig(store)
    rig.pin()
    yield rig
    device = rig.device
    rig.close()
    assert device.alive() == {}


@pytest.mark.parametrize("version", [12080, 13000])
def test_a_load_may_be_read_at_any_time_and_a_store_only_in_the_order_of_its_stream(
    store: NativeStore, version: int
) -> None:
    """The arena's bytes are there when the load is submitted; those of the KV cache only once they were computed."""
    rig = Rig(store, version=version)
    rig.pin()
    orders = []
    for job, is_load in enumerate((False, True)):
        rig.submit(job, [(0, 0, 1000)], is_load=is_load)
        assert rig.finish(job) == [(job, [], 1000)]
        orders.append([rig.device.calls(f"batches of order {order}") for order in ("ANY", "STREAM")])
    assert orders == [[0, 1], [1, 1]]
    rig.close()


def random_ranges(seed: int, count: int, size_max: int, total: int = ARENA) -> list[tuple[int, int, int]]:
    """Places of `count` fragments, apart on both sides, in another order on each."""
    rng = np.random.default_rng(seed)
    room = total // count
    sizes = rng.integers(1, min(size_max, room) + 1, count)
    shifts = [rng.integers(0, room - sizes + 1) for _ in range(2)]
    order = rng.permutation(count)
    return [
        (i * room + int(shifts[0][i]), int(order[i]) * room + int(shifts[1][i]), int(sizes[i])) for i in range(count)
    ]


@pytest.mark.parametrize("is_load", [False, True])
@pytest.mark.parametrize("way", ["engine", "per copy", "kernel", "mixed", "host"])
def test_every_byte_arrives_and_no_other_changes(store: NativeStore, way: str, is_load: bool) -> None:
    settings = {
        "engine": {},
        "per copy": {"version": 12040},
        "kernel": {"load_kernel_bytes": 2**63, "store_kernel_bytes": 2**63},
        "mixed": {"load_kernel_bytes": 5000, "store_kernel_bytes": 5000, "kernel_fragments_min": 2},
        "host": {"pin": False},
    }[way]
    rig = Rig(store, **settings)
    rig.pin()
    rng = np.random.default_rng(1)
    rig.memory[:] = rng.integers(0, 256, ARENA, np.uint8)
    rig.arena[:] = rng.integers(0, 256, ARENA, np.uint8)
    source, target = (rig.arena, rig.memory) if is_load else (rig.memory, rig.arena)
    before, expected = source.copy(), target.copy()
    ranges = [*random_ranges(2, 90, 11_000, ARENA - CHUNK), (ARENA - CHUNK, ARENA - CHUNK, CHUNK)]
    for device, arena, nbytes in ranges:
        begin, end = (arena, device) if is_load else (device, arena)
        expected[end : end + nbytes] = source[begin : begin + nbytes]
    rig.submit(7, ranges, is_load=is_load)
    assert rig.finish(7) == [(7, [], sum(nbytes for _, _, nbytes in ranges))]
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(source, before)
    engine, kernel, pageable = rig.copier.counts
    assert [engine > 0, kernel > 0, pageable > 0] == {
        "engine": [True, False, False],
        "per copy": [True, False, False],
        "kernel": [False, True, False],
        "mixed": [True, True, False],
        "host": [False, False, True],
    }[way]
    batched, single = rig.device.calls("cuMemcpyBatchAsync"), rig.device.calls("cuMemcpyAsync")
    assert (batched > 0, single > 0) == (way in ("engine", "mixed"), way in ("per copy", "host"))
    rig.close()
    assert rig.device.alive() == {}


@pytest.mark.parametrize(("version", "has_batch"), [(12000, False), (12070, False), (12080, True), (13000, True)])
def test_the_batch_copy_is_used_from_12_8_on_in_the_form_of_the_driver(
    store: NativeStore, version: int, has_batch: bool
) -> None:
    rig = Rig(store, version=version)
    rig.pin()
    assert (rig.copier.driver_version, rig.copier.has_batch) == (version, has_batch)
    rig.memory[:1000] = 5
    rig.submit(1, [(0, 0, 1000)], is_load=False)
    assert rig.finish(1) == [(1, [], 1000)]
    assert (rig.arena[:1000] == 5).all()
    rig.close()


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"no CUDA driver: .*libcuda-of-nobody"):
        DeviceCopier(0, library="libcuda-of-nobody.so.1")


def test_a_library_that_is_no_driver_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"libc.so.6 is older than CUDA 12.0"):
        DeviceCopier(0, library="libc.so.6")


def test_a_device_that_is_not_there_says_so() -> None:
    with pytest.raises(RuntimeError, match="cuDeviceGet: CUDA_ERROR"):
        DeviceCopier(3, library=FakeDevice().library)


@pytest.mark.parametrize(("function", "after"), [("cuDeviceGetName", 0), ("cuStreamCreateWithPriority", 1)])
def test_a_device_that_cannot_be_opened_whole_is_given_back(function: str, after: int) -> None:
    device = FakeDevice()
    device.fail(function, after=after)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        DeviceCopier(0, library=device.library)
    assert device.alive() == {}


def test_a_kernel_that_was_not_built_is_refused_when_it_is_asked_for() -> None:
    device = FakeDevice()
    with pytest.raises(ValueError, match="this build has no copy kernel"):
        DeviceCopier(0, library=device.library, kernels=b"", load_kernel_bytes=1)
    assert device.alive() == {}
    device.fail("cuModuleLoadData", result=ILLEGAL_ADDRESS)
    copier = DeviceCopier(0, library=device.library, kernels=b"any")
    assert "does not load" in copier.kernel_problem
    copier.close()


@pytest.mark.parametrize(
    "settings", [{"in_flight_bytes": 0}, {"pin_piece_bytes": 0}, {"pin_piece_bytes": 5000}, {"kernel_blocks": 0}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a device copier with"):
        DeviceCopier(0, library=FakeDevice().library, **settings)


@pytest.mark.parametrize("kernel_bytes", [0, 2**63])
def test_no_address_or_offset_is_cut_to_32_bits(kernel_bytes: int) -> None:
    total = (5 << 30) + CHUNK  # of which a few pages are ever touched
    device = FakeDevice()
    memory = device.add_memory(np.zeros(total, np.uint8))
    fd = create_memfd("large", total)
    arena = Arena(fd, total)
    os.close(fd)
    copier = DeviceCopier(
        0, library=device.library, kernels=b"any", background=False, load_kernel_bytes=kernel_bytes,
        store_kernel_bytes=kernel_bytes,
    )  # fmt: skip
    copier.add_memory(memory.ctypes.data, memory.nbytes)
    copier.map_arena(arena, None, pin=True)
    view = np.frombuffer(arena.view(), np.uint8)
    offsets = np.array([0, (1 << 32) - 5000, 1 << 32, total - CHUNK], np.uint64)
    values = np.random.default_rng(6).integers(1, 256, (len(offsets), 5000), np.uint8)
    for offset, value in zip(offsets.tolist(), values, strict=True):
        memory[offset : offset + 5000] = value
    sizes = np.full(len(offsets), 5000, np.uint64)
    ends = offsets + np.uint64(memory.ctypes.data), offsets[::-1] + np.uint64(arena.address)
    nothing = np.empty(0, np.int64)
    while copier.pin_next(arena.address) == "piece":
        pass
    copier.submit(1, *ends, sizes, is_load=False, compute_stream=0, blocks=nothing)
    assert copier.wait([1], WAIT_S)
    for offset, value in zip(offsets[::-1].tolist(), values, strict=True):
        np.testing.assert_array_equal(view[offset : offset + 5000], value)
        view[offset : offset + 5000] ^= 0xFF
    copier.submit(2, *ends[::-1], sizes, is_load=True, compute_stream=0, blocks=nothing)
    assert copier.wait([2], WAIT_S)
    for offset, value in zip(offsets.tolist(), values, strict=True):
        np.testing.assert_array_equal(memory[offset : offset + 5000], value ^ 0xFF)
    assert [ended.failed for ended in copier.finished()] == [[], []]
    copier.close()


# ---- pinning


def test_the_arena_is_pinned_piece_by_piece_and_unpinned_at_the_end(store: NativeStore) -> None:
    rig = Rig(store)
    address = store.arena.address
    for pieces in range(1, 5):
        assert rig.copier.pin_next(address) == "piece"
        assert rig.copier.pinned_bytes(address) == pieces * PIECE
    assert rig.copier.pin_next(address) == "all"
    assert rig.device.alive()["registered"] == 4
    rig.copier.unmap_arena(address)
    assert "registered" not in rig.device.alive()
    rig.close()


def test_a_copy_has_its_piece_pinned_next_and_goes_through_as_soon_as_that_is_done(store: NativeStore) -> None:
    rig = Rig(store)
    rig.memory[:] = 3
    rig.submit(1, [(5000, 2 * PIECE, 1000)], is_load=False)
    rig.submit(2, [(0, 0, 1000)], is_load=True)
    rig.copier.advance()
    rig.device.step()
    rig.copier.advance()
    assert rig.copier.finished() == []
    assert rig.copier.pin_next(store.arena.address) == "piece"  # wished first: by the load, which is looked at first
    assert rig.finish(2) == [(2, [], 1000)]
    assert not rig.copier.wait([1], 0)
    assert rig.copier.pin_next(store.arena.address) == "piece"
    assert rig.finish(1) == [(1, [], 1000)]
    assert (rig.arena[2 * PIECE : 2 * PIECE + 1000] == 3).all()
    assert rig.copier.pinned_bytes(store.arena.address) == 2 * PIECE
    rig.close()


def test_a_copy_that_spans_pieces_is_cut_between_them(rig: Rig) -> None:
    rig.memory[:] = np.random.default_rng(3).integers(0, 256, ARENA, np.uint8)
    rig.submit(1, [(5, PIECE - 100, PIECE + 200)], is_load=False)  # the fake refuses a copy over two registrations
    assert rig.finish(1) == [(1, [], PIECE + 200)]
    np.testing.assert_array_equal(rig.arena[PIECE - 100 : 2 * PIECE + 100], rig.memory[5 : 5 + PIECE + 200])


def test_what_the_daemon_has_not_made_ready_is_not_pinned_and_is_copied_as_ordinary_memory() -> None:
    with native_store(ARENA, prefaulted=PIECE + 4096) as store:
        rig = Rig(store)
        address = store.arena.address
        assert [rig.copier.pin_next(address) for _ in range(3)] == ["piece", "nothing", "nothing"]
        rig.memory[:] = 4
        rig.submit(1, [(0, PIECE, 4096)], is_load=False)
        assert rig.finish(1) == [(1, [], 4096)]
        assert (rig.arena[PIECE : PIECE + 4096] == 4).all()
        assert rig.copier.counts[2] == 4096
        store.index.set_prefaulted(ARENA)
        assert [rig.copier.pin_next(address) for _ in range(4)] == ["piece", "piece", "piece", "all"]
        rig.close()


def test_a_refusal_is_told_and_the_rest_goes_the_slower_way(store: NativeStore) -> None:
    rig = Rig(store)
    address = store.arena.address
    rig.device.fail("cuMemHostRegister", after=1)
    rig.memory[:] = 6
    rig.submit(1, [(0, 3 * PIECE, 1000)], is_load=False)
    rig.copier.advance()
    assert rig.copier.pin_next(address) == "piece"  # the wish
    assert rig.copier.refusal(address) == ""
    assert [rig.copier.pin_next(address) for _ in range(2)] == ["stopped", "stopped"]
    assert rig.copier.refusal(address) == "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
    rig.submit(2, [(0, PIECE, 1000)], is_load=False)
    assert rig.finish(1, 2) == [(1, [], 1000), (2, [], 1000)]
    assert rig.copier.counts == (1000, 0, 1000)
    rig.close()
    assert rig.device.alive() == {}


@pytest.mark.parametrize("background", [False, True])
def test_a_graph_that_is_captured_meanwhile_stays_whole(store: NativeStore, background: bool) -> None:
    rig = Rig(store, background=background, load_kernel_bytes=2**63)
    rig.device.capture(is_on=True)
    with rig.device.running():
        rig.pin()
        rig.submit(1, [(0, 0, 1000)], is_load=True)
        rig.submit(2, [(5000, 5000, 1000)], is_load=False)
        assert rig.finish(1, 2) == [(1, [], 1000), (2, [], 1000)]
        rig.copier.unmap_arena(store.arena.address)
        rig.close()
    assert rig.device.capture(is_on=False)
    assert rig.device.alive() == {}


# ---- limits


def test_a_load_waits_for_no_more_than_the_stores_in_flight(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=2 * CHUNK)
    rig.pin()
    for job in range(8):
        rig.submit(job, [(job * CHUNK, job * CHUNK, CHUNK)], is_load=False)
    rig.submit(100, [(ARENA - CHUNK, ARENA - CHUNK, CHUNK)], is_load=True)
    rig.copier.advance()
    assert rig.device.calls("cuMemcpyBatchAsync") == 2  # one part of a store, for it fills the limit; and the load
    rig.finish(100)
    assert rig.device.calls("cuMemcpyBatchAsync") < 9
    assert len(rig.finish(*range(8))) >= 1
    rig.close()


def test_a_job_of_many_parts_has_at_most_the_limit_in_flight(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=CHUNK)
    rig.pin()
    rig.memory[:] = np.random.default_rng(5).integers(0, 256, ARENA, np.uint8)
    rig.submit(1, [(0, 0, ARENA)], is_load=False)
    copies = 0
    while not rig.copier.wait([1], 0):
        moved = rig.copier.advance()
        now = rig.device.calls("cuMemcpyBatchAsync")
        assert now - copies <= 1
        copies = now
        assert rig.device.step() or moved
    np.testing.assert_array_equal(rig.arena, rig.memory)
    assert copies == ARENA // CHUNK
    rig.close()


# ---- what is refused, and what fails


@pytest.mark.parametrize(
    ("ranges", "is_load"),
    [
        ([(0, 0, 10), (ARENA - 5, 0, 10)], True),
        ([(0, ARENA - 5, 10)], False),
        ([(0, 0, 2**63)], True),
    ],
)
def test_a_fragment_outside_the_regions_is_refused_and_nothing_is_copied(
    rig: Rig, ranges: list[tuple[int, int, int]], is_load: bool
) -> None:
    with pytest.raises(ValueError, match=r"job 1, fragment .: .* are not inside a region of each side"):
        rig.submit(1, ranges, is_load=is_load)
    assert rig.copier.wait([1], 0)
    assert rig.device.step() == 0


def test_a_job_number_in_use_is_refused(rig: Rig) -> None:
    rig.submit(1, [(0, 0, 10)], is_load=True)
    with pytest.raises(ValueError, match="job 1 is still queued or running"):
        rig.submit(1, [(0, 0, 10)], is_load=True)
    rig.finish(1)


def test_padding_is_filled_from_host_memory(rig: Rig) -> None:
    zeros = np.zeros(4096, np.uint8)
    rig.copier.add_host_memory(zeros.ctypes.data, zeros.nbytes)
    rig.arena[:] = 1
    rig.memory[:100] = 2
    sources = np.array([rig.memory.ctypes.data, zeros.ctypes.data], np.uint64)
    destinations = np.array([0, 100], np.uint64) + np.uint64(rig.store.arena.address)
    sizes = np.array([100, 50], np.uint64)
    nothing = np.empty(0, np.int64)
    rig.copier.submit(1, sources, destinations, sizes, is_load=False, compute_stream=0, blocks=nothing)
    assert rig.finish(1) == [(1, [], 150)]
    assert rig.arena[:151].tolist() == [2] * 100 + [0] * 50 + [1]
    with pytest.raises(ValueError, match="not inside a region"):  # a load writes only device memory
        rig.copier.submit(2, destinations, sources, sizes, is_load=True, compute_stream=0, blocks=nothing)


def test_slots_whose_generation_changed_are_reported_after_the_copy(rig: Rig) -> None:
    refs = [rig.store.put(number, CHUNK) for number in range(3)]
    slots = np.array([slot for slot, _ in refs], np.uint32)
    generations = np.array([generation for _, generation in refs], np.uint64)
    table = rig.store.table()
    ranges = [(i * CHUNK, rig.store.offset(slot, CHUNK), CHUNK) for i, (slot, _) in enumerate(refs)]
    rig.submit(1, ranges, is_load=True, table=table, slots=slots, generations=generations)
    rig.copier.advance()
    while len(taken := rig.store.index.grant(1, CHUNK, 1)) == 1 and taken[0][0] != slots[0]:
        pass  # while the copy waits, the oldest chunk is evicted and its slot handed out
    assert taken[0][0] == slots[0]
    table.close()  # the job keeps the map that it needs
    assert rig.finish(1) == [(1, [0], 3 * CHUNK)]


@pytest.mark.parametrize("function", ["cuMemcpyBatchAsync", "cuStreamWaitEvent", "cuEventRecord"])
@pytest.mark.parametrize("is_load", [True, False])
def test_what_the_driver_refuses_fails_its_job_and_no_other(rig: Rig, function: str, is_load: bool) -> None:
    rig.submit(1, [(0, 0, 1000)], is_load=is_load)
    rig.submit(2, [(5000, 5000, 1000)], is_load=is_load)
    rig.device.fail(function)
    assert rig.finish(1, 2) == [(1, [0], 0), (2, [], 1000)]
    assert rig.copier.lost == ""
    rig.submit(1, [(0, 0, 1000)], is_load=is_load)
    assert rig.finish(1) == [(1, [], 1000)]


def test_a_job_that_fails_half_way_is_not_reported_before_what_was_begun_has_ended(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=4 * CHUNK)
    rig.pin()
    rig.device.fail("cuMemcpyBatchAsync", after=1)
    rig.submit(1, [(0, 0, ARENA)], is_load=False)
    rig.copier.advance()
    assert rig.copier.finished() == []  # the first part runs
    rig.device.step()
    rig.copier.advance()  # hands over the second part, which is refused
    assert rig.copier.finished() == []
    assert rig.finish(1) == [(1, [0], 0)]
    rig.close()
    assert rig.device.alive() == {}


def test_a_compute_stream_that_refuses_is_an_error_of_the_submission(rig: Rig) -> None:
    rig.device.fail("cuEventRecord")
    with pytest.raises(RuntimeError, match="cannot order a copy behind the compute stream"):
        rig.submit(1, [(0, 0, 1000)], is_load=True)
    rig.submit(1, [(0, 0, 1000)], is_load=True)
    assert rig.finish(1) == [(1, [], 1000)]


def test_a_lost_device_fails_every_job_and_says_which_may_still_write(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=CHUNK)
    rig.pin()
    rig.submit(1, [(0, 0, 1000)], is_load=True)
    rig.finish(1)
    rig.submit(2, [(0, 0, CHUNK)], is_load=False)
    rig.submit(3, [(CHUNK, CHUNK, CHUNK)], is_load=False)  # has not begun: the limit
    rig.copier.advance()
    rig.device.fail("cuEventQuery", result=ILLEGAL_ADDRESS)
    rig.copier.advance()
    ended = {done.job: (done.failed, done.settled) for done in rig.copier.finished()}
    assert ended == {2: ([0], False), 3: ([0], True)}
    assert rig.copier.lost == "cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (of the fake device)"
    rig.device.lose()
    rig.submit(4, [(0, 0, 1000)], is_load=True)
    assert [(done.job, done.failed, done.settled) for done in rig.copier.finished()] == [(4, [0], True)]
    assert rig.copier.wait([1, 2, 3, 4], 0)
    rig.copier.unmap_arena(store.arena.address)
    rig.close()


# ---- ends


def test_unmapping_fails_what_has_not_begun_and_waits_for_what_has(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=CHUNK)
    rig.pin()
    rig.memory[:] = 9
    rig.submit(1, [(0, 0, CHUNK)], is_load=False)
    rig.submit(2, [(0, CHUNK, CHUNK)], is_load=False)
    rig.copier.advance()
    rig.copier.unmap_arena(store.arena.address)
    ended = {done.job: (done.failed, done.settled, done.nbytes) for done in rig.copier.finished()}
    assert ended == {1: ([], True, CHUNK), 2: ([0], True, 0)}
    assert (rig.arena[:CHUNK] == 9).all()
    assert not rig.arena[CHUNK : 2 * CHUNK].any()
    assert "registered" not in rig.device.alive()
    with pytest.raises(ValueError, match="not inside a region"):
        rig.submit(3, [(0, 0, 1000)], is_load=False)
    with pytest.raises(ValueError, match="no arena begins at"):
        rig.copier.unmap_arena(store.arena.address)
    rig.close()


def test_unmapping_does_not_wait_for_a_piece_that_nobody_pins(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=CHUNK)
    assert rig.copier.pin_next(store.arena.address) == "piece"
    rig.submit(1, [(0, 0, CHUNK), (0, PIECE, 2 * CHUNK)], is_load=False)
    rig.copier.advance()  # the first fragment goes, the second waits
    rig.copier.unmap_arena(store.arena.address)
    assert [(done.job, done.failed) for done in rig.copier.finished()] == [(1, [])]
    assert rig.copier.counts == (CHUNK, 0, 2 * CHUNK)
    rig.close()


def test_nothing_touches_device_memory_that_is_unmapped_while_the_engine_sleeps(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=CHUNK)
    rig.pin()
    rig.memory[:] = 9
    rig.submit(1, [(0, 0, 2 * CHUNK)], is_load=False)  # two parts; the second is not yet with the driver
    rig.submit(2, [(CHUNK, CHUNK, CHUNK)], is_load=False)
    rig.submit(3, [(2 * CHUNK, 2 * CHUNK, CHUNK)], is_load=True)
    rig.copier.advance()
    rig.submit(4, [(0, 0, CHUNK)], is_load=True)
    rig.copier.suspend()
    rig.device.unmap(rig.memory)
    for is_load in (False, True):
        rig.submit(5 + is_load, [(0, 0, CHUNK)], is_load=is_load)
    rig.copier.advance()
    rig.device.step()
    ended = {done.job: (done.failed, done.settled) for done in rig.copier.finished()}
    assert ended == {1: ([], True), 3: ([], True), **dict.fromkeys((2, 4, 5, 6), ([0], True))}
    assert (rig.arena[: 2 * CHUNK] == 9).all()
    rig.device.map_again(rig.memory)
    rig.copier.resume()
    rig.arena[:CHUNK] = 5
    rig.submit(7, [(0, 0, CHUNK)], is_load=True)
    assert rig.finish(7) == [(7, [], CHUNK)]
    assert (rig.memory[:CHUNK] == 5).all()
    assert rig.copier.lost == ""
    rig.close()
    assert rig.device.alive() == {}


def test_a_copier_that_is_not_told_of_sleep_loses_the_device(store: NativeStore) -> None:
    """What the test above would find."""
    rig = Rig(store)
    rig.pin()
    rig.submit(1, [(0, 0, CHUNK)], is_load=False)
    rig.copier.advance()
    rig.device.unmap(rig.memory)
    rig.device.step()
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        rig.copier.advance()
    rig.close()


def test_closing_ends_every_job_and_gives_everything_back(store: NativeStore) -> None:
    rig = Rig(store, in_flight_bytes=CHUNK)
    rig.pin()
    for job in range(6):
        rig.submit(job, [(job * CHUNK, job * CHUNK, CHUNK)], is_load=job % 2 == 0)
    rig.copier.advance()
    rig.copier.close()
    rig.copier.close()
    ended = {done.job: done.failed for done in rig.copier.finished()}
    assert ended.keys() == set(range(6))
    assert ended[0] == ended[1] == []
    assert ended[5] == [0]
    with pytest.raises(RuntimeError, match="the copier is closed"):
        rig.submit(9, [(0, 0, 10)], is_load=True)
    rig.close()
    assert rig.device.alive() == {}


def test_with_its_own_thread_jobs_end_without_anybody_asking(store: NativeStore) -> None:
    rig = Rig(store, background=True, in_flight_bytes=2 * CHUNK, load_kernel_bytes=2000)
    with rig.device.running():
        rig.pin()
        rng = np.random.default_rng(8)
        rig.memory[:] = rng.integers(0, 256, ARENA, np.uint8)
        half = ARENA // 2
        rig.submit(1, random_ranges(9, 64, 20_000, half), is_load=False)
        assert [job for job, failed, _ in rig.finish(1) if not failed] == [1]
        back = [(device + half, arena, nbytes) for device, arena, nbytes in random_ranges(9, 64, 20_000, half)]
        rig.submit(2, back, is_load=True)
        assert [job for job, failed, _ in rig.finish(2) if not failed] == [2]
        for device, _, nbytes in random_ranges(9, 64, 20_000, half):
            again = device + half
            np.testing.assert_array_equal(rig.memory[again : again + nbytes], rig.memory[device : device + nbytes])
        for job in range(10, 60):
            rig.submit(job, [(job * 1000, job * 1000, 1000)], is_load=job % 2 == 0)
        rig.copier.unmap_arena(store.arena.address)
        assert rig.copier.wait(range(10, 60), 0)
        rig.close()
    assert rig.device.alive() == {}


def test_a_forked_child_can_neither_use_the_copier_nor_hang_on_it(store: NativeStore) -> None:
    rig = Rig(store, background=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            rig.copier.wait([1], 0)
        except RuntimeError:
            rig.copier.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    rig.close()
