"""The noise: the published Philox vectors, its range, and that nothing but its four inputs matters."""

import torch

from sottovoce.kernels.random import philox, uniform


def words(*values):
    return tuple(torch.tensor([v], dtype=torch.int64) for v in values)


def test_known_answers():
    """Vectors of Random123's kat_vectors file (philox 4x32 10)."""
    top = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((top, top, top, top), (top, top), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        assert tuple(int(w) for w in philox(words(*key), words(*counter))) == expected


def test_range_and_mean():
    u = uniform(torch.arange(8), torch.arange(8), 3, 4096)
    assert u.dtype == torch.float32
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.01


def test_rows_do_not_see_each_other():
    seed, frame = torch.tensor([-5, 2**62 + 1, 7]), torch.tensor([0, 2**33, 7])
    together = uniform(seed, frame, 1, 100)
    alone = torch.cat([uniform(seed[i : i + 1], frame[i : i + 1], 1, 100) for i in range(3)])
    assert torch.equal(together, alone)
    assert torch.equal(together[:, :10], uniform(seed, frame, 1, 10))


def test_every_input_matters():
    one = torch.tensor([1])
    base = uniform(one, one, 1, 64)
    for other in (uniform(one + 1, one, 1, 64), uniform(one, one + 1, 1, 64), uniform(one, one, 2, 64)):
        assert not torch.isclose(base, other).any()
    assert not torch.equal(base, uniform(one + 2**40, one, 1, 64))
    assert not torch.equal(base, uniform(one, one + 2**40, 1, 64))
