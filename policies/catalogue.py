"""The catalogue: every policy that kvtune knows, and where each can be served."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvtune.policies.base import Policy, policies
from kvtune.policies.method import ArchitectureMethod, Method, Serving, methods
from kvtune.policies.plugin_arguments import PREFIX
from kvtune.policies.plugin_levers import PLATFORMS

TESTED_VLLM = "0.32"
BACKENDS = (
    "FlashAttention computes exact attention without writing the score matrix to memory. It is an "
    "attention backend beside these policies, not one of them: it changes no byte of the cache and "
    "no answer."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy. `kind` is a lever (engine options), a method, or an architecture.

    `engines` name where it runs, `serving` also says how.
    """

    name: str
    title: str
    kind: Literal["lever", "method", "architecture"]
    axis: str
    harm: str
    saves: tuple[str, ...]
    acts: str
    needs: tuple[str, ...]
    engines: tuple[str, ...]
    serving: tuple[str, ...]
    paper: str
    summary: str


def catalogue() -> list[Entry]:
    """Return levers, then methods, then architectures, each by name."""
    found = [_method(cls) for _, cls in sorted(methods().items())]
    return [
        *_levers(),
        *(entry for entry in found if entry.kind == "method"),
        *(entry for entry in found if entry.kind == "architecture"),
    ]


def as_dict(entry: Entry) -> dict[str, Any]:
    """An entry for JSON."""
    return asdict(entry)


def as_markdown(entries: list[Entry]) -> str:
    """The catalogue as a page of Markdown."""
    lines = [
        "# Policies",
        "",
        "Made by `kvtune policies --markdown`. A lever is an option of vLLM that a search can "
        "pull. A method works inside the cache and runs in the reference engine; where a server "
        "can run it, the table says how. An architecture is a property of the checkpoint.",
        "",
        "| name | kind | axis | harm | saves | acts | needs | served by | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        cells = (
            f"`{entry.name}`",
            entry.kind,
            entry.axis,
            entry.harm,
            ", ".join(entry.saves),
            entry.acts,
            ", ".join(entry.needs) or "nothing",
            "; ".join(entry.serving),
            entry.paper,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", BACKENDS, "", "## What each does", ""]
    for entry in entries:
        lines.append(f"- **{entry.title}** (`{entry.name}`): {entry.summary}")
    return "\n".join(lines) + "\n"


def _levers() -> list[Entry]:
    return [
        Entry(
            name=name,
            title=lever.title,
            kind="lever",
            axis="engine option",
            harm=lever.harm.value,
            saves=(lever.saves,),
            acts="both",
            needs=(),
            engines=(_lever_engine(lever),),
            serving=(
                f"{_lever_engine(lever)}: " + ", ".join(f"--{item}" for item in lever.arguments),
            ),
            paper="vLLM",
            summary=(lever.__doc__ or "").strip().partition("\n")[0],
        )
        for name, lever in sorted(policies().items())
    ]


def _lever_engine(lever: type[Policy]) -> str:
    ours = all(argument.startswith(PREFIX) for argument in lever.arguments)
    return f"vLLM {TESTED_VLLM}" + (
        f" with kvtune's plugin ({'/'.join(PLATFORMS)})" if ours else ""
    )


def _method(cls: type[Method]) -> Entry:
    architecture = issubclass(cls, ArchitectureMethod)
    paper = cls.paper
    return Entry(
        name=cls.name,
        title=cls.title,
        kind="architecture" if architecture else "method",
        axis=cls.axis.value,
        harm=cls.harm.value,
        saves=tuple(each.value for each in cls.saves),
        acts=cls.acts,
        needs=tuple(need.value for need in cls.needs),
        engines=tuple(_engine(each) for each in cls.serving),
        serving=tuple(_served(each) for each in cls.serving),
        paper=f"{paper.title} ({paper.reference}, {paper.year})",
        summary=cls.summary,
    )


def _engine(serving: Serving) -> str:
    if serving.where == "reference":
        return "reference"
    name = {"vllm": "vLLM", "kvtune-plugin": "kvtune plugin"}[serving.where]
    return f"{name} {serving.version}".strip()


def _served(serving: Serving) -> str:
    if serving.where == "reference":
        return "reference engine"
    return f"{_engine(serving)} ({'/'.join(serving.platforms)}): {serving.how}"
