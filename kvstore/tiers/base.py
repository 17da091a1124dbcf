"""What every tier below the engines' reach has in common: whole chunks go in, come out, or are forgotten.

One event loop's thread calls a tier and is called back by it. No call waits; whatever takes time ends in a callback on
that loop, and never inside the call that started it.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ChunkId(NamedTuple):
    """Whose bytes: a namespace and a tenant of 16 bytes each, a key of 16 to 64."""

    namespace: bytes
    tenant: bytes
    key: bytes


class Memory(NamedTuple):
    """Where a chunk's bytes lie: `nbytes` of them, and zeros up to the next multiple of 4096 (also when read into).

    The address is a multiple of 4096, inside a region the tier was told of.
    """

    address: int
    nbytes: int


class WriteOutcome(enum.Enum):
    STORED = "stored"
    PRESENT = "present"  # held already, or being written for somebody else
    FULL = "full"  # no room that may be taken, or too many writes wait
    SICK = "sick"  # the place below failed; it is tried again by itself
    LATE = "late"  # the deadline passed; nothing was stored
    ABORTED = "aborted"  # removed while it was written, or the tier is closing


class ReadOutcome(enum.Enum):
    READ = "read"
    ABSENT = "absent"  # also: removed while it was read
    DAMAGED = "damaged"  # not the bytes that were written; the chunk is forgotten
    BUSY = "busy"  # too many reads wait
    SICK = "sick"
    LATE = "late"  # the deadline passed; the chunk stays


WriteDone = Callable[[WriteOutcome], None]
ReadDone = Callable[[ReadOutcome], None]
Released = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """What a removal covers: every field that is given must match; none given covers everything."""

    namespace: bytes | None = None
    tenant: bytes | None = None
    chunks: frozenset[ChunkId] | None = None

    def covers(self, chunk: ChunkId) -> bool:
        return (
            (self.namespace is None or chunk.namespace == self.namespace)
            and (self.tenant is None or chunk.tenant == self.tenant)
            and (self.chunks is None or chunk in self.chunks)
        )


@dataclass(frozen=True, slots=True)
class Removed:
    """`failed`: why the removal could not be made to last; the chunks are out of reach all the same. None: it lasts."""

    chunks: int
    nbytes: int
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Byte counts are of whole slots. `capacity_bytes` counts all that the tier may ever take, `overhead_bytes` what it
    takes besides chunks' slots."""

    capacity_bytes: int
    used_bytes: int
    overhead_bytes: int
    chunks: int
    evictions: int
    corruptions: int
    dropped: int  # writes refused or failed


class Tier(Protocol):
    """A place that holds chunks.

    write and read call `done` exactly once and `released` exactly once, `released` never before `done`: until then the
    memory belongs to the tier, deadline or not. What a read brought counts only where `done` said READ; the memory may
    have been written to in any case. A chunk is visible from the moment `done` said STORED. Making room by eviction is
    the tier's own affair. Two writes of one chunk: the first wins.
    """

    def contains(self, chunk: ChunkId) -> bool: ...

    def write(self, chunk: ChunkId, memory: Memory, done: WriteDone, released: Released) -> None: ...

    def read(self, chunk: ChunkId, memory: Memory, done: ReadDone, released: Released) -> None:
        """ValueError when the memory is not of the chunk's length."""

    def remove(self, scope: Scope, done: Callable[[Removed], None]) -> None:
        """Forget for good, also what is being written. Lookups miss at once; `done` comes when it will last."""

    def stats(self) -> TierStats: ...

    def problems(self) -> Iterator[str]:
        """Every invariant that does not hold, a sentence each."""
