"""The command `stopgrad`, as ``python -m experiments``."""

from toolkit.runner._command import main

if __name__ == "__main__":
    main(prog_name="python -m experiments")
