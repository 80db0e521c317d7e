"""Removes folders from text, for reports and exports that are shared."""

from __future__ import annotations

import ntpath
import re
import shlex
from collections.abc import Iterable

# An absolute path in quotes, which may contain spaces.
_QUOTED = re.compile(
    r"""(?P<begin>(?P<quote>['"])(?:\w\w+:)?)(?P<path>(?:/(?!/)|~|[A-Za-z]:[\\/]|\\\\)[^'"\n]*)(?P=quote)"""
)
# An absolute path of at least two parts in running text.
_PLAIN = re.compile(r"""(?<![\w./\\~])(?:(?:file:/*|~)?/[^\s'"/,;:()]+(?=/)|[A-Za-z]:\\|\\\\\w)[^\s'",;()]*""")


def remove_folders(text: str, folders: Iterable[str] = ()) -> str:
    """Text in which every absolute path is replaced by its last name.

    Args:
        text: Any text.
        folders: Paths that may occur in the text, longest first; unlike others, they may contain spaces.

    >>> remove_folders("cannot read '/home/jane/my photos/cat.jpg' or /tmp/dog.jpg")
    "cannot read 'cat.jpg' or dog.jpg"
    """
    for path in folders:
        text = re.sub(re.escape(path) + r"""(?![\w-])[^\s'",;:()]*""", lambda match: last_name(match[0]), text)
    text = _QUOTED.sub(lambda match: f"{match['begin']}{last_name(match['path'])}{match['quote']}", text)
    return _PLAIN.sub(lambda match: last_name(match[0]), text)


def command_without_folders(command: str) -> str:
    """A command line in which absolute paths, also those after "=", are replaced by their last names.

    >>> command_without_folders("patchlight explain '/home/jane/my photos/cat.jpg' --report=/tmp/cat.html")
    'patchlight explain cat.jpg --report=cat.html'
    """
    words = (re.fullmatch(r"(--?[\w-]+=)?(.*)", word, re.DOTALL) for word in shlex.split(command))
    parts = ((match[1] or "", match[2]) for match in words if match is not None)
    return shlex.join(option + (last_name(word) if is_absolute(word) else word) for option, word in parts)


def is_absolute(path: str) -> bool:
    """Whether a path starts at a root, at a home directory, or above the working directory."""
    return path.startswith(("/", "~", "..")) or ntpath.isabs(path) or bool(ntpath.splitdrive(path)[0])


def last_name(path: str) -> str:
    """The last name of a path.

    >>> last_name("/home/jane/data/val/"), last_name("C:\\\\data\\\\val")
    ('val', 'val')
    """
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].lstrip("~")
