"""What a vLLM server with kvtune's plugin is asked to do: the JSON under `additional-config`.

    vllm serve MODEL --additional-config '{"kvtune": {"streaming_llm": {"window_tokens": 1024}}}'

Policies and emitters write it, the plugin reads it; there is no other description of it.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from kvtune.errors import BadInput
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.sink_window import SinkWindow
from kvtune.types import fingerprint_of

SECTION = "kvtune"
"""The key under vLLM's `additional-config` that the plugin reads; everything else is others'."""

AFTER_PROMPTS = {"quest": "Quest", "page_eviction": "page eviction"}
"""Parts that compute prompts as stock vLLM does and act on answers alone, by what people call them.

Quest reads prompts in full, and pages are evicted once a prompt is complete."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class QuestConfig(_Part):
    """Attend in a decode step to the pages that the query may need, not to all (Quest, 2024).

    Exactly one of `pages`, `share` (of a request's pages) and `budget_tokens` (rounded up to pages)
    is set; the page that is being written always counts among them. The first `dense_layers` read
    everything. `per_kv_head`: each KV head chooses pages of its own, else all share a choice.
    """

    pages: int | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, gt=0, le=1)
    budget_tokens: int | None = Field(default=None, ge=1)
    dense_layers: int = Field(default=2, ge=0)
    per_kv_head: bool = False

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = [v for v in (self.pages, self.share, self.budget_tokens) if v is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of pages, share and budget_tokens")
        return self


class StreamingLlmConfig(_Part):
    """Keep the first and the latest tokens, and free the pages between (StreamingLLM, 2024).

    What is kept is rounded up to whole pages. Positions stay those of the whole text.
    """

    window_tokens: int = Field(ge=1)
    sink_tokens: int = Field(default=4, ge=0)


class StoreConfig(_Part):
    """Hold keys and values in fewer bits than the model computes in.

    `int8` and `int4` have a scale for each token and KV head, as vLLM's caches of these names on
    CUDA. `turboquant` (2025) has a norm, and `bits_key` and `bits_value` for each channel. `kivi`
    (2024) has as many, keys in groups of 32 tokens and values of 32 channels, once a page is full.
    """

    format: Literal["int8", "int4", "turboquant", "kivi"]
    bits_key: int = Field(default=4, ge=2, le=8)
    bits_value: int = Field(default=4, ge=2, le=8)

    @model_validator(mode="after")
    def _bits_are_free(self) -> Self:
        if self.format.startswith("int") and self.model_fields_set & {"bits_key", "bits_value"}:
            raise ValueError(f"{self.format} says how many bits: leave bits_key and bits_value out")
        return self

    @model_serializer(mode="wrap")
    def _as_it_may_be_asked_for(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A server tells what it was asked, and whoever attaches to it reads that as a request.
        told: dict[str, Any] = dump(self)
        if not self.format.startswith("int"):
            return told
        return {name: value for name, value in told.items() if not name.startswith("bits_")}

    @property
    def is_grouped(self) -> bool:
        """Whether tokens are stored a page together."""
        return self.format == "kivi"


class PageEvictionConfig(_Part):
    """Free the pages of a request that are looked at least.

    Exactly one of `budget_tokens` (rounded up to pages) and `share` (of the prompt's pages) is set.
    The last `window_tokens` stay, and the first `sink_tokens`. All heads and layers rank together.

    `chunkkv` (2025) and `snapkv` (2024) rank a prompt's pages once it is computed, by what its last
    `window_tokens` attend to: a page by the attention to all its tokens, or by that to its best
    one, smoothed over `kernel_tokens` neighbours. What is generated stays.

    `h2o` (2023) sums up what each page got of all queries, and holds the budget while it decodes
    too. Of a prompt, the queries of the last `scored_tokens` count (None: all, as in the paper).
    """

    budget_tokens: int | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, gt=0, le=1)
    method: Literal["chunkkv", "snapkv", "h2o"] = "chunkkv"
    window_tokens: int = Field(default=32, ge=1)
    sink_tokens: int = Field(default=4, ge=0)
    kernel_tokens: int = Field(default=5, ge=1)
    scored_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.budget_tokens is None) == (self.share is None):
            raise ValueError("give exactly one of budget_tokens and share")
        if self.kernel_tokens % 2 == 0:
            raise ValueError(f"kernel_tokens must be odd but is {self.kernel_tokens}")
        if self.scored_tokens is not None and not self.is_continuous:
            raise ValueError(f"scored_tokens is for h2o; {self.method} goes by window_tokens")
        return self

    @property
    def is_continuous(self) -> bool:
        """Whether pages are scored, and leave, while a request decodes too."""
        return self.method == "h2o"


class TiersConfig(_Part):
    """Keep pages in `host_bytes` of host memory and `disk_bytes` on disk once they are computed.

    A prompt that begins as an earlier one has them loaded where the pool has them no longer. Files
    are kept in the folder `disk_path` and outlive the server.
    """

    host_bytes: int = Field(ge=1)
    disk_bytes: int = Field(default=0, ge=0)
    disk_path: str = ""

    @model_validator(mode="after")
    def _files_need_a_folder(self) -> Self:
        if bool(self.disk_bytes) != bool(self.disk_path):
            raise ValueError("give disk_bytes and disk_path, or neither")
        return self


class ProtectConfig(_Part):
    """What no policy may take away or leave unread: the first tokens of each request."""

    prefix_tokens: int = Field(default=0, ge=0)


class PluginConfig(_Part):
    """The whole request. Empty, it is the same as none: the server is stock vLLM."""

    schema_version: Literal[1] = 1
    quest: QuestConfig | None = None
    streaming_llm: StreamingLlmConfig | None = None
    page_eviction: PageEvictionConfig | None = None
    store: StoreConfig | None = None
    tiers: TiersConfig | None = None
    protect: ProtectConfig = ProtectConfig()

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to do."""
        return self.changes_attention or self.tiers is not None

    @property
    def changes_attention(self) -> bool:
        """Whether the model's layers do something else than stock ones."""
        policies = (self.quest, self.streaming_llm, self.page_eviction, self.store)
        return any(part is not None for part in policies)

    @property
    def whole_context_tokens(self) -> int | None:
        """Up to how many tokens a request is surely answered with all of them; None: always."""
        found = []
        if self.streaming_llm is not None:
            found.append(self.streaming_llm.window_tokens)
        for part in (self.quest, self.page_eviction):
            if part is not None:
                found.append(part.budget_tokens or 0)
        return min(found, default=None)

    @property
    def after_prompts(self) -> dict[str, BaseModel]:
        """What is asked for that no score of a prompt shows, by its name for people."""
        asked = {called: getattr(self, part) for part, called in AFTER_PROMPTS.items()}
        return {called: part for called, part in asked.items() if part is not None}

    @property
    def fingerprint(self) -> str:
        """A key for KV that is made as asked here, wherever it may meet other KV."""
        return fingerprint_of(self.model_dump(mode="json", exclude_none=True, exclude={"tiers"}))

    def sink_window(self, block_tokens: int) -> SinkWindow | None:
        """What StreamingLLM keeps in pages of `block_tokens`; protected tokens stay as sinks do."""
        asked = self.streaming_llm
        if asked is None:
            return None
        sinks = max(asked.sink_tokens, self.protect.prefix_tokens)
        return SinkWindow(sinks, asked.window_tokens, block_tokens)

    def page_budget(self, block_tokens: int) -> PageBudget | None:
        """What page eviction keeps in pages of `block_tokens`; protected tokens stay as sinks."""
        asked = self.page_eviction
        if asked is None:
            return None
        return PageBudget(
            max(asked.sink_tokens, self.protect.prefix_tokens),
            asked.window_tokens,
            block_tokens,
            asked.budget_tokens,
            asked.share,
            scored_tokens=asked.scored_tokens if asked.is_continuous else asked.window_tokens,
            while_decoding=asked.is_continuous,
        )


def plugin_config(additional_config: object) -> PluginConfig:
    """Read the plugin's section of vLLM's `additional-config`; all is off where there is none.

    Raises:
        BadInput: the section is not what `PluginConfig` describes. The message names each field.
    """
    if not isinstance(additional_config, dict) or SECTION not in additional_config:
        return PluginConfig()
    section: Any = additional_config[SECTION]
    try:
        return PluginConfig.model_validate(section)
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(str(part) for part in (SECTION, *each['loc']))}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise BadInput(
            f"--additional-config is not what kvtune's plugin understands: {told}",
            fix=f"fields are {', '.join(PluginConfig.model_fields)}; see docs/plugin.md",
        ) from error
