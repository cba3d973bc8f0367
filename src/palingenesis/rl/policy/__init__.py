"""The policy half: a transformers model, its fp32 master weights, and the step that improves them."""
