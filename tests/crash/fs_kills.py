"""Kill the daemon at random moments under load, start it on the same directory, and look at what is left on disk.

`python -m tests.crash.fs_kills --kills 200 --seed N` (without a seed it chooses one; it prints it either way). A seed
fixes when in a daemon's life it is killed, and what is done to its index meanwhile; the threads of seven processes it
cannot fix.

Half of the kills are of a tier that holds everything, half of one that is too small for it and evicts all the time. A
daemon is killed in its start, under load, or right after everybody was told to pause; now and then its index is taken
away before the next start. What must hold when that one is warm: every chunk of the index as the kill left it is there,
and so is (where nothing is evicted) every chunk that was listed as being on disk before an index commit; no process
ever reads a wrong byte; a read of everything on disk finds no damage; counts, lists and `du` agree with the cap.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore import admin
from kvstore.client import StoreClient
from kvstore.errors import KVStoreError
from kvstore.tiers import fs_index, fs_paths
from kvstore.tiers.fs_format import slot_bytes_for
from tests.crash.chunks import CHAINS, CHUNK_BYTES, CHUNKS_PER_CHAIN, NAMESPACE, SALT, SEED, content, key
from tests.crash.kills import Node, Violation, running_node, wait_until
from tests.fs_support import du

ROOMY_BYTES = 192 << 20  # for all 960 chunks, and the rest that a tier takes
TIGHT_BYTES = 32 << 20
IN_ITS_START = 0.2  # so many kills come before the daemon is ready
PAUSED = 0.3  # so many when nobody does anything any more
WITHOUT_INDEX = 0.15  # so many starts have to read the headers
CHUNKS_UNDER_LOAD = 100  # read rightly by all together before the next kill
CHUNKS_SAMPLED = 32  # of those on disk, read through a client after each start
SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)
NEVER_COMPLETED = "it was never completed"
NUMBERS = {key(number): number for number in range(CHAINS * CHUNKS_PER_CHAIN)}


class FsNode:
    """A node with a filesystem tier, and what must be on its disk."""

    def __init__(self, node: Node, path: Path, fs_bytes: int) -> None:
        self.node = node
        self.path = path
        self.fs_bytes = fs_bytes
        self.rnd = node.rnd
        self.safe: set[bytes] = set()  # keys that were on disk before an index commit, while nothing is evicted

    # -- before the kill

    def wait_for_load(self) -> None:
        before = self.node.read_rightly()
        wait_until(lambda: self.node.read_rightly() >= before + CHUNKS_UNDER_LOAD, "the processes load chunks")
        time.sleep(self.rnd.uniform(0, 0.2))

    def note_what_is_safe(self) -> None:
        """What is listed as being on disk while everybody pauses, once the index has all of it."""
        self.node.tally.paused = True
        wait_until(
            lambda: all(self.node.tally.is_idle(member.row) for member in self.node.members()), "everybody is idle"
        )
        listed = self.on_disk()
        wait_until(lambda: self.node.daemon.tier("fs")["unindexed_chunks"] == 0, "the index has everything")
        if self.fs_bytes == ROOMY_BYTES:
            self.safe |= listed
        self.node.tally.paused = False

    # -- the kill, and the start after it

    def kill_once(self) -> str:
        node, how = self.node, ""
        self.wait_for_load()
        self.note_what_is_safe()
        if self.rnd.random() < PAUSED:
            how += ", paused"
        else:
            self.wait_for_load()
        node.daemon.kill()
        node.tally.paused = True  # until what is on disk was looked at
        in_index = {record.chunk.key for record in committed(self.path)}
        if self.rnd.random() < IN_ITS_START:
            how += ", again in its start"
            node.close_daemon()
            node.daemon = node.spawn_daemon()
            time.sleep(self.rnd.uniform(0, 1.5))
            node.daemon.kill()
        if self.rnd.random() < WITHOUT_INDEX:
            how += ", without its index"
            (self.path / fs_paths.INDEX).unlink(missing_ok=True)
        node.replace_daemon()
        wait_until(lambda: node.daemon.tier("fs")["ready_bytes"] > 0, "the tier is warm")
        self.require_kept(in_index)
        self.require_sound()
        self.require_right()
        node.tally.paused = False
        wait_until(node.all_attached, "every process has found the new daemon")
        return f"{len(in_index)} chunks in the index, {len(self.safe)} known to be safe{how}"

    # -- after it

    def require_kept(self, in_index: set[bytes]) -> None:
        listed = self.on_disk()
        if lost := in_index - listed:
            raise Violation(f"{len(lost)} of {len(in_index)} chunks of the index are lost")
        if lost := self.safe - listed:
            raise Violation(f"{len(lost)} of {len(self.safe)} chunks that were on disk before a commit are lost")

    def require_sound(self) -> None:
        self.node.require_sound()
        endpoint = self.node.daemon.endpoint
        if problems := admin.check(endpoint) + admin.check_data(endpoint):
            raise Violation(f"kvstore check --data: {problems}")
        tier = self.node.daemon.tier("fs")
        listed = len(self.on_disk())
        if (tier["chunks"], tier["used_bytes"]) != (listed, listed * SLOT_BYTES):
            raise Violation(f"{tier['chunks']} chunks in {tier['used_bytes']} bytes, and {listed} are listed")
        if tier["corruptions"] or tier["sick"]:
            raise Violation(f"{tier['corruptions']} corruptions; sick: {tier['sick'] or 'no'}")
        if (taken := du(self.path)) > self.fs_bytes:
            raise Violation(f"du is {taken}, the cap {self.fs_bytes}")

    def require_right(self) -> None:
        """What is on disk is served, through the arena, and is what was stored."""
        sample = self.rnd.sample(sorted(listed := self.on_disk()), min(CHUNKS_SAMPLED, len(listed)))
        with StoreClient.attach(
            self.node.daemon.endpoint, namespace=NAMESPACE, chunk_bytes=CHUNK_BYTES, hash_seed=SEED
        ) as store:
            for one, found in zip(sample, store.get(SALT, sample, timeout_s=60.0), strict=True):
                if found is None:
                    raise Violation(f"chunk {NUMBERS[one]} is on disk and cannot be had")
                if not np.array_equal(np.frombuffer(found, np.uint64), content(NUMBERS[one])):
                    raise Violation(f"chunk {NUMBERS[one]} has wrong bytes")

    def on_disk(self) -> set[bytes]:
        rows = admin.chunks(self.node.daemon.endpoint, admin.selection(tier="fs"), limit=len(NUMBERS) + 1)
        return {bytes.fromhex(str(row["key"])) for row in rows}


def committed(path: Path) -> list[fs_index.Record]:
    """What the index holds, read as the kill left it; nothing, where that came before a new one had everything."""
    try:
        fs_index.check(path / fs_paths.INDEX)
        _, records = fs_index.read(path / fs_paths.INDEX)
    except fs_index.IndexUnusable as unusable:
        if NEVER_COMPLETED not in str(unusable):
            raise
        records = []
    return records


def kill_many(kills: int, seed: int, *, say: Callable[[str], None] = lambda _: None) -> Counter[int]:
    """How many kills a tier of each size survived. Violation when anything went wrong."""
    done: Counter[int] = Counter()
    for fs_bytes, count in ((ROOMY_BYTES, kills - kills // 2), (TIGHT_BYTES, kills // 2)):
        flags = ["--fs-bytes", str(fs_bytes), "--fs-dir"]
        with running_node(seed, lambda folder, flags=flags: [*flags, str(folder / "fs")]) as node:
            tier = FsNode(node, node.folder / "fs", fs_bytes)
            for _ in range(count):
                what = tier.kill_once()
                done[fs_bytes] += 1
                say(f"{done.total()} of {kills}: {what}")
            node.require_quiet()
            node.require_empty_after_all_have_ended()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.fs_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started_s = time.monotonic()
    try:
        done = kill_many(options.kills, seed, say=lambda text: print(text, flush=True))
    except (Violation, KVStoreError, AssertionError) as violation:
        print(f"{violation}\nagain with: python -m tests.crash.fs_kills --kills {options.kills} --seed {seed}")
        return 1
    print(f"{done.total()} kills in {time.monotonic() - started_s:.0f} s: no wrong byte, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
