"""From which NUMA nodes the arena's memory comes.

From all that have processors, page by page in turn. The slot of a chunk is chosen before anybody knows which GPU will
load it, and memory that one thread touches first would all lie next to that thread: then one node's memory, and the
link between the nodes, would carry what every GPU copies. Nodes without processors are left out, for they may be the
memory of a GPU (Grace). An operator who knows better starts the daemon with `numactl`, whose policy is left alone.
"""

import logging
from pathlib import Path

from kvstore._native import Arena, interleave

_log = logging.getLogger(__name__)


def parse_list(text: str) -> set[int]:
    """ "0-3,8", as the kernel writes sets of nodes or processors. ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """With processors and memory, as far as this process may use them. Empty: the kernel does not say."""
    try:
        status = (root / "proc/self/status").read_text()
        allowed = next(line for line in status.splitlines() if line.startswith("Mems_allowed_list:"))
        found = parse_list(allowed.partition(":")[2])
        for kind in ("has_cpu", "has_memory"):
            found &= parse_list((root / "sys/devices/system/node" / kind).read_text())
    except (OSError, StopIteration, ValueError):
        return []
    return sorted(found)


def spread(arena: Arena, nodes: list[int]) -> None:
    """Before anybody touches it. A kernel that refuses is said, and the memory lies where it is touched first."""
    if len(nodes) < 2:
        return
    try:
        spread = interleave(arena.address, arena.nbytes, nodes)
    except OSError as refusal:
        _log.warning(
            "the arena cannot be spread over the NUMA nodes %s (%s), so it lies next to the thread that makes it "
            "ready, and GPUs of other nodes copy more slowly. In a container, allow mbind (--cap-add SYS_NICE)",
            nodes,
            refusal,
        )
        return
    if spread:
        _log.info("the arena's memory comes from the NUMA nodes %s in turn", nodes)
