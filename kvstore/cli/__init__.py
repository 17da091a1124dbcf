"""The `kvstore` command: one file per verb (`clear` is an `evict` of everything).

Exit codes: 0 done, 1 failed, 2 wrong usage, 4 no daemon at the endpoint.
"""

import os
import sys
from typing import Annotated

import typer

from kvstore import __version__
from kvstore.cli import calibrate, check, evict, explain, gc, ls, plan, quota, serve, simulate, stats
from kvstore.cli.output import EXIT_FAILED, EXIT_USAGE, print_json

app = typer.Typer(
    name="kvstore",
    help="One KV-cache store per node, shared by every vLLM engine on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all_verbs(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


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

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer exports only this one kind of it

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
            if "--json" in sys.argv[1:]:
                sys.exit(_run_for_program(command))
            command()
        finally:
            if sys.stdout is not None:  # its descriptor is closed
                sys.stdout.flush()
    except OSError as error:  # commands and daemon have said what else went wrong
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left in its buffer cannot be written at the exit either
        print(f"kvstore: the output cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _run_for_program(command: typer.Typer) -> int:
    """The exit code. A command line that cannot be understood, and a question that was denied, are documents too."""
    try:
        return command(standalone_mode=False) or 0
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        print_json({"error": {"kind": "UsageError", "message": message}})
        return EXIT_USAGE
    except typer.Abort:
        print_json({"error": {"kind": "Aborted", "message": "nothing was removed: the question was not answered yes"}})
        return EXIT_FAILED
