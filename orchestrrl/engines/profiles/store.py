"""Read and write profiles: one YAML document per model, GPU and engine, which operators can read and edit.

Every number has a source and a date, and every fitted number has a fit error. A configuration's `provenance` applies to
all of its numbers except those listed in `others`. All faults of a file are reported at once. Files are replaced
atomically.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from orchestrrl.core.config.launch import ParallelismSection
from orchestrrl.core.documents import (
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    YamlDumper,
    parse_yaml,
    read_text,
)
from orchestrrl.core.errors import ProblemFaults, faults_of, path_of, shorten
from planner.cost.profile import Curve, EngineProfile, MoveCosts, Profile, ProfileSource, Provenance, StepTime

if TYPE_CHECKING:
    from planner.cost.fit import FitError

V = TypeVar("V")

# Numbers of a configuration that may have their own provenance.
FIGURES = (
    "step_s",
    "spill_s_per_token",
    "prefill_tokens_per_s",
    "kv_capacity_tokens",
    "max_sequences",
    "switch_s",
    "spill_capacity_tokens",
)


def _increasing(xs: tuple[float, ...]) -> tuple[float, ...]:
    if not xs or any(later <= sooner for sooner, later in pairwise(xs)):
        raise ValueError("must have at least one entry, and the entries must be in strictly increasing order")
    return xs


Increasing = Annotated[tuple[NonNegativeFloat, ...], Field(strict=False), AfterValidator(_increasing)]
Seconds = Annotated[tuple[NonNegativeFloat, ...], Field(strict=False)]


class ProvenanceSection(Section):
    source: Annotated[ProfileSource, Field(strict=False)]
    date: Name
    detail: str = ""
    samples: NonNegativeInt = 0
    fit_error_mean: NonNegativeFloat | None = None
    fit_error_max: NonNegativeFloat | None = None

    @field_validator("date", mode="before")
    @classmethod
    def _as_text(cls, date: Any) -> Any:
        """Convert a date to text, because YAML parses an unquoted 2026-01-31 as a date."""
        return date.isoformat() if hasattr(date, "isoformat") else date

    def value(self) -> Provenance:
        return Provenance(**dict(self))


class _CurveSection(Section):
    """A curve of durations in seconds over sizes. Each subclass has a different name for the sizes."""

    seconds: Seconds
    sizes: Increasing

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"must have as many seconds ({len(self.seconds)}) as sizes ({len(self.sizes)})")
        return self

    def value(self) -> Curve:
        return Curve(self.sizes, self.seconds)


class ByTokens(_CurveSection):
    sizes: Increasing = Field(alias="tokens")


class ByBytes(_CurveSection):
    sizes: Increasing = Field(alias="bytes")


class BySequences(_CurveSection):
    """The time of a decode step in seconds: a curve over the number of sequences, plus a time per KV token. Each token
    beyond the KV capacity adds `per_spilled_token`."""

    sizes: Increasing = Field(alias="sequences")
    per_kv_token: NonNegativeFloat
    per_spilled_token: NonNegativeFloat = 0.0

    def step_time(self) -> StepTime:
        return StepTime(self.value(), self.per_kv_token, self.per_spilled_token)


class ProfileEngineSection(Section):
    id: Name
    parallelism: ParallelismSection = ParallelismSection()
    step_s: BySequences
    prefill_tokens_per_s: PositiveFloat
    kv_capacity_tokens: PositiveInt
    max_sequences: PositiveInt
    switch_s: NonNegativeFloat
    spill_capacity_tokens: NonNegativeInt = 0
    provenance: ProvenanceSection
    others: dict[str, ProvenanceSection] = Field(default_factory=dict)

    @field_validator("others")
    @classmethod
    def _of_figures(cls, others: dict[str, ProvenanceSection]) -> dict[str, ProvenanceSection]:
        unknown = sorted(set(others) - set(FIGURES))
        if unknown:
            raise ValueError(f"must contain only {', '.join(FIGURES)}, not {', '.join(unknown)}")
        return others

    def value(self) -> EngineProfile:
        others = tuple((name, self.others[name].value()) for name in FIGURES if name in self.others)
        fields = {name: value for name, value in self if name != "step_s"}
        values = {"parallelism": self.parallelism.value(), "provenance": self.provenance.value(), "others": others}
        return EngineProfile(step=self.step_s.step_time(), **{**fields, **values})


class MovesSection(Section):
    kv_bytes_per_token: PositiveFloat
    transfer_s: ByBytes
    recompute_s: ByTokens
    provenance: ProvenanceSection | None = None

    def value(self) -> MoveCosts:
        provenance = self.provenance.value() if self.provenance else None
        return MoveCosts(self.kv_bytes_per_token, self.transfer_s.value(), self.recompute_s.value(), provenance)


class ProfileSection(Section):
    model: Name
    gpu: Name
    engine: Name
    configurations: tuple[ProfileEngineSection, ...] = Field(strict=False)
    moves: MovesSection | None = None

    def value(self) -> Profile:
        engines = tuple(engine.value() for engine in self.configurations)
        return Profile(self.model, self.gpu, self.engine, engines, self.moves.value() if self.moves else None)


def read_profile(path: Path | str) -> Profile:
    """Read a profile from the file at `path`. Raises ProblemFaults, listing every fault, if the profile is invalid."""
    return parse_profile(read_text(path))


def parse_profile(text: str) -> Profile:
    """Parse a profile from YAML or JSON text. Raises ProblemFaults, listing every fault, if the profile is invalid."""
    document = parse_yaml(text)
    if not isinstance(document, dict):
        raise ProblemFaults([f"(document): must be a mapping, got {shorten(document)}"])
    faults = []
    try:
        section = ProfileSection.model_validate(document)
    except ValidationError as error:
        faults = faults_of(error, ProfileSection)
    faults += _double_ids(document.get("configurations"))
    if faults:
        raise ProblemFaults(faults)
    return section.value()


def write_profile(path: Path, profile: Profile) -> None:
    """Write the profile to `path`, replacing the file atomically, so that concurrent readers see the old or the new
    profile. Raises OSError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(as_text(profile))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, path.stat().st_mode if path.exists() else 0o644)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def as_text(profile: Profile) -> str:
    """Return the profile as YAML text, which `parse_profile` reads back without loss."""
    return yaml.dump(as_document(profile), Dumper=_Dumper, sort_keys=False, width=120)


def as_document(profile: Profile) -> dict[str, Any]:
    """Return the profile as plain values in the structure of a profile file. Fields with default values are omitted."""
    moves = profile.moves
    document: dict[str, Any] = {"model": profile.model, "gpu": profile.gpu, "engine": profile.engine}
    if moves is not None:
        curves = {"transfer_s": _curve("bytes", moves.transfer_s), "recompute_s": _curve("tokens", moves.recompute_s)}
        document["moves"] = _given(moves) | curves
    return {**document, "configurations": [_engine(engine) for engine in profile.configurations]}


def with_engine(profile: Profile, engine: EngineProfile) -> Profile:
    """Return the profile with the configuration `engine` added. A configuration with the same id is replaced."""
    by_id = {each.id: each for each in (*profile.configurations, engine)}
    return replace(profile, configurations=tuple(by_id.values()))


def tidy(value: V, digits: int = 6) -> V:
    """Return the value with its numbers rounded to `digits` significant digits, and fit errors to three. Six digits
    exceed the accuracy of fits. Integral values, such as sizes, are not rounded."""
    if isinstance(value, float):
        return value if value.is_integer() else cast("V", float(f"{value:.{digits}g}"))
    if isinstance(value, tuple):
        return cast("V", tuple(tidy(item, digits) for item in value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    digits = 3 if isinstance(value, Provenance) else digits
    return replace(value, **{name: tidy(item, digits) for name, item in _fields(value)})


def of_fit(provenance: Provenance, error: "FitError") -> Provenance:
    """Return the provenance with the number of samples and the errors of a fit."""
    return replace(provenance, samples=error.samples, fit_error_mean=error.mean, fit_error_max=error.max)


def _engine(engine: EngineProfile) -> dict[str, Any]:
    spill = {"per_spilled_token": engine.step.spill_s_per_token} if engine.step.spill_s_per_token else {}
    step = {**_curve("sequences", engine.step.base_s), "per_kv_token": engine.step.kv_s_per_token, **spill}
    written = {"step_s" if name == "step" else name: value for name, value in _given(engine).items()}
    written |= {"parallelism": {"tp": engine.parallelism.tp, **_given(engine.parallelism)}, "step_s": step}
    if engine.others:
        others = dict(engine.others)
        written["others"] = {name: _given(others[name]) for name in FIGURES if name in others}
    return written


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in fields(value)]


def _given(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as plain values."""
    defaults = {field.name: field.default for field in fields(value)}
    given = {name: item for name, item in _fields(value) if item != defaults[name]}
    plain = {name: _given(item) if is_dataclass(item) else item for name, item in given.items()}
    return {name: item.value if isinstance(item, ProfileSource) else item for name, item in plain.items()}


def _curve(sizes: str, curve: Curve) -> dict[str, Any]:
    return {sizes: list(curve.xs), "seconds": list(curve.ys)}


def _double_ids(entries: Any) -> Iterator[str]:
    first: dict[str, int] = {}
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        found = entry.get("id") if isinstance(entry, Mapping) else None
        if isinstance(found, str) and first.setdefault(found, index) != index:
            where = path_of(("configurations", index, "id"))
            yield f"{where}: is already the id of configurations[{first[found]}], got {found!r}"


class _Dumper(YamlDumper):
    """A YAML dumper that writes lists of numbers on one line and everything else in block style."""


def _list(dumper: yaml.SafeDumper, values: Iterable[Any]) -> yaml.Node:
    listed = list(values)
    numbers = all(isinstance(value, int | float) for value in listed)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", listed, flow_style=numbers)


_Dumper.add_representer(list, _list)
