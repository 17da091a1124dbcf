"""How often the daemon's log tells of the same."""

import logging
from collections.abc import Iterator

import pytest

from kvstore.logs import INTERVAL_S, LINES_MAX, LineLimit


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.now_s = 100.0
        self.addFilter(LineLimit(lambda: self.now_s))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    logger = logging.getLogger("test_logs")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)


def damaged(slots: range) -> None:
    for slot in slots:
        logging.getLogger("test_logs").error("slot %d is damaged", slot)


def test_of_many_lines_from_one_place_a_few_are_written_and_the_next_says_how_many_were_not(lines: Lines) -> None:
    damaged(range(1_000))
    first = [f"slot {slot} is damaged" for slot in range(LINES_MAX)]
    assert lines.lines == first
    lines.now_s += INTERVAL_S
    damaged(range(1_000, 1_002))
    left_out = 1_000 - LINES_MAX
    told = f"slot 1000 is damaged (and {left_out} more like this since the last line, left out)"
    assert lines.lines == [*first, told, "slot 1001 is damaged"]


def test_other_places_and_what_is_no_warning_are_written(lines: Lines) -> None:
    damaged(range(100))
    logging.getLogger("test_logs").warning("refused")
    for number in range(100):
        logging.getLogger("test_logs").info("attached %d", number)
    assert len(lines.lines) == LINES_MAX + 1 + 100


def test_a_traceback_is_kept(lines: Lines) -> None:
    for count in range(LINES_MAX + 2):
        lines.now_s += INTERVAL_S * (count > LINES_MAX)
        try:
            raise RuntimeError("unforeseen")
        except RuntimeError:
            logging.getLogger("test_logs").exception("a call failed")
    assert "(and 1 more like this" in lines.lines[-1]
    assert "RuntimeError: unforeseen" in lines.lines[-1]
