"""What of a request is loaded: found in the shared table, admitted, and brought up from disk first where need be.

A lookup is made once per question of vLLM's and read from then on; it waits for nothing. What is only on disk is asked
for in rounds, and waited for as long as admission allows.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import Medium, OffloadKey, get_offload_block_hash

from connector.grants import Grants
from connector.requests import (
    HEARTBEAT_HUNG_MS,
    NOTHING_FOUND,
    Attached,
    Found,
    Geometry,
    Prefetch,
    RequestRecord,
    Row,
    Rules,
)
from kvstore._native import CPU, FS, MISS, PENDING
from kvstore.admission import FS as FS_TIER
from kvstore.admission import PROBE_CHUNKS, Admission, Hit, Mode, leading
from kvstore.limits import PROMOTES_PER_ROUND


class LookedUp(NamedTuple):
    """What the shared table said of a row's chunks from `lookup_from` on; of a chain up to the first missing one."""

    row: Row
    keys: Sequence[OffloadKey]
    codes: bytes
    slots: Sequence[int]
    generations: Sequence[int]
    missing: bytes  # hash of the first one after those


class Loads:
    def __init__(
        self,
        geometry: Geometry,
        rules: Rules,
        admission: Admission,
        grants: Grants,
        loading: Mapping[OffloadKey, int],
        clock: Callable[[], float],
    ) -> None:
        """`loading`: keys that copies to the GPU are under way for."""
        self._geometry = geometry
        self._rules = rules
        self._admission = admission
        self._grants = grants
        self._loading = loading
        self._clock = clock

    def look_up(self, record: RequestRecord, attached: Attached | None) -> Found:
        """`attached` None: there is no daemon to load from."""
        record.admitted_tokens = 0
        if attached is None or not record.served or not self._rules.loads:
            return NOTHING_FOUND
        looked_up: list[LookedUp] = []
        missing = 0
        for row in record.rows:
            hashes = row.chunk_hashes(row.lookup_from)
            codes, slots, generations = record.find(attached, row, hashes)
            if not record.misses_told:
                missing += row.needed(codes).count(MISS)
                if self._rules.stores and self._admission.stores_lately:
                    self._grants.expect(row, min(codes.count(MISS), row.geometry.stored_max(row.prompt_chunks)))
            end = leading(codes, MISS) if row.geometry.is_chain else len(codes)
            looked_up.append(
                LookedUp(
                    row,
                    row.keys_of(hashes[:end]),
                    codes[:end],
                    slots[:end].tolist(),
                    generations[:end].tolist(),
                    hashes[end] if end < len(hashes) else b"",
                )
            )
        if not record.misses_told:
            record.misses_told = True
            attached.steps.miss(missing)
        given_up = record.gave_up
        found = self._choose(record, attached, looked_up)
        if record.gave_up != given_up:  # what has come from disk by now is a shorter hit, decided about anew
            found = self._choose(record, attached, looked_up)
        return found

    def _choose(self, record: RequestRecord, attached: Attached, looked_up: Sequence[LookedUp]) -> Found:
        """What may be loaded of what is there, and what is to come from disk first."""
        record.admitted_tokens = self._admit_load(record, attached, looked_up)
        from_cpu = record.may_load_from(Medium.CPU)
        chunks: dict[OffloadKey, tuple[int, int]] = {}
        admitted: list[tuple[Sequence[OffloadKey], bytes]] = []
        for row, keys, codes, slots, generations, _ in looked_up:
            count = row.admitted(record.admitted_tokens, len(keys))
            places = zip(slots[:count], generations[:count], strict=True)
            admitted.append((keys[:count], codes[:count]))
            if from_cpu and not record.barred and codes.count(CPU, 0, count) == count:
                chunks.update(zip(keys[:count], places, strict=True))  # as usual; it must be quick
            else:
                chunks |= {
                    key: place
                    for key, code, place in zip(keys[:count], codes[:count], places, strict=True)
                    if code == CPU and key not in record.barred and (from_cpu or key in record.prefetched)
                }
        coming: Collection[OffloadKey] = ()
        below = any(FS in codes or PENDING in codes for _, codes in admitted)
        if below and record.may_load_from(Medium.STORAGE):
            codes_of_rows = [dict(zip(keys, codes, strict=True)) for keys, codes in admitted]
            coming = self._prefetch(record, attached, codes_of_rows, chunks)
        else:
            self.promotion_over(record)
        return Found(attached, chunks, coming)

    def _admit_load(self, record: RequestRecord, attached: Attached, looked_up: Sequence[LookedUp]) -> int | None:
        """Up to which token the request may load, in whole chunks. None: as far as there is anything, for what hits
        where chunks are used without those before them was not modelled."""
        lead = looked_up[record.lead.kind]
        if not lead.row.geometry.is_chain:
            return None if self._admission.mode is not Mode.NEVER else 0
        hit = self._hit(record, attached, lead)
        verdict = record.load
        same = verdict is not None and (verdict.hit.gpu_tokens, verdict.hit.end_tokens) == (
            hit.gpu_tokens,
            hit.end_tokens,
        )
        if verdict is None or not same or self._admission.is_overdue(verdict):
            verdict = record.load = self._admission.load(record.req_id, hit, self._rules.prefetch_wait_s)
            if verdict.probe:
                below = [
                    get_offload_block_hash(key) for key, code in zip(lead.keys, lead.codes, strict=True) if code == FS
                ]
                probed = record.stored_as(below[:PROBE_CHUNKS])
                attached.steps.promote(record.tenant(attached), probed, kind=lead.row.kind, waited=False)
        if not verdict.loads:
            return 0
        # Windows are kept only where vLLM may cut: with some a hit is loaded whole or not at all.
        return verdict.end_tokens if len(looked_up) == 1 else None

    def _hit(self, record: RequestRecord, attached: Attached, lead: LookedUp) -> Hit:
        """What of a request can be loaded at all, its tiers, its barred keys and what it gave up waiting for apart."""
        row, keys, codes = lead.row, lead.keys, lead.codes
        from_cpu = record.may_load_from(Medium.CPU)
        from_disk = record.may_load_from(Medium.STORAGE)
        filtered = not (from_cpu and from_disk)
        prefetch = record.prefetch
        if prefetch is not None and prefetch.over and prefetch.attached is attached:
            from_disk = False
        healthy = attached.session.table.heartbeat_age_ms() <= HEARTBEAT_HUNG_MS
        if record.barred or not from_cpu:
            codes = bytes(
                MISS if key in record.barred or (code == CPU and not (from_cpu or key in record.prefetched)) else code
                for key, code in zip(keys, codes, strict=True)
            )
        in_memory = leading(codes, MISS, FS, PENDING)
        anywhere = leading(codes, MISS) if from_disk else in_memory
        on_disk = codes.count(FS, in_memory, anywhere)
        first, tokens_per_chunk = row.lookup_from, row.geometry.tokens_per_chunk
        left_out = filtered and anywhere < len(keys)
        missing = get_offload_block_hash(keys[anywhere]) if anywhere < len(keys) else lead.missing
        if left_out:
            missing = b""
        loading = self._loading.keys()
        return Hit(
            prompt_tokens=max(record.prompt_tokens, len(record.hashes) * self._geometry.tokens_per_hash),
            gpu_tokens=record.computed_tokens,
            cpu_end_tokens=(first + in_memory) * tokens_per_chunk if in_memory else record.computed_tokens,
            end_tokens=(first + anywhere) * tokens_per_chunk if anywhere else record.computed_tokens,
            cpu_chunks=in_memory - (len(loading & set(keys[:in_memory])) if loading else 0),
            chunks=anywhere - (len(loading & set(keys[:anywhere])) if loading else 0),
            disk_chunks=on_disk,
            chunk_bytes=self._geometry.chain_bytes(attached),
            disk_healthy=healthy,
            left_out=left_out,
            missing=record.stored_as([missing])[0] if missing else b"",
        )

    def _prefetch(
        self,
        record: RequestRecord,
        attached: Attached,
        codes: Sequence[Mapping[OffloadKey, int]],
        chunks: Collection[OffloadKey],
    ) -> Collection[OffloadKey]:
        """Ask for what is only on disk, and say what is worth waiting for."""
        below = self._worth_promoting(record, codes, chunks)
        prefetch, now = record.prefetch, self._clock()
        if not below or attached.session.table.heartbeat_age_ms() > HEARTBEAT_HUNG_MS:
            if not below:
                self.promotion_over(record)
            return ()  # nobody would read them; a daemon that is only held up has as long as the request may wait
        if prefetch is None or prefetch.attached is not attached:
            self.promotion_over(record)
            wait_s = self._rules.prefetch_wait_s if record.load is None else record.load.wait_s
            prefetch = record.prefetch = Prefetch(attached, now + wait_s, now, len(below))
            self._admission.promoting(len(below), self._geometry.chain_bytes(attached))
        if prefetch.over:
            return ()
        ended = all(codes[self._geometry.kind_of(key)][key] == FS for key in below)
        round_over = attached.steps.promotes_answered >= prefetch.ticket and ended
        if prefetch.ticket == 0 or (round_over and len(below) < prefetch.below):
            # Another round may find room for what the last one did not bring.
            prefetch.ticket = self._promote(record, attached, below, waited=True) or prefetch.ticket
            prefetch.below = len(below)
            record.prefetched.update(below)
            attached.steps.flush()
        elif round_over:
            self._give_up_promotion(record, prefetch, [])
        if now >= prefetch.until_s and not prefetch.over:
            self._give_up_promotion(
                record, prefetch, [key for key in below if codes[self._geometry.kind_of(key)][key] == PENDING]
            )
        return () if prefetch.over else frozenset(below)

    def _worth_promoting(
        self, record: RequestRecord, codes: Sequence[Mapping[OffloadKey, int]], chunks: Collection[OffloadKey]
    ) -> list[OffloadKey]:
        """What is only on disk: of chains, as far as they have no hole; of windows, the last whole one before the end
        of the shortest chain."""

        def comes(key: OffloadKey, code: int) -> bool:
            return code in (FS, PENDING) and key not in record.barred

        below: list[OffloadKey] = []
        reach_tokens = len(record.hashes) * self._geometry.tokens_per_hash
        for row, row_codes in zip(record.rows, codes, strict=True):
            if not row.geometry.is_chain:
                continue
            usable = row.lookup_from
            for key, code in row_codes.items():
                if comes(key, code):
                    below.append(key)
                elif key not in chunks:
                    break
                usable += 1
            reach_tokens = min(reach_tokens, usable * row.geometry.tokens_per_chunk)
        for row, row_codes in zip(record.rows, codes, strict=True):
            window = row.geometry.window_chunks
            if window is None:
                continue
            end = max(0, -(-reach_tokens // row.geometry.tokens_per_chunk) - row.lookup_from)
            read: list[tuple[OffloadKey, int]] = []
            for key, code in reversed(list(row_codes.items())[:end]):
                if comes(key, code) or key in chunks:
                    read.append((key, code))
                elif len(read) < window:
                    read.clear()
                if len(read) > window:  # one more: vLLM wants it where the end lies within a chunk
                    break
            below += [key for key, code in reversed(read) if comes(key, code)]
        return below

    def _promote(
        self, record: RequestRecord, attached: Attached, keys: Sequence[OffloadKey], *, waited: bool
    ) -> int | None:
        """Ask for as many as a round takes. Returns the number to wait for; None: nothing was asked for."""
        ticket = None
        for kind, own in itertools.groupby(keys[:PROMOTES_PER_ROUND], self._geometry.kind_of):
            hashes = record.stored_as([get_offload_block_hash(key) for key in own])
            ticket = attached.steps.promote(record.tenant(attached), hashes, kind=kind, waited=waited)
        return ticket

    def _give_up_promotion(self, record: RequestRecord, prefetch: Prefetch, coming: Sequence[OffloadKey]) -> None:
        """What has not come from disk by now is a miss for this request. `coming`: what still does, for nobody."""
        self._promote(record, prefetch.attached, coming, waited=False)
        prefetch.over = True
        record.gave_up += 1
        self.promotion_over(record)
        if record.load is not None and record.load.tier == FS_TIER:
            self._admission.read_waited(
                chunks=prefetch.chunks,
                chunk_bytes=self._geometry.chain_bytes(prefetch.attached),
                seconds=self._clock() - prefetch.asked_s,
            )
            self._admission.gave_up(record.load, "not read from disk in time")
            record.load = None  # what has come is looked at anew

    def promotion_over(self, record: RequestRecord) -> None:
        prefetch = record.prefetch
        if prefetch is not None and prefetch.under_way:
            prefetch.under_way = False
            self._admission.promoted()
