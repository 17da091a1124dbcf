"""MLA: one latent for all heads. vLLM's CPU platform chooses blocks of its own for it, and keeps no prefix cache."""

from pathlib import Path

from connector.testing import Engine, Family, random_prompt, small_model, transfer_config
from tests.vllm.support import (
    ARGUMENTS,
    BLOCK_TOKENS,
    FULL_CHUNKS,
    HASH_SEED,
    MODELS,
    PROMPT_TOKENS,
    Store,
    loaded_chunks,
)


def test_an_mla_engine_is_served_what_it_stored(store: Store, tmp_path: Path) -> None:
    prompt = random_prompt(75, PROMPT_TOKENS)
    with Engine(
        small_model(MODELS, family=Family.DEEPSEEK_V2),
        tmp_path / "engine.log",
        transfer=transfer_config(store.endpoint, block_size=BLOCK_TOKENS),  # in tokens
        hash_seed=HASH_SEED,
        arguments={**ARGUMENTS, "max_model_len": 4096, "enable_prefix_caching": False, "disable_log_stats": False},
    ) as engine:
        cold = store.generate_and_commit(engine, prompt, salt="cold")  # finds nothing: a salt of its own
        assert store.generate_and_commit(engine, prompt).tokens == cold.tokens
        hits = store.hits()
        warm = engine.generate(prompt)
        store.wait_for_hits(hits + FULL_CHUNKS)
        assert loaded_chunks(engine) == FULL_CHUNKS
    assert warm.tokens == cold.tokens
    assert len(set(cold.tokens)) > 4, "a model that repeats one token proves nothing"
