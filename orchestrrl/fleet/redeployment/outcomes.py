"""What became of a redeployment, and how long its engines took to start. Values only."""

from dataclasses import dataclass

from planner.model import ConfigurationId


@dataclass(frozen=True, slots=True)
class EngineStart:
    """An engine that was brought up: seconds from when the engines in its way began to stop until it answered, and what
    its configuration had said."""

    configuration: ConfigurationId
    elapsed_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class RedeploymentOutcome:
    """What became of a change of the deployment."""

    done: bool
    detail: str
    ended_s: float
    starts: tuple[EngineStart, ...] = ()
