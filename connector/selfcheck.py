"""Whether copies on this device do what they should: asked of it once, before an engine uses them.

Round trips of known bytes through an arena of their own, for fragments from a few hundred bytes to a megabyte, at odd
addresses, in shuffled order, each right behind work on the compute stream that still writes what is stored and still
zeroes what is loaded. It finds a driver, device or build that copies wrongly or out of order, not a race that shows
once a day.
"""

import os
from collections.abc import Callable

import numpy as np
import torch

from kvstore._native import Arena, DeviceCopier, create_memfd, fill
from kvstore.errors import KVStoreError

HALF_BYTES = 2 << 20
MEMORY_BYTES = 2 * HALF_BYTES  # of device memory that it needs: stored from one half, loaded to the other
FRAGMENT_BYTES = (312, 8 << 10, 64 << 10, 1 << 20)
LATE_WRITES = 200  # on the compute stream, before each store and load; about a millisecond
UNTOUCHED = 0xEE
WAIT_S = 60.0


class DeviceCopiesWrongly(KVStoreError):
    """Nothing may be stored or loaded on this device."""


def check_device(
    copier: DeviceCopier, memory: torch.Tensor, compute_stream: Callable[[], int], *, pins: bool = True
) -> None:
    """DeviceCopiesWrongly, saying how. `copier` is the check's own, and closed; `memory` is MEMORY_BYTES of uint8 on
    its device."""
    assert memory.nbytes == MEMORY_BYTES, f"{memory.nbytes} bytes to check with, not {MEMORY_BYTES}"
    fd = create_memfd("kvstore-self-check", HALF_BYTES)
    try:
        arena = Arena(fd, HALF_BYTES)
    finally:
        os.close(fd)
    try:
        copier.add_memory(memory.data_ptr(), memory.nbytes)
        copier.map_arena(arena, None, pin=pins)
        while copier.pin_next(arena.address) == "piece":
            pass
        copier.stop_pinning(arena.address)
        for number, nbytes in enumerate(FRAGMENT_BYTES):
            _round_trip(copier, memory, arena, compute_stream, fragment_bytes=nbytes, job=2 * number)
    finally:
        copier.close()  # after the last copy: the memory goes next
        arena.close()


def _round_trip(
    copier: DeviceCopier,
    memory: torch.Tensor,
    arena: Arena,
    compute_stream: Callable[[], int],
    *,
    fragment_bytes: int,
    job: int,
) -> None:
    source, target = memory[:HALF_BYTES], memory[HALF_BYTES:]
    rng = np.random.default_rng(fragment_bytes)
    room = fragment_bytes + 40
    count = HALF_BYTES // room
    shifts = rng.integers(0, 40, (2, count))
    here = np.arange(count) * room + shifts[0]
    there = rng.permutation(count) * room + shifts[1]
    known = rng.integers(0, 256, HALF_BYTES, np.uint8)
    stored = np.full(HALF_BYTES, UNTOUCHED, np.uint8)
    loaded = np.zeros(HALF_BYTES, np.uint8)
    fill(arena.address, HALF_BYTES, UNTOUCHED)
    late = (known + LATE_WRITES % 256).astype(np.uint8)
    for begin, end in zip(here, there, strict=True):
        stored[end : end + fragment_bytes] = late[begin : begin + fragment_bytes]
        loaded[begin : begin + fragment_bytes] = late[begin : begin + fragment_bytes]

    def copy(number: int, *, is_load: bool) -> None:
        device = (here + (memory.data_ptr() + HALF_BYTES * is_load)).astype(np.uint64)
        in_arena = (there + arena.address).astype(np.uint64)
        ends = (in_arena, device) if is_load else (device, in_arena)
        copier.submit(
            number,
            *ends,
            np.full(count, fragment_bytes, np.uint64),
            is_load=is_load,
            compute_stream=compute_stream(),
            blocks=np.array([is_load], np.int64),
        )
        what = f"{'load' if is_load else 'store'} of {count} fragments of {fragment_bytes} bytes"
        if not copier.wait([number], WAIT_S):
            raise DeviceCopiesWrongly(f"a {what} did not end within {WAIT_S:.0f} s")
        [ended] = copier.finished()
        if ended.failed:
            raise DeviceCopiesWrongly(f"a {what} failed: {copier.lost or 'the driver refused it'}")

    source.copy_(torch.from_numpy(known))
    for _ in range(LATE_WRITES):
        source.add_(1)
    copy(job, is_load=False)
    with arena.view() as view:
        host = np.frombuffer(bytes(view), np.uint8)
    if not np.array_equal(host, stored):
        raise DeviceCopiesWrongly(
            f"stores of fragments of {fragment_bytes} bytes brought {int((host != stored).sum())} of {HALF_BYTES} "
            "bytes that are not what was computed"
        )
    for value in range(LATE_WRITES, -1, -1):
        target.fill_(value % 256)
    copy(job + 1, is_load=True)
    found = target.cpu().numpy()
    if not np.array_equal(found, loaded):
        raise DeviceCopiesWrongly(
            f"loads of fragments of {fragment_bytes} bytes brought {int((found != loaded).sum())} of {HALF_BYTES} "
            "bytes that are not what was stored"
        )
