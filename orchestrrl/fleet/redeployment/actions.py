"""Carry out single steps of a redeployment. Each step is idempotent: it reads the present state before it changes
anything.

steps.py defines the order of steps; run.py journals them and undoes them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from orchestrrl.core.clock import Clock, within
from orchestrrl.core.config.schema import FleetSettings
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operations import MovesOutcome
from orchestrrl.engines.base import AnswerExcerpt, EngineCapabilities, ManagedEngine, weights_engine
from orchestrrl.fleet.deployers.base import DeployedInstance, Deployer, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.launch import spec_of
from orchestrrl.fleet.redeployment import checks
from orchestrrl.fleet.redeployment.book import RedeploymentOutcome
from orchestrrl.fleet.redeployment.emptying import Emptying
from orchestrrl.fleet.redeployment.steps import Redeployment, RedeployStep, RedeployTimeouts, ServedWeights, StepKind
from orchestrrl.fleet.routes import RoutingTable
from orchestrrl.fleet.state import EngineFacts, FleetState
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, Plan, PlanId, RequestMove, Snapshot

logger = logging.getLogger(__name__)

POLL_S = 0.1
# Limit for fetching reference answers, which delays the start of a redeployment or the stop of an engine.
REFERENCE_WITHIN_S = 10.0


class FleetControl(Protocol):
    """The interface of the control plane that redeployments use."""

    journal: Journal
    clock: Clock
    state: FleetState
    routes: RoutingTable

    async def carry_out(self, moves: Sequence[RequestMove], snapshot: Snapshot) -> MovesOutcome:
        """Carry out moves of requests, regardless of the daemon's mode, and return their outcome."""

    def plan_named(self, plan: str) -> Plan:
        """Return the plan with this id. Raises Permanent if the plan is no longer stored."""

    def redeployment_hold(self) -> str:
        """Return why no engine may be changed now, or an empty string if a change is allowed."""

    def redeployment_ended(self, plan: PlanId, outcome: RedeploymentOutcome) -> None: ...

    def weights_reported(self, engines: Sequence[EngineId], weights: ServedWeights) -> None:
        """Record that these engines serve `weights`. Version None means the weights with which they were started."""

    def current_weights(self) -> ServedWeights:
        """Return the weights that all engines must serve."""

    def engine_stopped(self, engine: EngineId) -> None:
        """Record that the engine no longer serves. The caller must call `engines_deployed` afterwards."""

    def engines_deployed(self, running: Mapping[EngineId, DeployedInstance]) -> None:
        """Watch exactly these engines of the deployer from now on, and update the gateways' routes."""

    async def circuits_follow(self, engines: Sequence[EngineSpec]) -> str:
        """Allocate circuits for exactly these engines, which are about to serve. Return a remark on the result, or an
        empty string if no fabric is configured. The method raises no errors and returns within a limited time."""


MakeSpec = Callable[[FleetSettings, EngineId, ConfigurationId, Sequence[GpuId]], EngineSpec]


@dataclass(frozen=True, slots=True)
class FleetDeployment:
    """The functions that start and reach engines, and the settings of redeployments. `make_spec` returns the spec of an
    engine of a configuration on given GPUs, and raises ProblemFaults if the engine cannot be started. `gpus_count` is
    the number of GPUs in the fleet, and `per_node` is the number of GPUs per node."""

    deployer: Deployer
    connect: Callable[[str], ManagedEngine]
    gpus_count: int
    per_node: int
    make_spec: MakeSpec = spec_of
    limits: RedeployTimeouts = field(default_factory=RedeployTimeouts)
    tolerance: checks.AnswerTolerance = field(default_factory=checks.AnswerTolerance)
    keep_asleep: bool = False  # put engines that can sleep to sleep instead of stopping them

    def unstartable(self, fleet: FleetSettings) -> dict[ConfigurationId, str]:
        """Return the configurations that the deployer cannot start, each with the reason. Plans must not choose them.
        Configurations that need more GPUs than the fleet has are left out, because the planner excludes them itself."""
        why = {}
        for configuration in fleet.configuration_values():
            if configuration.gpus > self.gpus_count:
                continue  # the planner excludes these itself
            id = configuration.id
            try:
                gpus = [GpuId(gpu) for gpu in range(configuration.gpus)]
                self.deployer.check(self.make_spec(fleet, EngineId(f"{id}-0"), id, gpus))
            except (ProblemFaults, Permanent) as error:
                why[id] = "; ".join(str(error).splitlines())
        return why


def take_stock(running: dict[EngineId, DeployedInstance], found: Iterable[DeployedInstance]) -> None:
    """Replace the contents of `running` with the engines in `found`."""
    running.clear()
    running.update({deployed.engine: deployed for deployed in found})


@dataclass(slots=True)
class RedeployActions:
    """The actions of one redeployment. `running` holds the deployer's engines and is shared with the controller."""

    control_plane: FleetControl
    deployment: FleetDeployment
    configurations: Mapping[ConfigurationId, Configuration]
    running: dict[EngineId, DeployedInstance]
    redeployment: Redeployment
    going_back: bool = False
    capacity_tokens: dict[EngineId, int] = field(default_factory=dict)  # as verified
    offers: dict[EngineId, EngineCapabilities] = field(default_factory=dict)  # as verified
    loaded: set[EngineId] = field(default_factory=set)  # by this redeployment, with the current weights
    waits_for: dict[EngineId, str] = field(default_factory=dict)  # what a running step is waiting for
    _fetches_reference: bool = False
    emptying: Emptying = field(init=False)

    def __post_init__(self) -> None:
        self.emptying = Emptying(self.control_plane, self.redeployment, self.configurations)

    @property
    def _clock(self) -> Clock:
        return self.control_plane.clock

    def _spec(self, engine: EngineId) -> EngineSpec:
        """Return the engine's spec. If the redeployment scales the engine, which then has an old and a new spec, return
        the new spec. While the redeployment is undone, return the old spec instead."""
        new, old = self.redeployment.new, self.redeployment.old
        specs = (*old, *new, *self.redeployment.asleep) if self.going_back else (*new, *old, *self.redeployment.asleep)
        return next(spec for spec in specs if spec.engine == engine)

    async def carry_out(self, step: RedeployStep) -> str:
        """Carry out one step of the redeployment or, if `going_back` is set, of its undo. Return a remark for the
        report. Raises OrchestrRLError if the step fails."""
        kind, engine = step.kind, step.engine
        if kind is StepKind.FENCE:
            return self._fence()
        if kind is StepKind.ADMIT:
            return await self._admit()
        if engine is None:
            return ""
        if kind in (StepKind.STOP, StepKind.SLEEP) and not self.going_back:
            await self._fetch_reference(engine)
        self.waits_for.pop(engine, None)
        if kind in (StepKind.START, StepKind.WAKE, StepKind.STOP, StepKind.SLEEP):
            self.loaded.discard(engine)
        actions = {
            StepKind.EVACUATE: self._evacuate,
            StepKind.STOP: self.stop,
            StepKind.RETIRE: self.stop,
            StepKind.SLEEP: self._sleep,
            StepKind.START: self._start,
            StepKind.WAKE: self._wake,
            StepKind.SCALE: self._scale,
            StepKind.READY: self._until_ready,
            StepKind.LOAD: self._load,
            StepKind.WARM_UP: self._warm_up,
            StepKind.VERIFY: self._verify,
        }
        return await actions[kind](engine)

    async def reference(self, *, patient: bool) -> AnswerExcerpt | None:
        """Return a reference answer from the least loaded serving engine that can provide one, or None if no engine
        can. A fully loaded engine generates the answer only after other requests end, so it is used only if `patient`
        is True. If `patient` is False, the caller can fetch an answer later, before the first engine stops."""
        found: list[tuple[bool, int, EngineId]] = []
        for spec in self.redeployment.old:
            deployed = self.running.get(spec.engine)
            if deployed is None or deployed.life is not EngineLife.ALIVE or not deployed.url:
                continue
            with _warning(spec.engine):
                async with self._client(spec.engine) as client:
                    metrics = await client.metrics()
                known = self.configurations.get(spec.configuration)
                full = metrics.waiting > 0 or (known is not None and metrics.running >= known.max_sequences)
                found.append((full, metrics.running + metrics.waiting, spec.engine))
        for full, _, engine in sorted(found):
            if not full or patient:
                with _warning(engine):
                    return await self._excerpt(engine)
        return None

    async def _excerpt(self, engine: EngineId) -> AnswerExcerpt:
        async with self._client(engine) as client:
            return await client.excerpt(checks.CANARY_IDS, self.deployment.tolerance.tokens)

    async def _fetch_reference(self, engine: EngineId) -> None:
        """Fetch the reference answer before an engine stops, unless it is already known. If several engines stop in
        parallel, only one of them is queried."""
        if self.redeployment.reference is not None or self._fetches_reference or engine not in self.running:
            return
        self._fetches_reference = True
        with _warning(engine):
            self.compare_with(await within(self._clock, REFERENCE_WITHIN_S, self._excerpt(engine)))
        self._fetches_reference = False

    def compare_with(self, reference: AnswerExcerpt | None) -> None:
        self.redeployment = replace(self.redeployment, reference=reference)

    def expect(self, engines: Iterable[EngineId]) -> None:
        """Announce that these engines, and no other engines of the redeployment, will serve soon. Until they are
        admitted or their time limit passes, gateways send them no requests, but keep the requests that are moved to
        them."""
        limits = self.redeployment.limits
        lasts_s = limits.drain_s + limits.stop_s + limits.start_s + limits.ready_s + limits.load_s + 2 * limits.check_s
        self._expect_nobody()
        self.control_plane.routes.expected.update(dict.fromkeys(engines, self._clock.now_s() + lasts_s))
        self.control_plane.engines_deployed(self.running)

    def let_be(self) -> None:
        """Clear all fences and expectations of this redeployment, so that requests may go to any serving engine."""
        self.control_plane.routes.draining.difference_update(
            spec.engine for spec in (*self.redeployment.old, *self.redeployment.new)
        )
        self._expect_nobody()
        self.control_plane.engines_deployed(self.running)

    def _expect_nobody(self) -> None:
        for spec in (*self.redeployment.old, *self.redeployment.new):
            self.control_plane.routes.expected.pop(spec.engine, None)

    async def scan(self) -> None:
        """Update `running` with the engines that the deployer lists."""
        take_stock(self.running, await self.deployment.deployer.list_engines())

    # --- steps of the fleet

    def _fence(self) -> str:
        leaving = [spec.engine for spec in (*self.redeployment.leaving, *(new for _, new in self.redeployment.scaled))]
        self.control_plane.routes.draining.update(leaving)
        self.control_plane.engines_deployed(self.running)
        return f"{len(leaving)} engines accept no new requests"

    async def _check_before_admission(self, engines: Sequence[EngineId]) -> None:
        """Raise Permanent if the fleet's weights have changed since the redeployment began, or if one of these engines
        has ended. The engines may have been verified long ago, because other engines needed longer to start. Requests
        must not go to dead engines or outdated weights."""
        began, now = self.redeployment.weights, self.control_plane.current_weights()
        if now.version != began.version and now.source:
            raise Permanent(
                f"the fleet's weights changed from version {began.version} to {now.version} during the redeployment"
            )
        for engine in engines:
            found = await self.deployment.deployer.status(engine)
            if found is None or found.life is EngineLife.ENDED:
                raise Permanent(
                    f"engine {engine} ended before serving requests: {found.detail if found else 'no process is left'}"
                )

    async def _admit(self) -> str:
        """Send requests to the prepared engines. While the redeployment is undone, send them to the old engines that
        are alive instead. Clear fences and expectations."""
        serving: Sequence[EngineSpec]
        if self.going_back:
            alive = {engine for engine, up in self.running.items() if up.life is EngineLife.ALIVE}
            serving = [spec for spec in self.redeployment.old if spec.engine in alive]
            engines = [spec.engine for spec in serving]
        else:
            serving, engines = self.redeployment.new, [spec.engine for spec in self.redeployment.preparing]
            await self._check_before_admission(engines)
        circuits = await self.control_plane.circuits_follow(serving)
        for engine in engines:
            up, kv_tokens = self.running[engine], self.capacity_tokens.get(engine)  # as verified, otherwise as planned
            facts = EngineFacts(engine, up.url, gpus=up.gpus, kv_capacity_tokens=kv_tokens)
            self.control_plane.state.add_engine(facts.of(self.configurations.get(up.configuration)))
        try:
            # Nothing new is known of the other engines' weights.
            self.control_plane.weights_reported([engine for engine in engines if engine in self.loaded], self._weights)
        finally:  # a failed journal write must not keep requests from serving engines
            self.let_be()
        return f"requests go to {len(engines)} engines{f'; {circuits}' if circuits else ''}"

    @property
    def _weights(self) -> ServedWeights:
        """Return the weights to load. They are the weights recorded in the redeployment. While the redeployment is
        undone, they are the fleet's current weights, which may have changed since it began."""
        return self.control_plane.current_weights() if self.going_back else self.redeployment.weights

    @property
    def _reference(self) -> AnswerExcerpt | None:
        """Return the reference answer if it was generated with the weight version to load, otherwise None."""
        return self.redeployment.reference if self._weights.version == self.redeployment.weights.version else None

    # --- steps of an engine

    async def _evacuate(self, engine: EngineId) -> str:
        """Move requests off the engine until neither a gateway nor the engine itself reports any."""
        took = 0
        while True:
            took += await self.emptying.order(engine)
            here = self.emptying.here(engine)
            stuck = [request for request in here if not request.movable]
            busy = "" if stuck else await self._busy(engine)
            if not stuck and not busy:
                return f"{took} requests left" if took else "had no requests"
            why = f", {len(stuck)} of them cannot move: {stuck[0].movable_detail}" if stuck else ""
            self.waits_for[engine] = f"{len(here)} requests remain{why}" if here else busy
            await self._clock.sleep(POLL_S)

    async def _busy(self, engine: EngineId) -> str:
        """Return why the engine may still have requests: it reports some, or its metrics cannot be read. Return an
        empty string if it reports none or has ended."""
        deployed = self.running.get(engine)
        if deployed is None or deployed.life is not EngineLife.ALIVE or not deployed.url:
            return ""
        try:
            async with self._client(engine) as client:
                metrics = await client.metrics()
        except OrchestrRLError as error:
            # An ended engine counts as stopped: gateways take their requests back.
            found = await self.deployment.deployer.status(engine)
            return "" if found is None or found.life is EngineLife.ENDED else f"its metrics cannot be read: {error}"
        has = metrics.running + metrics.waiting
        return f"it has {has} requests that no gateway has reported" if has else ""

    async def stop(self, engine: EngineId) -> str:
        held = self.running.pop(engine, None)
        self.control_plane.engines_deployed(self.running)  # stop watching it first
        try:
            await self.deployment.deployer.stop(engine)
        except BaseException:
            if held is not None:
                self.running[engine] = held
            raise
        self.control_plane.engine_stopped(engine)
        self.control_plane.engines_deployed(self.running)
        return ""

    async def _sleep(self, engine: EngineId) -> str:
        async with self._client(engine) as client:
            if not await client.asleep():
                await client.sleep()
        await self.deployment.deployer.lend(engine, lent=True)
        self.running[engine] = replace(self.running[engine], lent=True)
        self.control_plane.engine_stopped(engine)
        self.control_plane.engines_deployed(self.running)
        return ""

    async def _wake(self, engine: EngineId) -> str:
        await self.deployment.deployer.lend(engine, lent=False)
        async with self._client(engine) as client:
            if await client.asleep():
                await client.wake()
        self.running[engine] = replace(self.running[engine], lent=False)
        return ""

    async def _start(self, engine: EngineId) -> str:
        spec = started_with(self._spec(engine), self._weights)
        before = await self.deployment.deployer.status(engine)
        if before is not None and before.life is EngineLife.ENDED:
            await self.deployment.deployer.stop(engine)
        while True:
            try:
                self.running[engine] = await self.deployment.deployer.start(spec)
            except (Retryable, OutcomeUnknown) as error:  # another start is harmless and reveals the state
                self.waits_for[engine] = str(error)
                await self._clock.sleep(error.after_s if isinstance(error, Retryable) else POLL_S)
            else:
                return self.running[engine].url

    async def _scale(self, engine: EngineId) -> str:
        """Scale an engine. GPUs are reserved before the engine grows, and released after it has shrunk."""
        spec = self._spec(engine)
        grows = len(spec.gpus) > len(self.running[engine].gpus)
        if grows:
            self.running[engine] = await self.deployment.deployer.scale(spec)
        async with self._client(engine) as client:
            has, wanted = (await client.layout()).dp, spec.parallelism.dp
            if has != wanted:
                await client.scale(wanted)
        if not grows:
            self.running[engine] = await self.deployment.deployer.scale(spec)
        scaled = self.running.pop(engine)
        self.control_plane.engines_deployed(self.running)  # restart its watch: it has another number of seats
        self.running[engine] = scaled
        return f"has DP {has}" if has == wanted else f"DP {has} to {wanted}"

    async def _until_ready(self, engine: EngineId) -> str:
        """Wait until the engine completes a real request, because an engine can be healthy before it can generate
        tokens. Raises Permanent if the engine ends meanwhile."""
        while True:
            deployed = await self.deployment.deployer.status(engine)
            if deployed is None or deployed.life is EngineLife.ENDED:
                self.waits_for.pop(engine, None)
                raise Permanent(
                    f"engine {engine} ended while it started: {deployed.detail if deployed else 'no process is left'}"
                )
            self.running[engine] = deployed
            if deployed.url:
                try:
                    async with self._client(engine) as client:
                        if await client.healthy():
                            return f"a token in {await client.probe():.3g} s"
                    self.waits_for[engine] = "is not healthy"
                except OrchestrRLError as error:
                    self.waits_for[engine] = str(error)
            await self._clock.sleep(POLL_S)

    async def _load(self, engine: EngineId) -> str:
        wanted, spec = self._weights, self.running[engine].spec
        async with self._client(engine) as client:
            has = None if wanted.version is None else await client.weight_version()
            if wanted.version is None:
                detail = "no weight version is set: it keeps its own"
            elif has == wanted.version:
                detail = f"has version {has}"
            elif not wanted.source:
                raise Permanent(
                    f"engine {engine} has weight version {has}, and the location of version {wanted.version} is"
                    " unknown; run"
                    f" `orchestrrl engines set-version {wanted.version} --weights FOLDER`"
                )
            elif spec is not None and spec.weights == wanted.source:
                await client.name_weights(wanted.version)
                detail = f"was started with version {wanted.version}"
            else:
                await weights_engine(client).load_weights(wanted.source, wanted.version, None)
                detail = f"version {wanted.version}"
        self.loaded.add(engine)
        return detail

    async def _warm_up(self, engine: EngineId) -> str:
        """Run a prompt and some decode steps before real requests arrive. The engine compiles kernels and allocates
        memory during these steps."""
        return f"{len((await self._excerpt(engine)).token_ids)} tokens"

    async def _verify(self, engine: EngineId) -> str:
        spec, wanted = self._spec(engine), self._weights.version
        async with self._client(engine) as client:  # in parallel: some of these may take seconds
            facts = client.layout(), client.metrics(), client.weight_version(), client.capabilities()
            layout, metrics, version, offers, answers = await asyncio.gather(*facts, self._answer_faults(client))
        faults = checks.layout_fault(layout, spec.parallelism)
        if (known := self.configurations.get(spec.configuration)) is not None:
            faults += checks.capacity_fault(metrics.kv_capacity_tokens, known.kv_capacity_tokens)
        if wanted is not None and version is not None and version != wanted:
            faults.append(f"its weights are version {version}, the fleet's are version {wanted}")
        if faults := faults + answers:
            raise Permanent("; ".join(faults))
        self.capacity_tokens[engine] = metrics.kv_capacity_tokens
        self.offers[engine] = offers
        compared = "" if self._reference is not None else "; no reference answers to compare with"
        return f"{layout}, KV of {metrics.kv_capacity_tokens} tokens{compared}"

    async def _answer_faults(self, client: ManagedEngine) -> list[str]:
        written = await client.excerpt(checks.CANARY_IDS, self.deployment.tolerance.tokens)
        faults = checks.reading_fault(written, await client.score(written), self.deployment.tolerance)
        reference = self._reference
        if reference is not None:
            faults += checks.answers_fault(reference, await client.score(reference), self.deployment.tolerance)
            faults += checks.writing_fault(reference, written, self.deployment.tolerance)
        return faults

    @asynccontextmanager
    async def _client(self, engine: EngineId) -> AsyncIterator[ManagedEngine]:
        client = self.deployment.connect(self.running[engine].url)
        try:
            yield client
        finally:
            await client.close()


def started_with(spec: EngineSpec, weights: ServedWeights) -> EngineSpec:
    """Return the spec with `weights` as the initial checkpoint, so that they need not be loaded after the start. Return
    the spec unchanged if the location of the weights is unknown or is not a complete checkpoint."""
    return replace(spec, weights=weights.source) if weights.source and not weights.tensors_only else spec


@contextmanager
def _warning(engine: EngineId) -> Iterator[None]:
    """Log an error of an old engine instead of raising it, because the redeployment can proceed without reference
    answers."""
    try:
        yield
    except OrchestrRLError as error:
        logger.warning("%s: no reference answers: %s", engine, error)
