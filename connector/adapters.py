"""What a LoRA adapter is: a digest of its files, so that chunks are shared only by requests with the same content.

vLLM's block hashes name an adapter (and its path), not its content: two engines may mean other weights by one name. A
request is served under the digest of the files that its engine loaded, or not at all.

The engine's thread calls `digest`, which never reads a file: a thread of ours reads them, once for each adapter, and
requests that come before it is done are not served. `_lock` guards the fields of `_Known`. What the engine has in
memory is what lay there when it loaded the adapter, at a moment that nobody tells us. So the files must be older than
the engine (by their ctime, which no copy or move can set back), they are looked at again (`stat`) with every request,
and an adapter whose files have changed since, or that is replaced in place, is not served any more.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("vllm.connector.adapters")

FILES_MAX = 64
READ_BYTES = 4 << 20

Fingerprint = tuple[tuple[str, int, int, int], ...]  # of each file: name, size, ctime in ns, inode


@dataclass(slots=True)
class _Known:
    path: str
    is_3d: bool
    digest: bytes = b""  # b"": not known, or not any more
    fingerprint: Fingerprint = ()
    given_up: bool = False


class Adapters:
    """`settings`: what else of the engine's LoRA configuration reaches KV bytes. `started_ns`: by the clock of the
    files, before the engine loaded any adapter. `run`: starts a function on another thread."""

    def __init__(
        self, settings: str, *, started_ns: int, run: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        self._settings = settings
        self._started_ns = started_ns
        self._run = run or _on_a_thread
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}  # by the engine's number of the adapter

    def digest(self, number: int, path: str, *, replaced_in_place: bool, is_3d: bool = False) -> bytes:
        """32 bytes, or b"" for an adapter that cannot be told from others (yet). `is_3d`: what the request says of how
        the weights of experts lie in the files; the engine takes its word for it."""
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = _Known(path, is_3d)
            if not replaced_in_place:
                self._run(lambda: self._read(known))
            return b""
        with self._lock:
            if replaced_in_place or (known.path, known.is_3d) != (path, is_3d):
                # From here on the number may mean other weights.
                known.digest, known.given_up = b"", True
            elif known.digest and not _is_still(known.fingerprint, path):
                logger.warning(
                    "kvstore: the files of the LoRA adapter in %s have changed since they were loaded; requests with "
                    "it are neither stored nor loaded until this engine is started again",
                    path,
                )
                known.digest, known.given_up = b"", True
            return known.digest

    def _read(self, known: _Known) -> None:
        try:
            fingerprint = _fingerprint(known.path)
            if changed_ns(Path(known.path), (each for _, _, each, _ in fingerprint)) >= self._started_ns:
                raise OSError("they are newer than this engine, which may have loaded others")
            digest = _content(known.path, fingerprint, f"{self._settings}{' 3d' if known.is_3d else ''}")
            if _fingerprint(known.path) != fingerprint:
                raise OSError("the files changed while they were read")
        except OSError as problem:
            logger.warning(
                "kvstore: the files of the LoRA adapter %s cannot be told from others (%s); requests with it are "
                "neither stored nor loaded. Give the adapter as a local folder that is there before the engine starts",
                known.path,
                problem,
            )
            return
        with self._lock:
            if not known.given_up:
                known.digest, known.fingerprint = digest, fingerprint


def _is_still(fingerprint: Fingerprint, path: str) -> bool:
    try:
        return _fingerprint(path) == fingerprint
    except OSError:
        return False


def derived_keys(hashes: list[bytes], adapter: bytes) -> list[bytes]:
    """The keys under which the store knows an adapter's chunks."""
    return [hashlib.blake2b(chunk_hash, key=adapter, digest_size=32).digest() for chunk_hash in hashes]


def _on_a_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="kvstore-adapter", daemon=True).start()


def _fingerprint(path: str) -> Fingerprint:
    """OSError where it is no folder of files, or of too many."""
    found = []
    for entry in os.scandir(path):
        if entry.is_file():
            status = entry.stat()
            found.append((entry.name, status.st_size, status.st_ctime_ns, status.st_ino))
    if not 0 < len(found) <= FILES_MAX:
        raise OSError(f"{len(found)} files, and an adapter has 1 to {FILES_MAX}")
    return tuple(sorted(found))


def changed_ns(path: Path, files_ns: Iterable[int]) -> int:
    """When any of the files in it, the folder itself, or a link on the way to it was changed last."""
    place = path.absolute()
    links = [each for each in (place, *place.parents) if each.is_symlink()]
    times = [each.lstat().st_ctime_ns for each in links] + [place.stat().st_ctime_ns]
    return max(*times, *files_ns)


def _content(path: str, fingerprint: Fingerprint, settings: str) -> bytes:
    digest = hashlib.sha256()

    def add(part: bytes) -> None:  # length first, so that no two lists of parts read the same
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    add(settings.encode())
    for name, size, _, _ in fingerprint:
        add(name.encode())
        digest.update(size.to_bytes(8, "little"))
        with Path(path, name).open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return digest.digest()
