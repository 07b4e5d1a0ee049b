"""Run a transformers decoder with any stack of KV-cache methods, exactly and with counted bytes.

Batched in everything but attention: a batch's rows share the projections and the MLPs, and each
row attends over its own cache, so that no row's padding or length touches another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.reference import reuse
from kvtune.engines.reference.families import LayerFacts, layer_facts
from kvtune.engines.reference.layer import LayerCache
from kvtune.engines.reference.layer_setup import layer_setup
from kvtune.engines.reference.sequence import Sequence as CachedSequence
from kvtune.engines.reference.step import ATTENTION, Row, Step
from kvtune.errors import BadInput
from kvtune.policies.calibration import CalibratedMethod, Calibration
from kvtune.policies.compose import require_legal
from kvtune.policies.eviction import Span
from kvtune.policies.method import ArchitectureMethod, LayerShape
from kvtune.policies.method_stack import MethodStack


@dataclass(frozen=True, slots=True)
class Generated:
    """What greedy decoding gave: new token ids, and the cache as it is afterwards."""

    token_ids: tuple[int, ...]
    sequence: CachedSequence


class ReferenceEngine:
    """A model, its tokenizer, and the caches of the sequences that it runs."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        """Take a loaded transformers model of a known family.

        Raises:
            BadInput: its family is not one that is run exactly.
        """
        self.facts: tuple[LayerFacts, ...] = layer_facts(model)
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.tokenizer = tokenizer
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.shared: dict[Any, Any] = {}
        self.calibrations: dict[str, Calibration] = {}
        self._model_hash: str | None = None

    @classmethod
    def load(
        cls, path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> ReferenceEngine:
        """Load a checkpoint from this disk.

        Raises:
            BadInput: it is missing, broken, or of a family that is not run exactly.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not Path(path).is_dir():
            raise BadInput(f"there is no checkpoint at {path}", fix="give a model directory")
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be loaded: {error}", fix="check the files") from error
        return cls(model.to(device), tokenizer)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of all layers."""
        return tuple(facts.shape for facts in self.facts)

    @property
    def config(self) -> dict[str, Any]:
        """What the model's config.json would say."""
        return {**self.model.config.to_dict(), "architectures": [type(self.model).__name__]}

    @property
    def model_hash(self) -> str:
        """Identifies the weights: 16 hex digits over names, shapes and a sample of each."""
        if self._model_hash is None:
            digest = hashlib.sha256()
            for name, tensor in sorted(self.model.state_dict().items()):
                sample = tensor.detach().flatten()[:: max(tensor.numel() // 1024, 1)].float()
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(sample.cpu().numpy().tobytes())
            self._model_hash = digest.hexdigest()[:16]
        return self._model_hash

    def use_calibration(self, method: CalibratedMethod, calibration: Calibration) -> None:
        """Let sequences with this method use what was learned.

        Raises:
            BadInput: it was learned from another model, or with other parameters.
        """
        calibration.check(method, self.model_hash)
        self.calibrations[method.calibration_key] = calibration

    def start(
        self,
        stack: MethodStack | None = None,
        spans: Sequence[Span] = (),
        *,
        exact_prefill: bool = True,
    ) -> CachedSequence:
        """Return an empty sequence under a stack of methods.

        `spans` name parts of the prompt; evictors keep the protected ones. With `exact_prefill`
        the prompt attends to itself in full precision, as servers do; without, each token reads
        what was stored, as in decoding (for stores; evictors act after the prompt either way).

        Raises:
            BadInput: the methods do not go together, one needs a calibration that is not there, or
                one is an architecture that this model does not have.
        """
        stack = stack or MethodStack()
        require_legal(stack)
        for method in stack.methods:
            if isinstance(method, ArchitectureMethod):
                method.require(self.config)
        shared: dict[Any, Any] = {}
        layers = [
            LayerCache(layer_setup(self, facts, stack, tuple(spans), exact_prefill, shared))
            for facts in self.facts
        ]
        return CachedSequence(stack, layers, tuple(spans))

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[CachedSequence],
        prompts: Sequence[Sequence[int]],
        *,
        chunk_tokens: int | None = None,
        padding: str = "right",
        every: bool = False,
        positions: Sequence[Sequence[int]] | None = None,
        sees_stored: bool = False,
    ) -> list[Tensor]:
        """Process prompts (after what the sequences already hold); return logits.

        One tensor [V] a row: the logits after its last token; with `every`, [n, V] after each of
        its tokens. `chunk_tokens` processes prompts in pieces of at most that many. Under prefix
        caching an empty sequence starts from what earlier prompts left (not with `every`: logits
        are not kept). `positions` (ascending in each row) place the tokens elsewhere than after
        what was read; with `sees_stored` they attend to all that a sequence holds, also to what
        stands after them.

        Raises:
            BadInput: an empty prompt.
        """
        if any(not len(prompt) for prompt in prompts):
            raise BadInput("a prompt is empty", fix="give at least one token")
        if not every and positions is None:
            prompts = [
                prompt[reuse.begin(self, sequence, prompt) :]
                for sequence, prompt in zip(sequences, prompts, strict=True)
            ]
        longest = max(len(prompt) for prompt in prompts)
        size = chunk_tokens or longest
        found: list[list[Tensor]] = [[] for _ in prompts]
        for start in range(0, longest, size):
            members = [n for n, prompt in enumerate(prompts) if start < len(prompt)]
            rows = [
                Row(
                    sequences[n],
                    tuple(prompts[n][start : start + size]),
                    "prefill",
                    last=start + size >= len(prompts[n]),
                    positions=tuple(positions[n][start : start + size]) if positions else (),
                    sees_stored=sees_stored,
                )
                for n in members
            ]
            for n, logits in zip(members, self._forward(rows, padding, every), strict=True):
                found[n].append(logits)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            self.finish_prompt(sequence, prompt)
            reuse.publish(self, sequence)
        return [torch.cat(parts) if every else parts[-1][-1] for parts in found]

    @torch.inference_mode()
    def decode(
        self, sequences: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Append generated tokens, the same number to each row: logits [m, V] a row.

        More than one token a row is teacher forcing; it equals one after another unless a method
        acts while decoding or reads only part of the cache.
        """
        rows = [
            Row(sequence, tuple(new), "decode", last=True)
            for sequence, new in zip(sequences, tokens, strict=True)
        ]
        logits = self._forward(rows, "right", True)
        for sequence in sequences:
            sequence.note_step()
        return logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        stack: MethodStack | None = None,
        *,
        new_tokens: int,
        stop_ids: Sequence[int] = (),
        spans: Sequence[Sequence[Span]] | None = None,
        chunk_tokens: int | None = None,
    ) -> list[Generated]:
        """Decode greedily, up to `new_tokens` a row or until a stop id (which is included)."""
        marks = spans or [()] * len(prompts)
        sequences = [self.start(stack, mark) for mark in marks]
        logits = self.prefill(sequences, prompts, chunk_tokens=chunk_tokens)
        made: list[list[int]] = [[int(row.argmax())] for row in logits]
        running = [n for n in range(len(prompts)) if made[n][-1] not in stop_ids]
        for _ in range(new_tokens - 1):
            if not running:
                break
            rows = [sequences[n] for n in running]
            for n, row in zip(
                running, self.decode(rows, [[made[n][-1]] for n in running]), strict=True
            ):
                made[n].append(int(row[-1].argmax()))
            running = [n for n in running if made[n][-1] not in stop_ids]
        for sequence in sequences:
            reuse.publish(self, sequence)
        return [Generated(tuple(ids), seq) for ids, seq in zip(made, sequences, strict=True)]

    @torch.inference_mode()
    def score(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Show tokens after a prompt to a method that asked for them; nothing of them stays."""
        seen_tokens = sequence.seen_tokens
        self._forward([Row(sequence, tuple(token_ids), "scoring", last=False)], "right", False)
        sequence.seen_tokens = seen_tokens

    @contextmanager
    def plain(self) -> Iterator[Any]:
        """The model with its own attention and cache, to compare with."""
        # transformers' fused attention leaves out the cap on scores.
        capped = any(facts.softcap is not None for facts in self.facts)
        self.model.set_attn_implementation("eager" if capped else "sdpa")
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(ATTENTION)

    def _forward(self, rows: Sequence[Row], padding: str, every: bool) -> list[Tensor]:
        """Run the model on one chunk of each row; logits [n, V] (or [1, V]) a row."""
        if any(row.sequence.parked is not None for row in rows):
            raise BadInput("a sequence is swapped out", fix="swap it in first")
        step = Step.of(rows, padding, self.device)
        hidden = self.model.model(
            input_ids=step.token_ids,
            position_ids=step.positions,
            use_cache=False,
            kvtune_step=step,
        ).last_hidden_state
        parts = [
            hidden[n, own] if every else hidden[n, own][-1:] for n, own in enumerate(step.slices)
        ]
        for row in rows:
            row.sequence.seen_tokens += len(row.token_ids)
            if row.phase != "scoring":
                row.sequence.token_ids.extend(row.token_ids)
        logits = self._head(torch.cat(parts))
        return list(torch.split(logits, [len(part) for part in parts]))

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def finish_prompt(self, sequence: CachedSequence, prompt: Sequence[int]) -> None:
        """Do what is left when every layer has seen the whole prompt."""
        if any(method.scope == "sequence" for method in sequence.stack.evictors):
            from kvtune.engines.reference.whole import evict_whole_sequence

            evict_whole_sequence(self, sequence, prompt)
        sequence.prompt_tokens = sequence.seen_tokens
        sequence.note_step()
