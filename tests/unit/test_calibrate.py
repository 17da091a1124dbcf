"""`kvstore calibrate`: what it writes is what an engine reads, and what is no profile is said to be none."""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore._native import DeviceCopier
from kvstore.cli import app
from kvstore.cli import calibrate as command
from kvstore.costmodel import TransferModel
from kvstore.device_bandwidth import measure_device
from kvstore.errors import ConfigurationError
from kvstore.profiles import measured
from kvstore.profiles.measured import Direction, Way
from tests.unit.fake_cuda import FakeDevice

PROFILE = (
    '{"version": 1, "host_copy": {"bytes_per_s": RATE, "overhead_s": OVERHEAD}, "disk_read": null, '
    '"disk_write_bytes_per_s": null}'
)


DEVICE = measured.Device("a device", 1e-5, (measured.Rate(Way.KERNEL, Direction.BOTH, 2048, 3e9),))
SIZES = (2048, 65536)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COPY_BYTES", "DISK_BYTES"):
        monkeypatch.setattr(command, name, 8 << 20)

    def no_device(way: Way, *, device: int) -> DeviceCopier:  # noqa: ARG001
        raise RuntimeError("no CUDA driver: none")

    monkeypatch.setattr(command, "open_device", no_device)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """It is what `calibrate` finds."""
    fake = FakeDevice()

    def open_fake(way: Way, *, device: int) -> DeviceCopier:
        every = 2**63 if way is Way.KERNEL else 0
        return DeviceCopier(
            device, library=fake.library, kernels=b"any", load_kernel_bytes=every, store_kernel_bytes=every
        )

    monkeypatch.setattr(command, "open_device", open_fake)
    monkeypatch.setattr(
        command, "measure_device", partial(measure_device, fragment_bytes=SIZES, total_bytes=1 << 20, rounds=1)
    )
    return fake


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
    assert (found.disk_read, found.disk_write_bytes_per_s, found.device) == (None, None, None)
    assert str(path) in result.output.replace("\n", "")
    assert "no GPU was measured: no CUDA driver" in result.output


def test_a_device_is_measured_by_way_direction_and_fragment_size(device: FakeDevice, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with device.running():
        result = CliRunner().invoke(app, ["calibrate", "--output", str(path)])
    assert result.exit_code == 0, result.output
    found = measured.read(path)
    assert found is not None
    assert found.device is not None
    assert found.device.name == "fake device"
    rates = [(rate.way, rate.fragment_bytes, rate.direction) for rate in found.device.rates]
    assert rates == list(itertools.product(Way, SIZES, (Direction.LOAD, Direction.STORE)))
    assert "fake device" in result.output
    assert "64 KiB" in result.output
    assert device.alive() == {}


def test_a_device_that_is_asked_for_and_not_there_is_wrong_usage(device: FakeDevice, tmp_path: Path) -> None:
    arguments = ["calibrate", "--device", "3", "--output", str(tmp_path / "p"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--device 3" in json.loads(result.output)["error"]["message"]
    assert not (tmp_path / "p").exists()
    assert device.alive() == {}


def test_a_device_that_fails_to_copy_leaves_no_profile(device: FakeDevice, tmp_path: Path) -> None:
    device.fail("cuMemcpyBatchAsync", after=3)
    with device.running():
        result = CliRunner().invoke(app, ["calibrate", "--output", str(tmp_path / "p"), "--json"])
    assert result.exit_code == 1
    assert "cannot be measured" in json.loads(result.output)["error"]["message"]
    assert not (tmp_path / "p").exists()
    assert device.alive() == {}


def test_a_directory_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    arguments = ["calibrate", "--fs-dir", str(tmp_path / "missing"), "--output", str(tmp_path / "p"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "missing" in json.loads(result.output)["error"]["message"]
    assert not (tmp_path / "p").exists()


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = measured.Measured(TransferModel(5e9, 1e-4), TransferModel(2e9, 6e-3), 1e9, DEVICE)
    measured.write(tmp_path / "p", written)
    assert measured.read(tmp_path / "p") == written
    assert measured.read(tmp_path / "none") is None


def test_a_profile_from_before_devices_were_measured_is_read(tmp_path: Path) -> None:
    (tmp_path / "p").write_text(PROFILE.replace("RATE", "2").replace("OVERHEAD", "1"))
    assert measured.read(tmp_path / "p") == measured.Measured(TransferModel(2, 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2}',
        PROFILE.replace("RATE", "0").replace("OVERHEAD", "0"),
        PROFILE.replace("RATE", "1").replace("OVERHEAD", "NaN"),
        *(
            PROFILE.replace("RATE", "1").replace("OVERHEAD", "0").replace("null}", f'null, "device": {device}}}')
            for device in ("[]", '{"name": "x", "overhead_s": 0, "rates": [{"way": "magic"}]}')
        ),
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


@pytest.mark.parametrize(
    ("kernel", "engine", "below"),
    [
        ([9, 9, 9], [1, 5, 10], 400),  # of 100, 200, 400 bytes
        ([9, 9, 9], [10, 10, 10], 0),
        ([10.9, 10.9, 10.9], [10, 10, 10], 0),  # not worth the multiprocessors
        ([9, 9, 9], [1, 1, 1], 401),
        ([9, 9, 9], [10, 1, 10], 400),
        ([], [1, 1, 1], None),
    ],
)
def test_the_kernel_pays_below_the_size_from_which_on_the_engines_are_about_as_fast(
    kernel: list[float], engine: list[float], below: int | None
) -> None:
    rates = [
        measured.Rate(way, Direction.LOAD, nbytes, speed)
        for way, speeds in ((Way.KERNEL, kernel), (Way.COPY_ENGINE, engine))
        for nbytes, speed in zip((100, 200, 400), speeds, strict=False)
    ]
    rates.append(measured.Rate(Way.KERNEL, Direction.STORE, 100, 100.0))
    assert measured.Device("x", 0, tuple(rates)).kernel_pays_below(Direction.LOAD) == below


def test_a_link_is_as_fast_as_the_better_way_for_fragments_of_that_size() -> None:
    rates = [
        (Way.KERNEL, 100, 9.0),
        (Way.COPY_ENGINE, 100, 5.0),
        (Way.COPY_ENGINE, 400, 20.0),
        (Way.PAGEABLE, 400, 90.0),
    ]
    device = measured.Device(
        "x", 1e-5, tuple(measured.Rate(way, Direction.LOAD, nbytes, speed) for way, nbytes, speed in rates)
    )
    found = [device.link(Direction.LOAD, nbytes) for nbytes in (50, 100, 399, 400, 10_000)]
    assert found == [TransferModel(speed, 1e-5, 0.0) for speed in (9.0, 9.0, 9.0, 20.0, 20.0)]
    assert device.link(Direction.STORE, 100) is None
    slow = device.link(Direction.LOAD, 400, [Way.KERNEL])
    assert slow is not None
    assert slow.bytes_per_s == 9.0
