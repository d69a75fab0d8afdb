"""headcni-ipam: an IPAM plugin for any plugin's `ipam.type`, with host-local's configuration.

The store is `<ipam.dataDir>/headcni.db`; without a dataDir it is the node's one, which the headcni
plugin uses as well (HEADCNI_DATA_DIR, else /var/lib/cni/headcni).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Callable, NamedTuple

from .. import unrecorded
from ..errors import (
    BAD_ENVIRONMENT,
    CHECK_FAILED,
    INCOMPATIBLE_VERSION,
    INTERNAL,
    INVALID_CONFIG,
    NOT_AVAILABLE,
    STORE,
    UNDECODABLE,
    CniError,
)
from ..model import Dns, IpamConfig, Lease, Owner
from ..result import OLDEST, dns_of, ips_of, shape
from ..result import VERSIONS as SPOKEN
from ..runtime_config import as_specified
from ..store import DATA_DIR, Store
from .allocate import Ipam
from .config import Problem, as_error, ensure_may_ask, parse_ipam, split_cni_args, tolerated
from .kernel import in_use
from .resolvconf import read_resolv_conf

VERSIONS = (*OLDEST, "0.3.0", *SPOKEN)
SINCE = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
# libcni sends both: an early text of the specification had the second name.
VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


# The store of a folder: opened for this call, or, in the daemon, long before.
Opener = Callable[[str], AbstractContextManager[Store]]


class Call(NamedTuple):
    """One call of the plugin: what the runtime says, as far as all verbs need it."""

    env: Mapping[str, str]
    conf: Mapping[str, Any]
    version: str
    network: str
    open_store: Opener

    @property
    def owner(self) -> Owner:
        return Owner(self.network, self.env["CNI_CONTAINERID"], self.env["CNI_IFNAME"])

    @property
    def ipam(self) -> Mapping[str, Any]:
        section = self.conf.get("ipam")
        return section if isinstance(section, Mapping) else {}


def run(
    env: Mapping[str, str], stdin: bytes, open_store: Opener = Store.in_directory
) -> tuple[int, bytes]:
    """Do what CNI_COMMAND says: the exit code, and what belongs on stdout."""
    code, output = outcome(env, stdin, open_store)
    return (1 if code else 0), output


def outcome(
    env: Mapping[str, str], stdin: bytes, open_store: Opener = Store.in_directory
) -> tuple[int, bytes]:
    """The same with the error's code, or 0."""
    version = VERSIONS[-1]
    try:
        verb = _verb(env)
        conf = _decode(stdin)
        version = str(conf.get("cniVersion") or "0.1.0")
        if verb == "VERSION":
            answer: Mapping[str, Any] | None = {
                "cniVersion": version,
                "supportedVersions": list(VERSIONS),
            }
        else:
            _check_version(verb, version)
            answer = VERBS[verb](_call(env, conf, version, open_store))
    except CniError as problem:
        return problem.code, _encode(problem.as_dict(version))
    except Exception as problem:  # a traceback on stdout would be no answer
        bug = CniError(INTERNAL, "a bug in headcni-ipam", f"{type(problem).__name__}: {problem}")
        return bug.code, _encode(bug.as_dict(version))
    return 0, b"" if answer is None else _encode(answer)


def add(call: Call) -> Mapping[str, Any]:
    config = _config(call)
    ensure_may_ask(config, _pod(call).partition("/")[0])
    dns = read_resolv_conf(call.ipam["resolvConf"]) if call.ipam.get("resolvConf") else Dns()
    with _opened(call) as store:
        unrecorded.settle(store, call.owner)
        _import(call, store)
        lease = Ipam(store).allocate(call.owner, config, _pod(call), in_use)
    return result(lease, config, dns, call.version)


def delete(call: Call) -> None:
    # The ranges are not looked at: a DEL must free what an ADD took before they were spoilt.
    try:
        with _opened(call) as store:
            with suppress(CniError):  # what cannot be imported need not be freed
                _import(call, store)
            Ipam(store).release(call.owner)
            with suppress(CniError):  # what others have left is not this pod's concern
                unrecorded.settle(store)
    except CniError as problem:
        if problem.code != STORE:
            raise
        unrecorded.note(_folder(call), call.owner, problem)


def check(call: Call) -> None:
    _config(call)
    with _opened(call) as store:
        _import(call, store)
        lease = Ipam(store).lease(call.owner)
    if lease is None:
        raise CniError(
            CHECK_FAILED,
            f"container {call.owner.container_id} has no address on network {call.network}",
            "it was never added, or was deleted or collected since",
        )
    previous = call.conf.get("prevResult")
    if isinstance(previous, Mapping):
        ips = [ip for ip in previous.get("ips") or () if isinstance(ip, Mapping)]
        shown = {str(ip.get("address")) for ip in ips}
        missing = [leased.interface for leased in lease.addresses if leased.interface not in shown]
        if missing:
            raise CniError(
                CHECK_FAILED,
                f"container {call.owner.container_id} holds {', '.join(missing)}",
                f"but prevResult has {', '.join(sorted(shown)) or 'no address'}",
            )


def collect(call: Call) -> None:
    given = next((call.conf[key] for key in VALID_ATTACHMENTS if key in call.conf), None)
    try:
        valid = [(str(item["containerID"]), str(item["ifname"])) for item in given or ()]
    except (TypeError, KeyError):
        valid, given = [], None
    if not isinstance(given, list):
        raise CniError(
            INVALID_CONFIG,
            f"GC needs {VALID_ATTACHMENTS[0]}: a list of containerID and ifname",
            "without it every address of the network would be freed",
        )
    with _opened(call) as store:
        unrecorded.settle(store)
        _import(call, store)
        Ipam(store).collect(call.network, valid)


def status(call: Call) -> None:
    """Ready if the configuration is right and the store can be written.

    A full pool is no reason: the runtime would report the node as not ready, and pods that run
    well would be evicted from it.
    """
    _config(call)
    try:
        if call.ipam.get("resolvConf"):
            read_resolv_conf(call.ipam["resolvConf"])
        with _opened(call) as store:
            _import(call, store)
            store.prove_writable()
    except CniError as problem:
        raise CniError(NOT_AVAILABLE, problem.msg, problem.details) from problem


VERBS: dict[str, Callable[[Call], Mapping[str, Any] | None]] = {
    "ADD": add,
    "DEL": delete,
    "CHECK": check,
    "GC": collect,
    "STATUS": status,
}


def result(lease: Lease, config: IpamConfig, dns: Dns, version: str) -> dict[str, Any]:
    """An IPAM result in the version's own shape: no interfaces, they are the caller's."""
    routes = [
        {key: value for key, value in given.items() if value not in (None, "")}
        for given in config.raw.get("routes") or ()
    ]
    return shape({"ips": ips_of(lease.addresses), "routes": routes, "dns": dns_of(dns)}, version)


def _verb(env: Mapping[str, str]) -> str:
    """CNI_COMMAND, after a look at the variables that it needs."""
    verb = env.get("CNI_COMMAND", "")
    if verb not in VERBS and verb != "VERSION":
        raise CniError(
            BAD_ENVIRONMENT,
            f"CNI_COMMAND is {verb!r}",
            f"expected one of {', '.join([*VERBS, 'VERSION'])}",
        )
    wrong = []
    if verb in ("ADD", "DEL", "CHECK"):
        container_id, ifname = env.get("CNI_CONTAINERID", ""), env.get("CNI_IFNAME", "")
        if not container_id or not container_id[0].isalnum() or set(container_id) - _ID_CHARACTERS:
            wrong.append(f"CNI_CONTAINERID is {container_id!r}: expected letters, digits and _.-")
        if not 0 < len(ifname) < 16 or ifname in (".", "..") or set(ifname) & set("/: \t\n"):
            wrong.append(f"CNI_IFNAME is {ifname!r}: expected the name of an interface")
        if verb != "DEL" and not env.get("CNI_NETNS"):
            wrong.append("CNI_NETNS is not set: expected the path of a network namespace")
    if wrong:
        raise CniError(BAD_ENVIRONMENT, f"the environment of {verb} is wrong", "; ".join(wrong))
    return verb


def _decode(stdin: bytes) -> Mapping[str, Any]:
    try:
        conf = json.loads(stdin)
    except (ValueError, RecursionError) as problem:
        raise CniError(UNDECODABLE, "the configuration is not JSON", str(problem)) from problem
    if not isinstance(conf, dict):
        raise CniError(UNDECODABLE, "the configuration is not a JSON object")
    return conf


def _encode(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, indent=2).encode() + b"\n"


def _check_version(verb: str, version: str) -> None:
    if version not in VERSIONS:
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"cniVersion is {version}",
            f"headcni-ipam speaks {', '.join(VERSIONS)}",
        )
    if verb in SINCE and VERSIONS.index(version) < VERSIONS.index(SINCE[verb]):
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"cniVersion {version} has no {verb}",
            f"set it to {SINCE[verb]} or later",
        )


def _call(
    env: Mapping[str, str], conf: Mapping[str, Any], version: str, open_store: Opener
) -> Call:
    problems = []
    name = conf.get("name")
    if not isinstance(name, str) or not name:
        problems.append(Problem("name", name, "the name of the network"))
    if not isinstance(conf.get("ipam"), Mapping):
        problems.append(Problem("ipam", conf.get("ipam"), "the ipam section"))
    if problems:
        raise as_error(problems)
    return Call(env, conf, version, str(name), open_store)


def _config(call: Call) -> IpamConfig:
    problems: list[Problem] = []
    config = _parse(call, problems)
    mistakes = tolerated(problems)
    if mistakes:
        raise as_error(mistakes)
    return config


def _parse(call: Call, problems: list[Problem]) -> IpamConfig:
    runtime_config, args = call.conf.get("runtimeConfig"), call.conf.get("args")
    return parse_ipam(
        call.ipam,
        "ipam",
        problems,
        as_specified(runtime_config) if isinstance(runtime_config, Mapping) else {},
        split_cni_args(call.env.get("CNI_ARGS", "")),
        args if isinstance(args, Mapping) else {},
    )


def _opened(call: Call) -> AbstractContextManager[Store]:
    return call.open_store(_folder(call))


def _folder(call: Call) -> str:
    return _data_dir(call) or call.env.get("HEADCNI_DATA_DIR") or DATA_DIR


def _data_dir(call: Call) -> str:
    value = call.ipam.get("dataDir")
    return value if isinstance(value, str) and value.startswith("/") else ""


def _import(call: Call, store: Store) -> None:
    """Before anything else: learn what host-local has given out, if that is wanted."""
    if call.ipam.get("importHostLocal"):
        from .hostlocal import import_on_request

        import_on_request(store, call.network, call.ipam, _parse(call, []).range_sets)


def _pod(call: Call) -> str:
    args = split_cni_args(call.env.get("CNI_ARGS", ""))
    name = args.get("K8S_POD_NAME", "")
    return f"{args.get('K8S_POD_NAMESPACE', '')}/{name}" if name else ""


def means_its_own_folder(stdin: bytes) -> bool:
    """Whether the store's path can be understood only where the plugin was started."""
    with suppress(CniError, AttributeError):
        folder = (_decode(stdin).get("ipam") or {}).get("dataDir")
        return isinstance(folder, str) and not folder.startswith("/")
    return False


def main(stdin: bytes) -> int:
    """The process that another plugin started, when there is no daemon to ask. Its exit code."""
    import sys

    code, answer = run(os.environ, stdin)
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    return code
