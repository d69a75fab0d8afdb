"""A pod with a name, on a node: `named_pod.py ADD NAMESPACE NAME` prints its address.

It calls the plugins of the node's conflist as a container runtime does, and stands alone: tests and
the captures of the documentation copy it to a node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

CONFLIST = "/etc/cni/net.d/10-headcni.conflist"
BIN = "/opt/cni/bin"


def call(verb: str, namespace: str, name: str) -> dict:
    with open(CONFLIST) as stream:
        conflist = json.load(stream)
    plugin = {
        **conflist["plugins"][0],
        "cniVersion": conflist["cniVersion"],
        "name": conflist["name"],
    }
    plugin.pop("capabilities", None)
    named = f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID=uid-{name}"
    env = {
        **os.environ,
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": f"container-{name}",
        "CNI_NETNS": f"/run/netns/{name}",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": BIN,
        "CNI_ARGS": f"IgnoreUnknown=1;{named}",
    }
    done = subprocess.run(
        [f"{BIN}/{plugin['type']}"],
        input=json.dumps(plugin),
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout or "{}")


def main(verb: str, namespace: str, name: str) -> None:
    if verb == "ADD":
        subprocess.run(["ip", "netns", "add", name], timeout=30, check=True)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], timeout=30, check=True)
        print(call(verb, namespace, name)["ips"][0]["address"].partition("/")[0])
    else:
        call(verb, namespace, name)
        subprocess.run(["ip", "netns", "del", name], timeout=30, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
