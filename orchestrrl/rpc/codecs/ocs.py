"""Between protobuf and the vocabulary of the optical switches, both ways. The only file that knows both.

`x_to_pb` and `x_from_pb` for each message of ocs.proto. A message that makes no sense raises ValueError with
the field's name.
"""

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from ocs_drivers.errors import (
    CircuitConflict,
    DriverError,
    DriverFaults,
    DriverOutcomeUnknown,
    DriverPermanent,
    DriverRetryable,
    InvalidChange,
)
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CommitResult,
    Connectivity,
    CrossConnect,
    CrossConnectReading,
    CrossConnectResult,
    DeviceCircuit,
    EventKind,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
    Unconfirmed,
    Verification,
)
from orchestrrl.rpc.pb import control_pb2, ocs_pb2

E = TypeVar("E", bound=Enum)
N = TypeVar("N", bound=int)

_CONNECTIVITY = {
    Connectivity.INGRESS_EGRESS: ocs_pb2.CONNECTIVITY_INGRESS_EGRESS,
    Connectivity.ANY_TO_ANY: ocs_pb2.CONNECTIVITY_ANY_TO_ANY,
}
_BOOT = {
    BootBehaviour.UNKNOWN: ocs_pb2.BOOT_BEHAVIOUR_UNSPECIFIED,
    BootBehaviour.DARK: ocs_pb2.BOOT_BEHAVIOUR_DARK,
    BootBehaviour.RESTORE: ocs_pb2.BOOT_BEHAVIOUR_RESTORE,
}
_MODE = {
    ChangeMode.SAFE: ocs_pb2.CHANGE_MODE_SAFE,
    ChangeMode.UPDATE: ocs_pb2.CHANGE_MODE_UPDATE,
    ChangeMode.OVERWRITE: ocs_pb2.CHANGE_MODE_OVERWRITE,
}
_PORT = {
    PortStatus.ENABLED: ocs_pb2.PORT_STATUS_ENABLED,
    PortStatus.DISABLED: ocs_pb2.PORT_STATUS_DISABLED,
    PortStatus.FAILED: ocs_pb2.PORT_STATUS_FAILED,
}
_CIRCUIT = {
    CircuitState.TUNING: ocs_pb2.CIRCUIT_STATE_TUNING,
    CircuitState.TUNED: ocs_pb2.CIRCUIT_STATE_TUNED,
    CircuitState.FAILED: ocs_pb2.CIRCUIT_STATE_FAILED,
}
_EVENT = {
    EventKind.PORT: ocs_pb2.EVENT_KIND_PORT,
    EventKind.CIRCUIT: ocs_pb2.EVENT_KIND_CIRCUIT,
    EventKind.ALARM: ocs_pb2.EVENT_KIND_ALARM,
}
_ERROR: dict[str, type[DriverError]] = {
    "retryable": DriverRetryable,
    "outcome_unknown": DriverOutcomeUnknown,
    "invalid_change": InvalidChange,
    "conflict": CircuitConflict,
    "permanent": DriverPermanent,
}


def _value(name: str, values: dict[E, N], pb: int) -> E:
    for value, known in values.items():
        if known == pb:
            return value
    raise ValueError(f"{name}: is not a known value, got {pb}")


def pair_to_pb(pair: CrossConnect) -> ocs_pb2.CrossConnect:
    return ocs_pb2.CrossConnect(ingress_port=pair.ingress_port, egress_port=pair.egress_port)


def pair_from_pb(pb: ocs_pb2.CrossConnect) -> CrossConnect:
    return CrossConnect(pb.ingress_port, pb.egress_port)


def pairs_to_pb(pairs: Iterable[CrossConnect]) -> list[ocs_pb2.CrossConnect]:
    return [pair_to_pb(pair) for pair in pairs]


def pairs_from_pb(pbs: Iterable[ocs_pb2.CrossConnect]) -> tuple[CrossConnect, ...]:
    return tuple(pair_from_pb(pb) for pb in pbs)


def ports_to_pb(ports: range) -> ocs_pb2.PortNumbers:
    return ocs_pb2.PortNumbers(first=ports[0], count=len(ports))


def ports_from_pb(pb: ocs_pb2.PortNumbers) -> range:
    return range(pb.first, pb.first + pb.count)


def facts_to_pb(facts: SwitchFacts, capabilities: SwitchCapabilities) -> ocs_pb2.DeviceFacts:
    return ocs_pb2.DeviceFacts(
        vendor=facts.vendor,
        model=facts.model,
        serial=facts.serial,
        software=facts.software,
        connectivity=_CONNECTIVITY[facts.connectivity],
        ingress_ports=ports_to_pb(facts.ingress_ports),
        egress_ports=ports_to_pb(facts.egress_ports),
        reconfiguration_s=facts.reconfiguration_s,
        boot=_BOOT[facts.boot],
        capabilities=ocs_pb2.DriverCapabilities(
            bulk=capabilities.bulk,
            tuned_state=capabilities.tuned_state,
            link_state=capabilities.link_state,
            port_power=capabilities.port_power,
            events=capabilities.events,
            removes_one_by_one=capabilities.removes_one_by_one,
        ),
    )


def facts_from_pb(pb: ocs_pb2.DeviceFacts) -> SwitchFacts:
    return SwitchFacts(
        vendor=pb.vendor,
        model=pb.model,
        serial=pb.serial,
        software=pb.software,
        connectivity=_value("connectivity", _CONNECTIVITY, pb.connectivity),
        ingress_ports=ports_from_pb(pb.ingress_ports),
        egress_ports=ports_from_pb(pb.egress_ports),
        reconfiguration_s=pb.reconfiguration_s,
        boot=_value("boot", _BOOT, pb.boot),
    )


def capabilities_from_pb(pb: ocs_pb2.DriverCapabilities) -> SwitchCapabilities:
    return SwitchCapabilities(
        pb.bulk, pb.tuned_state, pb.link_state, pb.port_power, pb.events, removes_one_by_one=pb.removes_one_by_one
    )


def port_to_pb(port: PortState) -> ocs_pb2.PortState:
    return ocs_pb2.PortState(port=port.port, status=_PORT[port.status], power_dbm=port.power_dbm)


def port_from_pb(pb: ocs_pb2.PortState) -> PortState:
    power_dbm = pb.power_dbm if pb.HasField("power_dbm") else None
    return PortState(pb.port, _value("status", _PORT, pb.status), power_dbm)


def circuit_to_pb(circuit: DeviceCircuit) -> ocs_pb2.Circuit:
    return ocs_pb2.Circuit(
        cross_connect=pair_to_pb(circuit.cross_connect),
        state=_CIRCUIT[circuit.state],
        link_up=circuit.link_up,
        ours=circuit.ours,
    )


def circuit_from_pb(pb: ocs_pb2.Circuit) -> DeviceCircuit:
    link_up = pb.link_up if pb.HasField("link_up") else None
    return DeviceCircuit(pair_from_pb(pb.cross_connect), _value("state", _CIRCUIT, pb.state), link_up, pb.ours)


def unconfirmed_to_pb(trial: Unconfirmed | None) -> ocs_pb2.UnconfirmedChange | None:
    if trial is None:
        return None
    return ocs_pb2.UnconfirmedChange(
        revision=trial.revision,
        until_unix_s=trial.until_s,
        removed=pairs_to_pb(trial.removed),
        added=pairs_to_pb(trial.added),
        failure=trial.failure,
    )


def unconfirmed_from_pb(
    pb: ocs_pb2.ListCrossConnectsResponse | ocs_pb2.Verification | control_pb2.Switch,
) -> Unconfirmed | None:
    if not pb.HasField("unconfirmed"):
        return None
    trial = pb.unconfirmed
    return Unconfirmed(
        revision=trial.revision if trial.HasField("revision") else None,
        until_s=trial.until_unix_s if trial.HasField("until_unix_s") else None,
        removed=pairs_from_pb(trial.removed),
        added=pairs_from_pb(trial.added),
        failure=trial.failure,
    )


def reading_to_pb(reading: CrossConnectReading) -> ocs_pb2.ListCrossConnectsResponse:
    circuits = [circuit_to_pb(circuit) for circuit in reading.circuits]
    return ocs_pb2.ListCrossConnectsResponse(
        circuits=circuits, revision=reading.revision, unconfirmed=unconfirmed_to_pb(reading.unconfirmed)
    )


def reading_from_pb(pb: ocs_pb2.ListCrossConnectsResponse) -> CrossConnectReading:
    circuits = sorted((circuit_from_pb(circuit) for circuit in pb.circuits), key=lambda circuit: circuit.cross_connect)
    return CrossConnectReading(tuple(circuits), pb.revision, unconfirmed_from_pb(pb))


def change_to_pb(change: CircuitChange, mode: ChangeMode) -> ocs_pb2.PlanChangeRequest:
    return ocs_pb2.PlanChangeRequest(
        connect=pairs_to_pb(change.connect), disconnect=pairs_to_pb(change.disconnect), mode=_MODE[mode]
    )


def change_from_pb(pb: ocs_pb2.PlanChangeRequest) -> tuple[CircuitChange, ChangeMode]:
    mode = ChangeMode.SAFE if pb.mode == ocs_pb2.CHANGE_MODE_UNSPECIFIED else _value("mode", _MODE, pb.mode)
    return CircuitChange(pairs_from_pb(pb.connect), pairs_from_pb(pb.disconnect)), mode


def diff_to_pb(diff: CircuitDiff) -> ocs_pb2.ChangeDiff:
    return ocs_pb2.ChangeDiff(
        mode=_MODE[diff.mode],
        before=pairs_to_pb(sorted(diff.before)),
        revision=diff.revision,
        remove=pairs_to_pb(diff.remove),
        add=pairs_to_pb(diff.add),
        evicted=pairs_to_pb(diff.evicted),
    )


def diff_from_pb(pb: ocs_pb2.ChangeDiff) -> CircuitDiff:
    return CircuitDiff(
        mode=_value("mode", _MODE, pb.mode),
        revision=pb.revision,
        before=frozenset(pairs_from_pb(pb.before)),
        remove=pairs_from_pb(pb.remove),
        add=pairs_from_pb(pb.add),
        evicted=pairs_from_pb(pb.evicted),
    )


def item_to_pb(item: CrossConnectResult) -> ocs_pb2.CrossConnectResult:
    return ocs_pb2.CrossConnectResult(
        cross_connect=pair_to_pb(item.cross_connect),
        action=item.action,
        done=item.done,
        detail=item.detail,
        commanded_s=item.commanded_s,
        tuned_s=item.tuned_s,
        link_up_s=item.link_up_s,
    )


def item_from_pb(pb: ocs_pb2.CrossConnectResult) -> CrossConnectResult:
    return CrossConnectResult(
        cross_connect=pair_from_pb(pb.cross_connect),
        action=Action(pb.action),
        done=pb.done,
        detail=pb.detail,
        commanded_s=pb.commanded_s if pb.HasField("commanded_s") else None,
        tuned_s=pb.tuned_s if pb.HasField("tuned_s") else None,
        link_up_s=pb.link_up_s if pb.HasField("link_up_s") else None,
    )


def result_to_pb(result: CommitResult) -> ocs_pb2.CommitResult:
    items = [item_to_pb(item) for item in result.items]
    return ocs_pb2.CommitResult(
        results=items,
        revision=result.revision,
        commands_sent=result.commands_sent,
        revert_at_unix_s=result.revert_at_s,
    )


def result_from_pb(pb: ocs_pb2.CommitResult) -> CommitResult:
    revert_at_s = pb.revert_at_unix_s if pb.HasField("revert_at_unix_s") else None
    return CommitResult(tuple(item_from_pb(item) for item in pb.results), pb.revision, pb.commands_sent, revert_at_s)


def verification_to_pb(seen: Verification) -> ocs_pb2.Verification:
    return ocs_pb2.Verification(
        revision=seen.revision,
        missing=pairs_to_pb(seen.missing),
        lingering=pairs_to_pb(seen.lingering),
        untuned=pairs_to_pb(seen.untuned),
        dark=pairs_to_pb(seen.dark),
        unconfirmed=unconfirmed_to_pb(seen.unconfirmed),
    )


def verification_from_pb(pb: ocs_pb2.Verification) -> Verification:
    return Verification(
        revision=pb.revision,
        missing=pairs_from_pb(pb.missing),
        lingering=pairs_from_pb(pb.lingering),
        untuned=pairs_from_pb(pb.untuned),
        dark=pairs_from_pb(pb.dark),
        unconfirmed=unconfirmed_from_pb(pb),
    )


def event_to_pb(event: SwitchEvent) -> ocs_pb2.DeviceEvent:
    pair = pair_to_pb(event.cross_connect) if event.cross_connect else None
    return ocs_pb2.DeviceEvent(
        at_unix_s=event.at_s, kind=_EVENT[event.kind], text=event.text, port=event.port, cross_connect=pair
    )


def event_from_pb(pb: ocs_pb2.DeviceEvent) -> SwitchEvent:
    return SwitchEvent(
        at_s=pb.at_unix_s,
        kind=_value("kind", _EVENT, pb.kind),
        text=pb.text,
        port=pb.port if pb.HasField("port") else None,
        cross_connect=pair_from_pb(pb.cross_connect) if pb.HasField("cross_connect") else None,
    )


def error_to_pb(error: DriverError) -> ocs_pb2.DriverError:
    kind = next((name for name, known in _ERROR.items() if isinstance(error, known)), "permanent")
    return ocs_pb2.DriverError(
        kind=kind,
        message=error.message,
        device=error.device,
        command=error.command,
        answer=error.answer,
        after_s=error.after_s if isinstance(error, DriverRetryable) else 0.0,
        faults=error.faults if isinstance(error, DriverFaults) else [],
    )


def error_from_pb(pb: ocs_pb2.DriverError, device: str) -> DriverError:
    """The error as our side knows the device: the other process may call it by another name, which is then kept in
    the message."""
    theirs = f"{pb.device}: " if pb.device and pb.device != device else ""
    if pb.kind in ("invalid_change", "conflict"):
        kind = InvalidChange if pb.kind == "invalid_change" else CircuitConflict
        # The way out that a fault names is a command of ours, so it needs the name that we know the device by.
        faults = [fault.replace(f"ocs take-over {pb.device} ", f"ocs take-over {device} ") for fault in pb.faults]
        return kind([theirs + fault for fault in faults or [pb.message]], device=device)
    message = theirs + pb.message
    if pb.kind == "retryable":
        return DriverRetryable(message, after_s=pb.after_s, device=device, command=pb.command, answer=pb.answer)
    kind_of_other = DriverOutcomeUnknown if pb.kind == "outcome_unknown" else DriverPermanent
    return kind_of_other(message, device=device, command=pb.command, answer=pb.answer)
