"""Every mistake in a netconf or conflist file, for people who check it before they install it."""

from __future__ import annotations

from collections.abc import Mapping

from . import config
from .errors import CniError
from .problems import Problem
from .shared.conflist import validate
from .skel import VERSIONS


def problems(stdin: bytes, env: Mapping[str, str]) -> list[Problem]:
    """Every mistake in a netconf, including those at which ``parse`` stops."""
    try:
        conf, found = config.decode(stdin)
    except CniError as wrong:
        return [_undecodable(stdin, wrong)]
    try:
        config.refuse_version(conf)
    except CniError:
        found.append(Problem("cniVersion", conf.get("cniVersion"), " or ".join(VERSIONS)))
    config.complete(conf, env, found)
    return found


def doubts(text: bytes, env: Mapping[str, str]) -> list[str]:
    """Settings of a netconf or conflist that are valid, but probably not intended."""
    try:
        conf, found = config.decode(text)
    except CniError:
        return []
    plugins = conf["plugins"] if isinstance(conf.get("plugins"), list) else ()
    listed = (conf,) if conf.get("type") == config.TYPE else plugins
    return [
        doubt
        for plugin in listed
        if isinstance(plugin, dict) and plugin.get("type") == config.TYPE
        for doubt in config.doubts_of(config.complete({"name": "injected", **plugin}, env, found))
    ]


def conflist_problems(text: bytes, env: Mapping[str, str]) -> list[Problem]:
    """Every mistake in a conflist file, and in our netconfs that libcni makes from it."""
    try:
        conf, found = config.decode(text)
    except CniError as wrong:
        return [_undecodable(text, wrong)]
    found += [Problem(*mistake) for mistake in validate(conf)]
    plugins = conf.get("plugins")
    for at, plugin in enumerate(plugins if isinstance(plugins, list) else ()):
        if isinstance(plugin, dict) and plugin.get("type") == config.TYPE:
            injected = {**plugin, "name": "injected"}
            inner: list[Problem] = []
            config.complete(injected, env, inner)
            known = {problem.path for problem in found}
            for problem in inner:
                path = f"plugins[{at}].{problem.path}"
                if path not in known:
                    found.append(problem._replace(path=path))
    return found


def _undecodable(text: bytes, wrong: CniError) -> Problem:
    return Problem("", text[:80].decode("utf-8", "replace"), f"valid JSON: {wrong.details}")
