"""Sizes and break-evens before anything runs: from a model's configuration or an engine's log. Pure, no I/O.

Bytes a token: of the whole model (what the store holds) and on one rank (what a rank's link moves). They differ by the
tensor parallel size, except where every rank holds the same: MLA latents, and heads that are fewer than the ranks.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore import costmodel
from kvstore.costmodel import BreakEven, KVSize, RecomputeModel, TransferModel
from kvstore.errors import ConfigurationError
from kvstore.limits import WORLD_SIZE_MAX
from kvstore.profiles import Disk, Geometry, Gpu, Prefill
from kvstore.profiles.machine import Known, Machine

KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_ds_mla")
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
BLOCK_TOKENS = 16  # of vLLM on CUDA by default
STATE_SLOTS = 4  # of recurrent state that one request of a hybrid model holds
GPU_MEMORY_UTILIZATION = 0.92  # vLLM's default, a share of the GPU's whole memory
# How long chunks must be kept for those that come back to be found: 9 of 10 and 99 of 100 in a day's conversations.
CPU_WINDOW_S, FS_WINDOW_S = 519.0, 1578.0
DRIVE_BYTES = 7.68e12

_FIELD_MAX = 1 << 24  # of a configuration's numbers: beyond that it is none of a model
_LAYER_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")
# Where one of these is set, layers hold something else than heads of one size each, or share it.
_OTHER_KV = ("block_configs", "compress_ratios", "global_head_dim", "hybrid_layer_pattern", "num_kv_shared_layers")
# Without layer_types these say which layers hold a state.
_OTHER_LAYERS = (
    "mamba_d_state", "ssm_cfg", "state_size", "hybrid_override_pattern", "full_attn_idxs", "layer_group_size",
    "layers_block_type",
)  # fmt: skip
_PACKED_SCALE_TOKENS = 128  # of an MLA latent that share one scale of 4 bytes where vLLM packs it
_INDEXER_SCALE_BYTES = 4
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class Layout:
    """KV of one model. `state_bytes_on_rank`: what a request holds however long it is, all its slots.

    For sliding windows that is the window, for linear attention the recurrent and convolution state. `knows_states`
    false: nothing says whether there are any, and they are counted as none.
    """

    kv_bytes_per_token: float
    kv_bytes_per_token_on_rank: float
    state_slot_bytes_on_rank: int
    state_slots: int
    window_bytes_on_rank: int
    replicated: bool
    geometry: Geometry | None
    note: str
    growing_layers: int  # whose KV grows with the prompt
    knows_states: bool = True

    @property
    def fragment_bytes(self) -> int:
        """Of one layer's block on one rank, which is what a copy has in one piece."""
        return round(self.kv_bytes_per_token_on_rank / max(1, self.growing_layers) * BLOCK_TOKENS)

    @property
    def state_bytes_on_rank(self) -> int:
        return self.state_slot_bytes_on_rank * self.state_slots + self.window_bytes_on_rank

    @property
    def on_rank(self) -> KVSize:
        """What a rank moves for a load: one state slot, for only the last checkpoint is needed."""
        return KVSize(self.kv_bytes_per_token_on_rank, self.state_slot_bytes_on_rank + self.window_bytes_on_rank)

    def from_disk(self, tp_size: int) -> KVSize:
        """What a rank's load from disk takes as long as, at the rate of its share of the tokens' bytes (`from_disk`):
        the disk delivers the states of all ranks, and each rank's is its own."""
        share = self.kv_bytes_per_token_on_rank / self.kv_bytes_per_token
        states = max(self.state_slot_bytes_on_rank, round(self.state_slot_bytes_on_rank * tp_size * share))
        return KVSize(self.kv_bytes_per_token_on_rank, states + self.window_bytes_on_rank)

    def prompt_bytes(self, tp_size: int) -> int:
        """Kept of a prompt beside its tokens' KV, all ranks together: one state, and the windows at its end."""
        windows = self.window_bytes_on_rank * self.kv_bytes_per_token / self.kv_bytes_per_token_on_rank
        return self.state_slot_bytes_on_rank * tp_size + round(windows)

    def request_bytes_on_rank(self, token_count: int) -> float:
        """What the engine holds for one request of that length."""
        return self.kv_bytes_per_token_on_rank * token_count + self.state_bytes_on_rank


# -- from config.json -------------------------------------------------------------------------------------------------


def layout_from_config(
    config: Mapping[str, object], *, kv_dtype: str = "auto", tp_size: int = 1, state_slots: int = STATE_SLOTS
) -> Layout:
    """Of a Hugging Face `config.json`. ConfigurationError: a field is missing, or its attention is not known here."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigurationError(f"--kv-dtype is one of {', '.join(KV_DTYPES)}, not '{kv_dtype}'")
    fields = _text_fields(config)
    layers = fields.count("num_hidden_layers")
    if (why := unknown_layers(config)) is not None:
        raise ConfigurationError(f"{why}; give the engine's log too (--engine-log, of `kvstore plan`)")
    kinds = _layer_kinds(fields, layers)
    model_bytes = _DTYPE_BYTES.get(fields.text("dtype", "torch_dtype", default="bfloat16"), 2)
    element_bytes = {"auto": model_bytes, "bfloat16": 2}.get(kv_dtype, 1)
    state_slot = _state_slot_bytes(fields, kinds.count("linear"), tp_size, model_bytes)
    slots = state_slots if state_slot else 0
    geometry = geometry_from_config(config)
    full, sliding = kinds.count("full"), kinds.count("sliding")
    if fields.has("kv_lora_rank"):
        latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
        sparse = fields.has("index_topk")
        packed = kv_dtype == "fp8_ds_mla" or (kv_dtype == "fp8" and sparse)
        layer_bytes = (
            latent + 4 * -(-latent // _PACKED_SCALE_TOKENS) + 2 * rope if packed else (latent + rope) * element_bytes
        )
        total = full * layer_bytes
        note = f"{full} MLA layers of {layer_bytes} bytes" + (" (packed)" if packed else "")
        if sparse:
            indexers = _indexer_layers(fields, layers)
            indexer_bytes = fields.count("index_head_dim", default=128) + _INDEXER_SCALE_BYTES
            total += indexers * indexer_bytes
            note += f", {indexers} indexers of {indexer_bytes}"
        return Layout(total, total, state_slot, slots, 0, True, geometry, note + _state_note(kinds, state_slot), full)
    if kv_dtype == "fp8_ds_mla":
        raise ConfigurationError("fp8_ds_mla is a format of MLA models; this model has none: use fp8 or auto")
    kv_heads, head_dim = geometry.kv_heads, geometry.head_dim
    head_bytes = 2 * head_dim * element_bytes
    rank_heads = -(-kv_heads // tp_size)
    window_bytes = 0
    if sliding:
        window_bytes = sliding * fields.count("sliding_window") * rank_heads * head_bytes
    note = f"{full} layers of {kv_heads} KV heads of {head_dim}"
    if sliding:
        note += f", {sliding} of a window of {fields.count('sliding_window')}"
    return Layout(
        full * kv_heads * head_bytes,
        full * rank_heads * head_bytes,
        state_slot,
        slots,
        window_bytes,
        False,
        geometry,
        note + _state_note(kinds, state_slot),
        full,
    )


def geometry_from_config(config: Mapping[str, object]) -> Geometry:
    """Of a `config.json` whose layers need not be known here. ConfigurationError: a field is missing."""
    fields = _text_fields(config)
    layers, hidden = fields.count("num_hidden_layers"), fields.count("hidden_size")
    if fields.has("kv_lora_rank"):
        linear = fields.part("linear_attn_config")
        hybrid = fields.is_set("linear_num_value_heads") or (linear is not None and linear.is_set("kda_layers"))
        attention = "sparse_mla" if fields.has("index_topk") else "hybrid_mla" if hybrid else "mla"
        width = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
        return Geometry(layers, hidden, 1, width, attention)
    heads = fields.count("num_attention_heads")
    named = next((name for name in _KV_HEADS if fields.has(name)), None)
    kv_heads = fields.count(named) if named is not None else heads
    if fields.is_set("multi_query") and not fields.is_set("new_decoder_architecture"):
        kv_heads = 1
    return Geometry(layers, hidden, kv_heads, fields.count("head_dim", default=max(1, hidden // heads)), "gqa")


def longest_from_config(config: Mapping[str, object]) -> int | None:
    """Tokens that the model takes, prompt and answer, as far as its positions are stretched; None: it does not say."""
    fields = _text_fields(config)
    if not fields.has("max_position_embeddings"):
        return None
    longest = fields.count("max_position_embeddings")
    for name in ("rope_scaling", "rope_parameters"):
        stretch = fields.part(name)
        if stretch is not None and stretch.has("factor"):
            longest = max(
                longest, stretch.stretched(stretch.number("original_max_position_embeddings", default=longest))
            )
    return longest


def require_tp_size(config: Mapping[str, object], tp_size: int) -> None:
    """ConfigurationError for a tensor parallel size that vLLM refuses for this model."""
    fields = _text_fields(config)
    heads = fields.number("num_attention_heads", default=0)
    if heads <= 0:
        return
    kv_heads = max(1, geometry_from_config(config).kv_heads)

    def serves(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not serves(tp_size):
        sizes = ", ".join(str(size) for size in range(1, min(heads, WORLD_SIZE_MAX) + 1) if serves(size))
        raise ConfigurationError(
            f"--tp is {tp_size}, and vLLM serves the model's {heads} attention heads ({kv_heads} of KV) with none but "
            f"{sizes}; give one of these"
        )


def unknown_layers(config: Mapping[str, object]) -> str | None:
    """Why it cannot be told from the configuration what each layer holds; None: it can."""
    fields = _text_fields(config)
    for name in _OTHER_KV:
        if fields.is_set(name):
            return f"what layers of a model with {name} hold is not known here"
    layers, listed = fields.count("num_hidden_layers"), fields.items("layer_types")
    linear = fields.part("linear_attn_config")
    if linear is not None and linear.items("kda_layers"):
        state_layers = len(linear.items("kda_layers"))
        return None if state_layers <= layers else f"linear_attn_config lists {state_layers} of {layers} layers"
    if listed:
        unknown = {str(name) for name in listed} - set(_LAYER_TYPES)
        if unknown:
            return f"layers of type {', '.join(sorted(unknown))} are not known here"
        return None if len(listed) >= layers else f"layer_types lists {len(listed)} of {layers} layers"
    if any(kind != 1 for kind in fields.items("attn_type_list")):
        return "a model with attn_type_list holds a state whose size is not known here"
    if fields.has("attention_chunk_size") or fields.text("model_type", default="").startswith("llama4"):
        return "which layers have chunked attention (attention_chunk_size) is not known without layer_types"
    if fields.has("linear_num_value_heads"):
        return None
    for name in _OTHER_LAYERS:
        if fields.is_set(name):
            return f"a model with {name} holds a state whose size is not known here"
    return None


def _text_fields(config: Mapping[str, object]) -> "_Fields":
    text = config.get("text_config")
    return _Fields(text if isinstance(text, Mapping) else config)


class _Fields:
    """A configuration's fields, their absence and their nonsense as sentences."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def count(self, name: str, *, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _FIELD_MAX:
            raise ConfigurationError(
                f"the model's configuration has {name}={value!r} where a positive whole number is needed; "
                "give the engine's log instead (--engine-log)"
            )
        return value

    def text(self, *names: str, default: str) -> str:
        for name in names:
            value = self._values.get(name)
            if isinstance(value, str):
                return value.removeprefix("torch.")
        return default

    def items(self, name: str) -> Sequence[object]:
        value = self._values.get(name)
        return value if isinstance(value, list) else ()

    def part(self, name: str) -> "_Fields | None":
        value = self._values.get(name)
        return _Fields(value) if isinstance(value, Mapping) else None

    def number(self, name: str, *, default: int) -> int:
        """A whole number of any sign, zero included."""
        value = self._values.get(name)
        return value if isinstance(value, int) else default

    def stretched(self, tokens: int) -> int:
        """By the factor of this part, where it is one."""
        factor = self._values.get("factor")
        return int(tokens * factor) if isinstance(factor, int | float) and 0 < factor <= _FIELD_MAX else tokens

    def is_set(self, name: str) -> bool:
        return bool(self._values.get(name))

    def is_off(self, name: str) -> bool:
        return self._values.get(name) is False


def _layer_kinds(fields: _Fields, layers: int) -> list[str]:
    """For each layer: full, sliding or linear. For configurations without `unknown_layers`."""
    linear = fields.part("linear_attn_config")
    if linear is not None and linear.items("kda_layers"):
        state = len(linear.items("kda_layers"))
        return ["linear"] * state + ["full"] * (layers - state)
    listed = fields.items("layer_types")
    if listed:  # those beyond the model's own are of the layers that draft
        return [_LAYER_TYPES[str(name)] for name in listed[:layers]]
    if fields.has("linear_num_value_heads"):
        interval = fields.count("full_attention_interval", default=4)
        return ["linear" if (index + 1) % interval else "full" for index in range(layers)]
    if fields.has("sliding_window") and not fields.is_off("use_sliding_window"):
        return ["sliding"] * layers
    return ["full"] * layers


def _state_slot_bytes(fields: _Fields, state_layers: int, tp_size: int, model_bytes: int) -> int:
    """Recurrent state and convolution window of all linear-attention layers, on one rank."""
    if not state_layers:
        return 0
    kimi = fields.part("linear_attn_config")
    if kimi is not None:
        heads, head_dim = kimi.count("num_heads"), kimi.count("head_dim")
        recurrent, channels = heads * head_dim * head_dim, 3 * heads * head_dim
        kernel, state_bytes = kimi.count("short_conv_kernel_size", default=4), model_bytes
    else:
        key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
        key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
        recurrent, channels = value_heads * key_dim * value_dim, 2 * key_heads * key_dim + value_heads * value_dim
        kernel = fields.count("linear_conv_kernel_dim", default=4)
        state_bytes = _DTYPE_BYTES.get(fields.text("mamba_ssm_dtype", default=""), model_bytes)
    per_layer = -(-recurrent // tp_size) * state_bytes + -(-channels // tp_size) * (kernel - 1) * model_bytes
    return state_layers * per_layer


def _indexer_layers(fields: _Fields, layers: int) -> int:
    """Layers that keep keys of their own for choosing what to attend to; the others use the choice of one above."""
    listed = fields.items("indexer_types")
    if listed:
        return sum(kind == "full" for kind in listed)
    pattern = fields.text("index_topk_pattern", default="")
    if pattern:
        return pattern.count("F")
    interval = fields.count("index_topk_freq", default=1)
    offset = fields.number("index_skip_topk_offset", default=2)
    return sum(max(index - offset + 1, 0) % interval == 0 for index in range(layers))


def _state_note(kinds: Sequence[str], state_slot: int) -> str:
    return f", {kinds.count('linear')} layers with a state of {state_slot} bytes a slot on a rank" if state_slot else ""


# -- from an engine's log ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLog:
    """What an engine said at its start. The memory is one rank's, the tokens are the engine's."""

    kv_bytes_per_token_on_rank: float
    kv_cache_tokens: int
    tp_size: int
    model: str | None
    kv_dtype: str
    step_tokens: int | None
    longest_tokens: int | None = None  # that the engine takes, prompt and answer
    says_tp_size: bool = True  # else it is taken to be 1


_GIB = r"(\d[\d,]*(?:\.\d+)?)"
# How much memory the KV cache of a rank gets: as an engine on CUDA says it, the same where --kv-cache-memory-bytes set
# it, and an engine on the CPU platform.
_MEMORY_LINES = (
    rf"Available KV cache memory: {_GIB} GiB",
    rf"reserved {_GIB} GiB memory for KV Cache",
    rf"(?:Auto|Explicitly) set \({_GIB}/[\d.,]+\) GiB for KV cache",
)


def read_engine_log(text: str) -> EngineLog:
    """ConfigurationError: the two lines that say memory and tokens are not in it."""
    memories = [float(found.replace(",", "")) for line in _MEMORY_LINES for found in _find(line, text)]
    sizes = [int(found.replace(",", "")) for found in _find(r"KV cache size: (\d[\d,]*) tokens", text)]
    memory_line = "'Available KV cache memory: ... GiB' (on the CPU platform 'Auto set (.../...) GiB for KV cache')"
    missing = [
        line
        for line, found in ((memory_line, memories), ("'... KV cache size: ... tokens'", sizes))
        if not found or found[-1] <= 0
    ]
    if missing:
        raise ConfigurationError(
            f"the engine's log has no line {' and none '.join(missing)}; give the whole log of one start at log level "
            "INFO, or the model's config.json (--config)"
        )
    # Ranks may have a little more or less; the engine takes the least, and of that what --num-gpu-blocks-override says.
    overrides = re.findall(r"Overriding num_gpu_blocks=(\d+) with num_gpu_blocks_override=([1-9]\d*)", text)
    used_share = int(overrides[-1][1]) / max(1, int(overrides[-1][0])) if overrides else 1.0
    bytes_per_token = min(memories) * 2**30 * used_share / sizes[-1]
    tp_sizes = _find(r"tensor_parallel_size=([1-9]\d*)", text)
    models = _find(r"\bmodel='([^']+)'", text)
    dtypes = _find(r"kv_cache_dtype=(\w+)", text)
    steps = _find(r"max_num_batched_tokens=([1-9]\d*)", text)
    lengths = _find(r"max_seq_len=([1-9]\d*)", text)
    return EngineLog(
        bytes_per_token,
        sizes[-1],
        int(tp_sizes[-1]) if tp_sizes else 1,
        models[-1] if models else None,
        dtypes[-1] if dtypes else "auto",
        int(steps[-1]) if steps else None,
        int(lengths[-1]) if lengths else None,
        says_tp_size=bool(tp_sizes),
    )


def _find(pattern: str, text: str) -> list[str]:
    return re.findall(pattern, text)


def layout_from_log(log: EngineLog, known: Layout | None, geometry: Geometry | None) -> Layout:
    """The log's bytes; the rest from the configuration, where one was given too. A log's bytes a token are those of a
    request of the longest length, its windows and states included, so a configuration with such layers says better
    what a token takes; of a log alone nothing says whether there are any."""
    on_rank = log.kv_bytes_per_token_on_rank
    said = f"the engine's log: {log.kv_cache_tokens} tokens, {on_rank:.0f} bytes each on a rank"
    if known is not None and known.state_bytes_on_rank > 0:
        return replace(known, note=f"{known.note}; {said}, windows and states included")
    replicated = known.replicated if known is not None else geometry is not None and geometry.kv_heads == 1
    geometry = known.geometry if known is not None else geometry
    ranks: float = log.tp_size
    if geometry is not None:  # heads fewer than the ranks are held more than once, and stored once
        ranks = geometry.kv_heads / -(-geometry.kv_heads // log.tp_size)
    layers = geometry.layers if geometry is not None else 1
    return Layout(
        on_rank if replicated else on_rank * ranks,
        on_rank,
        0,
        0,
        0,
        replicated,
        geometry,
        said,
        known.growing_layers if known is not None else layers,
        knows_states=known is not None,
    )


# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Length:
    tokens: int
    recompute_s: float
    load_s: float
    bytes_per_s_to_break_even: float

    @property
    def loads(self) -> bool:
        return self.load_s < self.recompute_s


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier. `needed_bytes` keeps every new token for `window_s`; `capacity_bytes` is what the operator named.

    `wins_between`: between the two bounds of the break-even a load wins too, where a step of the engine has just begun.
    """

    name: str
    link: TransferModel
    link_is_measured: bool
    break_even: BreakEven
    wins_between: bool
    lengths: tuple[Length, ...]
    window_s: float
    needed_bytes: float
    capacity_bytes: int | None

    @property
    def pays_from_tokens(self) -> int | None:
        """The least whole length from which on every load is quicker; 0: always, None: there is none."""
        bound = self.break_even.wins_from_tokens
        return None if math.isinf(bound) else math.floor(bound) + 1 if bound >= 1 else 0

    @property
    def pays_below_tokens(self) -> int:
        """Every whole length below it is quicker to load too; 0: none."""
        below = math.ceil(self.break_even.wins_below_tokens)
        return below if below > 1 else 0

    def tokens(self, kv_bytes_per_token: float) -> int | None:
        return None if self.capacity_bytes is None else int(self.capacity_bytes / kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every `..._per_s` is the engine's: all its ranks together. Sizes, the tokens they hold and the wear are of KV by
    the token, without the layout's `prompt_bytes`."""

    layout: Layout
    tp_size: int
    machine: Machine
    prefill: Prefill
    tiers: tuple[TierPlan, ...]
    tokens_per_s: float
    tokens_per_s_is_measured: bool
    new_share: float
    drive_bytes: float
    longest_tokens: int | None  # that the model takes; None: not known

    @property
    def write_bytes_per_s(self) -> float:
        """Written to disk when every new chunk is, which is the most there can be."""
        return self.tokens_per_s * self.new_share * self.layout.kv_bytes_per_token

    @property
    def drive_writes_per_day(self) -> float:
        return costmodel.drive_writes_per_day(self.write_bytes_per_s, self.drive_bytes)

    def document(self) -> dict[str, object]:
        """For `--json`. A break-even of null: a load never wins from any length on; of 0: from every one. States of
        null: nothing says whether there are any."""
        layout = self.layout
        return {
            "kv_bytes_per_token": _number(layout.kv_bytes_per_token),
            "kv_bytes_per_token_on_rank": _number(layout.kv_bytes_per_token_on_rank),
            "state_slot_bytes_on_rank": layout.state_slot_bytes_on_rank if layout.knows_states else None,
            "state_bytes_on_rank": layout.state_bytes_on_rank if layout.knows_states else None,
            "prompt_bytes_not_counted": layout.prompt_bytes(self.tp_size) if layout.knows_states else None,
            "tp_size": self.tp_size,
            "longest_tokens": self.longest_tokens,
            "layout": layout.note,
            "prefill_source": self.prefill.source,
            "gpu": None if self.machine.gpu is None else _gpu_document(self.machine.gpu),
            **self.machine.document(),
            "requests": [
                {"tokens": tokens, "bytes_on_rank": _number(layout.request_bytes_on_rank(tokens))} for tokens in LENGTHS
            ],
            "break_even": {tier.name: _tier_document(tier) for tier in self.tiers},
            "tiers": [
                {
                    "name": tier.name,
                    "capacity_bytes": tier.capacity_bytes,
                    "tokens": tier.tokens(layout.kv_bytes_per_token),
                    "suggested_bytes": _number(tier.needed_bytes),
                    "suggested_for_s": tier.window_s,
                }
                for tier in self.tiers
            ],
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_is_measured": self.tokens_per_s_is_measured,
            "new_share": self.new_share,
            "disk_wear": {
                "write_bytes_per_s": self.write_bytes_per_s,
                "write_bytes_per_day": self.write_bytes_per_s * 86_400,
                "drive_bytes": self.drive_bytes,
                "drive_writes_per_day": self.drive_writes_per_day,
            },
        }


def make_plan(
    layout: Layout,
    prefill: Prefill,
    machine: Machine,
    *,
    tp_size: int,
    step_tokens: int | None = None,
    chunk_tokens: int = 512,
    tokens_per_s: float | None = None,
    new_share: float = 1.0,
    cpu_bytes: int | None = None,
    fs_bytes: int | None = None,
    drive_bytes: float = DRIVE_BYTES,
    longest_tokens: int | None = None,
) -> Plan:
    """`tokens_per_s`: prompt tokens a second, as measured; None: as fast as it can prefill prompts of 8,192 tokens, the
    most there can be. `new_share`: of them that no cache holds."""
    refuse_without_growth(layout)
    model = prefill.recompute_model(step_tokens=step_tokens)
    rate = tokens_per_s if tokens_per_s is not None else 8192 / costmodel.recompute_s(model, 0, 8192)
    bytes_per_s = rate * new_share * layout.kv_bytes_per_token
    link, measured = machine.link, machine.link_source.known is not Known.ASSUMED
    both = from_disk(layout, machine.disk, link, chunk_tokens)
    tiers = (
        _tier("cpu", link, model, layout.on_rank, CPU_WINDOW_S, bytes_per_s, cpu_bytes, measured=measured),
        _tier("fs", both, model, layout.from_disk(tp_size), FS_WINDOW_S, bytes_per_s, fs_bytes, measured=measured),
    )
    is_measured = tokens_per_s is not None
    return Plan(layout, tp_size, machine, prefill, tiers, rate, is_measured, new_share, drive_bytes, longest_tokens)


def refuse_without_growth(layout: Layout) -> None:
    """ConfigurationError for a model whose KV does not grow with the prompt: no answer here fits it."""
    if not layout.kv_bytes_per_token > 0:
        raise ConfigurationError(
            "in the model's configuration every layer has a window or a state, so what a request holds does not grow "
            f"with its prompt ({layout.note}); if that is wrong, as where only layer_types would say which layers have "
            "a window, give the engine's log too (--engine-log, of `kvstore plan`)"
        )


def from_disk(layout: Layout, disk: Disk, link: TransferModel, chunk_tokens: int) -> TransferModel:
    """Disk to host memory to one rank's GPU."""
    # The disk delivers every rank's bytes; seen from one rank it is slower by their ratio.
    share = layout.kv_bytes_per_token_on_rank / layout.kv_bytes_per_token
    on_rank = TransferModel(disk.read.bytes_per_s * share, disk.read.overhead_s, disk.read.descriptor_s)
    return costmodel.pipelined(on_rank, link, round(layout.kv_bytes_per_token_on_rank * chunk_tokens))


def _tier(
    name: str,
    link: TransferModel,
    model: RecomputeModel,
    kv: KVSize,
    window_s: float,
    bytes_per_s: float,
    capacity_bytes: int | None,
    *,
    measured: bool,
) -> TierPlan:
    lengths = tuple(
        Length(
            tokens,
            costmodel.recompute_s(model, 0, tokens),
            costmodel.transfer_s(link, kv.of(tokens)),
            costmodel.bytes_per_s_to_break_even(model, kv, tokens, link.overhead_s),
        )
        for tokens in LENGTHS
    )
    even = break_even(model, link, kv)
    between = _wins_between(model, link, kv, even)
    return TierPlan(name, link, measured, even, between, lengths, window_s, bytes_per_s * window_s, capacity_bytes)


def break_even(model: RecomputeModel, link: TransferModel, kv: KVSize) -> BreakEven:
    """As `costmodel.break_even`, but of as many steps of the engine as a prompt takes.

    Below the one bound and above the other every load wins; between them the ends of the steps lose.
    """
    if model.step_tokens is None:
        return costmodel.break_even(model, link, kv)
    size = model.step_tokens
    # A recompute time that rises evenly by what the steps cost is the true one at every step's end, and less elsewhere:
    # nothing loses beyond its break-even, and every step's end before that does. The last to lose is thus in the step
    # that its break-even is in, or the end of the one before.
    evenly = replace(model, step_s=0.0, token_s=model.token_s + model.step_s / size)
    bound = costmodel.break_even(evenly, link, kv).wins_from_tokens
    below = costmodel.break_even(model, link, kv).wins_below_tokens
    if bound == 0 or math.isinf(bound):
        return BreakEven(0.0 if bound == 0 else below, bound)
    steps = math.ceil(bound / size)
    last = costmodel.break_even(replace(model, step_s=model.step_s * steps), link, kv)
    last_begins, last_losing = (steps - 1) * size, min(last.wins_from_tokens, steps * size)
    found = float(last_losing if max(last.wins_below_tokens, last_begins) < last_losing else last_begins)
    return BreakEven(below if found > 0 else 0.0, found)


def _wins_between(model: RecomputeModel, link: TransferModel, kv: KVSize, even: BreakEven) -> bool:
    size = model.step_tokens
    if size is None or even.wins_from_tokens <= size:
        return False
    # What a step's first token gains is largest in the first or in the last of them.
    starts = [size + 1]
    if math.isfinite(even.wins_from_tokens):
        starts.append((math.ceil(even.wins_from_tokens / size) - 1) * size + 1)
    return any(costmodel.transfer_s(link, kv.of(start)) < costmodel.recompute_s(model, 0, start) for start in starts)


def gpu_memory(gpu: Gpu) -> tuple[float, float] | None:
    """(what systems with this GPU offer, vLLM's share of it at its default), in bytes; None: not in the profile."""
    whole = gpu.usable_bytes if gpu.usable_bytes is not None else gpu.memory_bytes
    return None if whole is None else (whole, whole * GPU_MEMORY_UTILIZATION)


def _gpu_document(gpu: Gpu) -> dict[str, object]:
    memory = gpu_memory(gpu)
    return {
        "name": gpu.name,
        "link": gpu.link.name,
        "link_is_measured": gpu.link.measured,
        "link_spec_bytes_per_s": gpu.link.spec_bytes_per_s,
        "memory_bytes": gpu.memory_bytes,
        "usable_bytes": None if memory is None else memory[0],
        "engine_bytes": None if memory is None else memory[1],
    }


def _tier_document(tier: TierPlan) -> dict[str, object]:
    return {
        "tokens": tier.pays_from_tokens,
        "below_tokens": tier.pays_below_tokens,
        "between_at_step_starts": tier.wins_between,
        "link_bytes_per_s": tier.link.bytes_per_s,
        "link_overhead_s": tier.link.overhead_s,
        "link_is_measured": tier.link_is_measured,
        "lengths": [
            {
                "tokens": length.tokens,
                "recompute_s": length.recompute_s,
                "load_s": length.load_s,
                "loads": length.loads,
                "bytes_per_s_to_break_even": _finite(length.bytes_per_s_to_break_even),
            }
            for length in tier.lengths
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
