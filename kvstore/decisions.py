"""What an engine decided about loading or storing, why, and what came of it: the value, and its form on the wire.

An engine sends a decision when it is made and again, under the same number, when something came of it.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.costmodel import Alternative
from kvstore.rpc.v1 import store_pb2

REFUSED_KEYS_MAX = 256  # of one decision that travel
REFUSED_PREFIX_BYTES = 8  # of each: enough to answer a person who asks about a key


class Room(enum.IntEnum):
    """Of the fs tier. Numbers as on the wire."""

    NOT_ASKED = store_pb2.ROOM_NOT_ASKED  # there is none, or it is not for engines to say what is written there
    FREE = store_pb2.ROOM_FREE
    FULL = store_pb2.ROOM_FULL  # what is written from here on displaces something

    @classmethod
    def _missing_(cls, value: object) -> "Room":  # noqa: ARG003 - a newer daemon's
        return cls.NOT_ASKED


def is_full(index: Mapping[str, int], slot_bytes: int, capacity_bytes: int) -> bool:
    """Whether a chunk that is stored next displaces one: the arena, or the table, has no room beside what is there.

    `index`: the figures of a native index. The same of the disk, of which slabs and index take their share as they need
    it, the fs tier says itself (`FsTier.has_room`).
    """
    return (
        index["used_bytes"] + index["granted_bytes"] + slot_bytes > capacity_bytes
        or index["chunks"] + index["grants"] >= index["chunks_max"]
    )


@dataclass(slots=True, eq=False)
class Decision:
    """Lengths in tokens of the prompt, ends counted from its start."""

    number: int  # of the engine's; not 0
    request: str
    is_store: bool
    reason: str
    prompt_tokens: int
    gpu_tokens: int = 0  # the engine's own cache had them
    cpu_tokens: int = 0  # end of the part of the hit that is in memory
    hit_tokens: int = 0  # end of all of the hit; store: tokens of chunks already there
    waiting: int = 0  # other requests that waited for the GPU
    recompute_s: float = 0.0
    recompute_cost_s: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    tier: str = ""  # chosen, the slowest that takes part; "": none
    end_tokens: int = 0
    refused: Sequence[bytes] = ()  # store: keys that were not admitted, head first; load: the first that was not there
    disk_reason: str = ""  # store: why the disk gets what it gets; "": nothing was decided about it
    disk_end_tokens: int = 0
    disk_refused_count: int = 0  # chunks that are stored, but only in memory
    outcome: str = ""
    load_s: float = 0.0  # from the decision until its load had ended
    wait_s: float = 0.0  # of that, with the workers and not copied: for steps of the engine, and for other copies
    saved_s: float = 0.0  # what recomputing the loaded part would have kept it, and others, waiting
    first_token_s: float = 0.0  # from the decision until the prompt was computed
    kind: int = 0  # of the chunks that were compared, and of the refused keys
    chunks: int = 0  # store: of the prompt, that were admitted and not there

    def message(self) -> store_pb2.Decision:
        return store_pb2.Decision(
            number=self.number,
            request=self.request,
            is_store=self.is_store,
            reason=self.reason,
            prompt_tokens=self.prompt_tokens,
            gpu_tokens=self.gpu_tokens,
            cpu_tokens=self.cpu_tokens,
            hit_tokens=self.hit_tokens,
            waiting=self.waiting,
            recompute_s=self.recompute_s,
            recompute_cost_s=self.recompute_cost_s,
            alternatives=[
                store_pb2.Alternative(
                    tier=each.tier,
                    end_tokens=each.end_tokens,
                    seconds=each.seconds,
                    cost_s=each.cost_s,
                    wait_s=each.wait_s,
                )
                for each in self.alternatives
            ],
            tier=self.tier,
            end_tokens=self.end_tokens,
            chunks=self.chunks,
            refused_count=len(self.refused),
            refused=b"".join(key[:REFUSED_PREFIX_BYTES] for key in self.refused[:REFUSED_KEYS_MAX]),
            disk_reason=self.disk_reason,
            disk_end_tokens=self.disk_end_tokens,
            disk_refused_count=self.disk_refused_count,
            outcome=self.outcome,
            load_s=self.load_s,
            wait_s=self.wait_s,
            saved_s=self.saved_s,
            first_token_s=self.first_token_s,
            kind=self.kind,
        )
