"""The driver `grpc`, which drives a device through a separate process that serves `OcsDriver`. The process may be
written in any language.

The driver process locks the device, enforces time limits and reads back changes. This driver manages the connection to
that process. If the connection breaks during a commit, the outcome is unknown, and the device is read before another
command is sent. A restarted process has lost the record of the circuits that it owns. This driver keeps its own record
and uses it to restore the ownership.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ocs_drivers.base import Armed, DeviceClock, SystemClock
from ocs_drivers.diff import CommandSteps
from ocs_drivers.driver import poll_pause_s
from ocs_drivers.errors import (
    CircuitConflict,
    DriverError,
    DriverOutcomeUnknown,
    DriverPermanent,
    DriverRetryable,
    InvalidChange,
    InvalidOptions,
)
from ocs_drivers.model import (
    Action,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    CrossConnectResult,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
    Verification,
)
from ocs_drivers.options import CheckedOptions, FromOptions, Seconds, must_be
from ocs_drivers.ownership import Ownership
from orchestrrl.rpc.channel import CHANNEL_OPTIONS
from orchestrrl.rpc.codecs import ocs as convert
from orchestrrl.rpc.ocs_server import ERROR_METADATA
from orchestrrl.rpc.pb import ocs_pb2, ocs_pb2_grpc

Response = TypeVar("Response")
Value = TypeVar("Value")

_CommitCall = grpc.aio.StreamStreamCall[ocs_pb2.CommitOrder, ocs_pb2.CommitAnswer]
_BEGIN = ocs_pb2.CommitOrder(begin=ocs_pb2.CommitOrder.Begin())

LARGEST_PORT = 2**32 - 1


class GrpcOptions(CheckedOptions):
    target: Annotated[str, must_be("HOST:PORT", lambda value: isinstance(value, str) and value)]
    command_timeout_s: Seconds = 10.0
    commit_timeout_s: Seconds = 60.0


class GrpcSwitch(FromOptions, options=GrpcOptions):
    """An OcsDriver that forwards every call to the driver process at `target`, `HOST:PORT` or `unix:PATH`."""

    def __init__(self, device: str, *, clock: DeviceClock | None = None, **given: Any) -> None:
        try:
            options = GrpcOptions.read(given)
        except InvalidOptions as error:
            error.device = device
            raise
        self.device = device
        self._target = options.target
        self._clock = clock or SystemClock()
        self._command_timeout_s = options.command_timeout_s
        self._commit_timeout_s = options.commit_timeout_s
        # A channel belongs to an event loop, so it is opened at the first call.
        self._session: tuple[grpc.aio.Channel, ocs_pb2_grpc.OcsDriverAsyncStub] | None = None
        self._ownership = Ownership()  # as known to this client
        self._facts: SwitchFacts | None = None  # from the last reading

    async def facts(self) -> SwitchFacts:
        self._facts = self._sense(convert.FACTS.from_pb, await self._read_facts())
        return self._facts

    async def capabilities(self) -> SwitchCapabilities:
        return convert.CAPABILITIES.from_pb((await self._read_facts()).capabilities)

    async def ports(self) -> tuple[PortState, ...]:
        response = await self._call("ListPorts", ocs_pb2.ListPortsRequest())
        ports = (self._sense(convert.PORT.from_pb, port) for port in response.ports)
        return tuple(sorted(ports, key=lambda port: port.port))

    async def cross_connects(self) -> CrossConnectReading:
        return (await self._read_circuits())[0]

    async def plan(self, change: CircuitChange, mode: ChangeMode = ChangeMode.SAFE) -> CircuitDiff:
        named = {"connect": change.connect, "disconnect": change.disconnect}
        if faults := _unfit_ports(named):
            raise InvalidChange(faults, device=self.device)
        request = convert.change_to_pb(change, mode)
        response = await self._as_owner(lambda: self._call("Plan", request))
        return self._sense(convert.DIFF.from_pb, response)

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        request = _commit_request(diff, expect_revision, revert_in_s)
        return await self._owning(lambda: self._set("Commit", request), CommandSteps(diff.remove, diff.add))

    async def confirm(self, revision: int) -> None:
        request = ocs_pb2.ConfirmRequest(revision=revision)
        # Confirming twice is harmless, so a lost answer needs no special handling.
        await self._call("Confirm", request, self._commit_timeout_s)

    async def take_over(self, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        if faults := _unfit_ports({"pairs": pairs}):
            raise CircuitConflict(faults, device=self.device)
        request = ocs_pb2.TakeOverRequest(cross_connects=convert.pairs_to_pb(pairs))
        response = await self._call("TakeOver", request, self._commit_timeout_s)
        reading = self._sense(convert.READING.from_pb, response)
        self._ownership.take(reading.cross_connects - reading.foreign)
        return reading

    async def arm(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> Armed:
        request = _commit_request(diff, expect_revision, revert_in_s)
        call = self._opened()[1].CommitArmed()
        try:
            async with asyncio.timeout(self._command_timeout_s):
                await call.write(ocs_pb2.CommitOrder(arm=request))
                await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise self._translated(error, "CommitArmed", is_setter=False) from None
        except TimeoutError:
            call.cancel()
            message = f"the driver process at {self._target} did not prepare the commit in time; nothing was sent"
            raise DriverRetryable(message, device=self.device, command="CommitArmed") from None
        except BaseException:
            call.cancel()
            raise

        def begin() -> Awaitable[ocs_pb2.CommitResult]:
            # The call has ended: the process does not support it, died, or refused a second start.
            return self._set("Commit", request) if call.done() else self._begin_commit(call)

        return _ArmedCommit(call, lambda: self._owning(begin, CommandSteps(diff.remove, diff.add)))

    async def verify(self, diff: CircuitDiff) -> Verification:
        request = ocs_pb2.VerifyRequest(diff=convert.DIFF.to_pb(diff))
        return self._sense(convert.VERIFICATION.from_pb, await self._call("Verify", request))

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        request = ocs_pb2.RollbackRequest(diff=convert.DIFF.to_pb(diff))
        return await self._owning(lambda: self._set("Rollback", request), CommandSteps(diff.add, diff.remove))

    async def watch(self) -> AsyncGenerator[SwitchEvent, None]:
        call = self._opened()[1].Watch(ocs_pb2.WatchEventsRequest())
        try:
            async for event in call:
                yield self._sense(convert.EVENT.from_pb, event)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, "Watch", is_setter=False) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session[0].close()

    async def _read_facts(self) -> ocs_pb2.DeviceFacts:
        facts: ocs_pb2.DeviceFacts = await self._call("GetFacts", ocs_pb2.GetFactsRequest())
        return facts

    async def _read_circuits(self) -> tuple[CrossConnectReading, bool]:
        """Read the circuits. If the driver process has lost the ownership of circuits, restore it. Return the reading,
        and whether ownership had been lost."""
        response = await self._call("ListCrossConnects", ocs_pb2.ListCrossConnectsRequest())
        reading = self._sense(convert.READING.from_pb, response)
        marked = self._ownership.marked(self._facts or await self.facts(), reading.circuits)
        self._ownership.take(reading.cross_connects - reading.foreign)
        unknown_there = [
            circuit.cross_connect for circuit in marked if circuit.ours and circuit.cross_connect in reading.foreign
        ]
        if not unknown_there:
            return reading, False
        try:
            return await self.take_over(unknown_there), True
        except CircuitConflict:  # removed meanwhile
            return reading, False

    async def _as_owner(self, call: Callable[[], Awaitable[Response]]) -> Response:
        """Perform the call and return the response. If the call was refused because the driver process had lost the
        ownership of circuits, restore the ownership and repeat the call once."""
        try:
            return await call()
        except CircuitConflict:
            if not (await self._read_circuits())[1]:
                raise
            return await call()

    async def _owning(self, call: Callable[[], Awaitable[ocs_pb2.CommitResult]], wanted: CommandSteps) -> CommitResult:
        """Carry out a change and update the ownership. If the outcome is unknown, the circuits of the change may still
        appear on the device, so they are treated as owned."""
        claimed = frozenset(wanted.add) - self._ownership.pairs
        self._ownership.take(claimed)
        try:
            return await self._settled(self._as_owner(call), wanted)
        except (DriverPermanent, DriverRetryable):  # nothing was sent
            self._ownership.release(claimed)
            raise

    async def _settled(self, call: Awaitable[ocs_pb2.CommitResult], wanted: CommandSteps) -> CommitResult:
        """Perform the call and return its result. If the result is lost or invalid, read the device until the change is
        complete or a time limit has passed. Then return a result that reflects the state of the device."""
        try:
            result = convert.RESULT.from_pb(await call)
            if [item.cross_connect for item in result.items] == [*wanted.remove, *wanted.add]:
                self._ownership.release(_not_here(result.items))
                return result
            words = "the driver process must return a result for every circuit of the change, in order"
        except DriverOutcomeUnknown as error:
            words = str(error)
        except ValueError as error:
            words = f"invalid response from the driver process: {error}"
        reconfiguration_s = (await self._after_setting(self.facts())).reconfiguration_s
        began_s = self._clock.now_s()
        deadline_s = began_s + max(1.0, 10 * reconfiguration_s)
        while True:
            reading = await self._after_setting(self.cross_connects())
            items = _as_shown(wanted, reading, words)
            now_s = self._clock.now_s()
            if all(item.done for item in items) or now_s >= deadline_s:
                until_s = reading.unconfirmed.until_s if reading.unconfirmed else None
                return CommitResult(items, reading.revision, commands_sent=1, revert_at_s=until_s)
            await self._clock.sleep(min(poll_pause_s(reconfiguration_s, now_s - began_s), deadline_s - now_s))

    async def _set(
        self, command: str, request: ocs_pb2.CommitRequest | ocs_pb2.RollbackRequest
    ) -> ocs_pb2.CommitResult:
        await self._connect(command)  # later failures may leave the change in effect
        result: ocs_pb2.CommitResult = await self._call(command, request, self._commit_timeout_s, is_setter=True)
        return result

    async def _begin_commit(self, call: "_CommitCall") -> ocs_pb2.CommitResult:
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                await call.write(_BEGIN)
                answer = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, "CommitArmed", is_setter=True) from None
        except (TimeoutError, asyncio.InvalidStateError) as error:  # the latter: the call ended at this very moment
            call.cancel()
            message = f"the driver process at {self._target} did not return a result"
            raise DriverOutcomeUnknown(message, device=self.device, command="CommitArmed", answer=str(error)) from None
        if not isinstance(answer, ocs_pb2.CommitAnswer) or not answer.HasField("result"):
            message = f"the driver process at {self._target} ended without a result"
            raise DriverOutcomeUnknown(message, device=self.device, command="CommitArmed")
        return answer.result

    async def _after_setting(self, reading: Awaitable[Response]) -> Response:
        try:
            return await reading
        except (DriverPermanent, DriverRetryable) as error:
            raise DriverOutcomeUnknown(
                f"cannot read the device after a command was sent to it: {error.message}",
                device=self.device,
                command=error.command,
                answer=error.answer,
            ) from error

    def _sense(self, read: Callable[[Response], Value], response: Response) -> Value:
        try:
            return read(response)
        except ValueError as error:
            raise DriverPermanent(f"invalid response from the driver process: {error}", device=self.device) from None

    def _opened(self) -> "tuple[grpc.aio.Channel, ocs_pb2_grpc.OcsDriverAsyncStub]":
        if self._session is None:
            channel = grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS)
            self._session = channel, ocs_pb2_grpc.OcsDriverStub(channel)
        return self._session

    async def _call(
        self, command: str, request: Message, timeout_s: float | None = None, *, is_setter: bool = False
    ) -> Any:
        """Call the method `command` of the driver process and return its response. Raises a DriverError if the call
        fails. `is_setter` is set if the call may change the device, so that the outcome is unknown if the response is
        lost."""
        try:
            return await getattr(self._opened()[1], command)(request, timeout=timeout_s or self._command_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, command, is_setter=is_setter) from None

    async def _connect(self, command: str) -> None:
        channel, _ = self._opened()
        if channel.get_state() is grpc.ChannelConnectivity.READY:
            return  # without yielding to the event loop: a window may be open
        try:
            await asyncio.wait_for(channel.channel_ready(), self._command_timeout_s)
        except TimeoutError:
            message = f"the driver process at {self._target} cannot be reached; nothing was sent"
            raise DriverRetryable(message, device=self.device, command=command) from None

    def _translated(self, error: grpc.aio.AioRpcError, command: str, *, is_setter: bool) -> DriverError:
        for key, value in error.trailing_metadata() or ():
            if key == ERROR_METADATA and isinstance(value, bytes):
                with suppress(DecodeError):  # then only the status is used
                    return convert.error_from_pb(ocs_pb2.DriverError.FromString(value), self.device)
        words = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidChange(words.splitlines(), device=self.device)
            case grpc.StatusCode.FAILED_PRECONDITION:
                return CircuitConflict(words.splitlines(), device=self.device)
            case grpc.StatusCode.UNIMPLEMENTED:
                return DriverPermanent(
                    "the driver process does not support this call", device=self.device, command=command
                )
            case code if is_setter:
                message = f"the driver process at {self._target} did not return a result ({code.name})"
                return DriverOutcomeUnknown(message, device=self.device, command=command, answer=words)
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED as code:
                message = f"the driver process at {self._target} cannot be reached ({code.name})"
                return DriverRetryable(message, device=self.device, command=command, answer=words)
            case code:
                message = f"the driver process at {self._target} failed ({code.name})"
                return DriverPermanent(message, device=self.device, command=command, answer=words)


@dataclass(frozen=True, slots=True)
class _ArmedCommit:
    """A commit that the driver process has received and that waits for the signal to start. `carry_out` sends the
    signal and returns the result."""

    call: "_CommitCall"
    carry_out: Callable[[], Awaitable[CommitResult]]

    async def begin(self) -> CommitResult:
        return await self.carry_out()

    def disarm(self) -> None:
        self.call.cancel()


def _commit_request(diff: CircuitDiff, expect_revision: int, revert_in_s: float | None) -> ocs_pb2.CommitRequest:
    return ocs_pb2.CommitRequest(
        diff=convert.DIFF.to_pb(diff), expect_revision=expect_revision, revert_in_s=revert_in_s
    )


def _unfit_ports(named: Mapping[str, Iterable[CrossConnect]]) -> list[str]:
    """Return a fault for each port number that does not fit into a message. `named` maps the names of parameters to
    their circuits."""
    return [
        f"{name}[{index}].{side}: must be within 0..{LARGEST_PORT}, got {port}"
        for name, pairs in named.items()
        for index, pair in enumerate(pairs)
        for side, port in (("ingress_port", pair.ingress_port), ("egress_port", pair.egress_port))
        if not 0 <= port <= LARGEST_PORT
    ]


def _not_here(items: Iterable[CrossConnectResult]) -> list[CrossConnect]:
    """Return the circuits that cannot appear on the device later, because they were removed, or were refused before a
    command was sent."""
    return [
        item.cross_connect
        for item in items
        if (item.done if item.action is Action.REMOVE else not item.done and item.commanded_s is None)
    ]


def _as_shown(wanted: CommandSteps, reading: CrossConnectReading, text: str) -> tuple[CrossConnectResult, ...]:
    """Return one result for each circuit of the change, derived from the state that the device shows. `text` is the
    reason why the driver process did not return the results."""
    tuned = {circuit.cross_connect for circuit in reading.circuits if circuit.state is CircuitState.TUNED}
    gone = [CrossConnectResult(pair, Action.REMOVE, pair not in reading.cross_connects, text) for pair in wanted.remove]
    return (*gone, *(CrossConnectResult(pair, Action.ADD, pair in tuned, text) for pair in wanted.add))
