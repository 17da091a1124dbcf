"""Step messages of any content: each is answered or refused, breaks no invariant and leaves the figures tellable."""

import random
from collections.abc import Iterator

import pytest

from kvstore import limits
from kvstore.errors import KVStoreError, LimitExceeded
from kvstore.explanations import Explanations
from kvstore.limits import DECISION_BYTES_MAX, LEARNED_PER_STEP_MAX
from kvstore.rpc.v1 import store_pb2
from kvstore.store import Session, Store
from tests.unit.test_store import INSTANCE, TENANT, attach, make_store, operations, step

MESSAGES = 3_000
CHECKED_EVERY = 100
ARENA_BYTES = 1 << 20


class Messages:
    """Random ones: `sane` of kinds, tenants and keys that pass, or of any."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.granted: list[tuple[int, int]] = []  # some of those seen

    def some(self, count_max: int) -> range:
        return range(self.random.randrange(count_max))

    def number(self, bits: int) -> int:
        edges = (0, 1, 2, 63, 64, 255, 256, 1 << (bits - 1), (1 << bits) - 1)
        return self.random.choice([*edges, self.random.randrange(300)])

    def seconds(self) -> float:
        return self.random.choice([0.0, -1.0, float("nan"), float("inf"), 1e308, 0.5])

    def ref(self) -> store_pb2.SlotRef:
        slot, generation = self.number(32), self.number(64)
        if self.granted and self.random.random() < 0.7:
            slot, generation = self.random.choice(self.granted)
        return store_pb2.SlotRef(slot=slot, generation=generation)

    def key(self, *, sane: bool) -> bytes:
        sizes = (16, 32) if sane else (0, 15, 16, 32, 64, 65)
        return bytes([self.random.randrange(30)]) * self.random.choice(sizes)

    def tenant(self, *, sane: bool) -> bytes:
        return self.random.choice([TENANT, TENANT, b"y" * 16, *(() if sane else (b"", b"x" * 15))])

    def chain(self, *, sane: bool) -> dict[str, object]:
        kind = 0 if sane else self.number(32)
        return {"tenant": self.tenant(sane=sane), "keys": [self.key(sane=sane) for _ in self.some(6)], "kind": kind}

    def decision(self) -> store_pb2.Decision:
        choice = self.random.choice
        return store_pb2.Decision(
            number=self.random.randrange(5), request=choice(["", "a" * 1000, "a" * 10_000]), reason=choice(["x", ""]),
            is_store=choice([True, False]), refused=b"r" * choice([0, 7, 8, 13, 16]), kind=self.number(32),
            load_s=self.seconds(), saved_s=self.seconds(), first_token_s=self.seconds(), tier=choice(["cpu", "z", ""]),
            refused_count=self.number(32), disk_refused_count=self.number(32), disk_reason=choice(["", "d"]),
            alternatives=[store_pb2.Alternative(tier="cpu", seconds=self.seconds())],
        )  # fmt: skip

    def next(self, number: int) -> store_pb2.StepRequest:
        chance, sane = self.random.random, self.random.random() < 0.75
        message = store_pb2.StepRequest(instance_id=INSTANCE, number=number if chance() < 0.97 else self.number(64))
        if chance() < 0.5:
            kinds = 1 if sane else self.random.choice([1, 2, 40])
            message.grants_wanted.extend([self.random.randrange(40) if sane else self.number(32)] * kinds)
        for _ in self.some(3):
            commits = message.commits.add(tenant=self.tenant(sane=sane), memory_only=chance() < 0.5)
            for _ in self.some(5):
                at = self.ref()
                commits.slots.append(at.slot)
                commits.generations.append(at.generation)
                commits.keys.append(self.key(sane=sane))
                commits.parents.append(self.random.choice([b"", self.key(sane=sane)]))
            if not sane and chance() < 0.2:
                commits.slots.append(1)
        message.aborts.extend(self.ref() for _ in self.some(4))
        message.leases.extend(self.ref() for _ in self.some(4))
        message.tails.extend(self.ref() for _ in self.some(3))
        for _ in self.some(4):
            message.releases.add(at=self.ref(), loaded=chance() < 0.5, promoted=chance() < 0.5)
        for _ in self.some(3):
            message.touches.add(**self.chain(sane=sane), again=self.number(32), worth_disk=self.number(32))
        for _ in self.some(2):
            message.promotes.add(**self.chain(sane=sane))
        message.decisions.extend(self.decision() for _ in self.some(3))
        message.misses = self.random.randrange(9) if sane else self.number(64)
        if chance() < 0.1:
            message.probe.engine_family, message.probe.value = self.random.choice("ab"), self.random.choice([b"", b"v"])
        message.fresh_namespace = chance() < 0.05
        if chance() < 0.2:
            message.learning, message.learned_wanted = "kind", True
            message.learned.add(name=str(self.random.randrange(100)), document="d")
        return message


@pytest.mark.parametrize("seed", [1, 2])
def test_no_message_breaks_the_store_or_its_figures(seed: int) -> None:
    messages = Messages(seed)
    store = make_store(ARENA_BYTES)
    sessions = [attach(store), attach(store)]
    now_ms = answered = 0
    for count in range(MESSAGES):
        session = messages.random.choice(sessions)
        now_ms += messages.random.choice([0, 10, 1_000, 40_000])
        try:
            reply = store.step(session, messages.next(session.last_number + 1), now_ms)
        except KVStoreError:
            continue
        answered += 1
        reply.SerializeToString()
        for grants in reply.grants:
            messages.granted += zip(grants.slots, grants.generations, strict=True)
        del messages.granted[:-200]
        store.end_what_is_over(now_ms)
        operations(store).stats(now_ms).SerializeToString()
        if count % CHECKED_EVERY == 0:
            assert store.problems() == [], f"seed {seed}, message {count}"
        if messages.random.random() < 0.002:  # both refused, most likely
            for each in sessions:
                store.process_ended(each)
            sessions = [attach(store), attach(store)]
    assert store.problems() == []
    assert answered > MESSAGES // 4


@pytest.fixture
def store() -> Iterator[Store]:
    store = make_store()
    yield store
    assert store.problems() == []


@pytest.fixture
def session(store: Store) -> Session:
    return attach(store)


@pytest.mark.parametrize("most", [limits.COUNT_PER_STEP_MAX, limits.COUNT_PER_STEP_MAX + 1])
def test_counts_that_no_sum_could_hold_are_refused(store: Store, session: Session, most: int) -> None:
    for fields in (
        {"misses": most},
        {"decisions": [store_pb2.Decision(number=1, is_store=True, refused_count=most)]},
        {"decisions": [store_pb2.Decision(number=2, is_store=True, disk_reason="d", disk_refused_count=most)]},
    ):
        if most <= limits.COUNT_PER_STEP_MAX:
            step(store, session, **fields)
            continue
        with pytest.raises(LimitExceeded, match=f"{most} chunks counted in one message"):
            step(store, session, **fields)
    operations(store).stats(0).SerializeToString()


def test_of_what_a_kind_of_engines_learned_the_newest_is_kept(store: Store, session: Session) -> None:
    for number in range(LEARNED_PER_STEP_MAX + 2):
        names = [str(number), "0"]  # told again with each message
        learned = [store_pb2.Learned(name=name, document="d") for name in names]
        step(store, session, learning="kind", learned=learned)
    kept = [*map(str, range(3, LEARNED_PER_STEP_MAX + 2)), "0"]
    assert list(store.learned()["kind"]) == kept
    reply = step(store, session, learning="kind", learned_wanted=True)
    assert [each.name for each in reply.learned] == kept


def test_a_document_is_measured_in_bytes_with_its_name(store: Store, session: Session) -> None:
    most = limits.LEARNED_DOCUMENT_BYTES_MAX
    step(store, session, learning="kind", learned=[store_pb2.Learned(name="é", document="d" * (most - 2))])
    with pytest.raises(LimitExceeded, match=f"a document of {most + 1} bytes"):
        step(store, session, learning="kind", learned=[store_pb2.Learned(name="é", document="d" * (most - 1))])


def test_a_decision_that_is_too_large_is_not_remembered() -> None:
    explanations = Explanations()
    for number, request in ((1, "a" * 1_000), (2, "a" * DECISION_BYTES_MAX)):
        explanations.told("g", b"n", store_pb2.Decision(number=number, request=request, is_store=True), 0)
    [kept] = explanations.of_request("a", 0)
    assert kept.decision.number == 1


def test_sums_of_times_stay_finite() -> None:
    explanations = Explanations()
    for number in range(2):
        decision = store_pb2.Decision(number=number, tier="cpu", load_s=1e308, saved_s=1.0)
        explanations.told("g", b"n", decision, 0)
        told = store_pb2.Decision()
        told.CopyFrom(decision)
        told.first_token_s = 1.0
        explanations.told("g", b"n", told, 0)
    assert explanations.balances() == []
