"""The link's background thread against a pretended `Session.attach`; every wait is for an event, with a bound."""

import logging
import queue
import threading

import pytest

from connector.link import LOOK_S, RECONNECT_S_MAX, REFUSED_PAUSE_S_MAX, WENT_WELL_S, Link
from kvstore.errors import NamespaceMismatch, ProtocolError, SeedMismatch, Unavailable
from kvstore.session import Attachment, Role

BOUND_S = 10.0
ATTACHMENT = Attachment(role=Role.SCHEDULER, hash_seed="0", group="g")
ENDPOINT = "unix:///x/kvstore.sock"


class PretendedSession:
    def __init__(self, on_lost):
        self.on_lost = on_lost
        self.lost = False
        self.refusal = None
        self.closed = threading.Event()

    def lose(self):
        self.lost = True
        self.on_lost()

    def give_up(self, refusal):
        self.refusal = refusal
        self.lose()

    def close(self):
        self.closed.set()


class Daemons:
    """What `attach` meets, one outcome a call; the last one is repeated."""

    def __init__(self, *outcomes, endpoint=ENDPOINT):
        self.endpoint = endpoint
        self.outcomes = list(outcomes)
        self.calls = queue.Queue()
        self.attached = queue.Queue()
        self.events = []

    def attach(self, endpoint, attachment, *, timeout_s, on_lost):
        assert (endpoint, attachment) == (self.endpoint, ATTACHMENT)
        assert timeout_s <= 5.0
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        self.calls.put(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return PretendedSession(on_lost)

    def link(self, **hooks):
        def on_attached(session):
            self.attached.put(session)
            return session

        def on_detached(session):
            self.events.append(("detached", session.closed.is_set()))

        hooks = {"on_attached": on_attached, "on_detached": on_detached, **hooks}
        return Link(self.endpoint, ATTACHMENT, attach=self.attach, **hooks)


GONE = Unavailable("nobody there")


def test_a_daemon_that_is_there_is_attached_before_start_returns():
    daemons = Daemons("yes")
    link = daemons.link()
    link.start()
    assert link.current is daemons.attached.get(timeout=BOUND_S)
    link.close()


@pytest.mark.parametrize("refusal", [SeedMismatch("'1' here and '0' there"), NamespaceMismatch("chunk sizes differ")])
def test_a_refusal_at_start_is_raised(refusal):
    link = Daemons(refusal).link()
    with pytest.raises(type(refusal), match=str(refusal)):
        link.start()
    link.close()


def test_without_a_daemon_the_engine_starts_and_finds_it_later(caplog):
    daemons = Daemons(GONE, GONE, GONE, "yes")
    link = daemons.link()
    with caplog.at_level(logging.WARNING, logger="vllm.connector.link"):
        link.start()
    assert "no daemon at unix:///x/kvstore.sock" in caplog.text
    session = daemons.attached.get(timeout=BOUND_S)
    link.close()
    assert session.closed.is_set()


def test_a_lost_daemon_is_taken_away_first_then_closed_then_sought_again():
    daemons = Daemons("first", GONE, "second")
    link = daemons.link()
    link.start()
    first = daemons.attached.get(timeout=BOUND_S)
    first.lose()
    second = daemons.attached.get(timeout=BOUND_S)
    assert first.closed.is_set()
    assert daemons.events[0] == ("detached", False)  # its use ended before its memory went
    assert second is not first
    link.close()
    assert second.closed.is_set()
    assert link.current is None


def test_memory_that_can_not_be_unmapped_does_not_keep_the_engine_from_the_next_daemon(caplog):
    daemons = Daemons("yes")
    link = daemons.link()
    link.start()
    session = daemons.attached.get(timeout=BOUND_S)

    def close():
        raise BufferError("the arena has 1 views that are in use")

    session.close = close
    session.lose()
    assert daemons.attached.get(timeout=BOUND_S) is not session
    assert "1 views" in caplog.text
    link.close()


class PretendedTime:
    """A wait passes at once; the clock says what it would have taken. `then`: called after each one."""

    def __init__(self, then=lambda: None):
        self.now_s = 100.0
        self.then = then

    def clock(self):
        return self.now_s

    def wait(self, event, timeout_s):
        self.now_s += timeout_s
        self.then()
        return event.is_set()


def refused(daemons, time, reason="no such kind"):
    """The current session is; how long it took until the next attempt."""
    session = daemons.attached.get(timeout=BOUND_S)
    began_s = time.now_s
    session.give_up(ProtocolError(reason))
    while daemons.attached.empty():
        assert session.closed.wait(BOUND_S)
    return time.now_s - began_s


def test_an_engine_whose_message_was_refused_attaches_again_later_each_time_and_says_why(caplog):
    daemons, time = Daemons("yes"), PretendedTime()
    link = daemons.link(clock=time.clock, wait=time.wait)
    link.start()
    assert [refused(daemons, time, f"reason {number}") for number in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    said = [record.message for record in caplog.records if "reason" in record.message]  # other threads speak too
    assert all(f"reason {number}" in message for number, message in zip(range(8), said, strict=True))
    daemons.attached.get(timeout=BOUND_S).lose()  # another daemon, with which it may go well
    assert refused(daemons, time) == 1
    link.close()


def test_the_pause_after_a_refusal_is_short_again_once_a_session_went_well_for_a_while():
    daemons, time = Daemons("yes"), PretendedTime()
    link = daemons.link(clock=time.clock, wait=time.wait)
    link.start()
    pauses = [refused(daemons, time) for _ in range(3)]
    time.now_s += WENT_WELL_S - 1
    pauses.append(refused(daemons, time))
    time.now_s += WENT_WELL_S
    pauses += [refused(daemons, time) for _ in range(2)]
    assert pauses == [1, 2, 4, 8, 1, 2]
    link.close()


@pytest.mark.parametrize("goes_cleanly", [True, False])
def test_another_daemon_ends_the_pause_after_a_refusal(tmp_path, goes_cleanly):
    socket = tmp_path / "arena.sock"
    socket.touch()
    daemons, time = Daemons("yes", endpoint=f"unix://{tmp_path}/kvstore.sock"), PretendedTime()
    link = daemons.link(clock=time.clock, wait=time.wait)
    link.start()
    while refused(daemons, time) < REFUSED_PAUSE_S_MAX:
        pass
    back_s = time.now_s + 20

    def come_back():
        if goes_cleanly and time.now_s >= back_s - 10:  # nobody answers from here on
            socket.unlink(missing_ok=True)
            daemons.outcomes = [GONE]
        if time.now_s >= back_s:
            time.then = lambda: None
            (tmp_path / "new").touch()
            (tmp_path / "new").rename(socket)  # the old one's inode is not free yet
            daemons.outcomes = ["yes"]

    time.then = come_back
    refused(daemons, time)
    assert back_s <= time.now_s <= back_s + LOOK_S + 1.0 < back_s + RECONNECT_S_MAX
    assert refused(daemons, time) == 1  # that one has refused nothing yet
    link.close()


def test_a_session_lost_while_it_is_being_attached_is_noticed():
    daemons = Daemons("yes")
    seen = []

    def on_attached(session):
        if not seen:
            session.lose()
        seen.append(session)
        daemons.attached.put(session)
        return session

    link = daemons.link(on_attached=on_attached)
    link.start()
    daemons.attached.get(timeout=BOUND_S)
    assert daemons.attached.get(timeout=BOUND_S) is not seen[0]
    link.close()


def test_a_daemon_that_appears_with_another_seed_is_complained_of_once(caplog):
    refusal = SeedMismatch("seed '1' and the daemon with '0'")
    daemons = Daemons(GONE, refusal, refusal, refusal, "yes")
    link = daemons.link()
    with caplog.at_level(logging.ERROR, logger="vllm.connector.link"):
        link.start()
        daemons.attached.get(timeout=BOUND_S)
    assert [record.message.count("seed '1'") for record in caplog.records] == [1]
    assert "Serving without the store" in caplog.records[0].message
    link.close()


def test_an_error_of_the_half_itself_closes_the_session_and_is_tried_again(caplog):
    daemons = Daemons("yes")
    broken = []

    def on_attached(session):
        broken.append(session)
        if len(broken) == 2:
            raise RuntimeError("no room to map")
        daemons.attached.put(session)
        return session

    link = daemons.link(on_attached=on_attached)
    link.start()
    daemons.attached.get(timeout=BOUND_S).lose()
    daemons.attached.get(timeout=BOUND_S)
    assert broken[1].closed.is_set()
    assert "no room to map" in caplog.text
    link.close()


def test_closing_ends_the_thread_wherever_it_is():
    for outcomes in (["yes"], [GONE], [GONE, SeedMismatch("x")]):
        link = Daemons(*outcomes).link()
        link.start()
        link.close()
        assert not link._thread.is_alive()
        link.close()
