"""Draw weight syncs as a chart: the critical path over time, one bar per version. matplotlib is imported only when a
chart is drawn."""

from collections.abc import Sequence
from pathlib import Path

from orchestrrl.core.charts import ChartBar, add_legend, bar_chart, save
from orchestrrl.weights.controller.profile import SyncProfile, phase_text
from orchestrrl.weights.controller.reports import SyncPhase

# Phases of the trainer are blue, planning and preparation grey and violet, the transfer green, and phases during which
# requests are paused orange and red.
COLOURS = {
    SyncPhase.OFFLOAD: "#08306b",
    SyncPhase.GATHER: "#2f6db3",
    SyncPhase.PUBLISH: "#9ecae1",
    SyncPhase.SUMS: "#bdbdbd",
    SyncPhase.PLAN: "#737373",
    SyncPhase.WINDOW: "#dadaeb",
    SyncPhase.CIRCUITS: "#6d55a3",
    SyncPhase.PHASE_A: "#1b7837",
    SyncPhase.PHASE_B: "#7fbf7b",
    SyncPhase.CHECK: "#525252",
    SyncPhase.NEXT_PAUSE: "#f0f0f0",
    SyncPhase.FENCE: "#fdd0a2",
    SyncPhase.INSTALL: "#f16913",
    SyncPhase.VERIFY: "#fdae6b",
    SyncPhase.COMMIT: "#a50f15",
    SyncPhase.RESUME: "#fc9272",
    SyncPhase.TEAR_DOWN: "#efedf5",
    None: "#ffffff",
}


def draw(profiles: Sequence[SyncProfile], target: Path) -> None:
    """Draw a bar for each profile, from top to bottom in the given order, and save the chart to `target`. Raises
    OSError if `target` cannot be written, and ValueError if its file format is unknown."""
    bars, bounds = [], []
    for row, profile in enumerate(profiles):
        began_s = profile.path[0].began_s if profile.path else 0.0
        for stretch in profile.path:
            start_s = stretch.began_s - began_s
            bars.append(ChartBar(row, start_s, start_s + stretch.seconds, COLOURS[stretch.phase]))
        transfers = [stretch for stretch in profile.path if stretch.phase in (SyncPhase.PHASE_A, SyncPhase.PHASE_B)]
        if profile.report.lower_bound_s and transfers:
            start_s = transfers[0].began_s - began_s
            bounds.append((row + 0.42, start_s, start_s + profile.report.lower_bound_s))
    figure = bar_chart(
        bars,
        {row: _label(profile) for row, profile in enumerate(profiles)},
        "seconds from the start of the first phase; the line below a transfer is the lower bound of its plan",
    )
    if bounds:
        figure.axes[0].hlines(*zip(*bounds, strict=True), color="#22303c", linewidth=2)
    seen = {stretch.phase for profile in profiles for stretch in profile.path}
    add_legend(figure, {phase_text(phase): COLOURS[phase] for phase in (*SyncPhase, None) if phase in seen})
    save(figure, target)


def _label(profile: SyncProfile) -> str:
    report = profile.report
    return f"{report.version}" if report.code in ("", "done") else f"{report.version}, {report.code.replace('_', ' ')}"
