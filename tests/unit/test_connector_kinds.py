"""Jobs over several kinds of chunks: random geometries, chunks that lost blocks, loads that begin in the middle."""

from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("vllm")

from connector.layout import AcrossTp, ChunkLayout, LayerPages, PageMapping, Run, whole_chunks
from connector.messages import ChunkSpec
from connector.transfer import NULL_BLOCK, HostTransfer, KindBlocks, Region
from kvstore._native import class_bytes
from tests.unit.connector_fakes import FakeCopier

UNIT_BYTES = 1 << 20
BLOCKS = 12
POISON = 0xA5


class Kind:
    """One KV cache group of one rank: memory, layout, and the bytes it keeps of each block."""

    def __init__(self, data, per_chunk, tp, rank, lcm):
        heads = data.draw(st.sampled_from([h for h in (1, 2, 4, 8) if h % lcm == 0 or lcm % h == 0]), label="heads")
        layers = data.draw(st.integers(1, 3), label="layers")
        head_bytes = data.draw(st.integers(1, 9), label="head bytes")
        padding = data.draw(st.integers(0, 3), label="padding")
        self.shape = (heads, head_bytes)
        self.make(layers, per_chunk, tp, rank, lcm, padding)

    def make(self, layers, per_chunk, tp, rank, lcm, padding):
        heads, head_bytes = self.shape
        each, copies = max(1, heads // tp), max(1, tp // heads)
        self.first = rank * each if heads >= tp else rank // copies
        self.own = each * head_bytes
        run = Run(0, self.first * head_bytes, self.own, 1, self.own, self.own)
        mapping = PageMapping(heads * head_bytes, 1, heads, (run,), copies, rank % copies)
        stride = self.own + padding
        self.memory = np.zeros((layers, BLOCKS, stride), np.uint8)
        self.layout = ChunkLayout(
            [LayerPages(self.memory[layer].ctypes.data, stride, self.own) for layer in range(layers)],
            blocks_per_chunk=per_chunk,
            block_count=BLOCKS,
            cut=AcrossTp((mapping,) * layers, lcm),
        )

    def like(self, tp, rank, lcm, padding):
        other = object.__new__(Kind)
        other.shape = self.shape
        other.make(len(self.memory), self.layout.blocks_per_chunk, tp, rank, lcm, padding)
        return other

    def fill(self, block, name):
        """What the model keeps of a block: the same whichever rank computes it."""
        heads, head_bytes = self.shape
        for layer in range(len(self.memory)):
            page = np.random.default_rng([name, layer]).integers(1, 256, heads * head_bytes, np.uint8)
            begin = self.first * head_bytes
            self.memory[layer, block, : self.own] = page[begin : begin + self.own]

    def holds(self, block, name):
        before = self.memory[:, block].copy()
        self.fill(block, name)
        same = bool((before == self.memory[:, block]).all())
        self.memory[:, block] = before
        return same


class Ranks:
    """All ranks of one engine, with one arena."""

    def __init__(self, kinds_of_ranks, arena):
        self.kinds = kinds_of_ranks
        self.transfers, self.copiers, self.mapped = [], [], []
        table = SimpleNamespace(unit_bytes=UNIT_BYTES, current=lambda slots, _: b"\1" * len(slots))
        for kinds in kinds_of_ranks:
            copier = FakeCopier()
            regions = [Region(kind.memory.ctypes.data, kind.memory.nbytes) for kind in kinds]
            transfer = HostTransfer([kind.layout for kind in kinds], regions, copier=copier)
            memory = SimpleNamespace(address=arena.ctypes.data, nbytes=arena.nbytes)
            self.mapped.append(transfer.map(b"i" * 16, table, memory))
            self.transfers.append(transfer)
            self.copiers.append(copier)


@st.composite
def tp_sizes(draw):
    lcm = draw(st.sampled_from([1, 2, 4]))
    sizes = [tp for tp in (1, 2, 4) if lcm % tp == 0]
    return lcm, draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=tp_sizes(), per_chunk=st.integers(1, 3), kind_count=st.integers(1, 3))
def test_what_ranks_of_one_size_store_of_every_kind_those_of_another_load(data, sizes, per_chunk, kind_count):
    lcm, writers, readers = sizes
    counts = [data.draw(st.integers(0, 3), label="chunks") for _ in range(kind_count)]
    firsts = [data.draw(st.integers(0, 2), label="first chunk") for _ in range(kind_count)]
    leads = [data.draw(st.integers(0, per_chunk - 1), label="null blocks") if count else 0 for count in counts]
    models = [Kind(data, per_chunk, 1, 0, lcm) for _ in range(kind_count)]
    padding = data.draw(st.integers(0, 3))

    arena = np.full(4 * UNIT_BYTES, POISON, np.uint8)
    places, slots = [], []
    for number, (model, count) in enumerate(zip(models, counts, strict=True)):
        for i in range(count):  # a unit of the arena holds slots of one size class
            slots.append(number * (UNIT_BYTES // 4096) + i)
            places.append(number * UNIT_BYTES + i * class_bytes(model.layout.chunk_bytes))
    spec = ChunkSpec(1, b"i" * 16, np.array(slots, np.uint32), np.ones(len(slots), np.uint64), tuple(counts))

    def ranks(tp):
        return Ranks([[model.like(tp, rank, lcm, padding) for model in models] for rank in range(tp)], arena)

    # Stored: blocks 1.. of the cache, chunk after chunk, without the null blocks that the first one lost.
    engine = ranks(writers)
    blocks = []
    for count, first, lead in zip(counts, firsts, leads, strict=True):
        ids = np.arange(1, 1 + count * per_chunk, dtype=np.int32)[lead:]
        blocks.append(KindBlocks(ids, first * per_chunk + lead))
    given_up = set()
    for kinds, transfer, copier, mapped in zip(
        engine.kinds, engine.transfers, engine.copiers, engine.mapped, strict=True
    ):
        for number, kind in enumerate(kinds):
            for block in blocks[number].ids.tolist():
                kind.fill(block, 100 * number + block)
        left_out = transfer.store(7, mapped, spec, blocks)
        copier.run()
        given_up.add(frozenset(left_out))
    expected_lost, at = set(), 0
    for count, lead in zip(counts, leads, strict=True):
        if lead:
            expected_lost.add(at)
        at += count
    assert given_up == {frozenset(expected_lost)}, "every rank gives up the same"

    position = 0
    for model, count in zip(models, counts, strict=True):
        size = class_bytes(model.layout.chunk_bytes)
        for _ in range(count):
            slot = arena[places[position] : places[position] + size]
            if position in expected_lost:
                assert (slot == POISON).all(), "nothing of a chunk that lost a block is written"
            else:
                assert not (slot[: model.layout.chunk_bytes] == 0).any()
                assert not slot[model.layout.chunk_bytes :].any(), "padding"
            position += 1

    _load_and_compare(data, ranks(readers), spec, counts, firsts, leads, per_chunk)


def _load_and_compare(data, reader, spec, counts, firsts, leads, per_chunk):
    """By ranks of another size, from the middle of the first whole chunk on, and without what is nobody's."""
    wanted, named, first_slot = [], [], 0
    chosen: list[int] = []
    for number, (count, lead) in enumerate(zip(counts, leads, strict=True)):
        lost = 1 if lead else 0
        whole = count - lost
        skip = data.draw(st.integers(0, per_chunk - 1), label="first block wanted") if whole else 0
        ids = np.arange(1 + lost * per_chunk + skip, 1 + count * per_chunk, dtype=np.int32)
        nulls = np.array([data.draw(st.booleans(), label="null") for _ in ids], bool)
        wanted.append(KindBlocks(np.where(nulls, NULL_BLOCK, ids), (firsts[number] + lost) * per_chunk + skip))
        named.append((ids, nulls))
        chosen += range(first_slot + lost, first_slot + count)
        first_slot += count
    whole_counts = tuple(count - (1 if lead else 0) for count, lead in zip(counts, leads, strict=True))
    load = ChunkSpec(2, b"i" * 16, spec.slots[chosen], spec.generations[chosen], whole_counts)
    for kinds, transfer, copier, mapped in zip(
        reader.kinds, reader.transfers, reader.copiers, reader.mapped, strict=True
    ):
        transfer.load(8, mapped, load, wanted)
        copier.run()
        for number, kind in enumerate(kinds):
            ids, nulls = named[number]
            for block, null in zip(ids.tolist(), nulls.tolist(), strict=True):
                if null:
                    assert not kind.memory[:, block].any()
                else:
                    assert kind.holds(block, 100 * number + block), f"kind {number}, block {block}"
            assert not kind.memory[:, NULL_BLOCK].any(), "nothing goes where nobody reads"
            if len(ids):
                assert not kind.memory[:, : ids[0]].any(), "nothing before the first block wanted"


@settings(max_examples=300, deadline=None)
@given(chunks=st.integers(1, 4), per_chunk=st.integers(1, 4), data=st.data())
def test_only_chunks_that_are_certainly_whole_count_as_such(chunks, per_chunk, data):
    """Whatever blocks are null, told as vLLM does: how many are left, and where the first one lies."""
    first_chunk = data.draw(st.integers(0, 3))
    there = [data.draw(st.booleans()) for _ in range(chunks * per_chunk)]
    if not any(there):
        return
    told_first = first_chunk * per_chunk + there.index(True)
    whole = whole_chunks(chunks, sum(there), told_first, per_chunk)
    if told_first // per_chunk != first_chunk:
        return  # the scheduler half gives these up by the position of the first chunk
    for chunk in whole:
        assert all(there[chunk * per_chunk : (chunk + 1) * per_chunk])
    if all(there):
        assert whole == range(chunks)
