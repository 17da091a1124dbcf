"""What of a request is stored: sorted out of what vLLM offers, admitted, given slots, and touched.

vLLM offers each chunk of a prompt once, also those that the GPU had: the only sign of life of a prefix that is hot
there, and what mends holes.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext, get_offload_block_hash

from connector import compat, metrics
from connector.grants import Grants
from connector.jobs import Jobs
from connector.messages import ChunkSpec
from connector.metrics import Counts
from connector.requests import HEARTBEAT_HUNG_MS, Attached, Geometry, RequestRecord, Row, Rules
from kvstore._native import CPU, FS, PENDING
from kvstore.admission import Admission, StoreVerdict

STORE_WAIT_S = 1.0  # how long a request's store may wait for grants; docs/decisions/002


@dataclass(frozen=True, slots=True)
class Offer:
    """One chunk offered for storing."""

    position: int  # in the row
    key: OffloadKey


@dataclass(slots=True, eq=False)
class Offers:
    """What vLLM offered of one row, and what is to become of it."""

    row: Row
    first: int  # positions of the first and the last one offered
    last: int
    end: int | None  # the first position that is not admitted
    disk_end: int | None  # and the first that the disk is not to have
    present: list[Offer] = field(default_factory=list)
    wanted: list[Offer] = field(default_factory=list)
    not_admitted: list[Offer] = field(default_factory=list)
    refused: list[Offer] = field(default_factory=list)  # among them what lies behind the end of the stored chain

    def is_for_disk(self, position: int) -> bool:
        return self.disk_end is None or position < self.disk_end


class Stores:
    def __init__(
        self,
        geometry: Geometry,
        rules: Rules,
        admission: Admission,
        grants: Grants,
        jobs: Jobs,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._geometry = geometry
        self._rules = rules
        self._admission = admission
        self._grants = grants
        self._jobs = jobs
        self._counts = counts
        self._clock = clock

    def prepare(
        self,
        record: RequestRecord | None,
        attached: Attached | None,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        """Of the chunks offered: those to store now. Anything but None means that vLLM does not offer the others again
        for this request, so a chain ends at the first one refused."""
        if record is None or not record.served or not self._rules.stores or not keys:
            return _store_nothing()
        offered = self._offered(record, keys, req_context)
        if attached is None:
            for row, of_row in offered:
                self._refuse(row, of_row[0].position, len(of_row))
            return _store_nothing()
        sorted_out = [self._sort_out(attached, record, row, of_row) for row, of_row in offered]
        # A prefix taken now is all that this request ever stores, so its slots are waited for, though not for ever.
        if any(self._lacks_grants(attached, offers) for offers in sorted_out):
            hopeful = [
                offers
                for offers in sorted_out
                if not offers.row.geometry.offered_once and self._grants.may_come(attached, offers.row.kind)
            ]
            if any(self._lacks_grants(attached, offers) for offers in hopeful) and self._may_defer(record, attached):
                for offers in sorted_out:
                    self._grants.expect(offers.row, max(offers.row.grants_expected, len(offers.wanted)))
                return None
        for row, of_row in offered:
            if row is record.lead:
                generated = [offer.key for offer in of_row if offer.position >= row.prompt_chunks]
                hashes = [get_offload_block_hash(key) for key in generated]
                self._admission.offered(record.stored_as(hashes))
        stored = [(offers, self._accept(attached, record, offers)) for offers in sorted_out]
        keys_to_store = [offer.key for offers, _ in stored for offer in offers.wanted]
        if not keys_to_store:
            return _store_nothing()
        places = [place for _, grants in stored for place in grants]
        job = self._jobs.prepare(attached, record, keys_to_store, places, is_store=True)
        job.first_chunks = [0] * len(record.rows)
        for offers, _ in stored:
            if offers.wanted:
                job.first_chunks[offers.row.kind] = offers.wanted[0].position
            job.parents += [self._parent(record, offers.row, offer.position) for offer in offers.wanted]
            job.memory_only += [not offers.is_for_disk(offer.position) for offer in offers.wanted]
        return PrepareStoreOutput(keys_to_store, job.spec, evicted_keys=[])

    def _offered(
        self, record: RequestRecord, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> list[tuple[Row, list[Offer]]]:
        """By row: which chunk of it each key is. vLLM lists them kind after kind, each in order."""
        ends = compat.end_tokens(keys, req_context, record.hashes, self._geometry.tokens_per_hash)
        if record.storable_tokens is not None:
            # vLLM offers what ended as if all of it had been computed and its blocks were still its own. Not so where
            # a step that was under way ended a request that had been preempted, or an error ended its prefill.
            ends = {key: end for key, end in ends.items() if end <= record.storable_tokens}
        offered: list[tuple[Row, list[Offer]]] = []
        for kind, own in itertools.groupby((key for key in keys if key in ends), self._geometry.kind_of):
            row = record.rows[kind]
            offers = [Offer(ends[key] // row.geometry.tokens_per_chunk - 1, key) for key in own]
            positions = [offer.position for offer in offers]
            assert positions == sorted(positions), f"chunks of kind {kind} offered out of order: {positions}"
            offered.append((row, offers))
        kinds = [row.kind for row, _ in offered]
        assert kinds == sorted(set(kinds)), f"kinds offered out of order: {kinds}"
        return offered

    def _sort_out(self, attached: Attached, record: RequestRecord, row: Row, offers: list[Offer]) -> Offers:
        """What is in the store already, and what is to be."""
        tenant = record.tenant(attached)
        end, disk_end = self._admitted_ends(record, attached, row)
        sorted_out = Offers(row, offers[0].position, offers[-1].position, end, disk_end)
        hashes = [get_offload_block_hash(offer.key) for offer in offers]
        codes, slots, generations = record.find(attached, row, hashes)
        now_there = row.chunk_hashes(sorted_out.first, sorted_out.last + 1)
        for i, (offer, code) in enumerate(zip(offers, codes, strict=True)):
            if now_there[offer.position - sorted_out.first : offer.position - sorted_out.first + 1] != [hashes[i]]:
                continue  # the request's tokens were changed since vLLM noted this key: its bytes are another's
            if code in (CPU, PENDING):
                sorted_out.present.append(offer)
                row.tail = (int(slots[i]), int(generations[i]))
            elif sorted_out.end is not None and offer.position >= sorted_out.end:
                sorted_out.not_admitted.append(offer)
            elif row.refused_from is not None and offer.position >= row.refused_from:
                sorted_out.refused.append(offer)
            elif not self._jobs.is_storing(tenant, offer.key):
                sorted_out.wanted.append(offer)
        return sorted_out

    def _admitted_ends(self, record: RequestRecord, attached: Attached, row: Row) -> tuple[int | None, int | None]:
        """The first chunk of the row that is not to be stored, and the first that the disk is not to have. None: all
        are, what the request generates included."""
        if record.store is None:
            record.store = self._admit_store(record, attached)
        verdict, tokens = record.store, record.lead.geometry.tokens_per_chunk
        end, disk_end = (
            None if end is None else end * tokens // row.geometry.tokens_per_chunk
            for end in (verdict.end_chunk, verdict.disk_end_chunk)
        )
        return end, disk_end

    def _admit_store(self, record: RequestRecord, attached: Attached) -> StoreVerdict:
        row = record.lead
        chain = row.chunk_hashes(0, row.prompt_chunks)
        codes = np.frombuffer(record.find(attached, row, chain)[0], np.uint8)
        return self._admission.store(
            record.req_id,
            record.stored_as(chain),
            (codes == CPU) | (codes == PENDING),
            chunk_bytes=self._geometry.chain_bytes(attached),
            tier_full=attached.steps.cpu_full,
            disk=attached.steps.fs,
            on_disk=(codes == FS) | (codes == PENDING),
        )

    def _accept(self, attached: Attached, record: RequestRecord, offers: Offers) -> list[tuple[int, int]]:
        """Slots for what is wanted. Where there are fewer, a chain keeps its head and a window its tail."""
        row, wanted = offers.row, offers.wanted
        grants = self._grants.take(attached, len(wanted), row.kind)
        lacking = len(wanted) - len(grants)
        self._counts.add(metrics.REFUSED_STORES, len(offers.refused))
        self._counts.add(metrics.UNADMITTED_STORES, len(offers.not_admitted))
        if lacking:
            if row.geometry.is_chain:
                offers.wanted, refused = wanted[: len(grants)], wanted[len(grants) :]
            else:
                offers.wanted, refused = wanted[lacking:], wanted[:lacking]
            offers.refused += refused
            self._refuse(row, refused[0].position, lacking)
            if row is record.lead and row.geometry.is_chain:
                chain = record.stored_as(row.chunk_hashes(0, max(row.prompt_chunks, refused[-1].position + 1)))
                reason = self._grants.why_short(attached, row.kind)
                self._admission.refused(record.req_id, chain, refused[0].position, reason)
        self._touch(attached, record, offers)
        if not lacking:
            prompt_end = row.prompt_chunks if offers.end is None else min(offers.end, row.prompt_chunks)
            prompt = min(row.grants_expected, max(0, prompt_end - offers.last - 1))
            answer = 1 if self._rules.stores_answers and not record.finished and offers.end is None else 0
            self._grants.expect(row, prompt + answer)
        if grants:
            row.tail = grants[-1]
        return grants

    def _refuse(self, row: Row, position: int, count: int) -> None:
        if row.geometry.is_chain and (row.refused_from is None or position < row.refused_from):
            row.refused_from = position
        self._counts.add(metrics.REFUSED_STORES, count)
        self._grants.expect(row, 0)

    def _lacks_grants(self, attached: Attached, offers: Offers) -> bool:
        return self._grants.lacks(attached, offers.row.kind, len(offers.wanted))

    def _may_defer(self, record: RequestRecord, attached: Attached) -> bool:
        """A finished request gets no further offer. Time counts, not steps: a step may take milliseconds, and a busy
        machine holds a daemon up for longer."""
        hung = attached.session.table.heartbeat_age_ms() > HEARTBEAT_HUNG_MS
        if record.finished or hung:
            return False
        now = self._clock()
        if record.store_waits_until_s is None:
            record.store_waits_until_s = now + STORE_WAIT_S
        return now < record.store_waits_until_s

    def _parent(self, record: RequestRecord, row: Row, position: int) -> bytes:
        if position == 0 or not row.geometry.is_chain:
            return b""
        [parent] = record.stored_as(row.chunk_hashes(position - 1, position))
        return parent

    def _touch(self, attached: Attached, record: RequestRecord, offers: Offers) -> None:
        """Each offer keeps what it found young; the one that completes the prompt a whole chain, so that no parent is
        older than its child. What is present or refused is used now; a commit speaks for the rest."""
        row = offers.row
        row.known_present |= bool(offers.present)
        used = sorted((offer.position, offer.key) for offer in (*offers.present, *offers.refused, *offers.not_admitted))
        if row.geometry.is_chain and row.known_present and offers.last + 1 == row.prompt_chunks:
            head = max(row.used, offers.first)
            used = [(position, key) for position, key in used if position >= head]
            touched = row.chunk_hashes(0, head)
            again = row.used
        else:
            head, touched = 0, []
            again = sum(position < row.used for position, _ in used)
        touched += [get_offload_block_hash(key) for _, key in used]
        if touched:
            worth_disk = 0
            if record.store is not None and record.store.is_worth_disk:
                positions = itertools.chain(range(head), (position for position, _ in used))
                worth_disk = sum(map(offers.is_for_disk, positions))
            attached.steps.touch(
                record.tenant(attached),
                record.stored_as(touched),
                again=again,
                kind=row.kind,
                worth_disk=worth_disk,
            )
        row.used = max(row.used, offers.last + 1)

    def touch_loaded(self, attached: Attached, record: RequestRecord, row: Row, loaded: list[bytes]) -> None:
        """Of an engine that stores nothing, and so is offered nothing."""
        touched, again = loaded, 0
        if row.geometry.is_chain:
            chain = row.chunk_hashes(0)
            touched = chain[: chain.index(loaded[-1], row.lookup_from) + 1]
            again = min(row.used, len(touched))
            row.used = max(row.used, len(touched))
        attached.steps.touch(record.tenant(attached), record.stored_as(touched), again=again, kind=row.kind)


def _store_nothing() -> PrepareStoreOutput:
    nothing = ChunkSpec(0, b"", np.empty(0, np.uint32), np.empty(0, np.uint64), ())
    return PrepareStoreOutput([], nothing, evicted_keys=[])
