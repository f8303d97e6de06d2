"""Answer requests that are wrong as HTTP: an OpenAI error object and one line of log, and no traceback.

aiohttp's own answers are text, its log has a traceback for each, and a body that cannot be decompressed is a 500 to it.
"""

import json
import logging
import re
import zlib

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from orchestrrl.core.errors import cut
from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.http.responses import error_body

logger = logging.getLogger(__name__)

DEFECT = "a defect of the gateway"  # the message of a 500
MOST_BODY_BYTES = 64 * 1024 * 1024  # also once it is decompressed
MOST_MEMBERS = 16  # of a gzip body: each costs a copy of what follows it
_CODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
# The part of a parser's message that quotes the client's bytes, which may hold a credential.
_QUOTED = re.compile(r"\s*:?\s*(?:bytearray\()?b['\"].*", re.DOTALL)
_HEADER_NAME = re.compile(r"b['\"]([A-Za-z0-9-]+):")


def error_answer(message: str, status: int, param: str | None = None) -> web.Response:
    return web.json_response(error_body(message, status, param), status=status)


def log_refusal(asked: str, peer: object, status: int, message: str) -> None:
    """Log a refusal in one line, whatever characters the client's input has."""
    text = "".join(character if character.isprintable() else " " for character in f"{asked}: {status}: {message}")
    logger.warning("refused to %s: %s", peer or "a client that has left", cut(text, 500))


class FaultReportingHandler(RequestHandler):
    """A connection that aiohttp serves."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            logger.error("a request could not be served", exc_info=exc)
            reason, param = DEFECT, None
        else:
            status, reason, param = _reason(status, exc, message)
            log_refusal("HTTP", request.remote, status, reason)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, and cannot be an error any more")
        answer = error_answer(reason, status, param)
        answer.force_close()
        return answer


def _reason(status: int, error: BaseException | None, message: str | None) -> tuple[int, str, str | None]:
    """Return the status, the parser's reason without its quotations of the request, and the header at fault."""
    if isinstance(error, http_exceptions.LineTooLong):
        return 431, "the request line and each header must have at most 8190 bytes", None
    if isinstance(error, http_exceptions.InvalidURLError):
        return status, f"the request line must have a URL, got {cut(repr(message), 80)}", None
    text = message or str(error)
    name = _HEADER_NAME.search(text)
    reason = " ".join(_QUOTED.sub("", text).split()) or "the request is not HTTP"
    return (status, reason, None) if name is None else (status, f"{name[1]}: {reason}", name[1])


async def expected(request: web.Request) -> None:
    """Answer `Expect: 100-continue`, for which a client waits before it sends its body, and refuse any other."""
    wanted = request.headers.get("Expect", "")
    if wanted.lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # what has been written is no part of the answer
        return
    message = f"Expect: must be 100-continue, got {cut(repr(wanted), 80)}"
    log_refusal(f"{request.method} {request.path}", request.remote, 417, message)
    text = json.dumps(error_body(message, 417, "Expect"))
    raise web.HTTPExpectationFailed(text=text, content_type="application/json")


async def read_body(request: web.Request, *, empty: bytes | None = None) -> bytes:
    """Return the body, decompressed; `empty` replaces one that is left out. Raises HttpRefusal, and what aiohttp
    raises for a body that is too large or breaks off."""
    if empty is None and not any(name in request.headers for name in ("Content-Length", "Transfer-Encoding")):
        raise HttpRefusal("Content-Length: must be given, got nothing", "Content-Length", status=411)
    data = await request.read()
    named = ",".join(request.headers.getall("Content-Encoding", []))
    codings = [coding for part in named.split(",") if (coding := part.strip().lower()) not in ("", "identity")]
    if any(coding not in _CODINGS for coding in codings) or len(codings) > 2:
        wrong = f"Content-Encoding: must be gzip or deflate, or left out, got {cut(repr(named), 80)}"
        accepted = {"Accept-Encoding": "gzip, deflate"}
        raise HttpRefusal(wrong, "Content-Encoding", status=415, headers=accepted)
    for coding in reversed(codings):
        data = decompressed(data, coding)
    return data or empty or b""


def decompressed(data: bytes, coding: str) -> bytes:
    """Return the data without its coding. Raises HttpRefusal where it is not of that coding, ends early or grows too
    large. Some clients omit the zlib frame of `deflate`."""
    try:
        return _decompressed(data, _CODINGS[coding])
    except zlib.error as error:
        if coding == "deflate":
            try:
                return _decompressed(data, -zlib.MAX_WBITS)
            except zlib.error:
                pass
        wrong = f"Content-Encoding: must be that of the body, got {coding!r}: {error}"
        raise HttpRefusal(wrong, "Content-Encoding") from error


def _decompressed(data: bytes, wbits: int) -> bytes:
    whole = b""
    for _ in range(MOST_MEMBERS):
        stream = zlib.decompressobj(wbits)
        whole += stream.decompress(data, MOST_BODY_BYTES + 1 - len(whole))
        if len(whole) > MOST_BODY_BYTES:
            wrong = f"the body must have at most {MOST_BODY_BYTES} bytes when it is decompressed"
            raise HttpRefusal(wrong, status=413)
        if not stream.eof:
            raise zlib.error("it ends early")
        data = stream.unused_data  # gzip's next member
        if not data:
            return whole
    wrong = f"Content-Encoding: the body must have at most {MOST_MEMBERS} compressed members, got more"
    raise HttpRefusal(wrong, "Content-Encoding")
