"""Draws the picture of README, docs/stop.svg: ``python docs/pictures.py``. Its curves are those of docs/tutorial.md."""

import re
import sys
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from toolkit.runner._chart import PALETTE, STYLE, WIDTH, text  # noqa: E402
from toolkit.runner._figures import COLOURS, Band, draw_curves  # noqa: E402
from toolkit.runner._site import sketch  # noqa: E402

FORGOTTEN = "    with torch.no_grad():  # left over from the time when the encoder was frozen\n    "


def losses(program: str) -> np.ndarray:
    """Return the loss at each step of the tutorial's first program."""
    values: list[float] = []
    exec(
        program.replace("optimizer.zero_grad()", "values.append(loss.item())\n    optimizer.zero_grad()"),
        {"values": values},
    )
    return np.asarray([values])


def main() -> None:
    """Write the picture."""
    program = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text("utf-8"), re.DOTALL)[0]
    stuck = losses(program)
    repaired = losses(program.replace(FORGOTTEN, "").replace("assert", "# assert"))
    steps = np.arange(stuck.size, dtype=float)
    bands = [Band("with the stop", steps, stuck, COLOURS[0]), Band("without it", steps, repaired, COLOURS[1])]
    curves = draw_curves("loss", "step", bands, (), told=False)
    labels = text(308, 50, "with a forgotten no_grad", "end") + text(225, 150, "without it", "end")
    title = text(44, 14, "loss of a training script (logarithmic), by step", kind="strong")
    parts = "".join(
        f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{height}" {part.removeprefix("<svg")}'
        for x, y, height, part in ((10, 50, 118, sketch()), (350, 20, 200, curves.replace("</svg>", f"{labels}</svg>")))
    )
    root = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 690 225">'
    frame = '<rect width="690" height="225" rx="8" style="fill: var(--paper)"/>'
    moved = f'<g transform="translate(350 0)">{title}</g>'
    (DOCS / "stop.svg").write_text(f"{root}<style>{PALETTE} {STYLE}</style>{frame}{parts}{moved}</svg>\n", "utf-8")


if __name__ == "__main__":
    main()
