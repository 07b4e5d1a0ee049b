"""Fidelity: what the model thinks of given texts, beside what the baseline thinks of them.

Nothing is generated: each token of a text is scored with all tokens before it given (teacher
forcing), so one early difference cannot carry the rest away, and every token is evidence. Parts of
a text are told apart by their place in the context, because damage to old values shows only where
much lies between a token and what it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice, pairwise, zip_longest
from typing import ClassVar

from kvtune.profilers.quality.suite import (
    Answer,
    Item,
    QualityMetric,
    Size,
    Suite,
    SuitePlan,
    TokenScores,
)
from kvtune.profilers.quality.texts import VOCABULARIES, filler, most_tokens_of_any, seeded

CUTS_TOKENS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Where the parts of a text begin, in tokens as English usually has them."""

TEXTS = {Size.SCREEN: 4, Size.STANDARD: 16, Size.FULL: 40}
LONGEST_TOKENS = {Size.SCREEN: 1024, Size.STANDARD: 2048, Size.FULL: 8192}

TOKEN_BYTES = VOCABULARIES["en"].typical_characters
"""What a token usually takes of a text in UTF-8: as English, and scripts with more bytes a
character have more tokens a character."""

LONG_WORD_CHARACTERS = 60

LEAST_TOKENS = 64
"""A shorter part says too little about its place."""

SECTION_TOKENS = 256
RETOLD_SHARE = 0.25
"""Share of each section that says again what stands anywhere before it: predicting that takes
values from far back, where new sentences take little more than the last words."""

LEAST_PROBABILITY = 1e-6
"""What a bucket that is empty but for rounding counts as."""

KL_LIMIT_NATS = 0.02
"""By Pinsker's inequality two distributions that far apart differ by at most 0.1 in total
variation: no more than one token in ten would be sampled otherwise. On SmolLM2-135M, vLLM 0.32 on
CPU, bfloat16 differs from itself by under 0.0005 with other chunk sizes, fp8 by 0.01 to 0.017, and
a broken format (int8_per_token_head) by 2.5."""

TOP1_LIMIT = 0.85
"""A guard against large changes only, because near ties flip without harm: with fp8 on the same
server 0.91 to 0.97 of tokens agree, with that broken format 0.01 to 0.06."""

LOG_PERPLEXITY_LIMIT_NATS = 0.05
"""A perplexity that is a twentieth higher."""

SPREADS = {"kl": 0.002, "top1": 0.015, "log-perplexity": 0.01}
"""How far a part of a text lies from others: the standard deviation over parts of what fp8 did
there (0.0015 to 0.0024, 0.01 to 0.02, 0.006 to 0.011). A part is a mean over hundreds of tokens, so
four texts that all show next to nothing are evidence: they leave two thirds of a spread open."""


class Fidelity(Suite):
    """Divergence from the baseline's next-token distributions, by place in the context."""

    name: ClassVar[str] = "fidelity"
    says: ClassVar[str] = "the model no longer thinks the same of given texts"
    scores: ClassVar[bool] = True
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric(
            "kl", "nats", "lower", "level", KL_LIMIT_NATS, bounds=None, spread=SPREADS["kl"]
        ),
        QualityMetric(
            "top1", "share", "higher", "level", TOP1_LIMIT, bounds=None, spread=SPREADS["top1"]
        ),
        QualityMetric(
            "log-perplexity",
            "nats",
            "lower",
            "difference",
            LOG_PERPLEXITY_LIMIT_NATS,
            bounds=None,
            spread=SPREADS["log-perplexity"],
        ),
    )

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """Parts of texts: the workload's prompts and generated ones take turns.

        Each part is an item whose `prompt` is all of its text before it, so an asker can score the
        parts of a text in one go.
        """
        wanted = plan.per_category or TEXTS[plan.size]
        longest = LONGEST_TOKENS[plan.size]
        room = plan.max_tokens - 1 if plan.max_tokens is not None else longest * 2
        generated = ((f"text-{n}", _text(plan.seed, n, longest)) for n in range(wanted))
        own = ((f"prompt-{n}", prompt) for n, prompt in enumerate(plan.workload))
        mixed = (text for pair in zip_longest(own, generated) for text in pair if text is not None)
        whole = (parts for key, text in mixed if (parts := _parts(key, text, longest, room)))
        return tuple(item for parts in islice(whole, wanted) for item in parts)

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """Means over the tokens of a part; nothing where the two read different tokens."""
        if ours.scores is None or theirs.scores is None:
            return {}
        return compared(ours.scores, theirs.scores)

    def detail(self, item: Item, answer: Answer) -> str:
        """How surprised the model was."""
        scores = answer.scores
        return "" if scores is None else f"perplexity {math.exp(_surprise(scores)):.3g}"


def compared(ours: TokenScores, theirs: TokenScores) -> Mapping[str, tuple[float, float]]:
    """The figures of two scores of the same tokens; empty if they are not the same."""
    if ours.token_ids != theirs.token_ids or not ours.token_ids:
        return {}
    pairs = list(zip(ours.top, theirs.top, strict=True))
    count = len(pairs)
    return {
        "kl": (sum(divergence(top, reference) for top, reference in pairs) / count, 0.0),
        "top1": (sum(_first(top) == _first(reference) for top, reference in pairs) / count, 1.0),
        "log-perplexity": (_surprise(ours), _surprise(theirs)),
    }


def divergence(top: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """KL(reference || top) in nats, of distributions known by their most likely tokens.

    Each of the reference's listed tokens is an outcome, and all others are one more. A token that
    `top` does not list is taken to be as likely as the least likely one that it lists, which is
    never less than the truth. Both make the divergence smaller than it is, never larger, unless
    the reference spreads its mass over tokens that neither lists.
    """
    least = min(top.values())
    said = {token: top.get(token, least) for token in reference}
    known = sum(math.exp(logprob) * (logprob - said[token]) for token, logprob in reference.items())
    rest = _rest(reference)
    return max(known + rest * math.log(rest / _rest(said)), 0.0)


def _rest(logprobs: Mapping[int, float]) -> float:
    return max(1.0 - sum(map(math.exp, logprobs.values())), LEAST_PROBABILITY)


def _first(top: Mapping[int, float]) -> int:
    """The most likely token; of equally likely ones the one with the smallest id."""
    return min(top, key=lambda token: (-top[token], token))


def _surprise(scores: TokenScores) -> float:
    return -sum(scores.logprobs) / len(scores.logprobs)


def _parts(key: str, text: str, longest_tokens: int, room_tokens: int) -> list[Item]:
    """The parts of a text that fit, each ending in front of a space where there are any."""
    parts: list[Item] = []
    start = 0
    for low, high in pairwise(CUTS_TOKENS):
        end = _cut(text, start, high)
        fits = high <= longest_tokens and most_tokens_of_any(text[:end]) <= room_tokens
        if len(text[start:end].encode(errors="replace")) < LEAST_TOKENS * TOKEN_BYTES or not fits:
            break
        parts.append(
            Item(
                key=f"{key}/{_name(low, high)}",
                category=_name(low, high),
                prompt=text[:start],
                scored=text[start:end],
                place={"length_tokens": float(high)},
                about=f"fidelity/{key}",
            )
        )
        start = end
    return parts


def _cut(text: str, start: int, tokens: int) -> int:
    """Where the first `tokens` tokens of a text end, in front of a space if one is near."""
    data = text.encode(errors="replace")
    most_bytes = round(tokens * TOKEN_BYTES)
    if most_bytes >= len(data):
        return len(text)
    end = len(data[:most_bytes].decode(errors="ignore"))
    space = text.rfind(" ", max(start + 1, end - LONG_WORD_CHARACTERS), end + 1)
    return end if space < 0 else space


def _name(low: int, high: int) -> str:
    return f"{_short(low)}-{_short(high)}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _text(seed: int, number: int, length_tokens: int) -> str:
    """A text of sections; a longer one begins like a shorter one."""
    rng = seeded(seed, "fidelity", number)
    told: list[str] = []
    new_tokens = round(SECTION_TOKENS * (1 - RETOLD_SHARE))
    for _ in range(-(-length_tokens // SECTION_TOKENS) + 1):
        new = filler(rng, new_tokens)
        told += new
        told += rng.sample(told, round(len(new) * RETOLD_SHARE / (1 - RETOLD_SHARE)))
    return " ".join(told)
