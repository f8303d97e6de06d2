"""OrchestrRL: the parts that touch the world. Decisions live in `planner` and `balancer`."""

__version__ = "0.1.0"
