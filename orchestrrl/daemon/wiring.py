"""The daemon: journal, control plane, server and metrics wired together, the two loops, and an orderly end."""

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
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.engine_watcher import DeployedEngineWatcher
from orchestrrl.daemon.fabric_wiring import fabric_of, gen_circuits_of, routing_of, verifier_of
from orchestrrl.daemon.loops import run_loops
from orchestrrl.daemon.metrics import serve_metrics
from orchestrrl.daemon.redeployment_wiring import redeployer_of
from orchestrrl.daemon.weight_syncs import weights_of
from orchestrrl.fabric.switch_events import SwitchEvents
from orchestrrl.fabric.window_tracker import QUANTILE, WindowTracker
from orchestrrl.fleet.found_engines import FoundFleet
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService, drivers_of
from planner.model import Mode

logger = logging.getLogger(__name__)

# How long a stop waits for results that are on their way, and then for calls to end.
DRAIN_S = 2.0
GRACE_S = 0.5


async def run_daemon(
    file: ReloadableConfig, clock: Clock, announce: Callable[[str], None], mode: Mode | None = None
) -> None:
    """Serve until cancelled, then stop in order.

    `announce` gets the address once it is bound; `mode` stands in for the configured one. Raises ProblemFaults for what
    a switch's driver finds wrong, and Permanent when the journal or an address cannot be had.
    """
    config = _with_mode(file.config, mode)
    drivers = drivers_of(config.ocs, clock)
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(Path(config.journal.path), clock.now_s(), config.journal.max_entries))
        plane = ControlPlane(config, journal, clock, offload=asyncio.to_thread)
        switches = SwitchesService(drivers, journal, clock, config.ocs)
        stack.push_async_callback(switches.close)
        switches.recover()
        plane.circuits = switches.executor
        quantile = config.fabric.quantile if config.fabric is not None else QUANTILE
        hub = WindowTracker(clock, quantile, config.limits.nodes)
        plane.routing = routing_of(config, drivers, journal, clock)
        if plane.routing is not None:
            stack.push_async_callback(plane.routing.close)
        plane.fabric = fabric_of(config, drivers, switches.executor, hub, plane, clock, plane.routing)
        plane.verifier = verifier_of(plane, drivers)
        plane.gen_circuits = gen_circuits_of(config, plane.fabric, clock)
        plane.deployment = plane.redeployer = redeployer = redeployer_of(config, plane, clock)
        if redeployer is not None:
            assert config.fleet.launch is not None
            watch, product = DeployedEngineWatcher(plane), config.fleet.launch.engine
            plane.watch_deployed = lambda urls: watch.follow({engine: (url, product) for engine, url in urls.items()})
            stack.push_async_callback(watch.close)
            stack.push_async_callback(redeployer.close)
            plane.planning.unstartable = redeployer.unstartable()
            await redeployer.recover()
        weights = weights_of(config, plane, clock)
        plane.weights = weights.syncs
        weights.syncs.recover()
        server = await DaemonServer.start(plane, config.listen, switches, hub, weights)
        stack.push_async_callback(server.stop, GRACE_S)
        stack.push_async_callback(weights.syncs.close)
        # Undone in reverse: results come in while the server still serves.
        stack.push_async_callback(plane.close, DRAIN_S)
        if config.metrics is not None:
            stack.push_async_callback((await serve_metrics(plane, config.metrics.address, weights.syncs)).cleanup)
        _reload_on_hangup(file, plane, mode, stack)
        announce(server.address)
        async with asyncio.TaskGroup() as tasks:

            def keep(part: str, work: Callable[[], Awaitable[None]]) -> None:
                tasks.create_task(keep_running(part, work, plane.defects, clock))

            keep("switches", switches.run)
            keep("switch_events", SwitchEvents(drivers, clock, partial(_on_news, plane)).run)
            keep("loops", partial(run_loops, plane, clock, plane.defects))
            keep("weight_syncs", weights.syncs.run)
            if redeployer is not None:
                keep("deployment", redeployer.maintain)
            if plane.fabric is not None:
                keep("fabric", plane.fabric.run)
            if plane.routing is not None:
                keep("packet_routes", plane.routing.maintain)
            if plane.gen_circuits is not None and redeployer is not None:
                fleet = FoundFleet(plane, redeployer)
                plane.before_resume = partial(plane.gen_circuits.after_sync, fleet)
                keep("generation_circuits", partial(plane.gen_circuits.maintain, fleet))


def _on_news(control_plane: ControlPlane, switch: str) -> None:
    if control_plane.fabric is not None and switch in control_plane.fabric.site.switch:
        control_plane.fabric.poll_soon()


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
            logger.error("configuration not reloaded, the old one stays in force:\n%s", error)
        except OrchestrRLError as error:
            logger.error("configuration reloaded, and not written down: %s", error)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    stack.callback(loop.remove_signal_handler, signal.SIGHUP)
