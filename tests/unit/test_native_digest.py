"""SipHash-2-4 with 128 bits of output: against an implementation written from the algorithm's description.

The published vectors (every prefix of 00 01 02 ...) are checked by the native test; here the key is part of a chunk's
key, and the first 32 bytes of the message are namespace and tenant.
"""

import pytest

from kvstore import _native

KEY = bytes(range(16))
# Of the message 00 01 02 ... (48, 49 and 63 bytes) under the key 00 01 ... 0f, made with OpenSSL's SIPHASH.
OPENSSL = {
    48: "F7E5AEF549F782CF379055A608269B16",
    49: "438D030FD0B7A54FA837F2AD201A6403",
    63: "5150D1772F50834A503E069A973FBD7C",
    64: "1EAF077DC0D4CD3F8CAD4D383658A74B",
    96: "E79731444673D4420110D764DA2768CA",
}
MASK = (1 << 64) - 1


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (64 - bits))) & MASK


def _rounds(v: list[int], count: int) -> None:
    for _ in range(count):
        v[0] = (v[0] + v[1]) & MASK
        v[1] = _rotate(v[1], 13) ^ v[0]
        v[0] = _rotate(v[0], 32)
        v[2] = (v[2] + v[3]) & MASK
        v[3] = _rotate(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) & MASK
        v[3] = _rotate(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) & MASK
        v[1] = _rotate(v[1], 17) ^ v[2]
        v[2] = _rotate(v[2], 32)


def siphash_128(key: bytes, message: bytes) -> bytes:
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    digest = b""
    for position, constant in ((2, 0xEE), (1, 0xDD)):
        v[position] ^= constant
        _rounds(v, 4)
        digest += (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")
    return digest


def test_the_oracle_knows_the_published_vectors() -> None:
    assert siphash_128(KEY, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash_128(KEY, bytes(range(15))).hex() == "5493e99933b0a8117e08ec0f97cfc3d9"


@pytest.mark.parametrize("nbytes", OPENSSL)
def test_a_digest_is_the_siphash_of_namespace_tenant_and_key(nbytes: int) -> None:
    message = bytes(range(nbytes))
    assert _native.digest(KEY, message[:16], message[16:32], message[32:]).hex().upper() == OPENSSL[nbytes]


@pytest.mark.parametrize("nbytes", range(_native.KEY_BYTES_MIN, _native.KEY_BYTES_MAX + 1))
def test_every_key_length_agrees_with_the_oracle(nbytes: int) -> None:
    namespace, tenant, key = b"n" * 16, b"t" * 16, bytes(reversed(range(nbytes)))
    assert _native.digest(KEY, namespace, tenant, key) == siphash_128(KEY, namespace + tenant + key)


@pytest.mark.parametrize("nbytes", [0, 15, 65])
def test_a_key_of_another_length_is_refused_with_its_length(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"a key of {nbytes} bytes: 16 to 64"):
        _native.digest(KEY, bytes(16), bytes(16), bytes(nbytes))
