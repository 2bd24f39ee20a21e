"""The bench of scoring on a GPU: model operations per second of the replay, beside the matrix rate of the same run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specq.models.loaded import LoadedModel
    from specq.prompts import Text


def bench_scoring(pair: str = "llama8b-1b", tokens: str = "32768", texts: str = "8") -> dict:
    """Scoring of a registered pair with random weights on a GPU, one to three arms: scoring:PAIR:TOKENS:TEXTS.

    Operations are those of the models' matrix products and of causal attention; what else a pass does counts as time only.
    """
    import time

    import torch
    from specq_kernels.bench import matrix_rate

    from specq.config import StudyConfig
    from specq.errors import SpecqError
    from specq.inputs import load_models
    from specq.kv import get_format
    from specq.progress import Reporter
    from specq.replay import Arm, Setting, score_texts
    from specq.rules import Rule, Transform
    from specq.summary import environment

    if not torch.cuda.is_available():
        raise SpecqError("the scoring bench needs a CUDA GPU")
    length = int(tokens) // int(texts)
    config = StudyConfig(
        pair=pair, random_weights=True, device="cuda", prompt_tokens=length // 2, output_tokens=length - length // 2
    )
    _, models = load_models(config, Reporter(quiet=True))
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    scored = _texts(int(texts), length, models.vocabulary.size)
    setting = Setting(Transform(), Transform(), Rule(), models.vocabulary, 0)
    bf16, fp8, int8 = (get_format(n) for n in ("bf16", "fp8", "int8"))
    target, draft = (sum(operations(m, t) for t in scored) for m in (models.target, models.draft))
    runs, rate = [], matrix_rate()
    for formats in ([bf16], [fp8], [int8], [bf16, fp8], [bf16, fp8, int8]):
        arms = [Arm.of(f, bf16) for f in formats]
        score_texts(models.target, models.draft, scored, arms, setting)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        made = score_texts(models.target, models.draft, scored, arms, setting)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        done = (target * len(arms) + draft) / seconds / 1e12
        passes = {f"{p.role} {p.format.name}": s for p, s in made.seconds.items()}
        runs.append(
            {
                "arms": [a.name for a in arms],
                "seconds": seconds,
                "tokens_per_second": int(tokens) / seconds,
                "tflops": done,
                "share_of_matrix_rate": done / rate,
                "share_of_target_passes": {
                    n: target / s / 1e12 / rate for n, s in passes.items() if n.startswith("target")
                },
                "seconds_by_pass": passes,
                "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            }
        )
    return {
        "pair": pair,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "environment": environment(models.target),
        "tokens": int(tokens),
        "texts": int(texts),
        "backends": {r: m.backend.name for r, m in models.by_role.items()},
        "matrix_tflops": rate,
        "weights_gb": weights / 1e9,
        "runs": runs,
    }


def _texts(count: int, length: int, vocabulary: int) -> "list[Text]":
    """Random tokens, half of each text its prompt."""
    import torch

    from specq.prompts import Prompt, Text

    ids = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    half = length // 2
    return [
        Text(Prompt(f"r{i}", "", None, tuple(t[:half])), tuple(t[half:]), "given", False) for i, t in enumerate(ids)
    ]


def operations(model: "LoadedModel", text: "Text") -> float:
    """Multiplications and additions of one scoring pass over a text: two per weight and token in matrix products (the LM
    head at scored positions only), four per query head, channel and pair of tokens in causal attention."""
    g, shape = model.geometry, model.shape
    fed = len(text.tokens) - 1
    head = g.hidden * g.vocab
    body = shape.weights - shape.table - head
    return 2.0 * body * fed + 2.0 * head * text.positions + 4.0 * g.layers * g.heads * g.head_dim * fed * (fed + 1) / 2
