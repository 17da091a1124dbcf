"""A real engine decides by what it has measured: it leaves a disk that is slower than recomputing, and comes back."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from connector.testing import Completion, Engine, random_prompt, small_model
from kvstore import admin
from kvstore.cli import app
from kvstore.costmodel import StoreReason
from kvstore.testing import running_daemon
from kvstore.throttle import VARIABLE
from tests.vllm.support import (
    BLOCK_TOKENS,
    HASH_SEED,
    MODELS,
    Store,
    loaded_chunks,
    serving_engine,
    wait_up_to,
)

PROMPT_TOKENS = 8 * BLOCK_TOKENS + 70
CHUNKS = PROMPT_TOKENS // BLOCK_TOKENS
PROMPTS = 22
REQUESTS_MAX = 20  # until it has changed its mind
TIMES_SLOWER = 10  # the throttled disk than recomputing
CPU_BYTES = FS_BYTES = "1GiB"
UNIQUE, UNIQUE_LAST = 200, 50
# Waiting is bounded by what recomputing takes, whatever the policy allows.
MODELLED = {"admission": "model", "prefetch_policy": "wait_complete"}


@pytest.fixture(scope="module")
def wide_model() -> Path:
    """With as many KV heads as heads, so that a chunk has a mebibyte."""
    return small_model(MODELS)


@dataclass
class Disk:
    """A store whose prompts are all on disk, and how fast that is."""

    store: Store
    rate_file: Path
    engine: Engine
    cold: list[Completion]

    def throttle(self) -> None:
        chunk_bytes = self.store.daemon.tier("fs")["used_bytes"] / self.store.daemon.tier("fs")["chunks"]
        seconds = TIMES_SLOWER * median(completion.ttft_s for completion in self.cold)
        self.rate_file.write_text(str(CHUNKS * chunk_bytes / seconds))

    def unthrottle(self) -> None:
        self.rate_file.write_text("")

    def only_on_disk(self) -> None:
        """Nothing is in memory any more, and nothing is on its way there."""
        daemon = self.store.daemon

        def idle() -> int:
            tier = daemon.tier()
            return int(tier["granted_bytes"] == tier["pinned_bytes"] == 0)

        # What came from disk just before a request stopped waiting stays pinned as long as a lease lasts, 30 s.
        assert any(wait_up_to(idle, 1) for _ in range(3)), daemon.tier()
        admin.remove(daemon.endpoint, admin.selection(tier="cpu"))
        assert daemon.tier()["chunks"] == 0

    def load_decisions(self) -> int:
        counts = self.store.daemon.stats()["decisions"]
        return sum(count["decisions"] for count in counts if count["kind"] == "load")

    def requests_until(self, *, loads: bool) -> int:
        """Prompts one after the other, each of them on disk only, until one is loaded (or declined)."""
        self.only_on_disk()
        for i in range(REQUESTS_MAX):
            self.engine.reset_prefix_cache()
            before, told = loaded_chunks(self.engine), self.load_decisions()
            assert self.engine.generate(prompt(i)).tokens == self.cold[i].tokens, f"prompt {i}"
            loaded = loaded_chunks(self.engine) - before
            if loads and loaded == CHUNKS:
                return i + 1
            assert wait_up_to(self.load_decisions, told + 1) > told
            if not loads and decisions(self)[-1]["reason"] == "RECOMPUTE_IS_QUICKER":
                assert loaded == 0
                return i + 1
        raise AssertionError(f"after {REQUESTS_MAX} requests it still {'declines' if loads else 'loads'}")


def prompt(i: int) -> list[int]:
    return random_prompt(9_000 + i, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def disk(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    folder = tmp_path_factory.mktemp("admission")
    rate_file = folder / "rate"
    rate_file.touch()
    flags = ["--fs-dir", str(folder / "fs"), "--fs-bytes", FS_BYTES]
    environment = {VARIABLE: str(rate_file)}
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED, arguments=flags, environment=environment) as daemon:
        store = Store(daemon)
        with serving_engine(wide_model, store, folder, extra=MODELLED) as engine:
            cold = [store.generate_and_commit(engine, prompt(i)) for i in range(PROMPTS)]
            written = wait_up_to(lambda: daemon.tier("fs")["chunks"], PROMPTS * CHUNKS)
            assert written == PROMPTS * CHUNKS
            yield Disk(store, rate_file, engine, cold)


def decisions(disk: Disk, kind: str = "load") -> list[dict[str, object]]:
    found = admin.explain(disk.store.endpoint, "0")["decisions"]  # every request here is called "0-" and something
    assert isinstance(found, list)
    return [decision for decision in found if decision["kind"] == kind]


def test_it_declines_a_disk_slower_than_recomputing_and_comes_back_when_it_is_quick_and_so_on(disk: Disk) -> None:
    disk.throttle()
    disk.requests_until(loads=False)
    # From here on it knows: what it declines costs no wait, and the tokens are right.
    assert disk.requests_until(loads=False) == 1
    disk.unthrottle()
    disk.requests_until(loads=True)
    assert disk.requests_until(loads=True) == 1
    disk.throttle()
    disk.requests_until(loads=False)


def test_what_was_predicted_and_what_came_of_it_can_be_asked(disk: Disk) -> None:
    told = decisions(disk)
    told = [decision for decision in told if decision["hit_tokens"] == CHUNKS * BLOCK_TOKENS]
    loaded = [decision for decision in told if decision["outcome"] == "loaded"]
    recomputed = [decision for decision in told if decision["outcome"] == "recomputed"]
    assert loaded
    assert recomputed
    for decision in (*loaded, *recomputed):
        assert decision["first_token_s"]
        assert decision["recompute_s"]
        assert [each["tier"] for each in decision["alternatives"]] == ["fs"]
    assert all(decision["load_s"] and decision["saved_s"] for decision in loaded)
    stats = disk.store.daemon.stats()
    assert {count["reason"] for count in stats["decisions"]} >= {"RECOMPUTE_IS_QUICKER", "LOAD_IS_QUICKER"}
    [balance] = [balance for balance in stats["balances"] if balance["tier"] == "fs"]
    assert balance["loads"] >= len(loaded)


def test_what_a_slow_disk_would_give_back_too_late_is_stored_in_memory_only_and_it_is_said(disk: Disk) -> None:
    disk.throttle()
    disk.requests_until(loads=False)
    fs_chunks = disk.store.daemon.tier("fs")["chunks"]
    stored = disk.store.stores()
    for _ in range(2):  # the second time it is worth its place in memory in any case
        disk.engine.reset_prefix_cache()
        disk.engine.generate(prompt(PROMPTS))
    assert wait_up_to(disk.store.stores, stored + CHUNKS) == stored + CHUNKS
    decision = decisions(disk, "store")[-1]
    assert (decision["tier"], decision["end_tokens"]) == ("cpu", CHUNKS * BLOCK_TOKENS)
    assert (decision["disk_reason"], decision["disk_end_tokens"]) == (StoreReason.NOT_WORTH_IT, 0)
    said = CliRunner().invoke(app, ["explain", "0", "--endpoint", disk.store.endpoint]).stdout
    assert f"{CHUNKS} chunks in memory only" in said

    disk.unthrottle()
    disk.requests_until(loads=True)  # of a memory that was emptied first
    assert disk.store.daemon.tier("fs")["chunks"] == fs_chunks
    disk.engine.reset_prefix_cache()
    disk.engine.generate(prompt(PROMPTS))
    written = wait_up_to(lambda: disk.store.daemon.tier("fs")["chunks"], fs_chunks + CHUNKS)
    assert written == fs_chunks + CHUNKS


def test_prompts_that_never_repeat_are_not_stored_for_long(wide_model: Path, tmp_path: Path) -> None:
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED) as daemon:
        store = Store(daemon)
        with serving_engine(wide_model, store, tmp_path, extra=MODELLED) as engine:
            for i in range(UNIQUE - UNIQUE_LAST):
                engine.generate(random_prompt(20_000 + i, PROMPT_TOKENS), max_tokens=1)
            before = store.stores()
            assert before >= CHUNKS
            for i in range(UNIQUE - UNIQUE_LAST, UNIQUE):
                engine.generate(random_prompt(20_000 + i, PROMPT_TOKENS), max_tokens=1)
            assert store.stores() - before <= UNIQUE_LAST * CHUNKS // 100
            # What was stored while too little was known is of use all the same.
            engine.reset_prefix_cache()
            engine.generate(random_prompt(20_000, PROMPT_TOKENS))
            assert wait_up_to(store.hits, CHUNKS) == CHUNKS
