"""`kvstore explain` against a real daemon, and what engines tell it: decisions, and what they learned."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.client import Rejected, RejectReason, StoreClient, Stored
from kvstore.costmodel import Alternative
from kvstore.decisions import Decision, Room
from kvstore.errors import LimitExceeded
from kvstore.limits import LEARNED_DOCUMENT_BYTES_MAX
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import DECISIONS_QUEUED_MAX, Outcome, Steps
from kvstore.testing import Daemon, running_daemon
from kvstore.tiers.fs_paths import LEARNED
from tests.integration.conftest import CHUNK_BYTES, WAIT_S, client_of, eventually, key, payload

CLIENT = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, CHUNK_BYTES),))


def explain(daemon: Daemon, about: str, code: int = 0) -> dict[str, list[dict[str, object]]]:
    done = CliRunner().invoke(app, ["explain", about, "--endpoint", daemon.endpoint, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def shown(daemon: Daemon, about: str) -> str:
    done = CliRunner().invoke(app, ["explain", about, "--endpoint", daemon.endpoint])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def steps(daemon: Daemon) -> Iterator[Steps]:
    with Session.attach(daemon.endpoint, CLIENT) as session:
        yield Steps(session)


def test_a_request_says_what_was_compared_chosen_and_measured(daemon: Daemon, steps: Steps) -> None:
    decision = Decision(
        1, "cmpl-1-a1b2", False, "LOAD_IS_QUICKER", 2048, 0, 512, 1536, 3, 0.5, 2.0,
        (Alternative("cpu", 512, 0.4, 1.6), Alternative("fs", 1536, 0.2, 0.8, 0.05)), "fs", 1536,
    )  # fmt: skip
    steps.tell(decision)
    steps.settle(WAIT_S)
    assert explain(daemon, "cmpl-1")["decisions"][0]["outcome"] is None
    decision.outcome, decision.load_s, decision.saved_s, decision.first_token_s = "loaded", 0.1, 0.4, 0.25
    steps.tell(decision)
    steps.settle(WAIT_S)
    [found] = explain(daemon, "cmpl-1")["decisions"]
    assert (found["reason"], found["tier"], found["outcome"]) == ("LOAD_IS_QUICKER", "fs", "loaded")
    assert found["alternatives"] == [
        {"tier": "cpu", "end_tokens": 512, "seconds": 0.4, "wait_s": 0.0},
        {"tier": "fs", "end_tokens": 1536, "seconds": 0.2, "wait_s": 0.05},
    ]
    text = shown(daemon, "cmpl-1-a1")
    for part in (
        "recompute all 500.0 ms",
        "up to 1536 from fs",
        "loading is quicker",
        "prompt computed after 250.0 ms",
    ):
        assert part in text
    [count] = daemon.stats()["decisions"]
    assert count == {"kind": "load", "reason": "LOAD_IS_QUICKER", "decisions": 1, "refused_chunks": 0}
    [balance] = daemon.stats()["balances"]
    assert (balance["tier"], balance["loads"], balance["regret_s"]) == ("fs", 1, 0.0)


def test_a_key_says_that_it_was_refused_stored_or_removed(daemon: Daemon, client: StoreClient, steps: Steps) -> None:
    steps.tell(Decision(1, "cmpl-2", True, "ADMISSION", 512, refused=[b"refused-key" * 3]))
    steps.settle(WAIT_S)
    [fate] = explain(daemon, (b"refused-key" * 3).hex())["keys"]
    assert "for request cmpl-2: ADMISSION" in fate["events"][0]
    client.put(None, {key(1): payload(1)})
    [fate] = explain(daemon, key(1).hex())["keys"]
    assert "stored" in fate["events"][0]
    assert fate["events"][1] == "in the cpu tier now"
    CliRunner().invoke(app, ["clear", "--yes", "--endpoint", daemon.endpoint])
    [fate] = explain(daemon, key(1).hex())["keys"]
    assert "an operator removed" in fate["events"][1]
    assert "an operator removed" in shown(daemon, key(1).hex())


def test_a_store_says_what_is_on_disk_and_a_chunk_for_memory_only_gets_there_when_it_is_worth_it(
    tmp_path: Path,
) -> None:
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "64MiB"]
    with running_daemon(arguments=flags, verify=False) as daemon, Session.attach(daemon.endpoint, CLIENT) as session:
        steps, tenant = Steps(session), session.tenant_id(None)
        refs = steps.wait_grants(2, WAIT_S)
        tickets = [
            steps.commit(*ref, tenant, key(number), b"", memory_only=number == 1) for number, ref in enumerate(refs)
        ]
        assert steps.wait(tickets, WAIT_S) == [Outcome.STORED] * 2
        assert steps.fs is Room.FREE
        eventually(lambda: daemon.tier("fs")["chunks"] == 1, "one is on disk")
        assert "not written to disk" in explain(daemon, key(1).hex())["keys"][0]["events"][1]
        steps.tell(
            Decision(
                1, "cmpl-4", True, "WORTH_IT", 512, tier="cpu", end_tokens=512,
                disk_reason="ADMISSION", disk_end_tokens=256, disk_refused_count=1,
            )
        )  # fmt: skip
        steps.settle(WAIT_S)
        text = shown(daemon, "cmpl-4")
        assert "on disk up to token 256, ADMISSION (would cost more than it is likely to save)" in text
        assert "1 chunks in memory only" in text
        steps.touch(tenant, [key(0), key(1)], worth_disk=2)
        steps.settle(WAIT_S)
        eventually(lambda: daemon.tier("fs")["chunks"] == 2, "both are")


def test_a_request_that_missed_says_what_became_of_the_chunk_it_missed(
    daemon: Daemon, client: StoreClient, steps: Steps
) -> None:
    client.put(None, {key(1): payload(1)})
    CliRunner().invoke(app, ["clear", "--yes", "--endpoint", daemon.endpoint])
    steps.tell(Decision(1, "cmpl-3", False, "NO_HIT", 512, refused=(key(1),)))
    steps.settle(WAIT_S)
    found = explain(daemon, "cmpl-3")
    assert found["decisions"][0]["first_missing"] == key(1)[:8].hex()
    assert "an operator removed" in found["keys"][0]["events"][1]
    client.put(None, {key(1): payload(1)})
    [found] = explain(daemon, "cmpl-3")["decisions"]
    assert "an operator removed chunks from every tier" in found["missing"][1]
    assert "an operator removed chunks from every tier" in shown(daemon, "cmpl-3")
    assert daemon.stats()["decisions"][0]["refused_chunks"] == 0


def test_a_put_that_is_rejected_says_why(daemon: Daemon, client: StoreClient) -> None:
    CliRunner().invoke(app, ["quota", "set", "0", "--tenant", "poor", "--endpoint", daemon.endpoint])
    assert client.put("poor", {key(1): payload(1)}) == {key(1): Rejected(RejectReason.QUOTA)}
    [fate] = explain(daemon, key(1).hex())["keys"]
    assert fate["events"][0].endswith("for client-1: QUOTA")
    [count] = daemon.stats()["decisions"]
    assert count == {"kind": "commit", "reason": "QUOTA", "decisions": 1, "refused_chunks": 1}
    table = CliRunner().invoke(app, ["stats", "--endpoint", daemon.endpoint]).stdout
    assert "rejected, QUOTA: 1 chunks so far" in table


def test_a_store_says_what_came_of_it_beside_what_was_chosen() -> None:
    with running_daemon(verify=False) as daemon, Session.attach(daemon.endpoint, CLIENT) as session:
        steps, poor = Steps(session), session.tenant_id("poor")
        CliRunner().invoke(app, ["quota", "set", "0", "--tenant", "poor", "--endpoint", daemon.endpoint])
        steps.tell(Decision(5, "cmpl-5", True, "LEARNING", 512, tier="cpu", end_tokens=512, chunks=2))
        steps.settle(WAIT_S)
        assert "outcome so far, what the request generated included: 0 chunks stored\n" in shown(daemon, "cmpl-5")
        tickets = [steps.commit(*ref, poor, key(1), b"", decision=5) for ref in steps.wait_grants(1, WAIT_S)]
        assert steps.wait(tickets, WAIT_S) == [Outcome.REJECTED_QUOTA]
        text = shown(daemon, "cmpl-5")
        assert "chosen: store up to token 512 of 512 (2 chunks were not there), LEARNING" in text
        assert "0 chunks stored, 1 rejected: QUOTA" in text


def test_a_put_without_a_slot_says_why(daemon: Daemon, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "wait_grants", lambda *_, **__: [])
    monkeypatch.setattr(Steps, "grants_short", lambda *_: Outcome.REJECTED_TIER_FULL)
    assert client.put(None, {key(1): payload(1)}) == {key(1): Rejected(RejectReason.TIER_FULL)}
    eventually(lambda: daemon.stats()["decisions"] != [], "the daemon knows")
    [fate] = explain(daemon, key(1).hex())["keys"]
    assert fate["events"][0].endswith("for client-1: TIER_FULL")


def test_a_key_that_had_to_make_room_says_for_whom() -> None:
    with running_daemon(cpu_bytes="1MiB") as daemon, client_of(daemon) as client:
        client.put(None, {key(0): payload(0)})
        for name in range(1, 200):
            client.put(None, {key(name): payload(name)})
        assert daemon.tier()["evictions"] > 0
        [fate] = explain(daemon, key(0).hex())["keys"]
        assert "evicted from memory" in fate["events"][1]
        assert "to make room for client-1, namespace" in fate["events"][1]


def test_what_made_room_for_reads_from_disk_is_told_too(tmp_path: Path) -> None:
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "64MiB"]
    with running_daemon(arguments=flags, cpu_bytes="1MiB") as daemon, client_of(daemon) as client:
        for name in range(100):
            client.put(None, {key(name): payload(name)})
            eventually(lambda: daemon.tier("fs")["chunks"] == name + 1, "it is on disk")  # noqa: B023
        put = daemon.tier()["evictions"]
        for name in range(100):
            assert client.get(None, [key(name)]) == [payload(name)]
        assert daemon.tier()["evictions"] > put
        CliRunner().invoke(app, ["clear", "--yes", "--endpoint", daemon.endpoint])
        [fate] = explain(daemon, key(0).hex())["keys"]
        told = re.findall(r"make room for (what client-1 had read from disk|client-1), namespace", fate["events"][1])
        assert told == ["client-1", "what client-1 had read from disk"]
        assert "an operator removed chunks from every tier" in fate["events"][1]  # on disk it still was


def test_from_which_tier_an_operator_removed_a_chunk_is_told_while_the_other_one_keeps_it(tmp_path: Path) -> None:
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "64MiB"]
    with running_daemon(arguments=flags) as daemon, client_of(daemon) as client:
        client.put(None, {key(1): payload(1)})
        eventually(lambda: daemon.tier("fs")["chunks"] == 1, "it is on disk")
        where = ["--endpoint", daemon.endpoint]
        CliRunner().invoke(app, ["evict", "--tier", "fs", "--bytes", "1", *where])
        [fate] = explain(daemon, key(1).hex())["keys"]
        assert re.fullmatch(
            r"not on disk now: an operator removed the least recently used chunks from fs, 1 bytes asked for "
            r"\(1 chunks, 16384 bytes from fs\) .* s ago",
            fate["events"][1],
        )
        assert fate["events"][2] == "in the cpu tier now"
        client.put(None, {key(2): payload(2)})
        eventually(lambda: daemon.tier("fs")["chunks"] == 1, "the next one is on disk")
        CliRunner().invoke(app, ["evict", "--tier", "cpu", *where])
        [fate] = explain(daemon, key(2).hex())["keys"]
        assert re.fullmatch(
            r"not in memory now: an operator removed chunks from cpu \(2 chunks, 24576 bytes from cpu\) .* s ago",
            fate["events"][1],
        )
        assert fate["events"][2] == "in the fs tier now"


def test_what_was_dropped_on_its_way_to_disk_is_told_and_not_that_an_operator_removed_it_later(tmp_path: Path) -> None:
    chunk_bytes, keys = 256 << 10, [key(number) for number in range(40)]
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "16MiB"]
    with (
        running_daemon(arguments=flags, cpu_bytes="4MiB", verify=False) as daemon,
        client_of(daemon, chunk_bytes=chunk_bytes) as client,
    ):
        for each in keys:
            assert client.put(None, {each: bytes(chunk_bytes)}) == {each: Stored()}

        def is_settled() -> bool:
            fs = daemon.tier("fs")
            return fs["chunks"] + fs["dropped_stores"] == len(keys)

        eventually(is_settled, "each is on disk, or will not be")
        evicted = daemon.tier()["evictions"]
        kvstore(daemon, "evict", "--tier", "cpu", "--bytes", "1MiB")
        fates = [explain(daemon, each.hex())["keys"][0]["events"] for each in keys]
        dropped = [events for events in fates if "it had left memory before its turn" in str(events)]
        assert len(dropped) == daemon.tier("fs")["dropped_stores"]
        assert all("in no tier now: evicted from memory" in str(events) for events in dropped)
        assert not any("an operator" in str(events) for events in dropped)
        assert sum("evicted from memory" in str(events) for events in fates) == evicted


def test_what_is_not_known_is_an_error_that_says_why(daemon: Daemon) -> None:
    for about in ("nobody", key(9).hex()):
        done = CliRunner().invoke(app, ["explain", about, "--endpoint", daemon.endpoint, "--json"])
        assert done.exit_code == 1
        assert "nothing is known" in json.loads(done.stdout)["error"]["message"]


def test_hex_that_can_be_no_key_is_said_to_be_none_and_0x_may_stand_before_one(
    daemon: Daemon, client: StoreClient
) -> None:
    client.put(None, {key(1): payload(1)})
    for about in (f"0x{key(1).hex()}", f"0X{key(1).hex().upper()}", f"0x{key(1).hex()[:16]}"):
        [fate] = explain(daemon, about)["keys"]
        assert "in the cpu tier now" in str(fate["events"])
    for about in (key(1).hex()[:17], f"0x{key(1).hex()[:14]}", "ab" * 65):
        digits = len(about.removeprefix("0x"))
        done = CliRunner().invoke(app, ["explain", about, "--endpoint", daemon.endpoint, "--json"])
        message = json.loads(done.stdout)["error"]["message"]
        assert f"it has {digits} hex digits, and a key an even number of 16 to 128" in message


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_times_that_are_no_numbers_are_null_in_json(daemon: Daemon, steps: Steps, bad: float) -> None:
    decision = Decision(
        1, "cmpl-7", False, "LOAD_IS_QUICKER", 2048, 0, 512, 1536, 3, bad, 2.0,
        (Alternative("cpu", 512, bad, 1.6),), "cpu", 512, load_s=1.0, saved_s=bad, first_token_s=bad,
    )  # fmt: skip
    steps.tell(decision)
    steps.settle(WAIT_S)
    done = CliRunner().invoke(app, ["explain", "cmpl-7", "--endpoint", daemon.endpoint, "--json"])
    assert "NaN" not in done.stdout
    assert "Infinity" not in done.stdout
    [found] = json.loads(done.stdout)["decisions"]
    assert (
        found["recompute_s"]
        is found["saved_s"]
        is found["first_token_s"]
        is found["alternatives"][0]["seconds"]
        is None
    )
    assert found["load_s"] == 1.0
    assert "recompute all an unknown time" in shown(daemon, "cmpl-7")


def test_more_decisions_than_can_wait_lose_the_oldest_and_nobody_waits(daemon: Daemon, steps: Steps) -> None:
    for number in range(1, DECISIONS_QUEUED_MAX + 101):
        steps.tell(Decision(number, f"r{number}", False, "NO_HIT", 1))
    steps.settle(WAIT_S)
    [count] = daemon.stats()["decisions"]
    assert count["decisions"] == DECISIONS_QUEUED_MAX
    assert explain(daemon, "r1100")["decisions"]


def test_what_an_engine_learned_is_there_for_the_next_one_like_it(daemon: Daemon, steps: Steps) -> None:
    steps.ask_learned("model-a")
    steps.learn({"recompute": "first"})
    steps.settle(WAIT_S)
    steps.learn({"recompute": "second", "disk": "too"})
    steps.settle(WAIT_S)
    with Session.attach(daemon.endpoint, CLIENT) as session:
        other = Steps(session)
        other.ask_learned("model-a")
        other.settle(WAIT_S)
        assert other.take_learned() == {"recompute": "second", "disk": "too"}
        assert other.take_learned() == {}
        other.ask_learned("model-b")
        other.settle(WAIT_S)
        assert other.take_learned() == {}


def test_a_document_without_bounds_is_refused(daemon: Daemon, steps: Steps) -> None:
    steps.ask_learned("model-a")
    steps.learn({"recompute": "x" * (LEARNED_DOCUMENT_BYTES_MAX + 1)})
    with pytest.raises(LimitExceeded, match="document"):
        steps.settle(WAIT_S)
    daemon.assert_sound()


def test_with_a_disk_what_was_learned_survives_the_daemon(tmp_path: Path) -> None:
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "64MiB"]
    with running_daemon(arguments=flags, verify=False) as daemon, Session.attach(daemon.endpoint, CLIENT) as session:
        steps = Steps(session)
        steps.ask_learned("model-a")
        steps.learn({"recompute": "kept"})
        steps.settle(WAIT_S)
    for damage in (False, True):
        if damage:
            (tmp_path / "fs" / LEARNED).write_text("[7]")
        with (
            running_daemon(arguments=flags, verify=False) as daemon,
            Session.attach(daemon.endpoint, CLIENT) as session,
        ):
            steps = Steps(session)
            steps.ask_learned("model-a")
            steps.settle(WAIT_S)
            assert steps.take_learned() == ({} if damage else {"recompute": "kept"})


def test_reads_from_disk_are_timed_by_the_daemon(tmp_path: Path) -> None:
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "64MiB"]
    with running_daemon(arguments=flags) as daemon:
        with client_of(daemon) as client:
            client.put(None, {key(name): payload(name) for name in range(8)})
            eventually(lambda: daemon.tier("fs")["chunks"] == 8, "all are written")
        CliRunner().invoke(app, ["evict", "--tier", "cpu", "--endpoint", daemon.endpoint])
        with Session.attach(daemon.endpoint, CLIENT) as session:
            steps, reads = Steps(session), []
            steps.promote(session.tenant_id(None), [key(name) for name in range(8)])

            def told() -> bool:
                steps.settle(WAIT_S)
                reads.extend(steps.take_reads())
                return bool(reads)

            eventually(told, "the read is reported")
            [(chunks, seconds)] = reads
            assert chunks == 8
            assert 0 < seconds < WAIT_S


def test_of_an_evicted_chunk_it_says_who_needed_its_slot_and_of_each_tier_when(tmp_path: Path) -> None:
    slot_bytes = 12_288
    flags = ["--fs-dir", str(tmp_path / "fs"), "--fs-bytes", "2MiB", "--eviction-policy", "lru"]
    with (
        running_daemon(cpu_bytes=16 * slot_bytes, arguments=flags, verify=False) as daemon,
        client_of(daemon) as one,
        client_of(daemon, namespace={"model": "n"}) as other,
    ):
        one.put(None, {key(1): payload(1)})
        eventually(lambda: daemon.tier("fs")["chunks"] == 1, "it is on disk")
        for number in range(100, 116):
            other.put(None, {key(number): payload(number)})
        eventually(lambda: daemon.tier("fs")["chunks"] == 17, "all are on disk")
        in_both = kvstore(daemon, "ls", "tenants")["tenants"][0]
        counts = {tier: each["chunks"] for tier, each in in_both["by_tier"].items()}
        assert (in_both["chunks"], counts["fs"]) == (17, 17)
        assert 10 < counts["cpu"] < 17
        [fate] = explain(daemon, key(1).hex())["keys"]
        stored, evicted, now = fate["events"]
        assert re.fullmatch(r"stored \S+ s ago by client-1", stored)
        [row] = [row for row in kvstore(daemon, "ls", "namespaces")["namespaces"] if row["document"]["model"] == "n"]
        newcomer = re.fullmatch(
            rf"evicted from memory \S+ s ago, to make room for client-2, namespace {row['namespace_id']}; "
            r"the key (\S+) has its slot",
            evicted,
        )
        assert newcomer is not None
        assert newcomer[1] in {key(number).hex() for number in range(112, 116)}
        assert now == "in the fs tier now"
        numbers = itertools.count(200)

        def has_gone() -> bool:
            number = next(numbers)
            other.put(None, {key(number): payload(number)})
            return "in no tier now" in str(explain(daemon, key(1).hex())["keys"][0]["events"])

        eventually(has_gone, "it was evicted from disk")
        [fate] = explain(daemon, key(1).hex())["keys"]
        assert "evicted from disk" in fate["events"][1]
        assert "evicted from memory" in fate["events"][1]
        assert fate["events"][1].startswith("in no tier now: ")


def kvstore(daemon: Daemon, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    done = CliRunner().invoke(app, [*arguments, "--endpoint", daemon.endpoint, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found
