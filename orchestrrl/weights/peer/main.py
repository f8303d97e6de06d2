"""Run a weight peer in the environment of a trainer or of vLLM: `python -m orchestrrl.weights.peer.main`.

The distribution orchestrrl-client contains the peer and declares what it needs, except torch for gloo and NCCL. In
OrchestrRL's own environment, `orchestrrl sync peer` is the same command.
"""

import argparse
import asyncio
import logging
import signal
import sys
from typing import Any

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OrchestrRLError, ProblemFaults
from orchestrrl.weights.peer.arguments import PeerArguments, options
from orchestrrl.weights.peer.peer import run_peer
from orchestrrl.weights.peer.settings import PeerSettings, settings_of

LOG_LEVELS = ("debug", "info", "warning", "error")
EXIT_FAILURE, EXIT_MALFORMED = 1, 2
EXAMPLE = (
    "python -m orchestrrl.weights.peer.main --id gen0 --daemon 10.0.0.1:7070 --allow-remote"
    " --engine e0=http://127.0.0.1:8000 --tp 8"
)


def main(arguments: list[str] | None = None) -> int:
    words, log_level = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_until_stopped(settings_of(words)))
    except ProblemFaults as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_MALFORMED
    except OrchestrRLError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILURE
    return 0


def _parse_arguments(arguments: list[str]) -> tuple[PeerArguments, str]:
    parser = argparse.ArgumentParser(
        "python -m orchestrrl.weights.peer.main",
        description=__doc__,
        epilog=f"Example: {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in options():
        settings: dict[str, Any] = {"help": option.help, "dest": option.name, "required": option.required}
        if option.kind is bool:
            settings |= {"action": "store_true"}
        else:
            settings |= {"type": option.kind, "metavar": option.metavar}
        if option.repeats:
            settings |= {"action": "append", "default": []}
        elif not option.required:
            settings |= {"default": option.default}
        parser.add_argument(option.flag, **settings)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help=" | ".join(LOG_LEVELS))
    found = vars(parser.parse_args(arguments))
    log_level = str(found.pop("log_level"))
    return PeerArguments(**found), log_level


async def _until_stopped(settings: PeerSettings) -> None:
    """Run the peer until the process receives SIGTERM or SIGINT."""
    task = asyncio.ensure_future(run_peer(settings, WallClock()))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


if __name__ == "__main__":
    sys.exit(main())
