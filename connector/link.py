"""One half's attachment to the daemon, kept up by a background thread.

The engine's thread reads `current` and never waits: either there is an attachment or the store is left out. The
background thread alone replaces it: it attaches, waits until the session is lost, takes the attachment away, lets the
half end what still uses it, and tries again; where the daemon refused a message, later each time, for it may refuse
the same again. Not so where a session went well for a while, and never longer than that daemon lives: another one binds
a socket of its own, which is looked for all the while. `lock` orders the two threads where reading is not enough:
whoever holds it knows that `current` stays what it is, and the thread holds it only to swap the reference, never during
I/O.

When the daemon dies, the session's watcher sets `_wake`. When this process dies, the kernel closes the session's
socket and the daemon ends the group. Create a link in the process that uses it: threads do not survive a fork.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvstore.config import endpoint_paths
from kvstore.errors import KVStoreError, Unavailable
from kvstore.session import Attachment, Session

logger = logging.getLogger("vllm.connector.link")  # below "vllm", so that the engine's own log shows it

START_TIMEOUT_S = 2.0  # how long an engine's start may wait for a daemon that does not answer
ATTACH_TIMEOUT_S = 3.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
REFUSED_PAUSE_S_MIN, REFUSED_PAUSE_S_MAX = 1.0, 60.0  # before attaching again to a daemon that refused a message
WENT_WELL_S = REFUSED_PAUSE_S_MAX  # a session that lasted so long: the next such pause is the shortest one
LOOK_S = 0.5  # how often another daemon is looked for meanwhile
RECONNECT_S_MAX = 5.0  # after a daemon's return: an attempt that asks the old one still, the pause after it, and some
assert ATTACH_TIMEOUT_S + max(BACKOFF_MAX_S, LOOK_S) < RECONNECT_S_MAX
CLOSE_TIMEOUT_S = ATTACH_TIMEOUT_S + 1.0

Attached = TypeVar("Attached")
Socket = tuple[int, int, int]  # device, inode, and when it was made in ns: a file system gives an inode away again


class Attach(Protocol):
    def __call__(
        self,
        endpoint: str,
        attachment: Attachment,
        *,
        timeout_s: float,
        on_lost: Callable[[], None] | None,
    ) -> Session: ...


class Link(Generic[Attached]):
    """Keeps `current` attached. `on_attached` makes it from a new session; `on_detached` ends every use of it before
    the session is closed. Both run on the background thread (the first one on `start`'s caller)."""

    def __init__(
        self,
        endpoint: str,
        attachment: Attachment,
        *,
        on_attached: Callable[[Session], Attached],
        on_detached: Callable[[Attached], None],
        attach: Attach = Session.attach,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """`wait`: for an event, so many seconds at the most."""
        self.lock = threading.Lock()
        self.current: Attached | None = None  # written under `lock`
        self._endpoint = endpoint
        self._attachment = attachment
        self._on_attached = on_attached
        self._on_detached = on_detached
        self._attach = attach
        self._clock = clock
        self._wait = wait
        self._socket: Socket | None = None  # at `endpoint`, before the last attempt; None: there was none
        self._attached_s = 0.0  # when, by the clock
        self._session: Session | None = None  # of `current`; the background thread's own after `start`
        self._closing = False
        self._wake = threading.Event()
        self._complaint = ""  # the refusal said last, so that it is said once
        self._thread = threading.Thread(target=self._keep, name="kvstore-link", daemon=True)

    def start(self) -> None:
        """Attach now if a daemon answers. Any refusal (another seed, another namespace, a limit) is raised: an engine
        that can never share must not start. Without a daemon the engine starts and the thread goes on trying."""
        try:
            self._open(START_TIMEOUT_S)
            logger.info("kvstore: attached to the daemon at %s", self._endpoint)
        except Unavailable as problem:
            logger.warning(
                "kvstore: no daemon at %s (%s); serving without the store until one answers there. Start it with "
                "`kvstore serve`, or set endpoint in kv_connector_extra_config",
                self._endpoint,
                problem,
            )
        self._thread.start()

    def close(self) -> None:
        """End the attachment, after everything that uses it."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _keep(self) -> None:
        backoff_s, refused_pause_s = BACKOFF_MIN_S, REFUSED_PAUSE_S_MIN
        while not self._closing:
            if self._session is not None:
                self._wake.wait()
                self._wake.clear()
                if not self._session.lost or self._closing:
                    continue
                if (refusal := self._session.refusal) is None:
                    logger.warning("kvstore: lost the daemon at %s; serving without the store", self._endpoint)
                    self._shut()
                    refused_pause_s = REFUSED_PAUSE_S_MIN
                else:
                    if self._clock() - self._attached_s >= WENT_WELL_S:
                        refused_pause_s = REFUSED_PAUSE_S_MIN
                    logger.error(
                        "kvstore: the daemon at %s refused a message of this engine (%s); serving without the store, "
                        "and attaching again in %.0f s, or when there is another daemon. Its log may say more",
                        self._endpoint,
                        refusal,
                        refused_pause_s,
                    )
                    self._shut()
                    same = self._pause_while_same_daemon(refused_pause_s)
                    refused_pause_s = min(2 * refused_pause_s, REFUSED_PAUSE_S_MAX) if same else REFUSED_PAUSE_S_MIN
                continue
            try:
                self._open(ATTACH_TIMEOUT_S)
            except Unavailable:
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, BACKOFF_MAX_S)
            except KVStoreError as refusal:
                self._complain(f"kvstore: the daemon at {self._endpoint} refused this engine: {refusal}")
                pause_s = BACKOFF_MAX_S
            except Exception:  # a border: nobody else would ever hear of it
                logger.exception("kvstore: attaching to %s failed; trying again", self._endpoint)
                pause_s = BACKOFF_MAX_S
            else:
                logger.info("kvstore: attached to the daemon at %s", self._endpoint)
                backoff_s, self._complaint = BACKOFF_MIN_S, ""
                continue
            self._pause(pause_s)
        self._shut()

    def _pause(self, pause_s: float) -> None:
        self._wake.clear()
        if not self._closing:
            self._wait(self._wake, pause_s)

    def _pause_while_same_daemon(self, pause_s: float) -> bool:
        """False: it is another one now, or none. Its socket tells, for the session with it has ended."""
        until_s = self._clock() + pause_s
        while not self._closing and (left_s := until_s - self._clock()) > 0:
            self._pause(min(left_s, LOOK_S))
            if _socket_at(self._endpoint) != self._socket:
                return False
        return True

    def _open(self, timeout_s: float) -> None:
        self._socket = _socket_at(self._endpoint)  # before: of a daemon that comes in between, the next look tells
        session = self._attach(self._endpoint, self._attachment, timeout_s=timeout_s, on_lost=self._wake.set)
        self._attached_s = self._clock()
        try:
            current = self._on_attached(session)
        except BaseException:
            session.close()
            raise
        self._session = session
        with self.lock:
            self.current = current

    def _shut(self) -> None:
        session, self._session = self._session, None
        with self.lock:
            current, self.current = self.current, None
        try:
            if current is not None:
                self._on_detached(current)
        except Exception:  # a border, as above; the session must be closed all the same
            logger.exception("kvstore: ending the use of a lost daemon's memory failed")
        try:
            if session is not None:
                session.close()
        except Exception:  # a border: without this thread the engine would never find the next daemon
            logger.exception("kvstore: a lost daemon's memory stays mapped until this process ends")

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            logger.error("%s. Serving without the store", complaint)


def _socket_at(endpoint: str) -> Socket | None:
    _, arena_path = endpoint_paths(endpoint)
    try:
        found = os.stat(arena_path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
