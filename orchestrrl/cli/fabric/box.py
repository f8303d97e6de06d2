"""`orchestrrl fabric box`: a site as network namespaces of this machine, and what its circuits do to real traffic."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.fabric.box_site import chosen_protocols, show_in_box, sound_site
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Columns, Output, View, cells_table, number_faults, table, write_json

OUT = Path("out/fabric-box")


@command
def box(
    site: Annotated[
        Path | None, typer.Option(help="The site.  [default: 2 PoDs, 4 ToRs, 12 hosts]", metavar="FILE")
    ] = None,
    shows: Annotated[
        list[str] | None, typer.Option("--show", help="Repeat for several.  [default: all]", metavar="SHOW")
    ] = None,
    protocols: Annotated[
        str, typer.Option(help="Of the switches, in turn, separated by commas.  [default: three]")
    ] = "",
    circuit_mbps: Annotated[float, typer.Option(help="What a circuit carries in the box.")] = 20.0,
    seconds: Annotated[float, typer.Option(help="That each rate is measured for.")] = 2.0,
    iterations: Annotated[int, typer.Option(help="Of training, on its own circuits.")] = 3,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Is made where it is missing.")] = OUT,
) -> Output:
    """Build a site in a box, and show on real TCP what its circuits do.

    Hosts and ToRs are network namespaces, fibres are veth pairs, and the optical switches are emulated devices, each
    behind a protocol of its own. Their cross-connects are the data path: packets pass as long as the mirrors join two
    fibres. A daemon of ours drives it, with the same site file and the same drivers as a real one.

    | show | |
    |---|---|
    | `circuits` | the rate between two ToRs over 1, 2 and 3 circuits |
    | `cycle` | training, generation, weight sync, training: each stage's rate before and after its circuits |
    | `transition` | a transfer that runs on while circuits change under it |
    | `failed_port` | a port fails: packets go around it, then circuits do |
    | `wrong_cable` | two cables are mixed up: `orchestrrl ocs verify` says which |

    It needs Linux, `unshare`, `ip` and `tc`, and root or user namespaces that are permitted; nothing outside its own
    namespaces is touched, and nothing is left. FOLDER gets the site's file, the daemon's configuration and journal, all
    logs, `box.json`, and of the cycle `cycle.png`. A circuit of the site carries `--circuit-mbps` in the box, whatever
    it does in the site; NICs are in proportion.

    Example:

        orchestrrl fabric box

        orchestrrl fabric box --site site.yaml --show circuits --show cycle
    """
    from orchestrrl.lab.box.run import SHOWS, SITE, BoxOrder, draw_cycle
    from planner.fabric.topology import PodRole

    chosen = tuple(name for name in SHOWS if not shows or name in shows)
    faults = [f"--show: must be of {', '.join(SHOWS)}, got {name!r}" for name in shows or () if name not in SHOWS]
    named = chosen_protocols(protocols, faults)
    limits = {"circuit_mbps": circuit_mbps, "seconds": seconds, "iterations": iterations}
    faults += number_faults("> 0 and <= 1000", lambda value: 0 < value <= 1000, **limits)
    text = sound_site(site, SITE, dict.fromkeys(PodRole, 2), faults)
    order = BoxOrder(str(out.resolve()), chosen, named, circuit_mbps, seconds, iterations)
    results = show_in_box(order, text)
    write_json(out / "box.json", results)
    if "cycle" in results:
        draw_cycle(results["cycle"], out / "cycle.png")
    return Output(results, _view(results, out))


def _view(results: dict[str, Any], out: Path) -> View:
    switches = "; ".join(f"{id} speaks {protocol}" for id, protocol in results["switches"].items())
    yield f"{results['hosts']} hosts, {results['tors']} ToRs; {switches}"
    for show, made in SHOWN.items():
        if show in results:
            yield from made(results[show])
    yield f"{out}: everything that was measured (box.json), logs and configurations"


def _mbps(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _circuits(found: dict[str, Any]) -> View:
    one, other = found["tors"]
    title = f"{one} to {other}, by circuits of {found['line_mbps']:g} Mbit/s"
    yield table(title, CIRCUIT_COLUMNS, found["rows"])


def _transition(found: dict[str, Any]) -> View:
    one, other = found["tors"]
    mirrors = duration(found["device_delay_s"])
    title = f"One transfer from {one} to {other} while circuits change (mirrors: {mirrors})"
    yield table(title, TRANSITION_COLUMNS, found["rows"])


def _failed_port(found: dict[str, Any]) -> View:
    one, other = found["tors"]
    up, left = found["circuits"]
    before, around, masked = map(_mbps, found["mbps"])
    yield cells_table(
        f"Port {found['port']} fails under the traffic from {one} to {other}",
        ("", "circuits", "Mbit/s"),
        (
            ("before", up, before),
            (f"packets around it, after {duration(found['around_s'])}", up - 1, around),
            ("circuits around it", left, masked),
        ),
    )


def _wrong_cable(found: dict[str, Any]) -> View:
    yield f"mixed up: {' and '.join(found['swapped'])}; orchestrrl ocs verify says:"
    yield table("", {"where": "where", "what is wrong": "what"}, found["faults"])


def _cycle(found: dict[str, Any]) -> View:
    title = "A cycle: Mbit/s between ToRs, on the circuits that the stage before has left, and on its own"
    yield table(title, CYCLE_COLUMNS, found["stages"])


CIRCUIT_COLUMNS: Columns = {
    "circuits": "circuits",
    "Mbit/s": lambda row: _mbps(row["mbps"]),
    "ratio": lambda row: f"{row['ratio']:.2f}",
}
TRANSITION_COLUMNS: Columns = {
    "circuits of": "period",
    "became": "state",
    "between them": "circuits",
    "moves": "moves",
    "took": lambda row: duration(row["elapsed_s"]),
    "longest pause": lambda row: duration(row["longest_pause_s"]),
    "sent again": "retransmitted",
    "Mbit/s": lambda row: _mbps(row["mbps"]),
}
CYCLE_COLUMNS: Columns = {
    "stage": "period",
    "became": lambda stage: stage["state"] if stage["code"] == "committed" else stage["code"],
    "moves": "moves",
    "took": lambda stage: duration(sum(until_s - since_s for since_s, until_s in stage["commits"])),
    "before": lambda stage: _mbps(stage["before_mbps"]),
    "after": lambda stage: _mbps(stage["mbps"]),
    "circuits between": lambda stage: ", ".join(f"{pair}: {count}" for pair, count in stage["circuits"].items()),
}
SHOWN = {
    "circuits": _circuits,
    "transition": _transition,
    "failed_port": _failed_port,
    "wrong_cable": _wrong_cable,
    "cycle": _cycle,
}
