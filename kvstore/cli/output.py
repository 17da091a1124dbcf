"""How every operator command ends: its answer as JSON or a table, its failure as an exit code and one message."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvstore.config import default_endpoint, parse_duration_ms
from kvstore.errors import ConfigurationError, KVStoreError, NotAllowed, Unavailable

EXIT_FAILED, EXIT_USAGE, EXIT_NO_DAEMON = 1, 2, 4
TABLE_WIDTH_MAX = 1_000

Endpoint = Annotated[
    str | None, typer.Option(help="unix:///path/kvstore.sock. Default: KVSTORE_ENDPOINT, else the default directory.")
]
NamespaceId = Annotated[str | None, typer.Option("--namespace", help="Its id, as `kvstore ls namespaces` shows it.")]
Salt = Annotated[
    str | None, typer.Option("--tenant", metavar="SALT", help="The tenant's cache_salt; the daemon does not keep it.")
]
TenantId = Annotated[str | None, typer.Option(help="The tenant's id, as `kvstore ls tenants` shows it.")]
Tier = Annotated[str | None, typer.Option(help="cpu, fs, or all.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def positive(flag: str, text: str | None, parse: Callable[[str], int]) -> int | None:
    """What an option says, a size or a time, None where it is not given. ConfigurationError."""
    if text is None:
        return None
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{flag}: {error}") from None
    if not 0 < value < 1 << 63:
        least, unit = ("1ms", "ms") if parse is parse_duration_ms else ("1 byte", "bytes")
        raise ConfigurationError(f"{flag} is {text}; it must be {least} at the least, and less than 2^63 {unit}")
    return value


def print_table(table: Table, *, stderr: bool = False) -> None:
    """As wide as its longest rows are: an id that is cut cannot be copied into the next command."""
    console = Console(stderr=stderr)
    widest = console.measure(table, options=console.options.update(max_width=TABLE_WIDTH_MAX)).maximum
    console.width = max(console.width, widest)
    console.print(table)


def print_removed(removed: dict[str, object], *, dry_run: bool = False) -> None:
    """As a table."""
    by_tier = removed["by_tier"]
    assert isinstance(by_tier, dict)
    table = Table("tier", "would go" if dry_run else "removed", "size", "skipped, pinned")
    for name, tier in by_tier.items():
        table.add_row(name, str(tier["evicted_chunks"]), decimal(tier["evicted_bytes"]), str(tier["skipped_pinned"]))
    print_table(table)


def by_tier(row: Mapping[str, object]) -> tuple[str, str, str]:
    """Tiers, chunks and sizes, a line for each tier: a chunk may be in both."""
    tiers = cast("dict[str, dict[str, int]]", row["by_tier"])
    chunks = (str(tier["chunks"]) for tier in tiers.values())
    return "\n".join(tiers), "\n".join(chunks), "\n".join(decimal(tier["bytes"]) for tier in tiers.values())


def model_name(document: object) -> str:
    """What engines and clients call the model, where the namespace's document is kept and says so."""
    if not isinstance(document, dict):
        return "(document not kept)"
    model = document.get("model", "")
    return str(model.get("name", "") if isinstance(model, dict) else model)  # an engine's says more than the name


@contextlib.contextmanager
def reported(endpoint: str | None, *, as_json: bool) -> Iterator[str]:
    """Yields the endpoint to use; a failure inside becomes a message and an exit code."""
    try:
        if endpoint == "":  # a script's variable that is not set must not become some other daemon
            raise ConfigurationError("--endpoint is empty; leave it out for the default one")
        yield endpoint or default_endpoint()
    except KVStoreError as error:
        if as_json:
            print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
        else:
            print(f"kvstore: {error}", file=sys.stderr)
        raise typer.Exit(_exit_code(error)) from None


def _exit_code(error: KVStoreError) -> int:
    match error:
        case NotAllowed():
            return EXIT_FAILED
        case Unavailable():
            return EXIT_NO_DAEMON
        case ConfigurationError():
            return EXIT_USAGE
        case _:
            return EXIT_FAILED
