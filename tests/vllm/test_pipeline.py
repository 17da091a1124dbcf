"""Pipeline stages keep other layers each; a chunk holds those of all, in a namespace that names the split."""

from pathlib import Path

from connector.testing import Engine, random_prompt
from tests.vllm.support import ARGUMENTS, FULL_CHUNKS, HASH_SEED, PROMPT_TOKENS, Store

STAGES = 2  # of the model's three layers


def test_stages_are_served_from_what_they_stored_and_from_nobody_elses(
    model: Path, store: Store, tmp_path: Path
) -> None:
    def engine(stages: int) -> Engine:
        return Engine(
            model,
            tmp_path / f"{stages}.log",
            transfer=store.transfer_config(),
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
