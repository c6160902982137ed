"""What every compressor must satisfy, as checks that any package can run on its own.

    from lightning_compress.testing import check_compressor

    def test_mine():
        check_compressor(MyCompressor())

Each check is a function of the compressor that raises AssertionError with a sentence; ``CHECKS`` holds them by name,
for those who want one test per check. The checks look at the torch functions, and where a compressor has CPU kernels,
at those too, through the same code that runs in training. Everything is seeded: a check that passes once passes
always.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lightning_compress.compressors.base import Blocks, Compressor
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView
from lightning_compress.kernels.reference import hashing
from lightning_compress.testing.layouts import Layout, generator, layouts, longest_block, normal

__all__ = ["CHECKS", "check_compressor"]


def check_compressor(compressor: Compressor, checks: Iterable[str] | None = None) -> None:
    """Runs the checks on one compressor.

    Args:
        compressor: An instance with the settings to be tested. For a selecting one, settings that keep some elements
            of a block of its size say more than extreme ones.
        checks: Names of ``CHECKS``; None for all.

    Raises:
        AssertionError: A check failed; the message says which, and what was found.
        KeyError: A name is not in ``CHECKS``.
    """
    for name in CHECKS if checks is None else checks:
        try:
            CHECKS[name](compressor)
        except AssertionError as error:
            raise AssertionError(f"{compressor!r} fails {name!r}: {error}") from error


def is_a_value(compressor: Compressor) -> None:
    """It is compared, printed and sent to spawned processes."""
    copy = pickle.loads(pickle.dumps(compressor))
    assert copy == compressor, "a pickled copy is not equal to the original"
    assert hash(copy) == hash(compressor), "equal compressors have different hashes"
    assert compressor.name == compressor.name.lower(), f"the name {compressor.name!r} is not in lower case"
    if compressor.linear:
        assert compressor.value_dtype.is_floating_point, "a linear compressor must give the value_dtype of its payload"


def payload_size_is_known(compressor: Compressor) -> None:
    """``payload_nbytes`` is what ``encode`` returns, whatever the values."""
    for numel in _lengths(compressor):
        for row in (1, 3, numel, 2 * numel + 1):
            expected = compressor.payload_nbytes(numel, row)
            for values in (normal(3, numel), torch.zeros(3, numel)):
                code = compressor.encode(values, _blocks(numel, row, 3))
                assert code.dtype == torch.uint8, f"encode returned {code.dtype}, not torch.uint8"
                assert code.shape == (3, expected), (
                    f"payload_nbytes({numel}, {row}) is {expected}, but encode returned the shape {tuple(code.shape)}"
                )
        of_one_row = compressor.payload_nbytes(numel)
        assert of_one_row == compressor.payload_nbytes(numel, numel), f"payload_nbytes({numel}) is not that of one row"


def zero_bytes_are_zeros(compressor: Compressor) -> None:
    """A code of zero bytes, which stands for a parameter that takes no part, decodes to zeros."""
    for numel in _lengths(compressor):
        for row in (1, 3, numel):
            code = torch.zeros(3, compressor.payload_nbytes(numel, row), dtype=torch.uint8)
            decoded = compressor.decode(code, _blocks(numel, row, 3))
            assert decoded.dtype == torch.float32, f"decode returned {decoded.dtype}, not torch.float32"
            assert decoded.shape == (3, numel), (
                f"decode of 3 blocks of {numel} returned the shape {tuple(decoded.shape)}"
            )
            assert not decoded.any(), f"zero bytes decode to {decoded[decoded != 0][0].item()} in a block of {numel}"


def zeros_stay_zeros(compressor: Compressor) -> None:
    """A block of zeros decodes to exact zeros, and so does, where ``keeps_zero``, every single zero."""
    for numel in _lengths(compressor):
        blocks = _blocks(numel, numel, 3)
        assert not _round_trip(compressor, torch.zeros(3, numel), blocks).any(), (
            f"a zero block of {numel} decodes to numbers"
        )
        if compressor.keeps_zero:
            p = normal(3, numel)
            p[:, ::3] = 0
            assert not _round_trip(compressor, p, blocks)[:, ::3].any(), (
                f"a zero in a block of {numel} decodes to a number"
            )


def single_elements(compressor: Compressor) -> None:
    """A block of one element has a finite code of no other sign, from subnormal to largest numbers."""
    p = torch.tensor([[1.0], [-3.0], [0.0], [1e-40], [-1e-30], [3.4e38], [-3.4e38]])
    decoded = _round_trip(compressor, p, _blocks(1, 1, len(p)))
    assert torch.isfinite(decoded).all(), f"one element decodes to {decoded.flatten().tolist()}"
    assert not (decoded * p.sign() < 0).any(), f"{p.flatten().tolist()} change their sign: {decoded.flatten().tolist()}"


def is_deterministic(compressor: Compressor) -> None:
    """The code is a function of the block and the counter alone: not of earlier calls, other blocks, or the batch."""
    for numel in _lengths(compressor):
        p, blocks = normal(4, numel), _blocks(numel, 7, 4)
        before = p.clone()
        code = compressor.encode(p, blocks)
        assert torch.equal(p, before), "encode changes its input"
        assert torch.equal(code, compressor.encode(p, blocks)), "encoding twice gives two codes"
        decoded = compressor.decode(code, blocks)
        assert torch.equal(decoded, compressor.decode(code, blocks)), "decoding twice gives two results"
        for i in range(4):
            one = Blocks(numel, 7, blocks.start[i : i + 1], blocks.key[i : i + 1], blocks.salt)
            alone = compressor.encode(p[i : i + 1], one)
            assert torch.equal(alone[0], code[i]), f"a block of {numel} has another code alone than among others"
            assert torch.equal(compressor.decode(alone, one)[0], decoded[i]), (
                f"a block of {numel} decodes otherwise alone"
            )


def is_unbiased(compressor: Compressor) -> None:
    """Where it says so, the mean over many draws is the input, within 5 standard errors of sums of elements."""
    if not compressor.unbiased:
        return
    numel, draws = min(256, longest_block(compressor)), 1500
    p = normal(4, numel)
    p[1, ::2] = 0
    p[2] *= torch.arange(numel) < 3
    weights = torch.stack([p.sign(), p.abs() > p.abs().median(dim=1, keepdim=True).values, normal(4, numel).sign()])
    found = []
    for draw in range(draws):
        error = _round_trip(compressor, p, _blocks(numel, numel, 4, hashing.salt(0, draw))).double() - p
        found.append((weights * error).sum(-1).flatten())
    sums = torch.stack(found)
    mean, deviation = sums.mean(0), sums.std(0) / draws**0.5
    worst = (mean.abs() - 5 * deviation - 1e-5 * p.abs().sum(1).repeat(3)).max().item()
    assert worst <= 0, (
        f"it claims to be unbiased, but a mean error over {draws} draws is {worst} beyond 5 standard errors"
    )


def contracts_as_claimed(compressor: Compressor) -> None:
    """||decode(encode(x)) - x||^2 <= (1 - contraction) ||x||^2, on the mean over draws if it rolls dice."""
    for numel in _lengths(compressor):
        delta = compressor.contraction(numel)
        if delta is None:
            continue
        assert 0 <= delta <= 1, f"contraction({numel}) is {delta}, not in [0, 1]"
        for p in (normal(1, numel), normal(1, numel) ** 5, torch.ones(1, numel), torch.eye(1, numel) + 1e-3):
            many = p.expand(64, numel)
            error = (_round_trip(compressor, many, _blocks(numel, numel, 64)).double() - many).square().sum(1)
            share = error / p.double().square().sum()
            spread = share.std().item() / 8
            assert share.mean().item() <= 1 - delta + 4 * spread + 1e-5, (
                f"contraction({numel}) is {delta}, but {share.mean().item()} of the squared norm is left"
            )


def float64_is_welcome(compressor: Compressor) -> None:
    """float64 blocks, also with numbers that float32 does not have, decode to finite float32."""
    for numel in _lengths(compressor):
        for scale in (1.0, 1e-300, 1e300):
            p = normal(3, numel).double() * scale
            decoded = _round_trip(compressor, p, _blocks(numel, 3, 3))
            assert decoded.dtype == torch.float32, f"a float64 block decodes to {decoded.dtype}, not torch.float32"
            assert torch.isfinite(decoded).all(), f"a block of float64 values around {scale} decodes to inf or NaN"


def any_bytes_decode(compressor: Compressor) -> None:
    """Whatever bytes arrive: no exception, nothing read or written outside the block."""
    for layout in layouts(compressor):
        for reference in _paths(compressor):
            codec = BlockCodec(compressor, layout.table, use_reference=reference)
            status = layout.status()
            noise = torch.randint(0, 256, (2, layout.nbytes), dtype=torch.uint8, generator=generator(1))
            noise[1, layout.code_bytes()] = noise[0, layout.code_bytes()]
            out = torch.full((2, layout.numel), 7.0)
            for i in range(2):
                codec.decode(noise[i], out[i], status)
            outside = ~layout.elements()
            assert (out[:, outside] == 7).all(), f"decode ({_name(reference)}) writes outside its block"
            assert _same(out[0], out[1]), f"decode ({_name(reference)}) depends on bytes outside its code"


def kernels_are_the_reference(compressor: Compressor) -> None:
    """The CPU kernels give the torch functions' payload, residual and values bit for bit, and write nothing else."""
    if compressor.cpu_kernels() is None:
        return
    for layout in layouts(compressor):
        for dtype in (torch.float32, torch.float64):
            for case, (values, state) in enumerate(layout.inputs(dtype)):
                results = []
                for reference in (True, False):
                    codec = BlockCodec(compressor, layout.table, True, reference)
                    payload, left = layout.payload(3), state.clone()
                    for rank in range(3):
                        memory = MemoryView(left, layout.offsets(0), layout.offsets(layout.numel), True, True)
                        codec.encode(
                            values * (rank + 1),
                            memory,
                            payload[rank],
                            layout.status(),
                            weight=1 / 3,
                            scale=4.0,
                            salt=rank,
                        )
                    out = torch.full((layout.numel,), 7.0, dtype=dtype)
                    codec.decode(
                        payload.flatten(), out, layout.status(), stride=layout.nbytes, ranks=3, weight=0.5, salt=0
                    )
                    results.append((payload, left, out))
                for what, expected, found in zip(("payload", "residual", "decoded values"), *results, strict=True):
                    assert _same(expected, found), (
                        f"the kernels' {what} of {dtype} differ from the torch functions' in "
                        f"{int((expected != found).sum())} places (case {case}, block lengths {layout.lengths()})"
                    )
                payload, left, _ = results[1]
                assert not payload[:, ~layout.code_bytes()].any(), "encode writes outside its code"
                outside = torch.cat([torch.ones(layout.numel, dtype=torch.bool), ~layout.elements()])
                assert torch.equal(left[outside], state[outside]), "encode writes outside its block's memory"


def absent_and_nonfinite(compressor: Compressor) -> None:
    """Parameters that take no part are left alone; one that is not finite is marked, and its block is not coded."""
    for layout in layouts(compressor):
        for reference in _paths(compressor):
            codec = BlockCodec(compressor, layout.table, use_reference=reference)
            values, state = next(layout.inputs(torch.float32))
            bad, absent = layout.parameter(1), layout.parameter(2)
            values[bad.nonzero()[-1]] = torch.inf
            values[absent] = torch.nan
            status, payload, left = layout.status(), layout.payload(1)[0], state.clone()
            status[2] = col.ABSENT
            codec.encode(values, layout.memory(left), payload, status)
            expected = layout.status()
            expected[1], expected[2] = col.NONFINITE, col.ABSENT
            where = f"({_name(reference)})"
            assert torch.equal(status, expected), f"encode {where} of an inf gives the status {status.tolist()}"
            assert torch.isfinite(left).all(), f"encode {where} leaves an inf in the memory"
            both = torch.cat([absent, torch.zeros_like(absent)])
            assert torch.equal(left[both], state[both]), f"encode {where} changes the memory of an absent parameter"
            assert not payload[layout.code_bytes(2)].any(), f"encode {where} writes the code of an absent parameter"
            out = torch.full((layout.numel,), 7.0)
            codec.decode(payload, out, status)
            assert out[bad].isnan().all(), f"decode {where} leaves numbers in a parameter that is not finite"
            assert (out[absent] == 7).all(), f"decode {where} writes to an absent parameter"


def error_feedback_conserves(compressor: Compressor) -> None:
    """Sum of decoded values + residual = sum of gradients, in float64 to 1e-6 of the sum of their magnitudes."""
    weight, scale = 1 / 3, 4.0
    for layout in layouts(compressor):
        inside = layout.elements()
        gradients = [_gradient(layout, step) for step in range(15)]
        given = torch.stack(gradients).sum(0)[inside]
        magnitude = torch.stack(gradients).abs().sum(0)[inside]
        for reference in _paths(compressor):
            sent, state = torch.zeros(2, layout.numel, dtype=torch.float64)
            for _, out in _train(compressor, layout, reference, state, gradients, weight, scale):
                sent += out / (weight * scale)
            error = ((sent + state)[inside] - given).abs()
            worst = int((error / magnitude).argmax())
            assert (error <= 1e-6 * magnitude).all(), (
                f"error feedback ({_name(reference)}) loses {error[worst].item()} of {magnitude[worst].item()}"
            )


def error_feedback_stays_bounded(compressor: Compressor) -> None:
    """Fed one gradient again and again, a biased compressor never owes more than it was given, or than theory allows.

    With a contraction delta the residual's norm is at most r / (1 - r) times the gradient's, r = sqrt(1 - delta). A
    compressor that rolls dice keeps that on average; of its one run here, four times as much is asked.
    """
    if compressor.unbiased:
        return
    size = longest_block(compressor)
    layout = Layout.of(compressor, [(1, size), (3, size // 3 + 1)], size)
    gradient, groups = _gradient(layout, 0), layout.groups(compressor)
    given = [gradient[at : at + length].norm().item() for at, length in groups]
    slack = 4.0 if _rolls_dice(compressor) else 1.001
    for reference in _paths(compressor):
        state = torch.zeros(layout.numel, dtype=torch.float64)
        for step, _ in _train(compressor, layout, reference, state, [gradient] * 200):
            if step % 20 != 19:
                continue
            for (at, length), norm in zip(groups, given, strict=True):
                r = (1 - min(max(compressor.contraction(length) or 0.0, 1e-9), 1.0)) ** 0.5
                bound = min((step + 1) * 1.001, r / (1 - r) * slack) + 1e-3
                owed = state[at : at + length].norm().item() / norm
                assert owed <= bound, (
                    f"after {step + 1} steps of a constant gradient, error feedback ({_name(reference)}) owes "
                    f"{owed} times the gradient of a block of {length}; at most {bound} is allowed"
                )


def rows_of_zeros_stay_silent(compressor: Compressor) -> None:
    """First-dimension slices that never had a gradient get exact zeros, and nothing is remembered for them."""
    for layout in layouts(compressor):
        silent = layout.silent_rows()
        gradients = [torch.where(silent, 0.0, _gradient(layout, step)) for step in range(10)]
        for reference in _paths(compressor):
            state = torch.zeros(layout.numel, dtype=torch.float64)
            for step, out in _train(compressor, layout, reference, state, gradients):
                moved = int((silent & ((out != 0) | (state != 0))).sum())
                assert not moved, f"in step {step}, {moved} elements of rows of zeros move ({_name(reference)})"


def payloads_add_up(compressor: Compressor) -> None:
    """Of a linear compressor, the sum of payloads decodes to the sum of what each decodes to, up to rounding."""
    if not compressor.linear:
        return
    dtype = compressor.value_dtype
    for numel in _lengths(compressor):
        blocks = _blocks(numel, numel, 4)
        codes = [compressor.encode(normal(4, numel, seed), blocks) for seed in range(3)]
        total = sum((code.view(dtype) for code in codes[1:]), start=codes[0].view(dtype))
        found = compressor.decode(total.view(torch.uint8), blocks)
        decoded = torch.stack([compressor.decode(code, blocks) for code in codes])
        allowed = 2 * torch.finfo(dtype).eps * decoded.abs().sum(0) + 1e-6
        worst = ((found - decoded.sum(0)).abs() - allowed).max().item()
        assert worst <= 0, f"the sum of three payloads of {numel} decodes to something else: {worst} beyond rounding"


CHECKS: dict[str, Callable[[Compressor], None]] = {
    check.__name__: check
    for check in (
        is_a_value,
        payload_size_is_known,
        zero_bytes_are_zeros,
        zeros_stay_zeros,
        single_elements,
        is_deterministic,
        is_unbiased,
        contracts_as_claimed,
        float64_is_welcome,
        any_bytes_decode,
        kernels_are_the_reference,
        absent_and_nonfinite,
        error_feedback_conserves,
        error_feedback_stays_bounded,
        rows_of_zeros_stay_silent,
        payloads_add_up,
    )
}
"""Every check by its name; the docstrings say what they demand."""


def _lengths(compressor: Compressor) -> list[int]:
    """Block lengths worth a test: the smallest, those around whole bytes and words, odd ones, the longest."""
    longest = longest_block(compressor)
    return sorted({n for n in (1, 2, 3, 5, 8, 17, 64, 100, longest - 1, longest) if 1 <= n <= longest})


def _blocks(numel: int, row: int, count: int, salt: int = 5) -> Blocks:
    """Blocks of different parameters, each somewhere in its parameter."""
    key = torch.tensor([hashing.name_key(f"layer{i}") for i in range(count)])
    return Blocks(numel, row, torch.arange(count) * numel, key, salt)


def _round_trip(compressor: Compressor, p: Tensor, blocks: Blocks) -> Tensor:
    return compressor.decode(compressor.encode(p, blocks), blocks)


def _rolls_dice(compressor: Compressor) -> bool:
    p = normal(1, longest_block(compressor))
    codes = [compressor.encode(p, _blocks(p.shape[1], p.shape[1], 1, hashing.salt(0, draw))) for draw in range(4)]
    return any(not torch.equal(code, codes[0]) for code in codes)


def _paths(compressor: Compressor) -> tuple[bool, ...]:
    """Values of ``use_reference``: the torch functions, and the CPU kernels if there are any."""
    return (True,) if compressor.cpu_kernels() is None else (True, False)


def _name(reference: bool) -> str:
    return "torch functions" if reference else "CPU kernels"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _gradient(layout: Layout, step: int) -> Tensor:
    return normal(1, layout.numel, 100 + step)[0].double()


def _train(
    compressor: Compressor,
    layout: Layout,
    reference: bool,
    state: Tensor,
    gradients: list[Tensor],
    weight: float = 1.0,
    scale: float = 1.0,
) -> Iterator[tuple[int, Tensor]]:
    """Error feedback in ``state``: yields the number of each step and what it decoded to."""
    codec = BlockCodec(compressor, layout.table, True, reference)
    status, out = layout.status(), torch.zeros(layout.numel, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        payload, salt = layout.payload(1)[0], hashing.salt(0, step)
        codec.encode(gradient * scale, layout.memory(state), payload, status, weight=weight, scale=scale, salt=salt)
        codec.decode(payload, out, status, salt=salt)
        yield step, out
