"""Parse YAML documents written by users, and check their fields. Each fault is reported with its path and value."""

import logging
import math
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from orchestrrl.core.errors import ProblemFaults, shorten

logger = logging.getLogger(__name__)

_Number = TypeVar("_Number", int, float)


def require(condition: Callable[[Any], bool], wish: str) -> Callable[[_Number], _Number]:
    """Return a pydantic validator that accepts finite numbers that satisfy the condition. For other numbers, the error
    message is `must be` followed by `wish`."""

    def check(value: _Number) -> _Number:
        if not math.isfinite(value) or not condition(value):
            raise ValueError(f"must be {wish}")
        return value

    return check


PositiveFloat = Annotated[float, AfterValidator(require(lambda value: value > 0, "> 0"))]
NonNegativeFloat = Annotated[float, AfterValidator(require(lambda value: value >= 0, ">= 0"))]
PositiveInt = Annotated[int, AfterValidator(require(lambda value: value > 0, "> 0"))]
NonNegativeInt = Annotated[int, AfterValidator(require(lambda value: value >= 0, ">= 0"))]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base class of every object in a document. Unknown fields are rejected, values are not coerced, and instances are
    frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SectionWithFormer(Section):
    """Base class of a section from which obsolete fields were removed. Documents that still contain the fields listed
    in `former` are accepted with a warning.

    The check for these fields is not part of `Section`, because a validator in mode `before` makes pydantic validate
    JSON like Python values.
    """

    former: ClassVar[tuple[str, ...]]

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, written: Any) -> Any:
        former = [name for name in cls.former if isinstance(written, dict) and name in written]
        if not former:
            return written
        logger.warning("ignored settings without effect, remove them: %s", ", ".join(former))
        return {name: value for name, value in written.items() if name not in former}


def read_text(path: Path | str) -> str:
    """Return the text of the file at `path`. Raises ProblemFaults if the file cannot be read or is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ProblemFaults([f"{path}: {reason}"]) from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML or JSON document. Raises ProblemFaults if the text is not valid YAML or is nested too deeply."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ProblemFaults([f"(document): is not valid YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ProblemFaults([f"(document): must not be nested too deeply, got {shorten(text)}"]) from None


def dump_yaml(document: Any) -> str:
    """Format a document as YAML that `parse_yaml` can read. The order of the keys is kept."""
    return yaml.dump(document, Dumper=YamlDumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """A YAML 1.1 loader that rejects duplicate keys and parses `1e-8` as a number instead of text. PyYAML's own loader
    silently keeps the last of several duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {key!r}", key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class YamlDumper(yaml.SafeDumper):
    """Writes YAML that `parse_yaml` reads back unchanged. Strings that look like numbers are quoted."""


for _class in (_Loader, YamlDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
