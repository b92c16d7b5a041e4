//! What a platform's compiler wants of lowerings.

/// What lowerings do one way or another for the sake of a compiler; the values are right either way, within rounding.
/// Chosen once, when an engine starts, and part of every program key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TargetOptions {
    /// Whether products of bfloat16 are plain ones of fenced operands: for a compiler that picks their kernel early and
    /// then folds a transpose into them that the kernel cannot do.
    pub fenced_dots: bool,
    /// Whether one element of each row is picked by a mask and a sum, which fuse with what makes the rows, and not by a
    /// gather, before which the rows have to be in memory. The logarithms of a softmax are made so that they do fuse.
    pub masked_picks: bool,
    /// Whether a product of 16-bit floats that is rounded to them at once is a product in that dtype: for a compiler that
    /// leaves products to a library, which sums in float32 and rounds what it writes.
    pub rounded_dots: bool,
    /// Whether products of matrices whose rows were several dimensions are those of the tensors before: where memory is in
    /// tiles, rows that are no multiple of a tile's are copied to be folded.
    pub unfolded_products: bool,
    /// Whether the backward of attention makes the scores again. Otherwise the compiler sees that they are those of the
    /// forward and keeps these, all of them, until then.
    pub fresh_scores: bool,
    /// Whether a product that is rounded at once to the bfloat16 of its operands is one with such results: for hardware that
    /// adds up in float32 all the same, and a compiler that then fuses more.
    pub rounded_products: bool,
    /// Whether the compiler keeps a number of 64 bits as two of 32, and has no products of integers: they are multiplications
    /// and sums then. Convolutions of such integers, and the bits of a float64, are left to the CPU.
    pub split_64: bool,
    /// Whether only floats are convolved, as in cuDNN. Convolutions of integers are left to the CPU.
    pub float_convolutions: bool,
    /// Whether the largest elements are looked for among numbers alone: for a compiler whose top-k does not say where NaN
    /// comes.
    pub top_k_without_nan: bool,
    /// Whether programs may call torch's own kernels for what takes long; see [`library`](crate::library).
    pub library: bool,
}

impl TargetOptions {
    /// Nothing in particular.
    pub const NONE: TargetOptions = TargetOptions {
        fenced_dots: false,
        masked_picks: false,
        rounded_dots: false,
        unfolded_products: false,
        fresh_scores: false,
        rounded_products: false,
        split_64: false,
        top_k_without_nan: false,
        float_convolutions: false,
        library: false,
    };

    /// XLA's for processors: it leaves a bfloat16 product to its kernel library before it folds transposes into it. (That
    /// programs can call torch's kernels is up to the process that they run in.)
    pub const CPU: TargetOptions = TargetOptions { fenced_dots: true, ..Self::NONE };

    /// XLA's for NVIDIA GPUs, where cuBLAS does products.
    pub const CUDA: TargetOptions =
        TargetOptions { rounded_dots: true, top_k_without_nan: true, float_convolutions: true, ..Self::NONE };

    /// XLA's for TPUs, which gather element by element. Memory is in tiles there, and scores are made sooner than they are
    /// read.
    pub const TPU: TargetOptions = TargetOptions {
        masked_picks: true,
        unfolded_products: true,
        fresh_scores: true,
        rounded_products: true,
        split_64: true,
        top_k_without_nan: true,
        ..Self::NONE
    };

    /// What either of the two wants: for programs of one platform that the compiler of another has to take.
    pub const fn union(self, other: TargetOptions) -> TargetOptions {
        Self::from_bits(self.bits() | other.bits())
    }

    /// One bit for each.
    pub const fn bits(self) -> u16 {
        let TargetOptions {
            fenced_dots,
            masked_picks,
            rounded_dots,
            unfolded_products,
            fresh_scores,
            rounded_products,
            library,
            split_64,
            top_k_without_nan,
            float_convolutions,
        } = self;
        fenced_dots as u16
            | (masked_picks as u16) << 1
            | (rounded_dots as u16) << 2
            | (unfolded_products as u16) << 3
            | (fresh_scores as u16) << 4
            | (rounded_products as u16) << 5
            | (library as u16) << 6
            | (split_64 as u16) << 7
            | (top_k_without_nan as u16) << 8
            | (float_convolutions as u16) << 9
    }

    /// The inverse of [`TargetOptions::bits`].
    pub const fn from_bits(bits: u16) -> TargetOptions {
        TargetOptions {
            fenced_dots: bits & 1 != 0,
            masked_picks: bits & 1 << 1 != 0,
            rounded_dots: bits & 1 << 2 != 0,
            unfolded_products: bits & 1 << 3 != 0,
            fresh_scores: bits & 1 << 4 != 0,
            rounded_products: bits & 1 << 5 != 0,
            library: bits & 1 << 6 != 0,
            split_64: bits & 1 << 7 != 0,
            top_k_without_nan: bits & 1 << 8 != 0,
            float_convolutions: bits & 1 << 9 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TargetOptions;

    #[test]
    fn bits_come_back() {
        for bits in 0..1 << 10 {
            assert_eq!(TargetOptions::from_bits(bits).bits(), bits);
        }
        let both = TargetOptions::TPU.union(TargetOptions::CPU);
        assert!(both.masked_picks && both.fenced_dots && !both.rounded_dots && !both.library);
    }
}
