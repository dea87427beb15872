"""Random programs with stops in them, and the truth about every stop: the same text without it, run afresh.

`generate` writes a program from a seed, as source text. `check` asks `compare` about a program with named blocks, or
`audit` about one with a bare ``detach`` and ``no_grad``, and holds each answer against plain autograd on the text from
which the stops were really removed. `shrink` drops what a failure does not need, `script` prints the rest as a program
that runs alone. Every value in a program has 4 rows and 3 columns, so that any statement can follow any other.
"""

from __future__ import annotations

import itertools
import math
import pprint
import random
import re
import string
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import toolkit
from toolkit import audit, compare
from toolkit.gradients._answers import Closed
from toolkit.gradients.audit.steps import Recorder, Unrecordable

# --- what programs are made of -----------------------------------------------------------------------------------
#
# A statement ends with the line of its new value, $o; lines that begin with | come before the loss function. $a and $b
# are older values, $p is a parameter, $i a number of its own, $n a count, $h a hook; ``...`` are statements inside, $z
# is the last value of those. ⟨x⟩ stops the gradient of x; ``with ⟦⟧:`` and ``@⟦⟧`` stop the recording of a region.
# There is at most one stop in a line, so that its number tells which it is.

PLAIN = """
$o = $a + 0.5 * $b
$o = ($a * $b).tanh()
$o = $a.sin() - $b
$o = (($a @ $b.mT) / 2).softmax(-1) @ $b
$o = $a / (1 + $a.norm())
$o = F.layer_norm($a, (3,)) * $b.sigmoid()
$o = torch.where($a > $b, $a, 0.5 * $b)
$o = $a.cumsum(0) / 4 + $b.amax(0, keepdim=True)
$o = torch.cat([$b[2:], $a[:2]])
p$i, q$i = $a.split([1, 2], 1)
$o = torch.cat([q$i, p$i], 1) * $b
$o = torch.fft.fft(torch.complex(wide($a), wide($b)), dim=0).abs().to($a.dtype) / 4 + $b
$o = torch.einsum("ij,kj,kl->il", $a, $b, $a).tanh()
$o = $a.masked_scatter($b > 0, $b.cos()).index_add(0, rows.remainder(4), $a)
$o = F.scaled_dot_product_attention($a, $b, $a)
$o = $a.take_along_dim($b.argsort(0), 0)
$o = $a * $b.detach()
"""

STOPS = """
$o = ⟨$a⟩
$o = (⟨$a⟩ * $b).tanh()
$o = $a * ⟨($a + $b).sigmoid()⟩
$o = ($a - ⟨$b.tanh()⟩).square()
$o = $b + $a + ⟨$a.round() - $a⟩
$o = $a.tanh() + ⟨(2 * $b).sign() - $a.tanh()⟩
$o = $b + ($a - ⟨$a⟩)
$o = $b * ($a - ⟨$a⟩).cosh()
$o = $a / ⟨1 + $a.norm()⟩
$o = ⟨(($a @ $b.mT) / 2).softmax(-1)⟩ @ $b
n$i = ⟨$a.sin()⟩ * $b
$o = $a + ⟨n$i⟩
$o = $a * ⟨torch.full((4, 3), 0.7)⟩
m$i = ⟨$a.amax(-1, keepdim=True)⟩
$o = $b * (m$i + ($a - m$i).exp().sum(-1, keepdim=True).log())
e$i = ($a - ⟨$a.amax(-1, keepdim=True)⟩).exp()
$o = e$i / e$i.sum(-1, keepdim=True)
$o = torch.where($a > 0, ⟨$a.clamp(min=0).sqrt()⟩, $b)
$o = torch.lerp(⟨$a⟩, $a, 0.3) * $b
$o = $a + ⟨$b.detach() * $b⟩
$o = $a[⟨$b⟩.sum(-1).argsort()]
z$i = torch.complex(wide($a), wide(⟨$b⟩))
$o = (z$i * z$i.conj().exp()).real.to($a.dtype)
"""

LAYERS = """
| net$i = kept("net$i", nn.Linear(3, 3))
$o = net$i($a).tanh()
$o = shared($a).tanh()
| tied$i = nn.Linear(3, 3)
| tied$i.weight = shared.weight
| kept("tied$i", tied$i)
$o = tied$i($a) - shared($b)
$o = shared($a) - ⟨shared($b)⟩
with ⟦⟧:
    t$i = shared($b).tanh()
$o = (shared($a) - t$i) * $b
| net$i = kept("net$i", nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3)))
$o = $a + net$i($b)
| norm$i = kept("norm$i", nn.BatchNorm1d(3))
$o = norm$i($a).tanh()
$o = F.dropout($a, 0.3)
| net$i = kept("net$i", nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)))
$o = net$i($a) * ⟨net$i($b)⟩
| table$i = kept("table$i", nn.Embedding(5, 3))
$o = ($a + table$i(rows)) @ ⟨table$i.weight[:3]⟩
| table$i = kept("table$i", nn.Embedding(5, 3))
$o = ($a @ table$i.weight.T).softmax(-1) @ table$i.weight
| table$i = kept("table$i", nn.Embedding(5, 3, sparse=True))
$o = $a + table$i(rows)
| table$i = kept("table$i", nn.Embedding(5, 3, sparse=True))
$o = table$i(rows) * $a + ⟨table$i.weight⟩[:4]
$o = $a * $p
| net$i = kept("net$i", nn.GRU(3, 3))
$o = net$i($a)[0] * $b
| net$i = kept("net$i", nn.LSTMCell(3, 3))
h$i, c$i = net$i($a, ($b, ⟨$a + $b⟩))
$o = h$i * c$i
| net$i = kept("net$i", nn.MultiheadAttention(3, 1, dropout=0.1))
$o = net$i($a, $b, ⟨$b⟩)[0]
| net$i = kept("net$i", nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
$o = net$i($a) - ⟨$b⟩
| net$i = kept("net$i", nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
$o = net$i($a) * $b
| net$i = kept("net$i", nn.Conv1d(3, 3, 3, padding=1))
$o = net$i($a.T[None])[0].T.tanh()
frozen$i = {key: ⟨value⟩ for key, value in shared.named_parameters()}
$o = torch.func.functional_call(shared, frozen$i, $a) + shared($b)
shared.requires_grad_(False)
t$i = shared($a)
shared.requires_grad_()
$o = t$i * shared($b)
| ema$i = copy.deepcopy(shared).requires_grad_(False)
with ⟦⟧:
    for slow$i, fast$i in zip(ema$i.parameters(), shared.parameters()):
        slow$i.lerp_(fast$i, 0.1)
$o = ema$i($a) - shared($b)
e$i = $p[:1].expand(4, 3)
$o = e$i * $a - ⟨e$i⟩ * $b
$o = F.gumbel_softmax($a, hard=True) * $b
$o = $a - F.cross_entropy($b, rows.remainder(3), reduction="none")[:, None]
| net$i = kept("net$i", nn.TransformerEncoderLayer(3, 1, 5, dropout=0.0, batch_first=True)).eval()
$o = net$i($a[None])[0] * ⟨net$i($b[None])[0]⟩
| old$i = copy.deepcopy(shared)
old$i.load_state_dict(shared.state_dict())
$o = shared($a) - ⟨old$i($b)⟩
t$i = torch.nested.as_nested_tensor([$a[:1], $b[1:]], layout=torch.jagged)
t$i = t$i * ⟨t$i.sin()⟩
$o = torch.cat(t$i.unbind())
t$i = wide($a).to_sparse()
$o = (torch.sparse.mm(t$i, ⟨wide($b).T⟩) @ wide($b)).to($a.dtype)
"""

LIBRARY = """
| bag$i = kept("bag$i", nn.EmbeddingBag(5, 3, mode="mean"))
$o = bag$i(rows.repeat(2), torch.arange(0, 8, 2)) * ⟨$a⟩
| bag$i = kept("bag$i", nn.EmbeddingBag(5, 3, mode="sum"))
$o = $a + bag$i(rows.repeat(3, 1).T, per_sample_weights=⟨$b⟩)
| bag$i = kept("bag$i", nn.EmbeddingBag(5, 3, mode="max"))
$o = $a * bag$i(rows.repeat(2, 1).T)
| bag$i = kept("bag$i", nn.EmbeddingBag(5, 3, mode="sum", sparse=True))
$o = bag$i(rows.repeat(2, 1).T) - ⟨$a⟩ * $b
| table$i = kept("table$i", nn.Embedding(5, 3, max_norm=0.5))
$o = $a + table$i(rows) * ⟨$b⟩
| table$i = kept("table$i", nn.Embedding(5, 3, padding_idx=2, scale_grad_by_freq=True))
$o = $a * table$i(rows)
| norm$i = kept("norm$i", nn.BatchNorm1d(3)).eval()
$o = norm$i($a) * ⟨$b⟩
| norm$i = kept("norm$i", nn.BatchNorm1d(3, momentum=None))
$o = norm$i($a) - norm$i(⟨$b⟩)
| norm$i = kept("norm$i", nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
$o = norm$i($a.T[None])[0].T + ⟨$b⟩
| norm$i = kept("norm$i", nn.GroupNorm(3, 3))
$o = norm$i($a) * $b
| norm$i = kept("norm$i", nn.RMSNorm(3))
$o = $a + norm$i($b) * ⟨norm$i($a)⟩
| net$i = kept("net$i", nn.Bilinear(3, 3, 3))
$o = net$i($a, ⟨$b⟩).tanh()
| net$i = kept("net$i", nn.PReLU(3))
$o = net$i($a) * $b
| net$i = kept("net$i", nn.utils.parametrizations.orthogonal(nn.Linear(3, 3).double()))
$o = net$i($a.double()).to($a.dtype) - ⟨$b⟩
| net$i = kept("net$i", nn.LSTM(3, 3))
t$i = nn.utils.rnn.pack_padded_sequence(torch.stack([$a, $b], 1), torch.tensor([4, 2]))
$o = nn.utils.rnn.pad_packed_sequence(net$i(t$i, (⟨$a⟩[None, :2] * 1.0, $b[None, :2] * 1.0))[0])[0].sum(1)
| nets$i = [nn.Linear(3, 3), nn.Linear(3, 3)]
| stacked$i, _ = torch.func.stack_module_state(nets$i)
| params.update({f"stacked$i.{key}": value for key, value in stacked$i.items()})
$o = torch.func.vmap(lambda p, x: torch.func.functional_call(nets$i[0], p, x), (0, None))(stacked$i, $a).sum(0) * ⟨$b⟩
| net$i = kept("net$i", nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
$o = torch.utils.checkpoint.checkpoint_sequential(net$i, 2, $a, use_reentrant=False) * ⟨$b⟩
| generator$i = torch.Generator().manual_seed($n)
$o = $a * torch.bernoulli(torch.full((4, 3), 0.7), generator=generator$i) / 0.7 - ⟨$b⟩
| generator$i = torch.Generator().manual_seed($n)
$o = $a + ⟨torch.empty(4, 3).uniform_(generator=generator$i) * $b⟩
t$i = torch.distributions.Normal($a, 1 + $b.square())
$o = t$i.rsample() * ⟨t$i.log_prob($b)⟩
t$i = torch.distributions.Normal($a, 1.0)
$o = t$i.log_prob(t$i.sample()) * ⟨$b⟩
t$i = torch.distributions.Categorical(logits=$a)
$o = t$i.log_prob(t$i.sample())[:, None] * ⟨$b⟩
$o = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in ($a, ⟨$b⟩)))[:, None] * $a
(t$i,) = torch.distributions.RelaxedBernoulli(torch.tensor(0.7), logits=$a).rsample((1,))
$o = t$i * ⟨$b⟩
$o = torch.linalg.solve(wide($a.mT @ $a) + 3 * torch.eye(3).to(wide($a)), wide(⟨$b⟩).mT).mT.to($a.dtype)
$o = torch.linalg.svdvals(wide($a)).to($a.dtype) * ⟨$b⟩
$o = torch.linalg.slogdet(wide($a.mT @ $a) + torch.eye(3).to(wide($a)))[1].to($a.dtype) * $b
$o = torch.cdist(wide($a), wide(⟨$b⟩) + 2).to($a.dtype) @ $b
$o = F.max_pool1d($a.T[None], 3, 1, 1)[0].T * ⟨$b⟩
$o = F.conv_transpose1d($a.T[None], ⟨$b⟩[:3, None].expand(3, 3, 3) * 0.5, padding=1)[0].T
$o = F.kl_div($a.log_softmax(-1), ⟨$b.log_softmax(-1)⟩, log_target=True, reduction="none") * $b
$o = F.smooth_l1_loss($a, ⟨$b⟩, reduction="none") + F.huber_loss($a, $b, reduction="none")
$o = torch.logcumsumexp($a, 0) - ⟨$b.logcumsumexp(0)⟩
$o = $a.topk(3, 0).values.sum(0) * $b + $a.kthvalue(2, 0).values - ⟨$b.median(0).values⟩
$o = torch.tensor($b.tolist(), dtype=$b.dtype) * $a
$o = $a + torch.from_numpy(wide(⟨$b⟩).numpy()).to($a.dtype)
$o = torch.autograd.functional.vjp(lambda x: (x * ⟨$b⟩).sin(), $a, $b, create_graph=True)[1]
$o = torch.autograd.functional.hvp(lambda x: ((x + ⟨x.tanh()⟩) * $b).sin().sum(), $a, $b, create_graph=True)[1]
$o = torch.autograd.functional.jacobian(lambda x: (x * ⟨x.cos()⟩).sum(0), $a, create_graph=True).sum((0, 1)) * $b
$o = torch.autograd.functional.jvp(lambda x: x * ⟨x.cos()⟩, $a, $b, create_graph=True)[1]
| @torch.library.custom_op(f"fuzz::cube{id(params)}_$i", mutates_args=())
| def cube$i(x: torch.Tensor) -> torch.Tensor:
|     return x**3
| cube$i.register_autograd(
|     lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
|     setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
| )
$o = cube$i($a.tanh()) * ⟨$b⟩
| traced$i = torch.jit.trace(lambda x, y: x * y.tanh(), (u, v), check_trace=False)
$o = traced$i($a, ⟨$b⟩)
shared.weight.detach().clamp_(-0.4, 0.4)
$o = shared($a) - ⟨shared($b)⟩
| average$i = torch.optim.swa_utils.AveragedModel(shared)
average$i.update_parameters(shared)
$o = shared($a) * ⟨average$i($b)⟩
t$i = copy.copy($a * 1.0)
$o = t$i * ⟨t$i⟩ + $b
t$i = ($a * $b).as_subclass(torch.Tensor)
$o = torch.stack(t$i.unbind(1), 1) * ⟨t$i⟩
t$i = $a.view(2, 2, 3).transpose(0, 1).contiguous()
$o = ⟨t$i⟩.reshape(4, 3) * t$i.flatten(0, 1)
t$i = $a.unfold(0, 2, 1).sum(-1)
$o = torch.cat([t$i, ⟨t$i⟩[:1]]) * $b
with torch.device("cpu"), torch.autograd.set_detect_anomaly(True, check_nan=False):
    t$i = $a.sin() * ⟨$b⟩
$o = t$i
with FlopCounterMode(display=False):
    t$i = shared($a) * ⟨shared($b)⟩
$o = t$i
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    t$i = F.scaled_dot_product_attention($a[None, None], $b[None, None], ⟨$b⟩[None, None], is_causal=True)[0, 0]
$o = t$i * $a
with torch.nn.utils.parametrize.cached():
    t$i = shared($a).tanh()
$o = t$i * ⟨$b⟩
"""

BUFFERS = """
b$i = torch.zeros(4, 3)
b$i[0] = $a[0]
b$i[1:] = $b[1:]
$o = b$i * 1.0
b$i = $a.clone()
r$i = b$i[1:]
b$i.mul_(0.5)
r$i.add_($b[1:])
$o = b$i.tanh()
b$i = torch.zeros(4, 3)
b$i[:2] = $a[:2]
r$i = b$i[0]
b$i[2:] = 2 * $b[2:]
with ⟦⟧:
    m$i = r$i.mean()
$o = (b$i - m$i) * $a
b$i = $a.clone()
with ⟦⟧:
    b$i[0] = 2 * $b[0]
$o = b$i * $b
b$i = torch.zeros(4, 3)
with ⟦⟧:
    b$i[0] = $a[0]
    b$i[1:].add_($b[1:])
$o = b$i * $b
b$i = torch.zeros(4, 3)
b$i[0] = $a[0]
with ⟦⟧:
    r$i = b$i[:2].sin()
b$i[1:] = $b[1:]
$o = b$i + r$i.sum(0)
t$i = $a * 1.0
s$i = ⟨t$i⟩
s$i.mul_(2)
$o = (t$i * s$i).tanh()
s$i = ⟨$p⟩
s$i[:1].mul_(1.0)
$o = $a * s$i
s$i = ⟨$a * $b⟩
s$i.clamp_(min=0)
$o = s$i + $b
s$i = ⟨$a.sin()⟩
s$i[0] = $b[0]
$o = s$i * $a
| mean$i = torch.zeros(4, 3)
with ⟦⟧:
    mean$i.mul_(0.9).add_($a, alpha=0.1)
$o = $b - mean$i
s$i = ⟨$a.sin()⟩
s$i.masked_fill_($b > 0, 0.3)
$o = s$i * $a
s$i = ⟨$a.cos()⟩
s$i.index_put_((rows.remainder(4),), $b, accumulate=True)
$o = s$i * $a
s$i = ⟨$a * $b⟩
s$i.scatter_(0, rows.remainder(4)[:1, None].expand(1, 3), $b[:1])
$o = s$i.tanh() + $a
b$i = torch.zeros(4, 3)
r$i = b$i[1:].T
r$i[:2].copy_($a.T[:2, 1:])
$o = b$i + ⟨r$i.mean()⟩
b$i = torch.zeros(4, 3)
with ⟦⟧:
    for row$i, other$i in zip(b$i.unbind(0), $a.unbind(0)):
        row$i.copy_(other$i)
$o = b$i * $b
b$i, c$i = torch._foreach_mul([$a, ⟨$b⟩], [$b, $a])
$o = b$i - c$i.sin()
p$i, q$i = ⟨$a * $b⟩.split([1, 2], 1)
p$i.mul_(2)
$o = torch.cat([p$i, q$i], 1) * $a
b$i, c$i = $a.clone(), $b.clone()
torch._foreach_mul_([b$i, c$i], [⟨$b⟩, $a])
$o = b$i - c$i
b$i, c$i = torch.zeros(4, 3), torch.ones(4, 3)
with ⟦⟧:
    torch._foreach_add_([b$i, c$i], [$a, $b], alpha=0.5)
$o = b$i * c$i * $a
b$i = torch.zeros(4, 3)
with ⟦⟧:
    torch.mul($a, $b, out=b$i)
$o = b$i + $a
t$i = $a * 1.0
t$i[:2] = ⟨t$i[2:]⟩
$o = t$i * $b
"""

FUNCTIONS = """
$o = Square.apply($a) - $b
p$i, q$i = Pair.apply($a, $b)
$o = p$i.tanh() + q$i
p$i, q$i = Pair.apply($a, $b)
$o = p$i.tanh() * ⟨q$i⟩
$o = Auxiliary.apply($a, $b.square().mean())
$o = $b * ⟨Auxiliary.apply($a, $b.square().mean())⟩
$o = $b * ⟨Root.apply($a.relu())⟩
$o = $b + ⟨Root.apply(($a - $a[:1]).square())⟩
$o = $a + Root.apply($b.square() + 0.1)
p$i, q$i = Ranked.apply($a)
$o = p$i * $b + q$i
p$i, q$i = Ranked.apply($a)
$o = ⟨p$i⟩ * $b - q$i
$o = Doubled.apply($a * 1.0) + $b
$o = $a * ⟨Doubled.apply($b * 1.0)⟩
p$i, q$i = Lazy.apply($a, $b)
$o = p$i + ⟨q$i⟩
$o = Lazy.apply($a, $b)[0].tanh()
"""

HOOKS = """
t$i = $a * 1.0
if t$i.requires_grad:
    t$i.register_hook($h)
$o = t$i
t$i = $a + 0.5 * $b
if t$i.requires_grad:
    hook_once(t$i)
$o = t$i
| $p.register_hook($h)
$o = $a + $p
| net$i = kept("net$i", nn.Linear(3, 3))
| net$i.weight.register_hook($h)
$o = net$i($a) * $b
| net$i = kept("net$i", nn.Linear(3, 3))
| net$i.register_full_backward_hook(lambda module, inputs, outputs: halves(inputs))
$o = net$i($a).tanh()
| net$i = kept("net$i", nn.Linear(3, 3))
| net$i.register_forward_hook(lambda module, inputs, output: output * ⟨output⟩)
$o = net$i($a) + $b
t$i = $a * $b
if t$i.grad_fn is not None:
    t$i.grad_fn.register_hook(lambda inputs, outputs: halves(inputs))
$o = t$i
t$i = $a.sigmoid()
if t$i.grad_fn is not None:
    t$i.grad_fn.register_prehook(halves)
$o = t$i
t$i, s$i = $a * 1.0, $b * 2.0
if t$i.requires_grad and s$i.requires_grad:
    torch.autograd.graph.register_multi_grad_hook((t$i, s$i), lambda grads: [note(g) for g in grads if g is not None])
$o = t$i * s$i
t$i = $a.tanh()
if t$i.requires_grad:
    t$i.retain_grad()
$o = t$i * $b
with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
    t$i = $a.sin() * ⟨$b.exp()⟩
    with ⟦⟧:
        t$i = t$i - $a * $b
$o = t$i
| net$i = kept("net$i", nn.Linear(3, 3))
| net$i.register_full_backward_pre_hook(lambda module, outputs: halves(outputs))
$o = net$i($a) - ⟨$b⟩
| class Scaled$i(nn.Linear):
|     def forward(self, x, *, scale):
|         return super().forward(x) * scale
| net$i = kept("net$i", Scaled$i(3, 3))
| net$i.register_forward_pre_hook(lambda module, args, kwargs: (args, {"scale": ⟨kwargs["scale"]⟩}), with_kwargs=True)
$o = net$i($a, scale=$b)
with torch.autograd.graph.save_on_cpu():
    t$i = $a.sin() * ⟨$b.exp()⟩
$o = t$i
"""

STATE = """
t$i = 0.5 * ⟨$a.sin()⟩
leaves.append(t$i.requires_grad_())
$o = t$i * $b
with ⟦⟧:
    t$i = $a[1:] * $b[1:]
leaves.append(t$i.requires_grad_())
$o = $b + t$i.mean(0)
| cache$i = {}
if "value" not in cache$i:
    cache$i["value"] = ⟨$a.tanh()⟩
$o = cache$i["value"] * $b
| kept$i = types.SimpleNamespace(value=None)
if kept$i.value is None:
    kept$i.value = $a.tanh()
$o = kept$i.value * ⟨$b⟩
| @functools.cache
| def once$i():
|     return ⟨$p.tanh()⟩ + 0.1 * $p
$o = $a * once$i()
| data$i = iter([torch.randn(4, 3) for _ in range(64)])
$o = $a * next(data$i)
| steps$i = itertools.count(1)
$o = $a + $b / next(steps$i)
| count$i = Count()
$o = $a * (1 + 0.1 * count$i()) - ⟨$b⟩
| calls$i = 0
| def tick$i():
|     global calls$i
|     calls$i += 1
|     return calls$i
$o = $a.sin() / tick$i()
| def ticking$i():
|     calls = 0
|     def tick():
|         nonlocal calls
|         calls += 1
|         return calls
|     return tick
| tick$i = ticking$i()
$o = ($b / tick$i()).tanh()
| queue$i = collections.deque(maxlen=2)
queue$i.append(⟨$a⟩)
$o = $b + queue$i[0]
| past$i = []
past$i.append($a)
$o = $b * past$i[len(past$i) // 2]
$o = $a * torch.rand(4, 3)
$o = $a + 0.1 * float(np.random.rand())
$o = $a * random.random()
| generator$i = torch.Generator().manual_seed($n)
$o = $a + 0.1 * torch.randn(4, 3, generator=generator$i) * ⟨$b⟩
| fast$i = nn.Linear(3, 3)
| inner$i = torch.optim.Adam(fast$i.parameters(), lr=0.1)
with torch.enable_grad():
    inner$i.zero_grad()
    fast$i($b.detach()).square().mean().backward()
    inner$i.step()
$o = fast$i($a) + ⟨$b⟩
with torch.enable_grad():
    t$i = $p * 1.0
    (g$i,) = torch.autograd.grad((t$i * $b).sin().sum(), t$i, create_graph=True)
$o = $a * (t$i - 0.1 * ⟨g$i⟩)
t$i = $a
for _ in range(1 + round($b.abs().amax().clamp(max=2).item())):
    t$i = t$i.sin() + ⟨$b⟩
$o = t$i
| class Owner$i:
|     @⟦⟧
|     def target(self, x):
|         return x.tanh()
|     @property
|     def weight(self):
|         return $p * 2
| owner$i = Owner$i()
$o = owner$i.target($a) * owner$i.weight + $b
| async def later$i(x):
|     with ⟦⟧:
|         t = x.tanh()
|     return t * x
$o = asyncio.run(later$i($a)) + $b
$o = torch.func.grad(lambda x: (x * ⟨$b⟩).sin().sum())($a)
| @⟦⟧
| def series$i(x):
|     for _ in range(2):
|         x = x.tanh()
|         yield x
$o = sum(part * $a for part in series$i($b))
kept$i = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
$o = checkpoint(lambda x: x.sin() * ⟨x⟩, $a, use_reentrant=False, context_fn=kept$i) * $b
with torch.enable_grad():
    t$i = $a * 1.0
    if not t$i.requires_grad:
        t$i.requires_grad_()
    e$i = torch.autograd.graph.get_gradient_edge(t$i.tanh() * ⟨t$i⟩)
    (g$i,) = torch.autograd.grad([e$i], [t$i], [$b], create_graph=True)
$o = g$i
o$i, push$i = torch.func.linearize(lambda x: x.sin() * ⟨x⟩, $a)
$o = push$i($b) + o$i
| pool$i = concurrent.futures.ThreadPoolExecutor(1)
$o = pool$i.submit(lambda x: x.sin() * x, $a).result() * ⟨$b⟩
| async def part$i(x):
|     return ⟨x.sin()⟩ * x
| async def parts$i(x, y):
|     async with asyncio.TaskGroup() as group:
|         tasks = [group.create_task(part$i(value)) for value in (x, y)]
|     return sum(task.result() for task in tasks)
$o = asyncio.run(parts$i($a, $b))
"""

BLOCKS = """
with ⟦⟧:
    ...
$o = $z * 1.0
with ⟦⟧:
    ...
$o = $z + $a
x$i = y$i = $a
for _ in range($n):
    ...
    x$i, y$i = $z.tanh(), x$i
$o = x$i
with torch.autocast("cpu", torch.bfloat16):
    ...
$o = $z.float()
with ⟦⟧:
    s$i = $a.tanh()
    with torch.enable_grad():
        ...
    s$i = s$i * $z
$o = s$i + $z
try:
    with ⟦⟧:
        ...
        raise LookupError
except LookupError:
    t$i = $z + $a
$o = t$i
| @contextlib.contextmanager
| def held$i():
|     with ⟦⟧:
|         yield
with held$i():
    ...
$o = $z * $a
| def passes$i():
|     with ⟦⟧:
|         yield
|         yield
for _ in passes$i():
    ...
$o = $z + $a
with torch.set_grad_enabled(False):
    ...
$o = $z + $a
"""

# Of these and the next, the function f$i(x$i, y$i) holds the statements inside.
CALLS = """
$o = f$i($a, $b) * $b
$o = checkpoint(f$i, $a, $b, use_reentrant=False)
$o = Rematerialised.apply(f$i, $a, $b)
with torch.enable_grad():
    t$i = $a * 1.0
    if not t$i.requires_grad:
        t$i.requires_grad_()
    (g$i,) = torch.autograd.grad((f$i(t$i, $b) + t$i).square().sum(), t$i, create_graph=True)
$o = g$i
with torch.enable_grad():
    t$i = $a * 1.0
    if not t$i.requires_grad:
        t$i.requires_grad_()
    (g$i,) = torch.autograd.grad((f$i(t$i, $b) + t$i).square().sum(), t$i)
$o = $a + 0.1 * g$i
$o = functools.reduce(f$i, [$a, $b, $a])
$o = checkpoint(lambda x: checkpoint(f$i, x, $b, use_reentrant=False).tanh(), $a, use_reentrant=False)
with torch.enable_grad():
    t$i = $a * 1.0
    if not t$i.requires_grad:
        t$i.requires_grad_()
    c$i = (f$i(t$i, $b) + t$i).sum(0)
    (g$i,) = torch.autograd.grad(c$i, t$i, torch.eye(3).to(c$i), create_graph=True, is_grads_batched=True)
$o = g$i.sum(0)
"""

TRANSFORMS = """
$o = torch.func.grad(lambda x, y: (f$i(x, y) + x).square().sum())($a, $b)
$o = torch.func.vmap(f$i)(torch.stack([$a, $b]), torch.stack([$b, $a]))[0]
$o = torch.func.jvp(f$i, ($a, $b), ($b, $a))[1]
o$i, pull$i = torch.func.vjp(f$i, $a, $b)
$o = sum(pull$i(o$i))
$o = torch.func.jacrev(f$i)($a, $b).sum((0, 1))
$o = torch.func.hessian(lambda x, y: (f$i(x, y) * x).sum())($a, $b).sum((0, 1))
with forward_ad.dual_level():
    t$i = forward_ad.unpack_dual(f$i(forward_ad.make_dual($a, $b), $b) + 0.5 * forward_ad.make_dual($a, $b)).tangent
$o = t$i
"""

HOOK = ["lambda g: 0.5 * g", "lambda g: g.clamp(-0.1, 0.1)", "lambda g: g / (1 + g.norm())", "note", "lambda g: -g"]

HEAD = """\
import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import functools
import itertools
import random
import types

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from toolkit import stop_gradient, stop_recording

torch.set_default_dtype(torch.$dtype)
random.seed($seed), np.random.seed($seed), torch.manual_seed($seed)
rows = torch.tensor([0, 2, 2, 4])
leaves = []
u, v, w, unused = (torch.randn(4, 3).requires_grad_() for _ in range(4))
params = {"u": u, "v": v, "w": w, "unused": unused}


def kept(name, module):
    params.update({f"{name}.{key}": parameter for key, parameter in module.named_parameters()})
    return module


@contextlib.contextmanager
def restored(before, now):
    try:
        yield
    finally:
        torch.set_grad_enabled(before)


shared = kept("shared", nn.Linear(3, 3))
"""

# Included only in programs that name them.
HELPERS = {
    "Square": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]
""",
    "Pair": """
class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + h, g * x + h
""",
    "Auxiliary": """
class Auxiliary(torch.autograd.Function):  # as Megatron's MoEAuxLossAutoScaler
    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, torch.full_like(ctx.saved_tensors[0], 0.3)
""",
    "Root": """
class Root(torch.autograd.Function):  # its derivative at 0 is not a number
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sqrt())
        return x.sqrt()

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g / ctx.saved_tensors[0]
""",
    "Ranked": """
class Ranked(torch.autograd.Function):  # its second result has no derivative
    @staticmethod
    def forward(ctx, x):
        values, order = x.sort(0)
        ctx.order = order
        ranks = order.to(x.dtype)
        ctx.mark_non_differentiable(ranks)
        return values, ranks

    @staticmethod
    def backward(ctx, g, _):
        return torch.zeros_like(g).scatter(0, ctx.order, g)
""",
    "Doubled": """
class Doubled(torch.autograd.Function):  # in place
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return 2 * g
""",
    "Lazy": """
class Lazy(torch.autograd.Function):  # makes no zeros of gradients that are missing
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x.sin() + y, 3 * y

    @staticmethod
    def backward(ctx, g, h):
        gs = [part for part in (g, None if h is None else 3 * h) if part is not None]
        return g, sum(gs) if gs else None
""",
    "wide": """
def wide(x):  # where halves have no complex numbers
    return x.to(torch.promote_types(x.dtype, torch.float32))
""",
    "Rematerialised": """
class Rematerialised(torch.autograd.Function):  # keeps the inputs, and runs the function again in its backward pass
    @staticmethod
    def forward(ctx, function, x, y):
        ctx.function = function
        ctx.save_for_backward(x, y)
        return function(x, y).clone()

    @staticmethod
    def backward(ctx, g):
        inputs = [saved.clone().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        if not output.requires_grad:
            return None, *map(torch.zeros_like, inputs)
        again = {"create_graph": g.requires_grad, "allow_unused": True, "materialize_grads": True}
        return None, *torch.autograd.grad(output, inputs, g, **again)
""",
    "hook_once": """
def hook_once(tensor):
    def hook(g):
        handle.remove()
        return 3 * g

    handle = tensor.register_hook(hook)
""",
    "Count": """
class Count:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls
""",
    "halves": """
def halves(gradients):
    return tuple(None if g is None else 0.5 * g for g in gradients)
""",
    "note": """
def note(g):
    logged.append(g.norm().item())


logged = []
""",
}


# --- a program ---------------------------------------------------------------------------------------------------

FILE = "program.py"
_STOP = re.compile(r"⟨(\w+)\|([^⟨⟩]*)⟩")
_REGION = re.compile(r"(with |@)⟦(\w+)⟧")


@dataclass(frozen=True)
class Statement:
    """Some lines of a program that make one new value.

    Attributes:
        text: The lines, with marked stops; ``...`` stands for `inside`.
        setup: Lines that come before the loss function.
        output: The new value.
        stands_for: Name -> what it is replaced by if the statement is left out.
        inside: Statements of a block or of a function's body.
    """

    text: str
    setup: str
    output: str
    stands_for: dict[str, str]
    inside: tuple[Statement, ...] = ()

    def walk(self) -> Iterator[Statement]:
        """Yield this statement and all that are inside, those that are set up first coming first."""
        for statement in self.inside:
            yield from statement.walk()
        yield self

    def lines(self) -> Iterator[str]:
        """Yield the lines, those of inner statements indented."""
        for line in self.text.splitlines():
            if line.strip() != "...":
                yield line
                continue
            inner = [text for statement in self.inside for text in statement.lines()] or ["pass"]
            yield from (line.replace("...", text) for text in inner)


@dataclass(frozen=True)
class Program:
    """Source text with stops in it, each of which can be taken out.

    Attributes:
        seed: It was generated from.
        dtype: Of its parameters.
        named: Whether its stops are named blocks, for `compare`; else they are bare, for `audit`.
        statements: Its lines.
        results: The values that the loss is made of.
        renamed: What stands for the values of statements that were dropped.
        removed: Stops that were dropped.
    """

    seed: int
    dtype: str
    named: bool
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    renamed: dict[str, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    @cached_property
    def marked(self) -> str:
        """The text with its stops marked."""
        every = [inner for statement in self.statements for inner in statement.walk()]
        setup = "".join(f"{statement.setup}\n" for statement in every if statement.setup)
        body = [line for statement in self.statements for line in statement.lines()]
        cast = "" if self.dtype == "float64" else ".float()"
        terms = " + ".join(f"(weights * {result}{cast}).sum()" for result in self.results)
        body += ["weights = torch.linspace(-1.0, 2.0, 12).reshape(4, 3)", f"return {terms}"]
        text = setup + "\n\ndef loss():\n" + textwrap.indent("\n".join(body), "    ") + "\n"
        while (renamed := re.sub(r"\b[vxy]\d+\b", lambda m: self.renamed.get(m[0], m[0]), text)) != text:
            text = renamed
        helpers = [code for name, code in HELPERS.items() if re.search(rf"\b{name}\b", text)]
        head = string.Template(HEAD).substitute(seed=self.seed, dtype=self.dtype)
        return "\n".join([head, *helpers]) + "\n" + _without(text, self.removed)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Their names, in the order of the text."""
        return tuple(dict.fromkeys(re.findall(r"(?<=[⟨⟦])\w+", self.marked)))

    @cached_property
    def places(self) -> dict[int, str]:
        """Line -> the stop that is there, of a program with bare stops."""
        lines = enumerate(self.marked.splitlines(), 1)
        return {number: name for number, line in lines for name in re.findall(r"(?<=[⟨⟦])\w+", line)}

    @property
    def precision(self) -> float:
        """The epsilon of the coarsest dtype that is computed with."""
        coarsest = "bfloat16" if "autocast" in self.marked else self.dtype
        return torch.finfo(getattr(torch, coarsest)).eps

    def source(self, open: Iterable[str] = ()) -> str:
        """Return the text from which the stops in `open` are removed, on the same lines."""
        named = 'stop_gradient({1}, "{0}")', 'stop_recording("{0}")'
        form = 0 if self.seed % 5 == 1 and "torch.func" in self.marked else self.seed % 5  # no `detach_` of its tensors
        tensor, region = named if self.named else _BARE.get(form, ("({1}).detach()", "torch.no_grad()"))
        text = _without(self.marked, open, "({} * 1.0)" if "detach_" in tensor else "({})")
        while _STOP.search(text):
            text = _STOP.sub(lambda m: tensor.format(*m.groups()), text)
        if "detach_" in tensor:
            text = text.replace("with ⟦", "with restored(torch._C.is_grad_enabled(), torch.set_grad_enabled(False)), ⟦")
            text = re.sub(r", ⟦\w+⟧", "", text)
        return _REGION.sub(lambda m: m[1] + region.format(m[2]), text)


# The remainder of the seed by 5 -> other forms of a stop and of a region.
_BARE = {
    1: ("({1} * 1.0).detach_()", "torch.no_grad()"),
    3: ("({1}).data", "torch.set_grad_enabled(False)"),
    4: ("torch.autograd.Variable({1})", "torch.autograd.grad_mode.no_grad()"),
}


def _without(marked: str, open: Iterable[str], opened: str = "({})") -> str:
    """Take some stops out of a marked text; from the inside out, so those that stay are set aside as ‹x›."""
    open = frozenset(open)
    while _STOP.search(marked):
        marked = _STOP.sub(lambda m: opened.format(m[2]) if m[1] in open else f"‹{m[1]}|{m[2]}›", marked)
    regions = {"with ": "if True", "@": "# removed"}
    marked = _REGION.sub(lambda m: regions[m[1]] if m[2] in open else m[0], marked)
    return marked.replace("‹", "⟨").replace("›", "⟩")


# --- written at random -------------------------------------------------------------------------------------------


def _statements(text: str, before: str = "") -> list[str]:
    return [before + match.strip("\n") for match in re.findall(r"(?:.*\n)*?\$o = .*\n", text.lstrip("\n"))]


FLAT = {
    name: _statements(text)
    for name, text in zip(
        ("plain", "stop", "layer", "library", "buffer", "function", "hook", "state"),
        (PLAIN, STOPS, LAYERS, LIBRARY, BUFFERS, FUNCTIONS, HOOKS, STATE),
        strict=True,
    )
}
_ANY = list(FLAT)
_PURE = ["plain", "stop"]
_AGAIN = [*_PURE, "layer", "buffer", "function"]  # may run a second time
_FUNCTION = "def f$i(x$i, y$i):\n    ...\n    return $z\n"
_BLOCKS, _TRANSFORMS = _statements(BLOCKS), _statements(TRANSFORMS, _FUNCTION)
_CALLS = [text for mark in ("", "@⟦⟧\n") for text in _statements(CALLS, mark + _FUNCTION)]
INSIDE = dict.fromkeys(_CALLS, _AGAIN) | dict.fromkeys(_TRANSFORMS, _PURE) | dict.fromkeys(_BLOCKS, _ANY)
_WEIGHTS = {"plain": 3, "stop": 4, "layer": 3, "library": 2, "buffer": 2, "function": 1.5, "hook": 1.5, "state": 2}


def generate(seed: int) -> Program:
    """Write the program of this seed; it has at least one stop."""
    return _Writer(seed).program()


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.named = self.random.random() < 0.6
        self.names = "abc"[: self.random.randint(1, 3)]
        self.dtype = self.random.choices(["float64", "float32", "bfloat16"], [5, 3, 1])[0]
        self.numbers, self.places = itertools.count(1), itertools.count(1)

    def program(self) -> Program:
        values, count = ["u", "v", "w"], self.random.randint(2, 8)
        if self.dtype == "float32" and self.random.random() < 0.3:
            statements = [self.statement(values, _ANY, 0, next(text for text in _BLOCKS if "autocast" in text))]
        else:
            statements = self.statements(values, _ANY, 0, count)
        program = Program(self.seed, self.dtype, self.named, tuple(statements), ())
        if not program.stops:
            statements.append(self.statement(values, ["stop"], 2))
        outputs = [statement.output for statement in statements]
        results = {outputs[-1], *self.random.sample(outputs, min(3, len(outputs)))}
        return replace(program, statements=tuple(statements), results=tuple(sorted(results)))

    def statements(self, values: list[str], groups: list[str], depth: int, count: int) -> list[Statement]:
        written = []
        for _ in range(count):
            written.append(self.statement(values, groups, depth))
            values.append(written[-1].output)
        return written

    def statement(self, values: list[str], groups: list[str], depth: int, text: str = "") -> Statement:
        number = next(self.numbers)
        names = {"o": f"v{number}", "i": f"{number}", "a": self.value(values), "b": self.value(values)}
        names |= {"p": self.random.choice("uvw"), "h": self.random.choice(HOOK), "n": f"{self.count()}"}
        stands_for = {names["o"]: names["a"]}
        text, inside = text or self.paragraph(groups, depth), []
        if text in INSIDE:
            is_function = "def f$i" in text
            arguments = [f"x{number}", f"y{number}"] if "x$i" in text else []
            seen = [*([] if is_function else values), *arguments]
            inside = self.statements(
                seen, [group for group in groups if group in INSIDE[text]], depth + 1, self.random.randint(1, 4)
            )
            names["z"] = inside[-1].output
            stands_for |= zip(arguments, [names["a"], names["b" if is_function else "a"]], strict=False)
        lines = self.with_names(string.Template(text).substitute(names)).splitlines()
        setup = [line[2:] for line in lines if line.startswith("| ")]
        body = [line for line in lines if not line.startswith("| ")]
        return Statement("\n".join(body), "\n".join(setup), names["o"], stands_for, tuple(inside))

    def paragraph(self, groups: list[str], depth: int) -> str:
        if depth < 2 and self.random.random() < 0.25:
            choices = [*_BLOCKS, *_TRANSFORMS, *([] if groups == _PURE else _CALLS)]
            return self.random.choice([text for text in choices if "autocast" not in text or self.dtype == "float32"])
        (group,) = self.random.choices(groups, [_WEIGHTS[group] for group in groups])
        return self.random.choice(FLAT[group])

    def value(self, values: list[str]) -> str:
        return self.random.choice(values[-3:] if self.random.random() < 0.6 else values)

    def count(self) -> int:
        return self.random.choice([1, 2, 3, 3, 5, 30])

    def with_names(self, text: str) -> str:
        """Give every stop its name: those of blocks may recur, a bare stop is known by its place alone."""

        def named(match: re.Match[str]) -> str:
            name = self.random.choice(self.names) if self.named else f"s{next(self.places)}"
            return f"⟨{name}|" if match[0] == "⟨" else f"⟦{name}"

        return re.sub("[⟨⟦]", named, text)


# --- the truth ---------------------------------------------------------------------------------------------------


class Truth(NamedTuple):
    """The truth by plain autograd: the loss, each parameter's gradient, and the parameters with a path to them."""

    loss: float
    gradients: dict[str, Tensor]
    reached: frozenset[str]


def execute(source: str) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    """Run a program's text; return its loss function and its parameters. The text seeds every generator itself."""
    program: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, FILE, "exec"), program)
    return program["loss"], program["params"]


def differentiate(loss: Callable[[], Tensor], params: dict[str, Tensor]) -> Truth:
    """Differentiate without the toolkit."""
    value, found = loss(), [None] * len(params)
    if value.requires_grad:
        found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(params, found, strict=True) if gradient is not None}
    filled = {name: _dense(gradients.get(name, torch.zeros_like(parameter))) for name, parameter in params.items()}
    return Truth(value.item(), filled, frozenset(gradients))


def truth(program: Program, open: Iterable[str] = (), *, nudge: int = 0) -> Truth:
    """Remove the stops in `open` from the text, run it afresh, and differentiate.

    Args:
        program: The text.
        open: Names of stops.
        nudge: If not 0, the seed of a random rounding error that is added to every parameter.
    """
    generator = torch.Generator().manual_seed(nudge)
    with _undisturbed():
        loss, params = execute(program.source(open))
        with torch.no_grad():
            for parameter in params.values() if nudge else ():
                signs = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.add_(parameter * signs, alpha=program.precision)
        return differentiate(loss, params)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put back what a program's text sets for the whole process."""
    default, states = torch.get_default_dtype(), (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default)
        for restore, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), states, strict=True):
            restore(state)


def _dense(tensor: Tensor) -> Tensor:
    return (tensor.to_dense() if tensor.layout is not torch.strided else tensor).detach()


# --- the checker -------------------------------------------------------------------------------------------------

# Epsilon -> how far a gradient may be off, relative to that of the same parameter; and how many times as far as a
# rounding error in every parameter moves it.
_ALLOWED = {
    torch.finfo(torch.float64).eps: (1e-9, 100.0),
    torch.finfo(torch.float32).eps: (1e-4, 30.0),
    torch.finfo(torch.bfloat16).eps: (0.03, 6.0),
}

_TOOLKIT = Path(toolkit.__file__).parent

# "noise" may be said of leaks up to this part of the gradient; in float64 only where rounding moves the gradient by as
# much, because the program sorts values that are equal up to rounding, say.
_NOISE, _FINE = 0.05, 1e-10


@dataclass(frozen=True)
class Finding:
    """What `check` found.

    Attributes:
        answers: How many sets of open stops were answered, and held against the truth.
        wrong: What is wrong, as (kind, sentence).
        refused: Why an answer was refused that could be given.
        skipped: Why the program has no truth; empty if it has one.
    """

    answers: int = 0
    wrong: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()
    skipped: str = ""


def check(program: Program) -> Finding:
    """Ask the toolkit about a program, and hold every answer against the text without the stops."""
    with _undisturbed():
        return _Checker(program).finding()


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.answers = 0
        self.left_out: list[str] = []
        self.wrong: list[tuple[str, str]] = []
        self.refused: list[str] = []
        self.truth = cache(lambda open, nudge=0: truth(program, open, nudge=nudge))
        self.noise = cache(self.measured_noise)
        self.size = cache(lambda open, name=None: _size(self.gradients(open, name)))

    def gradients(self, open: tuple[str, ...], name: str | None) -> Iterable[Tensor]:
        """Return the true gradient of a parameter, or of all of them."""
        found = self.truth(open).gradients
        return found.values() if name is None else [found[name]]

    def finding(self) -> Finding:
        try:
            plain = self.truth(())
        except Exception as error:
            return Finding(skipped=_sentence(error))
        if math.isnan(plain.loss) or not plain.reached:
            return Finding(skipped="the loss is not a number, or a constant")
        self.ask()
        return Finding(self.answers, tuple(self.wrong), tuple(self.refused))

    def ask(self) -> None:
        stops, draws = self.program.stops, random.Random(self.program.seed)
        subset = tuple(stop for stop in stops if draws.random() < 0.5)
        sets = dict.fromkeys([*((stop,) for stop in stops), stops, subset])
        sets.pop((), None)
        answerable = [open for open in sets if self.is_answerable(open)]
        loss, params = execute(self.program.source())
        given: dict[tuple[str, ...], Any] = {}
        try:
            with self.asking(loss, params) as asked:
                if not getattr(asked, "valid", True):
                    self.refused.append(f"invalid: {asked.reason}")
                    return
                names = self.names_in(asked)
                for open in answerable:
                    if all(stop in names for stop in open):
                        given[open] = self.attempted(asked, [names[stop] for stop in open])
        except Exception as error:
            if len(answerable) == len(sets):
                self.fail(error)
            return
        for stop in filter(self.is_missed, self.left_out):
            self.note("missed", f"{stop} is no part of the answer")
        plain = self.truth(())
        if asked.loss != plain.loss:
            self.note("loss", f"{asked.loss!r} where the program has {plain.loss!r}")
        for name, expected in plain.gradients.items():
            if not _same(asked.blocked[name], expected):
                self.note("blocked", f"{name} is off by {_distance(asked.blocked[name], expected):.3g}")
        for open, answer in given.items():
            if isinstance(answer, Exception):
                self.fail(answer)
            else:
                self.answers += 1
                self.hold(open, *answer)
        self.hold_what_is_left(loss, params)

    @contextmanager
    def asking(self, loss: Callable[[], Tensor], params: dict[str, Tensor]) -> Iterator[Any]:
        """Ask about a program; in the body its answer takes questions."""
        yield (compare if self.program.named else audit)(loss, params)

    def hold_what_is_left(self, loss: Callable[[], Tensor], params: dict[str, Tensor]) -> None:
        """Run the program once more, as if nobody had asked."""
        plain = self.truth(())
        try:
            again = differentiate(loss, params)
        except Exception as error:
            self.note("left", f"the program does not run any more: {_sentence(error)}")
            return
        if again.loss != plain.loss or not all(_same(again.gradients[name], plain.gradients[name]) for name in params):
            self.note("left", "the program's next loss or gradient is another one")

    def attempted(self, asked: Any, names: list[str]) -> Any:
        """Return the answer, or the error in its place."""
        try:
            return self.answer(asked, names)
        except Exception as error:
            return error

    def answer(self, asked: Any, names: list[str]) -> tuple[dict[str, Tensor], Any]:
        """Ask for the gradient with these stops open, and for what opening them does; None if that cannot be asked."""
        if len(names) == 1:
            return asked.gradient(names), next(effect for effect in asked.effects if effect.name == names[0])
        return asked.gradient(names), asked.effect(names) if self.program.named else None

    def is_answerable(self, open: tuple[str, ...]) -> bool:
        """Say whether the text without these stops runs, to a number: what stands in its way may be the stop itself."""
        try:
            return not math.isnan(self.truth(open).loss)
        except Exception:
            return False

    def names_in(self, asked: Any) -> dict[str, str]:
        """Return the stops that were opened, each with the name that the answer has for it."""
        if self.program.named:
            names = {effect.name: effect.name for effect in asked.effects}
            unopened = self.unopened(asked)
        else:
            sites = {f"{FILE}:{line}:": stop for line, stop in self.program.places.items()}
            other = "detach()" if ".data" in self.program.source() else None  # beside the stop, in its line
            effects = [effect.name for effect in asked.effects if asked.kinds[effect.name] != other]
            names = {stop: name for name in effects for site, stop in sites.items() if name.startswith(site)}
            unopened = {
                sites.get(place[: place.rindex(":") + 1], ""): why for place, why in self.unopened(asked).items()
            }
        for stop in self.program.stops:
            if stop in unopened and self.is_answerable((stop,)):
                self.refused.append(f"not opened: {unopened[stop]}")
            elif stop not in {**names, **unopened}:
                self.left_out.append(stop)
        return {stop: name for stop, name in names.items() if stop not in unopened}

    def unopened(self, asked: Any) -> dict[str, str]:
        """Return the stops or places that were not opened, with reasons."""
        return asked.unopened if self.program.named else {entry.site: entry.reason for entry in asked.unopened}

    def is_missed(self, stop: str) -> bool:
        """Return whether an answer should have this stop."""
        return ".data" not in self.program.source() or self.does_something(stop)

    def does_something(self, stop: str) -> bool:
        """Return whether the gradient is another one without a stop."""
        if not self.is_answerable((stop,)):
            return False
        plain, opened = self.truth(()).gradients, self.truth((stop,)).gradients
        return any(
            _distance(opened[n], plain[n]) > self.rounding((stop,), n, _distance(opened[n], plain[n])) for n in plain
        )

    def hold(self, open: tuple[str, ...], found: dict[str, Tensor], effect: Any) -> None:
        """Hold what is said about these stops, opened together, against the truth."""
        plain, opened = self.truth(()).gradients, self.truth(open).gradients
        for name, expected in opened.items():
            off = _distance(found[name], expected)
            if off > self.rounding(open, name, off):
                self.note("gradient", f"open {open}: {name} is off by {off:.3g} of {_size([expected]):.3g}")
        if effect is None or not all(gradient.isfinite().all() for gradient in plain.values()):
            return  # what is no number stays none, whatever is added to it
        leaks = {name: _distance(opened[name], plain[name]) for name in plain}
        leak = math.hypot(*leaks.values())
        off = abs(effect.leak - leak)
        if math.isfinite(leak) != math.isfinite(effect.leak) or off > math.hypot(
            *(self.rounding(open, name, off) for name in plain)
        ):
            self.note("leak", f"open {open}: {effect.leak:.6g} where it is {leak:.6g}")
        if fault := self.fault(effect.verdict, open, leaks):
            self.note("verdict", f"open {open}: {effect.verdict}, but {fault}")

    def fault(self, verdict: Any, open: tuple[str, ...], leaks: dict[str, float]) -> str:
        """Say what speaks against a verdict; nothing if it is right."""
        (_, plain, before), (_, _, after) = self.truth(()), self.truth(open)
        named, cut = set(verdict.parameters), after - before
        if verdict.kind == "cuts":
            return f"it cuts {sorted(cut)}" if named != cut else ""
        rounding = {name: self.rounding(open, name, leak) for name, leak in leaks.items()}
        leaking = {name for name in leaks if leaks[name] > rounding[name]}
        if verdict.kind == "makes":
            others = {name for name in named if not plain[name].any() or self.size(open, name) > rounding[name]}
            return f"it does not make that of {sorted(others)}" if others else ""
        if verdict.kind == "partial":
            return f"it cuts {sorted(cut)}" if cut & leaking else ""
        if not leaking:
            return ""
        part = math.hypot(*leaks.values()) / max(self.size(()), self.size(open))
        if verdict.kind == "noise":
            # The toolkit rounds six times: as many here, or a rare large change that it saw would count against it.
            leaking = {name for name in leaking if leaks[name] > self.rounding(open, name, leaks[name], nudges=6)}
            if not leaking or (part <= _NOISE and self.program.precision > _FINE):
                return ""
        return f"the leak is {part:.2g} of the gradient, in {sorted(leaking)}"

    def rounding(self, open: tuple[str, ...], name: str, off: float, nudges: int = 2) -> float:
        """Return how far rounding may move the gradient of a parameter; measured only if `off` is more than usual."""
        relative, times = _ALLOWED[self.program.precision]
        usual = relative * max(self.size((), name), self.size(open, name)) + 1e-15 * self.size(())
        if off <= usual:
            return usual
        return usual + times * (self.noise((), name, nudges) + self.noise(open, name, nudges))

    def measured_noise(self, open: tuple[str, ...], name: str, nudges: int) -> float:
        """Return how far rounding errors in the parameters move the gradient of one of them."""
        whole = self.truth(open).gradients[name]
        return max(_distance(self.truth(open, 1 + nudge).gradients[name], whole) for nudge in range(nudges))

    def fail(self, error: Exception) -> None:
        """Count an error as a refusal if the toolkit raised it in one sentence, else as wrong."""
        *_, raised = traceback.extract_tb(error.__traceback__)
        ours = Path(raised.filename).is_relative_to(_TOOLKIT) and type(error) in (RuntimeError, ValueError, Closed)
        if ours and "\n" not in str(error):
            self.refused.append(str(error))
        else:
            self.note("crash", f"{type(error).__name__}: {_sentence(error)}")

    def note(self, kind: str, sentence: str) -> None:
        self.wrong.append((kind, sentence))


def check_step(program: Program) -> Finding:
    """Record one training step of a program, and hold the answer and the step's own gradient against the text."""
    with _undisturbed():
        return _StepChecker(program).finding()


class _StepChecker(_Checker):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.real: dict[str, str] = {}

    def ask(self) -> None:
        while True:
            try:
                super().ask()
            except Unrecordable as error:
                if error.places.keys() & self.real.keys():
                    raise AssertionError("a place is refused twice") from error
                self.real |= error.places
            else:
                return

    def fail(self, error: Exception) -> None:
        if isinstance(error, Unrecordable):
            raise error
        super().fail(error)

    @contextmanager
    def asking(self, loss: Callable[[], Tensor], params: dict[str, Tensor]) -> Iterator[Any]:
        recorder = Recorder(self.real)
        with recorder.recording():
            value = loss()
            with recorder.board.of_the_program():
                yield recorder.answer(value, None, params)
                value.backward()
        for name, expected in self.truth(()).gradients.items():
            gradient = params[name].grad
            if not _same(torch.zeros_like(expected) if gradient is None else gradient, expected):
                self.note("step", f"the step's own gradient by {name} is off")
        plain, _ = execute(self.program.source())
        plain().backward()
        if not all(map(_same_or_none, _gradients_of_leaves(loss), _gradients_of_leaves(plain))):
            self.note("step", "the step's own gradient by a leaf that the program makes is off")

    def is_missed(self, stop: str) -> bool:
        """Return whether a stop that the answer leaves out does something."""
        return self.does_something(stop)

    def unopened(self, asked: Any) -> dict[str, str]:
        return {entry.site: entry.reason for entry in asked.unopened}

    def hold_what_is_left(self, loss: Callable[[], Tensor], params: dict[str, Tensor]) -> None:
        """Do nothing: a step moves the state of its program."""


def _sentence(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _gradients_of_leaves(loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves that a program has made."""
    return [leaf.grad for leaf in loss.__globals__["leaves"]]


def _same_or_none(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and _same(a, b))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(_dense(a), b, rtol=0, atol=0, equal_nan=True)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference; infinite if a number stands against what is none."""
    a, b = _real(_dense(a)).double(), _real(_dense(b)).double()
    return _size([a - b]) if torch.equal(a.isfinite(), b.isfinite()) else math.inf


def _size(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all finite numbers."""
    return math.hypot(*(torch.where(t.isfinite(), t, 0).double().norm().item() for t in map(_real, tensors)))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# --- failures ----------------------------------------------------------------------------------------------------


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Drop what a failure does not need: statements, the blocks around others, stops."""
    while True:
        smaller = next(filter(fails, _smaller(program)), None)
        if smaller is None:
            return program
        program = smaller


def _smaller(program: Program) -> Iterator[Program]:
    for result in program.results if len(program.results) > 1 else ():
        yield replace(program, results=tuple(other for other in program.results if other != result))
    for statement in [inner for outer in program.statements for inner in outer.walk()][::-1]:
        dropped = {old: new for gone in statement.walk() for old, new in gone.stands_for.items()}
        yield _replaced(program, statement, (), dropped)
        if statement.inside:
            last = {statement.output: statement.inside[-1].output}
            yield _replaced(program, statement, statement.inside, statement.stands_for | last)
    for stop in program.stops if len(program.stops) > 1 else ():
        yield replace(program, removed=program.removed | {stop})


def _replaced(program: Program, old: Statement, new: tuple[Statement, ...], renamed: dict[str, str]) -> Program:
    def rebuilt(statements: tuple[Statement, ...]) -> Iterator[Statement]:
        for statement in statements:
            if statement is old:
                yield from new
            else:
                yield replace(statement, inside=tuple(rebuilt(statement.inside)))

    return replace(program, statements=tuple(rebuilt(program.statements)), renamed=program.renamed | renamed)


_SCRIPT = """\
{findings}
import torch

from toolkit import {function}

TEXT = '''\\
{source}'''

# Stop -> the lines that are other ones without it.
WITHOUT = {edits}


def program(edits):
    lines = [edits.get(number, line) for number, line in enumerate(TEXT.splitlines(), 1)]
    names = {{"__name__": "program"}}
    exec(compile("\\n".join(lines), "{file}", "exec"), names)
    return names["loss"], names["params"]


def gradients(edits):
    loss, params = program(edits)
    found = torch.autograd.grad(loss(), list(params.values()), allow_unused=True)
    return {{name: gradient for name, gradient in zip(params, found) if gradient is not None}}


plain = gradients({{}})
print("truth: size of the gradient", {{name: gradient.norm().item() for name, gradient in plain.items()}})
for stop, edits in WITHOUT.items():
    opened = gradients(edits)
    leaks = {{name: (opened[name] - plain.get(name, 0)).norm().item() for name in opened}}
    print(f"truth: leak without {{stop}}", leaks)
asked = {function}(*program({{}}))
print(asked)
for effect in asked.effects:
    print("answer:", effect.name, {{name: part.leak for name, part in effect.per_parameter.items()}})
"""


def script(program: Program, finding: Finding) -> str:
    """Return a program that runs alone, and prints the toolkit's answers beneath the truth."""
    plain = program.source().splitlines()
    edits: dict[str, dict[int, str]] = {}
    for stop in program.stops:
        lines = zip(plain, program.source([stop]).splitlines(), strict=True)
        edits[stop] = {number: new for number, (old, new) in enumerate(lines, 1) if old != new}
    found = [f"# seed {program.seed}", *(f"# {kind}: {sentence}" for kind, sentence in finding.wrong)]
    found += [f"# refused: {reason}" for reason in finding.refused]
    return _SCRIPT.format(
        findings="\n".join(found),
        function="compare" if program.named else "audit",
        source=program.source(),
        edits=pprint.pformat(edits, width=110),
        file=FILE,
    )


if __name__ == "__main__":
    failing = generate(int(sys.argv[1]))
    kinds = {kind for kind, _ in check(failing).wrong}
    small = shrink(failing, lambda program: bool(kinds & {kind for kind, _ in check(program).wrong}))
    print(script(small, check(small)))
