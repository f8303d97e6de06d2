"""Store the results of cluster simulations in one file per scenario, and summarise results in table rows.

A file is named by the digest of its scenario and written atomically, so that a restarted sweep can find the scenarios
whose results are complete. Reading a file returns exactly the results that were written.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal
from uuid import uuid4

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from orchestrrl.core.documents import read_text
from orchestrrl.core.errors import ProblemFaults, faults_of
from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.model import RlRun

FORMAT = 1
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Bill:
    """The price of a cluster. `parts_usd` contains the prices by network component, and `network_usd` is their sum."""

    network_usd: float
    parts_usd: Mapping[str, float] = field(default_factory=dict)
    gpus_usd: float | None = None  # None: unknown price

    @property
    def total_usd(self) -> float:
        return self.network_usd + (self.gpus_usd or 0.0)


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """The results of one run, with the scenario of the run."""

    run: RlRun
    bill: Bill
    train_parts_s: Mapping[str, float] = field(default_factory=dict)  # of a training step: log probs, compute, ...
    train_mfu: float = 0.0
    gen_phases_s: Mapping[str, float] = field(default_factory=dict)  # of the last generation step
    sync_phases_s: Mapping[str, float] = field(default_factory=dict)
    scenario: Mapping[str, Any] = field(default_factory=dict)  # the document, stored once per file

    @property
    def samples_per_s(self) -> float:
        return self.run.samples_per_s

    @property
    def samples_per_s_per_musd(self) -> float:
        """The throughput per million dollars of network cost, or 0 if the cost is unknown. Section 7.3 of the
        OrchestrRL paper calls this value throughput per dollar."""
        return self.run.samples_per_s / self.bill.network_usd * 1e6 if self.bill.network_usd else 0.0


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _File:
    format: Literal[1]
    digest: str
    scenario: dict[str, Any]
    results: list[ClusterResult]


_FILE: TypeAdapter[_File] = TypeAdapter(_File)


def digest_of(scenario: Mapping[str, Any]) -> str:
    """Return the digest of a scenario, independent of the order of its fields."""
    text = json.dumps(scenario, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_text(scenario: Mapping[str, Any], results: Sequence[ClusterResult]) -> str:
    """Return the results of one scenario as JSON. The text is deterministic."""
    rows = [{name: value for name, value in asdict(each).items() if name != "scenario"} for each in results]
    document = {"format": FORMAT, "digest": digest_of(scenario), "scenario": scenario, "results": rows}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write(folder: Path, scenario: Mapping[str, Any], results: Sequence[ClusterResult]) -> Path:
    """Atomically write the results to a file in `folder` that is named by the scenario's digest. Return the file's
    path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest_of(scenario)}{SUFFIX}"
    temporary = folder / f".{uuid4().hex}.part"  # created with default permissions, unlike files of tempfile
    try:
        temporary.write_text(as_text(scenario, results), encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def read(source: Path) -> tuple[ClusterResult, ...]:
    """Read the results of a file, or of all result files in a folder in the order of their names. Raises ProblemFaults
    with the faults of each file, or if a folder contains no results."""
    paths = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else [source]
    if not paths:
        raise ProblemFaults([f"{source}: contains no results (*{SUFFIX})"])
    found: list[ClusterResult] = []
    faults: list[str] = []
    for path in paths:
        try:
            found += parse(read_text(path))
        except ProblemFaults as error:  # the fault of an unreadable file already contains its path
            faults += [fault if fault.startswith(str(path)) else f"{path}: {fault}" for fault in error.faults]
    if faults:
        raise ProblemFaults(faults)
    return tuple(found)


def parse(text: str) -> list[ClusterResult]:
    """Parse the text of a results file. Raises ProblemFaults if the text is not JSON or not a valid document."""
    try:
        file = _FILE.validate_python(json.loads(text))
    except ValidationError as error:
        raise ProblemFaults(faults_of(error)) from None
    except ValueError as error:
        raise ProblemFaults([f"(document): is not JSON: {error}"]) from None
    return [replace(each, scenario=file.scenario) for each in file.results]


def complete(folder: Path, digests: Iterable[str]) -> set[str]:
    """Return those of `digests` whose results file in `folder` is readable and contains all runs of its scenario. A
    file may contain only some runs, because `sim run` writes it after each run."""
    found = set()
    for digest in digests:
        try:
            results = parse(read_text(folder / f"{digest}{SUFFIX}"))
        except ProblemFaults:
            continue
        if results and len(results) == runs_of(results[0].scenario):
            found.add(digest)
    return found


def runs_of(scenario: Mapping[str, Any]) -> int:
    """Return the number of runs of a scenario: one for each combination of a fabric, an arm and a seed."""
    return len(scenario["fabrics"]) * len(scenario["generation"]["arms"]) * len(scenario["seeds"])


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """The summary of an arm on a fabric. `gain` is the throughput, and `gain_per_usd` the throughput per network cost,
    relative to the first row. `pareto` is true if no other row has at least this throughput for at most this network
    cost and is better in one of the two."""

    fabric: str
    arm: str
    seeds: int
    gen_s: float  # of a step
    train_s: float
    sync_s: float
    waits_s: float  # of engines in a step, for weights and buffer room
    idle_train: float
    idle_gen: float
    staleness: float  # mean lag of a sample in versions
    samples_per_s: float
    gain: float
    network_usd: float
    samples_per_s_per_musd: float
    gain_per_usd: float
    total_usd: float | None  # including GPUs; None: unknown price of GPUs
    pareto: bool


def rows(results: Sequence[ClusterResult]) -> list[SummaryRow]:
    """Return one summary row per fabric and arm, in the order in which they first appear in `results`."""
    groups: dict[tuple[str, str], list[ClusterResult]] = {}
    for result in results:
        groups.setdefault((result.run.fabric, result.run.arm), []).append(result)
    rates = {key: median(each.samples_per_s for each in some) for key, some in groups.items()}
    worths = {key: median(each.samples_per_s_per_musd for each in some) for key, some in groups.items()}
    best = pareto([(some[0].bill.network_usd, rates[key]) for key, some in groups.items()])
    first, found = next(iter(groups), ("", "")), []
    for (key, some), is_best in zip(groups.items(), best, strict=True):
        bill, idle = some[0].bill, [each.run.idle_share for each in some]
        found.append(
            SummaryRow(
                fabric=key[0],
                arm=key[1],
                seeds=len(some),
                gen_s=median(_mean_s(each, "gen_s") for each in some),
                train_s=median(_mean_s(each, "train_s") for each in some),
                sync_s=median(_sync_s(each) for each in some),
                waits_s=median(_mean_s(each, "gen_waits_weights_s", "gen_waits_room_s") for each in some),
                idle_train=median(each.get(FabricStage.TRAIN, 0.0) for each in idle),
                idle_gen=median(each.get(FabricStage.GEN, 0.0) for each in idle),
                staleness=median(_mean_staleness(each) for each in some),
                samples_per_s=rates[key],
                gain=_ratio(rates[key], rates[first]),
                network_usd=bill.network_usd,
                samples_per_s_per_musd=worths[key],
                gain_per_usd=_ratio(worths[key], worths[first]),
                total_usd=None if bill.gpus_usd is None else bill.total_usd,
                pareto=is_best,
            )
        )
    return found


def _mean_s(result: ClusterResult, *names: str) -> float:
    """Return the sum of the named columns in seconds per step, averaged over the steps after the warm-up."""
    measured = result.run.steps[int(result.scenario["loop"]["warmup_steps"]) :]
    return sum(step[name] for step in measured for name in names) / len(measured)


def _sync_s(result: ClusterResult) -> float:
    lengths_s = [span.end_s - span.begin_s for span in result.run.spans if span.stage is FabricStage.WEIGHT_SYNC]
    return fmean(lengths_s or [sum(result.sync_phases_s.values())])


def _mean_staleness(result: ClusterResult) -> float:
    total = sum(result.run.staleness.values())
    return sum(behind * count for behind, count in result.run.staleness.items()) / total if total else 0.0


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else 0.0


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return, for each (cost, worth) pair, whether it is Pareto optimal: no different pair has at most its cost and at
    least its worth."""
    return [not any(c <= cost and w >= worth and (c, w) != (cost, worth) for c, w in points) for cost, worth in points]
