"""From which NUMA nodes memory comes: which are chosen, and that the kernel then does so."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import numa
from kvstore._native import Arena, create_memfd, interleave, populate
from kvstore.tiers.cpu import CpuTier
from tests.unit.native_store import INDEX_KEY, INSTANCE

NBYTES = 1 << 20
# A second process, with a policy of its own as numactl would give it (set_mempolicy is no function of the C library).
WITH_A_POLICY = """
import ctypes, os
from kvstore._native import Arena, create_memfd, interleave
number = {"x86_64": 238, "aarch64": 237}[os.uname().machine]
mask = ctypes.c_ulong(1)
assert ctypes.CDLL(None).syscall(number, 2, ctypes.byref(mask), ctypes.c_ulong(65)) == 0
arena = Arena(create_memfd("x", 4096), 4096)
print(interleave(arena.address, 4096, [0]))
"""


def machine(root: Path, *, cpus: str = "0-1", memory: str = "0-3", allowed: str = "0-3") -> Path:
    nodes = root / "sys/devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_cpu").write_text(f"{cpus}\n")
    (nodes / "has_memory").write_text(f"{memory}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed:\tf\nMems_allowed_list:\t{allowed}\n")
    return root


@pytest.fixture
def arena() -> Iterator[Arena]:
    fd = create_memfd("numa", NBYTES)
    arena = Arena(fd, NBYTES)
    os.close(fd)
    yield arena
    arena.close()


def test_sets_are_read_as_the_kernel_writes_them() -> None:
    assert numa.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    with pytest.raises(ValueError, match="invalid literal"):
        numa.parse_list("\n")


def test_nodes_without_processors_without_memory_or_out_of_reach_are_left_out(tmp_path: Path) -> None:
    assert numa.memory_nodes(machine(tmp_path / "grace", cpus="0-1", memory="0-1,2,10")) == [0, 1]
    assert numa.memory_nodes(machine(tmp_path / "cpuset", cpus="0-3", allowed="1,3")) == [1, 3]
    assert numa.memory_nodes(machine(tmp_path / "bare", cpus="0-3", memory="0,2")) == [0, 2]


def test_a_kernel_that_says_nothing_of_nodes_has_none(tmp_path: Path) -> None:
    assert numa.memory_nodes(tmp_path) == []


def policy_of(arena: Arena) -> str:
    begins = f"{arena.address:x} "
    (line,) = (line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(begins))
    return line.split()[1]


def test_memory_comes_from_the_nodes_it_is_spread_over(arena: Arena) -> None:
    nodes = numa.memory_nodes()
    if not nodes or not Path("/proc/self/numa_maps").exists():
        pytest.skip("a kernel without NUMA")
    assert interleave(arena.address, arena.nbytes, nodes)
    populate(arena.address, arena.nbytes)
    assert policy_of(arena).startswith("interleave:")


def test_the_daemons_arena_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    if not numa.memory_nodes():
        pytest.skip("a kernel without NUMA")
    nodes = numa.memory_nodes() * 2  # of a machine with one, as if it had two
    monkeypatch.setattr(numa, "memory_nodes", lambda: nodes)
    tier = CpuTier(cpu_bytes=NBYTES, index_bytes=None, index_key=INDEX_KEY, instance_id=INSTANCE)
    assert policy_of(tier.arena).startswith("interleave:")
    tier.close()


def test_on_one_node_nothing_is_changed(arena: Arena) -> None:
    numa.spread(arena, [0])
    assert policy_of(arena) == "default"


def test_a_policy_that_the_daemon_was_started_with_is_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_A_POLICY], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_kernel_that_refuses_is_said_with_what_to_change(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        numa.spread(arena, [1000, 1001])  # no such nodes
    assert "SYS_NICE" in caplog.text
    assert "cannot spread memory over NUMA nodes" in caplog.text
