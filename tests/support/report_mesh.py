"""Answers of a mesh of any size, as headcni_survey and headscale_info give them."""

from __future__ import annotations

from functools import cache
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils import pair_choice, path_survey
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import gathered
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Report

NOW = 1_790_000_000.0
SITES = ("amsterdam", "frankfurt", "home office", "paris", "zürich")
HOSTILE = (
    '<img src=x onerror="document.title=1">\'"&</title></script><script>alert(1)</script>{{ 7*7 }}'
)


def name_of(number: int) -> str:
    return f"node{number + 1:03}"


def address_of(number: int) -> str:
    return f"100.64.{number // 250}.{number % 250 + 1}"


def cidr_of(number: int) -> str:
    return f"10.{42 + number // 256}.{number % 256}.0/24"


def site_of(number: int, size: int) -> str:
    return SITES[number * len(SITES) // size] if size > 3 else SITES[number % 2]


def survey(number: int, size: int) -> dict[str, Any]:
    """The last node's paths are relayed; the one before it loses pings; from 50 nodes on a few have
    findings."""
    status: dict[str, Any] = {
        "node": name_of(number),
        "ready": True,
        "mode": "daemon" if number % 4 == 3 else "host",
        "version": "0.4.0" if number % 25 != 7 else "0.3.0",
        "attachments": 10 + number % 40,
        "pod_cidrs": [cidr_of(number)],
        "conditions": [{"name": "routes", "ok": True, "reason": ""}],
        "firewalls": [{"name": "ufw", "ok": True, "summary": "ufw"}] if number % 5 == 2 else [],
        "alarms": [],
        "warnings": [],
        "pools": [],
        "key_expires": 0.0,
        "drift": {"repaired": {"routes": number % 3}, "last": 0.0},
    }
    used = 10 + number % 40 if number % 41 else 250
    findings = []
    if size >= 50 and number % 47 == 12:
        status["ready"] = False
        status["conditions"][0] |= {"ok": False, "reason": "Headscale has not approved the routes"}
        findings = [
            {
                "part": "forwarding",
                "id": "forwarding-off-ipv4",
                "found": "net.ipv4.ip_forward is 0",
                "means": "the kernel drops every packet between pods and other machines",
                "run": "sysctl -w net.ipv4.ip_forward=1",
                "where": "node",
                "sure": True,
            }
        ]
    return {
        "status": status,
        "routes": {"counts": {"ok": size - 1}, "wrong": [], "own": [], "rules": 2},
        "pools": [
            {
                "network": "headcni",
                "subnet": cidr_of(number),
                "total": 253,
                "free": 253 - used,
                "counts": {"leaked": int(number % 61 == 5)},
            }
        ],
        "findings": findings,
        "tailnet": {
            "name": name_of(number),
            "addresses": [address_of(number)],
            "version": "1.102.5",
            "relay": "lab",
        },
        "system": {
            "kernel": "6.1.0-40-amd64",
            "machine": "x86_64",
            "distribution": "Debian GNU/Linux 12 (bookworm)",
            "python": "3.11.2",
        },
        "paths": paths(number, size),
        "problems": {},
    }


@cache
def measured_by(size: int) -> dict[str, list[str]]:
    every = size <= path_survey.ALL_UP_TO
    return pair_choice.chosen([name_of(at) for at in range(size)], every)


def paths(number: int, size: int) -> list[dict[str, Any]]:
    found = []
    for name in measured_by(size)[name_of(number)]:
        other = int(name.removeprefix("node")) - 1
        relayed = size - 1 in (number, other)
        away = site_of(number, size) != site_of(other, size)
        latency = (0.6 if not away else 9.0 + 7 * (abs(number - other) % 9)) + (
            40 if relayed else 0
        )
        found.append(
            {
                "name": name,
                "address": address_of(other),
                "path": "derp" if relayed else "direct",
                "through": "DERP region lab (999)" if relayed else f"192.0.2.{other % 250}:41641",
                "sent": 5,
                "lost": int(size > 3 and size - 2 in (number, other) and number % 2),
                "latency_ms": round(latency, 1),
            }
        )
    return found


def headscale(size: int) -> dict[str, Any]:
    return {
        "version": "0.29.2",
        "nodes": [
            {
                "name": name_of(at),
                "hostname": name_of(at),
                "addresses": [address_of(at)],
                "online": True,
                "available_routes": [cidr_of(at)],
                "approved_routes": [cidr_of(at)] if at != 1 or size < 50 else [],
                "served_routes": [cidr_of(at)] if at != 1 or size < 50 else [],
            }
            for at in range(size)
        ],
    }


def surveys(size: int) -> dict[str, Any]:
    return {name_of(at): survey(at, size) for at in range(size)}


def report(size: int, now: float = NOW, **changed: Any) -> Report:
    """`changed` replaces answers: of nodes by name, or those of `headscale`."""
    answers = surveys(size)
    server = changed.pop("headscale", headscale(size))
    answers.update(changed)
    sites = {name_of(at): site_of(at, size) for at in range(size)}
    return gathered.report(list(answers), answers, sites, server, now)
