"""Small models of other people's packages, for ``benchmarks.zoo``.

A family is a package with a builder for each of its models. Names of models need the package, but build nothing:

    model, batch = FAMILIES["timm"].models()["convnext"]()

Models are made from their configurations, without weights. Where a package has many sizes of a model, the smallest is
taken, and images are as small as the model takes them.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.harness.results import ROOT

Built = tuple[Any, ...]
"""A model and its batch."""

Builder = Callable[[], Built]

_TABLE = json.loads((ROOT / "benchmarks" / "data" / "zoo_models.json").read_text(encoding="utf-8"))
"""Configurations and batches of models of diffusers, and of adapters of PEFT."""

IMAGE_SIZES = (64, 96, 128, 160, 224, 256)
_ROWS = 2


@dataclass(frozen=True, slots=True)
class Family:
    """A package and those of its models that are trained.

    Attributes:
        package: what has to be importable.
        models: builders by name; called where the package is there.
        inference: of them, those whose inference is planned as well.
    """

    package: str
    models: Callable[[], Mapping[str, Builder]]
    inference: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Add up the mean squares of all outputs that have a gradient: a loss for models that have none."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    leaves = torch.utils._pytree.tree_leaves(out)
    parts = [t.float().square().mean() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack(parts).sum()


def _image(size: int, rows: int = _ROWS) -> torch.Tensor:
    return torch.randn(rows, 3, size, size)


def _smallest_image(build: Callable[[int], nn.Module], sizes: Iterable[int] = IMAGE_SIZES) -> Built:
    """Build the model, and a batch of the smallest images that it takes.

    Raises:
        RuntimeError: it takes none of them.
    """
    tried = []
    for size in sizes:
        torch.manual_seed(0)
        try:
            model = build(size).train()
            before = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                model(_image(size))
        except Exception as error:  # the message of a model that wants other images may be of any kind
            tried.append(f"{size}: {type(error).__name__}: {str(error)[:80]}")
            continue
        model.load_state_dict(before)  # the try has moved the running statistics of batch norms
        return model, (_image(size),)
    raise RuntimeError(f"takes no image ({'; '.join(tried)})")


# --- timm ------------------------------------------------------------------------------------------------------------

_SMALL_WORDS = (
    "test", "atto", "femto", "pico", "zepto", "nano", "xxs", "xxt", "xs", "xt", "tiny", "mini", "small",
)  # fmt: skip
"""Words in the names of timm's models, the smallest first."""


def smallest_name(names: Iterable[str]) -> str:
    """Return the name that promises the smallest model: by a word for its size, the numbers in it, and its length."""

    def rank(name: str) -> tuple[int, list[int], int, str]:
        words = re.split(r"[^a-z]+", name)
        size = next((i for i, word in enumerate(_SMALL_WORDS) if word in words), len(_SMALL_WORDS))
        if size == len(_SMALL_WORDS) and re.search(r"_(s|s0|t|b0|s1|m0|050)(_|$)", name):
            size -= 1
        return size, [int(n) for n in re.findall(r"\d+", name)], len(name), name

    return min(names, key=rank)


def _timm() -> dict[str, Builder]:
    """Return a builder for one model of each module of ``timm.models``."""
    import timm

    found = {}
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            found[module] = functools.partial(_timm_model, smallest_name(names))
    return found


def _timm_model(name: str) -> Built:
    import timm

    own = timm.get_pretrained_cfg(name)
    default = own.input_size[-1] if own is not None else 224

    def build(size: int) -> nn.Module:
        try:
            model: nn.Module = timm.create_model(name, img_size=size)
        except TypeError:  # fully convolutional: it takes any size
            model = timm.create_model(name)
        return model

    return _smallest_image(build, sorted({*IMAGE_SIZES, default}))


# --- torchvision -----------------------------------------------------------------------------------------------------

_DETECTORS = ("faster_rcnn", "fcos", "keypoint_rcnn", "mask_rcnn", "retinanet", "ssd", "ssdlite")


def _torchvision() -> dict[str, Builder]:
    """Return a builder for one model of each module of ``torchvision.models``. Quantized ones do not train."""
    from torchvision import models

    by_module: dict[str, list[str]] = {}
    for name in models.list_models():
        module = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        if not module.startswith("quantization."):
            by_module.setdefault(module, []).append(name)

    def size(name: str) -> int:
        return min(w.meta["num_params"] for w in models.get_model_weights(name))

    return {
        module: functools.partial(_torchvision_model, module, min(sorted(names), key=size))
        for module, names in sorted(by_module.items())
    }


def _torchvision_model(module: str, name: str) -> Built:
    from torchvision import models

    make = models.get_model_builder(name)
    kind, _, what = module.rpartition(".")
    torch.manual_seed(0)
    if kind == "detection":
        return _detector(make, what)
    if kind == "video":
        side = 224 if what in ("mvit", "s3d") else 64
        return make(weights=None).train(), (torch.randn(1, 3, 16, side, side),)
    if kind == "optical_flow":
        return make(weights=None).train(), (_image(128, 1), _image(128, 1), 2)
    # Batch norm needs more than one value: two rows. Auxiliary heads want images of the size that they were made for.
    more = {"weights_backbone": None} if kind == "segmentation" else {}

    def build(size: int) -> nn.Module:
        if what in ("vision_transformer", "maxvit"):
            more[{"vision_transformer": "image_size", "maxvit": "input_size"}[what]] = (
                size if what == "vision_transformer" else (size, size)
            )
        if "init_weights" in inspect.signature(make).parameters:
            more["init_weights"] = False
        model: nn.Module = make(weights=None, **more)
        return model

    return _smallest_image(build, (*IMAGE_SIZES, 299))


class _Detector(nn.Module):
    """A detector that takes a tensor of boxes and one of labels; it has lists of dictionaries itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> Any:
        size = images.shape[-1]
        targets = [
            {
                "boxes": b,
                "labels": n,
                "masks": torch.ones(len(n), size, size, dtype=torch.uint8),
                "keypoints": torch.ones(len(n), 17, 3),
            }
            for b, n in zip(boxes, labels, strict=True)
        ]
        return self.model(list(images), targets)


def _detector(make: Callable[..., nn.Module], what: str) -> Built:
    assert what in _DETECTORS, what
    more = {} if what in ("ssd", "ssdlite") else {"min_size": 64, "max_size": 64}
    size = {"ssd": 300, "ssdlite": 320}.get(what, 64)
    if what != "keypoint_rcnn":
        more["num_classes"] = 5
    model = make(weights=None, weights_backbone=None, **more)
    boxes = torch.tensor([[4.0, 4.0, 40.0, 44.0], [10.0, 8.0, 60.0, 50.0]]).expand(_ROWS, 2, 4).contiguous()
    labels = torch.ones(_ROWS, 2, dtype=torch.int64)
    return _Detector(model).train(), (torch.rand(_ROWS, 3, size, size), boxes, labels)


# --- diffusers -------------------------------------------------------------------------------------------------------


def _diffusers() -> dict[str, Builder]:
    """Denoisers and autoencoders, of one or two layers."""
    return {name: functools.partial(_diffusers_model, name) for name in _TABLE["diffusers"]}


def _diffusers_model(name: str) -> Built:
    import diffusers

    row = _TABLE["diffusers"][name]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**row["config"]).train()
    return model, {argument: _value(said) for argument, said in row["batch"].items()}


def _value(said: Any) -> Any:
    """Return the value of an argument: noise, a tensor of one value or of integers, or what is said itself."""
    if not isinstance(said, dict):
        return said
    if "noise" in said:
        return torch.randn(said["noise"])
    if "below" in said:
        return torch.randint(0, said["below"], said["shape"])
    if "shape" in said:
        return torch.full(said["shape"], said["value"])
    return {name: _value(value) for name, value in said.items()}


# --- torch_geometric -------------------------------------------------------------------------------------------------

_NODES, _EDGES, _FEATURES = 200, 1000, 16


class _Layers(nn.Module):
    """Two layers of a graph convolution."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, *edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, *edges).relu(), *edges)


def _graph() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(_NODES, _FEATURES), torch.randint(0, _NODES, (2, _EDGES))


def _torch_geometric() -> dict[str, Builder]:
    """Return builders for whole models, and for layers that none of them has, on a random graph."""
    from torch_geometric import nn as gnn

    hidden = 32

    def whole(name: str, **more: Any) -> Builder:
        def build() -> Built:
            batch = _graph()
            return getattr(gnn, name)(_FEATURES, hidden, num_layers=2, out_channels=4, **more).train(), batch

        return build

    def layers(name: str, heads: int = 1, **more: Any) -> Builder:
        def build() -> Built:
            batch = _graph()
            if heads > 1:
                more["heads"] = heads
            make = getattr(gnn, name)
            return _Layers(make(_FEATURES, hidden, **more), make(hidden * heads, 4, **more)).train(), batch

        return build

    found = {name: whole(name) for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")}
    found["PNA"] = whole(
        "PNA", aggregators=["mean", "max", "std"], scalers=["identity", "amplification"],
        deg=torch.tensor([0, 20, 40, 60, 40, 30, 10]),
    )  # fmt: skip
    found |= {name: layers(name, **more) for name, more in _TABLE["torch_geometric"].items()}
    return found | {
        "GPSConv": _gps, "HGTConv": _hgt, "RGCNConv": _rgcn, "SchNet": _schnet, "DeepGraphInfomax": _infomax,
        "GAE": _gae,
    }  # fmt: skip


def _gps() -> Built:
    from torch_geometric import nn as gnn

    batch = _graph()
    make = functools.partial(gnn.GPSConv, _FEATURES, heads=2)
    layers = [make(gnn.GINConv(nn.Linear(_FEATURES, _FEATURES))) for _ in range(2)]
    return _Layers(*layers).train(), batch


class _Hetero(nn.Module):
    """Two layers on a graph of two kinds of nodes."""

    def __init__(self, layers: Iterable[nn.Module], edges: Iterable[tuple[str, str, str]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._edges = tuple(edges)

    def forward(self, a: torch.Tensor, b: torch.Tensor, *edges: torch.Tensor) -> Any:
        x = {"a": a, "b": b}
        for layer in self.layers:
            x = layer(x, dict(zip(self._edges, edges, strict=True)))
        return x


def _hgt() -> Built:
    from torch_geometric import nn as gnn

    edges = (("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a"))
    torch.manual_seed(0)
    layers = [gnn.HGTConv(size, 16, (["a", "b"], list(edges)), heads=2) for size in (_FEATURES, 16)]
    x = torch.randn(2, _NODES, _FEATURES).unbind()
    return _Hetero(layers, edges).train(), (*x, *torch.randint(0, _NODES, (3, 2, _EDGES)).unbind())


def _rgcn() -> Built:
    from torch_geometric import nn as gnn

    x, edges = _graph()
    layers = gnn.RGCNConv(_FEATURES, 32, 3), gnn.RGCNConv(32, 4, 3)
    return _Layers(*layers).train(), (x, edges, torch.randint(0, 3, (_EDGES,)))


def _schnet() -> Built:
    from torch_geometric import nn as gnn

    def complete(positions: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        edges = torch.combinations(torch.arange(len(positions))).T
        edges = torch.cat([edges, edges.flip(0)], 1)
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    torch.manual_seed(0)
    model = gnn.SchNet(
        hidden_channels=32, num_filters=32, num_interactions=2, num_gaussians=16, interaction_graph=complete
    )
    return model.train(), (torch.randint(1, 10, (24,)), torch.randn(24, 3))


def _infomax() -> Built:
    from torch_geometric import nn as gnn

    batch = _graph()

    def corrupted(x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[torch.randperm(len(x))], edges

    def summary(z: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return z.mean(0).sigmoid()

    return gnn.DeepGraphInfomax(32, gnn.GCNConv(_FEATURES, 32), summary, corrupted).train(), batch


def _gae() -> Built:
    from torch_geometric import nn as gnn

    batch = _graph()
    return gnn.GAE(_Layers(gnn.GCNConv(_FEATURES, 32), gnn.GCNConv(32, 16))).train(), batch


# --- PEFT ------------------------------------------------------------------------------------------------------------


def _peft() -> dict[str, Builder]:
    """Return builders for a tiny Llama with each adapter."""
    return {name: functools.partial(_peft_model, name) for name in _TABLE["peft"]}


def _peft_model(name: str) -> Built:
    import peft

    from benchmarks.models import hf_models

    model, batch, _ = hf_models.build("llama", "small", "cpu")
    arguments = dict(_TABLE["peft"][name])
    config = getattr(peft, arguments.pop("config"))(task_type="CAUSAL_LM", **arguments)
    return peft.get_peft_model(model, config).train(), batch


FAMILIES: dict[str, Family] = {
    "timm": Family("timm", _timm, ("resnet", "convnext", "vision_transformer")),
    "torchvision": Family("torchvision", _torchvision, ("mobilenetv2",)),
    "diffusers": Family("diffusers", _diffusers, ("UNet2DModel", "AutoencoderKL")),
    "torch_geometric": Family("torch_geometric", _torch_geometric, ("GCN",)),
    "peft": Family("peft", _peft, ("lora",)),
}

REASONS: dict[str, str] = {
    "torch_geometric/ChebConv": (
        "in the first step with a plan, the frames of module calls that are over are held until the next op runs, and "
        "with them the arguments of the calls. The 8 bytes of a number that is made for that op lie beside these"
    )
}
"""Why the predicted peak of an entry is not exact, where that is known and stays so."""
