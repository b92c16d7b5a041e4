//! What a platform's compiler wants of lowerings.

macro_rules! target_options {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What lowerings do one way or another for the sake of a compiler; the values are right either way, within
        /// rounding. Chosen once, when an engine starts, and part of every program key.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct TargetOptions {
            $($(#[$doc])* pub $name: bool,)*
        }

        impl TargetOptions {
            /// Nothing in particular.
            pub const NONE: TargetOptions = TargetOptions { $($name: false),* };

            /// What either of the two wants: for programs of one platform that the compiler of another has to take.
            pub const fn union(self, other: TargetOptions) -> TargetOptions {
                TargetOptions { $($name: self.$name || other.$name),* }
            }
        }
    };
}

target_options! {
    /// Whether products of bfloat16 are plain ones of fenced operands: for a compiler that picks their kernel early and
    /// then folds a transpose into them that the kernel cannot do.
    fence_bf16_dots,
    /// Whether one element of each row is picked by a mask and a sum, which fuse with what makes the rows, and not by a
    /// gather, before which the rows have to be in memory. The logarithms of a softmax are made so that they do fuse.
    gather_by_mask,
    /// Whether a product of 16-bit floats that is rounded to them at once is a product in that dtype: for a compiler that
    /// leaves products to a library, which sums in float32 and rounds what it writes.
    dots_in_16_bits,
    /// Whether products of matrices whose rows were several dimensions are those of the tensors before: where memory is in
    /// tiles, rows that are no multiple of a tile's are copied to be folded.
    keep_row_dims,
    /// Whether the backward of attention makes the scores again. Otherwise the compiler sees that they are those of the
    /// forward and keeps these, all of them, until then.
    recompute_scores,
    /// Whether attention is computed for some queries after others where the scores of all would take much memory.
    attention_in_blocks,
    /// Whether a product that is rounded at once to the bfloat16 of its operands is one with such results: for hardware that
    /// adds up in float32 all the same, and a compiler that then fuses more.
    bf16_dot_results,
    /// Whether the compiler keeps a number of 64 bits as two of 32, and has no products of integers: they are multiplications
    /// and sums then. Convolutions of such integers, and the bits of a float64, are left to the CPU.
    int64_as_pairs,
    /// Whether only floats are convolved, as in cuDNN. Convolutions of integers are left to the CPU.
    float_convolutions,
    /// Whether the largest elements are looked for among numbers alone: for a compiler whose top-k does not say where NaN
    /// comes.
    top_k_without_nan,
    /// Whether products of int8 are right only if a sum has a multiple of four terms, as those that a library for GPUs does in
    /// groups of four: the others came out doubled on an H200. They are products of int32 instead.
    int8_in_fours,
    /// Whether programs may call torch's own kernels for what takes long; see [`library`](crate::library).
    library,
    /// Whether products of float32 matrices are the compiler's all the same, where it need not transpose much: for a
    /// processor whose vector instructions it knows and torch's library of products does not.
    own_products,
}

impl TargetOptions {
    /// XLA's for processors: it leaves a bfloat16 product to its kernel library before it folds transposes into it. (That
    /// programs can call torch's kernels is up to the process that they run in.)
    pub const CPU: TargetOptions = TargetOptions { fence_bf16_dots: true, ..Self::NONE };

    /// XLA's for NVIDIA GPUs, where cuBLAS does products.
    pub const CUDA: TargetOptions = TargetOptions {
        dots_in_16_bits: true,
        recompute_scores: true,
        attention_in_blocks: true,
        top_k_without_nan: true,
        float_convolutions: true,
        int8_in_fours: true,
        ..Self::NONE
    };

    /// XLA's for TPUs, which gather element by element. Memory is in tiles there, and scores are made sooner than they are
    /// read.
    pub const TPU: TargetOptions = TargetOptions {
        gather_by_mask: true,
        keep_row_dims: true,
        recompute_scores: true,
        attention_in_blocks: true,
        bf16_dot_results: true,
        int64_as_pairs: true,
        top_k_without_nan: true,
        ..Self::NONE
    };
}
