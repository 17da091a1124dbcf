"""Real engines for tests and the demo: a small model made on the spot, and a vLLM engine in a process of its own.

`python -m connector.testing FD` is that process. It reads requests from the socket FD and answers each before it reads
the next; the two ends share nothing else. If the starting process dies, the socket closes and the engine stops; if the
engine dies, the starting process sees its end and raises `EngineDied` with the end of the log.
"""

import enum
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

START_S_MAX = 480.0  # ten times what it takes on two idle cores; other builds may share them
REQUEST_S_MAX = 300.0
STOP_S_MAX = 60.0
RESET_INTERVAL_S = 0.01
LOG_TAIL_LINES = 40
TOKEN_ID_MIN, TOKEN_ID_MAX = 8, 255  # plain bytes of the tokenizer, none of them special

SMALL_MODEL: Mapping[str, object] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 49_152,
    # With the default of 0.02 such a model repeats one token whatever its KV cache holds, and a comparison of tokens
    # could not fail.
    "initializer_range": 0.4,
}


class Family(enum.Enum):
    """Kinds of models, by what transformers calls them, with the settings in which they differ from SMALL_MODEL."""

    LLAMA = "Llama"
    GEMMA3 = "Gemma3"  # sliding windows mixed with full attention
    DEEPSEEK_V2 = "DeepseekV2"  # MLA
    GRANITE = "GraniteMoeHybrid"  # Mamba 2 mixed with full attention
    LFM2 = "Lfm2"  # short convolutions, which keep a state, mixed with full attention
    QWEN3_NEXT = "Qwen3Next"  # linear attention (gated delta nets) mixed with full attention


_OF_FAMILY: Mapping[Family, tuple[str, str, Mapping[str, object]]] = {
    Family.LLAMA: ("LlamaConfig", "LlamaForCausalLM", {}),
    Family.GEMMA3: (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8_192,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"] * 2,  # else all layers slide
            "tie_word_embeddings": False,  # else it repeats the last token
        },
    ),
    Family.DEEPSEEK_V2: (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8_192,
            "kv_lora_rank": 512,  # of no other size does vLLM have kernels
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 3,  # all layers: no experts
            "n_routed_experts": 2,
        },
    ),
    Family.GRANITE: (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 8_192,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 8_192,
            "num_local_experts": 0,
            "shared_intermediate_size": 512,
            "position_embedding_type": "rope",
        },
    ),
    Family.LFM2: (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 8_192,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": False,
            "block_multiple_of": 64,
            # What vLLM asks the configuration for, and transformers does not put in.
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "block_ff_dim": 512,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "block_norm_eps": 1e-5,
        },
    ),
    Family.QWEN3_NEXT: (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 8_192,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
}


def small_model(
    cache: Path, *, family: Family = Family.LLAMA, dtype: str = "float32", seed: int = 0, **changes: object
) -> Path:
    """The folder of a model with random weights and a byte tokenizer, made in `cache` unless it is there already."""
    settings = {**SMALL_MODEL, **_OF_FAMILY[family][2], **changes}
    digest = hashlib.sha256(json.dumps([settings, dtype, seed], sort_keys=True).encode()).hexdigest()[:12]
    name = f"{family.value.lower()}-{digest}"
    folder = cache / name
    if not folder.exists():
        scratch = cache / f"{name}.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _save_model(scratch, family, settings, dtype, seed)
        try:
            scratch.rename(folder)  # whole or not at all
        except OSError:  # somebody else was faster
            shutil.rmtree(scratch)
    return folder


def _save_model(folder: Path, family: Family, settings: dict[str, Any], dtype: str, seed: int) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config_class, model_class, _ = _OF_FAMILY[family]
    config = getattr(transformers, config_class)(**settings)
    getattr(transformers, model_class)(config).to(getattr(torch, dtype)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def random_prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that never repeat a pattern: on a periodic prompt, wrong KV can give the right tokens."""
    rnd = random.Random(seed)
    return [rnd.randint(TOKEN_ID_MIN, TOKEN_ID_MAX) for _ in range(tokens)]


def transfer_config(endpoint: str, **extra: object) -> dict[str, object]:
    """`kv_transfer_config` of an engine that uses the store at `endpoint`."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


@dataclass(frozen=True, slots=True)
class Completion:
    tokens: list[int]
    cached_tokens: int
    """As the engine says, from its own prefix cache or from the store; it is known before anything was loaded."""
    ttft_s: float


class EngineDied(RuntimeError):
    """The engine's process ended; the message has the end of its log."""


@dataclass
class Engine:
    """A vLLM engine in a child process, started on entry and stopped on exit. Not thread-safe.

    `arguments` go to `vllm.LLM`; `transfer` is its kv_transfer_config, None for an engine without the store.
    """

    model: Path
    log: Path
    transfer: Mapping[str, object] | None = None
    hash_seed: str | None = "0"
    arguments: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the engine answers. EngineDied when it does not come up."""
        ours, theirs = socket.socketpair()
        with self.log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "connector.testing", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(self.hash_seed, self.environment),
                cwd=self.cwd,
                start_new_session=True,  # so that `kill` reaches vLLM's own children too
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._connection = Connection(ours.detach())
        arguments = {"model": str(self.model), "dtype": "float32", "enforce_eager": True, **self.arguments}
        if self.transfer is not None:
            arguments["kv_transfer_config"] = dict(self.transfer)
        try:
            self._ask("start", arguments, timeout_s=START_S_MAX)
        except BaseException:
            self.kill()
            raise

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, object] | None = None,
        timeout_s: float = REQUEST_S_MAX,
    ) -> Completion:
        """Greedy tokens of one prompt."""
        request = {"prompt": list(prompt), "max_tokens": max_tokens, "salt": salt, "transfer": kv_transfer_params}
        [completion] = self._ask("generate", [request], timeout_s=timeout_s)
        return completion

    def generate_many(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16) -> list[Completion]:
        """All at once, in the order given."""
        requests = [{"prompt": list(p), "max_tokens": max_tokens, "salt": None, "transfer": None} for p in prompts]
        return self._ask("generate", requests, timeout_s=REQUEST_S_MAX)

    def reset_prefix_cache(self) -> None:
        """Empties the engine's own cache and leaves the store alone, so that the next request must load. Waits for the
        stores of answered requests, which hold their blocks until they have ended."""
        deadline_s = time.monotonic() + REQUEST_S_MAX
        while not self._ask("reset_prefix_cache", None, timeout_s=REQUEST_S_MAX):
            assert time.monotonic() < deadline_s, f"blocks are still in use after {REQUEST_S_MAX:.0f} s"
            time.sleep(RESET_INTERVAL_S)

    def sleep(self, level: int) -> None:
        """Gives memory back and forgets its KV cache; the connector's as well."""
        self._ask("sleep", level, timeout_s=REQUEST_S_MAX)

    def wake_up(self) -> None:
        self._ask("wake_up", None, timeout_s=REQUEST_S_MAX)

    def metrics(self) -> dict[str, float]:
        """The engine's Prometheus counters and gauges by sample name, summed over labels. Needs
        `disable_log_stats=False`."""
        return self._ask("metrics", None, timeout_s=REQUEST_S_MAX)

    def stop(self) -> None:
        """As an operator would: the engine shuts down by itself. Idempotent."""
        if self.process.poll() is None:
            self._connection.close()
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self.kill()
                raise EngineDied(f"the engine did not stop within {STOP_S_MAX:.0f} s\n{self.log_tail()}") from None
        self._end()

    def kill(self) -> None:
        """SIGKILL to the engine and all its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._end()

    def _end(self) -> None:
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])

    def _ask(self, operation: str, argument: object, *, timeout_s: float) -> Any:
        try:
            self._connection.send((operation, argument))
            ready = wait([self._connection, self._pidfd], timeout_s)
            if not ready:
                raise TimeoutError(f"no answer to {operation} within {timeout_s:.0f} s\n{self.log_tail()}")
            outcome, value = self._connection.recv()
        except (EOFError, OSError) as gone:
            if isinstance(gone, TimeoutError):
                raise
            raise EngineDied(f"the engine ended during {operation}\n{self.log_tail()}") from gone
        if outcome == "error":
            raise EngineDied(f"{operation}: {value}\n{self.log_tail()}")
        return value


def engine_environment(hash_seed: str | None, changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, offline and with the KV cache bounded. `hash_seed` None: PYTHONHASHSEED unset."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **changes}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    return environment


# ---- the child


def _serve(connection: Connection) -> None:
    llm: Any = None
    value: object
    while True:
        try:
            operation, argument = connection.recv()
        except EOFError:
            break
        try:
            if operation == "start":
                from vllm import LLM

                llm, value = LLM(**argument), None
            elif operation == "generate":
                value = _generate(llm, argument)
            elif operation == "reset_prefix_cache":
                value = llm.reset_prefix_cache()
            elif operation == "sleep":
                value = llm.sleep(argument)
            elif operation == "wake_up":
                value = llm.wake_up()
            else:
                assert operation == "metrics", operation
                value = _metrics()
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))
        else:
            connection.send(("ok", value))


def _metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if metric.type in ("counter", "gauge"):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def _generate(llm: Any, requests: list[dict[str, Any]]) -> list[Completion]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    started = time.perf_counter()
    first_s: dict[str, float] = {}
    finished: dict[str, Any] = {}
    for i, request in enumerate(requests):
        prompt = {"prompt_token_ids": request["prompt"]}
        if request["salt"] is not None:
            prompt["cache_salt"] = request["salt"]
        transfer = {"kv_transfer_params": dict(request["transfer"])} if request["transfer"] else None
        engine.add_request(
            str(i),
            prompt,
            SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE,
                extra_args=transfer,
            ),
        )
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                first_s.setdefault(output.request_id, time.perf_counter() - started)
            if output.finished:
                finished[output.request_id] = output
    return [
        Completion(
            tokens=list(finished[str(i)].outputs[0].token_ids),
            cached_tokens=finished[str(i)].num_cached_tokens or 0,
            ttft_s=first_s[str(i)],
        )
        for i in range(len(requests))
    ]


if __name__ == "__main__":
    # Pickles name this module by where it was imported from, so both ends must know it by the same name.
    from connector.testing import _serve as serve

    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
