"""Passes settings.ini to setuptools; static metadata (name, python version) is repeated in pyproject.toml."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_namespace_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
settings = parser["DEFAULT"]
package = settings["lib_path"]


def lines(key):
    return [line.strip() for line in settings[key].splitlines() if line.strip()]


version = re.search(
    r'^__version__ = "(.+)"', (here / package / "__init__.py").read_text("utf-8"), re.MULTILINE
)[1]
setup(
    version=version,
    description=settings["description"],
    long_description=(here / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    keywords=settings["keywords"],
    license_expression=settings["license"],
    license_files=["LICENSE"],
    classifiers=lines("classifiers"),
    packages=find_namespace_packages(include=[package, f"{package}.*"], exclude=["*.__pycache__"]),
    # an editable installation is then a path in a .pth file, so that the package is found from the folder
    # above a clone too, where the clone's own name looks like a package
    package_dir={"": "."},
    package_data={package: lines("package_data")},
    install_requires=lines("requirements"),
    extras_require={
        key.split("_")[0]: lines(key) for key in settings if key.endswith("_requirements")
    },
    entry_points={"console_scripts": lines("console_scripts")},
    zip_safe=False,
)
