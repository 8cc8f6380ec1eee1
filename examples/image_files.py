"""CIFAR-10's binary files without torchvision: a ``Dataset`` of (image, label).

Images are normalised float32 tensors of shape (3, 32, 32). With ``train=True`` they are augmented;
the randomness is torch's, so that ``torch.manual_seed`` fixes it.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_DEVIATION = (0.2470, 0.2435, 0.2616)


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
