"""Who learns from which loss, and that the discriminators can tell noise from speech-like sound."""

import torch

from sottovoce.train.discriminators import Discriminators, discriminator_loss, generator_losses


def small(seed: int = 0) -> Discriminators:
    torch.manual_seed(seed)
    return Discriminators(width=2, periods=(2,), windows=(64,))


def waves() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.arange(600) / 24_000
    recorded = torch.stack([torch.sin(2 * torch.pi * f * t) for f in (200, 310)])
    generator = torch.Generator().manual_seed(0)
    return recorded + 0.3 * torch.randn(2, 600, generator=generator), recorded


def test_each_side_learns_from_its_own_loss():
    discriminators, (decoded, recorded) = small(), waves()
    decoded.requires_grad_()
    discriminator_loss(discriminators, decoded, recorded).backward()
    assert decoded.grad is None and all(p.grad is not None for p in discriminators.parameters())
    discriminators.zero_grad(set_to_none=True)
    adversarial, features = generator_losses(discriminators, decoded, recorded)
    (adversarial + 2 * features).backward()
    assert (decoded.grad != 0).all() and all(p.grad is None for p in discriminators.parameters())
    assert all(p.requires_grad for p in discriminators.parameters())


def test_both_losses_in_one_backward_pass_are_those_of_two():
    discriminators, (decoded, recorded) = small(), waves()
    decoded.requires_grad_()
    sum(generator_losses(discriminators, decoded, recorded)).backward()
    discriminator_loss(discriminators, decoded, recorded).backward()
    wave_grad, grads = decoded.grad, [p.grad for p in discriminators.parameters()]
    decoded.grad = None
    discriminators.zero_grad(set_to_none=True)
    ours = generator_losses(discriminators, decoded, recorded)
    (sum(ours) + discriminator_loss(discriminators, decoded, recorded)).backward()
    torch.testing.assert_close(decoded.grad, wave_grad)
    torch.testing.assert_close([p.grad for p in discriminators.parameters()], grads)


def test_it_learns_to_tell_them_apart():
    discriminators, (decoded, recorded) = small(), waves()
    optimizer = torch.optim.AdamW(discriminators.parameters(), lr=1e-2, betas=(0.8, 0.99))
    losses = []
    for _ in range(30):
        loss = discriminator_loss(discriminators, decoded, recorded)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 < 0.8 < losses[0]


def test_equal_waves_have_equal_features():
    _, recorded = waves()
    _, features = generator_losses(small(), recorded.clone(), recorded)
    assert features == 0


def test_the_published_size():
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in part.parameters()) for part in Discriminators(32).children()]
    assert 40e6 < sizes[0] < 43e6 and 1e6 < sizes[1] < 3e6  # HiFi-GAN's period part has 41 M
