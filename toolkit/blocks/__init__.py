"""The primitive: a named place where the gradient is stopped, and the switch that opens it.

A *block* is a name and the reason why a quantity is held constant. `stop_gradient` and `stop_recording` put it in
place; `unblock` opens it, so that the same program can be differentiated with the block and without it.

How the switch is made, and why it is not simpler:

- In eager mode the set of open blocks lives in a `ContextVar`: a thread that opens a block affects no other thread.
- Dynamo cannot read a `ContextVar`, so a function under `torch.compile` reads a module global instead. Dynamo guards
  that global: opening a block recompiles, and closing it returns to the first graph.
- While no block is open in any thread, `stop_gradient` reads a single global before it detaches.
- A comparison (`toolkit.gradients`) passes in its gates through `gated`; this package does not import it.

`primitive` has the public functions. The private files have the switch, names and places, eager and compiled code, and
trees of tensors.
"""

from toolkit.blocks._eager import GradientFlowError
from toolkit.blocks._names import Block

# For other rooms of this project, not re-exported by `toolkit`.
from toolkit.blocks._names import is_site as is_site
from toolkit.blocks._names import known_name as known_name
from toolkit.blocks._names import register as register
from toolkit.blocks._sites import Site as Site
from toolkit.blocks._sites import site_of as site_of
from toolkit.blocks._switch import Gates as Gates
from toolkit.blocks._switch import Reached as Reached
from toolkit.blocks._switch import gated as gated
from toolkit.blocks._switch import is_left_out as is_left_out
from toolkit.blocks._switch import is_quiet as is_quiet
from toolkit.blocks._switch import opened as opened
from toolkit.blocks._switch import region_at as region_at
from toolkit.blocks._switch import stop_at as stop_at
from toolkit.blocks._switch import watched as watched
from toolkit.blocks._tensors import alias as alias
from toolkit.blocks._tensors import carries_gradient as carries_gradient
from toolkit.blocks._tensors import constants as constants
from toolkit.blocks._tensors import has_storage as has_storage
from toolkit.blocks._tensors import map_tensors as map_tensors
from toolkit.blocks._tensors import no_graph as no_graph
from toolkit.blocks._tensors import ordinary_tensors as ordinary_tensors
from toolkit.blocks._tensors import variable as variable
from toolkit.blocks._tensors import without_tangents as without_tangents
from toolkit.blocks.primitive import (
    block,
    declared_blocks,
    is_blocked,
    scope,
    stop_gradient,
    stop_recording,
    traced_blocks,
    unblock,
)

__all__ = [
    "Block",
    "GradientFlowError",
    "block",
    "declared_blocks",
    "is_blocked",
    "scope",
    "stop_gradient",
    "stop_recording",
    "traced_blocks",
    "unblock",
]
