"""What the executors in use offer: switches and proposers, or why they lack them; and the models they are tried on."""

from __future__ import annotations

from collections.abc import Mapping

from engine.api import ProposerInfo, Unused
from engine.execution.registry import ExecutorChoice, ExecutorEntry
from engine.execution.router import Role
from engine.execution.speculation import verify_executor as verify
from engine.execution.step_state import Parts

# Tiny models on which executors are compared with eager: each the smallest that the executor's kernels read.
PLAIN_TRIAL: Mapping[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
KERNELS_TRIAL: Mapping[str, object] = {
    **PLAIN_TRIAL,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def trial_of(entry: ExecutorEntry) -> Mapping[str, object]:
    """The config.json of the model on which the executor is compared with eager."""
    return PLAIN_TRIAL if entry.decoder == "eager" else KERNELS_TRIAL


# The switches of executors; `batching` is the scheduler's.
SWITCHES = ("fused_kernels", "graphs", "speculation", "two_pass_head")


def unused(choice: ExecutorChoice) -> tuple[Unused, ...]:
    """Switches that no executor in use obeys, each with the reason of the first that has it."""
    better = next((f" ({one.decoder}: {one.reason})" for one in choice.objections), "")
    found = []
    for name in SWITCHES:
        reasons = [executor.switches[name] for _, executor in choice.executors if name in executor.switches]
        if None not in reasons:
            reason = reasons[0] if reasons else f"the {choice.decoder} decoder has no such thing{better}"
            found.append(Unused(name=name, reason=reason or ""))
    return tuple(found)


def proposers(verifier: str | None, no_draft: str | None) -> tuple[ProposerInfo, ...]:
    """Best first, with reasons against the unused. `verifier`: the executor that verifies, if any; `no_draft`: why no
    draft model guesses."""
    reason = "" if verifier else "no executor in use verifies drafts"
    instead = "the draft model guesses in its place" if verifier == Role.VERIFY and no_draft is None else ""
    return (
        ProposerInfo(name="prompt_lookup", why_not=reason or instead),
        ProposerInfo(name="draft_model", why_not=reason or no_draft or ""),
    )


def proposers_of(choice: ExecutorChoice, parts: Parts) -> tuple[ProposerInfo, ...]:
    verifier = next((name for name, executor in choice.executors if "speculation" in executor.switches), None)
    if verifier == Role.VERIFY:
        return proposers(verifier, verify.why_no_draft(parts))
    return proposers(verifier, None if parts.draft else verify.NO_DRAFT)
