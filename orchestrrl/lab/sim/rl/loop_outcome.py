"""What came of a time line: how far samples were behind, and how long GPUs stood idle. Pure."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.loop_rules import SampleBatch
from orchestrrl.lab.sim.rl.model import TimelineSpan


def staleness(batches: Sequence[SampleBatch], begun_with: Sequence[int], taken: Sequence[int]) -> Mapping[int, int]:
    """Samples that were trained on, by the versions that they were behind."""
    order: deque[tuple[int, int]] = deque(
        (version, batch.begun) for batch, version in zip(batches, begun_with, strict=True)
    )
    behind: Counter[int] = Counter()
    for step, wanted in enumerate(later - sooner for sooner, later in pairwise(taken)):
        while wanted:
            version, count = order.popleft()
            some = min(count, wanted)
            behind[step - version] += some
            wanted -= some
            if count > some:
                order.appendleft((version, count - some))
    return {versions: behind[versions] for versions in sorted(behind)}


def idle_shares(
    spans: Sequence[TimelineSpan], from_s: float, until_s: float, shared: bool
) -> Mapping[FabricStage, float]:
    """Of each stage's GPUs, between the two times."""
    if until_s <= from_s:
        return {}
    busy_s = dict.fromkeys((FabricStage.TRAIN, FabricStage.GEN), 0.0)
    for span in spans:
        if span.stage in busy_s:
            busy_s[span.stage] += max(0.0, min(span.end_s, until_s) - max(span.begin_s, from_s))
    if shared:
        busy_s = dict.fromkeys(busy_s, sum(busy_s.values()))
    return {stage: max(0.0, 1 - seconds / (until_s - from_s)) for stage, seconds in busy_s.items()}
