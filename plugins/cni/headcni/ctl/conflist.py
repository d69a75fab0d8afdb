"""``headcnictl conflist``: who is in charge of the CNI directory, how to take and hand it back."""

from __future__ import annotations

import argparse
from typing import Any, Dict, List

from .. import settings as configuration
from ..database import DATA_DIR
from ..errors import CONFLIST, NO_POD_CIDR, CniError
from ..mesh.settings import cluster_cidrs
from ..settings import DaemonConfig
from ..shared import conflist
from ..shared.podcidr import PodCidrError
from . import node
from .main import NO, OK, CannotTell, show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("show", "write", "restore"),
        help="show it; write ours as config.yaml has it; or put back the others and remove ours",
    )
    node.with_config(parser)
    parser.add_argument("--directory", default=conflist.DIRECTORY, help=conflist.DIRECTORY)
    parser.add_argument(
        "--dry-run", action="store_true", help="tell what would be done, and do nothing"
    )


def run(args: argparse.Namespace) -> int:
    try:
        return {"show": _show, "write": _write, "restore": _restore}[args.what](args)
    except conflist.ConflistError as problem:
        raise CniError(CONFLIST, "no conflist", str(problem)) from None
    except OSError as problem:
        raise CannotTell(f"{args.directory}: {problem.strerror}") from None


def _show(args: argparse.Namespace) -> int:
    seen = conflist.survey(args.directory)
    picked = seen.picked()
    set_aside = sorted(name for name in seen.files if name.endswith(conflist.SUFFIX))
    ours = picked == conflist.NAME
    if args.json:
        answer: Dict[str, Any] = {"directory": args.directory, "in_charge": picked, "ours": ours}
        show({**answer, "files": sorted(seen.files), "set_aside": set_aside}, as_json=True)
        return OK if ours else NO
    lines = [f"{args.directory}: {picked or 'no file'} is in charge"]
    lines += [
        f"  {name}: {_role(name, picked)}" for name in sorted(seen.files) if name not in set_aside
    ]
    lines += [f"  {name}: set aside, restore puts it back" for name in set_aside]
    show("\n".join(lines), as_json=False)
    return OK if ours else NO


def _role(name: str, picked: str) -> str:
    if name == picked:
        return "the runtime takes this one"
    return "not looked at, as it comes later"


def _write(args: argparse.Namespace) -> int:
    conf = conflist.build(options(node.load(args)))
    if args.dry_run:
        done = conflist.plan(conflist.survey(args.directory), conf)
    else:
        done = conflist.write(conf, args.directory)
    if args.json:
        answer: Dict[str, Any] = {"directory": args.directory, "changed": done.changed}
        aside = list(done.back_up)
        show({**answer, "dry_run": args.dry_run, "set_aside": aside, "conflist": conf}, True)
        return OK
    would = "would be " if args.dry_run else ""
    lines = [f"  {conflist.NAME}: {would}written"] if done.changed else ["  nothing to do"]
    lines += [f"  {name}: {would}set aside" for name in done.back_up]
    show("\n".join([f"{args.directory}:", *lines]), as_json=False)
    return OK


def options(config: DaemonConfig) -> conflist.Options:
    """The options of our conflist, from the daemon's configuration."""
    network, magic = config.network, config.dns.magic_dns
    try:
        cidrs = configuration.pod_cidrs(config).cidrs
    except PodCidrError as problem:
        raise CniError(NO_POD_CIDR, "no pod CIDR for this node", str(problem)) from None
    named: Dict[str, Any] = {}
    if magic.enabled:
        named = {
            "enable": True,
            "base_domain": magic.base_domain,
            "nameservers": list(magic.nameservers),
            "search_domains": list(magic.search_domains),
        }
    extra: Dict[str, Any] = {}
    if magic.enabled and magic.options:
        extra["dns"] = {"options": list(magic.options)}
    if config.daemon.data_dir != DATA_DIR:
        extra["data_dir"] = config.daemon.data_dir
    return conflist.Options(
        pod_cidrs=[str(cidr) for cidr in cidrs],
        mode=config.tailscale.mode,
        mtu=network.mtu,
        ipam=config.ipam.type,
        strategy=config.ipam.strategy if config.ipam.type == "headcni-ipam" else "",
        service_cidrs=[str(cidr) for cidr in network.service_cidr],
        cluster_cidrs=[str(cidr) for cidr in cluster_cidrs(config, cidrs)],
        headscale_url=config.headscale.url,
        tailscale_socket=config.tailscale.socket.path,
        magic_dns={key: value for key, value in named.items() if value},
        network_policy=network.enable_network_policy,
        extra=extra,
    )


def _restore(args: argparse.Namespace) -> int:
    if args.dry_run:
        done = conflist.plan_restore(conflist.survey(args.directory))
    else:
        done = conflist.restore(args.directory)
    if args.json:
        answer: Dict[str, Any] = {"directory": args.directory, "changed": done.changed}
        listed: Dict[str, List[str]] = {
            "put_back": list(done.put_back),
            "removed": list(done.remove),
            "left": list(done.left),
        }
        show({**answer, "dry_run": args.dry_run, **listed}, as_json=True)
        return OK
    would = "would be " if args.dry_run else ""
    lines = [f"  {name}: {would}put back" for name in done.put_back]
    lines += [f"  {name}: {would}removed" for name in done.remove]
    lines += [f"  {sentence}" for sentence in done.left]
    show("\n".join([f"{args.directory}:", *(lines or ["  nothing to do"])]), as_json=False)
    return OK
