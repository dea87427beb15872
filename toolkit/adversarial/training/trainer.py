r"""One trainer for all methods of adversarial training: epochs, schedules, averaging, checkpoints and ranks.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from toolkit._checks import level
from toolkit._distributed import rank_of, together
from toolkit._divergence import DivergenceError
from toolkit._progress import Progress
from toolkit._run import Course
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.balls.box import width_remarked_on
from toolkit.adversarial.training._arguments import (
    Plan,
    Settings,
    check_group,
    check_model,
    descent_of,
    method_of,
    score_of,
)
from toolkit.adversarial.training._batches import batches_of
from toolkit.adversarial.training._evaluation import CatastrophicOverfittingWarning
from toolkit.adversarial.training._model import undisturbed, warn_of_local_statistics, without_gradients
from toolkit.adversarial.training._optimizers import MakeOptimizer
from toolkit.adversarial.training._training import History, Training
from toolkit.adversarial.training.methods import Method
from toolkit.adversarial.training.schedules import Schedule
from toolkit.blocks import ordinary_tensors

__all__ = ["CatastrophicOverfittingWarning", "DivergenceError", "History", "TrainingOptions", "train"]


class TrainingOptions(TypedDict, total=False):
    """The keywords of `train` that have a default, and `epsilon`.

    Attributes:
        epsilon: Radius of the ball.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``. Default: ``"linf"``.
        bounds: Least and greatest value of an input; None for no box. Default: ``(0, 1)``.
        batch_size: The largest number of rows in a batch, over all ranks together. Not used if `data` gives batches.
            Default: ``128``.
        optimizer: ``"adam"``; ``"sgd"``, with Nesterov momentum 0.9 and weight decay 5e-4; or a function of parameters
            that returns a `torch.optim.Optimizer`. Default: ``"adam"``.
        learning_rate: The rate where `schedule` is 1. None: 0.002 for Adam, 0.1 for SGD, or the given optimiser's rate.
        schedule: The factor of the rate: ``"one_cycle"``, ``"cosine"``, ``"piecewise"``, ``"constant"``, or a function
            of training progress, from 0 to 1. Default: ``"one_cycle"``.
        epsilon_warmup: The part of training, from 0 to 1, in which the radius rises linearly from 0 to `epsilon`.
            Default: ``0``.
        average: The decay of an exponential moving average of parameters and statistics, for example 0.995: values of k
            updates ago weigh ``average**k`` as much as the last ones. If given, the model is evaluated with this
            average, and ends with it.
        augment: Called with inputs (N, ...), scaled, and ``generator=``; returns inputs. `random_crop_flip` is one.
        evaluate_every: Epochs from one evaluation to the next; the last epoch is evaluated as well. Default: ``1``.
        keep: ``"last"`` to end with the parameters of the last epoch, ``"best"`` with those of the best robust score:
            robust accuracy on held-out data often falls late in training (Rice et al. 2020). Default: ``"last"``.
        patience: If given, training stops after this number of evaluations without a better robust score.
        checkpoint_every: Updates from one checkpoint to the next; another one is written at the end. Default: ``1000``.
        group: The ranks. None: this process alone.
        callback: Called after each update with the number of updates and the number of the epoch, from 1.
        verbose: 1 prints a line after each epoch, on the first rank; 2 also the time. Default: 0.
    """

    epsilon: float
    norm: Norm
    bounds: Bounds
    batch_size: int
    optimizer: str | MakeOptimizer
    learning_rate: float | None
    schedule: str | Schedule
    epsilon_warmup: float
    average: float | None
    augment: Callable[..., Tensor] | None
    evaluate_every: int
    keep: Literal["last", "best"]
    patience: int | None
    checkpoint_every: int
    group: ProcessGroup | None
    callback: Callable[[int, int], None] | None
    verbose: int


def train(
    model: nn.Module,
    data: object,
    labels: Tensor | None = None,
    *,
    method: str | Method,
    epochs: int,
    generator: torch.Generator,
    evaluate: object = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Unpack[TrainingOptions],
) -> History:
    r"""Train a model to be right in a ball around every input, by `Method.step` on every batch of every epoch.

    In every epoch each sample is in one batch, in a new random order. Batches have nearly the same size, `batch_size`
    rows at most. All random numbers, the model's own dropout included, are drawn from `generator`. Torch's global
    generators and the modes of the modules are restored at the end. Gradients are cleared, also after an error.

    With a `checkpoint`, a call that finds the file resumes from it and ends with the same bits as an uninterrupted run;
    a call that finds a finished run returns at once. The data, the seed, the settings and the shapes of the model have
    to be those of the checkpoint. Functions are compared by their names, data in full up to 256 MiB, and larger data or
    given batches by some of their rows. The last digits of floating-point numbers may differ, as they do between
    processors.

    On several ranks each rank calls this function with the same arguments and its `group`. Data in memory are the same
    on all ranks, and every rank takes its part of each batch, with the random numbers that its rows would have had on
    one rank; a DataLoader gives each rank its own part. Gradients are added in one reduction for each update, so the
    model is the same as from a single process, up to rounding. Batch normalisation sees only the rows of its rank,
    unless it is a `torch.nn.SyncBatchNorm`, and running statistics are averaged over ranks after each epoch.

    Args:
        model: Inputs (N, ...) to logits (N, C). Trained in place. If it is in training mode, its modules in evaluation
            mode (frozen batch normalisation) stay so; otherwise all modules are trained in training mode. Parameters
            that do not require gradients are left alone.
        data: Inputs (N, ...) with `labels`; a data set with the attributes `inputs` and `labels`; a pair of inputs and
            labels; or an iterable with a length that gives batches (inputs, labels) anew for each epoch, such as a
            DataLoader. Inputs are floating point, or bytes from 0 to 255, which are stored as bytes and divided by 255
            batch by batch: radius and bounds are then in units of inputs from 0 to 1.
        labels: (N,), integers.
        method: The training method: a `Method`, or its name (``"standard"``, ``"fgsm"``, ``"rs_fgsm"``, ``"pgd"``,
            ``"trades"``, ...) for its default settings.
        epochs: Number of passes over the data.
        generator: Draws the order of samples and all seeds, on any device. Not torch's global generator.
        evaluate: Held-out data, as `data` in memory; or a function of the model that returns scores by name; the score
            ``"robust"`` decides which epoch is best. The function is called with the model in evaluation mode and
            without recording; modes, buffers and the global generators are restored afterwards. If it takes gradients,
            it should do so in ``torch.enable_grad()``. On several ranks it is called on each, and the scores of the
            first rank count.
        checkpoint: The file to write to, and to resume from.
        **options: `TrainingOptions`, with `epsilon` at least.

    Returns:
        Losses, times and scores, those before an interruption included.

    Raises:
        DivergenceError: If a parameter, a statistic or the loss is not finite, or the loss is above 1e8. The last good
            parameters and statistics are restored, and the last checkpoint stays. A buffer that has infinities from the
            start, such as a mask, may keep them.
        TypeError: If an argument has the wrong type, or `evaluate` returns no scores.
        ValueError: If an argument is out of its range, a label is not one of the classes, bytes come with a radius or
            bounds in units of 0 to 255, or the checkpoint belongs to another run.
        RuntimeError: If another rank has raised.

    Warns:
        CatastrophicOverfittingWarning: If held-out accuracy under PGD collapses while that under FGSM does not
            (Wong, Rice and Kolter, "Fast is better than free: revisiting adversarial training", 2020).

    References:
        Madry, Makelov, Schmidt, Tsipras and Vladu, "Towards deep learning models resistant to adversarial attacks",
        2018. Rice, Wong and Kolter, "Overfitting in adversarially robust deep learning", 2020, for `keep`.

    Example:
        >>> x, labels = torch.tensor([[0.2], [0.8]]).repeat(50, 1), torch.tensor([0, 1]).repeat(50)
        >>> model, generator = torch.nn.Linear(1, 2), torch.Generator().manual_seed(0)
        >>> settings = {"method": "pgd", "epsilon": 0.2, "epochs": 50, "learning_rate": 0.1}
        >>> history = train(model, x, labels, **settings, generator=generator, evaluate=(x, labels))
        >>> history.scores["robust"][-1]
        1.0
    """
    known = {field.name for field in fields(Settings)}
    if strange := sorted(options.keys() - known):
        raise TypeError(f"The options of `train` should be among {', '.join(sorted(known))}. Found {strange[0]!r}.")
    if "epsilon" not in options:
        raise TypeError("`epsilon` should be the radius of the ball. Found none.")
    group, verbose = options.get("group"), level(options.get("verbose", 0))
    check_group(group)
    with together(group):
        check_model(model, generator, options.get("augment"))
        chosen = Settings(**options)
        course = Course(
            epochs=epochs,
            checkpoint=checkpoint,
            checkpoint_every=chosen.checkpoint_every,
            callback=chosen.callback,
            group=group,
        )
        ball = chosen.ball
        plan = Plan(**vars(chosen), method=method_of(method), score=score_of(evaluate, ball, group))
        descent = descent_of(model, chosen.optimizer, chosen.learning_rate, chosen.schedule)
        batches = batches_of(
            data,
            labels,
            batch_size=chosen.batch_size,
            model=model,
            ball=ball,
            augment=chosen.augment,
            group=group,
            noted=checkpoint is not None or group is not None,
        )
    settings: dict[str, Any] = {
        **plan.settings(),
        "epochs": course.epochs,
        "batches": batches.n_batches,
        **descent.settings(),
        "seed": generator.initial_seed(),
        "data": batches.known,
    }
    warn_of_local_statistics(model, group)
    shown = verbose if rank_of(group) == 0 else 0
    with (
        width_remarked_on(**ball),
        ordinary_tensors(),
        undisturbed(model),
        without_gradients(model),
        Progress(verbose=shown, interval=1, callback=None) as progress,
    ):
        run = Training(course, plan, model, descent, batches, generator, settings)
        run.progress = progress
        run.train()
    run.history.updates = run.update
    return run.history
