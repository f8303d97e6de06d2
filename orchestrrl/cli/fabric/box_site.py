"""The site of a box on the command line, and a box that stands, shows and is gone."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrrl.cli.output import choice_faults, fail, raise_faults, stderr
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.box.run import BoxOrder
    from planner.fabric.topology import PodRole

JOURNAL = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm")


def chosen_protocols(text: str, faults: list[str]) -> tuple[str, ...]:
    """Return the protocols of `--protocols`, by default three."""
    from orchestrrl.lab.box.run import PROTOCOLS
    from orchestrrl.lab.emulated_switch import PROTOCOLS as KNOWN

    named = tuple(text.split(",")) if text else PROTOCOLS
    faults += [fault for name in named for fault in choice_faults("--protocols", name, KNOWN)]
    return named


def sound_site(file: Path | None, default: str, needed: "Mapping[PodRole, int]", faults: list[str]) -> str:
    """Return the text of a site whose PoDs have the `needed` GPUs, by what they do. Raises ProblemFaults with its
    faults, and `faults` before them."""
    from orchestrrl.core.documents import read_text
    from orchestrrl.fabric.site import parse_site
    from orchestrrl.lab.box.intents import gpus_of

    text = default
    try:
        text = default if file is None else read_text(file)
        site = parse_site(text)
        there = {role: len(gpus_of(site, role)) for role in needed}
        faults += [
            f"pods: must have {count} GPUs at least that {role}, got {there[role]}"
            for role, count in needed.items()
            if there[role] < count
        ]
    except ProblemFaults as error:
        faults += error.faults
    raise_faults(faults)
    return text


def show_in_box(order: "BoxOrder", site: str) -> dict[str, Any]:
    """Return what the shows returned. The folder gets the site, and loses the journal of a run before."""
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
    with stderr().status("making the box") as status:
        return asyncio.run(run_box(order, lambda at: status.update(f"{at}: real time, real packets")))
