"""What a gradient reaches, against backward passes after real removals; folds hide no cut; what pictures promise."""

import gc
import itertools
import os
import queue
import random
import re
import subprocess
import sys
import threading
import weakref
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from folders import ROOT
from sklearn.isotonic import isotonic_regression
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit import block, compare, is_blocked, stop_gradient, stop_recording
from toolkit.blocks import opened
from toolkit.gradients._folding import Call, Node, folded
from toolkit.gradients._gates import GateBoard
from toolkit.gradients._layout import _apart, _crossings, _ordered, layered
from toolkit.gradients._nodes import reachable_nodes
from toolkit.gradients.graph import Graph, graph

TARGET = block("test_graph.target", "The target is a label.")

Parameters = Mapping[str, Tensor]


def _parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"w": (3, 3), "v": (3,), "s": (), "unused": (2,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


# --- what is reached, for every set of open blocks, is what a backward pass of the opened program finds --------------


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return 2 * input

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


def no_blocks(p):
    return (p["w"] @ p["v"]).sum() * p["s"]


def nested(p):
    inner = stop_gradient(p["v"].exp() * p["s"], "nested.inner")
    return stop_gradient(inner + p["w"].sum(0), "nested.outer").sum() + (p["w"].diagonal() * 2).sum()


def in_a_loop(p):
    state = p["v"]
    for _ in range(3):
        state = torch.tanh(p["w"] @ stop_gradient(state, "loop.state"))
    return state.sum()


def not_a_scalar(p):
    return p["v"] * stop_gradient(p["w"], "matrix.factor")


def two_outputs(p):
    first, second, third = (p["w"] @ p["v"]).unbind()
    return first * stop_gradient(second * p["s"], "unbind.second") + stop_gradient(third, "unbind.third")


def region_with_two_exits(p):
    with stop_recording("exits.region"):
        first = p["v"].exp() * p["s"]
        second = first.sin() + p["w"].sum(0)
    return (first * p["v"]).sum() + second.sum()


def regions_in_regions(p):
    with stop_recording("regions.outer"):
        hidden = p["w"] @ p["v"]
        with stop_recording("regions.inner"):
            hidden = hidden * p["s"]
        other = hidden + 1
    return hidden.sum() + (other * p["v"]).sum()


def block_in_a_region(p):
    with stop_recording("around.region"):
        stopped = stop_gradient(p["v"], "around.block")
    return (stopped * p["s"]).sum()


def region_of_a_block(p):
    stopped = stop_gradient(p["v"].exp(), "into.block")
    with stop_recording("into.region"):
        other = stopped * p["s"]
    return (other + p["w"]).sum()


def everything_is_stopped(p):
    return stop_gradient(no_blocks(p), "whole.loss")


def all_in_a_region(p):
    with stop_recording("whole.region"):
        return no_blocks(p)


def custom_function(p):
    return _Double.apply(p["v"] * stop_gradient(_Double.apply(p["s"]), "custom.block")).sum()


def in_place(p):
    hidden = p["v"] * 1
    hidden[0] = stop_gradient(p["s"].exp(), "place.block")
    hidden.mul_(2)
    return hidden.sum()


def checkpointed(p):
    def run(v, s):
        return v * stop_gradient(s.exp(), "checkpoint.block")

    return checkpoint(run, p["v"], p["s"], use_reentrant=False).sum()


def mapped(p):
    return torch.vmap(lambda row: row * stop_gradient(p["v"], "vmap.block"))(p["w"]).sum()


def inner_gradient(p):
    """The graph of an inner derivative is another one while its block is open."""
    (slope,) = torch.autograd.grad(
        (p["v"] * stop_gradient(p["s"] * p["v"], "inner.<block>")).sum(), p["v"], create_graph=True
    )
    return (slope * p["w"][0].detach()).sum()


def decides_for_itself(p):
    """With the recording on again inside, a part of the region is recorded also while it is in place."""
    with stop_recording("pierced.region"):
        constant = p["w"].sum(0)
        with torch.enable_grad():
            recorded = p["s"] * constant
    return (recorded * p["v"]).sum()


PROGRAMS = [
    no_blocks, nested, in_a_loop, not_a_scalar, two_outputs, region_with_two_exits, regions_in_regions,
    block_in_a_region, region_of_a_block, everything_is_stopped, all_in_a_region, custom_function, in_place,
    checkpointed, mapped, inner_gradient, decides_for_itself,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_reachable_is_what_a_backward_pass_reaches(program: Callable[[Parameters], Tensor]) -> None:
    parameters = _parameters()
    found = graph(lambda: program(parameters), parameters)
    for size in range(len(found.blocks) + 1):
        for names in itertools.combinations(found.blocks, size):
            with opened(*names):
                value = program(parameters).sum()
                gradients = [None] * len(parameters)
                if value.requires_grad:
                    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            expected = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
            assert found.reachable(names) == expected, names


def test_reachable_takes_all_a_block_or_a_name() -> None:
    p = _parameters()
    found = graph(lambda: (p["v"] * stop_gradient(p["s"], TARGET)).sum() + stop_gradient(p["w"], "other").sum(), p)
    assert found.blocks == ("test_graph.target", "other")
    assert found.reachable() == {"v"}
    assert found.reachable(TARGET) == found.reachable("test_graph.target") == {"v", "s"}
    assert found.reachable("all") == {"v", "s", "w"}
    with pytest.raises(ValueError, match=r"`without_blocks` .* \['other', 'test_graph.target'\]. Found 'othr'."):
        found.reachable(["other", "othr"])


def test_the_verdict_of_a_comparison_agrees() -> None:
    parameters = _parameters()
    found = graph(lambda: nested(parameters), parameters)
    effect = compare(lambda: nested(parameters), parameters).effect(found.blocks)
    cut = sorted(found.reachable("all") - found.reachable())
    assert str(effect.verdict) == f"cuts all paths to [{', '.join(cut)}]"


def test_a_gate_in_a_region_is_behind_both() -> None:
    p, board = _parameters(), GateBoard(records=True)
    with board.forward():
        value = block_in_a_region(p)
    board.close_regions([value.grad_fn])
    for open, expected in [((), False), (["around.block"], False), (["around.block", "around.region"], True)]:
        nodes = reachable_nodes(value.grad_fn, open)
        assert any(getattr(node, "variable", None) is p["v"] for node in nodes) == expected


def test_without_params_every_leaf_has_the_name_of_the_program() -> None:
    net, weight = nn.Linear(3, 1), torch.ones(3, requires_grad=True)
    found = graph(lambda: net(weight * torch.ones(1, requires_grad=True)))
    assert set(found.parameters) == {"net.weight", "net.bias", "weight", "leaf (1,) #2"}


def test_params_choose_what_is_told_and_may_be_no_leaves() -> None:
    p = _parameters()
    halves = p["v"].exp().unbind()
    scaled = p["w"] * 2
    found = graph(lambda: stop_gradient(halves[0], "halves") * scaled.sum(), {"first": halves[0], "scaled": scaled})
    assert found.reachable() == {"scaled"}
    assert found.reachable("all") == {"first", "scaled"}


def test_a_tensor_has_a_graph_without_cuts() -> None:
    parameters = _parameters()
    found = graph(nested(parameters), parameters)
    assert found.blocks == ()
    assert found.reachable("all") == {"w"}
    assert "stroke-dasharray" not in found.svg()
    assert graph(parameters["s"], {"s": parameters["s"]}).reachable() == {"s"}


def test_a_tensor_of_a_comparison_has_its_gates() -> None:
    parameters, kept = _parameters(), queue.SimpleQueue[Tensor]()

    def loss() -> Tensor:
        value = nested(parameters)
        kept.put(value)
        return value

    comparison = compare(loss, parameters)
    found = graph(kept.get(), parameters)
    assert found.blocks == ("nested.inner", "nested.outer")
    assert found.reachable("all") == {"v", "s", "w"}
    assert found.reachable() == {"w"}
    assert comparison.gradient(["nested.outer"])["w"].count_nonzero() == 9


def test_blocks_on_no_path_are_known_and_not_drawn() -> None:
    x = torch.ones(2, requires_grad=True)
    found = graph(lambda: (x * stop_gradient(torch.ones(2), "no-op")).sum())
    assert found.blocks == ("no-op",)
    assert found.reachable("no-op") == {"x"}
    assert _boxes(found)["module"] == _boxes(found)["block"] == []


# --- folding -----------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """The basic block of He et al., "Deep residual learning", 2016, figure 2; its shortcut may be stopped."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.stop: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        if self.stop:
            shortcut = stop_gradient(shortcut, self.stop)
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + shortcut).relu()


class ResNet18(nn.Module):
    """Eighteen layers, 62 parameters, narrow: the graph is that of the real one."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        for i in range(4):
            outputs, stride = width * 2**i, 1 if i == 0 else 2
            layer = nn.Sequential(_Residual(outputs // stride, outputs, stride), _Residual(outputs, outputs, 1))
            setattr(self, f"layer{i + 1}", layer)
        self.fc = nn.Linear(width * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _resnet(*stops: str) -> tuple[ResNet18, Callable[[], Tensor]]:
    net = ResNet18()
    for stop in stops:
        net.get_submodule(stop).stop = f"{stop}.shortcut"
    inputs, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    return net, lambda: F.cross_entropy(net(inputs), labels)


SVG = "{http://www.w3.org/2000/svg}"


def _drawn(svg: str) -> list[tuple[str, str, bool, ET.Element]]:
    """Return kind, label, whether it is grey, and element of every box."""
    kinds = {"#fdf3d7": "loss", "#ffffff": "operation", "#e7effa": "module", "#e6f4e9": "parameter", "#fdeaea": "block"}
    boxes = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        rectangle, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        if rectangle is not None:
            fill = rectangle.get("fill")
            boxes.append((kinds.get(fill, "grey"), text.text, fill == "#f4f5f6", group))
    return boxes


def _boxes(found: Graph, **options: object) -> dict[str, list[str]]:
    boxes: dict[str, list[str]] = {key: [] for key in ("loss", "operation", "module", "parameter", "block", "grey")}
    for kind, label, _, _ in _drawn(found.svg(**options)):
        boxes[kind].append(label)
    return boxes


def test_a_resnet_is_folded_to_its_residual_blocks() -> None:
    _, loss = _resnet()
    boxes = _boxes(graph(loss))
    assert boxes["module"] == [
        "net.fc",
        *(f"net.layer{i}.{j}" for i in (4, 3, 2, 1) for j in (1, 0)),
        *("net.pool", "net.bn1", "net.conv1"),
    ]
    assert boxes["operation"] == ["nll_loss", "log_softmax", "mean", "relu"]
    assert boxes["parameter"] == boxes["grey"] == []


def test_a_module_with_a_block_is_looked_into() -> None:
    _, loss = _resnet("layer3.0", "layer2.1")
    found = graph(loss)
    boxes = _boxes(found)
    assert sum(map(len, boxes.values())) <= 60
    assert sorted(boxes["block"]) == ["layer2.1.shortcut", "layer3.0.shortcut"]
    assert "net.layer3.1" in boxes["module"]
    assert {"net.layer3.0", "net.layer2.1"}.isdisjoint(boxes["module"])
    assert {"net.layer3.0.conv1", "net.layer3.0.bn2", "net.layer2.1.conv1"} <= set(boxes["module"])
    assert boxes["grey"] == ["net.layer3.0.downsample"]
    assert found.reachable("all") - found.reachable() == {
        f"net.layer3.0.downsample.{name}" for name in ("0.weight", "1.weight", "1.bias")
    }


# Stem, layers and head; blocks; their parts, of which a downsample is one.
@pytest.mark.parametrize(("fold", "modules"), [(1, 1), (2, 3 + 4 + 1), (3, 3 + 8 + 1), (4, 3 + 8 * 4 + 3 + 1), (5, 42)])
def test_fold_says_how_deep_a_picture_looks(fold: int, modules: int) -> None:
    _, loss = _resnet()
    assert len(_boxes(graph(loss), fold=fold)["module"]) == modules


def test_without_a_fold_every_node_is_drawn() -> None:
    _, loss = _resnet("layer3.0")
    boxes = _boxes(graph(loss), fold=None)
    assert boxes["module"] == []
    assert len([name for name in boxes["parameter"] if "layer" not in name]) == 3 + 2
    assert boxes["operation"].count("convolution") == 20 - 1
    assert boxes["grey"].count("convolution") == 1


def test_a_module_of_which_a_part_is_behind_a_cut_is_looked_into() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    net = Two()

    def loss() -> Tensor:
        first, second = net(torch.ones(2))
        return (first * stop_gradient(second, "two.second")).sum()

    boxes = _boxes(graph(loss), fold=1)
    assert boxes["module"] == ["net.first"]
    assert boxes["grey"] == ["net.second"]


def test_calls_of_one_module_are_boxes_that_share_parameters() -> None:
    net = nn.Linear(2, 2)
    found = graph(lambda: (net(torch.ones(2)) * stop_gradient(net(torch.zeros(2)), "shared")).sum())
    boxes = _boxes(found)
    assert boxes["module"] == boxes["grey"] == ["net"]
    assert boxes["parameter"] == ["net"]
    notes = [group.findall(f"{SVG}text")[1:] for _, label, _, group in _drawn(found.svg()) if label == "net"]
    assert [note.text for (note,) in notes] == ["Linear · call 1", "bias, weight", "Linear · call 2"]


def test_a_region_around_a_module_is_a_cut_before_its_box() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def loss() -> Tensor:
        with stop_recording("around.module"):
            target = net(torch.ones(2))
        return (net(torch.zeros(2)) * target).sum()

    boxes = _boxes(graph(loss), fold=1)
    assert boxes["module"] == boxes["grey"] == ["net"]
    assert boxes["block"] == ["around.module"]


def test_a_region_inside_of_a_module_is_looked_for() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with stop_recording("inside.module"):
                hidden = self.net(x)
            return hidden * self.net(x)

    inside = Inside()
    boxes = _boxes(graph(lambda: inside(torch.ones(2)).sum()), fold=1)
    assert boxes["module"] == boxes["grey"] == ["inside.net"]
    assert boxes["block"] == ["inside.module"]
    behind = graph(lambda: (stop_gradient(inside(torch.ones(2)), "behind") * torch.ones(2, requires_grad=True)).sum())
    assert "inside.module" in [label for _, label, _, _ in _drawn(behind.svg(fold=1))]


@pytest.mark.parametrize(("name", "expected"), [("log1p", "log1p"), ("log_softmax", "log_softmax"), ("sum", "sum")])
def test_operations_have_the_names_of_functions(name: str, expected: str) -> None:
    x = torch.ones(2, requires_grad=True)
    arguments = (-1,) if name == "log_softmax" else ()
    assert expected in _boxes(graph(getattr(torch, name)(x, *arguments)))["operation"]


def test_a_module_that_is_made_on_the_way_has_the_name_of_its_class() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert _boxes(graph(lambda: nn.Softmax(-1)(weight)[0]))["module"] == ["Softmax"]


def test_a_call_that_raises_is_left() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    fails, net = Fails(), nn.Linear(2, 1)

    def loss() -> Tensor:
        with pytest.raises(ZeroDivisionError):
            fails(torch.ones(2))
        return net(torch.ones(2)).exp()

    boxes = _boxes(graph(loss), fold=1)
    assert (boxes["module"], boxes["operation"]) == (["net"], ["exp"])


def test_modules_that_other_threads_call_are_not_mixed_up() -> None:
    net, other, last = (nn.Linear(2, 1) for _ in range(3))

    def loss() -> Tensor:
        values = [net(torch.ones(2))]
        thread = threading.Thread(target=lambda: values.append(other(torch.ones(2))))
        thread.start()
        thread.join()
        return values[0] * values[1].exp() * last(torch.ones(2))

    found = graph(loss)
    assert sorted(_boxes(found)["module"]) == ["last", "net"]
    assert {"other.weight", "other.bias"} <= found.reachable()


def test_a_fold_that_would_make_a_circle_is_not_made() -> None:
    nodes = [
        Node("loss", "loss", ""),
        *(Node("operation", *entry) for entry in [("a", "", 0), ("b", ""), ("c", "", 0)]),
    ]
    edges = [(0, 1), (1, 2), (2, 3)]
    boxes, arrows = folded(nodes, edges, [Call("m", "M", None, 1, True)], {0, 1, 2, 3}, 1)
    assert [box.label for box in boxes] == ["loss", "a", "b", "c"]
    assert [(arrow.start, arrow.end) for arrow in arrows] == edges


def test_a_big_flat_program_has_all_its_nodes() -> None:
    x = torch.ones((), requires_grad=True)

    def loss() -> Tensor:
        y = x
        for _ in range(100):
            y = y * 2
        return y

    assert len(_boxes(graph(loss))["operation"]) == 100


# --- pictures ----------------------------------------------------------------------------------------------------


def _stopped() -> Graph:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    return graph(lambda: (x * stop_gradient(y.exp(), TARGET)).sum(), {"x": x, "y": y})


def test_cuts_are_dashed_and_what_is_behind_is_grey() -> None:
    svg = _stopped().svg()
    grey = {label: is_grey for _, label, is_grey, _ in _drawn(svg)}
    assert grey == {
        "loss": False,
        "sum": False,
        "mul": False,
        "x": False,
        "test_graph.target": False,
        "exp": True,
        "y": True,
    }
    strokes = {path.get("stroke"): path for path in ET.fromstring(svg).iter(f"{SVG}path") if path.get("stroke")}
    assert {colour: path.get("stroke-dasharray") for colour, path in strokes.items()} == {
        "#bcc2c9": None,  # exp to y
        "#5f6b7a": None,  # loss to sum, sum to mul, mul to x
        "#c62828": "5 4",  # mul to the block, the block to exp
    }
    assert [path.get("d").count("M") for _, path in sorted(strokes.items())] == [3, 1, 2]


def test_every_box_tells_more_when_a_pointer_rests_on_it() -> None:
    tips = {label: group.find(f"{SVG}title").text for _, label, _, group in _drawn(_stopped().svg())}
    where = r"test_graph\.py:\d+:\d+"
    assert re.fullmatch(rf"test_graph\.target: The target is a label\.\n\S*{where}", tips["test_graph.target"])
    assert tips["exp"] == "ExpBackward0 (2,)\nreached only through a cut"
    assert tips["sum"] == "SumBackward0 (scalar)"
    assert tips["x"] == "x (2,)"
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    found = graph(lambda: net(torch.ones(2)).sum())
    (tip,) = (group.find(f"{SVG}title").text for kind, _, _, group in _drawn(found.svg(fold=1)) if kind == "module")
    # Which view it is depends on the release of torch.
    assert tip.replace("unsafe_view", "view") == (
        "net: Sequential\n4 operations: t, addmm, view, tanh\nparameters: 0.bias, 0.weight"
    )


def test_ids_of_two_pictures_differ() -> None:
    ids = []
    for found in (_stopped(), graph(_resnet()[1])):
        root = ET.fromstring(found.svg())
        own = [element.get("id") for element in root.iter() if element.get("id")]
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") in own
        assert all(name.startswith(root.get("id")) for name in own)
        ids += own
    assert len(ids) == len(set(ids))


def test_names_are_escaped() -> None:
    x = torch.ones(2, requires_grad=True)
    name = '<script>alert("1")</script>&\\'
    found = graph(lambda: (x * stop_gradient(x, name)).sum(), {"<b>": x})
    assert "<script" not in found.svg()
    assert {"<b>", name} <= {label for _, label, _, _ in _drawn(found.svg())}
    assert name in {label for label, _ in _parsed(found.to_dot())[0].values()}


def test_long_names_keep_their_ends() -> None:
    x = torch.ones(2, requires_grad=True)
    name = f"beginning.{'x' * 100}.end"
    found = graph(lambda: (x * stop_gradient(x, name)).sum())
    (label,) = _boxes(found)["block"]
    assert len(label) < 50
    assert re.fullmatch(r"beginning\.x+…x+\.end", label)
    assert name in found.svg()


def test_a_wrong_fold_is_refused() -> None:
    for wrong in (0, -1, True, "none", 1.5):
        with pytest.raises(ValueError, match=f"`fold` should be 'auto', None or a positive integer. Found {wrong!r}."):
            _stopped().svg(fold=wrong)
        with pytest.raises(ValueError, match="`fold` should be"):
            _stopped().to_dot(fold=wrong)


def test_blocks_that_a_picture_cannot_show_are_told_about() -> None:
    parameters = _parameters()
    svg = graph(lambda: inner_gradient(parameters)).svg()
    assert "inner.&lt;block&gt;: met by a derivative inside of the program" in svg
    svg = graph(lambda: decides_for_itself(parameters)).svg()
    assert "pierced.region: in part recorded also while it is in place" in svg


def test_a_notebook_shows_the_picture() -> None:
    found = _stopped()
    assert found._repr_svg_() == found.svg()
    assert found.svg() in found._repr_html_()
    assert repr(found) == "Graph(7 nodes, 2 parameters, blocks: ['test_graph.target'])"


def _parsed(dot: str) -> tuple[dict[str, tuple[str, str]], list[tuple[str, str, bool]]]:
    """Return name -> (label, style) of nodes, and edges with whether they are dashed, from the text of a digraph."""
    string = r'"((?:[^"\\]|\\.)*)"'
    nodes, edges = {}, []
    head, *lines, end = dot.strip().splitlines()
    assert (head, end) == ("digraph {", "}")
    for line in lines[3:]:
        if edge := re.fullmatch(rf"  (n\d+) -> (n\d+)(?: \[(style=dashed, )?color={string}\])?", line):
            edges.append((edge[1], edge[2], edge[3] is not None))
        else:
            node = re.fullmatch(
                rf"  (n\d+) \[label={string}, tooltip={string}, style={string}, (?:\w+={string}(?:, )?)*\]", line
            )
            assert node, line
            nodes[node[1]] = (re.sub(r"\\(.)", r"\1", node[2]), node[4])
    return nodes, edges


def test_graphviz_gets_the_same_picture() -> None:
    nodes, edges = _parsed(_stopped().to_dot())
    names = {name: label for name, (label, _) in nodes.items()}
    assert {(names[a], names[b], dashed) for a, b, dashed in edges} == {
        ("loss", "sum", False),
        ("sum", "mul", False),
        ("mul", "x", False),
        ("mul", "test_graph.target", True),
        ("test_graph.target", "exp", True),
        ("exp", "y", False),
    }
    assert [label for label, style in nodes.values() if "dashed" in style] == ["test_graph.target"]


@pytest.mark.slow
def test_pictures_are_the_same_in_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where strings have other hashes."""
    script = (
        "import torch; from toolkit import stop_gradient, stop_recording; from toolkit.gradients.graph import graph\n"
        "p = {n: torch.ones(2, requires_grad=True) for n in 'abc'}\n"
        "def loss():\n"
        "    with stop_recording('r'):\n"
        "        with stop_recording('q'):\n"
        "            z = p['a'] * p['b']\n"
        "    return (z * stop_gradient(p['c'], 's') * p['a']).sum()\n"
        "found = graph(loss, p); shown = [found.svg(), found.to_dot(), found.blocks, found.parameters]; print(shown)"
    )
    root = ROOT
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    there = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True)
    exec(compile(script, "<string>", "exec"), here := {"__name__": "__main__"})
    assert there.stdout.strip() == str(here["shown"]) == capsys.readouterr().out.strip()


# --- layout ------------------------------------------------------------------------------------------------------


def _random_graph(seed: int) -> tuple[list[tuple[float, float]], list[tuple[int, int, tuple[str]]]]:
    rng = random.Random(seed)
    n = rng.randrange(1, 40)
    pairs = [(rng.randrange(b), b) for b in range(1, n) for _ in range(rng.randrange(1, 4))]
    names = rng.sample(range(n), n)
    sizes = [(rng.uniform(20, 150), rng.uniform(20, 50)) for _ in range(n)]
    return sizes, [(names[a], names[b], (rng.choice("xy"),)) for a, b in pairs]


@pytest.mark.parametrize("seed", range(20))
def test_boxes_are_apart_and_edges_go_down_from_box_to_box(seed: int) -> None:
    sizes, edges = _random_graph(seed)
    layout = layered(sizes, edges)
    frames = [
        (x - w / 2, y - h / 2, x + w / 2, y + h / 2) for (x, y), (w, h) in zip(layout.centres, sizes, strict=True)
    ]
    for (left, top, right, bottom), (left2, top2, right2, bottom2) in itertools.combinations(frames, 2):
        assert right < left2 or right2 < left or bottom < top2 or bottom2 < top
    for left, top, right, bottom in frames:
        assert -1e-9 <= left < right <= layout.width + 1e-9
        assert -1e-9 <= top < bottom <= layout.height + 1e-9
    # Following the stretches from box to box gives the edges back.
    beginnings = {
        _rounded(x, top + h): i
        for i, ((x, _), (_, top, _, _), (_, h)) in enumerate(zip(layout.centres, frames, sizes, strict=True))
    }
    ends = {_rounded(x, top): i for i, ((x, _), (_, top, _, _)) in enumerate(zip(layout.centres, frames, strict=True))}
    stretches = defaultdict(list)
    for kind, ends_at_box, points in layout.routes:
        assert all(upper[1] < lower[1] for upper, lower in itertools.pairwise(points))
        stretches[kind, _rounded(*points[0])].append((ends_at_box, _rounded(*points[-1])))
    found = set()
    for (start, box), kind in itertools.product(beginnings.items(), [("x",), ("y",)]):
        pending = [*stretches[kind, start]]
        while pending:
            ends_at_box, point = pending.pop()
            if ends_at_box:
                found.add((box, ends[point], kind))
            else:
                pending += stretches[kind, point]
    assert found == set(edges)


def _rounded(*point: float) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in point)


def test_crossings_are_counted() -> None:
    rng = random.Random(0)
    upper, lower = list(range(8)), list(range(8, 18))
    pairs = {(rng.choice(upper), rng.choice(lower)) for _ in range(30)}
    below = {a: [b for first, b in pairs if first == a] for a in upper}
    expected = sum((a - c) * (b - d) < 0 for (a, b), (c, d) in itertools.combinations(pairs, 2))
    assert _crossings([upper, lower], below) == expected > 0


def test_a_tangle_that_can_be_undone_is() -> None:
    """Two chains whose boxes are named crosswise."""
    edges = [(0, 1, ("",)), (0, 2, ("",)), (1, 4, ("",)), (2, 3, ("",)), (3, 6, ("",)), (4, 5, ("",))]
    layout = layered([(30, 20)] * 7, edges)
    x = [x for x, _ in layout.centres]
    assert (x[1] < x[2]) == (x[4] < x[3]) == (x[5] < x[6])
    assert x[4:6] == pytest.approx([x[1]] * 2)
    assert [x[3], x[6]] == pytest.approx([x[2]] * 2)


@pytest.mark.parametrize("seed", range(20))
def test_sweeps_leave_no_more_crossings_than_they_found(seed: int) -> None:
    rng = random.Random(seed)
    layers = [list(range(i, i + 7)) for i in (0, 7, 14)]
    pairs = {(rng.choice(layers[i]), rng.choice(layers[i + 1])) for i in (0, 1) for _ in range(12)}
    below = {a: [b for first, b in pairs if first == a] for a, _ in pairs}
    above = {b: [a for a, second in pairs if second == b] for _, b in pairs}
    ordered = _ordered(layers, above, below)
    assert [sorted(layer) for layer in ordered] == layers
    assert _crossings(ordered, below) <= _crossings(layers, below)


def test_a_long_edge_goes_around_the_boxes_that_it_passes() -> None:
    layout = layered([(40, 20)] * 4, [(0, 1, ("",)), (1, 2, ("",)), (2, 3, ("",)), (0, 3, ("",))])
    passing = [points for _, ends_at_box, points in layout.routes if not ends_at_box]
    assert len(passing) == 2
    for points, box in zip(sorted(passing, key=lambda points: points[-1][1]), (1, 2), strict=True):
        (x, top), (_, bottom) = points[-2:]
        assert top < layout.centres[box][1] < bottom
        assert abs(x - layout.centres[box][0]) > 20


def test_a_chain_hangs_straight_beside_a_crowd() -> None:
    edges = [
        (0, 1),
        (0, 2),
        (1, 3),
        (3, 4),
        (4, 5),
        *((2, box) for box in range(6, 10)),
        *((6, box) for box in range(10, 14)),
    ]
    layout = layered([(60, 20)] * 14, [(*edge, ("",)) for edge in edges])
    x = [x for x, _ in layout.centres]
    assert x[3:6] == pytest.approx([x[1]] * 3, abs=0.5)


def test_places_are_the_least_squares_answer() -> None:
    rng = random.Random(1)
    wanted = [rng.uniform(0, 100) for _ in range(30)]
    weights = [rng.uniform(0.1, 9) for _ in range(30)]
    distances = [rng.uniform(1, 9) for _ in range(29)]
    offsets = list(itertools.accumulate(distances, initial=0.0))
    flat = isotonic_regression(np.subtract(wanted, offsets), sample_weight=weights)
    assert _apart(wanted, weights, distances) == pytest.approx(np.add(flat, offsets))


# --- the program is left as it was found -------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [False, True], ids=["returns", "raises"])
def test_the_program_is_left_as_it_was_found(fail: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    inputs = torch.randn(4, 3)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)

    def loss() -> Tensor:
        net.train()
        value = stop_gradient(net(inputs), "left").sum() + net(inputs).sum()
        value.backward(retain_graph=True)
        if fail:
            raise ZeroDivisionError
        return value

    def state() -> list:
        hooks = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
        return [
            [(id(buffer), buffer.tolist()) for buffer in net.buffers()],
            [(id(p.grad), p.grad.tolist(), p._version) for p in net.parameters()],
            [module.training for module in net.modules()],
            torch.get_rng_state().tolist(),
            [len(hook) for hook in hooks],
            is_blocked(TARGET),
        ]

    net.eval()
    before = state()
    if fail:
        with pytest.raises(ZeroDivisionError):
            graph(loss)
    else:
        graph(loss).svg()
    assert state() == before


@pytest.mark.slow
def test_a_graph_keeps_nothing_of_the_program_alive() -> None:
    kept = queue.SimpleQueue[weakref.ref[Tensor]]()

    def found() -> Graph:
        net = nn.Linear(2, 1)

        def loss() -> Tensor:
            hidden = net(torch.ones(2))
            kept.put(weakref.ref(hidden))
            kept.put(weakref.ref(net.weight))
            return stop_gradient(hidden, "kept").exp() * hidden

        return graph(loss)

    names = found().reachable("all")
    shown = found()
    gc.collect()
    assert kept.qsize() >= 4
    assert all(kept.get()() is None for _ in range(kept.qsize()))
    assert shown.reachable("all") == names == {"net.weight", "net.bias"}


X = torch.tensor([1.0, 2.0], requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "params", "error", "message"),
    [
        (3.0, None, TypeError, "`loss` should be a function or a tensor. Found float."),
        (lambda: 3.0, None, TypeError, "`loss` should return a tensor. Found float."),
        (lambda: X.detach(), None, ValueError, "`loss` should depend on a tensor that requires a gradient."),
        (torch.ones(2), None, ValueError, "`loss` should depend on a tensor that requires a gradient."),
        (lambda: X, torch.ones(2), ValueError, "`params` should hold at least one tensor that requires a gradient."),
        (lambda: X, [3.0], TypeError, "`params` should hold tensors and modules. Found float at 'params[0]'."),
    ],
    ids=["number", "returns a number", "detached", "constant", "frozen", "number among params"],
)
def test_wrong_input_gives_one_clear_error(loss: object, params: object, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        graph(loss, params)
