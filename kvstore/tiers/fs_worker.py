"""One thread for what may block: fallocate, fsync, unlink, LMDB. Jobs run in the order they were given.

The event loop gives jobs and gets their results back by `call_soon_threadsafe`. A job that never returns (a hung disk)
holds up the later ones and nothing else: the thread is a daemon thread, and `close` waits for it only so long.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
Failure = OSError | KVStoreError
_Job = Callable[[], Callable[[], None]]  # runs in the thread; what it returns runs on the loop


def said(error: Failure) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class Worker:
    """`after_each` is called on the loop after every job's `then`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, after_each: Callable[[], None]) -> None:
        self.outstanding = 0  # jobs whose `then` has not run yet
        self._loop = loop
        self._after_each = after_each
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T], then: Callable[[T | Failure], None]) -> None:
        """`then` gets the job's result, or the failure that it raised."""

        def report(result: T | Failure) -> None:
            self.outstanding -= 1
            then(result)
            self._after_each()

        def work() -> Callable[[], None]:
            try:
                result: T | Failure = job()
            except (OSError, KVStoreError) as error:
                result = error
            return lambda: report(result)

        self.outstanding += 1
        self._jobs.put(work)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                report = job()
            except BaseException:
                # A bug. The tier waits for a result that will not come, so its writes run into their deadlines.
                log.exception("the fs tier's worker failed")
                continue
            try:
                self._loop.call_soon_threadsafe(report)
            except RuntimeError:
                return  # the loop is closed: nobody is left to be told

    def close(self, timeout_s: float) -> bool:
        """False when a job was still running at the end of the time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
