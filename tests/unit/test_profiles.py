"""Profiles are found by what the driver and the configuration say, and say where they come from."""

import pytest

from kvstore.profiles import Geometry, find_disk, find_gpu, find_prefill, gpu_names

LLAMA_8B = Geometry(32, 4096, 8, 128, "gqa")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA B200", "b200_sxm"),
        ("NVIDIA B300 SXM6 AC", "b300_sxm"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("b300_sxm", "b300_sxm"),
    ],
)
def test_a_gpu_is_found_by_the_drivers_name(reported: str, name: str) -> None:
    gpu = find_gpu(reported)
    assert gpu is not None
    assert gpu.name == name
    assert name in gpu_names()


def test_capacity_of_a_b300_by_system() -> None:
    hgx, nvl72 = find_gpu("B300"), find_gpu("GB300")
    assert hgx is not None
    assert nvl72 is not None
    assert (hgx.memory_bytes, hgx.usable_bytes) == (288e9, 270e9)
    assert (nvl72.memory_bytes, nvl72.usable_bytes) == (288e9, 279e9)


def test_a_link_that_was_not_measured_says_so() -> None:
    b300, h100 = find_gpu("B300"), find_gpu("H100")
    assert b300 is not None
    assert h100 is not None
    assert h100.link.measured
    assert not b300.link.measured
    assert b300.link.expected.bytes_per_s < b300.link.spec_bytes_per_s == 128e9


def test_models_of_one_kv_shape_and_different_width_are_told_apart() -> None:
    narrow = find_prefill(Geometry(36, 2560, 8, 128, "gqa"), "B300", 1)
    wide = find_prefill(Geometry(36, 4096, 8, 128, "gqa"), "B300", 1)
    assert (narrow.model, wide.model) == ("Qwen/Qwen3-4B-2507", "Qwen/Qwen3-8B")
    assert narrow.token_s < wide.token_s


def test_sparse_attention_is_not_taken_for_dense() -> None:
    dense = find_prefill(Geometry(61, 7168, 1, 576, "mla"), "B300", 8)
    sparse = find_prefill(Geometry(61, 7168, 1, 576, "sparse_mla"), "B300", 8)
    assert (dense.model, sparse.model) == ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2")


def test_what_was_not_fitted_is_scaled_and_says_so() -> None:
    other_gpu = find_prefill(LLAMA_8B, "Radeon RX 580", 1)
    assert other_gpu.gpu == "h100_sxm"
    assert "Radeon RX 580" in other_gpu.source
    twice = find_prefill(Geometry(64, 4096, 8, 128, "gqa"), "H100", 1)
    fitted = find_prefill(LLAMA_8B, "H100", 1)
    assert twice.token_s == pytest.approx(2 * fitted.token_s)
    assert "scaled" in twice.source
    assert twice.error > fitted.error
    kimi = find_prefill(Geometry(93, 7168, 1, 576, "hybrid_mla"), "GB300", 8)
    assert (kimi.model, kimi.gpu) == ("moonshotai/Kimi-K3", "b300_sxm")
    assert "gb300" in kimi.source
    split = find_prefill(LLAMA_8B, "H100", 2)
    assert split.token_s == pytest.approx(fitted.token_s / 2)


def test_the_disk_profile_is_the_measured_one() -> None:
    disk = find_disk()
    assert (disk.read.bytes_per_s, disk.write_bytes_per_s, disk.read.overhead_s) == (11.6e9, 2.0e9, 6e-3)
    with pytest.raises(KeyError, match="tape"):
        find_disk("tape")
