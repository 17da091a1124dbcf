"""Real engines on a daemon with a filesystem tier: what was computed survives a stop of everything, however an engine
waits for it, and a disk that hangs costs a recompute."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from connector.testing import Completion, Engine, random_prompt
from kvstore import admin
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.testing import Daemon, running_daemon
from tests.hanging_disk import HangingDisk
from tests.vllm.support import (
    CPU_BYTES,
    FULL_CHUNKS,
    HASH_SEED,
    PROMPT_TOKENS,
    Store,
    loaded_chunks,
    serving_engine,
)

PATIENT = {"prefetch_policy": "wait_complete"}  # how long a busy machine takes is not the question here
LATE_MS = 500.0  # an engine takes a daemon for hung whose heartbeat is twice as old, and does not ask it for the disk
ATTEMPTS = 5
WAIT_S = 60.0


class Pulse:
    """Looks at the daemon's heartbeat all the time, as an engine does when a request comes."""

    def __init__(self, daemon: Daemon) -> None:
        attachment = Attachment(role=Role.CLIENT, hash_seed=HASH_SEED, kinds=(Kind({"model": "none"}, 4096),))
        self._session = Session.attach(daemon.endpoint, attachment)
        self._worst_ms = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ending.wait(0.01):
            self._worst_ms = max(self._worst_ms, self._session.table.heartbeat_age_ms())

    def worst_ms(self) -> float:
        """Since the last call."""
        worst, self._worst_ms = self._worst_ms, 0.0
        return worst

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._session.close()


@contextmanager
def warm_daemon(flags: list[str], environment: Mapping[str, str] | None = None) -> Iterator[tuple[Store, Pulse]]:
    """A daemon that has read its index and holds the prompt's chunks on disk, and nothing in memory."""
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED, arguments=flags, environment=environment) as daemon:
        until(lambda: daemon.tier("fs")["chunks"] == FULL_CHUNKS, "the chunks on disk are known")
        assert daemon.tier()["chunks"] == 0
        pulse = Pulse(daemon)
        try:
            yield Store(daemon), pulse
        finally:
            pulse.close()


def until(happened: object, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.02)


def from_disk(engine: Engine, store: Store, pulse: Pulse, prompt: list[int]) -> Completion:
    """The prompt's answer, served from disk. On a machine so busy that the daemon's heart stood still, an engine is
    right not to wait for it: then everything in memory is forgotten, and the prompt comes again."""
    for _ in range(ATTEMPTS):
        pulse.worst_ms()
        before = loaded_chunks(engine)
        completion = engine.generate(prompt)
        found = loaded_chunks(engine) - before
        if found == FULL_CHUNKS:
            return completion
        worst_ms = pulse.worst_ms()
        assert worst_ms > LATE_MS, f"{found} chunks of {FULL_CHUNKS}, and the heartbeat was never older than {worst_ms}"
        engine.reset_prefix_cache()
        until(lambda: store.daemon.tier()["granted_bytes"] == 0, "nothing is being stored")
        admin.remove(store.endpoint, admin.selection(tier="cpu"))
    raise AssertionError(f"the daemon's heart stood still at each of {ATTEMPTS} attempts")


@pytest.fixture(scope="module")
def filled(
    model: Path, oracle: Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], list[int], list[int]]:
    """Flags of a daemon whose directory has the prompt's chunks, the prompt, and the tokens that follow it."""
    folder = tmp_path_factory.mktemp("filled")
    prompt = random_prompt(70, PROMPT_TOKENS)
    flags = ["--fs-dir", str(folder / "fs"), "--fs-bytes", "512MiB"]
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED, arguments=flags) as daemon:
        store = Store(daemon)
        with serving_engine(model, store, folder) as engine:
            cold = store.generate_and_commit(engine, prompt)
        until(lambda: daemon.tier("fs")["chunks"] == FULL_CHUNKS, "everything is on disk")
    assert cold.tokens == oracle.generate(prompt).tokens
    return flags, prompt, cold.tokens


def test_after_everything_was_stopped_the_prompt_is_served_from_disk(
    model: Path, filled: tuple[list[str], list[int], list[int]], tmp_path: Path
) -> None:
    flags, prompt, tokens = filled
    with warm_daemon(flags) as (store, pulse), serving_engine(model, store, tmp_path, extra=PATIENT) as engine:
        assert from_disk(engine, store, pulse, prompt).tokens == tokens
        store.wait_for_fs_hits(FULL_CHUNKS)
        engine.reset_prefix_cache()
        hits = store.hits()
        assert engine.generate(prompt).tokens == tokens
        store.wait_for_hits(hits + FULL_CHUNKS)  # by now they are in memory
        assert store.daemon.tier("fs")["hits"] == FULL_CHUNKS


def test_best_effort_does_not_wait_but_the_next_request_finds_the_chunks_in_memory(
    model: Path, filled: tuple[list[str], list[int], list[int]], tmp_path: Path
) -> None:
    flags, prompt, tokens = filled
    extra = {"prefetch_policy": "best_effort"}
    with warm_daemon(flags) as (store, _), serving_engine(model, store, tmp_path, extra=extra) as engine:
        assert engine.generate(prompt).tokens == tokens
        assert loaded_chunks(engine) == 0
        until(lambda: store.daemon.tier()["chunks"] == FULL_CHUNKS, "they are in memory, read or computed")
        engine.reset_prefix_cache()
        assert engine.generate(prompt).tokens == tokens
        assert loaded_chunks(engine) == FULL_CHUNKS
        store.wait_for_hits(FULL_CHUNKS)
        assert (store.daemon.tier("fs")["hits"], store.failed_loads()) == (0, 0)
        assert store.daemon.tier("fs")["chunks"] == FULL_CHUNKS  # none was written twice


def test_timeout_waits_for_the_disk_but_no_longer_than_it_says_when_the_disk_hangs(
    model: Path, filled: tuple[list[str], list[int], list[int]], tmp_path: Path
) -> None:
    flags, prompt, tokens = filled
    disk = HangingDisk(tmp_path)
    extra = {"prefetch_policy": "timeout", "prefetch_timeout_ms": 2_000}
    with (
        warm_daemon(flags, disk.environment) as (store, pulse),
        serving_engine(model, store, tmp_path, extra=extra) as engine,
    ):
        disk.hang()
        try:
            assert engine.generate(prompt).tokens == tokens  # computed again
            assert loaded_chunks(engine) == 0
        finally:
            disk.answer()
        until(lambda: store.daemon.tier()["granted_bytes"] == 0, "the reads are back, and the chunks stored")
        assert store.daemon.tier("fs")["hits"] == 0
        until(lambda: admin.check_data(store.endpoint) == [], "the disk is trusted again")
        engine.reset_prefix_cache()
        admin.remove(store.endpoint, admin.selection(tier="cpu"))
        assert from_disk(engine, store, pulse, prompt).tokens == tokens
        assert store.daemon.tier("fs")["corruptions"] == 0
