"""The daemon's end of arena.sock: who connects, the token, the memory, and finding out that a process has gone.

Concurrency: everything runs on the event loop's thread; every socket call is non-blocking, and the few bytes sent fit
any socket buffer, so a peer that does not read is hung up on rather than waited for (or gets no answer, to a message
that it can send on its stream).

A connection ends in two steps that may come in either order. The hang-up (end of file) says that no process holds the
other end; a forked child may hold it for ever, and the driver of a killed process may still be copying when it comes.
The pidfd says that the process itself has ended, copies included: only that frees a slot it may have written to. Where
no pidfd can be had (old kernel, foreign pid namespace), the hang-up starts a rest of 60 s instead, and the log says so.
A process that closes its session by itself says goodbye first, which is both steps at once.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import LimitExceeded
from kvstore.limits import ATTACH_WITHIN_MS, REST_WITHOUT_PIDFD_MS, SESSIONS_MAX
from kvstore.rpc.handover import GOODBYE, STEP, STEP_PACKET_BYTES_MAX, Hello, Memory, Refusal
from kvstore.rpc.v1 import store_pb2
from kvstore.store import Session, Store

SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
BACKLOG = SESSIONS_MAX  # connections that wait to be accepted; the kernel may keep fewer
OVERFLOW_UID = 65534  # how every uid that this user namespace does not know is shown

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

_log = logging.getLogger(__name__)


class Connection:
    """One accepted connection: the socket while it is open, the pidfd while the process matters."""

    def __init__(self, sock: socket.socket, pidfd: int | None, session: Session, since_s: float) -> None:
        self.sock: socket.socket | None = sock
        self.pidfd = pidfd
        self.session = session
        self.since_s = since_s  # by the loop's clock
        self.rest: asyncio.TimerHandle | None = None


class ArenaSocket:
    """Listens, and owns every connection. `memory` is what an attached process gets with the descriptors."""

    def __init__(
        self,
        store: Store,
        *,
        memory: Memory,
        fds: tuple[int, int],
        allow_uids: frozenset[int],
        rest_ms: int = REST_WITHOUT_PIDFD_MS,
        attach_within_ms: int = ATTACH_WITHIN_MS,
        pidfd_of: Callable[[socket.socket, int], int | None] | None = None,
    ) -> None:
        self._store = store
        self._memory = memory
        self._fds = fds
        self._allowed = (allow_uids | {os.geteuid(), 0}) - {OVERFLOW_UID}
        self._attach_within_s = attach_within_ms / 1000
        self._rest_s = rest_ms / 1000
        self._pidfd_of = pidfd_of or peer_pidfd
        self._connections: dict[Session, Connection] = {}
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def listen(self, path: Path) -> None:
        """OSError. The caller has made sure that nothing of value is at `path`, and set the umask."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def hand_over(self, session: Session) -> bool:
        """Send the memory to an attached process. False when its connection cannot take it (any more)."""
        connection = self._connections.get(session)
        if connection is None or connection.sock is None:
            return False
        try:
            socket.send_fds(connection.sock, [self._memory.encode()], list(self._fds))
        except OSError as error:
            _log.warning("pid %d did not take the arena: %s", session.pid, error)
            self._hang_up(connection)
            return False
        return True

    def sweep(self) -> None:
        """Close the pidfds of processes that no longer matter, and hang up on those that connected and never attached.
        Called once in a while."""
        latest_s = self._loop.time() - self._attach_within_s
        for connection in list(self._connections.values()):
            if self._only_occupies(connection) and connection.since_s <= latest_s:
                _log.warning("pid %d connected to arena.sock and has not attached since", connection.session.pid)
                self._hang_up(connection)
            elif connection.sock is None and not self._store.watched(connection.session):
                self._forget(connection)

    def close(self) -> None:
        """Hang up on everybody: attached processes see the end of the daemon here first."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections.values()):
            self._hang_up(connection)
            self._forget(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: the peer waits in the backlog, and the loop must not spin
            _log.error("arena.sock cannot accept: %s; trying again in a second", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1.0, self._accept_again)
            return
        sock.setblocking(False)
        pid, uid, _ = _PEER_CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        if uid not in self._allowed:
            _log.warning("refused pid %d of uid %d", pid, uid)
            _refuse(
                sock,
                f"uid {uid} may not attach to this daemon, which runs as uid {os.geteuid()}; start the daemon with "
                f"--allow-uid {uid} --socket-mode 0660 if that user may read and write every chunk"
                if uid != OVERFLOW_UID
                else f"your uid is shown as {uid}, which stands for every user the daemon's user namespace does not "
                "know, so it proves nothing; map your uid into the daemon's namespace",
            )
            return
        session = self._place_for(sock, pid, uid)
        if session is None:
            return
        try:
            pidfd = self._pidfd_of(sock, pid)
        except ProcessLookupError:  # gone already
            self._store.hang_up(session)
            sock.close()
            return
        except OSError as error:  # a rest by the clock is for kernels without pidfds, not for a daemon without room
            self._store.hang_up(session)
            _log.error("pid %d cannot be watched: %s; it is refused", pid, error)
            _refuse(sock, f"the daemon cannot watch another process ({error.strerror}); try again later")
            return
        if pidfd is None:
            _log.warning(
                "no pidfd can be had for pid %d: slots it was granted and has not committed rest for %.0f s after it "
                "hangs up", pid, self._rest_s,
            )  # fmt: skip
        connection = self._connections[session] = Connection(sock, pidfd, session, self._loop.time())
        self._loop.add_reader(sock, self._readable, connection)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._process_ended, connection)
        try:
            sock.send(Hello(session.token).encode())
        except OSError:
            self._hang_up(connection)

    def _place_for(self, sock: socket.socket, pid: int, uid: int) -> Session | None:
        """Where all are taken, that of whoever has held one longest without attaching. None: the process is refused."""
        try:
            return self._store.connect(pid=pid, uid=uid)
        except LimitExceeded as error:
            unattached = [each for each in self._connections.values() if self._only_occupies(each)]
            if not unattached:
                _refuse(sock, str(error))
                return None
            self._hang_up(min(unattached, key=lambda each: each.since_s))
            return self._store.connect(pid=pid, uid=uid)

    @staticmethod
    def _only_occupies(connection: Connection) -> bool:
        return connection.sock is not None and connection.session.role == store_pb2.ROLE_UNSPECIFIED

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _readable(self, connection: Connection) -> None:
        """A step message, a goodbye or the end of the connection; whatever else comes, the connection is over, too."""
        assert connection.sock is not None
        try:
            packet = connection.sock.recv(STEP_PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet.startswith(STEP):
            self._step(connection, packet[len(STEP) :])
            return
        if packet == GOODBYE:
            self._process_ended(connection)  # as good as: it writes to no slot any more
            return
        if packet:
            _log.warning("pid %d sent something on arena.sock, that is no goodbye", connection.session.pid)
        self._hang_up(connection)

    def _step(self, connection: Connection, message: bytes) -> None:
        """Without an answer the process sends the message on its stream, and hears there what is wrong."""
        assert connection.sock is not None
        now_ms = int(self._loop.time() * 1000)  # CLOCK_MONOTONIC, as of all deadlines
        reply = self._store.step_if_next(connection.session, message, now_ms)
        if reply is not None:
            with contextlib.suppress(OSError):
                connection.sock.send(STEP + reply.SerializeToString())

    def _hang_up(self, connection: Connection) -> None:
        if connection.sock is None:
            return
        self._loop.remove_reader(connection.sock)
        connection.sock.close()
        connection.sock = None
        self._store.hang_up(connection.session)
        if not self._store.watched(connection.session):
            self._forget(connection)
        elif connection.pidfd is None:
            connection.rest = self._loop.call_later(self._rest_s, self._process_ended, connection)

    def _process_ended(self, connection: Connection) -> None:
        self._hang_up(connection)
        self._store.process_ended(connection.session)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.session, None)
        if connection.rest is not None:
            connection.rest.cancel()
        if connection.pidfd is not None:
            self._loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None


def peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    """A pidfd of the process that connected; None where there is no way to one.

    ProcessLookupError: it has ended. OSError: there is a way, and no descriptor left for it.

    `SO_PEERPIDFD` cannot name another process. `pidfd_open` could, if the peer died and its number was taken between
    the two calls; that only delays the slots of a dead process until the other one ends.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if isinstance(error, ProcessLookupError) or error.errno in _NO_DESCRIPTOR:
            raise
    if pid <= 0:  # in a pid namespace that this one cannot see
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if isinstance(error, ProcessLookupError) or error.errno in _NO_DESCRIPTOR:
            raise
        return None


def _refuse(sock: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        sock.send(Refusal(reason).encode())
    sock.close()
