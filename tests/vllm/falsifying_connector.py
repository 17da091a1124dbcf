"""A connector whose next load fails in the middle, as if that chunk's slot had been handed out again meanwhile.

vLLM loads it by module path into the engine's processes. It is armed by a file, which the first load after it removes:
the file holds the position of the chunk whose expected generation is falsified.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from connector import KVStoreConnector
from connector.messages import ChunkSpec

TRAP_VARIABLE = "KVSTORE_TEST_TRAP"


class FalsifyingConnector(KVStoreConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        transfer = self._worker_half._transfer
        load = transfer.load
        trap = Path(os.environ[TRAP_VARIABLE])

        def load_expecting_another_generation(job: int, mapped: Any, spec: ChunkSpec, blocks: Any) -> None:
            if trap.exists():
                generations = spec.generations.copy()
                generations[int(trap.read_text())] += 1
                trap.unlink()
                spec = replace(spec, generations=generations)
            load(job, mapped, spec, blocks)

        transfer.load = load_expecting_another_generation  # type: ignore[method-assign]
