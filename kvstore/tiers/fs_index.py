"""The LMDB file: a copy of the catalog for the next start, never the last word. Headers are.

The daemon's one worker thread of the tier calls everything here; nothing else has the file open, for the directory is
locked. A commit is not synced: it survives the daemon's death, but not always the machine's. What was synced says so
(`STATE` in fs_directory, written after `close`); without that, after another boot, the file is not read at all.

A damaged LMDB file does not raise, it kills whoever maps it. So a child process (this module, run) opens and walks it
first; its death, its silence and its complaint all mean the same: rebuild. What remains is a file that somebody else
truncates while it is in use.

One record a chunk: b"c" + namespace + tenant + key -> slab, slot, sequence, payload bytes, tick, proven. The tick is
when it was last used, in microseconds of the wall clock, or less where a rebuild did not know.
One record b"m": version, complete, sequence, chunks, payload bytes, opening, directory. A walk adds up to the last two
counts, or the file is unusable.
Behind each value is the CRC-32C of key and value. LMDB has none, and a chunk that is not where the index says would not
be reached by its removal.
"""

import contextlib
import itertools
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvstore._native import crc32c
from kvstore.errors import KVStoreError
from kvstore.tiers.base import ChunkId

VERSION = 2
OPERATIONS_PER_COMMIT_MAX = 256  # `fs_catalog.index_bytes_for` counts on it
CHECK_SECONDS_MIN = 20.0
CHECK_BYTES_PER_S = 50e6  # a walk slower than this is taken for a hang
_LOOK_AGAIN_S = 0.05

_META_KEY = b"m"
_CHUNK_PREFIX = b"c"
_META = struct.Struct("<IIQQQ16s16s")
_RECORD = struct.Struct("<IIQQQB")
_CHECKSUM = struct.Struct("<I")
_ID_BYTES = 16


class IndexUnusable(KVStoreError):
    """The file is damaged, of another version, of another opening, or cannot be written. Rebuild it."""


class Record(NamedTuple):
    chunk: ChunkId
    slab: int
    slot: int
    sequence: int
    payload_bytes: int
    tick: int
    proven: bool


Changes = Mapping[ChunkId, Record | None]  # None: the chunk is forgotten


@dataclass(frozen=True, slots=True)
class Meta:
    """`sequence`: none above it was given out before the last commit. `complete`: every chunk had been written once."""

    complete: bool
    sequence: int
    chunks: int
    payload_bytes: int
    opening: bytes
    directory_id: bytes

    def encode(self) -> bytes:
        fields = _META.pack(
            VERSION,
            self.complete,
            self.sequence,
            self.chunks,
            self.payload_bytes,
            self.opening,
            self.directory_id,
        )
        return _sealed(_META_KEY, fields)

    @classmethod
    def decode(cls, raw: bytes) -> "Meta":
        version = int.from_bytes(raw[:4], "little")
        if len(raw) >= 4 and version != VERSION:
            raise IndexUnusable(f"it is of version {version}, not {VERSION}")
        _, complete, sequence, chunks, payload_bytes, opening, directory_id = _opened(_META, _META_KEY, raw)
        if not complete:
            raise IndexUnusable("it was never completed")
        return cls(True, sequence, chunks, payload_bytes, opening, directory_id)


def _key(chunk: ChunkId) -> bytes:
    return _CHUNK_PREFIX + chunk.namespace + chunk.tenant + chunk.key


def _value(key: bytes, record: Record) -> bytes:
    return _sealed(key, _RECORD.pack(*record[1:]))


def _sealed(key: bytes, fields: bytes) -> bytes:
    return fields + _CHECKSUM.pack(crc32c(key + fields))


def _opened(form: struct.Struct, key: bytes, value: bytes) -> tuple[Any, ...]:
    """The fields of a value. IndexUnusable."""
    if len(value) != form.size + _CHECKSUM.size:
        raise IndexUnusable(f"a record of {len(key)} and {len(value)} bytes")
    fields = value[: form.size]
    if _sealed(key, fields) != value:
        raise IndexUnusable("a record's checksum is wrong")
    return form.unpack(fields)


def _payload_bytes(value: bytes) -> int:
    return int(_RECORD.unpack_from(value)[3])


def _record(key: bytes, value: bytes) -> Record:
    if len(key) - 1 <= 2 * _ID_BYTES:
        raise IndexUnusable(f"a record of {len(key)} and {len(value)} bytes")
    chunk = ChunkId(key[1 : 1 + _ID_BYTES], key[1 + _ID_BYTES : 1 + 2 * _ID_BYTES], key[1 + 2 * _ID_BYTES :])
    slab, slot, sequence, payload_bytes, tick, proven = _opened(_RECORD, key, value)
    return Record(chunk, slab, slot, sequence, payload_bytes, tick, bool(proven))


def read(path: Path) -> tuple[Meta, list[Record]]:
    """All of it, added up. IndexUnusable; a damaged file may kill the process: see `check`."""
    try:
        # LMDB makes a file that is missing, and takes an empty one for new.
        if path.stat().st_size == 0:
            raise IndexUnusable("it is empty")
        with (
            lmdb.open(str(path), subdir=False, readonly=True, lock=False, create=False, readahead=True) as env,
            env.begin() as txn,
        ):
            raw = txn.get(_META_KEY)
            if raw is None:
                raise IndexUnusable("it has no description")
            meta = Meta.decode(bytes(raw))
            records = list(_walk(txn))
    except (lmdb.Error, OSError) as error:
        raise IndexUnusable(str(error)) from error
    total = sum(record.payload_bytes for record in records)
    if (len(records), total) != (meta.chunks, meta.payload_bytes):
        raise IndexUnusable(
            f"it holds {len(records)} chunks of {total} bytes, but says {meta.chunks} of {meta.payload_bytes}"
        )
    return meta, records


def _walk(txn: lmdb.Transaction) -> Iterator[Record]:
    for key, value in txn.cursor():
        if bytes(key[:1]) == _CHUNK_PREFIX:
            yield _record(bytes(key), bytes(value))


def check(path: Path, *, timeout_s: float | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Has a child process read the file. IndexUnusable for whatever becomes of it, also when it is cancelled."""
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise IndexUnusable(str(error)) from error
    if timeout_s is None:
        timeout_s = CHECK_SECONDS_MIN + nbytes / CHECK_BYTES_PER_S
    command = [sys.executable, "-m", __name__, str(path), str(int(timeout_s) + 1)]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise IndexUnusable(f"the process that was to read it: {error}") from error
    with child:
        ends_s = time.monotonic() + timeout_s
        said: list[str] = []
        while child.returncode is None:
            if cancelled() or time.monotonic() >= ends_s:
                child.kill()
                raise IndexUnusable(f"reading it took longer than {timeout_s:.0f} s, or was cancelled")
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = child.communicate(timeout=_LOOK_AGAIN_S)[1].strip().splitlines()
    if child.returncode < 0:
        raise IndexUnusable(f"reading it killed the process, signal {-child.returncode}")
    if child.returncode != 0:
        raise IndexUnusable(said[-1] if said else f"reading it ended with {child.returncode}")


class Index:
    """The open file, for writing. Every method raises IndexUnusable when it cannot be done; drop the file then."""

    def __init__(self, path: Path, nbytes: int, meta: Meta) -> None:
        """Opens, or makes the file when there is none. `meta` replaces what the file says of itself."""
        self._path = path
        self._meta = meta
        self._nbytes = nbytes
        self._env: lmdb.Environment | None = None
        try:
            self._env = lmdb.open(
                str(path), map_size=nbytes, subdir=False, lock=False, sync=False, metasync=False, mode=0o600
            )
            with self._env.begin(write=True) as txn:
                txn.put(_META_KEY, meta.encode())
            self._reserve(nbytes)
        except (lmdb.Error, OSError) as error:
            self.abandon()
            raise IndexUnusable(str(error)) from error

    @property
    def complete(self) -> bool:
        """Whether every chunk has been written to it."""
        return self._meta.complete

    def _reserve(self, nbytes: int) -> None:
        # Later commits then need no space, and the file takes from the start what is charged for it.
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)

    def _opened(self) -> lmdb.Environment:
        if self._env is None:
            raise IndexUnusable("it is closed")
        return self._env

    def grow(self, nbytes: int) -> None:
        """OSError when there is no space; the file is then as usable as before."""
        if nbytes <= self._nbytes:
            return
        self._reserve(nbytes)
        try:
            self._opened().set_mapsize(nbytes)
        except lmdb.Error as error:
            raise IndexUnusable(str(error)) from error
        self._nbytes = nbytes

    def commit(self, changes: Changes, sequence: int, *, complete: bool = True) -> None:
        waiting = iter(changes.items())  # no copy of them all at once: the interpreter would do nothing else meanwhile
        try:
            for first in range(0, max(1, len(changes)), OPERATIONS_PER_COMMIT_MAX):
                batch = itertools.islice(waiting, OPERATIONS_PER_COMMIT_MAX)
                is_last = first + OPERATIONS_PER_COMMIT_MAX >= len(changes)
                self._commit_batch(batch, sequence, complete=self._meta.complete or (complete and is_last))
        except lmdb.Error as error:
            raise IndexUnusable(str(error)) from error

    def _commit_batch(self, batch: Iterable[tuple[ChunkId, Record | None]], sequence: int, *, complete: bool) -> None:
        chunks, payload_bytes = self._meta.chunks, self._meta.payload_bytes
        with self._opened().begin(write=True) as txn:
            for chunk, record in batch:
                key = _key(chunk)
                before = txn.replace(key, _value(key, record)) if record is not None else txn.pop(key)
                if before is not None:
                    chunks -= 1
                    payload_bytes -= _payload_bytes(before)
                if record is not None:
                    chunks += 1
                    payload_bytes += record.payload_bytes
            meta = replace(
                self._meta,
                complete=complete,
                sequence=max(sequence, self._meta.sequence),
                chunks=chunks,
                payload_bytes=payload_bytes,
            )
            txn.put(_META_KEY, meta.encode())
        self._meta = meta

    def close(self) -> None:
        """Synced: what was committed is on disk."""
        try:
            self._opened().sync(True)
        except lmdb.Error as error:
            raise IndexUnusable(str(error)) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _main(path: str, seconds: str) -> int:
    signal.alarm(int(seconds))  # nobody waits for it longer; it must not outlive its parent by more
    try:
        read(Path(path))
    except IndexUnusable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
