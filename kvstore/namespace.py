"""Who may exchange bytes: the namespace document, its digest, and the fingerprint of the hash seed.

A namespace is everything that must be equal for two processes' chunks to be interchangeable. It is a JSON document of
strings, integers, booleans, lists and objects, written canonically (UTF-8, sorted keys, no spaces), and its id is the
first 16 bytes of the document's SHA-256. No floats (two writers print them differently) and no nulls (absent and null
must not be two things).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping

NAMESPACE_ID_BYTES = 16


def canonical_json(document: Mapping[str, object]) -> str:
    """TypeError, naming the field, for a value that has no single spelling."""
    _require_canonical(document, "document")
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def namespace_id(document: Mapping[str, object]) -> bytes:
    return digest(canonical_json(document))


def digest(canonical: str) -> bytes:
    return hashlib.sha256(canonical.encode()).digest()[:NAMESPACE_ID_BYTES]


def seed_fingerprint(seed: str) -> bytes:
    """16 bytes of the exact string: `0` is not `00`."""
    return hashlib.blake2b(seed.encode(), digest_size=16, person=b"kvstore-seed").digest()


def seed_problem(seed: str | None) -> str | None:
    """Why this `PYTHONHASHSEED` cannot be shared between processes, with what to do, or None when it can."""
    fix = "export one fixed number to every engine and the daemon, for example: export PYTHONHASHSEED=0"
    if seed is None or seed == "":
        return f"PYTHONHASHSEED is not set, so block hashes of two processes need not agree: {fix}"
    if seed == "random":
        return f"PYTHONHASHSEED is 'random', so every process hashes differently: {fix}"
    if not re.fullmatch(r"[0-9]{1,20}", seed) or int(seed) >= 1 << 32:
        return f"PYTHONHASHSEED is {seed!r}, which is no plain number below 2^32: {fix}"
    return None


def differing_fields(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """(field, value in one, value in other) for each top-level field that differs; a missing field shows as None."""
    for field in sorted(one.keys() | other.keys()):
        if one.get(field) != other.get(field):
            yield field, one.get(field), other.get(field)


ABSENT = "(absent)"


def differing_paths(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """As `differing_fields`, down to the innermost field that differs ("model.dtype", "format.pages[0].shape"); ABSENT
    for what only one of them has."""
    yield from _differing("", one, other)


def _differing(where: str, one: object, other: object) -> Iterator[tuple[str, object, object]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for field in sorted(one.keys() | other.keys()):
            inner = f"{where}.{field}" if where else field
            yield from _differing(inner, one.get(field, ABSENT), other.get(field, ABSENT))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _differing(f"{where}[{position}]", mine, theirs)
    elif one != other:
        yield where, one, other


def _require_canonical(value: object, where: str) -> None:
    match value:
        case str() | bool() | int():
            return
        case list() | tuple():
            for position, item in enumerate(value):
                _require_canonical(item, f"{where}[{position}]")
        case Mapping():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where}: key {key!r} is not a string")
                _require_canonical(item, f"{where}.{key}")
        case _:
            raise TypeError(
                f"{where} is {value!r} ({type(value).__name__}); a namespace holds only strings, integers, booleans, "
                "lists and objects"
            )
