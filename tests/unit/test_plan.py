"""Sizes that a planner must get right, from configurations and from logs, and what the command prints."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from kvstore import costmodel, plan, profiles
from kvstore.cli import app
from kvstore.errors import ConfigurationError
from kvstore.profiles import measured
from kvstore.profiles.machine import find_machine
from tests.unit.reference import reference_rows

MIB = 2**20

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
QWEN3_235B = {
    "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32 = {**DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
GLM_52 = {
    **DEEPSEEK_V32, "num_hidden_layers": 78, "hidden_size": 6144,
    "index_topk_freq": 4, "index_skip_topk_offset": 3,
}  # fmt: skip
KIMI_K3: dict[str, object] = {
    "text_config": {
        "num_hidden_layers": 93, "hidden_size": 7168, "num_attention_heads": 96, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "dtype": "bfloat16",
        "linear_attn_config": {
            "kda_layers": list(range(1, 70)), "full_attn_layers": list(range(70, 94)), "num_heads": 96,
            "head_dim": 128, "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip
GPT_OSS = {
    "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18, "dtype": "bfloat16",
}  # fmt: skip
QWEN35_397B = {
    "num_hidden_layers": 60, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256,
    "dtype": "bfloat16", "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
    "linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kv_dtype", "expected"),
    [
        (LLAMA_8B, "auto", 131_072),
        (LLAMA_70B, "auto", 327_680),
        (QWEN3_235B, "auto", 192_512),
        (LLAMA_8B, "fp8", 65_536),
        (DEEPSEEK_V3, "auto", 70_272),
        (DEEPSEEK_V3, "fp8", 35_136),
        (DEEPSEEK_V3, "fp8_ds_mla", 40_016),
        (DEEPSEEK_V32, "fp8", 48_068),
        (GLM_52, "auto", 92_628),
        (GLM_52, "fp8", 53_940),
        (KIMI_K3, "fp8", 13_824),
        (KIMI_K3, "fp8_ds_mla", 15_744),
        (KIMI_K3, "auto", 27_648),
        (GPT_OSS, "auto", 36_864),
        (QWEN35_397B, "auto", 30_720),
    ],
)
def test_bytes_per_token(config: dict[str, object], kv_dtype: str, expected: int) -> None:
    assert plan.layout_from_config(config, kv_dtype=kv_dtype).kv_bytes_per_token == expected


@pytest.mark.parametrize(("kv_dtype", "expected"), [("auto", 1152), ("fp8", 576), ("fp8_ds_mla", 656)])
def test_one_mla_layer(kv_dtype: str, expected: int) -> None:
    layout = plan.layout_from_config({**DEEPSEEK_V3, "num_hidden_layers": 1}, kv_dtype=kv_dtype, tp_size=8)
    assert layout.kv_bytes_per_token == expected
    assert layout.kv_bytes_per_token_on_rank == expected, "every rank holds the whole latent"


@pytest.mark.parametrize(
    ("row_model", "config", "kv_dtype"),
    [
        ("Llama-3.1-8B", LLAMA_8B, "auto"),
        ("Qwen3-235B-A22B", QWEN3_235B, "auto"),
        ("DeepSeek-V3.2 (+indexer)", DEEPSEEK_V32, "fp8"),
        ("GLM-5.2 fp8_ds_mla + indexer", GLM_52, "fp8"),
        ("Kimi-K3 bf16", KIMI_K3, "auto"),
        ("gpt-oss-120b (hybrid allocator)", GPT_OSS, "auto"),
        ("Qwen3.5-397B", QWEN35_397B, "auto"),
    ],
)
def test_bytes_per_token_are_those_of_the_reference(row_model: str, config: dict[str, object], kv_dtype: str) -> None:
    rows = {row["model"]: row for row in reference_rows("kv_bytes_per_token.csv")}
    expected = int(rows[row_model]["kv_bytes_per_token"])
    assert plan.layout_from_config(config, kv_dtype=kv_dtype).kv_bytes_per_token == expected


def test_layers_that_share_a_choice_keep_no_keys_for_it() -> None:
    def bytes_per_token(**how: object) -> float:
        return plan.layout_from_config({**DEEPSEEK_V32, "num_hidden_layers": 8, **how}).kv_bytes_per_token

    assert bytes_per_token(indexer_types=["full", "shared"] * 4) == 8 * 1152 + 4 * 132
    assert bytes_per_token(index_topk_pattern="FFSSSSSS") == 8 * 1152 + 2 * 132
    assert bytes_per_token() == 8 * (1152 + 132)


def test_a_kimi_k3_request_at_tensor_parallel_8() -> None:
    layout = plan.layout_from_config(KIMI_K3, kv_dtype="fp8", tp_size=8, state_slots=4)
    assert layout.kv_bytes_per_token_on_rank == 24 * 576
    assert layout.state_slot_bytes_on_rank / MIB == pytest.approx(27.69, abs=0.005)
    assert layout.state_bytes_on_rank / MIB == pytest.approx(110.8, abs=0.05)
    for tokens, expected_mib in ((8192, 218.8), (32_768, 542.8), (131_072, 1838.8)):
        assert layout.request_bytes_on_rank(tokens) / MIB == pytest.approx(expected_mib, abs=0.05)


def test_a_window_and_a_state_do_not_grow_with_the_prompt() -> None:
    assert plan.layout_from_config(GPT_OSS).window_bytes_on_rank == 4_718_592
    qwen = plan.layout_from_config(QWEN35_397B, state_slots=1)
    recurrent = 45 * 64 * 128 * 128 * 4
    assert qwen.state_slot_bytes_on_rank == pytest.approx(recurrent, rel=0.02)
    assert qwen.state_slot_bytes_on_rank > recurrent


def test_heads_fewer_than_ranks_are_held_more_than_once() -> None:
    assert plan.layout_from_config(QWEN3_235B, tp_size=4).kv_bytes_per_token_on_rank == 192_512 / 4
    assert plan.layout_from_config(QWEN3_235B, tp_size=8).kv_bytes_per_token_on_rank == 192_512 / 4
    assert plan.layout_from_config(QWEN3_235B, tp_size=8).kv_bytes_per_token == 192_512


@pytest.mark.parametrize(
    ("config", "kv_dtype", "message"),
    [
        ({}, "auto", "num_hidden_layers"),
        ({**LLAMA_8B, "num_hidden_layers": "many"}, "auto", "many"),
        ({**LLAMA_8B, "num_hidden_layers": 10**30}, "auto", "num_hidden_layers"),
        ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "auto", "mamba"),
        ({**LLAMA_8B, "mamba_d_state": 128}, "auto", "--engine-log"),
        ({**LLAMA_8B, "mamba_d_state": 128, "sliding_window": 1024}, "auto", "--engine-log"),
        ({**LLAMA_8B, "attn_type_list": [0] * 28 + [1] * 4}, "auto", "attn_type_list.*--engine-log"),
        ({**LLAMA_8B, "layer_types": ["full_attention"] * 31}, "auto", "31 of 32 layers.*--engine-log"),
        ({**LLAMA_8B, "layer_types": ["chunked_attention"] * 32}, "auto", "chunked_attention.*--engine-log"),
        ({"text_config": {**LLAMA_8B, "attention_chunk_size": 8192}}, "auto", "chunked.*--engine-log"),
        ({"text_config": {**LLAMA_8B, "model_type": "llama4_text"}}, "auto", "chunked.*--engine-log"),
        ({**LLAMA_8B, "full_attn_idxs": [2, 5]}, "auto", "full_attn_idxs.*--engine-log"),
        ({**LLAMA_8B, "num_kv_shared_layers": 20}, "auto", "num_kv_shared_layers.*--engine-log"),
        ({**LLAMA_8B, "linear_attn_config": {"kda_layers": [1] * 33}}, "auto", "33 of 32 layers.*--engine-log"),
        (LLAMA_8B, "fp8_ds_mla", "MLA"),
        (LLAMA_8B, "int3", "int3"),
    ],
)
def test_what_is_not_known_is_refused_with_what_to_do(config: dict[str, object], kv_dtype: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan.layout_from_config(config, kv_dtype=kv_dtype)


def test_layers_beyond_the_models_own_are_not_counted() -> None:
    config = {**GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 18 + ["full_attention"] * 3}
    assert plan.layout_from_config(config) == plan.layout_from_config(GPT_OSS)


def test_a_list_of_full_attention_only_is_a_model_like_any_other() -> None:
    assert plan.layout_from_config({**LLAMA_8B, "attn_type_list": [1] * 32}) == plan.layout_from_config(LLAMA_8B)


@pytest.mark.parametrize("name", ["num_kv_heads", "num_attention_groups"])
def test_kv_heads_go_by_several_names(name: str) -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert plan.layout_from_config({**config, name: 8}) == plan.layout_from_config(LLAMA_8B)
    assert plan.layout_from_config({**config, name: 32, "multi_query": True}).kv_bytes_per_token == 131_072 / 8


LOG = """\
INFO [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=8192.
INFO [core.py:133] Initializing a V1 LLM engine with config: model='/models/Llama-3.1-8B-Instruct', tokenizer='x', \
tensor_parallel_size=2, pipeline_parallel_size=1, kv_cache_dtype=auto, seed=0
(Worker_TP0) INFO [gpu_worker.py:760] Available KV cache memory: 55.50 GiB
(Worker_TP1) INFO [gpu_worker.py:760] Available KV cache memory: 55.00 GiB
INFO [kv_cache_utils.py:2327] GPU KV cache size: 901,120 tokens, Maximum concurrency: 6.9x
"""


def test_bytes_per_token_from_an_engines_log() -> None:
    log = plan.read_engine_log(LOG)
    assert log.kv_bytes_per_token_on_rank == 55.0 * 2**30 / 901_120 == 65_536
    assert (log.tp_size, log.model, log.step_tokens) == (2, "/models/Llama-3.1-8B-Instruct", 8192)
    geometry = profiles.geometry_of(log.model or "")
    assert geometry == profiles.Geometry(32, 4096, 8, 128, "gqa")
    assert plan.layout_from_log(log, None, geometry).kv_bytes_per_token == 131_072


def test_the_latent_in_a_log_is_not_multiplied_by_the_ranks() -> None:
    log = plan.read_engine_log(LOG.replace("Llama-3.1-8B-Instruct", "DeepSeek-V3.2"))
    layout = plan.layout_from_log(log, None, profiles.geometry_of(log.model or ""))
    assert layout.replicated
    assert layout.kv_bytes_per_token == layout.kv_bytes_per_token_on_rank == 65_536


@pytest.mark.parametrize(
    "line",
    [
        "(Worker) INFO [cpu_worker.py:269] Auto set (55.0/62.79) GiB for KV cache on node 0, with 58.2 GiB requested",
        "(Worker) INFO [cpu_worker.py:269] Explicitly set (55.0/62.79) GiB for KV cache on node 0.",
        "INFO [gpu_worker.py:667] Initial free memory 78.7 GiB, reserved 55.0 GiB memory for KV Cache as specified",
    ],
)
def test_bytes_per_token_from_logs_that_say_the_memory_otherwise(line: str) -> None:
    kept = [found for found in LOG.splitlines() if "Available KV cache memory" not in found]
    log = plan.read_engine_log("\n".join([*kept, line]).replace("GPU KV cache size", "CPU KV cache size"))
    assert log.kv_bytes_per_token_on_rank == 65_536


def test_of_the_memory_an_engine_uses_what_its_number_of_blocks_takes() -> None:
    override = "INFO [kv_cache_utils.py:2619] Overriding num_gpu_blocks=1000 with num_gpu_blocks_override=250\n"
    log = plan.read_engine_log(LOG.replace("901,120", "225,280") + override)
    assert log.kv_bytes_per_token_on_rank == 65_536


def test_heads_fewer_than_ranks_are_stored_once_whatever_the_ranks_of_the_log_hold() -> None:
    config = {**LLAMA_8B, "num_key_value_heads": 4}
    known = plan.layout_from_config(config, tp_size=8)
    log = replace(plan.read_engine_log(LOG), tp_size=8, kv_bytes_per_token_on_rank=known.kv_bytes_per_token_on_rank)
    assert plan.layout_from_log(log, known, None).kv_bytes_per_token == known.kv_bytes_per_token == 65_536
    assert plan.layout_from_log(log, None, known.geometry).kv_bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("said", "instead", "message"),
    [
        ("55.00 GiB", "... GiB", None),
        ("55.00 GiB", "1.2.3 GiB", None),
        ("901,120 tokens", ", tokens", "KV cache size"),
        ("tensor_parallel_size=2", "tensor_parallel_size=0", None),
        ("max_num_batched_tokens=8192", "max_num_batched_tokens=0", None),
    ],
)
def test_what_is_no_number_in_a_log_is_not_taken_for_one(said: str, instead: str, message: str | None) -> None:
    log = LOG.replace(said, instead)
    if message is None:
        found = plan.read_engine_log(log)
        assert found.tp_size >= 1
        assert found.step_tokens is None or found.step_tokens >= 1
    else:
        with pytest.raises(ConfigurationError, match=message):
            plan.read_engine_log(log)


@pytest.mark.parametrize("line", ["Available KV cache memory", "KV cache size"])
def test_a_log_without_the_figures_names_what_it_lacks(line: str) -> None:
    cut = "\n".join(found for found in LOG.splitlines() if line not in found)
    with pytest.raises(ConfigurationError, match=line):
        plan.read_engine_log(cut)


def test_vllms_share_of_a_b300() -> None:
    for name, usable in (("NVIDIA GB300", 279e9), ("NVIDIA B300 SXM6 AC", 270e9)):
        gpu = profiles.find_gpu(name)
        assert gpu is not None
        memory = plan.gpu_memory(gpu)
        assert memory == pytest.approx((usable, 0.92 * usable))


def made(config: dict[str, object], *, gpu_name: str = "H100", tp_size: int = 1, **options: object) -> plan.Plan:
    layout = plan.layout_from_config(config, tp_size=tp_size)
    assert layout.geometry is not None
    prefill = profiles.find_prefill(layout.geometry, gpu_name, tp_size)
    machine = find_machine(None, gpu_name, layout.fragment_bytes)
    return plan.make_plan(layout, prefill, machine, tp_size=tp_size, **options)  # type: ignore[arg-type]


def test_break_even_without_steps_agrees_with_the_table_beside_it() -> None:
    found = made(LLAMA_8B)
    for tier in found.tiers:
        assert [tier.break_even.wins(length.tokens) for length in tier.lengths] == [
            length.loads for length in tier.lengths
        ]
    cpu, fs = found.tiers
    assert cpu.break_even.wins_from_tokens < fs.break_even.wins_from_tokens


@pytest.mark.parametrize("step_tokens", [None, 2048, 3000, 8192])
@pytest.mark.parametrize("tp_size", [1, 8])
def test_break_even_agrees_with_the_table_beside_it(tp_size: int, step_tokens: int | None) -> None:
    models: list[dict[str, object]] = [
        LLAMA_8B, LLAMA_70B, QWEN3_235B, DEEPSEEK_V3, DEEPSEEK_V32, GLM_52, KIMI_K3, GPT_OSS, QWEN35_397B,
    ]  # fmt: skip
    for config, gpu_name in itertools.product(models, profiles.gpu_names()):
        found = made(config, gpu_name=gpu_name, tp_size=tp_size, step_tokens=step_tokens)
        model = found.prefill.recompute_model(step_tokens=step_tokens)
        for tier in found.tiers:
            which = f"{found.layout.note} on {gpu_name}, {tier.name}"
            pays_from = math.inf if tier.pays_from_tokens is None else tier.pays_from_tokens
            for length in tier.lengths:
                if length.tokens >= pays_from or length.tokens < tier.pays_below_tokens:
                    assert length.loads, (which, length)
                else:
                    assert not length.loads or tier.wins_between, (which, length)
            for tokens, loads in ((pays_from, True), (pays_from - 1, False)):
                if 0 < tokens < math.inf:
                    kv = found.layout.on_rank if tier.name == "cpu" else found.layout.from_disk(tp_size)
                    load_s = costmodel.transfer_s(tier.link, kv.of(int(tokens)))
                    assert (load_s < costmodel.recompute_s(model, 0, int(tokens))) == loads, (which, tokens)


def test_a_break_even_over_steps_is_the_least_length_from_which_on_all_win() -> None:
    random = Random(7)
    lengths = range(1, 2001)
    seen = set()
    for _ in range(300):
        model = costmodel.RecomputeModel(
            random.uniform(0, 2e-3), random.uniform(0, 2e-6), random.choice([0.0, 1e-10, 1e-9, 1e-8]), 1.0,
            random.choice([16, 100, 256, 1000]),
        )  # fmt: skip
        link = costmodel.TransferModel(random.uniform(1e8, 2e9), random.choice([0.0, 1e-4, 1e-3]))
        kv = costmodel.KVSize(1000.0, random.choice([0, 10**6]))
        wins = [costmodel.transfer_s(link, kv.of(n)) < costmodel.recompute_s(model, 0, n) for n in lengths]
        found = plan.break_even(model, link, kv)
        losing = [n for n, won in zip(lengths, wins, strict=True) if not won]
        if not losing:
            assert found.wins_from_tokens < 1 or found.wins_below_tokens >= lengths[-1], (model, link, kv)
            continue
        assert math.ceil(found.wins_below_tokens) == losing[0] or (found.wins_below_tokens, losing[0]) == (0.0, 1)
        if losing[-1] < lengths[-1] - 1000:  # else a later step may lose again, beyond what was looked at
            assert math.floor(found.wins_from_tokens) == losing[-1], (model, link, kv)
            seen.add(losing[-1] % (model.step_tokens or 1) == 0)
        else:
            assert found.wins_from_tokens >= losing[-1], (model, link, kv)
    assert seen == {True, False}, "both at a step's end and inside one"


def test_the_title_over_steps_says_what_the_table_does(tmp_path: Path) -> None:
    config, log = tmp_path / "config.json", tmp_path / "engine.log"
    config.write_text(json.dumps(GPT_OSS))
    of_8_ranks = LOG.replace("tensor_parallel_size=2", "tensor_parallel_size=8").replace("901,120", "12,815,929")
    log.write_text(of_8_ranks.replace("max_num_batched_tokens=8192", "max_num_batched_tokens=2048"))
    arguments = ("--config", config, "--engine-log", log, "--gpu", "b300")
    code, output = run(*arguments, "--json")
    assert code == 0
    for tier in json.loads(output)["break_even"].values():
        loads = {row["tokens"]: row["loads"] for row in tier["lengths"]}
        assert loads[131_072]
        assert all(loaded for tokens, loaded in loads.items() if tokens >= tier["tokens"])
        said = f"pays from {tier['tokens']:,} tokens on" if tier["tokens"] > 0 else "always pays"
        assert said in " ".join(run(*arguments)[1].split())


def test_a_disk_serves_all_ranks_and_a_link_one() -> None:
    one, four = made(LLAMA_70B, tp_size=1), made(LLAMA_70B, tp_size=4)
    assert four.tiers[0].lengths[0].load_s < one.tiers[0].lengths[0].load_s
    # From disk the same bytes cross, whoever asks; only the start differs.
    disk_s = 131_072 * 327_680 / 11.6e9
    assert four.tiers[1].lengths[-1].load_s == pytest.approx(disk_s, rel=0.02)
    assert one.tiers[1].lengths[-1].load_s == pytest.approx(disk_s, rel=0.02)


def test_no_length_is_below_one_token() -> None:
    tier = made(LLAMA_8B).tiers[0]
    less_than_one = replace(tier, break_even=costmodel.BreakEven(0.4, 0.6))
    assert (less_than_one.pays_below_tokens, less_than_one.pays_from_tokens) == (0, 0)
    one_loses = replace(tier, break_even=costmodel.BreakEven(0.4, 1.0))
    assert (one_loses.pays_below_tokens, one_loses.pays_from_tokens) == (0, 2)


def test_a_disk_delivers_the_states_of_all_ranks() -> None:
    found = made(KIMI_K3, tp_size=8)
    states = 8 * found.layout.state_slot_bytes_on_rank
    assert found.layout.prompt_bytes(8) == states == pytest.approx(232e6, rel=0.01)
    cpu, fs = found.tiers
    disk_s = (1024 * 27_648 + states) / profiles.find_disk().read.bytes_per_s
    assert fs.lengths[0].load_s == pytest.approx(fs.link.overhead_s + disk_s)
    link_s = (1024 * 27_648 + states / 8) / cpu.link.bytes_per_s
    assert cpu.lengths[0].load_s == pytest.approx(cpu.link.overhead_s + link_s)


def test_windows_kept_for_a_prompt_are_stored_once_whatever_the_ranks_hold() -> None:
    one = plan.layout_from_config(GPT_OSS).prompt_bytes(1)
    assert one == 4_718_592
    assert plan.layout_from_config(GPT_OSS, tp_size=8).prompt_bytes(8) == one
    assert plan.layout_from_config(GPT_OSS, tp_size=16).prompt_bytes(16) == one
    assert plan.layout_from_config(LLAMA_8B).prompt_bytes(1) == 0


def test_writing_every_new_chunk_wears_a_drive() -> None:
    found = made(LLAMA_8B, tokens_per_s=26_700.0)
    assert found.write_bytes_per_s == pytest.approx(3.5e9, rel=0.01)
    assert found.drive_writes_per_day == pytest.approx(39, rel=0.02)
    assert made(LLAMA_8B, tokens_per_s=26_700.0, new_share=0.5).drive_writes_per_day == pytest.approx(19.7, rel=0.02)


def test_tokens_that_a_tier_holds() -> None:
    found = made(LLAMA_8B, cpu_bytes=512 * 2**30, fs_bytes=None)
    cpu, fs = found.tiers
    assert cpu.tokens(found.layout.kv_bytes_per_token) == 4_194_304
    assert fs.tokens(found.layout.kv_bytes_per_token) is None


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command looks for what was measured on this node; nothing is there."""
    path = tmp_path / "profile.json"
    monkeypatch.setenv(measured.VARIABLE, str(path))
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.stdout


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_json_has_bytes_per_token_and_break_even_per_tier(config_file: Path) -> None:
    code, output = run("--config", config_file, "--gpu", "NVIDIA B300 SXM6 AC", "--cpu-bytes", "512GiB", "--json")
    assert code == 0
    document = json.loads(output)
    assert document["kv_bytes_per_token"] == 131_072
    assert set(document["break_even"]) == {"cpu", "fs"}
    assert document["break_even"]["cpu"]["tokens"] > 0
    assert [row["tokens"] for row in document["break_even"]["fs"]["lengths"]] == list(plan.LENGTHS)
    assert document["gpu"]["usable_bytes"] == 270e9
    assert document["tiers"][0]["tokens"] == 4_194_304
    assert document["disk_wear"]["drive_writes_per_day"] > 1


def test_the_table_says_from_where_on_a_load_pays(config_file: Path) -> None:
    code, output = run("--config", config_file.parent, "--gpu", "H100")
    assert code == 0
    assert "131,072 bytes a token" in output
    assert "pays from" in output
    assert "drive writes a day" in output


@pytest.mark.parametrize(
    ("gpu", "measured", "said"),
    [
        ("H100", True, None),
        ("B300", False, "not measured on this link"),
        ("NVIDIA A100-SXM4-80GB", False, "assumption"),
    ],
)
def test_a_rate_that_nobody_measured_says_so(gpu: str, measured: bool, said: str | None, config_file: Path) -> None:
    document = json.loads(run("--config", config_file, "--gpu", gpu, "--json")[1])
    assert [tier["link_is_measured"] for tier in document["break_even"].values()] == [measured] * 2
    output = " ".join(run("--config", config_file, "--gpu", gpu)[1].split())
    for sentence in ("not measured on this link", "assumption"):
        assert output.count(sentence) == (2 if sentence == said else 0)


def test_what_calibrate_measured_on_this_node_is_used_and_said(config_file: Path, profile: Path) -> None:
    rates = tuple(
        measured.Rate(measured.Way.COPY_ENGINE, measured.Direction.LOAD, nbytes, rate)
        for nbytes, rate in ((65536, 21e9), (131072, 50e9))
    )
    device = measured.Device("NVIDIA H200", 1e-4, rates)
    disk = costmodel.TransferModel(3e9, 1e-3)
    measured.write(profile, measured.Measured(disk, disk, 1e9, device, "node-7", 1_764_556_200.0))
    document = json.loads(run("--config", config_file, "--json")[1])
    assert document["gpu"]["name"] == "h200_sxm"
    assert document["link"]["source"] == {"known": "measured", "text": "measured on node-7, 2025-12-01 02:30 UTC"}
    assert document["break_even"]["cpu"]["link_bytes_per_s"] == 21e9  # of a layer's block: 16 tokens of 4,096 bytes
    assert (document["disk"]["read_bytes_per_s"], document["disk"]["write_bytes_per_s"]) == (3e9, 1e9)
    assert document["break_even"]["fs"]["link_bytes_per_s"] == 3e9
    output = " ".join(run("--config", config_file)[1].split())
    assert "copies to the GPU: 21.0 GB/s, measured on node-7, 2025-12-01 02:30 UTC" in output
    assert "disk: 3.0 GB/s read, 1.0 GB/s written, measured on node-7" in output
    without = json.loads(run("--config", config_file, "--profile", "none", "--json")[1])
    assert [without[what]["source"]["known"] for what in ("link", "disk")] == ["published"] * 2
    assert json.loads(run("--config", config_file, "--profile", profile, "--json")[1]) == document


def test_a_profile_that_is_damaged_or_not_there_is_wrong_usage(config_file: Path, profile: Path) -> None:
    profile.write_text("{")
    for arguments in ((), ("--profile", profile.with_name("missing"))):
        code, output = run("--config", config_file, "--json", *arguments)
        assert code == 2
        assert "kvstore calibrate" in json.loads(output)["error"]["message"]


def test_what_is_kept_for_each_prompt_is_said_where_it_is_not_counted(config_file: Path) -> None:
    assert "Not counted" not in run("--config", config_file)[1]
    config_file.write_text(json.dumps(KIMI_K3))
    said = " ".join(run("--config", config_file, "--tp", "8", "--kv-dtype", "fp8")[1].split())
    assert "drive writes: 232.3 MB of states and windows for each prompt kept" in said


def test_a_log_alone_is_enough_for_a_known_model(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG)
    code, output = run("--engine-log", path, "--json")
    assert code == 0
    document = json.loads(output)
    assert document["kv_bytes_per_token"] == 131_072
    assert document["tp_size"] == 2


def test_a_log_alone_says_that_it_knows_of_no_states(tmp_path: Path, config_file: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG.replace("Llama-3.1-8B-Instruct", "Kimi-K3"))
    alone = json.loads(run("--engine-log", path, "--json")[1])
    for what in ("state_slot_bytes_on_rank", "state_bytes_on_rank", "prompt_bytes_not_counted"):
        assert alone[what] is None
    output = " ".join(run("--engine-log", path)[1].split())
    assert "does not say whether the model has windows or states" in output
    assert "bytes a request however long" not in output
    path.write_text(LOG)
    both = json.loads(run("--engine-log", path, "--config", config_file, "--json")[1])
    assert both["state_bytes_on_rank"] == 0
    assert "whether the model has windows" not in run("--engine-log", path, "--config", config_file)[1]


def test_of_a_model_with_states_the_configuration_says_what_a_token_takes(tmp_path: Path, config_file: Path) -> None:
    """An engine's tokens are those of its longest request, whose states and windows are in their bytes."""
    path = tmp_path / "engine.log"
    path.write_text(LOG)
    config_file.write_text(json.dumps(KIMI_K3))
    found = json.loads(run("--engine-log", path, "--config", config_file, "--json")[1])
    known = plan.layout_from_config(KIMI_K3, tp_size=2)
    assert found["kv_bytes_per_token_on_rank"] == known.kv_bytes_per_token_on_rank == 27_648
    assert found["state_bytes_on_rank"] == known.state_bytes_on_rank
    assert "65536 bytes each on a rank, windows and states included" in found["layout"]


def test_a_log_answers_for_layers_that_the_configuration_leaves_open(tmp_path: Path) -> None:
    config, log = tmp_path / "config.json", tmp_path / "engine.log"
    config.write_text(json.dumps({**LLAMA_8B, "attn_type_list": [0] * 28 + [1] * 4}))
    log.write_text(LOG.replace("Llama-3.1-8B-Instruct", "own-model"))
    code, output = run("--config", config, "--engine-log", log, "--json")
    assert code == 0
    assert json.loads(output)["kv_bytes_per_token"] == 131_072


def test_of_a_log_that_does_not_say_the_tensor_parallel_size_it_is_the_one_given(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG.replace("tensor_parallel_size=2, ", ""))
    code, output = run("--engine-log", path, "--tp", "2", "--json")
    assert code == 0
    assert json.loads(output)["kv_bytes_per_token"] == 131_072


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config"),
        (["--config", "no-such-file.json"], "no-such-file.json"),
        (["--engine-log", "{log}"], "no profile"),
        (["--config", "{config}", "--cpu-bytes", "much"], "--cpu-bytes"),
        (["--config", "{log}"], "JSON"),
        (["--config", "{windows}"], "does not grow with its prompt"),
        (["--config", "{config}", "--tokens-per-s", "inf"], "--tokens-per-s"),
        (["--config", "{config}", "--tp", "7"], "32 attention heads (8 of KV) with none but 1, 2, 4, 8, 16, 32;"),
        (["--config", "{config}", "--engine-log", "{log}", "--tp", "4"], "tensor parallel size 2"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_to_do(
    arguments: list[str], message: str, config_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(LOG.replace("Llama-3.1-8B-Instruct", "own-model"))
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps({**LLAMA_8B, "sliding_window": 4096}))
    code, output = run(*(part.format(config=config_file, log=log, windows=windows) for part in arguments), "--json")
    assert code == 2
    error = json.loads(output)["error"]
    assert error["kind"] == "ConfigurationError"
    assert message in error["message"]


def test_a_load_that_pays_only_beyond_the_models_length_never_pays_and_no_rate_is_infinite(tmp_path: Path) -> None:
    small = {**LLAMA_8B, "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14}
    small |= {"num_key_value_heads": 14, "torch_dtype": "float32"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small))
    code, output = run("--config", path, "--profile", "none")
    assert code == 0
    assert "a load pays from" in output
    assert "inf" not in output
    path.write_text(json.dumps({**small, "max_position_embeddings": 2048}))
    code, output = run("--config", path, "--profile", "none")
    told = " ".join(output.split())
    assert told.count("a load never pays by itself within the model's 2,048 tokens") == 2
    assert "a load pays from" not in told


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, None),
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 32_768),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131_072,
        ),
        ({"max_position_embeddings": 8192, "rope_parameters": {"factor": "many"}}, 8192),
    ],
)
def test_the_length_that_a_model_takes_is_its_positions_stretched(
    fields: dict[str, object], tokens: int | None
) -> None:
    assert plan.longest_from_config({**LLAMA_8B, **fields}) == tokens


def test_the_length_that_an_engine_takes_is_its_logs() -> None:
    assert plan.read_engine_log(LOG).longest_tokens is None
    assert plan.read_engine_log(f"{LOG}\nconfig: max_seq_len=4096, ").longest_tokens == 4096


def test_a_plot_is_drawn_or_says_what_to_install(config_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code, output = run("--config", config_file, "--plot", picture, "--json")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert code == 2
        assert "pip install matplotlib" in json.loads(output)["error"]["message"]
    else:
        assert code == 0
        assert picture.stat().st_size > 0
