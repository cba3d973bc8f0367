"""Load the policy and take it apart into a backbone and a head.

    checkpoint ──> model (compute dtype; kernels.precision) ──> hidden states ──> kernels.head (log-probs, in slices)

The policy step never asks the model for logits: it runs the backbone and gives the head's weight to the sliced kernel.
`check_backbone` and `check_head` prove on a few tokens what that takes for granted: a model whose tokens see later ones, or
whose head does something the kernel does not know, is refused at start instead of being trained on wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from palingenesis.rl.errors import ConfigError, ModelError
from palingenesis.rl.kernels.head import selected_logprobs
from palingenesis.rl.kernels.precision import mixed_precision, widen_residuals
from palingenesis.rl.plugins import nearest

BUILTIN = Path(__file__).parent / "builtin"


def policy_path(name: str) -> str:
    """Where the checkpoint is: `builtin:<name>` is a folder of this package, anything else is transformers' business."""
    if not name.startswith("builtin:"):
        # A hub id has one slash too; where the folder before it is here, a path was meant, and no hub is asked.
        path = Path(name).expanduser()
        local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or ("/" in name and path.parent.is_dir())
        if local and not path.is_dir():
            raise ModelError(f"model.policy: there is no folder {name} (looked in {Path.cwd()}).")
        return str(path) if local else name
    wanted = name.removeprefix("builtin:")
    known = sorted(p.name for p in BUILTIN.iterdir() if p.is_dir())
    if wanted not in known:
        raise ConfigError(
            f"model.policy: no packaged policy {name!r}{nearest(wanted, known)}; there is {', '.join(known)}."
        )
    return str(BUILTIN / wanted)


class LogitShape(TypedDict):
    """Arguments of `kernels.head.selected_logprobs`: Gemma's soft cap, Cohere's and Granite's scale."""

    softcap: float
    scale: float


@dataclass
class Policy:
    """The model that is trained.

    Attributes:
        model: the transformers causal model, on its device.
        export_dtype: what `final/` is written in: the source checkpoint's own dtype.
        recompute: the backward recomputes activations (`model.gradient_checkpointing`).
    """

    model: Any
    export_dtype: torch.dtype
    recompute: bool = False

    @property
    def device(self) -> torch.device:
        device = self.model.device
        assert isinstance(device, torch.device)
        return device

    @property
    def head(self) -> Any:
        """The linear layer that makes logits of hidden states."""
        return self.model.get_output_embeddings()

    @property
    def head_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's weight [vocabulary, hidden] and its bias, if it has one."""
        return self.head.weight, getattr(self.head, "bias", None)

    @property
    def logit_shape(self) -> LogitShape:
        """What the model does to the head's product."""
        config = self.model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return {"softcap": float(getattr(config, "final_logit_softcapping", None) or 0.0), "scale": float(scale)}

    def hidden_states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states, [rows, tokens, hidden] in the compute dtype, of right-padded rows.

        No token sees a later one (`check_backbone`), so padding needs no mask, which would keep attention from its
        fastest kernels.
        """
        with mixed_precision(self.model):
            out = self.model.base_model(input_ids=input_ids, use_cache=False)
        hidden = out.last_hidden_state
        assert isinstance(hidden, torch.Tensor)
        return hidden.to(self.model.dtype)


def load_policy(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    gradient_checkpointing: bool = False,
) -> tuple[Policy, dict[str, torch.Tensor]]:
    """Load a checkpoint in float32, keep those values as masters, and give the model its compute dtype.

    Returns:
        The policy and its float32 parameters by name. Where `dtype` is float32 they are the model's own tensors.

    Raises:
        ModelError: the checkpoint cannot be read, or its head is not one matrix product.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the run has a console of its own
    path = policy_path(name)
    options = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        source = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    except Exception as error:
        # Reading a checkpoint runs other people's code over other people's files: many types, one meaning.
        raise ModelError(f"model.policy: cannot load {name!r}: {_first_line(error)}") from error
    silence_dropout(model)
    policy = Policy(model.to(device), export_dtype=source_dtype(source), recompute=gradient_checkpointing)
    masters = {key: value.detach() for key, value in model.named_parameters()}
    for parameter in model.parameters():
        # Parameters alone: buffers such as the rotary frequencies stay float32, as `from_pretrained` leaves them.
        parameter.data = parameter.data.to(dtype)  # `masters` keeps the float32 values
    widen_residuals(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_backbone(policy)
    check_head(policy)
    return policy, masters


def source_dtype(config: Any) -> torch.dtype:
    """The dtype a checkpoint was saved in; float32 where it does not say."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def silence_dropout(model: torch.nn.Module) -> None:
    """The sampler and the trainer must compute the same function, so dropout is off in both."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_backbone(policy: Policy) -> None:
    """What the policy step takes for granted of the backbone, on two rows that differ behind their eighth token.

    Hidden states that should be the same are so to the last bits (29 architectures on a CPU, in float32 and bf16). Those of
    random models that look ahead differ by 0.4 % in the mean and more, their log-probs by less than rounding does.

    Raises:
        ModelError: the model cannot be taken apart or run, a token sees later ones, or the model is random in training mode
            where that is needed.
    """
    kind = type(policy.model).__name__
    if policy.head is None or not hasattr(policy.head, "weight"):
        raise ModelError(f"model.policy: {kind} has no linear output head to take log-probs from.")
    if policy.model.base_model is policy.model:
        raise ModelError(f"model.policy: {kind} does not separate its backbone from its head.")
    rows = _few_tokens(policy, 12).repeat(2, 1)
    rows[1, 8:] = 0

    def beginnings(training: bool) -> torch.Tensor:
        policy.model.train(training)
        with torch.no_grad():
            return policy.hidden_states(rows)[:, :8].float()

    try:
        seen = beginnings(training=False)
        trained = beginnings(training=True) if policy.recompute else seen
    except Exception as error:  # other people's code, of any architecture
        raise ModelError(f"model.policy: {kind} cannot be run: {type(error).__name__}: {_first_line(error)}") from error
    policy.model.eval()
    near = 2e-3 * float(seen.abs().mean())
    if float((seen[0] - seen[1]).abs().mean()) > near:
        raise ModelError(
            f"model.policy: {kind} lets a token see later ones, so its log-probs are no policy's, and it is not supported."
        )
    if float((seen - trained).abs().mean()) > near:
        raise ModelError(
            f"model.policy: {kind} computes something else in training mode (dropout, or experts chosen at random), "
            "in which transformers recomputes activations; set model.gradient_checkpointing to none."
        )


def check_head(policy: Policy) -> None:
    """The model's own logits must be what the sliced kernel makes of its last hidden states.

    Raises:
        ModelError: they are not; the policy's log-probs would be wrong.
    """
    kind = type(policy.model).__name__
    ids = _few_tokens(policy, 8)
    policy.model.eval()
    with torch.no_grad():
        with mixed_precision(policy.model):
            logits = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        own = torch.log_softmax(logits.double(), -1)
        own = own[torch.arange(ids.shape[1]), ids[0]]
        hidden = policy.hidden_states(ids)[0]
        if hidden.shape[-1] != policy.head.weight.shape[-1]:
            raise ModelError(f"model.policy: {kind} does something between its last hidden states and its head.")
        ours, _ = selected_logprobs(hidden, *policy.head_parameters, ids[0], 1.0, **policy.logit_shape)
    tolerance = 1e-3 if hidden.dtype == torch.float32 else 0.25  # the model rounds its own logits
    if not torch.allclose(own, ours.double(), rtol=0.0, atol=tolerance):
        raise ModelError(
            f"model.policy: {kind} does something to its logits that training would not (the log-probs differ by up to "
            f"{float((own - ours).abs().max()):.3g}), so this architecture is not supported."
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def _few_tokens(policy: Policy, count: int) -> torch.Tensor:
    """A row of small ids, [1, count]."""
    return (torch.arange(1, count + 1, device=policy.device) % int(policy.head.weight.shape[0])).unsqueeze(0)
