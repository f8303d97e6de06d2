"""Requests to a fleet whose engines' tokens depend on every byte of their weights: each token of an answer must be of
the version that the answer reports."""

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
    """An answer, with the version of each of its tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)  # of each token
    ends: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Add a whole answer, or an event of a stream."""
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
    """Clients that send one request after the other to a gateway. `folder` stores the versions' references."""

    def __init__(self, gateway_url: str, folder: Path) -> None:
        self.gateway_url = gateway_url
        self._folder = folder
        self._numbers = itertools.count(1)
        self._models: dict[int, TokenModel] = {}

    def tokens(self, version: int, context: Sequence[int], count: int) -> list[int]:
        """Return the tokens that engines with this version generate."""
        if version not in self._models:
            folder = self._folder / f"reference-{version}"
            write_reference(folder, version)
            self._models[version] = TokenModel(weights_seed=read_weights(folder).seed)
        generation = self._models[version].begin(context)
        return [generation.next_token()[0] for _ in range(count)]

    @contextlib.asynccontextmanager
    async def requests(self, unknown: Sequence[int] = ()) -> AsyncIterator[None]:
        """Keep requests in flight during the block. Afterwards check that all have ended, none is lost, and each token
        is of the version that its answer reports. While the gateway cannot know the version, tokens are of the
        `unknown` versions, in order."""
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
                    reported = await ask(http, self.gateway_url, prompt, TOKENS, stream=place % 2 == 0, id=f"q{number}")
                    break
                except aiohttp.ClientError:  # the gateway was killed: send the request again, as trainers do
                    await asyncio.sleep(0.1)
            self.check(reported, f"q{number}", unknown)

    def check(self, reported: Told, name: str, unknown: Sequence[int] = ()) -> None:
        """Check that every token occurs once and is of its reported version."""
        assert (len(reported.tokens), reported.ends) == (TOKENS, 1), name
        assert len(reported.versions) == TOKENS, name
        start = 0
        for message, span in itertools.groupby(reported.versions):
            versions = unknown if message is None else (message,)
            assert versions, f"{name}: the version of token {start} is unknown"
            end, at = start + len(list(span)), start
            for version in versions:
                wanted = self.tokens(version, reported.prompt + reported.tokens[:at], end - at)
                at += sum(itertools.takewhile(bool, map(int.__eq__, reported.tokens[at:end], wanted)))
            assert at == end, f"{name}: token {at} of {start} to {end} is not of version {versions}"
            start = end


async def ask(
    http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, *, stream: bool, id: str = ""
) -> Told:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}
    more = {"return_policy_versions": True} if id else {}
    headers = {"X-Request-Id": id} if id else {}
    reported = Told(prompt)
    url += "/v1/completions"
    async with http.post(url, json={**body, **more, "return_token_ids": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        if not stream:
            reported.add(await response.json())
            return reported
        done = False
        async for line in response.content:
            done = done or line == b"data: [DONE]\n"
            if line.startswith(b"data: {"):
                reported.add(json.loads(line[len(b"data: ") :]))
        if not done:
            raise aiohttp.ClientPayloadError("the stream broke off")
    return reported


def write_reference(folder: Path, seed: int) -> None:
    """Write the version as a checkpoint, without the code that distributes versions."""
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
