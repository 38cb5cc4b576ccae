"""The Rotor recurrence in plain Python, cell by cell, to compare the tables of ``sacplan.rotor`` with.

``sacplan.rotor`` computes the same sums of the same two floats with numpy, for all memory sizes of a
cell at once. So its tables must be equal to these to the bit.
"""

from __future__ import annotations

import math
from itertools import accumulate
from unittest import mock

import numpy as np

import sacplan
from sacplan.solvers.rotor import rotor
from sacplan.solvers.rotor.chain import ChainSizes
from sacplan.solvers.rotor.rotor import INFEASIBLE, KEEP_ALL, RotorResult, Tables, choice_type


def reference_tables(chain: sacplan.Chain, sizes: ChainSizes, slots: int, strict: bool) -> Tables:
    """Fill in the tables by the formulas in the docstring of ``sacplan.rotor``."""
    f, b = (*chain.forward_ms, 0.0), chain.backward_ms
    x, xbar, ftmp, btmp = sizes.x, sizes.xbar, sizes.ftmp, sizes.btmp
    n = len(b)
    C = [[[math.inf] * n for _ in range(n)] for _ in range(slots + 1)]
    choices = [[[INFEASIBLE] * n for _ in range(n)] for _ in range(slots + 1)]
    for i in range(n):
        for m in range(x[i + 1] + xbar[i + 1] + max(ftmp[i], btmp[i]), slots + 1):
            C[m][i][i], choices[m][i][i] = f[i] + b[i], KEEP_ALL
    # C[m][i][l]: least time of stages i to l with m slots. Shorter stretches come first: longer ones are made of them.
    for length in range(1, n):
        for i in range(n - length):
            l = i + length  # noqa: E741 (the formula's name)
            run_ms = list(accumulate(f[i:l]))  # run_ms[j - i - 1]: forward of i to j - 1
            steps = [x[i + 1] + ftmp[i], *(x[j] + x[j + 1] + ftmp[j] for j in range(i + 1, l))]
            waits = x[l + 1] + xbar[i + 1] + ftmp[i] if strict else 0
            for m in range(x[l + 1] + max(steps), slots + 1):
                best, choice = math.inf, INFEASIBLE
                for j in range(
                    i + 1, l + 1
                ):  # run i to j - 1 without saving, keep the input of j, come back later
                    if m >= x[j]:
                        time = (run_ms[j - i - 1] + C[m][i][j - 1]) + C[m - x[j]][j][l]
                        if time < best:
                            best, choice = time, j
                # Or keep what stage i saves, and run it once.
                if m >= max(xbar[i + 1], waits):
                    time = C[m][i][i] + C[m - xbar[i + 1]][i + 1][l]
                    if time < best:
                        best, choice = time, KEEP_ALL
                C[m][i][l], choices[m][i][l] = best, choice
    return np.array(C), np.array(choices, dtype=choice_type(n))


def rotor_by_reference(chain: sacplan.Chain, budget_bytes: int, slots: int = 500) -> RotorResult:
    """Run ``sacplan.rotor`` with the tables made here."""
    with mock.patch.object(rotor, "tables_of", reference_tables):
        return sacplan.rotor(chain, budget_bytes, slots)
