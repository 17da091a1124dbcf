"""Estimates find the truth, survive garbage, notice a change, and never believe one wild observation."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.calibration import (
    EXPLORE_AFTER_DECLINES,
    HYSTERESIS,
    MARGIN_MAX,
    MARGIN_MIN,
    MARGIN_PRIOR,
    Choice,
    Estimate,
    Observed,
    RecomputeCalibration,
    Step,
    TransferCalibration,
    joint_margin,
)
from kvstore.costmodel import RecomputeModel, TransferModel, recompute_s, transfer_s

PRIOR = RecomputeModel(1e-3, 2e-5, 4e-10, scale=1.1)
LINK = TransferModel(44e9, 12e-3)


def feed_steps(
    calibration: RecomputeCalibration, truth: RecomputeModel, lengths: list[int], noise: float, seed: int = 1
) -> None:
    rng = random.Random(seed)
    for length in lengths:
        seconds = recompute_s(truth, 0, length) * math.exp(rng.gauss(0, noise))
        calibration.observe(Step([(0, length)]), seconds)


def lengths_between(low: int, high: int, count: int, seed: int = 2) -> list[int]:
    rng = random.Random(seed)
    return [round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(count)]


def test_the_prior_holds_until_something_is_seen() -> None:
    calibration = RecomputeCalibration(PRIOR)
    assert recompute_s(calibration.model(), 0, 8192) == pytest.approx(recompute_s(PRIOR, 0, 8192), rel=1e-6)
    assert calibration.estimate.margin == MARGIN_PRIOR


def test_equal_steps_teach_the_scale_only() -> None:
    calibration = RecomputeCalibration(PRIOR)
    feed_steps(calibration, RecomputeModel(1e-3, 6e-5, 0.0, 1.0), [512] * 200, noise=0.02)
    assert not calibration.estimate.shape_is_learned
    model = calibration.model()
    assert model.token_squared_s / model.token_s == pytest.approx(PRIOR.token_squared_s / PRIOR.token_s)
    assert recompute_s(model, 0, 512) == pytest.approx(
        recompute_s(RecomputeModel(1e-3, 6e-5, 0.0, 1.0), 0, 512), rel=0.05
    )


def test_steps_of_many_lengths_teach_the_shape() -> None:
    truth = RecomputeModel(5e-3, 3.5e-5, 1e-9, scale=1.0)
    calibration = RecomputeCalibration(PRIOR)
    feed_steps(calibration, truth, lengths_between(256, 65_536, 400), noise=0.05)
    assert calibration.estimate.shape_is_learned
    for length in (512, 2048, 8192, 32_768, 65_536):
        assert recompute_s(calibration.model(), 0, length) == pytest.approx(recompute_s(truth, 0, length), rel=0.10), (
            length
        )
    assert MARGIN_MIN <= calibration.estimate.margin < 0.1


def test_a_prior_of_another_machine_is_left_behind_within_a_few_steps() -> None:
    truth = RecomputeModel(0.05, 2e-3, 4e-8, scale=1.0)  # a hundred times slower: no GPU at all
    calibration = RecomputeCalibration(PRIOR)
    feed_steps(calibration, truth, lengths_between(256, 2048, 12), noise=0.05)
    assert recompute_s(calibration.model(), 0, 1024) == pytest.approx(recompute_s(truth, 0, 1024), rel=0.5)


def test_decodes_beside_a_prefill_are_not_taken_for_prefill_time() -> None:
    truth = RecomputeModel(1e-3, 2e-5, 4e-10, scale=1.0)
    calibration = RecomputeCalibration(PRIOR)
    rng = random.Random(5)
    for length in lengths_between(256, 16_384, 600):
        decodes = rng.randrange(0, 256)
        seconds = recompute_s(truth, 0, length) + decodes * 1e-4 + decodes * 2000 * 5e-9
        calibration.observe(Step([(0, length)], decodes, decodes * 2000), seconds)
    assert recompute_s(calibration.model(), 0, 8192) == pytest.approx(recompute_s(truth, 0, 8192), rel=0.12)


def test_short_steps_say_nothing() -> None:
    calibration = RecomputeCalibration(PRIOR)
    assert calibration.observe(Step([(0, 100)], 3, 900), 5.0) is Observed.REJECTED
    assert calibration.observe(Step([]), 5.0) is Observed.REJECTED
    assert calibration.estimate.observation_count == 0


def test_transfers_teach_bandwidth_and_overhead() -> None:
    truth = TransferModel(20e9, 3e-3)
    calibration = TransferCalibration(LINK)
    rng = random.Random(3)
    for _ in range(300):
        nbytes = round(math.exp(rng.uniform(math.log(2 << 20), math.log(16 << 30))))
        calibration.observe(nbytes, transfer_s(truth, nbytes, 16) * math.exp(rng.gauss(0, 0.05)), 16)
    for nbytes in (8 << 20, 256 << 20, 8 << 30):
        assert transfer_s(calibration.model(), nbytes, 16) == pytest.approx(transfer_s(truth, nbytes, 16), rel=0.12)


@pytest.mark.parametrize("factor", [10.0, 0.1, 3.0])
def test_a_change_is_noticed_within_a_dozen_observations(factor: float) -> None:
    calibration = TransferCalibration(LINK)
    rng = random.Random(4)

    def observe(rate: float) -> Observed:
        nbytes = rng.randrange(64 << 20, 1 << 30)
        seconds = transfer_s(TransferModel(rate, 12e-3), nbytes) * math.exp(rng.gauss(0, 0.05))
        return calibration.observe(nbytes, seconds)

    assert all(observe(44e9) is Observed.LEARNED for _ in range(200))
    seen = [observe(44e9 / factor) for _ in range(12)]
    assert Observed.CHANGED in seen
    after_s = transfer_s(calibration.model(), 512 << 20)
    truth_s = transfer_s(TransferModel(44e9 / factor, 12e-3), 512 << 20)
    assert after_s == pytest.approx(truth_s, rel=0.4)


def test_one_wild_observation_in_twenty_changes_little() -> None:
    truth = RecomputeModel(1e-3, 2e-5, 4e-10, scale=1.0)
    calibration = RecomputeCalibration(PRIOR)
    rng = random.Random(6)
    for index, length in enumerate(lengths_between(256, 32_768, 400)):
        wild = 300.0 if index % 20 == 19 else 1.0  # a clock that jumped, a process that was stopped
        seconds = recompute_s(truth, 0, length) * math.exp(rng.gauss(0, 0.03)) * wild
        assert calibration.observe(Step([(0, length)]), seconds) is not Observed.CHANGED
    for length in (512, 4096, 32_768):
        assert recompute_s(calibration.model(), 0, length) == pytest.approx(recompute_s(truth, 0, length), rel=0.15)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3, 0.45])
def test_steady_noise_is_no_change_and_becomes_the_margin(spread: float) -> None:
    calibration = TransferCalibration(LINK)
    rng = random.Random(7)
    changes = 0
    for _ in range(1000):
        nbytes = rng.randrange(64 << 20, 1 << 30)
        changes += calibration.observe(nbytes, transfer_s(LINK, nbytes) * (1 + spread * rng.uniform(-1.7, 1.7))) is (
            Observed.CHANGED
        )
    assert changes <= 3
    assert calibration.estimate.margin == pytest.approx(max(MARGIN_MIN, spread), rel=0.6)


def test_a_joint_margin_is_wider_than_each_and_bounded() -> None:
    first, second = Estimate([1.0], length_index=0), Estimate([1.0], length_index=0)
    assert joint_margin(first, second) == pytest.approx(MARGIN_PRIOR * math.sqrt(2))
    assert joint_margin(*[first] * 10) == MARGIN_MAX


garbage = st.one_of(
    st.just(0.0),
    st.just(-1.0),
    st.just(math.nan),
    st.just(math.inf),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(1e-9, 1e4),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-10, 1 << 20), garbage), max_size=120))
def test_garbage_never_poisons_an_estimate(observations: list[tuple[int, float]]) -> None:
    recompute, transfer = RecomputeCalibration(PRIOR), TransferCalibration(LINK)
    for size, seconds in observations:
        recompute.observe(Step([(0, size)]), seconds)
        transfer.observe(size, seconds)
    for estimate in (recompute.estimate, transfer.estimate):
        assert all(0 <= value < math.inf for value in estimate.coefficients)
        assert sum(estimate.coefficients) > 0
        assert MARGIN_MIN <= estimate.margin <= MARGIN_MAX
    assert 0 < recompute_s(recompute.model(), 0, 8192) < math.inf
    assert 0 < transfer_s(transfer.model(), 1 << 30) < math.inf


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0.0, -3.0, math.nan, math.inf, -math.inf, 1e9]), min_size=1, max_size=100))
def test_what_is_no_time_changes_nothing_at_all(bad: list[float]) -> None:
    calibration = RecomputeCalibration(PRIOR)
    feed_steps(calibration, PRIOR, lengths_between(256, 8192, 100), noise=0.05)
    before = calibration.estimate.document()
    assert {calibration.observe(Step([(0, 4096)]), seconds) for seconds in bad} == {Observed.REJECTED}
    assert calibration.estimate.document() == before


@settings(max_examples=12, deadline=None)
@given(st.lists(garbage, min_size=30, max_size=60), st.integers(0, 1000))
def test_after_garbage_it_finds_the_truth_again(bad: list[float], seed: int) -> None:
    calibration = RecomputeCalibration(PRIOR)
    for seconds in bad:
        calibration.observe(Step([(0, 4096)]), seconds)
    truth = RecomputeModel(2e-3, 3e-5, 4e-10, scale=1.0)
    feed_steps(calibration, truth, lengths_between(256, 32_768, 400, seed), noise=0.03, seed=seed)
    for length in (1024, 8192, 32_768):
        assert recompute_s(calibration.model(), 0, length) == pytest.approx(recompute_s(truth, 0, length), rel=0.2), (
            length
        )


def test_it_goes_on_where_another_process_ended() -> None:
    first = RecomputeCalibration(PRIOR)
    feed_steps(first, RecomputeModel(5e-3, 3.5e-5, 1e-9, 1.0), lengths_between(256, 65_536, 200), noise=0.05)
    second = RecomputeCalibration(PRIOR)
    assert second.estimate.restore(json.loads(json.dumps(first.estimate.document())))
    assert second.estimate.coefficients == pytest.approx(first.estimate.coefficients)
    assert second.estimate.margin == pytest.approx(first.estimate.margin)


def test_a_damaged_or_foreign_document_is_none() -> None:
    calibration = RecomputeCalibration(PRIOR)
    feed_steps(calibration, PRIOR, lengths_between(256, 8192, 100), noise=0.05)
    good = calibration.estimate.document()
    for field, value in [
        ("version", 99),
        ("prior", [1.0] * 5),
        ("information", [[math.nan] * 5] * 5),
        ("information", [[-1.0 if i == j else 0.0 for i in range(5)] for j in range(5)]),
        ("moment", "abc"),
        ("count", -1),
        ("log_scale_weight", 0.0),
        ("log_scale_sum", 1e6),
        ("residuals", {"a": 1}),
        ("residuals", [math.inf]),
        ("lengths", [-1.0, 1.0]),
    ]:
        fresh = RecomputeCalibration(PRIOR)
        assert not fresh.estimate.restore({**good, field: value}), (field, value)
        assert fresh.estimate.document() == RecomputeCalibration(PRIOR).estimate.document()
    assert not RecomputeCalibration(PRIOR).estimate.restore({})


def test_a_choice_stays_on_its_side_for_small_differences() -> None:
    choice = Choice()
    assert choice.margin(0.1) == 0.1
    choice.decided(loading=True)
    assert choice.margin(0.1) == pytest.approx(0.1 - HYSTERESIS)
    choice.decided(loading=False)
    assert choice.margin(0.1) == pytest.approx(0.1 + HYSTERESIS)


def test_exploration_is_rare_cheap_and_only_on_an_idle_tier() -> None:
    choice = Choice()
    rng = random.Random(8)
    ask = {"tier_is_idle": True, "predicted_regret_s": 1e-3, "regret_s_max": 0.0}
    explored = sum(choice.explores(random=rng.random(), **ask) for _ in range(10_000))
    assert 60 < explored < 150
    assert not choice.explores(random=0.0, **{**ask, "tier_is_idle": False})
    assert not choice.explores(random=0.0, **{**ask, "predicted_regret_s": 6e-3})
    assert not choice.explores(random=0.0, **{**ask, "predicted_regret_s": math.nan})


def test_a_tier_declined_many_times_is_looked_at_again() -> None:
    choice = Choice()
    for _ in range(EXPLORE_AFTER_DECLINES):
        assert not choice.explores(random=0.5, tier_is_idle=True, predicted_regret_s=0.2, regret_s_max=1.0)
        choice.decided(loading=False)
    assert not choice.explores(random=0.5, tier_is_idle=True, predicted_regret_s=2.0, regret_s_max=1.0)
    assert choice.explores(random=0.5, tier_is_idle=True, predicted_regret_s=0.2, regret_s_max=1.0)
    choice.observed()
    assert not choice.explores(random=0.5, tier_is_idle=True, predicted_regret_s=0.2, regret_s_max=1.0)


def test_a_tier_quicker_than_thought_is_looked_at_again_at_once() -> None:
    choice = Choice()
    ask = {"random": 0.5, "tier_is_idle": True, "predicted_regret_s": 0.0, "regret_s_max": 0.0}
    choice.decided(loading=False)
    assert not choice.explores(**ask)
    choice.observed(0.9, 1.0)
    assert not choice.explores(**ask)
    choice.observed(0.1, 1.0)
    assert choice.explores(**ask)
    for bad in (math.nan, -1.0, 0.0, math.inf):
        choice.observed(bad, 1.0)
        assert not choice.explores(**ask)
    choice.decided(loading=False)
    assert choice.explores(**ask, after=1)
