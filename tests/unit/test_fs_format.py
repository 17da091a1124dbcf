"""The codec: golden files, and one test for each way of being wrong."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore._native import crc32c
from kvstore.tiers.base import ChunkId
from kvstore.tiers.fs_format import (
    BLOCK_BYTES,
    HEADER_CHECKSUM_AT,
    Damaged,
    SlabHeader,
    SlotHeader,
    seal,
    slab_file_bytes,
    slot_bytes_for,
    slot_offset,
)

GOLDEN = Path(__file__).parents[1] / "data" / "fs"
CHUNK = ChunkId(bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 64)))
SLOT = SlotHeader(
    slab=0x01020304,
    slot=0x05060708,
    slab_epoch=0x1112131415161718,
    sequence=0x2122232425262728,
    slot_bytes=BLOCK_BYTES + 8192,
    chunk=CHUNK,
    payload_bytes=5000,
    payload_checksum=0x31323334,
)
SLAB = SlabHeader(
    slab=0x01020304,
    epoch=0x1112131415161718,
    slot_bytes=3 * BLOCK_BYTES,
    slot_count=0x010203,
    directory_id=bytes(range(16)),
)


@pytest.mark.parametrize(("header", "name"), [(SLOT, "slot-header-v1"), (SLAB, "slab-header-v1")])
def test_golden_files_are_what_is_written_and_read(header: SlotHeader | SlabHeader, name: str) -> None:
    golden = (GOLDEN / name).read_bytes()
    assert header.encode() == golden
    assert type(header).decode(golden) == header


@pytest.mark.parametrize("header", [SLOT, SLAB], ids=["slot", "slab"])
def test_every_flipped_bit_is_refused(header: SlotHeader | SlabHeader) -> None:
    block = bytearray(header.encode())
    for position in range(8 * BLOCK_BYTES):
        block[position // 8] ^= 1 << position % 8
        with pytest.raises(Damaged):
            type(header).decode(bytes(block))
        block[position // 8] ^= 1 << position % 8


def resealed(block: bytes, at: int, value: bytes) -> bytes:
    """Changed, and with a right checksum: what a writer with a bug would leave, not a flipped bit."""
    return seal(block[:at] + value + block[at + len(value) : HEADER_CHECKSUM_AT])


@pytest.mark.parametrize(
    ("at", "value", "rule"),
    [
        (0, b"KVSTSLAB", "magic"),
        (8, struct.pack("<H", 2), "version 2"),
        (8, struct.pack("<H", 0), "version 0"),
        (10, struct.pack("<H", 15), "key of 15"),
        (10, struct.pack("<H", 65), "key of 65"),
        (10, struct.pack("<H", 31), "behind the key"),
        (40, struct.pack("<Q", 0), "payload of 0"),
        (40, struct.pack("<Q", 4096), "payload of 4096"),  # would fit, but belongs to a smaller class
        (40, struct.pack("<Q", 8193), "payload of 8193"),
        (40, struct.pack("<Q", 2**64 - 1), "payload of"),
        (48, struct.pack("<Q", 0), "slot of 0"),
        (48, struct.pack("<Q", BLOCK_BYTES), "slot of 4096"),
        (48, struct.pack("<Q", 3 * BLOCK_BYTES + 1), "slot of 12289"),
        (48, struct.pack("<Q", 2**63), "slot of"),
        (152, b"\1", "reserved"),
        (HEADER_CHECKSUM_AT - 1, b"\1", "reserved"),
    ],
)
def test_a_slot_header_that_breaks_a_rule_is_refused(at: int, value: bytes, rule: str) -> None:
    with pytest.raises(Damaged, match=rule):
        SlotHeader.decode(resealed(SLOT.encode(), at, value))


@pytest.mark.parametrize(
    ("at", "value", "rule"),
    [
        (0, b"KVSTSLOT", "magic"),
        (8, struct.pack("<H", 2), "version 2"),
        (10, b"\1", "reserved"),
        (24, struct.pack("<Q", 0), "slots of 0"),
        (24, struct.pack("<Q", 4097), "slots of 4097"),
        (24, struct.pack("<Q", 2**63), "slots of"),
        (32, struct.pack("<I", 0), "0 slots"),
        (32, struct.pack("<I", 2**24 + 1), "slots"),
        (36, b"\1", "reserved"),
        (56, b"\1", "reserved"),
    ],
)
def test_a_slab_header_that_breaks_a_rule_is_refused(at: int, value: bytes, rule: str) -> None:
    with pytest.raises(Damaged, match=rule):
        SlabHeader.decode(resealed(SLAB.encode(), at, value))


@pytest.mark.parametrize("decode", [SlotHeader.decode, SlabHeader.decode])
@pytest.mark.parametrize("block", [b"", bytes(BLOCK_BYTES - 1), bytes(BLOCK_BYTES), bytes(BLOCK_BYTES + 1)])
def test_blocks_that_are_no_header_are_refused(decode: Callable[[bytes], object], block: bytes) -> None:
    with pytest.raises(Damaged):
        decode(block)


def test_the_checksum_covers_all_but_itself() -> None:
    block = SLOT.encode()
    assert int.from_bytes(block[HEADER_CHECKSUM_AT:], "little") == crc32c(block[:HEADER_CHECKSUM_AT])


@pytest.mark.parametrize(
    ("payload_bytes", "slot_bytes"), [(1, 8192), (4096, 8192), (4097, 12288), (2 << 20, 4096 + (2 << 20))]
)
def test_a_slot_is_a_block_and_the_payloads_blocks(payload_bytes: int, slot_bytes: int) -> None:
    assert slot_bytes_for(payload_bytes) == slot_bytes


def test_slots_lie_behind_the_slab_header_without_gaps() -> None:
    assert slot_offset(0, 8192) == BLOCK_BYTES
    assert slot_offset(3, 8192) - slot_offset(2, 8192) == 8192
    assert slab_file_bytes(8192, 3) == slot_offset(2, 8192) + 8192
