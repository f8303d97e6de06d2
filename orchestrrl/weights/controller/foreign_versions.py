"""Whether the fleet's weights are still those that a weight sync brought: a trainer may bring others in its own way,
and tell the pause barrier their version. Then nothing is ours to repair or to bring back until a version is published
again."""

import logging

from orchestrrl.weights.controller.actions import SyncActions
from orchestrrl.weights.controller.state import FleetWeights

logger = logging.getLogger(__name__)


def notice_others(acts: SyncActions) -> bool:
    """Whether somebody has told the pause barrier another version than the committed one, since that was told. It is
    the fleet's no longer then, which is written down. Where the pause barrier knows none, or has not heard of ours yet,
    nobody has."""
    committed, newest = acts.book.fleet.committed, acts.fence.state.newest
    if committed is None or newest is None:
        return False
    if newest == committed.version:
        acts.book.was_reported = True
        return False
    if not acts.book.was_reported and newest == committed.before:
        return False
    logger.warning("the fleet has version %d by another way: version %d is no longer its", newest, committed.version)
    acts.book.stands(FleetWeights())
    return True
