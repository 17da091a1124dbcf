"""The fs directory: its lock, what makes it unusable, its small files, and other people's files in it."""

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigurationError, LimitExceeded
from kvstore.namespace import canonical_json, digest
from kvstore.tiers import fs_directory, fs_paths
from kvstore.tiers.fs_catalog import slab_charge
from kvstore.tiers.fs_directory import DirectoryInUse, DirectoryUnusable, FsDirectory, Opening, probe_direct_io
from kvstore.tiers.fs_format import SlabHeader, slot_bytes_for

SLOT_BYTES = slot_bytes_for(8192)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[FsDirectory]:
    directory = FsDirectory.open(tmp_path / "fs")
    yield directory
    directory.close()


def slab(directory: FsDirectory, number: int = 0, slot_count: int = 4) -> tuple[int, SlabHeader]:
    header = SlabHeader(number, 5, SLOT_BYTES, slot_count, directory.directory_id)
    return directory.create_slab(header, slab_charge(SLOT_BYTES, slot_count)), header


def test_a_second_opener_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    first = FsDirectory.open(tmp_path)
    with pytest.raises(DirectoryInUse, match="another daemon"):
        FsDirectory.open(tmp_path)
    first.close()
    FsDirectory.open(tmp_path).close()


@pytest.mark.usefixtures("directory")
def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    listing = (
        "import os; print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if fd != '3'))"
    )
    child = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, close_fds=False)
    assert str(tmp_path) not in child.stdout


def test_a_directory_that_alone_is_missing_is_made(tmp_path: Path) -> None:
    FsDirectory.open(tmp_path / "fs").close()
    assert stat.S_IMODE((tmp_path / "fs").stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "warned"), [(0o755, False), (0o770, True), (0o707, True)])
def test_a_directory_that_others_may_write_is_used_with_a_warning(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs").chmod(mode)
    FsDirectory.open(tmp_path / "fs").close()
    said = f"has mode {mode:04o}, so other users can remove or replace what is stored there"
    assert (said in caplog.text) is warned
    assert (f"chmod go-w {tmp_path / 'fs'}" in caplog.text) is warned


def test_a_directory_that_belongs_to_another_user_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)  # so that the directory's owner is another one
    fs_directory._warn_if_others_write(tmp_path, os.stat_result((0o40755, 0, 0, 1, 1234, 0, 0, 0, 0, 0)))
    assert f"{tmp_path} belongs to uid 1234" in caplog.text
    assert f"chown 4321 {tmp_path}" in caplog.text
    caplog.clear()
    fs_directory._warn_if_others_write(tmp_path, os.stat_result((0o40755, 0, 0, 1, 0, 0, 0, 0, 0, 0)))  # root's
    assert not caplog.text


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be made in .*; create it"):
        FsDirectory.open(tmp_path / "a" / "fs")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fs").write_text("mine")
    with pytest.raises(DirectoryUnusable, match="is not a directory"):
        FsDirectory.open(tmp_path / "fs")
    assert (tmp_path / "fs").read_text() == "mine"


def test_a_directory_of_somebody_else_is_refused_with_the_uid() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    folder = Path("/dev/shm") / f"kvstore-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        code = (
            "import os, sys; from pathlib import Path; from kvstore.tiers.fs_directory import *\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "try: FsDirectory.open(Path(sys.argv[1]))\n"
            "except DirectoryUnusable as error: print(error)"
        )
        child = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
        assert "may not be written by this user (uid 65534)" in child.stdout
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_a_read_only_filesystem_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("cannot mount")
    try:
        with pytest.raises(DirectoryUnusable, match="read-only filesystem"):
            FsDirectory.open(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_is_in_the_way_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / fs_paths.NAMESPACES).write_text("mine")
    with pytest.raises(DirectoryUnusable, match="in the way"):
        FsDirectory.open(tmp_path)
    (tmp_path / fs_paths.NAMESPACES).unlink()
    (tmp_path / fs_paths.LOCK).unlink()
    (tmp_path / fs_paths.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirectoryUnusable):
        FsDirectory.open(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_direct_io_is_probed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvstore.tiers"):
        directory = FsDirectory.open(tmp_path, probe=lambda _fd: False)
        assert not directory.direct
        directory.close()
        assert "no direct I/O here" in caplog.text
        fd = os.open(tmp_path, os.O_RDONLY)
        works = probe_direct_io(fd)
        os.close(fd)
        directory = FsDirectory.open(tmp_path)
        assert directory.direct == works
        directory.close()
    assert sorted(os.listdir(tmp_path)) == ["lock", "namespaces", "tenant.key"]


def test_the_tenant_key_is_kept_and_nobody_elses_to_read(tmp_path: Path) -> None:
    directory = FsDirectory.open(tmp_path)
    key, name = directory.tenant_key, directory.directory_id
    directory.close()
    assert stat.S_IMODE((tmp_path / fs_paths.TENANT_KEY).stat().st_mode) == 0o600
    directory = FsDirectory.open(tmp_path)
    assert (directory.tenant_key, directory.directory_id) == (key, name)
    directory.close()


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 33])
def test_a_lost_tenant_key_makes_every_slab_foreign(tmp_path: Path, content: bytes | None) -> None:
    directory = FsDirectory.open(tmp_path)
    os.close(slab(directory)[0])
    directory.close()
    (tmp_path / fs_paths.TENANT_KEY).unlink()
    if content is not None:
        (tmp_path / fs_paths.TENANT_KEY).write_bytes(content)
    directory = FsDirectory.open(tmp_path)
    assert list(directory.slabs()) == []
    assert not (tmp_path / fs_paths.slab(0)).exists()
    directory.close()


def test_slabs_come_back_as_they_were_made(directory: FsDirectory, tmp_path: Path) -> None:
    fd, header = slab(directory, number=3)
    os.close(fd)
    (found,) = directory.slabs()
    assert found.header == header
    assert (tmp_path / "fs" / fs_paths.slab(3)).stat().st_blocks * 512 >= header.file_bytes
    directory.remove_slab(found.fd, header)
    assert list(directory.slabs()) == []


def test_a_slab_that_takes_more_than_it_may_is_not_made(directory: FsDirectory, tmp_path: Path) -> None:
    header = SlabHeader(0, 1, SLOT_BYTES, 4, directory.directory_id)
    with pytest.raises(OSError, match="more than"):
        directory.create_slab(header, header.file_bytes - 4096)
    assert not list((tmp_path / "fs").glob("slab-*"))


def test_what_a_kill_left_is_swept_and_other_files_are_not(tmp_path: Path) -> None:
    FsDirectory.open(tmp_path).close()
    ours = [fs_paths.temporary(name) for name in (fs_paths.slab(7), fs_paths.STATE, fs_paths.namespace(bytes(16)))]
    others = ["notes.new", "slab-7.new", "slab-0000000x", "namespaces/readme", "core.1234"]
    for name in ours + others:
        (tmp_path / name).write_bytes(b"x" * 100)
    FsDirectory.open(tmp_path).close()
    assert not any((tmp_path / name).exists() for name in ours)
    assert all((tmp_path / name).read_bytes() == b"x" * 100 for name in others)


def test_a_thousand_unrelated_files_are_counted_and_untouched(directory: FsDirectory, tmp_path: Path) -> None:
    before = directory.foreign_bytes()
    assert before == 0
    folder = tmp_path / "fs" / "other" / "deep"
    folder.mkdir(parents=True)
    for number in range(1000):
        (folder / f"file-{number}").write_bytes(b"x")
    (tmp_path / "fs" / "dangling").symlink_to("nowhere")
    assert directory.foreign_bytes() >= 1000 * 4096
    assert list(directory.slabs()) == []
    assert len(list(folder.iterdir())) == 1000


def test_namespace_documents_are_kept_by_their_digest(directory: FsDirectory, tmp_path: Path) -> None:
    documents = [canonical_json({"model": name}) for name in ("a", "b", "c")]
    for document in documents:
        directory.keep_namespace(document, 1 << 20)
    assert directory.namespaces() == {digest(document): document for document in documents}
    directory.drop_namespace(digest(documents[0]))
    damaged = tmp_path / "fs" / fs_paths.namespace(digest(documents[1]))
    damaged.write_text(documents[2])
    assert directory.namespaces() == {digest(documents[2]): documents[2]}
    assert not damaged.exists()


def test_documents_stay_within_what_is_set_aside_for_them(directory: FsDirectory) -> None:
    allowed = 256 << 10

    def keep_a_thousand() -> None:
        for number in range(1000):
            directory.keep_namespace(canonical_json({"model": f"{number}", "padding": "x" * 10_000}), allowed)

    with pytest.raises(LimitExceeded, match="kvstore gc"):
        keep_a_thousand()
    assert directory.small_files_bytes() <= allowed


def test_quotas_round_trip_and_a_damaged_file_is_none(directory: FsDirectory, tmp_path: Path) -> None:
    assert directory.quotas() == {}
    quotas = {"00" * 16: {"cpu": 1 << 30, "fs": 5}}
    directory.keep_quotas(quotas, 1 << 20)
    assert directory.quotas() == quotas
    for content in (b"", b"[]", b"{", b'{"a": 1}', b'{"a": {"cpu": "x"}}', os.urandom(100)):
        (tmp_path / "fs" / fs_paths.QUOTAS).write_bytes(content)
        assert directory.quotas() == {}


def test_damaged_quotas_are_told_at_every_start_and_kept_beside_those_that_replace_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "fs" / fs_paths.QUOTAS
    for _ in range(2):
        directory = FsDirectory.open(tmp_path / "fs")
        file.write_bytes(b"{ nearly")
        caplog.clear()
        assert directory.quotas() == {}
        assert "kvstore quota set" in caplog.text
        assert file.read_bytes() == b"{ nearly"
        directory.close()
    directory = FsDirectory.open(tmp_path / "fs")
    directory.quotas()
    for number in range(2):
        directory.keep_quotas({"00" * 16: {"cpu": number}}, 1 << 20)
        assert (tmp_path / "fs" / fs_paths.QUOTAS_DAMAGED).read_bytes() == b"{ nearly"
    assert directory.quotas() == {"00" * 16: {"cpu": 1}}
    assert directory.foreign_bytes() == 0
    directory.close()


@pytest.mark.parametrize("make", [Path.mkdir, lambda file: file.symlink_to("elsewhere")], ids=["folder", "link"])
def test_quotas_that_are_no_file_are_told(
    directory: FsDirectory, tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "fs" / fs_paths.QUOTAS)
    assert directory.quotas() == {}
    assert "no tenant has a quota" in caplog.text


def test_openings_round_trip_and_nonsense_is_none() -> None:
    opening = Opening(bytes(range(16)), "boot", clean=True)
    assert Opening.decode(opening.encode()) == opening
    for content in (b"", b"null", b"[]", b"\xff", b'{"opening": "zz", "boot_id": "b", "clean": true}', b'{"clean": 1}'):
        assert Opening.decode(content) is None


def test_a_moved_directory_is_noticed(tmp_path: Path) -> None:
    directory = FsDirectory.open(tmp_path / "fs")
    assert directory.lost() is None
    (tmp_path / "fs").rename(tmp_path / "away")
    assert "No such file" in str(directory.lost())
    (tmp_path / "fs").mkdir()
    assert "no longer the directory" in str(directory.lost())
    directory.take_back(Opening(bytes(16), "boot", clean=False), {})
    assert list((tmp_path / "fs").iterdir()) == [], "something was written into another directory"
    (tmp_path / "fs").rmdir()
    (tmp_path / "away").rename(tmp_path / "fs")
    assert directory.lost() is None
    directory.close()


def test_the_index_of_another_directory_is_not_left_in_one_that_is_taken_back(tmp_path: Path) -> None:
    directory = FsDirectory.open(tmp_path / "fs")
    shutil.rmtree(tmp_path / "fs")
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / fs_paths.INDEX).write_bytes(b"of another daemon")
    directory.take_back(Opening(bytes(16), "boot", clean=False), {})
    assert directory.lost() is None
    assert directory.index_bytes() is None
    directory.close()


DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    "content", [DEEP, b'{"a": ' + DEEP, b'{"k": {"n": "\\ud800"}}', b'{"\\ud800": {}}', b'{"k": 1}', b"Infinity"]
)
def test_nonsense_of_every_kind_is_nothing_learned(directory: FsDirectory, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fs" / fs_paths.LEARNED).write_bytes(content)
    assert directory.learned() == {}


@pytest.mark.parametrize("content", [DEEP, b'{"a": {"cpu": Infinity}}', b'{"a": {"cpu": NaN}}', b'{"a": {"cpu": [1]}}'])
def test_nonsense_of_every_kind_is_no_quota(directory: FsDirectory, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fs" / fs_paths.QUOTAS).write_bytes(content)
    assert directory.quotas() == {}


def test_a_deeply_nested_state_is_none() -> None:
    assert Opening.decode(DEEP) is None


def test_small_files_that_cannot_be_read_are_named_and_cost_what_is_in_them(
    directory: FsDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: FsDirectory, name: str) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr(FsDirectory, "read_small", refuse)
    assert (directory.quotas(), directory.learned(), directory.opening()) == ({}, {}, None)
    for name in (fs_paths.QUOTAS, fs_paths.LEARNED, fs_paths.STATE):
        assert any(name in line and "Permission denied" in line for line in caplog.messages)


def test_a_tenant_key_that_cannot_be_read_is_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FsDirectory.open(tmp_path).close()
    key = (tmp_path / fs_paths.TENANT_KEY).read_bytes()

    def refuse(_: FsDirectory, name: str) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr(FsDirectory, "read_small", refuse)
    with pytest.raises(DirectoryUnusable, match=f"{fs_paths.TENANT_KEY} cannot be read"):
        FsDirectory.open(tmp_path)
    assert (tmp_path / fs_paths.TENANT_KEY).read_bytes() == key
