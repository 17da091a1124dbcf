"""One daemon: locks, sockets, the cpu tier, the store and its servicers, put together, run, and taken down.

Order of a start, and why: configuration (nothing is touched) -> runtime directory -> lock (a second daemon ends here,
before gRPC, which unlinks the first one's socket without asking) -> what lies at the sockets' paths -> the fs
directory's lock -> memory -> metrics port -> gRPC -> arena.sock -> ready. Pre-faulting and the reading of the fs tier's
index go on after that.

Concurrency: one event loop owns the store and both sockets. Its timers write the heartbeat and end leases. Other
threads: the tier's pre-fault thread, and the metrics exporter's, which both reach the loop with call_soon_threadsafe.
When the daemon dies, its locks and sockets die with it: the next one finds sockets that nobody answers and replaces
them.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import resource
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from itertools import starmap
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import grpc
import prometheus_client
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore import __version__, throttle
from kvstore.attach import ArenaSocket
from kvstore.config import ServeConfig, grpc_target
from kvstore.errors import ConfigurationError, LimitExceeded
from kvstore.lastuse import LastUses
from kvstore.limits import (
    DESCRIPTORS_PER_SESSION,
    HEARTBEAT_INTERVAL_MS,
    MESSAGE_BYTES_MAX,
    OPERATORS_MAX,
    SESSIONS_MAX,
)
from kvstore.metrics import DaemonCollector
from kvstore.movement import Movement
from kvstore.operations import Operations
from kvstore.rpc.handover import Memory
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc
from kvstore.service import Admin, Chunks, Sessions, TokenInterceptor, clock_ms
from kvstore.store import Store
from kvstore.tenant import TENANT_KEY_BYTES
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.fs import FsTier
from kvstore.tiers.fs_catalog import SLAB_BYTES_MAX
from kvstore.tiers.fs_directory import DirectoryInUse, FsDirectory
from kvstore.tiers.fs_serving import FsOptions

LOCK_FILE = "kvstore.lock"
INSTANCE_ID_BYTES = 16
INDEX_KEY_BYTES = 16
LEASE_SWEEP_S = 1.0
SOCKET_SWEEP_S = 1.0
NOTE_USES_S = 60.0  # so exactly is it known after a kill when a namespace was last used
THREAD_SWITCH_S = 0.0005
OLD_COLLECTIONS_APART = 1_000  # collections of the middle generation between two of everything
WRITE_BACK_INTERVAL_S = 0.05
QUOTA_ORDER_INTERVAL_S = 0.05
DESCRIPTORS_OTHER = 256
HEALTH_INTERVAL_S = 1.0
DRAIN_S = 10.0  # how long a stop waits for chunks that are not on disk yet
FS_CLOSE_S = 10.0  # and then for what runs there
FS_CLOSE_SICK_S = 1.0  # the same, where the disk has not answered all the while
FS_HEALTH = "tier/fs"  # beside the services, for health checks
STOP_GRACE_S = 0.5
SNAPSHOT_TIMEOUT_S = 2.0
EXIT_STOPPED, EXIT_FAILED, EXIT_USAGE, EXIT_RUNNING = 0, 1, 2, 3

_SERVICES = (
    store_pb2.DESCRIPTOR.services_by_name["Sessions"].full_name,
    store_pb2.DESCRIPTOR.services_by_name["Chunks"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)

_log = logging.getLogger(__name__)


class AlreadyRunning(Exception):
    """Another daemon holds the lock of this runtime directory."""


class StartFailed(Exception):
    """Something on this host stands in the way. The message says what."""


def serve(config: ServeConfig, *, verify: bool = False) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code; what went wrong is in the log."""
    settings = ", ".join(starmap(_shown, config.settings()))
    _log.info("kvstore %s, settings: %s", __version__, settings)
    _raise_descriptor_limit(config.fs_bytes)
    _keep_pauses_short()
    try:
        with contextlib.ExitStack() as stack:
            group = _shared_group(config)
            _make_runtime_dir(config.runtime_dir, group)
            stack.enter_context(_locked(config.runtime_dir / LOCK_FILE))
            for path in (config.grpc_path, config.arena_path):
                _clear_stale_socket(path)
            # Its lock goes with the process: I/O that hangs may outlive everything else here.
            directory = None if config.fs_dir is None else FsDirectory.open(config.fs_dir)
            uvloop.run(_serve(config, group, directory, verify=verify))
    except ConfigurationError as error:
        _log.error("%s", error)
        return EXIT_USAGE
    except (AlreadyRunning, DirectoryInUse) as error:
        _log.error("%s", error)
        return EXIT_RUNNING
    except StartFailed as error:
        _log.error("%s", error)
        return EXIT_FAILED
    except OSError:
        _log.exception("the daemon ends: the system refused it something that it cannot do without")
        return EXIT_FAILED
    return EXIT_STOPPED


def _raise_descriptor_limit(fs_bytes: int) -> None:
    """Room for as many sessions as the daemon takes, for the usual soft limit holds a third of them; and for the slabs
    of a large disk, of which not all have the full size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_PER_SESSION * (SESSIONS_MAX + OPERATORS_MAX) + DESCRIPTORS_OTHER
    wanted += 2 * (fs_bytes // SLAB_BYTES_MAX)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keep_pauses_short() -> None:
    """Of the event loop's thread, by the interpreter: a thread that runs Python keeps the lock from others for so long,
    and the collector looks at every object there is while everybody waits. The catalogs leave no cycles behind."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_COLLECTIONS_APART)


async def _serve(config: ServeConfig, group: int | None, directory: FsDirectory | None, *, verify: bool) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    instance_id = secrets.token_bytes(INSTANCE_ID_BYTES)
    index_key = secrets.token_bytes(INDEX_KEY_BYTES)
    tenant_key = secrets.token_bytes(TENANT_KEY_BYTES) if directory is None else directory.tenant_key
    tier = CpuTier(
        cpu_bytes=config.cpu_bytes,
        index_bytes=config.index_bytes,
        index_key=index_key,
        instance_id=instance_id,
        lower_bytes=config.fs_bytes,
        eviction_policy=config.eviction_policy,
        verify=verify,
    )
    movement = None if directory is None else _movement(config, tier, directory)
    small_files = _Tasks()
    last_uses = _last_uses(movement, small_files)
    store = Store(
        tier,
        instance_id=instance_id,
        index_key=index_key,
        tenant_key=tenant_key,
        hash_seed=config.hash_seed,
        require_cache_salt=config.require_cache_salt,
        movement=movement,
        keep_document=None if movement is None else lambda text: small_files.begin(_keep_namespace(movement.fs, text)),
        last_uses=last_uses,
    )
    operations = Operations(
        store, tier, movement, started_ms=clock_ms(), verify=verify, config=starmap(_setting, config.settings())
    )
    if directory is not None:
        operations.quotas.load(directory.quotas())
        store.remember_learned(directory.learned())
    arena_socket = ArenaSocket(
        store,
        memory=Memory(tier.arena_bytes, index_key, tenant_key),
        fds=(tier.arena_fd, tier.table_fd),
        allow_uids=config.allow_uids,
    )
    health_servicer = health.aio.HealthServicer()
    await _say_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    server = _grpc_server(store, arena_socket, health_servicer, _admin(store, operations, movement))
    metrics = _start_metrics(config, lambda: _snapshot(loop, operations))

    beating = _in_background(store, operations, arena_socket)
    if movement is not None:
        movement.fs.start()
        beating += _in_background_of(movement, store, last_uses, health_servicer)
    try:
        await _open_sockets(config, group, server, arena_socket)
        await _say_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
        tier.start_prefault(lambda nbytes: _tell(loop, tier.set_ready, nbytes))
        print(f"kvstore ready endpoint={config.endpoint}", flush=True)
        _notify_systemd("READY=1")
        _log.info("instance %s, arena of %d bytes", instance_id.hex(), tier.arena_bytes)
        await stopping.wait()
        _log.info("stopping")
    finally:
        _notify_systemd("STOPPING=1")
        await health_servicer.enter_graceful_shutdown()
        for task in beating:
            task.cancel()
        store.note_uses()
        arena_socket.close()
        await server.stop(STOP_GRACE_S)
        if metrics is not None:
            await asyncio.to_thread(metrics.shutdown)
            metrics.server_close()
        await small_files.end()
        if movement is not None:
            await _close_fs(movement, config, store.learned())
        tier.close()
        for path in (config.grpc_path, config.arena_path):
            if path.is_socket():
                path.unlink()


def _setting(name: str, value: object, source: str) -> admin_pb2.Setting:
    return admin_pb2.Setting(name=name, value=json.dumps(value), source=source)


def _shown(name: str, value: object, source: str) -> str:
    return f"{name}={json.dumps(value)}" + (f" ({source})" if source else "")


def _in_background(store: Store, operations: Operations, arena_socket: ArenaSocket) -> list[asyncio.Task[None]]:
    return [
        asyncio.create_task(_every(HEARTBEAT_INTERVAL_MS / 1000, store.heartbeat)),
        asyncio.create_task(_every(LEASE_SWEEP_S, lambda: store.end_what_is_over(clock_ms()), in_slices=True)),
        asyncio.create_task(_every(SOCKET_SWEEP_S, arena_socket.sweep)),
        asyncio.create_task(_every(QUOTA_ORDER_INTERVAL_S, operations.order_for_quotas)),
        asyncio.create_task(_every(NOTE_USES_S, store.note_uses)),
    ]


def _in_background_of(
    movement: Movement, store: Store, last_uses: LastUses, health_servicer: health.aio.HealthServicer
) -> list[asyncio.Task[None]]:
    return [
        asyncio.create_task(_warm(movement, store, last_uses)),
        asyncio.create_task(_every(WRITE_BACK_INTERVAL_S, movement.tick)),
        asyncio.create_task(_say_fs_health(movement.fs, health_servicer)),
    ]


async def _open_sockets(
    config: ServeConfig, group: int | None, server: grpc.aio.Server, arena_socket: ArenaSocket
) -> None:
    with _umask(0o177):
        try:
            server.add_insecure_port(grpc_target(config.grpc_path))
            await server.start()
            arena_socket.listen(config.arena_path)
        except (OSError, RuntimeError) as error:
            raise StartFailed(f"the sockets in {config.runtime_dir} cannot be opened: {error}") from None
    if group is not None:
        for path in (config.grpc_path, config.arena_path):
            os.chown(path, -1, group)
            path.chmod(config.socket_mode)


def _last_uses(movement: Movement | None, small_files: "_Tasks") -> LastUses:
    if movement is None:
        return LastUses(time.time)
    return LastUses(time.time, lambda namespace: small_files.begin(_note_use(movement.fs, namespace)))


def _admin(store: Store, operations: Operations, movement: Movement | None) -> Admin:
    async def keep_quotas() -> None:
        if movement is not None:
            await movement.fs.keep_quotas(operations.quotas.kept())

    async def drop_namespace(namespace: bytes) -> None:
        if movement is not None:
            await movement.fs.drop_namespace(namespace)

    return Admin(store, operations, keep_quotas=keep_quotas, drop_namespace=drop_namespace)


def _grpc_server(store: Store, arena_socket: ArenaSocket, health_servicer: object, admin: Admin) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=(TokenInterceptor(store),),
        options=(
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ),
    )
    store_pb2_grpc.add_SessionsServicer_to_server(Sessions(store, arena_socket), server)
    store_pb2_grpc.add_ChunksServicer_to_server(Chunks(store), server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _movement(config: ServeConfig, tier: CpuTier, directory: FsDirectory) -> Movement:
    options = FsOptions(
        fs_bytes=config.fs_bytes,
        n_read_threads=config.n_read_threads,
        n_write_threads=config.n_write_threads,
        scrub_bytes_per_s=config.scrub_bytes_per_s,
    )
    movement = Movement(
        tier,
        FsTier(directory, options, regions=[(tier.arena.address, tier.arena.nbytes)]),
        clock_ms,
        policy=config.write_policy,
        write_after_uses=config.write_after_uses,
    )
    if rate_file := os.environ.get(throttle.VARIABLE):
        movement.throttle = throttle.Throttle(Path(rate_file))
    return movement


async def _close_fs(movement: Movement, config: ServeConfig, learned: dict[str, dict[str, str]]) -> None:
    try:
        await asyncio.wait_for(movement.fs.keep_learned(learned), STOP_GRACE_S)
    except (LimitExceeded, OSError, TimeoutError) as error:
        why = str(error) or f"the disk did not answer within {STOP_GRACE_S:g} s"
        _log.warning("what engines learned of their speed is not kept in %s: %s", config.fs_dir, why)
    drained = await movement.drain(DRAIN_S)
    if not drained:
        _log.warning("not everything could be written to %s in %g s", config.fs_dir, DRAIN_S)
    hangs = not drained and movement.fs.sick is not None
    if not await movement.fs.close(FS_CLOSE_SICK_S if hangs else FS_CLOSE_S):
        _log.warning("I/O in %s has not returned; the next start reads every header", config.fs_dir)


async def _warm(movement: Movement, store: Store, last_uses: LastUses) -> None:
    await movement.show_found()
    gc.freeze()  # what is found at the start stays, and would be looked at each time
    try:
        last_uses.load(await movement.fs.last_uses())
        store.remember(await movement.fs.namespaces())
    except OSError as error:
        _log.warning("the namespaces of earlier runs cannot be read: %s", error)


async def _keep_namespace(fs: FsTier, document: str) -> None:
    try:
        await fs.ready()
        await fs.keep_namespace(document)
    except (LimitExceeded, OSError) as error:
        _log.warning("a namespace's document is not kept on disk, its chunks are: %s", error)


async def _note_use(fs: FsTier, namespace: bytes) -> None:
    with contextlib.suppress(OSError):  # it is noted again before long
        await fs.ready()
        await fs.note_use(namespace)


async def _say_health(health_servicer: health.aio.HealthServicer, status: int) -> None:
    """Of all services but the one that stands for the fs tier."""
    for name in ("", *_SERVICES):
        await health_servicer.set(name, status)


async def _say_fs_health(fs: FsTier, health_servicer: health.aio.HealthServicer) -> None:
    while True:
        serving = fs.sick is None and fs.stats().warming is None
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await health_servicer.set(FS_HEALTH, status)
        await asyncio.sleep(HEALTH_INTERVAL_S)


class _Tasks:
    """Small things that nobody waits for but the end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def end(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=STOP_GRACE_S)


async def _every(interval_s: float, act: Callable[[], object], *, in_slices: bool = False) -> None:
    """`in_slices`: where `act` says that there is more to do, it goes on with the loop's next turn."""
    while True:
        more: object = False
        try:
            more = act()
        except Exception:  # a bug, and a border: without the next time no lease would end, and no heartbeat come
            _log.exception("what the daemon does by itself failed in a way that nobody foresaw")
        await asyncio.sleep(0 if in_slices and more else interval_s)


def _tell(loop: asyncio.AbstractEventLoop, act: Callable[[int], None], nbytes: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(act, nbytes)


# -- metrics -----------------------------------------------------------------------------------------------------------


def _start_metrics(config: ServeConfig, snapshot: Callable[[], admin_pb2.StatsReply]) -> WSGIServer | None:
    listen = config.metrics_listen
    if listen is None:
        return None
    registry = prometheus_client.CollectorRegistry()
    registry.register(DaemonCollector(snapshot))
    try:
        server, _ = prometheus_client.start_http_server(listen.port, listen.host, registry)
    except OSError as error:
        raise StartFailed(
            f"--metrics-listen {listen.host}:{listen.port} cannot be opened ({error.strerror}); name another "
            "HOST:PORT, or off"
        ) from None
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    _log.info("metrics at http://%s:%d/metrics", host, server.server_port)
    assert isinstance(server, WSGIServer)
    return server


def _snapshot(loop: asyncio.AbstractEventLoop, operations: Operations) -> admin_pb2.StatsReply:
    """On an exporter's thread: its state belongs to the loop."""
    reply: concurrent.futures.Future[admin_pb2.StatsReply] = concurrent.futures.Future()
    loop.call_soon_threadsafe(lambda: reply.set_result(operations.stats(clock_ms())))
    return reply.result(SNAPSHOT_TIMEOUT_S)


# -- the runtime directory ---------------------------------------------------------------------------------------------


def _make_runtime_dir(path: Path, group: int | None) -> None:
    mode = 0o700 if group is None else 0o710
    try:
        try:
            path.mkdir(mode=mode, parents=True)
            if group is not None:
                os.chown(path, -1, group)
            path.chmod(mode)
        except FileExistsError:
            found = path.stat()
            if not stat.S_ISDIR(found.st_mode):
                raise ConfigurationError(f"--runtime-dir {path} is not a directory") from None
            _require_private(path, found)
            if group is not None:
                _require_open_to(path, found, group)
        # Root may write anywhere but on a read-only file system, so ask by trying.
        os.close(_open_lock(path / LOCK_FILE))
    except OSError as error:
        raise ConfigurationError(
            f"--runtime-dir {path} cannot be written by uid {os.geteuid()}: {error.strerror}; name a directory that can"
        ) from None


def _require_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(f"--runtime-dir {path} belongs to uid {found.st_uid}, who could replace the sockets")
    if found.st_mode & 0o022:
        raise ConfigurationError(
            f"--runtime-dir {path} has mode {stat.S_IMODE(found.st_mode):04o}, so other users could replace the "
            f"sockets; chmod 700 {path}, or name a directory in it that does not exist yet"
        )


def _require_open_to(path: Path, found: os.stat_result, group: int) -> None:
    """An existing directory may be anybody's (`/run`), so its mode is the operator's to change."""
    if not (found.st_mode & 0o001 or (found.st_gid == group and found.st_mode & 0o010)):
        raise ConfigurationError(
            f"--runtime-dir {path} has group {found.st_gid} and mode {stat.S_IMODE(found.st_mode):04o}, so the users "
            f"of --allow-uid cannot reach the sockets; chgrp {group} {path} and chmod 710 {path}"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock file is never unlinked: two daemons could hold locks on two files of one name."""
    fd = _open_lock(path)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise ConfigurationError(f"{path} cannot be locked: {error.strerror}") from None
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(
                f"a daemon (pid {holder}) already serves {path.parent}; stop it, or give this one another --runtime-dir"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    """Whoever may read it may lock it, and so keep the daemon from starting."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(PermissionError):  # it is somebody else's, who could lock it in any case
        os.fchmod(fd, 0o600)
    return fd


def _clear_stale_socket(path: Path) -> None:
    """Under the lock: a socket here has no daemon any more."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StartFailed(f"{path} exists and is no socket; it was left alone. Move it, or name another --runtime-dir")
    path.unlink()
    _log.info("replaced %s, left behind by a daemon that was killed", path)


def _shared_group(config: ServeConfig) -> int | None:
    """The group of directory and sockets that every allowed uid is in; None without --allow-uid."""
    if not config.allow_uids:
        return None
    try:
        directory_gid: int | None = config.runtime_dir.stat().st_gid
    except OSError:
        directory_gid = None
    members = [uid_groups(uid) for uid in sorted(config.allow_uids)]
    common = shared_group(directory_gid, members, own=[os.getegid(), *os.getgroups()], root=os.geteuid() == 0)
    if common is None:
        uids = ", ".join(map(str, sorted(config.allow_uids)))
        raise ConfigurationError(
            f"--allow-uid: no group that this daemon may give to its sockets has uid {uids} in it; create a group with "
            f"these users and the daemon's (uid {os.geteuid()}), and make {config.runtime_dir} belong to it"
        )
    return common


def shared_group(
    directory_gid: int | None, members: Collection[Collection[int] | None], *, own: Collection[int], root: bool
) -> int | None:
    """`members`: for each allowed uid its groups, or None for a uid that this host's user database does not know; such
    a uid is believed to be in the group that the operator gave to the directory."""
    known = [set(groups) for groups in members if groups is not None]
    candidates = [gid for gid in (directory_gid, *own) if gid is not None]
    if root and known:
        candidates += sorted(set.intersection(*known))
    for gid in candidates:
        unknown_fits = len(known) == len(members) or (gid == directory_gid and gid != 0)
        if unknown_fits and all(gid in groups for groups in known):
            return gid
    return None


def uid_groups(uid: int) -> list[int] | None:
    import pwd

    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return None
    return os.getgrouplist(user.pw_name, user.pw_gid)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _notify_systemd(state: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.send(state.encode())
