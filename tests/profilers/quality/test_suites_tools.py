import itertools
import json
import random

import jsonschema
import pytest

from kvtune.profilers.quality.suite import Answer, Item, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.tools import CATEGORIES, OPENED, Tools
from kvtune.profilers.quality.tool_words import TOOLS

SUITE = Tools()
ALARM = {"name": "set_alarm", "arguments": {"time": "07:15", "day": "Friday"}}
SCHEMA = {
    "type": "object",
    "properties": {"time": {"type": "string"}, "day": {"enum": ["Friday", "Monday"]}},
    "required": ["time", "day"],
    "additionalProperties": False,
}


def item(category: str = "turns") -> Item:
    return Item(key="k", category=category, prompt="p", check={**ALARM, "schema": SCHEMA})


def said(text: object) -> Answer:
    words = text if isinstance(text, str) else json.dumps(text)
    return Answer(texts=(words,), output_tokens=(9,), finish_reasons=("stop",))


def call(**arguments: object) -> dict[str, object]:
    return {"name": "set_alarm", "arguments": arguments}


def test_it_is_found_by_name():
    assert isinstance(suites()["tools"], Tools)


def test_a_larger_size_extends_a_smaller_one():
    sizes = [SUITE.items(SuitePlan(size=size, seed=5)) for size in Size]
    assert all(large[: len(small)] == small for small, large in itertools.pairwise(sizes))
    assert sizes[0] != SUITE.items(SuitePlan(size=Size.SCREEN, seed=6))


def test_items_have_unique_keys_and_span_several_blocks():
    items = SUITE.items(SuitePlan(per_category=20))
    assert len({each.key for each in items}) == len(items) == 20 * len(CATEGORIES)
    for each in items:
        assert len(whole(each)) > 1200  # 350 tokens and more: JSON has some 3.5 characters a token


def whole(each: Item) -> str:
    return each.prompt or "\n".join(message["content"] for message in each.messages)


def test_the_tool_that_is_asked_for_is_offered_and_its_call_is_right():
    for each in SUITE.items(SuitePlan(per_category=20)):
        assert f'"name": "{each.check["name"]}", "description"' in whole(each)
        right = json.dumps({key: each.check[key] for key in ("name", "arguments")})
        if each.category == "completion":
            assert each.prompt.endswith(OPENED)
            right = right.removeprefix(OPENED)
        assert SUITE.figures(each, said(right), said("no"))["call"] == (1, 0)


def test_each_tool_is_shown_with_values_of_its_own():
    for each in SUITE.items(SuitePlan(per_category=20)):
        if each.category == "chat":
            assert [message["role"] for message in each.messages] == ["system", "user"]
        if each.category != "turns":
            continue
        system, *turns, _ = each.messages
        calls = [json.loads(message["content"]) for message in turns[1::2]]
        listed = [line for line in system["content"].splitlines() if "description" in line]
        offered = [json.loads(line)["name"] for line in listed]
        assert [call["name"] for call in calls] == offered
        assert each.check["name"] in offered
        assert {key: each.check[key] for key in ("name", "arguments")} not in calls


@pytest.mark.parametrize("max_tokens", [200, 450, 800])
def test_fewer_tools_are_offered_where_the_plan_is_tight(max_tokens):
    items = SUITE.items(SuitePlan(per_category=4, max_tokens=max_tokens))
    assert all(len(whole(each)) / 3 + each.output_tokens <= max_tokens for each in items)
    assert bool(items) == (max_tokens > 200)
    free = SUITE.items(SuitePlan(per_category=4))
    assert all(f'"name": "{each.check["name"]}", "des' in whole(each) for each in items)
    if max_tokens == 450:
        assert max(map(len, map(whole, items))) < min(map(len, map(whole, free)))


@pytest.mark.parametrize(
    ("answer", "worth", "why"),
    [
        (ALARM, 1.0, ""),
        (f"```json\n{json.dumps(ALARM)}\n```", 1.0, ""),
        (call(time="07:15", day="Monday"), 0.875, "wrong day"),
        (call(time=" 7:15", day="Monday"), 0.75, "wrong time, day"),
        (call(time=7, day="Friday"), 0.5, "is not of type 'string'"),
        (call(time="07:15"), 0.5, "'day' is a required property"),
        (call(time="07:15", day="Friday", loud=True), 0.5, "was unexpected"),
        ({"name": "set_alarm"}, 0.5, "is not of type 'object'"),
        ({"name": "wake", "arguments": ALARM["arguments"]}, 0.25, "called 'wake'"),
        ({"tool": "set_alarm"}, 0.0, "no call"),
        (f"Sure: {json.dumps(ALARM)}", 0.0, "no call"),
        ('["set_alarm"]', 0.0, "no call"),
        ("", 0.0, "no call"),
    ],
)
def test_a_call_is_worth_the_steps_it_gets_right(answer, worth, why):
    assert SUITE.figures(item(), said(answer), said(ALARM)) == {"call": (worth, 1.0)}
    detail = SUITE.detail(item(), said(answer))
    assert why in detail
    assert bool(detail) == (worth < 1)


def test_an_opened_answer_may_go_on_after_the_call():
    rest = 'set_alarm", "arguments": {"time": "07:15", "day": "friday"}}\n\nRequest: more'
    assert SUITE.figures(item("completion"), said(rest), said("}"))["call"][1] == 0
    assert "is not one of" in SUITE.detail(item("completion"), said(rest))
    rest = rest.replace("friday", "Friday")
    assert SUITE.figures(item("completion"), said(rest), said("}"))["call"] == (1, 0)


def test_a_whole_number_is_no_truth_value():
    check = {
        "name": "light",
        "arguments": {"on": True},
        "schema": {"type": "object", "properties": {"on": {}}, "required": ["on"]},
    }
    light = Item(key="k", category="turns", prompt="p", check=check)
    one = {"name": "light", "arguments": {"on": 1}}
    assert SUITE.figures(light, said(one), said(""))["call"] == (0.75, 0)


def test_a_whole_number_may_be_written_with_a_point():
    check = {
        "name": "timer",
        "arguments": {"minutes": 5},
        "schema": {"type": "object", "properties": {"minutes": {"type": "integer"}}},
    }
    timer = Item(key="k", category="turns", prompt="p", check=check)
    written = {"name": "timer", "arguments": {"minutes": 5.0}}
    assert SUITE.figures(timer, said(written), said(""))["call"] == (1, 0)


def test_chats_about_one_call_begin_alike():
    items = {each.key: each for each in SUITE.items(SuitePlan(per_category=5))}
    for number in range(5):
        assert items[f"chat-{number}"].messages[0] == items[f"turns-{number}"].messages[0]
        assert items[f"chat-{number}"].messages[-1] == items[f"turns-{number}"].messages[-1]


def test_every_tool_draws_what_its_schema_allows_and_its_request_says():
    for tool in TOOLS:
        for seed in range(20):
            values = dict(tool.draw(random.Random(seed)))
            jsonschema.validate(values, tool.schema())
            request = tool.request.format(**values)
            said_values = [value for value in values.values() if value is not True]
            assert all(str(value) in request for value in said_values)
