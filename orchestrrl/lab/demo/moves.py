"""How the demo's moves went, by method, as the daemon's journal has it: predicted seconds beside the actual ones."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from orchestrrl.core.journal.store import EntryKind
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from planner.model import MoveMethod

ALL_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class MethodMark:
    """The requests that moved with their context by one method, as predicted, and were seen to go on; seconds are
    medians, of engines."""

    method: str
    moves: int
    context_tokens: float  # median
    predicted_s: float
    actual_s: float
    predicted_over_actual: float  # of these medians
    other_s: float  # what the other method was predicted to take; 0: it was not to be had


async def marks_by_method(control: ControlClient, speed: float) -> list[MethodMark]:
    """Of all moves that the daemon's journal holds. `speed`: seconds of engines in one of the clock."""
    wanted = control_pb2.WatchJournalRequest(
        tail=ALL_ENTRIES, kinds=[EntryKind.OPERATION_INTENT, EntryKind.OPERATION_RESULT]
    )
    entries = [entry async for entry in control.control.WatchJournal(wanted)]
    orders: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in entries:
        if entry.kind == EntryKind.OPERATION_INTENT:
            action = json.loads(entry.body_json)["operation"]["action"]
            orders[entry.subject_id] = {move["request"]: move for move in action.get("moves", ())}
    moved = [
        (orders[entry.subject_id][item["id"]], item)
        for entry in entries
        if entry.kind == EntryKind.OPERATION_RESULT
        for item in json.loads(entry.body_json)["items"]
        if item["id"] in orders.get(entry.subject_id, {}) and item["done"] and item["duration_s"] > 0
    ]
    return list(_marks(moved, speed))


def _marks(moved: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], speed: float) -> Iterator[MethodMark]:
    for method in MoveMethod:
        found = [
            (order, item)
            for order, item in moved
            if item["method"] == order["method"] == method and order["predicted_s"] > 0
        ]
        if found:
            predicted_s = speed * median(order["predicted_s"] for order, _ in found)
            actual_s = speed * median(item["duration_s"] for _, item in found)
            yield MethodMark(
                method=method,
                moves=len(found),
                context_tokens=median(item["loaded_tokens"] + item["recomputed_tokens"] for _, item in found),
                predicted_s=predicted_s,
                actual_s=actual_s,
                predicted_over_actual=predicted_s / actual_s,
                other_s=speed * median(order["other_s"] for order, _ in found),
            )
