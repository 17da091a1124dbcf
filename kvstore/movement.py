"""What moves between the cpu tier and the filesystem tier: copies down after a commit, copies up when asked for.

Down, straight from the chunk's slot, by policy:
    write_through   every chunk that is committed to the cpu tier, but what the engine would not have on disk; that is
                    written when a later request finds it worth it. Evicting it there later moves nothing.
    selective       a chunk that was used so many times.
    write_back      what will soon be evicted from the cpu tier: an eighth of the arena is kept free or written; and
                    what has not been used for IDLE_MS. An eviction never waits: a chunk that was not written in time
                    is dropped, and counted. When the daemon stops it writes what it can.
Up: a chunk that only the fs tier has is read into a slot
granted to the daemon itself, is shown as PENDING meanwhile, and becomes visible by a commit like any other; whoever
asked for it, or joined later, gets a lease.

Concurrency: the event loop's thread calls everything here and is called back on it; the I/O runs in the fs tier's
threads. Nothing here waits. A slot with I/O stays what it is until the fs tier has released it, deadline or not: on the
way down by `begin_io` (neither evicted nor moved), on the way up because a grant ends in commit or abort only. When the
daemon dies, a chunk not yet written is not on disk, and a promotion ends with the arena.

Bounds: WAITING_MAX chunks wait to be written (more are dropped, and counted; with write_back only as many wait as are
taken up at a time, for the index knows the others), of which as many run at once as WRITING_MAX and a quarter of the
arena allow; a chunk evicted while it waits is dropped too. PROMOTIONS_MAX promotions
run at once, and all together take at most half of what is free or could be evicted.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvstore import limits
from kvstore._native import CPU, FS, MISS, NOBODY, PENDING, STORED, class_bytes, slot_offset
from kvstore.config import WRITE_AFTER_USES_DEFAULT, WritePolicy
from kvstore.decisions import Room
from kvstore.throttle import Throttle
from kvstore.tiers.base import ChunkId, Memory, ReadOutcome, Removed, Scope, WriteOutcome
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.fs import FsTier

OWN_GROUP = 0  # in the index: the daemon's own grants and leases; the groups of processes count from 1
WAITING_MAX = 4_096
WRITING_MAX = 32
WRITING_SHARE_OF_ARENA = 4
PROMOTIONS_MAX = 128
AHEAD_SHARE_OF_ARENA = 8  # kept free or written, with write_back
AHEAD_STEPS_MAX = 512  # chunks looked at for that at a time, about a fifth of a microsecond each
TAKEN_AT_A_TIME = 64
IDLE_MS = 60_000
IDLE_STEPS = 4_096  # places of the index looked at in a tick, for chunks not used for so long
FAILED_PAUSE_MS = 1_000  # with write_back, after a write that failed

_log = logging.getLogger(__name__)


class _Demotion(NamedTuple):
    chunk: ChunkId
    slot: int
    generation: int
    nbytes: int


@dataclass(eq=False, slots=True)
class _Promotion:
    chunk: ChunkId
    slot: int
    generation: int
    slot_bytes: int
    groups: set[int] = field(default_factory=set)
    outcome: ReadOutcome | None = None
    request: "_Request | None" = None


@dataclass(eq=False, slots=True)
class _Request:
    """What one group asked for at once."""

    group: int
    began_s: float
    reading: int = 0  # begun for it and not landed
    landed: int = 0


class Movement:
    """See the module's docstring. `clock_ms`: as of the leases' deadlines. `write_after_uses`: with SELECTIVE."""

    def __init__(
        self,
        cpu: CpuTier,
        fs: FsTier,
        clock_ms: Callable[[], int],
        *,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        write_after_uses: int = WRITE_AFTER_USES_DEFAULT,
    ) -> None:
        self.fs = fs
        self._cpu = cpu
        self._index = cpu.index
        self._clock_ms = clock_ms
        self._policy = policy
        self._write_after_uses = write_after_uses
        self._payload_bytes: OrderedDict[bytes, int] = OrderedDict()  # of a chunk, by namespace
        self._waiting: OrderedDict[ChunkId, _Demotion] = OrderedDict()
        self._ahead_is_written = False  # as far as the last look went, since the last tick
        self._idle_from: int | None = 0  # where to go on looking for idle chunks
        self._next_idle_ms = 0
        self._take_no_more_until_ms = 0
        self._writing = 0
        self._writing_bytes = 0
        self._dropped = 0
        self.removals = 0  # chunks, because an operator asked
        self._warm = False  # until then the fs tier refuses stores, and they wait here
        self._promotions: dict[ChunkId, _Promotion] = {}
        self._promoting_bytes = 0
        self._kept_below: list[Scope] = []
        self.throttle: Throttle | None = None  # tests
        # Told when all that was begun for one `promote` has landed: group, chunks, seconds.
        self.on_read: Callable[[int, int, float], None] = lambda _group, _chunks, _seconds: None
        # Told of a chunk that should have been written, why it was not (None: it had left memory before its turn), and
        # when, in ms. Not with write_back: until the chunk is evicted its write may be tried again.
        self.on_unwritten: Callable[[ChunkId, WriteOutcome | None, int], None] = lambda _chunk, _outcome, _now_ms: None
        self._idle = asyncio.Event()
        self._idle.set()
        fs.on_change = self._fs_changed
        fs.on_evicted = self._fs_evicted

    async def show_found(self) -> None:
        """Once the fs tier is warm: what it holds becomes visible in the table."""
        await self.fs.ready()
        self._warm = True
        self._write_next()
        for held in self.fs.chunks():
            for chunk, _, _ in held:
                if self.fs.contains(chunk) and chunk not in self._promotions:
                    self._index.set_lower(*chunk, FS)
            await asyncio.sleep(0)

    async def drain(self, timeout_s: float) -> bool:
        """Until nothing waits to be written, or is written; with write_back of all chunks. False: some still does."""
        if not self._warm:
            return not self._waiting
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                start: int | None = 0 if self._policy is WritePolicy.WRITE_BACK else None
                while start is not None and self._clock_ms() >= self._take_no_more_until_ms:
                    rows, start = self._index.unwritten(start, steps=IDLE_STEPS, limit=TAKEN_AT_A_TIME)
                    self._take(rows)
                    await self._idle.wait()
                    await asyncio.sleep(0)
        except TimeoutError:
            return False
        return start is None

    @property
    def dropped(self) -> int:
        """Chunks that were not written to the fs tier, though they should have been."""
        if self._policy is WritePolicy.WRITE_BACK:  # until a chunk is evicted, its write may be tried again
            return self._index.stats()["unwritten_evictions"]
        return self._dropped + self.fs.stats().dropped

    def room(self, nbytes: int) -> Room:
        """For a chunk of an engine that is asked what is worth a write."""
        if self._policy is not WritePolicy.WRITE_THROUGH:
            return Room.NOT_ASKED
        return Room.FREE if self.fs.has_room(nbytes) else Room.FULL

    @property
    def promoting_bytes(self) -> int:
        """Of slots granted to the daemon itself."""
        return self._promoting_bytes

    # -- down ----------------------------------------------------------------------------------------------------

    def stored(self, chunk: ChunkId, slot: int, generation: int, nbytes: int, *, memory_only: bool = False) -> None:
        """The chunk was committed to the cpu tier. `memory_only`: the engine does not think it worth a write."""
        self._remember_size(chunk.namespace, nbytes)
        if self._policy is WritePolicy.WRITE_THROUGH and not memory_only:
            self._wait_to_be_written(_Demotion(chunk, slot, generation, nbytes))
            self._write_next()

    def touched(self, namespace: bytes, tenant: bytes, keys: Sequence[bytes], *, worth_disk: int = 0) -> None:
        """The chain was used: head first. The tail is touched first, so that a parent is never older than its child.
        `worth_disk`: the engine would have so many of the keys, from the head, on disk."""
        self.fs.touch([ChunkId(namespace, tenant, key) for key in reversed(keys)])
        if self._policy is WritePolicy.SELECTIVE:
            self._take(self._index.used_often(namespace, tenant, keys, self._write_after_uses))
        elif worth_disk and self._policy is WritePolicy.WRITE_THROUGH:
            if self._clock_ms() < self._take_no_more_until_ms:
                return
            self._take(self._index.used_often(namespace, tenant, keys[:worth_disk], 1))

    def tick(self) -> None:
        """Every so often, several times a second."""
        if self._policy is WritePolicy.WRITE_BACK:
            self._ahead_is_written = False
            self._take_what_soon_goes()
            self._take_what_is_idle()

    def _take_what_soon_goes(self) -> None:
        if not self._warm or self._waiting or self._ahead_is_written:
            return
        if self._clock_ms() < self._take_no_more_until_ms:
            return
        index = self._index.stats()
        free_bytes = self._cpu.ready_bytes - index["used_bytes"] - index["granted_bytes"]
        if index["chunks"] > index["entries_max"] // 2:
            free_bytes = 0  # chunks so small that the table is full before the arena
        wanted_bytes = self._cpu.arena_bytes // AHEAD_SHARE_OF_ARENA - free_bytes - self._writing_bytes
        if wanted_bytes > 0:
            rows = self._index.next_to_go(wanted_bytes, steps=AHEAD_STEPS_MAX, limit=TAKEN_AT_A_TIME)
            self._ahead_is_written = len(rows) < TAKEN_AT_A_TIME
            self._take(rows)

    def _take_what_is_idle(self) -> None:
        """A look at a part of the index each second, at once at the next part where much is found."""
        now_ms = self._clock_ms()
        if not self._warm or self._waiting or now_ms < max(self._next_idle_ms, self._take_no_more_until_ms):
            return
        rows, self._idle_from = self._index.unwritten(
            self._idle_from or 0,
            used_before_ms=max(0, now_ms - IDLE_MS),
            steps=IDLE_STEPS,
            limit=TAKEN_AT_A_TIME,
        )
        if len(rows) < TAKEN_AT_A_TIME:
            self._next_idle_ms = now_ms + 1_000
        self._take(rows)

    def _take(self, rows: Sequence[tuple[bytes, bytes, bytes, int, int]]) -> None:
        for namespace, tenant, key, slot, generation in rows:
            nbytes = self._payload_bytes.get(namespace)
            if nbytes is not None:
                self._wait_to_be_written(_Demotion(ChunkId(namespace, tenant, key), slot, generation, nbytes))
        self._write_next()

    def _wait_to_be_written(self, demotion: _Demotion) -> None:
        chunk = demotion.chunk
        if self.fs.contains(chunk):
            self._show(chunk)
            return
        if chunk not in self._waiting and len(self._waiting) >= WAITING_MAX:
            self._dropped += 1
            self._tell_unwritten(chunk, WriteOutcome.FULL)
            return
        self._waiting[chunk] = demotion  # in place of one that was evicted meanwhile, and has come back
        self._idle.clear()

    def _remember_size(self, namespace: bytes, nbytes: int) -> None:
        """A namespace's document says how big its chunks are, so one number is enough."""
        self._payload_bytes[namespace] = nbytes
        self._payload_bytes.move_to_end(namespace)
        if len(self._payload_bytes) > limits.NAMESPACES_MAX:
            self._payload_bytes.popitem(last=False)

    def _write_next(self) -> None:
        bytes_max = self._cpu.arena_bytes // WRITING_SHARE_OF_ARENA
        while self._warm and self._waiting and self._writing < WRITING_MAX:
            demotion = next(iter(self._waiting.values()))
            slot_bytes = class_bytes(demotion.nbytes)
            if self._writing and self._writing_bytes + slot_bytes > bytes_max:
                break
            del self._waiting[demotion.chunk]
            if not self._index.begin_io(demotion.slot, demotion.generation):
                self._dropped += 1  # evicted before its turn
                self._tell_unwritten(demotion.chunk, None)
                continue
            self._writing += 1
            self._writing_bytes += slot_bytes
            memory = Memory(self._address(demotion.slot, slot_bytes), demotion.nbytes)
            done = partial(self._written, demotion.chunk)
            self.fs.write(demotion.chunk, memory, done, partial(self._released, demotion, slot_bytes))
        if not self._writing and not self._waiting:
            self._idle.set()

    def _tell_unwritten(self, chunk: ChunkId, outcome: WriteOutcome | None) -> None:
        if self._policy is not WritePolicy.WRITE_BACK:
            self.on_unwritten(chunk, outcome, self._clock_ms())

    def _written(self, chunk: ChunkId, outcome: WriteOutcome) -> None:
        """The fs tier counts what it dropped, and says why in its log."""
        if outcome not in (WriteOutcome.STORED, WriteOutcome.PRESENT):
            self._tell_unwritten(chunk, outcome)
        match outcome:
            case WriteOutcome.STORED:
                pass
            case WriteOutcome.PRESENT:
                self._show(chunk)  # where the table had no room for that, the index thinks it is not there
            case WriteOutcome.FULL:
                self._ahead_is_written = True  # a tenant's quota, say: others' chunks wait for no more than a tick
            case _:
                self._take_no_more_until_ms = self._clock_ms() + FAILED_PAUSE_MS

    def _released(self, demotion: _Demotion, slot_bytes: int) -> None:
        self._index.end_io(demotion.slot, demotion.generation)
        self._writing -= 1
        self._writing_bytes -= slot_bytes
        if self._policy is WritePolicy.WRITE_BACK:
            self._take_what_soon_goes()
        self._write_next()

    # -- up ------------------------------------------------------------------------------------------------------

    def promote(
        self,
        group: int,
        namespace: bytes,
        tenant: bytes,
        keys: Sequence[bytes],
        chunk_bytes: int,
        *,
        waited: bool = True,
    ) -> None:
        """Begin to read what only the fs tier has, head first, as far as there is room: the table then shows PENDING.

        What is kept below is not begun. What is not begun is still shown as FS when this returns: for the one who
        asked, that is a miss. `waited` False: the group does not wait for them (any more), and gets no lease.
        """
        slot_bytes = class_bytes(chunk_bytes)
        self._remember_size(namespace, chunk_bytes)
        request = _Request(group, time.monotonic())
        for key in keys:
            chunk = ChunkId(namespace, tenant, key)
            running = self._promotions.get(chunk)
            if running is not None:
                if waited:
                    running.groups.add(group)
                else:
                    running.groups.discard(group)
                continue
            if any(scope.covers(chunk) for scope in self._kept_below):
                continue
            if not self.fs.contains(chunk) or self._index.lookup(namespace, tenant, [key])[0] == CPU:
                continue
            if len(self._promotions) >= PROMOTIONS_MAX or slot_bytes > self._room_bytes():
                return
            grants = self._index.grant(OWN_GROUP, chunk_bytes, 1)
            if not grants:
                return
            [(slot, generation)] = grants
            promotion = _Promotion(chunk, slot, generation, slot_bytes, {group} if waited else set(), request=request)
            request.reading += 1
            self._promotions[chunk] = promotion
            self._promoting_bytes += slot_bytes
            self._index.set_lower(*chunk, PENDING)
            memory = Memory(self._address(slot, slot_bytes), chunk_bytes)
            self.fs.read(chunk, memory, partial(self._read, promotion), partial(self._landed, promotion))

    def forget_group(self, group: int) -> None:
        """Nobody of it waits any more."""
        for promotion in self._promotions.values():
            promotion.groups.discard(group)

    def _room_bytes(self) -> int:
        """What one more promotion may take."""
        index = self._index.stats()
        others = index["granted_bytes"] - self._promoting_bytes + index["pinned_bytes"] + index["io_bytes"]
        return (self._cpu.ready_bytes - others) // 2 - self._promoting_bytes

    def _read(self, promotion: _Promotion, outcome: ReadOutcome) -> None:
        promotion.outcome = outcome
        if outcome is not ReadOutcome.READ:
            self._show(promotion.chunk)  # those who wait need not wait for a disk that hangs

    def _landed(self, promotion: _Promotion) -> None:
        if self.throttle is not None and promotion.outcome is ReadOutcome.READ:
            self.throttle.after(promotion.slot_bytes, partial(self._settle, promotion))
        else:
            self._settle(promotion)

    def _settle(self, promotion: _Promotion) -> None:
        chunk, ref = promotion.chunk, (promotion.slot, promotion.generation)
        assert promotion.outcome is not None, f"slot {promotion.slot} was released before its read had an outcome"
        del self._promotions[chunk]
        self._promoting_bytes -= promotion.slot_bytes
        if promotion.outcome is ReadOutcome.READ:
            commit = (*ref, chunk.tenant, chunk.key, b"")
            self._index.make_room_for(NOBODY, self._clock_ms())
            # Not a use: the request that wanted it says so when it has loaded it.
            now_ms = self._clock_ms()
            if self._index.commit(OWN_GROUP, chunk.namespace, [commit], now_ms, is_use=False) == [STORED]:
                for group in promotion.groups:
                    self._index.lease(group, [ref], now_ms + limits.LEASE_MS)
        else:
            self._index.abort(OWN_GROUP, [ref])
        self._show(chunk)
        request = promotion.request
        assert request is not None, f"slot {promotion.slot} was read for nobody"
        request.reading -= 1
        request.landed += promotion.outcome is ReadOutcome.READ
        if request.reading == 0 and request.landed:
            self.on_read(request.group, request.landed, time.monotonic() - request.began_s)

    # -- removal -------------------------------------------------------------------------------------------------

    @contextmanager
    def keeping_below(self, scope: Scope) -> Iterator[None]:
        """While a removal from both tiers has begun in the cpu tier and not yet here: what came up meanwhile would be
        committed as new where the cpu tier's sweep may have passed already. What is on its way up since before comes to
        nothing by itself: its slot was granted before that removal."""
        self._kept_below.append(scope)
        try:
            yield
        finally:
            self._kept_below.remove(scope)

    def remove(
        self,
        scope: Scope,
        done: Callable[[Removed], None],
        *,
        unused_s: float | None = None,
        bytes_wanted: int | None = None,
        dry_run: bool = False,
    ) -> None:
        """Forget for good what the scope covers in the fs tier, or waits there to be written; see `FsTier.remove`."""
        if unused_s is None and bytes_wanted is None and not dry_run:
            for chunk in [chunk for chunk in self._waiting if scope.covers(chunk)]:
                del self._waiting[chunk]
            self._write_next()

        def counted(removed: Removed) -> None:
            self.removals += 0 if dry_run else removed.chunks
            done(removed)

        self.fs.remove(scope, counted, unused_s=unused_s, bytes_wanted=bytes_wanted, dry_run=dry_run)

    # -- what the table shows ------------------------------------------------------------------------------------

    def _show(self, chunk: ChunkId) -> None:
        self._index.set_lower(*chunk, FS if self.fs.contains(chunk) else MISS)

    def _fs_changed(self, chunk: ChunkId, held: bool) -> None:
        self._index.set_lower(*chunk, FS if held else MISS)

    def _fs_evicted(self, chunk: ChunkId) -> None:
        self._index.evicted_below(*chunk, self._clock_ms())

    def _address(self, slot: int, slot_bytes: int) -> int:
        return self._cpu.arena.address + slot_offset(slot, slot_bytes, self._cpu.unit_bytes)
