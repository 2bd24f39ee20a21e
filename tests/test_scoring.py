"""From logits to columns: the kernels' way against torch's, in Triton's interpreter."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from specq_kernels.codec import INTERPRETED  # noqa: E402

from specq import scoring  # noqa: E402
from specq.kv import get_format  # noqa: E402
from specq.models.vocabulary import Vocabulary  # noqa: E402
from specq.replay import Arm, Setting  # noqa: E402
from specq.rules import Rule, Transform  # noqa: E402

BF16, FP8, INT8 = (get_format(n) for n in ("bf16", "fp8", "int8"))
ARMS = [Arm.of(BF16, BF16), Arm.of(FP8, BF16), Arm.of(INT8, BF16), Arm.of(BF16, FP8), Arm.of(FP8, FP8)]
RULES = [Rule(d, v) for d in ("probabilistic", "greedy") for v in ("standard", "strict")]
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no GPU and no interpreter (TRITON_INTERPRET=1)", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def logits_of(count, widths, seed=0):
    """Close logits of every pass of ARMS: unequal widths of target and draft."""
    g = torch.Generator().manual_seed(seed)
    common = 2 * torch.randn(count, max(widths), generator=g)
    passes = dict.fromkeys(p for a in ARMS for p in (a.target, a.draft))
    rows = {p: common + 0.5 * torch.randn(common.shape, generator=g) for p in passes}
    return {p: x[:, : widths[p.role == "draft"]].to(DEVICE) for p, x in rows.items()}


def positions_of(count, size):
    g = torch.Generator().manual_seed(1)
    tokens, uniforms = torch.randint(0, size, (count,), generator=g), torch.rand(count, generator=g).double()
    return scoring.Positions(tokens, uniforms).to(torch.device(DEVICE))


@pytest.mark.parametrize(("rule", "heat"), itertools.product(RULES, [(1.0, 1.0), (0.6, 1.3), (0.0, 0.0)]), ids=str)
def test_the_kernels_give_the_columns_of_torch(rule, heat):
    """Every column of every arm, for every rule, unequal temperatures and greedy decoding, padded and unequal widths."""
    count, size = 40, 50
    setting = Setting(Transform(heat[0]), Transform(heat[1]), rule, Vocabulary(size, size, 64, 48), 0)
    logits, positions = logits_of(count, (64, 48)), positions_of(count, size)
    expected, _ = scoring._by_torch(logits, ARMS, positions, setting)
    got, bad = scoring._by_kernels(logits, ARMS, positions, setting)
    assert got.keys() == expected.keys() and not any(b.any() for b in bad.values())
    for arm, columns in expected.items():
        assert got[arm].keys() == columns.keys()
        for name, column in columns.items():
            assert got[arm][name].cpu().numpy() == pytest.approx(
                column.cpu().numpy(), rel=1e-5, abs=2e-6, nan_ok=False
            ), (
                arm,
                name,
            )


@pytest.mark.parametrize("heat", [1.0, 0.0])
@pytest.mark.parametrize("way", [scoring._by_torch, scoring._by_kernels])
def test_nan_is_blamed_on_its_own_pass(way, heat):
    """One NaN logit: its pass is bad at its position, and nothing else is."""
    logits = logits_of(6, (50, 50))
    guilty = [ARMS[1].target, ARMS[3].draft]
    for i, p in enumerate(guilty):
        logits[p][2 + i, 7] = float("nan")
    setting = Setting(Transform(heat), Transform(heat), Rule(), Vocabulary(50, 50, 50, 50), 0)
    _, bad = way(logits, ARMS, positions_of(6, 50), setting)
    assert {(p, int(i)) for p, b in bad.items() for i in b.nonzero()} == {(guilty[0], 2), (guilty[1], 3)}


@pytest.mark.parametrize("heat", [1.0, 0.0])
@pytest.mark.parametrize("way", [scoring._by_torch, scoring._by_kernels])
def test_nan_at_an_id_that_does_not_count_is_nobodys(way, heat):
    """Padded logits are never read, whatever a model leaves there."""
    logits, positions = logits_of(6, (64, 64)), positions_of(6, 50)
    setting = Setting(Transform(heat), Transform(heat), Rule(), Vocabulary(50, 50, 64, 64), 0)
    clean, _ = way(logits, ARMS, positions, setting)
    for x in logits.values():
        x[:, 50:] = float("nan")
    dirty, bad = way(logits, ARMS, positions, setting)
    assert not any(b.any() for b in bad.values())
    for arm, columns in clean.items():
        for name, column in columns.items():
            assert torch.equal(dirty[arm][name], column), (arm, name)


def test_q15_p_is_the_same_bits_whatever_the_draft(monkeypatch):
    """Q-15 through the kernels: calls for other numbers of arms may round otherwise; p of a target and q of a draft come from
    one call each."""
    import specq_kernels

    kernel, calls = specq_kernels.acceptance, []

    def rounding(*args, **more):
        found = kernel(*args, **more)
        calls.append(1)
        for name in ("logp", "logq", "kl", "entropy"):
            getattr(found, name).add_(1e-3 * len(calls))
        return found

    monkeypatch.setattr(specq_kernels, "acceptance", rounding)
    setting = Setting(Transform(1.0), Transform(1.0), Rule(), Vocabulary(50, 50, 50, 50), 0)
    got, _ = scoring._by_kernels(logits_of(6, (50, 50)), ARMS, positions_of(6, 50), setting)
    assert len(calls) == 2
    for a, b in itertools.combinations(ARMS, 2):
        for name in ("logp", "kl", "entropy", "top1_agrees") if a.target == b.target else ():
            assert torch.equal(got[a.name][name], got[b.name][name]), (a.name, b.name, name)
        if a.draft == b.draft:
            assert torch.equal(got[a.name]["logq"], got[b.name]["logq"])


def test_slices_change_nothing():
    """Torch scores any number of positions at once alike, truncation included."""
    setting = Setting(Transform(0.8, 20, 0.9), Transform(0.8), Rule(), Vocabulary(50, 50, 50, 50), 0)
    logits, positions = logits_of(23, (50, 50)), positions_of(23, 50)
    whole, _ = scoring.score(logits, ARMS, positions, setting, 1 << 20)
    sliced, bad = scoring.score(logits, ARMS, positions, setting, 4 * 50)
    for arm, columns in whole.items():
        for name, column in columns.items():
            assert np.array_equal(sliced[arm][name].cpu(), column.cpu()), (arm, name)
    assert all(len(b) == 23 for b in bad.values())
