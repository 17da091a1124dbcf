"""What the scheduler half knows of its engine and of each request: values, and what follows from them alone.

An engine has a *kind* of chunks for each KV cache group, in vLLM's order (docs/decisions/021). vLLM's keys, which end
in the group's index, are the keys of every dictionary in the scheduler half; the store knows a chunk by the kind's
namespace and the hash. Only the fields of `Steps` change beside the scheduler's thread.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import Locality, Medium, OffloadKey, TierFilter, get_offload_group_idx, make_offload_key

from connector.adapters import derived_keys
from kvstore.admission import LoadVerdict, StoreVerdict
from kvstore.session import Session
from kvstore.steps import Steps

HEARTBEAT_HUNG_MS = 1000.0


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """The scheduler half's end of one attachment."""

    session: Session
    steps: Steps


class Streams:
    """Makes the message stream of each new session, and has it give back what a refused one before it still held."""

    def __init__(self) -> None:
        self._last: Steps | None = None

    def attached(self, session: Session) -> Attached:
        steps = Steps(session)
        if self._last is not None:
            self._last.hand_over(steps)
        self._last = steps
        return Attached(session, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindGeometry:
    """How one KV cache group of an engine cuts requests into chunks."""

    group_id: int  # vLLM's
    tokens_per_chunk: int
    hashes_per_chunk: int
    window_chunks: int | None = None  # so many before a boundary are all that is read there; None: every one
    boundary_chunks: int = 1  # vLLM keeps windows at a prompt's end, and every so many chunks before; 0: only there
    offered_once: bool = False  # a state: only in the step that computes it, and not when the engine had it already

    @property
    def is_chain(self) -> bool:
        """A chunk is of no use without those before it. Others are read from the tail, and name no parents."""
        return self.window_chunks is None

    def stored_max(self, prompt_chunks: int) -> int:
        """How many chunks of a prompt vLLM offers for storing."""
        if self.window_chunks is None:
            return prompt_chunks
        boundaries = 1 + (prompt_chunks // self.boundary_chunks if self.boundary_chunks else 0)
        return min(prompt_chunks, boundaries * self.window_chunks)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How an engine cuts requests into chunks."""

    kinds: Sequence[KindGeometry]
    blocks_per_chunk: int
    ranks: int

    @property
    def tokens_per_hash(self) -> int:
        kind = self.kinds[0]
        return kind.tokens_per_chunk // kind.hashes_per_chunk

    @functools.cached_property
    def _kind_of_group(self) -> dict[int, int]:
        return {kind.group_id: number for number, kind in enumerate(self.kinds)}

    def kind_of(self, key: OffloadKey) -> int:
        return self._kind_of_group[get_offload_group_idx(key)]

    def chain_bytes(self, attached: Attached) -> int:
        """Of one chunk of each chain: what moving so many tokens takes. What is read of windows is little beside it."""
        kinds = zip(attached.steps.group.kinds, self.kinds, strict=True)
        sizes = [(state.chunk_bytes, geometry.is_chain) for state, geometry in kinds]
        return sum(nbytes for nbytes, is_chain in sizes if is_chain) or sizes[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What this engine may do with the store."""

    loads: bool
    stores: bool
    stores_answers: bool  # chunks that hold generated tokens too
    require_cache_salt: bool
    prefetch_wait_s: float = 0.0  # the most that a request waits for chunks that are only on disk


@dataclass(frozen=True, slots=True)
class Found:
    """What one lookup found, and in which daemon's table."""

    attached: Attached | None
    chunks: Mapping[OffloadKey, tuple[int, int]]  # (slot, generation), cpu tier
    coming: Collection[OffloadKey] = ()  # on their way up from the fs tier, and waited for


@dataclass(slots=True, eq=False)
class Prefetch:
    """What a request asked the daemon to read from disk."""

    attached: Attached
    until_s: float
    asked_s: float
    chunks: int  # that were on disk when it began
    under_way: bool = True  # as far as admission was told
    ticket: int = 0  # of the last round
    below: int = 0  # how many chunks of its prefix were on disk then
    over: bool = False  # what has not come by now is a miss for this request


NOTHING_FOUND = Found(None, {})


@dataclass(slots=True, eq=False)
class Row:
    """A request's chunks of one kind."""

    kind: int
    geometry: KindGeometry
    hashes: Sequence[bytes] = field(repr=False)  # vLLM's own list; grows as tokens are generated
    prompt_chunks: int
    boundary: int  # in chunks: the longest prefix that can be loaded, for a prompt's last token is always computed
    lookup_from: int = 0  # first chunk that vLLM asks about
    refused_from: int | None = None  # of a chain: first chunk that could not be stored; nothing after it is
    grants_expected: int = 0
    known_present: bool = False  # some of the chunks are in the store
    tail: tuple[int, int] | None = None  # place of the last chunk that is stored, or being stored
    used: int = 0  # so many chunks, from the head, the daemon was told of: later touches are no further use

    def chunk_hashes(self, first: int, end: int | None = None) -> list[bytes]:
        """A chunk's hash is that of its last tokens."""
        each = self.geometry.hashes_per_chunk
        return list(self.hashes[(first + 1) * each - 1 : None if end is None else end * each : each])

    def keys_of(self, hashes: Sequence[bytes]) -> list[OffloadKey]:
        suffix = make_offload_key(b"", self.geometry.group_id)
        return [chunk_hash + suffix for chunk_hash in hashes]

    def admitted(self, end_tokens: int | None, count: int) -> int:
        """How many of `count` chunks from `lookup_from` on end by then."""
        if end_tokens is None:
            return count
        return max(0, end_tokens // self.geometry.tokens_per_chunk - self.lookup_from)

    def needed(self, codes: bytes) -> bytes:
        """Of what a lookup found from `lookup_from` on: what loading the whole prompt would need."""
        if self.geometry.window_chunks is None:
            return codes
        end = max(0, self.boundary - self.lookup_from)
        return codes[max(0, end - self.geometry.window_chunks) : end]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What vLLM's context of a request does not carry. Jobs keep it: they may outlive the request, and ids repeat."""

    req_id: str
    salt: str | None = field(repr=False)
    served: bool  # False: neither stored nor loaded
    hashes: Sequence[bytes] = field(repr=False)  # vLLM's own list
    prompt_tokens: int
    rows: Sequence[Row]  # by kind
    adapter: bytes = b""  # digest of its LoRA adapter
    finished: bool = False
    storable_tokens: int | None = None  # of a request that has ended; what lies behind is not computed, or another's
    load: LoadVerdict | None = None  # of the hit as it was last
    store: StoreVerdict | None = None  # of all its chunks, from the first offer on
    tiers: TierFilter | None = None  # that the request may load from; None: not known yet
    computed_tokens: int = 0  # that the engine has itself
    admitted_tokens: int | None = 0  # end of what may be loaded; None: as much as there is
    found: Found | None = None  # None: to be looked up when vLLM asks
    misses_told: bool = False
    barred: set[OffloadKey] = field(default_factory=set)  # keys whose load failed: not tried again
    prefetch: Prefetch | None = None
    gave_up: int = 0  # times that it stopped waiting for the disk
    prefetched: set[OffloadKey] = field(default_factory=set)  # keys asked for: a hit of fs, not of cpu
    store_waits_until_s: float | None = None  # None: has not waited for grants yet
    begins_by_s: float | None = None  # as above, for the slot of a state
    tenant_of: tuple[Attached, bytes] | None = field(default=None, repr=False)

    @property
    def lead(self) -> Row:
        """The chunks that decisions are made by: a chain's, where there is one."""
        return next((row for row in self.rows if row.geometry.is_chain), self.rows[0])

    def may_load_from(self, medium: Medium) -> bool:
        return self.tiers is None or self.tiers.allows(medium, Locality.LOCAL)

    def stored_as(self, hashes: list[bytes]) -> list[bytes]:
        """The keys under which the store knows chunks with these hashes of vLLM's."""
        return derived_keys(hashes, self.adapter) if self.adapter else hashes

    def tenant(self, attached: Attached) -> bytes:
        if self.tenant_of is None or self.tenant_of[0] is not attached:
            self.tenant_of = (attached, attached.session.tenant_id(self.salt))
        return self.tenant_of[1]

    def find(
        self, attached: Attached, row: Row, hashes: list[bytes]
    ) -> tuple[bytes, NDArray[np.uint32], NDArray[np.uint64]]:
        """Code, slot and generation of each, from the shared table."""
        namespace = attached.steps.group.kinds[row.kind].namespace_id
        return attached.session.table.lookup(namespace, self.tenant(attached), self.stored_as(hashes))
