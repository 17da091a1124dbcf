"""From what lies in the directory to a catalog: by the index where it can be trusted, else from every slot's header.

Runs in the tier's worker thread before anything else, and owns the catalog until it returns it. It may be killed at any
point: whatever it had done is done again by the next start, and it changes nothing that a header does not justify.

Trust in the index: STATE names the opening it belongs to. The machine has not booted since, or the stop was clean; a
child process has walked it; every record points at a slot that exists, has the right size, and is pointed at once.
After an unclean stop, slots that it does not mention may bear headers of stores it never learned of, or of evictions:
their headers are read and zeroed, so that afterwards a free slot bears none.

A rebuild believes a header when its slab, slot, epoch and size are those of the place where it lies; of several for one
chunk the highest sequence wins, and the others are zeroed. What it found is not proven until it was read once. What
cannot be read is zeroed in either case: a later start might be able to, after the chunk was removed.
"""

import logging
import os
import secrets
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvstore._native import IoPool
from kvstore.errors import KVStoreError
from kvstore.tiers import fs_index
from kvstore.tiers.fs_catalog import Catalog, Entry, Place, Slab
from kvstore.tiers.fs_directory import FsDirectory, Opening, Step, boot_id
from kvstore.tiers.fs_format import Damaged, SlotHeader, slot_bytes_for, slot_offset
from kvstore.tiers.fs_index import Index, IndexUnusable, Meta, Record
from kvstore.tiers.fs_paths import STATE
from kvstore.tiers.fs_worker import said

log = logging.getLogger(__name__)

SCAN_READS_MAX = 1_024  # headers asked for and not looked at
SCAN_READS_AT_ONCE = 128  # submitted
SCAN_THREADS = 16
# Added to the sequence after an unclean stop: more than the writes that can have been under way and unrecorded.
SEQUENCE_GAP = 1 << 32

Progress = Callable[[int, int], None]  # slots looked at, of how many


class Cancelled(KVStoreError):
    """The tier was closed meanwhile."""


@dataclass(frozen=True, slots=True)
class Recovered:
    catalog: Catalog
    index: Index | None  # to be filled if not complete. None: it cannot be written; the tier serves and tries again
    opening: Opening
    sequence: int  # the next write's is higher
    rebuilt: bool


@dataclass(slots=True)
class Recovery:
    directory: FsDirectory
    cap_bytes: int
    slab_bytes: int | None
    progress: Progress
    cancelled: threading.Event
    step: Step
    wall_clock_us: Callable[[], int] = lambda: 0

    def run(self) -> Recovered:
        """OSError, or Cancelled."""
        catalog = Catalog(
            self.cap_bytes,
            slab_bytes=self.slab_bytes,
            unit_bytes=self.directory.unit_bytes,
            clock_us=self.wall_clock_us,
        )
        try:
            return self._run(catalog)
        except BaseException:
            for slab in catalog.slabs.values():
                os.close(slab.fd)
            raise

    def _run(self, catalog: Catalog) -> Recovered:
        previous = self.directory.opening()
        opening = Opening(secrets.token_bytes(16), boot_id(), clean=False)
        for file in self.directory.slabs():
            header = file.header
            catalog.add_slab(header.slab, file.fd, header.epoch, header.slot_bytes, header.slot_count, fresh=False)
        catalog.barred_numbers |= self.directory.stuck_slabs
        catalog.foreign_bytes = self.directory.foreign_bytes()
        loaded = self._load(catalog, previous)
        # From here on the old index and its mark no longer describe the directory.
        self.directory.write_small(STATE, opening.encode())
        self.step("opening written")
        if loaded is None:
            sequence = self._rebuild(catalog) + SEQUENCE_GAP
        elif previous is not None and previous.clean:
            sequence = loaded
            for place in _unheld(catalog):
                catalog.free(place)
        else:
            sequence = loaded + SEQUENCE_GAP
            self._sweep(catalog)
        index = self._open_index(catalog, opening, sequence, loaded=loaded is not None)
        return Recovered(catalog, index, opening, sequence, rebuilt=loaded is None)

    # By the index

    def _load(self, catalog: Catalog, previous: Opening | None) -> int | None:
        """The sequence to go on from; None when the index cannot be used."""
        try:
            if self.directory.index_bytes() is None:
                if not catalog.slabs:
                    return 0
                raise IndexUnusable("it is missing")
            if previous is None:
                raise IndexUnusable(f"{STATE} is missing or damaged")
            if not previous.clean and previous.boot_id != boot_id():
                raise IndexUnusable("the machine has started again since, without a clean stop of the daemon")
            fs_index.check(self.directory.index_path, cancelled=self.cancelled.is_set)
            self.step("index checked")
            meta, records = fs_index.read(self.directory.index_path)
            if meta.opening != previous.opening or meta.directory_id != self.directory.directory_id:
                raise IndexUnusable("it is older or newer than the data, or from another directory")
            _adopt(catalog, records)
            if len(catalog.entries) != len(records):
                # Slabs are gone: what the index says of them must go too, so it is written anew.
                self.directory.remove_index()
        except IndexUnusable as error:
            if self.cancelled.is_set():
                raise Cancelled("the tier was closed while its index was read") from error
            if catalog.slabs:
                log.warning("%s: the index cannot be used: %s; reading every slot's header", self.directory.path, error)
            return None
        return meta.sequence

    # From headers

    def _rebuild(self, catalog: Catalog) -> int:
        """Each chunk is held as soon as its header is here, while others are being read; their order comes last."""
        superseded: list[Place] = []
        unreadable: list[Place] = []
        sequence = 0
        for place, header in self._headers(catalog, unreadable):
            if header is None:
                catalog.free(place)
                continue
            sequence = max(sequence, header.sequence)
            other = catalog.entries.get(header.chunk)
            if other is not None:
                if header.sequence < other.sequence:
                    superseded.append(place)
                    continue
                superseded.append(catalog.forget(other))
            catalog.hold(header.chunk, place, header.sequence, header.payload_bytes, proven=False, tick=header.sequence)
        self.step("headers read")
        self._zero(catalog, superseded, unreadable)
        catalog.put_in_order()
        return sequence

    def _sweep(self, catalog: Catalog) -> None:
        """Leaves no valid header in a slot that the index does not mention."""
        leftover: list[Place] = []
        unreadable: list[Place] = []
        for place, header in self._headers(catalog, unreadable):
            if header is not None:
                leftover.append(place)
            else:
                catalog.free(place)
        self.step("leftovers found")
        self._zero(catalog, leftover, unreadable)

    def _zero(self, catalog: Catalog, believable: list[Place], unreadable: list[Place]) -> None:
        """Nobody knows what the unreadable would say at a later start, perhaps after its chunk was removed. So they too
        are zeroed, but not used again in this run. A slab where that cannot be done is given up with all it holds."""
        slots: dict[Slab, list[int]] = {}
        for slab, slot in believable + unreadable:
            slots.setdefault(slab, []).append(slot)
        failed: dict[Slab, str] = {}
        for slab, numbers in slots.items():
            try:
                self.directory.zero_slots(slab.fd, numbers, slab.slot_bytes)
            except OSError as error:
                failed[slab] = said(error)
        for place in believable:
            catalog.free(place)
        for place in unreadable:
            catalog.quarantine(place)
        for slab, why in failed.items():
            log.warning(
                "%s: headers in slab %d cannot be zeroed (%s); removing it with all that it held",
                self.directory.path,
                slab.number,
                why,
            )
            self._remove_slab(catalog, slab)

    def _headers(self, catalog: Catalog, unreadable: list[Place]) -> Iterator[tuple[Place, SlotHeader | None]]:
        """Each place that is not held, with its header, or None where none lies that is to be believed. Many reads are
        in flight. What cannot be read is added to `unreadable`."""
        places = list(_unheld(catalog))
        pool = IoPool(SCAN_THREADS, 1)
        news = select.poll()  # `select.select` takes no descriptor beyond 1023, and each slab is one
        news.register(pool.event_fd, select.POLLIN)
        try:
            submitted = done = 0
            while done < len(places):
                if self.cancelled.is_set():
                    raise Cancelled("the tier was closed while it read headers")
                while submitted < len(places) and submitted - done <= SCAN_READS_MAX - SCAN_READS_AT_ONCE:
                    slab = places[submitted].slab
                    batch = places[submitted : submitted + SCAN_READS_AT_ONCE]
                    offsets = [slot_offset(place.slot, slab.slot_bytes) for place in batch if place.slab is slab]
                    pool.read_heads(submitted, slab.fd, offsets)
                    submitted += len(offsets)
                news.poll(1_000)
                for read in pool.poll():
                    done += 1
                    place = places[read.request]
                    if read.error:
                        unreadable.append(place)
                    else:
                        yield place, _header_of(place, read.head)
                self.progress(done, len(places))
        finally:
            pool.close(timeout_s=1.0)

    # The index from here on

    def _open_index(self, catalog: Catalog, opening: Opening, sequence: int, *, loaded: bool) -> Index | None:
        """A new one, where there is none to go on with, is empty: the journal fills it while the tier serves. Shrinks
        to the cap first: what the index takes depends on the slots that are left."""
        held = len(catalog.entries)
        self._shrink(catalog)
        if held != len(catalog.entries):
            log.info("%s: %d chunks dropped for the smaller cap", self.directory.path, held - len(catalog.entries))
        nbytes = catalog.index_bytes_for(catalog.slot_count)
        meta = Meta(
            complete=True,
            sequence=sequence,
            chunks=len(catalog.entries),
            payload_bytes=sum(entry.payload_bytes for entry in catalog.entries.values()),
            opening=opening.opening,
            directory_id=self.directory.directory_id,
        )
        path = self.directory.index_path
        try:
            if loaded and held == len(catalog.entries) and self.directory.index_bytes() == nbytes:
                return Index(path, nbytes, meta)
            self.directory.remove_index()
            self.step("index removed")
            return Index(path, nbytes, replace(meta, complete=not catalog.entries, chunks=0, payload_bytes=0))
        except (IndexUnusable, OSError) as error:
            log.warning("%s: the index cannot be written: %s", self.directory.path, error)
            return None

    def _shrink(self, catalog: Catalog) -> None:
        catalog.index_slot_count = catalog.slot_count
        while (slab := catalog.slab_to_shrink_by()) is not None:
            self._remove_slab(catalog, slab)
            catalog.index_slot_count = catalog.slot_count

    def _remove_slab(self, catalog: Catalog, slab: Slab) -> None:
        catalog.remove_slab(slab)
        self.directory.remove_slab(slab.fd, slab.next_epoch(self.directory.directory_id))
        self.step("slab removed")


def record_of(entry: Entry) -> Record:
    slab, slot = entry.place
    return Record(entry.chunk, slab.number, slot, entry.sequence, entry.payload_bytes, entry.tick, entry.proven)


def _adopt(catalog: Catalog, records: list[Record]) -> None:
    """Holds what the records say. IndexUnusable before anything is changed."""
    seen: set[tuple[int, int]] = set()
    known = []
    for record in records:
        slab = catalog.slabs.get(record.slab)
        if slab is None:
            continue  # its file was damaged and is gone
        if not 0 <= record.slot < slab.slot_count or slot_bytes_for(record.payload_bytes) != slab.slot_bytes:
            raise IndexUnusable(f"a record of slab {record.slab} names slot {record.slot}, which is not like that")
        if (record.slab, record.slot) in seen:
            raise IndexUnusable(f"slot {record.slot} of slab {record.slab} holds two chunks")
        seen.add((record.slab, record.slot))
        known.append(record)
    for record in known:
        catalog.hold(
            record.chunk,
            Place(catalog.slabs[record.slab], record.slot),
            record.sequence,
            record.payload_bytes,
            proven=record.proven,
            tick=record.tick,
        )
    catalog.put_in_order()


def _unheld(catalog: Catalog) -> Iterator[Place]:
    for slab in list(catalog.slabs.values()):
        for slot in range(slab.slot_count):
            if slot not in slab.held:
                yield Place(slab, slot)


def _header_of(place: Place, block: bytes) -> SlotHeader | None:
    """What the block says, if that can have been written to this place since the slab was made."""
    try:
        header = SlotHeader.decode(block)
    except Damaged:
        return None
    slab, slot = place
    of_place = (header.slab, header.slot, header.slab_epoch, header.slot_bytes)
    return header if of_place == (slab.number, slot, slab.epoch, slab.slot_bytes) else None
