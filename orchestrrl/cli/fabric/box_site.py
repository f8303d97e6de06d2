"""The site of a box on the command line: whether its PoDs have who takes part, and the folder that it is left in."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrrl.cli.output import fail

if TYPE_CHECKING:
    from planner.fabric.topology import PodRole

JOURNAL = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm")


def site_faults(text: str, needed: "Mapping[PodRole, int]") -> list[str]:
    """Beside those of any site, which raise ProblemFaults. `needed`: GPUs, by what their PoDs do."""
    from orchestrrl.fabric.site import parse_site
    from orchestrrl.lab.box.intents import gpus_of

    site = parse_site(text)
    there = {role: len(gpus_of(site, role)) for role in needed}
    return [
        f"pods: must have {count} GPUs at least that {role}, got {there[role]}"
        for role, count in needed.items()
        if there[role] < count
    ]


def prepare_folder(out: Path, site: str) -> None:
    """With the site, and without the journal of a run before. Ends the command where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "site.yaml").write_text(site, encoding="utf-8")
        for stale in JOURNAL:
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        fail(f"{out}: {error.strerror}")
