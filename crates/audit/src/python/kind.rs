//! What a value is, as far as a look at the source tells.

/// What a value is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Unknown,
    /// A tensor, surely.
    Tensor,
    /// A tensor or a structure of them, such as an argument of `forward` or a part of a batch.
    Maybe,
    /// A tuple or list of tensors.
    Tensors,
    /// A value of Python's own: numbers, strings, sizes.
    Host,
    Numpy,
    /// A module of `torch.nn`, which gives a tensor.
    Layer,
    /// Another module.
    Module,
    Optimizer,
    Loader,
    /// A module or class of Python, or a function.
    Named,
}

impl Kind {
    /// Whether its methods are a tensor's.
    pub(crate) fn has_tensor_methods(self) -> bool {
        matches!(self, Kind::Tensor | Kind::Maybe)
    }
}

/// Functions of `torch` itself that give no tensor.
const NO_TENSOR: &[&str] = &[
    "is_tensor",
    "is_floating_point",
    "is_complex",
    "numel",
    "is_grad_enabled",
    "get_default_dtype",
    "device",
    "load",
    "save",
    "compile",
    "no_grad",
    "enable_grad",
    "set_grad_enabled",
    "inference_mode",
    "manual_seed",
    "seed",
    "initial_seed",
    "equal",
    "allclose",
    "typename",
    "autocast",
    "vmap",
    "is_storage",
    "result_type",
    "promote_types",
    "can_cast",
    "get_rng_state",
    "get_num_threads",
    "set_num_threads",
    "is_inference_mode_enabled",
    "is_autocast_enabled",
    "use_deterministic_algorithms",
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "set_float32_matmul_precision",
    "set_default_dtype",
    "set_default_device",
    "set_default_tensor_type",
    "set_printoptions",
    "get_default_device",
    "is_same_size",
    "set_rng_state",
    "get_autocast_dtype",
    "is_nonzero",
    "chunk",
];

/// Functions of `torch` itself that make a tensor of numbers.
const MAKES: &[&str] = &[
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "zeros",
];

/// Functions and methods that give several tensors.
const SEVERAL: &[&str] = &[
    "split",
    "chunk",
    "unbind",
    "tensor_split",
    "topk",
    "sort",
    "kthvalue",
    "mode",
    "cummax",
    "cummin",
    "meshgrid",
    "broadcast_tensors",
    "var_mean",
    "std_mean",
    "slogdet",
    "svd",
    "qr",
    "eigh",
    "frexp",
    "split_with_sizes",
    "aminmax",
    "hsplit",
    "vsplit",
    "dsplit",
];

/// Methods of tensors that give something else.
const TO_HOST: &[&str] = &[
    "item",
    "tolist",
    "size",
    "dim",
    "numel",
    "ndimension",
    "stride",
    "data_ptr",
    "element_size",
    "is_contiguous",
    "get_device",
    "storage",
    "untyped_storage",
    "storage_offset",
    "is_floating_point",
    "is_complex",
    "nelement",
    "equal",
    "allclose",
    "backward",
    "is_pinned",
    "is_shared",
    "register_hook",
    "type",
    "is_signed",
    "is_set_to",
    "dim_order",
];

/// Attributes of tensors that give something else.
const HOST_ATTRIBUTES: &[&str] = &[
    "shape",
    "dtype",
    "device",
    "ndim",
    "is_cuda",
    "requires_grad",
    "is_leaf",
    "layout",
    "grad_fn",
    "names",
    "is_sparse",
    "itemsize",
    "nbytes",
    "is_meta",
    "is_quantized",
    "is_nested",
    "_version",
    "output_nr",
    "is_cpu",
    "is_xla",
    "is_mps",
];

/// What a function of torch gives, by its whole name.
pub(crate) fn of_call(path: &str) -> Kind {
    let Some(rest) = path.strip_prefix("torch.") else {
        return match path {
            "len" | "int" | "float" | "bool" | "str" | "range" | "isinstance" | "hasattr" | "type"
            | "round" | "id" => Kind::Host,
            _ if path.starts_with("numpy.") => Kind::Numpy,
            _ if path.ends_with("DataLoader") => Kind::Loader,
            _ => Kind::Unknown,
        };
    };
    let (head, last) = rest.rsplit_once('.').unwrap_or(("", rest));
    let upper = last.starts_with(|c: char| c.is_ascii_uppercase());
    match head {
        "" if upper => {
            if last.ends_with("Tensor") {
                Kind::Tensor
            } else {
                Kind::Unknown
            }
        }
        "" if SEVERAL.contains(&last) => Kind::Tensors,
        "" if NO_TENSOR.contains(&last) || last.starts_with("is_") => Kind::Host,
        "" | "nn.functional" | "linalg" | "fft" | "special" | "nn.init" => Kind::Tensor,
        "nn" if last == "Parameter" => Kind::Tensor,
        "nn" if matches!(
            last,
            "LSTM"
                | "GRU"
                | "RNN"
                | "LSTMCell"
                | "MultiheadAttention"
                | "ModuleList"
                | "ModuleDict"
                | "Sequential"
                | "DataParallel"
                | "Module"
                | "Transformer"
        ) =>
        {
            Kind::Module
        }
        "nn" if upper => Kind::Layer,
        "nn.utils" if last.starts_with("clip_grad_norm") => Kind::Tensor,
        "nn.utils.rnn" if last == "pad_sequence" => Kind::Tensor,
        "utils.data" if last == "DataLoader" => Kind::Loader,
        _ if head.starts_with("optim") && upper && !head.contains("lr_scheduler") => Kind::Optimizer,
        _ => Kind::Unknown,
    }
}

/// Whether a function of torch makes a tensor of numbers, on the host if no device is named.
pub(crate) fn makes_tensor(path: &str) -> bool {
    let Some(name) = path.strip_prefix("torch.") else { return false };
    MAKES.contains(&name)
}

/// What a method gives, of a value of a kind.
pub(crate) fn of_method(of: Kind, method: &str) -> Kind {
    match of {
        Kind::Tensor | Kind::Maybe if method == "numpy" => Kind::Numpy,
        // What is read of the copy waits for nobody.
        Kind::Tensor | Kind::Maybe if method == "cpu" => Kind::Host,
        Kind::Tensor | Kind::Maybe if TO_HOST.contains(&method) || method.starts_with("is_") => Kind::Host,
        Kind::Tensor if SEVERAL.contains(&method) => Kind::Tensors,
        Kind::Tensor => Kind::Tensor,
        Kind::Maybe if OF_TENSORS.contains(&method) => Kind::Tensor,
        Kind::Maybe
            if matches!(
                method,
                "to" | "detach" | "clone" | "view" | "reshape" | "contiguous" | "cuda" | "float"
            ) =>
        {
            Kind::Maybe
        }
        Kind::Layer if matches!(method, "to" | "cuda" | "eval" | "train" | "half" | "bfloat16" | "float") => {
            Kind::Layer
        }
        Kind::Module
            if matches!(method, "to" | "cuda" | "eval" | "train" | "half" | "bfloat16" | "float") =>
        {
            Kind::Module
        }
        Kind::Numpy => Kind::Numpy,
        // A tensor that was made on the host.
        Kind::Host if matches!(method, "to" | "cuda" | "tpu") => Kind::Tensor,
        Kind::Host => Kind::Host,
        _ => Kind::Unknown,
    }
}

/// What an attribute is, of a value of a kind.
pub(crate) fn of_attribute(of: Kind, name: &str) -> Kind {
    match of {
        Kind::Tensor | Kind::Maybe if HOST_ATTRIBUTES.contains(&name) => Kind::Host,
        Kind::Tensor if matches!(name, "data" | "grad" | "T" | "mT" | "real" | "imag" | "H") => Kind::Tensor,
        Kind::Maybe if matches!(name, "data" | "T" | "mT" | "grad") => Kind::Tensor,
        Kind::Host => Kind::Host,
        Kind::Numpy if matches!(name, "shape" | "ndim" | "size" | "dtype") => Kind::Host,
        Kind::Numpy => Kind::Numpy,
        _ => Kind::Unknown,
    }
}

/// Methods that give a tensor, and that nothing else in a batch has.
const OF_TENSORS: &[&str] = &[
    "sum",
    "mean",
    "max",
    "min",
    "any",
    "all",
    "abs",
    "norm",
    "argmax",
    "argmin",
    "isnan",
    "isinf",
    "isfinite",
    "eq",
    "ne",
    "lt",
    "gt",
    "le",
    "ge",
    "softmax",
    "log_softmax",
    "sigmoid",
    "exp",
    "log",
    "std",
    "var",
    "prod",
    "median",
    "nonzero",
    "masked_fill",
    "permute",
    "transpose",
    "unsqueeze",
    "squeeze",
    "flatten",
    "matmul",
    "bool",
    "long",
    "half",
    "double",
];
