"""An engine without a model, as in `connector_engine`, whose KV cache is right or wrong token by token, on every rank.

What a token's bytes are follows from all tokens up to it, so it shows where a chunk was stored, or a forward pass would
read, what a rejected draft left, what another request wrote, or a block of another place in the request. `Worker` knows
what vLLM's model runner knows: a step's message, what it sampled itself, and nothing of the scheduler's.
"""

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from connector.layout import ChunkLayout, LayerPages, PerRank
from connector.requests import Attached
from connector.transfer import HostTransfer, Region
from connector.worker import WorkerHalf
from tests.unit.connector_engine import PretendEngine, vllm_config
from tests.unit.connector_fakes import FakeCopier, FakeDaemon, FakeLink, FakeSession, FakeSteps, FakeTable

HASH_TOKENS = 4
TOKEN_BYTES = 8  # of a token, in a layer, on a rank
LAYERS = 2
SLOT_BYTES = 4096
WRONG = 499  # a token that no model says


@dataclass(frozen=True)
class Group:
    """A KV cache group."""

    window: int | None = None
    block_tokens: int = HASH_TOKENS

    @property
    def page_bytes(self) -> int:
        return self.block_tokens * TOKEN_BYTES


def said(position: int, first: int) -> int:
    """The token that the model says at this position of a text that begins so. 7 of 13 times one that goes on."""
    return (7 * position + 13 * first) % 490


STOPS = [token for token in range(490) if token % 13 == 5]


@dataclass
class Text:
    """What the model runner has of a request."""

    tokens: list[int]
    computed: int
    drafts: list[int] = field(default_factory=list)


class TokenEngine(PretendEngine):
    """`drafts`: speculated tokens a step. `overlapping`: asynchronous scheduling, a step is always under way. `stages`:
    of a pipeline, as many steps are. `second_runner`: told of requests as vLLM's second model runner is. `retention`:
    vLLM's --prefix-cache-retention-interval."""

    def __init__(
        self,
        *,
        groups: Sequence[Group] = (Group(),),
        blocks: int = 40,
        blocks_per_chunk: int = 1,
        slots: int = 128,
        ranks: int = 1,
        drafts: int = 0,
        overlapping: bool = False,
        stages: int = 1,
        second_runner: bool = False,
        prefix_caching: bool = True,
        retention: int | None = 0,
        policy: str = "fcfs",
        seed: int = 0,
        extra: dict[str, object] | None = None,
        **transfer: object,
    ) -> None:
        self.groups, self.slots, self.ranks, self.drafts = groups, slots, ranks, drafts
        self.windows = [group.window for group in groups]
        self.blocks_per_chunk = blocks_per_chunk
        self.overlapping = overlapping
        self.batches = stages + overlapping
        self.random = random.Random(seed)
        config = vllm_config({"blocks_per_chunk": blocks_per_chunk, **(extra or {})}, **transfer)
        config.cache_config.enable_prefix_caching = prefix_caching
        config.cache_config.prefix_cache_retention_interval = retention
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = overlapping
        config.scheduler_config.policy = policy
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
        kv_config = _kv_cache_config(blocks, groups)
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_config, config)
        assert hash_tokens == HASH_TOKENS
        self.scheduler = (AsyncScheduler if overlapping else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = drafts
        self.scheduler.use_v2_model_runner = second_runner
        self.scheduler.defer_block_free = self.batches > 1 and config.kv_transfer_config.is_kv_consumer
        if overlapping:
            self.scheduler._spec_token_placeholders = [-1] * drafts
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(HASH_TOKENS, sha256)
        self._hasher = self._hash_and_note
        self.connector = self.scheduler.connector
        self.half = self.connector._scheduler_half
        self.link = FakeLink()
        self.half._link.close()
        self.half._link = self.link
        self.memory, self.copiers, self.transfers, self.workers, self.worker_links = [], [], [], [], []
        for rank in range(ranks):
            self._add_rank(rank, config, kv_config, blocks)
        self.aggregator = KVOutputAggregator(ranks)
        self.failed = False
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.weights = 0
        self.sequences: dict[str, Text] = {}
        self.text_of: dict[bytes, tuple[int, ...]] = {}  # block hash -> tokens up to its end
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, int] = {}
        self.stats: dict[str, float] = {}
        self._watch_stats()
        self.daemon: FakeDaemon | None = None
        self.start_daemon()

    def _add_rank(self, rank, config, kv_config, blocks) -> None:
        memory = [np.zeros((blocks, LAYERS, group.page_bytes), np.uint8) for group in self.groups]
        layouts = []
        for of_group, group in zip(memory, self.groups, strict=True):
            page = group.page_bytes
            layers = [LayerPages(of_group.ctypes.data + i * page, LAYERS * page, page) for i in range(LAYERS)]
            cut = PerRank(rank, self.ranks)
            layouts.append(ChunkLayout(layers, blocks_per_chunk=self.blocks_per_chunk, block_count=blocks, cut=cut))
        self.chunk_bytes = [layout.chunk_bytes for layout in layouts]
        copier, link = FakeCopier(), FakeLink()
        transfer = HostTransfer(layouts, [Region(each.ctypes.data, each.nbytes) for each in memory], copier=copier)
        worker = OffloadingConnectorWorker(SimpleNamespace(replicated_layout=False), config, kv_config)
        worker.worker = WorkerHalf(link, transfer)
        self.memory.append(memory)
        self.copiers.append(copier)
        self.transfers.append(transfer)
        self.workers.append(worker)
        self.worker_links.append(link)

    # ---- the daemon

    def start_daemon(self, name: str = "i", **options: object) -> FakeDaemon:
        self.stop_daemon()
        self.arena = np.zeros((self.slots, SLOT_BYTES), np.uint8)
        daemon = FakeDaemon(
            slots=self.slots, chunk_bytes=self.chunk_bytes, instance_id=name.encode().ljust(16, b"."), **options
        )
        daemon.chains = [kind for kind, window in enumerate(self.windows) if window is None]
        daemon.on_grant = self._poison
        daemon.on_commit = self._check_commit
        self.daemon = daemon
        arena = SimpleNamespace(address=self.arena.ctypes.data, nbytes=self.arena.nbytes)
        for copier, transfer, link in zip(self.copiers, self.transfers, self.worker_links, strict=True):
            copier.arena, copier.slot_bytes = self.arena.ctypes.data, SLOT_BYTES
            link.current = transfer.map(daemon.instance_id, FakeTable(daemon), arena)
        self.link.current = Attached(FakeSession(daemon), FakeSteps(daemon))
        return daemon

    def stop_daemon(self) -> None:
        if self.link.current is not None:
            self.link.current.steps.broken = True
            self.link.current.session.close()
            self.link.current = None
        for transfer, link in zip(self.transfers, self.worker_links, strict=True):
            if link.current is not None:
                mapped, link.current = link.current, None
                transfer.unmap(mapped)
        self.daemon = None

    def _check_commit(self, kind: int, slot: int, key: bytes) -> None:
        tokens = self.text_of[key]
        group = self.groups[kind]
        first = len(tokens) - self.blocks_per_chunk * group.block_tokens
        expected = np.zeros(SLOT_BYTES, np.uint8)
        parts = [
            self.token(tokens[: position + 1], kind, layer, rank)
            for rank in range(self.ranks)
            for layer in range(LAYERS)
            for position in range(first, len(tokens))
        ]
        bytes_ = np.concatenate(parts)
        expected[: len(bytes_)] = bytes_
        np.testing.assert_array_equal(self.arena[slot], expected, "a chunk was committed with bytes of another")

    # ---- bytes

    def token(self, tokens: Sequence[int], kind: int, layer: int, rank: int) -> np.ndarray:
        text = np.asarray(tokens, np.int32).tobytes() + f"{kind}.{layer}.{rank}.{self.weights}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=TOKEN_BYTES).digest(), np.uint8)

    def _places(self, req_id: str, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Kind, position, block and where in the block, of tokens."""
        for kind, blocks in enumerate(self.scheduler.kv_cache_manager.get_block_ids(req_id)):
            size = self.groups[kind].block_tokens
            for position in range(first, end):
                yield kind, position, blocks[position // size], position % size * TOKEN_BYTES

    # ---- one step

    def step(self) -> None:
        self.failed = True  # until it has not
        output = self.scheduler.schedule()
        self.in_flight.append((output, self._run_model(output)))
        while len(self.in_flight) == self.batches or (self.in_flight and not self.scheduler.has_requests()):
            self.scheduler.update_from_output(*self.in_flight.popleft())
        if self.drafts and not self.overlapping:
            ids = [req_id for req_id in output.num_scheduled_tokens if req_id in self.sequences]
            proposed = [list(self.sequences[req_id].drafts) for req_id in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, proposed))
        self.failed = False

    def _run_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        # Each worker has its own copy of the message, and takes things out of it.
        messages = [_copied(metadata) for _ in range(self.ranks)]
        for worker, message in zip(self.workers, messages, strict=True):
            worker.handle_preemptions(message)
        sampled = self._forward(output)
        outputs = []
        for worker, message in zip(self.workers, messages, strict=True):
            worker.start_kv_transfers(message)
            reported = ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={req_id: i for i, req_id in enumerate(sampled)},
                sampled_token_ids=[list(tokens) for tokens in sampled.values()],
                kv_connector_output=self._report_of(worker, message, output.finished_req_ids),
            )
            outputs.append(reported)
        return self.aggregator.aggregate(outputs)

    def _report_of(self, worker, message, finished_req_ids: set[str]) -> KVConnectorOutput:
        scheduler_side, self.connector.connector_worker = self.connector.connector_worker, worker
        self.connector.bind_connector_metadata(message)
        try:
            self.connector.wait_for_save()
            results = self.connector.get_transfer_results(finished_req_ids)
            return KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
            )
        finally:
            self.connector.connector_worker = scheduler_side

    def _forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        for req_id in output.finished_req_ids:
            self.sequences.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.sequences[new.req_id] = Text(list(tokens), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                self.sequences[req_id] = Text(list(cached.all_token_ids[req_id]), computed)
            elif not self.overlapping:
                assert self.sequences[req_id].computed == computed, f"{req_id}: {computed} tokens computed"
        # All writes first: a request may share blocks with one that computes them in the same step.
        inputs = {}
        for req_id, scheduled in output.num_scheduled_tokens.items():
            sequence = self.sequences[req_id]
            drafts = list(output.scheduled_spec_decode_tokens.get(req_id, ()))
            if drafts and drafts[0] == -1:
                drafts = (sequence.drafts + [WRONG] * len(drafts))[: len(drafts)]
            end = sequence.computed + scheduled
            known = sequence.tokens[: end - len(drafts)]
            assert len(known) == end - len(drafts), f"{req_id}: {len(sequence.tokens)} tokens, {end} to be computed"
            inputs[req_id] = known, drafts
            text = [*known, *drafts]
            for rank in range(self.ranks):
                for kind, position, block, at in self._places(req_id, sequence.computed, end):
                    for layer in range(LAYERS):
                        written = self.token(text[: position + 1], kind, layer, rank)
                        self.memory[rank][kind][block, layer, at : at + TOKEN_BYTES] = written
        for req_id in output.num_scheduled_tokens:
            self._check_what_is_read(req_id)
        return {req_id: self._sample(req_id, *inputs[req_id]) for req_id in inputs}

    def _check_what_is_read(self, req_id: str) -> None:
        sequence = self.sequences[req_id]
        for kind, position, block, at in self._places(req_id, 0, sequence.computed):
            window = self.windows[kind]
            if window is not None and position <= sequence.computed - window:
                continue  # behind the window of every token that is computed
            assert block != 0, f"{req_id} would read a block that it has not: token {position}, kind {kind}"
            for rank in range(self.ranks):
                for layer in range(LAYERS):
                    np.testing.assert_array_equal(
                        self.memory[rank][kind][block, layer, at : at + TOKEN_BYTES],
                        self.token(sequence.tokens[: position + 1], kind, layer, rank),
                        f"{req_id} would read wrong bytes: token {position}, kind {kind}, rank {rank}",
                    )

    def _sample(self, req_id: str, known: list[int], drafts: list[int]) -> list[int]:
        sequence = self.sequences[req_id]
        if len(known) < len(sequence.tokens):
            sequence.computed = len(known)
            return []
        sampled = []
        for draft in [*drafts, None]:
            sampled.append(said(len(sequence.tokens), sequence.tokens[0]))
            sequence.tokens.append(sampled[-1])
            if draft != sampled[-1]:
                break
        sequence.computed = len(sequence.tokens) - 1
        text = tuple(sequence.tokens)
        sequence.drafts = [
            said(len(text) + i, text[0]) if self.random.random() < 0.7 else WRONG for i in range(self.drafts)
        ]
        return sampled

    def _hash_and_note(self, request: Request) -> list[bytes]:
        """Which tokens each block hash stands for."""
        hashes = self._hash(request)
        for number, block_hash in enumerate(hashes, len(request.block_hashes) + 1):
            self.text_of[block_hash] = tuple(request._all_token_ids[: number * HASH_TOKENS])
        return hashes

    def copy(self, jobs: int = 1 << 30) -> None:
        for copier in self.copiers:
            copier.run(jobs)

    def run(self, limit: int = 400, *, copies: int = 1 << 30) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.copy(copies)
            self.step()
        raise AssertionError(f"still not idle after {limit} steps")


def _copied(metadata):
    return type(metadata)(dict(metadata.load_jobs), dict(metadata.store_jobs), set(metadata.jobs_to_flush or ()))


def _kv_cache_config(blocks: int, groups: Sequence[Group]) -> KVCacheConfig:
    specs = []
    for number, group in enumerate(groups):
        shape = {"block_size": group.block_tokens, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        spec = (
            FullAttentionSpec(**shape)
            if group.window is None
            else SlidingWindowSpec(**shape, sliding_window=group.window)
        )
        specs.append(KVCacheGroupSpec([f"group.{number}.layer.{layer}" for layer in range(LAYERS)], spec))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=specs)
