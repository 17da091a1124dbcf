"""What engines decided and what became of chunks, as far as it is remembered, for a person who asks why.

One owner, the event loop's thread; no clock (times are arguments, in ms of one monotonic clock). All of it is bounded,
the oldest goes first, and dies with the daemon. Nothing in the store depends on it.
"""

import bisect
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore._native import EVICTIONS_KEPT as EXACT_EVICTIONS_KEPT
from kvstore._native import NOBODY
from kvstore.decisions import REFUSED_PREFIX_BYTES
from kvstore.limits import DECISION_BYTES_MAX
from kvstore.rpc.v1 import admin_pb2, store_pb2
from kvstore.tiers.base import ChunkId, Scope, WriteOutcome

DECISIONS_KEPT = 4_096
KEYS_KEPT = 65_536  # stored, and refused, each
UNWRITTEN_KEPT = 4_096
EVICTIONS_KEPT = 4_096
EVICTIONS_LOOKED_AT_MAX = 64  # of keys that begin alike, or one that comes and goes, the newest
EVICTORS_KEPT = 4_096
REMOVALS_KEPT = 64
REASONS_MAX = 64  # an engine may send any text
TIERS_MAX = 8
SECONDS_MAX = 1e9  # of one decision; the sums of them stay finite
EXPLAINED_MAX = 64  # decisions, or fates, in one answer
EVENTS_MAX = 8  # in one fate, the newest
KEYS_LOOKED_AT_MAX = 1_024  # of events that concern keys which begin alike, the newest
EVICTIONS_TOLD = 256  # of those between two events, the newest
DECISIONS_PER_SLICE = 512
PLACES_PER_SLICE = 64

LOAD, STORE, DISK, COMMIT = "load", "store", "disk", "commit"
_FROM_DISK = 4
_CPU = "cpu"
_NEEDED = (  # by the native index's number of the cause
    "",
    " (slots of another size)",
    " (in the table, which was full)",
    " (within its tenant's quota)",
)
_HAD_GONE = "it had left memory before its turn"
_UNWRITTEN = {
    WriteOutcome.FULL: "the fs tier had no room for it, or too many writes waited",
    WriteOutcome.SICK: "the fs tier is sick",
    WriteOutcome.LATE: "the write took too long",
}
_STORED_LONG_AGO = "when it was stored is no longer known"
_BEGINS_SO = "a key that begins so: "


class EvictionLog(Protocol):
    """What the native index remembers of evictions, one by one."""

    @property
    def evictions_told(self) -> int: ...
    def make_room_for(self, evictor: int, now_ms: int) -> None: ...
    def evictions_of(
        self, key: bytes, *, namespace: bytes | None = None, tenant: bytes | None = None, limit: int
    ) -> list[tuple[int, int, int, int, bytes, tuple[bytes, bytes] | None]]: ...


@dataclass(slots=True, eq=False)
class _Kept:
    group: str
    namespace: bytes
    decision: store_pb2.Decision
    at_ms: int
    order: int  # among the events of keys
    sick: str  # the fs tier, when an engine decided about a load
    evictions: int  # that there had been
    names: tuple[str, str]  # the request's id, and what of it may be the caller's own
    committed: Counter[int] = field(default_factory=Counter)  # outcome -> chunks


@dataclass(slots=True)
class _Count:
    decisions: int = 0
    refused_chunks: int = 0


@dataclass(slots=True)
class _Balance:
    loads: int = 0
    predicted_s: float = 0.0
    realised_s: float = 0.0
    load_s: float = 0.0
    wait_s: float = 0.0
    saved_s: float = 0.0
    regret_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Event:
    """Something that happened to chunks at once: they were committed together, or not stored for one reason."""

    order: int  # among all events and decisions
    evictions: int  # that there had been
    at_ms: int
    namespace: bytes
    tenant: bytes  # b"": not known
    keys: Sequence[bytes]  # or how they begin
    by: str
    reason: str = ""  # why they were not stored; "": they were
    memory_only: bool = False

    def concerns(self, key: bytes) -> list[bytes]:
        """The keys, or beginnings of keys, that may be the one that begins so."""
        return [known for known in self.keys if known.startswith(key) or key.startswith(known)]


class _Log:
    """Events, oldest first, and by how the keys begin; as many as concern `keys_max` keys."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self.events: deque[_Event] = deque()
        self.by_start: dict[bytes, list[_Event]] = {}  # nearly all of one event: a deque would take seven times as much
        self._keys = 0

    def add(self, event: _Event) -> None:
        self.events.append(event)
        self._keys += len(event.keys)
        for start in _starts(event.keys):
            self.by_start.setdefault(start, []).append(event)
        while self._keys > self._keys_max:
            oldest = self.events.popleft()
            self._keys -= len(oldest.keys)
            for start in _starts(oldest.keys):
                alike = self.by_start[start]
                del alike[0]
                if not alike:
                    del self.by_start[start]

    def of(self, key: bytes) -> Iterator[tuple[_Event, list[bytes]]]:
        """What concerns keys that begin so, newest first, with those keys."""
        looked_at = 0
        for event in reversed(self.by_start.get(key[:REFUSED_PREFIX_BYTES], ())):
            if known := event.concerns(key):
                yield event, known
            looked_at += len(event.keys)
            if looked_at >= KEYS_LOOKED_AT_MAX:
                return


@dataclass(frozen=True, slots=True)
class _Evicted:
    number: int  # among all evictions
    at_ms: int
    from_disk: bool
    namespace: bytes
    told: str


@dataclass(frozen=True, slots=True)
class _Removal:
    """What an operator had removed, from when it began."""

    order: int  # among the events of keys
    evictions: int  # that there had been
    at_ms: int
    scope: Scope
    what: str
    from_memory: bool
    from_disk: bool
    came: Mapping[str, tuple[int, int]]  # by tier, chunks and bytes: whoever removes them fills it

    def told(self, now_ms: int) -> str:
        came = "; ".join(f"{chunks} chunks, {nbytes} bytes from {tier}" for tier, (chunks, nbytes) in self.came.items())
        return f"an operator removed {self.what}{f' ({came})' if came else ''} {_ago(self.at_ms, now_ms)}"


@dataclass(slots=True)
class _Evictions:
    """What room for one group cost others, in one second."""

    group: str
    first_ms: int
    last_ms: int
    chunks: int


@dataclass(slots=True)
class Explanations:
    """`log` None: which chunks were evicted is not known, only how many for whom."""

    log: EvictionLog | None = None
    _evictors: OrderedDict[tuple[str, bytes], int] = field(default_factory=OrderedDict)  # who, namespace -> number
    _evictor_names: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    _evictor_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(NOBODY + 1))
    _kept: OrderedDict[tuple[str, int], _Kept] = field(default_factory=OrderedDict)
    _stored: _Log = field(default_factory=lambda: _Log(KEYS_KEPT))
    _refused: _Log = field(default_factory=lambda: _Log(KEYS_KEPT))
    _unwritten: _Log = field(default_factory=lambda: _Log(UNWRITTEN_KEPT))
    _order: Iterator[int] = field(default_factory=itertools.count)
    _evictions: deque[_Evictions] = field(default_factory=lambda: deque(maxlen=EVICTIONS_KEPT))
    _removals: deque[_Removal] = field(default_factory=lambda: deque(maxlen=REMOVALS_KEPT))
    _counts: dict[tuple[str, str], _Count] = field(default_factory=dict)
    _balances: dict[str, _Balance] = field(default_factory=dict)

    def told(self, group: str, namespace: bytes, decision: store_pb2.Decision, now_ms: int, *, sick: str = "") -> None:
        """A group's decision: a new one, or with what came of it. One that is too large is not remembered. `sick`: why
        the fs tier is not read now."""
        if decision.ByteSize() > DECISION_BYTES_MAX:
            return
        before = self._kept.get((group, decision.number))
        if before is not None:
            if decision.first_token_s and not before.decision.first_token_s:
                self._balance(decision)
            before.decision = decision
            return
        kind = STORE if decision.is_store else LOAD
        self._count(kind, decision.reason, decision.refused_count if decision.is_store else 0)
        if decision.disk_reason:
            self._count(DISK, decision.disk_reason, decision.disk_refused_count)
        self._refuse(group, namespace, decision, now_ms)
        if not decision.request:  # a client's put: nobody can ask about it by name
            return
        order, request = next(self._order), decision.request
        names = (request, request.partition("-")[2])  # vLLM puts the endpoint's name before the caller's id
        kept = _Kept(group, namespace, decision, now_ms, order, sick, self._evictions_told(), names)
        self._kept[group, decision.number] = kept
        if len(self._kept) > DECISIONS_KEPT:
            self._kept.popitem(last=False)

    def _count(self, kind: str, reason: str, refused_chunks: int) -> None:
        if (kind, reason) not in self._counts and len(self._counts) >= REASONS_MAX:
            return
        count = self._counts.setdefault((kind, reason), _Count())
        count.decisions += 1
        count.refused_chunks += refused_chunks

    def _refuse(self, group: str, namespace: bytes, decision: store_pb2.Decision, now_ms: int) -> None:
        if not decision.is_store:
            return
        prefixes, each = decision.refused, REFUSED_PREFIX_BYTES
        keys = [prefixes[first : first + each] for first in range(0, len(prefixes), each)]
        by = f"request {decision.request}" if decision.request else group
        self._refused_now(by, namespace, b"", keys, decision.reason, now_ms)

    def _refused_now(
        self, by: str, namespace: bytes, tenant: bytes, keys: Sequence[bytes], reason: str, now_ms: int
    ) -> None:
        if keys:
            event = _Event(next(self._order), self._evictions_told(), now_ms, namespace, tenant, keys, by, reason)
            self._refused.add(event)

    def committed(self, group: str, decision: int, outcomes: Iterable[int]) -> None:
        """What came of chunks that a group wrote because it had decided so (0: it says nothing of that)."""
        kept = self._kept.get((group, decision))
        if kept is not None:
            kept.committed.update(outcomes)

    def rejected(
        self, group: str, namespace: bytes, tenant: bytes, keys: Sequence[bytes], outcome: int, now_ms: int
    ) -> None:
        """Chunks that a group wrote were not kept."""
        reason = _outcome_name(outcome)
        self._count(COMMIT, reason, len(keys))
        self._refused_now(group, namespace, tenant, keys, reason, now_ms)

    def _balance(self, decision: store_pb2.Decision) -> None:
        predicted = [each.seconds for each in decision.alternatives]
        times = (decision.first_token_s, decision.load_s, decision.wait_s, decision.saved_s, *predicted)
        if not decision.load_s or not all(0 <= seconds < SECONDS_MAX for seconds in times):
            return
        if decision.tier not in self._balances and len(self._balances) >= TIERS_MAX:
            return
        balance = self._balances.setdefault(decision.tier, _Balance())
        chosen = [each for each in decision.alternatives if each.tier == decision.tier]
        balance.loads += 1
        balance.predicted_s += chosen[0].seconds if chosen else 0.0
        balance.realised_s += decision.first_token_s
        balance.load_s += decision.load_s
        balance.wait_s += decision.wait_s
        balance.saved_s += decision.saved_s
        balance.regret_s += max(0.0, decision.load_s - decision.saved_s)

    def stored(
        self,
        group: str,
        namespace: bytes,
        tenant: bytes,
        keys: Sequence[bytes],
        now_ms: int,
        *,
        memory_only: bool = False,
    ) -> None:
        """Chunks became visible. `memory_only`: their engine did not think them worth a write to disk."""
        if not keys:
            return
        order, evictions = next(self._order), self._evictions_told()
        self._stored.add(_Event(order, evictions, now_ms, namespace, tenant, keys, group, memory_only=memory_only))

    def _evictions_told(self) -> int:
        return 0 if self.log is None else self.log.evictions_told

    def make_room_for(self, who: str, namespace: bytes, now_ms: int) -> None:
        """What is evicted from memory from now on makes room for that."""
        if self.log is None:
            return
        evictor = self._evictors.get((who, namespace))
        if evictor is None:
            evictor = self._evictors[who, namespace] = next(self._evictor_numbers)
            self._evictor_names[evictor] = who, namespace
            if len(self._evictors) > EVICTORS_KEPT:
                _, forgotten = self._evictors.popitem(last=False)
                del self._evictor_names[forgotten]
        else:
            self._evictors.move_to_end((who, namespace))
        self.log.make_room_for(evictor, now_ms)

    def evicted(self, group: str, chunks: int, now_ms: int) -> None:
        """Chunks went from memory to make room for a group: how many, for the time whose evictions the log no longer
        remembers one by one."""
        last = self._evictions[-1] if self._evictions else None
        if not chunks:
            return
        if last is not None and last.group == group and now_ms - last.first_ms < 1000:
            last.chunks += chunks
            last.last_ms = now_ms
        else:
            self._evictions.append(_Evictions(group, now_ms, now_ms, chunks))

    def removed(
        self,
        scope: Scope,
        what: str,
        now_ms: int,
        *,
        from_memory: bool = True,
        from_disk: bool = False,
        came: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """An operator has `what` of the scope removed, from now on. `came`: chunks and bytes by tier, once they are
        removed."""
        order, evictions = next(self._order), self._evictions_told()
        self._removals.append(
            _Removal(order, evictions, now_ms, scope, what, from_memory, from_disk, {} if came is None else came)
        )

    def unwritten(self, chunk: ChunkId, outcome: WriteOutcome | None, now_ms: int) -> None:
        """A chunk should have been written to disk and was not. None: it had left memory before its turn."""
        reason = _HAD_GONE if outcome is None else _UNWRITTEN.get(outcome, "")
        if reason:
            order, evictions = next(self._order), self._evictions_told()
            self._unwritten.add(
                _Event(order, evictions, now_ms, chunk.namespace, chunk.tenant, [chunk.key], "", reason)
            )

    # -- asked: every `next` is one slice of work, see kvstore/operations.py ------------------------------------------

    def of_request(self, request: str, now_ms: int) -> Iterator[admin_pb2.Explained | None]:
        """The newest decisions about requests whose id begins so, or goes on so after its first "-"; oldest first.
        None: go on."""
        found: deque[_Kept] = deque(maxlen=EXPLAINED_MAX)
        for number, kept in enumerate(list(self._kept.values()), 1):
            if kept.names[0].startswith(request) or kept.names[1].startswith(request):
                found.append(kept)
            if number % DECISIONS_PER_SLICE == 0:
                yield None
        for kept in found:
            yield self._explained(kept, now_ms)

    def _explained(self, kept: _Kept, now_ms: int) -> admin_pb2.Explained:
        committed = [
            admin_pb2.Committed(outcome=_outcome_name(outcome), chunks=chunks)
            for outcome, chunks in sorted(kept.committed.items())
        ]
        return admin_pb2.Explained(
            decision=kept.decision,
            group=kept.group,
            age_s=(now_ms - kept.at_ms) / 1000,
            namespace_id=kept.namespace,
            committed=committed,
            missing=self._missing(kept, now_ms),
        )

    def _missing(self, kept: _Kept, now_ms: int) -> list[str]:
        """Why the first chunk that a load missed was not there: what had happened until then."""
        key = kept.decision.refused
        if kept.decision.is_store or not key:
            return []
        own: list[tuple[_Event, bytes]] = []
        others: dict[bytes, None] = {}
        for log in (self._stored, self._refused):
            for event, known in log.of(key):
                if event.order > kept.order:
                    continue
                if event.namespace == kept.namespace:
                    own.append((event, known[0]))
                    break
                if not event.reason:
                    others[event.namespace] = None
        sick = [f"the fs tier was not read then: {kept.sick}"] if kept.sick else []
        if own:
            last, full = max(own, key=lambda found: found[0].order)
            evicted = [] if last.reason else self._evicted(full, now_ms, last.namespace, last.tenant)
            gone = [] if last.reason else [self._causes(last, full, evicted, kept, now_ms)]
            return [*_told(last, now_ms), *self._unwritten_told(last, full, kept, now_ms), *gone, *sick]
        evicted = [eviction for eviction in self._evicted(key, now_ms) if eviction.number <= kept.evictions]
        if went := [f"{_BEGINS_SO}{each.told}" for each in evicted if each.namespace == kept.namespace]:
            return [*went[-EVENTS_MAX:], _STORED_LONG_AGO, *sick]
        if others:
            return [f"stored before only in namespace {', '.join(space.hex() for space in others)}", *sick]
        return ["not known to have been stored, or decided about, before", *sick]

    def of_key(
        self,
        key: bytes,
        places: Iterable[tuple[bytes, bytes]],
        where: Callable[[bytes, bytes, bytes], str],
        now_ms: int,
    ) -> Iterator[admin_pb2.KeyFate | None]:
        """What is known of keys that begin so, what was stored last first. `places`: namespaces and tenants in which a
        whole key is looked for; `where(namespace, tenant, key)`: the tier that holds it now, or "". None: go on.

        No slice is longer than a look at EXACT_EVICTIONS_KEPT evictions."""
        histories: dict[tuple[bytes, bytes, bytes], list[_Event]] = {}
        for log in (self._stored, self._refused):
            for event, known in log.of(key):
                for full in known:
                    histories.setdefault((event.namespace, event.tenant, full), []).append(event)
        told = list(histories.items())[:EXPLAINED_MAX]
        for (namespace, tenant, full), history in told:
            tier = where(namespace, tenant, full) if tenant else ""
            events = self._history(history, full, tier, now_ms)
            yield admin_pb2.KeyFate(namespace_id=namespace, tenant_id=tenant, events=events)
        count = len(told)
        known_namespaces = {namespace for (namespace, _, _), _ in told}
        for number, (namespace, tenant) in enumerate(places, 1):
            if count >= EXPLAINED_MAX:
                return
            if (namespace, tenant, key) not in histories and (tier := where(namespace, tenant, key)):
                count += 1
                known_namespaces.add(namespace)
                went = [eviction.told for eviction in self._evicted(key, now_ms, namespace, tenant)]
                events = [*went[-EVENTS_MAX:], f"in the {tier} tier now; when it was stored is no longer known"]
                yield admin_pb2.KeyFate(namespace_id=namespace, tenant_id=tenant, events=events)
            elif number % PLACES_PER_SLICE == 0:
                yield None
        gone: dict[bytes, list[str]] = {}  # stored so long ago that only this is remembered
        begins_so = "" if len(key) > REFUSED_PREFIX_BYTES else _BEGINS_SO
        for eviction in self._evicted(key, now_ms):
            if eviction.namespace not in known_namespaces:
                gone.setdefault(eviction.namespace, []).append(begins_so + eviction.told)
        for namespace, went in list(gone.items())[: EXPLAINED_MAX - count]:
            yield admin_pb2.KeyFate(namespace_id=namespace, events=[*went[-EVENTS_MAX:], _STORED_LONG_AGO])

    def _evicted(
        self, key: bytes, now_ms: int, namespace: bytes | None = None, tenant: bytes | None = None
    ) -> list[_Evicted]:
        """The newest evictions of a key in its namespace and tenant, or in any, oldest first; of 8 bytes, of all keys
        that begin so."""
        if self.log is None or tenant == b"":  # of what was refused the tenant is not known
            return []
        rows = self.log.evictions_of(key, namespace=namespace, tenant=tenant, limit=EVICTIONS_LOOKED_AT_MAX)
        return [
            _Evicted(
                number,
                at_ms,
                cause == _FROM_DISK,
                its_namespace,
                self._eviction(at_ms, cause, evictor, newcomer, now_ms),
            )
            for number, at_ms, cause, evictor, its_namespace, newcomer in reversed(rows)
        ]

    def _eviction(self, at_ms: int, cause: int, evictor: int, newcomer: tuple[bytes, bytes] | None, now_ms: int) -> str:
        if cause == _FROM_DISK:
            return f"evicted from disk {_ago(at_ms, now_ms)}"
        who, namespace = self._evictor_names.get(evictor, ("a process that is no longer remembered", b""))
        if evictor == NOBODY:
            who = "chunks that were read from disk"
        if namespace:
            who += f", namespace {namespace.hex()}"
        if newcomer is not None:
            who += f"; the key {newcomer[1].hex()} has its slot"
        return f"evicted from memory {_ago(at_ms, now_ms)}, to make room for {who}{_NEEDED[cause]}"

    def _history(self, history: list[_Event], key: bytes, tier: str, now_ms: int) -> list[str]:
        """Of one chunk, which is in that tier now ("": in none)."""
        newest = sorted(history, key=lambda event: event.order)[-EVENTS_MAX:]
        # Once for all events: it looks at all that are remembered.
        evicted = self._evicted(key, now_ms, history[0].namespace, history[0].tenant)
        told: list[str] = []
        for event, later in itertools.zip_longest(newest, newest[1:]):
            told += [*_told(event, now_ms), *self._unwritten_told(event, key, later, now_ms)]
            if later is None and tier:
                told += [each.told for each in _went(event, evicted, self._evictions_told())]
                told += [*self._left_tier(event, key, evicted, tier, now_ms), f"in the {tier} tier now"]
            elif event.reason:
                continue
            elif later is None:
                told.append(f"in no tier now: {self._causes(event, key, evicted, None, now_ms)}")
            else:
                causes = self._causes(event, key, evicted, later, now_ms)
                told.append(f"not in memory {_ago(later.at_ms, now_ms)}: {causes}")
        return told

    def _left_tier(self, stored: _Event, key: bytes, evicted: Sequence[_Evicted], tier: str, now_ms: int) -> list[str]:
        """Which tier an operator may have removed the chunk from while another one kept it: `tier`, as `of_key` has it,
        names those that do."""
        if stored.reason or stored.memory_only or tier.startswith(f"{_CPU} "):  # both hold it
            return []
        removals = self._removals_of(stored, key, _went(stored, evicted, self._evictions_told()), None)
        in_memory = tier == _CPU
        causes = [each.told(now_ms) for each in removals if (each.from_disk if in_memory else each.from_memory)]
        return [f"not {'on disk' if in_memory else 'in memory'} now: {'; '.join(causes)}"] if causes else []

    def _causes(
        self, stored: _Event, key: bytes, evicted: Sequence[_Evicted], until: _Event | _Kept | None, now_ms: int
    ) -> str:
        """Why the chunk went, or may have gone, until that happened (None: until now). `evicted`: all that is known of
        its evictions."""
        went = _went(stored, evicted, self._evictions_told() if until is None else until.evictions)
        causes = [each.told for each in went]
        until_ms = now_ms if until is None else until.at_ms
        is_remembered = self.log is not None and self.log.evictions_told - EXACT_EVICTIONS_KEPT <= stored.evictions
        if not causes and not is_remembered:
            causes = self._who_needed_room(stored, until_ms, now_ms)
        causes += [removal.told(now_ms) for removal in self._removals_of(stored, key, went, until)]
        return "; ".join(causes) or "nothing is known to have been evicted or removed since it was stored"

    def _removals_of(
        self, stored: _Event, key: bytes, went: Sequence[_Evicted], until: _Event | _Kept | None
    ) -> Iterator[_Removal]:
        """Those that began while the chunk was where they removed chunks, or may have been."""
        chunk = ChunkId(stored.namespace, stored.tenant, key)
        from_memory = [each.number for each in went if not each.from_disk]
        from_disk = [each.number for each in went if each.from_disk]
        unwritten = self._unwritten_of(stored, key, until)
        never_on_disk = unwritten is not None and unwritten.reason == _HAD_GONE
        until_order = min(
            [each.order for each in (until, unwritten if never_on_disk else None) if each is not None], default=None
        )
        for removal in self._removals:
            if not stored.order < removal.order or (until_order is not None and until_order < removal.order):
                continue
            if not removal.scope.covers(chunk):
                continue
            # Out of memory it can only have been on disk, or have been read from there before it went from there too.
            # Out of the disk it can have been written there again from memory.
            had_left_memory = bool(from_memory) and from_memory[-1] <= removal.evictions
            had_left_disk = bool(from_disk) and from_disk[-1] <= removal.evictions
            may_be_in_memory = not had_left_memory or (bool(from_disk) and not had_left_disk)
            may_be_on_disk = not never_on_disk and not (had_left_memory and had_left_disk)
            if (removal.from_memory and may_be_in_memory) or (removal.from_disk and may_be_on_disk):
                yield removal

    def _unwritten_of(self, stored: _Event, key: bytes, until: _Event | _Kept | None) -> _Event | None:
        """The last time until then that the stored chunk was not written to disk, though it should have been."""
        for event, known in self._unwritten.of(key):
            if event.order < stored.order:
                return None
            is_it = key in known and (event.namespace, event.tenant) == (stored.namespace, stored.tenant)
            if is_it and (until is None or event.order < until.order):
                return event
        return None

    def _unwritten_told(self, stored: _Event, key: bytes, until: _Event | _Kept | None, now_ms: int) -> list[str]:
        event = None if stored.reason else self._unwritten_of(stored, key, until)
        return [] if event is None else [f"not written to disk {_ago(event.at_ms, now_ms)}: {event.reason}"]

    def _who_needed_room(self, stored: _Event, until_ms: int, now_ms: int) -> list[str]:
        """Where the evictions themselves are no longer remembered."""
        begin = bisect.bisect_left(self._evictions, stored.at_ms, key=lambda eviction: eviction.last_ms)
        end = bisect.bisect_right(self._evictions, until_ms, key=lambda eviction: eviction.first_ms)
        by_group: Counter[str] = Counter()
        evictions = [self._evictions[i] for i in range(max(begin, end - EVICTIONS_TOLD), end)]
        for eviction in evictions:
            by_group[eviction.group] += eviction.chunks
        causes = [f"{chunks} chunks were evicted to make room for {group}" for group, chunks in by_group.items()]
        if causes:
            causes[0] = f"since it was stored {causes[0]}"
            first, last = _ago(evictions[0].first_ms, now_ms), _ago(evictions[-1].last_ms, now_ms)
            causes[-1] += f", the first {first} and the last {last}"
        return causes

    def counts(self) -> list[admin_pb2.AdmissionCount]:
        return [
            admin_pb2.AdmissionCount(
                kind=kind, reason=reason, decisions=count.decisions, refused_chunks=count.refused_chunks
            )
            for (kind, reason), count in sorted(self._counts.items())
        ]

    def balances(self) -> list[admin_pb2.TierBalance]:
        return [
            admin_pb2.TierBalance(
                tier=tier,
                loads=balance.loads,
                predicted_s=balance.predicted_s,
                realised_s=balance.realised_s,
                load_s=balance.load_s,
                wait_s=balance.wait_s,
                saved_s=balance.saved_s,
                regret_s=balance.regret_s,
            )
            for tier, balance in sorted(self._balances.items())
        ]


def _went(stored: _Event, evicted: Sequence[_Evicted], until: int) -> list[_Evicted]:
    """The newest evictions between being stored and the eviction of that number, oldest first."""
    return [each for each in evicted if stored.evictions < each.number <= until][-EVENTS_MAX:]


def _ago(at_ms: int, now_ms: int) -> str:
    return f"{max(0, now_ms - at_ms) / 1000:.1f} s ago"


def _told(event: _Event, now_ms: int) -> list[str]:
    when = _ago(event.at_ms, now_ms)
    if event.reason:
        return [f"not stored {when}, for {event.by}: {event.reason}"]
    only = ["not written to disk then: that would have cost more than it was likely to save"]
    return [f"stored {when} by {event.by}", *(only if event.memory_only else [])]


def _outcome_name(outcome: int) -> str:
    """Of a commit: STORED, PRESENT, or why it was refused."""
    name: str = store_pb2.Outcome.Name(store_pb2.Outcome.ValueType(outcome))
    return name.removeprefix("OUTCOME_").removeprefix("REJECTED_")


def _starts(keys: Iterable[bytes]) -> set[bytes]:
    return {key[:REFUSED_PREFIX_BYTES] for key in keys}
