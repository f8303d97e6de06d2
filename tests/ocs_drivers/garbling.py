"""Garble the replies of emulated devices on their way to a driver: truncated, altered, with other numbers or types."""

import asyncio
import contextlib
import json
import random
import re
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

NUMBERS = ("0", "-1", "1", "2", "33", "65536", "99999", "100000", "4294967296", "9" * 30, "9" * 5000, "1.5", "1e999")
WORDS = ("", "NaN", "null", "None", "all", "1:2", "1.1.1>1.1.2", "(@", "<", "{", '"', "\x00", "\xff", "١", "²")
ODD_JSON = (None, True, -1, 0, 1.5, 10**30, float("1e308"), "", "x", "9" * 5000, [], [[]], {}, {"a": None}, [None])
NUMBER = re.compile(r"\d+")


def garbled_text(rng: random.Random, text: str) -> str:
    """Return the text with one to three faults."""
    for _ in range(rng.randint(1, 3)):
        text = rng.choice(_TEXT_FAULTS)(rng, text)
    return text


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(0, len(text))]


def _lost_part(rng: random.Random, text: str) -> str:
    begin, end = sorted(rng.randint(0, len(text)) for _ in range(2))
    return text[:begin] + text[end:]


def _other_number(rng: random.Random, text: str) -> str:
    found = list(NUMBER.finditer(text))
    if not found:
        return text + rng.choice(NUMBERS)
    at = rng.choice(found)
    return text[: at.start()] + rng.choice(NUMBERS) + text[at.end() :]


def _other_sign(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + chr(rng.randrange(1, 256)) + text[at + 1 :]


def _inserted(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(WORDS) + text[at:]


def _doubled(rng: random.Random, text: str) -> str:
    begin, end = sorted(rng.randint(0, len(text)) for _ in range(2))
    return text[:end] + text[begin:end] + text[end:]


def _replaced(rng: random.Random, text: str) -> str:
    return rng.choice(WORDS) + "\r\n"


_TEXT_FAULTS = (
    _cut,
    _lost_part,
    _other_number,
    _other_number,
    _other_number,
    _other_sign,
    _inserted,
    _doubled,
    _replaced,
)


def garbled_bytes(rng: random.Random, data: bytes) -> bytes:
    """Garble bytes as `garbled_text` does; for an HTTP response mostly the body, with a corrected length."""
    text = data.decode("latin-1")
    head, mark, body = text.partition("\r\n\r\n")
    if not (text.startswith("HTTP/") and mark and rng.random() < 0.8):
        return garbled_text(rng, text).encode("latin-1", "replace")
    new = garbled_json(rng, body) if rng.random() < 0.6 else garbled_text(rng, body)
    content = new.encode("latin-1", "replace")
    head = re.sub(r"(?i)(content-length: *)\d+", rf"\g<1>{len(content)}", head)
    return (head + mark).encode("latin-1") + content


def garbled_json(rng: random.Random, text: str) -> str:
    """Return JSON in which one value, or the name of one, is changed."""
    try:
        return json.dumps(_spoilt(rng, json.loads(text)))
    except ValueError:
        return garbled_text(rng, text)


def _spoilt(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {**{key: each for key, each in value.items() if key != name}, f"{name}x": value[name]}
        return {**value, name: _spoilt(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], _spoilt(rng, value[at]), *value[at + rng.randint(0, 1) :]]
    return rng.choice(ODD_JSON)


def garble_message(rng: random.Random, message: Any) -> None:
    """Change one to three fields of a protobuf message, at any depth."""
    for _ in range(rng.randint(1, 3)):
        _spoil_field(rng, message)


def _spoil_field(rng: random.Random, message: Any) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.15:
        message.ClearField(field.name)
        return
    inner = getattr(message, field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if not field.is_repeated:
            _spoil_field(rng, inner)
        elif hasattr(inner, "items"):  # a map
            inner.clear()
        elif inner and rng.random() < 0.7:
            _spoil_field(rng, rng.choice(list(inner)))
        else:
            inner.add()
        return
    value = _odd_value(rng, field)
    if field.is_repeated:
        inner.append(value)
    else:
        setattr(message, field.name, value)


def _odd_value(rng: random.Random, field: Any) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice((*WORDS[:-4], *NUMBERS, "retryable", "conflict", "add"))
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice((0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf")))
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 77))
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice((0, 1, 33, 100_000, 2**32 - 1))
        case _:
            return rng.choice((-1, 0, 1, 33, 100_000, 2**31 - 1))


class Garbler:
    """A TCP proxy between a driver and an emulator. It garbles about one reply in four and breaks some connections."""

    def __init__(self, rng: random.Random, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._rng = rng
        self._upstream = (host, int(port))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                their_reader, their_writer = await asyncio.open_connection(*self._upstream)
                ways = [
                    asyncio.ensure_future(self._pump(reader, their_writer, is_reply=False)),
                    asyncio.ensure_future(self._pump(their_reader, writer, is_reply=True)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    their_writer.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                chance = self._rng.random() if is_reply else 1.0
                if chance < 0.02:
                    return
                writer.write(garbled_bytes(self._rng, data) if chance < 0.25 else data)
                await writer.drain()
