"""`kvstore check`: asks the daemon whether every invariant holds."""

import typer

from kvstore import admin
from kvstore.cli.output import EXIT_FAILED, Endpoint, Json, print_json, reported


def check(endpoint: Endpoint = None, json: Json = False) -> None:
    """Look for anything that must never be, and exit with 1 if there is something. The daemon pauses meanwhile."""
    with reported(endpoint, as_json=json) as where:
        problems = admin.check(where)
    if json:
        print_json({"problems": problems})
    else:
        print("\n".join(problems) or "no problems")
    if problems:
        raise typer.Exit(EXIT_FAILED)
