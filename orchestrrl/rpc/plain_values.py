"""A protobuf message as plain JSON values: numbers stay numbers, enums are plain words, what is unknown is null."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Descriptors have a class per implementation of protobuf; their attributes are the same.
_FieldDescriptor = Any
_EnumDescriptor = Any


def plain(message: "Message") -> dict[str, Any]:
    """Every field by its name in the .proto, in its order. Absent optional fields, unspecified enums, absent messages
    and numbers that JSON cannot write (infinite, not a number) are None."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: "Message", field: _FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: _FieldDescriptor) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return _enum_name(value, field.enum_type)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _enum_name(number: int, enum: _EnumDescriptor) -> str | None:
    """`ENGINE_HEALTH_OK` of EngineHealth as `ok`. A number of a newer protocol stays a number."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    word = known.name.removeprefix(enum_prefix(enum.name)).lower()
    return None if word == "unspecified" else word


def enum_prefix(name: str) -> str:
    """What the values' names of an enum begin with: `ENGINE_HEALTH_` of EngineHealth."""
    return "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).lstrip("_") + "_"
