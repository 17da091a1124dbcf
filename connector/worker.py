"""The worker half: runs the jobs that the scheduler half prepared, and says truthfully how each one ended.

The engine's thread calls everything here; the link's thread maps and unmaps the arena. A job is submitted under the
link's lock, after its instance was compared with the mapped one, so that no copy is queued into memory that is being
unmapped or into another daemon's slots.

vLLM asserts that every submit returns True and that every result is a success. So they always say that, and the real
outcome goes two other ways, both in the pass that reports the job: `take_failed` into our own message to the scheduler
half, and, for loads, to vLLM. Of full attention alone that is told of blocks (`take_unloaded_blocks`) and recomputes
from the first on; else it is told of requests (`take_failed_loads`) and looks them up again.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from connector.link import Link
from connector.messages import ChunkSpec
from connector.transfer import KindBlocks, Mapped, Transfer
from kvstore.logs import LineLimit

logger = logging.getLogger("vllm.connector.worker")
line_limit = LineLimit()  # a fault may be every job's
logger.addFilter(line_limit)

WAIT_REPORT_S = 5.0


@dataclass(slots=True)
class Running:
    is_load: bool
    chunk_count: int
    blocks: Sequence[KindBlocks] = field(repr=False)
    left_out: set[int] = field(default_factory=set)  # store: chunks that were not copied


class WorkerHalf(OffloadingWorker):
    def __init__(self, link: Link[Mapped], transfer: Transfer) -> None:
        self._link = link
        self._transfer = transfer
        self._running: dict[int, Running] = {}
        self._refused: list[int] = []  # jobs that ended without a copy, not yet reported
        self._failed: dict[int, set[int]] = {}  # reported, not yet taken
        self._failed_loads: set[int] = set()  # as above, the loads among them
        self._unsettled: set[int] = set()  # as above: what a lost device may still write
        self._unloaded_blocks: set[int] = set()
        self._copy_s: dict[int, float] = {}  # jobs reported, not yet taken

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._submit(job_id, dst_spec, src_spec, is_load=False)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        assert not expedited, f"load {job_id} within the step: its failure would be reported after its bytes were used"
        self._submit(job_id, src_spec, dst_spec, is_load=True)
        return True

    def _submit(self, job_id: int, chunks: LoadStoreSpec, blocks: GPULoadStoreSpec, *, is_load: bool) -> None:
        assert isinstance(chunks, ChunkSpec), f"job {job_id} of another store: {chunks!r}"
        job = self._running[job_id] = Running(is_load, len(chunks.slots), _by_kind(blocks))
        try:
            with self._link.lock:
                mapped = self._link.current
                if mapped is not None and mapped.instance_id == chunks.instance_id:
                    if is_load:
                        self._transfer.load(job_id, mapped, chunks, job.blocks)
                    else:
                        job.left_out = self._transfer.store(job_id, mapped, chunks, job.blocks)
                    return
            logger.warning("kvstore: job %d is for a daemon that has gone; failed without copying", job_id)
        except Exception:  # a border: the engine must live, and the job must end
            logger.exception("kvstore: job %d could not be started; failed without copying", job_id)
        self._refused.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        results = []
        for job_id in self._refused:
            self._end(job_id, set(range(self._running[job_id].chunk_count)))
            results.append(TransferResult(job_id, success=True))
        self._refused.clear()
        for finished in self._transfer.finished():
            self._end(finished.job, set(finished.failed))
            self._copy_s[finished.job] = finished.seconds
            if not finished.settled:
                self._unsettled.add(finished.job)
                logger.error("kvstore: the device is lost; it may still be writing for job %d", finished.job)
            results.append(
                TransferResult(
                    finished.job, success=True, transfer_size=finished.nbytes, transfer_time=finished.seconds
                )
            )
        return results

    def _end(self, job_id: int, failed: set[int]) -> None:
        job = self._running.pop(job_id)
        failed |= job.left_out
        if not failed:
            return
        self._failed[job_id] = failed
        if job.is_load:
            self._failed_loads.add(job_id)
            if len(job.blocks) == 1:
                [blocks], [layout] = job.blocks, self._transfer.layouts
                first_bad = max(0, min(failed) * layout.blocks_per_chunk - blocks.first % layout.blocks_per_chunk)
                self._unloaded_blocks.update(blocks.ids[first_bad:].tolist())

    def take_failed(self) -> dict[int, set[int]]:
        """Per job reported since the last call: the positions of its chunks that failed."""
        failed, self._failed = self._failed, {}
        return failed

    def take_unsettled(self) -> set[int]:
        """Jobs reported since the last call that failed, and whose slots a lost device may still write to."""
        unsettled, self._unsettled = self._unsettled, set()
        return unsettled

    def take_copy_s(self) -> dict[int, float]:
        """Per job reported since the last call that copied anything: how long the copy ran."""
        copy_s, self._copy_s = self._copy_s, {}
        return copy_s

    def take_failed_loads(self) -> set[int]:
        """Jobs among those reported since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_unloaded_blocks(self) -> set[int]:
        """Device blocks of failed loads reported since the last call, with all that follow them in the request. Only
        of an engine with one KV cache group; blocks of several would end it."""
        blocks, self._unloaded_blocks = self._unloaded_blocks, set()
        return blocks

    def wait(self, job_ids: set[int]) -> None:
        """Returns when no copy of these jobs runs any more; the blocks are then somebody else's. A copy always ends,
        if only with its device."""
        while not self._transfer.wait(job_ids, WAIT_REPORT_S):
            logger.warning("kvstore: still waiting for copies of %d jobs to end", len(job_ids))

    def suspend(self) -> None:
        """The engine falls asleep: its KV cache is about to be unmapped."""
        self._transfer.suspend()

    def resume(self) -> None:
        """It is mapped again. What it held is gone, and so are the jobs of before: vLLM has reset every cache."""
        self._transfer.resume()

    def shutdown(self) -> None:
        self._link.close()  # takes the arena away first: the last copy ends before the session does
        self._transfer.close()


def _by_kind(blocks: GPULoadStoreSpec) -> list[KindBlocks]:
    ends = list(itertools.accumulate(blocks.group_sizes))
    return [
        KindBlocks(blocks.block_ids[end - size : end], first)
        for size, end, first in zip(blocks.group_sizes, ends, blocks.block_indices, strict=True)
    ]
