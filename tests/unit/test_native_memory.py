"""Shared memory: modes, seals, maps; what another process of the same user can and cannot do with it."""

import ctypes
import faulthandler
import fcntl
import gc
import math
import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import _native
from tests.unit.native_store import INDEX_KEY, INSTANCE, KIB, NAMESPACE, TENANT, key_of, native_store, rss_bytes

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, FUTURE_WRITE = 1, 2, 4, 16
MAP_FIXED_NOREPLACE = 0x100000

# Runs in a second process, with the daemon's descriptor inherited: tries to get a writable map, in three ways.
ATTEMPTS = """
import mmap, os, sys
fd, owner_pid, owner_fd = map(int, sys.argv[1:])
def attempt(name, fd):
    try:
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except PermissionError:
        print(name, "refused")
    else:
        print(name, "WRITABLE")
attempt("inherited", fd)
for path in (f"/proc/self/fd/{fd}", f"/proc/{owner_pid}/fd/{owner_fd}"):
    attempt(path.split("/")[2].replace(str(owner_pid), "owner"), os.open(path, os.O_RDWR))
with mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as readable:
    print("readable", readable[:8].hex())
try:
    os.write(fd, b"x")
except PermissionError:
    print("write refused")
"""


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = _native.create_memfd("test", 16 * KIB)
    yield fd
    os.close(fd)


def _attempts(fd: int) -> list[str]:
    child = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(fd), str(os.getpid()), str(fd)],
        pass_fds=[fd],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return child.stdout.splitlines()


def test_a_memfd_is_private_sized_and_closed_on_exec(memfd: int) -> None:
    status = os.fstat(memfd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 16 * KIB
    assert fcntl.fcntl(memfd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_second_process_gets_no_writable_map_of_a_sealed_table() -> None:
    with native_store() as store:
        _native.seal_table(store.table_fd)
        assert fcntl.fcntl(store.table_fd, F_GET_SEALS) & (SEAL | SHRINK | GROW | FUTURE_WRITE) == 23
        answers = _attempts(store.table_fd)
        assert answers[:3] == ["inherited refused", "self refused", "owner refused"]
        assert answers[3] == "readable 014b565441424c45"
        assert answers[4] == "write refused"
        # The daemon's own map, made before, still writes.
        table = store.table()
        store.index.heartbeat()
        assert table.heartbeat_age_ms() < 60_000


def test_without_the_seal_the_same_attempts_succeed(memfd: int) -> None:
    """Else the test above would pass for another reason."""
    assert _attempts(memfd)[:3] == ["inherited WRITABLE", "self WRITABLE", "owner WRITABLE"]


def test_a_sealed_arena_is_writable_but_keeps_its_size(memfd: int) -> None:
    _native.seal_arena(memfd)
    with mmap.mmap(memfd, 16 * KIB) as writable:
        writable[0] = 1
    for nbytes in (4 * KIB, 32 * KIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memfd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memfd, F_ADD_SEALS, FUTURE_WRITE)


def test_sealing_twice_says_what_could_not_be_sealed(memfd: int) -> None:
    _native.seal_arena(memfd)
    with pytest.raises(OSError, match="cannot seal the table"):
        _native.seal_table(memfd)


def test_an_arena_longer_than_its_memory_is_refused(memfd: int) -> None:
    with pytest.raises(ValueError, match="cannot map 16385 bytes of a memory of 16384 bytes"):
        _native.Arena(memfd, 16 * KIB + 1)


def test_an_arena_is_not_there_in_a_forked_child(memfd: int) -> None:
    arena = _native.Arena(memfd, 16 * KIB)
    view = arena.view()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        _ = view[0]  # no such memory: the child dies of it
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    view.release()
    arena.close()


def test_what_a_forked_child_maps_where_the_arena_was_is_its_own(memfd: int) -> None:
    """The child's kernel puts its first large array there, and the end of the inherited arena must leave that alone."""
    arena = _native.Arena(memfd, 16 * KIB)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    place = (ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.nbytes))
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        own = libc.mmap(*place, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
        if own != arena.address:
            os._exit(1)
        del arena
        ctypes.c_ubyte.from_address(own).value = 7
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    arena.close()


def test_an_arena_with_a_view_in_use_is_not_unmapped(memfd: int) -> None:
    arena = _native.Arena(memfd, 16 * KIB)
    view = arena.view()
    view[5] = 7
    with pytest.raises(BufferError, match="1 views"):
        arena.close()
    assert os.pread(memfd, 1, 5) == b"\x07"
    view.release()
    arena.close()
    with pytest.raises(ValueError, match="the arena is closed"):
        _ = arena.address
    with pytest.raises(BufferError, match="closed"):
        arena.view()


def test_populate_keeps_what_is_there_and_takes_the_memory(memfd: int) -> None:
    os.pwrite(memfd, b"kept", 100)
    arena = _native.Arena(memfd, 16 * KIB)
    _native.populate(arena.address, arena.nbytes)
    assert os.pread(memfd, 4, 100) == b"kept"
    assert os.fstat(memfd).st_blocks * 512 == 16 * KIB
    _native.fill(arena.address + 4096, 10, 0xA5)
    assert os.pread(memfd, 12, 4095) == b"\x00" + b"\xa5" * 10 + b"\x00"
    arena.close()


def test_what_lookups_read_is_mapped_ahead_of_them_and_takes_no_memory() -> None:
    with native_store(entries=100_000) as store:
        table = store.table()
        size = os.fstat(store.table_fd).st_size
        before = os.fstat(store.table_fd).st_blocks
        assert rss_bytes("test-table", "r--s") < size // 4
        pieces = []
        while piece := table.premap(sum(pieces), 1 << 20):
            pieces.append(piece)
        assert set(pieces[:-1]) == {1 << 20}
        assert size // 2 < sum(pieces) <= rss_bytes("test-table", "r--s")
        assert os.fstat(store.table_fd).st_blocks == before
        table.close()
        assert table.premap(0, 1 << 20) == 0


def test_populating_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot have 4096 bytes of memory"):
        _native.populate(4096, 4096)


def test_a_memory_that_is_no_table_is_refused(memfd: int) -> None:
    with pytest.raises(ValueError, match="not a table: its first word"):
        _native.Table(memfd, INDEX_KEY)
    with native_store() as store:
        page = bytearray(os.pread(store.table_fd, 4096, 0))
        os.pwrite(memfd, page, 0)
        with pytest.raises(ValueError, match="does not fit a memory of 16384 bytes"):
            _native.Table(memfd, INDEX_KEY)
        page[8] = 9
        os.pwrite(memfd, page, 0)
        with pytest.raises(ValueError, match="a table of format 9, but this process reads 1"):
            _native.Table(memfd, INDEX_KEY)
        with pytest.raises(ValueError, match="an index key of 3 bytes: 16 are needed"):
            _native.Table(store.table_fd, b"abc")


def test_a_table_says_whose_it_is() -> None:
    with native_store() as store:
        table = store.table()
        assert (table.instance_id, table.arena_bytes, table.unit_bytes) == (
            INSTANCE,
            store.arena_bytes,
            store.unit_bytes,
        )


def test_the_heartbeats_age_is_the_time_since_it_was_written() -> None:
    with native_store() as store:
        table = store.table()
        assert table.heartbeat_age_ms() > 0  # never yet: as old as the machine
        store.index.heartbeat()
        before = time.monotonic()
        first = table.heartbeat_age_ms()
        second = table.heartbeat_age_ms()
        assert 0 <= first <= second <= (time.monotonic() - before) * 1000 + 60_000


def test_in_a_closed_table_nothing_is_found_and_nothing_is_current() -> None:
    with native_store() as store:
        slot, generation = store.put(1)
        refs = np.array([slot], np.uint32), np.array([generation], np.uint64)
        table = store.table()
        store.index.heartbeat()
        assert table.lookup(NAMESPACE, TENANT, [key_of(1)])[0] == bytes([_native.CPU])
        assert table.current(*refs) == b"\1"
        table.close()
        for count in (1, 10_000):  # without and with the interpreter's lock given up
            codes, slots, generations = table.lookup(NAMESPACE, TENANT, [key_of(1)] * count)
            assert codes == bytes([_native.MISS]) * count
            assert (slots.tolist(), generations.tolist()) == ([0] * count, [0] * count)
        assert table.current(*refs) == b"\0"
        assert table.heartbeat_age_ms() == math.inf
        assert (table.ready_bytes, table.arena_bytes, table.instance_id) == (0, store.arena_bytes, INSTANCE)
        table.close()


def test_a_copier_does_not_take_a_closed_table_for_one_in_which_nothing_is_current() -> None:
    with native_store() as store:
        table = store.table()
        table.close()
        copier = _native.Copier(1)
        empty = np.zeros(0, np.uint64)
        with pytest.raises(ValueError, match="the table is closed"):
            copier.submit(1, empty, empty, empty, table=table, slots=np.zeros(0, np.uint32), generations=empty)
        copier.close()


def test_closing_a_table_unmaps_it() -> None:
    with native_store() as store:
        table = store.table()
        mapped = _maps_of("test-table")
        table.close()
        assert _maps_of("test-table") == mapped - 1


def _maps_of(name: str) -> int:
    gc.collect()  # no map of an earlier test goes between two calls
    return sum(f"memfd:{name}" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(("chunk_bytes", "expected"), [(1, 4096), (4096, 4096), (4097, 8192), (2 << 20, 2 << 20)])
def test_class_bytes_round_up_to_pages(chunk_bytes: int, expected: int) -> None:
    assert _native.class_bytes(chunk_bytes) == expected


def test_a_class_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="a chunk of 0 bytes"):
        _native.class_bytes(0)


def test_slot_offsets_follow_units_and_places() -> None:
    assert _native.slot_offset(0, 8192, 65536) == 0
    assert _native.slot_offset(3, 8192, 65536) == 3 * 8192
    assert _native.slot_offset(2 * 16 + 1, 8192, 65536) == 2 * 65536 + 8192
    assert _native.slot_addresses(10, [0, 3, 33], 8192, 65536).tolist() == [10, 10 + 3 * 8192, 10 + 2 * 65536 + 8192]
    with pytest.raises(ValueError, match="multiples of 4096"):
        _native.slot_offset(0, 5, 65536)
    with pytest.raises(ValueError, match="multiples of 4096"):
        _native.slot_offset(0, 4096, 0)
