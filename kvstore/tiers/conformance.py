"""What every `Tier` must do, as functions anyone can run against one; and a tier in memory to be used as a fake.

Each check is a coroutine that takes a `Bench`: a tier that is ready, memory to use with it, and how big a chunk is.
"""

import asyncio
import ctypes
import itertools
import mmap
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvstore.tiers.base import (
    ChunkId,
    Memory,
    ReadDone,
    ReadOutcome,
    Released,
    Removed,
    Scope,
    Tier,
    TierStats,
    WriteDone,
    WriteOutcome,
)

PAGE_BYTES = 4096

T = TypeVar("T")


class Memories:
    """A region cut into places for one chunk each, as the arena would be."""

    def __init__(self, count: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.count = count
        self._stride = -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES
        self._map = mmap.mmap(-1, count * self._stride)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def region(self) -> tuple[int, int]:
        return self.address, len(self._map)

    def place(self, number: int) -> Memory:
        return Memory(self.address + number % self.count * self._stride, self.chunk_bytes)

    def fill(self, number: int, content: bytes) -> Memory:
        assert len(content) == self.chunk_bytes
        start = number % self.count * self._stride
        self._map[start : start + self.chunk_bytes] = content
        return self.place(number)

    def content(self, number: int) -> bytes:
        start = number % self.count * self._stride
        return self._map[start : start + self.chunk_bytes]


@dataclass
class Bench:
    """`capacity_chunks`: more than the tier can ever hold. `damage`: spoils a chunk's bytes where they lie, or None
    where nobody would see it. `removes_chunks`: whether a removal can name single chunks."""

    tier: Tier
    memories: Memories
    capacity_chunks: int
    damage: Callable[[ChunkId], Awaitable[None]] | None = None
    removes_chunks: bool = True

    def scope_of(self, chunk: ChunkId) -> Scope:
        """The narrowest that the tier knows."""
        if self.removes_chunks:
            return Scope(chunks=frozenset({chunk}))
        return Scope(chunk.namespace, chunk.tenant)

    @property
    def chunk_bytes(self) -> int:
        return self.memories.chunk_bytes

    def content(self, chunk: ChunkId) -> bytes:
        """What every check stores under this chunk: no two chunks' bytes are alike."""
        return random.Random(chunk.key + chunk.tenant + chunk.namespace).randbytes(self.chunk_bytes)

    async def write(self, chunk: ChunkId, place: int = 0, content: bytes | None = None) -> WriteOutcome:
        memory = self.memories.fill(place, self.content(chunk) if content is None else content)
        return await outcome_of(self.tier.write, chunk, memory)

    async def read(self, chunk: ChunkId, place: int = 0) -> tuple[ReadOutcome, bytes]:
        """The outcome, and the bytes where it is READ."""
        self.memories.fill(place, bytes(self.chunk_bytes))
        memory = self.memories.place(place)
        outcome = await outcome_of(self.tier.read, chunk, memory)
        return outcome, self.memories.content(place) if outcome is ReadOutcome.READ else b""

    async def remove(self, scope: Scope) -> Removed:
        removed: asyncio.Future[Removed] = asyncio.get_running_loop().create_future()
        self.tier.remove(scope, removed.set_result)
        return await removed

    def assert_right(self, chunk: ChunkId, outcome: ReadOutcome, content: bytes) -> None:
        """The one rule: a read may miss, but it never brings anything else."""
        if outcome is ReadOutcome.READ:
            assert content == self.content(chunk), f"wrong bytes for {chunk.key!r}"


async def outcome_of(
    start: Callable[[ChunkId, Memory, Callable[[T], None], Released], None], chunk: ChunkId, memory: Memory
) -> T:
    """Starts a tier's read or write and waits until its memory is released; checks the order of the two calls."""
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    released: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(result: T) -> None:
        assert not released.done(), "released before done"
        outcome.set_result(result)

    def is_released() -> None:
        assert outcome.done(), "released before done"
        released.set_result(None)

    start(chunk, memory, done, is_released)
    assert not outcome.done(), "done inside the call"
    await released
    return outcome.result()


def chunk_id(number: int, *, namespace: int = 0, tenant: int = 0) -> ChunkId:
    return ChunkId(
        namespace.to_bytes(16, "big"), tenant.to_bytes(16, "big"), b"key-of-the-chunk" + number.to_bytes(8, "big")
    )


async def check_round_trip(bench: Bench) -> None:
    chunks = [chunk_id(number) for number in range(4)]
    for chunk in chunks:
        assert not bench.tier.contains(chunk)
        assert await bench.write(chunk) is WriteOutcome.STORED
        assert bench.tier.contains(chunk)
    for chunk in chunks:
        assert await bench.read(chunk) == (ReadOutcome.READ, bench.content(chunk))
    stats = bench.tier.stats()
    assert stats.chunks == len(chunks)
    assert stats.used_bytes >= len(chunks) * bench.chunk_bytes


async def check_absent(bench: Bench) -> None:
    assert not bench.tier.contains(chunk_id(0))
    assert await bench.read(chunk_id(0)) == (ReadOutcome.ABSENT, b"")
    assert await bench.write(chunk_id(0)) is WriteOutcome.STORED
    for stranger in (chunk_id(0, tenant=1), chunk_id(0, namespace=1), chunk_id(1)):
        assert not bench.tier.contains(stranger)
        assert await bench.read(stranger) == (ReadOutcome.ABSENT, b"")


async def check_duplicate(bench: Bench) -> None:
    """The first of two writes wins, also when both are under way."""
    chunk = chunk_id(0)
    first = bench.memories.fill(0, bench.content(chunk))
    second = bench.memories.fill(1, bytes(bench.chunk_bytes))
    outcomes = await asyncio.gather(
        outcome_of(bench.tier.write, chunk, first),
        outcome_of(bench.tier.write, chunk, second),
    )
    assert list(outcomes) == [WriteOutcome.STORED, WriteOutcome.PRESENT]
    assert await bench.write(chunk, content=bytes(bench.chunk_bytes)) is WriteOutcome.PRESENT
    assert await bench.read(chunk) == (ReadOutcome.READ, bench.content(chunk))
    assert bench.tier.stats().chunks == 1


async def check_full(bench: Bench) -> None:
    """Room is made by forgetting what was used longest ago; the capacity is never exceeded."""
    kept = chunk_id(0)
    assert await bench.write(kept) is WriteOutcome.STORED
    for number in range(1, bench.capacity_chunks + 1):
        assert await bench.write(chunk_id(number)) is WriteOutcome.STORED
        assert await bench.read(kept) == (ReadOutcome.READ, bench.content(kept)), f"evicted though used, at {number}"
        stats = bench.tier.stats()
        assert stats.used_bytes + stats.overhead_bytes <= stats.capacity_bytes
    assert bench.tier.stats().evictions > 0
    assert not bench.tier.contains(chunk_id(1))
    newest = chunk_id(bench.capacity_chunks)
    assert await bench.read(newest) == (ReadOutcome.READ, bench.content(newest))


async def check_damaged(bench: Bench) -> None:
    """Found at the first read, counted once, forgotten; nothing else suffers."""
    assert bench.damage is not None
    for number in range(3):
        assert await bench.write(chunk_id(number)) is WriteOutcome.STORED
    await bench.damage(chunk_id(1))
    assert await bench.read(chunk_id(1)) == (ReadOutcome.DAMAGED, b"")
    assert await bench.read(chunk_id(1)) == (ReadOutcome.ABSENT, b"")
    assert bench.tier.stats().corruptions == 1
    for number in (0, 2):
        assert await bench.read(chunk_id(number)) == (ReadOutcome.READ, bench.content(chunk_id(number)))
    assert await bench.write(chunk_id(1)) is WriteOutcome.STORED
    assert await bench.read(chunk_id(1)) == (ReadOutcome.READ, bench.content(chunk_id(1)))


async def check_remove(bench: Bench) -> None:
    """Twice is once; what is not covered stays; a removed chunk can be stored again."""
    for number, tenant in itertools.product(range(3), range(2)):
        assert await bench.write(chunk_id(number, tenant=tenant)) is WriteOutcome.STORED
    scope = Scope(tenant=chunk_id(0, tenant=1).tenant)
    assert (await bench.remove(scope)).chunks == 3
    assert (await bench.remove(scope)) == Removed(0, 0)
    one = bench.scope_of(chunk_id(2))
    gone = [number for number in range(3) if one.covers(chunk_id(number))]
    assert (await bench.remove(one)).chunks == len(gone)
    assert (await bench.remove(one)).chunks == 0
    for number in range(3):
        assert await bench.read(chunk_id(number, tenant=1)) == (ReadOutcome.ABSENT, b"")
        assert bench.tier.contains(chunk_id(number)) == (number not in gone)
    assert await bench.write(chunk_id(2)) is WriteOutcome.STORED
    assert (await bench.remove(Scope())).chunks == 4 - len(gone)
    assert bench.tier.stats().chunks == bench.tier.stats().used_bytes == 0


async def check_remove_beats_write(bench: Bench) -> None:
    """A write that is under way when its chunk is removed does not bring it back."""
    chunk = chunk_id(0)
    memory = bench.memories.fill(0, bench.content(chunk))
    write = asyncio.ensure_future(outcome_of(bench.tier.write, chunk, memory))
    await asyncio.sleep(0)  # into the call
    await bench.remove(Scope(namespace=chunk.namespace))
    assert await write in (WriteOutcome.ABORTED, WriteOutcome.STORED)
    assert not bench.tier.contains(chunk)


async def check_many_at_once(bench: Bench, seed: int = 0, rounds: int = 400) -> None:
    """Readers, writers and removals together: whatever is read is right."""
    rnd = random.Random(seed)
    chunks = [chunk_id(number, tenant=number % 3) for number in range(2 * bench.capacity_chunks)]
    free_places = list(range(bench.memories.count))
    place_freed = asyncio.Event()

    async def one(chunk: ChunkId, place: int, action: float) -> None:
        try:
            if action < 0.45:
                await bench.write(chunk, place)
            elif action < 0.98:
                bench.assert_right(chunk, *await bench.read(chunk, place))
            else:
                await bench.remove(bench.scope_of(chunk))
        finally:
            free_places.append(place)
            place_freed.set()

    running = []
    for _ in range(rounds):
        while not free_places:
            place_freed.clear()
            await place_freed.wait()
        running.append(asyncio.ensure_future(one(rnd.choice(chunks), free_places.pop(), rnd.random())))
    await asyncio.gather(*running)
    assert list(bench.tier.problems()) == []


CHECKS = (
    check_round_trip,
    check_absent,
    check_duplicate,
    check_full,
    check_damaged,
    check_remove,
    check_remove_beats_write,
    check_many_at_once,
)


class MemoryTier:
    """A tier that keeps bytes objects: the fake for whoever needs a `Tier`, and the suite's second implementation."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held: OrderedDict[ChunkId, bytes] = OrderedDict()
        self.damaged: set[ChunkId] = set()
        self._evictions = self._corruptions = self._dropped = 0
        self._used_bytes = 0

    def contains(self, chunk: ChunkId) -> bool:
        return chunk in self.held

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        outcome = WriteOutcome.STORED
        if chunk in self.held:
            outcome = WriteOutcome.PRESENT
        elif memory.nbytes > self.capacity_bytes:
            outcome = WriteOutcome.FULL
            self._dropped += 1
        else:
            while self._used_bytes + memory.nbytes > self.capacity_bytes:
                self._forget(next(iter(self.held)))
                self._evictions += 1
            self.held[chunk] = ctypes.string_at(*memory)
            self._used_bytes += memory.nbytes
        self._answer(done, outcome, released)

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        content = self.held.get(chunk)
        outcome = ReadOutcome.READ
        if content is None:
            outcome = ReadOutcome.ABSENT
        elif len(content) != memory.nbytes:
            raise ValueError(f"a chunk of {len(content)} bytes, but memory for {memory.nbytes}")
        elif chunk in self.damaged:
            outcome = ReadOutcome.DAMAGED
            self._corruptions += 1
            self._forget(chunk)
        else:
            ctypes.memmove(memory.address, content, len(content))
            self.held.move_to_end(chunk)
        self._answer(done, outcome, released)

    @staticmethod
    def _answer(done: Callable[[T], None], outcome: T, released: Released) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(done, outcome)
        loop.call_soon(released)

    def remove(self, scope: Scope, done: Callable[[Removed], None]) -> None:
        covered = [chunk for chunk in self.held if scope.covers(chunk)]
        nbytes = sum(self._forget(chunk) for chunk in covered)
        asyncio.get_running_loop().call_soon(done, Removed(len(covered), nbytes))

    def _forget(self, chunk: ChunkId) -> int:
        self.damaged.discard(chunk)
        nbytes = len(self.held.pop(chunk))
        self._used_bytes -= nbytes
        return nbytes

    def stats(self) -> TierStats:
        return TierStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            overhead_bytes=0,
            chunks=len(self.held),
            evictions=self._evictions,
            corruptions=self._corruptions,
            dropped=self._dropped,
        )

    def problems(self) -> Iterator[str]:
        used = sum(map(len, self.held.values()))
        if used != self._used_bytes:
            yield f"{used} bytes are held, {self._used_bytes} accounted for"
