"""Bulk commands: lists of ports, cut into lines that a device takes, sent so that a part that took is not denied."""

from collections.abc import Iterable, Iterator, Sequence

from ocs_drivers.errors import DriverOutcomeUnknown, DriverRetryable
from ocs_drivers.model import CrossConnect
from ocs_drivers.tl1_session import Tl1Session


def list_of(ports: Iterable[int]) -> str:
    """`1&2&3`; raises ValueError where there are none, for an empty list means all of them on some devices."""
    text = "&".join(str(port) for port in ports)
    if not text:
        raise ValueError("a setter with an empty list: on some devices that means every circuit")
    return text


def lines_of(
    pairs: Sequence[CrossConnect], form: str, ingress_offset: int, egress_offset: int, limit: int
) -> Iterator[str]:
    """The pairs as bulk commands of the form, `{0}` the ingress ports and `{1}` the egress ports: one command, or as
    many as it takes for none to have more than `limit` characters (0: no limit)."""
    line = form.format(
        list_of(pair.ingress_port + ingress_offset for pair in pairs),
        list_of(pair.egress_port + egress_offset for pair in pairs),
    )
    if not limit or len(line) <= limit or len(pairs) == 1:  # `<ctag>` is as long as any
        yield line
        return
    half = len(pairs) // 2
    yield from lines_of(pairs[:half], form, ingress_offset, egress_offset, limit)
    yield from lines_of(pairs[half:], form, ingress_offset, egress_offset, limit)


async def set_in_lines(session: Tl1Session, lines: Sequence[str]) -> None:
    """Send setters that are parts of one: after the first, nothing that fails can be called untouched."""
    for index, line in enumerate(lines):
        try:
            await session.execute(line, is_setter=True)
        except DriverRetryable as error:
            if not index:
                raise
            raise DriverOutcomeUnknown(
                f"{index} of {len(lines)} parts were sent before: {error.message}",
                command=error.command,
                answer=error.answer,
            ) from error
