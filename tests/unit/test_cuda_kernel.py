"""The copy kernel without a device: its arithmetic on the host, the targets it was built for, and our declarations of
the driver against NVIDIA's."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore._native import CUDA_KERNELS
from tests.unit.fake_cuda import ROOT, copy_tiles

TILE_BYTES = 4096
FATBIN_MAGIC = 0xBA55ED50
PTX, ELF = 1, 2


FOLDERS = [
    Path(folder) for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if folder
]


def nvcc() -> str | None:
    places = [shutil.which("nvcc"), *(shutil.which(folder / "bin/nvcc") for folder in FOLDERS)]
    return next((place for place in places if place), None)


def nvcc_version(compiler: str) -> tuple[int, int]:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    assert release is not None, said
    return int(release[1]), int(release[2])


def cuda_headers() -> Path | None:
    return next((folder / "include" for folder in FOLDERS if (folder / "include/cudaTypedefs.h").exists()), None)


def headers_version(headers: Path) -> int:
    """13000: of CUDA 13.0."""
    version = re.search(r"^#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text(), re.MULTILINE)
    assert version is not None
    return int(version[1])


# ---- arithmetic


def check_tiles(sizes: list[int], shifts: list[tuple[int, int]], warps: int) -> None:
    """Fragments apart from each other by at least a byte; nothing may change between them."""
    room = TILE_BYTES + 64
    source = np.random.default_rng(1).integers(0, 256, room * len(sizes), np.uint8)
    target = np.full(room * len(sizes), 0xEE, np.uint8)
    expected = target.copy()
    tiles = np.zeros((len(sizes), 3), np.uint64)
    for i, (nbytes, (here, there)) in enumerate(zip(sizes, shifts, strict=True)):
        begin, end = i * room + here, i * room + there
        tiles[i] = source.ctypes.data + begin, target.ctypes.data + end, nbytes
        expected[end : end + nbytes] = source[begin : begin + nbytes]
    assert copy_tiles(tiles, warps), "a word that is not aligned, or outside its tile"
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("nbytes", [*range(70), 127, 128, 511, 512, 513, 4079, 4080, 4081, 4095, 4096])
@pytest.mark.parametrize("shift", [(0, 0), (16, 0), (1, 1), (15, 15), (0, 8), (4, 0), (2, 4), (0, 1), (13, 7)])
def test_a_tile_of_any_size_and_alignment_arrives_and_nothing_else_changes(nbytes: int, shift: tuple[int, int]) -> None:
    check_tiles([nbytes], [shift], 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, TILE_BYTES), st.tuples(st.integers(0, 31), st.integers(0, 31))),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 30),
)
def test_tiles_are_shared_out_over_any_number_of_warps(tiles: list[tuple[int, tuple[int, int]]], warps: int) -> None:
    check_tiles([nbytes for nbytes, _ in tiles], [shift for _, shift in tiles], warps)


# ---- what was built


def targets(fatbin: bytes) -> list[tuple[str, int, bytes]]:
    """Kind, architecture as CUDA counts it (103 for 10.3), and code of each entry."""
    magic, _, header_bytes, nbytes = struct.unpack_from("<IHHQ", fatbin)
    assert magic == FATBIN_MAGIC, f"no fatbin: {magic:#x}"
    entries, at = [], header_bytes
    while at < header_bytes + nbytes:
        kind, _, entry_header_bytes, code_bytes = struct.unpack_from("<HHIQ", fatbin, at)
        (architecture,) = struct.unpack_from("<I", fatbin, at + 28)
        code = fatbin[at + entry_header_bytes : at + entry_header_bytes + code_bytes]
        entries.append(({PTX: "ptx", ELF: "elf"}[kind], architecture, code))
        at += entry_header_bytes + code_bytes
    return entries


@pytest.fixture
def built() -> list[tuple[str, int, bytes]]:
    if not CUDA_KERNELS:
        compiler = nvcc()
        assert compiler is None or nvcc_version(compiler) < (12, 9), (
            f"there is {compiler}, but this build has no kernel: see the output of the build"
        )
        pytest.skip("built without the copy kernel, for there is no nvcc of CUDA 12.9 or newer on this machine")
    return targets(CUDA_KERNELS)


def test_the_kernel_is_built_for_b300_and_all_from_hopper_on(built: list[tuple[str, int, bytes]]) -> None:
    assert sorted(architecture for kind, architecture, _ in built if kind == "elf") == [90, 100, 103]
    assert [architecture for kind, architecture, _ in built if kind == "ptx"] == [90]  # for what comes after


def test_the_code_of_each_target_is_what_its_header_says(built: list[tuple[str, int, bytes]]) -> None:
    for kind, architecture, code in built:
        if kind == "elf":
            assert code[:4] == b"\x7fELF"
            (flags,) = struct.unpack_from("<I", code, 48)
            assert flags >> 8 & 0xFF == architecture
        else:
            assert re.search(rb"^\.target sm_(\d+)", code, re.MULTILINE).group(1) == str(architecture).encode()
        assert b"kvstore_copy_tiles" in code


def test_code_for_one_device_only_would_not_do_for_b300() -> None:
    """What the test above must not take for B300: an entry of sm_100a has another number."""
    compiler = nvcc()
    if compiler is None:
        pytest.skip("no nvcc on this machine")
    built = ROOT / "native/cuda/kernels.cu"
    done = subprocess.run(
        [compiler, "--fatbin", "-std=c++17", "--no-compress", "-gencode=arch=compute_100a,code=sm_100a",
         "-o", "/dev/stdout", str(built)],
        check=True, capture_output=True,
    )  # fmt: skip
    assert [(kind, architecture) for kind, architecture, _ in targets(done.stdout)] == [("elf", 100)]


def test_our_declarations_of_the_driver_are_nvidias() -> None:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("no CUDA headers on this machine")
    if (version := headers_version(headers)) < 13000:
        pytest.skip(f"the declarations are those of CUDA 13.0, and the headers here of version {version}")
    done = subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'native'}", f"-I{headers}",
         str(ROOT / "native/tests/cuda_abi.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
