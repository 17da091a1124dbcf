"""`make demo`: one daemon, and two vLLM engines one after the other. The first fills the store, the second is served.

Everything is as an operator would have it: the daemon is `kvstore serve` in its own process, each engine is a process
of its own, and what the store did is read from `kvstore stats`, not from the engines. Exit status 0 only if the second
engine gave the first one's tokens, was served every full chunk of every prompt from the store, and was faster.

Beside the long prompts there is a short one, whose prefix the second engine finds in the store as well and is expected
to recompute, because that is quicker: what it predicted and what came of it is read from `kvstore explain`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from connector.metrics import REFUSED_STORES
from connector.testing import Completion, Engine, EngineDied, random_prompt, small_model, transfer_config

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
KVSTORE = Path(sys.executable).with_name("kvstore")

PROMPTS = 5
PROMPT_TOKENS = 2_090  # with the answer still no further full chunk
SHORT_PROMPT_TOKENS = 40
SHORT_PROMPTS = 3  # engine B answers the next one where one was loaded against the prediction
OUTPUT_TOKENS = 16
BLOCK_TOKENS = 32
# Quick enough that there is a prefix which is not worth a load.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
WARM_UP_SEED_A, WARM_UP_SEED_B, PROMPT_SEED, SHORT_SEED = 1, 2, 100, 200
CPU_BYTES = "512MiB"
READY_S_MAX = 60.0
COMMIT_S_MAX = 5.0
OFFERS_MAX = 12  # of the prompts, where slots come too late
EXPLAINED_AFTER_S = 0.5  # what came of a decision reaches the daemon with the step after it
HASH_SEED = "0"

CHUNKS_PER_PROMPT = PROMPT_TOKENS // BLOCK_TOKENS  # full ones; only these are stored
SHORT_CHUNKS = SHORT_PROMPT_TOKENS // BLOCK_TOKENS


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


@contextmanager
def daemon(runtime_dir: Path, log: Path) -> Iterator[str]:
    """`kvstore serve`, as an operator starts it. Yields its endpoint."""
    command = [
        str(KVSTORE), "serve", "--runtime-dir", str(runtime_dir), "--cpu-bytes", CPU_BYTES,
        "--hash-seed", HASH_SEED, "--metrics-listen", "off",
    ]  # fmt: skip
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()  # one line, when the sockets answer; empty when the daemon has ended
        if "endpoint=" not in ready:
            raise SystemExit(f"demo: the daemon did not start; its log:\n{log.read_text()}")
        yield ready.split("endpoint=")[1].split()[0]
    finally:
        process.terminate()
        process.wait(READY_S_MAX)


def cpu_tier(endpoint: str) -> dict[str, Any]:
    """The cpu tier's row of `kvstore stats`."""
    stats = subprocess.run(
        [str(KVSTORE), "stats", "--json", "--endpoint", endpoint], check=True, capture_output=True, text=True
    )
    return next(tier for tier in json.loads(stats.stdout)["tiers"] if tier["name"] == "cpu")


def last_load_decision(endpoint: str) -> dict[str, Any]:
    """What `kvstore explain` says of the newest request; the engines here call each of theirs 0."""
    explained = subprocess.run(
        [str(KVSTORE), "explain", "0", "--json", "--endpoint", endpoint], check=True, capture_output=True, text=True
    )
    decisions = json.loads(explained.stdout)["decisions"]
    return next(decision for decision in reversed(decisions) if decision["kind"] == "load")


def wait_for_commits(endpoint: str, chunks: int) -> int:
    """Commits follow the last token by a moment: they are sent when the copies have ended. Returns how many chunks are
    there, fewer than `chunks` where no more came."""
    deadline = time.monotonic() + COMMIT_S_MAX
    while (present := cpu_tier(endpoint)["chunks"]) < chunks and time.monotonic() < deadline:
        time.sleep(0.1)
    return int(present)


def fill(engine: Engine, endpoint: str) -> list[Completion]:
    """The engine's first answers, once every full chunk is in the store.

    Requests as short as these last a tenth of a second. Where the machine holds the daemon up for longer, slots come
    too late, and the engine counts what it gave up. It is then asked again, for what it has in its own cache is offered
    to the store as well."""
    chunks = (1 + PROMPTS) * CHUNKS_PER_PROMPT + SHORT_PROMPTS * SHORT_CHUNKS
    cold = [*serve(engine, WARM_UP_SEED_A), *(serve_short(engine, number) for number in range(SHORT_PROMPTS))]
    given_up_before = 0
    for _ in range(OFFERS_MAX - 1):
        if (present := wait_for_commits(endpoint, chunks)) == chunks:
            return cold
        engine.generate(random_prompt(SHORT_SEED, 1), max_tokens=1)  # counts travel with the next step
        given_up = int(engine.metrics()[f"{REFUSED_STORES}_total"])
        if given_up == given_up_before:
            break
        given_up_before = given_up
        say(f"{present} of {chunks} chunks are stored: no slots came in time, so engine A is asked again")
        serve(engine, WARM_UP_SEED_A)
        for number in range(SHORT_PROMPTS):
            serve_short(engine, number)
    if (present := wait_for_commits(endpoint, chunks)) != chunks:
        raise SystemExit(f"demo: {present} of {chunks} chunks were committed within {COMMIT_S_MAX:.0f} s")
    return cold


def serve(engine: Engine, warm_up_seed: int) -> list[Completion]:
    """An unrelated prompt first, so that neither engine pays for its first request; then the same long prompts."""
    engine.generate(random_prompt(warm_up_seed, PROMPT_TOKENS), max_tokens=OUTPUT_TOKENS)
    return [
        engine.generate(random_prompt(PROMPT_SEED + i, PROMPT_TOKENS), max_tokens=OUTPUT_TOKENS) for i in range(PROMPTS)
    ]


def serve_short(engine: Engine, number: int) -> Completion:
    return engine.generate(random_prompt(SHORT_SEED + number, SHORT_PROMPT_TOKENS), max_tokens=OUTPUT_TOKENS)


def main() -> int:
    logs = BUILD / "demo"
    logs.mkdir(parents=True, exist_ok=True)
    say("making a small model with random weights")
    model = small_model(BUILD / "models", **MODEL)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-demo-") as runtime_dir,
        daemon(Path(runtime_dir), logs / "daemon.log") as endpoint,
    ):
        say(f"daemon ready at {endpoint}")

        def engine(name: str) -> Engine:
            say(f"starting engine {name} (half a minute; log: {logs / name}.log)")
            return Engine(
                model,
                logs / f"{name}.log",
                transfer=transfer_config(endpoint, blocks_per_chunk=1),
                hash_seed=HASH_SEED,
                arguments={"block_size": BLOCK_TOKENS, "max_model_len": 4_096, "disable_log_stats": False},
            )

        with engine("A") as first:
            say(f"engine A answers {PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, none of which the store knows")
            cold = fill(first, endpoint)
            after_first = cpu_tier(endpoint)
        say("engine A has stopped; only the daemon is left")
        with engine("B") as second:
            say("engine B, a new process, answers the same prompts")
            warm = serve(second, WARM_UP_SEED_B)
            after_second = cpu_tier(endpoint)
            long_decision = last_load_decision(endpoint)
            for number in range(SHORT_PROMPTS):
                warm.append(serve_short(second, number))
                time.sleep(EXPLAINED_AFTER_S)
                short_decision = last_load_decision(endpoint)
                if short_decision["reason"] != "EXPLORING":
                    break
    status = report(cold, warm, after_first, after_second)
    show_decisions([("long", long_decision), ("short", short_decision)])
    return status


def report(
    cold: list[Completion], warm: list[Completion], after_first: dict[str, Any], after_second: dict[str, Any]
) -> int:
    """Prints the table and says what is wrong, if anything. Returns the exit status."""
    identical = [c.tokens for c in cold[: len(warm)]] == [w.tokens for w in warm]
    cold_s, warm_s = (median(each.ttft_s for each in served[:PROMPTS]) for served in (cold, warm))
    prompt_tokens = PROMPTS * PROMPT_TOKENS
    cold_hits, hits = after_first["hits"], after_second["hits"] - after_first["hits"]

    def served(chunks: int) -> str:
        return f"{chunks * BLOCK_TOKENS:,} of {prompt_tokens:,}"

    def size(tier: dict[str, Any]) -> str:
        return f"{tier['chunks']}, {tier['used_bytes'] / 2**20:,.0f} MiB"

    table = Table(title="A second engine, served from the store that the first one filled")
    table.add_column("")
    table.add_column("engine A (cold)", justify="right")
    table.add_column("engine B (warm)", justify="right")
    table.add_row(f"time to first token, median of {PROMPTS}", f"{cold_s * 1000:,.0f} ms", f"{warm_s * 1000:,.0f} ms")
    table.add_row("tokens served from the store", served(cold_hits), served(hits))
    table.add_row("hits in the cpu tier (the daemon's count)", f"{cold_hits} chunks", f"{hits} chunks")
    table.add_row("chunks in the cpu tier, and their size", *map(size, (after_first, after_second)))
    table.add_row("output tokens identical to engine A's", "", "yes" if identical else "NO")
    table.add_row("faster by", "", f"{cold_s / warm_s:.1f} x")
    Console(width=100).print(table)

    problems = []
    if not identical:
        problems.append("engine B's tokens are not engine A's")
    if hits != PROMPTS * CHUNKS_PER_PROMPT:
        problems.append(f"engine B was served {hits} chunks, not the {PROMPTS * CHUNKS_PER_PROMPT} of its prompts")
    if warm_s >= cold_s:
        problems.append(f"warm ({warm_s:.3f} s) is not faster than cold ({cold_s:.3f} s)")
    for problem in problems:
        say(f"FAILED: {problem}")
    return 1 if problems else 0


def show_decisions(decisions: list[tuple[str, dict[str, Any]]]) -> None:
    """What engine B compared for the last long prompt and for the short one, and what came of it."""
    table = Table(title="What engine B decided, from kvstore explain")
    table.add_column("")
    for name, decision in decisions:
        table.add_column(f"{name} prefix, {decision['hit_tokens']:,} tokens", justify="right")

    def row(title: str, cells: list[str]) -> None:
        table.add_row(title, *cells)

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1000:,.1f} ms"

    row("predicted, recomputing it", [ms(decision["recompute_s"]) for _, decision in decisions])
    row("predicted, loading it", [ms(decision["alternatives"][0]["seconds"]) for _, decision in decisions])
    row("chosen", [f"{'load' if decision['tier'] else 'recompute'}: {decision['reason']}" for _, decision in decisions])
    row("measured", [ms(decision["first_token_s"]) for _, decision in decisions])
    Console(width=110).print(table)
    short = decisions[-1][1]
    if short["reason"] == "EXPLORING":
        say("the short prefix was loaded against the prediction, as now and then one is, to keep it honest")
    elif short["tier"]:
        say("on this machine even the short prefix is quicker to load than to recompute")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EngineDied as death:
        say(f"FAILED: {death}")
        sys.exit(1)
