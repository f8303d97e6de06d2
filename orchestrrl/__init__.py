"""The services, clients and commands of OrchestrRL. The packages `planner` and `balancer` contain the decision
algorithms, which have no side effects."""

import os

# Set before numpy is loaded. The matrices are small, so BLAS threads bring no speedup; on busy cores the threads wait
# for each other, and a forecast of 0.02 s takes 10 s.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
