"""What ours is measured against: the policies that engines' own host caches offer, replayed on chunk ids.

LRU, storing only from the second offer on, and ARC with ghosts of one cache's size each (its steps as vLLM takes them).
They know no parents: a chunk is a key. A request uses its chunks tail first, so that its head is the youngest; it
stores all that it lacks or, where that finds no room beside its own chunks, nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

Chains = Sequence[Sequence[int]]


class Lru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.held

    def __len__(self) -> int:
        return len(self.held)

    def use(self, chain: Sequence[int]) -> None:
        for key in reversed(chain):
            if key in self.held:
                self.held.move_to_end(key)

    def make_room(self, count: int, kept: set[int]) -> bool:
        victims = _first(count, self.held, kept)
        for key in victims:
            del self.held[key]
        return len(victims) == max(0, count)

    def insert(self, key: int) -> None:
        self.held[key] = None


class Arc:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.once: OrderedDict[int, None] = OrderedDict()
        self.often: OrderedDict[int, None] = OrderedDict()
        self.once_ghosts: OrderedDict[int, None] = OrderedDict()
        self.often_ghosts: OrderedDict[int, None] = OrderedDict()
        self.once_share = 0.0

    def __contains__(self, key: int) -> bool:
        return key in self.once or key in self.often

    def __len__(self) -> int:
        return len(self.once) + len(self.often)

    def use(self, chain: Sequence[int]) -> None:
        for key in reversed(chain):
            if key in self:
                self.once.pop(key, None)
                self.often[key] = None
                self.often.move_to_end(key)
            elif key in self.once_ghosts:
                step = max(1, len(self.often_ghosts) / len(self.once_ghosts))
                self.once_share = min(self.once_share + step, self.capacity)
            elif key in self.often_ghosts:
                step = max(1, len(self.once_ghosts) / len(self.often_ghosts))
                self.once_share = max(self.once_share - step, 0)

    def make_room(self, count: int, kept: set[int]) -> bool:
        once, often = _first(count, self.once, kept), _first(count, self.often, kept)
        if len(once) + len(often) < count:
            return False
        for _ in range(count):
            if once and (len(self.once) >= int(self.once_share) or not often):
                key = once.pop(0)
                del self.once[key]
                self.once_ghosts[key] = None
            else:
                key = often.pop(0)
                del self.often[key]
                self.often_ghosts[key] = None
        for ghosts in (self.once_ghosts, self.often_ghosts):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return True

    def insert(self, key: int) -> None:
        self.once[key] = None
        self.once_ghosts.pop(key, None)
        self.often_ghosts.pop(key, None)


def _first(count: int, keys: Iterable[int], kept: set[int]) -> list[int]:
    found: list[int] = []
    for key in keys:
        if len(found) >= count:
            break
        if key not in kept:
            found.append(key)
    return found


def hit_rate(cache: Lru | Arc, chains: Chains, *, from_offer: int = 1) -> float:
    """Chunks of the longest present prefix, over all."""
    offers: Counter[int] = Counter()
    hits = 0
    for chain in chains:
        hits += next((i for i, key in enumerate(chain) if key not in cache), len(chain))
        offers.update(chain)
        cache.use(chain)
        missing = [key for key in chain if key not in cache and offers[key] >= from_offer]
        if cache.make_room(len(cache) + len(missing) - cache.capacity, set(chain)):
            for key in reversed(missing):
                cache.insert(key)
    return hits / sum(map(len, chains))


PEERS: dict[str, Callable[[Chains, int], float]] = {
    "lru": lambda chains, capacity: hit_rate(Lru(capacity), chains),
    "threshold of two": lambda chains, capacity: hit_rate(Lru(capacity), chains, from_offer=2),
    "arc": lambda chains, capacity: hit_rate(Arc(capacity), chains),
}
