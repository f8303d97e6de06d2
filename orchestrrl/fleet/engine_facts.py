"""What the configuration says of each engine."""

from collections.abc import Sequence

from orchestrrl.core.config.schema import Config
from orchestrrl.fleet.state import EngineFacts
from planner.model import Configuration, ConfigurationId, EngineId, GpuId


def engine_facts(config: Config) -> list[EngineFacts]:
    known = {configuration.id: configuration for configuration in config.fleet.configuration_values()}
    return [
        facts_of(
            EngineId(engine.id),
            engine.url,
            known.get(ConfigurationId(engine.configuration or "")),
            engine.gpu_ids,
            max_sequences=engine.max_sequences,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            pool=engine.pool,
        )
        for engine in config.fleet.engines
    ]


def facts_of(
    engine: EngineId,
    url: str,
    configuration: Configuration | None,
    gpus: Sequence[GpuId],
    *,
    max_sequences: int | None = None,
    kv_capacity_tokens: int | None = None,
    pool: str = "",
) -> EngineFacts:
    """The configuration's limits stand where the engine's own are not given."""
    if configuration is not None:
        max_sequences = max_sequences or configuration.max_sequences
        kv_capacity_tokens = kv_capacity_tokens or configuration.kv_capacity_tokens
    name = configuration.id if configuration is not None else None
    return EngineFacts(engine, url, name, tuple(gpus), max_sequences, kv_capacity_tokens, pool)
