"""Teachers, queues and centres: state that follows training, keeps no graph, and stays in evaluation mode."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from toolkit import unblock
from toolkit.gradients import compare
from toolkit.self_supervised import (
    DINO_CENTER,
    EMA_STUDENT,
    DINOLoss,
    EMATeacher,
    KeyQueue,
    dino_center,
    dino_loss,
    ema,
    enqueue,
    moco_loss,
)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def move(student, x):
    """Take a step of training: parameters and running statistics change."""
    student(x)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += torch.randn_like(parameter)


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


# --- teachers -----------------------------------------------------------------------------------------------------


def test_a_teacher_averages_parameters_and_buffers_as_the_formula_does():
    student = network()
    teacher = EMATeacher(student, momentum=0.8)
    expected = state(student)
    for _ in range(3):
        move(student, 5 + torch.randn(6, 3))
        teacher.update(student)
        for name, value in student.state_dict().items():
            averaged = 0.8 * expected[name] + 0.2 * value if value.is_floating_point() else value.clone()
            expected[name] = averaged
    torch.testing.assert_close(state(teacher.module), expected)
    assert teacher.module[1].running_mean.abs().min() > 0
    assert teacher.module[1].num_batches_tracked == 3


def test_a_teacher_is_the_averaged_model_of_torch():
    """Torch's copies the first update, so it starts one update later."""
    student = network()
    theirs = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    theirs.update_parameters(student)
    ours = EMATeacher(student, momentum=0.9)
    for _ in range(2):
        move(student, torch.randn(6, 3))
        theirs.update_parameters(student)
        ours.update(student)
    for name, value in theirs.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(ours.module.state_dict()[name], value)


@pytest.mark.parametrize("momentum", [0.0, 0.7, 1.0])
def test_a_mask_of_infinite_numbers_stays(momentum):
    student = nn.Linear(2, 2)
    student.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))
    teacher = EMATeacher(student, momentum=momentum)
    teacher.update(student)
    assert torch.equal(teacher.module.mask, student.mask)
    assert torch.equal(ema({"m": student.mask}, {"m": student.mask}, momentum=momentum)["m"], student.mask)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_ends_of_the_momentum_are_exact(momentum):
    student = network()
    first = state(student)
    teacher = EMATeacher(student, momentum=momentum)
    move(student, torch.randn(6, 3))
    teacher.update(student)
    expected = first if momentum else state(student)
    found = state(teacher.module)
    assert all(torch.equal(found[name], expected[name]) for name in found if found[name].is_floating_point())


def test_a_teacher_is_a_copy_that_builds_no_graph():
    student = network()
    teacher = EMATeacher(student, momentum=0.9)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in student.parameters())
    x = torch.randn(5, 3)
    torch.testing.assert_close(teacher(x), student(x).detach())
    assert not teacher(x).requires_grad
    move(student, x)
    teacher.update(student)
    assert not teacher(x).requires_grad
    assert teacher.state_dict().keys() == {f"module.{name}" for name in student.state_dict()}


def test_a_teacher_is_saved_loaded_and_copied():
    student = network()
    teacher = EMATeacher(student, momentum=0.5)
    move(student, torch.randn(6, 3))
    teacher.update(student)
    other = EMATeacher(network(), momentum=0.5)
    other.load_state_dict(teacher.state_dict())
    x = torch.randn(4, 3)
    torch.testing.assert_close(other.eval()(x), copy.deepcopy(teacher).eval()(x))


def test_a_teacher_in_evaluation_mode_does_not_move():
    student = network()
    teacher = EMATeacher(student, momentum=0.5).eval()
    before = state(teacher)
    teacher(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="`update` should be called in training mode"):
        teacher.update(student)
    assert all(torch.equal(before[name], value) for name, value in state(teacher).items())
    teacher.train()
    teacher.module.eval()
    teacher.update(student)
    assert not teacher.module.training


def test_tied_parameters_stay_tied():
    student = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    student[1].weight = student[0].weight
    teacher = EMATeacher(student, momentum=0.5)
    assert teacher.module[0].weight is teacher.module[1].weight
    move(student, torch.randn(2, 3))
    expected = 0.5 * teacher.module[0].weight + 0.5 * student[0].weight.detach()
    teacher.update(student)
    torch.testing.assert_close(teacher.module[1].weight.data, expected)


def test_a_recurrent_teacher_answers_by_its_averages():
    student = nn.GRU(2, 3)
    teacher = EMATeacher(student, momentum=0.0)
    move_with = torch.randn(4, 1, 2)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(0.5)
    teacher.update(student)
    torch.testing.assert_close(teacher(move_with)[0], student(move_with)[0].detach())


def test_half_precision_would_stand_still_and_is_refused():
    with pytest.raises(ValueError, match="`teacher` should be float32 or float64"):
        EMATeacher(nn.Linear(2, 2).bfloat16(), momentum=0.99)
    student = nn.Linear(2, 2).bfloat16()
    teacher = EMATeacher(copy.deepcopy(student).float(), momentum=0.99)
    before = teacher.module.weight.clone()
    with torch.no_grad():
        student.weight += 1
    teacher.update(student)
    torch.testing.assert_close(teacher.module.weight.data, before.lerp(student.weight.detach().float(), 0.01))


def test_a_student_of_another_structure_is_refused():
    teacher = EMATeacher(nn.Linear(2, 2), momentum=0.9)
    with pytest.raises(ValueError, match="Found a difference in bias"):
        teacher.update(nn.Linear(2, 2, bias=False))
    with pytest.raises(ValueError, match=r"Found \(3, 2\) and \(2, 2\) at 'weight'"):
        teacher.update(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="`momentum` should be from 0 to 1"):
        EMATeacher(nn.Linear(2, 2), momentum=2)


def test_counts_and_complex_values():
    found = ema(
        {"n": torch.tensor(3), "z": torch.tensor(1j)}, {"n": torch.tensor(7), "z": torch.tensor(1 + 0j)}, momentum=0.75
    )
    assert found["n"] == 7
    torch.testing.assert_close(found["z"], torch.tensor(0.25 + 0.75j))


def test_opened_the_student_learns_through_its_teacher():
    """By the factor 1 - momentum, and only until the next update of the plain run."""
    student = nn.Linear(2, 1, bias=False)
    x = torch.randn(3, 2)
    with unblock(EMA_STUDENT):
        teacher = EMATeacher(student, momentum=0.9)
        teacher.update(student)
        (found,) = torch.autograd.grad(teacher(x).sum(), student.weight)
    torch.testing.assert_close(found, 0.1 * x.sum(0, keepdim=True))


# --- queues -------------------------------------------------------------------------------------------------------


def test_a_queue_gives_the_keys_from_before_and_keeps_the_last_ones():
    queue = KeyQueue(3, 2, generator=torch.Generator().manual_seed(1))
    first = queue.keys.clone()
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(3))
    one, two = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    assert torch.equal(queue(one), first)
    assert torch.equal(queue(two), torch.cat([first[2:], one.detach()]))
    assert torch.equal(queue.keys, torch.cat([one[1:].detach(), two]))
    assert not queue.keys.requires_grad
    assert queue.state_dict()["keys"] is not first


def test_more_keys_than_the_queue_holds():
    keys = torch.arange(8.0).reshape(4, 2)
    assert torch.equal(enqueue(torch.zeros(3, 2), keys), keys[1:])


def test_a_queue_in_evaluation_mode_stays():
    queue = KeyQueue(3, 2).eval()
    before = queue.keys.clone()
    assert torch.equal(queue(torch.ones(1, 2)), before)
    assert torch.equal(queue.keys, before)


def test_a_loss_is_differentiated_after_its_keys_were_added():
    queue, q = KeyQueue(4, 2), torch.randn(2, 2, requires_grad=True)
    negatives = queue(q)
    kept = negatives.clone()
    loss = moco_loss(q, q, negatives)
    queue(torch.randn(4, 2))
    loss.backward()
    assert torch.equal(negatives, kept)
    assert q.grad.isfinite().all()


# --- centres ------------------------------------------------------------------------------------------------------


def test_the_centre_is_that_of_earlier_batches_and_moves_in_training_only():
    student, teacher = torch.randn(3, 4, 5), torch.randn(2, 4, 5, requires_grad=True)
    loss = DINOLoss(5, center_momentum=0.8)
    expected = dino_loss(student, teacher, torch.zeros(5))
    assert loss(student, teacher) == expected
    center = 0.2 * teacher.detach().mean((0, 1))
    torch.testing.assert_close(loss.center, center)
    assert not loss.center.requires_grad
    loss.eval()
    torch.testing.assert_close(loss(student, teacher), dino_loss(student, teacher, center))
    torch.testing.assert_close(loss.center, center)
    assert loss.state_dict().keys() == {"center"}


def test_temperatures_are_attributes_for_schedules():
    x = torch.randn(2, 4, 5)
    loss = DINOLoss(5)
    loss.teacher_temperature = 0.07
    assert loss(x, x) == dino_loss(x, x, torch.zeros(5), teacher_temperature=0.07)


def test_a_centre_in_the_precision_of_the_module():
    loss = DINOLoss(5).double()
    x = torch.randn(2, 4, 5)
    loss(x, x)
    assert loss.center.dtype == torch.float64
    torch.testing.assert_close(loss.center, dino_center(torch.zeros(5), x).double())


def test_a_comparison_leaves_the_centre_where_it_was():
    weight = torch.randn(5, 5, requires_grad=True)
    x, loss = torch.randn(2, 4, 5), DINOLoss(5)
    loss.center += 0.3
    before = loss.center.clone()
    comparison = compare(lambda: loss(x @ weight, x @ weight), {"weight": weight})
    assert {effect.name for effect in comparison.effects} == {
        "self_supervised.dino_center",
        "self_supervised.dino_target",
    }
    assert torch.equal(loss.center, before)
    assert comparison[DINO_CENTER].leak == 0


# --- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.keeps_its_sums
def test_compiled_modules_keep_their_state():
    torch._dynamo.reset()
    student, teacher = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    plain, compiled = DINOLoss(5), DINOLoss(5)
    run = torch.compile(compiled, backend="eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(run(student, teacher), plain(student, teacher))
    torch.testing.assert_close(compiled.center, plain.center)
    queue = KeyQueue(6, 5)
    expected = enqueue(enqueue(queue.keys, student[0]), student[1])
    run = torch.compile(queue, backend="eager", fullgraph=True)
    for keys in student:
        run(keys)
    assert torch.equal(queue.keys, expected)
