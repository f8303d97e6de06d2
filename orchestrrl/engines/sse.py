"""Read server-sent events, as OpenAI's streams use them: one JSON document per `data:` line, `[DONE]` at the end."""

DONE = b"[DONE]"
MOST_LINE_BYTES = 128 << 20  # the ids of a prompt of ten million tokens; whatever has no end has to have one


class ServerSentEvents:
    """The content of each `data:` line, however the network cut the lines up; comments (keep-alives) and other fields
    are left out. A line may be long: the one that carries a long prompt's ids has hundreds of kilobytes. An unfinished
    last line is never given out. Pure."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # of a line that is not all there
        self._pending_bytes = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Raises ValueError for a line that is longer than any should be."""
        *lines, rest = read.split(b"\n")
        if lines and self._pending:
            lines[0] = b"".join((*self._pending, lines[0]))
            self._pending.clear()
            self._pending_bytes = 0
        if rest:
            self._pending.append(rest)
            self._pending_bytes += len(rest)
            if self._pending_bytes > MOST_LINE_BYTES:
                raise ValueError(f"a line of more than {MOST_LINE_BYTES >> 20} MiB")
        return [line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")]
