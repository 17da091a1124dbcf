"""One engine and one daemon: what the engine computed comes back from the store, and only to whom it belongs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from connector.testing import Engine, random_prompt
from kvstore._native import fill
from kvstore.cli import app
from kvstore.plan import read_engine_log
from kvstore.session import Attachment, Kind, Role, Session
from tests.vllm.support import (
    BLOCK_TOKENS,
    FULL_CHUNKS,
    HASH_SEED,
    PROMPT_TOKENS,
    Store,
    loaded_chunks,
    serving_engine,
)

LONG_PROMPT_TOKENS = 32_768 + 100
SCRIBBLE = 0x3F  # as a float32 some 0.75: a wrong value, not an absurd one


def test_after_a_reset_every_full_chunk_comes_from_the_store(engine: Engine, store: Store, oracle: Engine) -> None:
    prompt = random_prompt(1, PROMPT_TOKENS)
    cold = store.generate_and_commit(engine, prompt)
    engine.reset_prefix_cache()
    hits, loaded = store.hits(), loaded_chunks(engine)

    warm = engine.generate(prompt)

    assert cold.tokens == oracle.generate(prompt).tokens
    assert warm.tokens == cold.tokens
    store.wait_for_hits(hits + FULL_CHUNKS)
    assert loaded_chunks(engine) - loaded == FULL_CHUNKS


def test_a_prompt_that_only_begins_alike_loads_what_they_share(engine: Engine, store: Store, oracle: Engine) -> None:
    prompt = random_prompt(2, PROMPT_TOKENS)
    store.generate_and_commit(engine, prompt)
    engine.reset_prefix_cache()
    hits = store.hits()
    shared = 3 * BLOCK_TOKENS
    other = prompt[: shared + 5] + random_prompt(3, PROMPT_TOKENS)

    assert engine.generate(other).tokens == oracle.generate(other).tokens
    store.wait_for_hits(hits + 3)


@pytest.mark.parametrize(("own", "other"), [("alice", "bob"), ("alice", None), (None, "bob")])
def test_another_salt_finds_nothing_and_gets_the_same_tokens(
    engine: Engine, store: Store, oracle: Engine, own: str | None, other: str | None
) -> None:
    prompt = random_prompt({("alice", "bob"): 40, ("alice", None): 41, (None, "bob"): 42}[own, other], PROMPT_TOKENS)
    store.generate_and_commit(engine, prompt, salt=own)
    engine.reset_prefix_cache()
    hits, misses, loaded = store.hits(), store.misses(), loaded_chunks(engine)

    foreign = engine.generate(prompt, salt=other)

    assert foreign.tokens == oracle.generate(prompt).tokens
    store.wait_for_misses(misses + FULL_CHUNKS)
    assert store.hits() == hits
    assert loaded_chunks(engine) == loaded
    engine.reset_prefix_cache()
    assert engine.generate(prompt, salt=own).tokens == foreign.tokens
    store.wait_for_hits(hits + FULL_CHUNKS)  # so the chunks were there all the time


def test_one_request_of_one_token_is_committed_without_another_one(engine: Engine, store: Store) -> None:
    prompt = random_prompt(4, PROMPT_TOKENS)
    store.until_committed(engine, FULL_CHUNKS, lambda: engine.generate(prompt, max_tokens=1))


def test_requests_at_once_are_each_served_their_own_chunks(engine: Engine, store: Store, oracle: Engine) -> None:
    prompts = [random_prompt(10 + i, PROMPT_TOKENS) for i in range(4)]
    expected = [oracle.generate(prompt).tokens for prompt in prompts]
    store.until_committed(engine, len(prompts) * FULL_CHUNKS, lambda: engine.generate_many(prompts))
    engine.reset_prefix_cache()
    hits = store.hits()
    assert [completion.tokens for completion in engine.generate_many(prompts)] == expected
    store.wait_for_hits(hits + len(prompts) * FULL_CHUNKS)


def test_a_long_prompt_is_the_same_cold_and_warm(engine: Engine, store: Store, oracle: Engine) -> None:
    """Short prompts hide layout errors: what is wrong far back is outweighed by what is near."""
    prompt = random_prompt(5, LONG_PROMPT_TOKENS)
    cold = store.generate_and_commit(engine, prompt)
    engine.reset_prefix_cache()
    hits = store.hits()
    warm = engine.generate(prompt)
    assert warm.tokens == cold.tokens == oracle.generate(prompt).tokens
    store.wait_for_hits(hits + LONG_PROMPT_TOKENS // BLOCK_TOKENS)


def test_other_bytes_in_the_arena_change_the_tokens(engine: Engine, store: Store, oracle: Engine) -> None:
    """The control: if this could pass with the right tokens, no other test here would prove anything."""
    prompt = random_prompt(6, PROMPT_TOKENS)
    store.generate_and_commit(engine, prompt)
    engine.reset_prefix_cache()
    attachment = Attachment(role=Role.CLIENT, hash_seed=HASH_SEED, kinds=(Kind({"made": "to scribble"}, 64 << 10),))
    session = Session.attach(store.endpoint, attachment)
    try:
        fill(session.arena.address, session.arena.nbytes, SCRIBBLE)
    finally:
        session.close()

    hits = store.hits()
    assert engine.generate(prompt).tokens != oracle.generate(prompt).tokens
    store.wait_for_hits(hits + FULL_CHUNKS)  # it is what was loaded that changed them


def test_an_engine_that_starts_after_the_first_has_stopped_is_served(
    engine: Engine, store: Store, oracle: Engine, model: Path, tmp_path: Path
) -> None:
    prompt = random_prompt(7, PROMPT_TOKENS)
    cold = store.generate_and_commit(engine, prompt)
    engine.stop()
    hits = store.hits()
    with serving_engine(model, store, tmp_path) as second:
        warm = second.generate(prompt)
        store.wait_for_hits(hits + FULL_CHUNKS)
        assert loaded_chunks(second) == FULL_CHUNKS
    assert warm.tokens == cold.tokens == oracle.generate(prompt).tokens


def test_a_plan_is_made_from_the_log_of_an_engine_on_the_cpu_platform(oracle: Engine, tmp_path: Path) -> None:
    config = json.loads((oracle.model / "config.json").read_text())
    head_bytes = 4 * (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])  # float32
    expected = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_bytes
    log = read_engine_log(oracle.log_text())
    assert log.kv_bytes_per_token_on_rank == pytest.approx(expected, rel=0.02)  # it says GiB to two places
    assert (log.tp_size, log.model) == (1, str(oracle.model))
    (tmp_path / "engine.log").write_text(oracle.log_text())
    arguments = ["plan", "--engine-log", str(tmp_path / "engine.log"), "--config", str(oracle.model), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kv_bytes_per_token"] == pytest.approx(expected, rel=0.02)
