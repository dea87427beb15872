"""Where a published package, or a line of it, can be read."""

from __future__ import annotations

import functools
import re
from importlib.metadata import metadata, packages_distributions, version

__all__ = ["link", "repository"]

# Imported package -> the tag of a version in its repository, and the folder of its sources there. Only packages whose
# tags are known: public code links to them, or distributions are built from them.
_TAGS = {
    **dict.fromkeys(("botorch", "gpytorch", "kornia", "lightly", "linear_operator", "nflows", "opacus"), "v{}"),
    **dict.fromkeys(("stable_baselines3", "timm", "torch", "torchao", "torchrl", "torchsde", "trl"), "v{}"),
    **dict.fromkeys(("brevitas", "diffusers", "peft", "pytorch_metric_learning", "transformers"), "v{}/src"),
    **dict.fromkeys(("monai", "pyro", "spikingjelly", "torch_geometric", "vector_quantize_pytorch"), "{}"),
}
# Distributions whose metadata misspell the address.
_MISSPELT = {
    "torchattacks": "https://github.com/Harry24k/adversarial-attacks-pytorch",
    "vector-quantize-pytorch": "https://github.com/lucidrains/vector-quantize-pytorch",
}


def repository(package: str) -> str:
    """Return the address of a package's repository that its metadata name, and "" if they name none."""
    named = [metadata(package)["Home-page"] or "", *(metadata(package).get_all("Project-URL") or [])]
    found = (re.search(r"https://git(?:hub|lab)\.com/[\w.-]+/[\w.-]+", line) for line in named)
    return _MISSPELT.get(package) or next((match[0].removesuffix(".git") for match in found if match), "")


def link(place: str) -> str:
    """Return the address of a place in the repository of its package, and "" if its tag is not known.

    Args:
        place: ``file:line:column``, with the file as seen from the folder into which packages are installed.
    """
    path, line, _ = place.rsplit(":", 2)
    imported = path.partition("/")[0]
    if imported not in _TAGS:
        return ""
    package = _distribution(imported)
    released, address = version(package).partition("+")[0], repository(package)
    return address and f"{address}/blob/{_TAGS[imported].format(released)}/{path}#L{line}"


@functools.cache
def _distribution(imported: str) -> str:
    return packages_distributions()[imported][0]
