"""What an engine's speed is taken to be before it was measured."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from connector import priors as under_test
from connector.config import CopyBackend
from connector.priors import DISK, HOST_COPY, engine_priors, learning
from kvstore.costmodel import TransferModel, recompute_s
from kvstore.profiles import measured
from kvstore.profiles.measured import Direction, Rate, Way
from tests.unit.connector_engine import vllm_config

PAGE_BYTES = 16 << 10


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv(measured.VARIABLE, str(path))
    return path


def test_on_a_cpu_platform_it_is_a_guess_on_which_nothing_is_declined(profile: Path) -> None:
    priors = engine_priors(vllm_config(), PAGE_BYTES)
    assert not profile.exists()
    assert not priors.recompute_known
    assert 0 < recompute_s(priors.recompute, 0, 2048) < 60
    assert (priors.load, priors.store, priors.disk) == (HOST_COPY, HOST_COPY, DISK)
    assert 0.1 <= priors.write_price <= 1.0


def test_what_was_measured_on_this_node_counts_before_the_tables(profile: Path) -> None:
    memory, disk = TransferModel(9e9, 1e-5), TransferModel(3e9, 1e-3)
    measured.write(profile, measured.Measured(memory, disk, 1e9))
    priors = engine_priors(vllm_config(), PAGE_BYTES)
    assert (priors.load, priors.store, priors.disk) == (memory, memory, disk)
    assert priors.disk_write_bytes_per_s == 1e9


def test_the_link_to_a_gpu_is_what_was_measured_on_such_a_one_else_the_tables(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(device_type="cuda", get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setattr(under_test, "current_platform", platform)
    table = engine_priors(vllm_config(), PAGE_BYTES)
    rates = tuple(
        Rate(Way.COPY_ENGINE, direction, nbytes, speed)
        for direction, nbytes, speed in [
            (Direction.LOAD, PAGE_BYTES, 11e9), (Direction.LOAD, 2 * PAGE_BYTES, 50e9), (Direction.STORE, 4096, 13e9),
        ]
    )  # fmt: skip
    rates += (Rate(Way.PAGEABLE, Direction.LOAD, PAGE_BYTES, 2e9),)
    host = TransferModel(9e9, 1e-5)
    measured.write(profile, measured.Measured(host, device=measured.Device("NVIDIA H200", 1e-4, rates)))
    priors = engine_priors(vllm_config(), PAGE_BYTES)
    assert (priors.load, priors.store) == (TransferModel(11e9, 1e-4, 0.0), TransferModel(13e9, 1e-4, 0.0))
    assert engine_priors(vllm_config(), PAGE_BYTES, CopyBackend.HOST).load == TransferModel(2e9, 1e-4, 0.0)
    assert engine_priors(vllm_config(), PAGE_BYTES, CopyBackend.KERNEL).load == table.load  # not measured
    measured.write(profile, measured.Measured(host, device=measured.Device("NVIDIA B300 SXM6 AC", 1e-4, rates)))
    priors = engine_priors(vllm_config(), PAGE_BYTES)
    assert (priors.load, priors.store) == (table.load, table.store)


def test_a_damaged_profile_is_said_and_left_out(profile: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile.write_text("{")
    with caplog.at_level(logging.WARNING, logger="vllm.connector.priors"):
        assert engine_priors(vllm_config(), PAGE_BYTES).load == HOST_COPY
    assert str(profile) in caplog.text
    assert "kvstore calibrate" in caplog.text


def test_engines_of_another_kind_learn_apart() -> None:
    config = vllm_config()
    here = learning(config)
    assert learning(config, CopyBackend.HOST) != here
    config.parallel_config.tensor_parallel_size = 2
    assert learning(config) != here


def test_ranks_that_hold_copies_of_the_same_heads_load_no_quicker_together(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not profile.exists()
    platform = SimpleNamespace(device_type="cuda", get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setattr(under_test, "current_platform", platform)
    config = vllm_config()
    heads = config.model_config.get_total_num_kv_heads()
    alone = engine_priors(config, PAGE_BYTES)
    config.parallel_config.tensor_parallel_size = 4 * heads
    together = engine_priors(config, PAGE_BYTES)
    assert together.load.bytes_per_s == heads * alone.load.bytes_per_s
    assert together.store.bytes_per_s == 4 * heads * alone.store.bytes_per_s
