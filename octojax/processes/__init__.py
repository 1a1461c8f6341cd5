"""Several processes of one program: how they find each other, agree, and never wait for ever.

    initialize()                before the first use of a device, in every process
    with call("step 3"): ...    one of the calls that all make alike, in the same order
    agree({...})                compares what every process is about to run
    fail_fast()                 after an error: end this process though peers may hang

`jax.distributed` does the rest: it gives every process the devices of all.

    join        peers find each other                 meet     they compare texts
    places      where each is, as plain data          board    each posts it, a thread reads it
    digest      short sums of arrays to compare       leave    how a process ends
"""

from octojax.processes.board import busy as busy
from octojax.processes.board import call as call
from octojax.processes.board import out_of_step as out_of_step
from octojax.processes.board import place as place
from octojax.processes.board import wait as wait
from octojax.processes.join import initialize as initialize
from octojax.processes.leave import fail_fast as fail_fast
from octojax.processes.meet import agree as agree
from octojax.processes.meet import barrier as barrier
from octojax.processes.meet import clock_offset_s as clock_offset_s
from octojax.processes.meet import everyone as everyone
from octojax.processes.settings import several as several
from octojax.processes.settings import step_timeout_s as step_timeout_s
from octojax.processes.settings import timeout_s as timeout_s
