"""Which bytes of device memory are which bytes of a chunk: pure arithmetic over addresses, no vLLM, no device.

A chunk is `[shard][layer][block][the shard's part of the page]`: a rank owns a run of shards, which is one range of
bytes. A page is one layer's bytes of one block, exactly as the engine packs them. How pages are cut into shards is one
of two things:

* `AcrossTp`: the canonical page (all KV heads) is cut at heads into equal shards, the same for every tensor parallel
  size that divides `tp_lcm_size`. A rank's page is some of these shards. Where ranks hold the same bytes (fewer KV
  heads than ranks, MLA latents) they own the same shards: all read them, and they take turns to write, chunk by chunk.
* `PerRank`: each rank's page is a shard, whole. Right for every engine, shared only by engines split the same way.

Everything that depends only on the layout is computed once, as pieces; of a job each is expanded for each block, in the
native core. A layout is immutable, so any thread may use it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count
from math import lcm

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SLOT_ALIGNMENT, expand

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where one layer keeps its pages: block b's page begins at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    page_bytes: int  # without the allocator's padding


@dataclass(frozen=True, slots=True)
class Run:
    """`fragments` equal runs of bytes that a rank's page and the canonical page share, each at its own stride."""

    local_offset: int
    canonical_offset: int
    fragment_bytes: int
    fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True, slots=True)
class PageMapping:
    """A rank's page within the canonical page, which is `[row][head][bytes]`: one row where a head's bytes lie
    together, a row per token (or per half) where they do not."""

    canonical_bytes: int
    rows: int
    heads: int  # of all ranks; 1 for bytes that cannot be cut (MLA latents)
    runs: tuple[Run, ...]
    writers: int = 1  # how many ranks hold these bytes
    writer: int = 0  # which of them this rank is


@dataclass(frozen=True, slots=True)
class AcrossTp:
    """Pages cut at heads. `mappings` are those of the layers, in order."""

    mappings: tuple[PageMapping, ...]
    tp_lcm_size: int


@dataclass(frozen=True, slots=True)
class PerRank:
    """Pages as they are, this rank's after those of the ranks before it."""

    rank: int = 0
    ranks: int = 1
    page_bytes: tuple[int, ...] = ()  # of each rank's layers together; (): the same in every rank


class CannotShare(ValueError):
    """These pages cannot be cut so that every tensor parallel size finds its heads; `PerRank` still can store them."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """Runs of bytes that lie together in device memory and in the arena; equally long arrays."""

    device: Addresses
    arena: Addresses
    sizes: Addresses

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of one page that lie together in it and in its shard."""

    local_offset: int
    shard: int
    offset: int  # in the shard's part of the page
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of each block that lie together in device memory and in the chunk."""

    device: int  # address, of block 0
    device_stride: int  # from block to block
    arena: int  # offset in the chunk, of its block 0
    arena_stride: int
    nbytes: int


class ChunkLayout:
    """The shape of a chunk for one KV cache group, and this rank's part of it. Immutable."""

    def __init__(
        self,
        layers: Sequence[LayerPages],
        *,
        blocks_per_chunk: int,
        block_count: int,
        cut: AcrossTp | PerRank = PerRank(),
    ) -> None:
        """CannotShare, saying why, when `cut` is AcrossTp and the pages cannot be cut that way."""
        assert layers, "a KV cache group without layers"
        assert blocks_per_chunk > 0, f"{blocks_per_chunk} blocks a chunk"
        self.blocks_per_chunk = blocks_per_chunk
        self.block_count = block_count
        if isinstance(cut, AcrossTp):
            assert len(cut.mappings) == len(layers), f"{len(cut.mappings)} mappings of {len(layers)} layers"
            self.shard_count = _shard_count(cut)
            parts = [_parts(mapping, self.shard_count) for mapping in cut.mappings]
            first, end = _owned(layers, cut.mappings, parts, self.shard_count)
            self._writers, self._writer = _turn(cut.mappings)
            # A layer's part of a shard, per block.
            sizes = [mapping.canonical_bytes // self.shard_count for mapping in cut.mappings]
        else:
            assert 0 <= cut.rank < cut.ranks, f"rank {cut.rank} of {cut.ranks}"
            self.shard_count = cut.ranks
            first, end = cut.rank, cut.rank + 1
            parts = [[_Part(0, cut.rank, 0, layer.page_bytes)] for layer in layers]
            self._writers, self._writer = 1, 0
            sizes = [layer.page_bytes for layer in layers]
        shard_bytes = blocks_per_chunk * sum(sizes)
        if isinstance(cut, PerRank) and cut.page_bytes:
            of_ranks = [blocks_per_chunk * nbytes for nbytes in cut.page_bytes]
            assert len(of_ranks) == cut.ranks, f"pages of {len(of_ranks)} of {cut.ranks} ranks"
            assert of_ranks[cut.rank] == shard_bytes, (
                f"rank {cut.rank} has {shard_bytes} bytes, not {of_ranks[cut.rank]}"
            )
        else:
            of_ranks = [shard_bytes] * self.shard_count
        begins = [sum(of_ranks[:shard]) for shard in range(self.shard_count)]
        self.chunk_bytes = sum(of_ranks)
        self.range_offset = begins[first]  # the bytes of a chunk that this rank owns
        self.range_bytes = sum(of_ranks[first:end])

        pieces, begin = [], 0
        for layer, layer_parts, size in zip(layers, parts, sizes, strict=True):
            for part in layer_parts:
                at = begins[part.shard] + begin + part.offset
                device = layer.address + part.local_offset
                pieces.append(_Piece(device, layer.stride_bytes, at, size, part.nbytes))
            begin += blocks_per_chunk * size
        pieces = _merged(sorted(pieces, key=lambda piece: piece.arena))
        # Copies read what lies together one after the other: short runs cost half of the speed where each begins
        # somewhere else, wherever they are written to.
        self._loaded = _rows(pieces)
        by_device = sorted(pieces, key=lambda piece: piece.device)
        self._stored, self._stored_together = _rows(by_device), _pieces_per_page(by_device)

    def fragments(
        self,
        block_ids: NDArray[np.integer],
        first_block: int,
        chunks: Addresses,
        *,
        wanted: NDArray[np.bool_] | None = None,
    ) -> Fragments:
        """All that this rank owns of consecutive blocks of a request, here and in the chunks that hold them.

        `block_ids[i]` is the device block of the request's block `first_block + i`; `chunks` are the arena addresses
        of the chunks touched, in order. The first and last chunk may be used in part. Blocks that are not `wanted`
        (null blocks of a sliding window) are left out, whatever their id. ValueError for a block id outside the cache
        or another number of chunks: nothing may be copied then.
        """
        return self._expanded(self._loaded, 1, block_ids, first_block, chunks, wanted)

    def _expanded(
        self,
        pieces: Addresses,
        together: int,
        block_ids: NDArray[np.integer],
        first_block: int,
        chunks: Addresses,
        wanted: NDArray[np.bool_] | None,
    ) -> Fragments:
        first, ids = first_block % self.blocks_per_chunk, np.ascontiguousarray(block_ids, np.int64)
        return Fragments(*expand(pieces, together, ids, self.block_count, first, self.blocks_per_chunk, chunks, wanted))

    def written(self, block_ids: NDArray[np.integer], first_block: int, chunks: Addresses) -> Fragments:
        """What this rank stores of whole chunks: its own bytes, where it is its turn. ValueError as above, and for
        blocks that are not exactly the chunks' blocks: a chunk may have no byte that nobody wrote."""
        if len(block_ids) != len(chunks) * self.blocks_per_chunk:
            raise ValueError(f"{len(block_ids)} blocks from block {first_block} on leave parts of a chunk unwritten")
        mine = None
        if self._writers > 1:
            mine = np.repeat(self._turns(first_block, len(chunks)), self.blocks_per_chunk)
        return self._expanded(self._stored, self._stored_together, block_ids, first_block, chunks, mine)

    def padded(self, first_block: int, chunks: Addresses) -> Addresses:
        """Of the chunks stored: those whose padding, from the end of the chunk on, is this rank's to fill."""
        if self.range_offset + self.range_bytes < self.chunk_bytes:
            return chunks[:0]
        return chunks[self._turns(first_block, len(chunks))]

    def _turns(self, first_block: int, chunk_count: int) -> NDArray[np.bool_]:
        """Which chunks are this rank's to write. Every rank counts them alike, from the request's first."""
        turns: NDArray[np.bool_] = (
            np.arange(chunk_count) + first_block // self.blocks_per_chunk
        ) % self._writers == self._writer
        return turns


def whole_chunks(chunk_count: int, block_count: int, first_block: int, blocks_per_chunk: int) -> range:
    """Which of the chunks that a store job names have all their blocks in it.

    vLLM leaves null blocks (a window's past) out of a job and says only how many blocks there are and where in the
    request the first one lies. So what is missing can be told where the first chunk lacks exactly that many at its
    beginning; else none of the chunks is certain.
    """
    missing, lead = chunk_count * blocks_per_chunk - block_count, first_block % blocks_per_chunk
    if missing != lead:
        return range(0)
    return range(1 if lead else 0, chunk_count)


def tp_problem(tp_size: int, tp_lcm_size: int, heads: int) -> str | None:
    """Why chunks of `tp_lcm_size` cannot serve this engine, with the nearest value that can; None when they do.

    `heads` is the number of KV heads of the whole model, 1 where the bytes are the same on every rank.
    """
    if tp_lcm_size % tp_size:
        problem = f"tensor_parallel_size={tp_size} does not divide tp_lcm_size={tp_lcm_size}"
    elif heads % tp_lcm_size and tp_lcm_size % heads:
        problem = f"tp_lcm_size={tp_lcm_size} neither divides the model's {heads} KV heads nor is a multiple of them"
    else:
        return None
    nearest = next(size for size in _outwards(tp_lcm_size, lcm(tp_size, heads)) if _serves(size, tp_size, heads))
    return f"{problem}; the nearest value that works here is tp_lcm_size={nearest}"


def slot_addresses(arena_address: int, slots: NDArray[np.uint32], class_bytes: int, unit_bytes: int) -> Addresses:
    """Where the slots' bytes begin; the vector form of `kvstore._native.slot_offset`."""
    unit, position = divmod(slots.astype(np.uint64), np.uint64(unit_bytes // SLOT_ALIGNMENT))
    return np.uint64(arena_address) + unit * np.uint64(unit_bytes) + position * np.uint64(class_bytes)


def _serves(tp_lcm_size: int, tp_size: int, heads: int) -> bool:
    return tp_lcm_size % tp_size == 0 and (heads % tp_lcm_size == 0 or tp_lcm_size % heads == 0)


def _outwards(value: int, bound: int) -> Iterator[int]:
    """1 and more, nearest to `value` first. `bound` divides one of the values that the caller looks for."""
    for distance in count(1):
        assert distance <= value + bound, f"nothing within {bound} of {value}"
        yield value + distance
        if value > distance:
            yield value - distance


def _shard_count(cut: AcrossTp) -> int:
    """As many as `tp_lcm_size`, or one per KV head where these are fewer: a head is never cut."""
    counts = {min(cut.tp_lcm_size, mapping.heads) for mapping in cut.mappings}
    if len(counts) > 1:
        raise CannotShare(f"layers of one KV cache group would have {sorted(counts)} shards a chunk")
    shards = counts.pop()
    for mapping in cut.mappings:
        if mapping.heads % shards or cut.tp_lcm_size % shards:
            raise CannotShare(f"{mapping.heads} KV heads and tp_lcm_size={cut.tp_lcm_size} have no common shards")
        if mapping.canonical_bytes % (mapping.rows * mapping.heads):
            raise CannotShare(
                f"a page of {mapping.canonical_bytes} bytes is not {mapping.rows} x {mapping.heads} equal parts"
            )
    return shards


def _turn(mappings: Sequence[PageMapping]) -> tuple[int, int]:
    """How many ranks take turns to write this rank's shards, and which of them it is."""
    turns = {(mapping.writers, mapping.writer) for mapping in mappings}
    if len(turns) > 1:
        raise CannotShare(f"ranks take turns differently in layers of one KV cache group: {sorted(turns)}")
    return turns.pop()


def _parts(mapping: PageMapping, shards: int) -> list[_Part]:
    """The rank's page, cut wherever the shard changes."""
    unit = mapping.canonical_bytes // (mapping.rows * shards)  # a row's bytes of one shard
    parts = []
    for run in mapping.runs:
        for i in range(run.fragments):
            local = run.local_offset + i * run.local_stride
            canonical = run.canonical_offset + i * run.canonical_stride
            end = canonical + run.fragment_bytes
            while canonical < end:
                row, shard = divmod(canonical // unit, shards)
                nbytes = min(end, (canonical // unit + 1) * unit) - canonical
                parts.append(_Part(local, shard, row * unit + canonical % unit, nbytes))
                local, canonical = local + nbytes, canonical + nbytes
    return parts


def _owned(
    layers: Sequence[LayerPages], mappings: Sequence[PageMapping], parts: Sequence[list[_Part]], shards: int
) -> tuple[int, int]:
    """The run of shards, first and end, that this rank has in every layer, each of them whole."""
    owned = set()
    for layer, mapping, layer_parts in zip(layers, mappings, parts, strict=True):
        local = sorted((part.local_offset, part.local_offset + part.nbytes) for part in layer_parts)
        if not _tiles(local, 0, layer.page_bytes):
            raise CannotShare(f"the mapping does not cover a page of {layer.page_bytes} bytes exactly once")
        of_shard = mapping.canonical_bytes // shards
        places = [part.shard * of_shard + part.offset for part in layer_parts]
        canonical = sorted((at, at + part.nbytes) for at, part in zip(places, layer_parts, strict=True))
        first, end = canonical[0][0] // of_shard, -(-canonical[-1][1] // of_shard)
        if not _tiles(canonical, first * of_shard, end * of_shard):
            raise CannotShare(f"this rank's {layer.page_bytes} bytes of a page are no whole shards of {of_shard} bytes")
        owned.add((first, end))
    if len(owned) > 1:
        raise CannotShare(f"layers of one KV cache group give this rank different shards: {sorted(owned)}")
    return owned.pop()


def _tiles(intervals: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """Sorted intervals cover `begin` to `end` without a gap or an overlap."""
    for this_begin, this_end in intervals:
        if this_begin != begin:
            return False
        begin = this_end
    return begin == end


def _merged(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Neighbours that touch on both sides, in every block, become one. With one block a chunk these may be layers that
    lie together in each block's memory; with more, pieces of different layers never touch in the chunk."""
    merged: list[_Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.device + last.nbytes == piece.device
            and last.arena + last.nbytes == piece.arena
            and last.device_stride == piece.device_stride
        ):
            merged[-1] = replace(last, nbytes=last.nbytes + piece.nbytes)
        else:
            merged.append(piece)
    return merged


def _rows(pieces: Sequence[_Piece]) -> Addresses:
    return np.array([astuple(piece) for piece in pieces], np.uint64)


def _pieces_per_page(pieces: Sequence[_Piece]) -> int:
    """How many pieces, sorted by device, lie together in a block's memory; 1 where these are not equally many."""
    begins = [
        i for i, piece in enumerate(pieces) if i == 0 or pieces[i - 1].device + pieces[i - 1].nbytes != piece.device
    ]
    counts = {end - begin for begin, end in zip(begins, [*begins[1:], len(pieces)], strict=True)}
    return counts.pop() if len(counts) == 1 else 1
