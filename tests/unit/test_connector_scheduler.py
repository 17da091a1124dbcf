"""The scheduler half under vLLM's real scheduler (see `connector_engine`): what is loaded, stored, refused, counted."""

import itertools
import logging
import math
import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm")
os.environ.setdefault("PYTHONHASHSEED", "0")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading_scheduler
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector import compat, metrics
from connector.requests import Rules
from connector.stores import STORE_WAIT_S
from kvstore._native import class_bytes
from kvstore.limits import GRANTS_IDLE_S, RESERVE_SHARE
from tests.unit.connector_engine import BLOCK_TOKENS, STATE, PretendEngine, needs_states
from tests.unit.native_store import NAMESPACE, TENANT, native_store

PROMPT = list(range(41))  # 10 full blocks: 5 chunks of 2


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def engine():
    return PretendEngine()


def empty_own_cache(engine):
    assert engine.scheduler.reset_prefix_cache()


def warm(engine, req_id, prompt=PROMPT, **fields):
    empty_own_cache(engine)
    return engine.serve(req_id, prompt, **fields)


def stored_keys(engine):
    return [key for _, _, key in engine.daemon.stored]


# ---- the plain path


def test_a_cold_prompt_is_stored_and_a_warm_one_loaded_whole(engine):
    cold = engine.serve("cold", PROMPT)
    assert len(engine.daemon.stored) == 5
    assert (engine.daemon.misses, engine.daemon.hits) == (5, 0)
    hot = warm(engine, "warm")
    assert (engine.daemon.misses, engine.daemon.hits) == (5, 5)
    assert list(hot.output_token_ids) == list(cold.output_token_ids)
    assert engine.metric(metrics.STORED_CHUNKS) == 5
    assert engine.metric(metrics.LOADED_CHUNKS) == 5
    assert engine.metric(metrics.FAILED_LOADS) == 0


def test_each_chunk_names_the_one_before_it_as_parent(engine):
    engine.serve("cold", PROMPT)
    keys = engine.requests["cold"].block_hashes[1:10:2]
    assert stored_keys(engine) == keys
    assert [engine.daemon.parents[key] for key in keys] == [b"", *keys[:-1]]


def test_the_answer_is_stored_too_so_that_the_next_turn_finds_it(engine):
    turn = engine.serve("turn-1", PROMPT, max_tokens=10)
    history = PROMPT + list(turn.output_token_ids)
    warm(engine, "turn-2", [*history, 1, 2, 3])
    assert engine.daemon.hits == (len(history) - 1) // (2 * BLOCK_TOKENS)  # the last token has no KV


def test_with_offload_prompt_only_it_is_not():
    engine = PretendEngine(extra={"offload_prompt_only": True})
    engine.serve("turn-1", PROMPT, max_tokens=20)
    assert len(engine.daemon.stored) == 5


def test_only_what_the_engine_lacks_is_loaded(engine):
    engine.serve("cold", PROMPT)
    empty_own_cache(engine)
    engine.serve("short", PROMPT[:17])  # 2 chunks loaded, and now in the engine's own cache
    assert engine.daemon.hits == 2
    engine.serve("long", PROMPT)
    assert engine.daemon.hits == 5


def test_a_load_may_begin_in_the_middle_of_a_chunk(engine):
    engine.serve("cold", PROMPT)
    empty_own_cache(engine)
    engine.use(rules=Rules(loads=False, stores=False, stores_answers=False, require_cache_salt=False))
    engine.serve("odd", PROMPT[:13], max_tokens=1)  # 3 blocks: a chunk and a half
    engine.use(rules=Rules(loads=True, stores=True, stores_answers=True, require_cache_salt=False))
    engine.serve("long", PROMPT)
    assert engine.daemon.hits == 4


def test_a_step_asks_the_table_once_for_all_keys(engine):
    engine.serve("cold", PROMPT)
    empty_own_cache(engine)
    table = engine.link.current.session.table
    table.lookups = 0
    engine.add("warm", PROMPT, max_tokens=1)
    engine.step()
    assert table.lookups == 1


def test_a_prefix_that_the_gpu_holds_stays_young_in_the_store(engine):
    engine.serve("cold", PROMPT)
    engine.daemon.touched.clear()
    engine.serve("again", PROMPT)  # from the engine's own cache; vLLM never says touch
    assert tuple(stored_keys(engine)) in engine.daemon.touched
    assert engine.daemon.hits == 0


def prompt_keys(request):
    return request.block_hashes[1:10:2]


def test_one_request_is_one_use_of_each_chunk_however_often_the_daemon_hears_of_it(engine):
    cold = engine.serve("cold", PROMPT, max_tokens=20)  # its prompt takes two steps
    answer = [key for key in cold.block_hashes[1::2] if key not in prompt_keys(cold)]
    assert [engine.daemon.used[key] for key in prompt_keys(cold)] == [1] * 5
    assert [engine.daemon.used[key] for key in answer][:2] == [1, 1]
    engine.serve("from the engine's own cache", PROMPT)
    assert [engine.daemon.used[key] for key in prompt_keys(cold)] == [2] * 5
    warm(engine, "from the store")
    assert engine.daemon.hits == 5
    assert [engine.daemon.used[key] for key in prompt_keys(cold)] == [3] * 5


def test_an_engine_that_only_loads_uses_what_it_loads(engine):
    cold = engine.serve("cold", PROMPT)
    engine.daemon.used.clear()
    engine.use(rules=replace(engine.half._rules, stores=False))
    warm(engine, "warm")
    assert engine.daemon.hits == 5
    assert [engine.daemon.used[key] for key in prompt_keys(cold)] == [1] * 5


def test_a_chunk_that_could_not_be_stored_was_used_all_the_same():
    engine = PretendEngine(slots=3)
    request = engine.serve("cold", PROMPT)
    assert len(engine.daemon.stored) == 3
    assert [engine.daemon.used[key] for key in prompt_keys(request)] == [1] * 5
    engine.serve("again", PROMPT)
    assert [engine.daemon.used[key] for key in prompt_keys(request)] == [2] * 5


def test_a_single_token_on_an_idle_engine_is_committed_without_a_further_request(engine):
    engine.serve("one", PROMPT, max_tokens=1)
    assert len(engine.daemon.stored) == 5


# ---- who may


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "a")])
def test_another_tenant_finds_nothing(engine, salts):
    engine.serve("cold", PROMPT, salt=salts[0])
    warm(engine, "other", salt=salts[1])
    assert engine.daemon.hits == 0
    warm(engine, "same", salt=salts[0])
    assert engine.daemon.hits == 5


def test_an_empty_salt_is_none(engine):
    engine.serve("cold", PROMPT)
    warm(engine, "warm", salt="")
    assert engine.daemon.hits == 5


@pytest.mark.parametrize("by", ["engine", "daemon"])
def test_where_a_salt_is_required_requests_without_one_are_left_alone(by):
    engine = PretendEngine(extra={"require_cache_salt": by == "engine"})
    if by == "daemon":
        engine.start_daemon("strict")
        engine.link.current.session.require_cache_salt = True
    engine.serve("bare", PROMPT)
    assert not engine.daemon.stored
    assert engine.daemon.misses == 0
    engine.serve("salted", PROMPT, salt="a")
    assert len(engine.daemon.stored) == 5
    warm(engine, "bare-again")
    assert engine.daemon.hits == 0


def test_requests_with_an_unknown_adapter_are_neither_stored_nor_loaded_and_it_is_said_once(engine, caplog):
    adapter = LoRARequest("adapter", 1, "/adapter")
    with caplog.at_level(logging.WARNING, logger="vllm.connector.scheduler"):
        engine.serve("lora", PROMPT, lora_request=adapter)
        warm(engine, "lora-again", lora_request=adapter)
    assert not engine.daemon.stored
    assert (engine.daemon.hits, engine.daemon.misses) == (0, 0)
    said = [record.message for record in caplog.records if record.name == "vllm.connector.scheduler"]
    assert sum("LoRA" in message for message in said) == 1


def test_an_adapter_finds_only_what_was_stored_with_the_same_files(engine, monkeypatch):
    adapter = LoRARequest("adapter", 1, "/adapter")
    monkeypatch.setattr(engine.connector._adapters, "digest", lambda *_, **__: b"a" * 32)
    engine.daemon.on_commit = lambda *_: None  # it knows a chunk's bytes by vLLM's hash
    first = engine.serve("lora", PROMPT, lora_request=adapter)
    assert len(engine.daemon.stored) == 5
    assert not set(stored_keys(engine)) & set(first.block_hashes)
    assert engine.daemon.parents[stored_keys(engine)[1]] == stored_keys(engine)[0]
    warm(engine, "same", lora_request=adapter)
    assert engine.daemon.hits == 5

    monkeypatch.setattr(engine.connector._adapters, "digest", lambda *_, **__: b"b" * 32)
    warm(engine, "other files of the same name", lora_request=adapter)
    assert (engine.daemon.hits, len(engine.daemon.stored)) == (5, 10)
    warm(engine, "none")
    assert engine.daemon.hits == 5


def test_a_request_that_must_recompute_is_not_looked_up_but_stored(engine):
    engine.serve("cold", PROMPT)
    misses = engine.daemon.misses
    warm(engine, "logprobs", sampling={"skip_reading_prefix_cache": True})
    assert (engine.daemon.hits, engine.daemon.misses) == (0, misses)
    warm(engine, "logprobs-other", PROMPT[::-1], sampling={"skip_reading_prefix_cache": True})
    assert engine.daemon.misses == misses
    assert len(engine.daemon.stored) == 10


def test_a_producer_only_stores():
    engine = PretendEngine(kv_role="kv_producer")
    engine.serve("cold", PROMPT)
    assert len(engine.daemon.stored) == 5
    warm(engine, "warm")
    assert engine.daemon.hits == 0


def test_a_consumer_only_loads():
    producer = PretendEngine()
    producer.serve("cold", PROMPT)
    engine = PretendEngine(kv_role="kv_consumer")
    engine.serve("cold", PROMPT)
    assert not engine.daemon.stored
    engine.daemon.stored = dict(producer.daemon.stored)
    engine.daemon.generations = list(producer.daemon.generations)
    engine.arena[:] = producer.arena
    warm(engine, "warm")
    assert engine.daemon.hits == 5


# ---- failures


def test_a_load_that_fails_in_the_middle_is_recomputed_from_there_and_not_tried_again(engine):
    cold = engine.serve("cold", PROMPT)
    engine.copier.failures.append({2})
    hot = warm(engine, "warm")
    assert list(hot.output_token_ids) == list(cold.output_token_ids)
    assert engine.daemon.failed_loads == 1
    assert engine.metric(metrics.FAILED_LOADS) == 1
    assert hot.num_computed_tokens >= len(PROMPT)
    assert not +engine.daemon.leases


def test_a_load_whose_first_chunk_fails_is_looked_up_again_without_that_key(engine):
    engine.serve("cold", PROMPT)
    engine.copier.failures.append({0})
    warm(engine, "warm")
    assert engine.daemon.failed_loads == 1
    assert engine.daemon.hits == 4  # copied, and then of no use: nothing is loaded beyond a hole


def test_a_chunk_evicted_between_lookup_and_copy_is_noticed(engine):
    engine.serve("cold", PROMPT)
    empty_own_cache(engine)
    engine.add("warm", PROMPT)
    engine.step()  # the load is submitted
    engine.daemon.reuse(list(engine.daemon.stored.values())[3])
    engine.run()
    assert engine.daemon.failed_loads == 1


def test_a_store_that_fails_is_aborted_and_so_is_the_rest_of_its_chain(engine):
    engine.copier.failures.append({1})
    engine.serve("cold", PROMPT[:25])
    failed_after = len(engine.daemon.stored)
    assert failed_after < 3
    assert engine.metric(metrics.FAILED_STORES) == 1
    warm(engine, "again", PROMPT[:25])
    assert len(engine.daemon.stored) == 3  # offered again, and mended


def test_a_chunk_with_a_block_that_nobody_wrote_is_never_committed(engine):
    engine.add("cold", PROMPT)
    jobs, track = engine.half.jobs, engine.half.jobs.track

    def with_a_hole(metadata):
        for transfer in metadata.store_jobs.values():
            blocks = transfer.src_spec
            transfer.src_spec = GPULoadStoreSpec(
                blocks.block_ids[:-1].tolist(), [len(blocks.block_ids) - 1], blocks.block_indices
            )
        track(metadata)

    jobs.track = with_a_hole
    engine.run()
    assert not engine.daemon.stored
    assert sorted(engine.daemon.granted) == sorted(slot for slot, _ in engine.steps.free)


def test_a_job_for_a_daemon_that_has_gone_fails_without_copying(engine):
    cold = engine.serve("cold", PROMPT)
    empty_own_cache(engine)
    hot = engine.add("warm", PROMPT)
    output = engine.scheduler.schedule()  # the load is prepared with the old instance
    engine.start_daemon("new")
    engine.scheduler.schedule = lambda: (delattr(engine.scheduler, "schedule"), output)[1]
    engine.run()
    assert list(hot.output_token_ids) == list(cold.output_token_ids)
    assert engine.daemon.failed_loads == 0  # it never knew of that load
    assert engine.metric(metrics.FAILED_LOADS) == 5


def test_an_engine_without_a_daemon_serves_and_uses_the_next_one(engine):
    engine.stop_daemon()
    engine.serve("alone", PROMPT)
    engine.start_daemon("late")
    warm(engine, "cold")
    assert len(engine.daemon.stored) == 5
    warm(engine, "warm")
    assert engine.daemon.hits == 5


@pytest.mark.parametrize("windows", [(None,), pytest.param((None, STATE), marks=needs_states)])
def test_a_daemon_may_die_between_any_two_reads_of_its_table(windows):
    """The link's thread closes the table whenever the daemon hangs up, and the scheduler's has taken it by then."""
    engine = PretendEngine(windows=windows, blocks=100, blocks_per_chunk=1, extra={"prefetch_policy": "wait_complete"})
    reads_before = 0
    while True:
        engine.start_daemon(f"daemon-{reads_before}")
        engine.serve(f"cold-{reads_before}", PROMPT)
        empty_own_cache(engine)
        engine.daemon.demote_all()
        left = itertools.count(reads_before, -1)

        def read(left=left):
            if next(left) == 0:
                engine.stop_daemon()

        engine.link.current.session.table.on_read = read
        request = engine.add(f"warm-{reads_before}", PROMPT + [7] * 20)
        for _ in range(3):  # until some chunks are asked for, and the request waits
            engine.step()
        if engine.daemon is not None:
            engine.daemon.land()
        engine.run()
        assert request.is_finished()
        if engine.daemon is not None:
            break
        empty_own_cache(engine)
        reads_before += 1
    assert engine.daemon.fs_hits > 0
    assert reads_before > 10, "the test proves nothing"


def test_the_closed_table_of_these_tests_answers_as_the_real_one(engine):
    fake = engine.link.current.session.table
    refs = np.array([0], np.uint32), np.array([1], np.uint64)
    with native_store() as store:
        real = store.table()
        for table in (real, fake):
            table.close()
        answers = [
            (
                list(map(list, table.lookup(NAMESPACE, TENANT, [b"k" * 16]))),
                table.current(*refs),
                table.heartbeat_age_ms(),
            )
            for table in (real, fake)
        ]
        assert answers[0] == answers[1]


# ---- slots


def test_with_fewer_slots_than_chunks_the_head_of_the_chain_is_stored_and_the_next_run_mends_it():
    engine = PretendEngine()
    taken, engine.daemon.free = engine.daemon.free[3:], engine.daemon.free[:3]
    cold = engine.serve("cold", PROMPT, max_tokens=20)
    assert stored_keys(engine) == cold.block_hashes[1:6:2]
    assert engine.metric(metrics.REFUSED_STORES) > 0
    engine.daemon.free += taken
    engine.use(clock=lambda: float("inf"))  # long after the tier was full
    again = engine.serve("again", PROMPT)
    assert stored_keys(engine) == again.block_hashes[1:10:2]


def test_a_store_waits_for_slots_for_a_bounded_time_and_never_when_the_request_has_ended(engine):
    now = [100.0]
    engine.use(clock=lambda: now[0])
    engine.steps.answered = False
    offers = []
    prepare = engine.half.prepare_store

    def counted(keys, context):
        outcome = prepare(keys, context)
        offers.append(None if outcome is None else len(outcome.keys_to_store))
        now[0] += STORE_WAIT_S / 4
        return outcome

    engine.half.prepare_store = counted
    engine.serve("cold", PROMPT, max_tokens=12)
    assert offers[:5] == [None, None, None, None, 0]
    assert None not in offers[4:]
    offers.clear()
    engine.serve("short", PROMPT[::-1][:9], max_tokens=1)
    assert offers == [None, 0]  # the second one is the last offer of a request that has ended


def test_a_store_that_waits_for_slots_is_no_warning(engine, caplog):
    with caplog.at_level(logging.WARNING, logger=offloading_scheduler.__name__):
        offloading_scheduler.logger.warning("Request %s: something else", "cold")
        engine.steps.answered = False
        engine.add("cold", PROMPT)
        engine.step()
    assert not engine.half.jobs.running
    assert [record.getMessage() for record in caplog.records] == ["Request cold: something else"]


def test_slots_that_arrive_while_the_store_waits_are_used(engine):
    engine.steps.answered = False
    engine.add("cold", PROMPT)
    engine.step()
    assert not engine.half.jobs.running
    engine.steps.answered = True
    engine.steps.answer()
    engine.run()
    assert len(engine.daemon.stored) == 5


def test_slots_are_asked_for_when_a_request_arrives_and_kept_while_it_runs(engine):
    engine.add("cold", PROMPT)
    assert len(engine.daemon.granted) == 5
    assert engine.steps.kept == (5,)
    engine.run()
    engine.half.flush()
    assert engine.steps.kept == (0,)


@pytest.fixture
def hurried(engine):
    """Where a request is over before the daemon has answered it; at most two chunks of the arena are kept ready."""
    engine.clock_s = 100.0
    engine.use(clock=lambda: engine.clock_s)
    engine.link.current.session.table.arena_bytes = 2 * RESERVE_SHARE * class_bytes(engine.chunk_bytes[0])

    def answers_late(req_id, prompt, max_tokens=1):
        before = len(engine.daemon.stored)
        engine.steps.answered = False
        engine.serve(req_id, prompt, max_tokens=max_tokens)
        engine.steps.answered = True
        engine.steps.answer()
        return len(engine.daemon.stored) - before

    return answers_late


def test_what_a_request_takes_lies_ready_for_the_next_one(engine, hurried):
    assert hurried("first", PROMPT[:9]) == 0
    engine.steps.return_grants()  # those that it had asked for itself
    engine.half.flush()
    assert engine.steps.grants_free() == 1
    assert [hurried(f"short-{i}", PROMPT[i:][:9]) for i in range(1, 4)] == [1, 1, 1]


def test_the_reserve_is_a_small_part_of_the_arena(engine, hurried):
    engine.serve("slow", PROMPT)
    assert (len(engine.daemon.stored), engine.steps.grants_free()) == (5, 2)
    assert hurried("short", PROMPT[::-1]) == 2  # and of a chain, its head
    assert engine.requests["short"].block_hashes[1] in stored_keys(engine)


def test_no_reserve_is_asked_for_once_nothing_has_been_stored_for_a_while(engine, hurried):
    engine.serve("slow", PROMPT)
    engine.clock_s += GRANTS_IDLE_S
    engine.steps.return_grants()
    engine.serve("nothing to store", PROMPT[:3], max_tokens=2)
    assert not engine.daemon.granted
    assert hurried("short", PROMPT[::-1]) == 0


def test_room_for_a_chain_is_not_made_of_its_own_end(engine):
    cold = engine.serve("cold", PROMPT, max_tokens=20)
    slots = {key: slot for (_, _, key), slot in engine.daemon.stored.items()}
    slot = slots[cold.block_hashes[11]]  # the first chunk with tokens of the answer, when the next one wanted a slot
    assert (slot, engine.daemon.generations[slot]) in engine.steps.tails


def test_a_full_tier_is_not_asked_in_every_step():
    now = [100.0]
    engine = PretendEngine(slots=0)
    engine.use(clock=lambda: now[0])
    asked = []
    want = engine.steps.want_grants
    engine.steps.want_grants = lambda count, **named: (asked.append(count), want(count, **named))
    engine.add("cold", PROMPT, max_tokens=8)
    for _ in range(6):
        engine.step()
    assert len(asked) == 1
    now[0] += 1.0
    engine.add("next", PROMPT[::-1])
    assert len(asked) == 2


def hold_up(engine, ms=math.inf):
    """The daemon does not run: it answers nothing, and its heartbeat is so old."""
    engine.steps.answered = False
    engine.daemon.heartbeat_age_ms = ms


def go_on(engine):
    engine.daemon.heartbeat_age_ms = 0.0
    engine.steps.answered = True
    engine.steps.answer()


def test_stores_into_slots_that_are_here_and_loads_go_on_while_the_daemon_is_held_up(engine):
    engine.serve("cold", PROMPT)
    empty_own_cache(engine)
    engine.add("warm", [*PROMPT, *range(100, 140)])  # its slots come with it
    hold_up(engine)
    engine.run()
    assert engine.daemon.hits == 5
    assert len(engine.daemon.stored) == 10
    for req_id in ("with what was left", "without a slot"):  # as many as were loaded; for others there is no waiting
        engine.serve(req_id, [*req_id.encode(), *PROMPT])
        assert len(engine.daemon.stored) == 15
    go_on(engine)
    assert len(engine.daemon.granted) == len(engine.steps.free)


def test_a_store_waits_for_slots_of_a_daemon_that_was_held_up_for_a_moment(engine):
    hold_up(engine, 400.0)
    engine.add("cold", PROMPT)
    engine.step()
    assert not engine.half.jobs.running
    go_on(engine)
    engine.run()
    assert len(engine.daemon.stored) == 5


# ---- why there was no slot


def refusals(engine):
    told = [decision for decision in engine.steps.told if decision.is_store and decision.refused]
    return [(decision.reason, len(decision.refused)) for decision in told]


@pytest.fixture
def waiting(engine):
    """Each step takes half of the time that a store waits for slots."""
    engine.clock_s = 100.0

    def clock():
        return engine.clock_s

    engine.use(clock=clock)
    step = engine.step

    def slow_step():
        engine.clock_s += STORE_WAIT_S / 2
        return step()

    engine.step = slow_step
    return engine


@pytest.mark.parametrize("age_ms", [151.0, math.inf])
def test_a_daemon_that_was_asked_and_is_held_up_is_slow(waiting, age_ms):
    hold_up(waiting, age_ms)
    waiting.serve("cold", PROMPT)
    assert refusals(waiting) == [("DAEMON_SLOW", 5)]


def test_slots_that_a_running_daemon_has_not_granted_yet_are_told_so(waiting):
    waiting.steps.answered = False
    waiting.serve("cold", PROMPT)
    assert refusals(waiting) == [("NO_SLOT_YET", 5)]


@pytest.mark.parametrize("held_up", [False, True])
@pytest.mark.parametrize(("pool", "slots", "reason"), [(2, 64, "NOT_GRANTED"), (64, 2, "TIER_FULL")])
def test_what_the_daemon_said_last_is_told_though_it_is_held_up_now(pool, slots, reason, held_up):
    """An engine that holds its share already, and a tier that is full."""
    engine = PretendEngine(slots=slots)
    engine.daemon.pool = pool
    engine.add("cold", PROMPT, max_tokens=1)
    if held_up:
        engine.daemon.heartbeat_age_ms = math.inf
    engine.run()
    assert refusals(engine) == [(reason, 3)]
    assert len(engine.daemon.stored) == 2


# ---- reset, ids, identity


def test_after_a_reset_nothing_of_before_is_loaded_and_running_stores_end_as_aborts(engine):
    engine.serve("cold", PROMPT)
    engine.add("running", PROMPT[::-1], max_tokens=30)
    engine.step()
    engine.step()
    assert engine.copier.queued
    engine.change_weights()
    assert engine.half.jobs.running  # still with the workers, which still write
    assert engine.connector.has_pending_push_work()
    engine.run()
    engine.serve("again", PROMPT)
    assert engine.daemon.hits == 0
    assert {namespace for namespace, _, _ in engine.daemon.stored} == {b"namespace-of-old", engine.daemon.namespace}
    assert sorted(engine.daemon.granted) == sorted(slot for slot, _ in engine.steps.free)


def test_until_the_daemon_has_moved_it_an_engine_that_was_reset_neither_loads_nor_stores(engine):
    engine.serve("cold", PROMPT)
    engine.steps.answered = False
    engine.change_weights()
    before = len(engine.daemon.stored)
    engine.serve("again", PROMPT)
    assert (engine.daemon.hits, len(engine.daemon.stored)) == (0, before)
    engine.steps.answered = True
    engine.steps.answer()
    warm(engine, "later")
    assert len(engine.daemon.stored) == before + 5


def test_a_daemon_that_appears_after_a_reset_is_told_of_it(engine):
    engine.serve("cold", PROMPT)
    engine.change_weights()
    engine.start_daemon("new")
    engine.serve("again", PROMPT)
    assert {namespace for namespace, _, _ in engine.daemon.stored} == {b"namespace-000001"}


def test_after_a_reset_that_left_blocks_in_use_nothing_is_stored_until_one_leaves_none(engine, caplog):
    """vLLM keeps what the old weights computed, in running requests and in its own prefix cache."""
    engine.add("running", PROMPT, max_tokens=30)
    engine.step()
    with caplog.at_level(logging.WARNING, logger="vllm.connector.scheduler"):
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    before = set(engine.daemon.stored)
    engine.add("next", PROMPT[::-1], max_tokens=1)
    engine.run()
    engine.serve("prefix of the first", [*PROMPT[:24], *PROMPT], max_tokens=1)
    assert set(engine.daemon.stored) == before
    assert sorted(engine.daemon.granted) == sorted(slot for slot, _ in engine.steps.free)
    assert any("blocks of the engine's own were in use" in record.message for record in caplog.records)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.serve("anew", PROMPT)
    assert {namespace for namespace, _, _ in set(engine.daemon.stored) - before} == {engine.daemon.namespace}


def test_a_second_reset_that_leaves_no_blocks_ends_what_the_first_one_began(engine):
    engine.add("running", PROMPT, max_tokens=30)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.abort("running")
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.serve("anew", PROMPT)
    assert engine.daemon.stored


def test_two_resets_without_a_step_between_them_are_one(engine):
    engine.add("running", PROMPT, max_tokens=30)
    engine.step()
    engine.step()
    engine.change_weights()
    engine.change_weights()
    engine.run()
    assert not engine.half.jobs.running


def test_a_request_id_may_come_again(engine):
    engine.serve("same", PROMPT)
    warm(engine, "same")
    assert engine.daemon.hits == 5
    warm(engine, "same", salt="other")
    assert engine.daemon.hits == 5
    assert not engine.half._records


def test_the_probe_is_sent_before_anything_else_to_every_daemon(engine):
    assert not engine.daemon.probes
    engine.serve("cold", PROMPT)
    [(family, algorithm, value)] = engine.daemon.probes
    assert (family, algorithm) == ("vllm", "sha256")
    assert len(value) == 32
    engine.start_daemon("next")
    engine.serve("again", PROMPT)
    assert engine.daemon.probes == [(family, algorithm, value)]


def test_an_engine_that_hashes_from_another_seed_than_it_said_is_left_out_with_one_error(engine, monkeypatch, caplog):
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "1")
    with caplog.at_level(logging.ERROR, logger="vllm.connector.scheduler"):
        engine.serve("cold", PROMPT)
        engine.serve("next", PROMPT[::-1])
    assert not engine.daemon.stored
    [record] = caplog.records
    assert "'1'" in record.message
    assert "PYTHONHASHSEED='0'" in record.message


def test_an_engine_that_the_daemon_refuses_is_left_out_with_one_error(engine, caplog):
    engine.daemon.refused = "this engine hashes the probe tokens to aa and the first one to bb"
    engine.steps.group = engine.daemon.group_state()
    with caplog.at_level(logging.ERROR, logger="vllm.connector.scheduler"):
        engine.serve("cold", PROMPT)
        engine.serve("next", PROMPT[::-1])
    assert not engine.daemon.stored
    [record] = caplog.records
    assert "aa and the first one to bb" in record.message


def test_nothing_is_loaded_or_stored_before_every_rank_maps_the_daemons_memory(engine):
    engine.daemon.complete = False
    engine.steps.group = engine.daemon.group_state()
    engine.serve("early", PROMPT)
    assert not engine.daemon.stored
    engine.daemon.complete = True
    engine.steps.group = engine.daemon.group_state()
    warm(engine, "later")
    assert len(engine.daemon.stored) == 5


def test_an_idle_engine_goes_on_stepping_while_anything_is_unsent(engine):
    engine.serve("cold", PROMPT)
    assert not engine.connector.has_pending_push_work()
    engine.steps.unsent = True
    assert engine.connector.has_pending_push_work()
    engine.stop_daemon()
    assert not engine.connector.has_pending_push_work()


def test_an_engine_without_all_its_workers_becomes_idle(engine):
    """It has queued the probe by then. An engine that steps for ever cannot be paused or put to sleep."""
    engine.daemon.complete = False
    engine.steps.group = engine.daemon.group_state()
    engine.half._introduced = None
    engine.serve("unserved", PROMPT)
    assert engine.daemon.probes
    assert not engine.daemon.stored


def test_an_engine_that_is_refused_while_a_request_runs_becomes_idle(engine):
    engine.add("running", PROMPT, max_tokens=8)
    engine.step()
    engine.daemon.refused = "it hashes otherwise"
    engine.steps.group = engine.daemon.group_state()
    told = len(engine.steps.told)
    engine.run()
    engine.serve("unserved", PROMPT[::-1])
    assert len(engine.steps.told) > told


def test_a_request_that_was_preempted_and_aborted_at_once_waits_no_more(engine):
    """Else every later request would be taken for one that has others behind it."""
    engine.add("gone", PROMPT, max_tokens=9)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.abort("gone")
    engine.run()
    admission = engine.half._admission
    assert admission.queue.seen_by("next", admission.recompute_model).waiting_count == 0


def test_a_request_that_was_preempted_between_steps_may_load_in_the_next_one(engine):
    """vLLM's own code asserts that a preempted request has stores under way and no load."""
    undisturbed = engine.serve("cold", PROMPT, max_tokens=9)
    request = engine.add("hot", PROMPT, max_tokens=9)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.run()
    assert list(request.output_token_ids) == list(undisturbed.output_token_ids)
    assert engine.daemon.hits == 5


def test_what_was_computed_from_blocks_that_another_connector_left_wrong_is_not_kept(engine):
    """Its load ended within the step that read it: vLLM hears of it when the step's stores are under way."""
    request = engine.add("loaded by another", PROMPT, max_tokens=20)
    engine.step()
    engine.step()
    assert engine.half.jobs.running
    [blocks] = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    engine.connector.update_connector_output(KVConnectorOutput(invalid_block_ids={blocks[1]}))
    engine.run()
    assert not set(stored_keys(engine)) & set(request.block_hashes[1:10:2])
    assert sorted(engine.daemon.granted) == sorted(slot for slot, _ in engine.steps.free)


def test_blocks_that_our_own_load_left_wrong_cost_no_store_of_others(engine):
    engine.serve("cold", PROMPT, max_tokens=1)
    empty_own_cache(engine)
    engine.copier.failures.append({4})
    engine.add("hot", PROMPT, max_tokens=1)
    engine.add("storing", PROMPT[::-1], max_tokens=1)
    engine.run()
    assert (engine.daemon.failed_loads, len(engine.daemon.stored)) == (1, 10)
    assert engine.metric(metrics.FAILED_STORES) == 0


def test_a_record_never_shows_its_salt(engine):
    request = engine.add("salted", PROMPT, salt="secret-of-tenant")
    assert "secret-of-tenant" not in repr(engine.half._records[request.request_id])
    engine.run()


def test_a_chunk_whose_tokens_were_changed_after_its_key_was_noted_is_not_stored(engine):
    """A streaming session drops its last token and goes on with others."""
    request = engine.add("session", PROMPT, max_tokens=1)
    prepare = engine.half.prepare_store

    def after_a_change(keys, context):
        request.block_hashes[5] = b"hash-of-other-tokens-at-chunk-3."
        return prepare(keys, context)

    engine.half.prepare_store = after_a_change
    stored_before = []
    engine.daemon.on_commit = lambda _kind, _slot, key: stored_before.append(key)
    engine.step()
    engine.half.prepare_store = prepare
    job = next(iter(engine.half.jobs.running.values()))
    assert len(job.keys) == 2  # of the three that the step computed


def test_a_streaming_session_is_not_served_where_vllm_keeps_the_hash_of_a_token_that_it_dropped(monkeypatch, caplog):
    monkeypatch.setattr("connector.compat.renews_session_hashes", lambda: False)
    engine = PretendEngine(blocks=60, blocks_per_chunk=1)
    session = engine.add("session", list(range(100, 110)), max_tokens=3, resumable=True)
    other = engine.add("no session", list(range(200, 210)), max_tokens=3)
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ or not other.is_finished():
        engine.copier.run()
        engine.step()
    engine.next_turn("session", list(range(20)), max_tokens=3)
    for _ in range(8):
        engine.copier.run()
        engine.step()
    assert set(other.block_hashes[:2]) <= set(stored_keys(engine))
    assert not set(session.block_hashes) & set(stored_keys(engine))
    assert sum("streaming sessions are neither stored nor loaded" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(not compat.renews_session_hashes(), reason="streaming sessions are not served before vLLM 0.32")
def test_each_turn_of_a_streaming_session_is_stored_from_its_own_blocks():
    engine = PretendEngine(blocks=60, blocks_per_chunk=1)
    session = engine.add("session", list(range(100, 110)), max_tokens=3, resumable=True)
    for turn in range(1, 4):
        while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            engine.copier.run()
            engine.step()
        engine.next_turn("session", list(range(100 * turn, 100 * turn + 20)), max_tokens=3)
    for _ in range(6):  # each looks at what is committed
        engine.copier.run()
        engine.step()
    assert set(session.block_hashes[:18]) <= set(stored_keys(engine))


def test_a_request_that_ends_without_its_blocks_is_not_stored_from_them():
    """It is preempted with a step under way, its blocks are another's in the same step, and the step's output ends it.
    Its store has waited for slots until then."""
    engine = PretendEngine(blocks=19, blocks_per_chunk=1, batches=2, kv_role="kv_producer")
    engine.steps.answered = False
    engine.add("long", [300 + i % 90 for i in range(59)], max_tokens=12)
    for _ in range(3):
        engine.step()
    short = engine.add("short", list(range(11)), max_tokens=2)
    while not short.is_finished():
        engine.step()
    assert short.num_preemptions == 1
    engine.steps.answered = True
    engine.steps.answer()
    engine.run()  # which looks at what is committed
    assert engine.daemon.stored
    assert not set(stored_keys(engine)) & set(short.block_hashes)


def test_of_a_request_that_fails_before_all_is_computed_no_more_than_that_is_stored():
    """vLLM counts all of the prompt as computed then; here the end of the last block is not."""
    engine = PretendEngine(blocks_per_chunk=1)
    other = engine.add("other", list(range(100, 110)))
    failing = engine.add("failing", PROMPT)
    engine.step()
    assert failing.num_computed_tokens == 14
    engine.scheduler.finish_requests("failing", RequestStatus.FINISHED_ERROR)
    engine.run()
    assert set(stored_keys(engine)) & set(failing.block_hashes) == set(failing.block_hashes[:3])
    assert other.is_finished()
