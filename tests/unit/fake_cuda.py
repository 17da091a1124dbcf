"""The fake device of `native/tests/fake_cuda.cpp`, built on first use, for tests that choose when its work is done."""

import atexit
import ctypes
import enum
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700


class Fault(enum.IntFlag):
    """What a copier that forgets a rule would do."""

    LOADS_DO_NOT_WAIT = 1
    STORES_DO_NOT_WAIT = 2
    ENDED_AT_ONCE = 4
    STORES_READ_ANY_TIME = 8


@functools.cache
def library() -> str:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-fake-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = folder / "libfake_cuda.so"
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared",
         "-pthread", f"-I{ROOT / 'native'}", str(ROOT / "native/tests/fake_cuda.cpp"), "-o", str(built)],
        check=True,
    )  # fmt: skip
    return str(built)


@functools.cache
def _loaded() -> ctypes.CDLL:
    lib = ctypes.CDLL(library())
    address, count, text = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p
    for name, arguments, result in [
        ("fake_reset", (count, ctypes.c_int), None),
        ("fake_add_device_memory", (address, count), None),
        ("fake_map_device_memory", (address, ctypes.c_int), None),
        ("fake_faults", (ctypes.c_uint,), None),
        ("fake_fail", (text, count, ctypes.c_int), None),
        ("fake_lose", (), None),
        ("fake_step", (count,), count),
        ("fake_gate", (ctypes.c_int,), None),
        ("fake_compute_write", (address, ctypes.c_void_p, count), None),
        ("fake_compute_read", (address, ctypes.c_void_p, count), None),
        ("fake_capture", (ctypes.c_int,), ctypes.c_int),
        ("fake_calls", (text,), count),
        ("fake_alive", (text,), ctypes.c_int64),
        ("fake_run", (ctypes.c_int,), None),
        ("fake_copy_tiles", (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32), ctypes.c_int),
    ]:
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result
    return lib


class FakeDevice:
    """The process's one fake device, from now on a new one. Its work is done in an order that `seed` decides."""

    def __init__(self, seed: int = 0, *, version: int = 13000) -> None:
        self.library = library()
        self._lib = _loaded()
        self._lib.fake_reset(seed, version)
        self._kept: list[np.ndarray] = []

    def add_memory(self, array: np.ndarray) -> np.ndarray:
        """From now on the array lies in device memory."""
        self._kept.append(array)
        self._lib.fake_add_device_memory(array.ctypes.data, array.nbytes)
        return array

    def unmap(self, array: np.ndarray) -> None:
        """Its memory is taken away; whoever touches it now loses the device."""
        self._lib.fake_map_device_memory(array.ctypes.data, 0)

    def map_again(self, array: np.ndarray) -> None:
        """With other bytes in it."""
        self._lib.fake_map_device_memory(array.ctypes.data, 1)

    def plant(self, faults: Fault) -> None:
        self._lib.fake_faults(int(faults))

    def fail(self, function: str, *, after: int = 0, result: int = OUT_OF_MEMORY) -> None:
        """One call of this function of the driver fails, after so many that do not."""
        self._lib.fake_fail(function.encode(), after, result)

    def lose(self) -> None:
        """Every call fails from now on."""
        self._lib.fake_lose()

    def step(self, count: int = 1 << 40) -> int:
        """Do at most so many pieces of work; how many there were."""
        return self._lib.fake_step(count)

    def gate(self, *, is_open: bool) -> None:
        """Whether what computes on stream 0 goes on."""
        self._lib.fake_gate(int(is_open))

    def compute_write(self, target: np.ndarray, values: np.ndarray) -> None:
        """Stream 0 will write these bytes there."""
        assert target.nbytes == values.nbytes, f"{values.nbytes} bytes for {target.nbytes}"
        values = np.ascontiguousarray(values)
        self._lib.fake_compute_write(target.ctypes.data, values.ctypes.data, values.nbytes)

    def compute_read(self, source: np.ndarray, into: np.ndarray) -> None:
        """Stream 0 will read these bytes from there, into host memory."""
        assert source.nbytes == into.nbytes
        self._kept += [source, into]
        self._lib.fake_compute_read(source.ctypes.data, into.ctypes.data, into.nbytes)

    def capture(self, *, is_on: bool) -> bool:
        """Somebody captures a CUDA graph, or ends it; False when a call has broken it."""
        return bool(self._lib.fake_capture(int(is_on)))

    def calls(self, function: str) -> int:
        return self._lib.fake_calls(function.encode())

    def alive(self) -> dict[str, int]:
        """What nobody has given back to the driver."""
        kinds = ("registered", "events", "contexts", "modules", "streams")
        return {kind: alive for kind in kinds if (alive := self._lib.fake_alive(kind.encode()))}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meanwhile a thread does the work."""
        self._lib.fake_run(1)
        try:
            yield
        finally:
            self._lib.fake_run(0)


def copy_tiles(tiles: np.ndarray, warps: int) -> bool:
    """The copy kernel's arithmetic on plain memory. `tiles`: rows of source, destination, bytes (uint64). False: a word
    was not aligned or lay outside its tile."""
    assert tiles.dtype == np.uint64
    assert tiles.flags.c_contiguous
    return _loaded().fake_copy_tiles(tiles.ctypes.data, len(tiles), warps) == 0
