"""Names of the environment variables by which a launched process finds its peers."""

COORDINATOR = "OCTOPIPE_COORDINATOR"
NUM_PROCESSES = "OCTOPIPE_NUM_PROCESSES"
PROCESS_ID = "OCTOPIPE_PROCESS_ID"
TIMEOUT = "OCTOPIPE_TIMEOUT_S"
COORDINATED = "OCTOPIPE_COORDINATED"
"""Set where the launcher runs the coordinator, so that process 0 does not."""


def heartbeat_s(timeout_s: float) -> int:
    """How long JAX waits for a silent process: our own errors say more, and come first."""
    return 2 * max(1, round(timeout_s)) + 10
