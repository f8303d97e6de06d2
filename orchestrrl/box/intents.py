"""What a small RL job on a site announces, stage by stage. Ranks are the GPUs of the PoDs that train and generate."""

from planner.fabric.intent import Intent, Operation, Primitive, Stage, Traffic
from planner.fabric.topology import Role, Site

JOB = "box"
# In proportion to what a stage sends; the box measures rates, not these bytes.
GRADIENT_BYTES, EXPERT_BYTES, WEIGHT_BYTES = 4e9, 1e9, 4e9


def gpus_of(site: Site, role: Role) -> tuple[int, ...]:
    return tuple(sorted(gpu for server in site.servers if site.pod[server.pod].role is role for gpu in server.gpus))


def training(site: Site) -> Intent:
    """Gradients around a ring of all trainers."""
    ring = gpus_of(site, Role.TRAIN)
    traffic = Traffic(Operation.DP, Primitive.RING_ALL_REDUCE, (ring,), GRADIENT_BYTES)
    return Intent("training", Stage.TRAIN, (traffic,), job=JOB)


def generation(site: Site) -> Intent:
    """Experts spread over all GPUs that generate."""
    traffic = Traffic(Operation.EP, Primitive.ALL_TO_ALL, (gpus_of(site, Role.GEN),), EXPERT_BYTES)
    return Intent("generation", Stage.GEN, (traffic,))


def weights(site: Site) -> Intent:
    """From the first trainer to whoever generates."""
    trainers, receivers = gpus_of(site, Role.TRAIN), gpus_of(site, Role.GEN)
    traffic = Traffic(Operation.WEIGHT_SYNC, Primitive.BROADCAST, (trainers[:1],), WEIGHT_BYTES, receivers=(receivers,))
    return Intent("weights", Stage.WEIGHT_SYNC, (traffic,))
