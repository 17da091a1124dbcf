"""What anybody who reaches the sockets can and cannot do: tokens, memory, other users, bad input."""

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client import Lookup, Present, StoreClient, Stored
from kvstore.errors import (
    BadKey,
    ConfigurationError,
    KVStoreError,
    LimitExceeded,
    NamespaceMismatch,
    ProtocolError,
    SaltRequired,
    Unavailable,
    WrongSize,
)
from kvstore.limits import KEYS_PER_CALL_MAX, MESSAGE_BYTES_MAX
from kvstore.rpc.handover import PROTOCOL
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc
from kvstore.session import Attachment, Kind, Role, Session
from kvstore.testing import Daemon, running_daemon
from tests.integration.conftest import CHUNK_BYTES, WAIT_S, client_of, key, needs_root, payload, python

ATTACHMENT = Attachment(role=Role.CLIENT, hash_seed="0", kinds=(Kind({"model": "m"}, CHUNK_BYTES),))


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.endpoint, options=[("grpc.max_send_message_length", -1)]) as channel:
        yield channel


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with Session.attach(daemon.endpoint, ATTACHMENT) as session:
        yield session


def steps_of(channel: grpc.Channel, session: Session, *requests: store_pb2.StepRequest) -> list[store_pb2.StepReply]:
    """The answers, without what the daemon says unasked; its exception when it refuses."""
    call = store_pb2_grpc.SessionsStub(channel).Step(iter(requests), metadata=session.metadata, timeout=WAIT_S)
    try:
        return [reply for reply in call if reply.number]
    except grpc.RpcError as error:
        raise error_of(error) from None


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "zz", "00" * 32])
def test_without_the_token_every_call_is_refused(channel: grpc.Channel, token: str | None) -> None:
    metadata = () if token is None else (("kvstore-token", token),)
    calls = [
        lambda: store_pb2_grpc.SessionsStub(channel).Attach(
            store_pb2.AttachRequest(), metadata=metadata, timeout=WAIT_S
        ),
        lambda: store_pb2_grpc.ChunksStub(channel).Lookup(store_pb2.LookupRequest(), metadata=metadata, timeout=WAIT_S),
        lambda: admin_pb2_grpc.AdminStub(channel).Stats(admin_pb2.StatsRequest(), metadata=metadata, timeout=WAIT_S),
        lambda: list(store_pb2_grpc.SessionsStub(channel).Step(iter(()), metadata=metadata, timeout=WAIT_S)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "a process gets one by connecting to arena.sock" in caught.value.details()


def test_a_token_ends_with_its_connection(daemon: Daemon, channel: grpc.Channel) -> None:
    with Session.attach(daemon.endpoint, ATTACHMENT) as session:
        metadata = session.metadata
    request = store_pb2.LookupRequest(namespace_id=bytes(16), tenant=bytes(16))
    with pytest.raises(grpc.RpcError) as caught:
        store_pb2_grpc.ChunksStub(channel).Lookup(request, metadata=metadata, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_stream_ends_with_its_connection(daemon: Daemon, channel: grpc.Channel) -> None:
    """Else a process could open one after the other, and the daemon would count none of them."""
    requests: queue.SimpleQueue[store_pb2.StepRequest | None] = queue.SimpleQueue()
    with Session.attach(daemon.endpoint, ATTACHMENT) as session:
        step = store_pb2_grpc.SessionsStub(channel).Step
        call = step(iter(requests.get, None), metadata=session.metadata, timeout=WAIT_S)
        requests.put(store_pb2.StepRequest(number=1, instance_id=session.instance_id))
        assert any(reply.number == 1 for reply in call)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    requests.put(None)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "connection on arena.sock has ended" in caught.value.details()
    daemon.assert_sound()


def test_a_refusal_that_is_too_long_for_a_status_arrives_all_the_same(daemon: Daemon) -> None:
    def worker(rank: int) -> Attachment:
        layers = [f"layers.{layer}.of_rank_{rank}" for layer in range(1_000)]
        kind = Kind({"layers": layers}, CHUNK_BYTES, range_bytes=CHUNK_BYTES)
        return Attachment(role=Role.WORKER, hash_seed="0", group="engine", rank=rank, world_size=2, kinds=(kind,))

    with Session.attach(daemon.endpoint, worker(0)), pytest.raises(NamespaceMismatch, match=r"layers: .* bytes more"):
        Session.attach(daemon.endpoint, worker(1))


def test_health_and_reflection_answer_without_a_token(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "kvstore.rpc.v1.Sessions", "kvstore.rpc.v1.Chunks", "kvstore.rpc.v1.Admin"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=WAIT_S)
    assert {"kvstore.rpc.v1.Sessions", "kvstore.rpc.v1.Chunks", "kvstore.rpc.v1.Admin", "grpc.health.v1.Health"} <= {
        service.name for service in answer.list_services_response.service
    }


# -- memory ------------------------------------------------------------------------------------------------------------

TRY_TO_WRITE_THE_TABLE = """
import contextlib, fcntl, mmap, os, socket, sys
import grpc
from kvstore import session as s
from kvstore.config import endpoint_paths
from kvstore.rpc.handover import Hello, Memory
from kvstore.rpc.v1 import store_pb2_grpc

grpc_path, arena_path = endpoint_paths(sys.argv[1])
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(str(arena_path))
hello, _ = s._expect(sock, Hello)
attachment = s.Attachment(role=s.Role.CLIENT, hash_seed="0", kinds=(s.Kind({"model": "m"}, 4096),))
stub = store_pb2_grpc.SessionsStub(grpc.insecure_channel(f"unix:{grpc_path}"))
stub.Attach(s._attach_request(attachment), metadata=(("kvstore-token", hello.token.hex()),), timeout=10)
_, (arena, table) = s._expect(sock, Memory)
size = os.fstat(table).st_size

def reopened():
    return os.open(f"/proc/self/fd/{table}", os.O_RDWR)

def daemons_own():
    folder = f"/proc/{sys.argv[2]}/fd"
    [name] = [n for n in os.listdir(folder) if "kvstore-table" in os.readlink(f"{folder}/{n}")]
    return os.open(f"{folder}/{name}", os.O_RDWR)

attempts = {
    "map": lambda: mmap.mmap(table, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    "map reopened": lambda: mmap.mmap(reopened(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    "map daemon's": lambda: mmap.mmap(daemons_own(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    "write": lambda: os.pwrite(table, b"x", 0),
    "write reopened": lambda: os.pwrite(reopened(), b"x", 0),
    "shrink table": lambda: os.ftruncate(table, 0),
    "grow arena": lambda: os.ftruncate(arena, 1 << 40),
    "shrink arena": lambda: os.ftruncate(arena, 0),
    "seal": lambda: fcntl.fcntl(arena, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    "execute": lambda: os.chmod(f"/proc/self/fd/{arena}", 0o700),
}
for name, attempt in attempts.items():
    try:
        attempt()
        print(name, "was possible")
    except OSError:
        pass
mmap.mmap(table, size, mmap.MAP_SHARED, mmap.PROT_READ)
print("done")
"""


def test_nobody_can_write_the_table_or_resize_the_memory(daemon: Daemon) -> None:
    done = python(TRY_TO_WRITE_THE_TABLE, daemon.endpoint, str(daemon.pid))
    assert done.stdout == "done\n", done.stdout + done.stderr


# -- other users -------------------------------------------------------------------------------------------------------

OTHER_UID = 12345
ATTACH = f"""
import sys
from kvstore.client import StoreClient
from kvstore.errors import KVStoreError
try:
    with StoreClient.attach(
        sys.argv[1], namespace={{"model": "m"}}, chunk_bytes={CHUNK_BYTES}, hash_seed="0"
    ) as client:
        client.put("s", {{b"k" * 32: b"x" * {CHUNK_BYTES}}})
        print(client.get("s", [b"k" * 32])[0] == b"x" * {CHUNK_BYTES})
except KVStoreError as error:
    print(type(error).__name__, error)
from kvstore import admin
everything = admin.selection()
for ask in (
    admin.stats,
    admin.check,
    lambda endpoint: admin.remove(endpoint, everything),
    lambda endpoint: admin.tenants(endpoint, everything),
    lambda endpoint: admin.chunks(endpoint, everything, 1),
):
    try:
        print(ask(sys.argv[1]))
    except KVStoreError as error:
        print(type(error).__name__, error)
"""


@needs_root
def test_another_user_cannot_open_the_sockets(daemon: Daemon) -> None:
    done = python(ATTACH, daemon.endpoint, uid=OTHER_UID)
    assert done.stdout.startswith("NotAllowed "), done.stdout + done.stderr
    assert f"does not open for uid {OTHER_UID}" in done.stdout


@needs_root
def test_another_user_is_refused_even_where_the_sockets_are_open(daemon: Daemon) -> None:
    daemon.runtime_dir.chmod(0o755)
    for name in ("kvstore.sock", "arena.sock"):
        (daemon.runtime_dir / name).chmod(0o666)
    done = python(ATTACH, daemon.endpoint, uid=OTHER_UID)
    assert done.stdout.startswith(f"NotAllowed uid {OTHER_UID} may not attach to this daemon"), (
        done.stdout + done.stderr
    )
    assert f"--allow-uid {OTHER_UID} --socket-mode 0660" in done.stdout


@needs_root
@pytest.mark.parametrize("uid", [OTHER_UID, 65534])
def test_an_allowed_user_may_attach_but_not_administer_and_the_overflow_uid_never(
    uid: int,
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        os.chmod(folder, 0o755)
        runtime_dir = Path(folder) / "k"
        runtime_dir.mkdir()
        os.chown(runtime_dir, -1, uid)
        runtime_dir.chmod(0o710)
        arguments = ["--allow-uid", str(uid), "--socket-mode", "0660"]
        with running_daemon(runtime_dir=runtime_dir, arguments=arguments) as daemon:
            done = python(ATTACH, daemon.endpoint, uid=uid)
            if uid == OTHER_UID:
                first, *refused = done.stdout.splitlines()
                assert first == "True"
                assert len(refused) == 5
                for line in refused:
                    assert line.startswith(f"NotAllowed uid {uid} may not administer a daemon of uid 0")
            else:
                assert "stands for every user the daemon's user namespace does not know" in done.stdout


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_message_for_another_instance_is_refused(daemon: Daemon, channel: grpc.Channel, session: Session) -> None:
    request = store_pb2.StepRequest(number=1, instance_id=b"x" * 16, grants_wanted=[1])
    with pytest.raises(Unavailable, match=rf"instance {'78' * 16} and this daemon is {session.instance_id.hex()}"):
        steps_of(channel, session, request)
    assert daemon.tier()["granted_bytes"] == 0
    daemon.assert_sound()


def test_foreign_and_missing_grants_are_not_committed(daemon: Daemon, channel: grpc.Channel, session: Session) -> None:
    with Session.attach(daemon.endpoint, ATTACHMENT) as other:
        ask = store_pb2.StepRequest(number=1, instance_id=other.instance_id, grants_wanted=[1])
        [reply] = steps_of(channel, other, ask)
        [slot], [generation] = reply.grants[0].slots, reply.grants[0].generations
        commits = store_pb2.Commits(
            tenant=session.tenant_id("s"),
            slots=[slot, 0, 1 << 31],
            generations=[generation, 99, 0],
            keys=[key(1)] * 3,
            parents=[b""] * 3,
        )
        request = store_pb2.StepRequest(number=1, instance_id=session.instance_id, commits=[commits])
        [answer] = steps_of(channel, session, request)
        assert answer.outcomes == [store_pb2.OUTCOME_NOT_GRANTED] * 3
        assert daemon.tier()["chunks"] == 0
        aborts = [store_pb2.SlotRef(slot=slot, generation=generation)]
        steps_of(channel, other, store_pb2.StepRequest(number=2, instance_id=other.instance_id, aborts=aborts))
    daemon.assert_sound()


def test_keys_of_the_wrong_length_are_refused_by_both_ends(
    daemon: Daemon, channel: grpc.Channel, session: Session, client: StoreClient
) -> None:
    for bad in (b"", b"k" * 15, b"k" * 65, "k" * 32, None):
        for call in (
            lambda bad=bad: client.put("s", {key(1): payload(1), bad: payload(2)}),
            lambda bad=bad: client.lookup("s", [key(1), bad]),
            lambda bad=bad: client.get("s", [key(1), bad]),
            lambda bad=bad: client.get_into("s", {bad: bytearray(CHUNK_BYTES)}),
        ):
            of_length = rf" of {len(bad)} bytes" if isinstance(bad, bytes) else ""
            with pytest.raises(BadKey, match=rf"{of_length}: a key is the engine's hash, 16 to 64 bytes"):
                call()
    commits = store_pb2.Commits(
        tenant=session.tenant_id("s"), slots=[0], generations=[99], keys=[b"k" * 65], parents=[b""]
    )
    with pytest.raises(BadKey, match=r"key 6b6b.* has 65 bytes"):
        steps_of(channel, session, store_pb2.StepRequest(number=1, instance_id=session.instance_id, commits=[commits]))
    with pytest.raises(grpc.RpcError) as caught:
        store_pb2_grpc.ChunksStub(channel).Lookup(
            store_pb2.LookupRequest(namespace_id=bytes(16), tenant=bytes(16), keys=[b"k"]), metadata=session.metadata
        )
    assert type(error_of(caught.value)) is BadKey
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.lookup("s", [key(1)]) == [Lookup.MISS]  # nothing of the first put was stored
    daemon.assert_sound()


def test_chunks_of_the_wrong_size_are_refused_before_anything_is_stored(daemon: Daemon, client: StoreClient) -> None:
    for bad, found in (
        (b"", "0 bytes"),
        (payload(1) + b"x", f"{CHUNK_BYTES + 1} bytes"),
        (payload(1)[1:], f"{CHUNK_BYTES - 1} bytes"),
        (memoryview(bytes(2 * CHUNK_BYTES))[::2], f"not contiguous, {CHUNK_BYTES} bytes"),
        (memoryview(np.zeros((100, CHUNK_BYTES // 100), np.uint8).T), f"not contiguous, {CHUNK_BYTES} bytes"),
    ):
        with pytest.raises(
            WrongSize, match=rf"key {key(2).hex()} must be contiguous and {CHUNK_BYTES} bytes long; it is {found}$"
        ):
            client.put("s", {key(1): payload(1), key(2): bad})
    for bad_buffer in (bytearray(1), bytes(CHUNK_BYTES)):
        with pytest.raises(WrongSize, match=r"must be writable, contiguous and 10000 bytes long"):
            client.get_into("s", {key(1): bad_buffer})
    assert client.lookup("s", [key(1)]) == [Lookup.MISS]
    daemon.assert_sound()


def test_buffers_that_overlap_are_refused(daemon: Daemon, client: StoreClient) -> None:
    client.put("s", {key(1): payload(1), key(2): payload(2)})
    room = bytearray(2 * CHUNK_BYTES)
    with memoryview(room) as view:
        shifted = {key(1): view[:CHUNK_BYTES], key(2): view[CHUNK_BYTES - 1 : 2 * CHUNK_BYTES - 1]}
        with pytest.raises(WrongSize, match="overlap by 1 bytes"):
            client.get_into("s", shifted)
        with pytest.raises(WrongSize, match=f"overlap by {CHUNK_BYTES} bytes"):
            client.get_into("s", dict.fromkeys((key(1), key(2)), view[:CHUNK_BYTES]))
        client.get_into("s", {key(1): view[:CHUNK_BYTES], key(2): view[CHUNK_BYTES:]})
    assert room == payload(1) + payload(2)
    daemon.assert_sound()


def test_a_message_over_the_limit_says_what_the_limit_is(
    daemon: Daemon, channel: grpc.Channel, session: Session
) -> None:
    request = store_pb2.LookupRequest(namespace_id=bytes(16), tenant=bytes(16), keys=[b"k" * 64] * KEYS_PER_CALL_MAX)
    assert request.ByteSize() > MESSAGE_BYTES_MAX
    for where in (channel, session.channel):  # the daemon's limit, and this process's own
        with pytest.raises(grpc.RpcError) as caught:
            store_pb2_grpc.ChunksStub(where).Lookup(request, metadata=session.metadata, timeout=WAIT_S)
        error = error_of(caught.value)
        assert type(error) is LimitExceeded
        assert str(MESSAGE_BYTES_MAX) in str(error)
    daemon.assert_sound()


def test_10000_unknown_keys_in_one_lookup_are_answered(
    daemon: Daemon, channel: grpc.Channel, session: Session, client: StoreClient
) -> None:
    keys = [key(name) for name in range(10_000)]
    assert client.lookup("s", keys) == [Lookup.MISS] * 10_000
    assert client.get("s", keys) == [None] * 10_000
    request = store_pb2.LookupRequest(namespace_id=session.namespace_id, tenant=session.tenant_id("s"), keys=keys)
    reply = store_pb2_grpc.ChunksStub(channel).Lookup(request, metadata=session.metadata, timeout=WAIT_S)
    assert reply.found == [store_pb2.FOUND_MISS] * 10_000
    daemon.assert_sound()


def test_the_lookup_call_agrees_with_the_table(channel: grpc.Channel, session: Session, client: StoreClient) -> None:
    client.put("s", {key(name): payload(name) for name in range(3)})
    keys = [key(name) for name in range(5)]
    request = store_pb2.LookupRequest(namespace_id=session.namespace_id, tenant=session.tenant_id("s"), keys=keys)
    reply = store_pb2_grpc.ChunksStub(channel).Lookup(request, metadata=session.metadata, timeout=WAIT_S)
    assert [found.value for found in client.lookup("s", keys)] == list(reply.found) == [1, 1, 1, 0, 0]


def test_more_keys_than_one_call_takes_are_refused(client: StoreClient) -> None:
    keys = [key(name) for name in range(KEYS_PER_CALL_MAX + 1)]
    assert client.lookup("s", keys[1:]) == [Lookup.MISS] * KEYS_PER_CALL_MAX
    with pytest.raises(LimitExceeded, match=r"65537 keys in one call; at most 65536"):
        client.lookup("s", keys)


def test_an_empty_salt_is_no_tenant(client: StoreClient) -> None:
    with pytest.raises(SaltRequired, match=r"an empty salt names no tenant"):
        client.put("", {key(1): payload(1)})


def test_a_salt_with_half_a_surrogate_pair_is_a_tenant_like_any_other(client: StoreClient) -> None:
    client.put("a\ud800", {key(1): payload(1)})
    assert client.get("a\ud800", [key(1)]) == [payload(1)]
    assert client.get("a\ud801", [key(1)]) == client.get("a", [key(1)]) == [None]


@pytest.mark.parametrize("chunk_bytes", [0, -5, 1 << 70, "4096", True])
def test_a_chunk_of_no_size_is_refused(daemon: Daemon, chunk_bytes: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"chunk_bytes is {chunk_bytes!r}; it is a whole number of bytes"):
        client_of(daemon, chunk_bytes=chunk_bytes)


def test_where_salts_are_required_the_unsalted_are_refused() -> None:
    with running_daemon(arguments=["--require-cache-salt"]) as daemon, client_of(daemon) as client:
        for call in (
            lambda: client.put(None, {key(1): payload(1)}),
            lambda: client.lookup(None, [key(1)]),
            lambda: client.get(None, [key(1)]),
        ):
            with pytest.raises(SaltRequired, match=r"pass a salt"):
                call()
        client.put("s", {key(1): payload(1)})


def test_a_namespace_that_contradicts_its_session_is_refused(daemon: Daemon) -> None:
    with pytest.raises(NamespaceMismatch, match=r"says chunk_bytes 1, and the session 10000"):
        client_of(daemon, namespace={"model": "m", "chunk_bytes": 1})
    with pytest.raises(ConfigurationError, match=r"document.scale is 1.5 \(float\)"):
        client_of(daemon, namespace={"scale": 1.5})


def test_a_session_attaches_once_and_before_it_calls(daemon: Daemon, channel: grpc.Channel, session: Session) -> None:
    del daemon
    with pytest.raises(grpc.RpcError) as caught:
        store_pb2_grpc.SessionsStub(channel).Attach(
            store_pb2.AttachRequest(role=store_pb2.ROLE_CLIENT), metadata=session.metadata, timeout=WAIT_S
        )
    assert type(error_of(caught.value)) is ProtocolError
    with pytest.raises(KVStoreError, match=r"PYTHONHASHSEED is not set"):
        Session.attach("unix:///nowhere/kvstore.sock", Attachment(role=Role.CLIENT))


def test_garbage_on_arena_sock_ends_only_that_connection(daemon: Daemon, client: StoreClient) -> None:
    for packet in (b"x", b"\0" * 100_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(str(daemon.runtime_dir / "arena.sock"))
            assert json.loads(sock.recv(4096))["protocol"] == PROTOCOL
            sock.send(packet)
            assert sock.recv(4096) == b""
    client.put("s", {key(1): payload(1)})
    daemon.assert_sound()


# -- the command -------------------------------------------------------------------------------------------------------


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_stats_prints_json_or_a_table(daemon: Daemon, client: StoreClient) -> None:
    client.put("s", {key(1): payload(1)})
    done = kvstore("stats", "--endpoint", daemon.endpoint, "--json")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)
    assert {"instance_id", "uptime_s", "tiers", "sessions", "namespaces", "tenants"} <= stats.keys()
    [tier] = stats["tiers"]
    assert tier["name"] == "cpu"
    assert tier["used_bytes"] == 12_288
    assert tier.keys() >= {
        "capacity_bytes", "granted_bytes", "pinned_bytes", "overhead_bytes", "chunks", "hits", "misses", "evictions",
        "corruptions",
    }  # fmt: skip
    table = kvstore("stats", "--endpoint", daemon.endpoint)
    assert table.returncode == 0
    assert "cpu" in table.stdout


def test_stats_without_a_daemon_exits_4(tmp_path_factory: pytest.TempPathFactory) -> None:
    endpoint = f"unix://{tmp_path_factory.mktemp('r')}/kvstore.sock"
    done = kvstore("stats", "--endpoint", endpoint, "--json")
    assert done.returncode == 4
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "Unavailable"
    assert endpoint in error["message"]
    done = kvstore("stats", "--endpoint", endpoint)
    assert (done.returncode, done.stdout) == (4, "")


def test_a_wrong_endpoint_exits_2() -> None:
    done = kvstore("stats", "--endpoint", "tcp://x:1", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "ConfigurationError"


def test_many_bad_connections_are_few_lines_of_the_log(daemon: Daemon) -> None:
    for _ in range(200):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(str(daemon.runtime_dir / "arena.sock"))
            sock.send(b"garbage")
            while sock.recv(4096):
                pass
    told = daemon.log().count("sent something on arena.sock, that is no goodbye")
    assert 0 < told <= 100


@pytest.mark.parametrize("lost", ["nothing", "on the way there", "on the way back"])
def test_what_becomes_of_step_messages_on_arena_sock_changes_no_outcome(
    daemon: Daemon, client: StoreClient, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Each is worth one round trip, and none is needed."""
    sent = []

    def send_step(self: Session, message: bytes) -> bool:
        sent.append(message)
        return lost == "on the way there" or really(self, message)

    really = Session.send_step
    monkeypatch.setattr(Session, "send_step", send_step)
    if lost == "on the way back":
        connection = client._enter()
        connection._session.on_step = lambda _: None
        client._leave(connection)
    for number in range(0, 40, 4):
        chunks = {key(number + i): payload(number + i) for i in range(4)}
        assert set(client.put("s", chunks).values()) == {Stored()}
        assert set(client.put("s", chunks).values()) == {Present()}
        assert client.get("s", list(chunks)) == list(chunks.values())
    assert sent
    tier = daemon.tier()
    assert (tier["chunks"], daemon.stats()["stores"]) == (40, 40)
    daemon.assert_sound()
