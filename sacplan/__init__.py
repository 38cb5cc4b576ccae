"""Plan which activations a PyTorch training step keeps and which it recomputes, under a memory budget.

import sacplan

profile = sacplan.profile(model, batch, device="h100")
plan = sacplan.plan(profile, budget="22GiB")
handle = sacplan.apply(model, plan)
result = sacplan.verify(model, batch, plan)
"""

from sacplan._apply.apply import Handle, apply
from sacplan._fit.fit import Fit, fit_tradeoff
from sacplan._fit.graph import (
    Graph,
    ModuleInfo,
    ModuleStats,
    SACStats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from sacplan._plan.batch_sizes import CapacityPoint
from sacplan._plan.capacity import DEFAULT_HEADROOM, Capacity, max_batch, throughput
from sacplan._plan.frontier import frontier
from sacplan._plan.modes import policy
from sacplan._plan.plan import Plan, UnitPlan
from sacplan._plan.planning import plan, plan_smallest
from sacplan._plan.sequences import Rotor
from sacplan._report.alive import alive_at_peak
from sacplan._report.figures import frontier_figure, memory_figure, save_figures, tradeoff_figure
from sacplan._report.modules import module_table
from sacplan._report.page import write_report
from sacplan._report.trace_events import write_memory_trace
from sacplan._solve.chain import Chain
from sacplan._solve.greedy import Greedy
from sacplan._solve.milp import SacMilpResult, sac_milp
from sacplan._solve.policy import get_optimal_checkpointing_policy_per_module
from sacplan._solve.program import Milp
from sacplan._solve.rotor import RotorResult, rotor
from sacplan._solve.uniform import Uniform
from sacplan._trace.calibrate import calibrate
from sacplan._trace.devices import DeviceSpec, devices
from sacplan._trace.estimators import MemTracker, RuntimeEstimator, SACEstimator, aggregate_stats
from sacplan._trace.kernels import fake_device
from sacplan._trace.profile import Profile, profile
from sacplan._verify.verify import Verification, verify
from sacplan.errors import (
    BudgetError,
    DataDependentError,
    DeviceError,
    InfeasibleBudget,
    PlanError,
    PlanMismatch,
    RecipeError,
    SacplanError,
    SacplanWarning,
    SolverError,
    TraceError,
)

__all__ = [
    "DEFAULT_HEADROOM",
    "BudgetError",
    "Capacity",
    "CapacityPoint",
    "Chain",
    "DataDependentError",
    "DeviceError",
    "DeviceSpec",
    "Fit",
    "Graph",
    "Greedy",
    "Handle",
    "InfeasibleBudget",
    "MemTracker",
    "Milp",
    "ModuleInfo",
    "ModuleStats",
    "Plan",
    "PlanError",
    "PlanMismatch",
    "Profile",
    "RecipeError",
    "Rotor",
    "RotorResult",
    "RuntimeEstimator",
    "SACEstimator",
    "SACStats",
    "SacMilpResult",
    "SacplanError",
    "SacplanWarning",
    "SolverError",
    "TraceError",
    "Uniform",
    "UnitPlan",
    "Verification",
    "aggregate_stats",
    "alive_at_peak",
    "apply",
    "calibrate",
    "devices",
    "fake_device",
    "fit_tradeoff",
    "frontier",
    "frontier_figure",
    "get_optimal_checkpointing_policy_per_module",
    "get_peak_memory_runtime_baseline",
    "max_batch",
    "memory_figure",
    "module_table",
    "parse_module_info",
    "plan",
    "plan_smallest",
    "policy",
    "profile",
    "rotor",
    "sac_milp",
    "save_figures",
    "throughput",
    "tradeoff_figure",
    "verify",
    "write_memory_trace",
    "write_report",
]
__version__ = "0.1.0"
