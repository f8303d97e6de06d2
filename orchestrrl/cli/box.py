"""`orchestrrl fabric box` and `orchestrrl sync box`: emulate a site with network namespaces on this machine, and
measure real traffic and weight syncs over its circuits."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import (
    Columns,
    Output,
    View,
    cells_table,
    choice_faults,
    fail,
    number_faults,
    raise_faults,
    stderr,
    table,
    write_json,
)
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.box.run import BoxOrder
    from planner.fabric.topology import PodRole

Protocols = Annotated[
    str, typer.Option(help="Comma-separated protocols, assigned to the switches in rotation.  [default: three]")
]
OutFolder = Annotated[
    Path, typer.Option("--out", "-o", metavar="FOLDER", help="Write results here. The folder is created if missing.")
]
MOST_MB = 4000.0
JOURNAL = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm")
SHOWN = ("circuits", "transition", "failed_port", "wrong_cable", "cycle")  # the order of the printed results


@command
def fabric_box(
    site: Annotated[
        Path | None, typer.Option(help="The site file.  [default: 2 PoDs, 4 ToRs, 12 hosts]", metavar="FILE")
    ] = None,
    shows: Annotated[
        list[str] | None, typer.Option("--show", help="Show to run. Can be repeated.  [default: all]", metavar="SHOW")
    ] = None,
    protocols: Protocols = "",
    circuit_mbps: Annotated[float, typer.Option(help="Rate of a circuit in the box, in Mbit/s.")] = 20.0,
    seconds: Annotated[float, typer.Option(help="Duration of each rate measurement, in seconds.")] = 2.0,
    iterations: Annotated[int, typer.Option(help="Training iterations on the circuits for training.")] = 3,
    out: OutFolder = Path("out/fabric-box"),
) -> Output:
    """Emulate a site on this machine and measure TCP traffic over its circuits.

    Hosts and ToRs are network namespaces, fibres are veth pairs, and the optical switches are emulated devices, each
    with its own protocol. Their cross-connects are the data path: packets pass while the mirrors join two fibres. An
    OrchestrRL daemon reads the site file and controls the switches with the drivers that a real site uses.

    | show | |
    |---|---|
    | `circuits` | measure the rate between two ToRs over 1, 2 and 3 circuits |
    | `cycle` | run training, generation, weight sync, training: measure each stage's rate on the old and new circuits |
    | `transition` | continue a transfer while its circuits change |
    | `failed_port` | fail a port: packets are rerouted first, then circuits are changed |
    | `wrong_cable` | swap two cables: `orchestrrl ocs verify` reports the swapped cables |

    The command requires Linux, `unshare`, `ip` and `tc`, and root or permitted user namespaces. It changes nothing
    outside its own namespaces and removes them at the end. It writes the site file, the daemon's configuration and
    journal, all logs, `box.json` and, for the cycle, `cycle.png` to FOLDER. A circuit has the rate `--circuit-mbps`
    instead of the rate in the site file. The rates of NICs are scaled in proportion.

    Example:

        orchestrrl fabric box

        orchestrrl fabric box --site site.yaml --show circuits --show cycle
    """
    from orchestrrl.lab.box.run import SHOWS, SITE, BoxOrder, draw_cycle
    from planner.fabric.topology import PodRole

    chosen = tuple(name for name in SHOWS if not shows or name in shows)
    faults = [fault for name in shows or () for fault in choice_faults("--show", name, SHOWS)]
    named = _protocols(protocols, faults)
    limits = {"circuit_mbps": circuit_mbps, "seconds": seconds, "iterations": iterations}
    faults += number_faults("> 0 and <= 1000", lambda value: 0 < value <= 1000, **limits)
    text = _sound_site(site, SITE, dict.fromkeys(PodRole, 2), faults)
    order = BoxOrder(str(out.resolve()), chosen, named, circuit_mbps, seconds, iterations)
    results = _show_in_box(order, text)
    write_json(out / "box.json", results)
    if "cycle" in results:
        draw_cycle(results["cycle"], out / "cycle.png")
    return Output(results, _fabric_view(results, out))


def _fabric_view(results: dict[str, Any], out: Path) -> View:
    switches = "; ".join(f"{id} uses {protocol}" for id, protocol in results["switches"].items())
    yield f"{results['hosts']} hosts, {results['tors']} ToRs; {switches}"
    for show in SHOWN:
        if show in results:
            yield from _shown(show, results[show])
    yield f"{out}: all measurements (box.json), logs and configurations"


def _shown(show: str, found: dict[str, Any]) -> View:
    one, other = found.get("tors", ("", ""))
    match show:
        case "circuits":
            title = f"{one} to {other}, by circuits of {found['line_mbps']:g} Mbit/s"
            yield table(title, CIRCUIT_COLUMNS, found["rows"])
        case "transition":
            mirrors = duration(found["device_delay_s"])
            title = f"One transfer from {one} to {other} while circuits change (mirrors: {mirrors})"
            yield table(title, TRANSITION_COLUMNS, found["rows"])
        case "failed_port":
            up, left = found["circuits"]
            before, around, masked = map(_mbps, found["mbps"])
            title = f"Port {found['port']} fails under the traffic from {one} to {other}"
            packets = f"packets rerouted, after {duration(found['around_s'])}"
            rows = (("before", up, before), (packets, up - 1, around), ("circuits changed", left, masked))
            yield cells_table(title, ("", "circuits", "Mbit/s"), rows)
        case "wrong_cable":
            yield f"swapped cables: {' and '.join(found['swapped'])}; orchestrrl ocs verify reports:"
            yield table("", {"where": "where", "fault": "what"}, found["faults"])
        case "cycle":
            title = "Cycle: Mbit/s between ToRs on the previous stage's circuits (before) and on its own (after)"
            yield table(title, CYCLE_COLUMNS, found["stages"])


def _mbps(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


CIRCUIT_COLUMNS: Columns = {
    "circuits": "circuits",
    "Mbit/s": lambda row: _mbps(row["mbps"]),
    "ratio": lambda row: f"{row['ratio']:.2f}",
}
TRANSITION_COLUMNS: Columns = {
    "circuits of": "period",
    "outcome": "state",
    "between them": "circuits",
    "moves": "moves",
    "took": lambda row: duration(row["elapsed_s"]),
    "longest pause": lambda row: duration(row["longest_pause_s"]),
    "retransmitted": "retransmitted",
    "Mbit/s": lambda row: _mbps(row["mbps"]),
}
CYCLE_COLUMNS: Columns = {
    "stage": "period",
    "outcome": lambda stage: stage["state"] if stage["code"] == "committed" else stage["code"],
    "moves": "moves",
    "took": lambda stage: duration(sum(until_s - since_s for since_s, until_s in stage["commits"])),
    "before": lambda stage: _mbps(stage["before_mbps"]),
    "after": lambda stage: _mbps(stage["mbps"]),
    "circuits between": lambda stage: ", ".join(f"{pair}: {count}" for pair, count in stage["circuits"].items()),
}


@command
def sync_box(
    site: Annotated[
        Path | None, typer.Option(help="The site file.  [default: 1 train and 2 gen PoDs, 14 hosts]", metavar="FILE")
    ] = None,
    mb: Annotated[float, typer.Option(help="Size of the weights, in megabytes.")] = 200.0,
    ways: Annotated[
        list[str] | None,
        typer.Option("--way", help="The way to broadcast. Can be repeated.  [default: all]", metavar="WAY"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Runs of each way, in rotation.")] = 1,
    circuit_mbps: Annotated[float, typer.Option(help="Rate of a circuit in the box, in Mbit/s.")] = 200.0,
    protocols: Protocols = "",
    transport: Annotated[str, typer.Option(help="The transport of the weights: tcp or gloo.")] = "tcp",
    python: Annotated[
        Path | None,
        typer.Option(help="Python interpreter of the carrier processes, with xxhash, and torch for gloo."),
    ] = None,
    out: OutFolder = Path("out/sync-box"),
) -> Output:
    """Broadcast weights to emulated hosts along a planned tree, and compare the tree with two other methods.

    Hosts and ToRs are network namespaces, as in `orchestrrl fabric box`. Every link has a limited rate. Each host is a
    process that transfers weights with the same code as OrchestrRL's peers. Each host of the training PoDs holds a part
    of the weights. Each host of the generation PoDs needs all weights. Every way starts with the circuits of the
    generation stage, and then requests the circuits for its own transfers from the daemon. The SHA-256 of the received
    weights is compared with that of the sent weights. Then the received weights are deleted.

    | way | |
    |---|---|
    | `tree` | planned for the available circuits: send the weights into each PoD once, forward them as they arrive |
    | `two_stage` | send all weights to each PoD's first host, then along a chain in the PoD (figure 4 of the paper) |
    | `naive` | send all weights to every receiver directly from the hosts that hold the parts |

    No plan can be faster than the printed bound. The bound is computed from the measured TCP payload rate of one
    circuit.

    The command requires Linux, `unshare`, `ip` and `tc`, and root or permitted user namespaces. It changes nothing
    outside its own namespaces and removes them at the end. It writes the site file, the daemon's configuration and
    journal, all logs and `sync-box.json` to FOLDER.

    Example:

        orchestrrl sync box

        orchestrrl sync box --mb 40 --way tree --way two_stage
    """
    from orchestrrl.lab.box.run import SYNC_WAYS, BoxOrder, weights_site
    from planner.fabric.topology import PodRole

    faults = [fault for way in ways or () for fault in choice_faults("--way", way, SYNC_WAYS)]
    named = _protocols(protocols, faults)
    limits = (("--mb", mb, MOST_MB), ("--circuit-mbps", circuit_mbps, 1e5), ("--rounds", rounds, 100))
    faults += [
        f"{flag}: must be > 0 and <= {most:g}, got {value:g}" for flag, value, most in limits if not 0 < value <= most
    ]
    faults += choice_faults("--transport", transport, ("tcp", "gloo"))
    default = weights_site(max(1e-3, circuit_mbps))
    text = _sound_site(site, default, {PodRole.TRAIN: 1, PodRole.GEN: 2}, faults)
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
    found = _show_in_box(order, text)["weights"]
    write_json(out / "sync-box.json", found)
    return Output(found, _sync_view(found, out))


def _sync_view(found: dict[str, Any], out: Path) -> View:
    from statistics import median

    yield (
        f"{found['bytes'] / 1e6:.0f} MB to {found['receivers']} receivers, circuits and NICs of "
        f"{found['circuit_mbps']:g} Mbit/s, TCP payload {found['payload']:.1%} of it"
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
        "/ bound": lambda way: f"{seconds[way] / found['bound_s']:.2f}",
        "naive / way": lambda way: None if slowest is None else f"{slowest / seconds[way]:.2f}",
        "MB into PoDs": lambda way: f"{middle(way, 'crossed_bytes') / 1e6:.0f}",
        "identical": lambda way: f"{min(row['identical'] for row in by_way[way])} of {found['receivers']}",
        "circuits": circuits,
        "cores busy": lambda way: f"{middle(way, 'cores_busy'):.1f}",
    }
    yield table("Medians of each way", columns, by_way)
    yield f"SHA-256 of the weights: {found['sha256']}"
    yield f"{out}: all measurements (sync-box.json) and logs"


# --- shared by both commands


def _protocols(text: str, faults: list[str]) -> tuple[str, ...]:
    """Parse the value of `--protocols`. If it is empty, return the three default protocols. Errors are appended to
    `faults`."""
    from orchestrrl.lab.box.run import PROTOCOLS
    from orchestrrl.lab.emulated_switch import PROTOCOLS as KNOWN

    named = tuple(text.split(",")) if text else PROTOCOLS
    faults += [fault for name in named for fault in choice_faults("--protocols", name, KNOWN)]
    return named


def _sound_site(file: Path | None, default: str, needed: "Mapping[PodRole, int]", faults: list[str]) -> str:
    """Return the text of the site file or, if `file` is None, `default`. Raises ProblemFaults if the site is invalid,
    if the PoDs of a role have fewer GPUs than `needed` requires, or if `faults` is not empty. The error contains all
    faults."""
    from orchestrrl.core.documents import read_text
    from orchestrrl.fabric.site import parse_site
    from orchestrrl.lab.box.intents import gpus_of

    text = default
    try:
        text = default if file is None else read_text(file)
        site = parse_site(text)
        there = {role: len(gpus_of(site, role)) for role in needed}
        faults += [
            f"pods: must have at least {count} GPUs of role {role}, got {there[role]}"
            for role, count in needed.items()
            if there[role] < count
        ]
    except ProblemFaults as error:
        faults += error.faults
    raise_faults(faults)
    return text


def _show_in_box(order: "BoxOrder", site: str) -> dict[str, Any]:
    """Run the demonstrations that `order` names and return their results by name. The function writes the site file to
    the output folder and deletes an old journal there."""
    import asyncio

    from orchestrrl.lab.box.run import run_box

    out = Path(order.folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "site.yaml").write_text(site, encoding="utf-8")
        for stale in JOURNAL:
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        fail(f"{out}: {error.strerror}")
    with stderr().status("creating the box") as status:
        return asyncio.run(run_box(order, lambda at: status.update(f"{at}: real time, real packets")))
