"""MLA: one latent for all heads. vLLM's CPU platform chooses blocks of its own for it, and keeps no prefix cache."""

from pathlib import Path

from connector.testing import Engine, Family, random_prompt, small_model, transfer_config
from kvstore._native import fill
from kvstore.session import Attachment, Kind, Role, Session
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

# vLLM computes a prompt that goes on from a prefix in another way than a whole one: longer outputs may part.
TOKENS_ALIKE = 2
SCRIBBLE = 0x3F


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
        assert warm.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
        # The control: other bytes give other tokens from the first ones on.
        _scribble(store)
        assert engine.generate(prompt).tokens[:TOKENS_ALIKE] != cold.tokens[:TOKENS_ALIKE]
        store.wait_for_hits(hits + 2 * FULL_CHUNKS)


def _scribble(store: Store) -> None:
    attachment = Attachment(role=Role.CLIENT, hash_seed=HASH_SEED, kinds=(Kind({"made": "to scribble"}, 64 << 10),))
    session = Session.attach(store.endpoint, attachment)
    try:
        fill(session.arena.address, session.arena.nbytes, SCRIBBLE)
    finally:
        session.close()
