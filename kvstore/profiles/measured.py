"""What `kvstore calibrate` measured of this node, as a small JSON file: where it lies, how it is read and written.

A prior like the tables beside it, only of the machine itself: engines start from it and correct it while they run. A
file that makes no sense is an error for the command and the same as none for an engine.
"""

import enum
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.costmodel import TransferModel
from kvstore.errors import ConfigurationError

VARIABLE = "KVSTORE_PROFILE"
VERSION = 1
TIME_S_MAX = 1e11  # some 3,000 years from 1970
KERNEL_GAIN_MIN = 1.1  # it takes multiprocessors from the model, the copy engines take none


class Way(enum.StrEnum):
    """How fragments get between device memory and the arena."""

    COPY_ENGINE = "copy_engine"
    KERNEL = "kernel"
    PAGEABLE = "pageable"  # of memory that is not page-locked


class Direction(enum.StrEnum):
    LOAD = "load"  # host to device
    STORE = "store"
    BOTH = "both"  # at once; bytes of both are counted


@dataclass(frozen=True, slots=True)
class Rate:
    """Of many fragments of one size."""

    way: Way
    direction: Direction
    fragment_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """Copies of one CUDA device, which stands for the others of its name. `overhead_s`: of a lone small fragment, from
    its submission to its end."""

    name: str
    overhead_s: float
    rates: tuple[Rate, ...]

    def kernel_pays_below(self, direction: Direction) -> int | None:
        """The smallest measured fragment from which on the kernel is not quicker by KERNEL_GAIN_MIN; 0: it never is.
        None: it was not measured."""
        kernel, engine = self._by_size(Way.KERNEL, direction), self._by_size(Way.COPY_ENGINE, direction)
        sizes = kernel.keys() & engine.keys()
        if not sizes:
            return None
        longest = max((nbytes for nbytes in sizes if kernel[nbytes] > KERNEL_GAIN_MIN * engine[nbytes]), default=None)
        if longest is None:
            return 0
        return min((nbytes for nbytes in sizes if nbytes > longest), default=longest + 1)

    def link(
        self, direction: Direction, fragment_bytes: int, ways: Sequence[Way] = (Way.COPY_ENGINE, Way.KERNEL)
    ) -> TransferModel | None:
        """As the best of these ways copies the largest measured fragments that are not longer. None: nothing was
        measured."""
        measured = [self._by_size(way, direction) for way in ways]
        sizes = {nbytes for rates in measured for nbytes in rates}
        if not sizes:
            return None
        nearest = max((nbytes for nbytes in sizes if nbytes <= fragment_bytes), default=min(sizes))
        bytes_per_s = max(rates[nearest] for rates in measured if nearest in rates)
        return TransferModel(bytes_per_s, self.overhead_s, 0.0)  # what a fragment costs is in the rate

    def _by_size(self, way: Way, direction: Direction) -> dict[int, float]:
        return {
            rate.fragment_bytes: rate.bytes_per_s
            for rate in self.rates
            if (rate.way, rate.direction) == (way, direction)
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """`host_copy`: within this node's memory. The disk's are None where no directory was named, `device` where there
    was none. `node`: its host name; `at_s`: Unix time. The first profiles have neither."""

    host_copy: TransferModel
    disk_read: TransferModel | None = None
    disk_write_bytes_per_s: float | None = None
    device: Device | None = None
    node: str = ""
    at_s: float | None = None

    def device_named(self, name: str) -> Device | None:
        """What was measured, if it was of such a one: a profile may have come from another node."""
        return self.device if self.device is not None and self.device.name == name else None


def profile_path(environment: Mapping[str, str] | None = None) -> Path:
    """`KVSTORE_PROFILE`, else `kvstore/profile.json` in the user's configuration directory."""
    environment = os.environ if environment is None else environment
    if named := environment.get(VARIABLE):
        return Path(named)
    base = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "/"), ".config")
    return Path(base) / "kvstore" / "profile.json"


def write(path: Path, measured: Measured) -> None:
    """By rename. ConfigurationError where it cannot be written."""
    document = {"version": VERSION, **asdict(measured)}
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        scratch.rename(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); name another --output") from None


def read(path: Path) -> Measured | None:
    """None: there is no such file. ConfigurationError for one that is damaged or of another version."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); write it again with `kvstore calibrate`") from None
    try:
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}")
        disk = document["disk_read"]
        write_rate = document["disk_write_bytes_per_s"]
        # The first profiles had none of these three.
        device, node, at_s = document.get("device"), document.get("node", ""), document.get("at_s")
        return Measured(
            _link(document["host_copy"]),
            None if disk is None else _link(disk),
            None if write_rate is None else _positive(write_rate),
            None if device is None else _device(device),
            str(node),
            None if at_s is None else _time_s(at_s),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no profile of this version ({type(error).__name__}: {error}); write it again with "
            "`kvstore calibrate`"
        ) from None


def _link(values: Mapping[str, float]) -> TransferModel:
    return TransferModel(_positive(values["bytes_per_s"]), _overhead_s(values))


def _device(values: Mapping[str, Any]) -> Device:
    rates = tuple(
        Rate(
            Way(rate["way"]),
            Direction(rate["direction"]),
            int(_positive(rate["fragment_bytes"])),
            _positive(rate["bytes_per_s"]),
        )
        for rate in values["rates"]
    )
    return Device(str(values["name"]), _overhead_s(values), rates)


def _overhead_s(values: Mapping[str, Any]) -> float:
    overhead_s = float(values["overhead_s"])
    if not 0 <= overhead_s < math.inf:
        raise ValueError(f"an overhead of {overhead_s} s")
    return overhead_s


def _time_s(value: float) -> float:
    if not 0 <= float(value) < TIME_S_MAX:
        raise ValueError(f"a time of {value}")
    return float(value)


def _positive(value: float) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"a rate or size of {value}")
    return float(value)
