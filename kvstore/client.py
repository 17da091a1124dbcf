"""The store for tools, tests and engines other than vLLM: put, look up and get whole chunks.

Concurrency: one client may be shared by threads (not across a fork). `StoreClient._lock` guards which connection is
the current one and how many calls use each; a lost connection is closed, and its memory unmapped, by the last call
that leaves it. Lookups and gets run beside each other. Puts of one client take turns in what needs order: who gets
which of the group's slots (two that asked at once would each count on the other's), and who copies (the pool's threads
are as many as pay). A turn ends when the commits are queued, so that the next put is copied while these are on their
way. What that leaves open the daemon decides: of two puts of one key the first commit is kept, and the other caller
learns that it is present. Commits arrive in the order of the turns, so no child comes before its parent. A put whose
slots were taken back by an operator's removal takes another turn: what was granted before the removal is in nobody's
hands then, and whoever copied into such slots meanwhile is told the same and does the same.

A get copies first and compares generations after: bytes whose slot was handed out to somebody else meanwhile are never
returned. A put makes a chunk visible only by a commit, sent after its copy's threads have fenced their stores. What a
round trip to the daemon takes is a tenth of the time in which a batch of 128 MiB is copied, so a put waits for half of
one: its commits are one message, made while the chunks are copied; it goes to the daemon on arena.sock, past gRPC; that
they are stored the putting thread sees in the table, which the daemon alone writes, before the answer has come (only
that one says why a chunk is not); and a caller that puts batch after batch gets the next one's slots with this one's
answer. On two cores, to commit a first part while the last one is copied was no quicker: the copy pays for the second
message.

If the daemon dies, calls in flight end with Unavailable (or with the bytes they had found: an instance's memory stays
right as long as it is mapped) and the next call attaches again.
"""

import contextlib
import enum
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore.config import BYTES_MAX, default_endpoint
from kvstore.decisions import Decision
from kvstore.errors import (
    BadKey,
    ConfigurationError,
    KVStoreError,
    LimitExceeded,
    NamespaceMismatch,
    SaltRequired,
    Unavailable,
    WrongSize,
)
from kvstore.limits import (
    GRANTS_IDLE_S,
    HEARTBEAT_STALE_MS,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    KEYS_PER_CALL_MAX,
    PROMOTES_PER_ROUND,
)
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Outcome, Ref, Steps, commits_of

if TYPE_CHECKING:  # of collections.abc from Python 3.12 on
    from typing_extensions import Buffer

COPY_THREADS = 2
ATTACH_BACKOFF_MIN_S, ATTACH_BACKOFF_MAX_S = 0.05, 1.0
PENDING_POLL_S = 0.001  # the table costs microseconds
SHOWN_LOOK_S, SHOWN_LOOKS = 0.001, 10  # together several times what a daemon at rest takes to commit
COPY_TIMEOUT_S = 60.0  # of one batch between two memories of this host
GRANTS_AHEAD_SHARE = 8  # of the arena at most is kept free for this client's next put


class RejectReason(enum.StrEnum):
    TIER_FULL = "TIER_FULL"
    QUOTA = "QUOTA"
    ADMISSION = "ADMISSION"
    TIER_SICK = "TIER_SICK"


@dataclass(frozen=True, slots=True)
class Stored:
    """Committed in the cpu tier by this call."""


@dataclass(frozen=True, slots=True)
class Present:
    """Committed already, perhaps a moment ago by another session."""


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: RejectReason


PutOutcome = Stored | Present | Rejected


class Lookup(enum.Enum):
    MISS = _native.MISS
    CPU = _native.CPU
    FS = _native.FS
    PENDING = _native.PENDING


@dataclass(frozen=True, slots=True)
class Loaded:
    """The buffer holds the chunk."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Not there, or gone before the copy had ended: the buffer's bytes mean nothing."""


GetOutcome = Loaded | Miss

# Copies what these positions of the caller's keys have in these slots; per position, 1 when it was still there after.
_CopyFound = Callable[[list[int], NDArray[np.uint32], NDArray[np.uint64]], Sequence[int]]

_STORED, _PRESENT, _LOADED, _MISS = Stored(), Present(), Loaded(), Miss()
_PUT_OUTCOMES: dict[Outcome, PutOutcome] = {
    Outcome.STORED: _STORED,
    Outcome.PRESENT: _PRESENT,
    Outcome.REJECTED_TIER_FULL: Rejected(RejectReason.TIER_FULL),
    Outcome.REJECTED_QUOTA: Rejected(RejectReason.QUOTA),
    Outcome.REJECTED_ADMISSION: Rejected(RejectReason.ADMISSION),
    Outcome.REJECTED_TIER_SICK: Rejected(RejectReason.TIER_SICK),
    Outcome.NOT_GRANTED: Rejected(RejectReason.TIER_FULL),  # the slots were not to be had
}
_LOOKUP_OF_CODE = tuple(sorted(Lookup, key=lambda lookup: lookup.value))


class StoreClient:
    """Made by `attach`. Keys are the engine's hashes (16 to 64 bytes), payloads exactly `chunk_bytes` long."""

    def __init__(self, endpoint: str, attachment: Attachment, *, timeout_s: float, copy_threads: int) -> None:
        self._endpoint = endpoint
        self._attachment = attachment
        self._timeout_s = timeout_s
        self._copy_threads = copy_threads
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._closed = False
        self._backoff_s = 0.0  # before the next attempt to attach
        self._tried_s = 0.0

    @classmethod
    def attach(
        cls,
        endpoint: str | None = None,
        *,
        namespace: Mapping[str, object],
        chunk_bytes: int,
        hash_seed: str | None = None,
        timeout_s: float = 5.0,
        copy_threads: int = COPY_THREADS,
    ) -> "StoreClient":
        """`endpoint` None: `KVSTORE_ENDPOINT` or the default; `hash_seed` None: `PYTHONHASHSEED`.

        `timeout_s` bounds every wait for the daemon. Unavailable, SeedMismatch, NamespaceMismatch, LimitExceeded,
        ConfigurationError.
        """
        if hash_seed is not None and not isinstance(hash_seed, str):
            raise ConfigurationError(
                f"hash_seed is {hash_seed!r}; it is a text, as PYTHONHASHSEED is: {str(hash_seed)!r}"
            )
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or not 0 < chunk_bytes <= BYTES_MAX:
            raise ConfigurationError(f"chunk_bytes is {chunk_bytes!r}; it is a whole number of bytes, 1 or more")
        attachment = Attachment(
            role=Role.CLIENT,
            hash_seed=os.environ.get("PYTHONHASHSEED", "") if hash_seed is None else hash_seed,
            kinds=(Kind(namespace, chunk_bytes),),
        )
        client = cls(endpoint or default_endpoint(), attachment, timeout_s=timeout_s, copy_threads=copy_threads)
        client._leave(client._enter())
        return client

    @property
    def chunk_bytes(self) -> int:
        return self._attachment.kinds[0].chunk_bytes

    def put(self, salt: str | None, chunks: "Mapping[bytes, Buffer]") -> dict[bytes, PutOutcome]:
        """Store chunks for one tenant; the mapping's order is the prefix order, head first.

        WrongSize, BadKey, LimitExceeded, SaltRequired before anything is stored; Unavailable at any time.
        """
        keys = list(chunks)
        _require_keys(keys)
        payloads = _buffers(chunks, self.chunk_bytes, writable=False)
        connection = self._enter()
        try:
            return connection.put(connection.tenant(salt), keys, payloads)
        finally:
            self._leave(connection)

    def lookup(self, salt: str | None, keys: Sequence[bytes]) -> list[Lookup]:
        """Where each chunk is, from the shared table: no waiting, no prefix rule, not a use. May be stale at once."""
        connection = self._enter()
        try:
            codes, _, _ = connection.find(connection.tenant(salt), keys)
        finally:
            self._leave(connection)
        return list(map(_LOOKUP_OF_CODE.__getitem__, codes))

    def get(self, salt: str | None, keys: Sequence[bytes], timeout_s: float = 5.0) -> list[bytes | None]:
        """Each chunk's bytes, or None for one that is not there: the caller recomputes.

        What is only in the fs tier is promoted and waited for, as far as there is room. `timeout_s`: whole call.
        """
        connection = self._enter()
        try:
            return connection.get(connection.tenant(salt), keys, timeout_s)
        finally:
            self._leave(connection)

    def get_into(
        self, salt: str | None, buffers: "Mapping[bytes, Buffer]", timeout_s: float = 5.0
    ) -> dict[bytes, GetOutcome]:
        """As `get`, into writable buffers of `chunk_bytes`, copied by several threads, no allocation."""
        keys = list(buffers)
        _require_keys(keys)
        targets = _buffers(buffers, self.chunk_bytes, writable=True)
        _require_apart(keys, targets, self.chunk_bytes)
        connection = self._enter()
        try:
            return connection.get_into(connection.tenant(salt), keys, targets, timeout_s)
        finally:
            self._leave(connection)

    def close(self) -> None:
        """Unused slots go back; the memory is unmapped once the last call in another thread has left."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            idle = connection is not None and connection.calls == 0
        if connection is not None and idle:
            connection.close()

    def wait_until_mapped(self, timeout_s: float) -> bool:
        """Until the whole arena is in this process's page tables; before that, first copies into a slot are slower."""
        connection = self._enter()
        try:
            return connection.wait_until_mapped(timeout_s)
        finally:
            self._leave(connection)

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self) -> "_Connection":
        """The current connection, or a new one; in use until `_leave`."""
        if os.getpid() != self._pid:
            raise KVStoreError(f"this client belongs to process {self._pid}; attach again in process {os.getpid()}")
        with self._lock:
            if self._closed:
                raise KVStoreError("this client is closed")
            connection = self._connection
            if connection is None or connection.lost:
                self._connection = None
                if connection is not None and connection.calls == 0:
                    connection.close()
                connection = self._connection = self._attach()
            connection.calls += 1
            return connection

    def _leave(self, connection: "_Connection") -> None:
        with self._lock:
            connection.calls -= 1
            retired = connection.calls == 0 and connection is not self._connection
        if retired:
            connection.close()

    def _attach(self) -> "_Connection":
        """Under the lock: whoever else wants to attach waits here anyway."""
        pause_s = self._tried_s + self._backoff_s - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        self._tried_s = time.monotonic()
        try:
            session = Session.attach(self._endpoint, self._attachment, timeout_s=self._timeout_s)
        except Unavailable:
            self._backoff_s = min(max(2 * self._backoff_s, ATTACH_BACKOFF_MIN_S), ATTACH_BACKOFF_MAX_S)
            raise
        self._backoff_s = 0.0
        try:
            return _Connection(session, self.chunk_bytes, self._copy_threads, self._timeout_s)
        except BaseException as error:
            session.close()
            if isinstance(error, ValueError):  # no such number of threads
                raise ConfigurationError(str(error)) from None
            raise


class _Connection:
    """One session with its stream and its copying threads."""

    def __init__(self, session: Session, chunk_bytes: int, copy_threads: int, timeout_s: float) -> None:
        self.calls = 0  # guarded by the client's lock
        self._session = session
        self._chunk_bytes = chunk_bytes
        self._class_bytes = _native.class_bytes(chunk_bytes)
        self._timeout_s = timeout_s
        self._table = session.table
        self._arena = session.arena
        self._unit_bytes = session.table.unit_bytes
        self._copier = _native.Copier(copy_threads)
        self._copier.add_region(self._arena.address, self._arena.nbytes)
        session.before_unmap(self._copier.close)
        self._steps = Steps(session)
        self._jobs = itertools.count(1)
        self._refusals = itertools.count(1)  # told to the daemon
        self._ended: dict[int, _native.Finished] = {}  # jobs of calls under way; guarded by _ended_lock
        self._ended_lock = threading.Lock()
        self._put_turn = threading.Lock()
        self._put_ended_s = -GRANTS_IDLE_S  # the last turn; guarded by _put_turn
        self._puts = 0  # calls, those that wait for a turn or for outcomes too; guarded by _puts_lock
        self._puts_lock = threading.Lock()

    @property
    def lost(self) -> bool:
        return self._session.lost or self._steps.broken

    def close(self) -> None:
        self._session.close()

    def wait_until_mapped(self, timeout_s: float) -> bool:
        assert self._session.premapping is not None
        return self._session.premapping.wait(timeout_s)

    def tenant(self, salt: str | None) -> bytes:
        if salt is None and self._session.require_cache_salt:
            raise SaltRequired("this daemon takes no chunk without a tenant (--require-cache-salt); pass a salt")
        if salt == "":
            raise SaltRequired("an empty salt names no tenant; pass a string, or None for the unsalted tenant")
        return self._session.tenant_id(salt)

    def find(self, tenant: bytes, keys: Sequence[bytes]) -> tuple[bytes, NDArray[np.uint32], NDArray[np.uint64]]:
        if len(keys) > KEYS_PER_CALL_MAX:
            raise LimitExceeded(f"{len(keys)} keys in one call; at most {KEYS_PER_CALL_MAX}")
        try:
            return self._table.lookup(self._namespace(), tenant, keys)
        except (TypeError, ValueError):
            _require_keys(keys)
            raise

    def put(self, tenant: bytes, keys: list[bytes], payloads: _native.Buffers) -> dict[bytes, PutOutcome]:
        outcomes: dict[bytes, PutOutcome] = dict.fromkeys(keys, _PRESENT)
        with self._one_more_put():
            with self._put_turn:
                if self._table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
                    self._steps.settle(self._timeout_s)  # no store begins while nobody knows whether the daemon runs
                codes, slots, generations = self.find(tenant, keys)
                refs = list(zip(slots.tolist(), generations.tolist(), strict=True))  # of those present, then of all
                absent = [position for position, code in enumerate(codes) if code != _native.CPU]
                ahead = self._slots_ahead(len(absent))
                tickets = self._put_absent(tenant, keys, payloads, absent, refs, outcomes, ahead=ahead)
                self._put_ended_s = time.monotonic()
            late = self._settled(tenant, keys, absent, refs, tickets, outcomes)
            if late:  # an operator removed chunks after these slots had come and, it may be, before this call
                with self._put_turn:
                    self._steps.return_grants()
                    tickets = self._put_absent(tenant, keys, payloads, late, refs, outcomes, ahead=0, again=True)
                self._settled(tenant, keys, late, refs, tickets, outcomes)
        return outcomes

    @contextlib.contextmanager
    def _one_more_put(self) -> Iterator[None]:
        with self._puts_lock:
            self._puts += 1
        try:
            yield
        finally:
            with self._puts_lock:
                self._puts -= 1

    def _slots_ahead(self, count: int) -> int:
        """How many slots shall be here or on their way when `count` chunks have been committed. Of a caller that puts
        one batch after another the next one's come with this one's outcomes; where several take turns, the next one
        begins before those, with slots asked for a turn earlier."""
        if time.monotonic() - self._put_ended_s >= GRANTS_IDLE_S:
            return 0
        most = self._arena.nbytes // (self._class_bytes * GRANTS_AHEAD_SHARE)
        turns = (2, 1) if self._puts > 1 else (1,)
        return next((count * ahead for ahead in turns if count * ahead <= most), 0)

    def _put_absent(
        self,
        tenant: bytes,
        keys: list[bytes],
        payloads: _native.Buffers,
        absent: list[int],
        refs: list[Ref],
        outcomes: dict[bytes, PutOutcome],
        *,
        ahead: int,
        again: bool = False,
    ) -> list[int]:
        """Copy those at the positions `absent` and queue their commits, head first, as far as there are slots; write
        `refs`, and `outcomes` of the rest. Returns the commits' tickets. `ahead`: slots to have that only a later call
        will use. `again`: the call has used its keys already."""
        tickets: list[int] = []
        with contextlib.ExitStack() as lent:
            while len(tickets) < len(absent):
                rest = absent[len(tickets) :]
                tail = refs[rest[0] - 1 : rest[0]]  # nothing before the first chunk
                grants = self._steps.wait_grants(len(rest), self._timeout_s, tails=tail)
                if not grants:
                    refusal = self._refusal()
                    outcomes.update((keys[position], refusal) for position in rest)
                    self._tell_refused([keys[position] for position in rest])
                    break
                batch = rest[: len(grants)]
                for ref, position in zip(grants, batch, strict=True):
                    refs[position] = ref
                later = len(rest) - len(batch) or ahead
                tickets += self._store(tenant, keys, payloads, batch, grants, lent, later=later)
            # One use of each: its commit's, or else this touch's; then the whole chain, so that no parent is older.
            if not again and len(tickets) < len(keys):
                committed = set(absent[: len(tickets)])
                self._steps.touch(tenant, [key for position, key in enumerate(keys) if position not in committed])
            if tickets:
                self._steps.touch(tenant, keys, again=len(keys))
            self._steps.send()  # and only then take the caller's memory back, while these are on their way
        return tickets

    def _settled(
        self,
        tenant: bytes,
        keys: list[bytes],
        absent: list[int],
        refs: list[Ref],
        tickets: list[int],
        outcomes: dict[bytes, PutOutcome],
    ) -> list[int]:
        """Wait for what came of the commits, write `outcomes`. Returns the positions whose slots the daemon had taken
        back."""
        committed = absent[: len(tickets)]
        shown = bool(tickets) and self._shown_before_answered(
            tenant, [keys[at] for at in committed], [refs[at] for at in committed], tickets[-1]
        )
        settled = self._steps.wait(tickets, self._timeout_s, shown=shown)
        late = []
        for position, outcome in zip(absent, settled, strict=False):
            outcomes[keys[position]] = _PUT_OUTCOMES[outcome]
            if outcome is Outcome.NOT_GRANTED:
                late.append(position)
        return late

    def _shown_before_answered(self, tenant: bytes, keys: list[bytes], refs: list[Ref], ticket: int) -> bool:
        """Wait until the table, which the daemon alone writes, shows each chunk in the slot that was granted for it:
        the last one is the last to appear. `ticket`: the last one's. False: they are not shown, or not soon."""
        for _ in range(SHOWN_LOOKS):
            if self._table.wait_shown(self._namespace(), tenant, keys[-1], *refs[-1], SHOWN_LOOK_S):
                break
            if self._steps.has_outcome(ticket):
                return False
        codes, slots, generations = self.find(tenant, keys)
        there = list(zip(slots.tolist(), generations.tolist(), strict=True)) == refs
        return there and codes == bytes([_native.CPU]) * len(keys)

    def get(self, tenant: bytes, keys: Sequence[bytes], timeout_s: float) -> list[bytes | None]:
        copies: list[bytes | None] = [None] * len(keys)

        def copy(positions: list[int], slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> Sequence[int]:
            with self._arena.view() as view:
                for position, slot in zip(positions, slots.tolist(), strict=True):
                    offset = self._offset(slot)
                    copies[position] = view[offset : offset + self._chunk_bytes].tobytes()
            current = self._table.current(slots, generations)
            for position, same in zip(positions, current, strict=True):
                if not same:
                    copies[position] = None
            return current

        self._load(tenant, keys, timeout_s, copy)
        return copies

    def get_into(
        self, tenant: bytes, keys: list[bytes], targets: _native.Buffers, timeout_s: float
    ) -> dict[bytes, GetOutcome]:
        outcomes: dict[bytes, GetOutcome] = dict.fromkeys(keys, _MISS)

        def copy(positions: list[int], slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> Sequence[int]:
            current = bytearray(b"\1") * len(positions)
            if positions:
                addresses = targets.addresses(positions)
                sources = self._addresses(slots.tolist())
                with self._lent(addresses) as job:
                    self._submit(job, sources, addresses, slots=slots, generations=generations)
                    ended = self._ended_copy(job)
                for index in ended.failed:
                    current[index] = 0
            for position, same in zip(positions, current, strict=True):
                if same:
                    outcomes[keys[position]] = _LOADED
            return current

        self._load(tenant, keys, timeout_s, copy)
        return outcomes

    def _load(self, tenant: bytes, keys: Sequence[bytes], timeout_s: float, copy: _CopyFound) -> None:
        """Copy what the cpu tier has; have the rest of what there is promoted, in rounds of as much as has room; count
        hits and misses, and touch the chain. A round that brings nothing is the last one."""
        deadline_s = time.monotonic() + timeout_s
        positions = list(range(len(keys)))
        loaded: list[int] = []
        promoted = False
        while positions:
            codes, slots, generations = self.find(tenant, [keys[position] for position in positions])
            found = [i for i, code in enumerate(codes) if code == _native.CPU]
            below = [positions[i] for i, code in enumerate(codes) if code in (_native.FS, _native.PENDING)]
            self._steps.miss(len(codes) - len(found) - len(below))
            slots, generations = slots[found], generations[found]
            current = copy([positions[i] for i in found], slots, generations)
            loaded += [positions[i] for i, same in zip(found, current, strict=True) if same]
            for slot, generation, same in zip(slots.tolist(), generations.tolist(), current, strict=True):
                self._steps.release(slot, generation, loaded=bool(same), promoted=promoted)
            positions = below if found or not promoted else []
            promoted = True
            if positions:
                self._promote(tenant, [keys[position] for position in positions[:PROMOTES_PER_ROUND]], deadline_s)
        self._steps.touch(tenant, [keys[position] for position in sorted(loaded)])
        self._steps.flush()

    def _promote(self, tenant: bytes, keys: list[bytes], deadline_s: float) -> None:
        """Ask for them, and wait until none is on its way any more, or the caller's time is over. Unavailable: the
        daemon does not answer within the client's time-out."""
        if self._table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return  # nobody would read them
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        self._steps.promote(tenant, keys)
        try:
            self._steps.settle(min(left_s, self._timeout_s))
        except Unavailable:
            if time.monotonic() < deadline_s:
                raise
        while time.monotonic() < deadline_s and not self.lost:
            codes, _, _ = self.find(tenant, keys)
            if _native.PENDING not in codes:
                return
            time.sleep(PENDING_POLL_S)

    def _namespace(self) -> bytes:
        return self._steps.group.kinds[0].namespace_id

    def _offset(self, slot: int) -> int:
        return _native.slot_offset(slot, self._class_bytes, self._unit_bytes)

    def _addresses(self, slots: list[int]) -> NDArray[np.uint64]:
        return _native.slot_addresses(self._arena.address, slots, self._class_bytes, self._unit_bytes)

    def _refusal(self) -> PutOutcome:
        if self._steps.group.refused:
            raise NamespaceMismatch(self._steps.group.refused)
        return _PUT_OUTCOMES[self._steps.grants_short()]

    def _tell_refused(self, keys: list[bytes]) -> None:
        """For whoever asks the daemon what became of them."""
        reason = self._steps.grants_short().name.removeprefix("REJECTED_")
        self._steps.tell(Decision(next(self._refusals), "", True, reason, 0, refused=keys))
        self._steps.flush()

    def _store(
        self,
        tenant: bytes,
        keys: list[bytes],
        payloads: _native.Buffers,
        positions: list[int],
        grants: list[Ref],
        lent: contextlib.ExitStack,
        *,
        later: int,
    ) -> list[int]:
        """Copy into the granted slots, payload and zeroed padding, and commit. Returns the commits' tickets. On any
        error the slots of what was not committed are given back. `lent`: until its end the caller's memory is ours.
        `later`: how many slots there shall be after these; the message asks for those that are missing.
        """
        tickets: list[int] = []
        try:
            addresses = self._addresses([slot for slot, _ in grants])
            if self._class_bytes > self._chunk_bytes:
                for address in addresses.tolist():
                    _native.fill(address + self._chunk_bytes, self._class_bytes - self._chunk_bytes, 0)
            sources = payloads.addresses(positions)
            job = lent.enter_context(self._lent(sources))
            self._submit(job, sources, addresses)
            own = [keys[position] for position in positions]
            parents = [keys[position - 1] if position else b"" for position in positions]
            commits = commits_of(grants, tenant, own, parents)  # while the threads copy
            if self._ended_copy(job).failed:
                raise Unavailable("the copy into the arena was ended by a close in another thread")
            tickets += self._steps.commit_many(commits)
            coming = self._steps.grants_coming()  # before the others: what arrives between is not asked for again
            self._steps.want_grants(later - coming - self._steps.grants_free(), tails=grants[-1:])
        finally:
            if len(tickets) < len(grants):
                lent.close()  # waits until the copying threads have left these slots, whatever happened
                for slot, generation in grants[len(tickets) :]:
                    self._steps.abort(slot, generation)
                self._steps.flush()
        return tickets

    @contextlib.contextmanager
    def _lent(self, addresses: NDArray[np.uint64]) -> Iterator[int]:
        """For one job, whose number it gives. The caller's memory, where whole chunks begin, is ours only in here:
        leaving waits for the job's end. One that has not begun fails, unless another call was lent the memory too."""
        job = next(self._jobs)
        self._copier.add_regions(addresses, self._chunk_bytes)
        try:
            yield job
        finally:
            self._copier.remove_regions(addresses)
            self._copier.wait([job], math.inf)  # where another call was lent it too, removing waits for nobody
            self._take_ended(job)  # of a job that nobody waited for to the end

    def _submit(
        self,
        job: int,
        sources: NDArray[np.uint64],
        destinations: NDArray[np.uint64],
        *,
        slots: NDArray[np.uint32] | None = None,
        generations: NDArray[np.uint64] | None = None,
    ) -> None:
        """Begin to copy whole chunks."""
        self._copier.submit(
            job,
            sources,
            destinations,
            self._chunk_bytes,
            table=self._table if slots is not None else None,
            slots=slots,
            generations=generations,
        )

    def _ended_copy(self, job: int) -> _native.Finished:
        if not self._copier.wait([job], COPY_TIMEOUT_S):
            raise Unavailable(f"a copy between two memories of this host took longer than {COPY_TIMEOUT_S:g} s")
        ended = self._take_ended(job)
        assert ended is not None, f"job {job} has ended, and the copier does not say how"
        return ended

    def _take_ended(self, job: int) -> _native.Finished | None:
        """What is known of its end; None when that was taken, or there was no such job."""
        with self._ended_lock:
            self._ended |= {finished.job: finished for finished in self._copier.finished()}
            return self._ended.pop(job, None)


def _require_keys(keys: Sequence[bytes]) -> None:
    """LimitExceeded, BadKey."""
    if len(keys) > KEYS_PER_CALL_MAX:
        raise LimitExceeded(f"{len(keys)} keys in one call; at most {KEYS_PER_CALL_MAX}")
    for key in keys:
        if not isinstance(key, bytes) or not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            shown = f"{key.hex()} of {len(key)} bytes" if isinstance(key, bytes) else repr(key)
            raise BadKey(f"key {shown}: a key is the engine's hash, {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes")


def _buffers(buffers: "Mapping[bytes, Buffer]", chunk_bytes: int, *, writable: bool) -> _native.Buffers:
    """Their memory, not a copy. WrongSize."""
    try:
        return _native.Buffers(list(buffers.values()), chunk_bytes, writable=writable)
    except (ValueError, BufferError, TypeError):
        for key, buffer in buffers.items():
            _require_chunk(key, buffer, chunk_bytes, writable=writable)
        raise


def _require_chunk(key: bytes, buffer: "Buffer", chunk_bytes: int, *, writable: bool) -> None:
    """WrongSize."""
    view = memoryview(buffer)
    if view.nbytes != chunk_bytes or not view.c_contiguous or (writable and view.readonly):
        kind = "writable, contiguous" if writable else "contiguous"
        found = f"{view.nbytes} bytes"
        if writable and view.readonly:
            found = f"read-only, {found}"
        if not view.c_contiguous:  # in Fortran's order the memory's bytes are not those that the view shows
            found = f"not contiguous, {found}"
        raise WrongSize(f"the buffer of key {key.hex()} must be {kind} and {chunk_bytes} bytes long; it is {found}")


def _require_apart(keys: Sequence[bytes], targets: _native.Buffers, chunk_bytes: int) -> None:
    """Two chunks in one memory would both be reported as loaded, and one of them be the other. WrongSize."""
    addresses: list[int] = targets.addresses(list(range(len(keys)))).tolist()
    for (address, key), (next_address, next_key) in pairwise(sorted(zip(addresses, keys, strict=True))):
        if next_address < address + chunk_bytes:
            raise WrongSize(
                f"the buffers of keys {key.hex()} and {next_key.hex()} overlap by "
                f"{address + chunk_bytes - next_address} bytes; give each key memory of its own"
            )
