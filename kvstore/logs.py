"""The daemon's log: a fault that comes back thousands of times is told of now and then, with how often."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LINES_MAX = 10  # warnings and worse, from one place in the code,
INTERVAL_S = 10.0  # in so long
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(slots=True)
class _Place:
    began_s: float
    lines: int = 0
    left_out: int = 0


class LineLimit(logging.Filter):
    """Of a handler. The next line that passes says how many of its place did not; figures (`kvstore stats`) count all.

    Any thread may log. A place is a line of code, so there are no more than the code has.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], _Place] = {}  # under the lock

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now_s = self._clock()
        with self._lock:
            place = self._places.setdefault((record.pathname, record.lineno), _Place(now_s))
            left_out = 0
            if now_s - place.began_s >= INTERVAL_S:
                left_out = place.left_out
                place.began_s, place.lines, place.left_out = now_s, 0, 0
            if place.lines >= LINES_MAX:
                place.left_out += 1
                return False
            place.lines += 1
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like this since the last line, left out)"
        return True


def begin_logging() -> None:
    """To stderr, from INFO on."""
    handler = logging.StreamHandler()
    handler.addFilter(LineLimit())
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=_FORMAT)
