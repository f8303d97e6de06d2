"""Convert frozen dataclasses to protobuf messages and back, by their types.

A field and its counterpart share a name, or differ as the two sides usually do: `engine` and `engine_id`, `requests`
and `request_ids`, `sampled_s` and `sampled_unix_s`. A `Codec` states what differs beyond that. Enum members go by their
names in the .proto, None is an absent or empty field, nested dataclasses are messages. Both sides must be covered: what
has no counterpart is a TypeError at the first conversion. A function is compiled for each direction, which takes no
longer than one written by hand.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from orchestrrl.rpc.plain_values import enum_prefix
from orchestrrl.rpc.ranges import needed_fields

Value = TypeVar("Value")
Pb = TypeVar("Pb", bound=Message)
Member = TypeVar("Member", bound=Enum)
Convert = Callable[[Any], Any]

# Descriptors have a class per implementation of protobuf; their attributes are the same.
_Descriptor = Any
_Field = Any


# What converts a value to that of its field and back; a function that is None leaves it unchanged.
Converter = Union["Via", "EnumCodec[Any]", "Codec[Any, Any]", "_Items"]


@dataclass(frozen=True, slots=True)
class Via:
    """A converter of two functions. `from_message` reads the value from the message around the field instead."""

    to_pb: Convert | None = None
    from_pb: Convert | None = None
    from_message: Convert | None = None


@dataclass(frozen=True, slots=True)
class Whole(Via):
    """The same of a repeated field, whose functions take all of its items at once."""


class EnumCodec(Generic[Member]):
    """Converts the members of `kind` to the values of a .proto's enum that have their names.

    `unspecified` is read for 0 and for values of a newer protocol, and is sent for members that the .proto lacks.
    Without it such a value raises ValueError.
    """

    def __init__(self, kind: type[Member], enum: Any, unspecified: Member | None = None) -> None:
        numbers = {
            name.removeprefix(enum_prefix(enum.name)): value.number for name, value in enum.values_by_name.items()
        }
        self._unspecified = unspecified
        self._members = {numbers[member.name]: member for member in kind if member.name in numbers}
        instead = numbers.get(unspecified.name, 0) if unspecified is not None else None
        self._numbers = {member: numbers.get(member.name, instead) for member in kind}
        if None in self._numbers.values():
            raise TypeError(f"{enum.name} lacks members of {kind.__name__}")
        self.to_pb: Callable[[Member], Any] = self._numbers.__getitem__
        self.from_pb: Callable[[int], Member] = self.reader(enum.name)

    def reader(self, name: str, is_optional: bool = False) -> Callable[[int], Any]:
        """The function that reads the field `name`; where it is optional, None is read for what is unspecified."""

        def read(number: int) -> Member | None:
            member = self._members.get(number, self._unspecified)
            if member is None and not is_optional:
                raise ValueError(f"{name} must be specified, got {number}")
            return member

        return read


class Codec(Generic[Value, Pb]):
    """Converts a dataclass to a message and back. `specs` has the fields that do not go by the rules, by their names in
    the dataclass; a property named there is converted in one direction only. `beside`: fields of the message without a
    counterpart, which the caller fills."""

    def __init__(self, kind: type[Value], message: type[Pb], /, beside: str = "", **specs: "Spec") -> None:
        self.kind = kind
        self.message = message
        self._beside = frozenset(beside.split())
        self._specs = specs

    @cached_property
    def to_pb(self) -> Callable[[Value], Pb]:
        return self.mapping.compiled_writer(self.message)

    @cached_property
    def from_pb(self) -> Callable[[Pb], Value]:
        """Raises ValueError with the name of a field that makes no sense."""
        return self.mapping.compiled_reader()

    @cached_property
    def mapping(self) -> "FieldMapping":
        mapping = FieldMapping(self.kind, self.message.DESCRIPTOR, self._specs)
        if lacking := {field.name for field in self.message.DESCRIPTOR.fields} - mapping.names - self._beside:
            raise TypeError(f"{self.kind.__name__} has nothing for {sorted(lacking)} of {self.message.DESCRIPTOR.name}")
        return mapping


class Flat:
    """A dataclass whose fields lie in the message around it."""

    def __init__(self, **specs: "Spec") -> None:
        self._specs = specs

    def mapping(self, kind: Any, message: _Descriptor) -> "FieldMapping":
        """Of a union the first: its classes have the same fields, and can be written but not read."""
        classes = [*filter(is_dataclass, (kind, *get_args(kind)))]
        return FieldMapping(
            classes[0], message, self._specs, is_writable_only=len(classes) > 1 or classes[0] is not kind
        )


class OneOf:
    """A union of dataclasses as the fields of a oneof, each by the codec of its class."""

    def __init__(self, name: str, **codecs: Codec[Any, Any]) -> None:
        self.name = name
        self.codecs = codecs
        self._fields = {codec.kind: (name, codec) for name, codec in codecs.items()}

    def to_fields(self, value: Any) -> dict[str, Any]:
        name, codec = self._fields[type(value)]
        return {name: codec.to_pb(value)}

    def from_message(self, message: Message) -> Any:
        """Raises ValueError where it has none of the fields."""
        name = message.WhichOneof(self.name)
        if name not in self.codecs:
            raise ValueError(f"{self.name} must be one that this version knows")
        return self.codecs[name].from_pb(getattr(message, name))


class _Local:
    """A field that stays in its process, and is read as its default."""


LOCAL = _Local()
# A field's counterpart, how it is converted, or both.
Spec = str | Converter | tuple[str, Converter] | Flat | OneOf | _Local


def rows_to_pb(message: type[Pb], rows: Iterable[Iterable[Any]]) -> list[Pb]:
    """One message for each row, whose values are the message's fields in their order."""
    names = [field.name for field in message.DESCRIPTOR.fields]
    return [message(**dict(zip(names, row, strict=True))) for row in rows]


def optional(message: Message, name: str) -> Any:
    """The field's value, or None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None


@dataclass(frozen=True, slots=True)
class _Items:
    """A repeated field as a tuple or a set."""

    item: Converter | None
    container: type

    @property
    def to_pb(self) -> Convert | None:
        convert = self.item.to_pb if self.item is not None else None
        order: Convert = sorted if self.container is frozenset else iter
        return order if convert is None else lambda values: [convert(each) for each in order(values)]

    @property
    def from_pb(self) -> Convert | None:
        convert, container = self.item.from_pb if self.item is not None else None, self.container
        return container if convert is None else lambda values: container(map(convert, values))


@dataclass(frozen=True, slots=True)
class _Pair:
    """One field of a dataclass, or one property, and its counterpart."""

    attribute: str
    field: _Field
    converter: Converter | None
    is_optional: bool
    is_property: bool = False

    def written(self, names: dict[str, Any]) -> str:
        """The expression of the field's value. What it uses is added to `names`."""
        value = f"value.{self.attribute}"
        if self.converter is None or self.converter.to_pb is None:
            # Protobuf takes None for an absent field; where a value is never None, its 0 is absent.
            return value if self.is_optional or not self.field.has_presence else f"{value} or None"
        names[convert := f"to_{self.attribute}"] = self.converter.to_pb
        return f"None if {value} is None else {convert}({value})" if self.is_optional else f"{convert}({value})"

    def read(self, names: dict[str, Any], is_needed: bool) -> str:
        """The expression of the attribute's value. What it uses is added to `names`."""
        name, convert = self.field.name, f"from_{self.attribute}"
        value = f'needed("{name}", message.{name})' if is_needed else f"message.{name}"
        if (from_message := getattr(self.converter, "from_message", None)) is not None:
            names[convert], value = from_message, f"{convert}(message)"
        elif self.converter is not None and self.converter.from_pb is not None:
            names[convert], value = self.converter.from_pb, f"{convert}({value})"
        elif self.is_optional and not self.field.has_presence:
            value = f"{value} or None"
        return (
            f'{value} if message.HasField("{name}") else None'
            if self.is_optional and self.field.has_presence
            else value
        )


class FieldMapping:
    """The fields of one dataclass and their counterparts in one message."""

    def __init__(
        self, kind: Any, message: _Descriptor, specs: Mapping[str, Spec], is_writable_only: bool = False
    ) -> None:
        generic = get_origin(kind)
        bound = dict(zip(generic.__parameters__, get_args(kind), strict=True)) if generic is not None else {}
        self.kind = kind = generic or kind
        self.message = message
        self._is_writable_only = is_writable_only
        self.pairs: list[_Pair] = []
        self.flat: dict[str, FieldMapping] = {}
        self.unions: dict[str, OneOf] = {}
        hints = {name: bound.get(hint, hint) for name, hint in get_type_hints(kind).items()}
        own = [field.name for field in fields(kind)]
        for name in dict.fromkeys((*own, *specs)):
            spec, hint = specs.get(name), hints.get(name) if name in own else None
            if isinstance(spec, Flat):
                self.flat[name] = spec.mapping(hint, message)
            elif isinstance(spec, OneOf):
                self.unions[name] = spec
            elif spec is not LOCAL and get_origin(hint) is not Literal:  # the tag of a union goes without saying
                self.pairs.append(_pair(kind, name, hint, message, spec))

    @property
    def names(self) -> set[str]:
        """Of the message's fields."""
        inner = [*(mapping.names for mapping in self.flat.values()), *(union.codecs for union in self.unions.values())]
        return {pair.field.name for pair in self.pairs}.union(*inner)

    def compiled_writer(self, make: Callable[..., Any]) -> Convert:
        names: dict[str, Any] = {"make": make}
        written = [f"{pair.field.name}={pair.written(names)}" for pair in self.pairs]
        for attribute, mapping in self.flat.items():
            names[f"flat_{attribute}"] = mapping.compiled_writer(dict)
            written.append(f"**(flat_{attribute}(value.{attribute}) if value.{attribute} is not None else {{}})")
        for attribute, union in self.unions.items():
            names[f"flat_{attribute}"] = union.to_fields
            written.append(f"**flat_{attribute}(value.{attribute})")
        return _compiled("value", written, names)

    def compiled_reader(self) -> Convert:
        if self._is_writable_only:
            raise TypeError(f"{self.message.name} does not state whether it has a {self.kind.__name__}")
        names: dict[str, Any] = {"make": self.kind, "needed": needed}
        needs = needed_fields(self.message)
        read = [
            f"{pair.attribute}={pair.read(names, pair.field.name in needs)}"
            for pair in self.pairs
            if not pair.is_property
        ]
        inner = {name: mapping.compiled_reader() for name, mapping in self.flat.items()}
        inner |= {name: union.from_message for name, union in self.unions.items()}
        names |= {f"flat_{name}": read_inner for name, read_inner in inner.items()}
        read += [f"{name}=flat_{name}(message)" for name in inner]
        own = {pair.attribute for pair in self.pairs}.union(inner)
        bare = [each.name for each in fields(self.kind) if each.default is each.default_factory is MISSING]
        if lacking := [name for name in bare if name not in own]:
            raise TypeError(f"{self.message.name} has nothing for {lacking} of {self.kind.__name__}")
        return _compiled("message", read, names)


def _compiled(argument: str, values: Iterable[str], names: dict[str, Any]) -> Convert:
    """The function that makes its result of these keyword arguments."""
    compiled: Convert = eval(f"lambda {argument}: make({', '.join(values)})", names)
    return compiled


def needed(name: str, value: str) -> str:
    """Return the text. Raises ValueError where it is empty."""
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def _pair(kind: type, name: str, hint: Any, message: _Descriptor, spec: Any) -> _Pair:
    renamed, converter = spec if isinstance(spec, tuple) else (spec, None) if isinstance(spec, str) else ("", spec)
    usual = (name, f"{name}_id", f"{name.removesuffix('s')}_ids", f"{name.removesuffix('_s')}_unix_s")
    field = next(filter(None, map(message.fields_by_name.get, (renamed,) if renamed else usual)), None)
    if field is None:
        raise TypeError(f"{kind.__name__}.{name} has no counterpart in {message.name}")
    if hint is None:
        return _Pair(name, field, converter, is_optional=True, is_property=True)
    rest = [each for each in get_args(hint) if each is not NoneType]
    is_optional = get_origin(hint) in (Union, UnionType) and len(rest) < len(get_args(hint))
    hint = rest[0] if is_optional and len(rest) == 1 else hint
    if field.is_repeated and not isinstance(converter, Whole):
        return _Pair(
            name, field, _Items(converter or _converter(get_args(hint)[0], field), get_origin(hint)), is_optional
        )
    if isinstance(converter, EnumCodec):
        converter = Via(converter.to_pb, converter.reader(field.name, is_optional))
    return _Pair(name, field, converter or _converter(hint, field, is_optional), is_optional)


_SCALARS: Mapping[int, type] = {
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_STRING: str,
}


def _converter(kind: Any, field: _Field, is_optional: bool = False) -> Converter | None:
    """The converter of one value by its type, None where it goes unchanged. Raises TypeError where the two do not
    fit."""
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    if field.message_type is not None:
        if is_dataclass(kind):
            return Codec(kind, GetMessageClass(field.message_type))  # type: ignore[arg-type]
    elif isinstance(kind, type) and issubclass(kind, Enum):
        if field.enum_type is not None:
            codec = EnumCodec(kind, field.enum_type)
            return Via(codec.to_pb, codec.reader(field.name, is_optional))
        if issubclass(kind, str):
            return Via(None, lambda text: _member(kind, field.name, text))
    elif kind is _SCALARS.get(field.cpp_type, int):
        return None
    raise TypeError(f"{kind} does not fit {field.full_name}")


def _member(kind: type[Enum], name: str, text: str) -> Enum:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(each.value for each in kind)}, got {text!r}") from None
