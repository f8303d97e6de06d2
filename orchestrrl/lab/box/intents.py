"""The intents of the stages of a small RL job on a site. Ranks are the GPUs of the training and generation PoDs."""

from planner.fabric.collectives import transfers_of
from planner.fabric.demand import RankPlacement, broadcasts_of, mask_nics
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.model import EndpointId
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import PodRole, Site
from planner.model import GpuId

JOB = "box"
# Large enough that each stage gains from its own circuits, even with slow mirrors. The box measures rates only.
GRADIENT_BYTES, EXPERT_BYTES, WEIGHT_BYTES = 4e11, 1e12, 4e11


def gpus_of(site: Site, role: PodRole) -> tuple[int, ...]:
    return tuple(sorted(gpu for server in site.servers if site.pod[server.pod].role is role for gpu in server.gpus))


def training(site: Site) -> Intent:
    """Return the intent of training: gradient all-reduces. The n-th GPUs of all ToRs form one group."""
    by_tor: dict[EndpointId, list[int]] = {}
    for gpu in gpus_of(site, PodRole.TRAIN):
        by_tor.setdefault(site.tor_of(GpuId(gpu)), []).append(gpu)
    replicas = tuple(zip(*by_tor.values(), strict=False))
    traffic = Traffic(TrafficOperation.DP, Primitive.RING_ALL_REDUCE, replicas, GRADIENT_BYTES)
    return Intent("training", Stage.TRAIN, (traffic,), job=JOB)


def generation(site: Site) -> Intent:
    """Return the intent of generation: an expert all-to-all over all generation GPUs."""
    traffic = Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, (gpus_of(site, PodRole.GEN),), EXPERT_BYTES)
    return Intent("generation", Stage.GEN, (traffic,))


def weights(site: Site) -> Intent:
    """Return the intent of a weight sync: each training GPU broadcasts a shard to all generation GPUs."""
    trainers, receivers = gpus_of(site, PodRole.TRAIN), gpus_of(site, PodRole.GEN)
    shards = tuple((trainer,) for trainer in trainers)
    traffic = Traffic(
        TrafficOperation.WEIGHT_SYNC,
        Primitive.BROADCAST,
        shards,
        WEIGHT_BYTES / len(shards),
        receivers=(receivers,) * len(shards),
    )
    return Intent("weights", Stage.WEIGHT_SYNC, (traffic,), job=JOB)


def senders(site: Site, intent: Intent) -> set[tuple[GpuId, GpuId]]:
    """Return the pairs (source, destination) of GPUs in the intent's traffic matrix."""
    found: set[tuple[int, int]] = set()
    placement = RankPlacement.of(site, intent, mask_nics(site, FabricFailures()))
    for traffic in intent.traffic:
        is_tree = traffic.primitive is Primitive.BROADCAST
        for some in [broadcasts_of(traffic, placement)] if is_tree else transfers_of(traffic):
            used = some.sent_bytes > 0
            found |= set(zip(some.sources[used].tolist(), some.destinations[used].tolist(), strict=True))
    return {(intent.gpu(source), intent.gpu(sink)) for source, sink in found}
