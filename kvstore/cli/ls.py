"""`kvstore ls`: what is there, in the daemon's own words."""

import enum
from collections.abc import Sequence
from typing import Annotated, cast

import typer
from rich.filesize import decimal
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import (
    Endpoint,
    Json,
    NamespaceId,
    Salt,
    TenantId,
    Tier,
    by_tier,
    model_name,
    print_json,
    print_table,
    reported,
)

CHUNKS_SHOWN = 1_000
_Rows = Sequence[dict[str, object]]


class Noun(enum.StrEnum):
    NAMESPACES = "namespaces"
    TENANTS = "tenants"
    SESSIONS = "sessions"
    CHUNKS = "chunks"


def ls(
    noun: Annotated[Noun, typer.Argument(metavar="namespaces|tenants|sessions|chunks", show_default=False)],
    namespace: NamespaceId = None,
    tenant: Salt = None,
    tenant_id: TenantId = None,
    tier: Tier = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Rows at the most. Default: all, of chunks {CHUNKS_SHOWN}.")
    ] = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """List namespaces, tenants, sessions or chunks."""
    with reported(endpoint, as_json=json) as where:
        what = admin.selection(namespace=namespace, salt=tenant, tenant_id=tenant_id, tier=tier)
        match noun:
            case Noun.NAMESPACES:
                rows = admin.namespaces(where, what)
            case Noun.TENANTS:
                rows = admin.tenants(where, what)
            case Noun.SESSIONS:
                rows = admin.sessions(where, what)
            case Noun.CHUNKS:
                limit = limit or CHUNKS_SHOWN
                rows = admin.chunks(where, what, limit + 1)
    shown = rows[:limit]
    more = len(shown) < len(rows)
    if json:
        print_json({noun.value: shown, "more": more})
        return
    print_table(_table(noun, shown))
    if more:
        print(f"and more than these {len(shown)}; --limit shows more")


def _table(noun: Noun, rows: _Rows) -> Table:
    match noun:
        case Noun.NAMESPACES:
            table = Table("namespace", "model", "tier", "chunks", "size", "tenants")
            for row in rows:
                table.add_row(
                    str(row["namespace_id"]), model_name(row["document"]), *by_tier(row),
                    str(row["tenants"]),
                )  # fmt: skip
        case Noun.TENANTS:
            table = Table("tenant", "tier", "chunks", "size", "namespaces")
            for row in rows:
                name = f"{row['tenant_id']}{' (unsalted)' if row['unsalted'] else ''}"
                table.add_row(name, *by_tier(row), str(row["namespaces"]))
        case Noun.SESSIONS:
            table = Table("role", "group", "pid", "uid", "rank", "namespace")
            for row in rows:
                who = (str(row[name]) for name in ("role", "group", "pid", "uid", "rank"))
                table.add_row(*who, "\n".join(cast("list[str]", row["namespace_ids"])))
        case Noun.CHUNKS:
            table = Table("namespace", "tenant", "key", "tier", "size", "idle", "pinned")
            for row in rows:
                table.add_row(
                    str(row["namespace_id"]), str(row["tenant_id"]), str(row["key"]), str(row["tier"]),
                    _size(row["bytes"]), f"{row['idle_s']:.1f} s", "yes" if row["pinned"] else "",
                )  # fmt: skip
    return table


def _size(nbytes: object) -> str:
    assert isinstance(nbytes, int)
    return decimal(nbytes)
