"""The part of kvstore that vLLM loads: `--kv-transfer-config '{"kv_connector_module_path": "connector", ...}'`.

vLLM imports this package in its front end, in the engine's process and in every worker, so importing it must cost
nothing and start nothing; the class arrives on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector.plugin import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> object:
    if name == "KVStoreConnector":
        from connector.compat import require_supported_version

        require_supported_version()
        from connector.plugin import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
