"""What the executors of techniques share: stand-ins for modules, which recorded op a running op is, tensors.

An executor imports from here, and never from another executor.
"""
