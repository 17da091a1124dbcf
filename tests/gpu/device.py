"""A device for tests that run on both: the fake one, so that the tests themselves are known to work, and a real one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from connector.config import CopyBackend
from connector.cuda import open_copier
from kvstore._native import CUDA_KERNELS, DeviceCopier
from tests.unit.fake_cuda import FakeDevice

LATER_CYCLES = 1 << 30  # of the GPU's clock: about half a second, and the copies beside it take milliseconds


class Fake:
    def __init__(self) -> None:
        self._device = FakeDevice()

    def open(self, backend: CopyBackend) -> DeviceCopier:
        return open_copier(0, backend, library=self._device.library, kernels=b"any", pin_piece_bytes=1 << 20)

    def zeros(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._device.add_memory(memory.numpy())
        return memory

    @staticmethod
    def stream() -> int:
        return 0

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._device.running():
            yield

    @contextmanager
    def computing_on(self) -> Iterator[Callable[[], bool]]:
        """Meanwhile the stream computes, once it has done all before; says whether that is over."""
        something, before, later = np.ones(1, np.uint8), np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        self._device.compute_read(something, before)
        while not before.any():
            time.sleep(0.001)
        self._device.gate(is_open=False)
        self._device.compute_read(something, later)
        try:
            yield lambda: bool(later.any())
        finally:
            self._device.gate(is_open=True)


class Gpu:
    def open(self, backend: CopyBackend) -> DeviceCopier:
        return open_copier(torch.cuda.current_device(), backend)

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    @staticmethod
    def stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    @contextmanager
    def working(self) -> Iterator[None]:
        yield

    @contextmanager
    def computing_on(self) -> Iterator[Callable[[], bool]]:
        over = torch.cuda.Event()
        torch.cuda._sleep(LATER_CYCLES)
        over.record()
        try:
            yield over.query
        finally:
            over.synchronize()


def no_gpu() -> str:
    """Why there is no device for these tests; empty: there is."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    if not CUDA_KERNELS:
        return "this build has no copy kernel: install nvcc of CUDA 12.9 or newer and build again"
    return ""
