"""Regret by simulation: does the K chosen from 30 prompts serve the traffic those prompts were drawn from?

500 random worlds. In each, prompts differ in their acceptance, rates fall with the depth of the draft, and a cycle costs
K draft steps, a verification that grows with K, and a fixed term. A study sees 30 prompts of 200 tokens and, per position,
whether the token was an accepted draft (a coin of the true probability: the noisiest b that its mean allows). The truth is
the long run over all prompts of that world, by quadrature.
"""

from dataclasses import dataclass

import numpy as np

from specq import chain, stats
from specq.cost import Operating, cycle_times, speedup
from specq.tune import Curve, speed_curve

WORLDS, PROMPTS, TOKENS, K_MAX, CHUNK = 500, 30, 200, 8, 50
AT = Operating(1, 1024, "bf16", "bf16")


@dataclass(frozen=True)
class World:
    """Acceptance of prompt z at depth j: logistic(level + spread z - fall j); costs in units of a plain step."""

    level: float
    spread: float
    fall: float
    draft: float
    verify: float
    fixed: float
    source: str = "simulated"

    @property
    def details(self):
        return {}

    def rates(self, z):
        """Acceptance by depth, [*z.shape, K_MAX]."""
        return 1 / (1 + np.exp(-(self.level + self.spread * z[..., None] - self.fall * np.arange(K_MAX))))

    def step_time(self, kind, batch, context, new_tokens, kv_format):
        return self.draft if kind == "draft" else 1 + self.verify * (new_tokens - 1)

    def step_time_draws(self, *case):
        return np.array([self.step_time(*case)])

    def true_speedup(self):
        """Speedup by K in the long run over all prompts, each with as many tokens: cycles per token average."""
        z, weight = np.polynomial.hermite_e.hermegauss(60)
        emitted = 1 + self.rates(z).cumprod(-1).cumsum(-1)
        mean = 1 / ((weight / weight.sum()) @ (1 / emitted))
        return speedup(np.concatenate([[1.0], mean]), cycle_times(self, AT, K_MAX))


def worlds(count):
    rng = np.random.default_rng(20260)
    return [
        World(
            level=rng.uniform(-1.0, 2.5),
            spread=rng.uniform(0.0, 1.0),
            fall=rng.uniform(0.0, 0.4),
            draft=float(np.exp(rng.uniform(np.log(0.01), np.log(0.6)))),
            verify=rng.uniform(0.0, 0.08),
            fixed=rng.uniform(0.0, 0.15),
        )
        for _ in range(count)
    ]


def studies(some, seed):
    """The speed curve that a study of each world would find: the product's chain, resampler and tuner."""
    rng = np.random.default_rng(seed)
    rates = np.stack([w.rates(rng.standard_normal(PROMPTS)) for w in some]).reshape(-1, K_MAX)
    coins = rng.random((TOKENS, len(rates), 1)) < rates  # one coin per position: depths share it
    a = np.broadcast_to(rates, (TOKENS, *rates.shape))
    result = chain.run_chain(a, coins.astype(float), np.full(len(rates), TOKENS), K_MAX)
    resampler = stats.Resampler(PROMPTS, 500, seed)
    for i, world in enumerate(some):
        mine = slice(i * PROMPTS, (i + 1) * PROMPTS)
        tokens, ends = result.tokens[mine], result.ends[mine]
        emitted = np.concatenate([[1.0], chain.emitted(tokens, ends)])
        yield world, speed_curve(emitted, resampler.emitted_draws(stats.Sums(tokens, ends)), world, AT)


def test_the_chosen_k_is_nearly_the_best_there_is():
    """Issue: within 2 % of the true best in at least 95 % of 500 worlds, and never worse than plain decoding by more than
    the stated uncertainty of the chosen K's speedup."""
    everything = worlds(WORLDS)
    regret, below, chosen = [], [], []
    for start in range(0, WORLDS, CHUNK):
        for world, curve in studies(everything[start : start + CHUNK], seed=start):
            truth = world.true_speedup()
            k = curve.best
            regret.append(1 - truth[k] / truth.max())
            below.append(1 - truth[k] - _uncertainty(curve, k))
            chosen.append(k)
    regret = np.array(regret)
    assert (regret <= 0.02).mean() >= 0.95, f"{(regret <= 0.02).mean():.3f} within 2 %, largest {regret.max():.3f}"
    assert max(below) <= 0
    assert len(set(chosen)) == K_MAX + 1  # the worlds ask for every K, none included


def _uncertainty(curve: Curve, k: int) -> float:
    return float(curve.point[k] - curve.interval(k)[0])
