"""Memory at which every first access waits until it is let go: a stand-in for a disk that does not answer.

A read that should fill it, or a write that should take from it, hangs inside its system call as it would on a dead NFS
server. Made with userfaultfd, which needs CAP_SYS_PTRACE.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct

import pytest

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_API = 0xC018AA3F
_REGISTER = 0xC020AA00
_MODE_MISSING = 1
_KEPT: list[mmap.mmap] = []  # never unmapped: whoever hung may touch the memory when it is let go


class HangingMemory:
    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.syscall(_SYSCALL.get(platform.machine(), -1), os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        fcntl.ioctl(self._fd, _API, bytearray(struct.pack("<QQQ", 0xAA, 0, 0)))
        fcntl.ioctl(self._fd, _REGISTER, bytearray(struct.pack("<QQQQ", self.address, nbytes, _MODE_MISSING, 0)))

        _KEPT.append(self._map)

    def __enter__(self) -> "HangingMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def wait_until_hung(self, timeout_s: float) -> None:
        """Until somebody's access hangs."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"nobody touched the memory within {timeout_s} s"

    def let_go(self) -> None:
        """Every access that hangs goes on, as if the memory had never been special."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
