"""Split a byte stream into server-sent events, wherever the network cut it."""

from __future__ import annotations

EVENT_LIMIT_BYTES = 16 * 1024 * 1024


class EventSplitter:
    r"""Collects bytes and returns the data of each event as soon as its blank line is there.

    Lines may end in `\n`, `\r\n` or `\r`; comments and fields other than `data` are left out.
    """

    __slots__ = ("_skip_newline", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._skip_newline = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes, in order.

        Raises:
            ValueError: an event does not end within `EVENT_LIMIT_BYTES`.
        """
        # Nearly every read is one whole one-line event; the general way costs three times as much.
        if (
            not self._tail
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and b"\r" not in data
        ):
            return [data[6:-2]]
        pieces = (self._tail + self._normalize(data)).split(b"\n\n")
        self._tail = pieces.pop()
        if len(self._tail) > EVENT_LIMIT_BYTES:
            raise ValueError(f"an event is longer than {EVENT_LIMIT_BYTES} bytes")
        return [content for piece in pieces if (content := _data(piece)) is not None]

    def finish(self) -> bytes | None:
        """Return the data of an event that the stream ended without closing, if there is one."""
        tail, self._tail = self._tail, b""
        return _data(tail)

    def _normalize(self, data: bytes) -> bytes:
        r"""Turn every line ending into `\n`; a `\r\n` may be cut in two by the network."""
        if self._skip_newline and data.startswith(b"\n"):
            data = data[1:]
            self._skip_newline = False
        if data:
            self._skip_newline = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data


def _data(event: bytes) -> bytes | None:
    lines = [
        line[6:] if line.startswith(b"data: ") else line[5:]
        for line in event.split(b"\n")
        if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None
