"""deploy/k8s is valid, strictly, and its parts fit together and to the code."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from sentinel.cli.main import build_parser
from sentinel.traces.places import RUN_DIR_VARIABLE
from tests.support import ROOT, require
from tests.support.schemas import schemas_folder

VERSIONS = ("1.29", "1.32", "1.37")  # 1.29: the first with native sidecars on by default
OPERATOR = {"PodMonitor": "podmonitor_v1", "PrometheusRule": "prometheusrule_v1"}


@cache
def rendered() -> list[dict[str, Any]]:
    """What `kubectl apply -k deploy/k8s` would send."""
    kubectl = shutil.which("kubectl")
    require(kubectl, "kubectl")
    done = subprocess.run(
        [str(kubectl), "kustomize", str(ROOT / "deploy/k8s")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(kind: str) -> dict[str, Any]:
    (found,) = [d for d in rendered() if d["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = one("Job")["spec"]["template"]["spec"]
    return spec


def sidecar() -> dict[str, Any]:
    (found,) = pod()["initContainers"]
    return dict(found)


def trainer() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def strict(schema: Any) -> Any:
    """A schema in which an object with named properties takes no others."""
    if isinstance(schema, list):
        return [strict(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    # metadata is Kubernetes's own affair, and the operator's schema leaves it open.
    if isinstance(out.get("properties"), dict) and out["properties"]:
        out.setdefault("additionalProperties", False)
    return out


def complaints(document: dict[str, Any], version: str) -> list[str]:
    """What the schemas have against one object."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if document["kind"] in OPERATOR:
        path = schemas_folder("prometheus-operator") / f"{OPERATOR[document['kind']]}.json"
        validator = Draft7Validator(strict(json.loads(path.read_text(encoding="utf-8"))))
        return [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(document)]
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []


def test_all_that_is_listed_is_rendered() -> None:
    assert sorted(d["kind"] for d in rendered()) == [
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodMonitor",
        "PrometheusRule",
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rendered_objects_are_valid_strictly(version: str) -> None:
    for document in rendered():
        assert complaints(document, version) == [], document["kind"]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Job", "spec.template.spec.initContainers.0.restartPolcy", "Always"),
        ("Job", "spec.backoffLimit", "three"),
        ("NetworkPolicy", "spec.ingres", []),
        ("PodMonitor", "spec.podMetricsEndpoints.0.ports", "metrics"),
        ("PrometheusRule", "spec.groups.0.rules.0.alarm", "x"),
    ],
)
def test_a_mistake_would_be_found(kind: str, path: str, value: object) -> None:
    document: Any = copy.deepcopy(one(kind))
    *way, last = path.split(".")
    place = document
    for key in way:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    assert complaints(document, VERSIONS[0])


def test_sentinel_is_a_native_sidecar_that_starts_first() -> None:
    assert sidecar()["restartPolicy"] == "Always"
    assert sidecar()["startupProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.torch
def test_trainer_and_sidecar_meet_at_the_socket_that_attach_looks_for() -> None:
    from sentinel_hooks.link import STANDARD_SOCKET

    assert build_parser().parse_args(sidecar()["args"]).uds == STANDARD_SOCKET
    (volume,) = [v for v in pod()["volumes"] if v["name"] == "socket"]
    assert "emptyDir" in volume
    for container in (sidecar(), trainer()):
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounts["socket"] == "/run/sentinel"
    assert pod()["securityContext"]["runAsUser"] == 10001  # the same for both: the mode is 0660


def test_the_sidecars_arguments_are_those_of_the_command() -> None:
    options = build_parser().parse_args(sidecar()["args"])
    assert (options.host, options.port) == ("0.0.0.0", 8123)
    mounts = {m["name"]: m["mountPath"] for m in sidecar()["volumeMounts"]}
    assert str(options.data).startswith(mounts["runs"] + "/")  # the root is read-only
    assert sidecar()["ports"] == [{"name": "metrics", "containerPort": 8123}]


def test_nothing_in_the_pod_may_do_more_than_it_must() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (sidecar(), trainer()):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]) == {"requests", "limits"}


def test_no_secret_is_in_the_manifests() -> None:
    (token,) = [e for e in sidecar()["env"] if e["name"] == "SENTINEL_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["name"] == "sentinel-token"
    assert all(d["kind"] != "Secret" for d in rendered())
    assert "SENTINEL_TOKEN" not in [e["name"] for e in trainer()["env"]]


def test_prometheus_finds_the_sidecar_and_sees_the_end_of_the_run() -> None:
    monitor = one("PodMonitor")["spec"]
    labels = one("Job")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in [p["name"] for p in sidecar()["ports"]]
    sleep = int(sidecar()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep >= 3 * int(endpoint["interval"].removesuffix("s"))
    assert pod()["terminationGracePeriodSeconds"] >= sleep + 15


def test_the_network_policy_lets_the_scrape_in() -> None:
    policy = one("NetworkPolicy")["spec"]
    labels = one("Job")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "metrics"}]


@pytest.mark.torch
def test_a_pod_that_is_started_again_is_the_same_run_and_a_halt_is_no_crash() -> None:
    from sentinel_hooks.errors import HALT_EXIT_CODE

    env = {e["name"]: e for e in trainer()["env"]}
    field = env["SENTINEL_RUN_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.labels['batch.kubernetes.io/job-name']"
    volumes = {v["name"]: v for v in pod()["volumes"]}
    assert "persistentVolumeClaim" in volumes["runs"]
    mounts = {m["name"]: m["mountPath"] for m in trainer()["volumeMounts"]}
    assert env[RUN_DIR_VARIABLE]["value"].startswith(mounts["runs"] + "/")
    fail, _ = one("Job")["spec"]["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob"
    assert fail["onExitCodes"]["values"] == [HALT_EXIT_CODE]
    assert fail["onExitCodes"]["containerName"] == trainer()["name"]


def test_the_images_are_those_that_the_dockerfiles_say_how_to_build() -> None:
    images = {sidecar()["image"]: "Dockerfile", trainer()["image"]: "Dockerfile.trainer"}
    for image, file in images.items():
        assert f"-t {image} ." in (ROOT / "deploy" / file).read_text()
