"""``headcnictl completion SHELL``: a script that completes the words of headcnictl.

It is generated from the parser, so that it has the verbs, options and choices of this release.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Callable, Dict, List, NamedTuple, Tuple, Union

from .main import OK, VERBS, parser_with, show

FILES = object()  # in place of words: names of files and folders
Words = Union[Tuple[str, ...], object]
SHELLS: Dict[str, Callable[[Sequence[Verb]], str]] = {}

# What options and arguments stand for that have no choices of their own.
_OF_FILES = ("FILE", "DIR", "…")
_NAMED_FILES = ("config", "dir", "directory", "output", "root", "next", "socket", "junit")


class Option(NamedTuple):
    names: Tuple[str, ...]
    about: str
    takes_value: bool
    words: Words


class Verb(NamedTuple):
    name: str
    about: str
    options: List[Option]
    places: List[Words]  # the words of each argument; the last one may be repeated
    repeats: bool


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="for which shell")


def run(args: argparse.Namespace) -> int:
    script = SHELLS[args.shell](verbs())
    show({"shell": args.shell, "script": script} if args.json else script.rstrip("\n"), args.json)
    return OK


def verbs() -> List[Verb]:
    parser, _modules = parser_with(VERBS)
    [subparsers] = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return [_verb(name, subparsers.choices[name]) for name in VERBS]


def _verb(name: str, parser: argparse.ArgumentParser) -> Verb:
    options, places, repeats = [], [], False
    for action in parser._actions:
        if action.option_strings:
            takes = action.nargs != 0
            words = _words(name, action) if takes else ()
            about = (action.help or "") % {"default": action.default, "prog": "headcnictl"}
            options.append(Option(tuple(action.option_strings), about, takes, words))
        else:
            places.append(_words(name, action))
            repeats = action.nargs in ("*", "+", argparse.REMAINDER)
    return Verb(name, VERBS[name], options, places, repeats)


def _words(verb: str, action: argparse.Action) -> Words:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    named = _named().get((verb, action.dest))
    if named is not None:
        return named
    named_so = any(name.endswith(_NAMED_FILES) for name in action.option_strings)
    return FILES if named_so or action.metavar in _OF_FILES else ()


def _named() -> Dict[Tuple[str, str], Tuple[str, ...]]:
    """Arguments whose words are in a table of ours."""
    from ..settings import described
    from .explanations import ALL
    from .normal import RULES

    return {
        ("config", "key"): tuple(key for key, *_rest in described()),
        ("explain", "id"): tuple(each.id for each in ALL),
        ("metrics", "name"): tuple(RULES),
        ("policy", "words"): ("explain",),
    }


def _joined(words: Iterable[str]) -> str:
    """For a shell, in quotes. Our words have neither blanks nor signs that a shell would expand."""
    return shlex.quote(" ".join(words))


def _cases(found: Sequence[Verb]) -> Tuple[List[str], List[str], List[str], str]:
    """Lines of a `case`, the same in bash and zsh: options, values and arguments, and the options
    that take a value."""
    options, values, places, takers = [], [], [], []
    for verb in found:
        names = [name for option in verb.options for name in option.names]
        options.append(f"        {verb.name}) choices={_joined(names)} ;;")
        for option in verb.options:
            if option.takes_value:
                patterns = "|".join(f"'{verb.name} {name}'" for name in option.names)
                takers.append(patterns)
                values.append(f"        {patterns}) {_assigned(option.words)} ;;")
        for place, words in enumerate(verb.places):
            last = verb.repeats and place == len(verb.places) - 1
            pattern = f"'{verb.name} '*" if last else f"'{verb.name} {place}'"
            places.append(f"        {pattern}) {_assigned(words)} ;;")
    return options, values, places, "|".join(takers)


def _assigned(words: Words) -> str:
    if words is FILES:
        return "files=1"
    return f"choices={_joined(words)}" if isinstance(words, tuple) and words else ":"


_BODY = """\
    {locals}
    for ((at = {first}; at < {count}; at++)); do
        word=${{{array}[at]}}
        if [[ -z $verb ]]; then
            [[ $word == -* ]] || verb=$word
        elif [[ -n $value ]]; then
            value=
        else
            case "$verb $word" in
            {takers}) value=$word ;;
            *' -'*) ;;
            *) place=$((place + 1)) ;;
            esac
        fi
    done
    if [[ -z $verb ]]; then
        choices={verbs}
    elif [[ -n $value ]]; then
        case "$verb $value" in
{values}
        esac
    elif [[ $current == -* ]]; then
        case "$verb" in
{options}
        esac
    else
        case "$verb $place" in
{places}
        esac
    fi
"""
_LOCALS = "local verb= value= word= choices= files= place=0 at=0"


def _body(found: Sequence[Verb], array: str, first: int, count: str, current: str) -> str:
    options, values, places, takers = _cases(found)
    return _BODY.format(
        locals=f"{_LOCALS} current={current}",
        array=array,
        first=first,
        count=count,
        takers=takers,
        verbs=_joined(verb.name for verb in found),
        options="\n".join(options),
        values="\n".join(values),
        places="\n".join(places),
    )


def _bash(found: Sequence[Verb]) -> str:
    body = _body(found, "COMP_WORDS", 1, "COMP_CWORD", '"${COMP_WORDS[COMP_CWORD]}"')
    return f"""\
# Completion of headcnictl for bash, by: headcnictl completion bash
_headcnictl() {{
{body}    COMPREPLY=()
    if [[ -n $files ]]; then
        compopt -o filenames 2>/dev/null
        while IFS= read -r word; do
            COMPREPLY+=("$word")
        done < <(compgen -f -- "$current")
    else
        while IFS= read -r word; do
            COMPREPLY+=("$word")
        done < <(compgen -W "$choices" -- "$current")
    fi
}}
complete -F _headcnictl headcnictl
"""


def _zsh(found: Sequence[Verb]) -> str:
    body = _body(found, "words", 2, "CURRENT", '"${words[CURRENT]}"')
    return f"""\
#compdef headcnictl
# Completion of headcnictl for zsh, by: headcnictl completion zsh
_headcnictl() {{
{body}    if [[ -n $files ]]; then
        _files
    else
        compadd -- ${{=choices}}
    fi
}}
if [[ ${{funcstack[1]}} == _headcnictl ]]; then
    _headcnictl "$@"
else
    compdef _headcnictl headcnictl
fi
"""


_FISH = """\
# Completion of headcnictl for fish, by: headcnictl completion fish
function __headcnictl_at -a verb place -d 'whether this argument of the verb is next'
    set -l at -1
    set -l value ''
    for word in (commandline -opc)[2..-1]
        if test -n "$value"
            set value ''
        else if contains -- "$verb $word" {takers}
            set value $word
        else if not string match -q -- '-*' $word
            set at (math $at + 1)
        end
    end
    test $at -eq $place
end
complete -c headcnictl -f
"""


def _fish(found: Sequence[Verb]) -> str:
    takers = (
        shlex.quote(f"{verb.name} {name}")
        for verb in found
        for option in verb.options
        for name in option.names
        if option.takes_value
    )
    lines = (line for verb in found for line in _fish_lines(verb))
    return _FISH.format(takers=" ".join(takers)) + "\n".join(lines) + "\n"


def _fish_lines(verb: Verb) -> Iterator[str]:
    start = f"complete -c headcnictl -n __fish_use_subcommand -a {verb.name}"
    yield f"{start} -d {_fish_quoted(verb.about)}"
    seen = f"__fish_seen_subcommand_from {verb.name}"
    for option in verb.options:
        names = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
        )
        value = ""
        if option.takes_value:
            value = " -r -F" if option.words is FILES else f" -x{_fish_words(option.words)}"
        yield f"complete -c headcnictl -n '{seen}' {names}{value} -d {_fish_quoted(option.about)}"
    for place, words in enumerate(verb.places):
        if given := _fish_words(words):
            next_ = f"{seen}; and __headcnictl_at {verb.name} {place}"
            yield f"complete -c headcnictl -n '{next_}'{given}"


def _fish_words(words: Words) -> str:
    if words is FILES:
        return " -F"
    return f" -a {_joined(words)}" if isinstance(words, tuple) and words else ""


def _fish_quoted(text: str) -> str:
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS.update(bash=_bash, zsh=_zsh, fish=_fish)
