"""A collective as the network sees it: flows that begin together, and how often a message waits for the one before.

A collective of several rounds whose flows are the same in each (a ring) is one transfer of all rounds' bytes, and pays
the latency of a message once per round.
"""

from dataclasses import dataclass

from orchestrrl.sim.net.model import Flows


@dataclass(frozen=True, slots=True)
class Transfer:
    flows: Flows
    rounds: int = 1  # messages that wait for each other
    label: str = ""
