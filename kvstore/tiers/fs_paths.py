"""The only place that builds or parses a name in the fs directory. Pure; every name is relative to that directory.

A name that `is_ours` does not know belongs to somebody else: it is counted towards the cap and otherwise left alone.
"""

import re

LOCK = "lock"  # locked while a daemon owns the directory; never unlinked
TENANT_KEY = "tenant.key"
QUOTAS = "quotas.json"
QUOTAS_DAMAGED = "quotas.json.damaged"  # what was in QUOTAS and could not be read, for an operator to look at
LEARNED = "learned.json"
STATE = "state.json"  # which opening of the directory the index belongs to, and whether it ended cleanly
INDEX = "index.mdb"
NAMESPACES = "namespaces"  # a directory

SLAB_NUMBER_MAX = 0xFFFF_FFFF
_SLAB = re.compile(r"slab-([0-9a-f]{8})")
_NAMESPACE = re.compile(NAMESPACES + r"/([0-9a-f]{32})\.json")
_TEMPORARY = ".new"


def slab(number: int) -> str:
    assert 0 <= number <= SLAB_NUMBER_MAX, number
    return f"slab-{number:08x}"


def slab_number(name: str) -> int | None:
    match = _SLAB.fullmatch(name)
    return int(match[1], 16) if match else None


def namespace(namespace_id: bytes) -> str:
    assert len(namespace_id) == 16, namespace_id
    return f"{NAMESPACES}/{namespace_id.hex()}.json"


def namespace_id(name: str) -> bytes | None:
    match = _NAMESPACE.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def temporary(name: str) -> str:
    """Where `name` is prepared before it is renamed into place."""
    return name + _TEMPORARY


def is_temporary(name: str) -> bool:
    """Left behind by a daemon that was killed: nothing refers to it."""
    return name.endswith(_TEMPORARY) and is_ours(name.removesuffix(_TEMPORARY))


def is_ours(name: str) -> bool:
    return (
        name in (LOCK, TENANT_KEY, QUOTAS, QUOTAS_DAMAGED, LEARNED, STATE, INDEX, NAMESPACES)
        or slab_number(name) is not None
        or namespace_id(name) is not None
    )
