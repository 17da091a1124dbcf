"""A group with several kinds of chunks: what belongs to one kind is never found, committed or counted as another's."""

from collections.abc import Iterator

import pytest

from kvstore import limits
from kvstore.errors import LimitExceeded, NamespaceMismatch, ProtocolError
from kvstore.namespace import digest, seed_fingerprint
from kvstore.rpc.v1 import store_pb2
from kvstore.store import Session, Store
from tests.unit.test_store import (
    SCHEDULER,
    TENANT,
    WORKER,
    commit,
    commits,
    document,
    key,
    make_store,
    operations,
    slots_of,
    step,
)

SIZES = (4096, 3 * 4096)  # of chunks
HALVES = tuple(size // 2 for size in SIZES)


@pytest.fixture
def store() -> Iterator[Store]:
    store = make_store()
    yield store
    assert store.problems() == []


def kinds(
    sizes: tuple[int, ...] = SIZES, offsets: tuple[int, ...] = (0, 0), ranges: tuple[int, ...] = SIZES, **fields: object
) -> list[store_pb2.Kind]:
    return [
        store_pb2.Kind(
            namespace_document=document(size, layers=f"of group {i}", **fields),
            chunk_bytes=size,
            range_offset=offset,
            range_bytes=nbytes,
        )
        for i, (size, offset, nbytes) in enumerate(zip(sizes, offsets, ranges, strict=True))
    ]


def attach(store: Store, role: store_pb2.Role, brought: list[store_pb2.Kind], **fields: object) -> Session:
    session = store.connect(pid=1, uid=0)
    request: dict[str, object] = {"role": role, "group": "engine", "world_size": 1, "kinds": brought}
    request |= {"seed_fingerprint": seed_fingerprint("0"), "seed_shown": "0"}
    try:
        store.attach(session, store_pb2.AttachRequest(**(request | fields)))
    except Exception:
        store.hang_up(session)
        raise
    return session


@pytest.fixture
def scheduler(store: Store) -> Session:
    attach(store, WORKER, kinds())
    return attach(store, SCHEDULER, [])


def found(store: Store, session: Session, kind: int, name: int) -> int:
    assert session.group is not None
    namespace = session.group.kinds[kind].namespace
    request = store_pb2.LookupRequest(namespace_id=namespace, tenant=TENANT, keys=[key(name)])
    return b"".join(store.lookup(request))[0]


def test_the_scheduler_learns_namespace_and_size_of_each_kind(store: Store, scheduler: Session) -> None:
    state = store.group_state(scheduler.group)
    assert state.complete
    assert [(kind.namespace_id, kind.chunk_bytes) for kind in state.kinds] == [
        (digest(brought.namespace_document), brought.chunk_bytes) for brought in kinds()
    ]


def test_a_commit_belongs_to_the_kind_that_its_slot_was_granted_for(store: Store, scheduler: Session) -> None:
    reply = step(store, scheduler, grants_wanted=[2, 1])
    assert [len(grants.slots) for grants in reply.grants] == [2, 1]
    [first, second], [third] = map(slots_of, reply.grants)
    reply = step(store, scheduler, commits=[commits({7: third, 8: first}), commit(second, 7)])
    assert list(reply.outcomes) == [store_pb2.OUTCOME_STORED] * 3
    assert [found(store, scheduler, kind, name) for kind, name in [(0, 7), (0, 8), (1, 7), (1, 8)]] == [1, 1, 1, 0]


def test_grants_of_one_kind_only(store: Store, scheduler: Session) -> None:
    reply = step(store, scheduler, grants_wanted=[0, 2])
    assert [(len(grants.slots), grants.short) for grants in reply.grants] == [(0, 0), (2, 0)]
    step(store, scheduler, aborts=slots_of(reply.grants[1]))
    assert operations(store).stats(0).tiers[0].granted_bytes == 0


def test_kinds_of_one_group_share_its_part_of_the_arena() -> None:
    store = make_store(64 << 20)
    sizes = (32 << 10, 96 << 10)
    attach(store, WORKER, kinds(sizes, (0, 0), sizes))
    session = attach(store, SCHEDULER, [])
    sixteenth = (64 << 20) // 16
    reply = step(store, session, grants_wanted=[10_000, 10_000])
    held = [len(grants.slots) for grants in reply.grants]
    assert held == [sixteenth // sizes[0], limits.GRANTS_PER_KIND_MIN]
    assert [grants.short for grants in reply.grants] == [store_pb2.OUTCOME_NOT_GRANTED] * 2
    assert store.problems() == []


def test_a_group_is_complete_when_the_ranges_of_every_kind_tile(store: Store) -> None:
    attach(store, WORKER, kinds(ranges=HALVES), world_size=2)
    with pytest.raises(NamespaceMismatch, match=r"own 6144 of a chunk's 12288 bytes"):
        attach(store, WORKER, kinds(offsets=(HALVES[0], 0), ranges=HALVES), world_size=2, rank=1)
    scheduler = attach(store, SCHEDULER, [], world_size=2)
    assert not store.group_state(scheduler.group).complete
    attach(store, WORKER, kinds(offsets=HALVES, ranges=HALVES), world_size=2, rank=1)
    assert store.group_state(scheduler.group).complete


def test_ranks_with_other_kinds_are_refused_with_the_difference(store: Store) -> None:
    attach(store, WORKER, kinds(ranges=HALVES), world_size=2)
    with pytest.raises(NamespaceMismatch, match=r"this process has 1 kinds of chunks and group engine has 2"):
        attach(store, WORKER, kinds(offsets=HALVES, ranges=HALVES)[:1], world_size=2, rank=1)
    with pytest.raises(NamespaceMismatch, match=r"window: 1 here, '<missing>' in the group|window: 1 here"):
        attach(store, WORKER, kinds(offsets=HALVES, ranges=HALVES, window=1), world_size=2, rank=1)


def test_kinds_that_nothing_tells_apart_are_refused(store: Store) -> None:
    with pytest.raises(ProtocolError, match="two kinds of one group have one namespace document"):
        attach(store, WORKER, [kinds()[0], kinds()[0]])


def test_a_client_has_one_kind_and_an_engine_at_most_so_many(store: Store) -> None:
    with pytest.raises(ProtocolError, match="a client brings 1 to 1 kinds of chunks, not 2"):
        attach(store, store_pb2.ROLE_CLIENT, kinds())
    with pytest.raises(ProtocolError, match="a worker brings 1 to 32 kinds of chunks, not 0"):
        attach(store, WORKER, [])
    many = (4096,) * (limits.KINDS_PER_GROUP_MAX + 1)
    with pytest.raises(ProtocolError, match="1 to 32 kinds of chunks, not 33"):
        attach(store, WORKER, kinds(many, many, many))


def test_size_classes_of_all_kinds_count_and_nothing_stays_of_a_refusal() -> None:
    store = make_store(64 << 20)
    many = tuple(4096 * (i + 1) for i in range(32))
    none = (0,) * 32
    other = attach(store, WORKER, kinds((4096 * 40,), (0,), (4096 * 40,)))
    with pytest.raises(LimitExceeded, match="size class 33"):
        attach(store, WORKER, kinds(many, none, many), group="another")
    store.hang_up(other)
    attach(store, WORKER, kinds(many[:31], none[:31], many[:31]), group="another")


def test_a_message_names_only_kinds_that_the_group_has(store: Store, scheduler: Session) -> None:
    chain = store_pb2.Chain(tenant=TENANT, keys=[key(1)], kind=2)
    for fields in ({"grants_wanted": [0, 0, 1]}, {"touches": [chain]}, {"promotes": [chain]}):
        with pytest.raises(ProtocolError, match="names kind 2 of chunks, and the group has 2"):
            step(store, scheduler, **fields)


def test_a_scheduler_without_workers_yet_is_answered_not_granted(store: Store) -> None:
    scheduler = attach(store, SCHEDULER, [])
    chain = store_pb2.Chain(tenant=TENANT, keys=[key(1)])
    reply = step(store, scheduler, grants_wanted=[1], touches=[chain])
    assert [grants.short for grants in reply.grants] == [store_pb2.OUTCOME_NOT_GRANTED]


def test_a_move_to_fresh_namespaces_moves_every_kind(store: Store, scheduler: Session) -> None:
    reply = step(store, scheduler, grants_wanted=[1, 2])
    [one], [two, running] = map(slots_of, reply.grants)
    step(store, scheduler, commits=[commit(one, 1), commit(two, 1)])
    before = {kind.namespace_id for kind in store.group_state(scheduler.group).kinds}
    reply = step(store, scheduler, fresh_namespace=True, commits=[commit(running, 2)])
    assert list(reply.outcomes) == [store_pb2.OUTCOME_NOT_GRANTED]
    after = {kind.namespace_id for kind in reply.group.kinds}
    assert len(after) == 2
    assert not before & after
    assert [found(store, scheduler, kind, 1) for kind in (0, 1)] == [0, 0]
    assert operations(store).stats(0).tiers[0].granted_bytes == 0


def test_a_decision_is_explained_with_the_namespace_of_its_kind(store: Store, scheduler: Session) -> None:
    """One of a kind that is not there (yet) harms nobody."""
    decisions = [store_pb2.Decision(number=1 + kind, request=f"request-{kind}", kind=kind) for kind in range(3)]
    step(store, scheduler, decisions=decisions)
    explained = [next(store.explanations.of_request(f"request-{kind}", 0)).namespace_id for kind in range(3)]
    assert explained == [*(digest(brought.namespace_document) for brought in kinds()), b""]
