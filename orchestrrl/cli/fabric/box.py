"""`orchestrrl fabric box`: a site as network namespaces of this machine, and what its circuits do to real traffic."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrrl.cli.fabric.box_site import prepare_folder, site_faults
from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors, stderr
from orchestrrl.core.errors import ProblemFaults

OUT = Path("out/fabric-box")

HELP = """Build a site in a box, and show on real TCP what its circuits do.

Hosts and ToRs are network namespaces, fibres are veth pairs, and the optical switches are emulated devices, each behind
a protocol of its own. Their cross-connects are the data path: packets pass as long as the mirrors join two fibres. A
daemon of ours drives it, with the same site file and the same drivers as a real one.

| show | |
|---|---|
| `circuits` | the rate between two ToRs over 1, 2 and 3 circuits |
| `cycle` | training, generation, weight sync, training: each stage's rate before and after its circuits |
| `transition` | a transfer that runs on while circuits change under it |
| `failed_port` | a port fails: packets go around it, then circuits do |
| `wrong_cable` | two cables are mixed up: `orchestrrl ocs verify` says which |

It needs Linux, `unshare`, `ip` and `tc`, and root or user namespaces that are permitted; nothing outside its own
namespaces is touched, and nothing is left. FOLDER gets the site's file, the daemon's configuration and journal, all
logs, `box.json`, and of the cycle `cycle.png`. A circuit of the site carries `--circuit-mbps` in the box, whatever it
does in the site; NICs are in proportion.

Example:

    orchestrrl fabric box

    orchestrrl fabric box --site site.yaml --show circuits --show cycle
"""


def register(app: typer.Typer) -> None:
    group(app, "fabric").command("box", help=HELP)(box)


def box(
    site: Annotated[
        Path | None, typer.Option("--site", help="The site.  [default: 2 PoDs, 4 ToRs, 12 hosts]", metavar="FILE")
    ] = None,
    shows: Annotated[
        list[str] | None, typer.Option("--show", help="Repeat for several.  [default: all]", metavar="SHOW")
    ] = None,
    protocols: Annotated[
        str, typer.Option("--protocols", help="Of the switches, in turn, separated by commas.  [default: three]")
    ] = "",
    circuit_mbps: Annotated[float, typer.Option("--circuit-mbps", help="What a circuit carries in the box.")] = 20.0,
    seconds: Annotated[float, typer.Option("--seconds", help="That each rate is measured for.")] = 2.0,
    iterations: Annotated[int, typer.Option("--iterations", help="Of training, on its own circuits.")] = 3,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Is made where it is missing.")] = OUT,
    as_json: JsonFlag = False,
) -> None:
    from orchestrrl.core.documents import read_text
    from orchestrrl.lab.box.run import SHOWS, TestbedOrder, run
    from orchestrrl.lab.box.site import SITE
    from orchestrrl.lab.box.switches import PROTOCOLS, protocol_faults
    from planner.fabric.topology import PodRole

    chosen = tuple(name for name in SHOWS if not shows or name in shows)
    named = tuple(protocols.split(",")) if protocols else PROTOCOLS
    faults = [f"--show: must be of {', '.join(SHOWS)}, got {name!r}" for name in shows or () if name not in SHOWS]
    faults += protocol_faults(named)
    for flag, value in (("--circuit-mbps", circuit_mbps), ("--seconds", seconds), ("--iterations", iterations)):
        if not 0 < value <= 1000:
            faults.append(f"{flag}: must be > 0 and <= 1000, got {value:g}")
    with reporting_errors():
        text = SITE
        try:
            text = SITE if site is None else read_text(site)
            faults += site_faults(text, dict.fromkeys(PodRole, 2))
        except ProblemFaults as error:
            faults += error.faults
        if faults:
            raise ProblemFaults(faults)
        prepare_folder(out, text)
        with stderr().status("making the box") as status:
            results = run(
                TestbedOrder(str(out.resolve()), chosen, named, circuit_mbps, seconds, iterations),
                lambda at: status.update(f"{at}: real time, real packets"),
            )
    _keep(results, out)
    if as_json:
        print_json(results)
    else:
        _print(results, out)


def _keep(results: dict[str, Any], out: Path) -> None:
    import json

    (out / "box.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if "cycle" in results:
        from orchestrrl.lab.box.picture import draw_cycle

        draw_cycle(results["cycle"], out / "cycle.png")


def _print(results: dict[str, Any], out: Path) -> None:
    switches = "; ".join(f"{id} speaks {protocol}" for id, protocol in results["switches"].items())
    print_lines([f"{results['hosts']} hosts, {results['tors']} ToRs; {switches}"])
    for name, told in (("circuits", _circuits), ("transition", _transition), ("failed_port", _failed_port)):
        if name in results:
            told(results[name])
    if "wrong_cable" in results:
        _wrong_cable(results["wrong_cable"])
    if "cycle" in results:
        _cycle(results["cycle"])
    print_lines([f"{out}: everything that was measured (box.json), logs and configurations"])


def _circuits(found: dict[str, Any]) -> None:
    one, other = found["tors"]
    print_table(
        f"{one} to {other}, by circuits of {found['line_mbps']:g} Mbit/s",
        ("circuits", "Mbit/s", "ratio"),
        ((row["circuits"], f"{row['mbps']:.1f}", f"{row['ratio']:.2f}") for row in found["rows"]),
    )


def _transition(found: dict[str, Any]) -> None:
    one, other = found["tors"]
    print_table(
        f"One transfer from {one} to {other} while circuits change (mirrors: {duration(found['device_delay_s'])})",
        ("circuits of", "became", "between them", "moves", "took", "longest pause", "sent again", "Mbit/s"),
        (
            (
                row["period"],
                row["state"],
                row["circuits"],
                row["moves"],
                duration(row["elapsed_s"]),
                duration(row["longest_pause_s"]),
                row["retransmitted"],
                f"{row['mbps']:.1f}",
            )
            for row in found["rows"]
        ),
        left=("became",),
    )


def _failed_port(found: dict[str, Any]) -> None:
    one, other = found["tors"]
    up, left = found["circuits"]
    before, around, masked = found["mbps"]
    print_table(
        f"Port {found['port']} fails under the traffic from {one} to {other}",
        ("", "circuits", "Mbit/s"),
        (
            ("before", up, f"{before:.1f}"),
            (f"packets around it, after {duration(found['around_s'])}", up - 1, f"{around:.1f}"),
            ("circuits around it", left, f"{masked:.1f}"),
        ),
    )


def _wrong_cable(found: dict[str, Any]) -> None:
    print_lines([f"mixed up: {' and '.join(found['swapped'])}; orchestrrl ocs verify says:"])
    print_table(
        "",
        ("where", "what is wrong"),
        ((each["where"], each["what"]) for each in found["faults"]),
        left=("what is wrong",),
    )


def _cycle(found: dict[str, Any]) -> None:
    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    print_table(
        "A cycle: Mbit/s between ToRs, on the circuits that the stage before has left, and on its own",
        ("stage", "became", "moves", "took", "before", "after", "circuits between"),
        (
            (
                stage["period"],
                stage["state"] if stage["code"] == "committed" else stage["code"],
                stage["moves"],
                duration(sum(until_s - since_s for since_s, until_s in stage["commits"])),
                rate(stage["before_mbps"]),
                rate(stage["mbps"]),
                ", ".join(f"{pair}: {count}" for pair, count in stage["circuits"].items()),
            )
            for stage in found["stages"]
        ),
        left=("became", "circuits between"),
    )
