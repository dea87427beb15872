"""Where a published package, or a line of it, can be read."""

from __future__ import annotations

import re
from importlib.metadata import metadata, version

__all__ = ["link", "repository"]


def repository(package: str) -> str:
    """Return the address of a package's repository that its metadata name, and "" if they name none."""
    named = [metadata(package)["Home-page"] or "", *(metadata(package).get_all("Project-URL") or [])]
    found = (re.search(r"https://git(?:hub|lab)\.com/[\w.-]+/[\w.-]+", line) for line in named)
    return next((match[0].removesuffix(".git") for match in found if match), "")


def link(place: str) -> str:
    """Return the address of a place in torch, and "" for other packages, whose releases have no tag that is known.

    Args:
        place: ``file:line:column``, with the file as seen from the folder into which packages are installed.
    """
    path, line, _ = place.rsplit(":", 2)
    if path.partition("/")[0] != "torch":
        return ""
    return f"https://github.com/pytorch/pytorch/blob/v{version('torch').partition('+')[0]}/{path}#L{line}"
