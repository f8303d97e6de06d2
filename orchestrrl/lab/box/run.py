"""A box from outside: where it is to stand, what it is to show, and what came of it."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.box import enter

# In the order in which they are shown.
SHOWS = ("circuits", "cycle", "transition", "failed_port", "wrong_cable")
# Ways of bringing weights to engines that "weights" compares, see weights.py.
SYNC_WAYS = ("tree", "two_stage", "naive")
# Each switch speaks the next of these, in the order of the site's file.
PROTOCOLS = ("scpi", "tl1-polatis", "restconf")
_FILES = files("orchestrrl.lab.box")
SITE = _FILES.joinpath("site.yaml").read_text("utf-8")  # the default: two PoDs, four ToRs, three optical switches


def weights_site(circuit_mbps: float) -> str:
    """Return the file of the default site of "weights", in which a circuit carries that."""
    return Template(_FILES.joinpath("weights_site.yaml").read_text("utf-8")).substitute(gbps=f"{circuit_mbps / 1000:g}")


@dataclass(frozen=True, slots=True)
class BoxOrder:
    """`folder` holds the site's file, and gets the daemon's configuration and all logs. `mbps`: what a circuit carries
    in the box. `shows`: of SHOWS, in that order."""

    folder: str
    shows: tuple[str, ...]
    protocols: tuple[str, ...]
    mbps: float = 20.0
    seconds: float = 2.0  # that each rate is measured for
    iterations: int = 3  # of training, on its own circuits
    collective_s: float = 1.0  # of an iteration, in which it sends
    pause_s: float = 3.0  # and in which it does not
    changes: int = 4  # that a transfer lives through
    # Of "weights", which has a site of its own, and is not one of SHOWS.
    sync_bytes: int = 200_000_000
    sync_rounds: int = 1
    sync_ways: tuple[str, ...] = SYNC_WAYS
    transport: str = "tcp"
    python: str = ""  # of the processes that carry; empty: this one


async def run_box(order: BoxOrder, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """What each show returned. Raises Permanent where no box can be had, or something in it went wrong."""
    words = ("-m", "orchestrrl.lab.box.inside", json.dumps(asdict(order)))
    async with enter.start("box", words, Path(order.folder)) as box:
        while True:
            said: dict[str, Any] = json.loads(await box.next_line(math.inf))
            if "at" in said:
                warn(said["at"])
            elif "failed" in said:
                raise Permanent(box.obituary(f"fell: {said['failed']}"))
            else:
                results: dict[str, Any] = said["results"]
                return results
