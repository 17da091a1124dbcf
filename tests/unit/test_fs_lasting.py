"""Removals that last and sequences that rise, whatever the stop was like and whatever failed before."""

import asyncio
import errno
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.tiers import fs_paths, fs_writing
from kvstore.tiers.base import Removed, Scope, WriteOutcome
from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_directory import FsDirectory
from kvstore.tiers.fs_format import slot_bytes_for
from kvstore.tiers.fs_index import Index, IndexUnusable
from tests.fs_support import CHUNK_BYTES, FsBench, fs_bench, options

TENANT = Scope(tenant=chunk_id(0, tenant=1).tenant)
NO_COMMITS_S = 1_000.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


async def store(bench: FsBench, numbers: range, **ids: int) -> None:
    for number in numbers:
        assert await bench.write(chunk_id(number, **ids)) is WriteOutcome.STORED


async def committed(bench: FsBench) -> None:
    done = asyncio.Event()
    bench.tier._journal.after_commit(done.set)
    await done.wait()


async def held_after_a_rebuild(path: Path) -> int:
    (path / fs_paths.INDEX).unlink()
    async with fs_bench(path) as bench:
        return len(bench.held())


def test_what_was_evicted_before_a_clean_stop_does_not_come_back_after_a_later_removal(tmp_path: Path) -> None:
    """A start by the index knows no ghosts, so a stop leaves none."""

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(10), tenant=1)
            for number in range(5):
                bench.tier._writes.evict(bench.entry(chunk_id(number, tenant=1)), None)
        async with fs_bench(tmp_path) as bench:
            assert (await bench.remove(TENANT)).chunks == 5
        assert await held_after_a_rebuild(tmp_path) == 0

    run(scenario)


def test_a_removal_covers_a_chunk_whose_record_was_damaged_between_two_runs(tmp_path: Path) -> None:
    """A record that names another slot would leave the chunk where it lies, out of the removal's reach."""

    opts = options(slab_bytes=20 * slot_bytes_for(CHUNK_BYTES))

    async def scenario() -> None:
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(5), tenant=1)
        index = tmp_path / fs_paths.INDEX
        with lmdb.open(str(index), subdir=False, lock=False) as env, env.begin(write=True) as txn:
            records = {bytes(key): bytes(value) for key, value in txn.cursor() if key != b"m"}
            key, value = max(records.items(), key=lambda record: record[1][4])  # of the highest slot
            txn.put(key, value[:4] + bytes([value[4] ^ 8]) + value[5:])
        async with fs_bench(tmp_path, opts) as bench:
            assert (await bench.remove(TENANT)).chunks == 5
        assert await held_after_a_rebuild(tmp_path) == 0

    run(scenario)


def test_no_slot_is_free_again_before_an_index_that_fails_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index still says that the slot holds its chunk."""
    freed_with_index: list[bool] = []

    async def scenario() -> None:
        async with fs_bench(tmp_path, options(commit_interval_s=NO_COMMITS_S)) as bench:
            await store(bench, range(3))
            committed = asyncio.Event()
            bench.tier._journal.after_commit(committed.set)
            await committed.wait()

            def fail(*_: object, **__: object) -> None:
                raise IndexUnusable("no")

            monkeypatch.setattr(Index, "commit", fail)
            freed = asyncio.Event()
            free = bench.tier._catalog.free

            def watched(*arguments: Any) -> None:
                freed_with_index.append((tmp_path / fs_paths.INDEX).exists())
                free(*arguments)
                freed.set()

            bench.tier._catalog.free = watched  # type: ignore[method-assign]
            bench.tier._writes.evict(bench.entry(chunk_id(0)), None)
            await freed.wait()
            monkeypatch.undo()

    run(scenario)
    assert freed_with_index == [False]


def test_a_removal_covers_what_a_failed_write_was_to_overwrite_and_did_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs", options(slab_bytes=1)) as bench:  # one slot a slab
            await store(bench, range(1), tenant=1)
            fd, offset = bench.offset(chunk_id(0, tenant=1))
            place, old_header = bench.entry(chunk_id(0, tenant=1)).place, FsDirectory.read_block(fd, offset)
            bench.tier._catalog.foreign_bytes = bench.tier._catalog.cap_bytes  # so its slot is taken
            returned = bench.tier._writes._returned

            def fail(failing: Any, _error: int) -> None:
                assert failing.place == place
                FsDirectory.write_block(fd, offset, old_header)  # as if nothing had been written
                returned(failing, errno.ECANCELED)  # so it is not tried again in the same slot

            bench.tier._writes._returned = fail  # type: ignore[method-assign]
            assert await bench.write(chunk_id(5)) is WriteOutcome.ABORTED
            bench.tier._writes._returned = returned  # type: ignore[method-assign]
            bench.tier._catalog.foreign_bytes = 0
            assert (await bench.remove(TENANT)).failed is None
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        assert await held_after_a_rebuild(tmp_path / "killed") == 0

    run(scenario)


def test_a_removal_lasts_only_once_slabs_given_up_before_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab that could not be forgotten is in no catalog, and its file would bring back all that it held."""
    write_block = FsDirectory.write_block

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        slab_bytes = 5 * slot_bytes_for(CHUNK_BYTES)
        async with fs_bench(tmp_path / "fs", options(slab_bytes=slab_bytes)) as bench:
            await store(bench, range(5), tenant=1)
            await store(bench, range(5))
            slab = bench.entry(chunk_id(0, tenant=1)).place.slab
            assert slab is not bench.entry(chunk_id(0)).place.slab
            retired = asyncio.Event()
            monkeypatch.setattr(FsDirectory, "write_block", staticmethod(fail))
            bench.tier._writes.retire(slab, retired.set)
            await retired.wait()
            assert (await bench.remove(TENANT)).failed == "Input/output error"
            monkeypatch.setattr(FsDirectory, "write_block", staticmethod(write_block))
            assert (await bench.remove(TENANT)).failed is None
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        assert await held_after_a_rebuild(tmp_path / "killed") == 5

    run(scenario)


def test_a_removal_lasts_only_once_a_slab_is_forgotten_that_was_given_up_before_its_ghosts_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_block = FsDirectory.write_block

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with fs_bench(tmp_path / "fs", options(slab_bytes=5 * slot_bytes_for(CHUNK_BYTES))) as bench:
            await store(bench, range(5), tenant=1)
            slab = bench.entry(chunk_id(0, tenant=1)).place.slab
            for number in range(5):
                bench.tier._writes.evict(bench.entry(chunk_id(number, tenant=1)), None)
            await committed(bench)
            assert slab.idle
            assert len(slab.ghosts) == 5
            monkeypatch.setattr(FsDirectory, "write_block", staticmethod(fail))
            removed: asyncio.Future[Removed] = loop.create_future()
            bench.tier.remove(TENANT, removed.set_result)
            retired = asyncio.Event()
            loop.call_soon(bench.tier._writes.retire, slab, retired.set)  # when the removal has swept
            assert (await removed).failed == "Input/output error"
            await retired.wait()
            monkeypatch.setattr(FsDirectory, "write_block", staticmethod(write_block))
            assert (await bench.remove(TENANT)).failed is None
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        assert await held_after_a_rebuild(tmp_path / "killed") == 0

    run(scenario)


def test_a_slab_is_given_up_a_slice_at_a_time_and_no_slot_of_it_is_used_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_writing, "RETIRED_PER_SLICE", 2)

    async def scenario() -> None:
        async with fs_bench(tmp_path, options(slab_bytes=5 * slot_bytes_for(CHUNK_BYTES))) as bench:
            await store(bench, range(5))
            slab = bench.entry(chunk_id(0)).place.slab
            read = bench.entry(chunk_id(3))
            retired = asyncio.Event()
            bench.tier._writes.retire(slab, retired.set)
            assert len(slab.held) == 3
            read.readers = slab.reading = 1
            await store(bench, range(5, 12))
            assert slab.held == {read.place.slot: read}
            assert not retired.is_set()
            # What was evicted from it is found and zeroed by a removal that comes meanwhile.
            removing = asyncio.ensure_future(bench.remove(Scope(chunks=frozenset({chunk_id(0)}))))
            await asyncio.sleep(0)
            read.readers = slab.reading = 0
            await retired.wait()
            assert (await removing).failed is None
            assert slab not in bench.tier._catalog.slabs.values()
            assert list(bench.tier.problems()) == []
            assert sorted(bench.held()) == sorted(chunk_id(number) for number in range(5, 12))

    run(scenario)


def test_after_a_kill_sequences_go_on_beyond_all_that_was_written_since_the_last_commit(tmp_path: Path) -> None:
    """A header of then that cannot be read now may be readable later, and must not be the newer one."""

    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs", options(commit_interval_s=NO_COMMITS_S)) as bench:
            await store(bench, range(10))
            last = bench.entry(chunk_id(9)).sequence
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        seen: list[str] = []
        async with fs_bench(tmp_path / "killed", step=seen.append) as bench:
            assert "leftovers found" in seen  # it went by the index
            await store(bench, range(10, 11))
            assert bench.entry(chunk_id(10)).sequence > last

    run(scenario)


def test_after_a_rebuild_sequences_go_on_beyond_a_header_that_could_not_be_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(10))
            last = bench.entry(chunk_id(9)).sequence
            bench.flip(chunk_id(9), 0)
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert chunk_id(9) not in bench.held()
            await store(bench, range(10, 11))
            assert bench.entry(chunk_id(10)).sequence > last

    run(scenario)
