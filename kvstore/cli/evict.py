"""`kvstore evict`: removes chosen chunks from the daemon. `kvstore clear`: removes all of them."""

import sys
from typing import Annotated

import typer

from kvstore import admin
from kvstore.cli.output import (
    Endpoint,
    Json,
    NamespaceId,
    Salt,
    TenantId,
    Tier,
    positive,
    print_json,
    print_removed,
    reported,
)
from kvstore.config import parse_bytes, parse_duration_ms
from kvstore.errors import ConfigurationError


def evict(
    tier: Tier = None,
    namespace: NamespaceId = None,
    tenant: Salt = None,
    tenant_id: TenantId = None,
    older_than: Annotated[str | None, typer.Option(help="Not used for that long: 90s, 15m, 1h, 2d.")] = None,
    nbytes: Annotated[
        str | None,
        typer.Option("--bytes", help="So many bytes of them in each tier, the least recently used first: 10GiB."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Remove the chunks that all given options name, unless an engine is loading them."""
    with reported(endpoint, as_json=json) as where:
        if all(option is None for option in (tier, namespace, tenant, tenant_id, older_than, nbytes)):
            raise ConfigurationError(
                "say what to evict (--tier, --namespace, --tenant, --tenant-id, --older-than, --bytes); "
                "`kvstore clear` removes everything"
            )
        removed = admin.remove(
            where,
            admin.selection(namespace=namespace, salt=tenant, tenant_id=tenant_id, tier=tier),
            older_than_ms=positive("--older-than", older_than, parse_duration_ms),
            nbytes=positive("--bytes", nbytes, parse_bytes),
            dry_run=dry_run,
        )
    if json:
        print_json(removed)
    else:
        print_removed(removed, dry_run=dry_run)


def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Remove every chunk in every tier, unless an engine is loading it."""
    with reported(endpoint, as_json=json) as where:
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigurationError("this removes every chunk, and there is no terminal to ask; say --yes")
            held = sum(tier.chunks for tier in admin.stats(where).tiers)
            typer.confirm(f"Remove all {held} chunks of {where}?", abort=True, err=True)
        removed = admin.remove(where, admin.selection())
    if json:
        print_json(removed)
    else:
        print_removed(removed)
