"""Engines of tensor parallel size 1 and 2 on one daemon: each is served from the chunks that the other wrote."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from connector.testing import Engine, random_prompt, small_model
from tests.vllm.support import ARGUMENTS, FULL_CHUNKS, HASH_SEED, MODELS, PROMPT_TOKENS, Store

HEADS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8}
# Sums are taken in another order on two ranks, so longer outputs may part.
TOKENS_ALIKE = 8


@pytest.fixture(scope="module")
def engines(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Engine]]:
    """By tensor parallel size."""
    model, logs = small_model(MODELS, **HEADS), tmp_path_factory.mktemp("tp")
    with ExitStack() as running:
        yield {
            tp_size: running.enter_context(
                Engine(
                    model,
                    logs / f"tp{tp_size}.log",
                    transfer=store.transfer_config(tp_lcm_size=2),
                    hash_seed=HASH_SEED,
                    arguments={**ARGUMENTS, "max_model_len": 4096, "tensor_parallel_size": tp_size},
                    # On few cores vLLM must be told which of them each rank has.
                    environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp_size == 2 else {},
                )
            )
            for tp_size in (2, 1)
        }


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_an_engine_is_served_from_the_chunks_of_another_tp_size(
    writer: int, reader: int, engines: dict[int, Engine], store: Store
) -> None:
    prompt = random_prompt(70 + writer, PROMPT_TOKENS)
    hits = store.hits()
    # What the reader says without the store: a salt of its own finds nothing.
    cold = store.generate_and_commit(engines[reader], prompt, salt="cold")
    engines[reader].reset_prefix_cache()
    written = store.generate_and_commit(engines[writer], prompt)
    assert store.hits() == hits

    warm = engines[reader].generate(prompt)

    store.wait_for_hits(hits + FULL_CHUNKS)
    assert store.failed_loads() == 0
    assert warm.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
    assert written.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
    assert len(set(cold.tokens[:TOKENS_ALIKE])) > 1, "a model that repeats one token proves nothing"
