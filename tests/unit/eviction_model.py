"""The adaptive eviction policy, said again plainly from docs/decisions/010-eviction-policy.md: one size class.

The oracle of `test_eviction_policy.py`; it shares no code with the core.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CLASSES, BUCKETS = 8, 63
GHOSTS_MIN, SAMPLE_MAX = 65_536, 4_096

Table = list[list[float]]


@dataclass
class Chunk:
    touched: int
    last: int
    uses: int
    named: bytes | None  # as its parent
    parent: bytes | None  # resident
    orphan: bool = False


def use_class(uses: int) -> int:
    return min(7, math.ceil(math.log2(max(1, uses))))


def bucket(age: int) -> int:
    return max(b for b in range(BUCKETS) if begin(b) <= max(1, age))


def begin(b: int) -> float:
    return 2.0 ** (b // 2) * (1.5 if b % 2 else 1.0)


WIDTHS = [begin(b + 1) - begin(b) for b in range(BUCKETS)]


def zeros() -> Table:
    return [[0.0] * BUCKETS for _ in range(CLASSES)]


def ranks(hit: Table, gone: Table, live: Table) -> Table:
    result = zeros()
    prior = [1 / (32 * begin(b)) for b in range(BUCKETS)]
    for c in range(CLASSES):
        exposure = [0.0] * BUCKETS
        alive = 0.0
        for b in reversed(range(BUCKETS)):
            end = hit[c][b] + gone[c][b] + live[c][b]
            exposure[b] = (alive + end / 2) * WIDTHS[b]
            alive += end
        expected = sum(exposure[b] * prior[b] for b in range(BUCKETS))
        ratio = (sum(hit[c]) + 8) / (expected + 8)
        hazard = [
            (hit[c][b] + 32 * WIDTHS[b] * ratio * prior[b]) / (exposure[b] + 32 * WIDTHS[b]) for b in range(BUCKETS)
        ]
        for b in range(BUCKETS):
            s, hits, ticks = 1.0, 0.0, 0.0
            for j in range(b, BUCKETS):
                p = -math.expm1(-hazard[j] * WIDTHS[j])
                hits += s * p
                ticks += s * (p / hazard[j])
                s *= 1 - p
                result[c][b] = max(result[c][b], hits / ticks)
        prior = hazard
    return result


class AdaptiveModel:
    """`digest_hi`: the half of a key's digest by which it is sampled."""

    def __init__(self, capacity: int, digest_hi: Callable[[bytes], int]) -> None:
        self.capacity = capacity
        self.digest_hi = digest_hi
        self.chunks: dict[bytes, Chunk] = {}
        self.ghosts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.tick = 0
        self.sampled: dict[bytes, tuple[int, int]] = {}
        self.bound = 2**64 - 1
        self.hit, self.gone = zeros(), zeros()
        self.rank = ranks(zeros(), zeros(), zeros())
        self.learn_at = self.halve_at = 0

    def touch(self, keys: Sequence[bytes], again: int = 0) -> None:
        child: Chunk | None = None
        for position, key in reversed(list(enumerate(keys))):
            chunk = self.chunks.get(key)
            if chunk is not None:
                self.tick += 1
                chunk.touched = self.tick
                if position >= again:
                    chunk.last, chunk.uses = self._use(key, chunk.last, chunk.uses)
                if child is not None and child.parent is None and child.named == key:
                    child.parent, child.orphan = key, False
            elif position >= again:
                self.tick += 1
                last, uses = self.ghosts.pop(key, (self.tick, 0))
                self._ghost(key, *self._use(key, last, uses))
            child = chunk

    def store(self, key: bytes, parent: bytes | None) -> None:
        if len(self.chunks) == self.capacity:
            victim = self._victim()
            chunk = self.chunks[victim]
            self._drop(victim)
            self._ghost(victim, chunk.last, chunk.uses)
        self.tick += 1
        last, uses = self.ghosts.pop(key, (self.tick, 0))
        known_parent = parent if parent in self.chunks else None
        self.chunks[key] = Chunk(self.tick, last, uses, parent, known_parent)
        self.chunks[key].last, self.chunks[key].uses = self._use(key, last, uses)

    def remove_all(self) -> None:
        for key in list(self.chunks):
            self._drop(key)
            self.sampled.pop(key, None)

    def _drop(self, key: bytes) -> None:
        del self.chunks[key]
        for child in self.chunks.values():
            if child.parent == key:
                child.parent, child.orphan = None, True

    def _ghosts_max(self) -> int:
        return max(2 * len(self.chunks), GHOSTS_MIN)

    def _ghost(self, key: bytes, last: int, uses: int) -> None:
        self.ghosts[key] = (last, uses)
        while len(self.ghosts) > self._ghosts_max():
            fallen, (last, uses) = self.ghosts.popitem(last=False)
            if self.digest_hi(fallen) < self.bound:
                self.gone[use_class(uses)][bucket(self.tick - last)] += 1
                self.sampled.pop(fallen, None)

    def _use(self, key: bytes, last: int, uses: int) -> tuple[int, int]:
        used = (self.tick, uses + 1)
        if self.digest_hi(key) < self.bound:
            if uses:
                self.hit[use_class(uses)][bucket(self.tick - last)] += 1
            self.sampled[key] = used
            if len(self.sampled) > SAMPLE_MAX:
                self.bound //= 2
                self.sampled = {one: its for one, its in self.sampled.items() if self.digest_hi(one) < self.bound}
                self._halve()
        if self.tick >= self.learn_at:
            self._learn()
        return used

    def _learn(self) -> None:
        tracked = len(self.chunks) + len(self.ghosts)
        self.learn_at = self.tick + min(max(128, self.tick // 16), max(1024, tracked // 4))
        live = zeros()
        for last, uses in self.sampled.values():
            live[use_class(uses)][bucket(self.tick - last)] += 1
        self.rank = ranks(self.hit, self.gone, live)
        if self.tick >= self.halve_at:
            if self.halve_at:
                self._halve()
            self.halve_at = self.tick + 4 * (len(self.chunks) + self._ghosts_max())

    def _halve(self) -> None:
        for table in (self.hit, self.gone):
            for row in table:
                row[:] = [count / 2 for count in row]

    def _victim(self) -> bytes:
        parents = {chunk.parent for chunk in self.chunks.values()}
        leaves = {key: chunk for key, chunk in self.chunks.items() if key not in parents}
        orphans = {key: chunk for key, chunk in leaves.items() if chunk.orphan}
        if orphans:
            return min(orphans, key=lambda key: orphans[key].touched)
        window = max(1, min(16, len(self.chunks) // 64))
        longest_unused = use_class(min(leaves.values(), key=lambda chunk: chunk.touched).uses)
        candidates: list[tuple[float, int, bytes]] = []
        for c in range(CLASSES):
            touches = sorted((chunk.touched, key) for key, chunk in leaves.items() if use_class(chunk.uses) == c)
            untouched = [(touched, key) for touched, key in touches if self.tick - touched >= window]
            for touched, key in {*touches[:1], *touches[-1:], *untouched[-1:]}:
                rank = self.rank[c][bucket(self.tick - touched)]
                rank *= 1 if self.tick - touched >= window else 2
                rank *= 0.75 if c == longest_unused else 1
                candidates.append((rank, touched, key))
        return min(candidates)[2]
