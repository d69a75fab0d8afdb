"""Other plugins run as if there were no daemon: by the caller's own process, in its environment."""

from __future__ import annotations

import json
import os

import pytest
from cni_node import EMPTY

ALONE = {"HEADCNI_SOCKET": ""}
# What the caller has, and a daemon under systemd does not.
CALLERS = {
    "HTTPS_PROXY": "http://proxy.example.org:3128",
    "KUBECONFIG": "/etc/kubernetes/kubelet.conf",
    "HOME": "/root",
}
# As headcni-daemon.service has it, as far as it can be had without systemd.
SANDBOX = (
    *("setpriv", "--no-new-privs", "--bounding-set", "-all,+net_admin,+net_raw,+sys_admin"),
    *("sh", "-c", 'umask 077; exec "$@"', "sh"),
)
RECORDER = """#!/bin/sh
{
  echo "stdin=$(cat)"
  env | grep -vE '^(_|PWD|OLDPWD|SHLVL|HEADCNI_SOCKET)=' | sort
  grep -E '^(NoNewPrivs|CapBnd|CapEff|Seccomp):' /proc/self/status
  umask
  pwd
  cat /proc/self/cgroup
  readlink /proc/self/ns/net
  ulimit -a
} >> "$HEADCNI_RECORD"
if [ "$CNI_COMMAND" = ADD ]; then
  echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.55.1.9/24"}]}'
fi
"""
KINDS = {
    "delegate": {"delegate": {"type": "recorder"}, "ipam": None},
    "plugins": {"plugins": [{"type": "recorder"}], "ipam": None},
    "ipam": {"ipam": {"type": "recorder"}, "pod_cidr": None},
}


@pytest.fixture
def recorder(node):
    folder = node.tmp / "recorder"
    folder.mkdir()
    (folder / "recorder").write_text(RECORDER)
    (folder / "recorder").chmod(0o755)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_delegate_sees_the_same_with_and_without_the_daemon(node, recorder, kind):
    node.start(before=SANDBOX)
    conf, pod = node.conf(**KINDS[kind]), node.pod()
    path = f"{recorder}:{node.environment('ADD')['CNI_PATH']}"

    def seen(name, **where):
        record = recorder / name
        how = {
            "CNI_PATH": path,
            "HEADCNI_RECORD": str(record),
            "container": "same",
            **CALLERS,
            **where,
        }
        node.add(conf, pod, **how).succeeds()
        node.delete(conf, pod, **how).succeeds()
        text = record.read_text().replace(str(record), "RECORD")
        record.unlink()
        return text

    alone, by_daemon = seen("alone", **ALONE), seen("by-daemon")
    assert node.has_served(ADD=1, DEL=1)
    assert by_daemon == alone
    for name, value in CALLERS.items():
        assert f"\n{name}={value}\n" in by_daemon
    assert "HEADCNI_PROGRAM" not in by_daemon
    assert node.leftovers() == EMPTY


def test_the_other_verbs_are_handed_back_too(node, server, recorder):
    conf, pod = node.conf(delegate={"type": "recorder"}, ipam=None), node.pod()
    how = {"CNI_PATH": str(recorder), "HEADCNI_RECORD": str(recorder / "record"), **CALLERS}
    result = node.add(conf, pod, **how).ok
    node.check(conf, pod, result, **how).succeeds()
    node.call("STATUS", conf, **how).succeeds()
    node.call("GC", {**conf, "cni.dev/valid-attachments": []}, **how).succeeds()
    text = (recorder / "record").read_text()
    # GC has the delegate's DEL and its own GC run.
    assert text.count("\nHTTPS_PROXY=") == text.count("\nCNI_COMMAND=") == 5
    assert node.has_served(ADD=1, CHECK=1, STATUS=1, GC=1)


def test_a_del_is_handed_back_though_the_configuration_has_no_delegate_any_more(
    node, server, recorder
):
    conf, pod = node.conf(delegate={"type": "recorder"}, ipam=None), node.pod()
    how = {"CNI_PATH": str(recorder), "HEADCNI_RECORD": str(recorder / "record"), **CALLERS}
    node.add(conf, pod, **how).succeeds()
    node.delete(node.conf(), pod, **how).succeeds()
    assert (recorder / "record").read_text().count("HTTPS_PROXY=") == 2
    assert node.has_served(DEL=1)
    assert node.leftovers() == EMPTY


def test_what_was_handed_back_is_reported_with_its_code_and_phases(node, server, recorder):
    conf = node.conf(delegate={"type": "nowhere"}, ipam=None)
    assert node.add(conf).error["code"] == 107
    node.wait_for(lambda: node.said("verb=ADD network=pods pod= code=107"))
    conf = node.conf(delegate={"type": "recorder"}, ipam=None)
    how = {"CNI_PATH": str(recorder), "HEADCNI_RECORD": str(recorder / "record")}
    node.add(conf, **how).succeeds()
    node.wait_for(lambda: node.said(" code=0 "))
    (line,) = [
        line
        for line in node.log.read_text().splitlines()
        if "delegates=" in line and " code=0 " in line
    ]
    assert "verb=ADD network=pods" in line and " store=" in line


def test_a_delegate_ends_with_the_plugin_that_the_runtime_kills(node, server, recorder):
    """Or its ADD would go on beside the DEL that the runtime sends next."""
    import subprocess

    notes = recorder / "notes"
    (recorder / "slow").write_text(
        f"#!/bin/sh\necho $$ >> {recorder}/processes\necho $CNI_COMMAND begins >> {notes}\n"
        f"[ $CNI_COMMAND = DEL ] || sleep 3\necho $CNI_COMMAND ends >> {notes}\n"
    )
    (recorder / "slow").chmod(0o755)
    conf, pod = node.conf(delegate={"type": "slow"}, ipam=None), node.pod()
    env = node.environment("ADD", pod, CNI_PATH=str(recorder))
    with subprocess.Popen(node.command(), stdin=subprocess.PIPE, text=True, env=env) as call:
        call.stdin.write(json.dumps(conf))
        call.stdin.close()
        node.wait_for(notes.exists)
        call.kill()
    node.delete(conf, pod, CNI_PATH=str(recorder)).succeeds()
    for process in (recorder / "processes").read_text().split():
        node.wait_for(lambda process=process: not os.path.exists(f"/proc/{process}"))
    assert notes.read_text().splitlines() == ["ADD begins", "DEL begins", "DEL ends"]
