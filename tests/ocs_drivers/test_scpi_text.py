"""SCPI lines: round trips between writer and parser, and arbitrary input, which raises only ValueError."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers import scpi_text as text
from ocs_drivers.batches import fitting
from ocs_drivers.emulators import scpi as emulated
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.model import Action, CrossConnect, PortStatus
from ocs_drivers.scpi import ScpiOptions, ScpiWire

port_numbers = st.integers(1, 99_999)
lists_of_ports = st.lists(port_numbers, min_size=1, max_size=40, unique=True)
spaces = st.sampled_from(["", " ", "  "])


@st.composite
def cross_connects(draw: st.DrawFn) -> list[CrossConnect]:
    ingress = draw(lists_of_ports)
    egress = draw(st.lists(port_numbers, min_size=len(ingress), max_size=len(ingress), unique=True))
    return [CrossConnect(a, b) for a, b in zip(ingress, egress, strict=True)]


@given(lists_of_ports)
def test_port_lists_round_trip_in_driver_and_emulator(ports: list[int]) -> None:
    written = text.port_list(ports)
    assert text.read_ports(written) == tuple(ports)
    assert emulated._ports(written) == ports
    assert emulated._listed(ports) == written


@given(cross_connects(), st.data())
def test_read_connections_ignores_spaces(pairs: list[CrossConnect], data: st.DataObject) -> None:
    line = text.setter(Action.ADD, pairs).removeprefix(":oxc:swit:conn:add ")
    spaced = "".join(sign + (data.draw(spaces) if sign in "@,)" else "") for sign in line)
    assert text.read_connections(spaced) == pairs


@given(st.integers(1, 99_000), st.integers(0, 900))
def test_port_ranges_are_expanded(first: int, more: int) -> None:
    assert text.read_ports(f"(@{first}:{first + more})") == tuple(range(first, first + more + 1))
    assert emulated._ports(f"(@{first}:{first + more})") == list(range(first, first + more + 1))


@given(cross_connects(), st.sampled_from(Action), st.integers(64, 400))
def test_split_lines_cover_all_pairs_and_fit(pairs: list[CrossConnect], action: Action, longest: int) -> None:
    lines = fitting(pairs, lambda batch: text.setter(action, batch), longest)
    assert [pair for batch, _ in lines for pair in batch] == pairs
    for batch, line in lines:
        assert len(line) <= longest
        assert line == text.setter(action, batch)
        verb = "add" if action is Action.ADD else "sub"
        assert re.fullmatch(rf":oxc:swit:conn:{verb} [(]@\d+(,\d+)*[)],[(]@\d+(,\d+)*[)]", line)


@pytest.mark.parametrize("action", Action)
def test_empty_lists_are_refused(action: Action) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        text.setter(action, [])
    with pytest.raises(ValueError, match="must not be empty"):
        text.port_states([])


@given(st.lists(st.sampled_from(PortStatus), min_size=1))
def test_port_states_of_emulator_are_parsed(states: list[PortStatus]) -> None:
    line = f"({','.join(emulated.LETTERS[state] for state in states)})"
    assert text.read_port_states(line, len(states)) == states
    assert text.read_port_states(line.lower().replace(",", ", "), len(states)) == states


@given(st.integers(-999, 999), st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"')))
def test_error_entries_parse_in_all_forms(code: int, words: str) -> None:
    def told(words: str) -> str:
        return f"{code} {words}".rstrip() if code else ""

    assert text.read_complaint(f'{code:+d},"{words}"') == told(words)
    assert text.read_complaint(f' {code} , "{words}" ') == told(words)
    assert text.read_complaint(f"{code},{words}") == told(words.strip())
    assert text.read_complaint(str(code)) == told("")


@given(st.one_of(st.text(), st.text("(@),:0123456789 EDF\"'-;", max_size=40)))
def test_parsers_raise_only_value_error(line: str) -> None:
    for read in (
        text.read_ports,
        text.read_connections,
        text.read_size,
        text.read_identity,
        text.read_complaint,
        lambda line: text.read_port_states(line, 3),
    ):
        with suppress(ValueError):
            read(line)


@given(st.text(st.characters(min_codepoint=1, max_codepoint=126), max_size=60))
def test_emulator_survives_any_line(line: str) -> None:
    async def hear() -> None:
        emulator = emulated.polatis(DevicePanel(4, 4))
        await emulator.line(line)
        assert await emulator.line("*idn?") == ["Polatis,I-OST-4x4-LU1-DMHNS,002414,6.5.2.18"]

    asyncio.run(hear())


@given(lists_of_ports, st.lists(st.integers(1, 60), max_size=30), st.sampled_from(["\n", "\r\n"]))
def test_lines_are_reassembled_from_pieces(ports: list[int], cuts: Sequence[int], end: str) -> None:
    """Check a setter's errors and an answer that arrive in pieces, cut anywhere, also within a line end."""
    said = f'-222,"Data out of range"{end}0,"No error"{end}{text.port_list(ports)}{end}'.encode()

    async def read() -> tuple[list[str], str]:
        wire = ScpiWire(OPTIONS, clock=None)  # type: ignore[arg-type]  # the clock is not used
        reader = asyncio.StreamReader()
        wire._streams = (reader, _Mute())  # type: ignore[assignment]

        async def say() -> None:
            start = 0
            for cut in (*cuts, len(said)):
                reader.feed_data(said[start : start + cut])
                start += cut
                await asyncio.sleep(0)

        saying = asyncio.ensure_future(say())
        heard = await wire._complaints(), await wire._line()
        await saying
        return heard

    complaints, line = asyncio.run(read())
    assert complaints == ["-222 Data out of range"]
    assert text.read_ports(line) == tuple(ports)


class _Mute:
    """A writer that discards its input."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


OPTIONS = ScpiOptions(address="192.0.2.7")
