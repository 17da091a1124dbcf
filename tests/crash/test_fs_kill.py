"""SIGKILL at every named step, and at random moments; then the directory is opened again and looked at.

After each: no chunk brings wrong bytes, what was reported removed is gone, what was held at the last commit and not
evicted or removed since is there, `du` is under the cap, the accounts are true, and a scrub finds nothing.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tiers import fs_index, fs_paths
from kvstore.tiers.base import ReadOutcome
from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_directory import FsDirectory
from tests.crash.fs_child import CHUNKS, SLAB_SLOTS
from tests.crash.fs_kills import NEVER_COMPLETED, committed
from tests.fs_support import du, fs_bench, options, problems_found

CAP = 3 << 20
SMALL_CAP = 2 << 20
RANDOM_KILLS = int(os.environ.get("KVSTORE_RANDOM_KILLS", "4"))
TIMEOUT_S = 120

POINTS = [
    # of a write
    ("write submitted", 150),
    ("write returned", 150),
    # of making room
    ("slab allocated", 3),
    ("slab written", 3),
    ("rename state.json", 0),
    ("evicting", 20),
    # of a removal
    ("removing", 5),
    ("slot zeroed", 5),
    ("removed", 5),
    # of a commit
    ("committing", 60),
    ("committed", 60),
]
EVERY_START = [
    "rename state.json",
    "opening written",
    "slab forgotten",
    "slab removed",
    "index removed",
]
STARTS = [
    *((point, "by its index") for point in [*EVERY_START, "index checked", "leftovers found", "slot zeroed"]),
    *((point, "by its headers") for point in [*EVERY_START, "headers read"]),
]


def child(path: Path, *, seed: int = 0, cap: int = CAP, point: str = "none", count: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crash.fs_child", str(path), str(seed), str(cap), point, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def until_dead(process: subprocess.Popen[str]) -> list[str]:
    # Not by `communicate`, which would leave out what `readline` has read ahead.
    assert process.stdout is not None
    with process:
        lines = process.stdout.read().splitlines()
        process.wait(timeout=TIMEOUT_S)
    assert process.returncode in (0, -signal.SIGKILL)
    return lines


def gone_at_the_end(lines: list[str]) -> set[object]:
    """Chunks of which the last word is that they are removed."""
    last = dict(reversed(line.split()) for line in lines if len(line.split()) == 2 and "committed" not in line)
    return {chunk_id(int(number)) for number, what in last.items() if what == "removed"}


def safe_at_the_end(lines: list[str]) -> set[object]:
    """Chunks stored before their writer's last commit, and not removed since. True where nothing is evicted."""
    stored: set[int] = set()
    safe: set[int] = set()
    for line in lines:
        match line.split():
            case ["stored", number]:
                stored.add(int(number))
            case ["removing", number]:
                stored.discard(int(number))
                safe.discard(int(number))
            case ["committed", writer]:
                safe |= {number for number in stored if number % 4 == int(writer)}
    return {chunk_id(number) for number in safe}


async def look(
    path: Path, cap: int, *, expected: set[object], removed: set[object] = frozenset(), rebuilt: bool = False
) -> int:
    """Opens the directory; asserts all of the above; the number of chunks that can be read."""
    steps: list[str] = []
    async with fs_bench(path, options(cap, slab_bytes=SLAB_SLOTS * 24_576), step=steps.append) as bench:
        assert du(path) <= cap
        if rebuilt:
            assert "headers read" in steps
        held = set(bench.held())
        assert expected <= held, f"{len(expected - held)} of {len(expected)} chunks in the index are lost"
        assert not removed & held, "reported as removed, and back"
        readable = 0
        for number in range(4 * CHUNKS):
            outcome, content = await bench.read(chunk_id(number))
            bench.assert_right(chunk_id(number), outcome, content)
            readable += outcome is ReadOutcome.READ
        assert await problems_found(bench) == []
        stats = bench.tier.stats()
        assert stats.corruptions == 0
        if not rebuilt:
            assert stats.torn == 0
        assert list(bench.tier.problems()) == []
        assert stats.used_bytes == stats.chunks * 24_576
    return readable


def assert_survives(path: Path, lines: list[str], cap: int = CAP) -> None:
    """By its index, and, a copy of it, by its headers alone."""
    removed = gone_at_the_end(lines)
    expected = {record.chunk for record in committed(path)}
    copy = path.with_name(path.name + "-copy")
    shutil.copytree(path, copy, symlinks=True)
    (copy / fs_paths.INDEX).unlink()
    by_index = asyncio.run(look(path, cap, expected=set(expected), removed=removed))
    asyncio.run(look(copy, cap, expected=set(expected), removed=removed, rebuilt=True))
    assert by_index >= len(expected)
    directory = FsDirectory.open(copy)  # and nothing is left of the kill
    directory.close()
    assert not [name for name in os.listdir(path) if name.endswith(".new")]
    shutil.rmtree(copy)


@pytest.mark.parametrize(("point", "count"), POINTS, ids=[point for point, _ in POINTS])
def test_killed_at(tmp_path: Path, point: str, count: int) -> None:
    path = tmp_path / "fs"
    lines: list[str] = []
    for seed in range(2):  # the second one starts on what the first one left
        process = child(path, seed=seed, point=point, count=count)
        lines += until_dead(process)
        assert process.returncode == -signal.SIGKILL, f"{point!r} was passed fewer than {count + 1} times"
        if (path / fs_paths.INDEX).exists():
            assert_survives(path, lines)


@pytest.mark.parametrize(("point", "how"), STARTS)
def test_killed_while_it_starts(tmp_path: Path, point: str, how: str) -> None:
    """On what a kill under load left, with a smaller cap; then a start with that cap must do."""
    path = tmp_path / "fs"
    lines = until_dead(child(path, point="committed", count=150))
    if how == "by its headers":
        (path / fs_paths.INDEX).unlink()
    assert "ready" not in until_dead(child(path, cap=SMALL_CAP, point=point)), f"{point!r} was not passed"
    assert asyncio.run(look(path, SMALL_CAP, expected=set(), removed=gone_at_the_end(lines))) > 0


def test_killed_before_its_new_index_has_everything(tmp_path: Path) -> None:
    """With room for everything, so that nothing is evicted."""
    path, cap = tmp_path / "fs", 32 << 20
    lines = until_dead(child(path, cap=cap, point="committed", count=150))
    expected: set[object] = {record.chunk for record in committed(path)}
    (path / fs_paths.INDEX).unlink()
    later = until_dead(child(path, cap=cap, point="committing"))
    with pytest.raises(fs_index.IndexUnusable, match=NEVER_COMPLETED):
        fs_index.read(path / fs_paths.INDEX)
    expected -= {chunk_id(int(line.split()[1])) for line in later if line.startswith("removing ")}
    removed = gone_at_the_end(lines + later)
    assert asyncio.run(look(path, cap, expected=expected, removed=removed, rebuilt=True)) >= len(expected)


@pytest.mark.parametrize("seed", range(RANDOM_KILLS))
def test_killed_at_random(tmp_path: Path, seed: int) -> None:
    """KVSTORE_RANDOM_KILLS says how many; each is a new seed."""
    path = tmp_path / "fs"
    rnd = random.Random(seed)
    lines: list[str] = []
    for turn in range(2):
        process = child(path, seed=1000 * seed + turn)
        assert process.stdout is not None
        for _ in range(rnd.randrange(1, 400)):
            line = process.stdout.readline()
            if not line:
                break
            lines.append(line.strip())
        process.kill()
        lines += until_dead(process)
        assert_survives(path, lines)


@pytest.mark.parametrize("count", [40, 200])
def test_what_was_stored_before_a_commit_is_there_after_a_kill(tmp_path: Path, count: int) -> None:
    """With room for everything, so that nothing is evicted."""
    path = tmp_path / "fs"
    lines = until_dead(child(path, cap=32 << 20, point="committed", count=count))
    safe = safe_at_the_end(lines)
    assert safe
    assert safe <= {record.chunk for record in committed(path)}
    assert_survives(path, lines, cap=32 << 20)
