"""Models of Hugging Face by name: from a configuration to a model without weights, with a batch and an optimizer."""
