"""The coordinator of `octopipe launch`, in a process of its own.

python -P coordinator.py ADDRESS NUM_PROCESSES HEARTBEAT_S SHUTDOWN_S PARENT

Left to itself `jax.distributed` runs it inside process 0, and aborts all others if that one is
killed. This file is run by its path: it needs no more of JAX than the library. It ends with
PARENT, the process that started it.
"""

import os
import sys
import time


def main(address: str, num_processes: str, heartbeat_s: str, shutdown_s: str, parent: str) -> None:
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # no public name

    service = _jax.get_distributed_runtime_service(
        address,
        int(num_processes),
        heartbeat_timeout=int(heartbeat_s),
        shutdown_timeout=int(shutdown_s),
    )
    while os.getppid() == int(parent):
        time.sleep(0.2)
    service.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
