"""The daemon's state behind the wire, with the real index: who may attach, what a message does, what ends a grant."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvstore import limits
from kvstore import store as store_module
from kvstore._native import CPU, MISS
from kvstore.config import EVICTION_POLICY_DEFAULT
from kvstore.errors import (
    BadKey,
    KVStoreError,
    LimitExceeded,
    NamespaceMismatch,
    NotFound,
    ProtocolError,
    SeedMismatch,
    Unavailable,
)
from kvstore.explanations import Explanations
from kvstore.namespace import canonical_json, digest, seed_fingerprint
from kvstore.operations import Operations
from kvstore.rpc.v1 import admin_pb2, store_pb2
from kvstore.store import Session, Store
from kvstore.tenant import tenant_id
from kvstore.tiers.cpu import CpuTier

INSTANCE = b"i" * 16
TENANT_KEY = b"k" * 32
TENANT = tenant_id(TENANT_KEY, "salt")
NOBODY = "a salt without chunks"
ARENA_BYTES = 8 << 20
CHUNK_BYTES = 4096
SCHEDULER, WORKER, CLIENT = store_pb2.ROLE_SCHEDULER, store_pb2.ROLE_WORKER, store_pb2.ROLE_CLIENT


def make_store(
    arena_bytes: int = ARENA_BYTES, *, require_cache_salt: bool = False, eviction_policy: str = EVICTION_POLICY_DEFAULT
) -> Store:
    tier = CpuTier(
        cpu_bytes=arena_bytes,
        index_bytes=None,
        index_key=b"x" * 16,
        instance_id=INSTANCE,
        eviction_policy=eviction_policy,
    )
    tier.set_ready(tier.arena_bytes)
    return Store(
        tier,
        instance_id=INSTANCE,
        index_key=b"x" * 16,
        tenant_key=TENANT_KEY,
        hash_seed="0",
        require_cache_salt=require_cache_salt,
    )


def operations(store: Store) -> Operations:
    return Operations(store, store._tier, started_ms=0)


@pytest.fixture
def store() -> Iterator[Store]:
    store = make_store()
    yield store
    assert store.problems() == []


KIND_FIELDS = {"chunk_bytes", "namespace_document", "range_offset", "range_bytes"}


def document(chunk_bytes: int = CHUNK_BYTES, seed: str = "0", **fields: object) -> str:
    added = {"chunk_bytes": chunk_bytes, "seed_fingerprint": seed_fingerprint(seed).hex()}
    return canonical_json({"model": "m"} | fields | added)


def attach(store: Store, role: store_pb2.Role = CLIENT, *, seed: str = "0", **fields: object) -> Session:
    """Fields of the request, and of its only kind."""
    request: dict[str, object] = {"role": role, "seed_fingerprint": seed_fingerprint(seed), "seed_shown": seed}
    if role != CLIENT:
        request |= {"group": "engine", "world_size": 1}
    if role != SCHEDULER:
        chunk_bytes = fields.get("chunk_bytes", CHUNK_BYTES)
        assert isinstance(chunk_bytes, int)
        kind: dict[str, object] = {"chunk_bytes": chunk_bytes, "namespace_document": document(chunk_bytes, seed)}
        if role == WORKER:
            kind |= {"range_offset": 0, "range_bytes": chunk_bytes}
        kind |= {name: fields.pop(name) for name in KIND_FIELDS & fields.keys()}
        request["kinds"] = [store_pb2.Kind(**kind)]
    session = store.connect(pid=1, uid=0)
    try:
        store.attach(session, store_pb2.AttachRequest(**(request | fields)))
    except KVStoreError:
        store.hang_up(session)
        raise
    return session


def step(store: Store, session: Session, number: int | None = None, now_ms: int = 0, **fields: object):
    number = session.last_number + 1 if number is None else number
    request = store_pb2.StepRequest(**({"number": number, "instance_id": INSTANCE} | fields))
    return store.step(session, request, now_ms)


def grants(store: Store, session: Session, count: int) -> list[store_pb2.SlotRef]:
    return slots_of(step(store, session, grants_wanted=[count]).grants[0])


def slots_of(grants: store_pb2.Grants) -> list[store_pb2.SlotRef]:
    places = zip(grants.slots, grants.generations, strict=True)
    return [store_pb2.SlotRef(slot=slot, generation=generation) for slot, generation in places]


def commit(at: store_pb2.SlotRef, name: int, tenant: bytes = TENANT) -> store_pb2.Commits:
    return commits({name: at}, tenant)


def commits(chunks: dict[int, store_pb2.SlotRef], tenant: bytes = TENANT) -> store_pb2.Commits:
    return store_pb2.Commits(
        tenant=tenant,
        slots=[at.slot for at in chunks.values()],
        generations=[at.generation for at in chunks.values()],
        keys=[key(name) for name in chunks],
        parents=[b"" for _ in chunks],
    )


def one_commit(tenant: bytes = TENANT, key: bytes = bytes(32), parent: bytes = b"") -> store_pb2.Commits:
    """To a slot that nobody was granted."""
    return store_pb2.Commits(tenant=tenant, slots=[0], generations=[99], keys=[key], parents=[parent])


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


def granted_bytes(store: Store) -> int:
    return operations(store).stats(0).tiers[0].granted_bytes


def found(store: Store, session: Session, name: int) -> int:
    request = store_pb2.LookupRequest(namespace_id=session.group.kinds[0].namespace, tenant=TENANT, keys=[key(name)])
    return b"".join(store.lookup(request))[0]


# -- attaching ---------------------------------------------------------------------------------------------------------


def test_another_seed_is_refused_and_both_are_named(store: Store) -> None:
    with pytest.raises(SeedMismatch, match=r"seed '00' and the daemon with '0'.*export PYTHONHASHSEED=0"):
        attach(store, seed="00")


def test_processes_of_one_group_must_describe_the_same_chunks(store: Store) -> None:
    attach(store, WORKER, world_size=2, range_bytes=CHUNK_BYTES // 2)
    with pytest.raises(NamespaceMismatch, match=r"model: 'other' here, 'm' in the group"):
        attach(
            store, WORKER, world_size=2, rank=1, range_offset=CHUNK_BYTES // 2, range_bytes=CHUNK_BYTES // 2,
            namespace_document=document(model="other"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ProtocolError),
        ("[]", ProtocolError),
        ("{ }", ProtocolError),
        ('{"x":1.5}', ProtocolError),
        ('{"x":null}', ProtocolError),
        ("[" * 100_000, ProtocolError),
        ('{"x":' + "[" * 400 + "]" * 400 + "}", NamespaceMismatch),
        ("{}", NamespaceMismatch),
        (document(chunk_bytes=8192), NamespaceMismatch),
        (document(seed="1"), NamespaceMismatch),
        (document(x="y" * limits.NAMESPACE_DOCUMENT_BYTES_MAX), LimitExceeded),
    ],
)
def test_documents_that_are_not_canonical_or_not_the_sessions_are_refused(
    store: Store, text: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        attach(store, namespace_document=text)


HALF = CHUNK_BYTES // 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"rank": 1, "range_offset": HALF - 1, "range_bytes": HALF}, r"both own bytes of a chunk, but not the same"),
        ({"rank": 1, "range_offset": HALF + 1, "range_bytes": HALF - 1}, r"own 4095 of a chunk's 4096 bytes"),
        ({"rank": 1, "range_offset": HALF, "range_bytes": HALF + 1}, r"bytes 2048 to 4097 of a chunk of 4096"),
        ({"rank": 1, "range_offset": HALF, "range_bytes": 0}, r"bytes 2048 to 2048"),
        ({"rank": 2, "range_offset": HALF, "range_bytes": HALF}, r"rank 2 of group engine, which has 2 workers"),
        ({"rank": 0, "range_offset": HALF, "range_bytes": HALF}, r"rank 0 .* attached already"),
        ({"rank": 1, "world_size": 3}, r"has 2 workers, and this process says 3"),
    ],
)
def test_ranges_of_ranks_must_tile_one_chunk(store: Store, second: dict[str, int], message: str) -> None:
    first = attach(store, WORKER, world_size=2, range_bytes=HALF)
    with pytest.raises(NamespaceMismatch, match=message):
        attach(store, WORKER, **({"world_size": 2} | second))
    assert not store.group_state(first.group).complete


def test_ranks_that_hold_the_same_bytes_own_them_together(store: Store) -> None:
    """Two KV heads on four ranks."""
    scheduler = attach(store, SCHEDULER, world_size=4)
    for rank in range(4):
        assert not store.group_state(scheduler.group).complete
        attach(store, WORKER, world_size=4, rank=rank, range_offset=rank // 2 * HALF, range_bytes=HALF)
    assert store.group_state(scheduler.group).complete


def test_ranks_that_all_own_one_half_do_not_make_a_chunk(store: Store) -> None:
    attach(store, WORKER, world_size=2, range_bytes=HALF)
    with pytest.raises(NamespaceMismatch, match=r"the 2 ranks of group engine own 2048 of a chunk's 4096 bytes"):
        attach(store, WORKER, world_size=2, rank=1, range_bytes=HALF)


def test_a_group_is_complete_while_every_rank_is_connected(store: Store) -> None:
    scheduler = attach(store, SCHEDULER, world_size=2)
    pushed: list[bool] = []
    scheduler.on_group = lambda: pushed.append(store.group_state(scheduler.group).complete)
    attach(store, WORKER, world_size=2, range_bytes=HALF)
    assert step(store, scheduler, grants_wanted=[1]).grants[0].short == store_pb2.OUTCOME_NOT_GRANTED
    second = attach(store, WORKER, world_size=2, rank=1, range_offset=HALF, range_bytes=HALF)
    state = store.group_state(scheduler.group)
    assert [(kind.namespace_id, kind.chunk_bytes) for kind in state.kinds] == [(digest(document()), CHUNK_BYTES)]
    assert len(grants(store, scheduler, 1)) == 1
    store.hang_up(second)
    assert pushed == [False, True, False]


def test_a_second_living_scheduler_of_a_group_is_refused(store: Store) -> None:
    first = attach(store, SCHEDULER)
    with pytest.raises(NamespaceMismatch, match=r"group engine has a scheduler already \(pid 1\)"):
        attach(store, SCHEDULER)
    store.hang_up(first)
    attach(store, SCHEDULER)


@pytest.mark.parametrize("name", ["client-1", "client-99", "engine\nERROR forged", "\x1b[31m"])
def test_a_group_that_others_could_mistake_is_refused(store: Store, name: str) -> None:
    """A client's group is its own: nobody else commits or aborts its slots. And names end up in the log."""
    client = attach(store)
    assert client.group.name == "client-1"
    for role in (SCHEDULER, WORKER):
        with pytest.raises(ProtocolError, match=r"does not begin with 'client-', unlike"):
            attach(store, role, group=name)
    assert client.group.sessions == {client}


def test_more_size_classes_than_the_arena_takes_are_refused_at_attach(store: Store) -> None:
    for number in range(1, limits.SIZE_CLASSES_MAX + 1):
        attach(store, chunk_bytes=4096 * number)
    attach(store, chunk_bytes=4095)  # the same class as 4096
    with pytest.raises(LimitExceeded, match=r"size class 33 of this arena, which takes 32"):
        attach(store, chunk_bytes=4096 * 33)


def test_a_size_class_that_nobody_uses_and_no_chunk_has_makes_way() -> None:
    store = make_store(256 << 20)
    sessions = [attach(store, chunk_bytes=4096 * number) for number in range(1, limits.SIZE_CLASSES_MAX + 1)]
    for session in sessions:
        [at] = grants(store, session, 1)
        step(store, session, commits=[commit(at, 1)])
    store.hang_up(sessions[0])
    with pytest.raises(LimitExceeded, match=r"size class 33 .*kvstore ls namespaces, gc"):
        attach(store, chunk_bytes=4096 * 33)
    store._index.remove(store._index.begin_removal(namespace=digest(document(4096))), 1_000)
    newcomer = attach(store, chunk_bytes=4096 * 33)
    assert len(grants(store, newcomer, 1)) == 1
    with pytest.raises(LimitExceeded, match="size class 33"):
        attach(store, chunk_bytes=4096)
    assert store.problems() == []


@pytest.mark.parametrize("chunk_bytes", [0, ARENA_BYTES + 1])
def test_a_chunk_that_cannot_fit_is_refused_at_attach(store: Store, chunk_bytes: int) -> None:
    with pytest.raises(LimitExceeded, match=rf"chunk of {chunk_bytes} bytes does not fit an arena of {ARENA_BYTES}"):
        attach(store, chunk_bytes=chunk_bytes)


def test_sessions_are_bounded(store: Store) -> None:
    for _ in range(limits.SESSIONS_MAX):
        store.connect(pid=1, uid=0)
    with pytest.raises(LimitExceeded, match=r"takes 1024 processes"):
        attach(store)
    operators = [attach(store, store_pb2.ROLE_ADMIN) for _ in range(limits.OPERATORS_MAX)]
    with pytest.raises(LimitExceeded, match=r"takes 1024 processes"):
        store.connect(pid=1, uid=0)
    store.hang_up(operators[0])
    attach(store, store_pb2.ROLE_ADMIN)


def test_refused_processes_leave_no_group_behind(store: Store) -> None:
    for name in range(3):
        with pytest.raises(NamespaceMismatch):
            attach(store, WORKER, group=f"g{name}", rank=5)
    assert operations(store).stats(0).sessions == []
    assert store._groups == {}


def test_documents_are_kept_for_operators_and_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_MAX", 3)
    living = attach(store)
    for _ in range(5):
        step(store, living, fresh_namespace=True)
    assert operations(store).stats(0).namespaces == 3


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_commit_makes_a_chunk_visible_once(store: Store) -> None:
    session = attach(store)
    [at] = grants(store, session, 1)
    assert found(store, session, 1) == MISS
    reply = step(store, session, commits=[commits({1: at, 2: at}), commit(at, 1)])
    assert reply.outcomes == [
        store_pb2.OUTCOME_STORED, store_pb2.OUTCOME_NOT_GRANTED, store_pb2.OUTCOME_NOT_GRANTED,
    ]  # fmt: skip
    assert (found(store, session, 1), found(store, session, 2)) == (CPU, MISS)
    assert granted_bytes(store) == 0


def test_the_first_commit_of_a_key_wins_and_the_second_slot_is_free_again(store: Store) -> None:
    first, second = attach(store), attach(store)
    [mine], [yours] = grants(store, first, 1), grants(store, second, 1)
    assert step(store, first, commits=[commit(mine, 1)]).outcomes == [store_pb2.OUTCOME_STORED]
    assert step(store, second, commits=[commit(yours, 1)]).outcomes == [store_pb2.OUTCOME_PRESENT]
    assert granted_bytes(store) == 0


def test_what_came_of_a_decision_to_store_is_known_by_its_number(store: Store) -> None:
    session = attach(store)
    decision = store_pb2.Decision(number=7, request="cmpl-7", is_store=True, reason="LEARNING", chunks=3)
    one, two, three, four = grants(store, session, 4)
    batch = commits({1: one, 2: two})
    batch.decision = 7
    step(store, session, commits=[batch], decisions=[decision])
    operations(store).set_quota(admin_pb2.SetQuotaRequest(what=admin_pb2.Selection(salt="salt"), bytes=0))
    batch = commits({1: three, 3: four})
    batch.decision = 7
    step(store, session, commits=[batch])
    [reply] = operations(store).explain(admin_pb2.ExplainRequest(request="7"), 0)
    assert {each.outcome: each.chunks for each in reply.decisions[0].committed} == {
        "STORED": 2,
        "PRESENT": 1,
        "QUOTA": 1,
    }
    counts = {(each.kind, each.reason): each.refused_chunks for each in operations(store).stats(0).decisions}
    assert counts[("commit", "QUOTA")] == 1


def test_a_key_is_looked_for_in_the_memory_of_every_tenant(store: Store) -> None:
    tenants = sorted(tenant_id(TENANT_KEY, str(number)) for number in range(limits.ROWS_PER_PAGE + 2))
    session = attach(store)
    for number, tenant in enumerate(tenants):
        [at] = grants(store, session, 1)
        step(store, session, commits=[commit(at, number, tenant)])
    store.explanations = Explanations(store._index)  # so long ago that nothing else is known
    last = len(tenants) - 1
    pieces = operations(store).explain(admin_pb2.ExplainRequest(key=key(last)), 0)
    [fate] = [fate for piece in pieces for fate in piece.keys]
    assert fate.tenant_id == tenants[last]
    assert fate.events == ["in the cpu tier now; when it was stored is no longer known"]


def test_a_miss_is_explained_by_what_was_before_it_though_the_chunk_is_stored_in_the_same_message(store: Store) -> None:
    session = attach(store)
    [at] = grants(store, session, 1)
    batch = commit(at, 1)
    decision = store_pb2.Decision(number=1, request="cmpl-1", reason="NO_HIT", refused=batch.keys[0][:8])
    step(store, session, commits=[batch], decisions=[decision])
    pieces = list(operations(store).explain(admin_pb2.ExplainRequest(request="cmpl-1"), 0))
    assert list(pieces[0].decisions[0].missing) == ["not known to have been stored, or decided about, before"]
    assert pieces[1].keys[0].events[-1] == "in the cpu tier now"


def test_a_removal_that_is_refused_is_not_told_of_any_key(store: Store) -> None:
    session = attach(store)
    [at] = grants(store, session, 1)
    step(store, session, commits=[commit(at, 1)])
    nobody = admin_pb2.RemoveRequest(what=admin_pb2.Selection(salt=NOBODY))
    with pytest.raises(NotFound):
        operations(store).begin_removal(nobody, 0)
    operations(store).begin_removal(admin_pb2.RemoveRequest(bytes=4096, older_than_ms=500), 0)
    [removal] = store.explanations._removals
    assert not removal.from_disk  # there is none
    assert removal.what == "the least recently used chunks not used for 0.5 s from every tier, 4096 bytes asked for"


def test_a_foreign_slot_can_be_neither_committed_nor_aborted(store: Store) -> None:
    owner, other = attach(store), attach(store)
    [at] = grants(store, owner, 1)
    assert step(store, other, commits=[commit(at, 1)], aborts=[at]).outcomes == [store_pb2.OUTCOME_NOT_GRANTED]
    assert step(store, owner, commits=[commit(at, 1)]).outcomes == [store_pb2.OUTCOME_STORED]


def test_slots_that_do_not_exist_are_nobodys(store: Store) -> None:
    session = attach(store)
    nowhere = store_pb2.SlotRef(slot=2**32 - 1, generation=2**64 - 1)
    reply = step(
        store, session, commits=[commit(nowhere, 1)], aborts=[nowhere], leases=[nowhere],
        releases=[store_pb2.Release(at=nowhere)],
    )  # fmt: skip
    assert reply.outcomes == [store_pb2.OUTCOME_NOT_GRANTED]


def test_a_number_seen_before_is_answered_and_not_applied_again(store: Store) -> None:
    session = attach(store)
    first = step(store, session, number=1, grants_wanted=[3], misses=5)
    again = step(store, session, number=1, grants_wanted=[3], misses=5)
    assert again == first
    assert (len(first.grants[0].slots), granted_bytes(store), operations(store).stats(0).tiers[0].misses) == (
        3,
        3 * 4096,
        5,
    )


def test_a_message_is_never_skipped(store: Store) -> None:
    session = attach(store)
    step(store, session, number=1)
    for number in (0, 3):
        with pytest.raises(ProtocolError, match=rf"message number {number} after 1"):
            step(store, session, number=number)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"instance_id": b"j" * 16}, Unavailable, f"instance {(b'j' * 16).hex()} and this daemon is {INSTANCE.hex()}"),
        ({"instance_id": b""}, Unavailable, r"instance \(none\)"),
        ({"commits": [one_commit(key=b"k" * 15)]}, BadKey, r"has 15 bytes; .* 16 to 64 bytes"),
        ({"commits": [one_commit(key=b"k" * 65)]}, BadKey, r"has 65 bytes"),
        ({"commits": [one_commit(parent=b"p")]}, BadKey, r"has 1 bytes"),
        ({"commits": [one_commit(b"t")]}, ProtocolError, r"tenant 74 has 1 bytes, not 16"),
        (
            {"commits": [store_pb2.Commits(tenant=TENANT, slots=[0, 1], generations=[9], keys=[key(1)] * 2)]},
            ProtocolError,
            "commits of 2 slots, 1 generations, 2 keys and 0 parents",
        ),
        ({"commits": [one_commit()] * 257}, LimitExceeded, r"257 operations in one message; at most 256"),
        (
            {
                "commits": [store_pb2.Commits(tenant=TENANT)] * 86,
                "touches": [store_pb2.Chain(tenant=TENANT)] * 86,
                "promotes": [store_pb2.Chain(tenant=TENANT)] * 85,
            },
            LimitExceeded,
            r"257 operations in one message; at most 256",
        ),
        ({"touches": [store_pb2.Chain(tenant=TENANT, keys=[b""])]}, BadKey, r"has 0 bytes"),
        ({"aborts": [store_pb2.SlotRef()] * 257}, LimitExceeded, r"257 operations in one message; at most 256"),
        (
            {"decisions": [store_pb2.Decision(is_store=True, refused=bytes(4_000))] * 4},
            LimitExceeded,
            "16000 bytes of refused keys in one message",
        ),
    ],
)
def test_bad_messages_are_refused_whole(
    store: Store, fields: dict[str, object], error: type[Exception], message: str
) -> None:
    session = attach(store)
    with pytest.raises(error, match=message):
        step(store, session, grants_wanted=[1], misses=1, **fields)
    assert (granted_bytes(store), operations(store).stats(0).tiers[0].misses, session.last_number) == (0, 0, 0)


@pytest.mark.parametrize(("batches", "keys"), [(1, 200_000), (200_000, 0)])
def test_what_is_too_much_for_one_message_is_refused_before_anything_is_made_of_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, batches: int, keys: int
) -> None:
    session = attach(store)
    batch = store_pb2.Commits(
        tenant=TENANT, slots=[0] * keys, generations=[1] * keys, keys=[b""] * keys, parents=[b""] * keys
    )
    request = store_pb2.StepRequest(number=1, instance_id=INSTANCE, commits=[batch] * batches)
    made: list[object] = []
    monkeypatch.setattr(store_module, "_Batch", SimpleNamespace(of=made.append))
    with pytest.raises(LimitExceeded, match="200000 operations in one message; at most 256"):
        store.step(session, request, 0)
    assert made == []


def test_only_clients_and_schedulers_send_steps(store: Store) -> None:
    with pytest.raises(ProtocolError, match=r"a worker session sends no step messages"):
        step(store, attach(store, WORKER))
    with pytest.raises(ProtocolError, match=r"a connecting session"):
        step(store, store.connect(pid=1, uid=0))


def test_hits_and_misses_are_what_the_messages_say(store: Store) -> None:
    session = attach(store)
    [at] = grants(store, session, 1)
    step(store, session, commits=[commit(at, 1)], leases=[at])
    assert operations(store).stats(0).tiers[0].pinned_bytes == 4096
    release = store_pb2.Release
    step(store, session, releases=[release(at=at, loaded=True), release(at=at, loaded=False)], misses=2)
    stats = operations(store).stats(0)
    assert (stats.tiers[0].hits, stats.failed_loads, stats.tiers[0].misses) == (1, 1, 2)
    assert stats.tiers[0].pinned_bytes == 0


def test_a_lease_in_the_message_that_releases_it_is_the_one_of_who_is_left(store: Store) -> None:
    session = attach(store)
    [at] = grants(store, session, 1)
    step(store, session, commits=[commit(at, 1)], leases=[at])
    step(store, session, releases=[store_pb2.Release(at=at, loaded=True)], leases=[at])
    assert operations(store).stats(0).tiers[0].pinned_bytes == 4096


def test_a_lease_ends_30_s_after_its_last_renewal(store: Store) -> None:
    session = attach(store)
    [at] = grants(store, session, 1)
    step(store, session, commits=[commit(at, 1)], leases=[at], now_ms=0)
    step(store, session, leases=[at], now_ms=20_000)
    store.end_what_is_over(49_999)
    assert operations(store).stats(0).tiers[0].pinned_bytes == 4096
    store.end_what_is_over(50_000)
    assert operations(store).stats(0).tiers[0].pinned_bytes == 0


def test_very_many_grants_of_a_group_that_ended_come_back_a_slice_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GRANTS_ENDED_PER_SLICE", 2)
    scheduler = attach(store, SCHEDULER)
    worker = attach(store, WORKER)
    held = grants(store, scheduler, 5)
    for session in (scheduler, worker):
        store.process_ended(session)
    granted = [operations(store).stats(0).tiers[0].granted_bytes]
    again = attach(store, SCHEDULER)  # an engine of that name is another one
    attach(store, WORKER)
    while store.end_what_is_over(0):
        assert store.problems() == []
        granted.append(operations(store).stats(0).tiers[0].granted_bytes)
    assert granted == [3 * CHUNK_BYTES, CHUNK_BYTES]
    assert operations(store).stats(0).tiers[0].granted_bytes == 0
    [outcome] = step(store, again, commits=[commit(held[0], 1)]).outcomes
    assert outcome == store_pb2.OUTCOME_NOT_GRANTED


def test_very_many_leases_end_a_slice_at_a_time_but_not_those_of_a_group_that_came_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASES_ENDED_PER_SLICE", 2)
    session = attach(store, SCHEDULER)
    attach(store, WORKER)
    held = grants(store, session, 6)
    writing, refs = held[0], held[1:]  # so that its processes matter while none is connected
    step(store, session, commits=[commit(at, number) for number, at in enumerate(refs)], leases=refs)

    def leased() -> int:
        return operations(store).stats(0).tiers[0].pinned_bytes // CHUNK_BYTES

    for each in list(session.group.sessions):
        store.hang_up(each)
    assert leased() == 3
    assert store.end_what_is_over(0)
    assert leased() == 1
    session = attach(store, SCHEDULER)
    assert not store.end_what_is_over(0)
    assert leased() == 1
    step(store, session, leases=refs, aborts=[writing])
    assert store.end_what_is_over(limits.LEASE_MS)
    assert leased() == 3
    assert store.end_what_is_over(limits.LEASE_MS)
    assert not store.end_what_is_over(limits.LEASE_MS)
    assert leased() == 0


def test_without_a_salt_nothing_is_stored_where_salts_are_required() -> None:
    store = make_store(require_cache_salt=True)
    session = attach(store)
    one, two = grants(store, session, 2)
    unsalted = tenant_id(TENANT_KEY, None)
    reply = step(store, session, commits=[commit(one, 1, unsalted), commit(two, 2)])
    assert reply.outcomes == [store_pb2.OUTCOME_REJECTED_ADMISSION, store_pb2.OUTCOME_STORED]
    assert granted_bytes(store) == 0


def test_a_lookup_checks_what_it_is_given(store: Store) -> None:
    session = attach(store)
    namespace = session.group.kinds[0].namespace
    ten_thousand = [key(name) for name in range(10_000)]
    request = store_pb2.LookupRequest(namespace_id=namespace, tenant=TENANT, keys=ten_thousand)
    slices = list(store.lookup(request))
    assert b"".join(slices) == bytes(10_000)
    assert max(map(len, slices)) == limits.LISTING_STEPS_PER_SLICE
    with pytest.raises(BadKey, match=r"key 6b has 1 bytes"):
        list(store.lookup(store_pb2.LookupRequest(namespace_id=namespace, tenant=TENANT, keys=[*ten_thousand, b"k"])))
    with pytest.raises(ProtocolError, match=r"of 16 bytes, not of 3 and 16"):
        next(store.lookup(store_pb2.LookupRequest(namespace_id=b"abc", tenant=TENANT, keys=[])))


def test_a_list_of_what_one_tenant_has_on_disk_is_made_in_slices_however_many_others_there_are(store: Store) -> None:
    looked_at = 0

    def usage() -> Iterator[tuple[bytes, bytes, int, int]]:
        nonlocal looked_at
        for number in range(3 * limits.LISTING_STEPS_PER_SLICE):
            looked_at += 1
            yield bytes(16), number.to_bytes(16, "big"), 1, 4096

    fs = SimpleNamespace(name="fs", usage=usage, holds=lambda *_: True)
    listed = Operations(store, store._tier, SimpleNamespace(fs=fs), started_ms=0)  # type: ignore[arg-type]
    rows, before = [], 0
    for page in listed.usage(admin_pb2.Selection(tenant_id=(9_999).to_bytes(16, "big"), tier="fs")):
        assert looked_at - before <= limits.LISTING_STEPS_PER_SLICE
        before = looked_at
        rows += page.usage
    assert [int.from_bytes(row.tenant_id, "big") for row in rows] == [9_999]


# -- grants ------------------------------------------------------------------------------------------------------------


def test_one_group_may_always_hold_64_slots_and_in_a_small_arena_no_more() -> None:
    store = make_store(4 << 20)
    session = attach(store)
    reply = step(store, session, grants_wanted=[100])
    assert (len(reply.grants[0].slots), reply.grants[0].short) == (64, store_pb2.OUTCOME_NOT_GRANTED)
    reply = step(store, session, aborts=slots_of(reply.grants[0])[:10], grants_wanted=[20])
    assert len(reply.grants[0].slots) == 10


def test_a_large_arena_gives_one_group_a_sixteenth() -> None:
    store = make_store(64 << 20)
    size = 32 << 10
    assert len(grants(store, attach(store, chunk_bytes=size), 10_000)) == (64 << 20) // 16 // size == 128


def test_one_message_is_granted_no_more_slots_than_the_loop_has_time_for() -> None:
    store = make_store(256 << 20)
    session = attach(store)
    for _ in range(2):
        reply = step(store, session, grants_wanted=[(1 << 32) - 1])
        assert len(reply.grants[0].slots) == limits.GRANTS_PER_STEP_MAX
        assert reply.grants[0].short == store_pb2.OUTCOME_NOT_GRANTED


def test_all_groups_hold_at_most_a_quarter_of_the_arena_and_each_at_least_one_slot(store: Store) -> None:
    size = 64 << 10  # the arena holds 128, a quarter is 32
    counts = [len(grants(store, attach(store, chunk_bytes=size), 20)) for _ in range(4)]
    assert counts == [20, 12, 1, 1]


@pytest.mark.parametrize("chunk_bytes", [0, ARENA_BYTES + 1, (1 << 64) - 1])
def test_a_chunk_of_an_impossible_size_is_refused_with_it(store: Store, chunk_bytes: int) -> None:
    with pytest.raises(LimitExceeded, match=rf"a chunk of {chunk_bytes} bytes does not fit an arena"):
        attach(store, chunk_bytes=chunk_bytes)


def test_a_chunk_of_half_the_arena_still_gets_its_slot(store: Store) -> None:
    session = attach(store, chunk_bytes=ARENA_BYTES // 2)
    assert len(grants(store, session, 2)) == 1


def test_a_full_tier_says_so(store: Store) -> None:
    session = attach(store, chunk_bytes=ARENA_BYTES // 2)
    for stored in range(2):
        [granted] = grants(store, session, 1)
        step(store, session, commits=[commit(granted, stored)])
        if stored == 0:
            step(store, session, leases=[granted])
    [granted] = grants(store, session, 1)  # evicts the chunk that is not leased
    other = attach(store, chunk_bytes=ARENA_BYTES // 2)
    assert step(store, other, grants_wanted=[1]).grants[0].short == store_pb2.OUTCOME_REJECTED_TIER_FULL


def test_grants_outlive_the_connection_and_end_with_the_process(store: Store) -> None:
    session = attach(store)
    grants(store, session, 5)
    store.hang_up(session)
    assert granted_bytes(store) == 5 * 4096
    assert store.watched(session)
    store.process_ended(session)
    assert granted_bytes(store) == 0
    assert not store.watched(session)


def test_the_pidfd_may_speak_first(store: Store) -> None:
    session = attach(store)
    grants(store, session, 5)
    store.process_ended(session)
    store.hang_up(session)
    assert granted_bytes(store) == 0
    assert operations(store).stats(0).sessions == []


def test_grants_end_only_with_the_last_process_of_the_group(store: Store) -> None:
    scheduler, worker = attach(store, SCHEDULER), attach(store, WORKER)
    grants(store, scheduler, 5)
    store.process_ended(scheduler)
    assert granted_bytes(store) == 5 * 4096
    store.hang_up(worker)
    assert granted_bytes(store) == 5 * 4096
    store.process_ended(worker)
    assert granted_bytes(store) == 0


def test_leases_end_with_the_last_connection(store: Store) -> None:
    scheduler, worker = attach(store, SCHEDULER), attach(store, WORKER)
    [at] = grants(store, scheduler, 1)
    step(store, scheduler, commits=[commit(at, 1)], leases=[at])
    store.hang_up(scheduler)
    assert operations(store).stats(0).tiers[0].pinned_bytes == 4096
    store.hang_up(worker)
    assert operations(store).stats(0).tiers[0].pinned_bytes == 0


def test_what_an_answer_granted_that_never_arrived_goes_back_when_the_next_session_says_so(store: Store) -> None:
    attach(store, WORKER)
    earlier = attach(store, SCHEDULER)
    kept = grants(store, earlier, 2)
    for count in (3, 4):
        grants(store, earlier, count)  # 2 is the last message whose answer arrives
    step(store, earlier, 4, commits=[commit(kept[0], 1)])
    store.hang_up(earlier)
    session = attach(store, SCHEDULER)
    said = store_pb2.Predecessor(token=earlier.token, answered=2)
    for _ in range(2):  # the second one comes to nothing
        step(store, session, predecessor=said)
        assert granted_bytes(store) == (1 + 3) * CHUNK_BYTES
        assert not store.watched(earlier)
    assert step(store, session, commits=[commit(kept[1], 2)]).outcomes == [store_pb2.OUTCOME_STORED]


def test_no_session_ends_one_that_is_connected_or_of_another_group(store: Store) -> None:
    earlier, session = attach(store), attach(store)
    grants(store, earlier, 3)
    said = store_pb2.Predecessor(token=earlier.token, answered=0)
    step(store, session, predecessor=said)
    step(store, earlier, predecessor=said)
    store.hang_up(earlier)
    step(store, session, predecessor=said)
    step(store, session, predecessor=store_pb2.Predecessor(token=b"nobody's"))
    assert granted_bytes(store) == 3 * CHUNK_BYTES
    assert store.watched(earlier)


def test_a_process_that_hangs_up_without_grants_is_forgotten_at_once(store: Store) -> None:
    session = attach(store)
    store.hang_up(session)
    assert not store.watched(session)
    worker, other = attach(store, WORKER, world_size=2, range_bytes=HALF), attach(store, SCHEDULER, world_size=2)
    store.hang_up(worker)
    assert not store.watched(worker)
    assert store.watched(other)


def test_a_session_that_hung_up_gets_nothing_more(store: Store) -> None:
    session = attach(store)
    store.hang_up(session)
    with pytest.raises(Unavailable, match=r"attach again"):
        step(store, session, grants_wanted=[1])
    assert granted_bytes(store) == 0


# -- fresh namespaces and probes ---------------------------------------------------------------------------------------


def test_a_fresh_namespace_hides_what_was_there_and_ends_writes_begun_before(store: Store) -> None:
    session = attach(store)
    before, running, kept = grants(store, session, 3)
    step(store, session, commits=[commit(before, 1)])
    reply = step(store, session, fresh_namespace=True, commits=[commit(running, 2)])
    assert reply.outcomes == [store_pb2.OUTCOME_NOT_GRANTED]
    assert reply.group.kinds[0].namespace_id not in (b"", digest(document()))
    assert found(store, session, 1) == MISS
    # The third grant is still the group's: a worker may be writing to it.
    assert granted_bytes(store) == 4096
    assert step(store, session, commits=[commit(kept, 3)]).outcomes == [store_pb2.OUTCOME_NOT_GRANTED]
    assert granted_bytes(store) == 0
    [after] = grants(store, session, 1)
    assert step(store, session, commits=[commit(after, 1)]).outcomes == [store_pb2.OUTCOME_STORED]
    # Another engine of the base namespace keeps what the first one had.
    assert found(store, attach(store), 1) == CPU


def test_probes_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROBES_MAX", 2)
    session = attach(store)
    for family in ("a", "b", "a"):
        step(store, session, probe=store_pb2.Probe(engine_family=family, hash_algorithm="h", value=b"\x01"))
    assert not session.group.refused
    for field in ("engine_family", "hash_algorithm"):
        with pytest.raises(LimitExceeded, match=r"longer than 128"):
            step(store, session, probe=store_pb2.Probe(**{field: "x" * 129}))
    with pytest.raises(LimitExceeded, match=r"longer than 128"):
        step(store, session, probe=store_pb2.Probe(value=bytes(129)))
    step(store, session, probe=store_pb2.Probe(engine_family="c", hash_algorithm="h", value=b"\x01"))
    assert "knows the keys of 2 kinds of engines already" in session.group.refused


def test_the_first_probe_wins_and_another_value_is_refused_with_both(store: Store) -> None:
    first, second, third = attach(store), attach(store), attach(store)
    probe = {"engine_family": "vllm", "hash_algorithm": "sha256_cbor"}
    assert not step(store, first, probe=store_pb2.Probe(**probe, value=b"\x01")).HasField("group")
    [at] = grants(store, second, 1)
    reply = step(
        store, second, probe=store_pb2.Probe(**probe, value=b"\x02"), grants_wanted=[1], commits=[commit(at, 1)]
    )
    assert "to 02," in reply.group.refused
    assert "on this node to 01," in reply.group.refused
    assert reply.outcomes == [store_pb2.OUTCOME_NOT_GRANTED]
    assert list(reply.grants[0].slots) == []
    assert granted_bytes(store) == 0
    other = store_pb2.Probe(engine_family="vllm", hash_algorithm="other", value=b"\x03")
    assert not step(store, third, probe=other).HasField("group")


# -- what operators ask ------------------------------------------------------------------------------------------------


def removed(store: Store, now_ms: int = 0, **fields: object) -> tuple[int, int, int]:
    removal = operations(store).begin_removal(admin_pb2.RemoveRequest(**fields), now_ms)
    while not operations(store).go_on(removal):
        pass
    return removal.chunks, removal.nbytes, removal.skipped_pinned


def test_age_is_counted_from_the_last_use(store: Store) -> None:
    session = attach(store)
    at = grants(store, session, 3)
    step(store, session, commits=[commit(ref, name) for name, ref in enumerate(at)], now_ms=1_000)
    step(store, session, touches=[store_pb2.Chain(tenant=TENANT, keys=[key(1)])], now_ms=5_000)
    idle = {
        chunk.key: chunk.idle_s
        for page in operations(store).chunks(admin_pb2.Selection(), 9, 8_000)
        for chunk in page.chunks
    }
    assert idle == {key(0): 7.0, key(1): 3.0, key(2): 7.0}
    assert removed(store, now_ms=8_000, older_than_ms=9_000) == (0, 0, 0)
    assert removed(store, now_ms=8_000, older_than_ms=7_000) == (0, 0, 0)
    assert removed(store, now_ms=8_000, older_than_ms=6_999) == (2, 2 * 4096, 0)
    assert (found(store, session, 0), found(store, session, 1)) == (MISS, CPU)


def test_a_touch_says_what_its_request_had_used_before() -> None:
    store = make_store(2 * 4096, eviction_policy="probation")
    session = attach(store)
    for name in (1, 2):
        step(store, session, commits=[commit(grants(store, session, 1)[0], name)])
    step(store, session, touches=[store_pb2.Chain(tenant=TENANT, keys=[key(2), key(1)], again=1)])
    step(store, session, commits=[commit(grants(store, session, 1)[0], 3)])
    assert [found(store, session, name) for name in (1, 2, 3)] == [CPU, MISS, CPU]  # 2 is younger, but used once


def test_a_commit_after_a_removal_of_what_it_covers_is_answered_not_granted(store: Store) -> None:
    session = attach(store)
    one, two = grants(store, session, 2)
    step(store, session, commits=[commit(one, 1)])
    assert removed(store, what=admin_pb2.Selection(salt="salt")) == (1, 4096, 0)
    assert step(store, session, commits=[commit(two, 2)]).outcomes == [store_pb2.OUTCOME_NOT_GRANTED]
    assert (found(store, session, 2), granted_bytes(store)) == (MISS, 0)


def test_lists_go_page_by_page() -> None:
    store = make_store(64 << 20)
    session = attach(store)
    for first in range(0, 300, 50):
        at = grants(store, session, 50)
        tenants = [tenant_id(TENANT_KEY, f"salt-{first + i}") for i in range(50)]
        step(
            store, session,
            commits=[commit(ref, first + i, tenants[i]) for i, ref in enumerate(at)],
        )  # fmt: skip
    pages = [len(page.usage) for page in operations(store).usage(admin_pb2.Selection())]
    assert pages == [128, 128, 44]
    pages = [len(page.chunks) for page in operations(store).chunks(admin_pb2.Selection(), 200, 0)]
    assert pages == [128, 72]
    [row] = [row for page in operations(store).usage(admin_pb2.Selection(salt="salt-7")) for row in page.usage]
    assert (row.chunks, row.bytes, row.tenant_id) == (1, 4096, tenant_id(TENANT_KEY, "salt-7"))
    [page] = operations(store).namespaces()
    assert [(one.namespace_id, one.document) for one in page.namespaces] == [
        (session.group.kinds[0].namespace, document())
    ]


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ({"namespace_id": b"n" * 16}, NotFound, f"no namespace {(b'n' * 16).hex()} here"),
        ({"namespace_id": b"n"}, ProtocolError, "has 16 bytes, not 1"),
        ({"tenant_id": b"t" * 16}, NotFound, f"tenant {(b't' * 16).hex()} has no chunk here"),
        ({"tenant_id": b""}, ProtocolError, "has 16 bytes, not 0"),
        ({"salt": NOBODY}, NotFound, f"tenant {tenant_id(TENANT_KEY, NOBODY).hex()}"),
        ({"salt": ""}, ProtocolError, "a salt is never empty"),
        ({"tier": "fs"}, NotFound, "no tier 'fs'; it has cpu"),
    ],
)
def test_selections_name_what_is_there(
    store: Store, what: dict[str, object], error: type[Exception], message: str
) -> None:
    selection = admin_pb2.Selection(**what)
    for ask in (
        lambda: list(operations(store).usage(selection)),
        lambda: list(operations(store).chunks(selection, 1, 0)),
        lambda: operations(store).begin_removal(admin_pb2.RemoveRequest(what=selection), 0),
    ):
        with pytest.raises(error, match=message):
            ask()
