"""What does a daemon that hangs, dies and comes back cost an engine?

One process keeps up its attachment as the connector does, with `Link`. A lookup of 256 keys is timed while the daemon
runs, while it is stopped (SIGSTOP), and while it is dead: a request may lose 200 ms to a dead daemon in all, and it
asks once. Then a new daemon starts in the same place, and two times are taken from the start of its process on, its
own start included: until this process is attached, and until it has a hit again, which it must first store. Both may
take 5 s. The time out of service is long enough for the pauses between attempts to have grown to their longest.
"""

import logging
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Result, main
from connector.link import BACKOFF_MAX_S, Link
from kvstore._native import CPU, fill, slot_offset
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Outcome, Steps
from kvstore.testing import running_daemon

CHUNK_BYTES = 2 << 20
CPU_BYTES = "64MiB"
LOOKUP_KEYS = 256
LOOKUPS = 200
OUTAGES = 5
DOWN_S = 3 * BACKOFF_MAX_S
LOST_MS_MAX = 200.0
RETURN_S_MAX = 5.0
WAIT_S = 30.0
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Attached:
    session: Session
    steps: Steps
    since_s: float


def measure() -> list[Result]:
    logging.getLogger("vllm.connector.link").setLevel(logging.ERROR)  # that a daemon is lost is no news here
    keys = [number.to_bytes(32, "big") for number in range(LOOKUP_KEYS)]
    lookups: dict[str, list[float]] = {"runs": [], "is stopped": [], "is dead": []}
    attached_s, hit_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        runtime_dir = Path(folder) / "run"
        link: Link[Attached] | None = None
        for _ in range(OUTAGES):
            with running_daemon(runtime_dir=runtime_dir, cpu_bytes=CPU_BYTES, verify=False) as daemon:
                if link is None:
                    link = _link(daemon.endpoint)
                    link.start()
                    _store(link, keys[0])
                _wait_until_attached(link)
                lookups["runs"] += _lookup_times_ms(link, keys)
                os.kill(daemon.pid, signal.SIGSTOP)
                lookups["is stopped"] += _lookup_times_ms(link, keys)
                daemon.kill()
            assert link is not None
            lookups["is dead"] += _lookup_times_ms(link, keys)
            threading.Event().wait(DOWN_S)
            started_s = time.monotonic()
            with running_daemon(runtime_dir=runtime_dir, cpu_bytes=CPU_BYTES, verify=False) as daemon:
                _wait_until_attached(link)
                assert link.current is not None
                attached_s.append(link.current.since_s - started_s)
                _store(link, keys[0])
                hit_s.append(time.monotonic() - started_s)
                daemon.kill()
        assert link is not None
        link.close()
    results = [
        Result.of(f"lookup of {LOOKUP_KEYS} keys, daemon {state}", times, "ms", [LOST_MS_MAX])
        for state, times in lookups.items()
    ]
    results.append(Result.of("start of a new daemon to attached", attached_s, "s", [RETURN_S_MAX]))
    results.append(Result.of("start of a new daemon to first hit", hit_s, "s", [RETURN_S_MAX]))
    return results


def _link(endpoint: str) -> Link[Attached]:
    attachment = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "benchmark"}, CHUNK_BYTES),))
    return Link(
        endpoint,
        attachment,
        on_attached=lambda session: Attached(session, Steps(session), time.monotonic()),
        on_detached=lambda attached: attached.steps.close(),
    )


def _lookup(link: Link[Attached], keys: list[bytes]) -> int:
    """How many are there, as the scheduler half asks: without an attachment the store is left out."""
    attached = link.current
    if attached is None or attached.steps.broken:
        return 0
    session = attached.session
    return session.table.lookup(session.namespace_id, session.tenant_id(None), keys)[0].count(CPU)


def _lookup_times_ms(link: Link[Attached], keys: list[bytes]) -> list[float]:
    times = []
    for _ in range(LOOKUPS):
        start = time.perf_counter()
        _lookup(link, keys)
        times.append((time.perf_counter() - start) * 1000)
    return times


def _store(link: Link[Attached], key: bytes) -> None:
    """One chunk, and the lookup that finds it."""
    attached = link.current
    assert attached is not None
    session, steps = attached.session, attached.steps
    [(slot, generation)] = steps.wait_grants(1, WAIT_S)
    offset = slot_offset(slot, CHUNK_BYTES, session.table.unit_bytes)
    fill(session.arena.address + offset, CHUNK_BYTES, 1)
    outcomes = steps.wait([steps.commit(slot, generation, session.tenant_id(None), key, b"")], WAIT_S)
    assert outcomes == [Outcome.STORED], outcomes
    assert _lookup(link, [key]) == 1


def _wait_until_attached(link: Link[Attached]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while link.current is None:
        assert time.monotonic() < deadline_s, f"not attached within {WAIT_S:g} s"
        time.sleep(POLL_S)


if __name__ == "__main__":
    main("outage", (__doc__ or "").splitlines()[0], measure)
