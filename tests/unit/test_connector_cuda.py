"""What the connector adds to the copier for CUDA, on a fake device: pinning in the background, the way that fragments
go, the check before first use, and what becomes of slots that a lost device may still write."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from connector import spec
from connector.config import ConnectorConfig, CopyBackend
from connector.cuda import LOAD_KERNEL_BYTES, CudaTransfer, open_copier
from connector.layout import ChunkLayout, LayerPages
from connector.messages import WorkerOutcomes
from connector.pinning import Pinning, _cpu_list
from connector.selfcheck import MEMORY_BYTES, DeviceCopiesWrongly, check_device
from connector.transfer import HostTransfer, Region
from tests.unit.connector_engine import PretendEngine
from tests.unit.fake_cuda import ILLEGAL_ADDRESS, FakeDevice, Fault
from tests.unit.native_store import INSTANCE, KIB, native_store

ARENA = 16 * 64 * KIB
PIECE = 4 * 64 * KIB
WAIT_S = 60.0


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def store():
    with native_store(ARENA) as store:
        yield store


def open_on(device, backend=CopyBackend.AUTO, **options):
    return open_copier(
        0, backend, **{"library": device.library, "kernels": b"any", "pin_piece_bytes": PIECE, **options}
    )


# ---- pinning


def test_the_arena_is_pinned_in_the_background_and_that_is_said_once(device, store, caplog):
    caplog.set_level(logging.INFO)
    copier = open_on(device)
    copier.map_arena(store.arena, store.table(), pin=True)
    pinning = Pinning(copier, store.arena)
    assert pinning.wait(WAIT_S)
    assert copier.pinned_bytes(store.arena.address) == ARENA
    assert [record.message.split(",")[0] for record in caplog.records] == ["kvstore: page-locked the arena"]
    pinning.close()
    copier.close()
    assert device.alive() == {}


def test_a_refusal_is_said_with_what_to_change_and_copies_go_on(device, store, caplog):
    device.fail("cuMemHostRegister", after=1)
    copier = open_on(device)
    memory = device.add_memory(np.full(1000, 7, np.uint8))
    copier.add_memory(memory.ctypes.data, memory.nbytes)
    copier.map_arena(store.arena, store.table(), pin=True)
    pinning = Pinning(copier, store.arena)
    assert pinning.wait(WAIT_S)
    [record] = caplog.records
    for part in (
        "CUDA_ERROR_OUT_OF_MEMORY",
        "ulimit -l",
        "LimitMEMLOCK",
        "cgroup",
        "--cpu-bytes",
        "several times slower",
    ):
        assert part in record.message
    end = np.array([store.arena.address + ARENA - 1000], np.uint64)
    with device.running():
        copier.submit(
            1, np.array([memory.ctypes.data], np.uint64), end, np.array([1000], np.uint64),
            is_load=False, compute_stream=0, blocks=np.empty(0, np.int64),
        )  # fmt: skip
        assert copier.wait([1], WAIT_S)
    assert bytes(store.arena.view()[-1000:]) == b"\x07" * 1000
    pinning.close()
    copier.close()


def test_closing_does_not_wait_for_a_daemon_that_makes_nothing_ready(device):
    with native_store(ARENA, prefaulted=PIECE) as store:
        copier = open_on(device)
        copier.map_arena(store.arena, store.table(), pin=True)
        pinning = Pinning(copier, store.arena)
        assert not pinning.wait(0.0)
        pinning.close()
        assert pinning.wait(0.0)
        copier.close()


def test_a_thread_that_fails_leaves_the_slower_way(device, store, caplog):
    copier = open_on(device, background=False)
    copier.map_arena(store.arena, store.table(), pin=True)
    device.fail("cuCtxPushCurrent", result=ILLEGAL_ADDRESS)
    pinning = Pinning(copier, store.arena)
    assert pinning.wait(WAIT_S)
    assert "page-locking the arena failed" in caplog.text
    assert copier.pin_next(store.arena.address) == "stopped"
    pinning.close()
    copier.close()


def test_processors_are_read_as_the_kernel_writes_them():
    assert _cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    with pytest.raises(ValueError, match="invalid literal"):
        _cpu_list("\n")


# ---- the way that fragments go


@pytest.mark.parametrize(
    ("backend", "nbytes", "count", "is_load", "by_kernel"),
    [
        (CopyBackend.AUTO, LOAD_KERNEL_BYTES - 1, 16, True, True),
        (CopyBackend.AUTO, LOAD_KERNEL_BYTES, 16, True, False),
        (CopyBackend.AUTO, 1000, 15, True, False),  # not worth a launch
        (CopyBackend.AUTO, 1000, 16, False, False),
        (CopyBackend.KERNEL, 40_000, 1, True, True),
        (CopyBackend.KERNEL, 40_000, 1, False, True),
        (CopyBackend.COPY_ENGINE, 1000, 16, True, False),
    ],
)
def test_small_fragments_of_loads_go_by_the_kernel(device, store, backend, nbytes, count, is_load, by_kernel):
    copier = open_on(device, backend, background=False)
    memory = device.add_memory(np.zeros(ARENA, np.uint8))
    copier.add_memory(memory.ctypes.data, memory.nbytes)
    copier.map_arena(store.arena, None, pin=True)
    while copier.pin_next(store.arena.address) == "piece":
        pass
    begins = (np.arange(count) * 45_000).astype(np.uint64)
    ends = (begins + np.uint64(store.arena.address), begins + np.uint64(memory.ctypes.data))
    sources, destinations = ends if is_load else ends[::-1]
    copier.submit(
        1, sources, destinations, np.full(count, nbytes, np.uint64),
        is_load=is_load, compute_stream=0, blocks=np.empty(0, np.int64),
    )  # fmt: skip
    assert copier.wait([1], WAIT_S)
    total = count * nbytes
    assert copier.counts == ((0, total, 0) if by_kernel else (total, 0, 0))
    copier.close()


def test_without_a_kernel_auto_does_without_and_says_so_and_kernel_is_refused(device, caplog):
    caplog.set_level(logging.INFO)
    copier = open_on(device, kernels=b"")
    assert "this build has no copy kernel" in caplog.text
    copier.close()
    with pytest.raises(ValueError, match="copy_backend='kernel': this build has no copy kernel"):
        open_on(device, CopyBackend.KERNEL, kernels=b"")
    assert device.alive() == {}


# ---- the check before first use


@pytest.fixture
def memory(device):
    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8)
    device.add_memory(memory.numpy())
    return memory


@pytest.mark.parametrize("backend", list(CopyBackend))
def test_a_device_that_copies_well_passes_its_check(device, memory, backend):
    with device.running():
        pins = backend is not CopyBackend.HOST
        check_device(open_on(device, backend, pin_piece_bytes=1 << 20), memory, lambda: 0, pins=pins)
    assert device.alive() == {}


def test_a_device_that_is_not_done_when_it_says_so_does_not_pass(device, memory):
    device.plant(Fault.ENDED_AT_ONCE)
    copier = open_on(device, background=False)
    with pytest.raises(DeviceCopiesWrongly, match=r"stores of fragments of 312 bytes brought \d+ of 2097152 bytes"):
        check_device(copier, memory, lambda: 0)


def test_a_device_that_refuses_does_not_pass(device, memory):
    device.fail("cuMemcpyBatchAsync")
    with device.running(), pytest.raises(DeviceCopiesWrongly, match=r"store of \d+ fragments of 312 bytes failed"):
        check_device(open_on(device, CopyBackend.COPY_ENGINE), memory, lambda: 0)
    assert device.alive() == {}


# ---- the engine's choice


def layout():
    return ChunkLayout([LayerPages(1 << 20, 4096, 4096)], blocks_per_chunk=1, block_count=4)


def test_on_the_cpu_platform_host_threads_copy():
    page = np.zeros(4096, np.uint8)
    transfer = spec._transfer(
        ConnectorConfig.parse({"endpoint": "unix:///x"}), [layout()], [Region(page.ctypes.data, page.nbytes)]
    )
    assert isinstance(transfer, HostTransfer)
    transfer.close()


def test_on_cuda_the_device_is_checked_and_it_is_said_that_no_gpu_did_this_before(monkeypatch, device, memory, caplog):
    page = device.add_memory(np.zeros(4096, np.uint8))
    monkeypatch.setattr(spec, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(spec, "torch", SimpleNamespace(
        cuda=SimpleNamespace(
            current_device=lambda: 0, current_stream=lambda: SimpleNamespace(cuda_stream=0)
        ),
        device=torch.device, uint8=torch.uint8, zeros=lambda *_, **__: memory,
    ))  # fmt: skip
    monkeypatch.setattr(spec, "open_copier", lambda _number, backend, **more: open_on(device, backend, **more))
    raw = {"endpoint": "unix:///x", "untried_cuda": True, "copy_in_flight_bytes": 8 << 20}
    with device.running():
        transfer = spec._transfer(ConnectorConfig.parse(raw), [layout()], [Region(page.ctypes.data, page.nbytes)])
        assert isinstance(transfer, CudaTransfer)
        transfer.close()
    assert "no GPU had run" in caplog.text
    assert "fake device, compute capability 10.3, driver for CUDA 13.0, copy_backend=auto" in caplog.text
    assert device.alive() == {}


def test_unmapping_unpins_after_the_last_copy(device, store):
    page = device.add_memory(np.zeros(4096, np.uint8))
    transfer = CudaTransfer(
        [layout()], [Region(page.ctypes.data, page.nbytes)], copier=open_on(device), compute_stream=lambda: 0
    )
    mapped = transfer.map(INSTANCE, store.table(), store.arena)
    assert transfer._pinning[store.arena.address].wait(WAIT_S)
    assert device.alive()["registered"] == ARENA // PIECE
    transfer.unmap(mapped)
    assert "registered" not in device.alive()
    transfer.close()
    transfer.close()
    assert device.alive() == {}


# ---- a lost device


def test_slots_that_a_lost_device_may_still_write_are_neither_committed_nor_given_back(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    engine = PretendEngine()
    prompt = list(range(1, 26))
    engine.add("a", prompt, max_tokens=1)
    while not engine.copier.queued:
        engine.step()
    [job] = engine.copier.queued
    granted = dict(engine.daemon.granted)
    _, _, _, _, _, slots, _ = engine.copier.queued.pop(job)
    engine.copier.done.append(
        SimpleNamespace(job=job, failed=list(range(len(slots))), nbytes=0, seconds=0.0, settled=False)
    )
    engine.run()
    assert not engine.daemon.stored
    assert {slot for slot in granted if slot in engine.daemon.granted} >= set(slots.tolist())
    engine.serve("b", prompt, max_tokens=1)  # the engine lives


def test_a_job_is_unsettled_when_it_is_so_on_any_rank():
    one = WorkerOutcomes({1: 1}, unsettled_jobs={1})
    assert one.aggregate(WorkerOutcomes({1: 1, 2: 1}, unsettled_jobs={2})).unsettled_jobs == {1, 2}
