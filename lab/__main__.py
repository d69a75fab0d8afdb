"""python3 -m lab COMMAND: the embedded lab. `make` calls this; so can you."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional, Sequence

from . import (
    attend,
    cgroups,
    cluster,
    control,
    image,
    inventory,
    k3s,
    machines,
    network,
    preflight,
    summary,
    tools,
    vms,
)
from .layout import CHECKOUT, CONTROL, Lab, LabError, Plan, is_vm, node_names, vm_names
from .locks import locked
from .progress import step

PR_SET_PDEATHSIG = 1
LOCK_LIMIT = 45 * 60
PLAYBOOK_LIMIT = 30 * 60
VMS_HELP = "how many virtual machines beside the nodes (0)"
SUITES_HELP = "the nodes' Debian releases, in turn: bullseye,trixie (bookworm)"


def check(lab: Lab, args: argparse.Namespace) -> None:
    """Stop with every problem listed, before anything is changed."""
    found = preflight.problems(lab, args.nodes, args.underlay, args.cluster, args.vms)
    if found:
        raise LabError("\n".join(found))


def up(lab: Lab, args: argparse.Namespace) -> None:
    if args.k3s_idle and args.cluster != "k3s":
        raise LabError("--k3s-idle: there is no k3s to leave for later; say --k3s too")
    if args.dual_stack and args.cluster != "kubeadm":
        raise LabError("--dual-stack is an option of --kubeadm: add that")
    check(lab, args)
    headscale = tools.headscale(args.headscale)
    end_with_make()
    enter_up_group(lab)
    began = time.monotonic()
    with locked(f"lab-{lab.id}", "another command on this lab", LOCK_LIMIT):
        was_up = lab.plan_file.exists()
        with ExitStack() as undo:
            if not was_up:
                if not args.keep:
                    undo.callback(remove, lab)
                remove(lab)
                enter_up_group(lab)  # what was removed had it in it
                fill_cache(lab, args)
                tools.build(lab, tools.CLUSTERS.get(args.cluster, ()))
                tools.build(lab, [headscale])
                build(lab, args)
            else:
                grow(lab, args)
            if args.playbook:
                play(args.playbook)
            undo.pop_all()
    print()
    print(summary.table(lab, Plan.load(lab)))
    print(f"\n  Up in {time.monotonic() - began:.0f} s.", summary.NEXT)


def enter_up_group(lab: Lab) -> None:
    """So that a `make down` from elsewhere ends this run and whatever it started, sessions of
    their own (Ansible's workers) included.
    """
    group = cgroups.Cgroup(lab.prefix, "up")
    group.create()
    group.enter()


def end_with_make() -> None:
    """If make is killed, whatever the signal, unwind as for Ctrl-C instead of working on alone."""
    if "MAKELEVEL" not in os.environ:
        return
    make = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if make == 1 or os.getppid() != make:
        raise LabError("make is gone: nothing was done")


def build_tools(lab: Lab, args: argparse.Namespace) -> None:
    releases = map(tools.headscale, tools.HEADSCALE.releases())
    known = {tool.title: tool for tool in (*tools.ALL, *tools.ON_DEMAND, *releases)}
    if unknown := set(args.tool) - set(known):
        raise LabError(f"there is no tool {', '.join(unknown)}: choose from {', '.join(known)}")
    chosen = [known[name] for name in args.tool] or list(tools.ALL)
    tools.build(lab, chosen)
    for tool in chosen:
        print(tool.bin)


def fill_cache(lab: Lab, args: argparse.Namespace) -> None:
    tools.build(lab)
    image.build(lab, image.NODES, *map(image.of_suite, args.suites), *vm_images(args.vms))


def suites(text: str) -> tuple[str, ...]:
    """The value of --suites, each name checked."""
    found = tuple(text.split(","))
    if unknown := set(found) - set(image.NODE_SUITES):
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}: choose from {', '.join(image.NODE_SUITES)}"
        )
    return found


def vm_images(count: int) -> list[image.Image]:
    return [image.of(machine) for machine in vm_names(min(count, len(image.VMS)))]


def choose_accelerator(count: int) -> str:
    if not count:
        return ""
    with step("trying KVM with a Debian kernel"):
        chosen = vms.accelerator()
    if chosen == "tcg":
        print("  ! KVM does not work here: QEMU runs them in software", file=sys.stderr)
    return chosen


def build(lab: Lab, args: argparse.Namespace) -> None:
    accelerator = choose_accelerator(args.vms)
    # A network is free as long as the host has no route to it, which this lab makes only now.
    with locked("underlay", "another lab that chooses its network", 60):
        plan = Plan(
            network.choose_underlay(args.underlay),
            network.underlay6(lab),
            tuple(node_names(args.nodes)),
            tools.tailscale_version(),
            args.cluster,
            tuple(vm_names(args.vms)),
            accelerator,
            args.suites,
            args.headscale,
            args.dual_stack,
        )
        lab.dir.mkdir(mode=0o700, parents=True)
        with step(f"wiring the lab ({plan.underlay})"):
            machines.make_keys(lab)
            if plan.k3s:
                k3s.make_token(lab)
            network.build_switch(lab, plan)
            network.start_uplink(lab)
            machines.write_ssh_config(lab, plan)
    with step(f"booting {len(plan.machines)} machines") as progress:
        for machine in plan.machines:
            progress.says(machine)
            make_machine(lab, plan, machine)
        for machine in plan.machines:
            progress.says(f"waiting for {machine}")
            machines.wait_until_booted(lab, plan, machine)
    with step("starting Headscale and the mirror"):
        control.start(lab, plan)
        control.make_api_key(lab)
    if plan.cluster and not args.k3s_idle:
        start_cluster(lab, plan)
    plan.save(lab.plan_file)


def start_cluster(lab: Lab, plan: Plan) -> None:
    with step(f"starting {cluster.version(plan)}"):
        cluster.start(lab, plan, plan.nodes)


def make_machine(lab: Lab, plan: Plan, machine: str) -> None:
    network.plug(lab, plan, machine)
    if machine == CONTROL:
        files = control.files(plan)
    elif is_vm(machine):
        files = vms.files(plan, machine)
    else:
        files = cluster.files(lab, plan, machine)
    machines.prepare(lab, plan, machine, files)
    machines.boot(lab, plan, machine)


def grow(lab: Lab, args: argparse.Namespace) -> None:
    """A lab that is up gets the machines it lacks; to shrink it, take it down."""
    plan = Plan.load(lab)
    nodes, virtual = tuple(node_names(args.nodes)), tuple(vm_names(args.vms))
    if args.suites and args.suites != plan.suites:
        wanted = ",".join(args.suites)
        raise LabError(f"the nodes run another Debian: `make down` before --suites {wanted}")
    if args.headscale and args.headscale != plan.headscale:
        raise LabError(
            f"the lab runs another Headscale: `make down` before HEADSCALE={args.headscale}"
        )
    if args.cluster and args.cluster != plan.cluster:
        option = f"{args.cluster.upper()}=1"
        raise LabError(f"the lab is up without {args.cluster}: `make down` before {option}")
    if args.dual_stack and not plan.dual_stack:
        raise LabError("the cluster is IPv4 only: `make down` before --dual-stack")
    if len(nodes) < len(plan.nodes):
        raise LabError(
            f"the lab has {len(plan.nodes)} nodes: `make down` before NODES={args.nodes}"
        )
    if len(virtual) < len(plan.vms):
        raise LabError(
            f"the lab has {len(plan.vms)} virtual machines: `make down` before VMS={args.vms}"
        )
    for machine in plan.machines:
        if not machines.running(lab, machine):
            with step(f"starting {machine}"):
                machines.start(lab, plan, machine)
                machines.wait_until_booted(lab, plan, machine)
    new = nodes[len(plan.nodes) :] + virtual[len(plan.vms) :]
    if new:
        image.build(lab, *vm_images(args.vms))
        accelerator = plan.accelerator or choose_accelerator(args.vms)
        grown = replace(plan, nodes=nodes, vms=virtual, accelerator=accelerator)
        with step(f"adding {', '.join(new)}"):
            machines.write_ssh_config(lab, grown)
            for machine in new:
                machines.discard(lab, machine)
                make_machine(lab, grown, machine)
            for machine in new:
                machines.wait_until_booted(lab, grown, machine)
            if grown.cluster:
                cluster.start(lab, grown, new)
        grown.save(lab.plan_file)
    more = f", {len(virtual)} virtual machines" if virtual else ""
    print(f"  ✓ the lab is up: {len(nodes)} nodes{more}", file=sys.stderr)


def play(playbook: str) -> None:
    ansible = CHECKOUT / ".venv" / "bin" / "ansible-playbook"
    command = [str(ansible), "-i", "inventories/lab", playbook]
    print(f"\n  $ ansible-playbook -i inventories/lab {playbook}\n", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=CHECKOUT, timeout=PLAYBOOK_LIMIT, check=False)
    if done.returncode != 0:
        raise LabError(
            f"{playbook} failed: see above. `make up KEEP=1` leaves the lab standing "
            "so that you can look"
        )


def down(lab: Lab, args: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise LabError("the lab is root's: run `sudo make down`")
    cgroups.Cgroup(lab.prefix, "up").kill()
    with locked(f"lab-{lab.id}", "another command on this lab", LOCK_LIMIT):
        remove(lab)
    print("  ✓ the lab is down", file=sys.stderr)


def attended(lab: Lab, args: argparse.Namespace) -> None:
    def take_down() -> None:
        down(lab, args)
        for noted in args.forget:
            Path(noted).unlink(missing_ok=True)

    attend.attend(lab, args.program, args.unless, take_down)


def remove(lab: Lab) -> None:
    """Whatever carries this lab's name, in whatever state it is: processes, wires, disks."""
    cgroups.remove(lab.prefix)
    machines.hang_up(lab)
    network.remove(lab)
    machines.unmount(lab.dir)
    machines.remove_files(lab)


def status(lab: Lab, args: argparse.Namespace) -> None:
    print(summary.table(lab, Plan.load(lab)))


def print_inventory(lab: Lab, args: argparse.Namespace) -> None:
    print(json.dumps(inventory.data(lab, Plan.load(lab)), indent=2))


def known(lab: Lab, machine: str) -> Plan:
    plan = Plan.load(lab)
    if machine not in plan.machines:
        raise LabError(f"there is no machine {machine!r}: choose from {', '.join(plan.machines)}")
    return plan


def shell(lab: Lab, args: argparse.Namespace) -> None:
    known(lab, args.machine)
    os.execvp("ssh", ["ssh", "-F", str(lab.ssh_config), args.machine, *args.command])


def k3s_start(lab: Lab, args: argparse.Namespace) -> None:
    plan = Plan.load(lab)
    if not plan.k3s:
        raise LabError("the lab is up without k3s: `make down` before K3S=1")
    start_cluster(lab, plan)


def cut(lab: Lab, args: argparse.Namespace) -> None:
    known(lab, args.machine)
    network.cut(lab, args.machine, args.silent)
    if is_vm(args.machine) and not args.silent:
        vms.set_link(lab, args.machine, up=False)


def heal(lab: Lab, args: argparse.Namespace) -> None:
    network.heal(lab, known(lab, args.machine), args.machine)
    if is_vm(args.machine):
        vms.set_link(lab, args.machine, up=True)


def slow(lab: Lab, args: argparse.Namespace) -> None:
    known(lab, args.machine)
    network.slow(lab, args.machine, args.rate)


def stop(lab: Lab, args: argparse.Namespace) -> None:
    known(lab, args.machine)
    with step(f"stopping {args.machine}"):
        machines.stop(lab, args.machine, args.hard)


def start(lab: Lab, args: argparse.Namespace) -> None:
    plan = known(lab, args.machine)
    with step(f"starting {args.machine}"):
        machines.start(lab, plan, args.machine)
        machines.wait_until_booted(lab, plan, args.machine)


def reboot(lab: Lab, args: argparse.Namespace) -> None:
    stop(lab, args)
    start(lab, args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m lab", description=__doc__)
    verbs = top.add_subparsers(required=True, metavar="COMMAND")

    def verb(
        name: str,
        action: Callable[[Lab, argparse.Namespace], None],
        help: str,
        *,
        machine: bool = False,
    ) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=help)
        one.set_defaults(action=action)
        if machine:
            one.add_argument("machine", help="control, node1, …, vm1, …")
        return one

    for name, action, text in (
        ("check", check, "say what stands in the way, change nothing"),
        ("up", up, "build the lab, or complete it"),
    ):
        one = verb(name, action, text)
        one.add_argument("--nodes", type=int, default=3, help="how many, beside control (3)")
        one.add_argument("--underlay", default="", help="a private /24; found if not given")
        kinds = one.add_mutually_exclusive_group()
        for kind in tools.CLUSTERS:
            text = f"a cluster on the nodes, by {kind}"
            kinds.add_argument(
                f"--{kind}", dest="cluster", action="store_const", const=kind, default="", help=text
            )
        one.add_argument("--vms", type=int, default=0, help=VMS_HELP)
        one.add_argument("--suites", type=suites, default=(), help=SUITES_HELP)
        one.add_argument(
            "--headscale",
            default=os.environ.get("HEADCNI_HEADSCALE", ""),
            metavar="RELEASE",
            help=f"another than {tools.headscale_version()}, built first: "
            + ", ".join(tools.HEADSCALE.releases()),
        )
        if name == "up":
            one.add_argument("--playbook", help="run it on the lab once that stands")
            one.add_argument("--keep", action="store_true", help="leave a failed lab standing")
            one.add_argument(
                "--k3s-idle",
                action="store_true",
                help="with --k3s: do not start it yet, so that its config.yaml can be changed",
            )
            one.add_argument(
                "--dual-stack",
                action="store_true",
                help="with --kubeadm: nodes, pods and services have IPv6 addresses, too",
            )
    cache = verb("cache", fill_cache, "build the tools and the base images, and stop there")
    cache.add_argument("--vms", type=int, default=0, help=VMS_HELP)
    cache.add_argument("--suites", type=suites, default=(), help=SUITES_HELP)
    verb("tools", build_tools, "build the Go tools alone, and say where they are").add_argument(
        "tool",
        nargs="*",
        metavar="NAME",
        help="all that the lab needs if none is named; also k3s, kubernetes",
    )
    verb("down", down, "remove every trace of the lab")
    one = verb("attend", attended, "do that when the program that called this ends")
    one.add_argument("program", help="its name: molecule")
    one.add_argument("--unless", default="", help="leave the lab if it has this argument")
    one.add_argument(
        "--forget",
        nargs="+",
        default=[],
        metavar="FILE",
        help="remove these too: they note the lab",
    )
    verb("status", status, "show the machines")
    verb("inventory", print_inventory, "print Ansible's inventory as JSON")
    verb("shell", shell, "log in, or run a command there", machine=True).add_argument(
        "command", nargs=argparse.REMAINDER
    )
    verb("cut", cut, "pull the machine's cable", machine=True).add_argument(
        "--silent", action="store_true", help="drop packets, but leave the link up"
    )
    verb("heal", heal, "undo cut and slow", machine=True)
    verb("slow", slow, "limit the machine's link", machine=True).add_argument(
        "--rate", required=True, help="as tc takes it: 10mbit"
    )
    for name, action, text in (
        ("stop", stop, "shut the machine down"),
        ("reboot", reboot, "stop and start: same disk, new boot id"),
    ):
        verb(name, action, text, machine=True).add_argument(
            "--hard", action="store_true", help="pull the plug"
        )
    verb("start", start, "boot a stopped machine", machine=True)
    verb("k3s-start", k3s_start, "start the cluster that --k3s-idle left for later")
    return top


def main(argv: Optional[Sequence[str]] = None) -> int:
    # A plain `kill` unwinds as Ctrl-C does, so that what was begun is taken down again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = parser().parse_args(argv)
    try:
        args.action(Lab.of_this_checkout(), args)
    except LabError as problem:
        for line in str(problem).splitlines():
            print(f"lab: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; everything begun was taken down again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    os.chdir(CHECKOUT)
    sys.exit(main())
