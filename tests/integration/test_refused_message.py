"""An engine whose message a real daemon refuses: both halves' sessions, and the link that keeps the scheduler's."""

import pytest

pytest.importorskip("vllm")

from connector import link as link_module
from connector.link import Link
from connector.requests import Streams
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.testing import Daemon
from tests.integration.conftest import CHUNK_BYTES, eventually

ENGINE = {"hash_seed": "0", "group": "engine"}
KINDS = (Kind({"model": "m"}, CHUNK_BYTES, 0, CHUNK_BYTES),)


def test_it_attaches_again_and_holds_no_slot_of_before(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "REFUSED_PAUSE_S_MIN", 0.01)
    link = Link(
        daemon.endpoint,
        Attachment(role=Role.SCHEDULER, **ENGINE),
        on_attached=Streams().attached,
        on_detached=lambda attached: attached.steps.close(),
    )
    with Session.attach(daemon.endpoint, Attachment(role=Role.WORKER, kinds=KINDS, **ENGINE)):
        link.start()
        refused = link.current
        assert refused is not None
        refused.steps.keep_grants([1 << 30])
        refused.steps.want_grants(20)
        refused.steps.flush()
        eventually(lambda: refused.steps.grants_free() == 20, "slots arrive")
        slot_bytes = daemon.tier()["granted_bytes"] // 20
        [in_use] = refused.steps.take_grants(1)
        refused.steps.touch(b"not 16 bytes", [b"k" * 16])
        refused.steps.flush()
        eventually(lambda: link.current not in (None, refused), "attached again")
        assert "refused a message of this engine" in caplog.text
        again = link.current
        assert again is not None
        again.steps.settle(10.0)
        assert again.steps.group.complete
        assert daemon.tier()["granted_bytes"] == slot_bytes
        refused.steps.abort(*in_use)  # its copy has ended only now
        eventually(lambda: daemon.tier()["granted_bytes"] == 0, "the last slot goes back")
    link.close()
