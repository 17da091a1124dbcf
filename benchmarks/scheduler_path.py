"""What does the connector's scheduler half add to vLLM's own in-process offloading?

vLLM's scheduler gets the same requests in turns, with vLLM's OffloadingConnector over its CPU manager and with
KVStoreConnector over a daemon of its own process. There is neither a model nor a worker: whatever a step asks of the
workers is reported as done in the next one. Timed is what each scheduler spends in its connector, summed over all
calls of a step, and what our half adds is the difference of the medians: in a step in which nothing happens (requests
generate tokens, no chunk fills), per request that arrives with one key to look up, per further key looked up, per key
stored, and per key loaded. What is stored fits, so neither side evicts. Ours stores and loads everything (`admission` =
`always`), as theirs does; what deciding by the model costs on top is shown for a step in which nothing happens and for
a lookup. Between steps this core computes, as for a very quick forward pass, while our sending thread does its work on
another: a core that slept instead runs slowly for a while, and by how much differs from one minute to the next.
Limits are given for steps and keys; a request's is what vLLM's own path takes for one.

Then the same of ours alone, over a daemon with a disk, in turns with that disk idle, as busy as two other processes can
keep it, and idle again while those two keep as many cores busy; the limit is what it costs while all of them rest.
Where cores are few, an engine waits for one, and only the third kind of turn tells that from what the disk costs.
"""

import functools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized

os.environ["PYTHONHASHSEED"] = SEED = "0"  # before vLLM reads it
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.report import Result, main
from connector.messages import WorkerOutcomes
from kvstore import admin
from kvstore.client import StoreClient
from kvstore.rpc.v1 import admin_pb2
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.testing import Daemon, running_daemon

BLOCK_TOKENS = 16
HEADS, HEAD_DIM, LAYERS = 4, 128, 2
CHUNK_BYTES = BLOCK_TOKENS * LAYERS * 2 * HEADS * HEAD_DIM * 4
KEYS = 256  # of one prompt
ROUNDS = 16
CPU_BYTES = (2 * ROUNDS + 16) * KEYS * CHUNK_BYTES
BLOCKS = 4 * KEYS
RUNNING = 16  # requests that generate while nothing happens
QUIET_TOKENS = 8  # each; a prompt of one block and this many more never fills a second one
STEPS_MAX = 50
FORWARD_S = 0.005
WAIT_S = 60.0
DISK_ROUNDS = 12  # of each kind, with the disk idle and busy
DISK_BYTES = 3 << 30
DISK_CHUNK_BYTES, DISK_BATCH, DISK_BATCHES = 2 << 20, 16, 200  # put in turns, more than the disk holds: so it writes
DISK_QUOTA_BYTES = 256 << 20  # in memory, so that they leave the engine's chunks there
DISK_SETTLES_S = 1.0
RESTING, DISK_BUSY, CORES_BUSY, STOPPED = range(4)  # what the two other processes are told to do
IDLE_US_MAX, LOOKUP_US_MAX, STORE_US_MAX = 50.0, 1.0, 10.0

torch.set_num_threads(1)
_WEIGHTS = torch.ones(1024, 1024)

# What vLLM's scheduler calls, by what is asked for.
LOOKING_UP = ("on_new_request", "get_num_new_matched_tokens")
CONNECTOR_CALLS = (
    *LOOKING_UP,
    "update_state_after_alloc",
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "take_events",
)


@dataclass
class Spent:
    """Microseconds in the connector."""

    looking_up: float = 0.0
    all: float = 0.0
    steps: int = 0


@functools.cache
def model_config() -> ModelConfig:
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            vocab_size=512, hidden_size=HEADS * HEAD_DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=HEADS, head_dim=HEAD_DIM, intermediate_size=64, architectures=["LlamaForCausalLM"],
            max_position_embeddings=2 * KEYS * BLOCK_TOKENS,
        ).save_pretrained(folder)  # fmt: skip
        return ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32")


class Engine:
    """vLLM's scheduler with one connector, and what that connector costs it."""

    def __init__(self, report: type[OffloadingWorkerMetadata], **transfer: object) -> None:
        """`report`: how its workers say what has ended."""
        self._report = report
        tokens = 2 * KEYS * BLOCK_TOKENS
        config = VllmConfig(
            model_config=model_config(),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=2 * RUNNING, max_num_batched_tokens=tokens, max_model_len=tokens, is_encoder_decoder=False
            ),
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **transfer),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.float32)
        layers = [f"layer.{i}" for i in range(LAYERS)]
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.connector = self.scheduler.connector
        self.spent = Spent()
        self._reports: tuple[dict[int, int], set[str]] = ({}, set())
        for name in CONNECTOR_CALLS:
            setattr(self.connector, name, self._timed(name, getattr(self.connector, name)))

    def _timed(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        looks_up = name in LOOKING_UP

        def timed(*arguments: object, **options: object) -> object:
            start = time.perf_counter_ns()
            result = call(*arguments, **options)
            us = (time.perf_counter_ns() - start) / 1000
            self.spent.all += us
            if looks_up:
                self.spent.looking_up += us
            return result

        return timed

    def add(self, req_id: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        self.scheduler.add_request(Request(req_id, prompt, params, None, block_hasher=self.hasher))

    def step(self) -> bool:
        """One step. Whether anything happened in it: a request that begins or ends, a job, an end of one."""
        output = self.scheduler.schedule()
        _forward()
        ids = [
            req_id
            for req_id in output.num_scheduled_tokens
            if self.scheduler.requests[req_id].num_computed_tokens >= self.scheduler.requests[req_id].num_tokens
        ]
        ended, loaded = self._reports
        metadata = output.kv_connector_metadata
        self._reports = (
            dict.fromkeys([*metadata.store_jobs, *metadata.load_jobs], 1),
            {job.req_id for job in metadata.load_jobs.values()},
        )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
                sampled_token_ids=[[7] for _ in ids],
                kv_connector_output=KVConnectorOutput(
                    finished_sending=set(),
                    finished_recving=loaded,
                    kv_connector_worker_meta=self._report(completed_jobs=ended) if ended else None,
                ),
            ),
        )
        self.spent.steps += 1
        return bool(output.scheduled_new_reqs or output.finished_req_ids or ended or self._reports[0])


def _forward() -> None:
    """Without the interpreter's lock, and with what it reads in place of what the scheduler left in the caches."""
    ends_s = time.perf_counter() + FORWARD_S
    while time.perf_counter() < ends_s:
        torch.mm(_WEIGHTS, _WEIGHTS)


@dataclass
class Costs:
    """Of one side, in microseconds; one figure a round, but of quiet steps one each."""

    quiet_step: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)  # that arrives, its first key looked up with it
    miss: list[float] = field(default_factory=list)  # per key from here on
    hit: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def one_round(engine: Engine, costs: Costs, number: int) -> None:
    """Prompts of this engine alone: what another one stored would be found, and not stored again."""
    for i in range(RUNNING):
        engine.add(f"quiet-{number}-{i}", _prompt(engine, number, i, BLOCK_TOKENS + 1), QUIET_TOKENS)
    engine.spent = Spent()
    while engine.scheduler.has_requests():
        before = engine.spent.all
        if not engine.step():
            costs.quiet_step.append(engine.spent.all - before)
    quiet = statistics.median(costs.quiet_step)

    # A prompt of one key, and one of many, each alone: what a key costs beside its request is the difference. Both
    # twice: nobody has them, and then the store, but not the engine itself.
    for again, looking_up, the_rest in ((False, costs.miss, costs.store), (True, costs.hit, costs.load)):
        one = _serve(engine, f"one-{number}-{again}", _prompt(engine, number, RUNNING, BLOCK_TOKENS + 1))
        many = _serve(engine, f"many-{number}-{again}", _prompt(engine, number, RUNNING + 1, KEYS * BLOCK_TOKENS + 1))
        if not again:
            costs.request.append(one.looking_up)
        looking_up.append((many.looking_up - one.looking_up) / (KEYS - 1))
        the_rest.append((many.all - many.looking_up - many.steps * quiet) / KEYS)
        assert engine.scheduler.reset_prefix_cache()


def _serve(engine: Engine, req_id: str, prompt: list[int]) -> Spent:
    engine.spent = Spent()
    engine.add(req_id, prompt, 4)
    for _ in range(STEPS_MAX):
        if not engine.scheduler.has_requests():
            break
        engine.step()
    return engine.spent


def _prompt(engine: Engine, number: int, which: int, tokens: int) -> list[int]:
    rnd = random.Random(f"{id(engine)}.{number}.{which}")
    return [rnd.randrange(500) for _ in range(tokens)]


def measure() -> list[Result]:
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=SEED, verify=False) as daemon:
        theirs = Engine(
            OffloadingWorkerMetadata,
            kv_connector="OffloadingConnector",
            kv_connector_extra_config={"cpu_bytes_to_use": CPU_BYTES, "offload_prompt_only": False},
        )
        ours, deciding = (
            Engine(
                WorkerOutcomes,
                kv_connector="KVStoreConnector",
                kv_connector_module_path="connector",
                kv_connector_extra_config={"endpoint": daemon.endpoint, "admission": admission},
            )
            for admission in ("always", "model")
        )
        engines = [theirs, ours, deciding]
        with _worker_of(ours, daemon), _worker_of(deciding, daemon):
            costs = {engine: Costs() for engine in engines}
            for number in range(ROUNDS + 1):
                if number == 1:  # the first one warmed up
                    costs = {engine: Costs() for engine in engines}
                for engine in engines if number % 2 else engines[::-1]:
                    one_round(engine, costs[engine], number)
            assert daemon.tier()["hits"] >= ROUNDS * KEYS, "not everything was loaded"
        for engine in (ours, deciding):
            engine.connector.shutdown()

    def added(name: str, what: str, engine: Engine, limit: float) -> Result:
        return _added(name, what, costs[engine], costs[theirs], limit)

    return [
        *beside_a_disk(),
        added("added to a step in which nothing happens", "quiet_step", ours, IDLE_US_MAX),
        added("added per request that arrives, with a key", "request", ours, statistics.median(costs[theirs].request)),
        added("added per key looked up and found", "hit", ours, LOOKUP_US_MAX),
        added("added per key looked up and missed", "miss", ours, LOOKUP_US_MAX),
        added("added per key stored", "store", ours, STORE_US_MAX),
        added("added per key loaded", "load", ours, STORE_US_MAX),
        added("with admission by the model: to a step in which nothing happens", "quiet_step", deciding, IDLE_US_MAX),
        added("with admission by the model: per key looked up and found", "hit", deciding, LOOKUP_US_MAX),
    ]


def beside_a_disk() -> list[Result]:
    spawn = multiprocessing.get_context("spawn")
    costs: dict[int, Costs] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        flags = ["--fs-dir", folder + "/fs", "--fs-bytes", str(DISK_BYTES)]
        with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=SEED, arguments=flags, verify=False) as daemon:
            load = admin_pb2.Selection(salt="load", tier="cpu")
            admin.set_quota(daemon.endpoint, load, DISK_QUOTA_BYTES)
            engine = Engine(
                WorkerOutcomes,
                kv_connector="KVStoreConnector",
                kv_connector_module_path="connector",
                kv_connector_extra_config={"endpoint": daemon.endpoint, "admission": "always"},
            )
            told = spawn.Value("i", RESTING)
            clients = [spawn.Process(target=_keep_busy, args=(daemon.endpoint, gets, told)) for gets in (False, True)]
            with _worker_of(engine, daemon):
                for client in clients:
                    client.start()
                for number in range(DISK_ROUNDS + 1):
                    if number <= 1:  # the first one warmed up
                        costs = {RESTING: Costs(), DISK_BUSY: Costs(), CORES_BUSY: Costs()}
                    for kind in list(costs) if number % 2 else list(costs)[::-1]:
                        told.value = kind
                        time.sleep(DISK_SETTLES_S)
                        one_round(engine, costs[kind], 3 * number + kind)
                told.value = STOPPED
                for client in clients:
                    client.join()
            loaded = daemon.tier("fs")["hits"]
            engine.connector.shutdown()
    return [
        Result.of(f"{name}, {busy}", getattr(costs[kind], what), "us", getattr(costs[RESTING], what))
        for kind, busy in ((DISK_BUSY, f"the disk busy ({loaded} loads)"), (CORES_BUSY, "two cores busy"))
        for name, what in (
            ("step in which nothing happens", "quiet_step"),
            ("per key looked up and found", "hit"),
            ("per key looked up and missed", "miss"),
        )
    ]


def _keep_busy(endpoint: str, gets: bool, told: "Synchronized[int]") -> None:
    """Puts, or gets of what may be on disk by now; or keeps a core busy, or rests."""
    payload = os.urandom(DISK_CHUNK_BYTES)
    number = 0
    with StoreClient.attach(
        endpoint, namespace={"model": "disk"}, chunk_bytes=DISK_CHUNK_BYTES, hash_seed=SEED
    ) as store:
        while (kind := told.value) != STOPPED:
            if kind == RESTING:
                time.sleep(0.005)
                continue
            if kind == CORES_BUSY:
                zlib.crc32(payload)
                continue
            number = random.randrange(DISK_BATCHES) if gets else (number + 1) % DISK_BATCHES
            keys = [f"disk-{number * DISK_BATCH + i:027}".encode() for i in range(DISK_BATCH)]
            if gets:
                store.get("load", keys)
            else:
                store.put("load", dict.fromkeys(keys, payload))


def _added(name: str, what: str, ours: Costs, theirs: Costs, limit: float) -> Result:
    mine, base = statistics.median(getattr(ours, what)), statistics.median(getattr(theirs, what))
    added = mine - base
    return Result(name, round(added, 3), "us", limit, round(added / limit, 3), f"{mine:.3g} - {base:.3g}")


@contextmanager
def _worker_of(engine: Engine, daemon: Daemon) -> Iterator[None]:
    """A session that stands for the engine's worker, so that its group is complete."""
    attachment = Attachment(
        role=Role.WORKER,
        hash_seed=SEED,
        group=engine.connector._engine.group,
        kinds=(Kind({"model": "benchmark"}, CHUNK_BYTES, 0, CHUNK_BYTES),),
    )
    with Session.attach(daemon.endpoint, attachment):
        deadline_s = time.monotonic() + WAIT_S
        while not engine.connector._scheduler_half._usable():
            assert time.monotonic() < deadline_s, f"the scheduler half was not complete within {WAIT_S:g} s"
            time.sleep(0.01)
        yield


if __name__ == "__main__":
    main("scheduler_path", __doc__.splitlines()[0], measure)
