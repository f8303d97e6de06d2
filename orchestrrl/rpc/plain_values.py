"""Convert a protobuf message to plain JSON values. Finite numbers are unchanged, enums become lower-case names, and
absent or unspecified values become null."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Descriptors have a class per implementation of protobuf, with the same attributes.
_FieldDescriptor = Any
_EnumDescriptor = Any


def plain(message: "Message") -> dict[str, Any]:
    """Return a dictionary with every field of the message, keyed by its name and in the order of the .proto. Absent
    optional fields, unspecified enums, absent messages and numbers without a JSON form (infinite, not a number) are
    None."""
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
    """Return the value's name in lower case without the enum's prefix, such as `ok` for `ENGINE_HEALTH_OK`. Return the
    decimal digits for a number that this version does not define, and None for an unspecified value."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    word = known.name.removeprefix(enum_prefix(enum.name)).lower()
    return None if word == "unspecified" else word


def enum_prefix(name: str) -> str:
    """Return the prefix of an enum's value names, for example `ENGINE_HEALTH_` for EngineHealth."""
    return "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).lstrip("_") + "_"
