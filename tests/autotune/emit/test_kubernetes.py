import pytest
import yaml
from contracts.emitter import EmitterContract, prose
from contracts.emitter_samples import NASTY, cpu_config, realistic_config
from contracts.kubernetes_rules import check_annotations, check_label, expand, plain_environment

from kvtune.autotune.emit.containers import gpu_count
from kvtune.autotune.emit.kubernetes import Kubernetes
from kvtune.types import ServingConfig, Setting


def documents(files: dict[str, str]) -> tuple[dict, dict]:
    deployment, service = yaml.safe_load_all(files["kubernetes.yaml"])
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    assert deployment.keys() == {"apiVersion", "kind", "metadata", "spec"}
    return deployment, service


def pod(config: ServingConfig) -> dict:
    deployment, _ = documents(Kubernetes().render(config))
    return deployment["spec"]["template"]["spec"]


class TestKubernetes(EmitterContract):
    emitter = Kubernetes

    def container(self, files):
        deployment, _ = documents(files)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return container

    def words(self, files, config):
        container = self.container(files)
        assert container["command"] == ["vllm", "serve"]
        return [expand(word) for word in container["args"]]

    def variables(self, files, config):
        return plain_environment(self.container(files).get("env", []))


@pytest.mark.parametrize("study", ["chat-prod", "Chat prod", "123", "true", "x" * 300, *NASTY])
def test_names_are_labels_and_the_service_finds_its_pods(study):
    deployment, service = documents(
        Kubernetes().render(realistic_config().model_copy(update={"study": study}))
    )
    check_label(deployment["metadata"]["name"])
    check_label(service["metadata"]["name"])
    template = deployment["spec"]["template"]["metadata"]
    assert service["spec"]["selector"] == template["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["labels"]
    for value in template["labels"].values():
        check_label(value)
    check_annotations(template["annotations"])
    check_annotations(deployment["metadata"]["annotations"])


def test_studies_with_similar_names_do_not_collide():
    studies = ["a b", "a_b", "a-b", "A b", "x" * 40, "x" * 41, "é", "è", ""]
    config = realistic_config()
    names = {
        documents(Kubernetes().render(config.model_copy(update={"study": study})))[0]["metadata"][
            "name"
        ]
        for study in studies
    }
    assert len(names) == len(studies)


def test_annotations_say_where_the_deployment_comes_from():
    deployment, _ = documents(Kubernetes().render(realistic_config()))
    annotations = deployment["metadata"]["annotations"]
    assert annotations["kvtune/study"] == "chat-prod"
    assert annotations["kvtune/trial"] == "17"
    assert annotations["kvtune/outcome"] == "winner"


def fingerprint(config: ServingConfig) -> str:
    deployment, _ = documents(Kubernetes().render(config))
    return deployment["metadata"]["annotations"]["kvtune/fingerprint"]


def test_fingerprint_names_the_server_and_not_the_report():
    config = realistic_config()
    later = config.model_copy(update={"created_at": "2027", "warnings": ("w",)})
    other = config.model_copy(update={"settings": config.settings[:2]})
    rotated = config.model_copy(update={"environment": {**config.environment, "HF_TOKEN": "new"}})
    assert fingerprint(later) == fingerprint(config) == fingerprint(rotated)
    assert fingerprint(other) != fingerprint(config)


def test_gpu_is_requested():
    (container,) = pod(realistic_config())["containers"]
    assert container["image"] == "vllm/vllm-openai:v0.32.0"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_as_many_gpus_are_requested_as_the_server_is_split_over():
    config = realistic_config()
    eight = config.device.model_copy(update={"count": 8})
    split = (
        Setting(name="tensor-parallel-size", value=2, because="b", origin="base"),
        Setting(name="pipeline-parallel-size", value=2, because="b", origin="base"),
    )
    assert gpu_count(config.model_copy(update={"device": eight})) == 1
    assert gpu_count(config.model_copy(update={"device": eight, "settings": split})) == 4


def test_cpu_and_memory_are_requested_without_a_gpu():
    (container,) = pod(cpu_config())["containers"]
    assert container["image"] == "vllm/vllm-openai-cpu:v0.32.0"
    assert container["resources"] == {"requests": {"cpu": 2, "memory": "12Gi"}}


def test_start_may_take_half_an_hour_and_all_probes_ask_health():
    (container,) = pod(realistic_config())["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]


def test_every_mount_has_its_volume():
    for config in (realistic_config(), cpu_config()):
        found = pod(config)
        (container,) = found["containers"]
        volumes = [volume["name"] for volume in found["volumes"]]
        assert [mount["name"] for mount in container["volumeMounts"]] == volumes


def test_local_model_is_mounted_read_only_and_the_hub_model_is_not():
    found = pod(cpu_config())
    assert found["volumes"][1] == {"name": "local-0", "hostPath": {"path": "/models/smol"}}
    assert found["containers"][0]["volumeMounts"][1] == {
        "name": "local-0",
        "mountPath": "/models/smol",
        "readOnly": True,
    }
    assert len(pod(realistic_config())["volumes"]) == 1


def test_secrets_are_read_from_one_secret_that_one_command_makes():
    files = Kubernetes().render(realistic_config())
    deployment, _ = documents(files)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    references = [entry["valueFrom"] for entry in container["env"] if "valueFrom" in entry]
    assert references == [
        {"secretKeyRef": {"name": "kvtune-secrets", "key": "HF_TOKEN"}},
        {"secretKeyRef": {"name": "kvtune-secrets", "key": "VLLM_API_KEY"}},
    ]
    assert (
        "kubectl create secret generic kvtune-secrets --from-literal=HF_TOKEN=... "
        "--from-literal=VLLM_API_KEY=..."
    ) in prose(files)


def test_service_named_vllm_cannot_set_the_port():
    assert pod(realistic_config())["enableServiceLinks"] is False


def test_variable_reference_in_an_argument_arrives_as_it_is():
    template = (Setting(name="chat-template", value="$(POD) $$ $$(x) $", because=""),)
    (container,) = pod(realistic_config().model_copy(update={"settings": template}))["containers"]
    assert container["args"][-1] == "$$(POD) $$$$ $$$$(x) $$"
