"""Values for the Helm chart of the vLLM production stack (`vllm/vllm-stack`).

What the chart (0.1.12) does with them, read from its templates:

- it starts `vllm serve MODEL --host 0.0.0.0 --port 8000`, then its named fields, then `extraArgs`;
- it adds `--no-enable-prefix-caching` unless `enablePrefixCaching` is true, and passes `extraArgs`
  on only if `vllmConfig` is not empty;
- all words end up in `command`, where Kubernetes expands `$(NAME)`;
- numbers of a million and more come out in scientific notation, so they go into `extraArgs`;
- `runtimeClassName` is `nvidia` unless it is set.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import JsonValue

from kvtune.autotune.emit.base import Emitter
from kvtune.autotune.emit.containers import (
    PORT,
    START_BUDGET_S,
    container_arguments,
    container_notes,
    deployment_name,
    gpu_count,
    image,
    kubernetes_environment,
    kubernetes_supply,
    kubernetes_volumes,
    memory_request,
    plugin_build,
    plugin_check,
    plugin_image_notes,
    provenance_annotations,
    without_expansion,
)
from kvtune.autotune.emit.header import comment, header
from kvtune.autotune.emit.yaml_text import Noted, to_yaml
from kvtune.engines.vllm.arguments import to_argv
from kvtune.types import ServingConfig

_FILE = "values.yaml"
_LARGEST_COUNT = 999_999

# Option -> field of vllmConfig, by the type that the chart's schema asks for.
_COUNTS = {
    "max-model-len": "maxModelLen",
    "tensor-parallel-size": "tensorParallelSize",
    "max-num-seqs": "maxNumSeqs",
    "max-loras": "maxLoras",
}
_FLAGS = {
    "enable-prefix-caching": "enablePrefixCaching",
    "enable-chunked-prefill": "enableChunkedPrefill",
}


class HelmProductionStack(Emitter):
    """Named fields where the chart has them, `extraArgs` for everything else."""

    name: ClassVar[str] = "helm-production-stack"
    title: ClassVar[str] = "values for the vLLM production stack Helm chart"

    def render(self, config: ServingConfig) -> dict[str, str]:
        """`values.yaml` for `helm upgrade --install -f`."""
        engine: dict[str, Any] = {}
        if not gpu_count(config):
            engine["runtimeClassName"] = Noted(
                "", comment("The chart's own default, nvidia, does not exist on CPU nodes.")
            )
        engine["startupProbe"] = Noted(
            {
                "initialDelaySeconds": 15,
                "periodSeconds": 10,
                "failureThreshold": START_BUDGET_S // 10,
                "httpGet": {"path": "/health", "port": PORT},
            },
            comment("Download, load and warm-up may take half an hour."),
        )
        engine["modelSpec"] = [_model(config)]
        lines = [*_header(config), "", *to_yaml({"servingEngineSpec": engine})]
        return {_FILE: "\n".join(lines) + "\n"}


def _header(config: ServingConfig) -> list[str]:
    return header(
        config,
        start=[
            *plugin_build(config),
            f"helm upgrade --install vllm vllm/vllm-stack -f {_FILE}",
        ],
        supply=kubernetes_supply(config),
        revert=["helm rollback vllm"],
        notes=[
            *container_notes(config),
            *plugin_image_notes(config),
            "Written for version 0.1.12 of the chart vllm-stack, whose repository you have added "
            "under the name vllm.",
        ],
    )


def _model(config: ServingConfig) -> dict[str, Any]:
    repository, tag = image(config)
    model: dict[str, Any] = {
        "name": deployment_name(config),
        "annotations": provenance_annotations(config),
        "podAnnotations": provenance_annotations(config),
        "repository": repository,
        "tag": tag,
        "modelURL": without_expansion(config.model),
        "replicaCount": 1,
        "requestCPU": Noted(
            2, comment("CPU and memory are a place to start; kvtune did not measure the need.")
        ),
        "requestMemory": memory_request(config),
        "requestGPU": gpu_count(config),
        "vllmConfig": _vllm_config(container_arguments(config)),
    }
    environment = kubernetes_environment(config)
    if environment:
        model["env"] = environment
    if (check := plugin_check(config)) is not None:
        model["initContainer"] = {
            "name": "check-plugin",
            "image": f"{repository}:{tag}",
            "command": check,
        }
    volumes, mounts = kubernetes_volumes(config)
    if volumes:
        model |= {"extraVolumes": volumes, "extraVolumeMounts": mounts}
    return model


def _vllm_config(arguments: dict[str, JsonValue]) -> dict[str, Any]:
    """The chart's named fields, and every other argument as words in `extraArgs`."""
    fields: dict[str, Any] = {}
    rest: dict[str, JsonValue] = {}
    for name, value in arguments.items():
        field = _field(name, value)
        if field is None:
            rest[name] = value
        else:
            fields[field] = without_expansion(value) if isinstance(value, str) else value
    if "enablePrefixCaching" not in fields:
        fields["enablePrefixCaching"] = Noted(
            True,
            comment("vLLM's default. The chart would turn prefix caching off without this line."),
        )
    words = [without_expansion(word) for word in to_argv(rest)]
    return fields | ({"extraArgs": words} if words else {})


def _field(name: str, value: JsonValue) -> str | None:
    """The field of `vllmConfig` that carries the value unchanged; `None` if there is none."""
    if isinstance(value, bool):
        return _FLAGS.get(name)
    if isinstance(value, int) and 0 <= value <= _LARGEST_COUNT and name in _COUNTS:
        return _COUNTS[name]
    if name == "dtype" and isinstance(value, str) and not value.startswith("-"):
        return "dtype"
    if name == "gpu-memory-utilization" and isinstance(value, int | float) and 0 < value <= 1:
        return "gpuMemoryUtilization"
    return None
