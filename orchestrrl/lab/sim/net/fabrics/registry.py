"""Fabrics by name."""

import inspect
from collections.abc import Callable, Mapping

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric, refuse
from orchestrrl.lab.sim.net.fabrics.clos import fat_tree, oversubscribed, rail_optimized
from orchestrrl.lab.sim.net.fabrics.mixnet import mixnet
from orchestrrl.lab.sim.net.fabrics.rfabric import rfabric
from orchestrrl.lab.sim.net.fabrics.topoopt import topoopt
from orchestrrl.lab.sim.net.model import Servers
from planner.fabric.shape import ShapeFault

KINDS: Mapping[str, Callable[..., SimulatedFabric]] = {
    "fat_tree": fat_tree,
    "oversubscribed": oversubscribed,
    "rail_optimized": rail_optimized,
    "topoopt": topoopt,
    "mixnet": mixnet,
    "rfabric": rfabric,
}


def build(kind: str, servers: Servers, **options: object) -> SimulatedFabric:
    """Raises Impossible (a ValueError) with all that is wrong with the options."""
    if kind not in KINDS:
        refuse(ShapeFault("kind", f"must be one of {', '.join(KINDS)}", kind))
    known = options_of(kind)
    refuse(
        *(
            ShapeFault(name, f"is no option of {kind}, which has {', '.join(known)}", options[name])
            for name in sorted(options)
            if name not in known
        )
    )
    return KINDS[kind](servers, **options)


def options_of(kind: str) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(KINDS[kind]).parameters if name != "servers")
