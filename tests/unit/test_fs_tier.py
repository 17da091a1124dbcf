"""The filesystem tier alone: restarts, damage, caps, failing disks, hanging disks, vanishing directories."""

import asyncio
import contextlib
import errno
import gc
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore._native import IoPool, crc32c
from kvstore.tiers import fs, fs_check, fs_journal, fs_paths, fs_recovery, fs_removal, fs_writing
from kvstore.tiers.base import ChunkId, Memory, ReadOutcome, Removed, Scope, WriteOutcome
from kvstore.tiers.conformance import Memories, chunk_id, outcome_of
from kvstore.tiers.fs import FsTier
from kvstore.tiers.fs_catalog import TICKS_ARE_TIMES_FROM, small_files_bytes_for
from kvstore.tiers.fs_directory import DirectoryInUse, FsDirectory
from kvstore.tiers.fs_format import BLOCK_BYTES, SlabHeader, SlotHeader, seal, slot_bytes_for, slot_offset
from kvstore.tiers.fs_index import Index, IndexUnusable
from tests.fs_support import (
    CAP_BYTES,
    CHUNK_BYTES,
    WAIT_S,
    FsBench,
    descriptors,
    du,
    fs_bench,
    options,
    problems_found,
    until,
)
from tests.hanging_memory import HangingMemory

SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)
Scenario = Callable[[], Awaitable[None]]


@pytest.fixture
def hanging() -> Iterator[HangingMemory]:
    """Memory for one chunk."""
    with HangingMemory(slot_bytes_for(CHUNK_BYTES) - BLOCK_BYTES) as memory:
        yield memory


def run(scenario: Scenario) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


async def store(bench: FsBench, numbers: range, **ids: int) -> None:
    for number in numbers:
        assert await bench.write(chunk_id(number, **ids)) is WriteOutcome.STORED


async def found(bench: FsBench, numbers: range) -> list[int]:
    """Which of the chunks can be read; that each brings its own bytes is asserted."""
    present = []
    for number in numbers:
        outcome, content = await bench.read(chunk_id(number))
        bench.assert_right(chunk_id(number), outcome, content)
        if outcome is ReadOutcome.READ:
            present.append(number)
    return present


# Restarts


def test_warm_after_a_clean_restart_by_the_index_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
        monkeypatch.setattr(fs_recovery.Recovery, "_headers", None)  # no header may be needed
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(21)) == list(range(20))
            assert bench.tier.stats().torn == bench.tier.stats().corruptions == 0

    run(scenario)


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(10))
            bench.tier.touch([chunk_id(3), chunk_id(0)])
        async with fs_bench(tmp_path) as bench:
            order = bench.held()
            assert order == [chunk_id(number) for number in (1, 2, 4, 5, 6, 7, 8, 9, 3, 0)]

    run(scenario)


def spoil_index(path: Path, how: str) -> None:
    index = path / fs_paths.INDEX
    match how:
        case "missing":
            index.unlink()
        case "empty":
            index.write_bytes(b"")
        case "random":
            index.write_bytes(os.urandom(100_000))
        case "truncated":
            os.truncate(index, 8192)
        case "state":
            (path / fs_paths.STATE).write_text("{")
        case "no-state":
            (path / fs_paths.STATE).unlink()


@pytest.mark.parametrize("how", ["missing", "empty", "random", "truncated", "state", "no-state"])
def test_without_a_usable_index_everything_comes_back_from_headers(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
        spoil_index(tmp_path, how)
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(20)) == list(range(20))
        async with fs_bench(tmp_path) as bench:  # and now by the new index
            assert await found(bench, range(20)) == list(range(20))

    run(scenario)


def test_an_index_older_than_the_data_is_not_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(5))
        shutil.copy(tmp_path / fs_paths.INDEX, tmp_path.parent / "old")
        async with fs_bench(tmp_path) as bench:
            await bench.remove(Scope(chunks=frozenset({chunk_id(0)})))
            await store(bench, range(10, 20))
        shutil.copy(tmp_path.parent / "old", tmp_path / fs_paths.INDEX)
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(20)) == [1, 2, 3, 4, *range(10, 20)]
            assert bench.tier.stats().corruptions == 0

    run(scenario)


def test_after_another_boot_without_a_clean_stop_the_headers_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(5))
        state = tmp_path / fs_paths.STATE
        state.write_text(state.read_text().replace("true", "false"))
        monkeypatch.setattr(fs_recovery, "boot_id", lambda: "another")
        seen: list[str] = []
        async with fs_bench(tmp_path, step=seen.append) as bench:
            assert await found(bench, range(5)) == list(range(5))
        assert "headers read" in seen
        assert "index checked" not in seen

    run(scenario)


def test_of_two_headers_of_one_chunk_the_higher_sequence_wins_and_the_other_is_zeroed(tmp_path: Path) -> None:
    async def scenario() -> None:
        opts = options(slab_bytes=10 * SLOT_BYTES)
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(3))
            entry = bench.entry(chunk_id(1))
            slab = entry.place.slab
            new = bench.content(chunk_id(7))
            padded = new.ljust(slab.slot_bytes - BLOCK_BYTES, b"\0")
            newer = SlotHeader(
                slab.number,
                5,
                slab.epoch,
                entry.sequence + 100,
                slab.slot_bytes,
                chunk_id(1),
                CHUNK_BYTES,
                crc32c(padded),
            )
            file = tmp_path / fs_paths.slab(slab.number)
        with file.open("r+b") as raw:
            raw.seek(slot_offset(5, slab.slot_bytes))
            raw.write(newer.encode() + padded)
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await bench.read(chunk_id(1)) == (ReadOutcome.READ, new)
            old = FsDirectory.read_block(slab_fd(bench), slot_offset(entry.place.slot, slab.slot_bytes))
            assert old == bytes(BLOCK_BYTES)
            await bench.write(chunk_id(8))
            assert bench.entry(chunk_id(8)).sequence > newer.sequence

    run(scenario)


def test_a_rebuild_puts_chunks_in_the_order_in_which_they_were_stored(tmp_path: Path) -> None:
    """Wherever they lie: here in slots that evictions and removals left."""

    async def scenario() -> None:
        opts = options(slab_bytes=10 * SLOT_BYTES)
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(bench.capacity_chunks))
            await bench.remove(Scope(chunks=frozenset(map(chunk_id, range(30, 60, 3)))))
            await store(bench, range(200, 240))
            stored = [entry.chunk for entry in sorted(bench.tier._catalog.entries.values(), key=lambda e: e.sequence)]
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path, opts) as bench:
            (size_class,) = bench.tier._catalog.classes.values()
            assert [entry.chunk for entry in bench.tier._catalog.evictable(size_class)] == stored
            await store(bench, range(300, 301))
            assert stored[0] not in bench.held()

    run(scenario)


def test_after_a_rebuild_the_tier_serves_while_its_index_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(10))
        (tmp_path / fs_paths.INDEX).unlink()
        with monkeypatch.context() as patch:
            patch.setattr(fs_journal, "REFILL_PER_SLICE", 1)
            patch.setattr(Index, "commit", lambda *_, **__: waits.wait(WAIT_S))
            async with fs_bench(tmp_path, close_clean=False) as bench:
                try:
                    assert await found(bench, range(10)) == list(range(10))
                    assert bench.tier.stats().unindexed == 10
                    shutil.copytree(tmp_path, killed)
                finally:
                    patch.undo()
                    waits.set()
                await until(lambda: bench.tier.stats().unindexed == 0, "the new index to be complete")
        for path, rebuilt in ((tmp_path, False), (killed, True)):
            steps: list[str] = []
            async with fs_bench(path, step=steps.append) as bench:
                assert ("headers read" in steps) is rebuilt
                assert await found(bench, range(10)) == list(range(10))

    waits, killed = threading.Event(), tmp_path.with_name("killed")
    run(scenario)


# What cannot be read


def unreadable(bench: FsBench, chunk: ChunkId) -> type[IoPool]:
    """A pool that cannot read the chunk's header, which lies there now."""
    slab, slot = bench.entry(chunk).place
    file, offset = fs_paths.slab(slab.number), slot_offset(slot, slab.slot_bytes)

    class Pool(IoPool):
        bad: int | None = None

        def read_heads(self, first_request: int, fd: int, offsets: Sequence[int]) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(file) and offset in offsets:
                self.bad = first_request + offsets.index(offset)
            super().read_heads(first_request, fd, offsets)

        def poll(self) -> list[Any]:
            return [
                SimpleNamespace(request=done.request, error=errno.EIO) if done.request == self.bad else done
                for done in super().poll()
            ]

    return Pool


@pytest.mark.parametrize("how", ["by its headers", "by its index"])
def test_a_header_that_cannot_be_read_at_a_start_is_not_believed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs", opts) as bench:
            await store(bench, range(4))
            slot = bench.entry(chunk_id(1)).place.slot
            pool = unreadable(bench, chunk_id(1))
            bench.tier._writes.evict(bench.entry(chunk_id(1)), None)
            committed = asyncio.Event()
            bench.tier._journal.after_commit(committed.set)
            await committed.wait()
            shutil.copytree(tmp_path / "fs", killed)
        if how == "by its headers":
            (killed / fs_paths.INDEX).unlink()
        with monkeypatch.context() as patch:
            patch.setattr(fs_recovery, "IoPool", pool)
            async with fs_bench(killed, opts) as bench:
                (slab,) = bench.tier._catalog.slabs.values()
                assert slab.quarantined == {slot}
                assert bench.tier.stats().quarantined == 1
                assert await bench.remove(Scope(chunks=frozenset({chunk_id(1)}))) == Removed(0, 0)
        (killed / fs_paths.INDEX).unlink()
        async with fs_bench(killed) as bench:
            assert await found(bench, range(4)) == [0, 2, 3]

    opts = options(slab_bytes=10 * SLOT_BYTES)
    killed = tmp_path / "killed"
    run(scenario)


def test_a_slab_with_a_header_that_can_neither_be_read_nor_zeroed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        opts = options(slab_bytes=10 * SLOT_BYTES)
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(20))
            slabs = {number: bench.entry(chunk_id(number)).place.slab.number for number in range(20)}
            pool = unreadable(bench, chunk_id(1))
        (tmp_path / fs_paths.INDEX).unlink()
        with monkeypatch.context() as patch:
            patch.setattr(fs_recovery, "IoPool", pool)
            patch.setattr(FsDirectory, "zero_slots", broken)
            async with fs_bench(tmp_path, opts) as bench:
                given_up = set(slabs.values()) - bench.tier._catalog.slabs.keys()
                assert slabs[1] in given_up
                kept = [number for number in range(20) if slabs[number] not in given_up]
                assert await found(bench, range(20)) == kept
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path, opts) as bench:
            assert await found(bench, range(20)) == kept

    run(scenario)


def test_a_tier_whose_slab_cannot_be_given_up_either_starts_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then what could not be read is readable: nothing has been removed since."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(4))
            pool = unreadable(bench, chunk_id(1))
        (tmp_path / fs_paths.INDEX).unlink()
        monkeypatch.setattr(fs, "TICK_S", 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(fs_recovery, "IoPool", pool)
            patch.setattr(FsDirectory, "write_block", broken)
            async with fs_bench(tmp_path, wait_ready=False) as bench:
                before = descriptors()
                await until(lambda: bench.tier.sick is not None, "a start that fails")
                for _ in range(5):
                    failed_before = bench.tier._ticks
                    await until(lambda: bench.tier._ticks > failed_before + 3, "another one")  # noqa: B023
                assert descriptors() < before + 5
                assert caplog.text.count("trying again") == 1  # for as long as it is for the same reason
                patch.setattr(fs_recovery, "IoPool", IoPool)
                await asyncio.wait_for(bench.tier.ready(), WAIT_S)
                patch.undo()
                assert await found(bench, range(4)) == [0, 1, 2, 3]
                assert await bench.remove(Scope(chunks=frozenset({chunk_id(0)}))) == Removed(1, SLOT_BYTES)
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(4)) == [1, 2, 3]

    run(scenario)


def slab_fd(bench: FsBench) -> int:
    (slab,) = bench.tier._catalog.slabs.values()
    return slab.fd


def test_a_smaller_cap_shrinks_by_what_is_coldest_and_a_larger_one_keeps_everything(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(60))
        small = 1536 << 10
        async with fs_bench(tmp_path, options(small)) as bench:
            present = await found(bench, range(60))
            assert present == list(range(60))[-len(present) :]
            assert 5 < len(present) < 60
            assert du(tmp_path) <= small
        async with fs_bench(tmp_path, options(2 * CAP_BYTES)) as bench:
            assert await found(bench, range(60)) == present
            await store(bench, range(100, 150))

    run(scenario)


def test_closing_while_headers_are_read_does_not_wait_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(64 << 20), chunk_bytes=4096) as bench:
            await store(bench, range(200))
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path, options(64 << 20), chunk_bytes=4096, wait_ready=False) as bench:
            assert not bench.tier.contains(chunk_id(0))
            assert bench.tier.stats().warming is not None
            assert await bench.write(chunk_id(500)) is WriteOutcome.SICK
        async with fs_bench(tmp_path, options(64 << 20), chunk_bytes=4096) as bench:
            assert await found(bench, range(200)) == list(range(200))

    run(scenario)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        benches = 6
        for _ in range(benches):
            async with fs_bench(tmp_path) as bench:
                await store(bench, range(100, 200))
        del bench
        gc.collect()  # a pool's eventfd goes with the pool and the last of its threads
        # What other tests left running in this process may open one or two meanwhile; a leak is one for each bench.
        await until(lambda: len(os.listdir("/proc/self/fd")) < before + benches, "the descriptors to be closed")

    run(scenario)


# Damage

HEADER_FIELDS = {
    "magic": 0,
    "version": 8,
    "key bytes": 10,
    "payload checksum": 12,
    "slab epoch": 16,
    "sequence": 24,
    "slab": 32,
    "slot": 36,
    "payload bytes": 40,
    "slot bytes": 48,
    "namespace": 56,
    "tenant": 72,
    "key": 88,
    "reserved": 152,
    "checksum": 4092,
}


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flipped_bit_in_a_header_is_a_miss_once(tmp_path: Path, field: str) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            bench.flip(chunk_id(1), HEADER_FIELDS[field], bit=3)
            assert await bench.read(chunk_id(1)) == (ReadOutcome.DAMAGED, b"")
            assert await bench.read(chunk_id(1)) == (ReadOutcome.ABSENT, b"")
            await until(lambda: bench.tier.stats().quarantined == 1, "the quarantine")
            assert await found(bench, range(3)) == [0, 2]
            assert bench.tier.stats().corruptions == 1

    run(scenario)


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_header_with_another_value_and_a_right_checksum_is_a_miss(tmp_path: Path, field: str) -> None:
    """A valid chunk in the wrong place is as bad as a flipped bit."""

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            fd, offset = bench.offset(chunk_id(1))
            block = bytearray(FsDirectory.read_block(fd, offset))
            block[HEADER_FIELDS[field]] ^= 1
            if field != "checksum":
                block = bytearray(seal(bytes(block[:4092])))
            FsDirectory.write_block(fd, offset, bytes(block))
            assert await bench.read(chunk_id(1)) == (ReadOutcome.DAMAGED, b"")
            assert bench.tier.stats().corruptions == 1

    run(scenario)


def test_flipped_zeroed_and_swapped_slots_after_a_restart(tmp_path: Path) -> None:
    """20 chunks: a bit in the middle of one, the last byte of another, the first 4 KiB of a third, two swapped."""

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
            places = {number: bench.entry(chunk_id(number)).place for number in range(20)}
            slot_bytes = places[0].slab.slot_bytes

        def at(number: int) -> tuple[Path, int]:
            slab, slot = places[number]
            return tmp_path / fs_paths.slab(slab.number), slot_offset(slot, slot_bytes)

        def spoil(number: int, within: int, content: bytes | None = None) -> None:
            file, offset = at(number)
            with file.open("r+b") as raw:
                raw.seek(offset + within)
                byte = raw.read(1)
                raw.seek(offset + within)
                raw.write(content if content is not None else bytes([byte[0] ^ 0x10]))

        spoil(3, BLOCK_BYTES + CHUNK_BYTES // 2)
        spoil(4, BLOCK_BYTES + CHUNK_BYTES - 1)
        spoil(5, 0, bytes(BLOCK_BYTES))
        slots = []
        for number in (6, 7):
            file, offset = at(number)
            with file.open("rb") as raw:
                raw.seek(offset)
                slots.append(raw.read(slot_bytes))
        spoil(6, 0, slots[1])
        spoil(7, 0, slots[0])

        async with fs_bench(tmp_path) as bench:
            bad = [3, 4, 5, 6, 7]
            assert await found(bench, range(20)) == [number for number in range(20) if number not in bad]
            assert bench.tier.stats().corruptions == 5
            for number in bad:
                assert await bench.read(chunk_id(number)) == (ReadOutcome.ABSENT, b"")
            await until(lambda: bench.tier.stats().quarantined == 5, "the quarantine")
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:  # what was damaged is gone for good
            assert await found(bench, range(20)) == [number for number in range(20) if number not in bad]
            assert bench.tier.stats().corruptions == bench.tier.stats().torn == 0

    run(scenario)


def truncated(file: Path, _other: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def swapped(file: Path, other: Path) -> None:
    spare = file.with_name("spare")
    file.rename(spare)
    other.rename(file)
    spare.rename(other)


def zeroed(file: Path, _other: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def emptied(file: Path, _other: Path) -> None:
    file.write_bytes(b"")


def longer(file: Path, _other: Path) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def replaced_by_a_fifo(file: Path, _other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced_by_a_link(file: Path, _other: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def pickled(file: Path, _other: Path) -> None:
    file.write_bytes(b"cposix\nsystem\n(S'touch marker'\ntR.")


SLAB_DAMAGE = [truncated, swapped, zeroed, emptied, longer, replaced_by_a_fifo, replaced_by_a_link, pickled]


@pytest.mark.parametrize("with_index", [True, False], ids=["index", "rebuild"])
@pytest.mark.parametrize("damage", SLAB_DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_slab_file_costs_its_chunks_and_nothing_else(
    tmp_path: Path, damage: Callable[[Path, Path], None], with_index: bool
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(slab_bytes=10 * SLOT_BYTES)) as bench:
            await store(bench, range(40))
            slabs = {number: bench.entry(chunk_id(number)).place.slab.number for number in range(40)}
        damage(tmp_path / fs_paths.slab(1), tmp_path / fs_paths.slab(2))
        if not with_index:
            (tmp_path / fs_paths.INDEX).unlink()
        lost = {1, 2} if damage is swapped else {1}
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(40)) == [number for number in range(40) if slabs[number] not in lost]
            assert bench.tier.stats().corruptions == 0
            await store(bench, range(100, 140))
        assert not (tmp_path / "marker").exists()

    run(scenario)


def test_slabs_of_another_directory_are_not_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        for name in ("one", "two"):
            async with fs_bench(tmp_path / name) as bench:
                await store(bench, range(5))
        (tmp_path / "two" / fs_paths.INDEX).unlink()
        for file in (tmp_path / "one").glob("slab-*"):
            shutil.copy(file, tmp_path / "two" / file.name)
        async with fs_bench(tmp_path / "two") as bench:
            assert await found(bench, range(5)) == []

    run(scenario)


def test_a_slab_that_is_cut_short_or_emptied_while_it_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
            os.truncate(tmp_path / fs_paths.slab(bench.entry(chunk_id(0)).place.slab.number), 0)
            present = await found(bench, range(20))
            assert len(present) < 20
            assert await found(bench, range(20)) == present
            await store(bench, range(100, 120))

    run(scenario)


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse slab of 5 GiB with chunks at its end, found by their headers."""

    async def scenario() -> None:
        opts = options(6 << 30)
        slot_bytes = slot_bytes_for(8 << 20)
        count = (5 << 30) // slot_bytes
        directory = FsDirectory.open(tmp_path)
        header = SlabHeader(0, 9, slot_bytes, count, directory.directory_id)
        directory.close()
        with (tmp_path / fs_paths.slab(0)).open("wb") as raw:
            raw.truncate(header.file_bytes)
            raw.write(header.encode())
            content = {}
            for slot in (0, count - 2, count - 1):
                payload = random.Random(slot).randbytes(8 << 20)
                content[chunk_id(slot)] = payload
                raw.seek(slot_offset(slot, slot_bytes))
                raw.write(
                    SlotHeader(0, slot, 9, slot + 1, slot_bytes, chunk_id(slot), 8 << 20, crc32c(payload)).encode()
                )
                raw.write(payload)
        assert slot_offset(count - 2, slot_bytes) > 4 << 30
        async with fs_bench(tmp_path, opts, chunk_bytes=8 << 20, places=2) as bench:
            assert bench.tier.stats().chunks == 3
            for chunk, payload in content.items():
                assert await bench.read(chunk) == (ReadOutcome.READ, payload)

    run(scenario)


# Removal


def test_a_removal_survives_the_loss_of_the_index(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(10))
            await store(bench, range(10), tenant=1)
            removed = await bench.remove(Scope(tenant=chunk_id(0, tenant=1).tenant))
            assert (removed.chunks, removed.failed) == (10, None)
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(10)) == list(range(10))
            assert not any(bench.tier.contains(chunk_id(number, tenant=1)) for number in range(10))

    run(scenario)


def test_a_removal_covers_what_was_only_evicted(tmp_path: Path) -> None:
    """An eviction leaves the header; a removal of its tenant must not, or a rebuild would bring the chunk back."""

    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs") as bench:
            await store(bench, range(10), tenant=1)
            queue = bench.tier._writes._queues[slot_bytes_for(CHUNK_BYTES)]
            for number in range(5):
                bench.tier._writes.evict(bench.entry(chunk_id(number, tenant=1)), queue)
            assert (await bench.remove(Scope(tenant=chunk_id(0, tenant=1).tenant))).chunks == 5
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        (tmp_path / "killed" / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path / "killed") as bench:
            assert bench.held() == []

    run(scenario)


def test_a_removal_covers_what_a_failing_write_was_to_overwrite(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs", options(slab_bytes=1)) as bench:  # one slot a slab
            await store(bench, range(1), tenant=1)
            fd, offset = bench.offset(chunk_id(0, tenant=1))
            old_header = FsDirectory.read_block(fd, offset)
            bench.tier._catalog.foreign_bytes = bench.tier._catalog.cap_bytes  # so its slot is taken
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            memory = Memory(hanging.address, CHUNK_BYTES)
            write = asyncio.ensure_future(outcome_of(bench.tier.write, chunk_id(5), memory))
            await until(lambda: bool(bench.tier._writes.running), "the write to run")
            removal = asyncio.ensure_future(bench.remove(Scope(tenant=chunk_id(0, tenant=1).tenant)))
            await until(lambda: any(removal.has_ghosts for removal in bench.tier._removals._waiting), "the removal")
            returned = bench.tier._writes._returned

            def fail(failing: Any, _error: int) -> None:
                FsDirectory.write_block(fd, offset, old_header)  # as if nothing had been written
                bench.tier._writes._returned = returned  # type: ignore[method-assign]
                returned(failing, errno.EIO)

            bench.tier._writes._returned = fail  # type: ignore[method-assign]
            bench.tier._catalog.foreign_bytes = 0
            hanging.let_go()
            assert await write is WriteOutcome.STORED
            assert (await removal).failed is None
            assert FsDirectory.read_block(fd, offset) != old_header

    run(scenario)


def test_a_removal_covers_what_a_failing_write_overwrites_that_began_while_ghosts_are_taken(
    tmp_path: Path, hanging: HangingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 1)  # a turn of the loop for each ghost

    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs", options(slab_bytes=20 * slot_bytes_for(CHUNK_BYTES))) as bench:
            await store(bench, range(19), tenant=1)
            await store(bench, [0])  # it stays, so the slab is not given up whole
            bench.tier._catalog.foreign_bytes = bench.tier._catalog.cap_bytes  # so no slab is added
            for number in range(19):
                bench.tier._writes.evict(bench.entry(chunk_id(number, tenant=1)), None)
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            removal = asyncio.ensure_future(bench.remove(Scope(tenant=chunk_id(0, tenant=1).tenant)))
            while bench.tier._removals._taking_ghosts is None:
                await asyncio.sleep(0)
            memory = Memory(hanging.address, CHUNK_BYTES)
            write = asyncio.ensure_future(outcome_of(bench.tier.write, chunk_id(5), memory))
            await asyncio.sleep(0)
            [running] = bench.tier._writes.running.values()
            assert running.place is not None
            [ghost] = running.ghosts
            slab, slot = running.place
            old_header = SlotHeader(slab.number, slot, slab.epoch, 1, slab.slot_bytes, ghost, CHUNK_BYTES).encode()
            returned = bench.tier._writes._returned

            def fail(failing: Any, _error: int) -> None:
                FsDirectory.write_block(slab.fd, slot_offset(slot, slab.slot_bytes), old_header)
                bench.tier._writes._returned = returned  # type: ignore[method-assign]
                returned(failing, errno.ECANCELED)  # so it is not tried again in the same slot

            bench.tier._writes._returned = fail  # type: ignore[method-assign]
            hanging.let_go()
            assert await write is WriteOutcome.ABORTED
            assert (await removal).failed is None
            bench.tier._catalog.foreign_bytes = 0
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        (tmp_path / "killed" / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path / "killed") as bench:
            assert bench.held() == [chunk_id(0)]

    run(scenario)


def test_a_removal_ends_that_covers_both_a_running_write_and_what_it_overwrites(
    tmp_path: Path, hanging: HangingMemory
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(slab_bytes=1)) as bench:  # one slot a slab
            await store(bench, range(1))
            bench.tier._catalog.foreign_bytes = bench.tier._catalog.cap_bytes  # so its slot is taken
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            memory = Memory(hanging.address, CHUNK_BYTES)
            write = asyncio.ensure_future(outcome_of(bench.tier.write, chunk_id(5), memory))
            await until(lambda: bool(bench.tier._writes.running), "the write to run")
            assert [running.ghosts for running in bench.tier._writes.running.values()] == [{chunk_id(0)}]
            removal = asyncio.ensure_future(bench.remove(Scope()))
            await until(lambda: any(removal.has_ghosts for removal in bench.tier._removals._waiting), "the removal")
            bench.tier._catalog.foreign_bytes = 0
            hanging.let_go()
            assert await write is WriteOutcome.ABORTED
            await until(removal.done, "the end of the removal")
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert bench.held() == []

    run(scenario)


@pytest.mark.parametrize("later", ["of one tenant", "of the oldest"])
def test_a_removal_lasts_when_it_is_reported_also_where_a_later_one_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 60)  # three are forgotten a turn
    last = frozenset(chunk_id(number, tenant=1) for number in range(5))

    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs") as bench:
            await store(bench, range(60))
            await store(bench, range(5), tenant=1)  # where the first sweep comes last
            bench.tier.touch([chunk_id(number) for number in range(60)])
            ended: list[int] = []

            def first_ended(removed: Removed) -> None:
                ended.append(removed.chunks)
                shutil.copytree(tmp_path / "fs", tmp_path / "killed")

            bench.tier.remove(Scope(), first_ended)
            limits = {} if later == "of one tenant" else {"bytes_wanted": 5 * slot_bytes_for(CHUNK_BYTES)}
            scope = Scope(chunks=last) if later == "of one tenant" else Scope()
            second = asyncio.ensure_future(removed_of(bench, scope, **limits))
            while last & set(bench.held()):
                await asyncio.sleep(0)
            assert len(bench.held()) > 3  # the second one was there first
            assert (await second).chunks == 0
            assert ended == [65]
        (tmp_path / "killed" / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path / "killed") as bench:
            assert bench.held() == []

    run(scenario)


def test_a_removal_is_out_of_reach_at_once_however_long_its_sweep_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 1)  # a turn of the loop for each chunk

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(40))
            await store(bench, range(5), tenant=1)
            ended: list[Removed] = []
            bench.tier.remove(Scope(tenant=bytes(16)), ended.append)
            assert bench.tier.stats().chunks == 45  # nothing is swept yet
            assert await bench.read(chunk_id(39)) == (ReadOutcome.ABSENT, b"")
            assert not any(bench.tier.contains(chunk_id(number)) for number in range(20, 40))
            assert await bench.write(chunk_id(38)) is WriteOutcome.STORED  # another one: it stays
            assert await bench.remove(Scope(tenant=bytes(16), namespace=bytes([9] * 16))) == Removed(0, 0)
            assert [removed.chunks for removed in ended] == [40]
            assert await found(bench, range(40)) == [38]
            assert await chunks_of(bench, 1) == [0, 1, 2, 3, 4]
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(40)) == [38]

    run(scenario)


async def removed_of(bench: FsBench, scope: Scope = Scope(), **limits: Any) -> Removed:  # noqa: B008 - it is frozen
    removed: asyncio.Future[Removed] = asyncio.get_running_loop().create_future()
    bench.tier.remove(scope, removed.set_result, **limits)
    return await removed


def test_a_removal_of_what_was_not_used_lately_takes_nothing_that_is_used_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 1)
    now_us = [TICKS_ARE_TIMES_FROM]

    async def scenario() -> None:
        async with fs_bench(tmp_path, wall_clock_us=lambda: now_us[0]) as bench:
            await store(bench, range(20))
            await store(bench, range(3), tenant=1)
            now_us[0] += 60_000_000
            await store(bench, range(20, 25))
            assert await removed_of(bench, unused_s=50, dry_run=True) == Removed(23, 23 * slot_bytes_for(CHUNK_BYTES))
            removed = asyncio.ensure_future(removed_of(bench, Scope(tenant=bytes(16)), unused_s=50))
            await asyncio.sleep(0)
            bench.tier.touch([chunk_id(18)])
            assert (await bench.read(chunk_id(19)))[0] is ReadOutcome.READ  # not out of reach until its turn
            assert (await removed).chunks == 18
            assert await found(bench, range(25)) == [18, 19, *range(20, 25)]
            assert await chunks_of(bench, 1) == [0, 1, 2]
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(25)) == [18, 19, *range(20, 25)]

    run(scenario)


def test_a_removal_of_so_many_bytes_takes_the_least_recently_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 1)
    slot = slot_bytes_for(CHUNK_BYTES)

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
            await store(bench, range(3), tenant=1)
            bench.tier.touch([chunk_id(0), chunk_id(2)])
            assert await removed_of(bench, bytes_wanted=3 * slot + 1, dry_run=True) == Removed(4, 4 * slot)
            removed = asyncio.ensure_future(removed_of(bench, Scope(tenant=bytes(16)), bytes_wanted=4 * slot))
            while bench.tier.stats().chunks == 23:
                await asyncio.sleep(0)
            bench.tier.touch([chunk_id(number) for number in range(20)])  # after the choice: those stay
            assert (await removed).chunks < 4
            left = await found(bench, range(20))
            assert len(left) == 20 - (await removed).chunks
            assert set(range(20)) - set(left) < {1, 3, 4, 5}
            assert (await removed_of(bench, bytes_wanted=4 * slot)).nbytes == 4 * slot
            assert await chunks_of(bench, 1) == []  # the least recently used by now, and one more

    run(scenario)


def test_a_removal_of_the_oldest_covers_the_headers_that_evictions_left_of_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs") as bench:
            await store(bench, range(5))
            evicted = bench.entry(chunk_id(0)).place
            bench.tier._writes.evict(bench.entry(chunk_id(0)), None)
            await store(bench, range(1))
            await until(lambda: bool(list(bench.tier._catalog.idle_ghosts())), "the ghost")
            assert list(bench.tier._catalog.idle_ghosts()) == [(evicted, {chunk_id(0)})]
            bench.tier.touch([chunk_id(number) for number in range(1, 5)])
            assert (await removed_of(bench, bytes_wanted=1)).chunks == 1
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        (tmp_path / "killed" / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path / "killed") as bench:
            assert await found(bench, range(5)) == [1, 2, 3, 4]

    run(scenario)


def held_sweep(bench: FsBench, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The next sweep begins only when this is called."""
    sweep = bench.tier._removals._sweep
    held: list[Any] = []
    monkeypatch.setattr(bench.tier._removals, "_sweep", lambda *arguments: held.append(arguments))

    def go_on() -> None:
        monkeypatch.setattr(bench.tier._removals, "_sweep", sweep)
        sweep(*held[0])

    return go_on


def test_a_removal_leaves_what_is_stored_before_its_sweep_gets_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            go_on = held_sweep(bench, monkeypatch)
            removal = asyncio.ensure_future(bench.remove(Scope()))
            await asyncio.sleep(0)
            await store(bench, range(2, 4))  # one of them anew
            assert await found(bench, range(4)) == [2, 3]
            go_on()
            assert (await removal).chunks == 3
            assert await found(bench, range(4)) == [2, 3]

    run(scenario)


def test_removals_and_counts_wait_until_the_tier_is_warm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(9))
        async with fs_bench(tmp_path, wait_ready=False) as bench:
            assert (await removed_of(bench, dry_run=True)).chunks == 9
        async with fs_bench(tmp_path, wait_ready=False) as bench:
            assert (await removed_of(bench, bytes_wanted=1)).chunks == 1
            assert await found(bench, range(9)) == list(range(1, 9))

    run(scenario)


def test_a_check_a_list_and_a_removal_let_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in turns of the loop, each of which does a bounded number of steps."""
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 20)
    monkeypatch.setattr(fs, "CHUNKS_PER_SLICE", 4)
    monkeypatch.setattr(fs_check, "SLOTS_PER_SLICE", 4)

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(64))
            number = 64
            seen = set()
            for held in bench.tier.chunks():
                assert len(held) <= 4
                seen |= {chunk for chunk, _, _ in held}
                await store(bench, [number])  # while the list is made
                number += 1
            assert {chunk_id(n) for n in range(64)} <= seen
            for slice_ in bench.tier.check():
                assert slice_ == []
                await store(bench, [number])  # evicts before long
                number += 1
            assert bench.tier.stats().evictions > 0
            turns = 0
            removed = asyncio.ensure_future(removed_of(bench))
            left = [bench.tier.stats().chunks]
            while left[-1]:
                await asyncio.sleep(0)
                turns += 1
                left.append(bench.tier.stats().chunks)
            assert all(before - after <= 1 for before, after in pairwise(left))  # a forget is twenty steps
            assert (await removed).chunks == left[0]

    run(scenario)


@pytest.mark.parametrize("scope", [Scope(), Scope(chunks=frozenset(chunk_id(number) for number in range(40)))])
def test_a_removal_and_a_count_that_find_nothing_let_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: Scope
) -> None:
    async def turns_until(condition: Callable[[], object]) -> int:
        turns = 0
        while not condition():
            await asyncio.sleep(0)
            turns += 1
        return turns

    async def scenario() -> None:
        async with fs_bench(tmp_path, options(slab_bytes=20 * slot_bytes_for(CHUNK_BYTES))) as bench:
            await store(bench, range(40))
            await bench.remove(Scope())
            monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 1)
            monkeypatch.setattr(fs_removal, "SLOTS_PER_STEP", 4)
            counted: list[Removed] = []
            bench.tier.remove(scope, counted.append, dry_run=True)
            assert await turns_until(lambda: counted) >= 10
            removal = asyncio.ensure_future(bench.remove(scope))
            assert await turns_until(lambda: any(each.is_swept for each in bench.tier._removals._waiting)) >= 10
            assert counted == [await removal] == [Removed(0, 0)]

    run(scenario)


def test_a_stop_waits_for_a_removal_that_still_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_removal, "STEPS_PER_SLICE", 1)

    async def scenario() -> None:
        ended: list[Removed] = []
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(40))
            bench.tier.remove(Scope(), ended.append)
        await asyncio.sleep(0)
        assert [(removed.chunks, removed.failed) for removed in ended] == [(40, None)]
        async with fs_bench(tmp_path) as bench:
            assert bench.tier.stats().chunks == 0

    run(scenario)


def test_removing_everything_is_one_write_a_slab(tmp_path: Path) -> None:
    async def scenario() -> None:
        steps: list[str] = []
        opts = options(slab_bytes=20 * slot_bytes_for(CHUNK_BYTES))
        async with fs_bench(tmp_path, opts, step=steps.append) as bench:
            await store(bench, range(40))
            assert (await bench.remove(Scope())).chunks == 40
            assert "slot zeroed" not in steps
            await store(bench, range(3))
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(40)) == [0, 1, 2]

    run(scenario)


def test_a_removal_waits_for_a_write_that_hangs_and_undoes_it(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            memory = Memory(hanging.address, CHUNK_BYTES)
            write = asyncio.ensure_future(outcome_of(bench.tier.write, chunk_id(9), memory))
            await asyncio.sleep(0)
            removal = asyncio.ensure_future(bench.remove(Scope(namespace=chunk_id(0).namespace)))
            await asyncio.sleep(0)
            await store(bench, range(20, 22))  # new ones, after it, are not covered
            assert not removal.done()
            hanging.let_go()
            assert await write is WriteOutcome.ABORTED
            assert (await removal).failed is None
            assert bench.held() == [chunk_id(20), chunk_id(21)]
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert sorted(bench.held()) == [chunk_id(20), chunk_id(21)]

    run(scenario)


def test_a_removal_covers_a_write_that_was_given_up_as_late(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs", options(io_deadline_ms=500)) as bench:
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            told: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
            memory = Memory(hanging.address, CHUNK_BYTES)
            bench.tier.write(chunk_id(5), memory, told.set_result, lambda: None)
            assert await told is WriteOutcome.LATE
            removal = asyncio.ensure_future(bench.remove(Scope(tenant=chunk_id(5).tenant)))
            await until(lambda: any(removal.has_ghosts for removal in bench.tier._removals._waiting), "the removal")
            hanging.let_go()
            await removal
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        (tmp_path / "killed" / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path / "killed") as bench:
            assert bench.held() == []

    run(scenario)


def test_a_read_under_way_when_its_chunk_is_removed_brings_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            read = asyncio.ensure_future(bench.read(chunk_id(1)))
            await asyncio.sleep(0)
            await bench.remove(Scope(chunks=frozenset({chunk_id(1)})))
            assert (await read)[0] is ReadOutcome.ABSENT
            assert await found(bench, range(3)) == [0, 2]

    run(scenario)


@pytest.mark.parametrize("error", [0, errno.EIO])
def test_a_read_that_ends_before_the_sweep_gets_to_its_chunk_brings_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            monkeypatch.setattr(bench.tier._reads, "_returned", with_error(bench, error))
            go_on = held_sweep(bench, monkeypatch)
            read = asyncio.ensure_future(bench.read(chunk_id(1)))
            while not bench.tier._reads.running:
                await asyncio.sleep(0)
            removal = asyncio.ensure_future(bench.remove(Scope()))
            assert (await read)[0] is ReadOutcome.ABSENT
            assert bench.tier.stats().quarantined == 0
            go_on()
            assert (await removal).chunks == 3

    run(scenario)


def with_error(bench: FsBench, error: int) -> Callable[[Any, Any], None]:
    """In place of `_returned` of the reads: they end so."""
    returned = bench.tier._reads._returned
    return lambda read, done: returned(read, SimpleNamespace(error=error, head=done.head, checksum=done.checksum))  # type: ignore[arg-type]


def test_a_removal_covers_a_quarantined_slot_whose_header_could_not_be_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        async with fs_bench(tmp_path / "fs") as bench:
            await store(bench, range(3))
            slab, slot = bench.entry(chunk_id(1)).place
            removal = Scope(tenant=bytes(16))
            with monkeypatch.context() as patch:
                patch.setattr(bench.tier._reads, "_returned", with_error(bench, errno.EIO))
                patch.setattr(bench.tier._directory, "write_block", broken)
                assert (await bench.read(chunk_id(1)))[0] is ReadOutcome.DAMAGED
                assert (await bench.remove(Scope(tenant=bytes(15) + b"1"))).failed is None  # it has none of this
                assert (await bench.remove(removal)).failed is not None
            assert slab.quarantined == {slot}
            assert bench.tier.stats().quarantined == 1
            assert await bench.remove(removal) == Removed(0, 0)
            assert slab.quarantined == {slot}
            assert not slab.ghosts
            shutil.copytree(tmp_path / "fs", tmp_path / "killed")
        (tmp_path / "killed" / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path / "killed") as bench:
            assert bench.held() == []

    run(scenario)


# Hanging


def test_a_read_past_its_deadline_is_late_but_keeps_its_memory_and_its_slot(
    tmp_path: Path, hanging: HangingMemory
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(io_deadline_ms=500)) as bench:
            await store(bench, range(3))
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            events: list[object] = []
            bench.tier.read(
                chunk_id(0), Memory(hanging.address, CHUNK_BYTES), events.append, lambda: events.append("released")
            )
            await until(lambda: bool(events), "the deadline")
            assert events == [ReadOutcome.LATE]
            assert bench.tier.sick is not None
            # However full the tier gets, that slot is not given away.
            place = bench.entry(chunk_id(0)).place
            for number in range(100, 100 + bench.capacity_chunks):
                await bench.write(chunk_id(number))
            assert bench.entry(chunk_id(0)).place == place
            hanging.let_go()
            await until(lambda: len(events) == 2, "the release")
            assert events == [ReadOutcome.LATE, "released"]
            assert bench.tier.stats().late == 1

    run(scenario)


def test_a_full_tier_whose_index_is_not_written_in_time_is_sick_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs is met there first: an evicted chunk's slot is free once a commit says so."""
    monkeypatch.setattr(fs, "TICK_S", 0.05)
    answers = threading.Event()
    answers.set()
    commit = Index.commit

    def commit_when_it_answers(*arguments: Any, **named: Any) -> None:
        answers.wait()
        commit(*arguments, **named)

    monkeypatch.setattr(Index, "commit", commit_when_it_answers)

    async def scenario() -> None:
        async with fs_bench(tmp_path, options(io_deadline_ms=500)) as bench:
            capacity = bench.capacity_chunks
            await store(bench, range(capacity))
            answers.clear()
            try:
                assert await bench.write(chunk_id(capacity)) is WriteOutcome.LATE
                await until(lambda: bench.tier.sick is not None, "the tier is sick")
                assert "making room for a chunk took longer than 500 ms" in (bench.tier.sick or "")
            finally:
                answers.set()

            async def stores_again() -> None:
                while await bench.write(chunk_id(capacity + 1)) is not WriteOutcome.STORED:
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(stores_again(), 30)
            assert bench.tier.sick is None

    run(scenario)


def test_a_write_past_its_deadline_is_not_stored_even_if_it_ends_well(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(io_deadline_ms=500)) as bench:
            await store(bench, range(1))
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            events: list[object] = []
            bench.tier.write(
                chunk_id(5), Memory(hanging.address, CHUNK_BYTES), events.append, lambda: events.append("released")
            )
            await until(lambda: bool(events), "the deadline")
            assert events == [WriteOutcome.LATE]
            hanging.let_go()
            await until(lambda: len(events) == 2, "the release")
            assert not bench.tier.contains(chunk_id(5))

    run(scenario)


def test_a_stop_does_not_wait_for_ever_for_what_hangs(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        directory = FsDirectory.open(tmp_path)
        memories = Memories(2, CHUNK_BYTES)
        tier = FsTier(directory, options(), regions=[memories.region])
        tier.start()
        await tier.ready()
        bench = FsBench(tier, memories, capacity_chunks=0)
        await store(bench, range(1))
        tier._pool.add_region(hanging.address, hanging.nbytes)
        tier.read(chunk_id(0), Memory(hanging.address, CHUNK_BYTES), lambda _: None, lambda: None)
        assert not await tier.close(timeout_s=0.2)
        with pytest.raises(DirectoryInUse):
            FsDirectory.open(tmp_path)
        hanging.let_go()
        assert tier._pool.close(20.0)  # until then the memory must stay

    run(scenario)


def test_queues_are_bounded_and_what_is_too_much_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(queue_max=4)) as bench:
            writes = [bench.write(chunk_id(number), place=number) for number in range(10)]
            outcomes = await asyncio.gather(*writes)
            assert outcomes.count(WriteOutcome.STORED) == 4
            assert outcomes.count(WriteOutcome.FULL) == 6
            assert bench.tier.stats().dropped == 6
            reads = await asyncio.gather(*(bench.read(chunk_id(number % 4), place=number) for number in range(10)))
            assert [outcome for outcome, _ in reads].count(ReadOutcome.BUSY) == 6

    run(scenario)


# The cap


def test_mixed_sizes_stay_under_the_cap_at_every_moment(tmp_path: Path) -> None:
    """4 KiB to 1 MiB, 4 writers, five times the cap; `du` is taken all the while."""
    cap = 12 << 20

    async def scenario() -> None:
        async with fs_bench(tmp_path, options(cap), chunk_bytes=1 << 20, places=4) as bench:
            done = asyncio.Event()
            highest = 0

            async def watch() -> None:
                nonlocal highest
                while not done.is_set():
                    highest = max(highest, await asyncio.to_thread(du, tmp_path))

            sizes = [4096, 20_000, 300_000, 1 << 20]

            async def writer(place: int) -> None:
                rnd = random.Random(place)
                for number in range(60):
                    size = sizes[place] if number % 10 else rnd.choice(sizes)
                    memory = Memory(bench.memories.place(place).address, size)
                    await outcome_of(bench.tier.write, chunk_id(number, tenant=place), memory)
                    assert list(bench.tier.problems()) == []

            watcher = asyncio.ensure_future(watch())
            await asyncio.gather(*(writer(place) for place in range(4)))
            done.set()
            await watcher
            stats = bench.tier.stats()
            assert highest <= cap
            assert stats.evictions > 0
            assert stats.dropped == 0
            assert stats.used_bytes + stats.overhead_bytes <= cap
            assert highest > cap // 2

    run(scenario)


def test_there_is_room_until_a_write_displaces_a_chunk_and_again_after_a_removal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            rooms = []
            for number in range(200):
                rooms.append(bench.tier.has_room(CHUNK_BYTES))
                evictions = bench.tier.stats().evictions
                await store(bench, [number])
                assert rooms[-1] == (bench.tier.stats().evictions == evictions), f"chunk {number}"
            assert set(rooms) == {True, False}
            assert not bench.tier.has_room(CHUNK_BYTES)
            await removed_of(bench)
            assert bench.tier.has_room(CHUNK_BYTES)

    run(scenario)


def test_files_of_others_count_towards_the_cap(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "mine").write_bytes(bytes(CAP_BYTES // 2))
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(200))
            assert bench.tier.stats().evictions > 0
            assert du(tmp_path) <= CAP_BYTES
            (tmp_path / "mine too").write_bytes(bytes(CAP_BYTES // 4))
            bench.tier._ticks = -1
            await until(lambda: list(bench.tier.problems()) == [] and du(tmp_path) <= CAP_BYTES, "room to be made")
            await store(bench, range(200, 210))
        assert (tmp_path / "mine").stat().st_size == CAP_BYTES // 2

    run(scenario)


def test_a_chunk_larger_than_the_tier_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(1 << 20), chunk_bytes=1 << 20, places=2) as bench:
            assert await bench.write(chunk_id(0)) is WriteOutcome.FULL
            assert list(tmp_path.glob("slab-*")) == []

    run(scenario)


def test_documents_and_quotas_lie_beside_the_chunks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await bench.tier.keep_namespace('{"model":"m"}')
            await bench.tier.keep_quotas({"ab": {"fs": 5}})
        async with fs_bench(tmp_path) as bench:
            assert list((await bench.tier.namespaces()).values()) == ['{"model":"m"}']
            assert await bench.tier.quotas() == {"ab": {"fs": 5}}
            for namespace in await bench.tier.namespaces():
                await bench.tier.drop_namespace(namespace)
            assert await bench.tier.namespaces() == {}
            assert small_files_bytes_for(CAP_BYTES) > 0

    run(scenario)


# Failing disks


@contextlib.contextmanager
def small_tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("cannot mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_is_full_below_the_cap_is_said_while_evictions_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        opts = options(64 << 20, slab_bytes=10 * SLOT_BYTES)
        now = [100.0]
        async with fs_bench(tmp_path, opts, clock=lambda: now[0]) as bench:
            gone: list[ChunkId] = []
            bench.tier._writes._on_evicted = gone.append
            await store(bench, range(10))
            assert bench.tier.stats().not_growing is None
            assert bench.tier.has_room(CHUNK_BYTES)
            with monkeypatch.context() as patch:
                patch.setattr(bench.tier._directory, "create_slab", full)
                await store(bench, range(10, 12))
                stats = bench.tier.stats()
                assert (stats.chunks, stats.evictions, stats.sick) == (10, 2, None)
                assert gone == [chunk_id(0), chunk_id(1)]
                now[0] += 3
                told = bench.tier.stats().not_growing
                assert told is not None
                taken = bench.tier._catalog.charged_bytes
                assert told.startswith(f"{taken} of {64 << 20} bytes are taken, and there was no room for more 3 s ago")
                assert os.strerror(errno.ENOSPC) in told
                assert not bench.tier.has_room(CHUNK_BYTES)  # the next one displaces another
            await store(bench, range(12, 20))
            assert bench.tier.stats().not_growing is None
            assert bench.tier.stats().evictions == 2

    run(scenario)


def test_a_filesystem_smaller_than_the_cap_evicts_and_goes_on(tmp_path: Path) -> None:
    """8 MiB of space, 64 MiB of cap, 20 MiB of stores; then filled from outside, then freed again."""

    async def scenario() -> None:
        with small_tmpfs(tmp_path / "small", "8m") as mount:
            opts = options(64 << 20, slab_bytes=512 << 10)
            async with fs_bench(mount / "fs", opts, chunk_bytes=100_000) as bench:
                for number in range(200):
                    assert await bench.write(chunk_id(number)) is WriteOutcome.STORED
                assert await found(bench, range(195, 200)) == list(range(195, 200))
                assert os.strerror(errno.ENOSPC) in str(bench.tier.stats().not_growing)
                with (mount / "other").open("wb") as other, contextlib.suppress(OSError):
                    while True:
                        other.write(bytes(1 << 16))
                        other.flush()
                await store(bench, range(200, 220))
                assert await found(bench, range(215, 220)) == list(range(215, 220))
                assert bench.tier.sick is None
                held = bench.tier.stats().chunks
                (mount / "other").unlink()
                bench.tier._writes._no_growth_until_s = 0.0
                await store(bench, range(300, 320))
                assert bench.tier.stats().chunks >= held

    run(scenario)


def test_a_full_filesystem_drops_stores_until_there_is_space(tmp_path: Path) -> None:
    async def scenario() -> None:
        with small_tmpfs(tmp_path / "small", "4m") as mount:
            now = [100.0]
            opts = options(64 << 20, slab_bytes=512 << 10)
            async with fs_bench(mount / "fs", opts, chunk_bytes=100_000, clock=lambda: now[0]) as bench:
                with (mount / "other").open("wb") as other, contextlib.suppress(OSError):
                    while True:
                        other.write(bytes(1 << 16))
                        other.flush()
                assert await bench.write(chunk_id(0)) is WriteOutcome.SICK
                assert "No space left" in str(bench.tier.sick)
                assert await bench.write(chunk_id(0)) is WriteOutcome.SICK
                assert bench.tier.stats().dropped == 2
                (mount / "other").unlink()
                now[0] += 60
                assert await bench.write(chunk_id(0)) is WriteOutcome.STORED
                assert bench.tier.sick is None

    run(scenario)


@contextlib.contextmanager
def broken_slabs(bench: FsBench, path: str, flags: int) -> Iterator[None]:
    """Puts another file under every slab's descriptor, and takes it away again."""
    kept = {slab.fd: os.dup(slab.fd) for slab in bench.tier._catalog.slabs.values()}
    for fd in kept:
        other = os.open(path, flags)
        os.dup2(other, fd)
        os.close(other)
    try:
        yield
    finally:
        for fd, copy in kept.items():
            os.dup2(copy, fd)
            os.close(copy)


def test_a_write_that_fails_once_is_tried_in_another_slot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(5))
            original = bench.tier._writes._returned
            failed: list[object] = []

            def fail_once(write: Any, error: int) -> None:
                if not failed:
                    failed.append(write.place)
                    error = 5
                original(write, error)

            bench.tier._writes._returned = fail_once  # type: ignore[method-assign]
            assert await bench.write(chunk_id(7)) is WriteOutcome.STORED
            assert bench.entry(chunk_id(7)).place != failed[0]
            assert bench.tier.sick is None
            assert bench.tier.stats().io_errors == 1
            assert await found(bench, range(8)) == [1, 2, 3, 4, 7]  # one was evicted for it

    run(scenario)


def test_a_disk_that_takes_no_writes_makes_the_tier_sick_and_it_heals(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [100.0]
        async with fs_bench(tmp_path, clock=lambda: now[0]) as bench:
            full = bench.capacity_chunks
            await store(bench, range(full))
            held = bench.tier.stats().chunks
            with broken_slabs(bench, "/dev/full", os.O_RDWR):
                assert await bench.write(chunk_id(full)) is WriteOutcome.SICK
                assert "No space left" in str(bench.tier.sick)
                assert await bench.write(chunk_id(full + 1)) is WriteOutcome.SICK
                now[0] += 60
                assert await bench.write(chunk_id(full + 1)) is WriteOutcome.SICK
            # What is there is still served: each failed store cost the chunk that it took the place of and one more.
            assert len(await found(bench, range(full))) >= held - 4
            now[0] += 60
            assert await bench.write(chunk_id(full)) is WriteOutcome.STORED
            assert bench.tier.sick is None
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(full, full + 2)) == [full]

    run(scenario)


def test_a_disk_that_cannot_be_read_makes_reads_sick_and_they_heal(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [100.0]
        async with fs_bench(tmp_path, clock=lambda: now[0]) as bench:
            await store(bench, range(20))
            with broken_slabs(bench, str(tmp_path), os.O_RDONLY):  # a directory: EISDIR
                outcomes = [(await bench.read(chunk_id(number)))[0] for number in range(8)]
            assert outcomes == [ReadOutcome.DAMAGED] * 3 + [ReadOutcome.SICK] * 5
            assert bench.tier.stats().corruptions == 0
            now[0] += 60
            assert await found(bench, range(20)) == list(range(3, 20))
            assert bench.tier.sick is None

    run(scenario)


def test_an_index_that_fails_is_made_anew_from_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_journal, "REFILL_PER_SLICE", 1)
    commit = Index.commit
    indexed: set[ChunkId] = set()  # by the new index
    complete_with: list[set[ChunkId]] = []

    def note_commit(index: Index, changes: dict[ChunkId, Any], sequence: int, *, complete: bool) -> None:
        commit(index, changes, sequence, complete=complete)
        indexed.update(changes)
        if complete:
            complete_with.append(set(indexed))

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(10))
            index = bench.tier._journal._index
            assert index is not None

            def fail(*_: object, **__: object) -> None:
                raise IndexUnusable("disk full")

            index.commit = fail  # type: ignore[method-assign]
            monkeypatch.setattr(Index, "commit", note_commit)
            await store(bench, range(10, 12))
            await until(lambda: bench.tier._journal._index not in (None, index), "a new index")
            await until(lambda: bench.tier._journal._complete, "the new index to be complete")
            await store(bench, range(12, 14))
        assert complete_with[0] >= {chunk_id(number) for number in range(12)}
        steps: list[str] = []
        async with fs_bench(tmp_path, step=steps.append) as bench:
            assert "headers read" not in steps
            assert await found(bench, range(14)) == list(range(14))

    run(scenario)


def test_an_index_that_fails_while_it_is_filled_leaves_no_part_of_that_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_journal, "REFILL_PER_SLICE", 1)
    commit = Index.commit
    indexed: dict[Index, set[ChunkId]] = {}
    complete_with: list[set[ChunkId]] = []
    filled, go_on = threading.Event(), threading.Event()

    def note_commit(index: Index, changes: dict[ChunkId, Any], sequence: int, *, complete: bool) -> None:
        commit(index, changes, sequence, complete=complete)
        indexed.setdefault(index, set()).update(changes)
        if complete:
            complete_with.append(set(indexed[index]))
        if len(indexed[index]) == 15 and not filled.is_set():
            filled.set()
            go_on.wait(WAIT_S)

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
            journal = bench.tier._journal
            await until(lambda: journal.unindexed == 0, "a commit of them")
            monkeypatch.setattr(Index, "commit", note_commit)
            for _ in range(2):
                journal.failed(IndexUnusable("disk full"))
                journal._retry_at_s = 0  # as if the time had passed
                journal.tick()
                await until(filled.is_set, "most of it to be filled")
            go_on.set()
            await until(lambda: bool(complete_with), "the new index to be complete")
        assert complete_with[0] == {chunk_id(number) for number in range(20)}
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(20)) == list(range(20))

    run(scenario)


# Files that vanish


def test_an_index_whose_file_was_removed_is_made_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(5))
            (tmp_path / fs_paths.INDEX).unlink()
            (tmp_path / fs_paths.TENANT_KEY).unlink()
            await until((tmp_path / fs_paths.INDEX).exists, "a new index")
            await until(lambda: bench.tier._journal._complete, "the new index to be complete")
        async with fs_bench(tmp_path) as bench:
            assert await found(bench, range(5)) == list(range(5))

    run(scenario)


def test_slab_files_removed_under_load_are_given_up_and_their_space_with_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(60))
            for file in tmp_path.glob("slab-*"):
                file.unlink()
            await until(lambda: bench.tier.stats().chunks == 0, "the chunks to be forgotten")
            await store(bench, range(100, 110))
            assert await found(bench, range(100, 110)) == list(range(100, 110))

    run(scenario)


def test_a_removed_directory_makes_the_tier_sick_and_a_new_one_heals_it(tmp_path: Path) -> None:
    path = tmp_path / "fs"

    async def scenario() -> None:
        async with fs_bench(path) as bench:
            await store(bench, range(10))
            shutil.rmtree(path)
            await until(lambda: bench.tier.sick is not None, "the loss to be noticed")
            assert await bench.write(chunk_id(20)) is WriteOutcome.SICK
            assert not path.exists()
            path.mkdir()
            await until(lambda: bench.tier.sick is None, "the recovery")
            await until(lambda: bench.tier._journal._complete, "the new index to be complete")
            await store(bench, range(20, 25))
        async with fs_bench(path) as bench:
            assert await found(bench, range(30)) == list(range(20, 25))

    run(scenario)


def test_an_unmounted_directory_is_waited_for_and_nothing_is_written_below(tmp_path: Path) -> None:
    async def scenario() -> None:
        with small_tmpfs(tmp_path / "mount", "16m") as mount:
            async with fs_bench(mount, close_clean=False) as bench:
                await store(bench, range(10))
                subprocess.run(["umount", "-l", str(mount)], check=True)
                await until(lambda: bench.tier.sick is not None, "the loss to be noticed")
                for number in range(20, 25):
                    assert await bench.write(chunk_id(number)) is WriteOutcome.SICK
                assert await found(bench, range(10)) == list(range(10))
                assert list(mount.iterdir()) == []
            assert list(mount.iterdir()) == []
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mount)], check=True)

    run(scenario)


# Quotas


async def chunks_of(bench: FsBench, tenant: int) -> list[int]:
    return [
        int.from_bytes(chunk.key[-8:], "big") for chunk in bench.held() if chunk.tenant == tenant.to_bytes(16, "big")
    ]


def test_a_tenant_beyond_its_quota_loses_its_own_oldest_chunks_only(tmp_path: Path) -> None:
    slot = slot_bytes_for(CHUNK_BYTES)
    limited = (1).to_bytes(16, "big")

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3), tenant=0)
            await store(bench, range(5), tenant=1)
            assert bench.tier.set_quota(limited, 4 * slot) == 5 * slot  # what is there stays
            bench.tier.touch([chunk_id(0, tenant=1)])
            assert await bench.write(chunk_id(5, tenant=1)) is WriteOutcome.STORED
            assert await chunks_of(bench, 1) == [3, 4, 0, 5]
            assert await chunks_of(bench, 0) == [0, 1, 2]
        async with fs_bench(tmp_path, wait_ready=False) as bench:
            bench.tier.set_quota(limited, 2 * slot)  # before anything is known of what is there
            await bench.tier.ready()
            assert await bench.write(chunk_id(6, tenant=1)) is WriteOutcome.STORED
            assert await chunks_of(bench, 1) == [5, 6]
            bench.tier.set_quota(limited, None)
            await store(bench, range(7, 10), tenant=1)
            assert len(await chunks_of(bench, 1)) == 5

    run(scenario)


def test_what_is_beyond_a_quota_set_before_the_tier_is_warm_goes_once_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_writing, "QUOTA_EVICTIONS_MAX", 2)
    slot = slot_bytes_for(CHUNK_BYTES)

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(9), tenant=1)
            await store(bench, range(5), tenant=2)
            await store(bench, range(3), tenant=3)
        may_commit = threading.Event()

        def step(name: str) -> None:
            if name == "committing":
                may_commit.wait(WAIT_S)

        async with fs_bench(tmp_path, wait_ready=False, step=step) as bench:
            bench.tier.set_quota((1).to_bytes(16, "big"), 3 * slot)
            bench.tier.set_quota((2).to_bytes(16, "big"), 4 * slot)
            bench.tier.set_quota((3).to_bytes(16, "big"), 4 * slot)
            await bench.tier.ready()
            evictions = []
            for _ in range(20):
                evictions.append(bench.tier.stats().evictions)
                await asyncio.sleep(0)
            assert evictions == [1] * 20  # the second tenant's; two more may go when that is committed
            may_commit.set()
            while evictions[-1] < 6 + 1:
                evictions.append(bench.tier.stats().evictions)
                await asyncio.sleep(0)
            assert all(later - before <= 2 for before, later in pairwise(evictions))
            await asyncio.sleep(0.02)
            assert bench.tier.stats().evictions == 6 + 1
            assert await chunks_of(bench, 1) == [6, 7, 8]
            assert await chunks_of(bench, 2) == [1, 2, 3, 4]
            assert await chunks_of(bench, 3) == [0, 1, 2]

    run(scenario)


def test_a_write_evicts_a_bounded_number_of_chunks_for_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_writing, "QUOTA_EVICTIONS_MAX", 3)
    slot = slot_bytes_for(CHUNK_BYTES)

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(6), tenant=1)
            bench.tier.set_quota((1).to_bytes(16, "big"), 2 * slot)
            assert await bench.write(chunk_id(6, tenant=1)) is WriteOutcome.FULL
            assert await chunks_of(bench, 1) == [3, 4, 5]
            assert await bench.write(chunk_id(6, tenant=1)) is WriteOutcome.STORED
            assert await chunks_of(bench, 1) == [5, 6]

    run(scenario)


def test_writes_under_way_count_towards_a_quota(tmp_path: Path) -> None:
    slot = slot_bytes_for(CHUNK_BYTES)

    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            bench.tier.set_quota((1).to_bytes(16, "big"), 3 * slot)
            outcomes = await asyncio.gather(*(bench.write(chunk_id(n, tenant=1), n) for n in range(8)))
            assert outcomes.count(WriteOutcome.STORED) == 3
            assert outcomes.count(WriteOutcome.FULL) == 5
            assert bench.tier.stats().used_bytes == 3 * slot

    run(scenario)


# Scrub


def test_a_scrub_finds_each_bad_slot_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(20))
            assert await problems_found(bench) == []
            order = bench.held()
            for number in (3, 4):
                bench.flip(chunk_id(number), BLOCK_BYTES + 7)
            problems = await problems_found(bench)
            assert len(problems) == 2
            assert await problems_found(bench) == []
            await until(lambda: bench.tier.stats().quarantined == 2, "the quarantine")
            assert bench.tier.stats().corruptions == 2
            assert bench.held() == [each for each in order if each[2] not in spoiled()]

    def spoiled() -> set[bytes]:
        return {chunk_id(number).key for number in (3, 4)}

    run(scenario)


def test_a_torn_slot_is_dropped_and_is_no_corruption(tmp_path: Path) -> None:
    async def scenario() -> None:
        opts = options(slab_bytes=10 * SLOT_BYTES)
        async with fs_bench(tmp_path, opts) as bench:
            await store(bench, range(5))
            bench.flip(chunk_id(2), BLOCK_BYTES + CHUNK_BYTES - 1)
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path, opts) as bench:
            assert await problems_found(bench) == []
            stats = bench.tier.stats()
            assert (stats.torn, stats.corruptions) == (1, 0)
            assert await found(bench, range(5)) == [0, 1, 3, 4]
            (slab,) = bench.tier._catalog.slabs.values()
            await until(lambda: not slab.taken and not slab.quarantined, "the slot to be free")
            assert bench.tier.stats().quarantined == 0

    run(scenario)


def test_a_removal_covers_a_torn_chunk_that_somebody_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            bench.flip(chunk_id(1), BLOCK_BYTES + CHUNK_BYTES - 1)
        (tmp_path / fs_paths.INDEX).unlink()
        async with fs_bench(tmp_path) as bench:
            fd, offset = bench.offset(chunk_id(1))
            returned = bench.tier._reads._returned
            late: list[tuple[Any, Any]] = []

            def one_at_a_time(read: Any, done: Any) -> None:
                monkeypatch.setattr(bench.tier._reads, "_returned", lambda *more: late.append(more))
                returned(read, done)

            monkeypatch.setattr(bench.tier._reads, "_returned", one_at_a_time)
            reads = [asyncio.ensure_future(bench.read(chunk_id(1), place)) for place in range(2)]
            await until(lambda: bool(late), "the second read")
            assert await bench.remove(Scope(tenant=bytes(16))) == Removed(2, 2 * SLOT_BYTES)
            assert FsDirectory.read_block(fd, offset) == bytes(BLOCK_BYTES)
            returned(*late[0])
            outcomes = [(await read)[0] for read in reads]
            assert sorted(outcomes, key=str) == [ReadOutcome.ABSENT, ReadOutcome.DAMAGED]
            # Its slot could not be used again while somebody read there, and is not now.
            await until(lambda: bench.tier.stats().quarantined == 1, "the quarantine")
            stats = bench.tier.stats()
            assert (stats.torn, stats.corruptions) == (1, 0)

    run(scenario)


def test_the_background_scrub_goes_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(5))
            bench.flip(chunk_id(2), BLOCK_BYTES)
        async with fs_bench(tmp_path, options(scrub_bytes_per_s=1e9)) as bench:
            await until(lambda: not bench.tier.contains(chunk_id(2)), "the scrub to find it")

    run(scenario)


def test_passes_at_the_same_time_do_not_spoil_each_others_reads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(40))
            assert await asyncio.gather(*(problems_found(bench) for _ in range(4))) == [[]] * 4
            assert bench.tier.stats().scrubbed_chunks == 160
            assert (bench.tier.stats().corruptions, bench.tier.stats().chunks) == (0, 40)

    run(scenario)


def test_a_disk_that_hangs_ends_a_pass_and_a_later_one_goes_through(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(io_deadline_ms=500)) as bench:
            await store(bench, range(3))
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            bench.tier._scrub._buffers.append(hanging._map)
            [late] = await problems_found(bench)
            assert "the rest was not looked at" in late
            [waits] = await problems_found(bench)  # its buffer is the disk's until the read is back
            assert "the rest was not looked at" in waits
            hanging.let_go()
            await until(bench.tier._scrub._buffer_is_free.is_set, "the read to return")
            await until(lambda: bench.tier._reads.health.may_try(time.monotonic()), "the tier to try again")
            bench.tier._reads.health.succeeded()
            assert await problems_found(bench) == []
            assert bench.tier.stats().chunks == 3

    run(scenario)


def test_a_pass_that_is_cancelled_leaves_the_buffer_to_the_disk(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path) as bench:
            await store(bench, range(3))
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            bench.tier._scrub._buffers.append(hanging._map)
            scrub = asyncio.create_task(problems_found(bench))
            await until(lambda: not bench.tier._scrub._buffer_is_free.is_set(), "the read to begin")
            await asyncio.sleep(0)
            scrub.cancel()
            await asyncio.wait([scrub])
            assert not bench.tier._scrub._buffer_is_free.is_set()
            hanging.let_go()
            assert await problems_found(bench) == []
            assert bench.tier.stats().corruptions == 0

    run(scenario)


def test_a_scrub_waits_while_requests_fill_the_queue(tmp_path: Path, hanging: HangingMemory) -> None:
    async def scenario() -> None:
        async with fs_bench(tmp_path, options(queue_max=1)) as bench:
            await store(bench, range(3))
            bench.tier._pool.add_region(hanging.address, hanging.nbytes)
            memory = Memory(hanging.address, CHUNK_BYTES)
            done: list[ReadOutcome] = []
            bench.tier.read(chunk_id(0), memory, done.append, lambda: None)
            pauses: list[float] = []

            async def sleep(seconds: float) -> None:
                pauses.append(seconds)
                hanging.let_go()
                await asyncio.sleep(0.001)

            assert [problem async for problem in bench.tier.scrub(sleep=sleep)] == [None] * 3
            assert pauses
            assert done == [ReadOutcome.READ]

    run(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_readers_writers_damage_and_restarts_never_bring_wrong_bytes(tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)

    async def scenario() -> None:
        for _ in range(3):
            async with fs_bench(tmp_path, options(2 << 20)) as bench:
                for _ in range(150):
                    chunk: ChunkId = chunk_id(rnd.randrange(120))
                    match rnd.randrange(10):
                        case 0 if bench.tier.contains(chunk):
                            bench.flip(chunk, rnd.randrange(slot_bytes_for(CHUNK_BYTES)), rnd.randrange(8))
                        case 1:
                            await bench.remove(Scope(chunks=frozenset({chunk})))
                        case 2 | 3 | 4 | 5:
                            await bench.write(chunk)
                        case _:
                            bench.assert_right(chunk, *await bench.read(chunk))
            if rnd.random() < 0.5:
                (tmp_path / fs_paths.INDEX).unlink()

    run(scenario)
