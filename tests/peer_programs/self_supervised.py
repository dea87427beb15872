"""Self-supervised learning: each loss holds the target that the network made itself."""

from typing import Any

from peer_programs._parts import Arrays, log_softmax, unit


def probabilities(np: Any, x: Any) -> Any:
    return np.exp(log_softmax(np, x))


def cosine(np: Any, x: Any, y: Any) -> Any:
    return np.mean(np.sum(unit(np, x) * unit(np, y), axis=-1))


def pairs_of_views(np: Any, targets: Any, log_answers: Any) -> Any:
    """The cross entropy of a view and the target of another one, the mean over all such pairs."""
    pairs = [(t, s) for t in range(targets.shape[0]) for s in range(log_answers.shape[0]) if t != s]
    return sum(-np.mean(np.sum(targets[t] * log_answers[s], axis=-1)) for t, s in pairs) / len(pairs)


def simsiam(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z1, z2 = (stop("self_supervised.simsiam_target", p[name]) for name in ("z1", "z2"))
    return -0.5 * cosine(np, p["p1"], z2) - 0.5 * cosine(np, p["p2"], z1)


def byol(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    error = unit(np, p["prediction"]) - unit(np, stop("self_supervised.byol_target", p["projection"]))
    return np.mean(np.sum(error * error, axis=-1))


def running_teacher(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    teacher = 0.9 * c["past"] + 0.1 * stop("self_supervised.ema_student", p["w"])
    return np.sum(c["slopes"] * np.sin(teacher)) + np.sum(p["w"] * p["w"])


def data2vec(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    layers = stop("self_supervised.data2vec_target", p["layers"])
    centred = layers - np.mean(layers, axis=-1, keepdims=True)
    normal = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    error = p["prediction"] - np.mean(normal, axis=0)
    return np.mean(np.where(np.abs(error) <= 0.6, error * error / 1.2, np.abs(error) - 0.3))


def dino_of(np: Any, stop: Any, p: Arrays, center: Any) -> Any:
    target = probabilities(np, (stop("self_supervised.dino_target", p["teacher"]) - center) / 0.3)
    return pairs_of_views(np, target, log_softmax(np, p["student"] / 0.5))


def dino(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return dino_of(np, stop, p, c["center"])


def dino_with_its_batch(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    batch = np.mean(stop("self_supervised.dino_center", p["teacher"]), axis=(0, 1))
    return dino_of(np, stop, p, 0.8 * c["center"] + 0.2 * batch)


def contrast(np: Any, q: Any, k: Any, queue: Any) -> Any:
    positive = np.sum(q * k, axis=-1, keepdims=True)
    logits = np.concatenate([positive, np.matmul(q, np.transpose(queue))], axis=-1) / 0.7
    return -np.mean(log_softmax(np, logits)[:, 0])


def moco(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return contrast(np, p["q"], stop("self_supervised.moco_key", p["k"]), c["queue"])


def moco_later(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    earlier = stop("self_supervised.moco_queue", p["earlier"])
    return contrast(np, p["q"], c["k"], np.concatenate([c["queue"][2:], earlier], axis=0))


def swav(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    codes = np.exp(stop("self_supervised.swav_codes", p["scores"][:2]) / 0.3)
    for _ in range(3):
        codes = codes / np.sum(codes, axis=1, keepdims=True)
        codes = codes / np.sum(codes, axis=2, keepdims=True)
    return pairs_of_views(np, codes, log_softmax(np, p["scores"] / 0.4))


def mean_teacher(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    target = probabilities(np, stop("self_supervised.mean_teacher_target", p["teacher"]))
    error = probabilities(np, p["student"]) - target
    return np.mean(error * error)


def confident(np: Any, likely: Any, nats: Any) -> Any:
    return np.mean(np.where(np.max(likely, axis=-1) >= 0.55, nats, 0 * nats))


def fixmatch(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    likely = probabilities(np, stop("self_supervised.hard_label", p["weak"]))
    log_p = log_softmax(np, p["strong"])
    chosen = np.where(likely == np.max(likely, axis=-1, keepdims=True), log_p, 0 * log_p)
    return confident(np, likely, -np.sum(chosen, axis=-1))


def soft_label(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    weak = stop("self_supervised.soft_label", p["weak"])
    nats = -np.sum(probabilities(np, weak / 0.7) * log_softmax(np, p["strong"]), axis=-1)
    return confident(np, probabilities(np, weak), nats)


PROGRAMS = {
    simsiam: ("self_supervised.simsiam_target",),
    byol: ("self_supervised.byol_target",),
    running_teacher: ("self_supervised.ema_student",),
    data2vec: ("self_supervised.data2vec_target",),
    dino: ("self_supervised.dino_target",),
    dino_with_its_batch: ("self_supervised.dino_target", "self_supervised.dino_center"),
    moco: ("self_supervised.moco_key",),
    moco_later: ("self_supervised.moco_queue",),
    swav: ("self_supervised.swav_codes",),
    mean_teacher: ("self_supervised.mean_teacher_target",),
    fixmatch: ("self_supervised.hard_label",),
    soft_label: ("self_supervised.soft_label",),
}
