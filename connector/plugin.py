"""The class that vLLM loads: turns vLLM's objects into plain values and passes them to the half it was built as.

vLLM's OffloadingConnector keeps all that is known about chunked prefill, preemption and block lifetimes; here is what
it does not do: failures, roles, tenants, and a job table that survives a reset. Built in the process that uses it,
called by one thread, the engine's.
"""

import contextlib
import logging
import time
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, iter_layer_specs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector import compat, identity
from connector.adapters import Adapters
from connector.config import ConnectorConfig, CopyBackend
from connector.layout import tp_problem
from connector.messages import WorkerOutcomes
from connector.scheduler import SchedulerHalf
from connector.spec import Engine, building, window_tokens
from connector.worker import WorkerHalf

logger = logging.getLogger("vllm.connector.plugin")

WINDOWS_FROM_THE_PROMPT = {"UnlimitedOCRForCausalLM"}
"""Architectures whose windows are of generated tokens only, so that a token's KV depends on where the prompt ended."""

with contextlib.suppress(ValueError):  # it is registered
    # vLLM's MultiConnector finds the statistics of its connectors by registered names alone, and ends without.
    KVConnectorFactory.register_connector("KVStoreConnector", "connector", "KVStoreConnector")

OFFLOADING_SCHEDULER_LOG = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


class KVStoreConnector(OffloadingConnector):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        config = _read_config(vllm_config)
        _require_served(vllm_config, kv_cache_config)
        _require_device(config, current_platform.device_type, is_cuda=current_platform.is_cuda())
        _require_tp(vllm_config, config)
        self._reset_in_this_step = False
        self._adapters = Adapters(identity.adapter_settings(vllm_config.lora_config), started_ns=time.time_ns())
        self._engine = Engine(config, vllm_config, kv_cache_config, identity.engine_hash_seed())
        with building(self._engine):
            super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            compat.offload_whole_chunks_only(self.scheduler)
            _mention_failure_policy(vllm_config)
            logging.getLogger(OFFLOADING_SCHEDULER_LOG).addFilter(_is_no_waiting_store)
            assert isinstance(self.scheduler.manager, SchedulerHalf)
            self._scheduler_half = self.scheduler.manager
            # A turn may end within the drafts that a step accepts. Unless steps overlap, vLLM counts those behind its
            # end as computed, and its own prefix cache then has them under the keys of what comes next.
            self._miscounts_sessions = (
                vllm_config.speculative_config is not None and not vllm_config.scheduler_config.async_scheduling
            )
            self._flushes_come_late = compat.overwrites_before_flushes(vllm_config, kv_cache_config)

    @property
    def _worker_half(self) -> WorkerHalf:
        assert self.connector_worker is not None
        half = self.connector_worker.worker
        assert isinstance(half, WorkerHalf), "asked before the KV cache was registered"
        return half

    @property
    def _keeps_valid_prefix(self) -> bool:
        """Whether vLLM may go on from the first block that a load left wrong. With several groups it cannot tell whose
        block it is, and before a window's blocks there are none to go on from."""
        groups = self._engine.kv_cache_config.kv_cache_groups
        return len(groups) == 1 and window_tokens(groups[0].kv_cache_spec) is None

    # ---- the worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._engine.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)
        self._engine.kv_caches = {}  # what is told of sleep outlives the engine, and must not keep its memory
        compat.tell_of_sleep(self)

    def unregister_kv_caches(self) -> None:
        self._worker_half.suspend()

    def restore_kv_caches(self) -> None:
        self._worker_half.resume()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        requests = dict(self.connector_worker._load_jobs)  # of jobs; those that have ended leave it
        results = super().get_transfer_results(finished_req_ids)
        failed = self._worker_half.take_failed_loads()
        if not self._keeps_valid_prefix:
            results.failed_recving |= {requests[job] for job in failed}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = self._worker_half.take_unloaded_blocks()
        return blocks if self._keeps_valid_prefix else set()

    def build_connector_worker_meta(self) -> WorkerOutcomes | None:
        if self.connector_worker is None:
            return None
        ended = super().build_connector_worker_meta()
        failed, copy_s = self._worker_half.take_failed(), self._worker_half.take_copy_s()
        unsettled = self._worker_half.take_unsettled()
        if ended is None:
            assert not failed, f"jobs {sorted(failed)} failed without having ended"
            return None
        return WorkerOutcomes(ended.completed_jobs, ended.transfer_stats, failed, copy_s, unsettled)

    # ---- the scheduler's process

    def on_new_request(self, request: Request) -> None:
        if request.resumable and self._miscounts_sessions:
            self._scheduler_half.shut_out(
                "vLLM may take drafts for the tokens of a streaming session's next turn where it drafts without "
                "asynchronous scheduling, and a session has come: start the engine with --async-scheduling, or without "
                "speculative decoding"
            )
        lora, adapter = request.lora_request, b""
        if lora is not None:
            adapter = self._adapters.digest(
                lora.lora_int_id,
                lora.lora_path,
                replaced_in_place=bool(getattr(lora, "load_inplace", False)),
                is_3d=bool(getattr(lora, "is_3d_lora_weight", False)),
            )
        self._scheduler_half.register(
            request.request_id,
            salt=request.cache_salt,
            has_lora=lora is not None,
            adapter=adapter,
            prompt_tokens=request.num_tokens,
            hashes=request.block_hashes,
            hashes_go_wrong=request.resumable and not compat.renews_session_hashes(),
        )
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._scheduler_half.begin_lookup(request.request_id, num_computed_tokens)
        if self._scheduler_half.awaits_state_slots(request.request_id):
            return None, False  # asked again in the next step
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        bound = super()._max_loadable_tokens(request, num_computed_tokens)
        assert self._engine.vllm_config.kv_transfer_config is not None
        if not self._engine.vllm_config.kv_transfer_config.is_kv_consumer:
            return 0
        if request.skip_reading_prefix_cache:
            return bound  # vLLM asks about nothing then
        admitted = self._scheduler_half.loadable_tokens(request.request_id, num_computed_tokens)
        if bound is None:
            return admitted
        return bound if admitted is None else min(bound, admitted)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._reset_in_this_step = False
        if scheduler_output.scheduled_new_reqs:
            compat.expect_whole_block_tables(self.scheduler, scheduler_output)
        metadata = super().build_connector_meta(self._without_reloading(scheduler_output))
        assert isinstance(metadata, OffloadingConnectorMetadata)
        self._scheduler_half.jobs.track(metadata)
        if self._flushes_come_late:
            self._scheduler_half.jobs.distrust(metadata.jobs_to_flush or ())
        self._scheduler_half.step_began(scheduler_output)
        self._scheduler_half.flush()
        return metadata

    def _without_reloading(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """The base class has the stores of preempted requests end first, and asserts that they have no load. One that
        `reset_prefix_cache(reset_running_requests=True)` preempted between two steps, and that has no stores, may
        begin a load in the step that names it preempted."""
        preempted = scheduler_output.preempted_req_ids
        reloading = self._scheduler_half.jobs.loads_begun() if preempted else set()
        if not preempted or preempted.isdisjoint(reloading):
            return scheduler_output
        return replace(scheduler_output, preempted_req_ids=preempted - reloading)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        outcomes = connector_output.kv_connector_worker_meta
        if connector_output.invalid_block_ids:
            self._scheduler_half.jobs.distrust_after(connector_output.invalid_block_ids)
        if outcomes is not None and isinstance(outcomes, WorkerOutcomes):  # an abstract class's check is slow
            # First: the base class tells the other half of ends, but not of failures, and forgets jobs at a reset.
            self._scheduler_half.jobs.finish(
                outcomes.completed_jobs, outcomes.failed_chunks, outcomes.copy_s, outcomes.unsettled_jobs
            )
        super().update_connector_output(connector_output)
        if outcomes is not None:  # else there is nothing that `build_connector_meta` has not sent
            self._scheduler_half.flush()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_scheduler is not None:  # asked once for each step's output, also where that reports nothing
            self._scheduler_half.step_ended()
        return super().get_kv_connector_stats()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_half.finishing(request.request_id, request.num_computed_tokens)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_half.finishing(request.request_id, request.num_computed_tokens)
        compat.offer_nothing_left_out(self.scheduler, request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool | None:
        assert self._kv_cache_manager is not None
        pool = self._kv_cache_manager.block_pool
        self._scheduler_half.blocks_kept = (
            pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        )  # but for the null block
        if self._reset_in_this_step:
            # The base class asserts that no flush waits, but its last reset left one; it has nothing else to forget.
            self._scheduler_half.reset_cache()
            return True
        self._reset_in_this_step = True
        return super().reset_cache()

    # ---- the front end's process, where nothing was constructed

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        _read_config(vllm_config)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _read_config(vllm_config: VllmConfig) -> ConnectorConfig:
    """Parse our part of the configuration and write into it what the base class reads there."""
    assert vllm_config.kv_transfer_config is not None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    config = ConnectorConfig.parse(extra)
    extra.update(config.for_base_class())
    return config


def _require_served(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """ValueError for an engine that this version cannot serve, before anything is built."""
    parallel = vllm_config.parallel_config
    if (size := parallel.prefill_context_parallel_size) != 1:
        raise ValueError(
            f"KVStoreConnector does not know how prefill context parallel ranks share a KV cache, and this engine has "
            f"prefill_context_parallel_size={size}: start it with 1, or without --kv-transfer-config"
        )
    backend = getattr(vllm_config.model_config, "sleep_mode_backend", "cumem")
    if vllm_config.model_config.enable_sleep_mode and backend != "cumem":
        raise ValueError(
            f"KVStoreConnector knows what sleep does to the memory that it copies from only of vLLM's own 'cumem', and "
            f"this engine has sleep_mode_backend={backend!r}: start it without --enable-sleep-mode, or without "
            "--kv-transfer-config"
        )
    _require_honest_steps(vllm_config)
    _require_keys_of_content(vllm_config)
    _require_reuse(vllm_config, kv_cache_config)
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise ValueError(
            "KVStoreConnector copies from and to the device, and HiSparse keeps this model's KV cache in host memory, "
            "where vLLM offers a connector only its index: start the engine without HiSparse, or without "
            "--kv-transfer-config"
        )
    # Of a state its number of blocks does not always tell: drafts may be verified beside it.
    drafts = vllm_config.speculative_config is not None
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if not isinstance(spec, AttentionSpec) and (drafts or not _is_served_state(spec)):
                raise ValueError(
                    "KVStoreConnector serves attention, and states (Mamba, linear attention) where vLLM (0.32 and "
                    f"newer) keeps them at the ends of blocks, and this model keeps {type(spec).__name__}"
                    f"{f' (mamba_cache_mode={spec.mamba_cache_mode!r})' if isinstance(spec, MambaSpec) else ''}: start "
                    "the engine with --enable-prefix-caching and without speculative decoding, or without "
                    "--kv-transfer-config"
                )


def _require_honest_steps(vllm_config: VllmConfig) -> None:
    """ValueError for an engine that goes on after a step that failed: the step's chunks are offered as if it had
    computed them, and nothing tells a connector that it has not."""
    if vllm_config.parallel_config.enable_fault_tolerance:
        raise ValueError(
            "KVStoreConnector cannot tell which tokens a failed step has left without their KV, and with "
            "--enable-fault-tolerance an engine goes on after one: start it without that, or without "
            "--kv-transfer-config"
        )


def _require_keys_of_content(vllm_config: VllmConfig) -> None:
    """ValueError for an engine whose keys do not say which image, video or audio a prompt holds."""
    multimodal = vllm_config.model_config.multimodal_config
    if (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ValueError(
            "KVStoreConnector needs keys that are made of the content of images, videos and audio, and with both "
            "--mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM only numbers them, so that one engine's "
            "first image would be taken for another's: leave one of the two out, or start the engine without "
            "--kv-transfer-config"
        )


def _require_reuse(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """ValueError for a model whose KV cache is of no use to another request, even where the tokens are the same. vLLM
    turns its own prefix caching off for it, but still asks a connector."""
    model = vllm_config.model_config
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        reason = "pools over all tokens of a prompt, also those that would not be computed again"
    elif any(
        getattr(spec, "non_causal", False)
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ):
        reason = "lets a prompt's tokens see those behind them"
    elif getattr(model, "is_diffusion", False):
        # A request that only reads ends with tokens that no causal pass computed; vLLM offers them for storing.
        reason = "denoises its answers, and may end a request before their KV is computed"
    elif WINDOWS_FROM_THE_PROMPT.intersection(model.architectures):
        reason = "treats generated tokens otherwise than those of a prompt"
    elif identity.rescales_by_batch(model):
        reason = (
            "takes its rotary frequencies from the longest request of each step (vLLM's Transformers backend, where "
            f"--max-model-len, here {model.max_model_len}, is beyond the length that the model was trained for)"
        )
    else:
        return
    raise ValueError(
        f"KVStoreConnector cannot serve this model, whose KV cache is of no use to other requests: it {reason}. Start "
        "the engine without --kv-transfer-config"
    )


def _is_served_state(spec: KVCacheSpec) -> bool:
    return (
        isinstance(spec, MambaSpec)
        and spec.mamba_cache_mode == "align"
        and spec.num_speculative_blocks == 0
        and compat.hands_over_states()
    )


def _require_device(config: ConnectorConfig, device_type: str, *, is_cuda: bool) -> None:
    """ValueError for a device that copies cannot be made on, or have not been tried on and nobody asked for it."""
    if device_type == "cpu":
        if config.copy_backend not in (CopyBackend.AUTO, CopyBackend.HOST):
            raise ValueError(
                f"kv_connector_extra_config: copy_backend={config.copy_backend.value!r} needs a CUDA device, and this "
                "engine runs on vLLM's CPU platform: leave the key out"
            )
    elif not is_cuda:  # ROCm calls its devices "cuda" too
        raise ValueError(
            f"KVStoreConnector copies from the memory of vLLM's CPU platform and of CUDA devices, and this engine runs "
            f"on {device_type}: start it without --kv-transfer-config"
        )
    elif not config.untried_cuda:
        raise ValueError(
            "KVStoreConnector has copies for CUDA that no GPU has ever run, and this engine runs on cuda: start it "
            'without --kv-transfer-config, or, to try them, with "untried_cuda": true in kv_connector_extra_config. '
            "The engine then checks them on its device before it uses them"
        )


def _require_tp(vllm_config: VllmConfig, config: ConnectorConfig) -> None:
    """ValueError when the tensor parallel sizes that are to share chunks cannot."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    model = vllm_config.model_config
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    if problem := tp_problem(tp_size, config.tp_lcm_size or tp_size, heads):
        raise ValueError(f"kv_connector_extra_config: {problem}")


def _is_no_waiting_store(record: logging.LogRecord) -> bool:
    """vLLM warns in every step in which a store is put off. Ours wait for slots that are on their way, which is no
    failure; what is given up in the end is counted."""
    return record.msg != "Request %s: cannot store chunks"


def _mention_failure_policy(vllm_config: VllmConfig) -> None:
    assert vllm_config.kv_transfer_config is not None
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            "kvstore: kv_load_failure_policy is %r (vLLM's default is 'fail'): a request whose chunk was evicted "
            "before it was read ends with an error. With 'recompute' its tokens are recomputed instead",
            policy,
        )
