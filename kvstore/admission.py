"""Whether a request loads what the store has of it, and how much of it is stored: decisions, and what they learn from.

The equations are `kvstore.costmodel`'s, the estimates `kvstore.calibration`'s; here they meet one engine. A decision is
made once per request and length of its hit (load), or once per request (store), and says why. What came of it is told
afterwards: `load_ended`, `prefilled`. Clock and randomness are arguments; no vLLM import, no I/O, nothing waits.

One thread, the engine's scheduler, calls everything. Times of copies come from the workers with vLLM's own messages,
times of reads from disk from the daemon with its answers. Nothing here outlives the engine but `documents`, which the
daemon keeps.

Until recomputing has been measured on this engine (or is known from a profile of its model and GPU) every hit is
loaded, and until a number of requests were seen their chunks are all stored, as any store without a model does; so a
short trial shows hits, not caution.
"""

import enum
import itertools
import json
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore import costmodel
from kvstore.calibration import Choice, Estimate, Observed, RecomputeCalibration, TransferCalibration, joint_margin
from kvstore.costmodel import (
    DRAM_WRITE_PRICE_MIN,
    GpuQueue,
    LoadOption,
    RecomputeModel,
    StepWait,
    StorePrice,
    StoreReason,
    TransferModel,
    recompute_s,
    store_and_forward,
    transfer_s,
)
from kvstore.decisions import Decision, Room
from kvstore.observations import EngineQueue, LinkQueue
from kvstore.reuse import Reuse

logger = logging.getLogger("vllm.kvstore.admission")  # an engine decides, and its log is where it is looked for

CPU, FS = "cpu", "fs"
KNOWN_OBSERVATIONS = 4  # of steps or reads, before a guess of them is used to decline
MEASURE_EVERY = 8  # of the hits loaded while recomputing is unknown one is recomputed, to know it
PROBE_AFTER_DECLINES = 3  # a read from disk that nobody waits for costs no request anything
PROBE_CHUNKS = 16
PROBE_S_MAX = 60.0  # after which another one may begin though the last has not ended
STORED_UNASKED = 32  # requests whose chunks are stored before it is known how often prompts come back
EXPLORE_CHUNKS = 4
LAG_S_MIN = 1e-4
LAG_PRIOR_S = 5e-3  # of a load, beside its copy, on an engine that has nothing else to do
LOADS_AVERAGED = 8  # of the steps that each waited for,
LOAD_STEPS_MAX = 16.0  # which are not more
CHUNK_HANDLING_S = 5e-5  # of the scheduler's thread, for each chunk stored: lookup, grant, job, commit
DISK_WRITE_PRICE = 0.05  # seconds to be saved for each second of writing: what that wears off a drive, in GPU time
DISPLACED_SHARE = 0.5  # of a new chunk's expected value that the one to be evicted is taken to have
DEADLINE_S_MIN = 0.05
WINDOW = 64  # loads from a tier over which it must have given more than it took
OPEN_MAX = 4_096  # decisions whose outcome is awaited


class Mode(enum.StrEnum):
    MODEL = "model"
    ALWAYS = "always"
    NEVER = "never"


class Reason(enum.StrEnum):
    """Beside those of the cost model."""

    LEARNING = "LEARNING"  # recomputing, or this tier, is not known well enough yet to decline anything
    MEASURING = "MEASURING"  # recomputed once in a while until recomputing is known
    EXPLORING = "EXPLORING"  # against the estimate, to keep it honest
    LEFT_OUT = "LEFT_OUT"  # the request left out the tier that has it
    ALWAYS = "ALWAYS"  # the user's setting
    NEVER = "NEVER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """What is believed before anything was measured. Transfers: of whole chunks, all ranks together.

    `recompute_known`: from a fit of this model on this GPU, so good enough to decline on.
    """

    recompute: RecomputeModel
    load: TransferModel
    store: TransferModel
    disk: TransferModel
    recompute_known: bool = False
    write_price: float = DRAM_WRITE_PRICE_MIN
    disk_write_bytes_per_s: float = 2e9  # of one NVMe drive
    load_steps: float = 2.0  # of the engine, that a load waits for: one carries it, one reports its end
    source: str = ""


class Hit(NamedTuple):
    """What of one request's prompt the store has, in tokens from its start, and what moving it takes, in chunks.

    Chunks already being loaded for another request, or read from disk for one, are not counted: they cost nothing
    more. `end_tokens` is at least `cpu_end_tokens`, and larger where a part is on disk.
    """

    prompt_tokens: int
    gpu_tokens: int
    cpu_end_tokens: int
    end_tokens: int
    cpu_chunks: int  # to be copied for the part in memory
    chunks: int  # to be copied for all of it
    disk_chunks: int  # to be read first
    chunk_bytes: int
    disk_healthy: bool = True
    left_out: bool = False  # more is there, in a tier that the request is not to be loaded from
    missing: bytes = b""  # key of the first chunk that is not there, if one is not


@dataclass(slots=True, eq=False)
class LoadVerdict:
    """`end_tokens`: load up to there; `hit.gpu_tokens` or less: nothing."""

    hit: Hit
    decision: Decision
    tier: str  # the slowest that takes part; "": none
    end_tokens: int
    wait_s: float  # for what has to come from disk, at the most
    began_s: float
    deadline_s: float  # after it began: a load that has not been handed to the workers by then is decided about anew
    gpu: GpuQueue  # then
    passing_count: float  # of others that the engine was expected to compute while it waits
    probe: bool = False  # have the disk read some of what was declined, for nobody
    copying_since_s: float | None = None
    predicted_copy_s: float = 0.0
    steps_begun: int = 0  # of the engine, when it was handed over
    alone: bool = True  # no other copy was under way then
    chunks: int = 0

    @property
    def loads(self) -> bool:
        return self.tier != ""


@dataclass(frozen=True, slots=True)
class StoreVerdict:
    """The chunks of a request that may be stored: those before `end_chunk` (None: all, generated ones included); and
    before which of them the disk may have them, too."""

    end_chunk: int | None
    reason: str
    disk_end_chunk: int | None = None
    disk_reason: str = ""  # "": nothing was decided about the disk
    number: int = 0  # of the decision that was told; 0: none was

    @property
    def is_worth_disk(self) -> bool:
        """What is in memory already and not on disk should be written there, too."""
        return self.disk_reason == StoreReason.WORTH_IT


@dataclass(frozen=True, slots=True)
class _Facts:
    """The estimates as of the last observation."""

    recompute: RecomputeModel
    copy: TransferModel
    store: TransferModel
    disk: TransferModel
    lag_s: float
    cpu_margin: float
    fs_margin: float


@dataclass(slots=True)
class _Ledger:
    """Of one tier: seconds that loads from it saved, and that loads and stores took, for the last loads."""

    entries: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    stored_s: float = 0.0  # not in an entry yet
    warned: bool = False

    def loaded(self, saved_s: float, spent_s: float) -> bool:
        """Whether the tier has begun to cost more than it gives."""
        self.entries.append((saved_s, spent_s + self.stored_s))
        self.stored_s = 0.0
        if len(self.entries) < WINDOW:
            return False
        saved, spent = (sum(entry[i] for entry in self.entries) for i in (0, 1))
        begins = spent > saved and not self.warned
        if begins or spent < saved / 2:  # around the border it is said once
            self.warned = begins
        return begins


class Admission:
    """See the module's docstring. `tell` is given each decision, and again what came of it; `kind` is that of the
    chunks decided by; `learning` names what speeds depend on; `first_number` is that of the first decision."""

    def __init__(
        self,
        mode: Mode,
        priors: Priors,
        *,
        tokens_per_chunk: int,
        kind: int = 0,
        learning: str = "",
        tell: Callable[[Decision], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
        first_number: int = 1,
    ) -> None:
        self.mode = mode
        self._priors = priors
        self._tokens_per_chunk = tokens_per_chunk
        self._kind = kind
        self.learning = learning
        self.tell = tell
        self._clock = clock
        self._uniform = uniform
        self._recompute = RecomputeCalibration(priors.recompute)
        self._transfers = {
            "load": TransferCalibration(priors.load),
            "store": TransferCalibration(priors.store),
            "disk": TransferCalibration(priors.disk),
        }
        self._lag = Estimate([LAG_PRIOR_S], length_index=0)
        self._load_steps = priors.load_steps
        self._known = priors.recompute_known
        self._unknown_loads = 0
        self._choices = {CPU: Choice(), FS: Choice()}
        self._links = {CPU: LinkQueue(clock), FS: LinkQueue(clock)}
        self._reuse = Reuse()
        self._ledgers = {CPU: _Ledger(), FS: _Ledger()}
        self._probe_until_s = -math.inf
        self._requests_stored = 0
        self._numbers = itertools.count(first_number)
        self._stores_lately = mode is not Mode.NEVER
        self._documented: dict[str, int] = {}  # observations of each estimate when its document was made last
        self._open: dict[str, LoadVerdict] = {}  # request -> its last load decision
        self._refresh()
        self.queue = EngineQueue(self._recompute, clock, on_prefilled=self._prefilled)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def recompute_model(self) -> RecomputeModel:
        return self._facts.recompute

    def _refresh(self) -> None:
        """After each observation, so that a decision only reads."""
        recompute, load, disk = self._recompute, self._transfers["load"], self._transfers["disk"]
        self._facts = _Facts(
            recompute.model(),
            load.model(),
            self._transfers["store"].model(),
            disk.model(),
            self._lag.coefficients[0],
            joint_margin(recompute.estimate, load.estimate),
            joint_margin(recompute.estimate, load.estimate, disk.estimate),
        )

    def step_ended(self) -> None:
        """The output of the oldest step under way has been taken in."""
        if self.queue.step_ended():
            self._refresh()

    @property
    def known(self) -> bool:
        """Whether recomputing is known well enough to decline a load or a store."""
        # Steps seen, not observations of the estimate: that starts anew when a guess turns out far off.
        observed = self._recompute.estimate.observation_count > 0
        self._known = self._known or (observed and self.queue.prefill_steps >= KNOWN_OBSERVATIONS)
        return self._known

    def copied(self, *, store: bool, chunks: int, chunk_bytes: int, seconds: float) -> None:
        """The slowest rank's service time of one job."""
        name = "store" if store else "load"
        self._transfers[name].observe(chunks * chunk_bytes, seconds)
        self._refresh()
        if store and math.isfinite(seconds) and seconds > 0:
            self._ledgers[CPU].stored_s += seconds * self._priors.write_price

    def read(self, *, chunks: int, chunk_bytes: int, seconds: float) -> None:
        """The daemon's time for chunks that it read from disk at once."""
        disk, nbytes = self._transfers["disk"], chunks * chunk_bytes
        predicted_s = transfer_s(disk.model(), nbytes)
        self._probe_until_s = -math.inf
        if disk.observe(nbytes, seconds) is not Observed.REJECTED:
            self._choices[FS].observed(seconds, predicted_s)
            self._refresh()

    def read_waited(self, *, chunks: int, chunk_bytes: int, seconds: float) -> None:
        """Chunks had not come from disk after so long: they take at least that."""
        disk, nbytes = self._transfers["disk"], chunks * chunk_bytes
        if transfer_s(disk.model(), nbytes) < seconds:
            disk.observe(nbytes, seconds)
            self._refresh()

    # -- loads --------------------------------------------------------------------------------------------------------

    def load(self, request: str, hit: Hit, wait_s_max: float) -> LoadVerdict:
        """Decide. `wait_s_max`: the longest that a request may wait for the disk, whatever pays."""
        model, now_s = self._facts.recompute, self._clock()
        gpu = self.queue.seen_by(request, model)
        waiting, wait = int(gpu.waiting_count), self.queue.step_wait(request, self._load_steps)
        if wait.passing_count > waiting:
            gpu = gpu._replace(waiting_count=wait.passing_count)
        options = self._options(request, hit, wait)
        decided = costmodel.decide_load(model, hit.prompt_tokens, hit.gpu_tokens, options, gpu)
        option, reason = self._chosen(hit, options, decided)
        tier, end_tokens = ("", hit.gpu_tokens) if option is None else (option.tier, option.end_token)
        deadline_s = math.inf
        if self.mode is Mode.MODEL and self.known:
            deadline_s = max(DEADLINE_S_MIN, costmodel.load_deadline_s(decided.recompute_s, gpu))
        wait_s = min(wait_s_max, deadline_s) if tier == FS else wait_s_max
        decision = Decision(
            next(self._numbers),
            request,
            False,
            reason,
            hit.prompt_tokens,
            hit.gpu_tokens,
            hit.cpu_end_tokens,
            hit.end_tokens,
            waiting,
            decided.recompute_s + gpu.step_s,
            decided.recompute_cost_s,
            decided.alternatives,
            tier,
            end_tokens,
            (hit.missing,) if hit.missing else (),
            kind=self._kind,
        )
        verdict = LoadVerdict(hit, decision, tier, end_tokens, wait_s, now_s, deadline_s, gpu, wait.passing_count)
        if hit.disk_chunks and tier != FS and self.mode is Mode.MODEL and hit.disk_healthy:
            verdict.probe = self._choices[FS].explores(
                random=self._uniform(),
                tier_is_idle=self._links[FS].under_way == 0 and now_s >= self._probe_until_s,
                predicted_regret_s=0.0,
                regret_s_max=0.0,
                after=PROBE_AFTER_DECLINES,
            )
            if verdict.probe:
                self._probe_until_s = now_s + PROBE_S_MAX
        if len(self._open) >= OPEN_MAX:
            self._open.pop(next(iter(self._open)))
        self._open[request] = verdict
        self.tell(decision)
        return verdict

    def _options(self, request: str, hit: Hit, wait: StepWait) -> list[LoadOption]:
        """The part in memory, and all of it where some is on disk. `wait`: of a load from memory."""
        facts, cpu, fs = self._facts, self._links[CPU], self._links[FS]
        options = []
        if hit.cpu_end_tokens > hit.gpu_tokens:
            copy_s = _moved_s(facts.copy, hit.cpu_chunks * hit.chunk_bytes, facts.lag_s)
            margin = self._choices[CPU].margin(facts.cpu_margin)
            options.append(LoadOption(CPU, hit.cpu_end_tokens, copy_s, cpu.backlog_s, cpu.under_way, margin, wait=wait))
        if hit.end_tokens > hit.cpu_end_tokens:
            read_s = transfer_s(facts.disk, hit.disk_chunks * hit.chunk_bytes)
            copy_s = _moved_s(facts.copy, hit.chunks * hit.chunk_bytes, facts.lag_s)
            margin = self._choices[FS].margin(facts.fs_margin)
            load_s, backlog_s = read_s + copy_s, fs.backlog_s + cpu.backlog_s
            wait = self.queue.step_wait(request, self._load_steps + 1)  # one more finds that it has been read
            options.append(
                LoadOption(FS, hit.end_tokens, load_s, backlog_s, fs.under_way, margin, hit.disk_healthy, wait)
            )
        return options

    def _chosen(
        self, hit: Hit, options: Sequence[LoadOption], decided: costmodel.LoadDecision
    ) -> tuple[LoadOption | None, str]:
        usable = [option for option in options if option.healthy]
        if self.mode is Mode.NEVER or not usable:
            if self.mode is not Mode.NEVER and not options and hit.left_out:
                return None, Reason.LEFT_OUT
            return None, Reason.NEVER if self.mode is Mode.NEVER else decided.reason
        longest = max(usable, key=lambda option: option.end_token)
        if self.mode is Mode.ALWAYS:
            return longest, Reason.ALWAYS
        if not self.known:
            self._unknown_loads += 1
            if self._unknown_loads % MEASURE_EVERY == 0:
                return None, Reason.MEASURING
            return longest, Reason.LEARNING
        option, reason = decided.option, str(decided.reason)
        for other in usable:
            if option is not None and option.end_token >= other.end_token:
                self._choices[other.tier].decided(loading=True)
                continue
            if self._unmeasured(other.tier):
                option, reason = other, Reason.LEARNING
                continue
            # A disk is looked at again by a read that nobody waits for; a copy needs a request, but not all of its hit.
            if other.tier == CPU and (short := self._explored(hit, other)) is not None:
                option, reason = short, Reason.EXPLORING
                self._choices[CPU].observed()
                continue
            self._choices[other.tier].decided(loading=False)
        return option, reason

    def _explored(self, hit: Hit, option: LoadOption) -> LoadOption | None:
        """A few chunks of the part in memory that was declined, to see how long their copy takes; None: not now."""
        chunks = min(EXPLORE_CHUNKS, hit.cpu_chunks)
        end = (hit.gpu_tokens // self._tokens_per_chunk + chunks) * self._tokens_per_chunk
        copy_s = transfer_s(self._facts.copy, chunks * hit.chunk_bytes)
        if not self._choices[CPU].explores(
            random=self._uniform(),
            tier_is_idle=self._links[CPU].under_way == 0,
            predicted_regret_s=copy_s + option.wait.seconds,
            regret_s_max=recompute_s(self.recompute_model, hit.gpu_tokens, hit.prompt_tokens),
        ):
            return None
        return option._replace(end_token=min(end, option.end_token), transfer_s=copy_s)

    def _unmeasured(self, tier: str) -> bool:
        calibration = self._transfers["load" if tier == CPU else "disk"]
        return calibration.estimate.observation_count < 1

    def is_overdue(self, verdict: LoadVerdict) -> bool:
        """Its copy has not begun in time, for the engine has no blocks for it: much may have changed meanwhile. What
        comes from disk has a deadline of its own, `wait_s`."""
        return verdict.tier == CPU and self._clock() - verdict.began_s > verdict.deadline_s

    def promoting(self, chunks: int, chunk_bytes: int) -> None:
        """A request waits for chunks to be read from disk."""
        self._links[FS].began(transfer_s(self._facts.disk, chunks * chunk_bytes))

    def promoted(self) -> None:
        """It waits no more."""
        self._links[FS].ended()

    def load_began(self, verdict: LoadVerdict, chunks: int) -> None:
        """The copy is on its way to the workers."""
        verdict.copying_since_s = self._clock()
        verdict.steps_begun = self.queue.steps_begun
        verdict.chunks = chunks
        copy_s = transfer_s(self._facts.copy, chunks * verdict.hit.chunk_bytes)
        verdict.predicted_copy_s = copy_s
        verdict.alone = self._links[CPU].under_way == 0
        self._links[CPU].began(copy_s)
        self.queue.loads(verdict.decision.request)

    def load_ended(self, verdict: LoadVerdict, *, service_s: float, loaded_chunks: int) -> None:
        """Every rank has reported. `service_s`: the slowest rank's copy, NaN where none says."""
        self._links[CPU].ended()
        self.queue.loaded(verdict.decision.request)
        assert verdict.copying_since_s is not None, "the end of a load that never began"
        now_s = self._clock()
        seconds = now_s - verdict.copying_since_s
        if verdict.alone and self._links[CPU].under_way == 0:  # else it waited for other copies, too
            self._observe_wait(seconds, seconds - service_s, self.queue.steps_begun - verdict.steps_begun)
        self._choices[CPU].observed(service_s, verdict.predicted_copy_s)
        decision = verdict.decision
        decision.load_s = _elapsed_s(verdict.began_s, now_s)
        decision.outcome = (
            "loaded" if loaded_chunks == verdict.chunks else f"{loaded_chunks} of {verdict.chunks} loaded"
        )
        first = verdict.hit.gpu_tokens
        end = min(verdict.end_tokens, first + loaded_chunks * self._tokens_per_chunk)
        decision.wait_s = max(0.0, _elapsed_s(verdict.copying_since_s, now_s) - service_s) if service_s >= 0 else 0.0
        decision.saved_s = costmodel.saved_s(
            self.recompute_model, first, end, verdict.hit.prompt_tokens, verdict.gpu, verdict.passing_count
        )
        # What was loaded to see how long that takes was expected to cost more than it gives.
        ledger, asked_for = self._ledgers[verdict.tier or CPU], decision.reason != Reason.EXPLORING
        if asked_for and ledger.loaded(decision.saved_s, decision.load_s):
            logger.warning(
                "kvstore: the last %d loads from the %s tier took longer than recomputing would have; "
                "`kvstore explain` shows them, and kv_load_tiers leaves a tier out for a request",
                WINDOW, verdict.tier,
            )  # fmt: skip
        self.tell(decision)

    def _observe_wait(self, seconds: float, wait_s: float, steps: int) -> None:
        """Of a load that was so long with the workers, `wait_s` of it not copied, while so many steps began."""
        if steps == 0:
            self._lag.observe([1.0], max(wait_s, LAG_S_MIN) if wait_s > -LAG_S_MIN else wait_s)
            self._refresh()
        elif 0 <= wait_s <= seconds < math.inf and seconds > 0:
            waited_steps = min(steps * wait_s / seconds, LOAD_STEPS_MAX)
            self._load_steps += (waited_steps - self._load_steps) / LOADS_AVERAGED

    @property
    def stores_lately(self) -> bool:
        """Whether slots should be asked for before a request's chunks are decided about."""
        return self._stores_lately

    def gave_up(self, verdict: LoadVerdict, what: str) -> None:
        """The request recomputes what it was to load."""
        verdict.decision.outcome = what
        self.tell(verdict.decision)

    def finished(self, request: str) -> None:
        self.queue.ended(request)
        self._open.pop(request, None)

    def _prefilled(self, request: str) -> None:
        verdict = self._open.pop(request, None)
        if verdict is None:
            return
        decision = verdict.decision
        decision.first_token_s = _elapsed_s(verdict.began_s, self._clock())
        decision.outcome = decision.outcome or "recomputed"
        self.tell(decision)

    # -- stores -------------------------------------------------------------------------------------------------------

    def store(
        self,
        request: str,
        chain: Sequence[bytes],
        present: NDArray[np.bool_],
        *,
        chunk_bytes: int,
        tier_full: bool,
        disk: Room = Room.NOT_ASKED,
        on_disk: NDArray[np.bool_] | None = None,
    ) -> StoreVerdict:
        """Decide for a request's whole prompt, at its first offer. `present`: which chunks of the chain are in memory;
        `on_disk`: which are known to be on disk (None: none are)."""
        if self.mode is not Mode.MODEL:
            never = self.mode is Mode.NEVER
            return StoreVerdict(0 if never else None, Reason.NEVER if never else Reason.ALWAYS)
        uses = self.count_uses(chain)
        self._requests_stored += 1
        if not self.known or self._requests_stored <= STORED_UNASKED:
            verdict = StoreVerdict(None, Reason.LEARNING)
        else:
            verdict = self.decide_store(uses, present, chunk_bytes, tier_full=tier_full, disk=disk, on_disk=on_disk)
        end, disk_end = (len(chain) if each is None else each for each in (verdict.end_chunk, verdict.disk_end_chunk))
        self._stores_lately = verdict.end_chunk is None or not bool(present[:end].all())
        number = next(self._numbers)
        self.tell(
            Decision(
                number=number,
                request=request,
                is_store=True,
                reason=verdict.reason,
                prompt_tokens=len(chain) * self._tokens_per_chunk,
                hit_tokens=int(np.count_nonzero(present)) * self._tokens_per_chunk,
                tier=CPU if end else "",
                end_tokens=end * self._tokens_per_chunk,
                chunks=end - int(np.count_nonzero(present[:end])),
                refused=chain[end:],
                disk_reason=verdict.disk_reason,
                disk_end_tokens=min(end, disk_end) * self._tokens_per_chunk,
                disk_refused_count=max(0, end - disk_end),
                kind=self._kind,
            )
        )
        return replace(verdict, number=number)

    def refused(self, request: str, chain: Sequence[bytes], end: int, reason: str) -> None:
        """Of what was to be stored of a request's prompt the daemon took nothing from chunk `end` on."""
        tokens = self._tokens_per_chunk
        self.tell(
            Decision(
                number=next(self._numbers),
                request=request,
                is_store=True,
                reason=reason,
                prompt_tokens=len(chain) * tokens,
                end_tokens=end * tokens,
                refused=chain[end:],
                kind=self._kind,
            )
        )

    def offered(self, generated: Sequence[bytes]) -> None:
        """Chunks of what a request generated: their next use is the next turn's."""
        if generated and self.mode is Mode.MODEL:
            self._reuse.use(generated)

    def count_uses(self, chain: Sequence[bytes]) -> NDArray[np.intp]:
        """How often each key was used, this time included. Once for each request."""
        return self._reuse.use(chain)

    def decide_store(
        self,
        uses: NDArray[np.intp],
        present: NDArray[np.bool_],
        chunk_bytes: int,
        *,
        tier_full: bool,
        disk: Room = Room.NOT_ASKED,
        on_disk: NDArray[np.bool_] | None = None,
    ) -> StoreVerdict:
        # One place more than the prompt has: whether the answer's chunks, used for the first time, pay as well.
        probabilities = self._reuse.probabilities(np.append(uses, 1))
        facts, once = self._facts, float(probabilities[-1])
        # What is evicted was most likely used once, as long ago as the tier is large.
        first_s, further_s = costmodel.chunk_saving_s(facts.recompute, self._tokens_per_chunk)
        displaced_s = DISPLACED_SHARE * once * (first_s + further_s * (len(probabilities) // 2))
        price = StorePrice(
            facts.copy,
            facts.store.bytes_per_s,
            self._priors.write_price,
            (CHUNK_HANDLING_S + displaced_s * tier_full) / chunk_bytes,
        )
        end, reason = self._best_prefix(price, chunk_bytes, probabilities, present)
        if disk is Room.NOT_ASKED or end == 0:
            return StoreVerdict(end, reason)
        price = StorePrice(
            store_and_forward(facts.disk, facts.copy),
            self._priors.disk_write_bytes_per_s,
            DISK_WRITE_PRICE,
            displaced_s * (disk is Room.FULL) / chunk_bytes,
        )
        there = np.zeros(len(uses), np.bool_) if on_disk is None else on_disk
        disk_end, disk_reason = self._best_prefix(price, chunk_bytes, probabilities, there)
        return StoreVerdict(end, reason, disk_end, disk_reason)

    def _best_prefix(
        self, price: StorePrice, chunk_bytes: int, probabilities: NDArray[np.float64], present: NDArray[np.bool_]
    ) -> tuple[int | None, str]:
        decided = costmodel.decide_store(
            self.recompute_model,
            price,
            self._tokens_per_chunk,
            chunk_bytes,
            probabilities,
            np.append(present, False),
        )
        if decided.chunk_count > len(present):
            return None, str(decided.reason)
        if decided.chunk_count == len(present) and bool(present.all()):
            return decided.chunk_count, str(StoreReason.PRESENT)
        return decided.chunk_count, str(decided.reason)

    # -- what outlives the engine -------------------------------------------------------------------------------------

    def documents(self) -> dict[str, str]:
        """What was learned since the last call, by its name, as JSON."""
        documents = {}
        for name, estimate in self._estimates().items():
            if estimate.observation_count != self._documented.get(name, 0):
                self._documented[name] = estimate.observation_count
                documents[name] = json.dumps(estimate.document())
        return documents

    def restore(self, documents: Mapping[str, str]) -> None:
        """Go on from what another engine learned, where this one has not seen more itself. What makes no sense is
        left out."""
        estimates = self._estimates()
        for name, text in documents.items():
            if name in estimates and estimates[name].observation_count < KNOWN_OBSERVATIONS:
                try:
                    document = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(document, dict) and estimates[name].restore(document):
                    self._documented[name] = estimates[name].observation_count
                    self._known = self._known or (name == "recompute" and estimates[name].observation_count > 1)
        self._refresh()

    def _estimates(self) -> dict[str, Estimate]:
        transfers = {name: calibration.estimate for name, calibration in self._transfers.items()}
        return {"recompute": self._recompute.estimate, "lag": self._lag, **transfers}


def _elapsed_s(since_s: float, now_s: float) -> float:
    """0: not known, for the clock has jumped."""
    return now_s - since_s if 0 <= now_s - since_s < math.inf else 0.0


def _moved_s(link: TransferModel, nbytes: int, lag_s: float) -> float:
    """Nothing to copy costs nothing: it is on its way for somebody else."""
    return transfer_s(link, nbytes) + lag_s if nbytes > 0 else 0.0


def leading(codes: bytes, *others: int) -> int:
    """How many codes there are before the first one of the others."""
    found = [place for code in others if (place := codes.find(code)) >= 0]
    return min(found, default=len(codes))
