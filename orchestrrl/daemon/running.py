"""Run the daemon's process: start its servers and tasks, and shut it down in order."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import Config
from orchestrrl.core.defects import keep_running
from orchestrrl.core.errors import OrchestrRLError, ProblemFaults
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import ReloadableConfig
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.metrics import serve_metrics
from orchestrrl.daemon.redeployment_wiring import DeployedEngineWatcher, deployment_of
from orchestrrl.daemon.wiring import DaemonEdges, build_daemon
from orchestrrl.fabric.switch_events import SwitchEvents
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService, drivers_of
from planner.model import Mode

logger = logging.getLogger(__name__)

# How long a stop waits for open results, and then for calls to end.
DRAIN_S = 2.0
GRACE_S = 0.5


async def run_daemon(
    file: ReloadableConfig,
    clock: Clock,
    announce: Callable[[str], None],
    mode: Mode | None = None,
    listen: str | None = None,
) -> None:
    """Run the daemon until cancelled, then shut it down in order. `announce` is called with the address on which the
    daemon listens, once the address is bound. `mode` and `listen` override the configured mode and address. Raises
    ProblemFaults if a switch's driver finds faults in its options, and Permanent if the journal cannot be opened or an
    address cannot be bound."""
    config = _with_mode(file.config, mode)
    if listen is not None:
        config = config.model_copy(update={"listen": config.listen.model_copy(update={"address": listen})})
    edges = DaemonEdges(
        drivers=drivers_of(config.ocs, clock),
        deployment=deployment_of(config, clock),
        watch=DeployedEngineWatcher,
        offload=asyncio.to_thread,  # telemetry and peers are received meanwhile
    )
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(Path(config.journal.path), clock.now_s(), config.journal.max_entries))
        daemon = build_daemon(config, journal, clock, edges)
        plane, redeployer, routing = daemon.control_plane, daemon.redeployer, daemon.fabric.routing
        fabric, gen_circuits, syncs = daemon.fabric.coordinator, daemon.fabric.gen_circuits, daemon.weights.syncs
        switches = SwitchesService(edges.drivers, daemon.circuits, config.ocs)
        stack.push_async_callback(switches.close)
        if routing is not None:
            stack.push_async_callback(routing.close)
        if daemon.watch is not None:
            stack.push_async_callback(daemon.watch.close)
        if redeployer is not None:
            stack.push_async_callback(redeployer.close)
            await redeployer.recover()
        syncs.recover()
        server = await DaemonServer.start(daemon, config.listen, switches)
        stack.push_async_callback(server.stop, GRACE_S)
        stack.callback(daemon.weights.hub.close)  # peers attach to the next daemon at once
        # Undone in reverse: results are received while the server still serves.
        stack.push_async_callback(plane.fleet.close, DRAIN_S)
        if config.metrics is not None:
            stack.push_async_callback((await serve_metrics(daemon, config.metrics.address)).cleanup)
        _reload_on_hangup(file, plane, mode, stack)
        announce(server.address)
        async with asyncio.TaskGroup() as tasks:

            def on_news(switch: str) -> None:
                if fabric is not None and switch in fabric.site.switch:
                    fabric.poll_soon()

            def keep(part: str, work: Callable[[], Awaitable[None]]) -> None:
                tasks.create_task(keep_running(part, work, plane.defects, clock))

            keep("switches", daemon.circuits.run)
            keep("switch_events", SwitchEvents(edges.drivers, clock, on_news).run)
            keep("loops", partial(run_loops, plane, clock, goes_on=True))
            keep("weight_syncs", syncs.run)
            if redeployer is not None:
                keep("deployment", redeployer.maintain)
            if fabric is not None:
                keep("fabric", fabric.run)
            if routing is not None:
                keep("packet_routes", routing.maintain)
            if gen_circuits is not None and redeployer is not None:
                keep("generation_circuits", partial(gen_circuits.maintain, redeployer))


def _with_mode(config: Config, mode: Mode | None) -> Config:
    return config if mode is None else config.model_copy(update={"mode": mode})


def _reload_on_hangup(
    file: ReloadableConfig, control_plane: ControlPlane, mode: Mode | None, stack: AsyncExitStack
) -> None:
    def reload() -> None:
        try:
            control_plane.reconfigure(_with_mode(file.reload(), mode))
            logger.warning("configuration reloaded")
        except ProblemFaults as error:
            logger.error("configuration not reloaded, keeping the old one:\n%s", error)
        except OrchestrRLError as error:
            logger.error("configuration reloaded, but not journalled: %s", error)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    stack.callback(loop.remove_signal_handler, signal.SIGHUP)
