"""Kill the daemon, either half of an engine, or a client, at random moments under load, and look at what is left.

`python -m tests.crash.kills --kills 200 --seed N` (without a seed it chooses one; it prints it either way). A seed
fixes who is killed, how and when in a process's life; the threads of seven processes it cannot fix.

After each kill the survivors go on, what was killed starts again, and then everybody pauses. What must hold: no
process ever read a wrong byte (each chunk's content follows from its key, and slots are full of poison until they are
written), the daemon finds no broken invariant, nobody committed poison, and not one granted or leased byte is left.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore import admin
from kvstore.errors import KVStoreError
from kvstore.testing import Daemon, start_daemon
from tests.crash import processes
from tests.crash.chunks import CPU_BYTES, SEED, SLOT_BYTES, Tally

VICTIMS = ("daemon", "scheduler", "worker", "client")
CLIENTS = 2
WAIT_S = 60.0  # generous: the machine may be busy with other things
LOOK_AGAIN_S = 0.01
AT_START = 0.2  # so many kills come before the victim has done anything
HELD = 0.4  # so many schedulers are killed while their worker is stopped, perhaps in mid-store
HUNG = 0.3  # so many daemons are stopped for a while before they are killed
CHUNKS_UNDER_LOAD = 200  # read rightly by all together before the next kill

_context = multiprocessing.get_context("forkserver")


class Violation(AssertionError):
    """What must not happen has happened."""


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not happened():
        if time.monotonic() > deadline_s:
            raise Violation(f"did not happen within {WAIT_S:g} s: {what}")
        time.sleep(LOOK_AGAIN_S)


@dataclass
class Member:
    """One process and its row of the tally."""

    process: multiprocessing.context.ForkServerProcess
    row: int

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.join(WAIT_S)
        if self.process.exitcode is None:
            raise Violation(f"process {self.pid} is still there after {WAIT_S:g} s")


class Node:
    """One daemon, one engine of two halves, and some clients."""

    def __init__(self, folder: Path, seed: int, *, arguments: Sequence[str] = ()) -> None:
        """`arguments`: of the daemon, beside the usual ones."""
        _context.set_forkserver_preload(["tests.crash.processes"])
        self.folder = folder
        self.rnd = random.Random(seed)
        self.tally = Tally(folder, Tally.ROWS - 1)
        self.engines_started = 0
        self.arguments = arguments
        self.daemon = self._start_daemon()
        self.engine: dict[str, Member] = {}
        self.clients: list[Member] = []
        try:
            self.start_engine()
            for number in range(CLIENTS):
                self.clients.append(self.start_client(number))
        except BaseException:
            self.stop()
            raise

    # -- starting

    def _start_daemon(self) -> Daemon:
        daemon = self.spawn_daemon()
        daemon.wait_until_ready()
        return daemon

    def spawn_daemon(self) -> Daemon:
        return start_daemon(
            runtime_dir=self.folder / "run", cpu_bytes=CPU_BYTES, hash_seed=SEED, arguments=self.arguments
        )

    def start_engine(self) -> None:
        self.engines_started += 1
        group = f"engine-{self.engines_started}"
        ours = _context.Pipe()
        endpoint = self.daemon.endpoint
        for name, row, pipe in (("scheduler", 1, ours[0]), ("worker", 2, ours[1])):
            self.tally.reset(row)
            arguments = [endpoint, group, pipe, self.folder, row]
            if name == "scheduler":
                arguments.append(self.rnd.randrange(1 << 30))
            process = _context.Process(target=getattr(processes, name), args=arguments, daemon=True)
            process.start()
            self.engine[name] = Member(process, row)
        for end in ours:  # or neither half would see the other's end
            end.close()

    def start_client(self, number: int) -> Member:
        row = 3 + number
        self.tally.reset(row)
        arguments = (self.daemon.endpoint, self.folder, row, self.rnd.randrange(1 << 30))
        process = _context.Process(target=processes.client, args=arguments, daemon=True)
        process.start()
        return Member(process, row)

    def replace_daemon(self) -> None:
        """After it was killed."""
        self.close_daemon()
        self.daemon = self._start_daemon()

    # -- looking

    def members(self) -> list[Member]:
        return [*self.engine.values(), *self.clients]

    def read_rightly(self) -> int:
        return sum(self.tally.read_rightly(member.row) for member in self.members())

    def all_attached(self) -> bool:
        roles = Counter(session["role"] for session in self.stats()["sessions"])  # type: ignore[attr-defined]
        return (roles["scheduler"], roles["worker"], roles["client"]) == (1, 1, CLIENTS)

    def stats(self) -> dict[str, object]:
        return admin.stats_json(admin.stats(self.daemon.endpoint))

    def require_no_wrong_byte(self) -> None:
        if wrongs := self.tally.wrongs():
            raise Violation(f"{len(wrongs)} wrong chunks; {wrongs[0]}")

    def require_sound(self) -> None:
        self.require_no_wrong_byte()
        stats = self.stats()
        if stats["problems"]:
            raise Violation(f"the daemon's invariants are broken: {stats['problems']}")
        if stats["poison_commits"]:
            raise Violation(f"{stats['poison_commits']} chunks were committed with poison in them")
        for member in self.members():
            if member.process.exitcode is not None:
                raise Violation(f"process {member.pid} ended by itself with {member.process.exitcode}")

    def require_quiet(self) -> None:
        """Everybody pauses; nothing may be left granted or leased."""
        self.tally.paused = True
        wait_until(lambda: all(self.tally.is_idle(member.row) for member in self.members()), "everybody is idle")
        wait_until(
            lambda: (self.daemon.tier()["granted_bytes"], self.daemon.tier()["pinned_bytes"]) == (0, 0),
            f"no byte is granted or leased any more; now {self.daemon.tier()}",
        )
        self.require_sound()
        tier = self.daemon.tier()
        if tier["used_bytes"] != tier["chunks"] * SLOT_BYTES:
            raise Violation(f"{tier['chunks']} chunks in {tier['used_bytes']} bytes")
        self.tally.paused = False

    # -- killing

    def kill_once(self, victim: str) -> str:
        """Returns what was done, in words."""
        how = ""
        if self.rnd.random() < AT_START:
            how = " at its start"
        else:
            before = self.read_rightly()
            wait_until(lambda: self.read_rightly() >= before + CHUNKS_UNDER_LOAD, "the processes load chunks")
        time.sleep(self.rnd.uniform(0, 0.05))
        if victim == "daemon":
            instance_id = self.stats()["instance_id"]
            if self.rnd.random() < HUNG:
                how += " while it hung"
                os.kill(self.daemon.pid, signal.SIGSTOP)
                time.sleep(self.rnd.uniform(0.1, 0.5))
            self.daemon.kill()
            self.replace_daemon()
            if self.stats()["instance_id"] == instance_id:
                raise Violation("two daemons with one instance id")
            wait_until(self.all_attached, "every process has found the new daemon")
            for member in (self.engine["worker"], *self.clients):
                before = self.tally.read_rightly(member.row)
                wait_until(
                    lambda row=member.row, before=before: self.tally.read_rightly(row) > before,
                    f"process {member.pid} is served by the new daemon",
                )
        elif victim == "client":
            number = self.rnd.randrange(CLIENTS)
            self.clients[number].kill()
            self.require_served_without(self.clients[number])
            self.clients[number] = self.start_client(number)
        else:
            if victim == "scheduler" and self.rnd.random() < HELD:
                how += " while its worker was stopped"
                self._kill_scheduler_of_stopped_worker()
            else:
                self.engine[victim].kill()
            for member in self.engine.values():
                member.end()
            self.start_engine()
        return victim + how

    def _kill_scheduler_of_stopped_worker(self) -> None:
        worker = self.engine["worker"]
        os.kill(worker.pid, signal.SIGSTOP)
        self.engine["scheduler"].kill()
        self.require_served_without(*self.engine.values())  # the others fill the tier meanwhile
        if self.rnd.random() < 0.5:
            os.kill(worker.pid, signal.SIGCONT)
        else:
            worker.kill()

    def require_served_without(self, *gone: Member) -> None:
        others = [member for member in self.members() if member not in gone]
        rows = [member.row for member in others]
        before = sum(map(self.tally.read_rightly, rows))
        wait_until(
            lambda: sum(map(self.tally.read_rightly, rows)) > before + CHUNKS_UNDER_LOAD // 4,
            "those that were not killed are served",
        )
        self.require_no_wrong_byte()
        if problems := self.stats()["problems"]:
            raise Violation(f"the daemon's invariants are broken: {problems}")

    # -- stopping

    def close_daemon(self) -> None:
        assert self.daemon.process.stdout is not None
        self.daemon.process.stdout.close()
        self.daemon.log_path.unlink(missing_ok=True)

    def stop(self) -> None:
        for member in self.members():
            if member.process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGCONT)
                member.process.kill()
                member.process.join(WAIT_S)
        if self.daemon.process.poll() is None:
            self.daemon.stop()
        self.close_daemon()

    def require_empty_after_all_have_ended(self) -> None:
        for member in self.members():
            member.kill()
        wait_until(
            lambda: (self.daemon.tier()["granted_bytes"], self.daemon.tier()["pinned_bytes"]) == (0, 0),
            "no byte is granted or leased after the last process has ended",
        )
        roles = [session["role"] for session in self.stats()["sessions"]]  # type: ignore[attr-defined]
        if roles != ["admin"]:
            raise Violation(f"sessions of dead processes are left: {roles}")
        self.daemon.assert_sound()


@contextlib.contextmanager
def running_node(seed: int, arguments: Callable[[Path], Sequence[str]] = lambda _: ()) -> Iterator[Node]:
    """In a folder of its own, from which the daemon's `arguments` are made."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-crash-"))
    try:
        node = Node(folder, seed, arguments=arguments(folder))
        try:
            yield node
        finally:
            node.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_many(kills: int, seed: int, *, say: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """How often each kind was killed. Violation when anything went wrong."""
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(kills)]
    random.Random(seed).shuffle(victims)
    done: Counter[str] = Counter()
    with running_node(seed) as node:
        for number, victim in enumerate(victims, 1):
            what = node.kill_once(victim)
            node.require_quiet()
            done[victim] += 1
            say(f"{number} of {kills}: {what}")
        node.require_empty_after_all_have_ended()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started_s = time.monotonic()
    try:
        done = kill_many(options.kills, seed, say=lambda text: print(text, flush=True))
    except (Violation, KVStoreError, AssertionError) as violation:
        print(f"{violation}\nagain with: python -m tests.crash.kills --kills {options.kills} --seed {seed}")
        return 1
    kinds = ", ".join(f"{count} {victim}s" for victim, count in sorted(done.items()))
    print(f"{sum(done.values())} kills ({kinds}) in {time.monotonic() - started_s:.0f} s: no wrong byte, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
