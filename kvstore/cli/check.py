"""`kvstore check`: asks the daemon whether every invariant holds, and whether what is on disk is what was written."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvstore import admin
from kvstore.cli.output import EXIT_FAILED, Endpoint, Json, positive, print_json, reported
from kvstore.config import parse_bytes
from kvstore.errors import ConfigurationError


def check(
    data: Annotated[
        bool, typer.Option("--data", help="Also read every chunk on disk. A bad one is forgotten.")
    ] = False,
    bytes_per_s: Annotated[
        str | None, typer.Option(help="With --data: read no faster than that, for example 200MB.")
    ] = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Look for anything that must never be, and exit with 1 if there is something. The daemon serves meanwhile; what
    comes while it looks may not be looked at."""
    with reported(endpoint, as_json=json) as where:
        if bytes_per_s is not None and not data:
            raise ConfigurationError("--bytes-per-s is for --data, which is not given")
        limit = positive("--bytes-per-s", bytes_per_s, parse_bytes)
        problems = admin.check(where)
        if data:
            with Progress(console=Console(stderr=True), transient=True, disable=json or not sys.stderr.isatty()) as bar:
                task = bar.add_task("chunks on disk", total=None)
                problems += admin.check_data(
                    where,
                    bytes_per_s=limit,
                    progress=lambda read, chunks: bar.update(task, completed=read, total=chunks),
                )
    if json:
        print_json({"problems": problems})
    else:
        print("\n".join(problems) or "no problems")
    if problems:
        raise typer.Exit(EXIT_FAILED)
