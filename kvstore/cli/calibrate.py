"""`kvstore calibrate`: how fast this node's memory, disk and GPU are, for engines, `plan` and `simulate` to start
from."""

import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvstore.cli.output import Json, print_json, print_table, reported
from kvstore.costmodel import TransferModel
from kvstore.device_bandwidth import measure_device, open_device
from kvstore.errors import ConfigurationError, KVStoreError
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
        Path | None, typer.Option(help="Directory of the fs tier, or another on the same disk. Without: no disk.")
    ] = None,
    device: Annotated[
        int | None, typer.Option(help="CUDA device to measure. Default: the first, where there is one.", min=0)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write it. Default: KVSTORE_PROFILE, else the configuration directory.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this node's memory, disk and GPU, and write the profile that engines, plan and simulate start from.

    Takes some seconds (with a GPU up to a minute) and 600 MiB of memory, of the GPU too; writes and removes a file of
    256 MiB in --fs-dir. Run it while nothing else uses the disk and the GPU. One GPU stands for the node's others.
    """
    with reported(None, as_json=json):
        found = measured.Measured(_host_copy(), node=socket.gethostname(), at_s=time.time())
        if fs_dir is not None:
            disk_read, write_bytes_per_s = _disk(fs_dir)
            found = replace(found, disk_read=disk_read, disk_write_bytes_per_s=write_bytes_per_s)
        copies, no_device = _device(device)
        found = replace(found, device=copies)
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
    print_table(table)
    if copies is not None:
        print_table(_device_table(copies))
    else:
        console.print(f"no GPU was measured: {no_device}", highlight=False, soft_wrap=True)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def _row(link: TransferModel) -> tuple[str, str]:
    return f"{link.bytes_per_s / 1e9:.2f}", f"{link.overhead_s * 1e3:.3f} ms"


def _device(number: int | None) -> tuple[measured.Device | None, str]:
    """What was measured, or why nothing was. ConfigurationError: the device that was asked for is not there."""
    try:
        open_device(measured.Way.COPY_ENGINE, device=number or 0).close()
    except RuntimeError as absent:
        if number is not None:
            raise ConfigurationError(f"--device {number} cannot be used: {absent}") from None
        return None, str(absent)
    try:
        return measure_device(partial(open_device, device=number or 0)), ""
    except RuntimeError as problem:
        raise KVStoreError(
            f"the copies of the CUDA device cannot be measured: {problem}. With CUDA_VISIBLE_DEVICES= it is left out"
        ) from None


def _device_table(copies: measured.Device) -> Table:
    directions = tuple(dict.fromkeys(rate.direction for rate in copies.rates))
    table = Table("fragment", "by", *directions, title=f"{copies.name}, GB/s")
    speeds = {(rate.way, rate.fragment_bytes, rate.direction): rate.bytes_per_s / 1e9 for rate in copies.rates}
    for way, nbytes in dict.fromkeys((rate.way, rate.fragment_bytes) for rate in copies.rates):
        table.add_row(
            f"{nbytes >> 10} KiB", way, *(f"{speeds[way, nbytes, direction]:.2f}" for direction in directions)
        )
    return table


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
