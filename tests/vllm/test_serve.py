"""A server that serves with the store, asked by its HTTP API."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector import metrics
from connector.testing import Engine, random_prompt
from kvstore import admin
from tests.crash.engine_soak import questions, soak
from tests.vllm.server import Server
from tests.vllm.support import BLOCK_TOKENS, FULL_CHUNKS, OFFERS_MAX, PROMPT_TOKENS, Store, wait_up_to

SOAK_QUESTIONS = 12
SOAK_REQUESTS = 150


@pytest.fixture(scope="module")
def server(model: Path, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    flags = ("--no-enable-prefix-caching", "--block-size", f"{BLOCK_TOKENS}", "--max-model-len", "4096")
    with Server(model, folder, store.transfer_config(), flags) as server:
        server.wait_until_healthy()
        yield server


def test_a_served_engine_uses_the_store_and_shows_our_series(server: Server, store: Store) -> None:
    prompt = random_prompt(30, PROMPT_TOKENS)
    stores = store.stores()
    hits = store.hits()
    cold = server.complete(prompt, max_tokens=8, salt="alice")
    for _ in range(OFFERS_MAX - 1):  # as `Store.until_committed`
        if wait_up_to(store.stores, stores + FULL_CHUNKS) == stores + FULL_CHUNKS:
            break
        server.complete(prompt, max_tokens=8, salt="alice")
        assert server.series()[f"{metrics.REFUSED_STORES}_total"] > 0
    warm = server.complete(prompt, max_tokens=8, salt="alice")  # the engine keeps no prefix cache of its own here
    store.wait_for_hits(hits + FULL_CHUNKS)

    series = server.series()

    assert warm == cold
    assert series[f"{metrics.STORED_CHUNKS}_total"] == FULL_CHUNKS
    assert series[f"{metrics.LOADED_CHUNKS}_total"] == FULL_CHUNKS
    assert series[f"{metrics.FAILED_LOADS}_total"] == 0
    assert {f"{name}_total" for name in metrics.COUNTERS} <= series.keys()


def test_clients_that_come_at_once_and_hang_up_get_the_tokens_of_an_engine_without_a_store(
    server: Server, store: Store, oracle: Engine
) -> None:
    """A share of `python -m tests.crash.engine_soak`."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")  # shown when it fails
    loaded = server.series()[f"{metrics.LOADED_CHUNKS}_total"]

    def forget_half() -> str:
        admin.remove(store.endpoint, admin.selection(tier="cpu"), nbytes=store.daemon.tier()["used_bytes"] // 2)
        return "evicted"

    soak([server], questions(oracle, seed, SOAK_QUESTIONS), SOAK_REQUESTS, random.Random(seed), forget_half)

    assert server.series()[f"{metrics.LOADED_CHUNKS}_total"] > loaded
