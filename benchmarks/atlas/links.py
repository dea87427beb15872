"""Where a line of a published package can be read."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from urllib.parse import urlsplit

__all__ = ["link"]


def link(place: str) -> str:
    """Return the address of a place in an installed package, or "" if the package index does not have its wheel.

    Args:
        place: ``file:line:column``, with the file as seen from the folder into which packages are installed.
    """
    path, line, _ = place.rsplit(":", 2)
    distribution = _owners().get(path.partition("/")[0], [""])[0]
    if distribution == "torch":
        return f"https://github.com/pytorch/pytorch/blob/v{version('torch').partition('+')[0]}/{path}#L{line}"
    wheel = _wheel(distribution, version(distribution)) if distribution else ""
    if not wheel.endswith(".whl"):
        return ""
    return f"https://inspector.pypi.io/project/{distribution}/{version(distribution)}/{wheel}/{path}#line.{line}"


@functools.cache
def _owners() -> Mapping[str, list[str]]:
    return packages_distributions()


@functools.cache
def _wheel(distribution: str, number: str) -> str:
    """Return the path of a wheel in the package index."""
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-")
    command = [sys.executable, "-m", "pip", "install", *options, f"{distribution}=={number}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return ""
    return urlsplit(json.loads(done.stdout)["install"][0]["download_info"]["url"]).path.lstrip("/")
