"""`kvstore calibrate`: what it writes is what an engine reads, and what is no profile is said to be none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.cli import calibrate as command
from kvstore.costmodel import TransferModel
from kvstore.errors import ConfigurationError
from kvstore.profiles import measured

PROFILE = (
    '{"version": 1, "host_copy": {"bytes_per_s": RATE, "overhead_s": OVERHEAD}, "disk_read": null, '
    '"disk_write_bytes_per_s": null}'
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COPY_BYTES", "DISK_BYTES"):
        monkeypatch.setattr(command, name, 8 << 20)


def test_memory_and_disk_are_measured_and_written(tmp_path: Path) -> None:
    path, directory = tmp_path / "new" / "profile.json", tmp_path / "fs"
    directory.mkdir()
    arguments = ["calibrate", "--fs-dir", str(directory), "--output", str(path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = measured.read(path)
    assert found is not None
    assert found.disk_read is not None
    assert json.loads(result.output)["host_copy"]["bytes_per_s"] == found.host_copy.bytes_per_s
    assert list(directory.iterdir()) == []
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_without_a_directory_only_memory_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["calibrate", "--output", str(path)])
    assert result.exit_code == 0, result.output
    found = measured.read(path)
    assert found is not None
    assert (found.disk_read, found.disk_write_bytes_per_s) == (None, None)
    assert str(path) in result.output.replace("\n", "")


def test_a_directory_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    arguments = ["calibrate", "--fs-dir", str(tmp_path / "missing"), "--output", str(tmp_path / "p"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "missing" in json.loads(result.output)["error"]["message"]
    assert not (tmp_path / "p").exists()


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = measured.Measured(TransferModel(5e9, 1e-4), TransferModel(2e9, 6e-3), 1e9)
    measured.write(tmp_path / "p", written)
    assert measured.read(tmp_path / "p") == written
    assert measured.read(tmp_path / "none") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2}',
        PROFILE.replace("RATE", "0").replace("OVERHEAD", "0"),
        PROFILE.replace("RATE", "1").replace("OVERHEAD", "NaN"),
    ],
)
def test_what_is_no_profile_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(ConfigurationError, match="kvstore calibrate"):
        measured.read(tmp_path / "p")


def test_where_it_lies() -> None:
    assert measured.profile_path({"KVSTORE_PROFILE": "/x/y.json"}) == Path("/x/y.json")
    assert measured.profile_path({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/kvstore/profile.json")
    assert measured.profile_path({"HOME": "/h"}) == Path("/h/.config/kvstore/profile.json")
