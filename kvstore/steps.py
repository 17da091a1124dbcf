"""The message stream of one session: what a scheduler step or a client call wants to tell the daemon, in few messages.

Concurrency: callers append to queues under `_lock` and never wait for the daemon (but in `wait*`, `settle`, `close`).
gRPC's own thread draws messages from `_requests` (the sender), one thread of ours applies the answers (the receiver).
Everything below is guarded by `_lock`; the callback `on_group` runs on the receiver's thread, outside it. A caller that
is going to wait sends its message itself, on arena.sock (`send`), and the session's watcher applies the answer.

Order: messages are numbered, answered in order, and applied by the daemon once each. When the stream breaks while the
session lives, the unanswered ones are sent again under their numbers, so a commit is neither lost nor done twice. So is
one that was sent on arena.sock, once an answer is late or a later message is to follow; nothing depends on that way.
When the daemon dies the session says so: `broken` is True, everything queued is dropped, and nobody waits any more. So
it is when the daemon refuses a message. The daemon lives then, as it may where only the connection on arena.sock has
ended, and the slots that this stream held are the group's: the next session's stream aborts them (`hand_over`), each
once the copy into it has ended, and names the last answer that arrived here, for what later ones granted nobody knows
but the daemon. When this process dies, the daemon takes its grants back once the process has ended.

Bounds: at most QUEUED_OPERATIONS_MAX operations are queued; then touches are dropped first, and commits become aborts.
Of decisions the newest DECISIONS_QUEUED_MAX wait to be sent; the daemon only remembers them for a person to ask.
Aborts and commits that a caller waits for are never dropped: their number is bounded by the grants held, and by what
one call takes. Of what is loaded while a daemon hangs RELEASES_QUEUED_MAX chunks are counted; a lease whose release is
dropped ends by itself.
"""

import enum
import itertools
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import grpc

from kvstore.decisions import Decision, Room
from kvstore.errors import KVStoreError, Unavailable
from kvstore.limits import (
    DECISIONS_PER_STEP_MAX,
    GRANTS_IDLE_S,
    GRANTS_PER_STEP_MAX,
    KEYS_PER_CALL_MAX,
    LEASE_MS,
    OPERATIONS_PER_STEP_MAX,
    PROMOTES_PER_ROUND,
    REFUSED_BYTES_PER_STEP,
    STEPS_UNANSWERED_MAX,
    TAILS_PER_STEP_MAX,
)
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import store_pb2, store_pb2_grpc
from kvstore.session import GroupState, Session

QUEUED_OPERATIONS_MAX = 16_384
RELEASES_QUEUED_MAX = KEYS_PER_CALL_MAX  # what one call may load
MISSES_QUEUED_MAX = 4_096  # calls
DECISIONS_QUEUED_MAX = 1_024
READS_KEPT = 256  # reports that nobody has taken, the newest
OUTCOMES_KEPT = 65_536  # of commits that nobody waits for, the newest so many
RENEW_LEASES_S = LEASE_MS / 1000 / 3
RECONNECT_BACKOFF_MIN_S, RECONNECT_BACKOFF_MAX_S = 0.01, 1.0
CLOSE_TIMEOUT_S = 2.0
DIRECT_S = 0.05  # for the answer to what was sent on arena.sock; then the message goes on the stream as well

Ref = tuple[int, int]  # slot, generation


class Outcome(enum.IntEnum):
    """Of a commit, or why fewer grants came than were wanted. Numbers as on the wire."""

    UNSPECIFIED = store_pb2.OUTCOME_UNSPECIFIED
    STORED = store_pb2.OUTCOME_STORED
    PRESENT = store_pb2.OUTCOME_PRESENT
    REJECTED_TIER_FULL = store_pb2.OUTCOME_REJECTED_TIER_FULL
    REJECTED_QUOTA = store_pb2.OUTCOME_REJECTED_QUOTA
    REJECTED_ADMISSION = store_pb2.OUTCOME_REJECTED_ADMISSION
    REJECTED_TIER_SICK = store_pb2.OUTCOME_REJECTED_TIER_SICK
    NOT_GRANTED = store_pb2.OUTCOME_NOT_GRANTED


_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


class _Batch(NamedTuple):
    """Commits that travel together, a ticket for each."""

    commits: store_pb2.Commits
    tickets: list[int]


@dataclass(frozen=True, slots=True)
class _Chain:
    tenant: bytes
    keys: Sequence[bytes]
    kind: int
    again: int = 0
    worth_disk: int = 0


@dataclass(frozen=True, slots=True)
class _Unanswered:
    request: store_pb2.StepRequest
    tickets: list[int]
    promote: int  # the last call of `promote` that is in it or before it


class _Direct(NamedTuple):
    """A message that was sent on arena.sock, and until when it need not go on the stream as well."""

    request: store_pb2.StepRequest
    until_s: float


@dataclass(slots=True)
class _News:
    """What admission and the daemon tell each other beside the work itself."""

    decisions: OrderedDict[int, Decision] = field(default_factory=OrderedDict)  # to be sent, by number
    learning: str = ""
    learned: dict[str, str] = field(default_factory=dict)  # to be sent
    learned_wanted: bool = False
    learned_there: dict[str, str] = field(default_factory=dict)  # as the daemon sent it
    reads: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=READS_KEPT))
    cpu_full: bool = False
    fs: Room = Room.NOT_ASKED


class Steps:
    """See the module's docstring. One per session."""

    def __init__(self, session: Session, *, on_group: Callable[[GroupState], None] | None = None) -> None:
        self._session = session
        self._stub = store_pb2_grpc.SessionsStub(session.channel)
        self._on_group = on_group
        self._lock = threading.Lock()
        # Apart, so that what is waited for and what is to be sent do not wake each other's threads for nothing.
        self._changed = threading.Condition(self._lock)  # answers, or the end: for callers and the receiver
        self._to_send = threading.Condition(self._lock)  # for the sender

        self._commits: deque[_Batch] = deque()
        self._aborts: deque[Ref] = deque()
        self._releases: deque[tuple[Ref, bool, bool]] = deque()
        self._leases: dict[Ref, None] = {}  # to be taken or renewed
        self._touches: deque[_Chain] = deque()  # pieces that fit a message, the tail's first
        self._promotes: deque[tuple[_Chain, int, bool]] = deque()  # with the call's number; waited for?
        self._promotes_asked = self._promotes_sent = self._promotes_answered = 0  # calls
        self._operations = 0  # in the queues above
        # Not guarded: a deque's append and popleft are whole by themselves.
        self._misses: deque[int] = deque(maxlen=MISSES_QUEUED_MAX)
        self._wanted: Counter[int] = Counter()  # by kind, as all about grants
        self._tails: set[Ref] = set()
        self._probe: store_pb2.Probe | None = None
        self._fresh = False
        self._ping = False
        self._flushing = False
        self._news = _News()

        self._held: dict[Ref, int] = {}  # leases held, with how many users each has here
        self._renew_at_s = time.monotonic() + RENEW_LEASES_S
        self._grants: dict[int, deque[Ref]] = defaultdict(deque)
        self._grants_used_s = time.monotonic()
        self._grants_kept: Sequence[int] = ()  # by kind
        self._grants_coming: Counter[int] = Counter()
        self._grants_short: dict[int, Outcome] = {}

        self._tickets = 0
        self._outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self._unasked: set[int] = set()  # tickets whose outcomes nobody will ask for
        self._number = 0
        self._answered = 0  # the last number
        self._fresh_number = 0  # grants answered to earlier messages belong to the namespace left behind
        self._unanswered: OrderedDict[int, _Unanswered] = OrderedDict()
        self._direct: _Direct | None = None  # the last of the unanswered, if it is not on the stream

        self._stream = 0  # counts the streams opened; a sender of an earlier one ends
        self._call: grpc.Call | None = None
        self._closing = False
        self._failure: KVStoreError | None = None
        # Of this stream once it is broken, and of those before it: for a successor with the same daemon.
        self._left: list[Ref] = []  # granted, and nobody writes to them any more
        self._predecessors: deque[tuple[bytes, int]] = deque()  # tokens, and the last number answered; to be told
        self._successor: Steps | None = None
        self.group = session.group_state

        self._receiver = threading.Thread(target=self._receive, name="kvstore-steps", daemon=True)
        self._receiver.start()
        session.before_unmap(self.close)
        session.on_step = self._apply_direct
        session.when_lost(self._daemon_gone)

    # -- what callers ask for; none of these waits -------------------------------------------------------------------

    def want_grants(self, count: int, *, kind: int = 0, tails: Collection[Ref] = ()) -> None:
        """`tails`: the last stored chunks of the chains to be continued; room is not made by evicting them."""
        with self._lock:
            if self._accepting():
                self._want(count, kind, tails)

    def take_grants(self, count: int, *, kind: int = 0) -> list[Ref]:
        """Up to `count` of the slots that arrived, each to be committed or aborted."""
        with self._lock:
            return self._take(count, kind)

    def keep_grants(self, counts: Sequence[int]) -> None:
        """So many of each kind a caller still expects to use. Only what is beyond that is given back for idleness: one
        step of an engine that reads a long prompt lasts longer. Called by one thread, and by that in every step: hence
        no lock where nothing changes."""
        if counts != self._grants_kept:
            with self._lock:
                self._grants_kept = counts

    def return_grants(self) -> None:
        """Give back those that arrived and were not taken."""
        with self._lock:
            self._return_grants()

    def grants_free(self, kind: int = 0) -> int:
        return len(self._grants.get(kind, ()))  # a reader without the lock inserts nothing

    def grants_coming(self, kind: int = 0) -> int:
        """Asked for and not answered."""
        return self._grants_coming[kind]

    def grants_short(self, kind: int = 0) -> Outcome:
        """Why the last answer brought fewer than asked for; UNSPECIFIED when it did not."""
        return self._grants_short.get(kind, Outcome.UNSPECIFIED)

    def commit(
        self,
        slot: int,
        generation: int,
        tenant: bytes,
        key: bytes,
        parent: bytes,
        *,
        memory_only: bool = False,
        decision: int = 0,
    ) -> int:
        """The chunk is complete in the slot: make it visible. Returns a ticket for `wait`. `parent` may be b"".
        `memory_only`: it is not to be written through to the fs tier. `decision`: the number of the one to store it."""
        self._session.require_own_process()
        with self._lock:
            self._tickets += 1
            self._grants_used_s = time.monotonic()
            if not self._accepting():
                self._leave([(slot, generation)])
                return self._tickets
            if self._operations >= QUEUED_OPERATIONS_MAX:
                self._drop_touches()
            if self._operations >= QUEUED_OPERATIONS_MAX:
                self._settle_tickets([(self._tickets, Outcome.NOT_GRANTED)])
                self._aborts.append((slot, generation))
            else:
                self._commit(slot, generation, tenant, key, parent, memory_only, decision)
            self._operations += 1
            return self._tickets

    def commit_many(self, commits: Sequence[store_pb2.Commits]) -> list[int]:
        """As `commit`, of what `commits_of` has made, for a caller that waits for the outcomes, which bounds the queue:
        a full one aborts none of them. Returns their tickets."""
        self._session.require_own_process()
        tickets: list[int] = []
        with self._lock:
            self._grants_used_s = time.monotonic()
            for each in commits:
                count = len(each.keys)
                first = self._tickets + 1
                self._tickets += count
                tickets += range(first, first + count)
                if not self._accepting():
                    self._leave(zip(each.slots, each.generations, strict=True))
                    continue
                if self._operations + count > QUEUED_OPERATIONS_MAX:
                    self._drop_touches()
                self._commits.append(_Batch(each, tickets[-count:]))
                self._operations += count
        return tickets

    def abort(self, slot: int, generation: int) -> None:
        with self._lock:
            if self._accepting():
                self._abort((slot, generation))
            else:
                self._leave([(slot, generation)])

    def hand_over(self, successor: "Steps") -> None:
        """This stream is broken; `successor` is of a new session of the same group. What this one holds, now and
        whenever a copy that still runs has ended, that one gives back. Of another daemon: nothing."""
        with self._lock:
            self._successor = successor
            left, self._left = self._left, []
            predecessors = list(self._predecessors)
            self._predecessors.clear()
            if self._is_of_successors_daemon():
                successor._succeed(predecessors)
                self._leave(left)

    def _succeed(self, predecessors: Iterable[tuple[bytes, int]]) -> None:
        with self._lock:
            self._predecessors += predecessors
            self._flush()

    def lease(self, slot: int, generation: int) -> None:
        """Ask that the chunk stay put. Renewed until as many `release` calls as `lease` calls came."""
        ref = (slot, generation)
        with self._lock:
            if not self._accepting():
                return
            self._held[ref] = self._held.get(ref, 0) + 1
            if self._held[ref] == 1:
                self._queue_lease(ref)

    def release(self, slot: int, generation: int, *, loaded: bool, promoted: bool = False) -> None:
        """A load ended. `loaded`: its bytes were used, which counts a hit (`promoted`: of fs). Without a lease it only
        counts."""
        ref = (slot, generation)
        with self._lock:
            if not self._accepting():
                return
            users = self._held.get(ref, 0)
            if users > 1:  # the message ends the lease, and takes it again for those who are left
                self._held[ref] = users - 1
                self._queue_lease(ref)
            elif users == 1:
                del self._held[ref]
                if self._leases.pop(ref, ref) is None:
                    self._operations -= 1
            if len(self._releases) >= RELEASES_QUEUED_MAX:
                return
            self._releases.append((ref, loaded, promoted))
            self._operations += 1

    def touch(
        self, tenant: bytes, keys: Sequence[bytes], *, kind: int = 0, again: int = 0, worth_disk: int = 0
    ) -> None:
        """The chain was used: head first. Dropped when the queue is full. `again`: so many of its keys, from the head,
        the same request used before, by a touch or a commit; this is no further use of those. `worth_disk`: so many,
        from the head, are to be written through to the fs tier if they are in memory only."""
        with self._lock:
            if not self._accepting() or self._operations + len(keys) > QUEUED_OPERATIONS_MAX:
                return
            for end in range(len(keys), 0, -OPERATIONS_PER_STEP_MAX):
                begin = max(0, end - OPERATIONS_PER_STEP_MAX)
                known, worth = (min(max(0, count - begin), end - begin) for count in (again, worth_disk))
                self._touches.append(_Chain(tenant, keys[begin:end], kind, known, worth))
            self._operations += len(keys)

    def promote(self, tenant: bytes, keys: Sequence[bytes], *, kind: int = 0, waited: bool = True) -> int:
        """Ask for at most PROMOTES_PER_ROUND chunks that only the fs tier has, head first. Once `promotes_answered` has
        reached the number returned, the table shows PENDING or CPU for those that are coming; the others are not.
        Dropped when the queue is full. `waited` False: nobody waits for them, or waits any more, so the daemon keeps
        no lease on what lands."""
        assert len(keys) <= PROMOTES_PER_ROUND, f"{len(keys)} chunks to be promoted in one round"
        with self._lock:
            self._promotes_asked += 1
            if self._accepting() and self._operations + len(keys) <= QUEUED_OPERATIONS_MAX:
                self._promotes.append((_Chain(tenant, keys, kind), self._promotes_asked, waited))
                self._operations += len(keys)
            return self._promotes_asked

    @property
    def promotes_answered(self) -> int:
        return self._promotes_answered

    def miss(self, count: int) -> None:
        """So many chunks were looked for and are in no tier. Never waits, not even for the lock: a lookup ends here."""
        if count and self._accepting():
            self._misses.append(count)

    def probe(self, engine_family: str, hash_algorithm: str, value: bytes) -> None:
        """The engine's hash of the fixed token list; a refusal arrives as the group's state."""
        with self._lock:
            if self._accepting():
                self._probe = store_pb2.Probe(engine_family=engine_family, hash_algorithm=hash_algorithm, value=value)

    def tell(self, decision: Decision) -> None:
        """For whoever asks the daemon about it: sent as it is when its message is made. Told again: sent again."""
        with self._lock:
            if not self._accepting():
                return
            self._news.decisions[decision.number] = decision
            while len(self._news.decisions) > DECISIONS_QUEUED_MAX:
                self._news.decisions.popitem(last=False)

    def ask_learned(self, learning: str) -> None:
        """Have the daemon send what engines like this one (`learning` says how it is) have learned."""
        with self._lock:
            if self._accepting():
                self._news.learning, self._news.learned_wanted = learning, True

    def learn(self, learned: Mapping[str, str]) -> None:
        """Have the daemon keep it for the next such engine: documents by name, newer ones replace older ones."""
        with self._lock:
            if self._accepting():
                self._news.learned.update(learned)

    def take_learned(self) -> dict[str, str]:
        """What has come since the last call. No lock where nothing has: this is asked in every step."""
        if not self._news.learned_there:
            return {}
        with self._lock:
            learned, self._news.learned_there = self._news.learned_there, {}
            return learned

    def take_reads(self) -> list[tuple[int, float]]:
        """Chunks read from disk for this group since the last call, those of one request together, and the seconds from
        its arrival until the last of them had landed. No lock where there are none: this is asked in every step."""
        if not self._news.reads:
            return []
        with self._lock:
            reads = list(self._news.reads)
            self._news.reads.clear()
            return reads

    @property
    def cpu_full(self) -> bool:
        """As of the last answer: what is stored displaces something."""
        return self._news.cpu_full

    @property
    def fs(self) -> Room:
        """As of the last answer."""
        return self._news.fs

    def fresh_namespace(self) -> None:
        """Leave all chunks of before behind. Slots granted before end as aborts, whatever is committed to them."""
        with self._lock:
            if self._accepting():
                self._fresh = True
                self._return_grants()

    def flush(self) -> None:
        """Have everything queued sent. Returns at once."""
        if not self._anything_queued():  # what this thread has queued it sees without the lock
            return
        self._session.require_own_process()
        with self._lock:
            self._flush()

    def send(self) -> None:
        """As `flush`, for who is going to wait: this thread gives the daemon the message, without gRPC's threads at
        both ends; unless an answer is missing, for answers come in order."""
        self._session.require_own_process()
        with self._lock:
            if self._unanswered or not self._accepting() or not self._anything_queued():
                self._flush()
                return
            request = self._make()
            self._direct = _Direct(request, time.monotonic() + DIRECT_S)
            self._flush()  # what one message does not take
        if not self._session.send_step(request.SerializeToString()):
            with self._lock:
                self._give_up_direct()

    @property
    def unsent(self) -> bool:
        """Anything queued that only a `flush` will send. What was flushed the sender sends by itself, if only when the
        daemon answers again. False when broken: nothing of it will ever be sent."""
        with self._lock:
            return self._accepting() and self._anything_queued() and not self._flushing

    @property
    def broken(self) -> bool:
        """The daemon that granted all this has gone, or refused a message."""
        return self._failure is not None

    # -- for the client: these wait ----------------------------------------------------------------------------------

    def wait(self, tickets: Sequence[int], timeout_s: float, *, shown: bool = False) -> list[Outcome]:
        """The outcomes of these commits. `shown`: the table shows all of them stored, as it may before the answer has
        come. Unavailable: the daemon went, or did not answer in time."""
        self._session.require_own_process()
        with self._lock:
            self._flush()
            if not shown:
                self._give_up_direct()
                self._wait_until(lambda: all(ticket in self._outcomes for ticket in tickets), timeout_s, "commits")
            outcomes = [self._outcomes.pop(ticket, None) for ticket in tickets]
            self._unasked.update(ticket for ticket, known in zip(tickets, outcomes, strict=True) if known is None)
            return [Outcome.STORED if known is None else known for known in outcomes]

    def has_outcome(self, ticket: int) -> bool:
        return ticket in self._outcomes

    def wait_grants(self, count: int, timeout_s: float, *, tails: Collection[Ref] = ()) -> list[Ref]:
        """Up to `count` slots of kind 0; fewer (see `grants_short`) once the daemon has answered. Unavailable."""
        self._session.require_own_process()
        with self._lock:
            self._want(count - len(self._grants[0]) - self._grants_coming[0], 0, tails)
            self._flush()
            self._wait_until(
                lambda: len(self._grants[0]) >= count or self._grants_coming[0] == 0, timeout_s, "a request for slots"
            )
            return self._take(count, 0)

    def settle(self, timeout_s: float) -> None:
        """Wait until everything queued before this call is applied; always one round trip. Unavailable."""
        self._session.require_own_process()
        with self._lock:
            self._ping = True
            self._flush()
            self._wait_until(lambda: not self._anything_queued() and not self._unanswered, timeout_s, "a step message")

    def close(self) -> None:
        """Send what is queued and give unused grants back (bounded wait), then end the stream. Idempotent."""
        with self._lock:
            if not self._closing:
                self._return_grants()
                self._closing = True
                self._flush()
                self._give_up_direct()
                deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
                while self._failure is None and (self._anything_queued() or self._unanswered):
                    if not self._changed.wait(deadline_s - time.monotonic()):
                        break
            self._stream += 1  # the sender ends, which ends the stream
            self._to_send.notify_all()
            self._changed.notify_all()
            call = self._call
        if threading.current_thread() is self._receiver:
            return
        self._receiver.join(CLOSE_TIMEOUT_S)
        if self._receiver.is_alive() and call is not None:
            call.cancel()
            self._receiver.join(CLOSE_TIMEOUT_S)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _accepting(self) -> bool:
        return self._failure is None and not self._closing

    def _anything_queued(self) -> bool:
        return bool(
            self._operations
            or self._misses
            or self._wanted
            or self._probe is not None
            or self._predecessors
            or self._fresh
            or self._ping
            or self._news.decisions
            or self._news.learned
            or self._news.learned_wanted
        )

    def _flush(self) -> None:
        if self._anything_queued():
            self._flushing = True
            self._to_send.notify_all()

    def _wait_until(self, happened: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._failure is not None:
                raise type(self._failure)(str(self._failure))  # several threads may end here
            if happened():
                return
            if self._closing:
                raise Unavailable("the session was closed")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise Unavailable(f"the daemon did not answer {what} within {timeout_s:g} s")
            self._changed.wait(left_s)

    def _give_up_direct(self) -> None:
        """What was sent on arena.sock goes on the stream, too, if it is not answered yet."""
        if self._direct is not None:
            self._direct = self._direct._replace(until_s=0.0)
            self._to_send.notify_all()

    def _want(self, count: int, kind: int, tails: Collection[Ref]) -> None:
        if count > 0:
            self._tails.update(islice(tails, TAILS_PER_STEP_MAX - len(self._tails)))
            self._wanted[kind] += count
            self._grants_coming[kind] += count

    def _take(self, count: int, kind: int) -> list[Ref]:
        self._grants_used_s = time.monotonic()
        free = self._grants[kind]
        return [free.popleft() for _ in range(min(count, len(free)))]

    def _commit(
        self,
        slot: int,
        generation: int,
        tenant: bytes,
        key: bytes,
        parent: bytes,
        memory_only: bool,
        decision: int,
    ) -> None:
        """Under the last ticket; with those queued last where it is of their kind."""
        batch = self._commits[-1] if self._commits else None
        if (
            batch is None
            or batch.commits.tenant != tenant
            or batch.commits.memory_only is not memory_only
            or batch.commits.decision != decision
            or len(batch.tickets) >= OPERATIONS_PER_STEP_MAX
        ):
            batch = _Batch(store_pb2.Commits(tenant=tenant, memory_only=memory_only, decision=decision), [])
            self._commits.append(batch)
        batch.commits.slots.append(slot)
        batch.commits.generations.append(generation)
        batch.commits.keys.append(key)
        batch.commits.parents.append(parent)
        batch.tickets.append(self._tickets)

    def _abort(self, ref: Ref) -> None:
        self._aborts.append(ref)
        self._operations += 1

    def _leave(self, refs: Iterable[Ref]) -> None:
        """Slots that this stream can not give back any more, and that nobody writes to."""
        if self._successor is None:
            self._left += refs
        elif self._is_of_successors_daemon():
            for ref in refs:
                self._successor.abort(*ref)
            self._successor.flush()

    def _is_of_successors_daemon(self) -> bool:
        assert self._successor is not None
        return self._successor._session.instance_id == self._session.instance_id

    def _queue_lease(self, ref: Ref) -> None:
        if ref not in self._leases:
            self._leases[ref] = None
            self._operations += 1

    def _drop_touches(self) -> None:
        self._operations -= sum(len(chain.keys) for chain in self._touches)
        self._touches.clear()

    def _return_grants(self, kept: Sequence[int] = ()) -> None:
        """All but so many of each kind."""
        for kind, free in self._grants.items():
            for _ in range(self._beyond(kind, kept)):
                self._abort(free.popleft())

    def _beyond(self, kind: int, kept: Sequence[int]) -> int:
        return len(self._grants[kind]) - (kept[kind] if kind < len(kept) else 0)

    def _settle_tickets(self, outcomes: Iterable[tuple[int, Outcome]]) -> None:
        for ticket, outcome in outcomes:
            if ticket in self._unasked:
                self._unasked.discard(ticket)
            else:
                self._outcomes[ticket] = outcome
        while len(self._outcomes) > OUTCOMES_KEPT:
            self._outcomes.popitem(last=False)

    # -- the sender --------------------------------------------------------------------------------------------------

    def _requests(self, stream: int) -> Iterator[store_pb2.StepRequest]:
        """Runs on gRPC's thread."""
        with self._lock:
            again = [unanswered.request for unanswered in self._unanswered.values()]
            self._direct = None  # among them
        yield from again
        while (request := self._next_request(stream)) is not None:
            yield request

    def _next_request(self, stream: int) -> store_pb2.StepRequest | None:
        """Waits for something to send. None: this stream is to end."""
        with self._lock:
            while True:
                if self._stream != stream or self._failure is not None:
                    return None
                now_s = time.monotonic()
                wake_s = self._on_time(now_s)
                if self._direct is not None and (self._flushing or now_s >= self._direct.until_s):
                    request, self._direct = self._direct.request, None
                    return request
                if self._flushing and len(self._unanswered) < STEPS_UNANSWERED_MAX:
                    return self._make()
                self._to_send.wait(max(0.0, wake_s - time.monotonic()))

    def _make(self) -> store_pb2.StepRequest:
        """The next message; unanswered from here on."""
        request, tickets = self._message()
        self._unanswered[request.number] = _Unanswered(request, tickets, self._promotes_sent)
        self._flushing = self._anything_queued()
        return request

    def _on_time(self, now_s: float) -> float:
        """Renew leases and give idle grants back when it is time. Returns when to look again."""
        wakes = [now_s + GRANTS_IDLE_S]  # a look now and then finds what arrived without a flush
        if self._held:
            if now_s >= self._renew_at_s:
                for ref in self._held:
                    self._queue_lease(ref)
                self._flushing = True
                self._renew_at_s = now_s + RENEW_LEASES_S
            wakes.append(self._renew_at_s)
        else:
            self._renew_at_s = now_s + RENEW_LEASES_S
        if any(self._beyond(kind, self._grants_kept) > 0 for kind in self._grants):
            if now_s >= self._grants_used_s + GRANTS_IDLE_S:
                self._return_grants(self._grants_kept)
                self._flushing = True
            else:
                wakes.append(self._grants_used_s + GRANTS_IDLE_S)
        return min(wakes)

    def _decisions_that_fit(self) -> Iterator[store_pb2.Decision]:
        refused_bytes = 0
        for _ in range(min(DECISIONS_PER_STEP_MAX, len(self._news.decisions))):
            decision = self._news.decisions.popitem(last=False)[1].message()
            yield decision
            refused_bytes += len(decision.refused)
            if refused_bytes >= REFUSED_BYTES_PER_STEP:
                return

    def _wanted_that_fit(self) -> list[int]:
        """By kind; the rest of what is wanted goes with the next message, and its tails do, too."""
        room = GRANTS_PER_STEP_MAX
        fitting = [0] * (max(self._wanted, default=-1) + 1)
        for kind in sorted(self._wanted):
            fitting[kind] = min(self._wanted[kind], room)
            room -= fitting[kind]
        self._wanted -= Counter(dict(enumerate(fitting)))
        return fitting

    def _message(self) -> tuple[store_pb2.StepRequest, list[int]]:
        """One message of what is queued, as far as it fits."""
        self._number += 1
        request = store_pb2.StepRequest(
            number=self._number,
            instance_id=self._session.instance_id,
            grants_wanted=self._wanted_that_fit(),
            misses=sum(self._misses.popleft() for _ in range(len(self._misses))),
            probe=self._probe,
            fresh_namespace=self._fresh,
            tails=map(_slot_ref, self._tails),
        )
        request.decisions.extend(self._decisions_that_fit())
        if self._news.learned or self._news.learned_wanted:
            request.learning, request.learned_wanted = self._news.learning, self._news.learned_wanted
            for name, document in self._news.learned.items():
                request.learned.add(name=name, document=document)
            self._news.learned, self._news.learned_wanted = {}, False
        if self._predecessors:
            token, answered = self._predecessors.popleft()
            request.predecessor.token, request.predecessor.answered = token, answered
        if self._fresh:
            self._fresh_number = self._number
        if not self._wanted:
            self._tails.clear()
        self._probe, self._fresh, self._ping = None, False, False

        room = OPERATIONS_PER_STEP_MAX
        tickets: list[int] = []
        while self._commits and len(self._commits[0].tickets) <= room:
            batch = self._commits.popleft()
            request.commits.append(batch.commits)
            tickets += batch.tickets
            room -= len(batch.tickets)
        unused = 0
        if self._commits:  # what was queued after these stays behind them
            room, unused = 0, room
        while self._aborts and room:
            request.aborts.append(_slot_ref(self._aborts.popleft()))
            room -= 1
        while self._releases and room:
            ref, loaded, promoted = self._releases.popleft()
            request.releases.add(at=_slot_ref(ref), loaded=loaded, promoted=promoted)
            room -= 1
        # After the releases, here and in the daemon: a lease in the queue is one that is still wanted.
        while self._leases and room and not self._releases:
            ref = next(iter(self._leases))
            del self._leases[ref]
            request.leases.append(_slot_ref(ref))
            room -= 1
        while self._touches and len(self._touches[0].keys) <= room:
            chain = self._touches.popleft()
            request.touches.add(
                tenant=chain.tenant,
                keys=chain.keys,
                kind=chain.kind,
                again=chain.again,
                worth_disk=chain.worth_disk,
            )
            room -= len(chain.keys)
        while self._promotes and len(self._promotes[0][0].keys) <= room:
            chain, _, waited = self._promotes.popleft()
            request.promotes.add(tenant=chain.tenant, keys=chain.keys, kind=chain.kind, unwaited=not waited)
            room -= len(chain.keys)
        # When none is left, also those that were dropped.
        self._promotes_sent = self._promotes[0][1] - 1 if self._promotes else self._promotes_asked
        self._operations -= OPERATIONS_PER_STEP_MAX - room - unused
        return request, tickets

    # -- the receiver ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        backoff_s = RECONNECT_BACKOFF_MIN_S
        while True:
            with self._lock:
                if self._failure is not None or (self._closing and not self._unanswered):
                    return
                self._stream += 1
                call = self._call = self._stub.Step(self._requests(self._stream), metadata=self._session.metadata)
            failure: KVStoreError | None = None
            try:
                for reply in call:
                    backoff_s = RECONNECT_BACKOFF_MIN_S
                    self._apply(reply)
            except grpc.RpcError as error:
                failure = error_of(error)
            except Exception as error:  # a bug, and a border: whoever waits must hear that this thread has ended
                call.cancel()
                failure = KVStoreError(f"the daemon's answer was not understood: {type(error).__name__}: {error}")
                failure.__cause__ = error
            with self._lock:
                self._stream += 1  # wakes and ends the sender of this stream
                self._to_send.notify_all()
                if self._closing or self._failure is not None:
                    return
                if failure is not None and not isinstance(failure, Unavailable):
                    break  # sending the same again would fail again
                # The daemon may have gone, which the session finds out, or only this stream: then once more.
                self._changed.wait(backoff_s)
                backoff_s = min(2 * backoff_s, RECONNECT_BACKOFF_MAX_S)
        self._refused(failure)

    def _refused(self, refusal: KVStoreError) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._break(refusal)
        self._session.give_up(refusal)

    def _apply(self, reply: store_pb2.StepReply) -> None:
        group: GroupState | None = None
        with self._lock:
            unanswered = self._unanswered.pop(reply.number, None)
            if self._direct is not None and self._direct.request.number == reply.number:
                self._direct = None
            if unanswered is not None:
                self._answered = reply.number
                request = unanswered.request
                outcomes = [_OUTCOMES[outcome] for outcome in reply.outcomes]
                outcomes += [Outcome.NOT_GRANTED] * (len(unanswered.tickets) - len(outcomes))
                self._settle_tickets(zip(unanswered.tickets, outcomes, strict=True))
                self._promotes_answered = unanswered.promote
                self._news.cpu_full, self._news.fs = reply.cpu_full, Room(reply.fs)
                self._news.reads.extend((read.chunks, read.seconds) for read in reply.reads)
                self._news.learned_there.update((learned.name, learned.document) for learned in reply.learned)
                for kind, wanted in enumerate(request.grants_wanted):
                    grants = reply.grants[kind] if kind < len(reply.grants) else store_pb2.Grants()
                    self._grants_coming[kind] -= wanted
                    if wanted:
                        self._grants_short[kind] = Outcome(grants.short)
                    self._arrived(request, kind, list(zip(grants.slots, grants.generations, strict=True)))
            if reply.HasField("group"):
                group = self.group = GroupState.of(reply.group)
            self._changed.notify_all()
            if self._flushing:  # it may have waited for an answer
                self._to_send.notify_all()
        if group is not None and self._on_group is not None:
            self._on_group(group)

    def _apply_direct(self, message: bytes) -> None:
        """On the session's watcher thread."""
        try:
            self._apply(store_pb2.StepReply.FromString(message))
        except Exception as error:  # as on the stream
            failure = KVStoreError(f"the daemon's answer was not understood: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._refused(failure)

    def _arrived(self, request: store_pb2.StepRequest, kind: int, grants: list[Ref]) -> None:
        if self._closing or self._fresh or request.number < self._fresh_number:
            for ref in grants:
                self._abort(ref)
            self._flush()
        elif grants:
            self._grants[kind].extend(grants)
            self._grants_used_s = time.monotonic()

    def _daemon_gone(self) -> None:
        """On the session's watcher thread."""
        with self._lock:
            self._break(Unavailable("the daemon has gone; attach again"))
            call = self._call
        if call is not None:
            call.cancel()

    def _break(self, failure: KVStoreError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        for unanswered in self._unanswered.values():
            request = unanswered.request
            for commits in request.commits:
                self._left += zip(commits.slots, commits.generations, strict=True)
            self._left += [(at.slot, at.generation) for at in request.aborts]
            if request.HasField("predecessor"):
                self._predecessors.append((request.predecessor.token, request.predecessor.answered))
        for batch in self._commits:
            self._left += zip(batch.commits.slots, batch.commits.generations, strict=True)
        self._left += itertools.chain(self._aborts, *self._grants.values())
        self._predecessors.append((self._session.token, self._answered))
        for queue in (
            self._commits,
            self._aborts,
            self._releases,
            self._touches,
            self._promotes,
            self._misses,
        ):
            queue.clear()
        for free in self._grants.values():
            free.clear()
        self._leases.clear()
        self._held.clear()
        self._tails.clear()
        self._news.decisions.clear()
        self._news.learned, self._news.learned_wanted = {}, False
        self._unanswered.clear()
        self._direct = None
        self._unasked.clear()
        self._wanted.clear()
        self._grants_coming.clear()
        self._operations = 0
        self._probe, self._fresh, self._ping, self._flushing = None, False, False, False
        self._changed.notify_all()
        self._to_send.notify_all()


def commits_of(
    refs: Sequence[Ref], tenant: bytes, keys: Sequence[bytes], parents: Sequence[bytes]
) -> list[store_pb2.Commits]:
    """For `Steps.commit_many`, as large as messages are. Apart from it, for this can be done while the chunks are still
    being copied."""
    return [
        store_pb2.Commits(
            tenant=tenant,
            slots=(slot for slot, _ in refs[part]),
            generations=(generation for _, generation in refs[part]),
            keys=keys[part],
            parents=parents[part],
        )
        for begin in range(0, len(refs), OPERATIONS_PER_STEP_MAX)
        for part in [slice(begin, begin + OPERATIONS_PER_STEP_MAX)]
    ]


def _slot_ref(ref: Ref) -> store_pb2.SlotRef:
    return store_pb2.SlotRef(slot=ref[0], generation=ref[1])
