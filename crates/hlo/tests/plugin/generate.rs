//! Random programs from a string of numbers. Most calls fit their operands; some, on purpose, do not.

use oxitorch_hlo::*;

/// A stream of choices; zeros when it has run out.
pub(crate) struct Choices<'a> {
    numbers: std::slice::Iter<'a, u16>,
}

impl Choices<'_> {
    pub(crate) fn new(numbers: &[u16]) -> Choices<'_> {
        Choices { numbers: numbers.iter() }
    }

    fn is_empty(&self) -> bool {
        self.numbers.len() == 0
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(self.numbers.next().copied().unwrap_or(0)) % n.max(1)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn dtype(&mut self) -> DType {
        use DType::*;
        self.pick(&[F32, S32, Pred, F64, BF16, S64, U8, C64, F16, U64, F8E5M2])
    }

    fn shape(&mut self) -> Dims {
        (0..self.below(4)).map(|_| self.pick(&[1, 2, 3, 4, 0])).collect()
    }

    fn dims(&mut self, rank: usize) -> Dims {
        (0..rank as i64).filter(|_| self.below(2) == 0).collect()
    }

    fn permutation(&mut self, rank: usize) -> Dims {
        let mut left: Vec<i64> = (0..rank as i64).collect();
        (0..rank).map(|_| left.remove(self.below(left.len()))).collect()
    }
}

/// Builds a program; outputs are its last values. With `wild`, dimension numbers and operands may be nonsense.
pub(crate) fn program(b: &Builder, c: &mut Choices<'_>, wild: bool) -> Vec<Value> {
    let mut pool: Vec<Value> =
        (0..1 + c.below(3)).map(|_| b.param(TensorType::new(c.dtype(), c.shape()))).collect();
    for _ in 0..60 {
        if c.is_empty() {
            break;
        }
        let made = step(b, c, &pool, wild);
        pool.extend(made);
    }
    pool.split_off(pool.len().saturating_sub(3))
}

pub(crate) fn step(b: &Builder, c: &mut Choices<'_>, pool: &[Value], wild: bool) -> Vec<Value> {
    let x = c.pick(pool);
    let (ty, rank) = (b.ty(x), b.rank(x));
    let mut mate = Mate { pool, wild };
    match c.below(24) {
        0 => {
            let ops: Vec<Unary> =
                Unary::all().iter().copied().filter(|u| wild || u.accepts(ty.dtype)).collect();
            if ops.is_empty() { vec![] } else { vec![b.unary(c.pick(&ops), x)] }
        }
        1..=3 => {
            let ops: Vec<Binary> =
                Binary::all().iter().copied().filter(|u| wild || u.accepts(ty.dtype)).collect();
            vec![b.binary(c.pick(&ops), x, mate.of(b, c, &ty))]
        }
        4 => vec![b.compare(x, mate.of(b, c, &ty), Direction::Eq)],
        5 => vec![b.select(mate.of(b, c, &ty.with_dtype(DType::Pred)), x, mate.of(b, c, &ty))],
        6 => vec![b.convert(x, c.dtype())],
        7 => vec![b.transpose(x, &mate.dims(c, |c| c.permutation(rank)))],
        8 => vec![b.reshape(x, &mate.dims(c, |_| Dims::from_slice(&[ty.numel()])))],
        9 => {
            let shape: Dims = [c.pick(&[1, 2, 5])].into_iter().chain(ty.shape.clone()).collect();
            vec![b.broadcast_to(x, &mate.dims(c, |_| shape))]
        }
        10 => {
            let start: Dims = ty.shape.iter().map(|&n| (c.below(3) as i64).min(n)).collect();
            let stride: Dims = (0..rank).map(|_| c.pick(&[1, 2])).collect();
            vec![b.slice(x, &mate.dims(c, |_| start), &mate.dims(c, |_| ty.shape.clone()), &stride)]
        }
        11 => {
            let edge = |c: &mut Choices<'_>| (0..rank).map(|_| c.pick(&[0, 1, 2])).collect::<Dims>();
            let value = b.scalar_f64(ty.dtype, 1.0);
            vec![b.pad(x, value, &mate.dims(c, edge), &mate.dims(c, edge), &mate.dims(c, edge))]
        }
        12 if rank > 0 || wild => vec![b.concatenate(&[x, mate.of(b, c, &ty), x], c.below(rank) as i64)],
        13 => vec![b.reverse(x, &mate.dims(c, |c| c.dims(rank)))],
        14 => vec![b.reduce_sum(x, &mate.dims(c, |c| c.dims(rank)))],
        15 if !ty.dtype.is_complex() => vec![b.reduce_max(x, &mate.dims(c, |c| c.dims(rank)))],
        16 if ty.dtype != DType::Pred => {
            let contract: Dims = (0..rank as i64).collect();
            let dims = mate.dims(c, |_| contract);
            vec![b.dot_general(
                x,
                mate.of(b, c, &ty),
                &DotDims::new(&[], &[], &dims, &dims),
                Precision::High,
                None,
            )]
        }
        17 if (rank > 0 && !ty.dtype.is_complex()) || wild => {
            let at = b.iota_dim(x, DType::S32, 0);
            b.sort(&[x, at], c.below(rank) as i64, true, |b, l, r| b.lt(l[0], r[0]))
        }
        18 => b.if_(
            mate.of(b, c, &TensorType::scalar(DType::Pred)),
            |b| vec![b.add(x, b.zeros_like(x))],
            |_| vec![if wild { c.pick(pool) } else { x }],
        ),
        19 => {
            let zero = b.scalar_i64(DType::S32, 0);
            b.for_loop(zero, b.scalar_i64(DType::S32, 2), &[x], |b, _, a| {
                let captured = mate.of(b, c, &ty);
                vec![b.multiply(a[0], captured)]
            })
        }
        20 if rank > 0 => {
            let indices = b.iota(TensorType::new(DType::S64, vec![c.below(4) as i64]), 0);
            vec![b.take_dim(x, indices, c.below(rank) as i64)]
        }
        21 if rank > 0 && !ty.dtype.is_complex() => vec![b.argmin(x, c.below(rank) as i64, DType::S64).1],
        22 => b.optimization_barrier(&[x, mate.of(b, c, &ty)]),
        _ => vec![b.full_like(x, 2.0)],
    }
}

/// Chooses second operands and dimension numbers: fitting ones, or now and then nonsense if `wild`.
struct Mate<'a> {
    pool: &'a [Value],
    wild: bool,
}

impl Mate<'_> {
    fn of(&mut self, b: &Builder, c: &mut Choices<'_>, ty: &TensorType) -> Value {
        if self.wild && c.below(6) == 0 {
            return c.pick(self.pool);
        }
        let fitting: Vec<Value> = self.pool.iter().copied().filter(|&v| b.ty(v) == *ty).collect();
        if fitting.is_empty() { b.constant(ty.clone(), 1.0) } else { c.pick(&fitting) }
    }

    fn dims(&mut self, c: &mut Choices<'_>, fitting: impl FnOnce(&mut Choices<'_>) -> Dims) -> Dims {
        if self.wild && c.below(6) == 0 {
            return (0..c.below(4)).map(|_| c.pick(&[0, 1, -1, 2, 7, i64::MAX, i64::MIN])).collect();
        }
        fitting(c)
    }
}
