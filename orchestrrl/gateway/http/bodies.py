"""Read the body of a request, and validate it for the operator API. The functions have no side effects."""

import zlib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrrl.core.errors import cut, faults_of
from orchestrrl.gateway.http.connections import MOST_BODY_BYTES, HttpRequest
from orchestrrl.gateway.http.field_types import HttpRefusal, read_json

MOST_MEMBERS = 16  # members of a gzip body; each costs a copy of the data after it
_CODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class RequestBody(BaseModel):
    """The body of a POST request. Field names are those of the daemon's messages. A field that has another name in the
    HTTP body has an alias."""

    model_config = ConfigDict(extra="forbid", strict=True)


B = TypeVar("B", bound=BaseModel)


def read_as(kind: type[B], request: HttpRequest) -> B:
    """Return the body, validated as an instance of `kind`. A missing body is treated as an empty object. Raises
    HttpRefusal with all faults of the body."""
    try:
        return kind.model_validate(read_json(read_body(request, empty=b"{}")))
    except ValidationError as error:
        faults = faults_of(error)
        raise HttpRefusal("; ".join(faults), faults[0].partition(":")[0]) from error


def read_body(request: HttpRequest, *, empty: bytes | None = None) -> bytes:
    """Return the decompressed body, or `empty` if the request has no body. Raises HttpRefusal if the body is missing
    and `empty` is None, or if the body cannot be decompressed."""
    if empty is None and request.fields.keys().isdisjoint(("content-length", "transfer-encoding")):
        raise HttpRefusal("Content-Length: is required", "Content-Length", status=411)
    data = request.body
    for coding in reversed(_codings(request)):
        data = decompressed(data, coding)
    return data or empty or b""


def _codings(request: HttpRequest) -> list[str]:
    if "content-encoding" not in request.fields:
        return []
    named = ",".join(value for name, value in request.headers if name.lower() == "content-encoding")
    codings = [coding for part in named.split(",") if (coding := part.strip().lower()) not in ("", "identity")]
    if any(coding not in _CODINGS for coding in codings) or len(codings) > 2:
        wrong = f"Content-Encoding: must be gzip, deflate or absent, got {cut(repr(named), 80)}"
        accepted = {"Accept-Encoding": "gzip, deflate"}
        raise HttpRefusal(wrong, "Content-Encoding", status=415, headers=accepted)
    return codings


def decompressed(data: bytes, coding: str) -> bytes:
    """Return the decompressed data. `coding` is `gzip`, `x-gzip` or `deflate`. Raises HttpRefusal if the data does not
    match `coding`, ends early or is too large after decompression. For `deflate`, raw data without the zlib frame is
    accepted, because some clients omit the frame."""
    try:
        return _decompressed(data, _CODINGS[coding])
    except zlib.error as error:
        if coding == "deflate":
            try:
                return _decompressed(data, -zlib.MAX_WBITS)
            except zlib.error:
                pass
        wrong = f"Content-Encoding: must match the body, got {coding!r}: {error}"
        raise HttpRefusal(wrong, "Content-Encoding") from error


def _decompressed(data: bytes, wbits: int) -> bytes:
    whole = b""
    for _ in range(MOST_MEMBERS):
        stream = zlib.decompressobj(wbits)
        whole += stream.decompress(data, MOST_BODY_BYTES + 1 - len(whole))
        if len(whole) > MOST_BODY_BYTES:
            wrong = f"the decompressed body must have at most {MOST_BODY_BYTES} bytes"
            raise HttpRefusal(wrong, status=413)
        if not stream.eof:
            raise zlib.error("the compressed data is truncated")
        data = stream.unused_data  # gzip's next member
        if not data:
            return whole
    wrong = f"Content-Encoding: the body must have at most {MOST_MEMBERS} compressed members, got more"
    raise HttpRefusal(wrong, "Content-Encoding")
