"""vLLM's KV cache in the layout's terms: where pages lie, and how they are cut, or why they cannot be shared.

Called once by each rank, when the engine has allocated its KV cache. What is not certain here is never guessed: vLLM
has to certify a layer's mapping, and the tensor has to show that a head's bytes lie together; else the rank's pages are
stored whole, in a namespace that only engines split in the same way have.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connector.layout import AcrossTp, CannotShare, ChunkLayout, LayerPages, PageMapping, PerRank, Run
from connector.transfer import Region

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

logger = logging.getLogger("vllm.connector.pages")


@dataclass(frozen=True, slots=True)
class PageHeads:
    """A canonical page is `[row][head][bytes]`."""

    rows: int
    heads: int  # on all ranks together; 1: no heads, every rank holds the whole page
    dimension: int | None  # of the tensor: its heads on this rank


@dataclass(frozen=True, slots=True)
class RankPages:
    """This rank's share of one KV cache group."""

    layout: ChunkLayout
    regions: Sequence[Region]  # the engine's memory
    heads: Sequence[PageHeads] | None  # of each layer; None: the pages are of use only to the same split


def rank_pages(
    caches: "CanonicalKVCaches",
    *,
    blocks_per_chunk: int,
    group: "KVCacheGroupSpec",
    kv_caches: Mapping[str, "torch.Tensor"],
    tp_lcm_size: int,
    rank: int,
    ranks: int,
    kind: int = 0,
    page_bytes: tuple[int, ...] = (),
) -> RankPages:
    """Of one KV cache group, vLLM's `kind`th of those it offloads. `kv_caches` is what vLLM registered, `caches` what
    it made of it. `page_bytes`: what each rank keeps of a block, where that differs (pipeline stages)."""
    refs = caches.group_data_refs[kind]
    layers, storages = [], {}
    for ref in refs:
        tensor = caches.tensors[ref.tensor_idx].tensor
        assert tensor.device.type in ("cpu", "cuda"), f"KV cache on {tensor.device}"
        assert tensor.element_size() == 1, f"KV cache as {tensor.dtype}"
        layers.append(LayerPages(tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes))
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes())
    block_count = caches.tensors[refs[0].tensor_idx].tensor.shape[0]
    regions = list(storages.values())
    try:
        heads = [_heads(ref, spec, kv_caches[name]) for ref, (name, spec) in _with_specs(refs, group)]
        cut = AcrossTp(tuple(_mapping(ref, page) for ref, page in zip(refs, heads, strict=True)), tp_lcm_size)
        layout = ChunkLayout(layers, blocks_per_chunk=blocks_per_chunk, block_count=block_count, cut=cut)
    except CannotShare as reason:
        logger.warning(
            "kvstore: chunks of this engine are of use only to engines with as many ranks (%d): %s", ranks, reason
        )
        layout = ChunkLayout(
            layers, blocks_per_chunk=blocks_per_chunk, block_count=block_count, cut=PerRank(rank, ranks, page_bytes)
        )
        return RankPages(layout, regions, None)
    logger.info(
        "kvstore: a chunk has %d shards (tp_lcm_size=%d); rank %d of %d owns bytes %d to %d of %d",
        layout.shard_count,
        tp_lcm_size,
        rank,
        ranks,
        layout.range_offset,
        layout.range_offset + layout.range_bytes,
        layout.chunk_bytes,
    )
    return RankPages(layout, regions, heads)


def _with_specs(
    refs: Sequence["CanonicalKVCacheRef"], group: "KVCacheGroupSpec"
) -> list[tuple["CanonicalKVCacheRef", tuple[str, "KVCacheSpec"]]]:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    if len(refs) != len(group.layer_names):
        raise CannotShare(f"vLLM packs the {len(group.layer_names)} layers of a block into {len(refs)} pages")
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return [(ref, (name, specs.get(name, spec))) for ref, name in zip(refs, group.layer_names, strict=True)]


def _heads(ref: "CanonicalKVCacheRef", spec: "KVCacheSpec", tensor: "torch.Tensor") -> PageHeads:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    mapping = ref.mapping
    if mapping is None or not mapping.parallelism_agnostic:
        raise CannotShare(f"vLLM does not certify how the ranks' pages of a {type(spec).__name__} make one page")
    if isinstance(spec, MLAAttentionSpec):
        return PageHeads(1, 1, None)
    share = mapping.canonical_page_size_bytes // ref.page_size_bytes  # of the ranks with different heads
    shape, strides = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    match shape:
        case (heads, tokens, content) if strides == (tokens * content, content, 1):
            return PageHeads(1, heads * share, 1)
        case (2, tokens, heads, content) if strides == (heads * tokens * content, content, tokens * content, 1):
            return PageHeads(2, heads * share, 3)  # K of all heads, then V of all heads
    raise CannotShare(f"a head's bytes do not lie together in pages of shape {shape} with strides {strides}")


def _mapping(ref: "CanonicalKVCacheRef", page: PageHeads) -> PageMapping:
    mapping = ref.mapping
    assert mapping is not None
    runs = tuple(
        Run(
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        )
        for run in mapping.runs
    )
    return PageMapping(
        mapping.canonical_page_size_bytes, page.rows, page.heads, runs, mapping.num_writers, mapping.writer_index
    )
