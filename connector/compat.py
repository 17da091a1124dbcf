"""What differs between the vLLM versions that the connector works with; the one place that knows a version.

* 0.30 does not say where in a request a chunk lies: `end_tokens` finds it.
* 0.30 and 0.31 have no name for the source of a cache hit, and ask no manager for it: `HOST_MEMORY` and `DISK` are
  None there.
* From 0.32 on a state (Mamba, linear attention) is handed over for storing with the boundary that it belongs to:
  `hands_over_states`. Before, no engine with states is served.
* Before 0.32 a streaming session's next turn drops the last token that was sampled and keeps the hash of a block that
  ends with it: vLLM's keys are those of another text from there on, and no session is served (`renews_session_hashes`).
* 0.30 queues a step's stores when it asks for finished jobs, later versions when the step's saving ends: vLLM's own
  code does either, and nothing of ours comes between.
* 0.33 can have loads end within the step (`submit_load(..., expedited=True)`): `ConnectorConfig` refuses the setting.
* 0.33 enters a manager's `lock` before it calls it: ours is called by one thread and keeps the lock that is none.
* 0.33 says `on_reset_flushed` when the jobs of before a reset have ended: our own table of jobs knows that.
* 0.33 calls `unregister_kv_caches` before the memory of the KV cache is taken away (sleep) and `restore_kv_caches`
  when it is back; earlier versions tell a connector nothing: `tell_of_sleep` has them call the same.
* 0.33 verifies drafts of one kind of linear attention beside its states' blocks (RecoverSSM), and then lets a
  connector have them: no engine with states is served that drafts (`_require_served`).
* 0.33 may begin a load of HiSparse's some steps after it was looked up, even after a reset: no engine with that is.
* 0.33 offers all chunks of a preempted request again when it goes on, and none that have lost a block.
* 0.33 asks for static facts (`config_info`) to show beside its metrics: the default, none.

`require_supported_version` is asked before any other module here is imported, so at import this one uses nothing of
vLLM that another version may lack.
"""

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    HOST_MEMORY = DISK = None
else:
    HOST_MEMORY, DISK = CacheHitSource.HOST, CacheHitSource.DISK

OLDEST, NEWEST = (0, 30), (0, 33)
STATES_FROM = SESSION_HASHES_FROM = (0, 32)


def version_problem(version: str) -> str | None:
    """Why the connector does not work with this version of vLLM ("0.32.0", "0.33.1rc2+cu130"), or None."""
    if OLDEST <= _numbers(version) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    return (
        f"KVStoreConnector works with vLLM {oldest} to {newest}, and this is vLLM {version}: install one of those, or "
        "start the engine without --kv-transfer-config"
    )


def _numbers(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else (0, 0)


def require_supported_version() -> None:
    """ValueError, naming the version found and the range."""
    problem = version_problem(__version__)
    if problem is not None:
        raise ValueError(problem)


def hands_over_states(version: str = __version__) -> bool:
    return _numbers(version) >= STATES_FROM


def renews_session_hashes(version: str = __version__) -> bool:
    return _numbers(version) >= SESSION_HASHES_FROM


def offload_whole_chunks_only(scheduler: "OffloadingConnectorScheduler") -> None:
    """vLLM would also offer what a prompt ends with within a chunk, for models with states: a chunk with bytes of
    nobody behind its end, under a key that no row of a request has."""
    if "supports_partial_tail" in scheduler.config._fields:
        scheduler.config = scheduler.config._replace(supports_partial_tail=False)


def overwrites_before_flushes(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a step writes to blocks that it has newly given away before a connector may wait for copies from them:
    the second model runner zeroes them (as models with states or of mixed precision need), copies into them and moves
    states there, and asks a connector only then."""
    return bool(
        getattr(vllm_config, "use_v2_model_runner", False) and getattr(kv_cache_config, "needs_kv_cache_zeroing", True)
    )


def expect_whole_block_tables(scheduler: "OffloadingConnectorScheduler", output: "SchedulerOutput") -> None:
    """Of a request that vLLM schedules as new it names all blocks, and its offloading appends them to those it knows:
    in a later turn of a streaming session to all of the turns before, so that chunks would be stored from the blocks of
    others. Asked before it looks at a step's output."""
    for new in output.scheduled_new_reqs:
        status = scheduler._req_status.get(new.req_id)
        for state in () if status is None else status.group_states:
            state.block_ids.clear()


def offer_nothing_left_out(scheduler: "OffloadingConnectorScheduler", req_id: str) -> None:
    """Of a request that ends vLLM may offer chunks of a window that it left out before (where windows are kept whole:
    `--prefix-cache-retention-interval None`), though their blocks may be another's by then: given back while the
    request went on, or given away in the step that offers them. It looks after those of later chunks alone."""
    status = scheduler._req_status.get(req_id)
    if status is None:
        return
    for group, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        if group.sliding_window_size_in_chunks is not None:
            left_out = min(state.next_stored_chunk_idx * scheduler.config.blocks_per_chunk, len(state.block_ids))
            state.block_ids[:left_out] = [0] * left_out


def end_tokens(
    keys: "Collection[OffloadKey]", req_context: "ReqContext", hashes: Sequence[bytes], tokens_per_hash: int
) -> "dict[OffloadKey, int]":
    """Where in the request the chunk of each key ends, in tokens. Keys that the request does not have are left out."""
    if hasattr(req_context, "get_offload_key_position"):
        ends = {key: req_context.get_offload_key_position(key) for key in keys}
        return {key: end for key, end in ends.items() if end is not None}
    from vllm.v1.kv_offload.base import get_offload_block_hash

    end_of = {block_hash: place * tokens_per_hash for place, block_hash in enumerate(hashes, 1)}
    return {key: end_of[block_hash] for key in keys if (block_hash := get_offload_block_hash(key)) in end_of}


def tell_of_sleep(connector: "KVConnectorBase_V1") -> None:
    """Asked once the KV cache is there. vLLM's allocator unmaps it (`sleep`, `discard`) and maps it again at the same
    addresses (`wake_up`): this process's one does beside that what 0.33's worker does."""
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    allocator: Any = CuMemAllocator.instance
    if allocator is None or hasattr(KVConnectorBase_V1, "restore_kv_caches"):
        return

    def sleep(*args: Any, **named: Any) -> None:
        connector.unregister_kv_caches()
        unmap(*args, **named)

    def wake_up(tags: list[str] | None = None) -> None:
        map_again(tags)
        if tags is None or "kv_cache" in tags:
            connector.restore_kv_caches()

    unmap, map_again = allocator.sleep, allocator.wake_up
    allocator.sleep, allocator.wake_up = sleep, wake_up
    if not hasattr(allocator, "discard"):  # before 0.32
        return
    unmap_some = allocator.discard

    def discard(tags: tuple[str, ...] | str) -> None:
        if "kv_cache" in tags:
            connector.unregister_kv_caches()
        unmap_some(tags)

    allocator.discard = discard
