"""arena.sock from the daemon's side, in one process: pidfds, their absence, and peers that misbehave."""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import attach, limits
from kvstore import session as session_module
from kvstore.attach import ArenaSocket, peer_pidfd
from kvstore.errors import ConfigurationError, Unavailable
from kvstore.namespace import canonical_json, seed_fingerprint
from kvstore.operations import Operations
from kvstore.rpc import handover
from kvstore.rpc.handover import GOODBYE, STEP, Hello, Memory, Refusal, decode
from kvstore.rpc.v1 import admin_pb2, store_pb2
from kvstore.session import Attachment, Role
from kvstore.session import Session as ClientSession
from kvstore.store import Session, Store
from kvstore.tiers.cpu import CpuTier

WAIT_S = 10.0
CHUNK_BYTES = 4096


class Place:
    """A store and its arena.sock on the running loop."""

    def __init__(
        self,
        folder: Path,
        *,
        pidfd_of: Callable[[socket.socket, int], int | None],
        rest_ms: int,
        attach_within_ms: int,
    ) -> None:
        tier = CpuTier(cpu_bytes=1 << 20, index_bytes=None, index_key=b"x" * 16, instance_id=b"i" * 16)
        tier.set_ready(tier.arena_bytes)
        self.store = Store(
            tier, instance_id=b"i" * 16, index_key=b"x" * 16, tenant_key=b"k" * 32, hash_seed="0",
            require_cache_salt=False,
        )  # fmt: skip
        self.arena_socket = ArenaSocket(
            self.store, memory=Memory(tier.arena_bytes, b"x" * 16, b"k" * 32), fds=(tier.arena_fd, tier.table_fd),
            allow_uids=frozenset(), pidfd_of=pidfd_of, rest_ms=rest_ms,
            attach_within_ms=attach_within_ms,
        )  # fmt: skip
        self.path = folder / "a"
        self.arena_socket.listen(self.path)

    async def connect(self) -> tuple[socket.socket, Session | None]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(self.path))
        hello = decode(await asyncio.wait_for(loop.sock_recv(sock, 4096), WAIT_S))
        return sock, self.store.session(hello.token) if isinstance(hello, Hello) else None

    async def attached_with_grants(self, count: int) -> tuple[socket.socket, Session]:
        sock, session = await self.connect()
        assert session is not None
        fingerprint = seed_fingerprint("0")
        document = canonical_json({"chunk_bytes": CHUNK_BYTES, "seed_fingerprint": fingerprint.hex()})
        self.store.attach(
            session,
            store_pb2.AttachRequest(
                role=store_pb2.ROLE_CLIENT, seed_fingerprint=fingerprint,
                kinds=[store_pb2.Kind(chunk_bytes=CHUNK_BYTES, namespace_document=document)],
            ),
        )  # fmt: skip
        request = store_pb2.StepRequest(number=1, instance_id=b"i" * 16, grants_wanted=[count])
        assert len(self.store.step(session, request, 0).grants[0].slots) == count
        return sock, session

    def granted_bytes(self) -> int:
        return Operations(self.store, self.store._tier, started_ms=0).stats(0).tiers[0].granted_bytes

    async def eventually(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not happened():
                await asyncio.sleep(0.005)


def no_pidfd(*_: object) -> None:
    return None


def run(
    tmp_path: Path,
    scene: Callable[[Place], Coroutine[object, object, None]],
    *,
    pidfd_of: Callable[[socket.socket, int], int | None] = peer_pidfd,
    rest_ms: int = limits.REST_WITHOUT_PIDFD_MS,
    attach_within_ms: int = limits.ATTACH_WITHIN_MS,
) -> None:
    async def main() -> None:
        place = Place(tmp_path, pidfd_of=pidfd_of, rest_ms=rest_ms, attach_within_ms=attach_within_ms)
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        try:
            await scene(place)
            assert place.store.problems() == []
            assert not failures
        finally:
            place.arena_socket.close()

    asyncio.run(main())


def test_without_a_pidfd_the_slots_rest_after_the_hang_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(3)
        assert "no pidfd can be had" in caplog.text
        sock.close()
        await place.eventually(lambda: not session.connected)
        assert place.granted_bytes() == 3 * CHUNK_BYTES
        await place.eventually(lambda: place.granted_bytes() == 0)

    run(tmp_path, scene, pidfd_of=no_pidfd, rest_ms=200)


def test_with_a_pidfd_a_living_process_keeps_its_slots(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(3)
        sock.close()
        await place.eventually(lambda: not session.connected)
        place.arena_socket.sweep()
        assert place.store.watched(session)
        assert place.granted_bytes() == 3 * CHUNK_BYTES

    run(tmp_path, scene, rest_ms=0)


def test_connections_that_came_and_went_leave_no_descriptor(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        before, connections = len(os.listdir("/proc/self/fd")), 20
        for _ in range(connections):
            sock, session = await place.connect()
            sock.close()
            await place.eventually(lambda session=session: not session.connected)
        # What earlier tests left in this process may go, or open one, meanwhile; a leak is one for each connection.
        assert len(os.listdir("/proc/self/fd")) < before + connections

    run(tmp_path, scene)


def test_a_peer_that_has_ended_already_gets_nothing(tmp_path: Path) -> None:
    def ended(*_: object) -> None:
        raise ProcessLookupError

    async def scene(place: Place) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(place.path))
        assert await asyncio.wait_for(loop.sock_recv(sock, 4096), WAIT_S) == b""
        sock.close()
        assert place.store._sessions == {}

    run(tmp_path, scene, pidfd_of=ended)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_who_cannot_be_watched_for_want_of_descriptors_is_refused(tmp_path: Path, number: int) -> None:
    """The rest by the clock is no substitute: it could hand out a slot that is still being written."""

    def exhausted(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    async def scene(place: Place) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(place.path))
        refusal = decode(await asyncio.wait_for(loop.sock_recv(sock, 4096), WAIT_S))
        assert isinstance(refusal, Refusal)
        assert os.strerror(number) in refusal.reason
        assert place.store._sessions == {}
        sock.close()

    run(tmp_path, scene, pidfd_of=exhausted)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ESRCH])
def test_a_pidfd_that_cannot_be_had_now_is_not_taken_for_one_that_never_can(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def exhausted(_: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(attach, "SO_PEERPIDFD", 9999)  # an older kernel's answer
    monkeypatch.setattr(os, "pidfd_open", exhausted)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, pytest.raises(OSError, match=os.strerror(number)):
        peer_pidfd(here, os.getpid())


def test_who_connects_and_never_attaches_does_not_keep_a_place(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        attached, session = await place.attached_with_grants(1)
        idle, _ = await place.connect()
        place.arena_socket.sweep()
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(idle, 1), WAIT_S) == b""
        assert list(place.store._sessions.values()) == [session]
        assert session.connected
        attached.close()
        idle.close()

    run(tmp_path, scene, attach_within_ms=0)


def test_too_many_sessions_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS_MAX", 1)
    monkeypatch.setattr(limits, "OPERATORS_MAX", 0)

    async def scene(place: Place) -> None:
        first, _ = await place.attached_with_grants(1)
        second = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        second.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(second, str(place.path))
        refusal = decode(await asyncio.wait_for(loop.sock_recv(second, 4096), WAIT_S))
        assert isinstance(refusal, Refusal)
        assert "this daemon takes 1" in refusal.reason
        first.close()
        second.close()

    run(tmp_path, scene)


def test_where_all_places_are_taken_who_has_not_attached_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else 1,040 idle connections would keep the operator out who wants to see whose they are."""
    monkeypatch.setattr(limits, "SESSIONS_MAX", 3)
    monkeypatch.setattr(limits, "OPERATORS_MAX", 0)

    async def scene(place: Place) -> None:
        attached, session = await place.attached_with_grants(1)
        oldest, _ = await place.connect()
        idle, idle_session = await place.connect()
        new, new_session = await place.connect()
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(oldest, 1), WAIT_S) == b""
        assert list(place.store._sessions.values()) == [session, idle_session, new_session]
        for each in (attached, oldest, idle, new):
            each.close()

    run(tmp_path, scene)


def test_who_finds_the_queue_of_connections_full_waits_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as open_sockets:

        def new_socket() -> socket.socket:
            return open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))

        listener = new_socket()
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = new_socket()
                waiting.setblocking(False)
                waiting.connect(path)
        latecomer = new_socket()
        latecomer.settimeout(WAIT_S)
        with pytest.raises(Unavailable, match=r"too many processes are connecting"):
            session_module._connect(latecomer, path, deadline_s=0.0)

        # Whoever comes too late looks again, and by then one has been let in.
        def let_one_in(_: float) -> None:
            open_sockets.enter_context(listener.accept()[0])

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=let_one_in)
        monkeypatch.setattr(session_module, "time", clock)
        session_module._connect(latecomer, path, deadline_s=time.monotonic() + WAIT_S)
        assert latecomer.getpeername() == path


@pytest.mark.parametrize("theirs", [handover.PROTOCOL - 1, handover.PROTOCOL + 1])
def test_a_process_and_a_daemon_of_different_versions_do_not_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(handover, "PROTOCOL", theirs)
        hello = Hello(b"t" * 32).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as open_sockets:
        listener.bind(str(tmp_path / "arena.sock"))
        listener.listen()
        connect = session_module._connect

        def connect_and_be_greeted(sock: socket.socket, path: str, deadline_s: float) -> None:
            connect(sock, path, deadline_s)
            open_sockets.enter_context(listener.accept()[0]).send(hello)

        monkeypatch.setattr(session_module, "_connect", connect_and_be_greeted)
        said = rf"daemon speaks protocol {theirs} and this program {handover.PROTOCOL}; install one version"
        with pytest.raises(ConfigurationError, match=said):
            ClientSession.attach(f"unix://{tmp_path}/kvstore.sock", Attachment(role=Role.ADMIN))


# Of protos/, by the protocol that was current when they last changed.
WIRE_DIGESTS = {3: "da1ae4b02d0dff7613a56510c3ec4460f90cd64155f74c26150182d1f9d6dfdd"}


def test_a_change_of_the_wire_is_a_change_of_the_protocol() -> None:
    """An end that ignores a field it does not know does something else than it was told: it evicts more, say."""
    digest = hashlib.sha256(store_pb2.DESCRIPTOR.serialized_pb + admin_pb2.DESCRIPTOR.serialized_pb).hexdigest()
    assert digest == WIRE_DIGESTS[handover.PROTOCOL], (
        "protos/ changed. If an older end would not see it, or do something else, raise handover.PROTOCOL; then "
        f"put {digest} here"
    )


def step_packet(request: store_pb2.StepRequest) -> bytes:
    return STEP + request.SerializeToString()


def test_a_step_message_on_arena_sock_is_applied_once_and_answered_here_and_on_the_stream(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(3)
        request = store_pb2.StepRequest(number=2, instance_id=b"i" * 16, grants_wanted=[2], misses=5)
        sock.send(step_packet(request))
        packet = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4096), WAIT_S)
        reply = store_pb2.StepReply.FromString(packet.removeprefix(STEP))
        assert packet.startswith(STEP)
        assert (reply.number, len(reply.grants[0].slots)) == (2, 2)
        assert place.store.step(session, request, 0) == reply  # as when the stream brings it
        assert place.store.counts.misses == 5
        assert place.granted_bytes() == 5 * CHUNK_BYTES
        sock.close()

    run(tmp_path, scene)


def test_a_step_message_on_arena_sock_that_is_not_the_next_or_is_refused_changes_nothing(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(3)
        fresh, _ = await place.connect()  # has not attached
        fresh.send(step_packet(store_pb2.StepRequest(number=1, instance_id=b"i" * 16, misses=1)))
        for bad in (
            step_packet(store_pb2.StepRequest(number=1, instance_id=b"i" * 16, misses=1)),
            step_packet(store_pb2.StepRequest(number=3, instance_id=b"i" * 16, misses=1)),
            step_packet(store_pb2.StepRequest(number=2, instance_id=b"j" * 16, misses=1)),
            step_packet(store_pb2.StepRequest(number=2, instance_id=b"i" * 16, misses=limits.COUNT_PER_STEP_MAX + 1)),
            STEP,
            STEP + b"\xff",
        ):
            sock.send(bad)
        sock.send(step_packet(store_pb2.StepRequest(number=2, instance_id=b"i" * 16, misses=7)))
        packet = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4096), WAIT_S)
        assert store_pb2.StepReply.FromString(packet.removeprefix(STEP)).number == 2  # the first answer
        assert place.store.counts.misses == 7
        assert session.connected
        assert place.granted_bytes() == 3 * CHUNK_BYTES
        sock.close()
        fresh.close()

    run(tmp_path, scene)


def test_a_process_that_reads_no_answers_on_arena_sock_goes_on_sending(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(3)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        place.arena_socket._connections[session].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # type: ignore[union-attr]
        loop = asyncio.get_running_loop()
        for number in range(2, 102):
            request = store_pb2.StepRequest(number=number, instance_id=b"i" * 16, misses=1)
            await asyncio.wait_for(loop.sock_sendall(sock, step_packet(request)), WAIT_S)
        await place.eventually(lambda: place.store.counts.misses == 100)
        assert session.connected
        sock.close()

    run(tmp_path, scene)


def test_a_goodbye_ends_grants_though_the_process_lives(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(3)
        sock.send(GOODBYE)
        sock.close()
        await place.eventually(lambda: place.granted_bytes() == 0)
        assert not place.store.watched(session)
        assert place.store.problems() == []

    run(tmp_path, scene)


def test_the_memory_is_handed_over_only_to_an_open_connection(tmp_path: Path) -> None:
    async def scene(place: Place) -> None:
        sock, session = await place.attached_with_grants(1)
        assert place.arena_socket.hand_over(session)
        packet, fds, _, _ = socket.recv_fds(sock, 4096, 2)
        assert json.loads(packet)["arena_bytes"] == 1 << 20
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)
        sock.close()
        await place.eventually(lambda: not session.connected)
        assert not place.arena_socket.hand_over(session)

    run(tmp_path, scene)
