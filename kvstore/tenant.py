"""Who may find a chunk. The salt itself is never stored, logged or put in a metric."""

import hashlib

TENANT_ID_BYTES = 16
TENANT_KEY_BYTES = 32


def tenant_id(tenant_key: bytes, salt: str | None) -> bytes:
    """Keyed BLAKE2b-128 of the salt. `None` is the unsalted tenant, which no salt (never empty) can equal."""
    assert len(tenant_key) == TENANT_KEY_BYTES, f"tenant key of {len(tenant_key)} bytes"
    if salt is not None and (not isinstance(salt, str) or salt == ""):
        raise ValueError(
            f"a cache salt is a non-empty string or None, not {'an empty one' if salt == '' else type(salt).__name__}"
        )
    # A request may bring half a surrogate pair, and vLLM takes it: such a salt is one of its own.
    message = b"" if salt is None else salt.encode(errors="surrogatepass")
    return hashlib.blake2b(message, key=tenant_key, digest_size=TENANT_ID_BYTES).digest()
