"""sacplan with other libraries: plans in the trainers of ``transformers`` and ``lightning``, models of ``peft``.

Each module needs its library. If that is missing, the error names the extra to install.
"""
