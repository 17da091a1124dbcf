"""The codec of what lies in a slab file: see FORMAT.md, which says the same in prose. Pure.

Nothing here is trusted: `decode` either returns a header in which every rule holds or raises `Damaged` with the rule
that does not. Whether the header is the *expected* one is the caller's question.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvstore._native import IO_HEAD_BYTES, KEY_BYTES_MAX, KEY_BYTES_MIN, SLOT_ALIGNMENT, crc32c
from kvstore.tiers.base import ChunkId

BLOCK_BYTES = 4096  # of a header; also what every offset and length in a slab file is a multiple of
VERSION = 1
SLOT_MAGIC = b"KVSTSLOT"
SLAB_MAGIC = b"KVSTSLAB"
HEADER_CHECKSUM_AT = BLOCK_BYTES - 4
SLOT_PAYLOAD_CHECKSUM_AT = 12
SLOT_BYTES_MAX = 1 << 40
SLOTS_PER_SLAB_MAX = 1 << 24

# magic, version, key bytes, payload checksum, slab epoch, sequence, slab, slot, payload bytes, slot bytes, ids, key
_SLOT = struct.Struct("<8sHHIQQIIQQ16s16s64s")
# magic, version, reserved, slab, epoch, slot bytes, slot count, reserved, directory id
_SLAB = struct.Struct("<8sHHIQQII16s")
_CHECKSUM = struct.Struct("<I")
_ZEROS = bytes(BLOCK_BYTES)  # compared as a whole: looking at each byte costs as much as all the rest

assert BLOCK_BYTES == IO_HEAD_BYTES == SLOT_ALIGNMENT
assert _SLOT.size == 152
assert _SLAB.size == 56
assert _SLOT.unpack(bytes(SLOT_PAYLOAD_CHECKSUM_AT) + b"\1" + bytes(_SLOT.size - 13))[3] == 1


class Damaged(Exception):
    """A block that is no valid header. The argument is the rule that it breaks."""


class SlotHeader(NamedTuple):
    slab: int
    slot: int
    slab_epoch: int
    sequence: int
    slot_bytes: int
    chunk: ChunkId
    payload_bytes: int
    payload_checksum: int = 0

    def encode(self) -> bytes:
        """The block, without its checksums where the payload's is not known yet: the writer of it fills them in."""
        assert payload_fits(self.payload_bytes, self.slot_bytes), (self.payload_bytes, self.slot_bytes)
        assert KEY_BYTES_MIN <= len(self.chunk.key) <= KEY_BYTES_MAX, f"key of {len(self.chunk.key)} bytes"
        return seal(
            _SLOT.pack(
                SLOT_MAGIC,
                VERSION,
                len(self.chunk.key),
                self.payload_checksum,
                self.slab_epoch,
                self.sequence,
                self.slab,
                self.slot,
                self.payload_bytes,
                self.slot_bytes,
                *self.chunk,
            )
        )

    @classmethod
    def decode(cls, block: bytes) -> "SlotHeader":
        _open(block, SLOT_MAGIC, _SLOT.size)
        _, _, key_bytes, checksum, epoch, sequence, slab, slot, payload_bytes, slot_bytes, namespace, tenant, key = (
            _SLOT.unpack_from(block)
        )
        if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX:
            raise Damaged(f"a key of {key_bytes} bytes")
        if key[key_bytes:].strip(b"\0"):
            raise Damaged("bytes behind the key that are not zero")
        if not slot_bytes_valid(slot_bytes):
            raise Damaged(f"a slot of {slot_bytes} bytes")
        if not payload_fits(payload_bytes, slot_bytes):
            raise Damaged(f"a payload of {payload_bytes} bytes in a slot of {slot_bytes}")
        chunk = ChunkId(namespace, tenant, key[:key_bytes])
        return cls(slab, slot, epoch, sequence, slot_bytes, chunk, payload_bytes, checksum)


@dataclass(frozen=True, slots=True)
class SlabHeader:
    slab: int
    epoch: int
    slot_bytes: int
    slot_count: int
    directory_id: bytes

    def encode(self) -> bytes:
        assert slot_bytes_valid(self.slot_bytes), self.slot_bytes
        assert 0 < self.slot_count <= SLOTS_PER_SLAB_MAX, self.slot_count
        return seal(
            _SLAB.pack(
                SLAB_MAGIC, VERSION, 0, self.slab, self.epoch, self.slot_bytes, self.slot_count, 0, self.directory_id
            )
        )

    @classmethod
    def decode(cls, block: bytes) -> "SlabHeader":
        _open(block, SLAB_MAGIC, _SLAB.size)
        _, _, reserved, slab, epoch, slot_bytes, slot_count, reserved_too, directory_id = _SLAB.unpack_from(block)
        if reserved or reserved_too:
            raise Damaged("reserved bytes that are not zero")
        if not slot_bytes_valid(slot_bytes):
            raise Damaged(f"slots of {slot_bytes} bytes")
        if not 0 < slot_count <= SLOTS_PER_SLAB_MAX:
            raise Damaged(f"{slot_count} slots")
        return cls(slab, epoch, slot_bytes, slot_count, directory_id)

    @property
    def file_bytes(self) -> int:
        return slab_file_bytes(self.slot_bytes, self.slot_count)


def slot_bytes_for(payload_bytes: int) -> int:
    """Header block and payload, rounded up to blocks."""
    return BLOCK_BYTES + -(-payload_bytes // BLOCK_BYTES) * BLOCK_BYTES


def slot_bytes_valid(slot_bytes: int) -> bool:
    return 2 * BLOCK_BYTES <= slot_bytes <= SLOT_BYTES_MAX and slot_bytes % BLOCK_BYTES == 0


def payload_fits(payload_bytes: int, slot_bytes: int) -> bool:
    """A slot is never larger than its payload needs: one payload length belongs to one size class."""
    return payload_bytes > 0 and slot_bytes_for(payload_bytes) == slot_bytes


def slot_offset(slot: int, slot_bytes: int) -> int:
    return BLOCK_BYTES + slot * slot_bytes


def slab_file_bytes(slot_bytes: int, slot_count: int) -> int:
    return slot_offset(slot_count, slot_bytes)


def seal(fields: bytes) -> bytes:
    """The fields as a whole block: zeros behind them, the block's checksum at its end."""
    body = fields.ljust(HEADER_CHECKSUM_AT, b"\0")
    return body + _CHECKSUM.pack(crc32c(body))


def _open(block: bytes, magic: bytes, fields_bytes: int) -> None:
    if len(block) != BLOCK_BYTES:
        raise Damaged(f"{len(block)} bytes, not {BLOCK_BYTES}")
    if block[: len(magic)] != magic:
        raise Damaged("the magic is missing")
    version = int.from_bytes(block[8:10], "little")
    if version != VERSION:
        raise Damaged(f"version {version}, not {VERSION}")
    if _CHECKSUM.unpack_from(block, HEADER_CHECKSUM_AT)[0] != crc32c(block[:HEADER_CHECKSUM_AT]):
        raise Damaged("the header's checksum is wrong")
    if block[fields_bytes:HEADER_CHECKSUM_AT] != _ZEROS[fields_bytes:HEADER_CHECKSUM_AT]:
        raise Damaged("reserved bytes that are not zero")
