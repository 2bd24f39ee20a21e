"""How the pair is trained and scored: stages, losses, the training loop and the evaluation.

Shapes: B sequences of T tokens, V vocabulary entries. Budgets are seconds of wall clock.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from common import SMOKE_SHRINK, Batches, Log, gather_windows
from transformers import LlamaForCausalLM

CLOCK_STARTS = 3  # steps that compile and are not charged to the budget
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
SCORES = ("ce_target", "ce_draft", "alpha_T1", "top1")

Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stretch of training: its budget, batch shape and learning-rate schedule.

    The rate rises over `warmup` steps and falls linearly, over the budget, to `floor` times `rate`.
    """

    name: str
    seconds: float
    context: int
    rows: int
    rate: float
    warmup: int
    floor: float

    def rate_at(self, step: int, fraction: float) -> float:
        """Learning rate of a step (from 0) when `fraction` of the budget is spent."""
        return self.rate * min(1.0, (step + 1) / self.warmup) * max(self.floor, 1.0 - fraction)

    def for_smoke_test(self) -> "Stage":
        """The same stage, made small enough for a few quick steps on a CPU."""
        return dataclasses.replace(self, seconds=1.0, context=self.context // SMOKE_SHRINK, rows=2)


def logits_of(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Next-token logits [B, T, V] for windows [B, T + 1], whose last token is only a label."""
    return model(input_ids=windows[:, :-1], use_cache=False).logits


def cross_entropy(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per token, of logits [B, T, V] on windows [B, T + 1]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def kl_divergence(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || draft) over positions, in nats; both logits are [B, T, V]."""
    target_log = target_logits.float().log_softmax(-1)
    draft_log = draft_logits.float().log_softmax(-1)
    return (target_log.exp() * (target_log - draft_log)).sum(-1).mean()


def acceptance(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Chance [B, T] that speculative sampling at T=1 keeps a draft token: sum of min(p, q) over [B, T, V]."""
    return torch.minimum(target_logits.float().softmax(-1), draft_logits.float().softmax(-1)).sum(-1)


def total_variation(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Mean total-variation distance over positions: one minus the mean acceptance."""
    return 1.0 - acceptance(target_logits, draft_logits).mean()


def distillation_loss(
    target: torch.nn.Module, draft: torch.nn.Module, divergence: Callable, device: torch.device
) -> Loss:
    """Loss of the draft against the frozen target on windows [B, T + 1], in bfloat16 autocast."""

    def loss(windows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                target_logits = logits_of(target, windows)
            draft_logits = logits_of(draft, windows)
        return divergence(target_logits, draft_logits)

    return loss


def make_optimizer(model: torch.nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only; `fit` sets the learning rate."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def fit(stage: Stage, loss: Loss, optimizer: torch.optim.Optimizer, batches: Batches, log: Log) -> int:
    """Train until the stage's budget is spent and return the number of steps.

    The clock starts after the first three steps, so that compilation is not charged to the budget.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    started: float | None = None
    step = 0
    while True:
        fraction = 0.0 if started is None else (time.time() - started) / stage.seconds
        if fraction >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = stage.rate_at(step, fraction)
        optimizer.zero_grad(set_to_none=True)
        value = loss(next(batches))
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        step += 1
        if step == CLOCK_STARTS:
            value.item()  # waits for the device
            started = time.time()
        if step % 50 == 0:
            log(f"{stage.name} step {step} frac {fraction:.2f} loss {value.item():.4f}")
    log(f"{stage.name} done: {step} steps")
    return step


def score_window(target: LlamaForCausalLM, draft: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Scores [4, T] of both models at each position of a window [1, T + 1], in the order of SCORES."""
    target_logits, draft_logits = logits_of(target, window).float(), logits_of(draft, window).float()
    labels = window[:, 1:].flatten()
    return torch.stack(
        [
            F.cross_entropy(target_logits[0], labels, reduction="none"),
            F.cross_entropy(draft_logits[0], labels, reduction="none"),
            acceptance(target_logits, draft_logits)[0],
            (target_logits.argmax(-1) == draft_logits.argmax(-1))[0].float(),
        ]
    )


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    ids: np.ndarray,
    context: int,
    device: torch.device,
) -> torch.Tensor:
    """Scores [4, context] at each position, averaged over the consecutive full windows of token ids."""
    rows = []
    for start in range(0, len(ids) - context - 1, context):
        window = gather_windows(ids, np.array([start]), context, device)
        rows.append(score_window(target, draft, window))
    return torch.stack(rows).mean(0)
