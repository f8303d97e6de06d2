"""What the fleet's engines cost, as the control plane believes it: the configured profile, re-fitted while they work.

Holds values and does no input or output; it is fed by reports and results, and read at each tick. A re-fit stands in
for what was believed only where it says something notably different, so that plans do not waver with noise. A restarted
daemon begins with the configured profile and learns again; what starts took, it is told from the journal.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from orchestrrl.core.config.schema import FleetSettings, KvTransfer
from orchestrrl.core.operations import MoveRequests, OperationItemResult, OperationResult
from orchestrrl.daemon.priors import AssumedProfile
from orchestrrl.daemon.profile_refit import (
    LEAST_SAMPLES,
    ConfigurationEstimate,
    CostEstimates,
    CurveRefitter,
    EngineRefitter,
    RefittedFigure,
    batch_between,
    given_profile,
    measured,
    prefilled_between,
    same_batch,
    steady_batch,
)
from orchestrrl.engines.base import EngineSample
from orchestrrl.fleet.move_orders import fixed_parts
from orchestrrl.fleet.redeployment.book import EngineStart
from orchestrrl.fleet.reports import EngineReport
from planner.cost.fit import StepSample
from planner.cost.profile import Curve, EngineProfile, MoveCosts, Provenance, StepTime
from planner.model import ConfigurationId, EngineHealth, EngineId, MoveMethod, RequestId
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
MOVE_FIXED = "move_fixed_s"  # names that figure in the journal
# Weight of the latest batch in the running ratio of predicted to measured step times.
WEIGHT = 0.05

Note = Callable[[ConfigurationId, dict[str, Any]], object]


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
        self._known: dict[ConfigurationId, ConfigurationEstimate] = {}
        self._fixed = {method: FixedMoveCost() for method in MoveMethod}
        self._fixed_noted_s = {method: part.seconds for method, part in self._fixed.items()}
        self._begin(fleet)

    def assume(self, assumed: AssumedProfile) -> None:
        """Take in an implicit configuration, unless it is known. Without a prior it is believed from LEAST_SAMPLES
        observed batches on."""
        if assumed.configuration not in self._known:
            profile, refitter = assumed.profile, self._guess_refitter(assumed.profile)
            self._known[profile.id] = ConfigurationEstimate(
                profile, profile, refitter, assumed=assumed, scaled=bool(assumed.prior)
            )

    def forget_implicit(self, used: Collection[ConfigurationId]) -> None:
        """Let go of implicit configurations but those that engines are still of."""
        self._known = {id: known for id, known in self._known.items() if known.assumed is None or id in used}

    def batches_taken(self, configuration: ConfigurationId) -> int:
        known = self._known.get(configuration)
        return 0 if known is None else known.taken

    def configured(self, fleet: FleetSettings) -> None:
        """Take over a reloaded configuration. What was learnt stays, unless what it rests on has changed."""
        if (fleet.configurations, fleet.profile_value()) != self._costs:
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
            if self._recompute is not None:
                self._recompute.observe(sum(contexts), seconds[engine])
            configuration = configuration_of(engine)
            if configuration in self._known:
                self._known[configuration].refitter.observe_recompute(contexts, seconds[engine])

    def _learn_fixed(self, action: MoveRequests, result: OperationResult) -> None:
        """Moves of one operation met the same stall, if there was one: they count as one."""
        found = fixed_parts(action.moves, result.items)
        for method in MoveMethod:
            seconds = [seconds for by, seconds in found if by is method]
            if not seconds:
                continue
            part = self._fixed[method] = self._fixed[method].after(median(seconds))
            before_s = self._fixed_noted_s[method]
            if abs(part.seconds - before_s) > NOTABLE_FIGURE * before_s:
                self._fixed_noted_s[method] = part.seconds
                body = {"figure": MOVE_FIXED, "method": method, "value": part.seconds, "before": before_s}
                self._note(ConfigurationId(""), {**body, "samples": len(part.measured_s)})

    def recover_fixed(self, method: MoveMethod, seconds: float) -> None:
        """Begin with the fixed part that an earlier daemon had learnt for moves by `method`."""
        self._fixed[method] = FixedMoveCost(seconds)
        self._fixed_noted_s[method] = seconds

    def _loaded(self, configuration: ConfigurationId | None, item: OperationItemResult) -> None:
        """Each GPU of an engine has its part of the KV, and they send at once."""
        if configuration in self._known and self._transfers is not None:
            tokens = max(1, round(item.loaded_tokens / self._known[configuration].profile.parallelism.gpus))
            self._transfers.observe(tokens * self._priced.kv_bytes_per_token, item.duration_s)

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
                prefill = known.refitter.prefill_tokens_per_s(known.profile.step)
                self._accept_figure(known, "prefill_tokens_per_s", prefill)
                self._accept_figure(known, "switch_s", known.refitter.switch_s())

    # --- answer

    def cost_estimates(self) -> CostEstimates:
        """All of it as of now, to decide with elsewhere while reports come in."""
        estimates = self.estimates()
        written = {known.given.id: known.as_written for known in estimates}
        return CostEstimates(
            tuple(known.profile for known in estimates), {id: line for id, line in written.items() if line is not None}
        )

    def estimates(self) -> tuple[ConfigurationEstimate, ...]:
        return tuple(known for known in self._known.values() if known.scaled)

    def moves(self) -> MoveCosts | None:
        """What moving is now believed to cost; None where no profile says anything of it."""
        fitted = None if self._recompute is None else self._recompute.fitted()
        if self._moves is None or fitted is None:
            return self._moves
        provenance = measured(self._today(), fitted.error, self._moves.provenance)
        return replace(self._moves, recompute_s=fitted.curve, provenance=provenance)

    def moving(self, nic_share: float = 1.0) -> MoveEstimate:
        """The same for a plan. KV is handed over only where the configuration says that engines can; between nodes with
        that share of the NICs."""
        moves, links = self.moves(), self._links
        rebuilt_tokens = moves.rebuilt_tokens() if moves is not None else None
        recompute_s = self.recompute_fixed_s
        if links is None:
            return MoveEstimate(KvTransferCost(0.0, 0.0, 0.0, rebuilt_tokens, recompute_s), 0.0)
        across_gbps = links.inter_node_gbps_per_gpu or (moves.transfer_gbps if moves is not None else 0.0)
        latency_s = self._fixed[MoveMethod.TRANSFER].seconds
        inside_gbps = links.intra_node_gbps_per_gpu or across_gbps
        kv_bytes = links.kv_bytes_per_token or (moves.kv_bytes_per_token if moves is not None else 0.0)
        fitted = None if self._transfers is None else self._transfers.fitted()
        if fitted is not None:  # moves by KV were measured, whatever way they went
            learnt = replace(self._priced, transfer_s=fitted.curve)
            latency_s, across_gbps = max(0.0, learnt.transfer_s.at(0.0)), learnt.transfer_gbps or across_gbps
            inside_gbps = learnt.transfer_gbps or inside_gbps
        transfer = KvTransferCost(across_gbps * nic_share, inside_gbps, latency_s, rebuilt_tokens, recompute_s)
        return MoveEstimate(transfer, kv_bytes)

    @property
    def recompute_fixed_s(self) -> float:
        """What a running request stands still for when it moves, beside the prefill of its context."""
        return self._fixed[MoveMethod.RECOMPUTE].seconds

    def notes(self) -> tuple[str, ...]:
        """For a plan's reader."""
        fixed = (
            f"moving a running request by {method}: {part.seconds:.3g} s beside its context, by the latest"
            f" {len(part.measured_s)} orders to move"
            for method, part in self._fixed.items()
            if part.measured_s
        )
        return (*(note for estimate in self.estimates() for note in estimate.notes()), *fixed)

    # --- inside

    def _begin(self, fleet: FleetSettings) -> None:
        self._costs = fleet.configurations, fleet.profile_value()
        profile, lines = fleet.profile_value(), {settings.id: settings.value() for settings in fleet.configurations}
        moves = self._moves = profile.moves if profile is not None else None
        rebuilt_tokens = moves.rebuilt_tokens() if moves is not None else None
        self._recompute = CurveRefitter(moves.recompute_s) if moves is not None else None
        self._begin_transfers(fleet.kv_transfer)
        given = [given_profile(line, self._today()) for line in lines.values()]
        configured = {
            engine.id: ConfigurationEstimate(
                engine, engine, EngineRefitter(engine, self._today, rebuilt_tokens), lines.get(engine.id)
            )
            for engine in (*given, *(profile.configurations if profile is not None else ()))
        }
        # What engines report of themselves does not rest on the configuration.
        implicit = {id: known for id, known in self._known.items() if known.assumed is not None}
        self._known = {**configured, **implicit, **configured}  # configured ones come first, and count

    def _begin_transfers(self, links: KvTransfer | None) -> None:
        """Believe what is configured of handing KV over, until moves were measured."""
        self._links = links
        self._transfers: CurveRefitter | None = None
        if links is not None:
            moves, latency_s = self.moves(), links.latency_s
            if latency_s is None:
                latency_s = moves.transfer_s.at(0.0) if moves is not None else 0.0
            self._fixed[MoveMethod.TRANSFER] = FixedMoveCost(latency_s + FIXED_PRIOR_S)
            self._fixed_noted_s[MoveMethod.TRANSFER] = latency_s + FIXED_PRIOR_S
            told = self.moving()
            self._priced = MoveCosts(told.kv_bytes_per_token, _line(told.transfer), Curve.line(0.0, 0.0))
            self._transfers = CurveRefitter(self._priced.transfer_s)

    def _learn(self, known: ConfigurationEstimate, batch: StepSample) -> None:
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
        ratio = known.profile.step.at(batch.sequences, batch.kv_tokens) / batch.step_s
        before = ratio if known.predicted_ratio is None else known.predicted_ratio
        known.predicted_ratio = (1 - WEIGHT) * before + WEIGHT * ratio
        known.loads.append(batch)
        known.taken += 1
        if not known.scaled and len(known.loads) >= LEAST_SAMPLES:
            self._scale(known)

    def _scale(self, known: ConfigurationEstimate) -> None:
        """Believe a shape from now on, at the scale of the batches seen so far; prefill is scaled with it."""
        shape = known.given
        factor = median(load.step_s / shape.step.at(load.sequences, load.kv_tokens) for load in known.loads)
        base_s = Curve(shape.step.base_s.xs, tuple(factor * y for y in shape.step.base_s.ys))
        step = StepTime(base_s, factor * shape.step.kv_s_per_token)
        profile = replace(shape, step=step, prefill_tokens_per_s=shape.prefill_tokens_per_s / factor)
        known.given = known.profile = profile
        known.refitter, known.scaled, known.predicted_ratio = self._guess_refitter(profile), True, None
        for load in known.loads:
            known.refitter.observe(*load)
        logger.info("%s: step times are known from %d observed batches", profile.id, len(known.loads))

    def _guess_refitter(self, profile: EngineProfile) -> EngineRefitter:
        return EngineRefitter(profile, self._today, plausible=math.inf)

    def _accept_step(self, known: ConfigurationEstimate, found: EngineProfile) -> None:
        change = fmean([abs(ratio - 1) for ratio in known.step_ratios(found, known.profile)] or [0.0])
        if found.step is known.profile.step or change < NOTABLE:
            return
        known.profile = replace(known.profile, step=found.step, provenance=found.provenance)
        known.predicted_ratio = None  # of another prediction
        factor = known.factor
        body = {
            "figure": "step_s",
            "step_time_factor": factor,
            "changed_by": change,
            **_fit_of(found.provenance),
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
                found.provenance.samples,
                "; is it an engine of this configuration?" if suspect else "",
            ),
        )

    def _accept_figure(self, known: ConfigurationEstimate, name: str, found: RefittedFigure | None) -> None:
        before: float = getattr(known.profile, name)
        if found is None or not abs(found.value - before) > NOTABLE_FIGURE * before:
            return
        learnt: dict[str, Any] = {name: found.value}
        known.profile, known.figures[name] = replace(known.profile, **learnt), found
        body = {
            "figure": name,
            "value": found.value,
            "before": before,
            "configured": getattr(known.given, name),
            "by": found.provenance.detail,
            **_fit_of(found.provenance),
        }
        self._note(known.given.id, body)
        logger.info("%s: %s is %.3g, was %.3g (%s)", known.given.id, name, found.value, before, found.provenance.detail)


def _line(transfer: KvTransferCost) -> Curve:
    """Seconds over bytes, between one GPU and another on another node."""
    gbps = transfer.inter_node_gbps_per_gpu
    return Curve.line(transfer.latency_s, 8 / (gbps * 1e9) if gbps > 0 else 0.0)


def _rates_of(links: KvTransfer | None) -> object:
    return None if links is None else links.model_copy(update={"weights": ""})


def _fit_of(provenance: Provenance) -> dict[str, Any]:
    return {name: getattr(provenance, name) for name in ("samples", "fit_error_mean", "fit_error_max")}
