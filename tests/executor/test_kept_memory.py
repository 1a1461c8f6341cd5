"""Memory that a process keeps: what is freed is there for the next allocation."""

import os
import platform
import subprocess
import sys

import pytest

from octojax.api.options import Options
from octojax.executor.kept_memory import keep_memory
from octojax.launch_environment import TUNABLES, with_huge_pages

PROGRAM = """
import ctypes, resource, sys, threading
if sys.argv[1] == "keep":
    from octojax.executor.kept_memory import keep_memory
    assert keep_memory() and keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def use():
    blocks = [libc.malloc(20 * 2**20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 20 * 2**20)
    for block in reversed(blocks):
        libc.free(block)

def faults():
    use(), use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(), use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
"""


def faults(how):
    """Returns the page faults of a main thread, and of another, that use the same memory again."""
    small_pages = {**os.environ, TUNABLES: "glibc.malloc.hugetlb=0"}
    run = [sys.executable, "-c", PROGRAM, how]
    out = subprocess.run(
        run, capture_output=True, text=True, check=True, timeout=120, env=small_pages
    ).stdout
    return [int(line) for line in out.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone can be told")
def test_kept_memory_costs_no_new_pages_in_any_thread():
    pages = 2 * 160 * 2**20 // 4096
    assert min(faults("forget")) > pages / 2
    assert max(faults("keep")) < pages / 50


def test_huge_pages_join_what_the_environment_asks_of_glibc():
    assert with_huge_pages({"A": "b"}) == {"A": "b", TUNABLES: "glibc.malloc.hugetlb=1"}
    tcache = {TUNABLES: "glibc.malloc.tcache_count=0"}
    assert with_huge_pages(tcache)[TUNABLES] == f"{tcache[TUNABLES]}:glibc.malloc.hugetlb=1"
    asked = {TUNABLES: "glibc.malloc.hugetlb=2"}
    assert with_huge_pages(asked) == asked == with_huge_pages(with_huge_pages(asked))


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda *_: ("", ""))
    assert keep_memory.__wrapped__() is False


def test_an_option_that_is_neither_true_nor_false():
    with pytest.raises(TypeError, match=r"keep_memory='no', expected True or False"):
        Options(keep_memory="no")
