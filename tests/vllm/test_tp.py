"""Engines of tensor parallel size 1 and 2 on one daemon: each is served from the chunks that the other wrote.

Where there are fewer KV heads than ranks, both ranks hold the same bytes: a chunk has them once, the ranks take turns
to write, and both read.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

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

# Sums are taken in another order on two ranks, so longer outputs may part.
TOKENS_ALIKE = 8
SCRIBBLE = 0x3F


@dataclass(frozen=True)
class Model:
    settings: Mapping[str, object]
    family: Family = Family.LLAMA
    arguments: Mapping[str, object] = field(default_factory=dict)

    def engine(self, tp_size: int, store: Store, logs: Path) -> Engine:
        """Without a cache of its own, which vLLM does not have for MLA on every CPU."""
        return Engine(
            small_model(MODELS, family=self.family, **self.settings),
            logs / f"tp{tp_size}.log",
            # In tokens: for MLA vLLM may choose blocks of its own.
            transfer=transfer_config(store.endpoint, block_size=BLOCK_TOKENS, tp_lcm_size=2),
            hash_seed=HASH_SEED,
            arguments={
                **ARGUMENTS,
                **self.arguments,
                "max_model_len": 4096,
                "tensor_parallel_size": tp_size,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
            },
            # On few cores vLLM must be told which of them each rank has.
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp_size == 2 else {},
        )


MODELS_HERE = {
    "two KV heads": Model({"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "one KV head": Model({"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1}),
    # vLLM's own rotary kernel for CPUs (0.32) turns MLA's queries and keys by wrong angles (docs/decisions/020).
    # And on a processor with AMX it would take the backend for AMX, which then fails, for it has none for float32.
    "MLA": Model(
        {},
        Family.DEEPSEEK_V2,
        {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}, "attention_backend": "CPU_MLA"},
    ),
}


@pytest.fixture(scope="module", params=MODELS_HERE)
def engines(
    request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Engine]]:
    """By tensor parallel size."""
    model, logs = MODELS_HERE[request.param], tmp_path_factory.mktemp("tp")
    with ExitStack() as running:
        yield {tp_size: running.enter_context(model.engine(tp_size, store, logs)) for tp_size in (2, 1)}


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_an_engine_is_served_from_the_chunks_of_another_tp_size(
    writer: int, reader: int, engines: dict[int, Engine], store: Store
) -> None:
    prompt = random_prompt(70 + writer, PROMPT_TOKENS)
    hits, loaded = store.hits(), loaded_chunks(engines[reader])
    # What the reader says without the store: a salt of its own finds nothing.
    cold = store.generate_and_commit(engines[reader], prompt, salt="cold")
    written = store.generate_and_commit(engines[writer], prompt)
    assert store.hits() == hits

    warm = engines[reader].generate(prompt)

    store.wait_for_hits(hits + FULL_CHUNKS)
    assert loaded_chunks(engines[reader]) == loaded + FULL_CHUNKS
    assert store.failed_loads() == 0
    assert warm.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
    assert written.tokens[:TOKENS_ALIKE] == cold.tokens[:TOKENS_ALIKE]
    # The control: other bytes give other tokens.
    _scribble(store)
    assert engines[reader].generate(prompt).tokens[:TOKENS_ALIKE] != cold.tokens[:TOKENS_ALIKE]
    store.wait_for_hits(hits + 2 * FULL_CHUNKS)


def _scribble(store: Store) -> None:
    attachment = Attachment(role=Role.CLIENT, hash_seed=HASH_SEED, kinds=(Kind({"made": "to scribble"}, 64 << 10),))
    session = Session.attach(store.endpoint, attachment)
    try:
        fill(session.arena.address, session.arena.nbytes, SCRIBBLE)
    finally:
        session.close()
