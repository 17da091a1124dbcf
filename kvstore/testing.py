"""Real daemons for tests and demonstrations: started in a private directory, watched, stopped and checked.

In verify mode (the default here) the daemon fills every slot with poison before it grants it, counts commits that still
hold poison, and answers `stats` with every invariant that does not hold; leaving `running_daemon` asserts that there
were none of either.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvstore import admin

READY_LINE = "kvstore ready endpoint="
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_LOOK_AGAIN_S = 0.02


class Daemon:
    """A daemon's process. Times out rather than waits for ever."""

    def __init__(self, process: subprocess.Popen[str], runtime_dir: Path, log_path: Path) -> None:
        self.process = process
        self.runtime_dir = runtime_dir
        self.log_path = log_path
        self.endpoint = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text()

    def stats(self) -> dict[str, object]:
        """The JSON of `kvstore stats`."""
        return admin.stats_json(admin.stats(self.endpoint))

    def tier(self, name: str = "cpu") -> dict[str, int]:
        """One tier of the JSON of `kvstore stats`."""
        tiers = self.stats()["tiers"]
        assert isinstance(tiers, list)
        found: dict[str, int] = next(tier for tier in tiers if tier["name"] == name)
        return found

    def wait_until_ready(self) -> None:
        """Until the ready line; AssertionError with the log when the process ends or the time does."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        readable, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        line = self.process.stdout.readline() if readable else ""
        if not line.startswith(READY_LINE):
            self.kill()
            raise AssertionError(f"the daemon did not become ready (exit {self.process.returncode}):\n{self.log()}")
        self.endpoint = line.strip().removeprefix(READY_LINE)
        # Every slot can be granted after that, so a test's first put does not race the pre-faulting.
        while (tier := self.tier())["ready_bytes"] < tier["capacity_bytes"]:
            assert time.monotonic() < deadline_s, f"pre-faulting takes too long: {tier}\n{self.log()}"
            threading.Event().wait(_LOOK_AGAIN_S)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """SIGTERM, and wait for the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def assert_sound(self) -> None:
        """No invariant is broken and nobody committed bytes that nobody wrote."""
        stats = self.stats()
        assert stats["problems"] == [], stats["problems"]
        assert stats["poison_commits"] == 0, f"{stats['poison_commits']} chunks were committed with poison in them"


def start_daemon(
    *,
    runtime_dir: Path,
    cpu_bytes: int | str = "64MiB",
    hash_seed: str | None = "0",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Daemon:
    """Start the process and return at once. `hash_seed` None: no flag, so what the environment says holds."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--runtime-dir", os.fspath(runtime_dir)]
    command += ["--cpu-bytes", str(cpu_bytes)]
    if hash_seed is not None:
        command += ["--hash-seed", hash_seed]
    if "--metrics-listen" not in arguments:
        command += ["--metrics-listen", "off"]
    log_fd, log_name = tempfile.mkstemp(prefix="kvstore-log-")
    with open(log_fd, "w") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            env=inherited | ({"KVSTORE_VERIFY": "poison"} if verify else {}) | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    return Daemon(process, runtime_dir, Path(log_name))


@contextlib.contextmanager
def running_daemon(
    *,
    runtime_dir: Path | None = None,
    cpu_bytes: int | str = "64MiB",
    hash_seed: str | None = "0",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Iterator[Daemon]:
    """A daemon that is ready and whose arena is all in memory; stopped, and found sound, at the end.

    A daemon that the test stopped or killed itself is not checked. `runtime_dir` None: a private one, removed after.
    """
    own_dir = Path(tempfile.mkdtemp(prefix="kvstore-")) if runtime_dir is None else None
    daemon = start_daemon(
        runtime_dir=own_dir or runtime_dir or Path(),
        cpu_bytes=cpu_bytes,
        hash_seed=hash_seed,
        arguments=arguments,
        environment=environment,
        verify=verify,
    )
    try:
        daemon.wait_until_ready()
        yield daemon
        if daemon.process.poll() is None:
            daemon.assert_sound()
            code = daemon.stop()
            assert code == 0, f"the daemon exited with {code}:\n{daemon.log()}"
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
        assert daemon.process.stdout is not None
        daemon.process.stdout.close()
        daemon.log_path.unlink(missing_ok=True)
        if own_dir is not None:
            shutil.rmtree(own_dir, ignore_errors=True)
