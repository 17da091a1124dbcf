"""What a killed process leaves behind: a worker that still writes, keys half stored, leases. Nothing of it is used."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import numpy as np
import pytest

from kvstore._native import slot_offset
from kvstore.client import StoreClient, Stored
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.testing import Daemon, running_daemon
from tests.crash import orphans
from tests.crash.chunks import CHUNK_BYTES, CPU_BYTES, NAMESPACE, SALT, SEED, SLOT_BYTES, content, key
from tests.crash.kills import wait_until

SLOTS_HELD = 4
BATCH = 40  # chunks of one put, fewer than a group may be granted
CYCLES = 3  # of the whole tier, so that every slot that can be granted is

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.crash.processes", "tests.crash.orphans"])


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=SEED) as daemon:
        yield daemon


@contextlib.contextmanager
def process(target: object, daemon: Daemon, *arguments: object) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """A process that has said its first word; killed at the end."""
    ours, theirs = _context.Pipe()
    started = _context.Process(target=target, args=(daemon.endpoint, theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        assert ours.poll(orphans.WAIT_S), "the process says nothing"
        ours.recv()
        yield started, ours
    finally:
        kill(started)
        ours.close()


def kill(victim: ForkServerProcess) -> None:
    victim.kill()
    victim.join(orphans.WAIT_S)
    assert victim.exitcode is not None


def ask(pipe: Connection, question: object = "go on") -> object:
    pipe.send(question)
    assert pipe.poll(orphans.WAIT_S), "no answer"
    return pipe.recv()


class Intruder:
    """A client that takes every slot there is, again and again, and reads back what it wrote."""

    def __init__(self, daemon: Daemon, first: int) -> None:
        self.daemon = daemon
        self.next = first
        self.client = StoreClient.attach(
            daemon.endpoint, namespace=NAMESPACE, chunk_bytes=CHUNK_BYTES, hash_seed=SEED, timeout_s=orphans.WAIT_S
        )

    def take_everything(self) -> None:
        slots = self.daemon.tier()["capacity_bytes"] // SLOT_BYTES
        for _ in range(CYCLES * slots // BATCH + 1):
            numbers = range(self.next, self.next + BATCH)
            self.next += BATCH
            chunks = {key(number): content(number) for number in numbers}
            outcomes = self.client.put(SALT, chunks)
            stored = [one for one in chunks if outcomes[one] == Stored()]
            assert len(stored) >= BATCH - 2, outcomes  # a table so small has now and then no place left for a key
            assert self.client.get(SALT, stored) == [chunks[one].tobytes() for one in stored]


def watching(daemon: Daemon) -> Session:
    """A process's view of table and arena, for the test's own eyes."""
    attachment = Attachment(role=Role.CLIENT, hash_seed=SEED, kinds=(Kind(NAMESPACE, CHUNK_BYTES),))
    return Session.attach(daemon.endpoint, attachment)


@pytest.mark.parametrize("child", [False, True], ids=["socket-closed", "child-holds-socket"])
def test_a_slot_is_not_granted_again_before_its_writer_has_ended(daemon: Daemon, child: bool) -> None:
    with (
        process(orphans.holding_scheduler, daemon, SLOTS_HELD, child) as (scheduler, scheduler_pipe),
        process(orphans.writing_worker, daemon) as (worker, worker_pipe),
        watching(daemon) as eyes,
    ):
        refs, child_pid = ask(scheduler_pipe)  # type: ignore[misc]
        assert len(refs) == SLOTS_HELD
        slots = np.array([slot for slot, _ in refs], np.uint32)
        generations = np.array([generation for _, generation in refs], np.uint64)

        def held_words() -> set[int]:
            words: set[int] = set()
            with eyes.arena.view() as view:
                for slot in slots.tolist():
                    begin = slot_offset(slot, SLOT_BYTES, eyes.table.unit_bytes)
                    words |= set(np.unique(np.frombuffer(bytes(view[begin : begin + CHUNK_BYTES]), np.uint64)).tolist())
            return words

        intruder = Intruder(daemon, first=100_000)
        try:
            worker_pipe.send(refs)
            ask(worker_pipe)
            os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
            kill(scheduler)
            wait_until(lambda: "scheduler" not in roles(daemon), "the daemon has seen the scheduler's end")
            intruder.take_everything()
            assert eyes.table.current(slots, generations) == bytes([1] * SLOTS_HELD), "a held slot was granted"
            assert held_words() == {int(orphans.ORPHAN)}
            assert daemon.tier()["evictions"] > 0

            os.kill(worker.pid, signal.SIGCONT)  # type: ignore[arg-type]
            rounds = ask(worker_pipe)
            intruder.take_everything()
            assert ask(worker_pipe) > rounds  # type: ignore[operator]  # it wrote all the time
            assert eyes.table.current(slots, generations) == bytes([1] * SLOTS_HELD), "a held slot was granted"
            assert held_words() == {int(orphans.ORPHAN)}
            assert daemon.tier()["granted_bytes"] >= SLOTS_HELD * SLOT_BYTES

            kill(worker)
            wait_until(lambda: daemon.tier()["granted_bytes"] == 0, "the slots are free with their writer's end")
            intruder.take_everything()
            assert eyes.table.current(slots, generations) == bytes(SLOTS_HELD), "a free slot is never used again"
            assert int(orphans.ORPHAN) not in held_words()
        finally:
            intruder.client.close()
            if child_pid:
                os.kill(child_pid, signal.SIGKILL)


def roles(daemon: Daemon) -> list[str]:
    return [session["role"] for session in daemon.stats()["sessions"]]  # type: ignore[attr-defined]


def test_keys_that_many_processes_store_at_once_are_stored_once(daemon: Daemon) -> None:
    writers, rounds, keys_per_round = 6, 12, 12  # six times twelve slots are less than may be granted at once
    shape = (rounds, keys_per_round)
    with contextlib.ExitStack() as stack:
        _, reader_pipe = stack.enter_context(process(orphans.same_keys_reader, daemon, *shape))
        started = [stack.enter_context(process(orphans.same_keys_writer, daemon, *shape)) for _ in range(writers)]
        for _, pipe in started:
            pipe.send("go on")
        wait_until(lambda: daemon.tier()["chunks"] > keys_per_round, "the writers are at work")
        kill(started[0][0])
        for _, pipe in started[1:]:
            assert pipe.poll(orphans.WAIT_S)
            assert pipe.recv() <= {"Stored", "Present"}
        read, wrong = ask(reader_pipe)  # type: ignore[misc]
        assert wrong is None
        assert read > 0
        wait_until(lambda: daemon.tier()["granted_bytes"] == 0, "no slot stays granted")
        tier = daemon.tier()
        assert tier["chunks"] == daemon.stats()["stores"] == rounds * keys_per_round
        assert tier["used_bytes"] == rounds * keys_per_round * SLOT_BYTES


def test_leases_of_killed_processes_end_and_others_are_served(daemon: Daemon) -> None:
    slots = daemon.tier()["capacity_bytes"] // SLOT_BYTES
    intruder = Intruder(daemon, first=100_000)
    for _ in range(5):
        with process(orphans.leasing_client, daemon, slots * 9 // 20) as (leasing, _):
            pinned = daemon.tier()["pinned_bytes"]
            assert pinned > slots * SLOT_BYTES // 4
            kill(leasing)
            wait_until(lambda: daemon.tier()["pinned_bytes"] == 0, "the dead process's leases end")
        intruder.take_everything()
    intruder.client.close()


CONNECT_AND_WAIT = """
import signal, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.recv(4096)
print("connected", flush=True)
signal.pause()
"""


def test_a_process_killed_between_connecting_and_attaching_leaves_nothing(daemon: Daemon) -> None:
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", CONNECT_AND_WAIT, str(daemon.runtime_dir / "arena.sock")],
            stdout=subprocess.PIPE,
            text=True,
        ) as connecting:
            assert connecting.stdout is not None
            assert connecting.stdout.readline() == "connected\n"
            assert "connecting" in roles(daemon)
            connecting.kill()
        wait_until(lambda: roles(daemon) == ["admin"], "the session of the dead process is forgotten")


def test_a_put_that_fails_at_its_copy_gives_its_slots_back_every_time() -> None:
    """Four slots, and more failures than slots."""
    with running_daemon(cpu_bytes=4 * SLOT_BYTES, hash_seed=SEED) as daemon:
        client = Intruder(daemon, first=0).client
        connection = client._connection
        assert connection is not None
        submit = connection._submit

        def failing(*_: object, **__: object) -> None:
            raise OSError("the copy failed")

        for number in range(200):
            connection._submit = failing  # type: ignore[method-assign]
            with pytest.raises(OSError, match="the copy failed"):
                client.put(SALT, {key(number): content(number)})
            connection._submit = submit  # type: ignore[method-assign]
        assert client.put(SALT, {key(1): content(1)}) == {key(1): Stored()}
        assert client.get(SALT, [key(0), key(1)]) == [None, content(1).tobytes()]
        client.close()
        wait_until(lambda: daemon.tier()["granted_bytes"] == 0, "no slot stays granted")
