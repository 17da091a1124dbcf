"""`kvstore simulate`: replays a trace against tiers of the sizes given, without a daemon."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvstore import plan as planning
from kvstore import profiles
from kvstore import simulate as simulation
from kvstore.cli.output import Json, print_json, print_table, reported
from kvstore.cli.plan import GpuName, Profile, node_profile, read_config, size_of
from kvstore.config import EVICTION_POLICIES, EVICTION_POLICY_DEFAULT
from kvstore.costmodel import KVSize
from kvstore.errors import ConfigurationError
from kvstore.limits import WORLD_SIZE_MAX
from kvstore.profiles.machine import find_machine
from kvstore.profiles.measured import Measured

_MODEL = "Llama-3.1-8B"
_CHUNK_TOKENS_MAX = 1 << 24
_MODEL_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            help="JSON lines: timestamp (ms), input_length (tokens), hash_ids (one for each block of the prompt)."
        ),
    ],
    cpu_bytes: Annotated[
        str | None, typer.Option(help="Size of the cpu tier, for example 512GiB. Needed, or the next.")
    ] = None,
    cpu_chunks: Annotated[int | None, typer.Option(min=1, help="The same in chunks.")] = None,
    fs_bytes: Annotated[str | None, typer.Option(help="Size of the filesystem tier. Default: none.")] = None,
    fs_chunks: Annotated[int | None, typer.Option(min=1, help="The same in chunks.")] = None,
    tokens_per_chunk: Annotated[
        int | None, typer.Option(min=1, max=_CHUNK_TOKENS_MAX, help="Default: the trace's own blocks.")
    ] = None,
    tokens_per_block: Annotated[
        int | None,
        typer.Option(min=1, max=_CHUNK_TOKENS_MAX, help="Tokens for each of the trace's hash_ids. Default: found out."),
    ] = None,
    eviction_policy: Annotated[
        str, typer.Option(help=f"Of the cpu tier: {', '.join(EVICTION_POLICIES)}.")
    ] = EVICTION_POLICY_DEFAULT,
    admission: Annotated[
        str,
        typer.Option(
            help="What is loaded and stored: always (everything), never (nothing), model (as engines decide)."
        ),
    ] = simulation.ADMISSIONS[0],
    config: Annotated[
        Path | None, typer.Option(help=f"The model's config.json, or its directory. Default: {_MODEL}.")
    ] = None,
    gpu: GpuName = None,
    profile: Profile = None,
    tp: Annotated[int, typer.Option(min=1, max=WORLD_SIZE_MAX, help="Tensor parallel size.")] = 1,
    drive_bytes: Annotated[str, typer.Option(help="Size of the drive, for its wear.")] = "7680GB",
    json: Json = False,
) -> None:
    """Replay a trace: hit rates, time saved and bytes written for tiers of these sizes."""
    with reported(None, as_json=json):
        requests = simulation.read_trace(trace, tokens_per_block=tokens_per_block)
        requests = requests.in_chunks(tokens_per_chunk or requests.tokens_per_block)
        hardware = _hardware(config, node_profile(profile), gpu, tp, requests.tokens_per_block)
        chunk_bytes = hardware.chunk_bytes(requests.tokens_per_block)
        cpu = _chunks("--cpu", cpu_bytes, cpu_chunks, chunk_bytes)
        if cpu is None:
            raise ConfigurationError("the cpu tier has no size; say --cpu-bytes 64GiB or --cpu-chunks 1000")
        found = simulation.simulate(
            requests,
            cpu_chunks=cpu,
            fs_chunks=_chunks("--fs", fs_bytes, fs_chunks, chunk_bytes),
            eviction_policy=_one_of("--eviction-policy", eviction_policy, EVICTION_POLICIES),
            admission=_one_of("--admission", admission, simulation.ADMISSIONS),
            hardware=hardware,
            drive_bytes=size_of("--drive-bytes", drive_bytes) or planning.DRIVE_BYTES,
        )
    if json:
        print_json(found.document())
    else:
        _print(found, Console())


def _hardware(
    config: Path | None, node: Measured | None, gpu_name: str | None, tp_size: int, chunk_tokens: int
) -> simulation.Hardware:
    fields = read_config(config) if config else _MODEL_CONFIG
    planning.require_tp_size(fields, tp_size)
    layout = planning.layout_from_config(fields, tp_size=tp_size)
    planning.refuse_without_growth(layout)
    assert layout.geometry is not None, "a layout made from a configuration has a geometry"
    machine = find_machine(node, gpu_name, layout.fragment_bytes)
    prefill = profiles.find_prefill(layout.geometry, machine.gpu_name, tp_size)
    return simulation.Hardware(
        recompute=prefill.recompute_model(),
        kv=KVSize(layout.kv_bytes_per_token, layout.prompt_bytes(tp_size)),
        kv_on_rank=layout.on_rank,
        kv_from_disk=layout.from_disk(tp_size),
        machine=machine,
        fs_link=planning.from_disk(layout, machine.disk, machine.link, chunk_tokens),
        note=f"{config or _MODEL}, TP {tp_size}, on {machine.gpu_name}; recompute times: {prefill.source}",
    )


def _one_of(flag: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigurationError(f"{flag} is one of {', '.join(known)}, not {value!r}")
    return value


def _chunks(flag: str, size: str | None, chunks: int | None, chunk_bytes: int) -> int | None:
    if size is None:
        return chunks
    if chunks is not None:
        raise ConfigurationError(f"{flag}-bytes and {flag}-chunks say the same; give one of them")
    nbytes = size_of(f"{flag}-bytes", size)
    assert nbytes is not None, "a size was given"
    if nbytes < chunk_bytes:
        raise ConfigurationError(f"{flag}-bytes {size} holds no chunk of {chunk_bytes} bytes")
    return nbytes // chunk_bytes


def _print(found: simulation.Simulation, console: Console) -> None:
    trace = found.trace
    lines = [
        f"{len(trace.ends):,} requests, {len(trace.ids):,} chunks of {trace.tokens_per_block:,} tokens referred to, "
        f"{trace.seconds:,.0f} s; {found.eviction_policy}, admission {found.admission}",
        found.hardware.note,
        *found.hardware.machine.sentences(),
        f"chunk hit rate {found.chunk_hit_rate:.4f}, token hit rate {found.token_hit_rate:.4f}",
        f"saved {found.seconds_saved:,.1f} s: {found.recompute_s:,.1f} s of recomputing, less {found.load_s:,.1f} s of "
        "loading",
    ]
    for line in lines:
        console.print(line, highlight=False)
    table = Table("tier", "chunks", "size", "hits", "evictions", "written")
    for tier in found.tiers:
        sizes = (tier.capacity_chunks * found.chunk_bytes, tier.written_chunks * found.chunk_bytes)
        table.add_row(
            tier.name, f"{tier.capacity_chunks:,}", decimal(sizes[0]), f"{tier.hits:,}", f"{tier.evictions:,}",
            decimal(sizes[1]),
        )  # fmt: skip
    print_table(table)
    if found.drive_writes_per_day is not None:
        console.print(
            f"{found.drive_writes_per_day:.2f} drive writes a day of {decimal(int(found.drive_bytes))}", highlight=False
        )
    if (beside := found.hardware.kv.state_bytes) > 0:
        console.print(
            f"Not counted in sizes and writes: {decimal(beside)} of states and windows for each prompt kept. Unless "
            "told otherwise vLLM keeps them at prompts' ends alone: prompts that share only a beginning find less.",
            highlight=False,
        )
    console.print(f"replayed {found.references_per_s:,.0f} chunk references a second", highlight=False)
