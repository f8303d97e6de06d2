"""Weight syncs as a picture: what was waited for, over time, a bar a version. Matplotlib is loaded to draw one."""

from collections.abc import Sequence
from pathlib import Path

from orchestrrl.weights.controller.profile import SyncProfile, phase_text
from orchestrrl.weights.controller.reports import SyncPhase

# What is the trainer's is blue, what is planned and prepared grey and violet, the transfer green, what requests stand
# still for orange and red.
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
    """The newest first, as they are given; below it. Raises OSError, and ValueError for a format that is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.6 + 0.42 * max(4, len(profiles))), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    seen: dict[SyncPhase | None, float] = {}
    for place, took in enumerate(profiles):
        began_s = took.path[0].began_s if took.path else 0.0
        for stretch in took.path:
            seen[stretch.phase] = seen.get(stretch.phase, 0.0) + stretch.seconds
            axis.barh(
                place,
                stretch.seconds,
                0.7,
                left=stretch.began_s - began_s,
                color=COLOURS[stretch.phase],
                edgecolor="#8896a3",
                linewidth=0.4,
            )
        bound_s = took.report.lower_bound_s
        transfer = [stretch for stretch in took.path if stretch.phase in (SyncPhase.PHASE_A, SyncPhase.PHASE_B)]
        if bound_s and transfer:
            axis.plot(
                [transfer[0].began_s - began_s, transfer[0].began_s - began_s + bound_s],
                [place + 0.42] * 2,
                color="#22303c",
                linewidth=2,
                solid_capstyle="butt",
            )
    axis.set_yticks(range(len(profiles)), [_label(took) for took in profiles])
    axis.set_ylim(len(profiles) - 0.4, -0.6)
    axis.set_xlabel("seconds from the trainer's first move; the line below a transfer is the bound of its plan")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    order = [phase for phase in (*SyncPhase, None) if phase in seen]
    patches = [
        Patch(facecolor=COLOURS[phase], edgecolor="#8896a3", linewidth=0.4, label=phase_text(phase)) for phase in order
    ]
    if patches:
        figure.legend(handles=patches, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(target, dpi=130)


def _label(profile: SyncProfile) -> str:
    report = profile.report
    return f"{report.version}" if report.code in ("", "done") else f"{report.version}, {report.code.replace('_', ' ')}"
