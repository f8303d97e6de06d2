"""Format SCPI commands for optical switches and parse their answers, without side effects. scpi.py implements the
session.

Every function that parses an answer raises ValueError with the reason if the answer is invalid.
"""

import re
from collections.abc import Sequence
from statistics import mode

from ocs_drivers.errors import shown
from ocs_drivers.model import MOST_PORTS, Action, CrossConnect, PortStatus

IDENTITY = "*idn?"
CLEAR_ERRORS = "*cls"
SIZE = ":oxc:swit:size?"
CONNECTIONS = ":oxc:swit:conn:stat?"
PORT_STATES = ":oxc:swit:port:stat? "

_SETTERS = {Action.ADD: ":oxc:swit:conn:add ", Action.REMOVE: ":oxc:swit:conn:sub "}
_STATES = {"E": PortStatus.ENABLED, "D": PortStatus.DISABLED, "F": PortStatus.FAILED}

_LIST = re.compile(r"\(\s*@([^()]*)\)")
_PAIR_OF_LISTS = re.compile(r"\s*(\(\s*@[^()]*\))\s*,\s*(\(\s*@[^()]*\))\s*", re.ASCII)
_ERROR = re.compile(r'\s*([+-]?\d{1,9})\s*(?:,\s*(?:"(.*)"|([^"]*)))?\s*', re.ASCII)
_NUMBER = re.compile(r"\d{1,5}", re.ASCII)


def setter(action: Action, pairs: Sequence[CrossConnect]) -> str:
    """Return the line that connects or disconnects these pairs. It lists both ports of each pair. Raises ValueError if
    there are no pairs, because `sub` with an empty list could remove every circuit. The verbs that clear a switch,
    `only` and `disc:all`, are never used."""
    if not pairs:
        raise ValueError("the list of circuits must not be empty: some devices interpret an empty list as all circuits")
    ingress = port_list([pair.ingress_port for pair in pairs])
    egress = port_list([pair.egress_port for pair in pairs])
    return f"{_SETTERS[action]}{ingress},{egress}"


def port_states(ports: Sequence[int]) -> str:
    return PORT_STATES + port_list(ports)


def port_list(ports: Sequence[int]) -> str:
    """Format ports as a list such as `(@1,2,3)`. Raises ValueError if there are none, because some verbs interpret an
    empty list as all ports."""
    if not ports:
        raise ValueError("the list of ports must not be empty")
    return f"(@{','.join(map(str, ports))})"


def read_ports(text: str) -> tuple[int, ...]:
    """Parse a port list such as `(@1,2,3)`. Ranges of SCPI channel lists, such as `(@1:3)`, are accepted."""
    listed = _LIST.fullmatch(text.strip())
    if not listed:
        raise ValueError(f"a list of ports must have the form (@1,2,3), got {shown(text)}")
    ports: list[int] = []
    for item in listed[1].split(",") if listed[1].strip() else ():
        first, colon, last = (part.strip() for part in item.partition(":"))
        ports += range(_number(first), _number(last) + 1) if colon else [_number(first)]
        if len(ports) > MOST_PORTS:
            raise ValueError(f"a list of ports must contain at most {MOST_PORTS} ports, got at least {len(ports)}")
    return tuple(ports)


def read_connections(line: str) -> list[CrossConnect]:
    """Parse connections, given as a list of ingress and a list of egress ports: `(@1,2,3),(@19,18,22)`, or `(@),(@)` if
    there are none."""
    lists = _PAIR_OF_LISTS.fullmatch(line)
    if not lists:
        raise ValueError(f"connections must have the form (@1,2,3),(@19,18,22), got {shown(line)}")
    ingress, egress = read_ports(lists[1]), read_ports(lists[2])
    if len(ingress) != len(egress):
        raise ValueError(
            f"the lists of ingress and egress ports must have equal lengths, got {len(ingress)} and {len(egress)}"
        )
    for side in (ingress, egress):
        if len(set(side)) < len(side):
            raise ValueError(f"port {mode(side)} is listed twice")
    return [CrossConnect(a, b) for a, b in zip(ingress, egress, strict=True)]


def read_size(line: str) -> tuple[range, range]:
    """Parse a switch's size and return its ingress and egress ports. For example, `16,16` means ingress ports 1..16 and
    egress ports 17..32."""
    numbers = [_number(part.strip()) for part in line.split(",")]
    if len(numbers) != 2 or 0 in numbers:
        raise ValueError(f"the size of a switch must be two numbers >= 1, such as 16,16, got {shown(line)}")
    ingress, egress = numbers
    return range(1, ingress + 1), range(ingress + 1, ingress + egress + 1)


def read_identity(line: str) -> tuple[str, str, str, str]:
    """Parse an identity such as `Polatis,I-OST-24x24-LU1-DMHNS,002414,6.5.2.18`. Return the vendor, model, serial
    number and software version."""
    parts = [part.strip() for part in line.split(",", 3)]
    if len(parts) != 4 or not (parts[0] and parts[1]):
        raise ValueError(f"an identity must have the form vendor,model,serial,software, got {shown(line)}")
    vendor, model, serial, software = parts
    return vendor, model, serial, software


def read_port_states(line: str, count: int) -> list[PortStatus]:
    """Parse port states such as `(D,E,F)`, with one letter for each of the `count` queried ports: E for enabled, D for
    disabled and F for failed."""
    inner = line.strip()
    if not (inner.startswith("(") and inner.endswith(")")):
        raise ValueError(f"port states must have the form (D,E,F), got {shown(line)}")
    letters = [letter.strip().upper() for letter in inner[1:-1].split(",")]
    if wrong := sorted({letter for letter in letters if letter not in _STATES}):
        raise ValueError(f"a port state must be E, D or F, got {wrong[0]!r}")
    if len(letters) != count:
        raise ValueError(f"the device must report {count} port states, got {len(letters)}")
    return [_STATES[letter] for letter in letters]


def read_complaint(line: str) -> str:
    """Parse an entry of the error queue. Return, for example, `-113 Undefined header` for `-113,"Undefined header"`.
    Return "" for `0,"No error"`, which marks the end of the queue."""
    parts = _ERROR.fullmatch(line)
    if not parts:
        raise ValueError(f'an entry of the error queue must have the form 0,"No error", got {shown(line)}')
    code = int(parts[1])
    return f"{code} {parts[2] or (parts[3] or '').strip()}".rstrip() if code else ""


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"a number must have 1 to 5 digits, got {text[:20]!r}")
    return int(text)
