"""How fast do chunks get into the store and out of it, beside what the machine's memory allows?

One daemon, this process as its client, batches of 64 chunks of 2 MiB, everything mapped before. A put ends when the
daemon has committed its chunks, as the table or its answer says. The limits are copies of the same bytes in the same
rounds: with two threads and streaming stores for put, one thread's memcpy for get_into and get. "Two at once" are two
threads that put batch after batch through one client, until the last chunk has been committed, beside copies of as many
batches.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks.report import Result, main
from kvstore._native import Copier
from kvstore.client import Loaded, StoreClient, Stored
from kvstore.testing import running_daemon

CHUNK_BYTES = 2 << 20
BATCH = 64
ROUNDS = 25
CALLERS, CALLER_BATCHES, CALLERS_ROUNDS = 2, 4, 8
COPY_THREADS = 2
MAP_S_MAX = 60.0

T = TypeVar("T")


def measure() -> list[Result]:
    rng = np.random.default_rng(0)
    payloads = [rng.integers(0, 256, CHUNK_BYTES, np.uint8) for _ in range(BATCH)]
    buffers = [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(BATCH)]
    copier = Copier(COPY_THREADS)
    for array in (*payloads, *buffers):
        copier.add_region(array.ctypes.data, array.nbytes)
    # To the type checker an array is no buffer before Python 3.12; its view is one.
    given, taken = ([array.data for array in arrays] for arrays in (payloads, buffers))
    sources, targets = (np.array([a.ctypes.data for a in arrays], np.uint64) for arrays in (payloads, buffers))
    sizes = np.full(BATCH, CHUNK_BYTES, np.uint64)

    def stream_copy() -> None:
        copier.submit(0, sources, targets, sizes)
        assert copier.wait([0], 60.0)
        copier.finished()

    def memcpy() -> None:
        for payload, buffer in zip(payloads, buffers, strict=True):
            np.copyto(buffer, payload)

    seconds: dict[str, list[float]] = {name: [] for name in ("ceiling", "put", "memcpy", "get_into", "get")}

    def timed(name: str, act: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = act()
        seconds[name].append(time.perf_counter() - begin)
        return result

    with (
        running_daemon(cpu_bytes=(ROUNDS + 2) * BATCH * CHUNK_BYTES, verify=False) as daemon,
        StoreClient.attach(
            daemon.endpoint, namespace={"model": "benchmark"}, chunk_bytes=CHUNK_BYTES, hash_seed="0"
        ) as store,
    ):
        assert store.wait_until_mapped(MAP_S_MAX), "the arena was not mapped in time"
        for number in range(ROUNDS + 1):  # the first one warms up
            keys = _keys(number)
            if number % 2:  # in turns: who copies second finds some of the source in a cache
                timed("ceiling", stream_copy)
            outcomes = timed("put", partial(store.put, None, dict(zip(keys, given, strict=True))))
            if not number % 2:
                timed("ceiling", stream_copy)
            assert set(outcomes.values()) == {Stored()}
            timed("memcpy", memcpy)
            loaded = timed("get_into", partial(store.get_into, None, dict(zip(keys, taken, strict=True))))
            assert set(loaded.values()) == {Loaded()}
            assert all(np.array_equal(a, b) for a, b in zip(payloads, buffers, strict=True))
            timed("get", partial(store.get, None, keys))
    rates = {name: [BATCH * CHUNK_BYTES / s / 1e9 for s in values[1:]] for name, values in seconds.items()}
    return [
        Result.of_pairs("put", rates["put"], "GB/s", rates["ceiling"]),
        _two_at_once(given, stream_copy),
        Result.of_pairs("get_into", rates["get_into"], "GB/s", rates["memcpy"]),
        Result.of_pairs("get", rates["get"], "GB/s", rates["memcpy"]),
    ]


def _two_at_once(payloads: list[memoryview], stream_copy: Callable[[], None]) -> Result:
    batches = CALLERS * CALLER_BATCHES
    rates: list[float] = []
    ceilings: list[float] = []
    with (
        running_daemon(cpu_bytes=((CALLERS_ROUNDS + 1) * batches + 1) * BATCH * CHUNK_BYTES, verify=False) as daemon,
        StoreClient.attach(
            daemon.endpoint, namespace={"model": "benchmark"}, chunk_bytes=CHUNK_BYTES, hash_seed="0"
        ) as store,
        ThreadPoolExecutor(CALLERS) as callers,
    ):

        def put(numbers: range) -> None:
            for number in numbers:
                outcomes = store.put(None, dict(zip(_keys(number), payloads, strict=True)))
                assert set(outcomes.values()) == {Stored()}

        def copy(numbers: range) -> None:
            for _ in numbers:
                stream_copy()

        def put_in_turns(numbers: range) -> None:
            list(callers.map(put, [numbers[caller::CALLERS] for caller in range(CALLERS)]))

        assert store.wait_until_mapped(MAP_S_MAX), "the arena was not mapped in time"
        both: list[tuple[list[float], Callable[[range], None]]] = [(rates, put_in_turns), (ceilings, copy)]
        for number in range(CALLERS_ROUNDS + 1):
            for measured, act in both if number % 2 else both[::-1]:
                begin = time.perf_counter()
                act(range(number * batches, (number + 1) * batches))
                measured.append(batches * BATCH * CHUNK_BYTES / (time.perf_counter() - begin) / 1e9)
    return Result.of_pairs("put, two at once", rates[1:], "GB/s", ceilings[1:])  # the first round warmed up


def _keys(number: int) -> list[bytes]:
    """Of one batch."""
    return [number.to_bytes(16, "big") + i.to_bytes(16, "big") for i in range(BATCH)]


if __name__ == "__main__":
    main("store_path", __doc__.splitlines()[0], measure)
