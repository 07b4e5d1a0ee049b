from typing import Any

import pytest
import yaml
from contracts.emitter import EmitterContract
from contracts.emitter_samples import NASTY, cpu_config, realistic_config
from contracts.kubernetes_rules import check_annotations, check_label, expand, plain_environment

from kvtune.autotune.emit.helm_production_stack import HelmProductionStack
from kvtune.types import ServingConfig, Setting

# The fields that kvtune uses, with the types that the chart's schema asks for.
_MODEL_FIELDS = {
    "name": str,
    "annotations": dict,
    "podAnnotations": dict,
    "repository": str,
    "tag": str,
    "modelURL": str,
    "replicaCount": int,
    "requestCPU": int,
    "requestMemory": str,
    "requestGPU": int,
    "vllmConfig": dict,
    "env": list,
    "extraVolumes": list,
    "extraVolumeMounts": list,
}
_REQUIRED = {"name", "repository", "tag", "modelURL", "requestCPU", "requestMemory", "requestGPU"}
_NAMED = {
    "maxModelLen": ("--max-model-len", int),
    "dtype": ("--dtype", str),
    "tensorParallelSize": ("--tensor-parallel-size", int),
    "maxNumSeqs": ("--max-num-seqs", int),
    "gpuMemoryUtilization": ("--gpu-memory-utilization", (int, float)),
    "maxLoras": ("--max-loras", int),
}


def model_of(files: dict[str, str]) -> dict[str, Any]:
    values = yaml.safe_load(files["values.yaml"])
    assert list(values) == ["servingEngineSpec"]
    (model,) = values["servingEngineSpec"]["modelSpec"]
    assert _REQUIRED <= model.keys() <= _MODEL_FIELDS.keys()
    for field, value in model.items():
        assert isinstance(value, _MODEL_FIELDS[field]), field
        assert not isinstance(value, bool), field
    return model


def chart_number(value: Any) -> str:
    """How Helm prints a number of a values file: a float, in exponents from a million on."""
    assert not isinstance(value, int | float) or abs(value) < 1_000_000 or value != int(value)
    return str(value)


def chart_command(model: dict[str, Any]) -> list[str]:
    """The container's command as the chart (0.1.12) puts it together, in its own order."""
    config = model["vllmConfig"]
    assert config, "the chart drops extraArgs with an empty vllmConfig"
    words = ["vllm", "serve", model["modelURL"], "--host", "0.0.0.0", "--port", "8000"]
    if "enableChunkedPrefill" in config:
        assert isinstance(config["enableChunkedPrefill"], bool)
        no = "" if config["enableChunkedPrefill"] else "no-"
        words.append(f"--{no}enable-chunked-prefill")
    words.append(
        "--enable-prefix-caching"
        if config.get("enablePrefixCaching")
        else "--no-enable-prefix-caching"
    )
    for field, (flag, kind) in _NAMED.items():
        if field in config:
            assert isinstance(config[field], kind), field
            words += [flag, chart_number(config[field])]
    known = _NAMED.keys() | {"enableChunkedPrefill", "enablePrefixCaching", "extraArgs"}
    assert config.keys() <= known
    for word in config.get("extraArgs", []):
        assert isinstance(word, str)
        words.append(word)
    return words


def grouped(words: list[str]) -> list[list[str]]:
    """Each option with its values; the order of options does not matter to vLLM."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return sorted(groups)


class TestHelmProductionStack(EmitterContract):
    emitter = HelmProductionStack

    def words(self, files, config):
        command = [expand(word) for word in chart_command(model_of(files))]
        assert command[:2] == ["vllm", "serve"]
        assert command[3:7] == ["--host", "0.0.0.0", "--port", "8000"]
        words = [command[2], *command[7:]]
        if all(setting.name != "enable-prefix-caching" for setting in config.settings):
            # vLLM's own default, which the chart would turn around.
            words.remove("--enable-prefix-caching")
        return words

    def arranged(self, words):
        return [words[:1], *grouped(words[1:])]

    def test_works_without_any_setting(self):
        bare = {"settings": (), "environment": {}, "served_model_name": None}
        config = realistic_config().model_copy(update=bare)
        assert self.words(self.render(config), config) == [config.model]

    def variables(self, files, config):
        return plain_environment(model_of(files).get("env", []))


def vllm_config(*settings: Setting) -> dict[str, Any]:
    config = realistic_config().model_copy(update={"settings": settings, "served_model_name": None})
    return model_of(HelmProductionStack().render(config))["vllmConfig"]


def setting(name: str, value: Any) -> Setting:
    return Setting(name=name, value=value, because="")


def test_prefix_caching_stays_on_unless_it_was_turned_off():
    assert vllm_config() == {"enablePrefixCaching": True}
    assert vllm_config(setting("enable-prefix-caching", False)) == {"enablePrefixCaching": False}


def test_named_fields_are_used_where_the_chart_has_them():
    assert vllm_config(
        setting("max-model-len", 4096),
        setting("max-num-seqs", 64),
        setting("tensor-parallel-size", 2),
        setting("gpu-memory-utilization", 0.9),
        setting("dtype", "bfloat16"),
        setting("enable-chunked-prefill", False),
        setting("block-size", 32),
    ) == {
        "maxModelLen": 4096,
        "maxNumSeqs": 64,
        "tensorParallelSize": 2,
        "gpuMemoryUtilization": 0.9,
        "dtype": "bfloat16",
        "enableChunkedPrefill": False,
        "enablePrefixCaching": True,
        "extraArgs": ["--block-size", "32"],
    }


@pytest.mark.parametrize("value", [1_000_000, 1_048_576, "auto", "32k"])
def test_length_that_the_named_field_cannot_carry_becomes_a_word(value):
    assert vllm_config(setting("max-model-len", value)) == {
        "enablePrefixCaching": True,
        "extraArgs": ["--max-model-len", str(value)],
    }


def test_no_gpu_runtime_on_a_cpu():
    values = yaml.safe_load(HelmProductionStack().render(cpu_config())["values.yaml"])
    assert values["servingEngineSpec"]["runtimeClassName"] == ""
    (model,) = values["servingEngineSpec"]["modelSpec"]
    assert (model["requestGPU"], model["repository"]) == (0, "vllm/vllm-openai-cpu")
    assert model["extraVolumes"] == [{"name": "local-0", "hostPath": {"path": "/models/smol"}}]
    assert model["extraVolumeMounts"] == [
        {"name": "local-0", "mountPath": "/models/smol", "readOnly": True}
    ]


def test_gpu_keeps_the_runtime_of_the_chart():
    values = yaml.safe_load(HelmProductionStack().render(realistic_config())["values.yaml"])
    assert "runtimeClassName" not in values["servingEngineSpec"]
    assert values["servingEngineSpec"]["modelSpec"][0]["requestGPU"] == 1


def chart_names(config: ServingConfig, release: str) -> list[str]:
    """What the chart calls the host and the service of the model."""
    name = model_of(HelmProductionStack().render(config))["name"]
    return [name, f"{release}-{name}-vllm-stack", f"{release}-{name}-engine-service"]


@pytest.mark.parametrize("study", ["chat-prod", "true", "12e4", "x" * 300, *NASTY])
def test_names_fit_a_label_even_after_the_chart_has_added_its_own(study):
    config = realistic_config().model_copy(update={"study": study})
    for name in chart_names(config, release="production-release1"):
        check_label(name)
    check_annotations(model_of(HelmProductionStack().render(config))["podAnnotations"])
