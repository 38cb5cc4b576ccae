"""sacplan with other libraries: plans in their trainers, and their models.

Each module needs its library. If that is missing, the error names the extra to install.
"""
