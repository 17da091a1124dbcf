"""Between the tiers, with the real index and a lower tier whose every answer the test decides."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore import _native
from kvstore._native import CPU, FS, MISS, PENDING
from kvstore.movement import OWN_GROUP, PROMOTIONS_MAX, WAITING_MAX, WRITING_MAX, Movement
from kvstore.tiers.base import ChunkId, Memory, ReadDone, ReadOutcome, Released, WriteDone, WriteOutcome
from kvstore.tiers.cpu import CpuTier
from tests.unit.native_store import INDEX_KEY, INSTANCE, NAMESPACE, TENANT, key_of

CHUNK = 64 << 10
GROUP = 7


@dataclass(frozen=True)
class Stats:
    dropped: int = 0


@dataclass
class LowerTier:
    """Holds what it is told; ends reads and writes when it is told."""

    held: set[ChunkId] = field(default_factory=set)
    writes: list[tuple[ChunkId, Memory, WriteDone, Released]] = field(default_factory=list)
    reads: list[tuple[ChunkId, Memory, ReadDone, Released]] = field(default_factory=list)
    on_change: object = None

    async def ready(self) -> None: ...

    def contains(self, chunk: ChunkId) -> bool:
        return chunk in self.held

    def chunks(self) -> Iterator[tuple[ChunkId, int]]:
        return ((chunk, CHUNK) for chunk in list(self.held))

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        self.writes.append((chunk, memory, done, released))

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        self.reads.append((chunk, memory, done, released))

    def stats(self) -> Stats:
        return Stats()

    def end_write(self, *, stored: bool = True) -> None:
        chunk, _, done, released = self.writes.pop(0)
        if stored:
            self.held.add(chunk)
            self.on_change(chunk, True)  # type: ignore[operator]
        done(WriteOutcome.STORED if stored else WriteOutcome.SICK)
        released()

    def end_read(self, outcome: ReadOutcome = ReadOutcome.READ) -> None:
        _, _, done, released = self.reads.pop(0)
        done(outcome)
        released()


@dataclass
class Tiers:
    cpu: CpuTier
    fs: LowerTier
    movement: Movement

    def put(self, number: int) -> tuple[int, int]:
        """As the store does after a commit."""
        [(slot, generation)] = self.cpu.index.grant(GROUP, CHUNK, 1)
        commit = (slot, generation, TENANT, key_of(number), b"")
        assert self.cpu.index.commit(GROUP, NAMESPACE, [commit]) == [_native.STORED]
        self.movement.stored(chunk_of(number), slot, generation, CHUNK)
        return slot, generation

    def promote(self, *numbers: int, group: int = GROUP) -> None:
        self.movement.promote(group, NAMESPACE, TENANT, [key_of(number) for number in numbers], CHUNK)

    def shown(self, *numbers: int) -> list[int]:
        return list(self.cpu.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in numbers]))

    def below(self, *numbers: int) -> None:
        for number in numbers:
            self.fs.held.add(chunk_of(number))
            self.fs.on_change(chunk_of(number), True)  # type: ignore[operator]


def chunk_of(number: int) -> ChunkId:
    return ChunkId(NAMESPACE, TENANT, key_of(number))


def tiers_of(chunks: int) -> Tiers:
    cpu = CpuTier(cpu_bytes=chunks * CHUNK, index_bytes=1 << 20, index_key=INDEX_KEY, instance_id=INSTANCE)
    cpu.set_ready(cpu.arena_bytes)
    fs = LowerTier()
    movement = Movement(cpu, fs, lambda: 1_000)  # type: ignore[arg-type]
    asyncio.run(movement.show_found())
    return Tiers(cpu, fs, movement)


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    tiers = tiers_of(16)
    yield tiers
    assert tiers.cpu.index.problems() == []
    assert tiers.cpu.index.stats()["granted_bytes"] == tiers.movement.promoting_bytes


def test_a_committed_chunk_is_written_from_its_slot_which_stays_until_it_is_released(tiers: Tiers) -> None:
    slot, generation = tiers.put(1)
    [(chunk, memory, _, _)] = tiers.fs.writes
    assert (chunk, memory.nbytes) == (chunk_of(1), CHUNK)
    assert memory.address == tiers.cpu.arena.address + _native.slot_offset(slot, CHUNK, tiers.cpu.unit_bytes)
    assert slot not in [slot for slot, _ in tiers.cpu.index.grant(GROUP, CHUNK, 16)]
    tiers.fs.end_write()
    assert tiers.cpu.index.grant(GROUP, CHUNK, 1) == [(slot, generation + 1)]
    assert tiers.shown(1) == [FS]
    tiers.cpu.index.end_group(GROUP)


def test_a_chunk_evicted_while_it_waits_is_dropped_and_counted() -> None:
    tiers = tiers_of(16)
    for number in range(16):
        tiers.put(number)
    assert len(tiers.fs.writes) == 4  # a quarter of the arena
    for number in range(16, 28):
        tiers.put(number)
    assert tiers.movement.dropped == 0
    while tiers.fs.writes:
        tiers.fs.end_write()
    assert tiers.movement.dropped == 12
    assert len(tiers.fs.held) == 16
    assert asyncio.run(tiers.movement.drain(5))


def test_writes_are_bounded_and_a_full_queue_drops() -> None:
    tiers = tiers_of(4 * WRITING_MAX)
    slot, generation = tiers.put(0)
    for number in range(1, WAITING_MAX + 100):
        tiers.movement.stored(chunk_of(number), slot, generation, CHUNK)
    assert len(tiers.fs.writes) == WRITING_MAX
    assert tiers.movement.dropped == 100 - WRITING_MAX
    assert not asyncio.run(tiers.movement.drain(0))


def test_what_is_on_disk_already_is_not_written_again(tiers: Tiers) -> None:
    tiers.below(1)
    tiers.put(1)
    assert tiers.fs.writes == []


def test_a_promoted_chunk_is_pending_then_visible_and_leased_to_all_who_asked(tiers: Tiers) -> None:
    tiers.below(1, 2)
    tiers.promote(1, 3)
    tiers.promote(1, group=8)
    assert tiers.shown(1, 2, 3) == [PENDING, FS, MISS]
    assert len(tiers.fs.reads) == 1
    tiers.fs.end_read()
    assert tiers.shown(1) == [CPU]
    assert tiers.cpu.index.stats()["leases"] == 2
    tiers.promote(1)
    assert tiers.fs.reads == []
    assert tiers.fs.writes == []  # it came from there


def test_a_group_that_has_gone_gets_no_lease(tiers: Tiers) -> None:
    tiers.below(1)
    tiers.promote(1)
    tiers.movement.forget_group(GROUP)
    tiers.fs.end_read()
    assert (tiers.shown(1), tiers.cpu.index.stats()["leases"]) == ([CPU], 0)


def test_promotions_take_half_of_what_is_free_or_evictable_head_first(tiers: Tiers) -> None:
    tiers.below(*range(100, 120))
    refs = [tiers.put(number) for number in range(16)]
    while tiers.fs.writes:
        tiers.fs.end_write()
    assert tiers.cpu.index.lease(9, refs[:6], 10_000) == [True] * 6
    tiers.promote(*range(100, 120))
    assert tiers.shown(*range(100, 120)) == [PENDING] * 5 + [FS] * 15
    tiers.cpu.index.end_leases(9)


def test_so_many_promotions_at_once_and_no_more() -> None:
    tiers = tiers_of(4 * PROMOTIONS_MAX)
    tiers.below(*range(2 * PROMOTIONS_MAX))
    tiers.promote(*range(2 * PROMOTIONS_MAX))
    assert len(tiers.fs.reads) == PROMOTIONS_MAX


@pytest.mark.parametrize("outcome", [ReadOutcome.BUSY, ReadOutcome.SICK, ReadOutcome.ABSENT, ReadOutcome.DAMAGED])
def test_a_promotion_that_fails_gives_its_slot_back(tiers: Tiers, outcome: ReadOutcome) -> None:
    tiers.below(1)
    tiers.promote(1)
    if outcome in (ReadOutcome.ABSENT, ReadOutcome.DAMAGED):
        tiers.fs.held.clear()
        tiers.fs.on_change(chunk_of(1), False)  # type: ignore[operator]
    tiers.fs.end_read(outcome)
    assert tiers.shown(1) == [FS if tiers.fs.held else MISS]
    assert tiers.cpu.index.stats()["granted_bytes"] == 0


def test_a_late_read_keeps_its_slot_until_it_returns_but_nobody_waits(tiers: Tiers) -> None:
    tiers.below(1)
    tiers.promote(1)
    _, _, done, released = tiers.fs.reads.pop()
    done(ReadOutcome.LATE)
    assert tiers.shown(1) == [FS]
    tiers.promote(1)
    assert (tiers.fs.reads, tiers.shown(1)) == ([], [FS])
    assert tiers.movement.promoting_bytes == CHUNK
    released()
    assert tiers.movement.promoting_bytes == 0
    assert tiers.shown(1) == [FS]


def test_a_chunk_stored_while_it_is_promoted_is_there_once(tiers: Tiers) -> None:
    tiers.below(1)
    tiers.promote(1)
    slot, generation = tiers.put(1)
    assert tiers.shown(1) == [CPU]
    tiers.fs.end_read()
    assert tiers.cpu.index.stats()["chunks"] == 1
    assert tiers.cpu.index.begin_io(slot, generation)
    tiers.cpu.index.end_io(slot, generation)
    assert tiers.cpu.index.abort(OWN_GROUP, []) == 0
