"""Who calls, for which container: the environment that a CNI runtime sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Optional

from .errors import BAD_ENVIRONMENT, CniError
from .ipam.config import split_cni_args
from .model import Owner, PodRef
from .record import dataclass, field, replace

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*\Z")
EXPECTED_NAME = "letters, digits, _ . and -, starting with a letter or digit"

# What each verb cannot do without, by the specification.
_REQUIRED = {
    "ADD": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    "DEL": ("CNI_CONTAINERID", "CNI_IFNAME"),
    "CHECK": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    "GC": ("CNI_PATH",),
    "STATUS": (),
    "VERSION": (),
}


@dataclass(frozen=True)
class Call:
    """One call: the runtime's CNI_* variables, checked."""

    command: str
    container_id: str = ""
    netns: str = ""
    ifname: str = ""
    args: str = ""
    path: str = ""
    netns_fd: Optional[int] = None  # of `netns`, opened by whoever handed the call on
    env: Mapping[str, str] = field(default_factory=dict, compare=False)
    pod: PodRef = PodRef()

    def for_owner(self, owner: Owner, netns: str) -> Call:
        """The same call for another container, as GC needs it."""
        env = {
            **self.env,
            "CNI_CONTAINERID": owner.container_id,
            "CNI_IFNAME": owner.ifname,
            "CNI_NETNS": netns,
            "CNI_ARGS": "",
        }
        return replace(
            self,
            container_id=owner.container_id,
            ifname=owner.ifname,
            netns=netns,
            netns_fd=None,
            env=env,
            pod=PodRef(),
        )

    @classmethod
    def of(cls, env: Mapping[str, str], netns_fd: Optional[int] = None) -> Call:
        """All that is missing or wrong is named at once, in one CniError."""
        command = env.get("CNI_COMMAND", "")
        wrong = []
        if command not in _REQUIRED:
            shown = "missing" if not command else repr(command)
            wrong.append(f"CNI_COMMAND is {shown}: expected one of {', '.join(_REQUIRED)}")
        required = _REQUIRED.get(command, ())
        wrong += [
            f"{name} is missing: {command} needs it" for name in required if not env.get(name)
        ]
        container, ifname = env.get("CNI_CONTAINERID", ""), env.get("CNI_IFNAME", "")
        if "CNI_CONTAINERID" in required and container and not NAME.match(container):
            wrong.append(f"CNI_CONTAINERID is {container!r}: expected {EXPECTED_NAME}")
        if "CNI_IFNAME" in required and ifname and not is_interface_name(ifname):
            wrong.append(
                f"CNI_IFNAME is {ifname!r}: expected 1 to 15 characters, "
                "none of them / or : or blank, and not . or .."
            )
        if wrong:
            raise CniError(BAD_ENVIRONMENT, "the CNI environment is not right", "; ".join(wrong))
        return cls(
            command=command,
            container_id=container,
            netns=env.get("CNI_NETNS", ""),
            ifname=ifname,
            args=env.get("CNI_ARGS", ""),
            path=env.get("CNI_PATH", ""),
            netns_fd=netns_fd,
            env=env,
            pod=pod_ref(env),
        )


def is_interface_name(name: str) -> bool:
    """The kernel's rules, as the specification has them."""
    short = 1 <= len(name.encode("utf-8", "replace")) <= 15
    return short and name not in (".", "..") and not re.search(r"[/:\s\0]", name)


def cni_args(env: Mapping[str, str]) -> dict[str, str]:
    """CNI_ARGS taken apart; what is no pair is left out (and is a mistake to ``parse``)."""
    return split_cni_args(env.get("CNI_ARGS", ""))


def pod_ref(env: Mapping[str, str]) -> PodRef:
    """Which pod it is, as kubelet's runtime says in CNI_ARGS."""
    args = cni_args(env)
    return PodRef(
        namespace=args.get("K8S_POD_NAMESPACE", ""),
        name=args.get("K8S_POD_NAME", ""),
        uid=args.get("K8S_POD_UID", ""),
    )
