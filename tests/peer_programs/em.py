"""The surrogate of EM."""

from typing import Any

from peer_programs._parts import Arrays, log_softmax


def em_surrogate(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    from_means = c["x"][:, None] - p["means"][None]
    log_density = -0.5 * np.sum(np.exp(p["log_precisions"]) * from_means * from_means, axis=-1)
    log_joint = log_softmax(np, p["logits"]) + log_density + 0.5 * np.sum(p["log_precisions"], axis=-1)
    held = np.exp(stop("em.responsibilities", log_softmax(np, log_joint)))
    return np.mean(np.sum(held * log_joint, axis=-1))


PROGRAMS = {
    em_surrogate: ("em.responsibilities",),
}
