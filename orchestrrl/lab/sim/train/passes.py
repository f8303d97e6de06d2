"""A stage's forward and backward pass of one micro-batch: compute and what of its collectives is not hidden, in the
order in which a rank sees them. Pure.

Tensor parallelism's collectives and the experts' all-to-all are waited for, less the share that is hidden, of the
former in the backward pass alone; the ring of context parallelism goes on beside attention, and is waited for where it
takes longer than the ring's share of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrrl.lab.sim.train.compute import Compute, LayerPass
from orchestrrl.lab.sim.train.constants import TrainConstants
from orchestrrl.lab.sim.train.model import TrainJob

WAITS = ("tp", "cp", "ep")


@dataclass(frozen=True, slots=True)
class PassSegment:
    """Of a layer's pass: compute, a collective that is waited for, or one that goes on beside compute."""

    seconds: float  # that the layer takes for it
    group: str = ""  # empty: compute alone
    sends_s: float = 0.0  # that the collective is under way, from the segment's begin
    computes_s: float = 0.0  # of `seconds`

    @property
    def waits_s(self) -> float:
        return self.seconds - self.computes_s


@dataclass(frozen=True, slots=True)
class Pass:
    """Of one layer."""

    segments: tuple[PassSegment, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.segments)

    def waits_s(self, group: str) -> float:
        return sum(each.waits_s for each in self.segments if each.group == group)


@dataclass(frozen=True, slots=True)
class Passes:
    forward: Pass
    backward: Pass


def passes_of(job: TrainJob, compute: Compute, once_s: Mapping[str, float], constants: TrainConstants) -> Passes:
    """`once_s`: of each kind of collective, on the network as it is then."""
    forward = _pass(job, compute.forward, once_s, 0.0, constants.ep_hidden_share, ring_laps=1)
    hidden = constants.tp_hidden_share, constants.ep_hidden_share
    backward = _pass(job, compute.backward, once_s, *hidden, ring_laps=2)[::-1]
    if job.recompute:
        backward = (*forward, *backward)
    return Passes(Pass(forward), Pass(backward))


def _pass(
    job: TrainJob, layer: LayerPass, once_s: Mapping[str, float], tp_hidden: float, ep_hidden: float, *, ring_laps: int
) -> tuple[PassSegment, ...]:
    tensor = _waited("tp", once_s.get("tp", 0.0), tp_hidden)
    experts = _waited("ep", once_s.get("ep", 0.0), ep_hidden)
    dense = (tensor, tensor) if job.model.ffn else ()
    found = (
        tensor,
        _computed(layer.before_s),
        _beside(layer.attention_s, ring_laps * once_s.get("cp", 0.0), job.layout.cp),
        tensor,
        *dense[:1],
        _computed(layer.between_s),
        *dense[1:],
        experts,
        _computed(layer.experts_s),
        experts,
        _computed(layer.after_s),
    )
    return tuple(each for each in found if each.seconds > 0 or each.sends_s > 0)


def _computed(seconds: float) -> PassSegment:
    return PassSegment(seconds, computes_s=seconds)


def _waited(group: str, seconds: float, hidden_share: float) -> PassSegment:
    """What is hidden goes on beside the compute that follows."""
    return PassSegment(seconds * (1 - hidden_share), group, sends_s=seconds)


def _beside(attention_s: float, ring_s: float, cp: int) -> PassSegment:
    """The block that a rank holds itself is attended to while the first one comes, and the last one after all came."""
    if ring_s <= 0:
        return _computed(attention_s)
    waits_s = max(0.0, ring_s - attention_s * (cp - 1) / cp)
    return PassSegment(attention_s + waits_s, "cp", sends_s=ring_s, computes_s=attention_s)
