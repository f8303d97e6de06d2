"""What options of a fabric may be: faults as planner/fabric/shape.py tells them, all at once."""

from collections.abc import Iterator, Sequence

from planner.fabric.shape import Fault, Impossible


def refuse(*faults: Fault) -> None:
    """Raises Impossible where there are any."""
    if faults:
        raise Impossible(faults)


def at_least(name: str, value: object, least: int) -> Iterator[Fault]:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        yield Fault(name, f"must be a whole number >= {least}", value)


def number(name: str, value: object, least: float) -> Iterator[Fault]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        yield Fault(name, f"must be a number >= {least:g}", value)


def one_of(name: str, value: object, known: Sequence[str]) -> Iterator[Fault]:
    if value not in known:
        yield Fault(name, f"must be one of {', '.join(known)}", value)
