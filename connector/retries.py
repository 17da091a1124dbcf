"""Requests whose load failed and that wait for blocks anew, and when the engine's log says so.

With several KV cache groups, or a window alone, such a request gives its blocks back and is looked up again. Until it
has blocks vLLM asks for nobody behind it, also where loaded requests behind it hold all of them: it may wait for ever
(docs/decisions/021), and nothing else would say why. Called by the scheduler's thread.
"""

import logging
from collections.abc import Callable

from kvstore.observations import Scheduled

logger = logging.getLogger("vllm.connector.retries")

SAID_AFTER_S = 10.0  # of waiting,
SAID_EVERY_S = 60.0  # and again


class Retries:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: dict[str, float] = {}  # by request id
        self._quiet_until_s = 0.0

    def asked(self, req_id: str) -> None:
        """vLLM asks for a request whose load failed: it has no blocks."""
        now = self._clock()
        waited_s = now - self._since_s.setdefault(req_id, now)
        if waited_s < SAID_AFTER_S or now < self._quiet_until_s:
            return
        self._quiet_until_s = now + SAID_EVERY_S
        logger.warning(
            "kvstore: request %s has waited %.0f s for KV cache blocks since its load failed; no request behind it "
            "begins meanwhile. If it does not go on, loaded requests behind it hold all blocks: abort one of them, or "
            "give the engine more KV cache (vLLM's kv_cache_memory_bytes, on CPU VLLM_CPU_KVCACHE_SPACE)",
            req_id,
            waited_s,
        )

    def step_began(self, scheduled: Scheduled) -> None:
        if self._since_s:
            for req_id in self._since_s.keys() & scheduled.num_scheduled_tokens.keys():
                self.over(req_id)

    def over(self, req_id: str) -> None:
        """It has blocks, or is no more."""
        self._since_s.pop(req_id, None)
