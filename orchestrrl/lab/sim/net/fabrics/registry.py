"""Build simulated fabrics by name."""

import inspect
from collections.abc import Callable, Mapping

from pydantic import ConfigDict, ValidationError, validate_call

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric, refuse
from orchestrrl.lab.sim.net.fabrics.clos import fat_tree, oversubscribed, rail_optimized
from orchestrrl.lab.sim.net.fabrics.mixnet import mixnet
from orchestrrl.lab.sim.net.fabrics.rfabric import rfabric
from orchestrrl.lab.sim.net.fabrics.topoopt import topoopt
from orchestrrl.lab.sim.net.model import Servers
from planner.fabric.generate import ImpossibleSite, ShapeFault

_checked = validate_call(config=ConfigDict(strict=True))
KINDS: Mapping[str, Callable[..., SimulatedFabric]] = {
    function.__name__: _checked(function)
    for function in (fat_tree, oversubscribed, rail_optimized, topoopt, mixnet, rfabric)
}


def build(kind: str, servers: Servers, **options: object) -> SimulatedFabric:
    """Build a fabric by its name. Raises ImpossibleSite (a ValueError) with all faults if the name or an option is
    invalid."""
    if kind not in KINDS:
        refuse(ShapeFault("kind", f"must be one of {', '.join(KINDS)}", kind))
    try:
        return KINDS[kind](servers, **options)
    except ValidationError as error:
        known = ", ".join(options_of(kind))
        faults = []
        for each in error.errors(include_url=False):
            message = each["msg"].removeprefix("Value error, ").removeprefix("Input ")
            if each["type"] == "unexpected_keyword_argument":
                message = f"is not an option of {kind}; its options are {known}"
            faults.append(ShapeFault(str(each["loc"][0]), message, each["input"]))
        raise ImpossibleSite(faults) from None


def options_of(kind: str) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(KINDS[kind]).parameters if name != "servers")
