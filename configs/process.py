"""Environment variables that have to be set before torch is loaded; importing this module sets them.

Threads that wait for work sleep instead of spinning: alone on the machine this costs nothing that can be measured, and
beside one other busy process spinning makes a step 4 to 6 times slower (2 cores). A value of the user's own stays.
"""

import os

VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def available_cores() -> int:
    """Cores this process may use: what a container or taskset leaves of the machine's."""
    return len(os.sched_getaffinity(0))


for _name, _value in VARIABLES.items():
    os.environ.setdefault(_name, _value)
