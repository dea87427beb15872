"""The command `stopgrad`, as ``python -m experiments``."""

from toolkit.runner._command import main

main(prog_name="python -m experiments")
