"""`kv_connector_extra_config` as a frozen dataclass: parsed once, unknown keys refused with a suggestion."""

import difflib
import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.admission import Mode

logger = logging.getLogger("vllm.connector.config")

SPEC_NAME = "KVStoreSpec"
SPEC_MODULE_PATH = "connector.spec"

_KEYS = (
    "endpoint",
    "admission",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "require_cache_salt",
    "prefetch_policy",
    "prefetch_timeout_ms",
    "tp_lcm_size",
    "copy_backend",
    "copy_in_flight_bytes",
    "untried_cuda",
    "self_describing_kv_events",
    "canonical_layout",
)
_SET_BY_US = {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE_PATH}


PREFETCH_POLICIES = ("timeout", "best_effort", "wait_complete")
PREFETCH_TIMEOUT_MS = 1_000
WAIT_COMPLETE_MS = 30_000  # as long as the daemon keeps what it has read; it answers long before, also for a hung disk
COPY_IN_FLIGHT_BYTES = 64 << 20  # of each direction; some 1.2 ms at the speed of PCIe 5


class CopyBackend(enum.StrEnum):
    """Which way bytes go between the KV cache and the arena."""

    AUTO = "auto"  # on CUDA by fragment size and direction; on vLLM's CPU platform `host`
    COPY_ENGINE = "copy_engine"
    KERNEL = "kernel"
    HOST = "host"  # on CUDA: of memory that is not page-locked, several times slower


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    admission: Mode  # model: only where it pays; always, never
    endpoint: str  # "unix:///run/kvstore/kvstore.sock"
    offload_prompt_only: bool  # True: what a request generates is not stored, so the next turn recomputes the answer
    require_cache_salt: bool  # requests without a salt are neither stored nor loaded
    prefetch_wait_ms: (
        int  # the most that a request waits for chunks that are only on disk; 0: what is not there is a miss
    )
    tp_lcm_size: int | None  # of the tensor parallel sizes that share chunks; None: the engine's own size
    copy_backend: CopyBackend
    copy_in_flight_bytes: int  # CUDA: the most that the driver is given at a time, of each direction
    untried_cuda: bool  # True: serve an engine on CUDA although these copies have never run on a GPU

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> "ConnectorConfig":
        """ValueError, naming key, value and what is allowed. Accepts what `for_base_class` added to `raw` before."""
        for key, value in raw.items():
            if key in _SET_BY_US:
                if value != _SET_BY_US[key]:
                    raise ValueError(
                        f"kv_connector_extra_config: {key}={value!r}, but KVStoreConnector brings its own "
                        f"({_SET_BY_US[key]!r}); leave the key out"
                    )
            elif key == "sync_load_budget_bytes":  # vLLM 0.33
                raise ValueError(
                    f"kv_connector_extra_config: {key}={value!r} makes loads end within the step, but a load that "
                    "fails there can be reported only after its bytes were used; leave the key out"
                )
            elif key not in _KEYS:
                raise ValueError(f"kv_connector_extra_config: unknown key {key!r}{_suggestion(key)}")
        # vLLM reads the first two itself, but its own messages name neither the key nor the value.
        for key in ("block_size", "blocks_per_chunk"):
            _positive(raw, key)
        tp_lcm_size = _positive(raw, "tp_lcm_size")
        if raw.get("block_size") is not None and raw.get("blocks_per_chunk") is not None:
            raise ValueError(
                f"kv_connector_extra_config: block_size={raw['block_size']!r} (tokens) and "
                f"blocks_per_chunk={raw['blocks_per_chunk']!r} both set the size of a chunk; give one of them"
            )
        if not _boolean(raw, "canonical_layout", True):
            raise ValueError(
                "kv_connector_extra_config: canonical_layout=False, but the store keeps one layout for every engine; "
                "leave the key out"
            )
        if _boolean(raw, "self_describing_kv_events", False):  # vLLM's own key, which other connectors take
            logger.warning(
                "kv_connector_extra_config: self_describing_kv_events changes nothing: the store emits no KV events"
            )
        return cls(
            admission=_admission(raw),
            endpoint=_endpoint(raw),
            offload_prompt_only=_boolean(raw, "offload_prompt_only", False),
            require_cache_salt=_boolean(raw, "require_cache_salt", False),
            prefetch_wait_ms=_prefetch_wait_ms(raw),
            tp_lcm_size=tp_lcm_size,
            copy_backend=_copy_backend(raw),
            copy_in_flight_bytes=_positive(raw, "copy_in_flight_bytes") or COPY_IN_FLIGHT_BYTES,
            untried_cuda=_boolean(raw, "untried_cuda", False),
        )

    def for_base_class(self) -> dict[str, object]:
        """What vLLM's OffloadingConnector must read in the same mapping."""
        return {
            **_SET_BY_US,
            "canonical_layout": True,
            "offload_prompt_only": self.offload_prompt_only,
            # Else it keeps the tokens of every chunk for an event of its removal, of which we tell it nothing.
            "self_describing_kv_events": False,
        }


def _suggestion(key: str) -> str:
    nearest = difflib.get_close_matches(key, _KEYS, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known keys are {', '.join(_KEYS)}"


def _endpoint(raw: Mapping[str, object]) -> str:
    value = raw.get("endpoint")
    if value is None:
        from kvstore.config import default_endpoint

        return default_endpoint()
    if not isinstance(value, str) or not value.startswith("unix:/"):
        raise ValueError(
            f"kv_connector_extra_config: endpoint={value!r} is not the daemon's socket, as its ready line shows it, "
            "for example unix:///run/kvstore/kvstore.sock"
        )
    return value


def _copy_backend(raw: Mapping[str, object]) -> CopyBackend:
    value = raw.get("copy_backend", CopyBackend.AUTO.value)
    if value not in tuple(CopyBackend):
        raise ValueError(f"kv_connector_extra_config: copy_backend={value!r} must be one of {', '.join(CopyBackend)}")
    return CopyBackend(str(value))


def _admission(raw: Mapping[str, object]) -> Mode:
    value = raw.get("admission", Mode.MODEL.value)
    if value not in tuple(Mode):
        raise ValueError(f"kv_connector_extra_config: admission={value!r} must be one of {', '.join(Mode)}")
    return Mode(str(value))


def _prefetch_wait_ms(raw: Mapping[str, object]) -> int:
    policy = raw.get("prefetch_policy", "timeout")
    if policy not in PREFETCH_POLICIES:
        raise ValueError(
            f"kv_connector_extra_config: prefetch_policy={policy!r} must be one of {', '.join(PREFETCH_POLICIES)}"
        )
    _positive(raw, "prefetch_timeout_ms")
    timeout_ms = raw.get("prefetch_timeout_ms")
    if timeout_ms is not None and policy != "timeout":
        raise ValueError(
            f"kv_connector_extra_config: prefetch_timeout_ms={timeout_ms!r} is of no use with "
            f"prefetch_policy={policy!r}; leave one of them out"
        )
    if policy == "timeout":
        return PREFETCH_TIMEOUT_MS if timeout_ms is None else int(str(timeout_ms))
    return 0 if policy == "best_effort" else WAIT_COMPLETE_MS


def _boolean(raw: Mapping[str, object], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"kv_connector_extra_config: {key}={value!r} must be true or false")
    return value


def _positive(raw: Mapping[str, object], key: str) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"kv_connector_extra_config: {key}={value!r} must be a whole number above 0")
    return value
