"""Models and data to try compression on, importable by ``class_path`` from a YAML file.

They are ordinary LightningModules and LightningDataModules: nothing in here knows about compression.
Needs the extra ``pip install "lightning-compress[recipes]"``.
"""

from .data import ImageData
from .vision import ImageClassifier

__all__ = ["ImageClassifier", "ImageData"]
