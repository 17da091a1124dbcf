"""An engine that is put to sleep and woken up, perhaps with other weights: what it stored before is out of its reach.

vLLM's CPU platform keeps its memory meanwhile; everything else happens as on a GPU.
"""

import pytest

from connector.testing import Engine, random_prompt
from tests.vllm.support import FULL_CHUNKS, PROMPT_TOKENS, Store, loaded_chunks


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_nothing_of_before_is_loaded_and_what_is_computed_then_is(
    engine: Engine, store: Store, oracle: Engine, level: int
) -> None:
    prompt = random_prompt(70 + level, PROMPT_TOKENS)
    expected = oracle.generate(prompt).tokens
    assert store.generate_and_commit(engine, prompt).tokens == expected
    loaded = loaded_chunks(engine)
    engine.sleep(level)
    engine.wake_up()
    assert store.generate_and_commit(engine, prompt).tokens == expected
    assert loaded_chunks(engine) == loaded
    engine.reset_prefix_cache()
    assert engine.generate(prompt).tokens == expected
    assert loaded_chunks(engine) - loaded == FULL_CHUNKS
