"""Starts one training script as N processes of this machine, and ends them all together.

    start         the processes' environment and output
    company       waits for them, tells each how the others ended, ends them
    attendants    the coordinator of `jax.distributed`, and a guard that outlives the launcher
    signals       SIGTERM, SIGHUP and Ctrl-C

The script calls `octopipe.initialize()` before it touches a device. Under a cluster launcher
that `jax.distributed.initialize` knows (Slurm, Open MPI, GKE, ...) the same script runs there
without this package.
"""

from octojax.launch.company import Exit as Exit
from octojax.launch.company import exit_code as exit_code
from octojax.launch.start import launch as launch
