"""The fs directory: its lock, its small files and its slab files. Blocking system calls, no state of chunks.

`FsDirectory.open` runs before the daemon serves; after that only the tier's worker thread calls it (the descriptors of
slabs are also used by the I/O threads). The lock dies with the process. Everything is reached through one descriptor of
the directory, so that nothing is ever written into a bare mount point: when the directory is unmounted or replaced, the
path and the descriptor disagree, and `lost` says so.

What a kill leaves behind is a temporary file, which the next start removes: small files and slab files are prepared
under a temporary name, synced, and renamed.
"""

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvstore.errors import ConfigurationError, KVStoreError, LimitExceeded
from kvstore.namespace import canonical_json, digest
from kvstore.tenant import TENANT_KEY_BYTES
from kvstore.tiers import fs_paths
from kvstore.tiers.fs_format import BLOCK_BYTES, Damaged, SlabHeader, slot_offset

log = logging.getLogger(__name__)

FOREIGN_ENTRIES_MAX = 100_000  # looked at, when the bytes of files that are not ours are added up
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BLOCK_UNIT = 512  # of st_blocks

Step = Callable[[str], None]


def no_step(_name: str) -> None:
    """Crash points are named calls; only a test gives them something to do."""


class DirectoryInUse(KVStoreError):
    """Another daemon owns the directory."""


class DirectoryUnusable(ConfigurationError):
    """The directory cannot hold a tier. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Written at every opening and at a clean stop. The index of another opening is older or newer than the data."""

    opening: bytes
    boot_id: str
    clean: bool

    def encode(self) -> bytes:
        return json.dumps({"opening": self.opening.hex(), "boot_id": self.boot_id, "clean": self.clean}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> "Opening | None":
        try:
            match json.loads(raw):
                case {"opening": str(opening), "boot_id": str(boot_id), "clean": bool(clean)}:
                    return cls(bytes.fromhex(opening), boot_id, clean)
        except (ValueError, RecursionError):
            pass
        return None


# What comes of a small file that an operator may have damaged, or made another user's.
_NOT_READ = (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError)


def _damage(error: Exception) -> str:
    return f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else "it is damaged"


def boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def probe_direct_io(directory_fd: int) -> bool:
    """Whether a file there can be written and read with O_DIRECT, two aligned blocks from two places in one call."""
    name = fs_paths.temporary(fs_paths.slab(fs_paths.SLAB_NUMBER_MAX))
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600, dir_fd=directory_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    written = [_aligned(bytes([number]) * BLOCK_BYTES) for number in (1, 2)]
    read = [_aligned(bytes(BLOCK_BYTES)) for _ in written]
    try:
        moved = os.pwritev(fd, written, BLOCK_BYTES), os.preadv(fd, read, BLOCK_BYTES)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=directory_fd)
    return moved == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES) and read == written


def probe_unit(directory_fd: int) -> int:
    """What a file there takes at the least: a block or, where the filesystem has larger ones, one of those."""
    name = fs_paths.temporary(fs_paths.slab(fs_paths.SLAB_NUMBER_MAX))
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        os.posix_fallocate(fd, 0, BLOCK_BYTES)
        taken = os.fstat(fd).st_blocks * _BLOCK_UNIT
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=directory_fd)
    return max(1, -(-taken // BLOCK_BYTES)) * BLOCK_BYTES


def _aligned(block: bytes) -> memoryview:
    """A copy where O_DIRECT can take it from."""
    view = memoryview(mmap.mmap(-1, len(block)))
    view[:] = block
    return view


@dataclass(frozen=True, slots=True)
class SlabFile:
    fd: int
    header: SlabHeader


class FsDirectory:
    """An owned directory. Made by `open`."""

    def __init__(self, path: Path, fd: int, lock_fd: int, *, direct: bool, unit_bytes: int, step: Step) -> None:
        self.path = path
        self.direct = direct
        self.unit_bytes = unit_bytes  # in which the filesystem gives space to files
        self.tenant_key = b""
        self.directory_id = b""  # names the data: slab files of another id, so of another tenant key, are not ours
        self._fd = fd
        self._lock_fd = lock_fd
        self._step = step
        self.stuck_slabs: set[int] = set()  # whose files could not be removed; their numbers are not used again
        self._quotas_damaged = False  # the file holds what an operator may want to see before it is written again
        self._unforgotten: dict[int, SlabHeader] = {}  # by descriptor: what is not on disk yet

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        probe: Callable[[int], bool] = probe_direct_io,
        step: Step = no_step,
    ) -> "FsDirectory":
        """Locks the directory, making it first where only it is missing. DirectoryInUse, DirectoryUnusable."""
        fd = lock_fd = -1
        try:
            if not path.exists():
                path.mkdir(mode=0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock_fd = _lock(fd, path)
            direct = probe(fd)
            directory = cls(path, fd, lock_fd, direct=direct, unit_bytes=probe_unit(fd), step=step)
            directory._prepare()
        except OSError as error:
            _close_all(fd, lock_fd)
            raise DirectoryUnusable(_why_unusable(path, error)) from error
        except KVStoreError:
            _close_all(fd, lock_fd)
            raise
        _warn_if_others_write(path, os.fstat(fd))
        if direct:
            log.info("%s: direct I/O, blocks of %d bytes", path, BLOCK_BYTES)
        else:
            log.warning("%s: no direct I/O here; reads and writes go through the page cache", path)
        return directory

    def _prepare(self) -> None:
        try:
            os.mkdir(fs_paths.NAMESPACES, 0o700, dir_fd=self._fd)
        except FileExistsError:
            self._require_directory(fs_paths.NAMESPACES)
        self._sweep()
        self._load_tenant_key()

    def _require_directory(self, name: str) -> None:
        if not stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
            raise DirectoryUnusable(f"{self.path / name} is in the way: it should be a directory; move it elsewhere")

    def _sweep(self) -> None:
        names = [*self._names(), *(f"{fs_paths.NAMESPACES}/{name}" for name in self._names(fs_paths.NAMESPACES))]
        for name in names:
            if fs_paths.is_temporary(name):
                log.info("%s: removing what a killed daemon left: %s", self.path, name)
                self._unlink(name)

    def close(self) -> None:
        """Gives the lock up."""
        _close_all(self._fd, self._lock_fd)
        self._fd = self._lock_fd = -1

    def lost(self) -> str | None:
        """Why the path no longer leads to what was opened, or None."""
        ours = os.fstat(self._fd)
        try:
            found = os.stat(self.path)
            lock = os.stat(fs_paths.LOCK, dir_fd=self._fd, follow_symlinks=False)
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            return f"{self.path} is no longer the directory that was opened"
        if lock.st_ino != os.fstat(self._lock_fd).st_ino:
            return f"{self.path / fs_paths.LOCK} was replaced"
        return None

    def take_back(self, opening: Opening, slab_fds: dict[int, int]) -> None:
        """After `lost`: when it was removed, whole or in part, and is there again, what it must have is put back.

        A directory that was moved or unmounted is only waited for: what is at the path then is somebody else's.
        OSError, DirectoryInUse.
        """
        ours = os.fstat(self._fd)
        found = os.stat(self.path)
        if not os.path.samestat(ours, found) and ours.st_nlink > 0:
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_fd = _lock(fd, self.path)
        except BaseException:
            os.close(fd)
            raise
        os.dup2(fd, self._fd, inheritable=False)  # the number stays: the index is reached by it
        _close_all(fd, self._lock_fd)
        self._lock_fd = lock_fd
        with contextlib.suppress(FileExistsError):
            os.mkdir(fs_paths.NAMESPACES, 0o700, dir_fd=self._fd)
        if not os.path.samestat(ours, found):
            self.remove_index()  # somebody else's; ours went with the directory
        for name in self._names():
            number = fs_paths.slab_number(name)
            if number is not None and not self._is_file_of(name, slab_fds.get(number)):
                self._unlink(name)
        self.write_small(fs_paths.STATE, opening.encode())

    def _is_file_of(self, name: str, fd: int | None) -> bool:
        return fd is not None and os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=self._fd, follow_symlinks=False))

    def keep_tenant_key(self) -> None:
        """Puts the file back when it was removed: without it the next start would find everything foreign."""
        if self.read_small(fs_paths.TENANT_KEY) != self.tenant_key:
            self.write_small(fs_paths.TENANT_KEY, self.tenant_key)

    @property
    def index_path(self) -> Path:
        """By way of the descriptor, and good for a child process too."""
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}/{fs_paths.INDEX}")

    # Small files

    def read_small(self, name: str, nbytes_max: int = 1 << 20) -> bytes | None:
        """None when there is no regular file of that name and of a sane size."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return None
            raise
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_size > nbytes_max:
                return None
            return os.pread(fd, nbytes_max, 0)
        finally:
            os.close(fd)

    def write_small(self, name: str, content: bytes) -> None:
        """Replaces the file as a whole, durably. Mode 0600."""
        temporary = fs_paths.temporary(name)
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._fd
        )
        try:
            written = os.write(fd, content)
            if written != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        except OSError:
            self._unlink(temporary)
            raise
        finally:
            os.close(fd)
        self._step(f"rename {name}")
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync_names()

    def sync_names(self) -> None:
        os.fsync(self._fd)

    def _load_tenant_key(self) -> None:
        try:
            key = self.read_small(fs_paths.TENANT_KEY)
        except OSError as error:
            raise DirectoryUnusable(
                f"{self.path / fs_paths.TENANT_KEY} cannot be read ({error.strerror}), and without it every chunk "
                f"there is lost; make it readable for this user (uid {os.getuid()})"
            ) from error
        if key is None or len(key) != TENANT_KEY_BYTES:
            if any(fs_paths.slab_number(name) is not None for name in self._names()):
                log.warning("%s: the tenant key is lost or damaged; every chunk here is removed", self.path)
            key = secrets.token_bytes(TENANT_KEY_BYTES)
            self.write_small(fs_paths.TENANT_KEY, key)
        self.tenant_key = key
        self.directory_id = blake2b(key, digest_size=16, person=b"kvstore-fs-dir").digest()

    def opening(self) -> Opening | None:
        """None: unknown, so the index is not to be trusted."""
        try:
            raw = self.read_small(fs_paths.STATE)
        except OSError as error:
            log.warning("%s: %s cannot be read: %s", self.path, fs_paths.STATE, error.strerror)
            return None
        return Opening.decode(raw) if raw is not None else None

    def namespaces(self) -> dict[bytes, str]:
        """Canonical documents by id; a file that is not what its name says is removed."""
        documents = {}
        for base in self._names(fs_paths.NAMESPACES):
            name = f"{fs_paths.NAMESPACES}/{base}"
            namespace_id = fs_paths.namespace_id(name)
            if namespace_id is None:
                continue
            raw = self.read_small(name)
            text = raw.decode(errors="replace") if raw is not None else ""
            if digest(text) == namespace_id:
                documents[namespace_id] = text
            else:
                log.warning("%s: %s is damaged; removing it", self.path, name)
                self._unlink(name)
        return documents

    def keep_namespace(self, document: str, bytes_max: int) -> None:
        """LimitExceeded when the small files would take more than `bytes_max`, a second copy of this one included."""
        taken = self.small_files_bytes()
        wanted = 2 * (len(document.encode()) + self.unit_bytes)
        if taken + wanted > bytes_max:
            raise LimitExceeded(
                f"the documents of namespaces take {taken} bytes in {self.path}, and {bytes_max} is the most; "
                "remove namespaces that are no longer used (kvstore gc)"
            )
        self.write_small(fs_paths.namespace(digest(document)), document.encode())

    def last_uses(self) -> dict[bytes, float]:
        """By namespace: when its document was written or noted as used, in seconds of the wall clock."""
        uses = {}
        for base in self._names(fs_paths.NAMESPACES):
            name = f"{fs_paths.NAMESPACES}/{base}"
            if (namespace_id := fs_paths.namespace_id(name)) is not None:
                uses[namespace_id] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        return uses

    def note_use(self, namespace_id: bytes) -> None:
        """The file's time is when the namespace was last used: nothing to write, and nothing to decode."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(fs_paths.namespace(namespace_id), dir_fd=self._fd, follow_symlinks=False)

    def drop_namespace(self, namespace_id: bytes) -> None:
        self._unlink(fs_paths.namespace(namespace_id))

    def quotas(self) -> dict[str, dict[str, int]]:
        """Bytes by tenant id (hex) and tier; a damaged file, or one that cannot be read, is none.

        Such a file stays, and every start says so, until a quota is kept: to set it aside at once would make the next
        start a quiet one without quotas.
        """
        try:
            raw = self.read_small(fs_paths.QUOTAS)
            if raw is None and self._exists(fs_paths.QUOTAS):
                raise ValueError("no regular file, or a huge one")
            document = {} if raw is None else json.loads(raw)
            quotas = {
                str(tenant): {str(tier): int(nbytes) for tier, nbytes in tiers.items()}
                for tenant, tiers in document.items()
            }
        except _NOT_READ as error:
            self._quotas_damaged = True
            log.error(
                "%s: %s: %s, so no tenant has a quota; the file is left as it is. Correct it and start the daemon "
                "again, or set the quotas again (`kvstore quota set`; the file is then kept as %s), or remove it if "
                "there should be none",
                self.path, fs_paths.QUOTAS, _damage(error), fs_paths.QUOTAS_DAMAGED,
            )  # fmt: skip
            return {}
        self._quotas_damaged = False
        return quotas

    def keep_quotas(self, quotas: dict[str, dict[str, int]], bytes_max: int) -> None:
        content = canonical_json(quotas).encode()
        taken = self.small_files_bytes()
        if taken + len(content) + self.unit_bytes > bytes_max:
            raise LimitExceeded(f"quotas of {len(content)} bytes beside {taken} bytes: {bytes_max} is the most")
        if self._quotas_damaged:
            with contextlib.suppress(FileNotFoundError):  # removed, as the log says it may be
                os.rename(fs_paths.QUOTAS, fs_paths.QUOTAS_DAMAGED, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                log.warning("%s: the damaged quotas are kept as %s", self.path, fs_paths.QUOTAS_DAMAGED)
            self._quotas_damaged = False
        self.write_small(fs_paths.QUOTAS, content)

    def learned(self) -> dict[str, dict[str, str]]:
        """Documents by kind of engine and name; a damaged file, or one that cannot be read, is none."""
        try:
            raw = self.read_small(fs_paths.LEARNED)
            document = {} if raw is None else json.loads(raw)
            json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair fits no message
            return {
                str(kind): {str(name): str(text) for name, text in documents.items()}
                for kind, documents in document.items()
            }
        except _NOT_READ as error:
            log.warning("%s: %s: %s; engines learn their speed anew", self.path, fs_paths.LEARNED, _damage(error))
            return {}

    def keep_learned(self, learned: dict[str, dict[str, str]], bytes_max: int) -> None:
        content = json.dumps(learned).encode()
        taken = self.small_files_bytes()
        if taken + len(content) + self.unit_bytes > bytes_max:
            raise LimitExceeded(
                f"{len(content)} bytes of what was learned beside {taken} bytes: {bytes_max} is the most"
            )
        self.write_small(fs_paths.LEARNED, content)

    def small_files_bytes(self) -> int:
        """What the directories and every file of ours but slabs and index take on disk."""
        own = sum(self._disk_bytes(name) for name in self._names() if self._is_small(name))
        documents = (f"{fs_paths.NAMESPACES}/{name}" for name in self._names(fs_paths.NAMESPACES))
        return self._disk_bytes(".") + own + sum(self._disk_bytes(name) for name in documents)

    @staticmethod
    def _is_small(name: str) -> bool:
        plain = fs_paths.slab_number(name.removesuffix(".new")) is None and name != fs_paths.INDEX
        return plain and (fs_paths.is_ours(name) or fs_paths.is_temporary(name))

    def foreign_bytes(self) -> int:
        """What files that are not ours take. They are left alone, but `du` counts them."""
        total = 0
        looked_at = 0
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            for base in self._names(folder or "."):
                name = f"{folder}/{base}" if folder else base
                number = fs_paths.slab_number(name)
                ours = fs_paths.is_ours(name) and name != fs_paths.NAMESPACES and number not in self.stuck_slabs
                if ours or fs_paths.is_temporary(name):
                    continue
                looked_at += 1
                if looked_at > FOREIGN_ENTRIES_MAX:
                    return total
                if self._is_directory(name):
                    waiting.append(name)
                if name != fs_paths.NAMESPACES:
                    total += self._disk_bytes(name)
        return total

    # Slab files

    def slabs(self) -> Iterator[SlabFile]:
        """Opens each one that is whole and ours; the others are removed, and the log says why. Lowest number first."""
        _close_all(*self._unforgotten)  # of a start that failed: what is there counts again
        self._unforgotten.clear()
        for name in sorted(self._names()):
            number = fs_paths.slab_number(name)
            if number is None:
                continue
            try:
                yield self._open_slab(name, number)
            except (Damaged, OSError) as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise
                why = error.strerror if isinstance(error, OSError) else error
                log.warning("%s: %s cannot be used (%s); removing it with all that it held", self.path, name, why)
                try:
                    self._unlink(name)
                except OSError as stays:
                    self.stuck_slabs.add(number)
                    log.warning("%s: %s cannot be removed: %s", self.path, name, stays.strerror)

    def _open_slab(self, name: str, number: int) -> SlabFile:
        fd = os.open(name, self._slab_flags() | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise Damaged("not a regular file")
            header = SlabHeader.decode(self.read_block(fd, 0))
            if header.directory_id != self.directory_id:
                raise Damaged("it belongs to another directory, or to a tenant key that is lost")
            if header.slab != number:
                raise Damaged(f"it says that it is slab {header.slab}")
            if about.st_size != header.file_bytes:
                raise Damaged(f"it has {about.st_size} bytes, not {header.file_bytes}")
        except BaseException:
            os.close(fd)
            raise
        return SlabFile(fd, header)

    def _slab_flags(self) -> int:
        return os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def create_slab(self, header: SlabHeader, charge_bytes: int) -> int:
        """Preallocated, with its header, durable. OSError with nothing left behind; the descriptor otherwise."""
        name = fs_paths.slab(header.slab)
        temporary = fs_paths.temporary(name)
        fd = -1
        try:
            self._allocate(temporary, header.file_bytes)
            self._step("slab allocated")
            fd = os.open(temporary, self._slab_flags(), dir_fd=self._fd)
            taken = os.fstat(fd).st_blocks * _BLOCK_UNIT
            if taken > charge_bytes:
                raise OSError(errno.ENOSPC, f"{header.file_bytes} bytes take {taken}, more than {charge_bytes}")
            self.write_block(fd, 0, header.encode())
            os.fsync(fd)
            self._step("slab written")
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self.sync_names()
        except BaseException:
            _close_all(fd)
            self._unlink(temporary)
            self._unlink(name)
            raise
        return fd

    def _allocate(self, name: str, nbytes: int) -> None:
        # Not through a descriptor with O_DIRECT: where a filesystem cannot allocate, single bytes are written instead.
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)

    def forget_slab(self, fd: int, header: SlabHeader) -> None:
        """Gives the slab another epoch, durably: no slot in it counts any more."""
        self._unforgotten[fd] = header
        self.write_block(fd, 0, header.encode())
        os.fdatasync(fd)
        del self._unforgotten[fd]

    def remove_slab(self, fd: int, header: SlabHeader) -> None:
        """`header` has an epoch of its own, so that a slab which comes back after a power cut holds nothing."""
        self.forget_slab(fd, header)
        self._step("slab forgotten")
        try:
            self._unlink(fs_paths.slab(header.slab))
        finally:
            os.close(fd)

    def settle(self) -> None:
        """Tries again to forget the slabs that could not be: until then no removal lasts. OSError."""
        for fd, header in list(self._unforgotten.items()):
            self.forget_slab(fd, header)

    def zero_slots(self, fd: int, slots: Iterable[int], slot_bytes: int) -> None:
        """Overwrites the slots' header blocks, durably."""
        for slot in slots:
            self.write_block(fd, slot_offset(slot, slot_bytes), bytes(BLOCK_BYTES))
            self._step("slot zeroed")
        os.fdatasync(fd)

    @staticmethod
    def read_block(fd: int, offset: int) -> bytes:
        block = _aligned(bytes(BLOCK_BYTES))
        nbytes = os.preadv(fd, [block], offset)
        if nbytes != BLOCK_BYTES:
            raise Damaged(f"the file ends at {offset + nbytes}")
        return bytes(block)

    @staticmethod
    def write_block(fd: int, offset: int, block: bytes) -> None:
        assert len(block) == BLOCK_BYTES
        if os.pwritev(fd, [_aligned(block)], offset) != BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @staticmethod
    def is_linked(fd: int) -> bool:
        return os.fstat(fd).st_nlink > 0

    def remove_index(self) -> None:
        self._unlink(fs_paths.INDEX)

    def index_bytes(self) -> int | None:
        try:
            return os.stat(fs_paths.INDEX, dir_fd=self._fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    # Names

    def _names(self, folder: str = ".") -> list[str]:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            return os.listdir(fd)
        except FileNotFoundError:
            return []  # the directory itself was removed
        finally:
            os.close(fd)

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _is_directory(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def _disk_bytes(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks * _BLOCK_UNIT
        except FileNotFoundError:
            return 0

    def _unlink(self, name: str) -> None:
        """What is a directory where a file should be is not ours to remove: OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)


def _warn_if_others_write(path: Path, found: os.stat_result) -> None:
    """No refusal, as of the runtime directory: volumes are often handed to containers with such a mode."""
    mode, others = stat.S_IMODE(found.st_mode), found.st_uid not in (os.geteuid(), 0)
    if others or mode & 0o022:
        log.warning(
            "%s belongs to uid %d and has mode %04o, so other users can remove or replace what is stored there, which "
            "engines would load; %s, unless all of them are trusted with that",
            path, found.st_uid, mode, f"chown {os.geteuid()} {path}" if others else f"chmod go-w {path}",
        )  # fmt: skip


def _lock(directory_fd: int, path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock_fd = os.open(fs_paths.LOCK, flags, 0o600, dir_fd=directory_fd)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise DirectoryInUse(f"another daemon uses {path}; stop it, or choose another --fs-dir") from None
    except OSError:
        os.close(lock_fd)
        raise
    return lock_fd


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _why_unusable(path: Path, error: OSError) -> str:
    match error.errno:
        case errno.ENOENT:
            return f"{path} cannot be made in {path.parent}; create it, or choose another --fs-dir"
        case errno.ENOTDIR:
            return f"{path} is not a directory; choose another --fs-dir"
        case errno.EACCES | errno.EPERM:
            return f"{path} may not be written by this user (uid {os.getuid()}); change its owner or its mode"
        case errno.EROFS:
            return f"{path} is on a read-only filesystem; mount it for writing, or choose another --fs-dir"
        case _:
            return f"{path}: {error.strerror}; see whether the disk is full or damaged, or choose another --fs-dir"
