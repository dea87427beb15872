"""Settings of the documentation, its directives for blocks, experiments, zoo and atlas, and its formulas."""

import contextlib
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

if TYPE_CHECKING:
    from toolkit.runner._zoo import Program

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "stopgrad"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "notebooks"]
html_theme = "furo"
html_title = "stopgrad"
html_show_copyright = False
html_math_renderer = "mathml"
default_role = "py:obj"  # `name` in a docstring is a link where there is something to link to

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_use_ivar = True

# Scripts that the build runs, each as a page with its pictures and as a notebook to download.
sphinx_gallery_conf = {
    "examples_dirs": "notebooks",
    "gallery_dirs": "gallery",
    "filename_pattern": "",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "min_reported_time": 60,
    "show_memory": False,
    "write_computation_times": False,
}

# Methods that scikit-learn adds to each estimator, with links into its own documentation.
autodoc_default_options = {
    "exclude-members": "set_fit_request, set_partial_fit_request, set_predict_request, set_predict_proba_request, "
    "set_score_request, set_score_samples_request, set_decode_request"
}


class Blocks(SphinxDirective):
    """Lists the blocks whose names begin with the argument, each with its reason; all of them without one."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a definition list."""
        from toolkit import declared_blocks
        from toolkit.runner._listing import import_everything

        import_everything()
        prefix = self.arguments[0] if self.arguments else ""
        entries = [
            nodes.definition_list_item(
                "",
                nodes.term("", "", nodes.literal(text=block.name)),
                nodes.definition("", nodes.paragraph(text=block.why)),
            )
            for block in declared_blocks().values()
            if block.why and block.name.startswith(prefix)
        ]
        if not entries:
            raise self.error(f"`blocks` should begin with a known name. Found {prefix!r}.")
        return [nodes.definition_list("", *entries)]


class Zoo(SphinxDirective):
    """Shows the programs of a folder: the story of each, the findings of an audit, and the code."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a section for each program."""
        from toolkit.runner._zoo import examine, read_programs

        with contextlib.chdir(ROOT):  # places are named as a reader of the repository has them
            return [self._section(program, examine(program)) for program in read_programs(Path(self.arguments[0]))]

    def _section(self, program: "Program", examined: dict[str, Any]) -> nodes.section:
        self.env.note_dependency(str(ROOT / program.path))
        section = nodes.section(ids=[f"zoo-{examined['name'].replace('_', '-')}"])
        section += nodes.title("", "", *self.parse_inline(examined["title"].rstrip("."))[0])
        section += nodes.paragraph("", "", *self.parse_inline(examined["story"])[0])
        found = nodes.bullet_list()
        for complaint in examined["buggy"]["complaints"]:
            found += nodes.list_item("", nodes.paragraph(text=complaint))
        section += [nodes.paragraph(text="An audit finds in the buggy program, and not in the fixed one:"), found]
        code = program.source.partition('"""\n\nimport')
        section += nodes.literal_block("", "import" + code[2].rstrip(), language="python")
        threads = nodes.paragraph(text="Met in ")
        for index, source in enumerate(examined["sources"]):
            address = f"https://github.com/{source.replace('#', '/issues/')}"
            threads += [nodes.Text(", " if index else ""), nodes.reference("", source, refuri=address)]
        section += threads
        return section


class Atlas(SphinxDirective):
    """Shows the records of the atlas: figures, and a table that sorts by a column where scripts run."""

    def run(self) -> list[nodes.Node]:
        """Return a paragraph and a table."""
        from benchmarks.atlas.page import figures, table
        from benchmarks.atlas.records import RECORDS, read_records

        for path in RECORDS.glob("*.json"):
            self.env.note_dependency(str(path))
        records = read_records()
        return [nodes.paragraph(text=figures(records)), nodes.raw("", table(records), format="html")]


class BlockAtlas(SphinxDirective):
    """Shows every block with its reason and its measured effect, as a table that sorts where scripts run."""

    def run(self) -> list[nodes.Node]:
        """Return a table."""
        from block_atlas import table

        return [nodes.raw("", table(), format="html")]


class Experiments(SphinxDirective):
    """Shows every config: its title, its finding, the blocks that it opens, and the command that runs it."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each config."""
        from block_atlas import read_configs

        return [self._section(name, config) for name, config in read_configs().items()]

    def _section(self, name: str, config: dict[str, Any]) -> nodes.section:
        self.env.note_dependency(str(ROOT / "configs" / f"{name}.toml"))
        section = nodes.section(ids=[f"config-{name.replace('_', '-')}"])
        section += nodes.title("", "", *self.parse_inline(config["title"])[0])
        section += nodes.paragraph("", "", *self.parse_inline(" ".join(config["finding"].split()))[0])
        opened = nodes.paragraph(text="With each block, and without: ")
        for index, entry in enumerate(config["open"]):
            together = " with ".join([entry] if isinstance(entry, str) else entry)
            opened += [nodes.Text(", " if index else ""), nodes.literal(text=together)]
        section += [opened, nodes.literal_block("", f"stopgrad run configs/{name}.toml", language="console")]
        return section


def formula(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    try:
        drawn = tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s, in %s", error, node.astext(), location=node)
    else:
        self.body.append(f'<div class="math" style="padding: 0.5em 0">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register the directives and the writer of formulas."""
    app.add_directive("blocks", Blocks)
    app.add_directive("zoo", Zoo)
    app.add_directive("atlas", Atlas)
    app.add_directive("block-atlas", BlockAtlas)
    app.add_directive("experiments", Experiments)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
