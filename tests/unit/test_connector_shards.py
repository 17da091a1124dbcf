"""One chunk for every tensor parallel size: what ranks write together is one reference, from which any ranks can read.

The reference knows nothing of ranks: a canonical page is `[row][head][bytes]`; a chunk is its heads dealt to shards.
"""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from connector.layout import AcrossTp, CannotShare, ChunkLayout, LayerPages, PageMapping, PerRank, Run, tp_problem


@dataclass(frozen=True)
class Kind:
    """One layer's canonical page. One head: latents that every rank holds whole."""

    rows: int
    heads: int
    head_bytes: int  # of one row
    padding: int

    @property
    def canonical_bytes(self):
        return self.rows * self.heads * self.head_bytes


@dataclass(frozen=True)
class Model:
    layers: tuple[Kind, ...]
    lcm: int
    per_chunk: int
    blocks: int
    interleaved: bool  # layers lie together in each block's memory, as vLLM packs some models

    @property
    def heads(self):
        return self.layers[0].heads

    @property
    def shards(self):
        return min(self.lcm, self.heads)

    @property
    def chunk_bytes(self):
        return self.per_chunk * sum(kind.canonical_bytes for kind in self.layers)

    @property
    def tp_sizes(self):
        fitting = [tp for tp in range(1, self.lcm + 1) if self.lcm % tp == 0]
        return [tp for tp in fitting if self.heads % tp == 0 or tp % self.heads == 0]


@st.composite
def models(draw):
    heads = draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    lcm = draw(st.sampled_from([*divisors, 2 * heads, 4 * heads]))
    kinds = st.builds(
        Kind,
        rows=st.sampled_from([1, 1, 2, 4]),
        heads=st.just(heads),
        head_bytes=st.integers(1, 5),
        padding=st.integers(0, 3),
    )
    layers = draw(st.lists(kinds, min_size=1, max_size=4))
    return Model(tuple(layers), lcm, draw(st.integers(1, 4)), draw(st.integers(6, 14)), draw(st.booleans()))


def held(model, tp, rank):
    """The heads of one rank, and how many ranks hold them, this one being which of those."""
    if model.heads >= tp:
        each = model.heads // tp
        return range(rank * each, (rank + 1) * each), 1, 0
    replicas = tp // model.heads
    return range(rank // replicas, rank // replicas + 1), replicas, rank % replicas


def mapping(kind, model, tp, rank, *, by_head):
    heads, writers, writer = held(model, tp, rank)
    piece, count = (kind.head_bytes, len(heads)) if by_head else (kind.head_bytes * len(heads), 1)
    local, canonical = len(heads) * kind.head_bytes, kind.heads * kind.head_bytes
    runs = tuple(
        Run(i * piece, heads[0] * kind.head_bytes + i * piece, piece, kind.rows, local, canonical) for i in range(count)
    )
    if len(heads) == kind.heads and not by_head:  # as vLLM says it: nothing left of rows and heads
        runs = (Run(0, 0, kind.canonical_bytes, 1, kind.canonical_bytes, kind.canonical_bytes),)
    return PageMapping(kind.canonical_bytes, kind.rows, kind.heads, runs, writers, writer)


class Rank:
    """One rank's device memory, flat, and its layout."""

    def __init__(self, model, tp, rank, *, by_head=False):
        self.model = model
        self.heads, _, _ = held(model, tp, rank)
        self.layers, at = [], 16
        pages = [kind.rows * len(self.heads) * kind.head_bytes for kind in model.layers]
        padded = [page + kind.padding for page, kind in zip(pages, model.layers, strict=True)]
        for page, stride in zip(pages, padded, strict=True):
            if model.interleaved:
                self.layers.append(LayerPages(at, sum(pages) + model.layers[0].padding, page))
                at += page
            else:
                self.layers.append(LayerPages(at, stride, page))
                at += model.blocks * stride
        self.memory = np.zeros(16 + model.blocks * (sum(padded) + model.layers[0].padding) + 16, np.uint8)
        mappings = tuple(mapping(kind, model, tp, rank, by_head=by_head) for kind in model.layers)
        self.layout = ChunkLayout(
            self.layers,
            blocks_per_chunk=model.per_chunk,
            block_count=model.blocks,
            cut=AcrossTp(mappings, model.lcm),
        )

    def page(self, layer, block):
        pages = self.layers[layer]
        begin = pages.address + block * pages.stride_bytes
        kind = self.model.layers[layer]
        return self.memory[begin : begin + pages.page_bytes].reshape(kind.rows, len(self.heads), kind.head_bytes)

    def fill(self, block, content):
        for layer in range(len(self.layers)):
            self.page(layer, block)[:] = content[layer][:, self.heads, :]


def contents(model, count, seed=0):
    """For each block of a request, each layer's canonical page."""
    rnd = np.random.default_rng(seed)
    return [
        [rnd.integers(1, 256, (kind.rows, kind.heads, kind.head_bytes), np.uint8) for kind in model.layers]
        for _ in range(count)
    ]


def reference_chunk(model, blocks):
    each = model.heads // model.shards
    return np.concatenate(
        [
            block[layer][:, shard * each : (shard + 1) * each, :].ravel()
            for shard in range(model.shards)
            for layer in range(len(model.layers))
            for block in blocks
        ]
    )


def spans(addresses, sizes):
    return [(int(at), int(at) + int(size)) for at, size in zip(addresses, sizes, strict=True)]


def write(model, tp, ids, content, arena, slots, *, first_chunk, by_head=False):
    """All ranks store; returns how often each byte of the arena was written."""
    times = np.zeros(len(arena), np.uint8)
    for rank in (Rank(model, tp, rank, by_head=by_head) for rank in range(tp)):
        for block, pages in zip(ids, content, strict=True):
            rank.fill(block, pages)
        plan = rank.layout.written(np.array(ids, np.int32), first_chunk * model.per_chunk, slots)
        for (begin, end), (to, to_end) in zip(
            spans(plan.device, plan.sizes), spans(plan.arena, plan.sizes), strict=True
        ):
            arena[to:to_end] = rank.memory[begin:end]
            times[to:to_end] += 1
            chunk = max(slot for slot in slots.tolist() if slot <= to)
            own = chunk + rank.layout.range_offset
            assert own <= to, "wrote before its range"
            assert to_end <= own + rank.layout.range_bytes, "wrote after its range"
        for chunk in rank.layout.padded(first_chunk * model.per_chunk, slots).tolist():
            times[int(chunk) + model.chunk_bytes : int(chunk) + model.chunk_bytes + 2] += 1
    return times


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_one_tp_size_writes_every_other_reads(data):
    model = data.draw(models())
    chunk_count = data.draw(st.integers(1, min(2, model.blocks // model.per_chunk)))
    count = chunk_count * model.per_chunk
    ids = data.draw(st.permutations(range(model.blocks)))[:count]
    content = contents(model, count)
    slot_bytes = model.chunk_bytes + 2
    slots = np.array(data.draw(st.permutations(range(chunk_count))), np.uint64) * np.uint64(slot_bytes)
    expected = np.zeros(chunk_count * slot_bytes, np.uint8)
    for i, slot in enumerate(slots.tolist()):
        chunk = reference_chunk(model, content[i * model.per_chunk : (i + 1) * model.per_chunk])
        expected[int(slot) : int(slot) + model.chunk_bytes] = chunk
    for tp in model.tp_sizes:
        arena = np.zeros(len(expected), np.uint8)
        times = write(
            model, tp, ids, content, arena, slots,
            first_chunk=data.draw(st.integers(0, 5)), by_head=data.draw(st.booleans()),
        )  # fmt: skip
        np.testing.assert_array_equal(arena, expected, f"written with TP {tp}")
        assert (times == 1).all(), "each byte of a slot, padding included, is written once"

    first = data.draw(st.integers(0, count - 1))
    used = data.draw(st.integers(1, count - first))
    touched = slots[first // model.per_chunk : (first + used - 1) // model.per_chunk + 1]
    targets = np.array(data.draw(st.permutations(range(model.blocks)))[:used], np.int32)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=used, max_size=used)))
    for tp in model.tp_sizes:
        for rank in (Rank(model, tp, rank) for rank in range(tp)):
            plan = rank.layout.fragments(np.where(wanted, targets, -1), first, touched, wanted=wanted)
            for (to, to_end), (begin, end) in zip(
                spans(plan.device, plan.sizes), spans(plan.arena, plan.sizes), strict=True
            ):
                rank.memory[to:to_end] = expected[begin:end]
            for i in np.flatnonzero(wanted).tolist():
                for layer in range(len(model.layers)):
                    page = rank.page(layer, int(targets[i]))
                    np.testing.assert_array_equal(page, content[first + i][layer][:, rank.heads, :], f"TP {tp}")
                    page[:] = 0
            assert not rank.memory.any(), "bytes outside the wanted blocks were written"


@settings(max_examples=100, deadline=None)
@given(models())
def test_the_ranks_ranges_tile_one_chunk(model):
    for tp in model.tp_sizes:
        layouts = [Rank(model, tp, rank).layout for rank in range(tp)]
        assert {layout.chunk_bytes for layout in layouts} == {model.chunk_bytes}
        assert {layout.shard_count for layout in layouts} == {model.shards}
        ranges = sorted({(layout.range_offset, layout.range_offset + layout.range_bytes) for layout in layouts})
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == model.chunk_bytes
        assert len(ranges) == min(tp, model.heads)


def test_eight_heads_at_every_tp_size():
    """K and V of a head in separate rows, as some backends keep them; 16 pairs, each exact."""
    model = Model((Kind(2, 8, 4, 0), Kind(2, 8, 4, 0)), 8, 2, 6, interleaved=False)
    assert model.tp_sizes == [1, 2, 4, 8]
    content = contents(model, 2)
    written = {}
    for tp in model.tp_sizes:
        arena = np.zeros(model.chunk_bytes, np.uint8)
        write(model, tp, [5, 2], content, arena, np.zeros(1, np.uint64), first_chunk=0)
        written[tp] = arena.tobytes()
    assert len(set(written.values())) == 1
    assert written[1] == reference_chunk(model, content).tobytes()


def test_mla_is_stored_once_and_ranks_take_turns():
    model = Model((Kind(1, 1, 656, 0),), 4, 2, 8, interleaved=False)
    ranks = [Rank(model, 4, rank).layout for rank in range(4)]
    ids, slots = np.arange(8, dtype=np.int32), np.arange(4, dtype=np.uint64) * np.uint64(4096)
    assert [rank.written(ids, 0, slots).arena.tolist() for rank in ranks] == [[0], [4096], [8192], [12288]]
    assert [rank.written(ids[:2], 6, slots[:1]).nbytes for rank in ranks] == [0, 0, 0, model.chunk_bytes]
    assert [rank.padded(2, slots[:1]).tolist() for rank in ranks] == [[], [0], [], []]
    for rank in ranks:
        assert rank.fragments(ids, 0, slots).nbytes == 4 * model.chunk_bytes, "all read"


def test_a_rank_with_its_own_shard_moves_blocks_that_lie_together_as_one_fragment():
    model = Model((Kind(1, 8, 16, 0), Kind(1, 8, 16, 0)), 4, 4, 100, interleaved=False)
    plan = Rank(model, 4, 1).layout.fragments(np.array([7, 8, 9, 10], np.int32), 0, np.zeros(1, np.uint64))
    page = 2 * 16
    assert plan.sizes.tolist() == [4 * page, 4 * page]
    assert plan.arena.tolist() == [8 * page, 12 * page]  # the second of four shards, layer after layer


def test_a_rank_with_several_shards_has_a_fragment_per_shard_block_and_layer():
    model = Model((Kind(1, 8, 16, 0), Kind(1, 8, 16, 0)), 4, 4, 100, interleaved=False)
    plan = Rank(model, 1, 0, by_head=True).layout.fragments(np.arange(4, dtype=np.int32), 0, np.zeros(1, np.uint64))
    assert len(plan.sizes) == 4 * 4 * 2


def test_layers_packed_block_by_block_are_one_fragment_with_one_block_a_chunk():
    layers = [LayerPages(100, 48, 16), LayerPages(116, 48, 32)]
    layout = ChunkLayout(layers, blocks_per_chunk=1, block_count=10)
    plan = layout.fragments(np.array([3, 4], np.int32), 0, np.array([1000, 2000], np.uint64))
    assert (plan.device.tolist(), plan.sizes.tolist()) == ([244, 292], [48, 48])


def test_layers_that_touch_only_in_the_first_block_are_two():
    layers = [LayerPages(100, 48, 16), LayerPages(116, 64, 32)]
    layout = ChunkLayout(layers, blocks_per_chunk=1, block_count=10)
    plan = layout.fragments(np.array([3], np.int32), 0, np.array([1000], np.uint64))
    assert (plan.device.tolist(), plan.sizes.tolist()) == ([244, 308], [16, 32])


def test_pages_that_cannot_be_shared_lie_rank_after_rank():
    layers = [LayerPages(0, 16, 16), LayerPages(1000, 8, 8)]
    ranks = [ChunkLayout(layers, blocks_per_chunk=2, block_count=10, cut=PerRank(rank, ranks=3)) for rank in range(3)]
    assert [(rank.range_offset, rank.range_bytes, rank.chunk_bytes) for rank in ranks] == [
        (0, 48, 144),
        (48, 48, 144),
        (96, 48, 144),
    ]
    plan = ranks[1].written(np.array([4, 5], np.int32), 0, np.zeros(1, np.uint64))
    assert (plan.device.tolist(), plan.arena.tolist(), plan.sizes.tolist()) == ([64, 1032], [48, 80], [32, 16])


def test_one_rank_alone_has_the_same_chunk_with_and_without_a_cut():
    model = Model((Kind(1, 8, 4, 2), Kind(1, 8, 3, 0)), 1, 3, 9, interleaved=False)
    rank = Rank(model, 1, 0)
    plain = ChunkLayout(rank.layers, blocks_per_chunk=3, block_count=9)
    ids, slots = np.array([4, 5, 1], np.int32), np.array([4096], np.uint64)
    for one, other in zip(
        (rank.layout.written(ids, 0, slots), rank.layout.padded(0, slots)),
        (plain.written(ids, 0, slots), plain.padded(0, slots)),
        strict=True,
    ):
        assert str(one) == str(other)


def whole(heads, *, canonical_bytes=48, rows=1):
    return PageMapping(canonical_bytes, rows, heads, (Run(0, 0, 48, 1, 48, 48),))


@pytest.mark.parametrize(
    ("mappings", "tp_lcm_size", "said"),
    [
        ([whole(6)], 4, "6 KV heads and tp_lcm_size=4 have no common shards"),
        ([whole(4)], 6, "4 KV heads and tp_lcm_size=6 have no common shards"),
        ([whole(8), whole(2)], 8, r"layers of one KV cache group would have \[2, 8\] shards"),
        ([whole(4, rows=5)], 4, "48 bytes is not 5 x 4 equal parts"),
        ([PageMapping(96, 1, 4, (Run(0, 0, 24, 1, 24, 24),))], 4, "does not cover a page of 48 bytes exactly once"),
        ([PageMapping(96, 1, 4, (Run(0, 0, 48, 2, 0, 48),))], 4, "does not cover a page of 48 bytes exactly once"),
        ([PageMapping(96, 1, 4, (Run(0, 12, 48, 1, 48, 48),))], 4, "no whole shards of 24 bytes"),
        ([PageMapping(96, 1, 4, (Run(0, 0, 24, 2, 24, 48),))], 4, "no whole shards of 24 bytes"),
        (
            [PageMapping(48, 1, 1, (Run(0, 0, 48, 1, 48, 48),), 2, writer) for writer in (0, 1)],
            4,
            r"take turns differently in layers of one KV cache group: \[\(2, 0\), \(2, 1\)\]",
        ),
        (
            [PageMapping(96, 1, 4, (Run(0, at, 48, 1, 48, 48),)) for at in (0, 48)],
            4,
            r"give this rank different shards: \[\(0, 2\), \(2, 4\)\]",
        ),
    ],
)
def test_a_mapping_that_is_no_run_of_whole_shards_is_refused(mappings, tp_lcm_size, said):
    layers = [LayerPages(0, 48, 48)] * len(mappings)
    with pytest.raises(CannotShare, match=said):
        ChunkLayout(layers, blocks_per_chunk=1, block_count=4, cut=AcrossTp(tuple(mappings), tp_lcm_size))


@pytest.mark.parametrize(
    ("tp", "lcm", "heads", "said"),
    [
        (1, 1, 8, None),
        (2, 8, 8, None),
        (4, 8, 2, None),
        (8, 8, 1, None),
        (4, 6, 8, "tensor_parallel_size=4 does not divide tp_lcm_size=6; .* tp_lcm_size=8"),
        (2, 6, 8, "tp_lcm_size=6 neither divides the model's 8 KV heads nor is a multiple of them; .* tp_lcm_size=8"),
        (1, 5, 8, "tp_lcm_size=5 neither .* tp_lcm_size=4"),
        (8, 4, 8, "does not divide tp_lcm_size=4; .* tp_lcm_size=8"),
        (1, 9, 8, "tp_lcm_size=8"),
    ],
)
def test_a_tp_size_or_head_count_that_does_not_fit_names_the_nearest_value_that_does(tp, lcm, heads, said):
    problem = tp_problem(tp, lcm, heads)
    if said is None:
        assert problem is None
    else:
        with pytest.raises(ValueError, match=said):
            raise ValueError(problem)


@pytest.mark.parametrize(("ids", "first", "said"), [([1, 2, 3], 1, "unwritten"), ([1, 2, 3], 0, "unwritten")])
def test_a_store_of_half_a_chunk_is_refused(ids, first, said):
    layout = ChunkLayout([LayerPages(0, 8, 8)], blocks_per_chunk=2, block_count=8)
    with pytest.raises(ValueError, match=said):
        layout.written(np.array(ids, np.int32), first, np.zeros(2, np.uint64))
