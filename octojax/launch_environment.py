"""Names of the environment variables by which a launched process finds its peers."""

COORDINATOR = "OCTOPIPE_COORDINATOR"
NUM_PROCESSES = "OCTOPIPE_NUM_PROCESSES"
PROCESS_ID = "OCTOPIPE_PROCESS_ID"
TIMEOUT = "OCTOPIPE_TIMEOUT_S"
