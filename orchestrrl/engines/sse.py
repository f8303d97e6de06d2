"""Read server-sent events, as OpenAI's streams use them: one JSON document per `data:` line, `[DONE]` at the end."""

from collections.abc import AsyncIterable, AsyncIterator

DONE = "[DONE]"


async def lines(reads: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Whole lines without their ends, however the network cut them up. A line may be of any length: the one that
    carries a long prompt's ids has hundreds of kilobytes. An unfinished last line is dropped."""
    pending: list[bytes] = []
    async for read in reads:
        *whole, rest = read.split(b"\n")
        for line in whole:
            pending.append(line)
            yield b"".join(pending).rstrip(b"\r")
            pending.clear()
        if rest:
            pending.append(rest)


async def data_of(reads: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The content of each `data:` line; comments (keep-alives) and other fields are left out."""
    async for line in lines(reads):
        if line.startswith(b"data:"):
            yield line[len(b"data:") :].strip().decode()
