"""Convert frozen dataclasses to protobuf messages and back, by their types.

A field and its counterpart have the same name, or differ as in `engine` and `engine_id`, `requests` and `request_ids`,
or `sampled_s` and `sampled_unix_s`. All other differences are arguments of a `Codec`. Enum members are matched by their
names in the .proto, None is converted to an absent or empty field, and nested dataclasses are converted to messages. If
a field of either side has no counterpart on the other side, the first conversion raises TypeError. For speed, a
function is compiled for each direction.
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

# Descriptors have a class per implementation of protobuf, with the same attributes.
_Descriptor = Any
_Field = Any


# Converts a value to that of its field and back; a function that is None leaves it unchanged.
Converter = Union["Via", "EnumCodec[Any]", "Codec[Any, Any]", "_Items"]


@dataclass(frozen=True, slots=True)
class Via:
    """A converter that consists of one function for each direction. A function that is None leaves the value unchanged.
    If `from_message` is given, it replaces `from_pb` and reads the value from the enclosing message."""

    to_pb: Convert | None = None
    from_pb: Convert | None = None
    from_message: Convert | None = None


@dataclass(frozen=True, slots=True)
class Whole(Via):
    """A converter of a repeated field. Each function converts all items of the field in one call."""


class EnumCodec(Generic[Member]):
    """A converter between the members of `kind` and the values with the same names in an enum of the .proto.

    The member `unspecified` is read for 0 and for values of a newer protocol, and is sent for members missing in the
    .proto. If `unspecified` is None, reading such values raises ValueError, and missing members raise TypeError at
    construction.
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
        """Return the function that reads the field `name`. If `is_optional` is set, values without a member are read as
        None."""

        def read(number: int) -> Member | None:
            member = self._members.get(number, self._unspecified)
            if member is None and not is_optional:
                raise ValueError(f"{name} must be set to a value that this version supports, got {number}")
            return member

        return read


class Codec(Generic[Value, Pb]):
    """A converter between a dataclass and a message. `specs` describes the fields that do not follow the rules of this
    module, keyed by their names in the dataclass. A property in `specs` is written but not read. `beside` contains the
    names of fields of the message that have no counterpart. The caller sets these fields."""

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
        """The function that reads a message. It raises ValueError, naming the field, for an invalid value."""
        return self.mapping.compiled_reader()

    @cached_property
    def mapping(self) -> "FieldMapping":
        mapping = FieldMapping(self.kind, self.message.DESCRIPTOR, self._specs)
        if lacking := {field.name for field in self.message.DESCRIPTOR.fields} - mapping.names - self._beside:
            raise TypeError(
                f"{self.kind.__name__} lacks counterparts of {sorted(lacking)} in {self.message.DESCRIPTOR.name}"
            )
        return mapping


class Flat:
    """The spec of a nested dataclass whose fields are stored directly in the enclosing message."""

    def __init__(self, **specs: "Spec") -> None:
        self._specs = specs

    def mapping(self, kind: Any, message: _Descriptor) -> "FieldMapping":
        """Return the mapping of `kind` or, for a union, of its first class. The classes of a union must have the same
        fields, and can be written but not read."""
        classes = [*filter(is_dataclass, (kind, *get_args(kind)))]
        return FieldMapping(
            classes[0], message, self._specs, is_writable_only=len(classes) > 1 or classes[0] is not kind
        )


class OneOf:
    """The spec of a union of dataclasses that is stored in a oneof. Each class has its own field and codec."""

    def __init__(self, name: str, **codecs: Codec[Any, Any]) -> None:
        self.name = name
        self.codecs = codecs
        self._fields = {codec.kind: (name, codec) for name, codec in codecs.items()}

    def to_fields(self, value: Any) -> dict[str, Any]:
        name, codec = self._fields[type(value)]
        return {name: codec.to_pb(value)}

    def from_message(self, message: Message) -> Any:
        """Return the value of the field that is set. Raises ValueError if none of the known fields is set."""
        name = message.WhichOneof(self.name)
        if name not in self.codecs:
            raise ValueError(f"{self.name} must be set to a field that this version supports, got {name}")
        return self.codecs[name].from_pb(getattr(message, name))


class _Local:
    """The spec of a field that is not sent, and is read as its default."""


LOCAL = _Local()
# A field's counterpart, its converter, or both.
Spec = str | Converter | tuple[str, Converter] | Flat | OneOf | _Local


def rows_to_pb(message: type[Pb], rows: Iterable[Iterable[Any]]) -> list[Pb]:
    """Return one message for each row. A row contains the values of the message's fields, in the order of the
    .proto."""
    names = [field.name for field in message.DESCRIPTOR.fields]
    return [message(**dict(zip(names, row, strict=True))) for row in rows]


def optional(message: Message, name: str) -> Any:
    """Return the value of the field `name`, or None if the field is absent."""
    return getattr(message, name) if message.HasField(name) else None


@dataclass(frozen=True, slots=True)
class _Items:
    """A converter between a tuple or a set and a repeated field."""

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
    """A field or property of a dataclass, and its counterpart in a message."""

    attribute: str
    field: _Field
    converter: Converter | None
    is_optional: bool
    is_property: bool = False

    def written(self, names: dict[str, Any]) -> str:
        """Return the source text of an expression for the field's value. Functions that the expression uses are added
        to `names`."""
        value = f"value.{self.attribute}"
        if self.converter is None or self.converter.to_pb is None:
            # Protobuf takes None for an absent field; if a value is never None, its 0 is absent.
            return value if self.is_optional or not self.field.has_presence else f"{value} or None"
        names[convert := f"to_{self.attribute}"] = self.converter.to_pb
        return f"None if {value} is None else {convert}({value})" if self.is_optional else f"{convert}({value})"

    def read(self, names: dict[str, Any], is_needed: bool) -> str:
        """Return the source text of an expression for the attribute's value. Functions that the expression uses are
        added to `names`. If `is_needed` is set, the expression raises ValueError for an empty text."""
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
            elif spec is not LOCAL and get_origin(hint) is not Literal:  # a union's tag is implied by its class
                self.pairs.append(_pair(kind, name, hint, message, spec))

    @property
    def names(self) -> set[str]:
        """The names of the message's fields that have a counterpart."""
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
            raise TypeError(f"{self.message.name} lacks counterparts of {lacking} in {self.kind.__name__}")
        return _compiled("message", read, names)


def _compiled(argument: str, values: Iterable[str], names: dict[str, Any]) -> Convert:
    """Compile a function with one parameter, named `argument`, and return it. The function calls `names["make"]` with
    the keyword arguments in `values`, and returns the result."""
    compiled: Convert = eval(f"lambda {argument}: make({', '.join(values)})", names)
    return compiled


def needed(name: str, value: str) -> str:
    """Return `value`, the value of the field `name`. Raises ValueError, with the field's name, if the value is
    empty."""
    if not value:
        raise ValueError(f"{name} must not be empty, got ''")
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
    """Return the converter for one value of type `kind`, or None if the value needs no conversion. Raises TypeError if
    the type does not match the field's type."""
    kind = getattr(kind, "__supertype__", kind)  # for a NewType
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
    raise TypeError(f"{kind} does not match {field.full_name}")


def _member(kind: type[Enum], name: str, text: str) -> Enum:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(each.value for each in kind)}, got {text!r}") from None
