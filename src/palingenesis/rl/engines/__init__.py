"""Generation engines behind `types.Engine`: `hf` (the trainer's own model), `scripted` (the test double)."""
