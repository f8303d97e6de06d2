"""Parse the message of a moved chat with tools out of all its tokens. Each engine generated only a part of them.

Only answers that are not streamed are parsed here, because the message is known only at the end.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.engines.base import ChatParsingEngine, Chunk
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves.detokenizer import ANSWER_WITHIN_S, MOST_ASKED
from orchestrrl.gateway.moves.stops_after_cut import TextUnknown
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends

PARSE_WITHIN_S = 10.0  # timeout per engine; a failure discards the whole answer
_OWN_FIELDS = frozenset({"role", "content"})


async def may_be_parsed(record: RequestRecord, backend: EngineBackend) -> bool:
    """Return whether the chat can move: engine `backend` parses complete answers, and samples the answer like the
    completion with which the chat continues after a move."""
    if backend.capabilities is None or not backend.capabilities.parses_chats:
        return False
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await cast("ChatParsingEngine", backend.engine).samples_plainly(record.body)
    except (OrchestrRLError, TimeoutError):
        return False  # the engine reports invalid requests itself, and others only stay on their engine


async def parsed_message(
    record: RequestRecord, last: Chunk, first: EngineBackend, fleet: EngineBackends
) -> tuple[Chunk, str, Mapping[str, Any]]:
    """Return the last chunk of the answer with its final finish_reason, the message's content and its other fields. The
    record must not contain the chunk yet. Engine `first` is asked first. Raises TextUnknown if no engine parses the
    answer."""
    ids = [*record.generated_ids, *last.token_ids]
    if last.finish_reason == "stop" and ids and not record.body.get("include_stop_str_in_output"):
        del ids[-1]  # the text of the stop token is not part of the message
    message = await _parsed(record, ids, first, fleet) if ids else {}
    fields = {name: value for name, value in message.items() if name not in _OWN_FIELDS and value}
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
        last = replace(last, finish_reason="tool_calls")
    return last, message.get("content") or "", fields


async def _parsed(
    record: RequestRecord, ids: list[int], first: EngineBackend, fleet: EngineBackends
) -> Mapping[str, Any]:
    assert record.prompt_ids is not None
    faults = []
    for backend in [first, *(other for other in fleet if other is not first and other.usable)][:MOST_ASKED]:
        if backend.capabilities is None or not backend.capabilities.parses_chats:
            continue
        try:
            async with asyncio.timeout(PARSE_WITHIN_S):
                engine = cast("ChatParsingEngine", backend.engine)
                return await engine.parse_chat(record.body, record.prompt_ids, ids)
        except (OrchestrRLError, TimeoutError) as error:
            faults.append(str(error) or f"{backend.id} did not parse it within {PARSE_WITHIN_S:g} s")
    raise TextUnknown(f"tools: no engine parses the whole answer: {'; '.join(faults) or 'none offers it'}")
