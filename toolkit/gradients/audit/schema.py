"""The schema of ``stopgrad audit --json``: one `AnswerSchema`, or a list of them.

``AnswerSchema.model_json_schema()`` is the JSON schema. Numbers that are not finite are null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["AnswerSchema", "DifferenceSchema", "EffectSchema", "PlaceSchema", "UnopenedSchema", "VerdictSchema"]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class VerdictSchema(_Schema):
    """A verdict, as `Verdict`.

    Attributes:
        kind: The kind of the verdict.
        parameters: The parameters that the verdict names, for ``cuts`` and ``makes``.
        label: The verdict without these names.
        text: The verdict with these names.
    """

    kind: Literal["no-op", "redundant", "noise", "partial", "cuts", "makes"]
    parameters: list[str]
    label: str
    text: str


class DifferenceSchema(_Schema):
    """The difference between two gradients, as `Difference`.

    Attributes:
        leak: Norm of the difference.
        ratio: Norm of the gradient with the stop open over the norm with it in place; null if that is not finite.
        cosine: Cosine of the angle between the two; null if one of them is 0.
    """

    leak: float | None
    ratio: float | None
    cosine: float | None


class EffectSchema(DifferenceSchema):
    """The effect of opening one stop alone, or of a set of stops that act only together, as `BlockEffect`.

    Attributes:
        name: The place of the stop, or the name of a named block; of a set, the names joined by " + ".
        why: The reason of a declared block.
        site: The place, ``file:line:column``.
        calls: The number of tensors or regions that the stop was applied to.
        verdict: The verdict.
        per_parameter: Parameter -> difference of its gradient.
    """

    name: str
    why: str
    site: str
    calls: int
    verdict: VerdictSchema
    per_parameter: dict[str, DifferenceSchema]


class UnopenedSchema(_Schema):
    """A stop that could not be opened, or only in part.

    Attributes:
        kind: The call that stops the gradient.
        site: The place.
        reason: The reason.
    """

    kind: str
    site: str
    reason: str


class PlaceSchema(_Schema):
    """A place where a value leaves the graph.

    Attributes:
        kind: The call, for example ``item()``.
        site: The place.
    """

    kind: str
    site: str


class AnswerSchema(_Schema):
    """The answer for a loss function, or for a backward pass of a script.

    Attributes:
        backward: The backward pass, for example ``step 3, backward pass 1``; missing for a loss function.
        valid: Whether the recorded program gave the loss and gradients of the plain one, bit for bit.
        reason: The reason why the answer is not valid; empty if it is.
        loss: The loss.
        blocked_norm: Norm of the gradient with every stop in place.
        effects: The effect of opening each stop alone, in the order of the program.
        sets: The effects of stops that act only together.
        unopened: The stops that could not be opened.
        interaction: The part of the joint effect that single effects do not explain, relative to the gradient.
        kinds: Place -> the call that stops the gradient.
        remarks: Remarks for the reader.
        off_graph: The stops of a recorded step that are not in the graph of this loss.
        escapes: Places where a value leaves the graph for good.
        one_mode: Places that stop reverse mode alone.
        reruns: Places that were opened in a run of their own.
        unreached: Parameter without a path to the loss -> the end of its path, if known.
        vanishing: Parameters with a path to the loss and a gradient of 0.
    """

    backward: str | None = None
    valid: bool
    reason: str
    loss: float | None
    blocked_norm: float | None
    effects: list[EffectSchema]
    sets: list[EffectSchema]
    unopened: list[UnopenedSchema]
    interaction: float | None
    kinds: dict[str, str]
    remarks: list[str]
    off_graph: list[str]
    escapes: list[PlaceSchema]
    one_mode: list[str]
    reruns: list[str]
    unreached: dict[str, str]
    vanishing: list[str]
