"""A LoRA adapter is its files: the same content shares chunks, anything uncertain shares none."""

import time
from pathlib import Path

import pytest

from connector.adapters import Adapters, derived_keys

LATER_NS = time.time_ns() + 3_600 * 10**9


def adapter(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def at_once(settings: str = "", started_ns: int = LATER_NS) -> Adapters:
    return Adapters(settings, started_ns=started_ns, run=lambda function: function())


def digest(adapters: Adapters, path: str, number: int = 1) -> bytes:
    """As of its second request."""
    assert adapters.digest(number, path, replaced_in_place=False) == b"", "the first request waits for nothing"
    return adapters.digest(number, path, replaced_in_place=False)


def test_the_same_files_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    assert len(digest(at_once(), one)) == 32
    assert digest(at_once(), one) == digest(at_once(), other)


def test_other_content_settings_or_names_have_another(tmp_path: Path) -> None:
    first = adapter(tmp_path / "a")
    renamed = adapter(tmp_path / "c")
    (tmp_path / "c" / "adapter_config.json").rename(tmp_path / "c" / "config.json")
    digests = [
        digest(at_once(), first),
        digest(at_once(), adapter(tmp_path / "b", b"weightz")),
        digest(at_once(), renamed),
        digest(at_once("float16"), first),
    ]
    assert len(set(digests)) == 4


def test_files_are_read_on_another_thread_and_nothing_is_served_before(tmp_path: Path) -> None:
    waiting = []
    adapters = Adapters("", started_ns=LATER_NS, run=waiting.append)
    path = adapter(tmp_path / "a")
    assert [adapters.digest(1, path, replaced_in_place=False) for _ in range(3)] == [b""] * 3
    [read] = waiting
    read()
    assert adapters.digest(1, path, replaced_in_place=False)


def test_an_adapter_whose_files_change_is_not_served_any_more(tmp_path: Path) -> None:
    adapters, path = at_once(), adapter(tmp_path / "a")
    assert digest(adapters, path)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    for _ in range(2):
        assert adapters.digest(1, path, replaced_in_place=False) == b""


@pytest.mark.parametrize("path", ["other", "gone"])
def test_a_number_that_may_mean_other_weights_is_not_served_any_more(path: str, tmp_path: Path) -> None:
    adapters, first = at_once(), adapter(tmp_path / "a")
    adapter(tmp_path / "other")
    assert digest(adapters, first)
    assert adapters.digest(1, str(tmp_path / path), replaced_in_place=False) == b""
    assert adapters.digest(1, first, replaced_in_place=False) == b""


def test_files_that_a_request_reads_in_another_way_are_another_adapter(tmp_path: Path) -> None:
    """Whether the weights of experts lie in three dimensions is said by the request, not by the files."""
    adapters, path = at_once(), adapter(tmp_path / "a")
    flat = digest(adapters, path)
    assert adapters.digest(2, path, replaced_in_place=False, is_3d=True) == b""
    assert adapters.digest(2, path, replaced_in_place=False, is_3d=True) not in (b"", flat)
    assert adapters.digest(1, path, replaced_in_place=False, is_3d=True) == b"", "which of them the engine has"
    assert adapters.digest(1, path, replaced_in_place=False) == b""


def test_an_adapter_replaced_in_place_is_not_served_any_more(tmp_path: Path) -> None:
    adapters, path = at_once(), adapter(tmp_path / "a")
    assert digest(adapters, path)
    assert adapters.digest(1, path, replaced_in_place=True) == b""
    assert adapters.digest(1, path, replaced_in_place=False) == b""
    assert adapters.digest(2, path, replaced_in_place=True) == b""
    assert adapters.digest(2, path, replaced_in_place=False) == b""


def test_files_newer_than_the_engine_prove_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before_ns = time.time_ns() - 3_600 * 10**9
    assert digest(at_once(started_ns=before_ns), adapter(tmp_path / "a")) == b""
    assert "newer than this engine" in caplog.text


def test_a_link_that_was_turned_after_the_engine_started_proves_nothing(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    inode_changed_ns = (tmp_path / "link").lstat().st_ctime_ns
    assert digest(at_once(started_ns=inode_changed_ns + 1), path)
    assert digest(at_once(started_ns=inode_changed_ns + 1), str(tmp_path / "link"))
    assert digest(at_once(started_ns=inode_changed_ns), str(tmp_path / "link")) == b""


def test_a_name_on_a_hub_or_an_empty_folder_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert digest(at_once(), "somebody/adapter") == b""
    assert digest(at_once(), str(tmp_path / "empty")) == b""


def test_keys_of_two_adapters_and_of_none_are_apart() -> None:
    hashes = [bytes([i]) * 32 for i in range(3)]
    one, other = derived_keys(hashes, b"a" * 32), derived_keys(hashes, b"b" * 32)
    assert len({*hashes, *one, *other}) == 9
    assert {len(key) for key in one} == {32}
