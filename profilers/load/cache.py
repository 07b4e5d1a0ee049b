"""Empty a server's prefix cache, where its engine offers that."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from kvtune.profilers.load.http import HttpPool
from kvtune.types import Endpoint

_RESET = "/reset_prefix_cache?reset_external=true"
RETRY_S = 0.1
_TRIES = 10

SILENT_S = 30.0
"""After so long without an answer the engine hangs; the load that comes next finds that out."""


async def reset_prefix_cache(endpoint: Endpoint, *, silent_s: float = SILENT_S) -> bool:
    """Empty the prefix cache, with what host memory and disks hold behind it.

    Returns whether that was done, and was said within `silent_s`.

    Refused for as long as a block is held, so it is asked for again for a second. vLLM has the
    route only in its development mode.
    """
    pool = HttpPool.to_api(endpoint)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(silent_s):
                for _ in range(_TRIES):
                    answer = _Answer()
                    await pool.exchange(pool.post_json(_RESET, b""), answer)
                    if answer.status != 200 or answer.succeeded:
                        return answer.status == 200
                    await asyncio.sleep(RETRY_S)
    finally:
        await pool.close()
    return False


class _Answer:
    """Receives a short JSON answer; a `Receiver` of `http`."""

    def __init__(self) -> None:
        self.status = 0
        self._content = b""

    @property
    def succeeded(self) -> bool:
        """Whether it says so; older servers answer with nothing when they did."""
        try:
            return bool(json.loads(self._content or b"{}").get("success", True))
        except (ValueError, AttributeError):
            return False

    def sent(self, now_s: float) -> None: ...

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_s: float) -> None:
        self._content += data

    def end(self, error: str | None, now_s: float) -> None:
        self.status = self.status if error is None else 0
