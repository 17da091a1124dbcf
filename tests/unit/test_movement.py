"""Between the tiers, with the real index and a lower tier whose every answer the test decides."""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kvstore import _native
from kvstore._native import CPU, FS, MISS, PENDING
from kvstore.config import WritePolicy
from kvstore.decisions import Room
from kvstore.movement import OWN_GROUP, PROMOTIONS_MAX, WAITING_MAX, WRITING_MAX, Movement
from kvstore.tiers.base import ChunkId, Memory, ReadDone, ReadOutcome, Released, WriteDone, WriteOutcome
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.fs import Held
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
    room: bool = True
    writes: list[tuple[ChunkId, Memory, WriteDone, Released]] = field(default_factory=list)
    reads: list[tuple[ChunkId, Memory, ReadDone, Released]] = field(default_factory=list)
    on_change: object = None

    def touch(self, chunks: object) -> None: ...

    async def ready(self) -> None: ...

    def contains(self, chunk: ChunkId) -> bool:
        return chunk in self.held

    def chunks(self) -> Iterator[list[Held]]:
        yield [Held(chunk, CHUNK, 0.0) for chunk in self.held]

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        self.writes.append((chunk, memory, done, released))

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        self.reads.append((chunk, memory, done, released))

    def stats(self) -> Stats:
        return Stats()

    def has_room(self, nbytes: int) -> bool:
        assert nbytes == CHUNK
        return self.room

    def end_write(self, outcome: WriteOutcome = WriteOutcome.STORED) -> None:
        chunk, _, done, released = self.writes.pop(0)
        if outcome is WriteOutcome.STORED:
            self.held.add(chunk)
            self.on_change(chunk, True)  # type: ignore[operator]
        done(outcome)
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
    clock: list[int]

    def put(self, number: int, *, parent: int | None = None, memory_only: bool = False) -> tuple[int, int]:
        """As the store does after a commit."""
        [(slot, generation)] = self.cpu.index.grant(GROUP, CHUNK, 1)
        commit = (slot, generation, TENANT, key_of(number), b"" if parent is None else key_of(parent))
        assert self.cpu.index.commit(GROUP, NAMESPACE, [commit], self.clock[0]) == [_native.STORED]
        self.movement.stored(chunk_of(number), slot, generation, CHUNK, memory_only=memory_only)
        return slot, generation

    def touch(self, *numbers: int, worth_disk: int = 0) -> None:
        """As the store does."""
        keys = [key_of(number) for number in numbers]
        self.cpu.index.touch(NAMESPACE, TENANT, keys, self.clock[0])
        self.movement.touched(NAMESPACE, TENANT, keys, worth_disk=worth_disk)

    def written(self) -> list[int]:
        return [int.from_bytes(chunk.key, "big") for chunk, _, _, _ in self.fs.writes]

    def promote(self, *numbers: int, group: int = GROUP) -> None:
        self.movement.promote(group, NAMESPACE, TENANT, [key_of(number) for number in numbers], CHUNK)

    def shown(self, *numbers: int) -> list[int]:
        return list(self.cpu.index.lookup(NAMESPACE, TENANT, [key_of(number) for number in numbers]))

    def below(self, *numbers: int) -> None:
        for number in numbers:
            self.fs.held.add(chunk_of(number))
            self.fs.on_change(chunk_of(number), True)  # type: ignore[operator]

    def drained(self, outcome_of: Callable[[int], WriteOutcome]) -> bool:
        """As the daemon's stop does. Each chunk's write ends as `outcome_of` its number says."""

        async def drain() -> bool:
            draining = asyncio.create_task(self.movement.drain(60))
            while not draining.done():
                await asyncio.sleep(0)
                if self.fs.writes:
                    self.fs.end_write(outcome_of(self.written()[0]))
            return await draining

        return asyncio.run(drain())


def chunk_of(number: int) -> ChunkId:
    return ChunkId(NAMESPACE, TENANT, key_of(number))


_made: list[CpuTier] = []


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    """A tier keeps its own until its process ends, and this one goes on."""
    yield
    while _made:
        cpu = _made.pop()
        os.close(cpu.arena_fd)
        os.close(cpu.table_fd)


def tiers_of(chunks: int, *, index_bytes: int | None = None, lower_bytes: int = 1 << 30, **options: object) -> Tiers:
    cpu = CpuTier(
        cpu_bytes=chunks * CHUNK,
        index_bytes=index_bytes,
        index_key=INDEX_KEY,
        instance_id=INSTANCE,
        lower_bytes=lower_bytes,
        eviction_policy="lru",
    )
    _made.append(cpu)
    cpu.set_ready(cpu.arena_bytes)
    fs = LowerTier()
    clock = [1_000]
    movement = Movement(cpu, fs, lambda: clock[0], **options)  # type: ignore[arg-type]
    asyncio.run(movement.show_found())
    return Tiers(cpu, fs, movement, clock)


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
    granted = tiers.cpu.index.grant(GROUP, CHUNK, 16)
    assert slot not in [slot for slot, _ in granted]
    tiers.fs.end_write()
    assert tiers.cpu.index.grant(GROUP, CHUNK, 1) == [(slot, generation + 1)]
    assert tiers.shown(1) == [FS]
    tiers.cpu.index.abort(GROUP, [*granted, (slot, generation + 1)])


def test_a_chunk_evicted_while_it_waits_is_dropped_and_counted() -> None:
    tiers = tiers_of(16)
    for number in range(16):
        tiers.put(number)
    assert len(tiers.fs.writes) == 4  # a quarter of the arena
    for number in range(16, 28):
        tiers.put(number)
    assert tiers.movement.dropped == 0
    told: list[tuple[ChunkId, WriteOutcome | None, int]] = []
    tiers.movement.on_unwritten = lambda *what: told.append(what)
    while tiers.fs.writes:
        tiers.fs.end_write()
    assert tiers.movement.dropped == len(told) == 12
    assert {(outcome, at_ms) for _, outcome, at_ms in told} == {(None, tiers.clock[0])}
    assert not {chunk for chunk, _, _ in told} & tiers.fs.held
    assert len(tiers.fs.held) == 16
    assert asyncio.run(tiers.movement.drain(5))


def test_writes_are_bounded_and_a_full_queue_drops() -> None:
    tiers = tiers_of(4 * WRITING_MAX)
    told: list[tuple[ChunkId, WriteOutcome | None, int]] = []
    tiers.movement.on_unwritten = lambda *what: told.append(what)
    slot, generation = tiers.put(0)
    for number in range(1, WAITING_MAX + 100):
        tiers.movement.stored(chunk_of(number), slot, generation, CHUNK)
    assert len(tiers.fs.writes) == WRITING_MAX
    assert tiers.movement.dropped == len(told) == 100 - WRITING_MAX
    assert {outcome for _, outcome, _ in told} == {WriteOutcome.FULL}
    tiers.fs.end_write(WriteOutcome.LATE)
    assert told[-1] == (chunk_of(0), WriteOutcome.LATE, tiers.clock[0])
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
    [(*_, used_ms, _)], _ = tiers.cpu.index.chunks(0, steps=100, limit=100)
    assert used_ms == tiers.clock[0]  # or an operator's removal of what is old would take it first
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


# Policies


def test_a_chunk_that_came_back_while_its_old_place_waits_is_written_from_the_new_one() -> None:
    tiers = tiers_of(4 * WRITING_MAX)
    for number in range(WRITING_MAX + 1):
        old = tiers.put(number)
    removal = tiers.cpu.index.begin_removal(nbytes=CHUNK * (WRITING_MAX + 1))
    assert tiers.cpu.index.remove(removal, 1_000)
    new = tiers.put(WRITING_MAX)
    assert new != old
    while tiers.fs.writes:
        tiers.fs.end_write()
    assert chunk_of(WRITING_MAX) in tiers.fs.held
    assert tiers.movement.dropped == 0


def test_selective_writes_what_was_used_so_often_and_once() -> None:
    tiers = tiers_of(16, policy=WritePolicy.SELECTIVE, write_after_uses=3)
    for number in range(4):
        tiers.put(number)
    for _ in range(2):
        assert tiers.fs.writes == []
        tiers.clock[0] += 1_000
        tiers.touch(0, 1, 9)
    assert tiers.written() == [0, 1]
    tiers.touch(0, 1)
    tiers.fs.end_write()
    tiers.clock[0] += 1_000
    tiers.touch(0, 1)
    tiers.fs.end_write()
    tiers.touch(0, 1)
    assert tiers.fs.writes == []
    assert tiers.fs.held == {chunk_of(0), chunk_of(1)}
    assert tiers.movement.dropped == 0


def test_what_is_for_memory_only_is_written_once_a_later_use_finds_it_worth_it(tiers: Tiers) -> None:
    tiers.put(0)
    for number in (1, 2, 3):
        tiers.put(number, parent=number - 1, memory_only=True)
    assert tiers.written() == [0]
    tiers.touch(0, 1, 2, 3)
    assert tiers.written() == [0]
    tiers.touch(0, 1, 2, 3, worth_disk=3)
    assert tiers.written() == [0, 1, 2]
    for _ in range(3):
        tiers.fs.end_write()
    tiers.touch(0, 1, 2, 3, worth_disk=3)
    assert tiers.fs.writes == []
    assert tiers.fs.held == {chunk_of(number) for number in range(3)}


@pytest.mark.parametrize("policy", [WritePolicy.SELECTIVE, WritePolicy.WRITE_BACK])
def test_the_other_policies_have_their_own_rule_for_what_is_written(policy: WritePolicy) -> None:
    tiers = tiers_of(16, policy=policy, write_after_uses=3)
    tiers.put(0, memory_only=True)
    tiers.touch(0, worth_disk=1)
    assert tiers.written() == []
    assert tiers.movement.room(CHUNK) is Room.NOT_ASKED


def test_engines_are_told_whether_the_disk_has_room(tiers: Tiers) -> None:
    assert tiers.movement.room(CHUNK) is Room.FREE
    tiers.fs.room = False
    assert tiers.movement.room(CHUNK) is Room.FULL


def write_back_of(chunks: int) -> Tiers:
    return tiers_of(chunks, policy=WritePolicy.WRITE_BACK)


def test_write_back_writes_nothing_while_there_is_room() -> None:
    tiers = write_back_of(16)
    for number in range(14):
        tiers.put(number)
    tiers.movement.tick()
    assert tiers.fs.writes == []


def test_write_back_writes_what_would_be_evicted_next_and_keeps_it_until_it_is_written() -> None:
    tiers = write_back_of(16)
    tiers.put(0)
    for number in range(1, 16):
        tiers.put(number, parent=0)
    tiers.touch(0, 3)
    tiers.movement.tick()
    assert tiers.written() == [1, 2]  # an eighth of the arena
    tiers.put(16)  # a chunk that is being written is not evicted for it
    assert tiers.shown(1, 2, 4) == [CPU, CPU, MISS]
    tiers.fs.end_write()
    tiers.fs.end_write()
    tiers.put(17)
    tiers.put(18)
    assert tiers.shown(1, 2) == [FS, FS]
    assert tiers.movement.dropped == 1  # the one that was not written in time
    tiers.movement.tick()
    assert tiers.written() == [5, 6]


def test_write_back_goes_on_by_itself_until_enough_is_written() -> None:
    tiers = write_back_of(1_024)
    for number in range(1_024):
        tiers.put(number)
    tiers.movement.tick()
    assert len(tiers.fs.writes) == WRITING_MAX
    written = 0
    while tiers.fs.writes:
        tiers.fs.end_write()
        written += 1
    assert written == 128
    assert tiers.fs.held == {chunk_of(number) for number in range(128)}


def test_write_back_writes_ahead_where_the_table_is_full_before_the_arena() -> None:
    sized_for_512 = _native.Index.table_bytes_for(512, 1_024 * CHUNK, _native.Index.unit_bytes_for(1_024 * CHUNK))
    tiers = tiers_of(1_024, index_bytes=sized_for_512, lower_bytes=0, policy=WritePolicy.WRITE_BACK)
    for number in range(1_024):
        tiers.put(number)
    held = tiers.cpu.index.stats()["chunks"]
    assert held < 1_000
    tiers.movement.tick()
    assert len(tiers.fs.writes) == WRITING_MAX


@pytest.mark.parametrize("outcome", [WriteOutcome.SICK, WriteOutcome.LATE])
def test_write_back_leaves_a_disk_that_fails_alone_for_a_while(outcome: WriteOutcome) -> None:
    tiers = write_back_of(16)
    for number in range(16):
        tiers.put(number)
    tiers.movement.tick()
    while tiers.fs.writes:
        tiers.fs.end_write(outcome)
    tiers.movement.tick()
    assert tiers.fs.writes == []
    assert tiers.movement.dropped == 0  # nothing was evicted
    tiers.clock[0] += 1_000
    tiers.movement.tick()
    assert tiers.written() == [0, 1]


def test_write_back_asks_again_with_the_next_tick_where_a_chunk_found_no_room() -> None:
    """It may be one tenant's quota, and the next chunk another tenant's."""
    tiers = write_back_of(16)
    for number in range(16):
        tiers.put(number)
    tiers.movement.tick()
    assert tiers.written() == [0, 1]
    tiers.fs.end_write(WriteOutcome.FULL)
    tiers.fs.end_write(WriteOutcome.FULL)
    assert tiers.fs.writes == []
    tiers.movement.tick()
    assert tiers.written() == [0, 1]


def test_write_back_writes_all_the_others_at_the_stop_where_one_finds_no_room() -> None:
    tiers = write_back_of(256)
    for number in range(200):
        tiers.put(number)

    assert tiers.drained(lambda number: WriteOutcome.FULL if number == 3 else WriteOutcome.STORED)
    assert tiers.fs.held == {chunk_of(number) for number in range(200) if number != 3}


def test_write_back_writes_what_was_not_used_for_a_while() -> None:
    tiers = write_back_of(16)
    tiers.put(1)
    tiers.clock[0] += 59_000
    tiers.put(2)
    tiers.movement.tick()
    assert tiers.fs.writes == []
    tiers.clock[0] += 1_001
    tiers.movement.tick()
    assert tiers.written() == [1]


def test_write_back_writes_everything_when_the_daemon_stops() -> None:
    tiers = write_back_of(256)
    for number in range(200):
        tiers.put(number)

    assert tiers.drained(lambda _: WriteOutcome.STORED)
    assert len(tiers.fs.held) == 200


def test_write_back_ends_its_last_writes_with_the_first_that_fails() -> None:
    tiers = write_back_of(256)
    for number in range(200):
        tiers.put(number)

    assert not tiers.drained(lambda _: WriteOutcome.SICK)


def test_what_the_lower_tier_has_without_a_hint_in_the_table_is_not_asked_for_again() -> None:
    tiers = write_back_of(16)
    for number in range(16):
        tiers.put(number)
    tiers.movement.tick()
    for number in (0, 1):
        tiers.fs.held.add(chunk_of(number))
        tiers.fs.end_write(WriteOutcome.PRESENT)
    tiers.movement.tick()
    assert tiers.fs.writes == []


def test_what_nobody_waits_for_any_more_lands_without_a_lease_and_is_timed_all_the_same(tiers: Tiers) -> None:
    keys = [key_of(name) for name in range(3)]
    tiers.fs.held |= {ChunkId(NAMESPACE, TENANT, key) for key in keys}
    told: list[tuple[int, int, float]] = []
    tiers.movement.on_read = lambda *report: told.append(report)
    tiers.movement.promote(GROUP, NAMESPACE, TENANT, keys, CHUNK)
    tiers.movement.promote(GROUP, NAMESPACE, TENANT, keys[:2], CHUNK, waited=False)
    for _ in keys:
        assert not told
        tiers.fs.end_read()
    assert tiers.cpu.index.stats()["pinned_bytes"] == CHUNK
    [(group, chunks, seconds)] = told
    assert (group, chunks) == (GROUP, 3)
    assert seconds > 0
