"""The ResNet script reads CIFAR-10's binary files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from resnet import CIFAR10_MEAN, CIFAR10_STD, generate_images, read_cifar10

if TYPE_CHECKING:
    from pathlib import Path


def record(label: int, red: int, green: int, blue: int) -> bytes:
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    for i in range(1, 6):
        content = record(i, 10 * i, 0, 255) + record(9, 0, 10 * i, 255)
        (tmp_path / f"data_batch_{i}.bin").write_bytes(content)
    first_row_bright = bytes([3]) + (bytes([255]) * 32 + bytes(32 * 31)) + bytes(2 * 1024)
    (tmp_path / "test_batch.bin").write_bytes(first_row_bright + record(7, 51, 102, 204))
    return tmp_path


def test_training_files_are_read_in_order(cifar10: Path) -> None:
    images, labels = read_cifar10(cifar10, train=True)
    assert images.shape == (10, 3, 32, 32)
    assert labels.tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    reds = images[:, 0, 0, 0] * CIFAR10_STD[0, 0, 0] + CIFAR10_MEAN[0, 0, 0]
    expected = torch.tensor([10, 0, 20, 0, 30, 0, 40, 0, 50, 0]) / 255
    torch.testing.assert_close(reds, expected, atol=1e-6, rtol=0)


def test_pixels_are_red_green_and_blue_planes_in_rows(cifar10: Path) -> None:
    images, labels = read_cifar10(cifar10, train=False)
    expected = torch.tensor([51, 102, 204]).view(3, 1, 1) / 255
    expected = (expected - CIFAR10_MEAN) / CIFAR10_STD
    assert labels.tolist() == [3, 7]
    torch.testing.assert_close(images[1], expected.expand(3, 32, 32))
    reds = images[0, 0] * CIFAR10_STD[0, 0, 0] + CIFAR10_MEAN[0, 0, 0]
    torch.testing.assert_close(reds[0], torch.ones(32))
    torch.testing.assert_close(reds[1:], torch.zeros(31, 32), atol=1e-6, rtol=0)


@pytest.mark.parametrize("content", [b"", record(1, 2, 3, 4)[:-1]], ids=["empty", "truncated"])
def test_an_incomplete_file_is_refused(cifar10: Path, content: bytes) -> None:
    (cifar10 / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match="not a multiple of 3073"):
        read_cifar10(cifar10, train=False)


def test_generated_images_depend_on_the_seed_alone() -> None:
    images, labels = generate_images(20, seed=0)
    again, _ = generate_images(20, seed=0)
    other, _ = generate_images(20, seed=1)
    assert images.shape == (20, 3, 32, 32)
    assert labels.max() < 10
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
