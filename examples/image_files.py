"""Images from disk, without torchvision: CIFAR-10's binary files, and folders of one class each.

Both are ``torch.utils.data.Dataset``s of (image, label), the image a normalised float32 tensor of
shape (3, height, width), ready for a ``DataLoader``. With ``train=True`` they augment; the
randomness is torch's, so that ``torch.manual_seed`` fixes it and DataLoader workers differ.
"""

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_DEVIATION = (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"})


def normalise(image: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    """(3, H, W) bytes to float32, each channel centred and scaled; both are of pixels in 0..1."""
    return (image.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(
        3, 1, 1
    )


def random_crop(image: Tensor, padding: int) -> Tensor:
    """A crop of the image's own size from the image in a frame of zeros."""
    _, height, width = image.shape
    framed = torch.nn.functional.pad(image, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    return framed[:, top : top + height, left : left + width]


def random_flip(image: Tensor) -> Tensor:
    """The image or its mirror image, each with probability 1/2."""
    return image.flip(-1) if torch.rand(()) < 0.5 else image


class Cifar10(Dataset[tuple[Tensor, int]]):
    """CIFAR-10 from its binary version, held in memory as bytes (184 MB for the training images).

    A record is one byte of label and 3,072 bytes of pixels: 32×32 red, then green, then blue.

    Args:
        root: the folder of ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``.
        train: the 50,000 training images with random crops (padding 4) and flips; else the 10,000
            test images as they are.

    Raises:
        FileNotFoundError: a file of the set is missing.
        ValueError: a file is not a whole number of records, or holds a label above 9.
    """

    RECORD = 1 + 3 * 32 * 32

    def __init__(self, root: str | Path, *, train: bool) -> None:
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
        records = torch.cat([self._read(Path(root) / name) for name in names])
        self.train = train
        self.labels = records[:, 0].long()
        self.images = records[:, 1:].reshape(-1, 3, 32, 32)

    @classmethod
    def _read(cls, path: Path) -> Tensor:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; root must be the unpacked folder of CIFAR-10's binary version"
            )
        content = bytearray(path.read_bytes())
        if not content or len(content) % cls.RECORD:
            raise ValueError(
                f"{path} has {len(content)} bytes, which is no multiple of {cls.RECORD}, the size"
                " of a record; is it the binary version, and complete?"
            )
        records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, cls.RECORD)
        largest = int(records[:, 0].max())
        if largest > 9:
            raise ValueError(f"{path} holds the label {largest}; CIFAR-10's are 0 to 9")
        return records

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.train:
            image = random_flip(random_crop(image, padding=4))
        return normalise(image, CIFAR10_MEAN, CIFAR10_DEVIATION), int(self.labels[index])


class ImageFolders(Dataset[tuple[Tensor, int]]):
    """A folder for each class, as ImageNet is usually laid out; images are read when asked for.

    Classes are numbered by their folders' names in sorted order (``classes``). Images may lie in
    folders further down.

    Args:
        root: the folder of the classes' folders.
        train: a random crop of 8 % to 100 % of the area, stretched to the size, with random flips;
            else the shorter side is scaled to ``size`` × 256/224 and the middle is cut out.
        size: height and width of what comes out, in pixels.

    Raises:
        FileNotFoundError: there is no folder in root, or a class without an image.
    """

    def __init__(self, root: str | Path, *, train: bool, size: int = 224) -> None:
        root = Path(root)
        folders = sorted(path for path in root.glob("*") if path.is_dir())
        if not folders:
            raise FileNotFoundError(f"{root} has no folders; each class needs one of its own")
        self.train = train
        self.size = size
        self.classes = [folder.name for folder in folders]
        self.samples: list[tuple[Path, int]] = []
        for label, folder in enumerate(folders):
            paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
            if not paths:
                raise FileNotFoundError(
                    f"{folder} has no images; the endings known are {', '.join(sorted(SUFFIXES))}"
                )
            self.samples += [(path, label) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = random_box(*image.size) if self.train else middle_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.reshape(self.size, self.size, 3).permute(2, 0, 1)
        if self.train:
            pixels = random_flip(pixels)
        return normalise(pixels, IMAGENET_MEAN, IMAGENET_DEVIATION), label


Box = tuple[float, float, float, float]  # left, top, right, bottom


def middle_box(width: int, height: int) -> Box:
    """The square in the middle, 224/256 of the shorter side."""
    side = min(width, height) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int) -> Box:
    """A box of 8 % to 100 % of the area and an aspect of 3:4 to 4:3, where one fits.

    After ten tries that do not fit, the middle one.
    """
    for _ in range(10):
        share, aspect, across, down = torch.rand(4).tolist()
        area = width * height * (0.08 + 0.92 * share)
        ratio = math.exp(math.log(4 / 3) * (2 * aspect - 1))
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if box_width <= width and box_height <= height:
            left, top = across * (width - box_width), down * (height - box_height)
            return left, top, left + box_width, top + box_height
    return middle_box(width, height)
