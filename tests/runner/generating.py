"""Continue a prompt twice through libtorchedge, the second time a longer one, and print tokens and steps.

python tests/runner/generating.py LIBRARY BUNDLE DEVICE IDS
"""

import ctypes
import json
import sys

TOKENS = ctypes.POINTER(ctypes.c_int64)


class Options(ctypes.Structure):
    """torchedge_options."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("device", "library", "cache", "sha256")),
        ("memory_limit", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("progress", "context")),
        ("hints", ctypes.c_uint32),
    )


class Sampling(ctypes.Structure):
    """torchedge_sampling."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p")),
        *((name, ctypes.c_uint64) for name in ("top_k", "seed")),
        ("stop", TOKENS),
        ("stops", ctypes.c_size_t),
        ("stream", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)),
        ("context", ctypes.c_void_p),
    )


def main(path, bundle, device, ids):
    """Print [tokens, tokens, [steps, steps]]."""
    library, handle = ctypes.CDLL(path), ctypes.c_void_p()
    library.torchedge_error.restype = library.torchedge_describe.restype = ctypes.c_char_p
    sizes = ctypes.POINTER(ctypes.c_size_t)
    library.torchedge_generate.argtypes = (
        ctypes.c_void_p, TOKENS, sizes, ctypes.c_size_t, TOKENS, ctypes.c_size_t, sizes,
        ctypes.POINTER(Sampling),
    )  # fmt: skip
    library.torchedge_describe.argtypes = library.torchedge_error.argtypes = (ctypes.c_void_p,)

    def check(code):
        if code < 0:
            raise SystemExit(library.torchedge_error(handle).decode())

    def generate(prompt, most, how):
        fed, tokens = (ctypes.c_int64 * len(prompt))(*prompt), (ctypes.c_int64 * most)()
        count, made = ctypes.c_size_t(len(prompt)), ctypes.c_size_t()
        check(library.torchedge_generate(handle, fed, count, 1, tokens, most, made, how))
        return tokens[: made.value]

    def steps():
        return json.loads(library.torchedge_describe(handle))["figures"]["steps"]

    options = Options(device.encode())
    check(library.torchedge_open(bundle.encode(), ctypes.byref(options), ctypes.byref(handle)))
    prompt, heard = json.loads(ids), []
    first = generate(prompt, 6, None)
    counts = [steps()]
    how = Sampling(1.5, 0.9, 40, 7)
    how.stream = type(how.stream)(lambda _, text, token: heard.append((text, token)))
    second = generate([*prompt, *first, 5, 9], 3, how)
    assert heard == [(0, token) for token in second]
    print(json.dumps([first, second, [counts[0], steps() - counts[0]]]))
    library.torchedge_close(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
