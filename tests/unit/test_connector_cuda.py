"""What the connector adds to the copier for CUDA, on a fake device: pinning in the background, the way that fragments
go, the check before first use, and what becomes of slots that a lost device may still write."""

import inspect
import itertools
import logging
import os
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from typer.testing import CliRunner
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.worker import gpu_worker

from connector import compat, pinning, priors, spec
from connector.config import ConnectorConfig, CopyBackend
from connector.cuda import LOAD_KERNEL_BYTES, CudaTransfer, open_copier
from connector.layout import ChunkLayout, LayerPages
from connector.messages import ChunkSpec, WorkerOutcomes
from connector.pinning import Pinning
from connector.plugin import KVStoreConnector
from connector.selfcheck import MEMORY_BYTES, DeviceCopiesWrongly, check_device
from connector.transfer import HostTransfer, KindBlocks, Region
from connector.worker import WorkerHalf
from kvstore.cli import app, calibrate
from kvstore.device_bandwidth import measure_device
from kvstore.profiles import measured
from kvstore.profiles.measured import Device, Direction, Rate, Way
from tests.unit.connector_engine import PretendEngine, vllm_config
from tests.unit.connector_fakes import FakeLink
from tests.unit.fake_cuda import ILLEGAL_ADDRESS, ROOT, FakeDevice, Fault
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


def test_how_far_it_is_is_said_now_and_then(device, store, monkeypatch, caplog):
    monkeypatch.setattr(pinning, "REPORT_S", -1.0)  # after every piece
    caplog.set_level(logging.INFO)
    copier = open_on(device)
    copier.map_arena(store.arena, store.table(), pin=True)
    assert Pinning(copier, store.arena).wait(WAIT_S)
    said = [record.message for record in caplog.records]
    assert said[:-1] == ["kvstore: page-locked 0.0 GiB of the arena's 0.0 GiB"] * (ARENA // PIECE)
    copier.close()


def test_a_process_that_ends_without_closing_gives_everything_back_first(tmp_path):
    """To the driver, which does not bear being asked for anything after its own end."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import atexit\n"
        "from tests.unit.test_connector_cuda import *\n"
        "device = FakeDevice()\n"
        "atexit.register(lambda: print(device.alive()))  # first in, last out\n"
        "page = device.add_memory(np.zeros(4096, np.uint8))\n"
        "held = native_store(ARENA)\n"
        "store = held.__enter__()\n"
        "regions = [Region(page.ctypes.data, page.nbytes)]\n"
        "transfer = CudaTransfer([layout()], regions, copier=open_on(device), compute_stream=lambda: 0)\n"
        "transfer.map(INSTANCE, store.table(), store.arena)\n"
        "assert transfer._pinning[store.arena.address].wait(WAIT_S)\n"
        "print(device.alive()['registered'] > 0)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          check=True, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["True", "{}"]  # some versions of vLLM warn on standard output


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


def test_the_thread_keeps_to_the_processors_next_to_the_device(monkeypatch, tmp_path):
    one = min(os.sched_getaffinity(0))
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3/cpulist").write_text(f"{one},100000-100003\n")
    monkeypatch.setattr(pinning, "NODES", tmp_path)
    found = []

    def look(node):
        pinning._stay_near(node)
        found.append(os.sched_getaffinity(0))

    for node in (3, -1):  # -1: the driver does not know
        thread = threading.Thread(target=look, args=(node,))
        thread.start()
        thread.join()
    assert found == [{one}, os.sched_getaffinity(0)]


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
    assert goes_by_kernel(copier, device, store, nbytes, count, is_load=is_load) == by_kernel
    copier.close()


def goes_by_kernel(copier, device, store, nbytes, count, *, is_load):
    """Whether all of so many fragments do, and not all by the copy engines."""
    memory = device.add_memory(np.zeros(ARENA, np.uint8))
    copier.add_memory(memory.ctypes.data, memory.nbytes)
    copier.map_arena(store.arena, None, pin=True)
    while copier.pin_next(store.arena.address) == "piece":
        pass
    begins = (np.arange(count) * (ARENA // count)).astype(np.uint64)
    ends = (begins + np.uint64(store.arena.address), begins + np.uint64(memory.ctypes.data))
    sources, destinations = ends if is_load else ends[::-1]
    before = copier.counts
    copier.submit(
        1, sources, destinations, np.full(count, nbytes, np.uint64),
        is_load=is_load, compute_stream=0, blocks=np.empty(0, np.int64),
    )  # fmt: skip
    assert copier.wait([1], WAIT_S)
    assert [ended.failed for ended in copier.finished()] == [[]]
    copier.unmap_arena(store.arena.address)
    engine_bytes, kernel_bytes, pageable_bytes = np.subtract(copier.counts, before).tolist()
    assert (min(engine_bytes, kernel_bytes), max(engine_bytes, kernel_bytes), pageable_bytes) == (0, count * nbytes, 0)
    return kernel_bytes > 0


@pytest.mark.parametrize(
    ("nbytes", "is_load", "by_kernel"),
    [(8191, True, True), (8192, True, False), (2047, False, True), (2048, False, False)],
)
def test_with_a_profile_it_says_which_fragments_go_by_the_kernel(device, store, nbytes, is_load, by_kernel):
    rates = [
        Rate(way, direction, size, speed)
        for direction, sizes in ((Direction.LOAD, (2048, 8192)), (Direction.STORE, (1024, 2048)))
        for size, engine in zip(sizes, (1.0, 3.0), strict=True)
        for way, speed in ((Way.COPY_ENGINE, engine), (Way.KERNEL, 2.0))
    ]
    copier = open_on(device, profile=Device("fake device", 0.0, tuple(rates)), background=False)
    assert goes_by_kernel(copier, device, store, nbytes, 16, is_load=is_load) == by_kernel
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


@pytest.fixture
def on_cuda(monkeypatch, device, memory, tmp_path):
    """spec.py finds the fake device, and a profile where KVSTORE_PROFILE says."""
    path = tmp_path / "profile.json"
    monkeypatch.setenv("KVSTORE_PROFILE", str(path))
    monkeypatch.setattr(
        spec, "current_platform", SimpleNamespace(device_type="cuda", get_device_name=lambda _number=0: "fake device")
    )
    monkeypatch.setattr(spec, "torch", SimpleNamespace(
        cuda=SimpleNamespace(
            current_device=lambda: 0, current_stream=lambda: SimpleNamespace(cuda_stream=0)
        ),
        device=torch.device, uint8=torch.uint8, zeros=lambda *_, **__: memory,
    ))  # fmt: skip
    monkeypatch.setattr(spec, "open_copier", lambda _number, backend, **more: open_on(device, backend, **more))
    return path


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_the_device_is_checked_and_it_is_said_that_no_gpu_did_this_before(device, caplog):
    page = device.add_memory(np.zeros(4096, np.uint8))
    raw = {"endpoint": "unix:///x", "untried_cuda": True, "copy_in_flight_bytes": 8 << 20}
    with device.running():
        transfer = spec._transfer(ConnectorConfig.parse(raw), [layout()], [Region(page.ctypes.data, page.nbytes)])
        assert isinstance(transfer, CudaTransfer)
        transfer.close()
    assert "no GPU had run" in caplog.text
    assert "fake device, compute capability 10.3, driver for CUDA 13.0, copy_backend=auto" in caplog.text
    assert device.alive() == {}


def test_auto_and_the_priors_start_from_what_calibrate_measured(on_cuda, device, store, monkeypatch):
    sizes = (2 << 10, 16 << 10, 64 << 10)

    def open_fake(way, **_):
        return open_on(device, CopyBackend.KERNEL if way is Way.KERNEL else CopyBackend.COPY_ENGINE)

    monkeypatch.setattr(calibrate, "COPY_BYTES", 8 << 20)
    monkeypatch.setattr(calibrate, "open_device", open_fake)
    monkeypatch.setattr(
        calibrate, "measure_device", partial(measure_device, fragment_bytes=sizes, total_bytes=1 << 20, rounds=1)
    )
    monkeypatch.setattr(priors, "current_platform", spec.current_platform)
    page = device.add_memory(np.zeros(4096, np.uint8))
    with device.running():
        result = CliRunner().invoke(app, ["calibrate", "--output", str(on_cuda)])
        assert result.exit_code == 0, result.output
        found = measured.read(on_cuda).device
        transfer = spec._transfer(
            ConnectorConfig.parse({"endpoint": "unix:///x", "untried_cuda": True}),
            [layout()], [Region(page.ctypes.data, page.nbytes)],
        )  # fmt: skip
        speeds = {(rate.way, rate.direction, rate.fragment_bytes): rate.bytes_per_s for rate in found.rates}
        for direction, nbytes in itertools.product((Direction.LOAD, Direction.STORE), sizes):
            is_load = direction is Direction.LOAD
            by_kernel = goes_by_kernel(transfer._copier, device, store, nbytes, 16, is_load=is_load)
            assert by_kernel == (nbytes < found.kernel_pays_below(direction))
            if not by_kernel:
                engine, kernel = (speeds[way, direction, nbytes] for way in (Way.COPY_ENGINE, Way.KERNEL))
                assert kernel <= measured.KERNEL_GAIN_MIN * engine
        transfer.close()
    started = priors.engine_priors(vllm_config(), sizes[1])
    assert (started.load, started.store) == tuple(
        found.link(direction, sizes[1]) for direction in (Direction.LOAD, Direction.STORE)
    )


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


# ---- sleep


class FakeAllocator:
    """Takes a page away and brings it back, as vLLM's does to the KV cache of an engine that sleeps."""

    def __init__(self, device, page):
        self.device, self.page = device, page

    def sleep(self, offload_tags=None):  # noqa: ARG002
        self.device.unmap(self.page)

    def discard(self, tags):
        if "kv_cache" in tags:
            self.device.unmap(self.page)

    def wake_up(self, tags=None):
        if tags is None or "kv_cache" in tags:
            self.device.map_again(self.page)


def test_the_stand_in_for_vllms_allocator_is_called_like_it():
    for name in ("sleep", "discard", "wake_up"):
        theirs, ours = (getattr(owner, name) for owner in (CuMemAllocator, FakeAllocator))
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


class Backend:
    """What vLLM's worker asks of the allocator, by the names that 0.33 has for it."""

    def __init__(self, allocator):
        self.suspend = lambda _: allocator.sleep(offload_tags=("weights",))
        self.resume, self.discard = allocator.wake_up, allocator.discard


def whoever_tells(allocator, connector, monkeypatch):
    """Puts the allocator's memory to sleep and wakes it as vLLM does, and the connector hears of it: from vLLM's own
    worker from 0.33 on, before from the allocator, which was told to."""
    if not hasattr(KVConnectorBase_V1, "restore_kv_caches"):
        backend = Backend(allocator)
        return SimpleNamespace(sleep=partial(backend.suspend, 1), wake_up=backend.resume, discard=backend.discard)
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    worker = object.__new__(gpu_worker.Worker)
    worker.__dict__.update(
        _sleep_mode_backend=Backend(allocator),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        synchronize_device=lambda: None,
        _sleep_saved_parameters={},
        _sleep_saved_buffers={},
        _sleep_saved_draft_buffers={},
    )
    return worker


@pytest.mark.parametrize("unmap", [lambda it: it.sleep(), lambda it: it.discard(("kv_cache",))])
def test_no_copy_touches_the_kv_cache_of_an_engine_that_sleeps_and_copies_go_on_when_it_wakes(
    device, store, monkeypatch, unmap
):
    page = device.add_memory(np.full(4 * 4096, 7, np.uint8))
    layouts = [ChunkLayout([LayerPages(page.ctypes.data, 4096, 4096)], blocks_per_chunk=1, block_count=4)]
    copier = open_on(device, background=False)
    transfer = CudaTransfer(layouts, [Region(page.ctypes.data, page.nbytes)], copier=copier, compute_stream=lambda: 0)
    mapped = transfer.map(INSTANCE, store.table(), store.arena)
    assert transfer._pinning[store.arena.address].wait(WAIT_S)
    allocator = FakeAllocator(device, page)
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    connector = SimpleNamespace(unregister_kv_caches=transfer.suspend, restore_kv_caches=transfer.resume)
    compat.tell_of_sleep(connector)
    engine = whoever_tells(allocator, connector, monkeypatch)

    slot, generation = store.put(1, 4096)
    kept = np.random.default_rng(1).bytes(4096)
    begin = store.offset(slot, 4096)
    store.arena.view()[begin : begin + 4096] = kept

    def load(job):
        chunks = ChunkSpec(job, INSTANCE, np.array([slot], np.uint32), np.array([generation], np.uint64), (1,))
        transfer.load(job, mapped, chunks, [KindBlocks(np.array([1]), 0)])

    load(1)
    copier.advance()  # it is with the driver when the engine falls asleep
    load(2)
    unmap(engine)
    load(3)
    engine.wake_up(["weights"])
    load(4)
    copier.advance()
    device.step()
    assert sorted((ended.job, ended.failed) for ended in transfer.finished()) == [(1, []), (2, [0]), (3, [0]), (4, [0])]
    engine.wake_up(["kv_cache"])
    load(5)
    assert transfer.wait([5], WAIT_S)
    assert [(ended.job, ended.failed) for ended in transfer.finished()] == [(5, [])]
    assert page[4096 : 2 * 4096].tobytes() == kept
    assert copier.lost == ""
    transfer.close()
    assert device.alive() == {}


def test_a_connector_hears_of_its_kv_cache_before_it_is_taken_away_and_once_it_is_back(monkeypatch):
    said = []
    transfer = SimpleNamespace(suspend=lambda: said.append("suspend"), resume=lambda: said.append("resume"))
    device = SimpleNamespace(unmap=lambda _: said.append("unmap"), map_again=lambda _: said.append("map"))
    allocator = FakeAllocator(device, None)
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    monkeypatch.setattr(OffloadingConnector, "register_kv_caches", lambda *_: None)
    connector = object.__new__(KVStoreConnector)
    connector._engine = SimpleNamespace()
    connector.connector_worker = SimpleNamespace(worker=WorkerHalf(FakeLink(), transfer))
    connector.register_kv_caches({})
    engine = whoever_tells(allocator, connector, monkeypatch)
    engine.sleep()
    engine.wake_up(["weights"])
    engine.wake_up()
    engine.discard(("cudagraph",))
    assert said == ["suspend", "unmap", "map", "resume"]


def test_what_was_computed_before_a_sleep_is_not_stored_after_it(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    engine = PretendEngine()
    prompt = list(range(1, 26))
    engine.add("a", prompt, max_tokens=3)
    engine.step()
    assert engine.worker._unsubmitted_store_jobs  # vLLM has kept them for the next step, and forgets them no more
    engine.change_weights()  # the resets that come before a sleep
    for memory in engine.memory:
        memory[:] = 0xDD
    engine.run()  # compares what is committed, and what is read
    stored = len(engine.daemon.stored)
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("b", prompt, max_tokens=1)
    assert (stored > 0, engine.daemon.hits > 0) == (True, True)


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
