"""What does a copy plan cost, and what does cutting pages into shards cost the copy?

The first rank of an engine of each tensor parallel size stores and loads one step of 2,048 tokens in chunks that every
size up to 8 shares. Expansion is from block ids and slots to fragments, of all that the rank owns; its limit is 30 us
and 20 ns a fragment. Building the layout happens once per engine and has no limit. Bytes per second are those of the
fragments through the copy threads, beside as many bytes in pieces of 1 MiB the same way.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Result, main, spread
from connector.layout import (
    AcrossTp,
    ChunkLayout,
    Fragments,
    LayerPages,
    PageMapping,
    PerRank,
    Run,
    slot_addresses,
)
from kvstore._native import SLOT_ALIGNMENT, Copier, class_bytes

LCM = 8
STEP_TOKENS = 2_048
BASE_US, FRAGMENT_NS = 30.0, 20.0
ROUNDS = 15
COPY_ROUNDS = 31  # the first warms up
COPY_BYTES_MAX = 256 << 20
COPY_THREADS = 2
COPY_S_MAX = 60.0
PLAIN_BYTES = 1 << 20
UNIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Geometry:
    """One KV cache group. `heads` 1 and no cut: the same bytes on every rank (MLA), or a state that is never cut."""

    name: str
    layers: int
    heads: int
    head_bytes: int  # of one head's page
    block_tokens: int
    is_state: bool = False


GEOMETRIES = (
    Geometry("Llama-3-70B", 80, 8, 16 * 2 * 128 * 2, 16),
    Geometry("DeepSeek-V3", 61, 1, 64 * 576 * 2, 64),
    Geometry("Kimi-K3-like, MLA layers", 15, 1, 64 * 576 * 2, 64),
    Geometry("Kimi-K3-like, linear attention layers", 46, 1, 4 << 20, 2_048, is_state=True),
)


def layout_of(geometry: Geometry, tp: int, blocks: int, address: int) -> ChunkLayout:
    """Of rank 0. A layer's pages lie together."""
    if geometry.is_state:
        page = geometry.head_bytes // tp
        cut: AcrossTp | PerRank = PerRank(0, tp)
    else:
        each = max(1, geometry.heads // tp)
        page = each * geometry.head_bytes
        writers = max(1, tp // geometry.heads)
        canonical, run = geometry.heads * geometry.head_bytes, Run(0, 0, page, 1, page, page)
        mapping = PageMapping(canonical, 1, geometry.heads, (run,), writers, 0)
        cut = AcrossTp((mapping,) * geometry.layers, LCM)
    layers = [LayerPages(address + i * blocks * page, page, page) for i in range(geometry.layers)]
    per_chunk = max(1, 128 // geometry.block_tokens)
    return ChunkLayout(layers, blocks_per_chunk=per_chunk, block_count=blocks, cut=cut)


def measure() -> list[Result]:
    results = []
    for geometry in GEOMETRIES:
        for tp in (1, 2, 4, 8):
            results += _measured(geometry, tp)
    return results


def _measured(geometry: Geometry, tp: int) -> list[Result]:
    name = f"{geometry.name}, TP {tp}"
    blocks = max(1, STEP_TOKENS // geometry.block_tokens)
    built = _seconds(lambda: layout_of(geometry, tp, blocks, 1 << 32), 3)
    layout = layout_of(geometry, tp, blocks, 1 << 32)
    chunks = blocks // layout.blocks_per_chunk
    ids = np.random.default_rng(0).permutation(blocks)[: chunks * layout.blocks_per_chunk].astype(np.int32)
    slots = np.arange(chunks, dtype=np.uint32)
    size = class_bytes(layout.chunk_bytes)
    unit_bytes = max(UNIT_BYTES, size)

    def expand() -> int:
        return len(layout.fragments(ids, 0, slot_addresses(1 << 40, slots, size, unit_bytes)).sizes)

    fragments = expand()
    expanded = [seconds * 1e6 for seconds in _seconds(expand, ROUNDS)]
    limit = BASE_US + FRAGMENT_NS * fragments / 1000
    value = statistics.median(expanded)
    ratio, title = round(value / limit, 3), f"{name}: expansion of {fragments} fragments"
    results = [
        Result(title, round(value, 1), "us", round(limit, 1), ratio, spread(expanded)),
        Result(f"{name}: building the layout, once", round(statistics.median(built) * 1e3, 2), "ms", 0.0, 0.0),
    ]
    return [*results, *_copies(name, geometry, tp, blocks)]


def _copies(name: str, geometry: Geometry, tp: int, blocks: int) -> list[Result]:
    """As many whole chunks as fit the memory that this benchmark may take."""
    probe = layout_of(geometry, tp, blocks, 1 << 32)
    chunks = max(1, min(blocks // probe.blocks_per_chunk, COPY_BYTES_MAX // class_bytes(probe.chunk_bytes)))
    blocks = chunks * probe.blocks_per_chunk
    page = geometry.head_bytes // tp if geometry.is_state else max(1, geometry.heads // tp) * geometry.head_bytes
    device = _memory(geometry.layers * blocks * page)
    size = class_bytes(probe.chunk_bytes)
    arena = _memory(chunks * size)
    layout = layout_of(geometry, tp, blocks, device.ctypes.data)
    ids = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    addresses = np.uint64(arena.ctypes.data) + np.arange(chunks, dtype=np.uint64) * np.uint64(size)
    stored, loaded = layout.written(ids, 0, addresses), layout.fragments(ids, 0, addresses)
    copier = Copier(COPY_THREADS)
    for memory in (device, arena):
        copier.add_region(memory.ctypes.data, memory.nbytes)

    def run(sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> None:
        copier.submit(0, sources, targets, sizes)
        assert copier.wait([0], COPY_S_MAX)
        copier.finished()

    def against_plain(what: str, plan: Fragments, sources: np.ndarray, targets: np.ndarray) -> Result:
        begins = np.arange(0, plan.nbytes, PLAIN_BYTES, dtype=np.uint64)
        sizes = np.minimum(np.uint64(PLAIN_BYTES), np.uint64(plan.nbytes) - begins)
        plain = (begins + sources.min(), begins + targets.min(), sizes)
        # Each first in turn: who copies second finds some of the source in a cache.
        jobs = [("fragments", (sources, targets, plan.sizes)), ("plain", plain)]
        rates: dict[str, list[float]] = {"fragments": [], "plain": []}
        for number in range(COPY_ROUNDS):
            for key, job in jobs if number % 2 else jobs[::-1]:
                begin = time.perf_counter()
                run(*job)
                if number:
                    rates[key].append(plan.nbytes / (time.perf_counter() - begin) / 1e9)
        title = f"{name}: {what} in fragments of {plan.nbytes // len(plan.sizes)} bytes"
        return Result.of_pairs(title, rates["fragments"], "GB/s", rates["plain"])

    results = [
        against_plain("store", stored, stored.device, stored.arena),
        against_plain("load", loaded, loaded.arena, loaded.device),
    ]
    copier.close()
    return results


def _memory(nbytes: int) -> np.ndarray:
    """At the beginning of a page, like an arena's and an engine's; numpy's own begins 16 bytes behind it."""
    memory = np.ones(nbytes + SLOT_ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % SLOT_ALIGNMENT :][:nbytes]


def _seconds(act: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    main("layout", __doc__.splitlines()[0], measure)
