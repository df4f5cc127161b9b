"""The systemd unit that ``perdure up --systemd`` prints."""

from __future__ import annotations

import getpass
import os

from perdure.core.config import SECRETS, Settings

UNIT = """\
[Unit]
Description=Perdure: persistent machines for AI agents
After=network.target

[Service]
# It says when it serves, and asks for more time as long as it hibernates: a slow host costs nobody's memory.
Type=notify
TimeoutStartSec=600
{user}ExecStart={command}
{environment}
Restart=on-failure
RestartSec=2
# The server hibernates every workspace on SIGTERM; its VMMs must live until it has.
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
# It makes a cgroup for each VMM; one of them that runs out of memory must not take the others along.
Delegate=yes
OOMPolicy=continue

[Install]
WantedBy=multi-user.target
"""
#: Settings of clients and of tests.
_NOT_ITS_OWN = {"url", "api_key", "crash_file"}


def text(settings: Settings, command: list[str], stop_s: float) -> str:
    """A unit that runs this command with these settings, for the user who asks. ``stop_s``: how long stopping may take."""
    chosen = {"home", "shutdown_deadline_s", *settings.model_fields_set} - _NOT_ITS_OWN
    lines = [f"Environment={quoted(f'PERDURE_{name.upper()}={_value(settings, name)}')}" for name in sorted(chosen - SECRETS)]
    secrets = [f"PERDURE_{name.upper()}=…" for name in sorted(chosen & SECRETS) if getattr(settings, name)]
    if secrets:  # everybody may read a unit
        lines.append(f"# Put {' and '.join(secrets)} into this file, which only root may read.")
        lines.append(f"EnvironmentFile={_escaped(str(settings.home / 'environment'))}")
    user = "" if os.geteuid() == 0 else f"User={getpass.getuser()}\n"
    words = " ".join(quoted(word).replace("$", "$$") for word in command)
    return UNIT.format(user=user, command=words, environment="\n".join(lines), stop_s=stop_s)


def _value(settings: Settings, name: str) -> str:
    value = getattr(settings, name)
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _escaped(word: str) -> str:
    return word.replace("%", "%%")


def quoted(word: str) -> str:
    """A word as systemd reads it (systemd.syntax(7), "Quoting"; systemd.unit(5), "Specifiers")."""
    word = _escaped(word)
    if word and not set(word) & set(" \t\n\"'\\;"):
        return word
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in word) + '"'
