"""What operators' calls do over several turns of the loop, with the real index and a lower tier led by the test."""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from kvstore import _native, limits, server
from kvstore._native import CPU, FS, MISS
from kvstore.movement import Movement
from kvstore.namespace import canonical_json, seed_fingerprint
from kvstore.operations import Operations
from kvstore.rpc.v1 import admin_pb2, store_pb2
from kvstore.service import Admin, Sessions
from kvstore.store import Session, Store
from kvstore.tiers.base import ChunkId, Removed, Scope, WriteOutcome
from kvstore.tiers.cpu import CpuTier
from tests.unit.native_store import INDEX_KEY, INSTANCE, NAMESPACE, TENANT, key_of
from tests.unit.test_movement import CHUNK, LowerTier, chunk_of

GROUP = 7
CHUNKS = 16
TURNS = 100


class Aborted(Exception):
    pass


@dataclass
class Context:
    token: bytes

    def invocation_metadata(self) -> object:
        return ((limits.TOKEN_METADATA_KEY, self.token.hex()),)

    async def abort(self, code: object, text: str, _: object) -> None:
        raise Aborted(f"{code}: {text}")


@dataclass
class StreamContext(Context):
    """Of one step stream. gRPC fails where a status is sent while a message is on its way."""

    requests: "asyncio.Queue[object]" = field(default_factory=asyncio.Queue)
    written: asyncio.Event = field(default_factory=asyncio.Event)  # until then a message is on its way
    writes: int = 0
    ended: bool = False

    async def read(self) -> object:
        return await self.requests.get()

    async def write(self, _: object) -> None:
        assert not self.writes, "one message at a time"
        self.writes += 1
        await self.written.wait()
        self.writes -= 1

    async def abort(self, code: object, text: str, _: object) -> None:
        assert not self.writes, "a status beside a message"
        self.ended = True
        raise Aborted(f"{code}: {text}")

    def done(self) -> bool:
        return self.ended


@dataclass
class Fs(LowerTier):
    """Forgets at once what is removed, and says so when it is told."""

    name: str = "fs"
    used: int = 0
    removals: list[Callable[[Removed], None]] = field(default_factory=list)

    def holds(self, namespace: bytes | None, tenant: bytes | None) -> bool:
        return any(Scope(namespace, tenant).covers(chunk) for chunk in self.held)

    def remove(self, scope: Scope, done: Callable[[Removed], None], **_: object) -> None:
        for chunk in [chunk for chunk in self.held if scope.covers(chunk)]:
            self.held.remove(chunk)
            self.on_change(chunk, False)  # type: ignore[operator]
        self.removals.append(done)

    def set_quota(self, *_: object) -> int:
        return self.used


class Place:
    def __init__(self) -> None:
        self.cpu = CpuTier(
            cpu_bytes=CHUNKS * CHUNK, index_bytes=None, index_key=INDEX_KEY, instance_id=INSTANCE, lower_bytes=1 << 30
        )
        self.cpu.set_ready(self.cpu.arena_bytes)
        self.index = self.cpu.index
        self.fs = Fs()
        self.movement = Movement(self.cpu, self.fs, lambda: 1_000)  # type: ignore[arg-type]
        self.store = Store(
            self.cpu, instance_id=INSTANCE, index_key=INDEX_KEY, tenant_key=b"k" * 32, hash_seed="0",
            require_cache_salt=False, movement=self.movement,
        )  # fmt: skip
        self.operations = Operations(self.store, self.cpu, self.movement, started_ms=0)
        self.keeping = self._nothing
        self.admin = Admin(
            self.store, self.operations, keep_quotas=self._keep, drop_namespace=lambda _: self._nothing()
        )
        operator = self.store.connect(pid=os.getpid(), uid=os.geteuid())
        self.store.attach(operator, store_pb2.AttachRequest(role=store_pb2.ROLE_ADMIN))
        self.context = Context(operator.token)

    async def _nothing(self) -> None: ...

    async def _keep(self) -> None:
        await self.keeping()

    def put(self, number: int) -> int:
        """What came of its commit."""
        [(slot, generation)] = self.index.grant(GROUP, CHUNK, 1)
        [code] = self.index.commit(GROUP, NAMESPACE, [(slot, generation, TENANT, key_of(number), b"")], 1_000)
        return code

    def below(self, number: int) -> None:
        self.fs.held.add(chunk_of(number))
        self.fs.on_change(chunk_of(number), True)  # type: ignore[operator]

    def shown(self, number: int) -> int:
        return self.index.lookup(NAMESPACE, TENANT, [key_of(number)])[0]

    def removal(self) -> "asyncio.Task[admin_pb2.RemoveReply]":
        what = admin_pb2.Selection(tenant_id=TENANT)
        return asyncio.create_task(self.admin.Remove(admin_pb2.RemoveRequest(what=what), self.context))

    def quota(self, chunks: int) -> "asyncio.Task[admin_pb2.RemoveReply]":
        what = admin_pb2.Selection(tenant_id=TENANT)
        request = admin_pb2.SetQuotaRequest(what=what, bytes=chunks * CHUNK)
        return asyncio.create_task(self.admin.SetQuota(request, self.context))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(limits, "REMOVAL_STEPS_PER_SLICE", 1)
    monkeypatch.setattr(limits, "LISTING_STEPS_PER_SLICE", 1)
    place = Place()
    yield place
    assert place.index.problems() == []
    os.close(place.cpu.arena_fd)
    os.close(place.cpu.table_fd)


async def turns(until: Callable[[], object]) -> None:
    for _ in range(TURNS):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


def test_nothing_comes_up_from_disk_behind_a_removal_from_both_tiers(place: Place) -> None:
    async def scene() -> None:
        for number in range(8):
            assert place.put(number) == _native.STORED
        place.below(100)
        place.below(101)
        place.movement.promote(GROUP, NAMESPACE, TENANT, [key_of(101)], CHUNK)
        other = ChunkId(NAMESPACE, b"o" * 16, key_of(100))
        place.fs.held.add(other)
        removing = place.removal()
        await turns(lambda: place.shown(0) == MISS)
        assert place.shown(7) == CPU  # it has only begun
        place.movement.promote(GROUP, NAMESPACE, TENANT, [key_of(100)], CHUNK)
        place.movement.promote(GROUP, NAMESPACE, other.tenant, [key_of(100)], CHUNK)
        await turns(lambda: place.fs.removals)
        while place.fs.reads:
            place.fs.end_read()
        place.fs.removals.pop()(Removed(2, 2 * CHUNK))
        assert [tier.chunks for tier in (await removing).by_tier] == [8, 2]
        assert [place.shown(number) for number in (100, 101)] == [MISS, MISS]
        assert list(place.index.lookup(NAMESPACE, other.tenant, [other.key])) == [CPU]
        place.below(100)  # and what is stored later does
        place.movement.promote(GROUP, NAMESPACE, TENANT, [key_of(100)], CHUNK)
        place.fs.end_read()
        assert place.shown(100) == CPU

    asyncio.run(scene())


def test_a_removal_that_is_given_up_keeps_nothing_below(place: Place) -> None:
    async def scene() -> None:
        for number in range(8):
            assert place.put(number) == _native.STORED
        place.below(100)
        removing = place.removal()
        await turns(lambda: place.shown(0) == MISS)
        removing.cancel()
        await asyncio.wait([removing])
        assert place.shown(100) == FS
        place.movement.promote(GROUP, NAMESPACE, TENANT, [key_of(100)], CHUNK)
        place.fs.end_read()
        assert place.shown(100) == CPU

    asyncio.run(scene())


def test_a_quota_is_kept_and_in_order_though_its_removal_from_disk_fails(place: Place) -> None:
    kept: list[int] = []

    async def keep() -> None:
        kept.extend(nbytes for _, _, nbytes in place.operations.quotas)

    async def scene() -> None:
        for number in range(4):
            assert place.put(number) == _native.STORED
        place.keeping = keep
        place.fs.used = 5 * CHUNK
        setting = place.quota(4)
        await turns(lambda: place.fs.removals)
        place.fs.removals.pop()(Removed(1, CHUNK, "Input/output error"))
        with pytest.raises(Aborted, match="repeat the command when the disk is well"):
            await setting
        assert kept == [4 * CHUNK, 4 * CHUNK]
        assert place.put(100) == _native.STORED
        assert (place.shown(0), place.shown(1)) == (MISS, CPU)

    asyncio.run(scene())


def test_a_quota_that_cannot_be_kept_holds_all_the_same(place: Place) -> None:
    async def fail() -> None:
        raise OSError("Input/output error")

    async def scene() -> None:
        for number in range(4):
            assert place.put(number) == _native.STORED
        place.keeping = fail
        with pytest.raises(Aborted, match="could not be kept for the next one"):
            await place.quota(2)
        assert [place.shown(number) for number in range(4)] == [MISS, MISS, CPU, CPU]

    asyncio.run(scene())


def test_the_order_that_a_quota_needs_is_made_though_the_operator_hangs_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoSocket:
        def sweep(self) -> None: ...

    async def scene() -> None:
        for number in range(4):
            assert place.put(number) == _native.STORED
        setting = place.quota(4)
        await asyncio.sleep(0)
        setting.cancel()
        await asyncio.wait([setting])
        assert not place.index.order_for_quotas(0)
        monkeypatch.setattr(server, "QUOTA_ORDER_INTERVAL_S", 0)
        tasks = server._in_background(place.store, place.operations, NoSocket())  # type: ignore[arg-type]
        await turns(lambda: place.index.order_for_quotas(0))
        for task in tasks:
            task.cancel()
        assert place.put(100) == _native.STORED
        assert (place.shown(0), place.shown(1)) == (MISS, CPU)

    asyncio.run(scene())


def test_a_removal_takes_what_is_being_written_to_disk_and_skips_only_what_is_leased(place: Place) -> None:
    async def scene() -> None:
        await place.movement.show_found()
        for number in range(4):
            [(slot, generation)] = place.index.grant(GROUP, CHUNK, 1)
            commit = (slot, generation, TENANT, key_of(number), b"")
            assert place.index.commit(GROUP, NAMESPACE, [commit], 1_000) == [_native.STORED]
            place.movement.stored(chunk_of(number), slot, generation, CHUNK)
        place.index.lease(GROUP, [(slot, generation)], 10_000)
        assert len(place.fs.writes) == 4
        removing = place.removal()
        await turns(lambda: place.fs.removals)
        while place.fs.writes:
            place.fs.end_write(WriteOutcome.ABORTED)
        place.fs.removals.pop()(Removed(0, 0))
        [cpu, _] = (await removing).by_tier
        assert (cpu.chunks, cpu.skipped_pinned) == (3, 1)
        assert [place.shown(number) for number in range(4)] == [MISS, MISS, MISS, CPU]
        assert place.index.stats()["io_bytes"] == 0

    asyncio.run(scene())


def test_a_removal_from_disk_drops_what_waits_to_be_written_there(place: Place) -> None:
    for number in range(2):  # until the tier is warm they wait
        [(slot, generation)] = place.index.grant(GROUP, CHUNK, 1)
        commit = (slot, generation, TENANT, key_of(number), b"")
        assert place.index.commit(GROUP, NAMESPACE, [commit], 1_000) == [_native.STORED]
        place.movement.stored(chunk_of(number), slot, generation, CHUNK)
    place.movement.remove(Scope(chunks=frozenset({chunk_of(0)})), lambda _: None)
    asyncio.run(place.movement.show_found())
    assert [chunk for chunk, *_ in place.fs.writes] == [chunk_of(1)]
    assert place.movement.dropped == 0
    place.fs.end_write()


def client_with_a_grant(place: Place) -> Session:
    """What it holds outlives its connection, so its group does too."""
    document = canonical_json({"chunk_bytes": CHUNK, "seed_fingerprint": seed_fingerprint("0").hex()})
    session = place.store.connect(pid=1, uid=0)
    kind = store_pb2.Kind(chunk_bytes=CHUNK, namespace_document=document)
    place.store.attach(
        session,
        store_pb2.AttachRequest(
            role=store_pb2.ROLE_CLIENT, kinds=[kind], seed_fingerprint=seed_fingerprint("0"), seed_shown="0"
        ),
    )
    place.store.step(session, store_pb2.StepRequest(number=1, instance_id=INSTANCE, grants_wanted=[1]), 1_000)
    assert session.group is not None
    assert session.group.granted
    return session


@pytest.mark.parametrize("ends", ["refused", "hung up"])
def test_a_stream_does_not_end_while_the_groups_state_is_on_its_way(place: Place, ends: str) -> None:
    """As where it replaced another one: what that one was told last is not known, so it is told at once."""

    async def scene() -> None:
        session = client_with_a_grant(place)
        context = StreamContext(session.token)
        sessions = Sessions(place.store, None)  # type: ignore[arg-type]
        stream = asyncio.create_task(sessions.Step(None, context))  # type: ignore[arg-type]
        await turns(lambda: context.writes)
        context.requests.put_nowait(
            store_pb2.StepRequest(number=9, instance_id=INSTANCE) if ends == "refused" else grpc.aio.EOF
        )
        await turns(context.requests.empty)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not stream.done()
        context.written.set()
        if ends == "refused":
            with pytest.raises(Aborted, match="message number 9 after 1"):
                await stream
        else:
            await stream
        assert (context.writes, session.on_group) == (0, None)
        place.store.hang_up(session)

    asyncio.run(scene())


def test_leases_end_with_the_last_connection_though_grants_do_not(place: Place) -> None:
    session = client_with_a_grant(place)
    assert session.group is not None
    [(slot, generation)] = place.index.grant(GROUP, CHUNK, 1)
    place.index.commit(GROUP, NAMESPACE, [(slot, generation, TENANT, key_of(0), b"")], 1_000)
    assert place.index.lease(session.group.number, [(slot, generation)], 10_000) == [True]
    place.store.hang_up(session)
    assert place.store.watched(session)
    stats = place.index.stats()
    assert (stats["leases"], stats["grants"]) == (0, 1)


def test_a_group_whose_last_connection_has_ended_gets_no_lease_of_what_it_asked_for(place: Place) -> None:
    session = client_with_a_grant(place)
    assert session.group is not None
    place.below(100)
    place.movement.promote(session.group.number, NAMESPACE, TENANT, [key_of(100)], CHUNK)
    place.store.hang_up(session)
    place.fs.end_read()
    assert (place.shown(100), place.index.stats()["leases"]) == (CPU, 0)


def test_what_the_daemon_does_by_itself_goes_on_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat that stopped would leave every engine without the store."""
    calls = 0

    def act() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("once")

    async def several() -> None:
        task = asyncio.create_task(server._every(0, act))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(several())
    assert calls > 1
    assert "once" in caplog.text
