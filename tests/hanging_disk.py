"""A disk that stops to answer, for daemons in processes of their own: reads of a file hang while a switch is on.

A library that is loaded before the C library's and has its own `preadv`, which is what the daemon's I/O threads call. A
FIFO in place of a slab file would be seen for what it is and removed, and files that are open already do not turn into
one.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

typedef ssize_t (*call_t)(int, const struct iovec*, int, off_t);

static ssize_t when_it_answers(const char* name, int fd, const struct iovec* parts, int count, off_t offset) {
    const char* hangs = getenv("HANGING_DISK");
    while (hangs != NULL && access(hangs, F_OK) == 0) usleep(5000);
    return ((call_t)dlsym(RTLD_NEXT, name))(fd, parts, count, offset);
}

ssize_t preadv(int fd, const struct iovec* parts, int count, off_t offset) {
    return when_it_answers("preadv", fd, parts, count, offset);
}
ssize_t preadv64(int fd, const struct iovec* parts, int count, off_t offset) {
    return when_it_answers("preadv64", fd, parts, count, offset);
}
"""


class HangingDisk:
    """`environment`: of the daemon. While the switch is a file, its reads hang."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        assert compiler is not None, "no C compiler, which the package itself is built with"
        source, library = folder / "hang.c", folder / "hang.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self._switch = folder / "the-disk-hangs"
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "HANGING_DISK": str(self._switch)}

    def hang(self) -> None:
        self._switch.touch()

    def answer(self) -> None:
        self._switch.unlink()
