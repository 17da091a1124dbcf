"""The daemon's settings, parsed once: flags over `KVSTORE_*` variables over the keys of a TOML file.

One table (`_SETTINGS`) names every setting; a flag `--cpu-bytes` is the variable `KVSTORE_CPU_BYTES` and the key
`cpu_bytes`. An unknown variable or key is an error that names the nearest valid one. Pure but for `default_*`, which
ask who runs the process and where.
"""

import difflib
import enum
import os
import re
import stat
import tempfile
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigurationError
from kvstore.limits import SOCKET_PATH_BYTES_MAX
from kvstore.namespace import seed_problem

GRPC_SOCKET = "kvstore.sock"
ARENA_SOCKET = "arena.sock"
ARENA_BYTES_MIN = 64 << 10
FS_BYTES_MIN = 1 << 20
BYTES_MAX = (1 << 63) - 1  # what the kernel can express
IO_THREADS_MAX = 256
WRITE_AFTER_USES_MIN, WRITE_AFTER_USES_DEFAULT, WRITE_AFTER_USES_MAX = 2, 2, 1_000  # 1 would be WRITE_THROUGH
N_READ_THREADS_DEFAULT = 16
N_WRITE_THREADS_DEFAULT = 8
METRICS_LISTEN_DEFAULT = "127.0.0.1:9765"
EVICTION_POLICIES = ("adaptive", "lru", "probation")  # names of the native core's
EVICTION_POLICY_DEFAULT = "adaptive"  # docs/decisions/010-eviction-policy.md

_DURATIONS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate(("k", "M", "G", "T"), start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_UNITS |= {"KB": 1000, "KiB": 1024}

# Variables of this prefix that are not settings of the daemon: the commands', the tests', and those that Kubernetes
# gives every container when a Service is called "kvstore".
_OTHER_VARIABLES = re.compile(
    r"KVSTORE_(ENDPOINT|PROFILE|VERIFY|CONFIG|TEST_.*|SERVICE_HOST|SERVICE_PORT.*|PORT|PORT_.*)"
)


class WritePolicy(enum.StrEnum):
    """When a chunk of memory is also written to disk."""

    WRITE_THROUGH = "write_through"  # when it is stored
    WRITE_BACK = "write_back"  # when it would soon be evicted, or has not been used for a while
    SELECTIVE = "selective"  # when it was used a number of times


@dataclass(frozen=True, slots=True)
class ListenAddress:
    host: str
    port: int  # 0: any free one


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    runtime_dir: Path
    cpu_bytes: int  # the arena, exact
    index_bytes: int | None  # largest size of the table; None: what fits the tiers
    fs_dir: Path | None  # None: no filesystem tier
    fs_bytes: int  # hard cap of the directory; 0 without one
    write_policy: WritePolicy
    write_after_uses: int  # with SELECTIVE
    n_read_threads: int  # of the filesystem tier; as many reads are in flight at most
    n_write_threads: int
    scrub_bytes_per_s: int | None  # read in the background to be checked; None: nothing is
    hash_seed: str
    require_cache_salt: bool
    eviction_policy: str  # one of EVICTION_POLICIES
    metrics_listen: ListenAddress | None  # None: off
    allow_uids: frozenset[int]
    socket_mode: int  # 0o600 or 0o660
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # setting -> flag, variable or file

    @property
    def grpc_path(self) -> Path:
        return self.runtime_dir / GRPC_SOCKET

    @property
    def arena_path(self) -> Path:
        return self.runtime_dir / ARENA_SOCKET

    @property
    def endpoint(self) -> str:
        return f"unix://{self.grpc_path}"

    def settings(self) -> Iterator[tuple[str, object, str]]:
        """Name, effective value as JSON has it, and what set it ("": nobody did). Not the hash seed: keys follow from
        it."""
        for name in _SETTINGS:
            if name == "hash_seed":
                continue
            value = getattr(self, "allow_uids" if name == "allow_uid" else name)
            yield name, _as_json(name, value), self.sources.get(name, "")


def serve_config(
    flags: Mapping[str, object], environment: Mapping[str, str], config_file: Path | None = None
) -> ServeConfig:
    """`flags`: setting name to the text given, only those given. ConfigurationError, naming the source and value."""
    given: dict[str, tuple[str, object]] = {}  # later sources win
    if config_file is not None:
        given |= {name: (f"{name} in {config_file}", value) for name, value in _file_keys(config_file).items()}
    given |= {name: (_variable(name), value) for name, value in _variables(environment).items()}
    for name, value in flags.items():
        assert name in _SETTINGS, f"flag {name!r} is in no table"
        given[name] = (_flag(name), value)

    values: dict[str, Any] = {name: default for name, (_, default) in _SETTINGS.items()}
    for name, (source, value) in given.items():
        parse, _ = _SETTINGS[name]
        try:
            values[name] = parse(value)
        except ValueError as error:
            raise ConfigurationError(f"{source}: {error}") from None
    sources = {name: source for name, (source, _) in given.items()}
    return replace(_checked(values, environment), sources=sources)


def parse_bytes(value: object) -> int:
    """`64GiB`, `500MB`, `1.5TiB`, or plain bytes. ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write for example 64GiB, 500MB or plain bytes")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 64GiB, 500MB or plain bytes")
    nbytes = Decimal(match[1]) * _UNITS[match[2]]
    if nbytes != int(nbytes):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    if nbytes > BYTES_MAX:
        raise ValueError(f"{value!r} is more than any memory has")
    return int(nbytes)


def parse_duration_ms(value: str) -> int:
    """`90s`, `15m`, `1h`, `2d`, `500ms`. ValueError; also for a number without a unit, which may be meant as days."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value)
    if match is None or match[2] not in _DURATIONS_MS:
        raise ValueError(f"{value!r} is not a time; write for example 90s, 15m, 1h or 2d")
    return int(Decimal(match[1]) * _DURATIONS_MS[match[2]])


def default_runtime_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Where daemon, commands and connector meet when nobody says otherwise."""
    environment = os.environ if environment is None else environment
    if named := environment.get(_variable("runtime_dir")):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/run/kvstore")
    if session_dir := environment.get("XDG_RUNTIME_DIR"):
        return Path(session_dir) / "kvstore"
    private = Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}"
    try:
        found = private.lstat()
    except FileNotFoundError:
        return private
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{private} belongs to uid {found.st_uid}, not to {os.geteuid()}, so sockets in it prove nothing; name "
            "another directory with --runtime-dir (or KVSTORE_ENDPOINT for commands and engines)"
        )
    return private


def default_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """`KVSTORE_ENDPOINT`, else the socket in the default runtime directory."""
    environment = os.environ if environment is None else environment
    return environment.get("KVSTORE_ENDPOINT") or f"unix://{default_runtime_dir(environment) / GRPC_SOCKET}"


def endpoint_paths(endpoint: str) -> tuple[Path, Path]:
    """(gRPC socket, arena socket) of `unix:///run/kvstore/kvstore.sock`. ConfigurationError."""
    path = endpoint.removeprefix("unix://") if endpoint.startswith("unix://") else endpoint.removeprefix("unix:")
    if path == endpoint or not path.startswith("/"):
        raise ConfigurationError(
            f"endpoint {endpoint!r} is not a Unix socket with an absolute path, as in unix:///run/kvstore/kvstore.sock"
        )
    grpc_path = Path(path)
    arena_path = grpc_path.parent / ARENA_SOCKET
    require_socket_path(grpc_path)
    require_socket_path(arena_path)
    return grpc_path, arena_path


def grpc_target(path: Path) -> str:
    """gRPC reads an address as a URI, so a path with `%` or `?` in it must be quoted."""
    return f"unix:{urllib.parse.quote(os.fspath(path))}"


def require_socket_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigurationError(
            f"socket path {path} has {length} bytes, and the kernel takes {SOCKET_PATH_BYTES_MAX}; "
            "name a shorter directory with --runtime-dir"
        )


def _text(value: object) -> str:
    if not isinstance(value, str) or value == "":
        raise ValueError(f"{value!r} is not a non-empty text (in a TOML file, write it in quotes)")
    return value


def _path(value: object) -> Path:
    text = _text(value)
    if "\0" in text:
        raise ValueError(f"{text!r} is no path")
    return Path(text).absolute()


def _flag_value(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def _uids(value: object) -> frozenset[int]:
    """A list, or the text `1000,1001`."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        items = [items]
    uids = set()
    for item in items:
        text = str(item).strip()
        if isinstance(item, bool) or not text.isdecimal():
            raise ValueError(f"{item!r} is not a numeric user id")
        uids.add(int(text))
    return frozenset(uids)


def _write_policy(value: object) -> WritePolicy:
    if not isinstance(value, str) or value not in set(WritePolicy):
        raise ValueError(f"{value!r} is no write policy; the policies are {', '.join(WritePolicy)}")
    return WritePolicy(value)


def _as_json(name: str, value: object) -> object:
    match value:
        case ListenAddress(host, port):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        case None if name == "metrics_listen":
            return "off"
        case frozenset():
            return sorted(value)
        case Path():
            return str(value)
        case int() if name == "socket_mode":
            return f"{value:04o}"
    return value


def _threads(value: object) -> int:
    return _count(value, "a number of threads", 1, IO_THREADS_MAX)


def _uses(value: object) -> int:
    return _count(value, "a number of uses", WRITE_AFTER_USES_MIN, WRITE_AFTER_USES_MAX)


def _count(value: object, what: str, lowest: int, highest: int) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or not lowest <= int(text) <= highest:
        raise ValueError(f"{value!r} is not {what} from {lowest} to {highest}")
    return int(text)


def _mode(value: object) -> int:
    text = f"{value:o}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if not re.fullmatch(r"(0o)?[0-7]{3,4}", text) or int(text.removeprefix("0o"), 8) not in (0o600, 0o660):
        raise ValueError(
            f"{value!r} is not a mode for the sockets; 0600 or 0660 (with --allow-uid), in quotes in a TOML file"
        )
    return int(text.removeprefix("0o"), 8)


def eviction_policy(value: object) -> str:
    """ValueError."""
    text = _text(value)
    if text not in EVICTION_POLICIES:
        raise ValueError(f"{text!r} is none of {', '.join(EVICTION_POLICIES)}")
    return text


def _listen(value: object) -> ListenAddress | None:
    text = _text(value)
    if text == "off":
        return None
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65_535:
        raise ValueError(f"{text!r} is neither HOST:PORT nor off")
    return ListenAddress(match[1].strip("[]"), int(match[2]))


_SETTINGS: dict[str, tuple[Callable[[object], object], object]] = {
    "runtime_dir": (_path, None),
    "cpu_bytes": (parse_bytes, None),
    "index_bytes": (parse_bytes, None),
    "fs_dir": (_path, None),
    "fs_bytes": (parse_bytes, None),
    "write_policy": (_write_policy, None),
    "write_after_uses": (_uses, None),
    "n_read_threads": (_threads, None),
    "n_write_threads": (_threads, None),
    "scrub_bytes_per_s": (parse_bytes, None),
    "hash_seed": (_text, None),
    "require_cache_salt": (_flag_value, False),
    "eviction_policy": (eviction_policy, EVICTION_POLICY_DEFAULT),
    "metrics_listen": (_listen, _listen(METRICS_LISTEN_DEFAULT)),
    "allow_uid": (_uids, frozenset()),
    "socket_mode": (_mode, 0o600),
}


_FS_ONLY = ("write_policy", "write_after_uses", "n_read_threads", "n_write_threads", "scrub_bytes_per_s")


def _checked(values: dict[str, Any], environment: Mapping[str, str]) -> ServeConfig:
    """The rules between settings."""
    seed: str | None = values["hash_seed"] or environment.get("PYTHONHASHSEED")
    if problem := seed_problem(seed):
        raise ConfigurationError(f"{problem} (or give the daemon --hash-seed)")
    assert seed is not None, "a missing seed is a problem"

    cpu_bytes = values["cpu_bytes"]
    if cpu_bytes is None:
        raise ConfigurationError("the size of the cpu tier is not given; say for example --cpu-bytes 64GiB")
    if cpu_bytes < ARENA_BYTES_MIN:
        raise ConfigurationError(f"--cpu-bytes is {cpu_bytes}, less than the {ARENA_BYTES_MIN} that hold anything")

    fs_dir, fs_bytes = values["fs_dir"], values["fs_bytes"]
    if (fs_dir is None) != (fs_bytes is None):
        given, missing = ("--fs-bytes", "--fs-dir") if fs_dir is None else ("--fs-dir", "--fs-bytes")
        raise ConfigurationError(f"{given} is given without {missing}; the filesystem tier takes both")
    if fs_bytes is not None and fs_bytes < FS_BYTES_MIN:
        raise ConfigurationError(f"--fs-bytes is {fs_bytes}, less than the {FS_BYTES_MIN} that hold anything")

    for name in _FS_ONLY if fs_dir is None else ():
        if values[name] is not None:
            raise ConfigurationError(f"{_flag(name)} is of the filesystem tier, and no --fs-dir is given")
    write_policy = values["write_policy"] or WritePolicy.WRITE_THROUGH
    if values["write_after_uses"] is not None and write_policy is not WritePolicy.SELECTIVE:
        raise ConfigurationError(
            f"--write-after-uses is of --write-policy {WritePolicy.SELECTIVE}, and the policy is {write_policy}"
        )

    allow_uids, socket_mode = values["allow_uid"], values["socket_mode"]
    if allow_uids and socket_mode != 0o660:
        raise ConfigurationError(
            f"--allow-uid {','.join(map(str, sorted(allow_uids)))} needs sockets that a shared group can open, and "
            f"--socket-mode is {socket_mode:04o}; add --socket-mode 0660"
        )

    runtime_dir = values["runtime_dir"] or default_runtime_dir(environment).absolute()
    config = ServeConfig(
        runtime_dir=runtime_dir,
        cpu_bytes=cpu_bytes,
        index_bytes=values["index_bytes"],
        fs_dir=fs_dir,
        fs_bytes=fs_bytes or 0,
        write_policy=write_policy,
        write_after_uses=values["write_after_uses"] or WRITE_AFTER_USES_DEFAULT,
        n_read_threads=values["n_read_threads"] or N_READ_THREADS_DEFAULT,
        n_write_threads=values["n_write_threads"] or N_WRITE_THREADS_DEFAULT,
        scrub_bytes_per_s=values["scrub_bytes_per_s"] or None,
        hash_seed=seed,
        require_cache_salt=values["require_cache_salt"],
        eviction_policy=values["eviction_policy"],
        metrics_listen=values["metrics_listen"],
        allow_uids=allow_uids,
        socket_mode=socket_mode,
    )
    require_socket_path(config.grpc_path)
    require_socket_path(config.arena_path)
    return config


def _file_keys(config_file: Path) -> dict[str, object]:
    try:
        keys = tomllib.loads(config_file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"--config {config_file} cannot be read: {error}") from None
    for name in keys:
        if name not in _SETTINGS:
            raise ConfigurationError(f"{config_file}: unknown key {name!r}{_nearest(name, _SETTINGS)}")
    return keys


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    valid = {_variable(name): name for name in _SETTINGS}
    for variable in environment:
        if variable.startswith("KVSTORE_") and variable not in valid and not _OTHER_VARIABLES.fullmatch(variable):
            raise ConfigurationError(f"unknown variable {variable}{_nearest(variable, valid)}")
    return {name: environment[variable] for variable, name in valid.items() if variable in environment}


def _nearest(name: str, valid: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid are {', '.join(sorted(valid))}"


def _variable(name: str) -> str:
    return f"KVSTORE_{name.upper()}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
