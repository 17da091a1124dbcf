"""The fs tier keeps a descriptor for each slab, one of its directory and one of its lock: many of them, closed ones
whose numbers others have, and those of a directory that is there again."""

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvstore import server
from kvstore.tiers import fs, fs_paths
from kvstore.tiers.base import ReadOutcome, Scope, WriteOutcome
from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_directory import FsDirectory
from kvstore.tiers.fs_format import slot_bytes_for
from tests.fs_support import CHUNK_BYTES, FsBench, fs_bench, options, until

SELECT_MAX = 1_024
TENANT = Scope(tenant=chunk_id(0, tenant=1).tenant)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


async def store(bench: FsBench, numbers: range, **ids: int) -> None:
    for number in numbers:
        assert await bench.write(chunk_id(number, **ids)) is WriteOutcome.STORED


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Those up to 1,023 are taken, as by the slabs of a large disk."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = before
    wanted = max(soft, SELECT_MAX + 256)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(SELECT_MAX)]
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
def test_headers_are_read_however_many_slabs_are_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(5))
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert len(bench.held()) == 5

    run(scenario)


def test_a_large_disk_raises_the_limit_by_its_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 1_024}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.update(soft=limit[0]))
    server._raise_descriptor_limit(0)
    without = limits["soft"]
    server._raise_descriptor_limit(32 << 40)
    assert limits["soft"] >= without + (32 << 40) // (8 << 30)


def test_a_slab_that_could_not_be_forgotten_and_was_given_up_since_is_not_forgotten_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is closed then, and the next slab has its number."""
    write_block = FsDirectory.write_block

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        slots = 12  # so many that the slab is forgotten as a whole
        opts = options(slab_bytes=slots * slot_bytes_for(CHUNK_BYTES))
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(slots), tenant=1)
            slab = bench.entry(chunk_id(0, tenant=1)).place.slab
            monkeypatch.setattr(FsDirectory, "write_block", staticmethod(fail))
            assert (await bench.remove(TENANT)).failed == "Input/output error"
            monkeypatch.setattr(FsDirectory, "write_block", staticmethod(write_block))
            with contextlib.ExitStack() as taken:
                while (lower := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) < slab.fd:
                    taken.callback(os.close, lower)  # so that the slab's number is the first one to be free
                os.close(lower)
                retired = asyncio.Event()
                bench.tier._writes.retire(slab, retired.set)
                await retired.wait()
                bench.tier._writes.health.succeeded()
                await store(bench, range(slots))
                assert bench.entry(chunk_id(0)).place.slab.fd == slab.fd
                assert (await bench.remove(TENANT)).failed is None
        async with fs_bench(tmp_path, opts) as bench:
            for number in range(slots):
                outcome, content = await bench.read(chunk_id(number))
                bench.assert_right(chunk_id(number), outcome, content)
                assert outcome is ReadOutcome.READ

    run(scenario)


def test_after_its_lock_was_removed_the_tier_still_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "TICK_S", 0.01)

    async def scenario() -> None:
        opts = options(32 << 20, slab_bytes=10 * slot_bytes_for(CHUNK_BYTES))
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(10))
            (tmp_path / fs_paths.LOCK).unlink()
            await until((tmp_path / fs_paths.LOCK).exists, "there is a lock again")
            await until(lambda: bench.tier.sick is None, "the directory is the tier's again")
            await store(bench, range(10, 100))
            assert len(bench.held()) == 100

    run(scenario)
