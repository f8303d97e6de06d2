"""OrchestrRL: the parts that touch the world. Decisions live in `planner` and `balancer`."""

import os

# Before anything loads numpy. Our matrices are small: BLAS threads win nothing on them, and where other processes keep
# the cores busy they wait for each other, so that a forecast of 0.02 s takes 10 s.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
