"""Step times as lines over the batches that the rest of a step will see, and which configurations to look at. Pure.

The paper's third heuristic (section 4.1): a bias that follows the phase of the step. A curve that bends has no one
line: while batches are large its line is fitted down from those, and as the step goes on the fit closes in on the tail.
"""

from collections.abc import Collection, Sequence

from planner.layouts import biased, phase_of
from planner.model import Configuration, ConfigurationId, Snapshot
from planner.profile import EngineProfile

# So many configurations can all be looked at in every plan; of more, those are left out that fit the phase badly.
FEW = 6


def sequences_ahead(profile: EngineProfile, snapshot: Snapshot, gpus_count: int) -> tuple[float, float]:
    """The batches that an engine of this profile may decode until the step ends: from what it would hold now down to
    one.

    Now it would hold an even share of the requests in flight, or what the fullest engine of its configuration runs, as
    far as its slots and KV cache allow. That is rounded up to a power of two: a line stays the same until batches have
    halved. Without requests: whatever an engine can hold.
    """
    requests = snapshot.requests
    if not requests:
        return 1.0, max(2.0, profile.max_sequences)
    instances = max(1, gpus_count // profile.parallelism.gpus)
    running = [engine.running for engine in snapshot.engines if engine.configuration == profile.id]
    most = max(-(-len(requests) // instances), *running, 2)
    context_tokens = sum(request.context_tokens for request in requests) / len(requests)
    room = profile.kv_capacity_tokens / max(1.0, context_tokens)
    most = max(2, min(most, profile.max_sequences, int(room)))
    return 1.0, float(1 << (most - 1).bit_length())


def line_ahead(profile: EngineProfile, snapshot: Snapshot, gpus_count: int) -> Configuration:
    """The profile's step time as the line closest to its curve over `sequences_ahead`."""
    return profile.configuration(sequences_ahead(profile, snapshot, gpus_count))


def worth_a_look(
    profiles: Sequence[EngineProfile], snapshot: Snapshot, gpus_count: int, always: Collection[ConfigurationId] = ()
) -> tuple[ConfigurationId, ...]:
    """What a plan should choose from, in the order of `profiles`: all of a few; of many, those that come close to the
    best of the step's phase, those that engines run, and `always`."""
    if len(profiles) <= FEW:
        return tuple(profile.id for profile in profiles)
    close = {profile.id for profile in biased(profiles, phase_of(len(snapshot.requests), gpus_count))}
    kept = close.union(always, (engine.configuration for engine in snapshot.engines if engine.configuration))
    return tuple(profile.id for profile in profiles if profile.id in kept)
