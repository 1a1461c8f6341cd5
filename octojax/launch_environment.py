"""Names of the environment variables by which a launched process finds its peers."""

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


def heartbeat_s(timeout_s: float) -> int:
    """How long JAX waits for a silent process: our own errors say more, and come first."""
    return 2 * max(1, round(timeout_s)) + 10
