"""Policy gradients, their critics, and the losses of soft and deterministic actors."""

from typing import Any

from peer_programs._parts import Arrays, log_softmax

ROOM = "policy_gradient"
TRACE = 0.7


def relu(np: Any, x: Any) -> Any:
    return np.where(x > 0, x, 0 * x)


def at_most(np: Any, x: Any, bound: float) -> Any:
    return np.where(x < bound, x, 0 * x + bound)


def total(np: Any, x: Any) -> Any:
    return np.sum(x, axis=-1, keepdims=True)


def policy_gradient(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_prob = np.sum(c["one_hot"] * log_softmax(np, p["logits"]), axis=-1)
    return -np.mean(c["w"] * log_prob * stop("policy_gradient.advantage", p["adv"]))


def actor_critic(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_prob = np.sum(c["one_hot"] * log_softmax(np, p["logits"]), axis=-1)
    advantages = stop("policy_gradient.value_target", p["g"]) - p["v"]
    return np.mean(0.35 * advantages**2 - log_prob * stop("policy_gradient.advantage", advantages))


def gaussian_scores(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    std = np.exp(p["log_std"])
    z = (stop("policy_gradient.action", p["mean"] + std * c["draws"]) - p["mean"]) / std
    log_prob = np.sum(-0.5 * z**2 - p["log_std"] - 0.9189385332046727, axis=-1)
    return np.sum(c["on_rows"] * log_prob)


def expected_policy_gradient(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_pi = log_softmax(np, p["logits"])
    advantages = p["q"] - total(np, np.exp(log_pi) * p["q"])
    weights = stop("policy_gradient.sampling", np.exp(log_pi)) * stop("policy_gradient.advantage", advantages)
    return -np.mean(np.sum(weights * log_pi, axis=-1))


def q_policy_gradient(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    pi = np.exp(log_softmax(np, p["logits"]))
    return -np.mean(np.sum(pi * stop("policy_gradient.advantage", p["q"] - total(np, pi * p["q"])), axis=-1))


def regret_matching(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    pi = np.exp(log_softmax(np, p["logits"]))
    positive = relu(np, p["q"] - total(np, pi * p["q"]))
    return -np.mean(np.sum(pi * stop("policy_gradient.advantage", positive), axis=-1))


def regret(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    pi, q = np.exp(log_softmax(np, p["logits"])), stop("policy_gradient.action_values", p["q"])
    return np.mean(np.sum(relu(np, q - total(np, pi * q)), axis=-1))


def ratio_to_itself(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return -np.mean(c["w"] * np.exp(p["log_prob"] - stop("policy_gradient.old_policy", p["log_prob"])))


def of_clipped(np: Any, ratios: Any, advantages: Any) -> Any:
    """Return PPO's objective, by the sign of the advantage."""
    low = np.where(ratios > 0.8, ratios, 0 * ratios + 0.8)
    return advantages * np.where(advantages > 0, at_most(np, ratios, 1.2), low)


def clipped_surrogate(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return -np.mean(of_clipped(np, p["ratios"], stop("policy_gradient.advantage", p["adv"])))


def grouped(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    ratios = np.exp(p["log_prob"] - stop("policy_gradient.old_policy", p["log_prob"]))
    x = c["reference"] - p["log_prob"]
    advantages = stop("policy_gradient.advantage", p["adv"])[:, None] + 0 * ratios
    tokens = 0.3 * (np.exp(x) - 1 - x) - of_clipped(np, ratios, advantages)
    return np.mean(np.sum(c["mask"] * tokens, axis=-1) / np.sum(c["mask"], axis=-1))


def off_policy(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    rho = stop("policy_gradient.importance_weights", np.exp(p["log_prob"] - c["behaviour"]))
    return -np.mean(rho * p["log_prob"] * stop("policy_gradient.advantage", p["adv"]))


def kl_penalties(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x = stop("policy_gradient.reference_policy", p["reference"]) - p["log_prob"]
    return np.sum(c["w"] * (-x + 0.25 * x**2 + 2.0 * (np.exp(x) - 1 - x)))


def reverse_kl(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return np.mean(stop("policy_gradient.log_ratio", p["log_prob"] - p["reference"]) * p["log_prob"])


def discounted(np: Any, x: Any, factors: Any) -> Any:
    found = [x[-1]]
    for t in range(x.shape[0] - 2, -1, -1):
        found.append(x[t] + factors[t] * found[-1])
    return np.stack(found[::-1])


def lambda_advantages(np: Any, p: Arrays, c: Arrays) -> Any:
    return discounted(np, c["r"] + c["d"] * p["v"][1:] - p["v"][:-1], TRACE * c["d"])


def generalized_advantages(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    found = stop("policy_gradient.advantage", lambda_advantages(np, p, c))
    return np.sum(c["w"] * found) + 0.5 * np.sum(p["v"] ** 2)


def generalized_values(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    targets = stop("policy_gradient.value_target", lambda_advantages(np, p, c) + p["v"][:-1])
    return 0.5 * np.mean((targets - p["v"][:-1]) ** 2)


def vtrace_targets(np: Any, stop: Any, p: Arrays, c: Arrays) -> Any:
    v, rho = p["v"], p["rho"]
    errors = at_most(np, rho, 2.0) * (c["r"] + c["d"] * v[1:] - v[:-1])
    errors = discounted(np, errors, TRACE * c["d"] * at_most(np, rho, 1.0))
    return stop("policy_gradient.vtrace_target", v[:-1] + errors)


def vtrace_errors(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return 0.5 * np.sum((vtrace_targets(np, stop, p, c) - p["v"][:-1]) ** 2)


def vtrace_advantages(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    v, targets = p["v"], vtrace_targets(np, stop, p, c)
    later = np.concatenate([TRACE * targets[1:] + (1 - TRACE) * v[1:-1], v[4:]], axis=0)
    q = c["r"] + c["d"] * later
    advantages = at_most(np, p["rho"], 1.2) * (q - v[:-1])
    held = [stop("policy_gradient.advantage", each) for each in (advantages, q)]
    return np.sum(c["w"] * (held[0] + 0.3 * held[1] + 0.1 * (targets - v[:-1])))


def drawn(np: Any, p: Arrays, c: Arrays) -> tuple[Any, Any]:
    action = p["mean"] + np.exp(p["log_std"]) * c["normal"]
    log_prob = -0.5 * c["normal"] ** 2 - p["log_std"] - 0.9189385332046727
    return log_prob, -0.5 * p["k"] * (action - 1) ** 2


def soft_actor(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_prob, q = drawn(np, p, c)
    return np.mean(stop("policy_gradient.temperature", np.exp(p["log_alpha"])) * log_prob - q)


def soft_critic(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_prob, q = drawn(np, p, c)
    targets = stop("policy_gradient.soft_target", 0.5 + 0.99 * (q - np.exp(p["log_alpha"]) * log_prob))
    return 0.5 * np.mean((-0.5 * p["k"] * (c["taken"] - 1) ** 2 - targets) ** 2)


def soft_temperature(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_prob, _ = drawn(np, p, c)
    return -np.mean(np.exp(p["log_alpha"]) * stop("policy_gradient.entropy_gap", log_prob - 1.0))


def deterministic(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    matrix = stop("policy_gradient.critic", p["matrix"])
    return 0.5 * np.sum(p["action"][:, None] * matrix * p["action"][None, :])


def improved_action(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    norm = np.sqrt(total(np, p["slope"] ** 2))
    bounded = p["slope"] / np.where(norm > 1.0, norm, 0 * norm + 1.0)
    return 0.5 * np.sum((stop("policy_gradient.action_target", p["action"] + bounded) - p["action"]) ** 2)


def pessimistic_critics(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    smaller = np.where(p["later"][0] < p["later"][1], p["later"][0], p["later"][1])
    targets = stop("policy_gradient.clipped_target", c["r"] + c["d"] * smaller)
    return 0.5 * np.sum(np.mean((p["q"] - targets) ** 2, axis=-1))


PROGRAMS = {
    program: tuple(f"{ROOM}.{block}" for block in blocks)
    for program, blocks in {
        policy_gradient: ("advantage",),
        actor_critic: ("advantage", "value_target"),
        gaussian_scores: ("action",),
        expected_policy_gradient: ("sampling", "advantage"),
        q_policy_gradient: ("advantage",),
        regret_matching: ("advantage",),
        regret: ("action_values",),
        ratio_to_itself: ("old_policy",),
        clipped_surrogate: ("advantage",),
        grouped: ("advantage", "old_policy"),
        off_policy: ("importance_weights", "advantage"),
        kl_penalties: ("reference_policy",),
        reverse_kl: ("log_ratio",),
        generalized_advantages: ("advantage",),
        generalized_values: ("value_target",),
        vtrace_errors: ("vtrace_target",),
        vtrace_advantages: ("advantage",),
        soft_actor: ("temperature",),
        soft_critic: ("soft_target",),
        soft_temperature: ("entropy_gap",),
        deterministic: ("critic",),
        improved_action: ("action_target",),
        pessimistic_critics: ("clipped_target",),
    }.items()
}
