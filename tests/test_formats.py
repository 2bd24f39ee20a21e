"""KV formats: what is stored is exact, what is read back is as close as the codec allows."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from specq.errors import SpecqError
from specq.kv import FORMATS, get_format
from specq.kv.base import E4M3, E5M2, INT8

BY_NAME = {f.name: f for f in FORMATS}


def random_kv(seed, shape=(2, 3, 17, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def static_scale(fmt, part, x):
    """The calibrated scale of `x` in the format's granularity, None where it needs none."""
    kind = fmt.granularity(part)
    if kind == "channel":
        return x.abs().amax(dim=(0, 2), keepdim=True) / fmt.codec.max
    return x.abs().amax().view(1, 1, 1, 1) / fmt.codec.max if kind == "tensor" else None


def roundtrip(fmt, part, x, scale=None):
    scale = static_scale(fmt, part, x) if scale is None else scale
    return fmt.load(fmt.store(x, part, scale), part, scale, torch.float32)


def test_q01_e4m3_saturates_and_keeps_nan():
    """Q-01: beyond 448 e4m3 saturates, infinities too, and NaN stays NaN, whatever the PyTorch release does."""
    x = torch.tensor([448.0, 464.0, 465.0, 1000.0, -1000.0, float("inf"), float("-inf")])
    assert E4M3.encode(x).float().tolist() == [448, 448, 448, 448, -448, 448, -448]
    assert E5M2.encode(torch.tensor([57344.0, 61440.0, 1e9, -1e9])).float().tolist() == [57344, 57344, 57344, -57344]
    assert E4M3.encode(torch.tensor([float("nan")])).float().isnan().all()
    fmt = get_format("fp8")
    one = torch.ones(1, 1, 1, 1)
    assert int(fmt.count_saturated(x.view(1, 1, 1, -1), "k", one)) == 6


def test_e4m3_rounds_to_nearest_even():
    """Between neighbours 16 and 18 (step 2 in [16, 32)), 17 goes to 16 and 19 to 20: the even mantissa."""
    assert E4M3.encode(torch.tensor([17.0, 19.0, 17.1])).float().tolist() == [16.0, 20.0, 18.0]


def test_every_e4m3_value_is_its_own_code():
    """Identity quantization: the 254 finite e4m3 values survive a store at scale 1 bit for bit."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()]
    assert len(values) == 254
    assert torch.equal(E4M3.encode(values).float(), values)


@pytest.mark.parametrize("part", ["k", "v"])
def test_q13_int8_rounds_to_nearest_even(part):
    """Q-13: amax 127 gives scale 1, and [.6, 1.5, 2.5, ...] round to nearest even, K and V alike; truncation would not."""
    x = torch.tensor([127.0, 0.6, 1.5, 2.5, -0.6, -1.5, -2.5]).view(1, 1, 1, 7)
    codes, scale = get_format("int8").store(x, part)
    assert scale.item() == 1.0
    assert codes.flatten().tolist() == [127, 1, 2, 2, -1, -2, -2]


@pytest.mark.parametrize("name", ["int8_per_token_head", "int8_per_channel", "int8_per_tensor", "int8_per_token_asym"])
def test_q13_int8_error_has_no_bias(name):
    """Q-13: over random data the mean rounding error is 0 within 5 standard errors of a uniform error."""
    fmt, x = BY_NAME[name], random_kv(3, (4, 2, 200, 64))
    error = roundtrip(fmt, "k", x) - x
    step = (roundtrip(fmt, "k", x) - x).abs().max() * 2
    assert abs(error.mean()) < 5 * step / (12 * x.numel()) ** 0.5


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("part", ["k", "v"])
def test_q05_zeros_stay_zero_and_spoil_nothing(fmt, part):
    """Q-05: a zero row, a zero head and an all-zero tensor read back as exact zeros with finite, positive scales."""
    x = random_kv(0)
    x[0, 1, 4] = 0.0
    x[:, 2] = 0.0
    for data in (x, torch.zeros_like(x)):
        scale = static_scale(fmt, part, data)
        scale = None if scale is None else torch.where(scale == 0, 1.0, scale)
        stored = fmt.store(data, part, scale)
        back = fmt.load(stored, part, scale, torch.float32)
        assert (back[data == 0] == 0).all()
        if fmt.granularity(part).startswith("token_head"):
            assert torch.isfinite(stored[1]).all() and (stored[1] > 0).all()
    others = torch.ones(x.shape[:3], dtype=torch.bool)
    others[0, 1, 4] = others[:, 2] = False
    if fmt.granularity(part) not in ("tensor", "channel"):
        clean = roundtrip(fmt, part, random_kv(0))
        assert torch.equal(roundtrip(fmt, part, x)[others], clean[others])


# Largest error relative to the scale's unit: half a step of the codec (integers), 2^-4 or 2^-3 of the value (floats).
BOUNDS = {"bf16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "fp8_per_token_head": 2**-4}


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("part", ["k", "v"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-3, 3))
def test_error_is_within_half_a_step(fmt, part, seed, exponent):
    """Reading back errs by at most half a step of the codec at that value, for any magnitude of the data."""
    x = random_kv(seed) * 10.0**exponent
    scale = static_scale(fmt, part, x)
    back = roundtrip(fmt, part, x, scale)
    if fmt.name in BOUNDS:
        unit = scale if scale is not None else x.abs().amax(-1, keepdim=True) / fmt.codec.max
        smallest = 2.0**-10 if fmt.codec is E4M3 else 2.0**-17  # half of the smallest subnormal
        bound = x.abs() * BOUNDS[fmt.name] + (0 if fmt.name == "bf16" else unit * smallest)
    elif fmt.granularity(part) == "token_head_asym":
        bound = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 255 * 0.5
    else:
        bound = scale * 0.5 if scale is not None else x.abs().amax(-1, keepdim=True) / 127 * 0.5
    assert ((back - x).abs() <= bound * (1 + 1e-4)).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), power=st.integers(-2, 3))
def test_fp8_scale_s_and_2s_read_back_identically(seed, power):
    """Check 3: powers of two only move the exponent, so scales s and 2s give the same values (normal range)."""
    x = random_kv(seed).sign() * (0.5 + random_kv(seed + 1).abs())
    fmt, s = get_format("fp8"), torch.full((1, 1, 1, 1), 2.0**power / 16)
    assert torch.equal(roundtrip(fmt, "k", x, s), roundtrip(fmt, "k", x, 2 * s))


def test_q06_scale_one_loses_what_calibration_keeps():
    """Q-06: K with half its values near 1e-4 and some near 1000: scale 1.0 flushes the small and clips the large."""
    g = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(1, 2, 64, 32, generator=g) < 0.5, 1e-4, 1.0) * torch.randn(1, 2, 64, 32, generator=g)
    x[..., :2] *= 1000
    fmt = get_format("fp8")
    one = torch.ones(1, 1, 1, 1)
    back = fmt.load(fmt.store(x, "k", one), "k", one, torch.float32)
    assert (back[x.abs() < 2**-10 * 0.99] == 0).all() and back.abs().max() == 448
    error = (back - x).norm() / x.norm()
    calibrated = (roundtrip(fmt, "k", x) - x).norm() / x.norm()
    assert error > 5 * calibrated
    assert int(fmt.count_saturated(x, "k", one)) == int((x.abs() > 448).sum()) > 0


def test_q06_small_values_and_large_values_separately():
    """Q-06: at scale 1.0 everything below half the smallest subnormal (2^-10) becomes 0."""
    x = torch.full((1, 1, 1, 4), 2**-10 * 0.99)
    one = torch.ones(1, 1, 1, 1)
    assert (roundtrip(get_format("fp8"), "v", x, one) == 0).all()
    assert (roundtrip(get_format("fp8"), "v", x) > 0).all()


def test_outlier_channel_spoils_a_tensor_scale_and_not_a_channel_scale():
    """One channel at 300: per-tensor INT8 leaves the others a handful of levels, per-channel keeps them all."""
    x = random_kv(1, (1, 2, 128, 32))
    x[..., 5] = 300 + x[..., 5]
    rest = [i for i in range(32) if i != 5]
    error = {}
    for name in ("int8_per_tensor", "int8_per_channel", "int8_k_channel_v_token"):
        error[name] = ((roundtrip(BY_NAME[name], "k", x) - x)[..., rest]).norm() / x[..., rest].norm()
    assert error["int8_per_tensor"] > 0.5
    assert error["int8_per_channel"] < 0.01 and error["int8_k_channel_v_token"] < 0.01


def test_nan_rows_stay_nan_and_leave_others_alone():
    """A NaN reaches the reader of its own row (dynamic scales) and no other row; INT8 cannot hide it behind a 0."""
    x = random_kv(0)
    x[1, 2, 3, 4] = float("nan")
    for name in ("int8_per_token_head", "fp8_per_token_head"):
        back = roundtrip(BY_NAME[name], "k", x)
        assert back[1, 2, 3].isnan().any()
        assert back.isnan().sum() == back[1, 2, 3].isnan().sum()
    assert INT8.encode(torch.tensor([float("nan")])).item() == 0


def test_names_aliases_and_bytes():
    """`fp8`, `int8`, `auto` are aliases; bytes per token count codes and float32 scales; unknown names are refused."""
    assert get_format("FP8").name == "fp8_e4m3" and get_format("int8").name == "int8_per_token_head"
    assert get_format("auto").name == get_format("bfloat16").name == "bf16"
    assert get_format("bf16").bytes_per_token(8, 128) == (4096, 0)
    assert get_format("fp8").bytes_per_token(8, 128) == (2048, 0)
    assert get_format("int8").bytes_per_token(8, 128) == (2048, 64)
    assert get_format("int8_per_token_asym").bytes_per_token(8, 128) == (2048, 128)
    assert [f.vllm for f in FORMATS] == ["bfloat16", "fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"] + [
        None
    ] * 4
    with pytest.raises(SpecqError, match="fp8_e4m3 .fp8."):
        get_format("fp4")
