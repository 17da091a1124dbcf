"""What the processes of this folder store, and where they say how they are doing.

Every chunk's content is a function of its key, and each of its words names key and position: bytes of another key, of
another place or of nobody (poison) are seen for what they are, whoever reads them.

The tally is one small file that all processes map. Each process writes only its own row, the starting process only the
row of orders; a row survives the SIGKILL of the process that wrote it.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 132_000  # not a multiple of 4096, so that every slot has padding
SLOT_BYTES = 135_168
CHAINS, CHUNKS_PER_CHAIN = 60, 16  # 960 chunks, in an arena of some 370 slots
CPU_BYTES = "48MiB"
NAMESPACE = {"model": "made of keys"}
SALT = "salt"
SEED = "0"

_KEY_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two keys share a word
_PLACE_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_PLACES = np.arange(CHUNK_BYTES // 8, dtype=np.uint64) * _PLACE_FACTOR


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(number: int) -> list[int]:
    """The numbers of one chain's chunks, head first."""
    return list(range(number * CHUNKS_PER_CHAIN, (number + 1) * CHUNKS_PER_CHAIN))


def content(number: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _PLACES ^ (np.uint64(number + 1) * _KEY_FACTOR)


class Tally:
    """Rows of counters; see the module's docstring."""

    ROWS = 16
    _COLUMNS = 8
    _ORDERS = 0

    def __init__(self, folder: Path, row: int) -> None:
        self._folder = folder
        self._row = row
        path = folder / "tally"
        if not path.exists():
            path.write_bytes(bytes(8 * self.ROWS * self._COLUMNS))
        self._rows = np.memmap(path, np.uint64, "r+", shape=(self.ROWS, self._COLUMNS))

    # -- orders, by the starting process

    @property
    def paused(self) -> bool:
        return bool(self._rows[self._ORDERS, 0])

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._rows[self._ORDERS, 0] = paused

    # -- a process's own row

    def reset(self, row: int) -> None:
        """For a process that is about to start."""
        self._rows[row] = 0

    def right(self, chunks: int) -> None:
        self._rows[self._row, 0] += np.uint64(chunks)

    def stored(self, chunks: int) -> None:
        self._rows[self._row, 1] += np.uint64(chunks)

    def idle(self, *, idle: bool) -> None:
        self._rows[self._row, 2] = idle

    def wrong(self, what: str) -> None:
        """The one thing that must never happen."""
        fd = os.open(self._folder / "wrong", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, f"{what}\n".encode())
        finally:
            os.close(fd)

    def check(self, number: int, found: NDArray[np.uint64], where: str) -> None:
        """Count the chunk as read rightly, or say what was read in its place."""
        if np.array_equal(found, content(number)):
            self.right(1)
            return
        bad = np.flatnonzero(found != content(number))
        self.wrong(
            f"{where}: {len(bad)} of {len(found)} words of chunk {number} are wrong, the first at {bad[0]}: "
            f"{int(found[bad[0]]):#018x}"
        )

    # -- what the starting process reads

    def read_rightly(self, row: int) -> int:
        return int(self._rows[row, 0])

    def stores(self, row: int) -> int:
        return int(self._rows[row, 1])

    def is_idle(self, row: int) -> bool:
        return bool(self._rows[row, 2])

    def wrongs(self) -> list[str]:
        path = self._folder / "wrong"
        return path.read_text().splitlines() if path.exists() else []
