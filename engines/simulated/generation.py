"""From the body of a request to tokens, and from tokens to the messages of its answer."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from kvtune.engines.simulated.answers import VOCABULARY, Answer, answer_to, tokenize
from kvtune.engines.simulated.http import Reply
from kvtune.engines.simulated.options import KV_DTYPES_BROKEN, Settings
from kvtune.engines.simulated.scheduler import Sequence

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
_COMPLETION_TOKENS = 16
_MALFORMED = b'data: {"choices":[{"index":0,"text":"\xff\xfe\n\n'


class Refusal(Exception):
    """A request that cannot be served; becomes an error answer in vLLM's form."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        self.payload = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and as text if it came as text."""

    tokens: list[int]
    text: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that passed all checks. `output_tokens` is how many tokens it will really get."""

    prompt: Prompt
    answer: Answer
    output_tokens: int
    max_tokens: int
    finish_reason: str
    cache_salt: str | None
    is_chat: bool
    is_stream: bool
    include_usage: bool


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        Refusal: it is something else.
    """
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"JSON decode error: {error}") from None
    if not isinstance(payload, dict):
        raise Refusal("the body must be a JSON object")
    return payload


def read_prompt(payload: dict[str, Any], *, is_chat: bool) -> Prompt:
    """The prompt of a completion, or the messages of a chat put together.

    Raises:
        Refusal: it is missing, empty, or not made of text or token ids.
    """
    name = "messages" if is_chat else "prompt"
    value = payload.get(name)
    if is_chat:
        value = _chat_text(value)
    elif isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str) and value:
        return Prompt(tokenize(value), value)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        outside = next((token for token in value if not 0 <= token < VOCABULARY), None)
        if outside is not None:
            raise Refusal(f"Token id {outside} is out of vocabulary", param=name)
        return Prompt(value, None)
    raise Refusal("The decoder prompt must be one text or list of token ids, not empty", param=name)


def _chat_text(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list that is not empty", param="messages")
    parts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise Refusal("each message needs a role and a content", param="messages")
        parts.append(f"{message['role']}: {content}")
    return "\n".join(parts)


def read_generation(body: bytes, settings: Settings, *, is_chat: bool) -> Generation:
    """Check a request the way vLLM does.

    Raises:
        Refusal: it is malformed, too long, or asks for another model.
    """
    payload = read_json(body)
    if (model := payload.get("model")) not in (None, settings.model_name):
        raise Refusal(f"The model `{model}` does not exist.", 404, "model")
    prompt = read_prompt(payload, is_chat=is_chat)
    room = settings.max_model_len - len(prompt.tokens)
    max_tokens = _whole(payload, "max_tokens", room if is_chat else _COMPLETION_TOKENS, least=1)
    if is_chat:
        max_tokens = _whole(payload, "max_completion_tokens", max_tokens, least=1)
    if max_tokens > room:
        raise Refusal(
            f"This model's maximum context length is {settings.max_model_len} tokens. However, you "
            f"requested {max_tokens} output tokens and your prompt contains {len(prompt.tokens)} "
            f"input tokens, for a total of {max_tokens + len(prompt.tokens)} tokens. Please reduce "
            "the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    min_tokens = _whole(payload, "min_tokens", 0, least=0)
    if min_tokens > max_tokens:
        raise Refusal(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )
    if _whole(payload, "n", 1, least=1) != 1:
        raise Refusal("the simulated engine gives one answer a request", param="n")
    is_stream = payload.get("stream") is True
    options = payload.get("stream_options")
    if options is not None and not (is_stream and isinstance(options, dict)):
        raise Refusal("Stream options can only be defined when `stream=True`.")
    answer = answer_to(prompt.text, prompt.tokens, broken=_is_broken(settings, prompt))
    wanted = max_tokens if payload.get("ignore_eos") is True else answer.natural_tokens
    salt = payload.get("cache_salt")
    return Generation(
        prompt=prompt,
        answer=answer,
        output_tokens=min(max(wanted, min_tokens), max_tokens),
        max_tokens=max_tokens,
        finish_reason="stop" if wanted < max_tokens else "length",
        cache_salt=salt if isinstance(salt, str) else None,
        is_chat=is_chat,
        is_stream=is_stream,
        include_usage=bool(options and options.get("include_usage")),
    )


def _whole(payload: dict[str, Any], name: str, default: int, *, least: int) -> int:
    value = payload.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise Refusal(f"{name} must be at least {least}, got {value}.", param=name)
    return value


def _is_broken(settings: Settings, prompt: Prompt) -> bool:
    """Formats that the kernels cannot store garble everything beyond the first block."""
    is_long = len(prompt.tokens) > settings.block_size
    return settings.simulate_broken_output or (
        is_long and settings.kv_cache_dtype in KV_DTYPES_BROKEN
    )


class AnswerWriter:
    """Sends the tokens of one request as they come, or all at its end.

    `malformed` cuts the first message of a stream in the middle of a character.
    """

    def __init__(
        self, generation: Generation, settings: Settings, reply: Reply, *, malformed: bool
    ) -> None:
        self._generation = generation
        self._settings = settings
        self._reply = reply
        self._malformed = malformed
        self._sent_tokens = 0
        self._created = int(time.time())
        self._head = b""
        self._tail = b""

    def open(self, number: int) -> None:
        """Begin the answer to the engine's request `number`."""
        is_chat = self._generation.is_chat
        self._id = f"chatcmpl-{number}" if is_chat else f"cmpl-{number}"
        if not self._generation.is_stream:
            return
        self._reply.open_stream()
        choice = {"index": 0, "delta": {"content": 0}} if is_chat else {"index": 0, "text": 0}
        message = self._event({**choice, "logprobs": None, "finish_reason": None})
        # Only the text of a token changes: everything around it is written once.
        mark = b'"content":' if is_chat else b'"text":'
        before, _, after = message.partition(mark + b"0")
        self._head, self._tail = before + mark, after

    def on_token(self, sequence: Sequence) -> None:
        """Send a token, and after the last one the end of the answer."""
        if not self._generation.is_stream:
            if sequence.done:
                self._send_whole(sequence)
            return
        if self._generation.is_chat and not self._sent_tokens:
            delta = {"role": "assistant", "content": ""}
            self._reply.stream(self._event({"index": 0, "delta": delta, "finish_reason": None}))
        text = json.dumps(self._generation.answer.token(self._sent_tokens)).encode()
        self._sent_tokens += 1
        if self._malformed:
            self._malformed = False
            self._reply.stream(_MALFORMED)
        elif sequence.done:
            self._end_stream(text, sequence)
        else:
            self._reply.stream(self._head + text + self._tail)

    def _end_stream(self, text: bytes, sequence: Sequence) -> None:
        reason = b'"finish_reason":"%b"' % self._generation.finish_reason.encode()
        tail = self._tail.replace(b'"finish_reason":null', reason)
        data = self._head + text + tail
        if self._generation.include_usage:
            data += self._event(None, usage=self._usage(sequence))
        self._reply.stream(data + b"data: [DONE]\n\n")
        self._reply.close_stream()

    def _send_whole(self, sequence: Sequence) -> None:
        generation = self._generation
        if self._malformed:
            self._reply.send(200, _MALFORMED, "application/json")
            return
        text = "".join(map(generation.answer.token, range(sequence.generated_tokens)))
        choice: dict[str, Any] = {"index": 0, "finish_reason": generation.finish_reason}
        if generation.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if generation.is_chat else "text_completion"
        self._reply.send_json(200, self._message(kind, [choice], self._usage(sequence)))

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._generation.is_chat else "text_completion"
        payload = self._message(kind, [] if choice is None else [choice], usage)
        return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"

    def _message(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._settings.model_name,
            "choices": choices,
            "usage": usage,
        }

    def _usage(self, sequence: Sequence) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": sequence.prompt_tokens,
            "total_tokens": sequence.known_tokens,
            "completion_tokens": sequence.generated_tokens,
            "prompt_tokens_details": None,
        }
        if self._settings.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": sequence.cached_tokens}
        return usage
