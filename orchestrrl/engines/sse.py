"""Read server-sent events, as OpenAI's streams use them: one JSON document per `data:` line, `[DONE]` at the end."""

DONE = b"[DONE]"


class Events:
    """The content of each `data:` line, however the network cut the lines up; comments (keep-alives) and other fields
    are left out. A line may be of any length: the one that carries a long prompt's ids has hundreds of kilobytes. An
    unfinished last line is never given out. Pure."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []

    def feed(self, read: bytes) -> list[bytes]:
        *lines, rest = read.split(b"\n")
        if lines and self._pending:
            lines[0] = b"".join((*self._pending, lines[0]))
            self._pending.clear()
        if rest:
            self._pending.append(rest)
        return [line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")]
