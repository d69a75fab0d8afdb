"""What all plugins share: CNI versions, the call, the attachment's key, the outcome, and `main`.

A plugin is a name, its versions and a function that serves one call. `run` does the rest: it checks
the variables of the call, answers VERSION, and turns the answer or the error into output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from . import light_json as json
from .errors import (
    BAD_ENVIRONMENT,
    INCOMPATIBLE_VERSION,
    INTERNAL,
    NOT_AVAILABLE,
    TRY_AGAIN,
    UNDECODABLE,
    CniError,
    shortened,
)
from .model import Owner, PodRef
from .record import TYPE_CHECKING, dataclass, field

if TYPE_CHECKING:
    from _socket import socket
    from typing import Any, Callable, Optional, Tuple, TypeAlias

    from .model import NetworkConfig
    from .store import Attachment

VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
LATEST = VERSIONS[-1]
OLDEST = ("0.1.0", "0.2.0")  # some callers of loopback and IPAM plugins still use them
READABLE = ("0.3.0", *VERSIONS)  # 0.3.0 is 0.3.1 by another name, and some plugins still use it
ALL_VERSIONS = (*OLDEST, *READABLE)
SINCE = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}  # the version that added the verb

# The variables that each verb needs according to the specification.
REQUIRED: Mapping[str, Tuple[str, ...]] = {
    "ADD": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    "DEL": ("CNI_CONTAINERID", "CNI_IFNAME"),
    "CHECK": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    "GC": ("CNI_PATH",),
    "STATUS": (),
    "VERSION": (),
}

# libcni sends both: an early draft of the specification had the second name.
VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")

# The position of this call in a chain of plugins that call plugins, such as "0.2" or "1.ipam".
# The shim passes it on to the daemon.
NESTING = "HEADCNI_CHAIN"

_WITHOUT_SIGNS = str.maketrans("", "", "_.-")
EXPECTED_NAME = "letters, digits, _ . and -, starting with a letter or digit"

LONGEST_TRACE = 16384  # characters; an exception may quote all of its input


@dataclass(frozen=True)
class Call:
    """One call: the runtime's CNI_* variables, checked, and the configuration, not yet decoded."""

    command: str
    container_id: str = ""
    netns: str = ""
    ifname: str = ""
    netns_fd: Optional[int] = None  # an open descriptor of `netns`, if the caller passed one
    env: Mapping[str, str] = field(default_factory=dict, compare=False)
    pod: PodRef = PodRef()
    stdin: bytes = b""

    @classmethod
    def of(
        cls,
        env: Mapping[str, str],
        netns_fd: Optional[int] = None,
        stdin: bytes = b"",
        required: Optional[Mapping[str, Tuple[str, ...]]] = None,
    ) -> Call:
        """The call. One CniError names every variable that is missing or wrong."""
        command = env.get("CNI_COMMAND", "")
        wrong = []
        if command not in REQUIRED:
            shown = "missing" if not command else repr(command)
            wrong.append(f"CNI_COMMAND is {shown}: expected one of {', '.join(REQUIRED)}")
        needed = (required or REQUIRED).get(command, ())
        wrong += [f"{name} is missing: {command} needs it" for name in needed if not env.get(name)]
        container, ifname = env.get("CNI_CONTAINERID", ""), env.get("CNI_IFNAME", "")
        if "CNI_CONTAINERID" in needed and container and not is_name(container):
            wrong.append(f"CNI_CONTAINERID is {container!r}: expected {EXPECTED_NAME}")
        if "CNI_IFNAME" in needed and ifname and not is_interface_name(ifname):
            wrong.append(
                f"CNI_IFNAME is {ifname!r}: expected 1 to 15 characters, "
                "none of them / or : or blank, and not . or .."
            )
        if wrong:
            raise CniError(BAD_ENVIRONMENT, "the CNI environment is not right", "; ".join(wrong))
        netns = env.get("CNI_NETNS", "")
        return cls(command, container, netns, ifname, netns_fd, env, pod_ref(env), stdin)

    def owner(self, network: str) -> Owner:
        """The key of the call's attachment in the store."""
        return Owner(nested_name(network, self.env), self.container_id, self.ifname)

    def for_owner(self, owner: Owner, netns: str) -> Call:
        """The same call for another container, as GC needs it."""
        env = environment_of(self.env, owner, netns)
        return Call(self.command, owner.container_id, netns, owner.ifname, None, env)


class Outcome:
    """The result of a call. The runtime gets `output`; the rest is for metrics and events."""

    def __init__(self) -> None:
        self.output = b""
        self.error: Optional[CniError] = None
        self.pod = PodRef()
        self.network: Optional[NetworkConfig] = None  # None if the configuration is not understood
        self.phases: dict[str, float] = {}  # seconds; if the call failed, it did in the last one
        self.attachment: Optional[Attachment] = None  # what ADD made or found, or what DEL removed
        self.unrecorded = ""  # why a DEL that has succeeded is not in the store

    @property
    def code(self) -> int:
        """The code of the CNI error, or 0."""
        return self.error.code if self.error is not None else 0

    @property
    def exit_code(self) -> int:
        return 1 if self.error is not None else 0


Answer: TypeAlias = "Optional[Mapping[str, Any]]"


class Plugin:
    """A plugin: `serve` does one call, except VERSION, and may add to its outcome."""

    def __init__(
        self,
        name: str,
        versions: Tuple[str, ...],
        serve: Callable[[Call, Outcome], Answer],
        required: Optional[Mapping[str, Tuple[str, ...]]] = None,
        assumed_version: str = "",
    ) -> None:
        """`required` has the variables that each verb needs, if they differ from REQUIRED.
        `assumed_version` is for configurations without a version; "" if they must have one."""
        self.name, self.versions, self.serve = name, versions, serve
        self.required, self.assumed_version = required, assumed_version


def run(
    plugin: Plugin, env: Mapping[str, str], stdin: bytes, netns_fd: Optional[int] = None
) -> Outcome:
    """Serve one call, from the input of the runtime to the output on stdout."""
    outcome = Outcome()
    try:
        call = Call.of(env, netns_fd, stdin, plugin.required)
        outcome.pod = call.pod
        answer = (
            _spoken(plugin, stdin) if call.command == "VERSION" else plugin.serve(call, outcome)
        )
    except Exception as problem:
        fail(outcome, plugin, problem, env, stdin)
    else:
        outcome.output = b"" if answer is None else _encode(answer)
    return outcome


def fail(
    outcome: Outcome, plugin: Plugin, problem: Exception, env: Mapping[str, str], stdin: bytes
) -> None:
    """Record the failure in the outcome. Any exception but CniError is a bug."""
    if not isinstance(problem, CniError):
        import traceback

        trace = traceback.format_exception(type(problem), problem, problem.__traceback__)
        print(shortened("".join(trace), LONGEST_TRACE), file=sys.stderr)
        details = f"{type(problem).__name__}: {problem}"
        problem = CniError(INTERNAL, f"a bug in {plugin.name}", details)
    elif env.get("CNI_COMMAND") == "STATUS" and (
        problem.code >= INTERNAL or problem.code == TRY_AGAIN
    ):
        problem = CniError(NOT_AVAILABLE, problem.msg, problem.details)
    outcome.error = problem
    outcome.output = _encode(problem.as_dict(answer_version(plugin, stdin)))


def main(plugin: Plugin, stdin: bytes, daemon: Optional[socket] = None) -> int:
    """Run the call in the process that the runtime started; returns the exit code. `daemon` is the
    connection to a daemon that has handed the call back."""
    outcome = run(plugin, os.environ, stdin)
    sys.stdout.buffer.write(outcome.output)
    sys.stdout.flush()
    if daemon is not None:
        _report(daemon, outcome)
    return outcome.exit_code


def _report(daemon: socket, outcome: Outcome) -> None:
    """For the daemon's metrics and events. It may have ended: then the report is lost."""
    from .shim import HAND_OVER_SECONDS, MAGIC

    output = outcome.output.decode() if outcome.code else ""
    said = {"code": outcome.code, "phases": outcome.phases, "output": output}
    body = json.dumps(said).encode()
    with suppress(OSError):
        daemon.settimeout(HAND_OVER_SECONDS)
        daemon.sendall(MAGIC + len(body).to_bytes(4, "big") + body)


def _encode(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def decode(stdin: bytes) -> Mapping[str, Any]:
    """The configuration as a JSON object."""
    try:
        conf = json.loads(stdin)
    except (ValueError, RecursionError) as problem:
        raise CniError(UNDECODABLE, "the configuration is not JSON", str(problem)) from None
    if not isinstance(conf, dict):
        raise CniError(UNDECODABLE, "the configuration is not a JSON object")
    return conf


def _spoken(plugin: Plugin, stdin: bytes) -> Mapping[str, Any]:
    """The answer to VERSION."""
    version = answer_version(plugin, stdin)
    if plugin.assumed_version:
        version = version_of(plugin, decode(stdin))
    return {"cniVersion": version, "supportedVersions": list(plugin.versions)}


def version_of(plugin: Plugin, conf: Mapping[str, Any]) -> str:
    return str(conf.get("cniVersion") or plugin.assumed_version)


def answer_version(plugin: Plugin, stdin: bytes) -> str:
    """The version of an error: the requested version if the plugin supports it."""
    with suppress(CniError):
        version = version_of(plugin, decode(stdin))
        if version in plugin.versions:
            return version
    return plugin.versions[-1]


def require_version(plugin: Plugin, version: str) -> None:
    if version not in plugin.versions:
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"cniVersion is {version}",
            f"{plugin.name} speaks {', '.join(plugin.versions)}",
        )


def require_verb(verb: str, version: str) -> None:
    if not has_verb(verb, version):
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"{verb} is not part of CNI {version}: that version has no {verb}",
            f"set cniVersion to {SINCE[verb]} or later",
        )


def has_verb(verb: str, version: str) -> bool:
    since = SINCE.get(verb, ALL_VERSIONS[0])
    return ALL_VERSIONS.index(version) >= ALL_VERSIONS.index(since)


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        phases[name] = phases.get(name, 0.0) + time.monotonic() - began


def steps(env: Mapping[str, str]) -> tuple[str, ...]:
    """The steps of our plugins that led to this call; none if the runtime made it."""
    return tuple(filter(None, env.get(NESTING, "").split(".")))


def nested_name(network: str, env: Mapping[str, str]) -> str:
    """The name of the network in the store.

    A headcni in a chain of ours gets the same names as the headcni that calls it, and uses the same
    store. So the steps of the chain become part of its network's name, which has no slash itself.
    """
    if NESTING not in env or "/" in network:
        return network
    taken = steps(env)
    return f"{network}/{'.'.join(taken)}" if taken else network


def environment_of(env: Mapping[str, str], owner: Owner, netns: str) -> dict[str, str]:
    """The variables of a call for another container."""
    names = {"CNI_CONTAINERID": owner.container_id, "CNI_IFNAME": owner.ifname}
    return {**env, **names, "CNI_NETNS": netns, "CNI_ARGS": ""}


def valid_attachments(conf: Mapping[str, Any]) -> Optional[frozenset[tuple[str, str]]]:
    """The (container, interface) pairs that GC must keep; None if the runtime sent no list."""
    for key in VALID_ATTACHMENTS:
        if key in conf:
            listed = conf[key] or ()  # libcni sends null for an empty list
            return frozenset((item["containerID"], item["ifname"]) for item in listed)
    return None


def is_name(text: str) -> bool:
    """The specification's rules for container IDs and names of networks; see EXPECTED_NAME."""
    return text[:1].isalnum() and text.isascii() and text.translate(_WITHOUT_SIGNS).isalnum()


def is_interface_name(name: str) -> bool:
    """The kernel's rules, as the specification has them."""
    short = 1 <= len(name.encode("utf-8", "replace")) <= 15
    return (
        short
        and name not in (".", "..")
        and not any(one in "/:\0" or one.isspace() for one in name)
    )


def split_cni_args(text: str) -> dict[str, str]:
    """CNI_ARGS ("IP=10.1.2.3;K8S_POD_NAME=web-0") as a mapping, without what is no pair."""
    pairs = (pair.partition("=") for pair in text.split(";"))
    return {key.strip(): value.strip() for key, sign, value in pairs if sign}


def pod_ref(env: Mapping[str, str]) -> PodRef:
    """The pod, as the runtime names it in CNI_ARGS."""
    args = split_cni_args(env.get("CNI_ARGS", ""))
    namespace, name = args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", "")
    return PodRef(namespace, name, args.get("K8S_POD_UID", ""))
