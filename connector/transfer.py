"""Copies between the engine's KV cache and the arena, on the CPU platform: plans from `layout`, run by the native
copy threads.

Two threads call in: the engine's (submit, finished, wait) and the link's (map, unmap). The copier is safe from both.
`unmap` takes the arena out of the copier first, which waits for the copies that run in it and fails those still
queued, so memory is unmapped only after the last copy's end; that a plan for one arena never runs in the next one is
the caller's part (`WorkerHalf` checks the instance and submits under the link's lock).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.layout import ChunkLayout, slot_addresses
from connector.messages import ChunkSpec
from kvstore._native import SLOT_ALIGNMENT, Arena, Copier, Finished, Table, class_bytes

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


class HostTransfer:
    """Runs copy jobs. A job ends exactly once in `finished`, with the positions of its chunks that failed."""

    def __init__(self, layout: ChunkLayout, regions: Sequence[Region], *, copier: Copier | None = None) -> None:
        self._layout = layout
        self._slot_bytes = class_bytes(layout.chunk_bytes)
        self._zeros = np.zeros(SLOT_ALIGNMENT, np.uint8)  # what the padding of a slot is filled from
        self._copier = Copier(COPY_THREADS) if copier is None else copier
        for region in (*regions, Region(self._zeros.ctypes.data, self._zeros.nbytes)):
            self._copier.add_region(region.address, region.nbytes)

    @property
    def layout(self) -> ChunkLayout:
        return self._layout

    def map(self, instance_id: bytes, table: Table, arena: Arena) -> Mapped:
        self._copier.add_region(arena.address, arena.nbytes)
        return Mapped(instance_id, table, arena)

    def unmap(self, mapped: Mapped) -> None:
        self._copier.remove_region(mapped.arena.address)

    def store(
        self, job: int, mapped: Mapped, spec: ChunkSpec, *, block_ids: NDArray[np.integer], first_block: int
    ) -> None:
        """Device to arena, this rank's part. ValueError, nothing copied, unless the blocks are exactly the chunks'."""
        chunks = self._chunks(mapped, spec)
        fragments = self._layout.written(block_ids, first_block, chunks)
        sources, destinations, sizes = fragments.device, fragments.arena, fragments.sizes
        padding = self._slot_bytes - self._layout.chunk_bytes
        if padding:
            padded = self._layout.padded(first_block, chunks)
            sources = np.append(sources, np.full(len(padded), self._zeros.ctypes.data, np.uint64))
            destinations = np.append(destinations, padded + np.uint64(self._layout.chunk_bytes))
            sizes = np.append(sizes, np.full(len(padded), padding, np.uint64))
        self._submit(job, mapped, spec, sources=sources, destinations=destinations, sizes=sizes)

    def load(
        self, job: int, mapped: Mapped, spec: ChunkSpec, *, block_ids: NDArray[np.integer], first_block: int
    ) -> None:
        """Arena to device. The first and the last chunk may be wanted in part. ValueError, nothing copied."""
        fragments = self._layout.fragments(block_ids, first_block, self._chunks(mapped, spec))
        self._submit(job, mapped, spec, sources=fragments.arena, destinations=fragments.device, sizes=fragments.sizes)

    def finished(self) -> list[Finished]:
        return self._copier.finished()

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        return self._copier.wait(jobs, timeout_s)

    def close(self) -> None:
        self._copier.close()

    def _chunks(self, mapped: Mapped, spec: ChunkSpec) -> NDArray[np.uint64]:
        return slot_addresses(mapped.arena.address, spec.slots, self._slot_bytes, mapped.table.unit_bytes)

    def _submit(
        self,
        job: int,
        mapped: Mapped,
        spec: ChunkSpec,
        *,
        sources: NDArray[np.uint64],
        destinations: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        # Stores are checked like loads: a slot that was taken from us meanwhile holds somebody else's chunk.
        self._copier.submit(
            job,
            sources,
            destinations,
            sizes,
            table=mapped.table,
            slots=spec.slots,
            generations=spec.generations,
        )
