"""The slow disk of tests: one link, as slow as its file says at the moment."""

import asyncio
from pathlib import Path

from kvstore.throttle import Throttle


def test_it_delays_in_order_and_not_at_all_when_its_file_is_empty_or_missing(tmp_path: Path) -> None:
    rate_file, ended = tmp_path / "rate", []

    async def read() -> float:
        throttle = Throttle(rate_file)
        throttle.after(1000, lambda: ended.append("missing"))
        rate_file.write_text("")
        throttle.after(1000, lambda: ended.append("empty"))
        assert ended == ["missing", "empty"]
        rate_file.write_text("100000")
        loop = asyncio.get_running_loop()
        began_s, done = loop.time(), asyncio.Event()
        throttle.after(1000, lambda: ended.append("first"))
        throttle.after(1000, lambda: (ended.append("second"), done.set()))
        assert len(ended) == 2
        await asyncio.wait_for(done.wait(), 60)
        return loop.time() - began_s

    assert asyncio.run(read()) >= 0.02
    assert ended[2:] == ["first", "second"]
