"""The kinds of journal entries. This module does not import the journal, so that commands that only use the kinds do
not load SQLite."""

from dataclasses import dataclass
from enum import StrEnum


class EntryKind(StrEnum):
    """The kind of a journal entry. The intent of an operation is written before any command is sent. The result of the
    operation is written as soon as it is available."""

    DAEMON_STARTED = "daemon.started"
    DAEMON_STOPPED = "daemon.stopped"
    CONFIG_RELOADED = "config.reloaded"
    MODE = "mode"
    JOURNAL_DAMAGED = "journal.damaged"  # entries before this one were lost, or may have been
    JOURNAL_CONFIRMED = "journal.confirmed"  # an operator has confirmed the damage
    NODE_ATTACHED = "node.attached"
    NODE_DETACHED = "node.detached"
    NODE_DOUBLE = "node.double"  # a node attached with the id of another attached node
    ENGINE_HEALTH = "engine.health"
    ENGINE_FAILOVERS = "engine.failovers"  # requests continued after their engine failed, as one gateway reported
    ENGINE_REMARKS = "engine.remarks"  # several agents report the engine, or it has several names; empty: resolved
    ENGINES = "engines"  # an operator added, drained or removed an engine; has the resulting state of all
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
    PAUSE_BEGAN = "pause.began"  # the fleet is being paused
    PAUSE_STEP = "pause.step"
    PAUSE_ENDED = "pause.ended"  # the fleet is paused, or continues as before
    ROUTES = "routes"
    OPERATION_INTENT = "operation.intent"
    OPERATION_SENT = "operation.sent"
    OPERATION_RESULT = "operation.result"
    CIRCUITS_INTENT = "circuits.intent"
    CIRCUITS_RESULT = "circuits.result"
    CIRCUITS_OWNED = "circuits.owned"  # for a switch: the circuits that are owned from then on
    PERIOD_INTENT = "period.intent"  # for a name, as announced last
    PERIOD = "period"  # a period has ended: committed, kept, superseded or failed
    FABRIC_CONTROL = "fabric.control"  # an operator's pins, override and masks
    REROUTED = "fabric.rerouted"  # the cross-connects over which packets are routed
    PAUSES = "pauses"  # the operator's pauses
    SYNC_BEGAN = "sync.began"  # a weight version was published
    SYNC_STEP = "sync.step"  # its state; each action is recorded before it begins
    SYNC_ENDED = "sync.ended"
    WEIGHTS = "weights"  # the fleet's committed version, and the engines without it


@dataclass(frozen=True, slots=True)
class OperationEntries:
    """The kinds of the journal entries of one type of operation. `step` is None if steps are not journalled. Only
    core/operation_journal.py writes entries of these kinds. An operation is open from the time its intent is written
    until its result is written."""

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
