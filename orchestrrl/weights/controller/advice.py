"""Advise on a slow weight sync, with one sentence for each phase that takes significant time. The functions have no
side effects.

The transfer is rarely the bottleneck: in one analysed sync, an unnecessary offload took 227 of 231 s. Other phases are
therefore listed first, if they take longer than the transfer or account for a large share of the total. The advice on a
transfer that is slower than planned comes last and names the edge or peer that causes the delay.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from orchestrrl.weights.controller.profile import PHASE_WORDS, SyncProfile, phase_text
from orchestrrl.weights.controller.reports import EdgeTime, EngineStatus, SyncPhase, SyncReport

# A phase below either of these limits gets no advice.
LEAST_S = 0.1
LEAST_SHARE = 0.05
LARGE_SHARE = 0.25  # a phase with this share of the total gets advice even if the transfer takes longer
SLOW_TRANSFER = 1.25  # ratio to the plan's estimate
SLOW_EDGE, EDGE_LEAST_S = 1.5, 0.02  # ratio to the planned time of the edge, and least duration
SLOW_ENGINE = 2.0  # ratio of installation times, to each of the other engines
BLAMED = 0.8  # fraction of the slow edges at one peer from which the peer is the cause
MOST = 3  # pieces of advice on phases


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice on a sync. `code` is a stable identifier of the phase or of the slow part of the transfer.
    `seconds` is the time that this part takes, and `share` is its fraction of the whole sync."""

    code: str
    text: str
    seconds: float
    share: float


def advice(profile: SyncProfile) -> tuple[Advice, ...]:
    """Return advice on phases, longest first, then on gaps between phases and on the transfer. The result is empty if
    nothing takes too long."""
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
    """Return advice on the longest gap between phases, if it exceeds the limits that also apply to phases."""
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
    why = "check the daemon's log for that time"
    if following is SyncPhase.PUBLISH:
        why = (
            "the trainer had staged, but the daemon had not accepted its publication: the daemon was down, or the"
            " trainer's peer was not attached; or the clocks of their hosts differ"
        )
    told = f"{seconds:.3g} s, {share * 100:.0f} % of the whole, pass after {before} outside any phase: {why}"
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
            f"from the first publication of {profile.report.world} ranks to the last; check why the last rank is late,"
            " or have all ranks publish right after a barrier"
        )
    return "the network between the trainer's rank and the daemon is slow, or the rank publishes many small tensors"


def _install(profile: SyncProfile) -> str:
    slow = slow_engine(profile)
    if slow is not None:
        return f"{slow.engine} takes {slow.install_s:.3g} s, the others at most half of that; check its host"
    return (
        "engines read a whole checkpoint; with OrchestrRL's weight-transfer backend (docs/weight-sync.md) each rank"
        " loads only its own part, from the peer's memory"
    )


SENTENCES: Mapping[SyncPhase, str | Callable[[SyncProfile], str]] = {
    SyncPhase.OFFLOAD: "copy only the weights, into pinned memory that is reused between versions; the optimizer state"
    " can stay on the GPU if engines run on other GPUs",
    SyncPhase.GATHER: "{gb_per_s:.2g} GB/s into the peer's folder, which should be in memory (/dev/shm); have every"
    " rank publish its own part (FSDP2's shards, Megatron's boxes) instead of full tensors on one rank, so that ranks"
    " copy in parallel",
    SyncPhase.PUBLISH: _publish,
    SyncPhase.SUMS: "{gb_per_s:.2g} GB/s; peers compute checksums in parallel, so stage on more hosts (replicas on"
    " other nodes count), and give the peer's process more than one core",
    SyncPhase.PLAN: "the model has many small pieces; increase weights.chunk_bytes",
    SyncPhase.WINDOW: "circuits wait until the job's collectives pause; publish while no collective runs (at a step"
    " boundary there is no wait), or with install: next_pause, so that the trainer continues meanwhile",
    SyncPhase.CIRCUITS: "the switches are slow; to compare with a plan over the existing circuits or over packets,"
    " keep circuits as they are with `orchestrrl fabric pin`",
    SyncPhase.CHECK: "peers verify the checksum of each block; give the peers of engines more than one core",
    SyncPhase.FENCE: "engines stop between steps, so long prefills delay them (a smaller max_num_batched_tokens makes"
    " steps shorter); `orchestrrl barrier` lists the engines that still run",
    SyncPhase.INSTALL: _install,
    SyncPhase.VERIFY: "shorten the probe (weights.probe.max_tokens) or disable it (weights.probe: null); checksums are"
    " compared in any case",
    SyncPhase.COMMIT: "the commit is one journal entry; put the journal on a faster disk",
    SyncPhase.RESUME: "gateways are slow to answer; `orchestrrl status` shows which are attached and the age of their"
    " last report",
}


def slow_engine(profile: SyncProfile) -> EngineStatus | None:
    """Return the engine whose installation took at least SLOW_ENGINE times as long as that of every other engine.
    Return None if there is no such engine, or if fewer than three engines installed the version."""
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
    """Return the code and the description of the cause of a slow transfer. The cause is one edge, one peer, all edges,
    or the time between edges. A peer that receives slowly cannot forward faster, so an edge is not the cause if its
    source receives over a slow edge."""
    slow = [
        edge
        for edge in report.slowest
        if edge.planned_s > 0 and edge.seconds >= max(SLOW_EDGE * edge.planned_s, EDGE_LEAST_S)
    ]
    if not slow:
        return (
            "slow_between",
            "no single edge is much slower than planned; the time is lost between waves, or with small pieces",
        )
    late = {edge.dst for edge in slow}
    first = [edge for edge in slow if edge.src not in late] or slow
    if len(slow) < report.edges:
        if len(first) == 1:
            return "slow_edge", f"{_edge_text(first[0])}; check for other traffic on its path"
        for ends, side in (([edge.src for edge in first], "from"), ([edge.dst for edge in first], "to")):
            peer, number = Counter(ends).most_common(1)[0]
            if number >= BLAMED * len(first):
                # If every reported edge is slow, the unreported ones may be slow, too.
                all_told = "; or the whole network is slower than planned" if len(slow) == len(report.slowest) else ""
                return "slow_peer", (
                    f"{number} of the {len(first)} slow edges go {side} {peer}; check its NIC and the other load of"
                    f" its host, or configure its real rate{all_told}"
                )
    times = median(edge.seconds / edge.planned_s for edge in first)
    return "slow_everywhere", (
        f"edges take {_times(times)} times their planned time; the network is slower than configured (nic_gbps and"
        " link_gbps in weights.network, or the fabric's site), or is shared: then decrease weights.rate_share"
    )


def _edge_text(edge: EdgeTime) -> str:
    times = _times(edge.seconds / edge.planned_s)
    return f"{edge.src} -> {edge.dst} (phase {edge.phase}) took {times} times its planned time, {edge.gbps:.3g} Gb/s"


def _times(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
