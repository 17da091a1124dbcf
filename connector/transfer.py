"""Copies between the engine's KV cache and the arena: plans from `layout`, run by a native copier, which is the host's
copy threads on vLLM's CPU platform (`HostTransfer`) and another one on CUDA (`connector/cuda.py`).

Two threads call in: the engine's (submit, finished, wait) and the link's (map, unmap). The copiers are safe from both.
`unmap` takes the arena out of the copier first, which waits for the copies that run in it and fails those still
queued, so memory is unmapped only after the last copy's end; that a plan for one arena never runs in the next one is
the caller's part (`WorkerHalf` checks the instance and submits under the link's lock).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.layout import Addresses, ChunkLayout, slot_addresses, whole_chunks
from connector.messages import ChunkSpec
from kvstore._native import SLOT_ALIGNMENT, Arena, Copier, DeviceCopier, Finished, Table, class_bytes

COPY_THREADS = 2
NULL_BLOCK = 0  # vLLM's, in every KV cache group: it stands for blocks that nobody reads any more


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """One daemon's memory, ready to be copied to and from."""

    instance_id: bytes
    table: Table
    arena: Arena


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of the engine that copies may touch."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KindBlocks:
    """Blocks of one KV cache group that a job copies: consecutive in the request from its block `first` on."""

    ids: NDArray[np.integer]
    first: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Fragments to copy; equally long arrays."""

    sources: Addresses
    destinations: Addresses
    sizes: Addresses

    @classmethod
    def of(cls, parts: Sequence["Plan"]) -> "Plan":
        if not parts:
            return cls(*[np.empty(0, np.uint64)] * 3)
        return cls(
            np.concatenate([part.sources for part in parts]),
            np.concatenate([part.destinations for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )


class Transfer(ABC):
    """Runs copy jobs. A job ends exactly once in `finished`, with the positions of its chunks that failed. There is a
    layout for each kind of chunks; chunks and blocks of a job lie kind after kind."""

    _copier: Copier | DeviceCopier  # finished, wait and close are the same; each subclass says which

    def __init__(self, layouts: Sequence[ChunkLayout]) -> None:
        self._layouts = layouts
        self._zeros = np.zeros(SLOT_ALIGNMENT, np.uint8)

    @property
    def layouts(self) -> Sequence[ChunkLayout]:
        return self._layouts

    @property
    def padding_source(self) -> Region:
        """What the padding of a slot is filled from."""
        return Region(self._zeros.ctypes.data, self._zeros.nbytes)

    @abstractmethod
    def map(self, instance_id: bytes, table: Table, arena: Arena) -> Mapped: ...

    @abstractmethod
    def unmap(self, mapped: Mapped) -> None:
        """Returns when nothing is copied to or from that arena any more."""

    @abstractmethod
    def suspend(self) -> None:
        """The engine's memory is about to be taken away. Returns when nothing touches it any more: jobs that had not
        begun have failed, and so do all until `resume`. Twice is once."""

    @abstractmethod
    def resume(self) -> None:
        """It is there again, at the same addresses."""

    @abstractmethod
    def _run(
        self, job: int, mapped: Mapped, spec: ChunkSpec, plan: Plan, *, is_load: bool, blocks: NDArray[np.integer]
    ) -> None:
        """`blocks`: all that the job touches in the engine. ValueError, nothing copied: fragments outside the engine's
        memory or the arena."""

    def store(self, job: int, mapped: Mapped, spec: ChunkSpec, blocks: Sequence[KindBlocks]) -> set[int]:
        """Device to arena, this rank's part. Returns the positions of chunks that are not copied, because vLLM left out
        blocks of theirs. ValueError, nothing copied, for blocks outside the cache."""
        parts: list[Plan] = []
        left_out: set[int] = set()
        for layout, of_kind, chunks, positions in self._kinds(mapped, spec, blocks):
            per_chunk = layout.blocks_per_chunk
            whole = whole_chunks(len(chunks), len(of_kind.ids), of_kind.first, per_chunk)
            left_out.update(position for i, position in enumerate(positions) if i not in whole)
            if not whole:
                continue
            ids = of_kind.ids[len(of_kind.ids) - len(whole) * per_chunk :]
            first = of_kind.first // per_chunk * per_chunk + whole.start * per_chunk
            copied = chunks[whole.start :]
            written = layout.written(ids, first, copied)
            parts.append(Plan(written.device, written.arena, written.sizes))
            padding = class_bytes(layout.chunk_bytes) - layout.chunk_bytes
            if padding:
                padded = layout.padded(first, copied) + np.uint64(layout.chunk_bytes)
                zeros = np.full(len(padded), self.padding_source.address, np.uint64)
                parts.append(Plan(zeros, padded, np.full(len(padded), padding, np.uint64)))
        self._run(job, mapped, spec, Plan.of(parts), is_load=False, blocks=_blocks(blocks))
        return left_out

    def load(self, job: int, mapped: Mapped, spec: ChunkSpec, blocks: Sequence[KindBlocks]) -> None:
        """Arena to device. The first and the last chunk of a kind may be wanted in part, and null blocks are nobody's.
        ValueError, nothing copied."""
        parts = []
        for layout, of_kind, chunks, _ in self._kinds(mapped, spec, blocks):
            fragments = layout.fragments(of_kind.ids, of_kind.first, chunks, wanted=of_kind.ids != NULL_BLOCK)
            parts.append(Plan(fragments.arena, fragments.device, fragments.sizes))
        self._run(job, mapped, spec, Plan.of(parts), is_load=True, blocks=_blocks(blocks))

    def finished(self) -> list[Finished]:
        return self._copier.finished()

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        return self._copier.wait(jobs, timeout_s)

    def close(self) -> None:
        self._copier.close()

    def _kinds(
        self, mapped: Mapped, spec: ChunkSpec, blocks: Sequence[KindBlocks]
    ) -> Iterator[tuple[ChunkLayout, KindBlocks, Addresses, range]]:
        """Of each kind that the job has: its blocks, the addresses of its chunks, and their positions in the job."""
        if not len(spec.counts) == len(blocks) == len(self._layouts):
            raise ValueError(f"a job of {len(spec.counts)} kinds, and this engine has {len(self._layouts)}")
        first = 0
        for layout, of_kind, count in zip(self._layouts, blocks, spec.counts, strict=True):
            positions = range(first, first + count)
            first += count
            if count or len(of_kind.ids):
                slots = spec.slots[positions.start : positions.stop]
                size = class_bytes(layout.chunk_bytes)
                yield (
                    layout,
                    of_kind,
                    slot_addresses(mapped.arena.address, slots, size, mapped.table.unit_bytes),
                    positions,
                )


class HostTransfer(Transfer):
    """On vLLM's CPU platform."""

    _copier: Copier

    def __init__(
        self, layouts: Sequence[ChunkLayout], regions: Sequence[Region], *, copier: Copier | None = None
    ) -> None:
        super().__init__(layouts)
        self._copier = Copier(COPY_THREADS) if copier is None else copier
        for region in (*regions, self.padding_source):
            self._copier.add_region(region.address, region.nbytes)

    def map(self, instance_id: bytes, table: Table, arena: Arena) -> Mapped:
        self._copier.add_region(arena.address, arena.nbytes)
        return Mapped(instance_id, table, arena)

    def unmap(self, mapped: Mapped) -> None:
        self._copier.remove_region(mapped.arena.address)

    def suspend(self) -> None:
        """vLLM's CPU platform keeps its memory."""

    def resume(self) -> None:
        pass

    def _run(
        self,
        job: int,
        mapped: Mapped,
        spec: ChunkSpec,
        plan: Plan,
        *,
        is_load: bool,  # noqa: ARG002
        blocks: NDArray[np.integer],  # noqa: ARG002
    ) -> None:
        # Stores are checked like loads: a slot that was taken from us meanwhile holds somebody else's chunk.
        self._copier.submit(
            job,
            plan.sources,
            plan.destinations,
            plan.sizes,
            table=mapped.table,
            slots=spec.slots,
            generations=spec.generations,
        )


def _blocks(of_kinds: Sequence[KindBlocks]) -> NDArray[np.integer]:
    """Null blocks left out: every job may name them, and none touches them."""
    ids: NDArray[np.integer] = np.concatenate([of_kind.ids for of_kind in of_kinds])
    return ids[ids != NULL_BLOCK]
