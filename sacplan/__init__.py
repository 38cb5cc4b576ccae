"""Plan which activations a PyTorch training step keeps and which it recomputes, under a memory budget.

import sacplan

profile = sacplan.profile(model, batch, device="h100")
plan = sacplan.plan(profile, budget="22GiB")
handle = sacplan.apply(model, plan)
result = sacplan.verify(model, batch, plan)
"""

import lazy_loader

# torch takes seconds to import, and the command line's help needs none of it. So names are imported when they are
# first asked for; where from is written in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0"
