"""What `helm test` runs: the very command of the hook's pod, on a server with the settings of the same release."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.e2e.conftest import grpcurl
from tests.e2e.smoked import Done, failures, passed
from tests.helm.conftest import CHART, ROOT, Object
from tests.helm.test_templates import Render, only, settings_of
from tests.service.certificates import Authority
from tests.service.conftest import Server, serve, template
from tests.service.transport.presented import entry

pytestmark = pytest.mark.proof

__all__ = ["grpcurl", "serve", "template"]

TOKENS = ("auth.tokens.existingSecret=tokens", "smoke.tokenSecret=smoke-token")
TLS = ("tls.existingSecret=tls",)
ADMIN = {"load", "optimizations"}
GUARDED = {
    "no values": ((), ADMIN | {"the health port"}),
    "tokens": (TOKENS, {"without a token nobody is served", "nor with a token that nobody has"}),
    "TLS and tokens, with the admin port": (
        (*TLS, *TOKENS, "smoke.admin=true"),
        ADMIN | {"plaintext is refused where TLS is spoken", "nor on the admin port"},
    ),
    "certificates of callers": (
        (*TLS, "tls.clientCA=true", "smoke.clientSecret=client", "smoke.serverName=models.example"),
        {"without a certificate nobody is connected", "the health port"},
    ),
}


@pytest.fixture(scope="module")
def secrets() -> dict[str, dict[str, bytes]]:
    """Of the namespace. The certificate is for the Service's name and one of the operator's."""
    authority = Authority("ours")
    pairs = {
        "tls": authority.sign(x509.DNSName("one-whippet"), x509.DNSName("models.example")),
        "client": authority.sign(),
    }
    made = {name: {"tls.key": key, "tls.crt": pem, "ca.crt": authority.pem} for name, (key, pem) in pairs.items()}
    tokens = {"tokens.yaml": entry(rights="[generate, view]").encode()}
    return {**made, "tokens": tokens, "smoke-token": {"token": b"secret"}}


def mounted(pod: Object, container: Object, held: dict[str, Any], folder: Path) -> dict[str, str]:
    """Puts what a kubelet would mount under `folder`; path in the container → path here."""
    volumes = {one["name"]: one for one in pod["volumes"]}
    paths: dict[str, str] = {}
    for mount in container["volumeMounts"]:
        here = folder / mount["mountPath"].strip("/")
        here.mkdir(parents=True, exist_ok=True)
        paths[mount["mountPath"]] = str(here)
        volume = volumes[mount["name"]]
        if "secret" in volume:
            files = held[volume["secret"]["secretName"]]
            shown = volume["secret"].get("items") or [{"key": key, "path": key} for key in files]
            for one in shown:
                (here / one["path"]).write_bytes(files[one["key"]])
        elif "configMap" in volume:
            for name, text in held[volume["configMap"]["name"]].items():
                (here / name).write_text(text)
    return paths


def here(text: str, places: dict[str, str]) -> str:
    """With the paths and addresses of this machine."""
    names = "|".join(sorted(map(re.escape, places), key=len, reverse=True))
    return re.sub(rf"(?<![^\s])({names})(?=[\s/]|$)", lambda found: places[found[1]], text)


def run(pod: Object, held: dict[str, Any], names: dict[str, str], folder: Path, grpcurl: Path) -> Done:
    """The pod's container, with its command, arguments and environment and nothing else."""
    (container,) = pod["containers"]
    places = {**mounted(pod, container, held, folder), **names}
    environment = {"PATH": f"{grpcurl.parent}:{os.environ['PATH']}", "TMPDIR": places["/tmp"]}
    for one in container["env"]:
        environment[one["name"]] = here(one["value"], places)
    words = [here(word, places) for word in (*container["command"], *container["args"])]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", GUARDED)
def test_the_hook_passes_on_the_server_of_its_release(
    name: str,
    render: Render,
    secrets: dict[str, dict[str, bytes]],
    serve: Callable[..., AbstractContextManager[Server]],
    tmp_path: Path,
    grpcurl: Path,
) -> None:
    sets, checks = GUARDED[name]
    objects = render(*sets, "drain.delaySeconds=0")
    held: dict[str, Any] = dict(secrets)
    held |= {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    deployed = only(objects, "Deployment")["spec"]["template"]["spec"]
    settings = tmp_path / "settings"
    settings.mkdir()
    flags = settings_of(objects, settings)
    places = mounted(deployed, deployed["containers"][0], held, tmp_path / "server")
    text = (settings / "config.yaml").read_text()
    (settings / "config.yaml").write_text(here(text, {**places, "/opt/whippet": str(ROOT)}))
    with serve(*flags) as server:
        names = {
            "one-whippet:50051": server.data,
            "one-whippet-headless:50052": server.admin_address,
            "one-whippet-headless:50053": server.health,
        }
        hook = only(objects, "Pod", "one-whippet-smoke")["spec"]
        done = run(hook, held, names, tmp_path / "hook", grpcurl)
        assert not failures(done), done.stdout + done.stderr
        assert set(passed(done)) >= checks
        assert ("load" in passed(done)) == ("load" in checks)


def test_it_fails_where_the_server_is_another_one(render: Render, serve: Any, tmp_path: Path, grpcurl: Path) -> None:
    """Another version than the chart's, as an image that was not rolled out would have."""
    objects = render()
    held = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    hook = only(objects, "Pod", "one-whippet-smoke")["spec"]
    (version,) = (one for one in hook["containers"][0]["env"] if one["name"] == "VERSION")
    version["value"] = "9.9.9"
    with serve() as server:
        names = {
            "one-whippet:50051": server.data,
            "one-whippet-headless:50052": server.admin_address,
            "one-whippet-headless:50053": server.health,
        }
        done = run(hook, held, names, tmp_path, grpcurl)
    assert [line.partition(":")[0] for line in failures(done)] == ["load"]


def test_the_script_is_that_of_this_tree(render: Render) -> None:
    held = only(render(), "ConfigMap", "one-whippet-smoke")["data"]["smoke.sh"]
    assert held.strip() == (CHART.parents[1] / "scripts" / "smoke.sh").read_text().strip()


def test_what_admits_the_hook(render: Render) -> None:
    """To the admin port only where it asks that."""
    for sets, asks in (
        (TOKENS, False),
        ((*TOKENS, "smoke.admin=true"), True),
        ((), True),
        (("smoke.admin=false",), False),
    ):
        policy = only(render(*sets), "NetworkPolicy", "one-whippet")["spec"]["ingress"]
        (admin,) = (rule for rule in policy if rule["ports"][0]["port"] == 50052)
        admitted = [one["podSelector"]["matchLabels"].get("app.kubernetes.io/component") for one in admin["from"]]
        assert ("smoke" in admitted) is asks
