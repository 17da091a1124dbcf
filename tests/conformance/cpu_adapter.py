"""The cpu tier behind the interface of the tiers below it.

Engines copy into and out of the arena by themselves, so the tier has no `write` and `read`; what one of them does for a
chunk is done here: a grant, the copy, and a commit a turn of the loop later; a look at the table, the copy, and the
generation after it. The index removes by namespace and tenant, not chunk by chunk.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator
from types import TracebackType

from kvstore._native import CPU, NOT_GRANTED, PRESENT, STORED, Table, class_bytes, slot_offset
from kvstore.tiers.base import (
    ChunkId,
    Memory,
    ReadDone,
    ReadOutcome,
    Released,
    Removed,
    Scope,
    TierStats,
    WriteDone,
    WriteOutcome,
)
from kvstore.tiers.cpu import CpuTier

GROUP = 1
STEPS = 16
_OUTCOMES = {STORED: WriteOutcome.STORED, PRESENT: WriteOutcome.PRESENT, NOT_GRANTED: WriteOutcome.ABORTED}


class CpuAdapter:
    def __init__(self, arena_bytes: int) -> None:
        key, instance = bytes(range(16)), b"instance-of-test"
        self._cpu = CpuTier(
            cpu_bytes=arena_bytes, index_bytes=None, index_key=key, instance_id=instance, verify=True,
            lower_bytes=1 << 30,
            eviction_policy="lru",
        )  # fmt: skip
        self._cpu.set_ready(self._cpu.arena_bytes)
        self._index = self._cpu.index
        self._table = Table(self._cpu.table_fd, key)
        self._dropped = 0

    def __enter__(self) -> "CpuAdapter":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._table.close()
        os.close(self._cpu.arena_fd)
        os.close(self._cpu.table_fd)

    def contains(self, chunk: ChunkId) -> bool:
        return self._index.lookup(chunk.namespace, chunk.tenant, [chunk.key]) == bytes([CPU])

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None:
        grants = self._index.grant(GROUP, memory.nbytes, 1)
        if not grants:
            self._dropped += 1
            self._soon(lambda: done(WriteOutcome.FULL), released)
            return
        [(slot, generation)] = grants
        nbytes = class_bytes(memory.nbytes)
        ctypes.memset(self._address(slot, nbytes), 0, nbytes)
        ctypes.memmove(self._address(slot, nbytes), memory.address, memory.nbytes)

        def commit() -> None:
            commits = [(slot, generation, chunk.tenant, chunk.key, b"")]
            [code] = self._index.commit(GROUP, chunk.namespace, commits)
            done(_OUTCOMES[code])

        self._soon(commit, released)

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        codes, slots, generations = self._table.lookup(chunk.namespace, chunk.tenant, [chunk.key])
        if codes != bytes([CPU]):
            self._soon(lambda: done(ReadOutcome.ABSENT), released)
            return
        source = self._address(int(slots[0]), class_bytes(memory.nbytes))

        def copy() -> None:
            ctypes.memmove(memory.address, source, memory.nbytes)
            same = self._table.current(slots, generations) == b"\1"
            done(ReadOutcome.READ if same else ReadOutcome.ABSENT)

        self._index.touch(chunk.namespace, chunk.tenant, [chunk.key])
        self._soon(copy, released)

    def remove(self, scope: Scope, done: Callable[[Removed], None]) -> None:
        assert scope.chunks is None, "the index does not remove chunk by chunk"
        removal = self._index.begin_removal(namespace=scope.namespace, tenant=scope.tenant)

        def go_on() -> None:
            if self._index.remove(removal, STEPS):
                done(Removed(removal.chunks, removal.nbytes))
            else:
                asyncio.get_running_loop().call_soon(go_on)

        asyncio.get_running_loop().call_soon(go_on)

    def stats(self) -> TierStats:
        index = self._index.stats()
        return TierStats(
            capacity_bytes=self._cpu.arena_bytes,
            used_bytes=index["used_bytes"],
            overhead_bytes=index["granted_bytes"],
            chunks=index["chunks"],
            evictions=index["evictions"],
            corruptions=0,
            dropped=self._dropped,
        )

    def problems(self) -> Iterator[str]:
        yield from self._index.problems()
        if poisoned := self._index.stats()["poison_commits"]:
            yield f"{poisoned} chunks were committed with poison in them"

    def _address(self, slot: int, nbytes: int) -> int:
        return self._cpu.arena.address + slot_offset(slot, nbytes, self._cpu.unit_bytes)

    @staticmethod
    def _soon(act: Callable[[], None], released: Released) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(act)
        loop.call_soon(released)
