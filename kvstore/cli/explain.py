"""`kvstore explain`: why two engines that should share chunks do not."""

from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import Endpoint, Json, print_json, reported


def explain(
    namespaces: Annotated[tuple[str, str], typer.Option(metavar="A B", help="Two namespaces' ids, or how they begin.")],
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Show in which fields two namespaces differ: chunks are shared only within one."""
    with reported(endpoint, as_json=json) as where:
        found = admin.compare(where, *namespaces)
    if json:
        print_json(found)
    else:
        Console().print(_differences(found))


def _differences(found: Mapping[str, object]) -> Table | str:
    differences = cast("Sequence[Mapping[str, object]]", found["differences"])
    if not differences:
        return f"{found['one']} is one namespace: its engines share their chunks"
    table = Table("field", str(found["one"]), str(found["other"]))
    for row in differences:
        table.add_row(str(row["field"]), str(row["one"]), str(row["other"]))
    return table
