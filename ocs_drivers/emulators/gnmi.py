"""Implement the gNMI servers of emulated switches, with the tables of SONiC-OCS or the model proposed to OpenConfig.

The servers implement Capabilities, Get, Set and Subscribe (modes ONCE and STREAM), with pygnmi's generated servicer on
grpc.aio. A SetRequest is validated as a whole before any change, and carried out in the order delete, replace, update.
If the device applies only a part of a change, that part is not undone. Clients connect through a relay, which can break
connections. gnmi_targets.py implements the devices.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as File
from typing import Annotated, Any, NoReturn

import grpc
from pygnmi.spec.v080 import gnmi_pb2, gnmi_pb2_grpc

from ocs_drivers.base import DeviceClock
from ocs_drivers.driver import within
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice, EmulatedTcpServer
from ocs_drivers.emulators.gnmi_targets import (
    GnmiChange,
    GnmiRefusal,
    GnmiTarget,
    OpenConfigTarget,
    Operation,
    Row,
    SonicTarget,
)
from ocs_drivers.gnmi_data import Path, mapping, path_from_pb, path_to_pb, shown, value_from_pb, value_to_pb
from ocs_drivers.gnmi_session import MESSAGE_OPTIONS
from ocs_drivers.options import CheckedOptions, Flag, YamlText, is_whole, must_be

LONGEST_WAIT_S = 3600.0


class GnmiQuirks(CheckedOptions):
    """Configurable behaviour common to all gNMI servers. If `user` is set, each call must carry `user` and `password`
    in its metadata. The fields that begin with `tls_` are paths of PEM files."""

    user: YamlText = ""
    password: YamlText = ""
    tls_cert_file: YamlText = ""
    tls_key_file: YamlText = ""
    tls_client_ca_file: YamlText = ""


class SonicQuirks(GnmiQuirks):
    """Configurable behaviour of a SONiC-OCS server. `tables` selects the tables of SONiC's OCS design ("design") or of
    the image `ocs-kvm` ("image"). `origin` is the origin of paths. If `leftovers` is True, circuits that the hardware
    refused stay in the configuration."""

    tables: YamlText = "design"
    origin: YamlText = "sonic-db"
    leftovers: Flag = False


class OpenConfigQuirks(GnmiQuirks):
    """Configurable behaviour of a server with the OpenConfig model. If `any_to_any` is True, all ports form a single
    range. If `mirrored` is True, connections are listed under both of their ports. `first_index` is the lowest port
    number."""

    any_to_any: Flag = False
    mirrored: Flag = False
    first_index: Annotated[int, must_be("a whole number", is_whole)] = 1


def sonic(panel: DevicePanel, clock: DeviceClock | None = None, **given: Any) -> "GnmiEmulator":
    quirks = SonicQuirks.read(given, prefix="")
    return GnmiEmulator(SonicTarget(panel, clock, quirks.tables, quirks.origin, quirks.leftovers), quirks)


def openconfig(panel: DevicePanel, clock: DeviceClock | None = None, **given: Any) -> "GnmiEmulator":
    quirks = OpenConfigQuirks.read(given, prefix="")
    target = OpenConfigTarget(panel, clock, quirks.any_to_any, quirks.mirrored, quirks.first_index)
    return GnmiEmulator(target, quirks)


@dataclass(frozen=True, slots=True)
class RelayedConnection:
    session: int  # the device's session number, which is no longer valid after a restart
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class TcpRelay(EmulatedTcpServer):
    """A TCP relay in front of a gRPC server, so that an emulator can break the connection of a call.

    grpc.aio can end calls, but not connections. For each client connection, the relay opens one connection to the
    server and forwards the bytes, whether encrypted or not. It finds a call's connection by the peer address that the
    server sees. `new_session` is called for each connection and returns the number of its session.
    """

    def __init__(self, new_session: Callable[[], int]) -> None:
        super().__init__()
        self.server_port = 0  # must be set before start
        self._new_session = new_session
        self._connections: dict[int, RelayedConnection] = {}  # by the relay's port towards the server

    def connection(self, peer: str) -> RelayedConnection | None:
        """Return the client connection that carries the calls of `peer`, such as `ipv4:127.0.0.1:PORT`, or None if the
        connection is closed."""
        port = peer.rpartition(":")[2]
        return self._connections.get(int(port)) if port.isdecimal() else None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = self._new_session()
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.server_port)
        port = upstream.get_extra_info("sockname")[1]
        connection = RelayedConnection(session, (writer, upstream))
        self._connections[port] = connection
        ways = [asyncio.ensure_future(_pump(reader, upstream)), asyncio.ensure_future(_pump(upstream_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            connection.abort()
            del self._connections[port]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # one connection broke; the other is then closed
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


class GnmiEmulator(gnmi_pb2_grpc.gNMIServicer):  # type: ignore[misc]  # pygnmi is not typed
    """The service gnmi.gNMI in front of one `GnmiTarget`."""

    def __init__(self, target: GnmiTarget, quirks: GnmiQuirks) -> None:
        self.device: EmulatedDevice = target.device
        self._target = target
        self._quirks = quirks
        self._relay = TcpRelay(self.device.session)
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._server = grpc.aio.server(options=MESSAGE_OPTIONS)
        gnmi_pb2_grpc.add_gNMIServicer_to_server(self, self._server)
        files = (self._quirks.tls_cert_file, self._quirks.tls_key_file, self._quirks.tls_client_ca_file)
        certificate, key, client_ca = await asyncio.to_thread(_contents, files)
        if certificate is None or key is None:
            self._relay.server_port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            chain = [(key, certificate)]
            credentials = grpc.ssl_server_credentials(chain, client_ca, require_client_auth=client_ca is not None)
            self._relay.server_port = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        return await self._relay.start(host, port)

    async def stop(self) -> None:
        await self._relay.stop()
        if self._server is not None:
            await self._server.stop(None)

    async def Capabilities(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        models = [gnmi_pb2.ModelData(name=name, version=version) for name, version in self._target.models.items()]
        encodings = [gnmi_pb2.JSON, gnmi_pb2.JSON_IETF]
        return gnmi_pb2.CapabilityResponse(supported_models=models, supported_encodings=encodings, gNMI_version="0.7.0")

    async def Get(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        try:
            return gnmi_pb2.GetResponse(notification=[self._found(request, message) for message in request.path])
        except GnmiRefusal as refusal:
            await _refuse(context, refusal)

    async def Set(self, request: Any, context: Any) -> Any:
        connection = await self._admit(context)
        try:
            changes = self._changes(request)
            await self._target.transact(changes)
        except GnmiRefusal as refusal:
            await _refuse(context, refusal)
        except ConnectionBroken:
            await _break(connection, context)
        results = [gnmi_pb2.UpdateResult(path=path_to_pb(change.path), op=change.op) for change in changes]
        return gnmi_pb2.SetResponse(response=results, timestamp=self._timestamp())

    async def Subscribe(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        connection = await self._admit(context)
        queue = self.device.listen()
        try:
            listed = (await anext(requests)).subscribe
            wanted = [self._supported_path(listed, subscription.path) for subscription in listed.subscription]
            if listed.mode == gnmi_pb2.SubscriptionList.POLL:
                raise GnmiRefusal("mode POLL is not supported", grpc.StatusCode.UNIMPLEMENTED)
            before: dict[Path, Row] = {}
            async for response in self._news(wanted, before):
                yield response
            yield gnmi_pb2.SubscribeResponse(sync_response=True)
            while listed.mode == gnmi_pb2.SubscriptionList.STREAM:
                await self._change(queue)
                if not self.device.is_alive(connection.session):
                    await _break(connection, context)
                async for response in self._news(wanted, before):
                    yield response
        except StopAsyncIteration:
            return
        except GnmiRefusal as refusal:
            await _refuse(context, refusal)
        finally:
            self.device.unlisten(queue)

    async def _news(self, wanted: list[Path], before: dict[Path, Row]) -> AsyncIterator[Any]:
        """Yield a response with the differences between the present rows below `wanted` and `before`, the rows reported
        last. Yield nothing if there are no differences. Update `before`."""
        now: dict[Path, Row] = {}
        for below in wanted:
            now |= self._target.rows(below)
        gone = [elems for elems in before if elems not in now]
        new = [elems for elems, row in now.items() if before.get(elems) != row]
        before.clear()
        before.update(now)
        if gone or new:
            update = [gnmi_pb2.Update(path=path_to_pb(elems), val=value_to_pb(now[elems])) for elems in new]
            delete = [path_to_pb(elems) for elems in gone]
            notification = gnmi_pb2.Notification(timestamp=self._timestamp(), update=update, delete=delete)
            yield gnmi_pb2.SubscribeResponse(update=notification)

    async def _change(self, queue: asyncio.Queue[Any]) -> None:
        """Wait until rows may have changed: until the device sends an event, moving mirrors are in place or a scheduled
        fault takes effect, but at most `LONGEST_WAIT_S` seconds."""
        device = self.device
        wait_s = min(device.advance(), device.moving_s(), LONGEST_WAIT_S)
        try:
            await within(device.clock, wait_s, queue.get())
        except TimeoutError:
            return
        while not queue.empty():
            queue.get_nowait()

    def _found(self, request: Any, message: Any) -> Any:
        if request.encoding not in (gnmi_pb2.JSON, gnmi_pb2.JSON_IETF):
            raise GnmiRefusal("unsupported encoding", grpc.StatusCode.UNIMPLEMENTED)
        if request.type != gnmi_pb2.GetRequest.ALL:
            raise GnmiRefusal("unsupported request type", grpc.StatusCode.UNIMPLEMENTED)
        elems = self._supported_path(request, message)
        data: Any = self._target.tree()
        for elem in elems:
            data = data.get(elem.name) if isinstance(data, dict) else None
            if elem.keys and isinstance(data, list):
                data = next((each for each in data if all(each[key] == value for key, value in elem.keys)), None)
        if data is None or data == {}:
            raise GnmiRefusal(f"No valid entry found on {shown(elems)}", grpc.StatusCode.NOT_FOUND)
        value = value_to_pb(data)
        if request.encoding == gnmi_pb2.JSON:
            value = gnmi_pb2.TypedValue(json_val=value.json_ietf_val)
        return gnmi_pb2.Notification(timestamp=self._timestamp(), update=[gnmi_pb2.Update(path=message, val=value)])

    def _changes(self, request: Any) -> list[GnmiChange]:
        changes = [GnmiChange(Operation.DELETE, self._supported_path(request, message)) for message in request.delete]
        for op, updates in ((Operation.REPLACE, request.replace), (Operation.UPDATE, request.update)):
            for update in updates:
                try:
                    value = value_from_pb(update.val)
                except ValueError as error:
                    raise GnmiRefusal(f"not JSON: {error}") from None
                changes.append(GnmiChange(op, self._supported_path(request, update.path), value))
        return changes

    def _supported_path(self, request: Any, message: Any) -> Path:
        """Convert `message`, a path message of the request, to a path. Raises GnmiRefusal if the path's origin is not
        supported."""
        origin = message.origin or request.prefix.origin
        if origin not in self._target.origins:
            raise GnmiRefusal(f"origin {origin!r} is not supported", grpc.StatusCode.UNIMPLEMENTED)
        return path_from_pb(message, request.prefix)

    async def _admit(self, context: Any) -> RelayedConnection:
        """Return the call's connection. Aborts the call if the connection is closed or the login is wrong."""
        connection = self._relay.connection(context.peer())
        if connection is None or not self.device.is_alive(connection.session):
            await _break(connection, context)
        told = mapping(dict(context.invocation_metadata()))
        login = (self._quirks.user, self._quirks.password)
        if self._quirks.user and (told.get("username"), told.get("password")) != login:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid Username or Password")
        return connection

    def _timestamp(self) -> int:
        return int(self.device.clock.now_s() * 1e9)


async def _break(connection: RelayedConnection | None, context: Any) -> NoReturn:
    if connection is not None:
        connection.abort()
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is closed")
    raise AssertionError("abort raises")


async def _refuse(context: Any, refusal: GnmiRefusal) -> NoReturn:
    await context.abort(refusal.code, str(refusal))
    raise AssertionError("abort raises")


def _contents(files: tuple[str, ...]) -> list[bytes | None]:
    return [File(file).read_bytes() if file else None for file in files]
