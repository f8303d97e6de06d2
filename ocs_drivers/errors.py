"""What a driver raises: each error names the device, the command and the device's own words, and says what to do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SHOWN_CHARACTERS = 80  # of what a device answered, in a message


def shown(value: object) -> str:
    return repr(value)[:SHOWN_CHARACTERS]


def reason_of(error: OSError) -> str:
    """What the system says: `Connection refused`, not which of its calls failed."""
    if error.errno is not None and error.errno > 0:  # those of name resolution are less
        return os.strerror(error.errno)
    return error.strerror or str(error)


class DriverError(Exception):
    """Base of the tree; never raised itself. `answer` is what the device said, word for word; "" when it was silent."""

    def __init__(self, message: str, *, device: str = "", command: str = "", answer: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.device = device
        self.command = command
        self.answer = answer

    def __str__(self) -> str:
        text = f"{self.device}: {self.message}" if self.device else self.message
        if self.command:
            text += f"; command: {self.command}"
        if self.answer:
            text += f"; the device said: {self.answer}"
        return text


class DriverRetryable(DriverError):
    """Nothing happened; the same call may succeed after `after_s` seconds."""

    def __init__(self, message: str, *, after_s: float = 1.0, **told: str) -> None:
        super().__init__(message, **told)
        self.after_s = after_s


class DriverPermanent(DriverError):
    """Nothing happened, and repeating the call will not help."""


class DriverOutcomeUnknown(DriverError):
    """The command may or may not have taken: read the device before sending anything again."""


class DriverFaults(DriverPermanent):
    """Several things wrong with one call, all named at once: `path: what is wrong, got VALUE`."""

    def __init__(self, faults: list[str], *, device: str = "") -> None:
        super().__init__("\n".join(faults), device=device)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(f"{self.device}: {fault}" if self.device else fault for fault in self.faults)


class InvalidChange(DriverFaults):
    """The change is malformed for this device: a port that does not exist, a port named twice."""


class InvalidOptions(DriverFaults):
    """A driver cannot be made from these options."""


class CircuitConflict(DriverFaults):
    """The change is well formed, but the device is not as it assumes: a port in use or failed, a revision that moved.
    Nothing was sent. Look at the device and plan again."""


@contextmanager
def naming(device: str) -> Iterator[None]:
    """Name the device in errors of the block that name none."""
    try:
        yield
    except DriverError as error:
        error.device = error.device or device
        raise
