"""ATen operations in JAX, one row each, by the operation's name without its overload.

A row is a template or a function that makes one. In a template `{name}` is an argument by the name that PyTorch's schema
gives it, `{.name}` the same where something follows that binds closely, as in `{.self}.T`. What calls a function of
`_layers.py` brings that function along.
"""

from __future__ import annotations

import torch

from oxitorch.to_jax._graph import Const, Node, Param, Unsupported, Value

ROWS: dict = {}


def row(*names):
    def add(f):
        for n in names:
            ROWS[n] = f
        return f

    return add


def templates(text):
    for line in text.strip().splitlines():
        name, template = line.split(maxsplit=1)
        ROWS[name] = template


templates("""
abs                 jnp.abs({self})
neg                 -{.self}
exp                 jnp.exp({self})
expm1               jnp.expm1({self})
log                 jnp.log({self})
log1p               jnp.log1p({self})
log2                jnp.log2({self})
sqrt                jnp.sqrt({self})
rsqrt               jax.lax.rsqrt({self})
square              jnp.square({self})
reciprocal          1 / {.self}
sin                 jnp.sin({self})
cos                 jnp.cos({self})
tan                 jnp.tan({self})
tanh                jnp.tanh({self})
sinh                jnp.sinh({self})
cosh                jnp.cosh({self})
atan                jnp.arctan({self})
atan2               jnp.arctan2({self}, {other})
erf                 jax.lax.erf({self})
floor               jnp.floor({self})
ceil                jnp.ceil({self})
round               jnp.round({self})
trunc               jnp.trunc({self})
sign                jnp.sign({self})
isnan               jnp.isnan({self})
isinf               jnp.isinf({self})
isfinite            jnp.isfinite({self})
logical_not         ~{.self}
bitwise_not         ~{.self}
logical_or          {.self} | {.other}
logical_and         {.self} & {.other}
maximum             jnp.maximum({self}, {other})
minimum             jnp.minimum({self}, {other})
fmod                jnp.fmod({self}, {other})
relu                jax.nn.relu({self})
relu6               jax.nn.relu6({self})
sigmoid             jax.nn.sigmoid({self})
silu                jax.nn.silu({self})
mish                jax.nn.mish({self})
log_sigmoid         jax.nn.log_sigmoid({self})
hardswish           jax.nn.hard_swish({self})
hardsigmoid         jax.nn.hard_sigmoid({self})
selu                jax.nn.selu({self})
leaky_relu          jax.nn.leaky_relu({self}, {negative_slope})
elu                 jax.nn.elu({self}, {alpha})
celu                jax.nn.celu({self}, {alpha})
hardtanh            jnp.clip({self}, {min_val}, {max_val})
prelu               jnp.where({self} > 0, {self}, {weight} * {.self})
glu                 jax.nn.glu({self}, axis={dim})
softmax             jax.nn.softmax({self}, axis={dim})
log_softmax         jax.nn.log_softmax({self}, axis={dim})
logsumexp           jax.nn.logsumexp({self}, axis={dim})
matmul              {.self} @ {.other}
bmm                 {.self} @ {.mat2}
mm                  {.self} @ {.mat2}
mv                  {.self} @ {.vec}
dot                 {.self} @ {.tensor}
addmm               {.self} + {.mat1} @ {.mat2}
outer               jnp.outer({self}, {vec2})
numpy_T             {.self}.T
t                   {.self}.T
mT                  {.self}.mT
transpose           {.self}.swapaxes({dim0}, {dim1})
movedim             jnp.moveaxis({self}, {source}, {destination})
squeeze             {.self}.squeeze({dim})
flip                jnp.flip({self}, {dims})
roll                jnp.roll({self}, {shifts}, {dims})
cumsum              jnp.cumsum({self}, axis={dim})
cumprod             jnp.cumprod({self}, axis={dim})
tril                jnp.tril({self}, {diagonal})
triu                jnp.triu({self}, {diagonal})
diagonal            jnp.diagonal({self}, {offset}, {dim1}, {dim2})
cat                 jnp.concatenate({tensors}, axis={dim})
concat              jnp.concatenate({tensors}, axis={dim})
stack               jnp.stack({tensors}, axis={dim})
gather              jnp.take_along_axis({self}, {index}, axis={dim})
index_select        jnp.take({self}, {index}, axis={dim})
take_along_dim      jnp.take_along_axis({self}, {indices}, axis={dim})
masked_fill         jnp.where({mask}, {value}, {self})
one_hot             jax.nn.one_hot({self}, {num_classes}, dtype=jnp.int32)
sort                (jnp.sort({self}, axis={dim}, descending={descending}), jnp.argsort({self}, axis={dim}, descending={descending}))
argsort             jnp.argsort({self}, axis={dim}, descending={descending})
topk                top_k({self}, {k}, {dim})
repeat_interleave   jnp.repeat({self}, {repeats}, axis={dim})
tile                jnp.tile({self}, {dims})
repeat              jnp.tile({self}, {repeats})
unfold              as_strided_windows({self}, {dimension}, {size}, {step})
_weight_norm        weight_norm({v}, {g}, {dim})
group_norm          group_norm({input}, {num_groups}, {weight}, {bias}, {eps})
constant_pad_nd     pad({self}, {pad}, "constant", {value})
upsample_nearest1d  interpolate_nearest({input}, {^})
upsample_nearest2d  interpolate_nearest({input}, {^})
upsample_nearest3d  interpolate_nearest({input}, {^})
upsample_bicubic2d  interpolate_cubic({input}, {^}, {align_corners})
zeros               jnp.zeros({size}, {dtype})
ones                jnp.ones({size}, {dtype})
empty               jnp.zeros({size}, {dtype})
full                jnp.full({size}, {fill_value}, {dtype})
zeros_like          jnp.zeros_like({self}, dtype={dtype})
empty_like          jnp.zeros_like({self}, dtype={dtype})
ones_like           jnp.ones_like({self}, dtype={dtype})
full_like           jnp.full_like({self}, {fill_value}, dtype={dtype})
new_zeros           jnp.zeros({size}, {dtype})
new_empty           jnp.zeros({size}, {dtype})
new_ones            jnp.ones({size}, {dtype})
new_full            jnp.full({size}, {fill_value}, {dtype})
eye                 jnp.eye({n}, dtype={dtype})
linspace            jnp.linspace({start}, {end}, {steps}, dtype={dtype})
scalar_tensor       jnp.array({s}, {dtype})
zero                jnp.zeros_like({self})
index_add           index_set({self}, (None,) * {.dim} + ({index},), {source}, accumulate=True)
complex             jax.lax.complex({real}, {imag})
view_as_complex     jax.lax.complex({.self}[..., 0], {.self}[..., 1])
view_as_real        jnp.stack([{.self}.real, {.self}.imag], axis=-1)
polar               {.abs} * jnp.exp(1j * {.angle})
real                {.self}.real
imag                {.self}.imag
conj                jnp.conj({self})
bernoulli           jax.random.bernoulli(self.rngs(), {self}).astype({dtype})
rand                jax.random.uniform(self.rngs(), {size}, {dtype})
randn               jax.random.normal(self.rngs(), {size}, {dtype})
rand_like           jax.random.uniform(self.rngs(), {.self}.shape, {dtype})
randn_like          jax.random.normal(self.rngs(), {.self}.shape, {dtype})
put_detach          {new}
put_alias           {new}
put_view            {.new}.reshape({.base}.shape)
put_reshape         {.new}.reshape({.base}.shape)
put_unsqueeze       {.new}.reshape({.base}.shape)
put_squeeze         {.new}.reshape({.base}.shape)
put_transpose       {.new}.swapaxes({dim0}, {dim1})
put_t               {.new}.T
""")

# PyTorch's other names for the same.
ALIASES = {
    "_softmax": "softmax", "special_expm1": "expm1", "special_logsumexp": "logsumexp", "special_erf": "erf",
    "absolute": "abs", "clip": "clamp", "swapaxes": "transpose", "_unsafe_view": "view", "view_as": "reshape_as",
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "greater": "gt", "less": "lt",
    "negative": "neg", "concatenate": "cat", "moveaxis": "movedim", "linalg_vector_norm": "norm", "_to_copy": "to",
    "arctan2": "atan2", "not_equal": "ne", "frobenius_norm": "norm", "expand_as": "expand_as", "fill": "fill",
    "adaptive_avg_pool1d": "adaptive_avg_pool2d", "adaptive_avg_pool3d": "adaptive_avg_pool2d", "split": "split_with_sizes",
    "feature_dropout": "dropout", "upsample_linear1d": "upsample_bilinear2d", "_conj": "conj", "atleast_2d": "same",
    "upsample_trilinear3d": "upsample_bilinear2d", "unsafe_split": "split_with_sizes", "unsafe_chunk": "chunk",
    "matrix_H": "mT", "adjoint": "mT", "_unsafe_index": "index", "clamp_min": "clamp", "clamp_max": "clamp",
    "numpy_T": "t",
}  # fmt: skip

# A module may be asked the same of a value that it already is.
ROWS.update(
    dict.fromkeys(
        ["contiguous", "clone", "alias", "lift_fresh", "type_as", "positive", "resolve_conj", "_assert_async"], "{self}"
    )
)
ROWS["detach"] = "jax.lax.stop_gradient({self})"
ROWS["type_as"] = "{.self}.astype({dtype})"
ROWS["same"] = "{self}"


def infix(*pairs):
    for name, op in pairs:
        ROWS[name] = lambda a, op=op: arithmetic(a, op)


infix(
    ("add", "+"), ("sub", "-"), ("mul", "*"), ("remainder", "%"), ("floor_divide", "//"), ("eq", "=="), ("ne", "!="),
    ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("bitwise_and", "&"), ("bitwise_or", "|"),
    ("bitwise_xor", "^"), ("__and__", "&"), ("__or__", "|"), ("__xor__", "^"), ("logical_xor", "^"), ("pow", "**"),
    ("__lshift__", "<<"), ("__rshift__", ">>"),
)  # fmt: skip


def arithmetic(a, op):
    left, right = ("self", "exponent") if op == "**" else ("self", "other")
    x, y = a.bound(left, op, False), a.bound(right, op, True)
    if op in "+-" and isinstance(a.raw[right], int) and a.raw[right] == 0 and not isinstance(a.raw[right], bool):
        return a[left]
    alpha = a.raw.get("alpha", 1)
    if alpha not in (1, None):
        y = f"{a.text(alpha)} * {a.atom(right)}"
    if a.raw[left] is not None and not isinstance(a.raw[left], Value | Param | Const) and op == "**":
        return f"jnp.power({a[left]}, {a[right]})"
    return a.cast(f"{x} {op} {y}", left, right)


@row("rsub")
def _(a):
    return f"{a.bound('other', '-', False)} - {a.bound('self', '-', True)}"


@row("div")
def _(a):
    mode = a.raw.get("rounding_mode")
    if mode == "floor":
        return f"{a.bound('self', '//', False)} // {a.bound('other', '//', True)}"
    text = a.cast(f"{a.bound('self', '/', False)} / {a.bound('other', '/', True)}", "self", "other")
    return f"jnp.trunc({text}).astype({a['dtype']})" if mode == "trunc" else text


@row("addcmul")
def _(a):
    scale = "" if a.raw["value"] == 1 else f"{a['value']} * "
    return f"{a['self']} + {scale}{a.atom('tensor1')} * {a.atom('tensor2')}"


@row("lerp")
def _(a):
    w = "weight"
    return f"{a['self']} + {a.atom(w)} * ({a['end']} - {a.atom('self')})"


@row("gelu")
def _(a):
    return f"jax.nn.gelu({a['self']}, approximate={a.raw['approximate'] == 'tanh'})"


@row("softplus")
def _(a):
    if a.raw["beta"] == 1:
        return f"jax.nn.softplus({a['self']})"
    return f"jax.nn.softplus({a['self']} * {a['beta']}) / {a['beta']}"


@row("clamp")
def _(a):
    return f"jnp.clip({a['self']}, {a.get('min')}, {a.get('max')})"


@row("where")
def _(a):
    if "self" not in a.raw:
        raise Unsupported("`torch.where` with one argument, whose result's size depends on values,")
    return f"jnp.where({a['condition']}, {a['self']}, {a['other']})"


# --- reductions


def reduction(name):
    def f(a):
        text = f"{a.atom('self')}.{name}({a.axes()})"
        if a.raw.get("dtype") is not None:
            text = f"{a.atom('self')}.{name}({', '.join(filter(None, [a.axes(), 'dtype=' + a['dtype']]))})"
        return text

    return f


for _name in ("sum", "mean", "prod", "any", "all", "amax", "amin", "argmax", "argmin"):
    ROWS[_name] = reduction({"amax": "max", "amin": "min"}.get(_name, _name))


@row("max", "min")
def _(a):
    name = a.name
    if "other" in a.raw:
        return f"jnp.{name}imum({a['self']}, {a['other']})"
    if len(a.node.outs) == 2:
        return f"({a.atom('self')}.{name}({a.axes()}), {a.atom('self')}.arg{name}({a.axes()}))"
    return f"{a.atom('self')}.{name}()"


@row("var", "std")
def _(a):
    ddof = 1 if a.raw.get("unbiased", True) and a.raw.get("correction") is None else a.raw.get("correction", 0)
    if "unbiased" in a.raw and not a.raw["unbiased"]:
        ddof = 0
    return f"{a.atom('self')}.{a.name}({', '.join(filter(None, [a.axes(), f'ddof={ddof}' if ddof else '']))})"


@row("var_mean")
def _(a):
    ddof = a.raw.get("correction")
    ddof = (0 if a.raw.get("unbiased") is False else 1) if ddof is None else ddof
    x = a.atom("self")
    return f"({x}.var({a.axes()}, ddof={ddof}), {x}.mean({a.axes()}))"


@row("norm", "linalg_norm")
def _(a):
    p = a.raw.get("ord", a.raw.get("p", 2))
    return f"norm({', '.join(filter(None, [a['self'], a.text(2 if p is None else p), a.axes()]))})"


@row("layer_norm")
def _(a):
    return f"layer_norm({a['input']}, {len(a.raw['normalized_shape'])}, {a['weight']}, {a['bias']}, {a['eps']})"


@row("rms_norm")
def _(a):
    return f"rms_norm({a['input']}, {len(a.raw['normalized_shape'])}, {a['weight']}, {a['eps']})"


@row("batch_norm")
def _(a):
    running = ", ".join("None" if a.raw[n] is None else a.variable(n) for n in ("running_mean", "running_var"))
    use = a.flag("use_running_average") if a.raw["training"] else "True"
    if a.raw["running_mean"] is None:
        use = "False"
    return f"batch_norm({a['input']}, {a['weight']}, {a['bias']}, {running}, {a['momentum']}, {a['eps']}, {use})"


@row("dropout", "alpha_dropout")
def _(a):
    if not a.raw["train"] or a.raw["p"] == 0:
        return a["input"]
    return f"{a.dropout(a.raw['p'])}({a['input']})"


# --- shapes


@row("view", "reshape")
def _(a):
    if "size" not in a.raw and "shape" not in a.raw:
        raise Unsupported("a view with another dtype")
    shape = a.raw.get("size", a.raw.get("shape"))
    return f"{a.atom('self')}.reshape({a.shape_text(shape)})" if shape else f"{a.atom('self')}.reshape(())"


@row("reshape_as")
def _(a):
    return f"{a.atom('self')}.reshape({a.atom('other')}.shape)"


@row("flatten")
def _(a):
    first, last = (d % max(len(a.shape("self")), 1) for d in (a.raw["start_dim"], a.raw["end_dim"]))
    inner = a.inlined("self")
    if inner is not None and find(inner)[0] == "adaptive_avg_pool2d" and (first, last) == (1, len(a.shape("self")) - 1):
        size = inner.args["output_size"]
        if len(size) == last - 1 and all(s == 1 for s in size):
            return a.fill_from(inner, "{.self}.mean(" + str(tuple(range(-len(size), 0)) if len(size) > 1 else -1) + ")")
    before, after = a.sizes("self", 0, first), a.sizes("self", last + 1, len(a.shape("self")))
    return f"{a.atom('self')}.reshape({', '.join([*before, '-1', *after])})"


@row("unflatten")
def _(a):
    d = a.raw["dim"] % len(a.shape("self"))
    before, after = a.sizes("self", 0, d), a.sizes("self", d + 1, len(a.shape("self")))
    return f"{a.atom('self')}.reshape({', '.join([*before, a.items(a.raw['sizes']), *after])})"


@row("permute")
def _(a):
    return f"{a.atom('self')}.transpose({', '.join(str(d) for d in a.raw['dims'])})"


@row("put_permute")
def _(a):
    rank = len(a.raw["dims"])
    dims = [d % rank for d in a.raw["dims"]]
    return f"{a.atom('new')}.transpose({', '.join(str(dims.index(d)) for d in range(rank))})"


@row("unsqueeze")
def _(a):
    rank = len(a.shape("self"))
    d = a.raw["dim"]
    d = d + rank + 1 if d < 0 else d
    if d <= 2:
        return f"{a.atom('self')}[{':, ' * d}None]"
    if d == rank:
        return f"{a.atom('self')}[..., None]"
    return f"jnp.expand_dims({a['self']}, {d})"


@row("squeeze")
def _(a):
    d = a.raw.get("dim")
    shape = a.shape("self")
    dims = range(len(shape)) if d is None else [d] if isinstance(d, int) else d
    ones = [n for n in dims if isinstance(shape[n], int) and shape[n] == 1]
    if not ones:
        return a["self"]
    return f"{a.atom('self')}.squeeze({ones[0] if len(ones) == 1 else tuple(ones)})"


@row("expand")
def _(a):
    old, size = a.shape("self"), a.raw["size"]
    new = [a.out.shape[i] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size)]
    old = (1,) * (len(new) - len(old)) + tuple(old)
    if list(old) == [getattr(s, "expr", s) for s in new] and len(old) == len(a.shape("self")):
        return a["self"]
    return f"jnp.broadcast_to({a['self']}, ({a.items(new)}))"


@row("expand_as")
def _(a):
    return f"jnp.broadcast_to({a['self']}, {a.atom('other')}.shape)"


def index(a, d, text):
    """`text` as the index of a dimension."""
    rank = len(a.shape("self"))
    if d == rank - 1 and rank > 2:
        return f"..., {text}"
    return ":, " * d + text


@row("select")
def _(a):
    d = a.raw["dim"] % len(a.shape("self"))
    return f"{a.atom('self')}[{index(a, d, a['index'])}]"


def bounds(a):
    last, step = a.raw.get("end"), a.raw["step"]
    first = "" if a.raw.get("start") in (0, None) else a["start"]
    last = "" if last is None or (isinstance(last, int) and last > 2**62) else a["end"]
    return f"{first}:{last}" + ("" if step == 1 else f":{a['step']}")


@row("slice")
def _(a):
    d = a.raw["dim"] % len(a.shape("self"))
    text = bounds(a)
    return a["self"] if text == ":" else f"{a.atom('self')}[{index(a, d, text)}]"


@row("put_select")
def _(a):
    d = a.raw["dim"] % len(a.out.shape)
    return f"{a.atom('base')}.at[{':, ' * d}{a['index']}].set({a['new']})"


@row("put_slice")
def _(a):
    d = a.raw["dim"] % len(a.out.shape)
    text = bounds(a)
    return a["new"] if text == ":" else f"{a.atom('base')}.at[{':, ' * d}{text}].set({a['new']})"


@row("narrow")
def _(a):
    d = a.raw["dim"] % len(a.shape("self"))
    return f"jax.lax.dynamic_slice_in_dim({a['self']}, {a['start']}, {a['length']}, axis={d})"


@row("index")
def _(a):
    places = []
    for x in a.raw["indices"]:
        if isinstance(x, Value | Param) and a.dtype(x) in (torch.bool, torch.uint8):
            raise Unsupported("an index of booleans, whose result's size depends on values,")
        places.append(":" if x is None else a.text(x))
    return f"{a.atom('self')}[{', '.join(places)}]"


@row("index_put")
def _(a):
    indices = ", ".join(a.text(x) for x in a.raw["indices"])
    if len(a.raw["indices"]) == 1:
        indices += ","
    return f"index_set({a['self']}, ({indices}), {a['values']}" + (", accumulate=True)" if a.raw["accumulate"] else ")")


@row("scatter", "scatter_add")
def _(a):
    d = a.raw["dim"] % len(a.shape("self"))
    values = a["src"] if "src" in a.raw else a["value"]
    how = "add" if a.name == "scatter_add" else "set"
    if a.raw.get("reduce"):
        raise Unsupported("`scatter` with a reduction")
    grid = f"jnp.indices({a.atom('index')}.shape, sparse=True)"
    return f"{a.atom('self')}.at[({grid}[:{d}] + ({a['index']},) + {grid}[{d + 1}:])].{how}({values})"


@row("chunk", "tensor_split")
def _(a):
    d = a.raw["dim"]
    n = a.raw.get("chunks", a.raw.get("sections"))
    sizes = [v.shape[d] for v in a.node.outs]
    if len(sizes) == n and len({str(s) for s in sizes}) == 1:
        return f"jnp.split({a['self']}, {n}, axis={d})"
    return split(a, sizes, d)


@row("split_with_sizes")
def _(a):
    d = a.raw["dim"]
    sizes = [v.shape[d] for v in a.node.outs]
    if len({str(s) for s in sizes}) == 1:
        return f"jnp.split({a['self']}, {len(sizes)}, axis={d})"
    return split(a, sizes, d)


def split(a, sizes, d):
    at, places = 0, []
    for s in sizes[:-1]:
        at = at + s
        places.append(a.size(at))
    return f"jnp.split({a['self']}, [{', '.join(places)}], axis={d})"


@row("unbind")
def _(a):
    d = a.raw["dim"] % len(a.shape("self"))
    return a["self"] if d == 0 else f"jnp.moveaxis({a['self']}, {d}, 0)"


@row("diff")
def _(a):
    ends = [f", {n}={a[n]}" for n in ("prepend", "append") if a.raw.get(n) is not None]
    return f"jnp.diff({a['self']}, {a['n']}, axis={a['dim']}{''.join(ends)})"


@row("meshgrid")
def _(a):
    indexing = a.raw.get("indexing", "ij")
    return f"jnp.meshgrid({a.items(a.raw['tensors'])}, indexing={indexing!r})"


@row("broadcast_tensors")
def _(a):
    return f"jnp.broadcast_arrays({a.items(a.raw['tensors'])})"


@row("_shape_as_tensor")
def _(a):
    return f"jnp.array({a.atom('self')}.shape)"


@row("masked_fill")
def _(a):
    value = a["value"]
    if isinstance(a.raw["value"], Value | Param | Const):
        value = f"{a.atom('value')}.astype({a['dtype']})" if a.dtype(a.raw["value"]) != a.out.dtype else value
    return f"jnp.where({a['mask']}, {value}, {a['self']})"


@row("fill")
def _(a):
    return f"jnp.full_like({a['self']}, {a['value']})"


@row("copy")
def _(a):
    text = a["src"]
    if a.dtype(a.raw["src"]) != a.out.dtype:
        text = f"{a.atom('src')}.astype({a['dtype']})"
    if a.shape("src") != tuple(a.out.shape):
        text = f"jnp.broadcast_to({text}, {a.atom('self')}.shape)"
    return text


@row("zero")
def _(a):
    return f"jnp.zeros_like({a['self']})"


# --- products


@row("linear")
def _(a):
    text = f"{a.bound('input', '@', False)} @ {a.transposed('weight')}"
    return text if a.raw["bias"] is None else f"{text} + {a.atom('bias')}"


@row("einsum")
def _(a):
    return f"jnp.einsum({a['equation']!s}, {a.items(a.raw['tensors'])})"


@row("baddbmm")
def _(a):
    beta = "" if a.raw["beta"] == 1 else f"{a['beta']} * "
    alpha = "" if a.raw["alpha"] == 1 else f"{a['alpha']} * "
    product = f"{alpha}({a.atom('batch1')} @ {a.atom('batch2')})"
    return product if a.raw["beta"] == 0 else f"{beta}{a.atom('self')} + {product}"


def heads_last(args) -> bool:
    """Whether `jax.nn.dot_product_attention`, which has the heads behind the times, computes this attention."""
    q, k, v = (shape_of(args[n]) for n in ("query", "key", "value"))
    masked = args["attn_mask"] is None or len(shape_of(args["attn_mask"])) == 4
    return len(q) == len(k) == len(v) == 4 and v[-1] == k[-1] and masked and not args["dropout_p"]


def shape_of(x):
    return x.shape if isinstance(x, Value) else tuple(x.tensor.shape)


@row("scaled_dot_product_attention")
def _(a):
    mask, dropout = a.raw["attn_mask"], a.raw["dropout_p"]
    options = ", is_causal=True" if a.raw["is_causal"] else ""
    options += "" if a.raw.get("scale") is None else f", scale={a['scale']}"
    if heads_last(a.raw):
        kind = "" if mask is None else f", {'mask' if a.dtype(mask) == torch.bool else 'bias'}={a['attn_mask']}"
        swapped = ", ".join(a.swapped(n) for n in ("query", "key", "value"))
        text = f"jax.nn.dot_product_attention({swapped}{kind}{options})"
        return text if "out" in getattr(a.node, "swapped", ()) else f"{text}.swapaxes(1, 2)"
    kind = "" if mask is None else f", mask={a['attn_mask']}"
    drop = f", dropout={a.dropout(dropout)}" if dropout else ""
    return f"attention({a['query']}, {a['key']}, {a['value']}{kind}{options}{drop})"


# --- convolutions, pools, sizes


def options(a, **rows):
    """Arguments by JAX's names whose values are not the default: `strides=2`, the same in all dimensions."""
    out = ""
    for name, (raw, default) in rows.items():
        x = a.raw.get(raw)
        x = x[0] if isinstance(x, list) and len({str(y) for y in x}) == 1 else x
        if isinstance(x, Value | Param | Const) or x not in (default, [], None):
            out += f", {name}={a.text(x) if not isinstance(x, list) else a[raw]}"
    return out


def convolution(name):
    def f(a):
        bias = "" if a.raw["bias"] is None else f", {a['bias']}"
        return f"{name}({a['input']}, {a['weight']}{bias}" + options(
            a, strides=("stride", 1), padding=("padding", 0), output_padding=("output_padding", 0),
            dilation=("dilation", 1), groups=("groups", 1),
        ) + ")"  # fmt: skip

    return f


def pooling(name, rank):
    def f(a):
        kernel = a.raw["kernel_size"]
        kernel = kernel * rank if len(kernel) == 1 else kernel
        a.raw = a.raw | {"stride": None} if a.raw["stride"] in (kernel, []) else a.raw
        return f"{name}({a['self']}, {a.text(tuple(kernel))}" + options(
            a, strides=("stride", None), padding=("padding", 0), dilation=("dilation", 1),
            ceil_mode=("ceil_mode", False), count_include_pad=("count_include_pad", True),
            divisor=("divisor_override", None),
        ) + ")"  # fmt: skip

    return f


for _rank in (1, 2, 3):
    ROWS[f"conv{_rank}d"] = convolution("conv")
    ROWS[f"conv_transpose{_rank}d"] = convolution("conv_transpose")
    ROWS[f"max_pool{_rank}d"] = pooling("max_pool", _rank)
    ROWS[f"avg_pool{_rank}d"] = pooling("avg_pool", _rank)


@row("adaptive_avg_pool2d")
def _(a):
    size = a.raw["output_size"]
    rank = len(size)
    if all(s == 1 for s in size):
        return f"{a.atom('self')}.mean({tuple(range(-rank, 0)) if rank > 1 else -1}, keepdims=True)"
    return f"adaptive_avg_pool({a['self']}, ({a.items(size)}{',' if rank == 1 else ''}))"


@row("adaptive_max_pool2d")
def _(a):
    if any(s != 1 for s in a.raw["output_size"]):
        raise Unsupported("`adaptive_max_pool2d` to more than one element")
    return f"({a.atom('self')}.max((-2, -1), keepdims=True), None)"


@row("upsample_bilinear2d")
def _(a):
    rank = len(a.shape("input")) - 2
    scales = a.raw.get("scale_factors")
    text = f"interpolate_linear({a['input']}, {a.last_sizes(rank)}, {a['align_corners']}"
    return text + (f", {a['scale_factors']})" if scales else ")")


@row("pad")
def _(a):
    options = "" if a.raw["mode"] == "constant" else f", {a['mode']}"
    value = a.raw.get("value")
    options += f', "constant", {a["value"]}' if value and not options else ""
    return f"pad({a['self']}, {a['pad']}{options})"


for _name, _mode in (
    ("reflection_pad1d", "reflect"),
    ("reflection_pad2d", "reflect"),
    ("replication_pad2d", "replicate"),
):
    ROWS[_name] = f'pad({{self}}, {{padding}}, "{_mode}")'


@row("pixel_shuffle")
def _(a):
    n, (*lead, c, h, w) = a.raw["upscale_factor"], a.shape("self")
    if len(lead) != 1:
        raise Unsupported("`pixel_shuffle` of other than four dimensions")
    b, h1, w1 = a.sizes("self", 0, 1)[0], *a.sizes("self", 2, 4)
    inner = f"{a.atom('self')}.reshape({b}, {c // n**2}, {n}, {n}, {h1}, {w1}).transpose(0, 1, 4, 2, 5, 3)"
    return f"{inner}.reshape({b}, {c // n**2}, {a.size(h * n)}, {a.size(w * n)})"


@row("embedding")
def _(a):
    if a.raw["padding_idx"] >= 0:
        return f"embedding({a['indices']}, {a['weight']}, {a['padding_idx']})"
    return f"{a.atom('weight')}[{a['indices']}]"


# --- losses

REDUCTIONS = ("none", "mean", "sum")


def loss(template):
    """Losses of elements, reduced."""

    def f(a):
        how = REDUCTIONS[a.raw["reduction"]]
        text = a.fill(template)
        return {"mean": f"({text}).mean()", "sum": f"({text}).sum()", "none": text}[how]

    return f


ROWS["mse_loss"] = loss("jnp.square({self} - {.target})")
ROWS["l1_loss"] = loss("jnp.abs({self} - {.target})")
ROWS["smooth_l1_loss"] = loss("smooth_l1({self}, {target}, {beta})")
ROWS["huber_loss"] = loss("smooth_l1({self}, {target}, {delta}) * {delta}")
ROWS["binary_cross_entropy"] = loss("-({.target} * jnp.log({self}) + (1 - {.target}) * jnp.log(1 - {.self}))")
ROWS["binary_cross_entropy_with_logits"] = loss("jax.nn.softplus({self}) - {.self} * {.target}")


@row("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def _(a):
    # Logarithms of probabilities are logits of the same probabilities.
    weight, smoothing = a.raw["weight"], a.raw.get("label_smoothing")
    classes = not a.dtype(a.raw["target"]).is_floating_point and len(a.shape("self")) > 1
    if classes and weight is None and a.raw["reduction"] == 1 and not smoothing:
        return f"cross_entropy({a['self']}, {a['target']}{options(a, ignore_index=('ignore_index', -100))})"
    given = options(
        a, weight=("weight", None), ignore_index=("ignore_index", -100), label_smoothing=("label_smoothing", 0.0)
    )
    how = "" if a.raw["reduction"] == 1 else f", reduction={REDUCTIONS[a.raw['reduction']]!r}"
    return f"weighted_cross_entropy({a['self']}, {a['target']}{given}{how})"


# --- dtypes, and values out of nothing


@row("to")
def _(a):
    x = a.raw["self"]
    return a["self"] if a.same(a.dtype(x), a.out.dtype) else f"{a.atom('self')}.astype({a['dtype']})"


for _name in ("float", "half", "bfloat16", "double", "int", "long", "bool"):
    ROWS[_name] = ROWS["to"]


@row("arange")
def _(a):
    start = "" if a.raw.get("start", 0) == 0 and a.raw.get("step", 1) == 1 else f"{a.get('start', 0)}, "
    step = "" if a.raw.get("step", 1) == 1 else f", {a['step']}"
    dtype = "" if a.out.dtype == torch.int64 else f", dtype={a['dtype']}"
    return f"jnp.arange({start}{a['end']}{step}{dtype})"


def find(node: Node):
    """The row of a node's operation."""
    op = node.op if isinstance(node.op, str) else node.op._schema.name.split("::")[1]
    name = op.removesuffix("_") if op not in ROWS and not op.endswith("__") else op
    name = ALIASES.get(name, name)
    namespace = "aten" if isinstance(node.op, str) else node.op.namespace
    return name, ROWS.get(name) if namespace == "aten" else None
