"""Whatever is given to a public function: it works, or it is an error of sacplan's family, and nothing else changes."""

import inspect
import itertools
import json
import math

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as given_at_random
from hypothesis import strategies as st
from msgspec import structs
from torch import nn

import sacplan
import sacplan.testing
from sacplan.planning.plan import _digest
from tests.support.damage import damaged_contents
from tests.support.slow import slow_after
from tests.zoo.layers import FromFunction, Then

WRONG = {
    "None": None,
    "True": True,
    "zero": 0,
    "negative": -1,
    "huge": 2**80,
    "fraction": 0.5,
    "nan": math.nan,
    "infinity": math.inf,
    "empty": "",
    "words": "no such thing",
    "bytes": b"x",
    "object": object(),
    "list": [],
    "list of None": [None],
    "dict": {},
    "function": lambda *_: None,
    "class": int,
    "tensor": torch.zeros(2),
    "complex": 1j,
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(Then(lambda y: y.sin().exp()) for _ in range(3)))


def entered(manager, **arguments):
    with manager(**arguments):
        pass


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Public functions, each with right values for the arguments that it needs."""
    model, batch = make(), torch.ones(4, 8)
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    estimators = [sacplan.MemTracker(), sacplan.RuntimeEstimator(), sacplan.SACEstimator()]
    for estimator in estimators:
        with estimator:
            model(batch).sum().backward()
    info = sacplan.aggregate_stats(model, *estimators)
    graph = sacplan.parse_module_info(info)
    stats = estimators[2].sac_mod_stats[""]
    folder = tmp_path_factory.mktemp("bad")
    budget = f"{plan.peak_bytes + 64}B"
    capacity = {"model": model, "make_batch": lambda n: torch.ones(n, 8), "budget": "20KiB"}
    capacity |= {"device": "cpu", "at_most": 2}
    plan.save(folder / "plan.json")
    profile.save(folder / "profile.json")
    return {
        "profile": (sacplan.profile, {"model": model, "batch": batch, "device": "cpu"}),
        "plan": (sacplan.plan, {"profile": profile, "budget": budget}),
        "policy": (sacplan.policy, {"mode": "full", "profile": profile}),
        "frontier": (
            sacplan.frontier,
            {"profile": profile, "points": 2, "policies": False, "solvers": ("greedy",)},
        ),
        "apply": (sacplan.apply, {"model": model, "plan": plan}),
        "verify": (sacplan.verify, {"model": model, "batch": batch, "plan": plan}),
        "max_batch": (sacplan.max_batch, capacity),
        "throughput": (sacplan.throughput, capacity),
        "aggregate_stats": (
            sacplan.aggregate_stats,
            {
                "model": model,
                "mem_tracker": estimators[0],
                "runtime_estimator": estimators[1],
                "sac_estimator": estimators[2],
            },
        ),
        "parse_module_info": (sacplan.parse_module_info, {"module_info": info}),
        "get_peak_memory_runtime_baseline": (sacplan.get_peak_memory_runtime_baseline, {"graph": graph}),
        "sac_milp": (sacplan.sac_milp, {"graph": graph, "memory_budget": "90%"}),
        "get_optimal_checkpointing_policy_per_module": (
            sacplan.get_optimal_checkpointing_policy_per_module,
            {"sac_stats": stats, "memory_budget": 0.5},
        ),
        "fit_tradeoff": (sacplan.fit_tradeoff, {"points_xy": [(0.0, 0.0), (0.5, 1.0), (1.0, 3.0)]}),
        "rotor": (
            sacplan.rotor,
            {
                "chain": sacplan.Chain(
                    (1.0, 1.0), (1.0, 1.0, 1.0), (8, 8, 8), (8, 16, 16), (0, 0), (0, 0, 0)
                ),
                "budget_bytes": 100,
            },
        ),
        "Report": (sacplan.Report, {"profile": profile, "plan": plan}),
        "Report.alive_at_peak": (sacplan.Report(profile).alive_at_peak, {}),
        "certify": (
            sacplan.certify,
            {
                "model": make(),
                "make_batch": lambda n, seq: torch.ones(n, seq, 8),
                "lengths": [2, 4],
                "device": "cpu",
                "batch": 1,
            },
        ),
        "fit": (
            sacplan.fit,
            {
                "model": nn.Linear(8, 8),
                "make_batch": lambda n, seq=8: torch.ones(n, 8),
                "optimizer": "sgd",  # beside which no 8-bit ones are tried
                "device": "cpu",
                "sizes": False,
            },
        ),
        "layouts": (
            sacplan.layouts,
            {"model": torch.nn.Linear(4, 8), "batch": torch.empty(4, 4), "devices": 2, "device": "cpu"},
        ),
        "strategies": (
            sacplan.strategies,
            {"op": torch.nn.Linear(4, 8), "tensors": torch.empty(2, 4), "mesh": {"tp": 2}, "device": "cpu"},
        ),
        "fake_device": (sacplan.fake_device, {"device": "cpu"}),
        "assert_step_fits": (
            sacplan.testing.assert_step_fits,
            {
                "model": nn.Linear(4, 4),
                "batch": torch.ones(1, 4),
                "device": "cpu",
                "loss_fn": lambda model, batch: model(batch).sum(),
                "optimizer": torch.optim.SGD,
            },
        ),
        "ranks": (entered, {"manager": sacplan.ranks, "world_size": 2, "rank": 1, "device": "cpu"}),
        "Milp": (sacplan.Milp, {}),
        "Rotor": (sacplan.Rotor, {}),
        "MemTracker": (sacplan.MemTracker, {}),
        "Plan.load": (sacplan.Plan.load, {"path": folder / "plan.json"}),
        "Plan.save": (plan.save, {"path": folder / "plan.json"}),
        "Profile.load": (sacplan.Profile.load, {"path": folder / "profile.json"}),
        "Profile.save": (profile.save, {"path": folder / "profile.json"}),
    }


FUNCTIONS = [
    "profile", "plan", "policy", "frontier", "apply", "verify", "max_batch", "throughput",
    "aggregate_stats", "parse_module_info", "get_peak_memory_runtime_baseline", "sac_milp",
    "get_optimal_checkpointing_policy_per_module", "fit_tradeoff", "rotor", "Report",
    "Report.alive_at_peak",
    "strategies", "layouts", "fit", "certify", "fake_device", "ranks",
    "assert_step_fits",
    "Milp", "Rotor", "MemTracker", "Plan.load",
    "Plan.save", "Profile.load", "Profile.save",
]  # fmt: skip
THEIR_OWN = {
    "loss_fn": ("class",),
    "optimizer": ("class",),
    "batch": ("tensor",),
    "fit.batch": ("huge",),
    "certify.make_batch": ("class",),
    "certify.pack": ("huge",),
    "certify.pad_to_multiple_of": ("huge",),
    "make_batch": (),
    "manager": tuple(WRONG),  # the test's own
    "tensors": ("tensor",),
    "op": ("class",),
}
"""What fails in the code of the caller, whose errors come through."""


def wrong_calls(name, function, right):
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in parameters} - {"args", "kwargs"} | set(right)
    for argument in sorted(names):
        for kind, value in WRONG.items():
            if kind not in THEIR_OWN.get(f"{name}.{argument}", THEIR_OWN.get(argument, ())):
                yield argument, kind, right | {argument: value}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("third", slow_after(1, range(3)))
def test_wrong_arguments(name, third, given, monkeypatch, tmp_path):
    """Every third of the wrong values, others for each argument."""
    monkeypatch.chdir(tmp_path)  # some values are names of files
    function, right = given[name]
    function(**right) if name != "apply" else function(**right).remove()
    raw = []
    for argument, kind, arguments in itertools.islice(wrong_calls(name, function, right), third, None, 3):
        try:
            made = function(**arguments)
        except (sacplan.SacplanError, OSError):  # what the system says about a path comes through
            continue
        except Exception as error:
            raw.append(f"{argument}={kind}: {type(error).__name__}: {error}")
            continue
        if name == "apply":
            made.remove()
    assert not raw, "\n".join(raw)


def test_every_public_function_is_tried():
    takes_nothing = {"devices"}
    changes_its_model = {"with_lora"}  # tests/integrations/test_peft.py
    functions = {n for n in sacplan.__all__ if inspect.isroutine(getattr(sacplan, n))}
    assert functions - set(FUNCTIONS) == takes_nothing | changes_its_model


def test_an_estimator_that_is_entered_twice():
    tracker = sacplan.MemTracker()
    with tracker:
        with pytest.raises(sacplan.errors.TraceError, match="recording already"), tracker:
            pass
        make()(torch.ones(4, 8)).sum().backward()
    assert tracker.peak_bytes > 0
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    with pytest.raises(sacplan.errors.TraceError, match="not recording"):
        tracker.__exit__(None, None, None)
    with tracker:  # one after the other is fine
        make()(torch.ones(4, 8)).sum().backward()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_statistics_that_are_no_numbers(value):
    with pytest.raises(sacplan.errors.PlanError, match="finite number"):
        sacplan.ModuleStats("a", fw_runtime_per_module=value)
    with pytest.raises(sacplan.errors.PlanError, match="finite number"):
        sacplan.SACStats(("a",), (value,), (1,))


def after_linear(function, **parts):
    return FromFunction(lambda self, x: function(self, self.linear(x)), linear=nn.Linear(8, 8), **parts)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters)


class Sharpness(torch.optim.SGD):
    """Its ``closure`` has a default, as that of ``Optimizer.step`` has, and is needed all the same."""

    def step(self, closure=None):
        assert closure is not None, "a closure is required"


@torch.library.custom_op("sacplan_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


thrice.register_autograd(lambda ctx, g: g * 3)


UNTRACEABLE = {
    "sparse op": lambda: after_linear(lambda m, y: torch.sparse.mm(y.to_sparse(), torch.ones(8, 8))),
    "sparse buffer": lambda: after_linear(lambda m, y: torch.sparse.mm(m.a, y), a=torch.eye(4).to_sparse()),
    "sparse row buffer": lambda: after_linear(lambda m, y: m.a @ y, a=torch.eye(4).to_sparse_csr()),
    "sparse gradient": lambda: after_linear(
        lambda m, y: m.e(torch.tensor([1])), e=nn.Embedding(4, 8, sparse=True)
    ),
    "cond": lambda: after_linear(
        lambda m, y: torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,))
    ),
    "jagged": lambda: after_linear(
        lambda m, y: torch.nested.nested_tensor([y[:2], y[2:]], layout=torch.jagged).sin().values()
    ),
    "nested": lambda: after_linear(
        lambda m, y: torch.nested.as_nested_tensor([y[:2], y[2:]]).to_padded_tensor(0.0)
    ),
    "quantized": lambda: after_linear(
        lambda m, y: y + m.q.dequantize(), q=torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)
    ),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)),
    "lazy buffers": lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d(affine=False)),
    "custom op": lambda: after_linear(lambda m, y: thrice(y)),
    "mkldnn": lambda: after_linear(lambda m, y: y.to_mkldnn().relu().to_dense()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced_is_an_error_of_the_family(name):
    for trace in ("fake", "real"):
        try:
            profile = sacplan.profile(UNTRACEABLE[name](), torch.ones(4, 8), device="cpu", trace=trace)
        except sacplan.errors.TraceError:
            continue
        assert profile.peak_bytes > 0
        assert trace == "real"
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("name", ["sparse buffer", "sparse row buffer", "custom op"])
def test_what_only_a_real_trace_can_follow_says_so(name):
    with pytest.raises(sacplan.errors.TraceError, match='Use trace="real"'):
        sacplan.profile(UNTRACEABLE[name](), torch.ones(4, 8), lambda m, x: m(x).sum(), device="cpu")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_sparse_buffer_that_no_op_of_the_step_takes(compressed):
    """Its indices and values count. There are no fake sparse tensors, but the step needs none."""
    mask = torch.eye(64).to_sparse_csr() if compressed else torch.eye(64).to_sparse()
    model, plain = after_linear(lambda m, y: y.sin(), mask=mask), after_linear(lambda m, y: y.sin())
    parts = (
        (mask.values(), mask.crow_indices(), mask.col_indices())
        if compressed
        else (mask._indices(), mask._values())
    )
    for trace in ("fake", "real"):
        with_it, without = (
            sacplan.profile(m, torch.ones(4, 8), lambda m, x: m(x).sum(), device="cpu", trace=trace)
            for m in (model, plain)
        )
        assert with_it.peak_bytes - without.peak_bytes == sum(
            part.untyped_storage().nbytes() for part in parts
        )
    assert model.mask is mask


def test_an_optimizer_that_needs_a_closure():
    for optimizer in (lbfgs, Sharpness, lbfgs((model := make()).parameters())):
        with pytest.raises(sacplan.errors.TraceError, match="closure"):
            sacplan.profile(model, torch.ones(4, 8), None, optimizer, device="cpu")


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return x.sin().exp().tanh()


class Class(nn.Module):
    @classmethod
    def forward(cls, x):
        return x.sin().exp().tanh()


class Callable_:
    def __call__(self, x):
        return x.sin().exp().tanh()


class Object(nn.Module):
    forward = Callable_()


class Inherits(Static):
    pass


@pytest.mark.parametrize("kind", [Static, Class, Object, Inherits])
def test_forms_of_forward(kind):
    model, batch = nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8)), torch.randn(4, 8)
    model(batch).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.policy("full", profile=profile, layers="1")
    assert plan.discarded
    with sacplan.apply(model, plan):
        model(batch).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def checks(model, batch):
    y = model(batch)
    assert (y.abs() >= 0).all(), "negative"
    assert not (y.abs() < 0).any()
    if y.isnan().any() or (y.abs() < 0).any():
        raise ValueError("not a number")
    if not (y.square() >= 0).all():
        raise ValueError("negative")
    return torch.nn.functional.gaussian_nll_loss(y, batch, y.exp())


def test_checks_of_unknown_values_pass():
    with pytest.warns(sacplan.SacplanWarning, match="checks pass"):
        profile = sacplan.profile(nn.Linear(8, 8), torch.randn(4, 8), checks, device="cpu")
    real = sacplan.profile(nn.Linear(8, 8), torch.randn(4, 8), checks, device="cpu", trace="real")
    assert profile.peak_bytes == real.peak_bytes


DAMAGED = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A model, its batch, the path and the contents of its plan, and what was loaded in the end."""
    model, batch, path = make(), torch.ones(4, 8), tmp_path_factory.mktemp("damaged") / "plan.json"
    sacplan.plan(sacplan.profile(model, batch, device="cpu"), "smallest").save(path)
    loaded = []
    yield model, batch, path, path.read_bytes(), loaded
    assert len(loaded) > 5


@pytest.mark.filterwarnings("ignore")
@DAMAGED
@given_at_random(st.data())
def test_damaged_plans(planned, data):
    """Those whose digest fits the damage: in load, apply, the step and verify."""
    model, batch, path, right, loaded = planned
    wrong = damaged_contents(right, data)
    body = {k: v for k, v in wrong.items() if k not in ("what", "schema_version", "sha256")}
    path.write_text(json.dumps(wrong | {"sha256": _digest(body)}))
    try:
        found = sacplan.Plan.load(path)
        loaded.append(found)
        with sacplan.apply(model, found):
            model(batch).sum().backward()
        sacplan.verify(model, batch, found)
    except sacplan.SacplanError:
        pass
    assert not [m for m in model.modules() if "forward" in vars(m)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, its batch, and the paths of a profile and a plan of it."""
    folder = tmp_path_factory.mktemp("paths")
    model, batch = make(), torch.ones(4, 8)
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.policy("full", profile=profile, layers="1")
    profile.save(folder / "profile.json.gz")
    plan.save(folder / "plan.json")
    return model, batch, folder / "profile.json.gz", folder / "plan.json", profile, plan


@pytest.mark.slow
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_paths_are_accepted(files, kind, tmp_path):
    model, batch, *paths, profile, plan = files
    recorded, planned = map(kind, paths)
    assert sacplan.plan(recorded, 1.0) == sacplan.plan(profile, 1.0)
    assert sacplan.policy("full", profile=recorded, layers="1") == plan
    with sacplan.apply(model, planned) as handle:
        assert handle.units
    assert sacplan.verify(model, batch, planned).peak_bytes == plan.peak_bytes
    for table in (sacplan.Report.alive_at_peak, sacplan.Report.module_table):
        both = (sacplan.Report(recorded, planned), sacplan.Report(profile, plan))
        first, second = map(table, both)
        assert first.equals(second)
    frontier = sacplan.frontier(recorded, 2, ["greedy"], policies=False)
    assert len(frontier)
    assert sacplan.Report(recorded, planned, frontier).write(tmp_path / "a.html").stat().st_size
    sacplan.Report(recorded, planned).memory_figure()


def test_call_sites_that_are_not_there(files):
    """A plan of ops and units that the profile or the model does not have."""
    model, batch, _, _, profile, plan = files
    op = structs.replace(plan.decisions[0], op="aten.nothing.default")
    unit = structs.replace(plan.decisions[0], unit="9")
    known = next(iter(plan.units.values()))
    for decision, ops in ((op, structs.replace(known, calls=())), (unit, known)):
        wrong = structs.replace(plan, decisions=(decision,), units={decision.unit: ops})
        with pytest.raises(sacplan.errors.PlanMismatch, match="runs no such op there"):
            sacplan.Report(profile, wrong)
    with pytest.raises(sacplan.errors.PlanMismatch, match="unit '9', but the model has no such module"):
        sacplan.verify(model, batch, wrong)
