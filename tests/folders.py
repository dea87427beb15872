"""Where the project is, for tests in any folder of it."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CONFIGS = ROOT / "configs"
