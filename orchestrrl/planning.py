"""What both loops expect: what engines and moves cost, how long outputs become, who else uses the links. With it, the
question that the slow loop puts to the planner.

Telemetry comes in on the event loop; a question, once put, may be answered in a thread: it holds all it needs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from orchestrrl.config import Config, FastPolicy
from orchestrrl.futures import KnownFutures
from orchestrrl.journal import Journal, Kind
from orchestrrl.live_profile import LiveProfile, Note
from orchestrrl.move_methods import MoveCosting
from orchestrrl.outlook import Outlook
from orchestrrl.plans import EngineStart
from orchestrrl.reports import EngineReport
from orchestrrl.room import Futures
from orchestrrl.step_lengths import StepLengths
from planner.gate import Control
from planner.model import Configuration, ConfigurationId, EngineId, Knowledge, Mode, Plan, PlanId, RequestId, Snapshot
from planner.plan import History, PlannerConfig, make_plan, remaining_of
from planner.series import StepForecast

STARTS_REMEMBERED = 256
# Of the time until the end, that a plan's moves must gain where the fast loop does not pack.
REBALANCE_SHARE = 0.05
NICS_ALL_BUT_FREE = 0.995
# A move that could fill a node's NICs has less of them than this only where others want more than there is.
NICS_CROWDED = 0.5


class Planning:
    """`note` and `today` as LiveProfile wants them."""

    def __init__(self, config: Config, note: Note, today: Callable[[], str]) -> None:
        self.costs = LiveProfile(config.fleet, note, today)
        self.lengths = _step_lengths(config)
        self.lines = config.fleet.configuration_values()  # of all configurations, as of the latest plan
        self.known_output_tokens: Mapping[RequestId, int] | None = None  # told by a simulation, for an oracle's plans
        self.nic_share = 1.0  # that moves have; whoever watches the links sets it, and who takes the rest
        self.nic_taken_by: Sequence[str] = ()
        self.unstartable: Mapping[ConfigurationId, str] = {}  # why no engine of these can be started
        self._config = config
        self._outlook = Outlook()
        self._expected: StepForecast | None = None  # of this step, as the slow loop last forecast it

    # --- learn

    def recover(self, journal: Journal) -> None:
        """Take up what earlier generations wrote down."""
        self.lengths.recover(journal)
        # Engines are started seldom: what starts take is not learnt anew by every daemon.
        for entry in journal.tail(STARTS_REMEMBERED, (Kind.ENGINE_STARTED,)):
            if "took_s" in entry.body:
                name = ConfigurationId(entry.body["configuration"])
                self.costs.started([EngineStart(name, entry.body["took_s"], entry.body["expected_s"])])

    def reconfigure(self, config: Config, snapshot: Snapshot, journal: Journal) -> None:
        """Take over a reloaded configuration."""
        before, self._config = self._config.slow, config
        if (before.bin_tokens, before.max_output_tokens) != (config.slow.bin_tokens, config.slow.max_output_tokens):
            self.lengths = _step_lengths(config)
            self.lengths.recover(journal)
        self.costs.configured(config.fleet)
        self.lines = self.costs.believed().lines(snapshot, gpus_count(config, snapshot))

    def observe(self, report: EngineReport, configuration: ConfigurationId | None) -> None:
        """A report that was taken in. Steps on crowded links say nothing of the engine."""
        self.costs.observe(report, configuration, crowded_links=self.nic_share < NICS_CROWDED)

    # --- answer

    def remaining_tokens(self, snapshot: Snapshot) -> Mapping[RequestId, float]:
        """What the fast loop expects of the requests in flight."""
        if self._config.fast.policy is FastPolicy.NONE:
            return {}
        slow, known = self._config.slow, self.known_output_tokens
        if known is not None and slow.knowledge is Knowledge.ORACLE:
            return {
                request.id: max(1.0, known[request.id] - request.generated_tokens)
                for request in snapshot.requests
                if request.id in known
            }
        return self._outlook.remaining_tokens(snapshot, slow.bin_tokens, slow.max_output_tokens, self._expected)

    def futures(self, snapshot: Snapshot) -> Futures | None:
        """How long the requests in flight may go on, as of the latest `remaining_tokens`; None: nobody knows."""
        known = self.known_output_tokens
        if self._config.fast.policy is FastPolicy.NONE:
            return None
        if known is not None and self._config.slow.knowledge is Knowledge.ORACLE:
            return KnownFutures(known) if all(request.id in known for request in snapshot.requests) else None
        return self._outlook.futures

    def question(
        self,
        plan_id: PlanId,
        snapshot: Snapshot,
        history: History,
        *,
        mode: Mode,
        control: Control,
        can_deploy: bool,
    ) -> Callable[[], Plan]:
        """What is to be asked now; calling it makes the plan, notes on what it rests on included."""
        self.costs.refit(engine.id for engine in snapshot.engines)
        overriding = () if control.configuration is None else (control.configuration,)
        gpus, costs = gpus_count(self._config, snapshot), self.costs.believed()
        notes = (*self.costs.notes(), *self._nic_notes())
        running = {engine.configuration for engine in snapshot.engines}
        barred = {id: why for id, why in self.unstartable.items() if id not in running}
        worth = [id for id in costs.worth(snapshot, gpus, overriding) if id not in barred]
        notes = (*notes, *(f"{id} is left out: {why}" for id, why in sorted(barred.items())))
        settings = planner_config(self._config, (), gpus, can_deploy=can_deploy)
        settings = replace(settings, **self.costs.moving(self.nic_share)._asdict())
        lengths = self.lengths

        def decide() -> Plan:
            self._expected = lengths.expected()
            told = replace(history, before=self._expected)
            remaining = () if costs.straight else remaining_of(snapshot, settings, told)
            self.lines = costs.lines(snapshot, gpus, remaining)
            choices = replace(settings, configurations=tuple(line for line in self.lines if line.id in worth))
            plan = make_plan(plan_id, snapshot, choices, mode=mode, control=control, history=told)
            return replace(plan, notes=(*plan.notes, *notes))

        return decide

    def move_costing(self, kv_versions: Mapping[EngineId, str]) -> MoveCosting:
        """What single moves are priced by, now."""
        gpus = self._config.fleet.gpus
        profiles = {profile.id: profile for profile in self.costs.believed().profiles}
        return MoveCosting(profiles, self.costs.moving(self.nic_share), gpus.per_node if gpus else 8, kv_versions)

    def _nic_notes(self) -> Sequence[str]:
        if self.nic_share >= NICS_ALL_BUT_FREE:
            return ()
        take = "takes" if len(self.nic_taken_by) == 1 else "take"
        taken = f"moves have {self.nic_share:.0%} of the NICs: {' and '.join(self.nic_taken_by)} {take} the rest"
        if self._config.fleet.kv_transfer is None:
            return (taken,)
        return (f"{taken}, and KV between nodes is priced at {1 / self.nic_share:.1f} times its time",)


def _step_lengths(config: Config) -> StepLengths:
    return StepLengths(config.slow.bin_tokens, config.slow.max_output_tokens)


def gpus_count(config: Config, snapshot: Snapshot) -> int:
    """Those that may serve. Without fleet.gpus, the ones that the engines have."""
    if config.fleet.gpus is not None:
        return config.fleet.gpus.count
    needed = {configuration.id: configuration.gpus for configuration in config.fleet.configuration_values()}
    return max(1, sum(needed[engine.configuration] for engine in snapshot.engines if engine.configuration in needed))


def planner_config(
    config: Config, configurations: tuple[Configuration, ...], gpus: int, *, can_deploy: bool
) -> PlannerConfig:
    """What the planner may choose from."""
    slow = config.slow
    # The fast loop packs every second by the same lengths: a plan that moves requests as well undoes what that has
    # settled, unless it knows the lengths (which waives the share).
    moves_itself = config.fast.policy is not FastPolicy.PACKING
    return PlannerConfig(
        configurations=configurations,
        gpus_count=gpus,
        per_node=config.fleet.gpus.per_node if config.fleet.gpus else 8,
        epsilon_s=slow.epsilon_s,
        rebalance_share=REBALANCE_SHARE if moves_itself else 1.0,
        cooldown_s=slow.cooldown_s,
        interval_s=slow.interval_s,
        stale_after_s=slow.stale_after_s,
        bin_tokens=slow.bin_tokens,
        max_output_tokens=slow.max_output_tokens,
        max_moves_per_request=config.fast.max_moves_per_request,
        scenarios=slow.scenarios,
        work_budget=slow.work_budget,
        knowledge=slow.knowledge,
        can_deploy=can_deploy,
    )
