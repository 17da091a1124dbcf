"""Real daemons, and clients in this process and in others."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import StoreClient
from kvstore.testing import Daemon, running_daemon

CHUNK_BYTES = 10_000  # not a multiple of 4096, so that every slot has padding
WAIT_S = 20.0


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


def payload(name: int, nbytes: int = CHUNK_BYTES) -> bytes:
    return name.to_bytes(4, "big") * (nbytes // 4)


def client_of(daemon: Daemon, **changes: object) -> StoreClient:
    settings: dict[str, object] = {"namespace": {"model": "m"}, "chunk_bytes": CHUNK_BYTES, "hash_seed": "0"}
    return StoreClient.attach(daemon.endpoint, **(settings | changes))  # type: ignore[arg-type]


def eventually(happened: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline_s, f"did not happen within {WAIT_S} s: {what}"
        time.sleep(0.01)


def python(source: str, *arguments: str, uid: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program as another process, perhaps of another user. Its output is the caller's to check.

    It becomes the other user after its imports: the interpreter may lie where only this one can read.
    """
    if uid is not None:
        become = f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})"
        source = f"import os; from kvstore import admin, client; {become}\n{source}"
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[StoreClient]:
    with client_of(daemon) as client:
        yield client


@pytest.fixture
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r") / "k"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become another user")
