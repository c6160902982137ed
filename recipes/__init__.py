"""Models and data to try compression on, importable by ``class_path`` from a YAML file.

They are ordinary LightningModules and LightningDataModules. The only thing in here that knows about compression is the
choice of an optimizer that goes with Deep Gradient Compression.
Needs the extra ``pip install "lightning-compress[recipes]"``.
"""

from .data import ImageData
from .vision import ImageClassifier

__all__ = ["ImageClassifier", "ImageData"]
