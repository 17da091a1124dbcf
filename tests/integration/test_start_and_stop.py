"""What `kvstore serve` does before it is ready, and when it ends: exit codes, messages, files left alone."""

import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Coroutine
from pathlib import Path

import pytest

from kvstore import __version__, limits, server
from kvstore.config import serve_config
from kvstore.testing import Daemon, running_daemon, start_daemon
from tests.integration.conftest import WAIT_S, client_of, key, needs_root, payload


def refused(runtime_dir: Path, **settings: object) -> tuple[int, str]:
    """Exit code and log of a daemon that does not start."""
    daemon = start_daemon(runtime_dir=runtime_dir, **settings)  # type: ignore[arg-type]
    out, _ = daemon.process.communicate(timeout=WAIT_S)
    log = daemon.log()
    daemon.log_path.unlink()
    assert out == ""
    return daemon.process.returncode, log


def test_a_second_daemon_exits_3_and_the_first_keeps_serving(daemon: Daemon) -> None:
    code, log = refused(daemon.runtime_dir)
    assert code == 3
    assert f"a daemon (pid {daemon.pid}) already serves {daemon.runtime_dir}" in log
    with client_of(daemon) as client:
        client.put("s", {key(1): payload(1)})
        assert client.get("s", [key(1)]) == [payload(1)]


def test_sockets_of_a_killed_daemon_are_replaced(runtime_dir: Path) -> None:
    with running_daemon(runtime_dir=runtime_dir) as first:
        first.kill()
        assert (runtime_dir / "kvstore.sock").is_socket()
        assert (runtime_dir / "arena.sock").is_socket()
    with running_daemon(runtime_dir=runtime_dir) as second, client_of(second) as client:
        client.put("s", {key(1): payload(1)})


@pytest.mark.parametrize("name", ["kvstore.sock", "arena.sock"])
def test_a_regular_file_where_a_socket_should_be_is_left_alone(runtime_dir: Path, name: str) -> None:
    runtime_dir.mkdir(mode=0o700)
    (runtime_dir / name).write_text("precious")
    code, log = refused(runtime_dir)
    assert code == 1
    assert f"{runtime_dir / name} exists and is no socket; it was left alone" in log
    assert (runtime_dir / name).read_text() == "precious"


def test_a_clean_stop_exits_0_and_leaves_only_the_lock_file(runtime_dir: Path) -> None:
    with running_daemon(runtime_dir=runtime_dir) as daemon, client_of(daemon) as client:
        client.put("s", {key(1): payload(1)})
        assert daemon.stop() == 0
    assert [path.name for path in runtime_dir.iterdir()] == ["kvstore.lock"]


def test_an_interrupt_is_a_clean_stop_too(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(WAIT_S) == 0


def test_a_directory_with_strange_characters_serves(tmp_path_factory: pytest.TempPathFactory) -> None:
    runtime_dir = tmp_path_factory.mktemp("r") / "a b%41?#ä"
    with running_daemon(runtime_dir=runtime_dir) as daemon, client_of(daemon) as client:
        assert client.put("s", {}) == {}
        client.put("s", {key(1): payload(1)})
        assert (client.get("s", [key(1)]), client.get("s", []), client.lookup("s", [])) == ([payload(1)], [], [])


@needs_root
def test_an_existing_directory_that_the_group_cannot_enter_is_left_as_it_is(runtime_dir: Path) -> None:
    runtime_dir.mkdir(mode=0o700)
    os.chown(runtime_dir, -1, 54321)
    code, log = refused(runtime_dir, arguments=["--allow-uid", "54321", "--socket-mode", "0660"])
    assert code == 2
    assert f"chgrp 54321 {runtime_dir} and chmod 710 {runtime_dir}" in log
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700


def test_sockets_are_for_their_owner_only(runtime_dir: Path) -> None:
    with running_daemon(runtime_dir=runtime_dir):
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in runtime_dir.iterdir()}
        assert modes["kvstore.sock"] == modes["arena.sock"] == modes["kvstore.lock"] == 0o600
        assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_bytes": "1000TiB"}, f"an arena of {1000 << 40} bytes (1,024,000.0 GiB), and the host has "),
        ({"cpu_bytes": "1000TiB"}, "bytes of memory; ask for less"),
        ({"hash_seed": None, "environment": {"PYTHONHASHSEED": "random"}}, "PYTHONHASHSEED is 'random'"),
        ({"hash_seed": "abc"}, "PYTHONHASHSEED is 'abc', which is no plain number"),
        ({"hash_seed": "4294967296"}, "PYTHONHASHSEED is '4294967296', which is no plain number"),
        ({"arguments": ["--index-bytes", "1"]}, "--index-bytes is 1, and a table for an arena of 67108864 bytes takes"),
        ({"arguments": ["--write-policy", "write_through"]}, "of the filesystem tier"),
        ({"arguments": ["--no-such-option", "1"]}, "No such option"),
        ({"arguments": ["--fs-dir", "/x"]}, "--fs-dir is given without --fs-bytes"),
        ({"arguments": ["--allow-uid", "12345"]}, "add --socket-mode 0660"),
        ({"environment": {"KVSTORE_VERIFY": "1"}}, "KVSTORE_VERIFY is '1'"),
        ({"environment": {"KVSTORE_CPU_BYTE": "1"}}, "did you mean KVSTORE_CPU_BYTES?"),
    ],
)
def test_wrong_configuration_exits_2(runtime_dir: Path, settings: dict[str, object], message: str) -> None:
    code, log = refused(runtime_dir, **settings)
    assert code == 2, log
    assert message in log


def test_a_directory_that_cannot_be_written_exits_2() -> None:
    code, log = refused(Path("/proc/kvstore"))
    assert code == 2
    assert f"--runtime-dir /proc/kvstore cannot be written by uid {os.geteuid()}" in log


def test_a_directory_that_others_can_write_exits_2_and_keeps_its_mode(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    runtime_dir.chmod(0o777)
    code, log = refused(runtime_dir)
    assert code == 2
    assert f"{runtime_dir} has mode 0777, so other users could replace the sockets" in log
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o777


@needs_root
def test_a_uid_that_shares_no_group_with_the_sockets_exits_2(runtime_dir: Path) -> None:
    code, log = refused(runtime_dir, arguments=["--allow-uid", "54321", "--socket-mode", "0660"])
    assert code == 2
    assert "no group that this daemon may give to its sockets has uid 54321 in it" in log


def test_a_taken_metrics_port_exits_1_and_names_the_flag(runtime_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, log = refused(runtime_dir, arguments=["--metrics-listen", f"127.0.0.1:{port}"])
    assert code == 1
    assert f"--metrics-listen 127.0.0.1:{port} cannot be opened" in log


def test_metrics_are_the_daemons_own_counters() -> None:
    with running_daemon(arguments=["--metrics-listen", "127.0.0.1:0"]) as daemon:
        with client_of(daemon) as client:
            client.put("s", {key(1): payload(1)})
            client.get("s", [key(1), key(2)])
        port = daemon.log().split("metrics at http://127.0.0.1:")[1].split("/")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
            text = reply.read().decode()
    for line in (
        'kvstore_capacity_bytes{tier="cpu"} 6.7108864e+07',
        'kvstore_chunks{tier="cpu"} 1.0',
        'kvstore_hits_total{tier="cpu"} 1.0',
        'kvstore_misses_total{tier="cpu"} 1.0',
        "kvstore_stores_total 1.0",
    ):
        assert line in text.splitlines(), text


def test_systemd_is_told(runtime_dir: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "n"))
        notify.settimeout(WAIT_S)
        with running_daemon(runtime_dir=runtime_dir, environment={"NOTIFY_SOCKET": str(tmp_path / "n")}):
            assert notify.recv(100) == b"READY=1"
        assert notify.recv(100) == b"STOPPING=1"


def test_a_configuration_file_and_variables_are_read(runtime_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text("require_cache_salt = true\nindex_bytes = '1MiB'\n")
    arguments = ["--config", str(file)]
    with running_daemon(runtime_dir=runtime_dir, arguments=arguments) as daemon, client_of(daemon) as client:
        assert client._connection is not None
        assert client._connection._session.require_cache_salt
        assert daemon.tier()["overhead_bytes"] <= 1 << 20


def test_descriptors_for_every_session_are_asked_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.DESCRIPTORS_PER_SESSION * limits.SESSIONS_MAX
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with running_daemon() as daemon:
            assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[0] >= wanted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_daemon_has_no_child_and_no_inherited_lock(daemon: Daemon) -> None:
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text()
    assert children == ""


def test_the_kvstored_command_is_installed() -> None:
    out = subprocess.run(["kvstored", "--help"], capture_output=True, text=True, check=False, env=_path_of_python())
    assert out.returncode == 0
    assert "--cpu-bytes" in out.stdout


def _path_of_python() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}


def test_the_version_is_said_without_a_daemon() -> None:
    out = subprocess.run(["kvstore", "--version"], capture_output=True, text=True, check=False, env=_path_of_python())
    assert (out.returncode, out.stdout) == (0, f"kvstore {__version__}\n")


def test_the_log_and_stats_say_which_settings_hold_and_what_set_them_but_not_the_seed(runtime_dir: Path) -> None:
    seed = "4109286375"
    with running_daemon(runtime_dir=runtime_dir, cpu_bytes="8MiB", hash_seed=seed) as daemon:
        found = daemon.stats()["config"]
        assert isinstance(found, dict)
        assert found["cpu_bytes"] == {"value": 8 << 20, "source": "--cpu-bytes"}
        assert found["metrics_listen"] == {"value": "off", "source": "--metrics-listen"}
        assert found["eviction_policy"] == {"value": "adaptive", "source": ""}
        assert "hash_seed" not in found
        [line] = [line for line in daemon.log().splitlines() if "settings: " in line]
        assert f"kvstore {__version__}, settings: " in line
        assert f"cpu_bytes={8 << 20} (--cpu-bytes)" in line
        assert 'eviction_policy="adaptive",' in line
        assert seed not in daemon.log()


@pytest.mark.parametrize("arguments", [["kvstore", "stats"], ["kvstore", "stats", "--json"]])
def test_an_output_that_cannot_be_written_is_one_line(daemon: Daemon, arguments: list[str]) -> None:
    command = [Path(sys.executable).parent / arguments[0], *arguments[1:], "--endpoint", daemon.endpoint]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 1
    assert done.stderr == "kvstore: the output cannot be written (No space left on device)\n"


def test_kvstored_shows_its_own_usage() -> None:
    command = [Path(sys.executable).parent / "kvstored", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert "Usage: kvstored [OPTIONS]" in done.stdout


@pytest.mark.parametrize(("chunk_bytes", "warned"), [(4096, True), (64 << 10, False)])
def test_chunks_too_small_for_the_table_are_said(chunk_bytes: int, warned: bool) -> None:
    with running_daemon(cpu_bytes=16 << 20) as daemon, client_of(daemon, chunk_bytes=chunk_bytes) as client:
        chunks = [number.to_bytes(16) for number in range((16 << 20) // chunk_bytes)]
        client.put(None, dict.fromkeys(chunks, bytes(chunk_bytes)))
        log = daemon.log()
        said = f"chunks in slots of {chunk_bytes} bytes: the table has room for"
        assert (said in log) is warned
        whole = daemon.tier()["chunks"] == len(chunks)
    assert whole is not warned
    if warned:  # and what it says to give is enough
        nbytes = log.partition("start the daemon with --index-bytes ")[2].split()[0]
        with (
            running_daemon(cpu_bytes=16 << 20, arguments=["--index-bytes", nbytes]) as daemon,
            client_of(daemon, chunk_bytes=chunk_bytes) as client,
        ):
            client.put(None, dict.fromkeys(chunks, bytes(chunk_bytes)))
            assert daemon.tier()["chunks"] > 0.99 * len(chunks)  # some few find no place where they could lie
            assert said not in daemon.log()


@pytest.mark.parametrize("arguments", ["kvstore --help", "kvstored --help"])
def test_a_closed_output_is_no_failure(arguments: str) -> None:
    command = f"exec {Path(sys.executable).parent}/{arguments} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_system_refuses_a_daemon_is_in_its_log(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused_memory(coroutine: Coroutine[object, object, None]) -> None:
        coroutine.close()
        raise OSError(errno.ENOMEM, "cannot map the arena")

    for of_the_process in ("_raise_descriptor_limit", "_keep_pauses_short"):  # which is this one
        monkeypatch.setattr(server, of_the_process, lambda *_: None)
    monkeypatch.setattr(server.uvloop, "run", refused_memory)
    flags = {"cpu_bytes": "1MiB", "hash_seed": "0", "metrics_listen": "off", "runtime_dir": str(runtime_dir)}
    assert server.serve(serve_config(flags, {}, None)) == 1
    assert "the system refused it something" in caplog.text
    assert "cannot map the arena" in caplog.text
