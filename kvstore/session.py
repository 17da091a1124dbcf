"""One process attached to the daemon: the connection on arena.sock, the token, the channel, and the mapped memory.

Concurrency: a session may be used from many threads. One watcher thread per session waits on arena.sock, hands
on the answers to step messages, all that the daemon says there after the memory, and finds out that it has gone.
`_lock` guards `_closed`, `_lost` and the callbacks; callbacks run on the watcher's thread, or on that of `give_up`,
outside the lock.

Nothing here starts a thread or a channel at import. A session belongs to the process that attached it: a forked child
closes its copy of the socket (or the daemon would never see the parent hang up) and is refused when it uses the
session. If the daemon dies, the memory stays mapped and readable until `close`; it belongs to an instance that no
other daemon will ever call its own.
"""

import contextlib
import enum
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from kvstore._native import Arena, Table
from kvstore.config import endpoint_paths, grpc_target
from kvstore.errors import ConfigurationError, KVStoreError, NamespaceMismatch, NotAllowed, ProtocolError, Unavailable
from kvstore.limits import MESSAGE_BYTES_MAX, TOKEN_METADATA_KEY
from kvstore.namespace import canonical_json, seed_fingerprint, seed_problem
from kvstore.premap import Premapping
from kvstore.rpc.handover import (
    FDS_PER_PACKET,
    GOODBYE,
    PACKET_BYTES_MAX,
    STEP,
    STEP_PACKET_BYTES_MAX,
    Hello,
    Memory,
    Packet,
    Refusal,
    decode,
)
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import store_pb2, store_pb2_grpc
from kvstore.tenant import tenant_id

WATCHER_JOIN_S = 5.0
QUEUE_FULL_POLL_S = 0.01


class Role(enum.Enum):
    CLIENT = store_pb2.ROLE_CLIENT
    SCHEDULER = store_pb2.ROLE_SCHEDULER
    WORKER = store_pb2.ROLE_WORKER
    ADMIN = store_pb2.ROLE_ADMIN


@dataclass(frozen=True, slots=True)
class Kind:
    """Chunks of one namespace and one size; an engine has one kind for each KV cache group. Sizes in bytes."""

    namespace: Mapping[str, object]  # the session adds chunk_bytes and the seed
    chunk_bytes: int
    range_offset: int = 0  # WORKER: the run of bytes of a chunk that this rank owns
    range_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What a process says of itself."""

    role: Role
    hash_seed: str = ""  # the literal PYTHONHASHSEED; unused by ADMIN
    group: str = ""
    rank: int = 0
    world_size: int = 1
    kinds: Sequence[Kind] = ()  # CLIENT: one; WORKER: in the same order in every rank


@dataclass(frozen=True, slots=True)
class KindState:
    namespace_id: bytes
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class GroupState:
    complete: bool
    kinds: tuple[KindState, ...]  # none until a process has brought them
    refused: str

    @classmethod
    def of(cls, state: store_pb2.GroupState) -> "GroupState":
        kinds = tuple(KindState(kind.namespace_id, kind.chunk_bytes) for kind in state.kinds)
        return cls(state.complete, kinds, state.refused)


class Session:
    """One attached process. Made by `attach`; thread-safe; not for a forked child."""

    def __init__(
        self, sock: socket.socket, channel: grpc.Channel, reply: store_pb2.AttachReply, token: bytes,
        memory: Memory | None, table: Table | None, arena: Arena | None,
    ) -> None:  # fmt: skip
        self.instance_id: bytes = reply.instance_id
        self.require_cache_salt: bool = reply.require_cache_salt
        self.group_state = GroupState.of(reply.group)
        self.premapping: Premapping | None = None  # of a process that looks up or copies
        self.channel = channel
        self.token = token
        self.metadata = ((TOKEN_METADATA_KEY, token.hex()),)
        self._memory = memory
        self._table = table
        self._arena = arena
        self._sock = sock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lost = False
        self.refusal: KVStoreError | None = None  # why the daemon takes no more messages of this session
        self._closed = False
        self.on_step: Callable[[bytes], None] | None = None  # for answers on arena.sock; on the watcher's thread
        self._when_lost: list[Callable[[], None]] = []
        self._before_unmap: list[Callable[[], None]] = []
        self._wake_receive, self._wake_send = os.pipe2(os.O_CLOEXEC)
        _sessions_of_this_process.add(self)
        self._watcher = threading.Thread(target=self._watch, name="kvstore-watcher", daemon=True)
        self._watcher.start()

    @classmethod
    def attach(
        cls,
        endpoint: str,
        attachment: Attachment,
        *,
        timeout_s: float = 5.0,
        on_lost: Callable[[], None] | None = None,
    ) -> "Session":
        """Connect, be checked, and map the memory.

        Unavailable (NotAllowed), SeedMismatch, NamespaceMismatch, LimitExceeded, ConfigurationError (the endpoint, or a
        daemon of another version).
        `timeout_s` bounds the whole call. `on_lost` is called once, from the watcher's thread, when the daemon hangs
        up.
        """
        deadline_s = time.monotonic() + timeout_s
        request = _attach_request(attachment)
        grpc_path, arena_path = endpoint_paths(endpoint)
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(timeout_s)
            try:
                _connect(sock, os.fspath(arena_path), deadline_s)
                sock.settimeout(_left_s(deadline_s))
                hello = _expect(sock, Hello)[0]
                assert isinstance(hello, Hello)
                channel = grpc.insecure_channel(grpc_target(grpc_path), options=_CHANNEL_OPTIONS)
                undo.callback(channel.close)
                metadata = ((TOKEN_METADATA_KEY, hello.token.hex()),)
                reply = store_pb2_grpc.SessionsStub(channel).Attach(
                    request, metadata=metadata, timeout=_left_s(deadline_s)
                )
                memory: Memory | None = None
                table: Table | None = None
                arena: Arena | None = None
                if attachment.role is not Role.ADMIN:
                    sock.settimeout(_left_s(deadline_s))
                    memory, table, arena = _map(sock, undo)
            except grpc.RpcError as error:
                raise error_of(error, endpoint) from None
            except PermissionError as error:
                raise NotAllowed(
                    f"{arena_path} does not open for uid {os.geteuid()} ({error.strerror}); run as the daemon's user, "
                    "or start the daemon with --allow-uid"
                ) from None
            except TimeoutError:
                raise Unavailable(
                    f"the daemon at {endpoint} did not answer within {timeout_s:g} s: it is stopped, or hangs; see its "
                    "log"
                ) from None
            except OSError as error:
                if isinstance(error, FileNotFoundError) and grpc_path.exists():
                    raise Unavailable(
                        f"{grpc_path} is there and {arena_path} is not: a daemon is starting or stopping, or the file "
                        "was removed, or is not mounted here; if it stays so, restart the daemon"
                    ) from None
                raise Unavailable(
                    f"no daemon answers at {endpoint} ({error.strerror or error}); start one with `kvstore serve`"
                ) from None
            if table is not None and table.instance_id != reply.instance_id:
                raise Unavailable(f"the memory at {endpoint} is of another daemon than the answer: attach again")
            sock.settimeout(None)
            session = cls(sock, channel, reply, hello.token, memory, table, arena)
            undo.pop_all()
        if attachment.role is not Role.ADMIN:
            session.premapping = Premapping(
                session.table,
                session.arena,
                looks_up=attachment.role is not Role.WORKER,
                copies=attachment.role is not Role.SCHEDULER,
            )
            session.before_unmap(session.premapping.close)
        if on_lost is not None:
            session.when_lost(on_lost)
        return session

    @property
    def namespace_id(self) -> bytes:
        """Of a client, as of attach."""
        (kind,) = self.group_state.kinds
        return kind.namespace_id

    @property
    def table(self) -> Table:
        self.require_own_process()
        assert self._table is not None, "an admin session maps nothing"
        return self._table

    @property
    def arena(self) -> Arena:
        self.require_own_process()
        assert self._arena is not None, "an admin session maps nothing"
        return self._arena

    @property
    def lost(self) -> bool:
        """The daemon has gone, or takes no more messages (`refusal`)."""
        return self._lost

    def give_up(self, refusal: KVStoreError) -> None:
        """The daemon refused what this process said: whoever keeps it attached is to close this, and attach again."""
        self.refusal = refusal
        self._lose()

    def tenant_id(self, salt: str | None) -> bytes:
        """16 bytes. ValueError for an empty salt."""
        assert self._memory is not None, "an admin session has no tenant key"
        return tenant_id(self._memory.tenant_key, salt)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Called once, also when the session is lost already (then at once, on this thread)."""
        with self._lock:
            if not self._lost:
                self._when_lost.append(callback)
                return
        callback()

    def before_unmap(self, callback: Callable[[], None]) -> None:
        """What must have ended before the memory goes: streams, copies. Called by `close`, last added first."""
        self._before_unmap.append(callback)

    def require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise KVStoreError(
                f"this session was attached by process {self._pid} and used by its forked child {os.getpid()}; attach "
                "again in the child"
            )

    def close(self) -> None:
        """End streams and copies, unmap, then say goodbye: the daemon sees the end only after the last copy."""
        if os.getpid() != self._pid:
            return  # the parent's to close; the child's copy of the socket is closed already
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for callback in reversed(self._before_unmap):
            callback()
        os.write(self._wake_send, b".")
        if threading.current_thread() is not self._watcher:
            self._watcher.join(WATCHER_JOIN_S)
        if self._table is not None:
            self._table.close()
        if self._arena is not None:
            self._arena.close()
        self.channel.close()
        with contextlib.suppress(OSError):  # the daemon has gone, or has hung up
            self._sock.send(GOODBYE, socket.MSG_DONTWAIT)
        self._sock.close()
        os.close(self._wake_send)
        os.close(self._wake_receive)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_step(self, message: bytes) -> bool:
        """Give the daemon a step message on arena.sock; the answer, if there is one, comes to `on_step`. Never waits.
        False: the message is too large, or the socket is full or gone."""
        packet = STEP + message
        if len(packet) > STEP_PACKET_BYTES_MAX:
            return False
        try:
            self._sock.send(packet, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLHUP)
        poll.register(self._wake_receive, select.POLLIN)
        while True:
            events = poll.poll()
            if all(fd == self._wake_receive for fd, _ in events):
                return
            try:
                packet = self._sock.recv(STEP_PACKET_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                break
            if not packet.startswith(STEP) or self.on_step is None:
                break
            self.on_step(packet[len(STEP) :])
        self._lose()

    def _lose(self) -> None:
        with self._lock:
            self._lost = True
            callbacks, self._when_lost = self._when_lost, []
        for callback in callbacks:
            callback()

    def _after_fork_in_child(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.enable_http_proxy", 0),
)

_sessions_of_this_process: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _close_sockets_in_child() -> None:
    for session in list(_sessions_of_this_process):
        session._after_fork_in_child()


os.register_at_fork(after_in_child=_close_sockets_in_child)


def _attach_request(attachment: Attachment) -> store_pb2.AttachRequest:
    request = store_pb2.AttachRequest(
        role=attachment.role.value,
        group=attachment.group,
        rank=attachment.rank,
        world_size=attachment.world_size,
    )
    if attachment.role is Role.ADMIN:
        return request
    if problem := seed_problem(attachment.hash_seed):
        raise KVStoreError(problem)
    request.seed_fingerprint = seed_fingerprint(attachment.hash_seed)
    request.seed_shown = attachment.hash_seed
    for kind in attachment.kinds:
        added = {"chunk_bytes": kind.chunk_bytes, "seed_fingerprint": request.seed_fingerprint.hex()}
        for field, value in added.items():
            if kind.namespace.get(field, value) != value:
                raise NamespaceMismatch(
                    f"the namespace says {field} {kind.namespace[field]!r}, and the session {value!r}; leave the "
                    "field out, the session adds it"
                )
        try:
            document = canonical_json({**kind.namespace, **added})
        except TypeError as error:
            raise ConfigurationError(f"the namespace: {error}") from None
        request.kinds.add(
            namespace_document=document,
            chunk_bytes=kind.chunk_bytes,
            range_offset=kind.range_offset,
            range_bytes=kind.range_bytes,
        )
    return request


def _left_s(deadline_s: float) -> float:
    """Never 0, which a socket takes for "do not wait at all"."""
    return max(0.001, deadline_s - time.monotonic())


def _connect(sock: socket.socket, path: str, deadline_s: float) -> None:
    """OSError, Unavailable. A listener whose queue is full answers EAGAIN at once, whatever the time-out."""
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise Unavailable(f"too many processes are connecting to {path} at once; try again") from None
            time.sleep(QUEUE_FULL_POLL_S)


def _expect(sock: socket.socket, kind: type[Packet]) -> tuple[Packet, list[int]]:
    """The next packet and its descriptors. Unavailable, NotAllowed, ProtocolError, ConfigurationError (its version)."""
    packet, fds, flags, _ = socket.recv_fds(sock, PACKET_BYTES_MAX, FDS_PER_PACKET, socket.MSG_CMSG_CLOEXEC)
    try:
        if packet == b"":
            raise Unavailable("the daemon hung up on arena.sock")
        try:
            found = decode(packet)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if isinstance(found, Refusal):
            raise NotAllowed(found.reason)
        if not isinstance(found, kind) or flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"expected {kind.__name__} on arena.sock and got {found!r}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return found, fds


def _map(sock: socket.socket, undo: contextlib.ExitStack) -> tuple[Memory, Table, Arena]:
    memory, fds = _expect(sock, Memory)
    try:
        if len(fds) != FDS_PER_PACKET:
            raise ProtocolError(f"{len(fds)} descriptors came with the memory, not {FDS_PER_PACKET}")
        assert isinstance(memory, Memory)
        arena_fd, table_fd = fds
        table = Table(table_fd, memory.index_key)
        undo.callback(table.close)
        arena = Arena(arena_fd, memory.arena_bytes)
        undo.callback(arena.close)
    finally:
        for fd in fds:  # the maps stay
            os.close(fd)
    return memory, table, arena
