//! Strided views as StableHLO: reading one out of a storage's value, and writing one into it.
//!
//! A view whose strides nest (each divides the next larger one) is a box in the storage seen as a suitable grid: a read is
//! reshape, slice, transpose, broadcast, and a write is a dynamic_update_slice. Everything else goes through flat indices,
//! gather and scatter.
//!
//! A [`Shape`] is a view without its offset. Where it begins is told by [`Offset`]s: one for each level of the grid that
//! is cut, or the place of the first element where there is no grid.

use crate::strided::{Steps, row_major};
use oxitorch_aten::args::Offset;
use oxitorch_hlo::{Builder, DType, Dims, GatherDims, ScatterDims, ScatterFlags, TensorType, Value};
use smallvec::SmallVec;

/// A strided view of a storage: what PyTorch's tensor metadata says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Element type of the view, perhaps not that of the storage's value.
    pub dtype: DType,
    /// Sizes.
    pub sizes: Dims,
    /// Strides in elements.
    pub strides: Dims,
    /// Offset of the first element, in elements.
    pub offset: i64,
    /// Whether its elements are the conjugates of the stored ones.
    pub conj: bool,
    /// Whether its elements are the stored ones negated.
    pub neg: bool,
}

/// One dimension of the grid that a view is a box of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Level {
    /// Elements between neighbours.
    stride: i64,
    /// Where the box begins.
    start: i64,
    /// How long it is.
    size: i64,
    /// The view's dimension; `None` for the place inside the innermost stride.
    dim: Option<usize>,
}

impl View {
    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.sizes.iter().product()
    }

    /// The type of the view as a tensor.
    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.sizes.clone())
    }

    /// Whether its elements are the stored ones.
    pub fn is_plain(&self) -> bool {
        !self.conj && !self.neg
    }

    /// Stored elements to shown ones, and back.
    fn apply_bits(&self, b: &Builder, x: Value) -> Value {
        let x = if self.neg { b.negate(x) } else { x };
        if self.conj && b.dtype(x).is_complex() { b.complex(b.real(x), b.negate(b.imag(x))) } else { x }
    }

    /// Whether two places of the view are one place of the storage by a stride of zero.
    pub fn is_expanded(&self) -> bool {
        self.sizes.iter().zip(&self.strides).any(|(&n, &s)| n > 1 && s == 0)
    }

    /// The grid, outermost level first, if the view is a box.
    fn levels(&self) -> Option<Vec<Level>> {
        let mut levels: Vec<Level> = Vec::new();
        let dims = (0..self.sizes.len()).filter(|&d| self.sizes[d] != 1 && self.strides[d] != 0);
        let mut dims: Vec<usize> = dims.collect();
        dims.sort_by_key(|&d| std::cmp::Reverse(self.strides[d]));
        for d in dims {
            levels.push(Level { stride: self.strides[d], start: 0, size: self.sizes[d], dim: Some(d) });
        }
        if levels.last().is_none_or(|l| l.stride != 1) {
            levels.push(Level { stride: 1, start: 0, size: 1, dim: None });
        }
        let mut rest = self.offset;
        for level in &mut levels {
            level.start = rest / level.stride;
            rest %= level.stride;
        }
        let nests = |w: &[Level]| {
            w[0].stride % w[1].stride == 0 && w[1].start + w[1].size <= w[0].stride / w[1].stride
        };
        levels.windows(2).all(nests).then_some(levels)
    }
}

/// A view without its offset: what an instance is made for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// The view at its storage's first element.
    at_zero: View,
    /// The grid that it is a box of, with starts of 0, outermost level first; none if it is no box.
    grid: Option<Box<[Cut]>>,
}

/// A level of a grid, and whether it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Cut {
    level: Level,
    /// How long the grid is there.
    extent: i64,
}

impl Cut {
    /// Whether the box may begin at another place.
    fn is_free(&self) -> bool {
        self.level.size < self.extent
    }
}

/// The offsets of one instance.
pub(crate) type Offsets = SmallVec<[i64; 4]>;

impl Shape {
    /// The shape of a view of a value of this type.
    pub(crate) fn of(view: &View, base: &TensorType) -> Shape {
        let at_zero = View { offset: 0, ..view.clone() };
        if view.numel() == 0 {
            return Shape { at_zero, grid: None };
        }
        let grid = view.levels().map(|mut levels| {
            if base.dtype == view.dtype {
                refine(&mut levels, &row_major(&base.shape));
            }
            let n = base.bytes() / view.dtype.size_bytes() as i64;
            let mut around = None;
            let cut = |mut level: Level| {
                level.start = 0;
                let outer = around.replace(level.stride);
                let extent = outer.map_or((n + level.stride - 1) / level.stride, |o| o / level.stride);
                Cut { level, extent }
            };
            levels.into_iter().map(cut).collect()
        });
        Shape { at_zero, grid }
    }

    /// The view at its storage's first element.
    pub(crate) fn at_zero(&self) -> &View {
        &self.at_zero
    }

    /// The view's type as a tensor.
    pub(crate) fn ty(&self) -> TensorType {
        self.at_zero.ty()
    }

    /// The view's strides in elements.
    pub(crate) fn strides(&self) -> &[i64] {
        &self.at_zero.strides
    }

    /// Whether it is a box of a grid.
    pub(crate) fn is_box(&self) -> bool {
        self.grid.is_some()
    }

    /// How many offsets say where it begins.
    pub(crate) fn offsets(&self) -> usize {
        match &self.grid {
            Some(grid) => grid.iter().filter(|c| c.is_free()).count(),
            None => usize::from(self.at_zero.numel() > 0),
        }
    }

    /// Along which strides its offsets say where it begins, if each does along one; else none.
    pub(crate) fn along(&self) -> impl Iterator<Item = i64> {
        self.grid.iter().flatten().filter(|c| c.is_free()).map(|c| c.level.stride)
    }

    /// How long it is along what it is cut to, and how long that is without the cut.
    pub(crate) fn cuts(&self) -> impl Iterator<Item = (i64, i64)> {
        self.grid.iter().flatten().filter(|c| c.is_free()).map(|c| (c.level.size, c.extent))
    }

    /// The offsets of the view that begins at this element; none if that one is not a box of the grid.
    pub(crate) fn place(&self, offset: i64) -> Option<Offsets> {
        let Some(grid) = &self.grid else {
            return Some(std::iter::repeat_n(offset, self.offsets()).collect());
        };
        let mut rest = offset;
        let mut offsets = Offsets::new();
        for cut in grid {
            let start = rest / cut.level.stride;
            rest %= cut.level.stride;
            if start + cut.level.size > cut.extent {
                return None;
            }
            if cut.is_free() {
                offsets.push(start);
            }
        }
        Some(offsets)
    }

    /// The view, if the program is made for its offsets.
    fn known(&self, offsets: &[Offset]) -> Option<View> {
        let mut offsets = offsets.iter();
        let mut next = || offsets.next().and_then(|o| o.known());
        let offset = match &self.grid {
            _ if self.at_zero.numel() == 0 => 0,
            Some(grid) => {
                let free = grid.iter().filter(|c| c.is_free());
                free.map(|c| Some(next()? * c.level.stride)).sum::<Option<i64>>()?
            }
            None => next()?,
        };
        Some(View { offset, ..self.at_zero.clone() })
    }

    fn levels(grid: &[Cut]) -> Vec<Level> {
        grid.iter().map(|c| c.level).collect()
    }

    /// Where the box begins in each level.
    fn starts(&self, b: &Builder, grid: &[Cut], offsets: &[Offset], dtype: DType) -> Vec<Value> {
        let mut offsets = offsets.iter();
        let start = |c: &Cut| {
            let offset = if c.is_free() { offsets.next() } else { None };
            offset.map_or_else(|| b.scalar_i64(dtype, 0), |o| o.value(b, dtype))
        };
        grid.iter().map(start).collect()
    }

    /// The elements of the view of a storage's value.
    pub(crate) fn read(&self, b: &Builder, base: Value, offsets: &[Offset]) -> Value {
        if let Some(view) = self.known(offsets) {
            return read(b, base, &view);
        }
        let view = &self.at_zero;
        let flat = flat(b, base, view.dtype);
        let dtype = index_dtype(b.dim(flat, 0));
        let shown = match &self.grid {
            Some(cuts) => {
                let levels = Self::levels(cuts);
                let (grid, _) = grid(b, flat, &levels, false);
                let starts = self.starts(b, cuts, offsets, dtype);
                let part = b.dynamic_slice(grid, &starts, &levels.iter().map(|l| l.size).collect::<Dims>());
                arrange(b, part, &levels, view)
            }
            None => read_indexed(b, flat, view, offsets[0].value(b, dtype)),
        };
        view.apply_bits(b, shown)
    }

    /// The storage's value after the view was overwritten.
    pub(crate) fn write(&self, b: &Builder, base: Value, update: Value, offsets: &[Offset]) -> Value {
        if let Some(view) = self.known(offsets) {
            return write(b, base, update, &view);
        }
        let (base_ty, view) = (b.ty(base), &self.at_zero);
        let update = view.apply_bits(b, update);
        let flat = flat(b, base, view.dtype);
        let dtype = index_dtype(b.dim(flat, 0));
        let written = match &self.grid {
            Some(cuts) if !view.is_expanded() => {
                let starts = self.starts(b, cuts, offsets, dtype);
                write_box(b, flat, update, view, &Self::levels(cuts), &starts)
            }
            // An expanded box: where its first element is.
            Some(cuts) => {
                let starts = self.starts(b, cuts, offsets, dtype);
                let steps = starts.iter().zip(cuts.iter());
                let steps = steps.map(|(&s, c)| b.multiply(s, b.scalar_i64(dtype, c.level.stride)));
                let first = steps.reduce(|x, y| b.add(x, y)).unwrap_or_else(|| b.scalar_i64(dtype, 0));
                write_indexed(b, flat, update, view, first)
            }
            None => write_indexed(b, flat, update, view, offsets[0].value(b, dtype)),
        };
        restore(b, base, written, &base_ty)
    }
}

/// Adds the storage's own strides to the levels, where the box does not cross them: so that the grid is the storage's value
/// as it is, which a device with tiles would have to copy to see it otherwise.
fn refine(levels: &mut Vec<Level>, strides: &[i64]) {
    for &stride in strides {
        let at = levels.partition_point(|l| l.stride > stride);
        let around = at.checked_sub(1).map(|i| levels[i].stride);
        let Some(inner) = levels.get(at).copied().filter(|l| l.stride < stride) else { continue };
        let room = stride / inner.stride;
        let fits = stride % inner.stride == 0 && inner.start % room + inner.size <= room;
        if fits && around.is_none_or(|a| a % stride == 0) {
            levels[at].start = inner.start % room;
            levels.insert(at, Level { stride, start: inner.start / room, size: 1, dim: None });
        }
    }
}

fn index_dtype(extent: i64) -> DType {
    if extent <= i64::from(i32::MAX) { DType::S32 } else { DType::S64 }
}

/// The order of dimensions, slowest first, in which sizes and strides are row-major without gaps.
pub(crate) fn dense_order(sizes: &[i64], strides: &[i64]) -> Option<Dims> {
    let mut order: Dims = (0..sizes.len() as i64).collect();
    if sizes.contains(&0) {
        return Some(order);
    }
    // Sizes of 1 may have any stride: they keep their place among equals.
    order.sort_by_key(|&d| {
        std::cmp::Reverse(if sizes[d as usize] < 2 { i64::MAX } else { strides[d as usize] })
    });
    let mut expected = 1;
    for &d in order.iter().rev() {
        let (n, s) = (sizes[d as usize], strides[d as usize]);
        if n > 1 && s != expected {
            return None;
        }
        expected *= n;
    }
    if is_identity(&order, sizes) { Some((0..sizes.len() as i64).collect()) } else { Some(order) }
}

fn is_identity(order: &[i64], sizes: &[i64]) -> bool {
    let real = order.iter().filter(|&&d| sizes[d as usize] != 1);
    real.clone().zip(real.skip(1)).all(|(a, b)| a < b)
}

/// The elements of a view.
pub(crate) fn read(b: &Builder, base: Value, view: &View) -> Value {
    if view.numel() == 0 {
        return b.full(b.scalar_f64(view.dtype, 0.0), &view.sizes);
    }
    let levels = view.levels();
    let is_box = levels.is_some();
    // Whether a view is a box may depend on a size that varies, as that of every other column does. A step may, too, and one
    // of many places rather does: the last column of a matrix is a box.
    let shown = match steps(b, base, view, is_box && !b.is_outline()) {
        Some(steps) if !is_box || steps.are_small() => steps.read(b, base, &view.sizes),
        _ => {
            let flat = flat(b, base, view.dtype);
            match levels.filter(|_| !(b.is_outline() && crosses(&b.shape(base), view))) {
                Some(levels) => read_box(b, flat, view, &levels),
                None => read_indexed(b, flat, view, first(b, flat, view)),
            }
        }
    };
    view.apply_bits(b, shown)
}

/// How the view goes along the dimensions of a value, if it does and is no box.
fn steps(b: &Builder, base: Value, view: &View, is_box: bool) -> Option<Steps> {
    if is_box || b.dtype(base) != view.dtype {
        return None;
    }
    Steps::along(&b.shape(base), &view.sizes, &view.strides, view.offset)
}

/// Whether a view goes along two dimensions of a value at once, as a diagonal does. In which grid that is a box, if any,
/// depends on which of the two is longer.
fn crosses(shape: &[i64], view: &View) -> bool {
    let own = row_major(shape);
    let long: Vec<i64> = own.iter().zip(shape).filter(|&(_, &n)| n > 1).map(|(&stride, _)| stride).collect();
    let is_sum = |stride: i64| {
        let of = |(i, a): (usize, &i64)| long[i + 1..].iter().any(|b| a + b == stride);
        long.iter().enumerate().any(of)
    };
    view.sizes.iter().zip(&view.strides).any(|(&n, &stride)| n != 1 && is_sum(stride))
}

/// The place of the view's first element.
fn first(b: &Builder, flat: Value, view: &View) -> Value {
    b.scalar_i64(index_dtype(b.dim(flat, 0)), view.offset)
}

fn read_box(b: &Builder, flat: Value, view: &View, levels: &[Level]) -> Value {
    let merged = merged(levels);
    let (grid, _) = grid(b, flat, &merged, true);
    let start: Dims = merged.iter().map(|l| l.start).collect();
    let limit: Dims = merged.iter().map(|l| l.start + l.size).collect();
    let part = b.slice(grid, &start, &limit, &Dims::from_elem(1, merged.len()));
    arrange(b, part, levels, view)
}

/// A box of the grid as the view shows it.
fn arrange(b: &Builder, part: Value, levels: &[Level], view: &View) -> Value {
    let kept: Vec<&Level> = levels.iter().filter(|l| l.dim.is_some()).collect();
    let part = b.reshape(part, &kept.iter().map(|l| l.size).collect::<Dims>());
    // Box order to the view's order, then the sizes 1 and the expanded dimensions.
    let mut order: Vec<usize> = (0..kept.len()).collect();
    order.sort_by_key(|&i| kept[i].dim);
    let part = b.transpose(part, &order.iter().map(|&i| i as i64).collect::<Dims>());
    let dims: Dims = order.iter().filter_map(|&i| kept[i].dim).map(|d| d as i64).collect();
    b.broadcast_in_dim(part, &view.sizes, &dims)
}

/// The same box in fewer levels: a level that is whole is part of the one around it if that is cut, so that heads are cut
/// out of a packed projection before it is split into heads, which a device with tiles may have to copy.
fn merged(levels: &[Level]) -> Vec<Level> {
    let mut merged: Vec<Level> = Vec::with_capacity(levels.len());
    for &inner in levels {
        if let [.., around, outer] = merged.as_mut_slice() {
            let room = outer.stride / inner.stride;
            let is_cut = outer.size < around.stride / outer.stride;
            if is_cut && (inner.start, inner.size) == (0, room) {
                *outer = Level { start: outer.start * room, size: outer.size * room, ..inner };
                continue;
            }
        }
        merged.push(inner);
    }
    merged
}

/// The storage as the grid of the levels. For reads the tail that no level needs is cut off; otherwise the storage is
/// padded to whole rows. Also gives the number of elements before that.
fn grid(b: &Builder, flat: Value, levels: &[Level], cut: bool) -> (Value, i64) {
    let n = b.dim(flat, 0);
    let outer = levels[0];
    let need = (outer.start + outer.size) * outer.stride;
    let rows =
        if cut && need <= n { outer.start + outer.size } else { (n + outer.stride - 1) / outer.stride };
    let total = rows * outer.stride;
    let whole = if total <= n {
        b.slice_dim(flat, 0, 0, total, 1)
    } else {
        b.pad_dim(flat, b.scalar_f64(b.dtype(flat), 0.0), 0, 0, total - n)
    };
    let mut shape = Dims::from_elem(rows, 1);
    shape.extend(levels.windows(2).map(|w| w[0].stride / w[1].stride));
    (b.reshape(whole, &shape), n)
}

/// Flat indices of the view's elements, in the view's shape, from the place of its first on.
fn indices(b: &Builder, view: &View, first: Value) -> Value {
    let dtype = b.dtype(first);
    let ty = TensorType::new(dtype, view.sizes.clone());
    let mut sum = b.full(first, &view.sizes);
    for (d, &stride) in view.strides.iter().enumerate() {
        if view.sizes[d] != 1 && stride != 0 {
            let step = b.full(b.scalar_i64(dtype, stride), &view.sizes);
            sum = b.add(sum, b.multiply(b.iota(ty.clone(), d as i64), step));
        }
    }
    sum
}

fn read_indexed(b: &Builder, flat: Value, view: &View, first: Value) -> Value {
    let index = indices(b, view, first);
    let rank = view.sizes.len() as i64;
    let dims = GatherDims {
        collapsed_slice_dims: Dims::from_elem(0, 1),
        start_index_map: Dims::from_elem(0, 1),
        index_vector_dim: rank,
        ..GatherDims::default()
    };
    b.gather(flat, index, &dims, &[1], false)
}

/// The storage's value after a view of it was overwritten: of type `base_ty`, or of `update`'s where that covers all.
pub(crate) fn write(b: &Builder, base: Value, update: Value, view: &View) -> Value {
    let base_ty = b.ty(base);
    if view.numel() == 0 {
        return base;
    }
    let update = view.apply_bits(b, update);
    let levels = view.levels().filter(|_| !view.is_expanded());
    if !view.is_expanded()
        && let Some(steps) = steps(b, base, view, levels.is_some())
    {
        return steps.write(b, base, update);
    }
    let flat = flat(b, base, view.dtype);
    let written = match levels {
        Some(levels) => {
            let dtype = index_dtype(b.dim(flat, 0));
            let starts: Vec<Value> = levels.iter().map(|l| b.scalar_i64(dtype, l.start)).collect();
            write_box(b, flat, update, view, &levels, &starts)
        }
        None => write_indexed(b, flat, update, view, first(b, flat, view)),
    };
    restore(b, base, written, &base_ty)
}

fn write_box(
    b: &Builder,
    flat: Value,
    update: Value,
    view: &View,
    levels: &[Level],
    starts: &[Value],
) -> Value {
    let order: Dims = levels.iter().filter_map(|l| l.dim).map(|d| d as i64).collect();
    let ones: Dims = (0..view.sizes.len() as i64).filter(|&d| view.sizes[d as usize] == 1).collect();
    let squeezed = b.squeeze(update, &ones);
    // Positions of the remaining dimensions after the sizes of 1 are gone.
    let position = |d: i64| d - ones.iter().filter(|&&o| o < d).count() as i64;
    let part = b.transpose(squeezed, &order.iter().map(|&d| position(d)).collect::<Dims>());
    let part = b.reshape(part, &levels.iter().map(|l| l.size).collect::<Dims>());
    let (grid, n) = grid(b, flat, levels, false);
    let written = b.overwrite(grid, part, starts);
    let total = b.numel(written);
    b.slice_dim(b.reshape(written, &[total]), 0, 0, n, 1)
}

fn write_indexed(b: &Builder, flat: Value, update: Value, view: &View, first: Value) -> Value {
    let extent = b.dim(flat, 0);
    let mut index = indices(b, view, first);
    if view.is_expanded() {
        // Several places of the view are one of the storage: those that stay as they are must not undo a change. A
        // scatter leaves places out of bounds alone.
        let nowhere = b.full(b.scalar_i64(b.dtype(index), extent), &view.sizes);
        index = b.select(changed(b, read_indexed(b, flat, view, first), update), index, nowhere);
    }
    let dims = ScatterDims {
        inserted_window_dims: Dims::from_elem(0, 1),
        scatter_dims_to_operand_dims: Dims::from_elem(0, 1),
        index_vector_dim: view.sizes.len() as i64,
        ..ScatterDims::default()
    };
    let flags = ScatterFlags::default();
    b.scatter(&[flat], index, &[update], &dims, flags, |_, _, new| new.to_vec())[0]
}

/// Where two tensors differ in any bit.
fn changed(b: &Builder, old: Value, new: Value) -> Value {
    let dtype = b.dtype(old);
    if dtype.is_complex() {
        let real = changed(b, b.real(old), b.real(new));
        return b.or(real, changed(b, b.imag(old), b.imag(new)));
    }
    let bits = match dtype.size_bytes() {
        _ if !dtype.is_float() => return b.ne(old, new),
        1 => DType::U8,
        2 => DType::U16,
        4 => DType::U32,
        _ => DType::U64,
    };
    b.ne(b.bitcast_convert(old, bits), b.bitcast_convert(new, bits))
}

/// Puts the written elements back under the storage's own type; bytes that the view cannot name stay.
fn restore(b: &Builder, base: Value, written: Value, base_ty: &TensorType) -> Value {
    if b.dtype(written) == base_ty.dtype && b.numel(written) == base_ty.numel() {
        return b.reshape(written, &base_ty.shape);
    }
    let head = reinterpret(b, written, base_ty.dtype);
    let n = base_ty.numel();
    let old = b.reshape(base, &[n]);
    let tail = b.slice_dim(old, 0, b.dim(head, 0).min(n), n, 1);
    b.reshape(b.concatenate(&[head, tail], 0), &base_ty.shape)
}

/// A value as a 1-d tensor of another element type over the same bytes; trailing bytes that make no element are left out.
pub(crate) fn flat(b: &Builder, x: Value, dtype: DType) -> Value {
    let n = b.numel(x);
    reinterpret(b, b.reshape(x, &[n]), dtype)
}

fn reinterpret(b: &Builder, x: Value, to: DType) -> Value {
    let from = b.dtype(x);
    if from == to {
        return x;
    }
    // StableHLO has no bit casts of bool and complex: go through bytes and through parts.
    if from == DType::Pred {
        return reinterpret(b, b.convert(x, DType::U8), to);
    }
    if from.is_complex() {
        let n = b.dim(x, 0);
        let parts = [b.real(x), b.imag(x)].map(|p| b.reshape(p, &[n, 1]));
        return reinterpret(b, b.reshape(b.concatenate(&parts, 1), &[2 * n]), to);
    }
    if to == DType::Pred {
        let bytes = reinterpret(b, x, DType::U8);
        return b.ne(bytes, b.zeros_like(bytes));
    }
    if to.is_complex() {
        let parts = reinterpret(b, x, to.real());
        let n = b.dim(parts, 0) / 2;
        let pairs = b.reshape(b.slice_dim(parts, 0, 0, 2 * n, 1), &[n, 2]);
        return b.complex(b.index_dim(pairs, 1, 0), b.index_dim(pairs, 1, 1));
    }
    let (a, z) = (from.size_bytes() as i64, to.size_bytes() as i64);
    // XLA makes one bitcast of two, and gets its shape wrong where the middle element is the largest.
    let x = if a == z { x } else { b.optimization_barrier(&[x])[0] };
    let n = b.dim(x, 0);
    if a >= z {
        let parts = b.bitcast_convert(x, to);
        return b.reshape(parts, &[n * (a / z)]);
    }
    let ratio = z / a;
    let whole = b.slice_dim(x, 0, 0, n / ratio * ratio, 1);
    b.bitcast_convert(b.reshape(whole, &[n / ratio, ratio]), to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(sizes: &[i64], strides: &[i64], offset: i64) -> View {
        View {
            dtype: DType::F32,
            sizes: sizes.into(),
            strides: strides.into(),
            offset,
            conj: false,
            neg: false,
        }
    }

    #[test]
    fn nested_strides_are_a_box() {
        // x[1:3, 2:4].t() of a 4x6 matrix
        let levels = view(&[2, 2], &[1, 6], 8).levels().expect("a box");
        let starts: Vec<_> = levels.iter().map(|l| (l.start, l.size, l.dim)).collect();
        assert_eq!(starts, [(1, 2, Some(1)), (2, 2, Some(0))]);
    }

    #[test]
    fn steps_are_a_box_with_a_place_inside() {
        let levels = view(&[3], &[4], 1).levels().expect("a box");
        assert_eq!(levels.len(), 2);
        assert_eq!((levels[1].start, levels[1].size, levels[1].dim), (1, 1, None));
    }

    #[test]
    fn heads_are_cut_out_before_they_are_split() {
        // The second of three parts of 2 heads of 4 elements, for 5 places.
        let heads = view(&[2, 5, 4], &[4, 24, 1], 8).levels().expect("a box");
        let all: Vec<_> = merged(&heads).iter().map(|l| (l.stride, l.start, l.size)).collect();
        assert_eq!(all, [(24, 0, 5), (1, 8, 8)]);
        // Nothing is cut, or not from one side of the other.
        for (sizes, strides) in [([5, 6, 4], [24, 4, 1]), ([5, 2, 3], [24, 4, 1])] {
            let levels = view(&sizes, &strides, 0).levels().expect("a box");
            assert_eq!(merged(&levels), levels);
        }
    }

    #[test]
    fn windows_and_diagonals() {
        assert!(view(&[3, 3], &[1, 1], 0).levels().is_none(), "overlapping windows are no box");
        assert!(view(&[3, 2], &[3, 2], 0).levels().is_none(), "strides that do not divide are no box");
        assert!(view(&[3], &[4], 0).levels().is_some(), "a diagonal is a column of a wider grid");
        assert!(view(&[2, 4], &[6, 1], 4).levels().is_none(), "a window that crosses rows is no box");
    }

    #[test]
    fn dense_orders() {
        assert_eq!(dense_order(&[2, 3], &[3, 1]).as_deref(), Some(&[0, 1][..]));
        assert_eq!(dense_order(&[2, 3], &[1, 2]).as_deref(), Some(&[1, 0][..]));
        assert_eq!(dense_order(&[2, 1, 3], &[3, 77, 1]).as_deref(), Some(&[0, 1, 2][..]));
        assert_eq!(dense_order(&[2, 3], &[4, 1]), None);
        assert_eq!(dense_order(&[5, 0], &[1, 1]).as_deref(), Some(&[0, 1][..]), "nothing is in any order");
        assert_eq!(dense_order(&[2, 3, 4, 5], &[60, 1, 15, 3]).as_deref(), Some(&[0, 2, 3, 1][..]));
    }
}
