"""`kvstore stats`: what the daemon holds and has done, from its own counters."""

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import Endpoint, Json, print_json, print_table, reported
from kvstore.rpc.v1 import admin_pb2


def stats(endpoint: Endpoint = None, json: Json = False) -> None:
    """Show tiers, sessions and counters."""
    with reported(endpoint, as_json=json) as where:
        reply = admin.stats(where)
    if json:
        print_json(admin.stats_json(reply))
    else:
        _print_tables(reply, Console())


def _print_tables(reply: admin_pb2.StatsReply, console: Console) -> None:
    tenants = " and ".join(f"{tier.tenants} tenants in {tier.name}" for tier in reply.tiers)
    console.print(
        f"instance {reply.instance_id.hex()}, up {reply.uptime_s:.0f} s, {reply.namespaces} namespaces, "
        f"{tenants}, {reply.stores} stores, {reply.failed_loads} failed loads, "
        f"eviction policy {reply.eviction_policy}",
        highlight=False,
    )
    tiers = Table("tier", *(tier.name for tier in reply.tiers))
    for size in ("capacity", "ready", "used", "granted", "pinned", "overhead"):
        tiers.add_row(size, *(decimal(getattr(tier, f"{size}_bytes")) for tier in reply.tiers))
    for count in ("chunks", "hits", "misses", "evictions", "removals", "corruptions"):
        tiers.add_row(count, *(str(getattr(tier, count)) for tier in reply.tiers))
    print_table(tiers)
    for tier in reply.tiers:
        if tier.sick or tier.dropped_stores or tier.quarantined_slots or tier.not_growing:
            state = f"sick: {tier.sick}" if tier.sick else "well"
            lost = f"{tier.dropped_stores} stores dropped so far, {tier.quarantined_slots} slots not used (quarantined)"
            console.print(f"{tier.name}: {state}; {lost}", highlight=False, soft_wrap=True)
        if tier.not_growing:
            console.print(f"{tier.name}: does not grow: {tier.not_growing}", highlight=False, soft_wrap=True)
    for decided in reply.decisions:
        if decided.kind == "commit":
            console.print(f"rejected, {decided.reason}: {decided.refused_chunks} chunks so far", highlight=False)
    sessions = Table("role", "group", "pid", "uid", "rank", "namespace")
    for session in reply.sessions:
        sessions.add_row(
            session.role, session.group, str(session.pid), str(session.uid), str(session.rank),
            "\n".join(namespace.hex() for namespace in session.namespace_ids),
        )  # fmt: skip
    print_table(sessions)
