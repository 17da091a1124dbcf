"""What moves between the cpu tier and the filesystem tier: copies down after a commit, copies up when asked for.

Down (write-through): every chunk that is committed to the cpu tier is also written to the fs tier, straight from its
slot. Evicting it from the cpu tier later moves nothing. Up: a chunk that only the fs tier has is read into a slot
granted to the daemon itself, is shown as PENDING meanwhile, and becomes visible by a commit like any other; whoever
asked for it, or joined later, gets a lease.

Concurrency: the event loop's thread calls everything here and is called back on it; the I/O runs in the fs tier's
threads. Nothing here waits. A slot with I/O stays what it is until the fs tier has released it, deadline or not: on the
way down by `begin_io` (neither evicted nor moved), on the way up because a grant ends in commit or abort only. When the
daemon dies, a chunk not yet written is not on disk, and a promotion ends with the arena.

Bounds: WAITING_MAX chunks wait to be written (more are dropped, and counted), of which as many run at once as
WRITING_MAX and a quarter of the arena allow; a chunk evicted while it waits is dropped too. PROMOTIONS_MAX promotions
run at once, and all together take at most half of what is free or could be evicted.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvstore import limits
from kvstore._native import CPU, FS, MISS, PENDING, STORED, class_bytes, slot_offset
from kvstore.throttle import Throttle
from kvstore.tiers.base import ChunkId, Memory, ReadOutcome, Removed, Scope, WriteOutcome
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.fs import FsTier

OWN_GROUP = 0  # in the index: the daemon's own grants and leases; the groups of processes count from 1
WAITING_MAX = 4_096
WRITING_MAX = 32
WRITING_SHARE_OF_ARENA = 4
PROMOTIONS_MAX = 128
SHOWN_PER_TURN = 500  # chunks found at the start, between two turns of the loop

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
    """See the module's docstring. `clock_ms`: as of the leases' deadlines."""

    def __init__(self, cpu: CpuTier, fs: FsTier, clock_ms: Callable[[], int]) -> None:
        self.fs = fs
        self._cpu = cpu
        self._index = cpu.index
        self._clock_ms = clock_ms
        self._waiting: deque[_Demotion] = deque()
        self._writing = 0
        self._writing_bytes = 0
        self._dropped = 0
        self.removals = 0  # chunks, because an operator asked
        self._warm = False  # until then the fs tier refuses stores, and they wait here
        self._promotions: dict[ChunkId, _Promotion] = {}
        self._promoting_bytes = 0
        self.throttle: Throttle | None = None  # tests
        # Told when all that was begun for one `promote` has landed: group, chunks, seconds.
        self.on_read: Callable[[int, int, float], None] = lambda _group, _chunks, _seconds: None
        self._idle = asyncio.Event()
        self._idle.set()
        fs.on_change = self._fs_changed

    async def show_found(self) -> None:
        """Once the fs tier is warm: what it holds becomes visible in the table."""
        await self.fs.ready()
        self._warm = True
        self._write_next()
        found = [chunk for chunk, _ in self.fs.chunks()]
        for first in range(0, len(found), SHOWN_PER_TURN):
            for chunk in found[first : first + SHOWN_PER_TURN]:
                if self.fs.contains(chunk) and chunk not in self._promotions:
                    self._index.set_lower(*chunk, FS)
            await asyncio.sleep(0)

    async def drain(self, timeout_s: float) -> bool:
        """Until nothing waits to be written, or is written. False: some still does."""
        if not self._warm:
            return not self._waiting
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def dropped(self) -> int:
        """Chunks that were not written to the fs tier, though they should have been."""
        return self._dropped + self.fs.stats().dropped

    @property
    def promoting_bytes(self) -> int:
        """Of slots granted to the daemon itself."""
        return self._promoting_bytes

    # -- down ----------------------------------------------------------------------------------------------------

    def stored(self, chunk: ChunkId, slot: int, generation: int, nbytes: int) -> None:
        """The chunk was committed to the cpu tier."""
        if self.fs.contains(chunk):
            return
        if len(self._waiting) >= WAITING_MAX:
            self._dropped += 1
            return
        self._waiting.append(_Demotion(chunk, slot, generation, nbytes))
        self._idle.clear()
        self._write_next()

    def touched(self, namespace: bytes, tenant: bytes, keys: Sequence[bytes]) -> None:
        """The chain was used: head first. The tail is touched first, so that a parent is never older than its child."""
        self.fs.touch([ChunkId(namespace, tenant, key) for key in reversed(keys)])

    def _write_next(self) -> None:
        bytes_max = self._cpu.arena_bytes // WRITING_SHARE_OF_ARENA
        while self._warm and self._waiting and self._writing < WRITING_MAX:
            slot_bytes = class_bytes(self._waiting[0].nbytes)
            if self._writing and self._writing_bytes + slot_bytes > bytes_max:
                break
            demotion = self._waiting.popleft()
            if not self._index.begin_io(demotion.slot, demotion.generation):
                self._dropped += 1  # evicted before its turn
                continue
            self._writing += 1
            self._writing_bytes += slot_bytes
            memory = Memory(self._address(demotion.slot, slot_bytes), demotion.nbytes)
            self.fs.write(demotion.chunk, memory, _no_matter, partial(self._released, demotion, slot_bytes))
        if not self._writing and not self._waiting:
            self._idle.set()

    def _released(self, demotion: _Demotion, slot_bytes: int) -> None:
        self._index.end_io(demotion.slot, demotion.generation)
        self._writing -= 1
        self._writing_bytes -= slot_bytes
        self._write_next()

    # -- up ------------------------------------------------------------------------------------------------------

    def promote(self, group: int, namespace: bytes, tenant: bytes, keys: Sequence[bytes], chunk_bytes: int) -> None:
        """Begin to read what only the fs tier has, head first, as far as there is room: the table then shows PENDING.

        What is not begun is still shown as FS when this returns: for the one who asked, that is a miss.
        """
        slot_bytes = class_bytes(chunk_bytes)
        request = _Request(group, time.monotonic())
        for key in keys:
            chunk = ChunkId(namespace, tenant, key)
            running = self._promotions.get(chunk)
            if running is not None:
                running.groups.add(group)
                continue
            if not self.fs.contains(chunk) or self._index.lookup(namespace, tenant, [key])[0] == CPU:
                continue
            if len(self._promotions) >= PROMOTIONS_MAX or slot_bytes > self._room_bytes():
                return
            grants = self._index.grant(OWN_GROUP, chunk_bytes, 1)
            if not grants:
                return
            [(slot, generation)] = grants
            promotion = _Promotion(chunk, slot, generation, slot_bytes, {group}, request=request)
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
            # Not a use: the request that wanted it says so when it has loaded it.
            if self._index.commit(OWN_GROUP, chunk.namespace, [commit], is_use=False) == [STORED]:
                for group in promotion.groups:
                    self._index.lease(group, [ref], self._clock_ms() + limits.LEASE_MS)
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

    def covers(self, namespace: bytes | None, tenant: bytes | None) -> bool:
        """Whether the fs tier holds any chunk of this namespace and tenant (None: any)."""
        return any(
            namespace in (None, its_namespace) and tenant in (None, its_tenant)
            for its_namespace, its_tenant in self.fs.usage()
        )

    def remove(
        self,
        scope: Scope,
        done: Callable[[Removed], None],
        *,
        bytes_wanted: int | None = None,
        dry_run: bool = False,
    ) -> None:
        """Forget for good what the scope covers in the fs tier, or wait there to be written; with `bytes_wanted` only
        the least recently used of it until so much is free. `done` when it lasts, or at once when `dry_run`."""
        if bytes_wanted is not None:
            scope = Scope(chunks=frozenset(self._oldest(scope, bytes_wanted)))
        elif not dry_run:
            self._waiting = deque(demotion for demotion in self._waiting if not scope.covers(demotion.chunk))
            self._write_next()
        if dry_run:
            sizes = [slot_bytes for chunk, slot_bytes in self.fs.chunks() if scope.covers(chunk)]
            done(Removed(len(sizes), sum(sizes)))
            return

        def counted(removed: Removed) -> None:
            self.removals += removed.chunks
            done(removed)

        self.fs.remove(scope, counted)

    def _oldest(self, scope: Scope, bytes_wanted: int) -> Iterator[ChunkId]:
        for chunk, slot_bytes in self.fs.chunks():
            if bytes_wanted <= 0:
                return
            if scope.covers(chunk):
                bytes_wanted -= slot_bytes
                yield chunk

    # -- what the table shows ------------------------------------------------------------------------------------

    def _show(self, chunk: ChunkId) -> None:
        self._index.set_lower(*chunk, FS if self.fs.contains(chunk) else MISS)

    def _fs_changed(self, chunk: ChunkId, held: bool) -> None:
        self._index.set_lower(*chunk, FS if held else MISS)

    def _address(self, slot: int, slot_bytes: int) -> int:
        return self._cpu.arena.address + slot_offset(slot, slot_bytes, self._cpu.unit_bytes)


def _no_matter(outcome: WriteOutcome) -> None:
    """The fs tier counts what it dropped, and says why in its log."""
