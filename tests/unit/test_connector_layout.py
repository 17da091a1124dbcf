"""Copy plans, run byte by byte with numpy over a pretended memory in which every byte says where it belongs."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from connector.layout import ChunkLayout, LayerPages, slot_addresses
from kvstore import _native

PAGE_UNIT = 8


@st.composite
def caches(draw):
    """A KV cache in one flat memory: layers side by side, or interleaved in each block, with or without padding."""
    blocks = draw(st.integers(2, 12))
    pages = [PAGE_UNIT * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))]
    padding = PAGE_UNIT * draw(st.integers(0, 2))
    interleaved = draw(st.booleans())
    layers, at = [], PAGE_UNIT
    stride = sum(pages) + padding
    for page in pages:
        if interleaved:
            layers.append(LayerPages(at, stride, page))
            at += page
        else:
            layers.append(LayerPages(at, page + padding, page))
            at += blocks * (page + padding)
    memory_bytes = PAGE_UNIT + blocks * (sum(pages) + padding * (1 if interleaved else len(pages))) + PAGE_UNIT
    return layers, blocks, memory_bytes


def page_of(memory, layer, block):
    begin = layer.address + block * layer.stride_bytes
    return memory[begin : begin + layer.page_bytes]


def run(fragments, *, source, source_of, destination, destination_of):
    for i in range(len(fragments.sizes)):
        size = int(fragments.sizes[i])
        begin, end = int(source_of[i]), int(destination_of[i])
        destination[end : end + size] = source[begin : begin + size]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_block_comes_back_to_its_place_and_nothing_else_moves(data):
    layers, blocks, memory_bytes = data.draw(caches())
    per_chunk = data.draw(st.integers(1, 3))
    chunk_count = data.draw(st.integers(1, blocks // per_chunk if blocks >= per_chunk else 1))
    if chunk_count * per_chunk > blocks:
        return
    layout = ChunkLayout(layers, blocks_per_chunk=per_chunk, block_count=blocks)
    assert layout.chunk_bytes == per_chunk * sum(layer.page_bytes for layer in layers)
    slot_bytes = layout.chunk_bytes + 8 * data.draw(st.integers(0, 1))
    arena = np.zeros(slot_bytes * chunk_count, np.uint8)
    slots = np.array(data.draw(st.permutations(range(chunk_count))), np.uint64) * np.uint64(slot_bytes)

    written = np.array(data.draw(st.permutations(range(blocks)))[: chunk_count * per_chunk], np.int32)
    device = np.random.default_rng(0).integers(1, 256, memory_bytes, np.uint8)
    store = layout.fragments(written, 7 * per_chunk, slots)
    assert store.nbytes == chunk_count * layout.chunk_bytes
    run(store, source=device, source_of=store.device, destination=arena, destination_of=store.arena)

    first = data.draw(st.integers(0, chunk_count * per_chunk - 1))
    count = data.draw(st.integers(1, chunk_count * per_chunk - first))
    first_chunk = first // per_chunk
    touched = slots[first_chunk : (first + count - 1) // per_chunk + 1]
    targets = np.array(data.draw(st.permutations(range(blocks)))[:count], np.int32)
    other = np.zeros(memory_bytes, np.uint8)
    load = layout.fragments(targets, first, touched)
    run(load, source=arena, source_of=load.arena, destination=other, destination_of=load.device)

    for layer in layers:
        for i in range(count):
            page = page_of(other, layer, targets[i])
            np.testing.assert_array_equal(page, page_of(device, layer, written[first + i]))
            page[:] = 0
    assert not other.any(), "bytes outside the blocks that were asked for were written"


def test_a_chunk_is_layer_by_layer_and_block_by_block():
    layers = [LayerPages(1000, 16, 16), LayerPages(2000, 16, 8)]
    plan = ChunkLayout(layers, blocks_per_chunk=2, block_count=10).fragments(
        np.array([5, 3], np.int32), 0, np.array([100], np.uint64)
    )
    assert plan.device.tolist() == [1080, 1048, 2080, 2048]
    assert plan.arena.tolist() == [100, 116, 132, 140]
    assert plan.sizes.tolist() == [16, 16, 8, 8]


def test_blocks_that_lie_together_are_one_fragment():
    layout = ChunkLayout([LayerPages(0, 16, 16)], blocks_per_chunk=4, block_count=100)
    plan = layout.fragments(np.array([7, 8, 9, 10], np.int32), 0, np.array([4096], np.uint64))
    assert (plan.device.tolist(), plan.arena.tolist(), plan.sizes.tolist()) == ([112], [4096], [64])


def test_blocks_with_padding_between_them_are_not():
    layout = ChunkLayout([LayerPages(0, 24, 16)], blocks_per_chunk=2, block_count=100)
    assert layout.fragments(np.array([7, 8], np.int32), 0, np.array([0], np.uint64)).sizes.tolist() == [16, 16]


@pytest.mark.parametrize(
    ("block_ids", "first_block", "chunks", "said"),
    [
        ([1, 2, 3], 0, 1, "3 blocks from block 0 on, 2 a chunk, do not touch 1 chunks"),
        ([1, 2], 1, 1, "2 blocks from block 1 on, 2 a chunk, do not touch 1 chunks"),
        ([1, 2], 0, 2, "do not touch 2 chunks"),
        ([], 0, 0, "0 blocks"),
        ([1, 10], 0, 1, "block 10, but the cache has 10"),
        ([-1, 1], 0, 1, "block -1, but the cache has 10"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(block_ids, first_block, chunks, said):
    layout = ChunkLayout([LayerPages(0, 16, 16)], blocks_per_chunk=2, block_count=10)
    with pytest.raises(ValueError, match=said):
        layout.fragments(np.array(block_ids, np.int32), first_block, np.zeros(chunks, np.uint64))


def test_slot_addresses_agree_with_the_native_core():
    unit, size = 64 * 4096, 3 * 4096
    slots = np.array([0, 1, 20, 64, 65, 7 * 64 + 5], np.uint32)
    expected = [10_000 + _native.slot_offset(slot, size, unit) for slot in slots.tolist()]
    assert slot_addresses(10_000, slots, size, unit).tolist() == expected
