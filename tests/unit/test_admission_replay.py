"""An idealised engine, one queue for its GPU and one for the link, replayed from a real trace through real decisions.

Everything that was computed once is in the tier. A request is decided about when it is at the head of the queue, as in
vLLM; one that loads makes room for the next and comes back when its load has ended: at once, prefill only (`Replay`),
or as vLLM's steps have it, which hold chunks of prompts and decodes (`Steps`).
"""

import heapq
import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.admission import Admission, Hit, LoadVerdict, Mode, Priors
from kvstore.costmodel import TransferModel, recompute_s, transfer_s
from kvstore.profiles import find_prefill, geometry_of

CHUNK_TOKENS = 512
CHUNK_BYTES = CHUNK_TOKENS * 131_072
OVERHEAD_S = 6e-3
TOLERANCE = 1.05
STEP_TOKENS = 8192
ANSWER_TOKENS_MAX = 50  # longer ones only add steps that are all alike
DECODE_STEP_S, DECODE_S = 8e-3, 5e-5  # of a step without a prefill, and of each request in it
POLL_S = 2e-3  # a step that computes nothing
STEPS_REQUESTS = 3_000


@dataclass(frozen=True)
class Request:
    at_s: float
    tokens: int
    chunks: tuple[int, ...]
    answer_tokens: int


def trace() -> list[Request]:
    directory = os.environ.get("KVSTORE_TEST_DATA")
    if not directory:
        pytest.skip("KVSTORE_TEST_DATA is not set: it names the directory that holds reference/ and traces/")
    path = Path(directory) / "traces" / "mooncake_conversation_trace.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Request(row["timestamp"] / 1000, row["input_length"], tuple(row["hash_ids"]), row["output_length"])
        for row in rows
    ]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
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

    def hit_chunks(self, request: Request) -> int:
        return next((i for i, chunk in enumerate(request.chunks) if chunk not in self.seen), len(request.chunks))


class Replay(Engine):
    """Mean time to first token of one policy; the clock is the events'."""

    def __init__(self, mode: Mode, tier: TransferModel) -> None:
        super().__init__(mode, tier)
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
        hit = self.hit_chunks(request)
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


class Steps(Engine):
    """The same of an engine whose steps hold at most STEP_TOKENS. A copy begins behind the step that carries it, and
    the request goes on in the step after the one that reports its end."""

    def run(self, requests: list[Request], rate: float) -> float:
        coming = deque(range(len(requests)))
        self.waiting: deque[int] = deque()
        self.ready: deque[tuple[int, int]] = deque()  # loaded up to so many tokens
        self.running: dict[int, list[int]] = {}  # computed, generated
        copying: list[tuple[float, int, int, LoadVerdict, float, int]] = []
        link_free_s = 0.0
        waits: list[float] = []
        while coming or self.waiting or self.ready or self.running or copying:
            if not (self.waiting or self.ready or self.running or copying):
                self.clock.now_s = max(self.clock.now_s, requests[coming[0]].at_s / rate)
            while coming and requests[coming[0]].at_s / rate <= self.clock.now_s:
                i = coming.popleft()
                self.waiting.append(i)
                self.admission.queue.arrived(str(i), requests[i].tokens)
            parts, loads = self._schedule(requests)
            self.clock.now_s += self._step_s(requests, parts)
            for copied in [each for each in copying if each[0] <= self.clock.now_s]:
                copying.remove(copied)
                _, i, end, verdict, service_s, chunks = copied
                self.admission.copied(store=False, chunks=chunks, chunk_bytes=CHUNK_BYTES, seconds=service_s)
                self.admission.load_ended(verdict, service_s=service_s, loaded_chunks=chunks)
                self.ready.append((i, end))
            if parts:
                self.admission.step_ended()
            for i, (first, end) in parts.items():
                self.running[i][0] = end
                if end < requests[i].tokens:
                    continue
                if first < requests[i].tokens:
                    waits.append(self.clock.now_s - requests[i].at_s / rate)
                    self.seen.update(requests[i].chunks)
                self.running[i][1] += 1
                if self.running[i][1] >= min(requests[i].answer_tokens, ANSWER_TOKENS_MAX):
                    del self.running[i]
                    self.admission.finished(str(i))
            for i, end, verdict, chunks in loads:
                service_s = transfer_s(self.tier, chunks * CHUNK_BYTES)
                link_free_s = max(link_free_s, self.clock.now_s) + service_s
                copying.append((link_free_s, i, end, verdict, service_s, chunks))
        return sum(waits) / len(waits)

    def _schedule(
        self, requests: list[Request]
    ) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int, LoadVerdict, int]]]:
        """Which tokens of which request the step computes, and the loads that go out with it."""
        budget, parts, loads, new = STEP_TOKENS, {}, [], []
        for i, (computed, _) in self.running.items():
            count = min(budget, max(1, requests[i].tokens - computed))
            if count:
                parts[i] = (computed, computed + count)
            budget -= count
        before = [(str(i), first, self.running[i][1]) for i, (first, _) in parts.items()]
        while budget > 0 and (self.ready or self.waiting):
            i, done = self.ready.popleft() if self.ready else (self.waiting.popleft(), 0)
            if not done and (load := self._load(i, requests[i])) is not None:
                loads.append(load)
                continue
            end = min(done + budget, requests[i].tokens)
            budget -= end - done
            parts[i], self.running[i] = (done, end), [done, 0]
            new.append(SimpleNamespace(req_id=str(i), num_computed_tokens=done))
        names, computed, outputs = zip(*before, strict=True) if before else ((), (), ())
        self.admission.queue.step_began(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=names, num_computed_tokens=computed, num_output_tokens=outputs
                ),
                num_scheduled_tokens={str(i): end - first for i, (first, end) in parts.items()},
                preempted_req_ids=None,
                finished_req_ids=(),
            )
        )
        return parts, loads

    def _load(self, i: int, request: Request) -> tuple[int, int, LoadVerdict, int] | None:
        chunks = self.hit_chunks(request)
        if not chunks or self.mode is Mode.NEVER:
            return None
        end = min(chunks * CHUNK_TOKENS, request.tokens - 1)
        verdict = self.admission.load(
            str(i), Hit(request.tokens, 0, end, end, chunks, chunks, 0, CHUNK_BYTES), wait_s_max=1e9
        )
        if not verdict.loads:
            return None
        self.admission.load_began(verdict, chunks)
        return i, end, verdict, chunks

    def _step_s(self, requests: list[Request], parts: dict[int, tuple[int, int]]) -> float:
        if not parts:
            return POLL_S
        prefills = [(first, end) for i, (first, end) in parts.items() if first < requests[i].tokens]
        prefill_s = sum(recompute_s(self.model, first, end) for first, end in prefills)
        return max(DECODE_STEP_S, prefill_s) + DECODE_S * (len(parts) - len(prefills))


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


@pytest.mark.parametrize(("gb_per_s", "rate"), [(44.0, 0.2), (44.0, 0.8), (6.0, 0.2), (1.5, 0.8)])
def test_nor_is_it_where_a_load_waits_for_the_engines_steps(gb_per_s: float, rate: float) -> None:
    tier = TransferModel(gb_per_s * 1e9, OVERHEAD_S)
    requests = trace()[:STEPS_REQUESTS]
    mean_s = {mode: Steps(mode, tier).run(requests, rate) for mode in Mode}
    print(gb_per_s, rate, {mode.value: round(seconds, 3) for mode, seconds in mean_s.items()})
    assert mean_s[Mode.MODEL] <= TOLERANCE * min(mean_s[Mode.ALWAYS], mean_s[Mode.NEVER]), mean_s
