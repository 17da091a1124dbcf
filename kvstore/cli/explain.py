"""`kvstore explain`: why a request hit, missed, was loaded or recomputed, what became of a key, why two engines
that should share chunks do not."""

from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from kvstore import admin
from kvstore.cli.output import Endpoint, Json, print_json, reported
from kvstore.decisions import REFUSED_PREFIX_BYTES
from kvstore.errors import NotFound
from kvstore.limits import KEY_BYTES_MAX

_WHY = {
    "LOAD_IS_QUICKER": "loading is quicker",
    "RECOMPUTE_IS_QUICKER": "recomputing is quicker",
    "TIER_SICK": "the tier refuses to be read",
    "NO_HIT": "no chunk that the engine lacks was there",
    "LEARNING": "too little is known yet to decline",
    "MEASURING": "recomputed to learn how long that takes",
    "EXPLORING": "against the estimate, to see whether it still holds",
    "ALWAYS": "admission=always",
    "NEVER": "admission=never",
    "WORTH_IT": "likely to be used again",
    "PRESENT": "all of it was there",
    "ADMISSION": "would cost more than it is likely to save",
    "LEFT_OUT": "the request left the tier out that had it, by kv_load_tiers",
    "TIER_FULL": "the daemon had no slot to give",
    "NOT_GRANTED": "the engine held its share of the daemon's slots already",
    "NO_SLOT_YET": "the daemon had not given enough slots in time",
    "DAEMON_SLOW": "the daemon did not run just then",
}
_CAME = {
    "PRESENT": "there already",
    "QUOTA": "rejected: QUOTA (its tenant's; `kvstore quota get` shows it)",
    "ADMISSION": "rejected: ADMISSION (this daemon takes no chunk without a cache_salt)",
    "NOT_GRANTED": "given up: their slots had been taken back, as when an operator removes chunks",
}


def explain(
    about: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST|KEY]",
            help="A request's id or how it begins (the client's own too), or a key in hex, 8 bytes or more.",
        ),
    ] = None,
    namespaces: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two namespaces' ids, or how they begin: in which fields they differ."),
    ] = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Say why a request was loaded or recomputed, stored or not, what became of a key, or how two namespaces differ."""
    if (about is None) == (namespaces is None):
        raise typer.BadParameter("name a request or a key, or two namespaces with --namespaces A B")
    if namespaces is not None:
        _compare(*namespaces, endpoint=endpoint, json=json)
        return
    assert about is not None
    with reported(endpoint, as_json=json) as where:
        found = admin.explain(where, about)
        if not found["decisions"] and not found["keys"]:
            raise NotFound(
                f"nothing is known of {about!r}: it is not the beginning of a request's id or of a key here, was never "
                f"stored or decided about, or was so long ago that it is forgotten{_no_key(about)}"
            )
    if json:
        print_json(found)
        return
    console = Console()
    for decision in cast("Sequence[Mapping[str, object]]", found["decisions"]):
        for line in _decision(decision):
            console.print(line, highlight=False, soft_wrap=True)
    for fate in cast("Sequence[Mapping[str, object]]", found["keys"]):
        tenant = fate["tenant_id"] or "unknown"
        console.print(f"namespace {fate['namespace_id']}, tenant {tenant}", highlight=False, soft_wrap=True)
        for event in cast("Sequence[str]", fate["events"]):
            console.print(f"  {event}", highlight=False, soft_wrap=True)


def _no_key(about: str) -> str:
    count, least, most = len(admin.hex_digits(about)), 2 * REFUSED_PREFIX_BYTES, 2 * KEY_BYTES_MAX
    if not count or (count % 2 == 0 and least <= count <= most):
        return ""
    return f"; it was not taken for a key: it has {count} hex digits, and a key an even number of {least} to {most}"


def _decision(decision: Mapping[str, object]) -> list[str]:
    head = f"{decision['kind']} decision for request {decision['request']}, {decision['age_s']:.1f} s ago"
    why = _why(str(decision["reason"]))
    return [head, *(_store(decision, why) if decision["kind"] == "store" else _load(decision, why))]


def _why(reason: str) -> str:
    return f"{reason} ({_WHY[reason]})" if reason in _WHY else reason


def _load(decision: Mapping[str, object], why: str) -> list[str]:
    lines = [
        f"  prompt {decision['prompt_tokens']} tokens; in the engine's own cache up to {decision['gpu_tokens']}, "
        f"in the cpu tier up to {decision['cpu_tokens']}, with the fs tier up to {decision['hit_tokens']}; "
        f"{decision['waiting']} other requests waited",
        f"  predicted: recompute all {_ms(decision['recompute_s'])}",
    ]
    lines += [
        f"             load up to {each['end_tokens']} from {each['tier']} and compute the rest {_ms(each['seconds'])}"
        + (f", {_ms(each['wait_s'])} of it waiting for steps of the engine" if each["wait_s"] else "")
        for each in cast("Sequence[Mapping[str, object]]", decision["alternatives"])
    ]
    chosen = f"load up to {decision['end_tokens']} from {decision['tier']}" if decision["tier"] else "recompute"
    lines.append(f"  chosen: {chosen}, {why}")
    lines.append(f"  outcome: {decision['outcome'] or 'not known yet'}")
    if decision["first_missing"]:
        lines.append(f"  the first chunk that was not there has the key {decision['first_missing']}...:")
        lines += [f"    {each}" for each in cast("Sequence[str]", decision["missing"])]
    if decision["load_s"]:
        wait = _ms(decision["wait_s"] or 0)
        lines.append(
            f"  measured: loaded after {_ms(decision['load_s'])}, {wait} of it waiting for steps of the engine or"
            " copies of others; recomputing that part would have kept it, and others, waiting for "
            f"{_ms(decision['saved_s'])}"
        )
    if decision["first_token_s"]:
        lines.append(f"  measured: prompt computed after {_ms(decision['first_token_s'])}")
    return lines


def _store(decision: Mapping[str, object], why: str) -> list[str]:
    refused = decision["refused_chunks"]
    chosen = f"store up to token {decision['end_tokens']} of {decision['prompt_tokens']}"
    lacking = f" ({decision['chunks']} chunks were not there)" if decision["chunks"] else ""
    lines = [f"  chosen: {chosen}{lacking}, {why}" + (f"; {refused} chunks refused" if refused else "")]
    if reason := str(decision["disk_reason"]):
        on_disk = f"on disk up to token {decision['disk_end_tokens']}, {_why(reason)}"
        lines.append(f"          {on_disk}; {decision['disk_refused_chunks']} chunks in memory only")
    committed = cast("Mapping[str, int]", decision["committed"])
    came = [f"{committed.get('STORED', 0)} chunks stored"] if committed or decision["chunks"] else []
    came += [f"{committed[name]} {_CAME.get(name, f'rejected: {name}')}" for name in committed if name != "STORED"]
    if came:
        lines.append(f"  outcome so far, what the request generated included: {', '.join(came)}")
    return lines


def _ms(seconds: object) -> str:
    if seconds is None:
        return "an unknown time"
    return f"{float(cast('float', seconds)) * 1000:,.1f} ms"


def _compare(one: str, other: str, *, endpoint: str | None, json: bool) -> None:
    with reported(endpoint, as_json=json) as where:
        found = admin.compare(where, one, other)
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
