"""What options of a fabric may be: faults as planner/fabric/shape.py tells them, all at once."""

from collections.abc import Iterator, Sequence

from planner.fabric.shape import ImpossibleSite, ShapeFault


def refuse(*faults: ShapeFault) -> None:
    """Raises Impossible where there are any."""
    if faults:
        raise ImpossibleSite(faults)


def at_least(name: str, value: object, least: int) -> Iterator[ShapeFault]:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        yield ShapeFault(name, f"must be a whole number >= {least}", value)


def number(name: str, value: object, least: float) -> Iterator[ShapeFault]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        yield ShapeFault(name, f"must be a number >= {least:g}", value)


def one_of(name: str, value: object, known: Sequence[str]) -> Iterator[ShapeFault]:
    if value not in known:
        yield ShapeFault(name, f"must be one of {', '.join(known)}", value)
