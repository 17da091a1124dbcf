"""The copier for CUDA with all its threads under the sanitizers, on the fake device, without Python."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.test_sanitizers import COMPILERS_AT_ONCE, NATIVE, SANITIZERS, _compile, _run

SOURCES = [NATIVE / f"{name}.cpp" for name in ("arena", "copy", "digest", "table")]  # what the copier stands on
SOURCES += [*sorted((NATIVE / "cuda").glob("*.cpp")), NATIVE / "tests/fake_cuda.cpp", NATIVE / "tests/device_test.cpp"]

pytestmark = pytest.mark.timeout(900)  # a dozen sources with a sanitizer each


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Opens itself as the driver's library, for the fake is linked into it."""
    folder = tmp_path_factory.mktemp("device-sanitizers")
    flags = SANITIZERS[request.param]
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
        for done in [
            pool.submit(_compile, [*flags, "-c", str(source), "-o", str(built)])
            for source, built in zip(SOURCES, objects, strict=True)
        ]:
            done.result()
    built = folder / "device_test"
    _compile(["-rdynamic", *flags, *map(str, objects), "-o", str(built)])
    return request.param, built


def test_bytes_are_right_and_the_sanitizers_are_content(program: tuple[str, Path]) -> None:
    done = _run(program[1])
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), done.stdout + done.stderr


@pytest.mark.parametrize("program", ["threads"], indirect=True)
def test_a_block_that_is_read_before_its_load_has_ended_is_seen(program: tuple[str, Path]) -> None:
    done = _run(program[1], "planted-race")
    assert done.returncode == 66, done.stdout + done.stderr
    assert "data race" in done.stderr
