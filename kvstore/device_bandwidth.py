"""How fast a CUDA device copies: by fragment size, direction, both at once, and the way that fragments go.

What a node's profile and `copy_backend=auto` are to start from. Every measurement moves the same number of bytes, in
fragments that lie together on neither side, between device memory of its own and an arena of its own, and is timed by
the device's events; for both directions at once, by this process's clock.
"""

import enum
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstore._native import Arena, DeviceCopier, create_memfd

TOTAL_BYTES = 256 << 20
FRAGMENT_BYTES = (2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 512 << 10, 2 << 20)
ROUNDS = 5
GAP_BYTES = 256  # between fragments, so that no two lie together
WAIT_S = 120.0
EVERY_FRAGMENT = (1 << 64) - 1


class Way(enum.StrEnum):
    COPY_ENGINE = "copy_engine"
    KERNEL = "kernel"
    PAGEABLE = "pageable"  # of memory that is not page-locked


class Direction(enum.StrEnum):
    LOAD = "load"  # host to device
    STORE = "store"
    BOTH = "both"  # at once; bytes of both are counted


@dataclass(frozen=True, slots=True)
class Bandwidth:
    way: Way
    direction: Direction
    fragment_bytes: int
    bytes_per_s: tuple[float, ...]  # of each round


Open = Callable[[Way], DeviceCopier]


def open_device(way: Way, *, device: int = 0) -> DeviceCopier:
    """RuntimeError: no driver, no such device. ValueError: no kernel in this build, or none that the device can run."""
    every = EVERY_FRAGMENT if way is Way.KERNEL else 0
    return DeviceCopier(device, load_kernel_bytes=every, store_kernel_bytes=every)


def measure(
    opened: Open = open_device,
    *,
    ways: Sequence[Way] = tuple(Way),
    fragment_bytes: Sequence[int] = FRAGMENT_BYTES,
    total_bytes: int = TOTAL_BYTES,
    rounds: int = ROUNDS,
) -> Iterator[Bandwidth]:
    """One result after the other; takes some seconds on a fast link. RuntimeError, ValueError as of `opened`;
    RuntimeError also for a copy that fails."""
    for way in ways:
        with _bench(opened(way), way, total_bytes, min(fragment_bytes)) as bench:
            for nbytes in fragment_bytes:
                for direction in Direction:
                    bench.run(direction, nbytes)  # warms up
                    speeds = [bench.run(direction, nbytes) for _ in range(rounds)]
                    yield Bandwidth(way, direction, nbytes, tuple(speeds))


def kernel_pays_below(results: Sequence[Bandwidth], direction: Direction) -> int:
    """The smallest measured fragment from which on the copy engines are not slower than the kernel; 0: always."""
    best = {(result.way, result.fragment_bytes): max(result.bytes_per_s) for result in results
            if result.direction is direction}  # fmt: skip
    sizes = sorted({nbytes for way, nbytes in best if way is Way.KERNEL})
    slower = [nbytes for nbytes in sizes if best[Way.COPY_ENGINE, nbytes] < best[Way.KERNEL, nbytes]]
    if not slower:
        return 0
    larger = [nbytes for nbytes in sizes if nbytes > slower[-1]]
    return larger[0] if larger else slower[-1] + 1


@dataclass(slots=True)
class _Bench:
    copier: DeviceCopier
    arena: Arena
    memory: tuple[int, int]  # what is stored from, and loaded to
    total_bytes: int
    job: int = 0

    def run(self, direction: Direction, nbytes: int) -> float:
        """Bytes per second."""
        count = max(1, self.total_bytes // nbytes)
        at = np.arange(count, dtype=np.uint64) * np.uint64(nbytes + GAP_BYTES)
        shuffled = np.random.default_rng(nbytes).permutation(at)
        half = np.uint64(self.arena.nbytes // 2)
        jobs = []
        begin = time.perf_counter()
        for is_load in (True, False):
            if direction is (Direction.STORE if is_load else Direction.LOAD):
                continue
            device = at + np.uint64(self.memory[is_load])
            host = shuffled + np.uint64(self.arena.address) + half * np.uint64(is_load)
            sources, destinations = (host, device) if is_load else (device, host)
            self.job += 1
            jobs.append(self.job)
            self.copier.submit(
                self.job,
                sources,
                destinations,
                np.full(count, nbytes, np.uint64),
                is_load=is_load,
                compute_stream=0,
                blocks=np.empty(0, np.int64),
            )
        if not self.copier.wait(jobs, WAIT_S):
            raise RuntimeError(f"copies of {count} fragments of {nbytes} bytes did not end within {WAIT_S:.0f} s")
        seconds = time.perf_counter() - begin
        ended = self.copier.finished()
        if failed := [one.job for one in ended if one.failed]:
            raise RuntimeError(f"copies of {count} fragments of {nbytes} bytes failed: jobs {failed}")
        if direction is not Direction.BOTH:
            [one] = ended
            seconds = one.seconds
        return sum(one.nbytes for one in ended) / seconds


@contextmanager
def _bench(copier: DeviceCopier, way: Way, total_bytes: int, smallest_bytes: int) -> Iterator[_Bench]:
    room = total_bytes + (total_bytes // smallest_bytes + 1) * GAP_BYTES
    try:
        fd = create_memfd("kvstore-bandwidth", 2 * room)
        try:
            arena = Arena(fd, 2 * room)
        finally:
            os.close(fd)
        memory = (copier.allocate(room), copier.allocate(room))
        copier.map_arena(arena, None, pin=way is not Way.PAGEABLE)
        while copier.pin_next(arena.address) == "piece":
            pass
        copier.stop_pinning(arena.address)
        if refusal := copier.refusal(arena.address):
            raise RuntimeError(f"the driver does not page-lock {2 * room} bytes: {refusal}")
        yield _Bench(copier, arena, memory, total_bytes)
    finally:
        copier.close()  # after the last copy, and before the memory goes
