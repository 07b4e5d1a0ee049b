"""Instructions that a rule can verify, given behind a long text or in the system prompt.

The types are those of verifiable-instruction tests such as IFEval (arXiv 2311.07911); the texts,
the wordings and the checks are our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from kvtune.profilers.quality.canary import broken_output
from kvtune.profilers.quality.instruction_checks import check
from kvtune.profilers.quality.instruction_rules import COMBINED, IN_SYSTEM, MAKERS, Rule
from kvtune.profilers.quality.passages import Passage, fitting_passage, page_name
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite, SuitePlan
from kvtune.profilers.quality.texts import seeded

OUTPUT_TOKENS = 48
CHAT_TOKENS = 40
"""What a chat template and a model's own system prompt may add."""

TASK_TOKENS = 220
"""The longest task with all that is shown before it."""

ITEMS: Mapping[Size, int] = {Size.SCREEN: 1, Size.STANDARD: 12, Size.FULL: 60}
"""Items of a category."""


class Instructions(Suite):
    """Verifiable instructions, a category for each type.

    `combined` gives two or three at once and counts the share that is followed; `system` gives one
    in the system prompt, before the text, where an eviction is most likely to lose it. Broken text
    follows nothing, whatever it avoids. Item n of every category is about the same passage n, so a
    server with a prefix cache reads it once; within a category every passage is a new one.
    """

    name = "instructions"
    says = "instructions on form and wording are no longer followed"
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric("followed", "share", "higher", "difference", limit=0.05),
    )

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """Every category's items by number, about shorter passages where the plan is tight."""
        count = ITEMS[plan.size] if plan.per_category is None else plan.per_category
        room = (plan.max_tokens or math.inf) - (CHAT_TOKENS + TASK_TOKENS + OUTPUT_TOKENS)
        return tuple(
            _item(category, number, page, plan.seed)
            for number in range(count)
            if (page := fitting_passage(plan.seed, number, room)) is not None
            for category in (*MAKERS, "combined", "system")
        )

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """The share of its instructions that each answer follows."""
        return {"followed": (_followed(item, ours), _followed(item, theirs))}

    def detail(self, item: Item, answer: Answer) -> str:
        """What was not followed."""
        broken = broken_output("".join(answer.texts))
        missed = [rule["says"] for rule in item.check["rules"] if not _follows(rule, answer)]
        return broken or (f"not followed: {' '.join(missed)}" if missed else "")


def _item(category: str, number: int, page: Passage, seed: int) -> Item:
    rules = _rules(category, number, page, seeded(seed, "instructions", category, number))
    return Item(
        key=f"{category}-{number}",
        category=category,
        messages=tuple(
            {"role": role, "content": content}
            for role, content in _turns(page, rules, in_system=category == "system")
        ),
        output_tokens=OUTPUT_TOKENS,
        about=page_name(number),
        check={
            "rules": [
                {"kind": rule.kind, "parameters": dict(rule.parameters), "says": rule.says}
                for rule in rules
            ]
        },
    )


def _turns(page: Passage, rules: Sequence[Rule], *, in_system: bool) -> list[tuple[str, str]]:
    """Roles and texts: what is shown, then what is asked; the passage stands before the first."""
    said = " ".join(rule.says for rule in rules)
    main = rules[0]
    asked = [*((turn.task, turn.says) for turn in main.shown), (main.task, said)]
    tasks = [task if in_system else f"{task} {says}" for task, says in asked]
    tasks[0] = f"{page.text}\n\n{tasks[0]}"
    turns = [("system", f"Follow this rule in every answer. {said}")] if in_system else []
    for task, turn in zip(tasks, main.shown, strict=False):
        turns += [("user", task), ("assistant", turn.answer)]
    return [*turns, ("user", tasks[-1])]


def _rules(category: str, number: int, page: Passage, rng: Random) -> list[Rule]:
    if category == "combined":
        makers = COMBINED[number % len(COMBINED)]
    else:
        in_turn = IN_SYSTEM if category == "system" else MAKERS[category]
        makers = (in_turn[number % len(in_turn)],)
    return [make(rng, page) for make in makers]


def _followed(item: Item, answer: Answer) -> float:
    rules = item.check["rules"]
    return sum(_follows(rule, answer) for rule in rules) / len(rules)


def _follows(rule: Mapping[str, Any], answer: Answer) -> bool:
    text = "".join(answer.texts)
    return broken_output(text) is None and check(rule["kind"], rule["parameters"], text)
