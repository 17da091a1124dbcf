"""Admission under vLLM's real scheduler: what is declined is neither leased nor loaded, and the tokens stay right."""

import os

import numpy as np
import pytest

pytest.importorskip("vllm")
os.environ.setdefault("PYTHONHASHSEED", "0")

from vllm.lora.request import LoRARequest

from connector import metrics
from connector.adapters import derived_keys
from kvstore.admission import DISK_WRITE_PRICE, PROBE_AFTER_DECLINES, Admission, Mode, Priors, Reason, StoreVerdict
from kvstore.costmodel import LoadReason, RecomputeModel, StoreReason, TransferModel
from kvstore.decisions import Room
from tests.unit.connector_engine import PretendEngine

PROMPT = list(range(41))  # 10 full blocks: 5 chunks of 2
CHUNK_TOKENS = 8
GPU = RecomputeModel(1e-3, 1e-3, 0.0, scale=1.0)
FAST, SLOW = TransferModel(1e9, 1e-5), TransferModel(1e3, 1e-5)  # a chunk has 128 bytes


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine_of(
    *,
    mode: Mode = Mode.MODEL,
    load: TransferModel = FAST,
    disk: TransferModel = FAST,
    disk_write_bytes_per_s: float = 1e9,
    **extra: object,
) -> PretendEngine:
    engine = PretendEngine(extra={"prefetch_policy": "wait_complete", **extra})
    clock = Clock()
    engine.use(clock=clock)
    priors = Priors(
        recompute=GPU,
        load=load,
        store=FAST,
        disk=disk,
        disk_write_bytes_per_s=disk_write_bytes_per_s,
        recompute_known=True,
    )
    admission = Admission(mode, priors, tokens_per_chunk=CHUNK_TOKENS, clock=clock, uniform=lambda: 0.5)
    for _ in range(4):
        admission.copied(store=False, chunks=4, chunk_bytes=128, seconds=load.overhead_s + 512 / load.bytes_per_s)
        admission.read(chunks=4, chunk_bytes=128, seconds=disk.overhead_s + 512 / disk.bytes_per_s)
    engine.use(admission=admission)
    engine.half._introduced = None
    return engine


def becomes(engine: PretendEngine, *, load: TransferModel) -> None:
    for _ in range(6):
        engine.half._admission.copied(store=False, chunks=4, chunk_bytes=128, seconds=512 / load.bytes_per_s)


def loads(engine: PretendEngine):
    """Of hits, the newest first."""
    return [each for each in reversed(engine.steps.told) if not each.is_store and each.reason != LoadReason.NO_HIT]


def warm(engine: PretendEngine, req_id: str, prompt: list[int] = PROMPT) -> list[int]:
    assert engine.scheduler.reset_prefix_cache()
    return list(engine.serve(req_id, prompt).output_token_ids)


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_a_hit_that_pays_is_loaded_and_what_came_of_it_is_told():
    engine = engine_of()
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    assert warm(engine, "warm") == cold
    assert engine.daemon.hits == 5
    decision = loads(engine)[0]
    assert (decision.request, decision.reason, decision.tier) == ("warm", LoadReason.LOAD_IS_QUICKER, "cpu")
    assert (decision.cpu_tokens, decision.hit_tokens, decision.end_tokens) == (40, 40, 40)
    assert decision.outcome == "loaded"


def test_a_hit_that_does_not_pay_is_recomputed_and_holds_no_lease():
    engine = engine_of()
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    becomes(engine, load=SLOW)
    assert engine.scheduler.reset_prefix_cache()
    request = engine.add("warm", PROMPT)
    engine.step()
    assert not +engine.daemon.leases
    engine.run()
    assert list(request.output_token_ids) == cold
    assert (engine.daemon.hits, engine.metric(metrics.LOADED_CHUNKS)) == (0, 0)
    decision = loads(engine)[0]
    assert (decision.reason, decision.outcome) == (LoadReason.RECOMPUTE_IS_QUICKER, "recomputed")


def test_what_is_told_of_an_adapters_chunks_names_them_as_the_store_does(monkeypatch):
    engine, digest = engine_of(), b"a" * 32
    monkeypatch.setattr(engine.connector._adapters, "digest", lambda *_, **__: digest)
    monkeypatch.setattr("kvstore.admission.STORED_UNASKED", 0)
    monkeypatch.setattr(
        engine.half._admission, "decide_store", lambda *_, **__: StoreVerdict(2, StoreReason.NOT_WORTH_IT)
    )
    engine.daemon.on_commit = lambda *_: None  # it knows a chunk's bytes by vLLM's hash
    request = engine.serve("cold", PROMPT, lora_request=LoRARequest("adapter", 1, "/adapter"))
    chain = derived_keys(list(request.block_hashes[1:10:2]), digest)
    load, store = (next(each for each in engine.steps.told if each.is_store == is_store) for is_store in (False, True))
    assert [key for _, _, key in engine.daemon.stored] == chain[:2]
    assert (list(load.refused), list(store.refused)) == (chain[:1], chain[2:])


def test_for_a_request_that_has_ended_no_load_waits_though_vllm_says_more_of_it_only_in_the_next_step():
    engine = engine_of()
    request = engine.add("cold", PROMPT, max_tokens=1)
    queue = engine.half._admission.queue
    while not request.is_finished():
        engine.step()
    queue._step_s, queue._step_prefills, queue._steps_averaged = 0.1, 1.0, 1
    assert queue.step_wait("other", 2).seconds == 0
    engine.add("more", PROMPT[::-1])
    engine.step()
    queue._step_s, queue._step_prefills, queue._steps_averaged = 0.1, 1.0, 1
    assert queue.step_wait("other", 2).seconds > 0


def test_never_neither_loads_nor_stores():
    engine = engine_of(mode=Mode.NEVER)
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    assert not engine.daemon.stored
    assert warm(engine, "warm") == cold


def keep_in_memory(engine: PretendEngine, chunks: int) -> None:
    """The head of PROMPT, and nothing else; the rest is on disk."""
    keys = engine.requests["cold"].block_hashes[1:10:2]
    engine.daemon.demote_all()
    for place in list(engine.daemon.on_disk):
        if place[2] in keys[:chunks]:
            engine.daemon.stored[place] = engine.daemon.on_disk.pop(place)


def test_the_part_in_memory_is_loaded_and_the_part_on_a_slow_disk_is_not():
    engine = engine_of(disk=SLOW)
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    keep_in_memory(engine, 2)
    assert warm(engine, "warm") == cold
    assert (engine.daemon.hits, engine.daemon.fs_hits, len(engine.daemon.pending)) == (2, 0, 0)
    decision = loads(engine)[0]
    assert (decision.cpu_tokens, decision.hit_tokens, decision.end_tokens, decision.tier) == (16, 40, 16, "cpu")


def test_a_request_is_decided_about_once_while_it_waits():
    engine = engine_of()
    engine.serve("cold", PROMPT)
    keep_in_memory(engine, 2)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("warm", PROMPT)
    for _ in range(20):
        engine.step()
    assert {decision.number for decision in loads(engine)} == {loads(engine)[0].number}
    engine.daemon.land()
    engine.run()
    assert (engine.daemon.fs_hits, engine.daemon.hits) == (3, 2)
    assert {decision.number for decision in loads(engine)} == {loads(engine)[0].number}


def test_a_load_that_waits_longer_for_blocks_than_recomputing_takes_is_decided_about_anew():
    engine = engine_of()
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("holds all blocks", [number + 100 for number in range(120)], max_tokens=20)
    request = engine.add("warm", PROMPT)
    for _ in range(10):
        engine.step()
    becomes(engine, load=SLOW)
    engine.step()
    assert len(loads(engine)) == 1
    assert not +engine.daemon.leases
    engine.half._clock.now_s += 3 * (1e-3 + 41e-3) + 0.001
    engine.run()
    assert list(request.output_token_ids) == cold
    assert engine.daemon.hits == 0
    last, first = loads(engine)[0], loads(engine)[-1]
    assert (first.reason, first.outcome) == (LoadReason.LOAD_IS_QUICKER, "")
    assert (last.reason, last.outcome) == (LoadReason.RECOMPUTE_IS_QUICKER, "recomputed")


def test_a_disk_that_does_not_answer_in_time_is_given_up_and_what_is_in_memory_is_loaded():
    engine = engine_of()
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    keep_in_memory(engine, 2)
    assert engine.scheduler.reset_prefix_cache()
    request = engine.add("warm", PROMPT)
    engine.step()
    assert len(engine.daemon.pending) == 3
    engine.half._clock.now_s += 3 * (1e-3 + 41e-3) + 0.001
    engine.run()
    assert list(request.output_token_ids) == cold
    assert (engine.daemon.hits, engine.daemon.fs_hits) == (2, 0)
    last, first = loads(engine)[0], loads(engine)[-1]
    assert (first.tier, first.outcome) == ("fs", "not read from disk in time")
    assert (last.tier, last.end_tokens, last.outcome) == ("cpu", 16, "loaded")
    assert engine.half._admission._links["fs"].under_way == 0
    assert engine.daemon.unwaited == set(engine.requests["cold"].block_hashes[5:10:2])


def test_a_disk_that_was_declined_is_read_from_for_nobody_and_loaded_from_once_it_is_found_quick():
    engine = engine_of(disk=SLOW)
    engine.serve("cold", PROMPT)
    keep_in_memory(engine, 0)
    warmed = 0
    while not engine.daemon.fs_hits:
        keep_in_memory(engine, 0)  # recomputed chunks are stored in memory again
        assert engine.scheduler.reset_prefix_cache()
        engine.add(f"warm-{warmed}", PROMPT)
        for _ in range(3):
            engine.step()
        if engine.daemon.pending:
            engine.daemon.reads.append((len(engine.daemon.pending), 1e-3))
            engine.daemon.land()
        engine.run()
        warmed += 1
        assert warmed <= 20
    assert warmed > PROBE_AFTER_DECLINES
    assert engine.daemon.unwaited
    assert loads(engine)[0].tier == "fs"


def test_of_a_chain_only_the_admitted_prefix_is_stored_and_the_refused_keys_are_told():
    engine = engine_of()
    admission = engine.half._admission
    for i in range(400):
        chain = [f"{i}.{j}".encode() for j in range(16)]
        admission.store("r", chain, np.zeros(16, bool), chunk_bytes=128, tier_full=False)
    engine.link.current.session.table.arena_bytes = 1 << 30  # where slots are kept ready for what will be stored
    engine.serve("once", PROMPT)
    assert not engine.daemon.stored
    assert engine.metric(metrics.UNADMITTED_STORES) >= 5
    [decision] = [decision for decision in engine.steps.told if decision.is_store]
    assert decision.reason == StoreReason.NOT_WORTH_IT
    assert list(decision.refused) == engine.requests["once"].block_hashes[1:10:2]
    assert not engine.daemon.granted


def test_what_the_disk_is_not_to_have_is_said_with_the_commit_and_taken_back_when_it_is_worth_it():
    engine = engine_of(disk_write_bytes_per_s=128 * DISK_WRITE_PRICE / 3e-3)  # 3 ms to save for each chunk written
    engine.steps.fs = Room.FREE
    admission = engine.half._admission
    for i in (*range(60), *(i % 15 for i in range(150))):  # a quarter comes back, and then often
        chain = [f"{i}.{j}".encode() for j in range(16)]
        admission.store("r", chain, np.zeros(16, bool), chunk_bytes=128, tier_full=False)
    engine.serve("once", PROMPT)
    assert set(engine.steps.memory_only) == set(engine.requests["once"].block_hashes[1:10:2])
    assert not any(engine.steps.worth_disk)
    decision = next(each for each in reversed(engine.steps.told) if each.is_store)
    assert (decision.reason, decision.disk_reason) == (StoreReason.WORTH_IT, StoreReason.NOT_WORTH_IT)
    assert (decision.end_tokens, decision.disk_end_tokens, decision.disk_refused_count) == (40, 0, 5)
    engine.steps.memory_only.clear()
    warm(engine, "twice")
    assert engine.steps.worth_disk[-1] == tuple(engine.requests["twice"].block_hashes[1:10:2])
    assert engine.steps.memory_only == []


def test_commits_name_the_decision_that_said_how_many_there_would_be():
    engine = engine_of()
    engine.serve("cold", PROMPT)
    [decision] = [each for each in engine.steps.told if each.is_store]
    assert decision.chunks == 5
    assert engine.steps.committed_for == [decision.number] * 5
    warm(engine, "warm")
    assert [each for each in engine.steps.told if each.is_store][-1].chunks == 0


def test_what_got_no_slot_is_told_with_the_reason():
    engine = engine_of()
    engine.daemon.free = engine.daemon.free[:2]
    engine.serve("cold", PROMPT)
    _, refused = [each for each in engine.steps.told if each.is_store]
    assert (refused.request, refused.reason, refused.end_tokens) == ("cold", "TIER_FULL", 2 * CHUNK_TOKENS)
    assert list(refused.refused) == engine.requests["cold"].block_hashes[5:10:2]


@pytest.mark.parametrize(
    ("tiers", "reason"), [([], Reason.LEFT_OUT), ([{"medium": "CPU"}], LoadReason.LOAD_IS_QUICKER)]
)
def test_a_tier_that_the_request_left_out_is_the_reason_when_it_has_the_chunks(tiers, reason):
    engine = engine_of()
    engine.serve("cold", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    sampling = {"extra_args": {"kv_transfer_params": {"kv_load_tiers": tiers}}}
    engine.serve("warm", PROMPT, sampling=sampling)
    engine.serve("other", [each + 1000 for each in PROMPT], sampling=sampling)
    loads = [each for each in engine.steps.told if not each.is_store]
    [hit] = {each.reason for each in loads if each.request == "warm"}
    [missed] = {each.reason for each in loads if each.request == "other"}
    assert (hit, missed) == (reason, LoadReason.NO_HIT)


def test_what_was_learned_goes_to_the_daemon_and_comes_from_it():
    engine = engine_of()
    engine.serve("cold", PROMPT)
    engine.half._clock.now_s += 10
    engine.serve("other", PROMPT[::-1])
    assert {"load", "disk"} <= set(engine.steps.learned)
    other = engine_of(load=SLOW)
    priors = Priors(recompute=GPU, load=FAST, store=FAST, disk=FAST)
    other.use(admission=Admission(Mode.MODEL, priors, tokens_per_chunk=CHUNK_TOKENS))
    other.steps.learned_there = dict(engine.steps.learned)
    other.serve("cold", PROMPT)
    assert other.half._admission.documents().keys() <= {"recompute", "store"}


def test_an_engine_that_knows_nothing_yet_stores_and_loads():
    engine = PretendEngine(extra={"admission": "model"})
    cold = list(engine.serve("cold", PROMPT).output_token_ids)
    assert warm(engine, "warm") == cold
    assert engine.daemon.hits == 5
    assert {decision.reason for decision in engine.steps.told} == {Reason.LEARNING, LoadReason.NO_HIT}
    [missed] = {tuple(each.refused) for each in engine.steps.told if each.reason == LoadReason.NO_HIT}
    assert missed == (engine.requests["cold"].block_hashes[1],)
