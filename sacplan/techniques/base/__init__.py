"""Techniques: their base class, the step that they are asked about, regions, options and offers."""
