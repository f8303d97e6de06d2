"""Run a weight sync with requests in flight: publish one version before a step and the next version during it. Then
compare each token of the responses with the token that the version named in its span generates."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from orchestrrl.engines.base import weights_engine
from orchestrrl.lab.demo.scenario import DemoScenario, Sample, samples
from orchestrrl.lab.demo.step import DemoFleet, DemoStepRecord
from orchestrrl.lab.simulated_engine.tokens import EOS, TokenModel
from orchestrrl.lab.simulated_engine.weights import read_weights
from orchestrrl.lab.testbed.engines import make_model
from orchestrrl.lab.testbed.processes import until
from orchestrrl.lab.testbed.stack import Stack
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, telemetry_pb2
from orchestrrl.weights.controller.profile import SyncProfile, profile
from orchestrrl.weights.controller.reports import SyncReport
from orchestrrl.weights.layout import lay_out
from orchestrrl.weights.model import MODEL_FILE, TensorMeta
from orchestrrl.weights.trainer.client import WeightsClient
from orchestrrl.weights.trainer.staging import checkpoint_pieces
from planner.model import RequestId

LOOK_S = 0.05
TRAINER = "train0"
HOSTS = 2  # hosts of engines
BEFORE, AFTER = 1, 2  # the versions
LAYERS, SHAPE = 16, (512, 1024)  # weights of simulated engines: 32 MiB in float32


@dataclass(slots=True)
class SyncOutcome:
    """The outcome of publishing a version of the weights while requests run."""

    profile: SyncProfile
    engines: int
    serve_it: int  # engines that report the version
    requests: int
    answered: int
    crossed: int  # responses with tokens of both versions
    tokens: dict[int | None, int]  # version named by the spans -> number of tokens
    differing: int  # tokens that the version named by their span does not generate
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
    """The tokens of one span of a response, with their context: the prompt and all earlier tokens of the response."""

    sample: Sample
    version: int | None
    context: tuple[int, ...]
    ids: tuple[int, ...]


async def run_sync(fleet: DemoFleet, stack: Stack) -> SyncOutcome:
    """Publish two versions of the weights, the second one during a step, and return the outcome of the second
    publication. Raises Permanent if a sync fails."""
    scenario, is_simulated = fleet.scenario, fleet.kind == "simulated"
    assert scenario.sync is not None, "the scenario has a section `sync`"
    smaller = scenario.model_copy(update={"prompts": scenario.sync.prompts, "max_tokens": scenario.sync.max_tokens})
    fleet = replace(fleet, scenario=smaller)
    step = [replace(each, id=RequestId(f"sync-{each.id}")) for each in samples(smaller, fleet.kind, scenario.seeds[0])]
    fleet.report("starting peers", 0, 0)
    home = stack.folder / "weights"
    checkpoints = await _start_peers(fleet, stack, home)
    with WeightsClient(stack.daemon_address, peer=TRAINER, folder=home / TRAINER) as trainer:

        async def publish(version: int) -> SyncReport:
            return await asyncio.to_thread(trainer.publish_arrays, version, checkpoint_pieces(checkpoints[version]))

        fleet.report("publishing the first weights", 0, 0)
        await publish(BEFORE)
        undisturbed = DemoStepRecord() if is_simulated else await fleet.run_step(step, "undisturbed")
        published: list[SyncReport] = []

        async def between() -> None:
            await _under_way(stack.daemon_address, len(fleet.clients))
            published.append(await publish(AFTER))

        record = await fleet.run_step(step, "new weights during the step", stack.gateway_url, begun=between, spans=True)
    found = stretches(step, record)
    if is_simulated:
        seeds = {version: read_weights(folder).seed for version, folder in checkpoints.items()}
        expected = [simulated_ids(smaller, seeds, each) for each in found]
    else:
        again = await fleet.run_step(_continued(found), "undisturbed, new weights")
        expected = [_of(undisturbed if each.version == BEFORE else again, each) for each in found]
    (ended,) = published
    loaded = await asyncio.gather(*(weights_engine(client).loaded() for client in fleet.clients))
    tokens: Counter[int | None] = Counter()
    for each in found:
        tokens[each.version] += len(each.ids)
    return SyncOutcome(
        profile(ended),
        engines=len(fleet.clients),
        serve_it=sum(each is not None and each.version == AFTER for each in loaded),
        requests=len(step),
        answered=len(record.answers),
        crossed=sum(len({span.version for span in spans}) > 1 for spans in record.spans.values()),
        tokens=tokens,
        differing=sum(_differing(each.ids, ids) for each, ids in zip(found, expected, strict=True)),
        faults=[f"{request}: {fault}" for request, fault in (record.faults | undisturbed.faults).items()],
    )


async def _start_peers(fleet: DemoFleet, stack: Stack, home: Path) -> dict[int, Path]:
    """Start a peer for the trainer and for each of two hosts that share the engines. The peers stop with the stack.
    Wait until all peers are attached, and return the checkpoint folder of each version."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    hosts: dict[str, dict[str, str]] = {TRAINER: {}}
    of_host = -(-len(fleet.urls) // HOSTS)
    for index, url in enumerate(fleet.urls):
        hosts.setdefault(f"gen{index // of_host}", {})[f"e{index}"] = url
    for name, engines in hosts.items():
        flags = ("--pod", "train" if name == TRAINER else "generate", "--engine-kind", fleet.kind)
        stack.command(f"peer-{name}", "sync", "peer", *stack.peer_words(name, home / name, engines, *flags))
    checkpoints = {version: home / f"checkpoint-{version}" for version in (BEFORE, AFTER)}
    if fleet.kind == "simulated":
        for version, folder in checkpoints.items():
            await asyncio.to_thread(_write, folder, version)
    else:  # the model that the engines started with, and the same model with another seed
        checkpoints[BEFORE] = stack.folder / "tiny-model"
        await make_model(checkpoints[AFTER], seed=1)
    await stack.until_attached(hosts)
    return checkpoints


def _write(folder: Path, seed: int) -> None:
    """Write a checkpoint of random weights, which determine the responses of simulated engines."""
    layout = lay_out([TensorMeta(f"model.layers.{layer}.weight", "F32", SHAPE) for layer in range(LAYERS)])
    chance = np.random.default_rng(seed)
    folder.mkdir()
    with (folder / MODEL_FILE).open("wb") as file:
        file.write(layout.header)
        for _ in layout.tensors:
            file.write(chance.standard_normal(SHAPE, dtype=np.float32).tobytes())


async def _under_way(daemon_address: str, engines: int) -> None:
    """Wait until the gateway has reported running requests on every engine, or the step has ended. The engines
    themselves are not queried, because busy engines would respond late. Raises Permanent if the wait times out."""
    seen: set[str] = set()
    async with ControlClient(daemon_address) as control:

        async def all_had_some() -> bool:
            listed = await control.call(control.control.ListRequests, control_pb2.ListRequestsRequest())
            running = {each.engine_id for each in listed.requests if each.state == telemetry_pb2.REQUEST_STATE_RUNNING}
            seen.update(running)
            return len(seen) == engines or bool(seen and not listed.requests)  # or the step has already ended

        await until(all_had_some, f"{engines} engines have requests", every_s=LOOK_S)


# --- actual and expected tokens


def stretches(step: Sequence[Sample], record: DemoStepRecord) -> list[AnswerStretch]:
    """Return the stretches of all responses in `record`, in the order of the step's requests."""
    found = []
    for sample in step:
        ids = record.answers.get(sample.id, [])
        for span in record.spans.get(sample.id, []):
            before = (*sample.prompt_ids, *ids[: span.start])
            found.append(AnswerStretch(sample, span.version, before, tuple(ids[span.start : span.end])))
    return found


def simulated_ids(scenario: DemoScenario, seeds: Mapping[int, int], stretch: AnswerStretch) -> list[int]:
    """Return the tokens with which a simulated engine that has the stretch's version continues the stretch's context.
    They are computed without an engine. `seeds` maps each version to the seed of its weights."""
    if stretch.version is None or stretch.version not in seeds:
        return []
    model = TokenModel(lengths=scenario.lengths, weights_seed=seeds[stretch.version])
    generation = model.begin(stretch.context)
    ids = [generation.next_token()[0] for _ in stretch.ids]
    if stretch.ids and stretch.ids[-1] == EOS:  # the model ended the response
        ids[-1] = EOS
    return ids


def _continued(stretches: Sequence[AnswerStretch]) -> list[Sample]:
    """Return one new request for each stretch of the new version. The prompt of the request is the stretch's
    context."""
    return [
        replace(
            each.sample, id=RequestId(f"again-{each.sample.id}"), prompt_ids=each.context, output_tokens=len(each.ids)
        )
        for each in stretches
        if each.version == AFTER and each.ids
    ]


def _of(record: DemoStepRecord, stretch: AnswerStretch) -> list[int]:
    """Return the token IDs that `record` contains for the stretch, cut to the length of the stretch. They are the
    response to the stretch's own request or, if that request has no response in `record`, to the request that
    `_continued` made for the stretch."""
    id = stretch.sample.id
    ids = record.answers.get(id) or record.answers.get(RequestId(f"again-{id}"), [])
    return ids[: len(stretch.ids)]


def _differing(ids: Sequence[int], expected: Sequence[int]) -> int:
    return sum(one != other for one, other in zip(ids, expected, strict=False)) + abs(len(ids) - len(expected))
