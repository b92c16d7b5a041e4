//! What tiles waste: of the matrix unit's work in products whose sizes do not fill it, and of the memory of tensors.
//!
//! Two facts stand behind it. The matrix unit is a square of 128 x 128 or 256 x 256 multipliers: it holds a block of one
//! operand, and the other's rows go through it, eight at a time (cloud.google.com/tpu/docs/system-architecture-tpu-vm and
//! performance-guide). And arrays lie in memory in tiles of eight rows of 128 elements (openxla.org/xla/tiled_layout).

use std::collections::BTreeMap;

use oxitorch_capture::{Products, Program, TensorType};
use oxitorch_hlo::DType;
use serde::Serialize;

use super::tensors::tensors;
use crate::hardware::{Chip, passes};

/// What the tiles of a step waste.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Padding {
    /// Rows and columns of the matrix unit.
    pub(crate) unit: u64,
    /// The share of the matrix unit's work that is padding.
    pub(crate) share: f64,
    /// The products with the padding.
    pub(crate) padded_flops: f64,
    /// What the matrix unit needs for them with the padding.
    pub(crate) mxu_s: f64,
    /// The products that waste most.
    pub(crate) products: Vec<Wasteful>,
    /// Arguments and outputs of the step's programs, and what they take in tiles.
    pub(crate) tensor_bytes: u64,
    pub(crate) tensor_padded_bytes: u64,
    /// Those that waste most.
    pub(crate) tensors: Vec<Spread>,
}

/// Products of a step that are alike, made by one line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Wasteful {
    pub(crate) op: Option<String>,
    pub(crate) line: Option<String>,
    pub(crate) dtype: &'static str,
    pub(crate) batch: f64,
    pub(crate) m: f64,
    pub(crate) n: f64,
    pub(crate) k: f64,
    /// In a step.
    pub(crate) count: f64,
    pub(crate) flops: f64,
    pub(crate) padded_flops: f64,
    /// The share that is not padding.
    pub(crate) useful: f64,
    pub(crate) advice: String,
    /// Passes of the matrix unit for each operation.
    #[serde(skip)]
    passes: f64,
}

impl Wasteful {
    fn wasted(&self) -> f64 {
        self.passes * (self.padded_flops - self.flops)
    }
}

/// A tensor that takes more memory than it has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Spread {
    /// `argument` or `output`.
    pub(crate) role: &'static str,
    pub(crate) r#type: TensorType,
    pub(crate) bytes: u64,
    pub(crate) padded_bytes: u64,
    pub(crate) line: Option<String>,
}

/// Products and tensors that are named.
const NAMED: usize = 16;

impl Padding {
    /// Of programs with the number of their launches in a step.
    pub(crate) fn of<'p>(chip: &Chip, programs: impl Iterator<Item = (&'p Program, u64)> + Clone) -> Padding {
        let mut padding = Padding { unit: chip.mxu, ..Padding::default() };
        padding.take_products(chip, programs.clone());
        padding.take_tensors(programs.map(|(p, _)| p));
        padding
    }

    fn take_products<'p>(&mut self, chip: &Chip, programs: impl Iterator<Item = (&'p Program, u64)>) {
        let mut alike: BTreeMap<String, Wasteful> = BTreeMap::new();
        for (p, launches) in programs {
            for (i, product) in p.products.iter().enumerate().filter(|(_, p)| p.flops > 0.0) {
                let found = wasteful(product, launches as f64, chip.mxu);
                // Those of which the line is not known are not alike.
                let whose = product.line.clone().unwrap_or_else(|| format!("{} {i}", p.id));
                let what =
                    (product.op.as_deref(), &product.dtype, product.batch, product.m, product.n, product.k);
                match alike.entry(format!("{whose} {what:?}")) {
                    std::collections::btree_map::Entry::Vacant(place) => _ = place.insert(found),
                    std::collections::btree_map::Entry::Occupied(mut known) => {
                        let known = known.get_mut();
                        known.count += found.count;
                        known.flops += found.flops;
                        known.padded_flops += found.padded_flops;
                    }
                }
            }
        }
        let mut all: Vec<Wasteful> = alike.into_values().collect();
        let sum = |of: &dyn Fn(&Wasteful) -> f64| all.iter().map(of).sum::<f64>();
        let work = sum(&|p| p.passes * p.padded_flops);
        self.padded_flops = sum(&|p| p.padded_flops);
        self.mxu_s = work / chip.device_flops();
        self.share = if work > 0.0 { sum(&Wasteful::wasted) / work } else { 0.0 };
        all.retain(|p| p.useful < 1.0);
        all.sort_by(|a, b| b.wasted().total_cmp(&a.wasted()));
        all.truncate(NAMED);
        self.products = all;
    }

    fn take_tensors<'p>(&mut self, programs: impl Iterator<Item = &'p Program>) {
        let mut all = Vec::new();
        for p in programs {
            let mut places: BTreeMap<TensorType, usize> = BTreeMap::new();
            for t in tensors(p) {
                let taken = places.entry(t.r#type.clone()).or_default();
                *taken += usize::from(t.overwritten);
                if t.role == "output" && *taken > 0 {
                    *taken -= 1; // it has the memory of an argument, which was counted
                    continue;
                }
                let Some(padded) = padded_bytes(&t.r#type) else { continue };
                // Of what is split over chips nobody knows which dimension is how long on one.
                let element = element_bytes(t.r#type.dtype);
                let whole = element.and_then(|e| t.r#type.shape.iter().try_fold(e, |n, d| n.checked_mul(*d)));
                let padded = if whole == Some(t.bytes) { padded.max(t.bytes) } else { t.bytes };
                self.tensor_bytes += t.bytes;
                self.tensor_padded_bytes += padded;
                if padded > t.bytes {
                    all.push(Spread {
                        role: t.role,
                        r#type: t.r#type,
                        bytes: t.bytes,
                        padded_bytes: padded,
                        line: t.line,
                    });
                }
            }
        }
        all.sort_by_key(|t| std::cmp::Reverse(t.padded_bytes - t.bytes));
        all.truncate(NAMED);
        self.tensors = all;
    }
}

/// The next multiple.
fn up(n: f64, of: f64) -> f64 {
    (n / of).ceil() * of
}

/// Rows that go through the matrix unit at a time.
const ROWS: f64 = 8.0;

/// A product in the matrix unit, each by itself. Either operand can be the one that lies still, so the better way is taken.
fn wasteful(p: &Products, launches: f64, unit: u64) -> Wasteful {
    let u = unit as f64;
    let as_it_is = up(p.m, ROWS) * up(p.n, u);
    let turned = up(p.n, ROWS) * up(p.m, u);
    let (moving, still) =
        if as_it_is <= turned { (("m", p.m), ("n", p.n)) } else { (("n", p.n), ("m", p.m)) };
    let blown = as_it_is.min(turned) * up(p.k, u) / (p.m * p.n * p.k);
    let flops = p.flops * launches;
    // Zeros between a dilated convolution's elements are left out of the count and cannot be of whole rows.
    let blown = if blown.is_finite() { blown.max(1.0) } else { 1.0 };
    Wasteful {
        op: p.op.clone(),
        line: p.line.clone(),
        dtype: p.dtype.torch_name(),
        batch: p.batch,
        m: p.m,
        n: p.n,
        k: p.k,
        count: p.count as f64 * launches,
        flops,
        padded_flops: flops * blown,
        useful: 1.0 / blown,
        advice: advice(moving, still, p, u),
        passes: passes(p.dtype, p.precision),
    }
}

/// What to do about the size that wastes most.
fn advice(moving: (&str, f64), still: (&str, f64), p: &Products, unit: f64) -> String {
    let sizes = [(moving, ROWS), (still, unit), (("k", p.k), unit)];
    let waste = |((_, n), of): &((&str, f64), f64)| up(*n, *of) / n;
    let worst = sizes.iter().max_by(|a, b| waste(a).total_cmp(&waste(b)));
    let Some(&((name, n), of)) = worst else { return String::new() };
    let to = up(n, of);
    match () {
        () if to == n => String::new(),
        () if of == ROWS && n < unit => {
            format!("{name} = {n}: the unit takes rows by eight; make it a multiple of 8")
        }
        () if n >= unit => format!("{name} = {n}: pad it to {}", up(n, unit)),
        () if p.batch > 1.0 => {
            let idle = 100.0 * (1.0 - n / of);
            format!("{name} = {n}: {idle:.0} % of the unit is idle; a head dimension of {of} fills it")
        }
        () => {
            let idle = 100.0 * (1.0 - n / of);
            format!("{name} = {n}: {idle:.0} % of the unit is idle; a size of {of} fills it")
        }
    }
}

/// The bytes of an element in memory, where they are known.
fn element_bytes(dtype: DType) -> Option<u64> {
    Some(match dtype {
        DType::Pred | DType::S8 | DType::U8 | DType::F8E4M3FN | DType::F8E5M2 => 1,
        DType::BF16 | DType::F16 | DType::S16 | DType::U16 => 2,
        DType::F32 | DType::S32 | DType::U32 => 4,
        // The compiler makes pairs of 32 bits of these.
        DType::F64 | DType::S64 | DType::U64 | DType::C64 => 8,
        DType::C128 => return None,
    })
}

/// What a tensor takes in tiles, as libtpu 0.0.51 lays out arguments and results: of two or more dimensions it takes the
/// two innermost that waste least; a tile has 128 columns and eight rows, or fewer where there are fewer, but 4 bytes in
/// each column at least. One dimension lies in blocks of 1024 elements, or the next power of two;
/// a number takes as much as the least of those.
fn padded_bytes(ty: &TensorType) -> Option<u64> {
    let (element, shape) = (element_bytes(ty.dtype)?, &ty.shape);
    let packed = (4 / element).max(1);
    let elements = match shape[..] {
        [] => 128 * packed,
        _ if shape.contains(&0) => return Some(0),
        [n] if n >= 1024 => n.checked_next_multiple_of(1024)?,
        [n] => n.next_power_of_two().max(128 * packed),
        _ => {
            let rows = |n: u64| if n < 8 { n.next_power_of_two().max(packed) } else { n.next_multiple_of(8) };
            let pairs =
                (0..shape.len()).flat_map(|a| (0..shape.len()).map(move |b| (a, b))).filter(|(a, b)| a != b);
            let sizes = pairs.filter_map(|(a, b)| {
                let others = (0..shape.len()).filter(|i| *i != a && *i != b).map(|i| shape[i]);
                let tile = rows(shape[b]).checked_mul(shape[a].next_multiple_of(128))?;
                others.into_iter().try_fold(tile, u64::checked_mul)
            });
            sizes.min()?
        }
    };
    elements.checked_mul(element)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Slice;
    use oxitorch_capture::{Input, Output};
    use oxitorch_hlo::Precision;

    fn ty(text: &str) -> TensorType {
        text.parse().unwrap()
    }

    fn captured(products: &[Products]) -> Program {
        let x = Input { line: Some("a.py:1".into()), ..Input::new(ty("float32[1000, 3]"), 12000) };
        let w = Input { donated: true, ..Input::new(ty("float32[128, 128]"), 65536) };
        let outputs = [("float32[128, 128]", 65536), ("float32[1000]", 4000)];
        Program {
            id: "a".into(),
            inputs: vec![x, w],
            outputs: outputs.map(|(t, bytes)| Output::new(Some(ty(t)), bytes, 0)).into(),
            launches: vec![(0, 2)],
            products: products.into(),
            ..Program::default()
        }
    }

    fn product(batch: f64, m: f64, n: f64, k: f64, line: &str) -> Products {
        Products {
            dtype: DType::BF16,
            precision: Precision::Default,
            batch,
            m,
            n,
            k,
            op: Some("mm".into()),
            line: Some(line.into()),
            count: 1,
            flops: 2.0 * batch * m * n * k,
        }
    }

    fn padding(slice: &str, products: &[Products]) -> Padding {
        let p = captured(products);
        Padding::of(Slice::parse(slice).unwrap().chip().unwrap(), [(&p, 2)].into_iter())
    }

    #[track_caller]
    fn check(slice: &str, sizes: [f64; 4], useful: f64, advice: &str) {
        let [batch, m, n, k] = sizes;
        let padding = padding(slice, &[product(batch, m, n, k, "a.py:1")]);
        let p = &padding.products[0];
        assert!((p.useful - useful).abs() < 1e-9, "{}", p.useful);
        assert!((padding.share - (1.0 - useful)).abs() < 1e-9);
        assert!(p.advice.contains(advice), "{}", p.advice);
        assert_eq!(p.flops, 2.0 * 2.0 * batch * m * n * k);
    }

    #[test]
    fn a_head_of_64_leaves_half_of_the_unit_idle() {
        check(
            "v5e-1",
            [12.0, 1024.0, 1024.0, 64.0],
            0.5,
            "50 % of the unit is idle; a head dimension of 128 fills it",
        );
        check(
            "v6e-1",
            [12.0, 1024.0, 1024.0, 64.0],
            0.25,
            "75 % of the unit is idle; a head dimension of 256",
        );
        // The other operand can lie still: then the 64 are rows that go through.
        assert!(padding("v5e-1", &[product(12.0, 1024.0, 64.0, 1024.0, "a.py:1")]).products.is_empty());
    }

    #[test]
    fn odd_sizes_are_padded() {
        check("v5e-1", [1.0, 1024.0, 50257.0, 768.0], 50257.0 / 50264.0, "n = 50257: pad it to 50304");
        check("v5e-1", [1.0, 1024.0, 768.0, 50257.0], 50257.0 / 50304.0, "k = 50257: pad it to 50304");
        check("v5e-1", [1.0, 6.0, 256.0, 256.0], 0.75, "m = 6: the unit takes rows by eight");
        check("v5e-1", [1.0, 1024.0, 1024.0, 100.0], 100.0 / 128.0, "a size of 128 fills it");
    }

    #[test]
    fn products_of_a_line_are_one_and_the_worst_is_first() {
        let line = |k: f64, line: &str| product(1.0, 128.0, 128.0, k, line);
        let found = padding(
            "v5e-1",
            &[line(64.0, "a.py:1"), line(64.0, "a.py:1"), line(1.0, "a.py:2"), line(128.0, "a.py:3")],
        );
        let told: Vec<_> = found.products.iter().map(|p| (p.line.as_deref().unwrap(), p.count)).collect();
        assert_eq!(told, [("a.py:1", 4.0), ("a.py:2", 2.0)]);
        // Four blocks go through the unit; of one nothing is padding, of two the half, of one nearly all.
        assert!((found.share - (2.0 * 0.5 + 127.0 / 128.0) / 4.0).abs() < 1e-9);
        assert!((found.mxu_s - 2.0 * 4.0 * 2.0 * 128f64.powi(3) / 197e12).abs() < 1e-15);
    }

    #[test]
    fn tensors_lie_in_tiles() {
        // What libtpu 0.0.51 says of one argument of such a type.
        for (ty, elements, bytes) in [
            ("float32[9, 130]", 4096, 4),
            ("bfloat16[9, 130]", 4096, 2),
            ("float32[1000]", 1024, 4),
            ("float32[100, 3]", 512, 4),
            ("float32[3, 5, 7, 33]", 15360, 4),
            ("float32[1, 300]", 384, 4),
            ("bfloat16[1, 300]", 768, 2),
            ("int8[1, 300]", 1536, 1),
            ("int8[64, 64]", 8192, 1),
            ("float32[12, 50257]", 804864, 4),
            ("bool[50257]", 51200, 1),
            ("float32[7]", 128, 4),
            ("bfloat16[7]", 256, 2),
            ("float32[129]", 256, 4),
            ("float32[64, 3, 3, 3]", 4608, 4),
            ("float32[32, 12, 1024, 64]", 25165824, 4),
            ("bfloat16[3, 224, 224]", 172032, 2),
            ("float32[130, 200, 3]", 104448, 4),
            ("float32[6, 1024, 3]", 24576, 4),
        ] {
            assert_eq!(padded_bytes(&self::ty(ty)), Some(elements * bytes), "{ty}");
        }
        assert_eq!(padded_bytes(&ty("float32[]")), Some(512));
        assert_eq!(padded_bytes(&ty("int64[]")), Some(1024));
        assert_eq!(padded_bytes(&ty("float32[0, 5]")), Some(0));
        assert_eq!(padded_bytes(&ty("complex128[5]")), None);
    }

    #[test]
    fn the_tiles_of_what_is_split_over_chips_are_not_known() {
        let mut p = captured(&[]);
        p.inputs.iter_mut().zip([3000, 16384]).for_each(|(i, bytes)| i.bytes = bytes);
        p.outputs.iter_mut().zip([16384, 1000]).for_each(|(o, bytes)| o.bytes = bytes);
        let chip = Slice::parse("v5e-4").unwrap().chip().unwrap();
        let found = Padding::of(chip, [(&p, 1)].into_iter());
        assert_eq!((found.tensor_bytes, found.tensor_padded_bytes), (20384, 20384));
    }

    #[test]
    fn an_output_in_the_place_of_an_argument_counts_once() {
        let found = padding("v5e-1", &[]);
        assert_eq!(found.tensor_bytes, 12000 + 65536 + 4000);
        assert_eq!(found.tensor_padded_bytes, 1024 * 4 * 4 + 65536 + 4096);
        let told: Vec<_> = found.tensors.iter().map(|t| (t.role, t.padded_bytes - t.bytes)).collect();
        assert_eq!(told, [("argument", 4384), ("output", 96)]);
    }
}
