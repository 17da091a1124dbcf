"""What engines decided and what became of chunks, as far as it is remembered, for a person who asks why.

One owner, the event loop's thread; no clock (times are arguments, in ms of one monotonic clock). All of it is bounded,
the oldest goes first, and dies with the daemon. Nothing in the store depends on it.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.decisions import REFUSED_PREFIX_BYTES
from kvstore.rpc.v1 import admin_pb2, store_pb2

DECISIONS_KEPT = 4_096
KEYS_KEPT = 65_536  # stored, and refused, each
REASONS_MAX = 64  # an engine may send any text
TIERS_MAX = 8
EXPLAINED_MAX = 64  # decisions in one answer

LOAD, STORE = "load", "store"


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
    """A chunk that was committed."""

    group: str
    at_ms: int


@dataclass(slots=True)
class Explanations:
    _kept: OrderedDict[tuple[str, int], _Kept] = field(default_factory=OrderedDict)
    _refused: OrderedDict[tuple[bytes, bytes], Refused] = field(default_factory=OrderedDict)
    _stored: OrderedDict[tuple[bytes, bytes, bytes], Stored] = field(default_factory=OrderedDict)
    _counts: dict[tuple[str, str], _Count] = field(default_factory=dict)
    _balances: dict[str, _Balance] = field(default_factory=dict)

    def told(self, group: str, namespace: bytes, decisions: Sequence[store_pb2.Decision], now_ms: int) -> None:
        """A group's decisions, new ones or with what came of them."""
        for decision in decisions:
            before = self._kept.get((group, decision.number))
            if before is None:
                self._count(decision)
                self._refuse(namespace, decision, now_ms)
                self._kept[group, decision.number] = _Kept(group, namespace, decision, now_ms)
                if len(self._kept) > DECISIONS_KEPT:
                    self._kept.popitem(last=False)
            else:
                if decision.first_token_s and not before.decision.first_token_s:
                    self._balance(decision)
                before.decision = decision

    def _count(self, decision: store_pb2.Decision) -> None:
        kind = (STORE if decision.is_store else LOAD, decision.reason)
        if kind not in self._counts and len(self._counts) >= REASONS_MAX:
            return
        count = self._counts.setdefault(kind, _Count())
        count.decisions += 1
        count.refused_chunks += decision.refused_count

    def _refuse(self, namespace: bytes, decision: store_pb2.Decision, now_ms: int) -> None:
        refused = Refused(decision.request, decision.reason, now_ms)
        prefixes, each = decision.refused, REFUSED_PREFIX_BYTES
        for first in range(0, len(prefixes), each):
            self._refused[namespace, prefixes[first : first + each]] = refused
        while len(self._refused) > KEYS_KEPT:
            self._refused.popitem(last=False)

    def _balance(self, decision: store_pb2.Decision) -> None:
        predicted = [each.seconds for each in decision.alternatives]
        times = (decision.first_token_s, decision.load_s, decision.saved_s, *predicted)
        if not decision.load_s or not all(0 <= seconds < math.inf for seconds in times):
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

    def stored(self, group: str, namespace: bytes, tenant: bytes, key: bytes, now_ms: int) -> None:
        """A chunk became visible."""
        place = (namespace, tenant, key)
        self._stored.pop(place, None)
        self._stored[place] = Stored(group, now_ms)
        if len(self._stored) > KEYS_KEPT:
            self._stored.popitem(last=False)

    # -- asked --------------------------------------------------------------------------------------------------------

    def of_request(self, request: str, now_ms: int) -> list[admin_pb2.Explained]:
        """The newest decisions about requests whose id begins so, oldest first."""
        found = [kept for kept in self._kept.values() if kept.decision.request.startswith(request)]
        return [_explained(kept, now_ms) for kept in found[-EXPLAINED_MAX:]]

    def refusals(self, key: bytes) -> Iterator[tuple[bytes, Refused]]:
        """Namespace and refusal of keys that begin as this one does."""
        prefix = key[:REFUSED_PREFIX_BYTES]
        return ((namespace, refused) for (namespace, start), refused in self._refused.items() if start == prefix)

    def stores(self, key: bytes) -> Iterator[tuple[bytes, bytes, bytes, Stored]]:
        """Namespace, tenant and key of chunks that were stored, where the key begins so."""
        return (
            (namespace, tenant, full, stored)
            for (namespace, tenant, full), stored in self._stored.items()
            if full.startswith(key)
        )

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


def _explained(kept: _Kept, now_ms: int) -> admin_pb2.Explained:
    return admin_pb2.Explained(
        decision=kept.decision, group=kept.group, age_s=(now_ms - kept.at_ms) / 1000, namespace_id=kept.namespace
    )
