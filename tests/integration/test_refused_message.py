"""An engine that loses its session with a daemon that lives: both halves' sessions, and the link of the scheduler's."""

import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from connector import link as link_module
from connector.link import Link
from connector.requests import Attached, Streams
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Ref
from kvstore.testing import Daemon
from tests.integration.conftest import CHUNK_BYTES, eventually

ENGINE = {"hash_seed": "0", "group": "engine"}
KINDS = (Kind({"model": "m"}, CHUNK_BYTES, 0, CHUNK_BYTES),)


@pytest.fixture
def link(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link[Attached]]:
    """Attached, with 20 slots that nobody has taken."""
    monkeypatch.setattr(link_module, "REFUSED_PAUSE_S_MIN", 0.01)
    link = Link(
        daemon.endpoint,
        Attachment(role=Role.SCHEDULER, **ENGINE),
        on_attached=Streams().attached,
        on_detached=lambda attached: attached.steps.close(),
    )
    with Session.attach(daemon.endpoint, Attachment(role=Role.WORKER, kinds=KINDS, **ENGINE)):
        link.start()
        current = link.current
        assert current is not None
        current.steps.keep_grants([1 << 30])
        current.steps.want_grants(20)
        current.steps.flush()
        eventually(lambda: current.steps.grants_free() == 20, "slots arrive")
        yield link
        link.close()


def require_held(daemon: Daemon, link: Link[Attached], before: Attached, in_use: Ref, slot_bytes: int) -> None:
    """It attaches again and then holds only that slot, into which a copy still runs, until that has ended."""
    eventually(lambda: link.current not in (None, before), "attached again")
    again = link.current
    assert again is not None
    again.steps.settle(10.0)
    assert again.steps.group.complete
    assert daemon.tier()["granted_bytes"] == slot_bytes
    before.steps.abort(*in_use)
    eventually(lambda: daemon.tier()["granted_bytes"] == 0, "the last slot goes back")


def test_after_a_refused_message_it_attaches_again_and_holds_no_slot_of_before(
    daemon: Daemon, link: Link[Attached], caplog: pytest.LogCaptureFixture
) -> None:
    before = link.current
    assert before is not None
    slot_bytes = daemon.tier()["granted_bytes"] // 20
    [in_use] = before.steps.take_grants(1)
    before.steps.touch(b"not 16 bytes", [b"k" * 16])
    before.steps.flush()
    require_held(daemon, link, before, in_use, slot_bytes)
    assert "refused a message of this engine" in caplog.text


def test_after_a_hang_up_of_a_daemon_that_lives_it_holds_no_slot_of_before(
    daemon: Daemon, link: Link[Attached], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = link.current
    assert before is not None
    slot_bytes = daemon.tier()["granted_bytes"] // 20
    [in_use] = before.steps.take_grants(1)
    monkeypatch.setattr(before.steps, "_apply", lambda _: None)  # answers that are lost on their way
    before.steps.want_grants(5)
    before.steps.flush()
    eventually(lambda: daemon.tier()["granted_bytes"] == 25 * slot_bytes, "slots that nobody hears of")
    before.session._sock.shutdown(socket.SHUT_RDWR)  # as a program does that closes what it takes for its own
    require_held(daemon, link, before, in_use, slot_bytes)
    sessions = daemon.stats()["sessions"]
    assert isinstance(sessions, list)
    assert sorted(session["role"] for session in sessions) == ["admin", "scheduler", "worker"]
