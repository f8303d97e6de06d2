"""Convert the data model of optical switches to messages and back. Reading an invalid message raises ValueError with
the name of the field."""

from collections.abc import Iterable

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
    BootBehaviour,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    CrossConnectResult,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
    Unconfirmed,
    Verification,
)
from orchestrrl.rpc.codec import Codec, EnumCodec, Via, Whole
from orchestrrl.rpc.pb import ocs_pb2

_ERRORS: dict[str, type[DriverError]] = {
    "retryable": DriverRetryable,
    "outcome_unknown": DriverOutcomeUnknown,
    "invalid_change": InvalidChange,
    "conflict": CircuitConflict,
    "permanent": DriverPermanent,
}


PORTS = Via(
    to_pb=lambda ports: ocs_pb2.PortNumbers(first=ports[0], count=len(ports)),
    from_pb=lambda message: range(message.first, message.first + message.count),
)
_BOOT = EnumCodec(BootBehaviour, ocs_pb2.BootBehaviour.DESCRIPTOR, unspecified=BootBehaviour.UNKNOWN)
_ANY_MODE = EnumCodec(ChangeMode, ocs_pb2.ChangeMode.DESCRIPTOR, unspecified=ChangeMode.SAFE)

PAIR = Codec(CrossConnect, ocs_pb2.CrossConnect)
CAPABILITIES = Codec(SwitchCapabilities, ocs_pb2.DriverCapabilities)
FACTS = Codec(
    SwitchFacts, ocs_pb2.DeviceFacts, beside="capabilities", ingress_ports=PORTS, egress_ports=PORTS, boot=_BOOT
)
PORT = Codec(PortState, ocs_pb2.PortState)
CIRCUIT = Codec(DeviceCircuit, ocs_pb2.Circuit)
UNCONFIRMED = Codec(Unconfirmed, ocs_pb2.UnconfirmedChange)
READING = Codec(
    CrossConnectReading,
    ocs_pb2.ListCrossConnectsResponse,
    # A process in any language may list them in any order.
    circuits=Whole(
        to_pb=lambda circuits: map(CIRCUIT.to_pb, circuits),
        from_pb=lambda pbs: tuple(sorted(map(CIRCUIT.from_pb, pbs), key=lambda circuit: circuit.cross_connect)),
    ),
)
CHANGE = Codec(CircuitChange, ocs_pb2.PlanChangeRequest, beside="mode")
DIFF = Codec(CircuitDiff, ocs_pb2.ChangeDiff)
ITEM = Codec(CrossConnectResult, ocs_pb2.CrossConnectResult)
RESULT = Codec(CommitResult, ocs_pb2.CommitResult, items=("results", ITEM))
VERIFICATION = Codec(Verification, ocs_pb2.Verification)
EVENT = Codec(SwitchEvent, ocs_pb2.DeviceEvent)


def pairs_to_pb(pairs: Iterable[CrossConnect]) -> list[ocs_pb2.CrossConnect]:
    return [*map(PAIR.to_pb, pairs)]


def pairs_from_pb(pbs: Iterable[ocs_pb2.CrossConnect]) -> tuple[CrossConnect, ...]:
    return tuple(map(PAIR.from_pb, pbs))


def facts_to_pb(facts: SwitchFacts, capabilities: SwitchCapabilities) -> ocs_pb2.DeviceFacts:
    message = FACTS.to_pb(facts)
    message.capabilities.CopyFrom(CAPABILITIES.to_pb(capabilities))
    return message


def change_to_pb(change: CircuitChange, mode: ChangeMode) -> ocs_pb2.PlanChangeRequest:
    message = CHANGE.to_pb(change)
    message.mode = _ANY_MODE.to_pb(mode)
    return message


def change_from_pb(message: ocs_pb2.PlanChangeRequest) -> tuple[CircuitChange, ChangeMode]:
    return CHANGE.from_pb(message), _ANY_MODE.from_pb(message.mode)


def error_to_pb(error: DriverError) -> ocs_pb2.DriverError:
    kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "permanent")
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
    """Convert a message to an error that names the device as `device`, the name that this client uses. If the driver
    process uses a different name, that name is added to the error's text."""
    theirs = f"{pb.device}: " if pb.device and pb.device != device else ""
    kind = _ERRORS.get(pb.kind, DriverPermanent)
    if issubclass(kind, DriverFaults):
        # The suggested command must use the device's name in this daemon.
        faults = [fault.replace(f"ocs take-over {pb.device} ", f"ocs take-over {device} ") for fault in pb.faults]
        return kind([theirs + fault for fault in faults or [pb.message]], device=device)
    error = kind(theirs + pb.message, device=device, command=pb.command, answer=pb.answer)
    if isinstance(error, DriverRetryable):
        error.after_s = pb.after_s
    return error
