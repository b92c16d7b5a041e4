//! Random bits: Philox4x32 with ten rounds, of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).

use oxitorch_hlo::{Builder, DType, TensorType, Value};

/// What the halves of the counter are multiplied with.
const MULTIPLIERS: [i64; 2] = [0xD251_1F53, 0xCD9E_8D57];

/// What the key grows by from round to round.
const WEYL: [i64; 2] = [0x9E37_79B9, 0xBB67_AE85];

const ROUNDS: i64 = 10;

/// The counter blocks of 128 bits that so many random bits take.
pub(super) fn blocks(ty: &TensorType) -> u64 {
    (ty.bytes() as u64).div_ceil(16)
}

/// Random bits of an unsigned dtype of 32 or 64 bits: a pure function of the generator's state, u64\[2\] of seed and
/// offset, and of an element's place in row-major order.
///
/// The numbers are those of `stablehlo.rng_bit_generator` with Philox as XLA expands it. That makes an array `[n / 4, 4]`
/// of the words of all blocks, which a TPU, whose memory has tiles of 8x128, keeps in 32 times its size. Here each
/// element computes its own block and takes one word of it, so that no array is made at all: XLA fuses it into what wants the
/// number. It is the faster way on CPUs as well, where XLA computes the block once for each word anyway.
pub(super) fn bits(b: &Builder, state: Value, ty: &TensorType) -> Value {
    bits_at(b, state, ty.dtype, place(b, &ty.shape, &ty.shape))
}

/// The random bits of elements at these places.
pub(super) fn bits_at(b: &Builder, state: Value, dtype: DType, place: Value) -> Value {
    let shape = &b.shape(place);
    let per_block = 128 / i64::from(dtype.bits());
    let scalar = |x: i64| b.scalar_i64(b.dtype(place), x);
    let full = |x: Value| b.full(x, shape);
    let block = b.shift_right_logical(place, full(scalar(i64::from(per_block.ilog2()))));
    let word = b.and(place, full(scalar(per_block - 1)));

    let [seed, offset] = [0, 1].map(|i| b.index_dim(state, 0, i));
    let key = split(b, seed);
    // The offset counts blocks and does not come near 2^64.
    let counter = b.add(full(offset), b.convert(block, DType::U64));
    let [low, high] = split(b, counter);
    let [x, y, z, w] = rounds(b, [low, high, full(key[0]), full(key[1])], key, shape);

    let is = |i: i64| b.eq(word, full(scalar(i)));
    if per_block == 4 {
        return b.select(is(0), x, b.select(is(1), y, b.select(is(2), z, w)));
    }
    let first = is(0);
    let [low, high] = [b.select(first, x, z), b.select(first, y, w)].map(|v| b.convert(v, DType::U64));
    b.or(low, b.shift_left(high, full(b.scalar_i64(DType::U64, 32))))
}

/// The state behind the bits of this type.
pub(super) fn after(b: &Builder, state: Value, ty: &TensorType) -> Value {
    b.add(state, b.vector_i64(DType::U64, &[0, blocks(ty) as i64]))
}

/// The place of each element in row-major order: of those of an array of this shape at the start of one of the shape
/// `whole`.
pub(super) fn place(b: &Builder, shape: &[i64], whole: &[i64]) -> Value {
    let wide = whole.iter().product::<i64>() > i64::from(u32::MAX);
    let ty = TensorType::new(if wide { DType::U64 } else { DType::U32 }, shape);
    let mut stride = 1;
    let mut place = None;
    for (dim, &size) in shape.iter().enumerate().rev() {
        if size != 1 {
            let i = b.iota(ty.clone(), dim as i64);
            let i =
                if stride == 1 { i } else { b.multiply(i, b.full(b.scalar_i64(ty.dtype, stride), shape)) };
            place = Some(place.map_or(i, |p| b.add(i, p)));
        }
        stride *= whole[dim];
    }
    place.unwrap_or_else(|| b.full(b.scalar_i64(ty.dtype, 0), shape))
}

/// The halves of 64-bit words, the lower first.
fn split(b: &Builder, x: Value) -> [Value; 2] {
    let high = b.shift_right_logical(x, b.full_like(x, 32.0));
    [b.convert(x, DType::U32), b.convert(high, DType::U32)]
}

fn rounds(b: &Builder, mut counter: [Value; 4], key: [Value; 2], shape: &[i64]) -> [Value; 4] {
    let full = |x: Value| b.full(x, shape);
    let factors = MULTIPLIERS.map(|m| full(b.scalar_i64(DType::U64, m)));
    for round in 0..ROUNDS {
        let [x, y, z, w] = counter;
        let product = |v: Value, factor: Value| split(b, b.multiply(b.convert(v, DType::U64), factor));
        let ([low0, high0], [low1, high1]) = (product(x, factors[0]), product(z, factors[1]));
        let key = [0, 1].map(|i| {
            let grown = (WEYL[i] * round) & i64::from(u32::MAX);
            full(if round == 0 { key[i] } else { b.add(key[i], b.scalar_i64(DType::U32, grown)) })
        });
        counter = [b.xor(b.xor(high1, y), key[0]), low1, b.xor(b.xor(high0, w), key[1]), low0];
    }
    counter
}
