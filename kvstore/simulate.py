"""Replay of a request trace: what tiers of given sizes would have held, saved and written.

What stays is decided by the daemon's own native index, here without bytes (`_native.Replay`); the fs tier below is one,
too, in plain LRU order, as its catalog keeps it. Recompute and transfer times are the cost model's. Requests come one
after the other in the trace's order: nothing overlaps, so no store is late and no lease is in the way. Every hit is
loaded.

A trace has one JSON object a line: `timestamp` (ms), `input_length` (tokens), `hash_ids` (one for each block of prompt
tokens, chained: equal ids mean equal prefixes up to there). Pure but for `read_trace`.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import CPU, FS, MISS
from kvstore.admission import Admission, Hit, Mode, Priors, leading
from kvstore.costmodel import KVSize, RecomputeModel, TransferModel, drive_writes_per_day, recompute_s, transfer_s
from kvstore.decisions import Room, is_full
from kvstore.errors import ConfigurationError
from kvstore.profiles.machine import Machine
from kvstore.tiers.host_memory import memory_limits

ADMISSIONS = ("always", "never", "model")
FS_POLICY = "lru"
CHUNKS_MAX = 1 << 28  # per tier
INDEX_BYTES_PER_CHUNK = 300  # about, with its part of the table
REQUESTS_PER_CALL = 1_000  # an interrupt is heard in between
_BLOCK_TOKENS = tuple(1 << power for power in range(17))
_TIMESTAMP_MS_MAX = 1e15  # some 30,000 years
_TOKENS_MAX = 1 << 40
_BLOCKS_OFF_BY_MORE_THAN_ONE = 0.1  # of the requests, beyond which the block size is not to be told


@dataclass(frozen=True, slots=True)
class Trace:
    """Request i refers to blocks ends[i-1] to ends[i] of `ids`."""

    timestamps_ms: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    ids: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    tokens_per_block: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends.astype(np.int64), prepend=0)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return float(np.ptp(self.timestamps_ms)) / 1e3 if len(self.timestamps_ms) else 0.0

    def in_chunks(self, tokens_per_chunk: int) -> "Trace":
        """Several blocks a chunk, which has the id of its last one; an incomplete last chunk is dropped.
        ConfigurationError."""
        blocks, rest = divmod(tokens_per_chunk, self.tokens_per_block)
        if blocks < 1 or rest:
            raise ConfigurationError(
                f"--tokens-per-chunk {tokens_per_chunk} is not a multiple of the trace's blocks of "
                f"{self.tokens_per_block} tokens"
            )
        if blocks == 1:
            return self
        chains = [chain[blocks - 1 :: blocks] for chain in np.split(self.ids, self.ends[:-1].astype(np.int64))]
        return _trace(self.timestamps_ms, self.input_tokens, chains, tokens_per_chunk)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Of the engine whose time is saved. Each load moves, beside its tokens' KV, one state and the windows at its end:
    on a link one rank's, from disk those of all ranks."""

    recompute: RecomputeModel
    kv: KVSize  # of all ranks
    kv_on_rank: KVSize
    kv_from_disk: KVSize  # what a rank's load from disk takes as long as
    machine: Machine
    fs_link: TransferModel  # both hops
    note: str

    def chunk_bytes(self, tokens_per_chunk: int) -> int:
        return round(self.kv.bytes_per_token * tokens_per_chunk)


@dataclass(frozen=True, slots=True)
class TierResult:
    name: str
    capacity_chunks: int
    hits: int
    evictions: int
    written_chunks: int


@dataclass(frozen=True, slots=True)
class Simulation:
    trace: Trace
    eviction_policy: str
    admission: str
    hardware: Hardware
    tiers: tuple[TierResult, ...]  # cpu, and fs where there is one
    hits: NDArray[np.uint32]  # chunks, per request, of either tier
    fs_hits: NDArray[np.uint32]
    drive_bytes: float
    replay_s: float

    @property
    def chunk_bytes(self) -> int:
        return self.hardware.chunk_bytes(self.trace.tokens_per_block)

    @property
    def chunk_hit_rate(self) -> float:
        return int(self.hits.sum()) / max(1, len(self.trace.ids))

    @property
    def hit_tokens(self) -> NDArray[np.int64]:
        """The last block of a prompt may be a part of one."""
        return np.minimum(self.hits.astype(np.int64) * self.trace.tokens_per_block, self.trace.input_tokens)

    @property
    def token_hit_rate(self) -> float:
        return int(self.hit_tokens.sum()) / max(1, int(self.trace.input_tokens.sum()))

    @property
    def recompute_s(self) -> float:
        """What the hits would have cost to compute."""
        model = self.hardware.recompute
        return float(sum(count * recompute_s(model, 0, tokens) for tokens, count in _counted(self.hit_tokens)))

    @property
    def load_s(self) -> float:
        """States and windows are those of a hit's end, so of the lower tier where both have a part of it."""
        hardware = self.hardware
        fs_tokens = np.minimum(self.fs_hits.astype(np.int64) * self.trace.tokens_per_block, self.hit_tokens)
        cpu_tokens = self.hit_tokens - fs_tokens
        loads = (
            (hardware.machine.link, hardware.kv_on_rank, cpu_tokens[fs_tokens == 0]),
            (hardware.machine.link, KVSize(hardware.kv_on_rank.bytes_per_token), cpu_tokens[fs_tokens > 0]),
            (hardware.fs_link, hardware.kv_from_disk, fs_tokens),
        )
        return float(
            sum(
                count * transfer_s(link, kv.of(loaded))
                for link, kv, tokens in loads
                for loaded, count in _counted(tokens)
            )
        )

    @property
    def seconds_saved(self) -> float:
        """Recompute time that the hits spared, less the time that their loads took."""
        return self.recompute_s - self.load_s

    @property
    def drive_writes_per_day(self) -> float | None:
        if len(self.tiers) < 2 or self.trace.seconds == 0:
            return None
        written = self.tiers[1].written_chunks * self.chunk_bytes
        return drive_writes_per_day(written / self.trace.seconds, self.drive_bytes)

    @property
    def references_per_s(self) -> float:
        return len(self.trace.ids) / self.replay_s if self.replay_s > 0 else 0.0

    def document(self) -> dict[str, object]:
        """What `kvstore simulate --json` prints."""
        return {
            "requests": len(self.trace.ends),
            "chunk_references": len(self.trace.ids),
            "tokens": int(self.trace.input_tokens.sum()),
            "trace_seconds": self.trace.seconds,
            "tokens_per_chunk": self.trace.tokens_per_block,
            "chunk_bytes": self.chunk_bytes,
            "eviction_policy": self.eviction_policy,
            "admission": self.admission,
            "hardware": self.hardware.note,
            **self.hardware.machine.document(),
            "prompt_bytes_not_counted": self.hardware.kv.state_bytes,
            "chunk_hit_rate": self.chunk_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "seconds_saved": self.seconds_saved,
            "recompute_seconds": self.recompute_s,
            "load_seconds": self.load_s,
            "bytes_written": self.tiers[0].written_chunks * self.chunk_bytes,
            "drive_writes_per_day": self.drive_writes_per_day,
            "tiers": [
                {
                    "name": tier.name,
                    "capacity_chunks": tier.capacity_chunks,
                    "capacity_bytes": tier.capacity_chunks * self.chunk_bytes,
                    "hits": tier.hits,
                    "evictions": tier.evictions,
                    "bytes_written": tier.written_chunks * self.chunk_bytes,
                }
                for tier in self.tiers
            ],
            "chunk_references_per_s": self.references_per_s,
        }


def simulate(
    trace: Trace,
    *,
    cpu_chunks: int,
    fs_chunks: int | None,
    eviction_policy: str,
    admission: str,
    hardware: Hardware,
    drive_bytes: float,
) -> Simulation:
    """`fs_chunks` None: no fs tier. ConfigurationError: a tier without a chunk, or larger than can be simulated, or
    than this machine's memory allows."""
    assert admission in ADMISSIONS, f"admission {admission!r}"
    _require_possible({"cpu": cpu_chunks} if fs_chunks is None else {"cpu": cpu_chunks, "fs": fs_chunks})
    cpu = _index("cpu", cpu_chunks, eviction_policy)
    fs = None if fs_chunks is None else _index("fs", fs_chunks, FS_POLICY)
    replay = _native.Replay(cpu, cpu_chunks, fs)
    began_s = time.perf_counter()
    if admission == Mode.MODEL:
        columns = list(
            _decided(
                trace,
                replay,
                partial(_is_full, cpu, cpu_chunks),
                None if fs is None or fs_chunks is None else partial(_is_full, fs, fs_chunks),
                hardware,
            )
        )
    else:
        lengths = trace.lengths.astype(np.uint32)
        ends = lengths if admission == Mode.ALWAYS else np.zeros_like(lengths)
        columns = [
            replay.serve(*_chains(trace, first, REQUESTS_PER_CALL), *[ends[first : first + REQUESTS_PER_CALL]] * 3)
            for first in range(0, len(ends), REQUESTS_PER_CALL)
        ]
    replay_s = time.perf_counter() - began_s
    hits, fs_hits, stored, written = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    evictions = cpu.stats()["evictions"]
    tiers = [TierResult("cpu", cpu_chunks, int(hits.sum() - fs_hits.sum()), evictions, int(stored.sum()))]
    if fs is not None and fs_chunks is not None:
        tiers.append(TierResult("fs", fs_chunks, int(fs_hits.sum()), fs.stats()["evictions"], int(written.sum())))
    return Simulation(trace, eviction_policy, admission, hardware, tuple(tiers), hits, fs_hits, drive_bytes, replay_s)


def _chains(trace: Trace, first: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The ids of these requests, one after the other, and where each ends among them."""
    begin = int(trace.ends[first - 1]) if first else 0
    ends = trace.ends[first : first + count]
    return trace.ids[begin : int(ends[-1])], ends - np.uint64(begin)


class _Engine:
    """An engine's own policy, asked request by request; it measures what its transfers take on this hardware."""

    def __init__(self, hardware: Hardware, tokens_per_chunk: int) -> None:
        self._hardware = hardware
        self._tokens_per_chunk = tokens_per_chunk
        self._chunk_bytes = hardware.chunk_bytes(tokens_per_chunk)
        on_rank = hardware.kv_on_rank.bytes_per_token / hardware.kv.bytes_per_token
        link = hardware.machine.link
        copy = TransferModel(link.bytes_per_s / on_rank, link.overhead_s)
        self._now_s = 0.0  # only loads take time
        self._admission = Admission(
            Mode.MODEL,
            Priors(
                recompute=hardware.recompute,
                load=copy,
                store=copy,
                disk=hardware.machine.disk.read,
                disk_write_bytes_per_s=hardware.machine.disk.write_bytes_per_s,
                recompute_known=True,
            ),
            tokens_per_chunk=tokens_per_chunk,
            clock=lambda: self._now_s,
            uniform=random.Random(0).random,
        )

    def load_end(self, request: str, prompt_tokens: int, codes: bytes) -> int:
        """How many chunks it loads, of those that `codes` says where to find."""
        in_memory, anywhere = leading(codes, MISS, FS), leading(codes, MISS)
        if not anywhere:
            return 0
        hit = Hit(
            prompt_tokens=prompt_tokens,
            gpu_tokens=0,
            cpu_end_tokens=min(in_memory * self._tokens_per_chunk, prompt_tokens),
            end_tokens=min(anywhere * self._tokens_per_chunk, prompt_tokens),
            cpu_chunks=in_memory,
            chunks=anywhere,
            disk_chunks=codes.count(FS, in_memory, anywhere),
            chunk_bytes=self._chunk_bytes,
        )
        verdict = self._admission.load(request, hit, wait_s_max=math.inf)
        end = -(-verdict.end_tokens // self._tokens_per_chunk)
        if chunks := codes.count(FS, 0, end):
            self._read(chunks, self._hardware.kv.of(chunks * self._tokens_per_chunk))
        elif verdict.probe:
            self._read(1, self._chunk_bytes)
        if verdict.loads:
            self._admission.load_began(verdict, end)
            copied = self._hardware.kv_on_rank.of(end * self._tokens_per_chunk)
            seconds = transfer_s(self._hardware.machine.link, copied)
            self._now_s += seconds
            self._admission.copied(store=False, chunks=end, chunk_bytes=self._chunk_bytes, seconds=seconds)
            self._admission.load_ended(verdict, service_s=seconds, loaded_chunks=end)
        self._admission.finished(request)
        return end

    def _read(self, chunks: int, nbytes: float) -> None:
        seconds = transfer_s(self._hardware.machine.disk.read, nbytes)
        self._admission.read(chunks=chunks, chunk_bytes=self._chunk_bytes, seconds=seconds)

    def store_ends(
        self, request: str, ids: NDArray[np.uint64], codes: bytes, load_end: int, *, cpu_full: bool, disk: Room
    ) -> tuple[int, int]:
        """How many chunks it has stored, and of these written to disk."""
        where = np.frombuffer(codes, np.uint8)
        verdict = self._admission.store(
            request,
            [key.tobytes() for key in ids],
            (where == CPU) | (np.arange(len(where)) < load_end),
            chunk_bytes=self._chunk_bytes,
            tier_full=cpu_full,
            disk=disk,
            on_disk=where == FS,
        )
        end, disk_end = (len(ids) if end is None else end for end in (verdict.end_chunk, verdict.disk_end_chunk))
        return end, min(end, disk_end)


def _decided(
    trace: Trace,
    replay: _native.Replay,
    cpu_is_full: Callable[[], bool],
    fs_is_full: Callable[[], bool] | None,
    hardware: Hardware,
) -> Iterator[tuple[NDArray[np.uint32], ...]]:
    engine = _Engine(hardware, trace.tokens_per_block)
    for i, prompt_tokens in enumerate(trace.input_tokens.tolist()):
        ids, ends = _chains(trace, i, 1)
        codes, cpu_full = replay.find(ids), cpu_is_full()
        disk = Room.NOT_ASKED if fs_is_full is None else Room.FULL if fs_is_full() else Room.FREE
        load_end = engine.load_end(str(i), prompt_tokens, codes)
        store_ends = engine.store_ends(str(i), ids, codes, load_end, cpu_full=cpu_full, disk=disk)
        yield replay.serve(ids, ends, *(np.array([end], np.uint32) for end in (load_end, *store_ends)))


def _is_full(index: _native.Index, chunks: int) -> bool:
    return is_full(index.stats(), _native.SLOT_ALIGNMENT, chunks * _native.SLOT_ALIGNMENT)


def _require_possible(tiers: Mapping[str, int]) -> None:
    """Tiers of so many chunks, by name. ConfigurationError."""
    for tier, chunks in tiers.items():
        if not 0 < chunks <= CHUNKS_MAX:
            raise ConfigurationError(f"a {tier} tier of {chunks} chunks cannot be simulated: 1 to {CHUNKS_MAX} can")
    total = sum(tiers.values())
    needed_bytes = total * INDEX_BYTES_PER_CHUNK
    least = min(memory_limits(), key=lambda limit: limit.available_bytes)
    if needed_bytes > least.available_bytes:
        raise ConfigurationError(
            f"simulating tiers of {total} chunks together takes some {needed_bytes} bytes of memory, and "
            f"{least.owner} has {least.available_bytes} available: ask for at most "
            f"{least.available_bytes // INDEX_BYTES_PER_CHUNK} chunks"
        )


def _index(tier: str, chunks: int, eviction_policy: str) -> _native.Index:
    """Of a tier that holds so many chunks, with a page of no memory for each."""
    arena_bytes = chunks * _native.SLOT_ALIGNMENT
    unit_bytes = _native.Index.unit_bytes_for(arena_bytes)
    table_bytes = _native.Index.table_bytes_for(chunks, arena_bytes, unit_bytes)
    table_fd = _native.create_memfd(f"kvstore-simulated-{tier}", table_bytes)
    try:
        index = _native.Index(
            table_fd=table_fd,
            table_bytes=table_bytes,
            arena=None,
            arena_bytes=arena_bytes,
            unit_bytes=unit_bytes,
            index_key=bytes(16),  # the same run twice gives the same figures
            instance_id=bytes(16),
            eviction_policy=eviction_policy,
        )
    finally:
        os.close(table_fd)
    index.set_prefaulted(arena_bytes)
    return index


def read_trace(path: Path, *, tokens_per_block: int | None = None) -> Trace:
    """`tokens_per_block` None: it follows from the requests' lengths. ConfigurationError, naming the line."""
    timestamps: list[float] = []
    tokens: list[int] = []
    chains: list[NDArray[np.uint64]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    request = json.loads(line)
                    timestamps.append(_within(-_TIMESTAMP_MS_MAX, request["timestamp"], _TIMESTAMP_MS_MAX))
                    tokens.append(_whole(_within(0, request["input_length"], _TOKENS_MAX)))
                    chains.append(_chain(request["hash_ids"]))
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                    raise ConfigurationError(
                        f"{path}, line {number}: not a request with timestamp, input_length and hash_ids ({error})"
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    if not chains:
        raise ConfigurationError(f"{path} has no request in it")
    lengths = [len(chain) for chain in chains]
    block = tokens_per_block or _block_tokens(tokens, lengths)
    if block is None:
        raise ConfigurationError(
            f"{path}: its requests' input_length and number of hash_ids fit no size of a block; say it with "
            "--tokens-per-block"
        )
    return _trace(np.array(timestamps), np.array(tokens, np.int64), chains, block)


def _chain(ids: object) -> NDArray[np.uint64]:
    """ValueError, for what is not a list of ids."""
    if not isinstance(ids, list):
        raise ValueError("hash_ids is not a list of numbers")
    for each in ids:
        if type(each) is not int:  # a bool is an instance of it
            raise ValueError(f"{each!r:.80} among the hash_ids is not a whole number")
    return np.array(ids, np.uint64)


def _within(least: float, value: object, most: float) -> float:
    """ValueError, for what is not a number too."""
    if type(value) not in (int, float):  # a bool is an instance of int
        raise ValueError(f"{value!r:.80} is not a number")
    number = cast("float", value)
    if not least <= number <= most:
        raise ValueError(f"{number!r} is not within {least:g} to {most:g}")
    return number


def _whole(number: float) -> int:
    """ValueError."""
    if number != int(number):
        raise ValueError(f"{number!r} is not a whole number")
    return int(number)


def _counted(values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Each value, and how often it is there."""
    each, counts = np.unique(values, return_counts=True)
    return zip(each.tolist(), counts.tolist(), strict=True)


def _block_tokens(tokens: Sequence[int], lengths: Sequence[int]) -> int | None:
    """The power of two of which the requests have as many as ids, most nearly; a last one may be there in part."""
    off = {block: np.abs(np.array(tokens) / block - np.array(lengths)) for block in _BLOCK_TOKENS}
    block = min(off, key=lambda one: float(off[one].mean()))
    return block if float(np.mean(off[block] > 1)) <= _BLOCKS_OFF_BY_MORE_THAN_ONE else None


def _trace(
    timestamps_ms: NDArray[np.float64], tokens: NDArray[np.int64], chains: Sequence[NDArray[np.uint64]], block: int
) -> Trace:
    ends = np.cumsum([len(chain) for chain in chains]).astype(np.uint64)
    ids = np.concatenate([np.zeros(0, np.uint64), *chains])
    return Trace(timestamps_ms, tokens, ids, ends, block)
