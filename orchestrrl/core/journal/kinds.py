"""Kinds of entries of the journal. Apart from it, so that a command which only names them need not load SQLite."""

from dataclasses import dataclass
from enum import StrEnum


class EntryKind(StrEnum):
    """What an entry tells. Operations have an intent before anything is sent and a result when it is known."""

    DAEMON_STARTED = "daemon.started"
    DAEMON_STOPPED = "daemon.stopped"
    CONFIG_RELOADED = "config.reloaded"
    MODE = "mode"
    JOURNAL_DAMAGED = "journal.damaged"  # entries before this one were lost, or may have been
    JOURNAL_CONFIRMED = "journal.confirmed"  # an operator has confirmed it
    NODE_ATTACHED = "node.attached"
    NODE_DETACHED = "node.detached"
    NODE_DOUBLE = "node.double"  # a node came whose id another one has that is there
    ENGINE_HEALTH = "engine.health"
    ENGINE_FAILOVERS = "engine.failovers"  # requests went on after their engine failed, as one gateway reported
    ENGINE_REMARKS = "engine.remarks"  # several agents report it, or it has several names; none: no longer
    ENGINES = "engines"  # an operator added, drained or removed one; who stands how since
    STEP_ENDED = "step.ended"
    PLAN = "plan"
    PLAN_ACTED = "plan.acted"
    PLAN_ACTUAL = "plan.actual"
    PLAN_CALIBRATION = "plan.calibration"
    PLAN_CONTROL = "plan.control"
    DEPLOYMENT_ENDED = "deployment.ended"
    REDEPLOYMENT_BEGAN = "redeployment.began"
    REDEPLOYMENT_STEP = "redeployment.step"
    REDEPLOYMENT_ENDED = "redeployment.ended"
    ENGINE_STARTED = "engine.started"
    ENGINE_STOPPED = "engine.stopped"
    PROFILE_REFITTED = "profile.refitted"
    BALANCE = "balance"
    BARRIER = "barrier"
    PAUSE_BEGAN = "pause.began"  # the fleet is being brought to rest
    PAUSE_STEP = "pause.step"
    PAUSE_ENDED = "pause.ended"  # it is at rest, or goes on as before
    ROUTES = "routes"
    OPERATION_INTENT = "operation.intent"
    OPERATION_SENT = "operation.sent"
    OPERATION_RESULT = "operation.result"
    CIRCUITS_INTENT = "circuits.intent"
    CIRCUITS_RESULT = "circuits.result"
    CIRCUITS_OWNED = "circuits.owned"  # of a switch: which of its circuits are ours since
    PERIOD_INTENT = "period.intent"  # of a name, as it was announced last
    PERIOD = "period"  # a period has ended: committed, kept, superseded or failed
    FABRIC_CONTROL = "fabric.control"  # an operator's pins, override and masks
    REROUTED = "fabric.rerouted"  # over which cross-connects packets are routed
    PAUSES = "pauses"  # what an operator has paused
    SYNC_BEGAN = "sync.began"  # a weight version was published
    SYNC_STEP = "sync.step"  # how it stands; what it is about to do is written down before
    SYNC_ENDED = "sync.ended"
    WEIGHTS = "weights"  # the version that the fleet is committed to, and engines that have not got it


@dataclass(frozen=True, slots=True)
class OperationEntries:
    """The entries of one kind of operation, written by core/operation_journal.py alone. An operation is open from its
    intent until its result."""

    intent: EntryKind
    result: EntryKind
    step: EntryKind | None = None


NODE_OPERATIONS = OperationEntries(EntryKind.OPERATION_INTENT, EntryKind.OPERATION_RESULT, EntryKind.OPERATION_SENT)
CIRCUIT_CHANGES = OperationEntries(EntryKind.CIRCUITS_INTENT, EntryKind.CIRCUITS_RESULT)
REDEPLOYMENTS = OperationEntries(
    EntryKind.REDEPLOYMENT_BEGAN, EntryKind.REDEPLOYMENT_ENDED, EntryKind.REDEPLOYMENT_STEP
)
WEIGHT_SYNCS = OperationEntries(EntryKind.SYNC_BEGAN, EntryKind.SYNC_ENDED, EntryKind.SYNC_STEP)
FLEET_PAUSES = OperationEntries(EntryKind.PAUSE_BEGAN, EntryKind.PAUSE_ENDED, EntryKind.PAUSE_STEP)
OPERATIONS = (NODE_OPERATIONS, CIRCUIT_CHANGES, REDEPLOYMENTS, WEIGHT_SYNCS, FLEET_PAUSES)
