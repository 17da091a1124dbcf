"""What a dead or hung daemon may cost, on a clock that only the test moves."""

import queue
import threading

import pytest

from connector.link import RECONNECT_S_MAX, Link
from kvstore.errors import Unavailable
from kvstore.session import Attachment, Role
from tests.unit.connector_engine import SEED, PretendEngine

REQUEST_S_MAX = 0.2
STEP_S = 0.05  # what a step of a busy engine takes
STEPS_MAX = 100
BOUND_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, _: threading.Event, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return False


class Session:
    lost = False

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", ["refuses", "hangs", "alternates"])
@pytest.mark.parametrize("away_s", [0.01, 1.0, 4.9, 60.0, 3600.0])
def test_a_daemon_that_returns_is_found_within_five_seconds(how: str, away_s: float) -> None:
    clock = Clock()
    attached: queue.Queue[float] = queue.Queue()

    def attach(endpoint: str, attachment: Attachment, *, timeout_s: float, on_lost: object) -> Session:  # noqa: ARG001
        attempts.append(clock.now_s)
        if clock.now_s >= away_s:
            return Session()
        if how == "hangs" or (how == "alternates" and len(attempts) % 2):
            clock.now_s += timeout_s  # also when the daemon returns meanwhile: this attempt asks the old one
        raise Unavailable("nobody there")

    def on_attached(session: Session) -> Session:
        attached.put(clock.now_s)
        return session

    attempts: list[float] = []
    link = Link(
        "unix:///x/kvstore.sock", Attachment(role=Role.SCHEDULER, hash_seed="0", group="g"),
        on_attached=on_attached, on_detached=lambda _: None, attach=attach,  # type: ignore[arg-type]
        clock=clock, wait=clock.wait,
    )  # fmt: skip
    link.start()
    found_s = attached.get(timeout=BOUND_S)
    link.close()
    assert away_s <= found_s <= away_s + RECONNECT_S_MAX
    assert len(attempts) <= 10 + away_s / 0.5  # nor does it knock without pause


def steps_until_finished(engine: PretendEngine, name: str) -> int:
    request = engine.add(name, list(range(1, 60)))
    for steps in range(1, STEPS_MAX):
        engine.step()
        engine.copier.run()
        if request.is_finished():
            return steps
    raise AssertionError(f"not finished after {STEPS_MAX} steps")


def test_a_request_loses_no_time_to_a_daemon_that_is_dead_or_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", SEED)
    without = PretendEngine()
    without.stop_daemon()
    alone = steps_until_finished(without, "a")

    hung = PretendEngine()
    assert hung.daemon is not None
    hung.steps.answered = False
    hung.daemon.heartbeat_age_ms = 1e6
    dead = PretendEngine()
    dead.steps.broken = True
    for engine in (hung, dead):
        lost_s = (steps_until_finished(engine, "a") - alone) * STEP_S
        assert lost_s <= REQUEST_S_MAX
