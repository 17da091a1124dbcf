"""Has the driver page-lock the arena in the background, so that copies run at the link's speed.

One thread for each arena that is mapped; which piece is next is the copier's choice (native/cuda/pinning.h). Copies do
not wait for the whole: each goes through as soon as its own piece is locked, and the slower way after a refusal, which
is said once, with what to change. If the thread ends, for whatever reason, the rest of the arena is copied the slower
way. It keeps to the processors next to the device, for what the driver writes down about each page is made where the
thread runs.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from kvstore._native import Arena, DeviceCopier
from kvstore.background import BackgroundThread
from kvstore.numa import parse_list

logger = logging.getLogger("vllm.connector.pinning")

POLL_S = 0.05  # for the daemon's progress
REPORT_S = 10.0
NODES = Path("/sys/devices/system/node")


class Pinning(BackgroundThread):
    """Runs until everything is page-locked, the driver refuses, or `close`. The maps must outlive it."""

    def __init__(self, copier: DeviceCopier, arena: Arena) -> None:
        self._copier = copier
        self._address, self._nbytes = arena.address, arena.nbytes
        super().__init__("kvstore-pin", self._run)

    def _run(self, closing: threading.Event) -> None:
        try:
            _stay_near(self._copier.numa_node)
            self._pin(closing)
        except Exception:  # a border: nobody else would ever hear of it
            logger.exception("kvstore: page-locking the arena failed; copies of the rest are slower")
        finally:
            self._copier.stop_pinning(self._address)

    def _pin(self, closing: threading.Event) -> None:
        began_s = reported_s = time.monotonic()
        while not closing.is_set():
            outcome = self._copier.pin_next(self._address)
            now_s = time.monotonic()
            if outcome == "all":
                logger.info("kvstore: page-locked the arena, %s, in %.1f s", _gib(self._nbytes), now_s - began_s)
                return
            if outcome == "stopped":
                self._complain()
                return
            if now_s - reported_s > REPORT_S:
                reported_s = now_s
                logger.info("kvstore: page-locked %s of the arena's %s", self._pinned(), _gib(self._nbytes))
            if outcome == "nothing":
                closing.wait(POLL_S)

    def _complain(self) -> None:
        logger.warning(
            "kvstore: the driver page-locks no more than %s of the arena's %s (%s); the rest is copied through the "
            "driver's own buffers, which is several times slower. To change that, raise the limit on locked memory "
            "(ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container) and "
            "the memory limit of the engine's cgroup, or give the daemon a smaller --cpu-bytes; then start the engine "
            "again",
            self._pinned(),
            _gib(self._nbytes),
            self._copier.refusal(self._address),
        )

    def _pinned(self) -> str:
        return _gib(self._copier.pinned_bytes(self._address))


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


def _stay_near(node: int) -> None:
    """This thread, on the processors of a NUMA node, as far as the process may use them."""
    with contextlib.suppress(OSError, ValueError):
        cpus = parse_list((NODES / f"node{node}/cpulist").read_text()) & os.sched_getaffinity(0)
        if cpus:
            os.sched_setaffinity(0, cpus)
