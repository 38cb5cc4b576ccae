"""The code that executors share: stand-ins, the alignment of running with recorded ops, tensors.

An executor imports from here, and never from another executor.
"""
