"""Every bound that two sides of the wire must agree on, and the relations between them."""

KEY_BYTES_MIN = 16
KEY_BYTES_MAX = 64
KEYS_PER_CALL_MAX = 65_536
OPERATIONS_PER_STEP_MAX = 256  # so that one message costs the daemon's event loop about a millisecond at the most
GRANTS_PER_STEP_MAX = 256  # slots; each may have to be made free by an eviction
DECISIONS_PER_STEP_MAX = 32
REFUSED_BYTES_PER_STEP = 8 << 10  # of keys in those, but for the last one; the daemon looks at each key
DECISION_BYTES_MAX = 4 << 10  # a larger one is not remembered
COUNT_PER_STEP_MAX = 1 << 32  # of chunks; sums of them are sent as 64 bits
LEARNED_DOCUMENT_BYTES_MAX = 64 << 10  # with its name
LEARNED_PER_STEP_MAX = 16  # and kept of a kind of engines
LEARNED_KEPT_MAX = 64  # kinds of engines
LEARNED_ON_DISK_MAX = 16
READS_UNTOLD_MAX = 64
PROMOTES_PER_ROUND = 256  # chunks asked for at once; the daemon reads fewer at a time, head first
TAILS_PER_STEP_MAX = 64  # chains that one request for slots may name
MESSAGE_BYTES_MAX = 4 << 20  # gRPC's own default, stated at both ends
SIZE_CLASSES_MAX = 32
LEASE_MS = 30_000
HEARTBEAT_INTERVAL_MS = 50
HEARTBEAT_STALE_MS = 150  # older: a client asks the daemon before it puts, and takes fs hits for misses
PROBE_TEXT_MAX = 128  # of each of its parts
PROBES_MAX = 256  # engine families with hash algorithms
STEPS_UNANSWERED_MAX = 16  # a sender waits for an answer then; the daemon remembers as many replies per group
SESSIONS_MAX = 1_024
OPERATORS_MAX = 16  # places beyond those, for whoever wants to see who takes them
DESCRIPTORS_PER_SESSION = 3  # a socket, a pidfd and a gRPC connection
NAMESPACES_MAX = 4_096  # documents kept
QUOTAS_MAX = 10_000
NAMESPACE_DOCUMENT_BYTES_MAX = 256 << 10
GROUP_NAME_BYTES_MAX = 128
WORLD_SIZE_MAX = 1_024
KINDS_PER_GROUP_MAX = 32  # KV cache groups of one engine; as many size classes as an arena takes
ATTACH_WITHIN_MS = 30_000  # after connecting to arena.sock; the daemon hangs up on who only occupies a place
REST_WITHOUT_PIDFD_MS = 60_000  # how long slots rest after a hang-up of a process that nothing can watch
GRANTS_IDLE_S = 1.0  # unused grants go back after that long without a store
GRANTS_PER_KIND_MIN = 64  # of a group
GRANTS_PER_GROUP_SHARE = 16  # of the arena; docs/decisions/001
RESERVE_SHARE = 64  # of the arena, at the most, that an engine keeps ready for requests to come
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un
LEASES_ENDED_PER_SLICE = 1_024  # half a microsecond each
GRANTS_ENDED_PER_SLICE = 256  # two microseconds each
REMOVAL_STEPS_PER_SLICE = 256  # of the index, a microsecond or less each; the event loop turns between slices
LISTING_STEPS_PER_SLICE = 4_096  # places of the index looked at
CHECKING_STEPS_PER_SLICE = 1_024
ROWS_PER_PAGE = 128  # of an operator's list
DOCUMENT_BYTES_PER_PAGE = 1 << 20
PROBLEMS_SHOWN_MAX = 1_000
TOKEN_METADATA_KEY = "kvstore-token"

assert PROMOTES_PER_ROUND <= OPERATIONS_PER_STEP_MAX
assert HEARTBEAT_STALE_MS >= 3 * HEARTBEAT_INTERVAL_MS


def grants_left(arena_bytes: int, slot_bytes: int, *, held: int, held_bytes: int) -> int:
    """How many more slots of `slot_bytes` may be granted to a group that holds `held` of this kind, and `held_bytes` of
    all its kinds together, those that it is writing included."""
    return max(GRANTS_PER_KIND_MIN - held, (arena_bytes // GRANTS_PER_GROUP_SHARE - held_bytes) // slot_bytes)
