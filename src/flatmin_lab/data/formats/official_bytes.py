"""Are unpacked files the official ones, byte for byte?

An archive has a checksum of its own, an unpacked file has none: a byte altered on disk or in a copy would go
unnoticed. So the files of a complete data set are compared with the published checksums, and a warning names those that
differ. Other people's versions of a data set (converted, cleaned, a part of it) stay usable.
"""

import hashlib
import warnings
from collections.abc import Mapping

MD5 = {
    "cifar-10-batches-py": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar-100-python": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
}
SHA256 = {
    "svhn": {
        "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    }
}


class NotOfficialWarning(UserWarning):
    """A complete data set in the official layout, but not with the official bytes."""


def warn_unless_official(version: str, files: Mapping[str, bytes], where: str) -> None:
    """`version`: the official folder, or data set; files that have no published checksum are not compared."""
    md5, sha256 = MD5.get(version, {}), SHA256.get(version, {})
    others = [
        name
        for name, content in files.items()
        if (name in md5 and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5[name])
        or (name in sha256 and hashlib.sha256(content).hexdigest() != sha256[name])
    ]
    if others:
        warnings.warn(
            f"{where}: not the official bytes in {', '.join(others)}; if these should be the official files, download "
            "them again",
            NotOfficialWarning,
            stacklevel=2,
        )
