"""Models that mix full attention with sliding windows, through vLLM's real scheduler and both halves.

`connector_engine` checks every page that a forward pass would read and every byte that is committed; slots are full of
poison before they are written.
"""

import os
from collections import Counter

import pytest

pytest.importorskip("vllm")
os.environ.setdefault("PYTHONHASHSEED", "0")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from connector import compat, metrics
from connector.retries import SAID_AFTER_S, SAID_EVERY_S
from connector.scheduler import STATE_WAIT_S
from tests.unit.connector_engine import BLOCK_TOKENS, DRAFT, SEED, STATE, PretendEngine, needs_states

PROMPT = [i % 97 for i in range(44)]
WINDOWS = (None, 8, 16)


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", SEED)


def mixed_engine(**options) -> PretendEngine:
    return PretendEngine(**{"windows": WINDOWS, "blocks": 100, **options})


def stored_by_kind(engine: PretendEngine) -> list[int]:
    counts = Counter(namespace for namespace, _, _ in engine.daemon.stored)
    return [counts[namespace] for namespace in engine.daemon.namespaces]


def test_a_prompt_is_stored_and_loaded_in_every_group():
    engine = mixed_engine()
    engine.serve("cold", PROMPT, max_tokens=1)
    chunks = len(PROMPT) // (2 * BLOCK_TOKENS)
    assert stored_by_kind(engine)[0] == chunks
    assert min(stored_by_kind(engine)) > 0
    engine.scheduler.reset_prefix_cache()
    engine.serve("warm", PROMPT, max_tokens=1)
    assert engine.daemon.hits == engine.metric(metrics.LOADED_CHUNKS) == chunks + 1 + 2
    assert engine.daemon.failed_loads == 0


def test_vllms_own_bound_of_a_load_holds_where_all_of_a_hit_is_admitted(monkeypatch):
    """It has one where a group that it does not offload holds less of a prompt than the store."""
    engine = mixed_engine()
    engine.serve("short", PROMPT[:24], max_tokens=1)  # windows are kept at a prompt's end
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    monkeypatch.setattr(OffloadingConnector, "_max_loadable_tokens", lambda *_: 2 * 2 * BLOCK_TOKENS)
    engine.serve("warm", PROMPT, max_tokens=1)
    assert engine.daemon.hits == 2 + 1 + 2


@pytest.mark.parametrize(("windows", "kind"), [((None, 8), 0), ((8, None), 1)])
def test_decisions_name_the_group_that_they_are_made_by(windows, kind):
    engine = mixed_engine(windows=windows)
    engine.serve("cold", PROMPT, max_tokens=1)
    assert {decision.kind for decision in engine.steps.told} == {kind}


def test_of_a_window_only_what_it_reads_is_loaded_or_missed():
    engine = mixed_engine(blocks_per_chunk=1)
    engine.serve("cold", PROMPT, max_tokens=1)
    full = len(PROMPT) // BLOCK_TOKENS
    read = [full, 2, 4]  # windows of 8 and 16 tokens, in chunks of 4
    assert engine.daemon.misses == sum(read)
    engine.scheduler.reset_prefix_cache()
    engine.serve("warm", PROMPT, max_tokens=1)
    assert engine.daemon.hits == sum(read) - 1  # the chunk of the last token is computed
    assert engine.daemon.misses == sum(read)


@pytest.mark.parametrize("position", [0, 2, 5, 7])
def test_a_failed_load_costs_a_recompute_and_its_chunk_is_not_tried_again(position):
    engine = mixed_engine()
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    engine.copier.failures.append({position})
    loads = []
    prepare = engine.half.jobs.prepare

    def watched(attached, record, keys, places, *, is_store):
        if not is_store:
            loads.append(keys)
        return prepare(attached, record, keys, places, is_store=is_store)

    engine.half.jobs.prepare = watched
    request = engine.serve("warm", PROMPT, max_tokens=1)
    assert request.is_finished()
    assert [loads[0][position] in keys for keys in loads] == [True] + [False] * (len(loads) - 1)
    assert engine.daemon.failed_loads == 1
    assert engine.metric(metrics.FAILED_LOADS) == 1
    assert not +engine.daemon.leases


def test_after_a_failed_load_of_a_window_nothing_goes_on_from_its_middle():
    """What lies before the failed chunk is no prefix: of a window only the tail was ever loaded."""
    engine = mixed_engine(windows=(16,), blocks_per_chunk=1)
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    engine.copier.failures.append({2})
    engine.serve("warm", PROMPT, max_tokens=1)
    assert engine.daemon.failed_loads == 1


@pytest.mark.parametrize("blocks_per_chunk", [2, 3])
def test_no_hole_is_committed(blocks_per_chunk):
    """A window's blocks are given back while later ones are stored; a chunk that lost one is nobody's."""
    engine = mixed_engine(blocks_per_chunk=blocks_per_chunk, windows=(None, 5))
    for length in (44, 38, 27):
        engine.serve(f"first-{length}", PROMPT[:length], max_tokens=3)
        engine.serve(f"again-{length}", PROMPT[:length] + [99] * 9, max_tokens=9)  # its past is in the GPU, as nulls
    assert min(stored_by_kind(engine)) > 0
    assert engine.metric(metrics.FAILED_STORES) > 0, "no hole came up: the test proves nothing"
    assert sorted(engine.daemon.granted) == sorted(slot for slot, _ in engine.steps.free)


def test_only_chains_name_parents_and_are_touched_whole():
    engine = mixed_engine(blocks_per_chunk=1)
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.daemon.touched.clear()
    engine.daemon.touched_kinds.clear()
    engine.serve("again", PROMPT, max_tokens=1)
    whole = len(PROMPT) // BLOCK_TOKENS
    touched = zip(engine.daemon.touched, engine.daemon.touched_kinds, strict=True)
    assert whole in [len(keys) for keys, kind in touched if kind == 0]
    assert {1, 2} <= set(engine.daemon.touched_kinds)


def test_where_slots_are_few_a_chain_keeps_its_head():
    engine = mixed_engine(slots=6)
    now = [0.0]
    engine.use(clock=lambda: now[0])

    def later(step=engine.step):
        now[0] += 0.5
        step()

    engine.step = later
    engine.serve("cold", PROMPT, max_tokens=1)
    head = [key for namespace, _, key in engine.daemon.stored if namespace == engine.daemon.namespace]
    hashes = engine.requests["cold"].block_hashes
    assert head == [hashes[2 * i + 1] for i in range(len(head))]
    assert engine.metric(metrics.REFUSED_STORES) > 0


def test_chunks_on_disk_are_promoted_in_every_group_before_the_load():
    engine = mixed_engine(extra={"prefetch_policy": "wait_complete"})
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    engine.daemon.demote_all()
    engine.add("warm", PROMPT, max_tokens=1)
    for _ in range(3):
        engine.step()
    asked = Counter(namespace for namespace, _, _ in engine.daemon.pending)
    assert asked[engine.daemon.namespace] == len(PROMPT) // (2 * BLOCK_TOKENS)
    assert set(asked) == set(engine.daemon.namespaces)
    engine.daemon.land()
    engine.run()
    assert engine.daemon.fs_hits > len(PROMPT) // (2 * BLOCK_TOKENS)
    assert engine.daemon.failed_loads == 0


def test_a_model_of_windows_only_is_stored_and_loaded():
    engine = mixed_engine(windows=(8,))
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    engine.daemon.demote_all()
    engine.add("warm", PROMPT + [7] * 20, max_tokens=1)
    for _ in range(2):
        engine.step()
    assert engine.daemon.pending, "the last whole window is asked for, though the prompt goes on"
    engine.daemon.land()
    engine.run()
    assert engine.daemon.fs_hits > 0


def test_that_a_request_waits_for_blocks_after_a_failed_load_is_said_now_and_then(caplog):
    """vLLM begins none of the loaded requests behind it, which hold all other blocks."""
    engine, now = mixed_engine(windows=(None, 8), blocks=30, blocks_per_chunk=1), [0.0]
    engine.use(clock=lambda: now[0])
    prompts = [[100 * name + i for i in range(28)] for name in range(3)]
    for name, prompt in enumerate(prompts):
        engine.serve(f"cold-{name}", prompt, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    requests = [engine.add(f"warm-{name}", prompt, max_tokens=1) for name, prompt in enumerate(prompts)]
    engine.copier.failures.append({0})
    for _ in range(3):
        engine.step()
    engine.copier.run()
    for seconds in (0, SAID_AFTER_S - 1, SAID_AFTER_S, SAID_AFTER_S + 1, SAID_AFTER_S + SAID_EVERY_S):
        now[0] = seconds
        engine.step()
        engine.step()
    assert not any(request.is_finished() for request in requests)
    said = [record.message for record in caplog.records if record.name == "vllm.connector.retries"]
    assert [line.split(" for KV")[0] for line in said] == [
        "kvstore: request warm-0 has waited 10 s",
        "kvstore: request warm-0 has waited 70 s",
    ]
    engine.abort("warm-1")
    engine.run()
    assert not engine.half._retries._since_s


# ---- states


def engine_with_states(**options) -> PretendEngine:
    return PretendEngine(**{"windows": (None, STATE), "blocks": 100, "blocks_per_chunk": 1, **options})


@needs_states
def test_of_a_prompt_each_state_that_a_step_ends_with_is_stored_and_the_last_loaded():
    engine = engine_with_states()
    cold = engine.serve("cold", PROMPT, max_tokens=1)
    chunks = len(PROMPT) // BLOCK_TOKENS
    attention, states = stored_by_kind(engine)
    assert (attention, states) == (chunks, 3)  # after 24 tokens, which is a step, after 40 and 44
    engine.scheduler.reset_prefix_cache()
    warm = engine.serve("warm", PROMPT, max_tokens=1)
    assert list(warm.output_token_ids) == list(cold.output_token_ids)
    assert engine.daemon.failed_loads == 0
    assert engine.daemon.hits == engine.metric(metrics.LOADED_CHUNKS) == chunks - 1 + 1


@needs_states
@pytest.mark.parametrize("position", [0, -1])
def test_after_a_failed_load_of_a_state_or_of_what_lies_before_it_the_prompt_is_computed(position):
    engine = engine_with_states()
    engine.serve("cold", PROMPT, max_tokens=1)
    engine.scheduler.reset_prefix_cache()
    engine.copier.failures.append({position % 7})
    assert engine.serve("warm", PROMPT, max_tokens=1).is_finished()
    assert engine.daemon.failed_loads == 1


@needs_states
@pytest.mark.parametrize("in_time", [True, False])
def test_a_request_waits_for_the_slot_of_its_state_for_a_bounded_time(in_time):
    engine, now = engine_with_states(), [0.0]
    engine.use(clock=lambda: now[0])
    engine.steps.answered = False
    request = engine.add("r", PROMPT[:23], max_tokens=1)
    for _ in range(2):
        engine.step()
        assert request.num_computed_tokens == 0
    if in_time:
        engine.steps.answer()
    else:
        now[0] += STATE_WAIT_S
    engine.step()
    assert request.num_computed_tokens > 0
    engine.steps.answer()
    engine.steps.answered = True
    engine.run()
    assert stored_by_kind(engine) == [5, int(in_time)]


# ---- draft models


def test_a_draft_models_chunks_are_a_chain_and_loaded_with_the_models():
    engine = PretendEngine(windows=(None, DRAFT), blocks=100, blocks_per_chunk=1)
    engine.serve("cold", PROMPT, max_tokens=1)
    chunks = len(PROMPT) // BLOCK_TOKENS
    assert stored_by_kind(engine) == [chunks, chunks]
    engine.scheduler.reset_prefix_cache()
    engine.serve("warm", PROMPT, max_tokens=1)
    assert engine.daemon.hits == engine.metric(metrics.LOADED_CHUNKS) == 2 * (chunks - 1)


@needs_states
@pytest.mark.parametrize("late_flushes", [False, True])
def test_no_chunk_is_kept_whose_blocks_were_zeroed_before_they_were_copied(monkeypatch, late_flushes):
    """Of a request that has ended, its blocks another's in the same step. The second model runner zeroes them first."""
    monkeypatch.setattr(compat, "overwrites_before_flushes", lambda _config, _kv_cache_config: late_flushes)
    engine = engine_with_states(blocks=16, late_flushes=late_flushes)
    engine.add("first", PROMPT[:21], max_tokens=2)
    first = engine.requests["first"]
    while not first.is_finished():
        engine.step()
    engine.add("second", [400 + token for token in PROMPT[:40]], max_tokens=1)
    engine.step()
    engine.step()
    engine.run()  # which looks at what is committed
    assert engine.daemon.stored
    assert (engine.metric(metrics.FAILED_STORES) > 0) == late_flushes
