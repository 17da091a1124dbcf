"""The scheduler half: which chunks of a request are loaded and stored, and what becomes of every slot it was given.

One thread, the engine's scheduler, calls everything here; only `Link.current` and the fields of `Steps` change beside
it. Nothing waits: a lookup reads the shared table, everything else is queued on `Steps`, whose sender thread makes one
message a step of it.

vLLM tells a manager nothing of failures and forgets its jobs in `reset_cache`, so the table of jobs here is our own: a
slot enters it when a job is prepared and leaves it when every rank has reported, as a commit, an abort or a release.
A job belongs to the attachment (daemon instance) it was prepared with; when that daemon dies its `Steps` drops what is
sent to it, and the job simply ends. When this process dies the daemon gives its slots back once the whole group has
ended.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
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
)

from connector import compat, metrics
from connector.admission import FS as FS_TIER
from connector.admission import PROBE_CHUNKS, Admission, Hit, LoadVerdict, Mode, StoreVerdict, leading
from connector.link import Link
from connector.messages import ChunkSpec
from connector.observations import Scheduled
from kvstore._native import CPU, FS, MISS, PENDING, class_bytes
from kvstore.limits import HEARTBEAT_STALE_MS, PROMOTES_PER_ROUND, grants_per_group_max
from kvstore.session import Session
from kvstore.steps import Outcome, Steps

logger = logging.getLogger("vllm.connector.scheduler")

HEARTBEAT_HUNG_MS = 1000.0
LEARNED_TOLD_S = 5.0
STORE_WAIT_S = 1.0  # how long a request's store may wait for grants; docs/decisions/002
GRANTS_RETRY_S = 0.1  # a full tier is not asked again in every step
NOWHERE = (0, 2**64 - 1)  # a place whose generation no slot ever has: its load fails


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """The scheduler half's end of one attachment."""

    session: Session
    steps: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How an engine cuts requests into chunks."""

    tokens_per_chunk: int
    hashes_per_chunk: int
    blocks_per_chunk: int
    ranks: int
    names_parents: bool  # False for groups that are read from the tail (sliding window)


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
    chunks: Mapping[bytes, tuple[int, int]]  # key -> (slot, generation), cpu tier
    coming: Collection[bytes] = ()  # keys on their way up from the fs tier, and waited for


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
class RequestRecord:
    """What vLLM's context of a request does not carry. Jobs keep it: they may outlive the request, and ids repeat."""

    req_id: str
    salt: str | None = field(repr=False)
    served: bool  # False: neither stored nor loaded
    hashes: Sequence[bytes] = field(repr=False)  # vLLM's own list; grows as tokens are generated
    prompt_tokens: int
    prompt_chunks: int
    finished: bool = False
    load: LoadVerdict | None = None  # of the hit as it was last
    store: StoreVerdict | None = None  # of all its chunks, from the first offer on
    tiers: TierFilter | None = None  # that the request may load from; None: not known yet
    lookup_from: int = 0  # first chunk that vLLM asks about
    computed_tokens: int = 0  # that the engine has itself
    admitted_tokens: int = 0  # end of what may be loaded
    found: Found | None = None  # None: to be looked up when vLLM asks
    misses_told: bool = False
    barred: set[bytes] = field(default_factory=set)  # keys whose load failed: not tried again
    prefetch: Prefetch | None = None
    gave_up: int = 0  # times that it stopped waiting for the disk
    prefetched: set[bytes] = field(default_factory=set)  # keys asked for: a hit of fs, not of cpu
    refused_from: int | None = None  # first chunk of the chain that could not be stored; nothing after it is
    store_waits_until_s: float | None = None  # None: has not waited for grants yet
    grants_expected: int = 0
    known_present: bool = False  # some of the chain is in the store
    tail: tuple[int, int] | None = None  # place of the last chunk of the chain that is stored, or being stored
    used: int = 0  # so many chunks of the chain the daemon was told of: later touches are no further use
    tenant_of: tuple[Attached, bytes] | None = field(default=None, repr=False)

    def chunk_keys(self, geometry: Geometry, first: int, end: int | None = None) -> list[bytes]:
        """A chunk's key is the hash of its last tokens."""
        each = geometry.hashes_per_chunk
        return list(self.hashes[(first + 1) * each - 1 : None if end is None else end * each : each])

    def may_load_from(self, medium: Medium) -> bool:
        return self.tiers is None or self.tiers.allows(medium, Locality.LOCAL)

    def tenant(self, attached: Attached) -> bytes:
        if self.tenant_of is None or self.tenant_of[0] is not attached:
            self.tenant_of = (attached, attached.session.tenant_id(self.salt))
        return self.tenant_of[1]


@dataclass(slots=True, eq=False)
class Job:
    """Slots in use: leased for a load, or granted for a store."""

    is_store: bool
    attached: Attached
    record: RequestRecord
    spec: ChunkSpec
    tenant: bytes
    keys: list[bytes]
    parents: list[bytes]  # store: the key before each in the prompt, or b""
    first_chunk: int  # of the chain
    ranks_pending: int
    load: LoadVerdict | None = None
    copy_s: float = 0.0  # the slowest rank's
    failed: set[int] = field(default_factory=set)
    settled: bool = True  # False: a lost device may still write to its slots
    stale: bool = False  # the cache was reset meanwhile: the weights may have changed since its bytes were computed


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
        self._loading: dict[bytes, int] = {}  # keys that copies to the GPU are under way for, and how many
        self._storing: dict[tuple[bytes, bytes], Job] = {}  # (tenant, key) -> the store that writes it
        self._expected = 0  # sum of the records' grants_expected
        self._grants_asked_at = -GRANTS_RETRY_S
        self._reset = False  # the cache was reset once: namespaces of before are out of reach for good
        self._retired: set[bytes] = set()
        self._moved: Attached | None = None  # the attachment that was told of the last reset
        self._counts = dict.fromkeys(metrics.COUNTERS, 0)  # not yet told; zeros once, so that every series exists
        self._said: set[str] = set()

    # ---- requests

    def register(
        self, req_id: str, *, salt: str | None, has_lora: bool, prompt_tokens: int, hashes: Sequence[bytes]
    ) -> None:
        """A request arrived; `hashes` is the list that vLLM extends. Called before vLLM's own `on_new_request`."""
        self._check_seed()
        salt = salt or None  # vLLM hashes an empty salt as none
        attached = self._link.current
        salt_required = self._rules.require_cache_salt or (attached is not None and attached.session.require_cache_salt)
        if has_lora:
            self._say(
                "kvstore: requests with a LoRA adapter are neither stored nor loaded: vLLM's keys name the adapter, "
                "not its content"
            )
        record = RequestRecord(
            req_id=req_id,
            salt=salt,
            served=not has_lora and (salt is not None or not salt_required),
            hashes=hashes,
            prompt_tokens=prompt_tokens,
            prompt_chunks=prompt_tokens // self._geometry.tokens_per_chunk,
        )
        previous = self._records.get(req_id)
        if previous is not None:
            self._forget(previous)
        self._records[req_id] = record
        self._admission.queue.arrived(req_id, prompt_tokens)
        if record.served and self._rules.stores and self._admission.stores_lately:
            self._expect(record, record.prompt_chunks)
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
        self._expect(record, 0)
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
            record.lookup_from = computed_tokens // self._geometry.tokens_per_chunk
            record.computed_tokens = computed_tokens

    def loadable_tokens(self, req_id: str, computed_tokens: int) -> int:
        """How many tokens beyond those that the engine has are admitted to be loaded, whole chunks. vLLM is about to
        ask about their keys."""
        record = self._records.get(req_id)
        if record is None:
            return 0
        if record.found is None:
            record.found = self._look_up(record)
        return max(0, record.admitted_tokens - computed_tokens)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        record = req_context.get_state(RequestRecord)
        if record is None:
            return _MISSED
        found = record.found
        if found is None:  # not before vLLM asks: a request that skips the cache asks nothing
            found = record.found = self._look_up(record)
        chunk_key = get_offload_block_hash(key)
        if chunk_key in found.chunks:
            return _HIT
        return LookupResult.RETRY if chunk_key in found.coming else _MISSED

    def _look_up(self, record: RequestRecord) -> Found:
        attached = self._usable()
        record.admitted_tokens = 0
        if attached is None or not record.served or not self._rules.loads:
            return NOTHING_FOUND
        keys = record.chunk_keys(self._geometry, record.lookup_from)
        codes, slots, generations = attached.session.table.lookup(
            attached.steps.group.namespace_id, record.tenant(attached), keys
        )
        if not record.misses_told:
            record.misses_told = True
            missing = codes.count(MISS)
            attached.steps.miss(missing)
            if self._rules.stores and self._admission.stores_lately:
                self._expect(record, missing)
        given_up = record.gave_up
        found = self._find(record, attached, keys, codes, slots.tolist(), generations.tolist())
        if record.gave_up != given_up:  # what has come from disk by now is a shorter hit, decided about anew
            found = self._find(record, attached, keys, codes, slots.tolist(), generations.tolist())
        return found

    def _find(
        self,
        record: RequestRecord,
        attached: Attached,
        keys: Sequence[bytes],
        codes: bytes,
        slots: Sequence[int],
        generations: Sequence[int],
    ) -> Found:
        admitted = self._admit_load(record, attached, keys, codes)
        if admitted is None:
            admitted = len(keys)
        record.admitted_tokens = (record.lookup_from + admitted) * self._geometry.tokens_per_chunk
        keys, codes = keys[:admitted], codes[:admitted]
        places = zip(slots[:admitted], generations[:admitted], strict=True)
        from_cpu = record.may_load_from(Medium.CPU)
        if from_cpu and not record.barred and codes.count(CPU) == len(codes):
            self._promotion_over(record)
            return Found(attached, dict(zip(keys, places, strict=True)))  # as usual; it must be quick
        chunks = {
            key: place
            for key, code, place in zip(keys, codes, places, strict=True)
            if code == CPU and key not in record.barred and (from_cpu or key in record.prefetched)
        }
        coming: Collection[bytes] = ()
        if (FS in codes or PENDING in codes) and record.may_load_from(Medium.STORAGE):
            coming = self._prefetch(record, attached, dict(zip(keys, codes, strict=True)), chunks)
        else:
            self._promotion_over(record)
        return Found(attached, chunks, coming)

    def _admit_load(self, record: RequestRecord, attached: Attached, keys: Sequence[bytes], codes: bytes) -> int | None:
        """How many of the chunks that vLLM asks about may be loaded, from the first on. None: as many as there are,
        for what hits where chunks are used without those before them was not modelled."""
        if not self._geometry.names_parents:
            return None if self._admission.mode is not Mode.NEVER else 0
        hit = self._hit(record, attached, keys, codes)
        tokens_per_chunk = self._geometry.tokens_per_chunk
        verdict = record.load
        same = verdict is not None and (verdict.hit.gpu_tokens, verdict.hit.end_tokens) == (
            hit.gpu_tokens,
            hit.end_tokens,
        )
        if verdict is None or not same:
            verdict = record.load = self._admission.load(record.req_id, hit, self._rules.prefetch_wait_s)
            if verdict.probe:
                below = [key for key, code in zip(keys, codes, strict=True) if code == FS]
                attached.steps.promote(record.tenant(attached), below[:PROBE_CHUNKS], waited=False)
        return max(0, verdict.end_tokens // tokens_per_chunk - record.lookup_from) if verdict.loads else 0

    def _hit(self, record: RequestRecord, attached: Attached, keys: Sequence[bytes], codes: bytes) -> Hit:
        """What of a request can be loaded at all, its tiers, its barred keys and what it gave up waiting for apart."""
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
        first, tokens_per_chunk = record.lookup_from, self._geometry.tokens_per_chunk
        loading = self._loading.keys()
        tokens_per_hash = tokens_per_chunk // self._geometry.hashes_per_chunk
        return Hit(
            prompt_tokens=max(record.prompt_tokens, len(record.hashes) * tokens_per_hash),
            gpu_tokens=record.computed_tokens,
            cpu_end_tokens=(first + in_memory) * tokens_per_chunk if in_memory else record.computed_tokens,
            end_tokens=(first + anywhere) * tokens_per_chunk if anywhere else record.computed_tokens,
            cpu_chunks=in_memory - (len(loading & set(keys[:in_memory])) if loading else 0),
            chunks=anywhere - (len(loading & set(keys[:anywhere])) if loading else 0),
            disk_chunks=on_disk,
            chunk_bytes=attached.steps.group.chunk_bytes,
            disk_healthy=healthy,
            missing=keys[anywhere] if anywhere < len(keys) else b"",
        )

    def _promotion_over(self, record: RequestRecord) -> None:
        prefetch = record.prefetch
        if prefetch is not None and prefetch.under_way:
            prefetch.under_way = False
            self._admission.promoted()

    def _give_up_promotion(self, record: RequestRecord, prefetch: Prefetch, coming: Sequence[bytes]) -> None:
        """What has not come from disk by now is a miss for this request. `coming`: what still does, for nobody."""
        if coming:
            tenant = record.tenant(prefetch.attached)
            prefetch.attached.steps.promote(tenant, coming[:PROMOTES_PER_ROUND], waited=False)
        prefetch.over = True
        record.gave_up += 1
        self._promotion_over(record)
        if record.load is not None and record.load.tier == FS_TIER:
            self._admission.read_waited(
                chunks=prefetch.chunks,
                chunk_bytes=prefetch.attached.steps.group.chunk_bytes,
                seconds=self._clock() - prefetch.asked_s,
            )
            self._admission.gave_up(record.load, "not read from disk in time")
            record.load = None  # what has come is looked at anew

    def _prefetch(
        self, record: RequestRecord, attached: Attached, codes: Mapping[bytes, int], chunks: Collection[bytes]
    ) -> Collection[bytes]:
        """Ask for what is only on disk, and say what is worth waiting for. What lies behind a hole is not, where a
        chunk is no use without those before it."""
        below: list[bytes] = []
        for key, code in codes.items():
            if code in (FS, PENDING) and key not in record.barred:
                below.append(key)
            elif key not in chunks and self._geometry.names_parents:
                break
        prefetch, now = record.prefetch, self._clock()
        if not below or attached.session.table.heartbeat_age_ms() > HEARTBEAT_HUNG_MS:
            if not below:
                self._promotion_over(record)
            return ()  # nobody would read them; a daemon that is only held up has as long as the request may wait
        if prefetch is None or prefetch.attached is not attached:
            self._promotion_over(record)
            wait_s = self._rules.prefetch_wait_s if record.load is None else record.load.wait_s
            prefetch = record.prefetch = Prefetch(attached, now + wait_s, now, len(below))
            self._admission.promoting(len(below), attached.steps.group.chunk_bytes)
        if prefetch.over:
            return ()
        round_over = attached.steps.promotes_answered >= prefetch.ticket and all(codes[key] == FS for key in below)
        if prefetch.ticket == 0 or (round_over and len(below) < prefetch.below):
            # Another round may find room for what the last one did not bring.
            prefetch.ticket = attached.steps.promote(record.tenant(attached), below[:PROMOTES_PER_ROUND])
            prefetch.below = len(below)
            record.prefetched.update(below)
            attached.steps.flush()
        elif round_over:
            self._give_up_promotion(record, prefetch, [])
        if now >= prefetch.until_s and not prefetch.over:
            self._give_up_promotion(record, prefetch, [key for key in below if codes[key] == PENDING])
        return () if prefetch.over else frozenset(below)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> object:
        record = req_context.get_state(RequestRecord)
        from_disk = record is not None and get_offload_block_hash(key) in record.prefetched
        return compat.DISK if from_disk else compat.HOST_MEMORY

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        record = req_context.get_state(RequestRecord)
        assert record is not None, f"a load for request {req_context.req_id} that never arrived"
        found = record.found
        assert found is not None, f"a load for request {req_context.req_id} without a lookup"
        assert found.attached is not None, f"a load for request {req_context.req_id} without a hit"
        chunk_keys = [get_offload_block_hash(key) for key in keys]
        # vLLM loads what it asked about and was told to be there, but for a window it may round outwards.
        places = [found.chunks.get(key, NOWHERE) for key in chunk_keys]
        for place in places:
            if place != NOWHERE:
                found.attached.steps.lease(*place)
        record.known_present = True
        if not self._rules.stores:  # else every chunk is offered to `prepare_store`, which touches it
            self._touch_loaded(record, found.attached, chunk_keys)
        job = self._prepare(found.attached, record, chunk_keys, places, is_store=False)
        for key in chunk_keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        self._promotion_over(record)
        if record.load is not None:
            job.load, record.load = record.load, None  # whatever is asked after this is asked anew
            self._admission.load_began(job.load, len(chunk_keys))
        return job.spec

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Of the chunks offered: those to store now. Anything but None means that vLLM does not offer the others again
        for this request, so the chain ends at the first one refused."""
        record = req_context.get_state(RequestRecord)
        attached = self._usable()
        if record is None or not record.served or not self._rules.stores or not keys:
            return _store_nothing()
        place_of = self._places(record, keys, req_context)
        keys = [key for key in keys if key in place_of]
        if not keys:
            return _store_nothing()
        positions = [place_of[key] for key in keys]
        assert positions == sorted(positions), f"chunks offered out of order: {positions}"
        if attached is None:
            self._refuse(record, positions[0], len(positions))
            return _store_nothing()
        tenant = record.tenant(attached)
        namespace = attached.steps.group.namespace_id
        chunk_keys = [get_offload_block_hash(key) for key in keys]
        codes, slots, generations = attached.session.table.lookup(namespace, tenant, chunk_keys)
        end = self._admitted_end(record, attached, tenant)
        present, wanted, beyond, not_admitted = [], [], [], []  # with their positions
        for i, offered in enumerate(zip(positions, keys, chunk_keys, codes, strict=True)):
            position, _, chunk_key, code = offered
            if record.chunk_keys(self._geometry, position, position + 1) != [chunk_key]:
                continue  # the request's tokens were changed since vLLM noted this key: its bytes are another's
            if code in (CPU, PENDING):
                present.append((position, chunk_key))
                record.tail = (int(slots[i]), int(generations[i]))
            elif end is not None and position >= end:
                not_admitted.append((position, chunk_key))
            elif record.refused_from is not None and position >= record.refused_from:
                beyond.append((position, chunk_key))
            elif (tenant, chunk_key) not in self._storing:
                wanted.append(offered)
        if wanted and self._may_defer(record, attached, len(wanted)):
            self._expect(record, max(record.grants_expected, len(wanted)))
            return None
        grants = self._take_grants(attached, len(wanted))
        refused = [(position, chunk_key) for position, _, chunk_key, _ in wanted[len(grants) :]]
        record.known_present |= bool(present)
        self._touch(record, attached, tenant, sorted(present + refused + beyond + not_admitted), positions)
        self._admission.offered(chunk_keys[len([place for place in positions if place < record.prompt_chunks]) :])
        self._count(metrics.UNADMITTED_STORES, len(not_admitted))
        self._count(metrics.REFUSED_STORES, len(beyond))
        if len(grants) < len(wanted):
            self._refuse(record, wanted[len(grants)][0], len(wanted) - len(grants))
            wanted = wanted[: len(grants)]
        else:
            self._expect_more(record, positions[-1], end)
        if not wanted:
            return _store_nothing()
        job = self._prepare(attached, record, [chunk_key for _, _, chunk_key, _ in wanted], grants, is_store=True)
        record.tail = grants[-1]
        job.first_chunk = wanted[0][0]
        job.parents = [self._parent(record, position) for position, _, _, _ in wanted]
        for chunk_key in job.keys:
            self._storing[tenant, chunk_key] = job
        return PrepareStoreOutput([key for _, key, _, _ in wanted], job.spec, evicted_keys=[])

    def _expect_more(self, record: RequestRecord, last: int, end: int | None) -> None:
        """After the offer of the chunk `last`, with `end` the first one that is not to be stored."""
        prompt_end = record.prompt_chunks if end is None else min(end, record.prompt_chunks)
        prompt = min(record.grants_expected, max(0, prompt_end - last - 1))
        answer = 1 if self._rules.stores_answers and not record.finished and end is None else 0
        self._expect(record, prompt + answer)

    def _admitted_end(self, record: RequestRecord, attached: Attached, tenant: bytes) -> int | None:
        """The first chunk of the request that is not to be stored. None: all are, what it generates included."""
        if record.store is None:
            record.store = self._admit_store(record, attached, tenant)
        return record.store.end_chunk

    def _admit_store(self, record: RequestRecord, attached: Attached, tenant: bytes) -> StoreVerdict:
        chain = record.chunk_keys(self._geometry, 0, record.prompt_chunks)
        codes, _, _ = attached.session.table.lookup(attached.steps.group.namespace_id, tenant, chain)
        present = np.isin(np.frombuffer(codes, np.uint8), [CPU, PENDING])
        return self._admission.store(
            record.req_id,
            chain,
            present,
            chunk_bytes=attached.steps.group.chunk_bytes,
            tier_full=attached.steps.cpu_full,
        )

    def _places(
        self, record: RequestRecord, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> dict[OffloadKey, int]:
        """Which chunk of the request each key is."""
        geometry = self._geometry
        tokens_per_hash = geometry.tokens_per_chunk // geometry.hashes_per_chunk
        ends = compat.end_tokens(keys, req_context, record.hashes, tokens_per_hash)
        return {key: end // geometry.tokens_per_chunk - 1 for key, end in ends.items()}

    def _parent(self, record: RequestRecord, position: int) -> bytes:
        if position == 0 or not self._geometry.names_parents:
            return b""
        return record.chunk_keys(self._geometry, position - 1, position)[0]

    def _touch(
        self,
        record: RequestRecord,
        attached: Attached,
        tenant: bytes,
        used: list[tuple[int, bytes]],
        offered: Sequence[int],
    ) -> None:
        """Each offer keeps what it found young; the one that completes the prompt the whole chain, so that no parent is
        older than its child. `used` (position, key): what is present or refused; a commit speaks for the rest."""
        if record.known_present and offered[-1] + 1 == record.prompt_chunks:
            head = max(record.used, offered[0])
            keys = record.chunk_keys(self._geometry, 0, head) + [key for position, key in used if position >= head]
            again = record.used
        else:
            keys = [key for _, key in used]
            again = sum(position < record.used for position, _ in used)
        if keys:
            attached.steps.touch(tenant, keys, again=again)
        record.used = max(record.used, offered[-1] + 1)

    def _touch_loaded(self, record: RequestRecord, attached: Attached, loaded: list[bytes]) -> None:
        keys = loaded
        if self._geometry.names_parents:
            chain = record.chunk_keys(self._geometry, 0)
            keys = chain[: chain.index(loaded[-1], record.lookup_from) + 1]
        again = min(record.used, len(keys))
        attached.steps.touch(record.tenant(attached), keys, again=again)
        record.used = max(record.used, len(keys))

    def _refuse(self, record: RequestRecord, position: int, count: int) -> None:
        if record.refused_from is None or position < record.refused_from:
            record.refused_from = position
        self._count(metrics.REFUSED_STORES, count)
        self._expect(record, 0)

    # ---- grants

    def _take_grants(self, attached: Attached, count: int) -> list[tuple[int, int]]:
        if count == 0 or attached.session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return []  # a daemon that does not run could not be told that the store ended
        return attached.steps.take_grants(count)

    def _may_defer(self, record: RequestRecord, attached: Attached, count: int) -> bool:
        """Whether a store of so many chunks waits for slots. What is taken now is all that the request ever stores of
        this offer, so they are waited for, though not for ever. A finished request gets no further offer, and a daemon
        that has no more to give will not have more next step. Time counts, not steps: a step may take milliseconds, and
        a busy machine holds a daemon up for longer."""
        heartbeat_age_ms = attached.session.table.heartbeat_age_ms()
        enough = min(count, self._grants_max(attached))
        if attached.steps.grants_free >= enough and heartbeat_age_ms <= HEARTBEAT_STALE_MS:
            return False
        hopeless = attached.steps.grants_coming == 0 and attached.steps.grants_short in _FULL
        if record.finished or hopeless or heartbeat_age_ms > HEARTBEAT_HUNG_MS:
            return False
        now = self._clock()
        if record.store_waits_until_s is None:
            record.store_waits_until_s = now + STORE_WAIT_S
        return now < record.store_waits_until_s

    def _expect(self, record: RequestRecord, grants: int) -> None:
        self._expected += grants - record.grants_expected
        record.grants_expected = grants

    def _grants_max(self, attached: Attached) -> int:
        """How many slots the daemon lets this engine hold at once, those being written included."""
        return grants_per_group_max(attached.session.table.arena_bytes, class_bytes(attached.steps.group.chunk_bytes))

    def _fetch_grants(self, attached: Attached) -> None:
        """Ask for as many slots as the requests here are likely to write, within the daemon's own bound."""
        steps, table = attached.steps, attached.session.table
        writing = sum(len(job.keys) for job in self._jobs.values() if job.is_store and job.attached is attached)
        target = min(self._expected, self._grants_max(attached) - writing)
        # A step of the engine may take longer than a slot may lie idle; what is too much may still go back.
        missing = target - steps.grants_free - steps.grants_coming
        steps.keep_grants(keep=target > 0 and missing >= 0)
        if missing <= 0 or table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return
        now = self._clock()
        if steps.grants_short in _FULL and now - self._grants_asked_at < GRANTS_RETRY_S:
            return
        self._grants_asked_at = now
        growing = {record.tail for record in self._records.values() if record.grants_expected and record.tail}
        steps.want_grants(missing, tails=growing)

    # ---- jobs

    def _prepare(
        self,
        attached: Attached,
        record: RequestRecord,
        keys: list[bytes],
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
        )
        job = Job(
            is_store=is_store,
            attached=attached,
            record=record,
            spec=spec,
            tenant=record.tenant(attached),
            keys=keys,
            parents=[],
            first_chunk=0,
            ranks_pending=self._geometry.ranks,
        )
        self._prepared[ticket] = job
        return job

    def track(self, metadata: OffloadingConnectorMetadata) -> None:
        """The message to the workers is made: what was prepared now has vLLM's job ids."""
        for job_id, transfer in metadata.load_jobs.items():
            assert isinstance(transfer.src_spec, ChunkSpec), f"load {job_id} of another store: {transfer.src_spec!r}"
            self._jobs[job_id] = self._prepared.pop(transfer.src_spec.ticket)
        for job_id, transfer in metadata.store_jobs.items():
            assert isinstance(transfer.dst_spec, ChunkSpec), f"store {job_id} of another store: {transfer.dst_spec!r}"
            assert isinstance(transfer.src_spec, GPULoadStoreSpec)
            job = self._jobs[job_id] = self._prepared.pop(transfer.dst_spec.ticket)
            if not self._writes_every_block(job, transfer.src_spec):
                job.failed.update(range(len(job.keys)))
        for job in self._prepared.values():  # vLLM made no job of it after all
            job.failed.update(range(len(job.keys)))
            self._settle(job)
        self._prepared.clear()

    def _writes_every_block(self, job: Job, source: GPULoadStoreSpec) -> bool:
        """vLLM leaves holes in sliding-window chunks. The bytes of a hole would be the slot's previous owner's."""
        return (
            list(source.group_sizes) == [len(job.keys) * self._geometry.blocks_per_chunk]
            and source.block_indices[0] == job.first_chunk * self._geometry.blocks_per_chunk
        )

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
            whole = min(job.failed, default=len(job.keys))  # what follows a hole in the chain is no use
            if job.stale or steps.broken:
                whole = 0
            for i, (slot, generation) in enumerate(places):
                if i < whole:
                    steps.commit(slot, generation, job.tenant, job.keys[i], job.parents[i])
                elif job.settled:  # else the slot stays granted until the processes of this engine have ended
                    steps.abort(slot, generation)
                if self._storing.get((job.tenant, job.keys[i])) is job:
                    del self._storing[job.tenant, job.keys[i]]
            self._count(metrics.STORED_CHUNKS, whole)
            self._count(metrics.FAILED_STORES, len(job.failed))
        else:
            for i, (slot, generation) in enumerate(places):
                if (slot, generation) != NOWHERE:
                    promoted = job.keys[i] in job.record.prefetched
                    steps.release(slot, generation, loaded=i not in job.failed, promoted=promoted)
            job.record.barred.update(job.keys[i] for i in job.failed)
            self._count(metrics.LOADED_CHUNKS, len(job.keys) - len(job.failed))
            self._count(metrics.FAILED_LOADS, len(job.failed))

    def _observe(self, job: Job) -> None:
        loaded = len(job.keys) - len(job.failed)
        if not job.failed and job.copy_s > 0:
            chunk_bytes = job.attached.steps.group.chunk_bytes
            self._admission.copied(store=job.is_store, chunks=loaded, chunk_bytes=chunk_bytes, seconds=job.copy_s)
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
                chunk_bytes = attached.steps.group.chunk_bytes
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
            record.refused_from = None
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
            self._retired.add(group.namespace_id)
            attached.steps.fresh_namespace()
            attached.steps.flush()
        return None if group.namespace_id in self._retired else attached

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
    return PrepareStoreOutput([], ChunkSpec(0, b"", np.empty(0, np.uint32), np.empty(0, np.uint64)), evicted_keys=[])
