"""Memory that a CPU process keeps from one step to the next.

XLA takes a fresh buffer for every result of every program and gives it back soon after. glibc hands
large ones back to the kernel at once, and the next program pays for the same pages again: up to a
third of a step of many small programs. Donation could reuse results alone, and not what XLA takes
within a program; so the allocator is told to keep what it has.
"""

import ctypes
import functools
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_NEVER = 2**31 - 1
_TWO_HEAPS = 2 * 64 * 2**20
"""An arena of a thread gives back the heaps of 64 MiB that it consists of, whatever the threshold
says, unless what they leave is smaller than the padding."""


@functools.cache
def keep_memory() -> bool:
    """Tells glibc to keep what is freed for later allocations; returns whether it will.

    No allocation is mapped by itself, and none is given back, but for those of more than 64 MiB in
    threads other than the main one: no heap of an arena holds them. Their pages cost 512 times
    less where the process was started with huge pages, as `octopipe launch` does. (Threads that
    share one arena would keep these too; a step of many small buffers then takes 1.7 times as
    long, waiting for its lock and looking through its bins.) Holds for the whole process from now
    on, which stays as large as it once was. Does nothing with other C libraries or allocators.
    """
    return _set_options((_TOP_PAD, _TWO_HEAPS), (_TRIM_THRESHOLD, _NEVER), (_MMAP_MAX, 0))


def _set_options(*settings: tuple[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return sum(mallopt(name, value) for name, value in settings) == len(settings)
