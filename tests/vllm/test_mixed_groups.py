"""A model that mixes sliding windows with full attention has two KV cache groups, each with chunks of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.testing import Engine, Family, random_prompt, small_model
from tests.vllm.falsifying_connector import TRAP_VARIABLE
from tests.vllm.support import (
    ARGUMENTS,
    FULL_CHUNKS,
    HASH_SEED,
    MODELS,
    PROMPT_TOKENS,
    ROOT,
    Store,
    failed_load_chunks,
    loaded_chunks,
)

WINDOW_CHUNKS = 2  # of 256 tokens; vLLM keeps the one at the prompt's end
STORED = FULL_CHUNKS + WINDOW_CHUNKS


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trap") / "position"


@pytest.fixture(scope="module")
def engine(store: Store, trap: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        small_model(MODELS, family=Family.GEMMA3),
        tmp_path_factory.mktemp("mixed") / "engine.log",
        transfer={
            **store.transfer_config(),
            "kv_connector": "FalsifyingConnector",
            "kv_connector_module_path": "tests.vllm.falsifying_connector",
        },
        hash_seed=HASH_SEED,
        arguments={**ARGUMENTS, "max_model_len": 4096, "disable_log_stats": False},
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
    store.wait_for_hits(hits + STORED)
    assert loaded_chunks(engine) == loaded + STORED
    assert store.failed_loads() == 0
    namespaces = {session["role"]: session["namespace_ids"] for session in store.daemon.stats()["sessions"]}  # type: ignore[attr-defined]
    assert len(set(namespaces["worker"])) == 2


@pytest.mark.parametrize("position", [3, FULL_CHUNKS], ids=["first group", "second group"])
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
    assert loaded_chunks(engine) == loaded + STORED
