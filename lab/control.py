"""The control machine: Headscale as a service, and the mirror of Tailscale's downloads."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from . import machines
from .layout import CONTROL, Lab, LabError, Plan

HEADSCALE_UNIT = """\
[Unit]
Description=Headscale
After=network.target

[Service]
ExecStart=/opt/lab/headscale/headscale serve
StateDirectory=headscale
RuntimeDirectory=headscale
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
"""

MIRROR_UNIT = """\
[Unit]
Description=Mirror of Tailscale's downloads

[Service]
ExecStart=/usr/bin/python3 /opt/lab/mirror.py /opt/lab/mirror 8081
DynamicUser=yes
Restart=always

[Install]
WantedBy=multi-user.target
"""


def headscale_config(plan: Plan) -> str:
    """Plain http and an embedded DERP: nothing of the lab leaves the machine."""
    return f"""\
server_url: {plan.headscale_url}
listen_addr: 0.0.0.0:8080
metrics_listen_addr: 127.0.0.1:9090
grpc_listen_addr: 127.0.0.1:50443
noise:
  private_key_path: /var/lib/headscale/noise_private.key
prefixes:
  v4: 100.64.0.0/10
  v6: fd7a:115c:a1e0::/48
  allocation: sequential
derp:
  server:
    enabled: true
    region_id: 999
    region_code: lab
    region_name: Lab
    stun_listen_addr: 0.0.0.0:3478
    private_key_path: /var/lib/headscale/derp_server_private.key
    automatically_add_embedded_derp_region: true
    ipv4: {plan.address(CONTROL)}
    ipv6: {plan.address6(CONTROL)}
  urls: []
  paths: []
  auto_update_enabled: false
disable_check_updates: true
database:
  type: sqlite
  sqlite:
    path: /var/lib/headscale/db.sqlite
    write_ahead_log: true
policy:
  mode: database
dns:
  magic_dns: true
  base_domain: mesh.lab
  override_local_dns: false
  nameservers:
    global: []
  extra_records_path: /var/lib/headscale/extra-records.json
unix_socket: /run/headscale/headscale.sock
unix_socket_permission: "0770"
logtail:
  enabled: false
log:
  level: info
"""


def files(plan: Plan) -> dict[str, bytes]:
    return {
        "etc/headscale/config.yaml": headscale_config(plan).encode(),
        "var/lib/headscale/extra-records.json": b"[]\n",
        "etc/systemd/system/headscale.service": HEADSCALE_UNIT.encode(),
        "etc/systemd/system/tailscale-mirror.service": MIRROR_UNIT.encode(),
        "opt/lab/mirror.py": Path(__file__).with_name("mirror.py").read_bytes(),
    }


def start(lab: Lab, plan: Plan) -> None:
    machines.inside(
        lab,
        CONTROL,
        "systemctl",
        "enable",
        "--now",
        "--quiet",
        "headscale.service",
        "tailscale-mirror.service",
    )
    for url in (f"{plan.headscale_url}/health", f"{plan.mirror_url}/stable/?mode=json"):
        deadline = time.monotonic() + 60
        while not _answers(url):
            if time.monotonic() > deadline:
                raise LabError(
                    f"{url} does not answer: `make shell NODE=control`, "
                    "then `journalctl -u headscale -u tailscale-mirror`"
                )
            time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def make_api_key(lab: Lab) -> None:
    """A key for the controller, kept where only root reads, as a user's would be in a vault."""
    done = machines.inside(
        lab, CONTROL, "/opt/lab/headscale/headscale", "apikeys", "create", "--expiration", "90d"
    )
    assert done is not None
    key = done.stdout.strip().splitlines()[-1]
    with os.fdopen(os.open(lab.api_key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(key + "\n")
