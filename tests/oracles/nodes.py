"""Nodes computed with numpy, in float64 where they are floating: an oracle apart from the kernels."""

import numpy as np
from scipy import special

from torchedge.expressions.indices import Axis, Fetched, Floor, Remainder
from torchedge.expressions.scalars import Apply, Constant, Guarded, Local, Position, Read
from torchedge.lowering.nodes import Contraction, Pointwise, Rows, RowsResult, Stored

_NUMPY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide, "neg": np.negative,
    "abs": np.abs,
    "abs_int": np.abs, "pow": np.power, "square": np.square, "reciprocal": lambda a: 1 / a,
    "relu": lambda a: np.where(a < 0, 0, a),
    "sigmoid": special.expit, "max_int": np.maximum, "min_int": np.minimum, "maximum": np.maximum,
    "minimum": np.minimum, "round": np.rint, "sign": lambda a: np.nan_to_num(np.sign(a)),
    "isnan": np.isnan, "isinf": np.isinf, "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
    "not": np.logical_not, "bit_and": np.bitwise_and, "bit_or": np.bitwise_or, "bit_xor": np.bitwise_xor,
    "bit_not": np.invert, "shift_left": np.left_shift, "shift_right": np.right_shift,
    "neg_int": np.negative,
    "int_div": lambda a, b: (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))), "int_mod": np.fmod,
    "mad": lambda a, b, c: a * b + c, "where": np.where, "lt": np.less, "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "rsqrt": lambda a: 1 / np.sqrt(a),
    "erf": special.erf,
    "erfc": special.erfc, "lgamma": special.gammaln, "fmod": np.fmod, "atan2": np.arctan2,
    "hypot": np.hypot,
    "copysign": np.copysign, "nextafter": lambda a, b: np.nextafter(np.float32(a), np.float32(b)),
    "int_pow": lambda a, b: _int_pow(a, b), "digamma": special.digamma,
    "trigamma": lambda a: special.polygamma(1, a),
    "erfinv": special.erfinv, "erfcx": special.erfcx, "zeta": special.zeta,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh,
}  # fmt: skip
_REDUCE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any, "all": np.all}


def compute(node, data, known=None):
    """Return a node's content. data: arrays by `Stored.name`."""
    known = {} if known is None else known
    if node not in known:
        with np.errstate(all="ignore"):
            known[node] = _compute(node, data, known)
    return known[node]


def _compute(node, data, known):
    if isinstance(node, Stored):
        array = np.asarray(data[node.name])
        assert array.shape == node.shape, (node.name, array.shape, node.shape)
        return array.astype(np.float64) if array.dtype.kind == "f" else array
    if isinstance(node, RowsResult):
        return compute(node.rows, data, known)[node.position]
    if isinstance(node, Pointwise):
        return _typed(_full(_value(node.body, _grid(node.axes), {}, data, known), node.axes), node.dtype)
    if isinstance(node, Contraction):
        grid = _grid((*node.axes, *node.inner))
        both = _value(node.a, grid, {}, data, known) * _value(node.b, grid, {}, data, known)
        both = np.broadcast_to(both, [a.extent for a in (*node.axes, *node.inner)])
        return both.sum(axis=tuple(range(len(node.axes), both.ndim)))
    assert isinstance(node, Rows)
    return _rows(node, data, known)


def _rows(node, data, known):
    loops = (*node.outer, *node.inner)
    grid, local = _grid(loops), {}
    over = tuple(range(len(node.outer), len(loops)))
    for stage in node.stages:
        found = _full(_value(stage.body, grid, local, data, known), loops)
        if stage.kind in ("argmax", "argmin"):
            flat = found.reshape(*found.shape[: len(node.outer)], -1)
            result = getattr(np, stage.kind)(flat, axis=-1)
        else:
            result = _REDUCE[stage.kind](found, axis=over)
        local[stage.name] = result.reshape(result.shape + (1,) * len(over))
    results = []
    for output in node.outputs:
        if set(output.axes) & set(node.inner):
            found = _full(_value(output.body, grid, local, data, known), loops)
            found = found.transpose([loops.index(a) for a in output.axes])
        else:
            kept = {k: v.reshape(v.shape[: len(node.outer)]) for k, v in local.items()}
            found = _full(_value(output.body, _grid(node.outer), kept, data, known), node.outer)
            found = found.transpose([node.outer.index(a) for a in output.axes])
        results.append(_typed(found, output.dtype))
    return results


def _grid(loops):
    count = len(loops)
    return {
        a: np.arange(a.extent).reshape([-1 if k == place else 1 for k in range(count)])
        for place, a in enumerate(loops)
    }


def _full(value, loops):
    return np.broadcast_to(value, [a.extent for a in loops])


def _typed(value, dtype):
    if dtype.startswith(("float", "bfloat")):
        return np.asarray(value, np.float64)
    return np.asarray(value).astype(dtype)


def _index(index, *state):
    total = index.const
    for atom, coefficient in index.terms:
        total = total + coefficient * _atom(atom, *state)
    return np.asarray(total)


def _atom(atom, grid, *state):
    if isinstance(atom, Axis):
        return grid[atom]
    if isinstance(atom, Fetched):
        return _value(atom.value, grid, *state).astype(np.int64)
    inner = _index(atom.index, grid, *state)
    assert isinstance(atom, (Floor, Remainder)) and np.all(inner >= 0)
    return inner // atom.divisor if isinstance(atom, Floor) else inner % atom.divisor


def _value(scalar, grid, local, data, known):
    memo, key = grid.setdefault("values", {}), (scalar, _GUARD in local)
    if key not in memo:
        memo[key] = _computed(scalar, grid, local, data, known)
    return memo[key]


def _computed(scalar, grid, local, data, known):
    state = (grid, local, data, known)
    if isinstance(scalar, Constant):
        return np.asarray(scalar.value)
    if isinstance(scalar, Local):
        return local[scalar.name]
    if isinstance(scalar, Position):
        return _typed(_index(scalar.index, *state), scalar.dtype)
    if isinstance(scalar, Read):
        array = compute(scalar.tensor, data, known)
        where = [_index(i, *state) for i in scalar.indices]
        where = [
            np.clip(w, 0, max(0, n - 1)) if _GUARD in state[1] else w
            for w, n in zip(where, array.shape, strict=True)
        ]
        return array[tuple(where)] if where else array
    if isinstance(scalar, Guarded):
        holds = np.asarray(True)
        for index, low, high in scalar.bounds:
            found = _index(index, *state)
            holds = holds & (found >= low) & (found < high)
        inner = (grid, {**local, _GUARD: True}, data, known)
        return np.where(holds, _value(scalar.value, *inner), _value(scalar.other, *state))
    assert isinstance(scalar, Apply)
    args = [_value(a, *state) for a in scalar.args]
    if scalar.function == "cast":
        return args[0] != 0 if scalar.dtype == "bool" else _typed(args[0], scalar.dtype)
    if scalar.function == "uniform":
        return _uniform(*args)
    function = _NUMPY.get(scalar.function) or getattr(np, scalar.function)
    return function(*args)


_GUARD = "within a guard"


def _uniform(seed, counter, offset, position):
    """The first word of Philox-4x32-10, written down again from the paper (Salmon et al., SC 2011)."""
    mask = np.uint64(0xFFFFFFFF)
    counters = (position, offset, counter, 0)
    words = np.broadcast_arrays(*[np.asarray(x).astype(np.uint64) & mask for x in counters])
    keys = [np.asarray(seed).astype(np.uint64) & mask, np.uint64(0)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ keys[0], second & mask,
            (first >> np.uint64(32)) ^ words[3] ^ keys[1], first & mask,
        ]  # fmt: skip
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & mask, (keys[1] + np.uint64(0xBB67AE85)) & mask]
    return (words[0] >> np.uint64(8)).astype(np.float64) * 2.0**-24


def _int_pow(base, exponent):
    power = np.power(base, np.maximum(exponent, 0))
    below = np.where(base == -1, 1 - 2 * (exponent & 1), base == 1)
    return np.where(exponent >= 0, power, below)
