"""Puts the arena's pages into this process's page tables ahead of use.

The daemon's pre-faulting gives the arena its memory, but each process that maps it still faults once for every page it
touches first: a copy of 128 MiB into slots that this process had not touched took 130 ms, and 20 ms afterwards. So
every process that copies runs one background thread over the part that the daemon says is ready, until all of it is.
It changes no byte, and never runs ahead of the daemon, whose business it is to decide when memory is taken. If the
daemon dies the thread goes on to the end of what was ready and stops with the session.
"""

import threading

from kvstore._native import Arena, Table, populate
from kvstore.background import BackgroundThread

PIECE_BYTES = 16 << 20  # a few milliseconds: how long `close` may have to wait
POLL_S = 0.2  # for the daemon's progress


class Premapping(BackgroundThread):
    """Runs until everything is mapped or `close`. The maps must outlive it."""

    def __init__(self, table: Table, arena: Arena) -> None:
        self._table = table
        self._arena = arena
        super().__init__("kvstore-premap", self._run)

    def _run(self, closing: threading.Event) -> None:
        mapped = 0
        while mapped < self._arena.nbytes and not closing.is_set():
            piece = min(self._table.ready_bytes - mapped, PIECE_BYTES)
            if piece <= 0:
                closing.wait(POLL_S)
                continue
            try:
                populate(self._arena.address + mapped, piece)
            except OSError:  # no memory for page tables: the copies will fault, as they would have without this
                return
            mapped += piece
