"""What an engine's bytes and keys are: the namespace document, the weights' identity, the hash seed and the probe.

Everything here is a function of the engine's configuration and of files; nothing is kept, so there is nothing to guard.
The worker half calls `namespace_document` once, when it has its KV cache; the scheduler half reads the seed at
construction and calls `effective_seed_problem` and `probe_value` at its first request, because vLLM starts its own hash
chain only after the connector was built.

A field that is missing here is a wrong answer waiting to be served; a field too many costs misses. So where it is not
certain that a setting leaves the KV bytes alone, it is in.
"""

import enum
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.adapters import changed_ns
from kvstore.errors import SeedMismatch
from kvstore.namespace import seed_problem

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from connector.pages import PageHeads

# vLLM is imported inside the functions that ask it something: importing it takes many seconds, and weights and
# documents are examined by tools and tests that run no engine.

logger = logging.getLogger("vllm.connector.identity")

ENGINE_FAMILY = "vllm"
LAYOUT_FORMAT_VERSION = 2
"""Raised whenever the order of bytes within a chunk changes."""

WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
WEIGHTS_SAMPLE_BYTES = 64 << 10
WEIGHTS_SAMPLES = 64
SAFETENSORS_HEADER_BYTES_MAX = 100 << 20  # the format's own limit

_FORMATS_OF_THE_MODEL = {
    "auto": "",
    "hf": "hf",
    "safetensors": "safetensors",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "mistral": "mistral",
    "pt": "pt",
    "npcache": "npcache",
    "runai_streamer": "runai_streamer",
    "runai_streamer_sharded": "sharded_state",
    "sharded_state": "sharded_state",
}
"""Of vLLM's load formats those that read the model's own files, and which of these they choose where there are several
kinds. All others (a server, a tensorizer's URI, a plugin) bring weights from somewhere else."""

PROBE_TOKENS = (0, 1, 2, 255, 256, 65_535, 65_536, 1_000_003)
"""One of each width that a serialiser could write differently."""

_HUB_SNAPSHOT = re.compile(r"/models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
_DESCRIBES = re.compile(r"(\.md|\.gitattributes|\.png|\.jpe?g|\.gif|\.pdf)$|^(LICENSE|NOTICE)", re.IGNORECASE)
"""Files of a model's repository that only people read."""

_ROPE_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_chunk_size")
_LONGROPE_TYPES = {"longrope", "su"}
_LLAMA4_TUNED_ABOVE = 32768  # vLLM's own; above it each query of a layer without positions is scaled
_MULTIMODAL_FIELDS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
    "allow_missing_mm_embeddings",
)
_ARITHMETIC_VARIABLES = (  # of vLLM: what activations are rounded to, who routes them, how a video is cut into frames
    "VLLM_CPU_INT4_W4A8",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",  # for benchmarks: experts that no router chose
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_VIDEO_LOADER_BACKEND",
)
_QUERY_ROUNDING = ("disable_flashinfer_q_quantization", "use_prefill_query_quantization")  # of vLLM's AttentionConfig
_ADAPTER_FIELDS = (  # of vLLM's LoRAConfig: what of an adapter's files is applied, and how they are read
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
_NOT_IDENTITY = {"_name_or_path", "_commit_hash", "transformers_version"}  # where it lay and who read it


# ---- the hash seed and the probe


def engine_hash_seed(environ: Mapping[str, str] = os.environ) -> str:
    """The literal PYTHONHASHSEED of this process. SeedMismatch, saying what to export, when it cannot be shared."""
    seed = environ.get("PYTHONHASHSEED")
    problem = seed_problem(seed)
    if problem is not None:
        raise SeedMismatch(problem)
    assert seed is not None
    return seed


def probe_value(hash_algorithm: str, seed: str) -> bytes:
    """vLLM's hash of PROBE_TOKENS after `seed`: equal in two engines if and only if their keys can agree.

    The parent is explicit, so the value does not depend on whether vLLM has initialised its own hash chain yet.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens

    function = get_hash_fn_by_name(hash_algorithm)
    return bytes(hash_block_tokens(function, BlockHash(function(seed)), PROBE_TOKENS, None))


def effective_seed_problem(hash_algorithm: str, seed: str) -> str | None:
    """Why the engine's block hashes do not start from `seed`, or None when they do. Call it at the first request."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    effective = kv_cache_utils.get_none_hash_seed()
    if effective != seed:
        return (
            f"the engine hashes from the seed {effective!r}, not from PYTHONHASHSEED={seed!r} that it was started "
            "with: something changed the environment after start; export PYTHONHASHSEED before the start and leave it"
        )
    if getattr(kv_cache_utils, "NONE_HASH", None) != get_hash_fn_by_name(hash_algorithm)(seed):
        return (
            f"the engine's first block hash is not {hash_algorithm} of the seed {seed!r}: it hashes with another "
            "algorithm than its configuration (prefix_caching_hash_algo) says"
        )
    return None


# ---- the weights


def weights_identity(model: str, revision: str | None, *, cache_dir: str | None = None) -> str:
    """`hub:COMMIT`, or `sha256:HEX` of a local folder or file. ValueError when neither can be told.

    A hub commit is looked up in the local cache, where vLLM has just loaded it from; nothing is downloaded.
    """
    path = Path(model)
    if path.is_dir():
        snapshot = _HUB_SNAPSHOT.search(str(path.absolute()))
        if snapshot is not None:
            return f"hub:{snapshot['commit']}"
        files = sorted(_weights_files(path))
        if not files:
            raise ValueError(
                f"the model folder {model} has no weights file ({', '.join(WEIGHTS_SUFFIXES)}), so its KV cache cannot "
                "be told from another model's"
            )
        return f"sha256:{_weights_digest((str(file.relative_to(path)), file) for file in files)}"
    if path.is_file():
        return f"sha256:{_weights_digest([(path.name, path)])}"
    commit = _cached_commit(model, revision, cache_dir)
    if commit is None:
        raise ValueError(
            f"cannot tell which weights {model!r} (revision {revision or 'main'}) are: it is neither a local folder "
            "nor in the local Hugging Face cache. Download the model first and give its folder as the model"
        )
    return f"hub:{commit}"


def _weights_files(folder: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(folder):
        for name in names:
            if name.endswith(WEIGHTS_SUFFIXES):
                yield Path(directory, name)


def _weights_digest(files: Iterable[tuple[str, Path]]) -> str:
    """Of each file: name, size, safetensors header, and evenly spaced samples.

    Samples, because reading all of a large model would cost more than its start; the header covers every tensor's
    name, shape and place. A change of a few weights in place that no sample meets is not seen.
    """
    digest = hashlib.sha256()

    def add(part: bytes) -> None:  # length first, so that no two lists of parts read the same
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    for name, path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            add(name.encode())
            add(str(size).encode())
            if name.endswith(".safetensors"):
                add(file.read(min(int.from_bytes(file.read(8), "little"), SAFETENSORS_HEADER_BYTES_MAX)))
            for offset in sample_offsets(size):
                file.seek(offset)
                add(file.read(WEIGHTS_SAMPLE_BYTES))
    return digest.hexdigest()


def sample_offsets(size: int) -> list[int]:
    """Where the samples of a file of `size` bytes begin: all of a small file, else first to last, evenly spaced."""
    if size <= WEIGHTS_SAMPLES * WEIGHTS_SAMPLE_BYTES:
        return list(range(0, size, WEIGHTS_SAMPLE_BYTES))
    return [i * (size - WEIGHTS_SAMPLE_BYTES) // (WEIGHTS_SAMPLES - 1) for i in range(WEIGHTS_SAMPLES)]


def weights_changed(model: str, revision: str | None, since_ns: int, *, cache_dir: str | None = None) -> bool:
    """Whether these weights, or what else their identity speaks for, may have been others at that time, by the clock of
    their files (ctime: no copy sets it back).

    A folder that anything came into or went from since then counts as changed: of a weights file that was removed after
    the engine had loaded it nothing else tells, and what remains has the identity of a model without it. A model of the
    hub whose first download was since then has had no others; and where its name means another commit since then,
    nothing has changed if each commit that is here computes with the same files.
    """
    path = Path(model)
    if path.exists():
        if _HUB_SNAPSHOT.search(str(path.absolute())):
            return False
        files = [*_weights_files(path), *_settings_files(path)] if path.is_dir() else [path]
        times = (status.st_ctime_ns for file in files for status in (file.stat(), file.lstat()))
        return changed_ns(path, times) >= since_ns
    folder = _cached_repository(model, cache_dir)
    reference = folder / "refs" / (revision or "main")
    if not reference.is_file() or reference.stat().st_ctime_ns < since_ns:
        return False
    commits = [_computed_with(snapshot) for snapshot in (folder / "snapshots").iterdir()]
    return any(commit != commits[0] for commit in commits)


def _settings_files(folder: Path) -> Iterator[Path]:
    """Whose content, or what is made of it, is in the document beside the weights' identity."""
    return (path for path in folder.iterdir() if path.suffix in (".json", ".py") and path.is_file())


def _computed_with(snapshot: Path) -> dict[str, Path]:
    """The files of one commit in the hub's cache that reach a model's bytes, or may: where the content of each is. The
    cache keeps a content once, under its hash, for all commits."""
    found = {}
    for directory, _, names in os.walk(snapshot):
        for name in names:
            if not _DESCRIBES.search(name):
                path = Path(directory, name)
                found[str(path.relative_to(snapshot))] = path.resolve()
    return found


def process_started_ns() -> int:
    """When this process began, in ns of wall-clock time as it is now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    after_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")  # proc(5): starttime
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - after_boot_ns)


def _cached_repository(model: str, cache_dir: str | None) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(cache_dir or HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")


def _cached_commit(model: str, revision: str | None, cache_dir: str | None) -> str | None:
    folder = _cached_repository(model, cache_dir)
    revision = revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    return commit if re.fullmatch("[0-9a-f]{40}", commit) and (folder / "snapshots" / commit).is_dir() else None


# ---- the namespace


def attention_backend(vllm_config: "VllmConfig", layer_names: Sequence[str]) -> str:
    """Which code wrote the pages: the layers' backend, and on CPU the instruction set that it packs them for.

    Call it in the worker, after the KV cache was made: only then have the layers chosen.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for name in layer_names:
        layer = layers[name]
        instruction_set = getattr(layer, "isa", None)  # the CPU backend sets it, and names no other place to ask
        backend = layer.get_attn_backend().get_name()
        names.add(f"{backend}/{instruction_set}" if instruction_set else backend)
    return "+".join(sorted(names))


def namespace_document(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    *,
    kv_caches: Mapping[str, "torch.Tensor"],
    attention_backend: str,
    tp_lcm_size: int,
    heads: Sequence["PageHeads"] | None,
    group: int = 0,
    started_ns: int | None = None,
) -> dict[str, object]:
    """All that must be equal for chunks of this KV cache group to be interchangeable; the session adds chunk bytes and
    the seed's fingerprint. `kv_caches` is what vLLM registered: [blocks, heads, tokens, content] per layer.
    `heads` is each layer's, if the layout is free of how the ranks share them; None: chunks are of use only to engines
    that are split in the same way.

    ValueError when the weights cannot be identified, TypeError for a setting that has no single spelling.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

    config = build_offloading_config(vllm_config, kv_cache_config)
    group_config = config.groups[group]
    spec = kv_cache_config.kv_cache_groups[group_config.group_id].kv_cache_spec
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    tokens_per_block = group_config.tokens_per_block
    layers = list(group_config.layer_names)
    pages, page_of_layer = _pages(kv_caches, layers, kv_cache_config.num_blocks, heads)
    document: dict[str, object] = {
        "engine": ENGINE_FAMILY,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "model": _model(model, vllm_config.load_config, parallel),
        "rope": _fields(model.hf_text_config, _ROPE_FIELDS),
        "window": {
            **_fields(model.hf_text_config, _WINDOW_FIELDS),
            "disabled": bool(model.disable_sliding_window),
            "group": _plain(getattr(spec, "sliding_window", None) or 0, "sliding_window"),
        },
        "kv": {
            "dtype": pages[0]["dtype"],  # of the bytes; `cache_dtype` tells two formats of one width apart
            "cache_dtype": str(cache.cache_dtype).replace("auto", str(pages[0]["dtype"])),
            "unquantized_layers": sorted(cache.kv_cache_dtype_skip_layers or []),
            "quantization": _plain(getattr(spec, "kv_quant_mode", "none"), "kv_quant_mode"),
        },
        "tokens": {
            "hash": config.cache.tokens_per_hash,
            "block": tokens_per_block,
            "chunk": tokens_per_block * config.cache.blocks_per_chunk,
        },
        "group": {"index": group_config.group_id, "spec": type(spec).__name__, "layers": layers},
        "speculative": _speculative(vllm_config),
        "format": {
            "version": LAYOUT_FORMAT_VERSION,
            "tp_lcm_size": tp_lcm_size,
            "attention_backend": attention_backend,
            # Which implementation of an operation computes what goes into the pages: they round differently, and on the
            # CPU platform one of the rotary embedding is wrong. Final only once vLLM has chosen its compilation.
            "custom_ops": sorted(set(vllm_config.compilation_config.custom_ops)),
            "canonical": _canonical_format(kv_cache_config, cache),
            "pages": pages,
            "page_of_layer": page_of_layer,
        },
    }
    if states := _states(spec):
        document["states"] = states
    settings = {
        "by_length": _by_length(model),
        "code": _code(model),
        "multimodal": _multimodal(model),
        "arithmetic": _arithmetic(vllm_config),
    }
    document |= {name: fields for name, fields in settings.items() if fields}  # so that a plain engine's stays short
    if _has_weights_of_its_own(vllm_config, process_started_ns() if started_ns is None else started_ns):
        # vLLM's instance id alone has five hexadecimal digits.
        document["unshared"] = f"{config.engine_id}.{vllm_config.instance_id}"
    if heads is None:
        document["parallel"] = {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "context_interleave": parallel.cp_kv_cache_interleave_size,
            "ranks": parallel.world_size,
        }
    return document


def _states(spec: "KVCacheSpec") -> list[object]:
    """What a page of Mamba or linear attention is made of, each kind once: its size alone does not tell."""
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    states: list[object] = []
    for layer in iter_layer_specs(spec):
        if isinstance(layer, MambaSpec):
            state = _plain({"type": layer.mamba_type, "shapes": layer.shapes, "dtypes": layer.dtypes}, "states")
            if state not in states:
                states.append(state)
    return states


def _model(model: "ModelConfig", load_config: Any, parallel: Any) -> dict[str, object]:
    if load_config.load_format == "dummy":  # each rank draws its part of a tensor with the same fixed seed
        weights = f"dummy:tp{parallel.tensor_parallel_size}pp{parallel.pipeline_parallel_size}"
    elif _reads_elsewhere(model, load_config):
        weights = "elsewhere"
    else:
        weights = weights_identity(model.model, model.revision, cache_dir=load_config.download_dir)
        if chosen := _FORMATS_OF_THE_MODEL[load_config.load_format]:
            pattern = (load_config.model_loader_extra_config or {}).get("pattern", "")
            weights += f":{chosen}:{pattern}"
    return {
        "name": _model_name(model.model),
        "weights": weights,
        "config": _config_digest(model.hf_config),
        "dtype": _plain(model.dtype, "dtype"),
        "quantization": str(model.quantization or "none"),
        "quantization_config": _json_digest(_plain(model.quantization_config, "quantization_config")),
    }


def _model_name(model: str) -> str:
    """The same whether the engine was given the hub's name or, as vLLM does when offline, the folder in the cache."""
    path = Path(model)
    if not path.exists():
        return model
    snapshot = _HUB_SNAPSHOT.search(str(path.absolute()))
    if snapshot is not None:
        return snapshot["repository"].replace("--", "/")
    return path.resolve().name  # two containers may mount one folder at two places; the weights tell models apart


def adapter_settings(lora_config: Any) -> str:
    """All that reaches the KV bytes of a LoRA adapter beside its files and the model."""
    settings = _fields(lora_config, _ADAPTER_FIELDS)
    if "target_modules" in settings:
        settings["target_modules"] = sorted(set(settings["target_modules"]))
    return json.dumps(settings, sort_keys=True)


def _speculative(vllm_config: "VllmConfig") -> dict[str, object]:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return {}
    draft = speculative.draft_model_config
    load_config = speculative.draft_load_config or vllm_config.load_config
    return {
        "method": str(speculative.method),
        "tokens": speculative.num_speculative_tokens,
        "kv_dtype": str(speculative.kv_cache_dtype or "model's"),
        "model": {} if draft is None else _model(draft, load_config, vllm_config.parallel_config),
    }


def _reads_elsewhere(model: "ModelConfig", load_config: Any) -> str:
    """Where the weights come from, if not from the folder, file or repository that the model's name says; else ""."""
    if load_config.load_format not in _FORMATS_OF_THE_MODEL:
        return f"--load-format {load_config.load_format}"
    weights = getattr(model, "model_weights", "")
    if weights and weights != model.model:
        return f"--model-weights {weights}"
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true") and not Path(model.model).exists():
        return "ModelScope"
    return ""


def _has_weights_of_its_own(vllm_config: "VllmConfig", started_ns: int) -> bool:
    """Whether nobody can tell which weights the engine has. Asked last, when all of them have been read: what it has
    in memory is what lay there then, or what lay there before."""
    loaded = [(vllm_config.model_config, vllm_config.load_config)]
    if (speculative := vllm_config.speculative_config) and speculative.draft_model_config is not None:
        loaded.append((speculative.draft_model_config, speculative.draft_load_config or vllm_config.load_config))
    for model, load in loaded:
        if load.load_format == "dummy":
            continue
        if source := _reads_elsewhere(model, load):
            logger.warning(
                "kvstore: the weights of %s come from elsewhere (%s), where they cannot be told from others. This "
                "engine shares its chunks with no other one, nor with its own next start; to share them, give the "
                "folder that holds the weights as the model",
                model.model,
                source,
            )
            return True
        if weights_changed(model.model, model.revision, started_ns, cache_dir=load.download_dir):
            logger.warning(
                "kvstore: the weights of %s were changed after this process had begun, so it may have loaded others. "
                "This engine shares its chunks with no other one, nor with its own next start; start it again to share "
                "them, in a process that begins after the weights are there",
                model.model,
            )
            return True
    return False


def _by_length(model: "ModelConfig") -> dict[str, object]:
    """What vLLM computes otherwise, for every token, by the longest request that the engine takes (--max-model-len)."""
    found: dict[str, object] = {}
    for kind, short in _ropes(model.hf_text_config):
        if kind in _LONGROPE_TYPES:
            found["longrope"] = model.max_model_len > short if short else model.max_model_len
    if str(getattr(model.hf_text_config, "model_type", "")).startswith("llama4"):
        found["llama4_temperature"] = model.max_model_len > _LLAMA4_TUNED_ABOVE
    return found


def _ropes(text_config: Any) -> Iterator[tuple[str, int]]:
    """Each kind of rotary embedding, one of a layer type's own included, and the length that it was trained for (0: not
    known)."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if not isinstance(rope, Mapping):
        return  # of foreign code, which the document names
    for each in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        kind = str(each.get("rope_type") or each.get("type") or "")
        trained = [getattr(text_config, "original_max_position_embeddings", None)]
        if kind not in _LONGROPE_TYPES:
            trained.append(getattr(text_config, "max_position_embeddings", None))
        yield kind, next(filter(None, [each.get("original_max_position_embeddings"), *trained]), 0)


def rescales_by_batch(model: "ModelConfig") -> bool:
    """Whether K depends on how long the other requests of a step are: Transformers' own rotary embeddings of these
    kinds choose their frequencies by the largest position they are given."""
    return model.using_transformers_backend() and any(
        (kind in _LONGROPE_TYPES or "dynamic" in kind) and model.max_model_len > trained
        for kind, trained in _ropes(model.hf_text_config)
    )


def _code(model: "ModelConfig") -> dict[str, object]:
    """Whose code computes, where it is not vLLM's own for the model's architecture."""
    found: dict[str, object] = {}
    if model.model_class_overrides:
        found["overrides"] = _plain(model.model_class_overrides, "model_class_overrides")
    if model.trust_remote_code:
        found["revision"] = model.code_revision or "model's"
        found["files"] = _folder_digest(model.model, re.compile(r"\.py$"))
    return found


def _multimodal(model: "ModelConfig") -> dict[str, object]:
    """What vLLM makes of an image, a video or a sound, which the hash in a block's key does not say."""
    if model.multimodal_config is None:
        return {}
    return {
        **_fields(model.multimodal_config, _MULTIMODAL_FIELDS),
        "files": _folder_digest(model.model, re.compile(r"processor.*\.json$|^tekken\.json$")),
    }


def _folder_digest(model: str, names: re.Pattern[str]) -> str:
    """Of those files of a local model folder; "" where the revision says it: a model of the hub."""
    folder = Path(model)
    if not folder.is_dir() or _HUB_SNAPSHOT.search(str(folder.absolute())):
        return ""
    return _weights_digest((path.name, path) for path in sorted(folder.iterdir()) if names.search(path.name))


def _arithmetic(vllm_config: "VllmConfig") -> dict[str, object]:
    found: dict[str, object] = {name: os.environ[name] for name in _ARITHMETIC_VARIABLES if name in os.environ}
    found |= {name: True for name in _QUERY_ROUNDING if getattr(vllm_config.attention_config, name, False)}
    if (indexer := vllm_config.attention_config.indexer_kv_dtype) != "auto":
        found["indexer_kv_dtype"] = str(indexer)
    return found


def _pages(
    kv_caches: Mapping[str, "torch.Tensor"], layers: Sequence[str], num_blocks: int, heads: Sequence["PageHeads"] | None
) -> tuple[list[dict[str, object]], list[int]]:
    """How one block of each layer lies in memory: the distinct descriptions, and which of them each layer has.

    Where the layout is free of the ranks, a page is the one of all heads: a head's bytes lie together, so sizes and
    rows say where each byte is.
    """
    pages: list[dict[str, object]] = []
    page_of_layer = []
    for i, name in enumerate(layers):
        tensor = kv_caches[name]
        shape, strides = list(tensor.shape[1:]), list(tensor.stride()[1:])
        page: dict[str, object] = {
            "kernel_blocks": tensor.shape[0] // num_blocks,
            "dtype": _plain(tensor.dtype, "dtype"),
        }
        if heads is None or (dimension := heads[i].dimension) is None:
            page |= {"shape": shape, "strides": strides}
        else:
            shape[dimension - 1] = heads[i].heads
            page |= {"shape": shape, "rows": heads[i].rows}
        if page not in pages:
            pages.append(page)
        page_of_layer.append(pages.index(page))
    return pages, page_of_layer


def _canonical_format(kv_cache_config: "KVCacheConfig", cache: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
    from vllm.platforms import current_platform
    from vllm.version import __version__

    layout = kv_cache_config.kv_cache_layout or cache.kv_cache_layout
    if layout is None:
        raise ValueError("the engine has not resolved its KV cache layout yet; the namespace is made when it has")
    # How a backend's kernels order a page's bytes is their own affair and has no version of its own: vLLM 0.33 has the
    # records of DeepSeek V4.1 in another order than 0.32, under the same names and in pages of the same size.
    return f"{canonical_format_id(layout)}-{layout}-{current_platform.device_type}-{__version__}"


def _fields(config: Any, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in names}
    return {name: _plain(value, name) for name, value in values.items() if value is not None}


def _config_digest(hf_config: Any) -> str:
    """Of the whole model configuration, overrides included: any of it (a norm's epsilon, a multiplier) may reach KV."""
    return _json_digest(_plain({k: v for k, v in hf_config.to_dict().items() if k not in _NOT_IDENTITY}, "hf_config"))


def _json_digest(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def _plain(value: Any, where: str) -> Any:
    """`value` in strings, integers, booleans, lists and objects. TypeError for what has no spelling of its own: its
    `repr` could hold an address, and then no two engines would ever share a chunk."""
    match value:
        case None:
            return "none"
        case enum.Enum():
            return value.name
        case str() | bool() | int():
            return value
        case float():
            return repr(value)
        case Mapping():
            return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case set() | frozenset():
            return sorted(_plain(item, where) for item in value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value), where)
    if callable(getattr(value, "to_dict", None)):  # nested model configurations
        return _plain({k: v for k, v in value.to_dict().items() if k not in _NOT_IDENTITY}, where)
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump(), where)
    raise TypeError(f"the namespace cannot spell {where} = {value!r} ({type(value).__name__})")
