"""Communicate with a TL1 device over one TCP connection: send commands, match replies to commands by CTAG, and forward
reports."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable, reason_of
from ocs_drivers.tl1_framing import REPLY, Tl1Framer, Tl1Message

logger = logging.getLogger(__name__)

# A TL1 CTAG has at most six characters.
LAST_CTAG = 999_999


class Tl1Denied(DriverPermanent):
    """Raised when the device refuses a command. `reply` is the device's reply, which the dialects examine."""

    def __init__(self, reply: Tl1Message, command: str) -> None:
        super().__init__("the device refused", command=command, answer=reply.summary)
        self.reply = reply


def ctags() -> Iterator[str]:
    """Yield command tags (CTAGs) without end. A tag is repeated only after `LAST_CTAG` commands, when no reply to the
    earlier command with this tag can arrive any more."""
    while True:
        yield from (str(number) for number in range(1, LAST_CTAG + 1))


class Tl1Session:
    """One connection to a device. It is opened once and not reused. It supports concurrent commands, although the
    driver sends one at a time."""

    def __init__(
        self, ctag: Iterator[str], on_report: Callable[[Tl1Message], None], on_loss: Callable[[], None]
    ) -> None:
        self._ctag = ctag
        self._on_report = on_report
        self._on_loss = on_loss
        self._waiting: dict[str, asyncio.Future[Tl1Message]] = {}
        self._framer = Tl1Framer()
        self._has_received = asyncio.Event()  # set on new data and at the end
        self.lost = ""  # why the connection ended

    async def open(self, host: str, port: int) -> None:
        try:
            reader, self._writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise DriverRetryable(f"cannot connect to {host}:{port}: {reason_of(error)}") from error
        self._reading = asyncio.create_task(self._read(reader))

    async def prompt(self, text: str) -> None:
        """Wait until the device shows the prompt `text`. Raises DriverRetryable if the connection breaks during the
        wait."""
        while not self._framer.line_so_far.rstrip().endswith(text):
            if self.lost:
                raise DriverRetryable(f"the connection failed before the prompt {text!r}: {self.lost}", after_s=0.0)
            self._has_received.clear()
            await self._has_received.wait()

    async def execute(self, command: str, *, is_setter: bool = False, shown: str = "") -> Tl1Message:
        """Send a command, with `<ctag>` replaced by a new tag, and return its reply. Errors contain `shown`, if it is
        given, instead of the command.

        Raises Tl1Denied if the device refuses the command, DriverPermanent if the command cannot be carried out in the
        device's present state, and DriverRetryable if the device is busy. If no reply arrives, raises
        DriverOutcomeUnknown if a setter may have been carried out, and DriverRetryable otherwise.
        """
        ctag = next(self._ctag)
        line = command.replace("<ctag>", ctag, 1)
        shown = shown or line
        if self.lost:
            raise DriverRetryable(f"the connection failed: {self.lost}", after_s=0.0, command=shown)
        unclear = DriverOutcomeUnknown if is_setter else DriverRetryable
        reply: asyncio.Future[Tl1Message] = asyncio.get_running_loop().create_future()
        self._waiting[ctag] = reply
        try:
            self._writer.write(line.encode("latin-1", "replace") + b"\r\n")
            await self._writer.drain()
            answer = await reply
        except OSError as error:
            raise unclear(f"the connection failed: {error}", command=shown) from error
        finally:
            self._waiting.pop(ctag, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # mark it as retrieved, even if drain failed first
        match answer.kind:
            case "RL":
                raise DriverRetryable("the device is busy: try again later", command=shown, answer=answer.kind)
            case "NG":
                wrong = "the device cannot carry out the command in its present state"
                raise DriverPermanent(wrong, command=shown, answer=answer.kind)
            case "NA":
                raise unclear(
                    "the device reports that the outcome of the command is unknown", command=shown, answer=answer.kind
                )
        if not answer.done:
            raise Tl1Denied(answer, shown)
        return answer

    async def close(self, goodbye: str) -> None:
        """Close the connection. If it is not broken, send the logout command `goodbye` first, without waiting for a
        reply."""
        with suppress(OSError):
            if not self.lost:
                line = goodbye.replace("<ctag>", next(self._ctag), 1)
                self._writer.write(line.encode("latin-1", "replace") + b"\r\n")
            self._writer.close()
        self._lose("closed")
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "end of file"
        try:
            while data := await reader.read(1 << 16):
                for message in self._framer.feed(data):
                    self._take(message)
                if refusals := self._framer.refusals():
                    self._writer.write(refusals)
                self._has_received.set()
        except OSError as error:
            reason = reason_of(error)
        except Exception as error:  # a defect in the parsing of its messages
            logger.exception("TL1 session closed: its messages cannot be parsed")
            reason = f"its messages cannot be parsed: {error}"
        self._lose(reason)
        self._writer.close()
        self._on_loss()

    def _take(self, message: Tl1Message) -> None:
        if message.is_report:
            self._on_report(message)
            return
        waiting = self._waiting.get(message.tag)
        if waiting is None or waiting.done():
            return  # the command's caller no longer waits
        if message.kind in (REPLY, "NA", "NG", "RL"):  # the other acknowledgements are followed by a reply
            waiting.set_result(message)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError(reason))
        self._has_received.set()
