"""The native core under the address, undefined-behaviour and thread sanitizers, built here with the plain compiler.

No Python in it: `native/tests/*.cpp` with the core's sources. The thread test has three variants that must fail, so
that passing means something: readers that ignore generations, readers that do not check sequence numbers, and a planted
race.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
FLAGS = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{NATIVE}"]
# The thread sanitizer does not know fences (and says so); the words that they order are all atomics, which it knows.
SANITIZERS = {
    "memory": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-O1", "-fsanitize=thread", "-Wno-tsan"],
}
PROGRAMS = [("memory", "core_test"), ("memory", "race_test"), ("threads", "race_test")]
SEQUENCE_CHECK = "if (bucket.sequence.load(std::memory_order_relaxed) != sequence) continue;"
COMPILERS_AT_ONCE = 2
RUN_TIMEOUT_S = 400

pytestmark = pytest.mark.timeout(900)  # the sources are compiled for each sanitizer


def _compile(arguments: list[str]) -> None:
    compiler = os.environ.get("CXX", "g++")
    done = subprocess.run([compiler, *FLAGS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("sanitizers")
    core = sorted(path for path in NATIVE.glob("*.cpp") if path.name != "bindings.cpp")
    tests = sorted((NATIVE / "tests").glob("*.cpp"))
    objects = {
        (sanitizer, source.stem): folder / f"{sanitizer}-{source.stem}.o"
        for sanitizer in SANITIZERS
        for source in [*core, *tests]
        if source in core or (sanitizer, source.stem) in PROGRAMS
    }
    with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
        sources = {source.stem: source for source in [*core, *tests]}
        compiling = [
            pool.submit(_compile, [*SANITIZERS[sanitizer], "-c", str(sources[stem]), "-o", str(built)])
            for (sanitizer, stem), built in objects.items()
        ]
        for one in compiling:
            one.result()
    built = {}
    for sanitizer, name in PROGRAMS:
        program = folder / f"{sanitizer}-{name}"
        parts = [str(objects[sanitizer, source.stem]) for source in core]
        _compile([*SANITIZERS[sanitizer], *parts, str(objects[sanitizer, name]), "-o", str(program)])
        built[sanitizer, name] = program
    built["unchecked", "race_test"] = _without_sequence_check(folder, core, objects)
    return built


def _without_sequence_check(folder: Path, core: list[Path], objects: dict[tuple[str, str], Path]) -> Path:
    text = (NATIVE / "table.cpp").read_text()
    assert text.count(SEQUENCE_CHECK) == 1, "the sequence check of the table's reader is spelled in another way now"
    mutant = folder / "table_without_sequence_check.cpp"
    mutant.write_text(text.replace(SEQUENCE_CHECK, ""))
    parts = [str(objects["memory", source.stem]) for source in core if source.stem != "table"]
    program = folder / "unchecked-race_test"
    _compile([*SANITIZERS["memory"], str(mutant), *parts, str(objects["memory", "race_test"]), "-o", str(program)])
    return program


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Some kernels spread addresses wider than the thread sanitizer of older compilers can follow.
    fixed_addresses = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run(
        [*fixed_addresses, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env={**os.environ, "TSAN_OPTIONS": "exitcode=66", "ASAN_OPTIONS": "exitcode=67"},
    )


@pytest.mark.parametrize(("sanitizer", "name"), PROGRAMS)
def test_the_core_is_clean(programs: dict[tuple[str, str], Path], sanitizer: str, name: str) -> None:
    done = _run(programs[sanitizer, name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")
    assert done.stderr == ""


def test_no_reader_sees_a_torn_entry(programs: dict[tuple[str, str], Path]) -> None:
    done = _run(programs["memory", "race_test"], "entries")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert " 0 torn" in done.stdout


def test_without_the_sequence_check_readers_see_torn_entries(programs: dict[tuple[str, str], Path]) -> None:
    done = _run(programs["unchecked", "race_test"], "entries")
    assert done.returncode == 1, done.stdout + done.stderr
    assert " 0 torn" not in done.stdout


def test_the_thread_sanitizer_reports_the_planted_race(programs: dict[tuple[str, str], Path]) -> None:
    done = _run(programs["threads", "race_test"], "planted-race")
    assert done.returncode == 66, done.stdout + done.stderr
    assert "data race" in done.stderr
    assert "BucketWrite" in done.stderr or "TableWriter" in done.stderr or "table.cpp" in done.stderr


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_readers_that_ignore_generations_get_wrong_bytes(programs: dict[tuple[str, str], Path], sanitizer: str) -> None:
    done = _run(programs[sanitizer, "race_test"], "ignore-generations")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 wrong" in done.stdout or "2 wrong" in done.stdout or "3 wrong" in done.stdout
