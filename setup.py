"""Names the packages: `configs/` is installed as `flaxformer_mt/configs/`.

Everything else is in `pyproject.toml`, where found and mapped packages cannot be combined.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["flaxformer_mt*"]), "flaxformer_mt.configs"],
    package_dir={"flaxformer_mt.configs": "configs"},
)
