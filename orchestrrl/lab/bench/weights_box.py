"""A weight sync over circuits of its own in the fabric in a box: the tree by the bound, and by naive and two-stage."""

import sys
from pathlib import Path
from statistics import median
from typing import Any

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.box import enter
from orchestrrl.lab.box.run import SYNC_WAYS, TestbedOrder, run
from orchestrrl.lab.box.switches import PROTOCOLS
from orchestrrl.lab.box.weights_site import weights_site

SYNC_BYTES, CIRCUIT_MBPS, ROUNDS = 200_000_000, 200.0, 2


def weights_box(log_dir: Path) -> list[Figure]:
    """Nothing, and a word on stderr, where no box can be had. About three minutes."""
    if why := enter.lacking():
        print(f"weights_box: left out, {why}", file=sys.stderr)  # noqa: T201
        return []
    folder = (log_dir / "weights-box").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("journal.sqlite*"):
        stale.unlink()
    (folder / "site.yaml").write_text(weights_site(CIRCUIT_MBPS))
    order = TestbedOrder(
        str(folder), ("weights",), PROTOCOLS, mbps=CIRCUIT_MBPS, sync_bytes=SYNC_BYTES, sync_rounds=ROUNDS
    )
    return figures(run(order, lambda _: None)["weights"])


def figures(found: dict[str, Any]) -> list[Figure]:
    rows = {way: [row for row in found["rows"] if row["way"] == way] for way in SYNC_WAYS}
    seconds = {way: median(row["seconds"] for row in of_way) for way, of_way in rows.items()}
    identical = min(row["identical"] for row in found["rows"])
    size, count = found["bytes"] / 1e6, len(rows["tree"])
    note = (
        f"{size:.0f} MB to {found['receivers']} receivers in 2 PoDs, identical at {identical} each "
        f"time by SHA-256; circuits and NICs of {found['circuit_mbps']:g} Mbit/s, median of {count}, in turn"
    )

    def against(other: str, seconds_of_it: float, named: str, more: str = "") -> Figure:
        return Figure(f"weights_box_{other}", seconds["tree"], "s", named, seconds_of_it, more or note)

    crossed = {way: f"{median(row['crossed_bytes'] for row in of_way) / 1e6:.0f} MB" for way, of_way in rows.items()}
    told = "; ".join(f"{way.replace('_', ' ')}: {count}" for way, count in crossed.items())
    busy = max(row["cores_busy"] for row in rows["tree"])
    return [
        against("naive", seconds["naive"], "every receiver straight from a holder"),
        against(
            "two_stage", seconds["two_stage"], "two stages, figure 4", f"into PoDs, by the ports' counters: {told}"
        ),
        against(
            "bound",
            found["bound_s"],
            "what no plan can beat",
            f"a circuit gives {found['payload']:.1%} of its rate to TCP's payload, as measured before; "
            f"the model's time: {median(row['estimate_s'] for row in rows['tree']):.3g} s; {busy:.1f} cores busy",
        ),
    ]
