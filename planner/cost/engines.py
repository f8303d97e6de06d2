"""Inference engines of the cost model, by name."""

from dataclasses import dataclass, replace

from planner.cost.engine_constants import BACKENDS, EngineConstants, constants_of
from planner.cost.fitted import FITTED, FITTED_ON, FITTED_TO, LEFT_OUT_ERROR_MAX, LEFT_OUT_ERROR_MEAN, LEFT_OUT_ROWS
from planner.cost.profile import ProfileSource, Provenance

# From a cold start to the first token: processes, imports, graphs. A rule of thumb until it is measured.
COLD_START_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineModel:
    """An inference engine: its constants, limits and start-up times."""

    name: str
    constants: EngineConstants
    provenance: Provenance
    start_s: float = COLD_START_S  # start of an instance, before weights are loaded
    start_detail: str = "rule of thumb for a cold start"  # source of start_s
    start_s_per_gpu: float = 0.01  # joining the process group of an instance
    max_sequences: int = 1024  # per attention replica
    spills: bool = False  # KV beyond the capacity goes to CPU memory instead of waiting


def _fitted(backend: str) -> EngineModel:
    provenance = Provenance(
        source=ProfileSource.ROOFLINE,
        date=FITTED_ON,
        detail=f"data sheets and {backend} constants fitted to {FITTED_TO}; errors are of models left out of the fit",
        samples=LEFT_OUT_ROWS,
        fit_error_mean=LEFT_OUT_ERROR_MEAN,
        fit_error_max=LEFT_OUT_ERROR_MAX,
    )
    return EngineModel(backend, constants_of(FITTED[""], backend), provenance)


ENGINES: dict[str, EngineModel] = {backend: _fitted(backend) for backend in BACKENDS}


class UnknownEngine(ValueError):
    """Raised for an unknown engine; the message lists the known engines."""


def engine_named(name: str) -> EngineModel:
    if name not in ENGINES:
        raise UnknownEngine(f"unknown engine {name!r}; known engines: {', '.join(sorted(ENGINES))}")
    return ENGINES[name]


def with_constants(engine: EngineModel, **values: float) -> EngineModel:
    """Return a copy of the engine with the given constants replaced."""
    return replace(engine, constants=replace(engine.constants, **values))
