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
    """The options of a peer, as given on the command line. A field of type Sequence is an option that may be
    repeated."""

    id: str = _option("The peer's name, unique in the fleet.")
    daemon: str = _option("The daemon's address, as HOST:PORT or unix:PATH.")
    engines: Sequence[str] = _option(
        "An engine of this host to install versions into. Can be repeated. Default id: the URL's HOST:PORT. Omit on a"
        " trainer's host.",
        flag="--engine",
        metavar="[ID=]URL",
        default=(),
    )
    engines_here: bool = _option(
        "Install into all engines of this host that the daemon assigns: engines that it starts, that are added, or that"
        " agents report. Set it on one peer per host.",
        default=False,
    )
    ranks_of: Sequence[str] = _option(
        "An engine with ranks on several hosts, including this one, into which another host's peer installs; both peers"
        " need the same --folder. Repeat for several.",
        metavar="NAME",
        default=(),
    )
    product: str = _option(
        "The engines' product: vllm or simulated.", flag="--engine-kind", metavar="KIND", default="vllm"
    )
    folder: str = _option(
        f"Folder for versions, with space for two. Default: {FOLDERS} and the peer's name.", default=""
    )
    host: str = _option(
        "Address of this host that other peers can reach. Default: the local address of the route to the daemon.",
        metavar="HOST",
        default="",
    )
    allow_remote: bool = _option(
        "Permit a --host that is not loopback. Connections from other peers are not authenticated.", default=False
    )
    transports: Sequence[str] = _option(
        "A transport to offer; repeat for several, in any order. Unavailable transports are skipped. Default:"
        f" {', '.join(PREFERRED)}.",
        flag="--transport",
        default=(),
    )
    gpu: int | None = _option(
        "A GPU of the fabric's site on this host, which determines its location.", flag="--site-gpu", default=None
    )
    pod: str = _option("The host's PoD, if --site-gpu is not given.", default="")
    tor: str = _option("The host's ToR.", default="")
    nic_gbps: float = _option("Rate of the host's NIC. Default: the daemon's `weights.network.nic_gbps`.", default=0.0)
    tp: int = _option("Tensor parallelism of this host's engines.", default=1)
    tp_ranks: Sequence[int] = _option(
        "A tensor-parallel rank on this host; repeat for several. Default: all.", flag="--tp-rank", default=()
    )
    pp: int = _option("Pipeline parallelism of this host's engines.", default=1)
    pp_ranks: Sequence[int] = _option("A pipeline-parallel rank on this host.", flag="--pp-rank", default=())
    ep: int = _option("Expert parallelism of this host's engines.", default=1)
    ep_ranks: Sequence[int] = _option("An expert-parallel rank on this host.", flag="--ep-rank", default=())
    poll_engines_s: float = _option("Interval in seconds at which engines are queried for their version.", default=2.0)


@dataclass(frozen=True, slots=True)
class PeerOption:
    name: str
    flag: str
    help: str
    metavar: str | None
    kind: type  # type of one value
    repeats: bool
    default: Any  # MISSING: the option is required

    @property
    def required(self) -> bool:
        return self.default is MISSING


def options() -> Iterator[PeerOption]:
    """Yield the options of a peer in the order of the fields of `PeerArguments`."""
    for each in fields(PeerArguments):
        kind: Any = (get_args(each.type) or (each.type,))[0]
        flag = each.metadata["flag"] or f"--{each.name.replace('_', '-')}"
        repeats = get_origin(each.type) is Sequence
        yield PeerOption(each.name, flag, each.metadata["help"], each.metadata["metavar"], kind, repeats, each.default)
