"""What is decided for one request, and what changes it: no engine, no daemon, a clock that the test moves."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.admission import (
    KNOWN_OBSERVATIONS,
    PROBE_AFTER_DECLINES,
    STORED_UNASKED,
    WINDOW,
    Admission,
    Hit,
    Mode,
    Priors,
    Reason,
    leading,
)
from kvstore.calibration import RecomputeCalibration
from kvstore.costmodel import (
    GpuQueue,
    LoadReason,
    RecomputeModel,
    StepWait,
    StoreReason,
    TransferModel,
    recompute_s,
    transfer_s,
)
from kvstore.decisions import Decision, Room
from kvstore.observations import STEP_S_MAX, STEPS_OPEN_MAX, EngineQueue, LinkQueue

CHUNK_TOKENS, CHUNK_BYTES = 128, 128 << 13
MODEL = RecomputeModel(5e-3, 1e-4, 1e-9, scale=1.0)  # 13 ms for a chunk
FAST, SLOW = TransferModel(4e9, 1e-3), TransferModel(1e7, 1e-3)  # 0.3 ms and 105 ms for a chunk


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    def __init__(self, mode: Mode = Mode.MODEL, **changes: object) -> None:
        self.clock = Clock()
        self.told: list[Decision] = []
        priors = {"recompute": MODEL, "load": FAST, "store": FAST, "disk": FAST, "recompute_known": True, **changes}
        self.admission = Admission(
            mode,
            Priors(**priors),
            tokens_per_chunk=CHUNK_TOKENS,
            tell=self.told.append,
            clock=self.clock,
            uniform=lambda: 0.5,
        )
        self.requests = 0

    def measured(self, *, load: TransferModel | None = None, disk: TransferModel | None = None) -> "Rig":
        for chunks in (4, 8, 16, 8, 4, 16):
            if load is not None:
                self.copy(load, chunks)
            if disk is not None:
                self.read(disk, chunks)
        return self

    def copy(self, link: TransferModel, chunks: int) -> None:
        seconds = transfer_s(link, chunks * CHUNK_BYTES)
        self.admission.copied(store=False, chunks=chunks, chunk_bytes=CHUNK_BYTES, seconds=seconds)

    def read(self, link: TransferModel, chunks: int) -> None:
        seconds = transfer_s(link, chunks * CHUNK_BYTES)
        self.admission.read(chunks=chunks, chunk_bytes=CHUNK_BYTES, seconds=seconds)

    def load(self, *, cpu: int = 0, disk: int = 0, prompt: int = 2048, **changes: object):
        self.requests += 1
        hit = {
            "prompt_tokens": prompt,
            "gpu_tokens": 0,
            "cpu_end_tokens": cpu * CHUNK_TOKENS,
            "end_tokens": (cpu + disk) * CHUNK_TOKENS,
            "cpu_chunks": cpu,
            "chunks": cpu + disk,
            "disk_chunks": disk,
            "chunk_bytes": CHUNK_BYTES,
            **changes,
        }
        return self.admission.load(f"r{self.requests}", Hit(**hit), wait_s_max=30.0)

    def store(
        self,
        chain: list[bytes],
        present: int = 0,
        disk: Room = Room.NOT_ASKED,
        on_disk: int = 0,
        *,
        tier_full: bool = False,
    ):
        held, below = (np.arange(len(chain)) < count for count in (present, on_disk))
        return self.admission.store(
            "r", chain, held, chunk_bytes=CHUNK_BYTES, tier_full=tier_full, disk=disk, on_disk=below
        )


def chain(name: str, chunks: int = 16) -> list[bytes]:
    return [f"{name}.{i}".encode() for i in range(chunks)]


# -- loads


def test_a_quick_tier_is_loaded_from_and_a_slow_one_is_not() -> None:
    quick = Rig().measured(load=FAST).load(cpu=8)
    assert (quick.tier, quick.end_tokens, quick.decision.reason) == ("cpu", 1024, LoadReason.LOAD_IS_QUICKER)
    slow = Rig(load=SLOW).measured(load=SLOW).load(cpu=8)
    assert (slow.loads, slow.decision.reason) == (False, LoadReason.RECOMPUTE_IS_QUICKER)


def test_of_a_hit_with_a_slow_part_the_quick_one_is_loaded() -> None:
    rig = Rig(disk=SLOW).measured(load=FAST, disk=SLOW)
    part = rig.load(cpu=4, disk=8)
    assert (part.tier, part.end_tokens) == ("cpu", 512)
    whole = Rig().measured(load=FAST, disk=FAST).load(cpu=4, disk=8)
    assert (whole.tier, whole.end_tokens) == ("fs", 1536)


def test_a_tier_that_is_sick_is_declined() -> None:
    verdict = Rig().measured(load=FAST, disk=FAST).load(disk=8, disk_healthy=False)
    assert (verdict.loads, verdict.decision.reason) == (False, LoadReason.TIER_SICK)


def test_chunks_under_way_for_somebody_else_cost_nothing_more() -> None:
    rig = Rig(disk=SLOW).measured(load=FAST, disk=SLOW)
    assert not rig.load(disk=8).loads
    assert rig.load(disk=8, disk_chunks=0).loads
    slow = Rig(load=SLOW).measured(load=SLOW)
    assert not slow.load(cpu=8).loads
    assert slow.load(cpu=8, cpu_chunks=0, chunks=0).loads


def test_requests_that_wait_for_the_gpu_speak_for_loading() -> None:
    rig = Rig(load=SLOW).measured(load=SLOW)
    assert not rig.load(cpu=8).loads
    for i in range(30):
        rig.admission.queue.arrived(f"waiting-{i}", 2048)
    verdict = rig.load(cpu=8)
    assert verdict.loads
    assert verdict.decision.waiting == 30


def test_while_recomputing_is_unknown_hits_are_loaded_but_for_a_few_that_measure_it() -> None:
    rig = Rig(load=SLOW, recompute_known=False).measured(load=SLOW)
    reasons = [rig.load(cpu=8).decision.reason for _ in range(16)]
    assert (reasons.count(Reason.LEARNING), reasons.count(Reason.MEASURING)) == (14, 2)
    for _ in range(KNOWN_OBSERVATIONS):
        step(rig, [("new", 0, 2048)], recompute_s(MODEL, 0, 2048))
    assert rig.load(cpu=8).decision.reason == LoadReason.RECOMPUTE_IS_QUICKER


def test_a_tier_never_loaded_from_is_tried_once() -> None:
    rig = Rig(disk=SLOW).measured(load=FAST)
    assert rig.load(disk=8).decision.reason == Reason.LEARNING


@pytest.mark.parametrize(("mode", "end"), [(Mode.ALWAYS, 1024), (Mode.NEVER, 0)])
def test_without_the_model_it_is_always_or_never(mode: Mode, end: int) -> None:
    rig = Rig(mode, load=SLOW).measured(load=SLOW)
    assert rig.load(cpu=8).end_tokens == end
    assert rig.store(chain("a")).end_chunk == (None if mode is Mode.ALWAYS else 0)


def test_the_wait_for_the_disk_is_bounded_by_what_recomputing_takes() -> None:
    verdict = Rig().measured(load=FAST, disk=FAST).load(disk=8)
    assert verdict.loads
    assert verdict.wait_s == pytest.approx(3 * recompute_s(MODEL, 0, 2048))


# -- a change of mind


def test_a_disk_that_gets_slow_is_left_and_one_that_recovers_is_found_within_twenty_requests() -> None:
    rig = Rig(disk=FAST).measured(load=FAST, disk=FAST)

    def requests_until(loads: bool, disk: TransferModel) -> int:
        """Each request reads, or has somebody else's probe read, at the disk's true speed."""
        for count in range(1, 100):
            verdict = rig.load(disk=12)
            if verdict.loads or verdict.probe:
                rig.read(disk, 12)
            if verdict.loads is loads:
                return count
        raise AssertionError("it never changed its mind")

    for _ in range(2):
        assert requests_until(False, SLOW) <= 20
        for _ in range(50):  # it stays declined, and looked at now and then
            verdict = rig.load(disk=12)
            assert not verdict.loads
            if verdict.probe:
                rig.read(SLOW, 12)
        assert requests_until(True, FAST) <= 20


def test_probes_are_rare_while_they_find_nothing_new() -> None:
    rig = Rig(disk=SLOW).measured(load=FAST, disk=SLOW)
    probes = 0
    for _ in range(100):
        if rig.load(disk=12).probe:
            probes += 1
            rig.read(SLOW, 12)
    assert 0 < probes <= 100 / PROBE_AFTER_DECLINES


def test_a_copy_that_gets_slow_is_left_and_one_that_recovers_is_found_within_twenty_requests() -> None:
    rig = Rig().measured(load=FAST)

    def requests_until(loads: bool, link: TransferModel) -> int:
        for count in range(1, 100):
            verdict = rig.load(cpu=12)
            if verdict.loads:
                chunks = verdict.end_tokens // CHUNK_TOKENS
                rig.admission.load_began(verdict, chunks)
                seconds = transfer_s(link, chunks * CHUNK_BYTES)
                rig.clock.now_s += seconds
                rig.copy(link, chunks)
                rig.admission.load_ended(verdict, service_s=seconds, loaded_chunks=chunks)
            if verdict.loads is loads and verdict.decision.reason != Reason.EXPLORING:
                return count
        raise AssertionError("it never changed its mind")

    assert requests_until(False, TransferModel(4e7, 1e-3)) <= 20
    assert requests_until(True, FAST) <= 20


def test_chunks_that_do_not_come_from_disk_teach_that_it_is_slow() -> None:
    rig = Rig().measured(load=FAST, disk=FAST)
    for _ in range(20):
        verdict = rig.load(disk=12)
        if not verdict.loads:
            break
        rig.admission.read_waited(chunks=12, chunk_bytes=CHUNK_BYTES, seconds=verdict.wait_s)
    else:
        raise AssertionError("it never declined")


def busy(rig: Rig, step_s: float) -> None:
    """Somebody else decodes, so many seconds a step."""
    step(rig, [("other", 0, 100)], step_s)
    for _ in range(50):
        decode(rig, step_s)


def decode(rig: Rig, step_s: float) -> None:
    rig.admission.queue.step_began(scheduled(cached=[("other", 1000, 1001, 1)]))
    rig.clock.now_s += step_s
    rig.admission.step_ended()


def loaded(rig: Rig, step_s: float, steps: int, *, copy_s: float = 1e-3):
    """A load that ends with the last of so many steps."""
    verdict = rig.load(cpu=12)
    rig.admission.load_began(verdict, 12)
    for _ in range(steps - 1):
        decode(rig, step_s)
    rig.admission.queue.step_began(scheduled(cached=[("other", 1000, 1001, 1)]))
    rig.clock.now_s += step_s
    rig.admission.load_ended(verdict, service_s=copy_s, loaded_chunks=12)
    rig.admission.step_ended()
    return verdict


def test_a_short_hit_is_recomputed_where_the_engines_steps_are_long_and_the_prediction_says_so() -> None:
    rig = Rig().measured(load=FAST)
    idle = rig.load(cpu=12)
    assert idle.loads
    busy(rig, 0.3)  # and recomputing takes 161 ms
    verdict = rig.load(cpu=12)
    assert (verdict.loads, verdict.decision.reason) == (False, LoadReason.RECOMPUTE_IS_QUICKER)
    [alternative], [before] = verdict.decision.alternatives, idle.decision.alternatives
    assert alternative.wait_s == pytest.approx(2 * 0.3)
    assert alternative.seconds == pytest.approx(before.seconds + 3 * 0.3)
    assert verdict.decision.recompute_s == pytest.approx(idle.decision.recompute_s + 0.3)
    for i in range(8):  # all of whom it would keep waiting
        rig.admission.queue.arrived(f"waits-{i}", 1000)
    assert rig.load(cpu=12).loads


def test_what_a_load_waits_for_steps_is_told_and_teaches_no_link_that_it_is_slow() -> None:
    rig = Rig(Mode.ALWAYS).measured(load=FAST)
    busy(rig, 0.3)
    learned = rig.admission.documents()["load"]
    verdict = loaded(rig, 0.3, 2)
    assert verdict.decision.load_s == pytest.approx(0.6)
    assert verdict.decision.wait_s == pytest.approx(0.599)
    assert "load" not in rig.admission.documents()  # nothing new
    rig.copy(FAST, 4)
    assert json.loads(rig.admission.documents()["load"])["count"] == json.loads(learned)["count"] + 1


def test_how_many_steps_a_load_waits_for_is_learned_from_loads() -> None:
    rig = Rig(Mode.ALWAYS).measured(load=FAST)
    busy(rig, 0.1)
    for _ in range(50):
        verdict = loaded(rig, 0.1, 5, copy_s=0.05)
    [alternative] = verdict.decision.alternatives
    assert alternative.wait_s == pytest.approx(5 * 0.1 - 0.05, rel=0.01)
    rig.admission.queue.ended("other")
    assert rig.load(cpu=12).decision.alternatives[0].wait_s == 0


def test_the_load_of_a_request_that_was_aborted_meanwhile_waited_for_steps_too() -> None:
    rig = Rig(Mode.ALWAYS).measured(load=FAST)
    busy(rig, 0.3)
    rig.admission.documents()
    verdict = rig.load(cpu=12)
    rig.admission.load_began(verdict, 12)
    decode(rig, 0.3)
    rig.admission.finished(verdict.decision.request)
    rig.admission.load_ended(verdict, service_s=1e-3, loaded_chunks=12)
    assert "lag" not in rig.admission.documents()  # what an engine takes that has nothing else to do


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(), st.floats(), st.integers(1, 20)), max_size=30))
def test_garbage_waits_leave_the_prediction_a_time(loads: list[tuple[float, float, int]]) -> None:
    rig = Rig(Mode.ALWAYS).measured(load=FAST)
    busy(rig, 0.1)
    for step_s, copy_s, steps in loads:
        verdict = loaded(rig, step_s, steps, copy_s=copy_s)
        rig.clock.now_s = 100.0
        assert 0 <= verdict.decision.wait_s < math.inf
        assert 0 <= verdict.decision.saved_s < math.inf
        [alternative] = rig.load(cpu=12).decision.alternatives
        assert 0 <= alternative.wait_s < math.inf


def test_a_tier_that_costs_more_than_it_gives_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Mode.ALWAYS)
    for _ in range(WINDOW + 5):
        verdict = rig.load(cpu=8)
        rig.admission.load_began(verdict, 8)
        rig.clock.now_s += 10
        rig.admission.load_ended(verdict, service_s=9.9, loaded_chunks=8)
    said = [record.getMessage() for record in caplog.records if "took longer than recomputing" in record.getMessage()]
    assert len(said) == 1
    assert "cpu tier" in said[0]


# -- stores


def test_prompts_that_never_repeat_are_soon_not_stored_and_those_that_do_still_are() -> None:
    rig = Rig().measured(load=FAST)
    accepted = [rig.store(chain(f"once-{i}")).end_chunk for i in range(200)]
    assert accepted[0] is None
    assert accepted[100:] == [0] * 100
    rig = Rig().measured(load=FAST)
    for i in range(50):
        assert rig.store(chain(f"shared-{i % 5}")).end_chunk is None, i


def test_what_was_refused_is_known_by_key_so_a_second_use_counts() -> None:
    rig = Rig().measured(load=FAST)
    for i in range(100):
        rig.store(chain(f"once-{i}"))
    assert rig.store(chain("twice")).end_chunk == 0
    assert rig.store(chain("twice")).end_chunk != 0


def test_a_refusal_names_its_keys_and_its_reason() -> None:
    rig = Rig().measured(load=FAST)
    for i in range(100):
        rig.store(chain(f"once-{i}"))
    rig.told.clear()
    keys = chain("new")
    verdict = rig.store(keys)
    [decision] = rig.told
    assert (decision.reason, verdict.reason) == (StoreReason.NOT_WORTH_IT, StoreReason.NOT_WORTH_IT)
    assert list(decision.refused) == keys


def test_until_recomputing_is_known_and_for_the_first_requests_everything_is_stored() -> None:
    rig = Rig(recompute_known=False)
    assert {rig.store(chain(f"once-{i}")).end_chunk for i in range(200)} == {None}
    rig = Rig()
    first = [rig.store(chain(f"once-{i}")) for i in range(STORED_UNASKED)]
    assert {(verdict.end_chunk, verdict.reason) for verdict in first} == {(None, Reason.LEARNING)}


def each_prompt_comes_back(rig: Rig) -> Rig:
    """So that it pays to have each in memory."""
    for i in range(100):
        rig.store(chain(f"pair-{i // 2}"))
    return rig


def test_a_disk_gets_what_is_worth_a_write_and_memory_the_rest() -> None:
    cheap = each_prompt_comes_back(Rig().measured(load=FAST, disk=FAST))
    assert cheap.store(chain("new")).disk_reason == ""
    new = cheap.store(chain("other"), disk=Room.FREE)
    assert (new.end_chunk, new.disk_end_chunk, new.disk_reason) == (None, None, StoreReason.WORTH_IT)
    dear = each_prompt_comes_back(Rig(disk_write_bytes_per_s=1e6).measured(load=FAST, disk=FAST))
    new = dear.store(chain("new"), disk=Room.FREE)
    assert (new.end_chunk, new.disk_end_chunk, new.disk_reason) == (None, 0, StoreReason.NOT_WORTH_IT)
    told = dear.told[-1]
    assert (told.end_tokens, told.disk_end_tokens, told.disk_refused_count) == (2048, 0, 16)
    there = dear.store(chain("other"), disk=Room.FREE, on_disk=16)
    assert (there.end_chunk, there.disk_end_chunk, there.disk_reason) == (None, 16, StoreReason.PRESENT)


def test_a_tier_that_is_full_asks_more_than_one_with_room() -> None:
    """Of chunks whose writing costs ever less, a full one takes some, and only such as the other takes too."""
    taken: dict[tuple[str, bool], list[bool]] = {}
    for rate in np.geomspace(1e6, 1e9, 13):
        for full in (False, True):
            slow_copies = each_prompt_comes_back(Rig(store=TransferModel(rate, 0.0)).measured(load=FAST))
            taken.setdefault(("cpu", full), []).append(slow_copies.store(chain("new"), tier_full=full).end_chunk != 0)
            slow_writes = each_prompt_comes_back(Rig(disk_write_bytes_per_s=rate).measured(load=FAST, disk=FAST))
            room = Room.FULL if full else Room.FREE
            disk_end = slow_writes.store(chain("new"), disk=room).disk_end_chunk
            taken.setdefault(("fs", full), []).append(disk_end != 0)
    for tier in ("cpu", "fs"):
        assert 0 < sum(taken[tier, True]) < sum(taken[tier, False])
        assert all(free >= full for free, full in zip(taken[tier, False], taken[tier, True], strict=True))


def test_a_disk_that_takes_longer_to_read_than_to_recompute_gets_nothing() -> None:
    rig = each_prompt_comes_back(Rig(disk=SLOW).measured(load=FAST, disk=SLOW))
    verdict = rig.store(chain("new"), disk=Room.FREE)
    assert (verdict.end_chunk, verdict.disk_end_chunk) == (None, 0)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(0, 20), st.integers(0, 20), st.sampled_from(Room)),
        max_size=40,
    ),
    st.booleans(),
    st.floats(1e5, 1e10),
)
def test_a_store_is_a_prefix_that_holds_what_is_there(
    uses: list[tuple[int, int, int, int, Room]], full: bool, disk_write_bytes_per_s: float
) -> None:
    rig = Rig(disk_write_bytes_per_s=disk_write_bytes_per_s).measured(load=FAST)
    for name, chunks, present, on_disk, disk in uses:
        keys = chain(str(name), chunks)
        held, below = (np.arange(chunks) < count for count in (present, on_disk))
        verdict = rig.admission.store(
            "r", keys, held, chunk_bytes=CHUNK_BYTES, tier_full=full, disk=disk, on_disk=below
        )
        assert verdict.end_chunk is None or min(present, chunks) <= verdict.end_chunk <= chunks
        if verdict.disk_reason:
            assert disk is not Room.NOT_ASKED
            assert verdict.disk_end_chunk is None or min(on_disk, chunks) <= verdict.disk_end_chunk <= chunks


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_equal_requests_are_decided_alike_in_any_order(lengths: list[int], rng: object) -> None:
    def decided(order: list[int]) -> dict[int, list[tuple[str, int]]]:
        rig = Rig(disk=SLOW).measured(load=FAST, disk=SLOW)
        verdicts: dict[int, list[tuple[str, int]]] = {}
        for length in order:
            verdict = rig.load(cpu=length, disk=0)
            verdicts.setdefault(length, []).append((verdict.tier, verdict.end_tokens))
        return verdicts

    shuffled = list(lengths)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decided(lengths) == decided(shuffled)


# -- what is seen of the engine


def step(rig: Rig, new: list[tuple[str, int, int]], seconds: float) -> None:
    for name, _, end in new:
        rig.admission.queue.arrived(name, end)
    rig.admission.queue.step_began(scheduled(new))
    rig.clock.now_s += seconds
    rig.admission.step_ended()


def scheduled(
    new: list[tuple[str, int, int]] = (), cached: list[tuple[str, int, int, int]] = (), preempted: list[str] = ()
) -> SimpleNamespace:
    """new: request, first token, end token; cached: the same, and how many tokens it has generated."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=first) for name, first, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            num_computed_tokens=[first for _, first, _, _ in cached],
            num_output_tokens=[outputs for *_, outputs in cached],
        ),
        num_scheduled_tokens={name: end - first for name, first, end in new}
        | {name: end - first for name, first, end, _ in cached},
        preempted_req_ids=preempted,
        finished_req_ids=(),
    )


def queue_of() -> tuple[EngineQueue, Clock, RecomputeCalibration]:
    clock, calibration = Clock(), RecomputeCalibration(MODEL)
    return EngineQueue(calibration, clock), clock, calibration


def test_waiting_requests_are_counted_from_what_passes_by() -> None:
    queue, _, _ = queue_of()
    for name in "abcd":
        queue.arrived(name, 1000)
    assert queue.seen_by("a", MODEL).waiting_count == 3
    queue.step_began(scheduled([("a", 0, 512)]))
    assert queue.seen_by("b", MODEL).waiting_count == 2
    assert queue.seen_by("b", MODEL).backlog_s == pytest.approx(recompute_s(MODEL, 512, 1000))
    queue.step_began(scheduled(cached=[("a", 512, 1000, 0)], new=[("b", 0, 100)]))
    assert queue.seen_by("c", MODEL).backlog_s == pytest.approx(recompute_s(MODEL, 100, 1000))
    queue.loads("d")
    assert queue.seen_by("c", MODEL).waiting_count == 0
    queue.loaded("d")
    queue.step_began(scheduled(preempted=["b"]))
    assert queue.seen_by("c", MODEL) == GpuQueue(2, 0.0)
    queue.ended("b")
    queue.ended("d")
    assert queue.seen_by("c", MODEL) == GpuQueue(0, 0.0)


def test_steps_that_overlap_are_timed_one_after_the_other() -> None:
    queue, clock, calibration = queue_of()
    queue.step_began(scheduled([("a", 0, 1000)]))
    clock.now_s += 0.1
    queue.step_began(scheduled([("b", 0, 1000)]))
    clock.now_s += recompute_s(MODEL, 0, 1000) - 0.1
    queue.step_ended()
    clock.now_s += recompute_s(MODEL, 0, 1000)
    queue.step_ended()
    assert calibration.estimate.observation_count == 2
    assert calibration.estimate.scale == pytest.approx(1.0, rel=0.01)


def test_a_load_waits_for_steps_like_those_of_late_where_there_are_others_to_compute_for() -> None:
    queue, clock, _ = queue_of()
    assert queue.step_wait("x", 2) == StepWait()
    queue.arrived("a", 1000)
    for _ in range(2):  # one prompt computed with the first, and then it decodes
        queue.step_began(scheduled([("a", 0, 1000)]) if queue.seen_by("x", MODEL).step_s == 0 else scheduled())
        clock.now_s += 0.5
        queue.step_ended()
    assert queue.step_wait("x", 2) == StepWait(1.0, 2.0)
    assert queue.step_wait("a", 2) == StepWait()  # for itself it does not wait
    for _ in range(200):
        queue.step_began(scheduled(cached=[("a", 1000, 1001, 1)]))
        clock.now_s += 0.01
        queue.step_ended()
    assert queue.step_wait("x", 2).seconds == pytest.approx(0.02, rel=0.01)
    assert queue.step_wait("x", 2).passing_count < 0.01
    queue.arrived("b", 1000)
    assert queue.step_wait("a", 2).seconds > 0
    for name in "ab":
        queue.ended(name)
    assert queue.step_wait("x", 2) == StepWait()
    queue.arrived("x", 1000)
    queue.arrived("y", 1000)
    assert queue.step_wait("x", 2) == StepWait()  # the engine had nothing to do: it is not known yet


@given(st.lists(st.one_of(st.sampled_from([0.0, -5.0, 1e9, math.nan, math.inf, 3000.0]), st.floats(-10, 10))))
def test_garbage_step_times_leave_a_wait_that_is_a_time_and_that_good_ones_soon_mend(jumps: list[float]) -> None:
    queue, clock, _ = queue_of()
    queue.arrived("a", 1000)
    queue.step_began(scheduled([("a", 0, 1000)]))
    queue.step_ended()
    for jump in [*jumps, *[0.01] * 200]:
        queue.step_began(scheduled(cached=[("a", 1000, 1001, 1)]))
        clock.now_s += jump
        queue.step_ended()
        assert 0 <= queue.step_wait("x", 2).seconds <= 2 * STEP_S_MAX
        clock.now_s = clock.now_s if 0 <= clock.now_s < 1e6 else 100.0
    assert queue.step_wait("x", 2).seconds == pytest.approx(0.02, rel=0.1)


def test_outputs_without_a_step_and_steps_without_outputs_are_harmless() -> None:
    queue, clock, calibration = queue_of()
    queue.step_ended()
    queue.step_began(scheduled())  # no tokens: nothing is timed
    queue.step_ended()
    for _ in range(3 * STEPS_OPEN_MAX):
        queue.step_began(scheduled([("a", 0, 1000)]))
        clock.now_s += 1e-4
    assert calibration.estimate.observation_count == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.sampled_from([0.0, -5.0, 1e9, math.nan, math.inf]), st.floats(-10, 10)), max_size=60))
def test_a_clock_that_jumps_poisons_nothing(jumps: list[float]) -> None:
    rig = Rig(disk=FAST).measured(load=FAST, disk=FAST)
    for jump in jumps:
        rig.admission.queue.step_began(scheduled([("a", 0, 1000)]))
        verdict = rig.load(cpu=4)
        rig.admission.load_began(verdict, 4)
        rig.clock.now_s += jump
        rig.admission.step_ended()
        rig.admission.load_ended(verdict, service_s=jump, loaded_chunks=4)
        for store in (True, False):
            rig.admission.copied(store=store, chunks=4, chunk_bytes=CHUNK_BYTES, seconds=jump)
        rig.admission.read(chunks=4, chunk_bytes=CHUNK_BYTES, seconds=jump)
        rig.admission.read_waited(chunks=4, chunk_bytes=CHUNK_BYTES, seconds=jump)
        rig.clock.now_s = 100.0
    model = rig.admission.recompute_model
    assert 0 < recompute_s(model, 0, 8192) < math.inf
    for decision in rig.told:
        assert all(0 <= each.seconds < math.inf for each in decision.alternatives)
        for seconds in (decision.recompute_s, decision.load_s, decision.saved_s, decision.first_token_s):
            assert 0 <= seconds < math.inf


def test_a_link_is_busy_as_long_as_was_predicted_and_not_after_the_last_has_ended() -> None:
    clock = Clock()
    link = LinkQueue(clock)
    assert link.backlog_s == 0
    link.began(2.0)
    link.began(3.0)
    clock.now_s += 1
    assert (link.backlog_s, link.under_way) == (4.0, 2)
    link.ended()
    link.ended()
    assert link.backlog_s == 0


def test_what_one_engine_learned_another_goes_on_from() -> None:
    rig = Rig(recompute_known=False).measured(load=SLOW, disk=FAST)
    for _ in range(10):
        step(rig, [("new", 0, 2048)], 5 * recompute_s(MODEL, 0, 2048))
    documents = rig.admission.documents()
    assert set(documents) == {"recompute", "load", "disk"}
    assert rig.admission.documents() == {}  # nothing new
    other = Rig(recompute_known=False)
    other.admission.restore({**documents, "unknown": "{}", "store": "not JSON", "lag": "[]"})
    assert other.admission.known
    assert other.admission.recompute_model == rig.admission.recompute_model
    assert other.admission.documents() == {}


def test_the_head_of_a_lookup_is_counted() -> None:
    assert leading(bytes([1, 1, 2, 1]), 2, 3) == 2
    assert leading(b"", 1) == 0


def test_a_guess_that_was_far_off_is_known_better_after_a_few_steps_and_by_the_next_engine() -> None:
    rig = Rig(recompute_known=False)
    for _ in range(KNOWN_OBSERVATIONS + 1):
        assert not rig.admission.known or rig.admission.queue.prefill_steps >= KNOWN_OBSERVATIONS
        step(rig, [("new", 0, 2048)], 1000 * recompute_s(MODEL, 0, 2048))
    assert rig.admission.known
    other = Rig(recompute_known=False)
    other.admission.restore(rig.admission.documents())
    assert other.admission.known
