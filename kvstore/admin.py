"""What an operator's programs ask of a running daemon, and the JSON they print.

Every call attaches for itself, as the operator, and hangs up after the answer.
"""

import grpc

from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc
from kvstore.session import Attachment, Role, Session

TIMEOUT_S = 5.0


def stats(endpoint: str, *, timeout_s: float = TIMEOUT_S) -> admin_pb2.StatsReply:
    """Unavailable, NotAllowed, ConfigurationError (the endpoint)."""
    with Session.attach(endpoint, Attachment(role=Role.ADMIN), timeout_s=timeout_s) as session:
        stub = admin_pb2_grpc.AdminStub(session.channel)
        try:
            reply: admin_pb2.StatsReply = stub.Stats(
                admin_pb2.StatsRequest(), metadata=session.metadata, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise error_of(error) from None
    return reply


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
                "corruptions": tier.corruptions,
                "dropped_stores": tier.dropped_stores,
                "sick": tier.sick,
            }
            for tier in reply.tiers
        ],
        "sessions": [
            {
                "role": session.role,
                "group": session.group,
                "pid": session.pid,
                "uid": session.uid,
                "rank": session.rank,
                "namespace_id": session.namespace_id.hex(),
            }
            for session in reply.sessions
        ],
        "namespaces": reply.namespaces,
        "tenants": reply.tenants,
        "stores": reply.stores,
        "failed_loads": reply.failed_loads,
        "poison_commits": reply.poison_commits,
        "problems": list(reply.problems),
    }
