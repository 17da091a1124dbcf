"""What an operator's programs ask of a running daemon, and the JSON they print.

Every call attaches for itself, as the operator, and hangs up after the answer. Ids are hex where a person reads or
writes them, bytes on the wire.

All calls raise Unavailable, NotAllowed, ConfigurationError (the endpoint); those that take a selection also NotFound.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator

import grpc

from kvstore.decisions import REFUSED_PREFIX_BYTES
from kvstore.errors import ConfigurationError, NotFound
from kvstore.limits import KEY_BYTES_MAX
from kvstore.namespace import differing_paths
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc
from kvstore.session import Attachment, Role, Session

TIMEOUT_S = 5.0
LONG_TIMEOUT_S = 600.0  # for answers that grow with what the daemon holds; one that hangs does not even attach
ID_BYTES = 16
ALL_TIERS = "all"


def stats(endpoint: str, *, timeout_s: float = TIMEOUT_S) -> admin_pb2.StatsReply:
    with _attached(endpoint, timeout_s) as (stub, metadata):
        reply: admin_pb2.StatsReply = stub.Stats(admin_pb2.StatsRequest(), metadata=metadata, timeout=timeout_s)
    return reply


def selection(
    *,
    namespace: str | None = None,
    salt: str | None = None,
    tenant_id: str | None = None,
    tier: str | None = None,
) -> admin_pb2.Selection:
    """What an operator named. ConfigurationError for what can not be said, NotFound for what can not be an id."""
    if salt is not None and tenant_id is not None:
        raise ConfigurationError("--tenant and --tenant-id both name the tenant; give one of them")
    if salt == "":
        raise ConfigurationError(
            "--tenant is empty, which no salt is; `kvstore ls tenants` shows the unsalted tenant's id"
        )
    if tier == "":  # a script's variable that is not set must not become every tier
        raise ConfigurationError(f"--tier is empty; leave it out, or say {ALL_TIERS}, for every tier")
    what = admin_pb2.Selection(tier="" if tier in (None, ALL_TIERS) else tier)
    if namespace is not None:
        what.namespace_id = _id("namespace", "namespaces", namespace)
    if salt is not None:
        what.salt = _text("--tenant", salt)
    if tenant_id is not None:
        what.tenant_id = _id("tenant", "tenants", tenant_id)
    return what


def namespaces(endpoint: str, what: admin_pb2.Selection) -> list[dict[str, object]]:
    """One row for each, those with a document and no chunks too, unless a tenant or tier is named."""
    with _attached(endpoint) as (stub, metadata):
        request = admin_pb2.UsageRequest(what=what)
        usage = [row for page in stub.Usage(request, metadata=metadata, timeout=LONG_TIMEOUT_S) for row in page.usage]
        pages = stub.Namespaces(admin_pb2.NamespacesRequest(), metadata=metadata, timeout=LONG_TIMEOUT_S)
        documents = {row.namespace_id: json.loads(row.document) for page in pages for row in page.namespaces}
    found = {row.namespace_id: None for row in usage}
    if not what.WhichOneof("tenant") and not what.tier:
        found |= dict.fromkeys(documents)
    if what.namespace_id:
        found = {namespace: None for namespace in found if namespace == what.namespace_id}
    return [
        {"namespace_id": namespace.hex(), "document": documents.get(namespace)}
        | _sums(row for row in usage if row.namespace_id == namespace)
        | {"tenants": len({row.tenant_id for row in usage if row.namespace_id == namespace})}
        for namespace in sorted(found)
    ]


def compare(endpoint: str, one: str, other: str) -> dict[str, object]:
    """The fields in which two namespaces differ. NotFound: an id that is unknown, or whose document the daemon has not
    kept."""
    rows = {row["namespace_id"]: row["document"] for row in namespaces(endpoint, selection())}
    found = []
    for text in (one, other):
        ids = [name for name in rows if str(name).startswith(text.lower())]
        if len(ids) != 1:
            many = f"{len(ids)} namespaces begin with {text!r}; give more of it" if ids else f"no namespace {text} here"
            raise NotFound(f"{many}. `kvstore ls namespaces` shows those that are")
        document = rows[ids[0]]
        if not isinstance(document, dict):
            raise NotFound(f"the daemon has chunks of namespace {ids[0]} and no document that says what it is")
        found.append((ids[0], document))
    differences = [
        {"field": field, "one": mine, "other": theirs}
        for field, mine, theirs in differing_paths(found[0][1], found[1][1])
    ]
    return {"one": found[0][0], "other": found[1][0], "differences": differences}


def tenants(endpoint: str, what: admin_pb2.Selection) -> list[dict[str, object]]:
    """One row for each tenant with a chunk, the largest first."""
    rows: dict[bytes, list[admin_pb2.TenantUsage]] = {}
    with _attached(endpoint) as (stub, metadata):
        request = admin_pb2.UsageRequest(what=what)
        for page in stub.Usage(request, metadata=metadata, timeout=LONG_TIMEOUT_S):
            for row in page.usage:
                rows.setdefault(row.tenant_id, []).append(row)
    largest = sorted(rows, key=lambda tenant: (-sum(row.bytes for row in rows[tenant]), tenant))
    return [
        {"tenant_id": tenant.hex(), "unsalted": rows[tenant][0].unsalted}
        | _sums(rows[tenant])
        | {"namespaces": len({row.namespace_id for row in rows[tenant]})}
        for tenant in largest
    ]


def sessions(endpoint: str, what: admin_pb2.Selection) -> list[dict[str, object]]:
    """Connected processes. ConfigurationError: a session has neither tenant nor tier."""
    if what.WhichOneof("tenant") or what.tier:
        raise ConfigurationError("a session is of no tenant and no tier; only --namespace selects sessions")
    return [
        _session_json(session)
        for session in stats(endpoint).sessions
        if what.namespace_id in (b"", *session.namespace_ids)
    ]


def chunks(endpoint: str, what: admin_pb2.Selection, limit: int) -> list[dict[str, object]]:
    """At most `limit`, in no order."""
    with _attached(endpoint) as (stub, metadata):
        pages = stub.Chunks(admin_pb2.ChunksRequest(what=what, limit=limit), metadata=metadata, timeout=LONG_TIMEOUT_S)
        return [
            {
                "namespace_id": row.namespace_id.hex(),
                "tenant_id": row.tenant_id.hex(),
                "key": row.key.hex(),
                "tier": row.tier,
                "bytes": row.bytes,
                "idle_s": row.idle_s,
                "pinned": row.leased,
            }
            for page in pages
            for row in page.chunks
        ]


def remove(
    endpoint: str,
    what: admin_pb2.Selection,
    *,
    older_than_ms: int | None = None,
    nbytes: int | None = None,
    dry_run: bool = False,
) -> dict[str, object]:
    """Remove what is selected and not leased; what went, in all and by tier."""
    request = admin_pb2.RemoveRequest(what=what, older_than_ms=older_than_ms, bytes=nbytes, dry_run=dry_run)
    with _attached(endpoint) as (stub, metadata):
        return _removed(stub.Remove(request, metadata=metadata, timeout=LONG_TIMEOUT_S))


def _removed(reply: admin_pb2.RemoveReply) -> dict[str, object]:
    by_tier = {
        tier.tier: {
            "evicted_chunks": tier.chunks,
            "evicted_bytes": tier.bytes,
            "skipped_pinned": tier.skipped_pinned,
        }
        for tier in reply.by_tier
    }
    totals = {
        name: sum(tier[name] for tier in by_tier.values())
        for name in ("evicted_chunks", "evicted_bytes", "skipped_pinned")
    }
    return {**totals, "by_tier": by_tier}


def set_quota(endpoint: str, what: admin_pb2.Selection, nbytes: int | None) -> dict[str, object]:
    """What the tenant that `what` names may take in its tier, or in each; None: no limit. What had to go for it."""
    with _attached(endpoint) as (stub, metadata):
        request = admin_pb2.SetQuotaRequest(what=what, bytes=nbytes)
        return _removed(stub.SetQuota(request, metadata=metadata, timeout=LONG_TIMEOUT_S))


def quotas(endpoint: str, what: admin_pb2.Selection) -> list[dict[str, object]]:
    """Of the tenant that `what` names, or of all; with what its chunks take now."""
    with _attached(endpoint) as (stub, metadata):
        pages = stub.Quotas(admin_pb2.QuotasRequest(what=what), metadata=metadata, timeout=LONG_TIMEOUT_S)
        rows = [row for page in pages for row in page.quotas]
        used: dict[tuple[bytes, str], int] = {}
        usage = admin_pb2.UsageRequest(what=admin_pb2.Selection(tier=what.tier))
        for page in stub.Usage(usage, metadata=metadata, timeout=LONG_TIMEOUT_S):
            for row in page.usage:
                used[row.tenant_id, row.tier] = used.get((row.tenant_id, row.tier), 0) + row.bytes
    return [
        {
            "tenant_id": row.tenant_id.hex(),
            "unsalted": row.unsalted,
            "tier": row.tier,
            "bytes": row.bytes,
            "used_bytes": used.get((row.tenant_id, row.tier), 0),
        }
        for row in rows
    ]


def collect(endpoint: str, unused_ms: int, *, dry_run: bool = False) -> list[dict[str, object]]:
    """Removes what is in namespaces that no session has used for so long; what went, or would go, for each."""
    request = admin_pb2.CollectRequest(unused_ms=unused_ms, dry_run=dry_run)
    with _attached(endpoint) as (stub, metadata):
        return [
            {
                "namespace_id": row.namespace_id.hex(),
                "document": json.loads(row.document) if row.document else None,
                "unused_s": row.unused_s,
                "chunks": sum(tier.chunks for tier in row.by_tier),
                "bytes": sum(tier.bytes for tier in row.by_tier),
                "by_tier": {
                    tier.tier: {"chunks": tier.chunks, "bytes": tier.bytes}
                    for tier in sorted(row.by_tier, key=lambda tier: tier.tier)
                },
            }
            for row in stub.Collect(request, metadata=metadata)
        ]


def explain(endpoint: str, about: str) -> dict[str, object]:
    """What is known of a request (`about`: its id, or how it begins) and, where `about` is hex of 8 bytes or more, of a
    key. The newest decisions, oldest first. A time that is no number is None."""
    with _attached(endpoint) as (stub, metadata):
        requests = stub.Explain(
            admin_pb2.ExplainRequest(request=_text("the request's id", about)), metadata=metadata, timeout=TIMEOUT_S
        )
        keys = admin_pb2.ExplainReply()
        digits = hex_digits(about)
        if len(digits) % 2 == 0 and 2 * REFUSED_PREFIX_BYTES <= len(digits) <= 2 * KEY_BYTES_MAX:
            asked = admin_pb2.ExplainRequest(key=bytes.fromhex(digits))
            keys = stub.Explain(asked, metadata=metadata, timeout=TIMEOUT_S)
    return {
        "decisions": [_decision_json(explained) for explained in requests.decisions],
        "keys": [
            {
                "namespace_id": fate.namespace_id.hex(),
                "tenant_id": fate.tenant_id.hex() or None,
                "events": list(fate.events),
            }
            for fate in (*requests.keys, *keys.keys)
        ],
    }


def hex_digits(text: str) -> str:
    """Without the 0x before them; "" where it is something else."""
    found = re.fullmatch(r"(?:0[xX])?([0-9a-fA-F]+)", text)
    return found[1] if found else ""


def _finite(seconds: float) -> float | None:
    """An engine may send anything, and JSON has no other numbers."""
    return seconds if math.isfinite(seconds) else None


def _decision_json(explained: admin_pb2.Explained) -> dict[str, object]:
    decision = explained.decision
    known = {
        "load_s": decision.load_s,
        "wait_s": decision.wait_s,
        "saved_s": decision.saved_s,
        "first_token_s": decision.first_token_s,
    }
    return {
        "kind": "store" if decision.is_store else "load",
        "request": decision.request,
        "reason": decision.reason,
        "age_s": explained.age_s,
        "group": explained.group,
        "namespace_id": explained.namespace_id.hex(),
        "prompt_tokens": decision.prompt_tokens,
        "gpu_tokens": decision.gpu_tokens,
        "cpu_tokens": decision.cpu_tokens,
        "hit_tokens": decision.hit_tokens,
        "waiting": decision.waiting,
        "recompute_s": _finite(decision.recompute_s),
        "first_missing": decision.refused.hex() if not decision.is_store and decision.refused else None,
        "alternatives": [
            {
                "tier": each.tier,
                "end_tokens": each.end_tokens,
                "seconds": _finite(each.seconds),
                "wait_s": _finite(each.wait_s),
            }
            for each in decision.alternatives
        ],
        "tier": decision.tier or None,
        "end_tokens": decision.end_tokens,
        "missing": list(explained.missing),
        "chunks": decision.chunks,
        "committed": {each.outcome: each.chunks for each in explained.committed},
        "refused_chunks": decision.refused_count if decision.is_store else 0,
        "disk_reason": decision.disk_reason,
        "disk_end_tokens": decision.disk_end_tokens,
        "disk_refused_chunks": decision.disk_refused_count,
        "outcome": decision.outcome or None,
        **{name: _finite(seconds) or None for name, seconds in known.items()},
    }


def check(endpoint: str) -> list[str]:
    """Every invariant that does not hold, a sentence each. The daemon does it beside its other work."""
    with _attached(endpoint) as (stub, metadata):
        reply = stub.Check(admin_pb2.CheckRequest(), metadata=metadata, timeout=LONG_TIMEOUT_S)
        return list(reply.problems)


def check_data(
    endpoint: str, *, bytes_per_s: int | None = None, progress: Callable[[int, int], None] = lambda *_: None
) -> list[str]:
    """Has the daemon read every chunk on disk, which takes as long as it takes; a sentence for each bad one, which is
    forgotten. `progress` is told of the chunks read so far, and how many there are."""
    problems: list[str] = []
    with _attached(endpoint) as (stub, metadata):
        request = admin_pb2.CheckDataRequest(bytes_per_s=bytes_per_s or 0)
        for page in stub.CheckData(request, metadata=metadata):
            problems += page.problems
            progress(page.chunks_read, page.chunks)
    return problems


def stats_json(reply: admin_pb2.StatsReply) -> dict[str, object]:
    """What `kvstore stats --json` prints. Ids in hex."""
    return {
        "instance_id": reply.instance_id.hex(),
        "uptime_s": reply.uptime_s,
        "tiers": [
            {
                "name": tier.name,
                "capacity_bytes": tier.capacity_bytes,
                "used_bytes": tier.used_bytes,
                "granted_bytes": tier.granted_bytes,
                "pinned_bytes": tier.pinned_bytes,
                "overhead_bytes": tier.overhead_bytes,
                "ready_bytes": tier.ready_bytes,
                "chunks": tier.chunks,
                "hits": tier.hits,
                "misses": tier.misses,
                "evictions": tier.evictions,
                "removals": tier.removals,
                "corruptions": tier.corruptions,
                "dropped_stores": tier.dropped_stores,
                "sick": tier.sick,
                "not_growing": tier.not_growing,
                "quarantined_slots": tier.quarantined_slots,
                "scrubbed_chunks": tier.scrubbed_chunks,
                "unindexed_chunks": tier.unindexed_chunks,
                "tenants": tier.tenants,
            }
            for tier in reply.tiers
        ],
        "sessions": [_session_json(session) for session in reply.sessions],
        "namespaces": reply.namespaces,
        "tenants": reply.tenants,
        "stores": reply.stores,
        "failed_loads": reply.failed_loads,
        "eviction_policy": reply.eviction_policy,
        "poison_commits": reply.poison_commits,
        "problems": list(reply.problems),
        "config": {
            setting.name: {"value": json.loads(setting.value), "source": setting.source} for setting in reply.config
        },
        "decisions": [
            {
                "kind": count.kind,
                "reason": count.reason,
                "decisions": count.decisions,
                "refused_chunks": count.refused_chunks,
            }
            for count in reply.decisions
        ],
        "balances": [
            {
                "tier": balance.tier,
                "loads": balance.loads,
                "predicted_s": balance.predicted_s,
                "realised_s": balance.realised_s,
                "load_s": balance.load_s,
                "wait_s": balance.wait_s,
                "saved_s": balance.saved_s,
                "regret_s": balance.regret_s,
            }
            for balance in reply.balances
        ],
    }


def _session_json(session: admin_pb2.SessionStats) -> dict[str, object]:
    return {
        "role": session.role,
        "group": session.group,
        "pid": session.pid,
        "uid": session.uid,
        "rank": session.rank,
        "namespace_ids": [namespace.hex() for namespace in session.namespace_ids],
    }


@contextlib.contextmanager
def _attached(
    endpoint: str, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[admin_pb2_grpc.AdminStub, tuple[tuple[str, str], ...]]]:
    """Stub and metadata of one session; what a call inside fails with becomes the daemon's exception."""
    with Session.attach(endpoint, Attachment(role=Role.ADMIN), timeout_s=timeout_s) as session:
        try:
            yield admin_pb2_grpc.AdminStub(session.channel), session.metadata
        except grpc.RpcError as error:
            raise error_of(error, endpoint) from None


def _text(name: str, text: str) -> str:
    """ConfigurationError for what no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{name} is no text in UTF-8; name a tenant by its id, a request by how its id begins"
        ) from None
    return text


def _id(what: str, listed_by: str, text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != ID_BYTES:
        raise NotFound(f"no {what} {text!r}: an id is {2 * ID_BYTES} hex digits; `kvstore ls {listed_by}` shows them")
    return found


def _sums(usage: Iterable[admin_pb2.TenantUsage]) -> dict[str, object]:
    """`chunks`: each once, also those that are in both tiers, as far as the cpu tier knows; `bytes`: what all tiers'
    copies take."""
    by_tier: dict[str, dict[str, int]] = {}
    in_both = 0
    for row in usage:
        in_both += row.also_below
        tier = by_tier.setdefault(row.tier, {"chunks": 0, "bytes": 0})
        tier["chunks"] += row.chunks
        tier["bytes"] += row.bytes
    chunks, nbytes = (sum(tier[name] for tier in by_tier.values()) for name in ("chunks", "bytes"))
    if len(by_tier) > 1:  # the tiers were asked one after the other
        chunks -= min(in_both, *(tier["chunks"] for tier in by_tier.values()))
    return {"chunks": chunks, "bytes": nbytes, "by_tier": dict(sorted(by_tier.items()))}
