"""What travels between the two halves of the connector inside vLLM's own messages (pickled between processes)."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSpec(LoadStoreSpec):
    """The store's side of one job: a slot per chunk, kind after kind, head of the prefix first. Scheduler half to
    workers."""

    ticket: int  # the scheduler half's own number for what it prepared
    instance_id: bytes  # of the daemon whose arena the slots lie in; a worker that maps another one copies nothing
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    counts: tuple[int, ...]  # how many chunks of each kind


@dataclass
class WorkerOutcomes(OffloadingWorkerMetadata):
    """vLLM's report of ended jobs, which knows only success, with the failures beside it. Workers to scheduler half."""

    failed_chunks: dict[int, set[int]] = field(default_factory=dict)  # job -> positions in its ChunkSpec
    copy_s: dict[int, float] = field(default_factory=dict)  # job -> how long its copy ran, on the slowest rank
    # Failed with a lost device, which may still write to their slots: nobody else may be given those.
    unsettled_jobs: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerOutcomes":
        """A chunk failed when it failed on any rank. The base class would drop the failures."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        failed = {job: set(chunks) for job, chunks in self.failed_chunks.items()}
        unsettled = set(self.unsettled_jobs)
        if isinstance(other, WorkerOutcomes):
            for job, chunks in other.failed_chunks.items():
                failed.setdefault(job, set()).update(chunks)
            unsettled |= other.unsettled_jobs
        copy_s = dict(self.copy_s)
        if isinstance(other, WorkerOutcomes):
            for job, seconds in other.copy_s.items():
                copy_s[job] = max(seconds, copy_s.get(job, 0.0))
        return WorkerOutcomes(merged.completed_jobs, merged.transfer_stats, failed, copy_s, unsettled)
