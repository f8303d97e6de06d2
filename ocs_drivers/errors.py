"""Define the errors that drivers raise. Each error names the device and the command and quotes the device's answer. The
class of the error determines the caller's next step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SHOWN_CHARACTERS = 80  # limit for a quoted device answer in a message


def shown(value: object) -> str:
    return repr(value)[:SHOWN_CHARACTERS]


def reason_of(error: OSError) -> str:
    """Return the system's reason for the error, such as `Connection refused`, without the name of the failed call."""
    if error.errno is not None and error.errno > 0:  # name-resolution errors are negative
        return os.strerror(error.errno)
    return error.strerror or str(error)


class DriverError(Exception):
    """Base class of driver errors. Only its subclasses are raised. `answer` is the device's answer, verbatim, or "" if
    there was no answer."""

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
            text += f"; device answered: {self.answer}"
        return text


class DriverRetryable(DriverError):
    """The call had no effect. The same call may succeed after `after_s` seconds."""

    def __init__(self, message: str, *, after_s: float = 1.0, **told: str) -> None:
        super().__init__(message, **told)
        self.after_s = after_s


class DriverPermanent(DriverError):
    """The call had no effect, and repeating it will not help."""


class DriverOutcomeUnknown(DriverError):
    """The command may or may not have taken effect. The caller must read the device before it sends another command."""


class DriverFaults(DriverPermanent):
    """An error that lists all faults of one call. Each fault has the form `path: what is wrong, got VALUE`."""

    def __init__(self, faults: list[str], *, device: str = "") -> None:
        super().__init__("\n".join(faults), device=device)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(f"{self.device}: {fault}" if self.device else fault for fault in self.faults)


class InvalidChange(DriverFaults):
    """The change is malformed for this device, for example because a port does not exist or is named twice."""


class InvalidOptions(DriverFaults):
    """The options for a driver are invalid."""


class CircuitConflict(DriverFaults):
    """The change is well formed, but the device is not in the state that the change assumes. For example, a port is in
    use or failed, or the revision has changed. No command was sent. The caller should read the device and plan again.
    """


@contextmanager
def naming(device: str) -> Iterator[None]:
    """Add the device's name to driver errors that are raised in the block and do not name a device."""
    try:
        yield
    except DriverError as error:
        error.device = error.device or device
        raise
