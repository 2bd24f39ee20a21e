"""Markov toys of speculative decoding with exact answers, written apart from specq on purpose.

Target and draft are first-order Markov chains over a few tokens, so a prefix is its last token and everything has a
closed form. Three independent roads to one number:

- `simulate` runs real speculative sampling, cycle by cycle, in many streams at once;
- `sample_text` draws text from the target and `along` gives a_t and b_t on it: what `specq.chain` is fed with;
- `expect` and `steady` solve the law of (last token, drafts accepted so far) as linear equations.

All count alike: a stream starts a cycle at its first token, and only the first T tokens count, so that expected cycle
ends and accepted drafts agree exactly at every T, not only in the limit.

Rules are pairs (draft, verify): draft "probabilistic" or "greedy", verify "standard" or "strict".
"""

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
    """Exact answers at one K: emitted per cycle and marginal survival S_1..S_K."""

    emitted: float
    survival: np.ndarray


def random_kernel(rng: np.random.Generator, vocabulary: int, concentration: float = 0.7) -> np.ndarray:
    """A random Markov kernel [V, V] without zeros: rows are distributions of the next token."""
    return 0.99 * rng.dirichlet(np.full(vocabulary, concentration), size=vocabulary) + 0.01 / vocabulary


def circulant(row: np.ndarray) -> np.ndarray:
    """The kernel whose rows are shifts of one distribution: tokens are dependent, yet every context is alike."""
    return np.stack([np.roll(row, v) for v in range(len(row))])


def stationary(kernel: np.ndarray) -> np.ndarray:
    """The stationary law [V] of a kernel."""
    v = len(kernel)
    equations = np.vstack([kernel.T - np.eye(v), np.ones(v)])
    return np.linalg.lstsq(equations, np.concatenate([np.zeros(v), [1.0]]), rcond=None)[0]


def acceptance(p: np.ndarray, q: np.ndarray, rule: tuple[str, str] = RULES[0]) -> tuple[np.ndarray, np.ndarray]:
    """(a [V], b [V, V]): acceptance given the last token, and given last and next token, from the rule's definition."""
    draft, verify = rule
    v = len(p)
    if draft == "greedy":
        best = q.argmax(-1)
        return p[np.arange(v), best], np.eye(v)[best]
    if verify == "strict":
        return (p * q).sum(-1), q.copy()
    both = np.minimum(p, q)
    return both.sum(-1), both / p


def control(base: tuple[np.ndarray, np.ndarray], arm: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """c = b(base) + a(arm) - a(base), [V, V]."""
    return base[1] + (arm[0] - base[0])[:, None]


def _moments(a: np.ndarray, c: np.ndarray, law: list[np.ndarray], k: int) -> tuple[float, np.ndarray]:
    hits = np.array([float(a @ law[j]) for j in range(k)])
    return 1.0 - hits.sum(), hits


def expect(
    text: np.ndarray, a: np.ndarray, c: np.ndarray, k: int, tokens: int, start: np.ndarray
) -> tuple[float, np.ndarray]:
    """Expected cycle ends and accepted drafts by depth [k] over the first `tokens` tokens of text ~ `text`.

    The law of (last token, j) is iterated: c [V, V] moves j to j + 1 along the text, and the rest returns to 0. With
    c = b this is the law of real speculative sampling; any other c is exact as well, since the law is linear in it.
    """
    step = (text * c).T
    context = start
    law = [start] + [np.zeros_like(start)] * k
    ends, accepted = 0.0, np.zeros(k)
    for _ in range(tokens):
        e, hits = _moments(a, c, law, k)
        ends, accepted = ends + e, accepted + hits
        context = text.T @ context
        moved = [step @ law[j] for j in range(k)]
        law = [context - sum(moved), *moved]
    return ends, accepted


def steady(text: np.ndarray, a: np.ndarray, c: np.ndarray, k: int) -> Expectation:
    """The same in the long run: the stationary law of (last token, j) as the solution of a linear system.

    law_j = step^j law_0 and sum_j law_j = the stationary law of the text give law_0.
    """
    step = (text * c).T
    powers = [np.linalg.matrix_power(step, j) for j in range(k + 1)]
    first = np.linalg.solve(sum(powers), stationary(text))
    e, hits = _moments(a, c, [m @ first for m in powers], k)
    return Expectation(1.0 / e, hits / e)


def own_text(p: np.ndarray, q: np.ndarray, k: int, rule: tuple[str, str] = RULES[0]) -> Expectation:
    """Real speculative sampling of target p with draft q, in the long run."""
    return steady(p, *acceptance(p, q, rule), k)


def other_text(p: np.ndarray, arm: np.ndarray, q: np.ndarray, k: int, rule: tuple[str, str] = RULES[0]) -> Expectation:
    """The control form: target `arm` scored on text that target p sampled, with draft q."""
    of_p, of_arm = acceptance(p, q, rule), acceptance(arm, q, rule)
    return steady(p, of_arm[0], control(of_p, of_arm), k)


def own_b(p: np.ndarray, arm: np.ndarray, q: np.ndarray, k: int) -> Expectation:
    """Wrong: the arm's own b moves the chain on text that p sampled."""
    return steady(p, *acceptance(arm, q), k)


def b_alone(p: np.ndarray, arm: np.ndarray, q: np.ndarray, k: int) -> Expectation:
    """Wrong: the arm's own b stands for a as well. Its mean given the prefix is taken over the text's law, p."""
    b = acceptance(arm, q)[1]
    return steady(p, (p * b).sum(-1), b, k)


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


def along(text: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a_t and b_t, each [tokens, texts], along a text of `sample_text`."""
    return a[text[:-1]], b[text[:-1], text[1:]]


def simulate(
    p: np.ndarray,
    q: np.ndarray,
    rule: tuple[str, str],
    k: int,
    streams: int,
    tokens: int,
    rng: np.random.Generator,
    start: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Real speculative sampling in many streams: draft K, verify, correct or add the bonus token, again.

    Returns cycle ends [streams] and accepted drafts by depth [streams, k] among each stream's first `tokens` tokens, and
    the emitted text [tokens + 1, streams].
    """
    draft, verify = rule
    v, row = len(p), np.arange(streams)
    last = draw(np.tile(start, (streams, 1)), rng)
    text = np.full((tokens + k + 2, streams), -1)
    text[0] = last
    done = np.zeros(streams, dtype=int)  # tokens emitted so far
    ends, accepted = np.zeros(streams), np.zeros((streams, k))
    one_hot = np.eye(v)[q.argmax(-1)]
    proposal = one_hot if draft == "greedy" else q
    while (done < tokens).any():
        contexts, drafts = [last], []
        for _ in range(k):
            drafts.append(draw(proposal[contexts[-1]], rng))
            contexts.append(drafts[-1])
        count = np.zeros(streams, dtype=int)
        extra = np.full(streams, -1)
        going = np.ones(streams, dtype=bool)
        for i in range(k):
            at, d = contexts[i], drafts[i]
            if verify == "strict":
                correction = draw(p[at], rng)  # the target's own sample, kept whether it agrees or not
                good = correction == d
            else:
                good = rng.random(streams) * proposal[at, d] < p[at, d]
                left = np.maximum(p[at] - proposal[at], 0.0)
                correction = draw(left, rng)
            extra = np.where(going & ~good, correction, extra)
            going &= good
            count += going
        extra = np.where(going, draw(p[contexts[k]], rng), extra)
        for i in range(k):
            place = done + i + 1
            counted = (count > i) & (place <= tokens)
            accepted[:, i] += counted
            text[np.where(counted, place, tokens + k + 1), row] = drafts[i]
        place = done + count + 1
        ends += place <= tokens
        text[np.minimum(place, tokens + k + 1), row] = extra
        done += np.where(done < tokens, count + 1, 0)
        last = extra
    return ends, accepted, text[: tokens + 1]


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    """sum / sum over independent streams, with the delta method's standard error."""
    n, value = len(denominators), numerators.sum() / denominators.sum()
    rest = (numerators - value * denominators) / denominators.mean()
    return Estimate(float(value), float(rest.std(ddof=1) / np.sqrt(n)))


def rates(tokens: np.ndarray, ends: np.ndarray, accepted: np.ndarray) -> list[Estimate]:
    """[emitted, S_1, ..., S_K] from sums per stream."""
    return [ratio(tokens, ends), *(ratio(accepted[:, i], ends) for i in range(accepted.shape[1]))]
