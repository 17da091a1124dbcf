"""`kvstore plan`: reads a model's configuration or an engine's log, prints the plan, draws it if asked."""

import json as json_module
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvstore import plan as planning
from kvstore import profiles
from kvstore.cli.output import Json, print_json, print_table, reported
from kvstore.config import parse_bytes
from kvstore.errors import ConfigurationError
from kvstore.profiles import measured
from kvstore.profiles.machine import DEFAULT_GPU, find_machine

GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="Name as the driver reports it, or a part of it. Default: the one that `kvstore calibrate` measured here, "
        f"else {DEFAULT_GPU}.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="What `kvstore calibrate` wrote of this node, which counts before published figures; `none` to leave it "
        "out. Default: KVSTORE_PROFILE, else the configuration directory, if it is there."
    ),
]
_TOKENS_PER_S_MAX = 1e12


def plan(
    config: Annotated[
        Path | None, typer.Option(help="The model's config.json, or the directory that holds it.")
    ] = None,
    engine_log: Annotated[Path | None, typer.Option(help="The log of an engine's start, at log level INFO.")] = None,
    gpu: GpuName = None,
    profile: Profile = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel size. Default: the log's, else 1.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(planning.KV_DTYPES)}.")] = None,
    state_slots: Annotated[
        int, typer.Option(min=1, help="State slots a request holds (hybrid models).")
    ] = planning.STATE_SLOTS,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Prompt tokens a second, as measured. Default: the most that can be prefilled.")
    ] = None,
    new_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of them that no cache holds.")] = 1.0,
    cpu_bytes: Annotated[str | None, typer.Option(help="Size of the cpu tier, for example 512GiB.")] = None,
    fs_bytes: Annotated[str | None, typer.Option(help="Size of the filesystem tier.")] = None,
    drive_bytes: Annotated[str, typer.Option(help="Size of the drive, for its wear.")] = "7680GB",
    plot: Annotated[Path | None, typer.Option(help="Draw times by length into this file (needs matplotlib).")] = None,
    json: Json = False,
) -> None:
    """Size the tiers and say from which prefix length on a load pays, before anything runs."""
    with reported(None, as_json=json):
        found = _plan(
            config, engine_log, gpu, profile, tp, kv_dtype, state_slots, tokens_per_s, new_share,
            size_of("--cpu-bytes", cpu_bytes), size_of("--fs-bytes", fs_bytes), size_of("--drive-bytes", drive_bytes),
        )  # fmt: skip
        if plot is not None:
            _draw(found, plot)
    if json:
        print_json(found.document())
    else:
        _print_tables(found, Console())


def _plan(
    config: Path | None,
    engine_log: Path | None,
    gpu_name: str | None,
    profile: str | None,
    tp: int | None,
    kv_dtype: str | None,
    state_slots: int,
    tokens_per_s: float | None,
    new_share: float,
    cpu_bytes: int | None,
    fs_bytes: int | None,
    drive_bytes: int | None,
) -> planning.Plan:
    if config is None and engine_log is None:
        raise ConfigurationError("nothing to plan from; give --config config.json, --engine-log FILE, or both")
    if tokens_per_s is not None and not 0 < tokens_per_s <= _TOKENS_PER_S_MAX:
        raise ConfigurationError(f"--tokens-per-s is a rate above 0, up to {_TOKENS_PER_S_MAX:g}, not {tokens_per_s}")
    log = planning.read_engine_log(read(engine_log)) if engine_log is not None else None
    if tp and log is not None and tp != log.tp_size:
        if log.says_tp_size:
            raise ConfigurationError(
                f"--tp is {tp}, and the engine's log is of tensor parallel size {log.tp_size}; leave --tp out"
            )
        log = replace(log, tp_size=tp)
    tp_size = tp or (log.tp_size if log is not None else 1)
    layout: planning.Layout | None = None
    geometry = profiles.geometry_of(log.model) if log is not None and log.model else None
    longest = log.longest_tokens if log is not None else None
    if config is not None:
        fields = read_config(config)
        if tp is not None:
            planning.require_tp_size(fields, tp)
        longest = longest or planning.longest_from_config(fields)
        dtype = kv_dtype or (log.kv_dtype if log is not None and log.kv_dtype in planning.KV_DTYPES else "auto")
        if log is not None and planning.unknown_layers(fields) is not None:
            geometry = planning.geometry_from_config(fields)  # what the layers hold is in the log
        else:
            layout = planning.layout_from_config(fields, kv_dtype=dtype, tp_size=tp_size, state_slots=state_slots)
    if log is not None:
        layout = planning.layout_from_log(log, layout, geometry)
    assert layout is not None, "neither a configuration nor a log"
    if layout.geometry is None:
        model = log.model if log is not None else None
        raise ConfigurationError(
            f"the log names the model {model!r}, of which no profile is known; give its config.json too (--config)"
        )
    machine = find_machine(node_profile(profile), gpu_name, layout.fragment_bytes)
    return planning.make_plan(
        layout,
        profiles.find_prefill(layout.geometry, machine.gpu_name, tp_size),
        machine,
        tp_size=tp_size,
        step_tokens=log.step_tokens if log is not None else None,
        tokens_per_s=tokens_per_s,
        new_share=new_share,
        cpu_bytes=cpu_bytes,
        fs_bytes=fs_bytes,
        drive_bytes=drive_bytes if drive_bytes is not None else planning.DRIVE_BYTES,
        longest_tokens=longest,
    )


def node_profile(named: str | None) -> measured.Measured | None:
    """As `--profile` says. ConfigurationError: it is damaged, or is not there though it was named."""
    if named == "none":
        return None
    path = measured.profile_path() if named is None else Path(named)
    found = measured.read(path)
    if found is None and named is not None:
        raise ConfigurationError(f"--profile {named} is not there; write it with `kvstore calibrate --output {named}`")
    return found


def size_of(flag: str, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        size = parse_bytes(value)
    except ValueError as error:
        raise ConfigurationError(f"{flag}: {error}") from None
    if size <= 0:
        raise ConfigurationError(f"{flag} is a size above 0, not {value}")
    return size


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def read_config(path: Path) -> dict[str, object]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json_module.loads(read(file))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{file} holds a JSON {type(config).__name__}, not a model's configuration")
    return config


def _print_tables(found: planning.Plan, console: Console) -> None:
    layout = found.layout
    lines = [
        f"{layout.note}",
        f"{layout.kv_bytes_per_token:,.0f} bytes a token, {layout.kv_bytes_per_token_on_rank:,.0f} on each of "
        f"{found.tp_size} ranks"
        + (f"; {layout.state_bytes_on_rank:,} bytes a request however long" if layout.knows_states else ""),
        f"recompute times: {found.prefill.source}",
        *found.machine.sentences(),
    ]
    if not layout.knows_states:
        lines.insert(
            2,
            "An engine's log does not say whether the model has windows or states. If it has, fewer bytes are kept of "
            "each token, and more is loaded with each prompt; its config.json says so (--config)",
        )
    gpu = found.machine.gpu
    if gpu is not None and (memory := planning.gpu_memory(gpu)) is not None:
        lines.append(f"{gpu.name}: {decimal(int(memory[0]))}, of which vLLM takes {decimal(int(memory[1]))}")
    for line in lines:
        console.print(line, highlight=False)
    for tier in found.tiers:
        print_table(_length_table(tier, found.longest_tokens, gpu_is_known=gpu is not None))
    sizes = Table("tier", "size", "holds tokens", "to keep what comes back", "for", title="sizes")
    for tier in found.tiers:
        tokens = tier.tokens(layout.kv_bytes_per_token)
        sizes.add_row(
            tier.name,
            "-" if tier.capacity_bytes is None else decimal(tier.capacity_bytes),
            "-" if tokens is None else f"{tokens:,}",
            decimal(int(tier.needed_bytes)),
            f"{tier.window_s:.0f} s",
        )
    print_table(sizes)
    if (beside := layout.prompt_bytes(found.tp_size)) > 0:
        console.print(
            f"Not counted in sizes, tokens and drive writes: {decimal(beside)} of states and windows for each prompt "
            "kept.",
            highlight=False,
        )
    rate = "as given" if found.tokens_per_s_is_measured else "the most that can be prefilled"
    console.print(
        f"{found.tokens_per_s:,.0f} prompt tokens/s ({rate}), {found.new_share:.0%} of them new: at most "
        f"{decimal(int(found.write_bytes_per_s))}/s to disk, {found.drive_writes_per_day:.1f} drive writes a day of "
        f"{decimal(int(found.drive_bytes))}",
        highlight=False,
    )


def _length_table(tier: planning.TierPlan, longest: int | None, *, gpu_is_known: bool) -> Table:
    pays_from, pays_below = tier.pays_from_tokens, tier.pays_below_tokens
    never = "never pays by itself"
    if pays_from is not None and longest is not None and pays_from > longest:
        never += f" within the model's {longest:,} tokens"
        pays_from = None
    where = [] if pays_from is None else [f"from {pays_from:,} tokens on"]
    if pays_below > 0:
        where.append(f"below {pays_below:,}")
    pays = "always pays" if pays_from == 0 else f"pays {' and '.join(where)}" if where else never
    if tier.wins_between:
        pays += ", else only where a step has just begun"
    assumed = "not measured on this link" if gpu_is_known else "an assumption: no profile of this GPU"
    measured = "" if tier.link_is_measured else f" ({assumed})"
    title = f"{tier.name}: a load {pays}, at {tier.link.bytes_per_s / 1e9:.1f} GB/s{measured}"
    table = Table("prefix tokens", "recompute ms", "load ms", "GB/s to break even", "quicker", title=title)
    for length in tier.lengths:
        table.add_row(
            f"{length.tokens:,}",
            f"{length.recompute_s * 1e3:,.1f}",
            f"{length.load_s * 1e3:,.1f}",
            f"{rate / 1e9:,.1f}" if math.isfinite(rate := length.bytes_per_s_to_break_even) else "no rate does",
            "load" if length.loads else "recompute",
        )
    return table


def _draw(found: planning.Plan, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "a plot needs matplotlib, which is not installed; run: pip install matplotlib"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    tokens = [length.tokens for length in found.tiers[0].lengths]
    axes.loglog(tokens, [length.recompute_s for length in found.tiers[0].lengths], label="recompute")
    for tier in found.tiers:
        axes.loglog(tokens, [length.load_s for length in tier.lengths], label=f"load from {tier.name}")
    axes.set_xlabel("prefix, tokens")
    axes.set_ylabel("seconds")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot draw {path}: {error}") from None
    finally:
        pyplot.close(figure)
