import re

import pytest
import yaml
from contracts.emitter import EmitterContract, prose
from contracts.emitter_samples import cpu_config, realistic_config

from kvtune.autotune.emit.compose import Compose
from kvtune.errors import BadInput
from kvtune.types import ServingConfig, Setting

_REFERENCE = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<name>[A-Z_]+):\?[^}]+\}|(?P<invalid>.?))", re.S
)


def interpolate(text: str) -> str:
    """Compose's own rules for `$`, for a user who has set no variable but the secrets."""

    def replace(match: re.Match[str]) -> str:
        assert match["invalid"] is None, (
            f"a reference that Compose would replace or refuse: {text!r}"
        )
        return "$" if match["escaped"] else f"<{match['name']}>"

    return _REFERENCE.sub(replace, text)


def service(files: dict[str, str]) -> dict:
    document = yaml.safe_load(files["compose.yaml"])
    assert document.keys() <= {"name", "services", "volumes"}
    assert list(document["services"]) == ["vllm"]
    return document["services"]["vllm"]


def rendered(config: ServingConfig) -> dict:
    return service(Compose().render(config))


class TestCompose(EmitterContract):
    emitter = Compose

    def words(self, files, config):
        found = service(files)
        assert found["entrypoint"] == ["vllm", "serve"]
        return [interpolate(word) for word in found["command"]]

    def variables(self, files, config):
        found = service(files).get("environment", {})
        plain = {name: interpolate(value) for name, value in found.items()}
        return {name: value for name, value in plain.items() if value != f"<{name}>"}


def test_secret_is_asked_of_the_caller():
    assert rendered(realistic_config())["environment"]["HF_TOKEN"] == (
        "${HF_TOKEN:?set HF_TOKEN before you start}"
    )


def test_gpu_is_reserved_and_memory_shared():
    found = rendered(realistic_config())
    assert found["image"] == "vllm/vllm-openai:v0.32.0"
    assert found["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert found["ipc"] == "host"


def test_cpu_gets_the_cpu_image_and_no_gpu():
    found = rendered(cpu_config())
    assert found["image"] == "vllm/vllm-openai-cpu:v0.32.0"
    assert "deploy" not in found
    assert found["shm_size"] == "4gb"


def test_hub_model_keeps_its_download():
    document = yaml.safe_load(Compose().render(realistic_config())["compose.yaml"])
    assert document["volumes"] == {"huggingface-cache": {}}
    assert document["services"]["vllm"]["volumes"] == [
        {
            "type": "volume",
            "source": "huggingface-cache",
            "target": "/root/.cache/huggingface",
        }
    ]


def test_local_paths_are_mounted_read_only_where_they_were():
    template = (Setting(name="chat-template", value="/etc/t$/chat.jinja", because=""),)
    found = rendered(cpu_config(model="/models/smol", settings=template))
    assert [(mount["source"], mount["target"]) for mount in found["volumes"]] == [
        ("/models/smol", "/models/smol"),
        ("/etc/t$$/chat.jinja", "/etc/t$$/chat.jinja"),
    ]
    assert all(mount["read_only"] for mount in found["volumes"])


def test_path_inside_the_model_is_not_mounted_twice():
    tokenizer = (Setting(name="tokenizer", value="/models/smol/tokenizer", because=""),)
    assert len(rendered(cpu_config(settings=tokenizer))["volumes"]) == 1


@pytest.mark.parametrize("model", ["./model", "../model", "~/model"])
def test_relative_model_is_refused_with_the_way_out(model):
    with pytest.raises(BadInput, match="relative path") as caught:
        Compose().render(cpu_config(model=model))
    assert "absolute path" in caught.value.fix


def test_container_listens_on_its_own_port_and_says_so():
    binding = (
        Setting(name="port", value=9001, because=""),
        Setting(name="host", value="127.0.0.1", because=""),
    )
    files = Compose().render(realistic_config().model_copy(update={"settings": binding}))
    assert service(files)["command"] == [
        "meta-llama/Llama-3.1-8B-Instruct",
        "--served-model-name",
        "chat",
    ]
    assert service(files)["ports"] == ["8000:8000"]
    assert "Left out: --host, --port" in prose(files)


def test_health_check_is_python_that_compiles_and_asks_health():
    found = rendered(realistic_config())
    kind, python, flag, code = found["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python3", "-c")
    assert interpolate(code) == code
    compile(code, "healthcheck", "exec")
    assert "'/health'" in code
    assert found["restart"] == "unless-stopped"


def test_development_version_is_said_to_have_no_image():
    config = realistic_config()
    engine = config.engine.model_copy(update={"version": "0.33.0.dev12+g0123abc"})
    files = Compose().render(config.model_copy(update={"engine": engine}))
    assert service(files)["image"] == "vllm/vllm-openai:v0.33.0.dev12"
    assert "no such image may exist" in prose(files)
