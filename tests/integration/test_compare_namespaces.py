"""`kvstore explain --namespaces A B`: why two engines that should share chunks do not."""

from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.namespace import ABSENT
from kvstore.testing import Daemon, running_daemon
from tests.integration.conftest import CHUNK_BYTES, client_of
from tests.integration.test_operator import kvstore, kvstore_error

ONE = {"model": {"name": "m", "dtype": "bfloat16"}, "pages": [{"shape": [8, 16]}, {"shape": [8, 16]}], "group": 0}
OTHER = {"model": {"name": "m", "dtype": "float16"}, "pages": [{"shape": [8, 16]}, {"shape": [4, 16]}], "rank": True}


def namespace_ids(daemon: Daemon) -> dict[str, str]:
    """By the model's dtype."""
    rows = kvstore(daemon, "ls", "namespaces")["namespaces"]
    assert isinstance(rows, list)
    return {row["document"]["model"]["dtype"]: row["namespace_id"] for row in rows}


def test_every_field_that_differs_is_named_with_both_values() -> None:
    with running_daemon() as daemon, client_of(daemon, namespace=ONE), client_of(daemon, namespace=OTHER):
        ids = namespace_ids(daemon)
        one, other = ids["bfloat16"], ids["float16"]
        found = kvstore(daemon, "explain", "--namespaces", one, other[:8])
        assert (found["one"], found["other"]) == (one, other)
        assert found["differences"] == [
            {"field": "group", "one": 0, "other": ABSENT},
            {"field": "model.dtype", "one": "bfloat16", "other": "float16"},
            {"field": "pages[1].shape[0]", "one": 8, "other": 4},
            {"field": "rank", "one": ABSENT, "other": True},
        ]
        shown = CliRunner().invoke(app, ["explain", "--namespaces", one, other, "--endpoint", daemon.endpoint])
        assert shown.exit_code == 0
        assert "model.dtype" in shown.output
        same = CliRunner().invoke(app, ["explain", "--namespaces", one, one, "--endpoint", daemon.endpoint])
        assert "is one namespace" in same.output
        assert f"no namespace {'0' * 32}" in kvstore_error(daemon, "explain", "--namespaces", one, "0" * 32, code=1)
        assert "2 namespaces begin with ''" in kvstore_error(daemon, "explain", "--namespaces", "", one, code=1)


def test_chunk_sizes_are_among_the_fields() -> None:
    with running_daemon() as daemon, client_of(daemon, namespace=ONE):
        with client_of(daemon, namespace=ONE, chunk_bytes=2 * CHUNK_BYTES):
            rows = kvstore(daemon, "ls", "namespaces")["namespaces"]
        assert isinstance(rows, list)
        ids = sorted((row["document"]["chunk_bytes"], row["namespace_id"]) for row in rows)
        found = kvstore(daemon, "explain", "--namespaces", ids[0][1], ids[1][1])
        assert found["differences"] == [{"field": "chunk_bytes", "one": CHUNK_BYTES, "other": 2 * CHUNK_BYTES}]
