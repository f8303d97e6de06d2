"""For all tests: hypothesis without wall-clock deadlines, and with the same examples in every run of CI."""

import os

from hypothesis import settings

# As in `orchestrrl` itself, also for tests that load numpy without it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shared machine may stall in any example; pytest's own time-out catches what hangs.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
