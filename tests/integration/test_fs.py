"""The filesystem tier behind a real daemon: written through, kept over restarts and kills, promoted, and never in the
way when its disk is full or gone."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from kvstore import admin
from kvstore import client as client_module
from kvstore.cli import app
from kvstore.client import Loaded, Lookup, Miss, Present, Rejected, RejectReason, StoreClient, Stored
from kvstore.errors import Unavailable
from kvstore.testing import Daemon, running_daemon, start_daemon
from kvstore.tiers.fs_format import slot_bytes_for
from tests.hanging_disk import HangingDisk
from tests.integration.conftest import (
    CHUNK_BYTES,
    WAIT_S,
    client_of,
    eventually,
    key,
    needs_root,
    payload,
)

NAMES = range(100)
KEYS = [key(name) for name in NAMES]
CHUNKS = {key(name): payload(name) for name in NAMES}
PAYLOADS = [payload(name) for name in NAMES]


@pytest.fixture
def fs_dir(tmp_path: Path) -> Path:
    return tmp_path / "fs"


def fs_flags(directory: Path, fs_bytes: int | str = "64MiB") -> list[str]:
    return ["--fs-dir", str(directory), "--fs-bytes", str(fs_bytes)]


def fs_tier(daemon: Daemon) -> dict[str, int]:
    return daemon.tier("fs")


def wait_for_disk(daemon: Daemon, chunks: int) -> None:
    eventually(lambda: fs_tier(daemon)["chunks"] == chunks, f"{chunks} chunks on disk")


def wait_until_warm(daemon: Daemon) -> None:
    """A daemon that stops before has nowhere to write to; one that stops after it writes first."""
    eventually(lambda: fs_tier(daemon)["ready_bytes"] > 0, "the tier is warm")


def wait_for_lookup(client: StoreClient, keys: Sequence[bytes], where: Lookup) -> None:
    wait_for_lookup_of(client, "salt", keys, where)


def wait_for_lookup_of(client: StoreClient, salt: str, keys: Sequence[bytes], where: Lookup) -> None:
    """The table is told of what a restart found in slices."""
    eventually(lambda: set(client.lookup(salt, keys)) == {where}, f"{where} for every key")


def settle(client: StoreClient) -> None:
    client._connection._steps.settle(WAIT_S)  # type: ignore[union-attr]


def test_what_was_put_is_served_from_disk_after_a_restart(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        assert set(client.put("salt", CHUNKS).values()) == {Stored()}
        namespaces = daemon.stats()["namespaces"]
    # A stop waits until everything is on disk. The salt still leads to the same tenant.
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon:
        eventually(lambda: daemon.stats()["namespaces"] == namespaces, "the documents are read again")
        with client_of(daemon) as client:
            wait_for_disk(daemon, 100)
            wait_for_lookup(client, KEYS, Lookup.FS)
            assert client.lookup("other salt", KEYS[:1]) == [Lookup.MISS]
            assert client.get("salt", [*KEYS, key(100)]) == [*PAYLOADS, None]
            assert set(client.lookup("salt", KEYS)) == {Lookup.CPU}
            assert client.get("salt", KEYS) == PAYLOADS
            settle(client)
            fs, cpu = fs_tier(daemon), daemon.tier()
            assert (fs["hits"], cpu["hits"], fs["misses"], cpu["misses"]) == (100, 100, 1, 1)
            assert (cpu["chunks"], cpu["granted_bytes"], cpu["pinned_bytes"]) == (100, 0, 0)


def test_what_was_on_disk_survives_a_kill(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_for_disk(daemon, 100)
        daemon.kill()
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        eventually(lambda: "from the index" in daemon.log() or "from their headers" in daemon.log(), "it is warm")
        found = fs_tier(daemon)["chunks"]  # those since the last index commit may be gone
        eventually(lambda: client.lookup("salt", KEYS).count(Lookup.FS) == found, "all of them are shown")
        got = client.get("salt", KEYS)
        assert sum(chunk is not None for chunk in got) == found
        assert all(chunk in (None, expected) for chunk, expected in zip(got, PAYLOADS, strict=True))
        assert fs_tier(daemon)["corruptions"] == 0


def test_a_kill_in_the_middle_of_writing_leaves_nothing_wrong(fs_dir: Path) -> None:
    for _ in range(3):
        with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
            client.put("salt", CHUNKS)
            daemon.kill()
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        got = client.get("salt", KEYS)
        assert all(chunk in (None, expected) for chunk, expected in zip(got, PAYLOADS, strict=True))
        assert set(client.put("salt", CHUNKS).values()) <= {Stored(), Present()}
        wait_for_disk(daemon, 100)
        assert client.get("salt", KEYS) == PAYLOADS
        assert fs_tier(daemon)["corruptions"] == 0


def test_evicted_chunks_stay_on_disk_and_come_back_through_a_small_arena(fs_dir: Path) -> None:
    slot_bytes = 12_288
    with (
        running_daemon(cpu_bytes=16 * slot_bytes, arguments=fs_flags(fs_dir)) as daemon,
        client_of(daemon) as client,
    ):
        for name in NAMES:  # one at a time, each on disk before the next may evict it
            client.put("salt", {key(name): payload(name)})
            wait_for_disk(daemon, name + 1)
        assert set(client.lookup("salt", KEYS)) == {Lookup.CPU, Lookup.FS}
        assert client.get("salt", KEYS) == PAYLOADS  # in rounds: the arena holds 16
        buffers = {key(name): bytearray(CHUNK_BYTES) for name in range(101)}
        outcomes = client.get_into("salt", buffers)
        assert outcomes == {key(name): Loaded() for name in NAMES} | {key(100): Miss()}
        assert [bytes(buffers[key(name)]) for name in NAMES] == PAYLOADS
        tier = fs_tier(daemon)
        assert (tier["chunks"], tier["evictions"], tier["corruptions"]) == (100, 0, 0)
        assert daemon.tier()["evictions"] > 80


def test_a_chunk_is_promoted_once_for_all_who_want_it(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_until_warm(daemon)
    with (
        running_daemon(arguments=fs_flags(fs_dir)) as daemon,
        client_of(daemon) as one,
        client_of(daemon) as two,
    ):
        wait_for_lookup(one, KEYS, Lookup.FS)
        got: dict[str, list[bytes | None]] = {}
        threads = [
            threading.Thread(target=lambda name=name, client=client: got.update({name: client.get("salt", KEYS)}))
            for name, client in (("one", one), ("two", two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert got == {"one": PAYLOADS, "two": PAYLOADS}
        assert daemon.tier()["chunks"] == 100
        settle(one)
        settle(two)
        assert fs_tier(daemon)["hits"] + daemon.tier()["hits"] == 200


def test_a_flipped_bit_on_disk_is_a_miss_counted_and_removed(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", {key(1): payload(1), key(2): payload(2)})
        wait_until_warm(daemon)
    flip(slab_with(fs_dir, payload(1)), payload(1))
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        wait_for_lookup(client, [key(1), key(2)], Lookup.FS)
        assert client.get("salt", [key(1), key(2)]) == [None, payload(2)]
        assert client.lookup("salt", [key(1), key(2)]) == [Lookup.MISS, Lookup.CPU]
        tier = fs_tier(daemon)
        assert (tier["corruptions"], tier["chunks"]) == (1, 1)
        assert client.put("salt", {key(1): payload(1)}) == {key(1): Stored()}
        wait_for_disk(daemon, 2)


def slab_with(fs_dir: Path, content: bytes) -> Path:
    [slab] = [path for path in fs_dir.iterdir() if path.stat().st_size > 1 << 19 and content in path.read_bytes()]
    return slab


def flip(slab: Path, content: bytes) -> None:
    """A bit of that payload, on disk."""
    at = slab.read_bytes().index(content) + 5_000
    with slab.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=WAIT_S)


def test_check_data_reads_everything_on_disk_and_forgets_what_has_gone_bad(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_until_warm(daemon)
    for name in (7, 8):
        flip(slab_with(fs_dir, payload(name)), payload(name))
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        wait_for_disk(daemon, 100)
        assert admin.check(daemon.endpoint) == []
        told: list[tuple[int, int]] = []
        problems = admin.check_data(daemon.endpoint, progress=lambda *numbers: told.append(numbers))
        assert len(problems) == 2
        assert all("not the bytes that were written" in problem for problem in problems)
        assert told[-1] == (100, 100)
        found = kvstore("check", "--data", "--json", "--endpoint", daemon.endpoint)
        assert (found.returncode, json.loads(found.stdout)) == (0, {"problems": []})
        tier = fs_tier(daemon)
        assert (tier["corruptions"], tier["quarantined_slots"], tier["chunks"]) == (2, 2, 98)
        assert tier["scrubbed_chunks"] == 198
        assert client.lookup("salt", KEYS[7:10]) == [Lookup.MISS, Lookup.MISS, Lookup.FS]


def test_check_data_ends_when_its_caller_hangs_up(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_for_disk(daemon, 100)
        command = [sys.executable, "-m", "kvstore.cli", "check", "--data", "--bytes-per-s", "100kB"]
        with subprocess.Popen([*command, "--endpoint", daemon.endpoint], stderr=subprocess.DEVNULL) as slow:
            eventually(lambda: fs_tier(daemon)["scrubbed_chunks"] > 0, "the first chunks are read")
            slow.kill()
        eventually(lambda: [s["role"] for s in daemon.stats()["sessions"]] == ["client", "admin"], "it has gone")  # type: ignore[attr-defined]
        assert fs_tier(daemon)["scrubbed_chunks"] < 100
        assert admin.check_data(daemon.endpoint) == []


def test_the_background_scrub_finds_what_has_gone_bad(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_until_warm(daemon)
    flip(slab_with(fs_dir, payload(7)), payload(7))
    with running_daemon(arguments=[*fs_flags(fs_dir), "--scrub-bytes-per-s", "100MB"]) as daemon:
        eventually(lambda: fs_tier(daemon)["scrubbed_chunks"] == 100, "every chunk is read")
        tier = fs_tier(daemon)
        assert (tier["corruptions"], tier["chunks"]) == (1, 99)


def test_what_an_operator_removed_is_in_no_tier_and_does_not_come_back(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        client.put("other", {key(1): payload(1)})
        wait_for_disk(daemon, 101)
        would = admin.remove(daemon.endpoint, admin.selection(salt="salt"), dry_run=True)
        removed = admin.remove(daemon.endpoint, admin.selection(salt="salt"))
        assert would == removed
        by_tier = removed["by_tier"]
        assert {name: tier["evicted_chunks"] for name, tier in by_tier.items()} == {"cpu": 100, "fs": 100}  # type: ignore[attr-defined]
        assert set(client.lookup("salt", KEYS)) == {Lookup.MISS}
        assert [row["tier"] for row in admin.chunks(daemon.endpoint, admin.selection(), limit=10)] == ["fs", "cpu"]
        assert (fs_tier(daemon)["removals"], fs_tier(daemon)["chunks"]) == (100, 1)
        admin.remove(daemon.endpoint, admin.selection(tier="cpu"))
        assert client.lookup("other", [key(1)]) == [Lookup.FS]
        daemon.kill()
    (fs_dir / "index.mdb").unlink(missing_ok=True)  # not even when all headers are read
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        wait_for_lookup_of(client, "other", [key(1)], Lookup.FS)
        assert set(client.lookup("salt", KEYS)) == {Lookup.MISS}
        assert client.get("other", [key(1)]) == [payload(1)]
        removed = admin.remove(daemon.endpoint, admin.selection(tier="fs"), nbytes=1)
        assert removed["evicted_chunks"] == 1


def test_a_second_daemon_on_the_same_directory_exits_3(fs_dir: Path, runtime_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon:
        second = start_daemon(runtime_dir=runtime_dir, arguments=fs_flags(fs_dir))
        assert second.process.wait(WAIT_S) == 3, second.log()
        assert str(fs_dir) in second.log()
        assert not (runtime_dir / "kvstore.sock").exists()
        assert fs_tier(daemon)["sick"] == ""


def test_a_directory_that_is_a_file_exits_2(tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "file").write_text("mine")
    daemon = start_daemon(runtime_dir=runtime_dir, arguments=fs_flags(tmp_path / "file"))
    assert daemon.process.wait(WAIT_S) == 2, daemon.log()
    assert str(tmp_path / "file") in daemon.log()
    assert (tmp_path / "file").read_text() == "mine"


@contextlib.contextmanager
def small_tmpfs(path: Path, nbytes: int) -> Iterator[None]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(path)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@needs_root
def test_a_full_disk_drops_stores_and_heals(tmp_path: Path) -> None:
    fs_dir = tmp_path / "small"
    with small_tmpfs(fs_dir, 8 << 20):
        ballast = fs_dir / "ballast"
        with running_daemon(arguments=fs_flags(fs_dir, "64MiB")) as daemon, client_of(daemon) as client:
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            assert set(client.put("salt", CHUNKS).values()) == {Stored()}
            eventually(lambda: fs_tier(daemon)["dropped_stores"] > 0, "stores are dropped")
            eventually(lambda: fs_tier(daemon)["sick"] != "", "the tier says that it is sick")
            assert client.get("salt", KEYS) == PAYLOADS
            assert tier_health(daemon) == health_pb2.HealthCheckResponse.NOT_SERVING
            ballast.unlink()

            names = iter(range(1000, 10_000))

            def heals() -> bool:
                name = next(names)
                client.put("salt", {key(name): payload(name)})
                return fs_tier(daemon)["sick"] == "" and fs_tier(daemon)["chunks"] > 0

            eventually(heals, "it takes stores again")


def tier_health(daemon: Daemon) -> int:
    """Once it has been looked at since."""
    with grpc.insecure_channel(daemon.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="tier/fs")

        def status() -> int:
            return stub.Check(request, timeout=WAIT_S).status

        eventually(lambda: status() == health_pb2.HealthCheckResponse.NOT_SERVING, "health says so")
        return status()


def test_a_directory_removed_under_load_costs_the_tier_only(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_for_disk(daemon, 100)
        shutil.rmtree(fs_dir)
        eventually(lambda: fs_tier(daemon)["sick"] != "", "the tier says so")
        assert client.get("salt", KEYS) == PAYLOADS
        assert client.put("salt", {key(100): payload(100)}) == {key(100): Stored()}
        os.mkdir(fs_dir, 0o700)
        eventually(lambda: fs_tier(daemon)["sick"] == "", "it is back")


def test_write_back_writes_before_it_evicts_and_all_of_it_at_a_stop(fs_dir: Path) -> None:
    flags = [*fs_flags(fs_dir), "--write-policy", "write_back", "--eviction-policy", "lru"]
    with (
        running_daemon(cpu_bytes=64 * 12_288, arguments=flags) as daemon,
        client_of(daemon) as client,
    ):
        client.put("salt", {key(name): payload(name) for name in range(8)})
        assert fs_tier(daemon)["chunks"] == 0
        for name in range(8, 100):
            client.put("salt", {key(name): payload(name)})
            if name >= 63:  # full: some of it is soon on disk
                eventually(lambda name=name: fs_tier(daemon)["chunks"] >= name - 64 + 4, "what goes next is written")
        # A slot that is granted in advance may cost a chunk that nobody had the time to write.
        evictions, dropped = daemon.tier()["evictions"], fs_tier(daemon)["dropped_stores"]
        assert evictions >= 36
        assert dropped <= evictions // 4
        assert fs_tier(daemon)["chunks"] < 100 - dropped
    with running_daemon(arguments=flags) as daemon, client_of(daemon) as client:
        wait_for_disk(daemon, 100 - dropped)
        got = client.get("salt", KEYS)
        assert got.count(None) == dropped
        assert all(chunk in (None, expected) for chunk, expected in zip(got, PAYLOADS, strict=True))


def test_selective_writes_what_was_used_again(fs_dir: Path) -> None:
    flags = [*fs_flags(fs_dir), "--write-policy", "selective"]
    with running_daemon(arguments=flags) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)

        def used_again() -> bool:
            assert client.get("salt", KEYS[:3]) == PAYLOADS[:3]
            return fs_tier(daemon)["chunks"] == 3

        eventually(used_again, "three chunks are on disk")
    with running_daemon(arguments=flags) as daemon:
        wait_for_disk(daemon, 3)


DISK_SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)


@pytest.mark.parametrize("noun", ["namespaces", "tenants"])
def test_a_chunk_in_both_tiers_is_listed_under_each(fs_dir: Path, noun: str) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", {key(1): payload(1)})
        wait_for_disk(daemon, 1)
        shown = CliRunner().invoke(app, ["ls", noun, "--endpoint", daemon.endpoint], env={"COLUMNS": "160"}).stdout
        header, first, second = (
            [cell.strip() for cell in re.split("[┃│]", line)]
            for line in shown.splitlines()
            if "┃" in line or "│" in line
        )
        tier, chunks = header.index("tier"), header.index("chunks")
        assert {(row[tier], row[chunks]) for row in (first, second)} == {("cpu", "1"), ("fs", "1")}


def test_a_quota_on_disk_survives_a_restart_and_costs_the_tenant_its_own_oldest(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        client.put("other", {key(1): payload(1)})
        wait_for_disk(daemon, 101)
        removed = admin.set_quota(daemon.endpoint, admin.selection(salt="salt", tier="fs"), 10 * DISK_SLOT_BYTES)
        assert removed["by_tier"]["fs"]["evicted_chunks"] == 90  # type: ignore[index]
        wait_for_disk(daemon, 11)
        assert client.get("salt", KEYS) == PAYLOADS  # memory has no quota
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        wait_for_disk(daemon, 11)
        assert [tier["tenants"] for tier in daemon.stats()["tiers"]] == [0, 2]
        assert daemon.stats()["tenants"] == 2
        shown = CliRunner().invoke(app, ["stats", "--endpoint", daemon.endpoint]).stdout
        assert "0 tenants in cpu and 2 tenants in fs" in " ".join(shown.split())
        [quota] = admin.quotas(daemon.endpoint, admin.selection(salt="salt"))
        assert (quota["tier"], quota["bytes"], quota["used_bytes"]) == (
            "fs",
            10 * DISK_SLOT_BYTES,
            10 * DISK_SLOT_BYTES,
        )
        names = range(200, 203)
        client.put("salt", {key(name): payload(name) for name in names})
        eventually(
            lambda: (
                {row["key"] for row in admin.chunks(daemon.endpoint, admin.selection(tier="fs"), limit=100)}
                >= {key(name).hex() for name in names}
            ),
            "the new chunks are on disk",
        )
        assert (fs_tier(daemon)["chunks"], fs_tier(daemon)["dropped_stores"]) == (11, 0)
        admin.set_quota(daemon.endpoint, admin.selection(salt="salt"), 0)
        assert client.put("salt", {key(300): payload(300)}) == {key(300): Rejected(RejectReason.QUOTA)}
        assert (fs_tier(daemon)["chunks"], daemon.tier()["chunks"]) == (1, 0)
        assert [tier["tenants"] for tier in daemon.stats()["tiers"]] == [0, 1]  # one has a quota and nothing else
        admin.set_quota(daemon.endpoint, admin.selection(salt="salt"), None)
        assert client.put("salt", {key(300): payload(300)}) == {key(300): Stored()}
        wait_for_disk(daemon, 2)
    assert json.loads((fs_dir / "quotas.json").read_text()) == {}


def test_gc_knows_after_a_restart_when_a_namespace_was_last_used(fs_dir: Path) -> None:
    hour_s = 3_600
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon:
        for model in ("old", "new"):
            with client_of(daemon, namespace={"model": model}) as client:
                client.put("salt", {key(1): payload(1)})
        wait_for_disk(daemon, 2)
    documents = {path: json.loads(path.read_text())["model"] for path in (fs_dir / "namespaces").iterdir()}
    assert sorted(documents.values()) == ["new", "old"]
    [old] = [path for path, model in documents.items() if model == "old"]
    os.utime(old, (time.time() - 50 * hour_s,) * 2)
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon:
        wait_for_disk(daemon, 2)
        eventually(lambda: daemon.stats()["namespaces"] == 2, "the documents are read")
        assert admin.collect(daemon.endpoint, 51 * hour_s * 1_000, dry_run=True) == []
        [row] = admin.collect(daemon.endpoint, 49 * hour_s * 1_000)
        assert row["document"]["model"] == "old"  # type: ignore[index]
        assert (row["unused_s"], row["chunks"]) == (pytest.approx(50 * hour_s, abs=hour_s), 1)
        assert fs_tier(daemon)["chunks"] == 1
        assert not old.exists()
        with client_of(daemon, namespace={"model": "old"}) as client:  # it may come back, empty
            assert client.lookup("salt", [key(1)]) == [Lookup.MISS]
            eventually(old.exists, "its document is kept again")
            assert [gone["document"]["model"] for gone in admin.collect(daemon.endpoint, 1)] == ["new"]  # type: ignore[index]
            assert client.put("salt", {key(1): payload(1)}) == {key(1): Stored()}


def test_chunks_on_disk_have_ages_that_outlive_the_daemon_and_can_be_evicted_by_them(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_for_disk(daemon, 100)
    stopped_s = time.monotonic()
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        wait_for_disk(daemon, 100)
        ages = [row["idle_s"] for row in admin.chunks(daemon.endpoint, admin.selection(tier="fs"), limit=1_000)]
        assert time.monotonic() - stopped_s <= min(ages)  # type: ignore[type-var]
        assert max(ages) < 3_600  # type: ignore[type-var]
        assert admin.remove(daemon.endpoint, admin.selection(), older_than_ms=3_600_000)["evicted_chunks"] == 0
        wait_for_lookup(client, KEYS[:10], Lookup.FS)
        unused_ms = int((time.monotonic() - stopped_s) * 1_000)
        assert client.get("salt", KEYS[:10]) == PAYLOADS[:10]
        settle(client)
        would = admin.remove(daemon.endpoint, admin.selection(tier="fs"), older_than_ms=unused_ms, dry_run=True)
        gone = admin.remove(daemon.endpoint, admin.selection(tier="fs"), older_than_ms=unused_ms)
        assert gone == would
        assert (gone["evicted_chunks"], fs_tier(daemon)["chunks"]) == (90, 10)


def test_a_get_ends_with_its_own_time_and_only_the_clients_time_out_makes_a_hung_daemon_unavailable(
    fs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_STALE_MS", math.inf)  # as in the first moments, when nobody knows yet
    with (
        running_daemon(arguments=fs_flags(fs_dir)) as daemon,
        client_of(daemon, timeout_s=WAIT_S) as client,
        client_of(daemon, timeout_s=1.0) as impatient,
    ):
        client.put("salt", CHUNKS)
        wait_for_disk(daemon, len(KEYS))
        admin.remove(daemon.endpoint, admin.selection(tier="cpu"))
        wait_for_lookup(client, KEYS, Lookup.FS)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert client.get("salt", KEYS[:3], timeout_s=0.2) == [None] * 3
            buffers = {name: bytearray(CHUNK_BYTES) for name in KEYS[:3]}
            assert client.get_into("salt", buffers, timeout_s=0.2) == dict.fromkeys(buffers, Miss())
            with pytest.raises(Unavailable):
                impatient.get("salt", KEYS[:3], timeout_s=WAIT_S)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert client.get("salt", KEYS[:3], timeout_s=WAIT_S) == PAYLOADS[:3]


def test_a_disk_that_hangs_costs_what_is_on_it_and_nobody_else_a_thing(fs_dir: Path, tmp_path: Path) -> None:
    disk = HangingDisk(tmp_path)
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        client.put("salt", CHUNKS)
        wait_until_warm(daemon)
    with (
        running_daemon(arguments=fs_flags(fs_dir), environment=disk.environment) as daemon,
        client_of(daemon) as client,
        client_of(daemon) as other,
    ):
        wait_for_lookup(client, KEYS, Lookup.FS)
        disk.hang()
        try:
            assert client.get("salt", KEYS[:5], timeout_s=0.2) == [None] * 5
            assert set(client.lookup("salt", KEYS[:5])) <= {Lookup.PENDING, Lookup.FS}
            assert other.put("salt", {key(200): payload(200)}) == {key(200): Stored()}
            assert other.get("salt", [key(200)]) == [payload(200)]
            # Past their deadline the reads are given up, though their slots stay taken until they are back.
            eventually(lambda: "longer than" in fs_tier(daemon)["sick"], "the tier says that its disk hangs")  # type: ignore[operator]
            assert daemon.tier()["granted_bytes"] > 0
            assert client.get("salt", KEYS[5:10], timeout_s=60.0) == [None] * 5  # at once: nobody reads now
        finally:
            disk.answer()
        eventually(lambda: daemon.tier()["granted_bytes"] == 0, "the reads are back")
        eventually(lambda: client.get("salt", KEYS, timeout_s=1.0) == PAYLOADS, "everything is served again")
        assert fs_tier(daemon)["corruptions"] == 0


def test_a_clear_takes_what_is_just_being_written_to_disk(fs_dir: Path) -> None:
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon, client_of(daemon) as client:
        for _ in range(4):
            client.put("salt", CHUNKS)
            assert admin.remove(daemon.endpoint, admin.selection())["skipped_pinned"] == 0
            assert set(client.lookup("salt", KEYS)) == {Lookup.MISS}
        assert daemon.stats()["problems"] == []
    with running_daemon(arguments=fs_flags(fs_dir)) as daemon:
        wait_until_warm(daemon)
        assert (fs_tier(daemon)["chunks"], daemon.tier()["chunks"]) == (0, 0)
