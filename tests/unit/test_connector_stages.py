"""Pipeline stages: ranks with different layers agree on one chunk that each byte of theirs has one place in."""

import threading

import numpy as np
import pytest

from connector.layout import ChunkLayout, LayerPages, PerRank
from connector.stages import document_of_all_stages, page_bytes_of_ranks

WAIT_S = 60.0


def in_every_rank(ranks, function):
    """What `function(rank, gather)` returns in each rank; all run at once and meet in `gather`."""
    given, results = {}, {}
    barrier = threading.Barrier(ranks)

    def run(rank):
        def gather(value):
            given[rank] = value
            barrier.wait(WAIT_S)
            gathered = [given[i] for i in range(ranks)]
            barrier.wait(WAIT_S)
            return gathered

        results[rank] = function(rank, gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [results[rank] for rank in range(ranks)]


def test_every_rank_learns_what_all_keep_of_each_kind():
    own = [[100, 30], [60, 30], [60, 20]]
    found = in_every_rank(3, lambda rank, gather: page_bytes_of_ranks(own[rank], 3, gather))
    assert found == [[(100, 60, 60), (30, 30, 20)]] * 3


def test_a_stage_without_a_layer_of_a_kind_is_refused_and_so_are_foreign_ranks():
    with pytest.raises(ValueError, match=r"without a layer of KV cache group 1 \(\(4, 0\) bytes a block by rank\)"):
        page_bytes_of_ranks([1, 4], 2, lambda _: [[1, 4], [2, 0]])
    with pytest.raises(ValueError, match="has 2 ranks and meets 4"):
        page_bytes_of_ranks([1], 2, lambda _: [[1]] * 4)


def test_the_document_is_one_and_names_the_layers_of_all_stages():
    def document(layers):
        return in_every_rank(2, lambda rank, gather: document_of_all_stages({"m": 1, "layers": layers[rank]}, gather))

    one, same = document([["a"], ["b", "c"]])
    assert one == same
    assert document([["a"], ["b"]])[0] != one
    assert document([["a", "b"], ["c"]])[0] != one


def test_ranks_of_different_sizes_write_each_byte_of_a_chunk_once():
    block_count, per_chunk, sizes = 7, 3, ([24, 8], [16], [8, 8, 40])
    of_ranks = tuple(map(sum, sizes))
    arena = np.zeros(per_chunk * sum(of_ranks), np.uint8)
    end = 0
    for rank, pages in enumerate(sizes):
        memory = [np.full((block_count, nbytes), 1, np.uint8) for nbytes in pages]
        layers = [LayerPages(each.ctypes.data, each.shape[1], each.shape[1]) for each in memory]
        layout = ChunkLayout(
            layers, blocks_per_chunk=per_chunk, block_count=block_count, cut=PerRank(rank, 3, of_ranks)
        )
        assert (layout.chunk_bytes, layout.range_offset) == (arena.nbytes, end)
        end += layout.range_bytes
        written = layout.written(np.array([5, 0, 6]), 0, np.array([arena.ctypes.data], np.uint64))
        for at, nbytes in zip(written.arena - np.uint64(arena.ctypes.data), written.sizes, strict=True):
            arena[int(at) : int(at) + int(nbytes)] += 1
    assert end == arena.nbytes
    assert (arena == 1).all()
