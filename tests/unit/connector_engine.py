"""An engine without a model: vLLM's real scheduler, the real connector, both halves, and real memory for bytes.

Only the forward pass, the copy threads and the daemon are pretended. A page of the KV cache holds a pattern made from
its block's hash, so whoever reads it can tell whether it is right: `step` checks every page that a forward pass would
read, and every chunk that is committed. Weights have a version, which is in the pattern too.

`windows` says which KV cache groups it has: None is full attention, a number a sliding window of so many tokens, STATE
layers that keep a state, DRAFT a draft model's. Pages of later groups are larger.
"""

import functools
import hashlib
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector import compat
from connector.layout import ChunkLayout, LayerPages
from connector.requests import Attached
from connector.transfer import HostTransfer, Mapped, Region
from connector.worker import WorkerHalf
from tests.unit.connector_fakes import FakeCopier, FakeDaemon, FakeLink, FakeSession, FakeSteps, FakeTable

BLOCK_TOKENS = 4
PAGE_BYTES = 32
LAYERS = 2
SLOT_BYTES = 4096
POISON = 0xA5
IN_PART = 0x77  # what a block of which some tokens are computed is full of
SEED = "0"
STATE = 0  # for a window: only the state after the last token is ever read
DRAFT = 1 << 20  # full attention of a draft model (EAGLE, MTP): a window that nothing is behind


def page_bytes(kind: int) -> int:
    return PAGE_BYTES * (kind + 1)


@functools.cache
def model_config() -> ModelConfig:
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=64,
            max_position_embeddings=512,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        return ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512)


def vllm_config(extra: dict[str, object] | None = None, **transfer: object) -> VllmConfig:
    return VllmConfig(
        model_config=model_config(),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=24, max_model_len=512, is_encoder_decoder=False
        ),
        kv_transfer_config=KVTransferConfig(
            **{
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # What a load or store does is tested here, not whether it pays.
                "kv_connector_extra_config": {
                    "endpoint": "unix:///nowhere/kvstore.sock",
                    "admission": "always",
                    **(extra or {}),
                },
                **transfer,
            }
        ),
    )


def kv_cache_config(blocks: int, windows: Sequence[int | None] = (None,)) -> KVCacheConfig:
    groups = []
    for number, window in enumerate(windows):
        shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        if window == STATE:
            spec = MambaSpec(BLOCK_TOKENS, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
        else:
            full = window is None or window == DRAFT
            spec = FullAttentionSpec(**shape) if full else SlidingWindowSpec(**shape, sliding_window=window)
        layers = [f"group.{number}.layer.{layer}" for layer in range(LAYERS)]
        groups.append(KVCacheGroupSpec(layers, spec, is_eagle_group=window == DRAFT))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


needs_states = pytest.mark.skipif(not compat.hands_over_states(), reason="engines with states are refused before 0.32")


class PretendEngine:
    """`daemon`: what it is attached to, or None. `copier`: run by the caller, or by vLLM's waits. `batches`: in flight
    at a time, as with pipeline stages: a step's output is taken in when so many have been scheduled. `late_flushes`: as
    vLLM's second model runner does, a step zeroes its new blocks before it lets the connector wait for copies."""

    def __init__(
        self,
        *,
        blocks: int = 40,
        blocks_per_chunk: int = 2,
        slots: int = 64,
        windows: Sequence[int | None] = (None,),
        extra: dict[str, object] | None = None,
        prefix_caching: bool = True,
        batches: int = 1,
        late_flushes: bool = False,
        **transfer: object,
    ) -> None:
        self.slots = slots
        self.late_flushes = late_flushes
        self.batches = batches
        self.windows = windows
        self.blocks_per_chunk = blocks_per_chunk
        config = vllm_config({"blocks_per_chunk": blocks_per_chunk, **(extra or {})}, **transfer)
        config.cache_config.enable_prefix_caching = prefix_caching
        if STATE in windows:
            config.cache_config.mamba_cache_mode = "align"
        config.cache_config.num_gpu_blocks = blocks
        kv_config = kv_cache_config(blocks, windows)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        # As vLLM does for engines with more than one batch in flight.
        self.scheduler.defer_block_free = batches > 1 and config.kv_transfer_config.is_kv_consumer
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.connector = self.scheduler.connector
        self.half = self.connector._scheduler_half
        self.link, self.worker_link = FakeLink(), FakeLink()
        self.half._link.close()
        self.half._link = self.link

        self.memory = [np.zeros((blocks, LAYERS, page_bytes(kind)), np.uint8) for kind in range(len(windows))]
        layouts = []
        for kind, memory in enumerate(self.memory):
            page = page_bytes(kind)
            layers = [LayerPages(memory.ctypes.data + i * page, LAYERS * page, page) for i in range(LAYERS)]
            layouts.append(ChunkLayout(layers, blocks_per_chunk=blocks_per_chunk, block_count=blocks))
        self.chunk_bytes = [layout.chunk_bytes for layout in layouts]
        self.copier = FakeCopier()
        regions = [Region(memory.ctypes.data, memory.nbytes) for memory in self.memory]
        self.transfer = HostTransfer(layouts, regions, copier=self.copier)
        self.worker = OffloadingConnectorWorker(SimpleNamespace(replicated_layout=False), config, kv_config)
        self.worker.worker = WorkerHalf(self.worker_link, self.transfer)

        self.failed = False
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.weights = 0
        self.before: dict[bytes, bytes] = {}  # block hash -> the one before it
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, int] = {}
        self.stats: dict[str, float] = {}
        self._watch_stats()
        self.daemon: FakeDaemon | None = None
        self.start_daemon()

    # ---- the daemon

    def start_daemon(self, name: str = "i", **options: object) -> FakeDaemon:
        self.stop_daemon()
        self.arena = np.zeros((self.slots, SLOT_BYTES), np.uint8)
        daemon = FakeDaemon(
            slots=self.slots, chunk_bytes=self.chunk_bytes, instance_id=name.encode().ljust(16, b"."), **options
        )
        self.copier.arena, self.copier.slot_bytes = self.arena.ctypes.data, SLOT_BYTES
        daemon.chains = [kind for kind, window in enumerate(self.windows) if window in (None, DRAFT)]
        daemon.on_grant = self._poison
        daemon.on_commit = self._check_commit
        self.daemon = daemon
        session = FakeSession(daemon)
        arena = SimpleNamespace(address=self.arena.ctypes.data, nbytes=self.arena.nbytes)
        self.worker_link.current = self.transfer.map(daemon.instance_id, FakeTable(daemon), arena)
        self.link.current = Attached(session, FakeSteps(daemon))
        return daemon

    def stop_daemon(self) -> None:
        """As if it had been killed: both links notice, in an order that the caller cannot tell."""
        if self.link.current is not None:
            attached: Attached = self.link.current
            attached.steps.broken = True
            self.link.current = None
            attached.session.close()
        if self.worker_link.current is not None:
            mapped: Mapped = self.worker_link.current
            self.worker_link.current = None
            self.transfer.unmap(mapped)
        self.daemon = None

    @property
    def steps(self) -> FakeSteps:
        return self.link.current.steps

    def _poison(self, slot: int) -> None:
        self.arena[slot] = POISON

    def _check_commit(self, kind: int, slot: int, key: bytes) -> None:
        expected = np.zeros(SLOT_BYTES, np.uint8)
        expected[: self.chunk_bytes[kind]] = self.chunk_pattern(key, kind)
        np.testing.assert_array_equal(self.arena[slot], expected, "a chunk was committed with bytes of another")

    # ---- bytes

    def page(self, block_hash: bytes, layer: int, kind: int = 0) -> np.ndarray:
        text = block_hash + f"{kind}.{layer}.{self.weights}".encode()
        return np.frombuffer(hashlib.shake_128(text).digest(page_bytes(kind)), np.uint8)

    def chunk_pattern(self, key: bytes, kind: int = 0) -> np.ndarray:
        hashes = [key]
        while len(hashes) < self.blocks_per_chunk:
            hashes.insert(0, self.before[hashes[0]])
        return np.concatenate([self.page(block, layer, kind) for layer in range(LAYERS) for block in hashes])

    # ---- requests

    def use(self, **parts: object) -> None:
        """Another `clock`, `rules` or `admission`, wherever the scheduler half has one."""
        half = self.half
        for name, value in parts.items():
            parts_of_half = (half, half.jobs, half._grants, half._loads, half._stores, half._retries)
            owners = [each for each in parts_of_half if hasattr(each, f"_{name}")]
            assert owners, f"nothing has a {name}"
            for owner in owners:
                setattr(owner, f"_{name}", value)

    def add(
        self,
        req_id: str,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        salt: str | None = None,
        sampling: dict[str, object] | None = None,
        **fields: object,
    ) -> Request:
        request = self._request(req_id, prompt, max_tokens, salt, sampling or {}, fields)
        self.requests[req_id] = request
        self.prompts[req_id] = len(prompt)
        self.scheduler.add_request(request)
        return request

    def _request(
        self,
        req_id: str,
        prompt: list[int],
        max_tokens: int,
        salt: str | None,
        sampling: Mapping[str, object],
        fields: Mapping[str, object],
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        params.update_from_generation_config({}, eos_token_id=None)
        return Request(req_id, prompt, params, None, cache_salt=salt, block_hasher=self._hasher, **fields)

    def next_turn(self, req_id: str, prompt: list[int], *, max_tokens: int = 4) -> None:
        """Of a streaming session, a request added with `resumable`."""
        salt = self.requests[req_id].cache_salt
        self.scheduler.add_request(self._request(req_id, prompt, max_tokens, salt, {}, {"resumable": True}))

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def can_reset(self) -> bool:
        """vLLM refuses it while loads run, also those of requests that were aborted meanwhile, and while one that has
        been loaded waits to go on."""
        return not any(
            request.is_finished()
            or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            or (request.status != RequestStatus.RUNNING and request.num_computed_tokens > 0)
            for request in self.scheduler.requests.values()
        )

    def change_weights(self) -> None:
        """What a trainer does between two rollouts. Running requests start over."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        # The worker learns of it in the next step, before its forward pass; stores of before still read old pages.
        self.weights += 1

    # ---- one step

    def step(self) -> None:
        self.failed = True  # until it has not
        self.in_flight.append(self._run_model(self.scheduler.schedule()))
        if len(self.in_flight) == self.batches:
            self.scheduler.update_from_output(*self.in_flight.popleft())
        self.failed = False

    def _run_model(self, output: SchedulerOutput) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        metadata = output.kv_connector_metadata
        if not self.late_flushes:
            self.worker.handle_preemptions(metadata)
        for memory in self.memory:
            memory[output.new_block_ids_to_zero or []] = 0
        if self.late_flushes:
            self.worker.handle_preemptions(metadata)
        if output.total_num_scheduled_tokens:
            self._forward(output)
        self.worker.start_kv_transfers(metadata)
        sampled = self._sampled(output)
        ids = list(sampled)
        return output, ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=[sampled[req_id] for req_id in ids],
            kv_connector_output=self._report(metadata, output.finished_req_ids),
        )

    def _report(self, metadata, finished_req_ids: set[str]) -> KVConnectorOutput:
        """In the order of vLLM's model runner, through the connector's own overrides."""
        scheduler_side, self.connector.connector_worker = self.connector.connector_worker, self.worker
        self.connector.bind_connector_metadata(metadata)
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

    def _forward(self, output) -> None:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._go_on_from_states(output, computed)
        # All writes first: a request may share blocks with one that computes them in the same step.
        for req_id, scheduled in output.num_scheduled_tokens.items():
            hashes = self.requests[req_id].block_hashes
            self.before.update(zip(hashes[1:], hashes, strict=False))
            full = min((computed[req_id] + scheduled) // BLOCK_TOKENS, len(hashes))
            for kind, i, block in self._pages(req_id, computed[req_id] // BLOCK_TOKENS, full):
                for layer in range(LAYERS):
                    self.memory[kind][block, layer] = self.page(hashes[i], layer, kind)
            end, rest = divmod(computed[req_id] + scheduled, BLOCK_TOKENS)
            for kind, _, block in self._pages(req_id, end, end + bool(rest)):
                self.memory[kind][block] = IN_PART
        for req_id in output.num_scheduled_tokens:
            hashes = self.requests[req_id].block_hashes
            for kind, i, block in self._pages(req_id, 0, computed[req_id] // BLOCK_TOKENS):
                window = self.windows[kind]
                if window is not None and (i + 1) * BLOCK_TOKENS <= computed[req_id] - window + 1:
                    continue  # behind the window of every token that is computed
                assert block != 0, f"{req_id} would read a block that it has not: {i} of kind {kind}"
                for layer in range(LAYERS):
                    np.testing.assert_array_equal(
                        self.memory[kind][block, layer],
                        self.page(hashes[i], layer, kind),
                        f"{req_id} would read wrong bytes: block {i} of its prompt, kind {kind}",
                    )

    def _go_on_from_states(self, output, computed: Mapping[str, int]) -> None:
        """A state is read where the last step left it and written where this one ends."""
        for req_id in output.num_scheduled_tokens:
            for kind, i, block in self._states(req_id, computed[req_id]):
                assert block != 0, f"{req_id} would go on from a state that it has not: of kind {kind}, block {i}"
                np.testing.assert_array_equal(
                    self.memory[kind][block],
                    self._state(req_id, computed[req_id], kind),
                    f"{req_id} would go on from a wrong state after {computed[req_id]} tokens",
                )
        for req_id, scheduled in output.num_scheduled_tokens.items():
            end = computed[req_id] + scheduled
            for kind, _, block in self._states(req_id, end):
                self.memory[kind][block] = self._state(req_id, end, kind)

    def _states(self, req_id: str, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Where the state after so many tokens lies: kind, which block, and its place in the cache."""
        ids = self.scheduler.kv_cache_manager.get_block_ids(req_id)
        last = (tokens - 1) // BLOCK_TOKENS
        yield from (
            (kind, last, ids[kind][last]) for kind, window in enumerate(self.windows) if window == STATE and tokens
        )

    def _state(self, req_id: str, tokens: int, kind: int) -> np.ndarray:
        hashes = self.requests[req_id].block_hashes
        if tokens % BLOCK_TOKENS:  # of no key
            name = f"{req_id} after {tokens} tokens".encode()
        else:
            name = hashes[tokens // BLOCK_TOKENS - 1]
        return np.stack([self.page(name, layer, kind) for layer in range(LAYERS)])

    def _pages(self, req_id: str, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Of these blocks of a request, those of attention: kind, which block, and its place in the cache."""
        for kind, blocks in enumerate(self.scheduler.kv_cache_manager.get_block_ids(req_id)):
            if self.windows[kind] != STATE:
                yield from ((kind, i, blocks[i]) for i in range(first, end))

    def _sampled(self, output) -> dict[str, list[int]]:
        sampled = {}
        for req_id in output.num_scheduled_tokens:
            request = self.requests[req_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled[req_id] = [(7 * request.num_tokens + self.prompts[req_id]) % 500] if done else []
        return sampled

    def serve(self, req_id: str, prompt: list[int], **fields: object) -> Request:
        """One request from arrival until the engine is idle again."""
        request = self.add(req_id, prompt, **fields)
        self.run()
        assert request.is_finished()
        return request

    def run(self, limit: int = 400, *, copies: int = 1 << 30) -> None:
        """Until the engine would be idle."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.copier.run(copies)
            self.step()
        raise AssertionError(f"still not idle after {limit} steps")

    def metric(self, name: str) -> float:
        """As vLLM would have summed it up."""
        self.half.get_stats()
        return self.stats.get(name, 0)

    def _watch_stats(self) -> None:
        get_stats = self.half.get_stats

        def watched():
            stats = get_stats()
            if stats is not None:
                for key, values in stats.data["data"].items():
                    self.stats[key] = self.stats.get(key, 0) + sum(values.values())
            return stats

        self.half.get_stats = watched
