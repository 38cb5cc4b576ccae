"""Convolutional networks: those of torchvision, with its names of modules and parameters, and small ones.

    with torch.device("meta"):
        model = resnet50(inplace=True)  # torchvision's ReLUs write in place

K. He et al., "Deep residual learning for image recognition", https://arxiv.org/abs/1512.03385 (with the stride in the
3x3 convolution, as torchvision has it); G. Huang et al., "Densely connected convolutional networks",
https://arxiv.org/abs/1608.06993.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def _conv1x1(features_in: int, features_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(features_in, features_out, 1, stride, bias=False)


def _conv3x3(features_in: int, features_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(features_in, features_out, 3, stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(
        self, features_in: int, width: int, stride: int, downsample: nn.Module | None, inplace: bool
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(features_in, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut."""

    expansion = 4

    def __init__(
        self, features_in: int, width: int, stride: int, downsample: nn.Module | None, inplace: bool
    ) -> None:
        super().__init__()
        self.conv1 = _conv1x1(features_in, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, four rows of blocks, and a linear classifier."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: Sequence[int], inplace: bool, classes: int
    ) -> None:
        super().__init__()
        self._features = 64
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = self._row(block, 64, blocks[0], 1, inplace)
        self.layer2 = self._row(block, 128, blocks[1], 2, inplace)
        self.layer3 = self._row(block, 256, blocks[2], 2, inplace)
        self.layer4 = self._row(block, 512, blocks[3], 2, inplace)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)

    def _row(
        self, block: type[BasicBlock] | type[Bottleneck], width: int, blocks: int, stride: int, inplace: bool
    ) -> nn.Sequential:
        out = width * block.expansion
        downsample = None
        if stride != 1 or self._features != out:
            downsample = nn.Sequential(_conv1x1(self._features, out, stride), nn.BatchNorm2d(out))
        row = [block(self._features, width, stride, downsample, inplace)]
        row += [block(out, width, 1, None, inplace) for _ in range(1, blocks)]
        self._features = out
        return nn.Sequential(*row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet50(inplace: bool = True, classes: int = 1000) -> ResNet:
    """25,557,032 parameters with 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), inplace, classes)


class Depthwise(nn.Module):
    """A convolution by channel, then a layer of matrices, as in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class Inverted(nn.Module):
    """Wide inside, narrow outside, with a convolution by channel, as in MobileNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6 * channels, 1, bias=False),
            nn.BatchNorm2d(6 * channels),
            nn.ReLU6(),
            nn.Conv2d(6 * channels, 6 * channels, 3, padding=1, groups=6 * channels, bias=False),
            nn.BatchNorm2d(6 * channels),
            nn.ReLU6(),
            nn.Conv2d(6 * channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class CNN(nn.Module):
    """Two convolutions with batch norm, pooling and a classifier: what ranks spread of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norms[0](self.first(x))), 2)
        x = F.relu(self.norms[1](self.second(x)) + x, inplace=True)
        return self.head(x.flatten(1))


class ConvGRU(nn.Module):
    """A recurrence between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.rnn, self.last = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)), inplace=True)
        return self.last(self.rnn(h.transpose(1, 2))[0])
