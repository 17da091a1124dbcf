"""The LMDB file: what is committed is read, what is not right is refused, and what kills its reader kills a child."""

import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore.tiers import fs_index
from kvstore.tiers.base import ChunkId
from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_catalog import index_bytes_for
from kvstore.tiers.fs_index import Index, IndexUnusable, Meta, Record, check, read

META = Meta(complete=False, sequence=7, chunks=0, payload_bytes=0, opening=b"o" * 16, directory_id=b"d" * 16)
NBYTES = index_bytes_for(1000)


def record(number: int, payload_bytes: int = 5000) -> Record:
    return Record(chunk_id(number), number % 3, number, 100 + number, payload_bytes, number, number % 2 == 0)


def written(path: Path, count: int = 500) -> list[Record]:
    """A file as a clean stop leaves it."""
    index = Index(path, NBYTES, META)
    records = [record(number) for number in range(count)]
    index.commit({each.chunk: each for each in records}, 600)
    index.close()
    return records


def spoil(path: Path, change: Callable[[bytes], bytes], key: bytes | None = None) -> None:
    """Changes a value; that of the first chunk, where no key is given."""
    with lmdb.open(str(path), subdir=False, lock=False, map_size=NBYTES) as env, env.begin(write=True) as txn:
        key = key or next(bytes(key) for key, _ in txn.cursor() if key != b"m")
        value = txn.get(key)
        assert value is not None
        txn.put(key, change(value))


def test_what_was_committed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    records = written(path)
    check(path)
    meta, found = read(path)
    assert sorted(found) == sorted(records)
    assert meta == replace(META, complete=True, sequence=600, chunks=500, payload_bytes=500 * 5000)


def test_changes_replace_and_delete(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    index = Index(path, NBYTES, META)
    index.commit({chunk_id(number): record(number) for number in range(10)}, 1)
    index.commit({chunk_id(3): None, chunk_id(4): record(4, 6000), chunk_id(99): None}, 2)
    index.close()
    meta, found = read(path)
    assert {each.chunk for each in found} == {chunk_id(number) for number in range(10) if number != 3}
    assert (meta.chunks, meta.payload_bytes, meta.sequence) == (9, 8 * 5000 + 6000, 7)


@pytest.mark.parametrize("slots", [10, 100, 3000])
def test_the_file_takes_from_the_start_what_is_charged_and_never_more(tmp_path: Path, slots: int) -> None:
    """Every slot taken, keys of the greatest length all over the tree, and commits that change all of it."""
    path = tmp_path / "index.mdb"
    rnd = random.Random(slots)
    index = Index(path, index_bytes_for(slots), META)
    held: list[ChunkId] = []
    for turn in range(30):
        changes: dict[ChunkId, Record | None] = {}
        for _ in range(rnd.randrange(1, slots)):
            if len(held) == slots:
                changes[held.pop(rnd.randrange(slots))] = None
            chunk = ChunkId(rnd.randbytes(16), rnd.randbytes(16), rnd.randbytes(64))
            changes[chunk] = record(turn)._replace(chunk=chunk)
            held.append(chunk)
        index.commit(changes, turn)
    index.close()
    assert len(read(path)[1]) == len(held)
    assert path.stat().st_size == index_bytes_for(slots)
    assert path.stat().st_blocks * 512 <= index_bytes_for(slots)


def test_growing_makes_room_for_more(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    index = Index(path, index_bytes_for(10), META)
    index.grow(index_bytes_for(20_000))
    index.commit({chunk_id(number): record(number) for number in range(20_000)}, 1)
    index.close()
    assert len(read(path)[1]) == 20_000


def test_a_file_that_is_full_is_unusable_not_a_crash(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.mdb", index_bytes_for(10), META)
    with pytest.raises(IndexUnusable):
        index.commit({chunk_id(number): record(number) for number in range(100_000)}, 1)
    index.abandon()


def test_an_incomplete_file_is_unusable(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    index = Index(path, NBYTES, META)
    index.commit({chunk_id(1): record(1)}, 1, complete=False)
    index.close()
    with pytest.raises(IndexUnusable, match="never completed"):
        read(path)
    index = Index(path, NBYTES, META)
    index.commit({}, 1)
    index.close()


def test_another_version_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.mdb"
    monkeypatch.setattr(fs_index, "VERSION", 1)
    written(path)
    monkeypatch.undo()
    with pytest.raises(IndexUnusable, match="version 1"):
        check(path)


@pytest.mark.parametrize("at", range(37))
def test_a_flipped_bit_in_a_record_is_found(tmp_path: Path, at: int) -> None:
    """LMDB itself has no checksums."""
    path = tmp_path / "index.mdb"
    written(path, 3)
    spoil(path, lambda value: value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :])
    with pytest.raises(IndexUnusable, match="checksum"):
        read(path)


def test_the_record_of_another_chunk_is_found(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    written(path, 3)
    with lmdb.open(str(path), subdir=False, lock=False, map_size=NBYTES) as env, env.begin(write=True) as txn:
        first, second = [(key, bytes(value)) for key, value in txn.cursor() if key != b"m"][:2]
        txn.put(first[0], second[1])
        txn.put(second[0], first[1])
    with pytest.raises(IndexUnusable, match="checksum"):
        read(path)


def test_a_flipped_bit_in_the_description_is_found(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    written(path, 3)
    spoil(path, lambda value: value[:12] + bytes([value[12] ^ 1]) + value[13:], key=b"m")  # of the sequence
    with pytest.raises(IndexUnusable, match="checksum"):
        read(path)


def test_accounts_that_do_not_add_up_are_unusable(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    written(path)
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=NBYTES) as env,
        env.begin(write=True) as txn,
    ):
        key = next(key for key, _ in txn.cursor() if key != b"m")
        txn.delete(key)
    with pytest.raises(IndexUnusable, match="499 chunks"):
        check(path)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 8192, os.urandom(100_000)])
def test_what_is_no_lmdb_file_is_unusable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index.mdb"
    path.write_bytes(content)
    with pytest.raises(IndexUnusable):
        check(path)


def test_a_missing_file_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(IndexUnusable):
        check(tmp_path / "index.mdb")
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_kills_only_the_child(tmp_path: Path) -> None:
    """Pages behind the end of a mapped file are deadly to touch."""
    path = tmp_path / "index.mdb"
    written(path, 1000)
    os.truncate(path, 16384)
    with pytest.raises(IndexUnusable):
        check(path)


def test_a_damaged_tree_is_found_by_the_child(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    written(path, 1000)
    content = bytearray(path.read_bytes())
    for page in range(2, 40):  # everything but the two meta pages
        content[page * 4096 + 8 : page * 4096 + 64] = struct.pack("<56s", b"\xff" * 56)
    path.write_bytes(content)
    with pytest.raises(IndexUnusable):
        check(path)


def test_a_child_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    written(path)
    with pytest.raises(IndexUnusable):
        check(path, timeout_s=0.0)


def test_a_child_whose_parent_closes_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    written(path)
    with pytest.raises(IndexUnusable, match="cancelled"):
        check(path, cancelled=lambda: True)


def test_a_pickle_in_its_place_is_not_run(tmp_path: Path) -> None:
    path, marker = tmp_path / "index.mdb", tmp_path / "marker"
    path.write_bytes(b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    with pytest.raises(IndexUnusable):
        check(path)
    assert not marker.exists()
