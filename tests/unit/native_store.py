"""A small store on real shared memory, for the tests of the native core: what the daemon makes at its start."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import _native

INDEX_KEY = bytes(range(16))
INSTANCE = b"instance-of-test"
NAMESPACE = b"namespace-a-----"
TENANT = b"tenant-a--------"
KIB = 1024


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def rss_bytes(name: str, permissions: str) -> int:
    """Of this process's maps of that memfd with those permissions: how much is in its page tables.

    Without the maps of an earlier test that nothing refers to any more and that were not yet collected.
    """
    gc.collect()
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            found = f"/memfd:{name}" in words and words[1] == permissions
        elif found and words[0] == "Rss:":
            total += int(words[1]) * KIB
    return total


@dataclass
class NativeStore:
    arena_bytes: int
    unit_bytes: int
    table_fd: int
    arena_fd: int
    arena: _native.Arena
    index: _native.Index
    readers: list[_native.Table] = field(default_factory=list)

    def table(self, index_key: bytes = INDEX_KEY) -> _native.Table:
        table = _native.Table(self.table_fd, index_key)
        self.readers.append(table)
        return table

    def put(self, number: int, chunk_bytes: int = 64 * KIB, *, group: int = 1, parent: bytes = b"") -> tuple[int, int]:
        """Grants a slot, commits key `number` there, and returns (slot, generation)."""
        [(slot, generation)] = self.index.grant(group, chunk_bytes, 1)
        commits = [(slot, generation, TENANT, key_of(number), parent)]
        assert self.index.commit(group, NAMESPACE, commits) == [_native.STORED]
        return slot, generation

    def offset(self, slot: int, chunk_bytes: int) -> int:
        return _native.slot_offset(slot, _native.class_bytes(chunk_bytes), self.unit_bytes)


@contextmanager
def native_store(
    arena_bytes: int = 16 * 64 * KIB,
    *,
    entries: int = 1000,
    prefaulted: int | None = None,
    eviction_policy: str = "lru",
    verify: bool = False,
) -> Iterator[NativeStore]:
    unit_bytes = _native.Index.unit_bytes_for(arena_bytes)
    table_bytes = _native.Index.table_bytes_for(entries, arena_bytes, unit_bytes)
    table_fd = _native.create_memfd("test-table", table_bytes)
    arena_fd = _native.create_memfd("test-arena", arena_bytes)
    try:
        arena = _native.Arena(arena_fd, arena_bytes)
        index = _native.Index(
            table_fd=table_fd,
            table_bytes=table_bytes,
            arena=arena,
            unit_bytes=unit_bytes,
            index_key=INDEX_KEY,
            instance_id=INSTANCE,
            eviction_policy=eviction_policy,
            verify=verify,
        )
        index.set_prefaulted(arena_bytes if prefaulted is None else prefaulted)
        store = NativeStore(arena_bytes, unit_bytes, table_fd, arena_fd, arena, index)
        yield store
        assert index.problems() == []
        for table in store.readers:
            table.close()
        arena.close()
    finally:
        os.close(table_fd)
        os.close(arena_fd)
