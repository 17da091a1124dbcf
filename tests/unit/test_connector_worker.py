"""The worker half with the native core: a real arena, a real table, and a KV cache in numpy.

With real copy threads, and with the copier for CUDA on a fake device, whose work is done late and in random order.
"""

import ctypes
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)

from connector import worker as worker_module
from connector.config import CopyBackend
from connector.cuda import CudaTransfer, open_copier
from connector.messages import ChunkSpec, WorkerOutcomes
from connector.pages import rank_pages
from connector.transfer import HostTransfer
from connector.worker import WorkerHalf
from kvstore._native import POISON
from kvstore.logs import INTERVAL_S, LINES_MAX
from tests.unit.connector_fakes import FakeLink
from tests.unit.fake_cuda import FakeDevice
from tests.unit.native_store import INSTANCE, native_store

BLOCKS = 24
PAGES = (1000, 520)  # two layers; not multiples of anything
PER_CHUNK = 3
CHUNK_BYTES = PER_CHUNK * sum(PAGES)
GROUP = 1


@pytest.fixture(autouse=True)
def log_clock(monkeypatch):
    """In seconds; the log is as nobody had written to it."""
    now = [0.0]
    monkeypatch.setattr(worker_module.line_limit, "_places", {})
    monkeypatch.setattr(worker_module.line_limit, "_clock", lambda: now[0])
    return now


def kv_caches(fill):
    """As vLLM hands them over: one allocation, layers side by side, pages padded to 1024."""
    memory = torch.zeros(2 * BLOCKS * 1024, dtype=torch.int8)
    tensors, refs = [], []
    for layer, page in enumerate(PAGES):
        tensor = memory[layer * BLOCKS * 1024 :].as_strided((BLOCKS, 1024), (1024, 1))
        if fill:
            tensor[:, :page] = torch.from_numpy(
                np.random.default_rng(layer).integers(-128, 128, (BLOCKS, page), np.int8)
            )
        tensors.append(CanonicalKVCacheTensor(tensor, 1024))
        refs.append(CanonicalKVCacheRef(layer, page))
    return CanonicalKVCaches(tensors, [refs])


class OnCuda:
    """The fake device of a test, and how its ranks copy. `None` in its place: on the CPU platform."""

    def __init__(self, backend):
        self.backend = backend
        self.device = FakeDevice()
        self.transfers = []

    def transfer(self, pages):
        for region in pages.regions:
            self.device.add_memory(np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address)))
        copier = open_copier(0, self.backend, library=self.device.library, kernels=b"any", pin_piece_bytes=64 * 8192)
        transfer = CudaTransfer(
            [pages.layout],
            pages.regions,
            copier=copier,
            pins=self.backend is not CopyBackend.HOST,
            compute_stream=lambda: 0,
        )
        self.transfers.append(transfer)
        return transfer


@pytest.fixture(params=["cpu", *CopyBackend])
def on_cuda(request):
    """Every test that uses it is run on each platform and with each backend."""
    if request.param == "cpu":
        yield None
        return
    on_cuda = OnCuda(CopyBackend(request.param))
    with on_cuda.device.running():
        yield on_cuda
        for transfer in on_cuda.transfers:
            transfer.close()
    assert on_cuda.device.alive() == {}


class Rank:
    def __init__(self, store, on_cuda, *, fill, caches=None, ranks=1):
        self.caches = kv_caches(fill) if caches is None else caches
        pages = rank_pages(
            self.caches,
            blocks_per_chunk=PER_CHUNK,
            group=KVCacheGroupSpec(
                ["a", "b"], MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.int8)
            ),
            kv_caches=dict.fromkeys("ab", torch.empty(0)),
            tp_lcm_size=1,
            rank=0,
            ranks=ranks,
        )
        self.transfer = on_cuda.transfer(pages) if on_cuda else HostTransfer([pages.layout], pages.regions)
        self.link = FakeLink(self.transfer.map(INSTANCE, store.table(), store.arena))
        self.half = WorkerHalf(self.link, self.transfer)

    def page(self, layer, block):
        return self.caches.tensors[layer].tensor[block, : PAGES[layer]].numpy()

    def finish(self, *jobs):
        self.half.wait(set(jobs))
        return sorted(self.half.get_finished(), key=lambda result: result.job_id)


@pytest.fixture
def store():
    with native_store(64 * 8 * 8192, verify=True) as store:
        yield store


@pytest.fixture
def rank(store, on_cuda):
    rank = Rank(store, on_cuda, fill=True)
    yield rank
    rank.transfer.close()


def granted(store, count, ticket=1):
    return spec_of(store.index.grant(GROUP, CHUNK_BYTES, count), ticket)


def spec_of(places, ticket=1, instance=INSTANCE):
    return ChunkSpec(
        ticket,
        instance,
        np.array([slot for slot, _ in places], np.uint32),
        np.array([generation for _, generation in places], np.uint64),
        (len(places),),
    )


def blocks(ids, first):
    return GPULoadStoreSpec(list(ids), [len(ids)], [first])


def abort(store, spec):
    store.index.abort(GROUP, list(zip(spec.slots.tolist(), spec.generations.tolist(), strict=True)))


def test_layout_and_regions_are_those_of_the_engines_tensors(rank):
    assert rank.transfer.layouts[0].chunk_bytes == CHUNK_BYTES
    assert rank.transfer.layouts[0].block_count == BLOCKS


def test_what_one_engine_stores_another_loads(store, on_cuda, rank):
    written = [7, 3, 4, 20, 0, 21]
    spec = granted(store, 2)
    assert rank.half.submit_store(11, blocks(written, 2 * PER_CHUNK), spec)
    [result] = rank.finish(11)
    assert (result.job_id, result.success, result.transfer_size) == (11, True, 2 * 8192)  # padding included
    assert rank.half.take_failed() == {}

    other = Rank(store, on_cuda, fill=False)
    read = [5, 6, 1, 2]  # blocks 1 to 4 of the six: the end of one chunk and the beginning of the next
    assert other.half.submit_load(12, spec, blocks(read, 2 * PER_CHUNK + 1))
    [result] = other.finish(12)
    assert result.success
    assert other.half.take_failed() == {}
    assert other.half.take_unloaded_blocks() == set()
    for layer in range(2):
        for i, block in enumerate(read):
            np.testing.assert_array_equal(other.page(layer, block), rank.page(layer, written[1 + i]))
    untouched = set(range(BLOCKS)) - set(read)
    assert not any(other.page(layer, block).any() for layer in range(2) for block in untouched)
    other.transfer.close()
    abort(store, spec)


def test_the_padding_of_a_slot_is_zeroed(store, rank):
    spec = granted(store, 1)
    begin = store.offset(int(spec.slots[0]), CHUNK_BYTES)
    slot = np.frombuffer(store.arena.view(), np.uint8)[begin : begin + 8192]
    assert (slot[CHUNK_BYTES:] == POISON).all()
    rank.half.submit_store(1, blocks([0, 1, 2], 0), spec)
    rank.finish(1)
    assert not slot[CHUNK_BYTES:].any()
    del slot
    abort(store, spec)


def test_ranks_that_hold_the_same_bytes_take_turns_and_each_reports_the_whole_job(store, on_cuda):
    ranks = []
    for number in range(2):
        caches = kv_caches(fill=True)
        for ref in caches.group_data_refs[0]:
            page = ref.page_size_bytes
            ref.mapping = CanonicalPageMapping(page, page, (CopyRun(0, 0, page, 1, page, page),), 2, number, True)
        ranks.append(Rank(store, on_cuda, fill=True, caches=caches, ranks=2))
    spec, written = granted(store, 1), [7, 3, 4]
    begin = store.offset(int(spec.slots[0]), CHUNK_BYTES)
    slot = np.frombuffer(store.arena.view(), np.uint8)[begin : begin + 8192]
    for rank, nbytes in zip(ranks, (0, 8192), strict=True):  # the request's fifth and sixth chunk belong to 0 and 1
        assert (slot == POISON).all()
        rank.half.submit_store(1, blocks(written, 5 * PER_CHUNK), spec)
        [result] = rank.finish(1)
        assert (result.success, result.transfer_size) == (True, nbytes)
        assert rank.half.take_failed() == {}
    pages = [ranks[0].page(layer, block).view(np.uint8) for layer in range(2) for block in written]
    np.testing.assert_array_equal(slot, np.concatenate([*pages, np.zeros(8192 - CHUNK_BYTES, np.uint8)]))
    for rank in ranks:
        rank.half.submit_load(2, spec, blocks([10, 11], 5 * PER_CHUNK + 1))
        rank.finish(2)
        np.testing.assert_array_equal(rank.page(1, 11), rank.page(1, 4))
        rank.transfer.close()
    del slot
    abort(store, spec)


def test_a_slot_that_was_handed_on_meanwhile_fails_its_chunk_and_all_blocks_after_it(store, rank):
    spec = granted(store, 3)
    rank.half.submit_store(1, blocks(range(9), 0), spec)
    rank.finish(1)
    stale = ChunkSpec(2, INSTANCE, spec.slots, spec.generations - np.array([0, 1, 0], np.uint64), spec.counts)
    ids = [10, 11, 12, 13, 14, 15, 16]  # from the second block of the first chunk on, to the middle of the last
    rank.half.submit_load(2, stale, blocks(ids, 1))
    [result] = rank.finish(2)
    assert result.success  # vLLM asserts that; the truth travels beside it
    assert rank.half.take_failed() == {2: {1}}
    assert rank.half.take_unloaded_blocks() == {12, 13, 14, 15, 16}
    assert rank.half.take_failed() == {}
    assert rank.half.take_unloaded_blocks() == set()
    abort(store, spec)


def test_a_store_into_a_slot_that_was_handed_on_is_a_failed_store(store, rank):
    spec = granted(store, 1)
    stale = ChunkSpec(1, INSTANCE, spec.slots, spec.generations - np.uint64(1), spec.counts)
    rank.half.submit_store(1, blocks([0, 1, 2], 0), stale)
    rank.finish(1)
    assert rank.half.take_failed() == {1: {0}}
    assert rank.half.take_unloaded_blocks() == set()
    abort(store, spec)


@pytest.mark.parametrize("current", ["another daemon", "none"])
def test_a_job_of_a_daemon_that_is_not_mapped_fails_without_copying(rank, current, caplog):
    if current == "none":
        rank.link.current = None
    before = [tensor.tensor.clone() for tensor in rank.caches.tensors]
    spec = spec_of([(0, 1), (1, 1)], instance=INSTANCE if current == "none" else b"another-instance")
    assert rank.half.submit_load(5, spec, blocks(range(6), 0))
    assert rank.half.submit_store(6, blocks(range(6), 0), spec)
    assert [(result.job_id, result.success) for result in rank.finish(5, 6)] == [(5, True), (6, True)]
    assert rank.half.take_failed() == {5: {0, 1}, 6: {0, 1}}
    assert rank.half.take_unloaded_blocks() == {0, 1, 2, 3, 4, 5}
    assert all(torch.equal(old, new.tensor) for old, new in zip(before, rank.caches.tensors, strict=True))
    assert "has gone" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        blocks([0, 1], 0),  # a block that nobody would write
        blocks([0, 1, 2], 1),  # not where a chunk begins
        blocks([0, 1, 2, 3], 0),
        blocks([0, 1, BLOCKS], 0),
    ],
)
def test_a_store_that_does_not_fill_its_chunks_fails_without_copying(store, rank, wrong):
    spec = granted(store, 1)
    rank.half.submit_store(1, wrong, spec)
    assert [result.success for result in rank.finish(1)] == [True]
    assert rank.half.take_failed() == {1: {0}}
    begin = store.offset(int(spec.slots[0]), CHUNK_BYTES)
    assert (np.frombuffer(store.arena.view(), np.uint8)[begin : begin + 8192] == POISON).all()
    abort(store, spec)


def test_a_slot_outside_the_arena_fails_without_copying(rank):
    rank.half.submit_load(1, spec_of([(2**31, 1)]), blocks([0, 1, 2], 0))
    rank.finish(1)
    assert rank.half.take_failed() == {1: {0}}


def test_wait_takes_finished_and_unknown_jobs(store, rank):
    spec = granted(store, 1)
    rank.half.submit_store(1, blocks([0, 1, 2], 0), spec)
    rank.half.wait({1, 99})
    rank.half.wait({1, 99})
    assert [result.job_id for result in rank.half.get_finished()] == [1]
    rank.half.wait({1})
    abort(store, spec)


def test_losing_the_daemon_ends_what_runs_and_the_next_one_is_used(store, rank):
    spec = granted(store, 1)
    mapped, rank.link.current = rank.link.current, None
    rank.transfer.unmap(mapped)
    rank.half.submit_store(1, blocks([0, 1, 2], 0), spec)
    rank.finish(1)
    assert rank.half.take_failed() == {1: {0}}
    rank.link.current = rank.transfer.map(INSTANCE, store.table(), store.arena)
    rank.half.submit_store(2, blocks([0, 1, 2], 0), spec)
    rank.finish(2)
    assert rank.half.take_failed() == {}
    abort(store, spec)


def test_a_load_that_must_end_within_the_step_is_refused(rank):
    with pytest.raises(AssertionError, match="reported after its bytes were used"):
        rank.half.submit_load(1, spec_of([(0, 1)]), blocks([0, 1, 2], 0), expedited=True)
    assert rank.half.get_finished() == []


def test_an_unexpected_error_ends_the_job_and_not_the_engine(rank, caplog):
    rank.half._transfer = SimpleNamespace(
        load=lambda *_: 1 / 0, layouts=rank.transfer.layouts, finished=lambda: [], wait=lambda *_: True
    )
    assert rank.half.submit_load(1, spec_of([(0, 1)]), blocks([0, 1, 2], 0))
    rank.finish(1)
    assert rank.half.take_failed() == {1: {0}}
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("fault", ["no daemon", "an error"])
def test_a_fault_of_every_job_is_a_few_lines_of_the_log(rank, fault, caplog, log_clock):
    if fault == "no daemon":
        rank.link.current = None

    def fail(first, count):
        for job in range(first, first + count):
            rank.half.submit_load(job, spec_of([(2**31, 1)]), blocks([0, 1, 2], 0))
            assert rank.half.get_finished()
        return len(said())

    def said():  # threads of other tests may speak beside this one
        return [record for record in caplog.records if record.threadName == threading.current_thread().name]

    assert fail(0, 500) == LINES_MAX
    log_clock[0] = INTERVAL_S
    assert fail(500, 1) == LINES_MAX + 1
    assert f"{500 - LINES_MAX} more like this" in said()[-1].message


# ---- what travels


def test_a_chunk_failed_when_it_failed_on_any_rank():
    one = WorkerOutcomes({1: 1, 2: 1}, failed_chunks={1: {3}})
    other = WorkerOutcomes({1: 1, 3: 1}, failed_chunks={1: {0}, 3: {1}})
    both = one.aggregate(other)
    assert isinstance(both, WorkerOutcomes)
    assert both.completed_jobs == {1: 2, 2: 1, 3: 1}
    assert both.failed_chunks == {1: {0, 3}, 3: {1}}
    assert one.failed_chunks == {1: {3}}
    assert one.aggregate(OffloadingWorkerMetadata({1: 1})).failed_chunks == {1: {3}}


def test_messages_survive_the_way_between_processes():
    spec = pickle.loads(pickle.dumps(spec_of([(3, 2**63), (7, 9)], ticket=5)))
    assert (spec.ticket, spec.instance_id) == (5, INSTANCE)
    assert spec.slots.tolist() == [3, 7]
    assert spec.generations.tolist() == [2**63, 9]
    outcomes = pickle.loads(pickle.dumps(WorkerOutcomes({1: 1}, failed_chunks={1: {0}})))
    assert (outcomes.completed_jobs, outcomes.failed_chunks) == ({1: 1}, {1: {0}})
