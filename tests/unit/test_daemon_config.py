"""Flags over variables over file; every way of being wrong names its source and what to do."""

import json
from pathlib import Path

import pytest

from kvstore.config import (
    EVICTION_POLICIES,
    ListenAddress,
    ServeConfig,
    WritePolicy,
    default_endpoint,
    default_runtime_dir,
    endpoint_paths,
    parse_bytes,
    serve_config,
)
from kvstore.errors import ConfigurationError
from tests.unit.native_store import native_store

SEED = {"PYTHONHASHSEED": "0"}


def config(flags: dict[str, object] | None = None, environment: dict[str, str] | None = None, file: Path | None = None):
    return serve_config({"cpu_bytes": "64MiB"} | (flags or {}), SEED | (environment or {}), file)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 << 30),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 << 29),
        ("123456", 123_456),
        (123456, 123_456),
        ("2 TiB", 2 << 40),
        ("8kB", 8_000),
        ("8KiB", 8_192),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "64 gib", "64G", "-1", "1e9", "0.3B", "1,000", True, None, 1.5])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a"):
        parse_bytes(text)


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('cpu_bytes = "1MiB"\nindex_bytes = 4096\nhash_seed = "7"\nallow_uid = []\n')
    assert serve_config({}, SEED, file).cpu_bytes == 1 << 20
    assert serve_config({}, SEED | {"KVSTORE_CPU_BYTES": "2MiB"}, file).cpu_bytes == 2 << 20
    found = serve_config({"cpu_bytes": "3MiB"}, SEED | {"KVSTORE_CPU_BYTES": "2MiB"}, file)
    assert (found.cpu_bytes, found.index_bytes, found.hash_seed) == (3 << 20, 4096, "7")


def test_defaults() -> None:
    found = config({"runtime_dir": "/x"})
    assert found == ServeConfig(
        runtime_dir=Path("/x"),
        cpu_bytes=64 << 20,
        index_bytes=None,
        fs_dir=None,
        fs_bytes=0,
        write_policy=WritePolicy.WRITE_THROUGH,
        write_after_uses=2,
        n_read_threads=16,
        n_write_threads=8,
        scrub_bytes_per_s=None,
        hash_seed="0",
        require_cache_salt=False,
        eviction_policy="adaptive",
        metrics_listen=ListenAddress("127.0.0.1", 9765),
        allow_uids=frozenset(),
        socket_mode=0o600,
    )
    assert found.endpoint == "unix:///x/kvstore.sock"


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_eviction_policy_is_one_of_the_core_too(policy: str) -> None:
    assert config({"eviction_policy": policy}).eviction_policy == policy
    with native_store(eviction_policy=policy) as store:
        assert store.put(1)


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text("cpu_byte = 1\n")
    with pytest.raises(ConfigurationError, match=r"unknown key 'cpu_byte'; did you mean cpu_bytes\?"):
        serve_config({}, SEED, file)


def test_an_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown variable KVSTORE_CPU_BYTE; did you mean KVSTORE_CPU_BYTES\?"
    ):
        config(environment={"KVSTORE_CPU_BYTE": "1"})


def test_variables_of_commands_and_of_kubernetes_are_not_settings() -> None:
    config(environment={"KVSTORE_ENDPOINT": "unix:///x", "KVSTORE_SERVICE_HOST": "h", "KVSTORE_PORT_80_TCP": "x"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cpu_bytes": "lots"}, r"--cpu-bytes: 'lots' is not a size"),
        ({"cpu_bytes": "8388608TiB"}, r"--cpu-bytes: '8388608TiB' is more than any memory has"),
        ({"index_bytes": "9" * 5000}, r"--index-bytes: '9+' is more than any memory has"),
        ({"cpu_bytes": "1"}, r"--cpu-bytes is 1, less than"),
        ({"metrics_listen": "9765"}, r"--metrics-listen: '9765' is neither HOST:PORT nor off"),
        ({"socket_mode": "0666"}, r"--socket-mode: '0666' is not a mode"),
        ({"socket_mode": 600}, r"--socket-mode: 600 is not a mode .* in quotes"),
        ({"runtime_dir": "/tmp/a\0b"}, r"--runtime-dir: '/tmp/a.x00b' is no path"),
        ({"allow_uid": ["root"]}, r"--allow-uid: 'root' is not a numeric user id"),
        ({"allow_uid": ["1000"]}, r"--allow-uid 1000 needs .* --socket-mode is 0600; add --socket-mode 0660"),
        ({"require_cache_salt": "perhaps"}, r"--require-cache-salt: 'perhaps' is neither true nor false"),
        ({"eviction_policy": "fifo"}, r"--eviction-policy: 'fifo' is none of adaptive, lru, probation"),
        ({"runtime_dir": "/" + "x" * 100}, r"socket path .* has 114 bytes, and the kernel takes 107"),
        ({"hash_seed": "random"}, r"PYTHONHASHSEED is 'random'.*--hash-seed"),
    ],
)
def test_wrong_values_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(flags)


@pytest.mark.parametrize("environment", [{}, {"PYTHONHASHSEED": ""}, {"PYTHONHASHSEED": "random"}])
def test_a_missing_seed_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"export PYTHONHASHSEED=0"):
        serve_config({"cpu_bytes": "1MiB"}, environment)


def test_the_arena_size_is_required() -> None:
    with pytest.raises(ConfigurationError, match=r"--cpu-bytes 64GiB"):
        serve_config({}, SEED)


def test_lists_in_variables_are_split_at_commas() -> None:
    found = config({"socket_mode": "0660"}, {"KVSTORE_ALLOW_UID": "1000, 1001"})
    assert found.allow_uids == {1000, 1001}
    assert found.socket_mode == 0o660


def test_the_endpoint_variable_names_the_daemon_for_commands() -> None:
    assert default_endpoint({"KVSTORE_ENDPOINT": "unix:///a/b.sock"}) == "unix:///a/b.sock"
    assert default_endpoint({"KVSTORE_RUNTIME_DIR": "/a"}) == "unix:///a/kvstore.sock"


def test_a_private_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert default_runtime_dir({}) == tmp_path / "kvstore-12345"
    (tmp_path / "kvstore-12345").mkdir()
    with pytest.raises(ConfigurationError, match=r"belongs to uid \d+, not to 12345"):
        default_runtime_dir({})
    assert default_runtime_dir({"XDG_RUNTIME_DIR": "/run/user/12345"}) == Path("/run/user/12345/kvstore")


@pytest.mark.parametrize("endpoint", ["tcp://h:1", "/run/kvstore.sock", "unix:relative", "unix://" + "/x" * 60])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError):
        endpoint_paths(endpoint)


def test_the_arena_socket_lies_beside_the_endpoint() -> None:
    assert endpoint_paths("unix:///r/kvstore.sock") == (Path("/r/kvstore.sock"), Path("/r/arena.sock"))


def test_the_filesystem_tier_takes_a_directory_and_a_cap() -> None:
    found = config(
        {"fs_dir": "/data/kv", "fs_bytes": "1GiB", "n_read_threads": "3", "scrub_bytes_per_s": "20MB"},
        {"KVSTORE_N_WRITE_THREADS": "2"},
    )
    assert (found.n_read_threads, found.n_write_threads, found.scrub_bytes_per_s) == (3, 2, 20_000_000)
    assert (found.fs_dir, found.fs_bytes) == (Path("/data/kv"), 1 << 30)
    with pytest.raises(ConfigurationError, match="--fs-dir is given without --fs-bytes"):
        config({"fs_dir": "/data/kv"})
    with pytest.raises(ConfigurationError, match="--fs-bytes is given without --fs-dir"):
        config(environment={"KVSTORE_FS_BYTES": "1GiB"})
    with pytest.raises(ConfigurationError, match="--fs-bytes is 1000, less than"):
        config({"fs_dir": "/data/kv", "fs_bytes": "1000"})


@pytest.mark.parametrize("name", ["n_read_threads", "n_write_threads", "scrub_bytes_per_s", "write_after_uses"])
def test_what_is_of_the_filesystem_tier_needs_one(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigurationError, match=f"{flag} is of the filesystem tier, and no --fs-dir"):
        config({name: "2"})


@pytest.mark.parametrize("threads", ["0", "257", "-1", "1.5", "many", True])
def test_what_is_no_number_of_threads_is_refused(threads: object) -> None:
    with pytest.raises(ConfigurationError, match="is not a number of threads from 1 to 256"):
        config({"fs_dir": "/data/kv", "fs_bytes": "1GiB", "n_read_threads": threads})


def test_write_policies() -> None:
    fs = {"fs_dir": "/data/kv", "fs_bytes": "1GiB"}
    assert config(fs | {"write_policy": "write_back"}).write_policy is WritePolicy.WRITE_BACK
    found = config(fs | {"write_policy": "selective"}, {"KVSTORE_WRITE_AFTER_USES": "3"})
    assert (found.write_policy, found.write_after_uses) == (WritePolicy.SELECTIVE, 3)
    with pytest.raises(ConfigurationError, match="'lazy' is no write policy; the policies are write_through, write_b"):
        config(fs | {"write_policy": "lazy"})
    with pytest.raises(ConfigurationError, match="is of --write-policy selective, and the policy is write_back"):
        config(fs | {"write_policy": "write_back", "write_after_uses": "3"})
    with pytest.raises(ConfigurationError, match="is not a number of uses from 2 to 1000"):
        config(fs | {"write_policy": "selective", "write_after_uses": "1"})
    with pytest.raises(ConfigurationError, match="--write-policy is of the filesystem tier"):
        config({"write_policy": "write_through"})


def test_effective_settings_say_what_set_them_and_never_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        'n_read_threads = 3\nhash_seed = "777"\nfs_dir = "/d"\nfs_bytes = "1GiB"\nmetrics_listen = "[::1]:9"\n'
    )
    environment = {"KVSTORE_ALLOW_UID": "7,5", "KVSTORE_SOCKET_MODE": "0660", "KVSTORE_RUNTIME_DIR": "/r"}
    settings = {name: (value, source) for name, value, source in config({}, environment, file).settings()}
    assert settings == {
        "runtime_dir": ("/r", "KVSTORE_RUNTIME_DIR"),
        "cpu_bytes": (64 << 20, "--cpu-bytes"),
        "index_bytes": (None, ""),
        "fs_dir": ("/d", f"fs_dir in {file}"),
        "fs_bytes": (1 << 30, f"fs_bytes in {file}"),
        "write_policy": ("write_through", ""),
        "write_after_uses": (2, ""),
        "n_read_threads": (3, f"n_read_threads in {file}"),
        "n_write_threads": (8, ""),
        "scrub_bytes_per_s": (None, ""),
        "require_cache_salt": (False, ""),
        "eviction_policy": ("adaptive", ""),
        "metrics_listen": ("[::1]:9", f"metrics_listen in {file}"),
        "allow_uid": ([5, 7], "KVSTORE_ALLOW_UID"),
        "socket_mode": ("0660", "KVSTORE_SOCKET_MODE"),
    }
    json.dumps(settings)
    assert "777" not in str(settings)
