from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "granted_bytes", "pinned_bytes", "overhead_bytes", "chunks", "hits", "misses", "evictions", "corruptions", "ready_bytes", "sick", "dropped_stores")
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
    SICK_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STORES_FIELD_NUMBER: _ClassVar[int]
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
    sick: str
    dropped_stores: int
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., overhead_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., corruptions: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., sick: _Optional[str] = ..., dropped_stores: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("role", "group", "pid", "uid", "rank", "namespace_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    group: str
    pid: int
    uid: int
    rank: int
    namespace_id: bytes
    def __init__(self, role: _Optional[str] = ..., group: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., rank: _Optional[int] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("instance_id", "uptime_s", "tiers", "sessions", "namespaces", "tenants", "stores", "failed_loads", "poison_commits", "problems")
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
    def __init__(self, instance_id: _Optional[bytes] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., namespaces: _Optional[int] = ..., tenants: _Optional[int] = ..., stores: _Optional[int] = ..., failed_loads: _Optional[int] = ..., poison_commits: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...
