"""Published figures from the equations, and what must hold of every decision."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import costmodel
from kvstore.costmodel import (
    BreakEven,
    GpuQueue,
    KVSize,
    LoadOption,
    LoadReason,
    RecomputeModel,
    StepWait,
    StorePrice,
    StoreReason,
    TransferModel,
    recompute_s,
    transfer_s,
)
from kvstore.profiles import Geometry, find_prefill, prefills
from tests.unit.reference import reference_rows

LLAMA_3B = Geometry(28, 3072, 8, 128, "gqa")
LLAMA_8B = Geometry(32, 4096, 8, 128, "gqa")
KV_3B = KVSize(114_688)
KV_8B = KVSize(131_072)


def fitted(geometry: Geometry, scale: float) -> RecomputeModel:
    return find_prefill(geometry, "NVIDIA H100 80GB HBM3", 1).recompute_model(scale=scale)


# -- published figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "overhead_s", "expected_gb_per_s"),
    [(1024, 5.5e-3, 24.7), (8192, 5.5e-3, 11.0), (81920, 5.5e-3, 3.8), (8192, 0.0, 10.3)],
)
def test_bandwidth_that_breaks_even_is_the_published_one(
    tokens: int, overhead_s: float, expected_gb_per_s: float
) -> None:
    need = costmodel.bytes_per_s_to_break_even(fitted(LLAMA_3B, 1.0), KV_3B, tokens, overhead_s)
    assert need / 1e9 == pytest.approx(expected_gb_per_s, rel=0.02)


def test_published_break_even_bandwidths_are_near_the_equations() -> None:
    rows = [row for row in reference_rows("pykvcache_published.csv") if row["metric"] == "required_bandwidth"]
    assert len(rows) == 3
    for row in rows:
        need = costmodel.bytes_per_s_to_break_even(
            fitted(LLAMA_3B, 1.0), KVSize(int(row["kv_bytes_per_token"])), int(row["length_tokens"]), 5.5e-3
        )
        assert need / 1e9 == pytest.approx(float(row["value"]), rel=0.10), row


@pytest.mark.parametrize(("gb_per_s", "expected_tokens"), [(12.0, 5930), (11.6, 6777), (11.2, 7759)])
def test_ssd_break_even_is_a_length_and_not_a_share(gb_per_s: float, expected_tokens: int) -> None:
    found = costmodel.break_even(fitted(LLAMA_3B, 1.0), TransferModel(gb_per_s * 1e9, 6e-3), KV_3B)
    assert found.wins_below_tokens == 0
    assert found.wins_from_tokens == pytest.approx(expected_tokens, rel=0.005)


def test_a_wrong_choice_near_the_ssd_break_even_costs_little() -> None:
    model, link = fitted(LLAMA_3B, 1.0), TransferModel(11.6e9, 6e-3)
    for tokens in (6057, 6203, 6373, 6390, 7759):
        regret_s = recompute_s(model, 0, tokens) - transfer_s(link, KV_3B.of(tokens))
        assert abs(regret_s) < 6e-3, tokens


def test_ttft_of_llama_8b_computed_and_loaded() -> None:
    model, link = fitted(LLAMA_8B, 1.10), TransferModel(44.3e9, 10.25e-3)
    rows = [row for row in reference_rows("vllm_blog_fig1_ttft_llama31_8b_h100.csv") if row["ttft_compute_ms"]]
    assert len(rows) == 10
    for row in rows:
        tokens = int(row["prompt_tokens"])
        assert recompute_s(model, 0, tokens) * 1e3 == pytest.approx(float(row["ttft_compute_ms"]), rel=0.13), row
        loaded_ms = transfer_s(link, KV_8B.of(tokens)) * 1e3
        assert loaded_ms == pytest.approx(float(row["ttft_cpu_load_ms"]), rel=0.06), row


@pytest.mark.parametrize("table", ["vllm_blog_fig3_d2h_h100.csv", "vllm_blog_fig4_h2d_h100.csv"])
def test_copy_bandwidth_by_block_size(table: str) -> None:
    link = TransferModel(51.4e9, 0.0)
    rows = [row for row in reference_rows(table) if int(row["block_KiB"]) >= 64]
    assert len(rows) == 9
    for row in rows:
        nbytes = int(row["block_KiB"]) * 1024
        gb_per_s = nbytes / transfer_s(link, nbytes, descriptor_count=1) / 1e9
        assert gb_per_s == pytest.approx(float(row["dma_GBps"]), rel=0.10), row


def test_throughput_by_hit_rate() -> None:
    rows = reference_rows("vllm_blog_fig2_throughput_llama31_8b_h100.csv")
    assert len(rows) == 11
    for row in rows:
        tokens_per_s = costmodel.mixed_tokens_per_s(float(row["cpu_hit_rate_pct"]) / 100, 41_930, 389_229)
        assert tokens_per_s == pytest.approx(float(row["tokens_per_s"]), rel=0.08), row


def test_a_file_slower_than_recomputing_is_refused_and_the_host_hit_taken() -> None:
    tokens = 10_000
    model = RecomputeModel(0.0, 1.725 / tokens, 0.0, scale=1.0)
    file = LoadOption("fs", tokens, 2.450)
    host = LoadOption("cpu", tokens, 0.482)
    assert costmodel.decide_load(model, tokens, 0, [file], GpuQueue()).reason is LoadReason.RECOMPUTE_IS_QUICKER
    both = costmodel.decide_load(model, tokens, 0, [file, host], GpuQueue())
    assert both.option is host
    assert both.alternatives[0].cost_s == pytest.approx(0.482)


def test_every_profile_reproduces_its_own_table() -> None:
    rows = reference_rows("prefill_fit_coeffs.csv")
    assert len(rows) > 50
    fits = {(fit.model, fit.gpu): fit for fit in prefills()}
    assert len(fits) == len(rows)
    for row in rows:
        model = fits[row["model"], row["system"]].recompute_model(scale=1.0)
        # The table holds what was measured beside the fit, so this is the fit's error, not a copy of a number.
        error = float(row["max_rel_err_fit_pct"]) / 100 + 0.01
        for column, tokens in (("f8k_ms", 8192), ("f32k_ms", 32768), ("f128k_ms", 131072)):
            measured_ms = float(row[column])
            assert recompute_s(model, 0, tokens) * 1e3 == pytest.approx(measured_ms, rel=max(0.02, error)), (
                row,
                column,
            )


# -- times ------------------------------------------------------------------------------------------------------------


def test_steps_cost_by_the_token_budget() -> None:
    model = RecomputeModel(1e-3, 0.0, 0.0, scale=1.0, step_tokens=512)
    assert recompute_s(model, 0, 512) == pytest.approx(1e-3)
    assert recompute_s(model, 0, 513) == pytest.approx(2e-3)
    assert recompute_s(model, 512, 512) == 0.0


def test_two_hops_overlap_or_follow() -> None:
    disk, bus = TransferModel(10e9, 6e-3), TransferModel(40e9, 10e-3)
    overlapped = costmodel.pipelined(disk, bus, chunk_bytes=40_000_000)
    assert overlapped.bytes_per_s == 10e9
    assert overlapped.overhead_s == pytest.approx(6e-3 + 10e-3 + 1e-3)
    assert costmodel.pipelined(bus, disk, chunk_bytes=40_000_000) == overlapped
    followed = costmodel.store_and_forward(disk, bus)
    assert followed.bytes_per_s == pytest.approx(8e9)
    assert followed.overhead_s == pytest.approx(16e-3)


def test_a_rank_moves_its_share_and_all_of_mla() -> None:
    kv = KVSize(1000.0, state_bytes=801)
    assert kv.on_rank(8, replicated=False) == KVSize(125.0, 101)
    assert kv.on_rank(8, replicated=True) == kv


FAST = TransferModel(100e9, 0.0)


@pytest.mark.parametrize(
    ("model", "link", "expected"),
    [
        # starts sooner and moves faster; the same without attention
        (RecomputeModel(1e-3, 1e-5, 1e-10, 1.0), FAST, BreakEven(0.0, 0.0)),
        # starts later, moves faster, no attention: one root of a line
        (RecomputeModel(0.0, 2e-6, 0.0, 1.0), TransferModel(1e9, 1e-3), BreakEven(0.0, 1000.0)),
        # starts later, moves more slowly, no attention: never
        (RecomputeModel(0.0, 1e-7, 0.0, 1.0), TransferModel(1e9, 1e-3), BreakEven(0.0, math.inf)),
        # starts sooner, moves more slowly, no attention: only below
        (RecomputeModel(1e-3, 0.5e-6, 0.0, 1.0), TransferModel(1e9, 0.0), BreakEven(2000.0, math.inf)),
        # starts sooner, moves more slowly, little attention: below and above
        (RecomputeModel(1e-3, 0.5e-6, 1e-11, 1.0), TransferModel(1e9, 0.0), None),
        # starts sooner, moves more slowly, so much attention that it never matters
        (RecomputeModel(1e-3, 0.5e-6, 1e-9, 1.0), TransferModel(1e9, 0.0), BreakEven(0.0, 0.0)),
        # starts later: one root, whichever is faster
        (RecomputeModel(0.0, 2e-6, 1e-10, 1.0), TransferModel(1e9, 1e-3), None),
        (RecomputeModel(0.0, 1e-7, 1e-10, 1.0), TransferModel(1e9, 1e-3), None),
        # starts at the same time
        (RecomputeModel(1e-3, 1e-7, 1e-10, 1.0), TransferModel(1e9, 1e-3), None),
    ],
)
def test_every_case_of_the_break_even(model: RecomputeModel, link: TransferModel, expected: BreakEven | None) -> None:
    kv = KVSize(1000.0)
    found = costmodel.break_even(model, link, kv)
    if expected is not None:
        assert (found.wins_below_tokens, found.wins_from_tokens) == pytest.approx(
            (expected.wins_below_tokens, expected.wins_from_tokens)
        )
    for tokens in (1, 10, 100, 500, 900, 1100, 1900, 2100, 5000, 20_000, 47_000, 49_000, 100_000, 1_000_000):
        wins = transfer_s(link, kv.of(tokens)) < recompute_s(model, 0, tokens)
        assert found.wins(tokens) == wins, tokens


times = st.floats(0, 1e-2)
models = st.builds(
    RecomputeModel,
    step_s=st.floats(0, 1e-1),
    token_s=st.floats(0, 1e-3),
    token_squared_s=st.floats(0, 1e-8),
    scale=st.floats(0.5, 3),
    step_tokens=st.one_of(st.none(), st.integers(16, 8192)),
)
links = st.builds(TransferModel, bytes_per_s=st.floats(1e6, 1e12), overhead_s=st.floats(0, 1))
gpus = st.builds(GpuQueue, waiting_count=st.integers(0, 1000), backlog_s=st.floats(0, 100), step_s=st.floats(0, 10))
waits = st.builds(StepWait, seconds=st.floats(0, 100), passing_count=st.floats(0, 100))


@given(links, st.floats(-1e15, 1e15), st.floats(0, 1e15))
def test_a_transfer_time_is_never_negative_and_grows_with_the_bytes(
    link: TransferModel, nbytes: float, more: float
) -> None:
    assert 0 <= transfer_s(link, nbytes) <= transfer_s(link, nbytes + more)


@settings(deadline=None)  # the machine may be busy
@given(models, st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 200_000))
def test_recompute_time_is_never_negative_and_grows_with_the_end(model: RecomputeModel, a: int, b: int, c: int) -> None:
    first, middle, end = sorted((a, b, c))
    assert recompute_s(model, end, first) == 0
    assert 0 <= recompute_s(model, first, middle) <= recompute_s(model, first, end) * (1 + 1e-12)
    assert recompute_s(model, middle, end) <= recompute_s(model, first, end) * (1 + 1e-12)


@settings(deadline=None)  # the machine may be busy
@given(models, links, st.floats(1, 1e6), st.integers(0, 10**9))
def test_a_break_even_is_where_the_two_times_meet(
    model: RecomputeModel, link: TransferModel, bytes_per_token: float, state_bytes: int
) -> None:
    one_step = RecomputeModel(model.step_s, model.token_s, model.token_squared_s, model.scale)
    kv = KVSize(bytes_per_token, state_bytes)
    found = costmodel.break_even(one_step, link, kv)
    assert found.wins_below_tokens >= 0
    assert found.wins_from_tokens >= 0
    for root in (found.wins_below_tokens, found.wins_from_tokens):
        if 1 <= root < 1e9:
            computed_s = one_step.scale * (
                one_step.step_s + one_step.token_s * root + one_step.token_squared_s * root * root
            )
            loaded_s = link.overhead_s + (bytes_per_token * root + state_bytes) / link.bytes_per_s
            assert computed_s == pytest.approx(loaded_s, rel=1e-6)


# -- loads ------------------------------------------------------------------------------------------------------------

options = st.builds(
    LoadOption,
    tier=st.sampled_from(["cpu", "fs"]),
    end_token=st.integers(0, 100_000),
    transfer_s=st.floats(0, 100),
    link_backlog_s=st.floats(0, 100),
    link_waiting_count=st.integers(0, 100),
    margin=st.floats(0.05, 0.5),
    healthy=st.booleans(),
    wait=waits,
)
MODEL = RecomputeModel(1e-3, 2e-5, 4e-10)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(options, max_size=5), st.randoms(use_true_random=False), gpus, st.integers(0, 1000))
def test_the_order_of_the_options_never_matters(
    choices: list[LoadOption], random: object, gpu: GpuQueue, gpu_tokens: int
) -> None:
    shuffled = list(choices)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = costmodel.decide_load(MODEL, 100_000, gpu_tokens, choices, gpu)
    second = costmodel.decide_load(MODEL, 100_000, gpu_tokens, shuffled, gpu)
    assert first.option == second.option
    assert first.reason == second.reason


@settings(deadline=None)  # the machine may be busy
@given(options, gpus, st.integers(0, 1000))
def test_a_load_pays_with_its_margin_and_its_cost_is_never_negative(
    option: LoadOption, gpu: GpuQueue, gpu_tokens: int
) -> None:
    decision = costmodel.decide_load(MODEL, 100_000, gpu_tokens, [option], gpu)
    assert decision.recompute_cost_s >= 0
    assert all(cost_s >= 0 for *_, cost_s in decision.alternatives)
    if decision.option is not None:
        assert decision.reason is LoadReason.LOAD_IS_QUICKER
        assert option.healthy
        assert option.end_token > gpu_tokens
        behind_count = max(0.0, gpu.waiting_count - option.wait.passing_count)
        rest_s = recompute_s(MODEL, min(option.end_token, 100_000), 100_000) * (1 + behind_count)
        rest_s += min(option.wait.seconds, decision.recompute_s * min(option.wait.passing_count, gpu.waiting_count))
        assert (decision.alternatives[0].cost_s - rest_s) * (1 + option.margin) < decision.recompute_cost_s - rest_s


def test_a_short_hit_of_a_long_prompt_is_not_lost_in_the_error_of_what_is_computed_either_way() -> None:
    short = LoadOption("cpu", 512, transfer_s=recompute_s(MODEL, 0, 512) / 2, margin=0.5)
    assert costmodel.decide_load(MODEL, 80_000, 0, [short], GpuQueue()).option is short
    assert costmodel.decide_load(MODEL, 600, 0, [short], GpuQueue()).option is short


@settings(deadline=None)  # the machine may be busy
@given(
    st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.integers(0, 50), st.integers(0, 50), st.floats(0, 10),
    st.floats(0, 100), waits,
)  # fmt: skip
def test_the_cost_of_a_load_grows_with_each_of_its_parts(
    compute_s: float, load_s: float, link_s: float, n_gpu: int, n_link: int, more: float, gpu_s: float, wait: StepWait
) -> None:
    def cost(
        compute: float = 0,
        load: float = 0,
        waited: float = 0,
        passing: float = 0,
        gpu_backlog: float = 0,
        link_backlog: float = 0,
        gpu: int = 0,
        link: int = 0,
    ) -> float:
        return costmodel.load_cost_s(
            compute_s + compute,
            GpuQueue(n_gpu + gpu, gpu_s + gpu_backlog),
            load_s=load_s + load,
            wait=StepWait(wait.seconds + waited, wait.passing_count + passing),
            link_backlog_s=link_s + link_backlog,
            link_waiting_count=n_link + link,
        )

    base = cost()
    assert base >= compute_s + gpu_s - 1e-9  # no token before the GPU is free, nor before what is loaded is there
    assert load_s == 0 or base >= compute_s + link_s + load_s + wait.seconds - 1e-9
    for grown in (
        cost(compute=more), cost(load=more), cost(gpu_backlog=more), cost(link_backlog=more), cost(gpu=3), cost(link=3),
        cost(waited=more),
    ):  # fmt: skip
        assert grown >= base - 1e-9
    # Who passes meanwhile does not wait for the rest.
    assert compute_s + gpu_s - 1e-9 <= cost(passing=more) <= base + 1e-9


@pytest.mark.parametrize("of_equal_length", [True, False])
def test_steps_full_of_others_like_it_are_no_loss_and_steps_of_decodes_are(of_equal_length: bool) -> None:
    """Others that pass gain what a load waits for them: who goes first is all the same. A short one should not wait."""
    prompt = 8192 if of_equal_length else 1024
    other_s = recompute_s(MODEL, 0, 8192)
    quick = LoadOption("cpu", 512, 1e-3)
    prefills, decodes = costmodel.step_wait(2, 1.5 * other_s, 1.5), costmodel.step_wait(2, 1.5 * other_s, 0)

    def loads(wait: StepWait) -> bool:
        gpu = GpuQueue(waiting_count=wait.passing_count, step_s=1.5 * other_s)
        return costmodel.decide_load(MODEL, prompt, 0, [quick._replace(wait=wait)], gpu).option is not None

    assert costmodel.decide_load(MODEL, prompt, 0, [quick], GpuQueue()).option is quick
    assert loads(prefills) is of_equal_length
    assert not loads(decodes)


def test_a_queue_makes_a_load_pay_that_waits_for_steps() -> None:
    short = LoadOption("cpu", 4096, 1e-3, wait=costmodel.step_wait(2, 0.1, 0))
    assert costmodel.decide_load(MODEL, 4200, 0, [short], GpuQueue(step_s=0.1)).option is None
    assert costmodel.decide_load(MODEL, 4200, 0, [short], GpuQueue(waiting_count=4, step_s=0.1)).option is short


def test_both_predictions_have_the_others_steps_in_them_and_say_how_long_the_load_waits() -> None:
    gpu, wait = GpuQueue(step_s=0.25), costmodel.step_wait(2, 0.25, 0.5)
    decision = costmodel.decide_load(MODEL, 8192, 0, [LoadOption("cpu", 8000, 0.125, wait=wait)], gpu)
    [alternative] = decision.alternatives
    assert alternative.wait_s == 0.5
    assert alternative.seconds == pytest.approx(0.125 + 0.5 + 0.25 + recompute_s(MODEL, 8000, 8192))


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 50_000), st.integers(0, 50_000), st.floats(0, 10), waits, st.integers(0, 100))
def test_what_a_load_saved_and_what_it_took_are_of_one_measure(
    first: int, loaded: int, load_s: float, wait: StepWait, waiting: int
) -> None:
    """What it saved, less what it took, is by how much its cost is less than that of recomputing."""
    prompt, end = 100_000, first + loaded
    gpu = GpuQueue(waiting_count=max(waiting, wait.passing_count))
    saved_s = costmodel.saved_s(MODEL, first, end, prompt, gpu, wait.passing_count)
    assert saved_s >= 0
    recomputed_s = costmodel.load_cost_s(recompute_s(MODEL, first, prompt), gpu)
    loaded_s = costmodel.load_cost_s(recompute_s(MODEL, end, prompt), gpu, load_s=load_s, wait=wait)
    assert saved_s - (load_s + wait.seconds) == pytest.approx(recomputed_s - loaded_s, abs=1e-6)


@settings(deadline=None)  # the machine may be busy
@given(options, st.integers(0, 20), st.integers(1, 20))
def test_more_waiting_for_the_gpu_only_speaks_for_loading(option: LoadOption, waiting: int, more: int) -> None:
    now = costmodel.decide_load(MODEL, 100_000, 0, [option], GpuQueue(waiting))
    later = costmodel.decide_load(MODEL, 100_000, 0, [option], GpuQueue(waiting + more))
    if now.option is not None:
        assert later.option is not None


def test_a_queue_at_the_gpu_makes_a_slow_load_pay() -> None:
    slow = LoadOption("fs", 8000, transfer_s=1.5 * recompute_s(MODEL, 0, 8000))
    assert costmodel.decide_load(MODEL, 8192, 0, [slow], GpuQueue()).option is None
    assert costmodel.decide_load(MODEL, 8192, 0, [slow], GpuQueue(waiting_count=4)).option is slow


def test_a_load_that_ends_before_the_gpu_is_free_costs_nothing_more() -> None:
    alone_s = recompute_s(MODEL, 0, 8000)
    slow = LoadOption("fs", 8000, transfer_s=1.5 * alone_s)
    assert costmodel.decide_load(MODEL, 8192, 0, [slow], GpuQueue(backlog_s=1.5 * alone_s)).option is slow
    assert costmodel.decide_load(MODEL, 8192, 0, [slow], GpuQueue(backlog_s=0.2 * alone_s)).option is None


def test_a_queue_at_the_link_makes_a_quick_load_not_pay() -> None:
    quick = LoadOption("fs", 8000, transfer_s=0.5 * recompute_s(MODEL, 0, 8000))
    crowded = LoadOption("fs", 8000, transfer_s=quick.transfer_s, link_waiting_count=20)
    assert costmodel.decide_load(MODEL, 8192, 0, [quick], GpuQueue()).option is quick
    assert costmodel.decide_load(MODEL, 8192, 0, [crowded], GpuQueue()).option is None


def test_the_part_in_the_faster_tier_can_be_the_best() -> None:
    near = LoadOption("cpu", 6000, transfer_s=0.01)
    whole = LoadOption("fs", 8000, transfer_s=5.0)
    assert costmodel.decide_load(MODEL, 8192, 0, [whole, near], GpuQueue()).option is near
    cheap = LoadOption("fs", 8000, transfer_s=0.012)
    assert costmodel.decide_load(MODEL, 8192, 0, [cheap, near], GpuQueue()).option is cheap


def test_a_chunk_in_flight_for_another_request_costs_nothing_more() -> None:
    shared = LoadOption("fs", 8000, transfer_s=0.0, link_waiting_count=50)
    assert costmodel.decide_load(MODEL, 8192, 0, [shared], GpuQueue()).option is shared


def test_why_nothing_is_loaded() -> None:
    def reason(*choices: LoadOption) -> LoadReason:
        return costmodel.decide_load(MODEL, 8192, 4096, choices, GpuQueue()).reason

    assert reason() is LoadReason.NO_HIT
    assert reason(LoadOption("cpu", 4096, 0.0)) is LoadReason.NO_HIT  # the GPU has it
    assert reason(LoadOption("cpu", 8000, 0.0, healthy=False)) is LoadReason.TIER_SICK
    assert reason(LoadOption("cpu", 8000, 60.0)) is LoadReason.RECOMPUTE_IS_QUICKER


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("field", ["transfer_s", "link_backlog_s", "margin"])
def test_garbage_never_admits_a_load(field: str, bad: float) -> None:
    option = LoadOption(**{"tier": "fs", "end_token": 8000, "transfer_s": 1e-3, field: bad})  # type: ignore[arg-type]
    _declined(option)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("field", ["seconds", "passing_count"])
def test_a_garbage_wait_never_admits_a_load(field: str, bad: float) -> None:
    _declined(LoadOption("fs", 8000, 1e-3, wait=StepWait()._replace(**{field: bad})))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("field", ["waiting_count", "backlog_s", "step_s"])
def test_a_garbage_queue_admits_no_load(field: str, bad: float) -> None:
    good = LoadOption("cpu", 6000, 1e-3, wait=StepWait(1e-3, 1.0))
    assert costmodel.decide_load(MODEL, 8192, 0, [good], GpuQueue(1.0, 1e-3, 1e-3)).option is good
    assert (
        costmodel.decide_load(MODEL, 8192, 0, [good], GpuQueue(1.0, 1e-3, 1e-3)._replace(**{field: bad})).option is None
    )


def _declined(option: LoadOption) -> None:
    good = LoadOption("cpu", 6000, 1e-3)
    assert costmodel.decide_load(MODEL, 8192, 0, [option], GpuQueue()).option is None
    assert costmodel.decide_load(MODEL, 8192, 0, [option, good], GpuQueue()).option is good


@settings(deadline=None)  # the machine may be busy
@given(gpus)
def test_the_deadline_outlasts_the_recomputation_it_saves(gpu: GpuQueue) -> None:
    compute_s = recompute_s(MODEL, 100, 8192)
    expected_s = 3 * (compute_s + gpu.backlog_s + gpu.step_s + gpu.waiting_count * compute_s)
    assert costmodel.load_deadline_s(recompute_s(MODEL, 100, 8192), gpu) == pytest.approx(expected_s)


# -- stores -----------------------------------------------------------------------------------------------------------

CHUNK_TOKENS, CHUNK_BYTES = 512, 512 * 131_072
PRICE = StorePrice(TransferModel(44e9, 12e-3), 44e9, write_price=0.1)


def decide(
    probabilities: list[float], present: list[bool] | None = None, price: StorePrice = PRICE
) -> costmodel.StoreDecision:
    held = present if present is not None else [False] * len(probabilities)
    return costmodel.decide_store(
        MODEL, price, CHUNK_TOKENS, CHUNK_BYTES, np.array(probabilities), np.array(held, dtype=bool)
    )


def test_a_chain_likely_to_return_is_stored_whole() -> None:
    assert decide([0.5] * 20).chunk_count == 20
    assert decide([0.5] * 20).reason is StoreReason.WORTH_IT


def test_a_chain_that_never_returns_is_not_stored() -> None:
    decision = decide([0.0001] * 20)
    assert decision.chunk_count == 0
    assert decision.reason is StoreReason.NOT_WORTH_IT


def test_a_poor_chunk_above_good_ones_comes_with_them_or_all_stay_out() -> None:
    assert decide([0.0] + [0.9] * 20).chunk_count == 21
    dear = StorePrice(PRICE.link, 1e6, write_price=1.0)
    assert decide([0.0] + [0.9] * 20, price=dear).chunk_count == 0


def test_the_tail_that_does_not_pay_is_left_out() -> None:
    assert decide([0.8] * 10 + [0.0] * 10).chunk_count == 10


def test_chunks_that_are_there_cost_nothing_and_count_in_the_prefix() -> None:
    assert decide([0.0] * 10 + [0.8] * 5, [True] * 10 + [False] * 5).chunk_count == 15
    assert decide([0.8] * 3, [True] * 3).reason is StoreReason.PRESENT
    declined = decide([0.8] * 3 + [0.0], [True] * 3 + [False])
    assert (declined.chunk_count, declined.reason) == (3, StoreReason.NOT_WORTH_IT)


def test_what_would_be_displaced_and_the_price_of_writing_speak_against() -> None:
    value_s, _ = costmodel.chunk_saving_s(MODEL, CHUNK_TOKENS)
    full = StorePrice(PRICE.link, 44e9, 0.1, displaced_s_per_byte=value_s / CHUNK_BYTES)
    assert decide([0.5] * 20, price=full).chunk_count < 20
    assert decide([0.5] * 20, price=StorePrice(PRICE.link, 2e9, write_price=1.0)).chunk_count == 0


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.tuples(st.one_of(st.floats(0, 1), st.just(math.nan)), st.booleans()), min_size=1, max_size=40),
    st.floats(0, 100),
    st.floats(0, 1e-9),
)
def test_a_prefix_is_the_best_one_and_never_has_a_hole(
    chunks: list[tuple[float, bool]], write_price: float, displaced: float
) -> None:
    price = StorePrice(PRICE.link, 2e9, write_price, displaced)
    probabilities = [probability for probability, _ in chunks]
    present = [held for _, held in chunks]
    decision = decide(probabilities, present, price)
    assert 0 <= decision.chunk_count <= len(chunks)
    assert math.isfinite(decision.value_s)
    accepted = range(decision.chunk_count)
    # A number that is none ends the prefix, unless its chunk is there already.
    assert all(present[i] or not math.isnan(probabilities[i]) for i in accepted)
    if decision.reason is StoreReason.WORTH_IT:
        assert decision.value_s > 0
        assert decision.value_s == pytest.approx(max(_totals_s(probabilities, present, price)), abs=1e-12)
    elif decision.reason is StoreReason.NOT_WORTH_IT:
        assert max(_totals_s(probabilities, present, price)) <= 1e-12


def _totals_s(probabilities: list[float], present: list[bool], price: StorePrice) -> list[float]:
    """What each prefix is worth, by the cost model page; those that a number that is none ends are left out."""
    load_s = CHUNK_BYTES / price.link.bytes_per_s
    cost_s = CHUNK_BYTES * (price.write_price / price.write_bytes_per_s + price.displaced_s_per_byte)
    overhead_s = probabilities[present.index(False)] * price.link.overhead_s
    totals_s, total_s = [-math.inf], -overhead_s
    for i, (probability, held) in enumerate(zip(probabilities, present, strict=True)):
        if not held:
            # Its share of a step is not in MODEL, which has one step for the whole prompt.
            saving_s = recompute_s(MODEL, i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS) - MODEL.scale * MODEL.step_s
            total_s += probability * max(0.0, saving_s - load_s) - cost_s
        if math.isnan(total_s):
            break
        totals_s.append(total_s)
    return totals_s


def test_a_chunk_deep_in_the_prompt_saves_more() -> None:
    first_s, further_s = costmodel.chunk_saving_s(MODEL, CHUNK_TOKENS)
    assert further_s > 0
    assert sum(first_s + further_s * i for i in range(10)) == pytest.approx(
        recompute_s(MODEL, 0, 5120) - MODEL.scale * MODEL.step_s
    )


def test_the_write_price_follows_what_is_written() -> None:
    price = 1.0
    for _ in range(100):
        price = costmodel.next_write_price(price, 4e9, 2e9, price_min=0.1)
    assert price > 100
    for _ in range(100):
        price = costmodel.next_write_price(price, 0.0, 2e9, price_min=0.1)
    assert price == pytest.approx(0.1, rel=0.5)


@settings(deadline=None)  # the machine may be busy
@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_garbage_leaves_the_write_price_in_its_bounds(price: float, observed: float, target: float) -> None:
    found = costmodel.next_write_price(price, observed, target, price_min=0.1, price_max=50.0)
    assert 0.1 <= found <= 50.0


def test_endurance_and_rate_are_the_same_thing() -> None:
    rate = costmodel.write_target_bytes_per_s(1.0, 7.68e12)
    assert costmodel.drive_writes_per_day(rate, 7.68e12) == pytest.approx(1.0)
    # 3.5 GB/s written, one 8B model on one H100: some 39 drive writes a day of a 7.68 TB drive.
    assert costmodel.drive_writes_per_day(3.5e9, 7.68e12) == pytest.approx(39, rel=0.02)


@settings(deadline=None)  # the machine may be busy
@given(st.floats(allow_nan=True), st.floats(allow_nan=True), st.floats(0, 1))
def test_a_reuse_probability_is_one_whatever_was_counted(hits: float, trials: float, prior: float) -> None:
    assert 0 <= costmodel.reuse_probability(hits, trials, prior) <= 1
