"""What is believed of an engine's speed before it was measured: from its model, its platform, and the profiles."""

import logging
import os
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from connector.config import CopyBackend
from connector.transfer import COPY_THREADS
from kvstore import profiles
from kvstore.admission import Priors
from kvstore.costmodel import DRAM_WRITE_PRICE_MIN, RecomputeModel, TransferModel
from kvstore.errors import ConfigurationError
from kvstore.namespace import canonical_json
from kvstore.profiles import measured
from kvstore.profiles.measured import Way

logger = logging.getLogger("vllm.connector.priors")

# Of a CPU platform nothing is known but that it is slow: guesses, which the first requests replace.
CPU_FLOPS_PER_CORE = 30e9
CPU_STEP_S = 5e-3
HOST_COPY = TransferModel(4e9, 2e-4)
DISK = TransferModel(1e9, 6e-3)  # slower than any NVMe drive, until it was read
WAYS = {
    CopyBackend.AUTO: (Way.COPY_ENGINE, Way.KERNEL),
    CopyBackend.COPY_ENGINE: (Way.COPY_ENGINE,),
    CopyBackend.KERNEL: (Way.KERNEL,),
    CopyBackend.HOST: (Way.PAGEABLE,),
}
FITTED_ERROR_MAX = 0.2  # of a profile that was fitted for this model and GPU, not scaled from another


def engine_priors(vllm_config: VllmConfig, page_bytes: int, backend: CopyBackend = CopyBackend.AUTO) -> Priors:
    """What `kvstore calibrate` measured on this node counts before any table. `page_bytes`: of a layer's block on one
    rank, which is what one fragment of a copy has. `backend`: which way those go."""
    node = node_profile()
    disk = node.disk_read if node is not None and node.disk_read is not None else DISK
    writes = node.disk_write_bytes_per_s if node is not None else None
    disk_write_bytes_per_s = writes or profiles.find_disk().write_bytes_per_s
    host_copy = HOST_COPY if node is None else node.host_copy
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    geometry = _geometry(vllm_config)
    if current_platform.device_type == "cpu":
        cores = len(os.sched_getaffinity(0))
        return Priors(
            recompute=_on_cpu(geometry, cores, step_tokens),
            load=host_copy,
            store=host_copy,
            disk=disk,
            disk_write_bytes_per_s=disk_write_bytes_per_s,
            write_price=max(DRAM_WRITE_PRICE_MIN, min(1.0, COPY_THREADS / cores)),  # copies take the engine's own cores
            source="guessed for a CPU platform",
        )
    name = current_platform.get_device_name()
    prefill = profiles.find_prefill(geometry, name, tp_size)
    gpu = profiles.find_gpu(name) or profiles.find_gpu("h100_sxm")
    assert gpu is not None
    copies = None if node is None else node.device_named(name)

    def link(direction: measured.Direction) -> TransferModel:
        found = None if copies is None else copies.link(direction, page_bytes, WAYS[backend])
        rank = gpu.link.expected if found is None else found
        # Ranks that hold copies of the same heads each load all of them, and take turns to store.
        parts = min(tp_size, geometry.kv_heads) if direction is measured.Direction.LOAD else tp_size
        return replace(rank, bytes_per_s=rank.bytes_per_s * parts)

    return Priors(
        recompute=prefill.recompute_model(step_tokens=step_tokens),
        load=link(measured.Direction.LOAD),
        store=link(measured.Direction.STORE),
        disk=disk,
        disk_write_bytes_per_s=disk_write_bytes_per_s,
        recompute_known=prefill.error <= FITTED_ERROR_MAX,
        source=prefill.source,
    )


def node_profile() -> measured.Measured | None:
    """None: there is none, or a damaged one, which is said."""
    path = measured.profile_path()
    try:
        return measured.read(path)
    except ConfigurationError as problem:
        logger.warning("kvstore: %s. Starting from the tables instead", problem)
        return None


def learning(vllm_config: VllmConfig, backend: CopyBackend = CopyBackend.AUTO) -> str:
    """What the speeds of an engine depend on: engines for which it is equal learn from each other."""
    model = vllm_config.model_config
    return canonical_json(
        {
            "model": str(model.model),
            "dtype": str(model.dtype),
            "kv_dtype": str(vllm_config.cache_config.cache_dtype),
            "tp_size": vllm_config.parallel_config.tensor_parallel_size,
            "device": current_platform.get_device_name() or current_platform.device_type,
            "copy_backend": backend.value,
        }
    )


def _geometry(vllm_config: VllmConfig) -> profiles.Geometry:
    model = vllm_config.model_config
    text: Any = model.hf_text_config
    if model.use_mla:
        width = int(text.kv_lora_rank) + int(text.qk_rope_head_dim)
        return profiles.Geometry(_layers(text), _hidden(text), 1, width, "mla")
    return profiles.Geometry(_layers(text), _hidden(text), model.get_total_num_kv_heads(), model.get_head_size(), "gqa")


def _layers(text: Any) -> int:
    return int(getattr(text, "num_hidden_layers", 0) or 1)


def _hidden(text: Any) -> int:
    return int(getattr(text, "hidden_size", 0) or 1)


def _on_cpu(geometry: profiles.Geometry, cores: int, step_tokens: int) -> RecomputeModel:
    flops_per_s = CPU_FLOPS_PER_CORE * cores
    weights = 12 * geometry.layers * geometry.hidden**2
    return RecomputeModel(
        CPU_STEP_S,
        2 * weights / flops_per_s,
        2 * geometry.layers * geometry.hidden / flops_per_s,
        step_tokens=step_tokens,
    )
