"""Plans in trainers: ``sacplan.integrations.transformers`` and ``sacplan.integrations.lightning``.

Each module needs its library. If that is missing, the error names the extra to install.
"""
