from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_CLIENT: _ClassVar[Role]
    ROLE_SCHEDULER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_STORED: _ClassVar[Outcome]
    OUTCOME_PRESENT: _ClassVar[Outcome]
    OUTCOME_REJECTED_TIER_FULL: _ClassVar[Outcome]
    OUTCOME_REJECTED_QUOTA: _ClassVar[Outcome]
    OUTCOME_REJECTED_ADMISSION: _ClassVar[Outcome]
    OUTCOME_REJECTED_TIER_SICK: _ClassVar[Outcome]
    OUTCOME_NOT_GRANTED: _ClassVar[Outcome]

class Room(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROOM_NOT_ASKED: _ClassVar[Room]
    ROOM_FREE: _ClassVar[Room]
    ROOM_FULL: _ClassVar[Room]

class Found(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FOUND_MISS: _ClassVar[Found]
    FOUND_CPU: _ClassVar[Found]
    FOUND_FS: _ClassVar[Found]
    FOUND_PENDING: _ClassVar[Found]
ROLE_UNSPECIFIED: Role
ROLE_CLIENT: Role
ROLE_SCHEDULER: Role
ROLE_WORKER: Role
ROLE_ADMIN: Role
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_STORED: Outcome
OUTCOME_PRESENT: Outcome
OUTCOME_REJECTED_TIER_FULL: Outcome
OUTCOME_REJECTED_QUOTA: Outcome
OUTCOME_REJECTED_ADMISSION: Outcome
OUTCOME_REJECTED_TIER_SICK: Outcome
OUTCOME_NOT_GRANTED: Outcome
ROOM_NOT_ASKED: Room
ROOM_FREE: Room
ROOM_FULL: Room
FOUND_MISS: Found
FOUND_CPU: Found
FOUND_FS: Found
FOUND_PENDING: Found

class AttachRequest(_message.Message):
    __slots__ = ("role", "group", "rank", "world_size", "kinds", "seed_fingerprint", "seed_shown")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEED_SHOWN_FIELD_NUMBER: _ClassVar[int]
    role: Role
    group: str
    rank: int
    world_size: int
    kinds: _containers.RepeatedCompositeFieldContainer[Kind]
    seed_fingerprint: bytes
    seed_shown: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[Kind, _Mapping]]] = ..., seed_fingerprint: _Optional[bytes] = ..., seed_shown: _Optional[str] = ...) -> None: ...

class Kind(_message.Message):
    __slots__ = ("namespace_document", "chunk_bytes", "range_offset", "range_bytes")
    NAMESPACE_DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANGE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RANGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_document: str
    chunk_bytes: int
    range_offset: int
    range_bytes: int
    def __init__(self, namespace_document: _Optional[str] = ..., chunk_bytes: _Optional[int] = ..., range_offset: _Optional[int] = ..., range_bytes: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("instance_id", "group", "require_cache_salt")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    group: GroupState
    require_cache_salt: bool
    def __init__(self, instance_id: _Optional[bytes] = ..., group: _Optional[_Union[GroupState, _Mapping]] = ..., require_cache_salt: bool = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("complete", "kinds", "refused")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    kinds: _containers.RepeatedCompositeFieldContainer[KindState]
    refused: str
    def __init__(self, complete: bool = ..., kinds: _Optional[_Iterable[_Union[KindState, _Mapping]]] = ..., refused: _Optional[str] = ...) -> None: ...

class KindState(_message.Message):
    __slots__ = ("namespace_id", "chunk_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    chunk_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class SlotRef(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Commits(_message.Message):
    __slots__ = ("tenant", "slots", "generations", "keys", "parents", "memory_only", "decision")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    memory_only: bool
    decision: int
    def __init__(self, tenant: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ..., parents: _Optional[_Iterable[bytes]] = ..., memory_only: bool = ..., decision: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("at", "loaded", "promoted")
    AT_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    at: SlotRef
    loaded: bool
    promoted: bool
    def __init__(self, at: _Optional[_Union[SlotRef, _Mapping]] = ..., loaded: bool = ..., promoted: bool = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("tenant", "keys", "again", "kind", "worth_disk", "unwaited")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORTH_DISK_FIELD_NUMBER: _ClassVar[int]
    UNWAITED_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    again: int
    kind: int
    worth_disk: int
    unwaited: bool
    def __init__(self, tenant: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., again: _Optional[int] = ..., kind: _Optional[int] = ..., worth_disk: _Optional[int] = ..., unwaited: bool = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("engine_family", "hash_algorithm", "value")
    ENGINE_FAMILY_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    engine_family: str
    hash_algorithm: str
    value: bytes
    def __init__(self, engine_family: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("tier", "end_tokens", "seconds", "cost_s", "wait_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    end_tokens: int
    seconds: float
    cost_s: float
    wait_s: float
    def __init__(self, tier: _Optional[str] = ..., end_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., cost_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "request", "is_store", "reason", "prompt_tokens", "gpu_tokens", "cpu_tokens", "hit_tokens", "waiting", "recompute_s", "recompute_cost_s", "alternatives", "tier", "end_tokens", "refused_count", "refused", "outcome", "load_s", "wait_s", "saved_s", "first_token_s", "disk_reason", "disk_end_tokens", "disk_refused_count", "chunks", "kind")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IS_STORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_COST_S_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DISK_REASON_FIELD_NUMBER: _ClassVar[int]
    DISK_END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: str
    is_store: bool
    reason: str
    prompt_tokens: int
    gpu_tokens: int
    cpu_tokens: int
    hit_tokens: int
    waiting: int
    recompute_s: float
    recompute_cost_s: float
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    tier: str
    end_tokens: int
    refused_count: int
    refused: bytes
    outcome: str
    load_s: float
    wait_s: float
    saved_s: float
    first_token_s: float
    disk_reason: str
    disk_end_tokens: int
    disk_refused_count: int
    chunks: int
    kind: int
    def __init__(self, number: _Optional[int] = ..., request: _Optional[str] = ..., is_store: bool = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., gpu_tokens: _Optional[int] = ..., cpu_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., recompute_s: _Optional[float] = ..., recompute_cost_s: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., tier: _Optional[str] = ..., end_tokens: _Optional[int] = ..., refused_count: _Optional[int] = ..., refused: _Optional[bytes] = ..., outcome: _Optional[str] = ..., load_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., saved_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., disk_reason: _Optional[str] = ..., disk_end_tokens: _Optional[int] = ..., disk_refused_count: _Optional[int] = ..., chunks: _Optional[int] = ..., kind: _Optional[int] = ...) -> None: ...

class Learned(_message.Message):
    __slots__ = ("name", "document")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    document: str
    def __init__(self, name: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class Read(_message.Message):
    __slots__ = ("chunks", "seconds")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    seconds: float
    def __init__(self, chunks: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Predecessor(_message.Message):
    __slots__ = ("token", "answered")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    answered: int
    def __init__(self, token: _Optional[bytes] = ..., answered: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("number", "instance_id", "grants_wanted", "commits", "aborts", "leases", "releases", "touches", "misses", "probe", "fresh_namespace", "promotes", "decisions", "learning", "learned", "learned_wanted", "predecessor", "tails")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTS_WANTED_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    TOUCHES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    FRESH_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMOTES_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    LEARNED_WANTED_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    number: int
    instance_id: bytes
    grants_wanted: _containers.RepeatedScalarFieldContainer[int]
    commits: _containers.RepeatedCompositeFieldContainer[Commits]
    aborts: _containers.RepeatedCompositeFieldContainer[SlotRef]
    leases: _containers.RepeatedCompositeFieldContainer[SlotRef]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    touches: _containers.RepeatedCompositeFieldContainer[Chain]
    misses: int
    probe: Probe
    fresh_namespace: bool
    promotes: _containers.RepeatedCompositeFieldContainer[Chain]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    learning: str
    learned: _containers.RepeatedCompositeFieldContainer[Learned]
    learned_wanted: bool
    predecessor: Predecessor
    tails: _containers.RepeatedCompositeFieldContainer[SlotRef]
    def __init__(self, number: _Optional[int] = ..., instance_id: _Optional[bytes] = ..., grants_wanted: _Optional[_Iterable[int]] = ..., commits: _Optional[_Iterable[_Union[Commits, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[SlotRef, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[SlotRef, _Mapping]]] = ..., releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., touches: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ..., misses: _Optional[int] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., fresh_namespace: bool = ..., promotes: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., learning: _Optional[str] = ..., learned: _Optional[_Iterable[_Union[Learned, _Mapping]]] = ..., learned_wanted: bool = ..., predecessor: _Optional[_Union[Predecessor, _Mapping]] = ..., tails: _Optional[_Iterable[_Union[SlotRef, _Mapping]]] = ...) -> None: ...

class Grants(_message.Message):
    __slots__ = ("slots", "generations", "short")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    short: Outcome
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., short: _Optional[_Union[Outcome, str]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("number", "grants", "outcomes", "group", "reads", "learned", "cpu_full", "fs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    CPU_FULL_FIELD_NUMBER: _ClassVar[int]
    FS_FIELD_NUMBER: _ClassVar[int]
    number: int
    grants: _containers.RepeatedCompositeFieldContainer[Grants]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    group: GroupState
    reads: _containers.RepeatedCompositeFieldContainer[Read]
    learned: _containers.RepeatedCompositeFieldContainer[Learned]
    cpu_full: bool
    fs: Room
    def __init__(self, number: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[Grants, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., group: _Optional[_Union[GroupState, _Mapping]] = ..., reads: _Optional[_Iterable[_Union[Read, _Mapping]]] = ..., learned: _Optional[_Iterable[_Union[Learned, _Mapping]]] = ..., cpu_full: bool = ..., fs: _Optional[_Union[Room, str]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "tenant", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tenant: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[bytes] = ..., tenant: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[Found]
    def __init__(self, found: _Optional[_Iterable[_Union[Found, str]]] = ...) -> None: ...
