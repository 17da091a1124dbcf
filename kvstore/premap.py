"""Puts the shared memory's pages into this process's page tables ahead of use.

The daemon's pre-faulting gives arena and table their memory, but each process that maps them still faults for the pages
that it touches first: a copy of 128 MiB into slots that this process had not touched took 130 ms, and 20 ms afterwards;
a lookup of 256 keys in a table of 653 MiB (8 million entries) took 1,000 us for as long as 10,000 lookups had touched
too little of it, and 120 us with all of it mapped, which takes 76 ms. So one background thread runs over what the
process is going to touch: the table where it looks chunks up, and the arena where it copies, as far as the daemon says
that it is ready, until all of it is. It changes no byte, and never runs ahead of the daemon, whose business it is to
decide when memory is taken. If the daemon dies the thread goes on to the end of what was ready and stops with the
session.
"""

import threading

from kvstore._native import Arena, Table, populate
from kvstore.background import BackgroundThread

PIECE_BYTES = 16 << 20  # a few milliseconds: how long `close` may have to wait
POLL_S = 0.2  # for the daemon's progress


class Premapping(BackgroundThread):
    """Runs until everything is mapped or `close`. The maps must outlive it."""

    def __init__(self, table: Table, arena: Arena, *, looks_up: bool, copies: bool) -> None:
        self._table = table
        self._arena = arena
        self._looks_up = looks_up
        self._copies = copies
        super().__init__("kvstore-premap", self._run)

    def _run(self, closing: threading.Event) -> None:
        try:
            if self._looks_up:
                self._map_table(closing)
            if self._copies:
                self._map_arena(closing)
        except OSError:  # no memory for page tables: what is touched will fault, as it would have without this
            return

    def _map_table(self, closing: threading.Event) -> None:
        mapped = 0
        while not closing.is_set() and (piece := self._table.premap(mapped, PIECE_BYTES)):
            mapped += piece

    def _map_arena(self, closing: threading.Event) -> None:
        mapped = 0
        while mapped < self._arena.nbytes and not closing.is_set():
            piece = min(self._table.ready_bytes - mapped, PIECE_BYTES)
            if piece <= 0:
                closing.wait(POLL_S)
                continue
            populate(self._arena.address + mapped, piece)
            mapped += piece
