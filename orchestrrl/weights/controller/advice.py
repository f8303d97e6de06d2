"""Advise on a weight sync that takes long: a sentence for each phase that is worth one. Pure.

The transfer is seldom what takes time: of 231 s of a sync that was looked at, 227 s were an offload that nobody needed.
So whatever is not the transfer is named first, where it takes longer than that or a large part of the whole; then a
transfer that is slower than its plan, with the edge or peer that it is slow by.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from orchestrrl.weights.controller.profile import PHASE_WORDS, SyncProfile, phase_text
from orchestrrl.weights.controller.reports import EdgeTime, EngineStatus, SyncPhase, SyncReport

# Nothing is said of what takes less than either.
LEAST_S = 0.1
LEAST_SHARE = 0.05
LARGE_SHARE = 0.25  # worth a word even beside a longer transfer
SLOW_TRANSFER = 1.25  # against the plan's estimate
SLOW_EDGE, EDGE_LEAST_S = 1.5, 0.02  # against its own planned time, where it is no trifle
SLOW_ENGINE = 2.0  # to install, against each of the others
BLAMED = 0.8  # of the slow edges that end at one peer, for it to be the cause
MOST = 3  # sentences on phases


@dataclass(frozen=True, slots=True)
class Advice:
    """`code` is stable: the phase, or what is slow of the transfer. `text` is for people."""

    code: str
    text: str
    seconds: float
    share: float


def advice(profile: SyncProfile) -> tuple[Advice, ...]:
    """The most worthwhile first; none where time went where it has to go."""
    return (*_of_phases(profile), *_of_gaps(profile), *_of_transfer(profile))


def _of_phases(profile: SyncProfile) -> tuple[Advice, ...]:
    found = [
        Advice(row.phase, _sentence(row.phase, profile, row.waited_s, row.share), row.waited_s, row.share)
        for row in profile.rows
        if row.phase in SENTENCES and _is_worth_a_word(profile, row.waited_s, row.share)
    ]
    return tuple(sorted(found, key=lambda each: -each.seconds)[:MOST])


def _is_worth_a_word(profile: SyncProfile, seconds: float, share: float) -> bool:
    is_noticed = seconds >= LEAST_S and share >= LEAST_SHARE
    return is_noticed and (seconds > profile.transfer_s or share >= LARGE_SHARE)


def _of_gaps(profile: SyncProfile) -> tuple[Advice, ...]:
    """Report the longest time between phases as if it were a phase."""
    gaps = [place for place, stretch in enumerate(profile.path) if stretch.phase is None]
    if not gaps:
        return ()
    place = max(gaps, key=lambda each: profile.path[each].seconds)
    seconds = profile.path[place].seconds
    share = seconds / profile.whole_s
    if not _is_worth_a_word(profile, seconds, share):
        return ()
    before = phase_text(profile.path[place - 1].phase)
    following = profile.path[place + 1].phase if place + 1 < len(profile.path) else None
    why = "the daemon's log of that time may say what it did"
    if following is SyncPhase.PUBLISH:
        why = (
            "the trainer had staged and the daemon did not take its word: it was away, or the trainer's peer was not"
            " attached; or the clocks of their hosts differ"
        )
    told = f"{seconds:.3g} s, {share * 100:.0f} % of the whole, pass after {before} in no phase: {why}"
    return (Advice("between", told, seconds, share),)


def _sentence(phase: SyncPhase, profile: SyncProfile, seconds: float, share: float) -> str:
    advice = SENTENCES[phase]
    gb_per_s = profile.report.bytes * 1e-9 / profile.seconds(phase)
    text = advice.format(gb_per_s=gb_per_s) if isinstance(advice, str) else advice(profile)
    return f"{PHASE_WORDS[phase]} takes {seconds:.3g} s, {share * 100:.0f} % of the whole: {text}"


# --- phases


def _publish(profile: SyncProfile) -> str:
    if profile.report.world > 1:
        return (
            f"from the first of {profile.report.world} ranks' word to the last one's; look at what the last one does"
            " before it publishes, or let all publish right after a barrier"
        )
    return "the trainer's rank and the daemon are far apart, or its list of tensors is long; publish larger tensors"


def _install(profile: SyncProfile) -> str:
    slow = slow_engine(profile)
    if slow is not None:
        return f"{slow.engine} takes {slow.install_s:.3g} s and others half of that at most; look at its host"
    return (
        "engines read a whole checkpoint; with our weight-transfer backend (docs/weight-sync.md) they load from the"
        " peer's memory, and each rank only its own part"
    )


SENTENCES: Mapping[SyncPhase, str | Callable[[SyncProfile], str]] = {
    SyncPhase.OFFLOAD: "copy weights alone, and into pinned memory that is kept between versions; the optimizer's state"
    " can stay where it is when engines run on other GPUs",
    SyncPhase.GATHER: "{gb_per_s:.2g} GB/s into the peer's folder, which should be in memory (/dev/shm); have every"
    " rank publish what it has (FSDP2's shards, Megatron's boxes) instead of full tensors on one, so that they"
    " copy side by side",
    SyncPhase.PUBLISH: _publish,
    SyncPhase.SUMS: "{gb_per_s:.2g} GB/s; holders sum side by side, so stage on more hosts (replicas on other nodes"
    " count as holders), and give the peer's process more than one core",
    SyncPhase.PLAN: "the model has many small pieces; a larger weights.chunk_bytes makes fewer",
    SyncPhase.WINDOW: "circuits wait until the job's collectives pause; publish where nothing runs (at a boundary no"
    " window is waited for), or with install: next_pause, so that the trainer goes on meanwhile",
    SyncPhase.CIRCUITS: "switches are slow to change; a plan over the circuits that are up already, or packets alone,"
    " may be sooner: `orchestrrl fabric pin` keeps circuits as they are, to compare",
    SyncPhase.CHECK: "blocks are summed again on arrival; give the peers of engines more than one core",
    SyncPhase.FENCE: "engines stop between two of their steps, so long prefills keep them (a smaller"
    " max_num_batched_tokens makes steps shorter); `orchestrrl barrier` names who is not at rest",
    SyncPhase.INSTALL: _install,
    SyncPhase.VERIFY: "make the probe shorter (weights.probe.max_tokens), or leave it out (weights.probe: null): sums"
    " are compared without it, too",
    SyncPhase.COMMIT: "it is one entry of the journal; put the journal on a faster disk",
    SyncPhase.RESUME: "gateways are slow to answer; `orchestrrl status` shows which are attached and how old their word"
    " is",
}


def slow_engine(profile: SyncProfile) -> EngineStatus | None:
    """The one that all others wait for, where it is one."""
    took = [engine for engine in profile.report.engines if engine.install_s > 0]
    if len(took) < 3:
        return None
    slowest = max(took, key=lambda engine: engine.install_s)
    others = [engine.install_s for engine in took if engine is not slowest]
    return slowest if slowest.install_s >= SLOW_ENGINE * max(others) else None


# --- the transfer


def _of_transfer(profile: SyncProfile) -> tuple[Advice, ...]:
    report, seconds, share = profile.report, profile.transfer_s, profile.transfer_share
    over = profile.over_estimate
    if seconds < LEAST_S or share < LEAST_SHARE or over is None or over < SLOW_TRANSFER:
        return ()
    code, why = slow_by(report)
    mended = f" (edges that broke on the way: {report.mended_edges})" if report.mended_edges else ""
    told = f"the transfer takes {seconds:.3g} s, {_times(over)} times its estimate{mended}: {why}"
    return (Advice(code, told, seconds, share),)


def slow_by(report: SyncReport) -> tuple[str, str]:
    """Return the cause of a slow transfer: one edge, one peer, everything, or none of its edges. A peer that receives
    slowly cannot forward faster, so an edge is not blamed where its source receives over a slow one."""
    slow = [
        edge
        for edge in report.slowest
        if edge.planned_s > 0 and edge.seconds >= max(SLOW_EDGE * edge.planned_s, EDGE_LEAST_S)
    ]
    if not slow:
        return (
            "slow_between",
            "no edge by itself is much slower than planned; time goes between waves, or to small pieces",
        )
    late = {edge.dst for edge in slow}
    first = [edge for edge in slow if edge.src not in late] or slow
    if len(slow) < report.edges:
        if len(first) == 1:
            return "slow_edge", f"{_edge_text(first[0])}; look at what else uses its way"
        for ends, side in (([edge.src for edge in first], "from"), ([edge.dst for edge in first], "to")):
            peer, number = Counter(ends).most_common(1)[0]
            if number >= BLAMED * len(first):
                # Where not one that is told of is as planned, all the others may be slow, too.
                all_told = (
                    ", if not all of the network has less than was planned" if len(slow) == len(report.slowest) else ""
                )
                return "slow_peer", (
                    f"{number} of the {len(first)} slow edges go {side} {peer}; look at its NIC and what else runs on"
                    f" its host, or have it tell its real rate{all_told}"
                )
    times = median(edge.seconds / edge.planned_s for edge in first)
    return "slow_everywhere", (
        f"edges take {_times(times)} times what was planned; the network has less than weights.network says (nic_gbps,"
        " link_gbps; or the fabric's site), or is shared: a smaller weights.rate_share plans with less of it"
    )


def _edge_text(edge: EdgeTime) -> str:
    times = _times(edge.seconds / edge.planned_s)
    return f"{edge.src} -> {edge.dst} (phase {edge.phase}) took {times} times what was planned, {edge.gbps:.3g} Gb/s"


def _times(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
