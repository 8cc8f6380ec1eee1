"""The image loader of the examples, on small files of the same format."""

from pathlib import Path

import pytest
import torch

from image_files import (
    CIFAR10_DEVIATION,
    CIFAR10_MEAN,
    Cifar10,
)


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


def test_cifar10_reads_every_batch_in_order(cifar10: Path) -> None:
    data = Cifar10(cifar10, train=True)
    assert len(data) == 10
    assert data.labels.tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    assert data.images[:, 0, 0, 0].tolist() == [10, 0, 20, 0, 30, 0, 40, 0, 50, 0]


def test_cifar10_planes_are_red_green_blue_in_rows(cifar10: Path) -> None:
    data = Cifar10(cifar10, train=False)
    image, label = data[1]
    expected = torch.tensor([51, 102, 204]) / 255
    expected = (expected - torch.tensor(CIFAR10_MEAN)) / torch.tensor(CIFAR10_DEVIATION)
    assert label == 7
    torch.testing.assert_close(image, expected.view(3, 1, 1).expand(3, 32, 32))
    assert data.images[0, 0, 0].tolist() == [255] * 32
    assert data.images[0, 0, 1:].max() == 0


@pytest.mark.parametrize("content", [b"", record(1, 2, 3, 4)[:-1]], ids=["empty", "truncated"])
def test_cifar10_refuses_a_broken_file(cifar10: Path, content: bytes) -> None:
    (cifar10 / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"no multiple of 3073"):
        Cifar10(cifar10, train=False)
