"""How many of a scenario's GPUs train and how many generate: the split with the most throughput, found by trying.

As StreamRL divides a budget (arXiv 2504.15930, its resource allocation): both sides are timed under each split, and the
one whose slower side is quickest is taken. Here the loop has the last word, so that weight sync, waiting and modes in
which stages add up count as well. More GPUs on one side are taken to make its stage shorter, never longer: then there
is one best split, and the search closes in on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import TypeVar

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.lab.sim.rl.results import ClusterResult, rows
from orchestrrl.lab.sim.rl.run import Report, run_arm
from orchestrrl.lab.sim.rl.scenario import ClusterScenario, faults_between_sections
from orchestrrl.lab.sim.rl.stages import TUNED, FabricStages
from orchestrrl.lab.sim.scenario import ARMS

Found = TypeVar("Found")

FINEST = 32  # a step of the search is no less than such a part of the cluster
FIRST = 5  # splits that are tried before it closes in
# Splits that come this near to the most throughput are as good: how prompts happen to fall on so many engines makes as
# much of a difference.
ALIKE = 0.02


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Seconds of a step, in the mean."""

    train_gpus: int
    gen_gpus: int
    gen_s: float
    train_s: float
    sync_s: float
    samples_per_s: float

    @property
    def gen_over_train(self) -> float:
        return self.gen_s / self.train_s


def splits(
    scenario: ClusterScenario,
    fabric: str | None = None,
    arm: str = TUNED,
    report: Report = lambda what, done, total: None,
    keep: Callable[[ClusterResult], object] = lambda result: None,
) -> list[GpuSplit]:
    """All that were tried, by GPUs that train: on one fabric (by default the first), under one arm, with the first
    seed; `keep` gets the run of each. Raises ProblemFaults where there is nothing to split, and where no split
    works."""
    faults = faults_of(scenario, fabric, arm)
    if faults:
        raise ProblemFaults(faults)
    counts, title = train_counts(scenario), fabric or scenario.fabrics[0].title

    def tried(place: int) -> GpuSplit | None:
        report(f"{counts[place]} GPUs train", 0, 0)
        try:
            return _tried(scenario, counts[place], title, arm, keep)
        except (ProblemFaults, Permanent) as error:
            faults.extend(error.faults if isinstance(error, ProblemFaults) else [str(error)])
            return None

    found = search(len(counts), tried, lambda each: each.samples_per_s)
    if not found:
        raise ProblemFaults(list(dict.fromkeys(faults)) or ["cluster: has no servers to split"])
    return found


def best(found: Sequence[GpuSplit]) -> GpuSplit:
    """Of those that are as good as any the one with the fewest GPUs that train: the others would wait."""
    most = max(each.samples_per_s for each in found)
    alike = (each for each in found if each.samples_per_s >= (1 - ALIKE) * most)
    return min(alike, key=lambda each: each.train_gpus)


def train_counts(scenario: ClusterScenario) -> list[int]:
    """GPUs that may train: whole servers and whole replicas."""
    cluster, part = scenario.cluster, scenario.training
    unit = lcm(cluster.gpus_per_server, part.tp * part.cp * part.pp)
    most = (cluster.gpus - cluster.gpus_per_server) // unit
    each = ceil(most / FINEST) if most else 1
    return [count * unit for count in range(each, most + 1, each)]


def search(count: int, tried: Callable[[int], Found | None], worth: Callable[[Found], float]) -> list[Found]:
    """Of places in a row, where worth (> 0) has one peak: some all over, then between the best and those beside it; the
    first of several that are alike. None: the place cannot be had."""
    first = sorted({round(i * (count - 1) / (FIRST - 1)) for i in range(FIRST)}) if count else []
    known = {place: tried(place) for place in first}
    while True:
        good = {place: each for place, each in known.items() if each is not None}
        if not good:
            rest = [place for place in range(count) if place not in known]
            if not rest:
                return []
            known[rest[len(rest) // 2]] = tried(rest[len(rest) // 2])
            continue
        most = max(map(worth, good.values()))
        top = min(place for place, each in good.items() if worth(each) >= (1 - ALIKE) * most)
        lower = max((place for place in known if place < top), default=top)
        upper = min((place for place in known if place > top), default=top)
        new = {(lower + top) // 2, (top + upper + 1) // 2} - set(known)
        if not new:
            return [good[place] for place in sorted(good)]
        known |= {place: tried(place) for place in sorted(new)}


def faults_of(scenario: ClusterScenario, fabric: str | None, arm: str) -> list[str]:
    """What `splits` would refuse before it tries any."""
    titles, found = [section.title for section in scenario.fabrics], list[str]()
    if scenario.cluster.shared:
        found.append("cluster.shared: the same GPUs train and generate, there is nothing to split")
    if fabric is not None and fabric not in titles:
        found.append(f"--fabric: must be one of {', '.join(titles)}, got {fabric!r}")
    if arm not in ARMS:
        found.append(f"--arm: must be one of {', '.join(ARMS)}, got {arm!r}")
    return found


def _tried(
    scenario: ClusterScenario, train_gpus: int, title: str, arm: str, keep: Callable[[ClusterResult], object]
) -> GpuSplit:
    changed = with_split(scenario, train_gpus)
    changed = changed.model_copy(
        update={
            "fabrics": tuple(each for each in changed.fabrics if each.title == title),
            "generation": changed.generation.model_copy(update={"arms": (arm,)}),
            "seeds": changed.seeds[:1],
        }
    )
    if faults := faults_between_sections(changed):
        raise ProblemFaults(faults)
    result = run_arm(FabricStages(changed, changed.fabrics[0]), arm, changed.seeds[0])
    keep(result)
    (row,) = rows([result])
    return GpuSplit(train_gpus, changed.cluster.generating, row.gen_s, row.train_s, row.sync_s, row.samples_per_s)


def with_split(scenario: ClusterScenario, train_gpus: int) -> ClusterScenario:
    """The same cluster, with so many GPUs that train; dp follows from them."""
    sides = {"train_gpus": train_gpus, "gen_gpus": scenario.cluster.gpus - train_gpus}
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update=sides)})
