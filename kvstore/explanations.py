"""What engines decided and what became of chunks, as far as it is remembered, for a person who asks why.

One owner, the event loop's thread; no clock (times are arguments, in ms of one monotonic clock). All of it is bounded,
the oldest goes first, and dies with the daemon. Nothing in the store depends on it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.decisions import REFUSED_PREFIX_BYTES
from kvstore.limits import DECISION_BYTES_MAX
from kvstore.rpc.v1 import admin_pb2, store_pb2

DECISIONS_KEPT = 4_096
KEYS_KEPT = 65_536  # stored, and refused, each
EVICTIONS_KEPT = 4_096
REMOVALS_KEPT = 64
REASONS_MAX = 64  # an engine may send any text
TIERS_MAX = 8
SECONDS_MAX = 1e9  # of one decision; the sums of them stay finite
EXPLAINED_MAX = 64  # decisions, or fates, in one answer

LOAD, STORE, DISK = "load", "store", "disk"


@dataclass(slots=True, eq=False)
class _Kept:
    group: str
    namespace: bytes
    decision: store_pb2.Decision
    at_ms: int


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
    saved_s: float = 0.0
    regret_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A chunk that an engine did not store."""

    request: str
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Chunks that were committed together."""

    group: str
    namespace: bytes
    tenant: bytes
    keys: Sequence[bytes]
    at_ms: int
    memory_only: bool


@dataclass(slots=True)
class _Evictions:
    """What room for one group cost others, in one second."""

    group: str
    at_ms: int
    chunks: int


@dataclass(slots=True)
class Explanations:
    _kept: OrderedDict[tuple[str, int], _Kept] = field(default_factory=OrderedDict)
    # By how keys begin: what namespaces refused, and what was stored, oldest first.
    _refused: OrderedDict[bytes, dict[bytes, Refused]] = field(default_factory=OrderedDict)
    _stored_with: dict[bytes, deque[Stored]] = field(default_factory=dict)
    _stored: deque[Stored] = field(default_factory=deque)  # the same as it came
    _keys_stored: int = 0  # in there
    _evictions: deque[_Evictions] = field(default_factory=lambda: deque(maxlen=EVICTIONS_KEPT))
    _removals: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=REMOVALS_KEPT))
    _counts: dict[tuple[str, str], _Count] = field(default_factory=dict)
    _balances: dict[str, _Balance] = field(default_factory=dict)

    def told(self, group: str, namespace: bytes, decision: store_pb2.Decision, now_ms: int) -> None:
        """A group's decision: a new one, or with what came of it. One that is too large is not remembered."""
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
        self._refuse(namespace, decision, now_ms)
        self._kept[group, decision.number] = _Kept(group, namespace, decision, now_ms)
        if len(self._kept) > DECISIONS_KEPT:
            self._kept.popitem(last=False)

    def _count(self, kind: str, reason: str, refused_chunks: int) -> None:
        if (kind, reason) not in self._counts and len(self._counts) >= REASONS_MAX:
            return
        count = self._counts.setdefault((kind, reason), _Count())
        count.decisions += 1
        count.refused_chunks += refused_chunks

    def _refuse(self, namespace: bytes, decision: store_pb2.Decision, now_ms: int) -> None:
        if not decision.is_store:
            return
        refused = Refused(decision.request, decision.reason, now_ms)
        prefixes, each = decision.refused, REFUSED_PREFIX_BYTES
        for first in range(0, len(prefixes), each):
            self._refused.setdefault(prefixes[first : first + each], {})[namespace] = refused
        while len(self._refused) > KEYS_KEPT:
            self._refused.popitem(last=False)

    def _balance(self, decision: store_pb2.Decision) -> None:
        predicted = [each.seconds for each in decision.alternatives]
        times = (decision.first_token_s, decision.load_s, decision.saved_s, *predicted)
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
        stored = Stored(group, namespace, tenant, keys, now_ms, memory_only)
        self._stored.append(stored)
        self._keys_stored += len(keys)
        for start in _starts(keys):
            self._stored_with.setdefault(start, deque()).append(stored)
        while self._keys_stored > KEYS_KEPT:
            oldest = self._stored.popleft()
            self._keys_stored -= len(oldest.keys)
            for start in _starts(oldest.keys):
                alike = self._stored_with[start]
                alike.popleft()
                if not alike:
                    del self._stored_with[start]

    def evicted(self, group: str, chunks: int, now_ms: int) -> None:
        """Chunks went from memory to make room for a group."""
        last = self._evictions[-1] if self._evictions else None
        if last is not None and last.group == group and now_ms - last.at_ms < 1000:
            last.chunks += chunks
        elif chunks:
            self._evictions.append(_Evictions(group, now_ms, chunks))

    def removed(self, what: str, now_ms: int) -> None:
        """An operator removed something (`what`: from which tier)."""
        self._removals.append((now_ms, what))

    # -- asked --------------------------------------------------------------------------------------------------------

    def of_request(self, request: str, now_ms: int) -> list[admin_pb2.Explained]:
        """The newest decisions about requests whose id begins so, oldest first."""
        found = [kept for kept in self._kept.values() if kept.decision.request.startswith(request)]
        return [_explained(kept, now_ms) for kept in found[-EXPLAINED_MAX:]]

    def of_key(
        self,
        key: bytes,
        places: Iterable[tuple[bytes, bytes]],
        where: Callable[[bytes, bytes, bytes], str],
        now_ms: int,
    ) -> list[admin_pb2.KeyFate]:
        """What is known of keys that begin so, what was stored last first. `places`: namespaces and tenants in which a
        whole key is looked for; `where(namespace, tenant, key)`: the tier that holds it now, or ""."""
        fates: list[admin_pb2.KeyFate] = []
        start = key[:REFUSED_PREFIX_BYTES]
        known: set[tuple[bytes, bytes, bytes]] = set()
        for stored in reversed(self._stored_with.get(start, ())):  # the newest of each tells
            for full in stored.keys:
                chunk = (stored.namespace, stored.tenant, full)
                if not full.startswith(key) or chunk in known:
                    continue
                known.add(chunk)
                events = [f"stored {_ago(stored.at_ms, now_ms)} by {stored.group}"]
                if stored.memory_only:
                    events.append("not written to disk then: that would have cost more than it was likely to save")
                tier = where(*chunk)
                events.append(f"in the {tier} tier now" if tier else self._gone(stored.at_ms, now_ms))
                fates.append(admin_pb2.KeyFate(namespace_id=chunk[0], tenant_id=chunk[1], events=events))
            if len(fates) >= EXPLAINED_MAX:
                break
        for namespace, refused in self._refused.get(start, {}).items():
            text = f"not stored {_ago(refused.at_ms, now_ms)}, for request {refused.request}: {refused.reason}"
            fates.append(admin_pb2.KeyFate(namespace_id=namespace, events=[text]))
        for namespace, tenant in places:
            if (namespace, tenant, key) not in known and (tier := where(namespace, tenant, key)):
                events = [f"in the {tier} tier now; when it was stored is no longer known"]
                fates.append(admin_pb2.KeyFate(namespace_id=namespace, tenant_id=tenant, events=events))
        return fates[:EXPLAINED_MAX]

    def _gone(self, since_ms: int, now_ms: int) -> str:
        """Which chunk made room for which is not recorded; who needed room, and when, is."""
        by_group: dict[str, int] = {}
        first_ms = last_ms = 0
        for eviction in self._evictions:
            if eviction.at_ms >= since_ms:
                by_group[eviction.group] = by_group.get(eviction.group, 0) + eviction.chunks
                first_ms, last_ms = first_ms or eviction.at_ms, eviction.at_ms
        causes = [f"{chunks} chunks were evicted to make room for {group}" for group, chunks in by_group.items()]
        if causes:
            causes[-1] += f", the first {_ago(first_ms, now_ms)} and the last {_ago(last_ms, now_ms)}"
        removals = [(at_ms, what) for at_ms, what in self._removals if at_ms >= since_ms]
        causes += [f"an operator removed {what} {_ago(at_ms, now_ms)}" for at_ms, what in removals]
        return "in no tier now; since it was stored " + ("; ".join(causes) or "nothing is known to have been evicted")

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
                saved_s=balance.saved_s,
                regret_s=balance.regret_s,
            )
            for tier, balance in sorted(self._balances.items())
        ]


def _ago(at_ms: int, now_ms: int) -> str:
    return f"{max(0, now_ms - at_ms) / 1000:.1f} s ago"


def _explained(kept: _Kept, now_ms: int) -> admin_pb2.Explained:
    return admin_pb2.Explained(
        decision=kept.decision, group=kept.group, age_s=(now_ms - kept.at_ms) / 1000, namespace_id=kept.namespace
    )


def _starts(keys: Iterable[bytes]) -> set[bytes]:
    return {key[:REFUSED_PREFIX_BYTES] for key in keys}
