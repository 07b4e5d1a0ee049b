"""The canary: three long prompts that a KV cache which returns wrong values cannot answer.

Some settings start, serve short prompts perfectly and report more capacity, yet hand back garbage
as soon as a prompt spans several cache blocks. The canary hides a fact at the start of a long text
and asks for it at the end, so the answer depends on values read from old blocks. It guards against
broken caches; it doesn't measure quality. Who answers without a part of a long context may lose
the fact with nothing broken: there only degenerate texts are held against it, and what it forgets
is for suites to judge. Where none of the three fits into the context, a shorter one is asked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtune.profilers.quality.texts import most_tokens
from kvtune.types import AnswerFault, Request

ANSWER_TOKENS = 24
"""Long enough for the number and the start of a sentence, too short for a model to ramble."""

LOOP_SHARE = 0.6
"""Share of a text that one repeated 1- to 4-gram may cover before it counts as a loop."""

LONGEST_LOOP = 4
LEAST_UNITS = 8
"""Texts with fewer words than this are too short to call a repetition a loop."""

UNREADABLE_SHARE = 0.1
"""Share of replacement or control characters above which a text is garbage; one split character at
the end of a cut answer stays far below it."""

_NAMES = (
    "Ivo",
    "Tessa",
    "Bram",
    "Odile",
    "Karel",
    "Mirte",
    "Juno",
    "Lars",
    "Wanda",
    "Pim",
    "Greet",
)
_PLACES = ("mill", "chapel", "harbour", "orchard", "barn", "well", "bridge", "market", "kiln")
_THINGS = (
    "brass key",
    "red lamp",
    "torn map",
    "clay jug",
    "wool coat",
    "tin whistle",
    "glass bead",
    "iron hook",
    "paper kite",
    "leather strap",
    "wooden spoon",
    "silver coin",
    "straw hat",
)
_WEATHERS = ("rain", "fog", "sunshine", "frost", "a warm wind", "heavy snow", "thunder")


@dataclass(frozen=True, slots=True)
class _Story:
    """A text of `lines` generated sentences around one `fact`, and the question about it."""

    name: str
    opening: str
    fact: str
    line: str
    lines: int
    question: str
    expected: str

    def prompt(self) -> str:
        """The whole text: opening, a few lines, the fact, the other lines, the question."""
        told = [
            self.line.format(
                day=number + 1,
                name=_NAMES[number * 4 % len(_NAMES)],
                other=_NAMES[(number * 4 + 5) % len(_NAMES)],
                place=_PLACES[number * 5 % len(_PLACES)],
                thing=_THINGS[number * 6 % len(_THINGS)],
                weather=_WEATHERS[number * 3 % len(_WEATHERS)],
            )
            for number in range(self.lines)
        ]
        return " ".join([self.opening, *told[:2], self.fact, *told[2:], self.question])


_STORIES = (
    _Story(
        name="diary",
        opening="This is the diary of a small village.",
        fact="Ida painted the number 7194 on the green door, and nobody knew why.",
        line="On day {day}, {name} found a {thing} at the {place}, and there was {weather}.",
        lines=32,
        question=(
            "\n\nQuestion: What number did Ida paint on the green door?\n"
            "Answer: Ida painted the number"
        ),
        expected="7194",
    ),
    _Story(
        name="inventory",
        opening="This is the inventory of an old house, room by room.",
        fact="The secret code of the blue safe is 5823, written on the wall by Nelle.",
        line="In room {day} there is a {thing} from the {place}, which {name} gave to {other}.",
        lines=46,
        question=(
            "\n\nQuestion: What is the secret code of the blue safe?\n"
            "Answer: The secret code of the blue safe is"
        ),
        expected="5823",
    ),
    _Story(
        name="letters",
        opening="These are notes for the postman of the valley.",
        fact="The train to the coast is train number 3461, and it leaves at dawn.",
        line=(
            "Letter {day} goes from {name} at the {place} to {other}, who asked for a {thing} "
            "in spite of {weather}."
        ),
        lines=56,
        question=(
            "\n\nQuestion: What is the number of the train to the coast?\n"
            "Answer: The train to the coast is train number"
        ),
        expected="3461",
    ),
)

_SHORT = _Story(
    name="log",
    opening="This is the log of a small harbour.",
    fact="The lighthouse was built with 2956 stones, and Rinus counted them twice.",
    line="In week {day}, {name} brought a {thing} to the {place}, and there was {weather}.",
    lines=12,
    question=(
        "\n\nQuestion: With how many stones was the lighthouse built?\n"
        "Answer: The lighthouse was built with"
    ),
    expected="2956",
)
"""Of some 300 tokens: several blocks, but fewer old ones to read wrong values from."""


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """What one canary prompt got back; `garbage` says why the text is degenerate, if it is.

    `most_tokens` are no fewer than the prompt and the answer have.
    """

    name: str
    most_tokens: int
    expected: str
    text: str
    right: bool
    garbage: str | None


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The answers to all canary prompts, in the order of `canary_requests`."""

    answers: tuple[CanaryAnswer, ...]


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """Whether a candidate may be trusted with long prompts, with both sets of answers.

    `uninformative` means that the baseline could not answer either, or that nothing was asked of
    both: nothing was proved.
    """

    outcome: Literal["ok", "broken", "uninformative"]
    reasons: tuple[str, ...]
    candidate: CanaryReport
    baseline: CanaryReport


def canary_requests(max_model_len_tokens: int | None = None) -> tuple[Request, ...]:
    """The prompts, always the same: 700, 1,000 and 1,500 tokens for common tokenizers.

    Those that may not fit into `max_model_len_tokens` are left out, longest first; where none does,
    there is one of 300 tokens, if that fits.
    """
    return tuple(
        Request(prompt=story.prompt(), output_tokens=ANSWER_TOKENS)
        for story in _fitting(max_model_len_tokens)
    )


async def run_canary(
    ask: Callable[[Request], Awaitable[str]], max_model_len_tokens: int | None = None
) -> CanaryReport:
    """Ask every canary prompt that fits, one at a time, and grade the answers.

    `ask` sends one request at temperature 0 and returns the completion's text; what it raises
    passes through.
    """
    texts = [await ask(request) for request in canary_requests(max_model_len_tokens)]
    return grade_canary(texts, max_model_len_tokens)


def grade_canary(texts: Sequence[str], max_model_len_tokens: int | None = None) -> CanaryReport:
    """Grade texts that came back for the prompts of `canary_requests`, in that order."""
    return CanaryReport(
        tuple(
            CanaryAnswer(
                name=story.name,
                most_tokens=_tokens(story),
                expected=story.expected,
                text=text,
                right=re.search(rf"(?<!\d){story.expected}(?!\d)", text) is not None,
                garbage=broken_output(text),
            )
            for story, text in zip(_fitting(max_model_len_tokens), texts, strict=False)
        )
    )


def judge_canary(
    candidate: CanaryReport, baseline: CanaryReport, *, whole_tokens: int | None = None
) -> CanaryVerdict:
    """Compare a candidate's answers with those of the stock configuration.

    Broken: a fact that the baseline got right is lost, or a text is degenerate where the
    baseline's is not. A model whose baseline fails every prompt proves nothing. Prompts that only
    one of them could take are not compared. Beyond `whole_tokens` the candidate does without a part
    of the context by design: it may lose facts there, and only degenerate texts count.
    """

    def recalls(answer: CanaryAnswer) -> bool:
        return whole_tokens is None or answer.most_tokens <= whole_tokens

    known = {answer.name: answer for answer in baseline.answers}
    compared = [(ours, known[ours.name]) for ours in candidate.answers if ours.name in known]
    reasons = []
    for ours, theirs in compared:
        if recalls(ours) and theirs.right and not ours.right:
            reasons.append(
                f"{ours.name}: the baseline found {ours.expected!r} in a long prompt, "
                f"this configuration answered {ours.text.strip()[:60]!r}"
            )
        elif ours.garbage is not None and theirs.garbage is None:
            reasons.append(f"{ours.name}: {ours.garbage}, the baseline's answer is sane")
    if reasons:
        return CanaryVerdict("broken", tuple(reasons), candidate, baseline)
    if any(theirs.right if recalls(theirs) else theirs.garbage is None for _, theirs in compared):
        return CanaryVerdict("ok", (), candidate, baseline)
    if not compared:
        reason = (
            "no canary prompt fits into max-model-len: cannot vouch for settings that may change "
            f"answers; raise it to {_tokens(_SHORT)} tokens or more"
        )
    elif all(recalls(theirs) for _, theirs in compared):
        reason = (
            "the baseline itself answers no canary prompt: "
            "cannot vouch for near-lossless settings on this model"
        )
    else:
        reason = (
            "the baseline's own answers to canary prompts are degenerate: "
            "cannot vouch for settings that may change answers on this model"
        )
    return CanaryVerdict("uninformative", (reason,), candidate, baseline)


def _fitting(max_model_len_tokens: int | None) -> tuple[_Story, ...]:
    """The stories that are asked in such a context."""
    if max_model_len_tokens is None:
        return _STORIES
    long, short = (
        tuple(story for story in stories if _tokens(story) <= max_model_len_tokens)
        for stories in (_STORIES, (_SHORT,))
    )
    return long or short


def _tokens(story: _Story) -> int:
    """What a story and its answer take at most."""
    return most_tokens(story.prompt()) + ANSWER_TOKENS


def broken_output(text: str) -> str | None:
    """Why a model's text is degenerate: empty, unreadable, or a loop; `None` when it is not.

    Only for answers to natural prompts: a small model that is given random tokens repeats itself
    legitimately. A false alarm is possible, so compare with the baseline's text.
    """
    found = fault_of(text)
    return None if found is None else found[1]


def fault_of(text: str) -> tuple[AnswerFault, str] | None:
    """The kind of `broken_output` and its reason."""
    if not text.strip():
        return "empty", "the output is empty"
    unreadable = sum(
        char == "\ufffd" or not (char.isprintable() or char.isspace()) for char in text
    )
    if unreadable > 1 and unreadable / len(text) > UNREADABLE_SHARE:
        return "unreadable", f"{unreadable} of {len(text)} characters are unreadable"
    loop = _loop(text)
    return None if loop is None else ("looping", loop)


def _loop(text: str) -> str | None:
    units = text.split()
    if len(units) < LEAST_UNITS <= len(text.strip()) / LEAST_UNITS:
        units = list(text.strip())  # scripts without spaces, or one endless word
    if len(units) < LEAST_UNITS:
        return None
    for length in range(1, LONGEST_LOOP + 1):
        run = longest = 0
        for index in range(length, len(units)):
            run = run + 1 if units[index] == units[index - length] else 0
            longest = max(longest, run)
        covered = longest + length
        if longest >= 2 * length and covered / len(units) > LOOP_SHARE:  # said three times
            return f"{covered} of {len(units)} words repeat the same {length}"
    return None
