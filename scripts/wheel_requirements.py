"""Print what a wheel (or a setup.cfg) requires here, one requirement a line, without the packages named.

wheel_requirements.py WHEEL [SKIP ...]
wheel_requirements.py --setup-cfg SETUP.CFG [SKIP ...]
"""

from __future__ import annotations

import configparser
import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def of_wheel(path: str) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    return metadata.get_all("Requires-Dist") or []


def of_setup_cfg(path: str) -> list[str]:
    config = configparser.ConfigParser()
    config.read(path)
    return config["options"]["install_requires"].split("\n")


def main() -> None:
    arguments = sys.argv[1:]
    lines = of_setup_cfg(arguments[1]) if arguments[0] == "--setup-cfg" else of_wheel(arguments[0])
    skip = {canonicalize_name(name) for name in arguments[1:]}
    for line in filter(None, map(str.strip, lines)):
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) in skip:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
