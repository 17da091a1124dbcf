"""Pipeline stages keep other layers each; a chunk holds those of all, in a namespace that names the split."""

from pathlib import Path

import pytest

from connector.testing import Engine, EngineDied, random_prompt
from tests.vllm.support import ARGUMENTS, FULL_CHUNKS, HASH_SEED, PROMPT_TOKENS, Store

STAGES = 2  # of the model's three layers
VLLM_CANNOT = "assert self.intermediate_tensors is not None"  # 0.32 on the CPU platform, without a connector


def test_stages_are_served_from_what_they_stored_and_from_nobody_elses(
    model: Path, store: Store, tmp_path: Path
) -> None:
    def engine(stages: int, *, connected: bool = True) -> Engine:
        return Engine(
            model,
            tmp_path / f"{stages}.log",
            transfer=store.transfer_config() if connected else None,
            hash_seed=HASH_SEED,
            arguments={
                **ARGUMENTS,
                "max_model_len": 4096,
                "pipeline_parallel_size": stages,
                "disable_log_stats": False,
            },
            environment={"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(stages)))},
        )

    prompt = random_prompt(95, PROMPT_TOKENS)
    with engine(STAGES, connected=False) as alone:
        try:
            alone.generate(prompt)
        except EngineDied:
            if VLLM_CANNOT not in alone.log_text():
                raise
            pytest.skip(f"vLLM's own engine with {STAGES} stages ends here without a connector: {VLLM_CANNOT}")
    with engine(STAGES) as staged:
        cold = store.generate_and_commit(staged, prompt)
        staged.reset_prefix_cache()
        warm = staged.generate(prompt)
        store.wait_for_hits(FULL_CHUNKS)
        assert warm.tokens == cold.tokens
        assert len(set(cold.tokens)) > 4, "a model that repeats one token proves nothing"
    with engine(1) as whole:
        assert store.generate_and_commit(whole, prompt).tokens[:8] == cold.tokens[:8]
    assert store.hits() == FULL_CHUNKS
    assert store.failed_loads() == 0
