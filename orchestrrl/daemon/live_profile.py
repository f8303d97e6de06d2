"""What the fleet's engines cost, as the control plane believes it: the configured profile, re-fitted while they work.

Holds values and does no input or output; it is fed by reports and results, and read at each tick. A re-fit stands in
for what was believed only where it says something notably different, so that plans do not waver with noise. A restarted
daemon begins with the configured profile and learns again; what starts took, it is told from the journal.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from orchestrrl.core.config.schema import FleetSettings, KvTransfer
from orchestrrl.core.operations import MoveRequests, OperationItemResult, OperationResult
from orchestrrl.daemon.cost_estimates import ConfigurationEstimate, CostEstimates, provenance_notes
from orchestrrl.daemon.priors import AssumedProfile
from orchestrrl.daemon.profile_refit import (
    LEAST_SAMPLES,
    EngineRefitter,
    MoveRefitter,
    ObservedBatch,
    RefittedFigure,
    batch_between,
    given_profile,
    prefilled_between,
    same_batch,
    steady_batch,
)
from orchestrrl.engines.base import EngineSample
from orchestrrl.fleet.move_orders import fixed_parts
from orchestrrl.fleet.redeployment.book import EngineStart
from orchestrrl.fleet.reports import EngineReport
from planner.cost.profile import Curve, EngineProfile, MoveCosts, StepTime
from planner.model import Configuration, ConfigurationId, EngineHealth, EngineId, MoveMethod, RequestId
from planner.move_methods import FIXED_PRIOR_S, FixedMoveCost, MoveEstimate
from planner.solver.problem import KvTransferCost

logger = logging.getLogger(__name__)

# A batch is watched until it has made so many steps: scrapes fall anywhere within one. And for so long: a scrape takes
# its time, and an engine may count in bursts.
LEAST_STEPS = 8
LEAST_S = 0.5
# A re-fit that moves step times by less than this share, over the loads seen last, is not taken up.
NOTABLE = 0.03
# The same for prefill rates and starts, which scatter more and weigh less in a plan.
NOTABLE_FIGURE = 0.1
# Step times this many times off the configured ones are taken up with a warning: they may well be of another engine.
SUSPECT = 3.0
# Loads seen last, over which beliefs are compared.
LOADS_REMEMBERED = 64
MOVE_FIXED = "move_fixed_s"  # names that figure in the journal
# Weight of the latest batch in the running ratio of predicted to measured step times.
WEIGHT = 0.05

Note = Callable[[ConfigurationId, dict[str, Any]], object]


@dataclass(slots=True)
class _Known:
    """What is known of one configuration."""

    given: EngineProfile
    written: Configuration | None  # as the configuration file has it, to the last digit
    held: EngineProfile
    refitter: EngineRefitter
    assumed: AssumedProfile | None = None  # what it began with where no configuration describes the engines
    scaled: bool = True  # False: only the shape of its step times means anything yet
    loads: deque[ObservedBatch] = field(default_factory=lambda: deque(maxlen=LOADS_REMEMBERED))
    ratio: float | None = None
    taken: int = 0
    refused: int = 0

    @property
    def as_written(self) -> Configuration | None:
        """None once other step times were learnt, or where nobody wrote it out."""
        if self.written is None or self.held.step is not self.given.step:
            return None
        return replace(self.written, prefill_tokens_per_s=self.held.prefill_tokens_per_s, switch_s=self.held.switch_s)


@dataclass(frozen=True, slots=True)
class _Watched:
    """An engine's batch, and the sample from which on it stayed the same."""

    configuration: ConfigurationId
    since: EngineSample


class LiveProfile:
    """`note` is told of each belief that changes, with figures; `today` gives the date of a re-fit, ISO 8601."""

    def __init__(self, fleet: FleetSettings, note: Note, today: Callable[[], str]) -> None:
        self._note = note
        self._today = today
        self._watched: dict[EngineId, _Watched] = {}
        self._known: dict[ConfigurationId, _Known] = {}
        self._fixed = {method: FixedMoveCost() for method in MoveMethod}
        self._fixed_noted_s = {method: part.seconds for method, part in self._fixed.items()}
        self._begin(fleet)

    def assume(self, assumed: AssumedProfile) -> None:
        """Take in an implicit configuration, unless it is known. Without a prior it is believed from LEAST_SAMPLES
        observed batches on."""
        if assumed.configuration not in self._known:
            profile = assumed.profile
            self._known[profile.id] = _Known(
                profile, None, profile, self._guess_refitter(profile), assumed, scaled=bool(assumed.prior)
            )

    def forget_implicit(self, used: Collection[ConfigurationId]) -> None:
        """Let go of implicit configurations but those that engines are still of."""
        self._known = {id: known for id, known in self._known.items() if known.assumed is None or id in used}

    def batches_taken(self, configuration: ConfigurationId) -> int:
        known = self._known.get(configuration)
        return 0 if known is None else known.taken

    def configured(self, fleet: FleetSettings) -> None:
        """Take over a reloaded configuration. What was learnt stays, unless what it rests on has changed."""
        if _costs_of(fleet) != self._costs:
            self._begin(fleet)
        elif _rates_of(fleet.kv_transfer) != _rates_of(self._links):
            self._begin_transfers(fleet.kv_transfer)

    # --- learn

    def observe(
        self, report: EngineReport, configuration: ConfigurationId | None, *, crowded_links: bool = False
    ) -> None:
        """A report that was taken in, of an engine of that configuration. With `crowded_links` its steps may take
        longer by what others send: passing, and so not the engine's own."""
        sample, watched = report.sample, self._watched.get(report.engine)
        if configuration is None or configuration not in self._known or sample is None or crowded_links:
            self._watched.pop(report.engine, None)
            return
        if watched is None or watched.configuration != configuration or report.health is not EngineHealth.OK:
            self._watched[report.engine] = _Watched(configuration, sample)
            return
        known, since = self._known[configuration], watched.since
        steps = (sample.generation_tokens_total - since.generation_tokens_total) / max(1, sample.running)
        enough = steps >= LEAST_STEPS and sample.sampled_s - since.sampled_s >= LEAST_S
        # A guess may be far off: it is corrected by batches that change a little, too.
        unchanged = same_batch if known.assumed is None else steady_batch
        if unchanged(since, sample) and not enough:
            return
        batch = batch_between(since, sample, unchanged if enough else same_batch)
        prefilled = prefilled_between(since, sample)
        self._watched[report.engine] = _Watched(configuration, sample)
        if batch is not None:
            self._learn(known, batch)
        if prefilled is not None and known.scaled:
            known.refitter.observe_prefill(prefilled)

    def moved(
        self,
        action: MoveRequests,
        result: OperationResult,
        configuration_of: Callable[[EngineId], ConfigurationId | None],
    ) -> None:
        """Finished moves. Those to one engine are prefilled together: their tokens took as long as the last of them.
        KV comes for each by itself."""
        self._learn_fixed(action, result)
        destination = {move.request: move.to_engine for move in action.moves}
        tokens: dict[EngineId, list[int]] = {}
        seconds: dict[EngineId, float] = {}
        for item in result.items:
            engine = destination.get(RequestId(item.id))
            if engine is None or not item.done or not item.duration_s:
                continue
            if item.method is MoveMethod.TRANSFER:
                self._loaded(configuration_of(engine), item)
            elif item.recomputed_tokens:
                tokens.setdefault(engine, []).append(item.recomputed_tokens)
                seconds[engine] = max(seconds.get(engine, 0.0), item.duration_s)
        for engine, contexts in sorted(tokens.items()):
            if self._moves is not None:
                self._moves.observe(MoveMethod.RECOMPUTE, sum(contexts), seconds[engine])
            configuration = configuration_of(engine)
            if configuration in self._known:
                self._known[configuration].refitter.observe_recompute(contexts, seconds[engine])

    def _learn_fixed(self, action: MoveRequests, result: OperationResult) -> None:
        """Moves of one operation met the same stall, if there was one: they count as one."""
        found = fixed_parts(action.moves, result.items)
        for method, part in self._fixed.items():
            if seconds := [seconds for by, seconds in found if by is method]:
                self._fixed[method] = part.after(median(seconds))
        for method, part in self._fixed.items():
            before_s, found_s = self._fixed_noted_s[method], part.seconds
            if abs(found_s - before_s) > NOTABLE_FIGURE * before_s:
                self._fixed_noted_s[method] = found_s
                body = {"figure": MOVE_FIXED, "method": method, "value": found_s, "before": before_s}
                self._note(ConfigurationId(""), {**body, "samples": len(part.measured_s)})

    def recover_fixed(self, method: MoveMethod, seconds: float) -> None:
        """Begin with the fixed part that an earlier daemon had learnt for moves by `method`."""
        self._fixed[method] = FixedMoveCost(seconds)
        self._fixed_noted_s[method] = seconds

    def _loaded(self, configuration: ConfigurationId | None, item: OperationItemResult) -> None:
        """Each GPU of an engine has its part of the KV, and they send at once."""
        if configuration in self._known and self._transfers is not None:
            tokens = max(1, round(item.loaded_tokens / self._known[configuration].held.parallelism.gpus))
            self._transfers.observe(MoveMethod.TRANSFER, tokens, item.duration_s)

    def started(self, starts: Iterable[EngineStart]) -> None:
        """Engines that a change of the deployment brought up. Those that began under another `switch_s` were started by
        other means, or elsewhere: the configuration has been corrected since."""
        for start in starts:
            known = self._known.get(start.configuration)
            if known is not None and start.expected_s == known.given.switch_s:
                known.refitter.observe_start(start.elapsed_s)

    def refit(self, engines: Iterable[EngineId]) -> None:
        """Take up what the samples say, where it is notable. `engines`: those that there are."""
        there = set(engines)
        self._watched = {engine: watched for engine, watched in self._watched.items() if engine in there}
        for known in self._known.values():
            if known.refitter.fresh and known.scaled:
                known.refitter.fresh = False
                self._accept_step(known, known.refitter.profile())
                prefill = known.refitter.prefill_tokens_per_s(known.held.step)
                self._accept_figure(known, "prefill_tokens_per_s", prefill)
                self._accept_figure(known, "switch_s", known.refitter.switch_s())

    # --- answer

    def cost_estimates(self) -> CostEstimates:
        """All of it as of now, to decide with elsewhere while reports come in."""
        cost_estimates = {id: known for id, known in self._known.items() if known.scaled}
        written = {id: known.as_written for id, known in cost_estimates.items()}
        return CostEstimates(
            tuple(known.held for known in cost_estimates.values()),
            {id: line for id, line in written.items() if line is not None},
        )

    def estimates(self) -> tuple[ConfigurationEstimate, ...]:
        return tuple(
            ConfigurationEstimate(
                known.held,
                known.given,
                known.held.step is not known.given.step,
                _factor(known),
                known.ratio,
                known.taken,
                known.refused,
                known.assumed,
            )
            for known in self._known.values()
            if known.scaled
        )

    def moves(self) -> MoveCosts | None:
        """What moving is now believed to cost; None where no profile says anything of it."""
        return None if self._moves is None else self._moves.costs()

    def moving(self, nic_share: float = 1.0) -> MoveEstimate:
        """The same for a plan. KV is handed over only where the configuration says that engines can; between nodes with
        that share of the NICs."""
        moves, links, learnt = self.moves(), self._links, self._learnt_transfer()
        rebuilt_tokens = moves.rebuilt_tokens() if moves is not None else None
        recompute_s = self.recompute_fixed_s
        if links is None:
            return MoveEstimate(KvTransferCost(0.0, 0.0, 0.0, rebuilt_tokens, recompute_s), 0.0)
        across_gbps = links.inter_node_gbps_per_gpu or (moves.transfer_gbps if moves is not None else 0.0)
        latency_s = self._fixed[MoveMethod.TRANSFER].seconds
        inside_gbps = links.intra_node_gbps_per_gpu or across_gbps
        kv_bytes = links.kv_bytes_per_token or (moves.kv_bytes_per_token if moves is not None else 0.0)
        if learnt is not None:  # moves by KV were measured, whatever way they went
            latency_s, across_gbps = max(0.0, learnt.transfer_s.at(0.0)), learnt.transfer_gbps or across_gbps
            inside_gbps = learnt.transfer_gbps or inside_gbps
        transfer = KvTransferCost(across_gbps * nic_share, inside_gbps, latency_s, rebuilt_tokens, recompute_s)
        return MoveEstimate(transfer, kv_bytes)

    @property
    def recompute_fixed_s(self) -> float:
        """What a running request stands still for when it moves, beside the prefill of its context."""
        return self._fixed[MoveMethod.RECOMPUTE].seconds

    def _learnt_transfer(self) -> MoveCosts | None:
        """What moves by KV are now believed to cost; None while few were measured."""
        moves = None if self._transfers is None else self._transfers.costs()
        return None if moves is None or moves.provenance is None else moves

    def notes(self) -> tuple[str, ...]:
        """For a plan's reader."""
        fixed = (
            f"moving a running request by {method}: {part.seconds:.3g} s beside its context, by the latest"
            f" {len(part.measured_s)} orders to move"
            for method, part in self._fixed.items()
            if part.measured_s
        )
        return (*(note for estimate in self.estimates() for note in provenance_notes(estimate)), *fixed)

    # --- inside

    def _begin(self, fleet: FleetSettings) -> None:
        self._costs = _costs_of(fleet)
        profile, lines = fleet.profile_value(), {settings.id: settings.value() for settings in fleet.configurations}
        moves = profile.moves if profile is not None else None
        rebuilt_tokens = moves.rebuilt_tokens() if moves is not None else None
        self._moves = MoveRefitter(moves, self._today) if moves is not None else None
        self._begin_transfers(fleet.kv_transfer)
        given = [given_profile(line, self._today()) for line in lines.values()]
        configured = {
            engine.id: _Known(engine, lines.get(engine.id), engine, EngineRefitter(engine, self._today, rebuilt_tokens))
            for engine in (*given, *(profile.configurations if profile is not None else ()))
        }
        # What engines report of themselves does not rest on the configuration.
        implicit = {id: known for id, known in self._known.items() if known.assumed is not None}
        self._known = {**configured, **implicit, **configured}  # configured ones come first, and count

    def _begin_transfers(self, links: KvTransfer | None) -> None:
        """Believe what is configured of handing KV over, until moves were measured."""
        self._links = links
        self._transfers: MoveRefitter | None = None
        if links is not None:
            moves, latency_s = self.moves(), links.latency_s
            if latency_s is None:
                latency_s = moves.transfer_s.at(0.0) if moves is not None else 0.0
            self._fixed[MoveMethod.TRANSFER] = FixedMoveCost(latency_s + FIXED_PRIOR_S)
            self._fixed_noted_s[MoveMethod.TRANSFER] = latency_s + FIXED_PRIOR_S
            told = self.moving()
            priced = MoveCosts(told.kv_bytes_per_token, _line(told.transfer), Curve.line(0.0, 0.0))
            self._transfers = MoveRefitter(priced, self._today)

    def _learn(self, known: _Known, batch: ObservedBatch) -> None:
        given_s = known.given.step.at(batch.sequences, batch.kv_tokens)
        if not known.refitter.observe(*batch):
            known.refused += 1
            if known.refused == 1:
                logger.warning(
                    "%s: a step of %.3g s at %g sequences, where its profile says %.3g s: not believed (is it an engine"
                    " of this configuration?); further ones are only counted",
                    *(known.given.id, batch.step_s, batch.sequences, given_s),
                )
            return
        ratio = known.held.step.at(batch.sequences, batch.kv_tokens) / batch.step_s
        known.ratio = ratio if known.ratio is None else (1 - WEIGHT) * known.ratio + WEIGHT * ratio
        known.loads.append(batch)
        known.taken += 1
        if not known.scaled and len(known.loads) >= LEAST_SAMPLES:
            self._scale(known)

    def _scale(self, known: _Known) -> None:
        """Believe a shape from now on, at the scale of the batches seen so far; prefill is scaled with it."""
        shape = known.given
        factor = median(load.step_s / shape.step.at(load.sequences, load.kv_tokens) for load in known.loads)
        base_s = Curve(shape.step.base_s.xs, tuple(factor * y for y in shape.step.base_s.ys))
        step = StepTime(base_s, factor * shape.step.kv_s_per_token)
        profile = replace(shape, step=step, prefill_tokens_per_s=shape.prefill_tokens_per_s / factor)
        known.given = known.held = profile
        known.refitter, known.scaled, known.ratio = self._guess_refitter(profile), True, None
        for load in known.loads:
            known.refitter.observe(*load)
        logger.info("%s: step times are known from %d observed batches", profile.id, len(known.loads))

    def _guess_refitter(self, profile: EngineProfile) -> EngineRefitter:
        return EngineRefitter(profile, self._today, plausible=math.inf)

    def _accept_step(self, known: _Known, found: EngineProfile) -> None:
        changes = [abs(new_s / old_s - 1) for new_s, old_s in _step_times(known, found, known.held) if old_s > 0]
        change = sum(changes) / len(changes) if changes else 0.0
        if found.step is known.held.step or change < NOTABLE:
            return
        known.held = replace(known.held, step=found.step, provenance=found.provenance)
        known.ratio = None  # of another prediction
        factor, provenance = _factor(known), found.provenance
        body = {
            "figure": "step_s",
            "step_time_factor": factor,
            "changed_by": change,
            "samples": provenance.samples,
            "fit_error_mean": provenance.fit_error_mean,
            "fit_error_max": provenance.fit_error_max,
            "sequences": list(found.step.base_s.xs),
            "seconds": list(found.step.base_s.ys),
            "per_kv_token_s": found.step.kv_s_per_token,
        }
        self._note(known.given.id, body)
        suspect = known.assumed is None and not 1 / SUSPECT <= factor <= SUSPECT
        logger.log(
            logging.WARNING if suspect else logging.INFO,
            "%s: steps take %.3g times what its profile says, by %d samples%s",
            *(
                known.given.id,
                factor,
                provenance.samples,
                "; is it an engine of this configuration?" if suspect else "",
            ),
        )

    def _accept_figure(self, known: _Known, name: str, found: RefittedFigure | None) -> None:
        before: float = getattr(known.held, name)
        if found is None or not abs(found.value - before) > NOTABLE_FIGURE * before:
            return
        others = {**dict(known.held.others), name: found.provenance}
        learnt: dict[str, Any] = {name: found.value, "others": tuple(others.items())}
        known.held = replace(known.held, **learnt)
        body = {
            "figure": name,
            "value": found.value,
            "before": before,
            "configured": getattr(known.given, name),
            "by": found.provenance.detail,
            "samples": found.provenance.samples,
            "fit_error_mean": found.provenance.fit_error_mean,
            "fit_error_max": found.provenance.fit_error_max,
        }
        self._note(known.given.id, body)
        logger.info("%s: %s is %.3g, was %.3g (%s)", known.given.id, name, found.value, before, found.provenance.detail)


def _line(transfer: KvTransferCost) -> Curve:
    """Seconds over bytes, between one GPU and another on another node."""
    gbps = transfer.inter_node_gbps_per_gpu
    return Curve.line(transfer.latency_s, 8 / (gbps * 1e9) if gbps > 0 else 0.0)


def _rates_of(links: KvTransfer | None) -> object:
    return None if links is None else links.model_copy(update={"weights": ""})


def _costs_of(fleet: FleetSettings) -> object:
    return fleet.configurations, fleet.profile_value()


def _step_times(known: _Known, first: EngineProfile, second: EngineProfile) -> list[tuple[float, float]]:
    """Of two profiles, at the loads seen last."""
    return [
        (first.step.at(sequences, kv_tokens), second.step.at(sequences, kv_tokens))
        for sequences, kv_tokens, _ in known.loads
    ]


def _factor(known: _Known) -> float:
    factors = [held_s / given_s for held_s, given_s in _step_times(known, known.held, known.given) if given_s > 0]
    return sum(factors) / len(factors) if factors else 1.0
