"""The interface of PyTorch's prototype (PR #137908): estimators, the module tree, ``sac_milp``."""
