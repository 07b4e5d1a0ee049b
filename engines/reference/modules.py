"""Prompt Cache in the reference engine: encode the modules of a schema, serve prompts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.engines.reference.engine import Generated, ReferenceEngine
from kvtune.engines.reference.sequence import Sequence as CachedSequence
from kvtune.errors import BadInput
from kvtune.policies.method_stack import MethodStack
from kvtune.policies.methods.prompt_cache import PromptCache
from kvtune.policies.plane import Piece
from kvtune.policies.prompt_schema import Run, Schema

Layers = tuple[tuple[Piece, Piece], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Modules by name (in any order), arguments by parameter, and the text after them."""

    modules: tuple[str, ...]
    text: tuple[int, ...]
    arguments: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A run of a module as each layer stores it."""

    run: Run
    layers: Layers

    @property
    def nbytes(self) -> int:
        """Bytes over all layers."""
        return sum(piece.nbytes for pair in self.layers for piece in pair)


class ModuleCache:
    """The modules of a schema under a stack, each encoded when it is first needed.

    A module is kept once by itself and once for each scaffold that it was served in.
    """

    def __init__(self, engine: ReferenceEngine, stack: MethodStack, schema: Schema) -> None:
        """Make an empty cache.

        Raises:
            BadInput: the stack has no prompt cache, drops tokens, or stores them in groups.
        """
        found = [method for method in stack.methods if isinstance(method, PromptCache)]
        if not found:
            raise BadInput(f"{stack} has no prompt-cache", fix="add prompt-cache to the stack")
        if stack.evictors or not engine.start(stack).shares_tokens:
            raise BadInput(
                f"modules cannot be kept under {stack}: what is stored of one token depends on "
                "others",
                fix="use stores that keep each token by itself, and no evictor",
            )
        self.engine = engine
        self.stack = stack
        self.schema = schema
        self.method = found[0]
        self.encoded: dict[tuple[tuple[str, ...], str], tuple[Encoded, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all encoded modules."""
        return sum(part.nbytes for parts in self.encoded.values() for part in parts)

    def prefill(self, prompt: Prompt) -> tuple[CachedSequence, Tensor]:
        """Return a sequence with the prompt, and the logits [V] after its text.

        Raises:
            BadInput: the schema has no such prompt, an argument does not fit, or there is no text.
        """
        schema = self.schema
        schema.check(prompt.modules)
        arguments = schema.arguments(prompt.modules, prompt.arguments)
        if not prompt.text:
            raise BadInput("a prompt needs text after its modules", fix="give at least one token")
        versions = {
            name: together
            for together in schema.encoded_together(prompt.modules)
            for name in together
        }
        sequence = self.engine.start(self.stack)
        for name in prompt.modules:
            for part in self._module(versions[name], name):
                sequence.adopt(part.layers, part.run.start)
                sequence.token_ids.extend(part.run.token_ids)
        sequence.seen_tokens = sequence.reused_tokens = len(sequence.token_ids)
        end = max((schema.modules[name].end for name in prompt.modules), default=0)
        runs = [*arguments, Run(end, prompt.text)]
        (logits,) = self.engine.prefill(
            [sequence],
            [[token for run in runs for token in run.token_ids]],
            positions=[[at for run in runs for at in run.positions]],
            sees_stored=self.method.arguments_see == "everything",
        )
        sequence.skipped_positions = runs[-1].positions.stop - sequence.seen_tokens
        return sequence, logits

    def generate(
        self, prompt: Prompt, *, new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Generated:
        """Decode greedily after a prompt, up to `new_tokens` or a stop id (which is included).

        Raises:
            BadInput: as `prefill`.
        """
        sequence, logits = self.prefill(prompt)
        made = [int(logits.argmax())]
        while len(made) < new_tokens and made[-1] not in stop_ids:
            (row,) = self.engine.decode([sequence], [[made[-1]]])
            made.append(int(row[-1].argmax()))
        return Generated(tuple(made), sequence)

    def _module(self, together: tuple[str, ...], name: str) -> tuple[Encoded, ...]:
        if (together, name) not in self.encoded:
            self._encode(together)
        return self.encoded[together, name]

    @torch.inference_mode()
    def _encode(self, together: tuple[str, ...]) -> None:
        """Run modules through the model in one pass, without anything else, and keep each."""
        tokens: dict[int, int] = {}
        for name in together:
            placed = self.schema.modules[name]
            for run in placed.runs:
                tokens |= dict(zip(run.positions, run.token_ids, strict=True))
            for start, length in placed.parameters.values():
                tokens |= dict.fromkeys(range(start, start + length), self.method.placeholder_id)
        positions = sorted(tokens)
        sequence = self.engine.start(self.stack)
        if positions:
            self.engine.prefill(
                [sequence], [[tokens[at] for at in positions]], positions=[positions]
            )
        index = {at: number for number, at in enumerate(positions)}
        for name in together:
            self.encoded[together, name] = tuple(
                Encoded(
                    run, sequence.share(index[run.start], index[run.start] + len(run.token_ids))
                )
                for run in self.schema.modules[name].runs
            )
