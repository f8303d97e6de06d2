"""TL1 framing: the same messages are read wherever reports are inserted and however the bytes are split."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.tl1_framing import Tl1Framer, Tl1Message, fields, quote

HEADER = "   Polatis 26-11-22 02:30:00"

line_text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12) | st.sampled_from(
    ["a; b", ";", 'say "no"', "M  5 COMPLD", "A  1 REPT ALM", "IP 5", "back\\slash", ">", "<", "/* not one */"]
)
comment_text = st.sampled_from(["", "NOTICE This is a private system; go", 'a "quoted" word', "M  9 COMPLD inside"])
# Meaningless bytes between messages.
NOISE = [
    b"agent> ",
    b"< ",
    b"\r\n<",
    b"ENT-PATCH::1&2,17&18:5:;\r\n",
    b"Welcome; type HELP\r\n",
    b'\x1b[62;1"p\x1b>\x1b[?4l\x1b[1;50r\x1b[50;1H',
    b"\xff\xfb\x01\xff\xfd\x03",
    b"\xff\xfa\x18\x01;\xff\xf0",
    b"\x00\x07",
]


@dataclass(frozen=True)
class Told:
    """A message as sent by a device: its bytes, in pieces between which others may be inserted, and the expected
    result."""

    pieces: tuple[bytes, ...]
    message: Tl1Message


@st.composite
def replies(draw: st.DrawFn, ctag: int) -> Told:
    is_refusal = draw(st.booleans())
    comment = draw(comment_text)
    code = "SROF" if is_refusal else ""
    lines = [] if is_refusal else draw(st.lists(line_text, max_size=5))
    body = [code] if is_refusal else [quoted(line) for line in lines]
    completion = "DENY" if is_refusal else "COMPLD"
    first = f"M  {ctag} {completion}"
    return Told(draw(rendered(first, body, comment)), Tl1Message("M", str(ctag), completion, lines, code, comment))


@st.composite
def reports(draw: st.DrawFn, tag: int) -> Told:
    severity = draw(st.sampled_from(["A", "*C", "**", "*^"]))
    verb = draw(st.sampled_from(["REPT ALM CRS", "REPT DBCHG EVT SECU IDVN", "REPT EVT EQPT"]))
    lines = draw(st.lists(line_text, max_size=2))
    comment = draw(comment_text)
    body = [quoted(line) for line in lines]
    return Told(
        draw(rendered(f"{severity}  {tag} {verb}", body, comment)),
        Tl1Message(severity, str(tag), verb, lines, text=comment),
    )


@st.composite
def rendered(draw: st.DrawFn, first: str, body: list[str], comment: str) -> tuple[bytes, ...]:
    """Draw lines with their ends, in one part or in several."""
    newline = draw(st.sampled_from(["\r\n", "\n", "\r", "\r\n\n"]))
    body = [*body, *([f"/* {comment} */"] if comment else [])]
    head = [newline, HEADER + newline, first + newline]
    pieces = list(head)
    for index, line in enumerate(body):
        if index and draw(st.integers(0, 3)) == 0:
            pieces += [draw(st.sampled_from(["<", ">"])), *head]
        pieces.append(f"   {line}{newline}")
    return tuple(piece.encode("latin-1") for piece in [*pieces, ";"])


def quoted(line: str) -> str:
    return '"' + line.replace("\\", "\\\\").replace('"', '\\"') + '"'


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[Tl1Message]]:
    """Draw all bytes that a device sends on a connection, and the messages in the order in which they end."""
    stream, expected = bytearray(), []
    for number in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(0, 2))):
            stream += draw(st.sampled_from(NOISE)) + b"\r\n"
        if draw(st.booleans()):
            code = draw(st.sampled_from(["IP", "PF", "OK", "NA", "NG", "RL"]))
            stream += f"\r\n\n{code} {number}\r\n<".encode()
            expected.append(Tl1Message(code, str(number)))
        told = draw(replies(number) if draw(st.booleans()) else reports(number))
        for index, piece in enumerate(told.pieces):
            if draw(st.integers(0, 5)) == 0:  # a report, before the message or within it
                other = draw(reports(1000 + 10 * number + index))
                stream += b"".join(other.pieces)
                expected.append(other.message)
            stream += piece
        expected.append(told.message)
    return bytes(stream), expected


@given(conversations(), st.lists(st.integers(0, 2000), max_size=12))
def test_messages_are_independent_of_splitting(said: tuple[bytes, list[Tl1Message]], cuts: list[int]) -> None:
    stream, expected = said
    framer, read = Tl1Framer(), []
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(places):
        read += framer.feed(stream[start:end])
    assert read == expected


@given(conversations())
def test_messages_are_read_byte_by_byte(said: tuple[bytes, list[Tl1Message]]) -> None:
    stream, expected = said
    framer = Tl1Framer()
    assert [message for byte in stream for message in framer.feed(bytes((byte,)))] == expected


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_garbage_is_read_independent_of_splitting(garbage: bytes, cuts: list[int]) -> None:
    whole = Tl1Framer().feed(garbage)
    framer, read = Tl1Framer(), []
    places = sorted({0, len(garbage), *(cut for cut in cuts if cut < len(garbage))})
    for start, end in itertools.pairwise(places):
        read += framer.feed(garbage[start:end])
    assert read == whole


def test_report_between_two_parts_of_reply() -> None:
    stream = (
        b'\r\n\n   OXC 26-11-22 02:30:00\r\nM  7 COMPLD\r\n   "1,17"\r\n>'
        b'\r\n\n   OXC 26-11-22 02:30:00\r\n*C  12 REPT ALM CRS\r\n   "2,18:CR,LOS"\r\n;'
        b'\r\n\n   OXC 26-11-22 02:30:00\r\nM  7 COMPLD\r\n   "3,19"\r\n;'
    )
    assert Tl1Framer().feed(stream) == [
        Tl1Message("*C", "12", "REPT ALM CRS", ["2,18:CR,LOS"]),
        Tl1Message("M", "7", "COMPLD", ["1,17", "3,19"]),
    ]


def test_comment_may_contain_terminators() -> None:
    stream = (
        b'\r\n   OXC 26-11-22 02:30:00\r\nM  1 COMPLD\r\n   /* NOTICE private\r\n; go away\r\n> now */\r\n   "x"\r\n;'
    )
    assert Tl1Framer().feed(stream) == [Tl1Message("M", "1", "COMPLD", ["x"], text="NOTICE private ; go away > now")]


def test_refusal_has_code_and_text() -> None:
    stream = (
        b"\r\n\n   OXC 26-11-22 02:30:00\r\nM  2 DENY\r\n   SROF\r\n   /* Status, Requested Operation Failed */\r\n;"
    )
    (reply,) = Tl1Framer().feed(stream)
    assert reply.kind == "M"
    assert not reply.done
    assert reply.summary == "DENY SROF /* Status, Requested Operation Failed */"


def test_telnet_options_are_refused_once() -> None:
    framer = Tl1Framer()
    framer.feed(b"\xff\xfb\x01\xff")
    framer.feed(b"\xfd\x03")
    assert framer.refusals() == b"\xff\xfe\x01\xff\xfc\x03"  # DONT echo, WONT suppress-go-ahead
    assert framer.refusals() == b""


def test_unquoted_lines_and_prompt_are_read() -> None:
    framer = Tl1Framer()
    assert framer.feed(b"\r\n   OXC 26-11-22 02:30:00\r\nM  1 COMPLD\r\n   16x16\r\n;\r\nagent> ") == [
        Tl1Message("M", "1", "COMPLD", ["16x16"])
    ]
    assert framer.line_so_far == "agent> "


def test_endless_line_is_discarded() -> None:
    framer = Tl1Framer()
    for _ in range(3):
        assert framer.feed(b"x" * 700_000) == []
    assert len(framer.line_so_far) <= 1 << 20


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("1.1.1:ALIAS=NONE,INPWR=-3.2", {"": "1.1.1", "ALIAS": "NONE", "INPWR": "-3.2"}),
        (
            'GGN:PORTNAME="to rack 3; unit 5, left",PORTID=20001',
            {"": "GGN", "PORTNAME": "to rack 3; unit 5, left", "PORTID": "20001"},
        ),
        ("1.1.1:WX,NONE,NONE:INAS=IS,INOC=OK", {"": "1.1.1", "INAS": "IS", "INOC": "OK"}),
        ("SRCPORT=1,OPORTNAME=", {"SRCPORT": "1", "OPORTNAME": ""}),
    ],
)
def test_fields_are_parsed(line: str, wanted: dict[str, str]) -> None:
    assert fields(line) == wanted


def test_quote_quotes_grammar_characters() -> None:
    assert quote("root") == "root"
    assert quote('p;a:s"s') == '"p;a:s\\"s"'
