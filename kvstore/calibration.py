"""What engine steps and transfers really take, learned while running, and how far to trust it.

One owner per estimate, no lock, no thread, no clock and no randomness of its own: times and random numbers are
arguments, so a whole run can be replayed. State is a small document that outlives the engine (the daemon keeps it, per
model, dtype, tensor parallel size and tier); a document that makes no sense is the same as none.

An observation is a linear combination: seconds = sum of coefficient x feature. The estimate is recursive least squares
on *relative* errors (a 2 ms step and a 2 s step speak equally), with forgetting, coefficients of zero or more, and the
prior as what holds where nothing was seen. Until enough steps of different length were seen, only the scale of the
prior is learned, for its shape is better than what a few equal steps would make of it. Single wild observations are
clipped; many in one direction are a change (of model, clock, disk) and start the estimate anew.
"""

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvstore.costmodel import RecomputeModel, TransferModel

FORGETTING = 0.995
HUBER_MADS = 3.0
SHAPE_STEPS_MIN = 50  # observations before more than the prior's scale is learned,
SHAPE_SPAN_MIN = 4.0  # and the ratio of the longest to the shortest of them
PREFILL_TOKENS_MIN = 256  # shorter steps say little about prefill
MARGIN_MIN, MARGIN_PRIOR, MARGIN_MAX = 0.05, 0.25, 0.5
HYSTERESIS = 0.05
EXPLORATION_PROBABILITY = 0.01
EXPLORATION_REGRET_S_MAX = 5e-3
EXPLORE_AFTER_DECLINES = 10  # a tier that is declined for ever would never be found to have recovered
SURPRISE = 0.67  # of the predicted time: a tier that took less may have recovered
OBSERVATION_S_MIN, OBSERVATION_S_MAX = 1e-6, 3600.0  # anything else is no step and no transfer

DECLINES_SURPRISED = 1_000  # as good as having been declined so often

_RESIDUALS = 64  # relative errors kept for their spread
_RESIDUALS_MIN = 16  # before clipping begins
_PRIOR_WEIGHT = 2.0  # the prior's scale counts as that many observations,
_SHAPE_WEIGHT = 1e-3  # and each of its coefficients as that share of all of them
_CUSUM_DRIFT = 0.15  # of ln(observed / predicted): what is tolerated for ever
_CUSUM_STEP_MAX = 1.0  # one observation counts no more,
_CUSUM_LIMIT = 2.6  # so a change takes four at the least
_DOCUMENT_VERSION = 1


class Observed(enum.Enum):
    LEARNED = enum.auto()
    REJECTED = enum.auto()  # not a time, or nothing that takes any
    CHANGED = enum.auto()  # learned, and what was known before was dropped


class Estimate:
    """Seconds as a linear function of a few features, learned from observations.

    `prior`: one coefficient above zero for each feature, in seconds per unit of it. `length_index`: the feature
    whose spread decides when the shape may be learned.
    """

    def __init__(self, prior: Sequence[float], *, length_index: int, scale_prior: float = 1.0) -> None:
        assert all(0 < value < math.inf for value in prior), f"prior coefficients {prior}: each must be above 0"
        assert 0 <= length_index < len(prior), f"feature {length_index} of {len(prior)}"
        assert 0 < scale_prior < math.inf, f"a scale of {scale_prior}"
        self._prior = np.array(prior, np.float64)
        self._length_index = length_index
        self._scale_prior = scale_prior
        self._start()

    def _start(self) -> None:
        count = len(self._prior)
        self._log_scale_sum = _PRIOR_WEIGHT * math.log(self._scale_prior)
        self._log_scale_weight = _PRIOR_WEIGHT
        self._shape: NDArray[np.float64] | None = None
        self._information = np.zeros((count, count))  # of observations divided by what the prior says of them
        self._moment = np.zeros(count)
        self._count = 0
        self._length_min, self._length_max = math.inf, 0.0
        self._residuals: deque[float] = deque(maxlen=_RESIDUALS)
        self._middle = 0.0  # of the relative errors,
        self._spread = 0.0  # and how far they are from it, as a standard deviation that outliers do not move
        self._above = self._below = 0.0

    @property
    def scale(self) -> float:
        """Of the whole prior, as far as it was learned."""
        return math.exp(self._log_scale_sum / self._log_scale_weight)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature: of zero or more, finite, and not all zero."""
        values = self._prior * self.scale if self._shape is None else self._shape
        return tuple(values.tolist())

    @property
    def observation_count(self) -> int:
        """Since the start or the last change."""
        return self._count

    @property
    def shape_is_learned(self) -> bool:
        return self._shape is not None

    @property
    def margin(self) -> float:
        """By how much, relatively, a decision should prefer the other side: the spread of the errors, bounded."""
        return _bounded_margin(self._spread) if len(self._residuals) >= _RESIDUALS_MIN else MARGIN_PRIOR

    def predict_s(self, features: Sequence[float]) -> float:
        total_s = sum(coefficient * feature for coefficient, feature in zip(self.coefficients, features, strict=True))
        return total_s if total_s > 0 else 0.0

    def observe(self, features: Sequence[float], seconds: float) -> Observed:
        """Learn from one step or transfer. Nothing that is fed here can make an estimate negative or not finite."""
        assert len(features) == len(self._prior), f"{len(features)} features for {len(self._prior)} coefficients"
        if not (OBSERVATION_S_MIN <= seconds <= OBSERVATION_S_MAX) or not all(
            0 <= feature < 1e18 for feature in features
        ):
            return Observed.REJECTED
        prior_s = float(self._prior @ np.array(features))
        if prior_s <= 0:
            return Observed.REJECTED
        predicted_s = max(self.predict_s(features), OBSERVATION_S_MIN)
        log_ratio = math.log(seconds / predicted_s)
        changed = self._has_changed(log_ratio)
        if changed:
            # The prior keeps its shape, and gets the scale of this observation to begin with.
            self._start()
            self._log_scale_sum = _PRIOR_WEIGHT * math.log(seconds / prior_s)
            predicted_s = seconds
        clipped_s = self._clip(seconds, predicted_s)
        self._learn(np.array(features, np.float64), clipped_s, prior_s)
        self._remember(seconds / predicted_s - 1)
        return Observed.CHANGED if changed else Observed.LEARNED

    def _has_changed(self, log_ratio: float) -> bool:
        step = max(-_CUSUM_STEP_MAX, min(_CUSUM_STEP_MAX, log_ratio))
        # A noisy tier is not a changing one: what its errors usually are is no sign of change.
        drift = max(_CUSUM_DRIFT, min(self._spread, _CUSUM_STEP_MAX / 2))
        self._above = max(0.0, self._above + step - drift)
        self._below = max(0.0, self._below - step - drift)
        return max(self._above, self._below) > _CUSUM_LIMIT

    def _remember(self, residual: float) -> None:
        self._residuals.append(residual)
        self._middle = median(self._residuals)
        self._spread = 1.4826 * median([abs(residual - self._middle) for residual in self._residuals])

    def _clip(self, seconds: float, predicted_s: float) -> float:
        if len(self._residuals) < _RESIDUALS_MIN:
            bound = 1.0  # a first guess may be wrong by a factor of two each time
        else:
            bound = max(HUBER_MADS * self._spread, 0.02) + abs(self._middle)
        low_s, high_s = predicted_s / (1 + bound), predicted_s * (1 + bound)
        return max(low_s, min(high_s, seconds))

    def _learn(self, features: NDArray[np.float64], seconds: float, prior_s: float) -> None:
        self._count += 1
        length = float(features[self._length_index])
        if length > 0:
            self._length_min = min(self._length_min, length)
            self._length_max = max(self._length_max, length)
        self._log_scale_sum = FORGETTING * self._log_scale_sum + math.log(seconds / prior_s)
        self._log_scale_weight = FORGETTING * self._log_scale_weight + 1
        # In units of the prior, so that coefficients of 1e-10 and 1e-2 are alike to the solver and errors are relative.
        row = features * self._prior / prior_s
        self._information = FORGETTING * self._information + np.outer(row, row)
        self._moment = FORGETTING * self._moment + row * (seconds / prior_s)
        if self._count >= SHAPE_STEPS_MIN and self._length_max >= SHAPE_SPAN_MIN * self._length_min:
            self._solve()

    def _solve(self) -> None:
        """Non-negative least squares, held to the scaled prior where the observations say nothing."""
        scale = self.scale
        weight = _SHAPE_WEIGHT * max(1.0, float(np.trace(self._information)) / len(self._prior))
        information = self._information + weight * np.eye(len(self._prior))
        moment = self._moment + weight * scale
        relative = _non_negative(information, moment)
        shape = relative * self._prior
        if np.all(np.isfinite(shape)) and float(shape.sum()) > 0:
            self._shape = shape

    # -- what outlives the process ------------------------------------------------------------------------------------

    def document(self) -> dict[str, object]:
        """Numbers, lists and strings only."""
        return {
            "version": _DOCUMENT_VERSION,
            "prior": self._prior.tolist(),
            "log_scale_sum": self._log_scale_sum,
            "log_scale_weight": self._log_scale_weight,
            "information": self._information.tolist(),
            "moment": self._moment.tolist(),
            "count": self._count,
            "lengths": [self._length_min if self._count else 0.0, self._length_max],
            "residuals": list(self._residuals),
        }

    def restore(self, document: Mapping[str, object]) -> bool:
        """Go on from a document of the same prior. False, and nothing changed, when it is another's or damaged."""
        try:
            return self._restore(document)
        except (KeyError, TypeError, ValueError, OverflowError):
            return False

    def _restore(self, document: Mapping[str, object]) -> bool:
        prior = _array(document["prior"], self._prior.shape)
        information = _array(document["information"], self._information.shape)
        moment = _array(document["moment"], self._moment.shape)
        scale = _array([document["log_scale_sum"], document["log_scale_weight"]], (2,))
        lengths = _array(document["lengths"], (2,))
        listed = document["residuals"]
        count = document["count"]
        if not isinstance(listed, list) or not isinstance(count, int) or len(listed) > _RESIDUALS:
            return False
        residuals = _array(listed, (len(listed),))
        if document["version"] != _DOCUMENT_VERSION or not np.array_equal(prior, self._prior):
            return False
        sensible = (
            count >= 0
            and scale[1] > 0
            and abs(scale[0] / scale[1]) < 20
            and np.allclose(information, information.T)
            and bool(np.all(np.linalg.eigvalsh(information) > -1e-6 * max(1.0, float(np.trace(information)))))
            and bool(np.all(lengths >= 0))
        )
        if not sensible:
            return False
        self._start()
        self._log_scale_sum, self._log_scale_weight = scale.tolist()
        self._information, self._moment, self._count = information, moment, count
        self._length_min, self._length_max = lengths.tolist() if count else (math.inf, 0.0)
        for residual in residuals.tolist():
            self._remember(residual)
        if count >= SHAPE_STEPS_MIN and self._length_max >= SHAPE_SPAN_MIN * self._length_min:
            self._solve()
        return True


def joint_margin(*estimates: Estimate) -> float:
    """Of a decision that compares them: their errors are independent."""
    return _bounded_margin(math.hypot(*(estimate.margin for estimate in estimates)))


def _bounded_margin(spread: float) -> float:
    return max(MARGIN_MIN, min(MARGIN_MAX, spread))


def _array(value: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    array = np.array(value, np.float64)
    if array.shape != shape or not np.all(np.isfinite(array)):
        raise ValueError(f"numbers of shape {shape} expected")
    return array


def _non_negative(information: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin x'Ax/2 - m'x with x >= 0, A positive definite and small: solve, drop what is negative, again."""
    free = np.ones(len(moment), np.bool_)
    solution = np.zeros(len(moment))
    for _ in range(2 * len(moment)):
        solution[:] = 0.0
        if not free.any():
            break
        solution[free] = np.linalg.solve(information[np.ix_(free, free)], moment[free])
        if (solution[free] < 0).any():
            free &= solution >= 0
            continue
        gradient = moment - information @ solution
        wanted = ~free & (gradient > 1e-12)
        if not wanted.any():
            break
        free[int(np.argmax(np.where(wanted, gradient, -math.inf)))] = True
    return np.maximum(solution, 0.0)


# -- the two kinds of estimate ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: the prefill parts as (first token, end token), and the decodes beside them."""

    prefills: Sequence[tuple[int, int]]
    decode_count: int = 0
    decode_context_tokens: int = 0


class RecomputeCalibration:
    """Step times of the engine: t = c0 + alpha*tokens + beta*(b*b - a*a) + delta*decodes + eps*their context."""

    def __init__(self, prior: RecomputeModel, *, decode_s: float = 1e-5, decode_token_s: float = 1e-9) -> None:
        self._prior = prior
        # A fit may have left out a part that the engine turns out to have.
        shape = (max(prior.step_s, 1e-4), max(prior.token_s, 1e-9), max(prior.token_squared_s, 1e-14))
        coefficients = (*shape, decode_s, decode_token_s)
        self.estimate = Estimate(coefficients, length_index=1, scale_prior=prior.scale)

    def observe(self, step: Step, seconds: float) -> Observed:
        tokens = sum(end - first for first, end in step.prefills)
        if tokens < PREFILL_TOKENS_MIN:
            return Observed.REJECTED
        squared = sum(end * end - first * first for first, end in step.prefills)
        features = (1.0, float(tokens), float(squared), float(step.decode_count), float(step.decode_context_tokens))
        return self.estimate.observe(features, seconds)

    def model(self) -> RecomputeModel:
        """What is known now, its scale worked in."""
        step_s, token_s, token_squared_s, *_ = self.estimate.coefficients
        return RecomputeModel(step_s, token_s, token_squared_s, 1.0, self._prior.step_tokens)


class TransferCalibration:
    """Service times, without queueing, of one tier in one direction at one concurrency: O + descriptors*o + bytes/B."""

    def __init__(self, prior: TransferModel) -> None:
        coefficients = (max(prior.overhead_s, 1e-7), max(prior.descriptor_s, 1e-9), 1 / prior.bytes_per_s)
        self.estimate = Estimate(coefficients, length_index=2)

    def observe(self, nbytes: int, seconds: float, descriptor_count: int = 0) -> Observed:
        if nbytes <= 0 or descriptor_count < 0:
            return Observed.REJECTED
        return self.estimate.observe((1.0, float(descriptor_count), float(nbytes)), seconds)

    def model(self) -> TransferModel:
        overhead_s, descriptor_s, byte_s = self.estimate.coefficients
        return TransferModel(1 / max(byte_s, 1e-15), overhead_s, descriptor_s)


class Choice:
    """Whether one tier is loaded from, with inertia, and now and then against the estimate, to keep it honest.

    Also bounded: after EXPLORE_AFTER_DECLINES declines in a row without any observation one load goes ahead.
    """

    def __init__(self) -> None:
        self._was_loading: bool | None = None
        self._declines = 0

    def margin(self, margin: float) -> float:
        """The margin to decide with: less of it stays on the side that was chosen last."""
        match self._was_loading:
            case True:
                return max(0.0, margin - HYSTERESIS)
            case False:
                return margin + HYSTERESIS
            case None:
                return margin

    def decided(self, *, loading: bool) -> None:
        self._was_loading = loading
        self._declines = 0 if loading else self._declines + 1

    def observed(self, seconds: float = math.inf, predicted_s: float = 0.0) -> None:
        """The tier was measured by somebody's load, or by a probe. If it was much quicker than thought, the next
        decline looks again at once: one observation alone changes no estimate."""
        self._declines = DECLINES_SURPRISED if 0 < seconds < SURPRISE * predicted_s else 0

    def explores(
        self,
        *,
        random: float,
        tier_is_idle: bool,
        predicted_regret_s: float,
        regret_s_max: float,
        after: int = EXPLORE_AFTER_DECLINES,
    ) -> bool:
        """Asked after a decline: load all the same? `random` is uniform in [0, 1).

        `regret_s_max` bounds what looking again after so many declines may cost (the load's deadline bounds it anyway).
        """
        if not tier_is_idle or not predicted_regret_s >= 0:
            return False
        if self._declines >= after and predicted_regret_s <= regret_s_max:
            return True
        return random < EXPLORATION_PROBABILITY and predicted_regret_s <= EXPLORATION_REGRET_S_MAX
