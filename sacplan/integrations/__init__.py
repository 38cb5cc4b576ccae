"""Plans in trainers: ``sacplan.integrations.transformers`` and ``sacplan.integrations.lightning``.

Each module needs its library, and says which extra to install where that is missing.
"""
