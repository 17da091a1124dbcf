"""When a failing disk is left alone and when it is tried again. Pure; time is an argument."""

from dataclasses import dataclass

RETRY_S_MIN = 1.0
RETRY_S_MAX = 16.0


@dataclass(slots=True)
class Health:
    """Of one direction, reads or writes. After `failures_max` failures in a row it is sick: one trial is let through at
    a time, at growing intervals, until one succeeds."""

    failures_max: int
    reason: str | None = None  # why it is sick; None: it is not
    _failures: int = 0
    _retry_s: float = RETRY_S_MIN
    _next_trial_s: float = 0.0

    def may_try(self, now_s: float) -> bool:
        if self.reason is None:
            return True
        if now_s < self._next_trial_s:
            return False
        self._next_trial_s = now_s + self._retry_s
        return True

    def failed(self, now_s: float, reason: str, *, at_once: bool = False) -> None:
        """`at_once`: sick without further failures."""
        self._failures += 1
        if self.reason is None:
            if self._failures < self.failures_max and not at_once:
                return
            self._retry_s = RETRY_S_MIN
        else:
            self._retry_s = min(RETRY_S_MAX, 2 * self._retry_s)
        self.reason = reason
        self._next_trial_s = now_s + self._retry_s

    def succeeded(self) -> None:
        self._failures = 0
        self.reason = None
