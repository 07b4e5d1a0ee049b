"""Ask a running server the items of quality suites, over its OpenAI-compatible API.

Texts to score go through vLLM's `prompt_logprobs`. A server reads what its KV cache stores while it
processes a prompt, not only while it decodes: attention is given the cache and its block table in
both. Measured on vLLM 0.32's CPU backend: fp8 and a broken format show alike in scores of a prompt
that is processed at once and in chunks of 256. So scores show what such a KV format does to values.
Not every backend is like that: by its source, vLLM 0.32's TurboQuant on CUDA computes the first
chunk of a prompt from values that are not compressed yet, and scores of it would say nothing. Nor
do scores show what acts once the prompt is complete, as Quest and page eviction of kvtune's plugin
do: what is known to is not judged by scores (`kvtune.policies.unscored`). All that takes answers,
which all other suites ask for.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvtune.profilers.load.http import HttpPool
from kvtune.profilers.load.request import CHAT_PATH, COMPLETIONS_PATH
from kvtune.profilers.load.runtime import allow_connections
from kvtune.profilers.quality.suite import Answer, Item, TokenScores
from kvtune.types import Endpoint, Failure

TOKENIZE_PATH = "/tokenize"

TOP_TOKENS = 20
"""Most likely tokens whose log probabilities are asked for; vLLM gives no more by default."""

WATCH_S = 0.25

_EXCERPT_CHARACTERS = 300
_TOP_ALLOWED = re.compile(r"logprobs.*?max allowed: (\d+)")
_NOBODY_LISTENS = ("connection refused", "connection failed", "timeout: no connection")


class _Refused(Exception):
    """The request got no usable reply; the message says why."""


class ServerAsker:
    """An `Asker` for one server.

    `should_stop` is asked four times a second: once it returns a failure, or nobody listens at the
    address any more, all that is not answered yet becomes an error at once. `on_progress` is told
    how many items are answered, of how many.

    `seeds` lets sampled items have seeds. Without, a server in use is safe: vLLM 0.32 on a CPU dies
    of a request that is sampled with a seed, if its prompt is prefilled in parts.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        request_timeout_s: float = 300.0,
        should_stop: Callable[[], Failure | None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        seeds: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.seeds = seeds
        self.request_timeout_s = request_timeout_s
        self.should_stop = should_stop
        self.on_progress = on_progress

    async def ask(self, items: Sequence[Item], *, seed: int, concurrency: int) -> list[Answer]:
        """Answer every item, at most `concurrency` at a time.

        Each call has a cache salt of its own, so that nothing is answered from blocks that an
        earlier call left behind; the turns of an item, and texts of one call that begin alike, do
        share blocks. With `seeds`, each sampled item has its own, made from `seed` and its key.

        Raises:
            BadInput: the endpoint is not an address.
        """
        allow_connections(concurrency)
        pool = HttpPool.to_api(self.endpoint)
        try:
            return await _Session(self, pool, seed).answers(items, concurrency)
        finally:
            await pool.close()


class _Reply:
    """A whole response; a `Receiver` of `http`."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()
        self.error: str | None = None

    def sent(self, now_s: float) -> None:
        """Forget what a first try left."""
        self.content.clear()

    def head(self, status: int) -> None:
        """Keep the status."""
        self.status = status

    def body(self, data: bytes, now_s: float) -> None:
        """Keep the next bytes."""
        self.content += data

    def end(self, error: str | None, now_s: float) -> None:
        """Keep why the response is not complete, if it is not."""
        self.error = error

    def payload(self) -> dict[str, Any]:
        """The JSON object that came back."""
        if self.error is not None:
            raise _Refused(self.error)
        try:
            found = json.loads(self.content)
        except (ValueError, RecursionError):
            found = None
        if self.status != 200:
            raise _Refused(f"HTTP {self.status}: {_message(found, self.content)}")
        if not isinstance(found, dict):
            raise _Refused(f"malformed response: {_excerpt(self.content)}")
        return found


class _Session:
    """One call of `ask`: its connections, its salt, and why it had to stop."""

    def __init__(self, asker: ServerAsker, pool: HttpPool, seed: int) -> None:
        self._asker = asker
        self._pool = pool
        self._seed = seed
        self._shared: dict[str, Any] = {"model": asker.endpoint.model}
        if asker.endpoint.is_vllm:
            self._shared["cache_salt"] = f"kvtune-{secrets.token_hex(8)}"
        self._top_tokens = TOP_TOKENS
        self._stopped: str | None = None
        self._in_flight: set[_Reply] = set()
        self._answers: dict[int, Answer] = {}

    async def answers(self, items: Sequence[Item], concurrency: int) -> list[Answer]:
        """Answer all items."""
        watching = asyncio.create_task(self._watch())
        try:
            texts: dict[int, _Text] = {}
            reading = [
                partial(self._read_text, number, item, texts)
                for number, item in enumerate(items)
                if item.scored is not None
            ]
            await self._all(reading, concurrency, items)
            asked = [(number, item) for number, item in enumerate(items) if item.scored is None]
            # What takes longest comes first, so that the last ones do not end alone.
            asked.sort(key=lambda entry: -entry[1].output_tokens * (1 + len(entry[1].follow_ups)))
            jobs = [
                *(partial(self._score, longest, parts) for longest, parts in _shared_texts(texts)),
                *(partial(self._answer, number, item) for number, item in asked),
            ]
            await self._all(jobs, concurrency, items)
        finally:
            watching.cancel()
        return [self._answers[number] for number in range(len(items))]

    async def _all(
        self, jobs: Sequence[Callable[[], Awaitable[None]]], concurrency: int, items: Sequence[Item]
    ) -> None:
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:
                await job()
                if self._asker.on_progress is not None:
                    self._asker.on_progress(len(self._answers), len(items))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(work())

    async def _answer(self, number: int, item: Item) -> None:
        """Ask an item's turns one after the other."""
        texts: list[str] = []
        tokens: list[int] = []
        reasons: list[str] = []
        sampling = {"max_tokens": item.output_tokens, "temperature": item.temperature}
        if self._asker.seeds and item.temperature > 0:
            sampling["seed"] = zlib.crc32(f"{self._seed}/{item.key}".encode())
        try:
            for asked in _turns(item, texts):
                payload = await self._post(*asked, sampling)
                text, reason = _choice(payload)
                texts.append(text)
                reasons.append(reason)
                tokens.append(_completion_tokens(payload))
        except _Refused as refused:
            self._answers[number] = Answer(error=str(refused))
        else:
            self._answers[number] = Answer(tuple(texts), tuple(tokens), tuple(reasons))

    async def _read_text(self, number: int, item: Item, texts: dict[int, _Text]) -> None:
        """Learn the token ids of a text to score, and where the part that counts begins."""
        try:
            if item.messages is not None:
                messages = {"messages": list(item.messages), "add_generation_prompt": True}
                given = await self._token_ids(messages)
                scored = {"prompt": item.scored, "add_special_tokens": False}
                whole = given + await self._token_ids(scored)
            else:
                given = await self._token_ids({"prompt": item.prompt}) if item.prompt else []
                whole = await self._token_ids({"prompt": (item.prompt or "") + (item.scored or "")})
        except _Refused as refused:
            self._answers[number] = Answer(error=str(refused))
            return
        shared = _common(given, whole)
        if len(whole) <= max(shared, 1):
            self._answers[number] = Answer(error="the text has no token to score")
        else:
            texts[number] = _Text(tuple(whole), max(shared, 1))

    async def _token_ids(self, content: Mapping[str, Any]) -> list[int]:
        found = (await self._post(TOKENIZE_PATH, content, {})).get("tokens")
        if not isinstance(found, list):
            raise _Refused("the server does not say how it tokenizes a text")
        return found

    async def _score(self, longest: tuple[int, ...], parts: Mapping[int, _Text]) -> None:
        """Score a text once for all items that are parts of it."""
        asked = {"prompt": list(longest), "max_tokens": 1, "temperature": 0.0}
        try:
            payload = await self._post_scoring(asked)
            scores = _prompt_scores(payload, longest, self._top_tokens)
        except _Refused as refused:
            self._answers |= dict.fromkeys(parts, Answer(error=str(refused)))
            return
        for number, text in parts.items():
            part = slice(text.first - 1, len(text.token_ids) - 1)
            self._answers[number] = Answer(
                scores=TokenScores(scores.token_ids[part], scores.logprobs[part], scores.top[part])
            )

    async def _post_scoring(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._post(COMPLETIONS_PATH, asked, {"prompt_logprobs": self._top_tokens})
        except _Refused as refused:
            allowed = _TOP_ALLOWED.search(str(refused))
            if allowed is None or not 0 < int(allowed[1]) < self._top_tokens:
                raise
        self._top_tokens = int(allowed[1])
        return await self._post(COMPLETIONS_PATH, asked, {"prompt_logprobs": self._top_tokens})

    async def _post(
        self, path: str, content: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self._stopped is not None:
            raise _Refused(self._stopped)
        shared = self._shared if path != TOKENIZE_PATH else {"model": self._shared["model"]}
        body = json.dumps({**shared, **content, **sampling}, default=dict).encode()
        reply = _Reply()
        self._in_flight.add(reply)
        try:
            async with asyncio.timeout(self._asker.request_timeout_s):
                await self._pool.exchange(self._pool.post_json(path, body), reply)
        except TimeoutError:
            limit_s = self._asker.request_timeout_s
            raise _Refused(f"timeout: not complete after {limit_s:g} s") from None
        finally:
            self._in_flight.discard(reply)
        if reply.error is not None and reply.error.startswith(_NOBODY_LISTENS):
            self._stop(reply.error)
        return reply.payload()

    async def _watch(self) -> None:
        while self._asker.should_stop is not None:
            if (failure := self._asker.should_stop()) is not None:
                self._stop(f"stopped: {failure.message}")
                return
            await asyncio.sleep(WATCH_S)

    def _stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason
        for reply in tuple(self._in_flight):
            self._pool.abort(reply, self._stopped)


class _Text:
    """A text to score: its tokens, and the index of the first one that counts (at least 1)."""

    __slots__ = ("first", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], first: int) -> None:
        self.token_ids = token_ids
        self.first = first


def _shared_texts(
    texts: Mapping[int, _Text],
) -> Iterator[tuple[tuple[int, ...], dict[int, _Text]]]:
    """Each text that no other one continues, with the items whose texts it begins with."""
    left = sorted(texts.items(), key=lambda entry: -len(entry[1].token_ids))
    while left:
        longest = left[0][1].token_ids
        parts = {n: t for n, t in left if longest[: len(t.token_ids)] == t.token_ids}
        left = [entry for entry in left if entry[0] not in parts]
        yield longest, parts


def _turns(item: Item, texts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and content of each turn; `texts` are the answers so far, read when it is due."""
    if item.messages is None:
        prompt = item.prompt or ""
        yield COMPLETIONS_PATH, {"prompt": prompt}
        for number, follow_up in enumerate(item.follow_ups):
            prompt += texts[number] + follow_up
            yield COMPLETIONS_PATH, {"prompt": prompt}
        return
    messages: list[Mapping[str, str]] = list(item.messages)
    yield CHAT_PATH, {"messages": messages}
    for number, follow_up in enumerate(item.follow_ups):
        messages = [
            *messages,
            {"role": "assistant", "content": texts[number]},
            {"role": "user", "content": follow_up},
        ]
        yield CHAT_PATH, {"messages": messages}


def _choice(payload: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a response and why it ended."""
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _Refused("malformed response: it holds no choice")
    choice = choices[0]
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else "", str(choice.get("finish_reason") or "")


def _completion_tokens(payload: Mapping[str, Any]) -> int:
    usage = payload.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(count, int):
        raise _Refused("malformed response: it does not say how many tokens were generated")
    return count


def _prompt_scores(
    payload: Mapping[str, Any], token_ids: Sequence[int], top_tokens: int
) -> TokenScores:
    """The scores of all tokens but the first."""
    choices = payload.get("choices") or [{}]
    entries = choices[0].get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise _Refused("the server gives no log probabilities of the prompt")
    logprobs, top = [], []
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        try:
            logprobs.append(float(entry[str(token_id)]["logprob"]))
            top.append(
                {
                    int(name): float(score["logprob"])
                    for name, score in entry.items()
                    if score["rank"] <= top_tokens
                }
            )
        except (KeyError, TypeError, ValueError):
            raise _Refused("malformed log probabilities of the prompt") from None
    return TokenScores(tuple(token_ids[1:]), tuple(logprobs), tuple(top))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _message(found: object, content: bytes | bytearray) -> str:
    if isinstance(found, dict):
        error = found.get("error") or found.get("detail") or found
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])[:_EXCERPT_CHARACTERS]
    return _excerpt(content) or "no body"


def _excerpt(content: bytes | bytearray) -> str:
    return " ".join(bytes(content[:_EXCERPT_CHARACTERS]).decode(errors="replace").split())
