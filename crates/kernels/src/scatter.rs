//! Elements that are added up where an index says: compiled code takes one after another, each with its bounds, and writes
//! out what they are added to once more.
//!
//! A tensor is \[outer, n, inner\], its elements \[outer, m, inner\]. The index is \[rows, m, inner or 1\]: each row of it is of
//! as many outer places as there are for it.

use crate::{UNKNOWN, cut};
use oxitorch_aten::families::scatter::SCATTER_ADD;
use oxitorch_pjrt::{self as pjrt, ElementType, HostCall, HostElement, HostError};
use parking_lot::Mutex;
use std::ops::{AddAssign, Range};

pub(super) fn register(plugin: &pjrt::Plugin) -> pjrt::Result<()> {
    plugin.register_host_fn(SCATTER_ADD, |call| {
        let types = (call.results.first().map(|r| r.dtype), call.args.first().map(|a| a.dtype));
        match types {
            (Some(ElementType::F32), Some(ElementType::S32)) => add::<f32, i32>(call),
            (Some(ElementType::F32), Some(ElementType::S64)) => add::<f32, i64>(call),
            (Some(ElementType::F64), Some(ElementType::S32)) => add::<f64, i32>(call),
            (Some(ElementType::F64), Some(ElementType::S64)) => add::<f64, i64>(call),
            (result, index) => Err(format!("{SCATTER_ADD}: {result:?} by {index:?}").into()),
        }
    })
}

/// Operands: the index, the elements, and what they are added to, unless that is zeros.
fn add<T, I>(call: &mut HostCall<'_>) -> Result<(), HostError>
where
    T: HostElement + Default + AddAssign + Send + Sync,
    I: HostElement + TryInto<usize> + Sync,
{
    let ([index, updates, base @ ..], [result]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let shape = Shape::of(&result.dims, &updates.dims, &index.dims).ok_or(UNKNOWN)?;
    let (Some(index), Some(updates), Some(mut rest)) =
        (index.values::<I>(), updates.values::<T>(), result.values_mut::<T>())
    else {
        return Err(UNKNOWN.into());
    };
    let base = match base {
        [] => None,
        [base] => Some(base.values::<T>().filter(|base| base.len() == rest.len()).ok_or(UNKNOWN)?),
        _ => return Err(UNKNOWN.into()),
    };
    let mut pieces = Vec::new();
    let mut start = 0;
    for (places, targets) in shape.cut(call.threads.count()) {
        let (out, after) = rest.split_at_mut(places.len() * targets.len() * shape.inner);
        let before = base.map(|base| &base[start..start + out.len()]);
        start += out.len();
        pieces.push(Mutex::new((places, targets, before, out)));
        rest = after;
    }
    call.threads.share(pieces.len(), &|i| {
        let (places, targets, before, out) = &mut *pieces[i].lock();
        match before {
            Some(before) => out.copy_from_slice(before),
            None => out.fill(T::default()),
        }
        let span = (targets.len() * shape.inner).max(1);
        for (place, out) in places.clone().zip(out.chunks_exact_mut(span)) {
            shape.add(&index[shape.index_of(place)], &updates[shape.updates_of(place)], targets, out);
        }
    });
    Ok(())
}

struct Shape {
    outer: usize,
    n: usize,
    m: usize,
    inner: usize,
    /// Of the index.
    rows: usize,
    /// How many elements of the index there are for each of the `m`: one, or one for each of `inner`.
    wide: usize,
}

impl Shape {
    fn of(result: &[i64], updates: &[i64], index: &[i64]) -> Option<Shape> {
        let (&[outer, n, inner], &[outer_too, m, inner_too], &[rows, m_too, wide]) = (result, updates, index)
        else {
            return None;
        };
        let whole = rows > 0 && outer % rows == 0 && (wide == 1 || wide == inner);
        let fits = outer == outer_too && inner == inner_too && m == m_too && whole;
        let [outer, n, m, inner, rows, wide] = [outer, n, m, inner, rows, wide].map(|n| n as usize);
        fits.then_some(Shape { outer, n, m, inner, rows, wide })
    }

    fn index_of(&self, place: usize) -> Range<usize> {
        let (row, size) = (place / (self.outer / self.rows), self.m * self.wide);
        row * size..(row + 1) * size
    }

    fn updates_of(&self, place: usize) -> Range<usize> {
        let size = self.m * self.inner;
        place * size..(place + 1) * size
    }

    /// Parts of the result in the order of memory: outer places, and which of the `n` of each. Each part adds up its own
    /// elements, in their order, so that results do not depend on how many parts there are.
    fn cut(&self, threads: usize) -> Vec<(Range<usize>, Range<usize>)> {
        cut(self.outer * self.m.max(self.n) * self.inner, self.outer, self.n, threads)
    }

    /// Adds the elements of one outer place, those that go to `targets`, which `out` has.
    fn add<T: Copy + AddAssign, I: Copy + TryInto<usize>>(
        &self,
        index: &[I],
        updates: &[T],
        targets: &Range<usize>,
        out: &mut [T],
    ) {
        let inner = self.inner;
        // What is no target, or not of this part, is beyond its end.
        let at = |i: I| i.try_into().unwrap_or(usize::MAX).wrapping_sub(targets.start);
        if inner == 1 {
            for (&i, &update) in index.iter().zip(updates) {
                if let Some(sum) = out.get_mut(at(i)) {
                    *sum += update;
                }
            }
        } else if self.wide == 1 {
            for (&i, updates) in index.iter().zip(updates.chunks_exact(inner)) {
                let i = at(i);
                if i < targets.len() {
                    let sums = &mut out[i * inner..(i + 1) * inner];
                    sums.iter_mut().zip(updates).for_each(|(sum, &update)| *sum += update);
                }
            }
        } else {
            for (index, updates) in index.chunks_exact(inner).zip(updates.chunks_exact(inner)) {
                for (column, (&i, &update)) in index.iter().zip(updates).enumerate() {
                    let i = at(i);
                    if i < targets.len() {
                        out[i * inner + column] += update;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outer, n, m, inner, rows of the index, and how wide it is.
    const SHAPES: [[usize; 6]; 9] = [
        [1, 7, 50, 1, 1, 1],
        [3, 7, 50, 1, 3, 1],
        [6, 5, 20, 1, 2, 1],
        [1, 9, 30, 4, 1, 1],
        [1, 9, 30, 4, 1, 4],
        [4, 3, 8, 5, 2, 5],
        [2, 0, 3, 4, 1, 1],
        [2, 4, 0, 4, 1, 4],
        [0, 4, 3, 2, 1, 2],
    ];

    #[test]
    fn parts_add_up_what_the_whole_does() {
        for [outer, n, m, inner, rows, wide] in SHAPES {
            let shape = Shape { outer, n, m, inner, rows, wide };
            // Some are beyond either end.
            let index: Vec<i64> = (0..rows * m * wide).map(|i| (i * 7919 % (n + 2)) as i64 - 1).collect();
            let updates: Vec<f64> = (0..outer * m * inner).map(|i| i as f64 + 0.5).collect();
            let mut want = vec![0.0; outer * n * inner];
            for place in 0..outer {
                for (j, column) in (0..m).flat_map(|j| (0..inner).map(move |column| (j, column))) {
                    let at = index[shape.index_of(place)][j * wide + column % wide];
                    if let Some(at) = usize::try_from(at).ok().filter(|&at| at < n) {
                        want[(place * n + at) * inner + column] +=
                            updates[shape.updates_of(place)][j * inner + column];
                    }
                }
            }
            for cut in [
                vec![(0..outer, 0..n)],
                (0..outer).flat_map(|o| (0..n).map(move |t| (o..o + 1, t..t + 1))).collect(),
            ] {
                let mut got = Vec::new();
                for (places, targets) in cut {
                    for place in places {
                        let mut out = vec![0.0; targets.len() * inner];
                        shape.add(
                            &index[shape.index_of(place)],
                            &updates[shape.updates_of(place)],
                            &targets,
                            &mut out,
                        );
                        got.extend(out);
                    }
                }
                assert_eq!(got, want, "{outer} {n} {m} {inner} {rows} {wide}");
            }
        }
    }
}
