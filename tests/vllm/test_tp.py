"""Engines of tensor parallel size 1 and 2 on one daemon: each is served from the chunks that the other wrote."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from connector.testing import Engine, random_prompt, small_model, transfer_config
from tests.vllm.support import ARGUMENTS, BLOCK_TOKENS, FULL_CHUNKS, HASH_SEED, MODELS, PROMPT_TOKENS, Store

TWO_KV_HEADS: Mapping[str, object] = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
# Sums are taken in another order on two ranks, so longer outputs may part.
TOKENS_ALIKE = 8


@pytest.fixture(scope="module")
def engines(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Engine]]:
    """By tensor parallel size. Without a cache of their own."""
    model, logs = small_model(MODELS, **TWO_KV_HEADS), tmp_path_factory.mktemp("tp")
    with ExitStack() as running:
        yield {tp_size: running.enter_context(_engine(model, tp_size, store, logs)) for tp_size in (2, 1)}


def _engine(model: Path, tp_size: int, store: Store, logs: Path) -> Engine:
    return Engine(
        model,
        logs / f"tp{tp_size}.log",
        transfer=transfer_config(store.endpoint, block_size=BLOCK_TOKENS, tp_lcm_size=2),
        hash_seed=HASH_SEED,
        arguments={
            **ARGUMENTS,
            "max_model_len": 4096,
            "tensor_parallel_size": tp_size,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
        },
        # On few cores vLLM must be told which of them each rank has.
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp_size == 2 else {},
    )


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_an_engine_is_served_from_the_chunks_of_another_tp_size(
    writer: int, reader: int, engines: dict[int, Engine], store: Store
) -> None:
    prompt = random_prompt(70 + writer, PROMPT_TOKENS)
    hits = store.hits()
    # What the reader says without the store: a salt of its own finds nothing.
    cold = store.generate_and_commit(engines[reader], prompt, salt="cold")
    written = store.generate_and_commit(engines[writer], prompt)
    assert store.hits() == hits

    warm = engines[reader].generate(prompt)

    store.wait_for_hits(hits + FULL_CHUNKS)
    assert store.failed_loads() == 0
    assert warm.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
    assert written.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
    assert len(set(cold.tokens[:TOKENS_ALIKE])) > 1, "a model that repeats one token proves nothing"
