"""What the connector refuses at start, and what it does where nothing was constructed."""

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from connector import KVStoreConnector, metrics
from connector.config import SPEC_MODULE_PATH, SPEC_NAME
from kvstore.errors import SeedMismatch
from kvstore.explanations import DECISIONS_KEPT
from tests.unit.connector_engine import BLOCK_TOKENS, PretendEngine, kv_cache_config, needs_states, vllm_config


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def build(config, kv_config=None, role=KVConnectorRole.SCHEDULER):
    connector = KVStoreConnector(config, role, kv_cache_config(8) if kv_config is None else kv_config)
    connector.shutdown()
    return connector


def test_importing_the_package_imports_neither_vllm_nor_grpc():
    code = "import connector, sys; sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'grpc')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_does_not_exist_is_an_attribute_error():
    import connector

    with pytest.raises(AttributeError, match="NoSuchConnector"):
        _ = connector.NoSuchConnector


def test_vllms_connector_of_several_finds_what_makes_our_statistics():
    """It does so by name in the front end, for each report: an exception there is the end of the engine."""
    made = MultiConnector.build_kv_connector_stats({"KVStoreConnector": {"data": {}}})
    assert isinstance(made["KVStoreConnector"], OffloadingConnectorStats)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_ranks_that_share_a_prefill_are_refused(role):
    config = vllm_config()
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ValueError, match="prefill_context_parallel_size=2: start it with 1"):
        build(config, role=role)


def test_a_sleep_mode_that_nobody_here_knows_is_refused(monkeypatch):
    config = vllm_config()
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    build(config)
    monkeypatch.setattr(config.model_config, "sleep_mode_backend", "checkpoint", raising=False)
    with pytest.raises(ValueError, match="sleep_mode_backend='checkpoint': start it without --enable-sleep-mode"):
        build(config)


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "served"), [(False, 0, False), (True, 0, True), (False, 4, True)]
)
def test_images_that_are_only_numbered_are_refused(monkeypatch, prefix_caching, cache_gb, served):
    config = vllm_config()
    config.cache_config.enable_prefix_caching = prefix_caching
    build(config)  # a model without images
    multimodal = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    monkeypatch.setattr(config.model_config, "multimodal_config", multimodal)
    if served:
        build(config)
    else:
        with pytest.raises(ValueError, match=r"--mm-processor-cache-gb 0 and --no-enable-prefix-caching.* leave one"):
            build(config)


@pytest.mark.parametrize(("pooling", "served"), [("MEAN", False), ("LAST", True)])
def test_a_model_that_pools_over_all_tokens_is_refused(monkeypatch, pooling, served):
    config = vllm_config()
    pooler = SimpleNamespace(seq_pooling_type=pooling, tok_pooling_type=None)
    monkeypatch.setattr(config.model_config, "pooler_config", pooler)
    if served:
        build(config)
    else:
        with pytest.raises(ValueError, match="of no use to other requests: it pools over all tokens"):
            build(config)


def test_a_model_whose_tokens_see_those_behind_them_is_refused():
    [group] = kv_cache_config(8).kv_cache_groups
    groups = [KVCacheGroupSpec(group.layer_names, replace(group.kv_cache_spec, non_causal=True))]
    with pytest.raises(ValueError, match="of no use to other requests: it lets a prompt's tokens see"):
        build(vllm_config(), KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


def test_a_diffusion_model_is_refused(monkeypatch):
    config = vllm_config()
    monkeypatch.setitem(vars(config.model_config), "is_diffusion", True)
    with pytest.raises(ValueError, match="of no use to other requests: it denoises its answers"):
        build(config)


def test_a_model_with_windows_of_generated_tokens_is_refused(monkeypatch):
    config = vllm_config()
    monkeypatch.setattr(config.model_config.model_arch_config, "architectures", ["UnlimitedOCRForCausalLM"])
    with pytest.raises(ValueError, match="of no use to other requests: it treats generated tokens otherwise"):
        build(config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize(("ours", "trained", "served"), [(True, 256, True), (False, 512, True), (False, 256, False)])
def test_rotary_frequencies_that_follow_other_requests_are_refused(monkeypatch, kind, ours, trained, served):
    config = vllm_config()
    model = config.model_config  # --max-model-len 512
    rope = {"rope_type": kind, "original_max_position_embeddings": trained}
    monkeypatch.setattr(model.hf_text_config, "rope_parameters", rope)
    monkeypatch.setattr(type(model), "using_transformers_backend", lambda _: not ours)
    if served:
        build(config)
    else:
        with pytest.raises(ValueError, match=r"from the longest request of each step .*--max-model-len, here 512"):
            build(config)


@pytest.mark.parametrize(
    ("tp_size", "tp_lcm_size", "said"),
    [
        (2, 3, "tensor_parallel_size=2 does not divide tp_lcm_size=3; the nearest value that works here is .*=4"),
        (1, 3, "tp_lcm_size=3 neither divides the model's 2 KV heads nor is a multiple of them; .*=4"),
    ],
)
def test_a_tp_lcm_size_that_does_not_fit_is_refused_with_the_nearest_that_does(tp_size, tp_lcm_size, said):
    config = vllm_config({"tp_lcm_size": tp_lcm_size})
    config.parallel_config.tensor_parallel_size = tp_size
    with pytest.raises(ValueError, match=said):
        build(config)


def test_a_kind_of_kv_cache_that_nobody_here_knows_is_refused():
    @dataclass(frozen=True)
    class Unheard(KVCacheSpec):
        pass

    groups = [*kv_cache_config(8).kv_cache_groups, KVCacheGroupSpec(["b"], Unheard(BLOCK_TOKENS))]
    with pytest.raises(ValueError, match="this model keeps Unheard"):
        build(vllm_config(), KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


def with_states(**options) -> KVCacheConfig:
    spec = MambaSpec(
        BLOCK_TOKENS, shapes=((4, 8),), dtypes=(torch.float32,), **{"mamba_cache_mode": "align", **options}
    )
    groups = [*kv_cache_config(8).kv_cache_groups, KVCacheGroupSpec(["state"], spec)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@needs_states
def test_states_at_the_ends_of_blocks_are_served_and_ends_within_a_block_left_out():
    connector = build(vllm_config(), with_states())
    assert not connector.scheduler.config.supports_partial_tail


@pytest.mark.parametrize(
    "options", [{"mamba_cache_mode": "none"}, {"mamba_cache_mode": "all"}, {"num_speculative_blocks": 1}]
)
def test_states_that_lie_elsewhere_are_refused(options):
    with pytest.raises(ValueError, match=r"this model keeps MambaSpec.*--enable-prefix-caching and without"):
        build(vllm_config(), with_states(**options))


def test_states_that_drafts_are_verified_on_are_refused_wherever_they_lie():
    config = vllm_config()
    config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: False)
    with pytest.raises(ValueError, match=r"this model keeps MambaSpec.*without speculative decoding"):
        build(config, with_states())


def test_an_engine_that_goes_on_after_a_failed_step_is_refused():
    config = vllm_config()
    config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(ValueError, match=r"--enable-fault-tolerance an engine goes on"):
        build(config)


def test_an_engine_whose_kv_cache_is_in_host_memory_is_refused():
    with pytest.raises(ValueError, match="HiSparse keeps this model's KV cache in host memory"):
        build(vllm_config(), replace(kv_cache_config(8), hisparse_host_num_blocks=8))


def test_a_version_that_does_not_hand_states_over_is_refused_with_them(monkeypatch):
    from connector import compat

    monkeypatch.setattr(compat, "hands_over_states", lambda: False)
    with pytest.raises(ValueError, match=r"0.32 and newer.*this model keeps MambaSpec"):
        build(vllm_config(), with_states())


@needs_states
def test_a_chunk_of_several_states_is_refused():
    with pytest.raises(ValueError, match=r"a chunk of 2 blocks.*set blocks_per_chunk to 1"):
        build(vllm_config({"blocks_per_chunk": 2}), with_states())


@pytest.mark.parametrize(
    ("device_type", "is_cuda", "said"),
    [
        ("cuda", True, r'that no GPU has ever run.*"untried_cuda": true'),
        ("cuda", False, "runs on cuda: start it without"),  # ROCm
        ("xpu", False, "runs on xpu: start it without"),
    ],
)
def test_a_device_that_copies_cannot_be_made_on_or_were_not_tried_on_is_refused(
    monkeypatch, device_type, is_cuda, said
):
    from connector import plugin

    elsewhere = SimpleNamespace(device_type=device_type, is_cuda=lambda: is_cuda)
    monkeypatch.setattr(plugin, "current_platform", elsewhere)
    with pytest.raises(ValueError, match=said):
        build(vllm_config())


def test_who_asks_for_it_gets_copies_that_were_not_tried_yet(monkeypatch):
    from connector import plugin

    monkeypatch.setattr(plugin, "current_platform", SimpleNamespace(device_type="cuda", is_cuda=lambda: True))
    build(vllm_config({"untried_cuda": True, "copy_backend": "kernel"}))


@pytest.mark.parametrize("backend", ["copy_engine", "kernel"])
def test_a_copy_backend_of_cuda_is_refused_on_the_cpu_platform(backend):
    with pytest.raises(ValueError, match=f"copy_backend='{backend}' needs a CUDA device"):
        build(vllm_config({"copy_backend": backend}))
    build(vllm_config({"copy_backend": "host"}))


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_a_seed_that_cannot_be_shared_is_refused_with_the_fix(monkeypatch, seed):
    monkeypatch.delenv("PYTHONHASHSEED")
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with pytest.raises(SeedMismatch, match="export PYTHONHASHSEED=0"):
        build(vllm_config())


def test_vllm_keeps_no_tokens_for_events_that_never_come():
    config = vllm_config({"self_describing_kv_events": True})
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    assert not build(config).scheduler._events_tracker.self_describing_enabled


def test_a_wrong_key_is_refused_when_the_connector_is_built():
    config = vllm_config()
    config.kv_transfer_config.kv_connector_extra_config["endpont"] = "x"
    with pytest.raises(ValueError, match="did you mean 'endpoint'"):
        build(config)


def test_vllms_own_offloading_connector_with_our_spec_is_refused():
    config = vllm_config({"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE_PATH})
    with pytest.raises(ValueError, match=r"cannot report a failed load.*KVStoreConnector"):
        OffloadingConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(8))


def test_a_malformed_endpoint_is_refused():
    config = vllm_config({"endpoint": "localhost:50051"})
    with pytest.raises(ValueError, match="localhost:50051"):
        build(config)


@pytest.mark.parametrize(("policy", "lines"), [("fail", 1), ("recompute", 0)])
def test_the_policy_that_fails_requests_is_respected_and_mentioned(policy, lines, caplog):
    with caplog.at_level(logging.WARNING, logger="vllm.connector.plugin"):
        build(vllm_config(kv_load_failure_policy=policy))
    assert sum("kv_load_failure_policy" in record.message for record in caplog.records) == lines


def test_our_series_are_built_in_a_process_that_constructed_no_connector():
    import prometheus_client

    config = vllm_config()
    made = {}

    class Metric:
        def __init__(self, *, name, documentation, **_):
            made[name] = documentation

        def labels(self, *_):
            return self

    kinds = dict.fromkeys((prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram), Metric)
    KVStoreConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    assert {name for name in made if name.startswith("kvstore_")} == set(metrics.COUNTERS)


@pytest.mark.parametrize(("drafts", "overlapping", "served"), [(1, False, False), (1, True, True), (0, False, True)])
def test_an_engine_that_miscounts_a_session_is_shut_out_when_one_comes(drafts, overlapping, served, caplog):
    engine = PretendEngine()
    config = engine.connector._engine.vllm_config
    config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: False) if drafts else None
    config.scheduler_config.async_scheduling = overlapping
    connector = build(config)
    connector._scheduler_half._probe = engine.half._probe
    engine.scheduler.connector = connector
    engine.add("no session", [1, 2, 3])
    assert not connector._scheduler_half._shut_out
    engine.add("session", [1, 2, 3], resumable=True)
    assert bool(connector._scheduler_half._shut_out) == (not served)
    assert sum("start the engine with --async-scheduling" in record.message for record in caplog.records) == (
        not served
    )


def test_two_engines_with_one_engine_id_are_two_groups():
    one, other = vllm_config(engine_id="same"), vllm_config(engine_id="same")
    one.instance_id, other.instance_id = "aaaaa", "bbbbb"
    groups = {build(config)._engine.group for config in (one, other)}
    assert groups == {"same.aaaaa", "same.bbbbb"}


def test_data_parallel_ranks_of_an_engine_with_a_long_id_are_groups_of_their_own():
    """vLLM appends the rank to the id that the user gave; the instance is the same."""
    one, other = (vllm_config(engine_id=f"{'x' * 64}_dp{rank}") for rank in range(2))
    one.instance_id = other.instance_id = "aaaaa"
    assert build(one)._engine.group != build(other)._engine.group


def test_engines_of_one_name_number_their_decisions_apart_so_that_the_daemon_keeps_both():
    decisions = []
    for _ in range(2):
        admission = build(vllm_config(engine_id="same"))._scheduler_half._admission
        admission.tell = decisions.append
        admission.refused("request", [], 0, "TIER_FULL")
    first, second = (decision.number for decision in decisions)
    assert abs(first - second) > DECISIONS_KEPT  # of 2 ** 48
