"""The processes that are killed: a client, and the two halves of an engine that has no model.

The halves keep up their attachments with the connector's own `Link` and speak with the daemon through `Steps`; between
them goes a pipe, as between vLLM's processes: the end of one is the end of file of the other, which then ends its
copies, closes its session and exits. The worker's buffer stands for device memory: poisoned before each load, read
after it, and only where the copy says that it was good.

Each process has one thread of its own that does everything, beside those of `Link`, `Steps` and the copier.
"""

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from connector.link import Link
from kvstore._native import CPU, Arena, Copier, Table, slot_offset
from kvstore.client import Loaded, StoreClient
from kvstore.errors import Unavailable
from kvstore.limits import HEARTBEAT_STALE_MS
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Steps
from tests.crash.chunks import (
    CHAINS,
    CHUNK_BYTES,
    CHUNKS_PER_CHAIN,
    NAMESPACE,
    SALT,
    SEED,
    SLOT_BYTES,
    Tally,
    content,
    key,
)
from tests.crash.chunks import chain as chain_of

JOBS_MAX = 4
PAUSE_S = 0.005
UNLEASED = 0.3  # the share of loads that nothing protects: only their generations can tell
POISON = np.uint64(0x5A5A5A5A5A5A5A5A)
WORDS = CHUNK_BYTES // 8


def _quiet() -> None:
    """Only the starting process answers to the terminal, and that daemons go is no news here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)


# ---- client


def client(endpoint: str, folder: Path, row: int, seed: int) -> None:
    _quiet()
    tally, rnd = Tally(folder, row), random.Random(seed)
    store = None
    while True:
        tally.idle(idle=tally.paused)
        if tally.paused:
            time.sleep(PAUSE_S)
            continue
        try:
            if store is None:
                store = StoreClient.attach(
                    endpoint, namespace=NAMESPACE, chunk_bytes=CHUNK_BYTES, hash_seed=SEED, timeout_s=5.0
                )
            _use(store, tally, chain_of(rnd.randrange(CHAINS))[: rnd.randint(1, CHUNKS_PER_CHAIN)], rnd)
        except Unavailable:
            time.sleep(PAUSE_S)


def _use(store: StoreClient, tally: Tally, numbers: list[int], rnd: random.Random) -> None:
    keys = [key(number) for number in numbers]
    if rnd.random() < 0.5:
        found = [None if one is None else np.frombuffer(one, np.uint64) for one in store.get(SALT, keys)]
    else:
        buffers = {one: np.full(WORDS, POISON) for one in keys}
        outcomes = store.get_into(SALT, buffers)
        found = [buffers[one] if isinstance(outcomes[one], Loaded) else None for one in keys]
    for number, words in zip(numbers, found, strict=True):
        if words is not None:
            tally.check(number, words, f"client {os.getpid()}")
    missing = [number for number, words in zip(numbers, found, strict=True) if words is None]
    if missing:
        store.put(SALT, {key(number): content(number) for number in numbers})
        tally.stored(len(missing))


# ---- the scheduler half


@dataclass(frozen=True, slots=True)
class Attached:
    session: Session
    steps: Steps


@dataclass(frozen=True, slots=True)
class Job:
    """What the worker is asked to do: one slot per chunk, head first."""

    number: int
    is_store: bool
    instance_id: bytes
    chunks: list[int]
    refs: list[tuple[int, int]]  # slot, generation


def scheduler(endpoint: str, group: str, pipe: Connection, folder: Path, row: int, seed: int) -> None:
    _quiet()
    tally, rnd = Tally(folder, row), random.Random(seed)
    link = Link(
        endpoint,
        Attachment(role=Role.SCHEDULER, hash_seed=SEED, group=group),
        on_attached=lambda session: Attached(session, Steps(session)),
        on_detached=lambda attached: attached.steps.close(),
    )
    link.start()
    running: dict[int, tuple[Job, Attached]] = {}
    with contextlib.suppress(EOFError, OSError):  # the worker has gone, and so do we
        for number in _counting():
            while pipe.poll(0 if len(running) < JOBS_MAX and not tally.paused else PAUSE_S):
                ended, failed = pipe.recv()
                _settle(*running.pop(ended), failed, tally)
            attached = link.current
            tally.idle(idle=tally.paused and not running)
            if tally.paused or len(running) >= JOBS_MAX or attached is None or not attached.steps.group.complete:
                pipe.poll(PAUSE_S)
                continue
            job = _next_job(number, attached, chain_of(rnd.randrange(CHAINS)), rnd)
            if job is not None:
                running[number] = (job, attached)
                pipe.send(job)
            attached.steps.flush()
    link.close()


def _counting() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _next_job(number: int, attached: Attached, chunks: list[int], rnd: random.Random) -> Job | None:
    """Load the chain's head as far as it is there, or else store the chain."""
    session, steps = attached.session, attached.steps
    chunks = chunks[: rnd.randint(1, CHUNKS_PER_CHAIN)]
    tenant, keys = session.tenant_id(SALT), [key(chunk) for chunk in chunks]
    codes, slots, generations = session.table.lookup(steps.group.kinds[0].namespace_id, tenant, keys)
    hits = next((i for i, code in enumerate(codes) if code != CPU), len(codes))
    if hits and (hits == len(keys) or rnd.random() < 0.5):
        refs = list(zip(slots[:hits].tolist(), generations[:hits].tolist(), strict=True))
        if rnd.random() >= UNLEASED:
            for ref in refs:
                steps.lease(*ref)
        steps.touch(tenant, keys[:hits])
        return Job(number, False, session.instance_id, chunks[:hits], refs)
    steps.miss(len(keys) - hits)
    missing = len(keys) - steps.grants_free() - steps.grants_coming()
    if missing > 0:
        steps.want_grants(missing)
    if session.table.heartbeat_age_ms() > HEARTBEAT_STALE_MS:
        return None
    refs = steps.take_grants(len(keys))
    return Job(number, True, session.instance_id, chunks[: len(refs)], refs) if refs else None


def _settle(job: Job, attached: Attached, failed: set[int], tally: Tally) -> None:
    steps = attached.steps
    if not job.is_store:
        for i, ref in enumerate(job.refs):
            steps.release(*ref, loaded=i not in failed)
    else:
        whole = min(failed, default=len(job.refs))
        tenant = attached.session.tenant_id(SALT)
        for i, ref in enumerate(job.refs):
            if i < whole:
                parent = key(job.chunks[i] - 1) if job.chunks[i] % CHUNKS_PER_CHAIN else b""
                steps.commit(*ref, tenant, key(job.chunks[i]), parent)
            else:
                steps.abort(*ref)
        tally.stored(whole)
    steps.flush()


# ---- the worker half


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    instance_id: bytes
    table: Table
    arena: Arena


def worker(endpoint: str, group: str, pipe: Connection, folder: Path, row: int) -> None:
    _quiet()
    tally, copier = Tally(folder, row), Copier(2)
    device = np.full((JOBS_MAX, CHUNKS_PER_CHAIN, WORDS), POISON)  # stands for the blocks of a GPU
    copier.add_region(device.ctypes.data, device.nbytes)
    zeros = np.zeros(SLOT_BYTES - CHUNK_BYTES, np.uint8)
    copier.add_region(zeros.ctypes.data, zeros.nbytes)

    def on_attached(session: Session) -> Mapped:
        copier.add_region(session.arena.address, session.arena.nbytes)
        return Mapped(session.instance_id, session.table, session.arena)

    link = Link(
        endpoint,
        Attachment(
            role=Role.WORKER, hash_seed=SEED, group=group,
            kinds=(Kind(NAMESPACE, CHUNK_BYTES, 0, CHUNK_BYTES),),
        ),
        on_attached=on_attached,
        on_detached=lambda mapped: copier.remove_region(mapped.arena.address),
    )  # fmt: skip
    link.start()
    running: dict[int, tuple[Job, int]] = {}
    with contextlib.suppress(EOFError, OSError):  # the scheduler has gone, and so do we
        while True:
            if pipe.poll(0 if running else PAUSE_S):
                job = pipe.recv()
                place = next(i for i in range(JOBS_MAX) if i not in {used for _, used in running.values()})
                if _start(job, device[place], link, copier, zeros):
                    running[job.number] = (job, place)
                else:
                    pipe.send((job.number, set(range(len(job.refs)))))
            for finished in copier.finished():
                job, place = running.pop(finished.job)
                failed = set(finished.failed)
                if not job.is_store:
                    for i, chunk in enumerate(job.chunks):
                        if i not in failed:
                            tally.check(chunk, device[place, i], f"worker {os.getpid()}")
                pipe.send((job.number, failed))
            if running:
                copier.wait(list(running), PAUSE_S)
            tally.idle(idle=not running)
    link.close()  # waits for running copies, then hangs up
    copier.close()


def _start(job: Job, blocks: np.ndarray, link: Link[Mapped], copier: Copier, zeros: np.ndarray) -> bool:
    """False, nothing copied: the slots are not of the memory that is mapped now."""
    count = len(job.refs)
    blocks[:] = POISON
    if job.is_store:
        for i, chunk in enumerate(job.chunks):
            blocks[i] = content(chunk)
    with link.lock:
        mapped = link.current
        if mapped is None or mapped.instance_id != job.instance_id:
            return False
        unit_bytes = mapped.table.unit_bytes
        there = np.array([slot_offset(slot, SLOT_BYTES, unit_bytes) for slot, _ in job.refs], np.uint64)
        there += np.uint64(mapped.arena.address)
        here = np.array([blocks[i].ctypes.data for i in range(count)], np.uint64)
        sizes = np.full(count, CHUNK_BYTES, np.uint64)
        sources, destinations = (here, there) if job.is_store else (there, here)
        if job.is_store:
            sources = np.append(sources, np.full(count, zeros.ctypes.data, np.uint64))
            destinations = np.append(destinations, there + np.uint64(CHUNK_BYTES))
            sizes = np.append(sizes, np.full(count, zeros.nbytes, np.uint64))
        copier.submit(
            job.number, sources, destinations, sizes, table=mapped.table,
            slots=np.array([slot for slot, _ in job.refs], np.uint32),
            generations=np.array([generation for _, generation in job.refs], np.uint64),
        )  # fmt: skip
    return True
