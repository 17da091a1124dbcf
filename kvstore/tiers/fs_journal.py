"""The event loop's side of the index: what has changed since the last commit, and who waits for the next one.

The loop calls everything here but what is marked as the worker's; the Index itself is the worker's alone. Never two
commits at a time: what changes while one runs goes with the next. An eviction or removal waits for its commit
(`after_commit`), which is then started at once; stores and touches are committed a little later, many together.

An index that cannot be written is dropped, for none is better than one that lies, and written anew from the catalog, a
slice at a time between two turns of the loop. So is one that recovery could not go on with. It counts as complete only
when the last slice is in: a kill before that costs the next start a look at every header.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial

from kvstore.tiers.base import ChunkId
from kvstore.tiers.fs_catalog import Catalog, Entry
from kvstore.tiers.fs_directory import FsDirectory, Step
from kvstore.tiers.fs_index import Index, IndexUnusable, Meta, Record
from kvstore.tiers.fs_recovery import Recovered, record_of
from kvstore.tiers.fs_worker import Failure, Worker

log = logging.getLogger(__name__)

RETRY_S = 1.0  # after an index could not be written
TOUCHED_PER_COMMIT_MAX = 1_000
REFILL_PER_SLICE = 500  # slots whose chunks are handed to a new index between two turns of the loop


def _ignore(_: object) -> None:
    pass


class Journal:
    def __init__(
        self, recovered: Recovered, directory: FsDirectory, worker: Worker, commit_interval_s: float, step: Step
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._catalog: Catalog = recovered.catalog
        self._directory = directory
        self._worker = worker
        self._commit_interval_s = commit_interval_s
        self._step = step
        self._opening = recovered.opening
        self._index = recovered.index  # the worker's
        self._sequence = recovered.sequence
        # False from the loss of an index until a new one has everything.
        self._complete = recovered.index is not None and recovered.index.complete
        self._failures = 0  # of an index
        self._retry_at_s = math.inf  # when to make a new one; inf: there is one, or it is being made
        self._changes: dict[ChunkId, Record | None] = {}
        self._touched: set[Entry] = set()
        self._stored = 0  # of the changes
        self._stored_committing = 0
        self._committing = False
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: list[Callable[[], None]] = []
        if recovered.index is None:
            self._retry_at_s = 0.0
        elif not self._complete:
            self._refill(self._failures, self._catalog.walk(REFILL_PER_SLICE))

    @property
    def sequence(self) -> int:
        """The last one that was given out."""
        return self._sequence

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # Changes

    def put(self, entry: Entry) -> None:
        self._changes[entry.chunk] = record_of(entry)
        self._stored += 1
        self._soon()

    def forget(self, entry: Entry) -> None:
        """Call `after_commit` once the last one of a batch is forgotten."""
        self._touched.discard(entry)
        self._changes[entry.chunk] = None

    def touch(self, entry: Entry) -> None:
        """Written when there is time: nothing but the order of evictions after a restart depends on it."""
        self._touched.add(entry)

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Calls it when every change until now is committed, or the index is given up. In order of the calls."""
        self._callbacks.append(callback)
        self._commit()

    @property
    def unindexed(self) -> int:
        """How many chunks the next start would not know of after a kill; rather too many than too few."""
        return self._stored + self._stored_committing if self._complete else len(self._catalog.entries)

    @property
    def is_quiet(self) -> bool:
        return not self._callbacks and not self._committing

    # Commits

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._commit_interval_s, self._commit)

    def _commit(self) -> None:
        self._stop_timer()
        if self._committing:
            return  # the next one follows at once
        self._committing = True
        changes = self._take_changes()
        callbacks, self._callbacks = self._callbacks, []
        self._stored_committing, self._stored = self._stored, 0
        self._worker.run(
            partial(self._commit_in_worker, changes, self._sequence, complete=self._complete),
            partial(self._committed, callbacks),
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_changes(self) -> dict[ChunkId, Record | None]:
        for _ in range(min(len(self._touched), TOUCHED_PER_COMMIT_MAX)):
            entry = self._touched.pop()
            if not entry.forgotten:
                self._changes[entry.chunk] = record_of(entry)
        changes, self._changes = self._changes, {}
        return changes

    def _commit_in_worker(self, changes: dict[ChunkId, Record | None], sequence: int, *, complete: bool) -> None:
        self._step("committing")
        if self._index is not None:
            self._index.commit(changes, sequence, complete=complete)
        self._step("committed")

    def _committed(self, callbacks: list[Callable[[], None]], result: Failure | None) -> None:
        self._stored_committing = 0
        if result is not None:
            # What waited goes on only when the file is gone: until then it says that slots hold what they may lose now.
            self.failed(result, partial(self._go_on, callbacks))
        else:
            self._go_on(callbacks)

    def _go_on(self, callbacks: list[Callable[[], None]], _: object = None) -> None:
        self._committing = False
        for callback in callbacks:
            callback()
        if self._callbacks:
            self._commit()
        elif self._changes:
            self._soon()

    # The worker's

    def grow_in_worker(self, slot_count: int) -> None:
        """Before a slab is made: room in the index for its slots. OSError, IndexUnusable."""
        if self._index is not None:
            self._index.grow(self._catalog.index_bytes_for(slot_count))

    def prepare_stop(self) -> Callable[[], bool]:
        """What the worker does last: commits, and syncs the file. False when the file is not to be trusted."""
        self._stop_timer()
        changes, sequence, complete = self._take_changes(), self._sequence, self._complete

        def stop() -> bool:
            if self._index is None:
                return False
            try:
                self._index.commit(changes, sequence, complete=complete)
                self._index.close()
            except IndexUnusable as error:
                log.warning("%s: the index cannot be written: %s", self._directory.path, error)
                return False
            finally:
                self._index.abandon()
            return complete

        return stop

    # A new index

    def failed(self, error: Failure, then: Callable[[object], None] = _ignore) -> None:
        """`then`: when the file is gone, or cannot be removed."""
        if self._complete:
            log.error("%s: the index cannot be written: %s; making a new one", self._directory.path, error)
        self._complete = False
        self._failures += 1
        self._retry_at_s = self._loop.time() + RETRY_S

        def drop() -> None:
            index, self._index = self._index, None
            if index is not None:
                index.abandon()
            self._directory.remove_index()

        self._worker.run(drop, then)

    def file_is_gone(self) -> None:
        """Somebody removed the file's name: what is written to it now would not be found again."""
        if self._complete:
            self.failed(IndexUnusable("its file was removed"))

    def tick(self) -> None:
        """Now and then."""
        if self._loop.time() >= self._retry_at_s:
            self._retry_at_s = math.inf
            self._worker.run(self._make_in_worker_job(), partial(self._made, self._failures))
        if self._touched:
            self._soon()

    def _make_in_worker_job(self) -> Callable[[], None]:
        nbytes = self._catalog.index_bytes_for(self._catalog.index_slots_with(0))
        meta = Meta(False, self._sequence, 0, 0, self._opening.opening, self._directory.directory_id)

        def make() -> None:
            self._directory.remove_index()
            self._index = Index(self._directory.index_path, nbytes, meta)

        return make

    def _made(self, failures: int, result: Failure | None) -> None:
        if result is not None:
            self.failed(result)
        else:
            self._refill(failures, self._catalog.walk(REFILL_PER_SLICE))

    def _refill(self, failures: int, slices: Iterator[list[Entry]]) -> None:
        """What changes meanwhile goes to the new index as well. `failures`: those there had been when it was made."""
        if self._failures != failures:
            return  # it has failed again, and another one is or will be made
        entries = next(slices, None)
        if entries is None:
            self._complete = True
            log.info("%s: the new index is complete", self._directory.path)
            self._soon()
            return
        for entry in entries:
            self._changes.setdefault(entry.chunk, record_of(entry))
        self.after_commit(partial(self._refill, failures, slices))
