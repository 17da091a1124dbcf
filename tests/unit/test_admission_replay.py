"""An idealised engine, one queue for its GPU and one for the link, replayed from a real trace through real decisions.

Prefill only; everything that was computed once is in the tier. A request is decided about when it is at the head of the
queue, as in vLLM; one that loads makes room for the next and comes back when its load has ended.
"""

import heapq
import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.admission import Admission, Hit, Mode, Priors
from kvstore.costmodel import TransferModel, recompute_s, transfer_s
from kvstore.profiles import find_prefill, geometry_of

CHUNK_TOKENS = 512
CHUNK_BYTES = CHUNK_TOKENS * 131_072
OVERHEAD_S = 6e-3
TOLERANCE = 1.05


@dataclass(frozen=True)
class Request:
    at_s: float
    tokens: int
    chunks: tuple[int, ...]


def trace() -> list[Request]:
    directory = os.environ.get("KVSTORE_TEST_DATA")
    if not directory:
        pytest.skip("KVSTORE_TEST_DATA is not set: it names the directory that holds reference/ and traces/")
    path = Path(directory) / "traces" / "mooncake_conversation_trace.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Request(row["timestamp"] / 1000, row["input_length"], tuple(row["hash_ids"])) for row in rows]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Replay:
    """Mean time to first token of one policy; the clock is the events'."""

    def __init__(self, mode: Mode, tier: TransferModel) -> None:
        self.mode = mode
        geometry = geometry_of("meta-llama/Meta-Llama-3.1-8B")
        assert geometry is not None
        self.model = find_prefill(geometry, "h100_sxm", 1).recompute_model()
        self.tier = tier
        self.clock = Clock()
        priors = Priors(recompute=self.model, load=tier, store=tier, disk=tier, recompute_known=True)
        self.admission = Admission(mode, priors, tokens_per_chunk=CHUNK_TOKENS, clock=self.clock, uniform=lambda: 0.5)
        self.seen: set[int] = set()
        self.waiting: deque[int] = deque()  # not decided about
        self.ready: deque[tuple[int, int]] = deque()  # loaded up to so many tokens
        self.links: deque[tuple[int, object]] = deque()
        self.gpu_free_s = self.link_free_s = 0.0
        self.waits: list[float] = []

    def run(self, requests: list[Request], rate: float) -> float:
        events: list[tuple[float, int, str, int, object]] = []
        order = 0
        for i, request in enumerate(requests):
            heapq.heappush(events, (request.at_s / rate, order, "arrival", i, None))
            order += 1
        busy = False
        while events:
            self.clock.now_s, _, kind, i, what = heapq.heappop(events)
            if kind == "arrival":
                self.waiting.append(i)
                self.admission.queue.arrived(str(i), requests[i].tokens)
            elif kind == "loaded":
                verdict, end, service_s = what
                if verdict is not None:
                    self.admission.copied(
                        store=False, chunks=verdict.chunks, chunk_bytes=CHUNK_BYTES, seconds=service_s
                    )
                    self.admission.load_ended(verdict, service_s=service_s, loaded_chunks=verdict.chunks)
                self.ready.append((i, end))
            else:
                busy = False
                self.admission.step_ended()
                self.admission.finished(str(i))
                self.seen.update(requests[i].chunks)
                self.waits.append(self.clock.now_s - requests[i].at_s / rate)
            while not busy and (self.ready or self.waiting):
                started = self._head(requests)
                if started is None:
                    continue
                i, what_next, end_s, payload = started
                heapq.heappush(events, (end_s, order, what_next, i, payload))
                order += 1
                busy = what_next == "computed"
        return sum(self.waits) / len(self.waits)

    def _head(self, requests: list[Request]) -> tuple[int, str, float, object] | None:
        """What begins with the request at the head: its computation or its load."""
        if self.ready:
            return self._compute(requests, *self.ready.popleft())
        i = self.waiting.popleft()
        request = requests[i]
        hit = 0
        while hit < len(request.chunks) and request.chunks[hit] in self.seen:
            hit += 1
        end = min(hit * CHUNK_TOKENS, request.tokens - 1)
        if not hit:
            return self._compute(requests, i, 0)
        verdict = None
        if self.mode is Mode.MODEL:
            offered = Hit(request.tokens, 0, end, end, hit, hit, 0, CHUNK_BYTES)
            verdict = self.admission.load(str(i), offered, wait_s_max=1e9)
            if verdict.loads:
                self.admission.load_began(verdict, hit)
        if self.mode is Mode.NEVER or (verdict is not None and not verdict.loads):
            return self._compute(requests, i, 0)
        service_s = transfer_s(self.tier, hit * CHUNK_BYTES)
        self.link_free_s = max(self.link_free_s, self.clock.now_s) + service_s
        return i, "loaded", self.link_free_s, (verdict, end, service_s)

    def _compute(self, requests: list[Request], i: int, done: int) -> tuple[int, str, float, object]:
        tokens = requests[i].tokens
        end_s = self.clock.now_s + recompute_s(self.model, done, tokens)
        if self.mode is not Mode.MODEL:
            return i, "computed", end_s, None
        new = SimpleNamespace(req_id=str(i), num_computed_tokens=done)
        self.admission.queue.step_began(
            SimpleNamespace(
                scheduled_new_reqs=[new],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], num_output_tokens=[]),
                num_scheduled_tokens={str(i): tokens - done},
                preempted_req_ids=None,
            )
        )
        return i, "computed", end_s, None


@pytest.mark.parametrize("rate", [0.2, 0.8, 1.5])
@pytest.mark.parametrize("gb_per_s", [44.0, 11.6, 6.0, 3.0, 1.5, 0.75])
def test_the_model_is_never_much_worse_than_the_better_of_loading_and_recomputing_all(
    gb_per_s: float, rate: float
) -> None:
    tier = TransferModel(gb_per_s * 1e9, OVERHEAD_S)
    requests = trace()
    mean_s = {mode: Replay(mode, tier).run(requests, rate) for mode in Mode}
    print(gb_per_s, rate, {mode.value: round(seconds, 3) for mode, seconds in mean_s.items()})
    assert mean_s[Mode.MODEL] <= TOLERANCE * min(mean_s[Mode.ALWAYS], mean_s[Mode.NEVER]), mean_s
