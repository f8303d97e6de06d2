"""`orchestrrl sync box`: weight syncs over the circuits of a site that stands as network namespaces on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.fabric.box_site import chosen_protocols, show_in_box, sound_site
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Columns, Output, View, table, write_json

OUT = Path("out/sync-box")
MOST_MB = 4000.0


@command
def box(
    site: Annotated[
        Path | None, typer.Option(help="The site.  [default: 1 train and 2 gen PoDs, 14 hosts]", metavar="FILE")
    ] = None,
    mb: Annotated[float, typer.Option(help="Megabytes of weights.")] = 200.0,
    ways: Annotated[
        list[str] | None, typer.Option("--way", help="Repeat for several.  [default: all]", metavar="WAY")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Each way so many times, in turn.")] = 1,
    circuit_mbps: Annotated[float, typer.Option(help="What a circuit carries in the box.")] = 200.0,
    protocols: Annotated[
        str, typer.Option(help="Of the switches, in turn, separated by commas.  [default: three]")
    ] = "",
    transport: Annotated[str, typer.Option(help="That carries the bytes: tcp or gloo.")] = "tcp",
    python: Annotated[Path | None, typer.Option(help="Of the processes that carry; gloo needs one with torch.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Is made where it is missing.")] = OUT,
) -> Output:
    """Bring weights to engines in a box, by a planned tree and by what it is compared with, on real TCP.

    Hosts and ToRs are network namespaces, as `orchestrrl fabric box` has them; every link has a rate. Each host is a
    process with the product's own carrier: those in PoDs that train hold a part of the weights each, those that
    generate need all of it. Each way in turn gets the circuits that its edges ask the daemon for, after those of
    generation; what was received is compared by SHA-256, and wiped.

    | way | |
    |---|---|
    | `tree` | planned on the circuits that are there: into each PoD once, forwarded as it comes |
    | `two_stage` | all to the first host of each PoD, which then broadcasts along a chain (figure 4 of the paper) |
    | `naive` | every receiver straight from those who hold the parts |

    The bound is what no plan can beat, at the rate that one circuit was measured to give to the payload of TCP.

    It needs Linux, `unshare`, `ip` and `tc`, and root or user namespaces that are permitted; nothing outside its own
    namespaces is touched, and nothing is left. FOLDER gets the site's file, the daemon's configuration and journal, all
    logs and `sync-box.json`.

    Example:

        orchestrrl sync box

        orchestrrl sync box --mb 40 --way tree --way two_stage
    """
    from orchestrrl.lab.box.run import SYNC_WAYS, BoxOrder, weights_site
    from planner.fabric.topology import PodRole

    faults = [f"--way: must be of {', '.join(SYNC_WAYS)}, got {way!r}" for way in ways or () if way not in SYNC_WAYS]
    named = chosen_protocols(protocols, faults)
    limits = (("--mb", mb, MOST_MB), ("--circuit-mbps", circuit_mbps, 1e5), ("--rounds", rounds, 100))
    faults += [
        f"{flag}: must be > 0 and <= {most:g}, got {value:g}" for flag, value, most in limits if not 0 < value <= most
    ]
    if transport not in ("tcp", "gloo"):
        faults.append(f"--transport: must be tcp or gloo, got {transport!r}")
    default = weights_site(max(1e-3, circuit_mbps))
    text = sound_site(site, default, {PodRole.TRAIN: 1, PodRole.GEN: 2}, faults)
    order = BoxOrder(
        str(out.resolve()),
        ("weights",),
        named,
        mbps=circuit_mbps,
        sync_bytes=round(mb * 1e6),
        sync_rounds=rounds,
        sync_ways=tuple(way for way in SYNC_WAYS if not ways or way in ways),
        transport=transport,
        python="" if python is None else str(python.absolute()),
    )
    found = show_in_box(order, text)["weights"]
    write_json(out / "sync-box.json", found)
    return Output(found, _view(found, out))


def _view(found: dict[str, Any], out: Path) -> View:
    from statistics import median

    yield (
        f"{found['bytes'] / 1e6:.0f} MB to {found['receivers']} receivers, circuits and NICs of "
        f"{found['circuit_mbps']:g} Mbit/s, of which TCP's payload has {found['payload']:.1%}"
    )
    yield f"no plan can be faster than {duration(found['bound_s'])}; the tree has {found['waves']} waves"
    by_way: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_way.setdefault(row["way"], []).append(row)
    seconds = {way: median(row["seconds"] for row in rows) for way, rows in by_way.items()}
    slowest = seconds.get("naive")

    def middle(way: str, field: str) -> float:
        return median(float(row[field]) for row in by_way[way])

    def circuits(way: str) -> str:
        last = by_way[way][-1]["circuits"]
        return f"{last['moves']} moves, {duration(last['elapsed_s'])}"

    columns: Columns = {
        "way": str,
        "took": lambda way: duration(seconds[way]),
        "by the bound": lambda way: f"{seconds[way] / found['bound_s']:.2f}",
        "naive by it": lambda way: None if slowest is None else f"{slowest / seconds[way]:.2f}",
        "MB into PoDs": lambda way: f"{middle(way, 'crossed_bytes') / 1e6:.0f}",
        "identical": lambda way: f"{min(row['identical'] for row in by_way[way])} of {found['receivers']}",
        "circuits": circuits,
        "cores busy": lambda way: f"{middle(way, 'cores_busy'):.1f}",
    }
    yield table("Medians of each way", columns, by_way)
    yield f"SHA-256 of the weights: {found['sha256']}"
    yield f"{out}: all that was measured (sync-box.json), and logs"
