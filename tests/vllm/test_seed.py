"""An engine whose block hashes could never agree with the others' does not start, and its log says why and what to do.

The exception that a user sees is vLLM's own ("Engine core initialization failed"); the text is in the engine's log.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connector.testing import Engine, EngineDied
from tests.vllm.support import ARGUMENTS, Store

SEEDS = {"unset": None, "random": "random", "another": "00"}
SAYS = {
    "unset": r"PYTHONHASHSEED is not set.*export PYTHONHASHSEED=0",
    "random": r"PYTHONHASHSEED is 'random'.*export PYTHONHASHSEED=0",
    "another": r"'00'.*'0'|'0'.*'00'",
}


@pytest.fixture(scope="module")
def logs(model: Path, store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each refused engine logged. All at once: each takes as long to refuse as to start."""
    folder = tmp_path_factory.mktemp("refused")

    def refused(name: str) -> str:
        engine = Engine(
            model,
            folder / f"{name}.log",
            transfer=store.transfer_config(),
            hash_seed=SEEDS[name],
            arguments=ARGUMENTS,
        )
        with pytest.raises(EngineDied, match="Engine core initialization failed"):
            engine.start()
        return engine.log_text()

    with ThreadPoolExecutor() as pool:
        return dict(zip(SEEDS, pool.map(refused, SEEDS), strict=True))


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_that_cannot_be_shared_is_refused_with_the_fix(name: str, logs: dict[str, str]) -> None:
    assert re.search(SAYS[name], logs[name]), logs[name][-4000:]


def test_another_seed_is_refused_naming_what_to_export(logs: dict[str, str]) -> None:
    assert re.search(r"export PYTHONHASHSEED=", logs["another"]), logs["another"][-4000:]


def test_no_refused_engine_left_anything_in_the_store(logs: dict[str, str], store: Store) -> None:
    assert logs
    assert store.stores() == 0
    assert store.daemon.tier()["granted_bytes"] == 0
