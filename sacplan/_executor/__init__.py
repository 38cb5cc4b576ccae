"""What executors share: stand-ins, which recorded op a running op is, tensors.

An executor imports from here, and never from another executor.
"""
