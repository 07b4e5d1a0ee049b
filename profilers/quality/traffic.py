"""Whether the answers to a trial's own requests look broken, beside the baseline's.

It costs no request: the client keeps the beginning of a sample of the answers that are measured
anyway. As many characters are looked at of each, however the stream was cut up. An answer is looked
at for four faults, and counts for the first that it has:

- empty: nothing but spaces.
- unreadable: more than a tenth replacement or control characters.
- looping: one phrase of at most four words repeats over most of it.
- off-script: not written as its prompt is, where that is text. A third of its letters are in
  scripts that the prompt has no letter of (the first word of a letter's Unicode name; Chinese and
  Japanese are one). Or it is not in the prompt's language, if `language` can tell that. Or too few
  of its words are plain, such as "word", "Word's", "WORD" or "12", and enough of the prompt's are:
  broken caches give pieces of words without spaces ("N A &ACS.whureA.ac.audused").

Models do all of that legitimately: small ones loop, translators change the script. So the counts
say nothing alone; the baseline's on the same workload are the yardstick.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtune.profilers.quality.canary import fault_of
from kvtune.profilers.quality.language import LANGUAGES, detect
from kvtune.profilers.statistics import fisher_probability
from kvtune.types import BrokenAnswer, Measurement, OutputHealth, Request, RequestRecord

KEPT_ANSWERS = 256
"""Of how many answers a replay keeps the text. Enough to tell 0 from 5% of broken answers."""

KEPT_MESSAGES = 512
"""How much of each answer is kept, from its start: messages of the stream, mostly tokens.

512 of them for each of 256 answers are about 50 MB of messages as servers send them."""

JUDGED_CHARACTERS = 500
"""How much of each answer is looked at, from its start.

Not all that is kept: a server that lags puts several tokens into a message, so a busier trial keeps
more of the very same answer. Fewer characters than `KEPT_MESSAGES`, so that messages of one token
hold as many, unless characters come in pieces (of UTF-8) nearly throughout."""

ALPHA = 0.001
"""How often an objection may be false. It is asked for every trial of a study, lossless ones too,
and once more for finalists, so that a study of fifty raises a false one at most one time in twenty.
"""

FOREIGN_SHARE = 1 / 3
LEAST_LETTERS = 40
"""Answers with fewer letters cannot be off-script."""

PLAIN_SHARE = 0.85
"""Prose has more plain words than that. Of 52 answers of SmolLM2-135M to long prompts of quality
suites two had fewer (JSON); of 82 with int8_per_token_head, which vLLM corrupts on a CPU, 35 had,
beside 30 in no language."""

LEAST_WORDS = 8
"""Answers to prompts with fewer are not looked at for plain words: scripts without spaces have few.
"""

LONG_PROMPT_BLOCKS = 2
"""What a cache returns wrongly, it returns from blocks that were filled before the last one."""

EXAMPLES = 3
EXAMPLE_CHARACTERS = 120
_PROMPT_CHARACTERS = 2_000
_LETTERS = r"[^\W\d_]+"
_PLAIN = re.compile(rf"[\W_]*({_LETTERS}(?:['’-]{_LETTERS})*|\d+(?:[.,:]\d+)*)[\W_]*")
_ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}


def sample(requests: Sequence[Request], most: int = KEPT_ANSWERS) -> frozenset[int]:
    """Which of the requests are looked at: at most that many, spread evenly, no prompt twice.

    Answers to the same prompt are the same answer again: they would make one accident look like
    many.
    """
    first: dict[Hashable, int] = {}
    for index, request in enumerate(requests):
        first.setdefault(_identity(request, index), index)
    found = list(first.values())
    if len(found) > most:
        found = [found[number * len(found) // most] for number in range(most)]
    return frozenset(found)


def health(
    asked: Iterable[tuple[Request, RequestRecord]], *, block_tokens: int | None
) -> OutputHealth:
    """Look at the answers whose text was kept, in any order; failed requests have none.

    `block_tokens` is the size of a KV block.
    """
    looked = sorted(
        ((record, request) for request, record in asked if record.ok and record.text is not None),
        key=lambda pair: pair[0].index,
    )
    faults = []
    text_prompts = 0
    for record, request in looked:
        prompt = _prompt_text(request)
        text_prompts += prompt is not None
        found = _fault(record.index, (record.text or "")[:JUDGED_CHARACTERS], prompt)
        if found is not None:
            faults.append(found)
    counts = Counter(fault.kind for fault in faults)
    return OutputHealth(
        answers=len(looked),
        text_prompts=text_prompts,
        long_prompts=None
        if block_tokens is None
        else sum(
            (record.input_tokens or 0) >= LONG_PROMPT_BLOCKS * block_tokens for record, _ in looked
        ),
        empty=counts["empty"],
        unreadable=counts["unreadable"],
        looping=counts["looping"],
        off_script=counts["off-script"],
        examples=_examples(faults),
    )


def objection(candidate: Measurement, baseline: Measurement | None) -> str | None:
    """Why a trial's ordinary answers speak against it; `None` when nothing does.

    Compares the share of broken answers, each fault alone and all together, with the baseline's by
    Fisher's exact test, one-sided at a fifth of `ALPHA` each, so that any false objection has at
    most a chance of `ALPHA`. The test takes the two sets of answers as independent; for answers to
    the same prompts, which tend to have the same faults, it is on the safe side. Eight answers on
    each side are the fewest that can give an objection. Nothing is said where one side was not
    looked at.
    """
    ours = candidate.outputs
    theirs = None if baseline is None else baseline.outputs
    if ours is None or theirs is None:
        return None
    comparisons = [
        _Comparison(words, *left, *right)
        for (words, *left), (_, *right) in zip(_shares(ours), _shares(theirs), strict=True)
    ]
    worst = min(comparisons, key=lambda one: one.probability)
    if worst.probability > ALPHA / len(comparisons):
        return None
    shown = next((one for one in ours.examples if worst.words in (one.kind, _ANY)), None)
    example = "" if shown is None else f", such as {shown.text!r} to request {shown.request}"
    return (
        f"{worst.count} of {worst.of} answers to the workload's own requests are {worst.words}"
        f"{example}; of the baseline's it is {worst.other} of {worst.other_of} "
        f"(Fisher's exact test, p = {worst.probability:.1g})"
    )


def summary(found: OutputHealth) -> str:
    """What was seen of the answers, in one line."""
    if not found.answers:
        return "none looked at"
    faults = [f"{count} {words}" for words, count, _ in _shares(found)[:-1] if count]
    parts = [f"{found.answers} looked at, {', '.join(faults) or 'none broken'}"]
    if found.long_prompts == 0:
        parts.append("prompts too short to show a broken cache")
    elif found.long_prompts is not None:
        parts.append(f"{found.long_prompts} to prompts of two KV blocks or more")
    if not found.text_prompts:
        parts.append("off-script is not judged, as no prompt is text")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A candidate's share of answers with a fault beside the baseline's."""

    words: str
    count: int
    of: int
    other: int
    other_of: int

    @property
    def probability(self) -> float:
        return fisher_probability(self.count, self.of, self.other, self.other_of)


_ANY = "broken"


def _shares(found: OutputHealth) -> list[tuple[str, int, int]]:
    """Each fault with how many answers have it, of how many that could; all together last."""
    return [
        ("empty", found.empty, found.answers),
        ("unreadable", found.unreadable, found.answers),
        ("looping", found.looping, found.answers),
        ("off-script", found.off_script, found.text_prompts),
        (_ANY, found.broken, found.answers),
    ]


def _fault(index: int, text: str, prompt: str | None) -> BrokenAnswer | None:
    found = fault_of(text)
    if found is None and prompt is not None:
        why = _off_script(text, prompt)
        found = None if why is None else ("off-script", why)
    if found is None:
        return None
    kind, why = found
    return BrokenAnswer(request=index, kind=kind, why=why, text=text.strip()[:EXAMPLE_CHARACTERS])


def _off_script(text: str, prompt: str) -> str | None:
    scripts = Counter(filter(None, map(_script, text)))
    letters = scripts.total()
    if letters < LEAST_LETTERS:
        return None
    known = {_script(char) for char in set(prompt)}
    foreign = sum(count for script, count in scripts.items() if script not in known)
    if foreign / letters > FOREIGN_SHARE:
        return f"{foreign} of {letters} letters are in scripts that its prompt has none of"
    language = detect(prompt[-_PROMPT_CHARACTERS:])
    if language is not None and detect(text) != language:
        return f"it is not in {LANGUAGES[language]}, its prompt is"
    plain, words = _plain_words(text)
    if plain < PLAIN_SHARE * words:
        of_prompt, prompt_words = _plain_words(prompt[-_PROMPT_CHARACTERS:])
        if prompt_words >= LEAST_WORDS and of_prompt >= PLAIN_SHARE * prompt_words:
            return f"{words - plain} of {words} words are not plain ones, as its prompt's are"
    return None


def _plain_words(text: str) -> tuple[int, int]:
    """How many words are plain, of how many; what has neither letter nor digit is none."""
    words = [word for word in text.split() if any(map(str.isalnum, word))]
    return sum(map(_is_plain, words)), len(words)


def _is_plain(word: str) -> bool:
    found = _PLAIN.fullmatch(word)
    if found is None:
        return False
    core = found[1]
    return core in (core.lower(), core.upper(), core.capitalize(), core.title())


def _script(char: str) -> str | None:
    if not char.isalpha():
        return None
    if char.isascii():
        return "LATIN"
    script = unicodedata.name(char, "").partition(" ")[0]
    return _ONE_SCRIPT.get(script, script)


def _prompt_text(request: Request) -> str | None:
    """The text of a prompt; `None` where it is token ids, or something other than text."""
    if request.prompt is not None:
        return request.prompt
    texts = [
        part
        for message in request.messages or ()
        for part in _message_texts(message.get("content"))
    ]
    return "\n".join(texts) if texts else None


def _message_texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        return []
    return [
        part["text"]
        for part in content
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
    ]


def _identity(request: Request, index: int) -> Hashable:
    """What is equal for requests of the same prompt."""
    covered = len(request.prefix_blocks) * request.prefix_block_tokens
    if request.input_tokens is None:
        return hash((request.prompt, request.token_ids, repr(request.messages)))
    if request.input_tokens <= covered:
        return request.prefix_blocks, request.prefix_block_tokens, request.input_tokens
    return index


def _examples(faults: Sequence[BrokenAnswer]) -> tuple[BrokenAnswer, ...]:
    """A few of them, of as many kinds as there are."""
    seen: Counter[str] = Counter()
    ranked = []
    for fault in faults:
        ranked.append((seen[fault.kind], fault.request, fault))
        seen[fault.kind] += 1
    return tuple(fault for _, _, fault in sorted(ranked, key=lambda one: one[:2])[:EXAMPLES])
