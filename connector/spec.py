"""vLLM's OffloadingSpec: the one place where both halves are put together.

vLLM builds a spec from a class name and hands it only what fits its own offloading; the rest comes from the connector
that is being built (`building`). Without one the spec refuses: under vLLM's stock OffloadingConnector a failed load
could not be reported, and its bytes would be used.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from connector import identity, metrics
from connector.config import ConnectorConfig, CopyBackend
from connector.cuda import CudaTransfer, open_copier
from connector.layout import ChunkLayout
from connector.link import Link
from connector.pages import rank_pages
from connector.priors import engine_priors, learning, node_profile
from connector.requests import Geometry, KindGeometry, Rules, Streams
from connector.scheduler import Probe, SchedulerHalf
from connector.selfcheck import MEMORY_BYTES, check_device
from connector.stages import document_of_all_stages, gather_from_all_ranks, page_bytes_of_ranks
from connector.transfer import HostTransfer, Mapped, Region, Transfer
from connector.worker import WorkerHalf
from kvstore._native import DeviceCopier
from kvstore.admission import Admission
from kvstore.session import Attachment, Kind, Role, Session

logger = logging.getLogger("vllm.connector.spec")

DECISION_NUMBER_BITS = 48  # of the first one, at random


@dataclass(slots=True)
class Engine:
    """What the connector under construction knows and vLLM does not pass on."""

    config: ConnectorConfig
    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    hash_seed: str
    kv_caches: Mapping[str, torch.Tensor] = field(default_factory=dict)  # worker: as vLLM registered it

    @property
    def group(self) -> str:
        """Equal in all processes of this engine and in no other: users may give two engines one engine_id."""
        transfer = self.vllm_config.kv_transfer_config
        assert transfer is not None
        # The end, for there vLLM appends the data parallel rank.
        return f"{transfer.engine_id}"[-64:] + f".{self.vllm_config.instance_id}"


_building: ContextVar[Engine | None] = ContextVar("kvstore_engine_being_built", default=None)


@contextmanager
def building(engine: Engine) -> Iterator[None]:
    token = _building.set(engine)
    try:
        yield
    finally:
        _building.reset(token)


class KVStoreSpec(OffloadingSpec):
    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        engine = _building.get()
        if engine is None:
            raise ValueError(
                "the kvstore spec works only with its own connector: vLLM's OffloadingConnector cannot report a failed "
                'load. Start with --kv-transfer-config \'{"kv_connector": "KVStoreConnector", '
                '"kv_connector_module_path": "connector", ...}\' and leave spec_name and spec_module_path out'
            )
        self._engine = engine
        specs = (
            spec for group in engine.kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)
        )
        if self.blocks_per_chunk > 1 and any(isinstance(spec, MambaSpec) for spec in specs):
            raise ValueError(
                f"kv_connector_extra_config: a chunk of {self.blocks_per_chunk} blocks, and of this model's states "
                "(Mamba, linear attention) vLLM keeps one in a block: set blocks_per_chunk to 1"
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return {name: OffloadingCounterMetadata(documentation=text) for name, text in metrics.COUNTERS.items()}

    def get_manager(self) -> SchedulerHalf:
        engine = self._engine
        transfer = engine.vllm_config.kv_transfer_config
        assert transfer is not None
        algorithm = engine.vllm_config.cache_config.prefix_caching_hash_algo
        link = Link(
            engine.config.endpoint,
            Attachment(
                role=Role.SCHEDULER,
                hash_seed=engine.hash_seed,
                group=engine.group,
                world_size=self.config.parallel.world_size,
            ),
            on_attached=Streams().attached,
            on_detached=lambda attached: attached.steps.close(),
        )
        link.start()
        kinds = [self._kind_geometry(group) for group in self.config.groups]
        lead = next((kind for kind in kinds if kind.is_chain), kinds[0])
        return SchedulerHalf(
            link,
            Geometry(
                kinds=kinds,
                blocks_per_chunk=self.blocks_per_chunk,
                ranks=self.config.parallel.world_size,
            ),
            Rules(
                loads=transfer.is_kv_consumer,
                stores=transfer.is_kv_producer,
                stores_answers=not engine.config.offload_prompt_only,
                require_cache_salt=engine.config.require_cache_salt,
                prefetch_wait_s=engine.config.prefetch_wait_ms / 1000,
            ),
            Probe(
                identity.ENGINE_FAMILY,
                algorithm,
                identity.probe_value(algorithm, engine.hash_seed),
                lambda: identity.effective_seed_problem(algorithm, engine.hash_seed),
            ),
            Admission(
                engine.config.admission,
                engine_priors(engine.vllm_config, self._page_bytes(), engine.config.copy_backend),
                tokens_per_chunk=lead.tokens_per_chunk,
                kind=kinds.index(lead),
                learning=learning(engine.vllm_config, engine.config.copy_backend),
                # A later engine may have this one's name, and the daemon still know what this one decided.
                first_number=1 + secrets.randbits(DECISION_NUMBER_BITS),
            ),
        )

    def _page_bytes(self) -> int:
        group = self._engine.kv_cache_config.kv_cache_groups[self.config.groups[0].group_id]
        return next(iter(iter_layer_specs(group.kv_cache_spec))).page_size_bytes

    def _kind_geometry(self, group: OffloadingGroupConfig) -> KindGeometry:
        tokens_per_chunk = group.tokens_per_block * self.blocks_per_chunk
        spec = self._engine.kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        window = window_tokens(spec)
        interval = self._engine.vllm_config.cache_config.prefix_cache_retention_interval
        return KindGeometry(
            group_id=group.group_id,
            tokens_per_chunk=tokens_per_chunk,
            hashes_per_chunk=tokens_per_chunk // self.tokens_per_hash,
            window_chunks=None if window is None else -(-window // tokens_per_chunk),
            boundary_chunks=1 if interval is None else interval // tokens_per_chunk,
            offered_once=isinstance(next(iter(iter_layer_specs(spec))), MambaSpec),
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> WorkerHalf:
        engine = self._engine
        parallel = self.config.parallel
        tp_lcm_size = engine.config.tp_lcm_size or engine.vllm_config.parallel_config.tensor_parallel_size
        kinds, layouts = [], []
        regions: dict[int, Region] = {}
        in_stages = parallel.pp_size > 1
        page_bytes: Sequence[tuple[int, ...]] = [()] * len(self.config.groups)
        if in_stages:
            own = [sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs]
            page_bytes = page_bytes_of_ranks(own, parallel.world_size, gather_from_all_ranks)
        for number, config in enumerate(self.config.groups):
            group = engine.kv_cache_config.kv_cache_groups[config.group_id]
            pages = rank_pages(
                kv_caches,
                kind=number,
                blocks_per_chunk=self.blocks_per_chunk,
                group=group,
                kv_caches=engine.kv_caches,
                tp_lcm_size=tp_lcm_size,
                rank=parallel.rank,
                ranks=parallel.world_size,
                page_bytes=page_bytes[number],
            )
            namespace = identity.namespace_document(
                engine.vllm_config,
                engine.kv_cache_config,
                kv_caches=engine.kv_caches,
                attention_backend=identity.attention_backend(engine.vllm_config, group.layer_names),
                tp_lcm_size=tp_lcm_size,
                heads=pages.heads,
                group=number,
            )
            if in_stages:
                namespace = document_of_all_stages(namespace, gather_from_all_ranks)
            layout = pages.layout
            kinds.append(Kind(namespace, layout.chunk_bytes, layout.range_offset, layout.range_bytes))
            layouts.append(layout)
            regions |= {region.address: region for region in pages.regions}  # groups may lie in one another's memory
        transfer = _transfer(engine.config, layouts, list(regions.values()))

        def map_arena(session: Session) -> Mapped:
            return transfer.map(session.instance_id, session.table, session.arena)

        link = Link(
            engine.config.endpoint,
            Attachment(
                role=Role.WORKER,
                hash_seed=engine.hash_seed,
                group=engine.group,
                rank=parallel.rank,
                world_size=parallel.world_size,
                kinds=kinds,
            ),
            on_attached=map_arena,
            on_detached=transfer.unmap,
        )
        link.start()
        return WorkerHalf(link, transfer)


def window_tokens(spec: KVCacheSpec) -> int | None:
    """How many tokens before a boundary are read there; None where every one is."""
    match next(iter(iter_layer_specs(spec))):  # of one type, where a group has several
        case SlidingWindowSpec() as window:
            return window.sliding_window
        case ChunkedLocalAttentionSpec() as local:
            return local.attention_chunk_size
        case MambaSpec():
            return 1  # the state after it
    return None


def _transfer(config: ConnectorConfig, layouts: Sequence[ChunkLayout], regions: Sequence[Region]) -> Transfer:
    """For the device of this process. ValueError, RuntimeError, DeviceCopiesWrongly: the engine must not start."""
    if current_platform.device_type == "cpu":
        return HostTransfer(layouts, regions)
    device = torch.cuda.current_device()
    pins = config.copy_backend is not CopyBackend.HOST

    def compute_stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    node = node_profile()
    name = current_platform.get_device_name(device)
    profile = None if node is None else node.device_named(name)
    if profile is None and node is not None and node.device is not None:
        logger.info("kvstore: the profile is of a %s, and this device, a %s, starts without", node.device.name, name)

    def opened() -> DeviceCopier:
        return open_copier(device, config.copy_backend, profile=profile, in_flight_bytes=config.copy_in_flight_bytes)

    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))
    check_device(opened(), memory, compute_stream, pins=pins)
    copier = opened()
    logger.warning(
        "kvstore: copies for CUDA are used that no GPU had run when they were written (untried_cuda). They have just "
        "been checked on this device (%s, compute capability %s, driver for CUDA %d.%d, copy_backend=%s), with known "
        "bytes; compare the engine's answers with those of one without --kv-transfer-config before you rely on them",
        copier.device_name,
        copier.capability,
        copier.driver_version // 1000,
        copier.driver_version % 1000 // 10,
        config.copy_backend.value,
    )
    return CudaTransfer(layouts, regions, copier=copier, pins=pins, compute_stream=compute_stream)
