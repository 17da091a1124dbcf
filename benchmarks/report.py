"""What every benchmark prints: figures beside the limit that was measured in the same run, as a table or as JSON."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    value: float  # median
    unit: str
    limit: float  # of the machine, or of a peer, in the same unit
    ratio: float  # value against limit
    spread: str = ""  # lowest to highest

    @classmethod
    def of(cls, name: str, values: Sequence[float], unit: str, limits: Sequence[float]) -> "Result":
        value, limit = statistics.median(values), statistics.median(limits)
        return cls(name, round(value, 4), unit, round(limit, 4), round(value / limit, 4), spread(values))

    @classmethod
    def of_pairs(cls, name: str, values: Sequence[float], unit: str, limits: Sequence[float]) -> "Result":
        """As `of`, but the ratio is the median of those of each value and the limit measured beside it: whatever else
        the machine did then changed both."""
        ratios = [value / limit for value, limit in zip(values, limits, strict=True)]
        return replace(cls.of(name, values, unit, limits), ratio=round(statistics.median(ratios), 4))


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}"


def machine() -> str:
    """Processor, cores, and how busy the machine was: figures of a busy machine are worth little."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}"


def main(bench: str, description: str, measure: Callable[[], list[Result]], *flags: str) -> None:
    """`flags`: further ones, which `measure` looks for itself."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{bench}", description=description)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    as_json = parser.parse_args().json
    where = machine()
    results = measure()
    if as_json:
        print(json.dumps({"bench": bench, "machine": where, "results": [asdict(result) for result in results]}))
        return
    table = Table(title=f"{bench}: {where}")
    for column in ("name", "value", "spread", "limit", "unit", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for result in results:
        table.add_row(
            result.name, f"{result.value:.4g}", result.spread, f"{result.limit:.4g}", result.unit, f"{result.ratio:.2f}"
        )
    Console().print(table)
