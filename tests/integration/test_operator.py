"""The operator's commands against a real daemon: what goes, what stays, what is said, and the exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest
from typer.testing import CliRunner

from kvstore._native import fill, slot_offset
from kvstore.cli import app
from kvstore.client import Lookup, Rejected, RejectReason, StoreClient, Stored
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Outcome, Ref, Steps
from kvstore.testing import Daemon, running_daemon
from tests.integration.conftest import CHUNK_BYTES, WAIT_S, client_of, eventually, key, payload

SLOT_BYTES = 12_288
CLIENT = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, CHUNK_BYTES),))


def kvstore(daemon: Daemon, *arguments: str, code: int = 0) -> dict[str, object]:
    """The JSON that the command prints; it must end with that exit code."""
    done = CliRunner().invoke(app, [*arguments, "--endpoint", daemon.endpoint, "--json"])
    assert done.exit_code == code, done.output
    document: dict[str, object] = json.loads(done.stdout)
    return document


def kvstore_error(daemon: Daemon, *arguments: str, code: int) -> str:
    document = kvstore(daemon, *arguments, code=code)
    assert document.keys() == {"error"}
    error = document["error"]
    assert isinstance(error, dict)
    return str(error["message"])


def removed(chunks: int, *, pinned: int = 0, slot_bytes: int = SLOT_BYTES) -> dict[str, object]:
    counts = {"evicted_chunks": chunks, "evicted_bytes": chunks * slot_bytes, "skipped_pinned": pinned}
    return {**counts, "by_tier": {"cpu": counts}}


def present(client: StoreClient, salt: str | None, names: range) -> int:
    return client.lookup(salt, [key(name) for name in names]).count(Lookup.CPU)


def write(session: Session, *grants: Ref) -> None:
    """What a put does before it commits."""
    for slot, _ in grants:
        fill(session.arena.address + slot_offset(slot, SLOT_BYTES, session.table.unit_bytes), SLOT_BYTES, 1)


@contextlib.contextmanager
def filled(daemon: Daemon) -> Iterator[tuple[StoreClient, StoreClient]]:
    """20 chunks of tenant a and 10 of tenant b with one model, 5 of tenant a and 3 unsalted ones with another."""
    with client_of(daemon) as of_m, client_of(daemon, namespace={"model": "n"}) as of_n:
        of_m.put("a", {key(name): payload(name) for name in range(20)})
        of_m.put("b", {key(name): payload(name) for name in range(10)})
        of_n.put("a", {key(name): payload(name) for name in range(5)})
        of_n.put(None, {key(name): payload(name) for name in range(3)})
        yield of_m, of_n


@pytest.fixture(scope="module")
def kept() -> Iterator[Daemon]:
    """A filled daemon for the commands that change nothing."""
    with running_daemon() as daemon, filled(daemon):
        yield daemon


def test_lists_show_who_holds_what(kept: Daemon) -> None:
    tenants = kvstore(kept, "ls", "tenants")["tenants"]
    assert [(row["chunks"], row["bytes"], row["namespaces"], row["unsalted"]) for row in tenants] == [
        (25, 25 * SLOT_BYTES, 2, False), (10, 10 * SLOT_BYTES, 1, False), (3, 3 * SLOT_BYTES, 1, True),
    ]  # fmt: skip
    assert tenants[0]["by_tier"] == {"cpu": {"chunks": 25, "bytes": 25 * SLOT_BYTES}}
    namespaces = kvstore(kept, "ls", "namespaces")["namespaces"]
    assert {row["document"]["model"]: (row["chunks"], row["tenants"]) for row in namespaces} == {
        "m": (30, 2), "n": (8, 2),
    }  # fmt: skip
    of_m = next(row["namespace_id"] for row in namespaces if row["document"]["model"] == "m")
    assert [row["chunks"] for row in kvstore(kept, "ls", "tenants", "--namespace", of_m)["tenants"]] == [20, 10]
    assert len(kvstore(kept, "ls", "namespaces", "--tenant", "b")["namespaces"]) == 1
    sessions = kvstore(kept, "ls", "sessions", "--namespace", of_m)["sessions"]
    assert [(row["role"], row["pid"]) for row in sessions] == [("client", os.getpid())]
    listed = kvstore(kept, "ls", "chunks", "--tenant", "b", "--tier", "cpu")
    assert listed["more"] is False
    assert {row["key"] for row in listed["chunks"]} == {key(name).hex() for name in range(10)}
    assert all(0 <= row["idle_s"] < WAIT_S and not row["pinned"] for row in listed["chunks"])
    assert {(row["tenant_id"], row["namespace_id"], row["bytes"]) for row in listed["chunks"]} == {
        (tenants[1]["tenant_id"], of_m, SLOT_BYTES)
    }
    limited = kvstore(kept, "ls", "chunks", "--limit", "7")
    assert (len(limited["chunks"]), limited["more"]) == (7, True)
    assert kvstore(kept, "ls", "tenants", "--limit", "3")["more"] is False


@pytest.mark.parametrize("noun", ["namespaces", "tenants", "sessions", "chunks"])
def test_lists_are_tables_without_json(kept: Daemon, noun: str) -> None:
    done = CliRunner().invoke(app, ["ls", noun, "--endpoint", kept.endpoint])
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) > 4


def test_ids_are_whole_however_narrow_the_terminal_is(kept: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for noun, name in (("namespaces", "namespace_id"), ("tenants", "tenant_id"), ("chunks", "key")):
        ids = {row[name] for row in kvstore(kept, "ls", noun)[noun]}
        shown = CliRunner().invoke(app, ["ls", noun, "--endpoint", kept.endpoint]).stdout
        assert {one for one in ids if one in shown} == ids


def test_stats_fit_a_narrow_terminal(kept: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["stats", "--endpoint", kept.endpoint]).stdout.splitlines()
    rows = [line.split() for line in shown]
    assert ["│", "chunks", "│", "38", "│"] in rows
    assert ["│", "corruptions", "│", "0", "│"] in rows
    assert max(map(len, shown[1:])) <= 90


def test_each_selection_removes_exactly_what_it_names(daemon: Daemon) -> None:
    with filled(daemon) as (client, of_n_client):
        namespaces = kvstore(daemon, "ls", "namespaces")["namespaces"]
        of_n = next(row["namespace_id"] for row in namespaces if row["document"]["model"] == "n")
        unsalted = kvstore(daemon, "ls", "tenants")["tenants"][-1]["tenant_id"]
        assert kvstore(daemon, "evict", "--tenant-id", unsalted) == removed(3)
        assert kvstore(daemon, "evict", "--tenant", "a", "--namespace", of_n) == removed(5)
        assert (present(of_n_client, "a", range(5)), present(client, "a", range(20))) == (0, 20)
        assert kvstore(daemon, "evict", "--tenant", "b", "--tier", "cpu") == removed(10)
        assert present(client, "a", range(20)) == 20
        assert kvstore(daemon, "evict", "--tier", "all", "--dry-run") == removed(20)
        assert kvstore(daemon, "clear", "--yes") == removed(20)
        tier = daemon.tier()
        assert (tier["used_bytes"], tier["chunks"], tier["evictions"], tier["removals"]) == (0, 0, 0, 38)
        assert kvstore(daemon, "check") == {"problems": []}
        assert client.put("a", {key(1): payload(1)}) == {key(1): Stored()}


def test_bytes_and_age_choose_the_least_recently_used(daemon: Daemon, client: StoreClient) -> None:
    for name in range(10):
        client.put("a", {key(name): payload(name)})
    assert client.get("a", [key(0)]) == [payload(0)]
    client._connection._steps.settle(WAIT_S)  # type: ignore[union-attr]
    assert kvstore(daemon, "evict", "--bytes", str(2 * SLOT_BYTES + 1)) == removed(3)
    assert client.lookup("a", [key(name) for name in range(5)]) == [Lookup.CPU, *[Lookup.MISS] * 3, Lookup.CPU]
    assert kvstore(daemon, "evict", "--older-than", "1h") == removed(0)
    used_s = max(row["idle_s"] for row in kvstore(daemon, "ls", "chunks")["chunks"])
    time_after_all = f"{max(1, int(used_s * 1000) // 2)}ms"
    eventually(
        lambda: (
            min(row["idle_s"] for row in kvstore(daemon, "ls", "chunks")["chunks"]) * 1000 > int(time_after_all[:-2])
        ),
        "every chunk is idle for long enough",
    )
    assert kvstore(daemon, "evict", "--older-than", time_after_all) == removed(7)


def test_chunks_of_two_sizes_are_removed_by_bytes_and_not_by_count() -> None:
    small, large = 4 << 10, 4 << 20
    with (
        running_daemon(cpu_bytes=64 << 20) as daemon,
        client_of(daemon, chunk_bytes=small) as one,
        client_of(daemon, namespace={"model": "n"}, chunk_bytes=large) as other,
    ):
        for name in range(6):  # in turns: 20 small ones, a large one
            one.put("a", {key(100 * name + i): payload(i, small) for i in range(20)})
            other.put("a", {key(name): payload(name, large)})
        before = daemon.tier()["used_bytes"]
        target = 2 * large + 30 * small
        done = kvstore(daemon, "evict", "--bytes", str(target))
        freed = done["evicted_bytes"]
        assert target <= freed < target + large
        assert before - daemon.tier()["used_bytes"] == freed


def test_a_dry_run_changes_nothing(daemon: Daemon) -> None:
    with filled(daemon) as (client, _), Session.attach(daemon.endpoint, CLIENT) as session:
        steps = Steps(session)
        [grant] = steps.wait_grants(1, WAIT_S)
        before = daemon.tier()
        assert kvstore(daemon, "evict", "--tenant", "a", "--dry-run") == removed(25)
        assert kvstore(daemon, "evict", "--tier", "all", "--dry-run") == removed(38)
        assert kvstore(daemon, "evict", "--bytes", str(SLOT_BYTES), "--dry-run") == removed(1)
        assert daemon.tier() == before
        assert present(client, "a", range(20)) == 20
        write(session, grant)
        ticket = steps.commit(*grant, session.tenant_id("a"), key(99), b"")
        assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]  # nobody's write was ended


def test_what_is_being_loaded_stays_and_is_counted(daemon: Daemon, client: StoreClient) -> None:
    client.put("a", {key(name): payload(name) for name in range(10)})
    client.put("b", {key(name): payload(name) for name in range(4)})
    with Session.attach(daemon.endpoint, CLIENT) as session:
        steps = Steps(session)
        leased = [key(name) for name in (2, 7)]
        _, slots, generations = session.table.lookup(session.namespace_id, session.tenant_id("a"), leased)
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            steps.lease(slot, generation)
        steps.settle(WAIT_S)
        assert sum(row["pinned"] for row in kvstore(daemon, "ls", "chunks")["chunks"]) == 2
        assert kvstore(daemon, "evict", "--bytes", str(8 * SLOT_BYTES), "--tenant", "a") == removed(8, pinned=2)
        assert kvstore(daemon, "clear", "--yes") == removed(4, pinned=2)
        assert client.get("a", leased) == [payload(2), payload(7)]
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            steps.release(slot, generation, loaded=True)
        steps.settle(WAIT_S)
        assert kvstore(daemon, "clear", "--yes") == removed(2)


@pytest.mark.parametrize(
    ("arguments", "lands"),
    [
        (("clear", "--yes"), False),
        (("evict", "--tenant", "a"), False),
        (("evict", "--tenant", "b"), True),
        (("evict", "--older-than", "1h"), True),
        (("evict", "--bytes", "1GiB", "--tenant", "b"), True),
    ],
)
def test_a_put_in_flight_across_a_removal_is_not_visible_afterwards(
    daemon: Daemon, client: StoreClient, arguments: tuple[str, ...], lands: bool
) -> None:
    client.put("a", {key(1): payload(1)})
    client.put("b", {key(1): payload(1)})
    with Session.attach(daemon.endpoint, CLIENT) as session:
        steps = Steps(session)
        [old, newer] = steps.wait_grants(2, WAIT_S)
        kvstore(daemon, *arguments)
        write(session, old, newer)
        tenant = session.tenant_id("a")
        [outcome] = steps.wait([steps.commit(*old, tenant, key(2), b"")], WAIT_S)
        assert (outcome is Outcome.STORED, present(client, "a", range(2, 3))) == (lands, int(lands))
        steps.abort(*newer)
        steps.settle(WAIT_S)
        later = steps.wait_grants(1, WAIT_S)[0]
        write(session, later)
        assert steps.wait([steps.commit(*later, tenant, key(3), b"")], WAIT_S) == [Outcome.STORED]
    eventually(lambda: daemon.tier()["granted_bytes"] == 0, "no slot is granted any more")


def test_a_put_of_a_tenant_without_chunks_is_ended_too(daemon: Daemon, client: StoreClient) -> None:
    with Session.attach(daemon.endpoint, CLIENT) as session:
        steps = Steps(session)
        [grant] = steps.wait_grants(1, WAIT_S)
        assert "has no chunk here" in kvstore_error(daemon, "evict", "--tenant", "new", code=1)
        write(session, grant)
        ticket = steps.commit(*grant, session.tenant_id("new"), key(1), b"")
        assert steps.wait([ticket], WAIT_S) == [Outcome.NOT_GRANTED]
    assert present(client, "new", range(1, 2)) == 0


def test_removals_beside_puts_of_many_threads_leave_what_was_stored_after_them(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        stop = threading.Event()
        bad: list[object] = []

        def put_and_get(thread: int) -> None:
            name = thread * 1_000_000
            while not stop.is_set():
                chunks = {key(name + i): payload(name + i) for i in range(20)}
                outcomes = set(client.put(f"salt-{thread % 2}", chunks).values())
                got = client.get(f"salt-{thread % 2}", list(chunks))
                bad.extend(one for one, was in zip(got, chunks.values(), strict=True) if one not in (None, was))
                bad.extend(one for one in outcomes if not isinstance(one, Stored | Rejected))
                name += 20

        threads = [threading.Thread(target=put_and_get, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            kvstore(daemon, "clear", "--yes")
            kvstore(daemon, "evict", "--bytes", "100kB")
            assert kvstore(daemon, "check") == {"problems": []}
        stop.set()
        for thread in threads:
            thread.join()
        assert bad == []
        client.put("last", {key(1): payload(1)})
        assert client.get("last", [key(1)]) == [payload(1)]


def test_names_that_do_not_exist_are_refused_and_nothing_goes(kept: Daemon) -> None:
    nobody = "0" * 32
    for command in (("evict",), ("ls", "chunks"), ("ls", "tenants")):
        assert f"no namespace {nobody} here" in kvstore_error(kept, *command, "--namespace", nobody, code=1)
        assert "`kvstore ls namespaces` shows them" in kvstore_error(kept, *command, "--namespace", "llama", code=1)
        message = kvstore_error(kept, *command, "--tenant", "a-salt-nobody-has", code=1)
        assert "has no chunk here" in message
        assert "a-salt-nobody-has" not in message
        assert f"tenant {nobody} has no chunk" in kvstore_error(kept, *command, "--tenant-id", nobody, code=1)
        assert "no tier 'disk'; it has cpu" in kvstore_error(kept, *command, "--tier", "disk", code=1)
    assert kept.tier()["chunks"] == 38


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("evict",), "say what to evict"),
        (("evict", "--bytes", "0"), "--bytes is 0; it must be 1 byte at the least"),
        (("evict", "--bytes", "ten"), "--bytes: 'ten' is not a size"),
        (("evict", "--bytes", "-1"), "--bytes: '-1' is not a size"),
        (("evict", "--older-than", "1w"), "--older-than: '1w' is not a time; write for example 90s, 15m, 1h or 2d"),
        (("evict", "--older-than", "0s"), "--older-than is 0s; it must be 1ms at the least, and less than 2^63 ms"),
        (("evict", "--older-than", "30"), "--older-than: '30' is not a time"),
        (("evict", "--tenant", ""), "--tenant is empty"),
        (("evict", "--tier", ""), "--tier is empty; leave it out, or say all"),
        (("evict", "--tier", "", "--older-than", "1ms"), "--tier is empty"),
        (("quota", "set", "0", "--tenant", "a", "--tier", ""), "--tier is empty"),
        (("ls", "chunks", "--tier", ""), "--tier is empty"),
        (("gc", "--older-than", ""), "--older-than: '' is not a time"),
        (("evict", "--tenant", "a", "--tenant-id", "0" * 32), "both name the tenant"),
        (("ls", "sessions", "--tenant", "a"), "only --namespace selects sessions"),
        (("clear",), "there is no terminal to ask; say --yes"),
    ],
)
def test_wrong_usage_exits_2_and_removes_nothing(kept: Daemon, arguments: tuple[str, ...], said: str) -> None:
    assert said in kvstore_error(kept, *arguments, code=2)
    assert kept.tier()["chunks"] == 38


@pytest.mark.parametrize("arguments", [["ls", "tenants", "--tenant", "\udcff"], ["explain", "\udcff"]])
def test_what_is_no_text_is_wrong_usage(kept: Daemon, arguments: list[str]) -> None:
    assert "is no text in UTF-8" in kvstore_error(kept, *arguments, code=2)


def test_an_arena_socket_that_is_not_there_is_told_apart_from_no_daemon(daemon: Daemon) -> None:
    arena = daemon.runtime_dir / "arena.sock"
    arena.rename(arena.with_suffix(".away"))
    try:
        assert f"kvstore.sock is there and {arena} is not" in kvstore_error(daemon, "stats", code=4)
    finally:
        arena.with_suffix(".away").rename(arena)


@pytest.mark.parametrize("command", [("evict", "--tier", "all"), ("clear", "--yes"), ("stats",)])
def test_an_empty_endpoint_is_not_the_default_one(
    kept: Daemon, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("KVSTORE_ENDPOINT", kept.endpoint)
    done = CliRunner().invoke(app, [*command, "--endpoint", ""])
    assert done.exit_code == 2
    assert "--endpoint is empty" in done.stderr
    assert kept.tier()["chunks"] == 38


@pytest.mark.parametrize(
    "arguments",
    [["evict", "--teir", "cpu"], ["gc"], ["ls", "blocks"], ["ls"], ["ls", "chunks", "--limit", "0"], ["clear", "now"]],
)
def test_unknown_words_are_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("state", ["stopped", "hung"])
def test_without_a_daemon_every_command_exits_4(state: str) -> None:
    with running_daemon() as daemon:
        if state == "stopped":
            daemon.stop()
        else:
            os.kill(daemon.pid, signal.SIGSTOP)
        try:
            commands = [["ls", "chunks"], ["evict", "--tier", "all"], ["clear", "--yes"], ["check"]]
            for command in commands if state == "stopped" else commands[1:2]:
                assert kvstore_error(daemon, *command, code=4)
        finally:
            if state == "hung":
                os.kill(daemon.pid, signal.SIGCONT)


def test_the_salt_is_neither_in_the_log_nor_in_any_answer(daemon: Daemon, client: StoreClient) -> None:
    salt = "salt-that-nobody-may-see"
    client.put(salt, {key(1): payload(1)})
    answers = [kvstore(daemon, "ls", noun) for noun in ("namespaces", "tenants", "sessions", "chunks")]
    answers += [kvstore(daemon, "evict", "--tenant", salt), daemon.stats()]
    assert salt not in json.dumps(answers)
    assert "removed 1 chunks" in daemon.log()
    assert salt not in daemon.log()


def test_only_an_attached_operator_may_ask(daemon: Daemon, client: StoreClient) -> None:
    client.put("a", {key(1): payload(1)})
    with grpc.insecure_channel(daemon.endpoint) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        calls = [
            lambda: stub.Remove(admin_pb2.RemoveRequest(), timeout=WAIT_S),
            lambda: stub.Check(admin_pb2.CheckRequest(), timeout=WAIT_S),
            lambda: list(stub.Namespaces(admin_pb2.NamespacesRequest(), timeout=WAIT_S)),
            lambda: list(stub.Usage(admin_pb2.UsageRequest(), timeout=WAIT_S)),
            lambda: list(stub.Chunks(admin_pb2.ChunksRequest(limit=1), timeout=WAIT_S)),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert present(client, "a", range(1, 2)) == 1


# Quotas


def test_a_quota_holds_in_memory_and_shows_what_is_taken_of_it() -> None:
    with running_daemon() as daemon, filled(daemon) as (of_m, of_n):
        assert kvstore(daemon, "quota", "get") == {"quotas": []}
        done = kvstore(daemon, "quota", "set", str(10 * SLOT_BYTES), "--tenant", "a")
        assert done == removed(15)  # of 25, the least recently used first
        [row] = kvstore(daemon, "quota", "get", "--tenant", "a")["quotas"]  # type: ignore[misc]
        assert (row["tier"], row["bytes"], row["used_bytes"]) == ("cpu", 10 * SLOT_BYTES, 10 * SLOT_BYTES)
        assert kvstore(daemon, "quota", "get", "--tenant", "b") == {"quotas": []}
        names = range(100, 108)
        put = of_m.put("a", {key(name): payload(name) for name in names})
        assert set(put.values()) == {Stored()}
        assert present(of_m, "a", names) == 8
        assert present(of_n, "a", range(5)) + present(of_m, "a", range(20)) == 2
        assert present(of_m, "b", range(10)) == 10
        assert set(of_m.put("b", {key(name): payload(name) for name in names}).values()) == {Stored()}
        assert kvstore(daemon, "quota", "set", "0", "--tenant", "b") == removed(18)
        assert of_m.put("b", {key(1): payload(1)}) == {key(1): Rejected(RejectReason.QUOTA)}
        kvstore(daemon, "quota", "unset", "--tenant", "b")
        assert of_m.put("b", {key(1): payload(1)}) == {key(1): Stored()}
        assert len(kvstore(daemon, "quota", "get")["quotas"]) == 1  # type: ignore[arg-type]


def test_a_chain_longer_than_its_tenants_quota_is_stored_from_its_head_as_far_as_it_goes() -> None:
    with running_daemon() as daemon, client_of(daemon) as client:
        kvstore(daemon, "quota", "set", str(5 * SLOT_BYTES), "--tenant", "a")
        put = client.put("a", {key(name): payload(name) for name in range(8)})
        assert list(put.values()) == [Stored()] * 5 + [Rejected(RejectReason.QUOTA)] * 3
        assert present(client, "a", range(8)) == 5


def test_a_quota_is_of_one_tenant_and_of_a_tier_that_there_is(kept: Daemon) -> None:
    assert "--tenant or --tenant-id" in kvstore_error(kept, "quota", "set", "1GiB", code=2)
    assert "is not a size" in kvstore_error(kept, "quota", "set", "much", "--tenant", "a", code=2)
    assert "no tier 'fs'" in kvstore_error(kept, "quota", "set", "1GiB", "--tenant", "a", "--tier", "fs", code=1)


# Namespaces that nobody uses


def test_gc_lists_and_removes_what_no_session_uses() -> None:
    with running_daemon() as daemon, filled(daemon) as (of_m, of_n):
        of_n.close()
        names = [row["namespace_id"] for row in kvstore(daemon, "ls", "namespaces")["namespaces"]]  # type: ignore[attr-defined]
        assert len(names) == 2

        def candidates(older_than: str = "1ms") -> list[dict[str, object]]:
            return kvstore(daemon, "gc", "--older-than", older_than, "--dry-run")["namespaces"]  # type: ignore[return-value]

        eventually(lambda: len(candidates()) == 1, "the second client has gone")
        assert candidates("1h") == []
        [row] = candidates()
        assert (row["document"]["model"], row["chunks"], row["bytes"]) == ("n", 8, 8 * SLOT_BYTES)  # type: ignore[index]
        assert "say --yes" in kvstore_error(daemon, "gc", "--older-than", "1ms", code=2)
        [gone] = kvstore(daemon, "gc", "--older-than", "1ms", "--yes")["namespaces"]  # type: ignore[misc]
        assert (gone["namespace_id"], gone["chunks"]) == (row["namespace_id"], 8)
        left = kvstore(daemon, "ls", "namespaces")["namespaces"]
        assert [row["document"]["model"] for row in left] == ["m"]  # type: ignore[attr-defined, index]
        assert present(of_m, "a", range(20)) == 20
        assert candidates() == []


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["ls", "everything"], 2, "UsageError"),
        (["ls"], 2, "UsageError"),
        (["evict", "--no-such-option"], 2, "UsageError"),
        (["no-such-command"], 2, "UsageError"),
        (["gc"], 2, "UsageError"),
        (["quota", "set"], 2, "UsageError"),
        (["explain"], 2, "UsageError"),
        (["evict"], 2, "ConfigurationError"),
        (["plan"], 2, "ConfigurationError"),
        (["ls", "chunks", "--namespace", "0" * 32], 1, "NotFound"),
        (["explain", "nobody-asked-this"], 1, "NotFound"),
    ],
)
def test_with_json_every_failure_is_one_document(kept: Daemon, arguments: list[str], code: int, kind: str) -> None:
    command = [sys.executable, "-m", "kvstore.cli", *arguments, "--json"]
    environment = os.environ | {"KVSTORE_ENDPOINT": kept.endpoint}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (code, "")
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == kind
    assert error["message"]


def test_with_json_no_daemon_is_a_document_and_4() -> None:
    command = [sys.executable, "-m", "kvstore.cli", "stats", "--json", "--endpoint", "unix:///nowhere/kvstore.sock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, json.loads(done.stdout)["error"]["kind"]) == (4, "Unavailable")


def test_stats_say_that_a_tier_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "1000 of 2000 bytes are taken, and there was no room for more 3 s ago (No space left on device)"
    tiers = [admin_pb2.TierStats(name="cpu"), admin_pb2.TierStats(name="fs", not_growing=told)]
    monkeypatch.setattr("kvstore.admin.stats", lambda _: admin_pb2.StatsReply(tiers=tiers))
    lines = CliRunner().invoke(app, ["stats"]).stdout.splitlines()
    assert f"fs: does not grow: {told}" in lines
    assert "fs: well; 0 stores dropped so far, 0 slots not used (quarantined)" in lines
    document = json.loads(CliRunner().invoke(app, ["stats", "--json"]).stdout)
    assert [tier["not_growing"] for tier in document["tiers"]] == ["", told]
