"""The connector's series in the engine's own `/metrics` (the daemon has its own); no vLLM import.

Prometheus adds `_total` to a counter's name.
"""

LOADED_CHUNKS = "kvstore_connector_loaded_chunks"
FAILED_LOADS = "kvstore_connector_failed_load_chunks"
STORED_CHUNKS = "kvstore_connector_stored_chunks"
FAILED_STORES = "kvstore_connector_failed_store_chunks"
REFUSED_STORES = "kvstore_connector_refused_store_chunks"
UNADMITTED_STORES = "kvstore_connector_unadmitted_store_chunks"

COUNTERS = {
    LOADED_CHUNKS: "Chunks copied from the store to this engine's KV cache.",
    FAILED_LOADS: "Chunks whose load failed; their tokens were recomputed.",
    STORED_CHUNKS: "Chunks copied to the store and handed over to be committed.",
    FAILED_STORES: "Chunks whose store failed on some rank, or that had blocks nobody wrote; never committed.",
    REFUSED_STORES: "Chunks not stored because no slot was granted or no daemon was attached.",
    UNADMITTED_STORES: "Chunks not stored because storing them would cost more than it is likely to save.",
}


class Counts:
    """Not yet told to vLLM. Zeros once, so that every series exists."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, value: int) -> None:
        if value:
            self._counts[name] = self._counts.get(name, 0) + value

    def take(self) -> dict[str, int]:
        """Since the last call."""
        counts, self._counts = self._counts, {}
        return counts
