"""The route manager with from 10 to 5,000 peers, in the kernel for real; the peers are made up."""

from __future__ import annotations

from ipaddress import ip_network

from .measure import Findings, Row, Series, frozen, median, timed
from .stage import Stage

SIZES = (10, 100, 1000, 5000)
OWN, CLUSTER = "10.1.0.0/24", "10.0.0.0/8"


def run(stage: Stage, findings: Findings) -> None:
    from headcni.mesh.localapi import LocalApi, Peer, Status
    from headcni.mesh.mesh import Mesh
    from headcni.mesh.routes import RouteReconciler

    class Tailnet(LocalApi):
        """A tailscaled with so many peers."""

        peers: tuple[Peer, ...] = ()

        def status(self, peers: bool = True) -> Status:
            del peers
            return Status("1.102.5", "Running", "here", (), (OWN,), (), Tailnet.peers)

    def peer(number: int) -> Peer:
        route = f"10.{100 + number // 256}.{number % 256}.0/24"
        return Peer(str(number), f"node{number}", (route,), (), True, False)

    stage.node.netns.ip("tuntap add dev tailscale0 mode tun")
    stage.node.netns.ip("link set tailscale0 up")
    full, one = {}, {}
    # A table of its own: the daemon on the stage keeps the usual one.
    mesh = Mesh((ip_network(CLUSTER),), (ip_network(OWN),), table=9999, priority=4000)
    try:
        with frozen():
            for size in SIZES:
                peers = tuple(peer(number) for number in range(size))
                Tailnet.peers = peers
                passes = []
                for _ in range(3):
                    made = RouteReconciler(mesh, Tailnet())
                    made.remove_all()
                    passes.append(1000 * timed(made.reconcile))
                full[size] = median(passes)
                made.reconcile()
                changes = []
                for number in range(5):
                    Tailnet.peers = peers[:-1] if number % 2 == 0 else peers
                    changes.append(1000 * timed(made.reconcile))
                one[size] = median(changes)
                made.remove_all()
    finally:
        stage.node.netns.ip("link del tailscale0")
    findings.raw["routes"] = {"full pass": full, "one change": one}
    plot = Series("reconciling routes", "peers", "milliseconds")
    plot.lines = {"full pass": list(full.items()), "one change": list(one.items())}
    findings.plots["routes"] = plot
    large = SIZES[-1]

    def growth(small: int, bar: float | None) -> Row:
        peer, linear = f"itself at {small}, times {large // small}", full[small] * large / small
        return Row("routes", f"full pass, {large} peers", peer, full[large], linear, "ms", bar)

    findings.rows += [
        growth(SIZES[0], bar=1.0),
        growth(SIZES[1], bar=None),  # with less of what a pass costs whatever the number
        Row(
            "routes",
            f"one change among {large} peers",
            "a full pass",
            one[large],
            full[large],
            unit="ms",
            bar=1.0,
            limit=50.0,
        ),
    ]
