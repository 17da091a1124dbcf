"""Copies between the KV cache on a CUDA device and the arena: plans from `transfer`, run by the native device copier.

What a copy waits for and when it has ended is the copier's business, stated in native/cuda/copier.h. Here it is told
the three things that only the engine's process knows: the compute stream at the moment of submission, which device
blocks a job touches, and which way small fragments are to go. Threads are those of `transfer`; each arena has one more,
which page-locks it (`pinning`).
"""

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.config import COPY_IN_FLIGHT_BYTES, CopyBackend
from connector.layout import ChunkLayout
from connector.messages import ChunkSpec
from connector.pinning import Pinning
from connector.transfer import Mapped, Plan, Region, Transfer
from kvstore._native import Arena, DeviceCopier, Table
from kvstore.profiles.measured import Device, Direction

logger = logging.getLogger("vllm.connector.cuda")

# Without a profile of the device (`kvstore calibrate`): where vLLM found on an H100 that its kernel no longer gains
# over the copy engine, loads only. And below how many fragments a launch does not pay.
LOAD_KERNEL_BYTES = 28 << 10
STORE_KERNEL_BYTES = 0
KERNEL_FRAGMENTS_MIN = 16
EVERY_FRAGMENT = (1 << 64) - 1
IN_FLIGHT_BYTES_MIN = 1 << 20  # less would be all calls and no copies


def open_copier(
    device: int,
    backend: CopyBackend,
    *,
    profile: Device | None = None,
    in_flight_bytes: int = COPY_IN_FLIGHT_BYTES,
    **options: Any,
) -> DeviceCopier:
    """A copier on CUDA's device number `device` that goes the way of `backend`. `profile`: what was measured of such a
    device, for `auto`. `options` are DeviceCopier's own.

    RuntimeError: no driver, no such device. ValueError: `kernel`, and this build or device has none.
    """
    ways: dict[CopyBackend, dict[str, Any]] = {
        CopyBackend.AUTO: {
            "load_kernel_bytes": _kernel_bytes(profile, Direction.LOAD, LOAD_KERNEL_BYTES),
            "store_kernel_bytes": _kernel_bytes(profile, Direction.STORE, STORE_KERNEL_BYTES),
            "kernel_fragments_min": KERNEL_FRAGMENTS_MIN,
        },
        CopyBackend.KERNEL: {"load_kernel_bytes": EVERY_FRAGMENT, "store_kernel_bytes": EVERY_FRAGMENT},
        CopyBackend.COPY_ENGINE: {},
        CopyBackend.HOST: {},
    }
    given = {**options, "in_flight_bytes": max(in_flight_bytes, IN_FLIGHT_BYTES_MIN)}
    try:
        return DeviceCopier(device, **ways[backend], **given)
    except ValueError as problem:
        if backend is not CopyBackend.AUTO:
            raise ValueError(f"copy_backend={backend.value!r}: {problem}") from None
        logger.info("kvstore: small fragments go by the copy engines as well: %s", problem)
        return DeviceCopier(device, **given)


def _kernel_bytes(profile: Device | None, direction: Direction, unmeasured: int) -> int:
    """Fragments shorter than this go by the kernel."""
    pays_below = None if profile is None else profile.kernel_pays_below(direction)
    return unmeasured if pays_below is None else pays_below


class CudaTransfer(Transfer):
    """Runs copy jobs on a CUDA device. `compute_stream` says which stream (a CUstream) the calling thread computes on
    at the moment; copies come after all that it has been given by then. `pins` False: arenas are not page-locked."""

    _copier: DeviceCopier

    def __init__(
        self,
        layouts: Sequence[ChunkLayout],
        regions: Sequence[Region],
        *,
        copier: DeviceCopier,
        pins: bool = True,
        compute_stream: Callable[[], int],
    ) -> None:
        super().__init__(layouts)
        self._copier = copier
        self._pins = pins
        self._compute_stream = compute_stream
        self._pinning: dict[int, Pinning] = {}  # by the arena's address
        self._closed = False
        self._unmapping = threading.Lock()  # `close` waits for it: unlocking much memory outlasts the link's patience
        for region in regions:
            copier.add_memory(region.address, region.nbytes)
        copier.add_host_memory(self.padding_source.address, self.padding_source.nbytes)
        atexit.register(self.close)  # before the driver ends: nothing may be page-locked or copied after that

    def map(self, instance_id: bytes, table: Table, arena: Arena) -> Mapped:
        self._copier.map_arena(arena, table, pin=self._pins)
        if self._pins:
            self._pinning[arena.address] = Pinning(self._copier, arena)
        return Mapped(instance_id, table, arena)

    def unmap(self, mapped: Mapped) -> None:
        with self._unmapping:
            pinning = self._pinning.pop(mapped.arena.address, None)
            if pinning is not None:
                pinning.close()
            if not self._closed:
                self._copier.unmap_arena(mapped.arena.address)

    def suspend(self) -> None:
        self._copier.suspend()

    def resume(self) -> None:
        self._copier.resume()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._unmapping:
            self._closed = True
            for pinning in self._pinning.values():
                pinning.close()
            self._pinning.clear()
            self._copier.close()

    def _run(
        self, job: int, mapped: Mapped, spec: ChunkSpec, plan: Plan, *, is_load: bool, blocks: NDArray[np.integer]
    ) -> None:
        self._copier.submit(
            job,
            plan.sources,
            plan.destinations,
            plan.sizes,
            is_load=is_load,
            compute_stream=self._compute_stream(),
            blocks=blocks.astype(np.int64),
            table=mapped.table,
            slots=spec.slots,
            generations=spec.generations,
        )
