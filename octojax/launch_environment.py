"""Environment variables of a launched process: how it finds its peers, and keeps its memory."""

from collections.abc import Mapping

COORDINATOR = "OCTOPIPE_COORDINATOR"
NUM_PROCESSES = "OCTOPIPE_NUM_PROCESSES"
PROCESS_ID = "OCTOPIPE_PROCESS_ID"
TIMEOUT = "OCTOPIPE_TIMEOUT_S"
HEARTBEAT = "OCTOPIPE_HEARTBEAT_S"
"""Set where the launcher runs the coordinator, so that process 0 does not: the seconds after which
it gives up a silent process. All must know the same."""
FOLDER = "OCTOPIPE_FOLDER"
"""Where launcher and processes leave notes: the file `joined.3` says that process 3 has called
`initialize`, the text of `ended.3` how it has ended."""


TUNABLES = "GLIBC_TUNABLES"
"""Colon-separated options of glibc, read when a process starts (2.35 or newer; older ones and other
C libraries pass over it)."""
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which malloc asks the kernel for transparent huge pages.

    Memory that is touched for the first time costs a page fault for 2 MiB instead of one for each
    4 KiB. An environment that says itself what malloc does about huge pages comes back as it is.
    """
    tunables = environment.get(TUNABLES, "")
    if _HUGE_PAGES in tunables:
        return dict(environment)
    options = [*filter(None, [tunables]), f"{_HUGE_PAGES}=1"]
    return {**environment, TUNABLES: ":".join(options)}


def heartbeat_s(timeout_s: float) -> int:
    """How long JAX waits for a silent process: our own errors say more, and come first."""
    return 2 * max(1, round(timeout_s)) + 10
