"""Loads a filesystem tier until it is killed: `python -m tests.crash.fs_child DIR SEED CAP POINT COUNT`.

POINT is a crash point, COUNT how many times it is passed before the process kills itself; `none` waits for its parent
to do it. A line is printed before (`storing N`, `removing N`) and after (`stored N`, `removed N`) each operation, and
`committed P` when everything that writer P did before is in the index.
"""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

from kvstore.tiers.base import Scope, WriteOutcome
from kvstore.tiers.conformance import chunk_id
from tests.fs_support import fs_bench, options

CHUNKS = 150
SLAB_SLOTS = 10


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


class Trap:
    def __init__(self, point: str, count: int) -> None:
        self.point, self.count = point, count

    def __call__(self, name: str) -> None:
        if name == self.point:
            self.count -= 1
            if self.count < 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def load(path: Path, seed: int, cap_bytes: int, trap: Trap) -> None:
    rnd = random.Random(seed)
    opts = options(cap_bytes, slab_bytes=SLAB_SLOTS * 24_576, commit_interval_s=0.002)
    async with fs_bench(path, opts, step=trap) as bench:
        say("ready")

        async def writer(place: int) -> None:
            for turn in range(400):
                number = rnd.randrange(CHUNKS) * 4 + place  # each chunk has one writer, so the order of lines is true
                action = rnd.random()
                if action < 0.7:
                    say(f"storing {number}")
                    if await bench.write(chunk_id(number), place) is WriteOutcome.STORED:
                        say(f"stored {number}")
                elif action < 0.9:
                    bench.assert_right(chunk_id(number), *await bench.read(chunk_id(number), place))
                else:
                    say(f"removing {number}")
                    await bench.remove(Scope(chunks=frozenset({chunk_id(number)})))
                    say(f"removed {number}")
                if turn % 20 == 0:
                    committed = asyncio.Event()
                    bench.tier._journal.after_commit(committed.set)
                    await committed.wait()
                    say(f"committed {place}")

        await asyncio.gather(*(writer(place) for place in range(4)))
        say("done")


if __name__ == "__main__":
    folder, seed_text, cap, point_name, passes = sys.argv[1:]
    asyncio.run(load(Path(folder), int(seed_text), int(cap), Trap(point_name, int(passes))))
