"""What the fs tier takes where a filesystem gives space in more than 4 KiB at a time, and where pages are larger."""

import asyncio
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers import fs_catalog
from kvstore.tiers.base import ChunkId, WriteOutcome
from kvstore.tiers.conformance import chunk_id
from kvstore.tiers.fs_catalog import Catalog, index_bytes_for, slab_charge
from kvstore.tiers.fs_directory import FsDirectory
from kvstore.tiers.fs_format import BLOCK_BYTES, slab_file_bytes, slot_bytes_for
from kvstore.tiers.fs_index import Index, Meta, Record
from tests.fs_support import CHUNK_BYTES, du, fs_bench, options

CLUSTER_BYTES = 64 << 10
SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)


@pytest.fixture
def clustered(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem that gives 64 KiB at a time."""
    image, folder = tmp_path / "image", tmp_path / "clustered"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (
        ["mkfs.ext4", "-q", "-O", "bigalloc", "-C", str(CLUSTER_BYTES), str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no such filesystem can be made here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("cap_bytes", [2 << 20, 4 << 20, 16 << 20])
def test_a_filesystem_with_large_blocks_holds_chunks_within_the_cap(clustered: Path, cap_bytes: int) -> None:
    async def scenario() -> None:
        path = clustered / "fs"
        async with fs_bench(path, options(cap_bytes)) as bench:
            assert bench.tier._directory.unit_bytes == CLUSTER_BYTES
            for number in range(200):
                assert await bench.write(chunk_id(number)) is WriteOutcome.STORED
                if number % 20 == 0:
                    await bench.tier.keep_namespace(f'{{"model":"{number}"}}') if number < 60 else None
                    assert du(path) <= cap_bytes
            assert len(bench.held()) >= 2

    asyncio.run(scenario())


def test_an_ordinary_filesystem_gives_blocks(tmp_path: Path) -> None:
    directory = FsDirectory.open(tmp_path)
    assert directory.unit_bytes >= BLOCK_BYTES
    assert directory.unit_bytes % BLOCK_BYTES == 0
    directory.close()


@pytest.mark.parametrize("slot_count", [1, 2, 512])
def test_a_slab_is_charged_for_whole_units(slot_count: int) -> None:
    file_bytes = slab_file_bytes(SLOT_BYTES, slot_count)
    rounded = -(-file_bytes // CLUSTER_BYTES) * CLUSTER_BYTES
    assert slab_charge(SLOT_BYTES, slot_count, CLUSTER_BYTES) >= rounded + CLUSTER_BYTES
    catalog = Catalog(64 << 20, unit_bytes=CLUSTER_BYTES)
    before = catalog.charged_bytes
    cost = catalog.cost_of(SLOT_BYTES, slot_count)
    catalog.add_slab(0, -1, 1, SLOT_BYTES, slot_count, fresh=True)
    assert catalog.charged_bytes - before == cost


def make_index_of_pages(path: Path, page_bytes: int) -> None:
    """An empty LMDB file as a machine with such pages makes it: two pages that describe it."""
    empty = struct.pack("<IHHQQQQq", page_bytes, 0x08, 0, 0, 0, 0, 0, -1) + struct.pack(
        "<IHHQQQQq", 0, 0, 0, 0, 0, 0, 0, -1
    )
    pages = b""
    for number in (0, 1):
        header = struct.pack("<QHHI", number, 0, 0x08, 0)
        meta = struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, page_bytes * 2) + empty + struct.pack("<QQ", 1, number)
        pages += (header + meta).ljust(page_bytes, b"\0")
    path.write_bytes(pages)


@pytest.mark.parametrize("slots", [1, 10, 20, 100, 3_000])
def test_an_index_with_large_pages_has_room_for_every_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    page_bytes = 32 << 10
    monkeypatch.setattr(fs_catalog, "INDEX_PAGE_BYTES", page_bytes)
    path = tmp_path / "index.mdb"
    make_index_of_pages(path, page_bytes)
    index = Index(path, index_bytes_for(slots), Meta(True, 0, 0, 0, bytes(16), bytes(16)))
    assert index._opened().stat()["psize"] == page_bytes
    rnd = random.Random(slots)
    chunks = [ChunkId(rnd.randbytes(16), rnd.randbytes(16), rnd.randbytes(64)) for _ in range(slots)]
    records = {chunk: Record(chunk, 0, slot, 1, 20_000, 1, True) for slot, chunk in enumerate(chunks)}
    index.commit(records, 1)
    for turn in range(60):
        changed = rnd.sample(chunks, min(slots, 250))
        index.commit({chunk: records[chunk] if rnd.random() < 0.7 else None for chunk in changed}, turn)
    index.close()
    assert os.stat(path).st_size <= index_bytes_for(slots)
