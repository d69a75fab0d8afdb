"""What kubelet and Debian's containerd need on a node that is a container. Users' nodes are
machines and have none of this.

kubelet sets kernel parameters that are the whole machine's. A node of the lab shows it what it
wants to see, and the machine keeps its own. Its /dev/kmsg is empty, and not by a link to
/dev/null: to units with ProtectKernelLogs= that would be closed.
"""

from __future__ import annotations

from .images import BUSYBOX

UNIT = "[Service]\nExecStartPre=/bin/sh /etc/lab/kubelet-prepare\n"
PREPARE = """\
set -e
show() {
    mkdir -p /run/lab-sysctl
    [ "$(cat /proc/sys/$1)" = "$2" ] && return
    file=/run/lab-sysctl/$(echo "$1" | tr / .)
    echo "$2" > "$file"
    mount --bind "$file" /proc/sys/$1
}
show vm/overcommit_memory 1
show vm/panic_on_oom 0
show kernel/panic 10
show kernel/panic_on_oops 1
show kernel/keys/root_maxkeys 1000000
show kernel/keys/root_maxbytes 25000000
[ -e /dev/kmsg ] || mknod -m 666 /dev/kmsg c 1 3
"""
CONFIG = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
imageGCHighThresholdPercent: 100
evictionHard: {}
"""
CONTAINERD = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{BUSYBOX}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
"""
CONTAINERD_UNIT = "[Service]\nOOMScoreAdjust=0\nLimitNPROC=\nLimitCORE=\nLimitNOFILE=\n"
