#!/usr/bin/env python3
"""Signatures of checkpoints: what `fsdp sign` wrote, checked by the OpenSSF's `model_signing`, and the other way.

  signing.py FSDP_BINARY FIXTURES WORK_DIRECTORY

Run by `cargo xtask interop`. Needs openssl. Prints a line for each case; exits 1 at the first difference.
"""
import pathlib
import shutil
import subprocess
import sys

FIXTURES = ["fsdp2_adamw_ws2/dcp", "dtypes/every", "hf_ws2/hf_full_2files"]


def run(*command, code=0):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if (done.returncode == 0) != (code == 0) or (code and done.returncode != code):
        sys.exit(f"ended with {done.returncode}, not {code}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def make_key(work, name):
    private, public = work / f"{name}.pem", work / f"{name}.pub.pem"
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private)
    run("openssl", "ec", "-in", private, "-pubout", "-out", public)
    # The same key in PKCS#8.
    run("openssl", "pkcs8", "-topk8", "-nocrypt", "-in", private, "-out", work / f"{name}.pkcs8.pem")
    return private, public


def main():
    binary, fixtures, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    python = [sys.executable, "-m", "model_signing"]
    private, public = make_key(work, "key")
    _, other = make_key(work, "other")
    for fixture in FIXTURES:
        source = fixtures / fixture
        checkpoint = work / fixture.replace("/", "-")
        shutil.copytree(source, checkpoint)
        (checkpoint / ".gitattributes").write_text("* -text\n")
        (checkpoint / "below").mkdir()
        (checkpoint / "below" / "a.txt").write_text("a\n")
        (checkpoint / "below.txt").write_text("b\n")
        signature = checkpoint / "model.sig"
        theirs = ["--signature", signature, "--public_key", public]
        ours = ["--signature", signature, "--public-key", public]
        for key in (private, work / "key.pkcs8.pem"):
            run(binary, "sign", checkpoint, "--key", key, "--overwrite")
            run(*python, "verify", "key", checkpoint, *theirs)
        run(binary, "verify", checkpoint, *ours)
        print(f"ours, checked by model_signing: {fixture}")
        signature.unlink()
        run(*python, "sign", "key", checkpoint, "--private_key", private, "--signature", signature)
        run(binary, "verify", checkpoint, *ours)
        print(f"theirs, checked by fsdp: {fixture}")
        # What one refuses, the other does too.
        run(binary, "verify", checkpoint, "--signature", signature, "--public-key", other, code=13)
        run(*python, "verify", "key", checkpoint, "--signature", signature, "--public_key", other, code=1)
        for name, change, code in [
            ("below.txt", lambda path: path.write_text("c\n"), 10),
            ("added.txt", lambda path: path.write_text("d\n"), 10),
            ("below/a.txt", lambda path: path.unlink(), 11),
        ]:
            path = checkpoint / name
            before = path.read_bytes() if path.exists() else None
            change(path)
            for told in (
                run(binary, "verify", checkpoint, *ours, code=code),
                run(*python, "verify", "key", checkpoint, *theirs, code=1),
            ):
                if name not in told:
                    sys.exit(f"does not name `{name}`: {told}")
            path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
        run(binary, "verify", checkpoint, *ours)
        print(f"both refuse what was changed, added or lost: {fixture}")
    # One file.
    single = work / "one.safetensors"
    run(binary, "convert", fixtures / FIXTURES[0], single, "--to", "safetensors", "--include", "model.*")
    run(binary, "sign", single, "--key", private)
    run(*python, "verify", "key", single, "--signature", f"{single}.sig", "--public_key", public)
    run(*python, "sign", "key", single, "--private_key", private, "--signature", work / "theirs.sig")
    run(binary, "verify", single, "--signature", work / "theirs.sig", "--public-key", public)
    print("one file, both ways")


if __name__ == "__main__":
    main()
