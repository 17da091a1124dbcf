"""Engines and daemons that whole modules share: starting an engine takes half a minute, a request far less."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.testing import Engine, small_model
from kvstore.testing import running_daemon
from tests.vllm.support import ARGUMENTS, CPU_BYTES, HASH_SEED, MODEL, MODELS, Store, serving_engine

VLLM_TESTS = Path(__file__).parent
TEST_S_MAX = 1_800  # the first test of a module starts its engines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if VLLM_TESTS in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TEST_S_MAX))


@pytest.fixture(scope="session")
def model() -> Path:
    return small_model(MODELS, **MODEL)


@pytest.fixture(scope="session")
def oracle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without the connector: what the tokens are when nothing is loaded."""
    with Engine(model, tmp_path_factory.mktemp("oracle") / "engine.log", arguments=ARGUMENTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A daemon that fills each slot with poison before it grants it; at the end none had come back as a chunk."""
    with running_daemon(cpu_bytes=CPU_BYTES, hash_seed=HASH_SEED) as daemon:
        yield Store(daemon)


@pytest.fixture(scope="module")
def engine(model: Path, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with serving_engine(model, store, tmp_path_factory.mktemp("engine")) as running:
        yield running
