"""How likely a chunk is to be used again, learned from every chunk offered, the refused ones included.

One owner, no lock, no clock; dies with its process and starts again from the priors. Keys are remembered in two
generations: a full young one becomes the old one, and what was still in that is forgotten. So it is bounded, and a
chain costs a few passes over its keys without any bookkeeping of order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.costmodel import REUSE_PRIORS, reuse_probability

KEYS_MAX = 65_536  # of both generations together
TRIALS_MAX = 20_000  # a class that has seen as many forgets half of them
_CLASSES = len(REUSE_PRIORS)


class Reuse:
    """Uses of keys, and from them the reuse probability of keys used once, twice, and more often.

    A trial is a use of a key, whether or not it comes back: one that has not yet come back counts as one that did not,
    so that prompts which never repeat are recognised within a hundred chunks.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        assert keys_max >= 2, f"room for {keys_max} keys"
        self._generation_keys_max = keys_max // 2
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._hits = [0.0] * _CLASSES
        self._trials = [0.0] * _CLASSES

    def use(self, chain: Sequence[bytes]) -> NDArray[np.intp]:
        """Count one use of each key, once for each request. Returns how often each was used, this use included."""
        young, old = self._young.get, self._old.get
        seen = np.array([young(key) or old(key, 0) for key in chain], np.intp)
        uses = seen + 1
        hits = np.bincount(_class_of(seen) + 1, minlength=_CLASSES + 1)[1:].tolist()
        trials = np.bincount(_class_of(uses), minlength=_CLASSES).tolist()
        for index in range(_CLASSES):
            self._hits[index] += hits[index]
            self._trials[index] += trials[index]
            if self._trials[index] >= TRIALS_MAX:
                self._hits[index] /= 2
                self._trials[index] /= 2
        # One long chain never makes more of a generation than its bound.
        for start in range(0, len(chain), self._generation_keys_max):
            end = start + self._generation_keys_max
            if len(self._young) + len(chain[start:end]) > self._generation_keys_max:
                self._old, self._young = self._young, {}
            self._young.update(zip(chain[start:end], uses[start:end].tolist(), strict=True))
        return uses

    def probabilities(self, uses: NDArray[np.intp]) -> NDArray[np.float64]:
        """For each count of uses: the probability of one more."""
        by_class = list(map(reuse_probability, self._hits, self._trials, REUSE_PRIORS))
        return np.take(np.array([by_class[0], *by_class], np.float64), uses, mode="clip")

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


def _class_of(uses: NDArray[np.intp]) -> NDArray[np.intp]:
    """0, 1, 2 for one, two and more uses; -1 for none."""
    return np.minimum(uses, _CLASSES) - 1
