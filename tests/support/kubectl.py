#!/usr/bin/env python3
"""A kubectl for a KubeServer: it asks for tokens and nodes over TLS, and keeps other objects in a
file beside the program. Its credentials come from the kubeconfig, as a real kubectl's do."""

from __future__ import annotations

import base64
import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

RBAC = ".rbac.authorization.k8s.io"
SHARED = "headcni-node"  # the objects of the manifest, which carry no label


def ask(config: dict[str, Any], path: str, body: bytes | None = None) -> str:
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    token = user.get("token") or Path(user["tokenFile"]).read_text()
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    request = urllib.request.Request(
        cluster["server"] + path, body, {"Authorization": f"Bearer {token}"}
    )
    tls = ssl.create_default_context(cadata=authority)
    with urllib.request.urlopen(request, timeout=10, context=tls) as answer:
        return str(answer.read().decode())


def named(made: dict[str, Any]) -> str:
    kind = made["kind"].lower()
    return kind + (RBAC if "role" in kind else "") + "/" + made["metadata"]["name"]


def main() -> None:
    kubeconfig, _limit, *words = sys.argv[1:]
    config = json.loads(Path(kubeconfig.removeprefix("--kubeconfig=")).read_text())
    store = Path(sys.argv[0]).with_name("objects")
    objects = set(store.read_text().split()) if store.exists() else set()
    given = sys.stdin.read()
    if words[0] == "config":
        print(json.dumps(config))
    elif words[:2] == ["get", "node"]:
        print(ask(config, f"/api/v1/nodes/{words[2]}"))
    elif words[0] == "get":
        print("\n".join(name for name in objects if not name.endswith(f"/{SHARED}")))
    elif words[:2] == ["create", "--raw"]:
        print(ask(config, words[2], given.encode()))
    elif words[0] == "apply" and given.startswith("{"):
        objects |= {named(made) for made in json.loads(given)["items"]}
    elif words[0] == "delete":
        objects -= set(words[1:])
    store.write_text("\n".join(objects))


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as refused:
        sys.exit(f"error: the server answered {refused.code} {json.load(refused)['reason']}")
