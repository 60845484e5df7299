"""Requests in, tokens out: prompts, scheduling, the step, detokenisation."""
