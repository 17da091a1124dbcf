"""The daemon's state behind the wire: sessions, groups, grants, namespaces, probes and counters.

Concurrency: one thread, the event loop's, calls everything here. No I/O, no clock (time is an argument), no waiting.
When the daemon dies all of this is gone with its instance id, and every reference that carries that id is refused by
the next daemon. When an attached process dies, `hang_up` and `process_ended` say so, in either order.

Invariants, each kept after every call:
* A grant belongs to one group and ends in commit or abort, or when every process of the group has ended or said
  goodbye. Neither time nor a hang-up ends one. An answer that never arrived granted nothing: the session that follows
  the one it was for says so, and such grants are aborted.
* `Group.granted` holds exactly the grants that the Index holds for that group.
* A commit makes a chunk visible only when its reference is granted to the group that sends it, in the namespace that
  its kind had when it was granted, and the group is not refused.
* A group has the same kinds of chunks, each with one namespace document and one chunk size, from its first process that
  brings them to its last process.
* At most one scheduler of a group is connected; at most one connected worker has a rank; the connected workers' ranges
  of a kind are equal (ranks that hold the same bytes and take turns to write them) or do not overlap, and a group is
  complete only when those of each kind tile one chunk.
* A message's number is one more than the last one's. A number seen before is answered as before and not applied again.
* Grants in flight: per group at most a sixteenth of the arena, or 64 slots of each kind where that is more; all
  together a quarter of the arena; and a group that holds none of a kind may always have one.
* The first probe of each (engine family, hash algorithm) stays for the daemon's life; a group that sent another value
  is refused for its own life.
* A reference of another instance is never looked at.
* What an operator has removed does not come back: a commit of a slot granted before the removal ends as an abort.
"""

import json
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, cast

from google.protobuf.message import DecodeError

from kvstore import limits
from kvstore._native import PRESENT, STORED, Index, class_bytes
from kvstore.decisions import is_full
from kvstore.errors import (
    BadKey,
    KVStoreError,
    LimitExceeded,
    NamespaceMismatch,
    ProtocolError,
    SeedMismatch,
    Unavailable,
)
from kvstore.explanations import Explanations
from kvstore.lastuse import LastUses
from kvstore.movement import OWN_GROUP, Movement
from kvstore.namespace import canonical_json, differing_fields, digest, seed_fingerprint
from kvstore.rpc.v1 import store_pb2
from kvstore.tenant import TENANT_ID_BYTES, tenant_id
from kvstore.tiers.base import ChunkId
from kvstore.tiers.cpu import CpuTier

Ref = tuple[int, int]  # slot, generation

TOKEN_BYTES = 32
SEED_FIELD = "seed_fingerprint"
CHUNK_BYTES_FIELD = "chunk_bytes"
EPOCH_FIELD = "epoch"
CLIENT_GROUP_PREFIX = "client-"  # of the names that the daemon gives; nobody can join such a group
GRANTED_SHARE_OF_ARENA = 4  # all groups together: a quarter

_KEY_SIZES = frozenset(range(limits.KEY_BYTES_MIN, limits.KEY_BYTES_MAX + 1))
_REJECTED_TIER_FULL = store_pb2.OUTCOME_REJECTED_TIER_FULL
_REJECTED_ADMISSION = store_pb2.OUTCOME_REJECTED_ADMISSION
ROLE_NAMES = {
    store_pb2.ROLE_UNSPECIFIED: "connecting",
    store_pb2.ROLE_CLIENT: "client",
    store_pb2.ROLE_SCHEDULER: "scheduler",
    store_pb2.ROLE_WORKER: "worker",
    store_pb2.ROLE_ADMIN: "admin",
}


@dataclass(eq=False, slots=True)
class Session:
    """One connection of one process."""

    token: bytes
    pid: int
    uid: int
    role: store_pb2.Role = store_pb2.ROLE_UNSPECIFIED
    rank: int = 0
    ranges: tuple[tuple[int, int], ...] = ()  # worker: (offset, bytes) of a chunk, by kind
    group: "Group | None" = None
    connected: bool = True
    # Set by the open step stream: called when the group's state changed and nobody asked, or the connection has ended.
    on_group: Callable[[], None] | None = None
    # The group's state in the answer to Attach; None once a stream has ended, for what it carried may be lost.
    told: store_pb2.GroupState | None = None
    # Numbers are per group, and a group has one sender at a time: its client or its scheduler.
    last_number: int = 0
    replies: OrderedDict[int, store_pb2.StepReply] = field(default_factory=OrderedDict)


@dataclass(eq=False, slots=True)
class Kind:
    """The chunks of one KV cache group of an engine."""

    number: int  # in its group
    document: str  # as the processes brought it
    namespace: bytes  # now; differs from the document's digest after a move to a fresh epoch
    chunk_bytes: int
    slot_bytes: int  # chunk_bytes rounded up to its size class
    granted: int = 0  # how many of the group's grants are for it

    @classmethod
    def of(cls, number: int, brought: store_pb2.Kind) -> "Kind":
        document, chunk_bytes = brought.namespace_document, brought.chunk_bytes
        return cls(number, document, digest(document), chunk_bytes, class_bytes(chunk_bytes))


@dataclass(frozen=True, slots=True)
class Grant:
    """What is known of the slots that were granted together."""

    kind: Kind
    epoch: int  # of the group, when it was granted


@dataclass(eq=False, slots=True)
class Group:
    """The sessions of one engine, or of one client."""

    number: int
    name: str
    world_size: int
    kinds: list[Kind] = field(default_factory=list)  # none until the first process brings them
    epoch: int = 0  # moves to fresh namespaces so far
    refused: str = ""
    sessions: set[Session] = field(default_factory=set)  # connected
    processes: set[Session] = field(default_factory=set)  # of processes that have not ended, connected or not
    granted: dict[Ref, Grant] = field(default_factory=dict)
    # Reads from disk that nobody was told of: chunks, seconds.
    reads: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=limits.READS_UNTOLD_MAX))

    def workers(self) -> list[Session]:
        ranked = [session for session in self.sessions if session.role == store_pb2.ROLE_WORKER]
        return sorted(ranked, key=lambda session: session.rank)

    def complete(self) -> bool:
        if not self.kinds:
            return False
        if any(session.role == store_pb2.ROLE_CLIENT for session in self.sessions):
            return True
        return len(self.workers()) == self.world_size and all(
            self.covered_bytes(i) == kind.chunk_bytes for i, kind in enumerate(self.kinds)
        )

    def covered_bytes(self, kind: int) -> int:
        """Bytes of a chunk of that kind that connected workers own."""
        return sum(nbytes for _, nbytes in {worker.ranges[kind] for worker in self.workers()})

    def granted_bytes(self) -> int:
        return sum(kind.granted * kind.slot_bytes for kind in self.kinds)


class _Batch(NamedTuple):
    """One `Commits` of a message, read once: each look at a field of a message makes its items anew."""

    tenant: bytes
    refs: list[Ref]
    keys: list[bytes]
    parents: list[bytes]
    memory_only: bool
    decision: int

    @classmethod
    def of(cls, commits: store_pb2.Commits) -> "_Batch":
        """ProtocolError."""
        slots, generations, keys, parents = commits.slots, commits.generations, commits.keys, commits.parents
        if not len(slots) == len(generations) == len(keys) == len(parents):
            raise ProtocolError(
                f"commits of {len(slots)} slots, {len(generations)} generations, {len(keys)} keys and {len(parents)} "
                "parents; each chunk has one of each"
            )
        refs = list(zip(slots, generations, strict=True))
        return cls(commits.tenant, refs, list(keys), list(parents), commits.memory_only, commits.decision)


@dataclass(slots=True)
class Counts:
    """Of chunks, since the daemon began."""

    hits: int = 0  # loaded; of cpu
    fs_hits: int = 0
    misses: int = 0
    stores: int = 0
    failed_loads: int = 0


class Store:
    """See the module's docstring for every invariant."""

    def __init__(
        self,
        tier: CpuTier,
        *,
        instance_id: bytes,
        index_key: bytes,
        tenant_key: bytes,
        hash_seed: str,
        require_cache_salt: bool,
        movement: Movement | None = None,
        keep_document: Callable[[str], None] | None = None,
        last_uses: LastUses | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`movement` None: there is no fs tier. `keep_document` is told of every namespace that is new here.
        `last_uses` None: nobody asks."""
        self.instance_id = instance_id
        self.index_key = index_key
        self.tenant_key = tenant_key
        self.require_cache_salt = require_cache_salt
        self._tier = tier
        self._index: Index = tier.index
        self._hash_seed = hash_seed
        self._seed_fingerprint = seed_fingerprint(hash_seed)
        self._unsalted = tenant_id(tenant_key, None)
        self._movement = movement
        if movement is not None:
            movement.on_read = self._was_read
        self.explanations = Explanations(self._index)
        if movement is not None:
            movement.on_unwritten = self.explanations.unwritten
        self._learned: OrderedDict[str, dict[str, str]] = OrderedDict()  # how an engine is -> document by name
        self._document_is_new = keep_document
        self._last_uses = last_uses or LastUses(lambda: 0.0)
        self._random_bytes = random_bytes

        self._sessions: dict[bytes, Session] = {}  # by token; connected, or with a process that holds grants
        self._groups: dict[str, Group] = {}
        self._groups_made = 0
        self._ending: deque[Group] = deque()  # whose leases, or grants, are so many that they end a slice at a time
        self._namespaces: OrderedDict[bytes, str] = OrderedDict()  # id -> document, oldest first
        self._probes: dict[tuple[str, str], bytes] = {}
        self._granted_bytes = 0
        self.counts = Counts()

    # -- sessions ------------------------------------------------------------------------------------------------

    def connect(self, *, pid: int, uid: int) -> Session:
        """A process has connected to arena.sock and may be here. LimitExceeded."""
        if len(self._sessions) >= limits.SESSIONS_MAX + limits.OPERATORS_MAX:
            raise self._too_many_sessions()
        session = Session(self._random_bytes(TOKEN_BYTES), pid, uid)
        self._sessions[session.token] = session
        return session

    def _too_many_sessions(self) -> LimitExceeded:
        return LimitExceeded(
            f"this daemon takes {limits.SESSIONS_MAX} processes, and so many are attached; see `kvstore ls sessions` "
            "for who they are"
        )

    def session(self, token: bytes) -> Session | None:
        session = self._sessions.get(token)
        return session if session is not None and session.connected else None

    def attach(self, session: Session, request: store_pb2.AttachRequest) -> None:
        """Check who the process says it is and make it part of its group.

        SeedMismatch, NamespaceMismatch, LimitExceeded, ProtocolError; nothing has changed then.
        """
        if session.role != store_pb2.ROLE_UNSPECIFIED:
            raise ProtocolError(f"this session is attached already, as {ROLE_NAMES[session.role]}")
        if request.role == store_pb2.ROLE_ADMIN:
            session.role = request.role
            return
        if len(self._sessions) > limits.SESSIONS_MAX:  # this one included: the places beyond are for operators
            raise self._too_many_sessions()
        if request.role not in (store_pb2.ROLE_CLIENT, store_pb2.ROLE_SCHEDULER, store_pb2.ROLE_WORKER):
            raise ProtocolError(f"role {request.role} is unknown to this daemon")
        self._require_seed(request)
        if request.role != store_pb2.ROLE_SCHEDULER:
            self._require_kinds(request)
        if request.role == store_pb2.ROLE_CLIENT:
            group = self._new_group(f"{CLIENT_GROUP_PREFIX}{self._groups_made + 1}", world_size=1)
        else:
            group = self._group_to_join(request)
        try:
            if request.role == store_pb2.ROLE_SCHEDULER:
                _require_only_scheduler(group)
            else:
                _require_same_kinds(group, request.kinds)
            if request.role == store_pb2.ROLE_WORKER:
                _require_ranges(group, request)
        except Exception:
            self._forget_if_done(group)
            raise

        size_classes = self._size_classes()
        session.role = request.role
        session.rank = request.rank
        session.ranges = tuple((kind.range_offset, kind.range_bytes) for kind in request.kinds)
        session.group = group
        if request.role != store_pb2.ROLE_SCHEDULER and not group.kinds:
            group.kinds = [Kind.of(number, brought) for number, brought in enumerate(request.kinds)]
            for kind in group.kinds:
                if kind.slot_bytes not in size_classes:
                    self._tier.warn_if_table_is_short(kind.slot_bytes)
                self._keep_document(kind.namespace, kind.document)
        group.sessions.add(session)
        group.processes.add(session)
        self._announce(group)

    def hang_up(self, session: Session) -> None:
        """The connection has ended; the process may live on, and may still be copying."""
        if not session.connected:
            return
        session.connected = False
        if session.on_group is not None:  # its stream ends
            session.on_group()
            session.on_group = None
        group = session.group
        if group is None:
            del self._sessions[session.token]
            return
        self._last_uses.used(_namespaces_of([group]))
        group.sessions.discard(session)
        if not group.sessions:
            if self._movement is not None:
                self._movement.forget_group(group.number)
            self._end(group)
        self._announce(group)
        self._forget_if_done(group)

    def process_ended(self, session: Session) -> None:
        """The process has ended, as its pidfd says, or has rested long enough where nothing can watch it; or it has
        said goodbye, and writes no more."""
        self.hang_up(session)
        group = session.group
        if group is None or session not in group.processes:
            return
        group.processes.discard(session)
        del self._sessions[session.token]
        self._forget_if_done(group)

    def connected(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.connected]

    def watched(self, session: Session) -> bool:
        """Whether it still matters when the process of this session ends."""
        return session.token in self._sessions

    def group_state(self, group: Group | None) -> store_pb2.GroupState:
        if group is None:
            return store_pb2.GroupState()
        return store_pb2.GroupState(
            complete=group.complete(),
            kinds=[
                store_pb2.KindState(namespace_id=kind.namespace, chunk_bytes=kind.chunk_bytes) for kind in group.kinds
            ],
            refused=group.refused,
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, session: Session, request: store_pb2.StepRequest, now_ms: int) -> store_pb2.StepReply:
        """Apply one message and answer it. Unavailable (another instance), ProtocolError, BadKey, LimitExceeded: then
        nothing of the message was applied."""
        group = session.group
        if not session.connected:  # its group may be gone, and nothing would end a grant
            raise Unavailable("this process's connection on arena.sock has ended: attach again")
        if group is None or session.role not in (store_pb2.ROLE_CLIENT, store_pb2.ROLE_SCHEDULER):
            raise ProtocolError(f"a {ROLE_NAMES[session.role]} session sends no step messages")
        if request.instance_id != self.instance_id:
            raise Unavailable(
                f"the message is for instance {request.instance_id.hex() or '(none)'} and this daemon is "
                f"{self.instance_id.hex()}: attach again"
            )
        if 0 < request.number <= session.last_number:
            return session.replies.get(request.number) or store_pb2.StepReply(number=request.number)
        _require_few(request)
        batches = [_Batch.of(commits) for commits in request.commits]
        _require_well_formed(request, batches, session.last_number, len(group.kinds))

        reply = store_pb2.StepReply(number=request.number)
        self._end_predecessor(group, request.predecessor)
        if request.HasField("probe") or request.fresh_namespace:
            self._change_state(group, request, reply)
        # Before the commits: what a request missed is explained by what had happened until then.
        self._remember_decisions(group, request, now_ms)
        for batch in batches:
            reply.outcomes.extend(cast("list[store_pb2.Outcome]", self._commit(group, batch, now_ms)))
        self._abort(group, [(at.slot, at.generation) for at in request.aborts])
        self._release(group, request.releases)
        if request.leases and not group.refused:
            refs = [(at.slot, at.generation) for at in request.leases]
            self._index.lease(group.number, refs, now_ms + limits.LEASE_MS)
        if group.kinds and not group.refused:
            for chain in request.touches:
                namespace = group.kinds[chain.kind].namespace
                self._index.touch(namespace, chain.tenant, list(chain.keys), now_ms, again=chain.again)
                if self._movement is not None:
                    self._movement.touched(namespace, chain.tenant, chain.keys, worth_disk=chain.worth_disk)
        if self._movement is not None and request.promotes and group.complete() and not group.refused:
            self._promote(group, request, now_ms)
        self.counts.misses += request.misses
        self._learn(request, reply)
        while group.reads:
            chunks, seconds = group.reads.popleft()
            reply.reads.add(chunks=chunks, seconds=seconds)
        largest = max(group.kinds, key=lambda kind: kind.chunk_bytes, default=None)
        reply.cpu_full = is_full(self._index.stats(), largest.slot_bytes if largest else 0, self._tier.ready_bytes)
        if self._movement is not None:
            reply.fs = self._movement.room(largest.chunk_bytes if largest else 0).value
        if any(request.grants_wanted):
            reply.grants.extend(self._grant_kinds(group, request.grants_wanted, request.tails, now_ms))

        session.last_number = request.number
        session.replies[request.number] = reply
        while len(session.replies) > limits.STEPS_UNANSWERED_MAX:
            session.replies.popitem(last=False)
        return reply

    def step_if_next(self, session: Session, message: bytes, now_ms: int) -> store_pb2.StepReply | None:
        """As `step`, of a message that can come on the stream as well. None: it is not its turn, or something is wrong
        with it; then nothing of it was applied."""
        try:
            request = store_pb2.StepRequest.FromString(message)
            return self.step(session, request, now_ms) if request.number == session.last_number + 1 else None
        except (KVStoreError, DecodeError):
            return None

    def _promote(self, group: Group, request: store_pb2.StepRequest, now_ms: int) -> None:
        """Begin to read from disk what a message asks for."""
        movement = self._movement
        assert movement is not None, "there is no tier to read from"
        evictions = self._index.stats()["evictions"]
        for chain in request.promotes:
            kind = group.kinds[chain.kind]
            self.explanations.make_room_for(f"what {group.name} had read from disk", kind.namespace, now_ms)
            movement.promote(
                group.number,
                kind.namespace,
                chain.tenant,
                chain.keys,
                kind.chunk_bytes,
                waited=not chain.unwaited,
            )
        evicted = self._index.stats()["evictions"] - evictions
        self.explanations.evicted(f"what {group.name} had read from disk", evicted, now_ms)

    def _change_state(self, group: Group, request: store_pb2.StepRequest, reply: store_pb2.StepReply) -> None:
        """What of a message may change the group's state; nothing else does."""
        before = self.group_state(group)
        if request.HasField("probe"):
            self._probe(group, request.probe)
        if request.fresh_namespace:
            self._move_to_fresh_namespace(group)
        state = self.group_state(group)
        if state != before:
            reply.group.CopyFrom(state)

    def _remember_decisions(self, group: Group, request: store_pb2.StepRequest, now_ms: int) -> None:
        sick = "" if self._movement is None or not request.decisions else self._movement.fs.sick or ""
        for decision in request.decisions:
            # What came of a decision may be told to another daemon, before the workers have come to it.
            namespace = group.kinds[decision.kind].namespace if decision.kind < len(group.kinds) else b""
            self.explanations.told(group.name, namespace, decision, now_ms, sick=sick)

    def _end_predecessor(self, group: Group, predecessor: store_pb2.Predecessor) -> None:
        """An earlier session of the group, whose connection had ended without a goodbye though its process lives.
        Mostly there is none."""
        session = self._sessions.get(predecessor.token)
        if session is None or session.connected or session.group is not group:
            return
        for number, reply in session.replies.items():
            if number > predecessor.answered:
                for grants in reply.grants:
                    self._abort(group, zip(grants.slots, grants.generations, strict=True))
        self.process_ended(session)

    def _was_read(self, group_number: int, chunks: int, seconds: float) -> None:
        for group in self._groups.values():
            if group.number == group_number:
                group.reads.append((chunks, seconds))

    def _learn(self, request: store_pb2.StepRequest, reply: store_pb2.StepReply) -> None:
        if not request.learning:
            return
        kept = self._learned.setdefault(request.learning, {})
        self._learned.move_to_end(request.learning)
        for learned in request.learned:
            kept.pop(learned.name, None)
            kept[learned.name] = learned.document  # the last one now
        while len(kept) > limits.LEARNED_PER_STEP_MAX:  # so that the answer is no larger than a message
            del kept[next(iter(kept))]
        while len(self._learned) > limits.LEARNED_KEPT_MAX:
            self._learned.popitem(last=False)
        if request.learned_wanted:
            for name, document in kept.items():
                reply.learned.add(name=name, document=document)

    def learned(self) -> dict[str, dict[str, str]]:
        """Of the engines seen last: documents by kind of engine and name."""
        return dict(list(self._learned.items())[-limits.LEARNED_ON_DISK_MAX :])

    def remember_learned(self, learned: Mapping[str, Mapping[str, str]]) -> None:
        """What was kept by an earlier run."""
        self._learned.update((kind, dict(documents)) for kind, documents in learned.items())

    def lookup(self, request: store_pb2.LookupRequest) -> Iterator[bytes]:
        """One code of `kvstore._native` per key, in slices; anything may be called in between. ProtocolError,
        LimitExceeded: before the first. BadKey: in any."""
        if len(request.namespace_id) != 16 or len(request.tenant) != TENANT_ID_BYTES:
            raise ProtocolError(
                f"a lookup names a namespace and a tenant of 16 bytes, not of {len(request.namespace_id)} and "
                f"{len(request.tenant)}"
            )
        if len(request.keys) > limits.KEYS_PER_CALL_MAX:
            raise LimitExceeded(f"{len(request.keys)} keys in one lookup; at most {limits.KEYS_PER_CALL_MAX}")
        for first in range(0, len(request.keys), limits.LISTING_STEPS_PER_SLICE):
            keys = request.keys[first : first + limits.LISTING_STEPS_PER_SLICE]
            require_keys(keys)
            yield self._index.lookup(request.namespace_id, request.tenant, keys)

    def end_what_is_over(self, now_ms: int) -> bool:
        """One slice of leases whose time is over, and of what those held who have ended. False: that was the last."""
        if self._ending and self._ended(self._ending[0]):
            self._ending.popleft()
        expired = self._index.expire_leases(now_ms, limit=limits.LEASES_ENDED_PER_SLICE)
        return bool(self._ending) or expired == limits.LEASES_ENDED_PER_SLICE

    def heartbeat(self) -> None:
        self._index.heartbeat()

    def problems(self) -> list[str]:
        """Every invariant that does not hold, a sentence each. Takes time in proportion to the chunks: see `check`."""
        return [problem for found in self.check() for problem in found]

    def check(self) -> Iterator[list[str]]:
        """`problems` in slices; anything may be called in between. What concerns one chunk, slot or group is of the
        moment at which it was looked at, each sum of the moment at which it was compared. A chunk that comes meanwhile
        may not be looked at. One slice is longer, up to 0.3 us for each chunk of the cpu tier: its sums."""
        start: int | None = 0
        while start is not None:
            found, start = self._index.problems_of_chunks(start, steps=limits.CHECKING_STEPS_PER_SLICE)
            yield found
        yield self._problems_of_sums()
        if self._movement is not None:
            yield from self._movement.fs.check()

    def _problems_of_sums(self) -> list[str]:
        problems = self._index.problems_of_sums()
        groups = {*self._groups.values(), *self._ending}
        granted = sum(grant.kind.slot_bytes for group in groups for grant in group.granted.values())
        index_granted = self._index.stats()["granted_bytes"]
        if self._movement is not None:
            index_granted -= self._movement.promoting_bytes
        if not granted == self._granted_bytes == index_granted:
            problems.append(
                f"groups hold {granted} granted bytes, the store counts {self._granted_bytes}, "
                f"the index {index_granted}"
            )
        for group in self._groups.values():
            if not group.sessions and not group.granted:
                problems.append(f"group {group.name} has neither a session nor a grant and is still kept")
            if not group.sessions <= group.processes:
                problems.append(f"group {group.name} has a session of a process that has ended")
        for group in groups:
            if sum(kind.granted for kind in group.kinds) != len(group.granted):
                problems.append(f"group {group.name} holds {len(group.granted)} grants, and counts others by kind")
        return problems

    # -- namespaces ----------------------------------------------------------------------------------------------

    def note_uses(self) -> None:
        """The namespaces of all sessions are used just now."""
        self._last_uses.used(_namespaces_of(self._groups.values()))

    def document(self, namespace: bytes) -> str:
        """ "" where it is not kept."""
        return self._namespaces.get(namespace, "")

    def documents(self) -> list[tuple[bytes, str]]:
        """Those kept, by namespace, oldest first."""
        return list(self._namespaces.items())

    def in_use(self) -> set[bytes]:
        """Namespaces of sessions."""
        return _namespaces_of(self._groups.values())

    def unused_s(self, namespace: bytes, in_use: Collection[bytes] | None = None) -> float | None:
        """Since a session last used it; None: one does. `in_use`: those that sessions use, where many are asked for."""
        used = namespace in (self.in_use() if in_use is None else in_use)
        return None if used else self._last_uses.unused_s(namespace)

    def forget_namespace(self, namespace: bytes) -> None:
        """Its chunks have been removed."""
        self._namespaces.pop(namespace, None)
        self._last_uses.forget(namespace)

    # -- attach rules --------------------------------------------------------------------------------------------

    def _require_seed(self, request: store_pb2.AttachRequest) -> None:
        if request.seed_fingerprint != self._seed_fingerprint:
            raise SeedMismatch(
                f"this process hashes with seed {request.seed_shown!r} and the daemon with {self._hash_seed!r} (the "
                "strings must be equal: '0' is not '00'), so their keys would never agree; "
                f"export PYTHONHASHSEED={self._hash_seed} for this process, or start the daemon with "
                f"--hash-seed {request.seed_shown}"
            )

    def _require_kinds(self, request: store_pb2.AttachRequest) -> None:
        most = 1 if request.role == store_pb2.ROLE_CLIENT else limits.KINDS_PER_GROUP_MAX
        if not 0 < len(request.kinds) <= most:
            raise ProtocolError(
                f"a {ROLE_NAMES[request.role]} brings 1 to {most} kinds of chunks, not {len(request.kinds)}"
            )
        classes = self._size_classes()
        for kind in request.kinds:
            self._require_document(kind, request.seed_fingerprint)
            self._require_size_class(kind.chunk_bytes, classes)
        namespaces = [kind.namespace_document for kind in request.kinds]
        if len(set(namespaces)) != len(namespaces):
            raise ProtocolError("two kinds of one group have one namespace document, so their chunks could be mixed up")

    def _require_document(self, request: store_pb2.Kind, seed_fingerprint: bytes) -> None:
        text = request.namespace_document
        if len(text.encode()) > limits.NAMESPACE_DOCUMENT_BYTES_MAX:
            raise LimitExceeded(
                f"the namespace document has {len(text.encode())} bytes; at most {limits.NAMESPACE_DOCUMENT_BYTES_MAX}"
            )
        document = _parsed(text)
        try:
            canonical = document is not None and canonical_json(document) == text
        except (TypeError, RecursionError):  # a float or a null; lists in lists without end
            canonical = False
        if document is None or not canonical:
            raise ProtocolError(f"the namespace document is not canonical JSON: {text[:80]!r}")
        if document.get(CHUNK_BYTES_FIELD) != request.chunk_bytes:
            raise NamespaceMismatch(
                f"the namespace document says {CHUNK_BYTES_FIELD} {document.get(CHUNK_BYTES_FIELD)!r} and the session "
                f"{request.chunk_bytes}"
            )
        if document.get(SEED_FIELD) != seed_fingerprint.hex():
            raise NamespaceMismatch(
                f"the namespace document says {SEED_FIELD} {document.get(SEED_FIELD)!r} and the session "
                f"{seed_fingerprint.hex()!r}"
            )

    def _size_classes(self) -> set[int]:
        """Of the chunks of all groups, and of those that are here. Nothing else needs one."""
        of_groups = {kind.slot_bytes for group in self._groups.values() for kind in group.kinds}
        return of_groups.union(self._index.classes_in_use())

    def _require_size_class(self, chunk_bytes: int, classes: set[int]) -> None:
        """`classes`: those in use; the chunk's is added."""
        # The arena is whole slots. Of a number near the end of 64 bits there is no size class to ask for.
        if not 0 < chunk_bytes <= self._tier.arena_bytes:
            raise LimitExceeded(
                f"a chunk of {chunk_bytes} bytes does not fit an arena of {self._tier.arena_bytes} bytes; start the "
                "daemon with more --cpu-bytes, or store smaller chunks"
            )
        classes.add(class_bytes(chunk_bytes))
        if len(classes) > limits.SIZE_CLASSES_MAX:
            raise LimitExceeded(
                f"chunks of {chunk_bytes} bytes would be size class {len(classes)} of this arena, which takes "
                f"{limits.SIZE_CLASSES_MAX}; use a chunk size that another engine of this node uses, or remove the "
                "chunks of namespaces that no engine uses any more (kvstore ls namespaces, gc, evict --namespace)"
            )

    def _group_to_join(self, request: store_pb2.AttachRequest) -> Group:
        name_bytes = len(request.group.encode())
        if not 0 < name_bytes <= limits.GROUP_NAME_BYTES_MAX:
            raise ProtocolError(f"a group's name has 1 to {limits.GROUP_NAME_BYTES_MAX} bytes, not {name_bytes}")
        if request.group.startswith(CLIENT_GROUP_PREFIX) or not request.group.isprintable():
            raise ProtocolError(
                f"a group's name is printable and does not begin with {CLIENT_GROUP_PREFIX!r}, unlike {request.group!r}"
            )
        if not 0 < request.world_size <= limits.WORLD_SIZE_MAX:
            raise ProtocolError(f"a group has 1 to {limits.WORLD_SIZE_MAX} workers, not {request.world_size}")
        group = self._groups.get(request.group)
        if group is None:
            return self._new_group(request.group, request.world_size)
        if group.world_size != request.world_size:
            raise NamespaceMismatch(
                f"group {group.name} has {group.world_size} workers, and this process says {request.world_size}"
            )
        return group

    # -- groups --------------------------------------------------------------------------------------------------

    def _new_group(self, name: str, world_size: int) -> Group:
        self._groups_made += 1
        group = self._groups[name] = Group(self._groups_made, name, world_size)
        return group

    def _forget_if_done(self, group: Group) -> None:
        """Grants outlive connections, and end only with the group's last process."""
        if not group.granted:  # then a process that is no longer connected has nothing left to write to
            for session in group.processes - group.sessions:
                group.processes.discard(session)
                self._sessions.pop(session.token, None)
        if not group.processes and self._groups.get(group.name) is group:
            del self._groups[group.name]
            self._end(group)

    def _end(self, group: Group) -> None:
        """What it holds, as far as nobody is left who may use it: the first slice of that now."""
        if group not in self._ending and not self._ended(group):
            self._ending.append(group)

    def _ended(self, group: Group) -> bool:
        """One slice. True: it was the last, or somebody has come back."""
        if group.sessions:
            return True
        if not self._index.end_leases(group.number, limit=limits.LEASES_ENDED_PER_SLICE):
            return False
        if group.processes:
            return True
        self._abort(group, list(islice(group.granted, limits.GRANTS_ENDED_PER_SLICE)))
        return not group.granted

    def _announce(self, group: Group) -> None:
        for session in group.sessions:
            if session.on_group is not None:
                session.on_group()

    def remember(self, documents: Mapping[bytes, str]) -> None:
        """Namespaces of earlier runs, by id."""
        for namespace, document in documents.items():
            if namespace not in self._namespaces and len(self._namespaces) < limits.NAMESPACES_MAX:
                self._namespaces[namespace] = document
                self._namespaces.move_to_end(namespace, last=False)

    def _keep_document(self, namespace: bytes, document: str) -> None:
        if self._document_is_new is not None and namespace not in self._namespaces:
            self._document_is_new(document)
        self._namespaces[namespace] = document
        self._last_uses.used([namespace])
        if len(self._namespaces) > limits.NAMESPACES_MAX:
            in_use = _namespaces_of(self._groups.values()) | {namespace}
            oldest = next((kept for kept in self._namespaces if kept not in in_use), None)
            if oldest is not None:
                del self._namespaces[oldest]  # its chunks stay; the next process of that namespace brings it again

    def _move_to_fresh_namespace(self, group: Group) -> None:
        """Chunks of before are out of the group's reach, and writes begun before end as aborts."""
        if not group.kinds:
            return  # nothing was stored yet
        group.epoch += 1
        for kind in group.kinds:
            document = _parsed(kind.document)
            assert document is not None
            moved = canonical_json({**document, EPOCH_FIELD: self._random_bytes(16).hex()})
            kind.namespace = digest(moved)
            self._keep_document(kind.namespace, moved)

    def _probe(self, group: Group, probe: store_pb2.Probe) -> None:
        kind = (probe.engine_family, probe.hash_algorithm)
        if kind not in self._probes and len(self._probes) >= limits.PROBES_MAX:
            group.refused = (
                f"this daemon knows the keys of {limits.PROBES_MAX} kinds of engines already, and none of {kind[0]} "
                f"engines with {kind[1]}: restart it"
            )
            return
        first = self._probes.setdefault(kind, probe.value)
        if first != probe.value and not group.refused:
            group.refused = (
                f"this engine hashes the probe tokens to {probe.value.hex()}, and the first "
                f"{probe.engine_family} engine with {probe.hash_algorithm} on this node to {first.hex()}, so their "
                "keys would never agree: give both the same PYTHONHASHSEED, --prefix-caching-hash-algo and engine "
                "version, then restart this engine (and the daemon, if this engine is the right one)"
            )

    # -- grants --------------------------------------------------------------------------------------------------

    def _grant_kinds(
        self, group: Group, wanted: Sequence[int], tails: Sequence[store_pb2.SlotRef], now_ms: int
    ) -> Iterator[store_pb2.Grants]:
        """Up to so many of each kind. A chain larger than the tier must not eat its own end: no lookup gets as far as a
        chunk whose parent has gone."""
        if group.refused or not group.complete():
            none, refused = store_pb2.OUTCOME_UNSPECIFIED, store_pb2.OUTCOME_NOT_GRANTED
            yield from (store_pb2.Grants(short=refused if count else none) for count in wanted)
            return
        kept = [(at.slot, at.generation) for at in tails]
        self._index.lease(OWN_GROUP, kept, now_ms)
        evictions = self._index.stats()["evictions"]
        most = limits.GRANTS_PER_STEP_MAX
        for kind, count in zip(group.kinds, wanted, strict=False):
            self.explanations.make_room_for(group.name, kind.namespace, now_ms)
            grants, short = self._grant(group, kind, count, most)
            most -= len(grants)
            slots, generations = zip(*grants, strict=True) if grants else ((), ())
            yield store_pb2.Grants(slots=slots, generations=generations, short=cast("store_pb2.Outcome", short))
        self.explanations.evicted(group.name, self._index.stats()["evictions"] - evictions, now_ms)
        self._index.release(OWN_GROUP, kept)

    def _grant(self, group: Group, kind: Kind, wanted: int, most: int) -> tuple[list[Ref], int]:
        """Up to `wanted` grants, but no more than `most`, and why there are fewer."""
        arena_bytes = self._tier.arena_bytes
        room = limits.grants_left(arena_bytes, kind.slot_bytes, held=kind.granted, held_bytes=group.granted_bytes())
        room = min(room, (arena_bytes // GRANTED_SHARE_OF_ARENA - self._granted_bytes) // kind.slot_bytes)
        count = min(wanted, most, max(room, 0 if kind.granted else 1))
        grants = self._index.grant(group.number, kind.chunk_bytes, count) if count > 0 else []
        group.granted.update(dict.fromkeys(grants, Grant(kind, group.epoch)))
        kind.granted += len(grants)
        self._granted_bytes += kind.slot_bytes * len(grants)
        if len(grants) == wanted:
            return grants, store_pb2.OUTCOME_UNSPECIFIED
        return grants, _REJECTED_TIER_FULL if len(grants) < count else store_pb2.OUTCOME_NOT_GRANTED

    def _commit(self, group: Group, batch: "_Batch", now_ms: int) -> list[int]:
        """The outcome of each chunk. Commits are most of what a step does: as little as can be is done for each."""
        outcomes: list[int] = [store_pb2.OUTCOME_NOT_GRANTED] * len(batch.refs)
        unsalted = self.require_cache_salt and batch.tenant == self._unsalted
        passed: dict[int, list[int]] = {}  # number of the kind -> positions
        rejected: dict[tuple[bytes, int], list[bytes]] = {}  # namespace, outcome -> keys
        for position, ref in enumerate(batch.refs):
            # Out of `granted` at once: a second commit of the same reference in this message has no grant.
            grant = group.granted.pop(ref, None)
            if grant is None:
                continue
            in_epoch = not group.refused and grant.epoch == group.epoch
            if in_epoch and not unsalted:
                passed.setdefault(grant.kind.number, []).append(position)
                continue
            if in_epoch:
                outcomes[position] = _REJECTED_ADMISSION
                rejected.setdefault((grant.kind.namespace, _REJECTED_ADMISSION), []).append(batch.keys[position])
            self._no_longer_granted(grant.kind, 1)
            self._index.abort(group.number, [ref])
        for number, positions in passed.items():
            kind = group.kinds[number]
            self._no_longer_granted(kind, len(positions))
            commits = [(*batch.refs[at], batch.tenant, batch.keys[at], batch.parents[at]) for at in positions]
            self.explanations.make_room_for(group.name, kind.namespace, now_ms)  # within a quota
            codes = self._index.commit(group.number, kind.namespace, commits, now_ms)
            stored: list[int] = []
            for position, code in zip(positions, codes, strict=True):
                outcomes[position] = code  # the numbers of wire and index agree; not granted: removed meanwhile
                if code == STORED:
                    stored.append(position)
                elif code != PRESENT:
                    rejected.setdefault((kind.namespace, code), []).append(batch.keys[position])
            self.counts.stores += len(stored)
            keys = [batch.keys[position] for position in stored]
            self.explanations.stored(
                group.name, kind.namespace, batch.tenant, keys, now_ms, memory_only=batch.memory_only
            )
            if self._movement is not None:
                for position, key in zip(stored, keys, strict=True):
                    chunk = ChunkId(kind.namespace, batch.tenant, key)
                    self._movement.stored(chunk, *batch.refs[position], kind.chunk_bytes, memory_only=batch.memory_only)
        for (namespace, outcome), keys in rejected.items():
            self.explanations.rejected(group.name, namespace, batch.tenant, keys, outcome, now_ms)
        if batch.decision:
            self.explanations.committed(group.name, batch.decision, outcomes)
        return outcomes

    def _abort(self, group: Group, refs: Iterable[Ref]) -> None:
        held = [ref for ref in dict.fromkeys(refs) if ref in group.granted]
        for ref in held:
            self._no_longer_granted(group.granted.pop(ref).kind, 1)
        if held:
            self._index.abort(group.number, held)

    def _no_longer_granted(self, kind: Kind, slots: int) -> None:
        kind.granted -= slots
        self._granted_bytes -= kind.slot_bytes * slots

    def _release(self, group: Group, releases: Sequence[store_pb2.Release]) -> None:
        if not releases:
            return
        self._index.release(group.number, [(release.at.slot, release.at.generation) for release in releases])
        # A chunk loaded under a lease that ran out meanwhile was loaded all the same: its generation said so.
        loaded = sum(release.loaded for release in releases)
        promoted = sum(release.loaded and release.promoted for release in releases)
        self.counts.hits += loaded - promoted
        self.counts.fs_hits += promoted
        self.counts.failed_loads += len(releases) - loaded


def _namespaces_of(groups: Iterable[Group]) -> set[bytes]:
    return {kind.namespace for group in groups for kind in group.kinds}


def require_keys(keys: Collection[bytes]) -> None:
    if _KEY_SIZES.issuperset(map(len, keys)):  # as usual; each message's keys come by here
        return
    for key in keys:
        if not limits.KEY_BYTES_MIN <= len(key) <= limits.KEY_BYTES_MAX:
            raise BadKey(
                f"key {key.hex()} has {len(key)} bytes; a key is the engine's hash of {limits.KEY_BYTES_MIN} to "
                f"{limits.KEY_BYTES_MAX} bytes"
            )


def _require_only_scheduler(group: Group) -> None:
    for session in group.sessions:
        if session.role == store_pb2.ROLE_SCHEDULER:
            raise NamespaceMismatch(
                f"group {group.name} has a scheduler already (pid {session.pid}); give each engine its own group"
            )


def _require_same_kinds(group: Group, brought: Sequence[store_pb2.Kind]) -> None:
    if not group.kinds:
        return
    if len(brought) != len(group.kinds):
        raise NamespaceMismatch(
            f"this process has {len(brought)} kinds of chunks and group {group.name} has {len(group.kinds)}; start all "
            "processes of one engine with the same settings"
        )
    for ours, theirs in zip(group.kinds, brought, strict=True):
        if ours.document == theirs.namespace_document:
            continue
        here, there = _parsed(ours.document), _parsed(theirs.namespace_document)
        assert here is not None
        assert there is not None
        fields = "; ".join(
            f"{name}: {value!r} here, {in_group!r} in the group"
            for name, in_group, value in differing_fields(here, there)
        )
        raise NamespaceMismatch(
            f"this process and group {group.name} describe different chunks ({fields}); start all processes of one "
            "engine with the same settings"
        )


def _require_ranges(group: Group, request: store_pb2.AttachRequest) -> None:
    """Of each kind: the rank's bytes lie in the chunk, beside those of the others, and the last rank leaves no gap."""
    if request.rank >= group.world_size:
        raise NamespaceMismatch(f"rank {request.rank} of group {group.name}, which has {group.world_size} workers")
    for worker in group.workers():
        if worker.rank == request.rank:
            raise NamespaceMismatch(f"rank {worker.rank} of group {group.name} is attached already (pid {worker.pid})")
    for number, kind in enumerate(request.kinds):
        _require_range(group, request.rank, number, kind)


def _require_range(group: Group, rank: int, number: int, kind: store_pb2.Kind) -> None:
    begin, end = kind.range_offset, kind.range_offset + kind.range_bytes
    if not begin < end <= kind.chunk_bytes:
        raise NamespaceMismatch(f"rank {rank} owns bytes {begin} to {end} of a chunk of {kind.chunk_bytes} bytes")
    workers = group.workers()
    for worker in workers:
        other_begin, other_bytes = worker.ranges[number]
        other_end = other_begin + other_bytes
        if (begin, end) != (other_begin, other_end) and begin < other_end and other_begin < end:
            raise NamespaceMismatch(
                f"ranks {rank} and {worker.rank} of group {group.name} both own bytes of a chunk, but not the "
                f"same: {begin} to {end} and {other_begin} to {other_end}"
            )
    shared = any((begin, kind.range_bytes) == worker.ranges[number] for worker in workers)
    covered = group.covered_bytes(number) + (0 if shared else kind.range_bytes)
    if len(workers) + 1 == group.world_size and covered != kind.chunk_bytes:
        raise NamespaceMismatch(
            f"the {group.world_size} ranks of group {group.name} own {covered} of a chunk's {kind.chunk_bytes} "
            "bytes; together they must own each byte once"
        )


def _require_few(request: store_pb2.StepRequest) -> None:
    """Before anything is made of it: a message of the largest size holds very many, of keys or of nothing at all."""
    operations = len(request.commits) + len(request.touches) + len(request.promotes)
    if operations <= limits.OPERATIONS_PER_STEP_MAX:
        operations = (
            sum(len(commits.keys) for commits in request.commits)
            + len(request.aborts)
            + len(request.leases)
            + len(request.releases)
            + sum(len(chain.keys) for chain in request.touches)
            + sum(len(chain.keys) for chain in request.promotes)
        )
    if operations > limits.OPERATIONS_PER_STEP_MAX:
        raise LimitExceeded(f"{operations} operations in one message; at most {limits.OPERATIONS_PER_STEP_MAX}")


def _require_well_formed(
    request: store_pb2.StepRequest, batches: Sequence[_Batch], last_number: int, kinds: int
) -> None:
    if request.number != last_number + 1:
        raise ProtocolError(f"message number {request.number} after {last_number}")
    if len(request.decisions) > limits.DECISIONS_PER_STEP_MAX or len(request.learned) > limits.LEARNED_PER_STEP_MAX:
        raise LimitExceeded(f"{len(request.decisions)} decisions and {len(request.learned)} documents in one message")
    refused_bytes = sum(len(decision.refused) for decision in request.decisions)
    if refused_bytes > limits.REFUSED_BYTES_PER_STEP + limits.DECISION_BYTES_MAX:
        raise LimitExceeded(f"{refused_bytes} bytes of refused keys in one message")
    for learned in request.learned:
        nbytes = len(learned.name.encode()) + len(learned.document.encode())
        if nbytes > limits.LEARNED_DOCUMENT_BYTES_MAX:
            raise LimitExceeded(f"a document of {nbytes} bytes, with its name, about what was learned")
    if len(request.learning) > limits.LEARNED_DOCUMENT_BYTES_MAX:
        raise LimitExceeded(f"{len(request.learning)} characters say how an engine is")
    decisions = request.decisions
    counts = [
        request.misses,
        *(each.refused_count for each in decisions),
        *(each.disk_refused_count for each in decisions),
    ]
    if max(counts) > limits.COUNT_PER_STEP_MAX:
        raise LimitExceeded(f"{max(counts)} chunks counted in one message; at most {limits.COUNT_PER_STEP_MAX}")
    probe = request.probe
    if max(len(probe.engine_family), len(probe.hash_algorithm), len(probe.value)) > limits.PROBE_TEXT_MAX:
        raise LimitExceeded(f"a probe's family, algorithm or value is longer than {limits.PROBE_TEXT_MAX}")
    if len(request.tails) > limits.TAILS_PER_STEP_MAX:
        raise LimitExceeded(f"{len(request.tails)} tails in one message; at most {limits.TAILS_PER_STEP_MAX}")
    chains = (*request.touches, *request.promotes)
    for tenant in {batch.tenant for batch in batches} | {chain.tenant for chain in chains}:
        if len(tenant) != TENANT_ID_BYTES:
            raise ProtocolError(f"tenant {tenant.hex()} has {len(tenant)} bytes, not {TENANT_ID_BYTES}")
    named = max([len(request.grants_wanted), *(chain.kind + 1 for chain in chains)])
    if named > max(kinds, 1):  # a scheduler may ask before its workers have come
        raise ProtocolError(f"the message names kind {named - 1} of chunks, and the group has {kinds}")
    for batch in batches:
        require_keys(batch.keys)
        require_keys([parent for parent in batch.parents if parent])
    for chain in chains:
        require_keys(chain.keys)


def _parsed(document: str) -> dict[str, object] | None:
    """None for what is not a JSON object."""
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
