"""What can go wrong, by what the caller does next.

* KVStoreError
  x the caller recomputes and tries later:  Unavailable > NotAllowed
  x the operator makes two settings equal:  IdentityMismatch > SeedMismatch, NamespaceMismatch
  x the operator corrects one setting:      ConfigurationError
  x the caller's request is at fault:       SaltRequired, LimitExceeded, WrongSize, BadKey, NotFound
  x the caller's program is at fault:       ProtocolError
"""


class KVStoreError(Exception):
    """Base of everything that this package raises on purpose."""


class Unavailable(KVStoreError):
    """No daemon answers at the endpoint, or the one that was attached has gone. Try again later."""


class NotAllowed(Unavailable):
    """A daemon answers, but not to this user."""


class IdentityMismatch(KVStoreError):
    """The caller's bytes could not be exchanged with what the daemon or the group holds."""


class SeedMismatch(IdentityMismatch):
    """Hash seeds differ: the two sides' keys would never agree."""


class NamespaceMismatch(IdentityMismatch):
    """Processes of one group describe different chunks, or an engine's probe differs from the first one seen."""


class ConfigurationError(KVStoreError):
    """A flag, variable, file or path that cannot work. The message names it and what to do."""


class SaltRequired(KVStoreError):
    """The daemon takes no chunk without a tenant (`--require-cache-salt`), or the salt is empty."""


class LimitExceeded(KVStoreError):
    """More keys, bytes or size classes than one call, message or arena can take."""


class WrongSize(KVStoreError):
    """A payload or buffer that is not exactly `chunk_bytes` long."""


class BadKey(KVStoreError):
    """A key that is not `bytes` of 16 to 64 bytes."""


class NotFound(KVStoreError):
    """An operator named a namespace, tenant or tier that this daemon does not have."""


class ProtocolError(KVStoreError):
    """A message that no client of this version sends. Nothing of it was applied."""
