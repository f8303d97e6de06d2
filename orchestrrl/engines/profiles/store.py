"""Profiles as files: one YAML document per model, GPU and engine, made for people to read and correct.

Every figure names its source, date and fit error: a configuration's `provenance` holds for all of its figures but those
that `others` lists. A faulty file is reported with every fault at once; a file is replaced in one go, or not at all.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

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
from planner.cost.profile import (
    Curve,
    EngineProfile,
    MoveCosts,
    Parallelism,
    Profile,
    ProfileSource,
    Provenance,
    StepTime,
)
from planner.model import ConfigurationId

if TYPE_CHECKING:
    from planner.cost.fit import FitError

# Figures of a configuration that may have a source of their own.
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
        raise ValueError("must increase, and have one entry at least")
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
        """YAML reads an unquoted 2026-01-31 as a date of its own."""
        return date.isoformat() if hasattr(date, "isoformat") else date

    def value(self) -> Provenance:
        return Provenance(**dict(self))


class _CurveSection(Section):
    seconds: Seconds

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        sizes = self.sizes()
        if len(sizes) != len(self.seconds):
            raise ValueError(f"must have as many seconds as sizes, got {len(self.seconds)} and {len(sizes)}")
        return self

    def sizes(self) -> tuple[float, ...]:
        (sizes,) = (values for name, values in self if name != "seconds" and isinstance(values, tuple))
        return tuple(sizes)

    def value(self) -> Curve:
        return Curve(self.sizes(), self.seconds)


class ByTokens(_CurveSection):
    tokens: Increasing


class ByBytes(_CurveSection):
    bytes: Increasing


class BySequences(_CurveSection):
    """A decode iteration: seconds at each number of sequences, without and per KV token."""

    sequences: Increasing
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
            raise ValueError(f"has no such figure as {', '.join(unknown)} (known: {', '.join(FIGURES)})")
        return others

    def value(self) -> EngineProfile:
        return EngineProfile(
            id=ConfigurationId(self.id),
            parallelism=self.parallelism.value(),
            step=self.step_s.step_time(),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_sequences=self.max_sequences,
            switch_s=self.switch_s,
            provenance=self.provenance.value(),
            spill_capacity_tokens=self.spill_capacity_tokens,
            others=tuple((name, self.others[name].value()) for name in FIGURES if name in self.others),
        )


class MovesSection(Section):
    kv_bytes_per_token: PositiveFloat
    transfer_s: ByBytes
    recompute_s: ByTokens
    provenance: ProvenanceSection | None = None

    def value(self) -> MoveCosts:
        return MoveCosts(
            self.kv_bytes_per_token,
            self.transfer_s.value(),
            self.recompute_s.value(),
            self.provenance.value() if self.provenance else None,
        )


class ProfileSection(Section):
    model: Name
    gpu: Name
    engine: Name
    configurations: tuple[ProfileEngineSection, ...] = Field(strict=False)
    moves: MovesSection | None = None

    def value(self) -> Profile:
        return Profile(
            self.model,
            self.gpu,
            self.engine,
            tuple(engine.value() for engine in self.configurations),
            self.moves.value() if self.moves else None,
        )


def read_profile(path: Path | str) -> Profile:
    """The profile in the file. Raises ProblemFaults with every fault."""
    return parse_profile(read_text(path))


def parse_profile(text: str) -> Profile:
    """As read_profile, from text; JSON is YAML too."""
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
    """Replace the file in one go: who reads it meanwhile finds the old one or the new one. Raises OSError."""
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
    """What `parse_profile` reads back, figure for figure."""
    return yaml.dump(as_document(profile), Dumper=_Dumper, sort_keys=False, width=120)


def as_document(profile: Profile) -> dict[str, Any]:
    """The profile as plain values, in the file's shape."""
    document: dict[str, Any] = {"model": profile.model, "gpu": profile.gpu, "engine": profile.engine}
    if profile.moves is not None:
        moves = profile.moves
        document["moves"] = {
            "kv_bytes_per_token": moves.kv_bytes_per_token,
            "transfer_s": _curve("bytes", moves.transfer_s),
            "recompute_s": _curve("tokens", moves.recompute_s),
        }
        if moves.provenance is not None:
            document["moves"]["provenance"] = _provenance(moves.provenance)
    document["configurations"] = [_engine(engine) for engine in profile.configurations]
    return document


def with_engine(profile: Profile, engine: EngineProfile) -> Profile:
    """The profile with this configuration in the place of its namesake, or at the end."""
    kept = [other if other.id != engine.id else engine for other in profile.configurations]
    if engine not in kept:
        kept.append(engine)
    return Profile(profile.model, profile.gpu, profile.engine, tuple(kept), profile.moves)


def tidy(engine: EngineProfile) -> EngineProfile:
    """The configuration as people like to read it: its fitted figures at six digits, far more than they deserve."""
    step = engine.step
    return replace(
        engine,
        step=StepTime(tidy_curve(step.base_s), _digits(step.kv_s_per_token), _digits(step.spill_s_per_token)),
        prefill_tokens_per_s=_digits(engine.prefill_tokens_per_s),
        provenance=_tidy_errors(engine.provenance),
        others=tuple((name, _tidy_errors(provenance)) for name, provenance in engine.others),
    )


def tidy_moves(moves: MoveCosts) -> MoveCosts:
    return replace(
        moves,
        transfer_s=tidy_curve(moves.transfer_s),
        recompute_s=tidy_curve(moves.recompute_s),
        provenance=_tidy_errors(moves.provenance) if moves.provenance else None,
    )


def tidy_curve(curve: Curve) -> Curve:
    return Curve(curve.xs, tuple(_digits(y) for y in curve.ys))


def of_fit(provenance: Provenance, error: "FitError") -> Provenance:
    """The provenance of a figure that was fitted with this error."""
    return replace(provenance, samples=error.samples, fit_error_mean=error.mean, fit_error_max=error.max)


def _tidy_errors(provenance: Provenance) -> Provenance:
    mean, most = provenance.fit_error_mean, provenance.fit_error_max
    return replace(
        provenance,
        fit_error_mean=None if mean is None else _digits(mean, 3),
        fit_error_max=None if most is None else _digits(most, 3),
    )


def _digits(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def _engine(engine: EngineProfile) -> dict[str, Any]:
    step = {"sequences": list(engine.step.base_s.xs), "seconds": list(engine.step.base_s.ys)}
    section: dict[str, Any] = {
        "id": str(engine.id),
        "parallelism": _parallelism(engine.parallelism),
        "step_s": {**step, "per_kv_token": engine.step.kv_s_per_token},
        "prefill_tokens_per_s": engine.prefill_tokens_per_s,
        "kv_capacity_tokens": engine.kv_capacity_tokens,
        "max_sequences": engine.max_sequences,
        "switch_s": engine.switch_s,
    }
    if engine.step.spill_s_per_token:
        section["step_s"]["per_spilled_token"] = engine.step.spill_s_per_token
    if engine.spill_capacity_tokens:
        section["spill_capacity_tokens"] = engine.spill_capacity_tokens
    section["provenance"] = _provenance(engine.provenance)
    if engine.others:
        others = dict(engine.others)
        section["others"] = {name: _provenance(others[name]) for name in FIGURES if name in others}
    return section


def _parallelism(parallelism: Parallelism) -> dict[str, Any]:
    """What differs from the default; `tp` always."""
    default = Parallelism()
    names = ("tp", "dp", "ep", "attention_gpus", "ffn_gpus", "micro_batches")
    values = {name: getattr(parallelism, name) for name in names}
    return {name: value for name, value in values.items() if name == "tp" or value != getattr(default, name)}


def _provenance(provenance: Provenance) -> dict[str, Any]:
    return ProvenanceSection(**asdict(provenance)).model_dump(mode="json", exclude_defaults=True)


def _curve(sizes: str, curve: Curve) -> dict[str, Any]:
    return {sizes: list(curve.xs), "seconds": list(curve.ys)}


def _double_ids(entries: Any) -> Iterator[str]:
    first: dict[str, int] = {}
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        found = entry.get("id") if isinstance(entry, Mapping) else None
        if isinstance(found, str) and first.setdefault(found, index) != index:
            where = path_of(("configurations", index, "id"))
            yield f"{where}: is the id of configurations[{first[found]}] already, got {found!r}"


class _Dumper(YamlDumper):
    """Lists of numbers on one line, everything else in blocks."""


def _list(dumper: yaml.SafeDumper, values: Iterable[Any]) -> yaml.Node:
    listed = list(values)
    numbers = all(isinstance(value, int | float) for value in listed)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", listed, flow_style=numbers)


_Dumper.add_representer(list, _list)
