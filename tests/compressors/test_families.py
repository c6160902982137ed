"""Values of Cast, Quantize, Ternary and OneBit that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.onebit import OneBit
from lightning_compress.compressors.quantize import Quantize
from lightning_compress.compressors.ternary import Ternary
from lightning_compress.kernels.cpu import formats
from lightning_compress.kernels.reference.bits import TINY
from tests.compressors.coding import blocks_of, code_parameter, round_trip

FLOAT32_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [
        (Cast("fp16"), 2000),
        (Cast("bf16"), 2000),
        (Cast("fp32"), 4000),
        (Cast("fp8"), 4 + 1000),
        (Quantize(2), 4 + 250),
        (Quantize(3), 4 + 375),
        (Quantize(4), 4 + 500),
        (Quantize(8), 4 + 1000),
        (Ternary(), 4 + 200),
        (OneBit(), 4 + 1 + 125),
    ],
    ids=repr,
)
def test_bytes_of_a_block_of_1000(compressor, nbytes):
    assert compressor.payload_nbytes(1000) == nbytes


class TestCast:
    @pytest.mark.parametrize(
        ("name", "dtype", "code", "value", "integer"),
        [
            ("fp16", torch.float16, formats.fp16_code, formats.fp16_value, np.uint16),
            ("bf16", torch.bfloat16, formats.bf16_code, formats.bf16_value, np.uint16),
            ("fp8", torch.float8_e4m3fn, formats.fp8_code, formats.fp8_value, np.uint8),
        ],
    )
    def test_every_code_and_its_neighbourhood(self, name, dtype, code, value, integer):
        codes = np.arange(2 ** (8 * integer().itemsize)).astype(integer)
        signed = codes.view(np.dtype(integer).name[1:])
        expected = torch.from_numpy(signed.copy()).view(dtype).float().numpy()
        found = np.array([value(c) for c in codes])
        np.testing.assert_array_equal(found, expected)
        # every number, every middle between two, and the float32 on either side of each
        finite = np.sort(expected[np.isfinite(expected)])
        inputs = np.concatenate([finite, finite[:-1] / 2 + finite[1:] / 2]).astype(np.float32)
        inputs = np.concatenate(
            [inputs, np.nextafter(inputs, np.float32(0)), np.nextafter(inputs, np.sign(inputs) * 3e38)]
        )
        inputs = np.clip(inputs, finite[0], finite[-1]).astype(np.float32)
        rounded = torch.from_numpy(inputs).to(dtype).view(torch.int8 if integer is np.uint8 else torch.int16).numpy()
        np.testing.assert_array_equal(np.array([code(x) for x in inputs], integer), rounded.view(integer))

    @pytest.mark.parametrize("reference", [True, False])
    @pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", 3.3895313892515355e38)])
    def test_finite_numbers_saturate(self, name, largest, reference):
        gradient = torch.tensor([FLOAT32_MAX, -FLOAT32_MAX, 1.0])
        _, _, out = code_parameter(Cast(name), gradient, torch.zeros(3), 3, reference)
        assert out.tolist() == [largest, -largest, 1.0]

    def test_inf_and_nan_stay_in_a_payload_that_others_added_to(self):
        infinite = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]])
        for name in ("fp16", "bf16", "fp32"):
            found = round_trip(Cast(name), infinite)
            assert torch.equal(found.nan_to_num(7), infinite.nan_to_num(7))

    @pytest.mark.parametrize("reference", [True, False])
    def test_fp16_subnormal_numbers(self, reference):
        step = 2.0**-24
        gradient = torch.tensor([step, 2.5 * step, 3.5 * step, 0.5 * step, 0.51 * step, 1e-40])
        _, state, out = code_parameter(Cast("fp16"), gradient, torch.zeros(6), 6, reference)
        assert (out / step).tolist() == [1.0, 2.0, 4.0, 0.0, 1.0, 0.0]  # halves go to even
        assert torch.equal(state, gradient - out)

    @pytest.mark.parametrize("reference", [True, False])
    def test_fp8_scale_is_the_blocks_own(self, reference):
        gradient = torch.tensor([448.0, 416.0, -1.0, 2.0**-9, 0.0]) * 2.0**-30
        _, state, out = code_parameter(Cast("fp8"), gradient, torch.zeros(5), 5, reference)
        assert torch.equal(out, gradient)
        assert not state.any()


class TestQuantize:
    @pytest.mark.parametrize("reference", [True, False])
    def test_rounds_to_nearest_halves_to_even(self, reference):
        gradient = torch.tensor([7.0, -7.0, 0.5, 1.5, 2.49, -2.5, -3.51, 0.0])
        _, state, out = code_parameter(Quantize(4), gradient, torch.zeros(8), 8, reference)
        assert out.tolist() == [7.0, -7.0, 0.0, 2.0, 2.0, -2.0, -4.0, 0.0]
        assert torch.equal(state, gradient - out)

    def test_code_is_two_s_complement_lowest_bits_first(self):
        code = Quantize(4).encode(torch.tensor([[7.0, -7.0, -1.0, 2.0, 3.0]]), blocks_of(5, 1))
        assert code[0, 4:].tolist() == [0x97, 0x2F, 0x03]
        assert code[0, :4].clone().view(torch.float32).item() == 1.0

    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_error_is_at_most_half_a_step(self, bits):
        p = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
        step = p.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((round_trip(Quantize(bits), p) - p).abs() <= step * 0.5001).all()

    @pytest.mark.parametrize("reference", [True, False])
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_the_largest_float32_does_not_become_inf(self, bits, reference):
        gradient = torch.tensor([FLOAT32_MAX, -FLOAT32_MAX])
        _, _, out = code_parameter(Quantize(bits), gradient, torch.zeros(2), 2, reference)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out, gradient)


class TestTernary:
    @pytest.mark.parametrize("reference", [True, False])
    def test_sends_the_maximum_for_what_is_strictly_more_than_half_of_it(self, reference):
        above = float(np.nextafter(np.float32(2.0), np.float32(3.0)))
        gradient = torch.tensor([4.0, -4.0, 2.0, -2.0, above, -above, 1.0, 0.0, 3.0])
        _, state, out = code_parameter(Ternary(), gradient, torch.zeros(9), 9, reference)
        assert out.tolist() == [4.0, -4.0, 0.0, 0.0, 4.0, -4.0, 0.0, 0.0, 4.0]
        assert torch.equal(state, gradient - out)

    def test_five_digits_to_the_byte_of_elements_that_lie_apart(self):
        p = torch.tensor([[1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0]])  # n = 7: 2 bytes, element i in byte i % 2
        code = Ternary().encode(p, blocks_of(7, 1))
        assert code[0, 4:].tolist() == [1 + 2 * 3 + 1 * 27, 0]

    def test_every_byte_decodes_to_a_sign_or_zero(self):
        scale = torch.tensor([[2.0]]).view(torch.uint8)
        codes = torch.cat([scale.expand(256, 4), torch.arange(256, dtype=torch.uint8).unsqueeze(1)], dim=1)
        found = Ternary().decode(codes, blocks_of(5, 256))
        digits = torch.arange(256).unsqueeze(1) // 3 ** torch.arange(5) % torch.tensor([3, 3, 3, 3, 4])
        assert torch.equal(found, torch.tensor([0.0, 2.0, -2.0, 0.0])[digits])

    @pytest.mark.parametrize("reference", [True, False])
    def test_one_scale_for_the_whole_tensor(self, reference):
        compressor = Ternary(block_size=None)
        gradient = torch.linspace(-1, 1, 70_001)
        _, _, out = code_parameter(compressor, gradient, torch.zeros(70_001), 70_001, reference)
        assert torch.equal(out, (gradient.abs() > 0.5) * gradient.sign())


class TestOneBit:
    @pytest.mark.parametrize("reference", [True, False])
    def test_sends_the_mean_magnitude_and_plus_for_zero(self, reference):
        gradient = torch.tensor([1.0, -2.0, 0.0, 5.0])
        _, state, out = code_parameter(OneBit(), gradient, torch.zeros(4), 4, reference)
        assert out.tolist() == [2.0, -2.0, 2.0, 2.0]
        assert state.tolist() == [-1.0, 0.0, -2.0, 3.0]

    @pytest.mark.parametrize("reference", [True, False])
    def test_rows_of_zeros_take_no_part(self, reference):
        gradient = torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 2.0, 4.0]]).flatten()
        _, state, out = code_parameter(OneBit(), gradient, torch.zeros(9), 3, reference)
        assert out.tolist() == [2.0, -2.0, 2.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
        assert not state[3:6].any()

    @pytest.mark.parametrize("reference", [True, False])
    def test_rows_are_counted_from_the_parameters_start(self, reference):
        # blocks of 4 in rows of 3: the blocks begin in the middle of a row
        gradient = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0])
        _, state, out = code_parameter(OneBit(block_size=4), gradient, torch.zeros(12), 3, reference)
        assert torch.equal(out, gradient)
        assert not state.any()

    @pytest.mark.parametrize("reference", [True, False])
    def test_tensor_wide_scale_leaves_rows_of_zeros_out(self, reference):
        gradient = torch.tensor([[1.0, 3.0], [0.0, 0.0], [-2.0, 2.0]]).flatten()
        _, _, out = code_parameter(OneBit(block_size=None), gradient, torch.zeros(6), 2, reference)
        assert out.tolist() == [2.0, 2.0, 0.0, 0.0, -2.0, 2.0]

    @pytest.mark.parametrize("row", [1, 2, 3, 7, 8, 9, 50, 99, 100, 101, 1000])
    def test_row_bits_suffice_wherever_a_block_begins(self, row):
        for numel in (1, 2, 7, 8, 9, 100):
            bits = 8 * (OneBit().payload_nbytes(numel, row) - 4 - (numel + 7) // 8)
            touched = max((phase + numel - 1) // row + 1 for phase in range(row))
            assert touched <= bits < touched + 8

    def test_small_rows_cost_a_bit_each(self):
        assert OneBit().payload_nbytes(1024, 1024) == 4 + 1 + 128
        assert OneBit().payload_nbytes(1024, 9) == 4 + 15 + 128
        assert OneBit().payload_nbytes(1024, 1) == 4 + 128 + 128
        assert OneBit().payload_nbytes(1, 1) == 4 + 1 + 1


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("compressor", [Quantize(4), Ternary(), OneBit(), Cast("fp8")], ids=repr)
def test_a_block_too_small_for_its_scale_is_remembered_whole(compressor, reference):
    gradient = torch.tensor([TINY, -TINY, TINY / 2]) * 0.99
    payload, state, out = code_parameter(compressor, gradient, torch.zeros(3), 3, reference)
    assert not payload.any()
    assert not out.any()
    assert torch.equal(state, gradient)
