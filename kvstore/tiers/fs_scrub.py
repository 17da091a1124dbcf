"""The pace of a scrub. Pure: clock and sleep are arguments."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def paced(
    items: Iterable[T],
    nbytes_of: Callable[[T], int],
    *,
    bytes_per_s: float | None,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> AsyncIterator[T]:
    """Yields the items so that their bytes never run ahead of the rate. Time lost is not made up for: a scrub that was
    held up does not come back as a burst. None: no limit."""
    next_s = clock()
    for item in items:
        wait_s = next_s - clock()
        if wait_s > 0:
            await sleep(wait_s)
        yield item
        if bytes_per_s is not None:
            next_s = max(next_s, clock()) + nbytes_of(item) / bytes_per_s
