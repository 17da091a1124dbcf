"""The cpu tier: the arena and the table, two sealed memfds, and the Index that alone writes the table.

Concurrency: the event loop's thread makes the tier and is the only one that calls its Index. One thread of the tier
itself pre-faults the arena (the GIL is released meanwhile) and tells the loop how far it is through
`announce`, which must hand the number to the loop's thread; a slot is granted only below that mark, so nobody ever
waits for a first touch, and memory that cannot be had is found out before anybody writes to it. When the daemon dies
the memfds live on in the processes that map them, sealed; the next daemon makes new ones.
"""

import logging
import threading
from collections.abc import Callable

from kvstore import _native, numa
from kvstore.config import EVICTION_POLICY_DEFAULT
from kvstore.errors import ConfigurationError
from kvstore.tiers.host_memory import MemoryLimit, huge_page_advice, memory_limits

# One entry of the table for so many bytes of a tier, which is 0.13 % of the arena. Chunks of a model of 1B are larger.
BYTES_PER_ENTRY, BYTES_PER_ENTRY_OF_LOWER_TIER = 64 << 10, 128 << 10
POPULATE_BYTES = 2 << 20  # a huge page; the kernel holds the map's lock meanwhile, so the loop must not wait for more
MEMORY_RESERVE_BYTES = 256 << 20  # left to the host while pre-faulting
WAIT_FOR_MEMORY_S = 0.5
WAIT_REPORT_S = 10.0

_log = logging.getLogger(__name__)


class CpuTier:
    """Arena, table and index of one daemon.

    Guarantees: both memfds are sealed before their descriptors can be handed out; `arena_bytes` is at most the
    `cpu_bytes` asked for; only memory already present is granted.
    """

    def __init__(
        self,
        *,
        cpu_bytes: int,
        index_bytes: int | None,
        index_key: bytes,
        instance_id: bytes,
        lower_bytes: int = 0,
        eviction_policy: str = EVICTION_POLICY_DEFAULT,
        verify: bool = False,
    ) -> None:
        """`lower_bytes`: of the tiers below, whose chunks have entries in the table as well.

        ConfigurationError when the host or the cgroup can never hold it, or `index_bytes` is too small."""
        self.arena_bytes = cpu_bytes - cpu_bytes % _native.SLOT_ALIGNMENT
        self.eviction_policy = eviction_policy
        self._lower_bytes = lower_bytes
        self.unit_bytes = _native.Index.unit_bytes_for(self.arena_bytes)
        require_memory(self.arena_bytes, 0, memory_limits())
        try:
            self.table_bytes = self._table_bytes(index_bytes)
        except ValueError as error:  # more than slot numbers can name
            raise ConfigurationError(f"--cpu-bytes, --fs-bytes: {error}; ask for less") from None
        require_memory(self.arena_bytes, self.table_bytes, memory_limits())

        self.arena_fd = _native.create_memfd("kvstore-arena", self.arena_bytes)
        self.table_fd = _native.create_memfd("kvstore-table", self.table_bytes)
        self.arena = _native.Arena(self.arena_fd, self.arena_bytes)
        numa.spread(self.arena, numa.memory_nodes())
        self.index = _native.Index(
            table_fd=self.table_fd,
            table_bytes=self.table_bytes,
            arena=self.arena,
            unit_bytes=self.unit_bytes,
            index_key=index_key,
            instance_id=instance_id,
            eviction_policy=eviction_policy,
            verify=verify,
        )
        # After the daemon's own writable maps exist: FUTURE_WRITE refuses every later one.
        _native.seal_arena(self.arena_fd)
        _native.seal_table(self.table_fd)
        self.ready_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start_prefault(self, announce: Callable[[int], None]) -> None:
        """`announce(n)` is called from the tier's thread whenever n bytes from the arena's start are present."""
        self._thread = threading.Thread(target=self._prefault, args=(announce,), name="kvstore-prefault", daemon=True)
        self._thread.start()

    def set_ready(self, nbytes: int) -> None:
        """On the event loop's thread."""
        assert self.ready_bytes <= nbytes <= self.arena_bytes, f"{nbytes} ready after {self.ready_bytes}"
        self.ready_bytes = nbytes
        self.index.set_prefaulted(nbytes)

    def close(self) -> None:
        """Ends pre-faulting. Maps and descriptors end with the process: attached processes may still copy."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def warn_if_table_is_short(self, slot_bytes: int) -> None:
        """Of chunks smaller than those the table was sized for it is full before the arena is."""
        chunks = self.index.stats()["chunks_max"]
        if chunks * slot_bytes >= self.arena_bytes:
            return
        _log.warning(
            "chunks in slots of %d bytes: the table has room for %d, so at most %d%% of the arena will be used; take "
            "larger chunks (block_size in the engine), or start the daemon with --index-bytes %d",
            slot_bytes, chunks, 100 * chunks * slot_bytes // self.arena_bytes, self._table_bytes_for(slot_bytes),
        )  # fmt: skip

    def _table_bytes_for(self, slot_bytes: int) -> int:
        """Of one with an entry for each slot of the arena, were all of that size, and for the tiers below."""
        entries = self.arena_bytes // slot_bytes + self._lower_bytes // BYTES_PER_ENTRY_OF_LOWER_TIER
        return _native.Index.table_bytes_for(max(1, entries), self.arena_bytes, self.unit_bytes)

    def _table_bytes(self, index_bytes: int | None) -> int:
        if index_bytes is None:
            return self._table_bytes_for(BYTES_PER_ENTRY)
        least = _native.Index.table_bytes_for(1, self.arena_bytes, self.unit_bytes)
        if index_bytes < least:
            raise ConfigurationError(
                f"--index-bytes is {index_bytes}, and a table for an arena of {self.arena_bytes} bytes takes at least "
                f"{least}; leave the flag out for {self._table_bytes_for(BYTES_PER_ENTRY)}"
            )
        return min(index_bytes, self._table_bytes_for(_native.SLOT_ALIGNMENT))

    def _prefault(self, announce: Callable[[int], None]) -> None:
        ready = 0
        while ready < self.arena_bytes and not self._stop.is_set():
            # A slab at a time: what is announced can be granted.
            slab_end = min(ready + self.unit_bytes, self.arena_bytes)
            if not self._wait_for_memory(slab_end - ready):
                return
            for start in range(ready, slab_end, POPULATE_BYTES):
                if self._stop.is_set():
                    return
                try:
                    _native.populate(self.arena.address + start, min(POPULATE_BYTES, slab_end - start))
                except OSError as error:
                    _log.error(
                        "the arena ends at %d of %d bytes: the rest could not be had (%s)",
                        ready, self.arena_bytes, error,
                    )  # fmt: skip
                    return
            ready = slab_end
            announce(ready)
        if ready == self.arena_bytes:
            advice = huge_page_advice()
            _log.info("the arena's %d bytes are all in memory%s", ready, f"; {advice}" if advice else "")

    def _wait_for_memory(self, nbytes: int) -> bool:
        """Until `nbytes` and the reserve can be had. False when the tier is closing."""
        waited_s = 0.0
        while (short := shortage(nbytes, memory_limits())) is not None:
            if waited_s % WAIT_REPORT_S == 0:
                _log.warning(
                    "the arena waits for memory: its next %d bytes and a reserve of %d are wanted, %s has %d available",
                    nbytes, MEMORY_RESERVE_BYTES, short.owner, short.available_bytes,
                )  # fmt: skip
            if self._stop.wait(WAIT_FOR_MEMORY_S):
                return False
            waited_s += WAIT_FOR_MEMORY_S
        return True


def require_memory(arena_bytes: int, table_bytes: int, limits: list[MemoryLimit]) -> None:
    """ConfigurationError, naming both numbers, when some limit can never hold arena and table."""
    for limit in limits:
        if arena_bytes + table_bytes > limit.total_bytes:
            ask_less = "--cpu-bytes" if arena_bytes > table_bytes else "--fs-bytes (or --index-bytes)"
            table = f" the table of all tiers' chunks takes {table_bytes} bytes," if table_bytes else ""
            raise ConfigurationError(
                f"--cpu-bytes asks for an arena of {arena_bytes} bytes ({_gib(arena_bytes)}),{table} and {limit.owner} "
                f"has {limit.total_bytes} bytes of memory; ask for less {ask_less}: of these {_gib(limit.total_bytes)} "
                "engines and system need their part"
            )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):,.1f} GiB"


def shortage(nbytes: int, limits: list[MemoryLimit]) -> MemoryLimit | None:
    """The limit that cannot give `nbytes` now and keep its reserve."""
    for limit in limits:
        # A small cgroup keeps a 32nd of its own size free rather than the whole reserve.
        reserve = min(MEMORY_RESERVE_BYTES, limit.total_bytes // 32)
        if limit.available_bytes < nbytes + reserve:
            return limit
    return None
