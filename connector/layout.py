"""Which bytes of device memory are which bytes of a chunk: pure arithmetic over addresses, no vLLM, no device.

A chunk is `[shard][layer][block][page]`: a rank owns a run of shards, which is one range of bytes; with one rank there
is one shard, and the range is the whole chunk. A page is one layer's bytes of one block, exactly as the engine packs
them. Everything that depends only on the layout is computed once; a job costs a few numpy operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SLOT_ALIGNMENT

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where one layer keeps its pages: block b's page begins at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    page_bytes: int  # without the allocator's padding


@dataclass(frozen=True, slots=True)
class Fragments:
    """Runs of bytes that lie together in device memory and in the arena; equally long arrays."""

    device: Addresses
    arena: Addresses
    sizes: Addresses

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())


class ChunkLayout:
    """The shape of a chunk for one KV cache group of one engine. Immutable."""

    def __init__(self, layers: Sequence[LayerPages], *, blocks_per_chunk: int, block_count: int) -> None:
        assert layers, "a KV cache group without layers"
        assert blocks_per_chunk > 0, f"{blocks_per_chunk} blocks a chunk"
        self.blocks_per_chunk = blocks_per_chunk
        self.block_count = block_count
        self._addresses = np.array([layer.address for layer in layers], np.uint64)[:, None]
        self._strides = np.array([layer.stride_bytes for layer in layers], np.uint64)[:, None]
        self._pages = np.array([layer.page_bytes for layer in layers], np.uint64)[:, None]
        layer_bytes = self._pages[:, 0] * np.uint64(blocks_per_chunk)
        self._layer_offsets = (np.cumsum(layer_bytes) - layer_bytes)[:, None]
        self.chunk_bytes = int(layer_bytes.sum())

    def chunks_touched(self, first_block: int, block_count: int) -> int:
        """How many chunks `block_count` consecutive blocks of a request touch when the first is its block
        `first_block`."""
        skipped = first_block % self.blocks_per_chunk
        return -(-(skipped + block_count) // self.blocks_per_chunk)

    def fragments(self, block_ids: NDArray[np.integer], first_block: int, chunks: Addresses) -> Fragments:
        """The copies between consecutive blocks of a request and the chunks that hold them.

        `block_ids[i]` is the device block of the request's block `first_block + i`; `chunks` are the arena addresses
        of the chunks touched, in order. The first and last chunk may be used in part. ValueError for a block id
        outside the cache or another number of chunks: nothing may be copied then.
        """
        count = len(block_ids)
        if self.chunks_touched(first_block, count) != len(chunks) or count == 0:
            raise ValueError(
                f"{count} blocks from block {first_block} on, {self.blocks_per_chunk} a chunk, do not touch "
                f"{len(chunks)} chunks"
            )
        if int(block_ids.min()) < 0 or int(block_ids.max()) >= self.block_count:
            raise ValueError(f"block ids {block_ids.min()} to {block_ids.max()}, but the cache has {self.block_count}")
        in_chunks = np.arange(count, dtype=np.uint64) + np.uint64(first_block % self.blocks_per_chunk)
        chunk_of, block_in_chunk = np.divmod(in_chunks, np.uint64(self.blocks_per_chunk))
        device = self._addresses + block_ids.astype(np.uint64) * self._strides
        arena = chunks[chunk_of.astype(np.intp)] + self._layer_offsets + block_in_chunk * self._pages
        sizes = np.broadcast_to(self._pages, device.shape)
        return _coalesced(device.ravel(), arena.ravel(), sizes.ravel())


def slot_addresses(arena_address: int, slots: NDArray[np.uint32], class_bytes: int, unit_bytes: int) -> Addresses:
    """Where the slots' bytes begin; the vector form of `kvstore._native.slot_offset`."""
    unit, position = np.divmod(slots.astype(np.uint64), np.uint64(unit_bytes // SLOT_ALIGNMENT))
    return np.uint64(arena_address) + unit * np.uint64(unit_bytes) + position * np.uint64(class_bytes)


def _coalesced(device: Addresses, arena: Addresses, sizes: Addresses) -> Fragments:
    """Neighbours that touch on both sides become one: a short fragment costs as much to start as a long one."""
    breaks = (device[1:] != device[:-1] + sizes[:-1]) | (arena[1:] != arena[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    return Fragments(device[starts], arena[starts], np.add.reduceat(sizes, starts))
