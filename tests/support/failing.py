"""A model that breaks down over some requests, and only over those."""

from __future__ import annotations

from fakes import ContextRunner

from mlserve.model.plan import SequenceT, StepPlan, StepResult

POISON = ord("!")


class FailingRunner(ContextRunner):
    """Raises at the third token of an answer to a prompt with a `POISON` token."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        for sequence in plan.sequences:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            if POISON in prompt and len(sequence.token_ids) >= sequence.num_prompt_tokens + 2:
                raise RuntimeError("poisoned")
        return super().run(plan)
