"""Split bulk commands into lines that are short enough for the device. Has no side effects."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fitting(
    items: Sequence[T], write: Callable[[Sequence[T]], str], longest_chars: int | None
) -> list[tuple[Sequence[T], str]]:
    """Split the items into groups and return each group with the line that `write` returns for it. Groups are halved
    until each line has at most `longest_chars` characters or its group has only one item. If `longest_chars` is None,
    all items form one group."""
    line = write(items)
    if longest_chars is None or len(line) <= longest_chars or len(items) == 1:
        return [(items, line)]
    middle = len(items) // 2
    return [*fitting(items[:middle], write, longest_chars), *fitting(items[middle:], write, longest_chars)]
