"""Policies, and whether pods of two nodes reach each other under them at Headscale 0.29.

The nodes have tag:headcni; their pods have 10.244.1.0/24 and 10.244.2.0/24 of 10.244.0.0/16, and
fd44:0:0:1::/64 and fd44:0:0:2::/64 of fd44::/48.
"""

from __future__ import annotations

import json
from typing import Any

TAG = "tag:headcni"
RANGES = ("10.244.0.0/16", "fd44::/48")
PODS = tuple((f"10.244.{number}.0/24", f"fd44:0:0:{number}::/64") for number in (1, 2))
ALL = [TAG, *RANGES]


def acl(src: list[str], dst: list[str], **more: Any) -> dict[str, Any]:
    return {"action": "accept", "src": src, "dst": dst, **more}


def grant(src: list[str], dst: list[str], ip: list[str], **more: Any) -> dict[str, Any]:
    return {"src": src, "dst": dst, "ip": ip, **more}


def policy(acls: Any = None, grants: Any = None, **more: Any) -> str:
    made: dict[str, Any] = {"tagOwners": {TAG: [], "tag:other": []}, **more}
    if acls is not None:
        made["acls"] = acls
    if grants is not None:
        made["grants"] = grants
    return json.dumps(made)


ANY = [f"{name}:*" for name in ALL]
V4, V6 = RANGES

# What it is, the policy, and the families in which all pods reach all pods.
POLICIES: list[tuple[str, str, set[int]]] = [
    ("an empty object", "{}", {4, 6}),
    ("no rules at all", policy(), {4, 6}),
    ("acls that are null", '{"acls": null}', {4, 6}),
    ("an empty list of acls", policy([]), set()),
    ("an empty list of grants", policy(None, []), set()),
    ("allow all", policy([acl(["*"], ["*:*"])]), {4, 6}),
    ("allow all as a grant", policy(None, [grant(["*"], ["*"], ["*"])]), {4, 6}),
    (
        "keys in another case",
        '{"ACLs": [{"Action": "accept", "SRC": ["*"], "dst": ["*:*"]}]}',
        {4, 6},
    ),
    ("our own rule", policy([acl(ALL, ANY)]), {4, 6}),
    ("our own grant", policy(None, [grant(ALL, ALL, ["*"])]), {4, 6}),
    ("only the tag", policy([acl([TAG], [f"{TAG}:*"])]), set()),
    ("only the pod ranges", policy([acl([V4, V6], [f"{V4}:*", f"{V6}:*"])]), {4, 6}),
    ("one family", policy([acl([TAG, V4], [f"{TAG}:*", f"{V4}:*"])]), {4}),
    ("the tag reaches pods, pods reach nothing", policy([acl([TAG], ANY)]), set()),
    ("pods reach the tag only", policy([acl(ALL, [f"{TAG}:*"])]), set()),
    ("everything to the ranges", policy([acl(["*"], [f"{V4}:*", f"{V6}:*"])]), {4, 6}),
    ("pods to everything", policy([acl([V4, V6], ["*:*"])]), {4, 6}),
    ("all addresses there are", policy([acl(["autogroup:danger-all"], ["*:*"])]), {4, 6}),
    ("tcp only", policy([acl(ALL, ANY, proto="tcp")]), set()),
    (
        "tcp and udp in two rules",
        policy([acl(ALL, ANY, proto="tcp"), acl(ALL, ANY, proto="udp")]),
        {4, 6},
    ),
    ("tcp and udp by number", policy(None, [grant(ALL, ALL, ["6:*", "17:*"])]), {4, 6}),
    ("icmp only", policy([acl(ALL, ANY, proto="icmp")]), set()),
    ("one port", policy([acl(ALL, [f"{name}:443" for name in ALL])]), set()),
    ("all ports in two parts", policy([acl(ALL, [f"{V4}:1-80,81-65535", f"{V6}:*"])]), {4, 6}),
    ("a port left out", policy(None, [grant(ALL, ALL, ["1-79", "81-65535"])]), set()),
    (
        "both halves of the range",
        policy([acl([V4], ["10.244.0.0/17:*", "10.244.128.0/17:*"])]),
        {4},
    ),
    (
        "halves that only reach themselves",
        policy(
            [
                acl(["10.244.0.0/23"], ["10.244.0.0/23:*"]),
                acl(["10.244.2.0/23"], ["10.244.2.0/23:*"]),
            ]
        ),
        set(),
    ),
    (
        "the ranges of today's nodes",
        policy([acl([*PODS[0], *PODS[1]], [f"{one}:*" for pair in PODS for one in pair])]),
        {4, 6},
    ),
    ("one direction", policy([acl([PODS[0][0]], [f"{PODS[1][0]}:*"])]), set()),
    ("a wider range", policy([acl(["10.0.0.0/8"], ["10.0.0.0/8:*"])]), {4}),
    ("host bits in the range", policy([acl(["10.244.7.9/16"], ["10.244.7.9/16:*"])]), {4}),
    ("v6 in brackets", policy([acl([V6], ["[fd44::]/48:*"])]), {6}),
    (
        "hosts",
        policy([acl(["pods"], ["pods:*"])], hosts={"pods": V4, "else": "10.9.0.0/16"}),
        {4},
    ),
    (
        "a host that is something else",
        policy([acl(["else"], ["*:*"])], hosts={"else": "10.9.0.0/16"}),
        set(),
    ),
    (
        "a group, a user and devices with tags",
        policy(
            [acl(["group:ops", "ann@", "autogroup:tagged", "autogroup:member"], ["*:*"])],
            groups={"group:ops": ["ann@"]},
        ),
        set(),
    ),
    ("every user's own devices", policy([acl(["autogroup:member"], ["autogroup:self:*"])]), set()),
    ("the internet", policy([acl(["*"], ["autogroup:internet:*"])]), set()),
    ("another tag", policy([acl(["tag:other"], ["tag:other:*"])]), set()),
    (
        "an app without traffic",
        policy(None, [{"src": ["*"], "dst": ["*"], "app": {"example.org/cap": [{}]}}]),
        set(),
    ),
    (
        "acls and grants together",
        policy([acl([V4], [f"{V4}:*"])], [grant([V6], [V6], ["*"])]),
        {4, 6},
    ),
    ("a note of headscale-admin", policy([{"#ha-meta": {}, **acl(["*"], ["*:*"])}]), {4, 6}),
]
