"""Bulk commands in lines that a device takes. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fitting(
    items: Sequence[T], write: Callable[[Sequence[T]], str], longest_chars: int | None
) -> list[tuple[Sequence[T], str]]:
    """The items with the line that `write` makes of them, cut in halves until each line is no longer than that, or of
    one item. None: one line."""
    line = write(items)
    if longest_chars is None or len(line) <= longest_chars or len(items) == 1:
        return [(items, line)]
    middle = len(items) // 2
    return [*fitting(items[:middle], write, longest_chars), *fitting(items[middle:], write, longest_chars)]
