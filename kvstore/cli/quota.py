"""`kvstore quota`: what one tenant's chunks may take in a tier."""

from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import Endpoint, Json, Salt, TenantId, Tier, print_json, print_removed, print_table, reported
from kvstore.config import parse_bytes
from kvstore.errors import ConfigurationError
from kvstore.rpc.v1 import admin_pb2

quota = typer.Typer(help="What one tenant's chunks may take in each tier.", no_args_is_help=True)


@quota.command("set")
def set_quota(
    nbytes: Annotated[str, typer.Argument(metavar="BYTES", help="10GiB, 500MB, bytes; 0 keeps the tenant out.")],
    tenant: Salt = None,
    tenant_id: TenantId = None,
    tier: Tier = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Set it, and remove what is beyond it. Kept over a restart where the daemon has --fs-dir.

    A chunk stored beyond a quota takes the place of the tenant's own least recently used ones; if none of them may go
    it is rejected in memory (QUOTA), or dropped on disk.
    """
    with reported(endpoint, as_json=json) as where:
        try:
            limit = parse_bytes(nbytes)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        removed = admin.set_quota(where, _of_one(tenant, tenant_id, tier), limit)
    if json:
        print_json(removed)
    else:
        print_removed(removed)


@quota.command("unset")
def unset_quota(
    tenant: Salt = None,
    tenant_id: TenantId = None,
    tier: Tier = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """From now on the tenant has no limit."""
    with reported(endpoint, as_json=json) as where:
        removed = admin.set_quota(where, _of_one(tenant, tenant_id, tier), None)
    if json:
        print_json(removed)
    else:
        print(f"no quota in {tier if tier not in (None, admin.ALL_TIERS) else 'any tier'} from now on")


@quota.command("get")
def get_quotas(
    tenant: Salt = None,
    tenant_id: TenantId = None,
    tier: Tier = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Show quotas and what is taken of them: of one tenant, or all."""
    with reported(endpoint, as_json=json) as where:
        rows = admin.quotas(where, admin.selection(salt=tenant, tenant_id=tenant_id, tier=tier))
    if json:
        print_json({"quotas": rows})
        return
    table = Table("tenant", "tier", "quota", "used")
    for row in rows:
        name = f"{row['tenant_id']}{' (unsalted)' if row['unsalted'] else ''}"
        limit, used = row["bytes"], row["used_bytes"]
        assert isinstance(limit, int)
        assert isinstance(used, int)
        table.add_row(name, str(row["tier"]), decimal(limit), decimal(used))
    print_table(table)


def _of_one(salt: str | None, tenant_id: str | None, tier: str | None) -> admin_pb2.Selection:
    if salt is None and tenant_id is None:
        raise ConfigurationError("a quota is one tenant's: say whose, with --tenant or --tenant-id")
    return admin.selection(salt=salt, tenant_id=tenant_id, tier=tier)
