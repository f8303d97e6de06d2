"""A collective as the network sees it: flows that begin together, and how often a message waits for the one before.

A collective of several rounds whose flows are the same in each (a ring) is one transfer of all rounds' bytes, and pays
the latency of a message once per round.
"""

from dataclasses import dataclass

from orchestrrl.lab.sim.net.model import GpuFlows


@dataclass(frozen=True, slots=True)
class MessageTransfer:
    """`rounds` are messages between servers that wait for each other. What does not depend on the network is in
    `overhead_s`: launching, and steps inside a server."""

    flows: GpuFlows
    rounds: int = 1
    label: str = ""
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 0 or not self.overhead_s >= 0:
            raise ValueError(f"rounds and overhead_s must be >= 0, got {self.rounds} and {self.overhead_s}")
