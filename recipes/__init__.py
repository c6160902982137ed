"""Models and data to try compression on, importable by ``class_path`` from a YAML file.

They are ordinary LightningModules and LightningDataModules. The only thing in here that knows about compression is the
choice of an optimizer that goes with the way gradients travel.
Needs the extra ``pip install "lightning-compress[recipes]"``.
"""

from .bert import BertClassifier, BertMaskedLM, BertQuestionAnswering
from .data import ImageData
from .mlm_data import MLMData
from .squad_data import SquadData
from .text_class_data import TextClassData
from .vision import ImageClassifier

__all__ = [
    "BertClassifier",
    "BertMaskedLM",
    "BertQuestionAnswering",
    "ImageClassifier",
    "ImageData",
    "MLMData",
    "SquadData",
    "TextClassData",
]
