"""Yours: prompts of the user's own, from a file of JSON Lines, with checks of their own."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvtune.errors import BadInput
from kvtune.profilers.quality.judge import judge_answers, server_of
from kvtune.profilers.quality.own_checks import read_check, token_f1, worth
from kvtune.profilers.quality.suite import (
    Answer,
    Asker,
    Item,
    QualityMetric,
    Size,
    Suite,
    SuitePlan,
)
from kvtune.profilers.traces.base import Row, json_rows

KEYS = ("prompt", "messages", "reference", "check", "category", "output_tokens", "temperature")
ROLES = ("system", "user", "assistant")
DEFAULT_CATEGORY = "all"
DEFAULT_OUTPUT_TOKENS = 128

ITEMS: Mapping[Size, float] = {Size.SCREEN: 4, Size.STANDARD: 60, Size.FULL: math.inf}
"""Items of a category: the first ones of the file."""


class Yours(Suite):
    """The user's own items, one JSON object a line.

    - `prompt` (text to continue) or `messages` (a chat that ends with the user's turn): what to ask
    - `check`: what an answer has to be, one of `{"exact": text}`, `{"contains": text or texts}`,
      `{"regex": pattern}`, `{"json-schema": schema}`, `{"python": "module:function"}` and
      `{"judge": {"url", "model", "rubric", "api_key_env"}}`, or "exact" or "contains" for the
      reference
    - `reference`: a right answer; without a check, the words shared with it count (F1)
    - `category`, `output_tokens`, `temperature`: optional

    With neither check nor reference, an answer is compared with the baseline's own, by the words
    that they share; that is the figure `agreement`, and the baseline's second run says how much of
    it is chance.
    """

    name = "yours"
    says = "your own prompts no longer get the answers that you expect"
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric("score", "share", "higher", "difference", limit=0.05),
        QualityMetric("agreement", "share", "higher", "level", limit=0.7),
    )

    def __init__(self, judge: Callable[[Mapping[str, str]], Asker] = server_of) -> None:
        self._judge = judge

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """The file's items, as many of each category as the plan wants; none without a file.

        Raises:
            BadInput: a line cannot be used; the message names it.
        """
        if plan.data is None:
            return ()
        most = ITEMS[plan.size] if plan.per_category is None else plan.per_category
        found: list[Item] = []
        seen: Counter[str] = Counter()
        for row in json_rows(Path(plan.data)):
            item = _item(row)
            seen[item.category] += 1
            if seen[item.category] <= most:
                found.append(item)
        if not found:
            raise BadInput(f"{plan.data} holds no items", "Give it a line for each prompt.")
        return tuple(found)

    async def settle(self, items: Sequence[Item], answers: Sequence[Answer]) -> list[Answer]:
        """Ask the judges for their verdicts."""
        settled = list(answers)
        judged = [n for n, item in enumerate(items) if item.check.get("kind") == "judge"]
        verdicts = await judge_answers(
            [items[n].check["value"] for n in judged],
            [items[n] for n in judged],
            [answers[n] for n in judged],
            self._judge,
        )
        for number, answer in zip(judged, verdicts, strict=True):
            settled[number] = answer
        return settled

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """What both answers are worth, or how far they agree."""
        if "kind" not in item.check and "reference" not in item.check:
            return {"agreement": (token_f1(_text(ours), _text(theirs)), 1.0)}
        return {"score": (_worth(item, ours)[0], _worth(item, theirs)[0])}

    def detail(self, item: Item, answer: Answer) -> str:
        """Why the answer is not worth more."""
        return _worth(item, answer)[1]


def _text(answer: Answer) -> str:
    return "".join(answer.texts)


def _worth(item: Item, answer: Answer) -> tuple[float, str]:
    check = item.check
    if check.get("kind") == "judge":
        verdict = answer.verdict or 0.0
        return verdict, "" if verdict == 1 else f"the judge gave {10 * verdict:g} of 10"
    if "kind" in check:
        return worth(check, check["line"], _text(answer))
    if "reference" in check:
        share = token_f1(_text(answer), check["reference"])
        return share, "" if share == 1 else f"expected {check['reference']!r}"
    return 1.0, ""


def _item(row: Row) -> Item:
    for key in row.fields.keys() - set(KEYS):
        if near := difflib.get_close_matches(key, KEYS, 1, 0.75):
            row.fail(f"there is no key {key!r}", f"Did you mean {near[0]!r}?")
    if ("prompt" in row.fields) == ("messages" in row.fields):
        row.fail("exactly one of 'prompt' and 'messages' is needed")
    temperature = row.number("temperature") if "temperature" in row.fields else 0.0
    if temperature < 0:
        row.fail(f"'temperature' must be at least 0, got {temperature:g}")
    return Item(
        key=f"line-{row.line}",
        category=row.text("category") if "category" in row.fields else DEFAULT_CATEGORY,
        prompt=row.text("prompt") if "prompt" in row.fields else None,
        messages=_messages(row) if "messages" in row.fields else None,
        output_tokens=(
            row.whole("output_tokens", minimum=1)
            if "output_tokens" in row.fields
            else DEFAULT_OUTPUT_TOKENS
        ),
        temperature=temperature,
        check=_check(row),
    )


def _messages(row: Row) -> tuple[Mapping[str, str], ...]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        row.fail("'messages' must be a list that is not empty")
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            row.fail(f"each of 'messages' needs a 'content' and a 'role', {' or '.join(ROLES)}")
    if messages[-1]["role"] != "user":
        row.fail("'messages' must end with the user's turn")
    return tuple({"role": each["role"], "content": each["content"]} for each in messages)


def _check(row: Row) -> dict[str, Any]:
    reference = row.text("reference") if "reference" in row.fields else None
    found: dict[str, Any] = {} if reference is None else {"reference": reference}
    if "check" not in row.fields:
        return found
    try:
        check = read_check(row.fields["check"], reference)
    except BadInput as error:
        row.fail(error.message, error.fix)
    return {**found, **check, "line": dict(row.fields)}
