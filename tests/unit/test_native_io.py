"""The I/O pool: what lands where, in what order, and who owns the memory when."""

import errno
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore._native import IO_HEAD_BYTES, IoDone, IoPool, crc32c
from kvstore.tiers.conformance import Memories
from tests.hanging_memory import HangingMemory

WAIT_S = 20.0
PIECE_BYTES = 256 << 10
PIECES_UNDER_WAY_MAX = 32 * 4  # of one request
BEGUN_WITHIN_MS = 300  # also on a busy machine, or what should be late is cancelled


# Forbids io_setup to its process by a seccomp filter, writes and reads 5 pieces, and compares them. Argument: a file.
WITHOUT_ASYNCHRONOUS_IO = """
import ctypes, os, platform, struct, sys
from kvstore._native import IoPool, crc32c
from kvstore.tiers.conformance import Memories

number = {"x86_64": 206, "aarch64": 0}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
program = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(filters))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, filter
assert libc.syscall(number, 1, ctypes.byref(ctypes.c_ulong())) == -1 and ctypes.get_errno() == 1

nbytes = 5 * (256 << 10)
memories = Memories(2, nbytes)
pool = IoPool(1, 1)
pool.add_region(*memories.region)
payload = os.urandom(nbytes)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)

def done():
    while not (reports := pool.poll()):
        os.sched_yield()
    (report,) = reports
    return report.error, report.checksum

pool.write(1, fd, 0, *memories.fill(0, payload), head=bytes(4096), payload_checksum_at=12)
assert done() == (0, crc32c(payload))
pool.read(2, fd, 0, *memories.place(1), with_head=True)
assert done() == (0, crc32c(payload))
assert memories.content(1) == payload
assert pool.close(20.0)
print("right")
"""


class Pool:
    def __init__(self, n_read_threads: int = 2, n_write_threads: int = 2) -> None:
        self.memories = Memories(8, 8192)
        self.pool = IoPool(n_read_threads, n_write_threads)
        self.pool.add_region(*self.memories.region)

    def next(self, count: int = 1) -> list[IoDone]:
        """At least so many reports, in order."""
        reports: list[IoDone] = []
        while len(reports) < count:
            assert select.select([self.pool.event_fd], [], [], WAIT_S)[0], "no report"
            reports += self.pool.poll()
        return reports


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    assert pool.pool.close(WAIT_S)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture(params=["direct", "buffered"])
def any_fd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """Where the kernel has asynchronous I/O, and where it does all at once."""
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "direct" else 0))
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error}")
    yield fd
    os.close(fd)


@pytest.fixture
def hanging() -> Iterator[HangingMemory]:
    with HangingMemory(8192) as memory:
        yield memory


def test_head_and_payload_lie_side_by_side_with_their_checksums(pool: Pool, fd: int) -> None:
    payload = os.urandom(8192)
    memory = pool.memories.fill(0, payload)
    head = b"h" * IO_HEAD_BYTES
    pool.pool.write(7, fd, 4096, *memory, head=head, payload_checksum_at=12, head_checksum_at=4092)
    (done,) = pool.next()
    assert (done.request, done.error, done.late) == (7, 0, False)

    raw = os.pread(fd, 3 * 4096, 4096)
    assert raw[IO_HEAD_BYTES:] == payload
    assert int.from_bytes(raw[12:16], "little") == done.checksum == crc32c(payload)
    assert int.from_bytes(raw[4092:4096], "little") == crc32c(raw[:4092])
    assert raw[:12] == head[:12]

    pool.memories.fill(1, bytes(8192))
    pool.pool.read(8, fd, 4096, *pool.memories.place(1), with_head=True)
    (done,) = pool.next()
    assert (done.request, done.error, done.checksum, done.head) == (8, 0, crc32c(payload), raw[:IO_HEAD_BYTES])
    assert pool.memories.content(1) == payload


def test_a_head_alone_can_be_read_and_written(pool: Pool, fd: int) -> None:
    pool.pool.write(1, fd, 0, 0, 0, head=b"x" * IO_HEAD_BYTES)
    pool.next()
    pool.pool.read(2, fd, 0, 0, 0, with_head=True)
    assert pool.next()[0].head == b"x" * IO_HEAD_BYTES


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "nbytes",
    [
        PIECE_BYTES,
        2 * PIECE_BYTES - 4096,
        2 * PIECE_BYTES,
        5 * PIECE_BYTES + 4096,
        (PIECES_UNDER_WAY_MAX + 3) * PIECE_BYTES + 8192,
    ],
)
def test_pieces_make_the_whole_and_its_checksum(any_fd: int, threads: int, nbytes: int) -> None:
    fd = any_fd
    payload = os.urandom(nbytes)
    memories = Memories(2, nbytes)
    pool = Pool(threads, threads)
    pool.pool.add_region(*memories.region)
    for _ in range(20 if nbytes < 8 << 20 else 1):
        pool.pool.write(1, fd, 4096, *memories.fill(0, payload), head=bytes(4096), payload_checksum_at=12)
        assert [(done.request, done.error) for done in pool.next()] == [(1, 0)]
        raw = content(fd)[4096:]
        assert raw[4096:] == payload
        assert int.from_bytes(raw[12:16], "little") == crc32c(payload)
        memories.fill(1, bytes(nbytes))
        pool.pool.read(2, fd, 4096, *memories.place(1), with_head=True)
        (done,) = pool.next()
        assert (done.error, done.checksum, done.head) == (0, crc32c(payload), raw[:4096])
        assert memories.content(1) == payload
    assert pool.pool.close(WAIT_S)


def content(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_several_pieces_with_one_call_make_the_whole_and_its_checksum(any_fd: int, threads: int) -> None:
    """The more requests are under way, the more pieces go at once: from one to the most, with what is left over."""
    fd = any_fd
    count, nbytes = 8, 6 * PIECE_BYTES + 4096
    payloads = [os.urandom(nbytes) for _ in range(count)]
    memories = Memories(count, nbytes)
    pool = Pool(threads, threads)
    pool.pool.add_region(*memories.region)
    for number, payload in enumerate(payloads):
        memory = memories.fill(number, payload)
        pool.pool.write(number, fd, number * (4096 + nbytes), *memory, head=bytes(4096), payload_checksum_at=12)
    written = sorted((done.request, done.error, done.checksum) for done in pool.next(count))
    assert written == [(number, 0, crc32c(payload)) for number, payload in enumerate(payloads)]
    for number in range(count):
        memories.fill(number, bytes(nbytes))
        pool.pool.read(number, fd, number * (4096 + nbytes), *memories.place(number), with_head=True)
    for done in pool.next(count):
        expected = crc32c(payloads[done.request])
        assert (done.error, done.checksum) == (0, expected)
        assert int.from_bytes(done.head[12:16], "little") == expected
        assert memories.content(done.request) == payloads[done.request]
    assert pool.pool.close(WAIT_S)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("pieces", [4, PIECES_UNDER_WAY_MAX + 60])
def test_a_request_in_pieces_that_fails_is_reported_once(any_fd: int, threads: int, pieces: int) -> None:
    pool = Pool(threads, threads)
    memories = Memories(1, pieces * PIECE_BYTES)
    pool.pool.add_region(*memories.region)
    os.ftruncate(any_fd, 2 * PIECE_BYTES)  # the first pieces can be read, the last ones cannot
    pool.pool.read(1, any_fd, 0, *memories.place(0), with_head=True)
    assert [(done.request, done.error) for done in pool.next()] == [(1, errno.ENODATA)]
    # The next one has nothing of it.
    pool.pool.read(2, any_fd, 0, memories.address, 2 * PIECE_BYTES)
    (done,) = pool.next()
    assert (done.request, done.error, done.checksum) == (2, 0, crc32c(bytes(2 * PIECE_BYTES)))
    assert pool.pool.close(WAIT_S)
    assert pool.pool.poll() == []


@pytest.mark.parametrize("way", ["read", "write"])
def test_one_piece_that_hangs_makes_its_request_late_and_close_gives_up_the_rest(fd: int, way: str) -> None:
    pool = Pool(1, 1)
    with HangingMemory(PIECES_UNDER_WAY_MAX * PIECE_BYTES + PIECE_BYTES) as hanging:
        pool.pool.add_region(hanging.address, hanging.nbytes)
        os.ftruncate(fd, hanging.nbytes)
        getattr(pool.pool, way)(1, fd, 0, hanging.address, hanging.nbytes, deadline_ms=BEGUN_WITHIN_MS)
        (late,) = pool.next()
        assert (late.request, late.error, late.late) == (1, errno.ETIMEDOUT, True)
        assert not pool.pool.close(0.0)
        assert pool.pool.poll() == []  # the memory is not free yet
        hanging.let_go()
        (done,) = pool.next()
        assert (done.request, done.error, done.late) == (1, errno.ECANCELED, False)
    assert pool.pool.close(WAIT_S)


def test_without_asynchronous_io_each_call_is_waited_for(tmp_path: Path) -> None:
    """As in a container whose seccomp profile forbids it."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ASYNCHRONOUS_IO, tmp_path / "file"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


def test_heads_are_read_many_at_once(pool: Pool, fd: int) -> None:
    blocks = [os.urandom(IO_HEAD_BYTES) for _ in range(200)]
    os.pwrite(fd, b"".join(blocks), 0)
    order = list(range(199, -1, -1))
    pool.pool.read_heads(1_000, fd, [number * IO_HEAD_BYTES for number in order])
    reports = pool.next(200)
    assert {done.request: done.head for done in reports} == {
        1_000 + place: blocks[number] for place, number in enumerate(order)
    }


def test_offsets_beyond_4_gib(pool: Pool, fd: int) -> None:
    payload = os.urandom(8192)
    offset = (5 << 30) + 4096
    pool.pool.write(1, fd, offset, *pool.memories.fill(0, payload), head=bytes(IO_HEAD_BYTES))
    pool.next()
    assert os.pread(fd, 8192, offset + IO_HEAD_BYTES) == payload
    assert os.fstat(fd).st_size == offset + IO_HEAD_BYTES + 8192


def test_a_file_that_ends_too_soon_is_an_error(pool: Pool, fd: int) -> None:
    os.ftruncate(fd, 5000)
    pool.pool.read(1, fd, 0, *pool.memories.place(0), with_head=True)
    assert pool.next()[0].error == errno.ENODATA


def test_errors_of_the_system_are_reported(pool: Pool, tmp_path: Path) -> None:
    readable = os.open(tmp_path / "file", os.O_RDONLY | os.O_CREAT)
    pool.pool.write(1, readable, 0, *pool.memories.place(0))
    assert pool.next()[0].error == errno.EBADF
    os.close(readable)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0, 8192), {}),  # memory of nobody
        ((None, 8 * 8192 + 1), {}),  # ends behind the region
        ((None, 2**64 - 1), {}),
        ((None, 0), {}),  # nothing to do
        ((None, 8192), {"head": b"short"}),
        ((None, 8192), {"payload_checksum_at": 0}),
        ((None, 8192), {"head": bytes(IO_HEAD_BYTES), "head_checksum_at": 4093}),
    ],
)
def test_what_cannot_be_right_is_refused(
    pool: Pool, fd: int, arguments: tuple[int | None, int], options: dict[str, object]
) -> None:
    address, nbytes = arguments
    with pytest.raises(ValueError, match=r"."):
        pool.pool.write(1, fd, 0, pool.memories.address if address is None else address, nbytes, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"."):
        pool.pool.read(1, fd, 2**63 - 1, *pool.memories.place(0))
    assert pool.pool.poll() == []


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_request_that_hangs_is_reported_late_and_again_when_it_returns(
    pool: Pool, fd: int, hanging: HangingMemory, way: str
) -> None:
    pool.pool.add_region(hanging.address, hanging.nbytes)
    os.ftruncate(fd, 1 << 20)
    getattr(pool.pool, way)(1, fd, 0, hanging.address, hanging.nbytes, deadline_ms=BEGUN_WITHIN_MS)
    (late,) = pool.next()
    assert (late.request, late.error, late.late) == (1, errno.ETIMEDOUT, True)
    # Others go on.
    pool.pool.read(2, fd, 0, *pool.memories.place(0), deadline_ms=60_000)
    assert [(done.request, done.error) for done in pool.next()] == [(2, 0)]
    hanging.let_go()
    (done,) = pool.next()
    assert (done.request, done.error, done.late) == (1, 0, False)


def test_a_request_that_waits_past_its_deadline_is_cancelled_and_its_memory_free(
    fd: int, hanging: HangingMemory
) -> None:
    pool = Pool(1, 1)
    pool.pool.add_region(hanging.address, hanging.nbytes)
    os.ftruncate(fd, 1 << 20)
    pool.pool.read(1, fd, 0, hanging.address, hanging.nbytes)
    pool.pool.read(2, fd, 0, *pool.memories.place(0), deadline_ms=20)
    (done,) = pool.next()
    assert (done.request, done.error, done.late) == (2, errno.ETIMEDOUT, False)
    assert not pool.pool.close(0.0)  # the first one still runs
    hanging.let_go()
    assert pool.next()[0].request == 1
    assert pool.pool.close(WAIT_S)


def test_a_write_waits_for_reads_but_not_for_ever(fd: int, hanging: HangingMemory) -> None:
    pool = Pool(1, 1)
    pool.pool.add_region(hanging.address, hanging.nbytes)
    os.ftruncate(fd, 1 << 20)
    pool.pool.read(1, fd, 0, hanging.address, hanging.nbytes)
    pool.pool.read(2, fd, 0, *pool.memories.place(0))  # keeps waiting behind the first
    pool.pool.write(3, fd, 0, *pool.memories.place(1))
    assert [done.request for done in pool.next()] == [3]
    hanging.let_go()
    pool.next(2)
    assert pool.pool.close(WAIT_S)


def test_reads_go_first(fd: int) -> None:
    """Reads keep their order; a write that came before the last of them need not come before it."""
    pool = Pool(1, 1)
    os.ftruncate(fd, 1 << 20)
    for number in range(10):
        pool.pool.read(number, fd, 0, *pool.memories.place(number))
    pool.pool.write(10, fd, 0, *pool.memories.place(0))
    order = [done.request for done in pool.next(11)]
    assert [request for request in order if request != 10] == list(range(10))
    assert pool.pool.close(WAIT_S)


def test_after_close_what_waited_is_cancelled_and_nothing_more_is_taken(fd: int) -> None:
    pool = Pool(1, 1)
    for number in range(50):
        pool.pool.write(number, fd, number * 8192, *pool.memories.place(number))
    assert pool.pool.close(WAIT_S)
    reports = pool.pool.poll()
    assert sorted(done.request for done in reports) == list(range(50))
    assert {done.error for done in reports} <= {0, errno.ECANCELED}
    with pytest.raises(RuntimeError):
        pool.pool.read(1, fd, 0, *pool.memories.place(0))


def test_many_threads_may_submit(pool: Pool, fd: int) -> None:
    def submit(first: int) -> None:
        for number in range(first, first + 100):
            pool.pool.write(number, fd, number * 8192, *pool.memories.place(number))

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    reports = pool.next(400)
    for thread in threads:
        thread.join()
    assert sorted(done.request for done in reports) == list(range(400))
