"""How long a change of circuits takes until packets may use them, as measured switch by switch. Pure.

A device's own delay is often the least of it: receivers lock to the light, links are debounced, routes follow
(section 2.3 of the paper). Until enough was measured, its stated delay is taken with an allowance.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planner.fabric.model import OcsId
from planner.fabric.recent import RecentSamples
from planner.fabric.windows import CommitNeed


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is taken for what was not measured often enough yet."""

    device_factor: float = 1.5  # on the stated delay
    link_up_s: float = 0.005  # on top of it
    route_s: float = 0.005
    control_s: float = 0.005
    beyond: float = 1.5  # on the worst seen, while too few were seen
    fading: float = 0.9  # of that, for each period that it found no window for

    def __post_init__(self) -> None:
        for name in ("device_factor", "beyond"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.fading <= 1:
            raise ValueError(f"fading must be in (0, 1], got {self.fading}")


@dataclass(slots=True)
class CommitTimes:
    """`stated_s`: each switch's delay by its data sheet. `q`: a commit lasts longer with probability 1 - q at most."""

    stated_s: Mapping[OcsId, float]
    q: float = 0.95
    allowance: Allowance = field(default_factory=Allowance)
    _device: dict[OcsId, RecentSamples] = field(default_factory=dict)
    _route: dict[OcsId, RecentSamples] = field(default_factory=dict)
    _control: dict[OcsId, RecentSamples] = field(default_factory=dict)
    _unfit: Counter[OcsId] = field(default_factory=Counter)  # periods without a window since the last commit

    def __post_init__(self) -> None:
        if not 0 < self.q < 1:
            raise ValueError(f"q must be in (0, 1), got {self.q}")

    def measured(self, switch: OcsId, *, control_s: float, device_s: float, route_s: float) -> None:
        """One commit: decision to command at the switch, to link up, to routes that use it."""
        for memory, value_s in ((self._control, control_s), (self._device, device_s), (self._route, route_s)):
            if not value_s >= 0:
                raise ValueError(f"times of a commit must be >= 0, got {value_s} on {switch}")
            memory.setdefault(switch, RecentSamples()).add(value_s)
        self._unfit.pop(switch, None)

    def unfit(self, switches: Iterable[OcsId]) -> None:
        """No window was as long as they need. Only a commit tells how long one takes: were a single slow one believed
        for good, there would never be another. Where few were measured it is believed a little less each time, but
        never less than the fastest of them, nor than what is taken for what was not measured."""
        self._unfit.update(set(switches))

    def samples(self, switch: OcsId) -> int:
        return len(self._device.get(switch, ()))

    def need(self, switches: Iterable[OcsId], margin_s: float) -> CommitNeed:
        """All of them changed side by side: of each part the slowest."""
        chosen = sorted(set(switches))
        return CommitNeed(
            max((self._expected_s(self._device, switch, self._stated_s(switch)) for switch in chosen), default=0.0),
            max((self._expected_s(self._route, switch, self.allowance.route_s) for switch in chosen), default=0.0),
            max((self._expected_s(self._control, switch, self.allowance.control_s) for switch in chosen), default=0.0),
            margin_s,
        )

    def _stated_s(self, switch: OcsId) -> float:
        return self.stated_s.get(switch, 0.0) * self.allowance.device_factor + self.allowance.link_up_s

    def _expected_s(self, memory: Mapping[OcsId, RecentSamples], switch: OcsId, unmeasured_s: float) -> float:
        recent = memory.get(switch)
        if recent is None:
            return unmeasured_s
        bound = recent.upper(self.q)
        if bound is not None:
            return bound.value_s
        seen = recent.newest()
        worst_s = self.allowance.beyond * max(seen) * self.allowance.fading ** self._unfit[switch]
        return max(unmeasured_s, min(seen), worst_s)
