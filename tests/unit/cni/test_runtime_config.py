"""What containerd calls things."""

from __future__ import annotations

from headcni.runtime_config import as_specified


def test_keys_as_containerd_spells_them_are_read_as_the_conventions_do():
    assert as_specified(
        {
            "portMappings": [{"HostPort": 80, "ContainerPort": 8, "Protocol": "tcp", "HostIP": ""}],
            "bandwidth": {"IngressRate": 1, "ingressBurst": 2},
            "dns": {"Servers": ["a"], "Searches": [], "Options": []},
            "ipRanges": [[{"Subnet": "10.0.0.0/24"}]],
        }
    ) == {
        "portMappings": [{"hostPort": 80, "containerPort": 8, "protocol": "tcp", "hostIP": ""}],
        "bandwidth": {"ingressRate": 1, "ingressBurst": 2},
        "dns": {"servers": ["a"], "searches": [], "options": []},
        "ipRanges": [[{"subnet": "10.0.0.0/24"}]],
    }


def test_what_we_do_not_know_is_left_as_it_is():
    other = {"io.kubernetes.cri.pod-annotations": {"HostPort": "mine"}, "mac": "02:00:00:00:00:01"}
    assert as_specified(other) == other
