"""Split bulk commands into lines that a device accepts. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fitting(
    items: Sequence[T], write: Callable[[Sequence[T]], str], longest_chars: int | None
) -> list[tuple[Sequence[T], str]]:
    """Return groups of items, each with the line that `write` makes of it. Groups are halved until each line has at
    most `longest_chars` characters or holds one item. Without a limit (None) there is one group."""
    line = write(items)
    if longest_chars is None or len(line) <= longest_chars or len(items) == 1:
        return [(items, line)]
    middle = len(items) // 2
    return [*fitting(items[:middle], write, longest_chars), *fitting(items[middle:], write, longest_chars)]
