"""The keys of a job: a certificate that is its own authority, and its private key, in a directory.

Whoever has them is a rank of the job. They are made by OpenSSL's command, so that no code here makes keys.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thinwire.errors import UsageError

KEYS: Final = "THINWIRE_KEYS"
"""Environment variable: directory of the job's keys, for programs that read no recipe."""

DAYS: Final = 365
"""Days for which keys are valid unless another number is asked for."""

NOT_FOR_ISLANDS: Final = (
    f"cluster.keys or {KEYS} with islands.elastic = true: keys protect one job, not what travels between islands; "
    "leave keys out, and use a VPN such as WireGuard or a private network between the islands' hosts"
)

_REMEDY: Final = "make one with `thinwire keys DIR` and copy it to every host"


@dataclass(frozen=True)
class Keys:
    """Keys of a job, in a directory."""

    directory: Path

    @classmethod
    def read(cls, directory: str | Path) -> Keys:
        """The keys in a directory.

        Raises:
            UsageError: A file is missing, or others than its owner may read the private key.
        """
        keys = cls(Path(directory).expanduser().absolute())
        for file in (keys.certificate, keys.key):
            if not os.access(file, os.R_OK):
                raise UsageError(f"cluster.keys = {directory} has no {file.name} that can be read; {_REMEDY}")
        mode = stat.S_IMODE(keys.key.stat().st_mode)
        if mode & 0o077:
            raise UsageError(
                f"cluster.keys = {directory}: other users may read {keys.key.name} (mode {mode:o}), and so join the "
                f"job; make new keys, or run chmod 600 {keys.key}"
            )
        return keys

    @property
    def certificate(self) -> Path:
        return self.directory / "certificate.pem"

    @property
    def key(self) -> Path:
        return self.directory / "key.pem"


def make_keys(directory: Path, days: int = DAYS) -> Keys:
    """Make the keys of a job, valid for some days, in a directory which only its owner can enter.

    Raises:
        UsageError: The directory holds keys or cannot be written, or OpenSSL is missing.
    """
    keys = Keys(directory.expanduser().absolute())
    if keys.certificate.exists() or keys.key.exists():
        raise UsageError(f"{directory} holds keys already; name another directory, or remove it first")
    openssl = shutil.which("openssl")
    if openssl is None:
        raise UsageError(
            "thinwire keys needs the command openssl, which is missing; install it: apt-get install openssl"
        )
    try:
        keys.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=keys.directory, prefix=".") as scratch:  # mode 700
            made = [Path(scratch) / file.name for file in (keys.certificate, keys.key)]
            command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
            command += ["-subj", "/CN=thinwire", "-days", str(days), "-out", str(made[0]), "-keyout", str(made[1])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"openssl made no keys: {done.stderr.strip().splitlines()[-1]}")
            made[1].chmod(0o600)
            for file, place in zip(made, (keys.certificate, keys.key), strict=True):
                file.rename(place)
    except OSError as error:
        raise UsageError(f"cannot write keys to {directory}: {error.strerror}; name another directory") from error
    return keys
