"""Find jobs that share PoDs with a period, and may therefore send over circuits that the period changes."""

from collections.abc import Collection, Iterable, Mapping

from planner.fabric.intent import Intent
from planner.fabric.model import EndpointId
from planner.fabric.templates import TEMPLATES
from planner.fabric.topology import Site


def neighbours(site: Site, intent: Intent, others: Iterable[Intent]) -> frozenset[str]:
    """Return the jobs that have ranks in PoDs whose circuits `intent` may change. Only the jobs of the intents in
    `others` are considered, and the job of `intent` is not included."""
    pods = _touched(site, intent)
    return frozenset(
        other.job for other in others if other.job != intent.job and not pods.isdisjoint(_pods(site, other))
    )


def unannounced(
    site: Site, intent: Intent, announced: Collection[str], traced: Mapping[str, Collection[str]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets of traced jobs that never announced their training. `announced` contains the jobs that announced
    theirs, and `traced` maps each traced job to its hosts. The job of `intent` is in neither set.

    The first set contains the jobs that have hosts in PoDs whose circuits `intent` may change. The second set contains
    the remaining jobs with a host that is not a server of the site, because the circuits of these jobs are unknown.
    """
    touched = _touched(site, intent)
    pod_of = {str(server.id): server.pod for server in site.servers}
    silent = {job: hosts for job, hosts in traced.items() if job != intent.job and job not in announced}
    near = {job for job, hosts in silent.items() if any(pod_of.get(host) in touched for host in hosts)}
    unknown = {job for job, hosts in silent.items() if any(host not in pod_of for host in hosts)}
    return frozenset(near), frozenset(unknown - near)


def _touched(site: Site, intent: Intent) -> frozenset[EndpointId]:
    """Return the PoDs whose circuits the intent may change."""
    roles = TEMPLATES[intent.stage].touched
    return frozenset(pod for pod in _pods(site, intent) if site.pod[pod].role in roles)


def _pods(site: Site, intent: Intent) -> frozenset[EndpointId]:
    gpus = map(intent.gpu, intent.ranks)
    return frozenset(site.server_of[gpu].pod for gpu in gpus if gpu in site.server_of)
