"""A disk that stops to answer, for daemons in processes of their own: reads of a file hang while a switch is on.

A library that is loaded before the C library's and has its own `preadv` and `syscall`, by which the daemon's I/O
threads read. A FIFO in place of a slab file would be seen for what it is and removed, and files that are open already
do not turn into one.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

typedef ssize_t (*call_t)(int, const struct iovec*, int, off_t);
typedef long (*syscall_t)(long, ...);

static void wait_until_it_answers(void) {
    const char* hangs = getenv("HANGING_DISK");
    while (hangs != NULL && access(hangs, F_OK) == 0) usleep(5000);
}

static ssize_t when_it_answers(const char* name, int fd, const struct iovec* parts, int count, off_t offset) {
    wait_until_it_answers();
    return ((call_t)dlsym(RTLD_NEXT, name))(fd, parts, count, offset);
}

ssize_t preadv(int fd, const struct iovec* parts, int count, off_t offset) {
    return when_it_answers("preadv", fd, parts, count, offset);
}
ssize_t preadv64(int fd, const struct iovec* parts, int count, off_t offset) {
    return when_it_answers("preadv64", fd, parts, count, offset);
}
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long of[6];
    for (int i = 0; i < 6; ++i) of[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_submit && of[1] > 0 && (*(struct iocb**)of[2])->aio_lio_opcode == IOCB_CMD_PREADV)
        wait_until_it_answers();
    return ((syscall_t)dlsym(RTLD_NEXT, "syscall"))(number, of[0], of[1], of[2], of[3], of[4], of[5]);
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
