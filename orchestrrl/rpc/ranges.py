"""Check the values in messages that servers receive. Numbers must be in range, and texts and lists must have a bounded
size.

The rule of a field depends on its type. Times in seconds, rates and fractions must be finite, >= 0 and <=
`MOST_NUMBER`. Integers must fit into signed 64-bit integers, enum values must be known, and texts must not be too long.
`_NAMED` and `_RULES` list the fields with other rules. A text field whose name ends in `_json` is limited only by the
size of its message. The code that parses the text checks its content.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from orchestrrl.core.addresses import check_url
from orchestrrl.core.errors import LimitReached, ProblemFaults, shorten
from orchestrrl.engines.serving import MOST_RANKS, MOST_SIZE

if TYPE_CHECKING:  # processes without a configuration file check their messages too
    from orchestrrl.core.config.schema import LimitSettings

# Descriptors have a class per implementation of protobuf, with the same attributes.
_Descriptor = Any
_Field = Any
_Check = Callable[[Any], str]  # the fault of a value; "" if there is none

MOST_NUMBER = 253402300799.0  # the last second of the year 9999, the limit of dates
MOST_TOKENS_PER_S = 1e9
MOST_WHOLE = 2**63 - 1
MOST_FAILOVER_TOKENS = 1 << 40  # in one report: totals stay far below the limit of a status
MOST_NAME_CHARACTERS = 1024
MOST_TEXT_CHARACTERS = 4096
MOST_SUMMARY_CHARACTERS = 4 * 1024 * 1024  # the daemon stores one for each host
MOST_ITEMS = 65_536  # of a list without a configured limit
MOST_FAULTS = 20  # in one refusal
LEAST_BITS, MOST_BITS = 0.01, 64.0  # of an element of a weight or a KV cache
STEP_ITEMS = 1000  # messages of a list that are checked at a time


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule for the values of one field. `most` is the largest number, the maximum length of a text or, for a list,
    the maximum number of items. If `most` is None, the limit of the type applies. `key` is the setting in the section
    `limits` that contains the maximum number of items of a list."""

    most: float | None = None
    least: float = 0
    is_url: bool = False  # of an engine; may be empty
    needed: bool = False  # a text must not be empty, an enum must be specified
    key: str = ""
    by_handler: bool = False  # checked by the method's own code, together with conditions that depend on the fleet


_NEEDED = _Rule(needed=True)
_PORTS = _Rule(4096)  # of one switch
_HANDLERS = _Rule(by_handler=True)
_RANKS = _Rule(MOST_RANKS, least=1)
_BITS = _Rule(MOST_BITS, least=LEAST_BITS)
_REQUESTS, _ENGINES = _Rule(key="requests_per_report"), _Rule(key="engines")
# Fields of any message.
_NAMED: Mapping[str, _Rule] = {
    **dict.fromkeys(("ttl_s", "lease_s", "deadline_s", "within_s", "revert_in_s"), _HANDLERS),
    **dict.fromkeys(("period", "host", "configuration", "pool", "tag"), _Rule(MOST_NAME_CHARACTERS)),
    "job": _Rule(200),  # as in fabric/intents.py
    "summary_json": _Rule(MOST_SUMMARY_CHARACTERS),
    "finish_reason": _Rule(256),  # thousands of these are stored
    "models": _Rule(256),
    "engine_ids": _ENGINES,
    "without_engine_ids": _ENGINES,
    "weight_bits": _BITS,
    "kv_bits": _BITS,
    "expert_bits": _BITS,
    "request_ids": _REQUESTS,
    "group_ids": _REQUESTS,
}
_RULES: Mapping[str, Mapping[str, _Rule]] = {
    "EngineReport": {"agent_id": _NEEDED, "engine_id": _NEEDED, "health": _NEEDED, "url": _Rule(is_url=True)},
    "ServingFacts": dict.fromkeys(("tensor_parallel", "pipeline_parallel", "data_parallel"), _RANKS),
    "ModelSizes": {
        **dict.fromkeys(("layers", "hidden", "q_heads", "kv_heads", "head_dim", "vocab"), _Rule(MOST_SIZE, least=1)),
        **dict.fromkeys(("ffn", "experts", "experts_per_token", "expert_ffn", "window_tokens"), _Rule(MOST_SIZE)),
    },
    "EngineSample": {"kv_usage_fraction": _Rule(1.0), "decode_tokens_per_s": _Rule(MOST_TOKENS_PER_S)},
    "GatewayReport": {"gateway_id": _NEEDED, "in_flight": _REQUESTS, "finished": _REQUESTS, "failovers": _Rule(4096)},
    "EngineFailovers": {"engine_id": _NEEDED, "tokens_recomputed": _Rule(MOST_FAILOVER_TOKENS)},
    "GatewayEngine": {"engine_id": _NEEDED},
    "GatewayEngines": {"engines": _ENGINES},
    "RequestProgress": {"request_id": _NEEDED},
    "FinishedRequest": {"request_id": _NEEDED},
    "NodeHello": {"node_id": _NEEDED, "kind": _NEEDED},
    "Operation": {"operation_id": _NEEDED},
    "Route": {"engine_id": _NEEDED},
    "RequestMove": {"request_id": _NEEDED, "to_engine_id": _NEEDED},
    "CloseBarrier": {"lease_id": _NEEDED},
    "OpenBarrier": {"lease_id": _NEEDED},
    "OperationResult": {"operation_id": _NEEDED, "items": _REQUESTS},
    "TraceHello": {"host": _NEEDED},
    "SetModeRequest": {"mode": _NEEDED},
    "AddEngineRequest": {"gpus": _Rule(4096)},
    "ConnectPortsRequest": {"cross_connects": _PORTS},
    "DisconnectPortsRequest": {"cross_connects": _PORTS},
    "TakeOverPortsRequest": {"cross_connects": _PORTS},
    "RedeployRequest": {"targets": _Rule(1024)},
    "WatchJournalRequest": {"kinds": _Rule(256)},
}


def checking(message: Message, limits: "LimitSettings") -> Iterator[None]:
    """Check the message. The iterator yields after every `STEP_ITEMS` messages of a list, so that the caller can do
    other work.

    Raises LimitReached, with the configuration key, if a list exceeds a configured limit. Raises ProblemFaults, with at
    most `MOST_FAULTS` faults, if a value is invalid.
    """
    faults: list[str] = []
    yield from _checks_of(message.DESCRIPTOR).check(message, "", limits, faults)
    if faults:
        more = ["(message): has further faults"] if len(faults) > MOST_FAULTS else []
        raise ProblemFaults([*faults[:MOST_FAULTS], *more])


def needed_fields(descriptor: _Descriptor) -> frozenset[str]:
    """Return the names of the text fields of a message that must not be empty."""
    rules = _RULES.get(descriptor.name, {})
    return frozenset(
        name for name, rule in rules.items() if rule.needed and descriptor.fields_by_name[name].enum_type is None
    )


class _Checks:
    """The checks of one message type. An absent optional number is accepted. Any other absent number is read as 0,
    which is rejected if the field's rule has a larger `least`."""

    def __init__(self, descriptor: _Descriptor) -> None:
        self._numbers: list[tuple[str, float, float]] = []  # field, least, most
        self._may_lack: set[str] = set()
        self._texts: list[tuple[str, int, float, _Check]] = []  # field, number of characters that need no further check
        self._enums: list[tuple[str, _Check]] = []
        self._lists: list[tuple[str, _Descriptor | None, _Check, _Rule]] = []
        self._messages: list[tuple[str, _Descriptor]] = []
        rules = _RULES.get(descriptor.name, {})
        for field in descriptor.fields:
            rule = rules.get(field.name) or _NAMED.get(field.name, _Rule())
            if rule.by_handler:
                continue
            if field.is_repeated:
                self._lists.append((field.name, field.message_type, _check_of(field, _Rule()), rule))
            elif field.message_type is not None:
                self._messages.append((field.name, field.message_type))
            elif (numbers := _range_of(field, rule)) is not None:
                self._numbers.append((field.name, *numbers))
                if field.has_presence and rule.least > 0:
                    self._may_lack.add(field.name)
            elif field.type == field.TYPE_STRING:
                most = 0 if rule.is_url else _characters(field.name, rule)
                self._texts.append((field.name, int(rule.needed), most, _check_of(field, rule)))
            elif field.enum_type is not None:
                self._enums.append((field.name, _check_of(field, rule)))

    def check(self, message: Any, path: str, limits: "LimitSettings", faults: list[str]) -> Iterator[None]:
        faults += [f"{path}{fault}" for fault in self._faults(message)]
        for name, item_type, check, rule in self._lists:
            items = getattr(message, name)
            _check_count(f"{path}{name}", len(items), rule, limits, faults)
            if len(faults) > MOST_FAULTS:
                return
            if item_type is None:
                faults += [f"{path}{name}[{i}]: {fault}" for i, item in enumerate(items) if (fault := check(item))]
                continue
            checks = _checks_of(item_type)
            for place, item in enumerate(items):
                if checks._lists or checks._messages:
                    yield from checks.check(item, f"{path}{name}[{place}].", limits, faults)
                elif found := checks._faults(item):
                    faults += [f"{path}{name}[{place}].{fault}" for fault in found]
                if place % STEP_ITEMS == STEP_ITEMS - 1:
                    if len(faults) > MOST_FAULTS:
                        return
                    yield
        for name, inner in self._messages:
            if message.HasField(name):
                yield from _checks_of(inner).check(getattr(message, name), f"{path}{name}.", limits, faults)

    def _faults(self, message: Any) -> list[str]:
        """Return the faults of those fields of a message that are neither lists nor messages."""
        faults = []
        for name, least, most in self._numbers:
            if not least <= (value := getattr(message, name)) <= most:  # also False for NaN
                if name in self._may_lack and not message.HasField(name):
                    continue
                faults.append(f"{name}: {_beyond(value, least, most)}")
        for name, least, most, check in self._texts:
            text = getattr(message, name)
            if not (least <= len(text) <= most and text.isprintable()) and (fault := check(text)):
                faults.append(f"{name}: {fault}")
        for name, check in self._enums:
            if fault := check(getattr(message, name)):
                faults.append(f"{name}: {fault}")
        return faults


@cache
def _checks_of(descriptor: _Descriptor) -> _Checks:
    return _Checks(descriptor)


def _range_of(field: _Field, rule: _Rule) -> tuple[float, float] | None:
    """Return the least and the largest accepted number, or None if the field is not a number, or if every value of its
    type is accepted."""
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return rule.least, MOST_NUMBER if rule.most is None else rule.most
    if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64):
        return rule.least, MOST_WHOLE if rule.most is None else rule.most
    if field.type in (field.TYPE_UINT32, field.TYPE_FIXED32) and rule.most is not None:
        return rule.least, rule.most
    return None


def _beyond(value: float, least: float, most: float) -> str:
    return f"must be >= {_shown(least)} and <= {_shown(most)}, got {value}"


def _check_of(field: _Field, rule: _Rule) -> _Check:
    """Return a function that checks one value of a field that is not a message. The function returns the fault, or an
    empty text if there is none."""
    if field.enum_type is not None:
        known = {value.number: value.name for value in field.enum_type.values if value.number or not rule.needed}
        return lambda value: "" if value in known else f"must be one of {', '.join(known.values())}, got {value}"
    if field.type == field.TYPE_STRING:
        return partial(_text_fault, most=_characters(field.name, rule), rule=rule, is_item=field.is_repeated)
    if (numbers := _range_of(field, rule)) is not None:
        least, most = numbers
        return lambda value: "" if least <= value <= most else _beyond(value, least, most)
    return lambda value: ""


def _text_fault(text: str, most: float, rule: _Rule, is_item: bool) -> str:
    if len(text) > most:
        return f"must be at most {most:g} characters, got {len(text)}"
    if not text:
        return "must not be empty, got ''" if rule.needed else ""
    if (is_item or most <= MOST_NAME_CHARACTERS) and not text.isprintable():
        return f"must have only printable characters, got {shorten(text)}"
    if rule.is_url:
        try:
            check_url(text)
        except ValueError as error:
            return f"{error}, got {shorten(text)}"
    return ""


def _characters(name: str, rule: _Rule) -> float:
    if rule.most is not None:
        return rule.most
    if name.endswith("_json"):
        return float("inf")
    return MOST_NAME_CHARACTERS if name.endswith(("_id", "_ids")) else MOST_TEXT_CHARACTERS


def _check_count(path: str, count: int, rule: _Rule, limits: "LimitSettings", faults: list[str]) -> None:
    """Check the number of items of a list. If a configured limit is exceeded, raise LimitReached. If another limit is
    exceeded, add a fault to `faults`."""
    if rule.key and count > (most := getattr(limits, rule.key)):
        raise LimitReached(f"{path}: must have at most {most} items (limits.{rule.key}), got {count}")
    most = MOST_ITEMS if rule.most is None else rule.most
    if not rule.key and count > most:
        faults.append(f"{path}: must have at most {most:g} items, got {count}")


def _shown(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
