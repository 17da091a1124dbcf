"""What does the control path cost: a lookup of 256 keys, and a round trip to the daemon?

One daemon, this process attached to it, 4,096 chunks of 4 KiB in a table for 8,192. The lookup is what a scheduler does
in the step that asks: from a list of keys as `bytes` to places, digests included, without asking anybody. Its
limit is 35 us; a peer's daemon answers the same question in 346 us. The round trip, one step message with 64 touches,
is off the scheduler's path; its limit is an empty gRPC call on the same socket.
"""

import statistics
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.report import Result, main, spread
from kvstore.client import Lookup, StoreClient
from kvstore.config import endpoint_paths, grpc_target
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.steps import Steps
from kvstore.testing import running_daemon

CHUNK_BYTES = 4096
CHUNKS = 4096
LOOKUP_KEYS = 256
LOOKUP_US_MAX = 35.0
ROUNDS = 2000
TRIPS = 300
WAIT_S = 10.0


def measure() -> list[Result]:
    keys = [number.to_bytes(32, "big") for number in range(CHUNKS)]
    with running_daemon(cpu_bytes="1GiB", verify=False) as daemon:
        namespace = {"model": "benchmark"}
        with StoreClient.attach(daemon.endpoint, namespace=namespace, chunk_bytes=CHUNK_BYTES, hash_seed="0") as store:
            for begin in range(0, CHUNKS, 256):
                store.put(None, dict.fromkeys(keys[begin : begin + 256], bytes(CHUNK_BYTES)))
            assert set(store.lookup(None, keys)) == {Lookup.CPU}
        attachment = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind(namespace, CHUNK_BYTES),))
        with Session.attach(daemon.endpoint, attachment) as session:
            return [*_lookups(session, keys), _round_trip(session, daemon.endpoint, keys)]


def _lookups(session: Session, keys: list[bytes]) -> list[Result]:
    tenant, namespace, table = session.tenant_id(None), session.namespace_id, session.table
    absent = [bytes([255]) + key[1:] for key in keys]
    results = []
    for name, population in (("lookup of 256 keys, all there", keys), ("lookup of 256 keys, none there", absent)):
        times_us = []
        for number in range(ROUNDS):
            begin = number * LOOKUP_KEYS % CHUNKS
            asked = population[begin : begin + LOOKUP_KEYS]
            start = time.perf_counter_ns()
            table.lookup(namespace, tenant, asked)
            times_us.append((time.perf_counter_ns() - start) / 1000)
        results.append(Result.of(name, times_us, "us", [LOOKUP_US_MAX]))
    return results


def _round_trip(session: Session, endpoint: str, keys: list[bytes]) -> Result:
    tenant = session.tenant_id(None)
    steps = Steps(session)
    steps.settle(WAIT_S)
    trips_us, calls_us = [], []
    with grpc.insecure_channel(grpc_target(endpoint_paths(endpoint)[0])) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for number in range(TRIPS):
            start = time.perf_counter_ns()
            health.Check(health_pb2.HealthCheckRequest())
            calls_us.append((time.perf_counter_ns() - start) / 1000)
            begin = number * 64 % CHUNKS
            start = time.perf_counter_ns()
            steps.touch(tenant, keys[begin : begin + 64])
            steps.settle(WAIT_S)
            trips_us.append((time.perf_counter_ns() - start) / 1000)
    steps.close()
    value, limit = statistics.median(trips_us), statistics.median(calls_us)
    return Result("step message with 64 touches, round trip", value, "us", limit, value / limit, spread(trips_us))


if __name__ == "__main__":
    main("control_path", __doc__.splitlines()[0], measure)
