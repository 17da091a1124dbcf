"""`kvstore calibrate`: how fast this node's memory and disk are, measured, for engines to start from."""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvstore.cli.output import Json, print_json, reported
from kvstore.costmodel import TransferModel
from kvstore.errors import ConfigurationError
from kvstore.profiles import measured

PIECE_BYTES = 2 << 20
SMALL_BYTES = 4 << 10
COPY_BYTES = 256 << 20
COPY_THREADS = 2  # as the connector uses
COPY_ROUNDS = 5
DISK_THREADS = 8
DISK_BYTES = 256 << 20
SMALL_READS = 64


def calibrate(
    fs_dir: Annotated[
        Path | None, typer.Option(help="Directory of the fs tier, or another on the same disk. Without: memory only.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write it. Default: KVSTORE_PROFILE, else the configuration directory.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this node's memory and disk, and write the profile that engines start from.

    Takes some seconds and 512 MiB of memory; writes and removes a file of 256 MiB in --fs-dir. Run it while nothing
    else uses the disk. The link to a GPU is not measured: engines learn it from their first loads.
    """
    with reported(None, as_json=json):
        found = measured.Measured(_host_copy())
        if fs_dir is not None:
            disk_read, write_bytes_per_s = _disk(fs_dir)
            found = measured.Measured(found.host_copy, disk_read, write_bytes_per_s)
        path = output or measured.profile_path()
        measured.write(path, found)
    if json:
        print_json({"path": str(path), **asdict(found)})
        return
    table = Table("link", "GB/s", "overhead")
    table.add_row("host memory, one copy", *_row(found.host_copy))
    if found.disk_read is not None:
        table.add_row("disk, read", *_row(found.disk_read))
        table.add_row("disk, written", f"{(found.disk_write_bytes_per_s or 0) / 1e9:.2f}", "")
    console = Console()
    console.print(table)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def _row(link: TransferModel) -> tuple[str, str]:
    return f"{link.bytes_per_s / 1e9:.2f}", f"{link.overhead_s * 1e3:.3f} ms"


def _host_copy() -> TransferModel:
    """In pieces of a chunk's size, by as many threads as the connector has, between memory that is in no cache."""
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))

    def copy(first: int) -> None:
        np.copyto(target[first : first + PIECE_BYTES], source[first : first + PIECE_BYTES])

    with ThreadPoolExecutor(COPY_THREADS) as threads:
        rates = []
        for _ in range(COPY_ROUNDS):
            seconds = _seconds(lambda: list(threads.map(copy, range(0, COPY_BYTES, PIECE_BYTES))))
            rates.append(COPY_BYTES / seconds)
        small_s = [_seconds(lambda: threads.submit(copy, 0).result()) for _ in range(SMALL_READS)]
    rate = statistics.median(rates)
    return TransferModel(rate, max(1e-6, statistics.median(small_s) - PIECE_BYTES / rate))


def _disk(directory: Path) -> tuple[TransferModel, float]:
    """Read, and written bytes a second: past the page cache where the filesystem allows it."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".kvstore-calibrate-", dir=directory)
        os.close(descriptor)
        try:
            return _measure_file(name)
        finally:
            os.unlink(name)
    except OSError as error:
        raise ConfigurationError(
            f"--fs-dir {directory} cannot be measured ({error.strerror}); name a directory with 256 MiB free"
        ) from None


def _measure_file(name: str) -> tuple[TransferModel, float]:
    pieces = range(0, DISK_BYTES, PIECE_BYTES)
    payload = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, np.uint8).tobytes()
    with ThreadPoolExecutor(DISK_THREADS) as threads:
        target = _open_direct(name, os.O_RDWR)
        try:
            os.posix_fallocate(target, 0, DISK_BYTES)

            def write(first: int) -> None:
                with mmap.mmap(-1, PIECE_BYTES) as buffer:  # aligned
                    buffer[:] = payload
                    os.pwritev(target, [buffer], first)

            def write_all() -> None:
                list(threads.map(write, pieces))
                os.fdatasync(target)

            write_s = _seconds(write_all)
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)

            def read(first: int, nbytes: int = PIECE_BYTES) -> None:
                with mmap.mmap(-1, nbytes) as buffer:
                    os.preadv(target, [buffer], first)

            small_s = [_seconds(partial(read, first, SMALL_BYTES)) for first in pieces[:SMALL_READS]]
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _seconds(lambda: list(threads.map(read, pieces)))
        finally:
            os.close(target)
    return TransferModel(DISK_BYTES / read_s, statistics.median(small_s)), DISK_BYTES / write_s


def _open_direct(name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_DIRECT)
    except OSError:
        return os.open(name, flags)  # tmpfs and others


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return max(1e-9, time.perf_counter() - start)
