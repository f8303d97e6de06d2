"""Every codec returns a value unchanged after a round trip, and both sides are covered."""

from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.model import Connectivity, CrossConnectReading, SwitchFacts
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.engines.serving import MOST_SIZE
from orchestrrl.rpc import switches_service
from orchestrrl.rpc.codec import LOCAL, Codec, EnumCodec, FieldMapping
from orchestrrl.rpc.codecs import control, fabric, node, ocs, telemetry, weights
from orchestrrl.rpc.pb import agent_pb2, fabric_pb2, ocs_pb2, telemetry_pb2
from orchestrrl.rpc.ranges import needed_fields
from planner.admission import ControlState, OperatorControl
from planner.cost.models import Model
from planner.model import ConfigurationId, RequestState, RequestView

MODULES: tuple[ModuleType, ...] = (
    control, fabric, node, ocs, switches_service, telemetry, weights,
)  # fmt: skip
CODECS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": codec
    for module in MODULES
    for name, codec in vars(module).items()
    if isinstance(codec, Codec)
}
# Views for operators: the message has fewer fields than the value, or another structure.
WRITTEN_ONLY = {
    "control.PLAN", "control.PLAN_EVENT", "control._BALANCE", "control._MOVED", "control._ENGINE",
    "control.REDEPLOYMENT", "switches_service._OUTCOME",
}  # fmt: skip
READABLE = sorted(CODECS.keys() - WRITTEN_ONLY)

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SIZES, BITS = st.integers(1, MOST_SIZE), st.floats(0.25, 64)
PORTS = st.builds(lambda first, count: range(first, first + count), st.integers(0, 99), st.integers(1, 99))


def tuples(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=3).map(tuple)


# Classes and fields whose values depend on each other, or whose types are too general.
KINDS: dict[type, st.SearchStrategy[Any]] = {
    Model: st.builds(
        Model, name=TEXT, layers=SIZES, hidden=SIZES, q_heads=SIZES, kv_heads=SIZES, head_dim=SIZES, ffn=SIZES,
        vocab=SIZES, experts=st.sampled_from([0, 8]), experts_per_token=st.integers(1, 8), expert_ffn=SIZES,
        window_tokens=SIZES, tied_embeddings=st.booleans(), weight_bits=BITS, expert_bits=BITS,
    ),
    OperatorControl: st.builds(OperatorControl, st.just(ControlState.FREE), reason=TEXT)
    | st.builds(OperatorControl, st.just(ControlState.OVERRIDDEN), st.just(ConfigurationId("tp1")), TEXT, st.floats(0)),
}  # fmt: skip
FIELDS: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (SwitchFacts, "connectivity"): st.just(Connectivity.INGRESS_EGRESS),
    (SwitchFacts, "ingress_ports"): PORTS,
    (SwitchFacts, "egress_ports"): PORTS,
    (SwitchFacts, "reconfiguration_s"): st.floats(0, 1e9),
    (RequestView, "state"): st.sampled_from([RequestState.WAITING, RequestState.RUNNING]),
    (EngineCapabilities, "models"): tuples(TEXT.filter(str.isprintable)),
    (CrossConnectReading, "circuits"): tuples(st.deferred(lambda: values(ocs.CIRCUIT.mapping))).map(
        lambda circuits: tuple(sorted(circuits, key=lambda circuit: circuit.cross_connect))
    ),
    (JournalEntry, "body"): st.dictionaries(TEXT, st.integers() | TEXT, max_size=3),
}


def values(mapping: FieldMapping) -> st.SearchStrategy[Any]:
    """Draw values of the class, with all fields that the mapping sends."""
    if mapping.kind in KINDS:
        return KINDS[mapping.kind]
    hints, needed = get_type_hints(mapping.kind), needed_fields(mapping.message)
    chosen: dict[str, Any] = {name: values(inner) for name, inner in mapping.flat.items()}
    for name, union in mapping.unions.items():
        chosen[name] = st.one_of(*(values(codec.mapping) for codec in union.codecs.values()))
    for pair in mapping.pairs:
        if (mapping.kind, pair.attribute) in FIELDS:
            chosen[pair.attribute] = FIELDS[mapping.kind, pair.attribute]
        elif not pair.is_property:
            chosen[pair.attribute] = _field(hints[pair.attribute], pair, pair.field.name in needed)
    return st.builds(mapping.kind, **chosen)


def _field(hint: Any, pair: Any, needed: bool) -> st.SearchStrategy[Any]:
    codec = getattr(pair.converter, "item", pair.converter)
    if pair.is_optional:
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) in (tuple, frozenset):
        item = _value(get_args(hint)[0], codec, pair.field, False)
        found = tuples(item) if get_origin(hint) is tuple else st.frozensets(item, max_size=3)
    else:
        # None is an empty field if the field cannot be absent.
        found = _value(hint, codec, pair.field, needed or (pair.is_optional and not pair.field.has_presence))
    return st.none() | found if pair.is_optional else found


def _value(hint: Any, codec: Any, field: Any, not_empty: bool) -> st.SearchStrategy[Any]:
    kind = getattr(hint, "__supertype__", hint)
    if is_dataclass(kind):
        inner = codec.mapping if isinstance(codec, Codec) else _declared(kind).mapping
        return values(inner)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(0, 2**64 - 1 if field.type == field.TYPE_UINT64 else 2**31 - 1)
    if kind is float:
        return st.floats(allow_nan=False).filter(bool) if not_empty else st.floats(allow_nan=False)
    assert kind is str, hint
    return TEXT.filter(bool) if not_empty else TEXT


def _declared(kind: type) -> Codec[Any, Any]:
    return next(codec for codec in CODECS.values() if codec.kind is kind)


@pytest.mark.parametrize("name", READABLE)
@given(data=st.data())
def test_values_survive_round_trip(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    value = data.draw(values(codec.mapping))
    wire = codec.to_pb(value).SerializeToString()
    assert codec.from_pb(codec.message.FromString(wire)) == value


@pytest.mark.parametrize("name", sorted(WRITTEN_ONLY))
def test_every_view_covers_each_field(name: str) -> None:
    assert CODECS[name].to_pb  # compiles, or raises TypeError naming the missing field


@dataclass(frozen=True)
class Ack:
    sequence: int
    generation: int
    sent_s: float


@dataclass(frozen=True)
class WordyAck(Ack):
    words: str


@dataclass(frozen=True)
class ShortAck:
    sequence: int


@dataclass(frozen=True)
class TextAck(Ack):
    sequence: str  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "specs", "complaint"),
    [
        (WordyAck, {}, "WordyAck.words has no counterpart in ReportAck"),
        (WordyAck, {"words": LOCAL}, r"ReportAck lacks counterparts of \['words'\] in WordyAck"),
        (ShortAck, {}, r"ShortAck lacks counterparts of \['generation', 'sent_unix_s'\] in ReportAck"),
        (TextAck, {}, "<class 'str'> does not match orchestrrl.v1.ReportAck.sequence"),
    ],
)
def test_field_without_counterpart_raises_type_error(kind: type, specs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        Codec(kind, telemetry_pb2.ReportAck, **specs).from_pb(telemetry_pb2.ReportAck())


class Light(Enum):
    OK = 1
    DIM = 2


def test_enum_with_other_members_needs_unspecified() -> None:
    with pytest.raises(TypeError, match="EngineHealth lacks members of Light"):
        EnumCodec(Light, telemetry_pb2.EngineHealth.DESCRIPTOR)
    codec = EnumCodec(Light, telemetry_pb2.EngineHealth.DESCRIPTOR, unspecified=Light.OK)
    assert codec.to_pb(Light.DIM) == telemetry_pb2.ENGINE_HEALTH_OK
    assert codec.from_pb(99) is Light.OK


@pytest.mark.parametrize(
    ("codec", "message", "complaint"),
    [
        (telemetry.ENGINE_REPORT, telemetry_pb2.EngineReport(agent_id="a", engine_id="e"), "health must be set"),
        (telemetry.ENGINE_REPORT, telemetry_pb2.EngineReport(health=1), "agent_id must not be empty"),
        (telemetry.GATEWAY_REPORT, telemetry_pb2.GatewayReport(), "gateway_id must not be empty"),
        (node.HELLO, agent_pb2.NodeHello(node_id="n"), "kind must be set to a value that this version supports, got 0"),
        (node.OPERATION, agent_pb2.Operation(operation_id="1"), "action must be set to a field"),
        (node.OPERATION, agent_pb2.Operation(), "operation_id must not be empty"),
        (control.MODE, 0, "Mode must be set to a value that this version supports, got 0"),
        (ocs.DIFF, ocs_pb2.ChangeDiff(), "mode must be set to a value that this version supports, got 0"),
        (ocs.ITEM, ocs_pb2.CrossConnectResult(action="paint"), "action must be one of add, remove, got 'paint'"),
        (fabric.PERIOD, fabric_pb2.PeriodReport(stage="tea"), "stage must be one of train, gen, weight_sync, got"),
    ],
)  # fmt: skip
def test_invalid_values_are_reported_by_field(codec: Any, message: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        codec.from_pb(message)
