"""The guard of `octopipe launch`: ends the launched processes if the launcher is gone.

python -I guard.py < PIPE

The launcher writes `+PID` for each process group it has started and `-PID` once one has ended. The
pipe closes with the launcher, however it ends: SIGKILL too. What is left then is killed.
Only the standard library is used, so that it is there before the first process is.
"""

import contextlib
import os
import signal
import sys


def main(stream) -> None:
    groups: set[int] = set()
    for line in stream:
        change, group = line[0], int(line[1:])
        groups.add(group) if change == "+" else groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it ends with its pipe, and not before
    main(sys.stdin)
