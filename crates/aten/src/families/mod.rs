//! The rows, a file per family. A family is a `static ROWS`; nothing else refers to its functions.

use crate::row::Row;

mod cephes;
pub mod channels;
mod jacobi;
mod philox;
mod taps;

macro_rules! families {
    ($($name:ident: $doc:literal,)*) => {
        $(#[doc = $doc] pub mod $name;)*
        /// Every family's rows.
        pub static FAMILIES: &[&[Row]] = &[$($name::ROWS),*];
    };
}

families! {
    pointwise_unary: "Pointwise functions of one tensor.",
    special: "Special functions and orthogonal polynomials.",
    pointwise_binary: "Arithmetic of two tensors.",
    comparison: "Comparisons and logic.",
    bitwise: "Bits and shifts.",
    complex: "Complex numbers.",
    ternary: "Pointwise functions of three operands, clamps and masks.",
    activations: "Activations and their derivatives.",
    creation: "New tensors.",
    convert: "Casts and copies.",
    random: "Random numbers.",
    sampling: "Distributions sampled by rejection.",
    optim: "Fused optimizers and loss scaling.",
    reductions: "Sums, means, extremes, variances.",
    cumulative: "Running sums and the like.",
    softmax: "Softmax and its derivatives.",
    norms: "Normalisation layers.",
    batch_norm: "Batch normalisation.",
    sync_batch_norm: "Batch normalisation in parts, between which processes gather statistics.",
    pooling: "Pooling.",
    fractional_pool: "Max pools with random windows.",
    adaptive_pool: "Pools of a given output size.",
    upsample: "Resampling.",
    edge_pad: "Padding by reflection and replication.",
    grid_sample: "Sampling at points of a grid.",
    asserts: "What has to hold of values.",
    losses: "Losses.",
    nll: "Negative log likelihood.",
    ctc: "Connectionist temporal classification.",
    margin: "Margin losses.",
    matmul: "Matrix products.",
    quantized: "Products with weights of few bits.",
    fake_quantize: "Fake quantization.",
    grouped: "Matrix products by groups.",
    conv: "Convolutions.",
    attention: "Attention.",
    transformer: "Transformer layers whole.",
    rnn: "Recurrent cells.",
    recurrent: "Recurrent layers as loops over their steps.",
    packed: "Sequences side by side without their padding.",
    linalg: "Linear algebra.",
    lapack: "Decompositions that LAPACK has.",
    matrix_functions: "Functions of matrices.",
    fft: "Fourier transforms.",
    distance: "Distances between rows.",
    indexing: "Reads and writes by index.",
    scatter: "Scatters, and writes of whole rows.",
    embedding: "Embeddings and their gradients.",
    embedding_bag: "Sums, means and maxima of embeddings.",
    sized: "Results whose size depends on values.",
    segments: "Runs of rows whose lengths are values.",
    sorting: "Sort, top-k and search.",
    histogram: "Counts of what lies between edges.",
    sparse: "Sparse matrices by their parts.",
    memory: "When values are computed.",
    vision: "Boxes and deformable convolutions, of torchvision.",
    shape: "Joining, padding and rearranging.",
}
