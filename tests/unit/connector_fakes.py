"""Fakes of the daemon's side as the connector's scheduler half sees it: link, session, table, message stream.

`FakeDaemon` keeps the truth (who holds which slot, what is committed) and complains where the connector breaks a rule;
`FakeSteps` applies operations at once unless told to hold them back.
"""

import ctypes
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from kvstore._native import CPU, FS, MISS, PENDING
from kvstore.decisions import Decision, Room
from kvstore.session import GroupState, KindState
from kvstore.steps import Outcome

NAMESPACE = b"namespace-of-old"
SPOILT = 0xEE


class FakeDaemon:
    """`chunk_bytes`: of each kind. All kinds take slots from one list."""

    def __init__(
        self, *, slots: int, chunk_bytes: Sequence[int] = (4096,), pool: int = 64, instance_id: bytes = b"i" * 16
    ) -> None:
        self.instance_id = instance_id
        self.chunk_bytes = chunk_bytes
        self.chains: Collection[int] = (0,)  # kinds whose chunks name parents; those of the first are kept
        self.pool = pool
        self.namespaces = [NAMESPACE, *(f"namespace-kind-{kind}".encode() for kind in range(1, len(chunk_bytes)))]
        self.complete = True
        self.refused = ""
        self.require_cache_salt = False
        self.heartbeat_age_ms = 1.0
        self.free = list(range(slots))
        self.generations = [1] * slots
        self.granted: dict[int, int] = {}  # slot -> generation
        self.granted_epoch: dict[int, int] = {}
        self.granted_kind: dict[int, int] = {}
        self.epoch = 0
        self.stored: dict[tuple[bytes, bytes, bytes], int] = {}  # (namespace, tenant, key) -> slot
        self.parents: dict[bytes, bytes] = {}
        self.leases: Counter[int] = Counter()
        self.on_disk: dict[tuple[bytes, bytes, bytes], int] = {}  # where each would land
        self.pending: set[tuple[bytes, bytes, bytes]] = set()
        self.promotions_max = 1 << 30  # at once
        self.fs_hits = 0
        self.reads: list[tuple[int, float]] = []
        self.unwaited: set[bytes] = set()  # keys that nobody waits for, or waits for any more
        self.touched: list[tuple[bytes, ...]] = []
        self.touched_kinds: list[int] = []
        self.used: Counter[bytes] = Counter()  # how often each key of the first kind: one request is one use
        self.probes: list[tuple[str, str, bytes]] = []
        self.misses = self.hits = self.failed_loads = 0
        self.on_grant: Callable[[int], None] = lambda _slot: None
        self.on_commit: Callable[[int, int, bytes], None] = lambda _kind, _slot, _key: None

    @property
    def namespace(self) -> bytes:
        """Of the first kind."""
        return self.namespaces[0]

    def grant(self, count: int, kind: int = 0) -> list[tuple[int, int]]:
        grants = []
        for _ in range(min(count, self.pool - len(self.granted))):
            if not self.free:
                break
            slot = self.free.pop(0)
            self.generations[slot] += 1
            self.granted[slot] = self.generations[slot]
            self.granted_epoch[slot] = self.epoch
            self.granted_kind[slot] = kind
            self.on_grant(slot)
            grants.append((slot, self.generations[slot]))
        return grants

    def _end_grant(self, slot: int, generation: int) -> None:
        assert self.granted.get(slot) == generation, f"slot {slot}, generation {generation} is not granted"
        del self.granted[slot]

    def commit(self, slot: int, generation: int, tenant: bytes, key: bytes, parent: bytes) -> None:
        self._end_grant(slot, generation)
        # The real one would abort it; the connector must know by itself.
        assert self.granted_epoch[slot] == self.epoch, "a chunk of before a reset was offered for commit"
        kind = self.granted_kind[slot]
        place = (self.namespaces[kind], tenant, key)
        if place in self.stored:
            self.free.append(slot)
            return
        self.on_commit(kind, slot, key)
        self.stored[place] = slot
        if kind == 0:
            self.parents[key] = parent
            self.used[key] += 1
        elif kind not in self.chains:
            assert not parent, "only chains name parents"

    def abort(self, slot: int, generation: int) -> None:
        self._end_grant(slot, generation)
        self.free.append(slot)

    def evict(self, slot: int) -> None:
        (place,) = [place for place, held in self.stored.items() if held == slot]
        del self.stored[place]
        self.free.append(slot)

    def reuse(self, slot: int) -> None:
        """Evict the chunk and let another engine write to its slot, lease or not: a lease is advice."""
        self.evict(slot)
        self.generations[slot] += 1
        self.on_grant(slot)

    def lease(self, slot: int) -> None:
        self.leases[slot] += 1

    def demote_all(self) -> None:
        """As after a restart: the bytes are on disk only. They lie in their slots, but nobody may know."""
        self.on_disk |= self.stored
        self.stored.clear()

    def promote(self, tenant: bytes, keys: Sequence[bytes], kind: int = 0) -> None:
        for key in keys:
            place = (self.namespaces[kind], tenant, key)
            if place in self.on_disk and len(self.pending) < self.promotions_max:
                self.pending.add(place)

    def below(self, place: tuple[bytes, bytes, bytes]) -> int:
        return PENDING if place in self.pending else FS if place in self.on_disk else MISS

    def land(self) -> None:
        for place in self.pending:
            self.stored.setdefault(place, self.on_disk.pop(place))
        self.pending.clear()

    def release(self, slot: int, *, loaded: bool, promoted: bool = False) -> None:
        assert self.leases[slot] > 0, f"slot {slot} released without a lease"
        self.leases[slot] -= 1
        self.hits += loaded and not promoted
        self.fs_hits += loaded and promoted
        self.failed_loads += not loaded

    def move_to_fresh_namespace(self) -> None:
        self.epoch += 1
        self.namespaces = [f"namespace-{self.epoch:06d}".encode(), *self.namespaces[1:]]
        for kind in range(1, len(self.namespaces)):
            self.namespaces[kind] = f"namespace-{self.epoch}-{kind}".ljust(16, ".").encode()

    def group_state(self) -> GroupState:
        kinds = zip(self.namespaces, self.chunk_bytes, strict=True)
        return GroupState(self.complete, tuple(KindState(*kind) for kind in kinds), self.refused)


class FakeTable:
    """As the real one, closed too. `on_read` is called before each read of what changes."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self._closed = False
        self.on_read: Callable[[], None] = lambda: None
        self.lookups = 0
        self.arena_bytes = 0
        self.unit_bytes = 1 << 20
        self.instance_id = daemon.instance_id

    def close(self) -> None:
        self._closed = True

    def heartbeat_age_ms(self) -> float:
        self.on_read()
        return math.inf if self._closed else self._daemon.heartbeat_age_ms

    def current(self, slots: np.ndarray, generations: np.ndarray) -> bytes:
        self.on_read()
        return bytes(
            not self._closed and self._daemon.generations[slot] == generation
            for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True)
        )

    def lookup(self, namespace: bytes, tenant: bytes, keys: Sequence[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
        self.on_read()
        self.lookups += 1
        if self._closed:
            return bytes([MISS]) * len(keys), np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint64)
        slots = [self._daemon.stored.get((namespace, tenant, key)) for key in keys]
        return (
            bytes(
                CPU if slot is not None else self._daemon.below((namespace, tenant, key))
                for key, slot in zip(keys, slots, strict=True)
            ),
            np.array([slot or 0 for slot in slots], np.uint32),
            np.array([0 if slot is None else self._daemon.generations[slot] for slot in slots], np.uint64),
        )


class FakeSession:
    def __init__(self, daemon: FakeDaemon) -> None:
        self.instance_id = daemon.instance_id
        self.table = FakeTable(daemon)
        self.require_cache_salt = daemon.require_cache_salt
        self.lost = False
        self.closed = False

    def tenant_id(self, salt: str | None) -> bytes:
        return (salt or "-").encode().ljust(16, b".")[:16]

    def close(self) -> None:
        self.closed = True
        self.table.close()


class FakeSteps:
    """`answered=False`: grants and the group's state arrive only with `answer`."""

    def __init__(self, daemon: FakeDaemon, *, answered: bool = True) -> None:
        self.daemon = daemon
        self.answered = answered
        self.broken = False
        self.short: dict[int, Outcome] = {}
        self.coming: Counter[int] = Counter()
        self.free_by_kind: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.group = daemon.group_state()
        self.unsent = False
        self.flushes = 0
        self.kept: Sequence[int] = ()
        self.closed = False
        self.promotes = self.promotes_answered = 0
        self.told: list[Decision] = []
        self.learning = ""
        self.learned: dict[str, str] = {}
        self.learned_there: dict[str, str] = {}
        self.cpu_full = False
        self.fs = Room.NOT_ASKED
        self.memory_only: list[bytes] = []  # keys of commits
        self.committed_for: list[int] = []  # number of each commit's decision
        self.worth_disk: list[tuple[bytes, ...]] = []  # of touches
        self.tails: set[tuple[int, int]] = set()  # named by requests for slots

    @property
    def free(self) -> list[tuple[int, int]]:
        return [ref for free in self.free_by_kind.values() for ref in free]

    def grants_free(self, kind: int = 0) -> int:
        return len(self.free_by_kind[kind])

    def grants_coming(self, kind: int = 0) -> int:
        return self.coming[kind]

    def grants_short(self, kind: int = 0) -> Outcome:
        return self.short.get(kind, Outcome.UNSPECIFIED)

    def want_grants(self, count: int, *, kind: int = 0, tails: Collection[tuple[int, int]] = ()) -> None:
        if not self.broken:
            self.tails |= set(tails)
            self.coming[kind] += count
            if self.answered:
                self.answer()

    def keep_grants(self, counts: Sequence[int]) -> None:
        self.kept = counts

    def return_grants(self) -> None:
        for ref in self.free:
            self.daemon.abort(*ref)
        self.free_by_kind.clear()

    def answer(self) -> None:
        for kind, wanted in self.coming.items():
            grants = self.daemon.grant(wanted, kind)
            self.free_by_kind[kind] += grants
            full = len(grants) < wanted and not self.daemon.free
            short = Outcome.REJECTED_TIER_FULL if full else Outcome.NOT_GRANTED
            self.short[kind] = short if len(grants) < wanted else Outcome.UNSPECIFIED
        self.coming.clear()
        self.group = self.daemon.group_state()

    def take_grants(self, count: int, *, kind: int = 0) -> list[tuple[int, int]]:
        free = self.free_by_kind[kind]
        taken, self.free_by_kind[kind] = free[:count], free[count:]
        return taken

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
        if not self.broken:
            self.committed_for.append(decision)
            if memory_only:
                self.memory_only.append(key)
            self.daemon.commit(slot, generation, tenant, key, parent)
        return 0

    def abort(self, slot: int, generation: int) -> None:
        if not self.broken:
            self.daemon.abort(slot, generation)

    def lease(self, slot: int, generation: int) -> None:  # noqa: ARG002
        if not self.broken:
            self.daemon.lease(slot)

    def release(self, slot: int, generation: int, *, loaded: bool, promoted: bool = False) -> None:  # noqa: ARG002
        if not self.broken:
            self.daemon.release(slot, loaded=loaded, promoted=promoted)

    def promote(self, tenant: bytes, keys: Sequence[bytes], *, kind: int = 0, waited: bool = True) -> int:
        self.promotes += 1
        if not self.broken and self.answered:
            if not waited:
                self.daemon.unwaited.update(keys)
            self.daemon.promote(tenant, keys, kind)
            self.promotes_answered = self.promotes
        return self.promotes

    def tell(self, decision: Decision) -> None:
        self.told.append(decision)
        self.unsent = True

    def ask_learned(self, learning: str) -> None:
        self.learning = learning

    def learn(self, learned: Mapping[str, str]) -> None:
        self.learned.update(learned)

    def take_learned(self) -> dict[str, str]:
        learned, self.learned_there = self.learned_there, {}
        return learned

    def take_reads(self) -> list[tuple[int, float]]:
        reads, self.daemon.reads = self.daemon.reads, []
        return reads

    def touch(
        self,
        tenant: bytes,  # noqa: ARG002
        keys: Sequence[bytes],
        *,
        kind: int = 0,
        again: int = 0,
        worth_disk: int = 0,
    ) -> None:
        if not self.broken:
            self.worth_disk.append(tuple(keys[:worth_disk]))
            self.daemon.touched.append(tuple(keys))
            self.daemon.touched_kinds.append(kind)
            if kind == 0:
                self.daemon.used.update(keys[again:])

    def miss(self, count: int) -> None:
        if not self.broken:
            self.daemon.misses += count

    def probe(self, engine_family: str, hash_algorithm: str, value: bytes) -> None:
        if not self.broken:
            self.daemon.probes.append((engine_family, hash_algorithm, value))
            self.unsent = True

    def fresh_namespace(self) -> None:
        """As the real one: slots granted for the old namespace go back."""
        if not self.broken:
            for slot, generation in self.free:
                self.daemon.abort(slot, generation)
            self.free_by_kind.clear()
            self.daemon.move_to_fresh_namespace()
            if self.answered:
                self.group = self.daemon.group_state()

    def flush(self) -> None:
        self.flushes += 1
        self.unsent = False

    def close(self) -> None:
        self.closed = True


class FakeLink:
    def __init__(self, current: object = None) -> None:
        self.lock = threading.Lock()
        self.current = current
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeCopier:
    """Copies real memory, when told to: `run` for the oldest jobs, `wait` for the ones named."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.queued: dict[int, tuple] = {}
        self.done: list[SimpleNamespace] = []
        self.failures: list[set[int]] = []  # of the next jobs with so many chunks: positions that fail, and are spoilt
        self.arena, self.slot_bytes = 0, 4096
        self.closed = False

    def add_region(self, address: int, nbytes: int) -> None:
        self.regions.append((address, nbytes))

    def remove_region(self, address: int) -> None:
        (region,) = [region for region in self.regions if region[0] == address]
        self.regions.remove(region)
        for job in list(self.queued):
            _, sources, destinations, sizes, _, slots, _ = self.queued[job]
            if not all(
                self._inside(address, size)
                for address, size in [*zip(sources, sizes, strict=True), *zip(destinations, sizes, strict=True)]
            ):
                del self.queued[job]
                self._end(job, list(range(len(slots))), 0)

    def _inside(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + nbytes for begin, nbytes in self.regions)

    def submit(self, job, sources, destinations, sizes, *, table=None, slots=None, generations=None) -> None:
        assert job not in self.queued, f"job {job} submitted twice"
        plan = (job, sources.tolist(), destinations.tolist(), sizes.tolist(), table, slots, generations)
        for addresses in plan[1:3]:
            for address, size in zip(addresses, plan[3], strict=True):
                if not self._inside(address, size):
                    raise ValueError(f"job {job}: {size} bytes at {address} are not inside a region")
        self.queued[job] = plan

    def run(self, count: int = 1 << 30) -> None:
        for job in list(self.queued)[:count]:
            _, sources, destinations, sizes, table, slots, generations = self.queued.pop(job)
            failed = {i for i, current in enumerate(table.current(slots, generations)) if not current}
            spoilt = self.failures.pop(0) if self.failures and max(self.failures[0]) < len(slots) else set()
            failed |= spoilt
            for source, destination, size in zip(sources, destinations, sizes, strict=True):
                ctypes.memmove(destination, source, size)
                for slot in (slots[i] for i in spoilt):
                    begin = self.arena + int(slot) * self.slot_bytes
                    if begin <= source < begin + self.slot_bytes or begin <= destination < begin + self.slot_bytes:
                        ctypes.memset(destination, SPOILT, size)
            self._end(job, sorted(failed), sum(sizes))

    def _end(self, job: int, failed: list[int], nbytes: int) -> None:
        self.done.append(SimpleNamespace(job=job, failed=failed, nbytes=nbytes, seconds=1e-3, settled=True))

    def finished(self) -> list[SimpleNamespace]:
        done, self.done = self.done, []
        return done

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:  # noqa: ARG002
        while any(job in self.queued for job in jobs):
            self.run(1)
        return True

    def close(self) -> None:
        self.closed = True
