"""A model that mixes sliding windows with full attention has two KV cache groups, each with chunks of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm

from connector.testing import Engine, Family, random_prompt, small_model, transfer_config
from kvstore import admin
from tests.vllm.falsifying_connector import TRAP_VARIABLE
from tests.vllm.node import granted_and_pinned, wait_until
from tests.vllm.support import (
    ARGUMENTS,
    BLOCK_TOKENS,
    HASH_SEED,
    MODELS,
    PROMPT_TOKENS,
    ROOT,
    Store,
    failed_load_chunks,
    failed_store_chunks,
    loaded_chunks,
)

BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCKS_PER_CHUNK * BLOCK_TOKENS  # as large as the window
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
STORED = 2 * CHUNKS  # in both groups, for vLLM is told to keep a window before every chunk's end
LOADED = CHUNKS + 1  # of the window, the last
OFFERS_WHOLE_CHUNKS_ONLY = not vllm.__version__.startswith(("0.30.", "0.31.", "0.32."))


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trap") / "position"


@pytest.fixture(scope="module")
def engine(store: Store, trap: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        small_model(MODELS, family=Family.GEMMA3),
        tmp_path_factory.mktemp("mixed") / "engine.log",
        transfer={
            **transfer_config(store.endpoint, blocks_per_chunk=BLOCKS_PER_CHUNK),
            "kv_connector": "FalsifyingConnector",
            "kv_connector_module_path": "tests.vllm.falsifying_connector",
        },
        hash_seed=HASH_SEED,
        arguments={
            **ARGUMENTS,
            "max_model_len": 4096,
            "prefix_cache_retention_interval": CHUNK_TOKENS,
            "disable_log_stats": False,
        },
        environment={TRAP_VARIABLE: str(trap), "PYTHONPATH": str(ROOT)},
    ) as running:
        yield running


def cold_tokens(engine: Engine, store: Store, prompt: list[int]) -> list[int]:
    """What the engine says when nothing is loaded: a salt of its own finds nothing."""
    completion = store.until_committed(engine, STORED, lambda: engine.generate(prompt, salt="cold"))
    engine.reset_prefix_cache()
    return completion.tokens


def test_a_prompt_is_served_from_the_chunks_of_both_groups(engine: Engine, store: Store) -> None:
    prompt = random_prompt(80, PROMPT_TOKENS)
    expected = cold_tokens(engine, store, prompt)
    assert len(set(expected)) > 4, "a model that repeats one token proves nothing"
    assert store.until_committed(engine, STORED, lambda: engine.generate(prompt)).tokens == expected
    engine.reset_prefix_cache()
    hits, loaded = store.hits(), loaded_chunks(engine)
    assert engine.generate(prompt).tokens == expected
    store.wait_for_hits(hits + LOADED)
    assert loaded_chunks(engine) == loaded + LOADED
    assert store.failed_loads() == 0
    namespaces = {session["role"]: session["namespace_ids"] for session in store.daemon.stats()["sessions"]}  # type: ignore[attr-defined]
    assert len(set(namespaces["worker"])) == 2


@pytest.mark.parametrize("position", [1, CHUNKS], ids=["first group", "second group"])
def test_a_failed_load_gives_the_right_tokens_and_the_engine_lives(
    position: int, engine: Engine, store: Store, trap: Path
) -> None:
    prompt = random_prompt(81 + position, PROMPT_TOKENS)
    expected = cold_tokens(engine, store, prompt)
    store.until_committed(engine, STORED, lambda: engine.generate(prompt))
    engine.reset_prefix_cache()
    failed, failed_here = store.failed_loads(), failed_load_chunks(engine)
    trap.write_text(str(position))

    assert engine.generate(prompt, timeout_s=120).tokens == expected

    assert not trap.exists(), "the load was never tried"
    store.wait_for_failed_loads(failed + 1)
    assert failed_load_chunks(engine) == failed_here + 1
    # The chunk itself was never wrong.
    engine.reset_prefix_cache()
    loaded = loaded_chunks(engine)
    assert engine.generate(prompt).tokens == expected
    assert loaded_chunks(engine) == loaded + LOADED


def test_a_window_chunk_that_lost_a_block_is_not_stored(engine: Engine, store: Store) -> None:
    """The prompt goes on from a prefix that the engine itself has. Of its window only the blocks still read are there,
    and they begin within a chunk. Every slot is full of poison before it is written."""
    prompt = random_prompt(90, PROMPT_TOKENS)
    expected = cold_tokens(engine, store, prompt)
    engine.generate(prompt[: 5 * BLOCK_TOKENS + 10])
    # What is written to a slot granted before a removal is not stored after it.
    wait_until(lambda: granted_and_pinned(store.daemon) == (0, 0), "slots that were not used go back")
    admin.remove(store.endpoint, admin.selection(tier="all"))
    failed, stores = failed_store_chunks(engine), store.stores()

    assert engine.generate(prompt).tokens == expected

    holed = 0 if OFFERS_WHOLE_CHUNKS_ONLY else 1
    windows = CHUNKS - 2  # of chunks 2 and 3; of chunk 0 there is nothing, of chunk 1 half
    store.wait_for_stores(stores + CHUNKS + windows)
    engine.generate(random_prompt(91, 16), max_tokens=1)  # counts travel with the next step
    assert failed_store_chunks(engine) == failed + holed
    engine.reset_prefix_cache()
    assert engine.generate(prompt).tokens == expected
    assert store.daemon.stats()["poison_commits"] == 0
