"""Records as the README of NCCL's inspector has them, made by hand: no real output has been seen."""

import json
from typing import Any

from orchestrrl.integrations.instrument.nccl_dumps import read_inspector
from orchestrrl.integrations.instrument.rings import UNKNOWN

HEADER = {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1}
OFFSET_NS = 1_752_867_000_000_000_000


def collective(sequence: int, *kernels: tuple[int, int], verbose: bool = True) -> dict[str, Any]:
    times = {
        "coll_start_ts": 1752867229235059,
        "coll_stop_ts": 1752867229235064,
        "kernel_events": [
            {"channel_id": at, "kernel_start_ts": start, "kernel_stop_ts": stop, "kernel_record_ts": stop}
            for at, (start, stop) in enumerate(kernels)
        ],
    }
    perf = {"coll": "ReduceScatter", "coll_sn": sequence, "coll_msg_size_bytes": 2147483648, "coll_exec_time_us": 41057}
    return {"coll_perf": perf | ({"event_trace_ts": times} if verbose else {})}


def lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def test_a_collective_lasts_from_its_first_kernel_to_its_last() -> None:
    later = collective(1232, (1752867229235181, 1752867229275811), (1752867229235170, 1752867229275800))
    earlier = collective(1231, (1752867229135181, 1752867229175811))
    marker = {"header": HEADER, "dump_stats": {"coll_records": 2, "coll_dropped_since_last_dump": 3}}
    dump = read_inspector(lines(marker, later, earlier), OFFSET_NS)
    assert [event.sequence for event in dump.events] == [1231, 1232]
    event = dump.events[1]
    assert (event.op, event.n_bytes, event.value) == ("reduce_scatter", 2147483648, UNKNOWN)
    assert (event.start_ns, event.end_ns) == (229_235_170_000, 229_275_811_000)
    assert (dump.dropped, dump.without_times, dump.faults) == (3, 0, ())


def test_records_with_headers_of_their_own_belong_to_their_communicators() -> None:
    records = (collective(1) | {"header": HEADER}, collective(1) | {"header": HEADER | {"id": "0x1"}})
    first, second = read_inspector(lines(*records), OFFSET_NS).events
    assert first.group != second.group
    # Without times of kernels: from the call, as long as it is said to have taken.
    assert first.end_ns == first.start_ns + 41_057_000


def test_point_to_point_is_read_as_well() -> None:
    perf = {
        "p2p": "Send",
        "p2p_sn": 4,
        "p2p_msg_size_bytes": 64,
        "p2p_exec_time_us": 7,
        "p2p_peer": 3,
        "event_trace_ts": {"p2p_start_ts": 1752867229235059},
    }
    (event,) = read_inspector(lines({"header": HEADER, "p2p_perf": perf}), OFFSET_NS).events
    assert (event.op, event.value, event.end_ns) == ("send", 3, event.start_ns + 7000)


def test_what_has_no_times_is_counted_and_what_is_no_record_is_told() -> None:
    terse = collective(1, verbose=False) | {"header": HEADER}
    broken = {"header": HEADER, "coll_perf": {"coll": "AllReduce", "event_trace_ts": {}}}
    dump = read_inspector(["", "{", "[1]", *lines(terse, broken)], OFFSET_NS)
    assert (dump.events, dump.without_times) == ((), 1)
    assert [fault.partition(":")[0] for fault in dump.faults] == ["line 2", "line 3", "line 5"]
