"""When namespaces were last used, with a clock made by hand."""

import pytest

from kvstore import lastuse
from kvstore.lastuse import LastUses

ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16


def test_uses_of_now_and_of_earlier_runs() -> None:
    now = [1_000.0]
    saved: list[bytes] = []
    uses = LastUses(lambda: now[0], saved.append)
    uses.used([ONE])
    uses.load({ONE: 10.0, TWO: 400.0})  # what this run knows is newer
    now[0] = 1_600.0
    assert [uses.unused_s(each) for each in (ONE, TWO, THREE)] == [600.0, 1_200.0, 600.0]
    uses.used([TWO])
    assert saved == [ONE, TWO]
    now[0] = 1_500.0  # the clock was set back
    assert uses.unused_s(TWO) == 0.0
    uses.forget(TWO)
    assert uses.unused_s(TWO) == 500.0


def test_as_many_namespaces_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that resets its cache after each step of training uses a new one each time."""
    monkeypatch.setattr(lastuse, "KEPT_MAX", 2)
    clock = [100.0]
    uses = LastUses(lambda: clock[0])
    for second, namespace in enumerate((b"a", b"b", b"a", b"c"), start=101):
        clock[0] = second
        uses.used([namespace])
    clock[0] = 110.0
    assert [uses.unused_s(namespace) for namespace in (b"a", b"b", b"c")] == [7.0, 10.0, 6.0]
