"""The image networks of the recipes, by name."""

from collections import OrderedDict
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet50, vgg16, vgg16_bn
from torchvision.models.vgg import cfgs as vgg_layers
from torchvision.models.vgg import make_layers as make_vgg_layers

Architecture = Literal["resnet8", "resnet50", "vgg16", "vgg16_bn", "vgg16_small"]


def build_network(architecture: Architecture, num_classes: int) -> nn.Module:
    """Build a randomly initialised classifier of 3-channel images.

    Args:
        architecture: ``"resnet50"``, ``"vgg16"`` and ``"vgg16_bn"`` are torchvision's; the latter has batch norm and
            stands higher learning rates. ``"vgg16_small"`` has its convolutions and a head of 0.3 M parameters in place
            of 120 M, for images of 32 x 32 pixels. ``"resnet8"`` is a toy of 78 thousand parameters for tests.
        num_classes: Length of the output.

    Returns:
        A module from ``float[batch, 3, height, width]`` to logits ``float[batch, num_classes]``.

    Raises:
        ValueError: If the architecture is unknown.
    """
    if architecture == "resnet50":
        # A zero gamma in the last norm of every residual block makes the first steps nearly those of a shallow net:
        # without it, ResNet-50 with small batches diverges at learning rates that are fine later.
        network: nn.Module = resnet50(num_classes=num_classes, zero_init_residual=True)
    elif architecture == "vgg16":
        network = vgg16(num_classes=num_classes)
    elif architecture == "vgg16_bn":
        network = vgg16_bn(num_classes=num_classes)
    elif architecture == "vgg16_small":
        network = _vgg16_small(num_classes)
    elif architecture == "resnet8":
        network = ResNet8(num_classes)
    else:
        raise ValueError(f"architecture={architecture!r} is unknown; choose one of {', '.join(get_args(Architecture))}")
    return network


class ResNet8(nn.Module):
    """Three residual blocks of widths 16, 32, 64: the smallest of the CIFAR ResNets (He et al. 2015, section 4.2)."""

    def __init__(self, num_classes: int) -> None:
        """Initialise with random weights; ``num_classes`` is the length of the output."""
        super().__init__()
        self.stem = _conv_norm(3, 16, kernel=3)
        self.blocks = nn.Sequential(_Residual(16, 16), _Residual(16, 32, stride=2), _Residual(32, 64, stride=2))
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``float[batch, 3, height, width]`` to logits ``float[batch, num_classes]``."""
        features: Tensor = self.blocks(F.relu(self.stem(images)))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class _Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _conv_norm(in_channels, out_channels, kernel=3, stride=stride)
        self.second = _conv_norm(out_channels, out_channels, kernel=3)
        same_shape = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same_shape else _conv_norm(in_channels, out_channels, kernel=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the image size (but for the stride), with batch norm in place of a bias."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _vgg16_small(num_classes: int) -> nn.Module:
    """VGG-16's convolutions with batch norm, a global average and a 512-512-``num_classes`` head."""
    return nn.Sequential(
        OrderedDict(
            features=make_vgg_layers(vgg_layers["D"], batch_norm=True),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            hidden=nn.Linear(512, 512),
            relu=nn.ReLU(inplace=True),
            head=nn.Linear(512, num_classes),
        )
    )
