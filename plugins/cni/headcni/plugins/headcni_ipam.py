"""headcni-ipam: an IPAM plugin for any plugin's `ipam.type`, with host-local's configuration.

The store is `<ipam.dataDir>/headcni.db`. Without a dataDir it is the store of the node, which the
headcni plugin uses as well (HEADCNI_DATA_DIR, else /var/lib/cni/headcni).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Callable, NamedTuple

from .. import skel, unrecorded
from ..database import DATA_DIR
from ..errors import CHECK_FAILED, INVALID_CONFIG, NOT_AVAILABLE, STORE, CniError
from ..ipam.allocate import Ipam
from ..ipam.config import ensure_may_ask, parse_ipam
from ..ipam.kernel import in_use
from ..ipam.resolvconf import read_resolv_conf
from ..model import Dns, IpamConfig, Lease, Owner, PodRef
from ..problems import Problem, error, tolerated
from ..result import dns_of, ips_of, shape
from ..runtime_config import as_specified
from ..skel import Answer, Outcome
from ..store import Store

# It starts no other plugins, so GC needs no CNI_PATH.
REQUIRED = {**skel.REQUIRED, "GC": ()}

Opener = Callable[[str], AbstractContextManager[Store]]  # of a folder with a store


class Call(NamedTuple):
    """One call, with the parts of the configuration that all verbs need."""

    env: Mapping[str, str]
    conf: Mapping[str, Any]
    version: str
    network: str
    owner: Owner
    pod: PodRef
    open_store: Opener

    @property
    def ipam(self) -> Mapping[str, Any]:
        section = self.conf.get("ipam")
        return section if isinstance(section, Mapping) else {}


def serve(called: skel.Call, _outcome: Outcome, open_store: Opener) -> Answer:
    conf = skel.decode(called.stdin)
    version = skel.version_of(PLUGIN, conf)
    skel.require_version(PLUGIN, version)
    skel.require_verb(called.command, version)
    problems = []
    name = conf.get("name")
    if not isinstance(name, str) or not name:
        problems.append(Problem("name", name, "the name of the network"))
    if not isinstance(conf.get("ipam"), Mapping):
        problems.append(Problem("ipam", conf.get("ipam"), "the ipam section"))
    if problems:
        raise error(problems, str)
    owner = Owner(str(name), called.container_id, called.ifname)
    call = Call(called.env, conf, version, str(name), owner, called.pod, open_store)
    return VERBS[called.command](call)


def add(call: Call) -> Mapping[str, Any]:
    config = _config(call)
    ensure_may_ask(config, call.pod.namespace)
    dns = read_resolv_conf(call.ipam["resolvConf"]) if call.ipam.get("resolvConf") else Dns()
    with _opened(call) as store:
        unrecorded.settle(store, call.owner)
        _import(call, store)
        lease = Ipam(store).allocate(call.owner, config, str(call.pod), in_use)
    return result(lease, config, dns, call.version)


def delete(call: Call) -> None:
    # It does not read the ranges: they may have become invalid since the ADD.
    try:
        with _opened(call) as store:
            with suppress(CniError):  # addresses that cannot be imported need not be freed
                _import(call, store)
            Ipam(store).release(call.owner)
            with suppress(CniError):  # a failure there does not concern this pod
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
    first, valid = skel.VALID_ATTACHMENTS[0], None
    given = next((call.conf[key] for key in skel.VALID_ATTACHMENTS if key in call.conf), None)
    if isinstance(given, list):
        with suppress(TypeError, KeyError):
            valid = skel.valid_attachments(call.conf)
    if valid is None:
        raise CniError(
            INVALID_CONFIG,
            f"GC needs {first}: a list of containerID and ifname",
            "without it every address of the network would be freed",
        )
    with _opened(call) as store:
        unrecorded.settle(store)
        _import(call, store)
        Ipam(store).collect(call.network, valid)


def status(call: Call) -> None:
    """Ready if the configuration is right and the store can be written.

    A full pool is no error: the runtime would report the node as not ready, and healthy pods would
    be evicted.
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


VERBS: dict[str, Callable[[Call], Answer]] = {
    "ADD": add,
    "DEL": delete,
    "CHECK": check,
    "GC": collect,
    "STATUS": status,
}


def result(lease: Lease, config: IpamConfig, dns: Dns, version: str) -> dict[str, Any]:
    """An IPAM result in the version's shape. The caller adds the interfaces."""
    routes = [
        {key: value for key, value in given.items() if value not in (None, "")}
        for given in config.raw.get("routes") or ()
    ]
    return shape({"ips": ips_of(lease.addresses), "routes": routes, "dns": dns_of(dns)}, version)


def _config(call: Call) -> IpamConfig:
    problems: list[Problem] = []
    config = _parse(call, problems)
    mistakes = tolerated(problems)
    if mistakes:
        raise error(mistakes, str)
    return config


def _parse(call: Call, problems: list[Problem]) -> IpamConfig:
    runtime_config, args = call.conf.get("runtimeConfig"), call.conf.get("args")
    return parse_ipam(
        call.ipam,
        "ipam",
        problems,
        as_specified(runtime_config) if isinstance(runtime_config, Mapping) else {},
        skel.split_cni_args(call.env.get("CNI_ARGS", "")),
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
    """Take over the addresses that host-local has leased, if the configuration asks for it."""
    if call.ipam.get("importHostLocal"):
        from ..ipam.hostlocal import import_on_request

        import_on_request(store, call.network, call.ipam, _parse(call, []).range_sets)


def means_its_own_folder(stdin: bytes) -> bool:
    """Whether dataDir is relative to the working directory of the plugin's process."""
    with suppress(CniError, AttributeError):
        folder = (skel.decode(stdin).get("ipam") or {}).get("dataDir")
        return isinstance(folder, str) and not folder.startswith("/")
    return False


def plugin(open_store: Opener = Store.in_directory) -> skel.Plugin:
    serves = partial(serve, open_store=open_store)
    oldest = skel.ALL_VERSIONS[0]
    return skel.Plugin("headcni-ipam", skel.ALL_VERSIONS, serves, REQUIRED, oldest)


PLUGIN = plugin()


def run(env: Mapping[str, str], stdin: bytes, open_store: Opener = Store.in_directory) -> Outcome:
    return skel.run(plugin(open_store), env, stdin)


def main(stdin: bytes) -> int:
    """In the process that another plugin started, if no daemon takes the call."""
    return skel.main(PLUGIN, stdin)
