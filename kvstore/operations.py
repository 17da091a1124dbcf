"""What operators ask of the daemon and have it do: figures, lists, quotas, removals, checks, explanations.

Concurrency: the event loop's thread, as for the store. Every `next` of an iterator here is one slice of work, a
millisecond at the most; the loop turns in between.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from kvstore import limits
from kvstore._native import CPU, FS, PENDING, Removal
from kvstore.decisions import REFUSED_PREFIX_BYTES
from kvstore.errors import NotFound, ProtocolError
from kvstore.movement import Movement
from kvstore.namespace import NAMESPACE_ID_BYTES
from kvstore.quotas import CPU_TIER, Quotas
from kvstore.rpc.v1 import admin_pb2
from kvstore.store import ROLE_NAMES, Store
from kvstore.tenant import TENANT_ID_BYTES, tenant_id
from kvstore.tiers.base import ChunkId, Removed, Scope
from kvstore.tiers.cpu import CpuTier


class Operations:
    def __init__(
        self,
        store: Store,
        tier: CpuTier,
        movement: Movement | None = None,
        *,
        started_ms: int,
        verify: bool = False,
        config: Iterable[admin_pb2.Setting] = (),
    ) -> None:
        """`movement` None: there is no fs tier. `verify`: broken invariants are figures too. `config`: to be shown."""
        self._store = store
        self._tier = tier
        self._index = tier.index
        self._movement = movement
        self._started_ms = started_ms
        self._verify = verify
        self._config = tuple(config)
        self._unsalted = tenant_id(store.tenant_key, None)
        self.quotas = Quotas(tier.index, None if movement is None else movement.fs)
        self._ordered = True

    # -- figures -------------------------------------------------------------------------------------------------

    def stats(self, now_ms: int) -> admin_pb2.StatsReply:
        index, counts = self._index.stats(), self._store.counts
        cpu = admin_pb2.TierStats(
            name=CPU_TIER,
            capacity_bytes=self._tier.arena_bytes,
            used_bytes=index["used_bytes"],
            granted_bytes=index["granted_bytes"],
            pinned_bytes=index["pinned_bytes"],
            overhead_bytes=self._tier.table_bytes,
            chunks=index["chunks"],
            hits=counts.hits,
            misses=counts.misses,
            evictions=index["evictions"],
            removals=index["removals"],
            corruptions=0,  # only a tier with checksums can see one
            ready_bytes=self._tier.ready_bytes,
            tenants=index["tenants"],
        )
        tiers = [cpu] if self._movement is None else [cpu, self._fs_stats(self._movement)]
        return admin_pb2.StatsReply(
            instance_id=self._store.instance_id,
            uptime_s=(now_ms - self._started_ms) / 1000,
            tiers=tiers,
            sessions=[
                admin_pb2.SessionStats(
                    role=ROLE_NAMES[session.role],
                    group=session.group.name if session.group else "",
                    pid=session.pid,
                    uid=session.uid,
                    rank=session.rank,
                    namespace_ids=[kind.namespace for kind in session.group.kinds] if session.group else [],
                )
                for session in self._store.connected()
            ],
            namespaces=len(self._store.documents()),
            tenants=max(tier.tenants for tier in tiers),
            stores=counts.stores,
            failed_loads=counts.failed_loads,
            poison_commits=index["poison_commits"],
            eviction_policy=self._tier.eviction_policy,
            problems=self._store.problems() if self._verify else (),
            decisions=self._store.explanations.counts(),
            balances=self._store.explanations.balances(),
            config=self._config,
        )

    def _fs_stats(self, movement: Movement) -> admin_pb2.TierStats:
        fs, counts = movement.fs.stats(), self._store.counts
        return admin_pb2.TierStats(
            name=movement.fs.name,
            capacity_bytes=fs.capacity_bytes,
            used_bytes=fs.used_bytes,
            overhead_bytes=fs.overhead_bytes,
            chunks=fs.chunks,
            hits=counts.fs_hits,
            misses=counts.misses,
            evictions=fs.evictions,
            removals=movement.removals,
            corruptions=fs.corruptions,
            ready_bytes=fs.capacity_bytes if fs.warming is None else 0,
            sick=fs.sick or "",
            not_growing=fs.not_growing or "",
            dropped_stores=movement.dropped,
            quarantined_slots=fs.quarantined,
            scrubbed_chunks=fs.scrubbed_chunks,
            unindexed_chunks=fs.unindexed,
            tenants=fs.tenants,
        )

    # -- quotas --------------------------------------------------------------------------------------------------

    def set_quota(self, request: admin_pb2.SetQuotaRequest) -> list[admin_pb2.RemoveRequest]:
        """Holds from now on. Returns what is beyond it and has to go. NotFound, ProtocolError, LimitExceeded."""
        namespace, tenant = self._named(request.what)
        if namespace is not None or tenant is None:
            raise ProtocolError("a quota is of one tenant, in all of its namespaces")
        removals = []
        self._ordered = False
        for tier in self._tiers():
            if request.what.tier not in ("", tier):
                continue
            excess = self.quotas.set(tenant, tier, request.bytes if request.HasField("bytes") else None)
            if excess > 0:
                what = admin_pb2.Selection(tenant_id=tenant, tier=tier)
                removals.append(admin_pb2.RemoveRequest(what=what, bytes=excess))
        return removals

    def order_for_quotas(self) -> bool:
        """One slice of what a first quota of a tenant needs; True when it is done, and at once when there is nothing to
        do."""
        self._ordered = self._ordered or self._index.order_for_quotas(limits.LISTING_STEPS_PER_SLICE)
        return self._ordered

    def quota_pages(self, what: admin_pb2.Selection) -> Iterator[admin_pb2.QuotasPage]:
        """NotFound, ProtocolError."""
        _, tenant = self._named(what)
        rows = [row for row in self.quotas if tenant in (None, row[0]) and what.tier in ("", row[1])]
        for first in range(0, len(rows), limits.ROWS_PER_PAGE):
            page = admin_pb2.QuotasPage()
            for tenant, tier, nbytes in rows[first : first + limits.ROWS_PER_PAGE]:
                page.quotas.add(tenant_id=tenant, unsalted=tenant == self._unsalted, tier=tier, bytes=nbytes)
            yield page

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> Iterator[list[str]]:
        """Every invariant that does not hold, a sentence each. What the answer means when chunks come and go meanwhile
        is said there."""
        return self._store.check()

    def chunks_on_disk(self) -> int:
        return 0 if self._movement is None else self._movement.fs.stats().chunks

    def check_data(self, bytes_per_s: int | None) -> AsyncIterator[str | None]:
        """Reads every chunk on disk, one after the other: for each None, or a sentence that says what is wrong."""
        return _nothing() if self._movement is None else self._movement.fs.scrub(bytes_per_s)

    # -- lists ---------------------------------------------------------------------------------------------------

    def namespaces(self) -> Iterator[admin_pb2.NamespacesPage]:
        """The documents kept, oldest first."""
        page, nbytes, in_use = admin_pb2.NamespacesPage(), 0, self._store.in_use()
        for namespace, document in self._store.documents():
            if len(page.namespaces) == limits.ROWS_PER_PAGE or nbytes > limits.DOCUMENT_BYTES_PER_PAGE:
                yield page
                page, nbytes, in_use = admin_pb2.NamespacesPage(), 0, self._store.in_use()
            unused_s = self._store.unused_s(namespace, in_use) or 0.0
            page.namespaces.add(namespace_id=namespace, document=document, unused_s=unused_s)
            nbytes += len(document)
        yield page

    def usage(self, what: admin_pb2.Selection) -> Iterator[admin_pb2.UsagePage]:
        """By namespace and tenant. NotFound."""
        namespace, tenant = self._named(what)
        self._require_known(namespace, tenant)
        if (movement := self._lower(what)) is not None:
            page = admin_pb2.UsagePage()
            for number, (its_namespace, its_tenant, chunks, nbytes) in enumerate(movement.fs.usage(), start=1):
                if number % limits.LISTING_STEPS_PER_SLICE == 0:
                    yield page
                    page = admin_pb2.UsagePage()
                if namespace not in (None, its_namespace) or tenant not in (None, its_tenant):
                    continue
                page.usage.add(
                    namespace_id=its_namespace,
                    tenant_id=its_tenant,
                    unsalted=its_tenant == self._unsalted,
                    tier=movement.fs.name,
                    chunks=chunks,
                    bytes=nbytes,
                )
                if len(page.usage) == limits.ROWS_PER_PAGE:
                    yield page
                    page = admin_pb2.UsagePage()
            yield page
        if what.tier not in ("", CPU_TIER):
            return
        after: tuple[bytes, bytes] | None = None
        while rows := self._index.usage(after, limit=limits.ROWS_PER_PAGE):
            page = admin_pb2.UsagePage()
            for its_namespace, its_tenant, chunks, nbytes, also_below in rows:
                if namespace in (None, its_namespace) and tenant in (None, its_tenant):
                    page.usage.add(
                        namespace_id=its_namespace,
                        tenant_id=its_tenant,
                        unsalted=its_tenant == self._unsalted,
                        tier=CPU_TIER,
                        chunks=chunks,
                        bytes=nbytes,
                        also_below=also_below,
                    )
            yield page
            after = rows[-1][:2]

    def chunks(self, what: admin_pb2.Selection, limit: int, now_ms: int) -> Iterator[admin_pb2.ChunksPage]:
        """At most `limit`, in no order: what is there all the while and what comes or goes meanwhile, see
        `Catalog.walk`. NotFound."""
        namespace, tenant = self._named(what)
        self._require_known(namespace, tenant)
        if (movement := self._lower(what)) is not None:
            for page in self._lower_chunks(movement, namespace, tenant, limit):
                limit -= len(page.chunks)
                yield page
        start: int | None = 0 if what.tier in ("", CPU_TIER) else None
        while start is not None and limit > 0:
            rows, start = self._index.chunks(
                start,
                namespace=namespace,
                tenant=tenant,
                steps=limits.LISTING_STEPS_PER_SLICE,
                limit=min(limit, limits.ROWS_PER_PAGE),
            )
            limit -= len(rows)
            page = admin_pb2.ChunksPage()
            for its_namespace, its_tenant, key, nbytes, used_ms, leased in rows:
                page.chunks.add(
                    namespace_id=its_namespace,
                    tenant_id=its_tenant,
                    key=key,
                    tier=CPU_TIER,
                    bytes=nbytes,
                    idle_s=max(0, now_ms - used_ms) / 1000,
                    leased=leased,
                )
            yield page

    def _lower_chunks(
        self, movement: Movement, namespace: bytes | None, tenant: bytes | None, limit: int
    ) -> Iterator[admin_pb2.ChunksPage]:
        scope = Scope(namespace, tenant)
        for held in movement.fs.chunks():
            if limit <= 0:
                return
            page = admin_pb2.ChunksPage()
            for chunk, nbytes, idle_s in itertools.islice((row for row in held if scope.covers(row.chunk)), limit):
                page.chunks.add(
                    namespace_id=chunk.namespace,
                    tenant_id=chunk.tenant,
                    key=chunk.key,
                    tier=movement.fs.name,
                    bytes=nbytes,
                    idle_s=idle_s,
                )
            limit -= len(page.chunks)
            yield page

    # -- removals ------------------------------------------------------------------------------------------------

    def begin_removal(
        self, request: admin_pb2.RemoveRequest, now_ms: int, came: Mapping[str, tuple[int, int]] | None = None
    ) -> Removal | None:
        """From the cpu tier: `go_on` does it. None: it is not meant. NotFound, ProtocolError: nothing is removed then,
        in any tier. When it is done `remove_lower` does the rest; both within `keeping_below`, entered at once.

        `came`: where the caller will put chunks and bytes by tier, for those who ask what became of a chunk."""
        namespace, tenant = self._named(request.what)
        older, nbytes = request.HasField("older_than_ms"), request.HasField("bytes")
        if nbytes and request.bytes == 0:
            raise ProtocolError("a removal of 0 bytes")
        if request.what.tier not in ("", CPU_TIER):
            self._require_known(namespace, tenant)
            self._note_removal(request, namespace, tenant, now_ms, came)
            return None
        removal = self._index.begin_removal(
            namespace=namespace,
            tenant=tenant,
            used_before_ms=max(0, now_ms - request.older_than_ms) if older else None,
            nbytes=request.bytes if nbytes else None,
            dry_run=request.dry_run,
        )
        # Only now: the first chunk of a tenant that is unknown so far may be on its way.
        self._require_known(namespace, tenant)
        self._note_removal(request, namespace, tenant, now_ms, came)
        return removal

    def _note_removal(
        self,
        request: admin_pb2.RemoveRequest,
        namespace: bytes | None,
        tenant: bytes | None,
        now_ms: int,
        came: Mapping[str, tuple[int, int]] | None,
    ) -> None:
        """For those who ask what became of a chunk."""
        if request.dry_run:
            return
        some = [f"chunks of {name}" for name, given in (("its namespace", namespace), ("its tenant", tenant)) if given]
        what = " and ".join(some).replace("and chunks of", "and") or "chunks"
        if request.HasField("older_than_ms"):
            what += f" not used for {request.older_than_ms / 1000:g} s"
        what += f" from {request.what.tier or 'every tier'}"
        if request.HasField("bytes"):  # whole chunks go: seldom exactly as many
            what = f"the least recently used {what}, {request.bytes} bytes asked for"
        self._store.explanations.removed(
            Scope(namespace, tenant),
            what,
            now_ms,
            from_memory=request.what.tier in ("", CPU_TIER),
            from_disk=self._lower(request.what) is not None,
            came=came,
        )

    def keeping_below(self, request: admin_pb2.RemoveRequest) -> AbstractContextManager[None]:
        """Of a removal that has begun: nothing that it covers comes up from the fs tier, if all of that is to go."""
        movement = self._lower(request.what)
        partly = request.dry_run or request.HasField("older_than_ms") or request.HasField("bytes")
        if movement is None or partly:
            return nullcontext()
        return movement.keeping_below(Scope(*self._named(request.what)))

    def go_on(self, removal: Removal) -> bool:
        """One slice; True when it is done."""
        return self._index.remove(removal, limits.REMOVAL_STEPS_PER_SLICE)

    def remove_lower(self, request: admin_pb2.RemoveRequest, done: Callable[[Removed], None]) -> bool:
        """From the fs tier: `done` is called when it will last. False: that tier is not meant, or not there."""
        movement = self._lower(request.what)
        if movement is None:
            return False
        namespace, tenant = self._named(request.what)
        movement.remove(
            Scope(namespace, tenant),
            done,
            bytes_wanted=request.bytes if request.HasField("bytes") else None,
            unused_s=request.older_than_ms / 1000 if request.HasField("older_than_ms") else None,
            dry_run=request.dry_run,
        )
        return True

    # -- what is meant -------------------------------------------------------------------------------------------

    def _lower(self, what: admin_pb2.Selection) -> Movement | None:
        """What keeps the fs tier, if the selection means it."""
        if self._movement is None or what.tier not in ("", self._movement.fs.name):
            return None
        return self._movement

    def _tiers(self) -> list[str]:
        return [CPU_TIER] if self._movement is None else [CPU_TIER, self._movement.fs.name]

    def _named(self, what: admin_pb2.Selection) -> tuple[bytes | None, bytes | None]:
        """Namespace and tenant, None for any. NotFound (the tier), ProtocolError."""
        tiers = self._tiers()
        if what.tier not in ("", *tiers):
            raise NotFound(f"this daemon has no tier {what.tier!r}; it has {', '.join(tiers)}")
        if what.namespace_id and len(what.namespace_id) != NAMESPACE_ID_BYTES:
            raise ProtocolError(f"a namespace's id has {NAMESPACE_ID_BYTES} bytes, not {len(what.namespace_id)}")
        tenant: bytes | None = None
        match what.WhichOneof("tenant"):
            case "salt" if what.salt == "":
                raise ProtocolError("a salt is never empty; chunks without one have a tenant id of their own")
            case "salt":
                tenant = tenant_id(self._store.tenant_key, what.salt)
            case "tenant_id" if len(what.tenant_id) != TENANT_ID_BYTES:
                raise ProtocolError(f"a tenant's id has {TENANT_ID_BYTES} bytes, not {len(what.tenant_id)}")
            case "tenant_id":
                tenant = what.tenant_id
        return what.namespace_id or None, tenant

    def _require_known(self, namespace: bytes | None, tenant: bytes | None) -> None:
        movement = self._movement
        if namespace is not None and not (
            self._store.document(namespace)
            or self._index.holds(namespace=namespace)
            or (movement is not None and movement.fs.holds(namespace, None))
        ):
            raise NotFound(f"no namespace {namespace.hex()} here; `kvstore ls namespaces` shows those that are")
        if tenant is not None and not (
            self._index.holds(tenant=tenant) or (movement is not None and movement.fs.holds(None, tenant))
        ):
            raise NotFound(f"tenant {tenant.hex()} has no chunk here; `kvstore ls tenants` shows those that have")

    # -- explanations --------------------------------------------------------------------------------------------

    def explain(self, request: admin_pb2.ExplainRequest, now_ms: int) -> Iterator[admin_pb2.ExplainReply]:
        """Pieces of the answer. ProtocolError: neither a request nor a key, or too little of one."""
        match request.WhichOneof("about"):
            case "request" if request.request:
                missed = b""
                for explained in self._store.explanations.of_request(request.request, now_ms):
                    yield admin_pb2.ExplainReply(decisions=[] if explained is None else [explained])
                    if explained is not None and not explained.decision.is_store:
                        missed = explained.decision.refused
                if missed:  # of what was missed last: what became of it
                    yield from self._fates(missed, now_ms)
            case "key" if REFUSED_PREFIX_BYTES <= len(request.key) <= limits.KEY_BYTES_MAX:
                yield from self._fates(request.key, now_ms)
            case _:
                raise ProtocolError(
                    f"neither a request's id nor at least the first {REFUSED_PREFIX_BYTES} bytes of a key"
                )

    def _fates(self, key: bytes, now_ms: int) -> Iterator[admin_pb2.ExplainReply]:
        for fate in self._store.explanations.of_key(key, self._places(), self._tier_of, now_ms):
            yield admin_pb2.ExplainReply(keys=[] if fate is None else [fate])

    def _places(self) -> Iterator[tuple[bytes, bytes]]:
        """Namespaces and tenants that hold something, each once."""
        after: tuple[bytes, bytes] | None = None
        while rows := self._index.usage(after, limit=limits.ROWS_PER_PAGE):
            yield from (row[:2] for row in rows)
            after = rows[-1][:2]
        if self._movement is not None:
            for namespace, tenant, _, _ in self._movement.fs.usage():
                if not self._index.holds(namespace=namespace, tenant=tenant):
                    yield namespace, tenant

    def _tier_of(self, namespace: bytes, tenant: bytes, key: bytes) -> str:
        if not limits.KEY_BYTES_MIN <= len(key) <= limits.KEY_BYTES_MAX:
            return ""
        code = self._index.lookup(namespace, tenant, [key])[0]
        sick = "" if self._movement is None else self._movement.fs.sick or ""
        on_disk = f"fs (sick, so it is not read: {sick})" if sick else "fs"
        if code == CPU and self._movement is not None and self._movement.fs.contains(ChunkId(namespace, tenant, key)):
            return f"{CPU_TIER} tier and the {on_disk}"
        return {CPU: CPU_TIER, PENDING: f"{on_disk} (being read)", FS: on_disk}.get(code, "")


async def _nothing() -> AsyncIterator[str | None]:
    nothing: tuple[None, ...] = ()
    for each in nothing:
        yield each
