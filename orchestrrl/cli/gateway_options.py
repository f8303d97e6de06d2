"""Convert the flags of `orchestrrl gateway` into its options, and report all invalid flags at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrrl.cli.command import address_faults, engine_kind_faults, listen_address
from orchestrrl.cli.output import choice_faults, fields, number_faults, raise_faults
from orchestrrl.cli.running import log_level_faults
from orchestrrl.core.engine_arguments import parse_engines
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import EngineRoute
from orchestrrl.gateway.ledger.file import check
from orchestrrl.gateway.ledger.store import RetentionPolicy
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.strategies import STRATEGIES, RoutingPolicy
from orchestrrl.gateway.service import GatewayOptions
from planner.model import EngineId, NodeId

if TYPE_CHECKING:
    from orchestrrl.cli.gateway import GatewayFlags

MOST_PORT = 65535


def read_options(flags: "GatewayFlags") -> GatewayOptions:
    """Return the gateway's options. Raises ProblemFaults if flags are invalid, with an error for every invalid flag."""
    faults: list[str] = []
    host, port = listen_address("--listen", flags.listen, flags.allow_remote, faults)
    operator_host, operator_port = listen_address("--operator", flags.operator, flags.allow_remote, faults)
    if operator_port and operator_port + flags.processes - 1 > MOST_PORT:
        faults.append(f"--operator: must leave ports for --processes {flags.processes}, got {flags.operator!r}")
    engines = parse_engines(flags.engines or [], faults)
    tags = _pairs("affinity", "TAG=POOL", flags.affinity or [], faults)
    pools = {
        EngineId(name): pool for name, pool in _pairs("engine-pool", "ENGINE=POOL", flags.pools or [], faults).items()
    }
    strangers = pools.keys() - engines.keys()
    faults += [f"--engine-pool: must name an --engine, got {name!r}" for name in sorted(strangers)]
    if not flags.engines and flags.daemon is None:
        faults.append("--engine: is required without --daemon")
    if flags.daemon is not None and address_faults(flags.daemon):
        faults.append(f"--daemon: must be HOST:PORT or unix:PATH, got {flags.daemon!r}")
    faults += choice_faults("--policy", flags.policy, STRATEGIES)
    faults += number_faults("> 0", lambda value: value > 0, **fields(flags, "engine_wait_s stall_s report_interval_s"))
    faults += number_faults(
        ">= 0", lambda value: value >= 0, **fields(flags, "drain_s affinity_slack queue_depth session_ttl_s")
    )
    faults += number_faults(">= 1", lambda value: value >= 1, **fields(flags, "coalesce_tokens processes"))
    faults += log_level_faults(flags.log_level)
    faults += engine_kind_faults(flags.engine_kind)
    keep = _keep(flags, faults)
    raise_faults(faults)
    return GatewayOptions(
        host=host,
        port=port,
        operator_host=operator_host,
        operator_port=operator_port,
        node=NodeId(flags.gateway_id),
        engines=tuple(map(EngineRoute, engines.keys(), engines.values())),
        routing=RoutingPolicy(flags.policy, tags, flags.affinity_slack, flags.queue_depth, pools, flags.session_ttl_s),
        limits=RelayLimits(**fields(flags, "engine_wait_s stall_s coalesce_tokens")),
        **fields(flags, "engine_kind daemon report_interval_s drain_s processes log_level reseed"),
        keep=keep,
    )


def _keep(flags: "GatewayFlags", faults: list[str]) -> RetentionPolicy | None:
    before = len(faults)
    faults += number_faults(">= 0", lambda value: value >= 0, keep_from_s=flags.keep_from_s)
    faults += number_faults("> 0", lambda value: value > 0, keep_answers_s=flags.keep_answers_s)
    faults += number_faults(">= 1", lambda value: 1 <= value < 1 << 40, keep_answers_mb=flags.keep_answers_mb)
    if flags.ledger is None or len(faults) > before:
        return None
    try:
        check(flags.ledger)
    except Permanent as error:
        faults.append(f"--ledger: {error}")
        return None
    return RetentionPolicy(
        flags.ledger, flags.keep_from_s, flags.keep_answers_s, int(flags.keep_answers_mb * (1 << 20))
    )


def _pairs(flag: str, form: str, items: Sequence[str], faults: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        name, _, value = item.partition("=")
        if not name or not value:
            faults.append(f"--{flag}: must be {form}, got {item!r}")
        elif name in pairs:
            faults.append(f"--{flag}: must be given only once per name, got {name!r} again")
        else:
            pairs[name] = value
    return pairs
