"""Tools: calls of functions that must parse, name the right one, and carry what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any, ClassVar

from kvtune.profilers.quality.instruction_checks import parse_json
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite, SuitePlan
from kvtune.profilers.quality.texts import most_tokens, seeded
from kvtune.profilers.quality.tool_words import TOOLS, Tool

OUTPUT_TOKENS = 48
OFFERED = 6
"""Tools of an item: their schemas are 350 to 450 tokens, several blocks of a cache."""

LEAST_OFFERED = 2
ITEMS: Mapping[Size, int] = {Size.SCREEN: 2, Size.STANDARD: 30, Size.FULL: 120}
"""Items of a category."""

OPENED = '{"name": "'
"""How the answer of a completion begins, so that a model need not know what is wanted."""

CATEGORIES = ("completion", "chat", "turns")
_RULE = (
    "You call tools. Answer with one JSON object and nothing else, like "
    '{"name": "the tool", "arguments": {"parameter": "value"}}.\n\nThe tools are:\n'
)
_STEPS = 4


class Tools(Suite):
    """Calls of functions.

    `completion` continues a text of requests and calls, one for each tool, whose last call is
    opened. In a chat, the system prompt has the tools; in `turns` earlier turns call each of them
    with other values, and `chat` shows no call. Small models make none then, and have nothing to
    lose there; to larger ones it is the usual case. A call earns a quarter each for parsing, for
    the right tool, for arguments that fit its schema, and for the share of values that are right; a
    later quarter needs the earlier ones. Item n of every category asks for the same call, and the
    chats begin alike, so a server with a prefix cache reads their tools once.
    """

    name = "tools"
    says = "calls of functions no longer parse, or carry wrong values"
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric("call", "share", "higher", "difference", limit=0.05),
    )

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """Every category's items by number; fewer tools are offered where the plan is tight."""
        count = ITEMS[plan.size] if plan.per_category is None else plan.per_category
        return tuple(
            item
            for number in range(count)
            for category in CATEGORIES
            if (item := _fitting(plan, category, number)) is not None
        )

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """What each call is worth."""
        return {"call": (_worth(item, ours)[0], _worth(item, theirs)[0])}

    def detail(self, item: Item, answer: Answer) -> str:
        """What is wrong with the call."""
        return _worth(item, answer)[1]


def _fitting(plan: SuitePlan, category: str, number: int) -> Item | None:
    for offered in range(OFFERED, LEAST_OFFERED - 1, -1):
        item = _item(plan.seed, category, number, offered)
        text = item.prompt or "".join(message["content"] for message in item.messages or ())
        if plan.max_tokens is None or most_tokens(text) + OUTPUT_TOKENS <= plan.max_tokens:
            return item
    return None


def _item(seed: int, category: str, number: int, offered: int) -> Item:
    rng = seeded(seed, "tools", number)
    asked, *others = rng.sample(TOOLS, OFFERED)
    values = dict(asked.draw(rng))
    tools = rng.sample([asked, *others][:offered], offered)
    shown = [(tool, _other_values(tool, values if tool is asked else {}, rng)) for tool in tools]
    listed = "\n".join(_listed(tool) for tool in tools)
    request = asked.request.format(**values)
    common: dict[str, Any] = {
        "key": f"{category}-{number}",
        "category": category,
        "output_tokens": OUTPUT_TOKENS,
        "about": f"tools/{number}",
        "check": {"name": asked.name, "arguments": values, "schema": asked.schema()},
    }
    calls = [(tool.request.format(**drawn), _call(tool, drawn)) for tool, drawn in shown]
    if category == "completion":
        told = [f"Request: {question}\nCall: {call}" for question, call in calls]
        lines = [f"These are the tools:\n{listed}", *told, f"Request: {request}\nCall: {OPENED}"]
        return Item(prompt="\n\n".join(lines), **common)
    turns = [("system", _RULE + listed)]
    for question, call in calls if category == "turns" else []:
        turns += [("user", question), ("assistant", call)]
    messages = [*turns, ("user", request)]
    return Item(
        messages=tuple({"role": role, "content": content} for role, content in messages), **common
    )


def _other_values(tool: Tool, values: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    """Values for an example, none of them the one that is asked for where there is a choice."""
    drawn = [dict(tool.draw(rng)) for _ in range(8)]
    return min(drawn, key=lambda each: sum(each[name] == value for name, value in values.items()))


def _listed(tool: Tool) -> str:
    described = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {name: dict(rule) for name, rule in tool.parameters.items()},
    }
    return json.dumps(described)


def _call(tool: Tool, values: Mapping[str, Any]) -> str:
    return json.dumps({"name": tool.name, "arguments": dict(values)})


def _worth(item: Item, answer: Answer) -> tuple[float, str]:
    """What a call earns, and what is wrong with it."""
    text = "".join(answer.texts)
    call = _opened(text) if item.category == "completion" else parse_json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 0.0, "no call that parses"
    wanted = item.check
    if call["name"] != wanted["name"]:
        return 1 / _STEPS, f"called {call['name']!r} instead of {wanted['name']!r}"
    given: Any = call.get("arguments")
    if problem := _misfit(given, wanted["schema"]):
        return 2 / _STEPS, problem
    right = [name for name, value in wanted["arguments"].items() if _same(given[name], value)]
    wrong = [name for name in wanted["arguments"] if name not in right]
    share = len(right) / len(wanted["arguments"])
    return (3 + share) / _STEPS, f"wrong {', '.join(wrong)}" if wrong else ""


def _opened(text: str) -> Any:
    """The first JSON value of a completion; what follows it is not looked at."""
    try:
        return json.JSONDecoder().raw_decode(OPENED + text)[0]
    except (ValueError, RecursionError):
        return None


def _misfit(arguments: Any, schema: Mapping[str, Any]) -> str:
    from jsonschema import Draft202012Validator

    error = next(Draft202012Validator(schema).iter_errors(arguments), None)
    return "" if error is None else error.message


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, str) and isinstance(wanted, str):
        return given.strip().casefold() == wanted.strip().casefold()
    return isinstance(given, bool) is isinstance(wanted, bool) and bool(given == wanted)
