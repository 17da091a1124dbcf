"""`kvstore gc`: removes what is in namespaces that no session has used for a while."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import Endpoint, Json, positive, print_json, reported
from kvstore.config import parse_duration_ms
from kvstore.errors import ConfigurationError


def gc(
    older_than: Annotated[str | None, typer.Option(help="Not used by any session for that long: 12h, 30d.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Remove the chunks and documents of namespaces that no engine or client has used for a while."""
    with reported(endpoint, as_json=json) as where:
        unused_ms = positive("--older-than", older_than, parse_duration_ms)
        if unused_ms is None:
            raise ConfigurationError("say for how long a namespace must not have been used, as in --older-than 30d")
        rows = admin.collect(where, unused_ms, dry_run=True)
        if not dry_run and rows:
            if not yes:
                if not sys.stdin.isatty():
                    raise ConfigurationError("this removes namespaces, and there is no terminal to ask; say --yes")
                Console(stderr=True).print(_table(rows))
                typer.confirm(f"Remove these {len(rows)} namespaces of {where}?", abort=True, err=True)
            rows = admin.collect(where, unused_ms)
    if json:
        print_json({"namespaces": rows, "dry_run": dry_run})
    else:
        Console().print(_table(rows))


def _table(rows: Sequence[dict[str, object]]) -> Table:
    table = Table("namespace", "model", "unused", "chunks", "size")
    for row in rows:
        document, nbytes, unused_s = row["document"], row["bytes"], row["unused_s"]
        assert isinstance(nbytes, int)
        assert isinstance(unused_s, float)
        model = str(document.get("model", "")) if isinstance(document, dict) else "(document not kept)"
        table.add_row(str(row["namespace_id"]), model, _age(unused_s), str(row["chunks"]), decimal(nbytes))
    return table


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"
