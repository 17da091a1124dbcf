"""What the real-engine tests share: one small model's settings, a daemon with its counters, and engines on it."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from connector import metrics
from connector.testing import Completion, Engine, transfer_config
from kvstore.testing import Daemon

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "models"
# Few heads: on a CPU attention over 32,768 tokens costs minutes with more.
MODEL: Mapping[str, object] = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
BLOCK_TOKENS = 128
PROMPT_TOKENS = 8 * BLOCK_TOKENS + 70  # with 16 more, still no ninth full chunk
FULL_CHUNKS = PROMPT_TOKENS // BLOCK_TOKENS
ARGUMENTS: Mapping[str, object] = {"block_size": BLOCK_TOKENS, "max_model_len": 40_960}
CPU_BYTES = "512MiB"  # a sixteenth of it is what two steps of 8,192 tokens write
HASH_SEED = "0"
COUNT_S_MAX = 20.0
OFFERS_MAX = 4  # of one prompt, where slots come too late
NO_CHUNK = (1, 2, 3)  # a prompt too short for one
T = TypeVar("T")
COUNT_INTERVAL_S = 0.02


@dataclass(frozen=True)
class Store:
    """A daemon in a process of its own, and what it counted."""

    daemon: Daemon

    @property
    def endpoint(self) -> str:
        return self.daemon.endpoint

    def hits(self) -> int:
        return self.daemon.tier()["hits"]

    def misses(self) -> int:
        return self.daemon.tier()["misses"]

    def stores(self) -> int:
        return self._counter("stores")

    def failed_loads(self) -> int:
        return self._counter("failed_loads")

    def _counter(self, name: str) -> int:
        value = self.daemon.stats()[name]
        assert isinstance(value, int)
        return value

    def wait_for_hits(self, count: int) -> None:
        _wait_for(self.hits, count, "hits")

    def wait_for_fs_hits(self, count: int) -> None:
        _wait_for(lambda: self.daemon.tier("fs")["hits"], count, "hits of the fs tier")

    def wait_for_misses(self, count: int) -> None:
        _wait_for(self.misses, count, "misses")

    def wait_for_stores(self, count: int) -> None:
        _wait_for(self.stores, count, "stores")

    def wait_for_failed_loads(self, count: int) -> None:
        _wait_for(self.failed_loads, count, "failed loads")

    def generate_and_commit(self, engine: Engine, prompt: Sequence[int], *, salt: str | None = None) -> Completion:
        """A prompt that the store has no part of, until all its full chunks are in the store."""
        return self.until_committed(engine, len(prompt) // BLOCK_TOKENS, lambda: engine.generate(prompt, salt=salt))

    def until_committed(self, engine: Engine, chunks: int, offer: Callable[[], T]) -> T:
        """What the first `offer` returned, once so many more chunks have been stored.

        Where the machine holds the daemon up for longer than a request lasts, no slot comes in time, and the engine
        counts what it gave up. It is then asked once more: also what is in its own cache is offered to the store."""
        expected = self.stores() + chunks
        refused = refused_chunks(engine)
        completion = offer()
        for _ in range(OFFERS_MAX - 1):
            if (found := wait_up_to(self.stores, expected)) >= expected:
                break
            engine.generate(NO_CHUNK, max_tokens=1)  # counts travel with the next step
            given_up = refused_chunks(engine) - refused
            assert given_up > 0, f"{found} stores after {COUNT_S_MAX:.0f} s, not {expected}, and none was given up"
            refused += given_up
            offer()
        self.wait_for_stores(expected)
        return completion

    def transfer_config(self, **extra: object) -> dict[str, object]:
        """What a store or load does is tested, not whether it pays, unless `extra` says otherwise."""
        return transfer_config(self.endpoint, blocks_per_chunk=1, **{"admission": "always", **extra})


def wait_up_to(count: Callable[[], int], expected: int) -> int:
    deadline = time.monotonic() + COUNT_S_MAX
    pause = threading.Event()
    while (found := count()) < expected and time.monotonic() < deadline:
        pause.wait(COUNT_INTERVAL_S)  # nothing tells a third process of another one's counter
    return found


def _wait_for(count: Callable[[], int], expected: int, what: str) -> None:
    """The daemon hears of a step a moment after the engine has answered. More than expected is as wrong as less."""
    found = wait_up_to(count, expected)
    assert found == expected, f"{found} {what} after {COUNT_S_MAX:.0f} s at the most, not {expected}"


def serving_engine(
    model: Path,
    store: Store,
    folder: Path,
    *,
    connector: tuple[str, str] = ("KVStoreConnector", "connector"),
    environment: Mapping[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
) -> Engine:
    """Statistics on, as in `vllm serve`; the log is in `folder`. `extra`: further keys of the connector's."""
    name, module_path = connector
    return Engine(
        model,
        folder / "engine.log",
        transfer={
            **store.transfer_config(**(extra or {})),
            "kv_connector": name,
            "kv_connector_module_path": module_path,
        },
        hash_seed=HASH_SEED,
        arguments={**ARGUMENTS, "disable_log_stats": False},
        environment=environment or {},
    )


def loaded_chunks(engine: Engine) -> int:
    """By the connector's own series in vLLM's registry."""
    return int(engine.metrics().get(f"{metrics.LOADED_CHUNKS}_total", 0))


def failed_load_chunks(engine: Engine) -> int:
    return int(engine.metrics().get(f"{metrics.FAILED_LOADS}_total", 0))


def failed_store_chunks(engine: Engine) -> int:
    return int(engine.metrics().get(f"{metrics.FAILED_STORES}_total", 0))


def refused_chunks(engine: Engine) -> int:
    """What the engine gave up storing, by its own count; 0 for an engine without statistics."""
    return int(engine.metrics().get(f"{metrics.REFUSED_STORES}_total", 0))
