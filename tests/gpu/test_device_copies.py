"""Bytes of every layout through the arena and back, by every way that they can go.

On the fake device these run everywhere; `-m gpu` runs them on a real one, which compute-sanitizer can watch:

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/gpu/test_device_copies.py
"""

import os

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from connector.config import CopyBackend
from connector.layout import AcrossTp, ChunkLayout, LayerPages
from connector.selfcheck import MEMORY_BYTES, check_device
from kvstore._native import Arena, DeviceCopier, class_bytes, create_memfd
from kvstore.device_bandwidth import measure_device
from kvstore.profiles.measured import Way
from tests.gpu.device import Fake, Gpu, no_gpu
from tests.unit.test_connector_shards import Kind, Model, Rank, contents, mapping, reference_chunk

WAIT_S = 60.0
BLOCKS = 24
CHUNKS = 3
MODELS = {
    "8 KV heads, K and V of a head together": Model((Kind(1, 8, 2048, 0),) * 4, 8, 4, BLOCKS, interleaved=False),
    "8 KV heads, rows of K and of V": Model((Kind(2, 8, 1024, 0),) * 3, 8, 2, BLOCKS, interleaved=False),
    "layers beside one another": Model((Kind(1, 4, 512, 0),) * 4, 4, 4, BLOCKS, interleaved=True),
    "pages of odd sizes": Model((Kind(1, 2, 1001, 3), Kind(1, 2, 333, 1)), 2, 4, BLOCKS, interleaved=False),
    "latents that every rank holds": Model((Kind(1, 1, 656, 48),) * 3, 4, 2, BLOCKS, interleaved=False),
    "fewer heads than ranks": Model((Kind(1, 2, 4096, 0),) * 2, 8, 2, BLOCKS, interleaved=False),
    "large pages": Model((Kind(1, 2, 32 << 10, 0),) * 2, 2, 4, BLOCKS, interleaved=False),
}


class Ranks:
    """Every rank of a tensor parallel size, each with memory on the device."""

    def __init__(self, device, copier: DeviceCopier, model: Model, tp: int) -> None:
        self.model = model
        self.ranks = [Rank(model, tp, number) for number in range(tp)]
        self.memory, self.layouts = [], []
        for number, rank in enumerate(self.ranks):
            memory = device.zeros(rank.memory.nbytes)
            copier.add_memory(memory.data_ptr(), memory.nbytes)
            self.memory.append(memory)
            pages = [LayerPages(at.address + memory.data_ptr(), at.stride_bytes, at.page_bytes) for at in rank.layers]
            cut = AcrossTp(tuple(mapping(kind, model, tp, number, by_head=False) for kind in model.layers), model.lcm)
            self.layouts.append(ChunkLayout(pages, blocks_per_chunk=model.per_chunk, block_count=model.blocks, cut=cut))


def mapped_arena(copier: DeviceCopier, nbytes: int, backend: CopyBackend) -> Arena:
    fd = create_memfd("test-arena", nbytes)
    arena = Arena(fd, nbytes)
    os.close(fd)
    copier.map_arena(arena, None, pin=backend is not CopyBackend.HOST)
    while copier.pin_next(arena.address) == "piece":
        pass
    copier.stop_pinning(arena.address)
    return arena


@pytest.mark.parametrize("backend", list(CopyBackend))
@pytest.mark.parametrize("name", MODELS)
def test_what_one_tp_size_stores_every_other_loads(device, name, backend):
    model = MODELS[name]
    slot_bytes = class_bytes(model.chunk_bytes)
    copier = device.open(backend)
    arena = mapped_arena(copier, CHUNKS * slot_bytes, backend)
    count = CHUNKS * model.per_chunk
    rng = np.random.default_rng(1)
    content = contents(model, count)
    slots = np.arange(CHUNKS, dtype=np.uint64) * np.uint64(slot_bytes) + np.uint64(arena.address)
    chunks = [reference_chunk(model, content[i * model.per_chunk : (i + 1) * model.per_chunk]) for i in range(CHUNKS)]
    jobs = iter(range(1000))

    def copy(fragments, ids, *, is_load):
        sources, destinations = (fragments.arena, fragments.device) if is_load else (fragments.device, fragments.arena)
        job = next(jobs)
        copier.submit(
            job,
            sources,
            destinations,
            fragments.sizes.copy(),
            is_load=is_load,
            compute_stream=device.stream(),
            blocks=ids.astype(np.int64),
        )
        assert copier.wait([job], WAIT_S)
        [ended] = copier.finished()
        assert (ended.failed, ended.settled) == ([], True), copier.lost

    sizes = {tp: Ranks(device, copier, model, tp) for tp in model.tp_sizes}
    for writer in sizes.values():
        ids = rng.permutation(model.blocks)[:count].astype(np.int32)
        with arena.view() as view:
            view[:] = bytes(len(view))
        for rank, memory, layout in zip(writer.ranks, writer.memory, writer.layouts, strict=True):
            for block, pages in zip(ids.tolist(), content, strict=True):
                rank.fill(block, pages)
            memory.copy_(torch.from_numpy(rank.memory))
            copy(layout.written(ids, 0, slots), ids, is_load=False)
        with arena.view() as view:
            stored = np.frombuffer(bytes(view), np.uint8).reshape(CHUNKS, slot_bytes)
        for i, chunk in enumerate(chunks):
            np.testing.assert_array_equal(stored[i, : model.chunk_bytes], chunk)
            assert not stored[i, model.chunk_bytes :].any()
        first = int(rng.integers(0, model.per_chunk))  # begins and ends within a chunk
        used = count - first - 1
        for reader in sizes.values():
            targets = rng.permutation(model.blocks)[:used].astype(np.int32)
            for rank, memory, layout in zip(reader.ranks, reader.memory, reader.layouts, strict=True):
                memory.zero_()
                copy(layout.fragments(targets, first, slots), targets, is_load=True)
                rank.memory[:] = memory.cpu().numpy()
                for i, block in enumerate(targets.tolist()):
                    for layer in range(len(model.layers)):
                        page = rank.page(layer, block)
                        np.testing.assert_array_equal(page, content[first + i][layer][:, rank.heads, :])
                        page[:] = 0
                assert not rank.memory.any(), "bytes outside the wanted blocks were written"
    copier.close()
    arena.close()


@pytest.mark.parametrize("backend", list(CopyBackend))
def test_the_check_before_first_use_passes(device, backend):
    """Behind a compute stream that is busy with writing the same memory."""
    pins = backend is not CopyBackend.HOST
    check_device(device.open(backend), device.zeros(MEMORY_BYTES), device.stream, pins=pins)


@pytest.mark.parametrize("backend", list(CopyBackend))
def test_copies_do_not_wait_for_what_is_computed_after_them(device: Fake | Gpu, backend: CopyBackend) -> None:
    """Each ends while the stream that it was submitted behind computes on."""
    count, nbytes = 64, 8 << 10
    copier, memory = device.open(backend), device.zeros(count * nbytes)
    copier.add_memory(memory.data_ptr(), memory.nbytes)
    arena = mapped_arena(copier, count * nbytes, backend)
    here = np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
    there = here[::-1] + np.uint64(arena.address)  # so that no two lie together
    here = here + np.uint64(memory.data_ptr())

    def submit(job: int, *, is_load: bool) -> None:
        sources, destinations = (there, here) if is_load else (here, there)
        copier.submit(
            job,
            sources,
            destinations,
            np.full(count, nbytes, np.uint64),
            is_load=is_load,
            compute_stream=device.stream(),
            blocks=np.empty(0, np.int64),
        )

    for job, is_load in enumerate((False, True)):  # what a driver does only once may wait for the device
        submit(job, is_load=is_load)
        assert copier.wait([job], WAIT_S)
    for job, is_load in enumerate((False, True), start=2):
        submit(job, is_load=is_load)
        with device.computing_on() as is_over:
            assert copier.wait([job], WAIT_S)
            assert not is_over(), f"the {'load' if is_load else 'store'} ended with what was computed after it"
    assert [(ended.job, ended.failed) for ended in copier.finished()] == [(job, []) for job in range(4)]
    copier.close()
    arena.close()


def test_it_can_be_measured(device):
    ways = {Way.KERNEL: CopyBackend.KERNEL, Way.COPY_ENGINE: CopyBackend.COPY_ENGINE, Way.PAGEABLE: CopyBackend.HOST}
    sizes = (2 << 10, 64 << 10)
    found = measure_device(lambda way: device.open(ways[way]), fragment_bytes=sizes, total_bytes=1 << 20, rounds=2)
    assert len(found.rates) == len(ways) * len(sizes) * 2  # directions
    assert all(rate.bytes_per_s > 0 for rate in found.rates)


@pytest.mark.gpu
def test_copies_on_another_stream_than_the_default_wait_for_it():
    if reason := no_gpu():
        pytest.skip(f"no GPU: {reason}")
    gpu, stream = Gpu(), torch.cuda.Stream()
    memory = gpu.zeros(MEMORY_BYTES)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        check_device(gpu.open(CopyBackend.AUTO), memory, gpu.stream)
