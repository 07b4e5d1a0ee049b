"""Configs that kvtune's plugin serves: each format says so, and stops where it is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from contracts.emitter import prose
from contracts.emitter_samples import cpu_config, realistic_config
from contracts.kubernetes_rules import expand

from kvtune.autotune.emit.base import emitters
from kvtune.autotune.emit.compose import Compose
from kvtune.autotune.emit.helm_production_stack import HelmProductionStack
from kvtune.autotune.emit.kubernetes import Kubernetes
from kvtune.autotune.emit.plugin import asks_for_plugin, check_command, load_check, requirement
from kvtune.autotune.emit.shell import Shell
from kvtune.autotune.emit.vllm_yaml import VllmYaml
from kvtune.policies.plugin_arguments import (
    EVICTION_SHARE,
    HOST_BYTES,
    QUEST_TOKENS,
    STORE_FORMAT,
    WINDOW_TOKENS,
)
from kvtune.types import Setting

LEVERS = {
    STORE_FORMAT: "int8",
    EVICTION_SHARE: 0.25,
    HOST_BYTES: 1 << 30,
}
PARTS = (
    Setting(name=QUEST_TOKENS, value=512, because="reads less"),
    Setting(name=WINDOW_TOKENS, value=1024, because="keeps less"),
)
OTHERS = Setting(
    name="additional-config", value={"other": {"x": 1}}, because="given by you", origin="base"
)
WORDS = [
    *("--additional-config.kvtune.quest.budget_tokens", "512"),
    *("--additional-config.kvtune.streaming_llm.window_tokens", "1024"),
]
WHOLE = {
    "other": {"x": 1},
    "kvtune": {"quest": {"budget_tokens": 512}, "streaming_llm": {"window_tokens": 1024}},
}


def asking(*settings, config=None):
    return (config or realistic_config()).model_copy(update={"settings": settings or PARTS})


def fake_programs(folder, *, has_plugin):
    """`vllm` and two Pythons that tell what they were called with; one knows whether kvtune is."""
    for name in ("vllm", "python", "python3"):
        code = 0 if has_plugin or name == "vllm" else 1
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n[ "$1" != -c ] || exit {code}\n')
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "HF_TOKEN": "x", "VLLM_API_KEY": "x"}


def run(words, folder, *, has_plugin):
    environment = fake_programs(Path(folder), has_plugin=has_plugin)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)


def test_only_policies_of_the_plugin_need_it():
    assert asks_for_plugin(asking())
    assert not asks_for_plugin(realistic_config())
    assert not asks_for_plugin(asking(OTHERS))
    whole = {"kvtune": {"quest": {"pages": 8}}}
    assert asks_for_plugin(asking(OTHERS.model_copy(update={"value": whole})))


def test_what_is_installed_is_the_version_that_was_measured():
    assert requirement(asking()) == "kvtune==0.1.0"
    engine = realistic_config().engine.model_copy(update={"plugin": "0.2.0"})
    config = asking().model_copy(update={"engine": engine})
    assert requirement(config) == "kvtune==0.2.0"


@pytest.mark.parametrize("name", sorted(emitters()))
def test_every_format_says_what_to_install_and_that_vllm_would_not(name):
    emitter = emitters()[name]()
    told = prose(emitter.render(asking()))
    assert "in the environment that runs vLLM: pip install kvtune==0.1.0." in told
    assert "ignores them without a word" in told
    assert "plugin" not in prose(emitter.render(realistic_config()))


@pytest.mark.parametrize(("has_plugin", "code"), [(True, 0), (False, 1)])
def test_the_check_ends_the_shell_with_a_clear_message(has_plugin, code, tmp_path):
    script = f"{check_command(asking(), 'python3')}; echo on"
    done = run(["/bin/sh", "-c", script], tmp_path, has_plugin=has_plugin)
    assert done.returncode == code
    assert ("on" in done.stdout.splitlines()) is has_plugin
    assert ("pip install kvtune==0.1.0" in done.stderr) is not has_plugin


LOADED = [(None, 0), ("kvtune", 0), ("other,kvtune", 0), ("", 1), ("other", 1), ("kvtune2", 1)]
"""Values of VLLM_PLUGINS and the code of the check. vLLM loads all, or what is named."""


@pytest.mark.parametrize(("value", "code"), LOADED)
def test_plugins_that_are_named_have_to_name_kvtune(value, code):
    command = load_check(sys.executable)
    set_ = {} if value is None else {"VLLM_PLUGINS": value}
    done = subprocess.run(
        ["/bin/sh", "-c", command], env=set_, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert ("VLLM_PLUGINS is set and does not name kvtune" in done.stderr) is bool(code)


@pytest.mark.parametrize(("value", "code"), LOADED)
def test_the_check_in_a_pod_knows_what_its_server_will_be_given(value, code, tmp_path):
    given = {} if value is None else {"VLLM_PLUGINS": value}
    config = asking().model_copy(update={"environment": given})
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    deployment, _ = yaml.safe_load_all(Kubernetes().render(config)["kubernetes.yaml"])
    (first,) = deployment["spec"]["template"]["spec"]["initContainers"]
    values = yaml.safe_load(HelmProductionStack().render(config)["values.yaml"])
    (model,) = values["servingEngineSpec"]["modelSpec"]
    for container in (first, model["initContainer"]):
        words = ["/bin/sh", *(expand(word) for word in container["command"][1:])]
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(words, env=path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize("has_plugin", [True, False])
@pytest.mark.parametrize("config", [realistic_config(), cpu_config()])
def test_the_script_starts_no_vllm_without_the_plugin(config, has_plugin, tmp_path):
    asked = asking(config=config)
    (tmp_path / "serve.sh").write_text(Shell().render(asked)["serve.sh"])
    done = run(["/bin/sh", str(tmp_path / "serve.sh")], tmp_path, has_plugin=has_plugin)
    started = [line for line in done.stdout.splitlines() if " ".join(WORDS) in line]
    assert (done.returncode, len(started)) == ((0, 1) if has_plugin else (1, 0))


def test_the_yaml_file_is_started_behind_the_check():
    text = VllmYaml().render(asking())["vllm.yaml"]
    (start,) = (line for line in text.splitlines() if line.endswith("--config vllm.yaml"))
    check, _, command = start.removeprefix("#   ").rpartition(" && ")
    assert check == load_check("python")
    assert command == "vllm serve --config vllm.yaml"
    body = yaml.safe_load(text)
    assert (body[QUEST_TOKENS], body[WINDOW_TOKENS]) == (512, 1024)


def test_what_the_user_asks_of_others_stays_with_every_reason():
    text = VllmYaml().render(asking(OTHERS, *PARTS))["vllm.yaml"]
    body = yaml.safe_load(text)
    assert body["additional-config"] == WHOLE
    assert not {QUEST_TOKENS, WINDOW_TOKENS} & set(body)
    for reason in ("(base) given by you", "(tuned) reads less", "(tuned) keeps less"):
        assert f"# {reason}\n" in text


def test_compose_builds_the_image_with_the_plugin_and_checks_it(tmp_path):
    service = yaml.safe_load(Compose().render(asking())["compose.yaml"])["services"]["vllm"]
    assert service["build"] == {
        "dockerfile_inline": "FROM vllm/vllm-openai:v0.32.0\nRUN pip install kvtune==0.1.0\n"
    }
    assert service["image"] == "vllm-kvtune:v0.32.0"
    words = [word.replace("$$", "$") for word in (*service["entrypoint"], *service["command"])]
    words[0] = "/bin/sh"
    good, bad = (run(words, tmp_path, has_plugin=here) for here in (True, False))
    assert good.stdout.splitlines()[-1].startswith("vllm serve meta-llama/Llama-3.1-8B-Instruct ")
    assert good.stdout.splitlines()[-1].endswith(" ".join(WORDS))
    assert bad.returncode == 1
    assert "pip install kvtune==0.1.0" in bad.stderr


def check_of(container):
    assert container["name"] == "check-plugin"
    assert container["image"] == "vllm/vllm-openai:v0.32.0"
    return ["/bin/sh", *(expand(word) for word in container["command"][1:])]


@pytest.mark.parametrize(("has_plugin", "code"), [(True, 0), (False, 1)])
def test_a_pod_starts_with_a_container_that_checks(has_plugin, code, tmp_path):
    deployment, _ = yaml.safe_load_all(Kubernetes().render(asking())["kubernetes.yaml"])
    (first,) = deployment["spec"]["template"]["spec"]["initContainers"]
    values = yaml.safe_load(HelmProductionStack().render(asking())["values.yaml"])
    # The chart takes one such container, under this name.
    (model,) = values["servingEngineSpec"]["modelSpec"]
    for container in (first, model["initContainer"]):
        assert run(check_of(container), tmp_path, has_plugin=has_plugin).returncode == code
    assert model["vllmConfig"]["extraArgs"][-4:] == WORDS


@pytest.mark.parametrize("emitter", [Kubernetes, HelmProductionStack])
def test_the_way_to_an_image_with_the_plugin_is_there_to_be_copied(emitter):
    (text,) = emitter().render(asking()).values()
    commands = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    build = next(line for line in commands if "docker build" in line)
    assert build == (
        r"printf '%s\n' 'FROM vllm/vllm-openai:v0.32.0' 'RUN pip install kvtune==0.1.0' | "
        "docker build -t YOUR_REGISTRY/vllm-kvtune:v0.32.0 -"
    )
    assert commands[commands.index(build) + 1] == ("docker push YOUR_REGISTRY/vllm-kvtune:v0.32.0")


@pytest.mark.parametrize("name", sorted(emitters()))
@pytest.mark.parametrize(("option", "value"), LEVERS.items())
def test_every_lever_of_the_plugin_is_started_behind_the_check(option, value, name):
    config = asking(Setting(name=option, value=value, because="it was best"))
    assert asks_for_plugin(config)
    (text,) = emitters()[name]().render(config).values()
    documents = list(yaml.safe_load_all(text)) if name != "shell" else [text]
    flat = repr(documents)
    assert f"{option}" in flat
    assert str(value) in flat
    assert "kvtune.engines.vllm.plugin" in text
