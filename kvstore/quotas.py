"""What each tenant may take in each tier, as an operator has set it. The tiers themselves keep to it.

Concurrency: the event loop's thread. Nothing here is kept over a restart; `kept` is what a file needs to hold for that,
and `load` reads it again.
"""

import logging
from collections.abc import Iterator, Mapping

from kvstore import limits
from kvstore._native import Index
from kvstore.config import BYTES_MAX
from kvstore.errors import LimitExceeded
from kvstore.tenant import TENANT_ID_BYTES
from kvstore.tiers.fs import FsTier

CPU_TIER = "cpu"
SHOWN_MAX = 40  # letters of a name in the log
LEFT_OUT_SHOWN = 5

_log = logging.getLogger(__name__)


class Quotas:
    def __init__(self, index: Index, fs: FsTier | None) -> None:
        self._index = index
        self._fs = fs
        self._bytes: dict[tuple[bytes, str], int] = {}  # by tenant and tier

    def set(self, tenant: bytes, tier: str, nbytes: int | None) -> int:
        """None: no limit. Returns by how much the tenant's chunks are beyond it: the caller removes that.
        LimitExceeded."""
        key = (tenant, tier)
        if nbytes is None:
            self._bytes.pop(key, None)
        else:
            if key not in self._bytes and len(self._bytes) >= limits.QUOTAS_MAX:
                raise LimitExceeded(f"{len(self._bytes)} quotas are set, and {limits.QUOTAS_MAX} is the most")
            self._bytes[key] = nbytes
        if tier == CPU_TIER:
            used = self._index.set_quota(tenant, nbytes)
        else:
            assert self._fs is not None, "a quota of a tier that there is not"
            used = self._fs.set_quota(tenant, nbytes)
        return max(0, used - nbytes) if nbytes is not None else 0

    def __iter__(self) -> Iterator[tuple[bytes, str, int]]:
        """Tenant, tier and bytes, in that order."""
        for (tenant, tier), nbytes in sorted(self._bytes.items()):
            yield tenant, tier, nbytes

    def kept(self) -> dict[str, dict[str, int]]:
        """By tenant (hex) and tier."""
        kept: dict[str, dict[str, int]] = {}
        for tenant, tier, nbytes in self:
            kept.setdefault(tenant.hex(), {})[tier] = nbytes
        return kept

    def load(self, kept: Mapping[str, Mapping[str, int]]) -> None:
        """What can be no quota is left out, and the log says so: the file is an operator's to damage."""
        left_out: list[str] = []
        tiers = {CPU_TIER} if self._fs is None else {CPU_TIER, self._fs.name}
        for name, by_tier in kept.items():
            try:
                tenant = bytes.fromhex(name)
            except ValueError:
                tenant = b""
            for tier, nbytes in by_tier.items():
                if len(tenant) != TENANT_ID_BYTES or tier not in tiers or not 0 <= nbytes <= BYTES_MAX:
                    left_out.append(f"{name[:SHOWN_MAX]!r} in {tier[:SHOWN_MAX]!r}")
                    continue
                try:
                    self.set(tenant, tier, nbytes)
                except LimitExceeded as error:
                    _log.error("%s: the other quotas that were kept do not hold", error)
                    return
        if left_out:
            _log.error(
                "%d quotas that were kept can be none, and do not hold (tenant %s%s); correct the file and start the "
                "daemon again, or set them again: the next quota that is set ends them",
                len(left_out), ", ".join(left_out[:LEFT_OUT_SHOWN]), ", ..." if len(left_out) > LEFT_OUT_SHOWN else "",
            )  # fmt: skip
