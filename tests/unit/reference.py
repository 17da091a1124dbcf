"""Reference tables that the repository does not carry, at $KVSTORE_TEST_DATA."""

import csv
import os
from pathlib import Path

import pytest


def reference_rows(name: str) -> list[dict[str, str]]:
    """The rows of one table; the test is skipped, with a reason, where the tables are not at hand."""
    directory = os.environ.get("KVSTORE_TEST_DATA")
    if not directory:
        pytest.skip("KVSTORE_TEST_DATA is not set: it names the directory that holds reference/ and traces/")
    with (Path(directory) / "reference" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
