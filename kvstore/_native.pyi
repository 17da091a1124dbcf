"""The native core: bytes, keys, slots and file descriptors; no models, tokens or sockets.

Two kinds of process use it. The daemon owns one `Index`, the only writer of the table. Every attached process maps the
table read-only (`Table`) and the arena (`Arena`), and copies with a `Copier`, or on CUDA with a `DeviceCopier`. Calls
that may take long release the GIL (`populate`, `premap`, `fill`, lookups of more than 8,192 keys, the copier's);
`Index` and small lookups keep it, for they take microseconds and getting it back from a busy thread can take its switch
interval of 5 ms.

Slot numbers: the arena is cut into units of `unit_bytes`; slot = unit * slots_per_unit + i, where
slots_per_unit = unit_bytes // 4096, and its bytes start at unit * unit_bytes + i * class_bytes, where class_bytes is
the chunk's size rounded up to 4096 (`slot_offset` does this sum).
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

SLOT_ALIGNMENT: int  # 4096
KEY_BYTES_MIN: int  # 16
KEY_BYTES_MAX: int  # 64

# Codes in the first value of `Table.lookup` and in `Index.lookup`.
MISS: int  # 0
CPU: int  # 1
FS: int  # 2
PENDING: int  # 3

# Codes that `Index.commit` returns.
STORED: int  # 1
PRESENT: int  # 2
TIER_FULL: int  # 3  the table has no room for the entry
QUOTA: int  # 4  nothing more of this tenant may be evicted, and its quota has no room
NOT_GRANTED: int  # 7

EVICTIONS_KEPT: int  # 65,536: so many the index remembers
NOBODY: int  # 0: the evictor where it is no request of a process

COPY_KERNEL: str  # "avx512", "avx2" or "plain": what this machine's copies use

def digest(index_key: bytes, namespace: bytes, tenant: bytes, key: bytes) -> bytes:
    """SipHash-2-4 with 128 bits of output, of namespace + tenant + key: what the table finds a chunk by."""

def expand(
    pieces: NDArray[np.uint64],
    together: int,
    block_ids: NDArray[np.int64],
    block_count: int,
    first: int,
    blocks_per_chunk: int,
    chunks: NDArray[np.uint64],
    wanted: NDArray[np.bool_] | None,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """What lies together in device memory and in the arena: addresses there and here, and sizes.

    A row of `pieces` is a device address of block 0, the stride from block to block, the same two in a chunk, and how
    many bytes. Of each block `together` rows are taken after one another before the next block's. `block_ids[i]` is
    block `first + i` of the chunks, whose addresses `chunks` are; those not `wanted` are left out, whatever their id.
    ValueError for ids that are not below `block_count`, and for another number of chunks.
    """

def class_bytes(chunk_bytes: int) -> int: ...

class Buffers:
    """The memory of these objects, `nbytes` each, in place for as long as this lives. ValueError: another size;
    BufferError, ValueError or TypeError, as the object says: not contiguous, not writable, no buffer."""

    def __init__(self, objects: list[Buffer], nbytes: int, *, writable: bool) -> None: ...
    def addresses(self, positions: list[int]) -> NDArray[np.uint64]:
        """Where they begin. IndexError."""

def slot_offset(slot: int, class_bytes: int, unit_bytes: int) -> int: ...
def slot_addresses(arena: int, slots: list[int], class_bytes: int, unit_bytes: int) -> NDArray[np.uint64]:
    """Of an arena mapped at that address."""

def create_memfd(name: str, nbytes: int) -> int:
    """A memfd of mode 0600, not executable where the kernel can say so, close-on-exec. OSError on failure."""

def seal_arena(fd: int) -> None:
    """SHRINK|GROW|SEAL, in one call."""

def seal_table(fd: int) -> None:
    """SHRINK|GROW|FUTURE_WRITE|SEAL, in one call, after the daemon has mapped it for writing."""

def populate(address: int, nbytes: int) -> None:
    """Pre-fault for writing, with MADV_POPULATE_WRITE or by touching. OSError when the memory cannot be had."""

def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """The memory there comes from these NUMA nodes in turn, whoever touches it first. False, and nothing changed: this
    process has a memory policy of its own. OSError when the kernel refuses."""

def fill(address: int, nbytes: int, value: int) -> None: ...

class Table:
    """One process's read-only map of the daemon's table. Safe from many threads, `close` included: of a closed table
    every lookup is a miss, no slot is current, and the heartbeat's age is infinite. Copiers refuse it (ValueError).

    ValueError when the memory is not a table of this version, or `index_key` is not 16 bytes.
    """

    def __init__(self, fd: int, index_key: bytes) -> None: ...
    @property
    def instance_id(self) -> bytes: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def unit_bytes(self) -> int: ...
    @property
    def ready_bytes(self) -> int:
        """How much of the arena, from its start, the daemon has pre-faulted so far. Only grows."""

    def heartbeat_age_ms(self) -> float:
        """Since the daemon's event loop last ran, by CLOCK_MONOTONIC."""

    def premap(self, first: int, nbytes: int) -> int:
        """Of what lookups read, so many bytes from there on, into this process's page tables. Returns how many that
        were: 0 at the end, and of a closed table. Takes no memory but for the page tables; OSError without that."""

    def lookup(
        self, namespace: bytes, tenant: bytes, keys: Sequence[bytes]
    ) -> tuple[bytes, NDArray[np.uint32], NDArray[np.uint64]]:
        """Per key: a code, and for CPU the slot and generation. Never waits; may be stale a moment later.

        ValueError for a namespace or tenant that is not 16 bytes or a key outside 16 to 64 bytes.
        """

    def wait_shown(
        self, namespace: bytes, tenant: bytes, key: bytes, slot: int, generation: int, timeout_s: float
    ) -> bool:
        """Wait until a lookup finds the chunk in that slot and generation. False: it did not in that time."""

    def current(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> bytes:
        """Per slot: 1 when the slot still has that generation, else 0. Call it after the copy (acquire fence first)."""

    def close(self) -> None:
        """Unmaps, once the reads that other threads have begun are over."""

class Arena:
    """A map of the arena, MADV_DONTFORK. Daemon and attached processes use the same class."""

    def __init__(self, fd: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def view(self) -> memoryview:
        """Writable. Release it before `close`."""

    def close(self) -> None:
        """BufferError while a view is in use. An `Index` with verify keeps the memory mapped until it is gone."""

class Finished:
    """One job that ended. `failed` lists the indices into the job's slots whose generation had changed.

    A job that failed whole (its region was removed, the copier was closed) lists all of its slots, or all of its
    fragments where it has no slots, and has `nbytes` 0.
    """

    @property
    def job(self) -> int: ...
    @property
    def failed(self) -> list[int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def settled(self) -> bool:
        """False: the device is lost, and may still write to the slots. They must not be handed to anybody else."""

class Copier:
    """A pool of threads that runs copy jobs, each split over the threads, with streaming stores, fenced at its end.

    Jobs start in order of submission. Fragments outside the regions added before are refused (ValueError, nothing
    copied). Safe from many threads. `close` ends running jobs at the next fragment and joins the threads. At most
    65,536 jobs wait, run or are not yet asked for (RuntimeError). In a forked child every call but `close` raises
    RuntimeError.
    """

    def __init__(self, threads: int) -> None: ...
    def add_region(self, address: int, nbytes: int) -> None:
        """The same region may be added more than once, and is then removed as often. A fragment lies in one region."""

    def remove_region(self, address: int) -> None:
        """Waits until no running job touches the region; queued jobs that do fail whole."""

    def add_regions(self, addresses: NDArray[np.uint64], nbytes: int) -> None:
        """Regions of one size; all of them, or none."""

    def remove_regions(self, addresses: NDArray[np.uint64]) -> None: ...
    def submit(
        self,
        job: int,
        sources: NDArray[np.uint64],
        destinations: NDArray[np.uint64],
        sizes: NDArray[np.uint64] | int,
        *,
        table: Table | None = None,
        slots: NDArray[np.uint32] | None = None,
        generations: NDArray[np.uint64] | None = None,
    ) -> None:
        """`sizes`: in bytes, one for all or each its own. With a table: after the copy each slot's generation is
        compared, and those that changed are reported.

        ValueError also for a job number that is queued or running.
        """

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call. Does not wait."""

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        """True when none of the jobs is queued or running any more; unknown jobs count as ended."""

    def close(self) -> None: ...

CUDA_KERNELS: bytes  # the copy kernel as a fatbin, for every device from Hopper on; empty where there was no nvcc

class DeviceCopier:
    """Copies between the memory of one CUDA device and arenas, on streams of their own. Safe from many threads.

    What it is ordered against stands in native/cuda/copier.h. `background=False` makes no thread: then jobs go on in
    `advance`, `wait`, `unmap_arena` and `close` only. In a forked child every call but `close` raises RuntimeError.
    """

    def __init__(
        self,
        device: int,
        *,
        library: str = "libcuda.so.1",
        kernels: bytes = ...,
        load_kernel_bytes: int = 0,
        store_kernel_bytes: int = 0,
        kernel_fragments_min: int = 1,
        kernel_blocks: int = 12,
        in_flight_bytes: int = ...,
        pin_piece_bytes: int = ...,
        background: bool = True,
    ) -> None:
        """Keeps the device's primary context. `device` counts as CUDA_VISIBLE_DEVICES leaves them.

        Fragments below `load_kernel_bytes` (`store_kernel_bytes`) go by the kernel in `kernels`, on at most
        `kernel_blocks` multiprocessors, where a part of a job has `kernel_fragments_min` of them; the rest by the copy
        engines. At most `in_flight_bytes` (64 MiB) a direction are with the driver at a time. RuntimeError: no driver,
        no such device. ValueError: settings that cannot work, a kernel that was not built.
        """

    @property
    def device_name(self) -> str: ...
    @property
    def capability(self) -> str:
        """ "10.3"."""

    @property
    def numa_node(self) -> int:
        """Of the host's memory next to the device; -1: unknown."""

    @property
    def driver_version(self) -> int:
        """13000 is CUDA 13.0."""

    @property
    def has_batch(self) -> bool:
        """The driver takes many copies in one call (CUDA 12.8)."""

    @property
    def kernel_problem(self) -> str:
        """Why there is no copy kernel; empty: there is."""

    @property
    def lost(self) -> str:
        """Why every job fails from now on; empty: the device is well."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Bytes handed over to the copy engines, to the kernel, and of memory that was not pinned."""

    def add_memory(self, address: int, nbytes: int) -> None:
        """Device memory that copies may touch. ValueError: it overlaps what was added before."""

    def allocate(self, nbytes: int) -> int:
        """The address of device memory of its own, which copies may touch; `close` frees it. RuntimeError."""

    def add_host_memory(self, address: int, nbytes: int) -> None:
        """Host memory that stores may read: what the padding of slots is filled from."""

    def map_arena(self, arena: Arena, table: Table | None, *, pin: bool) -> None:
        """`pin`: somebody will call `pin_next`; copies of a piece that is ready wait until it is pinned. Else, and
        where `table` says that a piece is not ready, they go the slower way of ordinary memory."""

    def pin_next(self, address: int) -> str:
        """Page-lock another piece of the arena at `address`, first those that a copy waits for. "piece": done one,
        "nothing": none is ready, "all", "stopped": refused, or told to. One thread at a time."""

    def stop_pinning(self, address: int) -> None:
        """Copies of what is not pinned go the slower way from now on."""

    def pinned_bytes(self, address: int) -> int: ...
    def refusal(self, address: int) -> str:
        """The driver's answer that ended the pinning; empty: none."""

    def unmap_arena(self, address: int) -> None:
        """Fails jobs that have not begun, waits for the others, then unpins."""

    def suspend(self) -> None:
        """Device memory is about to be unmapped: fails the jobs that have not begun, waits for the others; every later
        one fails until `resume`."""

    def resume(self) -> None: ...
    def submit(
        self,
        job: int,
        sources: NDArray[np.uint64],
        destinations: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        *,
        is_load: bool,
        compute_stream: int,
        blocks: NDArray[np.int64],
        table: Table | None = None,
        slots: NDArray[np.uint32] | None = None,
        generations: NDArray[np.uint64] | None = None,
    ) -> None:
        """As of `Copier`, after all that `compute_stream` (a CUstream, 0: the default one) has been given so far, and
        after earlier jobs on the same `blocks`, unless both are stores. ValueError: nothing is copied. RuntimeError:
        the compute stream refuses."""

    def advance(self) -> bool:
        """Hand over what may go and take what has ended; whether there was any. Never waits."""

    def finished(self) -> list[Finished]: ...
    def wait(self, jobs: Collection[int], timeout_s: float) -> bool: ...
    def close(self) -> None:
        """Fails what has not begun, waits for what runs, unpins, gives the device back."""

class Removal:
    """One removal under way, and what it has removed so far (with `dry_run`: would have)."""

    @property
    def chunks(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Of the chunks' slots."""

    @property
    def skipped_pinned(self) -> int:
        """Chunks that are meant, but leased."""

class Index:
    """The daemon's index: the only writer of the table. One thread calls it (the event loop); no I/O, no clock.

    `prefaulted_bytes` of the arena can be granted. Every chunk belongs to (namespace, tenant, key); `group` numbers are
    chosen by the caller. Without an arena only sizes count, and `arena_bytes` says how much there would be.
    `eviction_policy`: lru, probation or adaptive. `verify=True` (tests) fills a slot with POISON when it is granted and
    counts commits that still hold poison.
    """

    def __init__(
        self,
        *,
        table_fd: int,
        table_bytes: int,
        arena: Arena | None,
        arena_bytes: int = 0,
        unit_bytes: int,
        index_key: bytes,
        instance_id: bytes,
        eviction_policy: str = "lru",
        verify: bool = False,
    ) -> None: ...
    @staticmethod
    def table_bytes_for(entries: int, arena_bytes: int, unit_bytes: int) -> int: ...
    @staticmethod
    def unit_bytes_for(arena_bytes: int) -> int:
        """1/64 of the arena, rounded up to 4096, at most 1 GiB."""

    def heartbeat(self) -> None: ...
    def set_prefaulted(self, nbytes: int) -> None: ...
    def grant(self, group: int, chunk_bytes: int, count: int) -> list[tuple[int, int]]:
        """Up to `count` of (slot, generation), each generation raised before it is returned; fewer: the tier is full.

        Evicts when nothing is free: of this class's chunks that have neither resident children nor a lease the one that
        the policy names (first those whose parent was taken from them), or a whole slab of another class not used since
        any of them. Fewer slots than asked for means that all the rest is leased, granted, or a parent of such. `count`
        0 only makes the size class known.

        ValueError: chunk larger than the arena, or more than 32 size classes.
        """

    def commit(
        self,
        group: int,
        namespace: bytes,
        commits: Sequence[tuple[int, int, bytes, bytes, bytes]],
        now_ms: int = 0,
        *,
        is_use: bool = True,
    ) -> list[int]:
        """(slot, generation, tenant, key, parent key or b"") -> one code each. Not STORED: the slot is free again.

        NOT_GRANTED also for a slot that was granted before a removal that covers the chunk. `is_use`: a request brought
        the chunks, which counts as its use of each.
        """

    def abort(self, group: int, refs: Sequence[tuple[int, int]]) -> int:
        """How many of the (slot, generation) were granted to the group; others are ignored (repeated, foreign)."""

    def lease(self, group: int, refs: Sequence[tuple[int, int]], deadline_ms: int) -> list[bool]: ...
    def release(self, group: int, refs: Sequence[tuple[int, int]]) -> list[bool]: ...
    def expire_leases(self, now_ms: int, *, limit: int = ...) -> int:
        """How many of those whose deadline has passed were ended: `limit` at the most."""

    def begin_io(self, slot: int, generation: int) -> bool:
        """The daemon itself reads the chunk's slot, which stays put until as many `end_io`. False: the chunk has gone.

        Not counted towards the half of the arena that may be leased.
        """

    def end_io(self, slot: int, generation: int) -> None: ...
    def set_lower(self, namespace: bytes, tenant: bytes, key: bytes, where: int) -> None:
        """What the table shows of a chunk that the cpu tier does not hold: FS, PENDING, or MISS for no longer there.

        A hint, left out where the table has no room. A chunk of the cpu tier stays CPU and becomes FS when evicted.
        """

    def touch(self, namespace: bytes, tenant: bytes, keys: Sequence[bytes], now_ms: int = 0, *, again: int = 0) -> None:
        """Head first; the tail is touched first, so that a parent is never older than its child.

        One request is one use of each chunk: the first `again` keys it has used before, which makes them young but does
        not count. A key that is not here counts, too: a request that is about to store it leaves it out.
        """

    def lookup(self, namespace: bytes, tenant: bytes, keys: Sequence[bytes]) -> bytes:
        """Codes as of `Table.lookup`, full keys compared."""

    def end_leases(self, group: int, *, limit: int = ...) -> bool:
        """The group's, but `limit` at the most. False: there are more."""

    def classes_in_use(self) -> list[int]:
        """Bytes of the slots of each size class of which some slot is held. Others make way for new ones."""

    def begin_removal(
        self,
        *,
        namespace: bytes | None = None,
        tenant: bytes | None = None,
        used_before_ms: int | None = None,
        nbytes: int | None = None,
        dry_run: bool = False,
    ) -> Removal:
        """Of every chunk of the namespace and tenant (None: any) whose last use was before `used_before_ms`; with
        `nbytes` the least recently used of them (first those whose parent has gone) until so many bytes are free.

        Without `used_before_ms` and `nbytes` a write begun before this call can not become visible: its commit is
        NOT_GRANTED. ValueError: 0 bytes.
        """

    def remove(self, removal: Removal, steps: int) -> bool:
        """Go on with it; True when it is done. A step takes about a microsecond."""

    def holds(self, *, namespace: bytes | None = None, tenant: bytes | None = None) -> bool:
        """Whether there is any chunk of this namespace and tenant (None: any)."""

    def usage(
        self, after: tuple[bytes, bytes] | None = None, *, limit: int
    ) -> list[tuple[bytes, bytes, int, int, int]]:
        """(namespace, tenant, chunks, bytes of their slots, chunks that a lower tier has too) in the order of the first
        two, from `after` on."""

    def chunks(
        self,
        start: int,
        *,
        namespace: bytes | None = None,
        tenant: bytes | None = None,
        steps: int,
        limit: int,
    ) -> tuple[list[tuple[bytes, bytes, bytes, int, int, bool]], int | None]:
        """(namespace, tenant, key, bytes of its slot, last use in ms, leased), and where to go on; None: nowhere.

        Begin at 0. Looks at `steps` places and returns at most `limit` chunks.
        """

    def next_to_go(self, nbytes: int, *, steps: int, limit: int) -> list[tuple[bytes, bytes, bytes, int, int]]:
        """(namespace, tenant, key, slot, generation) of chunks that no lower tier has and nobody writes there, among
        those that would be evicted for the next `nbytes`, in that order; what the adaptive policy takes from the young
        end is not foreseen. Looks at `steps` chunks at most."""

    def unwritten(
        self, start: int, *, used_before_ms: int | None = None, steps: int, limit: int
    ) -> tuple[list[tuple[bytes, bytes, bytes, int, int]], int | None]:
        """The same of all chunks whose last use was before that, and where to go on, as in `chunks`."""

    def used_often(
        self, namespace: bytes, tenant: bytes, keys: Sequence[bytes], uses: int
    ) -> list[tuple[bytes, bytes, bytes, int, int]]:
        """The same of those of the keys that were used at least so often. The request that stored a chunk is its first
        use."""

    def make_room_for(self, evictor: int, now_ms: int) -> None:
        """For whom (a number of the caller's), and when, the evictions from now on make room."""

    def evicted_below(self, namespace: bytes, tenant: bytes, key: bytes, now_ms: int) -> None:
        """The tier below has evicted it by itself: remembered as the index's own evictions are."""

    @property
    def evictions_told(self) -> int:
        """Of both tiers, so far: the number of the last one."""

    def evictions_of(
        self, key: bytes, *, namespace: bytes | None = None, tenant: bytes | None = None, limit: int
    ) -> list[tuple[int, int, int, int, bytes, tuple[bytes, bytes] | None]]:
        """What is remembered of the last EVICTIONS_KEPT, newest first: (number, when, cause, evictor, namespace,
        (namespace, key) of the chunk that has taken the slot or None). It looks at all: less than a millisecond.

        Of this key in that namespace and tenant, or in any; of 8 bytes: of all keys that begin so. Causes: 0 a
        slot was needed, 1 slots of another size, 2 an entry of the table, 3 room within the tenant's quota, 4 it went
        from the tier below.
        """

    def set_quota(self, tenant: bytes, nbytes: int | None) -> int:
        """What the tenant's slots may take; None: no limit. Returns what they take now (0 without a limit).

        A commit beyond it evicts the tenant's own least recently used chunks (not the parent it names), or is answered
        QUOTA, also where the parent it names is not there.
        """

    def order_for_quotas(self, steps: int) -> bool:
        """Looks at so many records for chunks of tenants with a new quota, so that the oldest of each goes first. True:
        done. Until then another of the tenant's chunks may go, or a commit be refused for want of one."""

    def stats(self) -> dict[str, int]:
        """used_bytes granted_bytes pinned_bytes io_bytes chunks grants leases evictions unwritten_evictions ghosts
        removals entries entries_max chunks_max scopes tenants poison_commits digest_collisions.
        `unwritten_evictions`: of chunks that no lower tier had. `ghosts`: chunks that are gone, but whose uses are
        remembered. `entries_max` counts every place of the table; an insert can fail before. `chunks_max`: beyond so
        many chunks and grants, a grant evicts. `scopes`: pairs of namespace and tenant."""

    def problems(self) -> list[str]:
        """Every invariant that does not hold, a sentence each: both parts below."""

    def problems_of_chunks(self, start: int, *, steps: int) -> tuple[list[str], int | None]:
        """Those that concern one chunk, of so many records from `start` on; and where to go on, as in `chunks`."""

    def problems_of_sums(self) -> list[str]:
        """Those of slots, grants and leases, and of all sums, as of now. Takes up to 0.3 us a chunk."""

class Replay:
    """Plays requests against an index (and a second one for the tier below): all chunks of one size, no bytes.

    Each request finds its longest prefix, has what is only below read up, touches its chain and stores what is missing,
    as an engine would; what is then in the upper tier and not below is written there. The indices' arenas have 4096
    bytes for each chunk.
    """

    def __init__(self, cpu: Index, cpu_chunks: int, fs: Index | None = None) -> None: ...
    def find(self, chain: NDArray[np.uint64]) -> bytes:
        """A code for each chunk: CPU, FS (only there) or MISS."""

    def serve(
        self,
        chains: NDArray[np.uint64],
        ends: NDArray[np.uint64],
        load_ends: NDArray[np.uint32],
        store_ends: NDArray[np.uint32],
        write_ends: NDArray[np.uint32],
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
        """Request i is chunks ends[i-1] to ends[i] of `chains`, of which load_ends[i], from the first, may be loaded,
        store_ends[i] stored, and write_ends[i] written below.

        Per request: chunks loaded (of the longest prefix present in either tier), those of them that only the lower one
        had, chunks new in the upper one, chunks new in the lower one. ValueError: ends that fall, or go beyond the
        chains.
        """

POISON: int  # 0xA5, the byte that verify mode fills granted slots with

# Checksums and batched file I/O

IO_HEAD_BYTES: int  # 4096

def crc32c(buffer: Buffer) -> int:
    """CRC-32C, by an instruction where the host has one."""

def crc32c_table(buffer: Buffer) -> int:
    """The same without the instruction, for tests."""

def crc32c_kind() -> str:
    """What `crc32c` uses here: "sse4.2", "armv8" or "table"."""

class IoDone:
    """One request that ended or, if `late`, is past its deadline and still running: it will be reported again.

    `error` is an errno or 0; ENODATA: the file ends before the request does; ETIMEDOUT: late, or cancelled at its
    deadline before it ran; ECANCELED: by `close`. `checksum` is the payload's; `head` what was read in front of it.
    """

    @property
    def request(self) -> int: ...
    @property
    def error(self) -> int: ...
    @property
    def late(self) -> bool: ...
    @property
    def checksum(self) -> int: ...
    @property
    def head(self) -> bytes: ...

class IoPool:
    """Threads that read and write (head, payload) pairs, adjacent in the file, in pieces. Safe from any thread.

    Reads go first. Payloads must lie in a region, else ValueError and nothing is done; their memory belongs to the
    pool until the request was reported with `late` False. Deadlines count from submission; 0: none.
    """

    def __init__(self, n_read_threads: int, n_write_threads: int) -> None: ...
    @property
    def event_fd(self) -> int:
        """Readable when `poll` has something to return."""

    def add_region(self, address: int, nbytes: int) -> None: ...
    def read(
        self,
        request: int,
        fd: int,
        offset: int,
        address: int,
        nbytes: int,
        *,
        with_head: bool = False,
        deadline_ms: int = 0,
    ) -> None:
        """With a head: IO_HEAD_BYTES at the offset go to `IoDone.head`, the `nbytes` behind them to the address."""

    def read_heads(self, first_request: int, fd: int, offsets: list[int]) -> None:
        """Heads alone, as requests of rising numbers."""

    def write(
        self,
        request: int,
        fd: int,
        offset: int,
        address: int,
        nbytes: int,
        *,
        head: bytes = b"",
        payload_checksum_at: int = -1,
        head_checksum_at: int = -1,
        deadline_ms: int = 0,
    ) -> None:
        """The head is written while other pieces are under way, so only success says what lies there.

        `payload_checksum_at`: where in the head the payload's CRC-32C goes before it is written; then that of the
        head's first `head_checksum_at` bytes goes behind them. Both little-endian, 4 bytes; negative: nowhere."""

    def poll(self) -> list[IoDone]:
        """What ended or became late since the last call. Does not wait."""

    def close(self, timeout_s: float) -> bool:
        """Cancels what waits, waits for what runs. False when something still ran: its memory must stay mapped."""
