"""Stands in for verl in the root of this repository: python -m verl.trainer.main_ppo, and from verl import DataProto.

An installed verl goes first, wherever it is on sys.path. extras/verl/names.yaml lists the names that are here.
"""

import configs.process  # noqa: F401, isort: skip

import sys
from importlib.util import module_from_spec

from configs.import_utils import Imports, find

if (spec := Imports.find_installed(__name__)) is None:
    stand_ins = find("optional", __name__)
    stand_ins.install()
    spec = stand_ins.find_spec(__name__)
sys.modules[__name__] = module_from_spec(spec)  # which `import verl` gives
spec.loader.exec_module(sys.modules[__name__])
