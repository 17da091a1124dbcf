"""Slots in use, and what becomes of each: every one ends as a commit, an abort or a release, exactly once, but for
those that a lost device may still write to.

vLLM tells a manager nothing of failures and forgets its jobs in `reset_cache`, so the table of jobs here is our own: a
slot enters it when a job is prepared and leaves it when every rank has reported. A job belongs to the attachment
(daemon instance) it was prepared with; when that daemon dies its `Steps` drops what is sent to it, and the job simply
ends. When this process dies the daemon gives its slots back once the whole group has ended.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, get_offload_block_hash

from connector import metrics
from connector.layout import whole_chunks
from connector.messages import ChunkSpec
from connector.metrics import Counts
from connector.requests import Attached, Geometry, RequestRecord
from kvstore.admission import Admission, LoadVerdict

NOWHERE = (0, 2**64 - 1)  # a place whose generation no slot ever has: its load fails


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
    blocks: NDArray[np.integer] = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # load: the engine's, to be filled
    load: LoadVerdict | None = None
    copy_s: float = 0.0  # the slowest rank's
    failed: set[int] = field(default_factory=set)
    settled: bool = True  # False: a lost device may still write to its slots
    stale: bool = False  # the cache was reset meanwhile: the weights may have changed since its bytes were computed

    def chunks_of(self, kind: int) -> range:
        first = sum(self.spec.counts[:kind])
        return range(first, first + self.spec.counts[kind])


class Jobs:
    def __init__(self, geometry: Geometry, admission: Admission, counts: Counts) -> None:
        self._geometry = geometry
        self._admission = admission
        self._counts = counts
        self._tickets = itertools.count(1)
        self._prepared: dict[int, Job] = {}  # by ticket: not yet in a message to the workers
        self.running: dict[int, Job] = {}  # by vLLM's job id: with the workers
        self.loading: dict[OffloadKey, int] = {}  # keys that copies to the GPU are under way for, and how many
        self._storing: dict[tuple[bytes, OffloadKey], Job] = {}  # (tenant, key) -> the store that writes it

    def is_storing(self, tenant: bytes, key: OffloadKey) -> bool:
        return (tenant, key) in self._storing

    def prepare(
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
        for key in keys:
            if is_store:
                self._storing[job.tenant, key] = job
            else:
                self.loading[key] = self.loading.get(key, 0) + 1
        return job

    def _counts_by_kind(self, keys: Sequence[OffloadKey]) -> tuple[int, ...]:
        counts = Counter(map(self._geometry.kind_of, keys))
        return tuple(counts[kind] for kind in range(len(self._geometry.kinds)))

    def loads_begun(self) -> set[str]:
        """Requests whose loads go out with the step that is being scheduled."""
        return {job.record.req_id for job in self._prepared.values() if not job.is_store}

    def track(self, metadata: OffloadingConnectorMetadata) -> None:
        """The message to the workers is made: what was prepared now has vLLM's job ids."""
        for job_id, transfer in metadata.load_jobs.items():
            assert isinstance(transfer.src_spec, ChunkSpec), f"load {job_id} of another store: {transfer.src_spec!r}"
            assert isinstance(transfer.dst_spec, GPULoadStoreSpec)
            job = self.running[job_id] = self._prepared.pop(transfer.src_spec.ticket)
            job.blocks = transfer.dst_spec.block_ids
        for job_id, transfer in metadata.store_jobs.items():
            assert isinstance(transfer.dst_spec, ChunkSpec), f"store {job_id} of another store: {transfer.dst_spec!r}"
            assert isinstance(transfer.src_spec, GPULoadStoreSpec)
            job = self.running[job_id] = self._prepared.pop(transfer.dst_spec.ticket)
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
            job = self.running.get(job_id)
            if job is None:
                continue
            job.failed.update(failed.get(job_id, ()))
            job.settled &= job_id not in unsettled
            job.copy_s = max(job.copy_s, copy_s.get(job_id, 0.0))
            job.ranks_pending -= ranks
            assert job.ranks_pending >= 0, f"job {job_id}: {-job.ranks_pending} ranks too many reported its end"
            if job.ranks_pending == 0:
                del self.running[job_id]
                self._settle(job)

    def distrust(self, job_ids: Collection[int]) -> None:
        """The blocks of these may be written to before they are copied. What a store has brought by then is not kept;
        a load's blocks are nobody else's before it has ended."""
        for job_id in job_ids:
            job = self.running.get(job_id)
            if job is not None and job.is_store:
                job.failed.update(range(len(job.keys)))

    def distrust_after(self, invalid_blocks: Collection[int]) -> None:
        """Loads have left these blocks of the engine wrong. Nothing was computed from those that are ours, before we
        said so. Another connector's load may end within the step that reads it (beside us in vLLM's MultiConnector):
        what the steps under way have computed may be wrong then, and is not kept."""
        others = set(invalid_blocks)
        for job in self.running.values():
            if not job.is_store:
                others.difference_update(job.blocks.tolist())
        if others:
            self.distrust(list(self.running))

    def forsake(self) -> None:
        """The cache was reset: what runs keeps its slots until the workers have reported, and is then aborted."""
        for job in itertools.chain(self._prepared.values(), self.running.values()):
            job.stale = True
        self._storing.clear()

    def _settle(self, job: Job) -> None:
        """Every rank has ended: each slot gets its commit, abort or release, exactly once."""
        steps = job.attached.steps
        self._observe(job)
        places = zip(job.spec.slots.tolist(), job.spec.generations.tolist(), strict=True)
        if job.is_store:
            kept = self._kept(job)
            stored_as = job.record.stored_as([get_offload_block_hash(key) for key in job.keys])
            decision = job.record.store.number if job.record.store is not None else 0
            for i, (slot, generation) in enumerate(places):
                if i in kept:
                    steps.commit(
                        slot,
                        generation,
                        job.tenant,
                        stored_as[i],
                        job.parents[i],
                        memory_only=job.memory_only[i],
                        decision=decision,
                    )
                elif job.settled:  # else the slot stays granted until the processes of this engine have ended
                    steps.abort(slot, generation)
                if self._storing.get((job.tenant, job.keys[i])) is job:
                    del self._storing[job.tenant, job.keys[i]]
            self._counts.add(metrics.STORED_CHUNKS, len(kept))
            self._counts.add(metrics.FAILED_STORES, len(job.failed))
        else:
            for i, (slot, generation) in enumerate(places):
                if (slot, generation) != NOWHERE:
                    promoted = job.keys[i] in job.record.prefetched
                    steps.release(slot, generation, loaded=i not in job.failed, promoted=promoted)
            job.record.barred.update(job.keys[i] for i in job.failed)
            self._counts.add(metrics.LOADED_CHUNKS, len(job.keys) - len(job.failed))
            self._counts.add(metrics.FAILED_LOADS, len(job.failed))

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
            self.loading[key] -= 1
            if not self.loading[key]:
                del self.loading[key]
        if job.load is not None:
            self._admission.load_ended(job.load, service_s=job.copy_s, loaded_chunks=loaded)
