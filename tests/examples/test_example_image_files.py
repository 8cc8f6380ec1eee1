"""The image loaders of the examples, on small files of the same formats."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from image_files import (
    CIFAR10_DEVIATION,
    CIFAR10_MEAN,
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Cifar10,
    ImageFolders,
    middle_box,
    normalise,
    random_box,
    random_crop,
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


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name, colour in [("dog", (255, 0, 0)), ("ant", (0, 255, 0)), ("cat", (0, 0, 255))]:
        (tmp_path / name / "more").mkdir(parents=True)
        Image.new("RGB", (40, 30), colour).save(tmp_path / name / "a.png")
        Image.new("RGB", (30, 50), colour).save(tmp_path / name / "more" / "b.JPEG")
        (tmp_path / name / "notes.txt").write_text("not an image")
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


def test_cifar10_test_images_are_not_augmented(cifar10: Path) -> None:
    data = Cifar10(cifar10, train=False)
    assert torch.equal(data[0][0], data[0][0])


def test_cifar10_training_images_are_repeated_by_a_seed(cifar10: Path) -> None:
    data = Cifar10(cifar10, train=True)
    torch.manual_seed(3)
    first = [data[0][0] for _ in range(8)]
    torch.manual_seed(3)
    assert all(torch.equal(image, data[0][0]) for image in first)
    assert any(not torch.equal(image, first[0]) for image in first)


def test_cifar10_feeds_a_data_loader(cifar10: Path) -> None:
    images, labels = next(iter(DataLoader(Cifar10(cifar10, train=True), batch_size=4)))
    assert images.shape == (4, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64


def test_cifar10_names_the_missing_file(cifar10: Path) -> None:
    (cifar10 / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_4\.bin is missing"):
        Cifar10(cifar10, train=True)


@pytest.mark.parametrize("content", [b"", record(1, 2, 3, 4)[:-1]], ids=["empty", "truncated"])
def test_cifar10_refuses_a_broken_file(cifar10: Path, content: bytes) -> None:
    (cifar10 / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"no multiple of 3073"):
        Cifar10(cifar10, train=False)


def test_cifar10_refuses_labels_of_another_set(cifar10: Path) -> None:
    (cifar10 / "test_batch.bin").write_bytes(record(40, 0, 0, 0))
    with pytest.raises(ValueError, match="the label 40"):
        Cifar10(cifar10, train=False)


def test_a_random_crop_is_a_window_of_the_framed_image() -> None:
    image = torch.arange(1, 3 * 5 * 6 + 1, dtype=torch.uint8).reshape(3, 5, 6)
    framed = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = [framed[:, i : i + 5, j : j + 6] for i in range(5) for j in range(5)]
    for _ in range(50):
        crop = random_crop(image, padding=2)
        assert any(torch.equal(crop, window) for window in windows)


def test_folders_number_their_classes_in_sorted_order(folders: Path) -> None:
    data = ImageFolders(folders, train=False, size=8)
    assert data.classes == ["ant", "cat", "dog"]
    assert [label for _, label in data.samples] == [0, 0, 1, 1, 2, 2]
    assert [path.name for path, _ in data.samples] == ["a.png", "b.JPEG"] * 3


@pytest.mark.parametrize("train", [True, False])
def test_folders_keep_colours_and_channel_order(folders: Path, train: bool) -> None:
    data = ImageFolders(folders, train=train, size=8)
    green = torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)
    image, label = data[0]
    assert label == 0
    torch.testing.assert_close(image, normalise(green, IMAGENET_MEAN, IMAGENET_DEVIATION))


def test_folders_read_grey_and_transparent_images(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    Image.new("L", (9, 9), 128).save(tmp_path / "only" / "grey.png")
    Image.new("RGBA", (9, 9), (1, 2, 3, 4)).save(tmp_path / "only" / "see-through.png")
    images, _ = next(iter(DataLoader(ImageFolders(tmp_path, train=False, size=8), batch_size=2)))
    assert images.shape == (2, 3, 8, 8)


def test_folders_cut_out_the_middle(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    image = Image.new("RGB", (64, 32), (0, 0, 0))
    image.paste((255, 255, 255), (18, 2, 46, 30))  # the middle square of side 28 = 32 × 224/256
    image.save(tmp_path / "only" / "a.png")
    pixels, _ = ImageFolders(tmp_path, train=False, size=28)[0]
    white = normalise(torch.full((3, 28, 28), 255), IMAGENET_MEAN, IMAGENET_DEVIATION)
    torch.testing.assert_close(pixels, white)


def test_folders_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no folders"):
        ImageFolders(tmp_path, train=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty has no images"):
        ImageFolders(tmp_path, train=True)


@pytest.mark.parametrize(("width", "height"), [(40, 30), (1, 1), (1000, 3)])
def test_random_boxes_lie_in_the_image(width: int, height: int) -> None:
    torch.manual_seed(0)
    middle = middle_box(width, height)
    for _ in range(200):
        box = random_box(width, height)
        left, top, right, bottom = box
        assert 0 <= left < right <= width + 1e-9
        assert 0 <= top < bottom <= height + 1e-9
        if box != middle:
            area = (right - left) * (bottom - top)
            assert area / (width * height) >= 0.08 - 1e-9
            assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9
