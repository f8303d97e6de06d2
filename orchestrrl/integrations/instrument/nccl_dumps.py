"""Reads what NCCL's inspector plugin has written into the events of the rings.

The inspector (`NCCL_PROFILER_PLUGIN=libnccl-profiler-inspector.so NCCL_INSPECTOR_ENABLE=1`) writes lines of JSON, one
per finished collective. When one began and ended stands in it only with NCCL_INSPECTOR_DUMP_VERBOSE=1, and small ones
only with NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0. Both formats of its README in NVIDIA/nccl are read: each record with
its own `header` (until v4.2), and records that follow a `dump_stats` marker which has it (v4.3). Written after that
README and tried on records made by hand; the output of a real run on GPUs has not been seen.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument.rings import COLLECTIVE, DEVICE, UNKNOWN, RingEvent, group_id
else:  # in the traced process, where this folder is on the path
    from rings import COLLECTIVE, DEVICE, UNKNOWN, RingEvent, group_id

OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_all",
    "AllToAll": "all_to_all",
    "Gather": "gather",
    "Scatter": "scatter",
    "Send": "send",
    "Recv": "recv",
}


@dataclass(frozen=True, slots=True)
class NcclDump:
    """What one file holds. An event's sequence is its number within its communicator."""

    events: tuple[RingEvent, ...]  # by their starts
    without_times: int  # finished, but not written verbosely: it is not known when
    dropped: int  # overwritten in the inspector before it wrote them
    faults: tuple[str, ...]  # lines that are none of the inspector's


def read_inspector(lines: Iterable[str], unix_minus_monotonic_ns: int) -> NcclDump:
    """`unix_minus_monotonic_ns`: on the host that wrote, as the inspector has the time of day and the rings have not.

    A group's id is that of its communicator, whose ranks the inspector does not tell.
    """
    events: list[RingEvent] = []
    faults: list[str] = []
    without_times = dropped = 0
    header: Mapping[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            header = record.get("header", header)
            dropped += sum(record.get("dump_stats", {}).get(f"{kind}_dropped_since_last_dump", 0) for kind in _KINDS)
            for kind in _KINDS:
                if f"{kind}_perf" in record:
                    event = _event(kind, record[f"{kind}_perf"], header, unix_minus_monotonic_ns)
                    events += [event] if event else []
                    without_times += event is None
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            faults.append(f"line {number}: is no record of the inspector: {fault!r}")
    return NcclDump(tuple(sorted(events, key=lambda event: event.start_ns)), without_times, dropped, tuple(faults))


_KINDS = ("coll", "p2p")


def _event(kind: str, perf: Mapping[str, Any], header: Mapping[str, Any], offset_ns: int) -> RingEvent | None:
    """From the first kernel's start to the last one's end; of the call where the kernels have no times."""
    times = perf.get("event_trace_ts")
    if times is None:
        return None
    kernels = times.get("kernel_events", [])
    starts = [kernel["kernel_start_ts"] for kernel in kernels if kernel["kernel_start_ts"]]
    ends = [kernel["kernel_stop_ts"] for kernel in kernels if kernel["kernel_stop_ts"]]
    start_us = min(starts, default=times[f"{kind}_start_ts"])
    end_us = max(ends, default=start_us + perf[f"{kind}_exec_time_us"])
    name = str(perf[kind])
    return RingEvent(
        sequence=int(perf[f"{kind}_sn"]),
        kind=COLLECTIVE,
        op=OPS.get(name, name),
        group=group_id((), str(header["id"])),
        n_bytes=int(perf[f"{kind}_msg_size_bytes"]),
        start_ns=int(start_us) * 1000 - offset_ns,
        end_ns=int(end_us) * 1000 - offset_ns,
        value=int(perf.get("p2p_peer", UNKNOWN)),
        flags=DEVICE,
        thread=0,
    )
