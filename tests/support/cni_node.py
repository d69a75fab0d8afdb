"""A node in a network namespace of its own, with the plugin run on it as a runtime runs it."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import tools

ECHO = Path(__file__).with_name("echo.py")
PREFIX = "hct"
ASK_SECONDS = 2.2  # a lost SYN or neighbour solicitation is repeated after one second
# Runs a command in another root file system, which it leaves unchanged.
CHROOT = """\
for shared in dev proc sys run tmp; do mount --rbind /$shared "$0/$shared"; done
exec chroot "$0" "$@"
"""
# CniNode.leftovers() of a node that had pods, and has none now.
EMPTY = {
    "links": set(),
    "mapped": [],
    "guarded": set(),
    "allocation": [],
    "attachment": [],
    "port": [],
    "plugin_state": [],
    "tombstone": [],
}
# What the daemon does to the nft table in two passes: whether each changed anything.
REPAIR_FIREWALL = """
import json, sys
from headcni.datapath import firewall
from headcni.store import Store
with Store.in_directory(sys.argv[1]) as store:
    print(json.dumps([firewall.repair(store), firewall.repair(store)]))
"""
# What the daemon does with its configuration, when it starts and on SIGHUP.
LIMIT_TAILNET = """
import json, sys
from ipaddress import ip_network
from headcni import settings as config
from headcni.daemon.tailnet import TailnetAccess
from headcni.recover import recover
from headcni.store import Store
made, problems = config.parse(sys.argv[2].encode())
assert not problems, problems
with Store.in_directory(sys.argv[1]) as store:
    if store.is_unverified():
        recover(store)
    mesh = [ip_network(one) for one in ("10.55.0.0/16", "fd55::/48")]
    print(json.dumps(TailnetAccess(lambda: store, lambda: made, False, lambda: mesh).ensure()))
"""
_numbers = itertools.count()


def sh(*argv: object, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(a) for a in argv],
        text=True,
        capture_output=True,
        timeout=kwargs.pop("timeout", 60),
        check=False,
        **kwargs,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{argv} → {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def asking(address: str, port: object, protocol: str = "tcp", source_port: int = 0) -> list[str]:
    """The command that asks a server of Namespace.serving()."""
    words = (ECHO, "ask", protocol, address, port, source_port, ASK_SECONDS)
    return [sys.executable, "-IS", *map(str, words)]


def mapped(*ports: tuple[Any, ...]) -> dict[str, Any]:
    """A netconf's part for (host port, pod port, protocol, host IP) mappings."""
    keys = ("hostPort", "containerPort", "protocol", "hostIP")
    mappings = [dict(zip(keys, port)) for port in ports]
    return {"capabilities": {"portMappings": True}, "runtimeConfig": {"portMappings": mappings}}


@dataclass
class Namespace:
    name: str

    @classmethod
    def create(cls, what: str) -> Namespace:
        made = cls(f"{PREFIX}-{os.getpid()}-{next(_numbers)}-{what}")
        sh("ip", "netns", "add", made.name)
        sh("ip", "-n", made.name, "link", "set", "lo", "up")
        return made

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def run(self, *argv: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return sh("ip", "netns", "exec", self.name, *argv, **kwargs)

    def ip(self, command: str) -> str:
        return sh("ip", "-n", self.name, *command.split()).stdout

    def ip_json(self, command: str) -> Any:
        return json.loads(self.ip(f"-j {command}") or "[]")

    def links(self) -> set[str]:
        return {one["ifname"] for one in self.ip_json("link")}

    def addresses(self, link: str) -> set[str]:
        shown = self.ip_json(f"addr show dev {link}")
        return {f"{a['local']}/{a['prefixlen']}" for one in shown for a in one["addr_info"]}

    @contextmanager
    def serving(self, port: int, protocol: str = "tcp", address: str = "0.0.0.0") -> Iterator[None]:
        """Answer on a port, telling each client its own address."""
        command = [
            "ip",
            "netns",
            "exec",
            self.name,
            sys.executable,
            "-IS",
            str(ECHO),
            "serve",
            protocol,
            address,
            str(port),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == "ready\n"
                yield
            finally:
                server.kill()

    def asks(self, address: str, port: int, protocol: str = "tcp", source_port: int = 0) -> str:
        """The address that a server saw us come from; "" if it did not answer."""
        return self.run(*asking(address, port, protocol, source_port), check=False).stdout.strip()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Another namespace under the same path, while the old one is kept alive."""
        old = os.open(self.path, os.O_RDONLY)
        try:
            sh("umount", "--lazy", self.path)
            os.unlink(self.path)
            sh("ip", "netns", "add", self.name)
            yield
        finally:
            os.close(old)

    def remove(self) -> None:
        sh("ip", "netns", "del", self.name, check=False)


@dataclass
class Answer:
    code: int
    json: dict[str, Any]
    stderr: str

    @property
    def ok(self) -> dict[str, Any]:
        self.succeeds()
        return self.json

    def succeeds(self) -> None:
        assert self.code == 0, f"{self.json} {self.stderr}"

    @property
    def error(self) -> dict[str, Any]:
        assert self.code != 0, self.json
        assert set(self.json) <= {"cniVersion", "code", "msg", "details"}, self.json
        return self.json

    @property
    def address(self) -> str:
        return str(self.ok["ips"][0]["address"]).partition("/")[0]


@dataclass
class CniNode:
    """A node and an outside world that it has a default route to."""

    tmp: Path
    plugins: Path
    netns: Namespace
    outside: Namespace
    python: str = "/usr/bin/python3"
    root: Path = Path("/")  # the file system of the distribution that the plugin runs on
    pods: list[Namespace] = field(default_factory=list)

    NODE_IP, OUTSIDE_IP = "192.0.2.1", "192.0.2.2"
    NODE_IP6, OUTSIDE_IP6 = "2001:db8::1", "2001:db8::2"

    @classmethod
    def create(cls, tmp: Path, plugins: Path) -> CniNode:
        node, outside = Namespace.create("node"), Namespace.create("outside")
        node.ip(f"link add eth0 type veth peer name eth0 netns {outside.name}")
        for side, v4, v6 in (
            (node, cls.NODE_IP, cls.NODE_IP6),
            (outside, cls.OUTSIDE_IP, cls.OUTSIDE_IP6),
        ):
            side.ip(f"addr add {v4}/24 dev eth0")
            side.ip(f"addr add {v6}/64 dev eth0 nodad")
            side.ip("link set eth0 up")
        node.ip(f"route add default via {cls.OUTSIDE_IP}")
        node.ip(f"-6 route add default via {cls.OUTSIDE_IP6}")
        return cls(tmp, plugins, node, outside)

    def remove(self) -> None:
        for one in (*self.pods, self.netns, self.outside):
            one.remove()

    def pod(self) -> Namespace:
        made = Namespace.create("pod")
        self.pods.append(made)
        return made

    def conf(self, **changes: Any) -> dict[str, Any]:
        """A working netconf; a key given as None is left out."""
        conf = {
            "cniVersion": "1.1.0",
            "name": "pods",
            "type": "headcni",
            "pod_cidr": "10.55.1.0/24",
            "cluster_cidr": "10.55.0.0/16",
            "ipam": {"type": "headcni-ipam", "subnet": "10.55.1.0/24"},
            "data_dir": str(self.tmp / "data"),
            **changes,
        }
        return {key: value for key, value in conf.items() if value is not None}

    def dual(self, **changes: Any) -> dict[str, Any]:
        """The same with IPv6."""
        ranges = [[{"subnet": "10.55.1.0/24"}], [{"subnet": "fd55:0:0:1::/64"}]]
        return self.conf(
            **{
                "pod_cidr": ["10.55.1.0/24", "fd55:0:0:1::/64"],
                "cluster_cidr": ["10.55.0.0/16", "fd55::/48"],
                "enable_ipv6": True,
                "ipam": {"type": "headcni-ipam", "ranges": ranges},
                **changes,
            }
        )

    def environment(
        self,
        verb: str,
        pod: Namespace | None = None,
        *,
        container: str = "",
        ifname: str = "eth0",
        args: str = "",
        **extra: str,
    ) -> dict[str, str]:
        env = {
            "PATH": os.environ["PATH"],
            "CNI_COMMAND": verb,
            "CNI_PATH": f"{self.plugins}:{tools.CNI.bin}",
            "CNI_ARGS": args,
            **extra,
        }
        if verb in ("ADD", "DEL", "CHECK"):
            env["CNI_CONTAINERID"] = container or (pod.name if pod else "")
            env["CNI_IFNAME"] = ifname
            if pod is not None:
                env.setdefault("CNI_NETNS", pod.path)
        return env

    @property
    def _on_it(self) -> list[str]:
        """What runs a program of the node's distribution in its network namespace."""
        changed = ["unshare", "--mount", "sh", "-ec", CHROOT, str(self.root)]
        elsewhere = self.root != Path("/")
        return ["ip", "netns", "exec", self.netns.name, *(changed if elsewhere else ())]

    def command(self, plugin: str = "headcni") -> list[str]:
        return [*self._on_it, self.python, "-IS", str(self.plugins / plugin)]

    def call(
        self,
        verb: str,
        conf: dict[str, Any] | str,
        pod: Namespace | None = None,
        *,
        plugin: str = "headcni",
        **how: Any,
    ) -> Answer:
        """Run the plugin as a runtime would: stdin, environment, stdout."""
        stdin = conf if isinstance(conf, str) else json.dumps(conf)
        done = subprocess.run(
            self.command(plugin),
            input=stdin,
            text=True,
            capture_output=True,
            env=self.environment(verb, pod, **how),
            timeout=60,
            check=False,
        )
        try:
            answer = json.loads(done.stdout) if done.stdout.strip() else {}
        except ValueError:
            answer = {"not json": done.stdout}
        return Answer(done.returncode, answer, done.stderr)

    def add(self, conf: dict[str, Any], pod: Namespace | None = None, **how: Any) -> Answer:
        return self.call("ADD", conf, pod or self.pod(), **how)

    def delete(self, conf: dict[str, Any], pod: Namespace | None, **how: Any) -> Answer:
        return self.call("DEL", conf, pod, **how)

    def check(
        self, conf: dict[str, Any], pod: Namespace, result: dict[str, Any], **how: Any
    ) -> Answer:
        return self.call("CHECK", {**conf, "prevResult": result}, pod, **how)

    def cnitool(
        self, verb: str, conf: dict[str, Any], pod: Namespace, **capabilities: Any
    ) -> Answer:
        """The same through libcni, by a conflist on disk."""
        folder = self.tmp / "net.d"
        folder.mkdir(exist_ok=True)
        plugins = conf["plugins"] if "plugins" in conf and "type" not in conf else [conf]
        (folder / "10-test.conflist").write_text(
            json.dumps({"cniVersion": conf["cniVersion"], "name": conf["name"], "plugins": plugins})
        )
        env = {
            "PATH": os.environ["PATH"],
            "NETCONFPATH": str(folder),
            "CNI_PATH": f"{self.plugins}:{tools.CNI.bin}",
            "CNI_IFNAME": "eth0",
            "CAP_ARGS": json.dumps(capabilities),
        }
        done = self.netns.run(
            tools.CNI.bin / "cnitool", verb, conf["name"], pod.path, env=env, check=False
        )
        answer = json.loads(done.stdout) if done.stdout.strip().startswith("{") else {}
        return Answer(done.returncode, answer, done.stdout + done.stderr)

    def sql(self, statement: str, *values: Any) -> None:
        """Change the node's store behind its back."""
        import sqlite3

        with sqlite3.connect(self.tmp / "data" / "headcni.db") as db:
            db.execute(statement, values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The store's only writer, inside the block: nobody else can write."""
        import sqlite3

        db = sqlite3.connect(self.tmp / "data" / "headcni.db", isolation_level=None)
        try:
            db.execute("BEGIN IMMEDIATE")
            yield
            db.execute("ROLLBACK")
        finally:
            db.close()

    def bury_a_link_that_stays(self, container: str) -> None:
        """A tombstone whose link the kernel refuses to delete: lo, under a pod's name."""
        from headcni.datapath.link import host_name
        from headcni.model import Owner

        owner = Owner("pods", container, "eth0")
        self.netns.ip("link set lo down")
        self.netns.ip(f"link set lo name {host_name(owner)}")
        self.sql("INSERT INTO tombstone VALUES ('pods', ?, 'eth0', 1)", container)

    def runs(self, program: str, *arguments: str) -> Any:
        """The JSON that a program prints which uses the installed runtime on this node. Its first
        argument is the data directory."""
        home = (self.plugins / "headcni").resolve().parent.parent
        done = self.netns.run(
            *(self.python, "-S", "-c", program, self.tmp / "data", *arguments),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{home}:{home}/vendor"},
        )
        return json.loads(done.stdout)

    def limit(self, access: object = "all", **namespaces: object) -> bool:
        """Limit what pods reach of the tailnet, as the daemon does; whether that was a change."""
        section = {"tailnetAccess": access, "tailnetAccessNamespaces": namespaces}
        return bool(self.runs(LIMIT_TAILNET, json.dumps({"network": section})))

    def nft(self) -> str:
        return sh(*self._on_it, "nft", "list", "ruleset").stdout

    def leftovers(self) -> dict[str, Any]:
        """What pods leave on a node: it should be EMPTY once they are gone."""
        import sqlite3

        veths = {link for link in self.netns.links() if link.startswith("hc")}
        rows = {}
        with sqlite3.connect(self.tmp / "data" / "headcni.db") as db:
            for table in ("allocation", "attachment", "port", "plugin_state", "tombstone"):
                rows[table] = db.execute(f"SELECT * FROM {table}").fetchall()
        mapped = [
            line.strip()
            for line in self.nft().splitlines()
            if " . " in line and ": " in line and not {"type", "dnat"} & set(line.split())
        ]
        return {"links": veths, "mapped": mapped, "guarded": self.guarded(), **rows}

    def guarded(self) -> set[str]:
        """The pods' links on which a filter of tc checks what comes in."""
        links = (link for link in self.netns.links() if re.match(r"hc[0-9a-f]{11}\Z", link))
        return {link for link in links if " bpf chain 0 handle 0x1 " in self.filters(link)}

    def filters(self, link: str) -> str:
        """Empty if the link has gone meanwhile: the daemon deletes links after its answer."""
        shown = sh(*self._on_it, "tc", "filter", "show", "dev", link, "ingress", check=False)
        assert shown.returncode == 0 or "Cannot find device" in shown.stderr, shown.stderr
        return shown.stdout
