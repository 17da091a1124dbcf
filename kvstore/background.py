"""Work that a process does beside everything else, on a thread of its own, until it is done or no longer wanted."""

import atexit
import threading
from collections.abc import Callable


class BackgroundThread:
    """Runs `work`, which returns soon after the event it is given is set, and catches what it may raise.

    A process that ends without `close` ends the thread at its exit: one that came back from native code after that
    would be torn out of it, which C++ answers with abort.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._closing = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._closing,), name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def wait(self, timeout_s: float) -> bool:
        """Whether the work is done by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing.set()
        self._thread.join()
