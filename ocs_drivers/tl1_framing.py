"""Parse a TL1 byte stream into messages, without side effects. tl1_session.py implements the connection.

A message consists of a line of identification, lines of text, and a terminator at the start of a line. The terminator
`;` ends the message, and `>` or `<` ends a part of the message. Other data such as prompts, echoed commands, banners
and terminal control sequences may surround messages. Autonomous messages are recognized even between the parts or the
lines of a reply.
"""

import re
from dataclasses import dataclass, field

REPLY = "M"
COMPLETED = "COMPLD"
# A peer that never ends its line is not a TL1 device.
LONGEST_LINE = 1 << 20

_PROMPT = r"[ \t]*(?:[\w.-]*[<>][ \t]*)?"
_REPLY = re.compile(_PROMPT + r"M[ \t]+(\S+)[ \t]+([A-Z]{4,})[ \t]*$")
_REPORT = re.compile(_PROMPT + r"(A|\*C|\*\*|\*\^)[ \t]+(\S+)[ \t]+([A-Z].*?)[ \t]*$")
_ACKNOWLEDGEMENT = re.compile(_PROMPT + r"(IP|PF|OK|NA|NG|RL)[ \t]+(\S+)[ \t]*$")
_HEADER = re.compile(r"[ \t]*\S+[ \t]+(?:\d\d)?\d\d-\d\d-\d\d[ \t]+\d\d:\d\d:\d\d[ \t]*$")
_CODE = re.compile(r"[ \t]*([A-Z]{4})[ \t]*$")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)(?:"|\\?$)')
_LINE_END = re.compile(r"[\r\n]")


@dataclass(slots=True)
class Tl1Message:
    """A message from the device. It is a reply to one command (with its parts joined), an autonomous message, or an
    acknowledgement. A reply follows the acknowledgements IP (in progress), PF (printout follows) and OK (begun). No
    reply follows NA (it is not known whether the command was carried out), NG (no good) or RL (repeat later)."""

    kind: str  # REPLY; A or an alarm (*C critical, ** major, *^ minor) of a report; the code of an acknowledgement
    tag: str  # the CTAG of the command; for a report, its own tag
    head: str = ""  # for a reply: COMPLD, DENY, ...; for a report: its verb, such as "REPT ALM CRS"
    lines: list[str] = field(default_factory=list)  # without the quotes around them
    code: str = ""  # of a refusal: four letters
    text: str = ""  # the text of comments
    in_comment: bool = field(default=False, compare=False)  # the last line left a comment open

    @property
    def done(self) -> bool:
        return self.head == COMPLETED

    @property
    def is_report(self) -> bool:
        return self.kind == "A" or self.kind.startswith("*")

    @property
    def summary(self) -> str:
        """The content of the message on one line, for errors and logs."""
        comment = f"/* {self.text} */" if self.text else ""
        return " ".join(filter(None, (self.head, self.code, comment, *self.lines)))

    def add(self, line: str) -> None:
        if self.in_comment or line.lstrip().startswith("/*"):
            inside, end, _ = (line if self.in_comment else line.lstrip()[2:]).partition("*/")
            self.text = f"{self.text} {inside.strip()}".strip()
            self.in_comment = not end
        elif '"' in line:
            self.lines += (unescape(found) for found in _QUOTED.findall(line))
        elif self.kind == REPLY and not self.done and not self.code and (code := _CODE.match(line)):
            self.code = code[1]
        elif line.strip() and not _HEADER.match(line):
            self.lines.append(line.strip())


class Tl1Framer:
    """Assembles messages from a byte stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._terminal = Terminal()
        self._rest = ""  # an unfinished line
        self._open: list[Tl1Message] = []  # innermost last: a report can come within a reply
        self._parts: dict[tuple[str, str], Tl1Message] = {}  # ended by a continuation mark

    @property
    def line_so_far(self) -> str:
        """The text received after the last line end. If the device waits for a command, this text is the prompt."""
        return self._rest

    def feed(self, data: bytes) -> list[Tl1Message]:
        text, at = self._rest + self._terminal.feed(data), 0
        messages: list[Tl1Message] = []
        while at < len(text):
            start = at
            while start < len(text) and text[start] in " \t":
                start += 1
            if self._open and not self._open[-1].in_comment and text[start : start + 1] in (";", ">", "<"):
                self._end(text[start], messages)
                at = start + 1
                continue
            end = _LINE_END.search(text, start)
            if end is None:
                break
            self._line(text[at : end.start()], messages)
            at = end.end()
        self._rest = text[at:] if len(text) - at <= LONGEST_LINE else ""
        return messages

    def refusals(self) -> bytes:
        """Return the bytes that refuse the telnet options that the peer has requested since the last call."""
        return self._terminal.refusals()

    def _line(self, line: str, messages: list[Tl1Message]) -> None:
        if self._open and self._open[-1].in_comment:
            self._open[-1].add(line)
        elif begun := _REPLY.match(line):
            self._begin(REPLY, begun[1], begun[2])
        elif begun := _REPORT.match(line):
            self._begin(begun[1], begun[2], begun[3])
        elif self._open:
            self._open[-1].add(line)
        elif begun := _ACKNOWLEDGEMENT.match(line):
            messages.append(Tl1Message(begun[1], begun[2]))

    def _begin(self, kind: str, tag: str, head: str) -> None:
        if self._open and (self._open[-1].kind, self._open[-1].tag) == (kind, tag):
            return  # the device repeats the identification on every page
        begun = self._parts.pop((kind, tag)) if (kind, tag) in self._parts else Tl1Message(kind, tag, head)
        self._open.append(begun)

    def _end(self, mark: str, messages: list[Tl1Message]) -> None:
        message = self._open.pop()
        if mark == ";":
            messages.append(message)
        else:
            self._parts[message.kind, message.tag] = message


_IAC, _DO, _DONT, _WONT = 255, 253, 254, 252
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\r\n"))
# Telnet commands begin with 0xFF; WILL and DO request an option. ANSI sequences begin with an escape.
_TOKEN = re.compile(
    rb"""
    (?P<plain>[^\xff\x1b]+)
    | \xff (?: (?P<asked>[\xfb\xfd].) | [\xfc\xfe]. | \xfa.*?\xff\xf0 | [^\xfa-\xfe] )
    | \x1b (?: \[[0-?]*[\ -/]*[@-~] | [\ -/]*[0-Z\\-~] )
    | \x1b (?! (?: \[[0-?]* )? [\ -/]* \Z )  # a lone escape; what may yet become a sequence is none
    """,
    re.DOTALL | re.VERBOSE,
)


class Terminal:
    """Removes terminal data from a byte stream: telnet commands, escape sequences and control characters."""

    def __init__(self) -> None:
        self._rest = b""  # an incomplete command or sequence
        self._refusals = bytearray()

    def feed(self, data: bytes) -> str:
        data, kept, at = self._rest + data, bytearray(), 0
        while token := _TOKEN.match(data, at):
            at = token.end()
            kept += (token["plain"] or b"").translate(None, _CONTROLS)
            if asked := token["asked"]:
                self._refusals += bytes((_IAC, _WONT if asked[0] == _DO else _DONT, asked[1]))
        self._rest = data[at:] if len(data) - at <= 256 else b""
        return kept.decode("latin-1")

    def refusals(self) -> bytes:
        refusals, self._refusals = bytes(self._refusals), bytearray()
        return refusals


def unescape(quoted: str) -> str:
    return re.sub(r"\\(.)", r"\1", quoted)


def fields(text: str) -> dict[str, str]:
    """Parse text such as `NAME=value,NAME="a, b"` into a mapping from names to values. Names are converted to capitals.
    Text before the first name, such as the address in `1.1.1:ALIAS=x`, is stored under ""."""
    address = re.match(r"([^=:,]*):", text)
    found = {"": address[1]} if address else {}
    for match in re.finditer(r'(\w+)=("(?:[^"\\]|\\.)*"|[^,]*)', text[address.end() :] if address else text):
        value = match[2]
        found[match[1].upper()] = unescape(value[1:-1]) if value[:1] == '"' == value[-1:] and value != '"' else value
    return found


def quote(value: str) -> str:
    """Format a value as a command parameter. It is quoted if it contains characters that may have a meaning in TL1's
    grammar."""
    if re.fullmatch(r"[\w.@%+/-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def whole_number(text: str) -> int:
    """Parse a number of at most nine digits. Return 0 for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def measured(text: str) -> float | None:
    """Parse a measured value. Return None if the text, such as `NONE`, is not a number."""
    return float(text) if re.fullmatch(r"[+-]?\d{1,6}(?:\.\d{1,12})?", text) else None
