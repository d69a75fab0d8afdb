# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The options of tailscale_join, for those who ask whether there is anything to do for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from .shared.localapi import SOCKET, LocalAPI, LocalAPIError
from .tailnet import (
    TAILSCALE_INC,
    Plan,
    Wishes,
    key_mistakes,
    plain_http_warning,
    read,
    same_server,
    server_mistakes,
)

SPEC: dict[str, dict[str, Any]] = {
    "socket": {"type": "path", "default": SOCKET},
    "login_server": {"type": "str", "default": ""},
    "auth_key": {"type": "str", "default": "", "no_log": True},
    "login": {"type": "str", "choices": ["now", "later"], "default": "now"},
    "force_reauth": {"type": "bool", "default": False},
    "hostname": {"type": "str"},
    "tags": {"type": "list", "elements": "str"},
    "accept_routes": {"type": "bool"},
    "snat_subnet_routes": {"type": "bool"},
    "accept_dns": {"type": "bool"},
    "shields_up": {"type": "bool"},
    "advertise_routes": {"type": "list", "elements": "str"},
    "routes_state": {
        "type": "str",
        "choices": ["merge", "exact", "absent"],
        "default": "merge",
    },
    "timeout": {"type": "int", "default": 60},
}


def wishes_of(wanted: Mapping[str, Any]) -> Wishes:
    return Wishes(**{name: wanted[name] for name in Wishes._fields})


def mistakes(wanted: Mapping[str, Any]) -> list[str]:
    wrong = wishes_of(wanted).mistakes() + key_mistakes(wanted["auth_key"])
    if wanted["login_server"]:
        wrong += server_mistakes(wanted["login_server"])
    if wanted["timeout"] < 1:
        wrong.append(f"timeout: {wanted['timeout']} is too short: expected a second or more")
    return wrong


def mistakes_of(given: Mapping[str, Any]) -> list[str]:
    """All that tailscale_join would refuse of these options."""
    checked = ArgumentSpecValidator(SPEC).validate(dict(given))
    return list(checked.error_messages) or mistakes(checked.validated_parameters)


def joined_key(given: Mapping[str, Any]) -> str:
    """The key of a node that is joined just so; empty if tailscale_join has anything to do, or to
    say."""
    checked = ArgumentSpecValidator(SPEC).validate(dict(given))
    wanted = checked.validated_parameters
    if checked.errors.errors or mistakes(wanted):
        return ""
    server = wanted["login_server"].rstrip("/")
    if plain_http_warning(server):
        return ""
    try:
        now = read(LocalAPI(wanted["socket"]), patience=0.0)
        plan = Plan.of(now, server, wishes_of(wanted), wanted["force_reauth"])
    except LocalAPIError:
        return ""
    status = now.status
    # One that its login server has not answered yet may have been forgotten there.
    settled = status and status.state == "Running" and status.online and not plan.changed
    return status.node_key if status and settled else ""


def joined_elsewhere(given: Mapping[str, Any]) -> str:
    """The server that a node is joined to, if it is not the one that is asked for: to join that one
    takes it out of a tailnet."""
    wanted = ArgumentSpecValidator(SPEC).validate(dict(given)).validated_parameters
    try:
        now = read(LocalAPI(wanted["socket"]), patience=0.0)
    except LocalAPIError:
        return ""
    if not now.status or not now.status.have_node_key or not wanted["login_server"]:
        return ""
    here = now.login_server or TAILSCALE_INC[-1]
    return "" if same_server(here, wanted["login_server"]) else here


def joined_tags(given: Mapping[str, Any]) -> dict[str, Any]:
    """`joined_tags`: what the login server has given the node, and None for a node that has yet to
    log in there. Of a node that is joined and not running it is not known, and left out."""
    wanted = ArgumentSpecValidator(SPEC).validate(dict(given)).validated_parameters
    try:
        status = read(LocalAPI(wanted["socket"]), patience=0.0).status
    except LocalAPIError:
        return {"joined_tags": None}
    if not status or not status.have_node_key or joined_elsewhere(given):
        return {"joined_tags": None}
    return {"joined_tags": list(status.tags)} if status.state == "Running" else {}
