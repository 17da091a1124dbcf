"""A load that fails in the middle of a prefix costs a recompute: never a wrong token, never a loop."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.testing import Engine, random_prompt
from tests.vllm.falsifying_connector import TRAP_VARIABLE
from tests.vllm.support import (
    FULL_CHUNKS,
    PROMPT_TOKENS,
    ROOT,
    Store,
    failed_load_chunks,
    loaded_chunks,
    serving_engine,
)

FAILING_CHUNK = 3


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trap") / "position"


@pytest.fixture(scope="module")
def engine(model: Path, store: Store, trap: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with serving_engine(
        model,
        store,
        tmp_path_factory.mktemp("engine"),
        connector=("FalsifyingConnector", "tests.vllm.falsifying_connector"),
        environment={TRAP_VARIABLE: str(trap), "PYTHONPATH": str(ROOT)},
    ) as running:
        yield running


def test_a_load_that_fails_in_the_middle_gives_the_right_tokens_once(
    engine: Engine, store: Store, oracle: Engine, trap: Path
) -> None:
    prompt = random_prompt(20, PROMPT_TOKENS)
    expected = oracle.generate(prompt).tokens
    assert store.generate_and_commit(engine, prompt).tokens == expected
    engine.reset_prefix_cache()
    hits, failed = store.hits(), store.failed_loads()
    trap.write_text(str(FAILING_CHUNK))

    assert engine.generate(prompt, timeout_s=60).tokens == expected

    assert not trap.exists(), "the load was never tried"
    assert failed_load_chunks(engine) == 1
    store.wait_for_failed_loads(failed + 1)
    store.wait_for_hits(hits + FULL_CHUNKS - 1)  # each of the others once: one load, never repeated
    loaded = loaded_chunks(engine)

    # The chunk itself was never wrong: with the right expectation it is loaded like the others.
    engine.reset_prefix_cache()
    assert engine.generate(prompt).tokens == expected
    assert loaded_chunks(engine) - loaded == FULL_CHUNKS
    assert failed_load_chunks(engine) == 1
