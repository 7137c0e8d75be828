"""Shell completion scripts that contain all commands and options, so that completing does not start Python."""

from __future__ import annotations

from typing import Any

Words = dict[str, list[str]]
"""Candidates by command path: "region invite" → ["--ttl", ...]."""


def script(shell: str, command: Any) -> str:
    """Return the completion script for a shell; `command` is the click command of the whole program."""
    words = _words(command, "")
    return _fish(words) if shell == "fish" else _bash(words, zsh=shell == "zsh")


def _words(command: Any, path: str) -> Words:
    children: dict[str, Any] = getattr(command, "commands", {})
    options = sorted({name for parameter in command.params for name in parameter.opts if name.startswith("--")})
    found = {path: [*children, *options, "--help"]}
    for name, child in children.items():
        found |= _words(child, f"{path} {name}".strip())
    return found


def _bash(words: Words, *, zsh: bool) -> str:
    cases = "\n".join(f'    "{path}") words="{" ".join(offered)}" ;;' for path, offered in words.items())
    groups = "|".join(f'"{path}"' for path in words if path)
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if zsh else []),
        "_control_plane_completion() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" path="" words="" word candidate',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '    candidate="${path:+$path }$word"',
        f'    case "$candidate" in {groups}) path="$candidate" ;; esac',
        "  done",
        '  case "$path" in',
        cases,
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _control_plane_completion control-plane",
    ]
    return "\n".join(lines)


def _fish(words: Words) -> str:
    lines = []
    for path, offered in words.items():
        seen = [f"__fish_seen_subcommand_from {word}" for word in path.split()]
        nested = [other.removeprefix(f"{path} ") for other in words if other.startswith(f"{path} ")] if path else []
        if not path:
            seen = ["__fish_use_subcommand"]
        elif nested:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(nested)}")
        for word in offered:
            what = f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c control-plane -n '{'; and '.join(seen)}' {what}")
    return "\n".join(lines)
