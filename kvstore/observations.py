"""What the engine's scheduler and the links do, seen from outside: who waits, how long steps take, what is under way.

vLLM gives a connector no reference to its scheduler, so the queue is counted from what passes by: arrivals, the outputs
of `schedule`, preemptions and ends. A step's time is from when it was scheduled (or the step before it ended) to its
output; outputs come in the order of the steps. No vLLM import; one thread, the engine's scheduler, calls everything.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.calibration import OBSERVATION_S_MAX, PREFILL_TOKENS_MIN, RecomputeCalibration, Step
from kvstore.costmodel import NO_WAIT, GpuQueue, RecomputeModel, StepWait, recompute_s, step_wait

STEPS_OPEN_MAX = 16  # more than any engine overlaps: then steps and outputs no longer belong together
DECODE_TOKENS_MAX = 16  # in a step: one, and what was guessed ahead
STEPS_AVERAGED = 16  # the last ones since the engine had nothing to do
STEP_S_MAX = 60.0  # in that average: what a clock that jumped leaves there is soon forgotten


class _NewRequest(Protocol):
    req_id: str
    num_computed_tokens: int


class _CachedRequests(Protocol):
    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]
    num_output_tokens: Sequence[int]


class Scheduled(Protocol):
    """What is used of vLLM's SchedulerOutput."""

    scheduled_new_reqs: Sequence[_NewRequest]
    scheduled_cached_reqs: _CachedRequests
    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: Iterable[str] | None
    finished_req_ids: Collection[str]  # since the last one


class _Open(NamedTuple):
    step: Step
    began_s: float
    prefilled: Sequence[str]  # requests whose prompt is computed with this step


_DECODING = Step(())


class EngineQueue:
    """Requests that wait for the GPU, prefills that run, and the times of steps for the calibration."""

    def __init__(
        self,
        calibration: RecomputeCalibration,
        clock: Callable[[], float],
        *,
        on_prefilled: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._calibration = calibration
        self._on_prefilled = on_prefilled
        self._clock = clock
        self._waiting: dict[str, int] = {}  # request -> tokens of its prompt
        self._loading: set[str] = set()  # those that wait for a load, not for the GPU
        self._running: set[str] = set()  # those that have had a step and have not ended
        self._prefilling: dict[str, tuple[int, int]] = {}  # request -> computed so far, tokens of its prompt
        self._open: deque[_Open] = deque()
        self._ended_s = -math.inf
        self.steps_begun = 0  # so far, of those with tokens
        self._step_s = self._step_prefills = 0.0  # on average: how long one is, how many prompts are computed with it
        self._steps_averaged = 0
        self.prefill_steps = 0  # so far, of those long enough to be a prefill

    # -- requests

    def arrived(self, request: str, prompt_tokens: int) -> None:
        if not (self._waiting or self._running):  # steps of before say nothing of those to come
            self._steps_averaged, self._step_s, self._step_prefills = 0, 0.0, 0.0
        self._waiting[request] = prompt_tokens

    def loads(self, request: str) -> None:
        self._loading.add(request)

    def loaded(self, request: str) -> None:
        self._loading.discard(request)

    def ended(self, request: str) -> None:
        self._waiting.pop(request, None)
        self._loading.discard(request)
        self._prefilling.pop(request, None)
        self._running.discard(request)

    def seen_by(self, request: str, model: RecomputeModel) -> GpuQueue:
        """The queue as it is for one request at its head: the others that wait, and the prefills that have begun."""
        prefilling = self._prefilling.values()
        backlog_s = sum(recompute_s(model, done, end) for done, end in prefilling) if prefilling else 0.0
        return GpuQueue(self._waiting_beside(request), backlog_s, self.step_wait(request, 1).seconds)

    def step_wait(self, request: str, load_steps: float) -> StepWait:
        """Of a load for so many steps: they are as those of late, where there is anybody else to compute for."""
        others = self._waiting_beside(request) + len(self._running) - (request in self._running)
        return step_wait(load_steps, self._step_s, self._step_prefills) if others else NO_WAIT

    def _waiting_beside(self, request: str) -> int:
        loading = len(self._loading) - (request in self._loading)
        return max(0, len(self._waiting) - (request in self._waiting) - loading)

    # -- steps

    def step_began(self, scheduled: Scheduled) -> None:
        """The scheduler's output of this step. One without tokens runs no forward pass and is not timed."""
        tokens = scheduled.num_scheduled_tokens
        if not (scheduled.scheduled_new_reqs or scheduled.preempted_req_ids or self._waiting or self._prefilling) and (
            max(tokens.values(), default=0) <= DECODE_TOKENS_MAX
        ):
            if tokens:
                self._opened(_DECODING)  # as most steps; nothing but its place in their order is of use
            return
        prefills: list[tuple[int, int]] = []
        prefilled: list[str] = []
        decodes = context = 0
        for new in scheduled.scheduled_new_reqs:
            prompt = self._waiting.pop(new.req_id, 0)
            self._prefill(new.req_id, new.num_computed_tokens, tokens.get(new.req_id, 0), prompt, prefills, prefilled)
        cached = scheduled.scheduled_cached_reqs
        for request, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=False
        ):
            count = tokens.get(request, 0)
            prompt = self._waiting.pop(request, 0) or self._prefilling.get(request, (0, 0))[1]
            if outputs == 0 or count > DECODE_TOKENS_MAX:
                self._prefill(request, computed, count, prompt, prefills, prefilled)
            else:
                self._prefilling.pop(request, None)
                decodes += 1
                context += computed + count
        for request in scheduled.preempted_req_ids or ():
            if request in scheduled.finished_req_ids:
                continue  # preempted by a reset and aborted before this step: `ended` has been told
            _, prompt = self._prefilling.pop(request, (0, 0))
            self._waiting[request] = prompt
            self._running.discard(request)
        if tokens:
            self._opened(Step(prefills, decodes, context), prefilled)

    def _opened(self, step: Step, prefilled: Sequence[str] = ()) -> None:
        if len(self._open) >= STEPS_OPEN_MAX:
            self._open.clear()
        self._open.append(_Open(step, self._clock(), prefilled))
        self.steps_begun += 1

    def _prefill(
        self,
        request: str,
        computed: int,
        count: int,
        prompt: int,
        prefills: list[tuple[int, int]],
        prefilled: list[str],
    ) -> None:
        if count <= 0:
            return
        prefills.append((computed, computed + count))
        self._running.add(request)
        if computed + count < prompt:
            self._prefilling[request] = (computed + count, prompt)
        else:
            self._prefilling.pop(request, None)
            prefilled.append(request)

    def step_ended(self) -> bool:
        """The oldest step that is not over has given its output. Whether it was observed."""
        if not self._open:
            return False
        step = self._open.popleft()
        now_s = self._clock()
        seconds = now_s - max(step.began_s, self._ended_s)
        self._ended_s = now_s
        if 0 < seconds <= OBSERVATION_S_MAX:
            if self._steps_averaged < STEPS_AVERAGED:
                self._steps_averaged += 1
            self._step_s += (min(seconds, STEP_S_MAX) - self._step_s) / self._steps_averaged
            self._step_prefills += (len(step.prefilled) - self._step_prefills) / self._steps_averaged
        if step.step is _DECODING:
            return False
        observed = sum(end - first for first, end in step.step.prefills) >= PREFILL_TOKENS_MIN
        if observed:
            self.prefill_steps += 1
            self._calibration.observe(step.step, seconds)
        for request in step.prefilled:
            self._on_prefilled(request)
        return observed


class LinkQueue:
    """What is under way on one link, as far as it was predicted: how long until it is free, and for how many."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way = 0
        self._busy_until_s = -math.inf

    @property
    def under_way(self) -> int:
        return self._under_way

    @property
    def backlog_s(self) -> float:
        return max(0.0, self._busy_until_s - self._clock()) if self._under_way else 0.0

    def began(self, predicted_s: float) -> None:
        now_s = self._clock()
        start_s = max(now_s, self._busy_until_s) if self._under_way else now_s
        self._busy_until_s = start_s + predicted_s
        self._under_way += 1

    def ended(self) -> None:
        self._under_way = max(0, self._under_way - 1)  # a miscount must not cost more than a worse decision
