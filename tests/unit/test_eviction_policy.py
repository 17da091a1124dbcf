"""The eviction policies of the native index: `adaptive` against a plain model of it, and what each is there for."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from kvstore import _native
from kvstore.decisions import is_full
from tests.unit.eviction_model import AdaptiveModel
from tests.unit.native_store import INDEX_KEY, KIB, NAMESPACE, TENANT, NativeStore, key_of, native_store

CHUNK = 4 * KIB
Chain = Sequence[bytes]


def digest_hi(key: bytes) -> int:
    return int.from_bytes(_native.digest(INDEX_KEY, NAMESPACE, TENANT, key)[8:], "little")


def request(store: NativeStore, chain: Chain) -> int:
    """What a request does that touches, then stores one chunk after the other. Returns how long a prefix it found."""
    index = store.index
    found = index.lookup(NAMESPACE, TENANT, chain)
    index.touch(NAMESPACE, TENANT, [key for key, code in zip(chain, found, strict=True) if code == _native.CPU])
    for position, code in enumerate(found):
        if code == _native.MISS:
            [ref] = index.grant(1, CHUNK, 1)
            parent = chain[position - 1] if position else b""
            assert index.commit(1, NAMESPACE, [(*ref, TENANT, chain[position], parent)]) == [_native.STORED]
    return len(found) - len(found.lstrip(bytes([_native.CPU])))


def request_of_model(model: AdaptiveModel, chain: Chain) -> None:
    missing = [position for position, key in enumerate(chain) if key not in model.chunks]
    model.touch([key for key in chain if key in model.chunks])
    for position in missing:
        model.store(chain[position], chain[position - 1] if position else None)


def sessions(generator: random.Random, count: int) -> Iterator[Chain]:
    """Conversations that grow by a turn now and then, some of them often, and a loop beside them."""
    keys = (key_of(number) for number in itertools.count())
    loop = [next(keys) for _ in range(30)]
    alive: list[list[bytes]] = []
    for number in range(count):
        if number % 3 == 0:
            yield [loop[number // 3 % len(loop)]]
        if not alive or generator.random() < 0.3:
            alive.append([])
        chain = alive[min(int(generator.expovariate(0.4)), len(alive) - 1)]
        chain += [next(keys) for _ in range(generator.randint(0 if chain else 1, 3))]
        if len(chain) >= 9:
            alive.remove(chain)
        yield chain[:]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [12, 40])
def test_adaptive_evicts_what_the_model_evicts(seed: int, capacity: int) -> None:
    generator = random.Random(seed)
    with native_store(capacity * CHUNK, eviction_policy="adaptive") as store:
        model = AdaptiveModel(capacity, digest_hi)
        for number, chain in enumerate(sessions(generator, 1_500)):
            request(store, chain)
            request_of_model(model, chain)
            if number % 5 == 0:
                again = len(chain) // 2
                model.touch(chain, again)
                store.index.touch(NAMESPACE, TENANT, chain, again=again)
            if number == 1_000:
                model.remove_all()
                assert store.index.remove(store.index.begin_removal(), 10_000)
            assert resident(store) == set(model.chunks), f"after request {number}"
        assert store.index.stats()["evictions"] > 1_000
        assert store.index.stats()["ghosts"] == len(model.ghosts)


def test_a_model_of_many_ghosts_and_a_small_sample_agrees_as_well() -> None:
    """More chunks than are remembered, of which only some are sampled."""
    generator = random.Random(4)
    with native_store(8 * CHUNK, eviction_policy="adaptive") as store:
        model = AdaptiveModel(8, digest_hi)
        for number in range(72_000):
            chain = [key_of(number if generator.random() < 0.95 else generator.randint(0, number))]
            request(store, chain)
            request_of_model(model, chain)
            if number % 500 == 0:
                assert resident(store) == set(model.chunks), f"after request {number}"
        assert model.bound < 2**62
        assert sum(map(sum, model.gone)) > 0
        assert store.index.stats()["ghosts"] == len(model.ghosts) == 65_536


def resident(store: NativeStore) -> set[bytes]:
    page, start = store.index.chunks(0, steps=10_000, limit=10_000)
    assert start is None
    return {key for _, _, key, _, _, _ in page}


def hit_rate(policy: str, chunks: int, chains: Sequence[Chain]) -> float:
    with native_store(chunks * CHUNK, eviction_policy=policy, entries=chunks) as store:
        hits = [request(store, chain) for chain in chains]
    return sum(hits) / sum(map(len, chains))


def test_in_a_loop_larger_than_the_tier_adaptive_keeps_what_fits_and_lru_nothing() -> None:
    chains = [[key_of(number % 100)] for number in range(40_000)]
    assert hit_rate("lru", 60, chains) == 0
    assert hit_rate("adaptive", 60, chains) > 0.5


@pytest.mark.parametrize("requests", [4_000, 4_021, 4_057])
def test_next_to_go_foresees_what_adaptive_takes_from_the_youngest_end(requests: int) -> None:
    with native_store(60 * CHUNK, eviction_policy="adaptive", entries=60) as store:
        for number in range(requests):
            request(store, [key_of(number % 100)])
        oldest = resident(store) - {key_of(number % 100) for number in range(requests - 60, requests)}
        next_to_go = store.index.next_to_go(12 * CHUNK, steps=100, limit=100)
        assert {row[2] for row in next_to_go} - oldest, "none is from the youngest end"
        for _, _, key, slot, generation in next_to_go:
            assert store.index.begin_io(slot, generation)
            store.index.end_io(slot, generation)
            store.index.grant(2, CHUNK, 1)
            assert not store.index.begin_io(slot, generation), f"{key!r} was not the next one"


def test_a_scan_drives_out_what_was_used_twice_only_under_lru() -> None:
    generator = random.Random(1)
    fresh = itertools.count(1_000)
    chains = [
        [key_of(generator.randrange(20))] if number % 4 == 0 else [key_of(next(fresh))] for number in range(8_000)
    ]
    rates = {policy: hit_rate(policy, 40, chains) for policy in ("lru", "probation", "adaptive")}
    assert rates["lru"] < 0.15
    assert rates["probation"] > 0.2
    assert rates["adaptive"] > 0.2


def test_a_request_that_touches_its_chunks_twice_has_used_them_once() -> None:
    with native_store(2 * CHUNK, eviction_policy="probation") as store:
        for number in range(2):
            request(store, [key_of(number)])
        store.index.touch(NAMESPACE, TENANT, [key_of(0)], again=1)
        request(store, [key_of(2)])
        assert resident(store) == {key_of(0), key_of(2)}  # young, but used once
        store.index.touch(NAMESPACE, TENANT, [key_of(0)])
        request(store, [key_of(3)])
        assert resident(store) == {key_of(0), key_of(3)}


def test_a_chunk_that_the_daemon_brought_back_by_itself_was_not_used_by_that() -> None:
    with native_store(2 * CHUNK, eviction_policy="probation") as store:
        for number in range(2):
            [ref] = store.index.grant(1, CHUNK, 1)
            store.index.commit(1, NAMESPACE, [(*ref, TENANT, key_of(number), b"")], is_use=False)
        for number in (1, 1, 0):
            store.index.touch(NAMESPACE, TENANT, [key_of(number)])
        request(store, [key_of(2)])
        assert resident(store) == {key_of(1), key_of(2)}  # 0 is younger, but was used once


@pytest.mark.parametrize("entries", [1, 1_000])
def test_a_tier_is_full_when_the_next_chunk_displaces_one(entries: int) -> None:
    """Whether it is the arena that is full or, with one entry, the table."""
    with native_store(100 * CHUNK, entries=entries) as store:
        for number in range(150):
            full, evictions = is_full(store.index.stats(), CHUNK, 100 * CHUNK), store.index.stats()["evictions"]
            request(store, [key_of(number)])
            assert full == (store.index.stats()["evictions"] > evictions), f"chunk {number}"
        assert full
        assert store.index.remove(store.index.begin_removal(), 10_000)
        assert not is_full(store.index.stats(), CHUNK, 100 * CHUNK)


def test_an_unknown_policy_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="'fifo' is none of lru, probation and adaptive"),
        native_store(eviction_policy="fifo"),
    ):
        pass
