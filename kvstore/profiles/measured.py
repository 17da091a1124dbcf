"""What `kvstore calibrate` measured of this node, as a small JSON file: where it lies, how it is read and written.

A prior like the tables beside it, only of the machine itself: engines start from it and correct it while they run. A
file that makes no sense is an error for the command and the same as none for an engine.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.costmodel import TransferModel
from kvstore.errors import ConfigurationError

VARIABLE = "KVSTORE_PROFILE"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """`host_copy`: within this node's memory. The disk's are None where no directory was named."""

    host_copy: TransferModel
    disk_read: TransferModel | None = None
    disk_write_bytes_per_s: float | None = None


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
        return Measured(
            _link(document["host_copy"]),
            None if disk is None else _link(disk),
            None if write_rate is None else _positive(write_rate),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no profile of this version ({type(error).__name__}: {error}); write it again with "
            "`kvstore calibrate`"
        ) from None


def _link(values: Mapping[str, float]) -> TransferModel:
    overhead_s = float(values["overhead_s"])
    if not 0 <= overhead_s < math.inf:
        raise ValueError(f"an overhead of {overhead_s} s")
    return TransferModel(_positive(values["bytes_per_s"]), overhead_s)


def _positive(value: float) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"a rate of {value} bytes/s")
    return float(value)
