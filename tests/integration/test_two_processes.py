"""Chunks from one process to another, and what is left when one of them, or the daemon, dies."""

import ctypes
import math
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore import admin
from kvstore import client as client_module
from kvstore import steps as steps_module
from kvstore._native import Finished, fill, slot_offset
from kvstore.client import Loaded, Lookup, Miss, Present, Rejected, RejectReason, StoreClient, Stored
from kvstore.errors import ConfigurationError, SeedMismatch, Unavailable
from kvstore.rpc.handover import Hello
from kvstore.session import Attachment, GroupState, Kind, KindState, Role, Session
from kvstore.steps import Steps
from kvstore.testing import Daemon, running_daemon
from tests.hanging_memory import HangingMemory
from tests.integration.conftest import CHUNK_BYTES, WAIT_S, client_of, eventually, key, payload, python
from tests.unit.native_store import rss_bytes

PUT_IN_ANOTHER_PROCESS = f"""
import sys
from kvstore._native import fill, slot_offset
from kvstore.client import StoreClient
with StoreClient.attach(sys.argv[1], namespace={{"model": "m"}}, chunk_bytes={CHUNK_BYTES}, hash_seed="0") as client:
    chunks = {{n.to_bytes(32, "big"): n.to_bytes(4, "big") * {CHUNK_BYTES // 4} for n in range(200)}}
    print({{type(outcome).__name__ for outcome in client.put("salt", chunks).values()}})
"""


def test_what_one_process_puts_another_gets(daemon: Daemon, client: StoreClient) -> None:
    put = python(PUT_IN_ANOTHER_PROCESS, daemon.endpoint)
    assert put.stdout == "{'Stored'}\n", put.stderr
    keys = [key(name) for name in range(201)]
    assert client.lookup("salt", keys) == [Lookup.CPU] * 200 + [Lookup.MISS]
    assert client.get("salt", keys) == [payload(name) for name in range(200)] + [None]
    buffers = {key(name): bytearray(CHUNK_BYTES) for name in range(198, 202)}
    assert client.get_into("salt", buffers) == {
        key(198): Loaded(), key(199): Loaded(), key(200): Miss(), key(201): Miss(),
    }  # fmt: skip
    assert (buffers[key(198)], buffers[key(199)]) == (payload(198), payload(199))
    client._connection._steps.settle(WAIT_S)  # type: ignore[union-attr]
    tier = daemon.tier()
    assert (tier["hits"], tier["misses"], tier["chunks"]) == (202, 3, 200)
    assert daemon.stats()["stores"] == 200


def test_another_tenant_namespace_or_none_finds_nothing(daemon: Daemon, client: StoreClient) -> None:
    client.put("salt", {key(1): payload(1)})
    assert client.lookup("salt", [key(1)]) == [Lookup.CPU]
    assert client.lookup("tlas", [key(1)]) == [Lookup.MISS]
    assert client.lookup(None, [key(1)]) == [Lookup.MISS]
    assert client.get("tlas", [key(1)]) == [None]
    with client_of(daemon, namespace={"model": "n"}) as other:
        assert other.lookup("salt", [key(1)]) == [Lookup.MISS]
        assert other.put("salt", {key(1): payload(2)}) == {key(1): Stored()}
    assert client.get("salt", [key(1)]) == [payload(1)]


def test_a_key_is_stored_once(daemon: Daemon, client: StoreClient) -> None:
    assert client.put("s", {key(1): payload(1)}) == {key(1): Stored()}
    with client_of(daemon) as other:
        assert other.put("s", {key(1): payload(9), key(2): payload(2)}) == {key(1): Present(), key(2): Stored()}
    assert client.get("s", [key(1)]) == [payload(1)]


def test_a_put_or_a_get_is_one_use_of_each_chunk() -> None:
    """Where chunks used once leave first: in a tier of three chunks one that was used twice outlives younger ones."""
    nbytes = 20_480
    with (
        running_daemon(cpu_bytes=1 << 16, arguments=["--eviction-policy", "probation"]) as daemon,
        client_of(daemon, chunk_bytes=nbytes) as client,
    ):
        assert daemon.stats()["eviction_policy"] == "probation"
        for name in (1, 2):
            client.put("s", {key(name): payload(name, nbytes)})
        assert client.get("s", [key(2)]) == [payload(2, nbytes)]
        for name in range(3, 7):
            assert client.put("s", {key(name): payload(name, nbytes)}) == {key(name): Stored()}
        assert client.lookup("s", [key(name) for name in (1, 2, 5, 6)]) == [
            Lookup.MISS, Lookup.CPU, Lookup.CPU, Lookup.CPU,
        ]  # fmt: skip
        assert client.put("s", {key(5): payload(5, nbytes)}) == {key(5): Present()}
        for name in range(7, 10):
            client.put("s", {key(name): payload(name, nbytes)})
        assert client.lookup("s", [key(2), key(5), key(9)]) == [Lookup.CPU] * 3


def test_two_processes_with_different_seeds_never_meet(daemon: Daemon) -> None:
    with pytest.raises(SeedMismatch, match=r"seed '00' and the daemon with '0'"):
        client_of(daemon, hash_seed="00")


def test_slots_of_a_client_that_closes_while_the_daemon_hangs_come_back(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not wait for the end of this process, which has said that it writes no more."""
    monkeypatch.setattr(steps_module, "CLOSE_TIMEOUT_S", 0.1)
    client = client_of(daemon)
    assert client._connection is not None
    assert len(client._connection._steps.wait_grants(3, WAIT_S)) == 3
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        client.close()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: daemon.tier()["granted_bytes"] == 0, "the slots of the client that has gone are free")
    assert [session["role"] for session in daemon.stats()["sessions"]] == ["admin"]  # type: ignore[attr-defined]
    daemon.assert_sound()


def test_a_tier_whose_slots_are_all_leased_or_granted_rejects() -> None:
    size = 1 << 20
    other = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, size),))
    with (
        running_daemon(cpu_bytes=2 * size) as daemon,
        client_of(daemon, chunk_bytes=size) as client,
        Session.attach(daemon.endpoint, other) as session,
    ):
        steps = Steps(session)
        assert client.put("s", {key(1): payload(1, size)}) == {key(1): Stored()}
        _, slots, generations = session.table.lookup(session.namespace_id, session.tenant_id("s"), [key(1)])
        steps.lease(int(slots[0]), int(generations[0]))
        [held] = steps.wait_grants(1, WAIT_S)
        steps.settle(WAIT_S)
        assert client.put("s", {key(2): payload(2, size)}) == {key(2): Rejected(RejectReason.TIER_FULL)}
        steps.abort(*held)
        steps.settle(WAIT_S)
        assert client.put("s", {key(2): payload(2, size)}) == {key(2): Stored()}
        assert client.get("s", [key(1), key(2)]) == [payload(1, size), payload(2, size)]


def test_slots_for_the_next_put_come_with_the_outcomes_of_this_one_and_end_with_a_removal() -> None:
    with running_daemon() as daemon, client_of(daemon) as client:
        connection = client._connection
        assert connection is not None
        steps = connection._steps
        assert client.put("s", {key(1): payload(1)}) == {key(1): Stored()}
        steps.settle(WAIT_S)
        assert steps.grants_free() == 0  # this may have been the only one
        steps.keep_grants([1 << 30])  # so that the clock has no say in this
        connection._put_ended_s = math.inf
        assert client.put("s", {key(name): payload(name) for name in range(2, 7)}) == dict.fromkeys(
            map(key, range(2, 7)), Stored()
        )
        steps.settle(WAIT_S)
        assert steps.grants_free() == 5
        connection._put_ended_s = math.inf
        with connection._one_more_put():  # as in another thread, which may begin before these outcomes
            assert client.put("s", {key(name): payload(name) for name in range(7, 10)}) == dict.fromkeys(
                map(key, range(7, 10)), Stored()
            )
        steps.settle(WAIT_S)
        assert steps.grants_free() == 6
        assert admin.remove(daemon.endpoint, admin.selection())["evicted_chunks"] == 9
        assert client.put("s", {key(1): payload(1)}) == {key(1): Stored()}
        assert client.get("s", [key(1)]) == [payload(1)]
        steps.keep_grants([])
        eventually(lambda: daemon.tier()["granted_bytes"] == 0, "slots kept for a next put go back")


def test_a_put_whose_copy_fails_leaves_no_chunk_and_no_slot() -> None:
    chunks = {key(name): payload(name) for name in range(8)}
    with running_daemon() as daemon, client_of(daemon) as client:
        connection = client._connection
        assert connection is not None
        ended_copy = connection._ended_copy

        def failing(job: int) -> Finished:
            ended_copy(job)
            raise OSError("the copy failed")

        connection._ended_copy = failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="the copy failed"):
            client.put("s", chunks)
        eventually(lambda: daemon.tier()["granted_bytes"] == 0, "the slots are free again")
        assert client.lookup("s", list(chunks)) == [Lookup.MISS] * 8
        connection._ended_copy = ended_copy  # type: ignore[method-assign]
        assert set(client.put("s", chunks).values()) == {Stored()}
        assert client.get("s", list(chunks)) == list(chunks.values())


def test_of_copies_that_nobody_waited_for_to_the_end_nothing_is_kept(client: StoreClient) -> None:
    chunks = {key(name): payload(name) for name in range(8)}
    client.put("s", chunks)
    connection = client._connection
    assert connection is not None

    def gives_up(_: int) -> Finished:
        raise Unavailable("the copy takes too long")

    ended_copy, connection._ended_copy = connection._ended_copy, gives_up  # type: ignore[method-assign]
    for name in range(3):
        with pytest.raises(Unavailable, match="too long"):
            client.put("s", {key(100 + name): payload(name)})
        with pytest.raises(Unavailable, match="too long"):
            client.get_into("s", {key(name): bytearray(CHUNK_BYTES)})
    connection._ended_copy = ended_copy  # type: ignore[method-assign]
    assert client.get("s", list(chunks)) == list(chunks.values())
    client.put("s", {key(100): payload(100)})
    assert connection._ended == {}


def test_a_slot_is_given_back_only_when_the_copy_into_it_has_ended() -> None:
    size = 4096
    with HangingMemory(size) as memory, running_daemon() as daemon, client_of(daemon, chunk_bytes=size) as client:
        connection = client._connection
        assert connection is not None
        copier, abort = connection._copier, connection._steps.abort
        jobs: list[int] = []
        ended_at_abort: list[bool] = []

        class LettingGo:
            """Whoever waits for the end of a job, however long it takes, gets it."""

            def __getattr__(self, name: str) -> object:
                return getattr(copier, name)

            def wait(self, jobs: list[int], timeout_s: float) -> bool:
                memory.let_go()
                return copier.wait(jobs, timeout_s)

        def failing(job: int) -> Finished:
            jobs.append(job)
            raise Unavailable("the copy takes too long")

        def seen_abort(slot: int, generation: int) -> None:
            ended_at_abort.append(copier.wait(jobs, 0))
            memory.let_go()
            abort(slot, generation)

        source = (ctypes.c_char * size).from_address(memory.address)
        copier.add_region(memory.address, size)  # as by another call of the same buffer
        connection._copier, connection._ended_copy = LettingGo(), failing  # type: ignore[assignment, method-assign]
        connection._steps.abort = seen_abort  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="the copy takes too long"):
            client.put("s", {key(1): source})
        assert ended_at_abort == [True]
        copier.remove_region(memory.address)


def test_the_next_put_is_copied_while_commits_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_STALE_MS", math.inf)
    outcomes: dict[int, object] = {}
    with running_daemon() as daemon, client_of(daemon, timeout_s=WAIT_S) as client:
        connection = client._connection
        assert connection is not None
        steps, commit_many = connection._steps, connection._steps.commit_many
        committed: queue.Queue[list[bytes]] = queue.Queue()

        def seen_commit(commits: Any) -> list[int]:
            committed.put(list(commits[0].keys))
            return commit_many(commits)

        def put(name: int) -> None:
            outcomes[name] = client.put("s", {key(1): payload(name), key(name): payload(name)})

        steps.commit_many = seen_commit  # type: ignore[method-assign]
        steps.keep_grants([1 << 30])
        steps.want_grants(4)
        steps.settle(WAIT_S)
        os.kill(daemon.pid, signal.SIGSTOP)
        callers = [threading.Thread(target=put, args=(name,)) for name in (2, 3)]
        try:
            for caller in callers:
                caller.start()
            both = [committed.get(timeout=WAIT_S) for _ in callers]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        for caller in callers:
            caller.join(WAIT_S)
        # Of the key that both put the first commit is kept, and the other caller learns that it is there.
        first, second = both[0][1], both[1][1]
        assert outcomes == {
            int.from_bytes(first): {key(1): Stored(), first: Stored()},
            int.from_bytes(second): {key(1): Present(), second: Stored()},
        }
        assert client.get("s", [key(1)]) == [payload(int.from_bytes(first))]
        assert daemon.tier()["chunks"] == 3
        steps.keep_grants([])
        eventually(lambda: daemon.tier()["granted_bytes"] == 0, "no slot is left over")


def test_a_put_ends_when_the_table_shows_its_chunks_though_the_answer_is_still_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_STALE_MS", math.inf)
    monkeypatch.setattr(client_module, "SHOWN_LOOKS", 1 << 30)
    with running_daemon() as daemon, client_of(daemon, timeout_s=WAIT_S) as client:
        connection = client._connection
        assert connection is not None
        steps, apply = connection._steps, connection._steps._apply
        steps.want_grants(2)
        steps.settle(WAIT_S)
        answers: queue.Queue[Any] = queue.Queue()
        steps._apply = answers.put  # type: ignore[method-assign]
        assert client.put("s", {key(1): payload(1), key(2): payload(2)}) == {key(1): Stored(), key(2): Stored()}
        assert client.lookup("s", [key(1), key(2)]) == [Lookup.CPU, Lookup.CPU]
        apply(answers.get(timeout=WAIT_S))
        assert (steps._outcomes, steps._unasked, steps._unanswered) == ({}, set(), {})
        del steps._apply
        # Of one that somebody else stored meanwhile the table shows another slot: that is not this put's.
        with client_of(daemon) as other:
            commit_many = steps.commit_many

            def beaten(commits: Any) -> list[int]:
                assert other.put("s", {key(4): payload(5)}) == {key(4): Stored()}
                return commit_many(commits)

            steps.commit_many = beaten  # type: ignore[method-assign]
            assert client.put("s", {key(3): payload(3), key(4): payload(4)}) == {key(3): Stored(), key(4): Present()}
        assert client.get("s", [key(3), key(4)]) == [payload(3), payload(5)]


def test_slots_of_puts_in_two_threads_that_a_removal_took_back_are_made_up_for() -> None:
    outcomes: dict[int, object] = {}

    def put(name: int) -> None:
        outcomes[name] = client.put("s", {key(name): payload(name)})

    with running_daemon() as daemon, client_of(daemon) as client:
        connection = client._connection
        assert connection is not None
        steps = connection._steps
        assert client.put("s", {key(1): payload(1)}) == {key(1): Stored()}
        steps.keep_grants([1 << 30])
        steps.want_grants(2)
        steps.settle(WAIT_S)
        assert admin.remove(daemon.endpoint, admin.selection())["evicted_chunks"] == 1
        callers = [threading.Thread(target=put, args=(name,)) for name in (2, 3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(WAIT_S)
        assert outcomes == {2: {key(2): Stored()}, 3: {key(3): Stored()}}
        assert client.get("s", [key(2), key(3)]) == [payload(2), payload(3)]


def test_a_chain_longer_than_the_tier_keeps_its_head_and_its_tail_is_rejected() -> None:
    size = 1 << 20
    with running_daemon(cpu_bytes=8 * size) as daemon, client_of(daemon, chunk_bytes=size) as client:
        chunks = {key(name): payload(name, size) for name in range(12)}
        outcomes = client.put("s", chunks)
        assert list(outcomes.values()) == [Stored()] * 8 + [Rejected(RejectReason.TIER_FULL)] * 4
        assert client.get("s", list(chunks)) == [*list(chunks.values())[:8], None, None, None, None]
        assert daemon.tier()["used_bytes"] == 8 * size
        other = {key(name): payload(name, size) for name in range(100, 103)}
        assert set(client.put("s", other).values()) == {Stored()}  # another chain takes its end away
        assert client.get("s", list(chunks))[:6] == [*list(chunks.values())[:5], None]
        assert client.get("s", list(other)) == list(other.values())


def test_a_scheduler_maps_the_table_ahead_of_use_and_not_the_arena(daemon: Daemon) -> None:
    with Session.attach(daemon.endpoint, Attachment(role=Role.SCHEDULER, hash_seed="0", group="engine")) as session:
        assert session.premapping is not None
        assert session.premapping.wait(WAIT_S)
        mapped, beyond = rss_bytes("kvstore-table", "r--s"), 1 << 62
        assert session.table.premap(0, beyond) <= mapped
        assert rss_bytes("kvstore-arena", "rw-s") == 0


def test_a_process_that_copies_maps_the_arena_ahead_of_use() -> None:
    with (
        running_daemon(cpu_bytes="64MiB") as daemon,
        Session.attach(
            daemon.endpoint,
            Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, 4096),)),
        ) as session,
    ):
        assert session.premapping is not None
        assert session.premapping.wait(WAIT_S)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        fill(session.arena.address, session.arena.nbytes, 1)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < 1000  # of 16,384 pages


def test_a_put_of_more_chunks_than_the_queue_takes_is_stored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "QUEUED_OPERATIONS_MAX", 64)
    # Large enough that its table, an entry for each 128 KiB, is far from full: a full one drops chunks of this size.
    with running_daemon(cpu_bytes="512MiB") as daemon, client_of(daemon, chunk_bytes=4096) as client:
        outcomes = client.put("s", {key(name): payload(name, 4096) for name in range(600)})
        assert set(outcomes.values()) == {Stored()}
        assert client.get("s", [key(name) for name in range(600)]) == [payload(name, 4096) for name in range(600)]


def test_chunks_too_small_for_the_table_to_name_them_all_still_make_room_for_new_ones() -> None:
    # By LRU, which keeps the young; what is only ever stored teaches the adaptive policy otherwise.
    with (
        running_daemon(arguments=["--eviction-policy", "lru"]) as daemon,
        client_of(daemon, chunk_bytes=4096) as client,
    ):
        refused = 0
        for start in range(0, 4000, 200):
            names = range(start, start + 200)
            outcomes = client.put("s", {key(name): payload(name, 4096) for name in names})
            assert set(outcomes.values()) <= {Stored(), Rejected(RejectReason.TIER_FULL)}
            refused += sum(outcome != Stored() for outcome in outcomes.values())
        assert refused < 100  # by chance: all places where the table looks for a key hold chunks that have children
        kept = client.get("s", [key(name) for name in range(3800, 4000)])
        assert all(found in (None, payload(name, 4096)) for name, found in zip(range(3800, 4000), kept, strict=True))
        assert sum(found is not None for found in kept) > 150
        tier = daemon.tier()
        assert tier["evictions"] == 4000 - refused - tier["chunks"]
        assert tier["used_bytes"] < tier["capacity_bytes"] / 2  # it is the table that is full


def test_an_attach_that_fails_half_way_leaves_no_session(daemon: Daemon) -> None:
    with pytest.raises(ConfigurationError, match=r"a copier of 0 threads"):
        client_of(daemon, copy_threads=0)

    def only_who_asks() -> bool:
        sessions = daemon.stats()["sessions"]
        assert isinstance(sessions, list)
        return [session["role"] for session in sessions] == ["admin"]

    eventually(only_who_asks, "the daemon forgets the session")


def test_threads_share_a_client(client: StoreClient) -> None:
    failures: list[object] = []

    def work(thread: int) -> None:
        try:
            names = range(thread * 100, thread * 100 + 60)
            chunks = {key(name): payload(name) for name in names}
            assert set(client.put("s", chunks).values()) == {Stored()}
            assert client.get("s", list(chunks)) == list(chunks.values())
            buffers = {name: bytearray(CHUNK_BYTES) for name in chunks}
            assert set(client.get_into("s", buffers).values()) == {Loaded()}
            assert buffers == chunks
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []


def test_a_dead_daemon_is_unavailable_and_its_successor_is_found(runtime_dir: Path) -> None:
    with running_daemon(runtime_dir=runtime_dir) as first:
        client = client_of(first)
        client.put("s", {key(1): payload(1)})
        first.kill()
        with pytest.raises(Unavailable):
            client.put("s", {key(2): payload(2)})
        with pytest.raises(Unavailable, match=r"no daemon answers at unix://.*kvstore.sock"):
            client.get("s", [key(1)])
    with running_daemon(runtime_dir=runtime_dir):
        assert client.lookup("s", [key(1)]) == [Lookup.MISS]
        assert client.put("s", {key(2): payload(2)}) == {key(2): Stored()}
        assert client.get("s", [key(2)]) == [payload(2)]
        client.close()


def test_a_daemon_that_dies_while_a_put_waits_ends_it(daemon: Daemon, client: StoreClient) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    threading.Timer(0.2, daemon.kill).start()
    with pytest.raises(Unavailable):
        client.put("s", {key(1): payload(1)})
    eventually(lambda: daemon.process.poll() is not None, "the daemon ends")


def test_a_hung_daemon_is_unavailable_after_the_time_out_and_works_again_after(daemon: Daemon) -> None:
    with client_of(daemon, timeout_s=0.3) as client:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match=r"did not answer .* within 0.3 s"):
                client.put("s", {key(1): payload(1)})
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    with client_of(daemon) as client:
        assert client.put("s", {key(1): payload(1)}) == {key(1): Stored()}
    eventually(lambda: daemon.tier()["granted_bytes"] == 0, "unused slots come back")


HOLD_200_GRANTS = """
import signal, sys
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Steps
session = Session.attach(
    sys.argv[1], Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, 4096),))
)
steps = Steps(session)
print(len(steps.wait_grants(200, 10)), flush=True)
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:  # a child that holds the memory, and would hold the socket
        os.write(1, b"forked\\n")
    else:
        os.write(1, b"parent\\n")
signal.pause()
"""


def test_the_slots_of_a_killed_process_come_back() -> None:
    with running_daemon(cpu_bytes="128MiB") as daemon:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD_200_GRANTS, daemon.endpoint], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "200\n"
            assert daemon.tier()["granted_bytes"] == 200 * 4096
            process.kill()
        eventually(lambda: daemon.tier()["granted_bytes"] == 0, "200 grants are free again")
        assert [session["role"] for session in daemon.stats()["sessions"]] == ["admin"]  # type: ignore[attr-defined]


def test_a_forked_child_does_not_keep_a_dead_processs_slots() -> None:
    with running_daemon(cpu_bytes="128MiB") as daemon:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD_200_GRANTS, daemon.endpoint, "fork"],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "200\n"
        assert {process.stdout.readline(), process.stdout.readline()} == {"forked\n", "parent\n"}
        try:
            process.kill()
            process.wait(WAIT_S)
            eventually(lambda: daemon.tier()["granted_bytes"] == 0, "200 grants are free again")
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the child
            process.stdout.close()


def test_a_hang_up_of_a_living_process_ends_leases_but_no_grant(daemon: Daemon) -> None:
    hold = """
import socket
import sys
from kvstore._native import slot_offset
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Steps
attachment = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, 4096),))
session = Session.attach(sys.argv[1], attachment)
steps = Steps(session)
stored, kept = steps.wait_grants(2, 10)
with session.arena.view() as view:
    offset = slot_offset(stored[0], 4096, session.table.unit_bytes)
    view[offset : offset + 4096] = bytes(4096)
steps.wait([steps.commit(*stored, session.tenant_id("s"), b"k" * 32, b"")], 10)
steps.lease(*stored)
steps.settle(10)
print("leased", flush=True)
sys.stdin.readline()
session._sock.shutdown(socket.SHUT_RDWR)  # without a goodbye
print("hung up", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", hold, daemon.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "leased\n"
        tier = daemon.tier()
        assert (tier["pinned_bytes"], tier["granted_bytes"]) == (4096, 4096)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hung up\n"
        eventually(lambda: daemon.tier()["pinned_bytes"] == 0, "the lease ends")
        assert daemon.tier()["granted_bytes"] == 4096
        process.kill()
    eventually(lambda: daemon.tier()["granted_bytes"] == 0, "the grant ends with the process")


def test_a_session_is_not_for_a_forked_child(daemon: Daemon) -> None:
    fork = """
import os, sys
from kvstore._native import fill, slot_offset
from kvstore.client import StoreClient
from kvstore.errors import KVStoreError
client = StoreClient.attach(sys.argv[1], namespace={"model": "m"}, chunk_bytes=4096, hash_seed="0")
child = os.fork()
if child == 0:
    try:
        client.lookup("s", [b"k" * 32])
    except KVStoreError as error:
        os._exit(0 if "attach again" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(client.put("s", {b"k" * 32: bytes(4096)}))
client.close()
"""
    done = python(fork, daemon.endpoint)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "0"
    assert "Stored()" in lines[1]


ENDS_WITHOUT_CLOSING = """
import sys
from kvstore.client import StoreClient
client = StoreClient.attach(sys.argv[1], namespace={"model": "m"}, chunk_bytes=4096, hash_seed="0")
print(client.put("s", {b"k" * 32: bytes(4096)}))
"""


def test_a_process_that_ends_without_closing_while_it_still_maps_the_arena_ends() -> None:
    with running_daemon(cpu_bytes="768MiB", verify=False) as daemon:
        done = python(ENDS_WITHOUT_CLOSING, daemon.endpoint)
        assert done.returncode == 0, done.stderr


def test_a_process_that_ends_without_closing_ends(daemon: Daemon) -> None:
    done = python(ENDS_WITHOUT_CLOSING, daemon.endpoint)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    eventually(lambda: len(daemon.stats()["sessions"]) == 1, "only the asking session is left")  # type: ignore[arg-type]


def test_a_broken_stream_is_mended_without_a_word(daemon: Daemon) -> None:
    attachment = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, 4096),))
    with Session.attach(daemon.endpoint, attachment) as session:
        steps = Steps(session)
        first, second = steps.wait_grants(2, WAIT_S)
        for slot, _ in (first, second):
            fill(session.arena.address + slot_offset(slot, 4096, session.table.unit_bytes), 4096, 0)
        tenant = session.tenant_id("s")
        ticket = steps.commit(*first, tenant, key(1), b"")
        steps.flush()
        steps._call.cancel()  # type: ignore[union-attr]
        tickets = [ticket, steps.commit(*second, tenant, key(2), key(1))]
        assert [outcome.name for outcome in steps.wait(tickets, WAIT_S)] == ["STORED", "STORED"]
        assert daemon.stats()["stores"] == 2


def test_on_lost_is_called_once(daemon: Daemon) -> None:
    calls: list[int] = []
    lost = threading.Event()
    attachment = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, 4096),))
    with Session.attach(daemon.endpoint, attachment, on_lost=lambda: (calls.append(1), lost.set())) as session:
        daemon.kill()
        assert lost.wait(WAIT_S)
        assert session.lost
    assert calls == [1]


def test_a_stopped_daemon_tells_its_clients(daemon: Daemon, client: StoreClient) -> None:
    client.put("s", {key(1): payload(1)})
    daemon.stop()
    with pytest.raises(Unavailable, match=r"start one with `kvstore serve`"):
        client.lookup("s", [key(1)])


def test_sessions_that_came_and_went_leave_nothing_in_either_process(daemon: Daemon) -> None:
    def open_files() -> tuple[int, int, int]:
        return (
            len(os.listdir(f"/proc/{daemon.pid}/fd")),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
        )

    def come_and_go() -> None:
        with client_of(daemon) as client:
            client.put("s", {key(1): payload(1)})
            client.get("s", [key(1)])

    come_and_go()
    settled = open_files()
    for _ in range(10):
        come_and_go()
    eventually(lambda: all(now <= then for now, then in zip(open_files(), settled, strict=True)), "all is closed")


def test_a_scheduler_learns_of_its_workers_without_asking(daemon: Daemon) -> None:
    states: queue.Queue[GroupState] = queue.Queue()
    engine = {"hash_seed": "0", "group": "engine", "world_size": 2}
    with Session.attach(daemon.endpoint, Attachment(role=Role.SCHEDULER, **engine)) as scheduler:
        assert not scheduler.group_state.complete
        steps = Steps(scheduler, on_group=states.put)
        steps.settle(WAIT_S)
        ranks = [
            Attachment(
                role=Role.WORKER, rank=rank, kinds=(Kind({"model": "m"}, 8192, 4096 * rank, 4096),), **engine,
            )
            for rank in range(2)
        ]  # fmt: skip
        first = Session.attach(daemon.endpoint, ranks[0])
        assert not states.get(timeout=WAIT_S).complete
        with Session.attach(daemon.endpoint, ranks[1]) as second:
            state = states.get(timeout=WAIT_S)
            assert (state.complete, state.kinds) == (True, (KindState(second.namespace_id, 8192),))
            assert scheduler.tenant_id("s") == second.tenant_id("s")
            assert len(steps.wait_grants(3, WAIT_S)) == 3
        assert not states.get(timeout=WAIT_S).complete
        first.close()


def test_a_scheduler_whose_workers_came_before_its_stream_learns_of_them_all_the_same(daemon: Daemon) -> None:
    """After a daemon's restart both halves of an engine attach at once, in any order."""
    states: queue.Queue[GroupState] = queue.Queue()
    engine = {"hash_seed": "0", "group": "engine"}
    worker = Attachment(role=Role.WORKER, kinds=(Kind({"model": "m"}, 8192, 0, 8192),), **engine)
    with Session.attach(daemon.endpoint, Attachment(role=Role.SCHEDULER, **engine)) as scheduler:
        assert not scheduler.group_state.complete
        with Session.attach(daemon.endpoint, worker):
            Steps(scheduler, on_group=states.put)
            assert states.get(timeout=WAIT_S).complete


def test_a_scheduler_whose_stream_was_broken_meanwhile_learns_of_its_workers(daemon: Daemon) -> None:
    states: queue.Queue[GroupState] = queue.Queue()
    engine = {"hash_seed": "0", "group": "engine"}
    worker = Attachment(role=Role.WORKER, kinds=(Kind({"model": "m"}, 8192, 0, 8192),), **engine)
    with Session.attach(daemon.endpoint, Attachment(role=Role.SCHEDULER, **engine)) as scheduler:
        steps = Steps(scheduler, on_group=states.put)
        steps.settle(WAIT_S)
        steps._call.cancel()  # type: ignore[union-attr]
        with Session.attach(daemon.endpoint, worker):
            while not states.get(timeout=WAIT_S).complete:
                pass


def test_attaching_to_a_daemon_that_says_little_ends_in_time(runtime_dir: Path) -> None:
    """The time-out is for all of it, not for each of its waits."""
    runtime_dir.mkdir()
    timeout_s = 2.0
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as arena,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as grpc_socket,
    ):
        arena.bind(os.fspath(runtime_dir / "arena.sock"))
        grpc_socket.bind(os.fspath(runtime_dir / "kvstore.sock"))
        arena.listen()
        grpc_socket.listen()  # and never answers

        def say_hello_late() -> None:
            connection, _ = arena.accept()
            threading.Event().wait(0.75 * timeout_s)
            connection.send(Hello(bytes(32)).encode())
            connections.append(connection)

        connections: list[socket.socket] = []
        daemon = threading.Thread(target=say_hello_late)
        daemon.start()
        attachment = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, 4096),))
        started_s = time.monotonic()
        with pytest.raises(Unavailable):
            Session.attach(f"unix://{runtime_dir}/kvstore.sock", attachment, timeout_s=timeout_s)
        assert time.monotonic() - started_s < 1.6 * timeout_s
        daemon.join()
        connections[0].close()
