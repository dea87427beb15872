"""Where a line of a published package can be read."""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["link"]


def link(place: str) -> str:
    """Return the address of a place in torch, and "" for other packages, whose releases have no tag that is known.

    Args:
        place: ``file:line:column``, with the file as seen from the folder into which packages are installed.
    """
    path, line, _ = place.rsplit(":", 2)
    if path.partition("/")[0] != "torch":
        return ""
    return f"https://github.com/pytorch/pytorch/blob/v{version('torch').partition('+')[0]}/{path}#L{line}"
