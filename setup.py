# SPDX-License-Identifier: Apache-2.0
"""Maps the two import packages; all metadata is in pyproject.toml.

``kernels/`` is a source root without an ``__init__.py``: a top-level package called ``kernels`` would shadow the
library of that name which transformers probes for, whenever the repository root is on ``sys.path``.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fastprompt", "fastprompt.*"]), "fastprompt_kernels"],
    package_dir={"fastprompt_kernels": "kernels/fastprompt_kernels"},
    package_data={
        "fastprompt": ["py.typed", "recipes/*.yaml"],
        "fastprompt_kernels": ["py.typed"],
    },
)
