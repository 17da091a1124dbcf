"""The connector, with a clock: how long cores work for its calls, vLLM's part of them included.

vLLM loads it by module path into the engine's processes; each keeps its sum, in seconds, in a file named after it.
"""

import functools
import inspect
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector import KVStoreConnector

FOLDER_VARIABLE = "KVSTORE_BENCH_CALLS"


class TimedConnector(KVStoreConnector):
    pass


class _Clock:
    """vLLM calls a connector from one thread in each process. A call within a call is part of that one."""

    def __init__(self) -> None:
        self._inside = False
        self._seconds = 0.0
        self._pid = 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return call(*arguments, **named)
            self._inside = True
            began_s = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._inside = False
                self._add(time.thread_time() - began_s)

        return timed

    def _add(self, seconds: float) -> None:
        if self._pid != os.getpid():  # a process may be forked with this module in it
            self._pid, self._seconds = os.getpid(), 0.0
            path = Path(os.environ[FOLDER_VARIABLE]) / str(self._pid)
            path.write_bytes(struct.pack("d", 0.0))
            with path.open("r+b") as file:
                self._file = mmap.mmap(file.fileno(), 0)
        self._seconds += seconds
        struct.pack_into("d", self._file, 0, self._seconds)


def in_calls_s(folder: Path) -> float:
    """Of all processes together."""
    seconds: list[float] = [struct.unpack("d", path.read_bytes())[0] for path in folder.iterdir()]
    return sum(seconds)


_clock = _Clock()
for _name, _call in inspect.getmembers_static(TimedConnector, inspect.isfunction):
    if not _name.startswith("_"):
        setattr(TimedConnector, _name, _clock.timed(_call))
