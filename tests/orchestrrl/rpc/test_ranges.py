"""Every field of every request of the daemon's and the drivers' services is refused by name when out of range."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import LimitReached, ProblemFaults
from orchestrrl.rpc.pb import ocs_pb2
from orchestrrl.rpc.ranges import checking
from orchestrrl.rpc.server import SERVICES

LIMITS = LimitSettings(requests_per_report=10, engines=10)
POOL = ocs_pb2.DESCRIPTOR.pool
REQUESTS = {
    method.input_type.full_name: method.input_type
    for service in (*SERVICES, "orchestrrl.v1.OcsDriver")
    for method in POOL.FindServiceByName(service).methods
}
# Checked by the methods' own code, together with conditions that depend on the fleet.
BY_METHODS = {"ttl_s", "lease_s", "deadline_s", "within_s", "revert_in_s"}
JSON_BY_METHODS = {"intent_json", "publication_json", "news_json", "body_json"}


def fields_of(message: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of fields, through nested messages; once for a message nested in itself."""
    for field in message.fields:
        yield (*path, field)
        if field.message_type is not None and field not in path:
            yield from fields_of(field.message_type, (*path, field))


FIELDS = [
    pytest.param(name, path, id=f"{request.name}.{'.'.join(field.name for field in path)}")
    for name, request in REQUESTS.items()
    for path in fields_of(request)
]


def bad_values(field: Any) -> list[Any]:
    """Return invalid values, of one item for a repeated field."""
    if field.name in BY_METHODS | JSON_BY_METHODS:
        return []
    match field.type:
        case field.TYPE_DOUBLE:
            return [math.nan, math.inf, -math.inf, -1.0, 1e300]
        case field.TYPE_UINT64:
            return [2**63, 2**64 - 1]
        case field.TYPE_ENUM:
            return [99]
        case field.TYPE_STRING:
            return ["x" * (5 * 1024 * 1024 if field.name == "summary_json" else 5000)]
    return []


def faults_of(message: Any) -> list[str]:
    try:
        list(checking(message, LIMITS))
    except (ProblemFaults, LimitReached) as error:
        return str(error).splitlines()
    return []


def inside(message: Any, path: tuple[Any, ...]) -> tuple[Any, str]:
    """Return the message with the path's last field, created on the way, and the prefix of its faults."""
    place = ""
    for field in path[:-1]:
        inner = getattr(message, field.name)
        message = inner.add() if field.is_repeated else inner
        message.SetInParent()
        place += f"{field.name}[0]." if field.is_repeated else f"{field.name}."
    return message, place


@pytest.mark.parametrize(("request_name", "path"), FIELDS)
def test_field_out_of_range_is_refused_by_name(request_name: str, path: tuple[Any, ...]) -> None:
    field = path[-1]
    for bad in bad_values(field):
        message = GetMessageClass(REQUESTS[request_name])()
        holder, place = inside(message, path)
        if field.is_repeated:
            getattr(holder, field.name).append(bad)
        else:
            setattr(holder, field.name, bad)
        named = f"{place}{field.name}{'[0]' if field.is_repeated else ''}: must be "
        assert [fault for fault in faults_of(message) if fault.startswith(named)], (bad, faults_of(message))


@pytest.mark.parametrize(("request_name", "path"), [each for each in FIELDS if each.values[1][-1].is_repeated])
def test_too_long_list_is_refused_by_name(request_name: str, path: tuple[Any, ...]) -> None:
    field, message = path[-1], GetMessageClass(REQUESTS[request_name])()
    holder, place = inside(message, path)
    items = getattr(holder, field.name)
    if field.message_type is not None:
        items.extend([items.add()] * 70_000)
    else:
        items.extend(["x" if field.type == field.TYPE_STRING else 1] * 70_000)
    assert [fault for fault in faults_of(message) if fault.startswith(f"{place}{field.name}: must have at most ")]


def test_empty_request_is_refused_only_for_needed_fields() -> None:
    for request in REQUESTS.values():
        faults = faults_of(GetMessageClass(request)())
        assert all("must not be empty" in fault or "must be one of" in fault for fault in faults), faults
