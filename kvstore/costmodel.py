"""What recomputing, loading and storing KV costs, and the decisions that follow: pure functions of their arguments.

No state, clock, lock or I/O; safe to call from anywhere. Units are in the names; positions and lengths are in tokens.
What is learned while running (the models' coefficients, margins, reuse probabilities) comes in as arguments, from
`calibration` and `reuse`. A number that is not finite can only make a decision decline: neither a load nor a store is
ever admitted on it.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SCALE_PRIOR = 1.10  # engines take a tenth longer than the fitted kernels alone
DESCRIPTOR_S = 3.4e-6  # one DMA descriptor, whatever its size
DEADLINE_FACTOR = 3.0  # a load that takes this many times the recomputation it was to save is given up
REUSE_PRIORS = (0.25, 0.5, 0.8)  # of a chunk used once, twice, more often
REUSE_PRIOR_TRIALS = 8.0
DRAM_WRITE_PRICE_MIN = 0.1  # seconds of engine slowed down for each second of copying, until measured


@dataclass(frozen=True, slots=True)
class RecomputeModel:
    """Prefill time of one request alone on the GPU.

    `step_s` is paid once for each engine step, of `step_tokens` tokens (None: the whole prompt is one step).
    `token_squared_s` times b*b - a*a is what attention adds for the tokens a..b.
    """

    step_s: float
    token_s: float
    token_squared_s: float
    scale: float = SCALE_PRIOR
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("step_s", "token_s", "token_squared_s", "scale"):
            value = getattr(self, name)
            assert 0 <= value < math.inf, f"{name} is a time or a factor of 0 or more, not {value}"
        assert self.step_tokens is None or self.step_tokens > 0, f"a step of {self.step_tokens} tokens"


@dataclass(frozen=True, slots=True)
class TransferModel:
    """Time of one copy on one link (or chain of links) without queueing: overhead, then bytes at a constant rate."""

    bytes_per_s: float
    overhead_s: float
    descriptor_s: float = DESCRIPTOR_S

    def __post_init__(self) -> None:
        assert 0 < self.bytes_per_s < math.inf, f"a link of {self.bytes_per_s} bytes/s"
        for name in ("overhead_s", "descriptor_s"):
            value = getattr(self, name)
            assert 0 <= value < math.inf, f"{name} is a time of 0 or more, not {value}"


@dataclass(frozen=True, slots=True)
class KVSize:
    """Bytes of one request's KV: proportional to its tokens, and recurrent state that is moved whole."""

    bytes_per_token: float
    state_bytes: int = 0

    def of(self, token_count: int) -> float:
        return self.bytes_per_token * token_count + self.state_bytes if token_count > 0 else 0.0

    def on_rank(self, tp_size: int, *, replicated: bool) -> "KVSize":
        """What the slowest rank moves: its share of the heads, or everything where ranks hold the same (MLA)."""
        assert tp_size >= 1, f"tensor parallel size {tp_size}"
        if replicated:
            return self
        return KVSize(self.bytes_per_token / tp_size, -(-self.state_bytes // tp_size))


def recompute_s(model: RecomputeModel, first_token: int, end_token: int) -> float:
    """Seconds to compute the tokens first..end of a prompt whose tokens before them are in the cache."""
    tokens = end_token - first_token
    if tokens <= 0:
        return 0.0
    steps = 1 if model.step_tokens is None else -(-tokens // model.step_tokens)
    attention = model.token_squared_s * tokens * (end_token + first_token)
    return model.scale * (model.step_s * steps + model.token_s * tokens + attention)


def transfer_s(link: TransferModel, nbytes: float, descriptor_count: int = 0) -> float:
    """Seconds to move `nbytes`; nothing to move costs nothing."""
    if nbytes <= 0:
        return 0.0
    return link.overhead_s + descriptor_count * link.descriptor_s + nbytes / link.bytes_per_s


def pipelined(first: TransferModel, second: TransferModel, chunk_bytes: int) -> TransferModel:
    """Two hops that overlap chunk by chunk: the slower one's rate, and one chunk on the other before or after it."""
    slower, other = sorted((first, second), key=lambda hop: hop.bytes_per_s)
    overhead_s = first.overhead_s + second.overhead_s + chunk_bytes / other.bytes_per_s
    return TransferModel(slower.bytes_per_s, overhead_s, max(first.descriptor_s, second.descriptor_s))


def store_and_forward(first: TransferModel, second: TransferModel) -> TransferModel:
    """Two hops of which the second starts when the first has ended."""
    return TransferModel(
        1 / (1 / first.bytes_per_s + 1 / second.bytes_per_s),
        first.overhead_s + second.overhead_s,
        first.descriptor_s + second.descriptor_s,
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Prefix lengths whose load is quicker than their recomputation on an idle node: below the one, from the other.

    Always quicker: from 0. Never: from infinity. Both bounds inside exist where a load starts sooner than a step of
    the engine but moves tokens more slowly than a short prompt is computed.
    """

    wins_below_tokens: float
    wins_from_tokens: float

    def wins(self, token_count: float) -> bool:
        return token_count < self.wins_below_tokens or token_count > self.wins_from_tokens


def break_even(model: RecomputeModel, link: TransferModel, kv: KVSize) -> BreakEven:
    """Roots of recompute_s(0, P) = transfer_s(P) for one engine step (what a long step sequence adds is neglected)."""
    linear_s = model.scale * model.token_s - kv.bytes_per_token / link.bytes_per_s
    squared_s = model.scale * model.token_squared_s
    start_s = link.overhead_s + kv.state_bytes / link.bytes_per_s - model.scale * model.step_s
    if start_s <= 0 and linear_s >= 0:
        return BreakEven(0.0, 0.0)
    if squared_s == 0:
        if linear_s > 0:
            return BreakEven(0.0, start_s / linear_s)
        if start_s < 0:
            return BreakEven(start_s / linear_s, math.inf)
        return BreakEven(0.0, math.inf)
    discriminant = linear_s * linear_s + 4 * squared_s * start_s
    if discriminant <= 0:
        return BreakEven(0.0, 0.0)
    root = math.sqrt(discriminant)
    # The form without cancellation of the two equal ones, for either sign of the linear part.
    upper = 2 * start_s / (linear_s + root) if linear_s > 0 else (root - linear_s) / (2 * squared_s)
    lower = (-linear_s - root) / (2 * squared_s) if start_s < 0 else 0.0
    return BreakEven(max(0.0, lower), upper)


def bytes_per_s_to_break_even(model: RecomputeModel, kv: KVSize, token_count: int, overhead_s: float) -> float:
    """The rate a link needs for a load of this prefix to be as quick as recomputing it; infinity: no rate does."""
    spare_s = recompute_s(model, 0, token_count) - overhead_s
    return kv.of(token_count) / spare_s if spare_s > 0 else math.inf


def mixed_tokens_per_s(hit_share: float, computed_tokens_per_s: float, loaded_tokens_per_s: float) -> float:
    """Throughput when this share of the tokens is loaded and the rest computed, one after the other."""
    assert 0 <= hit_share <= 1, f"a hit share of {hit_share}"
    return 1 / ((1 - hit_share) / computed_tokens_per_s + hit_share / loaded_tokens_per_s)


# -- loads ------------------------------------------------------------------------------------------------------------


class GpuQueue(NamedTuple):
    """The engine's own queue, without the request that is asked about. Counts, for a utilisation says too little.

    What recomputing delays: those that wait, or as many as the engine computes while a load would wait for its steps,
    if those are more.
    """

    waiting_count: float = 0
    backlog_s: float = 0.0
    step_s: float = 0.0  # of one engine step with nothing but the others; 0 where there are none


class StepWait(NamedTuple):
    """Of a load for the engine's steps, beside its copy: how long, and how many others it computes meanwhile."""

    seconds: float = 0.0
    passing_count: float = 0.0


NO_WAIT = StepWait()


class LoadOption(NamedTuple):
    """Load the hit up to `end_token`. `transfer_s` counts only what is not already being loaded for somebody else.

    `margin` is how much better it must look, for the estimate's error (`calibration` gives it).
    """

    tier: str  # the slowest that takes part
    end_token: int
    transfer_s: float
    link_backlog_s: float = 0.0
    link_waiting_count: int = 0
    margin: float = 0.05
    healthy: bool = True
    wait: StepWait = NO_WAIT


_BY_END = attrgetter("end_token", "tier", "transfer_s")


class LoadReason(enum.StrEnum):
    LOAD_IS_QUICKER = "LOAD_IS_QUICKER"
    RECOMPUTE_IS_QUICKER = "RECOMPUTE_IS_QUICKER"
    NO_HIT = "NO_HIT"
    TIER_SICK = "TIER_SICK"


class Alternative(NamedTuple):
    """To load up to `end_tokens`, and compute the rest. `seconds`: until the request has its first token, `wait_s` of
    them waiting for steps of the engine; `cost_s`: what it costs all that wait (infinity: not considered)."""

    tier: str
    end_tokens: int
    seconds: float
    cost_s: float
    wait_s: float = 0.0


class LoadDecision(NamedTuple):
    """`option` None: recompute everything that the GPU does not hold, in `recompute_s` beside what others have in the
    same steps. `alternatives`: the options that reach beyond that, in the order of their end and tier."""

    option: LoadOption | None
    reason: LoadReason
    recompute_s: float
    recompute_cost_s: float
    alternatives: tuple[Alternative, ...]


def step_wait(load_steps: float, step_s: float, step_prefills: float) -> StepWait:
    """What loading costs beside the copy on an engine that others use.

    vLLM begins a copy behind the step that carries it, and goes on with the request only when a later step has reported
    its end: `load_steps` of them, which take `step_s` each. A request that recomputes is computed in that very step.
    `step_prefills`: how many others have their first token with one such step. These pass a request that loads.
    """
    return StepWait(load_steps * step_s, load_steps * step_prefills)


def load_cost_s(
    compute_s: float,
    gpu: GpuQueue,
    *,
    load_s: float = 0.0,
    wait: StepWait = NO_WAIT,
    link_backlog_s: float = 0.0,
    link_waiting_count: int = 0,
) -> float:
    """J: until this request has its first token, plus what those waiting for the GPU and the link wait because of it.

    `compute_s` is the recomputation that is left after the load; nothing to load and nothing to wait for stand for not
    loading. Those that pass meanwhile do not wait for it: what the engine computes then is lost to this request, but
    not to all.
    """
    wait_s, passing_count = wait
    arrival_s = link_backlog_s + load_s + wait_s if load_s + wait_s > 0 else 0.0
    behind_count = max(0.0, gpu.waiting_count - passing_count)
    return max(arrival_s, gpu.backlog_s) + compute_s * (1 + behind_count) + 0.5 * link_waiting_count * load_s


def saved_s(
    model: RecomputeModel,
    first_token: int,
    end_token: int,
    prompt_tokens: int,
    gpu: GpuQueue,
    passing_count: float = 0.0,
) -> float:
    """What a load of the tokens first..end spared the request and others, by the same measure as `load_cost_s`: against
    it stands how long the load took, its wait for steps included."""
    rest_s = recompute_s(model, end_token, prompt_tokens)
    loaded_s = recompute_s(model, first_token, prompt_tokens) - rest_s
    passing_count = min(passing_count, gpu.waiting_count)
    return max(0.0, loaded_s) * (1 + gpu.waiting_count) + rest_s * passing_count


def decide_load(
    model: RecomputeModel,
    prompt_tokens: int,
    gpu_tokens: int,
    options: Iterable[LoadOption],
    gpu: GpuQueue,
) -> LoadDecision:
    """Nothing, or one of the options (the part of the hit in the faster tier, all of it): the least J with its margin.

    The first `gpu_tokens` are in the GPU's own cache. Equal options give equal answers in whatever order they come.
    """
    alone_s = recompute_s(model, gpu_tokens, prompt_tokens)
    recompute_cost_s = load_cost_s(alone_s, gpu)
    best: LoadOption | None = None
    best_cost_s = recompute_cost_s
    healthy = False
    queue_known = all(0 <= figure < math.inf for figure in gpu)  # else a maximum below may hide what it is not
    alternatives: list[Alternative] = []
    # The shorter one wins a tie: less to move, and less held.
    for option in sorted(options, key=_BY_END):
        tier, end_token, load_s, backlog_s, waiting_count, margin, is_healthy, wait = option
        if end_token <= gpu_tokens:
            continue
        wait_s, passing_count = wait
        rest_s = recompute_s(model, min(end_token, prompt_tokens), prompt_tokens)
        cost_s = load_cost_s(
            rest_s, gpu, load_s=load_s, wait=wait, link_backlog_s=backlog_s, link_waiting_count=waiting_count
        )
        usable = load_s >= 0 and wait_s >= 0 and passing_count >= 0 and backlog_s >= 0 and margin >= 0
        usable = usable and queue_known and math.isfinite(cost_s + margin + passing_count)
        if not (is_healthy and usable):
            cost_s = math.inf
        healthy |= is_healthy
        seconds = backlog_s + load_s + wait_s + rest_s + gpu.step_s
        alternatives.append(Alternative(tier, end_token, seconds, cost_s, wait_s))
        # The margin is against recomputing, the sure thing; two options are compared as they are. It is of what the
        # estimates differ in: what is computed either way would hide a short hit of a long prompt behind its error.
        # The same holds of the wait as far as those that pass would else wait for this request.
        either_way_s = rest_s * (1 + max(0.0, gpu.waiting_count - passing_count))
        either_way_s += min(wait_s, alone_s * min(passing_count, gpu.waiting_count))
        pays = (cost_s - either_way_s) * (1 + margin) < recompute_cost_s - either_way_s
        if pays and cost_s < best_cost_s:
            best, best_cost_s = option, cost_s
    if best is not None:
        reason = LoadReason.LOAD_IS_QUICKER
    elif not alternatives:
        reason = LoadReason.NO_HIT
    else:
        reason = LoadReason.RECOMPUTE_IS_QUICKER if healthy else LoadReason.TIER_SICK
    return LoadDecision(best, reason, alone_s, recompute_cost_s, tuple(alternatives))


def load_deadline_s(compute_s: float, gpu: GpuQueue) -> float:
    """From the decision until a load that has not ended is given up and the request recomputes, which takes
    `compute_s` beside what others have in its steps."""
    return DEADLINE_FACTOR * (compute_s * (1 + gpu.waiting_count) + gpu.backlog_s + gpu.step_s)


# -- stores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StorePrice:
    """What a tier asks. `write_price`: seconds of saving that a second of its writing must earn.

    `displaced_s_per_byte`: value of the chunk that would be evicted, 0 while the tier has room.
    """

    link: TransferModel  # of reading back
    write_bytes_per_s: float
    write_price: float
    displaced_s_per_byte: float = 0.0


class StoreReason(enum.StrEnum):
    WORTH_IT = "WORTH_IT"
    PRESENT = "PRESENT"
    NOT_WORTH_IT = "ADMISSION"


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """The first `chunk_count` chunks of the chain are to be in the tier, those that already are included."""

    chunk_count: int
    value_s: float
    reason: StoreReason


def chunk_saving_s(model: RecomputeModel, chunk_tokens: int) -> tuple[float, float]:
    """Seconds to recompute a prompt's first chunk, its share of the steps included, and how much more each further one
    takes than the one before it."""
    steps_s = 0.0 if model.step_tokens is None else model.step_s * chunk_tokens / model.step_tokens
    squared_s = model.token_squared_s * chunk_tokens**2
    return model.scale * (steps_s + model.token_s * chunk_tokens + squared_s), model.scale * 2 * squared_s


def decide_store(
    model: RecomputeModel,
    price: StorePrice,
    chunk_tokens: int,
    chunk_bytes: int,
    reuse_probabilities: NDArray[np.float64],
    present: NDArray[np.bool_],
) -> StoreDecision:
    """The best prefix of the chain: both arrays hold one value for each of its chunks, head first.

    Chunks judged one by one would be let in below parents that are not, where nothing can find them; so a chunk that
    does not pay is taken with those below it if together they do, and never a chunk without all that are above it.
    """
    count = len(reuse_probabilities)
    assert len(present) == count, f"{count} probabilities for {len(present)} chunks"
    first_missing = int(np.argmin(present)) if count else 0
    if not count or present[first_missing]:
        return StoreDecision(count, 0.0, StoreReason.PRESENT)
    first_s, further_s = chunk_saving_s(model, chunk_tokens)
    cost_s = chunk_bytes * (price.write_price / price.write_bytes_per_s + price.displaced_s_per_byte)
    # Each chunk's value, in place: the scheduler waits for this, and arrays of a long prompt's chunks are slow to make.
    value_s = np.arange(count, dtype=np.float64)
    value_s *= further_s
    value_s += first_s - chunk_bytes / price.link.bytes_per_s
    np.maximum(value_s, 0.0, out=value_s)
    value_s *= reuse_probabilities
    value_s -= cost_s
    np.copyto(value_s, 0.0, where=present)
    totals_s = np.cumsum(value_s)
    if not math.isfinite(totals_s[-1]):  # one value was not: it ends the prefix
        totals_s = np.cumsum(np.where(np.isfinite(value_s), value_s, -math.inf))
    best = int(np.argmax(totals_s))
    # Loads of this chain pay their overhead once, as often as its first new chunk is used.
    total_s = float(totals_s[best]) - float(reuse_probabilities[first_missing]) * price.link.overhead_s
    if not (math.isfinite(total_s) and total_s > 0):
        return StoreDecision(first_missing, 0.0, StoreReason.NOT_WORTH_IT)
    return StoreDecision(best + 1, total_s, StoreReason.WORTH_IT)


def reuse_probability(hits: float, trials: float, prior: float) -> float:
    """Of a class of chunks: what was seen, and a prior worth eight trials. Between 0 and 1 whatever was seen."""
    if not (math.isfinite(hits) and math.isfinite(trials)) or hits < 0 or trials <= 0:
        return prior
    return (min(hits, trials) + REUSE_PRIOR_TRIALS * prior) / (trials + REUSE_PRIOR_TRIALS)


def next_write_price(
    price: float,
    observed_bytes_per_s: float,
    target_bytes_per_s: float,
    *,
    price_min: float,
    price_max: float = 1000.0,
    gain: float = 0.1,
) -> float:
    """The price after one interval: up when more was written than aimed for, down when less.

    Without a usable observation or aim it stays. For DRAM `price_min` is the engine's measured slowdown for each
    second of copying (until then DRAM_WRITE_PRICE_MIN), else stores of prompts that never repeat would not end.
    """
    assert 0 < price_min <= price_max, f"write price between {price_min} and {price_max}"
    if not math.isfinite(price):
        price = price_min
    usable = math.isfinite(observed_bytes_per_s) and observed_bytes_per_s >= 0 and target_bytes_per_s > 0
    if usable and math.isfinite(target_bytes_per_s):
        # One interval moves the price by a factor of e at the most, however wild it was.
        price *= math.exp(min(1.0, gain * (observed_bytes_per_s / target_bytes_per_s - 1)))
    return min(max(price, price_min), price_max)


def write_target_bytes_per_s(drive_writes_per_day: float, drive_bytes: float) -> float:
    return drive_writes_per_day * drive_bytes / 86_400


def drive_writes_per_day(write_bytes_per_s: float, drive_bytes: float) -> float:
    return write_bytes_per_s * 86_400 / drive_bytes
