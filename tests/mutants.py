"""Mutants: copies of the project with one line broken. The tests have to kill each; `make mutants` tries them all.

    python tests/mutants.py [ROOM ...]

Mutants live in a temporary folder, never in the checkout. A mutant is dead as soon as a test fails that passes without
it. Lines are found by their text in any file of the project: a line that is gone, or there twice, is an error.
"""

from __future__ import annotations

import functools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from folders import ROOT

SOURCES = ("toolkit", "experiments")

# Room -> (the text of one line or of a part of it, the broken text, the files of tests that notice).
TABLE: dict[str, list[tuple[str, str, str]]] = {
    "blocks": [
        ("        and on_flow is _STOP\n", "", "test_blocks_on_flow"),
        ("torch.no_grad(), without_tangents()) if region", "torch.no_grad(),) if region", "test_blocks"),
        ("- reached - compiled_open\n", "- compiled_open - compiled_open\n", "test_blocks"),
        ("if name in known and known[name].why:", "if name in known:", "test_blocks"),
        ("return dict(sorted(known.items()))", "return dict(known)", "test_blocks"),
        ("return key not in state.open and (state.gates is None", "return (state.gates is None", "test_blocks"),
    ],
    "gradients": [
        ("square + 2 * crossed + added, square", "square + 2 * crossed - added, square", "test_verdict test_compare"),
        ("np.sqrt(open / blocked)", "np.sqrt(blocked / open)", "test_compare"),
        ("if cut := leak.reached - self._answers.plain.reached:", "if cut := frozenset[str]():", "test_compare"),
        ("        if made.any():", "        if made.all():", "test_verdict"),
        ("return name in self.opened\n", "return name not in self.opened\n", "test_compare"),
        (
            "gradient.clone() for name, gradient in self.plain",
            "gradient for name, gradient in self.plain",
            "test_compare",
        ),
        ("(self.jacobian - self.jacobian.T).norm()", "(self.jacobian + self.jacobian.T).norm()", "test_field"),
        ("torch.argsort(eigenvalues.real, descending=True)", "torch.argsort(eigenvalues.real)", "test_field"),
        ("graph = live.now\n", "graph = live.peak\n", "test_memory"),
        ("None if i in outputs else cotangent for i", "cotangent for i", "test_grad"),
        ("return self._kept_blocks if _fewer(meetings", "return '' if _fewer(meetings", "test_everybodys_programs"),
        ("leaf.node if isinstance(leaf, GradientEdge) else getattr", "getattr", "test_audit_steps"),
        ("        storage.update(_copied(values))\n", "", "test_audit_steps"),
        ("elif not gradient.isfinite().all():", "elif gradient.isfinite().all():", "test_testing"),
    ],
    "audit": [
        (
            "if found.digests[: after.n_before] != self",
            "if self.plain.digests[: after.n_before] != self",
            "test_audit_reruns",
        ),
        ("= noise, precision\n", "= 1e9 * noise, precision\n", "test_audit_reruns"),
        (
            "entries = [entry for entry in entries if entry.holds()]",
            "[entry.holds() for entry in entries]",
            "test_audit_reruns",
        ),
        ("            bare.casts.clear()\n", "", "test_audit_steps"),
        ("with torch.enable_grad() if mode else torch.no_grad():", "if True:", "test_audit_everywhere"),
        (
            "                    self._bare.real[str(site)] = _SCRIPTED\n",
            "                    pass\n",
            "test_audit_everywhere",
        ),
        ("if size == 0 and name in", "if size < 1e9 and name in", "test_audit"),
        ("self.used.update(names if made else ())", "self.used.update(names)", "test_audit"),
        ("if weight._version != version and", "if False and", "test_audit_steps"),
        ("        same = self.verdict == found.verdict or", "        same = True or", "test_audit_expectations"),
        ("        elif not wanted.is_met_by(seen):", "        elif wanted.is_met_by(seen):", "test_audit_expectations"),
        ("or (node.lineno != line and name == (line, column - 1))", "", "test_audit_expectations"),
        ("and self.column in (0, site.column)", "", "test_testing"),
        ("    if silent.issuperset(names):", "    if silent.issubset(names):", "test_testing"),
        ("        if step >= self._next:", "        if step > self._next:", "test_audit_callbacks"),
        ("            self._leaves.append(made_leaf(tensor, source))\n", "", "test_audit_steps"),
        (
            "            if gap.end is None and gap.switch is switch:",
            "            if gap.end is None:",
            "test_audit_steps",
        ),
        ("                for kept in reversed(undone):", "                for kept in undone:", "test_audit_steps"),
        ("states if states and any(map(carries_gradient, leaves)) else []", "states", "test_audit_steps"),
        ("            return any(map(unwraps, arguments))", "            return True", "test_audit_steps"),
        (
            "            raise Unrecordable(dict.fromkeys(sorted(regions), _FAST_PATH))",
            "            return",
            "test_audit_steps",
        ),
        ("            torch.compile = compiled\n", "            pass\n", "test_audit_scripts"),
        ("            if shared := self._shared():", "            if shared := set[str]():", "test_audit_steps"),
        (
            "self.board.making(constants) if own.isdisjoint(freed)",
            "self.board.making(constants) if own",
            "test_audit_steps",
        ),
        ("            recorder.part(value)\n", "            pass\n", "test_audit_steps"),
        ("if tensor() is not None]", "]", "test_audit_steps"),
        ("carried and not leaks and self._leads", "not carried and self._leads", "test_audit_steps"),
        ("computed_as_plain(func, args, kwargs, self._is_from_inside)", "func(*args, **kwargs)", "test_bits_of_steps"),
        ("return unfolded(func, args, kwargs, self.is_constant)", "return func(*args, **kwargs)", "test_bits_of_steps"),
        ("_MEMORY(result).copy_(value)", "value.copy_(_MEMORY(result))", "test_bits_of_steps"),
        ("bool(original()) and not regions", "bool(original())", "test_audit_steps"),
        ("return self.open_regions() or (", "return (", "test_audit_steps"),
        (
            "kind.apply(owner(), *cotangents) if self._is_passed(names)",
            "kind.apply(owner(), *cotangents) if names",
            "test_audit_steps",
        ),
        ("    sys.exit(code if is_valid and", "    sys.exit(0 if is_valid and", "test_audit_scripts"),
        ("    return os.getpid(), threading", "    return 0, threading", "test_audit_scripts"),
        ("known = self._unseen(partly) | self._met", "known = self._unseen(partly)", "test_audit_steps"),
        ("                *[_ALONE] * bool(n_before),\n", "", "test_audit_steps"),
        ("        if not self.backward_passes:  # one opt", "        if False:  # one opt", "test_audit_scripts"),
        ("        if self._steps_when_over:\n", "        if False:\n", "test_audit_scripts"),
        ("= 2 * self.lessons.earlier + 1", "= self.lessons.earlier + 0", "test_audit_scripts"),
        ("return not create_graph and all(isinstance", "return all(isinstance", "test_audit_scripts"),
    ],
    "lint": [
        ("if held.changed and held.has(leaf):", "if held.has(leaf):", "test_aliases"),
        ("if held.changed and held.is_alive:", "if held.changed:", "test_aliases"),
        (
            "argument.alias_info is not None and argument.alias_info.is_write",
            "argument.alias_info is not None",
            "test_aliases",
        ),
        ('bare.kinds.get(place) == ".data"', 'bare.kinds.get(place) == "detach"', "test_audit"),
    ],
    "value_learning": [
        (
            "    target = bootstrapped(r_t, discount_t, expected(probs_a_t, q_t))",
            "    target = bootstrapped(r_t, discount_t, q_t.mean(-1))",
            "test_value_learning",
        ),
        ("ended = (discount_t == 0) & value.isneginf()", "ended = value.isneginf()", "test_gallery"),
        (
            "chosen(q_t_value, q_t_selector.argmax(-1))",
            "chosen(q_t_value, q_t_value.argmax(-1))",
            "test_value_learning",
        ),
        (
            "torch.cat([returns[..., 1:], v_t[..., -1:]], -1)",
            "torch.cat([returns[..., 1:], returns[..., -1:]], -1)",
            "test_value_learning",
        ),
        (
            "last = torch.addcmul(r_t[..., -1:], discount_t[..., -1:], v_t[..., -1:])",
            "last = mixed[..., -1:]",
            "test_value_learning",
        ),
        (
            "torch.searchsorted(z_q, z, right=True) - 1)",
            "torch.searchsorted(z_q, z, right=True) - 2)",
            "test_value_learning",
        ),
        ("torch.where(y < theta, 1 - tau, tau)", "torch.where(y < theta, tau, 1 - tau)", "test_value_learning"),
        (
            "return (correction if rho_tm1 is None else rho_tm1 * correction) - error * v_tm1",
            "return correction - error * v_tm1",
            "test_value_learning",
        ),
    ],
    "softmax": [
        ("shift = stop_gradient(finite_maximum(x, dim), SHIFT)", "shift = finite_maximum(x, dim)", "test_softmax"),
        (
            "bounded(log_sum_in_plain_operations(x, dim), 0) - x.gather",
            "log_sum_in_plain_operations(x, dim) + x.gather",
            "test_softmax",
        ),
        ("(total if shift is None else shift + total)", "total", "test_softmax"),
        (
            "losses.neg().exp() - 1, losses.neg().expm1()",
            "losses.neg().expm1(), losses.neg().expm1()",
            "test_softmax_accuracy",
        ),
        ("slope = cotangent * margin.sigmoid()", "slope = cotangent * margin.tanh()", "test_softmax_linear"),
        (
            "shift.sub_(larger).exp_()).add_(e.sum(1))",
            "shift.sub_(larger).exp_()).add_(e.sum())",
            "test_softmax_linear",
        ),
        ("losses.sum() / (~ignored).sum()", "losses.mean()", "test_softmax_linear"),
        (
            "masked_fill(~where[:, start:stop], -math.inf)",
            "masked_fill(where[:, start:stop], -math.inf)",
            "test_softmax_linear",
        ),
    ],
    "em": [
        (
            "return stop_gradient(log_joint.log_softmax(-1), RESPONSIBILITIES)",
            "return log_joint.log_softmax(-1)",
            "test_em",
        ),
        ("<= bound).all(-1)", "<= math.inf).all(-1)", "test_em_parsimonious"),
        ('instance("state", state, OnlineState)', "", "test_em_arguments"),
        ("expectation(log_r.exp(), log_joint - log_r)", "expectation(log_r.exp(), log_joint)", "test_em"),
        ("k - 1 + k * d + self._structure", "k + k * d + self._structure", "test_em"),
        (
            "self.log_weights + self.log_determinants - 0.5 * self.n_features",
            "self.log_weights - 0.5 * self.n_features",
            "test_em",
        ),
        (
            "means = centre + responsibilities.mT @ (x - centre)",
            "means = responsibilities.mT @ (x - centre)",
            "test_em",
        ),
        ("n_parameters * math.log(n_samples)", "2 * n_parameters", "test_em_selection"),
        (
            "return None if abs(value - found.log_likelihood) <= _LOST * (1 + abs(found.log_likelihood)) else value",
            "return None",
            "test_em_selection",
        ),
        (
            "densities[weights > 0] @ weights[weights > 0].double()",
            "densities @ weights.double()",
            "test_em_selection",
        ),
        ("of.where(present, soft_counts(sums[..., -1]), 0.0)", "soft_counts(sums[..., -1])", "test_em_together"),
        (
            "of.where(counts == 0, -math.inf, logs / n_features)",
            "of.where(counts == 0, 0.0, logs / n_features)",
            "test_em_together",
        ),
        ("refused = own & ~taken", "refused = own & taken", "test_em_together"),
        ("self.shrinkage * seen / (self.shrinkage + seen)", "self.shrinkage * seen / (1 + seen)", "test_em_prior"),
        (
            "added=self.degrees_of_freedom + structure.prior_count",
            "added=structure.prior_count",
            "test_em_prior",
        ),
        (
            "complete_information(mixture, x, sample_weight) - missing_information",
            "complete_information(mixture, x, sample_weight) + missing_information",
            "test_em_information",
        ),
        (
            "directions = basis @ vectors / (1 - rates).sqrt()",
            "directions = basis @ vectors / (1 - rates)",
            "test_em_information",
        ),
        ("tail = (degrees / 2 + half)", "tail = (degrees / 2)", "test_em_families_truth"),
        ("k * (d * q - q * (q - 1) // 2)", "k * d * q", "test_em_families"),
        (
            "share = other.counts / soft_counts(counts)",
            "share = 0.5 * other.counts / soft_counts(counts)",
            "test_em_online",
        ),
        ("** -state.exponent, state.least_step)", "** -1, state.least_step)", "test_em_online"),
        (
            "return tol > 0 and gained[-1] - gained[-2] <= tol",
            "return gained[-1] - gained[-2] <= tol",
            "test_em_acceleration",
        ),
        (
            "            value -= 0.5 * self.total_weight * distance\n",
            "            value -= 0.5 * distance\n",
            "test_em_small",
        ),
        ("        if loses_digits(distance):\n", "        if distance < 0:\n", "test_em_small"),
        ("found - 0.5 * total * distances[near]", "found - 0.5 * distances[near]", "test_em_small"),
        ("if not values[-1] <= above:", "if not values[-1] <= value:", "test_em_acceleration"),
        ("            damping = 0.0 if whole <= least else damping\n", "", "test_em_newton"),
        ("information.flat[:: size + 1] += 1.0", "information.flat[:: size + 1] += 2.0", "test_em_newton"),
        ("or added.diagonal(0, 1, 2).max() > _RIDGE:", "or False:", "test_em_newton"),
        ("np.linalg.solve(self._transposed, parts[:, 1", "np.linalg.solve(self._factor, parts[:, 1", "test_em_newton"),
        (
            "gradient[:, 1 + d :] += counts * added[:, i, j]",
            "gradient[:, 1 + d :] -= counts * added[:, i, j]",
            "test_em_newton",
        ),
    ],
    "bilevel": [
        (
            "return still + factor * (moving - still).nan_to_num(0) if diff",
            "return still + factor * (moving - still).nan_to_num(0) if True or diff",
            "test_bilevel_unrolling",
        ),
        (
            "return still + factor * (moving - still).nan_to_num(0) if diff",
            "return still + factor * (moving - still) if diff",
            "test_bilevel_unrolling",
        ),
        ("better = residual < least  # false for NaN", "better = residual == residual", "test_bilevel_solvers"),
        ("z = torch.where(done[:, None], z, history.acc", "z = (history.acc", "test_bilevel_solvers"),
        (
            "        ctx.save_for_backward(output, *args)\n",
            "        ctx.save_for_backward(inputs[2], *args)\n",
            "test_bilevel",
        ),
        ("if t and factor != 1:", "if factor != 1:", "test_bilevel_unrolling"),
        (
            "    if factor == 0:\n        return held",
            "    if factor < 0:\n        return held",
            "test_bilevel_unrolling",
        ),
        (
            "    return peaks * torch.where(norms > 0, norms, 1)\n",
            "    return torch.ones_like(norms)\n",
            "test_bilevel_solvers",
        ),
        ("        if not bool(curvature > 0):\n", "        if not bool(curvature != 0):\n", "test_bilevel_solvers"),
    ],
    "rbm": [
        ('if "data" in rows and not is_compiling():', "if not rows and not is_compiling():", "test_rbm_divergence"),
        (
            "return joint.free_energy(data).mean() - joint.free_energy(negative).mean()",
            "return joint.free_energy(negative).mean() - joint.free_energy(data).mean()",
            "test_rbm_divergence",
        ),
        (
            "return energy_difference(joint, data, negative, energy)\n",
            "return energy_difference(joint, negative, data, energy)\n",
            "test_rbm_divergence",
        ),
        (
            "x * (self.bias + x / 2) * (-self.log_variance).exp()",
            "x * (self.bias + x) * (-self.log_variance).exp()",
            "test_rbm_units",
        ),
        (
            "moved = weights - torch.outer(b - held_b, lam)",
            "moved = weights + torch.outer(b - held_b, lam)",
            "test_block_contract",
        ),
        ("surrogate = (start - held) @ free_energy", "surrogate = (start + held) @ free_energy", "test_rbm_bias"),
        (
            "(before.square() - after.square()) * (size / 8)",
            "(before.square() - after.square()) * (size / 4)",
            "test_rbm_langevin",
        ),
        (
            "reference + per_unit * (self.visible.bias - reference)",
            "per_unit * (self.visible.bias - reference)",
            "test_rbm_tempering",
        ),
        (
            "self._sign * (float(self.log_weights.logsumexp(0)) - math.log(self.chains))",
            "self._sign * float(self.log_weights.logsumexp(0))",
            "test_rbm_evaluation",
        ),
        ("middle + math.log(self.upper.chains / self.lower.chains)", "middle", "test_rbm_evaluation"),
        ("initial * min(1.0, (1 - part) / (1 - hold))", "initial * (1 - part) / (1 - hold)", "test_rbm_training"),
    ],
    "games": [
        ("        if not value.requires_grad:\n", "        if False:\n", "test_games_play"),
        ("moved.append(_minus(players[i], step, rate))", "moved.append(players[i])", "test_games_play"),
        ("return 0.5 * (_dot(held, field) - _sum(", "return 0.5 * (_dot(held, field) + _sum(", "test_games_play"),
        ("(norms - 1).square().mean()", "norms.square().mean()", "test_games_gan"),
        (
            "return _slopes(discriminator, samples).square().sum(1)",
            "return _slopes(discriminator, samples).square().mean(1)",
            "test_games_gan",
        ),
        (
            "torch.lerp(stop_gradient(input, REVERSED), input, -scale)",
            "torch.lerp(stop_gradient(input, REVERSED), input, scale)",
            "test_games_reversal",
        ),
    ],
    "curvature": [
        ("(slope * (outputs - held)).sum()", "(slope * outputs).sum()", "test_curvature_divergences"),
        ("create_graph=base.requires_grad)", "create_graph=False)", "test_curvature_divergences"),
        ("x = torch.where(p == 0, 0, log_q - log_p)", "x = log_q - log_p", "test_curvature_divergences"),
        ("near = x.abs() < 1\n", "near = x.abs() < 0\n", "test_curvature_divergences"),
        ("torch.where(z.abs() < _FAR, near", "torch.where(z.abs() < torch.inf, z", "test_curvature_majorisation"),
        ("    small = 0.25", "    small = 1e-9", "test_tensors"),
        ("(radius / length).sqrt()", "(radius / length)", "test_curvature_products"),
        ("size / before, direction)", "0 * size / before, direction)", "test_curvature_products"),
        ("penalty = v.expm1() - v", "penalty = v.expm1() - 2 * v", "test_curvature_majorisation"),
        ("else (1 + u) ** -2", "else (1 + u) ** -1", "test_curvature_majorisation"),
    ],
    "self_supervised": [
        (".sum(-1) / torch.where(none, 1, norms))", ".sum(-1) / norms)", "test_self_supervised"),
        ("*answers[:t], *answers[t + 1 : seen]", "*answers[:seen]", "test_self_supervised"),
        (
            "scaled = torch.add(-scores.amax(-2, keepdim=True) / epsilon, scores",
            "scaled = torch.add(0 * scores.amax(-2, keepdim=True), scores",
            "test_self_supervised",
        ),
        ("if turn % _TURNS == 0 or turn == iterations:", "if turn == iterations:", "test_self_supervised"),
        (
            "        if self.training:\n            self.center =",
            "        if True:\n            self.center =",
            "test_self_supervised_state",
        ),
        (
            "**dict(module.named_buffers())}",
            "}",
            "test_self_supervised_state",
        ),
        ("(confidence < threshold, 0,", "(confidence <= threshold, 0,", "test_self_supervised"),
        ("[queue[len(newest) :], newest[", "[queue[: -len(newest)], newest[", "test_self_supervised_state"),
    ],
    "adversarial": [
        (
            "stride = attack.stride(2.5 / steps, step_size)\n        best",
            "stride = attack.stride(1 / steps, step_size)\n        best",
            "test_adversarial",
        ),
        (
            "too_far=error.mul_(-displacement.sign())",
            "too_far=error.mul_(displacement.sign())",
            "test_adversarial_balls",
        ),
        ("(1 - 8 * limits.eps)", "(1 - 8e5 * limits.eps)", "test_adversarial_balls"),
        ("keepdim=True) >= budget).all()", "keepdim=True) >= budget).any()", "test_adversarial_balls"),
        (
            "offset = self.radius * share ** (1 / dimensions) * towards",
            "offset = self.radius * share * towards",
            "test_adversarial",
        ),
        (
            "heading = momentum * heading + _of_unit_sum(gradient)",
            "heading = heading + _of_unit_sum(gradient)",
            "test_adversarial",
        ),
        (
            "return _ratio(difference, largest[:, 0] - largest[:, 2])",
            "return _ratio(difference, largest[:, 0] - largest[:, 1])",
            "test_adversarial_apgd",
        ),
        (
            "(cross_entropy(clean, labels) + beta * divergence(clean, moved)).mean()",
            "(cross_entropy(clean, labels) + divergence(clean, moved)).mean()",
            "test_adversarial_methods",
        ),
        ("beta * weight * divergence(clean, moved)", "beta * divergence(clean, moved)", "test_adversarial_methods"),
        (
            "here + overshoot * (boundary - here), difference_loss",
            "boundary, difference_loss",
            "test_adversarial_sparse",
        ),
        (
            "weight * (moved_slope - slope).square()",
            "weight * (moved_slope + slope).square()",
            "test_adversarial_methods",
        ),
        ("certified = probability > 0.5", "certified = probability > 0.4", "test_adversarial_certificates_smoothing"),
        (
            "beta.ppf(1 - confidence, np.maximum(count, 1)",
            "beta.ppf(confidence, np.maximum(count, 1)",
            "test_adversarial_certificates_smoothing",
        ),
        ("margins.append(", "margins.append(-", "test_adversarial_linear"),
        ("            close(open_cases.rows(dropped))\n", "", "test_adversarial_certificates"),
        ("for way in (1, -1)\n", "for way in (1, 1)\n", "test_adversarial_certificates"),
        ("with all_kept():", "with reentrant_kept():", "test_adversarial_everybodys_models"),
        ("all_kept() if torch.is_grad_enabled() else", "", "test_adversarial_everybodys_models"),
        ("(hurts < 0), -helps * hurts", "(hurts < 0), helps * hurts", "test_adversarial_sparse"),
        ("= gradient + correction, nearby", "= gradient, nearby", "test_adversarial_transfer"),
        (".logsumexp(0) - math.log(self.samples)", ".logsumexp(0)", "test_adversarial_suitability"),
        (
            "torch.where(attack.succeeds(logits), 1 - shrinkage, 1 + shrinkage)",
            "torch.where(attack.succeeds(logits), 1 + shrinkage, 1 - shrinkage)",
            "test_adversarial_minimal",
        ),
    ],
    "quantization": [
        ("bounded.round().clamp(-half, self.levels - 1 - half)", "bounded.round()", "test_quantization"),
        ("centred = codebook - mean\n", "centred = codebook\n", "test_quantization_vector"),
        ("quantizer.codebook.clone() if", "quantizer.codebook if", "test_quantization_vector"),
        ("chosen = noisy.argmax(", "chosen = torch.softmax(noisy / temperature, dim).argmax(", "test_quantization"),
        ("(2 * along_origin - both)", "(2 * along_ends - both)", "test_quantization_vector"),
        ("if quantizer.training and indices.numel():", "if indices.numel():", "test_quantization_vector"),
        ("sums - n[:, None] * codebook", "sums - codebook", "test_quantization_vector"),
        ("dead = counts < below\n", "dead = counts > below\n", "test_quantization_vector"),
        ("remainder = remainder - stop_gradient(codes, RESIDUAL)", "pass", "test_quantization_vector"),
        ("offset = 0.5 * (1 - levels % 2)", "offset = 0.5 * (levels % 2)", "test_quantization"),
        ("slopes = slope(wide(constant))", "slopes = slope(wide(x))", "test_quantization_spikes"),
        ("else kept * (1 - fired)", "else kept * fired", "test_quantization_spikes"),
    ],
    "policy_gradient": [
        ("offsets = rewards - rewards[..., :1]", "offsets = rewards", "test_policy_gradient_edges"),
        (
            "errors = weights * (torch.addcmul(r_t, discount_t, v_t) - v_tm1)",
            "errors = torch.addcmul(r_t, discount_t, v_t) - v_tm1",
            "test_policy_gradient_numbers",
        ),
        (
            "x[..., :-step], decay, x[..., step:]), x[..., -step:]]",
            "x[..., :-step], decay, x[..., step:]), 0 * x[..., -step:]]",
            "test_policy_gradient_numbers",
        ),
        ("centred * (k / (k - 1)) if", "centred * (k / k) if", "test_policy_gradient_numbers"),
        ("log_prob.clamp(min=_LOG_OF_ZERO)", "log_prob", "test_policy_gradient_edges"),
        ("else wide(log_prob_t).where(mask_t, 0)", "else wide(log_prob_t)", "test_policy_gradient_edges"),
        (
            "log_slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))",
            "log_slope = (1 - u.tanh().square()).log()",
            "test_policy_gradient_edges",
        ),
        ('reduction="none", ignore_index=_NO_ACTION', 'reduction="none"', "test_policy_gradient_edges"),
    ],
    "runner": [
        ("if key not in WITHOUT_EFFECT}", "if key in WITHOUT_EFFECT}", "test_records test_report"),
        (
            "left = [unit for unit in records.values() if self._force or not self._is_finished(unit)]",
            "left = [*records.values()]",
            "test_experiments",
        ),
        (
            "if not math.isfinite(value):\n            diverged_at",
            "if math.isnan(value):\n            diverged_at",
            "test_experiments",
        ),
        (
            "step % config.evaluate_every == 0 or step == config.steps",
            "step % config.evaluate_every == 0",
            "test_experiments",
        ),
        ('return "higher is better" if records', 'return "lower is better" if records', "test_report"),
        (
            'for name in moved if name.startswith(f"{network}.") and moved[name]]',
            "for name in moved if moved[name]]",
            "test_zoo",
        ),
    ],
    "weighting": [
        ("missed.clamp(min=torch.finfo(missed.dtype).tiny) ** gamma", "missed**gamma", "test_weighting_focal"),
        ("same & ~torch.eye(len(labels)", "same | torch.eye(len(labels)", "test_weighting_circle"),
        (
            "losses.clamp(min=torch.finfo(losses.dtype).tiny))",
            "losses)",
            "test_weighting_balancing",
        ),
        ("create_graph=graph, mat", "create_graph=False, mat", "test_weighting_balancing"),
        (
            "        if not self.training:\n            scale, shift = self._with",
            "        if False:\n            scale, shift = self._with",
            "test_weighting_statistics",
        ),
        ("f = -torch.logsumexp(to_rows + g", "f = -torch.logsumexp(kernel + g", "test_weighting_transport"),
        ("(target or model)(x + _as(earlier, x)", "model(x + _as(earlier, x)", "test_weighting_consistency"),
    ],
    "stochastic": [
        ("    if not broadcasts(distribution.batch_shape, value.shape):\n", "    if False:\n", "test_stochastic"),
        (
            "of_the_others(wide(costs), torch.cumsum, torch.add)",
            "costs.sum(0).expand_as(costs)",
            "test_stochastic",
        ),
        ("(1 - magic_box(log_probs)) * baselines", "(magic_box(log_probs) - 1) * baselines", "test_stochastic"),
        (
            "        return stop_gradient(part, DENSITY_PARAMETERS)\n",
            "        return part.detach()\n",
            "test_stochastic",
        ),
        ("weights * terms.masked_fill(weights == 0, 0.0)", "weights * terms", "test_stochastic"),
        ("before = scan(values[:-1], 0)", "before = scan(values[1:], 0)", "test_stochastic"),
        ("softplus(second + softplus(sign * logits))", "softplus(second + softplus(logits))", "test_stochastic"),
    ],
}


@dataclass(frozen=True)
class Mutant:
    """One line of a room broken, and the files of tests that have to notice."""

    room: str
    line: str
    broken: str
    tests: tuple[str, ...]

    def file(self, root: Path) -> Path:
        """Return the file in which the line stands."""
        counts = {path: text.count(self.line) for path, text in texts(root).items()}
        found = [path for path, count in counts.items() for _ in range(count)]
        if len(found) != 1:
            raise LookupError(f"The line of a mutant should occur once. Found {self.line!r} {len(found)} times.")
        return found[0]

    def killer(self, root: Path) -> str:
        """Break the line below `root`, return the first test that fails, and mend the line."""
        file = self.file(root)
        whole = file.read_text("utf-8")
        file.write_text(whole.replace(self.line, self.broken), "utf-8")
        try:
            return first_failure(root, self.tests)
        finally:
            file.write_text(whole, "utf-8")


MUTANTS = [
    Mutant(room, line, broken, tuple(tests.split())) for room, rows in TABLE.items() for line, broken, tests in rows
]


def sources(root: Path) -> list[Path]:
    """Return the files that mutants may break."""
    return [path for source in SOURCES for path in sorted((root / source).rglob("*.py"))]


@functools.cache
def texts(root: Path) -> dict[Path, str]:
    """Return the files that mutants may break, with their texts when all lines are whole."""
    return {path: path.read_text("utf-8") for path in sources(root)}


def first_failure(root: Path, tests: tuple[str, ...]) -> str:
    """Return the first test that fails below `root`, or nothing if all of these files pass."""
    files = [str(path) for name in tests for path in (root / "tests").rglob(f"{name}.py")]
    options = ["-x", "-q", "-rfE", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "600"]
    # Without kept bytecode: a line may be broken and mended within the second that Python tells versions apart by.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode != 1 or not failed:
        raise RuntimeError(f"Tests should run and fail. They did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[0]


def copied(root: Path) -> Path:
    """Copy the project into a new folder."""
    for name in (*SOURCES, "tests", "configs", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in ("pyproject.toml", "conftest.py", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    return root


def main(rooms: list[str]) -> int:
    """Try the mutants of the rooms named, or all, one a core at a time; return how many survive."""
    if unknown := set(rooms) - set(TABLE):
        sys.exit(f"A room should be one of {', '.join(TABLE)}. Found {', '.join(sorted(unknown))}.")
    chosen = [mutant for mutant in MUTANTS if not rooms or mutant.room in rooms]
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def tried(mutant: Mutant) -> tuple[str, float]:
        root, started = copies.get(), time.perf_counter()
        try:
            return mutant.killer(root), time.perf_counter() - started
        finally:
            copies.put(root)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for number in range(os.cpu_count() or 1):
            copies.put(copied(Path(folder) / str(number)))
        if broken := first_failure(copied(Path(folder) / "whole"), tuple(sorted({t for m in chosen for t in m.tests}))):
            sys.exit(f"The tests should pass without a mutant. Found {broken} failing.")
        survivors = 0
        for mutant, (killer, seconds) in zip(chosen, pool.map(tried, chosen), strict=True):
            survivors += not killer
            fate = f"killed by {killer}" if killer else "SURVIVES"
            print(f"{mutant.room}: {mutant.broken.strip()!r} {fate} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
