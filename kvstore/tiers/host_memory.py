"""How much memory this host and this process's cgroup have, and how much of it can be had now.

Reads /proc and /sys/fs/cgroup (version 2, and the memory controller of version 1); `root` is another tree in tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes an absent limit as a huge number, version 2 as "max"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    owner: str  # "the host" or "the cgroup /path", for messages
    total_bytes: int
    available_bytes: int  # now; file cache that the kernel would drop counts as available


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The host's, then one for each cgroup above this process that has a limit."""
    meminfo = _fields(root / "proc/meminfo", scale=1024)
    host = MemoryLimit("the host", meminfo["MemTotal:"], meminfo["MemAvailable:"])
    return [host, *_cgroup_limits(root)]


def huge_page_advice(root: Path = Path("/")) -> str | None:
    """What to set where the kernel gives shared memory small pages only; None: it gives huge ones, or knows none."""
    setting = Path("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        chosen = (root / setting).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return None
    if chosen not in ("never", "deny"):
        return None
    return f"/{setting} is {chosen!r}: with 'advise' there each process that maps the arena needs smaller page tables"


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    for mount, own_path, version in _memory_cgroups(root):
        path = own_path
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        while True:
            # Inside a container the path named by /proc may lie above what is mounted: then the mount's top is ours.
            folder = mount / path.strip("/")
            total = _number(folder / names[0])
            current = _number(folder / names[1])
            if total is not None and current is not None and total < _NO_LIMIT:
                cache = _file_cache_bytes(folder / "memory.stat", version)
                yield MemoryLimit(f"the cgroup {path}", total, max(0, total - current + cache))
            if path.strip("/") == "":
                break
            path = path.rsplit("/", 1)[0] or "/"


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str, int]]:
    """(where the hierarchy is mounted, this process's path in it, version)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and controllers == "":
            yield (top / "unified" if (top / "unified").is_dir() else top), path, 2
        elif "memory" in controllers.split(","):
            yield top / "memory", path, 1


def _file_cache_bytes(path: Path, version: int) -> int:
    try:
        fields = _fields(path, scale=1)
    except OSError:
        return 0
    prefix = "" if version == 2 else "total_"
    return fields.get(f"{prefix}inactive_file", 0) + fields.get(f"{prefix}active_file", 0)


def _fields(path: Path, *, scale: int) -> dict[str, int]:
    pairs = (line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) > 1)
    return {name: int(value) * scale for name, value in pairs if value.isdecimal()}


def _number(path: Path) -> int | None:
    """None: no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
