"""A slow disk, for tests: reads from the fs tier end no sooner than a disk of a given rate would end them.

The rate, in bytes a second, is what a file holds when the read ends (KVSTORE_TEST_FS_READ_RATE names it; empty or
missing: as fast as it is), so a test can change it while the daemon runs. Not for production: the file is read on the
event loop. Without the variable nothing of this is in the way.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

VARIABLE = "KVSTORE_TEST_FS_READ_RATE"


class Throttle:
    """One link, first in first out. Belongs to the event loop."""

    def __init__(self, rate_file: Path) -> None:
        self._rate_file = rate_file
        self._free_s = 0.0

    def after(self, nbytes: int, act: Callable[[], None]) -> None:
        """Call `act` when so many bytes would have come."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        rate = self._bytes_per_s()
        if rate is None:
            self._free_s = now_s
            act()
            return
        self._free_s = max(now_s, self._free_s) + nbytes / rate
        loop.call_at(self._free_s, act)

    def _bytes_per_s(self) -> float | None:
        try:
            text = self._rate_file.read_text().strip()
        except OSError:
            return None
        return float(text) if text else None
