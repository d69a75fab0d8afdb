"""Every error of the runtime, with a stable ID, its cause and the next step.

``headcnictl explain`` and docs/errors.md show this table. Nothing on the path of ADD and DEL
imports it: an error carries its code, and its ID follows from the code.

    HC001 to HC199  codes of CNI errors: HC103 is the code 103
    HC201 to HC299  conditions for a node's readiness
    HC301 to HC399  ranges of peers that a node refuses

An ID keeps its meaning for ever; new IDs go at the end of their part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from .. import errors

PAGE = "https://github.com/headcni/mesh/blob/main/docs/errors.md"


@dataclass(frozen=True)
class Explanation:
    number: int
    name: str
    cause: str
    next_step: str

    @property
    def id(self) -> str:
        return errors.id_of(self.number)

    @property
    def link(self) -> str:
        return f"{PAGE}#{self.id.lower()}"


CODES: Tuple[Explanation, ...] = (
    Explanation(
        errors.INCOMPATIBLE_VERSION,
        "INCOMPATIBLE_VERSION",
        "The configuration asks for a CNI version that HeadCNI does not speak.",
        "Set `cniVersion` to one of 0.3.1, 0.4.0, 1.0.0, 1.1.0. CHECK exists since 0.4.0, GC "
        "and STATUS since 1.1.0.",
    ),
    Explanation(
        errors.UNSUPPORTED_FIELD,
        "UNSUPPORTED_FIELD",
        "A field of the configuration is not supported.",
        "Remove the field, or set it to the value in the message. Example: "
        "`enable_network_policy` beside `delegate`, because HeadCNI enforces policies only on "
        "links that it makes.",
    ),
    Explanation(
        errors.UNKNOWN_CONTAINER,
        "UNKNOWN_CONTAINER",
        "The container is unknown or does not exist.",
        "Nothing. The runtime asks about a container that is gone, and will forget it.",
    ),
    Explanation(
        errors.BAD_ENVIRONMENT,
        "BAD_ENVIRONMENT",
        "A CNI_* environment variable is missing or wrong.",
        "The container runtime omitted a variable or set a wrong value; the message names "
        "each. If you call the plugin by hand, see the CNI specification for the variables of "
        "each verb.",
    ),
    Explanation(
        errors.IO_FAILURE,
        "IO_FAILURE",
        "A file or socket could not be read or written.",
        "See the path and the reason in the message: permissions, a full disk, a directory in "
        "place of a file, a port that is in use.",
    ),
    Explanation(
        errors.UNDECODABLE,
        "UNDECODABLE",
        "The configuration is not valid JSON.",
        "`headcnictl validate FILE` shows where parsing failed.",
    ),
    Explanation(
        errors.INVALID_CONFIG,
        "INVALID_CONFIG",
        "The configuration has mistakes.",
        "The details list each mistake with its path, its value and the expected value. "
        "`headcnictl validate FILE` shows each on its own line.",
    ),
    Explanation(
        errors.TRY_AGAIN,
        "TRY_AGAIN",
        "Not possible just now; the runtime should try again later.",
        "The runtime tries again by itself. If the error persists, the pool is full (the "
        "message says how many addresses are in use, and by which namespaces): free some, or "
        "give the node a larger `pod_cidr`. Or another program uses the range.",
    ),
    Explanation(
        errors.NOT_AVAILABLE,
        "NOT_AVAILABLE",
        "The plugin cannot serve ADD requests.",
        "The message gives the reason. kubelet reports the node as not ready until it is solved.",
    ),
    Explanation(
        errors.LIMITED,
        "LIMITED",
        "The plugin cannot serve ADD requests; existing pods may be cut off.",
        "Running pods may not reach other nodes. docs/errors.md says what follows for pods. "
        "See `systemctl status tailscaled` (host mode) or `headcni-tailscaled` "
        "(daemon mode). Or another firewall blocks pods, and HeadCNI could not add rules to "
        "it: the details name the command, see docs/firewalls.md.",
    ),
    Explanation(
        errors.INTERNAL,
        "INTERNAL",
        "A bug in HeadCNI.",
        "Please report it, with the message and the journal: `journalctl -u headcni-daemon -u "
        "containerd`.",
    ),
    Explanation(
        errors.KERNEL,
        "KERNEL",
        "The kernel refused a change.",
        "The message contains the kernel's reason. EPERM: the plugin must run as root with "
        "CAP_NET_ADMIN. EEXIST: another program created something with the same name.",
    ),
    Explanation(
        errors.NETNS_GONE,
        "NETNS_GONE",
        "The pod's network namespace is not there.",
        "The pod ended while its network was being set up. The runtime starts over. There is "
        "nothing to do unless the error persists.",
    ),
    Explanation(
        errors.ADDRESS_TAKEN,
        "ADDRESS_TAKEN",
        "The requested address belongs to somebody else.",
        "Request another address, or end the pod that has it. The message names that pod if "
        "it is in the same namespace; otherwise see `headcnictl pods`. See 'A static address' "
        "in docs/configuration.md.",
    ),
    Explanation(
        errors.STORE,
        "STORE",
        "The allocation store cannot be used.",
        "See the message: a full disk, a read-only file system, permissions on `data_dir`. "
        "DEL succeeds nevertheless: it removes the pod's network, and the address is released "
        "when the store can be written again (until then no pod gets it). A damaged store is "
        "set aside, and a new one is reconstructed from the kernel and the runtime's cache, "
        "including host ports. A deleted store is reconstructed in the same way. A store that "
        "a newer release has written is refused and not changed: install that release again.",
    ),
    Explanation(
        errors.DELEGATE_FAILED,
        "DELEGATE_FAILED",
        "A delegated plugin failed.",
        "The plugin named in the message failed; the message includes its own code and text. "
        "The steps before it were undone.",
    ),
    Explanation(
        errors.DELEGATE_TIMEOUT,
        "DELEGATE_TIMEOUT",
        "A delegated plugin did not answer in time and was ended.",
        "The plugin named in the message did not respond. Find out what it was waiting for, "
        "or raise `delegate_timeout`.",
    ),
    Explanation(
        errors.DELEGATE_MISSING,
        "DELEGATE_MISSING",
        "A delegated plugin is not on CNI_PATH.",
        "Install the plugin into `/opt/cni/bin` or another directory of CNI_PATH; the message "
        "lists the directories that were searched.",
    ),
    Explanation(
        errors.CHECK_FAILED,
        "CHECK_FAILED",
        "The pod's network differs from what was set up.",
        "The details list each difference. Somebody changed the pod's network, or a part of "
        "it is gone: restart the pod.",
    ),
    Explanation(
        errors.KERNEL_LACKS,
        "KERNEL_LACKS",
        "The kernel lacks a feature that was asked for.",
        "The message names the feature. Load the module, use another kernel, or do without "
        "the feature. If nftables refuses the rules, install libnftables 0.9.8 or newer "
        "(package `nftables`); `headcni-daemon --check-firewall` tries the rules on the node "
        "and changes nothing.",
    ),
    Explanation(
        errors.PORT_TAKEN,
        "PORT_TAKEN",
        "The host port is taken.",
        "Another pod or a program of the node has the host port, or the port is reserved: "
        "choose another port, or run the two on different nodes. 'Host ports' in "
        "docs/configuration.md says what is checked.",
    ),
    Explanation(
        errors.NO_POD_CIDR,
        "NO_POD_CIDR",
        "No pod CIDR could be found for this node.",
        "Set `network.podCIDR.nodeLocal` or `NODE_POD_CIDR`. `headcnictl pod-cidr` lists the "
        "sources that were examined and what was found.",
    ),
    Explanation(
        errors.CONFLIST,
        "CONFLIST",
        "The conflist cannot be written or is not valid.",
        "`headcnictl validate FILE` lists the mistakes; otherwise the message names the file "
        "and the reason.",
    ),
)

CONDITIONS: Tuple[Explanation, ...] = (
    Explanation(
        201,
        "cni-socket",
        "The daemon does not serve the socket on which it takes calls of the plugin. Pods "
        "start nevertheless, because the plugin then works without the daemon.",
        "Restart the daemon: `systemctl restart headcni-daemon`. If the condition stays, its "
        "journal has the reason: `journalctl -u headcni-daemon`.",
    ),
    Explanation(
        202,
        "store",
        "The allocation store cannot be opened. New pods get no address.",
        "The reason names the file and the problem. `headcnictl explain STORE` says what to do.",
    ),
    Explanation(
        203,
        "tailscale",
        "tailscaled does not answer, is stopped or is logged out. Pods do not reach other nodes.",
        "Start it: `systemctl start tailscaled` in host mode, `systemctl start "
        "headcni-tailscaled` in daemon mode. If it is logged out, run `site.yml` for this "
        "node.",
    ),
    Explanation(
        204,
        "prefs",
        "tailscaled refused a setting that pods' routes need, such as the advertised routes.",
        "The reason is tailscaled's own. Check that it is a version that docs/platforms.md "
        "names, and that nobody else changes its settings.",
    ),
    Explanation(
        205,
        "interface",
        "The network interface to the other nodes is missing or down: `tailscale0` in host "
        "mode, `headcni01` in daemon mode.",
        "Restart its tailscaled: `systemctl restart tailscaled`, or `headcni-tailscaled` in "
        "daemon mode. The daemon then restores the routes by itself.",
    ),
    Explanation(
        206,
        "routes",
        "The kernel refused a route or a rule, or the routes have not been compared yet.",
        "Wait for half a minute after a start. Otherwise the reason is the kernel's: "
        "`headcnictl routes` shows what is missing, `headcnictl diagnose` what else differs.",
    ),
    Explanation(
        207,
        "approved",
        "Headscale has not approved this node's range, or the node has not heard of it yet. "
        "Pods of other nodes do not reach this node's pods.",
        "Run `site.yml`, which approves it, or approve the route at Headscale (`headscale "
        "nodes approve-routes`). A node may hear of it minutes later; then it needs no "
        "action.",
    ),
    Explanation(
        208,
        "firewall",
        "Another firewall on the node blocks pods, and HeadCNI could not add the rules that "
        "let them pass.",
        "The reason names the rule or command to add. docs/firewalls.md describes each firewall.",
    ),
    Explanation(
        209,
        "nft-rules",
        "The node refuses HeadCNI's nft rules: a kernel module or a newer libnftables is missing.",
        "`headcni-daemon --check-firewall` tries the rules, changes nothing, and names what "
        "is refused. `headcnictl explain KERNEL_LACKS` says more.",
    ),
    Explanation(
        210,
        "headscale",
        "The daemon asks Headscale for the approval of its routes (`headscale.apiKeyFile`), "
        "and Headscale does not answer, refuses, or does not keep the approval.",
        "The reason has Headscale's answer. With 401 the API key has expired: write a new one "
        "(`headscale apikeys create`) into the file.",
    ),
    Explanation(
        211,
        "pods",
        "The daemon does not reach the Kubernetes API, so it does not see which pods exist. "
        "Pods start and work nevertheless.",
        "Check the API server and `daemon.kubeconfig`. The reason says what failed; with 401 "
        "or 403, run `site.yml` for this node, which renews the token and the rights.",
    ),
    Explanation(
        212,
        "policies",
        "The kernel does not have the current rules for network policies, or the daemon cannot "
        "enforce any on this node. Rules that it has stay in force.",
        "The reason names what is missing or was refused. `headcnictl policy` shows which pods "
        "are concerned; [network-policy.md](network-policy.md) lists what policies need.",
    ),
    Explanation(
        213,
        "policy-source",
        "The daemon has not read the network policies yet. Rules that the kernel has stay in "
        "force, and `network.unknownPolicy` decides about new pods.",
        "Wait for some seconds after a start. Otherwise the reason names the API server's answer "
        "or the file: correct it. With 403, run `site.yml` for this node.",
    ),
)

REFUSED_RANGES: Tuple[Explanation, ...] = (
    Explanation(
        301,
        "untagged",
        "A peer without one of the tags in `tailscale.peerTags` advertises a pod range. This "
        "node refuses it.",
        "If the peer is a node of the mesh, give it the tag (`headscale nodes tag`), or run "
        "`site.yml` for it. Otherwise withdraw the approval of its route at Headscale.",
    ),
    Explanation(
        302,
        "own-cidr",
        "A peer advertises a range that overlaps this node's own range. If the peer has a tag "
        "of the mesh, pods of this node cannot be reached.",
        "Two nodes have the same range: give one of them another range with "
        "`change_pod_cidr.yml`. If the peer is an identity that this machine had before, "
        "remove it with `replace_node.yml` or at Headscale.",
    ),
    Explanation(
        303,
        "service-range",
        "A peer advertises a range inside the services' range (`network.serviceCIDR`), or one "
        "that reaches beyond the cluster's range. This node refuses it.",
        "Withdraw the approval at Headscale, or correct `headcni_node_cluster_cidr` and "
        "`headcni_node_service_cidr` if the range is a node's.",
    ),
    Explanation(
        304,
        "prefix-length",
        "A peer advertises a range that is not as long as the range of a node. This node "
        "refuses it.",
        "If nodes have ranges of different lengths on purpose, list the lengths in "
        "`network.podCIDR.peerSizes` on every node. Otherwise withdraw the approval at "
        "Headscale.",
    ),
    Explanation(
        305,
        "overlap",
        "A peer advertises a range that overlaps the range of another node, which has it "
        "already. This node refuses it.",
        "`headcnictl routes` names both. Give one of the nodes another range with "
        "`change_pod_cidr.yml`.",
    ),
    Explanation(
        306,
        "tags-not-checked",
        "This node has none of the tags in `tailscale.peerTags`, so it does not require them "
        "from its peers. Any device with an approved route could serve pods.",
        "Tag all nodes (`headscale nodes tag`), or set `tailscale.peerTags` to `any` if that "
        "is what you want.",
    ),
    Explanation(
        307,
        "more",
        "More peers than the daemon lists advertise ranges that this node refuses.",
        "Correct the listed ones first; `headcnictl routes` then shows the next. Check at "
        "Headscale whose routes are approved.",
    ),
)

ALL = (*CODES, *CONDITIONS, *REFUSED_RANGES)
_BY_NAME: Dict[str, Explanation] = {each.name: each for each in ALL}
_BY_WORD: Dict[str, Explanation] = {
    word: each
    for each in reversed(ALL)
    for word in (each.id.lower(), str(each.number), each.name.lower())
}


def find(word: str) -> Optional[Explanation]:
    """By ID, number or name: HC103, 103, address_taken. Case matters only where two have the same
    name: STORE is a code, and store is a condition."""
    word = word.strip().strip("[]")
    return _BY_NAME.get(word) or _BY_WORD.get(word.lower())
