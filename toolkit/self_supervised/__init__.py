r"""Self-supervised and semi-supervised learning: a network whose targets are its own outputs.

Each loss holds the target constant: the embedding of another view, the output of a teacher, a code, a pseudo-label.
Without the stop most of these losses have a trivial minimum, a constant output.

- `prediction`: SimSiam, BYOL, data2vec.
- `contrast`: momentum contrast with its queue.
- `clusters`: DINO with its centre, SwAV with Sinkhorn codes.
- `labels`: mean teacher, FixMatch, soft and sharpened pseudo-labels.
- `teacher`: running averages of a student, parameters and buffers.

The losses are means over samples. They take embeddings (\*, D) or logits (\*, K); networks are the caller's.
A ValueError names an argument that is not a floating-point tensor.
"""

from toolkit.self_supervised.clusters import (
    DINO_CENTER,
    DINO_TARGET,
    SWAV_CODES,
    DINOLoss,
    dino_center,
    dino_loss,
    sinkhorn,
    swav_loss,
)
from toolkit.self_supervised.contrast import MOCO_KEY, MOCO_QUEUE, KeyQueue, enqueue, moco_loss
from toolkit.self_supervised.labels import (
    HARD_LABEL,
    MEAN_TEACHER_TARGET,
    SOFT_LABEL,
    fixmatch_loss,
    mean_teacher_loss,
    soft_label_loss,
)
from toolkit.self_supervised.prediction import (
    BYOL_TARGET,
    DATA2VEC_TARGET,
    SIMSIAM_TARGET,
    byol_loss,
    data2vec_loss,
    negative_cosine_similarity,
    simsiam_loss,
)
from toolkit.self_supervised.teacher import EMA_STUDENT, EMATeacher, ema

__all__ = [
    "BYOL_TARGET",
    "DATA2VEC_TARGET",
    "DINO_CENTER",
    "DINO_TARGET",
    "EMA_STUDENT",
    "HARD_LABEL",
    "MEAN_TEACHER_TARGET",
    "MOCO_KEY",
    "MOCO_QUEUE",
    "SIMSIAM_TARGET",
    "SOFT_LABEL",
    "SWAV_CODES",
    "DINOLoss",
    "EMATeacher",
    "KeyQueue",
    "byol_loss",
    "data2vec_loss",
    "dino_center",
    "dino_loss",
    "ema",
    "enqueue",
    "fixmatch_loss",
    "mean_teacher_loss",
    "moco_loss",
    "negative_cosine_similarity",
    "simsiam_loss",
    "sinkhorn",
    "soft_label_loss",
    "swav_loss",
]
