"""Traces of requests made from a seed, of kinds that are unlike each other: no eviction policy is tuned to them."""

import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

BLOCK_TOKENS = 512


def grown(chain: list[int], ids: Iterator[int], most: int, generator: random.Random) -> None:
    chain += itertools.islice(ids, generator.randint(1, most))


def conversations(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """Continued uniformly, about four turns each, 40 at a time."""
    alive: list[list[int]] = []
    while True:
        if len(alive) < 40 or generator.random() < 0.25:
            alive.append([])
        chain = generator.choice(alive)
        grown(chain, ids, 12, generator)
        yield chain[:]
        if generator.random() < 0.25:
            alive.remove(chain)


def documents(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """Questions about documents, of which some are asked about far more often."""
    texts = [list(itertools.islice(ids, generator.randint(10, 60))) for _ in range(300)]
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    while True:
        yield [*generator.choices(texts, weights)[0], next(ids)]


def hot_in_a_scan(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """One request in four has one of 30 prompts; the others never come back."""
    hot = [list(itertools.islice(ids, 12)) for _ in range(30)]
    while True:
        yield generator.choice(hot) if generator.random() < 0.25 else list(itertools.islice(ids, 12))


def loop(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """The same prompts over and over, with a few that never come back between them."""
    prompts = [list(itertools.islice(ids, 10)) for _ in range(150)]
    for prompt in itertools.cycle(prompts):
        yield prompt
        if generator.random() < 0.1:
            yield list(itertools.islice(ids, 10))


def shifting(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """What is popular changes every 1,000 requests."""
    while True:
        prompts = [list(itertools.islice(ids, generator.randint(5, 20))) for _ in range(120)]
        weights = [1 / (rank + 1) for rank in range(len(prompts))]
        for _ in range(1_000):
            yield [*generator.choices(prompts, weights)[0], next(ids)]


def few_shot_tree(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """A system prompt, one of 12 tasks under it, one of 20 examples under each, and a question."""
    system = list(itertools.islice(ids, 8))
    tasks = [list(itertools.islice(ids, 8)) for _ in range(12)]
    examples = [[list(itertools.islice(ids, 6)) for _ in range(20)] for _ in tasks]
    while True:
        task = min(int(generator.expovariate(0.3)), len(tasks) - 1)
        yield [*system, *tasks[task], *generator.choice(examples[task]), *itertools.islice(ids, 3)]


def popular(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """One-chunk prompts, of which some are far more popular; most come once or twice."""
    prompts = list(itertools.islice(ids, 8_000))
    weights = list(itertools.accumulate((rank + 1) ** -0.8 for rank in range(len(prompts))))
    while True:
        yield generator.choices(prompts, cum_weights=weights)


def agents(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """Four at a time, of 10 to 50 turns each, below one system prompt."""
    system = list(itertools.islice(ids, 6))
    alive: list[tuple[list[int], int]] = []
    while True:
        while len(alive) < 4:
            alive.append(([*system, *itertools.islice(ids, 4)], generator.randint(10, 50)))
        chain, turns = alive.pop(generator.randrange(4))
        grown(chain, ids, 3, generator)
        yield chain[:]
        if turns > 1:
            alive.append((chain, turns - 1))


def twice(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """Every prompt comes once more, about a hundred requests later, and then never."""
    waiting: deque[list[int]] = deque()
    while True:
        if len(waiting) >= generator.randint(40, 60):
            yield waiting.popleft()
        else:
            waiting.append(list(itertools.islice(ids, generator.randint(5, 25))))
            yield waiting[-1]


def retrieved(generator: random.Random, ids: Iterator[int]) -> Iterator[Sequence[int]]:
    """Two of 60 passages below one system prompt, some of which are found far more often, and a question."""
    system = list(itertools.islice(ids, 5))
    weights = [1 / (rank + 1) for rank in range(60)]
    passages: dict[tuple[int, ...], list[int]] = {}
    while True:
        found = tuple(generator.choices(range(60), weights, k=2))
        for prefix in (found[:1], found):
            if prefix not in passages:
                passages[prefix] = list(itertools.islice(ids, 6))
        yield [*system, *passages[found[:1]], *passages[found], *itertools.islice(ids, 2)]


KINDS: dict[str, Callable[[random.Random, Iterator[int]], Iterator[Sequence[int]]]] = {
    kind.__name__: kind
    for kind in (
        conversations,
        documents,
        hot_in_a_scan,
        loop,
        shifting,
        few_shot_tree,
        popular,
        agents,
        twice,
        retrieved,
    )
}


def chains_of(kind: str, seed: int, requests: int) -> list[Sequence[int]]:
    return list(itertools.islice(KINDS[kind](random.Random(f"{kind} {seed}"), itertools.count()), requests))


def write(path: Path, chains: Sequence[Sequence[int]], *, step_ms: int = 100) -> Path:
    requests = (
        {"timestamp": number * step_ms, "input_length": len(chain) * BLOCK_TOKENS, "hash_ids": list(chain)}
        for number, chain in enumerate(chains)
    )
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path
