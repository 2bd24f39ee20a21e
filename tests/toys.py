"""Markov toys of speculative decoding with exact answers, written apart from specq on purpose.

Target and draft are first-order Markov chains over a few tokens, so a prefix is its last token and everything has a
closed form. Three independent roads to one number:

- `simulate` runs real speculative sampling, cycle by cycle, in many streams at once;
- `sample_text` draws text from the target and `along` gives a_t and b_t on it: what `specq.chain` is fed with;
- `expect` and `steady` solve the law of (last token, drafts accepted so far) as linear equations.

All count alike: a stream starts a cycle at its first token, and only the first T tokens count, so that expected cycle
ends and accepted drafts agree exactly at every T, not only in the limit.

Kernels are [V, V], last token first. A draft kernel may have an axis in front, [K, V, V]: its law at each depth of the
cycle. Rules are pairs (draft, verify): draft "probabilistic" or "greedy", verify "standard" or "strict".
"""

import itertools
from dataclasses import dataclass

import numpy as np

RULES = [(draft, verify) for draft in ("probabilistic", "greedy") for verify in ("standard", "strict")]


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    se: float


@dataclass(frozen=True)
class Expectation:
    """Exact long-run answers at one K: emitted per cycle and marginal survival S_1..S_K."""

    emitted: float
    survival: np.ndarray


@dataclass(frozen=True)
class Terms:
    """a [..., V] given the last token, b [..., V, V] given last and next token."""

    a: np.ndarray
    b: np.ndarray


def random_kernel(rng: np.random.Generator, vocabulary: int, concentration: float = 1.0) -> np.ndarray:
    """A random Markov kernel without zeros."""
    return 0.99 * rng.dirichlet(np.full(vocabulary, concentration), size=vocabulary) + 0.01 / vocabulary


def circulant(row: np.ndarray) -> np.ndarray:
    """The kernel whose rows are shifts of one distribution: tokens depend on each other, yet all contexts are alike."""
    return np.stack([np.roll(row, v) for v in range(len(row))])


def stationary(kernel: np.ndarray) -> np.ndarray:
    """The stationary law [V] of a kernel."""
    v = len(kernel)
    equations = np.vstack([kernel.T - np.eye(v), np.ones(v)])
    return np.linalg.lstsq(equations, np.concatenate([np.zeros(v), [1.0]]), rcond=None)[0]


def acceptance(p: np.ndarray, q: np.ndarray, rule: tuple[str, str] = RULES[0]) -> Terms:
    """Acceptance probabilities of target p and draft q, from the rule's definition."""
    draft, verify = rule
    if draft == "greedy":
        b = np.eye(p.shape[-1])[q.argmax(-1)]
        return Terms((p * b).sum(-1), b)
    if verify == "strict":
        return Terms((p * q).sum(-1), q)
    both = np.minimum(p, q)
    return Terms(both.sum(-1), both / p)


def control(base: Terms, arm: Terms) -> np.ndarray:
    """c = b(base) + a(arm) - a(base), [..., V, V]."""
    return base.b + (arm.a - base.a)[..., None]


def expect(
    text: np.ndarray, a: np.ndarray, c: np.ndarray, k: int, tokens: int, start: np.ndarray
) -> tuple[float, np.ndarray]:
    """Expected cycle ends and accepted drafts by depth [k] over the first `tokens` tokens of text ~ `text`.

    The law of (last token, j) is iterated: c moves j to j + 1 along the text, and the rest returns to 0. With c = b this
    is the law of real speculative sampling; for any other c it is what the chain estimates, since the law is linear in
    it. `start` [V] is the law of the last token before the text.
    """
    v = len(text)
    a, c = np.broadcast_to(a, (k, v)), np.broadcast_to(c, (k, v, v))
    context, law = start, [start] + [np.zeros(v)] * k
    ends, accepted = 0.0, np.zeros(k)
    for _ in range(tokens):
        hits = np.array([a[j] @ law[j] for j in range(k)])
        ends, accepted = ends + context.sum() - hits.sum(), accepted + hits
        context = context @ text
        moved = [law[j] @ (text * c[j]) for j in range(k)]
        law = [context - sum(moved), *moved]
    return ends, accepted


def steady(text: np.ndarray, a: np.ndarray, c: np.ndarray, k: int) -> Expectation:
    """The same in the long run: the stationary law of (last token, j) as the solution of a linear system.

    law_j = law_0 step^j, and sum_j law_j = the stationary law of the text, give law_0.
    """
    powers = [np.linalg.matrix_power(text * c, j) for j in range(k + 1)]
    first = np.linalg.solve(sum(powers).T, stationary(text))
    hits = np.array([first @ powers[j] @ a for j in range(k)])
    return Expectation(1.0 / (1.0 - hits.sum()), hits / (1.0 - hits.sum()))


def own_text(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Emitted of real speculative sampling with target p and draft q."""
    terms = acceptance(p, q)
    return steady(p, terms.a, terms.b, k).emitted


def other_text(p: np.ndarray, arm: np.ndarray, q: np.ndarray, k: int) -> float:
    """The control form: emitted of target `arm` scored on text that target p sampled."""
    base, other = acceptance(p, q), acceptance(arm, q)
    return steady(p, other.a, control(base, other), k).emitted


def own_b(p: np.ndarray, arm: np.ndarray, q: np.ndarray, k: int) -> float:
    """Wrong: the arm's own b moves the chain on text that p sampled."""
    terms = acceptance(arm, q)
    return steady(p, terms.a, terms.b, k).emitted


def b_alone(p: np.ndarray, arm: np.ndarray, q: np.ndarray, k: int) -> float:
    """Wrong: the arm's own b stands for a as well; its mean given the prefix is then one over the text's law, p."""
    b = acceptance(arm, q).b
    return steady(p, (p * b).sum(-1), b, k).emitted


def renewal_ends(rates: np.ndarray, tokens: int) -> np.ndarray:
    """Probability [tokens, ...] that a cycle ends at each position when depth j accepts with rates[j] ([K, ...]).

    Positions are then alike and cycles independent, so lengths L = 1..K+1 with their law form a renewal process.
    """
    reach = np.cumprod(np.concatenate([np.ones_like(rates[:1]), rates]), axis=0)  # first j drafts accepted
    law = reach * np.concatenate([1.0 - rates, np.ones_like(rates[:1])])  # [K + 1, ...]: cycle of length j + 1
    renewed = np.zeros((tokens + 1, *rates.shape[1:]))
    renewed[0] = 1.0
    for t in range(1, tokens + 1):
        lengths = range(1, min(t, len(law)) + 1)
        renewed[t] = sum(law[n - 1] * renewed[t - n] for n in lengths)
    return renewed[1:]


def draw(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token from each row of [N, V] non-negative weights."""
    cdf = rows.cumsum(-1)
    return (rng.random(len(rows))[:, None] * cdf[:, -1:] >= cdf[:, :-1]).sum(-1)


def sample_text(kernel: np.ndarray, texts: int, tokens: int, rng: np.random.Generator, start: np.ndarray) -> np.ndarray:
    """[tokens + 1, texts]: a last prompt token from the law `start`, then text."""
    out = np.empty((tokens + 1, texts), dtype=int)
    out[0] = draw(np.tile(start, (texts, 1)), rng)
    for t in range(tokens):
        out[t + 1] = draw(kernel[out[t]], rng)
    return out


def every_text(kernel: np.ndarray, tokens: int, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All V^(tokens + 1) texts, [tokens + 1, texts], with their probabilities [texts]."""
    texts = np.array(list(itertools.product(range(len(kernel)), repeat=tokens + 1))).T
    return texts, start[texts[0]] * kernel[texts[:-1], texts[1:]].prod(0)


def along(text: np.ndarray, a: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a_t and c_t along texts, each [tokens, texts], or [tokens, texts, K] for values by depth."""
    return np.moveaxis(a[..., text[:-1]], (-2, -1), (0, 1)), np.moveaxis(c[..., text[:-1], text[1:]], (-2, -1), (0, 1))


def simulate(
    p: np.ndarray,
    q: np.ndarray,
    rule: tuple[str, str],
    k: int,
    streams: int,
    tokens: int,
    rng: np.random.Generator,
    start: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Real speculative sampling in many streams: draft K, verify, correct or add the bonus token, again.

    Returns the text [tokens + 1, streams] and, for each position after the first, how its token came about [tokens,
    streams]: i = accepted as the cycle's i-th draft, 0 = the target's own token, which ends the cycle.
    """
    draft, verify = rule
    v, row = len(p), np.arange(streams)
    proposal = np.broadcast_to(np.eye(v)[q.argmax(-1)] if draft == "greedy" else q, (k, v, v))
    text = np.empty((tokens + 1, streams), dtype=int)
    origin = np.empty((tokens, streams), dtype=int)
    last = text[0] = draw(np.tile(start, (streams, 1)), rng)
    done = np.zeros(streams, dtype=int)

    def emit(place: np.ndarray, token: np.ndarray, depth: int, which: np.ndarray) -> None:
        which = which & (place <= tokens)
        text[place[which], row[which]] = token[which]
        origin[place[which] - 1, row[which]] = depth

    while (done < tokens).any():
        contexts = [last]
        for i in range(k):
            contexts.append(draw(proposal[i][contexts[i]], rng))
        going = np.ones(streams, dtype=bool)
        extra = draw(p[contexts[k]], rng)  # the bonus token, unless a draft is rejected
        for i in range(k):
            at, d = contexts[i], contexts[i + 1]
            if verify == "strict":
                correction = draw(p[at], rng)  # the target's own sample, whether the draft agrees or not
                good = correction == d
            else:
                good = rng.random(streams) * proposal[i][at, d] < p[at, d]
                correction = draw(np.maximum(p[at] - proposal[i][at], 0.0), rng)
            extra = np.where(going & ~good, correction, extra)
            going &= good
            emit(done + 1, d, i + 1, going)
            done = done + going
        emit(done + 1, extra, 0, np.ones(streams, dtype=bool))
        done, last = done + 1, extra
    return text, origin


def counts(origin: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cycle ends [streams] and accepted drafts by depth [streams, k] from `simulate`."""
    return (origin == 0).sum(0), np.stack([(origin == i + 1).sum(0) for i in range(k)], axis=1)


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    """sum / sum over independent streams, with the delta method's standard error."""
    value = numerators.sum() / denominators.sum()
    rest = (numerators - value * denominators) / denominators.mean()
    return Estimate(float(value), float(rest.std(ddof=1) / np.sqrt(len(rest))))


def rates(tokens: int, ends: np.ndarray, accepted: np.ndarray) -> list[Estimate]:
    """[emitted, S_1, ..., S_K] from sums per stream, streams being independent."""
    return [ratio(np.full(len(ends), tokens), ends), *(ratio(a, ends) for a in accepted.T)]
