from kvstore.rpc.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Selection(_message.Message):
    __slots__ = ("namespace_id", "tenant_id", "salt", "tier")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tenant_id: bytes
    salt: str
    tier: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., tenant_id: _Optional[bytes] = ..., salt: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("namespace_id", "document", "unused_s")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    UNUSED_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    document: str
    unused_s: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., document: _Optional[str] = ..., unused_s: _Optional[float] = ...) -> None: ...

class NamespacesPage(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ("what",)
    WHAT_FIELD_NUMBER: _ClassVar[int]
    what: Selection
    def __init__(self, what: _Optional[_Union[Selection, _Mapping]] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("namespace_id", "tenant_id", "unsalted", "tier", "chunks", "bytes", "also_below")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    UNSALTED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALSO_BELOW_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tenant_id: bytes
    unsalted: bool
    tier: str
    chunks: int
    bytes: int
    also_below: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., tenant_id: _Optional[bytes] = ..., unsalted: bool = ..., tier: _Optional[str] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., also_below: _Optional[int] = ...) -> None: ...

class UsagePage(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, usage: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class ChunksRequest(_message.Message):
    __slots__ = ("what", "limit")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    what: Selection
    limit: int
    def __init__(self, what: _Optional[_Union[Selection, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("namespace_id", "tenant_id", "key", "tier", "bytes", "idle_s", "leased")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tenant_id: bytes
    key: bytes
    tier: str
    bytes: int
    idle_s: float
    leased: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., tenant_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., tier: _Optional[str] = ..., bytes: _Optional[int] = ..., idle_s: _Optional[float] = ..., leased: bool = ...) -> None: ...

class ChunksPage(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("what", "older_than_ms", "bytes", "dry_run")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    what: Selection
    older_than_ms: int
    bytes: int
    dry_run: bool
    def __init__(self, what: _Optional[_Union[Selection, _Mapping]] = ..., older_than_ms: _Optional[int] = ..., bytes: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class TierRemoval(_message.Message):
    __slots__ = ("tier", "chunks", "bytes", "skipped_pinned")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_PINNED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    chunks: int
    bytes: int
    skipped_pinned: int
    def __init__(self, tier: _Optional[str] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., skipped_pinned: _Optional[int] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("by_tier",)
    BY_TIER_FIELD_NUMBER: _ClassVar[int]
    by_tier: _containers.RepeatedCompositeFieldContainer[TierRemoval]
    def __init__(self, by_tier: _Optional[_Iterable[_Union[TierRemoval, _Mapping]]] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("what", "bytes")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    what: Selection
    bytes: int
    def __init__(self, what: _Optional[_Union[Selection, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class QuotasRequest(_message.Message):
    __slots__ = ("what",)
    WHAT_FIELD_NUMBER: _ClassVar[int]
    what: Selection
    def __init__(self, what: _Optional[_Union[Selection, _Mapping]] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("tenant_id", "unsalted", "tier", "bytes")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    UNSALTED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: bytes
    unsalted: bool
    tier: str
    bytes: int
    def __init__(self, tenant_id: _Optional[bytes] = ..., unsalted: bool = ..., tier: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class QuotasPage(_message.Message):
    __slots__ = ("quotas",)
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("unused_ms", "dry_run")
    UNUSED_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    unused_ms: int
    dry_run: bool
    def __init__(self, unused_ms: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class CollectedNamespace(_message.Message):
    __slots__ = ("namespace_id", "document", "unused_s", "by_tier")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    UNUSED_S_FIELD_NUMBER: _ClassVar[int]
    BY_TIER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    document: str
    unused_s: float
    by_tier: _containers.RepeatedCompositeFieldContainer[TierRemoval]
    def __init__(self, namespace_id: _Optional[bytes] = ..., document: _Optional[str] = ..., unused_s: _Optional[float] = ..., by_tier: _Optional[_Iterable[_Union[TierRemoval, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request", "key")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    request: str
    key: bytes
    def __init__(self, request: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class Explained(_message.Message):
    __slots__ = ("decision", "group", "age_s", "namespace_id", "committed", "missing")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    decision: _store_pb2.Decision
    group: str
    age_s: float
    namespace_id: bytes
    committed: _containers.RepeatedCompositeFieldContainer[Committed]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, decision: _Optional[_Union[_store_pb2.Decision, _Mapping]] = ..., group: _Optional[str] = ..., age_s: _Optional[float] = ..., namespace_id: _Optional[bytes] = ..., committed: _Optional[_Iterable[_Union[Committed, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("outcome", "chunks")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    chunks: int
    def __init__(self, outcome: _Optional[str] = ..., chunks: _Optional[int] = ...) -> None: ...

class KeyFate(_message.Message):
    __slots__ = ("namespace_id", "tenant_id", "events")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tenant_id: bytes
    events: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace_id: _Optional[bytes] = ..., tenant_id: _Optional[bytes] = ..., events: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("decisions", "keys")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Explained]
    keys: _containers.RepeatedCompositeFieldContainer[KeyFate]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Explained, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[KeyFate, _Mapping]]] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("problems",)
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, problems: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckDataRequest(_message.Message):
    __slots__ = ("bytes_per_s",)
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    def __init__(self, bytes_per_s: _Optional[int] = ...) -> None: ...

class CheckDataPage(_message.Message):
    __slots__ = ("chunks_read", "chunks", "problems")
    CHUNKS_READ_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    chunks_read: int
    chunks: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, chunks_read: _Optional[int] = ..., chunks: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "granted_bytes", "pinned_bytes", "overhead_bytes", "chunks", "hits", "misses", "evictions", "corruptions", "ready_bytes", "removals", "sick", "dropped_stores", "quarantined_slots", "scrubbed_chunks", "tenants", "unindexed_chunks", "not_growing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CORRUPTIONS_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    SICK_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STORES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    UNINDEXED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NOT_GROWING_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    used_bytes: int
    granted_bytes: int
    pinned_bytes: int
    overhead_bytes: int
    chunks: int
    hits: int
    misses: int
    evictions: int
    corruptions: int
    ready_bytes: int
    removals: int
    sick: str
    dropped_stores: int
    quarantined_slots: int
    scrubbed_chunks: int
    tenants: int
    unindexed_chunks: int
    not_growing: str
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., overhead_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., corruptions: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., removals: _Optional[int] = ..., sick: _Optional[str] = ..., dropped_stores: _Optional[int] = ..., quarantined_slots: _Optional[int] = ..., scrubbed_chunks: _Optional[int] = ..., tenants: _Optional[int] = ..., unindexed_chunks: _Optional[int] = ..., not_growing: _Optional[str] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("role", "group", "pid", "uid", "rank", "namespace_ids")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    group: str
    pid: int
    uid: int
    rank: int
    namespace_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, role: _Optional[str] = ..., group: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., rank: _Optional[int] = ..., namespace_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AdmissionCount(_message.Message):
    __slots__ = ("kind", "reason", "decisions", "refused_chunks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    decisions: int
    refused_chunks: int
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ..., decisions: _Optional[int] = ..., refused_chunks: _Optional[int] = ...) -> None: ...

class TierBalance(_message.Message):
    __slots__ = ("tier", "loads", "predicted_s", "realised_s", "load_s", "wait_s", "saved_s", "regret_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    REALISED_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    REGRET_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    loads: int
    predicted_s: float
    realised_s: float
    load_s: float
    wait_s: float
    saved_s: float
    regret_s: float
    def __init__(self, tier: _Optional[str] = ..., loads: _Optional[int] = ..., predicted_s: _Optional[float] = ..., realised_s: _Optional[float] = ..., load_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., saved_s: _Optional[float] = ..., regret_s: _Optional[float] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    source: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("instance_id", "uptime_s", "tiers", "sessions", "namespaces", "tenants", "stores", "failed_loads", "poison_commits", "problems", "eviction_policy", "decisions", "balances", "config")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    FAILED_LOADS_FIELD_NUMBER: _ClassVar[int]
    POISON_COMMITS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    BALANCES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    namespaces: int
    tenants: int
    stores: int
    failed_loads: int
    poison_commits: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    eviction_policy: str
    decisions: _containers.RepeatedCompositeFieldContainer[AdmissionCount]
    balances: _containers.RepeatedCompositeFieldContainer[TierBalance]
    config: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, instance_id: _Optional[bytes] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., namespaces: _Optional[int] = ..., tenants: _Optional[int] = ..., stores: _Optional[int] = ..., failed_loads: _Optional[int] = ..., poison_commits: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ..., eviction_policy: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[AdmissionCount, _Mapping]]] = ..., balances: _Optional[_Iterable[_Union[TierBalance, _Mapping]]] = ..., config: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...
