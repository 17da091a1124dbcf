"""Is the filesystem tier as fast as the disk below it, ready at once after a restart, and out of everybody's way?

In a directory of its own among the temporary files (TMPDIR), which should be on the disk in question, with 4 GB free.

store, load   chunks of three sizes, so many in flight, through a tier of this process (checksums on, commits of the
              index included; the event loop and the kind of memory are the daemon's), beside direct reads and writes
              of the same slots of the same files and memory, a call each, by as many threads, in turns. All slots have
              been written to before. GB/s of payload.
ready         a daemon on a directory with 100,000 chunks, from the start of its process to its ready line, beside one
              on an empty directory, in turns. Then how long until it holds them all.
rebuild       the same directory without its index, until it serves, beside a read of 4 KiB of each slot by the same
              number of threads.
loop delay    how late the daemon's heartbeat comes while clients keep its disk busy both ways; 99th percentile, and in
              the same run that of a process that only sleeps for as long as between two heartbeats: a machine that
              stands still now and then, or has too few cores, delays both. And while an operator asks about 100,000
              chunks on disk, beside how late it comes while nobody does.
"""

import asyncio
import gc
import mmap
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import uvloop

from benchmarks.report import Result, main, spread
from kvstore import admin
from kvstore._native import IoPool
from kvstore.client import StoreClient
from kvstore.limits import HEARTBEAT_INTERVAL_MS
from kvstore.rpc.v1 import admin_pb2
from kvstore.server import OLD_COLLECTIONS_APART
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.testing import running_daemon, start_daemon
from kvstore.tiers.base import ChunkId, Memory, ReadOutcome, Released, Scope, WriteOutcome
from kvstore.tiers.conformance import Memories, chunk_id
from kvstore.tiers.fs import FsTier
from kvstore.tiers.fs_directory import FsDirectory
from kvstore.tiers.fs_format import BLOCK_BYTES, slot_bytes_for, slot_offset
from kvstore.tiers.fs_paths import INDEX
from kvstore.tiers.fs_recovery import SCAN_THREADS
from kvstore.tiers.fs_serving import FsOptions

T = TypeVar("T")

SIZES = (512 << 10, 2 << 20, 8 << 20)
DEPTHS = (1, 4, 16)
ROUND_BYTES = 256 << 20
ROUNDS = 5
INDEXED_CHUNKS = 100_000
SMALL_BYTES = 4096  # of an indexed chunk
STARTS = 5
READY_LATER_S_MAX = 0.5
DELAY_S = 20.0
DELAY_MS_MAX = 5.0
# Prints by how many ms its sleeps ended late, the 99th percentile. Arguments: seconds in all, seconds of a sleep.
SLEEPER = """
import statistics, sys, time
seconds, sleep_s = map(float, sys.argv[1:])
late_ms, ends_s = [], time.monotonic() + seconds
while (begin_s := time.monotonic()) < ends_s:
    time.sleep(sleep_s)
    late_ms.append((time.monotonic() - begin_s - sleep_s) * 1000)
print(statistics.quantiles(late_ms, n=100)[98])
"""
TORN_S = 0.0002  # a reading of two clocks that took longer is taken again
ASKED_S = 3.0  # for each command


@asynccontextmanager
async def open_tier(path: Path, options: FsOptions, memories: Memories) -> AsyncIterator[FsTier]:
    tier = FsTier(FsDirectory.open(path), options, regions=[memories.region])
    tier.start()
    await tier.ready()
    try:
        yield tier
    finally:
        assert await tier.close(60.0)


# Throughput


def throughput(folder: Path) -> list[Result]:
    results = []
    for chunk_bytes in SIZES:
        for depth in DEPTHS:
            path = folder / f"{chunk_bytes}-{depth}"
            rates = uvloop.run(_throughput(path, chunk_bytes, depth))
            shutil.rmtree(path)
            name = f"{chunk_bytes >> 10} KiB, {depth} in flight"
            results.append(Result.of(f"store {name}", rates["store"], "GB/s", rates["raw store"]))
            results.append(Result.of(f"load {name}", rates["load"], "GB/s", rates["raw load"]))
    return results


async def _throughput(path: Path, chunk_bytes: int, depth: int) -> dict[str, list[float]]:
    count = ROUND_BYTES // chunk_bytes
    memories = Memories(count, chunk_bytes)
    memories._map.madvise(mmap.MADV_HUGEPAGE)
    for number in range(count):
        memories.fill(number, os.urandom(64) * (chunk_bytes // 64))
    options = FsOptions(
        fs_bytes=2 * ROUND_BYTES + (64 << 20),
        slab_bytes=count * slot_bytes_for(chunk_bytes),  # all of it in one slab, every slot of which is used
        io_deadline_ms=60_000,
    )
    seconds: dict[str, list[float]] = {name: [] for name in ("raw store", "store", "raw load", "load")}
    async with open_tier(path, options, memories) as tier:
        for turn in range(ROUNDS + 1):  # the first one makes the slab and writes to it for the first time
            chunks = [chunk_id(turn * count + number) for number in range(count)]
            seconds["store"].append(await _all(tier.write, WriteOutcome.STORED, chunks, memories, depth))
            entries = [tier._catalog.entries[chunk] for chunk in chunks]
            slab_fd = entries[0].place.slab.fd
            assert all(entry.place.slab.fd == slab_fd for entry in entries), "more than one slab"
            offsets = [slot_offset(entry.place.slot, entry.slot_bytes) for entry in entries]
            if turn % 2:
                seconds["raw load"].append(await _raw(os.preadv, slab_fd, offsets, memories, depth))
            seconds["load"].append(await _all(tier.read, ReadOutcome.READ, chunks, memories, depth))
            if not turn % 2:
                seconds["raw load"].append(await _raw(os.preadv, slab_fd, offsets, memories, depth))
            removed = asyncio.get_running_loop().create_future()
            tier.remove(Scope(), removed.set_result)
            await removed
            # To places that are free again.
            seconds["raw store"].append(await _raw(os.pwritev, slab_fd, offsets, memories, depth))
    return {name: [ROUND_BYTES / each / 1e9 for each in values[1:]] for name, values in seconds.items()}


async def _all(
    start: Callable[[ChunkId, Memory, Callable[[T], None], Released], None],
    expected: T,
    chunks: list[ChunkId],
    memories: Memories,
    depth: int,
) -> float:
    """Seconds for all of them: each one that ends starts the next."""
    waiting = list(enumerate(chunks))[::-1]
    ended = asyncio.get_running_loop().create_future()
    running = 0

    def done(outcome: T) -> None:
        assert outcome is expected, outcome

    def start_next() -> None:
        nonlocal running
        number, chunk = waiting.pop()
        running += 1
        start(chunk, memories.place(number % memories.count), done, released)

    def released() -> None:
        nonlocal running
        running -= 1
        if waiting:
            start_next()
        elif not running:
            ended.set_result(None)

    begin_s = time.perf_counter()
    for _ in range(depth):
        start_next()
    await ended
    return time.perf_counter() - begin_s


async def _raw(call: Callable[..., int], fd: int, offsets: list[int], memories: Memories, depth: int) -> float:
    """Head and payload of every slot in one call each, without checksums."""
    view = memoryview(memories._map)
    stride = len(view) // memories.count

    def every(first: int) -> None:
        head = Memories(1, BLOCK_BYTES)._map
        for number in range(first, len(offsets), depth):
            payload = view[number * stride : (number + 1) * stride]
            assert call(fd, [head, payload], offsets[number]) == BLOCK_BYTES + stride

    def run() -> float:
        with ThreadPoolExecutor(depth) as pool:
            begin_s = time.perf_counter()
            list(pool.map(every, range(depth)))
            return time.perf_counter() - begin_s

    return await asyncio.to_thread(run)


# Restarts


def restarts(folder: Path) -> list[Result]:
    gc.set_threshold(*gc.get_threshold()[:2], OLD_COLLECTIONS_APART)  # as in the daemon
    path, empty = folder / "indexed", folder / "empty"
    fs_bytes = 2 * INDEXED_CHUNKS * slot_bytes_for(SMALL_BYTES)
    options = FsOptions(fs_bytes=fs_bytes, queue_max=1_024)
    uvloop.run(_fill(path, options))
    ready_s, empty_s, warm_s = [], [], []
    for turn in range(STARTS):
        ready, warm = _start(path, fs_bytes, chunks=INDEXED_CHUNKS)
        ready_s.append(ready)
        warm_s.append(warm)
        empty_s.append(_start(empty / str(turn), fs_bytes, chunks=0)[0])
    later_s = statistics.median(ready_s) - statistics.median(empty_s)
    rebuild_s, raw_s = [], []
    for _ in range(ROUNDS):
        (path / INDEX).unlink()
        taken_s, slots = uvloop.run(_rebuild(path, options))
        rebuild_s.append(taken_s)
        raw_s.append(_read_heads(slots))
    return [
        Result("ready, later than empty", round(later_s, 4), "s", READY_LATER_S_MAX, round(later_s / 0.5, 4)),
        Result.of("ready with 100,000 chunks", ready_s, "s", empty_s),
        Result.of("all 100,000 chunks known", warm_s, "s", empty_s),
        Result.of("rebuild of 100,000 chunks", rebuild_s, "s", raw_s),
    ]


async def _fill(path: Path, options: FsOptions) -> None:
    memories = Memories(256, SMALL_BYTES)
    async with open_tier(path, options, memories) as tier:
        chunks = [chunk_id(number) for number in range(INDEXED_CHUNKS)]
        await _all(tier.write, WriteOutcome.STORED, chunks, memories, 256)


async def _rebuild(path: Path, options: FsOptions) -> tuple[float, dict[str, list[int]]]:
    """Seconds until the tier is ready, and the offsets of all slots by file."""
    begin_s = time.perf_counter()
    async with open_tier(path, options, Memories(1, SMALL_BYTES)) as tier:
        taken_s = time.perf_counter() - begin_s
        assert tier.stats().chunks == INDEXED_CHUNKS, f"{tier.stats().chunks} chunks came back"
        return taken_s, {
            os.readlink(f"/proc/self/fd/{slab.fd}"): [
                slot_offset(slot, slab.slot_bytes) for slot in range(slab.slot_count)
            ]
            for slab in tier._catalog.slabs.values()
        }


def _read_heads(slots: dict[str, list[int]]) -> float:
    fds = {name: os.open(name, os.O_RDONLY | os.O_DIRECT) for name in slots}
    pool = IoPool(SCAN_THREADS, 1)
    begin_s = time.perf_counter()
    for name, offsets in slots.items():
        pool.read_heads(0, fds[name], offsets)
        done = 0
        while done < len(offsets):
            select.select([pool.event_fd], [], [])
            done += len(pool.poll())
    taken_s = time.perf_counter() - begin_s
    pool.close(1.0)
    for fd in fds.values():
        os.close(fd)
    return taken_s


def _start(path: Path, fs_bytes: int, *, chunks: int) -> tuple[float, float]:
    """Seconds from the process's start to the ready line, and until it holds so many chunks."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as runtime_dir:
        flags = ["--fs-dir", str(path), "--fs-bytes", str(fs_bytes)]
        begin_s = time.perf_counter()
        daemon = start_daemon(runtime_dir=Path(runtime_dir) / "run", cpu_bytes=1 << 20, arguments=flags, verify=False)
        assert daemon.process.stdout is not None
        line = daemon.process.stdout.readline()
        ready_s = time.perf_counter() - begin_s
        daemon.endpoint = line.strip().partition("endpoint=")[2]
        assert daemon.endpoint, daemon.log()
        while daemon.tier("fs")["chunks"] < chunks:
            time.sleep(0.01)
        warm_s = time.perf_counter() - begin_s
        assert daemon.stop() == 0
        daemon.process.stdout.close()
        daemon.log_path.unlink()
    return ready_s, warm_s


# The daemon's event loop


def loop_delay(folder: Path) -> list[Result]:
    """Puts into an arena that holds a fourth of them, and gets of what is on disk, by two clients."""
    chunk_bytes, chunks = 2 << 20, 256
    payload = os.urandom(chunk_bytes)
    flags = ["--fs-dir", str(folder / "delay"), "--fs-bytes", str(2 * chunks * (chunk_bytes + BLOCK_BYTES))]
    stop = threading.Event()
    moved = {"stored": 0, "loaded": 0}

    def client(endpoint: str, name: str) -> None:
        number = 0
        with StoreClient.attach(
            endpoint, namespace={"model": "benchmark"}, chunk_bytes=chunk_bytes, hash_seed="0"
        ) as store:
            while not stop.is_set():
                keys = [f"{name}-{(number + i) % 10_000:026}".encode() for i in range(16)]
                old = [f"{name}-{(number - 96 + i) % 10_000:026}".encode() for i in range(16)]
                if name == "stored":
                    moved[name] += len(store.put(None, dict.fromkeys(keys, payload)))
                else:
                    old = [key.replace(b"loaded", b"stored") for key in old]
                    moved[name] += sum(one is not None for one in store.get(None, old))
                number += 16

    with running_daemon(cpu_bytes=chunks // 4 * chunk_bytes, arguments=flags, verify=False) as daemon:
        threads = [threading.Thread(target=client, args=(daemon.endpoint, name)) for name in moved]
        with Session.attach(
            daemon.endpoint,
            Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "looks on"}, chunk_bytes),)),
        ) as session:
            for thread in threads:
                thread.start()
            sleeper = [sys.executable, "-c", SLEEPER, str(DELAY_S), str(HEARTBEAT_INTERVAL_MS / 1000)]
            with subprocess.Popen(sleeper, stdout=subprocess.PIPE, text=True) as asleep:
                late_ms = _late_beats(session, DELAY_S)
                sleeper_ms = float(asleep.communicate()[0])
            stop.set()
            for thread in threads:
                thread.join()
        tier = daemon.tier("fs")
    p99 = statistics.quantiles(late_ms, n=100)[98]
    text = (
        f"{spread(late_ms)}; sleeper's p99 {sleeper_ms:.1f}; {moved['stored']} stored, {tier['hits']} loaded from disk"
    )
    return [Result("loop delay, p99", round(p99, 3), "ms", DELAY_MS_MAX, round(p99 / DELAY_MS_MAX, 3), text)]


def while_asked(folder: Path) -> list[Result]:
    """Of the directory that `restarts` has filled."""
    fs_bytes = 2 * INDEXED_CHUNKS * slot_bytes_for(SMALL_BYTES)
    flags = ["--fs-dir", str(folder / "indexed"), "--fs-bytes", str(fs_bytes)]
    on_disk = admin_pb2.Selection(tier="fs")
    results = []
    with running_daemon(cpu_bytes="64MiB", arguments=flags, verify=False) as daemon:
        while daemon.tier("fs")["chunks"] < INDEXED_CHUNKS:
            time.sleep(0.1)
        commands: dict[str, Callable[[], object]] = {
            "check": lambda: admin.check(daemon.endpoint),
            "ls chunks": lambda: admin.chunks(daemon.endpoint, on_disk, 1_000),
            "evict --older-than --dry-run": lambda: admin.remove(
                daemon.endpoint, on_disk, older_than_ms=1, dry_run=True
            ),
            "evict --bytes --dry-run": lambda: admin.remove(
                daemon.endpoint, on_disk, nbytes=fs_bytes // 4, dry_run=True
            ),
        }
        look = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "looks on"}, SMALL_BYTES),))
        with Session.attach(daemon.endpoint, look) as session:
            quiet_ms = _late_beats(session, ASKED_S)
            for name, ask in commands.items():
                stop = threading.Event()
                asking = threading.Thread(target=_again_and_again, args=(ask, stop))
                asking.start()
                late_ms = _late_beats(session, ASKED_S)
                stop.set()
                asking.join()
                results.append(Result.of(f"loop delay, {name}", late_ms, "ms", quiet_ms))
    return results


def _again_and_again(ask: Callable[[], object], stop: threading.Event) -> None:
    while not stop.is_set():
        ask()


def _late_beats(session: Session, seconds: float) -> list[float]:
    """By how much each heartbeat of the daemon came later than it should after the one before."""
    late_ms = []
    ends_s = time.monotonic() + seconds
    last_beat_s = _beat_s(session)
    while time.monotonic() < ends_s:
        time.sleep(0.002)
        beat_s = _beat_s(session)
        if beat_s - last_beat_s > HEARTBEAT_INTERVAL_MS / 2000:
            late_ms.append(max(0.0, (beat_s - last_beat_s) * 1000 - HEARTBEAT_INTERVAL_MS))
            last_beat_s = beat_s
    return late_ms


def _beat_s(session: Session) -> float:
    """When the daemon's last heartbeat was. Not with another thread's turn between its age and the clock: where clients
    of this process compete for the interpreter, that turn would seem to be the daemon's delay."""
    while True:
        begin_s = time.monotonic()
        age_s = session.table.heartbeat_age_ms() / 1000
        if time.monotonic() - begin_s < TORN_S:
            return begin_s - age_s


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        return [result for part in (throughput, restarts, while_asked, loop_delay) for result in part(Path(folder))]


if __name__ == "__main__":
    main("fs_tier", __doc__.splitlines()[0], measure)
