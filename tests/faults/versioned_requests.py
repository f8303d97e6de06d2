"""Requests of a fleet whose engines' tokens depend on every byte of their weights: each token of an answer has to be of
the version that the answer says.
"""

import asyncio
import contextlib
import itertools
import json
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from publishing_trainer import content

from orchestrrl.integrations.instrument.checkpoint_files import MODEL_FILE
from orchestrrl.lab.simulated_engine.tokens import TokenModel
from orchestrrl.lab.simulated_engine.weights import read_weights

CLIENTS = 6
TOKENS = 150


@dataclass
class Told:
    """An answer and which version generated which of its tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)  # of each token
    ends: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """A whole answer, or an event of a stream."""
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            self.tokens += ids
            for span in choice.get("policy_versions", ()):
                assert span["start"] == len(self.versions)
                self.versions += [span["version"]] * (span["end"] - span["start"])
            if "policy_version" in choice:
                self.versions += [choice["policy_version"]] * len(ids)
            self.ends += choice["finish_reason"] is not None


class Clients:
    """They ask a gateway one thing after the other. `folder` takes the versions' references."""

    def __init__(self, gateway_url: str, folder: Path) -> None:
        self.gateway_url = gateway_url
        self._folder = folder
        self._numbers = itertools.count(1)
        self._models: dict[int, TokenModel] = {}

    def tokens(self, version: int, context: Sequence[int], count: int) -> list[int]:
        """What engines say that have this version."""
        if version not in self._models:
            folder = self._folder / f"reference-{version}"
            write_reference(folder, version)
            self._models[version] = TokenModel(weights_seed=read_weights(folder).seed)
        generation = self._models[version].begin(context)
        return [generation.next_token()[0] for _ in range(count)]

    @contextlib.asynccontextmanager
    async def requests(self, unknown: Sequence[int] = ()) -> AsyncIterator[None]:
        """Some are in flight as long as this is not left. Then all have ended, none is lost, and each token is of the
        version that its answer says. Where nobody could tell the gateway which it is, tokens are of the `unknown`
        versions, one after the other."""
        leaving = asyncio.Event()
        begun = [asyncio.Event() for _ in range(CLIENTS)]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            asking = [
                asyncio.create_task(self._client(http, leaving, each, n, unknown)) for n, each in enumerate(begun)
            ]
            try:
                await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 60)
                yield
                leaving.set()
                await asyncio.wait_for(asyncio.gather(*asking), 120)
            finally:
                for each in asking:
                    each.cancel()

    async def _client(
        self,
        http: aiohttp.ClientSession,
        leaving: asyncio.Event,
        begun: asyncio.Event,
        place: int,
        unknown: Sequence[int],
    ) -> None:
        while not leaving.is_set():
            number = next(self._numbers)
            prompt = [1000 + number % 20_000, 2000 + place, 2001]
            begun.set()
            while True:
                try:
                    told = await ask(http, self.gateway_url, prompt, TOKENS, stream=place % 2 == 0, id=f"q{number}")
                    break
                except aiohttp.ClientError:  # the gateway was killed: who asks comes back, as trainers do
                    await asyncio.sleep(0.1)
            self.check(told, f"q{number}", unknown)

    def check(self, told: Told, name: str, unknown: Sequence[int] = ()) -> None:
        """Every token once, and each of the version that it is said to be of."""
        assert (len(told.tokens), told.ends) == (TOKENS, 1), name
        assert len(told.versions) == TOKENS, name
        start = 0
        for said, span in itertools.groupby(told.versions):
            versions = unknown if said is None else (said,)
            assert versions, f"{name}: nobody knows of which version token {start} is"
            end, at = start + len(list(span)), start
            for version in versions:
                wanted = self.tokens(version, told.prompt + told.tokens[:at], end - at)
                at += sum(itertools.takewhile(bool, map(int.__eq__, told.tokens[at:end], wanted)))
            assert at == end, f"{name}: token {at} of {start} to {end} is not of version {versions}"
            start = end


async def ask(
    http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, *, stream: bool, id: str = ""
) -> Told:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}
    more = {"return_policy_versions": True} if id else {}
    headers = {"X-Request-Id": id} if id else {}
    told = Told(prompt)
    url += "/v1/completions"
    async with http.post(url, json={**body, **more, "return_token_ids": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        if not stream:
            told.add(await response.json())
            return told
        done = False
        async for line in response.content:
            done = done or line == b"data: [DONE]\n"
            if line.startswith(b"data: {"):
                told.add(json.loads(line[len(b"data: ") :]))
        if not done:
            raise aiohttp.ClientPayloadError("the stream broke off")
    return told


def write_reference(folder: Path, seed: int) -> None:
    """The same version as a checkpoint, made without any of what brings it."""
    header, data = {}, b""
    for name, array in sorted(content(seed).items()):
        raw = array.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / MODEL_FILE).write_bytes(struct.pack("<Q", len(text)) + text + data)
