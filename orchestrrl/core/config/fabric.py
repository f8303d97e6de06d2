"""`fabric` of the daemon's configuration: the site, when circuits are changed, and the routers of its ToRs."""

from typing import Annotated, Any

from pydantic import Field

from orchestrrl.core.documents import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class PacketSideSettings(Section):
    """A ToR's interface to the electrical network that is always there, and its own address on it."""

    interface: Name
    address: Name


class RouterSettings(Section):
    """One ToR as packets see it; `options` are its driver's."""

    tor: Name
    driver: Name
    options: dict[str, Any] = Field(default_factory=dict)
    address: Name  # its own, answered on every interface
    prefixes: tuple[Name, ...] = Field(default=(), strict=False)  # of the hosts behind it
    interfaces: tuple[Name, ...] = Field(strict=False)  # of its fibres, in the order of the site's file
    packet_side: PacketSideSettings | None = None


class ReroutingSettings(Section):
    """How routers are changed."""

    link_up_s: NonNegativeFloat = 2.0  # how long light is waited for, once switches are done
    neighbour_s: NonNegativeFloat = 1.0  # and then for the ToR at the far end to answer
    settle_s: NonNegativeFloat = 0.002  # for packets that are under way on a circuit whose routes have gone
    poll_s: PositiveFloat = 5.0  # between two looks for links that went dark, and routers that failed
    # As how many circuits in a row the packet side counts; null: packets take it only where no circuits lead.
    packet_hops: PositiveInt | None = None


Share = Annotated[float, Field(strict=False, ge=0, le=1)]


class FabricSettings(Section):
    """When circuits are changed, and how carefully."""

    site: Name  # path of a site's file, from the configuration's own folder
    # A window counts if its length, but for this share of cases, has covered what a commit takes and this margin.
    quantile: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    # By adding up the ranks': a rank's is never below 0.5 %, so that of many ranks `quantile` is not what is promised.
    most_risk: Annotated[float, Field(gt=0, le=1)] = 1.0
    margin_s: NonNegativeFloat = 0.005
    within_s: PositiveFloat = 30.0  # how long a period waits for its windows
    boundary_within_s: PositiveFloat = 60.0  # the same, where the job stands still for it
    min_fraction: Share = 0.5  # of its circuits, that an endpoint keeps at every point of a change
    max_moves_per_stage: PositiveInt = 1024
    # From link up until packets take it: what is reckoned with where routers follow links by themselves (none listed
    # here), and else before it was measured.
    route_s: NonNegativeFloat = 0.0
    routers: tuple[RouterSettings, ...] = Field(default=(), strict=False)
    rerouting: ReroutingSettings = ReroutingSettings()
    # Where this names a model (see planner/cost/models.py), circuits of Gen follow each redeployment.
    model: Name | None = None
    first_fleet_gpu: NonNegativeInt = 0  # the site's number of the fleet's GPU 0
    tokens_per_period: PositiveFloat = 1e6  # that an engine decodes between them
