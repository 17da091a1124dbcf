"""Slots for chunks that are about to be stored: how many the requests here are likely to write, asked for ahead.

A request may be over before the daemon has answered it. So as many slots as the last second's requests took lie ready
for the next ones, the reserve: at most RESERVE_SHARE of the arena, and none where nothing was stored for a second.

The daemon bounds what an engine holds at once; what it is asked for stays within that bound. A slot that is here is the
engine's whether the daemon runs or not, until the daemon has been told what became of it; so a store into it begins
without a look at the heartbeat, which only says how long to wait for slots that are not here.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from connector.jobs import Job
from connector.requests import Attached, Geometry, RequestRecord, Row
from kvstore._native import class_bytes
from kvstore.limits import GRANTS_IDLE_S, HEARTBEAT_STALE_MS, RESERVE_SHARE, grants_left
from kvstore.steps import Outcome

GRANTS_RETRY_S = 0.1  # a full tier is not asked again in every step
_FULL = (Outcome.REJECTED_TIER_FULL, Outcome.REJECTED_QUOTA, Outcome.REJECTED_TIER_SICK)
_SHORT = (*_FULL, Outcome.NOT_GRANTED)


class Grants:
    def __init__(self, geometry: Geometry, running: Mapping[int, Job], clock: Callable[[], float]) -> None:
        """`running`: the jobs that are with the workers."""
        self._running = running
        self._clock = clock
        self._expected = [0] * len(geometry.kinds)  # by kind, sum of the rows' grants_expected
        self._asked_at = -GRANTS_RETRY_S
        self._taken: deque[tuple[float, int, int]] = deque()  # when, kind, slots: in the last second
        self._taken_lately = [0] * len(geometry.kinds)  # by kind, the sum of those
        self._wanted: list[int] | None = None  # by kind, the reserve counted; None: to be worked out
        self._wanted_of: Attached | None = None  # from this one
        self._sized: Attached | None = None  # whose slots have
        self._sizes: list[int] = []  # so many bytes, by kind

    def expect(self, row: Row, grants: int) -> None:
        self._expected[row.kind] += grants - row.grants_expected
        row.grants_expected = grants
        self._wanted = None

    def take(self, attached: Attached, count: int, kind: int) -> list[tuple[int, int]]:
        if count == 0:
            return []
        self._taken.append((self._clock(), kind, count))
        self._taken_lately[kind] += count  # what lacks slots included
        self._wanted = None
        return attached.steps.take_grants(count, kind=kind)

    def lacks(self, attached: Attached, kind: int, wanted: int) -> bool:
        return wanted > 0 and attached.steps.grants_free(kind) < min(wanted, self._most(attached, kind))

    def may_come(self, attached: Attached, kind: int) -> bool:
        """A daemon that has no more to give will not have more next step."""
        return attached.steps.grants_coming(kind) > 0 or attached.steps.grants_short(kind) not in _FULL

    def why_short(self, attached: Attached, kind: int) -> str:
        """Why there are fewer slots than are wanted: as the daemon said last, but where it was asked and is held up."""
        if attached.steps.grants_coming(kind) and attached.session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
            return "DAEMON_SLOW"
        return attached.steps.grants_short(kind).name.removeprefix("REJECTED_").replace("UNSPECIFIED", "NO_SLOT_YET")

    def fetch(self, attached: Attached, records: Iterable[RequestRecord]) -> None:
        """Ask for as many slots as the requests here are likely to write, within the daemon's own bound. Called in
        every step, and in most of them nothing has changed."""
        steps, now = attached.steps, self._clock()
        while self._taken and now - self._taken[0][0] >= GRANTS_IDLE_S:
            _, kind, count = self._taken.popleft()
            self._taken_lately[kind] -= count
            self._wanted = None
        if self._wanted is None or attached is not self._wanted_of:
            self._wanted, self._wanted_of = self._with_reserve(attached), attached
            steps.keep_grants(tuple(self._expected))  # a step of the engine may take longer than a slot may lie idle
        growing: set[tuple[int, int]] | None = None
        asked_at = self._asked_at
        for kind, most in enumerate(self._wanted):
            got = steps.grants_free(kind) + steps.grants_coming(kind)
            if got >= most:
                continue
            # For what is only in reserve a daemon that is short is not asked in every step.
            refusals = _FULL if got < self._expected[kind] else _SHORT
            if now - asked_at < GRANTS_RETRY_S and steps.grants_short(kind) in refusals:
                continue
            count = min(most, self._most(attached, kind) - self._writing(attached, kind)) - got
            if count > 0:
                if growing is None:
                    rows = (row for record in records for row in record.rows)
                    growing = {row.tail for row in rows if row.grants_expected and row.tail}
                self._asked_at = now
                steps.want_grants(count, kind=kind, tails=growing)

    def _with_reserve(self, attached: Attached) -> list[int]:
        """What is expected, or what the last second's requests took where that is more; by kind."""
        share_bytes = attached.session.table.arena_bytes // RESERVE_SHARE // len(self._expected)
        return [
            max(expected, min(taken, share_bytes // slot_bytes))
            for expected, taken, slot_bytes in zip(
                self._expected, self._taken_lately, self._slot_bytes(attached), strict=True
            )
        ]

    def _most(self, attached: Attached, kind: int) -> int:
        """How many slots of a kind the daemon lets this engine hold at once, those being written included."""
        sizes, steps = self._slot_bytes(attached), attached.steps
        others = 0
        for other, slot_bytes in enumerate(sizes):
            if other != kind:
                held = steps.grants_free(other) + steps.grants_coming(other) + self._writing(attached, other)
                others += held * slot_bytes
        return grants_left(attached.session.table.arena_bytes, sizes[kind], held=0, held_bytes=others)

    def _slot_bytes(self, attached: Attached) -> list[int]:
        """By kind."""
        if attached is not self._sized:
            self._sized = attached
            self._sizes = [class_bytes(kind.chunk_bytes) for kind in attached.steps.group.kinds]
        return self._sizes

    def _writing(self, attached: Attached, kind: int) -> int:
        jobs = (job for job in self._running.values() if job.is_store and job.attached is attached)
        return sum(job.spec.counts[kind] for job in jobs)
