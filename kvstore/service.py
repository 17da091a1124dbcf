"""The gRPC servicers: from messages to the store and back. No state of their own but the open streams.

Concurrency: one event loop. A step stream is one task that reads, applies and answers, and one that sends the group's
state when it changed unasked; a lock per stream keeps their writes apart. A session has one stream: a new one ends the
one before it (the process reconnected before this end noticed).

Exceptions become statuses here and nowhere else, by the table in kvstore/rpc/status.py. An exception that is not in
the table is a bug: it is logged with its traceback, and the caller gets INTERNAL.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NoReturn, TypeVar, cast

import grpc

from kvstore.attach import ArenaSocket
from kvstore.errors import KVStoreError, LimitExceeded, NotAllowed, ProtocolError, Unavailable
from kvstore.limits import PROBLEMS_SHOWN_MAX, TOKEN_METADATA_KEY
from kvstore.operations import Operations
from kvstore.quotas import CPU_TIER
from kvstore.rpc.status import ERROR_METADATA_KEY, STATUS_OF, wire_class_of
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc
from kvstore.store import Session, Store
from kvstore.tiers.base import Removed

_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")

CHECK_DATA_TELLS_MS = 200
STATUS_BYTES_MAX = 2_000  # of a refusal's text, three times as long on the wire at the worst: gRPC takes 8 KiB with it

_ENDED = "this process's connection on arena.sock has ended: attach again"

_Reply = TypeVar("_Reply")
_Page = TypeVar("_Page", admin_pb2.NamespacesPage, admin_pb2.UsagePage, admin_pb2.ChunksPage, admin_pb2.QuotasPage)
_log = logging.getLogger(__name__)


def clock_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def session_of(store: Store, metadata: object) -> Session | None:
    """Whose token the call carries."""
    for name, value in metadata or ():  # type: ignore[attr-defined]
        if name == TOKEN_METADATA_KEY:
            try:
                return store.session(bytes.fromhex(value))
            except ValueError:
                return None
    return None


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """No method runs without the token that arena.sock handed out, health and reflection apart."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def intercept_service(self, continuation: Callable[..., Awaitable[object]], details: object) -> object:
        handler = await continuation(details)
        method: str = details.method  # type: ignore[attr-defined]
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        if session_of(self._store, details.invocation_metadata) is not None:  # type: ignore[attr-defined]
            return handler
        return _refusing_like(handler)


class Sessions(store_pb2_grpc.SessionsServicer):  # type: ignore[misc]
    def __init__(self, store: Store, arena_socket: ArenaSocket) -> None:
        self._store = store
        self._arena_socket = arena_socket
        self._streams: dict[Session, asyncio.Task[object]] = {}

    async def Attach(
        self, request: store_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> store_pb2.AttachReply:
        return await _answer(context, lambda: self._attach(_caller(self._store, context), request))

    async def Step(self, _: AsyncIterator[store_pb2.StepRequest], context: grpc.aio.ServicerContext) -> None:
        session = await _answer(context, lambda: _caller(self._store, context))
        if (earlier := self._streams.get(session)) is not None:
            earlier.cancel()
            session.told = None
        task = asyncio.current_task()
        assert task is not None
        self._streams[session] = task
        changed = asyncio.Event()
        session.on_group = changed.set
        if session.told != self._store.group_state(session.group):
            changed.set()  # it changed while nobody could be told
        writing = asyncio.Lock()  # held for a refusal and at the end too: gRPC fails where a status meets a message
        pushing = asyncio.create_task(self._push_group(session, context, changed, writing))
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                async with writing:
                    if context.done():  # ended by `_push_group`
                        return
                    reply = await _answer(context, lambda: self._store.step(session, request, clock_ms()))
                    await context.write(reply)
            async with writing:
                pushing.cancel()
        finally:
            pushing.cancel()
            session.told = None
            if self._streams.get(session) is task:
                del self._streams[session]
                session.on_group = None

    def _attach(self, session: Session, request: store_pb2.AttachRequest) -> store_pb2.AttachReply:
        self._store.attach(session, request)
        if request.role != store_pb2.ROLE_ADMIN and not self._arena_socket.hand_over(session):
            raise Unavailable("the connection on arena.sock ended before the arena could be handed over: attach again")
        if session.group is not None:
            role = store_pb2.Role.Name(request.role)
            _log.info("pid %d of uid %d attached as %s of %s", session.pid, session.uid, role, session.group.name)
        session.told = self._store.group_state(session.group)
        return store_pb2.AttachReply(
            instance_id=self._store.instance_id,
            group=session.told,
            require_cache_salt=self._store.require_cache_salt,
        )

    async def _push_group(
        self, session: Session, context: grpc.aio.ServicerContext, changed: asyncio.Event, writing: asyncio.Lock
    ) -> None:
        while True:
            await changed.wait()
            changed.clear()
            async with writing:
                if not session.connected:  # nobody counts it any more, so its stream must not be left open
                    with contextlib.suppress(grpc.aio.AbortError):
                        await _abort(context, STATUS_OF[Unavailable], _ENDED, Unavailable.__name__)
                    return
                await context.write(store_pb2.StepReply(group=self._store.group_state(session.group)))


class Chunks(store_pb2_grpc.ChunksServicer):  # type: ignore[misc]
    def __init__(self, store: Store) -> None:
        self._store = store

    async def Lookup(
        self, request: store_pb2.LookupRequest, context: grpc.aio.ServicerContext
    ) -> store_pb2.LookupReply:
        await _answer(context, lambda: _require_attached(_caller(self._store, context)))
        slices = self._store.lookup(request)
        reply = store_pb2.LookupReply()
        while (codes := await _answer(context, lambda: next(slices, None))) is not None:
            reply.found.extend(cast("list[store_pb2.Found]", list(codes)))  # codes and enum agree by definition
            await asyncio.sleep(0)
        return reply


class Admin(admin_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Long answers are made in slices, each a millisecond at the most (but see `Store.check`); others run in between.

    `keep_quotas` and `drop_namespace` write to disk, where there is a tier for it.
    """

    def __init__(
        self,
        store: Store,
        operations: Operations,
        *,
        keep_quotas: Callable[[], Awaitable[None]],
        drop_namespace: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._store = store
        self._operations = operations
        self._keep_quotas = keep_quotas
        self._drop_namespace = drop_namespace

    async def Stats(self, _: admin_pb2.StatsRequest, context: grpc.aio.ServicerContext) -> admin_pb2.StatsReply:
        await self._require_operator(context)
        return await _answer(context, lambda: self._operations.stats(clock_ms()))

    async def Namespaces(self, _: admin_pb2.NamespacesRequest, context: grpc.aio.ServicerContext) -> None:
        await self._require_operator(context)
        await _write_pages(context, self._operations.namespaces())

    async def Usage(self, request: admin_pb2.UsageRequest, context: grpc.aio.ServicerContext) -> None:
        await self._require_operator(context)
        await _write_pages(context, self._operations.usage(request.what))

    async def Chunks(self, request: admin_pb2.ChunksRequest, context: grpc.aio.ServicerContext) -> None:
        await self._require_operator(context)
        await _write_pages(context, self._operations.chunks(request.what, request.limit, clock_ms()))

    async def Remove(
        self, request: admin_pb2.RemoveRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.RemoveReply:
        session = await self._require_operator(context)
        return await self._remove(session, request, context)

    async def _remove(
        self, session: Session, request: admin_pb2.RemoveRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.RemoveReply:
        came: dict[str, tuple[int, int]] = {}
        removal = await _answer(context, lambda: self._operations.begin_removal(request, clock_ms(), came))
        reply = admin_pb2.RemoveReply()
        lasting: asyncio.Future[Removed] = asyncio.get_running_loop().create_future()
        with self._operations.keeping_below(request):
            if removal is not None:
                try:
                    while not await _answer(context, lambda: self._operations.go_on(removal)):
                        await asyncio.sleep(0)
                finally:
                    came[CPU_TIER] = removal.chunks, removal.nbytes
                    if not request.dry_run:
                        _log.info(
                            "pid %d of uid %d removed %d chunks, %d bytes; %d were leased",
                            session.pid, session.uid, removal.chunks, removal.nbytes, removal.skipped_pinned,
                        )  # fmt: skip
                reply.by_tier.add(
                    tier=CPU_TIER, chunks=removal.chunks, bytes=removal.nbytes, skipped_pinned=removal.skipped_pinned
                )
            # After the cpu tier: what is committed from here on was begun after the removal.
            lower = await _answer(context, lambda: self._operations.remove_lower(request, _once(lasting)))
        if lower:
            removed = await lasting
            came["fs"] = removed.chunks, removed.nbytes
            if not request.dry_run:
                _log.info(
                    "pid %d of uid %d removed %d chunks, %d bytes from disk",
                    session.pid, session.uid, removed.chunks, removed.nbytes,
                )  # fmt: skip
            if removed.failed is not None:
                await _abort(
                    context,
                    STATUS_OF[Unavailable],
                    f"{removed.chunks} chunks on disk are out of reach, but may come back with the next start of the "
                    f"daemon ({removed.failed}); repeat the command when the disk is well",
                    Unavailable.__name__,
                )
            reply.by_tier.add(tier="fs", chunks=removed.chunks, bytes=removed.nbytes)
        return reply

    async def SetQuota(
        self, request: admin_pb2.SetQuotaRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.RemoveReply:
        session = await self._require_operator(context)
        reply = admin_pb2.RemoveReply()
        removals = await _answer(context, lambda: self._operations.set_quota(request))
        # Before the removals, which may fail: the quota holds all the same. A disk that hangs delays nothing in memory;
        # and what of the order is left undone by a caller who hangs up, the daemon does by itself.
        keeping = asyncio.create_task(self._kept())
        while not self._operations.order_for_quotas():
            await asyncio.sleep(0)
        for removal in removals:
            reply.by_tier.extend((await self._remove(session, removal, context)).by_tier)
        if not_kept := await keeping:
            text = f"the quota holds until the daemon stops, but could not be kept for the next one: {not_kept}"
            await _abort(context, STATUS_OF[Unavailable], text, Unavailable.__name__)
        return reply

    async def _kept(self) -> str:
        """Why the quotas could not be; "" when they are."""
        try:
            await self._keep_quotas()
        except (OSError, LimitExceeded) as error:
            return str(error)
        return ""

    async def Quotas(self, request: admin_pb2.QuotasRequest, context: grpc.aio.ServicerContext) -> None:
        await self._require_operator(context)
        await _write_pages(context, self._operations.quota_pages(request.what))

    async def Collect(self, request: admin_pb2.CollectRequest, context: grpc.aio.ServicerContext) -> None:
        session = await self._require_operator(context)
        there: dict[bytes, dict[str, admin_pb2.TierRemoval]] = {}
        for documents in self._operations.namespaces():
            there |= {row.namespace_id: {} for row in documents.namespaces}
            await asyncio.sleep(0)
        for page in self._operations.usage(admin_pb2.Selection()):
            for row in page.usage:
                by_tier = there.setdefault(row.namespace_id, {})
                total = by_tier.setdefault(row.tier, admin_pb2.TierRemoval(tier=row.tier))
                total.chunks += row.chunks
                total.bytes += row.bytes
            await asyncio.sleep(0)
        for namespace, by_tier in sorted(there.items()):
            await asyncio.sleep(0)
            unused_s = self._store.unused_s(namespace)  # only now: somebody may have come meanwhile
            if unused_s is None or unused_s * 1000 < request.unused_ms:
                continue
            document = self._store.document(namespace)
            removed = list(by_tier.values())
            if not request.dry_run:
                removal = admin_pb2.RemoveRequest(what=admin_pb2.Selection(namespace_id=namespace))
                removed = list((await self._remove(session, removal, context)).by_tier)
                if self._store.unused_s(namespace) is not None:
                    self._store.forget_namespace(namespace)
                    await self._drop_namespace(namespace)
            await context.write(
                admin_pb2.CollectedNamespace(
                    namespace_id=namespace, document=document, unused_s=unused_s, by_tier=removed
                )
            )

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainReply:
        await self._require_operator(context)
        slices = self._operations.explain(request, clock_ms())
        reply = admin_pb2.ExplainReply()
        while (piece := await _answer(context, lambda: next(slices, None))) is not None:
            reply.MergeFrom(piece)
            await asyncio.sleep(0)
        return reply

    async def Check(self, _: admin_pb2.CheckRequest, context: grpc.aio.ServicerContext) -> admin_pb2.CheckReply:
        await self._require_operator(context)
        slices = self._operations.check()
        problems: list[str] = []
        while (found := await _answer(context, lambda: next(slices, None))) is not None:
            problems += found
            await asyncio.sleep(0)
        shown = problems[:PROBLEMS_SHOWN_MAX]
        if len(shown) < len(problems):
            shown.append(f"and {len(problems) - len(shown)} more")
        return admin_pb2.CheckReply(problems=shown)

    async def CheckData(self, request: admin_pb2.CheckDataRequest, context: grpc.aio.ServicerContext) -> None:
        session = await self._require_operator(context)
        page = admin_pb2.CheckDataPage()
        told_ms = clock_ms()
        async for problem in self._operations.check_data(request.bytes_per_s or None):
            page.chunks_read += 1
            page.problems.extend(() if problem is None else (problem,))
            if page.problems or clock_ms() - told_ms > CHECK_DATA_TELLS_MS:
                page.chunks = max(page.chunks_read, self._operations.chunks_on_disk())
                await context.write(page)
                page = admin_pb2.CheckDataPage(chunks_read=page.chunks_read)
                told_ms = clock_ms()
        page.chunks = page.chunks_read
        await context.write(page)
        _log.info("pid %d of uid %d had %d chunks on disk read", session.pid, session.uid, page.chunks_read)

    async def _require_operator(self, context: grpc.aio.ServicerContext) -> Session:
        return await _answer(context, lambda: _operator(_caller(self._store, context)))


def _once(future: "asyncio.Future[Removed]") -> Callable[[Removed], None]:
    """The caller may have hung up."""
    return lambda removed: None if future.done() else future.set_result(removed)


def _caller(store: Store, context: grpc.aio.ServicerContext) -> Session:
    session = session_of(store, context.invocation_metadata())
    if session is None:  # it was there when the interceptor looked
        raise Unavailable(_ENDED)
    return session


def _require_attached(session: Session) -> None:
    if session.role == store_pb2.ROLE_UNSPECIFIED:
        raise ProtocolError("this session has not attached; call Sessions.Attach first")


def _operator(session: Session) -> Session:
    _require_attached(session)
    if session.uid not in (0, os.geteuid()):
        raise NotAllowed(f"uid {session.uid} may not administer a daemon of uid {os.geteuid()}; use that user or root")
    return session


async def _write_pages(context: grpc.aio.ServicerContext, pages: Iterator[_Page]) -> None:
    while (page := await _answer(context, lambda: next(pages, None))) is not None:
        if page.ByteSize() > 0:  # nothing of this slice was meant
            await context.write(page)
        await asyncio.sleep(0)


async def _answer(context: grpc.aio.ServicerContext, act: Callable[[], _Reply]) -> _Reply:
    try:
        return act()
    except KVStoreError as error:
        cls = wire_class_of(type(error))
        await _abort(context, STATUS_OF[cls], str(error), cls.__name__)
    except Exception:
        _log.exception("a call failed in a way that nobody foresaw")
        await _abort(context, grpc.StatusCode.INTERNAL, "the daemon failed; its log says how", KVStoreError.__name__)


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, text: str, name: str) -> NoReturn:
    encoded = text.encode(errors="replace")
    if (beyond := len(encoded) - STATUS_BYTES_MAX) > 0:
        text = f"{encoded[:STATUS_BYTES_MAX].decode(errors='ignore')} ... and {beyond} bytes more"
    await context.abort(code, text, ((ERROR_METADATA_KEY, name),))
    raise AssertionError("abort returns never")


def _refusing_like(handler: object) -> grpc.RpcMethodHandler:
    """A handler of the same shape that answers UNAUTHENTICATED."""

    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the call carries no token of this daemon in {TOKEN_METADATA_KEY!r}; a process gets one by connecting to "
            "arena.sock, and it ends with that connection",
        )

    streams = (handler.request_streaming, handler.response_streaming)  # type: ignore[attr-defined]
    wrap = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams]
    return wrap(refuse)
