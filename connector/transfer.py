"""Copies between the engine's KV cache and the arena: plans from `layout`, run by a native copier, which is the host's
copy threads on vLLM's CPU platform (`HostTransfer`) and another one on CUDA (`connector/cuda.py`).

Two threads call in: the engine's (submit, finished, wait) and the link's (map, unmap). The copiers are safe from both.
`unmap` takes the arena out of the copier first, which waits for the copies that run in it and fails those still
queued, so memory is unmapped only after the last copy's end; that a plan for one arena never runs in the next one is
the caller's part (`WorkerHalf` checks the instance and submits under the link's lock).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.layout import Addresses, ChunkLayout, slot_addresses
from connector.messages import ChunkSpec
from kvstore._native import SLOT_ALIGNMENT, Arena, Copier, DeviceCopier, Finished, Table, class_bytes

COPY_THREADS = 2


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
class Plan:
    """Fragments to copy; equally long arrays."""

    sources: Addresses
    destinations: Addresses
    sizes: Addresses


class Transfer(ABC):
    """Runs copy jobs. A job ends exactly once in `finished`, with the positions of its chunks that failed."""

    _copier: Copier | DeviceCopier  # finished, wait and close are the same

    def __init__(self, layout: ChunkLayout) -> None:
        self._layout = layout
        self._slot_bytes = class_bytes(layout.chunk_bytes)
        self._zeros = np.zeros(SLOT_ALIGNMENT, np.uint8)

    @property
    def layout(self) -> ChunkLayout:
        return self._layout

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
    def _run(
        self, job: int, mapped: Mapped, spec: ChunkSpec, plan: Plan, *, is_load: bool, blocks: NDArray[np.integer]
    ) -> None:
        """ValueError, nothing copied: fragments outside the engine's memory or the arena."""

    def store(
        self, job: int, mapped: Mapped, spec: ChunkSpec, *, block_ids: NDArray[np.integer], first_block: int
    ) -> None:
        """Device to arena, this rank's part. ValueError, nothing copied, unless the blocks are exactly the chunks'."""
        chunks = self._chunks(mapped, spec)
        fragments = self._layout.written(block_ids, first_block, chunks)
        plan = Plan(fragments.device, fragments.arena, fragments.sizes)
        padding = self._slot_bytes - self._layout.chunk_bytes
        if padding:
            padded = self._layout.padded(first_block, chunks)
            plan = Plan(
                np.append(plan.sources, np.full(len(padded), self.padding_source.address, np.uint64)),
                np.append(plan.destinations, padded + np.uint64(self._layout.chunk_bytes)),
                np.append(plan.sizes, np.full(len(padded), padding, np.uint64)),
            )
        self._run(job, mapped, spec, plan, is_load=False, blocks=block_ids)

    def load(
        self, job: int, mapped: Mapped, spec: ChunkSpec, *, block_ids: NDArray[np.integer], first_block: int
    ) -> None:
        """Arena to device. The first and the last chunk may be wanted in part. ValueError, nothing copied."""
        fragments = self._layout.fragments(block_ids, first_block, self._chunks(mapped, spec))
        plan = Plan(fragments.arena, fragments.device, fragments.sizes)
        self._run(job, mapped, spec, plan, is_load=True, blocks=block_ids)

    def finished(self) -> list[Finished]:
        return self._copier.finished()

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        return self._copier.wait(jobs, timeout_s)

    def close(self) -> None:
        self._copier.close()

    def _chunks(self, mapped: Mapped, spec: ChunkSpec) -> NDArray[np.uint64]:
        return slot_addresses(mapped.arena.address, spec.slots, self._slot_bytes, mapped.table.unit_bytes)


class HostTransfer(Transfer):
    """On vLLM's CPU platform."""

    def __init__(self, layout: ChunkLayout, regions: Sequence[Region], *, copier: Copier | None = None) -> None:
        super().__init__(layout)
        self._copier = Copier(COPY_THREADS) if copier is None else copier
        for region in (*regions, self.padding_source):
            self._copier.add_region(region.address, region.nbytes)

    def map(self, instance_id: bytes, table: Table, arena: Arena) -> Mapped:
        self._copier.add_region(arena.address, arena.nbytes)
        return Mapped(instance_id, table, arena)

    def unmap(self, mapped: Mapped) -> None:
        self._copier.remove_region(mapped.arena.address)

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
