"""A judge: a model at any OpenAI-compatible endpoint that says what an answer is worth.

The only checks that need the network. They are asked once, when an answer is fresh
(`Suite.settle`), and the verdict is kept with it, so that comparing stays pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from kvtune.address import read_address
from kvtune.errors import BadInput
from kvtune.profilers.quality.suite import Answer, Asker, Item
from kvtune.types import Endpoint

CONCURRENCY = 4
TIMEOUT_S = 60.0
OUTPUT_TOKENS = 256

KEYS = ("url", "model", "rubric", "api_key_env")
_NEEDED = KEYS[:3]

_SYSTEM = (
    "You judge an answer by this rubric:\n{rubric}\n\n"
    "Think briefly. Then end with a line of its own: VERDICT: yes, VERDICT: no, or VERDICT: and a "
    "number from 0 (useless) to 10 (perfect)."
)
_VERDICT = re.compile(r"verdict\W{1,6}(?:(yes|no)\b|(\d+(?:\.\d+)?))", re.IGNORECASE)


def read_judge(value: object) -> dict[str, str]:
    """A judge as its address, model and rubric, and the name of the variable with its key.

    Raises:
        BadInput: one of them is missing or unknown, the address cannot be used or holds a secret,
            or the variable is not set.
    """
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadInput(f"a judge is an object of texts with {', '.join(KEYS)}, got {value!r:.60}")
    unknown = [key for key in value if key not in KEYS]
    missing = [key for key in _NEEDED if not value.get(key)]
    if unknown or missing:
        raise BadInput(
            f"a judge has no {', '.join(map(repr, unknown))}"
            if unknown
            else f"a judge needs {', '.join(map(repr, missing))}",
            f"Its keys are {', '.join(KEYS)}; the last is only needed where a key is.",
        )
    if "@" in urlsplit(value["url"]).netloc:
        raise BadInput(
            "the judge's address holds a password, which would be stored with the items",
            "Put a key into an environment variable, and name it in 'api_key_env'.",
        )
    read_address(value["url"])
    variable = value.get("api_key_env")
    if variable and not os.environ.get(variable):
        raise BadInput(f"the environment variable {variable} is not set")
    return dict(value)


def server_of(judge: Mapping[str, str]) -> Asker:
    """The server of a judge, ready to be asked."""
    from kvtune.profilers.quality.server_asker import ServerAsker

    variable = judge.get("api_key_env")
    key = os.environ.get(variable, "") if variable else ""
    endpoint = Endpoint(
        url=read_address(judge["url"]).url,
        model=judge["model"],
        is_vllm=False,
        # Without an authorization of its own, the key of the server under test would be sent.
        authorization=f"Bearer {key or 'none'}",
    )
    return ServerAsker(endpoint, request_timeout_s=TIMEOUT_S)


async def judge_answers(
    judges: Sequence[Mapping[str, str]],
    items: Sequence[Item],
    answers: Sequence[Answer],
    ask: Callable[[Mapping[str, str]], Asker] = server_of,
) -> list[Answer]:
    """The answers with verdicts; `judges[n]` judges answer n to item n.

    A judge that fails or gives no verdict makes its answer one with an error.
    """
    settled = list(answers)
    waiting = [number for number, answer in enumerate(answers) if answer.error is None]
    while waiting:
        judge = judges[waiting[0]]
        same = [number for number in waiting if _server(judges[number]) == _server(judge)]
        waiting = [number for number in waiting if number not in same]
        questions = [_question(judges[n], items[n], answers[n]) for n in same]
        replies = await ask(judge).ask(questions, seed=0, concurrency=CONCURRENCY)
        for number, reply in zip(same, replies, strict=True):
            settled[number] = _settled(answers[number], reply)
    return settled


def read_verdict(text: str) -> float | None:
    """The last verdict of a judge's reply, from 0 to 1; `None` when there is none."""
    found = _VERDICT.findall(text)
    if not found:
        return None
    word, number = found[-1]
    if word:
        return float(word.lower() == "yes")
    return float(number) / 10 if float(number) <= 10 else None


def _server(judge: Mapping[str, str]) -> tuple[Any, ...]:
    return tuple(judge.get(key) for key in ("url", "model", "api_key_env"))


def _question(judge: Mapping[str, str], item: Item, answer: Answer) -> Item:
    asked = item.prompt or "\n\n".join(
        f"{message['role']}: {message['content']}" for message in item.messages or ()
    )
    parts = [f"The question was:\n{asked}"]
    if reference := item.check.get("reference"):
        parts.append(f"A right answer is:\n{reference}")
    parts.append(f"The answer to judge is:\n{''.join(answer.texts)}")
    return Item(
        key=item.key,
        category=item.category,
        messages=(
            {"role": "system", "content": _SYSTEM.format(rubric=judge["rubric"])},
            {"role": "user", "content": "\n\n".join(parts)},
        ),
        output_tokens=OUTPUT_TOKENS,
    )


def _settled(answer: Answer, reply: Answer) -> Answer:
    if reply.error is not None:
        return Answer(error=f"the judge failed: {reply.error}")
    text = "".join(reply.texts)
    if (verdict := read_verdict(text)) is None:
        return Answer(error=f"the judge gave no verdict, but said {text.strip()[-60:]!r}")
    return replace(answer, verdict=verdict)
