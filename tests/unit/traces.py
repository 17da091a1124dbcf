"""Traces of requests made from a seed, of kinds that are unlike each other: no eviction policy is tuned to them."""

import itertools
import json
import random
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


KINDS: dict[str, Callable[[random.Random, Iterator[int]], Iterator[Sequence[int]]]] = {
    kind.__name__: kind for kind in (conversations, documents, hot_in_a_scan, loop, shifting, few_shot_tree)
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
