"""The scheduler half: which chunks of a request are loaded and stored, and what becomes of every slot it was given.

One thread, the engine's scheduler, calls everything here; only `Link.current` and the fields of `Steps` change beside
it. Nothing waits: a lookup reads the shared table, everything else is queued on `Steps`, whose sender thread makes one
message a step of it.

vLLM tells a manager nothing of failures and forgets its jobs in `reset_cache`, so the table of jobs here is our own: a
slot enters it when a job is prepared and leaves it when every rank has reported, as a commit, an abort or a release.
A job belongs to the attachment (daemon instance) it was prepared with; when that daemon dies its `Steps` drops what is
sent to it, and the job simply ends. When this process dies the daemon gives its slots back once the whole group has
ended.

An engine has a *kind* of chunks for each KV cache group, in vLLM's order (docs/decisions/021). vLLM's keys, which end
in the group's index, are the keys of every dictionary here; the store knows a chunk by the kind's namespace and the
hash.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

from connector import compat, metrics
from connector.adapters import derived_keys
from connector.layout import whole_chunks
from connector.link import Link
from connector.messages import ChunkSpec
from kvstore._native import CPU, FS, MISS, PENDING, class_bytes
from kvstore.admission import FS as FS_TIER
from kvstore.admission import PROBE_CHUNKS, Admission, Hit, LoadVerdict, Mode, StoreVerdict, leading
from kvstore.limits import HEARTBEAT_STALE_MS, PROMOTES_PER_ROUND, grants_left
from kvstore.observations import Scheduled
from kvstore.session import Session
from kvstore.steps import Outcome, Steps

logger = logging.getLogger("vllm.connector.scheduler")

HEARTBEAT_HUNG_MS = 1000.0
LEARNED_TOLD_S = 5.0
STORE_WAIT_S = 1.0  # how long a request's store may wait for grants; docs/decisions/002
STATE_WAIT_S = 0.05  # how long a request may wait for a state's slot; the daemon answers within a millisecond or two
GRANTS_RETRY_S = 0.1  # a full tier is not asked again in every step
NOWHERE = (0, 2**64 - 1)  # a place whose generation no slot ever has: its load fails


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """The scheduler half's end of one attachment."""

    session: Session
    steps: Steps


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How an engine cuts requests into chunks."""

    kinds: Sequence[KindGeometry]
    blocks_per_chunk: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What this engine may do with the store."""

    loads: bool
    stores: bool
    stores_answers: bool  # chunks that hold generated tokens too
    require_cache_salt: bool
    prefetch_wait_s: float = 0.0  # the most that a request waits for chunks that are only on disk


@dataclass(frozen=True, slots=True)
class Probe:
    """The engine's hash of fixed tokens, and whether the engine really hashes as it said at construction."""

    engine_family: str
    hash_algorithm: str
    value: bytes
    effective_seed_problem: Callable[[], str | None]  # asked at the first request; vLLM knows it no earlier


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
_HIT, _MISSED = LookupResult.HIT, LookupResult.MISS  # `lookup` is called for every key, and an enum's names are slow
_FULL = (Outcome.REJECTED_TIER_FULL, Outcome.REJECTED_QUOTA, Outcome.REJECTED_TIER_SICK)


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
        return cast(list[OffloadKey], [chunk_hash + suffix for chunk_hash in hashes])

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


class LookedUp(NamedTuple):
    """What the shared table said of a row's chunks from `lookup_from` on; of a chain up to the first missing one."""

    row: Row
    keys: Sequence[OffloadKey]
    codes: bytes
    slots: Sequence[int]
    generations: Sequence[int]
    missing: bytes  # hash of the first one after those


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


@dataclass(frozen=True, slots=True)
class Offer:
    """One chunk offered for storing."""

    position: int  # in the row
    key: OffloadKey


@dataclass(slots=True, eq=False)
class Offers:
    """What vLLM offered of one row, and what is to become of it."""

    row: Row
    first: int  # positions of the first and the last one offered
    last: int
    end: int | None  # the first position that is not admitted
    disk_end: int | None  # and the first that the disk is not to have
    present: list[Offer] = field(default_factory=list)
    wanted: list[Offer] = field(default_factory=list)
    not_admitted: list[Offer] = field(default_factory=list)
    refused: list[Offer] = field(default_factory=list)  # among them what lies behind the end of the stored chain

    def is_for_disk(self, position: int) -> bool:
        return self.disk_end is None or position < self.disk_end


@dataclass(slots=True, eq=False)
class Job:
    """Slots in use: leased for a load, or granted for a store. Chunks lie kind after kind."""

    is_store: bool
    attached: Attached
    record: RequestRecord
    spec: ChunkSpec
    tenant: bytes
    keys: list[OffloadKey]
    ranks_pending: int
    first_chunks: list[int] = field(default_factory=list)  # store: position in its row of each kind's first chunk
    parents: list[bytes] = field(default_factory=list)  # store: what each names as the chunk before it, or b""
    memory_only: list[bool] = field(default_factory=list)  # store: which the disk is not to have
    load: LoadVerdict | None = None
    copy_s: float = 0.0  # the slowest rank's
    failed: set[int] = field(default_factory=set)
    settled: bool = True  # False: a lost device may still write to its slots
    stale: bool = False  # the cache was reset meanwhile: the weights may have changed since its bytes were computed

    def chunks_of(self, kind: int) -> range:
        first = sum(self.spec.counts[:kind])
        return range(first, first + self.spec.counts[kind])


class SchedulerHalf(OffloadingManager):
    """vLLM's OffloadingManager over the shared table and one daemon's message stream."""

    def __init__(
        self,
        link: Link[Attached],
        geometry: Geometry,
        rules: Rules,
        probe: Probe,
        admission: Admission,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._geometry = geometry
        self._rules = rules
        self._probe = probe
        self._admission = admission
        self._clock = clock
        self._asked_learned: Attached | None = None
        self._learned_told_at = 0.0
        self._introduced: Attached | None = None  # the attachment that knows the probe
        self._seed_checked = False
        self._shut_out = ""  # why this engine may not use the store at all
        self._records: dict[str, RequestRecord] = {}  # by request id, until vLLM says it finished
        self._tickets = itertools.count(1)
        self._prepared: dict[int, Job] = {}  # by ticket: not yet in a message to the workers
        self._jobs: dict[int, Job] = {}  # by vLLM's job id: with the workers
        self._loading: dict[OffloadKey, int] = {}  # keys that copies to the GPU are under way for, and how many
        self._storing: dict[tuple[bytes, OffloadKey], Job] = {}  # (tenant, key) -> the store that writes it
        self._expected = [0] * len(geometry.kinds)  # by kind, sum of the rows' grants_expected
        self._keeps_states = any(kind.offered_once for kind in geometry.kinds)
        self._kind_of_group = {kind.group_id: number for number, kind in enumerate(geometry.kinds)}
        self._grants_asked_at = -GRANTS_RETRY_S
        self._reset = False  # the cache was reset once: namespaces of before are out of reach for good
        self._retired: set[bytes] = set()
        self._moved: Attached | None = None  # the attachment that was told of the last reset
        self._counts = dict.fromkeys(metrics.COUNTERS, 0)  # not yet told; zeros once, so that every series exists
        self._said: set[str] = set()

    # ---- requests

    def register(
        self,
        req_id: str,
        *,
        salt: str | None,
        has_lora: bool,
        prompt_tokens: int,
        hashes: Sequence[bytes],
        adapter: bytes = b"",
    ) -> None:
        """A request arrived; `hashes` is the list that vLLM extends. `adapter`: the digest of its LoRA adapter, b""
        when it is not known. Called before vLLM's own `on_new_request`."""
        self._check_seed()
        salt = salt or None  # vLLM hashes an empty salt as none
        attached = self._link.current
        salt_required = self._rules.require_cache_salt or (attached is not None and attached.session.require_cache_salt)
        if has_lora and not adapter:
            self._say(
                "kvstore: requests with a LoRA adapter are neither stored nor loaded while the digest of its files is "
                "not known: vLLM's keys name the adapter, not its content"
            )
        record = RequestRecord(
            req_id=req_id,
            salt=salt,
            served=(bool(adapter) or not has_lora) and (salt is not None or not salt_required),
            adapter=adapter,
            hashes=hashes,
            prompt_tokens=prompt_tokens,
            rows=[
                Row(
                    number,
                    kind,
                    hashes,
                    prompt_chunks=prompt_tokens // kind.tokens_per_chunk,
                    boundary=(prompt_tokens - 1) // kind.tokens_per_chunk,
                )
                for number, kind in enumerate(self._geometry.kinds)
            ],
        )
        previous = self._records.get(req_id)
        if previous is not None:
            self._forget(previous)
        self._records[req_id] = record
        self._admission.queue.arrived(req_id, prompt_tokens)
        if record.served and self._rules.stores and self._admission.stores_lately:
            for row in record.rows:
                self._expect(row, row.geometry.stored_max(row.prompt_chunks))
        attached = self._usable()
        if attached is not None:
            self._fetch_grants(attached)
            attached.steps.flush()  # so that the grants are here when the first chunks are computed

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        record = self._records.get(req_context.req_id)
        if record is not None:
            req_context.set_state(record)
            record.tiers = req_context.load_tier_filter
        # Every chunk of the prompt is then offered to `prepare_store`, also those the GPU had: the only sign of life of
        # a prefix that is hot there, and what mends holes.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def finishing(self, req_id: str) -> None:
        """The request has ended; one last offer to store may follow."""
        record = self._records.get(req_id)
        if record is not None:
            record.finished = True

    def on_request_finished(self, req_context: ReqContext) -> None:
        record = req_context.get_state(RequestRecord)
        if record is not None:
            record.finished = True
            self._forget(record)

    def _forget(self, record: RequestRecord) -> None:
        for row in record.rows:
            self._expect(row, 0)
        self._promotion_over(record)
        self._admission.finished(record.req_id)
        if self._records.get(record.req_id) is record:
            del self._records[record.req_id]

    # ---- loads

    def begin_lookup(self, req_id: str, computed_tokens: int) -> None:
        """vLLM is about to ask about this request, keys from the chunk on that holds token `computed_tokens`. It asks
        again in every step until the request has blocks, each time of the table as it is then."""
        record = self._records.get(req_id)
        if record is not None:
            record.found = None
            record.computed_tokens = computed_tokens
            for row in record.rows:
                row.lookup_from = computed_tokens // row.geometry.tokens_per_chunk

    def awaits_state_slots(self, req_id: str) -> bool:
        """Whether the request should not begin yet: vLLM offers a state once, in the step that computes it, and the
        slots for it were asked for when the request arrived."""
        if not self._keeps_states:
            return False
        record, attached = self._records.get(req_id), self._usable()
        if record is None or attached is None or attached.session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return False
        now = self._clock()
        if record.begins_by_s is None:
            record.begins_by_s = now + STATE_WAIT_S
        return now < record.begins_by_s and any(
            row.geometry.offered_once
            and row.grants_expected > 0
            and attached.steps.grants_free(row.kind) == 0
            and attached.steps.grants_coming(row.kind) > 0
            for row in record.rows
        )

    def loadable_tokens(self, req_id: str, computed_tokens: int) -> int | None:
        """How many tokens beyond those that the engine has are admitted to be loaded, whole chunks; None: all that are
        there. vLLM is about to ask about their keys."""
        record = self._records.get(req_id)
        if record is None:
            return 0
        if record.found is None:
            record.found = self._look_up(record)
        if record.admitted_tokens is None:
            return None
        return max(0, record.admitted_tokens - computed_tokens)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        record = req_context.get_state(RequestRecord)
        if record is None:
            return _MISSED
        found = record.found
        if found is None:  # not before vLLM asks: a request that skips the cache asks nothing
            found = record.found = self._look_up(record)
        if key in found.chunks:
            return _HIT
        return LookupResult.RETRY if key in found.coming else _MISSED

    def _look_up(self, record: RequestRecord) -> Found:
        attached = self._usable()
        record.admitted_tokens = 0
        if attached is None or not record.served or not self._rules.loads:
            return NOTHING_FOUND
        looked_up: list[LookedUp] = []
        missing = 0
        for row in record.rows:
            hashes = row.chunk_hashes(row.lookup_from)
            codes, slots, generations = self._find(attached, record, row, hashes)
            if not record.misses_told:
                missing += row.needed(codes).count(MISS)
                if self._rules.stores and self._admission.stores_lately:
                    self._expect(row, min(codes.count(MISS), row.geometry.stored_max(row.prompt_chunks)))
            end = leading(codes, MISS) if row.geometry.is_chain else len(codes)
            looked_up.append(
                LookedUp(
                    row,
                    row.keys_of(hashes[:end]),
                    codes[:end],
                    slots[:end].tolist(),
                    generations[:end].tolist(),
                    hashes[end] if end < len(hashes) else b"",
                )
            )
        if not record.misses_told:
            record.misses_told = True
            attached.steps.miss(missing)
        given_up = record.gave_up
        found = self._choose(record, attached, looked_up)
        if record.gave_up != given_up:  # what has come from disk by now is a shorter hit, decided about anew
            found = self._choose(record, attached, looked_up)
        return found

    def _choose(self, record: RequestRecord, attached: Attached, looked_up: Sequence[LookedUp]) -> Found:
        """What may be loaded of what is there, and what is to come from disk first."""
        record.admitted_tokens = self._admit_load(record, attached, looked_up)
        from_cpu = record.may_load_from(Medium.CPU)
        chunks: dict[OffloadKey, tuple[int, int]] = {}
        admitted: list[tuple[Sequence[OffloadKey], bytes]] = []
        for row, keys, codes, slots, generations, _ in looked_up:
            count = row.admitted(record.admitted_tokens, len(keys))
            places = zip(slots[:count], generations[:count], strict=True)
            admitted.append((keys[:count], codes[:count]))
            if from_cpu and not record.barred and codes.count(CPU, 0, count) == count:
                chunks.update(zip(keys[:count], places, strict=True))  # as usual; it must be quick
            else:
                chunks |= {
                    key: place
                    for key, code, place in zip(keys[:count], codes[:count], places, strict=True)
                    if code == CPU and key not in record.barred and (from_cpu or key in record.prefetched)
                }
        coming: Collection[OffloadKey] = ()
        below = any(FS in codes or PENDING in codes for _, codes in admitted)
        if below and record.may_load_from(Medium.STORAGE):
            codes_of_rows = [dict(zip(keys, codes, strict=True)) for keys, codes in admitted]
            coming = self._prefetch(record, attached, codes_of_rows, chunks)
        else:
            self._promotion_over(record)
        return Found(attached, chunks, coming)

    def _find(
        self, attached: Attached, record: RequestRecord, row: Row, hashes: list[bytes]
    ) -> tuple[bytes, NDArray[np.uint32], NDArray[np.uint64]]:
        """Code, slot and generation of each, from the shared table."""
        namespace = attached.steps.group.kinds[row.kind].namespace_id
        return attached.session.table.lookup(namespace, record.tenant(attached), record.stored_as(hashes))

    def _admit_load(self, record: RequestRecord, attached: Attached, looked_up: Sequence[LookedUp]) -> int | None:
        """Up to which token the request may load, in whole chunks. None: as far as there is anything, for what hits
        where chunks are used without those before them was not modelled."""
        lead = looked_up[record.lead.kind]
        if not lead.row.geometry.is_chain:
            return None if self._admission.mode is not Mode.NEVER else 0
        hit = self._hit(record, attached, lead)
        verdict = record.load
        same = verdict is not None and (verdict.hit.gpu_tokens, verdict.hit.end_tokens) == (
            hit.gpu_tokens,
            hit.end_tokens,
        )
        if verdict is None or not same or self._admission.is_overdue(verdict):
            verdict = record.load = self._admission.load(record.req_id, hit, self._rules.prefetch_wait_s)
            if verdict.probe:
                below = [
                    get_offload_block_hash(key) for key, code in zip(lead.keys, lead.codes, strict=True) if code == FS
                ]
                probed = record.stored_as(below[:PROBE_CHUNKS])
                attached.steps.promote(record.tenant(attached), probed, kind=lead.row.kind, waited=False)
        if not verdict.loads:
            return 0
        # Windows are kept only where vLLM may cut: with some a hit is loaded whole or not at all.
        return verdict.end_tokens if len(looked_up) == 1 else None

    def _hit(self, record: RequestRecord, attached: Attached, lead: LookedUp) -> Hit:
        """What of a request can be loaded at all, its tiers, its barred keys and what it gave up waiting for apart."""
        row, keys, codes = lead.row, lead.keys, lead.codes
        from_cpu = record.may_load_from(Medium.CPU)
        from_disk = record.may_load_from(Medium.STORAGE)
        prefetch = record.prefetch
        if prefetch is not None and prefetch.over and prefetch.attached is attached:
            from_disk = False
        healthy = attached.session.table.heartbeat_age_ms() <= HEARTBEAT_HUNG_MS
        if record.barred or not from_cpu:
            codes = bytes(
                MISS if key in record.barred or (code == CPU and not (from_cpu or key in record.prefetched)) else code
                for key, code in zip(keys, codes, strict=True)
            )
        in_memory = leading(codes, MISS, FS, PENDING)
        anywhere = leading(codes, MISS) if from_disk else in_memory
        on_disk = codes.count(FS, in_memory, anywhere)
        first, tokens_per_chunk = row.lookup_from, row.geometry.tokens_per_chunk
        loading = self._loading.keys()
        return Hit(
            prompt_tokens=max(record.prompt_tokens, len(record.hashes) * self._tokens_per_hash),
            gpu_tokens=record.computed_tokens,
            cpu_end_tokens=(first + in_memory) * tokens_per_chunk if in_memory else record.computed_tokens,
            end_tokens=(first + anywhere) * tokens_per_chunk if anywhere else record.computed_tokens,
            cpu_chunks=in_memory - (len(loading & set(keys[:in_memory])) if loading else 0),
            chunks=anywhere - (len(loading & set(keys[:anywhere])) if loading else 0),
            disk_chunks=on_disk,
            chunk_bytes=self._chunk_bytes(attached),
            disk_healthy=healthy,
            missing=get_offload_block_hash(keys[anywhere]) if anywhere < len(keys) else lead.missing,
        )

    def _chunk_bytes(self, attached: Attached) -> int:
        """Of one chunk of each chain: what moving so many tokens takes. What is read of windows is little beside it."""
        kinds = zip(attached.steps.group.kinds, self._geometry.kinds, strict=True)
        sizes = [(state.chunk_bytes, geometry.is_chain) for state, geometry in kinds]
        return sum(nbytes for nbytes, is_chain in sizes if is_chain) or sizes[0][0]

    def _promotion_over(self, record: RequestRecord) -> None:
        prefetch = record.prefetch
        if prefetch is not None and prefetch.under_way:
            prefetch.under_way = False
            self._admission.promoted()

    def _give_up_promotion(self, record: RequestRecord, prefetch: Prefetch, coming: Sequence[OffloadKey]) -> None:
        """What has not come from disk by now is a miss for this request. `coming`: what still does, for nobody."""
        self._promote(record, prefetch.attached, coming, waited=False)
        prefetch.over = True
        record.gave_up += 1
        self._promotion_over(record)
        if record.load is not None and record.load.tier == FS_TIER:
            self._admission.read_waited(
                chunks=prefetch.chunks,
                chunk_bytes=self._chunk_bytes(prefetch.attached),
                seconds=self._clock() - prefetch.asked_s,
            )
            self._admission.gave_up(record.load, "not read from disk in time")
            record.load = None  # what has come is looked at anew

    def _promote(
        self, record: RequestRecord, attached: Attached, keys: Sequence[OffloadKey], *, waited: bool
    ) -> int | None:
        """Ask for as many as a round takes. Returns the number to wait for; None: nothing was asked for."""
        ticket = None
        for kind, own in itertools.groupby(keys[:PROMOTES_PER_ROUND], self._kind):
            hashes = record.stored_as([get_offload_block_hash(key) for key in own])
            ticket = attached.steps.promote(record.tenant(attached), hashes, kind=kind, waited=waited)
        return ticket

    def _prefetch(
        self,
        record: RequestRecord,
        attached: Attached,
        codes: Sequence[Mapping[OffloadKey, int]],
        chunks: Collection[OffloadKey],
    ) -> Collection[OffloadKey]:
        """Ask for what is only on disk, and say what is worth waiting for."""
        below = self._worth_promoting(record, codes, chunks)
        prefetch, now = record.prefetch, self._clock()
        if not below or attached.session.table.heartbeat_age_ms() > HEARTBEAT_HUNG_MS:
            if not below:
                self._promotion_over(record)
            return ()  # nobody would read them; a daemon that is only held up has as long as the request may wait
        if prefetch is None or prefetch.attached is not attached:
            self._promotion_over(record)
            wait_s = self._rules.prefetch_wait_s if record.load is None else record.load.wait_s
            prefetch = record.prefetch = Prefetch(attached, now + wait_s, now, len(below))
            self._admission.promoting(len(below), self._chunk_bytes(attached))
        if prefetch.over:
            return ()
        ended = all(codes[self._kind(key)][key] == FS for key in below)
        round_over = attached.steps.promotes_answered >= prefetch.ticket and ended
        if prefetch.ticket == 0 or (round_over and len(below) < prefetch.below):
            # Another round may find room for what the last one did not bring.
            prefetch.ticket = self._promote(record, attached, below, waited=True) or prefetch.ticket
            prefetch.below = len(below)
            record.prefetched.update(below)
            attached.steps.flush()
        elif round_over:
            self._give_up_promotion(record, prefetch, [])
        if now >= prefetch.until_s and not prefetch.over:
            self._give_up_promotion(record, prefetch, [key for key in below if codes[self._kind(key)][key] == PENDING])
        return () if prefetch.over else frozenset(below)

    def _worth_promoting(
        self, record: RequestRecord, codes: Sequence[Mapping[OffloadKey, int]], chunks: Collection[OffloadKey]
    ) -> list[OffloadKey]:
        """What is only on disk: of chains, as far as they have no hole; of windows, the last whole one before the end
        of the shortest chain."""

        def comes(key: OffloadKey, code: int) -> bool:
            return code in (FS, PENDING) and key not in record.barred

        below: list[OffloadKey] = []
        reach_tokens = len(record.hashes) * self._tokens_per_hash
        for row, row_codes in zip(record.rows, codes, strict=True):
            if not row.geometry.is_chain:
                continue
            usable = row.lookup_from
            for key, code in row_codes.items():
                if comes(key, code):
                    below.append(key)
                elif key not in chunks:
                    break
                usable += 1
            reach_tokens = min(reach_tokens, usable * row.geometry.tokens_per_chunk)
        for row, row_codes in zip(record.rows, codes, strict=True):
            window = row.geometry.window_chunks
            if window is None:
                continue
            end = max(0, -(-reach_tokens // row.geometry.tokens_per_chunk) - row.lookup_from)
            read: list[tuple[OffloadKey, int]] = []
            for key, code in reversed(list(row_codes.items())[:end]):
                if comes(key, code) or key in chunks:
                    read.append((key, code))
                elif len(read) < window:
                    read.clear()
                if len(read) > window:  # one more: vLLM wants it where the end lies within a chunk
                    break
            below += [key for key, code in reversed(read) if comes(key, code)]
        return below

    @property
    def _tokens_per_hash(self) -> int:
        kind = self._geometry.kinds[0]
        return kind.tokens_per_chunk // kind.hashes_per_chunk

    def _kind(self, key: OffloadKey) -> int:
        return self._kind_of_group[get_offload_group_idx(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> object:
        record = req_context.get_state(RequestRecord)
        from_disk = record is not None and key in record.prefetched
        return compat.DISK if from_disk else compat.HOST_MEMORY

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        record = req_context.get_state(RequestRecord)
        assert record is not None, f"a load for request {req_context.req_id} that never arrived"
        found = record.found
        assert found is not None, f"a load for request {req_context.req_id} without a lookup"
        assert found.attached is not None, f"a load for request {req_context.req_id} without a hit"
        # vLLM loads what it asked about and was told to be there, but for a window it may round outwards.
        places = [found.chunks.get(key, NOWHERE) for key in keys]
        for place in places:
            if place != NOWHERE:
                found.attached.steps.lease(*place)
        for kind, own in itertools.groupby(keys, self._kind):
            row = record.rows[kind]
            row.known_present = True
            if not self._rules.stores:  # else every chunk is offered to `prepare_store`, which touches it
                self._touch_loaded(found.attached, record, row, [get_offload_block_hash(key) for key in own])
        job = self._prepare(found.attached, record, list(keys), places, is_store=False)
        for key in job.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        self._promotion_over(record)
        if record.load is not None:
            job.load, record.load = record.load, None  # whatever is asked after this is asked anew
            self._admission.load_began(job.load, len(job.keys))
        return job.spec

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Of the chunks offered: those to store now. Anything but None means that vLLM does not offer the others again
        for this request, so a chain ends at the first one refused."""
        record = req_context.get_state(RequestRecord)
        attached = self._usable()
        if record is None or not record.served or not self._rules.stores or not keys:
            return _store_nothing()
        offered = self._offered(record, keys, req_context)
        if attached is None:
            for row, offers in offered:
                self._refuse(row, offers[0].position, len(offers))
            return _store_nothing()
        sorted_out = [self._sort_out(attached, record, row, offers) for row, offers in offered]
        # A prefix taken now is all that this request ever stores, so its slots are waited for, though not for ever.
        if any(self._lacks_grants(attached, offers) for offers in sorted_out):
            hopeful = [
                offers
                for offers in sorted_out
                if not offers.row.geometry.offered_once and self._may_bring_grants(attached, offers.row.kind)
            ]
            if any(self._lacks_grants(attached, offers) for offers in hopeful) and self._may_defer(record, attached):
                for offers in sorted_out:
                    self._expect(offers.row, max(offers.row.grants_expected, len(offers.wanted)))
                return None
        for row, offers in offered:
            if row is record.lead:
                generated = [offer.key for offer in offers if offer.position >= row.prompt_chunks]
                self._admission.offered([get_offload_block_hash(key) for key in generated])
        stored = [(offers, self._accept(attached, record, offers)) for offers in sorted_out]
        keys_to_store = [offer.key for offers, _ in stored for offer in offers.wanted]
        if not keys_to_store:
            return _store_nothing()
        places = [place for _, grants in stored for place in grants]
        job = self._prepare(attached, record, keys_to_store, places, is_store=True)
        job.first_chunks = [0] * len(record.rows)
        for offers, _ in stored:
            if offers.wanted:
                job.first_chunks[offers.row.kind] = offers.wanted[0].position
            job.parents += [self._parent(record, offers.row, offer.position) for offer in offers.wanted]
            job.memory_only += [not offers.is_for_disk(offer.position) for offer in offers.wanted]
        for key in job.keys:
            self._storing[job.tenant, key] = job
        return PrepareStoreOutput(keys_to_store, job.spec, evicted_keys=[])

    def _offered(
        self, record: RequestRecord, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> list[tuple[Row, list[Offer]]]:
        """By row: which chunk of it each key is. vLLM lists them kind after kind, each in order."""
        ends = compat.end_tokens(keys, req_context, record.hashes, self._tokens_per_hash)
        offered: list[tuple[Row, list[Offer]]] = []
        for kind, own in itertools.groupby((key for key in keys if key in ends), self._kind):
            row = record.rows[kind]
            offers = [Offer(ends[key] // row.geometry.tokens_per_chunk - 1, key) for key in own]
            positions = [offer.position for offer in offers]
            assert positions == sorted(positions), f"chunks of kind {kind} offered out of order: {positions}"
            offered.append((row, offers))
        kinds = [row.kind for row, _ in offered]
        assert kinds == sorted(set(kinds)), f"kinds offered out of order: {kinds}"
        return offered

    def _sort_out(self, attached: Attached, record: RequestRecord, row: Row, offers: list[Offer]) -> Offers:
        """What is in the store already, and what is to be."""
        tenant = record.tenant(attached)
        end, disk_end = self._admitted_ends(record, attached, row)
        sorted_out = Offers(row, offers[0].position, offers[-1].position, end, disk_end)
        hashes = [get_offload_block_hash(offer.key) for offer in offers]
        codes, slots, generations = self._find(attached, record, row, hashes)
        now_there = row.chunk_hashes(sorted_out.first, sorted_out.last + 1)
        for i, (offer, code) in enumerate(zip(offers, codes, strict=True)):
            if now_there[offer.position - sorted_out.first : offer.position - sorted_out.first + 1] != [hashes[i]]:
                continue  # the request's tokens were changed since vLLM noted this key: its bytes are another's
            if code in (CPU, PENDING):
                sorted_out.present.append(offer)
                row.tail = (int(slots[i]), int(generations[i]))
            elif sorted_out.end is not None and offer.position >= sorted_out.end:
                sorted_out.not_admitted.append(offer)
            elif row.refused_from is not None and offer.position >= row.refused_from:
                sorted_out.refused.append(offer)
            elif (tenant, offer.key) not in self._storing:
                sorted_out.wanted.append(offer)
        return sorted_out

    def _accept(self, attached: Attached, record: RequestRecord, offers: Offers) -> list[tuple[int, int]]:
        """Slots for what is wanted. Where there are fewer, a chain keeps its head and a window its tail."""
        row, wanted = offers.row, offers.wanted
        grants = self._take_grants(attached, len(wanted), row.kind)
        lacking = len(wanted) - len(grants)
        self._count(metrics.REFUSED_STORES, len(offers.refused))
        self._count(metrics.UNADMITTED_STORES, len(offers.not_admitted))
        if lacking:
            if row.geometry.is_chain:
                offers.wanted, refused = wanted[: len(grants)], wanted[len(grants) :]
            else:
                offers.wanted, refused = wanted[lacking:], wanted[:lacking]
            offers.refused += refused
            self._refuse(row, refused[0].position, lacking)
        self._touch(attached, record, offers)
        if not lacking:
            prompt_end = row.prompt_chunks if offers.end is None else min(offers.end, row.prompt_chunks)
            prompt = min(row.grants_expected, max(0, prompt_end - offers.last - 1))
            answer = 1 if self._rules.stores_answers and not record.finished and offers.end is None else 0
            self._expect(row, prompt + answer)
        if grants:
            row.tail = grants[-1]
        return grants

    def _admitted_ends(self, record: RequestRecord, attached: Attached, row: Row) -> tuple[int | None, int | None]:
        """The first chunk of the row that is not to be stored, and the first that the disk is not to have. None: all
        are, what the request generates included."""
        if record.store is None:
            record.store = self._admit_store(record, attached)
        verdict, tokens = record.store, record.lead.geometry.tokens_per_chunk
        end, disk_end = (
            None if end is None else end * tokens // row.geometry.tokens_per_chunk
            for end in (verdict.end_chunk, verdict.disk_end_chunk)
        )
        return end, disk_end

    def _admit_store(self, record: RequestRecord, attached: Attached) -> StoreVerdict:
        row = record.lead
        chain = row.chunk_hashes(0, row.prompt_chunks)
        codes = np.frombuffer(self._find(attached, record, row, chain)[0], np.uint8)
        return self._admission.store(
            record.req_id,
            chain,
            (codes == CPU) | (codes == PENDING),
            chunk_bytes=self._chunk_bytes(attached),
            tier_full=attached.steps.cpu_full,
            disk=attached.steps.fs,
            on_disk=(codes == FS) | (codes == PENDING),
        )

    def _parent(self, record: RequestRecord, row: Row, position: int) -> bytes:
        if position == 0 or not row.geometry.is_chain:
            return b""
        [parent] = record.stored_as(row.chunk_hashes(position - 1, position))
        return parent

    def _touch(self, attached: Attached, record: RequestRecord, offers: Offers) -> None:
        """Each offer keeps what it found young; the one that completes the prompt a whole chain, so that no parent is
        older than its child. What is present or refused is used now; a commit speaks for the rest."""
        row = offers.row
        row.known_present |= bool(offers.present)
        used = sorted((offer.position, offer.key) for offer in (*offers.present, *offers.refused, *offers.not_admitted))
        if row.geometry.is_chain and row.known_present and offers.last + 1 == row.prompt_chunks:
            head = max(row.used, offers.first)
            used = [(position, key) for position, key in used if position >= head]
            touched = row.chunk_hashes(0, head)
            again = row.used
        else:
            head, touched = 0, []
            again = sum(position < row.used for position, _ in used)
        touched += [get_offload_block_hash(key) for _, key in used]
        if touched:
            worth_disk = 0
            if record.store is not None and record.store.is_worth_disk:
                positions = itertools.chain(range(head), (position for position, _ in used))
                worth_disk = sum(map(offers.is_for_disk, positions))
            attached.steps.touch(
                record.tenant(attached),
                record.stored_as(touched),
                again=again,
                kind=row.kind,
                worth_disk=worth_disk,
            )
        row.used = max(row.used, offers.last + 1)

    def _touch_loaded(self, attached: Attached, record: RequestRecord, row: Row, loaded: list[bytes]) -> None:
        touched, again = loaded, 0
        if row.geometry.is_chain:
            chain = row.chunk_hashes(0)
            touched = chain[: chain.index(loaded[-1], row.lookup_from) + 1]
            again = min(row.used, len(touched))
            row.used = max(row.used, len(touched))
        attached.steps.touch(record.tenant(attached), record.stored_as(touched), again=again, kind=row.kind)

    def _refuse(self, row: Row, position: int, count: int) -> None:
        if row.geometry.is_chain and (row.refused_from is None or position < row.refused_from):
            row.refused_from = position
        self._count(metrics.REFUSED_STORES, count)
        self._expect(row, 0)

    # ---- grants

    def _take_grants(self, attached: Attached, count: int, kind: int) -> list[tuple[int, int]]:
        if count == 0 or attached.session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return []  # a daemon that does not run could not be told that the store ended
        return attached.steps.take_grants(count, kind=kind)

    def _lacks_grants(self, attached: Attached, offers: Offers) -> bool:
        kind = offers.row.kind
        enough = min(len(offers.wanted), self._grants_max(attached, kind))
        slow = attached.session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS
        return bool(offers.wanted) and (attached.steps.grants_free(kind) < enough or slow)

    def _may_bring_grants(self, attached: Attached, kind: int) -> bool:
        """A daemon that has no more to give will not have more next step."""
        return attached.steps.grants_coming(kind) > 0 or attached.steps.grants_short(kind) not in _FULL

    def _may_defer(self, record: RequestRecord, attached: Attached) -> bool:
        """A finished request gets no further offer. Time counts, not steps: a step may take milliseconds, and a busy
        machine holds a daemon up for longer."""
        hung = attached.session.table.heartbeat_age_ms() > HEARTBEAT_HUNG_MS
        if record.finished or hung:
            return False
        now = self._clock()
        if record.store_waits_until_s is None:
            record.store_waits_until_s = now + STORE_WAIT_S
        return now < record.store_waits_until_s

    def _expect(self, row: Row, grants: int) -> None:
        self._expected[row.kind] += grants - row.grants_expected
        row.grants_expected = grants

    def _grants_max(self, attached: Attached, kind: int) -> int:
        """How many slots of a kind the daemon lets this engine hold at once, those being written included."""
        sizes = [class_bytes(each.chunk_bytes) for each in attached.steps.group.kinds]
        others = sum(
            (attached.steps.grants_free(other) + attached.steps.grants_coming(other) + self._writing(attached, other))
            * size
            for other, size in enumerate(sizes)
            if other != kind
        )
        return grants_left(attached.session.table.arena_bytes, sizes[kind], held=0, held_bytes=others)

    def _writing(self, attached: Attached, kind: int) -> int:
        jobs = (job for job in self._jobs.values() if job.is_store and job.attached is attached)
        return sum(job.spec.counts[kind] for job in jobs)

    def _fetch_grants(self, attached: Attached) -> None:
        """Ask for as many slots as the requests here are likely to write, within the daemon's own bound."""
        steps = attached.steps
        there = [steps.grants_free(kind) + steps.grants_coming(kind) for kind in range(len(self._expected))]
        # A step of the engine may take longer than a slot may lie idle; what is too much may still go back.
        steps.keep_grants(keep=any(0 < expected >= got for got, expected in zip(there, self._expected, strict=True)))
        if all(got >= expected for got, expected in zip(there, self._expected, strict=True)):
            return  # as in most steps; the bounds below take longer than all the rest
        if attached.session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return
        now = self._clock()
        soon = now - self._grants_asked_at < GRANTS_RETRY_S
        growing: set[tuple[int, int]] | None = None
        for kind, (got, expected) in enumerate(zip(there, self._expected, strict=True)):
            if got >= expected or (soon and steps.grants_short(kind) in _FULL):
                continue
            count = min(expected, self._grants_max(attached, kind) - self._writing(attached, kind)) - got
            if count > 0:
                if growing is None:
                    rows = (row for record in self._records.values() for row in record.rows)
                    growing = {row.tail for row in rows if row.grants_expected and row.tail}
                self._grants_asked_at = now
                steps.want_grants(count, kind=kind, tails=growing)

    # ---- jobs

    def _prepare(
        self,
        attached: Attached,
        record: RequestRecord,
        keys: list[OffloadKey],
        places: list[tuple[int, int]],
        *,
        is_store: bool,
    ) -> Job:
        ticket = next(self._tickets)
        spec = ChunkSpec(
            ticket,
            attached.session.instance_id,
            np.array([slot for slot, _ in places], np.uint32),
            np.array([generation for _, generation in places], np.uint64),
            self._counts_by_kind(keys),
        )
        job = Job(
            is_store=is_store,
            attached=attached,
            record=record,
            spec=spec,
            tenant=record.tenant(attached),
            keys=keys,
            ranks_pending=self._geometry.ranks,
        )
        self._prepared[ticket] = job
        return job

    def _counts_by_kind(self, keys: Sequence[OffloadKey]) -> tuple[int, ...]:
        counts = Counter(map(self._kind, keys))
        return tuple(counts[kind] for kind in range(len(self._geometry.kinds)))

    def track(self, metadata: OffloadingConnectorMetadata) -> None:
        """The message to the workers is made: what was prepared now has vLLM's job ids."""
        for job_id, transfer in metadata.load_jobs.items():
            assert isinstance(transfer.src_spec, ChunkSpec), f"load {job_id} of another store: {transfer.src_spec!r}"
            self._jobs[job_id] = self._prepared.pop(transfer.src_spec.ticket)
        for job_id, transfer in metadata.store_jobs.items():
            assert isinstance(transfer.dst_spec, ChunkSpec), f"store {job_id} of another store: {transfer.dst_spec!r}"
            assert isinstance(transfer.src_spec, GPULoadStoreSpec)
            job = self._jobs[job_id] = self._prepared.pop(transfer.dst_spec.ticket)
            self._fail_unwritten(job, transfer.src_spec)
        for job in self._prepared.values():  # vLLM made no job of it after all
            job.failed.update(range(len(job.keys)))
            self._settle(job)
        self._prepared.clear()

    def _fail_unwritten(self, job: Job, source: GPULoadStoreSpec) -> None:
        """vLLM leaves holes in window and state chunks. The bytes of a hole would be the slot's previous owner's."""
        per_chunk = self._geometry.blocks_per_chunk
        for kind, (blocks, first) in enumerate(zip(source.group_sizes, source.block_indices, strict=True)):
            chunks = job.chunks_of(kind)
            whole = whole_chunks(len(chunks), blocks, first, per_chunk)
            if len(chunks) and first // per_chunk != job.first_chunks[kind]:
                whole = range(0)
            job.failed.update(chunk for i, chunk in enumerate(chunks) if i not in whole)

    def finish(
        self,
        completed: Mapping[int, int],
        failed: Mapping[int, Collection[int]],
        copy_s: Mapping[int, float],
        unsettled: Collection[int] = (),
    ) -> None:
        """Ranks report the end of jobs: job -> how many ranks, which of its chunks failed on one of them, and how long
        its copy ran on the slowest. `unsettled`: a lost device may still write to the slots of these."""
        for job_id, ranks in completed.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.failed.update(failed.get(job_id, ()))
            job.settled &= job_id not in unsettled
            job.copy_s = max(job.copy_s, copy_s.get(job_id, 0.0))
            job.ranks_pending -= ranks
            assert job.ranks_pending >= 0, f"job {job_id}: {-job.ranks_pending} ranks too many reported its end"
            if job.ranks_pending == 0:
                del self._jobs[job_id]
                self._settle(job)

    def _settle(self, job: Job) -> None:
        """Every rank has ended: each slot gets its commit, abort or release, exactly once."""
        steps = job.attached.steps
        self._observe(job)
        places = zip(job.spec.slots.tolist(), job.spec.generations.tolist(), strict=True)
        if job.is_store:
            kept = self._kept(job)
            stored_as = job.record.stored_as([get_offload_block_hash(key) for key in job.keys])
            for i, (slot, generation) in enumerate(places):
                if i in kept:
                    parent, memory_only = job.parents[i], job.memory_only[i]
                    steps.commit(slot, generation, job.tenant, stored_as[i], parent, memory_only=memory_only)
                elif job.settled:  # else the slot stays granted until the processes of this engine have ended
                    steps.abort(slot, generation)
                if self._storing.get((job.tenant, job.keys[i])) is job:
                    del self._storing[job.tenant, job.keys[i]]
            self._count(metrics.STORED_CHUNKS, len(kept))
            self._count(metrics.FAILED_STORES, len(job.failed))
        else:
            for i, (slot, generation) in enumerate(places):
                if (slot, generation) != NOWHERE:
                    promoted = job.keys[i] in job.record.prefetched
                    steps.release(slot, generation, loaded=i not in job.failed, promoted=promoted)
            job.record.barred.update(job.keys[i] for i in job.failed)
            self._count(metrics.LOADED_CHUNKS, len(job.keys) - len(job.failed))
            self._count(metrics.FAILED_LOADS, len(job.failed))

    def _kept(self, job: Job) -> set[int]:
        """Which chunks of an ended store become visible."""
        if job.stale or job.attached.steps.broken:
            return set()
        kept = set(range(len(job.keys))) - job.failed
        for kind, geometry in enumerate(self._geometry.kinds):
            if geometry.is_chain:  # what follows a hole in a chain is no use
                chunks = job.chunks_of(kind)
                hole = min(job.failed.intersection(chunks), default=chunks.stop)
                kept.difference_update(range(hole, chunks.stop))
        return kept

    def _observe(self, job: Job) -> None:
        loaded = len(job.keys) - len(job.failed)
        if not job.failed and job.copy_s > 0:
            kinds = job.attached.steps.group.kinds
            nbytes = sum(count * kind.chunk_bytes for count, kind in zip(job.spec.counts, kinds, strict=True))
            self._admission.copied(store=job.is_store, chunks=loaded, chunk_bytes=nbytes // loaded, seconds=job.copy_s)
        if job.is_store:
            return
        for key in job.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
        if job.load is not None:
            self._admission.load_ended(job.load, service_s=job.copy_s, loaded_chunks=loaded)

    # ---- what the engine does

    def step_began(self, scheduled: Scheduled) -> None:
        """`schedule` has ended with this output."""
        self._admission.queue.step_began(scheduled)

    def step_ended(self) -> None:
        """The output of the oldest step under way has been taken in."""
        self._admission.step_ended()

    # ---- the engine's life

    def flush(self) -> None:
        """End of a step, in either direction: what has been queued goes out without waiting for another one."""
        attached = self._usable()
        if attached is not None:
            self._exchange_learned(attached)
            for chunks, seconds in attached.steps.take_reads():
                chunk_bytes = self._chunk_bytes(attached)
                self._admission.read(chunks=chunks, chunk_bytes=chunk_bytes, seconds=seconds)
            self._fetch_grants(attached)
            attached.steps.flush()

    def _exchange_learned(self, attached: Attached) -> None:
        """What other engines like this one learned comes from the daemon, and goes back there for the next one."""
        steps, now = attached.steps, self._clock()
        if attached is not self._asked_learned:
            self._asked_learned, self._learned_told_at = attached, now
            steps.ask_learned(self._admission.learning)
        if learned := steps.take_learned():
            self._admission.restore(learned)
        if now - self._learned_told_at >= LEARNED_TOLD_S:
            self._learned_told_at = now
            steps.learn(self._admission.documents())

    def has_pending_work(self) -> bool:
        """vLLM calls nothing any more when this is False: a commit that was not sent would stay."""
        attached = self._link.current
        return bool(self._jobs) or (attached is not None and attached.steps.unsent)

    def reset_cache(self) -> None:
        """The weights may have changed. What is stored stays for other engines, out of this one's reach; running jobs
        keep their slots until the workers have reported, and are then aborted."""
        for job in itertools.chain(self._prepared.values(), self._jobs.values()):
            job.stale = True
        self._storing.clear()
        for record in self._records.values():
            record.found = record.load = None
            for row in record.rows:
                row.refused_from = None
        self._reset, self._moved = True, None
        self._usable()

    def get_stats(self) -> OffloadingConnectorStats | None:
        if not self._counts:
            return None
        stats = OffloadingConnectorStats()
        for name, value in self._counts.items():
            stats.increase_counter(name, value)
        self._counts.clear()
        return stats

    def shutdown(self) -> None:
        if self._link.current is not None:
            self._link.current.steps.learn(self._admission.documents())
        self._link.close()

    def _usable(self) -> Attached | None:
        """The attachment, if chunks may be looked up and stored through it now."""
        attached = self._link.current
        if attached is None or self._shut_out:
            return None
        if attached.steps.broken:
            if not attached.session.lost:  # else the link says so
                self._say(
                    "kvstore: the daemon refused this engine's messages; serving without the store", logging.ERROR
                )
            return None
        if attached is not self._introduced:
            self._introduced = attached
            self._admission.tell = attached.steps.tell
            attached.steps.probe(self._probe.engine_family, self._probe.hash_algorithm, self._probe.value)
        group = attached.steps.group
        if group.refused:
            self._say(
                f"kvstore: the daemon refused this engine, which neither loads nor stores: {group.refused}",
                logging.ERROR,
            )
            return None
        if not group.complete:
            return None
        if self._reset and attached is not self._moved:  # only now: a group without workers has nothing to leave
            self._moved = attached
            self._retired.add(group.kinds[0].namespace_id)
            attached.steps.fresh_namespace()
            attached.steps.flush()
        return None if group.kinds[0].namespace_id in self._retired else attached

    def _check_seed(self) -> None:
        if self._seed_checked:
            return
        self._seed_checked = True
        problem = self._probe.effective_seed_problem()
        if problem is not None:
            self._shut_out = problem
            self._say(f"kvstore: {problem}. This engine neither loads nor stores", logging.ERROR)

    def _count(self, name: str, value: int) -> None:
        if value:
            self._counts[name] = self._counts.get(name, 0) + value

    def _say(self, message: str, level: int = logging.WARNING) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


def _store_nothing() -> PrepareStoreOutput:
    nothing = ChunkSpec(0, b"", np.empty(0, np.uint32), np.empty(0, np.uint64), ())
    return PrepareStoreOutput([], nothing, evicted_keys=[])
