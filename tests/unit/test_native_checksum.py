"""CRC-32C against published values, and its two ways against each other."""

import random

import pytest

from kvstore._native import crc32c, crc32c_kind, crc32c_table

# RFC 3720, appendix B.4, and the check value of the polynomial.
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize("way", [crc32c, crc32c_table])
@pytest.mark.parametrize(("message", "value"), VECTORS)
def test_published_values(way: object, message: bytes, value: int) -> None:
    assert way(message) == value  # type: ignore[operator]


def test_both_ways_agree_at_every_length_and_alignment() -> None:
    content = random.Random(1).randbytes(110_000)
    lengths = [*range(64), 4079, 4080, 4081, 4092, 4096, 8159, 8160, 8161, 49_151, 49_152, 49_153, 53_232, 100_000]
    for nbytes in lengths:
        for start in (0, 1, 7):
            part = memoryview(content)[start : start + nbytes]
            assert crc32c(part) == crc32c_table(part), (start, nbytes)


def test_the_way_has_a_name() -> None:
    assert crc32c_kind() in ("sse4.2", "armv8", "table")
