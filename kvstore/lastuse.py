"""When each namespace was last used by a session, so that what nobody uses any more can be found.

Concurrency: the event loop's thread. Times are the host's wall clock, in seconds, because they outlive the daemon where
there is a filesystem tier: `save` is told of a namespace whose time has changed. A namespace of which nothing is known
counts from the start of the daemon on. Coarse: in seconds, or in minutes after a kill.
"""

from collections.abc import Callable, Iterable, Mapping

KEPT_MAX = 65_536  # namespaces, those used last: an engine that resets its cache moves to a new one each time


class LastUses:
    def __init__(self, clock_s: Callable[[], float], save: Callable[[bytes], None] = lambda _: None) -> None:
        self._clock_s = clock_s
        self._save = save
        self._started_s = clock_s()
        self._used_s: dict[bytes, float] = {}

    def used(self, namespaces: Iterable[bytes]) -> None:
        """By a session, just now."""
        now_s = self._clock_s()
        for namespace in namespaces:
            self._used_s.pop(namespace, None)
            self._used_s[namespace] = now_s  # the last one now
            self._save(namespace)
        while len(self._used_s) > KEPT_MAX:
            del self._used_s[next(iter(self._used_s))]

    def load(self, used_s: Mapping[bytes, float]) -> None:
        """Of earlier runs."""
        for namespace, when_s in used_s.items():
            self._used_s.setdefault(namespace, when_s)

    def unused_s(self, namespace: bytes) -> float:
        return max(0.0, self._clock_s() - self._used_s.get(namespace, self._started_s))

    def forget(self, namespace: bytes) -> None:
        self._used_s.pop(namespace, None)
