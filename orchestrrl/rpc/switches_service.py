"""The Switches service, with which operators and tools inspect and change the optical circuit switches that the daemon
drives.

Orders through this service are carried out even in the mode `advise`, which only restricts the daemon's own decisions.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import grpc

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import DriverError, DriverFaults, InvalidChange
from ocs_drivers.model import (
    Action,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CrossConnectResult,
    PortState,
    SwitchFacts,
)
from ocs_drivers.registry import make_driver
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import SwitchSettings
from orchestrrl.core.errors import ProblemFaults, cut
from orchestrrl.core.ttl import MOST_S
from orchestrrl.fabric.circuit_change import CircuitOutcome
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.rpc.codec import Codec, optional
from orchestrrl.rpc.codecs import ocs as convert
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.pb import control_pb2_grpc
from orchestrrl.rpc.refusals import Context, status_text

logger = logging.getLogger(__name__)

# How long a shutdown waits for running changes.
DRAIN_S = 5.0

_OUTCOME = Codec(CircuitOutcome, pb.SwitchChange, beside="dry_run", items=("results", convert.ITEM))
_PORT = Codec(PortState, pb.SwitchPort, status="state")
_FACTS = Codec(
    SwitchFacts,
    pb.Switch,
    beside="switch_id driver reachable detail port_states cross_connects revision circuits unconfirmed",
    ports="ports",
    ingress_ports=convert.PORTS,
    egress_ports=convert.PORTS,
    boot="boot_behaviour",
)


def drivers_of(settings: Iterable[SwitchSettings], clock: Clock) -> dict[str, OcsDriver]:
    """Create a driver for every entry of the section `ocs`. If any entries are invalid, raises ProblemFaults with all
    of their faults."""
    drivers: dict[str, OcsDriver] = {}
    faults: list[str] = []
    for index, entry in enumerate(settings):
        try:
            drivers[entry.id] = make_driver(entry.driver, entry.id, entry.options, clock)
        except DriverFaults as error:
            faults += [f"ocs[{index}].{fault}" for fault in error.faults]
    if faults:
        raise ProblemFaults(faults)
    return drivers


class SwitchesService(control_pb2_grpc.SwitchesServicer):
    """The servicer of the given switches. `settings` is the configuration from which their drivers were created. The
    daemon calls `close` when it shuts down."""

    def __init__(
        self, switches: Mapping[str, OcsDriver], executor: CircuitExecutor, settings: Sequence[SwitchSettings] = ()
    ) -> None:
        self._switches = switches
        self._executor = executor
        self._driver_names = {entry.id: entry.driver for entry in settings}
        self._under_way: set[asyncio.Future[CircuitOutcome]] = set()

    async def close(self) -> None:
        """Wait up to `DRAIN_S` seconds for running changes, then close the drivers. Changes that have not ended stay
        open in the journal for the next daemon."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=DRAIN_S)
        for change in self._under_way:
            change.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for switch, driver in self._switches.items():
            try:
                await driver.close()
            except DriverError as error:  # a trial that could not be reverted: the next daemon reverts it
                logger.error("switch %s is left unchanged: %s", switch, error)
            except Exception:  # from one driver: trials of the others must still be reverted
                logger.exception("switch %s is left unchanged", switch)

    async def ListSwitches(self, request: pb.ListSwitchesRequest, context: Context) -> pb.ListSwitchesResponse:
        switches = await asyncio.gather(*(self._read(switch) for switch in self._switches))
        return pb.ListSwitchesResponse(switches=switches)

    async def ShowSwitch(self, request: pb.ShowSwitchRequest, context: Context) -> pb.Switch:
        await self._require(request.switch_id, context)
        return await self._read(request.switch_id)

    async def ConnectPorts(self, request: pb.ConnectPortsRequest, context: Context) -> pb.SwitchChange:
        await self._require(request.switch_id, context)
        faults = [] if request.cross_connects else ["cross_connects: must have at least one cross-connect, got []"]
        if request.mode not in ("", *ChangeMode):
            faults.append(f"mode: must be one of {', '.join(ChangeMode)}, got {request.mode!r}")
        if faults:
            raise InvalidChange(faults)
        change = CircuitChange(connect=convert.pairs_from_pb(request.cross_connects))
        return await self._change(request, change, ChangeMode(request.mode or ChangeMode.SAFE))

    async def DisconnectPorts(self, request: pb.DisconnectPortsRequest, context: Context) -> pb.SwitchChange:
        await self._require(request.switch_id, context)
        if not request.cross_connects:
            raise InvalidChange(["cross_connects: must have at least one cross-connect, got []"])
        change = CircuitChange(disconnect=convert.pairs_from_pb(request.cross_connects))
        return await self._change(request, change, ChangeMode.SAFE)

    async def ConfirmPorts(self, request: pb.ConfirmPortsRequest, context: Context) -> pb.SwitchChange:
        await self._require(request.switch_id, context)
        return await self._to_its_end(self._executor.confirm(request.switch_id))

    async def TakeOverPorts(self, request: pb.TakeOverPortsRequest, context: Context) -> pb.SwitchChange:
        await self._require(request.switch_id, context)
        if not request.cross_connects:
            raise InvalidChange(["cross_connects: must have at least one cross-connect, got []"])
        pairs = convert.pairs_from_pb(request.cross_connects)
        reading = await self._executor.take_over(request.switch_id, pairs)
        detail = f"owned from now on: {' '.join(str(pair) for pair in pairs)}"
        return pb.SwitchChange(switch_id=request.switch_id, done=True, revision=reading.revision, detail=detail)

    async def _change(
        self, request: pb.ConnectPortsRequest | pb.DisconnectPortsRequest, change: CircuitChange, mode: ChangeMode
    ) -> pb.SwitchChange:
        switch = request.switch_id
        revert_in_s = optional(request, "revert_in_s")
        if revert_in_s is not None and not 0 < revert_in_s <= MOST_S:
            most = f" and <= {MOST_S:.0f}" if revert_in_s > MOST_S else ""
            raise InvalidChange([f"revert_in_s: must be > 0{most}, got {revert_in_s:g}"])
        if request.dry_run:
            return _planned(switch, await self._executor.plan(switch, change, mode))
        expect_revision = optional(request, "expect_revision")
        return await self._to_its_end(self._executor.change(switch, change, mode, expect_revision, revert_in_s))

    async def _to_its_end(self, work: Coroutine[Any, Any, CircuitOutcome]) -> pb.SwitchChange:
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        # Completed even if the operator disconnects, because a half-finished change must not remain.
        return _OUTCOME.to_pb(await asyncio.shield(task))

    def _ended(self, task: "asyncio.Future[CircuitOutcome]") -> None:
        self._under_way.discard(task)
        error = None if task.cancelled() else task.exception()  # its caller may have disconnected
        if isinstance(error, DriverError):
            logger.info("a change was refused or failed: %s", cut(str(error)))
        elif error is not None:
            logger.error("unexpected exception in a change", exc_info=error)

    async def _require(self, switch: str, context: Context) -> None:
        await context.send_initial_metadata(())  # informs the client that it is connected
        if switch not in self._switches:
            known = ", ".join(sorted(self._switches)) or "none is configured"
            words = status_text(f"unknown switch {switch!r} (known: {known})")
            await context.abort(grpc.StatusCode.NOT_FOUND, words)

    async def _read(self, switch: str) -> pb.Switch:
        """Return the present state of a switch. If the switch cannot be read, `detail` contains the reason."""
        driver = self._switches[switch]
        message = pb.Switch(switch_id=switch, driver=self._driver_names.get(switch, ""))
        try:
            facts, ports = await driver.facts(), await driver.ports()
            reading = await self._executor.owners.read(switch)
        except DriverError as error:
            message.detail = str(error)
            return message
        except Exception as error:  # from one driver: the other switches are still shown
            logger.exception("switch %s cannot be read", switch)
            message.detail = f"{type(error).__name__}: {error}"
            return message
        message.MergeFrom(_FACTS.to_pb(facts))
        message.MergeFrom(
            pb.Switch(
                reachable=True,
                port_states=map(_PORT.to_pb, ports),
                cross_connects=convert.pairs_to_pb(circuit.cross_connect for circuit in reading.circuits),
                revision=reading.revision,
                circuits=map(convert.CIRCUIT.to_pb, reading.circuits),
                unconfirmed=convert.UNCONFIRMED.to_pb(reading.unconfirmed) if reading.unconfirmed else None,
            )
        )
        return message


def _planned(switch: str, diff: CircuitDiff) -> pb.SwitchChange:
    both = ((Action.REMOVE, diff.remove), (Action.ADD, diff.add))
    results = [CrossConnectResult(pair, action, done=False) for action, pairs in both for pair in pairs]
    return pb.SwitchChange(
        switch_id=switch,
        results=map(convert.ITEM.to_pb, results),
        evicted=convert.pairs_to_pb(diff.evicted),
        revision=diff.revision,
        detail="already in effect" if diff.empty else "",
        dry_run=True,
    )
