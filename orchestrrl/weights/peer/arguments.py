"""The options of a peer, declared once for `orchestrrl sync peer` and `python -m orchestrrl.weights.peer.main`."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_origin

PREFERRED = ("nccl", "tcp", "gloo")
FOLDERS = "/dev/shm/orchestrrl-weights-"


def _option(help: str, *, flag: str = "", metavar: str | None = None, **default: Any) -> Any:
    return field(metadata={"help": help, "flag": flag, "metavar": metavar}, **default)


@dataclass(frozen=True, slots=True)
class PeerArguments:
    """The options as they were given. A sequence is an option that may be repeated."""

    id: str = _option("The peer's name, one of its own in the fleet.")
    daemon: str = _option("The daemon, as HOST:PORT or unix:PATH.")
    engines: Sequence[str] = _option(
        "An engine of this host to install versions into; repeat for several. None: a trainer's host.",
        flag="--engine",
        metavar="NAME=URL",
        default=(),
    )
    engines_here: bool = _option(
        "Install into all engines of this host, as the daemon tells of them: those that it starts, that are added, or"
        " that agents report. One peer of a host does.",
        default=False,
    )
    ranks_of: Sequence[str] = _option(
        "An engine of several hosts that has ranks on this one, too, and that another host's peer installs into: both"
        " have the same --folder. Repeat for several.",
        metavar="NAME",
        default=(),
    )
    product: str = _option("The engines' product: vllm or simulated.", default="vllm")
    folder: str = _option(
        f"Where versions are held, with room for two. Default: {FOLDERS} and the peer's name.", default=""
    )
    host: str = _option(
        "Address of this host that other peers reach. Default: that of the way towards the daemon.",
        metavar="ADDRESS",
        default="",
    )
    allow_remote: bool = _option(
        "Permit a --host that is not loopback: other peers are believed without authentication.", default=False
    )
    transports: Sequence[str] = _option(
        "How bytes may come and go; repeat, in any order. Those that cannot be had here are left out. Default:"
        f" {', '.join(PREFERRED)}.",
        flag="--transport",
        default=(),
    )
    gpu: int | None = _option("A GPU of the fabric's site that is on this host, which says where it is.", default=None)
    pod: str = _option("The PoD that it is in, where no GPU is named.", default="")
    tor: str = _option("The ToR that it is at.", default="")
    nic_gbps: float = _option("Rate of its NIC. Default: the daemon's `weights.network.nic_gbps`.", default=0.0)
    tp: int = _option("Tensor parallelism of the engines here.", default=1)
    tp_ranks: Sequence[int] = _option(
        "A rank of it that is on this host; repeat for several. Default: all.", flag="--tp-rank", default=()
    )
    pp: int = _option("Pipeline parallelism.", default=1)
    pp_ranks: Sequence[int] = _option("A rank of it that is on this host.", flag="--pp-rank", default=())
    ep: int = _option("Expert parallelism.", default=1)
    ep_ranks: Sequence[int] = _option("A rank of it that is on this host.", flag="--ep-rank", default=())
    poll_engines_s: float = _option("Engines are asked so often which weights they have.", default=2.0)


@dataclass(frozen=True, slots=True)
class PeerOption:
    name: str
    flag: str
    help: str
    metavar: str | None
    kind: type  # of one value
    repeats: bool
    default: Any  # MISSING: it has to be given

    @property
    def required(self) -> bool:
        return self.default is MISSING


def options() -> Iterator[PeerOption]:
    """Iterate over the options, in the order in which help shows them."""
    for each in fields(PeerArguments):
        kind: Any = (get_args(each.type) or (each.type,))[0]
        flag = each.metadata["flag"] or f"--{each.name.replace('_', '-')}"
        repeats = get_origin(each.type) is Sequence
        yield PeerOption(each.name, flag, each.metadata["help"], each.metadata["metavar"], kind, repeats, each.default)
