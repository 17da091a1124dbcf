"""What is read of the quotas of an earlier run."""

import pytest

from kvstore import limits
from kvstore.config import BYTES_MAX
from kvstore.quotas import Quotas
from tests.unit.native_store import native_store

TENANT = "ab" * 16


def test_what_can_be_no_quota_is_left_out_and_said_and_the_rest_holds(caplog: pytest.LogCaptureFixture) -> None:
    kept = {TENANT: {"cpu": 5}, "cd" * 16: {"cpu": BYTES_MAX}}
    nonsense = {"00" * 16: {"cpu": 10**40}, "01" * 16: {"cpu": -1}, "02": {"cpu": 1}, "zz": {"cpu": 1}}
    with native_store() as store:
        quotas = Quotas(store.index, None)
        quotas.load({**nonsense, **kept, "03" * 16: {"fs": 1, "gpu": 1}})
        assert quotas.kept() == kept
    [line] = caplog.messages
    assert line.startswith(f"6 quotas that were kept can be none, and do not hold (tenant '{'00' * 16}' in")


def test_of_more_quotas_than_may_be_set_as_many_hold_as_may_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "QUOTAS_MAX", 2)
    kept = {f"{number:032x}": {"cpu": 5} for number in range(3)}
    with native_store() as store:
        quotas = Quotas(store.index, None)
        quotas.load(kept)
        assert len(quotas.kept()) == 2
    assert "2 quotas are set, and 2 is the most" in caplog.text
