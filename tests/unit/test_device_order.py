"""What the copier for CUDA is ordered against (rules 1 to 4 and 6 of native/cuda/copier.h), in random schedules.

An engine in miniature: compute that writes and reads blocks late, stores and loads of chunks of two blocks, blocks that
are given to another request as soon as vLLM would, chunks that are removed and slots that are granted anew under
running loads, device memory that is taken away and brought back. The fake device does everything late and in random
order. Every byte is checked against what the order of the calls promises. Copiers that forget a rule, planted one at a
time, must be found out.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore._native import STORED, DeviceCopier
from tests.unit.fake_cuda import FakeDevice, Fault
from tests.unit.native_store import NAMESPACE, TENANT, NativeStore, key_of, native_store

NO_FAULT = Fault(0)
BLOCKS = 8
BLOCK = 2048
CHUNK = 2 * BLOCK
SLOTS = 6
GROUP = 1
ACTIONS = ("write", "read", "store_chunks", "load", "load", "work", "turn", "turn", "pin", "gate", "clear", "sleep")


class Stale(AssertionError):
    """Somebody saw bytes of another moment."""


@dataclass
class Job:
    is_load: bool
    blocks: list[int]
    places: list[tuple[int, int]]  # slot, generation
    expected: np.ndarray  # of the chunks
    serial: int  # of submission
    useless: bool = False  # a store of blocks whose load has failed
    slept: bool = False  # the engine fell asleep before it was reported


@dataclass
class Read:
    into: np.ndarray
    expected: np.ndarray


@dataclass
class World:
    store: NativeStore
    seed: int
    faults: Fault = NO_FAULT
    names_blocks: bool = True  # False: rule 2 is forgotten
    checks_at_end: bool = True  # False: generations are compared while the copy may still read
    jobs: dict[int, Job] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    committed: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    serial: int = 0
    stored: int = 0  # chunks found right
    loaded: int = 0
    refused: int = 0  # chunks whose slot was somebody else's by then

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.device = FakeDevice(self.seed, version=self.random.choice([12040, 12080, 13000]))
        self.device.plant(self.faults)
        self.memory = self.device.add_memory(np.zeros((BLOCKS, BLOCK), np.uint8))
        self.content = self.memory.copy()  # of each block, once everything that was called for has been done
        self.writer = [0] * BLOCKS  # serial of who writes each block last
        self.gate_is_open = True
        kernel = self.random.choice([0, 2**63])
        self.copier = DeviceCopier(
            0,
            library=self.device.library,
            kernels=b"any",
            background=False,
            load_kernel_bytes=kernel,
            store_kernel_bytes=kernel,
            in_flight_bytes=self.random.choice([BLOCK, CHUNK, 64 * CHUNK]),
            pin_piece_bytes=2 * CHUNK,
        )
        self.copier.add_memory(self.memory.ctypes.data, self.memory.nbytes)
        self.copier.map_arena(self.store.arena, self.store.table(), pin=True)
        self.table = self.store.table()
        self.arena = np.frombuffer(self.store.arena.view(), np.uint8)

    # ---- what an engine does

    def act(self, action: str) -> None:
        getattr(self, action)()

    def busy(self, *, loads_only: bool = False) -> set[int]:
        """Blocks that vLLM would not let a forward pass touch: loads until they are reported. Nor write: stores too."""
        return {block for job in self.jobs.values() if job.is_load or not loads_only for block in job.blocks}

    def free_for(self, taken: set[int], count: int) -> list[int]:
        left = [block for block in range(BLOCKS) if block not in taken]
        return self.random.sample(left, count) if len(left) >= count else []

    def write(self) -> None:
        for block in self.free_for(self.busy(), 1):
            self.serial += 1
            values = np.frombuffer(self.random.randbytes(BLOCK), np.uint8)
            self.device.compute_write(self.memory[block], values)
            self.content[block], self.writer[block] = values, self.serial

    def read(self) -> None:
        for block in self.free_for(self.busy(loads_only=True), 1):
            read = Read(np.zeros(BLOCK, np.uint8), self.content[block].copy())
            self.reads.append(read)
            self.device.compute_read(self.memory[block], read.into)

    def store_chunks(self) -> None:
        chunks = self.random.randint(1, 2)
        # Blocks of a running load as well: rule 2 must hold by itself.
        blocks = self.free_for(set(), 2 * chunks)
        places = self.store.index.grant(GROUP, CHUNK, chunks)
        if len(places) < chunks:
            self.store.index.abort(GROUP, places)
            return
        self.submit(is_load=False, blocks=blocks, places=places, expected=self.content[blocks].copy())

    def load(self) -> None:
        places = self.random.sample(sorted(self.committed), min(len(self.committed), self.random.randint(1, 2)))
        # Whatever else happens to the blocks: stores that read them, loads that were given up, passes that read them.
        blocks = self.free_for(set(), 2 * len(places))
        if not blocks:
            return
        expected = np.concatenate([self.committed[place] for place in places])
        self.submit(is_load=True, blocks=blocks, places=places, expected=expected)
        self.content[blocks] = expected
        for block in blocks:
            self.writer[block] = self.serial

    def submit(self, *, is_load: bool, blocks: list[int], places: list[tuple[int, int]], expected: np.ndarray) -> None:
        self.serial += 1
        device = self.memory.ctypes.data + np.array(blocks, np.uint64) * np.uint64(BLOCK)
        begins = [self.store.offset(slot, CHUNK) + half * BLOCK for slot, _ in places for half in range(2)]
        arena = np.array(begins, np.uint64) + np.uint64(self.store.arena.address)
        ends = (arena, device) if is_load else (device, arena)
        self.copier.submit(
            self.serial,
            *ends,
            np.full(len(blocks), BLOCK, np.uint64),
            is_load=is_load,
            compute_stream=0,
            blocks=np.array(blocks if self.names_blocks else [], np.int64),
            table=self.table,
            slots=np.array([slot for slot, _ in places], np.uint32),
            generations=np.array([generation for _, generation in places], np.uint64),
        )
        self.jobs[self.serial] = Job(is_load, blocks, places, expected, self.serial)

    def work(self) -> None:
        self.device.step(self.random.randint(1, 12))

    def turn(self) -> None:
        for _ in range(6):
            self.device.step(self.random.randint(1, 8))
            self.poll()

    def gate(self) -> None:
        self.gate_is_open = not self.gate_is_open or self.random.random() < 0.5
        self.device.gate(is_open=self.gate_is_open)

    def pin(self) -> None:
        self.copier.pin_next(self.store.arena.address)

    def pin_all(self) -> None:
        while self.copier.pin_next(self.store.arena.address) == "piece":
            pass

    def clear(self) -> None:
        """Every chunk is forgotten; the next grants poison their slots, under whatever still reads them."""
        removal = self.store.index.begin_removal()
        while not self.store.index.remove(removal, 1000):
            pass
        self.committed.clear()

    def sleep(self) -> None:
        """What the blocks held is gone. vLLM waits for the device before, and gives every block away."""
        self.gate_is_open = True
        self.device.gate(is_open=True)
        self.device.step()
        self.pin_all()
        self.copier.suspend()
        for job in self.jobs.values():
            job.slept = True
        self.device.unmap(self.memory)
        self.turn()
        self.device.map_again(self.memory)
        self.copier.resume()
        self.content[:] = self.memory
        self.writer = [0] * BLOCKS

    def poll(self) -> None:
        self.copier.advance()
        for ended in self.copier.finished():
            job = self.jobs.pop(ended.job)
            if not job.is_load:
                self.check_store(job, set(ended.failed))
            elif self.checks_at_end:
                self.check_load(job, set(ended.failed))
            else:  # when it was submitted, every slot was leased
                self.check_load(job, set())

    def check_load(self, job: Job, failed: set[int]) -> None:
        self.refused += len(failed)
        self.loaded += len(job.places) - len(failed)
        lost = {job.blocks[2 * i + half] for i in failed for half in range(2)}
        for later in self.jobs.values():  # such a store is never asked for by vLLM
            later.useless |= not later.is_load and later.serial > job.serial and not lost.isdisjoint(later.blocks)
        for i, block in enumerate(job.blocks):
            if self.writer[block] != job.serial:
                continue  # given away meanwhile
            if i // 2 in failed:
                self.content[block] = self.memory[block]  # nobody reads that before writing it
            elif not np.array_equal(self.memory[block], job.expected[i]):
                raise Stale(f"load {job.serial} was reported, but block {block} is not what was stored")
        if moved := {i for i, now in enumerate(self.current(job)) if not now} - failed:
            raise Stale(f"load {job.serial} was reported, but slots {moved} are somebody else's")

    def check_store(self, job: Job, failed: set[int]) -> None:
        assert job.slept or not failed, f"store {job.serial} into slots of its own failed: {failed}"
        if job.useless or failed:
            self.store.index.abort(GROUP, job.places)
            return
        whole = job.expected.reshape(len(job.places), CHUNK)
        for i, (slot, generation) in enumerate(job.places):
            begin = self.store.offset(slot, CHUNK)
            if not np.array_equal(self.arena[begin : begin + CHUNK], whole[i]):
                raise Stale(f"store {job.serial} was reported, but slot {slot} is not what the blocks were")
            self.stored += 1
            commit = (slot, generation, TENANT, key_of(1000 * job.serial + i), b"")
            if self.store.index.commit(GROUP, NAMESPACE, [commit]) == [STORED]:
                self.committed[slot, generation] = whole[i].reshape(2, BLOCK)

    def current(self, job: Job) -> bytes:
        slots = np.array([slot for slot, _ in job.places], np.uint32)
        return self.table.current(slots, np.array([generation for _, generation in job.places], np.uint64))

    def drain(self) -> None:
        """Everything is done now."""
        self.device.gate(is_open=True)
        self.pin_all()
        for _ in range(10_000):
            self.poll()
            if not self.jobs and not self.device.step():
                break
            self.device.step()
        assert not self.jobs, f"jobs {sorted(self.jobs)} never ended"
        for i, read in enumerate(self.reads):
            if not np.array_equal(read.into, read.expected):
                raise Stale(f"read {i} of a forward pass saw bytes that came later")

    def close(self) -> None:
        self.device.plant(NO_FAULT)
        self.device.gate(is_open=True)
        self.copier.close()
        del self.copier, self.arena


def simulate(actions: list[str], seed: int, **forgotten: object) -> World:
    with native_store(SLOTS * CHUNK, verify=True) as store:
        world = World(store, seed, **forgotten)
        try:
            for action in actions:
                world.act(action)
            world.drain()
            assert world.copier.lost == ""
        finally:
            world.close()
        assert world.device.alive() == {}
    return world


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=60), st.integers(0, 2**32))
def test_no_schedule_shows_a_stale_byte(actions: list[str], seed: int) -> None:
    simulate(actions, seed)


def schedule(seed: int) -> list[str]:
    return random.Random(seed).choices(ACTIONS, k=60)


def test_the_schedules_do_something() -> None:
    worlds = [simulate(schedule(seed), seed) for seed in range(30)]
    reads = sum(len(world.reads) for world in worlds)
    stored, loaded, refused = (
        sum(getattr(world, what) for world in worlds) for what in ("stored", "loaded", "refused")
    )
    assert (reads > 100, stored > 100, loaded > 30, refused > 3) == (True,) * 4, (reads, stored, loaded, refused)


@pytest.mark.parametrize(
    "forgotten",
    [{"names_blocks": False}, {"checks_at_end": False}, *({"faults": fault} for fault in Fault)],
    ids=lambda forgotten: " ".join(map(str, *forgotten.items())),
)
def test_a_copier_that_forgets_a_rule_is_found_out(forgotten: dict[str, object]) -> None:
    for seed in range(2000):
        try:
            simulate(schedule(seed), seed, **forgotten)
        except Stale:
            return
    pytest.fail(f"2000 schedules did not find {forgotten}")
