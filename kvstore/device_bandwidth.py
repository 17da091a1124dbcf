"""How fast a CUDA device copies: by fragment size, direction, both at once, and the way that fragments go.

What a node's profile has of its device, and so what `copy_backend=auto` and the admission model start from. Every
measurement moves the same number of bytes, in fragments that lie together on neither side, between device memory of its
own and an arena of its own, and is timed by the device's events; for both directions at once, and for a lone fragment,
by this process's clock.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstore import numa
from kvstore._native import Arena, DeviceCopier, create_memfd
from kvstore.profiles.measured import Device, Direction, Rate, Way

TOTAL_BYTES = 256 << 20
LONE_BYTES, LONE_ROUNDS = 4 << 10, 50
FRAGMENT_BYTES = (2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 512 << 10, 2 << 20)
ROUNDS = 5
GAP_BYTES = 256  # between fragments, so that no two lie together
WAIT_S = 120.0
EVERY_FRAGMENT = (1 << 64) - 1


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
    directions: Sequence[Direction] = tuple(Direction),
    fragment_bytes: Sequence[int] = FRAGMENT_BYTES,
    total_bytes: int = TOTAL_BYTES,
    rounds: int = ROUNDS,
) -> Iterator[Bandwidth]:
    """One result after the other; takes some seconds on a fast link. The kernel is left out where there is none.
    RuntimeError as of `opened`, and for a copy that fails."""
    for way in ways:
        try:
            copier = opened(way)
        except ValueError:
            assert way is Way.KERNEL, f"{way} was refused"
            continue
        with _bench(copier, way, total_bytes, min(fragment_bytes)) as bench:
            for nbytes in fragment_bytes:
                for direction in directions:
                    bench.run(direction, nbytes)  # warms up
                    speeds = [bench.run(direction, nbytes).bytes_per_s for _ in range(rounds)]
                    yield Bandwidth(way, direction, nbytes, tuple(speeds))


def measure_device(opened: Open = open_device, **options: Any) -> Device:
    """For the node's profile: the median of each measurement, one direction at a time, which is all that anybody asks
    of a profile. `options` are `measure`'s. RuntimeError: no driver, no such device, or a copy that fails."""
    copier = opened(Way.COPY_ENGINE)
    name = copier.device_name
    with _bench(copier, Way.COPY_ENGINE, LONE_BYTES, LONE_BYTES) as bench:
        lone_s = [bench.run(Direction.LOAD, LONE_BYTES).elapsed_s for _ in range(LONE_ROUNDS)]
    rates = tuple(
        Rate(found.way, found.direction, found.fragment_bytes, statistics.median(found.bytes_per_s))
        for found in measure(opened, directions=(Direction.LOAD, Direction.STORE), **options)
    )
    return Device(name, statistics.median(lone_s), rates)


class _Run(NamedTuple):
    elapsed_s: float  # by this process's clock, from the submission on
    bytes_per_s: float


@dataclass(slots=True)
class _Bench:
    copier: DeviceCopier
    arena: Arena
    memory: tuple[int, int]  # what is stored from, and loaded to
    total_bytes: int
    job: int = 0

    def run(self, direction: Direction, nbytes: int) -> _Run:
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
        elapsed_s = time.perf_counter() - begin
        ended = self.copier.finished()
        if failed := [one.job for one in ended if one.failed]:
            raise RuntimeError(f"copies of {count} fragments of {nbytes} bytes failed: jobs {failed}")
        seconds = elapsed_s if direction is Direction.BOTH else ended[0].seconds
        return _Run(elapsed_s, sum(one.nbytes for one in ended) / max(seconds, 1e-9))


@contextmanager
def _bench(copier: DeviceCopier, way: Way, total_bytes: int, smallest_bytes: int) -> Iterator[_Bench]:
    room = total_bytes + (total_bytes // smallest_bytes + 1) * GAP_BYTES
    try:
        fd = create_memfd("kvstore-bandwidth", 2 * room)
        try:
            arena = Arena(fd, 2 * room)
        finally:
            os.close(fd)
        numa.spread(arena, numa.memory_nodes())  # as the daemon's
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
