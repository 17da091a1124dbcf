"""The native index against a plain Python model of it, step by step, with the table's reader as a second witness."""

from contextlib import ExitStack
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import _native
from tests.unit.index_model import IndexModel, Ref
from tests.unit.native_store import KIB, NativeStore, key_of, native_store

NAMESPACES = [b"namespace-a-----", b"namespace-b-----"]
TENANTS = [b"tenant-a--------", b"tenant-b--------"]
KEYS = [key_of(number) for number in range(12)]
BOGUS: list[Ref] = [(0, 0), (3, 1), (2**32 - 1, 1)]
# Whole, with a short last unit, with units of three pages, with fewer chunks than one class needs units.
ARENAS = [32 * 4 * KIB, 33 * 4 * KIB + 100, 640 * KIB, 5 * 20 * KIB]
SIZES = [4 * KIB, 8 * KIB - 5, 12 * KIB, 20 * KIB]

groups = st.integers(0, 2)
scopes = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(TENANTS))
picks = st.lists(st.integers(0, 10_000), max_size=6)  # each chooses one of the references known at that moment
chains = st.lists(st.sampled_from(KEYS), max_size=6)


class IndexAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.exit = ExitStack()
        self.store: NativeStore
        self.model: IndexModel
        self.refs: list[Ref] = []  # granted once, newest last
        self.now_ms = 0
        self.last_commit: tuple[Any, ...] | None = None

    @initialize(arena_bytes=st.sampled_from(ARENAS), prefaulted=st.sampled_from([0, 1, 2]))
    def start(self, arena_bytes: int, prefaulted: int) -> None:
        ready = arena_bytes * prefaulted // 2
        self.store = self.exit.enter_context(native_store(arena_bytes, prefaulted=ready))
        self.table = self.store.table()
        self.model = IndexModel(arena_bytes, self.store.unit_bytes, ready)

    def teardown(self) -> None:
        self.exit.close()

    def _refs(self, numbers: list[int]) -> list[Ref]:
        granted = [(slot, self.model.generations[slot]) for slot in self.model.grants]
        resident = [chunk.ref for chunk in self.model.chunks.values()]
        known = [*granted, *resident, *self.refs[-8:], *BOGUS]
        return [known[number % len(known)] for number in numbers]

    @rule(group=groups, size=st.sampled_from(SIZES), count=st.integers(0, 8))
    def grant(self, group: int, size: int, count: int) -> None:
        granted = self.store.index.grant(group, size, count)
        assert granted == self.model.grant(group, size, count)
        self.refs += granted

    @rule(
        group=groups,
        scope=scopes,
        commits=st.lists(
            st.tuples(st.integers(0, 10_000), st.sampled_from(KEYS), st.sampled_from([b"", *KEYS])), max_size=5
        ),
    )
    def commit_anything(self, group: int, scope: tuple[bytes, bytes], commits: list[tuple[int, bytes, bytes]]) -> None:
        refs = self._refs([number for number, _, _ in commits])
        namespace, tenant = scope
        self._commit(
            group,
            namespace,
            [(*ref, tenant, key, parent) for ref, (_, key, parent) in zip(refs, commits, strict=True)],
        )

    @rule(scope=scopes, start=st.integers(0, len(KEYS) - 1), size=st.sampled_from(SIZES), count=st.integers(1, 5))
    def store_chain(self, scope: tuple[bytes, bytes], start: int, size: int, count: int) -> None:
        """What an engine does: grants, then commits of a run of keys, head first, each naming the one before it."""
        group = 0
        granted = self.store.index.grant(group, size, count)
        assert granted == self.model.grant(group, size, count)
        self.refs += granted
        keys = [KEYS[(start + i) % len(KEYS)] for i in range(count)]
        parents = [b"", *keys]
        self._commit(
            group,
            scope[0],
            [(*ref, scope[1], key, parent) for ref, key, parent in zip(granted, keys, parents, strict=False)],
        )

    @precondition(lambda self: self.last_commit is not None)
    @rule()
    def repeat_the_last_commit(self) -> None:
        assert self.last_commit is not None
        self._commit(*self.last_commit)

    def _commit(self, group: int, namespace: bytes, commits: list[tuple[int, int, bytes, bytes, bytes]]) -> None:
        expected = [self.model.commit(group, namespace, commit, self.now_ms) for commit in commits]
        assert self.store.index.commit(group, namespace, commits, self.now_ms) == expected
        self.last_commit = (group, namespace, commits)

    @rule(group=groups, numbers=picks)
    def abort(self, group: int, numbers: list[int]) -> None:
        refs = self._refs(numbers)
        assert self.store.index.abort(group, refs) == self.model.abort(group, refs)

    @rule(group=groups, numbers=picks, life_ms=st.integers(0, 30))
    def lease(self, group: int, numbers: list[int], life_ms: int) -> None:
        refs = self._refs(numbers)
        deadline = self.now_ms + life_ms
        assert self.store.index.lease(group, refs, deadline) == self.model.lease(group, refs, deadline)

    @rule(group=groups, numbers=picks)
    def release(self, group: int, numbers: list[int]) -> None:
        refs = self._refs(numbers)
        assert self.store.index.release(group, refs) == self.model.release(group, refs)

    @rule(elapsed_ms=st.integers(0, 20))
    def expire(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        assert self.store.index.expire_leases(self.now_ms) == self.model.expire_leases(self.now_ms)

    @rule(group=groups)
    def end_leases(self, group: int) -> None:
        self.store.index.end_leases(group)
        self.model.end_leases(group)

    @rule(group=groups)
    def end_group(self, group: int) -> None:
        self.end_leases(group)
        held = [ref for ref in self.refs if self.model.holds(group, ref)]
        assert self.store.index.abort(group, held) == self.model.abort(group, held)

    @rule(scope=scopes, keys=chains)
    def touch_anything(self, scope: tuple[bytes, bytes], keys: list[bytes]) -> None:
        self.store.index.touch(*scope, keys, self.now_ms)
        self.model.touch(*scope, keys, self.now_ms)

    @rule(scope=scopes, start=st.integers(0, len(KEYS) - 1), count=st.integers(1, 8))
    def touch_chain(self, scope: tuple[bytes, bytes], start: int, count: int) -> None:
        keys = [KEYS[(start + i) % len(KEYS)] for i in range(count)]
        self.store.index.touch(*scope, keys, self.now_ms)
        self.model.touch(*scope, keys, self.now_ms)

    @precondition(lambda self: hasattr(self, "model") and any(c.parent_named for c in self.model.chunks.values()))
    @rule(number=st.integers(0, 10_000), size=st.sampled_from(SIZES), in_a_circle=st.booleans())
    def store_a_parent_and_touch_it_with_its_child(self, number: int, size: int, in_a_circle: bool) -> None:
        """The parent may be resident, come for the first time, come back, or be a descendant of its child."""
        children = [chunk for chunk in self.model.chunks.values() if chunk.parent_named]
        child = children[number % len(children)]
        assert child.parent_named is not None
        namespace, tenant, key = child.parent_named
        granted = self.store.index.grant(1, size, 1)
        assert granted == self.model.grant(1, size, 1)
        self.refs += granted
        grandparent = child.name[2] if in_a_circle else b""
        self._commit(1, namespace, [(*ref, tenant, key, grandparent) for ref in granted])
        keys = [key, child.name[2]]
        self.store.index.touch(namespace, tenant, keys, self.now_ms)
        self.model.touch(namespace, tenant, keys, self.now_ms)

    @rule(
        namespace=st.sampled_from([None, *NAMESPACES]),
        tenant=st.sampled_from([None, *TENANTS]),
        age_ms=st.none() | st.integers(0, 20),
        nbytes=st.none() | st.integers(1, 100 * KIB),
        dry_run=st.booleans(),
        steps=st.integers(1, 4),
    )
    def remove(
        self,
        namespace: bytes | None,
        tenant: bytes | None,
        age_ms: int | None,
        nbytes: int | None,
        dry_run: bool,
        steps: int,
    ) -> None:
        used_before_ms = None if age_ms is None else max(0, self.now_ms - age_ms)
        removal = self.store.index.begin_removal(
            namespace=namespace, tenant=tenant, used_before_ms=used_before_ms, nbytes=nbytes, dry_run=dry_run
        )
        while not self.store.index.remove(removal, steps):
            assert self.store.index.problems() == []
        expected = self.model.remove(namespace, tenant, used_before_ms, nbytes, dry_run)
        assert (removal.chunks, removal.nbytes, removal.skipped_pinned) == expected

    @rule(share=st.integers(1, 4))
    def prefault_more(self, share: int) -> None:
        left = self.store.arena_bytes - self.model.prefaulted
        self.model.prefaulted += left * share // 4
        self.store.index.set_prefaulted(self.model.prefaulted)

    @invariant()
    def index_and_table_agree_with_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        index = self.store.index
        assert index.problems() == []
        stats = index.stats()
        assert {name: stats[name] for name in self.model.stats()} == self.model.stats()
        assert self._pages_of_usage() == self.model.usage()
        assert self._pages_of_chunks() == sorted(
            (*chunk.name, chunk.class_bytes, chunk.used_ms, self.model.is_leased(chunk))
            for chunk in self.model.chunks.values()
        )
        for namespace in NAMESPACES:
            for tenant in TENANTS:
                meant = {name for name in self.model.chunks if name[:2] == (namespace, tenant)}
                assert index.holds(namespace=namespace, tenant=tenant) == bool(meant)
                chunks = [self.model.chunks.get((namespace, tenant, key)) for key in KEYS]
                codes, slots, generations = self.table.lookup(namespace, tenant, KEYS)
                assert codes == index.lookup(namespace, tenant, KEYS)
                assert codes == bytes(_native.CPU if chunk else _native.MISS for chunk in chunks)
                expected = [chunk.ref if chunk else (0, 0) for chunk in chunks]
                assert list(zip(slots.tolist(), generations.tolist(), strict=True)) == expected
        if self.refs:
            recent = self.refs[-40:]
            slots = np.array([slot for slot, _ in recent], np.uint32)
            generations = np.array([generation for _, generation in recent], np.uint64)
            current = self.table.current(slots, generations)
            assert current == bytes(self.model.generations[slot] == generation for slot, generation in recent)

    def _pages_of_usage(self) -> list[tuple[bytes, bytes, int, int]]:
        found: list[tuple[bytes, bytes, int, int]] = []
        while page := self.store.index.usage(found[-1][:2] if found else None, limit=3):
            assert all(in_lower == 0 for *_, in_lower in page)
            found += [row[:4] for row in page]
        return found

    def _pages_of_chunks(self) -> list[tuple[bytes, bytes, bytes, int, int, bool]]:
        found: list[tuple[bytes, bytes, bytes, int, int, bool]] = []
        start: int | None = 0
        while start is not None:
            page, start = self.store.index.chunks(start, steps=5, limit=3)
            found += page
        return sorted(found)


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,  # every run does the same; to search further, set it to False and raise max_examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
