"""Random lives of requests, daemons and weights through vLLM's real scheduler and both halves of the connector.

What must hold at every step is checked by `connector_engine` (no forward pass reads a wrong page, no chunk is committed
with bytes of another) and by the fake daemon (nothing is ended twice). When all has ended, nothing may be left held.
"""

import contextlib
import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm")
os.environ.setdefault("PYTHONHASHSEED", "0")

from connector import compat
from tests.unit.connector_engine import DRAFT, SEED, STATE, PretendEngine

PROMPTS = [[100 * family + i % 97 for i in range(64)] for family in range(3)]
WITH_STATES = [(None, STATE), (None, 9, STATE)] if compat.hands_over_states() else []


class Lives(RuleBasedStateMachine):
    @initialize(
        blocks=st.sampled_from([16, 24, 60]),
        blocks_per_chunk=st.sampled_from([1, 2, 3]),
        slots=st.sampled_from([4, 12, 64]),
        windows=st.sampled_from([(None,), (None,), (None, 9), (None, 8, 17), (9,), (None, DRAFT), *WITH_STATES]),
        prefix_caching=st.booleans(),
        role=st.sampled_from(["kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"]),
        prompt_only=st.booleans(),
    )
    def start(self, blocks, blocks_per_chunk, slots, windows, prefix_caching, role, prompt_only):
        os.environ["PYTHONHASHSEED"] = SEED
        if STATE in windows:  # as the connector and vLLM demand
            blocks_per_chunk, prefix_caching = 1, True
        self.engine = PretendEngine(
            # After a failed load such a request waits for blocks anew, and vLLM looks at nobody behind it: where all
            # blocks are held by loaded requests behind it, it waits for ever (docs/decisions/021).
            blocks=blocks if windows == (None,) else 100 * len(windows),
            blocks_per_chunk=blocks_per_chunk,
            slots=slots,
            windows=windows,
            extra={"offload_prompt_only": prompt_only},
            prefix_caching=prefix_caching,
            kv_role=role,
        )
        self.added = 0
        self.daemons = 1
        for family, prompt in enumerate(PROMPTS):  # so that there is something to load from the start
            self.engine.serve(f"warm-{family}", prompt[:44], max_tokens=1)
            self.engine.scheduler.reset_prefix_cache()

    # Most of the time requests come and are served; what disturbs them is one rule in six.

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 44) | st.just(44),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, None, None, "tenant"]),
        steps=st.integers(0, 2),
    )
    @precondition(lambda self: len(self.engine.scheduler.requests) < 6)
    def add(self, family, length, max_tokens, salt, steps):
        self.added += 1
        self.engine.add(f"r{self.added}", PROMPTS[family][:length], max_tokens=max_tokens, salt=salt)
        self.step(steps)

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    @rule(jobs=st.integers(1, 3), steps=st.integers(1, 3))
    def copy(self, jobs, steps):
        self.engine.copier.run(jobs)
        self.step(steps)

    @rule()
    def finish_all(self):
        if self.engine.daemon is not None:
            self.engine.steps.answered = True
            self.engine.steps.answer()
        self.engine.run()
        self.engine.scheduler.reset_prefix_cache()

    @rule(data=st.data())
    @precondition(lambda self: self.leased_slots())
    def reuse_a_leased_slot(self, data):
        self.engine.daemon.reuse(data.draw(st.sampled_from(self.leased_slots())))

    def leased_slots(self):
        daemon = self.engine.daemon
        return [] if daemon is None else sorted(slot for slot in daemon.stored.values() if daemon.leases[slot])

    @rule(data=st.data())
    def disturb(self, data):
        engine = self.engine
        disturbances = [self.fail_a_copy, engine.scheduler.reset_prefix_cache, self.preempt_all]
        if engine.scheduler.requests:
            disturbances.append(self.abort)
        if engine.can_reset():
            disturbances.append(self.change_weights)
        if engine.daemon is None:
            disturbances.append(self.start_a_daemon)
        else:
            disturbances += [engine.stop_daemon, self.evict, self.answer_or_not, self.beat_or_not]
        disturbance = data.draw(st.sampled_from(disturbances), label="disturbance")
        if disturbance.__name__ in ("fail_a_copy", "abort", "evict"):
            disturbance(data)
        else:
            disturbance()

    def fail_a_copy(self, data):
        if len(self.engine.copier.failures) < 2:
            self.engine.copier.failures.append({data.draw(st.integers(0, 3))})

    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    def evict(self, data):
        if self.engine.daemon.stored:
            self.engine.daemon.evict(data.draw(st.sampled_from(sorted(self.engine.daemon.stored.values()))))

    def answer_or_not(self):
        self.engine.steps.answered = not self.engine.steps.answered
        if self.engine.steps.answered:
            self.engine.steps.answer()

    def beat_or_not(self):
        self.engine.daemon.heartbeat_age_ms = 1001.0 - self.engine.daemon.heartbeat_age_ms

    def start_a_daemon(self):
        self.daemons += 1
        self.engine.start_daemon(f"daemon-{self.daemons}")

    def preempt_all(self) -> None:
        with contextlib.suppress(RuntimeError):  # where loads run vLLM has preempted the others when it says so
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def change_weights(self) -> None:
        self.engine.change_weights()
        if self.engine.daemon is not None:
            for family, prompt in enumerate(PROMPTS):
                self.engine.add(f"new-{self.added}-{self.engine.weights}-{family}", prompt[:44], max_tokens=1)

    @invariant()
    def the_job_table_is_sound(self):
        half = self.engine.half
        assert not half.jobs._prepared
        for job in half.jobs.running.values():
            assert 0 < job.ranks_pending <= 1
        for kind, expected in enumerate(half._grants._expected):
            assert expected == sum(record.rows[kind].grants_expected for record in half._records.values())
            assert expected >= 0

    def teardown(self):
        engine = self.engine
        if engine.failed:
            return
        if engine.daemon is not None:
            engine.daemon.heartbeat_age_ms = 1.0
            engine.steps.answered = True
            engine.steps.answer()
        engine.run()
        half = engine.half
        assert not half.jobs.running
        assert not half.jobs._storing
        assert not half._records
        assert not any(half._grants._expected)
        for request in engine.requests.values():
            assert request.is_finished()
        if engine.daemon is not None:
            assert not +engine.daemon.leases, "leases left"
            assert sorted(engine.daemon.granted) == sorted(slot for slot, _ in engine.steps.free), "grants left"


Lives.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVSTORE_TEST_LIVES", "100")),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a life is read more easily than it is shrunk
)
TestLives = Lives.TestCase
