"""`kvstore gc`: removes what is in namespaces that no session has used for a while."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import Endpoint, Json, by_tier, model_name, positive, print_json, print_table, reported
from kvstore.config import parse_duration_ms
from kvstore.errors import ConfigurationError


def gc(
    older_than: Annotated[str, typer.Option(help="Not used by any session for that long: 12h, 30d.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Remove the chunks and documents of namespaces that no engine or client has used for a while."""
    with reported(endpoint, as_json=json) as where:
        unused_ms = positive("--older-than", older_than, parse_duration_ms)
        assert unused_ms is not None, "the option is required"
        rows = admin.collect(where, unused_ms, dry_run=True)
        if not dry_run and rows:
            if not yes:
                if not sys.stdin.isatty():
                    raise ConfigurationError("this removes namespaces, and there is no terminal to ask; say --yes")
                print_table(_table(rows), stderr=True)
                typer.confirm(f"Remove these {len(rows)} namespaces of {where}?", abort=True, err=True)
            rows = admin.collect(where, unused_ms)
    if json:
        print_json({"namespaces": rows, "dry_run": dry_run})
    else:
        print_table(_table(rows))


def _table(rows: Sequence[dict[str, object]]) -> Table:
    table = Table("namespace", "model", "unused", "tier", "chunks", "size")
    for row in rows:
        unused_s = row["unused_s"]
        assert isinstance(unused_s, float)
        table.add_row(str(row["namespace_id"]), model_name(row["document"]), _age(unused_s), *by_tier(row))
    return table


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"
