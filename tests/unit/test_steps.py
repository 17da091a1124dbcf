"""The client's message stream against a scripted daemon: what is sent, what is sent again, and what a break leaves."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc
import pytest

from kvstore import steps as steps_module
from kvstore.decisions import Decision
from kvstore.errors import KVStoreError, LimitExceeded, Unavailable
from kvstore.limits import GRANTS_PER_STEP_MAX, OPERATIONS_PER_STEP_MAX, STEPS_UNANSWERED_MAX
from kvstore.rpc.status import ERROR_METADATA_KEY
from kvstore.rpc.v1 import store_pb2, store_pb2_grpc
from kvstore.session import GroupState, KindState
from kvstore.steps import Outcome, Steps, commits_of

TENANT = b"t" * 16
WAIT_S = 10.0

Answer = Callable[[store_pb2.StepRequest], store_pb2.StepReply | None]  # None: break the stream instead


def grant_all(request: store_pb2.StepRequest) -> store_pb2.StepReply:
    """Slot numbers begin at 100 times the kind's."""
    grants = [
        store_pb2.Grants(slots=range(100 * kind, 100 * kind + wanted), generations=[request.number] * wanted)
        for kind, wanted in enumerate(request.grants_wanted)
    ]
    stored = [store_pb2.OUTCOME_STORED for commits in request.commits for _ in commits.keys]
    return store_pb2.StepReply(number=request.number, grants=grants, outcomes=stored)


class FakeDaemon(store_pb2_grpc.SessionsServicer):
    def __init__(self) -> None:
        self.answer: Answer = grant_all
        self.status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] = (
            grpc.StatusCode.UNAVAILABLE, "broken on purpose", (),
        )  # fmt: skip
        self.received: queue.Queue[store_pb2.StepRequest] = queue.Queue()
        self.target = ""
        self.go_on = threading.Event()
        self.go_on.set()

    def Step(self, requests: Iterator[store_pb2.StepRequest], context: grpc.ServicerContext):
        for request in requests:
            self.received.put(request)
            assert self.go_on.wait(WAIT_S)
            reply = self.answer(request)
            if reply is None:
                code, text, metadata = self.status
                context.set_trailing_metadata(metadata)
                context.abort(code, text)
            yield reply

    def next(self) -> store_pb2.StepRequest:
        return self.received.get(timeout=WAIT_S)


class FakeSession:
    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.metadata = ()
        self.instance_id = b"i" * 16
        self.token = b"token"
        self.group_state = GroupState(True, (KindState(b"n" * 16, 4096),), "")
        self.lose: Callable[[], None] = lambda: None
        self.refusal: KVStoreError | None = None
        self.given_up = threading.Event()
        self.sent: queue.Queue[store_pb2.StepRequest] = queue.Queue()  # on arena.sock
        self.takes_steps = True
        self.on_step: Callable[[bytes], None] | None = None

    def send_step(self, message: bytes) -> bool:
        if self.takes_steps:
            self.sent.put(store_pb2.StepRequest.FromString(message))
        return self.takes_steps

    def answer(self, reply: store_pb2.StepReply) -> None:
        assert self.on_step is not None
        self.on_step(reply.SerializeToString())

    def give_up(self, refusal: KVStoreError) -> None:
        self.refusal = refusal
        self.lose()
        self.given_up.set()

    def require_own_process(self) -> None: ...

    def before_unmap(self, callback: Callable[[], None]) -> None: ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        self.lose = callback


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon()
    server = grpc.server(ThreadPoolExecutor(4))
    store_pb2_grpc.add_SessionsServicer_to_server(fake, server)
    fake.target = f"unix:{tmp_path}/s"
    server.add_insecure_port(fake.target)
    server.start()
    yield fake
    fake.go_on.set()
    server.stop(0).wait()


@pytest.fixture
def session(daemon: FakeDaemon) -> Iterator[FakeSession]:
    with grpc.insecure_channel(daemon.target) as channel:
        yield FakeSession(channel)


@pytest.fixture
def steps(session: FakeSession) -> Iterator[Steps]:
    steps = Steps(session)  # type: ignore[arg-type]
    yield steps
    steps.close()


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


def test_everything_queued_goes_in_one_message_at_the_flush(daemon: FakeDaemon, steps: Steps) -> None:
    ticket = steps.commit(1, 2, TENANT, key(1), b"", memory_only=True)
    steps.abort(3, 4)
    steps.lease(5, 6)
    steps.release(7, 8, loaded=True)
    steps.touch(TENANT, [key(1), key(2)])
    steps.miss(9)
    steps.want_grants(2)
    steps.probe("vllm", "sha256", b"p")
    assert steps.unsent
    assert daemon.received.empty()
    steps.flush()
    request = daemon.next()
    assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]
    assert (request.number, request.instance_id, request.grants_wanted, request.misses) == (1, b"i" * 16, [2], 9)
    [commits] = request.commits
    assert (commits.slots, commits.generations, commits.keys, commits.memory_only) == ([1], [2], [key(1)], True)
    assert [(at.slot, at.generation) for at in (*request.aborts, *request.leases)] == [(3, 4), (5, 6)]
    assert [(release.at.slot, release.loaded) for release in request.releases] == [(7, True)]
    assert [list(chain.keys) for chain in request.touches] == [[key(1), key(2)]]
    assert request.probe.value == b"p"
    assert not steps.unsent


def test_many_operations_are_split_and_a_chain_is_touched_tail_first(daemon: FakeDaemon, steps: Steps) -> None:
    keys = [key(name) for name in range(2 * OPERATIONS_PER_STEP_MAX + 1)]
    for slot in range(OPERATIONS_PER_STEP_MAX + 1):
        steps.abort(slot, 1)
    steps.touch(TENANT, keys, again=100, worth_disk=258)
    steps.settle(WAIT_S)
    requests = [daemon.next() for _ in range(daemon.received.qsize())]
    assert [len(request.aborts) for request in requests[:2]] == [OPERATIONS_PER_STEP_MAX, 1]
    touches = [chain for request in requests for chain in request.touches]
    assert [list(chain.keys) for chain in touches] == [keys[257:], keys[1:257], keys[:1]]
    assert [(chain.again, chain.worth_disk) for chain in touches] == [(0, 1), (99, 256), (1, 1)]
    assert [request.number for request in requests] == list(range(1, len(requests) + 1))


def test_commits_travel_in_order_together_with_those_of_their_tenant_as_far_as_a_message_takes_them(
    daemon: FakeDaemon, steps: Steps
) -> None:
    def answer(request: store_pb2.StepRequest) -> store_pb2.StepReply:
        slots = [slot for commits in request.commits for slot in commits.slots]
        outcomes = [store_pb2.OUTCOME_PRESENT if slot % 3 == 0 else store_pb2.OUTCOME_STORED for slot in slots]
        return store_pb2.StepReply(number=request.number, outcomes=outcomes)

    daemon.answer = answer
    count = OPERATIONS_PER_STEP_MAX + 3
    keys, other = [key(slot) for slot in range(count)], b"u" * 16
    tickets = [steps.commit(slot, 1, TENANT, keys[slot], b"") for slot in range(2)]
    tickets += [steps.commit(slot, 1, other, keys[slot], b"") for slot in range(2, 4)]
    tickets += [steps.commit(4, 1, other, keys[4], keys[3], memory_only=True)]
    tickets += steps.commit_many(commits_of([(slot, 1) for slot in range(5, count)], TENANT, keys[5:], keys[4:-1]))
    steps.abort(count, 1)
    outcomes = steps.wait(tickets, WAIT_S)
    assert outcomes == [Outcome.PRESENT if slot % 3 == 0 else Outcome.STORED for slot in range(count)]
    first, second = daemon.next(), daemon.next()
    sent = [*first.commits, *second.commits]
    assert [(commits.tenant, len(commits.slots), commits.memory_only) for commits in sent] == [
        (TENANT, 2, False), (other, 2, False), (other, 1, True), (TENANT, OPERATIONS_PER_STEP_MAX - 2, False),
    ]  # fmt: skip
    assert len(first.commits) == 3  # what does not fit goes whole with the next, and the rest behind it
    assert [len(request.aborts) for request in (first, second)] == [0, 1]
    assert not steps.unsent
    assert steps._operations == 0
    assert [slot for commits in sent for slot in commits.slots] == list(range(count))
    assert [parent for commits in sent for parent in commits.parents] == [b"", b"", b"", b"", *keys[3:-1]]


def test_many_slots_are_asked_for_in_several_messages_each_with_the_tails(daemon: FakeDaemon, steps: Steps) -> None:
    steps.want_grants(GRANTS_PER_STEP_MAX - 10, kind=1)
    assert len(steps.wait_grants(GRANTS_PER_STEP_MAX + 30, WAIT_S, tails=[(7, 8)])) == GRANTS_PER_STEP_MAX + 30
    steps.settle(WAIT_S)
    requests = [daemon.next() for _ in range(daemon.received.qsize())]
    assert [list(request.grants_wanted) for request in requests[:3]] == [
        [GRANTS_PER_STEP_MAX, 0], [30, GRANTS_PER_STEP_MAX - 30], [0, 20],
    ]  # fmt: skip
    assert [[at.slot for at in request.tails] for request in requests[:3]] == [[7], [7], [7]]
    assert not any(request.grants_wanted or request.tails for request in requests[3:])
    assert (steps.grants_free(1), steps.grants_coming(1)) == (GRANTS_PER_STEP_MAX - 10, 0)


def test_what_is_counted_while_a_daemon_hangs_is_bounded(
    daemon: FakeDaemon, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks in memory are loaded all the while, and each of them is counted."""
    monkeypatch.setattr(steps_module, "RELEASES_QUEUED_MAX", 1_000)
    daemon.go_on.clear()
    for slot in range(3_000):
        steps.lease(slot, 1)
        steps.release(slot, 1, loaded=True)
        steps.release(slot, 2, loaded=True)
    for _ in range(2 * steps_module.MISSES_QUEUED_MAX):
        steps.miss(3)
    assert (len(steps._releases), len(steps._leases), len(steps._held), steps._operations) == (1_000, 0, 0, 1_000)
    daemon.go_on.set()
    steps.settle(WAIT_S)
    requests = [daemon.next() for _ in range(daemon.received.qsize())]
    assert sum(len(request.releases) for request in requests) == 1_000
    assert sum(request.misses for request in requests) == 3 * steps_module.MISSES_QUEUED_MAX
    assert steps._operations == 0


def test_after_a_broken_stream_the_unanswered_are_sent_again_under_their_numbers(
    daemon: FakeDaemon, steps: Steps
) -> None:
    broken = iter([True])

    def break_once(request: store_pb2.StepRequest) -> store_pb2.StepReply | None:
        return None if next(broken, False) else grant_all(request)

    daemon.answer = break_once
    ticket = steps.commit(1, 2, TENANT, key(1), b"")
    assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]
    first, again = daemon.next(), daemon.next()
    assert first == again
    assert first.number == 1


def test_no_more_messages_than_the_daemon_remembers_are_unanswered(
    daemon: FakeDaemon, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "GRANTS_IDLE_S", 1000)  # the sender does not look by itself
    steps = Steps(session)  # type: ignore[arg-type]
    daemon.go_on.clear()
    for slot in range(OPERATIONS_PER_STEP_MAX * (STEPS_UNANSWERED_MAX + 2)):
        steps.abort(slot, 1)
    steps.flush()
    daemon.next()  # the first waits for its answer, the rest behind it
    with pytest.raises(Unavailable, match=r"did not answer a step message within 0.2 s"):
        steps.settle(0.2)
    assert len(steps._unanswered) == STEPS_UNANSWERED_MAX
    assert steps._anything_queued()
    assert not steps.unsent  # an engine that took steps until it is sent would do nothing else while the daemon hangs
    steps.abort(1, 2)
    assert not steps.unsent
    daemon.go_on.set()
    steps.settle(WAIT_S)
    assert not steps._anything_queued()
    steps.abort(1, 3)
    assert steps.unsent
    steps.close()


def test_a_lost_session_drops_everything_and_ends_every_wait(
    daemon: FakeDaemon, session: FakeSession, steps: Steps
) -> None:
    daemon.go_on.clear()
    ticket = steps.commit(1, 2, TENANT, key(1), b"")
    lost = threading.Timer(0.05, session.lose)
    lost.start()
    with pytest.raises(Unavailable, match=r"the daemon has gone; attach again"):
        steps.wait([ticket], WAIT_S)
    lost.join()
    assert steps.broken
    assert not steps.unsent
    steps.commit(1, 3, TENANT, key(1), b"")
    steps.want_grants(3)
    assert (steps.unsent, steps.grants_coming(), steps.take_grants(9)) == (False, 0, [])
    with pytest.raises(Unavailable):
        steps.wait_grants(1, WAIT_S)


def refuse(daemon: FakeDaemon) -> None:
    daemon.answer = lambda _: None
    daemon.status = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much", ((ERROR_METADATA_KEY, "LimitExceeded"),))


def test_a_message_that_the_daemon_refuses_is_not_sent_for_ever_and_ends_the_session(
    daemon: FakeDaemon, session: FakeSession, steps: Steps
) -> None:
    refuse(daemon)
    ticket = steps.commit(1, 2, TENANT, key(1), b"")
    with pytest.raises(LimitExceeded, match=r"too much"):
        steps.wait([ticket], WAIT_S)
    assert steps.broken
    assert session.given_up.wait(WAIT_S)
    assert str(session.refusal) == "too much"
    assert daemon.received.qsize() == 1


def test_an_answer_that_is_not_understood_ends_the_session_and_every_wait(
    daemon: FakeDaemon, session: FakeSession, steps: Steps
) -> None:
    unknown = cast("store_pb2.Outcome", 99)
    daemon.answer = lambda request: store_pb2.StepReply(number=request.number, outcomes=[unknown])
    ticket = steps.commit(1, 2, TENANT, key(1), b"")
    with pytest.raises(KVStoreError, match=r"not understood: KeyError: 99"):
        steps.wait([ticket], WAIT_S)
    assert session.given_up.wait(WAIT_S)


@pytest.mark.parametrize("same_daemon", [True, False])
def test_what_a_refused_stream_held_the_next_one_gives_back(
    daemon: FakeDaemon, session: FakeSession, steps: Steps, same_daemon: bool
) -> None:
    granted = steps.wait_grants(6, WAIT_S)
    assert len(granted) == 6
    steps.want_grants(1, kind=1)  # never taken
    steps.settle(WAIT_S)
    refuse(daemon)
    steps.abort(*granted[0])
    steps.commit(*granted[1], TENANT, key(1), b"")
    steps.flush()
    assert session.given_up.wait(WAIT_S)
    daemon.answer = grant_all
    steps.abort(*granted[2])  # copies into these ended before there was another session
    steps.commit(*granted[3], TENANT, key(3), b"")
    steps.close()
    other = FakeSession(session.channel)
    if not same_daemon:
        other.instance_id = b"j" * 16
    successor = Steps(other)  # type: ignore[arg-type]
    steps.hand_over(successor)
    steps.abort(*granted[4])  # and this one after
    while not daemon.received.empty():
        daemon.next()
    successor.settle(WAIT_S)
    successor.close()
    aborted = [(at.slot, at.generation) for _ in range(daemon.received.qsize()) for at in daemon.next().aborts]
    assert sorted(aborted) == ([*granted[:5], (100, 2)] if same_daemon else [])


@pytest.mark.parametrize("same_daemon", [True, False])
def test_what_a_stream_held_whose_connection_ended_though_the_daemon_lives_the_next_one_gives_back(
    daemon: FakeDaemon, session: FakeSession, steps: Steps, same_daemon: bool
) -> None:
    granted = steps.wait_grants(6, WAIT_S)
    steps.want_grants(1, kind=1)  # never taken
    steps.settle(WAIT_S)
    daemon.go_on.clear()
    steps.abort(*granted[0])
    steps.commit(*granted[1], TENANT, key(1), b"")
    steps.want_grants(2)  # nobody will know which
    steps.flush()
    while not daemon.next().aborts:
        pass
    steps.abort(*granted[2])  # not sent
    steps.flush()
    session.lose()
    assert steps.broken
    daemon.go_on.set()
    steps.commit(*granted[3], TENANT, key(3), b"")  # the copy into this one ended before there was another session
    other = FakeSession(session.channel)
    other.token = b"another"
    if not same_daemon:
        other.instance_id = b"j" * 16
    successor = Steps(other)  # type: ignore[arg-type]
    steps.hand_over(successor)
    steps.abort(*granted[4])  # and this one after; into the last one it still runs
    while not daemon.received.empty():
        daemon.next()
    successor.settle(WAIT_S)
    successor.close()
    sent = [daemon.next() for _ in range(daemon.received.qsize())]
    aborted = [(at.slot, at.generation) for request in sent for at in request.aborts]
    assert sorted(aborted) == ([*granted[:5], (100, 2)] if same_daemon else [])
    told = [(request.predecessor.token, request.predecessor.answered) for request in sent if request.predecessor.token]
    assert told == ([(b"token", 2)] if same_daemon else [])


def test_what_a_successor_could_not_give_back_either_the_one_after_it_does(
    daemon: FakeDaemon, session: FakeSession, steps: Steps
) -> None:
    [granted, running] = steps.wait_grants(2, WAIT_S)
    session.lose()
    steps.abort(*granted)
    daemon.go_on.clear()
    others = [FakeSession(session.channel) for _ in range(2)]
    others[0].token = b"another"
    second, third = (Steps(other) for other in others)  # type: ignore[arg-type]
    steps.hand_over(second)
    while not daemon.next().HasField("predecessor"):
        pass
    others[0].lose()
    daemon.go_on.set()
    steps.abort(*running)
    second.hand_over(third)
    while not daemon.received.empty():
        daemon.next()
    third.settle(WAIT_S)
    third.close()
    sent = [daemon.next() for _ in range(daemon.received.qsize())]
    assert sorted((at.slot, at.generation) for request in sent for at in request.aborts) == sorted([granted, running])
    told = [(request.predecessor.token, request.predecessor.answered) for request in sent if request.predecessor.token]
    assert told == [(b"token", 1), (b"another", 0)]


@pytest.mark.parametrize("leased", [False, True])
def test_grants_nobody_uses_go_back(
    daemon: FakeDaemon, steps: Steps, monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    monkeypatch.setattr(steps_module, "GRANTS_IDLE_S", 0.05)
    if leased:  # a lease is renewed less often than grants may lie idle
        steps.lease(7, 8)
    assert len(steps.wait_grants(3, WAIT_S)) == 3  # these are the caller's now
    daemon.next()
    steps.want_grants(2)
    steps.flush()
    assert daemon.next().grants_wanted == [2]
    request = daemon.next()
    assert [at.slot for at in request.aborts] == [0, 1]
    assert steps.grants_free() == 0


def test_grants_that_somebody_expects_to_use_stay_and_only_the_others_go_back(
    daemon: FakeDaemon, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "GRANTS_IDLE_S", 0.05)
    steps.keep_grants([0, 2])
    for kind in range(3):
        steps.want_grants(3, kind=kind)
    steps.flush()
    assert list(daemon.next().grants_wanted) == [3, 3, 3]
    assert len(daemon.next().aborts) == 3 + 1 + 3
    assert [steps.grants_free(kind) for kind in range(3)] == [0, 2, 0]
    begin_s = time.monotonic()
    while steps.grants_free(1) > 1:  # what is expected changes with every request, and is no use of the rest
        assert time.monotonic() < begin_s + WAIT_S
        for counts in ([1, 1], [0, 1]):
            steps.keep_grants(counts)
            time.sleep(0.005)
    steps.keep_grants([])
    assert [len(daemon.next().aborts) for _ in range(2)] == [1, 1]


def test_decisions_that_refused_many_chunks_travel_in_several_messages(daemon: FakeDaemon, steps: Steps) -> None:
    refused = [key.to_bytes(32) for key in range(300)]
    for number in range(1, 9):
        steps.tell(Decision(number, f"request-{number}", True, "WORTH_IT", 4_800, refused=refused))
    steps.flush()
    messages: list[store_pb2.StepRequest] = []
    while sum(len(message.decisions) for message in messages) < 8:
        messages.append(daemon.next())
    assert [each.number for message in messages for each in message.decisions] == list(range(1, 9))
    assert max(sum(len(each.refused) for each in message.decisions) for message in messages) <= 8 << 10
    steps.settle(WAIT_S)


def test_leases_are_renewed_until_released(
    daemon: FakeDaemon, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "RENEW_LEASES_S", 0.05)
    steps = Steps(session)  # type: ignore[arg-type]
    steps.lease(1, 2)
    steps.lease(1, 2)
    steps.flush()
    for _ in range(3):
        assert [at.slot for at in daemon.next().leases] == [1]
    steps.release(1, 2, loaded=True)  # one user is left: released and taken again in one message
    steps.flush()
    while not (request := daemon.next()).releases:
        pass
    assert [at.slot for at in request.leases] == [1]
    steps.release(1, 2, loaded=False)
    steps.settle(WAIT_S)
    while not (request := daemon.next()).releases:
        pass
    assert list(request.leases) == []
    assert not steps._held
    steps.close()


def test_grants_asked_for_before_a_fresh_namespace_are_given_back(daemon: FakeDaemon, steps: Steps) -> None:
    steps.want_grants(2)
    daemon.go_on.clear()
    steps.flush()
    daemon.next()
    steps.fresh_namespace()
    steps.flush()
    daemon.go_on.set()
    steps.settle(WAIT_S)
    assert steps.grants_free() == 0
    aborted = [at.slot for _ in range(daemon.received.qsize()) for at in daemon.next().aborts]
    assert aborted == [0, 1]
    assert len(steps.wait_grants(1, WAIT_S)) == 1


def test_commits_that_the_table_shows_are_not_waited_for_and_their_answer_is_kept_for_nobody(
    daemon: FakeDaemon, steps: Steps
) -> None:
    daemon.go_on.clear()
    tickets = [steps.commit(slot, 1, TENANT, key(slot), b"") for slot in range(2)]
    assert steps.wait(tickets, WAIT_S, shown=True) == [Outcome.STORED] * 2
    daemon.go_on.set()
    steps.settle(WAIT_S)
    assert not steps._outcomes
    assert not steps._unasked


def test_commits_that_the_table_does_not_show_have_the_outcome_that_is_answered(
    daemon: FakeDaemon, steps: Steps
) -> None:
    quota = store_pb2.OUTCOME_REJECTED_QUOTA
    daemon.answer = lambda request: store_pb2.StepReply(
        number=request.number, outcomes=[quota for commits in request.commits for _ in commits.keys]
    )
    tickets = [steps.commit(1, 1, TENANT, key(1), b"")]
    assert not steps.has_outcome(tickets[0])
    assert steps.wait(tickets, WAIT_S) == [Outcome.REJECTED_QUOTA]
    assert not steps._outcomes
    assert not steps._unasked


def test_a_message_that_is_sent_on_arena_sock_and_answered_there_does_not_go_on_the_stream(
    daemon: FakeDaemon, session: FakeSession, steps: Steps
) -> None:
    steps.settle(WAIT_S)  # the stream is open: whatever is unanswered then goes on it
    daemon.next()
    ticket = steps.commit(1, 1, TENANT, key(1), b"")
    steps.want_grants(2)
    steps.send()
    assert not steps.unsent
    session.answer(grant_all(session.sent.get(timeout=WAIT_S)))
    assert steps.has_outcome(ticket)
    assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]
    assert steps.take_grants(2) == [(0, 2), (1, 2)]
    steps.settle(WAIT_S)
    assert daemon.next().number == 3
    assert daemon.received.empty()


@pytest.mark.parametrize("later", ["wait", "flush", "settle", "close", "nothing, and time passes"])
def test_a_message_that_is_not_answered_on_arena_sock_goes_on_the_stream_before_any_later_one(
    daemon: FakeDaemon, session: FakeSession, steps: Steps, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "DIRECT_S", 0.0 if later.startswith("nothing") else 100 * WAIT_S)
    if later.startswith("nothing"):
        monkeypatch.setattr(steps_module, "GRANTS_IDLE_S", 0.01)
        steps.settle(WAIT_S)  # the sender looks again after that time from now on
        daemon.next()
    ticket = steps.commit(1, 1, TENANT, key(1), b"")
    steps.send()
    sent = session.sent.get(timeout=WAIT_S)
    if later == "flush":
        steps.miss(1)
        steps.flush()
    elif later == "settle":
        steps.settle(WAIT_S)
    elif later == "close":
        steps.close()
    if later == "wait":
        assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]
    assert daemon.next() == sent
    if later in ("flush", "settle"):
        assert daemon.next().number == sent.number + 1
    if later in ("flush", "nothing, and time passes"):
        assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]
        session.answer(grant_all(sent))  # late, and nobody waits for it
        assert not steps._outcomes


def test_a_message_that_arena_sock_does_not_take_goes_on_the_stream_at_once(
    daemon: FakeDaemon, session: FakeSession, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "DIRECT_S", 100 * WAIT_S)
    session.takes_steps = False
    steps.settle(WAIT_S)  # as above
    daemon.next()
    steps.miss(1)
    steps.send()
    assert daemon.next().misses == 1


def test_while_an_answer_is_missing_nothing_is_sent_on_arena_sock(
    daemon: FakeDaemon, session: FakeSession, steps: Steps
) -> None:
    daemon.go_on.clear()
    steps.miss(1)
    steps.flush()
    assert daemon.next().number == 1
    ticket = steps.commit(1, 1, TENANT, key(1), b"")
    steps.send()
    assert session.sent.empty()
    daemon.go_on.set()
    assert steps.wait([ticket], WAIT_S) == [Outcome.STORED]


def test_what_was_sent_on_arena_sock_is_left_to_the_next_session_when_this_one_is_lost(
    session: FakeSession, steps: Steps
) -> None:
    ticket = steps.commit(1, 7, TENANT, key(1), b"")
    steps.send()
    session.lose()
    with pytest.raises(Unavailable):
        steps.wait([ticket], WAIT_S)
    assert steps._left == [(1, 7)]


def test_an_answer_on_arena_sock_that_is_not_understood_ends_the_session_and_every_wait(
    session: FakeSession, steps: Steps
) -> None:
    ticket = steps.commit(1, 1, TENANT, key(1), b"")
    steps.send()
    assert session.on_step is not None
    session.on_step(b"\xff")
    with pytest.raises(KVStoreError, match="the daemon's answer was not understood"):
        steps.wait([ticket], WAIT_S)
    assert session.given_up.is_set()


def test_a_full_queue_drops_touches_first_and_then_turns_commits_into_aborts(
    daemon: FakeDaemon, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "QUEUED_OPERATIONS_MAX", 4)
    steps.touch(TENANT, [key(1), key(2)])
    tickets = [steps.commit(slot, 1, TENANT, key(slot), b"") for slot in range(6)]
    steps.touch(TENANT, [key(1)])
    outcomes = steps.wait(tickets, WAIT_S)
    assert outcomes == [Outcome.STORED] * 4 + [Outcome.NOT_GRANTED] * 2
    request = daemon.next()
    assert ([at.slot for at in request.aborts], list(request.touches)) == ([4, 5], [])


def test_a_full_queue_aborts_no_commit_that_somebody_waits_for(
    daemon: FakeDaemon, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "QUEUED_OPERATIONS_MAX", 4)
    refs, keys = [(slot, 1) for slot in range(6)], [key(slot) for slot in range(6)]
    steps.touch(TENANT, keys[:2])
    tickets = steps.commit_many(commits_of(refs, TENANT, keys, [b"", *keys[:-1]]))
    assert steps.wait(tickets, WAIT_S) == [Outcome.STORED] * 6
    request = daemon.next()
    [commits] = request.commits
    assert list(commits.slots) == list(range(6))
    assert list(commits.parents) == [b"", *keys[:-1]]
    assert list(request.touches) == []


def test_closing_sends_what_is_queued_and_gives_grants_back(daemon: FakeDaemon, session: FakeSession) -> None:
    steps = Steps(session)  # type: ignore[arg-type]
    steps.want_grants(2)
    steps.settle(WAIT_S)
    assert steps.grants_free() == 2
    steps.miss(3)
    steps.close()
    daemon.next()
    request = daemon.next()
    assert (request.misses, len(request.aborts)) == (3, 2)
    assert not steps._receiver.is_alive()


def test_the_groups_state_arrives_unasked(daemon: FakeDaemon, session: FakeSession) -> None:
    states: queue.Queue[GroupState] = queue.Queue()
    steps = Steps(session, on_group=states.put)  # type: ignore[arg-type]

    def refuse(request: store_pb2.StepRequest) -> store_pb2.StepReply:
        return store_pb2.StepReply(number=request.number, group=store_pb2.GroupState(refused="why"))

    daemon.answer = refuse
    steps.settle(WAIT_S)
    assert states.get(timeout=WAIT_S).refused == "why"
    assert steps.group.refused == "why"
    steps.close()


def test_grants_and_chains_keep_their_kind(daemon: FakeDaemon, steps: Steps) -> None:
    steps.want_grants(2, kind=1)
    steps.want_grants(1, kind=0)
    steps.touch(TENANT, [b"k" * 16], kind=1)
    steps.promote(TENANT, [b"l" * 16], kind=2)
    assert (steps.grants_coming(0), steps.grants_coming(1), steps.grants_coming(2)) == (1, 2, 0)
    steps.settle(WAIT_S)
    request = daemon.next()
    assert list(request.grants_wanted) == [1, 2]
    assert [chain.kind for chain in (*request.touches, *request.promotes)] == [1, 2]
    assert (steps.grants_free(0), steps.grants_free(1), steps.grants_free(2)) == (1, 2, 0)
    assert [slot for slot, _ in steps.take_grants(9, kind=1)] == [100, 101]
    assert [slot for slot, _ in steps.take_grants(9)] == [0]
