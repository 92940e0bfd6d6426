"""Attention over pages: the reference against attention over documents, the kernel against it."""

import pytest
import torch

from chronicals.attention import attention_reference
from chronicals.kernels import paged_attention as module
from chronicals.kernels.launch import runs_triton
from chronicals.kernels.paged_attention import (
    SharedPages,
    gather_pages,
    most_members,
    paged_attention,
    paged_attention_reference,
    write_pages,
    write_pages_reference,
)
from comparison import assert_as_exact_as_plain
from families import distance
from mutants import memory_without_numbers, mutant

PAGE = 4
LENGTHS = (1, 4, 7, 13)

MASKS = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 12},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])},
    "all": {"window": 5, "softcap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])},
}


def pages(dtype=torch.float64, heads=2, width=8, value=5):
    """Random pages, among them those of sequences of ``LENGTHS`` tokens, in no order."""
    count = 16
    keys, values = (torch.randn(count, PAGE, heads, n, dtype=dtype) for n in (width, value))
    order = torch.randperm(count)
    table = torch.zeros(len(LENGTHS), 4, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        needed = -(-length // PAGE)
        table[row, :needed], order = order[:needed], order[needed:]
    return keys, values, table


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_attends_to_a_sequences_own_pages(mask):
    keys, values, table = pages()
    q = torch.randn(len(LENGTHS), 6, 8, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    got = paged_attention_reference(q, keys, values, table, lengths, scale=0.4, **MASKS[mask])
    for row, length in enumerate(LENGTHS):
        places = (table[row][:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        k, v = (gather_pages(x, places).transpose(0, 1) for x in (keys, values))
        window = MASKS[mask].get("window", length)
        seen = (torch.arange(length) >= length - window)[None]
        of_scores = MASKS[mask].get("softcap"), MASKS[mask].get("sinks")
        expected = attention_reference(q[row][:, None], k, v, seen, 0.4, *of_scores)[:, 0]
        assert distance(got[row], expected) < 1e-12, length


def test_what_lies_behind_the_end_of_a_sequence_does_not_matter():
    keys, values, table = pages()
    q = torch.randn(len(LENGTHS), 2, 8, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    before = paged_attention_reference(q, keys, values, table, lengths, scale=1.0)
    for row, length in enumerate(LENGTHS):
        if length % PAGE:
            page = table[row, length // PAGE]
            keys[page, length % PAGE :] = values[page, length % PAGE :] = float("nan")
    after = paged_attention_reference(q, keys, values, table, lengths, scale=1.0)
    assert torch.equal(before, after)


# --- the kernels

SHAPES = {
    "one key head": (1, 1, 16, 16),
    "groups": (6, 2, 16, 16),
    "heads of their own": (3, 3, 24, 24),
    "more heads than rows": (40, 2, 16, 16),
    "width of no power of 2": (4, 2, 80, 40),
    "chunks of channels": (2, 1, 160, 32),
    "narrow values": (4, 4, 24, 8),
}
"""Query heads, key heads, widths of a key and of a value."""

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(shape, lengths, dtype, device, page=PAGE, latent=False):
    """Inputs: queries, pages, block table with entries behind the end, lengths."""
    heads, key_heads, width, value = shape
    needed = [-(-length // page) for length in lengths]
    columns = 1 << (max(needed) - 1).bit_length()
    count = sum(needed) + 3

    def draw():
        q = torch.randn(len(lengths), heads, width, device=device)
        keys = torch.randn(count, page, key_heads, width, device=device)
        values = torch.randn(count, page, key_heads, value, device=device)
        order = torch.randperm(count, device=device)
        table = torch.randint(0, count, (len(lengths), columns), device=device)
        for row, pages_of_row in enumerate(needed):
            table[row, :pages_of_row], order = order[:pages_of_row], order[pages_of_row:]
        floats = [q, keys] if latent else [q, keys, values]
        return [*(x.to(dtype) for x in floats), table, torch.tensor(lengths, device=device)]

    return draw


def functions(value, options, of=module, latent=False):
    """Ours and the plain one; both have no gradient, which the comparison takes for zero."""

    def with_zero_gradient(function):
        def run(q, k, *rest):
            v, table, lengths = (k[..., :value], *rest) if latent else rest
            sinks = options.get("sinks")
            left_out = {"sinks"} if function is of.paged_attention else {"sinks", "shared"}
            given = {name: x for name, x in options.items() if name not in left_out}
            sinks = None if sinks is None else sinks.to(q.device)
            with torch.no_grad():
                out = function(q, k, v, table, lengths, sinks, scale=q.shape[2] ** -0.5, **given)
            return out + 0 * sum(x.sum() for x in (q, k, v)).to(out.dtype)

        return run

    return with_zero_gradient(of.paged_attention), with_zero_gradient(paged_attention_reference)


def compare(shape, lengths, dtype, device, options, of=module, page=PAGE, latent=False):
    ours, plain = functions(shape[3], options, of, latent)
    assert_as_exact_as_plain(ours, plain, drawn(shape, lengths, dtype, device, page, latent))


def options_of(mask, heads):
    sinks = MASKS[mask].get("sinks")
    return MASKS[mask] if sinks is None else {**MASKS[mask], "sinks": torch.randn(heads)}


def test_kernels_run_here(device):
    assert runs_triton(torch.zeros(1, device=device))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_over_shapes(shape, dtype, device):
    if dtype == torch.float32 and device.type == "cuda":
        pytest.skip("fp32 takes the reference on a card")
    compare(SHAPES[shape], LENGTHS, dtype, device, {})


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("mask", MASKS)
def test_kernel_over_masks(mask, page, device):
    compare((6, 2, 16, 16), (1, 4, 90, 13), torch.bfloat16, device, options_of(mask, 6), page=page)


@pytest.fixture
def splits(monkeypatch):
    """So many splits, and few keys at once."""

    def set_splits(count, keys=16, of=module):
        made = of.launch_of

        def launch(*given):
            chosen = made(*given)
            return type(chosen)(chosen.rows, keys, chosen.channels, count, chosen.warps)

        monkeypatch.setattr(of, "launch_of", launch)

    return set_splits


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("mask", ["plain", "wide window", "all"])
def test_splits_are_merged(mask, count, device, splits):
    """Among them splits without a key: the shortest sequence has one."""
    splits(count)
    compare((4, 2, 16, 16), (1, 17, 90, 33), torch.bfloat16, device, options_of(mask, 4))


@pytest.mark.slow
def test_latents_are_values_too(device, splits):
    """Values that are the first channels of their keys, for many query heads."""
    splits(2)
    shape = (20, 1, 96, 64)
    compare(shape, (5, 40), torch.bfloat16, device, {}, page=16, latent=True)


def test_what_lies_behind_the_end_is_not_read_by_the_kernel(device):
    q, k, v, table, lengths = drawn((4, 2, 16, 16), LENGTHS, torch.bfloat16, device)()
    before = paged_attention(q, k, v, table, lengths, scale=0.3)
    held = {*(int(page) for row, n in zip(table, LENGTHS) for page in row[: -(-n // PAGE)])}
    for page in {*range(len(k))} - held:
        k[page] = v[page] = float("nan")
    for row, length in zip(table, LENGTHS):
        if length % PAGE:
            page = row[length // PAGE]
            k[page, length % PAGE :] = v[page, length % PAGE :] = float("nan")
    assert torch.equal(before, paged_attention(q, k, v, table, lengths, scale=0.3))


def test_one_split_gives_a_sequence_the_same_bits_alone_and_among_others(device):
    """With more keys than a split of its own is worth."""
    lengths = (1200, 1, 700, 90)
    q, k, v, table, of_rows = drawn((4, 2, 16, 16), lengths, torch.bfloat16, device, page=16)()
    options = {"scale": 0.3, "splits": 1}
    together = paged_attention(q, k, v, table, of_rows, **options)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = paged_attention(q[one], k, v, table[one], of_rows[one], **options)
        assert torch.equal(alone[0], together[row])
    assert module.launch_of(q[:1, :1], k[:, :, :1], 16, 1 << 14, None).splits > 1
    assert module.launch_of(q[:1, :1], k[:, :, :1], 16, 1 << 14, None, 1).splits == 1


def by_tiles(q_HD, k_TD, v_TD, scale, tiles):
    """Attention to one key head with a running maximum, as FlashAttention has it.

    Args:
        q_HD: queries.
        k_TD: keys.
        v_TD: values.
        scale: factor on the scores.
        tiles: bounds of the keys of each tile, in the order in which they are visited.
    """
    out, total = torch.zeros(len(q_HD), v_TD.shape[1]), torch.zeros(len(q_HD), 1)
    highest = torch.full((len(q_HD), 1), float("-inf"))
    for first, last in tiles:
        scores = scale * q_HD.float() @ k_TD[first:last].float().t()
        higher = torch.maximum(highest, scores.amax(1, keepdim=True))
        weights, kept = (scores - higher).exp(), (highest - higher).exp()
        total = total * kept + weights.sum(1, keepdim=True)
        out = out * kept + weights.to(v_TD.dtype).float() @ v_TD[first:last].float()
        highest = higher
    return (out / total).to(v_TD.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("width", [64, 128])
def test_weights_are_rounded_beside_the_maximum_that_training_has(width, window, device):
    """By tiles that begin at multiples of their size, the last one first."""
    lengths, scale = (383, 300, 129), width**-0.5
    shape = (16, 1, width, width)
    q, keys, values, table, of_rows = drawn(shape, lengths, torch.bfloat16, device, page=16)()
    q = 2 * q  # maxima of tiles that differ
    options = {"scale": scale, "window": window, "splits": 1}
    got = paged_attention(q, keys, values, table, of_rows, **options).cpu()
    size = {64: 128, 128: 64}[width]
    equal, otherwise = [], []
    for row, length in enumerate(lengths):
        places = (table[row][:, None] * 16 + torch.arange(16, device=device)).flatten()[:length]
        k, v = (gather_pages(x, places)[:, 0].cpu() for x in (keys, values))
        first = 0 if window is None else max(0, length - window)
        tiles = [
            (max(start, first), min(start + size, length))
            for start in range(first // size * size, length, size)
        ]
        for order, found in ((tiles[::-1], equal), (tiles, otherwise)):
            found.append((by_tiles(q[row].cpu(), k, v, scale, order) == got[row]).flatten())
    equal, otherwise = (float(torch.cat(some).float().mean()) for some in (equal, otherwise))
    assert equal > 0.99 and 1 - otherwise > 5 * (1 - equal)


def test_a_launch_is_chosen_by_static_sizes():
    q = torch.zeros(2, 32, 128, dtype=torch.bfloat16)
    k = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    one = module.launch_of(q, k, 128, 255, None)
    assert (one.rows, one.keys, one.channels, one.splits) == (16, 64, 128, 1)
    latent = module.launch_of(torch.zeros(2, 128, 576), torch.zeros(4, 16, 1, 576), 512, 255, None)
    assert (latent.rows, latent.keys, latent.channels) == (16, 16, 64)
    narrow = module.launch_of(q[..., :64], k[..., :64], 64, 255, None)
    assert narrow.keys == 128
    # one sequence of many keys is split, and a window leaves nothing to split
    long = module.launch_of(q[:1, :1], k[:, :, :1], 128, 2**20, None)
    assert long.splits > 1 and long.splits & (long.splits - 1) == 0
    assert module.launch_of(q[:1, :1], k[:, :, :1], 128, 2**20, 300).splits == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("total * kept + tl.sum(weights, axis=1)", "total + tl.sum(weights, axis=1)"),
        ("out * kept[:, None]", "out"),
        ("shaped(scores, scale, softcap, HAS_SOFTCAP)", "shaped(scores, scale, softcap, False)"),
        ("tl.maximum(length - window, 0)", "tl.maximum(length - window - 1, 0)"),
        ("(token >= first) & (token < end)", "token < end"),
        ("tl.minimum(begin + each, length)", "tl.minimum(begin + each, length - 1)"),
        (
            "weights = tl.exp(lse - highest[:, None])",
            "weights = tl.exp(lse - highest[:, None]) * 0.0 + 1.0",
        ),
        ("total += tl.exp(sink - highest)", "pass"),
        ("key_head * GROUPS + row", "row * tl.num_programs(1) + key_head"),
    ],
)
@pytest.mark.slow
def test_a_wrong_kernel_is_found(old, new, device, splits):
    """Splits of several blocks of keys, with a window, a softcap and sinks."""
    wrong = mutant(module, old, new)
    splits(2, of=wrong)
    options = {"window": 60, "softcap": 1.5, "sinks": torch.randn(4)}
    with pytest.raises(AssertionError):
        compare((4, 2, 16, 16), (17, 1, 90, 77), torch.bfloat16, device, options, of=wrong)


# --- keys that sequences share

SHARING = (((0, 2, 5), 8), ((4, 1, -1), 20), ((-1, -1, -1), 0))
"""Sequences of teams of at most three, and keys that they share; sequence 3 is alone."""


def shared_by(teams, sequences, device):
    starts = torch.zeros(sequences, dtype=torch.int32)
    for members, length in teams:
        for one in members:
            if one >= 0:
                starts[one] = length
    members, lengths = (
        torch.tensor(list(numbers), dtype=torch.int32, device=device) for numbers in zip(*teams)
    )
    return SharedPages(members, lengths, starts.to(device))


def sharing(shape, dtype, device, options, of=module, lengths=(9, 33, 17, 90, 21, 40)):
    """Ours with shared keys beside the plain one, which reads every sequence's own pages."""
    shared = shared_by(SHARING, len(lengths), device)
    ours, plain = functions(shape[3], {**options, "shared": shared}, of)
    draws = drawn(shape, lengths, dtype, device)

    def draw():
        *floats, table, counts = draws()
        for members, length in SHARING:
            for one in members[1:]:
                if one >= 0:
                    table[one, : length // PAGE] = table[members[0], : length // PAGE]
        return [*floats, table, counts]

    assert_as_exact_as_plain(ours, plain, draw)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["plain", "softcap", "sinks", "window"])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (3, 3)], ids=str)
def test_shared_keys_are_read_once_for_all(heads, mask, device, splits):
    splits(2)
    sharing((*heads, 16, 16), torch.bfloat16, device, options_of(mask, heads[0]))


@pytest.mark.slow
def test_shared_keys_are_not_read_from_other_members(device):
    """Only the first member's entries of the block table are."""
    q, k, v, table, lengths = drawn(
        (4, 2, 16, 16), (9, 33, 17, 90, 21, 40), torch.bfloat16, device
    )()
    for members, length in SHARING:
        for one in members[1:]:
            if one >= 0:
                table[one, : length // PAGE] = table[members[0], : length // PAGE]
    expected = paged_attention(q, k, v, table, lengths, scale=0.3)
    for one in (2, 5, 1):
        table[one, : (8 if one != 1 else 20) // PAGE] = len(k) - 1
    shared = shared_by(SHARING, 6, device)
    got = paged_attention(q, k, v, table, lengths, scale=0.3, shared=shared)
    assert torch.allclose(got.float(), expected.float(), atol=2e-2)


def test_a_team_fits_a_tile():
    assert most_members(32, 8, 128) == 16 and most_members(14, 2, 64) == 9
    assert most_members(128, 1, 512) < 2, "latents have too many heads"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.minimum(length, begin + each)", "tl.minimum(length - 1, begin + each)"),
        ("first = tl.load(starts_ptr + sequence)", "first = 0"),
        ("key_head * GROUPS + row % GROUPS", "key_head * GROUPS + row // MEMBERS"),
        ("(sequence * heads + head) * PARTS + FIRST + split", "(sequence * heads + head) * PARTS"),
        ("tl.where(first == 0, PARTS, 0)", "0"),
    ],
)
def test_a_wrong_kernel_of_shared_keys_is_found(old, new, device, splits):
    wrong = mutant(module, old, new)
    splits(2, of=wrong)
    with pytest.raises(AssertionError), memory_without_numbers():
        sharing((4, 2, 16, 16), torch.bfloat16, device, {}, of=wrong)


# --- tokens


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 80, 40), (9, 128, 128)], ids=str)
def test_tokens_are_written_to_their_places(shape, dtype, device):
    """Keys and values are parts of the rows of a product, with others between them."""
    heads, width, value = shape
    tokens = 7
    both = torch.randn(tokens, heads * (width + value) + 3, device=device).to(dtype)
    k = both[:, : heads * width].unflatten(1, (heads, width))
    v = both[:, heads * width : -3].unflatten(1, (heads, value))
    keys, values = (torch.randn(4, PAGE, heads, n, device=device).to(dtype) for n in (width, value))
    places = torch.randperm(4 * PAGE, device=device)[:tokens]
    expected = keys.clone(), values.clone()
    write_pages_reference(k, v, *expected, places)
    write_pages(k, v, keys, values, places)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    for row, place in enumerate(places.tolist()):
        assert torch.equal(keys.flatten(0, 1)[place], k[row])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("head * x_head", "head"),
        ("place * ALL", "token * ALL"),
        ("element < ALL", "element < ALL - 1"),
    ],
)
def test_a_wrong_write_is_found(old, new, device):
    wrong = mutant(module, old, new)
    k, v = torch.randn(2, 3, 2, 16, device=device)
    pages = [torch.zeros(2, PAGE, 2, 16, device=device) for _ in range(4)]
    places = torch.tensor([5, 0, 7], device=device)
    write_pages_reference(k, v, *pages[:2], places)
    wrong.write_pages(k, v, *pages[2:], places)
    assert not all(torch.equal(x, y) for x, y in zip(pages[:2], pages[2:]))
