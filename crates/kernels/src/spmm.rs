//! The product of a sparse matrix with a dense one, as a host function of programs that run in host memory: compiled
//! code would write an update for each element before it adds them up.

use crate::UNKNOWN;
use oxitorch_aten::families::sparse::SPMM;
use oxitorch_pjrt::{self as pjrt, ElementType, HostCall, HostElement, HostError};
use parking_lot::Mutex;
use std::ops::{AddAssign, Mul, Range};

/// Columns of a row that are summed up in registers.
const BLOCK: usize = 32;
/// Multiplications that are worth a thread.
const PER_THREAD: usize = 1 << 16;

/// Makes the function known to a plugin whose programs run in host memory.
pub(super) fn register(plugin: &pjrt::Plugin) -> pjrt::Result<()> {
    plugin.register_host_fn(SPMM, |call| match call.results.first().map(|r| r.dtype) {
        Some(ElementType::F32) => run::<f32>(call),
        Some(ElementType::F64) => run::<f64>(call),
        other => Err(format!("{SPMM}: a result of {other:?}").into()),
    })
}

/// Operands: row and column numbers \[nnz\], values \[nnz\], the dense matrix \[k, n\]; the result is \[m, n\].
fn run<T>(call: &mut HostCall<'_>) -> Result<(), HostError>
where
    T: HostElement + Default + Mul<Output = T> + AddAssign + Send + Sync,
{
    let ([rows, columns, values, dense], [result]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let (&[k, n], &[m, _]) = (&dense.dims[..], &result.dims[..]) else { return Err(UNKNOWN.into()) };
    let numbers = rows.values::<i64>().zip(columns.values::<i64>());
    let floats = values.values::<T>().zip(dense.values::<T>()).zip(result.values_mut::<T>());
    let (Some((rows, columns)), Some(((values, dense), result))) = (numbers, floats) else {
        return Err(UNKNOWN.into());
    };
    let (k, n, m) = (k as usize, n as usize, m as usize);
    in_range(rows, m, "row")?;
    in_range(columns, k, "column")?;
    let by_row = ByRow::new(rows, m);
    let parts = (rows.len() * n).div_ceil(PER_THREAD).clamp(1, call.threads.count());
    let mut pieces = Vec::with_capacity(parts);
    let mut rest = result;
    for range in by_row.cut(parts) {
        let (piece, after) = rest.split_at_mut(range.len() * n);
        pieces.push(Mutex::new((range, piece)));
        rest = after;
    }
    call.threads.share(pieces.len(), &|i| {
        let (range, piece) = &mut *pieces[i].lock();
        for (row, out) in range.clone().zip(piece.chunks_exact_mut(n.max(1))) {
            let elements = || by_row.elements(row).map(|e| (values[e], columns[e] as usize * n));
            let (blocks, rest) = out.as_chunks_mut::<BLOCK>();
            for (i, block) in blocks.iter_mut().enumerate() {
                let mut sums = [T::default(); BLOCK];
                for (value, from) in elements() {
                    let from = from + i * BLOCK;
                    sums.iter_mut().zip(&dense[from..from + BLOCK]).for_each(|(s, &d)| *s += value * d);
                }
                *block = sums;
            }
            rest.fill(T::default());
            let done = n - rest.len();
            for (value, from) in elements() {
                rest.iter_mut().zip(&dense[from + done..from + n]).for_each(|(s, &d)| *s += value * d);
            }
        }
    });
    Ok(())
}

fn in_range(index: &[i64], size: usize, what: &str) -> Result<(), String> {
    match index.iter().find(|&&i| i < 0 || i as usize >= size) {
        None => Ok(()),
        Some(i) => Err(format!("mm: index out of {what} bound: {i} is not between 0 and {size}")),
    }
}

/// Elements in the order of their rows; those of a row in the order in which they were given.
struct ByRow {
    /// Where the elements of each row begin, and where the last ones end.
    starts: Vec<usize>,
    /// The elements; empty if they were in that order.
    order: Vec<usize>,
}

impl ByRow {
    fn new(rows: &[i64], m: usize) -> ByRow {
        let mut starts = vec![0; m + 1];
        rows.iter().for_each(|&row| starts[row as usize + 1] += 1);
        for row in 0..m {
            starts[row + 1] += starts[row];
        }
        let mut order = Vec::new();
        if !rows.is_sorted() {
            let mut next = starts.clone();
            order.resize(rows.len(), 0);
            for (e, &row) in rows.iter().enumerate() {
                order[next[row as usize]] = e;
                next[row as usize] += 1;
            }
        }
        ByRow { starts, order }
    }

    fn elements(&self, row: usize) -> impl Iterator<Item = usize> {
        let places = self.starts[row]..self.starts[row + 1];
        places.map(|place| self.order.get(place).copied().unwrap_or(place))
    }

    /// Ranges of rows with about as many elements each.
    fn cut(&self, parts: usize) -> impl Iterator<Item = Range<usize>> {
        let (m, nnz) = (self.starts.len() - 1, self.starts[self.starts.len() - 1]);
        let end = move |i: usize| {
            if i == parts { m } else { self.starts.partition_point(|&s| s < nnz * i / parts).min(m) }
        };
        (0..parts).map(move |i| if i == 0 { 0 } else { end(i) }..end(i + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::ByRow;

    #[test]
    fn elements_are_grouped_by_row_in_their_order() {
        let rows = [2, 0, 2, 1, 0];
        let by_row = ByRow::new(&rows, 4);
        let found: Vec<Vec<usize>> = (0..4).map(|row| by_row.elements(row).collect()).collect();
        assert_eq!(found, [vec![1, 4], vec![3], vec![0, 2], vec![]]);
    }

    #[test]
    fn parts_cover_all_rows_once() {
        for rows in [vec![], vec![0; 9], vec![3, 3, 3, 1, 7, 7]] {
            for parts in 1..6 {
                let by_row = ByRow::new(&rows, 8);
                let covered: Vec<usize> = by_row.cut(parts).flatten().collect();
                assert_eq!(covered, (0..8).collect::<Vec<_>>(), "{rows:?} in {parts}");
            }
        }
    }
}
