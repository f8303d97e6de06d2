"""`python -m orchestrrl.weights.peer.main`: a peer where only our package is on the path, beside a trainer or in vLLM's
environment. It needs grpcio, protobuf, pydantic, aiohttp, prometheus-client, numpy and xxhash; torch for gloo and NCCL.
`orchestrrl sync peer` is the same, in an environment of our own."""

import argparse
import asyncio
import logging
import random
import signal
import sys
from dataclasses import fields
from typing import Any

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OrchestrRLError, ProblemFaults
from orchestrrl.weights.peer.peer import run_peer
from orchestrrl.weights.peer.settings import ASK_ENGINES_S, FOLDERS, PREFERRED, PeerArguments, PeerSettings, settings_of

EXIT_FAILURE, EXIT_MALFORMED = 1, 2
EXAMPLE = (
    "python -m orchestrrl.weights.peer.main --id gen0 --daemon 10.0.0.1:7070 --allow-remote"
    " --engine e0=http://127.0.0.1:8000 --tp 8"
)

# Name, of each option of the command, in both of its forms.
HELP: dict[str, str] = {
    "id": "The peer's name, one of its own in the fleet.",
    "daemon": "The daemon, as HOST:PORT or unix:PATH.",
    "engines": "An engine of this host to install versions into, as NAME=http://HOST:PORT; repeat for several. None: a"
    " trainer's host.",
    "engines_here": "Install into all engines of this host, as the daemon tells of them: those that it starts, that are"
    " added, or that agents report. One peer of a host does.",
    "engines_at": "The same for engines that listen at HOST, HOST:PORT or HOST:FIRST-LAST; repeat for several.",
    "ranks_of": "An engine of several hosts that has ranks on this one, too, and that another host's peer installs"
    " into: both have the same --folder. Repeat for several.",
    "product": "The engines' product: vllm or simulated.",
    "folder": f"Where versions are held, with room for two. Default: {FOLDERS} and the peer's name.",
    "host": "Address of this host that other peers reach. Default: that of the way towards the daemon.",
    "allow_remote": "Permit a --host that is not loopback: other peers are believed without authentication.",
    "transports": "How bytes may come and go; repeat, in any order. Those that cannot be had here are left out."
    f" Default: {', '.join(PREFERRED)}.",
    "gpu": "A GPU of the fabric's site that is on this host, which says where it is.",
    "pod": "The PoD that it is in, where no GPU is named.",
    "tor": "The ToR that it is at.",
    "nic_gbps": "Rate of its NIC. Default: the daemon's `weights.network.nic_gbps`.",
    "tp": "Tensor parallelism of the engines here.",
    "tp_ranks": "A rank of it that is on this host; repeat for several. Default: all.",
    "pp": "Pipeline parallelism.",
    "pp_ranks": "A rank of it that is on this host.",
    "ep": "Expert parallelism.",
    "ep_ranks": "A rank of it that is on this host.",
    "poll_engines_s": "Engines are asked so often which weights they have.",
}
OPTIONS = {
    "engines": "--engine",
    "engines_at": "--engines-at",
    "ranks_of": "--ranks-of",
    "transports": "--transport",
    "tp_ranks": "--tp-rank",
    "pp_ranks": "--pp-rank",
    "ep_ranks": "--ep-rank",
}
NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("gpu", "tp", "pp", "ep", "tp_ranks", "pp_ranks", "ep_ranks"), int),
    "nic_gbps": float,
    "poll_engines_s": float,
}


def main(arguments: list[str] | None = None) -> int:
    words, verbose = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        asyncio.run(_until_stopped(settings_of(words)))
    except ProblemFaults as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_MALFORMED
    except OrchestrRLError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILURE
    return 0


def _parse_arguments(arguments: list[str]) -> tuple[PeerArguments, bool]:
    parser = argparse.ArgumentParser(
        "python -m orchestrrl.weights.peer.main",
        description=__doc__,
        epilog=f"Example: {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in fields(PeerArguments):
        name = field.name
        settings: dict[str, Any] = {"help": HELP[name], "dest": name, "type": NUMBERS.get(name, str)}
        if name in OPTIONS:
            settings |= {"action": "append", "default": []}
        elif name in ("engines_here", "allow_remote"):
            settings = {"help": HELP[name], "dest": name, "action": "store_true"}
        elif name in ("id", "daemon"):
            settings |= {"required": True}
        else:
            settings |= {"default": ASK_ENGINES_S if name == "poll_engines_s" else field.default}
        parser.add_argument(OPTIONS.get(name, f"--{name.replace('_', '-')}"), **settings)
    parser.add_argument("-v", "--verbose", action="store_true", help="Log what happens, not only what goes wrong.")
    found = vars(parser.parse_args(arguments))
    verbose = bool(found.pop("verbose"))
    return PeerArguments(**found), verbose


async def _until_stopped(settings: PeerSettings) -> None:
    """Runs until SIGTERM or SIGINT."""
    task = asyncio.ensure_future(run_peer(settings, WallClock(), random.Random()))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


if __name__ == "__main__":
    sys.exit(main())
