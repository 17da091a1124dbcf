"""Limits of host and cgroup, read from trees that look like both cgroup versions."""

from pathlib import Path

import pytest

from kvstore.errors import ConfigurationError
from kvstore.tiers.cpu import MEMORY_RESERVE_BYTES, require_memory, shortage
from kvstore.tiers.host_memory import MemoryLimit, huge_page_advice, memory_limits

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HOST = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\n"}
HOST_LIMIT = MemoryLimit("the host", 16 * GIB, 12 * GIB)


def test_a_host_without_cgroups(tmp_path: Path) -> None:
    assert memory_limits(write(tmp_path, HOST)) == [HOST_LIMIT]


def test_version_2_counts_every_level_and_takes_file_cache_as_available(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        HOST
        | {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "5\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 1024\nshmem 7\n",
        },
    )
    assert memory_limits(root) == [HOST_LIMIT, MemoryLimit("the cgroup /pod", 4 * GIB, 2 * GIB + 1024)]


def test_version_1_has_a_memory_controller(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        HOST
        | {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert memory_limits(root) == [HOST_LIMIT, MemoryLimit("the cgroup /box", 2 * GIB, GIB)]


def test_a_container_that_sees_only_its_own_top(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        HOST
        | {
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert memory_limits(root)[1:] == [MemoryLimit("the cgroup /", GIB, GIB)]


def test_an_arena_larger_than_a_limit_is_refused_with_both_numbers() -> None:
    limits = [HOST_LIMIT, MemoryLimit("the cgroup /box", 2 * GIB, 2 * GIB)]
    with pytest.raises(ConfigurationError, match=rf"{3 * GIB} bytes.* the cgroup /box has {2 * GIB} bytes.*--cpu"):
        require_memory(3 * GIB, 0, limits)
    with pytest.raises(ConfigurationError, match=rf"takes {3 * GIB} bytes.* ask for less --fs-bytes"):
        require_memory(GIB, 3 * GIB, limits)
    require_memory(GIB, GIB, limits)


def test_memory_that_is_only_taken_at_the_moment_is_waited_for() -> None:
    tight = MemoryLimit("the host", 16 * GIB, GIB + MEMORY_RESERVE_BYTES - 1)
    assert shortage(GIB, [tight]) is tight
    assert shortage(GIB - 1, [tight]) is None


@pytest.mark.parametrize(
    ("setting", "advised"),
    [
        ("always within_size advise [never] deny force\n", True),
        ("always within_size advise never [deny] force\n", True),
        ("always within_size [advise] never deny force\n", False),
        ("[always] within_size advise never deny force\n", False),
    ],
)
def test_small_pages_are_said(tmp_path: Path, setting: str, advised: bool) -> None:
    root = write(tmp_path, {"sys/kernel/mm/transparent_hugepage/shmem_enabled": setting})
    assert (huge_page_advice(root) is not None) is advised


def test_a_kernel_without_huge_pages_is_given_no_advice(tmp_path: Path) -> None:
    assert huge_page_advice(tmp_path) is None
