"""The `kvstore` command: one file per verb (`clear` is an `evict` of everything).

Exit codes: 0 done, 1 failed, 2 wrong usage, 4 no daemon at the endpoint.
"""

import os
import sys

import typer

from kvstore.cli import calibrate, check, evict, explain, gc, ls, plan, quota, serve, simulate, stats
from kvstore.cli.output import EXIT_FAILED

app = typer.Typer(
    name="kvstore",
    help="One KV-cache store per node, shared by every vLLM engine on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("stats")(stats.stats)
app.command("ls")(ls.ls)
app.command("evict")(evict.evict)
app.command("clear")(evict.clear)
app.command("explain")(explain.explain)
app.command("check")(check.check)
app.command("gc")(gc.gc)
app.add_typer(quota.quota, name="quota")
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)


daemon = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
daemon.command()(serve.serve)


def main() -> None:
    _run(app)


def serve_main() -> None:
    """`kvstored` is `kvstore serve`."""
    _run(daemon)


def _run(command: typer.Typer) -> None:
    try:
        try:
            command()
        finally:
            if sys.stdout is not None:  # its descriptor is closed
                sys.stdout.flush()
    except OSError as error:  # commands and daemon have said what else went wrong
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left in its buffer cannot be written at the exit either
        print(f"kvstore: the output cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(EXIT_FAILED)
