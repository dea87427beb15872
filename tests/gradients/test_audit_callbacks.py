"""The leaks of stops over training: their history, and the callbacks of trainers, which change no number.

Trainers are not needed otherwise. Tried: lightning 2.6.6 and transformers 5.23.0 with accelerate 1.15.0; a test whose
package is missing is skipped.
"""

import csv
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from toolkit.gradients import audited
from toolkit.gradients.audit.history import LeakHistory, RepeatedAudit


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.target = nn.Linear(3, 2), nn.Linear(3, 2)

    def loss(self, x):
        y = self.layer(x)
        return ((y - self.target(x).detach()).square() / y.norm().detach()).mean() + 0 * y.detach().sum()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return _Net()


def _steps(net, n_steps, audit=None):
    optimiser, x = torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 3)
    metrics = {}
    for step in range(n_steps):
        if audit:
            audit.begin(step, net)
        optimiser.zero_grad()
        net.loss(x).backward()
        optimiser.step()
        if audit:
            metrics[step] = audit.end(step)
    return metrics


def test_every_nth_step_is_audited(net):
    audit = RepeatedAudit(3)
    metrics = _steps(net, 7, audit)
    assert [step for step, found in metrics.items() if found] == [0, 3, 6]
    assert {record.step for record in audit.history.records} == {0, 3, 6}
    (cut, scale, shift) = (record for record in audit.history.records if record.step == 3)
    assert (cut.verdict, scale.verdict, shift.verdict) == ("cuts", "partial", "redundant")
    name = f"stops/{cut.stop.replace(':', '-')}"
    assert metrics[3][f"{name}/leak"] == cut.leak > 0
    assert metrics[3][f"{name}/ratio"] == cut.ratio > 0
    assert len(metrics[3]) == 6


@pytest.mark.slow
def test_a_history_is_drawn_stop_by_stop(net):
    audit = RepeatedAudit(2)
    _steps(net, 5, audit)
    (axes,) = audit.history.plot().axes
    for line, stop in zip(axes.lines, dict.fromkeys(r.stop for r in audit.history.records), strict=True):
        assert line.get_label() == stop
        assert list(line.get_xdata()) == [0, 2, 4]
        assert list(line.get_ydata()) == [r.leak for r in audit.history.records if r.stop == stop]
    LeakHistory().plot().canvas.draw()
    audit.history.plot().canvas.draw()


def test_backward_passes_of_a_step_are_told_apart():
    w, history = torch.tensor(2.0, requires_grad=True), LeakHistory()
    with audited({"w": w}) as answer:
        for factor in (1, 3):
            (factor * w * w.detach() + torch.ones(()).detach()).backward()
    metrics = history.add(5, answer)
    first, second = history.records
    assert (first.leak, second.leak) == (2, 6)
    assert second.stop == f"{first.stop}, backward pass 2"
    assert len(metrics) == 4


def test_a_cell_of_a_notebook_has_a_name_that_loggers_take():
    """Its file is an absolute path, outside of the folder and of the packages."""
    w, history, names = torch.tensor(2.0, requires_grad=True), LeakHistory(), {}
    exec(compile("def loss(w):\n    return w * w.detach()\n", "/cells/7/1.py", "exec"), names)
    with audited({"w": w}) as answer:
        names["loss"](w).backward()
    assert list(history.add(0, answer)) == [f"stops/cells/7/1.py-2-16/{kind}" for kind in ("leak", "ratio")]


@pytest.mark.slow
def test_a_step_that_raises_is_left_behind(net):
    audit = RepeatedAudit(1)
    audit.begin(0, net)
    audit.begin(1, net)
    net.loss(torch.ones(1, 3)).backward()
    audit.abandon()
    with audited(net):
        pass
    assert audit.end(1) != {}
    with pytest.raises(ValueError, match=r"`model` should train in one process while it is audited\. Found 2 ranks\."):
        audit.begin(2, net, n_ranks=2)
    with pytest.raises(ValueError, match="`every` should be"):
        RepeatedAudit(0)


# --- trainers ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_the_leaks(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    from toolkit.gradients.audit.lightning import AuditCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = _Net()

        def training_step(self, batch, index):
            loss = self.net.loss(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(*callbacks):
        torch.manual_seed(0)
        module, data = Module(), torch.randn(24, 3)
        logger = CSVLogger(tmp_path, name=f"{len(callbacks)}")
        quiet = dict.fromkeys(["enable_progress_bar", "enable_checkpointing", "enable_model_summary"], False)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=logger, callbacks=list(callbacks), log_every_n_steps=1, **quiet
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, 4))
        return module, logger

    callback = AuditCallback(every=2)
    plain, _ = trained()
    watched, logger = trained(callback)
    assert all(map(torch.equal, watched.state_dict().values(), plain.state_dict().values()))
    assert sorted({record.step for record in callback.history.records}) == [0, 2, 4]
    first = callback.history.records[0]
    leak = f"stops/{first.stop.replace(':', '-')}/leak"
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["loss"]] == list("012345"), "the trainer's own steps"
    logged = {int(row["step"]): float(row[leak]) for row in rows if row[leak]}
    assert logged == {r.step: r.leak for r in callback.history.records if r.stop == first.stop}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_hugging_face_logs_the_leaks(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from toolkit.gradients.audit.transformers import AuditCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = _Net()

        def forward(self, x, labels=None):
            return {"loss": self.net.loss(x)}

    def trained(*, audits):
        torch.manual_seed(0)
        model, data = Model(), [{"x": x, "labels": x} for x in torch.randn(24, 3)]
        arguments = transformers.TrainingArguments(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5, report_to="none",
            use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        callback = AuditCallback(trainer, every=2)
        if audits:
            trainer.add_callback(callback)
        trainer.train()
        return model, trainer, callback

    plain, *_ = trained(audits=False)
    watched, trainer, callback = trained(audits=True)
    assert all(map(torch.equal, watched.state_dict().values(), plain.state_dict().values()))
    assert sorted({record.step for record in callback.history.records}) == [1, 3, 5]
    told = [entry for entry in trainer.state.log_history if any(key.startswith("stops/") for key in entry)]
    assert [entry["step"] for entry in told] == [1, 3, 5]
    leaks = [value for key, value in told[0].items() if key.endswith("/leak")]
    assert leaks == [record.leak for record in callback.history.records if record.step == 1]
    by_pass = itertools.groupby(callback.history.records, lambda record: "backward pass 2" in record.stop)
    assert len(list(by_pass)) == 6, "two batches for each step"
