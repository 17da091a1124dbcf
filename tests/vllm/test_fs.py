"""Real engines on a daemon with a filesystem tier: what was computed survives a stop of everything."""

from pathlib import Path

from connector.testing import Engine, random_prompt
from kvstore.testing import running_daemon
from tests.vllm.support import CPU_BYTES, FULL_CHUNKS, HASH_SEED, PROMPT_TOKENS, Store, loaded_chunks, serving_engine

PATIENT = {"prefetch_policy": "wait_complete"}  # how long a busy machine takes is not the question here


def test_after_everything_was_stopped_the_prompt_is_served_from_disk(
    model: Path, oracle: Engine, tmp_path: Path
) -> None:
    prompt = random_prompt(70, PROMPT_TOKENS)
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "512MiB"]
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED, arguments=flags) as daemon:
        store = Store(daemon)
        with serving_engine(model, store, tmp_path) as engine:
            cold = store.generate_and_commit(engine, prompt)
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED, arguments=flags) as daemon:
        store = Store(daemon)
        with serving_engine(model, store, tmp_path, extra=PATIENT) as engine:
            warm = engine.generate(prompt)
            store.wait_for_fs_hits(FULL_CHUNKS)
            assert loaded_chunks(engine) == FULL_CHUNKS
            engine.reset_prefix_cache()
            assert engine.generate(prompt).tokens == cold.tokens
            store.wait_for_hits(FULL_CHUNKS)  # by now they are in memory
        assert daemon.tier("fs")["hits"] == FULL_CHUNKS
    assert warm.tokens == cold.tokens == oracle.generate(prompt).tokens
