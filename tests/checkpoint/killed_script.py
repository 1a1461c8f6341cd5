"""Saves a checkpoint, then is killed at several moments of overwriting it; for `test_folder`.

Each save runs in a process of its own, forked before anything has started a thread.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint  # noqa: F401  (once, and not in each process)

from octojax.checkpoint import folder, index, store


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full((64, 64), step, np.float32), "b": np.arange(8) + step}


def end(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_while_orbax_writes(path: Path) -> None:
    def look() -> None:
        while not list(path.glob("*.orbax-checkpoint-tmp*/*")):
            time.sleep(1e-4)
        end()

    threading.Thread(target=look, daemon=True).start()


def when_written(path: Path) -> None:
    folder.sync = end  # type: ignore[assignment]


def before_the_index(path: Path) -> None:
    index.os.replace = end  # type: ignore[assignment]


def after_the_index(path: Path) -> None:
    index.sync_folder = end  # type: ignore[assignment]


MOMENTS: dict[str, Callable[[Path], None]] = {
    "writing": end_while_orbax_writes,
    "written": when_written,
    "index": before_the_index,
    "replaced": after_the_index,
}


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(root: Path) -> None:
    assert forked(lambda: store.save(root / "good", tree(1), step=1)) == 0
    for name, arm in MOMENTS.items():
        path = root / name
        first = root / "first" / name
        shutil.copytree(root / "good", path)

        def killed(path: Path = path, arm: Callable[[Path], None] = arm) -> None:
            arm(path)
            store.save(path, tree(2), step=2, overwrite=True)

        def killed_at_first(path: Path = first, arm: Callable[[Path], None] = arm) -> None:
            arm(path)
            store.save(path, tree(2), step=2)

        assert forked(killed) == signal.SIGKILL
        assert forked(killed_at_first) == signal.SIGKILL


if __name__ == "__main__":
    main(Path(sys.argv[1]))
