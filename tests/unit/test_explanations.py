"""What is remembered of decisions and chunks for a person who asks, and that all of it is bounded."""

import math

import pytest

from kvstore import explanations
from kvstore.costmodel import Alternative
from kvstore.decisions import Decision
from kvstore.explanations import EXPLAINED_MAX, Explanations
from kvstore.rpc.v1 import store_pb2
from kvstore.tiers.base import ChunkId, Scope, WriteOutcome

NAMESPACE, TENANT = b"n" * 16, b"t" * 16
KEY = b"k" * 32


def load(number: int = 1, **changes: object) -> Decision:
    return Decision(
        **{
            "number": number,
            "request": f"request-{number}-suffix",
            "is_store": False,
            "reason": "LOAD_IS_QUICKER",
            "prompt_tokens": 1000,
            "tier": "cpu",
            "alternatives": (Alternative("cpu", 512, 0.25, 0.5),),
            **changes,
        }
    )


def store(number: int, keys: list[bytes], reason: str = "ADMISSION") -> Decision:
    return Decision(number, f"request-{number}", True, reason, 1000, refused=keys)


def tell(known: Explanations, *decisions: Decision, group: str = "engine", now_ms: int = 0) -> None:
    for decision in decisions:
        known.told(group, NAMESPACE, decision.message(), now_ms)


def nowhere(*_: bytes) -> str:
    return ""


def test_a_request_is_found_by_how_its_id_begins_with_what_came_of_it() -> None:
    known = Explanations()
    decision = load()
    tell(known, decision, load(2))
    decision.outcome, decision.load_s, decision.saved_s, decision.first_token_s = "loaded", 0.1, 0.4, 0.3
    tell(known, decision, now_ms=500)
    [explained] = known.of_request("request-1", now_ms=2000)
    assert (explained.decision.outcome, explained.age_s, explained.group) == ("loaded", 2.0, "engine")
    assert explained.decision.alternatives[0].seconds == 0.25
    assert len(list(known.of_request("request-", 2000))) == 2
    assert list(known.of_request("else", 2000)) == []


def test_what_was_kept_from_the_disk_is_counted_by_itself_and_its_key_says_so() -> None:
    known = Explanations()
    decision = Decision(
        1, "request-1", True, "WORTH_IT", 1000, disk_reason="ADMISSION", disk_end_tokens=256, disk_refused_count=3
    )
    tell(known, decision, decision)
    counts = {(count.kind, count.reason): (count.decisions, count.refused_chunks) for count in known.counts()}
    assert counts == {("store", "WORTH_IT"): (1, 0), ("disk", "ADMISSION"): (1, 3)}
    known.stored("engine", NAMESPACE, TENANT, [KEY], 0, memory_only=True)
    [fate] = known.of_key(KEY, [], lambda *_: "cpu", 0)
    assert "not written to disk" in fate.events[1]
    assert fate.events[2] == "in the cpu tier now"


def test_what_came_of_a_store_is_told_apart_from_the_decision() -> None:
    known = Explanations()
    tell(known, store(3, []))
    stored, present, quota = (
        store_pb2.OUTCOME_STORED, store_pb2.OUTCOME_PRESENT, store_pb2.OUTCOME_REJECTED_QUOTA,
    )  # fmt: skip
    known.committed("engine", 3, [stored, quota, present])
    known.committed("engine", 3, [quota])
    known.committed("other", 3, [stored])
    known.committed("engine", 4, [stored])
    [explained] = known.of_request("request-3", 0)
    came = {each.outcome: each.chunks for each in explained.committed}
    assert came == {"STORED": 1, "PRESENT": 1, "QUOTA": 2}


def test_a_rejected_chunk_says_why_and_is_counted() -> None:
    known = Explanations()
    known.rejected("client-1", NAMESPACE, TENANT, [KEY], store_pb2.OUTCOME_REJECTED_QUOTA, 1000)
    [fate] = known.of_key(KEY, [], nowhere, 3000)
    assert (fate.tenant_id, list(fate.events)) == (TENANT, ["not stored 2.0 s ago, for client-1: QUOTA"])
    [count] = known.counts()
    assert (count.kind, count.reason, count.decisions, count.refused_chunks) == ("commit", "QUOTA", 1, 1)


def test_a_put_that_got_no_slot_is_counted_its_keys_say_why_and_it_pushes_no_request_out() -> None:
    known = Explanations()
    tell(known, Decision(1, "", True, "TIER_FULL", 0, refused=[KEY]), group="client-2")
    [fate] = known.of_key(KEY, [], nowhere, 0)
    assert list(fate.events) == ["not stored 0.0 s ago, for client-2: TIER_FULL"]
    assert known.counts()[0].reason == "TIER_FULL"
    assert list(known.of_request("", 0)) == []


Row = tuple[int, int, int, int, bytes, tuple[bytes, bytes] | None]


class Evictions:
    """What an index would say: `rows` as of `Index.evictions_of`, oldest first, all of KEY."""

    def __init__(self) -> None:
        self.evictions_told = 0
        self.evictor = 0
        self.rows: list[Row] = []

    def make_room_for(self, evictor: int, now_ms: int) -> None:  # noqa: ARG002
        self.evictor = evictor

    def evict(self, at_ms: int, cause: int = 0, newcomer: bytes | None = None) -> None:
        self.evictions_told += 1
        evictor = 0 if cause == FROM_DISK else self.evictor
        by = None if newcomer is None else (NAMESPACE, newcomer)
        self.rows.append((self.evictions_told, at_ms, cause, evictor, NAMESPACE, by))

    def evictions_of(
        self,
        key: bytes,
        *,
        namespace: bytes | None = None,  # noqa: ARG002
        tenant: bytes | None = None,  # noqa: ARG002
        limit: int,
    ) -> list[Row]:
        assert KEY.startswith(key)
        return self.rows[::-1][:limit]


FROM_DISK = 4


def test_of_an_evicted_chunk_it_is_known_who_needed_its_slot_and_for_which_key() -> None:
    log = Evictions()
    known = Explanations(log)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.make_room_for("greedy", b"m" * 16, 1500)
    log.evict(1500, newcomer=b"w" * 32)
    log.evict(2500, FROM_DISK)
    miss(known, 3000)
    log.evict(3000)  # what came after it was missed is not why
    stored, gone = missing(known, 4000)
    assert stored == "stored 3.0 s ago by engine"
    assert gone == (
        f"evicted from memory 2.5 s ago, to make room for greedy, namespace {(b'm' * 16).hex()}; the key "
        f"{(b'w' * 32).hex()} has its slot; evicted from disk 1.5 s ago"
    )
    [fate] = known.of_key(KEY, [], nowhere, 4000)
    assert fate.events[1].startswith("in no tier now: evicted from memory 2.5 s ago")


def test_what_was_removed_after_a_chunk_had_gone_from_both_tiers_is_not_why() -> None:
    log = Evictions()
    known = Explanations(log)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.removed(Scope(), "chunks from fs", 1500, from_memory=False, from_disk=True)
    log.evict(2000)
    known.removed(Scope(), "chunks from cpu", 2500)
    known.removed(Scope(), "some chunks from every tier", 2600, from_disk=True)
    [fate] = known.of_key(KEY, [], nowhere, 5000)  # it may have been on disk then, but that removal left it there
    assert "chunks from cpu" not in fate.events[-1]
    assert "some chunks from every tier" in fate.events[-1]
    log.evict(3000, FROM_DISK)
    known.removed(Scope(), "all chunks from every tier", 4000, from_disk=True)
    [fate] = known.of_key(KEY, [], nowhere, 5000)
    assert "chunks from fs" in fate.events[-1]
    assert "chunks from cpu" in fate.events[-1]  # it may have been read from disk before it went from there
    assert "all chunks from every tier" not in fate.events[-1]


def test_of_a_chunk_whose_write_was_dropped_that_is_told_and_no_later_removal() -> None:
    log, chunk = Evictions(), ChunkId(NAMESPACE, TENANT, KEY)
    known = Explanations(log)
    known.unwritten(chunk, WriteOutcome.SICK, 500)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.unwritten(ChunkId(NAMESPACE, b"u" * 16, KEY), WriteOutcome.SICK, 1000)
    known.unwritten(chunk, WriteOutcome.ABORTED, 1000)
    known.removed(Scope(), "chunks from fs", 1500, from_memory=False, from_disk=True)  # it never was there
    log.evict(2000)
    known.unwritten(chunk, None, 3000)
    known.removed(Scope(), "chunks from every tier", 4000, from_disk=True)
    told = [
        "stored 4.0 s ago by engine",
        "not written to disk 2.0 s ago: it had left memory before its turn",
        "in no tier now: evicted from memory 3.0 s ago, to make room for chunks that were read from disk",
    ]
    [fate] = known.of_key(KEY, [], nowhere, 5000)
    assert list(fate.events) == told
    miss(known, 5000)
    assert missing(known, 5000) == [*told[:2], told[2].removeprefix("in no tier now: ")]
    known.stored("engine", NAMESPACE, TENANT, [KEY], 6000)
    known.unwritten(chunk, WriteOutcome.FULL, 6000)
    [fate] = known.of_key(KEY, [], lambda *_: "cpu", 6000)
    assert [event.partition(" ")[0] for event in fate.events] == ["stored", "not", "not", "stored", "not", "in"]
    assert "no room" in fate.events[4]
    known.removed(Scope(), "chunks from cpu", 7000)
    [fate] = known.of_key(KEY, [], nowhere, 7000)
    assert fate.events[-1] == "in no tier now: an operator removed chunks from cpu 0.0 s ago"


def test_without_a_tier_below_what_was_evicted_is_not_removed_later() -> None:
    log = Evictions()
    known = Explanations(log)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.removed(Scope(), "the first chunks", 1500)
    log.evict(2000)
    known.removed(Scope(), "chunks from every tier", 2000)
    [fate] = known.of_key(KEY, [], nowhere, 3000)
    assert fate.events[-1].startswith("in no tier now: evicted from memory 1.0 s ago")
    assert fate.events[-1].endswith("; an operator removed the first chunks 1.5 s ago")


@pytest.mark.parametrize(("cause", "why"), [(1, "another size"), (2, "in the table, which was full"), (3, "quota")])
def test_what_room_was_needed_for_is_said(cause: int, why: str) -> None:
    log = Evictions()
    known = Explanations(log)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.make_room_for("engine", NAMESPACE, 1000)
    log.evict(1000, cause)
    [fate] = known.of_key(KEY, [], nowhere, 2000)
    assert why in fate.events[-1]


def test_an_eviction_before_a_chunk_was_stored_again_is_not_why_it_is_gone_now() -> None:
    log = Evictions()
    known = Explanations(log)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.make_room_for("greedy", NAMESPACE, 1000)
    log.evict(1000)
    known.evicted("greedy", 7, 1000)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    [fate] = known.of_key(KEY, [], nowhere, 1000)
    assert "evicted from memory" in fate.events[1]
    assert fate.events[3] == "in no tier now: nothing is known to have been evicted or removed since it was stored"
    [fate] = known.of_key(KEY, [], lambda *_: "cpu", 1000)
    assert fate.events[3] == "in the cpu tier now"
    log.evict(1000, FROM_DISK)
    [fate] = known.of_key(KEY, [], lambda *_: "cpu", 1000)
    assert fate.events[3:] == ["evicted from disk 0.0 s ago", "in the cpu tier now"]


def test_of_a_chunk_stored_so_long_ago_that_it_is_forgotten_the_eviction_is_still_known() -> None:
    log = Evictions()
    known = Explanations(log)
    known.make_room_for("greedy", NAMESPACE, 1000)
    log.evict(1000)
    miss(known, 2000)
    begins_so, forgotten = missing(known, 3000)
    evicted = begins_so.removeprefix("a key that begins so: ")
    assert evicted.startswith("evicted from memory 2.0 s ago, to make room for greedy, namespace")
    assert forgotten == "when it was stored is no longer known"
    [fate] = known.of_key(KEY[:8], [], nowhere, 3000)
    assert list(fate.events) == [begins_so, forgotten]
    [fate] = known.of_key(KEY, [(NAMESPACE, TENANT)], nowhere, 3000)
    assert (fate.namespace_id, fate.tenant_id, list(fate.events)) == (NAMESPACE, b"", [evicted, forgotten])
    [fate] = known.of_key(KEY, [(NAMESPACE, TENANT)], lambda *_: "fs", 3000)
    assert list(fate.events) == [evicted, "in the fs tier now; when it was stored is no longer known"]


def test_where_the_evictions_are_forgotten_it_is_said_who_needed_room() -> None:
    log = Evictions()
    known = Explanations(log)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.evicted("greedy", 7, 1000)
    log.evictions_told = explanations.EXACT_EVICTIONS_KEPT + 1
    [fate] = known.of_key(KEY, [], nowhere, 1000)
    assert "since it was stored 7 chunks were evicted to make room for greedy" in fate.events[-1]


def test_who_needed_room_is_remembered_of_the_last_thousands() -> None:
    log = Evictions()
    known = Explanations(log)
    for number in range(explanations.EVICTORS_KEPT + 10):
        known.make_room_for("first", NAMESPACE, 0)
        known.make_room_for(f"client-{number}", NAMESPACE, 0)
    assert len(known._evictors) == len(known._evictor_names) == explanations.EVICTORS_KEPT
    assert ("first", NAMESPACE) in known._evictors
    assert known._evictor_names[log.evictor] == (f"client-{number}", NAMESPACE)


def missing(known: Explanations, now_ms: int) -> list[str]:
    [explained] = known.of_request("request-1", now_ms)
    return list(explained.missing)


def miss(known: Explanations, now_ms: int, **changes: str) -> None:
    decision = load(reason="NO_HIT", refused=[KEY])
    known.told("engine", NAMESPACE, decision.message(), now_ms, **changes)


def test_why_a_chunk_was_missed_outlives_that_the_same_request_stores_it_again() -> None:
    known = Explanations()
    known.stored("engine", NAMESPACE, TENANT, [KEY], 1000)
    known.evicted("greedy", 3, 1500)
    known.removed(Scope(tenant=TENANT), "chunks of its tenant from every tier", 2000)
    miss(known, 3000)
    known.stored("engine", NAMESPACE, TENANT, [KEY], 3000)
    known.removed(Scope(), "chunks from every tier", 3500)
    stored, gone = missing(known, 4000)
    assert stored == "stored 3.0 s ago by engine"
    assert "3 chunks were evicted to make room for greedy" in gone
    assert gone.endswith("; an operator removed chunks of its tenant from every tier 2.0 s ago")
    [fate] = known.of_key(KEY, [], lambda *_: "cpu", 4000)
    assert [event.split()[0] for event in fate.events] == ["stored", "not", "stored", "in"]
    assert "an operator removed chunks of its tenant" in fate.events[1]


def test_a_removal_of_others_is_not_told_of_a_key() -> None:
    known = Explanations()
    known.stored("engine", NAMESPACE, TENANT, [KEY], 0)
    known.removed(Scope(tenant=b"u" * 16), "chunks of its tenant from every tier", 1000)
    known.removed(Scope(namespace=b"m" * 16), "chunks of its namespace from every tier", 1000)
    [fate] = known.of_key(KEY, [], nowhere, 2000)
    assert fate.events[-1] == "in no tier now: nothing is known to have been evicted or removed since it was stored"


def test_a_chunk_that_was_missed_may_never_have_been_stored_or_was_refused_or_is_of_another_namespace() -> None:
    never, refused, other, sick = Explanations(), Explanations(), Explanations(), Explanations()
    miss(never, 0)
    never.stored("engine", NAMESPACE, TENANT, [KEY], 0)
    assert missing(never, 0) == ["not known to have been stored, or decided about, before"]
    tell(refused, store(7, [KEY]))
    miss(refused, 0)
    assert missing(refused, 1000) == ["not stored 1.0 s ago, for request request-7: ADMISSION"]
    other.stored("engine", b"m" * 16, TENANT, [KEY], 0)
    miss(other, 0)
    assert missing(other, 0) == [f"stored before only in namespace {(b'm' * 16).hex()}"]
    sick.stored("engine", NAMESPACE, TENANT, [KEY], 0)
    miss(sick, 0, sick="it hangs")
    assert missing(sick, 0)[-1] == "the fs tier was not read then: it hangs"


def test_a_request_is_found_by_the_id_its_client_gave_it() -> None:
    known = Explanations()
    tell(known, load(request="cmpl-mine-7-0-a1b2"))
    assert len(list(known.of_request("mine-7", 0))) == len(list(known.of_request("cmpl-mine", 0))) == 1
    assert list(known.of_request("7", 0)) == []


def test_no_slice_of_an_answer_grows_with_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DECISIONS_PER_SLICE", "PLACES_PER_SLICE", "KEYS_LOOKED_AT_MAX"):
        monkeypatch.setattr(explanations, name, 4)
    known = Explanations()
    tell(known, *(load(number) for number in range(20)))
    told = list(known.of_request("request-19", 0))
    assert (told.count(None), len(told)) == (5, 6)
    for number in range(20):
        known.stored("engine", NAMESPACE, TENANT, [KEY[:8] + number.to_bytes(24, "big")], 0)
    assert len(list(known.of_key(KEY[:8], [], nowhere, 0))) == 4
    places = [(number.to_bytes(16, "big"), TENANT) for number in range(8)]
    assert list(known.of_key(b"other-key" * 3, places, nowhere, 0)) == [None, None]


def test_engines_number_their_decisions_independently() -> None:
    known = Explanations()
    tell(known, load(1), group="a")
    tell(known, load(1), group="b")
    assert len(list(known.of_request("request-1", 0))) == 2


def test_decisions_of_an_engine_and_of_a_later_one_of_its_name_stay_apart() -> None:
    known = Explanations()
    earlier, later = (load(number, request="request-1") for number in (7, 1 << 47))
    tell(known, earlier, later)
    earlier.outcome = "loaded"
    tell(known, earlier)
    assert [each.decision.outcome for each in known.of_request("request-1", 0)] == ["loaded", ""]


def test_decisions_are_counted_once_and_balances_once_their_outcome_is_known() -> None:
    known = Explanations()
    slow, quick = load(1), load(2)
    tell(known, slow, quick, store(3, [KEY]))
    for decision, load_s in ((slow, 0.9), (quick, 0.1)):
        decision.load_s, decision.saved_s, decision.first_token_s = load_s, 0.4, load_s + 0.1
        tell(known, decision, decision)
    counts = {(count.kind, count.reason): (count.decisions, count.refused_chunks) for count in known.counts()}
    assert counts == {("load", "LOAD_IS_QUICKER"): (2, 0), ("store", "ADMISSION"): (1, 1)}
    [balance] = known.balances()
    assert (balance.tier, balance.loads) == ("cpu", 2)
    assert balance.predicted_s == pytest.approx(0.5)
    assert balance.realised_s == pytest.approx(1.2)
    assert balance.load_s == pytest.approx(1.0)
    assert balance.saved_s == pytest.approx(0.8)
    assert balance.regret_s == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_times_that_are_none_reach_no_sum(bad: float) -> None:
    known = Explanations()
    tell(known, load())
    tell(known, load(load_s=bad, saved_s=1.0, first_token_s=1.0))
    assert known.balances() == []


def test_a_key_that_was_refused_says_why_and_for_whom() -> None:
    known = Explanations()
    tell(known, store(7, [KEY]))
    [fate] = known.of_key(KEY, [], nowhere, now_ms=3000)
    assert list(fate.events) == ["not stored 3.0 s ago, for request request-7: ADMISSION"]


def test_a_key_that_was_stored_says_by_whom_where_it_is_and_who_needed_room_since() -> None:
    known = Explanations()
    known.evicted("early", 5, now_ms=500)
    known.stored("engine", NAMESPACE, TENANT, [KEY], now_ms=1000)
    [fate] = known.of_key(KEY[:8], [], lambda *_: "cpu", now_ms=2000)
    assert list(fate.events) == ["stored 1.0 s ago by engine", "in the cpu tier now"]
    assert (fate.namespace_id, fate.tenant_id) == (NAMESPACE, TENANT)
    known.evicted("greedy", 3, now_ms=1500)
    known.evicted("greedy", 4, now_ms=1600)
    known.removed(Scope(), "chunks from cpu", now_ms=1800)
    [fate] = known.of_key(KEY, [], nowhere, now_ms=2000)
    assert "7 chunks were evicted to make room for greedy, the first 0.5 s ago" in fate.events[1]
    assert "an operator removed chunks from cpu 0.2 s ago" in fate.events[1]
    assert "early" not in fate.events[1]


def test_the_same_key_in_another_namespace_or_tenant_is_another_fate() -> None:
    known = Explanations()
    known.stored("engine", NAMESPACE, TENANT, [KEY], 0)
    known.stored("engine", NAMESPACE, b"u" * 16, [KEY], 0)
    places = [(b"m" * 16, TENANT), (NAMESPACE, TENANT)]
    fates = known.of_key(KEY, places, lambda *_: "fs", 0)
    assert {(fate.namespace_id, fate.tenant_id) for fate in fates} == {
        (NAMESPACE, TENANT), (NAMESPACE, b"u" * 16), (b"m" * 16, TENANT),
    }  # fmt: skip
    assert list(known.of_key(b"other-key" * 3, places, nowhere, 0)) == []


def test_all_of_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DECISIONS_KEPT", "KEYS_KEPT", "UNWRITTEN_KEPT", "REASONS_MAX", "TIERS_MAX"):
        monkeypatch.setattr(explanations, name, 8)
    known = Explanations()
    for i in range(100):
        key = i.to_bytes(8, "big") * 4
        tell(known, store(2 * i, [key], reason=f"R{i}"))
        decision = load(2 * i + 1, tier=f"tier-{i}")
        tell(known, decision)
        decision.load_s = decision.first_token_s = 1.0
        tell(known, decision)
        known.stored("engine", NAMESPACE, TENANT, [key], 0)
        known.stored("engine", NAMESPACE, TENANT, [], 0)
        known.evicted(f"group-{i}", 1, 0)
        known.removed(Scope(), "chunks", 0)
        known.unwritten(ChunkId(NAMESPACE, TENANT, key), None, 0)
    kept = (known._kept, known._counts, known._balances, known._evictions, known._removals)
    logs = (known._refused, known._stored, known._unwritten)
    kept += tuple(each for log in logs for each in (log.events, log.by_start))
    assert [len(each) for each in kept] == [8, 8, 8, 100, 64, 8, 8, 8, 8, 8, 8]


def test_of_chunks_stored_together_each_is_found_by_its_own_key_until_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explanations, "KEYS_KEPT", 4)
    known = Explanations()
    alike, other = KEY[:8] + b"another end", b"other-key" * 3
    known.stored("first", NAMESPACE, TENANT, [KEY, alike, other], 0)
    known.stored("second", NAMESPACE, TENANT, [alike], 1000)
    for key, by in [(KEY, "first"), (alike, "second"), (other, "first")]:
        [fate] = known.of_key(key, [], lambda *_: "cpu", now_ms=2000)
        assert fate.events[-2].endswith(f"by {by}")
    assert len(list(known.of_key(KEY[:8], [], nowhere, 2000))) == 2
    known.stored("third", NAMESPACE, TENANT, [b"third-key" * 3], 2000)
    assert list(known.of_key(KEY, [], nowhere, 2000)) == list(known.of_key(other, [], nowhere, 2000)) == []
    [fate] = known.of_key(alike, [], nowhere, 2000)
    assert fate.events[0].endswith("by second")


def test_where_more_is_known_than_is_told_the_newest_is() -> None:
    known = Explanations()
    tenants = [number.to_bytes(16, "big") for number in range(EXPLAINED_MAX + 6)]
    for tenant in (*tenants, tenants[0]):
        known.stored("engine", NAMESPACE, tenant, [KEY], 0)
    fates = known.of_key(KEY, [(b"m" * 16, TENANT)], lambda *_: "cpu", 0)
    assert [fate.tenant_id for fate in fates] == [tenants[0], *reversed(tenants[7:])]
