"""One runtime directory and whichever daemon lives there now: for tests in which daemons die, stop and come back."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.testing import Daemon, start_daemon
from tests.vllm.support import HASH_SEED, Store

WAIT_S = 60.0


class Node:
    def __init__(self, runtime_dir: Path, cpu_bytes: str, arguments: Sequence[str] = ()) -> None:
        self.runtime_dir = runtime_dir
        self.arguments = arguments
        self.start(cpu_bytes)

    def start(self, cpu_bytes: str) -> None:
        self.daemon = start_daemon(
            runtime_dir=self.runtime_dir, cpu_bytes=cpu_bytes, hash_seed=HASH_SEED, arguments=self.arguments
        )
        self.daemon.wait_until_ready()
        self.store = Store(self.daemon)

    def kill(self) -> None:
        """SIGKILL, unless it has ended already."""
        self.daemon.kill()
        self._forget()

    def stop(self) -> None:
        """As an operator would, after a look for what is broken."""
        self.daemon.assert_sound()
        assert self.daemon.stop() == 0
        self._forget()

    def _forget(self) -> None:
        assert self.daemon.process.stdout is not None
        self.daemon.process.stdout.close()
        self.daemon.log_path.unlink(missing_ok=True)

    def wait_for_engines(self, count: int) -> None:
        wait_until(lambda: engines_attached(self.daemon) == count, f"{count} engines are attached")

    def wait_for_quiet(self) -> None:
        wait_until(lambda: granted_and_pinned(self.daemon) == (0, 0), "no byte stays granted or leased")

    def check(self) -> None:
        """`kvstore check`, as an operator runs it; and nobody has committed bytes that nobody wrote."""
        command = [sys.executable, "-m", "kvstore.cli", "check", "--endpoint", self.daemon.endpoint]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert found.returncode == 0, found.stdout + found.stderr
        self.daemon.assert_sound()


def engines_attached(daemon: Daemon) -> int:
    """Engines of which every session is listed."""
    roles = Counter((session["group"], session["role"]) for session in daemon.stats()["sessions"])  # type: ignore[attr-defined]
    groups = {group for group, role in roles if role == "worker"}
    return sum(roles[group, "scheduler"] == 1 for group in groups)


def granted_and_pinned(daemon: Daemon) -> tuple[int, int]:
    tier = daemon.tier()
    return tier["granted_bytes"], tier["pinned_bytes"]


def wait_until(happened: Callable[[], bool], what: str, *, limit_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline_s, f"did not happen within {limit_s:g} s: {what}"
        threading.Event().wait(0.02)
