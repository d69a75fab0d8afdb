"""Other plugins that work for us: `delegate`, `plugins`, and another IPAM plugin.

The same plugin must undo what it did, with the same configuration, whatever happens in between. So
each step is written into the store before it runs, and removed when it was undone. After a crash, a
changed configuration or a failed DEL, the next DEL uses that record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from .delegates import delegate_config
from .errors import (
    CHECK_FAILED,
    DELEGATE_FAILED,
    INCOMPATIBLE_VERSION,
    INVALID_CONFIG,
    LIMITED,
    NOT_AVAILABLE,
    CniError,
)
from .exec import MAX_NESTING, deeper, find, invoke
from .ipam.config import ANNOTATIONS
from .model import NetworkConfig, Owner
from .record import replace
from .result import Result, read, shape
from .skel import (
    LATEST,
    VALID_ATTACHMENTS,
    VERSIONS,
    environment_of,
    has_verb,
    nested_name,
    steps,
    valid_attachments,
)
from .store import PluginState, Store


class States(Protocol):
    """Where the steps of a chain are recorded: the store, or the readable part of it."""

    def plugin_states(self, owner: Owner, /) -> list[PluginState]: ...

    def drop_plugin_state(self, owner: Owner, index: int, /) -> None: ...


def add(network: NetworkConfig, env: Mapping[str, str], owner: Owner, store: Store) -> Result:
    """Run the chain. Each plugin gets the result of the previous one. If one fails, all are
    undone."""
    for index, conf in enumerate(network.delegates):  # before any of them changes anything
        find(conf["type"], deeper(env, str(index)))
    timeout, result = network.delegate_timeout, _given(network)
    # Steps of an interrupted ADD would disturb this ADD or its DEL.
    old = [_whole(state, network) for state in store.plugin_states(owner)]
    left_over = _undo(old, env, owner, store, timeout, _last_result(old))
    started: list[PluginState] = []
    try:
        for index, conf in enumerate(network.delegates):
            state = PluginState(index, conf["type"], delegate_config(network, conf), {})
            store.save_plugin_state(owner, state)
            started.append(state)
            step = deeper(env, str(index))
            result = _added(state.type, step, _request(state, result), timeout)
            store.save_plugin_state(owner, replace(state, result=result))
    except Exception as problem:
        stuck = _undo(started, env, owner, store, timeout, result)
        if not isinstance(problem, CniError):
            raise
        notes = [f"of an earlier ADD remains: {trouble}" for trouble in left_over]
        notes += [f"roll-back failed too: {trouble}" for trouble in stuck]
        raise _with_notes(problem, notes) from problem
    return result or read({}, network.cni_version)


def delete(network: NetworkConfig, env: Mapping[str, str], owner: Owner, store: States) -> None:
    """Undo the steps in reverse order, as recorded in the store, or else by the configuration.

    Every plugin is tried. A step that fails stays in the store, and the next DEL tries it again.
    """
    if len(steps(env)) >= MAX_NESTING:
        return  # an ADD at this depth is refused
    states = store.plugin_states(owner)
    previous = None
    with suppress(CniError):  # a damaged cached result must not stop a DEL
        previous = _given(network)
    previous = previous or _last_result(states)
    states = [_whole(state, network) for state in states] or _by_configuration(network, env)
    problems = _undo(states, env, owner, store, network.delegate_timeout, previous)
    if problems:
        raise _joined(problems)


def check(network: NetworkConfig, env: Mapping[str, str], owner: Owner, store: Store) -> None:
    """Run CHECK of each plugin, in order. The error has the findings of all plugins."""
    if network.raw.get("disableCheck") is True:
        return
    states = store.plugin_states(owner)
    previous = _given(network) or _last_result(states)
    problems: list[CniError] = []
    for state in states or _by_configuration(network):
        if states and not state.result:
            problems.append(CniError(CHECK_FAILED, f"{state.type}: its ADD did not finish"))
        elif has_verb("CHECK", _version(state.config)):
            with _collected(problems):
                _pass_on("CHECK", state, env, network, previous)
    if problems:
        raise _joined(problems)


def gc(network: NetworkConfig, env: Mapping[str, str], store: Store) -> None:
    """DEL for our attachments that are no longer valid, then GC of each plugin."""
    if network.raw.get("disableGC") is True:
        return
    valid = valid_attachments(network.raw)
    if valid is None:
        raise CniError(
            INVALID_CONFIG,
            f"GC needs {VALID_ATTACHMENTS[0]}: a list of containerID and ifname",
            "without it every attachment of the network would be removed",
        )
    problems: list[CniError] = []
    for owner in store.owners_with_plugin_states(nested_name(network.name, env)):
        if (owner.container_id, owner.ifname) not in valid:
            problems += _undo_stale(network, env, owner, store)
    listed = [{"containerID": container, "ifname": ifname} for container, ifname in sorted(valid)]
    for state in _by_configuration(network):
        if has_verb("GC", _version(state.config)):
            state.config.update(dict.fromkeys(VALID_ATTACHMENTS, listed))
            with _collected(problems):
                _pass_on("GC", state, env, network)
    if problems:
        raise _joined(problems)


def status(network: NetworkConfig, env: Mapping[str, str]) -> None:
    """Run STATUS of each plugin. If any fails, the error has the worst code."""
    problems: list[CniError] = []
    for state in _by_configuration(network):
        if has_verb("STATUS", _version(state.config)):
            with _collected(problems):
                _pass_on("STATUS", state, env, network)
    if problems:
        raise _not_ready(problems)


def ipam_add(network: NetworkConfig, env: Mapping[str, str]) -> Result:
    """Get addresses from the plugin that ipam.type names. A failed ADD is undone."""
    find(network.ipam.type, env)
    step, conf, timeout = deeper(env, "ipam"), _whole_netconf(network), network.delegate_timeout
    try:
        result = _added(network.ipam.type, step, conf, timeout)
        if not result.get("ips"):
            raise CniError(DELEGATE_FAILED, f"{network.ipam.type}: ADD gave no address")
    except CniError as problem:
        try:
            invoke(network.ipam.type, "DEL", step, conf, timeout)
        except CniError as trouble:
            raise _with_notes(problem, [f"roll-back failed too: {trouble}"]) from problem
        raise
    return result


def ipam_del(network: NetworkConfig, env: Mapping[str, str]) -> None:
    if len(steps(env)) < MAX_NESTING:  # a deeper ADD is refused
        _ipam("DEL", network, env)


def ipam_check(network: NetworkConfig, env: Mapping[str, str]) -> None:
    _ipam("CHECK", network, env)


def ipam_gc(network: NetworkConfig, env: Mapping[str, str]) -> None:
    _ipam("GC", network, env)


def ipam_status(network: NetworkConfig, env: Mapping[str, str]) -> None:
    try:
        _ipam("STATUS", network, env)
    except CniError as problem:
        raise _not_ready([problem]) from problem


def _ipam(verb: str, network: NetworkConfig, env: Mapping[str, str]) -> None:
    conf = _whole_netconf(network)
    if has_verb(verb, _version(conf)):
        _run(verb, network.ipam.type, deeper(env, "ipam"), conf, network.delegate_timeout)


def _whole_netconf(network: NetworkConfig) -> dict[str, Any]:
    """What an IPAM plugin reads: our whole netconf, with the ranges that we added."""
    return {**network.raw, "ipam": {**network.ipam.raw, "type": network.ipam.type}}


def _given(network: NetworkConfig) -> Result | None:
    """The runtime's prevResult: that of the previous plugin on ADD, of the whole ADD later."""
    return read(network.prev_result, network.cni_version) if network.prev_result else None


def _last_result(states: Sequence[PluginState]) -> Result | None:
    return next((state.result for state in reversed(states) if state.result), None)


def _by_configuration(
    network: NetworkConfig, env: Mapping[str, str] | None = None
) -> list[PluginState]:
    """The chain as it would run now. With ``env``, without the plugins that are not installed.

    A DEL of an unknown pod leaves those out: most likely the ADD failed because they were missing,
    and the pod must be removable.
    """
    states = []
    for index, conf in enumerate(network.delegates):
        if env is not None:
            try:
                find(conf["type"], env)
            except CniError:
                continue
        states.append(PluginState(index, conf["type"], delegate_config(network, conf), {}))
    return states


def _whole(state: PluginState, network: NetworkConfig) -> PluginState:
    """The recorded step. If its row was damaged, it has the present configuration."""
    if state.config:
        return replace(state, config=_with_runtime_config(state.config, network))
    now = [known for known in _by_configuration(network) if known.type == state.type]
    at_its_place = [known for known in now if known.index == state.index] or now
    bare = {"type": state.type, "name": network.name, "cniVersion": network.cni_version}
    return replace(state, config=at_its_place[0].config if at_its_place else bare)


def _with_runtime_config(conf: dict[str, Any], network: NetworkConfig) -> dict[str, Any]:
    """Add the runtime's data that the store lacks, because it keeps only small values."""
    has, kept = conf.get("capabilities"), conf.get("runtimeConfig") or {}
    missing = {
        name: network.runtime_config[name]
        for name, wanted in (has.items() if isinstance(has, Mapping) else ())
        if wanted and name in network.runtime_config and (name == ANNOTATIONS or name not in kept)
    }
    return {**conf, "runtimeConfig": {**kept, **missing}} if missing else conf


def _request(state: PluginState, previous: Result | None) -> dict[str, Any]:
    """What the plugin reads on stdin."""
    conf = {key: value for key, value in state.config.items() if key != "prevResult"}
    if previous:
        conf["prevResult"] = shape(previous, _version(state.config))
    return conf


def _version(conf: Mapping[str, Any]) -> str:
    version = conf.get("cniVersion")
    return version if version in VERSIONS else LATEST


def _added(kind: str, env: Mapping[str, str], conf: Mapping[str, Any], timeout: float) -> Result:
    answer = invoke(kind, "ADD", env, conf, timeout) or {}
    try:
        return read(answer, _version(conf))
    except CniError as problem:
        raise CniError(DELEGATE_FAILED, f"{kind}: {problem.msg}", problem.details) from problem


def _pass_on(
    verb: str,
    state: PluginState,
    env: Mapping[str, str],
    network: NetworkConfig,
    previous: Result | None = None,
) -> None:
    request = _request(state, previous)
    _run(verb, state.type, deeper(env, str(state.index)), request, network.delegate_timeout)


def _run(
    verb: str, kind: str, env: Mapping[str, str], conf: Mapping[str, Any], timeout: float
) -> None:
    """Run a verb that has no answer. A plugin that does not know the verb is skipped."""
    try:
        invoke(kind, verb, env, conf, timeout)
    except CniError as problem:
        if verb == "DEL" or not _unknown_verb(problem, verb):
            raise


def _unknown_verb(problem: CniError, verb: str) -> bool:
    """Whether the plugin says that it, or its version of the specification, lacks the verb.

    The ADD used the same version, so at CHECK and GC a mismatch must mean the verb. At STATUS it
    means that ADD would fail.
    """
    mismatch = problem.code == INCOMPATIBLE_VERSION and verb != "STATUS"
    return mismatch or "unknown CNI_COMMAND" in problem.msg


def _undo(
    states: Sequence[PluginState],
    env: Mapping[str, str],
    owner: Owner,
    store: States,
    timeout: float,
    previous: Result | None,
) -> list[CniError]:
    """DEL in reverse order. Steps that were undone leave the store. Problems are returned."""
    problems: list[CniError] = []
    for state in reversed(states):
        with _collected(problems):
            # Since 0.4.0, which also added CHECK, a DEL gets the result of the ADD.
            known = previous if has_verb("CHECK", _version(state.config)) else None
            step = deeper(env, str(state.index))
            invoke(state.type, "DEL", step, _request(state, known), timeout)
            store.drop_plugin_state(owner, state.index)
    return problems


def _undo_stale(
    network: NetworkConfig, env: Mapping[str, str], owner: Owner, store: Store
) -> list[CniError]:
    """DEL for an attachment that the runtime has forgotten, with our record of it."""
    attachment = store.attachment(owner)
    call = environment_of(env, owner, attachment.netns if attachment else "")
    states = store.plugin_states(owner)
    whole = [_whole(state, network) for state in states]
    return _undo(whole, call, owner, store, network.delegate_timeout, _last_result(states))


@contextmanager
def _collected(problems: list[CniError]) -> Iterator[None]:
    try:
        yield
    except CniError as problem:
        problems.append(problem)


def _joined(problems: Sequence[CniError]) -> CniError:
    """Several failures as one error, with the code of the first."""
    details = "; ".join(problem.details for problem in problems if problem.details)
    return CniError(problems[0].code, "; ".join(problem.msg for problem in problems), details)


def _not_ready(problems: Sequence[CniError]) -> CniError:
    """With any of these problems ADD would fail. The worse of the two codes for that is used."""
    joined = _joined(problems)
    worst = LIMITED if any(problem.code == LIMITED for problem in problems) else NOT_AVAILABLE
    return CniError(worst, joined.msg, joined.details)


def _with_notes(problem: CniError, notes: Sequence[str]) -> CniError:
    return CniError(problem.code, problem.msg, "; ".join(filter(None, [problem.details, *notes])))
