"""Connect to a gNMI server, call its methods Capabilities, Get, Set and Subscribe, and translate errors into driver
errors. `GnmiWire` is the base class of the wires for all data models. Each subclass defines the paths of one model.

The driver uses pygnmi's generated messages but not its client. The client blocks, has no time limits for Get and Set,
logs to standard output, and trusts any certificate if no CA file is given. grpc.aio, in contrast, runs in the event
loop and needs no threads.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path as File
from typing import Any, TypeVar

import grpc
from pygnmi.spec.v080 import gnmi_pb2, gnmi_pb2_grpc

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.gnmi_data import (
    Path,
    mapping,
    member,
    path_from_pb,
    path_to_pb,
    shown,
    tree,
    value_from_pb,
    value_to_pb,
)
from ocs_drivers.model import CrossConnect, EventKind, SwitchCapabilities, SwitchEvent
from ocs_drivers.options import Address, DriverOptions, FilledText, Flag, Password, SecondsOr0, Text, split_address

T = TypeVar("T")

MESSAGE_OPTIONS = tuple((f"grpc.max_{way}_message_length", 64 * 1024 * 1024) for way in ("receive", "send"))
# A channel serves one session and never reconnects on its own, because the caller must notice a reconnection. By
# default gRPC would share connections, and their pauses after a failure, between all channels of a process, retry
# calls, and use the environment's proxy.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    *MESSAGE_OPTIONS,
)

# Responses to a Set that mean that nothing was applied. After any other response, this is not certain, because servers
# are known to report failures (UNKNOWN) of changes that they applied.
REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


DEFAULT_PORT = 9339


class GnmiModel(StrEnum):
    SONIC = "sonic"
    OPENCONFIG = "openconfig"


class GnmiOptions(DriverOptions):
    address: Address
    model: GnmiModel = GnmiModel.SONIC
    tls: Flag = True
    tls_ca_file: Text = ""
    tls_cert_file: Text = ""
    tls_key_file: Text = ""
    tls_server_name: Text = ""
    user: Text = ""
    password: Password = ""
    origin: Text = ""
    slot: FilledText = "1"
    reconfiguration_s: SecondsOr0 = 0.025

    def conflicts(self) -> list[str]:
        wrong = []
        if not self.tls:
            named = [(name, text) for name, text in dict(self).items() if name.startswith("tls_") and text]
            wrong += [f"{name}: must be empty without tls, got {text!r}" for name, text in named]
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            wrong.append(f"tls_cert_file: must be set together with tls_key_file, got {self.tls_cert_file!r}")
        if self.password and not self.user:
            wrong.append("user: must be set when password is given, got ''")
        return wrong


class NotThere(DriverPermanent):
    """Raised when the server has no data at the requested path."""


async def _content(file: str) -> bytes | None:
    try:
        return await asyncio.to_thread(File(file).read_bytes) if file else None
    except OSError as error:
        raise DriverPermanent(f"cannot read {file}: {error.strerror}") from None


def _subscription(paths: Sequence[Path], origin: str) -> Any:
    wanted = [gnmi_pb2.Subscription(path=path_to_pb(elems, origin), mode=gnmi_pb2.ON_CHANGE) for elems in paths]
    listed = gnmi_pb2.SubscriptionList(
        subscription=wanted, mode=gnmi_pb2.SubscriptionList.STREAM, encoding=gnmi_pb2.JSON_IETF
    )
    return gnmi_pb2.SubscribeRequest(subscribe=listed)


async def _translated(command: str, call: Awaitable[T], *, is_setter: bool = False) -> T:
    """Await a gRPC call and return its result. Raises DriverPermanent if the server refuses the call. For any other
    failure, raises DriverOutcomeUnknown if the call is a setter, and DriverRetryable otherwise."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        code, answer = error.code(), f"{error.code().name}: {error.details() or 'no details'}"
    except grpc.aio.UsageError as error:  # the channel was closed during the call
        code, answer = grpc.StatusCode.CANCELLED, f"CANCELLED: {error}"
    if code is grpc.StatusCode.NOT_FOUND:
        raise NotThere("the server has no data at the requested path", command=command, answer=answer)
    if code in REFUSALS:
        raise DriverPermanent("refused", command=command, answer=answer)
    if is_setter:
        raise DriverOutcomeUnknown(
            f"the request failed with status {code.name}, and the change may or may not have been applied",
            command=command,
            answer=answer,
        )
    raise DriverRetryable(f"the request failed with status {code.name}", command=command, answer=answer)


class GnmiWire(SwitchWire):
    """Implements `base.SwitchWire` over a session with the gNMI server of one switch. `SwitchDriver` reopens the
    session after an error."""

    capabilities = SwitchCapabilities(bulk=True, tuned_state=True, events=True)

    def __init__(self, options: GnmiOptions, clock: DeviceClock) -> None:
        self._options = options
        self._origin = options.origin
        self._clock = clock
        self._metadata = (("username", options.user), ("password", options.password)) if options.user else ()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    @abstractmethod
    async def attach(self, models: Mapping[str, str]) -> None:
        """Read the data that the other operations need. `models` maps the name of each model that the device supports
        to the model's version."""

    @abstractmethod
    def watched(self) -> Sequence[Path]:
        """Return the paths to subscribe to for changes of ports and circuits. The ports and circuits must have been
        read before."""

    async def open(self) -> None:
        self._channel = await self._new_channel()
        self._stub = gnmi_pb2_grpc.gNMIStub(self._channel)
        request = self._stub.Capabilities(gnmi_pb2.CapabilityRequest(), metadata=self._metadata)
        response = await _translated("Capabilities", request)
        await self.attach({model.name: model.version for model in response.supported_models})

    async def close(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def tree(self, where: Path) -> Mapping[str, Any]:
        """Read the container at the path `where`, assembled from all updates in the response. The result is empty if
        the server has no data at this path."""
        command = f"Get {self._origin}:{shown(where)}" if self._origin else f"Get {shown(where)}"
        request = gnmi_pb2.GetRequest(path=[path_to_pb(where, self._origin)], encoding=gnmi_pb2.JSON_IETF)
        try:
            response = await _translated(command, self._live().Get(request, metadata=self._metadata))
        except NotThere:
            return {}
        try:
            updates = [
                (path_from_pb(update.path, notification.prefix), value_from_pb(update.val))
                for notification in response.notification
                for update in notification.update
            ]
        except ValueError as error:
            raise DriverPermanent(f"invalid response: {error}", command=command) from None
        rooted = [(elems if elems[: len(where)] == where else (*where, *elems), value) for elems, value in updates]
        return mapping(member(tree(rooted), *(elem.name for elem in where)))

    async def transact(self, *, delete: Sequence[Path] = (), update: Sequence[tuple[Path, object]] = ()) -> None:
        """Send one SetRequest. Each path to delete must identify one entry of a list or table, because a path without
        the entry's key denotes all entries."""
        request = gnmi_pb2.SetRequest(
            delete=[path_to_pb(elems, self._origin) for elems in delete],
            update=[
                gnmi_pb2.Update(path=path_to_pb(elems, self._origin), val=value_to_pb(value)) for elems, value in update
            ],
        )
        told = [f"delete {shown(elems)}" for elems in delete] + [f"update {shown(elems)}" for elems, _ in update]
        call = self._live().Set(request, metadata=self._metadata)
        await _translated(f"Set {' '.join(told)}", call, is_setter=True)

    async def changes(self, paths: Sequence[Path]) -> AsyncGenerator[None, None]:
        """Yield once when the subscription is established, and again after changes at or below the paths. All changes
        that arrive while the caller is busy are combined into one item."""
        command = f"Subscribe {' '.join(shown(elems) for elems in paths)}"
        call = self._live().Subscribe(metadata=self._metadata)
        has_changed = asyncio.Event()

        async def listen() -> None:
            is_synced = False
            try:
                await _translated(command, call.write(_subscription(paths, self._origin)))
                while (response := await _translated(command, call.read())) is not grpc.aio.EOF:
                    if is_synced := is_synced or response.sync_response:
                        has_changed.set()
                raise DriverRetryable("the server ended the subscription", command=command)
            finally:
                has_changed.set()

        listening = asyncio.create_task(listen())
        try:
            while await has_changed.wait():
                has_changed.clear()
                if listening.done():
                    await listening
                yield
        finally:
            call.cancel()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        # Use a separate connection, because the one for commands may be dropped at any time.
        watcher = type(self)(self._options, self._clock)
        try:
            await watcher.open()
            known = await watcher._states()
            async with aclosing(watcher.changes(watcher.watched())) as changes:
                # Servers report a list, an entry or a leaf of one. In each case the device is read again.
                async for _ in changes:
                    now = await watcher._states()
                    for each in {**known, **now}:
                        if (state := now.get(each, "is gone")) == known.get(each):
                            continue
                        at_s = self._clock.now_s()
                        if isinstance(each, int):
                            yield SwitchEvent(at_s, EventKind.PORT, f"port {each} {state}", port=each)
                        else:
                            yield SwitchEvent(at_s, EventKind.CIRCUIT, f"{each} {state}", cross_connect=each)
                    known = now
        except ValueError as error:
            raise DriverPermanent(f"invalid response: {error}") from None
        finally:
            await watcher.close()

    async def _states(self) -> dict[int | CrossConnect, str]:
        """Return the status of every port, keyed by port number, and the state of every circuit, keyed by
        cross-connect."""
        ports, circuits = await self.read_ports(), await self.read_circuits()
        return {
            **{port.port: port.status for port in ports},
            **{circuit.cross_connect: circuit.state for circuit in circuits},
        }

    def _live(self) -> Any:
        if self._stub is None:
            raise DriverRetryable("no session with the device is open", after_s=0.0)
        return self._stub

    async def _new_channel(self) -> grpc.aio.Channel:
        given = self._options
        host, port = split_address(given.address, DEFAULT_PORT)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not given.tls:
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        named = (given.tls_ca_file, given.tls_key_file, given.tls_cert_file)
        credentials = grpc.ssl_channel_credentials(*await asyncio.gather(*map(_content, named)))
        options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS]
        if given.tls_server_name:
            options.append(("grpc.ssl_target_name_override", given.tls_server_name))
        return grpc.aio.secure_channel(target, credentials, options=options)
