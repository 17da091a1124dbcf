"""What the ranks of a pipeline must tell one another before they can say what a chunk is.

A stage knows only its own layers. A chunk holds those of all stages, one rank after the other, so each rank has to know
how many bytes the others keep of a block, and the namespace has to name the layers of all. Ranks meet once, at the
engine's start, when every one of them registers its KV cache.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from kvstore.namespace import canonical_json

T = TypeVar("T")
Gather = Callable[[object], Sequence[object]]  # what every rank gave, in the order of the ranks


def gather_from_all_ranks(value: object) -> Sequence[object]:
    """Waits for all ranks. ValueError where others than this engine's would be among them."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    gathered: list[object] = [None] * world.world_size
    torch.distributed.all_gather_object(gathered, value, group=world.cpu_group)
    return gathered


def page_bytes_of_ranks(own: Sequence[int], ranks: int, gather: Gather) -> list[tuple[int, ...]]:
    """`own`: what this rank keeps of a block, of each kind. Returns, of each kind, what every rank keeps."""
    of_ranks = cast("Sequence[Sequence[int]]", gather(list(own)))
    if len(of_ranks) != ranks:
        raise ValueError(
            f"this engine has {ranks} ranks and meets {len(of_ranks)}: KVStoreConnector does not serve pipeline "
            "parallel engines with data parallel ranks; start them apart, or without --kv-transfer-config"
        )
    kinds = [tuple(of_rank[kind] for of_rank in of_ranks) for kind in range(len(own))]
    for kind, sizes in enumerate(kinds):
        if not all(sizes):
            raise ValueError(
                f"pipeline stage without a layer of KV cache group {kind} ({sizes} bytes a block by rank): choose "
                "another pipeline_parallel_size, or start the engine without --kv-transfer-config"
            )
    return kinds


def document_of_all_stages(own: Mapping[str, object], gather: Gather) -> dict[str, object]:
    """The first rank's, with a digest of each rank's: the same in every rank."""
    documents = cast("Sequence[Mapping[str, object]]", gather(dict(own)))
    digests = [hashlib.sha256(canonical_json(document).encode()).hexdigest()[:32] for document in documents]
    return {**documents[0], "stages": digests}
