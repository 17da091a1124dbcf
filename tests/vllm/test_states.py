"""Models that mix full attention with layers that keep a state: short convolutions, linear attention, Mamba. Of a
prompt vLLM keeps the state at the end of its last whole block; that is a chunk of its own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from connector import compat
from connector.testing import Engine, EngineDied, Family, random_prompt, small_model, transfer_config
from tests.vllm.falsifying_connector import TRAP_VARIABLE
from tests.vllm.support import HASH_SEED, MODELS, ROOT, Store, failed_load_chunks, loaded_chunks

BOUNDARY = 1024  # in tokens
PROMPT_TOKENS = BOUNDARY + 70
pytestmark = pytest.mark.skipif(not compat.hands_over_states(), reason="vLLM hands over states from 0.32 on")
# vLLM makes blocks so long that a state fits, and processors with instructions for bfloat16 keep longer states.
BLOCK_TOKENS_CHOSEN = re.compile(r"Setting attention block size to (\d+) tokens")
BLOCK_TOKENS = 128  # where it need not
VLLM_CANNOT = "CPU GDN attention requires"  # 0.32, where the processor has no instructions for bfloat16


@dataclass(frozen=True)
class Model:
    family: Family
    dtype: str
    arguments: Mapping[str, object] = field(default_factory=dict)


MODELS_HERE = {
    "short convolutions": Model(Family.LFM2, "float32"),
    "linear attention": Model(Family.QWEN3_NEXT, "bfloat16"),
    # vLLM's own scan for CPUs (0.32) fails at a block's end within a step.
    "Mamba 2": Model(Family.GRANITE, "float32", {"max_num_batched_tokens": 256}),
}


@pytest.fixture(scope="module", params=MODELS_HERE)
def model_here(request: pytest.FixtureRequest) -> Model:
    return MODELS_HERE[request.param]


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trap") / "position"


@pytest.fixture(scope="module")
def engine(model_here: Model, store: Store, trap: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        small_model(MODELS, family=model_here.family, dtype=model_here.dtype, initializer_range=0.2),
        tmp_path_factory.mktemp("states") / "engine.log",
        transfer={
            **transfer_config(store.endpoint, admission="always"),
            "kv_connector": "FalsifyingConnector",
            "kv_connector_module_path": "tests.vllm.falsifying_connector",
        },
        hash_seed=HASH_SEED,
        arguments={
            **model_here.arguments,
            "dtype": model_here.dtype,
            "max_model_len": 4096,
            "disable_log_stats": False,
        },
        environment={TRAP_VARIABLE: str(trap), "PYTHONPATH": str(ROOT)},
    ) as running:
        try:
            running.generate(random_prompt(1, 8), max_tokens=1)
        except EngineDied:
            if VLLM_CANNOT not in running.log_text():
                raise
            pytest.skip(f"vLLM cannot run this model on this processor: {VLLM_CANNOT}")
        yield running


@pytest.fixture(scope="module")
def chunks(engine: Engine) -> int:
    """Of a prompt, the state's included."""
    chosen = BLOCK_TOKENS_CHOSEN.search(engine.log_text())
    return BOUNDARY // (int(chosen[1]) if chosen else BLOCK_TOKENS) + 1


def cold_tokens(engine: Engine, store: Store, chunks: int, prompt: list[int]) -> list[int]:
    """What the engine says when nothing is loaded: a salt of its own finds nothing."""

    def computed(salt: str | None) -> list[int]:
        engine.reset_prefix_cache()  # else a state is not offered
        return engine.generate(prompt, salt=salt).tokens

    tokens = store.until_committed(engine, chunks, lambda: computed("cold"))
    assert len(set(tokens)) > 4, "a model that repeats one token proves nothing"
    assert store.until_committed(engine, chunks, lambda: computed(None)) == tokens
    engine.reset_prefix_cache()
    return tokens


def test_a_prompt_is_served_from_the_chunks_of_its_attention_and_its_state(
    engine: Engine, store: Store, chunks: int
) -> None:
    prompt = random_prompt(60, PROMPT_TOKENS)
    expected = cold_tokens(engine, store, chunks, prompt)
    hits, loaded, failed = store.hits(), loaded_chunks(engine), store.failed_loads()
    assert engine.generate(prompt).tokens == expected
    store.wait_for_hits(hits + chunks)
    assert loaded_chunks(engine) == loaded + chunks
    # What follows the boundary is no part of it.
    other = prompt[:BOUNDARY] + random_prompt(61, 60)
    engine.reset_prefix_cache()
    warm = engine.generate(other)
    store.wait_for_hits(hits + 2 * chunks)
    assert warm.tokens == engine.generate(other, salt="cold").tokens
    assert store.failed_loads() == failed


@pytest.mark.parametrize("position", [0, 2], ids=["state", "attention"])
def test_a_failed_load_gives_the_right_tokens_and_the_engine_lives(
    position: int, engine: Engine, store: Store, chunks: int, trap: Path
) -> None:
    prompt = random_prompt(62 + position, PROMPT_TOKENS)
    expected = cold_tokens(engine, store, chunks, prompt)
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
    assert loaded_chunks(engine) == loaded + chunks
