"""A weight sync with requests in flight: one version at rest, the next while a step runs, and whether every token is
of the version that its span names."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from orchestrrl.engines.base import Engine, weights_engine
from orchestrrl.lab.demo.scenario import DemoScenario, Sample, samples
from orchestrrl.lab.demo.step import DemoStepRecord, Report, run_step
from orchestrrl.lab.demo.sync_stack import AFTER, BEFORE, TRAINER, sync_stack
from orchestrrl.lab.simulated_engine.tokens import EOS, TokenModel
from orchestrrl.lab.simulated_engine.weights import read_weights
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.processes import until
from orchestrrl.lab.testbed.stack import Stack
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, telemetry_pb2
from orchestrrl.weights.controller.profile import SyncProfile, profile
from orchestrrl.weights.controller.reports import SyncReport
from orchestrrl.weights.trainer.checkpoint import checkpoint_pieces
from orchestrrl.weights.trainer.client import WeightsClient
from planner.model import RequestId

LOOK_S = 0.05


@dataclass(slots=True)
class SyncOutcome:
    """What came of the version that was published while requests ran."""

    profile: SyncProfile
    engines: int
    serve_it: int  # engines that say they have it
    requests: int
    answered: int
    crossed: int  # answers with tokens of both versions
    tokens: dict[int | None, int]  # by version, as spans say
    differing: int  # tokens that are not those of the version which their span names
    faults: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        return (
            self.profile.report.code == "done"
            and self.serve_it == self.engines
            and self.answered == self.requests
            and not self.differing
            and set(self.tokens) <= {BEFORE, AFTER}
        )


@dataclass(frozen=True, slots=True)
class AnswerStretch:
    """Tokens of one span of an answer, and all before them."""

    sample: Sample
    version: int | None
    context: tuple[int, ...]
    ids: tuple[int, ...]


async def run_sync(
    scenario: DemoScenario,
    engine: str,
    running: Sequence[LocalEngine],
    stack: Stack,
    clients: Sequence[Engine],
    out_dir: Path,
    report: Report,
) -> SyncOutcome:
    """Raises Permanent where a version does not become the fleet's."""
    assert scenario.sync is not None, "the scenario has new weights"
    smaller = scenario.model_copy(update={"prompts": scenario.sync.prompts, "max_tokens": scenario.sync.max_tokens})
    step = [replace(each, id=RequestId(f"sync-{each.id}")) for each in samples(smaller, engine, scenario.seeds[0])]
    ask = partial(run_step, smaller, engines=clients, hold=engine == "simulated")
    report("starting peers", 0, 0)
    synced = await sync_stack(scenario, engine, running, stack, out_dir)
    with WeightsClient(stack.daemon_address, peer=TRAINER, folder=synced.folder) as trainer:

        async def publish(version: int) -> SyncReport:
            return await asyncio.to_thread(
                trainer.publish_arrays, version, checkpoint_pieces(synced.checkpoints[version])
            )

        report("the first weights", 0, 0)
        await publish(BEFORE)
        undisturbed = DemoStepRecord()
        if engine != "simulated":
            undisturbed = await ask(
                step, lambda each: running[each.dealt_to].url, progress=partial(report, "undisturbed")
            )
        published: list[SyncReport] = []

        async def between() -> None:
            await _under_way(stack.daemon_address, len(clients))
            published.append(await publish(AFTER))

        record = await ask(
            step,
            lambda _: stack.gateway_url,
            progress=partial(report, "new weights meanwhile"),
            begun=between,
            spans=True,
        )
    told = stretches(step, record)
    if engine == "simulated":
        seeds = {version: read_weights(folder).seed for version, folder in synced.checkpoints.items()}
        expected = [simulated_ids(smaller, seeds, each) for each in told]
    else:
        later = _continued(told)
        again = await ask(
            later, lambda each: running[each.dealt_to].url, progress=partial(report, "undisturbed, new weights")
        )
        expected = [_of(undisturbed if each.version == BEFORE else again, each) for each in told]
    (ended,) = published
    return SyncOutcome(
        profile(ended),
        len(clients),
        await _serving(clients),
        len(step),
        len(record.answers),
        _crossed(record),
        _tokens(told),
        sum(_differing(each.ids, ids) for each, ids in zip(told, expected, strict=True)),
        [f"{request}: {fault}" for request, fault in (record.faults | undisturbed.faults).items()],
    )


async def _under_way(daemon_address: str, engines: int) -> None:
    """Until every engine has had something to do, as the gateway tells it: engines that are busy answer late. Raises
    Permanent."""
    seen: set[str] = set()
    async with ControlClient(daemon_address) as control:

        async def all_had_some() -> bool:
            listed = await control.call(control.control.ListRequests, control_pb2.ListRequestsRequest())
            running = {each.engine_id for each in listed.requests if each.state == telemetry_pb2.REQUEST_STATE_RUNNING}
            seen.update(running)
            return len(seen) == engines or bool(seen and not listed.requests)  # over already: then between two steps

        await until(all_had_some, f"{engines} engines have requests", every_s=LOOK_S)


async def _serving(clients: Sequence[Engine]) -> int:
    """Engines that say they have the new version."""
    told = await asyncio.gather(*(weights_engine(client).loaded() for client in clients))
    return sum(each is not None and each.version == AFTER for each in told)


# --- what answers say, and what they should


def stretches(step: Sequence[Sample], record: DemoStepRecord) -> list[AnswerStretch]:
    """Of all answers, in order."""
    found = []
    for sample in step:
        ids = record.answers.get(sample.id, [])
        for span in record.spans.get(sample.id, []):
            before = (*sample.prompt_ids, *ids[: span.start])
            found.append(AnswerStretch(sample, span.version, before, tuple(ids[span.start : span.end])))
    return found


def simulated_ids(scenario: DemoScenario, seeds: Mapping[int, int], stretch: AnswerStretch) -> list[int]:
    """What a simulated engine with that version goes on with, computed without any engine. `seeds`: by version, what
    its bytes come to."""
    if stretch.version is None or stretch.version not in seeds:
        return []
    model = TokenModel(lengths=scenario.lengths.model, weights_seed=seeds[stretch.version])
    generation = model.begin(stretch.context)
    ids = [generation.next_token()[0] for _ in stretch.ids]
    if stretch.ids and stretch.ids[-1] == EOS:  # it ends by itself
        ids[-1] = EOS
    return ids


def _continued(stretches: Sequence[AnswerStretch]) -> list[Sample]:
    """The stretches of the new version as requests of their own."""
    return [
        replace(
            each.sample, id=RequestId(f"again-{each.sample.id}"), prompt_ids=each.context, output_tokens=len(each.ids)
        )
        for each in stretches
        if each.version == AFTER and each.ids
    ]


def _of(record: DemoStepRecord, stretch: AnswerStretch) -> list[int]:
    """The answer to the request itself, or to what goes on from its middle."""
    id = stretch.sample.id
    ids = record.answers.get(id) or record.answers.get(RequestId(f"again-{id}"), [])
    return ids[: len(stretch.ids)]


def _differing(ids: Sequence[int], expected: Sequence[int]) -> int:
    return sum(one != other for one, other in zip(ids, expected, strict=False)) + abs(len(ids) - len(expected))


def _crossed(record: DemoStepRecord) -> int:
    return sum(len({span.version for span in spans}) > 1 for spans in record.spans.values())


def _tokens(stretches: Sequence[AnswerStretch]) -> dict[int | None, int]:
    tokens: dict[int | None, int] = {}
    for each in stretches:
        tokens[each.version] = tokens.get(each.version, 0) + len(each.ids)
    return tokens
