"""The rollout half: prompts in, scored groups out. Asyncio, no torch."""
