//! The strides of results, as PyTorch's kernels give them.

use crate::strided::row_major;
use crate::view::dense_order;
use oxitorch_aten::{Arg, Layout, TensorArg};
use oxitorch_hlo::{DType, Dims};

/// The strides of an op's result `i` after the layout rule of its row, `None` for row-major.
pub(super) fn result_strides(layout: Layout, i: usize, args: &[Arg], shape: &[i64]) -> Option<Dims> {
    let tensors = || {
        args.iter().filter_map(|a| match a {
            Arg::Tensor(t) => Some((&t.ty.shape, &t.strides)),
            _ => None,
        })
    };
    let channels =
        |t: &TensorArg| t.strides.len() == shape.len() && suggests_channels_last(&t.ty.shape, &t.strides);
    let complex = |a: &Arg| matches!(a, Arg::Tensor(t) if t.ty.dtype.is_complex());
    match layout {
        Layout::Contiguous => None,
        Layout::LikeFirst => like(tensors().next()?, shape),
        Layout::LikeFollowing => like(tensors().nth(i + 1)?, shape),
        Layout::InOrderOfFirst if i > 0 => None,
        Layout::InOrderOfFirst => {
            let (sizes, strides) = tensors().next()?;
            if sizes.as_slice() == shape {
                return like((sizes, strides), shape);
            }
            // What is expanded comes first.
            let place = |d: i64| match strides[d as usize] {
                0 => i64::MAX,
                step => step,
            };
            let mut order: Dims = (0..strides.len() as i64).collect();
            order.sort_by_key(|&d| std::cmp::Reverse(place(d)));
            (strides.len() == shape.len()).then(|| strides_in_order(shape, &order))
        }
        Layout::Attention if i == 0 => result_strides(Layout::InOrderOfFirst, i, args, shape),
        Layout::Attention | Layout::HeadsLast => heads_last(shape),
        Layout::RealPointwise if args.iter().any(complex) => None,
        Layout::Pointwise | Layout::RealPointwise => pointwise_strides(&tensors().collect::<Vec<_>>(), shape),
        Layout::ChannelsLast => {
            let last = args.iter().any(|a| match a {
                Arg::Tensor(t) => channels(t),
                Arg::Tensors(list) => !list.is_empty() && list.iter().flatten().all(channels),
                _ => false,
            });
            last.then(|| channels_last(shape))
        }
        Layout::Indexed => match args {
            [Arg::Tensor(x), Arg::Tensors(indices), ..] => indexed_strides(x, indices, shape),
            _ => None,
        },
        Layout::Matrices if tensors().next()?.0.len() != shape.len() => None,
        Layout::Matrices => column_major(shape, 1),
        Layout::Solution => {
            let left = args.iter().find_map(|a| if let Arg::Bool(left) = a { Some(*left) } else { None });
            if left? { column_major(shape, 1) } else { None }
        }
        Layout::SolutionAndMatrices if i == 0 => result_strides(Layout::Solution, i, args, shape),
        Layout::SolutionAndMatrices => result_strides(Layout::Matrices, i, args, shape),
        Layout::Transformed => transformed_strides(args, shape),
        Layout::Slices => {
            // The last argument is the count.
            let given = &args[..args.len().saturating_sub(1)];
            let dim = given.iter().find_map(|a| if let Arg::Int(dim) = a { Some(*dim) } else { None })?;
            let rank = tensors().next()?.0.len();
            (rank == shape.len()).then(|| outermost(shape, dim.rem_euclid(rank.max(1) as i64) as usize))
        }
        // `nonzero` of nothing has columns 0 apart.
        Layout::ColumnMajor => column_major(shape, 0),
    }
}

/// Strides with dimensions 1 and 2 swapped.
fn heads_last(shape: &[i64]) -> Option<Dims> {
    let mut order: Dims = (0..shape.len() as i64).collect();
    (order.len() > 2).then(|| {
        order.swap(1, 2);
        strides_in_order(shape, &order)
    })
}

/// Strides with dimension 1 fastest and the others in their order.
pub(super) fn channels_last(shape: &[i64]) -> Dims {
    let order = std::iter::once(1).chain((2..shape.len()).rev()).chain(std::iter::once(0));
    let mut strides = Dims::from_elem(1, shape.len());
    let mut step = 1;
    for d in order.filter(|&d| d < shape.len()) {
        strides[d] = step;
        step *= shape[d].max(1);
    }
    strides
}

/// Whether a tensor suggests that results be channels last: `is_channels_last_strides_2d` and `_3d` of c10.
fn suggests_channels_last(sizes: &[i64], strides: &[i64]) -> bool {
    let rank = sizes.len();
    if !matches!(rank, 4 | 5) || strides[1] == 0 {
        return false;
    }
    let mut least = 0;
    for d in std::iter::once(1).chain((2..rank).rev()).chain(std::iter::once(0)) {
        // Of the layouts that a tensor with sizes of 1 may have, row-major comes first.
        let ambiguous = d == 0 && least == strides[1];
        if sizes[d] == 0 || strides[d] < least || ambiguous {
            return false;
        }
        least = strides[d] * sizes[d].max(1);
    }
    true
}

/// Strides with the last two dimensions swapped; a column has at least this stride.
fn column_major(shape: &[i64], least: i64) -> Option<Dims> {
    let (rows, columns) = (shape.len().checked_sub(2)?, shape.len() - 1);
    let mut strides = row_major(shape);
    (strides[rows], strides[columns]) = (1, shape[rows].max(least));
    Some(strides)
}

/// `empty_like`: the strides of a dense tensor, else dense ones in the order of its dimensions.
fn like((sizes, strides): (&Dims, &Dims), shape: &[i64]) -> Option<Dims> {
    let same = sizes.as_slice() == shape && dense_order(sizes, strides).is_some();
    if same { Some(strides.clone()) } else { pointwise_strides(&[(sizes, strides)], shape) }
}

/// Dense strides with these dimensions, outermost first.
fn strides_in_order(shape: &[i64], order: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    let mut step = 1;
    for &d in order.iter().rev() {
        strides[d as usize] = step;
        step *= shape[d as usize].max(1);
    }
    strides
}

/// Row-major strides but for one dimension, which comes first.
fn outermost(shape: &[i64], dim: usize) -> Dims {
    let rest = (0..shape.len() as i64).filter(|&d| d != dim as i64);
    let order: Dims = std::iter::once(dim as i64).take(shape.len()).chain(rest).collect();
    strides_in_order(shape, &order)
}

/// `_exec_fft` of SpectralOps.cpp: dimensions that are transformed come last, the largest stride first, except that the
/// halved one of a real transform is the innermost. Back to real numbers it goes in two steps.
fn transformed_strides(args: &[Arg], shape: &[i64]) -> Option<Dims> {
    let [Arg::Tensor(x), Arg::Ints(dims), _, last, ..] = args else { return None };
    let rank = shape.len() as i64;
    let dims: Dims = dims.iter().map(|d| d.rem_euclid(rank.max(1))).collect();
    if dims.is_empty() || x.strides.len() != shape.len() {
        return Some(x.strides.clone()).filter(|_| dense_order(&x.ty.shape, &x.strides).is_some());
    }
    let real_result = matches!(last, Arg::Int(_));
    if real_result && dims.len() > 1 {
        let (halved, others) = dims.split_last()?;
        let between = transform_order(&x.strides, others, false);
        let between = strides_in_order(&x.ty.shape, &between);
        return Some(strides_in_order(shape, &transform_order(&between, &[*halved], true)));
    }
    let halves = !x.ty.dtype.is_complex();
    Some(strides_in_order(shape, &transform_order(&x.strides, &dims, halves)))
}

fn transform_order(strides: &[i64], dims: &[i64], keep_last: bool) -> Dims {
    let by_stride = |order: &mut [i64]| order.sort_by_key(|&d| std::cmp::Reverse(strides[d as usize]));
    let mut order: Dims = (0..strides.len() as i64).filter(|d| !dims.contains(d)).collect();
    by_stride(&mut order);
    let mut inner = Dims::from_slice(dims);
    let sorted = inner.len() - usize::from(keep_last);
    by_stride(&mut inner[..sorted]);
    order.extend(inner);
    order
}

/// TensorIterator's rule (`reorder_dimensions` and `allocate_or_resize_outputs`): dimensions are sorted, fastest first, by
/// the operands' strides, the first operand that decides wins, and the result is dense in that order.
fn pointwise_strides(operands: &[(&Dims, &Dims)], shape: &[i64]) -> Option<Dims> {
    let rank = shape.len();
    // A contiguous operand of the full shape settles it, and so do operands that all have the same dense strides.
    let mut full = operands.iter().filter(|(sizes, _)| sizes.as_slice() == shape);
    if operands.iter().all(|(sizes, _)| sizes.as_slice() == shape) {
        let (sizes, first) = full.next()?;
        if full.all(|(_, s)| s == first) && dense_order(sizes, first).is_some() {
            return Some((*first).clone());
        }
    }
    let broadcast: Vec<Dims> =
        operands.iter().map(|(sizes, strides)| broadcast_strides(sizes, strides, rank)).collect();
    Some(sorted_strides(&broadcast, shape))
}

/// Dense strides in the order that these strides of the operands ask for, the first operand first.
fn sorted_strides(operands: &[Dims], shape: &[i64]) -> Dims {
    let rank = shape.len();
    let mut order: Dims = (0..rank as i64).rev().collect();
    let compare = |a: i64, z: i64| -> i32 {
        for strides in operands {
            let (sa, sz) = (strides[a as usize], strides[z as usize]);
            if sa == 0 || sz == 0 {
                continue;
            }
            if sa != sz {
                return if sa < sz { -1 } else { 1 };
            }
            if shape[a as usize] > shape[z as usize] {
                return 1;
            }
        }
        0
    };
    // The insertion sort of TensorIterator, which tolerates ambiguous comparisons.
    for i in 1..rank {
        let mut at = i;
        for other in (0..i).rev() {
            match compare(order[other], order[at]) {
                1 => {
                    order.swap(other, at);
                    at = other;
                }
                -1 => break,
                _ => {}
            }
        }
    }
    let mut strides = Dims::from_elem(0, rank);
    let mut step = 1;
    for &d in &order {
        strides[d as usize] = step;
        step *= shape[d as usize].max(1);
    }
    strides
}

/// The rule for `x[indices]`: the tensor takes part with a stride of 0 in the indexed dimensions, which stand where the
/// first of them was, or in front if others lie between them.
fn indexed_strides(x: &TensorArg, indices: &[Option<TensorArg>], shape: &[i64]) -> Option<Dims> {
    if indices.iter().flatten().any(|i| matches!(i.ty.dtype, DType::Pred | DType::U8)) {
        return None;
    }
    let indexed = |d: usize| indices.get(d).is_some_and(Option::is_some);
    let first = (0..x.strides.len()).find(|&d| indexed(d))?;
    let last = (0..x.strides.len()).rfind(|&d| indexed(d))?;
    let before = if (first..=last).all(indexed) { first } else { 0 };
    let rank = indices.iter().flatten().map(|i| i.strides.len()).max()?;
    let free: Dims = (0..x.strides.len()).filter(|&d| !indexed(d)).map(|d| x.strides[d]).collect();
    if free.len() + rank != shape.len() {
        return None;
    }
    let (head, tail) = free.split_at(before);
    let mut operands = vec![Dims::from_slice(&[head, &vec![0; rank], tail].concat())];
    for i in indices.iter().flatten() {
        // An index tensor has a size of 1 in the other dimensions; its stride counts where the result has that size too.
        let stride = |d: usize, s: i64| if shape[d] == 1 { s } else { 0 };
        let head = (0..before).map(|d| stride(d, i.ty.numel()));
        let tail = (before + rank..shape.len()).map(|d| stride(d, 1));
        operands.push(head.chain(broadcast_strides(&i.ty.shape, &i.strides, rank)).chain(tail).collect());
    }
    Some(sorted_strides(&operands, shape))
}

/// Strides aligned to a result of this rank, 0 where the operand is broadcast.
fn broadcast_strides(sizes: &[i64], strides: &[i64], rank: usize) -> Dims {
    let mut out = Dims::from_elem(0, rank);
    let skip = rank.saturating_sub(sizes.len());
    for d in 0..sizes.len().min(rank) {
        if sizes[d] != 1 {
            out[skip + d] = strides[d];
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_take_the_operands_strides() {
        let d = |x: &[i64]| Dims::from_slice(x);
        let (shape, t) = (d(&[3, 2]), d(&[1, 3]));
        assert_eq!(pointwise_strides(&[(&shape, &t), (&shape, &t)], &[3, 2]), Some(t.clone()));
        // A transposed and a row-major operand: the first decides.
        assert_eq!(pointwise_strides(&[(&shape, &t), (&shape, &d(&[2, 1]))], &[3, 2]), Some(t));
        // Broadcast against a vector.
        assert_eq!(
            pointwise_strides(&[(&d(&[2]), &d(&[1])), (&shape, &d(&[1, 3]))], &[3, 2]),
            Some(d(&[1, 3]))
        );
    }
}
