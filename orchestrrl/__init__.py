"""OrchestrRL: services, clients and commands. The pure decisions are in `planner` and `balancer`."""

import os

# Set before numpy is loaded. The matrices are small, so BLAS threads bring no speedup; on busy cores the threads wait
# for each other, and a forecast of 0.02 s takes 10 s.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
