"""What is known of GPUs, links, disks and models before anything was measured: the tables beside this file.

Read once, never written; safe from any thread. Everything found here is a prior: `calibration` corrects it, and every
answer carries a sentence that says where it comes from, for a person to judge it by.
"""

import csv
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from kvstore.costmodel import SCALE_PRIOR, RecomputeModel, TransferModel

_UNKNOWN_GPU = "h100_sxm"
_UNKNOWN_MODEL = "meta-llama/Meta-Llama-3.1-8B"
# Nearest in speed, for a model that was not fitted on the GPU itself.
_SIMILAR = {"gb300": ("b300_sxm", "b200_sxm"), "b300_sxm": ("gb300", "b200_sxm"), "b200_sxm": ("b300_sxm",)}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decides a model's prefill time to within the fit. MLA: one KV head, as wide as the latent and its RoPE."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    attention: str  # gqa, mla, sparse_mla or hybrid_mla


@dataclass(frozen=True, slots=True)
class Link:
    """Host memory to one GPU, one direction. Not measured: the expectation is that of a slower, measured link."""

    name: str
    expected: TransferModel
    spec_bytes_per_s: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Disk:
    name: str
    read: TransferModel
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    prefill: str
    link: Link
    memory_bytes: float | None  # on the data sheet
    usable_bytes: float | None  # what systems with it offer, where that is known to be less


@dataclass(frozen=True, slots=True)
class Prefill:
    """`error`: the largest relative error of the fit; 0.5 where it was scaled from another model or GPU."""

    model: str
    gpu: str
    tp_size: int
    step_s: float
    token_s: float
    token_squared_s: float
    error: float
    source: str

    def recompute_model(self, *, scale: float = SCALE_PRIOR, step_tokens: int | None = None) -> RecomputeModel:
        return RecomputeModel(self.step_s, self.token_s, self.token_squared_s, scale, step_tokens)


def find_gpu(name: str) -> Gpu | None:
    """By the name that the driver reports (`NVIDIA B300 SXM6 AC`) or the one used here (`b300_sxm`)."""
    for pattern, gpu in _gpus():
        if name == gpu.name or re.search(pattern, name.upper()):
            return gpu
    return None


def gpu_names() -> tuple[str, ...]:
    return tuple(gpu.name for _, gpu in _gpus())


def geometry_of(model: str) -> Geometry | None:
    """By a name or path that contains a known model's (`/models/Llama-3.1-8B-Instruct`)."""
    asked = _plain(model.rsplit("/", 1)[-1])
    found = [(len(name), geometry) for known, geometry in _models() if (name := _plain(known.split("/")[-1])) in asked]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _plain(model: str) -> str:
    return re.sub(r"[^a-z0-9]", "", model.lower().removeprefix("meta-").removesuffix("-fp8").removesuffix("-2507"))


def find_disk(name: str = "nvme") -> Disk:
    for row in _rows("disks.csv"):
        if row["disk"] == name:
            read = TransferModel(float(row["read_GBps"]) * 1e9, float(row["overhead_ms"]) / 1e3)
            return Disk(name, read, float(row["write_GBps"]) * 1e9)
    raise KeyError(f"no disk profile '{name}'")


def find_prefill(geometry: Geometry, gpu_name: str, tp_size: int) -> Prefill:
    """The fit for this model and GPU; else the nearest one, scaled, which `source` says."""
    gpu = find_gpu(gpu_name)
    system = gpu.prefill if gpu is not None else _UNKNOWN_GPU
    notes = [] if gpu is not None else [f"no profile for GPU '{gpu_name}', that of {system} is used"]
    model = next((name for name, known in _models() if _is_same(geometry, known)), None)
    size_ratio = 1.0
    if model is None:
        model = _UNKNOWN_MODEL
        size_ratio = geometry.layers * geometry.hidden**2 / (32 * 4096**2)
        notes.append(f"no profile for this model, that of {model} is scaled by layers and width ({size_ratio:.2f})")
    fits = {fit.gpu: fit for fit in prefills() if fit.model == model}
    used = next((name for name in (system, *_SIMILAR.get(system, ())) if name in fits), None)
    if used is None:
        used = min(fits)
    if used != system:
        notes.append(f"{model} was not fitted on {system}, the fit on {used} is used")
    fit = fits[used]
    tp_ratio = fit.tp_size / tp_size
    if tp_size != fit.tp_size:
        notes.append(f"fitted at tensor parallel {fit.tp_size}, scaled to {tp_size}")
    return Prefill(
        model,
        used,
        tp_size,
        fit.step_s,
        fit.token_s * size_ratio * tp_ratio,
        fit.token_squared_s * math.sqrt(size_ratio) * tp_ratio,
        0.5 if notes else fit.error,
        "; ".join([f"fit of {model} on {used}", *notes]),
    )


def _is_same(asked: Geometry, known: Geometry) -> bool:
    return (
        (asked.layers, asked.kv_heads, asked.head_dim) == (known.layers, known.kv_heads, known.head_dim)
        and known.hidden in (0, asked.hidden)
        and asked.attention == known.attention
    )


@functools.cache
def prefills() -> tuple[Prefill, ...]:
    """Every fit of the table, as it stands there."""
    return tuple(
        Prefill(
            row["model"],
            row["gpu"],
            int(row["tp"]),
            float(row["step_ms"]) / 1e3,
            float(row["token_us"]) / 1e6,
            float(row["token_squared_ns"]) / 1e9,
            float(row["error_pct"]) / 100,
            "",
        )
        for row in _rows("prefill.csv")
    )


@functools.cache
def _models() -> tuple[tuple[str, Geometry], ...]:
    return tuple(
        (
            row["model"],
            Geometry(
                int(row["layers"]),
                int(row["hidden"] or 0),
                int(row["kv_heads"]),
                int(row["head_dim"]),
                row["attention"],
            ),
        )
        for row in _rows("models.csv")
    )


@functools.cache
def _gpus() -> tuple[tuple[str, Gpu], ...]:
    links = {
        row["link"]: Link(
            row["link"],
            TransferModel(float(row["expected_GBps"]) * 1e9, float(row["overhead_ms"]) / 1e3),
            float(row["spec_GBps"]) * 1e9,
            row["measured"] == "yes",
        )
        for row in _rows("links.csv")
    }
    return tuple(
        (
            row["pattern"],
            Gpu(
                row["gpu"],
                row["prefill"],
                links[row["link"]],
                float(row["memory_GB"]) * 1e9 if row["memory_GB"] else None,
                float(row["usable_GB"]) * 1e9 if row["usable_GB"] else None,
            ),
        )
        for row in _rows("gpus.csv")
    )


def _rows(table: str) -> Iterator[dict[str, str]]:
    text = resources.files(__package__).joinpath(table).read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
