"""Ask the reference engine the items of quality suites, under any stack of KV-cache methods.

Only there can methods be judged that no server runs yet. Later turns of an item continue the cache
that its first answer left, so a method that kept what the first question needs is asked a second
one.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtune.engines.reference.chat import ChatPrompt, chat_prompt, text_prompt
from kvtune.errors import BadInput, KvtuneError
from kvtune.policies.method_stack import MethodStack
from kvtune.profilers.quality.suite import Answer, Item, TokenScores

if TYPE_CHECKING:
    from torch import Tensor

    from kvtune.engines.reference.engine import ReferenceEngine
    from kvtune.engines.reference.recording import Recording
    from kvtune.engines.reference.sequence import Sequence as CachedSequence

TOP_TOKENS = 20
"""As many as servers give, so that the figures mean the same."""

FORCED_TOKENS = 64
"""Given tokens that are scored at once where that changes nothing; bounds the logits' memory."""

READ_SHARE = 0.5
"""Share of a text without a context that is read as one; the rest comes as if it were generated,
because methods act on a prompt when it is complete."""


@dataclass(slots=True)
class _Asked:
    """An item under way: its cache, all token ids so far, and the turns that ended."""

    item: Item
    prompt: ChatPrompt
    sequence: CachedSequence
    generator: Any
    messages: list[Mapping[str, str]] = field(default_factory=list)
    text: str = ""
    made: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class ReferenceAsker:
    """An `Asker` for one stack of methods; the engine needs its tokenizer.

    `exact_prefill` as in `ReferenceEngine.start`. `on_progress` is told how many items are
    answered, of how many. `recordings` keep prompts by their tokens as the model saw them: askers
    that share them run each prompt once, whatever their stacks, and take nothing from prefix
    caches. They take some 100 KB a token, and whoever made them lets go of them. Without an exact
    prefill, prompts differ from stack to stack, and none is kept.
    """

    def __init__(
        self,
        engine: ReferenceEngine,
        stack: MethodStack | None = None,
        *,
        exact_prefill: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
        recordings: MutableMapping[tuple[int, ...], Recording] | None = None,
    ) -> None:
        self.engine = engine
        self.stack = stack or MethodStack()
        self.exact_prefill = exact_prefill
        self.on_progress = on_progress
        self.recordings = recordings

    async def ask(self, items: Sequence[Item], *, seed: int, concurrency: int) -> list[Answer]:
        """Answer every item, `concurrency` in a batch, prompts of similar lengths together."""
        answers: dict[int, Answer] = {}
        for kind in (True, False):
            numbers = [n for n, item in enumerate(items) if (item.scored is not None) is kind]
            numbers.sort(key=lambda n: _length(items[n]))
            for start in range(0, len(numbers), concurrency):
                batch = numbers[start : start + concurrency]
                found = self._batch([items[n] for n in batch], seed)
                answers |= dict(zip(batch, found, strict=True))
                if self.on_progress is not None:
                    self.on_progress(len(answers), len(items))
                await asyncio.sleep(0)  # where an interrupt gets through
        return [answers[n] for n in range(len(items))]

    def _batch(self, items: Sequence[Item], seed: int) -> list[Answer]:
        """Answers to items of one kind; one that cannot be answered does not take others along."""
        try:
            asked = [self._begin(item, seed) for item in items]
            if items[0].scored is not None:
                return self._scored(asked)
            return self._answered(asked)
        except KvtuneError as error:
            if len(items) == 1:
                return [Answer(error=error.message)]
        return [answer for item in items for answer in self._batch([item], seed)]

    def _begin(self, item: Item, seed: int) -> _Asked:
        import torch

        tokenizer = self.engine.tokenizer
        prompt = (
            text_prompt(tokenizer, item.prompt or "", protected_texts=item.protected)
            if item.messages is None
            else chat_prompt(
                tokenizer, item.messages, protected_roles=(), protected_texts=item.protected
            )
        )
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{item.key}".encode()))
        return _Asked(
            item,
            prompt,
            self.engine.start(self.stack, prompt.spans, exact_prefill=self.exact_prefill),
            generator,
            list(item.messages or ()),
            "" if item.messages is None else self._template(item.messages),
        )

    def _answered(self, asked: Sequence[_Asked]) -> list[Answer]:
        """Ask all turns of all items, each turn in one batch."""
        new = [list(one.prompt.token_ids) for one in asked]
        turn = list(asked)
        while turn:
            self._generate(turn, new)
            turn = [one for one in turn if len(one.texts) <= len(one.item.follow_ups)]
            new = [self._follow_up(one) for one in turn]
        return [Answer(tuple(a.texts), tuple(a.tokens), tuple(a.reasons)) for a in asked]

    def _generate(self, asked: Sequence[_Asked], new: Sequence[Sequence[int]]) -> None:
        """Read new tokens of each item, then decode until it stops or has all it may."""
        logits = self._read([one.sequence for one in asked], new)
        for one, row in zip(asked, logits, strict=True):
            one.made = [_sample(row, one)]
        running = [one for one in asked if self._goes_on(one)]
        while running:
            rows = self.engine.decode(
                [one.sequence for one in running], [[one.made[-1]] for one in running]
            )
            for one, row in zip(running, rows, strict=True):
                one.made.append(_sample(row[-1], one))
            running = [one for one in running if self._goes_on(one)]
        for one in asked:
            stopped = one.made[-1] in self._stop_ids
            shown = one.made[:-1] if stopped else one.made
            one.texts.append(self.engine.tokenizer.decode(shown, skip_special_tokens=True))
            one.tokens.append(len(one.made))
            one.reasons.append("stop" if stopped else "length")

    def _read(
        self, sequences: Sequence[CachedSequence], prompts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The logits [V] after each prompt; of a first one, from its recording."""
        recordings = self.recordings if self.exact_prefill else None
        if recordings is None or any(sequence.seen_tokens for sequence in sequences):
            return self.engine.prefill(sequences, prompts)
        from kvtune.engines.reference.recording import record, replay

        found = []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            known = recordings.get(tuple(prompt)) or record(self.engine, prompt)
            recordings[known.prompt] = known
            replay(self.engine, sequence, known)
            found.append(known.logits)
        return found

    def _goes_on(self, one: _Asked) -> bool:
        return one.made[-1] not in self._stop_ids and len(one.made) < one.item.output_tokens

    @property
    def _stop_ids(self) -> frozenset[int]:
        configured = getattr(self.engine.model, "generation_config", None)
        found = getattr(configured, "eos_token_id", None)
        own = self.engine.tokenizer.eos_token_id
        listed = found if isinstance(found, list) else [found]
        return frozenset(token for token in (*listed, own) if token is not None)

    def _follow_up(self, one: _Asked) -> list[int]:
        """The tokens of the next turn that the cache has not seen yet.

        The last token of an answer is not in the cache; one that ended it is written by the chat
        template itself.
        """
        question = one.item.follow_ups[len(one.texts) - 1]
        last = [] if one.reasons[-1] == "stop" else one.made[-1:]
        if one.item.messages is None:
            return last + self._token_ids(question)
        one.messages += [
            {"role": "assistant", "content": one.texts[-1]},
            {"role": "user", "content": question},
        ]
        whole = self._template(one.messages)
        known = one.text + one.texts[-1].rstrip()
        # A template that trims or drops earlier turns cannot be continued word by word.
        between = whole[len(known) :] if whole.startswith(known) else question
        one.text = whole
        return last + self._token_ids(between)

    def _template(self, messages: Sequence[Mapping[str, str]]) -> str:
        text: str = self.engine.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return text

    def _token_ids(self, text: str) -> list[int]:
        found: list[int] = self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _scored(self, asked: Sequence[_Asked]) -> list[Answer]:
        """Score texts: contexts are read as prompts, and what is scored comes after them."""
        forced = [_Forced(one.sequence) for one in asked]
        for one, text in zip(asked, forced, strict=True):
            context, scored = self._text_ids(one)
            read = max(1, round(READ_SHARE * len(scored))) if not context else 0
            if len(scored) <= (0 if context else 1):
                raise BadInput("the text has no token to score")
            text.ids = scored[read:]
            if context:
                (last,) = self._read([text.sequence], [context])
                text.note(last[None], text.ids[:1])
            else:
                (each,) = self.engine.prefill([text.sequence], [scored[:read]], every=True)
                text.note(each, scored[1 : read + 1])
        acts = any(method.acts != "prefill" for method in self.stack.evictors)
        size = 1 if acts or self.stack.selection is not None else FORCED_TOKENS
        for start in range(0, max(len(text.ids) for text in forced), size):
            same: dict[int, list[_Forced]] = {}
            for text in forced:
                same.setdefault(len(text.ids[start : start + size]), []).append(text)
            same.pop(0, None)
            for width, group in same.items():
                rows = self.engine.decode(
                    [text.sequence for text in group],
                    [text.ids[start : start + width] for text in group],
                )
                for text, row in zip(group, rows, strict=True):
                    text.note(row, text.ids[start + 1 : start + width + 1])
        return [Answer(scores=text.scores()) for text in forced]

    def _text_ids(self, one: _Asked) -> tuple[list[int], list[int]]:
        """The tokens of an item's context and of the text that is scored after it."""
        if one.messages or one.item.prompt:
            return list(one.prompt.token_ids), self._token_ids(one.item.scored or "")
        return [], list(self.engine.tokenizer(one.item.scored)["input_ids"])


class _Forced:
    """A text that is given token by token: what is still to come, and the scores so far."""

    def __init__(self, sequence: CachedSequence) -> None:
        self.sequence = sequence
        self.ids: list[int] = []
        self._seen: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []

    def note(self, logits: Tensor, token_ids: Sequence[int]) -> None:
        """Keep what logits [n, V] say of the tokens that come next; the last may be unknown."""
        import torch

        if not token_ids:
            return
        logprobs = logits[: len(token_ids)].float().log_softmax(-1)
        listed = logprobs.topk(min(TOP_TOKENS, logprobs.shape[-1]))
        chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
        self._seen += token_ids
        self._logprobs += chosen[:, 0].tolist()
        self._top += [
            dict(zip(ids, values, strict=True))
            for ids, values in zip(listed.indices.tolist(), listed.values.tolist(), strict=True)
        ]

    def scores(self) -> TokenScores:
        """All scores."""
        return TokenScores(tuple(self._seen), tuple(self._logprobs), tuple(self._top))


def _sample(logits: Tensor, one: _Asked) -> int:
    """The likeliest token, or one drawn at the item's temperature."""
    import torch

    if one.item.temperature <= 0:
        return int(logits.argmax())
    chances = (logits.float() / one.item.temperature).softmax(-1).cpu()
    return int(torch.multinomial(chances, 1, generator=one.generator))


def _length(item: Item) -> int:
    """Characters of a prompt."""
    if item.messages is None:
        return len(item.prompt or "") + len(item.scored or "")
    return sum(len(message["content"]) for message in item.messages)
