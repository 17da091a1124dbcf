"""The processes of the tests about writers whose owner has gone. Each says over its pipe what it has done."""

import os
import signal
import subprocess
from multiprocessing.connection import Connection

import numpy as np

from kvstore._native import slot_offset
from kvstore.client import StoreClient
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Steps
from tests.crash.chunks import CHUNK_BYTES, NAMESPACE, SALT, SEED, SLOT_BYTES, content, key

WAIT_S = 60.0
ORPHAN = np.uint64(0x0DD0_0DD0_0DD0_0DD0)  # what the worker writes, and no chunk contains
WORLD = {"hash_seed": SEED, "group": "engine"}


def holding_scheduler(endpoint: str, pipe: Connection, slots: int, a_child_holds_the_socket: bool) -> None:
    """Sends the slots it was granted, and the pid of its child or 0; then lives on and does nothing."""
    session = Session.attach(endpoint, Attachment(role=Role.SCHEDULER, **WORLD))
    steps = Steps(session)
    pipe.send("attached")
    pipe.recv()
    steps.settle(WAIT_S)
    assert steps.group.complete
    steps.keep_grants([1 << 30])
    refs = steps.wait_grants(slots, WAIT_S)
    child = 0
    if a_child_holds_the_socket:
        fd = os.dup(session._sock.fileno())
        child = subprocess.Popen(["sleep", "600"], pass_fds=[fd]).pid
    pipe.send((refs, child))
    signal.pause()


def writing_worker(endpoint: str, pipe: Connection) -> None:
    """Writes to the slots it is told for as long as it lives: a copy that does not end."""
    attachment = Attachment(role=Role.WORKER, kinds=(Kind(NAMESPACE, CHUNK_BYTES, 0, CHUNK_BYTES),), **WORLD)
    session = Session.attach(endpoint, attachment)
    pipe.send("attached")
    refs = pipe.recv()
    with session.arena.view() as view:
        arena = np.frombuffer(view, np.uint64)
        places = [slot_offset(slot, SLOT_BYTES, session.table.unit_bytes) // 8 for slot, _ in refs]
        rounds = 0
        while True:
            for place in places:
                arena[place : place + CHUNK_BYTES // 8] = ORPHAN
            rounds += 1
            while pipe.poll():
                pipe.recv()
                pipe.send(rounds)


def same_keys_writer(endpoint: str, pipe: Connection, rounds: int, keys_per_round: int) -> None:
    """Puts the same chunks as everybody else, and sends the kinds of outcomes it got."""
    with _client(endpoint) as client:
        pipe.send("attached")
        pipe.recv()
        kinds: set[str] = set()
        for start in range(0, rounds * keys_per_round, keys_per_round):
            chunks = {key(number): content(number) for number in range(start, start + keys_per_round)}
            kinds |= {type(outcome).__name__ for outcome in client.put(SALT, chunks).values()}
        pipe.send(kinds)


def same_keys_reader(endpoint: str, pipe: Connection, rounds: int, keys_per_round: int) -> None:
    """Reads until told to stop; sends how many chunks it read, and the first wrong one or None."""
    numbers = list(range(rounds * keys_per_round))
    read, wrong = 0, None
    with _client(endpoint) as client:
        pipe.send("attached")
        while not pipe.poll():
            for number, found in zip(numbers, client.get(SALT, [key(number) for number in numbers]), strict=True):
                if found is not None:
                    read += 1
                    if found != content(number).tobytes():
                        wrong = number
        pipe.send((read, wrong))


def leasing_client(endpoint: str, pipe: Connection, chunks: int) -> None:
    """Stores chunks, leases each, and lives on."""
    attachment = Attachment(role=Role.CLIENT, hash_seed=SEED, kinds=(Kind(NAMESPACE, CHUNK_BYTES),))
    session = Session.attach(endpoint, attachment)
    with _client(endpoint) as client:
        keys = [key(number) for number in range(chunks)]
        client.put(SALT, {key(number): content(number) for number in range(chunks)})
    _, slots, generations = session.table.lookup(session.namespace_id, session.tenant_id(SALT), keys)
    steps = Steps(session)
    for ref in zip(slots.tolist(), generations.tolist(), strict=True):
        steps.lease(*ref)
    steps.settle(WAIT_S)
    pipe.send("leased")
    signal.pause()


def _client(endpoint: str) -> StoreClient:
    return StoreClient.attach(endpoint, namespace=NAMESPACE, chunk_bytes=CHUNK_BYTES, hash_seed=SEED, timeout_s=WAIT_S)
