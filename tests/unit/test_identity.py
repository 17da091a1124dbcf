"""Identity: what must differ differs, what may vary between two engines of one kind does not."""

import copy
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
import vllm.version
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from connector import identity
from connector.pages import PageHeads
from kvstore.errors import SeedMismatch
from kvstore.namespace import canonical_json, namespace_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


# ---- weights


def weights_folder(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in (files or {"model": os.urandom(100)}).items():
        (folder / f"{name}.safetensors").write_bytes((8).to_bytes(8, "little") + b"{      }" + content)
    return folder


def test_equal_weights_in_two_folders_are_one_identity(tmp_path: Path) -> None:
    content = os.urandom(5 << 20)
    one = weights_folder(tmp_path / "a", model=content)
    other = weights_folder(tmp_path / "b", model=content)
    (other / "tokenizer.json").write_text("{}")
    assert identity.weights_identity(str(one), None) == identity.weights_identity(str(other), None)


@pytest.mark.parametrize("position", [8, 16, 100, (64 << 10) + 5, -1])
def test_one_changed_byte_in_a_small_file_is_another_model(tmp_path: Path, position: int) -> None:
    folder = weights_folder(tmp_path / "m", model=os.urandom(1 << 20))
    before = identity.weights_identity(str(folder), None)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert identity.weights_identity(str(folder), None) != before


def test_a_renamed_an_added_and_a_moved_boundary_are_other_models(tmp_path: Path) -> None:
    seen = {
        identity.weights_identity(str(weights_folder(tmp_path / str(i), **files)), None)
        for i, files in enumerate(
            [
                {"a": b"xy", "b": b"z"},
                {"a": b"x", "b": b"yz"},
                {"a": b"xy", "c": b"z"},
                {"a": b"xy", "b": b"z", "c": b""},
            ]
        )
    }
    assert len(seen) == 4


def test_a_large_file_is_sampled_from_its_first_to_its_last_byte() -> None:
    size = 10 << 30
    offsets = identity.sample_offsets(size)
    assert len(offsets) == identity.WEIGHTS_SAMPLES
    assert offsets[0] == 0
    assert offsets[-1] + identity.WEIGHTS_SAMPLE_BYTES == size
    gaps = {b - a for a, b in itertools.pairwise(offsets)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (4 << 20) - 1, 4 << 20])
def test_files_up_to_four_mebibytes_are_read_whole(size: int) -> None:
    covered = 0
    for offset in identity.sample_offsets(size):
        assert offset <= covered, f"bytes {covered} to {offset} of {size} are in no sample"
        covered = offset + identity.WEIGHTS_SAMPLE_BYTES
    assert covered >= size


def test_a_hub_model_is_its_commit_by_name_by_revision_and_by_folder(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for model, revision in [("org/name", None), ("org/name", "main"), ("org/name", COMMIT), (str(snapshot), None)]:
        assert identity.weights_identity(model, revision, cache_dir=str(tmp_path)) == f"hub:{COMMIT}"


def test_weights_that_cannot_be_told_are_refused_with_the_name_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'org/absent' \(revision v2\).*Download the model first"):
        identity.weights_identity("org/absent", "v2", cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"no weights file"):
        identity.weights_identity(str(tmp_path), None)


def _now_ns(folder: Path) -> int:
    """By the clock of the files there. It is coarse: what changes next has a later time."""
    beacon = folder / "beacon"
    beacon.touch()
    now_ns = beacon.stat().st_ctime_ns
    while beacon.stat().st_ctime_ns == now_ns:
        os.utime(beacon)
    return beacon.stat().st_ctime_ns


def _replace_a_file(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "new").write_bytes(content)
    os.utime(model / "new", (0, 0))  # as rsync does
    (model / "new").rename(model / "model.safetensors")


def _write_in_place(model: Path) -> None:
    (model / "model.safetensors").write_bytes(os.urandom(100))


def _replace_the_folder(model: Path) -> None:
    model.rename(model.parent / "old")
    (model.parent / "next").rename(model)


def _remove_a_file(model: Path) -> None:
    (model / "more.safetensors").unlink()


def _remove_a_file_and_describe_the_rest(model: Path) -> None:
    _remove_a_file(model)
    (model / "README.md").write_text("without it")


def _write_code_in_place(model: Path) -> None:
    (model / "modeling.py").write_text("other")


def _lead_a_link_elsewhere(model: Path) -> None:
    below = model / "below"
    (below / "new").symlink_to(model.parent / "next" / "model.safetensors")
    (below / "new").rename(below / "linked.bin")


@pytest.mark.parametrize(
    "change",
    [
        _replace_a_file,
        _write_in_place,
        _replace_the_folder,
        _remove_a_file,
        _remove_a_file_and_describe_the_rest,
        _write_code_in_place,
        _lead_a_link_elsewhere,
    ],
)
def test_weights_that_changed_after_the_engine_began_are_noticed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = weights_folder(tmp_path / "model")
    weights_folder(tmp_path / "next")
    (model / "more.safetensors").write_bytes(b"loaded too")
    (model / "modeling.py").write_text("one")
    (model / "below").mkdir()
    (model / "below" / "linked.bin").symlink_to(tmp_path / "next" / "model.safetensors")
    began_ns = _now_ns(tmp_path)
    assert not identity.weights_changed(str(model), None, began_ns)
    change(model)
    assert identity.weights_changed(str(model), None, began_ns)


def test_a_link_that_led_to_other_weights_is_noticed(tmp_path: Path) -> None:
    one, other = weights_folder(tmp_path / "step-1"), weights_folder(tmp_path / "step-2")
    link = tmp_path / "latest"
    link.symlink_to(one)
    began_ns = _now_ns(tmp_path)
    assert not identity.weights_changed(str(link), None, began_ns)
    (tmp_path / "next").symlink_to(other)
    (tmp_path / "next").rename(link)
    assert identity.weights_changed(str(link), None, began_ns)


def _commit_in_cache(repository: Path, commit: str, **files: str) -> Path:
    """As the hub's library lays it out: each content once, and links to it."""
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = repository / "blobs" / content
        if not blob.exists():
            blob.write_text(content)
        (snapshot / name.replace("_", ".")).symlink_to(blob)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_model_of_the_hub_has_changed_when_its_name_meant_other_weights(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    began_ns = _now_ns(tmp_path)
    snapshot = _commit_in_cache(repository, COMMIT, model_safetensors="one")
    assert not identity.weights_changed("org/name", None, began_ns, cache_dir=str(tmp_path))  # its first download
    _commit_in_cache(repository, COMMIT[::-1], model_safetensors="other")
    assert identity.weights_changed("org/name", None, began_ns, cache_dir=str(tmp_path))
    assert not identity.weights_changed("org/name", COMMIT, began_ns, cache_dir=str(tmp_path))
    assert not identity.weights_changed(str(snapshot), None, began_ns)
    assert not identity.weights_changed("org/name", None, _now_ns(tmp_path), cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("later", "changed"),
    [
        ({}, False),
        ({"README_md": "more words"}, False),
        ({"model_safetensors": "w2"}, True),
        ({"more_safetensors": "w"}, True),
        ({"config_json": "c2"}, True),
        ({"modeling_py": "p2"}, True),
    ],
)
def test_a_commit_of_the_hub_that_changes_only_what_people_read_changes_nothing(
    tmp_path: Path, later: dict[str, str], changed: bool
) -> None:
    repository, began_ns = tmp_path / "models--org--name", _now_ns(tmp_path)
    files = {"model_safetensors": "w", "config_json": "c", "modeling_py": "p", "README_md": "words"}
    _commit_in_cache(repository, COMMIT, **files)
    _commit_in_cache(repository, COMMIT[::-1], **files | later)
    assert identity.weights_changed("org/name", None, began_ns, cache_dir=str(tmp_path)) is changed
    (repository / "snapshots" / COMMIT / "model.safetensors").unlink()  # of a commit that is not here as a whole
    assert identity.weights_changed("org/name", None, began_ns, cache_dir=str(tmp_path))


# ---- seed and probe


@pytest.mark.parametrize(("environ", "says"), [({}, "not set"), ({"PYTHONHASHSEED": "random"}, "'random'")])
def test_a_seed_that_cannot_be_shared_is_refused_with_what_to_export(environ: dict[str, str], says: str) -> None:
    with pytest.raises(SeedMismatch, match=rf"{says}.*export PYTHONHASHSEED=0"):
        identity.engine_hash_seed(environ)


def test_the_seed_is_the_literal_string() -> None:
    assert identity.engine_hash_seed({"PYTHONHASHSEED": "007"}) == "007"


def test_the_probe_differs_by_seed_and_algorithm_and_needs_no_initialised_engine() -> None:
    values = [identity.probe_value(name, seed) for name in ("sha256", "sha256_cbor") for seed in ("0", "00")]
    assert len(set(values)) == 4
    assert values[0] == identity.probe_value("sha256", "0")


def test_the_effective_seed_is_compared_with_what_the_engine_hashes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    assert identity.effective_seed_problem("sha256", "7") is None
    problem = identity.effective_seed_problem("sha256", "8")
    assert problem is not None
    assert "'7'" in problem
    assert "'8'" in problem
    algorithm_problem = identity.effective_seed_problem("sha256_cbor", "7")
    assert algorithm_problem is not None
    assert "sha256_cbor" in algorithm_problem


# ---- the namespace document


class FakeHFConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class EngineConfig:
    """As much of a VllmConfig and its KV cache as the document asks for."""

    def __init__(self, model: Path) -> None:
        hf_config = FakeHFConfig(
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=4096,
            sliding_window=None,
            rms_norm_eps=1e-6,
            _name_or_path=str(model),
        )
        self.model_config = SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            quantization_config=None,
            hf_config=hf_config,
            hf_text_config=hf_config,
            disable_sliding_window=False,
            use_mla=False,
            get_total_num_kv_heads=lambda: 2,
            max_model_len=4096,
            model_class_overrides={},
            trust_remote_code=False,
            code_revision=None,
            multimodal_config=None,
        )
        self.attention_config = SimpleNamespace(indexer_kv_dtype="auto")
        self.instance_id = "one"
        self.started_ns: int | None = 1 << 62  # after every file here
        self.cache_config = SimpleNamespace(
            block_size=16,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_match_unit=None,
            prefix_caching_hash_algo="sha256",
            kv_cache_dtype_skip_layers=[],
            kv_cache_layout="LBHNC",
        )
        self.parallel_config = SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=1,
            rank=0,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
        )
        self.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"blocks_per_chunk": 4}, engine_id="e")
        self.kv_events_config = None
        self.compilation_config = SimpleNamespace(custom_ops=["all"])
        self.load_config = SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config={})
        self.speculative_config: SimpleNamespace | None = None
        self.use_v2_model_runner = False
        self.num_blocks = 8
        self.tokens_per_block = 16
        self.layers = ["layers.0", "layers.1"]
        self.kv_dtype = torch.bfloat16
        self.attention_backend = "FLASH_ATTN"
        self.tp_lcm_size = 1
        self.tp_free = True
        self.heads = 2
        self.state: dict[str, Any] | None = None  # of a model that keeps one
        self.spec: dict[str, Any] = {}  # of its attention, beside the rest

    def document(self) -> dict[str, object]:
        spec: KVCacheSpec
        if self.state is None:
            spec = FullAttentionSpec(
                self.tokens_per_block, num_kv_heads=2, head_size=32, dtype=self.kv_dtype, **self.spec
            )
        else:
            spec = MambaSpec(self.tokens_per_block, mamba_cache_mode="align", **self.state)
        kv_cache_config = KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=self.layers, kv_cache_spec=spec)],
        )
        return identity.namespace_document(
            self,  # type: ignore[arg-type]
            kv_cache_config,
            kv_caches={
                name: torch.zeros(
                    self.num_blocks,
                    self.heads // self.parallel_config.tensor_parallel_size,
                    16,
                    64,
                    dtype=self.kv_dtype,
                )
                for name in self.layers
            },
            attention_backend=self.attention_backend,
            tp_lcm_size=self.tp_lcm_size,
            heads=[PageHeads(1, self.heads, 1)] * len(self.layers) if self.tp_free else None,
            started_ns=self.started_ns,
        )


@pytest.fixture
def engine(tmp_path: Path) -> EngineConfig:
    return EngineConfig(weights_folder(tmp_path / "model"))


def test_the_document_is_canonical_and_resolves_auto(engine: EngineConfig) -> None:
    text = canonical_json(engine.document())
    assert "auto" not in text
    assert '"chunk":64' in text
    assert '"sha256:' in text


def test_a_second_engine_of_the_same_kind_has_the_same_namespace(engine: EngineConfig) -> None:
    other = copy.deepcopy(engine)
    other.num_blocks = 99  # memory left on its device
    other.kv_transfer_config.engine_id = "f"
    moved = Path(engine.model_config.model).parent / "elsewhere" / "model"
    moved.parent.mkdir()
    moved.symlink_to(engine.model_config.model)
    other.model_config.model = str(moved)
    assert namespace_id(other.document()) == namespace_id(engine.document())


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_another_version_of_vllm_wrote_is_another_namespace(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch, device_type: str
) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type=device_type))
    monkeypatch.setattr(vllm.version, "__version__", "0.32.0")
    older = engine.document()
    monkeypatch.setattr(vllm.version, "__version__", "0.33.0")
    assert namespace_id(engine.document()) != namespace_id(older)


def _speculative(engine: EngineConfig) -> None:
    engine.speculative_config = SimpleNamespace(
        method="ngram", num_speculative_tokens=3, kv_cache_dtype=None, draft_model_config=None, draft_load_config=None
    )


def _with_draft(engine: EngineConfig) -> None:
    draft = copy.deepcopy(engine.model_config)
    draft.model = str(weights_folder(Path(engine.model_config.model).parent / "draft"))
    engine.speculative_config = SimpleNamespace(
        method="draft_model",
        num_speculative_tokens=3,
        kv_cache_dtype=None,
        draft_model_config=draft,
        draft_load_config=None,
    )


def _kv_quant_mode(engine: EngineConfig) -> None:
    if not hasattr(kv_cache_interface, "KVQuantMode"):
        pytest.skip("this vLLM has one mode for each cache dtype")
    engine.spec["kv_quant_mode"] = kv_cache_interface.KVQuantMode.FP8_PER_TENSOR


def _other_weights(engine: EngineConfig) -> None:
    (Path(engine.model_config.model) / "model.safetensors").write_bytes(os.urandom(200))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_other_weights, id="weights"),
        pytest.param(lambda e: setattr(e, "kv_dtype", torch.float16), id="kv dtype"),
        pytest.param(lambda e: setattr(e.cache_config, "cache_dtype", "fp8_e5m2"), id="cache dtype"),
        pytest.param(lambda e: setattr(e.cache_config, "block_size", 8), id="tokens per hash"),
        pytest.param(lambda e: setattr(e, "tokens_per_block", 32), id="tokens per block"),
        pytest.param(lambda e: e.kv_transfer_config.kv_connector_extra_config.update(blocks_per_chunk=2), id="chunk"),
        pytest.param(lambda e: e.layers.reverse(), id="layer order"),
        pytest.param(lambda e: e.layers.pop(), id="layers"),
        pytest.param(lambda e: e.model_config.hf_config.rope_parameters.update(rope_theta=5e5), id="rope"),
        pytest.param(lambda e: setattr(e.model_config.hf_config, "sliding_window", 512), id="window"),
        pytest.param(lambda e: setattr(e.model_config.hf_config, "rms_norm_eps", 1e-5), id="any model setting"),
        pytest.param(lambda e: setattr(e.model_config, "dtype", torch.float16), id="model dtype"),
        pytest.param(lambda e: setattr(e.model_config, "quantization", "fp8"), id="quantisation"),
        pytest.param(
            lambda e: setattr(e.model_config, "quantization_config", {"group_size": 64}), id="quantisation settings"
        ),
        pytest.param(lambda e: e.cache_config.kv_cache_dtype_skip_layers.append("0"), id="unquantised layers"),
        pytest.param(_kv_quant_mode, id="kv quantisation mode"),
        pytest.param(lambda e: setattr(e.model_config, "disable_sliding_window", True), id="window disabled"),
        pytest.param(lambda e: e.spec.update(sliding_window=512), id="the group's window"),
        pytest.param(lambda e: e.compilation_config.custom_ops.append("-rotary_embedding"), id="custom operations"),
        pytest.param(_speculative, id="speculative"),
        pytest.param(_with_draft, id="draft model"),
        pytest.param(lambda e: setattr(e, "attention_backend", "CPU_ATTN/amx"), id="attention backend"),
        pytest.param(lambda e: setattr(e.cache_config, "kv_cache_layout", "BLHNC"), id="layout"),
        pytest.param(lambda e: setattr(e, "tp_lcm_size", 2), id="tp_lcm_size"),
        pytest.param(lambda e: setattr(e, "heads", 4), id="heads"),
        pytest.param(lambda e: setattr(e, "tp_free", False), id="bytes of one split"),
        pytest.param(lambda e: setattr(e.cache_config, "prefix_caching_hash_algo", "sha256_cbor"), id="hash algorithm"),
    ],
)
def test_what_changes_the_bytes_or_the_keys_changes_the_namespace(
    engine: EngineConfig, change: Callable[[EngineConfig], None]
) -> None:
    before = namespace_id(engine.document())
    change(engine)
    assert namespace_id(engine.document()) != before


def test_the_draft_models_weights_are_in_the_namespace(engine: EngineConfig) -> None:
    _with_draft(engine)
    assert engine.speculative_config is not None
    before = namespace_id(engine.document())
    (Path(engine.speculative_config.draft_model_config.model) / "model.safetensors").write_bytes(os.urandom(200))
    assert namespace_id(engine.document()) != before


def test_operations_are_named_in_no_order_and_once(engine: EngineConfig) -> None:
    engine.compilation_config.custom_ops = ["all", "-rotary_embedding", "+quant_fp8"]
    before = namespace_id(engine.document())
    engine.compilation_config.custom_ops = ["+quant_fp8", "all", "-rotary_embedding", "+quant_fp8"]
    assert namespace_id(engine.document()) == before


def test_dummy_weights_are_of_one_split_each(engine: EngineConfig) -> None:
    engine.load_config.load_format = "dummy"
    before = namespace_id(engine.document())
    assert namespace_id(engine.document()) == before
    _two_ranks(engine)
    assert namespace_id(engine.document()) != before


def test_states_of_one_size_are_told_apart_by_what_they_are_made_of(engine: EngineConfig) -> None:
    seen = set()
    for shapes, dtypes in [
        (((3, 8), (4, 4)), (torch.float16, torch.float16)),
        (((3, 8), (4, 4)), (torch.bfloat16, torch.float16)),
        (((8, 3), (4, 4)), (torch.float16, torch.float16)),
        (((5, 8),), (torch.float16,)),
    ]:
        engine.state = {"shapes": shapes, "dtypes": dtypes}
        seen.add(namespace_id(engine.document()))
    assert len(seen) == 4


def test_engines_of_two_tp_sizes_have_one_namespace_where_the_layout_is_free_of_them(engine: EngineConfig) -> None:
    before = namespace_id(engine.document())
    _two_ranks(engine)
    assert namespace_id(engine.document()) == before


def test_engines_of_two_tp_sizes_have_two_namespaces_where_it_is_not(engine: EngineConfig) -> None:
    engine.tp_free = False
    before = namespace_id(engine.document())
    _two_ranks(engine)
    assert namespace_id(engine.document()) != before


def _two_ranks(engine: EngineConfig) -> None:
    engine.parallel_config.tensor_parallel_size = 2
    engine.parallel_config.world_size = 2


@pytest.mark.parametrize("nested", [False, True])
def test_longrope_is_told_apart_by_the_lengths_that_choose_its_factors(engine: EngineConfig, nested: bool) -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    engine.model_config.hf_config.rope_parameters = {"full_attention": longrope} if nested else longrope
    seen = []
    for length in (2048, 4096, 4097, 131072):
        engine.model_config.max_model_len = length
        seen.append(namespace_id(engine.document()))
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[1] != seen[2]


def test_llama_4_is_told_apart_by_the_length_from_which_its_queries_are_scaled(engine: EngineConfig) -> None:
    engine.model_config.hf_config.model_type = "llama4_text"
    engine.model_config.max_model_len = 32768
    before = namespace_id(engine.document())
    engine.model_config.max_model_len = 32769
    assert namespace_id(engine.document()) != before


def test_the_longest_request_of_other_models_splits_no_namespace(engine: EngineConfig) -> None:
    before = namespace_id(engine.document())
    engine.model_config.max_model_len = 131072
    assert namespace_id(engine.document()) == before


def _file(engine: EngineConfig, name: str) -> None:
    (Path(engine.model_config.model) / name).write_text("{}")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, mm: mm.update(mm_processor_kwargs={"max_pixels": 1 << 20}), id="processor kwargs"),
        pytest.param(lambda _, mm: mm.update(media_io_kwargs={"video": {"num_frames": 8}}), id="frames"),
        pytest.param(lambda _, mm: mm.update(mm_encoder_attn_dtype="fp8"), id="encoder dtype"),
        pytest.param(lambda _, mm: mm.update(video_pruning_rate=0.5), id="pruning"),
        pytest.param(lambda e, _: _file(e, "preprocessor_config.json"), id="image processor"),
        pytest.param(lambda e, _: _file(e, "video_preprocessor_config.json"), id="video processor"),
        pytest.param(lambda e, _: _file(e, "processor_config.json"), id="processor"),
    ],
)
def test_what_an_engine_makes_of_an_image_changes_its_namespace(
    engine: EngineConfig, change: Callable[[EngineConfig, dict[str, Any]], None]
) -> None:
    engine.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs=None, limit_per_prompt={"image": 1})
    before = namespace_id(engine.document())
    change(engine, vars(engine.model_config.multimodal_config))
    assert namespace_id(engine.document()) != before


def test_what_only_bounds_images_or_is_of_no_use_to_a_text_model_splits_no_namespace(engine: EngineConfig) -> None:
    before = namespace_id(engine.document())
    _file(engine, "preprocessor_config.json")
    _file(engine, "modeling.py")
    assert namespace_id(engine.document()) == before
    engine.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs=None, limit_per_prompt={"image": 1})
    before = namespace_id(engine.document())
    engine.model_config.multimodal_config.limit_per_prompt = {"image": 2}
    assert namespace_id(engine.document()) == before


def test_code_that_comes_with_a_model_is_told_apart_by_its_files(engine: EngineConfig) -> None:
    engine.model_config.trust_remote_code = True
    _file(engine, "modeling.py")
    before = namespace_id(engine.document())
    (Path(engine.model_config.model) / "modeling.py").write_text("# other")
    assert namespace_id(engine.document()) != before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda e, _: setattr(e.attention_config, "indexer_kv_dtype", "bf16"), id="indexer"),
        pytest.param(lambda e, _: e.model_config.model_class_overrides.update(A="m:B"), id="class"),
        pytest.param(lambda _, patch: patch.setenv("VLLM_CPU_INT4_W4A8", "0"), id="activations"),
        pytest.param(
            lambda _, patch: patch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "u"), id="pretended routers"
        ),
        pytest.param(lambda e, _: setattr(e.attention_config, "use_prefill_query_quantization", True), id="queries"),
    ],
)
def test_what_chooses_the_arithmetic_changes_the_namespace(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch, change: Callable[[EngineConfig, Any], None]
) -> None:
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    before = namespace_id(engine.document())
    change(engine, monkeypatch)
    assert namespace_id(engine.document()) != before


def test_an_engine_whose_weights_changed_while_it_started_shares_with_no_other(
    engine: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    before = namespace_id(engine.document())
    engine.started_ns = None  # this process began before the weights were written
    seen = {before}
    for engine.instance_id, engine.kv_transfer_config.engine_id in itertools.product(["one", "two"], ["e", "f"]):
        seen.add(namespace_id(engine.document()))
    assert len(seen) == 5
    assert "were changed after this process had begun" in caplog.text


def test_a_draft_model_that_changed_while_the_engine_started_counts_too(engine: EngineConfig) -> None:
    engine.started_ns = _now_ns(Path(engine.model_config.model).parent)
    draft = copy.deepcopy(engine.model_config)
    draft.model = str(weights_folder(Path(engine.model_config.model).parent / "new draft"))
    assert "unshared" not in engine.document()
    engine.speculative_config = SimpleNamespace(
        method="eagle", num_speculative_tokens=3, kv_cache_dtype=None, draft_model_config=draft, draft_load_config=None
    )
    assert engine.document()["unshared"] == "e.one"


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache", "of_a_plugin"])
def test_weights_that_a_load_format_brings_from_elsewhere_are_shared_with_no_other_engine(
    engine: EngineConfig, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    """A tensorizer's URI, a server, a daemon that read the files an hour ago: the folder says nothing of them."""
    before = namespace_id(engine.document())
    engine.load_config.load_format = load_format
    assert engine.document()["unshared"] == "e.one"
    assert namespace_id(engine.document()) != before
    assert f"come from elsewhere (--load-format {load_format})" in caplog.text


def test_weights_named_apart_from_the_model_are_shared_with_no_other_engine(engine: EngineConfig) -> None:
    engine.load_config.load_format = "runai_streamer"
    assert "unshared" not in engine.document()
    engine.model_config.model_weights = engine.model_config.model
    assert "unshared" not in engine.document()
    engine.model_config.model_weights = "s3://bucket/tuned"
    assert engine.document()["unshared"] == "e.one"


def test_weights_of_another_hub_are_not_taken_for_those_of_the_same_name_here(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models--org--name" / "snapshots" / COMMIT).mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(COMMIT)
    engine.load_config.download_dir = str(tmp_path)
    folder, engine.model_config.model = engine.model_config.model, "org/name"
    engine.started_ns = 1 << 62
    assert f"hub:{COMMIT}" in canonical_json(engine.document())
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert f"hub:{COMMIT}" not in canonical_json(engine.document())
    assert engine.document()["unshared"] == "e.one"
    engine.model_config.model = folder
    assert "unshared" not in engine.document()


def test_formats_that_read_the_same_files_are_one_and_others_are_apart(engine: EngineConfig) -> None:
    """A folder may hold the same tensors twice, and not the same bytes."""
    seen: dict[str, str] = {}
    for load_format in ("auto", "safetensors", "fastsafetensors", "mistral", "pt", "npcache", "sharded_state"):
        engine.load_config.load_format = load_format
        seen[load_format] = namespace_id(engine.document()).hex()
    assert seen.pop("fastsafetensors") == seen["safetensors"]
    engine.load_config.model_loader_extra_config = {"pattern": "other-{rank}-{part}.safetensors"}
    seen["another pattern"] = namespace_id(engine.document()).hex()
    assert len(set(seen.values())) == len(seen)


def test_what_of_an_adapter_is_applied_and_how_it_is_read_is_in_its_settings() -> None:
    from vllm.config import LoRAConfig

    plain = identity.adapter_settings(LoRAConfig())
    restricted = identity.adapter_settings(LoRAConfig(target_modules=["o_proj", "qkv_proj"]))
    assert restricted == identity.adapter_settings(LoRAConfig(target_modules=["qkv_proj", "o_proj"]))
    assert plain == identity.adapter_settings(LoRAConfig(max_loras=4))
    others = [
        restricted,
        identity.adapter_settings(LoRAConfig(target_modules=["o_proj"])),
        identity.adapter_settings(LoRAConfig(enable_tower_connector_lora=True)),
        identity.adapter_settings(LoRAConfig(lora_dtype="float16")),
    ]
    assert len({plain, *others}) == 5


def test_a_process_knows_when_it_began() -> None:
    code = "import sys, time; from connector.identity import process_started_ns; print(process_started_ns())"
    before_ns = time.time_ns()
    began_ns = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    tick_ns = 2 * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert before_ns - tick_ns <= began_ns <= time.time_ns()
    assert identity.process_started_ns() < before_ns


def test_a_setting_without_a_spelling_of_its_own_is_refused_by_name(engine: EngineConfig) -> None:
    engine.model_config.hf_config.strange = object()
    with pytest.raises(TypeError, match=r"hf_config\.strange"):
        engine.document()
