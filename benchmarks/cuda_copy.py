"""How fast do fragments get between device memory and the arena, beside what the link allows?

Of every fragment size and way: loads, stores, and both at once. The limit is one large copy of as many bytes from
page-locked memory, in the same run. Beside it vLLM's own batch copy of the same fragments, whose figure is the limit
of its lines, and how much a matrix product loses to copies that run beside it. Without a CUDA device nothing is
measured, and that is said.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from benchmarks.report import Result, main, spread
from kvstore.device_bandwidth import FRAGMENT_BYTES, ROUNDS, TOTAL_BYTES, measure
from kvstore.profiles.measured import Direction, Way

# At least so much of the limit; both ways that are page-locked together, whichever is better.
WANTED = {8 << 10: 0.6, 64 << 10: 0.85, 512 << 10: 0.95, 2 << 20: 0.95}
PRODUCT_LOSS_MAX = 0.03
PRODUCT_SIZE = 8192
PRODUCTS = 40
COPY_ROUNDS_BESIDE = 400  # some seconds in each direction: longer than all the products take
COPIES_BEGIN_S = 3.0


def measure_all() -> list[Result]:
    import torch

    if not torch.cuda.is_available():
        print("cuda_copy: no CUDA device on this machine, so nothing was measured", file=sys.stderr)
        return []
    print(f"cuda_copy: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", file=sys.stderr)
    limits = {direction: _one_large_copy(torch, direction) for direction in (Direction.LOAD, Direction.STORE)}
    limits[Direction.BOTH] = _one_large_copy_each_way(torch)
    results = []
    for found in measure():
        name = f"{found.way} {found.direction} {_size(found.fragment_bytes)}"
        results.append(_result(name, found.bytes_per_s, limits[found.direction]))
        if found.direction is not Direction.BOTH and found.way is not Way.PAGEABLE:
            vllm = _vllm_batch_copy(torch, found.direction, found.fragment_bytes)
            results.append(_result(f"{name}, against vLLM's", found.bytes_per_s, vllm))
    results.append(_product_beside_copies(torch))
    for problem in _problems(results):
        print(f"cuda_copy: {problem}", file=sys.stderr)
    return results


def _problems(results: Sequence[Result]) -> list[str]:
    """What is less than the project wants of itself."""
    ratios = {result.name: result.ratio for result in results}
    problems = []
    for nbytes, wanted in WANTED.items():
        for direction in (Direction.LOAD, Direction.STORE):
            names = [f"{way} {direction} {_size(nbytes)}" for way in (Way.COPY_ENGINE, Way.KERNEL)]
            best = max((ratios[name] for name in names if name in ratios), default=0.0)
            if best < wanted:
                problems.append(f"{direction}s of {_size(nbytes)} reach {best:.2f} of one large copy; wanted: {wanted}")
            beside = max((ratios[f"{name}, against vLLM's"] for name in names if name in ratios), default=0.0)
            if beside < 1:
                problems.append(f"{direction}s of {_size(nbytes)} reach {beside:.2f} of vLLM's batch copy")
    lost = 1 - ratios.get("matrix product beside copies", 1.0)
    if lost > PRODUCT_LOSS_MAX:
        problems.append(f"a matrix product beside copies loses {lost:.1%}; at most {PRODUCT_LOSS_MAX:.0%} is wanted")
    return problems


def _result(name: str, values: Sequence[float], limits: Sequence[float]) -> Result:
    scaled = [value / 1e9 for value in values]
    limit = statistics.median(limits) / 1e9
    value = statistics.median(scaled)
    return Result(name, round(value, 3), "GB/s", round(limit, 3), round(value / limit, 4), spread(scaled))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _timed(torch: ModuleType, act: Callable[[], object], nbytes: int) -> list[float]:
    """Bytes per second of each round, by events on the current stream."""
    speeds = []
    for number in range(ROUNDS + 1):  # the first one warms up
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        act()
        end.record()
        end.synchronize()
        if number:
            speeds.append(nbytes / (begin.elapsed_time(end) / 1e3))
    return speeds


def _one_large_copy(torch: ModuleType, direction: Direction) -> list[float]:
    host = torch.empty(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(TOTAL_BYTES, dtype=torch.uint8, device="cuda")
    to, of = (device, host) if direction is Direction.LOAD else (host, device)
    return _timed(torch, lambda: to.copy_(of, non_blocking=True), TOTAL_BYTES)


def _one_large_copy_each_way(torch: ModuleType) -> list[float]:
    hosts = [torch.empty(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(TOTAL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return _timed(torch, copy, 2 * TOTAL_BYTES)


def _vllm_batch_copy(torch: ModuleType, direction: Direction, nbytes: int) -> list[float]:
    from vllm import _custom_ops

    count = TOTAL_BYTES // nbytes
    room = count * (nbytes + 256)
    host = torch.empty(room, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(room, dtype=torch.uint8, device="cuda")
    at = np.arange(count, dtype=np.int64) * (nbytes + 256)
    shuffled = np.random.default_rng(nbytes).permutation(at)
    here, there = torch.from_numpy(at + device.data_ptr()), torch.from_numpy(shuffled + host.data_ptr())
    sources, destinations = (there, here) if direction is Direction.LOAD else (here, there)
    sizes = torch.full((count,), nbytes, dtype=torch.int64)
    any_order = direction is Direction.LOAD
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        return _timed(
            torch,
            lambda: _custom_ops.swap_blocks_batch(sources, destinations, sizes, is_src_access_order_any=any_order),
            TOTAL_BYTES,
        )


def _product_beside_copies(torch: ModuleType) -> Result:
    """Products per second with loads and stores by the copy engines beside them; the limit is without."""
    import threading

    factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda")

    def products() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            factor @ factor
        torch.cuda.synchronize()
        return PRODUCTS / (time.perf_counter() - begin)

    products()
    alone = [products() for _ in range(ROUNDS)]
    stop = threading.Event()

    def copies() -> None:
        while not stop.is_set():
            for _ in measure(ways=[Way.COPY_ENGINE], fragment_bytes=[512 << 10], rounds=COPY_ROUNDS_BESIDE):
                if stop.is_set():
                    return

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        time.sleep(COPIES_BEGIN_S)  # its memory is allocated and page-locked by then
        beside = [products() for _ in range(ROUNDS)]
    finally:
        stop.set()
        thread.join()
    return Result.of("matrix product beside copies", beside, "1/s", alone)


if __name__ == "__main__":
    assert set(WANTED) <= set(FRAGMENT_BYTES)
    main("cuda_copy", __doc__ or "", measure_all)
