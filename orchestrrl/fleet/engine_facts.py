"""What the configuration says of each engine."""

from orchestrrl.core.config.schema import Config
from orchestrrl.fleet.state import EngineFacts
from planner.model import EngineId


def engine_facts(config: Config) -> list[EngineFacts]:
    """An engine's configuration's limits stand where its own are not given."""
    known = {configuration.id: configuration for configuration in config.fleet.configuration_values()}
    facts = []
    for engine in config.fleet.engines:
        configuration = next((c for c in known.values() if c.id == engine.configuration), None)
        facts.append(
            EngineFacts(
                id=EngineId(engine.id),
                url=engine.url,
                configuration=configuration.id if configuration else None,
                gpus=engine.gpu_ids,
                max_sequences=engine.max_sequences or (configuration.max_sequences if configuration else None),
                kv_capacity_tokens=engine.kv_capacity_tokens
                or (configuration.kv_capacity_tokens if configuration else None),
                pool=engine.pool,
            )
        )
    return facts
