"""`kvstore serve`: the daemon in the foreground, until SIGTERM or SIGINT."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore.config import (
    EVICTION_POLICIES,
    EVICTION_POLICY_DEFAULT,
    METRICS_LISTEN_DEFAULT,
    N_READ_THREADS_DEFAULT,
    N_WRITE_THREADS_DEFAULT,
    WRITE_AFTER_USES_DEFAULT,
    serve_config,
)
from kvstore.errors import ConfigurationError
from kvstore.logs import begin_logging
from kvstore.server import EXIT_USAGE
from kvstore.server import serve as run

_log = logging.getLogger("kvstore")


def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file; keys are the flags with underscores.")] = None,
    runtime_dir: Annotated[
        str | None,
        typer.Option(
            help="Sockets live here. Default: /run/kvstore for root, else $XDG_RUNTIME_DIR/kvstore, else a private "
            "folder in the temporary directory."
        ),
    ] = None,
    cpu_bytes: Annotated[str | None, typer.Option(help="Size of the cpu tier, exact: 64GiB, 500MB, bytes.")] = None,
    index_bytes: Annotated[
        str | None,
        typer.Option(help="Largest size of the table. Default: what chunks of 64 KiB need; smaller ones need more."),
    ] = None,
    fs_dir: Annotated[
        str | None, typer.Option(help="Directory of the filesystem tier. Default: none. Needs --fs-bytes.")
    ] = None,
    fs_bytes: Annotated[
        str | None, typer.Option(help="The most that this directory may ever take, everything included.")
    ] = None,
    write_policy: Annotated[
        str | None,
        typer.Option(
            help="When a chunk goes to disk: write_through (when stored), write_back (before it is evicted, or unused "
            "for a minute), or selective (when it was used again). Default: write_through."
        ),
    ] = None,
    write_after_uses: Annotated[
        str | None,
        typer.Option(
            help=f"With selective: uses before it goes, the first by whoever stored it. "
            f"Default: {WRITE_AFTER_USES_DEFAULT}."
        ),
    ] = None,
    n_read_threads: Annotated[
        str | None, typer.Option(help=f"Reads of that directory at a time. Default: {N_READ_THREADS_DEFAULT}.")
    ] = None,
    n_write_threads: Annotated[
        str | None,
        typer.Option(help=f"Writes at a time; reads go first. Default: {N_WRITE_THREADS_DEFAULT}."),
    ] = None,
    scrub_bytes_per_s: Annotated[
        str | None,
        typer.Option(help="Read what is on disk over and over, no faster than that, to find what has gone bad: 20MB."),
    ] = None,
    hash_seed: Annotated[
        str | None, typer.Option(help="The seed that all engines share. Default: PYTHONHASHSEED.")
    ] = None,
    require_cache_salt: Annotated[
        bool | None, typer.Option("--require-cache-salt", help="Refuse chunks without a tenant.")
    ] = None,
    eviction_policy: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(EVICTION_POLICIES)}. Default: {EVICTION_POLICY_DEFAULT}."),
    ] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(help=f"HOST:PORT for Prometheus, or off. Default: {METRICS_LISTEN_DEFAULT}.")
    ] = None,
    allow_uid: Annotated[
        list[str] | None,
        typer.Option(
            help="Another user who may attach, trusted with every chunk. Repeatable; needs --socket-mode 0660."
        ),
    ] = None,
    socket_mode: Annotated[str | None, typer.Option(help="0600, or 0660 with --allow-uid.")] = None,
) -> None:
    """Run this node's daemon. Every flag is also a variable (KVSTORE_CPU_BYTES) and a TOML key (cpu_bytes)."""
    begin_logging()
    flags = {
        "runtime_dir": runtime_dir,
        "cpu_bytes": cpu_bytes,
        "index_bytes": index_bytes,
        "fs_dir": fs_dir,
        "fs_bytes": fs_bytes,
        "write_policy": write_policy,
        "write_after_uses": write_after_uses,
        "n_read_threads": n_read_threads,
        "n_write_threads": n_write_threads,
        "scrub_bytes_per_s": scrub_bytes_per_s,
        "hash_seed": hash_seed,
        "require_cache_salt": require_cache_salt,
        "eviction_policy": eviction_policy,
        "metrics_listen": metrics_listen,
        "allow_uid": allow_uid or None,
        "socket_mode": socket_mode,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if config is None and (named := os.environ.get("KVSTORE_CONFIG")):
        config = Path(named)
    try:
        settings = serve_config(given, os.environ, config)
        verify = _verify(os.environ.get("KVSTORE_VERIFY"))
    except ConfigurationError as error:
        _log.error("%s", error)
        raise typer.Exit(EXIT_USAGE) from None
    raise typer.Exit(run(settings, verify=verify))


def _verify(value: str | None) -> bool:
    """For tests: poison in every granted slot, and every invariant in the answer of `stats`."""
    if value not in (None, "poison"):
        raise ConfigurationError(f"KVSTORE_VERIFY is {value!r}; the one value is poison")
    return value is not None
