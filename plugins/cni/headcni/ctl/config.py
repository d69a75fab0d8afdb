"""``headcnictl config``: the daemon's settings and their origin, the mistakes in the file, and what
each key means."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, List, NamedTuple, Optional, Set

from .. import settings as configuration
from ..errors import CniError
from ..problems import nearest
from ..settings import Changes, DaemonConfig, Setting, control_path
from . import node
from .daemon_client import CONTROL, asked
from .main import OK, CannotTell, show
from .terminal import DOUBTFUL, paint, table, wrapped

APPLIED_BY = {True: "reload", False: "restart"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("show", "validate", "explain"),
        help="show every setting in use; check the file as the daemon would; or explain KEY",
    )
    parser.add_argument(
        "key",
        metavar="KEY",
        nargs="?",
        help="a key such as network.mtu, its end (mtu), or a section (network); without it, "
        "explain all keys",
    )
    node.with_config(parser)
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.key is not None and args.what != "explain":
        args.refuse(f"{args.key[:80]!r}: only explain takes a key")
    if args.what == "validate":
        code, said = configuration.check(args.config, args.json)
        show(said, as_json=False)
        return code
    used = _in_use(args.config)
    return _show(args, used) if args.what == "show" else _explain(args, used)


class _Used(NamedTuple):
    """The settings in use. ``file`` are those that the file has now: by key, where they differ."""

    by_daemon: bool
    problem: str  # why the file says nothing
    settings: List[Setting]
    file: Dict[str, Any]


def _in_use(path: str) -> _Used:
    problem: Optional[CniError] = None
    wanted, given = configuration.DaemonConfig(), set()
    try:
        wanted = configuration.load(path, missing_ok=True)
        given = configuration.given(path)
    except CniError as wrong:
        problem = wrong
    from_file = list(configuration.effective(wanted, given, configuration.derived(wanted)))
    answer = _of_daemon(control_path(wanted), path) or _of_daemon(CONTROL, path)
    if answer is None:
        if problem is not None:
            raise problem
        return _Used(False, "", from_file, {})
    running, _mistakes = configuration.parse(json.dumps(answer["config"]).encode())
    pending = {} if problem is not None else _pending(running, wanted, from_file)
    changed = _keys(configuration.changes(configuration.DaemonConfig(), running))
    settings = configuration.effective(running, (given - set(pending)) | changed, answer["derived"])
    return _Used(True, str(problem or ""), list(settings), pending)


def _pending(
    running: DaemonConfig, wanted: DaemonConfig, from_file: List[Setting]
) -> Dict[str, Any]:
    """The values in the file that the daemon does not use yet."""
    keys = _keys(configuration.changes(running, wanted))
    return {setting.key: setting.value for setting in from_file if setting.key in keys}


def _keys(changes: Changes) -> Set[str]:
    return {change.path for each in changes for change in each}


def _of_daemon(socket: str, path: str) -> Optional[Dict[str, Any]]:
    """The settings of the daemon that has this file; None if no daemon answers."""
    try:
        with asked("config", socket) as answers:
            answer = next(answers, None)
    except CniError:
        return None  # it does not run, or is of an earlier release
    return answer if answer is not None and answer["path"] == path else None


def _show(args: argparse.Namespace, used: _Used) -> int:
    if args.json:
        show(
            {
                "file": args.config,
                "daemon": used.by_daemon,
                "problem": used.problem,
                "settings": [_as_dict(setting, used) for setting in used.settings],
            },
            as_json=True,
        )
        return OK
    whose = "in use by the daemon" if used.by_daemon else "the daemon does not answer; the file has"
    lines = [f"{args.config}: {whose}"]
    rows = [(setting.key, setting.origin, _text(setting.value)) for setting in used.settings]
    lines.append(table(rows, ("KEY", "ORIGIN", "VALUE")))
    lines += [paint(line, DOUBTFUL) for line in _not_in_use(used)]
    show("\n".join(lines), as_json=False)
    return OK


def _not_in_use(used: _Used) -> List[str]:
    if used.problem:
        return [wrapped(f"NOT IN USE: the file: {used.problem}", "", "  ")]
    live = {setting.key: setting.live for setting in used.settings}
    return [
        wrapped(
            f"NOT IN USE: {key} is {_text(value)} in the file: systemctl {APPLIED_BY[live[key]]} "
            "headcni-daemon",
            "",
            "  ",
        )
        for key, value in used.file.items()
    ]


def _explain(args: argparse.Namespace, used: _Used) -> int:
    found = _matching(args.key or "", used.settings)
    if args.json:
        show([_as_dict(setting, used) for setting in found], as_json=True)
    else:
        show("\n\n".join(map(_in_words, found)), as_json=False)
    return OK


def _matching(wanted: str, settings: List[Setting]) -> List[Setting]:
    """By the key, its end or its beginning; upper and lower case are the same."""
    wanted = wanted.lower()
    for fits in (
        lambda key: not wanted or key == wanted,
        lambda key: key.startswith(f"{wanted}."),
        lambda key: key.endswith(f".{wanted}"),
        lambda key: f".{wanted}." in key,
    ):
        found = [setting for setting in settings if fits(setting.key.lower())]
        if found:
            return found
    retired = {key.lower(): why for key, why in configuration.RETIRED.items()}.get(wanted)
    if retired:
        raise CannotTell(retired)
    keys = [setting.key for setting in settings]
    names = {key.rpartition(".")[2]: key for key in keys}
    near = nearest(wanted, keys) or names.get(nearest(wanted, list(names)), "")
    hint = f"did you mean {near}?" if near else "headcnictl config show lists all keys"
    raise CannotTell(f"no key {wanted[:80]!r}: {hint}")


def _in_words(setting: Setting) -> str:
    lines = [setting.key]
    for title, text in (
        ("meaning", setting.about),
        ("valid", setting.expected),
        ("default", _text(setting.default)),
        ("in use", f"{_text(setting.value)} ({setting.origin})"),
        ("change by", f"systemctl {APPLIED_BY[setting.live]} headcni-daemon"),
    ):
        lines.append(wrapped(text, f"  {title + ':':<11}", " " * 13))
    return "\n".join(lines)


def _as_dict(setting: Setting, used: _Used) -> Dict[str, Any]:
    return {
        "key": setting.key,
        "value": setting.value,
        "origin": setting.origin,
        "default": setting.default,
        "meaning": setting.about,
        "valid": setting.expected,
        "applied_by": APPLIED_BY[setting.live],
        **({"in_file": used.file[setting.key]} if setting.key in used.file else {}),
    }


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value not in ("", []) else "-"
