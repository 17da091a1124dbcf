"""Real KVCacheSpecs through vLLM's own derivation of page mappings: ranks of every tensor parallel size, one chunk."""

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from connector.pages import RankPages, rank_pages

BLOCKS = 6
TOKENS = 4
PER_CHUNK = 2
LAYERS = ["layers.0", "layers.1"]


@dataclass
class Kind:
    """A model's attention: `spec` makes one rank's KVCacheSpec, `heads` is what all ranks have together."""

    spec: type[AttentionSpec]
    heads: int
    options: dict[str, Any] = field(default_factory=dict)
    page: str = "heads outermost"
    padding: int = 0
    dcp: int = 1

    def rank_spec(self, tp: int) -> AttentionSpec:
        options = {"head_size": 8, "dtype": torch.float32, **self.options}
        spec = self.spec(block_size=TOKENS, num_kv_heads=max(1, self.heads // tp), **options)
        if not self.padding:
            return spec
        padded = spec.unpadded_page_size_bytes + self.padding
        return self.spec(block_size=TOKENS, num_kv_heads=max(1, self.heads // tp), page_size_padded=padded, **options)


class Rank:
    """One rank's KV cache as vLLM would allocate and register it."""

    def __init__(self, kind: Kind, tp: int, rank: int, tp_lcm_size: int) -> None:
        spec = kind.rank_spec(tp)
        self.page_bytes = spec.unpadded_page_size_bytes
        self.stride = spec.page_size_bytes
        group = KVCacheGroupSpec(LAYERS, spec)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=kind.dcp,
                cp_kv_cache_interleave_size=1,
                world_size=tp,
                rank=rank,
            ),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: kind.heads),
        )
        self.memory = {name: torch.zeros(BLOCKS * self.stride, dtype=torch.int8) for name in LAYERS}
        kv_caches = {name: _view(memory, spec, kind.page) for name, memory in self.memory.items()}
        made: list[Any] = []
        worker = OffloadingConnectorWorker(
            SimpleNamespace(replicated_layout=False, get_worker=made.append),
            config,
            KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]),
        )
        worker.register_kv_caches(kv_caches)
        self.pages: RankPages = rank_pages(
            made[0],
            blocks_per_chunk=PER_CHUNK,
            group=group,
            kv_caches=kv_caches,
            tp_lcm_size=tp_lcm_size,
            rank=rank,
            ranks=tp,
        )
        self.layout = self.pages.layout

    def page(self, layer: int, block: int) -> np.ndarray:
        memory = self.memory[LAYERS[layer]].numpy().view(np.uint8)
        return memory[block * self.stride : block * self.stride + self.page_bytes]


def _view(memory: torch.Tensor, spec: AttentionSpec, page: str) -> torch.Tensor:
    dtype = spec.dtype
    element = memory.view(dtype)
    content = spec.state_content_size_bytes // element.element_size()
    heads, stride = spec.num_kv_heads, spec.page_size_bytes // element.element_size()
    if page == "heads outermost":
        states = spec.num_states
        return element.as_strided((BLOCKS, heads, states, content), (stride, states * content, content, 1))
    if page == "tokens outermost":
        return element.as_strided((BLOCKS, heads, TOKENS, content), (stride, content, heads * content, 1))
    assert page == "K, then V"
    size = content // 2
    strides = (stride, heads * TOKENS * size, size, TOKENS * size, 1)
    return element.as_strided((BLOCKS, 2, TOKENS, heads, size), strides)


def held(kind: Kind, tp: int, rank: int) -> range:
    each = max(1, kind.heads // tp)
    first = rank * each if kind.heads >= tp else rank // (tp // kind.heads)
    return range(first, first + each)


def rows(kind: Kind) -> int:
    return 2 if kind.page == "K, then V" else 1


def contents(kind: Kind) -> list[list[np.ndarray]]:
    """[block][layer]: the page of all heads, as [row][head][bytes]."""
    page_bytes = kind.rank_spec(1).unpadded_page_size_bytes
    rnd = np.random.default_rng(0)
    shape = (rows(kind), kind.heads, page_bytes // rows(kind) // kind.heads)
    return [[rnd.integers(0, 256, shape, np.uint8) for _ in LAYERS] for _ in range(PER_CHUNK)]


def copied(sources: np.ndarray, destinations: np.ndarray, sizes: np.ndarray) -> None:
    for source, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(destination, source, size)


MODELS = [
    pytest.param(Kind(FullAttentionSpec, 8), 8, 8, id="as many heads as ranks"),
    pytest.param(Kind(FullAttentionSpec, 8), 4, 4, id="more heads than ranks"),
    pytest.param(Kind(FullAttentionSpec, 8, padding=32), 4, 4, id="padded pages"),
    pytest.param(Kind(FullAttentionSpec, 2), 8, 2, id="fewer heads than ranks"),
    pytest.param(Kind(FullAttentionSpec, 4, page="K, then V"), 4, 4, id="K and V apart"),
    pytest.param(Kind(FullAttentionSpec, 4, {"dtype": torch.bfloat16}), 2, 2, id="bfloat16"),
    pytest.param(Kind(SlidingWindowSpec, 4, {"sliding_window": 8}), 4, 4, id="sliding window"),
    pytest.param(Kind(ChunkedLocalAttentionSpec, 4, {"attention_chunk_size": 8}), 4, 4, id="chunked local attention"),
    pytest.param(Kind(MLAAttentionSpec, 1, {"head_size": 576, "dtype": torch.bfloat16}), 4, 1, id="MLA in bfloat16"),
    pytest.param(Kind(MLAAttentionSpec, 1, {"head_size": 576, "dtype": torch.uint8}), 4, 1, id="MLA in FP8"),
    pytest.param(
        Kind(
            MLAAttentionSpec,
            1,
            {"head_size": 576, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656},
        ),
        4,
        1,
        id="MLA in fp8_ds_mla",
    ),
]


@pytest.mark.parametrize(("kind", "tp_lcm_size", "shards"), MODELS)
def test_every_tp_size_writes_and_reads_the_same_chunk(kind: Kind, tp_lcm_size: int, shards: int) -> None:
    blocks, content = [4, 1], contents(kind)
    each = kind.heads // shards
    reference = np.concatenate(
        [
            block[layer][:, shard * each : (shard + 1) * each].ravel()
            for shard in range(shards)
            for layer in range(len(LAYERS))
            for block in content
        ]
    )
    sizes = [tp for tp in (1, 2, 4, 8) if tp_lcm_size % tp == 0]
    for tp in sizes:
        arena = np.zeros(len(reference), np.uint8)
        chunks, written = np.array([arena.ctypes.data], np.uint64), 0
        ranks = [Rank(kind, tp, rank, tp_lcm_size) for rank in range(tp)]
        for number, rank in enumerate(ranks):
            assert rank.pages.heads is not None
            assert rank.layout.shard_count == shards
            assert rank.layout.chunk_bytes == len(reference)
            for block, pages in zip(blocks, content, strict=True):
                for layer, page in enumerate(pages):
                    rank.page(layer, block)[:] = page[:, held(kind, tp, number)].ravel()
            plan = rank.layout.written(np.array(blocks, np.int32), 3 * PER_CHUNK, chunks)
            copied(plan.device, plan.arena, plan.sizes)
            written += plan.nbytes
        assert written == len(reference), "every byte once"
        np.testing.assert_array_equal(arena, reference, f"written with TP {tp}")
    for tp in sizes:
        chunks = np.array([reference.ctypes.data], np.uint64)
        for number in range(tp):
            rank = Rank(kind, tp, number, tp_lcm_size)
            plan = rank.layout.fragments(np.array([2], np.int32), 3 * PER_CHUNK + 1, chunks)  # the second half only
            copied(plan.arena, plan.device, plan.sizes)
            for layer in range(len(LAYERS)):
                expected = content[1][layer][:, held(kind, tp, number)].ravel()
                np.testing.assert_array_equal(rank.page(layer, 2), expected, f"read with TP {tp}")
                assert not rank.page(layer, 4).any()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param(Kind(FullAttentionSpec, 4, page="tokens outermost"), "do not lie together", id="token by token"),
        pytest.param(
            Kind(FullAttentionSpec, 4, {"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD, "dtype": torch.int8}),
            "does not certify",
            id="scales beside the heads",
        ),
        pytest.param(
            Kind(MLAAttentionSpec, 1, {"head_size": 64, "tokens_per_state": 2}), "does not certify", id="compressed MLA"
        ),
        pytest.param(
            Kind(MLAAttentionSpec, 1, {"head_size": 64}, dcp=2), "does not certify", id="tokens shared out to ranks"
        ),
    ],
)
def test_pages_that_nobody_certifies_are_kept_rank_by_rank(
    kind: Kind, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="vllm.connector.pages"):
        ranks = [Rank(kind, 2, rank, 2) for rank in range(2)]
    assert all(rank.pages.heads is None for rank in ranks)
    assert said in caplog.text
    own = PER_CHUNK * len(LAYERS) * ranks[0].page_bytes
    assert [(rank.layout.range_offset, rank.layout.range_bytes) for rank in ranks] == [(0, own), (own, own)]
    assert ranks[0].layout.chunk_bytes == 2 * own


def registered(kv_caches: dict[str, torch.Tensor], group: KVCacheGroupSpec, *, rank: int, ranks: int) -> RankPages:
    """One rank's pages of a group, after vLLM's own registration."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=ranks,
            rank=rank,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4),
    )
    made: list[Any] = []
    worker = OffloadingConnectorWorker(
        SimpleNamespace(replicated_layout=False, get_worker=made.append),
        config,
        KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]),
    )
    worker.register_kv_caches(kv_caches)
    return rank_pages(
        made[0], blocks_per_chunk=1, group=group, kv_caches=kv_caches, tp_lcm_size=ranks, rank=rank, ranks=ranks
    )


def test_states_lie_rank_after_rank_without_the_padding_of_their_pages() -> None:
    """A convolution's state and a recurrent one; the page is padded to that of the attention beside it."""
    state_bytes, stride = 3 * 5 * 4 + 2 * 4 * 6 * 4, 512
    spec = MambaSpec(
        block_size=64,
        shapes=((3, 5), (2, 4, 6)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=stride,
        mamba_cache_mode="align",
    )
    for rank in range(2):
        memory = {name: torch.zeros(BLOCKS * stride, dtype=torch.int8) for name in LAYERS}
        views = {name: tensor.view(BLOCKS, 1, 1, stride) for name, tensor in memory.items()}
        pages = registered(views, KVCacheGroupSpec(LAYERS, spec), rank=rank, ranks=2)
        assert pages.heads is None
        own = len(LAYERS) * state_bytes
        assert (pages.layout.range_offset, pages.layout.range_bytes, pages.layout.chunk_bytes) == (
            rank * own,
            own,
            2 * own,
        )
        plan = pages.layout.written(np.array([3, 1]), 0, np.array([0, 4096], np.uint64))
        assert sorted(zip(plan.arena.tolist(), plan.device.tolist(), plan.sizes.tolist(), strict=True)) == [
            (
                chunk + rank * own + layer * state_bytes,
                memory[name].data_ptr() + block * stride,
                state_bytes,
            )
            for chunk, block in ((0, 3), (4096, 1))
            for layer, name in enumerate(LAYERS)
        ]


def test_layers_packed_into_one_run_of_each_block_are_kept_whole(caplog: pytest.LogCaptureFixture) -> None:
    """As vLLM packs some models: a layer's blocks are further apart than its pages are long."""
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32)
    page, stride = spec.page_size_bytes, 2 * spec.page_size_bytes
    memory = torch.zeros(BLOCKS * stride, dtype=torch.int8)
    elements = memory.view(torch.float32)
    shape, strides = (BLOCKS, 2, TOKENS, 16), (stride // 4, TOKENS * 16, 16, 1)
    views = {name: elements.as_strided(shape, strides, i * page // 4) for i, name in enumerate(LAYERS)}
    with caplog.at_level("WARNING", logger="vllm.connector.pages"):
        pages = registered(views, KVCacheGroupSpec(LAYERS, spec), rank=0, ranks=1)
    assert "packs the 2 layers of a block into 1 pages" in caplog.text
    plan = pages.layout.written(np.array([3]), 0, np.array([4096], np.uint64))
    assert (plan.device.tolist(), plan.arena.tolist(), plan.sizes.tolist()) == (
        [memory.data_ptr() + 3 * stride],
        [4096],
        [stride],
    )
