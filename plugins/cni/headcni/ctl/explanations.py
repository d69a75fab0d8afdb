"""Every error of the runtime, with a stable ID, its cause and the next step.

``headcnictl explain`` and docs/errors.md show this table. Nothing on the path of ADD and DEL
imports it: an error carries its code, and its ID follows from the code.

    HC001 to HC199  codes of CNI errors: HC103 is the code 103
    HC201 to HC299  conditions for a node's readiness
    HC301 to HC399  ranges of peers that a node refuses
    HC401 to HC499  findings of headcnictl diagnose and trace

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

FAULTS: Tuple[Explanation, ...] = (
    Explanation(
        401,
        "daemon-down",
        "The daemon does not answer. Pods keep their network, and nothing repairs it.",
        "Restart the daemon: `systemctl restart headcni-daemon`. Its journal says why it stopped.",
    ),
    Explanation(
        402,
        "clock-wrong",
        "The node's clock differs from the clock of Headscale's server by a minute or more. "
        "Certificates, keys and tokens count as expired or not yet valid.",
        "Run the command of the finding, which has the node's time service set the clock, and see "
        "that the node reaches a time server. If the server's clock is wrong, correct that one.",
    ),
    Explanation(
        403,
        "forwarding-off-ipv4",
        "The kernel does not forward IPv4 packets between pods and other machines.",
        "Run `sysctl -w net.ipv4.ip_forward=1`, and look in `/etc/sysctl.d` for the file that "
        "turned it off.",
    ),
    Explanation(
        404,
        "forwarding-off-ipv6",
        "The kernel does not forward IPv6 packets between pods and other machines.",
        "Run `sysctl -w net.ipv6.conf.all.forwarding=1`, and look in `/etc/sysctl.d` for the "
        "file that turned it off.",
    ),
    Explanation(
        405,
        "tailscaled-down",
        "tailscaled does not answer, so this node loses the other nodes.",
        "Restart it: `systemctl restart tailscaled` in host mode, `headcni-tailscaled` in "
        "daemon mode.",
    ),
    Explanation(
        406,
        "tailscale-stopped",
        "tailscaled is disconnected on purpose (`tailscale down`).",
        "Connect it again with `tailscale up`.",
    ),
    Explanation(
        407,
        "logged-out",
        "The node is not logged in to the tailnet, so its pods reach no other node.",
        "Run `site.yml` for this node. It creates a key and logs the node in.",
    ),
    Explanation(
        408,
        "tailscale-not-running",
        "tailscaled is neither running nor logged out.",
        "Run `site.yml` for this node. If the state stays, the journal of tailscaled has the "
        "reason.",
    ),
    Explanation(
        409,
        "tailscaled-health",
        "tailscaled itself reports a problem.",
        "The text is tailscaled's own. `tailscale status` shows it as well.",
    ),
    Explanation(
        410,
        "key-expires",
        "The node's key for the tailnet expires within seven days. Then this node loses all "
        "other nodes.",
        "Run `playbooks/rotate_keys.yml`, which gives the node a new key.",
    ),
    Explanation(
        411,
        "no-pod-cidr",
        "The node's pod range is not known, so no pod can start.",
        "Run `site.yml`, or set `network.podCIDR.nodeLocal`. `headcnictl pod-cidr` lists the "
        "sources that were examined.",
    ),
    Explanation(
        412,
        "pod-cidr-guessed",
        "The node's pod range is a guess. Another node may have guessed the same.",
        "Set `headcni_node_pod_cidr` in the inventory and run `site.yml`.",
    ),
    Explanation(
        413,
        "duplicate-own-cidr",
        "Another node serves this node's pod range. Pods of one of the two cannot be reached.",
        "Run the command of the finding at Headscale, or give one node another range with "
        "`change_pod_cidr.yml`.",
    ),
    Explanation(
        414,
        "duplicate-overlap",
        "Two nodes serve overlapping pod ranges. Pods of one of the two cannot be reached.",
        "Run the command of the finding at Headscale, or give one node another range with "
        "`change_pod_cidr.yml`.",
    ),
    Explanation(
        415,
        "not-approved",
        "Headscale has not approved this node's pod range, as far as the node knows. Pods of "
        "other nodes do not reach its pods.",
        "Run `site.yml`, which approves it. Headscale may tell a new node minutes late.",
    ),
    Explanation(
        416,
        "policy-denies",
        "Headscale's policy does not let pods of other nodes in.",
        "Add the rule that docs/headscale-policy.md shows, or let `site.yml` add it: `-e "
        "headscale_routes_policy=merge`.",
    ),
    Explanation(
        417,
        "foreign-rule",
        "A routing rule of another program comes before HeadCNI's and takes packets for pods "
        "of other nodes.",
        "Delete the rule with the command of the finding, and find the program that adds it.",
    ),
    Explanation(
        418,
        "tunnel-mtu",
        "The tunnel's link carries smaller packets than pods send.",
        "Set the link's MTU with the command of the finding, and find the program that changed it.",
    ),
    Explanation(
        419,
        "underlay-mtu",
        "The node's link to the network carries smaller packets than the tunnel needs.",
        "Set the link's MTU with the command of the finding, or lower `network.mtu` on all nodes.",
    ),
    Explanation(
        420,
        "no-conflist",
        "There is no conflist, so the container runtime can start no pod.",
        "Write it: `headcnictl conflist write`. `site.yml` writes it as well.",
    ),
    Explanation(
        421,
        "other-conflist",
        "Another conflist comes first, so new pods get another network.",
        "Run the command of the finding, which renames that file, and remove the other CNI.",
    ),
    Explanation(
        422,
        "stale-conflist",
        "The conflist differs from the daemon's configuration.",
        "Run `site.yml` for this node, which writes it again.",
    ),
    Explanation(
        423,
        "runtime-elsewhere",
        "The container runtime looks for plugins or conflists in other directories than HeadCNI's.",
        "Run `site.yml` with the variable of the finding, and keep the variable in your inventory.",
    ),
    Explanation(
        424,
        "pool-full",
        "The pool has no free address, so no new pod can start on this node.",
        "If the addresses belong to pods that are gone, the command of the finding releases "
        "them. Otherwise give the node a larger range with `change_pod_cidr.yml`.",
    ),
    Explanation(
        425,
        "nft-table",
        "HeadCNI's nft table is not as it should be. Masquerading and host ports may not work.",
        "The daemon repairs it: `systemctl restart headcni-daemon`. If it comes back, find "
        "the program that flushes nftables.",
    ),
    Explanation(
        426,
        "firewall-blocks",
        "Another firewall of the node drops pods' packets.",
        "Run the command of the finding. docs/firewalls.md describes each firewall.",
    ),
    Explanation(
        427,
        "pods-gone",
        "The network namespaces of pods are gone, and their networks were not removed.",
        "Nothing: the daemon removes them after a while. The command of the finding does it "
        "at once.",
    ),
    Explanation(
        428,
        "pod-differs",
        "A pod's network is not as it was set up.",
        "The daemon repairs most differences within a minute. Otherwise delete the pod: its "
        "controller starts a new one.",
    ),
    Explanation(
        429,
        "more-pods-differ",
        "More pods differ than are listed.",
        "Begin with the first finding: a common cause comes before the pods.",
    ),
    Explanation(
        430,
        "resolver-silent",
        "A resolver that pods use does not answer them.",
        "Run the command of the finding: `headcnictl trace` names the first broken hop on the "
        "way to the resolver.",
    ),
    Explanation(
        431,
        "relayed",
        "The path to another node goes through a relay, which is slower.",
        "Let UDP through between the nodes, at tailscaled's port. docs/verify.md describes paths.",
    ),
    Explanation(
        432,
        "no-path",
        "Another node does not answer tailscaled's ping.",
        "Look at that node: it is off, or UDP and the relay are both blocked.",
    ),
    Explanation(
        433,
        "not-served",
        "No node serves a pod's address, as far as this node knows.",
        "Run `site.yml`. Otherwise the node is not in the tailnet, or Headscale's policy hides it.",
    ),
    Explanation(
        434,
        "refused",
        "A peer serves the address, and this node refuses its claim.",
        "`headcnictl routes` shows why.",
    ),
    Explanation(
        435,
        "pod-gone",
        "The pod's network namespace does not exist.",
        "Delete the pod: its controller starts a new one.",
    ),
    Explanation(
        436,
        "pod-interface",
        "The pod has lost its network interface.",
        "Delete the pod: its controller starts a new one.",
    ),
    Explanation(
        437,
        "pod-route",
        "The pod's own route leads elsewhere, or is missing.",
        "Run the command of the finding, or delete the pod: its controller starts a new one.",
    ),
    Explanation(
        438,
        "veth-missing",
        "The host's end of the pod's link is missing.",
        "Delete the pod: its controller starts a new one.",
    ),
    Explanation(
        439,
        "veth-down",
        "The host's end of the pod's link is down.",
        "Run the command of the finding, which sets it up.",
    ),
    Explanation(
        440,
        "veth-unplugged",
        "The host's end of the pod's link is not a port of the bridge.",
        "Run the command of the finding, which attaches it.",
    ),
    Explanation(
        441,
        "bridge-down",
        "The bridge of the pods is down.",
        "Run the command of the finding, which sets it up.",
    ),
    Explanation(
        442,
        "anti-spoofing",
        "The filter on the pod's link differs from what the pod's addresses need.",
        "The daemon repairs it: `systemctl restart headcni-daemon`.",
    ),
    Explanation(
        443,
        "no-route",
        "The kernel has no route to the destination.",
        "Run the command of the finding; `headcnictl routes` shows what was refused, and why.",
    ),
    Explanation(
        444,
        "pod-misrouted",
        "The node routes the pod's address to another link.",
        "The daemon repairs it: `systemctl restart headcni-daemon`.",
    ),
    Explanation(
        445,
        "no-answer",
        "The packet left the pod, and no answer came.",
        "Run `headcnictl trace` and `headcnictl diagnose` on the other node.",
    ),
    Explanation(
        446,
        "dropped-by-rule",
        "An nft rule of another program, or the policy of its chain, drops the packets. The kernel "
        "itself has named it.",
        "If the rule is not meant to do that, run the command of the finding, and find the program "
        "that adds the rule.",
    ),
    Explanation(
        447,
        "path-mtu",
        "The network between two nodes loses packets of full size, and small ones arrive. "
        "Connections between pods hang as soon as they send much.",
        "Raise the MTU of the network between the nodes: it has to carry the tunnel's packets of "
        "1360 bytes. Or let it send the ICMP messages that say what is too large.",
    ),
)

ALL = (*CODES, *CONDITIONS, *REFUSED_RANGES, *FAULTS)
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
