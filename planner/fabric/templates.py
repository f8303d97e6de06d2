"""The topology of each stage: the PoDs it may change, the pairs that may have circuits, and the use of spare ports. The
topologies follow section 5.2 of the OrchestrRL paper. This module has no side effects.

| stage | touches | core | spare ports |
|---|---|---|---|
| Train: high bisection in a PoD, a mesh between PoDs | train PoDs | train to train | spread over all pairs of ToRs |
| Gen: each PoD separate | gen PoDs | none | spread over all pairs of ToRs |
| weight sync: a tree across the core to seeds, then within PoDs | all PoDs | train to gen | existing circuits stay |

The reserved slice of the core, which carries responses, is part of every stage's plan and is identical in all plans.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.fabric.intent import Stage
from planner.fabric.model import Pair, pair_of
from planner.fabric.topology import Pod, PodRole


@dataclass(frozen=True, slots=True)
class StageTemplate:
    """The topology and allocation rules of one stage."""

    touched: frozenset[PodRole]
    core_roles: frozenset[tuple[PodRole, PodRole]]  # that the core may connect, in either order
    # True: spare ports are spread over all pairs of ToRs, as bisection for unannounced traffic. False: existing
    # circuits on these ports stay.
    spreads_spare: bool

    def core_pairs(self, pods: Iterable[Pod]) -> frozenset[Pair]:
        """Return the pairs of `pods` between which the core may have circuits."""
        known = sorted(pods, key=lambda pod: pod.id)
        return frozenset(
            pair_of(one.id, other.id)
            for number, one in enumerate(known)
            for other in known[number + 1 :]
            if (one.role, other.role) in self.core_roles or (other.role, one.role) in self.core_roles
        )


TEMPLATES: Mapping[Stage, StageTemplate] = {
    Stage.TRAIN: StageTemplate(frozenset({PodRole.TRAIN}), frozenset({(PodRole.TRAIN, PodRole.TRAIN)}), True),
    Stage.GEN: StageTemplate(frozenset({PodRole.GEN}), frozenset(), True),
    Stage.WEIGHT_SYNC: StageTemplate(frozenset(PodRole), frozenset({(PodRole.TRAIN, PodRole.GEN)}), False),
}
