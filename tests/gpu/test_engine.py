"""A real engine on a GPU, graphs captured: what one stores the next one loads, with the same tokens.

Has never run: no GPU was to be had when it was written.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from connector.config import CopyBackend
from connector.testing import Engine, random_prompt, small_model, transfer_config
from kvstore.testing import running_daemon
from tests.gpu.device import no_gpu
from tests.vllm.support import HASH_SEED, MODEL, MODELS, Store

BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 4
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
PROMPT_TOKENS = 8 * CHUNK_TOKENS + 70
FULL_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
PROMPTS = 4
ARGUMENTS = {
    "block_size": BLOCK_TOKENS,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.3,
    "enforce_eager": False,  # graphs are captured while the arena is being page-locked
    "num_gpu_blocks_override": 1024,
}

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("backend", list(CopyBackend))
def test_an_engine_that_starts_after_the_first_has_stopped_is_served(backend: CopyBackend, tmp_path: Path) -> None:
    if reason := no_gpu():
        pytest.skip(f"no GPU: {reason}")
    model = small_model(MODELS, **MODEL)
    prompts = [random_prompt(seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
    with Engine(model, tmp_path / "oracle.log", arguments=ARGUMENTS) as oracle:
        expected = [completion.tokens for completion in oracle.generate_many(prompts)]
    with running_daemon(cpu_bytes="1GiB", hash_seed=HASH_SEED) as daemon:
        store = Store(daemon)
        transfer = transfer_config(
            store.endpoint, untried_cuda=True, copy_backend=backend.value, blocks_per_chunk=BLOCKS_PER_CHUNK,
            admission="always",
        )  # fmt: skip
        with Engine(model, tmp_path / "cold.log", transfer, HASH_SEED, ARGUMENTS) as engine:
            assert [completion.tokens for completion in engine.generate_many(prompts)] == expected
            store.wait_for_stores(PROMPTS * FULL_CHUNKS)
            assert "no GPU had run" in engine.log_text()
        hits = store.hits()
        with Engine(model, tmp_path / "warm.log", transfer, HASH_SEED, ARGUMENTS) as engine:
            assert [completion.tokens for completion in engine.generate_many(prompts)] == expected
            store.wait_for_hits(hits + PROMPTS * FULL_CHUNKS)
        assert store.failed_loads() == 0


def test_an_engine_that_has_slept_stores_and_loads_as_before(tmp_path: Path) -> None:
    """Its KV cache lies in other memory then, at the same addresses."""
    if reason := no_gpu():
        pytest.skip(f"no GPU: {reason}")
    model = small_model(MODELS, **MODEL)
    prompt = random_prompt(PROMPTS, PROMPT_TOKENS)
    with running_daemon(cpu_bytes="1GiB", hash_seed=HASH_SEED) as daemon:
        store = Store(daemon)
        transfer = transfer_config(
            store.endpoint, untried_cuda=True, blocks_per_chunk=BLOCKS_PER_CHUNK, admission="always"
        )
        arguments = {**ARGUMENTS, "enable_sleep_mode": True}
        with Engine(model, tmp_path / "engine.log", transfer, HASH_SEED, arguments) as engine:
            expected = engine.generate(prompt).tokens
            store.wait_for_stores(FULL_CHUNKS)
            for turn in range(2, 4):
                engine.sleep(1)
                engine.wake_up()
                assert engine.generate(prompt).tokens == expected
                store.wait_for_stores(turn * FULL_CHUNKS)
                hits = store.hits()
                engine.reset_prefix_cache()
                assert engine.generate(prompt).tokens == expected
                store.wait_for_hits(hits + FULL_CHUNKS)
        assert store.failed_loads() == 0
