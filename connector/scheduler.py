"""The scheduler half: vLLM's OffloadingManager over the shared table and one daemon's message stream.

One thread, the engine's scheduler, calls everything here and in the files it is made of: `requests` (what is known of
each), `loads`, `retries` (of loads that failed), `stores`, `grants` (slots asked for ahead) and `jobs` (slots in use).
Only `Link.current` and the fields of `Steps` change beside it. Nothing waits: a lookup reads the shared table,
everything else is queued on `Steps`, whose sender thread makes one message a step of it.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
)

from connector import compat
from connector.grants import Grants
from connector.jobs import NOWHERE, Jobs
from connector.link import Link
from connector.loads import Loads
from connector.messages import ChunkSpec
from connector.metrics import Counts
from connector.requests import Attached, Geometry, RequestRecord, Row, Rules
from connector.retries import Retries
from connector.stores import Stores
from kvstore.admission import Admission
from kvstore.limits import HEARTBEAT_STALE_MS
from kvstore.observations import Scheduled

logger = logging.getLogger("vllm.connector.scheduler")

LEARNED_TOLD_S = 5.0
STATE_WAIT_S = 0.2  # how long a request may wait for a state's slot; the daemon answers within a millisecond or two

_HIT, _MISSED = LookupResult.HIT, LookupResult.MISS  # `lookup` is called for every key, and an enum's names are slow


@dataclass(frozen=True, slots=True)
class Probe:
    """The engine's hash of fixed tokens, and whether the engine really hashes as it said at construction."""

    engine_family: str
    hash_algorithm: str
    value: bytes
    effective_seed_problem: Callable[[], str | None]  # asked at the first request; vLLM knows it no earlier


class SchedulerHalf(OffloadingManager):
    """See the module's docstring."""

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
        self._counts = Counts()
        self.jobs = Jobs(geometry, admission, self._counts)
        self._grants = Grants(geometry, self.jobs.running, clock)
        self._loads = Loads(geometry, rules, admission, self._grants, self.jobs.loading, clock)
        self._stores = Stores(geometry, rules, admission, self._grants, self.jobs, self._counts, clock)
        self._retries = Retries(clock)
        # Else a request keeps its blocks, and goes on from the first one that a failed load left wrong.
        self._keeps_valid_prefix = len(geometry.kinds) == 1 and geometry.kinds[0].is_chain
        self._keeps_states = any(kind.offered_once for kind in geometry.kinds)
        self._reset = False  # the cache was reset once: namespaces of before are out of reach for good
        self._retired: set[bytes] = set()
        self._moved: Attached | None = None  # the attachment that was told of the last reset
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
                self._grants.expect(row, row.geometry.stored_max(row.prompt_chunks))
        attached = self._usable()
        if attached is not None:
            self._grants.fetch(attached, self._records.values())
            attached.steps.flush()  # so that the grants are here when the first chunks are computed

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        record = self._records.get(req_context.req_id)
        if record is not None:
            req_context.set_state(record)
            record.tiers = req_context.load_tier_filter
        # Every chunk of the prompt is then offered to `prepare_store`, also those the GPU had: the only sign of life of
        # a prefix that is hot there, and what mends holes.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def finishing(self, req_id: str, computed_tokens: int) -> None:
        """The request has ended; one last offer to store may follow. `computed_tokens`: 0 when it was preempted."""
        record = self._records.get(req_id)
        if record is not None:
            record.finished, record.storable_tokens = True, computed_tokens
            self._admission.queue.ended(req_id)  # nobody who is decided about before vLLM says more waits for it

    def on_request_finished(self, req_context: ReqContext) -> None:
        record = req_context.get_state(RequestRecord)
        if record is not None:
            record.finished = True
            self._forget(record)

    def _forget(self, record: RequestRecord) -> None:
        for row in record.rows:
            self._grants.expect(row, 0)
        self._loads.promotion_over(record)
        self._retries.over(record.req_id)
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
            if record.barred and not self._keeps_valid_prefix:
                self._retries.asked(req_id)

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
            record.found = self._loads.look_up(record, self._usable())
        if record.admitted_tokens is None:
            return None
        return max(0, record.admitted_tokens - computed_tokens)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        record = req_context.get_state(RequestRecord)
        if record is None:
            return _MISSED
        found = record.found
        if found is None:  # not before vLLM asks: a request that skips the cache asks nothing
            found = record.found = self._loads.look_up(record, self._usable())
        if key in found.chunks:
            return _HIT
        return LookupResult.RETRY if key in found.coming else _MISSED

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
        for kind, own in itertools.groupby(keys, self._geometry.kind_of):
            row = record.rows[kind]
            row.known_present = True
            if not self._rules.stores:  # else every chunk is offered to `prepare_store`, which touches it
                self._stores.touch_loaded(found.attached, record, row, [get_offload_block_hash(key) for key in own])
        job = self.jobs.prepare(found.attached, record, list(keys), places, is_store=False)
        self._retries.over(record.req_id)
        self._loads.promotion_over(record)
        if record.load is not None:
            job.load, record.load = record.load, None  # whatever is asked after this is asked anew
            self._admission.load_began(job.load, len(job.keys))
        return job.spec

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return self._stores.prepare(req_context.get_state(RequestRecord), self._usable(), keys, req_context)

    # ---- what the engine does

    def step_began(self, scheduled: Scheduled) -> None:
        """`schedule` has ended with this output."""
        self._admission.queue.step_began(scheduled)
        self._retries.step_began(scheduled)

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
                chunk_bytes = self._geometry.chain_bytes(attached)
                self._admission.read(chunks=chunks, chunk_bytes=chunk_bytes, seconds=seconds)
            self._grants.fetch(attached, self._records.values())
        current = self._link.current
        if current is not None:  # what is queued goes out also where the group is refused, or lacks a worker
            current.steps.flush()

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
        return bool(self.jobs.running) or (attached is not None and attached.steps.unsent)

    def reset_cache(self) -> None:
        """The weights may have changed. What is stored stays for other engines, out of this one's reach; running jobs
        keep their slots until the workers have reported, and are then aborted."""
        self.jobs.forsake()
        for record in self._records.values():
            self._loads.promotion_over(record)
            record.found = record.load = record.prefetch = None
            for row in record.rows:
                row.refused_from = row.tail = None
                row.known_present, row.used = False, 0
        self._reset, self._moved = True, None
        self._usable()

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = self._counts.take()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, value in counts.items():
            stats.increase_counter(name, value)
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
        if attached.steps.broken:  # the link says why, and attaches again
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
            self.shut_out(problem)

    def shut_out(self, problem: str) -> None:
        """From here on, and for good, nothing of this engine can be trusted."""
        self._shut_out = problem
        self._say(f"kvstore: {problem}. This engine neither loads nor stores", logging.ERROR)

    def _say(self, message: str, level: int = logging.WARNING) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)
